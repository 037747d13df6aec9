"""Other programs, such as compilers: run to their end, within a time, with nothing of them left running.

A compiler that ends badly may have found its input wrong, or have been killed, starved or hung. The second says nothing
of the input and may pass: `Finished.passing` tells the two apart, and `Patience` says when enough is enough.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

from hadagen.errors import ToolchainError

COMPILE_SECONDS = 120.0  # for one call of a compiler; on an idle machine the longest takes a few
IN_A_ROW = 3  # kernels for which a compiler dies one after another before a run ends

_POLL_SECONDS = 0.1
_NEVER = Event()
# A driver such as nvcc or g++ ends with an ordinary status where a program that it started was killed or found no room.
# Only its text says so.
_PASSING = re.compile(
    "died due to signal|signal terminated program|terminated with signal|Resource temporarily unavailable"
    "|Disk quota exceeded|No space left on device|Cannot allocate memory"
    "|internal compiler error|[Mm]emory allocation fail|virtual memory exhausted|std::bad_alloc"
)
_NO_SUCH_PROGRAM = (126, 127)  # of a shell, for a program that cannot be run or is missing


class Stopped(Exception):
    """The caller set the event that stops what it runs."""


@dataclass(frozen=True)
class Finished:
    """How a program ended. `status` as in `subprocess`, `log` what it wrote to either output; `broken`: what else went
    wrong, whatever the status."""

    status: int
    log: str
    broken: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 0 and not self.broken

    @property
    def passing(self) -> str:
        """Why its failure says nothing of what it worked on, as the end of a sentence; empty where it may say some."""
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
        """The start of the log as one line; the exit status where the log is empty."""
        return one_line(self.log) or f"exit code {self.status}"


def one_line(text: str) -> str:
    """The first lines that are not empty, as one."""
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
    """Run a program in `folder`, where it puts its temporary files too, and wait until it ends.

    `environment`: variables besides those of this process. When `seconds` have passed it is killed, with all that it
    started; and so it is when `stopped` is set, which raises `Stopped`, or an exception comes. Raises `OSError` where
    it cannot be started.
    """
    variables = {**os.environ, **(environment or {}), "LC_ALL": "C"}
    if folder is not None:
        variables["TMPDIR"] = str(folder)
    deadline = time.monotonic() + seconds
    with subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        # A group of its own, to be killed as one. Ctrl-C does not reach it, or it would pass for a failure.
        start_new_session=True,
    ) as process:
        try:
            while True:
                if stopped.is_set():
                    raise Stopped
                if time.monotonic() > deadline:
                    _kill(process)
                    return Finished(-signal.SIGKILL, "", f"took more than {seconds:g} s")
                with suppress(subprocess.TimeoutExpired):
                    log, _ = process.communicate(timeout=_POLL_SECONDS)
                    return Finished(process.returncode, log)
        except BaseException:
            _kill(process)
            raise


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


class Patience:
    """Ends a run whose compiler dies for `IN_A_ROW` kernels in a row: the fault is then the machine's."""

    def __init__(self) -> None:
        self._died: set[str] = set()
        self._lock = Lock()

    def worked(self) -> None:
        """A kernel was compiled, or refused."""
        with self._lock:
            self._died.clear()

    def lose(self, kernel: str, compiler: str, reason: str) -> None:
        """A compiler died for a kernel. Raises `ToolchainError` where that is one too many."""
        with self._lock:
            self._died.add(kernel)
            if len(self._died) >= IN_A_ROW:
                raise ToolchainError(
                    f"{compiler} {reason}, for {IN_A_ROW} kernels in a row; mend that, such as by freeing memory, and "
                    "run the same command again: none of these counts as tried"
                )
