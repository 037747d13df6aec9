"""The store: what goes in comes out, whoever else has the file open, from whatever file or URL, and of every schema."""

import errno
import hashlib
import json
import logging
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from sample_bundle import change, write_sample
from sample_store import recorded, refusal
from sample_trials import H100, H200, LAUNCH, PROBLEM, make_kernel, make_timing, make_trial, times, trial_lists
from sqlalchemy import create_engine, event
from sqlalchemy.dialects import postgresql as dialect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateTable

from hadagen.errors import StorageError, UsageError
from hadagen.files.opening import MOST_BYTES, connect_alone
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import DType, Numerics, Rows
from hadagen.problem.trial import Environment, Kernel, Outcome, Timing, Trial
from hadagen.tuning_db import database, postgresql, schema
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.make import make_bundle
from hadagen.tuning_db.schema import SCHEMA_VERSION
from hadagen.tuning_db.store import Store


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


def test_a_name_that_is_no_utf_8_is_kept_as_escapes(any_store: Store) -> None:
    any_store.record(make_trial(detail="/tmp/\udcff.cu: no such file"))
    assert any_store.trials()[0].detail == "/tmp/\\udcff.cu: no such file"
    with pytest.raises(StorageError, match=r"cannot store 'sm90.udcff', which has a lone surrogate"):
        any_store.record(make_trial(arch="sm90\udcff"))
    assert len(any_store.trials()) == 1


def test_what_is_no_number_comes_back_too(any_store: Store) -> None:
    any_store.record(make_trial(outcome=Outcome.WRONG_ANSWER, errors={"normal": math.nan, "large": math.inf}))
    errors = any_store.trials()[0].errors
    assert math.isnan(errors["normal"])
    assert errors["large"] == math.inf


def test_trials_are_found_by_problem_arch_gpu_and_outcome(any_store: Store) -> None:
    trial = make_trial()
    others = [
        replace(trial, problem=PROBLEM.with_io(numerics=Numerics.FAST)),
        replace(trial, arch="sm80"),
        replace(trial, environment=H200),
        replace(trial, knobs={}, outcome=Outcome.TIMEOUT),
        replace(trial, problem=PROBLEM.with_io(rows=Rows.PITCHED)),
    ]
    any_store.record(trial, *others)
    assert any_store.trials() == [trial, *others]
    for asked, found in (
        ({"problem": others[0].problem}, [others[0]]),
        ({"problem": others[4].problem}, [others[4]]),
        ({"arch": "sm80"}, [others[1]]),
        ({"gpu": H200.gpu}, [others[2]]),
        ({"outcome": Outcome.TIMEOUT}, [others[3]]),
        ({"problem": PROBLEM, "arch": "sm90", "gpu": H100.gpu, "outcome": Outcome.OK}, [trial]),
        ({"problem": PROBLEM.with_io(input=DType.BFLOAT16, output=DType.BFLOAT16)}, []),
    ):
        assert any_store.trials(**asked) == found


def test_trials_can_be_read_without_blobs(any_store: Store) -> None:
    trial = make_trial()
    any_store.record(trial)
    kernel = trial.kernel
    assert any_store.trials(blobs=False) == [replace(trial, kernel=replace(kernel, source="", ptx=b"", cubin=b""))]
    assert any_store.kernel(kernel.digest) == kernel
    with pytest.raises(StorageError, match="no kernel abc"):
        any_store.kernel("abc")


def test_no_trials_are_recorded_as_none(any_store: Store) -> None:
    assert any_store.record() == []
    assert any_store.trials() == []


def test_recording_again_replaces(any_store: Store) -> None:
    number = any_store.record(make_trial(knobs={"a": 1, "b": 2}))
    again = make_trial(
        knobs={"b": 2, "a": 1},
        kernel=make_kernel(b"other"),
        timings=(make_timing(7.0),),
        errors={"one-hot": 0.5},
        outcome=Outcome.WRONG_ANSWER,
    )
    assert any_store.record(again) == number
    assert any_store.trials() == [again]
    assert any_store.record(replace(again, kernel=None, errors={}, timings=())) == number
    assert any_store.trials()[0].kernel is None


def test_a_kernel_learns_its_arithmetic_unless_it_is_damaged(store: Store, path: Path) -> None:
    """A new seal must not make sound what was changed."""
    older, newer = (replace(LAUNCH, arithmetic=name) for name in ("", "a" * 12))
    first, second = (make_trial(n, kernel=make_kernel(launch=launch)) for n, launch in ((1, older), (2, newer)))
    for damaged in (False, True):
        store.record(first)
        if damaged:
            change(path, "UPDATE hadagen_kernels SET registers = 99, arithmetic = ''")
            with pytest.raises(StorageError, match="is damaged"):
                store.record(second)
        else:
            store.record(second)
            assert {trial.kernel and trial.kernel.launch for trial in store.checked()} == {newer}


def test_timings_are_added_to_those_of_the_same_kernel(any_store: Store) -> None:
    any_store.record(make_trial(timings=times({1 << 13: 2.0, 1 << 20: 9.0}), detail="raced", seconds=2.0))
    new = make_trial(timings=times({1 << 20: 8.0, 3 << 20: 9.0}), seconds=1.0, date="2026")
    any_store.add_timings(new)
    (found,) = any_store.trials()
    every = times({1 << 13: 2.0, 1 << 20: 8.0, 3 << 20: 9.0})
    assert found == replace(new, timings=every, detail="raced", seconds=3.0)
    any_store.add_timings(replace(new, kernel=make_kernel(b"rebuilt")))
    assert any_store.trials() == [found]
    elsewhere = replace(new, environment=H200)
    any_store.add_timings(elsewhere)
    assert any_store.trials() == [found, elsewhere]


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


def test_a_trial_that_was_read_without_blobs_may_be_recorded(any_store: Store) -> None:
    trial = make_trial()
    any_store.record(trial)
    (bare,) = any_store.trials(blobs=False)
    any_store.record(replace(bare, outcome=Outcome.UNSTABLE))
    assert any_store.trials() == [replace(trial, outcome=Outcome.UNSTABLE)]


def test_a_killed_process_loses_nothing_that_it_reported(path: Path) -> None:
    with recorder(path, 0, 10**6) as process:
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
    for process in [recorder(path, 0, 25), recorder(path, 25, 50)]:
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
    for file, count in ((ours_first, 1), (optunas_first, 2)):
        with Store.open(file) as store:
            store.record(make_trial())
            assert search(store.url) == count
            store.record(make_trial(2))
        with Store.open(file) as store:
            assert store.trials() == [make_trial(), make_trial(2)]
        assert search(f"sqlite:///{file}") == count + 1


# ---- URLs ------------------------------------------------------------------------------------------------------------
def test_a_url_opens_the_same_database(path: Path) -> None:
    with Store.open(f"sqlite:///{path}") as store:
        store.record(make_trial())
        assert store.place == str(path)
    with Store.open(path) as store:
        assert (store.trials(), store.url) == ([make_trial()], f"sqlite:///{path}")


def test_no_quoted_option_has_a_password() -> None:
    quoting = OperationalError("", None, Exception('invalid options "password=secret sslpassword=hush"'))
    said = postgresql.sentence(quoting, make_url("postgresql://me:secret@host/x?sslpassword=hush"), 1.0)
    assert "password=*** sslpassword=***" in said


def test_what_sqlalchemy_logs_is_not_printed() -> None:
    """Such as a traceback where Ctrl-C ends a query."""
    program = "import logging, hadagen.tuning_db.store; logging.getLogger('sqlalchemy.pool').error('a traceback')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""


# ---- the schema ------------------------------------------------------------------------------------------------------
# ---- tables and columns ----------------------------------------------------------------------------------------------
def columns(model: type[schema.Base]) -> set[str]:
    return set(model.__table__.columns.keys())


def test_every_field_has_a_column() -> None:
    """A field that is added to a trial must be added to the schema, with a migration."""

    def names(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    assert columns(schema.EnvironmentRow) == names(Environment) | {"id"}
    assert columns(schema.KernelRow) == names(Kernel) - {"launch"} | names(LaunchSpec) | {"id", "seal"}
    assert columns(schema.TimingRow) == names(Timing) | {"trial_id", "position"}
    assert columns(schema.ProblemRow) == {"id", "key"}
    assert columns(schema.TrialRow) == names(Trial) - {"problem", "environment", "kernel", "errors", "timings"} | {
        "id",
        "problem_id",
        "environment_id",
        "kernel_id",
        "knobs_key",
        "seal",
    }


def test_the_schema_suits_postgresql() -> None:
    for table in schema.Base.metadata.sorted_tables:
        assert str(CreateTable(table).compile(dialect=dialect.dialect()))


# ---- versions of the schema ------------------------------------------------------------------------------------------
VERSION = schema.SCHEMA_VERSION
AHEAD = f"{int(VERSION) + 1:04}"
NEXT = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = {version!r}, {before!r}
def upgrade():
    op.add_column("hadagen_kernels", sa.Column("plan", sa.Text))
    op.execute({statement!r})
"""


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hadagen whose schema is one version ahead; the file is its last migration."""
    migrations = Path(shutil.copytree(database.MIGRATIONS, tmp_path / "50% migrations"))
    following = migrations / "versions" / f"{AHEAD}_next.py"
    statement = "UPDATE hadagen_kernels SET plan = 'unknown'"
    following.write_text(NEXT.format(version=AHEAD, before=VERSION, statement=statement))
    monkeypatch.setattr(database, "MIGRATIONS", migrations)
    monkeypatch.setattr(database, "SCHEMA_VERSION", AHEAD)
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


FORMATS = Path(__file__).parent / "formats"
EARLIER = [f"{number:04}" for number in range(1, int(VERSION))]


def database_of(schema_version: str, directory: Path) -> Path:
    """What hadagen wrote when that was its schema: of a problem a measured trial and one whose compilation failed, and,
    since there are any, one of pitched rows."""
    path = directory / f"{schema_version}.db"
    with closing(sqlite3.connect(path)) as old, old:
        old.executescript((FORMATS / f"schema_{schema_version}.sql").read_text())
    return path


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return database_of(EARLIER[0], tmp_path)


@pytest.mark.parametrize("schema_version", EARLIER)
def test_a_database_of_every_earlier_schema_is_upgraded(schema_version: str, tmp_path: Path) -> None:
    path = database_of(schema_version, tmp_path)
    failed = make_trial(2, outcome=Outcome.COMPILE_FAILED, kernel=None, detail="no", errors={}, timings=())
    pitched = make_trial(4, problem=PROBLEM.with_io(rows=Rows.PITCHED))
    had = [make_trial(1), failed, pitched][: 2 if schema_version == EARLIER[0] else 3]
    with Store.open(path) as store:
        # Without its blobs a kernel is what its row says: the first pitched trial had one of contiguous rows.
        assert [trial.problem for trial in store.checked()] == [trial.problem for trial in had]
        assert store.trials()[:2] == had[:2]
        assert store.kernel(make_kernel(b"cubin 1").digest).launch == make_kernel().launch
        store.record(make_trial(8, problem=pitched.problem))
        assert store.trials(problem=PROBLEM) == had[:2]
    test_the_migrations_end_at_the_schema(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
            connection.execute(f"INSERT INTO hadagen_problems (id, key) VALUES (9, '{PROBLEM.key}')")
        with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
            connection.execute("INSERT INTO hadagen_problems (id) VALUES (9)")


def test_an_upgrade_distrusts_kernels_without_the_fence_of_bulk_copies(first: Path) -> None:
    digest = make_kernel(b"cubin 1", launch=replace(LAUNCH, persistent=True)).digest
    source = "bulk_copy(staged + stage * 8192u, x);"
    change(first, "UPDATE hadagen_kernels SET persistent = 1, source = ?, digest = ?", given=(source, digest))
    with Store.open(first) as store:
        assert [trial.outcome for trial in store.trials()] == [Outcome.UNSTABLE, Outcome.COMPILE_FAILED]


def test_an_upgrade_gives_kernels_the_names_of_today(first: Path) -> None:
    """Those of its code alone, and of its code and a launch that does not say when it starts, are names of earlier
    versions. One kernel may have several."""
    kernel = make_kernel(b"cubin 1")
    launch = kernel.launch.digested()
    del launch["starts_early"]
    names = [
        hashlib.sha256(kernel.cubin + each).hexdigest() for each in (b"", json.dumps(launch, sort_keys=True).encode())
    ]
    with closing(sqlite3.connect(first)) as old, old:
        old.execute("UPDATE hadagen_kernels SET digest = 'another'")
        columns = [name for _, name, *_ in old.execute("PRAGMA table_info(hadagen_kernels)")][2:]
        for number, name in enumerate(names, 2):
            same = f"SELECT {number}, '{name}', {', '.join(columns)} FROM hadagen_kernels LIMIT 1"
            old.execute(f"INSERT INTO hadagen_kernels {same}")
        old.execute("UPDATE hadagen_trials SET kernel_id = 2 WHERE kernel_id = 1")
        old.execute("DELETE FROM hadagen_kernels WHERE id = 1")
    with Store.open(first) as store:
        assert store.checked()
        assert (store.trials()[0], store.kernel(kernel.digest)) == (make_trial(), kernel)
    with closing(sqlite3.connect(first)) as new:
        assert new.execute("SELECT digest FROM hadagen_kernels").fetchall() == [(kernel.digest,)]


def test_an_upgrade_that_finds_another_kernel_than_its_name_says_leaves_it_damaged(tmp_path: Path) -> None:
    path = database_of("0003", tmp_path)  # in which names are of launches too
    change(path, "UPDATE hadagen_kernels SET tile_elements = 4608")
    with Store.open(path) as store, pytest.raises(StorageError, match="is damaged"):
        store.trials()


def test_an_upgrade_tells_codes_that_may_be_rounded_from_accurate_ones(tmp_path: Path) -> None:
    """Of two trials in one cell, the one that was accurate stays. Fast codes of which none is rounded were wrong."""
    problem_of_trials = {
        "n256-bfloat16-to-int8_row_4096-accurate": [1, 2],
        "n256-bfloat16-to-int8_row_4096-fast": [2, 4],
        "n512-signed-bfloat16-to-fp8_tensor-fast": [8],
        "n4096-bfloat16-to-mxfp4_32_qutlass-accurate": [1],
        "n256-bfloat16-to-int8_row_4096_convrot-accurate": [1],
        "n14336-k28-bfloat16-to-fp8_row_14336-accurate": [1],
        "n14336-k28-bfloat16-to-int4_row_14336-accurate": [1],
        "n128-bfloat16-to-fp8_group_128-accurate": [1],
        "n128-bfloat16-to-fp8_group_128-fast": [1, 2],
        "n256-float16-to-int8_row_4096-fast": [4],
        "n256-float32-to-int8_row_4096-accurate": [1],
    }
    path = database_of("0008", tmp_path)
    with closing(sqlite3.connect(path)) as old, old:
        columns = [name for _, name, *_ in old.execute("PRAGMA table_info(hadagen_trials)")][4:]
        for number, (key, chunks) in enumerate(problem_of_trials.items(), 10):
            old.execute("INSERT INTO hadagen_problems VALUES (?, ?)", (number, key))
            for each in chunks:
                changed = ", ".join(
                    {"knobs": f"'{{\"chunks\": {each}}}'", "knobs_key": f"'{{\"chunks\":{each}}}'"}.get(c, c)
                    for c in columns
                )
                old.execute(
                    f"INSERT INTO hadagen_trials SELECT {100 * number + each}, {number}, environment_id, NULL, "
                    f"{changed} FROM hadagen_trials WHERE id = 2"
                )
                old.execute(f"UPDATE hadagen_trials SET seconds = {number} WHERE problem_id = {number}")
    with Store.open(path) as store:
        found = {(each.problem.key, each.knobs["chunks"]): each for each in store.trials() if each.problem.io.form}
    wrong = [("n128-bfloat16-to-fp8_group_128-accurate", 2), ("n256-float16-to-int8_row_4096-accurate", 4)]
    assert list(found) == [
        ("n256-bfloat16-to-int8_row_4096-fast", 1),
        ("n256-bfloat16-to-int8_row_4096-fast", 2),
        ("n256-bfloat16-to-int8_row_4096-fast", 4),
        ("n512-signed-bfloat16-to-fp8_tensor-fast", 8),
        ("n4096-bfloat16-to-mxfp4_32_qutlass-fast", 1),
        ("n256-bfloat16-to-int8_row_4096_convrot-fast", 1),
        ("n14336-k28-bfloat16-to-fp8_row_14336-fast", 1),
        ("n14336-k28-bfloat16-to-int4_row_14336-accurate", 1),
        ("n128-bfloat16-to-fp8_group_128-accurate", 1),
        wrong[0],
        wrong[1],
        ("n256-float32-to-int8_row_4096-accurate", 1),
    ]
    assert found["n256-bfloat16-to-int8_row_4096-fast", 2].seconds == 10  # which was accurate
    assert [key for key, each in found.items() if each.outcome is Outcome.WRONG_ANSWER] == wrong
    test_the_migrations_end_at_the_schema(path)


def test_an_older_schema_is_upgraded_with_a_message(
    store: Store, path: Path, next_version: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.record(make_trial())
    with caplog.at_level(logging.WARNING), Store.open(path) as upgraded:
        assert upgraded.trials() == [make_trial()]
    assert f"{path} was upgraded from schema {VERSION} to {AHEAD}" in caplog.text
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT plan FROM hadagen_kernels").fetchall() == [("unknown",)]


def test_an_upgrade_that_fails_changes_nothing(store: Store, path: Path, next_version: Path) -> None:
    store.record(make_trial())
    next_version.write_text(NEXT.format(version=AHEAD, before=VERSION, statement="UPDATE missing SET plan = 0"))
    assert "no such table" in refusal(path)
    assert store.trials() == [make_trial()]
    with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.OperationalError, match="no such column"):
        connection.execute("SELECT plan FROM hadagen_kernels")


def test_a_newer_schema_is_refused(tmp_path: Path, next_version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "newer.db"
    Store.open(path).close()
    monkeypatch.undo()
    assert f"has schema {AHEAD} and this hadagen knows no later one than {VERSION}; upgrade hadagen" in refusal(path)


# ---- files -----------------------------------------------------------------------------------------------------------
ORDINARY_USER = 65534


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
    store.record(*trials)
    store.close()
    content = path.read_bytes()
    for page in range(len(content) // 4096):
        damaged = bytearray(content)
        damaged[page * 4096 + 16 : page * 4096 + 4096] = b"\xff" * 4080
        path.write_bytes(damaged)
        with suppress(StorageError), Store.open(path) as store:
            assert store.trials() == trials


def test_no_changed_byte_changes_a_bundle(tmp_path: Path) -> None:
    """It is made as from the sound database, or refused in a sentence."""
    path, damaged = tmp_path / "trials.db", tmp_path / "damaged.db"
    with Store.open(path) as store:
        for chunks in range(1, 9):
            environment = H200 if chunks % 2 else H100
            trial = make_trial(
                chunks, environment=environment, timings=times({1 << 13: 1.0 + chunks, 1 << 20: 9.0 / chunks})
            )
            store.record(replace(trial, outcome=Outcome.UNSTABLE if chunks == 8 else Outcome.OK))
        make_bundle(store, "sm90", tmp_path / "sound.db")
    sound, wanted = path.read_bytes(), Bundle.open(tmp_path / "sound.db").digest
    used = [place for place, byte in enumerate(sound) if byte]
    chance = random.Random(5)
    refused = 0
    for _ in range(80):
        content, place = bytearray(sound), chance.choice(used)
        content[place] ^= 1 << chance.randrange(8)
        damaged.write_bytes(content)
        made = tmp_path / "made.db"
        try:
            with Store.open(damaged) as store:
                make_bundle(store, "sm90", made)
        except StorageError as error:
            refused += str(error).count("\n") == 0
        else:
            assert Bundle.open(made).digest == wanted, place
    assert refused > 20


def lose_last_trial(path: Path) -> None:
    """From its page of the table, not from the index: SQLite goes on without it."""
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'hadagen_trials'").fetchone()
    content, place = bytearray(path.read_bytes()), (root - 1) * 4096
    assert (content[place], content[place + 4]) == (13, 3)  # a leaf with three rows
    content[place + 4] = 2
    path.write_bytes(content)


def mistake_last_trial(path: Path) -> None:
    change(path, "UPDATE hadagen_trials SET outcome = 'unstable' WHERE id = 3")


@pytest.mark.parametrize("damage", [lose_last_trial, mistake_last_trial])
def test_no_damage_takes_a_winner_from_a_bundle(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = recorded(tmp_path / "trials.db", *map(make_trial, (1, 2, 3)))
    damage(path)
    with Store.open(path) as store:
        assert store.trials(outcome=Outcome.OK) == [make_trial(1), make_trial(2)]
        with pytest.raises(StorageError, match="is damaged"):
            make_bundle(store, "sm90", tmp_path / "sm90.db")


ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT i AS version_num FROM r"


@pytest.mark.parametrize(
    "statements",
    [
        f"DROP TABLE hadagen_schema_version; CREATE VIEW hadagen_schema_version AS {ENDLESS}",
        f"CREATE VIEW studies AS {ENDLESS}",
        "DROP TABLE hadagen_trials; CREATE VIRTUAL TABLE hadagen_trials USING fts4(arch)",
        "CREATE TRIGGER x AFTER INSERT ON hadagen_trials BEGIN DELETE FROM hadagen_trials; END",
        "ALTER TABLE hadagen_trials ADD COLUMN x TEXT AS (hex(zeroblob(400000000)))",
    ],
)
def test_a_database_that_computes_is_refused(path: Path, statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statements)
    assert "in it is not a plain table; remove that, or name another file" in refusal(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDWR)  # without which whoever waits at it would wait for good
    os.write(held, bytes(100))
    assert "cannot be opened (Not a regular file)" in refusal(tmp_path / "pipe")
    os.close(held)


@pytest.mark.parametrize("name", ["-journal", "-wal", "-shm"])
def test_a_pipe_that_sqlite_would_open_is_not_waited_for(path: Path, name: str) -> None:
    os.mkfifo(f"{path}{name}")
    assert "cannot be opened (Not a regular file)" in refusal(path)


def test_a_path_may_begin_with_two_slashes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for read_only in (False, True):
        monkeypatch.setattr(database, "_writable", lambda path, answer=not read_only: answer)
        with Store.open(f"/{path}") as store:
            assert store.read_only is read_only
            assert store.trials() == []


def test_a_path_that_is_no_utf8_is_not_called_damaged(path: Path) -> None:
    other = os.fsdecode(shutil.copy(path, os.fsencode(path.parent) + b"/caf\xe9.db"))
    with pytest.raises(UsageError, match="has a name that is no UTF-8, which no URL can have; name another file"):
        Store.open(other)
    with Store.open(path.rename(path.parent / "café.db")) as store:
        assert store.trials() == []


# What no hadagen wrote, though SQLite keeps it.
DAMAGES = [
    "DELETE FROM hadagen_problems",
    "DELETE FROM hadagen_environments",
    "DELETE FROM hadagen_kernels",
    "DELETE FROM hadagen_schema_version",
    *(f"UPDATE hadagen_schema_version SET version_num = {value}" for value in ("''", "0", "'0000'", "'-1'", "'abc'")),
    *(f"UPDATE hadagen_timings SET us = {value}" for value in ("0", "-1", "'abc'", "x'00'", "9e999")),
    *(f"UPDATE hadagen_timings SET copy_us = {value}" for value in ("0", "'abc'")),
    *(f"UPDATE hadagen_timings SET elements = {value}" for value in ("0", "1.5", "'abc'")),
    "UPDATE hadagen_timings SET cache = 'warm'",
    *(f"UPDATE hadagen_errors SET relative_error = {value}" for value in ("-1", "'abc'", "x'00'")),
    *(f"UPDATE hadagen_trials SET knobs = {value}" for value in ("'null'", "'[1]'", "1", "'{'")),
    *(f"UPDATE hadagen_trials SET {column} = x'00'" for column in ("arch", "detail", "date", "seconds", "outcome")),
    *(f"UPDATE hadagen_environments SET l2_bytes = {value}" for value in ("-1", "'abc'", "9e999")),
    "UPDATE hadagen_environments SET gpu = x'00'",
    "UPDATE hadagen_problems SET key = 'x'",
    "UPDATE hadagen_kernels SET params = 'x'",
    *(f"UPDATE hadagen_kernels SET cluster = {value}" for value in ("-1", "1.5", "'abc'", "x'00'")),
    *(f"UPDATE hadagen_kernels SET {column} = x'00'" for column in ("source", "ptx", "cubin", "nvcc")),
    *(f"UPDATE hadagen_kernels SET {column} = 'abc'" for column in ("ptx", "cubin")),
    "UPDATE hadagen_trials SET knobs = '" + '{"a":' * 100_000 + "'",
    "UPDATE hadagen_trials SET knobs_key = ''",
    # What could be, but was not so.
    "UPDATE hadagen_problems SET key = 'n512-float16-accurate'",
    "UPDATE hadagen_environments SET driver = '580.66'",
    "UPDATE hadagen_timings SET us = 2.5 WHERE position = 0",
    "DELETE FROM hadagen_timings WHERE position = 1",
    "UPDATE hadagen_errors SET relative_error = 1e-4",
    *(f"UPDATE hadagen_trials SET {what}" for what in ("date = '2026'", "detail = 'x'", "seconds = 1", "seal = ''")),
    *(f"UPDATE hadagen_kernels SET {what}" for what in ("tile_elements = 8192", "registers = 41", "nvcc = '12'")),
    *(f"UPDATE hadagen_kernels SET {what}" for what in ("threads = 33", "entry = 'a b'", "source = ''", "seal = ''")),
]
BLOBS = [f"UPDATE hadagen_kernels SET {column} = ?" for column in ("ptx", "cubin")]


@pytest.mark.parametrize("damage", [*DAMAGES, *BLOBS], ids=lambda damage: damage[:60])
def test_damaged_rows_are_refused(store: Store, path: Path, damage: str) -> None:
    store.record(make_trial())
    store.close()
    change(path, damage, given=[zlib.compress(bytes(MOST_BYTES + 1))] * damage.count("?"))
    with pytest.raises(StorageError) as refused, Store.open(path) as store:
        store.trials()
    assert str(refused.value) == database._DAMAGED.format(place=path)


# ---- files that cannot be written ------------------------------------------------------------------------------------
@pytest.fixture
def protected(empty: Path) -> Iterator[Path]:
    """A database with one trial that an ordinary user, who we then are, may read and not write."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = recorded(Path(shutil.copy(empty, directory / "trials.db")), make_trial())
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


def test_a_file_in_a_directory_that_is_read_only_is_read_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For SQLite writes files beside it."""
    Store.open(path).close()
    monkeypatch.setattr(database, "_writable", lambda asked: asked == path)
    with Store.open(path) as store:
        assert store.read_only


def test_a_read_only_file_is_not_upgraded(protected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SCHEMA_VERSION", "9999")
    assert f"has schema {SCHEMA_VERSION}, not 9999, and is read-only; make it writable" in refusal(protected)


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
    recorded(path, make_trial())
    with monkeypatch.context() as patch:
        patch.setattr(database, "_writable", lambda path: False)
        reader = Store.open(path)
    assert reader.trials() == [make_trial()]
    recorded(path, make_trial(2))
    assert len(reader.trials()) == 2
    reader.close()


def test_the_next_opening_turns_the_log_on(path: Path) -> None:
    recorded(path, make_trial())
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_full_disk_loses_nothing_stored(store: Store) -> None:
    full = True

    @event.listens_for(store._engine, "begin")
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


def test_on_a_file_system_without_locks_a_database_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite would wait a minute for a process that there is not."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refuse)
    (tmp_path / "there.db").touch()
    for name in ("new.db", "there.db"):
        assert "lies on a file system without locks (No locks available)" in refusal(tmp_path / name)


def test_a_bundle_is_written_and_read_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, connect = [], sqlite3.connect

    def connecting(place: str, **options: Any) -> sqlite3.Connection:
        opened.append(place)
        return connect(place, **options)

    monkeypatch.setattr(sqlite3, "connect", connecting)
    written = write_sample(tmp_path / "sm90.db")
    assert len(opened) >= 2
    assert all(place.endswith(("?nolock=1", "&immutable=1")) for place in opened)
    with closing(connect(written)) as other, closing(connect_alone(written)) as alone:
        other.execute("BEGIN EXCLUSIVE")
        alone.execute("DELETE FROM meta")
