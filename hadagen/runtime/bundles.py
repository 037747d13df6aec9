"""Where bundles are looked for, and in which order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from hadagen.errors import StorageError
from hadagen.tuning_db.bundle import Bundle, NoKernelError, shipped
from hadagen.tuning_db.files import FileState, file_state

VARIABLE = "HADAGEN_BUNDLE"

# What each file was found to be, in the state it had then: a bundle, or why it is left out.
_seen: dict[Path, tuple[FileState, Bundle | str]] = {}  # a bundle, or what is wrong with it
_warned: set[str] = set()


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
            bundles.append(_opened(path))
        except StorageError as error:
            _warn(f"hadagen goes on without a bundle: {error}")
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
        _warn(f"hadagen goes on without a bundle: {directory} cannot be read ({error.strerror}); make it readable")
    return [*of_user, *shipped().values()]


def leave_out(bundle: Bundle, error: StorageError) -> None:
    """Goes on without a bundle in which a damage was found when more of it was read; raises the error again where it is
    pinned. One that was only replaced since something was chosen from it is used as it is now."""
    if isinstance(error, NoKernelError):
        _warn(f"{bundle.path} was replaced; hadagen uses what it is now")
        return
    if bundle.path in map(Path.absolute, _pinned_files()):
        raise error
    _seen[bundle.path] = bundle.state, str(error)  # its traceback would keep the tensors of the call
    _warn(f"hadagen goes on without a bundle: {error}")


def _warn(message: str) -> None:
    """Once."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _opened(path: Path) -> Bundle:
    """The bundle at a path, opened once in each state of the file."""
    path = path.absolute()
    state = file_state(path)
    if state is None:
        return Bundle.open(path)  # which says what is wrong
    known, found = _seen.get(path, (None, None))
    if known != state:
        try:
            found = Bundle.open(path)
        except StorageError as error:
            found = str(error)
        _seen[path] = state, found
    if isinstance(found, Bundle):
        return found
    raise StorageError(found)
