"""Alembic migrations of a tuning database, run by `hadagen.tuning_db.database` when one is opened."""
