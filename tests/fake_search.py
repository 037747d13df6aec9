"""A search with neither compiler nor device: kernels are made up, and a runner knows what they would take.

Such a search may kill its process; `exit_codes` starts it in processes of its own.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hadagen.compiler.toolchain import BuildFailure
from hadagen.measure import Variant
from hadagen.plan.arch import Arch, load_arch
from hadagen.problem.launch import Source
from hadagen.problem.problem import DType, Numerics, Problem
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.trial import Environment, Kernel, Outcome, Provenance, Timing, Trial, kernel_digest
from hadagen.tuner.events import Event, TrialFinished
from hadagen.tuner.search import TuneOptions, tune
from hadagen.tuning_db.store import Store

GPU = Environment(gpu="Test GPU", compute_capability="9.0", sms=132, l2_bytes=50 << 20)
# One cell of each regime, with the cache that decides it.
CELLS = ((1 << 14, Cache.HOT), (1 << 22, Cache.HOT), (1 << 26, Cache.COLD))
TRIALS = 12
# Ranges that are ranked in a moment.
FEW: dict[str, tuple[int | str, ...]] = {
    "chunks": (1, 2, 4, 8),
    "warps": (1, 2, 4, 8),
    "cluster": (1,),
    "accumulator": ("fp32",),
    "butterfly_carrier": ("packed", "fp32"),
    "load": ("plain", "cp_async"),
    "stages": (1, 2),
    "ahead": (0,),
    "min_blocks": (1, 2),
}


def arch(**search: tuple[int | str, ...]) -> Arch:
    """sm90 with fewer values to search, and with those given."""
    real = load_arch("sm90")
    return replace(real, search={**real.search, **FEW, **search})


def problems(*sizes: int) -> list[Problem]:
    return [Problem.of(n, DType.FLOAT16, Numerics.FAST) for n in sizes]


def make_kernel(source: Source) -> Kernel:
    """Sources that differ in nothing but the name and comments have the same kernel, as from a compiler."""
    lines = source.text.replace(source.entry, "kernel").splitlines()
    code = "\n".join(line.partition("//")[0].strip() for line in lines).encode()
    digest = kernel_digest(code, source.launch)
    return Kernel(
        digest, "kernel", "sm90", source.text, code, b"", source.launch, registers=32, spill_bytes=0, nvcc="13.0"
    )


def build(sources: Sequence[Source]) -> list[Kernel | BuildFailure]:
    return [make_kernel(source) for source in sources]


def make_trial(problem: Problem, knobs: dict[str, Any], kernel: Kernel | None = None, **fields: Any) -> Trial:
    """The best there is: a tile of 8192 elements in 4 warps, a persistent grid, loads by cp_async."""
    tile = knobs["chunks"] * knobs["warps"] * knobs["cluster"]
    slower = 0.2 * abs(tile.bit_length() - 6) + 0.1 * abs(knobs["warps"].bit_length() - 3)
    slower += 0.3 * (knobs["grid"] == "tiles") + 0.2 * (knobs["load"] != "cp_async") + 0.05 * knobs["min_blocks"]
    timings = [
        Timing(elements, destination, cache, us=1 + slower + 0.01 * i, us_low=1, us_high=2, copy_us=1.0)
        for i, (elements, cache) in enumerate(CELLS)
        for destination in Destination
    ]
    known: dict[str, Any] = {
        "outcome": Outcome.OK,
        "provenance": Provenance.MEASURED,
        "errors": {"normal": 2e-4},
        "timings": tuple(timings),
        "environment": replace(GPU, nvcc=kernel.nvcc) if kernel else GPU,
        "seconds": 0.01,
    }
    return Trial(problem, "sm90", knobs, kernel=kernel, **known | fields)


class FakeRunner:
    """Answers with `make_trial`, and remembers what it was asked."""

    environment = GPU

    def __init__(self) -> None:
        self.asked: list[tuple[Problem, dict[str, Any]]] = []

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial]]:
        for variant in variants:
            self.asked.append((variant.problem, variant.knobs))
            yield variant, self.trial(variant)

    def trial(self, variant: Variant) -> Trial:
        return make_trial(variant.problem, variant.knobs, variant.kernel)


def options(store: Store, runner: Any, **fields: Any) -> TuneOptions:
    known = {"arch": arch(), "problems": problems(256), "build": build, "trials": TRIALS}
    return TuneOptions(store=store, runner=runner, **known | fields)


class Killer:
    """Ends this process as `kill -9` would, the `count`-th time that it comes to `where`."""

    def __init__(self, where: str, count: int) -> None:
        self._where, self._left = where, count

    def pass_by(self, where: str) -> None:
        if where == self._where:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class LoggingRunner(FakeRunner):
    """Writes down what it measures, in the moment it does."""

    def __init__(self, log: Path, killer: Killer) -> None:
        super().__init__()
        self._log, self._killer = log, killer

    def trial(self, variant: Variant) -> Trial:
        self._killer.pass_by("measuring")
        with self._log.open("a") as log:
            log.write(f"{variant.problem.key} {sorted(variant.knobs.items())}\n")
        self._killer.pass_by("measured")
        return super().trial(variant)


def search_and_die(database: Path, log: Path, where: str = "", count: int = 0) -> int:
    """How many trials are finished."""
    killer = Killer(where, count)

    class DyingStore(Store):
        def record(self, *trials: Trial) -> list[int]:
            for _ in trials:
                killer.pass_by("recording")
            numbers = super().record(*trials)
            for _ in trials:
                killer.pass_by("recorded")
            return numbers

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            killer.pass_by("reported")

    with DyingStore.open(database) as store:
        return tune(options(store, LoggingRunner(log, killer), problems=problems(64, 256)), listen).finished


# One process imports what takes long, and the others are forked from it.
processes = get_context("forkserver")
processes.set_forkserver_preload(
    [
        "hadagen.tuner.search",
        "hadagen.tuning_db.store",
        "hadagen.compiler.toolchain",
        "optuna",
        "optuna.storages._rdb.storage",
        "pytest",
    ]
)


def exit_codes(target: Callable[..., object], *arguments: object, count: int = 1) -> list[int | None]:
    """Of so many processes that call `target` at the same time."""
    started = [processes.Process(target=target, args=arguments) for _ in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return [process.exitcode for process in started]
