"""Speeds of trials as fractions of the best of their problem: the data of the curves and of the effects of knobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, fsum, log

from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache, Destination, regime
from hadagen.problem.trial import Outcome, Trial

ALL = "all regimes"
Cell = tuple[int, Destination, Cache]  # elements, where the result goes, where the input lies


@dataclass(frozen=True)
class ScoredTrial:
    """times: cell → microseconds, in the cells that belong to a regime; none unless the trial is ok.

    scores: `ALL` or regime → the speed as a fraction of the best of the problem: the geometric mean over the cells in
    which the trial was timed. A regime in which it was not timed is left out.
    """

    trial: Trial
    times: dict[Cell, float]
    scores: dict[str, float]


@dataclass(frozen=True)
class Search:
    """All trials of a problem on a GPU, or of estimates for an arch, in the order in which they were recorded.

    best: cell → the least microseconds that any trial takes there.
    """

    problem: Problem
    arch: str
    gpu: str
    trials: tuple[ScoredTrial, ...]
    best: dict[Cell, float]


def searches(trials: Iterable[Trial]) -> list[Search]:
    """The trials by problem, arch and GPU."""
    groups: dict[tuple[Problem, str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.problem, trial.arch, trial.environment.gpu].append(trial)
    return [_search(*key, group) for key, group in sorted(groups.items(), key=lambda item: item[0])]


def _search(problem: Problem, arch: str, gpu: str, trials: list[Trial]) -> Search:
    # Cell and bytes of L2 → regime; every trial asks about the same cells.
    known: dict[tuple[Cell, int], str | None] = {}
    regimes, best, all_times = dict[Cell, str](), dict[Cell, float](), []
    for trial in trials:
        l2_bytes = trial.environment.l2_bytes
        times: dict[Cell, float] = {}
        for timing in trial.timings if trial.outcome is Outcome.OK else ():
            cell = timing.elements, timing.destination, timing.cache
            if (cell, l2_bytes) not in known:
                known[cell, l2_bytes] = regime(problem, *cell, l2_bytes)
            if where := known[cell, l2_bytes]:
                regimes[cell] = where
                times[cell] = timing.us
                best[cell] = min(timing.us, best.get(cell, timing.us))
        all_times.append(times)
    scored = (
        ScoredTrial(trial, times, _scores(times, regimes, best)) for trial, times in zip(trials, all_times, strict=True)
    )
    return Search(problem, arch, gpu, tuple(scored), best)


def _scores(times: dict[Cell, float], regimes: dict[Cell, str], best: dict[Cell, float]) -> dict[str, float]:
    logs: dict[str, list[float]] = defaultdict(list)
    for cell, us in times.items():
        fraction = log(best[cell] / us)
        logs[ALL].append(fraction)
        logs[regimes[cell]].append(fraction)
    return {where: exp(fsum(each) / len(each)) for where, each in logs.items()}
