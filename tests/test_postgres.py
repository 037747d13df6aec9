"""Tuning databases on a real PostgreSQL server."""

from __future__ import annotations

from postgres import PostgresServer
from sample_trials import make_trial

from hadagen.tuning_db.store import Store


def test_trials_outlive_a_server_that_is_killed(postgres: str, postgres_server: PostgresServer) -> None:
    with Store.open(postgres) as store:
        store.record(make_trial())
    postgres_server.kill()
    postgres_server.start()
    with Store.open(postgres) as store:
        assert store.checked()
        assert store.trials() == [make_trial()]
