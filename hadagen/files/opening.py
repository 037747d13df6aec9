"""Opens files from unknown authors: only regular files, and only up to a bound."""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
import zlib
from typing import NamedTuple
from urllib.parse import quote_from_bytes

MOST_BYTES = 1 << 24  # of one value in a database, and of a cubin or PTX; real ones are a hundredth of it at most


class FileState(NamedTuple):
    """The identity of a file, which differs from that of a new file of the same name, and from before a change."""

    device: int
    inode: int
    size: int
    changed_ns: int  # the content
    altered_ns: int  # the content, the owner or the mode


def file_state(path: str | os.PathLike[str]) -> FileState | None:
    """The state of a file; None if there is no such file."""
    try:
        return state_of(os.stat(path))
    except OSError:
        return None


def state_of(found: os.stat_result) -> FileState:
    """The state of a file of this status."""
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_start(path: str | os.PathLike[str], size: int) -> tuple[bytes, os.stat_result]:
    """The first bytes of a regular file, and its status. Raises `OSError` for any other file; a pipe would block."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(None, "Is a directory" if stat.S_ISDIR(found.st_mode) else "Not a regular file")
        return os.read(number, size), found
    finally:
        os.close(number)


def connect_read_only(
    path: str | os.PathLike[str], *, immutable: bool, check_same_thread: bool = True
) -> sqlite3.Connection:
    """An SQLite connection to a file. The path may have bytes that are no UTF-8, or begin with two slashes."""
    return sqlite3.connect(
        f"{_uri(path)}?mode=ro{'&immutable=1' if immutable else ''}", uri=True, check_same_thread=check_same_thread
    )


def connect_alone(path: str | os.PathLike[str]) -> sqlite3.Connection:
    """An SQLite connection to a new file that no other process uses. It works on file systems without locks too."""
    return sqlite3.connect(f"{_uri(path)}?nolock=1", uri=True, isolation_level=None)


def _uri(path: str | os.PathLike[str]) -> str:
    # After two slashes, a URI has the name of a host.
    return f"file:{quote_from_bytes(b'/' + os.fsencode(os.path.abspath(path)).lstrip(b'/'))}"


def limit_values(connection: sqlite3.Connection) -> None:
    """Make SQLite refuse values and rows above `MOST_BYTES` before it allocates memory. Python 3.10 cannot do this."""
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)


def deflated(data: bytes, shared: bytes = b"") -> bytes:
    """The data compressed by zlib, with a dictionary if it is not empty."""
    stream = zlib.compressobj(9, zdict=shared) if shared else zlib.compressobj(9)
    return stream.compress(data) + stream.flush()


def inflated(data: bytes, shared: bytes = b"") -> bytes:
    """The data that `deflated` compressed. Raises `ValueError` if it is damaged, above `MOST_BYTES`, or of another
    dictionary."""
    stream = zlib.decompressobj(zdict=shared)
    try:
        content = stream.decompress(data, MOST_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(content) > MOST_BYTES:
        raise ValueError(f"a compressed value has more than {MOST_BYTES} bytes")
    if not stream.eof or stream.unused_data:
        raise ValueError("a compressed value was cut, or more follows it")
    return content
