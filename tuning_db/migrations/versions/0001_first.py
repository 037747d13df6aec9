"""The first schema. Its tables are those of `tests/formats/schema_0001.sql`: a new database is made with the schema of
today (`hadagen.tuning_db.schema`), so migrations only lead from here on."""

revision = "0001"
down_revision = None
