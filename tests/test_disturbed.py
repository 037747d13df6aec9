"""A GPU that is busy or throttled: what was timed then is timed again, and in the end one sentence says why not."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_search import TRIALS, FakeRunner, options
from measure_sample import CELL, PROBLEM
from test_races import RacingRunner
from test_runners import GPU, kernel, variants

from hadagen.cli.progress import State
from hadagen.errors import DeviceError, DisturbedError
from hadagen.knobs import Knobs
from hadagen.measure import Cell, DeviceRunner, Variant
from hadagen.measure.messages import Answer, Compare, Comparison, Look, Measure, Race, Rank, Ranking
from hadagen.trial import Disturbed, Outcome, Timing, Trial
from hadagen.tuner.events import Event, RaceDisturbed, VariantNotTried
from hadagen.tuner.search import tune
from hadagen.tuning_db.store import Store

BUSY = Disturbed("process 12 (python3) uses the GPU, 97 % of the time", "stop it, or choose another GPU")


class FakeService:
    """A kernel named "busy 2" finds the GPU busy twice, and so does a race that has it first; "hang" never ends. A new
    process finds device 1 busy."""

    def __init__(self, watch: object, device_index: int, *_: object) -> None:
        self._is_busy = device_index == 1
        self._asked: Counter[str] = Counter()
        self.greeting = GPU

    def handle(self, request: Any) -> Any:
        if isinstance(request, Look):
            return BUSY if self._is_busy else None
        if isinstance(request, Compare):
            return Comparison((), {}, (), BUSY)
        if isinstance(request, Rank):
            return Ranking((), (), BUSY)
        entry = request.a.entry if isinstance(request, Race) else request.kernel.entry
        name, _, often = entry.partition(" ")
        if name == "hang":
            time.sleep(1e6)
        self._asked[entry] += 1
        if self._asked[entry] <= int(often or 0):
            return BUSY
        if isinstance(request, Race):
            return [(1.0, 2.0) for _ in request.cells]
        assert isinstance(request, Measure)
        return Answer(Outcome.OK, "", {"normal": 2e-4}, (Timing(*CELL, 1.0, 1.0, 1.0, 1.0),))

    def is_usable(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.measure.runner._PAUSES_S", (0.0, 0.0))


@pytest.fixture
def runner() -> Iterator[DeviceRunner]:
    with DeviceRunner(0, [kernel("copy")], timeout_s=10.0, make_service=FakeService) as made:
        yield made


def kinds(answers: Iterable[tuple[Variant, Trial | Disturbed]]) -> list[str]:
    return [answer.outcome.value if isinstance(answer, Trial) else "disturbed" for _, answer in answers]


# ---- the runner ------------------------------------------------------------------------------------------------------
def test_what_was_timed_on_a_busy_gpu_is_timed_again(runner: DeviceRunner) -> None:
    assert kinds(runner.run(variants("ok", "busy 1", "busy 2", "ok"))) == ["ok"] * 4


def test_a_gpu_that_stays_busy_is_left_for_later_and_then_given_up(runner: DeviceRunner) -> None:
    asked = variants("busy 3", "busy 4", "ok", "busy 9", "busy 10", "busy 11", "ok")
    answers: list[Any] = []
    with pytest.raises(DisturbedError) as caught:
        answers.extend(runner.run(asked))
    assert kinds(answers) == ["disturbed", "disturbed", "ok", "disturbed", "disturbed"]
    assert answers[0][1] == BUSY
    assert str(caught.value) == (
        "nothing can be timed: process 12 (python3) uses the GPU, 97 % of the time, each time that 3 kernels were "
        "timed; stop it, or choose another GPU; finished trials are kept"
    )
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("device", "kind"), [(0, "timeout"), (1, "disturbed")])
def test_a_kernel_that_takes_too_long_while_others_run_has_not_hung(
    device: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadagen.measure.runner._PAUSES_S", ())
    with DeviceRunner(device, [kernel("copy")], make_service=FakeService) as made:
        _ = made.environment
        made._timeout_s = 1.0
        assert kinds(made.run(variants("hang"))) == [kind]


def test_races_are_run_again_too(runner: DeviceRunner) -> None:
    (busy, other) = variants("busy 2", "ok")
    assert runner.race(busy, other, [CELL]) == [(1.0, 2.0)]
    (busy, other) = variants("busy 3", "ok")
    with pytest.raises(DisturbedError, match=r"a race has no times \(process 12 .*\); stop it, or choose"):
        runner.race(busy, other, [CELL])


def test_comparisons_come_with_one_warning(runner: DeviceRunner, caplog: pytest.LogCaptureFixture) -> None:
    (one,) = variants("ok")
    with caplog.at_level(logging.WARNING):
        runner.compare([one], [(CELL, [0])])
        runner.rank([one], [])
    assert [record.getMessage() for record in caplog.records] == [
        "these times may be wrong: process 12 (python3) uses the GPU, 97 % of the time; stop it, or choose another GPU"
    ]


def test_a_gpu_of_another_class_after_a_restart_ends_the_run(runner: DeviceRunner) -> None:
    assert runner.environment == GPU
    runner._environment = replace(GPU, gpu="Stand-in, 450 W", power_limit_watts=450)
    runner._worker.stop()
    with pytest.raises(DeviceError, match="was Stand-in, 450 W with 450 W, and is Stand-in with 0 W now; run the same"):
        list(runner.run(variants("ok")))


# ---- the search ------------------------------------------------------------------------------------------------------
class BusyRunner(FakeRunner):
    """Finds the device busy so often for each kernel, from the third one on."""

    def __init__(self, often: int) -> None:
        super().__init__()
        self._often, self._left = often, Counter[str]()

    def trial(self, variant: Variant) -> Any:
        assert variant.kernel
        self._left[variant.kernel.digest] += 1
        if len(self._left) > 2 and self._left[variant.kernel.digest] <= self._often:
            return BUSY
        return super().trial(variant)


def test_a_search_times_again_what_a_busy_gpu_prevented(store: Store) -> None:
    said: list[Event] = []
    report = tune(options(store, BusyRunner(2)), said.append)
    assert report.outcomes == {Outcome.OK: TRIALS}
    assert len(store.trials()) == TRIALS
    (note,) = {(event.reason, event.advice) for event in said if isinstance(event, VariantNotTried)}
    assert note == (BUSY.reason, BUSY.advice)


def test_a_search_on_a_gpu_that_stays_busy_ends_in_a_sentence_and_keeps_its_trials(store: Store) -> None:
    with pytest.raises(DisturbedError, match=r"97 % of the time, in each of 3 attempts; stop it, .*; finished trials"):
        tune(options(store, BusyRunner(3)))
    assert {trial.outcome for trial in store.trials()} == {Outcome.OK}  # and no failed one of a kernel that is sound
    assert len(store.trials()) >= 2
    tune(options(store, FakeRunner()))
    assert len(store.trials(outcome=Outcome.OK)) == TRIALS


def test_progress_says_so_the_first_time() -> None:
    state = State(None, clock=lambda: 0.0)
    state.listen(VariantNotTried(PROBLEM, Knobs(), BUSY.reason, BUSY.advice))
    assert state.note == f"{BUSY.reason}; what was timed then is timed again"
    state.listen(VariantNotTried(PROBLEM, Knobs(), "another"))
    assert "another" not in state.note


class BusyRaces(RacingRunner):
    """The first race finds the device busy."""

    def race(self, a: Variant, b: Variant, cells: list[Cell]) -> list[tuple[float, float]]:
        times = super().race(a, b, cells)
        if len(self.races) == 1:
            raise DisturbedError("a race has no times")
        return times


def test_near_ties_that_a_busy_gpu_prevented_are_raced_by_the_next_run(store: Store) -> None:
    said: list[Event] = []
    tune(options(store, BusyRaces()), said.append)
    assert [event.reason for event in said if isinstance(event, RaceDisturbed)] == ["a race has no times"]
    again = RacingRunner()
    tune(options(store, again))
    assert again.races
    last = RacingRunner()
    tune(options(store, last))
    assert last.races == []
