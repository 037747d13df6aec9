"""Kernels that quantize may round between steps if they are "fast", and keep 16 bits if they are "accurate". Before,
all that could round were "accurate", and "fast" ones rounded more often. Where none can round, there is no "fast" any
more; what was measured as such counts as wrong. Seals cover the key of a problem, so all these trials lose theirs."""

import re

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

KEY = re.compile("(n([0-9]+)(?:-k([0-9]+))?(?:-swapped)?(?:-signed)?-([a-z0-9]+)-to-([a-z0-9_]+)-)(accurate|fast)")
ROUNDED = re.compile("int4_.*|.*_convrot|.*_rounded")  # formats of values that are rounded to 16 bits first
PROBLEMS = sa.table("hadagen_problems", *map(sa.column, ("id", "key")))
CELL = ("arch", "knobs_key", "environment_id", "provenance")  # a problem has one trial for each value of these columns
TRIALS = sa.table("hadagen_trials", *map(sa.column, ("id", "problem_id", *CELL, "outcome", "detail", "seal")))
OF_TRIALS = [sa.table(f"hadagen_{name}", sa.column("trial_id")) for name in ("errors", "timings")]
CLAIMS = sa.table("hadagen_claims", sa.column("problem_id"))
WRONG = {"outcome": "wrong_answer", "detail": "its scale came in 16-bit parts, which is not done for codes any more"}


def upgrade() -> None:
    connection = op.get_bind()
    numbers: dict[str, dict[str, int]] = {}
    rounds: dict[str, bool] = {}
    for number, key in connection.execute(sa.select(PROBLEMS.c.id, PROBLEMS.c.key)).all():
        if found := KEY.fullmatch(key):
            start, n, order, dtype, form, numerics = found.groups()
            between = int(n) > int(order) and not ROUNDED.fullmatch(form) if order else int(n) >= 256
            numbers.setdefault(start, {})[numerics] = number
            rounds[start] = dtype == "bfloat16" and between
    for start, of in numbers.items():
        if "fast" in of and not rounds[start]:
            connection.execute(sa.update(TRIALS).where(TRIALS.c.problem_id == of["fast"]).values(**WRONG))
        number = of.get("accurate", of.get("fast"))
        if len(of) == 2:
            move(connection, of["fast"], of["accurate"])
        key = start + ("fast" if rounds[start] else "accurate")
        connection.execute(sa.update(PROBLEMS).where(PROBLEMS.c.id == number).values(key=key))
        connection.execute(sa.update(TRIALS).where(TRIALS.c.problem_id == number).values(seal=""))


def move(connection: sa.Connection, source: int, target: int) -> None:
    """Give the trials of a problem to another, but those of cells that the other has, and delete the problem."""
    other = TRIALS.alias()
    there = sa.exists().where(
        other.c.problem_id == target, *(getattr(other.c, name) == getattr(TRIALS.c, name) for name in CELL)
    )
    twice = connection.scalars(sa.select(TRIALS.c.id).where(TRIALS.c.problem_id == source, there)).all()
    for table in OF_TRIALS:
        connection.execute(sa.delete(table).where(table.c.trial_id.in_(twice)))
    connection.execute(sa.delete(TRIALS).where(TRIALS.c.id.in_(twice)))
    connection.execute(sa.update(TRIALS).where(TRIALS.c.problem_id == source).values(problem_id=target))
    connection.execute(sa.delete(CLAIMS).where(CLAIMS.c.problem_id == source))
    connection.execute(sa.delete(PROBLEMS).where(PROBLEMS.c.id == source))
