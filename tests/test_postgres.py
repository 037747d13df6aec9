"""Tuning databases on a real PostgreSQL server: opened at once, by other users, when it restarts, by many tuners.

What a store and claims do on both kinds of database is tested in test_store.py, test_claims.py and test_claims.py.
"""

import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread

import optuna
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from fake_search import TRIALS, FakeRunner, options, problems, processes, search_and_die
from postgres import NEEDS_PSYCOPG, PostgresServer
from sample_store import assert_each_once
from sample_trials import make_kernel, make_trial, times
from sqlalchemy import Engine, MetaData, create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError

from hadagen.errors import StorageError
from hadagen.tuner.events import Event, TrialFinished
from hadagen.tuner.mirror import Mirror
from hadagen.tuner.search import tune
from hadagen.tuning_db import database, postgresql, schema
from hadagen.tuning_db.claims import Claims
from hadagen.tuning_db.store import Store

psycopg = pytest.importorskip("psycopg", reason=NEEDS_PSYCOPG, exc_type=ImportError)

FORMATS = Path(__file__).parent / "formats"
EARLIER = [f"{number:04}" for number in range(1, int(schema.SCHEMA_VERSION))]
(PROBLEM,) = problems(256)


@pytest.fixture
def url(postgres_server: PostgresServer, empty_on_server: str) -> str:
    """A database without trials."""
    return postgres_server.new_database(empty_on_server)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "RETRY_SECONDS", 0.02)


# ---- schema ----------------------------------------------------------------------------------------------------------
def differences(url: str) -> list[object]:
    """What migrations would still change."""
    engine = create_engine(url)
    with engine.connect() as connection:
        known = {"compare_type": True, "version_table": schema.VERSION_TABLE}
        found = compare_metadata(MigrationContext.configure(connection, opts=known), schema.Base.metadata)
    engine.dispose()
    return list(found)


def copy_to_server(path: Path, url: str) -> None:
    """The tables of an SQLite file, with their constraints and rows."""
    source, target = create_engine(f"sqlite:///{path}"), create_engine(url)
    tables = MetaData()
    tables.reflect(source)
    for column in (column for table in tables.tables.values() for column in table.columns):
        column.type = column.type.as_generic()
    with source.connect() as old, target.begin() as new:
        tables.create_all(new)
        for table in tables.sorted_tables:
            if rows := [row._asdict() for row in old.execute(table.select())]:
                new.execute(table.insert(), rows)
            if "id" in table.columns:
                last = f"SELECT coalesce(max(id), 1) FROM {table.name}"
                new.execute(text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), ({last}))"))
    source.dispose()
    target.dispose()


@pytest.mark.parametrize("version", EARLIER)
def test_a_server_of_every_earlier_schema_is_upgraded(version: str, tmp_path: Path, postgres: str) -> None:
    with closing(sqlite3.connect(tmp_path / "old.db")) as old, old:
        old.executescript((FORMATS / f"schema_{version}.sql").read_text())
    copy_to_server(tmp_path / "old.db", postgres)
    with Store.open(postgres) as upgraded, Store.open(tmp_path / "old.db") as same:
        assert upgraded.trials() == same.trials() != []
        upgraded.record(make_trial(9))
    assert differences(postgres) == []


def test_a_newer_schema_of_a_server_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SCHEMA_VERSION", EARLIER[-1])
    assert f"has schema {schema.SCHEMA_VERSION} and this hadagen knows no later one" in refusal(url)


def test_text_may_hold_what_postgresql_cannot(url: str) -> None:
    said = ("\0", "a\x10\0b", "\x100", "\x10e", "×\n")
    trials = [
        make_trial(i, arch=each, detail=each, kernel=make_kernel(b"%d" % i, source=each)) for i, each in enumerate(said)
    ]
    with Store.open(url) as store:
        store.record(*trials)
        assert store.trials() == trials


def test_one_run_at_a_time_lets_optuna_make_tables(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.01)

    def work() -> None:
        with pytest.raises(StorageError, match="was locked by another run"):
            other.alone(lambda: None)

    with Store.open(url) as store, Store.open(url) as other:
        store.alone(work)
        assert other.alone(lambda: 1) == 1


# ---- what is refused -------------------------------------------------------------------------------------------------
SECRET = "s3cret@#/%"


def refusal(url: str) -> str:
    with pytest.raises(StorageError) as refused:
        Store.open(url).close()
    return sentence(refused.value)


def sentence(error: StorageError) -> str:
    said = f"{error} {error!r}"
    assert "s3cret" not in said
    assert "\n" not in said
    return str(error)


def test_a_server_that_cannot_be_used_is_one_sentence(postgres_server: PostgresServer) -> None:
    server = postgres_server
    good = server.url("postgres")
    at = f"127.0.0.1:{server.port}"
    for url, said in (
        (
            "postgresql://me:s3cret@127.0.0.1:1/x",
            "no server answers at postgresql+psycopg://me:***@127.0.0.1:1/x (C",
        ),
        ("postgresql://me:s3cret@no.invalid/x", "the host of postgresql+psycopg://me:***@no.invalid/x is not known"),
        (server.url("postgres", password=SECRET), f"@{at}/postgres refuses its user or password; check both"),
        (server.url("postgres", password=""), "wants a password; put it into the URL, ~/.pgpass or PGPASSWORD"),
        (server.url("missing"), f"@{at}/missing has no database missing; make it with createdb, or name another"),
        (f"{good}?colour=red", 'has an option that PostgreSQL refuses (invalid connection option "colour"); correct'),
        (f"postgresql://hadagen@{at}/postgres?password=s3cret", "hadagen:***@"),
    ):
        assert said in refusal(url), url


def test_without_psycopg_no_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(pytest.skip.Exception, match="needs psycopg, of the fleet extra"):
        PostgresServer()


def test_a_user_without_rights_is_one_sentence(postgres_server: PostgresServer, postgres: str) -> None:
    server, name = postgres_server, postgres.rpartition("/")[2]
    server.execute(f"CREATE ROLE guest LOGIN PASSWORD '{SECRET}'")
    guest = server.url(name, "guest", SECRET)
    assert "lacks a right (permission denied for schema public); let an owner grant it" in refusal(guest)
    with Store.open(postgres) as store, Mirror(store):
        store.record(make_trial())
    assert "lacks a right (permission denied for table hadagen_schema_version)" in refusal(guest)
    server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest", database=name)
    with Store.open(guest) as reader:
        assert reader.read_only
        assert reader.checked()
        with pytest.raises(StorageError) as refused:
            reader.record(make_trial(2))
        assert "is read-only for its user; have INSERT, UPDATE and DELETE" in sentence(refused.value)
        assert repr(reader) == f"Store('postgresql+psycopg://guest:***@127.0.0.1:{server.port}/{name}')"
    server.execute("GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO guest", database=name)
    with Store.open(guest) as writer, pytest.raises(StorageError) as refused:
        writer.record(make_trial(2))
    assert "lacks a right (permission denied for sequence hadagen_kernels_id_seq)" in sentence(refused.value)
    server.execute("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO guest", database=name)
    with Store.open(guest) as writer, Mirror(writer) as tables:
        writer.record(make_trial(2))
        assert len(writer.trials()) == 2
        assert tables.study("one").metric_names


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (psycopg.errors.DiskFull, "the disk of the server of .* is full .*; make room and run again, nothing stored"),
        (psycopg.errors.LockNotAvailable, "was locked by another run for 60 s; wait for that run or end it"),
        (psycopg.errors.ReadOnlySqlTransaction, "is read-only; name the database of a server that takes writes"),
        (psycopg.errors.OutOfMemory, r"failed \(it says s\); check it, or name another"),
    ],
)
def test_a_failure_is_one_sentence_and_stores_nothing(url: str, error: type[psycopg.Error], said: str) -> None:
    with Store.open(url) as store:
        with failing(store._engine, lambda _: error("it says s")), pytest.raises(StorageError, match=said) as refused:
            store.record(make_trial())
        sentence(refused.value)
        assert store.trials() == []


@contextmanager
def failing(engine: Engine, before: Callable[[object], Exception]) -> Iterator[None]:
    """The next commit fails with what `before` returns."""

    def fail(connection: object) -> None:
        event.remove(engine, "commit", fail)
        raise OperationalError("COMMIT", {}, before(connection))

    event.listen(engine, "commit", fail)
    yield


# ---- a server that restarts ------------------------------------------------------------------------------------------
def lost(connection: object) -> Exception:
    """The server commits, and then ends before it says so."""
    connection.connection.commit()  # type: ignore[attr-defined]
    return psycopg.errors.AdminShutdown("terminating connection due to unexpected postmaster exit")


def test_what_was_committed_unheard_is_not_done_twice(url: str) -> None:
    with Store.open(url) as store, Mirror(store) as tables:
        with failing(store._engine, lost):
            store.record(make_trial(timings=times({1 << 13: 2.0}), detail="first", seconds=1.0))
        with failing(store._engine, lost):
            store.add_timings(make_trial(timings=times({1 << 20: 9.0}), detail="raced", seconds=0.5))
        (found,) = store.trials()
        assert (found.detail, found.seconds, len(found.timings)) == ("first; raced", 1.5, 4)
        claims, others = Claims(store, "sm90", "GPU"), Claims(store, "sm90", "GPU")
        with failing(store._engine, lost):
            assert claims.take([(PROBLEM, "a"), (PROBLEM, "a")]) == [True, False]
        assert claims.take([(PROBLEM, "a")]) == others.take([(PROBLEM, "a")]) == [False]
        claims.finish(PROBLEM, "a")
        with failing(store._engine, lambda _: psycopg.errors.DiskFull()), pytest.raises(StorageError):
            claims.take([])
        claims.take([])
        assert others.take([(PROBLEM, "a")]) == [True]
        ranges = {"warps": optuna.distributions.CategoricalDistribution((1, 2))}
        result = optuna.trial.create_trial(values=(1.0, 2.0, 3.0), params={"warps": 1}, distributions=ranges)
        study = tables.study("one")
        with failing(tables._storage.engine, lost):
            tables.add([(study, result)])
        assert tables.count(study) == 1


def test_a_tune_outlives_a_restart(postgres: str, postgres_server: PostgresServer) -> None:
    """Killed when a trial was reported, started again while the search tries to go on."""
    restarts = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished) and event.finished in (3, 8):
            postgres_server.kill()
            restarts.append(Thread(target=postgres_server.start))
            restarts[-1].start()

    runner = FakeRunner()
    with Store.open(postgres) as store:
        report = tune(options(store, runner), listen)
        assert (report.finished, report.stopped, len(restarts)) == (TRIALS, "", 2)
        assert_each_once(store)
    assert len(runner.asked) == TRIALS
    for restart in restarts:
        restart.join()


def test_a_run_that_is_gone_while_it_writes_stops_no_other(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert postgresql.ABANDONED_WRITER_SECONDS < database.BUSY_SECONDS
    monkeypatch.setattr(postgresql, "ABANDONED_WRITER_SECONDS", 1)
    with Store.open(url) as store, create_engine(url).connect() as gone:
        gone.exec_driver_sql(postgresql.begin(True, database.BUSY_SECONDS))
        store.record(make_trial())
        with pytest.raises(DBAPIError, match="idle-in-transaction timeout") as undone:
            gone.exec_driver_sql("SELECT 1")
    assert postgresql.is_lost(undone.value)  # so whoever comes back does it again


def test_a_server_that_stays_away_ends_a_tune_with_a_sentence(
    url: str, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "PATIENCE_SECONDS", 0.1)

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished) and event.finished == 5:
            postgres_server.stop()

    with Store.open(url) as store:
        with pytest.raises(StorageError) as ended:
            tune(options(store, FakeRunner()), listen)
        assert "no server answers at" in sentence(ended.value)
        assert "it was tried for 0 s" in str(ended.value)
        assert "does not answer; trying again for 0 s" in caplog.text
        assert "s3cret" not in caplog.text
        postgres_server.start()
        assert len(store.trials()) >= 5
        report = tune(options(store, FakeRunner()))
        # The first tune could not give its claims up, and its process, which is this one, is alive.
        assert report.finished + report.under_way == TRIALS
        assert_each_once(store)


# ---- many tuners -----------------------------------------------------------------------------------------------------
def test_of_eight_tuners_that_begin_at_once_one_is_killed_and_the_others_go_on(tmp_path: Path, postgres: str) -> None:
    log = tmp_path / "log"
    dying = processes.Process(target=search_and_die, args=(postgres, log, "measured", 1))
    tuners = [processes.Process(target=search_and_die, args=(postgres, log)) for _ in range(7)]
    for process in (dying, *tuners):
        process.start()
    for process in (dying, *tuners):
        process.join()
    assert [process.exitcode for process in tuners] == [0] * 7
    measured = log.read_text().splitlines()
    assert [each for each in differences(postgres) if "hadagen_" in str(each)] == []
    with Store.open(postgres) as store:
        last = FakeRunner()
        tune(options(store, last, problems=problems(64, 256)))  # which adds what Optuna's tables lack
        assert_each_once(store)
        recorded = len(store.trials())
    assert recorded >= 2 * TRIALS
    # The killed tuner, if it came to measure, recorded nothing.
    assert recorded == len(measured) - (dying.exitcode == -signal.SIGKILL) + len(last.asked)
