"""`hadagen tune` between the sizes of its search, on a GPU that is made up: winners there, and what fails by now."""

from __future__ import annotations

import json
import math
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL_TUNE, TINY_TUNE, raising, run, sentence, succeed
from fake_device import FakeDevice
from fake_search import CELLS, problems
from sample_bundle import write_trials
from sample_trials import H100, PROBLEM, in_clusters, make_trial, times

from hadagen.cli import lanes, options
from hadagen.measure import Answer, Variant
from hadagen.problem import Problem, Transform
from hadagen.trial import Disturbed, Outcome, Timing, Trial
from hadagen.tuner import search as tuning
from hadagen.tuner.events import Listener, TuneReport
from hadagen.tuner.search import TuneOptions
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.store import Store

pytestmark = pytest.mark.usefixtures("machine")

REFINE = ("tune", "--trials", "0", "--n")


@pytest.fixture
def one_is_faster(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 on which kernels of one chunk take 1 µs, and those of two 2 µs, wherever they are timed."""
    monkeypatch.setattr(FakeDevice, "environment", H100)

    def trial(self: FakeDevice, variant: Variant) -> Trial:
        chunks = variant.knobs["chunks"]
        answer = FakeDevice.refusals.get(chunks, Answer(Outcome.OK, ""))
        timings = tuple(Timing(*cell, *(3 * [float(chunks)]), copy_us=1.0) for cell in self.cells[variant.problem])
        fields = {"outcome": answer.outcome, "detail": answer.detail, "environment": H100, "timings": timings}
        return make_trial(chunks, problem=variant.problem, kernel=variant.kernel, **fields)

    monkeypatch.setattr(FakeDevice, "trial", trial)


def fill(path: Path | None = None, **fields: Any) -> Path:
    """A database in which one kernel of n = 256 wins at 1M elements, and another at 2M, by a lucky time; returns it."""
    path = path or options.default_db()
    path.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(path) as store:
        for chunks, us in ((1, {1 << 20: 1.0, 1 << 21: 2.0}), (2, {1 << 20: 2.0, 1 << 21: 1.0})):
            store.record(make_trial(chunks, timings=times(us), **fields))
    return path


def test_winners_are_found_between_those_that_were_tuned(one_is_faster: None, tmp_path: Path) -> None:
    db = fill()
    mine = options.default_bundle("sm90")
    assert "1 of 3 winners are between the sizes of the search\n" in succeed(*REFINE, "128,256", "--contiguous")
    entries = Bundle.open(mine).entries(PROBLEM)
    assert [entry.knobs["chunks"] for entry in entries] == [1, 1, 2]
    assert [entry.elements / (1 << 20) for entry in entries] == pytest.approx([1, 1.83, 2], rel=1e-2)
    assert [entry.us for entry in entries] == [1.0, 1.0, 1.0]
    with Store.open(db) as store:
        assert [len(trial.timings) for trial in store.trials()] == [4 + 3 * 2] * 2  # at three counts in two regimes
    other = tmp_path / "other.db"
    report = json.loads(succeed(*REFINE, "256", "--bundle", other, "--json"))
    assert (report["gpu"], report["database"], report["bundle"]) == (H100.gpu, str(db), str(other))
    assert (report["between"], len(report["winners"]), report["trials"]) == (1, 3, 0)
    assert other.read_bytes() == mine.read_bytes()
    assert succeed("bundle", "make", tmp_path / "again.db").startswith(f"{tmp_path / 'again.db'}: 3 winners, 2 kernels")


def test_only_winners_between_are_counted(one_is_faster: None) -> None:
    """And neither what is for GPUs that hold no large clusters nor what wins for other problems."""
    with Store.open(fill()) as store:
        store.record(make_trial(problem=replace(PROBLEM, transform=Transform(512)), timings=times({1 << 20: 1.0})))
        store.record(in_clusters(16, 1, timings=times({1 << 20: 1.0, 1 << 21: 2.0})))
    assert "1 of 5 winners are between" in succeed(*REFINE, "256", "--contiguous")


def sizes_timed() -> set[int]:
    with Store.open(options.default_db()) as store:
        return {timing.elements for trial in store.trials() for timing in trial.timings}


def test_a_tune_times_the_best_between_its_sizes_unless_told_not_to(fake_gpu: None) -> None:
    of_the_search = {elements for elements, _ in CELLS}
    assert "winners are between" not in succeed(*SMALL_TUNE[:-1], "--no-refine")
    assert sizes_timed() == of_the_search
    result = run(*SMALL_TUNE[:-1])
    assert " winners are between the sizes of the search\n" in result.stdout
    assert "refining: timing 3 kernels between the sizes of the search\n" in result.stderr
    assert sizes_timed() == of_the_search | {1 << 18, 1 << 24}  # the middles of its gaps


def test_a_tune_without_a_gpu_refines_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.tuner.refine.refine", raising(AssertionError("it refined")))
    assert json.loads(succeed(*TINY_TUNE, "--json"))["between"] == 0
    for arguments in ((*REFINE, "2"), (*REFINE, "2", "--arch", "sm90", "--no-refine")):
        said = "trials = 0 leaves only refining, which needs a GPU of sm90 and no --no-refine; give 1 trial or more"
        assert sentence(run(*arguments), 2) == said


def test_the_time_budget_is_for_the_search_and_refining_together(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float | None] = []
    deadlines: list[float] = []
    search = tuning.tune

    def noted(wanted: TuneOptions, listen: Listener) -> TuneReport:
        budgets.append(wanted.time_budget)
        return search(wanted, listen)

    monkeypatch.setattr(tuning, "tune", noted)
    monkeypatch.setattr("hadagen.tuner.refine.refine", lambda *arguments: deadlines.append(arguments[-1]) or [PROBLEM])
    before = time.monotonic()
    succeed(*SMALL_TUNE, "--time-budget", "1000")
    after = time.monotonic()
    succeed(*SMALL_TUNE, "--time-budget", "1000", "--no-refine")
    succeed(*SMALL_TUNE)
    assert budgets == [800, 1000, None]
    (deadline, unlimited) = deadlines
    assert before + 1000 <= deadline <= after + 1000
    assert unlimited == math.inf


def test_where_the_time_ends_while_refining_the_report_says_so(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.monotonic

    def late(*_: object) -> list[Problem]:
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 2000)
        return [PROBLEM]

    monkeypatch.setattr("hadagen.tuner.refine.refine", late)
    assert json.loads(succeed(*SMALL_TUNE, "--time-budget", "1000"))["stopped"] == "out of time"


def test_of_several_tunes_the_last_refines(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    search = tuning.tune
    monkeypatch.setattr(tuning, "tune", lambda *arguments: replace(search(*arguments), under_way=2))
    monkeypatch.setattr("hadagen.tuner.refine.refine", raising(AssertionError("it refined")))
    assert "other runs have 2 trials under way" in succeed(*SMALL_TUNE[:-1])


def test_where_no_kernel_works_here_there_is_nothing_to_refine_and_others_keep_their_winners(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(problem=problems(4)[0])
    trial = FakeDevice.trial
    wrong = {"outcome": Outcome.WRONG_ANSWER, "timings": ()}
    monkeypatch.setattr(FakeDevice, "trial", lambda self, variant: replace(trial(self, variant), **wrong))
    report = json.loads(succeed(*SMALL_TUNE))
    assert (report["outcomes"], report["winners"], report["between"]) == ({"wrong_answer": 3}, [], 0)
    assert Bundle.open(report["bundle"]).gpus() == [H100.gpu]


def test_an_interrupt_while_refining_keeps_what_was_searched(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.tuner.refine.refine", raising(KeyboardInterrupt()))
    result = run(*SMALL_TUNE)
    assert result.exit_code == 1
    said, _, command = result.stderr.splitlines()[-1].partition("; to write a bundle of what has won so far: hadagen ")
    assert said.startswith("hadagen: interrupted; every finished trial is kept in ")
    searched = options.default_bundle("sm90").read_bytes()
    assert ": 6 winners, " in succeed(*shlex.split(command))
    assert options.default_bundle("sm90").read_bytes() == searched


def test_refining_alone_is_refused_where_nothing_was_tuned_or_can_be_kept(
    one_is_faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = fill(tmp_path / "h20.db", environment=replace(H100, gpu="NVIDIA H20"))
    result = run(*REFINE, "256", "--db", db)
    said = f"hadagen: {db} has no trial of such problems on {H100.gpu}; tune them here first"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, said)
    assert not options.default_bundle("sm90").exists()
    assert "there is no tuning database" in sentence(run(*REFINE, "256"), 1)
    assert not options.default_db().exists()
    write_trials(options.default_bundle("sm90"), [make_trial(problem=replace(PROBLEM, transform=Transform(512)))])
    monkeypatch.setattr("hadagen.tuner.refine.refine", raising(AssertionError("it measured")))
    assert f"has winners that {fill()} has no working trial of" in sentence(run(*REFINE, "512"), 2)
    monkeypatch.setattr("hadagen.tuning_db.database._writable", lambda path: False)
    said = sentence(run(*REFINE, "256", "--db", db), 1)
    assert said.startswith(f"{db} is read-only; make it and its directory writable, or name another")


def test_a_device_that_fails_changes_no_bundle_and_loses_no_time(
    one_is_faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = fill()
    monkeypatch.setattr(lanes, "MOST_FAILURES", 1)
    FakeDevice.refusals[2] = Answer(Outcome.WRONG_ANSWER, "it is off")
    result = run(*REFINE, "256")
    said = result.stderr.splitlines()[-1]
    assert (result.exit_code, result.stdout) == (1, "")
    assert said.endswith("that many fail where the device does; run hadagen doctor")
    assert not options.default_bundle("sm90").exists()
    with Store.open(db) as store:
        assert [(trial.outcome, len(trial.timings)) for trial in store.trials()] == [(Outcome.OK, 6), (Outcome.OK, 4)]


def test_kernels_that_a_busy_gpu_prevents_are_named_once_and_the_others_go_on(
    one_is_faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    plain = FakeDevice.trial

    def trial(self: FakeDevice, variant: Variant) -> Any:
        busy = Disturbed("process 12 uses the GPU", "stop it")
        return busy if variant.knobs["chunks"] == 2 else plain(self, variant)

    monkeypatch.setattr(FakeDevice, "trial", trial)
    result = run(*REFINE, "256")
    said = "kernels of n256-float16-accurate were not timed again, because process 12 uses the GPU; stop it"
    assert (result.exit_code, result.stderr.count(said)) == (1, 1)
    assert len({entry.kernel for entry in Bundle.open(options.default_bundle("sm90")).entries(PROBLEM)}) == 2


@pytest.mark.parametrize(
    ("outcome", "kernels", "advice"),
    [(Outcome.WRONG_ANSWER, 1, "it wins nothing any more"), (Outcome.TIMEOUT, 2, "it was left out")],
)
def test_a_kernel_that_fails_by_now_is_named_once_and_the_others_go_on(
    one_is_faster: None, outcome: Outcome, kernels: int, advice: str
) -> None:
    """What is wrong wins no more; what takes too long does where it did."""
    fill()
    FakeDevice.refusals[1] = Answer(outcome, "it is off")
    result = run(*REFINE, "256")
    assert (result.exit_code, "0 of 2 winners are between" in result.stdout) == (1, True)
    entries = Bundle.open(options.default_bundle("sm90")).entries(PROBLEM)
    assert len({entry.kernel for entry in entries}) == kernels
    said = f"for n256-float16-accurate ended as {outcome.value}: it is off; {advice}"
    assert [line.endswith(said) for line in result.stderr.splitlines() if " ended as " in line] == [True]
