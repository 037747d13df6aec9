"""What the worker process does with its GPU: load, verify, time, unload. Imported by that process alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from hadagen.driver import LoadedKernel, bindings, load
from hadagen.measure.cells import Cell, Cells, Traffic, all_cells, probe_cells
from hadagen.measure.environment import device_environment
from hadagen.measure.messages import Answer, Measure, Race
from hadagen.measure.timing import REPEATED_BUFFERS, Stopwatch, copy_work, transform_work
from hadagen.measure.verify import Verifier
from hadagen.problem import Problem
from hadagen.trial import Cache, Destination, Environment, Kernel, Outcome, Timing

# A race that one tile in a hundred thousand loses shows, more often than not, in so many tiles; launches of so many
# elements, which take some 0.1 ms each.
_REPEATED_TILES = 100_000
_REPEATED_CELL = Cell(1 << 24, Destination.OUT_OF_PLACE, Cache.COLD)
_LEAST_REPEATED = 48
# Copy times are no older than this when they are written beside a kernel's.
_YARDSTICK_LIFE_S = 20.0
# Graphs of a copy that are timed; the faster counts, for now and then all replays of one take a third longer.
_YARDSTICK_GRAPHS = 2


class Yardstick:
    """The copy's time for every traffic: of the shape that was the fastest the first time, taken again now and then."""

    def __init__(self, stopwatch: Stopwatch, copies: Sequence[LoadedKernel], replays: int) -> None:
        self._stopwatch = stopwatch
        self._copies = copies
        self._replays = replays
        self._fastest: dict[Traffic, LoadedKernel] = {}
        self._taken: dict[Traffic, float] = {}
        self.us: dict[Traffic, float] = {}

    def refresh(self, traffics: Iterable[Traffic]) -> None:
        """Times the copies for those of `traffics` that they were never timed for, or long ago."""
        now = time.monotonic()
        wanted = [t for t in dict.fromkeys(traffics) if now - self._taken.get(t, -math.inf) >= _YARDSTICK_LIFE_S]
        new = [traffic for traffic in wanted if traffic not in self._fastest]
        rounds = [self._time(copy, new) for copy in self._copies]
        for traffic in new:
            times = [samples[traffic] for samples in rounds]
            self.us[traffic] = min(times)
            self._fastest[traffic] = self._copies[times.index(self.us[traffic])]
        for copy in self._copies:
            self.us |= self._time(copy, [t for t in wanted if t not in new and self._fastest[t] is copy])
        self._taken |= dict.fromkeys(wanted, now)

    def _time(self, copy: LoadedKernel, traffics: Sequence[Traffic]) -> dict[Traffic, float]:
        works = [copy_work(traffic) for traffic in traffics]
        rounds = [self._stopwatch.time(copy, works, self._replays) for _ in range(_YARDSTICK_GRAPHS)]
        times = zip(*rounds, strict=True)
        return {traffic: min(sample.us for sample in samples) for traffic, samples in zip(traffics, times, strict=True)}


class DeviceService:
    """Answers `Measure` and `Race` on one GPU. `cells` as `DeviceRunner` takes them."""

    def __init__(self, device_index: int, copy_kernels: Sequence[Kernel], cells: Cells | None, replays: int) -> None:
        self.greeting: Environment = device_environment(device_index)
        self._device_index = device_index
        self._replays = replays
        self._l2_bytes = self.greeting.l2_bytes
        self._cells = cells
        torch.cuda.set_device(device_index)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(stream)
        self._stopwatch = Stopwatch(stream, self._l2_bytes)
        self._stopwatch.warm_up()
        self._verifier = Verifier(stream.device, stream.cuda_stream)
        self._yardstick = Yardstick(self._stopwatch, [self._load(k) for k in copy_kernels], replays)

    def handle(self, request: Measure | Race) -> Answer | list[tuple[float, float]]:
        if isinstance(request, Race):
            return self._race(request)
        started = time.monotonic()
        return replace(self._measure(request), seconds=time.monotonic() - started)

    def is_usable(self) -> bool:
        driver = bindings()
        return bool(driver.cuCtxSynchronize()[0] == driver.CUresult.CUDA_SUCCESS)

    def _measure(self, request: Measure) -> Answer:
        problem = request.problem
        with self._loaded(request.kernel) as kernel:
            verdict = self._verifier.check(kernel, problem)
            if verdict.outcome is not Outcome.OK:
                return Answer(verdict.outcome, verdict.detail, verdict.errors)
            cells = self._cells_of(problem)
            traffics = [cell.traffic(problem) for cell in cells]
            repeated = transform_work(problem, _REPEATED_CELL)
            self._stopwatch.fill(problem.dtype, traffics, least_bytes=REPEATED_BUFFERS * repeated.traffic.buffer_bytes)
            self._yardstick.refresh(traffics)
            probes = probe_cells(problem, cells, self._l2_bytes)
            timings = self._time(kernel, problem, probes)
            detail = ""
            if probes and all(t.us > request.limits_us.get(cell, t.us) for cell, t in timings.items()):
                detail = f"given up after {len(probes)} probe cells: far slower than the best at each"
            else:
                timings |= self._time(kernel, problem, [cell for cell in cells if cell not in timings])
            ordered = tuple(timings[cell] for cell in cells if cell in timings)
            if not self._stopwatch.is_finite(problem.dtype):
                return Answer(Outcome.UNSTABLE, "values were no longer finite after timing", verdict.errors, ordered)
            launches = max(_LEAST_REPEATED, _REPEATED_TILES * kernel.spec.tile_elements // repeated.elements)
            if not self._stopwatch.repeats(kernel, repeated, launches):
                detail = f"the same input came out differently in one of {launches + 1} launches"
                return Answer(Outcome.UNSTABLE, detail, verdict.errors, ordered)
            return Answer(Outcome.OK, detail, verdict.errors, ordered)

    def _cells_of(self, problem: Problem) -> list[Cell]:
        wanted = self._cells[problem] if isinstance(self._cells, Mapping) else self._cells
        cells = all_cells(problem, self._l2_bytes) if wanted is None else wanted
        return [cell for cell in cells if cell.elements >= problem.n]

    def _time(self, kernel: LoadedKernel, problem: Problem, cells: Sequence[Cell]) -> dict[Cell, Timing]:
        works = [transform_work(problem, cell) for cell in cells]
        samples = self._stopwatch.time(kernel, works, self._replays)
        return {
            cell: Timing(*cell, *sample, self._yardstick.us[work.traffic])
            for cell, work, sample in zip(cells, works, samples, strict=True)
        }

    def _race(self, request: Race) -> list[tuple[float, float]]:
        works = [transform_work(request.problem, cell) for cell in request.cells]
        with self._loaded(request.a) as a, self._loaded(request.b) as b:
            self._stopwatch.fill(request.problem.dtype, [work.traffic for work in works])
            samples = [self._stopwatch.race(a, b, work, request.replays) for work in works]
            return [(of_a.us, of_b.us) for of_a, of_b in samples]

    def _load(self, kernel: Kernel) -> LoadedKernel:
        return load(kernel.cubin, kernel.entry, kernel.launch, self._device_index)

    @contextmanager
    def _loaded(self, kernel: Kernel) -> Iterator[LoadedKernel]:
        loaded = self._load(kernel)
        try:
            yield loaded
        finally:
            # Its code is not checked: on a lost device it fails as well, and what is under way says more.
            bindings().cuModuleUnload(loaded.module)
