"""Which trial wins where: pure functions of the trials, so that nothing but trials need be stored.

A *cell* is a place where a kernel is wanted: a problem on a GPU, in place or out of place, at a number of elements.
Only a trial that is ok, has a kernel and keeps the problem's error bound for every class of input can win one. What
decides is the time with the data hot in L2 where it fits in half of it, and cold otherwise; the other time counts only
in a cell where no trial has the deciding one. Whatever their times, a measured trial outranks an estimated one, and
an estimate wins no cell that was measured on any GPU of the arch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum
from operator import itemgetter
from typing import Any

from hadagen.problem import Problem
from hadagen.trial import Destination, Outcome, Provenance, Timing, Trial, deciding_cache, knobs_key


@dataclass(frozen=True, order=True)
class Cell:
    """Where a winner is named. `gpu` is "" for what was estimated without a device; `elements` is rows · n."""

    problem: Problem
    arch: str
    gpu: str
    destination: Destination
    elements: int


Candidate = tuple[Trial, Timing]


def may_win(trial: Trial) -> bool:
    """Whether the trial is ok, compiled, and verified within its problem's error bound on every class of input."""
    return (
        trial.outcome is Outcome.OK
        and trial.kernel is not None
        and bool(trial.errors)
        and all(error <= trial.problem.error_bound for error in trial.errors.values())
    )


def cell_value(trial: Trial, destination: Destination, elements: int, l2_bytes: int) -> Timing | None:
    """The trial's timing that decides in this cell on a device with that much L2, or None where it has none."""
    decides = deciding_cache(trial.problem, elements, destination, l2_bytes)
    there = [t for t in trial.timings if t.destination is destination and t.elements == elements]
    return min(there, key=lambda timing: timing.cache is not decides, default=None)


def best_by_cell(trials: Iterable[Trial]) -> dict[Cell, Candidate]:
    """The fastest trial of every cell, with the timing that decided; the order of the trials does not matter."""
    return {cell: candidates[0] for cell, candidates in _candidates(trials).items()}


def portfolio(trials: Iterable[Trial], loss: float = 0.02) -> dict[Cell, Trial]:
    """A small set of kernels that is nowhere slower than the best by more than `loss` (0.02 is 2 %), by cell.

    The set of a problem is found greedily: next comes the kernel that serves most of the cells not served yet. Then
    every cell gets the fastest kernel of the set. The order of the trials does not matter.
    """
    candidates = _candidates(trials)
    problems: dict[tuple[Problem, str], list[list[Candidate]]] = defaultdict(list)
    for cell, ranked in candidates.items():
        problems[cell.problem, cell.arch].append(ranked)
    chosen = {problem: _cover(cells, loss) for problem, cells in problems.items()}
    return {
        cell: next(trial for trial, _ in ranked if _digest(trial) in chosen[cell.problem, cell.arch])
        for cell, ranked in candidates.items()
    }


def _cover(cells: Sequence[Sequence[Candidate]], loss: float) -> set[str]:
    """Digests of kernels of which every cell has one within `loss` of its fastest; greedy, ties by least slowdown."""
    # Kernel -> the cells it serves, with its time there as a multiple of the best.
    serves: dict[str, dict[int, float]] = defaultdict(dict)
    for index, ranked in enumerate(cells):
        best_us = ranked[0][1].us
        for trial, timing in ranked:
            if timing.us <= best_us * (1 + loss):
                serves[_digest(trial)].setdefault(index, timing.us / best_us)

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


def _candidates(trials: Iterable[Trial]) -> dict[Cell, list[Candidate]]:
    """The trials that compete in each cell, fastest first."""
    # A sort key beside each: estimated?, timed in the other regime only?, time, and what makes the order complete.
    found: dict[Cell, list[tuple[tuple[Any, ...], Candidate]]] = defaultdict(list)
    for trial in filter(may_win, trials):
        estimated = trial.provenance is Provenance.ESTIMATED
        complete = (knobs_key(trial.knobs), trial.date, repr(trial.environment))
        l2_bytes = trial.environment.l2_bytes
        for destination, elements in {(timing.destination, timing.elements) for timing in trial.timings}:
            timing = cell_value(trial, destination, elements, l2_bytes)
            assert timing is not None
            other = timing.cache is not deciding_cache(trial.problem, elements, destination, l2_bytes)
            cell = Cell(trial.problem, trial.arch, trial.environment.gpu, destination, elements)
            found[cell].append(((estimated, other, timing.us, *complete), (trial, timing)))

    candidates = {}
    measured = {_on_any_gpu(cell) for cell, ranked in found.items() if not all(key[0] for key, _ in ranked)}
    for cell, ranked in sorted(found.items()):
        ranked.sort(key=itemgetter(0))
        estimated, other = ranked[0][0][:2]
        if not (estimated and _on_any_gpu(cell) in measured):
            candidates[cell] = [candidate for key, candidate in ranked if key[:2] == (estimated, other)]
    return candidates


def _on_any_gpu(cell: Cell) -> Cell:
    return replace(cell, gpu="")


def _digest(trial: Trial) -> str:
    assert trial.kernel is not None
    return trial.kernel.digest
