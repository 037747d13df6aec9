"""`ReplayRunner`: answers from recorded trials, so that a search can be run and compared without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hadagen.measure.runner import Variant
from hadagen.problem.trial import Outcome, Provenance, Trial, knobs_key


class ReplayRunner:
    """Gives back the trial recorded for a problem and its knobs, as it is; the last one where there are several.

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
