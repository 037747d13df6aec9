"""The work that runs have in progress, so that two runs on one database do not do the same."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "hadagen_claims",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("problem_id", sa.Integer, nullable=False),
        sa.Column("arch", sa.String, nullable=False),
        sa.Column("gpu", sa.String, nullable=False),
        sa.Column("work", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hadagen_claims"),
        sa.ForeignKeyConstraint(["problem_id"], ["hadagen_problems.id"], name="fk_hadagen_claims_problem_id"),
        sa.UniqueConstraint("problem_id", "arch", "gpu", "work", name="uq_hadagen_claims"),
    )
