"""Files that the store is given: foreign, damaged, read-only, locked or on a full disk; nothing stored is ever lost."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_bundle import change, write_sample
from sample_store import recorded, refusal
from sample_trials import H100, H200, make_kernel, make_trial, times
from sqlalchemy import event

from hadagen.errors import StorageError, UsageError
from hadagen.trial import Outcome
from hadagen.tuning_db import database
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.files import MOST_BYTES, connect_alone
from hadagen.tuning_db.make import make_bundle
from hadagen.tuning_db.schema import SCHEMA_VERSION
from hadagen.tuning_db.store import Store

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
