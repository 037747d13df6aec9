"""Files that are there complete or not at all: written aside, then renamed into place."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hadagen.errors import StorageError

FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
HEADER_BYTES = 100  # what says which kind a file is; in an SQLite database, its header


@contextmanager
def written_aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty file beside `path`, to be filled within the `with`; it then becomes `path`, or is gone if that failed.

    The permissions of a file that is replaced stay as they are, and so does a symbolic link: what it points to is
    written. Directories are made. Raises `OSError` where there is no room or it may not be.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(b"")
        yield aside
        if path.exists():
            shutil.copymode(path, aside)
        with aside.open("r+b") as file:
            os.fsync(file.fileno())  # or the new name might last longer than what it names
        os.replace(aside, path)
    except BaseException:
        for left in (aside, aside.with_name(f"{aside.name}-journal")):  # SQLite's, where a database was being written
            with suppress(OSError):
                left.unlink()
        raise


def check_place(path: str | os.PathLike[str], kind: str, is_one: Callable[[bytes], bool]) -> None:
    """Raises `StorageError` where no file can be written at `path`, or one is there that is not of the `kind` to come,
    which `is_one` tells by its first bytes. What is there is left alone."""
    path = Path(path)
    directory = Path(os.path.realpath(path)).parent  # as `written_aside` finds it
    try:
        if path.exists() and not path.is_file():
            raise IsADirectoryError(None, "Is a directory") if path.is_dir() else OSError(None, "Not a regular file")
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        header = b""
        if path.exists():
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
    except OSError as error:
        raise unwritable(path, error) from error
    if header and not is_one(header):
        raise StorageError(f"{path} is there already and is not {kind}; name another place, or remove it first")


def unwritable(path: str | os.PathLike[str], error: Exception) -> StorageError:
    """What to say where `path` could not be written."""
    reason = error.strerror if isinstance(error, OSError) else error
    if not isinstance(error, OSError) or error.errno in FULL:  # SQLite's own comes of a disk that is full
        fix = "make room, or "
    else:
        fix = "make it writable, or " if error.errno in FORBIDDEN else ""
    return StorageError(f"{path} cannot be written ({reason}); {fix}name another place")
