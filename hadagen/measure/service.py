"""What the worker process does with its GPU: load, verify, time, unload. Imported by that process alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from hadagen.driver import LoadedKernel, bindings, load
from hadagen.measure.cells import Cell, all_cells, probe_cells
from hadagen.measure.environment import device_environment
from hadagen.measure.messages import Answer, Measure, Race
from hadagen.measure.timing import Stopwatch
from hadagen.measure.verify import Verifier
from hadagen.problem import DType, Problem
from hadagen.reference import verification_scale
from hadagen.trial import Environment, Kernel, Outcome, Timing

# Copy times are no older than this when they are written beside a kernel's.
_YARDSTICK_LIFE_S = 20.0


class Yardstick:
    """The copy's time at every cell: of the shape that was the fastest there at the start, taken again now and then."""

    def __init__(
        self, stopwatch: Stopwatch, copies: Sequence[LoadedKernel], cells: Sequence[Cell], replays: int
    ) -> None:
        self._stopwatch = stopwatch
        self._replays = replays
        stopwatch.fill(DType.FLOAT16)
        stopwatch.warm_up()
        rounds = [stopwatch.time(copy, cells, 1.0, replays) for copy in copies]
        best = {cell: min(range(len(copies)), key=lambda i: rounds[i][cell].us) for cell in cells}
        self._shares = [(copy, [cell for cell in cells if best[cell] == i]) for i, copy in enumerate(copies)]
        self.us = {cell: rounds[best[cell]][cell].us for cell in cells}
        self._taken = time.monotonic()

    def refresh(self) -> None:
        """Times the copies again if that was long ago."""
        if time.monotonic() - self._taken < _YARDSTICK_LIFE_S:
            return
        for copy, cells in self._shares:
            samples = self._stopwatch.time(copy, cells, 1.0, self._replays)
            self.us.update({cell: sample.us for cell, sample in samples.items()})
        self._taken = time.monotonic()


class DeviceService:
    """Answers `Measure` and `Race` on one GPU. `cells` None: all that the device's L2 calls for."""

    def __init__(
        self, device_index: int, copy_kernels: Sequence[Kernel], cells: Sequence[Cell] | None, replays: int
    ) -> None:
        self.greeting: Environment = device_environment(device_index)
        self._device_index = device_index
        self._replays = replays
        self._l2_bytes = self.greeting.l2_bytes
        self._cells = tuple(cells) if cells is not None else all_cells(self._l2_bytes)
        torch.cuda.set_device(device_index)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(stream)
        self._stopwatch = Stopwatch(stream, self._l2_bytes, self._cells)
        self._verifier = Verifier(stream.device, stream.cuda_stream)
        self._yardstick = Yardstick(self._stopwatch, [self._load(k) for k in copy_kernels], self._cells, replays)

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
            self._yardstick.refresh()
            self._stopwatch.fill(problem.dtype)
            cells = [cell for cell in self._cells if cell.elements >= problem.n]
            probes = probe_cells(cells, self._l2_bytes)
            timings = self._time(kernel, problem, probes)
            detail = ""
            if probes and all(t.us > request.limits_us.get(cell, t.us) for cell, t in timings.items()):
                detail = f"given up after {len(probes)} probe cells: far slower than the best at each"
            else:
                timings |= self._time(kernel, problem, [cell for cell in cells if cell not in timings])
            ordered = tuple(timings[cell] for cell in cells if cell in timings)
            if not self._stopwatch.is_finite(problem.dtype):
                return Answer(Outcome.UNSTABLE, "values were no longer finite after timing", verdict.errors, ordered)
            return Answer(Outcome.OK, detail, verdict.errors, ordered)

    def _time(self, kernel: LoadedKernel, problem: Problem, cells: Sequence[Cell]) -> dict[Cell, Timing]:
        samples = self._stopwatch.time(kernel, cells, verification_scale(problem), self._replays)
        return {cell: Timing(*cell, *sample, self._yardstick.us[cell]) for cell, sample in samples.items()}

    def _race(self, request: Race) -> list[tuple[float, float]]:
        scale = verification_scale(request.problem)
        with self._loaded(request.a) as a, self._loaded(request.b) as b:
            self._stopwatch.fill(request.problem.dtype)
            samples = [self._stopwatch.race(a, b, cell, scale, request.replays) for cell in request.cells]
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
