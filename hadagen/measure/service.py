"""The work of the worker process on its GPU: load, verify, time, unload. Imported by that process alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from hadagen.gpu.driver import DriverError, LoadedKernel, bindings, load
from hadagen.gpu.gpu_class import nvml_gpu
from hadagen.measure.cells import Cell, Cells, all_cells, probe_cells
from hadagen.measure.comparing import Comparer
from hadagen.measure.device_operands import Orthonormal
from hadagen.measure.environment import device_environment
from hadagen.measure.messages import Answer, Compare, Comparison, Look, Measure, Race, Rank, Ranking
from hadagen.measure.monitor import Monitor
from hadagen.measure.timing import Stopwatch, repeated_bytes, transform_work
from hadagen.measure.verify import Verifier
from hadagen.measure.watch import Watch
from hadagen.measure.yardstick import Yardstick
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache, Destination, timed_elements
from hadagen.problem.trial import Disturbed, Environment, Kernel, Outcome, Timing

_RACE_REPLAYS = 15  # of each of two kernels

# A race that one tile in a hundred thousand loses shows, more often than not, in so many tiles; launches of so many
# elements, which take some 0.1 ms each.
_REPEATED_TILES = 100_000
_REPEATED_CELL = Cell(1 << 24, Destination.OUT_OF_PLACE, Cache.COLD)
_LEAST_REPEATED = 48


def repeated_launches(tile_elements: int) -> int:
    """How often a kernel with such tiles is launched for its results to be compared."""
    return max(_LEAST_REPEATED, -(-_REPEATED_TILES * tile_elements // _REPEATED_CELL.elements))


def _in_whole_rows(problem: Problem, cell: Cell) -> Cell:
    return cell._replace(elements=timed_elements(problem, cell.elements))


class DeviceService:
    """Answers requests on one GPU. `cells` as `DeviceRunner` takes them."""

    def __init__(
        self, watch: Watch, device_index: int, copy_kernels: Sequence[Kernel], cells: Cells | None, replays: int
    ) -> None:
        self.greeting: Environment = device_environment(device_index)
        self._watch = watch
        self._device_index = device_index
        self._replays = replays
        self._l2_bytes = self.greeting.l2_bytes
        self._cells = cells
        reserved = partial(torch.cuda.memory_reserved, device_index)
        self._monitor = Monitor(nvml_gpu(device_index), self.greeting, reserved)
        torch.cuda.set_device(device_index)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(stream)
        self._stopwatch = Stopwatch(stream, self._l2_bytes, watch)
        self._stopwatch.warm_up()
        self._verifier = Verifier(stream.device, stream.cuda_stream, watch)
        self._yardstick = Yardstick(self._stopwatch, [self._load(k) for k in copy_kernels], replays)
        self._comparer = Comparer(self._stopwatch, self._verifier, self._yardstick, self._l2_bytes, self._loaded)
        self._monitor.begin()

    def handle(
        self, request: Look | Measure | Race | Compare | Rank
    ) -> Answer | list[tuple[float, float]] | Comparison | Ranking | Disturbed | None:
        before = self._monitor.look()
        if isinstance(request, Look):
            return before
        if isinstance(request, Compare | Rank):  # which take long, so that their times are kept, with a warning
            if before:
                self._yardstick.forget()
            compared = self._comparer.compare(request) if isinstance(request, Compare) else self._comparer.rank(request)
            return replace(compared, disturbed=before or self._disturbed_now())
        if before:
            return before
        if isinstance(request, Race):
            times = self._race(request)
            return self._disturbed_now() or times
        started = time.monotonic()
        try:
            answer = self._measure(request)
        except (DriverError, torch.cuda.OutOfMemoryError) as error:
            is_full = not isinstance(error, DriverError) or error.code == "CUDA_ERROR_OUT_OF_MEMORY"
            if is_full and (crowded := self._monitor.crowded()):
                return crowded
            raise
        if answer.outcome is Outcome.OK and (disturbed := self._disturbed_now()):
            return disturbed
        return replace(answer, seconds=time.monotonic() - started)

    def _disturbed_now(self) -> Disturbed | None:
        """The disturbance of the timing that just ended. Then the copies may have been timed wrongly too."""
        disturbed = self._monitor.look(after=True)
        if disturbed:
            self._yardstick.forget()
        return disturbed

    def is_usable(self) -> bool:
        return bool(bindings().cuCtxSynchronize() == (0,))

    def _measure(self, request: Measure) -> Answer:
        problem = request.problem
        self._verifier.prepare(problem)
        with self._loaded(request.kernel) as kernel, self._watch.on():
            verified = self._verifier.check(kernel, problem)
            if verified.outcome is not Outcome.OK:
                return verified
            cells = self._cells_of(problem, request.cells)
            traffics = [cell.traffic(problem) for cell in cells]
            operands = self._stopwatch.operands(problem)
            repeated = transform_work(problem, _in_whole_rows(problem, _REPEATED_CELL), operands)
            self._stopwatch.fill(problem.io.input, traffics, least_bytes=repeated_bytes(repeated))
            self._yardstick.refresh(traffics)
            probes = probe_cells(problem, cells, self._l2_bytes)
            timings = self._time(kernel, problem, operands, probes)
            detail = ""
            if probes and all(t.us > request.limits_us.get(cell, t.us) for cell, t in timings.items()):
                detail = f"given up after {len(probes)} probe cells: far slower than the best at each"
            else:
                timings |= self._time(kernel, problem, operands, [cell for cell in cells if cell not in timings])
            ordered = tuple(timings[cell] for cell in cells if cell in timings)
            if not self._stopwatch.is_finite(problem.io.input):
                return Answer(Outcome.UNSTABLE, "values were no longer finite after timing", verified.errors, ordered)
            launches = repeated_launches(kernel.spec.tile_elements)
            if not self._stopwatch.repeats(kernel, repeated, launches):
                detail = f"the same input came out differently in one of {launches + 1} launches"
                return Answer(Outcome.UNSTABLE, detail, verified.errors, ordered)
            return Answer(Outcome.OK, detail, verified.errors, ordered)

    def _cells_of(self, problem: Problem, wanted: Sequence[Cell] | None) -> list[Cell]:
        if wanted is None:
            wanted = self._cells[problem] if isinstance(self._cells, Mapping) else self._cells
        cells = all_cells(problem, self._l2_bytes) if wanted is None else wanted
        whole = dict.fromkeys(_in_whole_rows(problem, cell) for cell in cells)
        return [cell for cell in whole if cell.elements]

    def _time(
        self, kernel: LoadedKernel, problem: Problem, operands: Orthonormal, cells: Sequence[Cell]
    ) -> dict[Cell, Timing]:
        works = [transform_work(problem, cell, operands) for cell in cells]
        turns = [self._stopwatch.turns([kernel], work, self._replays) for work in works]
        samples = self._stopwatch.time(turns)
        return {
            cell: Timing(*cell, *sample, self._yardstick.us[traffic])
            for cell, (_, traffic, _), (sample,) in zip(cells, turns, samples, strict=True)
        }

    def _race(self, request: Race) -> list[tuple[float, float]]:
        operands = self._stopwatch.operands(request.problem)
        works = [transform_work(request.problem, cell, operands) for cell in request.cells]
        with self._loaded(request.a) as a, self._loaded(request.b) as b:
            self._stopwatch.fill(request.problem.io.input, [work.traffic for work in works])
            samples = self._stopwatch.time(self._stopwatch.turns((a, b), work, _RACE_REPLAYS) for work in works)
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
