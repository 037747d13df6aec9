"""Environments name memory and power limit. Those of older rows are 0, which seals leave out, so seals still hold."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

FORMER = (
    *("gpu", "compute_capability", "sms", "l2_bytes", "driver", "cuda", "nvcc"),
    *("sm_clock_mhz", "memory_clock_mhz"),
)
ADDED = {"memory_bytes": sa.BigInteger, "power_limit_watts": sa.Integer}


def upgrade() -> None:
    # The defaults are for existing rows; new rows always have values.
    with op.batch_alter_table("hadagen_environments") as environments:
        for name, kind in ADDED.items():
            environments.add_column(sa.Column(name, kind, nullable=False, server_default="0"))
        environments.drop_constraint("uq_hadagen_environments", type_="unique")
        environments.create_unique_constraint("uq_hadagen_environments", [*FORMER, *ADDED])
    with op.batch_alter_table("hadagen_environments") as environments:
        for name in ADDED:
            environments.alter_column(name, server_default=None)
