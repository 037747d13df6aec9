"""Kernels that start early; older kernels do not. And trials of kernels that could read a tile too early."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # The default is for existing rows; new rows always have a value.
    with op.batch_alter_table("hadagen_kernels") as kernels:
        kernels.add_column(sa.Column("starts_early", sa.Boolean, nullable=False, server_default=sa.false()))
    with op.batch_alter_table("hadagen_kernels") as kernels:
        kernels.alter_column("starts_early", server_default=None)
    # They lack the fence between reading a tile and the bulk copy of the next. Verification could not show that then.
    op.execute(
        "UPDATE hadagen_trials SET outcome = 'unstable', detail = 'its bulk copies lack a fence' "
        "WHERE outcome = 'ok' AND kernel_id IN "
        "(SELECT id FROM hadagen_kernels WHERE persistent AND source LIKE '%bulk_copy(%')"
    )
