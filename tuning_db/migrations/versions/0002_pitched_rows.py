"""Problems of pitched rows, and the form in which a kernel reads its scale. Older rows have neither."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # The defaults are for existing rows; new rows always have values.
    with op.batch_alter_table("hadagen_problems") as problems:
        problems.add_column(sa.Column("pitched", sa.Boolean, nullable=False, server_default=sa.false()))
        problems.drop_constraint("uq_hadagen_problems", type_="unique")
        problems.create_unique_constraint("uq_hadagen_problems", ["n", "dtype", "numerics", "pitched"])
    with op.batch_alter_table("hadagen_kernels") as kernels:
        kernels.add_column(sa.Column("scale_form", sa.String, nullable=False, server_default="fp32"))
        kernels.add_column(sa.Column("pitched", sa.Boolean, nullable=False, server_default=sa.false()))
    for table, columns in {"hadagen_problems": ["pitched"], "hadagen_kernels": ["scale_form", "pitched"]}.items():
        with op.batch_alter_table(table) as batch:
            for column in columns:
                batch.alter_column(column, server_default=None)
