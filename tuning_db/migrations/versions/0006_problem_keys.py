"""Problems are named by their key, and kernels say what they take. Seals cover both, so they are emptied, and the store
fills them again."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

PARAMS = "const void* x, void* y, i64 elements, u32 scale_word"
ROW_PARAMS = "i64 columns, i64 x_pitch, i64 y_pitch"


def upgrade() -> None:
    connection = op.get_bind()
    for table, column in {"hadagen_problems": "key", "hadagen_kernels": "params"}.items():
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column(column, sa.String, nullable=False, server_default=""))
    problems = sa.table("hadagen_problems", *map(sa.column, ("id", "n", "dtype", "numerics", "pitched", "key")))
    for row in connection.execute(sa.select(problems)).all():
        key = f"n{row.n}-{row.dtype}-{row.numerics}" + ("-pitched" if row.pitched else "")
        connection.execute(sa.update(problems).where(problems.c.id == row.id).values(key=key))
    kernels = sa.table("hadagen_kernels", sa.column("pitched", sa.Boolean), *map(sa.column, ("params", "seal")))
    for pitched, params in {False: PARAMS, True: f"{PARAMS}, {ROW_PARAMS}"}.items():
        chosen = sa.update(kernels).where(kernels.c.pitched == pitched)
        connection.execute(chosen.values(params=params, seal=""))
    connection.execute(sa.update(sa.table("hadagen_trials", sa.column("seal"))).values(seal=""))
    with op.batch_alter_table("hadagen_problems") as batch:
        batch.drop_constraint("uq_hadagen_problems", type_="unique")
        batch.create_unique_constraint("uq_hadagen_problems", ["key"])
        for column in ("n", "dtype", "numerics", "pitched"):
            batch.drop_column(column)
        batch.alter_column("key", server_default=None)
    with op.batch_alter_table("hadagen_kernels") as batch:
        batch.drop_column("pitched")
        batch.alter_column("params", server_default=None)
