"""Finds the fastest kernels: `tune` searches, times and records. Its events and its report tell the progress."""

from hadagen.tuner.estimate import BUILT_AT_ONCE, EstimateRunner, shortlist
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
    VariantNotTried,
)
from hadagen.tuner.search import ESTIMATED_TRIALS, MEASURED_TRIALS, TuneOptions, check_effort, tune
from hadagen.tuner.study import LATENCY_ELEMENTS, REGIMES, Scores

__all__ = [
    "BUILT_AT_ONCE",
    "ESTIMATED_TRIALS",
    "LATENCY_ELEMENTS",
    "MEASURED_TRIALS",
    "REGIMES",
    "BatchBuilt",
    "EstimateRunner",
    "Event",
    "Listener",
    "PairRaced",
    "ProblemFinished",
    "ProblemStarted",
    "Scores",
    "SearchStarted",
    "TrialFinished",
    "TuneOptions",
    "TuneReport",
    "VariantNotTried",
    "check_effort",
    "shortlist",
    "tune",
]
