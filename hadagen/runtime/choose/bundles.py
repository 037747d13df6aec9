"""Finds bundles, in the order of preference."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hadagen.errors import StorageError
from hadagen.files.opening import FileState, file_state, read_start, state_of
from hadagen.owners import fault_beside, fault_of
from hadagen.problem.problem import Problem
from hadagen.runtime.choose import trust
from hadagen.tuning_db.bundle import Bundle, BundleEntry, NoKernelError, shipped
from hadagen.tuning_db.signatures import PublicKey

VARIABLE = "HADAGEN_BUNDLE"
_NAME_IT = f"or name the bundle in {VARIABLE}"
_PACKAGE = Path(__file__).parent.parent  # whoever may write there decides what runs anyway


class _Seen(NamedTuple):
    """A file as it was opened."""

    state: FileState
    named: bool  # by the user, in HADAGEN_BUNDLE
    keys: str | None  # `trust.setting`
    found: Bundle | StorageError  # without a traceback, which would keep the tensors of the call


_seen: dict[Path, _Seen] = {}
_warned: set[str] = set()


def user_directory() -> Path:
    """The directory of the bundles that were tuned on this machine: `*.db`.

    Raises `StorageError` if no home directory is known.
    """
    data = os.path.expanduser(os.environ.get("XDG_DATA_HOME") or "~/.local/share")
    if data.startswith("~"):
        raise StorageError("no home directory is known to keep trials and bundles in; set XDG_DATA_HOME")
    return Path(data).absolute() / "hadagen" / "bundles"


def pinned() -> list[Bundle]:
    """The bundles that the environment variable HADAGEN_BUNDLE names. Its paths are separated as in PATH.

    Raises `StorageError` if one of them is damaged or no bundle, or not signed by a trusted key, and what
    `trust.trusted_keys` raises. Who owns the files does not matter, because the user named them.
    """
    trust.trusted_keys()
    return [_opened(path) for path in _pinned_files()]


def files() -> list[Path]:
    """The paths where a bundle is, or should be, damaged or not; in the order of preference."""
    return [*_pinned_files(), *_others()]


def in_turn() -> Iterator[list[Bundle]]:
    """The `pinned` bundles, then all that are `known`. Only the first list with a bundle that serves is used. Raises
    what `pinned` raises."""
    yield pinned()
    yield known()


def by_authority() -> Iterator[list[Bundle]]:
    """The `pinned` bundles, those that hadagen ships, and all that are `known`, as they are asked for the arithmetic of
    batch-invariant calls. Raises what `pinned` raises."""
    yield pinned()
    yield [bundle for bundle in known() if bundle.path in shipped().values()]
    yield known()


def known() -> list[Bundle]:
    """All bundles, in the order of preference.

    1. those that are `pinned`;
    2. those of `user_directory`, by name;
    3. those that hadagen ships.

    Raises what `pinned` raises. A damaged bundle among the others only gives a warning, and so does one that others
    could change, or that no trusted key signed: such a file must not stop a program that did not name it.
    """
    bundles, untrusted = pinned(), []
    for path in _others():
        try:
            bundles.append(_opened(path))
        except trust.UntrustedError as error:
            untrusted.append(str(error))
        except StorageError as error:
            _warn(f"hadagen goes on without a bundle: {error}")
    if untrusted:
        count = "a bundle" if len(untrusted) == 1 else f"{len(untrusted)} bundles that no trusted key signed, such as"
        _warn(f"hadagen goes on without {count}: {untrusted[0]}")
    return bundles


def untrusted() -> list[Path]:
    """The bundles that `known` leaves out because no trusted key signed them."""
    known()
    found = ((path, _seen.get(path.absolute())) for path in _others())
    return [path for path, seen in found if seen and isinstance(seen.found, trust.UntrustedError)]


def _pinned_files() -> list[Path]:
    return [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def _others() -> list[Path]:
    of_user: list[Path] = []
    try:
        directory = user_directory()
        # `glob` would treat an unreadable directory as empty.
        of_user = [directory / name for name in sorted(os.listdir(directory)) if name.endswith(".db")]
        if of_user and (problem := fault_of(directory)):
            of_user = []
            _warn(f"hadagen goes on without the bundles in {directory}: {problem}, or name them in {VARIABLE}")
    except (FileNotFoundError, StorageError):
        pass
    except OSError as error:
        _warn(f"hadagen goes on without a bundle: {directory} cannot be read ({error.strerror}); make it readable")
    return [*of_user, *shipped().values()]


def why_unused(path: Path) -> str:
    """Why calls will not use a bundle that was written to `path`, and what to do, as a clause; "" if they will, or if
    calls use a file there only if HADAGEN_BUNDLE names it."""
    path = path.absolute()
    with suppress(StorageError):  # no home directory is known
        if path.parent == user_directory() and not _is_pinned(path) and (problem := fault_of(path)):
            return f"{problem}, {_NAME_IT}"
        if trust.setting() is not None and (path.parent == user_directory() or _is_pinned(path)):
            return f"{trust.VARIABLE} is set; sign it with `hadagen bundle sign`"
    return ""


def entries_of(bundle: Bundle, problem: Problem) -> list[BundleEntry]:
    """The entries of a problem; none if that shows that the bundle is damaged, which `leave_out` then leaves out."""
    try:
        return bundle.entries(problem)
    except StorageError as error:
        leave_out(bundle, error)
        return []


def leave_out(bundle: Bundle, error: StorageError) -> None:
    """Go on without a bundle whose damage was found when more of it was read. Raises the error again if it is pinned. A
    bundle that was only replaced in the meantime stays in use, in its new state."""
    if isinstance(error, NoKernelError):
        _warn(f"{bundle.path} was replaced; hadagen uses what it is now")
        return
    if _is_pinned(bundle.path):
        raise error
    _seen[bundle.path] = _Seen(bundle.state, False, trust.setting(), _alone(error))
    _warn(f"hadagen goes on without a bundle: {error}")


def _warn(message: str) -> None:
    """Warn once with each message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _opened(path: Path) -> Bundle:
    """The bundle at a path, opened once in each state of the file. Raises `StorageError` if it must not be used."""
    path, keys = path.absolute(), trust.trusted_keys()
    state, named = file_state(path), _is_pinned(path)
    if state is None:
        return Bundle.open(path)  # raises the right error
    seen = _seen.get(path)
    if seen is None or seen[:3] != (state, named, trust.setting()):
        found: Bundle | StorageError
        try:
            found = Bundle.open(path, trust.accepting(keys)) if named else _open_found(path, keys)
        except StorageError as error:
            found = _alone(error)
        seen = _seen[path] = _Seen(state, named, trust.setting(), found)
    if isinstance(seen.found, Bundle):
        return seen.found
    raise _alone(seen.found)


def _alone(error: StorageError) -> StorageError:
    """The same without a traceback."""
    return (trust.UntrustedError if isinstance(error, trust.UntrustedError) else StorageError)(str(error))


def _open_found(path: Path, keys: Sequence[PublicKey] | None) -> Bundle:
    """The bundle at a path that nobody named. Raises `StorageError` if others could change it."""
    try:
        _, status = read_start(path, 0)
    except OSError:
        return Bundle.open(path)  # raises the right error
    is_shipped = path in shipped().values()
    if problem := fault_beside(path, status, _PACKAGE) if is_shipped else fault_of(path, status):
        raise StorageError(f"{path} could be changed by others: {problem}, {_NAME_IT}")
    bundle = Bundle.open(path, trust.accepting(keys))
    if bundle.state != state_of(status):  # it was replaced in between
        return _open_found(path, keys)
    return bundle


def _is_pinned(path: Path) -> bool:
    return path in map(Path.absolute, _pinned_files())
