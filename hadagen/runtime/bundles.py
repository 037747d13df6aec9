"""Where bundles are looked for, and in which order."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from hadagen.errors import StorageError
from hadagen.tuning_db.bundle import Bundle, shipped

VARIABLE = "HADAGEN_BUNDLE"

_left_out: set[Bundle] = set()


def user_directory() -> Path:
    """Where the bundles lie that were tuned on this machine, whatever they are called: `*.db`."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(data) / "hadagen" / "bundles"


def pinned() -> list[Bundle]:
    """The bundles that the environment variable HADAGEN_BUNDLE names, its paths separated like those in PATH.

    Raises `StorageError` where one of them is not a sound bundle.
    """
    return [_opened(Path(path)) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def in_turn() -> Iterator[list[Bundle]]:
    """The bundles to ask, those that are `pinned` before all that are `known`: the first that serve are the only ones
    to. Raises as `pinned` does."""
    yield pinned()
    yield known()


def known() -> list[Bundle]:
    """Every bundle there is, the most wanted first.

    1. those that are `pinned`;
    2. those of `user_directory`, by name;
    3. those that hadagen ships.

    Raises as `pinned` does. Of the others, an unsound one only causes a warning: a file left behind by another version
    must not stop a program that never asked for it.
    """
    bundles = pinned()
    for path in (*sorted(user_directory().glob("*.db")), *shipped().values()):
        try:
            bundle = _opened(path)
        except StorageError as error:
            _warn(error)
        else:
            if bundle not in _left_out:
                bundles.append(bundle)
    return bundles


def leave_out(bundle: Bundle, error: StorageError) -> None:
    """Goes on without a bundle in which a damage was found when more of it was read; raises the error again where it is
    pinned."""
    if bundle in pinned():
        raise error
    _left_out.add(bundle)
    _warn(error)


def _warn(error: StorageError) -> None:
    warnings.warn(f"hadagen goes on without a bundle: {error}", RuntimeWarning, stacklevel=3)


def _opened(path: Path) -> Bundle:
    try:
        state = path.stat()
    except OSError:
        return Bundle.open(path)  # which says what is wrong
    return _open(path, state.st_mtime_ns, state.st_size)


@functools.cache
def _open(path: Path, mtime_ns: int, size: int) -> Bundle:
    """Opens each state of a file once."""
    return Bundle.open(path)
