"""Files that are there complete or not at all: written aside, then renamed into place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hadagen.errors import StorageError


@contextmanager
def written_aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty file beside `path`, to be filled within the `with`; it then becomes `path`, or is gone if that failed.

    Directories are made. Raises `OSError` where there is no room or it may not be.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(b"")
        yield aside
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises `StorageError` where no file can be written at `path`; what is there is left alone."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: str | os.PathLike[str], error: Exception) -> StorageError:
    """What to say where `path` could not be written."""
    reason = error.strerror if isinstance(error, OSError) else error
    return StorageError(f"{path} cannot be written ({reason}); make room, or name another place")
