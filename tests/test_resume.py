"""A search that is killed or disturbed goes on where it was: nothing reported is lost, nothing is tried twice."""

import logging
import os
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from fake_search import GPU, TRIALS, FakeRunner, arch, build, exit_codes, options, problems, processes, search_and_die
from measure_sample import CELL, PROBLEM
from running import interruptible
from sqlalchemy import Engine, event
from test_races import RacingRunner
from test_runners import GPU as STAND_IN
from test_runners import FakeService, kernel, variants

from hadagen.cli.progress import State
from hadagen.errors import DeviceError, DisturbedError, StorageError
from hadagen.measure import Cell, DeviceRunner, Variant
from hadagen.measure.messages import Compare, Comparison, Look, Race, Rank, Ranking
from hadagen.measure.watch import Watch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space
from hadagen.problem.launch import Source
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Disturbed, NotTried, Outcome, Trial, knobs_key
from hadagen.tuner import pipeline
from hadagen.tuner.events import (
    Event,
    ProblemFinished,
    ProblemStarted,
    RaceDisturbed,
    SearchStarted,
    TrialFinished,
    VariantNotTried,
)
from hadagen.tuner.mirror import Mirror
from hadagen.tuner.pipeline import Pipeline
from hadagen.tuner.search import tune
from hadagen.tuning_db.store import Store


def recorded(database: Path) -> list[Trial]:
    with Store.open(database) as store:
        return store.trials()


def lines(trials: list[Trial]) -> set[str]:
    """As the program writes down what it measures."""
    return {f"{trial.problem.key} {sorted(trial.knobs.items())}" for trial in trials}


@pytest.mark.parametrize(
    ("where", "count"),
    [("measuring", 1), ("measured", 9), ("recording", 5), ("recorded", 6), ("recorded", 24), ("reported", 13)],
)
def test_a_killed_search_ends_like_one_that_was_not(tmp_path: Path, where: str, count: int) -> None:
    database, log = tmp_path / "trials.db", tmp_path / "log"
    assert exit_codes(search_and_die, database, log, where, count) == [-signal.SIGKILL]
    before = recorded(database)
    log.write_text("")
    assert search_and_die(database, log) == 2 * TRIALS
    after = recorded(database)
    assert (len(after), after[: len(before)]) == (2 * TRIALS, before)
    measured = log.read_text().splitlines()
    assert len(lines(after)) == len(after)
    assert set(measured) <= lines(after[len(before) :])
    assert len(measured) == len(set(measured))


def test_a_finished_search_is_not_done_again(store: Store) -> None:
    tune(options(store, FakeRunner()))
    before = store.trials()
    again = FakeRunner()
    report = tune(options(store, again))
    assert again.asked == []
    assert store.trials() == before
    assert (report.finished, report.finished_before, report.stopped) == (TRIALS, TRIALS, "")
    more = tune(options(store, again, trials=TRIALS + 3))
    assert (len(again.asked), more.finished) == (3, TRIALS + 3)
    events: list[object] = []
    fewer = tune(options(store, again, trials=TRIALS // 2), events.append)
    assert (len(again.asked), fewer.finished, fewer.stopped) == (3, TRIALS + 3, "")
    assert isinstance(events[0], SearchStarted)
    assert events[0].trials == events[0].finished == TRIALS + 3
    assert [type(event) for event in events[1:]] == [ProblemStarted, ProblemFinished]


def test_trials_of_two_drivers_count_once(store: Store) -> None:
    tune(options(store, FakeRunner()))
    store.record(*(replace(each, environment=replace(each.environment, driver="1.0")) for each in store.trials()))
    report = tune(options(store, FakeRunner(), trials=TRIALS + 3))
    assert (report.finished, report.finished_before) == (TRIALS + 3, TRIALS)


def test_trials_of_another_gpu_do_not_count(store: Store) -> None:
    class Elsewhere(FakeRunner):
        environment = replace(GPU, gpu="Another GPU")

    tune(options(store, FakeRunner()))
    report = tune(options(store, Elsewhere(), trials=1))
    assert (report.finished, report.finished_before) == (1, 0)


def test_ctrl_c_keeps_what_was_measured_and_says_so(store: Store) -> None:
    reported = []

    def listen(event: object) -> None:
        if isinstance(event, TrialFinished):
            reported.append(knobs_key(event.trial.knobs))
            if len(reported) == 4:
                raise KeyboardInterrupt

    assert tune(options(store, FakeRunner()), listen).stopped == "interrupted"
    kept = {knobs_key(trial.knobs) for trial in store.trials(blobs=False)}
    assert len(reported) >= 4
    assert kept == set(reported)
    assert tune(options(store, FakeRunner())).finished == TRIALS


def test_interrupts_while_a_trial_is_recorded_wait_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    record = Store.record

    def interrupted(store: Store, *trials: Trial) -> list[int]:
        recorded.extend(knobs_key(trial.knobs) for trial in trials)
        if len(recorded) >= 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return record(store, *trials)

    monkeypatch.setattr(Store, "record", interrupted)
    with interruptible(), Store.open(tmp_path / "trials.db") as store:
        assert tune(options(store, runner := FakeRunner())).stopped == "interrupted"
        kept = [knobs_key(trial.knobs) for trial in store.trials(blobs=False)]
    assert len(kept) >= 4
    assert kept == recorded
    assert {knobs_key(knobs) for _, knobs in runner.asked} <= set(kept)


def test_an_interrupt_counts_while_what_is_under_way_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """When time is up already, and the trials that came until then are kept."""
    clock, measured = SimpleNamespace(monotonic=lambda: 0.0), threading.Event()
    kept: list[Trial] = []

    class Slow(FakeRunner):
        def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial]]:
            yield from super().run(variants)
            measured.set()

    def ask(size: int) -> list[tuple[Problem, Knobs]]:
        if batches:
            return [batches.pop()]
        assert measured.wait(60)
        clock.monotonic = lambda: 2.0
        return []

    def keep(trials: Sequence[Trial]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        kept.extend(trials)

    (problem,) = problems(256)
    batches = [(problem, Space(problem, arch()).seeds()[0])]
    monkeypatch.setattr(pipeline, "time", clock)
    with interruptible(), Pipeline(arch(), None, Slow()) as pipe:
        assert pipe.run(ask, keep, lambda event: None, deadline=1.0)
    assert len(kept) == 1


@pytest.mark.parametrize("room", [1, 30, 40])
def test_a_full_disk_is_said_wherever_optuna_meets_it(tmp_path: Path, room: int) -> None:
    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages + room}")

    with Store.open(tmp_path / "trials.db") as store, closing(sqlite3.connect(tmp_path / "trials.db")) as file:
        (pages,) = file.execute("PRAGMA page_count").fetchone()
        event.listen(Engine, "connect", limit)
        try:
            with pytest.raises(StorageError, match=r"the disk of .*trials.db is full \(\d+ bytes free\); make room"):
                tune(options(store, FakeRunner()))
        finally:
            event.remove(Engine, "connect", limit)
        tune(options(store, FakeRunner()))  # once there is room


def test_tables_of_another_optuna_are_refused(store: Store, tmp_path: Path) -> None:
    tune(options(store, FakeRunner()))
    with closing(sqlite3.connect(tmp_path / "trials.db")) as file, file:
        file.execute("UPDATE alembic_version SET version_num = 'v9.9.9'")
    with pytest.raises(StorageError, match=r"holds tables of another Optuna than .*; name another database"):
        tune(options(store, FakeRunner()))


def open_together(path: Path, all_here: Barrier) -> None:
    with Store.open(path) as store:
        all_here.wait()
        Mirror(store).study("first")


def test_processes_that_begin_together_share_a_new_database(tmp_path: Path) -> None:
    assert exit_codes(open_together, tmp_path / "trials.db", processes.Barrier(4), count=4) == [0] * 4


def test_optuna_gets_the_trials_that_its_tables_lack(store: Store, tmp_path: Path) -> None:
    """As after a death between recording a trial and telling Optuna, or in a database whose trials were imported."""
    (problem,) = problems(256)
    tune(options(store, FakeRunner(), trials=5))
    imported = Store.open(tmp_path / "imported.db")
    imported.record(*store.trials())
    report = tune(options(imported, FakeRunner(), trials=6))
    assert (report.finished_before, report.finished) == (5, 6)
    (name,) = optuna.get_all_study_names(imported.url)
    assert problem.key in name
    assert GPU.gpu in name
    study = optuna.load_study(study_name=name, storage=imported.url)
    assert len(study.trials) == 6
    assert all(trial.state.is_finished() for trial in study.trials)
    imported.close()


# ---- compilers that die ----------------------------------------------------------------------------------------------
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
    assert (report.outcomes, report.finished) == ({Outcome.OK: TRIALS}, TRIALS)
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
            if variant.kernel.digest in self.died:
                return super().trial(variant)
            self.died.add(variant.kernel.digest)
            return NotTried("c++ was killed by signal 9")

    runner = Dying()
    assert tune(options(store, runner)).outcomes == {Outcome.OK: TRIALS}
    assert len(store.trials()) == TRIALS
    assert len(runner.asked) == 2 * len(runner.died)


# ---- a GPU that is busy or throttled ---------------------------------------------------------------------------------
BUSY = Disturbed("process 12 (python3) uses the GPU, 97 % of the time", "stop it, or choose another GPU")


class BusyService(FakeService):
    """A kernel named "busy 2" finds the GPU busy twice, and so does a race that has it first. A new process finds
    device 1 busy."""

    def __init__(self, watch: Watch, device_index: int, *_: object) -> None:
        super().__init__(watch, device_index)
        self._is_busy = device_index == 1
        self._asked: Counter[str] = Counter()

    def handle(self, request: Any) -> Any:
        if isinstance(request, Look):
            return BUSY if self._is_busy else None
        if isinstance(request, Compare):
            return Comparison((), {}, (), BUSY)
        if isinstance(request, Rank):
            return Ranking((), (), BUSY)
        entry = request.a.entry if isinstance(request, Race) else request.kernel.entry
        self._asked[entry] += 1
        return BUSY if self._asked[entry] <= int(entry.partition(" ")[2] or 0) else super().handle(request)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.measure.runner._PAUSES_S", (0.0, 0.0))


@pytest.fixture
def runner() -> Iterator[DeviceRunner]:
    with DeviceRunner(0, [kernel("copy")], timeout_s=10.0, make_service=BusyService) as made:
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
    with DeviceRunner(device, [kernel("copy")], make_service=BusyService) as made:
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
    assert runner.environment == STAND_IN
    runner._environment = replace(STAND_IN, gpu="Stand-in, 450 W", power_limit_watts=450)
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
        self._left[variant.kernel.digest] += 1
        if len(self._left) > 2 and self._left[variant.kernel.digest] <= self._often:
            return BUSY
        return super().trial(variant)


def test_a_search_times_again_what_a_busy_gpu_prevented(store: Store) -> None:
    said: list[Event] = []
    assert tune(options(store, BusyRunner(2)), said.append).outcomes == {Outcome.OK: TRIALS}
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
    assert state.note == f"{BUSY.reason}; kernels timed at that time are timed again"
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
