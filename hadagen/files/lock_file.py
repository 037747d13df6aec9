"""A lock beside a file that several processes write, so that one of them does the work that all of them want."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hadagen.errors import StorageError
from hadagen.files.atomic_file import unwritable
from hadagen.files.opening import file_state, state_of
from hadagen.owners import make_folder

_POLL_SECONDS = 0.1


@contextmanager
def turn(path: Path, patience_s: float, is_done: Callable[[], bool]) -> Iterator[bool]:
    """Wait for the lock of `path`, and hold it within the `with`. Yields whether there is work left: not if `is_done`,
    which is asked whenever the file has changed.

    The lock is a file of the same name that ends in .lock, and stays. The system unlocks it when a process ends. On a
    file system without locks, nobody waits.

    Raises `StorageError` if it cannot be made, or if others had it for `patience_s` and the file did not change.
    """
    if is_done():
        yield False
        return
    place = path.with_suffix(".lock")
    try:
        make_folder(place.parent)
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise unwritable(place, error) from error
    try:
        seen, since = file_state(path), time.monotonic()
        while not _lock(descriptor):
            if time.monotonic() - since > patience_s:
                raise StorageError(
                    f"another process has locked {place} for {patience_s:g} s and written nothing; wait until it is "
                    "done, or end it, and call again"
                )
            time.sleep(_POLL_SECONDS)
            if (state := file_state(path)) != seen:
                seen, since = state, time.monotonic()
                if is_done():
                    yield False
                    return
        yield not is_done()
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile holds it too
        os.close(descriptor)


@contextmanager
def sole(place: Path) -> Iterator[bool]:
    """Hold the lock file `place` within the `with`, and remove it at the end. Yields whether no other process holds it.

    The system unlocks it when a process ends, so the lock file of a process that was killed holds nobody up. On a file
    system without locks, every process has it. Raises `StorageError` if it cannot be made.
    """
    try:
        descriptor = _latest(place)
    except OSError as error:
        raise unwritable(place, error) from error
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with suppress(OSError):
                place.unlink()
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _latest(place: Path) -> int | None:
    """A descriptor of a lock file that we have locked; None if another process has."""
    while True:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not _lock(descriptor):
            os.close(descriptor)
            return None
        if (state := file_state(place)) and state == state_of(os.fstat(descriptor)):
            return descriptor
        os.close(descriptor)  # removed by the process that had it, after we opened it


def _lock(descriptor: int) -> bool:
    """Whether we have the lock now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has none
        return True
    return True
