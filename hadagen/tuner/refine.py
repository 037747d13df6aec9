"""Winners between the element counts that kernels were tuned at.

A call takes the winner of the nearest count. Where a launch needs one more wave of blocks than it did there, another
kernel may be faster, and no fixed list of counts holds all such places. So the winners of a problem are timed once more
between the counts: in the middle of every gap, then, where the winners at the ends of what is left of a gap differ, in
the middle of that, down to a ratio of `SHORT_GAP`. A winner is added wherever calls would otherwise lose there.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isqrt

from hadagen.measure import Candidate, Cell, cells_at
from hadagen.problem import Problem
from hadagen.runtime.choose import nearest
from hadagen.trial import Trial
from hadagen.tuning_db import winners
from hadagen.tuning_db.winners import digest_of, ranked_by_cell

LEAST_GAIN = 0.02  # kernels no further apart than this count as equally fast
SHORT_GAP = 1.1  # element counts of no larger ratio are not looked between

# Times each kernel at every cell of its problem, however slow it is; those that are wrong have no times.
Measure = Callable[[Mapping[Problem, Sequence[Cell]], Sequence[Candidate]], Iterable[Trial]]
Ranked = Sequence[winners.Candidate]


class _Line:
    """The winners of a problem on a GPU, in place or out of place, by element count."""

    def __init__(self, tuned: Mapping[int, Trial]) -> None:
        self._n = next(iter(tuned.values())).problem.n
        self._tuned = dict(sorted(tuned.items()))
        self._known = dict(self._tuned)  # and those of middles
        self._ranked: dict[int, Ranked] = {}

    def middles(self) -> Iterator[int]:
        """Where to look next: the middles, on a logarithmic scale, of gaps that may hide another winner."""
        for low, high in pairwise(sorted(self._known)):
            middle = max(isqrt(low * high) // self._n * self._n, low + self._n)  # down, but a row above the end
            never_looked = low in self._tuned and high in self._tuned
            differ = digest_of(self._known[low]) != digest_of(self._known[high])
            if middle < high and low * SHORT_GAP < high and (never_looked or differ):
                yield middle

    def learn(self, middle: int, ranked: Ranked) -> None:
        """Take what came of a middle, the best first. A kernel at an end of its gap wins where no other is faster by
        more than `LEAST_GAIN`; that at the lower end also where none is right on this device any more."""
        counts = sorted(self._known)
        above = bisect(counts, middle)
        low, high = self._known[counts[above - 1]], self._known[counts[above]]
        near = [each.trial for each in ranked if each.score <= ranked[0].score * (1 + LEAST_GAIN)]
        near.sort(key=lambda trial: digest_of(trial) not in (digest_of(low), digest_of(high)))
        self._known[middle] = near[0] if near else low
        self._ranked[middle] = ranked

    def lacking(self) -> dict[int, Trial]:
        """The winners of middles without which calls would lose there."""
        found = dict(self._tuned)
        while added := {middle: self._known[middle] for middle in self._ranked if self._loses(found, middle)}:
            first = min(added)  # it may help at the next
            found[first] = added[first]
        return {count: trial for count, trial in found.items() if count not in self._tuned}

    def _loses(self, found: Mapping[int, Trial], middle: int) -> bool:
        """Whether the kernel that is called is slower than the best by more than `LEAST_GAIN`, or wrong by now."""
        ranked = self._ranked[middle]
        if not ranked:
            return False
        called = digest_of(found[nearest(sorted(found), middle)])
        score = next((candidate.score for candidate in ranked if digest_of(candidate.trial) == called), inf)
        return score > ranked[0].score * (1 + LEAST_GAIN)


def refine(selection: Mapping[winners.Cell, Trial], measure: Measure, l2_bytes: int) -> dict[winners.Cell, Trial]:
    """Winners to add to those of a selection, by cell, such that calls lose at most `LEAST_GAIN` at any count that was
    looked at.

    selection: of the GPU on which `measure` times, with that much L2; its trials have their kernels, and no others are
    tried. `measure` is asked once for each round.
    """
    tuned: dict[winners.Cell, dict[int, Trial]] = defaultdict(dict)  # the keys with no count
    for cell, trial in selection.items():
        tuned[replace(cell, elements=0)][cell.elements] = trial
    lines = {cell: _Line(counts) for cell, counts in tuned.items()}
    while middles := [replace(cell, elements=count) for cell, line in lines.items() for count in line.middles()]:
        cells: dict[Problem, list[Cell]] = defaultdict(list)
        for middle in middles:
            cells[middle.problem] += cells_at(middle.problem, middle.elements, middle.destination, l2_bytes)
        ranked = ranked_by_cell(measure(cells, _kernels(selection, cells)))
        for middle in middles:
            lines[replace(middle, elements=0)].learn(middle.elements, ranked.get(middle, ()))
    return {
        replace(cell, elements=count): trial for cell, line in lines.items() for count, trial in line.lacking().items()
    }


def _kernels(selection: Mapping[winners.Cell, Trial], problems: Iterable[Problem]) -> list[Candidate]:
    """The kernels of some problems, each once, those of a problem together."""
    kernels = {
        (cell.problem, digest_of(trial)): Candidate(cell.problem, trial.knobs, trial.kernel)
        for cell, trial in sorted(selection.items(), key=lambda item: item[0])
        if cell.problem in problems
    }
    return list(kernels.values())
