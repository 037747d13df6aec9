"""Opens a tuning database, gives its transactions, and turns each failure into one clear sentence.

A database is a path or an SQLAlchemy URL (SQLite or PostgreSQL). A new database gets the current schema. An older one
is upgraded with a message. A newer or foreign one is refused, unchanged. A file without write permission is only read.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from hadagen.errors import StorageError, UsageError
from hadagen.tuning_db.files import connect_read_only, limit_values, read_start
from hadagen.tuning_db.schema import SCHEMA_VERSION, VERSION_TABLE, Base

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_SECONDS = 60.0  # how long to wait for another process to finish its transaction

_log = logging.getLogger("hadagen")
# SQLAlchemy logs a traceback if Ctrl-C ends a query. Without a handler, that would be printed.
logging.getLogger("sqlalchemy").addHandler(logging.NullHandler())

# (Dialect, whether it writes) → how a transaction begins. There is one writer at a time, so that a writer may look
# first and then insert. A reader sees the database at one moment.
_BEGIN = {
    ("sqlite", False): "BEGIN",
    ("sqlite", True): "BEGIN IMMEDIATE",
    ("postgresql", False): "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    ("postgresql", True): "SELECT pg_advisory_xact_lock(1751213172)",
}

# Message of SQLite → our sentence. Its messages are part of its interface; Python 3.10 does not give error codes.
_DAMAGED = "{place} is damaged; restore it from a copy, or name another file to start a new database"
_SENTENCES = {
    "readonly database": "{place} is read-only; make it and its directory writable, or name another database",
    "disk is full": "the disk of {place} is full ({free} bytes free); make room and run again, nothing stored is lost",
    "disk I/O error": "the disk of {place} failed to read or write ({free} bytes free); make room or name another disk",
    "database is locked": "{place} was locked by another process for {busy:.0f} s; wait for that process or end it",
    "not a database": "{place} is not a tuning database; name another file, or one that does not exist yet",
    "malformed": _DAMAGED,
    "Could not decode": _DAMAGED,
    "unable to open": "{place} cannot be opened; check that its directory exists and that you may read it",
}


class Database:
    """An open database with the current schema.

    `place`: its path or URL for messages, without a password. `url`: opens it again, for instance for Optuna, whose
    tables are beside ours. `read_only`: whether it is only read. Every method raises `StorageError` if the database
    fails. Stored rows are then unchanged.
    """

    def __init__(self, where: str | os.PathLike[str], upgraded: Callable[[Session], None]) -> None:
        """Open a database; create or upgrade it if needed. `upgraded`: called at the end of an upgrade, within its
        transaction. Raises `UsageError` for a URL of another backend than SQLite and PostgreSQL."""
        self._upgraded = upgraded
        url = _url(where)
        self.url = url.render_as_string(hide_password=False)
        self.place = url.render_as_string(hide_password=True)
        self._path = _file(url)
        self.read_only = False
        if self._path is not None:
            self.place = str(self._path)
            self.read_only = _inspect_file(self._path)
        self._engine = self._create_engine(url)
        self._writer = self._engine.execution_options(writes=True)
        self._bring_up_to_date()

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that sees the database at one moment."""
        with self._sentences(), Session(self._engine) as session, session.begin():
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction that excludes other writers. It is durable when it ends, and has no effect if it fails."""
        if self.read_only:
            raise StorageError(_SENTENCES["readonly database"].format(place=self.place))
        with self._sentences(), Session(self._writer) as session, session.begin():
            yield session

    def check(self) -> None:
        """Raises `StorageError` if SQLite finds damage anywhere in its file."""
        if self._path is not None:
            with self.reading() as session:
                found = session.scalar(text("PRAGMA integrity_check(1)"))
                if found != "ok":
                    raise ValueError(found)

    def _create_engine(self, url: URL) -> Engine:
        backend = url.get_backend_name()
        try:
            if backend != "sqlite":
                engine = create_engine(url)
            elif self._path is not None and self.read_only:
                # Opened for each transaction, because another process may replace the file, or begin to write it.
                engine = create_engine(url, creator=partial(_connect_read_only, self._path), poolclass=NullPool)
            else:
                engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
        except ImportError as error:
            raise StorageError(
                f"{self.place} needs the Python package {error.name}, which is missing; install it with pip"
            ) from error
        except ArgumentError as error:
            raise UsageError(
                f"{self.place} names no driver that SQLAlchemy has; name a file or a postgresql:// URL"
            ) from error

        if backend == "sqlite":
            event.listen(engine, "connect", lambda connection, _: limit_values(connection))

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            writes = connection.get_execution_options().get("writes", False)
            connection.exec_driver_sql(_BEGIN[backend, writes])

        return engine

    def _bring_up_to_date(self) -> None:
        with self._sentences(), self._engine.begin() as connection:
            version = self._version(connection)
        if version == SCHEMA_VERSION:
            if self._path is not None and not self.read_only:
                self._let_readers_and_writers_overlap()
            return
        if self.read_only:
            raise StorageError(
                f"{self.place} has schema {version or 'none'}, not {SCHEMA_VERSION}, and is read-only; "
                "make it writable, or open a copy that is, and it will be upgraded"
            )
        with self._sentences(), self._writer.begin() as connection:
            version = self._version(connection)  # again: another process may have been faster
            if version != SCHEMA_VERSION:
                _migrate(connection, version)
                with Session(connection) as session:
                    self._upgraded(session)
                    session.flush()
        if version not in (None, SCHEMA_VERSION):
            _log.warning("%s was upgraded from schema %s to %s", self.place, version, SCHEMA_VERSION)
        if self._path is not None:
            self._let_readers_and_writers_overlap()

    def _version(self, connection: Connection) -> str | None:
        """The schema version; None if there is no schema yet. Raises `StorageError` for a foreign or newer database,
        and `ValueError` for a bad version."""
        if self._path is not None:
            self._refuse_code(connection)
        tables = inspect(connection).get_table_names()
        if VERSION_TABLE not in tables:
            # Optuna's tables may exist before ours. A PostgreSQL database may have any other tables.
            if tables and "studies" not in tables and self._path is not None:
                raise StorageError(
                    f"{self.place} is not a tuning database: it holds the tables {', '.join(sorted(tables)[:4])}; "
                    "name another file, or one that does not exist yet"
                )
            return None
        version = str(connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}")))
        if not (re.fullmatch("[0-9]{4}", version) and int(version)):
            raise ValueError(f"{version!r} is no schema version")
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"{self.place} has schema {version} and this hadagen knows no later one than {SCHEMA_VERSION}; "
                "upgrade hadagen, or name another database"
            )
        return version

    def _refuse_code(self, connection: Connection) -> None:
        """Raises `StorageError` for a file with anything but tables and indexes, which might run code."""
        made = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").all()
        others = [name for name, sql in made if not re.match("CREATE (TABLE|INDEX|UNIQUE INDEX) ", str(sql))]
        if not others:
            columns = (
                "SELECT m.name, m.name FROM sqlite_master AS m JOIN pragma_table_xinfo(m.name) AS c WHERE c.hidden"
            )
            others = [name for name, _ in connection.exec_driver_sql(columns)]
        if others:
            raise StorageError(
                f"{self.place} is not a tuning database: {others[0]!r:.40} in it is not a plain table; remove that, or "
                "name another file"
            )

    def _let_readers_and_writers_overlap(self) -> None:
        """Turn on SQLite's write-ahead log, which the file keeps on."""
        connection = self._engine.raw_connection()
        # SQLite refuses this while another process has a transaction. The next opening does it then.
        with suppress(sqlite3.OperationalError):
            connection.cursor().execute("PRAGMA journal_mode = WAL")
        connection.close()

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error)
            for says, sentence in _SENTENCES.items():
                if says in reason:
                    known = {"place": self.place, "busy": BUSY_SECONDS, "free": self._free_bytes()}
                    raise StorageError(sentence.format(**known)) from error
            raise StorageError(
                f"{self.place} failed ({' '.join(reason.split())}); check it, or name another"
            ) from error
        except (ValueError, RecursionError, OverflowError) as error:  # no such value was written by hadagen
            raise StorageError(_DAMAGED.format(place=self.place)) from error

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context in which another library works in the database by its `url`, and may wrap the errors of SQLAlchemy.
        If the database fails there, this raises `StorageError` too."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            failure = error if isinstance(error, SQLAlchemyError) else error.__cause__
            if not isinstance(failure, SQLAlchemyError):
                raise
            with self._sentences():
                raise failure from failure.__cause__

    def _free_bytes(self) -> int:
        with suppress(OSError):  # the directory may be gone too
            return shutil.disk_usage(self._path.parent).free if self._path else 0
        return 0


def file_of(where: str | os.PathLike[str]) -> Path | None:
    """The file of a database, which may not exist; None if it has none. Raises `UsageError` as `Database` does."""
    return _file(_url(where))


def _file(url: URL) -> Path | None:
    in_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    return Path(str(url.database)) if in_file else None


def _url(where: str | os.PathLike[str]) -> URL:
    text_form = os.fspath(where)
    if not text_form.isascii() and os.fsencode(text_form) != text_form.encode("utf-8", "replace"):
        raise UsageError(
            f"database {text_form!r} has a name that is no UTF-8, which no URL can have; name another file"
        )
    if "://" not in text_form:
        return URL.create("sqlite", database=os.path.abspath(text_form))
    try:
        url = make_url(text_form)
        backend = url.get_backend_name()
    except (SQLAlchemyError, ValueError) as error:
        raise UsageError(
            f"database {text_form!r} is no URL that SQLAlchemy understands; name a file instead"
        ) from error
    if (backend, True) not in _BEGIN:
        raise UsageError(f"database {backend} is not supported; name a file or a postgresql:// URL")
    return url


def _inspect_file(path: Path) -> bool:
    """Whether the file is read-only. Makes missing directories. Raises `StorageError` if it is no SQLite file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if not _writable(path.parent):
                raise StorageError(f"{path} cannot be created: its directory is not writable; name another file")
            return False
        start, _ = read_start(path, 16)
        for name in ("-journal", "-wal", "-shm"):  # SQLite opens them too, if they exist
            # Not opened: closing it would end the locks of this process on it.
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(f"{path}{name}").st_mode):
                    raise OSError(None, "Not a regular file")
    except OSError as error:
        raise StorageError(f"{path} cannot be opened ({error.strerror}); name another file") from error
    if start not in (b"", b"SQLite format 3\0"):
        raise StorageError(_SENTENCES["not a database"].format(place=path))
    return not (_writable(path) and _writable(path.parent))


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _connect_read_only(path: Path) -> sqlite3.Connection:
    # Without a write-ahead log, no process has the file open. Then "immutable" keeps SQLite from creating more files.
    in_use = path.with_name(f"{path.name}-wal").exists()
    return connect_read_only(path, immutable=not in_use, check_same_thread=False)


def _migrate(connection: Connection, version: str | None) -> None:
    """Upgrade a database from a schema version, or make the tables where there is none yet."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if version is None:
        Base.metadata.create_all(connection, checkfirst=False)
        command.stamp(config, "head")
    else:
        command.upgrade(config, "head")
