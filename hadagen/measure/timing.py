"""Times of single launches, from CUDA graphs of launches. `cells.py` says how the launches lie in memory.

Everything is queued first and read afterwards, so the device has work at every moment and the time a graph takes holds
nothing of the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch

from hadagen.driver import LoadedKernel, bindings, check
from hadagen.measure.cells import EVICTION, Cell
from hadagen.measure.verify import TORCH_DTYPE
from hadagen.problem import DType
from hadagen.trial import Destination


class Sample(NamedTuple):
    """Microseconds of one launch over the replays of its graph: median, first and third quartile."""

    us: float
    us_low: float
    us_high: float


class LaunchGraph:
    """A CUDA graph of launches of one kernel, one after another. Close it when its replays are over."""

    def __init__(
        self, stream: int, kernel: LoadedKernel, addresses: Iterable[tuple[int, int]], elements: int, scale: float
    ) -> None:
        """`addresses`: of x and y, one pair a launch. Raises `DriverError`."""
        driver = bindings()
        self._stream = stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(stream, mode), "beginning a graph capture")
        try:
            for x, y in addresses:
                kernel.launch(stream, x, y, elements, scale)
        finally:
            captured = driver.cuStreamEndCapture(stream)
        self._graph = check(captured, f"capturing launches of {kernel.entry}")
        self._executable = check(driver.cuGraphInstantiate(self._graph, 0), f"instantiating a graph of {kernel.entry}")

    def replay(self) -> None:
        check(bindings().cuGraphLaunch(self._executable, self._stream), "replaying a graph")

    def close(self) -> None:
        driver = bindings()
        check(driver.cuGraphExecDestroy(self._executable), "destroying a graph")
        check(driver.cuGraphDestroy(self._graph), "destroying a graph")


class _Interval(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stopwatch:
    """Times launches on one stream, over an arena of random normals that fits any of `cells`.

    `stream` must be current for PyTorch in every call. Raises PyTorch's `RuntimeError` where memory runs out.
    """

    def __init__(self, stream: torch.cuda.Stream, l2_bytes: int, cells: Sequence[Cell]) -> None:
        self._stream = stream
        self._l2_bytes = l2_bytes
        arena_bytes = max(cell.slots(l2_bytes) * cell.footprint for cell in cells)
        self._arena = torch.empty(arena_bytes // 2, dtype=torch.int16, device=stream.device)
        self._flusher = torch.zeros(EVICTION * l2_bytes // 4, dtype=torch.int32, device=stream.device)

    def fill(self, dtype: DType) -> None:
        """New random normals. Orthonormal transforms keep them as large as they are, however often they run."""
        self._arena.view(TORCH_DTYPE[dtype]).normal_()

    def is_finite(self, dtype: DType) -> bool:
        """Whether every element of the arena is still finite."""
        low, high = torch.aminmax(self._arena.view(TORCH_DTYPE[dtype]))
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def warm_up(self, flushes: int = 2000) -> None:
        """Some 0.1 s of work, so that clocks are up."""
        for _ in range(flushes):
            self._flush()
        self._stream.synchronize()

    def time(self, kernel: LoadedKernel, cells: Sequence[Cell], scale: float, replays: int) -> dict[Cell, Sample]:
        """The time of a launch at each cell: `replays` timed replays after one that warms up."""
        intervals: dict[Cell, list[_Interval]] = {}
        for cell in cells[:1]:
            self._launch_once(kernel, cell, scale)
        with ExitStack() as open_graphs:
            for cell in cells:
                graph = open_graphs.enter_context(closing(self._graph(kernel, cell, scale)))
                graph.replay()
                intervals[cell] = [self._timed_replay(graph, cell) for _ in range(replays)]
            self._stream.synchronize()
        return {cell: self._sample(intervals[cell], cell) for cell in cells}

    def race(self, a: LoadedKernel, b: LoadedKernel, cell: Cell, scale: float, replays: int) -> tuple[Sample, Sample]:
        """Times of two kernels whose replays alternate, so that a drift of the clocks hits both."""
        intervals: tuple[list[_Interval], list[_Interval]] = ([], [])
        self._launch_once(a, cell, scale)
        self._launch_once(b, cell, scale)
        with closing(self._graph(a, cell, scale)) as graph_a, closing(self._graph(b, cell, scale)) as graph_b:
            lanes = [(graph_a, intervals[0]), (graph_b, intervals[1])]
            for graph, _ in lanes:
                graph.replay()
            for _ in range(replays):
                for graph, times in lanes:
                    times.append(self._timed_replay(graph, cell))
                lanes.reverse()  # so that neither always comes second
            self._stream.synchronize()
        return self._sample(intervals[0], cell), self._sample(intervals[1], cell)

    def _launch_once(self, kernel: LoadedKernel, cell: Cell, scale: float) -> None:
        """The driver may load code with its first launch, which must not happen inside a capture."""
        base = self._arena.data_ptr()
        kernel.launch(self._stream.cuda_stream, base, base, cell.elements, scale)

    def _graph(self, kernel: LoadedKernel, cell: Cell, scale: float) -> LaunchGraph:
        base = self._arena.data_ptr()
        y_offset = 0 if cell.destination is Destination.IN_PLACE else cell.buffer_bytes
        slots = cell.slots(self._l2_bytes)
        launches = range(cell.launches(self._l2_bytes))
        starts = (base + launch % slots * cell.footprint for launch in launches)
        addresses = ((start, start + y_offset) for start in starts)
        return LaunchGraph(self._stream.cuda_stream, kernel, addresses, cell.elements, scale)

    def _timed_replay(self, graph: LaunchGraph, cell: Cell) -> _Interval:
        interval = _Interval(_event(), _event())
        if cell.needs_flush(self._l2_bytes):
            self._flush()
        interval.start.record(self._stream)
        graph.replay()
        interval.end.record(self._stream)
        return interval

    def _flush(self) -> Any:
        """Fills L2 with lines that are only read, so that none has to be written back while others are timed."""
        return self._flusher.sum()

    def _sample(self, intervals: Sequence[_Interval], cell: Cell) -> Sample:
        launches = cell.launches(self._l2_bytes)
        us = [interval.start.elapsed_time(interval.end) * 1000.0 / launches for interval in intervals]
        low, median, high = statistics.quantiles(us, n=4, method="inclusive")
        return Sample(median, low, high)
