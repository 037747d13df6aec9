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
    """Where the bundles lie that were tuned on this machine, whatever they are called: `*.db`.

    Raises `StorageError` where no home directory is known.
    """
    data = os.path.expanduser(os.environ.get("XDG_DATA_HOME") or "~/.local/share")
    if data.startswith("~"):
        raise StorageError("no home directory is known to keep trials and bundles in; set XDG_DATA_HOME")
    return Path(data).absolute() / "hadagen" / "bundles"


def pinned() -> list[Bundle]:
    """The bundles that the environment variable HADAGEN_BUNDLE names, its paths separated like those in PATH.

    Raises `StorageError` where one of them is not a sound bundle.
    """
    return [_opened(path) for path in _pinned_files()]


def files() -> list[Path]:
    """Where a bundle is, or should be, whether it is sound or not; the most wanted first."""
    return [*_pinned_files(), *_others()]


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
    for path in _others():
        try:
            bundle = _opened(path)
        except StorageError as error:
            _warn(error)
        else:
            if bundle not in _left_out:
                bundles.append(bundle)
    return bundles


def _pinned_files() -> list[Path]:
    return [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def _others() -> list[Path]:
    try:
        directory = user_directory()
        # Not by `glob`, to which one that may not be read is empty.
        of_user = [directory / name for name in sorted(os.listdir(directory)) if name.endswith(".db")]
    except (FileNotFoundError, StorageError):
        of_user = []
    except OSError as error:
        of_user = []
        _warn(StorageError(f"{directory} cannot be read ({error.strerror}); make it readable"))
    return [*of_user, *shipped().values()]


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
