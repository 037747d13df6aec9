"""Processes that tests start: whether they run, programs that are scripts, and Ctrl-C that comes wherever tests run."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def is_running(pid: int) -> bool:
    """Zombies, which only wait to be asked how they ended, are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(holds: Callable[[], object]) -> None:
    """Fails the test after a minute, many times what anything takes."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def script(path: Path, *lines: str, mode: int = 0o755) -> Path:
    """Write a program of these lines for the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(mode)
    return path


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt`, even if whoever runs the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
