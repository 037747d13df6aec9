"""Which trial wins in which cell: pure functions of the trials, so that only trials need be stored.

A *cell* is here a `WinnerCell`, where a kernel is wanted: a problem on a GPU, in place or out of place, at a number of
elements, hot or cold.

Only a trial that is ok, has a kernel and keeps the problem's error bound for every class of input can win a cell. An
estimate may lack errors: then a call compares its kernel with PyTorch first. If
the data fits in half of L2, the hot time decides, otherwise the cold time. The other time counts a little too, if any
trial has it: kernels whose cold times tie because memory is the limit may differ by half when the data happens to be
hot.

A measured trial outranks an estimated one, whatever their times. An estimate wins no cell that was measured on any GPU
of the arch.

A GPU need not hold clusters of more than `PORTABLE_CLUSTER` blocks. If a winner has larger clusters, a second cell,
`portable`, has the winner of all other kernels. Calls run that one where the first does not fit.

Every kernel is timed at `element_buckets`, and a call takes the winner of the nearest. A few are timed between two of
them too (`tuner.refine`); a winner is named there only where calls would be slower without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum, isqrt, log
from typing import Any

from hadagen.problem.launch import PORTABLE_CLUSTER
from hadagen.problem.problem import Problem, Rows
from hadagen.problem.regimes import (
    LOSS,
    Destination,
    deciding_cache,
    destinations,
    element_buckets,
    nearest,
    other_share,
)
from hadagen.problem.trial import Outcome, Provenance, Timing, Trial, knobs_key


@dataclass(frozen=True, order=True)
class WinnerCell:
    """Where a winner is named. `gpu` is "" for estimates without a device; `elements` is rows · n.

    `portable`: only kernels that every GPU of the arch holds may win. Such a cell exists only beside a winner that is
    not portable.
    """

    problem: Problem
    arch: str
    gpu: str
    destination: Destination
    elements: int
    portable: bool = False

    @property
    def is_bucket(self) -> bool:
        """Whether all kernels of the problem are timed at this number of elements."""
        return self.elements in element_buckets(self.problem)

    @property
    def line(self) -> WinnerCell:
        """The same cell without its number of elements. Cells with the same line differ in that number alone."""
        return replace(self, elements=0)


@dataclass(frozen=True)
class RankedTrial:
    """A trial in a cell, with the timing that decides there. A lower `score` is better."""

    trial: Trial
    timing: Timing
    score: float


def may_win(trial: Trial) -> bool:
    """Whether the trial is ok, has a kernel, and was verified within its problem's error bound on every class of input.
    An estimate may have no errors, if no kernel ran."""
    return (
        trial.outcome is Outcome.OK
        and trial.kernel is not None
        and bool(trial.errors or trial.provenance is Provenance.ESTIMATED)
        and all(error <= trial.problem.error_bound for error in trial.errors.values())
    )


def cell_value(trial: Trial, destination: Destination, elements: int, l2_bytes: int) -> Timing | None:
    """The timing of the trial that decides in this cell, on a device with that much L2; None if it has none there."""
    decides = deciding_cache(trial.problem, elements, destination, l2_bytes)
    there = [t for t in trial.timings if t.destination is destination and t.elements == elements]
    return min(there, key=lambda timing: timing.cache is not decides, default=None)


def best_by_cell(trials: Iterable[Trial]) -> dict[WinnerCell, tuple[Trial, Timing]]:
    """The best trial of every cell, with the timing that decided; the order of the trials does not matter."""
    return {cell: (ranked[0].trial, ranked[0].timing) for cell, ranked in ranked_by_cell(trials).items()}


def portfolio(trials: Iterable[Trial], loss: float = LOSS) -> dict[WinnerCell, Trial]:
    """A small set of kernels that nowhere scores worse than the best by more than `loss` (0.02 is 2 %), by cell.

    The set of a problem is found greedily: the next kernel is the one that serves most of the buckets not served yet.
    Then every bucket gets the best kernel of the set. Kernels that calls lack between buckets are added
    (`lacking_between`), and kernels for GPUs that hold no large clusters (`portable_winners`). The order of the trials
    does not matter.
    """
    return portfolio_of(ranked_by_cell(trials), loss)


def portfolio_of(rankings: Mapping[WinnerCell, Sequence[RankedTrial]], loss: float = LOSS) -> dict[WinnerCell, Trial]:
    """`portfolio` of trials that were ranked already (`ranked_by_cell`)."""
    winners = _few_kernels({cell: ranked for cell, ranked in rankings.items() if cell.is_bucket}, loss)
    winners |= lacking_between(winners, rankings, loss)
    return dict(sorted((winners | portable_winners(winners, rankings, loss)).items()))


def portable_winners(
    winners: Mapping[WinnerCell, Trial], rankings: Mapping[WinnerCell, Sequence[RankedTrial]], loss: float = LOSS
) -> dict[WinnerCell, Trial]:
    """For each winner that is not portable, one that is, if any is ranked there; found as in `portfolio`."""
    portable = {
        replace(cell, portable=True): [each for each in rankings.get(cell, ()) if _is_portable(each.trial)]
        for cell, trial in winners.items()
        if not _is_portable(trial)
    }
    return _few_kernels({cell: ranked for cell, ranked in portable.items() if ranked}, loss)


# Destination → GPU → element count → kernel.
_Lines = dict[Destination, dict[str, dict[int, str]]]


def invariant_arithmetic(
    winners: Mapping[WinnerCell, Trial], rankings: Mapping[WinnerCell, Sequence[RankedTrial]]
) -> dict[Problem, str]:
    """For each problem of contiguous rows, the arithmetic of the kernels that batch-invariant calls run, so that a row
    has the same bits in every call. Of the arithmetics that portable winners have in both destinations, the one that
    loses least is chosen.

    winners: those of the trials in `rankings`, which are of one arch and come from `ranked_by_cell`. A call runs the
        winner of that arithmetic with the nearest element count. The loss of an arithmetic says how much worse than the
        best trial of a bucket these winners score, in the geometric mean over all buckets and GPUs.
    """
    named: dict[Problem, dict[str, _Lines]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for cell, trial in winners.items():
        if (name := arithmetic_in(trial)) and cell.problem.io.rows is Rows.CONTIGUOUS:
            by_gpu = named[cell.problem][name][cell.destination]
            by_gpu.setdefault(cell.gpu, {})[cell.elements] = digest_of(trial)
    losses: dict[Problem, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for cell, ranked in rankings.items():
        if cell.problem not in named or not cell.is_bucket:
            continue
        scores = {digest_of(each.trial): each.score for each in reversed(ranked)}
        for name, lines in named[cell.problem].items():
            if len(lines) == len(destinations(cell.problem)):
                by_gpu = lines[cell.destination]
                line = by_gpu.get(cell.gpu) or next(iter(by_gpu.values()))
                # A kernel that is not among the ranked was too slow to be timed.
                losses[cell.problem][name] += log(
                    scores.get(line[nearest(sorted(line), cell.elements)], ranked[-1].score) / ranked[0].score
                )
    return {problem: min(sorted(of), key=of.__getitem__) for problem, of in losses.items()}


def _few_kernels(rankings: Mapping[WinnerCell, Sequence[RankedTrial]], loss: float) -> dict[WinnerCell, Trial]:
    """A trial for each cell, from the kernels that `_cover` chooses for each problem."""
    problems: dict[tuple[Problem, str], list[Sequence[RankedTrial]]] = defaultdict(list)
    for cell, ranked in rankings.items():
        problems[cell.problem, cell.arch].append(ranked)
    chosen = {problem: _cover(cells, loss) for problem, cells in problems.items()}
    return {
        cell: next(each.trial for each in ranked if digest_of(each.trial) in chosen[cell.problem, cell.arch])
        for cell, ranked in rankings.items()
    }


def lacking_between(
    winners: Mapping[WinnerCell, Trial], rankings: Mapping[WinnerCell, Sequence[RankedTrial]], loss: float = LOSS
) -> dict[WinnerCell, Trial]:
    """The winners that calls lack between the buckets, by cell.

    winners: the winners of the buckets.
    rankings: ranked trials by cell, best first.

    Consider the calls that are nearest to a cell between buckets. If a kernel that they run was timed in the cell, and
    scores worse than the best there by more than `loss`, the cell gets a winner: of the kernels within `loss` of the
    best, one that wins at a bucket, or else the best.
    """
    lines: dict[WinnerCell, dict[int, Trial]] = defaultdict(dict)
    digests: dict[tuple[Problem, str], set[str]] = defaultdict(set)
    for cell, trial in winners.items():
        lines[cell.line][cell.elements] = trial
        digests[cell.problem, cell.arch].add(digest_of(trial))
    between: dict[WinnerCell, dict[int, Sequence[RankedTrial]]] = defaultdict(dict)
    for cell, ranked in rankings.items():
        if not cell.is_bucket:
            between[cell.line][cell.elements] = ranked
    return {
        replace(line, elements=count): trial
        for line, tuned in lines.items()
        for count, trial in _lacking(line.problem, tuned, between[line], digests[line.problem, line.arch], loss).items()
    }


def _lacking(
    problem: Problem,
    tuned: Mapping[int, Trial],
    between: Mapping[int, Sequence[RankedTrial]],
    preferred: set[str],
    loss: float,
) -> dict[int, Trial]:
    """The same for one line of cells, by element count, as few as needed."""
    near = {count: [each.trial for each in near_best(ranked, loss)] for count, ranked in between.items()}
    timed = {count: {digest_of(each.trial) for each in ranked} for count, ranked in between.items()}
    slow = {count: digests - set(map(digest_of, near[count])) for count, digests in timed.items()}
    calls = _calls_about(sorted({*tuned, *between}), problem.n)

    def losing(found: Mapping[int, Trial]) -> list[int]:
        named = sorted(found)
        called = {count: {digest_of(found[nearest(named, call)]) for call in calls[count]} for count in slow}
        return [count for count, digests in slow.items() if digests & called[count]]

    found = dict(tuned)
    while lost := losing(found):
        count = min(lost)  # its winner may help at the next count
        found[count] = next((trial for trial in near[count] if digest_of(trial) in preferred), near[count][0])
    for count in sorted(found.keys() - tuned.keys()):
        fewer = {other: trial for other, trial in found.items() if other != count}
        if not losing(fewer):
            found = fewer
    return {count: trial for count, trial in found.items() if count not in tuned}


def _calls_about(counts: Sequence[int], n: int) -> dict[int, tuple[int, int]]:
    """For each of ascending element counts, the smallest and the largest call to which it is the nearest."""
    ends = [isqrt(low * high - 1) // n * n for low, high in pairwise(counts)]  # the last calls nearer to `low`
    return dict(
        zip(counts, zip([counts[0], *(end + n for end in ends)], [*ends, counts[-1]], strict=True), strict=True)
    )


def near_best(ranked: Sequence[RankedTrial], loss: float = LOSS) -> list[RankedTrial]:
    """The trials of a cell that score worse than the best by no more than `loss`, the best first."""
    return [each for each in ranked if each.score <= ranked[0].score * (1 + loss)]


def _cover(cells: Sequence[Sequence[RankedTrial]], loss: float) -> set[str]:
    """Digests of kernels, so that each cell has one within `loss` of its best; greedy, ties by least slowdown."""
    # Kernel -> the cells it serves, with its score there as a multiple of the best.
    serves: dict[str, dict[int, float]] = defaultdict(dict)
    for index, ranked in enumerate(cells):
        for each in near_best(ranked, loss):
            serves[digest_of(each.trial)].setdefault(index, each.score / ranked[0].score)

    def rank(digest: str) -> tuple[int, float, str]:
        return -len(serves[digest]), fsum(serves[digest].values()), digest

    chosen = set()
    while any(serves.values()):
        digest = min(serves, key=rank)
        chosen.add(digest)
        served = serves.pop(digest)
        for slowdowns in serves.values():
            for index in served:
                slowdowns.pop(index, None)
    return chosen


def ranked_by_cell(trials: Iterable[Trial]) -> dict[WinnerCell, list[RankedTrial]]:
    """The trials that may win each cell, best first. The order of the trials does not matter.

    Between buckets a kernel is timed again to make sure, so only its newest trial counts there.
    """
    # Cell → for each trial: is it an estimate, does it lack the deciding time, the trial, its two timings.
    found: dict[WinnerCell, list[tuple[bool, bool, Trial, Timing, Timing | None]]] = defaultdict(list)
    for trial in filter(may_win, trials):
        estimated = trial.provenance is Provenance.ESTIMATED
        for destination, elements in {(timing.destination, timing.elements) for timing in trial.timings}:
            timing = cell_value(trial, destination, elements, trial.environment.l2_bytes)
            assert timing is not None
            there = (t for t in trial.timings if (t.destination, t.elements) == (destination, elements))
            other = next((t for t in there if t.cache is not timing.cache), None)
            decides = deciding_cache(trial.problem, elements, destination, trial.environment.l2_bytes)
            cell = WinnerCell(trial.problem, trial.arch, trial.environment.gpu, destination, elements)
            found[cell].append((estimated, timing.cache is not decides, trial, timing, other))

    rankings = {}
    measured = {_on_any_gpu(cell) for cell, entries in found.items() if not all(entry[0] for entry in entries)}
    for cell, entries in sorted(found.items()):
        estimated, lacking = min(entry[:2] for entry in entries)
        if estimated and _on_any_gpu(cell) in measured:
            continue
        candidates = [entry[2:] for entry in entries if entry[:2] == (estimated, lacking)]
        if not cell.is_bucket:
            candidates = list({digest_of(each[0]): each for each in sorted(candidates, key=_age)}.values())
        rankings[cell] = sorted(_scored(candidates), key=_rank)
    return rankings


# A trial in a cell, its timing that decides there, and its timing in the other regime.
_Candidate = tuple[Trial, Timing, Timing | None]


def _scored(candidates: Sequence[_Candidate]) -> Iterator[RankedTrial]:
    """Each candidate with its score.

    A candidate without a time in the other regime gets the slowest time of the others there. If all lack it, the
    deciding time is the score, so that a loss of score is a loss of time.
    """
    slowest = max((other.us for _, _, other in candidates if other), default=None)
    for trial, timing, other in candidates:
        if slowest is None:
            yield RankedTrial(trial, timing, timing.us)
            continue
        share = other_share(trial.problem, timing.elements, timing.destination, trial.environment.l2_bytes)
        yield RankedTrial(trial, timing, timing.us ** (1 - share) * (other.us if other else slowest) ** share)


def _age(candidate: _Candidate) -> tuple[str, str]:
    """Ascending from the oldest; a complete order of the trials of a kernel."""
    trial = candidate[0]
    return trial.date, repr((trial.environment, knobs_key(trial.knobs)))


def closest_trials(trials: Iterable[Trial], most: int) -> list[Trial]:
    """The trials of one problem that come nearest to the best of some bucket, at most `most`, each of another kernel.

    The order of the trials does not matter.
    """
    slowdowns = [
        (each.score / ranked[0].score, digest_of(each.trial), each.trial)
        for cell, ranked in ranked_by_cell(trials).items()
        if cell.is_bucket
        for each in ranked
    ]
    closest: dict[str, Trial] = {}
    for _, digest, trial in sorted(slowdowns, key=lambda each: each[:2]):
        closest.setdefault(digest, trial)
    return list(closest.values())[:most]


def arithmetic_in(trial: Trial) -> str:
    """The arithmetic that batch-invariant calls may have from a winner; "" if none, because it is not known, or not
    every GPU holds the kernel."""
    assert trial.kernel is not None  # no kernel, no winner
    return trial.kernel.launch.arithmetic if _is_portable(trial) else ""


def _is_portable(trial: Trial) -> bool:
    assert trial.kernel is not None  # no kernel, no winner
    return trial.kernel.launch.cluster <= PORTABLE_CLUSTER


def digest_of(trial: Trial) -> str:
    """The digest of the kernel of a trial that may win."""
    assert trial.kernel is not None  # no kernel, no winner
    return trial.kernel.digest


def _rank(ranked: RankedTrial) -> tuple[Any, ...]:
    """A key that orders trials completely, so that winners do not depend on the order of the trials."""
    trial = ranked.trial
    return ranked.score, ranked.timing.us, knobs_key(trial.knobs), trial.date, repr(trial.environment)


def _on_any_gpu(cell: WinnerCell) -> WinnerCell:
    return replace(cell, gpu="")
