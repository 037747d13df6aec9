"""Runs other programs, such as compilers, within a time limit, and leaves nothing of them running.

A compiler that fails may have found its input wrong, or have been killed, starved or hung. A failure of the second kind
says nothing about the input, and may pass. `Finished.passing` tells the two apart. `Patience` ends a run after several
failures of the second kind in a row.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, current_thread, main_thread
from types import FrameType

from hadagen.errors import ToolchainError

COMPILE_SECONDS = 120.0  # for one call of a compiler; on an idle machine the longest takes a few
IN_A_ROW = 3  # a run ends when a compiler dies for this many kernels in a row

_POLL_SECONDS = 0.1
_NEVER = Event()
# A driver such as nvcc or g++ ends with an ordinary status if a program that it started was killed or found no room.
# Only its text says so.
_PASSING = re.compile(
    "died due to signal|signal terminated program|terminated with signal|Resource temporarily unavailable"
    "|Disk quota exceeded|No space left on device|Cannot allocate memory"
    "|internal compiler error|[Mm]emory allocation fail|virtual memory exhausted|std::bad_alloc"
    "|NVRTC_ERROR_OUT_OF_MEMORY|MemoryError"
)
_NO_SUCH_PROGRAM = (126, 127)  # of a shell, for a program that cannot be run or is missing


class Stopped(Exception):
    """The caller set the event that stops the program."""


@dataclass(frozen=True)
class Finished:
    """How a program ended. `status`: as in `subprocess`. `log`: all that it wrote to stdout and stderr. `broken`:
    another failure, whatever the status; "" if none."""

    status: int
    log: str
    broken: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 0 and not self.broken

    @property
    def passing(self) -> str:
        """Why the program failed, as the end of a sentence, if that says nothing about its input; otherwise ""."""
        if self.ok or self.broken:
            return self.broken
        killed = -self.status if self.status < 0 else self.status - 128  # a shell adds 128
        if 0 < killed < signal.NSIG:
            return f"was killed by signal {killed}"
        if _PASSING.search(self.log) or self.status in _NO_SUCH_PROGRAM:
            return f"failed ({self.first_lines})"
        return ""

    @property
    def first_lines(self) -> str:
        """The beginning of the log as one line; the exit status if the log is empty."""
        return one_line(self.log) or f"exit code {self.status}"


def one_line(text: str) -> str:
    """The first three lines that are not empty, as one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[:3])


def run(
    command: Sequence[str | Path],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = COMPILE_SECONDS,
    stopped: Event = _NEVER,
) -> Finished:
    """Run a program in `folder`, which also gets its temporary files, and wait until it ends.

    `environment`: variables besides those of this process. The program is killed, with all that it started, when
    `seconds` have passed, when `stopped` is set (which raises `Stopped`), or at an exception. Raises `OSError` if it
    cannot be started.
    """
    variables = {**os.environ, **(environment or {}), "LC_ALL": "C"}
    if folder is not None:
        variables["TMPDIR"] = str(folder)
    deadline = time.monotonic() + seconds
    with ExitStack() as at_end:
        with _interrupts_later():
            process = at_end.enter_context(
                subprocess.Popen(
                    command,
                    cwd=folder,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    errors="replace",
                    # A group of its own can be killed as one. Ctrl-C does not reach it, where it would look like a
                    # failure.
                    start_new_session=True,
                )
            )

            def kill_at_an_exception(kind: object, *_: object) -> None:
                if kind is not None:
                    _kill(process)

            at_end.push(kill_at_an_exception)
        while True:
            if stopped.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                _kill(process)
                return Finished(-signal.SIGKILL, "", f"took more than {seconds:g} s")
            with suppress(subprocess.TimeoutExpired):
                log, _ = process.communicate(timeout=_POLL_SECONDS)
                return Finished(process.returncode, log)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the end: before it, nobody could end a program that has just started."""
    numbers = (signal.SIGINT, signal.SIGTERM) if current_thread() is main_thread() else ()
    known = {number: each for number in numbers if callable(each := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []
    for number in known:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)
        if came:
            first, frame = came[0]
            known[signal.Signals(first)](first, frame)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


class Patience:
    """Ends a run whose compiler dies for `IN_A_ROW` kernels in a row, because then the machine is to blame."""

    def __init__(self) -> None:
        self._died: set[str] = set()
        self._lock = Lock()

    def worked(self) -> None:
        """Record that a compiler ran to its end: it compiled or refused a kernel."""
        with self._lock:
            self._died.clear()

    def lose(self, kernel: str, compiler: str, reason: str) -> None:
        """Record that a compiler died for a kernel. Raises `ToolchainError` if it is the last of `IN_A_ROW`."""
        with self._lock:
            self._died.add(kernel)
            if len(self._died) >= IN_A_ROW:
                raise ToolchainError(
                    f"{compiler} {reason}, for {IN_A_ROW} kernels in a row; mend that, such as by freeing memory, and "
                    "run the same command again: none of these counts as tried"
                )
