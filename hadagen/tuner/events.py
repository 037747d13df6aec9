"""What a search reports while it runs and at its end. It prints nothing: the command line does, from these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hadagen.knobs import Knobs
from hadagen.problem import Problem
from hadagen.trial import Environment, Outcome, Trial
from hadagen.tuner.study import Scores


@dataclass(frozen=True)
class SearchStarted:
    """`trials`: that will be finished at the end, of which `finished` already are, from earlier runs.

    `estimated`: there is no device, so kernels are verified on the emulator and timed by the cost model.
    """

    problems: int
    trials: int
    finished: int
    environment: Environment
    estimated: bool


@dataclass(frozen=True)
class ProblemStarted:
    """`finished`: trials of earlier runs."""

    problem: Problem
    finished: int


@dataclass(frozen=True)
class BatchBuilt:
    """Variants were compiled: `fresh` will be measured, `known` have a kernel that others had before, `failed` none."""

    fresh: int
    known: int
    failed: int
    seconds: float


@dataclass(frozen=True)
class VariantNotTried:
    """A compiler died for a `reason` that says nothing of the knobs. They are tried again later."""

    problem: Problem
    knobs: Knobs
    reason: str


@dataclass(frozen=True)
class TrialFinished:
    """A trial was recorded. `best`: of its problem so far, as fraction of copy in each of `REGIMES`.

    `finished` and `trials` as in `SearchStarted`.
    """

    trial: Trial
    best: Scores
    finished: int
    trials: int


@dataclass(frozen=True)
class ProblemFinished:
    """All trials of a problem are in. `best` as in `TrialFinished`."""

    problem: Problem
    finished: int
    best: Scores


@dataclass(frozen=True)
class PairRaced:
    """Two near-ties were timed again by turns. `margins`: by how much of the winner's time the loser was slower."""

    problem: Problem
    margins: tuple[float, ...]


Event = SearchStarted | ProblemStarted | BatchBuilt | VariantNotTried | TrialFinished | ProblemFinished | PairRaced
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class TuneReport:
    """How a search ended. `stopped`: what ended it early ("interrupted", "out of time"), or "".

    `finished`: trials in all, of which `finished_before` from earlier runs; `outcomes` those of this run; `elsewhere`
    those that came from other runs meanwhile, which have `under_way` more. `best`: by problem, as in `TrialFinished`.
    `raced`: cells in which near-ties were raced.
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
