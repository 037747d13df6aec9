"""Files that the store is given: foreign, damaged, read-only, locked or on a full disk; nothing stored is ever lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from sample_store import empty, path, refusal, store
from sample_trials import make_kernel, make_trial
from sqlalchemy import event

from hadagen.errors import StorageError
from hadagen.tuning_db import database
from hadagen.tuning_db.store import Store

__all__ = ["empty", "path", "store"]  # fixtures
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
    "UPDATE hadagen_problems SET n = 3",
    *(f"UPDATE hadagen_kernels SET cluster = {value}" for value in ("-1", "1.5", "'abc'", "x'00'")),
    *(f"UPDATE hadagen_kernels SET {column} = x'00'" for column in ("source", "ptx", "cubin", "nvcc")),
    *(f"UPDATE hadagen_kernels SET {column} = 'abc'" for column in ("ptx", "cubin")),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_are_refused(store: Store, path: Path, damage: str) -> None:
    store.record(make_trial())
    store.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(damage)
    with pytest.raises(StorageError) as refused, Store.open(path) as store:
        store.trials()
    assert str(refused.value) == database._SENTENCES["malformed"].format(place=path)


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


def test_a_file_in_a_directory_that_is_read_only_is_read_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For SQLite writes files beside it."""
    Store.open(path).close()
    monkeypatch.setattr(database, "_writable", lambda asked: asked == path)
    with Store.open(path) as store:
        assert store.read_only


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
