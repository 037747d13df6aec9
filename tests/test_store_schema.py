"""The schema of the store: it has all that a trial has, and older and newer ones are upgraded or refused."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sqlite3
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sample_store import refusal
from sample_trials import LAUNCH, PROBLEM, make_kernel, make_trial
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from hadagen.errors import StorageError
from hadagen.launch import LaunchSpec
from hadagen.problem import Rows
from hadagen.trial import Environment, Kernel, Outcome, Timing, Trial
from hadagen.tuning_db import database, schema
from hadagen.tuning_db.store import Store


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
        assert str(CreateTable(table).compile(dialect=postgresql.dialect()))


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
    with closing(sqlite3.connect(first)) as old, old:
        source = "bulk_copy(staged + stage * 8192u, x);"
        old.execute("UPDATE hadagen_kernels SET persistent = 1, source = ?, digest = ?", (source, digest))
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
        assert store.trials()[0] == make_trial()
        assert store.kernel(kernel.digest) == kernel
    with closing(sqlite3.connect(first)) as new:
        assert new.execute("SELECT digest FROM hadagen_kernels").fetchall() == [(kernel.digest,)]


def test_an_upgrade_that_finds_another_kernel_than_its_name_says_leaves_it_damaged(tmp_path: Path) -> None:
    path = database_of("0003", tmp_path)  # in which names are of launches too
    with closing(sqlite3.connect(path)) as old, old:
        old.execute("UPDATE hadagen_kernels SET tile_elements = 4608")
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
