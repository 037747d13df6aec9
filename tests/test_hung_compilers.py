"""A tune whose compiler hangs ends when it is told to, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_nvrtc
import pytest
from test_programs import is_running, wait_until

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
        program = f"#!/bin/sh\n{version}\necho $$ >> {pids}\nsleep 1000 &\necho $! >> {pids}\nwait\n"
        (folder / compiler).write_text(program)
        (folder / compiler).chmod(0o755)


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
