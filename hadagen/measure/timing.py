"""Times of single launches, from CUDA graphs of launches. `cells.py` says how the launches lie in memory.

Everything is queued first and read afterwards, so the device has work at every moment and the time a graph takes holds
nothing of the host.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch

from hadagen.gpu import libcuda
from hadagen.gpu.driver import Launch, LoadedKernel, bindings, check
from hadagen.measure.cells import EVICTION, Cell, Traffic
from hadagen.measure.copy import copy_numbers, copy_params
from hadagen.measure.device_operands import Orthonormal
from hadagen.measure.watch import Watch
from hadagen.problem.launch import RowShape
from hadagen.problem.operands import SCALES, operands_of, sizes_for
from hadagen.problem.problem import DType, Problem
from hadagen.problem.prologues import prologue_of
from hadagen.problem.regimes import Destination, timed_rows
from hadagen.truth.accuracy import TORCH_DTYPE

_ROW = 1 << 14  # elements
GRAPHS = 2  # rounds of `Stopwatch.time` for times that are compared with others
_WARM_UP_FLUSHES = 2000
_WATCHED_LAUNCHES = 32  # of a kernel that is launched again and again, before the device is waited for


# Param → where its memory lies for a launch: a name of `Traffic.addresses`, and a position in what that has.
Moving = Mapping[str, tuple[str, int]]
_NONE: Moving = {}


class Work(NamedTuple):
    """The launches of a kernel to time: their memory, and their arguments besides the addresses of x and y. `operands`
    are the same for all launches, and `moving` says which operands are not."""

    traffic: Traffic
    elements: int
    scale: float
    rows: RowShape
    operands: Mapping[str, int]
    moving: Moving = _NONE


def transform_work(problem: Problem, cell: Cell, operands: Orthonormal) -> Work:
    """The work of a problem's kernel at a cell, with operands of the problem."""
    given: dict[str, int] = operands
    if form := problem.io.form:  # rows of the least length
        rows = cell.elements // problem.unit
        given = {**operands, **sizes_for(form, rows, problem.unit, rows)}
    if prologue := prologue_of(problem):
        given = {**given, **prologue.numbers(_units_in_row(problem, cell.elements))}
    like_x = [each for each in operands_of(problem) if each.like_x]
    lists = {
        "inputs": [each.name for each in like_x if not each.is_written],
        "outputs": [each.name for each in like_x if each.is_written],
        "scales": [SCALES.name] if SCALES.is_taken(problem) else [],
    }
    moving = {name: (kind, at) for kind, names in lists.items() for at, name in enumerate(names)}
    return Work(cell.traffic(problem), cell.elements, operands.scale, timed_rows(problem), given, moving)


def _units_in_row(problem: Problem, elements: int) -> int:
    """How many units a row of results has in timings, if a kernel takes that number: as a row of a model, but so that
    all rows are whole."""
    units = elements // problem.unit
    most = max(1, _ROW // problem.unit)
    return next(each for each in (1 << at for at in reversed(range(most.bit_length()))) if units % each == 0)


def copy_work(traffic: Traffic) -> Work:
    """The work of the copy kernel, which counts in elements of two bytes."""
    names = {param.name for param in copy_params(traffic)}
    places = {"scales": ("scales", 0), "more_x": ("inputs", 0), "more_y": ("outputs", 0)}
    moving = {name: place for name, place in places.items() if name in names}
    return Work(traffic, traffic.buffer_bytes // 2, 1.0, RowShape(0, 0, 0), copy_numbers(traffic), moving)


def prepared(kernel: LoadedKernel, work: Work) -> Launch:
    """The launches of a work, for the addresses of x and y."""
    known = work.elements, work.scale, work.rows, work.operands
    if not work.moving:
        return kernel.prepared(*known)
    launch = kernel.prepared(*known, changing=list(work.moving))

    def launch_at(stream: int, x: int, y: int) -> None:
        places = work.traffic.addresses(x, y)
        launch(stream, x, y, *[places[kind][at] for kind, at in work.moving.values()])

    return launch_at


def repeated_bytes(work: Work) -> int:
    """The bytes of the arena that `Stopwatch.repeats` needs: inputs and two results."""
    return work.traffic.input_bytes + 2 * work.traffic.result_bytes


class Sample(NamedTuple):
    """Microseconds of one launch over the replays of its graph: median, first and third quartile."""

    us: float
    us_low: float
    us_high: float


class Graph(Protocol):
    """A CUDA graph of launches, one after another, on the stopwatch's stream. Close it when its replays are over."""

    def replay(self) -> None: ...

    def close(self) -> None: ...


class LaunchGraph:
    """A `Graph` of launches of one kernel."""

    def __init__(self, stream: int, kernel: LoadedKernel, addresses: Iterable[tuple[int, int]], work: Work) -> None:
        """`addresses`: those of x and y, a pair for each launch. Raises `DriverError`."""
        driver = bindings()
        launch = prepared(kernel, work)  # once: thousands of launches are captured in a trial
        self._stream = stream
        begun = driver.cuStreamBeginCapture(stream, libcuda.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        check(begun, "beginning a graph capture")
        try:
            for x, y in addresses:
                launch(stream, x, y)
        finally:
            captured = driver.cuStreamEndCapture(stream)
        self._graph = check(captured, f"capturing launches of {kernel.entry}")
        instantiated = driver.cuGraphInstantiateWithFlags(self._graph, 0)
        self._executable = check(instantiated, f"instantiating a graph of {kernel.entry}")

    def replay(self) -> None:
        check(bindings().cuGraphLaunch(self._executable, self._stream), "replaying a graph")

    def close(self) -> None:
        driver = bindings()
        check(driver.cuGraphExecDestroy(self._executable), "destroying a graph")
        check(driver.cuGraphDestroy(self._graph), "destroying a graph")


class Turns(NamedTuple):
    """Functions that make graphs of launches, the memory of the launches, and how often each graph is replayed, two
    times or more. The replays of the graphs alternate, so that a drift of the clocks hits all of them."""

    graphs: Sequence[Callable[[], Graph]]
    traffic: Traffic
    replays: int


class _Interval(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def us(self) -> float:
        """Microseconds, once the device has come to its end."""
        return float(self.start.elapsed_time(self.end)) * 1000.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stopwatch:
    """Times launches on one stream, over an arena of random normals.

    `stream` must be current for PyTorch in every call. `watch` is told what the device finishes. Raises PyTorch's
    `RuntimeError` where memory runs out.
    """

    def __init__(self, stream: torch.cuda.Stream, l2_bytes: int, watch: Watch | None = None) -> None:
        self._stream = stream
        self._watch = watch or Watch()
        self._l2_bytes = l2_bytes
        self._arena = torch.zeros(4, dtype=torch.int32, device=stream.device)
        # Results that are quantized, which no kernel may read as input.
        self._results = torch.zeros(4, dtype=torch.int32, device=stream.device)
        self._flusher = torch.zeros(EVICTION * l2_bytes // 4, dtype=torch.int32, device=stream.device)

    def operands(self, problem: Problem) -> Orthonormal:
        """New operands of a problem, which no kernel has overwritten."""
        return Orthonormal(problem, self._stream.device)

    def fill(self, dtype: DType, traffics: Iterable[Traffic], least_bytes: int = 0) -> None:
        """New random normals in an arena that any of `traffics` fits in.

        Orthonormal transforms keep them as large as they are, however often they run; where rows are cut short, they
        become no larger.
        """
        needed = max([least_bytes, *(each.slots(self._l2_bytes) * each.footprint for each in traffics)])
        if needed > self._arena.nbytes:
            self._arena = torch.empty(0, dtype=torch.int32, device=self._stream.device)  # gives its memory back first
            self._arena = torch.empty(-(-needed // 4), dtype=torch.int32, device=self._stream.device)
        self._arena.view(TORCH_DTYPE[dtype]).normal_()

    def is_finite(self, dtype: DType) -> bool:
        """Whether every element of the arena is still finite."""
        low, high = torch.aminmax(self._arena.view(TORCH_DTYPE[dtype]))
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def warm_up(self) -> None:
        """Some 0.1 s of work, so that clocks are up."""
        for _ in range(_WARM_UP_FLUSHES):
            self._flush()
        self._stream.synchronize()

    def turns(self, kernels: Iterable[LoadedKernel], work: Work, replays: int) -> Turns:
        """Launches of some kernels for the same work."""
        return Turns([functools.partial(self.graph, kernel, work) for kernel in kernels], work.traffic, replays)

    def time(self, several: Iterable[Turns], rounds: int = 1) -> list[list[Sample]]:
        """The time of a launch in each graph of each `Turns`.

        Several are timed one after another: the next graphs are made while the device is busy. rounds: how often all of
        them are timed, each time with new graphs; of a graph's samples the fastest counts, for now and then all replays
        of one graph take longer.
        """
        ordered = list(several)
        found: list[list[list[Sample]]] = []
        for number in range(rounds):
            direction = -1 if number % 2 else 1  # so that none always comes after the same one
            found.append(self._time(ordered[::direction])[::direction])
        return [[min(samples) for samples in zip(*of_graphs, strict=True)] for of_graphs in zip(*found, strict=True)]

    def _time(self, several: Sequence[Turns]) -> list[list[Sample]]:
        intervals: list[list[list[_Interval]]] = []
        with ExitStack() as open_graphs:
            for turns in several:
                self._watch.beat()
                graphs = [open_graphs.enter_context(closing(make())) for make in turns.graphs]
                for graph in graphs:
                    graph.replay()  # warms up
                intervals.append([[] for _ in graphs])
                lanes = list(zip(graphs, intervals[-1], strict=True))
                for _ in range(turns.replays):
                    for graph, times in lanes:
                        if turns.traffic.needs_flush(self._l2_bytes):
                            self._flush()
                        times.append(self._timed(graph.replay))
                    lanes.reverse()  # so that of two neither always comes second
            for interval in chain.from_iterable(chain.from_iterable(intervals)):
                interval.end.synchronize()
                self._watch.beat()
            self._stream.synchronize()
        return [
            [_sample(times, turns.traffic.launches(self._l2_bytes)) for times in lanes]
            for turns, lanes in zip(several, intervals, strict=True)
        ]

    def once(self, call: Callable[[], object]) -> float:
        """Microseconds from before a call until the device has done what it asked for."""
        interval = self._timed(call)
        self._stream.synchronize()
        return interval.us

    def repeats(self, kernel: LoadedKernel, work: Work, launches: int) -> bool:
        """Whether so many launches over the same input all have the same result, bit for bit.

        work: out of place, with `repeated_bytes` in the arena, which it overwrites.
        """
        size, inputs = work.traffic.result_bytes, work.traffic.input_bytes
        x, memory = self._arena, self._arena.view(torch.uint8)[inputs:]
        first, again = (memory[i * size : (i + 1) * size].view(torch.int32) for i in range(2))
        first.zero_()  # nothing is written between rows
        again.zero_()
        stream, launch = self._stream.cuda_stream, prepared(kernel, work)
        launch(stream, x.data_ptr(), first.data_ptr())
        same = []
        for number in range(launches):
            launch(stream, x.data_ptr(), again.data_ptr())
            same.append((first == again).all())
            if number % _WATCHED_LAUNCHES == 0:
                self._stream.synchronize()
                self._watch.beat()
        return bool(torch.stack(same).all())

    def inputs(self, dtype: DType, work: Work, rows: int) -> list[torch.Tensor]:
        """The inputs of a `Work`'s launches as tensors, for peers (which take no addresses): one [rows, columns] for
        each slot."""
        arena = self._arena.view(TORCH_DTYPE[dtype])
        starts = range(0, work.traffic.slots(self._l2_bytes) * work.traffic.footprint, work.traffic.footprint)
        shape = rows, work.rows.columns
        return [arena[start // dtype.bytes :][: math.prod(shape)].view(shape) for start in starts]

    def graph(self, kernel: LoadedKernel, work: Work) -> LaunchGraph:
        """Launches of a kernel in the slots of a work."""
        traffic = work.traffic
        base = self._arena.data_ptr()
        slots = traffic.slots(self._l2_bytes)
        launches = [launch % slots for launch in range(traffic.launches(self._l2_bytes))]
        if traffic.is_apart:
            if self._results.nbytes < slots * traffic.result_bytes:
                self._results = self._results.new_empty(slots * traffic.result_bytes // 4 + 4)
            results = self._results.data_ptr()
            addresses = [(base + i * traffic.input_bytes, results + i * traffic.result_bytes) for i in launches]
        else:
            y_offset = 0 if traffic.destination is Destination.IN_PLACE else traffic.buffer_bytes
            starts = (base + i * traffic.footprint for i in launches)
            addresses = [(start, start + y_offset) for start in starts]
        # The driver may load code with a kernel's first launch, which must not happen inside a capture.
        x, y = addresses[0]
        prepared(kernel, work)(self._stream.cuda_stream, x, y if traffic.is_apart else x)
        return LaunchGraph(self._stream.cuda_stream, kernel, addresses, work)

    def _timed(self, call: Callable[[], object]) -> _Interval:
        interval = _Interval(_event(), _event())
        interval.start.record(self._stream)
        call()
        interval.end.record(self._stream)
        return interval

    def _flush(self) -> Any:
        """Fills L2 with lines that are only read, so that none has to be written back while others are timed."""
        return self._flusher.sum()


def _sample(intervals: Sequence[_Interval], launches: int) -> Sample:
    us = [interval.us / launches for interval in intervals]
    low, median, high = statistics.quantiles(us, n=4, method="inclusive")
    return Sample(median, low, high)
