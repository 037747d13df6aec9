"""The script that Alembic runs: the migrations, in the transaction that the caller has begun."""

from alembic import context

from hadagen.tuning_db.schema import VERSION_TABLE, Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
