"""The events of a search, and its report at the end. The command line prints them; a search prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hadagen.plan.knobs import Knobs
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Environment, Outcome, Trial
from hadagen.tuner.study import Scores

if TYPE_CHECKING:
    from hadagen.fleet.client import FleetState


@dataclass(frozen=True, kw_only=True)
class OfClass:
    """An event of the search for one class of GPUs. `gpu`: that class, if a fleet has several; else ""."""

    gpu: str = ""


@dataclass(frozen=True)
class SearchStarted:
    """`trials`: number at the end of the search. `finished`: how many of these earlier runs have finished.

    `estimated`: there is no device, so the emulator verifies kernels and the cost model estimates times.
    """

    problems: int
    trials: int
    finished: int
    environment: Environment
    estimated: bool


@dataclass(frozen=True)
class ProblemStarted:
    """`finished`: number of trials of earlier runs."""

    problem: Problem
    finished: int


@dataclass(frozen=True)
class BatchBuilt:
    """Variants were compiled: `fresh` will be measured, `known` have the kernel of earlier ones, `failed` have none."""

    fresh: int
    known: int
    failed: int


@dataclass(frozen=True)
class VariantNotTried(OfClass):
    """A compiler died, or the device was busy or throttled, for a `reason` that says nothing about the knobs. The
    knobs are tried again later. `advice`: what to do about the device; "" if it was a compiler."""

    problem: Problem
    knobs: Knobs
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class TrialFinished(OfClass):
    """A trial was recorded. `best`: the best fractions of copy of its problem so far, one for each of `REGIMES`.

    `finished` and `trials` as in `SearchStarted`.
    """

    trial: Trial
    best: Scores
    finished: int
    trials: int


@dataclass(frozen=True)
class ProblemFinished(OfClass):
    """All trials of a problem are finished. `best` as in `TrialFinished`."""

    problem: Problem
    finished: int
    best: Scores


@dataclass(frozen=True)
class PairRaced(OfClass):
    """Two kernels that nearly tie were timed again in turns. `margins`: slower / faster time - 1, one for each cell."""

    problem: Problem
    margins: tuple[float, ...]


@dataclass(frozen=True)
class FleetChanged:
    """The state of a fleet, about once a second."""

    state: FleetState


@dataclass(frozen=True)
class RaceDisturbed(OfClass):
    """Some near-ties of a problem were not raced, because the device was busy or throttled; the next run does it."""

    problem: Problem
    reason: str


Event = (
    SearchStarted
    | ProblemStarted
    | BatchBuilt
    | VariantNotTried
    | TrialFinished
    | ProblemFinished
    | PairRaced
    | FleetChanged
    | RaceDisturbed
)
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class TuneReport:
    """How a search ended. `stopped`: what ended it early ("interrupted", "out of time"), or "".

    `finished`: number of all trials. `finished_before`: those of earlier runs. `outcomes`: outcome → number of trials
    of this run. `elsewhere`: number of trials that other runs finished meanwhile. `under_way`: number of trials that
    other runs have in progress. `best`: problem → scores as in `TrialFinished`. `raced`: number of cells in which
    near-ties were raced.
    """

    environment: Environment
    estimated: bool
    finished: int
    finished_before: int
    elsewhere: int
    under_way: int
    outcomes: Mapping[Outcome, int]
    best: Mapping[Problem, Scores]
    raced: int
    stopped: str
    seconds: float


def summed(reports: Sequence[TuneReport]) -> TuneReport:
    """The report of several searches in the same environment, of different problems, one after another."""
    outcomes = sum((Counter(report.outcomes) for report in reports), Counter[Outcome]())
    return replace(
        reports[0],
        finished=sum(report.finished for report in reports),
        finished_before=sum(report.finished_before for report in reports),
        elsewhere=sum(report.elsewhere for report in reports),
        under_way=sum(report.under_way for report in reports),
        outcomes=dict(outcomes.most_common()),
        best={problem: scores for report in reports for problem, scores in report.best.items()},
        raced=sum(report.raced for report in reports),
        stopped=next((report.stopped for report in reports if report.stopped), ""),
        seconds=sum(report.seconds for report in reports),
    )
