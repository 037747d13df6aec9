"""What is known of a variant: the compiled `Kernel`, and the `Trial` that says how it did on a device."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from hadagen.launch import PARAMS, ROW_PARAMS, LaunchSpec, RowShape
from hadagen.problem import Problem, Rows

# Element counts (rows · n) at which kernels are timed, those of pitched rows at fewer.
ELEMENT_BUCKETS = tuple(1 << k for k in range(13, 29))
PITCHED_ELEMENT_BUCKETS = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
# Others of contiguous rows, 384K to 12M: there a launch is a few waves of blocks, and which kernel is the best depends
# on how full its last wave is. These are timed in the regime that decides alone, unless both count alike.
BUCKETS_BETWEEN = tuple(3 << k for k in range(17, 23))
# And of rows this long, which are few and of which the best kernels take one at a time, 1.25M to 7M.
LONG_ROW = 1 << 13
BUCKETS_OF_LONG_ROWS = tuple(odd << k for k in range(18, 21) for odd in (5, 7))


def element_buckets(problem: Problem) -> tuple[int, ...]:
    """The element counts at which the kernels of a problem are timed, ascending: those of at least one row."""
    of_long_rows = BUCKETS_OF_LONG_ROWS if problem.n >= LONG_ROW else ()
    buckets = (
        PITCHED_ELEMENT_BUCKETS
        if problem.io.rows is Rows.PITCHED
        else (*ELEMENT_BUCKETS, *BUCKETS_BETWEEN, *of_long_rows)
    )
    return tuple(sorted(elements for elements in buckets if elements >= problem.n))


def nearest(timed: Sequence[int], elements: int) -> int:
    """Of element counts, ascending and at least one, the nearest to `elements` on a logarithmic scale, exactly; of two
    as near the larger."""
    above = bisect_left(timed, elements)
    low, high = timed[max(0, above - 1)], timed[min(above, len(timed) - 1)]
    return low if elements * elements < low * high else high


def timed_rows(problem: Problem) -> RowShape:
    """The rows that every time of a problem is of. They lie one right behind another.

    Those of a pitched problem have three quarters of n elements, rounded down to a multiple of 8, but more than half
    of n: with fewer, a smaller n would do.
    """
    columns = (
        min(problem.n, max(problem.n * 3 // 4 // 8 * 8, problem.n // 2 + 1))
        if problem.io.rows is Rows.PITCHED
        else problem.n
    )
    return RowShape(columns, columns, columns)


def buffer_bytes(problem: Problem, elements: int) -> int:
    """Bytes of the input, and of the result, where a problem is timed at `elements` = rows · n."""
    return elements * timed_rows(problem).columns * problem.io.input.bytes // problem.n


def utc_now() -> str:
    """The date of a trial that ends now, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def knobs_key(knobs: Mapping[str, Any]) -> str:
    """Canonical text of knobs: equal knobs give equal text, whatever their order."""
    return json.dumps(dict(knobs), sort_keys=True, separators=(",", ":"))


def check_knobs(knobs: object) -> None:
    """Raises `ValueError` where these are not names with a number or a text each."""
    if not isinstance(knobs, dict) or not all(
        type(name) is str and type(value) in (int, str) for name, value in knobs.items()
    ):
        raise ValueError(f"{knobs!r:.40} are no knobs")


class Outcome(str, Enum):
    """How a trial ended."""

    ILLEGAL = "illegal"
    COMPILE_FAILED = "compile_failed"
    WRONG_ANSWER = "wrong_answer"
    LAUNCH_FAILED = "launch_failed"
    TIMEOUT = "timeout"
    UNSTABLE = "unstable"
    OK = "ok"


class Destination(str, Enum):
    IN_PLACE = "in-place"
    OUT_OF_PLACE = "out-of-place"


class Cache(str, Enum):
    """Where the input lies when a timed launch begins: in L2, or in device memory."""

    HOT = "hot"
    COLD = "cold"


def deciding_cache(problem: Problem, elements: int, destination: Destination, l2_bytes: int) -> Cache:
    """Which timings name the winner of an element count: hot where input and output fit in half of L2, else cold."""
    buffers = 1 if destination is Destination.IN_PLACE else 2
    return Cache.HOT if buffer_bytes(problem, elements) * buffers <= l2_bytes // 2 else Cache.COLD


def may_be_hot(problem: Problem, elements: int, destination: Destination, l2_bytes: int) -> bool:
    """Whether cold timings decide though data may well be hot: input and output fit in L2, but not in half of it."""
    cold, all_hot = (deciding_cache(problem, elements, destination, size) for size in (l2_bytes, 2 * l2_bytes))
    return cold is Cache.COLD and all_hot is Cache.HOT


class Provenance(str, Enum):
    MEASURED = "measured"
    ESTIMATED = "estimated"


@dataclass(frozen=True)
class Environment:
    """The device and software a trial ran on. `gpu` is "" for an estimate, which ran on no device."""

    gpu: str = ""
    compute_capability: str = ""
    sms: int = 0
    l2_bytes: int = 0
    driver: str = ""
    cuda: str = ""
    nvcc: str = ""
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0


@dataclass(frozen=True)
class Timing:
    """Time of one launch in microseconds, beside the copy kernel's over the same bytes in the same process.

    `elements` is rows · n; the rows are `timed_rows` of the problem.
    """

    elements: int
    destination: Destination
    cache: Cache
    us: float  # median
    us_low: float  # first quartile
    us_high: float  # third quartile
    copy_us: float

    @property
    def fraction_of_copy(self) -> float:
        return self.copy_us / self.us


def kernel_digest(cubin: bytes, launch: LaunchSpec) -> str:
    """What names a kernel: SHA-256 of its code and of how it is launched. Equal ones do the same in the same time."""
    return hashlib.sha256(cubin + json.dumps(digested(launch), sort_keys=True).encode()).hexdigest()


def digested(launch: LaunchSpec) -> dict[str, Any]:
    """What a digest has of a launch. Of the two lists of params that there were first, a flag says which it is, so that
    their kernels keep their names."""
    said = launch.to_dict()
    if launch.params in (PARAMS, (*PARAMS, *ROW_PARAMS)):
        del said["params"]
        said["pitched"] = launch.reads_rows
    return said


@dataclass(frozen=True)
class Kernel:
    """A compiled variant."""

    digest: str  # `kernel_digest`
    entry: str
    arch: str
    source: str
    cubin: bytes
    ptx: bytes
    launch: LaunchSpec
    registers: int
    spill_bytes: int
    nvcc: str
    static_shared_bytes: int = 0  # of one block, beside launch.shared_bytes

    def check(self) -> None:
        """Raises `ValueError` where it is not what was compiled: its digest is not that of its code and launch, or its
        entry is no name. For a kernel that was read, with its cubin."""
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.entry):
            raise ValueError(f"the entry {self.entry!r:.40} of a kernel is no identifier")
        if self.digest != kernel_digest(self.cubin, self.launch):
            raise ValueError(f"kernel {self.digest:.12} does not match its digest")


@dataclass(frozen=True)
class NotTried:
    """Takes the place of what would be said of a variant, had its compiler not died for a `reason` that may pass, such
    as "nvcc was killed by signal 9"."""

    reason: str


@dataclass(frozen=True)
class Trial:
    """One variant of a problem on one device.

    `errors`: relative error ‖out − ref‖ / ‖ref‖ against float64, by class of input.
    """

    problem: Problem
    arch: str
    knobs: dict[str, Any]
    outcome: Outcome
    provenance: Provenance
    kernel: Kernel | None = None
    detail: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    environment: Environment = Environment()
    date: str = ""  # UTC, ISO 8601
    seconds: float = 0.0  # wall time the trial took
