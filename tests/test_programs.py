"""Running compilers: in time or not at all, and nothing of them is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

import fake_nvrtc
import pytest
from running import interruptible, is_running, script, wait_until

from hadagen.compiler.programs import IN_A_ROW, Finished, Patience, Stopped, run
from hadagen.errors import ToolchainError


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

    Thread(target=interrupt).start()
    with interruptible(), pytest.raises(KeyboardInterrupt):
        run(hung)
    gone(tmp_path)


def test_what_has_just_started_is_killed_too(tmp_path: Path, hung: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that starts runs before `Popen` returns."""

    class Slow(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            wait_until((tmp_path / "pids").exists)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    with interruptible(), pytest.raises(KeyboardInterrupt):
        run(hung)
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


# ---- a tune whose compiler hangs -------------------------------------------------------------------------------------
# Whoever runs the tests may ignore Ctrl-C, which programs inherit.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from hadagen.cli.main import main; main(prog_name='hadagen')"
)
TINY = ("tune", "--arch", "sm90", "--n", "2", "--dtype", "float16", "--numerics", "accurate", "--contiguous")


VERSIONS = {"nvcc": "Cuda compilation tools, release 13.0, V13.0.88", "c++": "g++ 12"}


def write_hanging(compiler: str, folder: Path, pids: Path) -> None:
    """A compiler that only says its version. With a second process it hangs for ever, and `pids` says who they are."""
    folder.mkdir()
    if compiler == "nvrtc":
        note = f'if (FILE* to = fopen("{pids}", "a")) fprintf(to, "%d\\n", int(getpid())), fclose(to);'
        fake_nvrtc.build(folder / "nvrtc.so", f"fork(); {note} while (true) sleep(1000)")
    else:
        version = f'case "$*" in *--version*) echo "{VERSIONS[compiler]}"; exit 0;; esac'
        script(folder / compiler, version, f"echo $$ >> {pids}", "sleep 1000 &", f"echo $! >> {pids}", "wait")


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc", "c++"])
@pytest.mark.parametrize(
    ("end", "says"),
    [
        (signal.SIGINT, "interrupted; every finished trial is kept"),
        (signal.SIGTERM, "interrupted; every finished trial is kept"),
        (None, "more time or more trials"),
    ],
)
def test_a_hung_compiler_does_not_hang_a_tune(
    tmp_path: Path, compiler: str, end: signal.Signals | None, says: str
) -> None:
    pids = tmp_path / "pids"
    write_hanging(compiler, tmp_path / "bin", pids)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CXX": "c++",
        "HADAGEN_CACHE": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    # A real compiler does its part where the other one hangs.
    if compiler == "nvrtc":
        environment["HADAGEN_NVRTC"] = str(tmp_path / "bin" / "nvrtc.so")
    options = ["--compiler", "nvcc"] if compiler == "nvcc" else []
    options += [] if end else ["--time-budget", "0.1"]
    command = [sys.executable, "-c", PROGRAM, *TINY, *options]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as tune:
        if end:
            wait_until(lambda: tune.poll() is not None or (pids.exists() and len(pids.read_text().split()) >= 2))
            tune.send_signal(end)
        _, said = tune.communicate()
    assert tune.returncode == 1
    assert says in said.splitlines()[-1]
    started = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
    assert started or not end
    wait_until(lambda: not any(map(is_running, started)))
    assert not list((tmp_path / "cache" / "work").glob("*"))
