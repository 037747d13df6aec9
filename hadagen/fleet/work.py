"""The functions that Dask runs on the workers of a fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Worker, get_worker

from hadagen.errors import HadagenError
from hadagen.fleet.station import IDLE_SECONDS, GpuError, Greeting, Station, without_kernel
from hadagen.measure import Cell, Variant
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import Knobs
from hadagen.problem.problem import Problem

_REST = "hadagen-rest"  # a periodic callback of the worker
_stations: WeakKeyDictionary[Worker, Station] = WeakKeyDictionary()


@dataclass(frozen=True)
class Trouble:
    """Takes the place of an answer: why this worker cannot give one, in a sentence. Another worker may. `gpu`: the
    class of the one GPU that is to blame, which measures no more; "" if it is the worker."""

    reason: str
    gpu: str = ""


@dataclass(frozen=True)
class Answer:
    """The result of a task, and how long it took in seconds."""

    value: Any
    seconds: float


async def offer(worker: Worker, station: Station) -> None:
    """Let a worker do the work of a station."""
    from tornado.ioloop import PeriodicCallback

    _stations[worker] = station
    worker.periodic_callbacks[_REST] = PeriodicCallback(lambda: station.rest(IDLE_SECONDS), 1000 * IDLE_SECONDS / 4)
    worker.periodic_callbacks[_REST].start()
    with suppress(KeyError):  # a scheduler that does not know the worker yet learns of them when it registers
        await worker.set_resources(**station.resources)


async def withdraw(dask_worker: Worker) -> None:
    """Give a worker no more work, and end its measuring processes. Dask calls this for a worker, too."""
    if station := _stations.pop(dask_worker, None):
        dask_worker.periodic_callbacks.pop(_REST).stop()
        station.end()
        await dask_worker.set_resources(**dict.fromkeys(station.resources, 0.0))


# ---- called for each worker ------------------------------------------------------------------------------------------
def greet(compiler: str, *, dask_worker: Worker) -> Greeting | None:
    """The greeting of the worker; None if it was started without `--preload hadagen.fleet`."""
    station = _stations.get(dask_worker)
    return station.greeting(compiler) if station else None


def rest(*, dask_worker: Worker) -> None:
    """End the measuring processes of a worker until they are needed again."""
    if station := _stations.get(dask_worker):
        station.rest()


# ---- tasks -----------------------------------------------------------------------------------------------------------
def build(problem: Problem, knobs: Knobs, arch: Arch, compiler: str) -> Answer:
    """As `Station.build`."""
    return _answered(lambda station: station.build(problem, knobs, arch, compiler))


def measure(variant: Variant, gpu: str, compiler: str) -> Answer:
    """As `Station.measure`. The trial comes without its kernel."""
    return _answered(lambda station: without_kernel(station.measure(variant, gpu, compiler)))


def race(a: Variant, b: Variant, cells: Sequence[Cell], gpu: str, compiler: str) -> Answer:
    """As `Station.race`."""
    return _answered(lambda station: station.race(a, b, cells, gpu, compiler))


def compute(function: Callable[..., Any], *arguments: Any) -> Answer:
    """Call a function that needs neither a GPU nor a compiler, and return its result."""
    return _answered(lambda station: function(*arguments))


def _answered(do: Callable[[Station], Any]) -> Answer:
    started = time.monotonic()
    worker = get_worker()
    station = _stations.get(worker)
    if station is None:
        return Answer(Trouble("it was told to stop"), 0.0)
    try:
        value = do(station)
    except GpuError as error:
        value = Trouble(str(error), error.gpu)
        worker.loop.add_callback(worker.set_resources, **station.resources)
    except HadagenError as error:
        value = Trouble(str(error))
    return Answer(value, time.monotonic() - started)
