"""Atomic files: a file is written in another place, and then renamed, so that it is complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hadagen.errors import StorageError
from hadagen.files.opening import read_start
from hadagen.owners import make_folder

FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
HEADER_BYTES = 100  # enough to tell the kind of a file; the header of an SQLite database


@contextmanager
def atomic_file(path: str | os.PathLike[str], *, follow: bool = True) -> Iterator[Path]:
    """An empty file, to be filled within the `with`. At its end the file becomes `path`, or is removed on a failure.

    A file that is replaced passes its permissions on. If `path` is a symbolic link, the file it points to is replaced,
    or the link itself without `follow`. Missing directories are made. Raises `StorageError` if there is no room or no
    permission, within the `with` too.
    """
    place = Path(os.path.realpath(path) if follow else path)
    try:
        make_folder(place.parent)
        # In a directory of its own: no other user can guess its name or write in it, files that SQLite leaves are
        # removed with it, and the file has the permissions of any new file.
        with tempfile.TemporaryDirectory(prefix=".hadagen-", dir=place.parent, ignore_cleanup_errors=True) as directory:
            new = Path(directory, "new")  # a short name, because SQLite appends to it
            new.touch()
            yield new
            with new.open("r+b") as file:
                os.fsync(file.fileno())  # otherwise a crash might keep the new name without the content
            if place.exists() and not place.is_symlink():
                shutil.copymode(place, new)  # which may be read-only
            os.replace(new, place)
    except (OSError, sqlite3.Error) as error:
        raise unwritable(path, error) from error


def check_place(path: str | os.PathLike[str], kind: str, is_one: Callable[[bytes], bool]) -> None:
    """Raises `StorageError` if no file can be written at `path`, or if a file of another kind is there.

    kind: for the message. is_one: whether the first bytes of a file are of this kind. A file that is there is not
    changed.
    """
    path = Path(path)
    directory = Path(os.path.realpath(path)).parent  # as `atomic_file` finds it
    try:
        header = read_start(path, HEADER_BYTES)[0] if path.exists() else b""
        make_folder(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise unwritable(path, error) from error
    if header and not is_one(header):
        raise StorageError(f"{path} is there already and is not {kind}; name another place, or remove it first")


def unwritable(path: str | os.PathLike[str], error: Exception) -> StorageError:
    """The error for a `path` that could not be written."""
    reason = error.strerror if isinstance(error, OSError) else error
    if not isinstance(error, OSError) or error.errno in FULL:  # an error of SQLite itself means a full disk
        fix = "make room, or "
    else:
        fix = "make it writable, or " if error.errno in FORBIDDEN else ""
    return StorageError(f"{path} cannot be written ({reason}); {fix}name another place")
