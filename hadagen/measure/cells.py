"""`Cell`: the conditions of one timing. `Traffic`: the memory of the launches of a timing.

One timing is a CUDA graph of launches, replayed. Launch number i works in *slot* i, a piece of one large arena:

    hot    every launch in slot 0, so the data stays in L2
    cold   every launch in a slot of its own; before a slot is used again, L2 was filled three times over, by the
           other slots if they are large enough, else by a read-only flush before each replay

A slot holds x and the operands like it, and y behind them if the destination is out-of-place. Codes, and results behind
a prologue, lie in slots of another arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import fsum, log2, prod
from typing import NamedTuple

from hadagen.problem.problem import Problem
from hadagen.problem.regimes import (
    Cache,
    Destination,
    buffer_bytes,
    buffers_besides,
    deciding_cache,
    destinations,
    element_buckets,
    main_buckets,
    may_be_hot,
    quantized_bytes,
)
from hadagen.problem.trial import Timing

# The least count with cold times. Below (256 KiB), a launch is all latency, and its input is hot in real programs.
LEAST_COLD_ELEMENTS = 1 << 16
# A buffer is evicted from L2 once this many times the size of L2 was touched after it.
EVICTION = 3
# With so many launches in a graph, its own start and end take less than one percent of the time.
_MAX_LAUNCHES = 96
_HOT_BYTES = 1 << 28


class Traffic(NamedTuple):
    """The memory of one timing. The time of the copy kernel depends on nothing else."""

    buffer_bytes: int  # of the input, and of the result; a multiple of 16
    destination: Destination
    cache: Cache
    codes_bytes: int = 0  # of the result instead where that is quantized, a multiple of 16
    scales_bytes: int = 0  # and of the scales behind it,
    room_bytes: int = 0  # the bytes that the layout of the scales takes
    inputs: int = 0  # buffers that are read besides x
    outputs: int = 0  # buffers that are written besides the result

    @property
    def is_apart(self) -> bool:
        """Whether results lie outside of the arena, because no kernel may read them as input."""
        return self.codes_bytes > 0 or self.inputs > 0 or self.outputs > 0

    @property
    def input_bytes(self) -> int:
        return (1 + self.inputs) * self.buffer_bytes

    @property
    def result_bytes(self) -> int:
        """Room for the results of a launch, each part up to a multiple of 16."""
        first = self.codes_bytes + -(-self.room_bytes // 16) * 16 if self.codes_bytes else self.buffer_bytes
        return first + self.outputs * self.buffer_bytes

    @property
    def footprint(self) -> int:
        """Bytes that one launch touches, each counted once."""
        return self.input_bytes + (0 if self.destination is Destination.IN_PLACE else self.result_bytes)

    def addresses(self, x: int, y: int) -> dict[str, list[int]]:
        """Where a launch finds its memory if its inputs begin at x and its results at y: "inputs" besides x, "outputs"
        besides the result, and "scales", behind the codes. Behind the last buffer of a list comes its end."""
        outputs = y + self.result_bytes - self.outputs * self.buffer_bytes
        return {
            "scales": [y + self.codes_bytes],
            "inputs": [x + i * self.buffer_bytes for i in range(1, self.inputs + 2)],
            "outputs": [outputs + i * self.buffer_bytes for i in range(self.outputs + 1)],
        }

    def launches(self, l2_bytes: int) -> int:
        """Launches in the graph. The copy kernel's graph has as many."""
        if self.cache is Cache.HOT:
            return min(_MAX_LAUNCHES, max(1, _HOT_BYTES // self.footprint))
        return min(_MAX_LAUNCHES, -(-EVICTION * l2_bytes // self.footprint))

    def slots(self, l2_bytes: int) -> int:
        """Distinct buffers among which the launches rotate."""
        return 1 if self.cache is Cache.HOT else self.launches(l2_bytes)

    def needs_flush(self, l2_bytes: int) -> bool:
        """Whether L2 must be flushed before each replay, because the rotation does not evict its own first slots."""
        return self.cache is Cache.COLD and self.slots(l2_bytes) * self.footprint < EVICTION * l2_bytes


class Cell(NamedTuple):
    """The conditions of one timing: `elements` = rows · n, the destination of the result, and where the input lies."""

    elements: int
    destination: Destination
    cache: Cache

    @classmethod
    def of(cls, timing: Timing) -> Cell:
        """The cell of a timing."""
        return cls(timing.elements, timing.destination, timing.cache)

    def traffic(self, problem: Problem) -> Traffic:
        whole_vectors = -(-buffer_bytes(problem, self.elements) // 16) * 16  # a few rows of 2 elements are less
        codes, scales = quantized_bytes(problem, self.elements)
        room = 0
        if scales and (form := problem.io.form):
            rows, groups = self.elements // problem.unit, form.scales_in_row(problem.unit)
            size = form.scale_bytes(problem.io.input.bytes)
            room = prod(form.layout.filled_up(rows, groups, size)) * size
        of_codes = -(-codes // 16) * 16, scales, room
        return Traffic(whole_vectors, self.destination, self.cache, *of_codes, *buffers_besides(problem))


# What to time: the same cells for every problem, or cells by problem.
Cells = Sequence[Cell] | Mapping[Problem, Sequence[Cell]]


def all_cells(problem: Problem, l2_bytes: int) -> tuple[Cell, ...]:
    """Every cell of a problem on a device: both destinations, hot up to twice its L2, and cold from 65536 elements on.

    Counts that are not in `main_buckets` have only the regime that decides, or both if both count the same.
    """
    cells = (Cell(e, d, c) for e in element_buckets(problem) for d in destinations(problem) for c in Cache)
    return tuple(cell for cell in cells if is_timed(problem, cell, l2_bytes) and _weighs(problem, cell, l2_bytes))


def _weighs(problem: Problem, cell: Cell, l2_bytes: int) -> bool:
    where = problem, cell.elements, cell.destination, l2_bytes
    return cell.elements in main_buckets(problem) or cell.cache is deciding_cache(*where) or may_be_hot(*where)


def cells_at(problem: Problem, elements: int, destination: Destination, l2_bytes: int) -> tuple[Cell, ...]:
    """The cells that compare kernels at one element count: the regime that decides, then the other, if timed."""
    decides = deciding_cache(problem, elements, destination, l2_bytes)
    cells = (Cell(elements, destination, cache) for cache in sorted(Cache, key=lambda cache: cache is not decides))
    return tuple(cell for cell in cells if cell.cache is decides or is_timed(problem, cell, l2_bytes))


def is_timed(problem: Problem, cell: Cell, l2_bytes: int) -> bool:
    """Whether kernels of a problem are timed in the regime of a cell, on a device with that much L2. The element count
    may be any."""
    if cell.cache is Cache.HOT:
        return cell.traffic(problem).footprint <= 2 * l2_bytes
    return cell.elements >= LEAST_COLD_ELEMENTS


def rows_between(problem: Problem, counts: int) -> list[int]:
    """`counts` (2 or more) odd numbers of rows, ascending, between the buckets of a problem.

    They are spread evenly on a logarithmic scale, from the middle between the first two buckets to the middle between
    the last two. None is a bucket itself.
    """
    buckets = element_buckets(problem)
    low, high = (fsum(map(log2, ends)) / 2 for ends in (buckets[:2], buckets[-2:]))
    found: list[int] = []
    for i in range(counts):
        rows = 2.0 ** (low + (high - low) * i / (counts - 1)) / problem.n
        odd = max(2 * round((rows - 1) / 2) + 1, found[-1] + 2 if found else 3)
        while odd * problem.n in buckets:
            odd += 2
        found.append(odd)
    return found


def probe_cells(problem: Problem, cells: Iterable[Cell], l2_bytes: int) -> tuple[Cell, ...]:
    """The three cells that are timed first, in place if there are such: the smallest, the largest in half of L2, the
    largest of all."""
    first = destinations(problem)[0]
    in_place = sorted(cell for cell in cells if cell.destination is first)
    hot = [cell for cell in in_place if cell.cache is Cache.HOT and cell.traffic(problem).footprint <= l2_bytes // 2]
    cold = [cell for cell in in_place if cell.cache is Cache.COLD]
    return tuple(dict.fromkeys(hot[:1] + hot[-1:] + cold[-1:]))
