"""Kernels name their arithmetic. Their seals cover it, so they are emptied, and the store fills them again."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    with op.batch_alter_table("hadagen_kernels") as batch:
        batch.add_column(sa.Column("arithmetic", sa.String, nullable=False, server_default=""))
    with op.batch_alter_table("hadagen_kernels") as batch:
        batch.alter_column("arithmetic", server_default=None)
    op.get_bind().execute(sa.update(sa.table("hadagen_kernels", sa.column("seal"))).values(seal=""))
