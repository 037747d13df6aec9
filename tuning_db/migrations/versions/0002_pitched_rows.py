"""Problems of pitched rows, and the form in which a kernel reads its scale. What was there had neither."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

# Of the rows that are there; new ones always say.
BEFORE = {"pitched": sa.false(), "scale_form": sa.text("'fp32'")}


def upgrade() -> None:
    with op.batch_alter_table("hadagen_problems") as problems:
        problems.add_column(_column("pitched", sa.Boolean()))
        problems.drop_constraint("uq_hadagen_problems", type_="unique")
        problems.create_unique_constraint("uq_hadagen_problems", ["n", "dtype", "numerics", "pitched"])
    with op.batch_alter_table("hadagen_kernels") as kernels:
        kernels.add_column(_column("scale_form", sa.String()))
        kernels.add_column(_column("pitched", sa.Boolean()))
    for table, columns in {"hadagen_problems": ["pitched"], "hadagen_kernels": ["scale_form", "pitched"]}.items():
        with op.batch_alter_table(table) as batch:
            for column in columns:
                batch.alter_column(column, server_default=None)


def _column(name: str, kind: sa.types.TypeEngine) -> sa.Column:
    return sa.Column(name, kind, nullable=False, server_default=BEFORE[name])
