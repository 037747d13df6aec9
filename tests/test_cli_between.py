"""`hadagen bench between` on a GPU that is made up: what calls lose between the sizes that were tuned."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import SMALL, run, sentence, succeed
from fake_device import FakeDevice
from sample_bundle import write_trials
from sample_trials import make_kernel, make_trial

from hadagen.cli import options
from hadagen.errors import DeviceError
from hadagen.measure import Answer, Choice, ChoiceResult, Ranking, Variant
from hadagen.problem import DType, Numerics, Problem
from hadagen.trial import Outcome
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import portfolio

pytestmark = pytest.mark.usefixtures("machine")

BETWEEN = ("bench", "between", "--n", "2,4", "--numerics", "fast", "--inplace", "--out-of-place", "--counts", "5")


def test_what_calls_lose_between_the_sizes_that_were_tuned(fake_gpu: None, tmp_path: Path) -> None:
    succeed("tune", "--n", "4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "3")
    table = tmp_path / "between.csv"
    report = json.loads(succeed(*BETWEEN, "--csv", table, "--json"))
    ((variants, choices),) = FakeDevice.ranked
    shipped = {entry["kernel"] for entry in json.loads(succeed("bundle", "show", "--json"))[0]["entries"]}
    assert {variant.kernel.digest for variant in variants if variant.kernel} == shipped
    assert report["worst_loss"] == 0.04
    assert report["geometric_mean_loss"] == pytest.approx(0.02, abs=1e-3)
    results = report["results"]
    assert [row["rows"] * Problem.parse(row["problem"]).n for row in results] == [row["elements"] for row in results]
    assert all(row["rows"] % 2 for row in results)
    assert [row["destination"] for row in results] == ["in-place", "out-of-place"] * 2 + ["in-place"]
    assert {row["best_kernel"] for row in results} == {variants[0].kernel.digest if variants[0].kernel else ""}
    assert [row["loss"] for row in results] == [0.0, 0.01, 0.02, 0.03, 0.04]
    for row, choice in zip(results, choices, strict=True):
        (first, share), *others = choice.cells
        assert (first.elements, first.destination.value, first.cache.value) == tuple(
            row[name] for name in ("elements", "destination", "cache")
        )
        assert share + sum(other for _, other in others) == 1
        assert all(other <= share for _, other in others)
        chosen = variants[choice.chosen].kernel
        assert chosen
        assert chosen.digest == row["kernel"]
    with table.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["gpu"], row["loss"], row["us"]) for row in written[:2]] == [
        ("Test GPU", "0.0000", "2.000"),
        ("Test GPU", "0.0100", "2.020"),
    ]

    title, _, four, total = succeed(*BETWEEN).splitlines()
    assert title.startswith("Test GPU: what calls lose")
    assert "4.00%" in four
    assert total == "in all: 1.99% (geometric mean), 4.00% (worst)"


def test_between_brings_in_the_best_of_a_database(fake_gpu: None) -> None:
    succeed("tune", "--n", "4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "12")
    succeed(*BETWEEN)
    succeed(*BETWEEN, "--db", options.default_db())
    (few, _), (many, _) = FakeDevice.ranked
    digests = [variant.kernel.digest for variant in many if variant.kernel]
    assert len(set(digests)) == len(digests) > len(few)
    assert many[: len(few)] == few
    said = sentence(run(*BETWEEN, "--db", "missing.db"), 1)
    assert said.startswith("there is no tuning database missing.db; ")


def test_between_is_refused_where_it_cannot_be(fake_gpu: None) -> None:
    assert sentence(run("bench", "between", "--counts", "1"), 2) == "--counts 1 is not supported; give 2 to 100"
    said = sentence(run("bench", "between", "--n", "4"), 1)
    assert said == "no bundle has kernels for Test GPU (sm90); to make some: hadagen tune --arch sm90"
    succeed("tune", "--n", "4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "1")
    FakeDevice.refusals[4] = Answer(Outcome.WRONG_ANSWER, "it is off")
    assert "for n4-float16-fast ended as wrong_answer: it is off; tune again" in sentence(run(*BETWEEN), 1)


@pytest.mark.parametrize("called", [True, False])
def test_between_complains_of_kernels_that_calls_run_and_of_no_others(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch, called: bool
) -> None:
    def refuses(self: FakeDevice, variants: Sequence[Variant], choices: Sequence[Choice]) -> Ranking:
        (chosen,) = {choice.chosen for choice in choices}
        wrong = chosen if called else 1 - chosen
        answers = [Answer(Outcome.OK, ""), Answer(Outcome.OK, "")]
        answers[wrong] = Answer(Outcome.WRONG_ANSWER, "it is off")
        return Ranking(tuple(answers), (None if called else ChoiceResult(chosen, 2.0, 2.0, 0.0),) * len(choices))

    succeed("tune", *SMALL, "--contiguous", "--trials", "1")
    write_trials(options.default_bundle("another"), [make_trial(problem=Problem.of(4, DType.FLOAT16, Numerics.FAST))])
    monkeypatch.setattr(FakeDevice, "rank", refuses)
    result = run(*BETWEEN)
    assert result.exit_code == called
    assert ("ended as wrong_answer: it is off; tune again" in result.stderr) == called


def test_between_times_no_kernel_of_another_arch(fake_gpu: None) -> None:
    succeed("tune", *SMALL, "--contiguous", "--trials", "1")
    succeed(*BETWEEN)
    older = make_trial(
        problem=Problem.of(4, DType.FLOAT16, Numerics.FAST), arch="sm80", kernel=make_kernel(arch="sm80")
    )
    write_bundle(options.default_bundle("sm80"), "sm80", portfolio([older]), lambda _: make_kernel(arch="sm80"), {})
    succeed(*BETWEEN)
    (before, _), (after, _) = FakeDevice.ranked
    assert after == before


def test_between_says_what_it_could_not_time_and_shows_the_rest(
    fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed("tune", "--n", "2,4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "1")
    rank = FakeDevice.rank

    def fails_at_two(self: FakeDevice, variants: Sequence[Variant], choices: Sequence[Choice]) -> Ranking:
        if variants[0].problem.n == 2:
            raise DeviceError("ranking failed; run it again")
        return rank(self, variants, choices)

    monkeypatch.setattr(FakeDevice, "rank", fails_at_two)
    result = run(*BETWEEN, "--csv", tmp_path / "between.csv")
    assert (result.exit_code, result.stderr) == (1, "hadagen: ranking failed; run it again\n")
    assert len((tmp_path / "between.csv").read_text().splitlines()) == 1 + 5
    assert "in all: " in result.stdout
