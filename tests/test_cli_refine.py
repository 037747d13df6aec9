"""`hadagen refine` on a GPU that is made up: winners between the sizes that were tuned, and what fails by now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import machine, raising, run, sentence, succeed
from fake_device import FakeDevice, fake_gpu
from sample_bundle import write_trials
from sample_trials import H100, PROBLEM, in_clusters, make_trial, times

from hadagen.cli import options
from hadagen.cli import refine as refine_command
from hadagen.measure import Answer, Variant
from hadagen.problem import Transform
from hadagen.trial import Outcome, Timing, Trial
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.store import Store

__all__ = ["fake_gpu", "machine"]  # fixtures
pytestmark = pytest.mark.usefixtures("machine")


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
    told = f"{mine}: 3 winners, 2 kernels; 1 between the sizes that were tuned\n"
    assert succeed("refine", "--n", "128,256", "--contiguous") == told
    entries = Bundle.open(mine).entries(PROBLEM)
    assert [entry.knobs["chunks"] for entry in entries] == [1, 1, 2]
    assert [entry.elements / (1 << 20) for entry in entries] == pytest.approx([1, 1.83, 2], rel=1e-2)
    assert [entry.us for entry in entries] == [1.0, 1.0, 1.0]
    with Store.open(db) as store:
        assert [len(trial.timings) for trial in store.trials()] == [4 + 3 * 2] * 2  # at three counts in two regimes
    other = tmp_path / "other.db"
    report = json.loads(succeed("refine", "--n", "256", "--bundle", other, "--json"))
    places = {"database": str(db), "bundle": str(other)}
    assert report == {"gpu": H100.gpu, **places, "winners": 3, "between": 1}
    assert other.read_bytes() == mine.read_bytes()
    assert succeed("bundle", "make", tmp_path / "again.db").startswith(f"{tmp_path / 'again.db'}: 3 winners, 2 kernels")


def test_refine_counts_only_winners_between(one_is_faster: None) -> None:
    """And not what is for GPUs that hold no large clusters."""
    with Store.open(fill()) as store:
        store.record(in_clusters(16, 1, timings=times({1 << 20: 1.0, 1 << 21: 2.0})))
    assert "5 winners, 2 kernels; 1 between" in succeed("refine", "--n", "256", "--contiguous")


def test_refine_is_refused_where_nothing_was_tuned_or_can_be_kept(
    one_is_faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = fill(tmp_path / "h20.db", environment=replace(H100, gpu="NVIDIA H20"))
    said = sentence(run("refine", "--db", db), 2)
    assert said == f"{db} has no trial of such problems on {H100.gpu}; tune them here first"
    assert not options.default_bundle("sm90").exists()
    assert "there is no tuning database" in sentence(run("refine"), 1)
    assert "cannot be both the database and the bundle" in sentence(run("refine", "--db", db, "--bundle", db), 2)
    write_trials(options.default_bundle("sm90"), [make_trial(problem=replace(PROBLEM, transform=Transform(512)))])
    monkeypatch.setattr("hadagen.tuner.refine.refine", raising(AssertionError("it measured")))
    assert f"has winners that {fill()} has no working trial of" in sentence(run("refine"), 2)
    monkeypatch.setattr(Store, "read_only", True)
    assert sentence(run("refine", "--db", db), 1).startswith(f"{db} is read-only; make it writable, or name another")


def test_a_device_that_fails_changes_no_bundle_and_loses_no_time(
    one_is_faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = fill()
    monkeypatch.setattr(refine_command, "MOST_FAILURES", 1)
    FakeDevice.refusals[2] = Answer(Outcome.WRONG_ANSWER, "it is off")
    said = sentence(run("refine", "--n", "256"), 1)
    assert said.endswith("that many fail where the device does; run hadagen doctor")
    assert not options.default_bundle("sm90").exists()
    with Store.open(db) as store:
        assert [(trial.outcome, len(trial.timings)) for trial in store.trials()] == [(Outcome.OK, 6), (Outcome.OK, 4)]


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
    result = run("refine", "--n", "256")
    mine = options.default_bundle("sm90")
    told = f"{mine}: 2 winners, {kernels} kernels; 0 between the sizes that were tuned\n"
    assert (result.exit_code, result.stdout) == (1, told)
    (line,) = result.stderr.splitlines()
    assert line.endswith(f"for n256-float16-accurate ended as {outcome.value}: it is off; {advice}")
