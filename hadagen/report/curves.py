"""How soon a search found its best: best possible time / best time so far, over the number of trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from statistics import median

from hadagen.report.names import device_name
from hadagen.report.scores import Search

NEAR = 0.98  # of the best in the end


@dataclass(frozen=True)
class Curve:
    """fractions: after each trial, best time of the whole search / best time so far, in the geometric mean over cells.

    Trials that failed count. Until a trial was right in a cell, the slowest time of the search counts there.
    """

    problem: str
    device: str
    fractions: tuple[float, ...]

    @property
    def trials_to_near(self) -> int:
        """Number of trials after which the fraction is `NEAR` or better."""
        return next(number for number, fraction in enumerate(self.fractions, 1) if fraction >= NEAR)

    def steps(self) -> tuple[list[int], list[float]]:
        """The corners of the curve: numbers of trials and fractions, where it rises, and its end."""
        numbers = [
            number
            for number, fraction in enumerate(self.fractions, 1)
            if number in (1, len(self.fractions)) or fraction != self.fractions[number - 2]
        ]
        return numbers, [self.fractions[number - 1] for number in numbers]


def curve_of(search: Search) -> Curve | None:
    """The curve of a search; None if no trial of it was timed."""
    cells = list(search.best)
    if not cells:
        return None
    so_far = {cell: max(scored.times[cell] for scored in search.trials if cell in scored.times) for cell in cells}
    lost = fsum(log(so_far[cell] / search.best[cell]) for cell in cells)
    fractions = []
    for scored in search.trials:
        for cell, us in scored.times.items():
            if us < so_far[cell]:
                lost -= log(so_far[cell] / us)
                so_far[cell] = us
        fractions.append(min(1.0, exp(-max(0.0, lost) / len(cells))))
    fractions[-1] = 1.0  # by definition, but for rounding
    return Curve(search.problem.key, device_name(search.gpu, search.arch), tuple(fractions))


def curves(searches: Iterable[Search]) -> list[Curve]:
    """The curves of all searches that timed anything, those with most trials first."""
    found = [curve for search in searches if (curve := curve_of(search))]
    return sorted(found, key=lambda curve: (-len(curve.fractions), curve.device, curve.problem))


def mean_curve(found: Sequence[Curve]) -> list[float]:
    """The geometric mean over curves after each number of trials. A curve that has ended stays at 1."""
    longest = max((len(curve.fractions) for curve in found), default=0)
    return [
        exp(fsum(log(curve.fractions[i]) for curve in found if i < len(curve.fractions)) / len(found))
        for i in range(longest)
    ]


def median_trials_to_near(found: Sequence[Curve]) -> float:
    """The median over curves of `Curve.trials_to_near`; 0 if there are none."""
    return median(curve.trials_to_near for curve in found) if found else 0
