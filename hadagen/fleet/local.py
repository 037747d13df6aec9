"""A fleet of this machine alone: a worker for each GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Nanny, Scheduler
from distributed.deploy.spec import SpecCluster

from hadagen.errors import DeviceError
from hadagen.measure import device_environment

PRELOAD = "hadagen.fleet"


@contextmanager
def local_cluster() -> Iterator[str]:
    """A Dask cluster of processes on this machine, with a worker for each GPU, while the context lasts. Yields the
    address of its scheduler. Raises `DeviceError` if there is no GPU."""
    gpus = _gpus()
    # Each has the CPUs in equal parts, and one thread more for its GPU.
    threads = max(1, len(os.sched_getaffinity(0)) // len(gpus)) + 1
    workers = {
        i: {
            "cls": Nanny,
            "options": {"nthreads": threads, "preload": [PRELOAD], "env": {"CUDA_VISIBLE_DEVICES": gpu}},
        }
        for i, gpu in enumerate(gpus)
    }
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": ":8787"}}
    with SpecCluster(workers, scheduler) as cluster:  # type: ignore[no-untyped-call]
        yield cluster.scheduler_address


def _gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    device_environment(0)
    count = 1
    try:
        while True:
            device_environment(count)
            count += 1
    except DeviceError:
        pass
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]
