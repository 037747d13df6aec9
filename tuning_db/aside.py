"""Files that are there complete or not at all: written aside, then renamed into place."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hadagen.errors import StorageError
from hadagen.tuning_db.files import read_start

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
    # In a directory of its own: nobody else can guess its name or write in it, what SQLite leaves goes with it, and the
    # file has the permissions of any new one.
    with tempfile.TemporaryDirectory(prefix=".hadagen-", dir=path.parent, ignore_cleanup_errors=True) as directory:
        aside = Path(directory, "new")  # a short name, for SQLite makes longer ones of it
        aside.touch()
        yield aside
        if path.exists():
            shutil.copymode(path, aside)
        with aside.open("r+b") as file:
            os.fsync(file.fileno())  # or the new name might last longer than what it names
        os.replace(aside, path)


def check_place(path: str | os.PathLike[str], kind: str, is_one: Callable[[bytes], bool]) -> None:
    """Raises `StorageError` where no file can be written at `path`, or one is there that is not of the `kind` to come,
    which `is_one` tells by its first bytes. What is there is left alone."""
    path = Path(path)
    directory = Path(os.path.realpath(path)).parent  # as `written_aside` finds it
    try:
        header = read_start(path, HEADER_BYTES)[0] if path.exists() else b""
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
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
