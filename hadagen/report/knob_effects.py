"""The effect of each knob: for each of its values, how near to the best the trials with that value come."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, log
from statistics import quantiles

from hadagen.problem.regimes import REGIMES
from hadagen.problem.trial import Outcome
from hadagen.report.names import series_name, short_text
from hadagen.report.scores import ALL, Search

ALL_PROBLEMS = "all problems"
SCOPES = (ALL, *REGIMES)
# Below this many scored trials, quartiles and a share of the variance say nothing.
LEAST_TRIALS = 8


@dataclass(frozen=True)
class ValueEffect:
    """The scores of the trials with one value of a knob: how many, the quartiles, the 5th and 95th percentile, and the
    best. A score is a fraction of the best of the problem (`ScoredTrial.scores`). failed: trials that have none."""

    value: str
    trials: int
    low: float
    first: float
    median: float
    third: float
    high: float
    best: float
    failed: int = 0


@dataclass(frozen=True)
class KnobEffect:
    """importance: the share of the variance of log(score) within problems that the values of the knob explain by
    themselves, from 0 to 1, less the share that chance explains (epsilon squared)."""

    knob: str
    importance: float
    values: tuple[ValueEffect, ...]


@dataclass(frozen=True)
class Effects:
    """The knobs that have more than one value, the most important first; and the names of the others.

    trials: how many were timed.
    """

    trials: int
    knobs: tuple[KnobEffect, ...] = ()
    fixed: tuple[str, ...] = ()


def knob_effects(searches: Iterable[Search]) -> dict[tuple[str, str], Effects]:
    """(problems, regime) → the effects. Problems are `ALL_PROBLEMS`, or those of one type and numerics where there are
    several; regimes are `SCOPES`. A pair with fewer than `LEAST_TRIALS` timed trials is left out."""
    searches = list(searches)
    names = sorted({series_name(search.problem) for search in searches})
    found = {}
    for problems in (ALL_PROBLEMS, *(names if len(names) > 1 else ())):
        chosen = [each for each in searches if problems in (ALL_PROBLEMS, series_name(each.problem))]
        for where in SCOPES:
            effects = effects_of(chosen, where)
            if effects.trials >= LEAST_TRIALS:
                found[problems, where] = effects
    return found


def effects_of(searches: Iterable[Search], where: str = ALL) -> Effects:
    """The effects in one of `SCOPES`, over several problems."""
    # Knob → value → (score, log of the score, less the mean of its problem).
    by_value: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    failed = Counter[tuple[str, str]]()
    count = 0
    for search in searches:
        scored = [each for each in search.trials if where in each.scores]
        count += len(scored)
        mean = fsum(log(each.scores[where]) for each in scored) / max(1, len(scored))
        for each in scored:
            score = each.scores[where]
            point = score, log(score) - mean
            for knob, value in each.trial.knobs.items():
                by_value[short_text(knob)][short_text(str(value))].append(point)
        for each in search.trials:
            if each.trial.outcome is not Outcome.OK:
                failed.update((short_text(knob), short_text(str(value))) for knob, value in each.trial.knobs.items())
    several = {knob: values for knob, values in by_value.items() if len(values) > 1}
    effects = [
        KnobEffect(
            knob,
            _share_explained([[centered for _, centered in points] for points in values.values()]),
            tuple(_value_effect(value, values[value], failed[knob, value]) for value in sorted(values, key=_in_order)),
        )
        for knob, values in several.items()
    ]
    effects.sort(key=lambda effect: (-effect.importance, effect.knob))
    return Effects(count, tuple(effects), tuple(sorted(by_value.keys() - several.keys())))


def _in_order(value: str) -> tuple[bool, int, str]:
    """Numbers first, by size, then texts."""
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    return number is None, number or 0, value


def _value_effect(value: str, points: Sequence[tuple[float, float]], failed: int) -> ValueEffect:
    scores = [score for score, _ in points]
    cuts = quantiles(scores, n=20, method="inclusive") if len(scores) > 1 else scores * 19
    return ValueEffect(value, len(scores), cuts[0], cuts[4], cuts[9], cuts[14], cuts[18], max(scores), failed)


def _share_explained(groups: Sequence[Sequence[float]]) -> float:
    """Epsilon squared of a one-way analysis of variance: the share of the variance, 0 to 1, that the means of groups
    explain, less the share that they would explain by chance."""
    values = [value for group in groups for value in group]
    mean = fsum(values) / len(values)
    total = fsum((value - mean) ** 2 for value in values)
    between = fsum(len(group) * (fsum(group) / len(group) - mean) ** 2 for group in groups)
    freedom = len(values) - len(groups)
    if total <= 0 or freedom <= 0:
        return 0.0
    by_chance = (len(groups) - 1) * (total - between) / freedom
    return min(1.0, max(0.0, (between - by_chance) / total))
