"""A search that is killed goes on where it was: nothing that was reported is lost, nothing is tried twice."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import optuna
import pytest
from fake_search import GPU, TRIALS, FakeRunner, arch, exit_codes, options, problems, processes, search_and_die
from sqlalchemy import Engine, event

from hadagen.errors import StorageError
from hadagen.knobs import Knobs
from hadagen.measure import Variant
from hadagen.problem import Problem
from hadagen.space import Space
from hadagen.trial import Trial, knobs_key
from hadagen.tuner import pipeline
from hadagen.tuner.events import ProblemFinished, ProblemStarted, SearchStarted, TrialFinished
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
    assert len(after) == 2 * TRIALS
    assert after[: len(before)] == before
    measured = log.read_text().splitlines()
    assert len(lines(after)) == len(after)
    assert set(measured) <= lines(after[len(before) :])
    assert len(measured) == len(set(measured))


def test_a_finished_search_is_not_done_again(tmp_path: Path) -> None:
    with Store.open(tmp_path / "trials.db") as store:
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


def test_trials_of_two_drivers_count_once(tmp_path: Path) -> None:
    with Store.open(tmp_path / "trials.db") as store:
        tune(options(store, FakeRunner()))
        for trial in store.trials():
            store.record(replace(trial, environment=replace(trial.environment, driver="1.0")))
        report = tune(options(store, FakeRunner(), trials=TRIALS + 3))
        assert (report.finished, report.finished_before) == (TRIALS + 3, TRIALS)


def test_trials_of_another_gpu_do_not_count(tmp_path: Path) -> None:
    class Elsewhere(FakeRunner):
        environment = replace(GPU, gpu="Another GPU")

    with Store.open(tmp_path / "trials.db") as store:
        tune(options(store, FakeRunner()))
        report = tune(options(store, Elsewhere(), trials=1))
        assert (report.finished, report.finished_before) == (1, 0)


def test_ctrl_c_keeps_what_was_measured_and_says_so(tmp_path: Path) -> None:
    reported = []

    def listen(event: object) -> None:
        if isinstance(event, TrialFinished):
            reported.append(knobs_key(event.trial.knobs))
            if len(reported) == 4:
                raise KeyboardInterrupt

    with Store.open(tmp_path / "trials.db") as store:
        report = tune(options(store, FakeRunner()), listen)
        assert report.stopped == "interrupted"
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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Store.open(tmp_path / "trials.db") as store:
            assert tune(options(store, runner := FakeRunner())).stopped == "interrupted"
            kept = [knobs_key(trial.knobs) for trial in store.trials(blobs=False)]
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(kept) >= 4
    assert kept == recorded
    assert {knobs_key(knobs) for _, knobs in runner.asked} <= set(kept)


def test_an_interrupt_counts_while_what_is_under_way_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """When time is up already, and the trials that came until then are kept."""
    clock, measured = SimpleNamespace(monotonic=lambda: 0.0), Event()
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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Pipeline(arch(), None, Slow()) as pipe:
            assert pipe.run(ask, keep, lambda event: None, deadline=1.0)
    finally:
        signal.signal(signal.SIGINT, before)
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


def test_tables_of_another_optuna_are_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path / "trials.db") as store:
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
    assert exit_codes(open_together, tmp_path / "trials.db", processes.Barrier(8), count=8) == [0] * 8


def test_optuna_gets_the_trials_that_its_tables_lack(tmp_path: Path) -> None:
    """As after a death between recording a trial and telling Optuna, or in a database whose trials were imported."""
    (problem,) = problems(256)
    with Store.open(tmp_path / "trials.db") as store:
        tune(options(store, FakeRunner(), trials=5))
        imported = Store.open(tmp_path / "imported.db")
        for trial in store.trials():
            imported.record(trial)
        report = tune(options(imported, FakeRunner(), trials=6))
        assert (report.finished_before, report.finished) == (5, 6)
        (name,) = optuna.get_all_study_names(imported.url)
        assert problem.key in name
        assert GPU.gpu in name
        study = optuna.load_study(study_name=name, storage=imported.url)
        assert len(study.trials) == 6
        assert all(trial.state.is_finished() for trial in study.trials)
        imported.close()
