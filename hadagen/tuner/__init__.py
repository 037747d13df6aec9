"""Finding the fastest kernels: `tune` searches, times and records; its events and report say how it goes."""

from hadagen.tuner.estimate import EstimateRunner, shortlist
from hadagen.tuner.events import (
    BatchBuilt,
    Event,
    Listener,
    PairRaced,
    ProblemFinished,
    ProblemStarted,
    SearchStarted,
    TrialFinished,
    TuneReport,
)
from hadagen.tuner.search import ESTIMATED_TRIALS, MEASURED_TRIALS, TuneOptions, check_effort, tune
from hadagen.tuner.study import REGIMES

__all__ = [
    "ESTIMATED_TRIALS",
    "MEASURED_TRIALS",
    "REGIMES",
    "BatchBuilt",
    "EstimateRunner",
    "Event",
    "Listener",
    "PairRaced",
    "ProblemFinished",
    "ProblemStarted",
    "SearchStarted",
    "TrialFinished",
    "TuneOptions",
    "TuneReport",
    "check_effort",
    "shortlist",
    "tune",
]
