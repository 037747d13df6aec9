"""Seals of kernels and trials: SHA-256 of all their values. Those of existing rows stay empty; the store fills them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for table in ("hadagen_kernels", "hadagen_trials"):
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column("seal", sa.String, nullable=False, server_default=""))
        with op.batch_alter_table(table) as batch:
            batch.alter_column("seal", server_default=None)
