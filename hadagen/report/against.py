"""Two databases or bundles compared: the times of winners of the same cells, problem by problem."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from hadagen.errors import UsageError
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import LOSS, Cache, Destination
from hadagen.problem.trial import Provenance
from hadagen.report.names import device_name
from hadagen.report.sources import Source
from hadagen.tuning_db.bundle import BundleEntry

ALIKE = 1 + LOSS  # times that differ by a smaller factor are alike
VERDICTS = ("faster", "slower", "alike", "only in the first", "only in the second")


@dataclass(frozen=True)
class Compared:
    """A problem on a device. cells: how many both sources have. factor: the other's time / ours, in the geometric mean
    over cells; least, largest: in the cell where it is so. Without cells, the factors are 1."""

    problem: str
    device: str
    verdict: str  # one of `VERDICTS`
    cells: int = 0
    factor: float = 1.0
    least: float = 1.0
    largest: float = 1.0


@dataclass(frozen=True)
class Comparison:
    """summary: one sentence. problems: the slowest against the other source first; those of one source only, last."""

    summary: str
    problems: tuple[Compared, ...]


_Cell = tuple[int, Destination, Cache]


def comparison(here: Source, there: Source) -> Comparison:
    """Compare the winners of two sources. Raises `UsageError` if no cell of theirs is the same."""
    ours, theirs = _times(here.winners), _times(there.winners)
    compared, factors = [], []
    for key in ours.keys() | theirs.keys():
        of, other = ours.get(key, {}), theirs.get(key, {})
        each = [other[cell] / of[cell] for cell in of.keys() & other.keys()]
        name = key[0].key, key[1]
        if each:
            mean = geometric_mean(each)
            verdict = "faster" if mean >= ALIKE else "slower" if mean <= 1 / ALIKE else "alike"
            compared.append(Compared(*name, verdict, len(each), mean, min(each), max(each)))
            factors += each
        else:  # both may have it, at other sizes
            compared += [Compared(*name, what) for what, known in zip(VERDICTS[3:], (of, other), strict=True) if known]
    if not factors:
        first, second = (
            f"{source.place} has {', '.join(sorted({device for _, device in times})) or 'no winners'}"
            for source, times in ((here, ours), (there, theirs))
        )
        raise UsageError(f"{first}, and {second}; compare winners of the same problems on the same GPU")
    compared.sort(key=lambda each: (not each.cells, each.factor, each.problem, each.device))
    return Comparison(_summary(here, there, compared, factors), tuple(compared))


def _times(winners: Iterable[BundleEntry]) -> dict[tuple[Problem, str], dict[_Cell, float]]:
    """Problem and device → cell → microseconds."""
    times: dict[tuple[Problem, str], dict[_Cell, float]] = defaultdict(dict)
    for entry in winners:
        if not entry.portable:
            cell = entry.elements, entry.destination, entry.cache
            times[entry.problem, device_name(entry.gpu, entry.arch)][cell] = entry.us
    return times


def _summary(here: Source, there: Source, compared: Iterable[Compared], factors: list[float]) -> str:
    counts = Counter(each.verdict for each in compared)
    names = [Path(source.place).name for source in (here, there)]
    if names[0] == names[1]:
        names = [here.place, there.place]
    estimated = any(each.provenance is Provenance.ESTIMATED for each in (*here.winners, *there.winners))
    return (
        f"{names[0]} is {'estimated to be ' if estimated else ''}{geometric_mean(factors):.3f} times as fast as "
        f"{names[1]}, in the geometric mean of {len(factors):,} cells; problems: {counts['faster']:,} faster, "
        f"{counts['slower']:,} slower, {counts['alike']:,} within {ALIKE - 1:.0%}, {counts[VERDICTS[3]]:,} only in the "
        f"first, {counts[VERDICTS[4]]:,} only in the second."
    )
