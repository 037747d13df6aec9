"""A tune whose compiler hangs ends when it is told to, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_programs import is_running, wait_until

# Whoever runs the tests may ignore Ctrl-C, which programs inherit.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from hadagen.cli.main import main; main(prog_name='hadagen')"
)
TINY = ("tune", "--arch", "sm90", "--n", "2", "--dtype", "float16", "--numerics", "accurate", "--contiguous")


@pytest.mark.parametrize("compiler", ["nvcc", "c++"])
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
    answers = {"nvcc": "Cuda compilation tools, release 13.0, V13.0.88", "c++": "g++ 12"}
    # The real nvcc does its part where the other one hangs.
    for name in answers if compiler == "nvcc" else [compiler]:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        version = f'case "$*" in *--version*) echo "{answers[name]}"; exit 0;; esac'
        path.write_text(
            f"#!/bin/sh\n{version}\necho $$ >> {tmp_path}/pids\nsleep 1000 &\necho $! >> {tmp_path}/pids\nwait\n"
        )
        path.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CXX": "c++",
        "HADAGEN_CACHE": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", PROGRAM, *TINY, *(() if end else ("--time-budget", "0.1"))]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as tune:
        if end:
            pids = tmp_path / "pids"
            wait_until(lambda: tune.poll() is not None or (pids.exists() and len(pids.read_text().split()) >= 2))
            tune.send_signal(end)
        _, said = tune.communicate()
    assert tune.returncode == 1
    assert says in said.splitlines()[-1]
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()] if (tmp_path / "pids").exists() else []
    assert started or not end
    wait_until(lambda: not any(map(is_running, started)))
    assert not list((tmp_path / "cache" / "work").glob("*"))
