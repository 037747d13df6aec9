"""Simulates a fleet on recordings, and writes `docs/data/fleet.json`.

    python ci/simulate_fleet.py                    # 64 workers of 3 classes, 200 trials of each problem and class
    python ci/simulate_fleet.py --workers 8 --trials 20 --out /tmp/fleet.json

Needs no GPU. Scheduler and workers are Dask's, in processes of their own. A worker answers with the recorded trial,
after a time in proportion to what that trial took on its GPU, `SECONDS` in the mean. It takes `COMPILE_SECONDS` for a
kernel of `KERNEL_BYTES` random bytes. The coordinator is `hadagen.tuner`, as in `hadagen tune --fleet`, with a database
on disk, and may use one CPU core. All classes have the recorded times, and each is searched by itself.

`search` of the result compares a search of one problem that has `WORKERS` variants in progress with one that has a
single one: the fraction of the best possible speed that they reach, see `searches.replay`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, product, repeat
from math import inf
from pathlib import Path
from statistics import fmean
from threading import Event as Flag
from typing import Any

from searches.recording import SUFFIX, read_recording
from searches.replay import Field, ReplayRunner, curve, default_search

from hadagen.fleet.client import DeviceClass, Fleet, FleetState
from hadagen.fleet.station import Gpu, Station
from hadagen.measure import Variant
from hadagen.plan.arch import Arch, load_arch
from hadagen.plan.knobs import Knobs
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Environment, Kernel, Trial, kernel_digest, knobs_key
from hadagen.tuner.events import Event, Listener, TrialFinished
from hadagen.tuner.fleet_search import FleetGpus, FleetPipeline, Guesses, Summed, at_once
from hadagen.tuner.pipeline import Ask, Keep
from hadagen.tuner.search import TuneOptions, tune
from hadagen.tuning_db.store import Store

DATA = Path(__file__).resolve().parent.parent / "docs" / "data"
CLASSES = ("A", "B", "C")
SECONDS = 0.92  # a measurement, in the mean of all that are recorded
COMPILE_SECONDS = 0.1
KERNEL_BYTES = 40_000
# What each worker does from time to time, as seldom as may be: here all of them share a few CPUs.
WORKER_SETTINGS = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "60s",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "10s",
    "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "60s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "10s",
}
WORKERS = 16
MORE = 1.3  # times the evaluations of a search with one variant in progress
SEEDS = 20
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
    quiet = os.environ | WORKER_SETTINGS
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
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=quiet))
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
    looks: list[tuple[float, dict[str, float]]] = []  # when, and class → seconds that its GPUs measured so far

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            times.append(time.monotonic())

    def look(state: FleetState) -> None:
        looks.append((time.monotonic(), dict(state.seconds)))

    with cluster(workers, 4) as address, tempfile.TemporaryDirectory() as folder:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
        with Store.open(Path(folder, "trials.db")) as store, Fleet(address, "recorded", look=look) as fleet:
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

            reports = at_once([partial(search, i, each) for i, each in enumerate(fleet.classes)], Flag())
            used = time.process_time() - cpu
            state = fleet.state
    finished = len(times)
    # While no class has ended.
    steady = times[finished // 10 : finished * 8 // 10]
    (first, before), *_, (last, after) = (each for each in looks if steady[0] <= each[0] <= steady[-1])
    busy = {gpu: (after[gpu] - before[gpu]) / (last - first) / state.gpus[gpu] for gpu in state.gpus}
    return {
        "workers": workers,
        "classes": state.gpus,
        "trials": finished,
        "seconds": round(times[-1] - started, 2),
        "trials_per_second": round((len(steady) - 1) / (steady[-1] - steady[0]), 2),
        "busy": {of: round(share, 4) for of, share in busy.items()},
        "coordinator_ms_per_trial": round(1000 * used / finished, 2),
        "finished": [report.finished for report in reports],
    }


class InTurn:
    """`Work` on a recording: `WORKERS` variants are in progress, each for as long as its recorded trial took."""

    workers = WORKERS

    def __init__(self, arch: Arch, build: Any, runner: ReplayRunner, known: Any = (), stopped: Any = None) -> None:
        self._runner = runner

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, ask: Ask, keep: Keep, listen: Listener, deadline: float = inf) -> bool:
        now, number = 0.0, count()
        under_way: list[tuple[float, int, Trial]] = []
        while True:
            while len(under_way) < self.workers and (batch := ask(self.workers - len(under_way))):
                for _, trial in self._runner.run([Variant(problem, knobs.to_dict(), None) for problem, knobs in batch]):
                    heapq.heappush(under_way, (now + trial.seconds, next(number), trial))
            if not under_way:
                return False
            now, _, trial = heapq.heappop(under_way)
            keep([trial])


class OneByOne(InTurn):
    workers = 1


def compare_searches() -> dict[str, Any]:
    """The speed that a search reaches with one variant in progress, and with `WORKERS` after `MORE` times as many
    evaluations."""
    searched = fields()
    more = [replace(field, evaluations=round(MORE * field.budget)) for field in searched]
    return {
        "workers": WORKERS,
        "more": MORE,
        "seeds": SEEDS,
        "problems": len(searched),
        "one_by_one": round(reached(searched, OneByOne, SEEDS), 5),
        "in_parallel": round(reached(more, InTurn, SEEDS), 5),
    }


def reached(searched: Sequence[Field], work: type[InTurn], seeds: int) -> float:
    """The fraction of the best possible speed after the budget of each field."""
    runs = list(product(searched, range(seeds)))
    with ProcessPoolExecutor() as processes:
        orders = iter(list(processes.map(default_search, *zip(*runs, strict=True), repeat(work))))
    return curve(searched, [[next(orders) for _ in range(seeds)] for _ in searched]).final


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
    found = {"search": compare_searches()} | simulate(arguments.workers, arguments.trials, arguments.seed)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
