"""The speed of winners against a copy: of each problem in each regime, and over sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

from hadagen.problem.problem import Problem
from hadagen.problem.regimes import (
    LATENCY_ELEMENTS,
    REGIMES,
    Cache,
    Destination,
    element_buckets,
    regime,
    touched_bytes,
)
from hadagen.report.names import device_name, kind_name, series_name, size_name
from hadagen.tuning_db.bundle import BundleEntry


@dataclass(frozen=True, order=True)
class Shown:
    """A choice in the selectors of a chart: a device, a kind of problem, and a destination."""

    device: str
    kind: str
    destination: str


@dataclass(frozen=True)
class Mean:
    """The winners of a problem in one regime: the geometric mean of their fractions of copy, of how many times, and the
    least and the largest microseconds of a launch."""

    fraction: float
    times: int
    least_us: float
    largest_us: float


@dataclass(frozen=True)
class Speed:
    """The speed of a problem. size: `size_name`. means: a name of `regimes.REGIMES` → its mean, where there is one."""

    shown: Shown
    series: str
    n: int
    size: str
    has_matrix: bool
    means: dict[str, Mean]


@dataclass(frozen=True, order=True)
class OverSizes:
    """The winners of one problem in one regime of the cache, by elements (rows · n), ascending.

    us: microseconds of one launch. regime: one of `regimes.REGIMES`, or "" for times that name no winner. l2_elements:
    the elements that fit in half of L2; 0 where the size of L2 is not known.
    """

    shown: Shown
    series: str
    n: int
    problem: str
    cache: str
    l2_elements: float
    elements: list[int] = field(default_factory=list)
    fraction: list[float] = field(default_factory=list)
    us: list[float] = field(default_factory=list)
    regime: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Time:
    entry: BundleEntry
    cache: Cache
    us: float
    copy_us: float

    @property
    def fraction(self) -> float:
        return self.copy_us / self.us

    @property
    def regime(self) -> str:
        """One of `regimes.REGIMES`; "" for a time that names no winner."""
        entry = self.entry
        place = entry.problem, entry.elements, entry.destination
        if entry.environment.l2_bytes and self.is_at_bucket:
            return regime(*place, self.cache, entry.environment.l2_bytes) or ""
        if self.cache is not entry.cache:
            return ""
        return "memory" if self.cache is Cache.COLD else "latency" if entry.elements <= LATENCY_ELEMENTS else "L2"

    @property
    def is_at_bucket(self) -> bool:
        """Whether all kernels of the problem are timed at this size."""
        return self.entry.elements in element_buckets(self.entry.problem)


def speeds(winners: Iterable[BundleEntry]) -> list[Speed]:
    """One for each device, problem and destination, by n.

    Winners between the sizes at which all kernels are timed are left out, because not every problem has some.
    """
    found: dict[tuple[Shown, Problem], dict[str, list[_Time]]] = defaultdict(lambda: defaultdict(list))
    for time in _times(winners):
        if time.is_at_bucket and (where := time.regime):
            found[_shown(time.entry), time.entry.problem][where].append(time)
    return [
        Speed(
            shown,
            series_name(problem),
            problem.n,
            size_name(problem),
            problem.transform.has_matrix,
            {where: _mean(by_regime[where]) for where in REGIMES if where in by_regime},
        )
        for (shown, problem), by_regime in sorted(found.items(), key=lambda item: (item[0][1].n, item[0]))
    ]


def _mean(times: Sequence[_Time]) -> Mean:
    each = [time.us for time in times]
    return Mean(geometric_mean(time.fraction for time in times), len(times), min(each), max(each))


def speed_over_sizes(winners: Iterable[BundleEntry]) -> list[OverSizes]:
    """Two lines for each device, problem and destination: hot and cold."""
    lines: dict[tuple[str, Problem, Destination, Cache], OverSizes] = {}
    # A size may have a hot and a cold winner. A hot time is that of the hot one, which comes first.
    for time in sorted(_times(winners), key=lambda time: (time.entry.elements, time.cache is not time.entry.cache)):
        entry = time.entry
        key = device_name(entry.gpu, entry.arch), entry.problem, entry.destination, time.cache
        if key not in lines:
            head = series_name(entry.problem), entry.problem.n, entry.problem.key
            lines[key] = OverSizes(_shown(entry), *head, time.cache.value, l2_elements=_l2_elements(entry))
        line = lines[key]
        if entry.elements in line.elements[-1:]:
            continue
        line.elements.append(entry.elements)
        line.fraction.append(time.fraction)
        line.us.append(time.us)
        line.regime.append(time.regime)
    return sorted(lines.values())


def _times(winners: Iterable[BundleEntry]) -> Iterator[_Time]:
    """The times of winners, without winners that replace others on GPUs that hold no large clusters."""
    for entry in winners:
        if not entry.portable:
            yield from (_Time(entry, cache, *times) for cache, times in entry.times.items())


def _shown(entry: BundleEntry) -> Shown:
    return Shown(device_name(entry.gpu, entry.arch), kind_name(entry.problem), entry.destination.value)


def _l2_elements(entry: BundleEntry) -> float:
    many = 1 << 20
    elements = many * entry.problem.unit
    return entry.environment.l2_bytes / 2 / touched_bytes(entry.problem, elements, entry.destination) * elements
