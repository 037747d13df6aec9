"""Kernels that start early. What was there did not."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # The default is for the rows that are there; new ones always say.
    with op.batch_alter_table("hadagen_kernels") as kernels:
        kernels.add_column(sa.Column("starts_early", sa.Boolean, nullable=False, server_default=sa.false()))
    with op.batch_alter_table("hadagen_kernels") as kernels:
        kernels.alter_column("starts_early", server_default=None)
