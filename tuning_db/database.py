"""Opens a tuning database, gives its transactions, and turns each failure into one clear sentence.

A database is a path or an SQLAlchemy URL (SQLite or PostgreSQL). A new database gets the current schema. An older one
is upgraded with a message. A newer or foreign one is refused, unchanged. A file without write permission is only read,
and so are the tables of a PostgreSQL database whose user may not write them.

If the connection to a server is lost, such as at its restart, a transaction is tried again as a whole for
`PATIENCE_SECONDS`. Whether the lost one was committed may be unknown. So each must have the same effect if done twice.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from hadagen.errors import StorageError, UsageError, shortened, shown
from hadagen.files.opening import connect_read_only, limit_values, read_start
from hadagen.tuning_db import postgresql
from hadagen.tuning_db.schema import SCHEMA_VERSION, VERSION_TABLE, Base

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_SECONDS = 60.0  # how long to wait for another process to finish its transaction
PATIENCE_SECONDS = 60.0  # how long to try to reach a server again that was lost; a restart takes some seconds
RETRY_SECONDS = 0.5  # between two attempts

T = TypeVar("T")

_log = logging.getLogger("hadagen")
# SQLAlchemy logs a traceback if Ctrl-C ends a query. Without a handler, that would be printed.
logging.getLogger("sqlalchemy").addHandler(logging.NullHandler())

# Message of SQLite → our sentence. Its messages are part of its interface; Python 3.10 does not give error codes.
_DAMAGED = "{place} is damaged; restore it from a copy, or name another file to start a new database"
_URL = "postgresql://USER:PASSWORD@HOST/DATABASE"
# Text that begins like a URL, or has a password as a URL has, but is no URL. To name such a file, write "./" before it.
_ALMOST_A_URL = re.compile(
    r"(?i)\s*[a-z][a-z0-9+.-]*\s*:/|\s*(postgres(ql)?|psql|pgsql|sqlite|mysql|mariadb)(\+\w*)?\s*(:|;|//)"
    r"|(?![./~]|\w+/)[^@]*:[^@]*@|//[^@]*@|(.*\s)?password\s*="
)
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

    `place`: its path or URL for messages, without a password. `url`, with a password, and `engine_options`: open it
    again, for instance for Optuna, whose tables are beside ours. `read_only`: whether it is only read. Every method
    raises `StorageError` if the database fails. Stored rows are then unchanged.
    """

    def __init__(self, where: str | os.PathLike[str], upgraded: Callable[[Session], None]) -> None:
        """Open a database; create or upgrade it if needed. `upgraded`: called at the end of an upgrade, within its
        transaction. Raises `UsageError` for a URL of another backend than SQLite and PostgreSQL."""
        self._upgraded = upgraded
        self._url = _url(where)
        self.url = self._url.render_as_string(hide_password=False)
        self._path = _file(self._url)
        self._on_server = self._url.get_backend_name() == "postgresql"
        self.place = str(self._path or postgresql.place_of(self._url))
        self.read_only = self._path is not None and _inspect_file(self._path)
        self.engine_options: dict[str, Any] = (
            postgresql.engine_options(self._url) if self._on_server else {"connect_args": {"timeout": BUSY_SECONDS}}
        )
        self._engine = self._create_engine(self._url)
        self._writer = self._engine.execution_options(writes=True)
        self._bring_up_to_date()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r})"

    def close(self) -> None:
        self._engine.dispose()

    def read(self, work: Callable[[Session], T]) -> T:
        """Call `work` in a transaction that sees the database at one moment. Returns what it returns."""
        return self.patiently(lambda: self._transact(self._engine, work))

    def write(self, work: Callable[[Session], T], *, patient: bool = True) -> T:
        """Call `work` in a transaction that excludes other writers. It is durable when this returns, and has no effect
        if it fails.

        If the server is lost, `work` is called again, unless not `patient`, and finds what it wrote before or not.
        """
        self.check_writable()
        return self.patiently(lambda: self._transact(self._writer, work), PATIENCE_SECONDS if patient else 0.0)

    def patiently(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """Call `work`, and again if it lost the server, until that was away for so many `seconds`
        (`PATIENCE_SECONDS`). `work` may use another library, which wraps the errors of SQLAlchemy."""
        limit = PATIENCE_SECONDS if seconds is None else seconds
        lost = None  # when
        while True:
            try:
                with self.lent():
                    try:
                        return work()
                    except Exception as error:
                        if not self._is_lost(error):
                            raise
                        now = time.monotonic()
                        if lost is None and limit:
                            _log.warning("%s does not answer; trying again for %.0f s", self.place, limit)
                        lost = now if lost is None else lost
                        if now - lost >= limit:
                            raise
            except StorageError as error:
                if lost is None or not limit:
                    raise
                raise StorageError(f"{error}; it was tried for {limit:.0f} s") from error.__cause__
            time.sleep(RETRY_SECONDS)

    def alone(self, work: Callable[[], T]) -> T:
        """Call `work`, which uses the database by its `url`, such as to make tables that are not ours. On a server no
        other run does so, or writes, at the same time."""

        def locked(session: Session) -> T:
            session.connection()  # begins the transaction, which locks
            return work()

        return self.write(locked) if self._on_server else self.patiently(work)

    def clock(self, session: Session) -> float:
        """Seconds since the epoch by a clock that all users of the database share: that of its server, or of this
        machine."""
        if not self._on_server:
            return time.time()
        return float(session.scalar(text("SELECT extract(epoch FROM clock_timestamp())")))

    def _transact(self, engine: Engine, work: Callable[[Session], T]) -> T:
        with self._values_checked(), Session(engine) as session, session.begin():
            return work(session)

    def check_writable(self) -> None:
        """Raises `StorageError` if it is read-only."""
        if self.read_only and self._on_server:
            raise StorageError(
                f"{self.place} is read-only for its user; have INSERT, UPDATE and DELETE on its tables granted, "
                "or name another database"
            )
        if self.read_only:
            raise StorageError(_SENTENCES["readonly database"].format(place=self.place))

    def check(self) -> None:
        """Raises `StorageError` if SQLite finds damage anywhere in its file."""
        if self._path is not None:
            found = self.read(lambda session: session.scalar(text("PRAGMA integrity_check(1)")))
            if found != "ok":
                raise StorageError(_DAMAGED.format(place=self.place))

    def _create_engine(self, url: URL) -> Engine:
        try:
            if self._path is not None and self.read_only:
                # Opened for each transaction, because another process may replace the file, or begin to write it.
                engine = create_engine(url, creator=partial(_connect_read_only, self._path), poolclass=NullPool)
            else:
                engine = create_engine(url, **self.engine_options)
        except ImportError as error:
            raise StorageError(
                f"{self.place} needs the Python package psycopg, which is missing; {postgresql.INSTALL}"
                if self._on_server
                else f"{self.place} needs the Python package {error.name}, which is missing; install it with pip"
            ) from error
        except ArgumentError as error:
            raise UsageError(
                f"{self.place} names no driver that SQLAlchemy has; name a file or a postgresql:// URL"
            ) from error

        if not self._on_server:
            event.listen(engine, "connect", lambda connection, _: limit_values(connection))

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            writes = connection.get_execution_options().get("writes", False)
            if self._on_server:
                connection.exec_driver_sql(postgresql.begin(writes, BUSY_SECONDS))
            else:
                # One at a time writes, so that a writer may look first and then insert.
                connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        return engine

    def _bring_up_to_date(self) -> None:
        with self.lent(), self._values_checked(), self._engine.begin() as connection:
            version = self._version(connection)
            if self._on_server and version == SCHEMA_VERSION:
                self.read_only = bool(
                    connection.scalar(text(postgresql.IS_READ_ONLY), {"tables": list(Base.metadata.tables)})
                )
        if version != SCHEMA_VERSION:
            if self.read_only:
                raise StorageError(
                    f"{self.place} has schema {version or 'none'}, not {SCHEMA_VERSION}, and is read-only; "
                    "make it writable, or open a copy that is, and it will be upgraded"
                )
            version = self.patiently(self._upgrade)
            if version not in (None, SCHEMA_VERSION):
                _log.warning("%s was upgraded from schema %s to %s", self.place, version, SCHEMA_VERSION)
        if self._path is not None and not self.read_only:
            self._let_readers_and_writers_overlap()

    def _upgrade(self) -> str | None:
        """Returns the version before."""
        with self._values_checked(), self._writer.begin() as connection:
            version = self._version(connection)  # again: another process may have been faster
            if version != SCHEMA_VERSION:
                _migrate(connection, version)
                with Session(connection) as session:
                    self._upgraded(session)
                    session.flush()
        return version

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
            raise ValueError(f"{shown(version)} is no schema version")
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
                f"{self.place} is not a tuning database: {shown(others[0])} in it is not a plain table; remove that, "
                "or name another file"
            )

    def _let_readers_and_writers_overlap(self) -> None:
        """Turn on SQLite's write-ahead log, which the file keeps on."""
        connection = self._engine.raw_connection()
        # SQLite refuses this while another process has a transaction. The next opening does it then.
        with suppress(sqlite3.OperationalError):
            connection.cursor().execute("PRAGMA journal_mode = WAL")
        connection.close()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context in which another library works in the database by its `url`, and may wrap the errors of SQLAlchemy.
        If the database fails there, this raises `StorageError` too."""
        try:
            yield
        except Exception as error:
            failure = _of_sqlalchemy(error)
            if failure is None or isinstance(error, StorageError):
                raise
            raise StorageError(self._sentence(failure)) from error

    @contextmanager
    def _values_checked(self) -> Iterator[None]:
        try:
            yield
        except UnicodeEncodeError as error:  # of what is to be stored: what was read came from bytes
            raise StorageError(
                f"{self.place} cannot store {shown(error.object)}, which has a lone surrogate, as of a name that is no "
                "UTF-8; leave that character out"
            ) from error
        except (ValueError, RecursionError, OverflowError) as error:  # no such value was written by hadagen
            raise StorageError(_DAMAGED.format(place=self.place)) from error

    def _sentence(self, error: SQLAlchemyError) -> str:
        if self._on_server and isinstance(error, DBAPIError):
            return postgresql.sentence(error, self._url, BUSY_SECONDS)
        reason = str(getattr(error, "orig", None) or error)
        for says, sentence in _SENTENCES.items():
            if says in reason:
                return sentence.format(place=self.place, busy=BUSY_SECONDS, free=self._free_bytes())
        return f"{self.place} failed ({' '.join(reason.split())}); check it, or name another"

    def _is_lost(self, error: BaseException) -> bool:
        failure = _of_sqlalchemy(error)
        return self._on_server and failure is not None and postgresql.is_lost(failure)

    def _free_bytes(self) -> int:
        with suppress(OSError):  # the directory may be gone too
            return shutil.disk_usage(self._path.parent).free if self._path else 0
        return 0


def _of_sqlalchemy(error: BaseException) -> SQLAlchemyError | None:
    """The error of SQLAlchemy that this is, or that another library wrapped."""
    return next((each for each in (error, error.__cause__) if isinstance(each, SQLAlchemyError)), None)


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
            f"database {shown(text_form)} has a name that is no UTF-8, which no URL can have; name another file"
        )
    if "://" not in text_form:
        if isinstance(where, str) and _ALMOST_A_URL.match(text_form):  # not shown, as it may have a password
            raise UsageError(f"the database is neither a file nor a URL; write a URL like {_URL}, or ./NAME for a file")
        return URL.create("sqlite", database=os.path.abspath(text_form))
    try:
        url = make_url(text_form)
        backend = url.get_backend_name()
    except (SQLAlchemyError, ValueError):
        # Any part of it may be a password, so it is not shown, nor is the error that quotes it.
        raise UsageError(f"the URL of the database cannot be read; write a URL like {_URL}, or name a file") from None
    if backend in ("postgresql", "postgres"):
        return postgresql.checked(url)
    if backend != "sqlite":
        raise UsageError(f"database {shortened(backend)} is not supported; name a file or a postgresql:// URL")
    return url


def _inspect_file(path: Path) -> bool:
    """Whether the file is read-only. Makes missing directories. Raises `StorageError` if it is no SQLite file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if not _writable(path.parent):
                raise StorageError(f"{path} cannot be created: its directory is not writable; name another file")
            _check_locks(path)
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
    read_only = not (_writable(path) and _writable(path.parent))
    if not read_only:
        _check_locks(path)
    return read_only


def _check_locks(path: Path) -> None:
    """Raises `StorageError` if files beside this one cannot be locked. SQLite would say that it is locked by others."""
    with suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kind that SQLite uses
        except OSError as error:
            raise StorageError(
                f"{path} lies on a file system without locks ({error.strerror}), and a database needs them; name a "
                "file on another disk"
            ) from error


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
