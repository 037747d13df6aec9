"""A Dask worker whose GPUs are the emulator's: `dask worker ADDRESS --preload tests/emulated_worker.py`.

EMULATED_GPUS names them, with ";" between. Kernels are compiled for the GPU, verified on the CPU, and take what the
cost model says. EMULATED_FAULT says what goes wrong, from the second variant on: "garbage" is answered, the worker
"hangs", or its measuring "breaks". EMULATED_CODE: another hadagen. EMULATED_SECONDS: how long a measurement takes.
"""

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from distributed import Worker

from hadagen.errors import DeviceError
from hadagen.fleet import station
from hadagen.fleet.station import Gpu, Station
from hadagen.fleet.work import offer, withdraw
from hadagen.measure import Cell, Variant
from hadagen.plan.arch import load_arch
from hadagen.problem.trial import Environment, NotTried, Provenance, Trial
from hadagen.tuner.estimate import EstimateRunner

ARCH = "sm90"
SECONDS = float(os.environ.get("EMULATED_SECONDS", 0))
FAULT = os.environ.get("EMULATED_FAULT", "")
if code := os.environ.get("EMULATED_CODE"):
    station.code_digest = lambda: code  # type: ignore[assignment]


class Emulated:
    """Measures on one emulated GPU."""

    def __init__(self, environment: Environment) -> None:
        self._environment, self._measured = environment, 0
        self._runner = EstimateRunner(load_arch(ARCH))

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial | NotTried]]:
        for variant, trial in self._runner.run(variants):
            self._measured += 1
            time.sleep(SECONDS)
            if self._measured > 1 and FAULT:
                yield variant, self._fault()
                continue
            assert isinstance(trial, Trial)
            environment = replace(self._environment, nvcc=variant.kernel.nvcc)
            timings = trial.timings
            if variant.cells is not None:
                us = trial.timings[0].us
                timings = tuple(replace(trial.timings[0], **cell._asdict(), us=us) for cell in variant.cells)
            yield (
                variant,
                replace(trial, environment=environment, provenance=Provenance.MEASURED, timings=timings),
            )

    def race(self, a: Variant, b: Variant, cells: Sequence[Cell]) -> list[tuple[float, float]]:
        return [(1.0, 1.001) for _ in cells]

    def close(self) -> None:
        pass

    def _fault(self) -> Any:
        if FAULT == "garbage":
            return {"outcome": "excellent"}
        if FAULT == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise DeviceError("the measuring process did not start in 3 attempts (no GPU); look for it")


def emulated_environment(name: str) -> Environment:
    arch = load_arch(ARCH)
    driver = os.environ.get("EMULATED_DRIVER", "580.1")
    return Environment(
        gpu=name,
        compute_capability=arch.compute_capability,
        sms=arch.model.sms,
        l2_bytes=arch.model.l2_bytes,
        driver=driver,
        cuda="13.0",
    )


async def dask_setup(worker: Worker) -> None:
    gpus = []
    for name in filter(None, os.environ.get("EMULATED_GPUS", "").split(";")):
        environment = emulated_environment(name)
        gpus.append(Gpu(environment, ARCH, lambda toolchain, environment=environment: Emulated(environment)))
    await offer(worker, Station(gpus, max(0, worker.state.nthreads - len(gpus))))


async def dask_teardown(worker: Worker) -> None:
    await withdraw(worker)
