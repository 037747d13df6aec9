"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "hadagen_problems",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("dtype", sa.String, nullable=False),
        sa.Column("numerics", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hadagen_problems"),
        sa.UniqueConstraint("n", "dtype", "numerics", name="uq_hadagen_problems"),
    )
    op.create_table(
        "hadagen_environments",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("gpu", sa.String, nullable=False),
        sa.Column("compute_capability", sa.String, nullable=False),
        sa.Column("sms", sa.Integer, nullable=False),
        sa.Column("l2_bytes", sa.BigInteger, nullable=False),
        sa.Column("driver", sa.String, nullable=False),
        sa.Column("cuda", sa.String, nullable=False),
        sa.Column("nvcc", sa.String, nullable=False),
        sa.Column("sm_clock_mhz", sa.Integer, nullable=False),
        sa.Column("memory_clock_mhz", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hadagen_environments"),
        sa.UniqueConstraint(
            "gpu",
            "compute_capability",
            "sms",
            "l2_bytes",
            "driver",
            "cuda",
            "nvcc",
            "sm_clock_mhz",
            "memory_clock_mhz",
            name="uq_hadagen_environments",
        ),
    )
    op.create_table(
        "hadagen_kernels",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("entry", sa.String, nullable=False),
        sa.Column("arch", sa.String, nullable=False),
        sa.Column("threads", sa.Integer, nullable=False),
        sa.Column("cluster", sa.Integer, nullable=False),
        sa.Column("shared_bytes", sa.Integer, nullable=False),
        sa.Column("tile_elements", sa.BigInteger, nullable=False),
        sa.Column("persistent", sa.Boolean, nullable=False),
        sa.Column("registers", sa.Integer, nullable=False),
        sa.Column("spill_bytes", sa.Integer, nullable=False),
        sa.Column("static_shared_bytes", sa.Integer, nullable=False),
        sa.Column("nvcc", sa.String, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("ptx", sa.LargeBinary, nullable=False),
        sa.Column("cubin", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hadagen_kernels"),
        sa.UniqueConstraint("digest", name="uq_hadagen_kernels"),
    )
    op.create_table(
        "hadagen_trials",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("problem_id", sa.Integer, nullable=False),
        sa.Column("environment_id", sa.Integer, nullable=False),
        sa.Column("kernel_id", sa.Integer, nullable=True),
        sa.Column("arch", sa.String, nullable=False),
        sa.Column("knobs", sa.JSON, nullable=False),
        sa.Column("knobs_key", sa.String, nullable=False),
        sa.Column("provenance", sa.String, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("date", sa.String, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_hadagen_trials"),
        sa.UniqueConstraint(
            "problem_id", "arch", "knobs_key", "environment_id", "provenance", name="uq_hadagen_trials"
        ),
        sa.ForeignKeyConstraint(["problem_id"], ["hadagen_problems.id"], name="fk_hadagen_trials_problem_id"),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["hadagen_environments.id"], name="fk_hadagen_trials_environment_id"
        ),
        sa.ForeignKeyConstraint(["kernel_id"], ["hadagen_kernels.id"], name="fk_hadagen_trials_kernel_id"),
    )
    op.create_index("ix_hadagen_trials_kernel_id", "hadagen_trials", ["kernel_id"])
    op.create_table(
        "hadagen_errors",
        sa.Column("trial_id", sa.Integer, nullable=False),
        sa.Column("input_class", sa.String, nullable=False),
        sa.Column("relative_error", sa.Double, nullable=True),
        sa.PrimaryKeyConstraint("trial_id", "input_class", name="pk_hadagen_errors"),
        sa.ForeignKeyConstraint(["trial_id"], ["hadagen_trials.id"], name="fk_hadagen_errors_trial_id"),
    )
    op.create_table(
        "hadagen_timings",
        sa.Column("trial_id", sa.Integer, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("elements", sa.BigInteger, nullable=False),
        sa.Column("destination", sa.String, nullable=False),
        sa.Column("cache", sa.String, nullable=False),
        sa.Column("us", sa.Double, nullable=False),
        sa.Column("us_low", sa.Double, nullable=False),
        sa.Column("us_high", sa.Double, nullable=False),
        sa.Column("copy_us", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "position", name="pk_hadagen_timings"),
        sa.ForeignKeyConstraint(["trial_id"], ["hadagen_trials.id"], name="fk_hadagen_timings_trial_id"),
    )
