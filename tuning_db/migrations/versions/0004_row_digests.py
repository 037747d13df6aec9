"""Seals of kernels and trials: SHA-256 of all that they say. Those of rows that are there stay empty, for the store to
fill."""

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
