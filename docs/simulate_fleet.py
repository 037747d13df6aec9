"""Simulates a fleet on recordings, and writes `docs/data/fleet.json`.

    python docs/simulate_fleet.py                    # 64 workers of 3 classes, 200 trials of each problem and class
    python docs/simulate_fleet.py --workers 8 --trials 20 --out /tmp/fleet.json

Needs no GPU. Scheduler and workers are Dask's, in processes of their own. A worker answers with the recorded trial,
after a time in proportion to what that trial took on its GPU, `SECONDS` in the mean. It takes `COMPILE_SECONDS` for a
kernel of `KERNEL_BYTES` random bytes. The coordinator is `hadagen.tuner`, as in `hadagen tune --fleet`, with a database
on disk, and may use one CPU core. All classes have the recorded times, and each is searched by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hadagen.arch import Arch, load_arch
from hadagen.fleet.client import DeviceClass, Fleet
from hadagen.fleet.station import Gpu, Station
from hadagen.knobs import Knobs
from hadagen.launch import LaunchSpec
from hadagen.measure import ReplayRunner, Variant
from hadagen.problem import Problem
from hadagen.trial import Environment, Kernel, Trial, kernel_digest, knobs_key
from hadagen.tuner.events import Event, TrialFinished
from hadagen.tuner.fleet import FleetGpus, FleetPipeline, Guesses, Summed, at_once
from hadagen.tuner.recording import SUFFIX, read_recording
from hadagen.tuner.replay import Field
from hadagen.tuner.search import TuneOptions, tune
from hadagen.tuning_db.store import Store

DATA = Path(__file__).resolve().parent / "data"
CLASSES = ("A", "B", "C")
SECONDS = 0.97  # a measurement, in the mean
COMPILE_SECONDS = 0.1
KERNEL_BYTES = 40_000
LAUNCH = LaunchSpec(threads=32, cluster=1, shared_bytes=0, tile_elements=4096, persistent=False)
ARCH = "sm90"


def fields() -> list[Field]:
    found = [Field.of(read_recording(path)) for path in sorted((DATA / "recordings").glob(f"*{SUFFIX}"))]
    return [field for field in found if field.recording.target.name == ARCH]


def gpu_of(environment: Environment, name: str) -> Environment:
    return replace(environment, gpu=f"recorded {environment.gpu}, {name}")


class Recorded(Station):
    """One GPU of a class whose trials are recorded, and one compiler."""

    def __init__(self, name: str, replay: ReplayRunner, mean: float) -> None:
        environment = gpu_of(replay.environment, name)
        super().__init__([Gpu(environment, ARCH, lambda toolchain: None)], compiling=1)  # type: ignore[arg-type,return-value]
        self._replay, self._environment, self._mean = replay, environment, mean

    def _toolchain(self, kind: str) -> Any:
        return None

    def build(self, problem: Problem, knobs: Knobs, arch: Arch, compiler: str) -> Kernel:
        time.sleep(COMPILE_SECONDS)
        code = random.Random(f"{problem.key} {knobs_key(knobs.to_dict())}").randbytes(KERNEL_BYTES)
        return Kernel(kernel_digest(code, LAUNCH), "kernel", ARCH, "", code, b"", LAUNCH, 32, 0, "recorded")

    def measure(self, variant: Variant, gpu: str, compiler: str) -> Trial:
        ((_, trial),) = self._replay.run([variant])
        time.sleep(SECONDS * (trial.seconds or self._mean) / self._mean)
        return replace(trial, kernel=None, environment=replace(self._environment, nvcc="recorded"))


async def work(address: str, names: Sequence[str]) -> None:
    """Workers in this process, one for each of these classes, until the scheduler ends."""
    from distributed import Worker

    from hadagen.fleet.work import offer

    trials = [trial for field in fields() for trial in field.trials]
    replay = ReplayRunner([replace(trial, arch=ARCH) for trial in trials])
    mean = fmean(trial.seconds for trial in trials)
    workers = [Worker(address, nthreads=2, dashboard_address=None) for _ in names]
    for name, worker in zip(names, workers, strict=True):
        await worker
        await offer(worker, Recorded(name, replay, mean))
    print("ready", flush=True)
    await asyncio.gather(*(worker.finished() for worker in workers))


@contextlib.contextmanager
def cluster(workers: int, processes: int) -> Iterator[str]:
    """The address of a scheduler with so many simulated workers."""
    names = [CLASSES[i % len(CLASSES)] for i in range(workers)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "scheduler.json")
        scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
        started = [
            subprocess.Popen([*scheduler, "--no-dashboard", "--scheduler-file", str(file)], stderr=subprocess.DEVNULL)
        ]
        try:
            while not file.exists():
                time.sleep(0.1)
            address = json.loads(file.read_text())["address"]
            for i in range(processes):
                command = [sys.executable, __file__, "--serve", address, *names[i::processes]]
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            for process in started[1:]:
                assert process.stdout
                assert process.stdout.readline() == b"ready\n"
            yield address
        finally:
            for process in started:
                process.kill()
                process.wait()


def simulate(workers: int, trials: int, seed: int) -> dict[str, Any]:
    searched = fields()
    target = replace(load_arch(ARCH), search=searched[0].recording.target.search)
    problems = [field.recording.problem for field in searched]
    times: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            times.append(time.monotonic())

    with cluster(workers, 4) as address, tempfile.TemporaryDirectory() as folder:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
        with Store.open(Path(folder, "trials.db")) as store, Fleet(address, "recorded") as fleet:
            guesses = Guesses(fleet, target, problems, trials)
            for problem in problems:
                guesses(problem, True)
            summed = Summed(listen, len(fleet.classes))
            started, cpu = time.monotonic(), time.process_time()

            def search(number: int, of: DeviceClass) -> Any:
                options = TuneOptions(
                    target,
                    problems,
                    store,
                    FleetGpus(fleet, of),
                    None,
                    trials,
                    seed=seed,
                    work=FleetPipeline,
                    guess=guesses,
                )
                return tune(options, summed.of(number))

            from functools import partial
            from threading import Event as Flag

            reports = at_once([partial(search, i, each) for i, each in enumerate(fleet.classes)], Flag())
            used = time.process_time() - cpu
            state = fleet.state
    count = len(times)
    # While no class has ended.
    steady = times[count // 10 : count * 8 // 10]
    return {
        "workers": workers,
        "classes": state.gpus,
        "trials": count,
        "seconds": round(times[-1] - started, 2),
        "trials_per_second": round((len(steady) - 1) / (steady[-1] - steady[0]), 2),
        "busy": {of: round(share, 4) for of, share in state.busy.items()},
        "coordinator_ms_per_trial": round(1000 * used / count, 2),
        "finished": [report.finished for report in reports],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DATA / "fleet.json")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(work(arguments.serve[0], arguments.serve[1:]))
        return
    found = simulate(arguments.workers, arguments.trials, arguments.seed)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
