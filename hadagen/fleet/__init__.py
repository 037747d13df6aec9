"""Fleets: Dask workers compile kernels and measure them on their GPUs, for a search that runs elsewhere.

    dask scheduler
    dask worker tls://HOST:8786 --preload hadagen.fleet        on every machine, with or without GPUs
    hadagen tune --fleet tls://HOST:8786

A worker offers every GPU that it sees. All its threads but one for each GPU compile. Dask decides which worker does
what, moves results, and repeats the work of workers that end. Importing this imports neither Dask nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Worker


async def dask_setup(worker: Worker) -> None:
    """Dask calls this in each worker that was started with `--preload hadagen.fleet`."""
    from hadagen.fleet.station import Station
    from hadagen.fleet.work import offer

    await offer(worker, Station.here(worker.state.nthreads))


async def dask_teardown(worker: Worker) -> None:
    """Dask calls this when such a worker ends."""
    from hadagen.fleet.work import withdraw

    await withdraw(worker)
