"""`ReplayRunner`: answers from recorded trials, so that a search can be run and compared without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hadagen.errors import UsageError
from hadagen.measure.runner import Variant
from hadagen.problem import Problem
from hadagen.trial import Outcome, Provenance, Trial, knobs_key


class ReplayRunner:
    """Gives back the trial recorded for a problem and its knobs, as it is; the last one where there are several.

    Knobs that were never tried come back `illegal`, so that a search keeps to what was recorded. Raises `UsageError`
    where there are no trials or they come from several devices, whose times do not compare.
    """

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._trials = {_key(trial.problem, trial.knobs): trial for trial in trials}
        devices = {trial.environment.gpu: trial for trial in self._trials.values()}
        if not devices:
            raise UsageError("there are no recorded trials to replay; tune on a GPU first")
        if len(devices) > 1:
            names = ", ".join(repr(name) for name in sorted(devices))
            raise UsageError(f"the recorded trials come from several devices ({names}); replay those of one")
        (last,) = devices.values()
        self.environment = last.environment
        self._arch = last.arch

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial]]:
        for variant in variants:
            trial = self._trials.get(_key(variant.problem, variant.knobs))
            yield variant, trial if trial is not None else self._unknown(variant)

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


def _key(problem: Problem, knobs: dict[str, Any]) -> tuple[Problem, str]:
    return problem, knobs_key(knobs)
