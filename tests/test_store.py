"""The store: what goes in comes out, nothing stored is ever lost, and every bad file gets one clear sentence."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from sample_trials import H100, H200, PROBLEM, make_kernel, make_timing, make_trial, times, trial_lists
from sqlalchemy import create_engine, event
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from hadagen.errors import StorageError, UsageError
from hadagen.launch import LaunchSpec
from hadagen.problem import DType, Numerics
from hadagen.trial import Environment, Kernel, Outcome, Timing, Trial
from hadagen.tuning_db import database, schema
from hadagen.tuning_db.store import Store

ORDINARY_USER = 65534


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without trials; copying it is faster than making one."""
    path = tmp_path_factory.mktemp("store") / "empty.db"
    Store.open(path).close()
    return path


@pytest.fixture
def path(tmp_path: Path, empty: Path) -> Path:
    return Path(shutil.copy(empty, tmp_path / "trials.db"))


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as store:
        yield store


def refusal(path: Path) -> str:
    """The sentence with which a file is refused, and left as it was."""
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StorageError) as refused:
        Store.open(path)
    assert not path.is_file() or path.read_bytes() == before
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def columns(model: type[schema.Base]) -> set[str]:
    return set(model.__table__.columns.keys())


# ---- what is stored --------------------------------------------------------------------------------------------------
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trials=trial_lists())
def test_trials_come_back_as_they_were_recorded(empty: Path, trials: list[Trial]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = shutil.copy(empty, directory)
        with Store.open(path) as store:
            numbers = [store.record(trial) for trial in trials]
            assert store.trials() == trials
        with Store.open(path) as store:
            assert store.trials() == trials
            assert [store.record(trial) for trial in reversed(trials)] == numbers[::-1]
            assert store.trials() == trials


def test_what_is_no_number_comes_back_too(store: Store) -> None:
    store.record(make_trial(outcome=Outcome.WRONG_ANSWER, errors={"normal": math.nan, "large": math.inf}))
    errors = store.trials()[0].errors
    assert math.isnan(errors["normal"])
    assert errors["large"] == math.inf


def test_trials_are_found_by_problem_arch_gpu_and_outcome(store: Store) -> None:
    trial = make_trial()
    others = [
        replace(trial, problem=replace(PROBLEM, numerics=Numerics.FAST)),
        replace(trial, arch="sm80"),
        replace(trial, environment=H200),
        replace(trial, knobs={}, outcome=Outcome.TIMEOUT),
        replace(trial, problem=replace(PROBLEM, pitched=True)),
    ]
    for each in (trial, *others):
        store.record(each)
    assert store.trials() == [trial, *others]
    assert store.trials(problem=others[0].problem) == [others[0]]
    assert store.trials(problem=others[4].problem) == [others[4]]
    assert store.trials(arch="sm80") == [others[1]]
    assert store.trials(gpu=H200.gpu) == [others[2]]
    assert store.trials(outcome=Outcome.TIMEOUT) == [others[3]]
    assert store.trials(PROBLEM, "sm90", H100.gpu, Outcome.OK) == [trial]
    assert store.trials(problem=replace(PROBLEM, dtype=DType.BFLOAT16)) == []


def test_trials_can_be_read_without_blobs(store: Store) -> None:
    trial = make_trial()
    store.record(trial)
    kernel = trial.kernel
    assert kernel is not None
    assert store.trials(blobs=False) == [replace(trial, kernel=replace(kernel, source="", ptx=b"", cubin=b""))]
    assert store.kernel(kernel.digest) == kernel
    with pytest.raises(StorageError, match="no kernel abc"):
        store.kernel("abc")


def test_recording_again_replaces(store: Store) -> None:
    number = store.record(make_trial(knobs={"a": 1, "b": 2}))
    again = make_trial(
        knobs={"b": 2, "a": 1},
        kernel=make_kernel(b"other"),
        timings=(make_timing(7.0),),
        errors={"one-hot": 0.5},
        outcome=Outcome.WRONG_ANSWER,
    )
    assert store.record(again) == number
    assert store.trials() == [again]
    assert store.record(replace(again, kernel=None, errors={}, timings=())) == number
    assert store.trials()[0].kernel is None


def test_timings_are_added_to_those_of_the_same_kernel(store: Store) -> None:
    old = make_trial(timings=times({1 << 13: 2.0, 1 << 20: 9.0}), detail="raced", seconds=2.0)
    store.record(old)
    new = make_trial(timings=times({1 << 20: 8.0, 3 << 20: 9.0}), seconds=1.0, date="2026")
    store.add_timings(new)
    (found,) = store.trials()
    every = times({1 << 13: 2.0, 1 << 20: 8.0, 3 << 20: 9.0})
    assert found == replace(new, timings=every, detail="raced", seconds=3.0)
    rebuilt = replace(new, kernel=make_kernel(b"rebuilt"))
    store.add_timings(rebuilt)
    assert store.trials() == [found]
    elsewhere = replace(new, environment=H200)
    store.add_timings(elsewhere)
    assert store.trials() == [found, elsewhere]


def test_every_field_has_a_column() -> None:
    """A field that is added to a trial must be added to the schema, with a migration."""

    def names(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    assert columns(schema.EnvironmentRow) == names(Environment) | {"id"}
    assert columns(schema.KernelRow) == names(Kernel) - {"launch"} | names(LaunchSpec) | {"id"}
    assert columns(schema.TimingRow) == names(Timing) | {"trial_id", "position"}
    assert columns(schema.ProblemRow) == set(PROBLEM.to_dict()) | {"id"}
    assert columns(schema.TrialRow) == names(Trial) - {"problem", "environment", "kernel", "errors", "timings"} | {
        "id",
        "problem_id",
        "environment_id",
        "kernel_id",
        "knobs_key",
    }


# ---- several processes, and the end of one ---------------------------------------------------------------------------
RECORD = """
import sys
from sample_trials import make_trial
from hadagen.tuning_db.store import Store
store = Store.open(sys.argv[1])
for chunks in range(int(sys.argv[2]), int(sys.argv[3])):
    store.record(make_trial(chunks))
    print(chunks, flush=True)
"""


def recorder(path: Path, start: int, end: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RECORD, str(path), str(start), str(end)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)


def test_a_killed_process_loses_nothing_that_it_reported(path: Path) -> None:
    with recorder(path, 0, 10**6) as process:
        assert process.stdout is not None
        for _ in range(20):
            reported = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    reported = max([reported, *map(int, rest)])
    with Store.open(path) as store:
        trials = store.trials()
        # One more may have been stored and not reported yet; none is stored by halves.
        assert trials in ([make_trial(i) for i in range(end)] for end in (reported + 1, reported + 2))


def test_two_processes_may_create_and_fill_one_database(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trials.db"
    processes = [recorder(path, 0, 25), recorder(path, 25, 50)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    with Store.open(path) as store:
        assert sorted(trial.knobs["chunks"] for trial in store.trials()) == list(range(50))


def test_optuna_keeps_its_tables_in_the_same_file(tmp_path: Path) -> None:
    import optuna

    def search(url: str) -> int:
        storage = optuna.storages.RDBStorage(url)
        study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
        study.tell(study.ask(), 1.0)
        storage.engine.dispose()
        return len(study.trials)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    ours_first, optunas_first = tmp_path / "a.db", tmp_path / "b.db"
    assert search(f"sqlite:///{optunas_first}") == 1
    for path, count in ((ours_first, 1), (optunas_first, 2)):
        with Store.open(path) as store:
            store.record(make_trial())
            assert search(store.url) == count
            store.record(make_trial(2))
        with Store.open(path) as store:
            assert store.trials() == [make_trial(), make_trial(2)]
        assert search(f"sqlite:///{path}") == count + 1


# ---- versions of the schema ------------------------------------------------------------------------------------------
NEXT = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "0004", "0003"
def upgrade():
    op.add_column("hadagen_kernels", sa.Column("plan", sa.Text))
    op.execute({statement!r})
"""


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hadagen whose schema is one version ahead; the file is its last migration."""
    migrations = Path(shutil.copytree(database.MIGRATIONS, tmp_path / "50% migrations"))
    following = migrations / "versions" / "0004_next.py"
    following.write_text(NEXT.format(statement="UPDATE hadagen_kernels SET plan = 'unknown'"))
    monkeypatch.setattr(database, "MIGRATIONS", migrations)
    monkeypatch.setattr(database, "SCHEMA_VERSION", "0004")
    return following


def test_the_migrations_end_at_the_schema(path: Path) -> None:
    assert ScriptDirectory(str(database.MIGRATIONS)).get_current_head() == schema.SCHEMA_VERSION
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "version_table": schema.VERSION_TABLE}
        )
        assert compare_metadata(context, schema.Base.metadata) == []
    engine.dispose()


# What hadagen wrote when its schema was 0001: a problem with a measured trial, and one whose compilation failed.
FIRST = """
INSERT INTO hadagen_problems (id, n, dtype, numerics) VALUES (1, 256, 'float16', 'accurate');
INSERT INTO hadagen_environments VALUES
    (1, 'NVIDIA H100 80GB HBM3', '9.0', 132, 52428800, '580.65', '13.0', '13.0.48', 1980, 2619);
INSERT INTO hadagen_trials VALUES
    (1, 1, 1, 1, 'sm90', '{"chunks": 1, "grid": "tiles"}', '{"chunks":1,"grid":"tiles"}', 'measured', 'ok', '',
     '2025-01-02T03:04:05+00:00', 0.25),
    (2, 1, 1, NULL, 'sm90', '{"chunks": 2}', '{"chunks":2}', 'measured', 'compile_failed', 'no', 'later', 0);
INSERT INTO hadagen_errors VALUES (1, 'normal', 2e-4), (1, 'constant', 0);
INSERT INTO hadagen_timings VALUES
    (1, 0, 8192, 'in-place', 'hot', 2, 2 * 0.99, 2 * 1.01, 1.9),
    (1, 1, 8192, 'in-place', 'cold', 3, 3 * 0.99, 3 * 1.01, 1.9);
"""


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A database of schema 0001, with trials."""
    path = tmp_path / "first.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(database.MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    engine.dispose()
    kernel = make_kernel(b"cubin 1")
    blobs = [zlib.compress(blob) for blob in (kernel.ptx, kernel.cubin)]
    with closing(sqlite3.connect(path)) as old, old:
        old.executescript(FIRST)
        columns = kernel.digest, "k", "sm90", 256, 1, 0, 4096, False, 40, 0, 0, "13.0.48", kernel.source, *blobs
        old.execute(f"INSERT INTO hadagen_kernels VALUES (1{', ?' * len(columns)})", columns)
    return path


def test_a_database_of_the_first_schema_is_upgraded(first: Path) -> None:
    failed = replace(make_trial(), knobs={"chunks": 2}, outcome=Outcome.COMPILE_FAILED, kernel=None, detail="no")
    failed = replace(failed, errors={}, timings=(), date="later", seconds=0.0)
    pitched = make_trial(problem=replace(PROBLEM, pitched=True))
    with Store.open(first) as store:
        assert store.trials() == [make_trial(), failed]
        assert store.kernel(make_kernel(b"cubin 1").digest).launch == make_kernel().launch
        store.record(pitched)
        assert store.trials() == [make_trial(), failed, pitched]
        assert store.trials(problem=PROBLEM) == [make_trial(), failed]
    test_the_migrations_end_at_the_schema(first)
    with closing(sqlite3.connect(first)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
            connection.execute("INSERT INTO hadagen_problems VALUES (9, 256, 'float16', 'accurate', 1)")
        with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
            connection.execute("INSERT INTO hadagen_problems (n, dtype, numerics) VALUES (2, 'float16', 'fast')")


def test_an_upgrade_distrusts_kernels_without_the_fence_of_bulk_copies(first: Path) -> None:
    with closing(sqlite3.connect(first)) as old, old:
        old.execute("UPDATE hadagen_kernels SET persistent = 1, source = 'bulk_copy(staged + stage * 8192u, x);'")
    with Store.open(first) as store:
        assert [trial.outcome for trial in store.trials()] == [Outcome.UNSTABLE, Outcome.COMPILE_FAILED]


def test_an_older_schema_is_upgraded_with_a_message(
    store: Store, path: Path, next_version: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.record(make_trial())
    with caplog.at_level(logging.WARNING), Store.open(path) as upgraded:
        assert upgraded.trials() == [make_trial()]
    assert f"{path} was upgraded from schema 0003 to 0004" in caplog.text
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT plan FROM hadagen_kernels").fetchall() == [("unknown",)]


def test_an_upgrade_that_fails_changes_nothing(store: Store, path: Path, next_version: Path) -> None:
    store.record(make_trial())
    next_version.write_text(NEXT.format(statement="UPDATE missing SET plan = 0"))
    assert "no such table" in refusal(path)
    assert store.trials() == [make_trial()]
    with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.OperationalError, match="no such column"):
        connection.execute("SELECT plan FROM hadagen_kernels")


def test_a_newer_schema_is_refused(tmp_path: Path, next_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "newer.db"
    Store.open(path).close()
    monkeypatch.undo()
    assert "has schema 0004 and this hadagen knows no later one than 0003; upgrade hadagen" in refusal(path)


# ---- files that are not ours -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", [b"x", b"a text, and not a short one\n" * 100, b"SQLite format 2\0" + bytes(100)])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    assert "is not a tuning database; name another file" in refusal(path)


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "photos.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photos (id)")
    assert "is not a tuning database: it holds the tables photos; name another file" in refusal(path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "Is a directory" in refusal(tmp_path)
    (tmp_path / "file").touch()
    assert "cannot be opened" in refusal(tmp_path / "file" / "trials.db")


def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    with Store.open(path) as store:
        assert store.trials() == []


def test_a_damaged_file_is_refused_or_read_right(store: Store, path: Path) -> None:
    trials = [make_trial(i) for i in range(20)]
    for trial in trials:
        store.record(trial)
    store.close()
    content = path.read_bytes()
    for page in range(len(content) // 4096):
        damaged = bytearray(content)
        damaged[page * 4096 + 16 : page * 4096 + 4096] = b"\xff" * 4080
        path.write_bytes(damaged)
        with suppress(StorageError), Store.open(path) as store:
            assert store.trials() == trials


# ---- files that cannot be written ------------------------------------------------------------------------------------
@pytest.fixture
def protected(empty: Path) -> Iterator[Path]:
    """A database with one trial that an ordinary user, who we then are, may read and not write."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = Path(shutil.copy(empty, directory / "trials.db"))
        with Store.open(path) as store:
            store.record(make_trial())
        path.chmod(0o444)
        directory.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(ORDINARY_USER)
        yield path
        os.seteuid(user)
        directory.chmod(0o755)


def test_a_read_only_file_is_read(protected: Path) -> None:
    with Store.open(protected) as store:
        assert store.read_only
        assert store.trials() == [make_trial()]
        with pytest.raises(StorageError, match=r"trials\.db is read-only; make it .* writable, or name another"):
            store.record(make_trial(2))
        assert store.trials() == [make_trial()]
    assert [path.name for path in protected.parent.iterdir()] == ["trials.db"]


def test_a_read_only_file_is_not_upgraded(protected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SCHEMA_VERSION", "0004")
    assert "has schema 0003, not 0004, and is read-only; make it writable" in refusal(protected)


def test_a_file_in_a_read_only_directory_cannot_be_created(protected: Path) -> None:
    assert "cannot be created: its directory is not writable" in refusal(protected.parent / "new.db")


def test_a_read_only_file_is_read_while_it_is_written(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.record(make_trial())
    monkeypatch.setattr(database, "_writable", lambda path: False)
    with Store.open(path) as reader:
        assert reader.trials() == [make_trial()]
        store.record(make_trial(2))
        assert len(reader.trials()) == 2


def test_a_reader_sees_what_was_written_since(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody had the file open when it came, and everybody has closed it by now."""
    with Store.open(path) as store:
        store.record(make_trial())
    with monkeypatch.context() as patch:
        patch.setattr(database, "_writable", lambda path: False)
        reader = Store.open(path)
    assert reader.trials() == [make_trial()]
    with Store.open(path) as store:
        store.record(make_trial(2))
    assert len(reader.trials()) == 2
    reader.close()


def test_the_next_opening_turns_the_log_on(path: Path) -> None:
    with Store.open(path) as store:
        store.record(make_trial())
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_full_disk_loses_nothing_stored(store: Store) -> None:
    full = True

    @event.listens_for(store._database._engine, "begin")
    def limit(connection) -> None:  # type: ignore[no-untyped-def]
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar() if full else 2**30
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    full = False
    store.record(make_trial())
    full = True
    big = make_trial(2, kernel=make_kernel(os.urandom(1 << 20)))
    with pytest.raises(StorageError, match=r"the disk of .*trials\.db is full \(\d+ bytes free\); make room"):
        store.record(big)
    assert store.trials() == [make_trial()]
    full = False
    store.record(big)
    assert store.trials() == [make_trial(), big]


def test_a_database_locked_for_long_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    with Store.open(path) as store, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.trials() == []
        with pytest.raises(StorageError, match=r"trials\.db was locked by another process"):
            store.record(make_trial())


# ---- URLs ------------------------------------------------------------------------------------------------------------
def test_a_url_opens_the_same_database(path: Path) -> None:
    with Store.open(f"sqlite:///{path}") as store:
        store.record(make_trial())
        assert store.place == str(path)
    with Store.open(path) as store:
        assert store.trials() == [make_trial()]
        assert store.url == f"sqlite:///{path}"


@pytest.mark.parametrize("url", ["mysql://somewhere/trials", "what://is/this", "://", "postgresql://host:port/x"])
def test_a_url_that_cannot_be_is_wrong_usage(url: str) -> None:
    with pytest.raises(UsageError, match="name a file"):
        Store.open(url)


def test_the_schema_suits_postgresql() -> None:
    for table in schema.Base.metadata.sorted_tables:
        assert str(CreateTable(table).compile(dialect=postgresql.dialect()))


@pytest.mark.skipif("HADAGEN_TEST_POSTGRESQL" not in os.environ, reason="HADAGEN_TEST_POSTGRESQL names no database")
def test_postgresql_keeps_trials_too() -> None:
    url = os.environ["HADAGEN_TEST_POSTGRESQL"]
    trials = [make_trial(1), make_trial(2, errors={"normal": math.inf}), make_trial(3, kernel=None, timings=())]
    for _ in range(2):
        with Store.open(url) as store:
            for trial in trials:
                store.record(trial)
            assert store.trials() == trials
            assert store.place != url or ":" not in url.split("//")[1].split("@")[0]
