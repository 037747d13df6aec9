"""Knobs whose compiler died: no trial, tried again, and kept at last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fake_search import TRIALS, FakeRunner, build, options

from hadagen.launch import Source
from hadagen.measure import Variant
from hadagen.trial import NotTried, Outcome
from hadagen.tuner.events import Event, VariantNotTried
from hadagen.tuner.search import tune
from hadagen.tuning_db.store import Store


class Mortal:
    """Compiles as `build` does, and dies the first `deaths` times for each source of so many threads."""

    def __init__(self, threads: int, deaths: int) -> None:
        self._threads, self._left = threads, Counter[str]()
        self._deaths = deaths

    def __call__(self, sources: Sequence[Source]) -> list[Any]:
        return [self._one(source, kernel) for source, kernel in zip(sources, build(sources), strict=True)]

    def _one(self, source: Source, kernel: Any) -> Any:
        self._left[source.text] += 1
        dies = source.launch.threads == self._threads and self._left[source.text] <= self._deaths
        return NotTried("nvcc was killed by signal 9") if dies else kernel


def test_what_a_compiler_died_for_is_tried_again(store: Store) -> None:
    said: list[Event] = []
    report = tune(options(store, FakeRunner(), build=Mortal(64, deaths=2)), said.append)
    assert report.outcomes == {Outcome.OK: TRIALS}
    assert report.finished == TRIALS
    again = Counter(event.knobs for event in said if isinstance(event, VariantNotTried))
    assert set(again.values()) == {2}
    assert {knobs.warps for knobs in again} == {2}


def test_what_a_compiler_dies_for_every_time_is_kept_at_last(store: Store) -> None:
    report = tune(options(store, FakeRunner(), build=Mortal(64, deaths=3)))
    failed = store.trials(outcome=Outcome.COMPILE_FAILED)
    assert {trial.knobs["warps"] for trial in failed} == {2}
    assert {trial.detail for trial in failed} == {"nvcc was killed by signal 9, in each of 3 attempts"}
    assert report.outcomes == {Outcome.OK: TRIALS - len(failed), Outcome.COMPILE_FAILED: len(failed)}


def test_what_a_runner_cannot_try_is_tried_again(store: Store) -> None:
    class Dying(FakeRunner):
        def __init__(self) -> None:
            super().__init__()
            self.died: set[str] = set()

        def trial(self, variant: Variant) -> Any:
            assert variant.kernel
            if variant.kernel.digest in self.died:
                return super().trial(variant)
            self.died.add(variant.kernel.digest)
            return NotTried("c++ was killed by signal 9")

    runner = Dying()
    report = tune(options(store, runner))
    assert report.outcomes == {Outcome.OK: TRIALS}
    assert len(store.trials()) == TRIALS
    assert len(runner.asked) == 2 * len(runner.died)
