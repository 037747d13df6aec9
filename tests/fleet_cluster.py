"""A real Dask cluster: scheduler and workers are processes, and the GPUs of the workers are the emulator's."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("emulated_worker.py")


class Cluster:
    """A scheduler, and workers that are started one by one."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "scheduler.json"
        self._started: list[subprocess.Popen[bytes]] = []
        self.address = "tcp://127.0.0.1:0"
        self.start_scheduler()

    def start_scheduler(self) -> None:
        """Start it at the address that it had before, if it had one."""
        self._file.unlink(missing_ok=True)
        port = self.address.rpartition(":")[2]
        command = ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", port]
        command += ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]  # it has an HTTP server without it too
        self.scheduler = self._run(*command, "--scheduler-file", str(self._file))
        while not self._file.exists():
            assert self.scheduler.poll() is None
            time.sleep(0.05)
        self.address = json.loads(self._file.read_text())["address"]

    def _run(self, *module: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *module]
        process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
        self._started.append(process)
        return process

    def add(self, gpus: str, threads: int = 2, **environment: str) -> subprocess.Popen[bytes]:
        """A worker without a nanny, with these GPUs."""
        options = ["--preload", str(WORKER), "--no-nanny", "--nthreads", str(threads), "--no-dashboard"]
        command = ["distributed.cli.dask_worker", self.address, "--host", "127.0.0.1", *options]
        return self._run(*command, EMULATED_GPUS=gpus, **environment)

    def wait_for(self, workers: int) -> None:
        from distributed import Client

        with Client(self.address, set_as_default=False) as client:  # type: ignore[no-untyped-call]
            client.wait_for_workers(workers, timeout=60)
            while not all(worker["resources"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()):
                time.sleep(0.1)

    def close(self) -> None:
        for process in self._started:
            end(process)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HADAGEN_CACHE", os.environ.get("HADAGEN_CACHE", str(tmp_path / "cache")))
    with closing(Cluster(tmp_path)) as made:
        yield made


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and wait until it has ended."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait()
