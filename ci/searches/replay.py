"""Searches on recordings: what they try, and how near they come to the best variant after each evaluation.

The *curve* of a search has, for each count of evaluations, best possible time / best time found so far, as a geometric
mean over problems, cells and seeds. A variant that failed counts as an evaluation. Until a search has found a right
variant in a cell, the slowest time of the recording counts as its best time there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, fsum, log

from hadagen.errors import UsageError
from hadagen.measure import Cell, Variant
from hadagen.plan.space import Space
from hadagen.problem.trial import Outcome, Provenance, Trial, knobs_key
from hadagen.tuner.events import Event, TrialFinished
from hadagen.tuner.pipeline import Pipeline, Work
from hadagen.tuner.search import TuneOptions, tune
from searches.recording import Recording

LEAST_BUDGET = 60
BUDGET_SHARE = 10  # one variant in ten is evaluated

Order = Sequence[Trial]  # in the order in which a search evaluated them


class ReplayRunner:
    """Gives back the trial recorded for a problem and its knobs, as it is; the last one if there are several.

    trials: one or more, all of one device and arch. Knobs that were never tried come back `illegal`, so that a search
    keeps to what was recorded.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = {(trial.problem, knobs_key(trial.knobs)): trial for trial in trials}
        self.environment, self._arch = trials[0].environment, trials[0].arch

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial]]:
        for variant in variants:
            recorded = self._trials.get((variant.problem, knobs_key(variant.knobs)))
            yield variant, recorded or self._unknown(variant)

    def _unknown(self, variant: Variant) -> Trial:
        return Trial(
            problem=variant.problem,
            arch=self._arch,
            knobs=variant.knobs,
            outcome=Outcome.ILLEGAL,
            provenance=Provenance.MEASURED,
            detail=f"not among the {len(self._trials)} recorded trials",
            environment=self.environment,
        )


@dataclass(frozen=True)
class Field:
    """A recording to search: the trials whose knobs are legal by today's rules.

    `best` and `worst`: cell → microseconds; the best may be a trial whose knobs the search no longer has.
    `evaluations`: those of a search; 0 for the default. `of` raises `UsageError` if no trial is legal and right.
    """

    recording: Recording
    trials: tuple[Trial, ...]
    best: Mapping[Cell, float]
    worst: Mapping[Cell, float]
    evaluations: int = 0

    @classmethod
    def of(cls, recording: Recording) -> Field:
        recorded = {knobs_key(trial.knobs): trial for trial in recording.trials}
        legal = (knobs_key(knobs.to_dict()) for knobs in Space(recording.problem, recording.target).legal)
        trials = tuple(recorded[knobs] for knobs in legal if knobs in recorded)
        times: dict[Cell, list[float]] = {}
        for trial in trials:
            for cell, us in times_of(trial).items():
                times.setdefault(cell, []).append(us)
        if not times:
            raise UsageError(
                f"no kernel that the recording of {recording.problem.key} has is legal and right; record it anew"
            )
        worst = {cell: max(all_us) for cell, all_us in times.items()}
        for trial in recording.former:
            for cell, us in times_of(trial).items():
                times[cell].append(us)
        return cls(recording, trials, {cell: min(all_us) for cell, all_us in times.items()}, worst)

    @property
    def budget(self) -> int:
        """The evaluations of a search: by default a tenth of the variants, but at least 60; never more than all."""
        return min(len(self.trials), self.evaluations or max(LEAST_BUDGET, ceil(len(self.trials) / BUDGET_SHARE)))


def times_of(trial: Trial) -> dict[Cell, float]:
    """Cell → microseconds; {} for a trial that failed."""
    if trial.outcome is not Outcome.OK:
        return {}
    return {Cell.of(timing): timing.us for timing in trial.timings}


def default_search(field: Field, seed: int, work: Callable[..., Work] = Pipeline) -> Order:
    """The trials of `tune` for one problem, without known winners and without a store. `work` as in `TuneOptions`."""
    order: list[Trial] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            order.append(event.trial)

    report = tune(
        TuneOptions(
            arch=field.recording.target,
            problems=[field.recording.problem],
            store=None,
            runner=ReplayRunner(field.trials),
            build=None,
            trials=field.budget,
            seed=seed,
            work=work,
        ),
        listen,
    )
    if report.stopped == "interrupted":  # an incomplete search must not count as a whole one
        raise KeyboardInterrupt
    return order


def random_search(field: Field, seed: int) -> Order:
    """Variants drawn with equal probability, none twice."""
    return random.Random(seed).sample(field.trials, field.budget)


SEARCHES = {"hadagen": default_search, "random": random_search}


@dataclass(frozen=True)
class Curve:
    """`values`: the fraction after 1, 2, … evaluations. `at_budget`: the fraction of each field after its budget.

    Beyond the budget of a field, its last value counts.
    """

    values: tuple[float, ...]
    at_budget: tuple[float, ...]

    @property
    def final(self) -> float:
        """The geometric mean of `at_budget`, which is the last value of the curve."""
        return self.values[-1]


def curve(fields: Sequence[Field], orders: Sequence[Sequence[Order]]) -> Curve:
    """The curve of a search. `orders`: for each field, an order for each seed; each field has as many seeds."""
    longest = max(field.budget for field in fields)
    by_field = []
    for field, of_seeds in zip(fields, orders, strict=True):
        courses = (_course(field, order) for order in of_seeds)
        means = [fsum(values) / len(values) for values in zip(*courses, strict=True)]
        by_field.append(means + means[-1:] * (longest - len(means)))
    return Curve(
        values=tuple(exp(fsum(values) / len(values)) for values in zip(*by_field, strict=True)),
        at_budget=tuple(exp(means[-1]) for means in by_field),
    )


def _course(field: Field, order: Order) -> list[float]:
    """log(best possible / best so far), as a mean over all cells, after each evaluation up to the budget."""
    so_far, course = dict(field.worst), []
    for trial in order[: field.budget]:
        for cell, us in times_of(trial).items():
            so_far[cell] = min(us, so_far[cell])
        course.append(_log_fraction(field, so_far))
    return course + [_log_fraction(field, so_far)] * (field.budget - len(course))


def _log_fraction(field: Field, so_far: Mapping[Cell, float]) -> float:
    return fsum(log(field.best[cell] / us) for cell, us in so_far.items()) / len(so_far)


def run_searches(fields: Sequence[Field], seeds: Sequence[int]) -> dict[str, Curve]:
    """Name of each of `SEARCHES` → its curve."""
    return {
        name: curve(fields, [[search(field, seed) for seed in seeds] for field in fields])
        for name, search in SEARCHES.items()
    }
