"""Running compilers: in time or not at all, and nothing of them is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest

from hadagen.errors import ToolchainError
from hadagen.programs import IN_A_ROW, Finished, Patience, Stopped, run


def is_running(pid: int) -> bool:
    """Zombies, which only wait to be asked how they ended, are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], object]) -> None:
    while not holds():
        time.sleep(0.01)


@pytest.fixture
def hung(tmp_path: Path) -> list[str]:
    """A command that never ends, nor does what it starts; both ignore what can be ignored. It writes down who they are
    in `pids`."""
    child = "trap '' TERM INT HUP; while true; do sleep 1000; done"
    return ["/bin/sh", "-c", f"({child}) & echo $! $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; {child}"]


def gone(tmp_path: Path) -> None:
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def test_what_hangs_is_killed_with_all_that_it_started(tmp_path: Path, hung: list[str]) -> None:
    finished = run(hung, seconds=0.5)
    assert not finished.ok
    assert finished.passing == "took more than 0.5 s"
    gone(tmp_path)


def test_what_runs_is_killed_when_the_caller_stops(tmp_path: Path, hung: list[str]) -> None:
    stopped = Event()
    wait = Thread(target=lambda: (wait_until((tmp_path / "pids").exists), stopped.set()))
    wait.start()
    with pytest.raises(Stopped):
        run(hung, stopped=stopped)
    wait.join()
    gone(tmp_path)
    with pytest.raises(Stopped):
        run(["true"], stopped=stopped)


def test_what_runs_is_killed_at_ctrl_c(tmp_path: Path, hung: list[str]) -> None:
    def interrupt() -> None:
        wait_until((tmp_path / "pids").exists)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run(hung)
    finally:
        signal.signal(signal.SIGINT, before)
    gone(tmp_path)


def test_how_a_program_ends_is_told(tmp_path: Path) -> None:
    script = 'echo out; echo "$1" >&2; echo "$TMPDIR $LC_ALL"; pwd; exit 3'
    finished = run(["/bin/sh", "-c", script, "", "err"], folder=tmp_path, environment={"LC_ALL": "de_DE"})
    assert finished == Finished(3, f"out\nerr\n{tmp_path} C\n{tmp_path}\n")
    assert finished.first_lines == f"out / err / {tmp_path} C"
    assert Finished(3, "\n").first_lines == "exit code 3"
    assert run(["true"]).ok


@pytest.mark.parametrize(
    ("status", "log", "passing"),
    [
        (0, "", ""),
        (1, "a.cu(1): error: out of ideas", ""),
        (255, "ptxas fatal   : Ptx assembly aborted due to errors", ""),
        (-9, "", "was killed by signal 9"),
        (139, "", "was killed by signal 11"),
        (127, "sh: 1: ptxas: not found", "failed (sh: 1: ptxas: not found)"),
        (1, "nvcc error   : 'gcc' died due to signal 9 (Kill signal)", "failed (nvcc error   : 'gcc' died due to"),
        (1, "c++: fatal error: Killed signal terminated program cc1plus", "failed (c++: fatal error: Killed signal"),
        (1, "a.cpp:1:2: internal compiler error: Segmentation fault", "failed (a.cpp:1:2: internal compiler error"),
        (1, "as: /tmp/x.o: No space left on device", "failed (as: /tmp/x.o: No space left on device)"),
    ],
)
def test_a_failure_that_may_pass_is_told_from_a_refusal(status: int, log: str, passing: str) -> None:
    found = Finished(status, log).passing
    assert found.startswith(passing) if passing else not found


def test_patience_ends_with_kernels_that_are_lost_in_a_row() -> None:
    patience = Patience()
    for kernel in ("a", "a", "b", "a"):
        patience.lose(kernel, "nvcc", "was killed by signal 9")
    patience.worked()
    for kernel in ("a", "b"):
        patience.lose(kernel, "nvcc", "was killed by signal 9")
    with pytest.raises(
        ToolchainError, match=f"nvcc was killed by signal 9, for {IN_A_ROW} kernels in a row; mend that"
    ):
        patience.lose("c", "nvcc", "was killed by signal 9")
