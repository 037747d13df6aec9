"""Searches on recordings: what they try, and how near that comes to the best there is, evaluation by evaluation.

A search is compared by its *curve*: for each count of evaluations, best possible time / best time found so far, as a
geometric mean over problems, cells and seeds. A variant that failed counts as an evaluation. Until something right was
found in a cell, the slowest time of all stands for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, fsum, log

from hadagen.errors import UsageError
from hadagen.measure import Cell, ReplayRunner
from hadagen.space import Space
from hadagen.trial import Outcome, Trial, knobs_key
from hadagen.tuner.events import Event, TrialFinished
from hadagen.tuner.recording import Recording
from hadagen.tuner.search import TuneOptions, tune

LEAST_BUDGET = 60
BUDGET_SHARE = 10  # one of so many variants

Order = Sequence[Trial]  # in which a search had these


@dataclass(frozen=True)
class Field:
    """A recording to search: the trials whose knobs are legal by today's rules.

    `best` and `worst`: in microseconds, by cell. Raises `UsageError` where nothing is left, or nothing is right.
    """

    recording: Recording
    trials: tuple[Trial, ...]
    best: Mapping[Cell, float]
    worst: Mapping[Cell, float]

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
        best = {cell: min(all_us) for cell, all_us in times.items()}
        return cls(recording, trials, best, {cell: max(all_us) for cell, all_us in times.items()})

    @property
    def budget(self) -> int:
        """The evaluations after which a search is judged: a tenth of the variants, but 60 or all if they are fewer."""
        return min(len(self.trials), max(LEAST_BUDGET, ceil(len(self.trials) / BUDGET_SHARE)))


def times_of(trial: Trial) -> dict[Cell, float]:
    """Microseconds by cell; none of a trial that failed."""
    if trial.outcome is not Outcome.OK:
        return {}
    return {Cell.of(timing): timing.us for timing in trial.timings}


def default_search(field: Field, seed: int) -> Order:
    """What `tune` tries, of a problem alone, with no known winners and nothing kept."""
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
        ),
        listen,
    )
    if report.stopped == "interrupted":  # what it found until then would count as all that it finds
        raise KeyboardInterrupt
    return order


def random_search(field: Field, seed: int) -> Order:
    """Variants drawn evenly, none twice."""
    return random.Random(seed).sample(field.trials, field.budget)


SEARCHES = {"hadagen": default_search, "random": random_search}


@dataclass(frozen=True)
class Curve:
    """`values`: after 1, 2, … evaluations. `at_budget`: of each field after its own budget, in their order.

    A field that was searched to its budget keeps its value from there on.
    """

    values: tuple[float, ...]
    at_budget: tuple[float, ...]

    @property
    def final(self) -> float:
        """The geometric mean of `at_budget`, which is where the curve ends."""
        return self.values[-1]


def curve(fields: Sequence[Field], orders: Sequence[Sequence[Order]]) -> Curve:
    """The curve of a search that had these orders: for each field, one for each seed, as many seeds for each."""
    longest = max(field.budget for field in fields)
    by_field = []
    for field, of_seeds in zip(fields, orders, strict=True):
        courses = [_course(field, order) for order in of_seeds]
        means = [fsum(values) / len(values) for values in zip(*courses, strict=True)]
        by_field.append(means + means[-1:] * (longest - len(means)))
    return Curve(
        values=tuple(exp(fsum(values) / len(values)) for values in zip(*by_field, strict=True)),
        at_budget=tuple(exp(means[-1]) for means in by_field),
    )


def _course(field: Field, order: Order) -> list[float]:
    """After each evaluation up to the budget: log(best possible / best so far), the mean over all cells."""
    so_far, course = dict(field.worst), []
    for trial in order[: field.budget]:
        for cell, us in times_of(trial).items():
            so_far[cell] = min(us, so_far[cell])
        course.append(_log_fraction(field, so_far))
    return course + [_log_fraction(field, so_far)] * (field.budget - len(course))


def _log_fraction(field: Field, so_far: Mapping[Cell, float]) -> float:
    return fsum(log(field.best[cell] / us) for cell, us in so_far.items()) / len(so_far)


def run_searches(fields: Sequence[Field], seeds: Iterable[int]) -> dict[str, Curve]:
    """The curves of `SEARCHES`, by name."""
    seeds = list(seeds)
    return {
        name: curve(fields, [[search(field, seed) for seed in seeds] for field in fields])
        for name, search in SEARCHES.items()
    }
