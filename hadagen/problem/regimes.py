"""Where kernels are timed, and how the times decide which of them wins: element counts, regimes and weights.

A problem is timed at element counts (rows · n), its *buckets*, in place and out of place, and in two regimes: *hot*,
with the input in L2, and *cold*, with the input in device memory. The same nominal counts serve all problems; a bucket
is the whole rows nearest to one (`timed_elements`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache

from hadagen.problem.launch import RowShape
from hadagen.problem.operands import operands_of
from hadagen.problem.problem import Problem, Rows
from hadagen.problem.prologues import width_of


class Destination(str, Enum):
    IN_PLACE = "in-place"
    OUT_OF_PLACE = "out-of-place"


class Cache(str, Enum):
    """Where the input lies when a timed launch begins: in L2, or in device memory."""

    HOT = "hot"
    COLD = "cold"


# Nominal element counts at which kernels are timed. Kernels of pitched rows are timed at fewer.
ELEMENT_BUCKETS = tuple(1 << k for k in range(13, 29))
PITCHED_ELEMENT_BUCKETS: tuple[int, ...] = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
# Further element counts for contiguous rows, from 384K to 12M. There a launch is a few waves of blocks, and how full
# the last wave is decides which kernel is best. Kernels are timed there only in the regime that decides, or in both
# regimes if these weigh the same.
BUCKETS_BETWEEN = tuple(3 << k for k in range(17, 23))
# Further element counts for contiguous rows of `LONG_ROW` elements or more, from 1.25M to 7M. There rows are few, and
# the best kernels take one row at a time.
LONG_ROW = 1 << 13
BUCKETS_OF_LONG_ROWS = tuple(odd << k for k in range(18, 21) for odd in (5, 7))


def destinations(problem: Problem) -> tuple[Destination, ...]:
    """Where the results of a problem may go. Codes, and results behind a prologue, do not replace the input."""
    return (Destination.OUT_OF_PLACE,) if problem.io.form or problem.prologue else tuple(Destination)


def timed_elements(problem: Problem, nominal: int) -> int:
    """The elements of the whole rows, or of groups that are longer, nearest to a nominal count; 0 if that is none.

    If n is a power of two, it is the nominal count of `ELEMENT_BUCKETS` and the others itself, if that holds a row.
    """
    return round(nominal / problem.unit) * problem.unit


@lru_cache(maxsize=1024)  # every trial asks
def element_buckets(problem: Problem) -> tuple[int, ...]:
    """The element counts at which the kernels of a problem are timed, ascending: those of at least one row."""
    buckets = PITCHED_ELEMENT_BUCKETS
    if problem.io.rows is Rows.CONTIGUOUS:
        buckets = *ELEMENT_BUCKETS, *BUCKETS_BETWEEN, *(BUCKETS_OF_LONG_ROWS if problem.n >= LONG_ROW else ())
    return _whole_rows(problem, buckets)


@lru_cache(maxsize=1024)
def main_buckets(problem: Problem) -> tuple[int, ...]:
    """The buckets of a problem for the counts of `ELEMENT_BUCKETS`, ascending: each about twice the one before."""
    return _whole_rows(problem, ELEMENT_BUCKETS)


def _whole_rows(problem: Problem, buckets: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({elements for nominal in buckets if (elements := timed_elements(problem, nominal))}))


def nearest(timed: Sequence[int], elements: int) -> int:
    """The count in `timed` that is nearest to `elements` on a logarithmic scale, compared exactly. Of two equally near
    counts, the larger. `timed` is ascending and not empty."""
    above = bisect_left(timed, elements)
    low, high = timed[max(0, above - 1)], timed[min(above, len(timed) - 1)]
    return low if elements * elements < low * high else high


def timed_rows(problem: Problem) -> RowShape:
    """The rows with which a problem is timed, one right behind another.

    Pitched rows have three quarters of n elements, rounded down to a multiple of 8, but more than half of n, because a
    smaller n serves shorter rows.
    """
    n = columns = problem.n
    if problem.io.rows is Rows.PITCHED:
        columns = min(n, max(n * 3 // 4 // 8 * 8, n // 2 + 1))
    return RowShape(columns, columns, columns)


def buffer_bytes(problem: Problem, elements: int) -> int:
    """Bytes of the input where a problem is timed at `elements` = rows · n, and of the result if that is not
    quantized."""
    return elements * timed_rows(problem).columns * problem.io.input.bytes // problem.n


def quantized_bytes(problem: Problem, elements: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales there; (0, 0) if the result is not quantized."""
    form = problem.io.form
    if form is None:
        return 0, 0
    scales = elements // form.group if form.group > 0 else 0
    return elements * form.element.bits // 8, scales * form.scale_bytes(problem.io.input.bytes)


def touched_bytes(problem: Problem, elements: int, destination: Destination) -> int:
    """Bytes that one launch touches, each counted once."""
    read = buffer_bytes(problem, elements)
    written = 0 if destination is Destination.IN_PLACE else sum(quantized_bytes(problem, elements)) or read
    return read * (1 + sum(buffers_besides(problem))) + written


def buffers_besides(problem: Problem) -> tuple[int, int]:
    """How many tensors as large as a 16-bit result a launch reads besides one, and how many it writes besides y or
    codes and scales."""
    is_written = [operand.is_written for operand in operands_of(problem) if operand.like_x]
    return is_written.count(False) + width_of(problem) - 1, is_written.count(True)


def deciding_cache(problem: Problem, elements: int, destination: Destination, l2_bytes: int) -> Cache:
    """The regime whose timings name the winner of an element count: hot if input and output fit in half of L2."""
    return Cache.HOT if touched_bytes(problem, elements, destination) <= l2_bytes // 2 else Cache.COLD


def may_be_hot(problem: Problem, elements: int, destination: Destination, l2_bytes: int) -> bool:
    """Whether cold timings decide though data may well be hot: input and output fit in L2, but not in half of it."""
    cold, all_hot = (deciding_cache(problem, elements, destination, size) for size in (l2_bytes, 2 * l2_bytes))
    return cold is Cache.COLD and all_hot is Cache.HOT


REGIMES = ("latency", "L2", "memory")
LATENCY_ELEMENTS = 1 << 18  # up to here a launch is mostly latency


def regime(problem: Problem, elements: int, destination: Destination, cache: Cache, l2_bytes: int) -> str | None:
    """Which of `REGIMES` a time belongs to.

    None for element counts at which not all kernels are timed, for hot data beyond L2, and for cold data that fits in
    half of L2.
    """
    if elements not in element_buckets(problem):
        return None
    decides = cache is deciding_cache(problem, elements, destination, l2_bytes)
    if cache is Cache.COLD:
        return "memory" if decides else None
    fits = decides or may_be_hot(problem, elements, destination, l2_bytes)
    return None if not fits else "latency" if elements <= LATENCY_ELEMENTS else "L2"


# The weight of the time that does not decide, in the geometric mean of the hot and the cold time: in general, and where
# the data may well be hot, because it fits in L2 though not in half of it.
OTHER_SHARE = 0.1
OTHER_SHARE_MAY_BE_HOT = 0.5

LOSS = 0.02  # kernels that differ by no more than this count as equally fast


def other_share(problem: Problem, elements: int, destination: Destination, l2_bytes: int) -> float:
    """The weight, of 1, of the time in the regime that does not decide, on a device with that much L2."""
    return OTHER_SHARE_MAY_BE_HOT if may_be_hot(problem, elements, destination, l2_bytes) else OTHER_SHARE
