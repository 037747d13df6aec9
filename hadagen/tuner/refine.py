"""Times kernels between the buckets, the element counts at which all kernels are timed.

A call takes the winner of the nearest count. If its launch needs one more wave of blocks than at that count, another
kernel may be faster, and no fixed list of counts has all such places. So the best kernels of a problem are also timed
in the middle of every gap between two buckets. Then they are timed in the middle of what is left of a gap, down to a
ratio of `SHORT_GAP`, if the winners at its ends differ, if calls change kernels in it, or if the time at its upper end
is longer than its elements explain. The times go to the trials in the store. `portfolio` names winners wherever calls
would otherwise lose. Each place with a winner is timed twice, and the second time counts, because the fastest of many
kernels was often lucky.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isqrt

from hadagen.measure import Cell, Variant, cells_at, without_texts
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import LOSS, Destination, destinations
from hadagen.problem.trial import Environment, Outcome, Trial, knobs_key
from hadagen.tuning_db import winners
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import (
    closest_trials,
    digest_of,
    lacking_between,
    may_win,
    near_best,
    portfolio,
    ranked_by_cell,
)

SHORT_GAP = 1.1  # no kernels are timed between counts of this ratio or less
MOST_KERNELS = 32  # of a problem; more only if more win

# Times each kernel at every cell of its problem, even slow ones.
Measurer = Callable[[Mapping[Problem, Sequence[Cell]], Sequence[Variant]], Iterable[Trial]]
Where = tuple[Destination, int]  # destination and element count


def refine(
    problems: Iterable[Problem],
    store: Store,
    arch: str,
    gpu: Environment,
    measure: Measurer,
    deadline: float = inf,
) -> list[Problem]:
    """Time the best kernels of problems between their element counts, and add the times to their trials in the store.

    gpu: where `measure` times. `measure` is called once for each round, with the kernels of all problems, and the
        trials that it yields are stored at once.

    A kernel that is wrong or unstable by now wins nothing any more: all its trials on that GPU get that outcome. A
    kernel that ends otherwise is not timed again in this run. A place where an earlier run has timed all these kernels
    is left out, unless a winner is named there. No kernel is timed after `deadline`, in seconds of `time.monotonic`;
    the next run goes on there. Returns the problems that have trials on that GPU. Raises `StorageError` where the store
    cannot keep a time.
    """
    ended: set[str] = set()  # digests of kernels that were not ok in this run
    refinements = {problem: _Refinement(problem, store, arch, gpu, ended) for problem in problems}
    refinements = {problem: refinement for problem, refinement in refinements.items() if refinement.kernels}
    while time.monotonic() < deadline and (
        looking := {problem: there for problem, refinement in refinements.items() if (there := refinement.to_look_at())}
    ):
        cells = {
            problem: [cell for where, count in there for cell in cells_at(problem, count, where, gpu.l2_bytes)]
            for problem, there in looking.items()
        }
        fewer = set()
        for trial in measure(
            cells, [kernel for problem in looking for kernel in refinements[problem].kernels.values()]
        ):
            if trial.outcome is Outcome.OK:
                store.add_timings(trial)
            else:
                ended.add(digest_of(trial))
                fewer.add(trial.problem)
                if trial.outcome in (Outcome.WRONG_ANSWER, Outcome.UNSTABLE):
                    _refuse(trial, store)
            if time.monotonic() >= deadline:
                break
        for problem in looking:
            if problem in fewer:
                refinements[problem] = _Refinement(problem, store, arch, gpu, ended)
            else:
                refinements[problem].learn()
    return list(refinements)


def _refuse(refused: Trial, store: Store) -> None:
    """Give all trials of this kernel, problem and GPU the outcome of the refused trial."""
    for trial in store.trials(refused.problem, refused.arch, refused.environment.gpu, Outcome.OK, blobs=False):
        if trial.kernel and trial.kernel.digest == digest_of(refused):
            store.record(replace(trial, outcome=refused.outcome, detail=refused.detail))


class _Refinement:
    """The kernels to time for a problem on a GPU, and their times in the store."""

    def __init__(self, problem: Problem, store: Store, arch: str, gpu: Environment, ended: set[str]) -> None:
        self._problem, self._store, self._arch, self._gpu = problem, store, arch, gpu.gpu
        trials = self._trials()
        self._winners = {
            cell: trial for cell, trial in portfolio(trials).items() if cell.is_bucket and not cell.portable
        }
        best = {digest_of(trial): trial for trial in self._winners.values()}
        for trial in closest_trials(trials, MOST_KERNELS):
            if len(best) < MOST_KERNELS:
                best.setdefault(digest_of(trial), trial)
        # The knobs of an older kernel may compile to another kernel today.
        ascending = sorted(filter(may_win, trials), key=lambda trial: trial.date)
        newest = {knobs_key(trial.knobs): digest_of(trial) for trial in ascending}
        self.kernels = {
            # Without source and PTX, because there may be thousands.
            digest: Variant(trial.problem, trial.knobs, without_texts(store.kernel(digest)))
            for digest, trial in best.items()
            if newest[knobs_key(trial.knobs)] == digest and digest not in ended
        }
        self._looked_at: set[Where] = set()
        self._confirmed: set[Where] = set()
        self._ranked: Mapping[winners.WinnerCell, Sequence[winners.RankedTrial]] = {}
        self._named: Mapping[winners.WinnerCell, Trial] = {}
        self._rank(trials)

    def _trials(self) -> list[Trial]:
        return self._store.trials(self._problem, self._arch, self._gpu, Outcome.OK, blobs=False)

    def learn(self) -> None:
        """Read the times of these kernels from the store again."""
        self._rank(self._trials())

    def _rank(self, trials: Iterable[Trial]) -> None:
        self._ranked = ranked_by_cell(
            [trial for trial in trials if trial.kernel and trial.kernel.digest in self.kernels]
        )
        for cell, ranked in self._ranked.items():
            if self.kernels.keys() <= {digest_of(each.trial) for each in ranked}:
                self._looked_at.add((cell.destination, cell.elements))
        self._named = lacking_between(self._winners, self._ranked)

    def to_look_at(self) -> list[Where]:
        """The places to time next: each place once, and then the places with winners once more."""
        if len(self.kernels) < 2:
            return []
        places = [(where, count) for where in destinations(self._problem) for count in self._middles(where)]
        if not places:
            named = [(cell.destination, cell.elements) for cell in self._named]
            places = [place for place in named if place not in self._confirmed]
            self._confirmed.update(places)
        self._looked_at.update(places)
        return places

    def _middles(self, destination: Destination) -> list[int]:
        """The middles, on a logarithmic scale, of gaps that may have another winner and were not looked at."""
        tuned, named = (
            {cell.elements: digest_of(trial) for cell, trial in some.items() if cell.destination is destination}
            for some in (self._winners, self._named)
        )
        called = sorted((tuned | named).items())
        switches = [low * high for (low, one), (high, other) in pairwise(called) if one != other]  # squares of counts
        ranked = {cell.elements: found for cell, found in self._ranked.items() if cell.destination is destination}
        known, n = dict(tuned), self._problem.n

        def may_hide_another(low: int, high: int) -> bool:
            never_looked = low in tuned and high in tuned
            if never_looked or known[low] != known[high] or any(low**2 < switch < high**2 for switch in switches):
                return True
            best, best_above = (ranked[count][0].score if ranked.get(count) else inf for count in (low, high))
            return best_above * low > (1 + LOSS) * best * high  # such as at the begin of another wave

        while True:
            middles = {}
            for low, high in pairwise(sorted(known)):
                middle = max(isqrt(low * high) // n * n, low + n)  # down, but at least a row above `low`
                if middle < high and low * SHORT_GAP < high and may_hide_another(low, high):
                    middles[middle] = known[low], known[high]
            seen = [middle for middle in middles if (destination, middle) in self._looked_at]
            if not seen:
                return list(middles)
            known |= {middle: _winner(ranked.get(middle, ()), *middles[middle]) for middle in seen}


def _winner(ranked: Sequence[winners.RankedTrial], low: str, high: str) -> str:
    """The digest of the kernel that wins in the middle of a gap.

    A winner at an end of the gap is preferred if it is near the best. If no kernel is right on this device any more, it
    is the winner at the lower end.
    """
    near = [digest_of(each.trial) for each in near_best(ranked)]
    return next((digest for digest in near if digest in (low, high)), near[0] if near else low)
