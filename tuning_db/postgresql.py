"""PostgreSQL under a tuning database: how it is reached, what its failures mean, and which of them may pass.

The driver is psycopg 3. It is imported when a database is opened, by SQLAlchemy.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from hadagen.errors import UsageError, install

DIALECT = "postgresql+psycopg"
INSTALL = install("fleet")
# A transaction that does nothing for so long is undone: its client may be gone, its locks are not. One that writes, for
# which others wait, after less than they wait.
ABANDONED_SECONDS = 300
ABANDONED_WRITER_SECONDS = 30
_LOCK = 1751213172  # any number, the same in every hadagen

# For libpq, unless the URL says otherwise. A server or a network that is gone is noticed within a minute.
_CONNECTION = {
    "connect_timeout": 10,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "client_encoding": "utf8",
    "fallback_application_name": "hadagen",
}

_PLACES = "host", "hostaddr", "port", "service", "dbname", "user"  # options of a URL

# Whether a role lacks a right that recording trials needs, besides reading them.
IS_READ_ONLY = """
    SELECT current_setting('transaction_read_only') = 'on' OR NOT bool_and(has_table_privilege(name, does))
    FROM unnest(CAST(:tables AS text[])) AS name, unnest(ARRAY['INSERT', 'UPDATE', 'DELETE']) AS does
"""

# SQLSTATE → our sentence. Those of class 08 and 57P are in `is_lost`.
_BY_CODE = {
    "25006": "{place} is read-only; name the database of a server that takes writes",
    "28000": "the server of {place} refuses its user ({reason}); check the user and the rules of the server",
    "28P01": "the server of {place} refuses its user or password; check both",
    "3D000": "the server of {place} has no database {database}; make it with createdb, or name another",
    "42501": "the user of {place} lacks a right ({reason}); let an owner grant it, or name another database",
    "53100": "the disk of the server of {place} is full ({reason}); make room and run again, nothing stored is lost",
    "53300": "the server of {place} has no connection left ({reason}); end other clients, or raise max_connections",
    "55P03": "{place} was locked by another run for {busy:.0f} s; wait for that run or end it",
}
# What libpq or psycopg says → our sentence, where no connection was made: then there is no code. A server may speak
# another language, and libpq too. Then the sentence at the end quotes it.
_BY_TEXT = {
    "failed to resolve host": "the host of {place} is not known ({reason}); check its name",
    "could not translate host": "the host of {place} is not known ({reason}); check its name",
    "no password supplied": "the server of {place} wants a password; put it into the URL, ~/.pgpass or PGPASSWORD",
    "password authentication failed": _BY_CODE["28P01"],
    'database ".*" does not exist': _BY_CODE["3D000"],
    'role ".*" does not exist': _BY_CODE["28P01"],
    "too many (clients|connections)|connection slots": _BY_CODE["53300"],
    "starting up|shutting down|recovery mode": "the server of {place} is not ready ({reason}); wait, and run it again",
    "refused|timeout|timed out|No such file|unreachable|No route": (
        "no server answers at {place} ({reason}); start it, or check host and port"
    ),
    "(invalid|bad|unknown) ": "{place} has an option that PostgreSQL refuses ({reason}); correct the URL",
}
_UNKNOWN = "{place} failed ({reason}); check it, or name another"


def checked(url: URL) -> URL:
    """The URL with the driver named. Raises `UsageError` if it names another driver, or cannot mean what it says."""
    if "+" in url.drivername and url.drivername != DIALECT:
        raise UsageError(f"{place_of(url)} names another driver than psycopg; name a file or a postgresql:// URL")
    if "@" in f"{url.host or ''}{url.database or ''}":
        # What follows it may belong to the password, so it is not shown.
        raise UsageError("the URL of the database has two @; write %40 for one in a user or a password, or name a file")
    given = dict(url.query)
    if isinstance(secret := given.pop("password", None), str):
        url = url.set(password=secret)
    return url.set(drivername=DIALECT, query=given)


def place_of(url: URL) -> str:
    """The URL for messages, without secrets; of its options, only those that say where the server is are kept."""
    others = [name for name in url.query if name not in _PLACES]
    return url.difference_update_query(others).render_as_string(hide_password=True)


def engine_options(url: URL) -> dict[str, Any]:
    """Keyword arguments of `create_engine`."""
    own = {name: value for name, value in _CONNECTION.items() if name not in url.query}
    return {"pool_pre_ping": True, "connect_args": own}


def begin(writes: bool, busy_seconds: float) -> str:
    """The statements that begin a transaction. One at a time writes. A reader sees the database at one moment."""
    abandoned = ABANDONED_WRITER_SECONDS if writes else ABANDONED_SECONDS
    waits = f"SET LOCAL lock_timeout = {round(busy_seconds * 1000)}"
    waits += f"; SET LOCAL idle_in_transaction_session_timeout = {abandoned * 1000}"
    if writes:
        return f"{waits}; SELECT pg_advisory_xact_lock({_LOCK})"
    return f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; {waits}"


def is_lost(error: SQLAlchemyError) -> bool:
    """Whether a transaction failed because the server was restarted, cannot be reached or has no connection left, or
    because it met another one or was taken for abandoned: then the same transaction may succeed later."""
    if not isinstance(error, DBAPIError):
        return False
    code = _code(error)
    if code is None:  # no server said so: it was never reached, or is gone
        return error.connection_invalidated or error.statement is None
    return error.connection_invalidated or code[:2] in ("08", "40") or code[:4] == "57P0" or code == "53300"


def sentence(error: DBAPIError, url: URL, busy_seconds: float) -> str:
    """One sentence that says what failed, and what to do."""
    reason = _reason(error)
    for secret in filter(None, (url.password, url.query.get("sslpassword"))):
        reason = reason.replace(str(secret), "***")
    known = {"place": place_of(url), "database": url.database, "reason": reason, "busy": busy_seconds}
    code = _code(error)
    if code is not None:
        return _BY_CODE.get(code, _UNKNOWN).format(**known)
    said = str(error.orig)
    return next((each for pattern, each in _BY_TEXT.items() if re.search(pattern, said)), _UNKNOWN).format(**known)


def _code(error: DBAPIError) -> str | None:
    """The SQLSTATE that the server gave."""
    code = getattr(error.orig, "sqlstate", None)
    return code if isinstance(code, str) else None


def _reason(error: DBAPIError) -> str:
    """The message of the server or of libpq in one line, without statement and address."""
    said = getattr(getattr(error.orig, "diag", None), "message_primary", None) or str(error.orig)
    last = str(said).strip().split("\n")[0].rpartition(" failed: ")[2] or str(said)
    return " ".join(last.removeprefix("FATAL:").split())
