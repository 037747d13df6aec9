"""`Study`: what to try next for one problem on one device.

Two sources take turns: Optuna's TPE names a point, or the best trial so far of a random cell is changed by a step. The
nearest legal knobs are tried. If they were tried before, a few random steps lead to others. So a study returns only
legal knobs, and none twice, until none are left.

The sampler works in memory, and finished trials are added to Optuna's tables in the database (`mirror`). If the sampler
worked in the database, each knob would take a transaction, and asking would take 18 ms instead of 2. So a killed run
leaves no half-open trial behind. The trials in our own tables are the truth. Those that Optuna's tables lack are added
at the start.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from statistics import geometric_mean
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from hadagen.errors import UsageError
from hadagen.measure import Cell
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import KNOB_NAMES, Knobs
from hadagen.plan.space import Space, check_legal
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import REGIMES, element_buckets, regime
from hadagen.problem.trial import Outcome, Trial
from hadagen.tuner.mirror import Mirror

RANDOM_STEPS = 20
STARTUP_TRIALS = 10  # before TPE names points; suggested trials count
_RACED = "raced"  # attribute of a study in Optuna: its number of trials when its near-ties were raced

Scores = tuple[float, float, float]


def scores(trial: Trial) -> Scores:
    """The score in each of `REGIMES`: the geometric mean of fractions of copy; 0 in a regime that was not timed."""
    l2_bytes = trial.environment.l2_bytes
    return _means(
        (regime(trial.problem, timing.elements, timing.destination, timing.cache, l2_bytes), timing.fraction_of_copy)
        for timing in trial.timings
    )


def _means(fractions: Iterable[tuple[str | None, float]]) -> Scores:
    found: dict[str | None, list[float]] = {}
    for where, fraction in fractions:
        found.setdefault(where, []).append(fraction)
    latency, l2, memory = (geometric_mean(found[name]) if name in found else 0.0 for name in REGIMES)
    return latency, l2, memory


def known_trials(trials: Iterable[Trial], arch: Arch) -> defaultdict[Problem, dict[Knobs, Trial]]:
    """Problem → knobs → trial, for trials whose knobs are legal by today's rules and ranges.

    Of several trials of the same knobs, such as on another driver, the one with most timings at buckets.
    """
    found = defaultdict[Problem, dict[Knobs, Trial]](dict)
    for trial in sorted(trials, key=_counting):
        if knobs := _legal_knobs(trial, arch):
            found[trial.problem][knobs] = trial
    return found


def _counting(trial: Trial) -> int:
    buckets = element_buckets(trial.problem)
    return sum(timing.elements in buckets for timing in trial.timings)


def _legal_knobs(trial: Trial, arch: Arch) -> Knobs | None:
    try:
        known = Knobs.from_dict(trial.knobs)
        check_legal(trial.problem, known, arch)
    except UsageError:
        return None
    return known


def _knobs_of_key(key: str) -> Knobs | None:
    try:
        return Knobs.from_dict(json.loads(key))
    except (UsageError, TypeError, ValueError):  # other work, or knobs of another version
        return None


class Best(NamedTuple):
    """The best trial of a cell so far: its fraction of copy there, its knobs, and the regime of the cell."""

    fraction: float
    knobs: Knobs
    regime: str


BestByCell = dict[Cell, Best]


def note_best(best: BestByCell, trial: Trial) -> None:
    """Enter the trial in `best` for each cell of `REGIMES` where it is the fastest so far."""
    if trial.outcome is not Outcome.OK:
        return
    knobs = Knobs.from_dict(trial.knobs)
    for timing in trial.timings:
        cell = Cell.of(timing)
        where = regime(trial.problem, *cell, trial.environment.l2_bytes)
        if where and (cell not in best or timing.fraction_of_copy > best[cell].fraction):
            best[cell] = Best(timing.fraction_of_copy, knobs, where)


def best_of_trials(trials: Iterable[Trial]) -> BestByCell:
    best: BestByCell = {}
    for trial in trials:
        note_best(best, trial)
    return best


def best_scores(best: BestByCell) -> Scores:
    """The scores of a kernel that is as fast as the best trial in every cell."""
    return _means((each.regime, each.fraction) for each in best.values())


def most_often_best(best: BestByCell) -> list[Knobs]:
    """The knobs of the best trials, those of most cells first."""
    return [knobs for knobs, _ in Counter(each.knobs for each in best.values()).most_common()]


def step_from(knobs: Knobs, arch: Arch, choose: random.Random) -> dict[str, Any]:
    """The knobs with one or two changed at random, legal or not; unchanged if no knob has another value on the arch."""
    values = {name: [value for value in arch.search[name] if value != getattr(knobs, name)] for name in KNOB_NAMES}
    others = {name: some for name, some in values.items() if some}
    names = choose.sample(list(others), min(len(others), choose.randint(1, 2)))
    return knobs.to_dict() | {name: choose.choice(others[name]) for name in names}


class Study:
    """The search of one problem on `device` (a GPU's name, or "estimated").

    `known`: the trials of all runs so far. The study learns from them, and does not repeat them. `mirror`: Optuna's
    tables; None for a search that keeps nothing. The same `seed` and the same answers give the same questions.
    `elsewhere`: the knobs, as `knobs_key`, that other runs had claimed after `known` was read.
    """

    def __init__(
        self,
        space: Space,
        device: str,
        known: Mapping[Knobs, Trial],
        mirror: Mirror | None,
        seed: int,
        elsewhere: Collection[str] = (),
    ) -> None:
        self.problem = space.problem
        self._space = space
        ranges = {name: space.arch.search[name] for name in KNOB_NAMES}
        self._ranges: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values) for name, values in ranges.items()
        }
        self._first: deque[Knobs] = deque()
        self._suggested: deque[Knobs] = deque()
        self._asked: dict[Knobs, optuna.Trial | None] = {}  # with the trial of Optuna, if TPE named the knobs
        self._elsewhere: set[Knobs] = set()
        self._told = set(known)
        self.best_by_cell = best_of_trials(known.values())

        self._random = random.Random(f"{seed} {self.problem.key} {len(known)}")
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=STARTUP_TRIALS, multivariate=True, seed=self._random.getrandbits(32)
        )
        self._study = optuna.create_study(directions=[StudyDirection.MAXIMIZE] * len(REGIMES), sampler=sampler)
        # Optuna cannot change the range of a parameter, so other ranges need another study.
        name = f"{self.problem.key} on {space.arch.name}, {device}, ranges {zlib.crc32(repr(ranges).encode()):08x}"
        self._mirror = mirror
        self.mirrored = mirror.study(name) if mirror else None
        results = {knobs: self._frozen_trial(knobs, trial) for knobs, trial in known.items()}
        for result in results.values():
            self._study.add_trial(result)
        if mirror and self.mirrored:
            # Runs that are not dead add their trials to Optuna's tables before they give up the claims of them.
            theirs = {knobs for key in elsewhere if (knobs := _knobs_of_key(key))}
            new = ((self.mirrored, result) for knobs, result in results.items() if knobs not in theirs)
            mirror.add(new, missing=True)

    @property
    def best(self) -> Scores:
        return best_scores(self.best_by_cell)

    @property
    def asked(self) -> int:
        """Number of knobs that were asked for, are in progress in other runs, or are known."""
        return len(self._asked) + len(self._elsewhere) + len(self._told)

    @property
    def finished(self) -> int:
        """Number of trials told or known."""
        return len(self._told)

    @property
    def elsewhere(self) -> int:
        """Number of knobs that other runs have in progress."""
        return len(self._elsewhere)

    @property
    def is_raced(self) -> bool:
        """Whether any run has raced the near-ties of this study since its last trial."""
        noted = self._mirror.noted(self.mirrored) if self._mirror and self.mirrored else {}
        return bool(self.mirrored) and noted.get(_RACED) == self.kept

    @property
    def kept(self) -> int:
        """Number of trials in Optuna's tables, over all runs. It never decreases."""
        return self._mirror.count(self.mirrored) if self._mirror and self.mirrored else 0

    def mark_raced(self, kept: int) -> None:
        """Record that the near-ties of the first `kept` trials were raced."""
        if self._mirror and self.mirrored:
            self._mirror.note(self.mirrored, _RACED, kept)

    def suggest(self, knobs: Knobs, *, first: bool = False) -> None:
        """Ask for these knobs, or the nearest legal ones, before those of Optuna; if `first`, before all others."""
        (self._first if first else self._suggested).append(knobs)

    @property
    def has_first(self) -> bool:
        """Whether suggested knobs are left that come before all others."""
        return bool(self._first)

    def ask(self, prefer: Iterable[Knobs] = ()) -> Knobs:
        """Legal knobs never asked for before. Sources, in this order: suggested first, `prefer`, suggested, search.

        Raises `LookupError` if no legal knobs are left.
        """
        for wanted in chain(_drain(self._first), prefer, _drain(self._suggested)):
            knobs = self._space.closest(wanted)
            if knobs and self._is_new(knobs):
                return self._start(knobs)
        if self.best_by_cell and self.asked % 2:
            each = self._random.choice(list(self.best_by_cell.values()))
            return self._start(self._new_near(step_from(each.knobs, self._space.arch, self._random)))
        trial = self._study.ask(self._ranges)
        knobs = self._new_near(trial.params)
        if knobs.to_dict() == trial.params:
            return self._start(knobs, trial)
        self._study.tell(trial, state=TrialState.FAIL)  # TPE ignores it
        return self._start(knobs)

    def tell(self, trial: Trial) -> FrozenTrial:
        """Learn from the trial of knobs that were asked for. Returns what Optuna's tables hold of it."""
        knobs = Knobs.from_dict(trial.knobs)
        asked, result = self._asked.pop(knobs), self._frozen_trial(knobs, trial)
        if asked:
            for name, value in result.constraints.items():
                asked.set_constraint(name, value)
            self._study.tell(asked, result.values, result.state)
        else:
            self._study.add_trial(result)
        self._told.add(knobs)
        note_best(self.best_by_cell, trial)
        return result

    def forget(self, knobs: Knobs) -> None:
        """Drop knobs that were asked for and will not be tried."""
        if asked := self._asked.pop(knobs):
            self._study.tell(asked, state=TrialState.FAIL)  # TPE ignores it

    def learn(self, trial: Trial) -> bool:
        """Learn from a trial of another run. Returns whether this search could have asked for it."""
        knobs = _legal_knobs(trial, self._space.arch)
        if knobs is None or knobs in self._asked or knobs in self._told:
            return False
        self._elsewhere.discard(knobs)
        self._study.add_trial(self._frozen_trial(knobs, trial))
        self._told.add(knobs)
        note_best(self.best_by_cell, trial)
        return True

    def leave_to_others(self, keys: Collection[str]) -> None:
        """Avoid the knobs that other runs have in progress now, given by `knobs_key`. Earlier ones are free again."""
        self._elsewhere = {knobs for key in keys if (knobs := _knobs_of_key(key))} - self._asked.keys() - self._told

    def _start(self, knobs: Knobs, trial: optuna.Trial | None = None) -> Knobs:
        self._asked[knobs] = trial
        return knobs

    def _is_new(self, knobs: Knobs) -> bool:
        return knobs not in self._asked and knobs not in self._told and knobs not in self._elsewhere

    def _new_near(self, wanted: Mapping[str, Any]) -> Knobs:
        """The nearest legal knobs that are new. If the nearest were tried, the search goes a few random steps on."""
        for _ in range(RANDOM_STEPS):
            knobs = next(self._space.nearest(wanted), None)
            if knobs is None:
                raise LookupError(f"no knobs of the ranges searched are legal for {self.problem.key}")
            if self._is_new(knobs):
                return knobs
            wanted = step_from(knobs, self._space.arch, self._random)
        for knobs in self._space.nearest(wanted):
            if self._is_new(knobs):
                return knobs
        raise LookupError(f"all legal knobs of {self.problem.key} were tried")

    def _frozen_trial(self, knobs: Knobs, trial: Trial) -> FrozenTrial:
        """The trial as Optuna takes it. A failed trial is pruned and breaks a constraint, from which TPE learns."""
        params: dict[str, Any] = {"params": knobs.to_dict(), "distributions": self._ranges}
        if trial.outcome is Outcome.OK:
            return create_trial(values=scores(trial), **params)
        return create_trial(state=TrialState.PRUNED, constraints={"failed": 1.0}, **params)


def _drain(queue: deque[Knobs]) -> Iterator[Knobs]:
    while queue:
        yield queue.popleft()
