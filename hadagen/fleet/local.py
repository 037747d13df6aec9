"""A fleet of this machine alone: a worker for each GPU, and others that compile.

Workers that compile are processes of their own. Python renders a source, and ranks the first knobs of a problem for
seconds, and a worker that measures must not wait for that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import dask
from distributed import Nanny, Scheduler, Security
from distributed.deploy.spec import SpecCluster

from hadagen.errors import DeviceError
from hadagen.fleet.client import security
from hadagen.measure import device_environment

PRELOAD = "hadagen.fleet"
THREADS = 2  # of a process that compiles; the compilers themselves are programs
# Logs of workers have only errors, because the search says what matters. Dask reads this variable as it is imported,
# which is before `env` is set.
QUIET = "distributed.nanny.pre-spawn-environ.DASK_LOGGING__DISTRIBUTED"
HOST = "127.0.0.1"  # whoever reaches a scheduler, nanny or worker runs programs there, so all listen on loopback alone


@contextmanager
def local_cluster() -> Iterator[str]:
    """A Dask cluster of processes on this machine while the context lasts. Yields the address of its scheduler. Its
    connections have TLS if Dask's configuration requires encryption. Raises `DeviceError` if there is no GPU, or a
    certificate is missing that TLS needs."""
    gpus = [(gpu, 1) for gpu in _gpus()]
    # Half of the CPUs compile: with all of them, measuring workers waited for a CPU, and took twice as long.
    compilers = [("", THREADS)] * max(1, (len(os.sched_getaffinity(0)) // 2 - len(gpus)) // THREADS)
    workers = {
        i: {
            "cls": Nanny,
            "options": {"host": HOST, "nthreads": threads, "preload": [PRELOAD], "env": {"CUDA_VISIBLE_DEVICES": gpu}},
        }
        for i, (gpu, threads) in enumerate(gpus + compilers)
    }
    address = f"{'tls' if Security().require_encryption else 'tcp'}://{HOST}"  # type: ignore[no-untyped-call]
    security(address, "scheduler", "worker", "client")
    scheduler = {"cls": Scheduler, "options": {"host": address, "dashboard_address": f"{HOST}:8787"}}
    with dask.config.set({QUIET: "error"}), SpecCluster(workers, scheduler) as cluster:  # type: ignore[no-untyped-call]
        yield cluster.scheduler_address


def _gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    device_environment(0)
    count = 1
    with suppress(DeviceError):
        while True:
            device_environment(count)
            count += 1
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]
