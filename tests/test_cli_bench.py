"""`hadagen bench` on a GPU that is made up: kernels that are timed together, and calls between the sizes of a tune."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, SMALL_TUNE, run, sentence, succeed
from fake_device import FakeDevice
from fake_search import CELLS
from sample_bundle import write_trials
from sample_trials import MATRIX_PROBLEM, PROBLEM, make_kernel, make_trial, times

from hadagen.cli import device, options
from hadagen.compiler.toolchain import BuildFailure, Toolchain
from hadagen.errors import DeviceError, ToolchainError
from hadagen.measure import Answer, Cell, Choice, ChoiceResult, Ranking, Variant
from hadagen.problem.launch import Source
from hadagen.problem.problem import DType, Numerics, Problem, Transform
from hadagen.problem.regimes import Destination
from hadagen.problem.trial import Outcome
from hadagen.runtime.choose.bundles import VARIABLE
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import portfolio

pytestmark = pytest.mark.usefixtures("machine")


# ---- kernels ---------------------------------------------------------------------------------------------------------
COUNTS = ",".join(str(elements) for elements, _ in CELLS)
GRID = ("--inplace", "--out-of-place", "--hot", "--cold")
BENCH = ("bench", "--n", "2,4", "--numerics", "fast", "--elements", COUNTS)


def fail_at(n: int, error: BaseException, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device fails on rows of n elements."""
    answer = getattr(FakeDevice, method)

    def fails(self: FakeDevice, variants: Sequence[Variant], asked: Any) -> Any:
        if variants[0].problem.n == n:
            raise error
        return answer(self, variants, asked)

    monkeypatch.setattr(FakeDevice, method, fails)


def test_bench_prints_one_table(fake_gpu: None) -> None:
    tuned = json.loads(succeed(*SMALL_TUNE))
    report = json.loads(succeed(*BENCH, "--inplace", "--json"))
    (problems, cells), *others = FakeDevice.compared
    assert not others
    assert {(problem.n, problem.io.numerics.value) for problem in problems} == {(4, "fast")}
    assert cells == [Cell(elements, Destination.IN_PLACE, cache) for elements, cache in CELLS]
    assert [(row["elements"], row["cache"]) for row in report["results"]] == [(e, c.value) for e, c in CELLS]
    first = report["results"][0]
    assert first["kernel"] in {winner["kernel"] for winner in tuned["winners"]}
    assert (first["library"], first["us"], first["copy_us"], first["fraction_of_copy"]) == ("hadagen", 1.0, 0.5, 0.5)
    assert first["error"] == 2e-4
    title, header, four = succeed(*BENCH, "--inplace").splitlines()
    assert title == "Test GPU, float16, fast, in-place: speed as a fraction of a plain copy"
    assert header.split() == ["n", "16K", "4M", "64M"]
    assert four.split()[:2] == ["4", "0.50"]

    _, header, _ = succeed(*BENCH[:-1], "384K,3M,1.5M", "--inplace", "--hot").splitlines()
    assert header.split() == ["n", "384K", "1.5M", "3M"]

    (title, *_) = succeed(*BENCH).splitlines()
    assert title.startswith("Test GPU, float16, fast, out-of-place: ")
    said = sentence(run("bench", "--n", "4", "--dtype", "float32", "--numerics", "fast", "--pitched"), 1)
    key = "n4-float32-accurate-pitched"
    advice = f"to make some: hadagen tune --arch sm90 --problem {key}"
    assert said == f"no bundle has kernels of {key} for Test GPU (sm90); {advice}"
    for asked in ("n14336-k28-float16-fast", "n14336-k28-signed-float16-fast"):
        said = sentence(run("bench", "--problem", asked), 1)
        advice = "to make some: hadagen tune --arch sm90 --problem n14336-k28-float16-fast"
        assert said == f"no bundle has kernels of {asked} for Test GPU (sm90); {advice}"

    FakeDevice.peers |= {"one": 3.0, "other": 2.0}
    printed = succeed(*BENCH, "--inplace")
    assert "×: as many times as fast as one, other\n" in printed
    assert "0.50 ×3.00 ×2.00" in printed


def test_bench_of_a_grid_writes_one_table(fake_gpu: None, tmp_path: Path) -> None:
    succeed("tune", "--n", "2,4", "--dtype", "float16", "--dtype", "bfloat16", "--contiguous", "--trials", "1")
    FakeDevice.peers |= {"one": 3.0}
    table = tmp_path / "bench.csv"
    kinds = ("--dtype", "float16", "--dtype", "bfloat16", "--numerics", "accurate", "--numerics", "fast")
    printed = succeed(*BENCH[:3], *kinds, "--elements", COUNTS, *GRID, "--csv", table)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    keys = ("library", "problem", "elements", "destination", "cache")
    lines = [tuple(row[key] for key in keys) for row in rows]
    assert len(set(lines)) == len(lines)
    kinds = ("hadagen", "accurate"), ("hadagen", "fast"), ("one", "accurate")
    named = product(kinds, (2, 4), ("float16", "bfloat16"))
    assert {line[:2] for line in lines} == {(name, f"n{n}-{dtype}-{kind}") for (name, kind), n, dtype in named}
    regimes = {line[2:] for line in lines}
    # No cold times of the small, and no hot ones of what is far larger than L2.
    assert {(elements, cache) for elements, _, cache in regimes} == {
        ("16384", "hot"),
        ("4194304", "hot"),
        ("4194304", "cold"),
        ("67108864", "cold"),
    }
    assert {destination for _, destination, _ in regimes} == {"in-place", "out-of-place"}
    assert len(lines) == 2 * 6 * len(regimes)
    assert {row["error"] for row in rows} == {"2.000e-04", "3.000e-04"}
    assert {(row["us"], row["fraction_of_copy"]) for row in rows if row["library"] == "one"} == {("3.000", "0.167")}
    # Rows of a kind are timed together, by both kinds of kernel.
    assert [{problem.n for problem in problems} for problems, _ in FakeDevice.compared] == [{2}, {2}, {4}, {4}]
    assert printed.count("Test GPU, float16, fast, in-place, cold: speed") == 1
    assert printed.count("speed as a fraction") == 2 * 2 * 2 * 2


def test_bench_times_what_it_can(fake_gpu: None, tmp_path: Path) -> None:
    succeed("tune", "--n", "2,4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "1")
    FakeDevice.refusals[2] = Answer(Outcome.WRONG_ANSWER, "it is off", {"normal": 1.0})
    result = run(*BENCH, "--csv", tmp_path / "bench.csv")
    assert result.exit_code == 1
    (said,) = result.stderr.splitlines()
    assert "for n2-float16-fast ended as wrong_answer: it is off; tune again" in said
    _, four = result.stdout.splitlines()[1:]
    assert four.split()[0] == "4"
    lines = (tmp_path / "bench.csv").read_text().splitlines()
    assert {line.split(",")[1] for line in lines} == {"problem", "n4-float16-fast"}
    FakeDevice.refusals[4] = FakeDevice.refusals[2]
    assert run(*BENCH, "--csv", tmp_path / "none.csv").stdout == ""
    assert not (tmp_path / "none.csv").exists()


@pytest.mark.parametrize(
    ("n", "error", "said", "other"),
    [
        (2, DeviceError("comparing failed; run it again"), "comparing failed; run it again", 4),
        (4, KeyboardInterrupt(), "interrupted; the results have only what was finished", 2),
    ],
)
def test_a_bench_that_fails_on_some_rows_or_is_interrupted_shows_and_writes_the_rest(
    n: int,
    error: BaseException,
    said: str,
    other: int,
    fake_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    succeed("tune", "--n", "2,4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "1")
    fail_at(n, error, "compare", monkeypatch)
    result = run(*BENCH, "--csv", tmp_path / "bench.csv")
    assert (result.exit_code, result.stderr) == (1, f"hadagen: {said}\n")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["n", str(other)]
    lines = (tmp_path / "bench.csv").read_text().splitlines()
    assert {line.split(",")[1] for line in lines} == {"problem", f"n{other}-float16-fast"}


def test_bench_without_kernels_says_what_to_do(fake_gpu: None) -> None:
    said = sentence(run("bench", "--n", "4"), 1)
    assert said == "no bundle has kernels for Test GPU (sm90); to make some: hadagen tune --arch sm90"


def test_sizes_that_hold_no_row_are_left_out(fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = make_trial(problem=replace(PROBLEM, transform=Transform(1 << 15)), timings=times({1 << 16: 2.0}))
    monkeypatch.setenv(VARIABLE, str(write_trials(tmp_path / "long.db", [trial])))
    bench = ("bench", "--n", "32768", "--inplace", "--elements")
    said = sentence(run(*bench, "8K,16K"), 2)
    assert said.startswith("nothing is timed at 8K,16K elements of these problems; give --elements of at least one row")
    assert sentence(run(*bench, "256M", "--hot"), 2).startswith("nothing is timed at 256M elements of these problems")
    succeed(*bench, "8K,64K")
    ((_, cells),) = FakeDevice.compared
    assert [cell.elements for cell in cells] == [1 << 16]


def test_with_a_matrix_the_nearest_whole_rows_are_timed(
    fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [make_trial(1, problem=MATRIX_PROBLEM, timings=times({5 * 14336: 2.0}))]
    monkeypatch.setenv(VARIABLE, str(write_trials(tmp_path / "rows.db", trials)))
    bench = ("bench", "--n", "14336", "--inplace", "--elements")
    title, header, line = succeed(*bench, "8K,16K,64K").splitlines()
    ((_, cells),) = FakeDevice.compared
    assert [cell.elements for cell in cells] == [14336, 5 * 14336]
    assert title == "Test GPU, float16, accurate, K = 28, in-place: speed as a fraction of a plain copy"
    assert header.split() == ["n", "8K", "16K", "64K"]
    assert line.split() == ["14336", "0.50", "0.50", "0.50"]


def test_a_copy_kernel_that_does_not_compile_is_named(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Toolchain, sources: Sequence[Source], *_: Any, **__: Any) -> list[Any]:
        return [BuildFailure(source.entry, "line 1\nline 2\n") for source in sources]

    monkeypatch.setattr(Toolchain, "build", refuse)
    with (
        pytest.raises(ToolchainError, match=r" refuses copy_\w+ for sm_90: line 1 / line 2"),
        device.measuring(FakeDevice.environment, 0),
    ):
        pass


# ---- between ---------------------------------------------------------------------------------------------------------
BETWEEN = ("bench", "between", "--n", "2,4", "--numerics", "fast", "--inplace", "--out-of-place", "--counts", "5")


def test_what_calls_lose_between_the_sizes_that_were_tuned(
    fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed("tune", "--n", "4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "3")
    table = tmp_path / "between.csv"
    report = json.loads(succeed(*BETWEEN, "--csv", table, "--json"))
    ((variants, choices),) = FakeDevice.ranked
    shipped = {entry["kernel"] for entry in json.loads(succeed("bundle", "show", "--json"))[0]["entries"]}
    assert {variant.kernel.digest for variant in variants if variant.kernel} == shipped
    assert (report["worst_loss"], report["geometric_mean_loss"]) == (0.04, pytest.approx(0.02, abs=1e-3))
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
        assert variants[choice.chosen].kernel.digest == row["kernel"]
    with table.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["gpu"], row["loss"], row["us"]) for row in written[:2]] == [
        ("Test GPU", "0.0000", "2.000"),
        ("Test GPU", "0.0100", "2.020"),
    ]

    monkeypatch.setenv("COLUMNS", "120")
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
    fail_at(2, DeviceError("ranking failed; run it again"), "rank", monkeypatch)
    result = run(*BETWEEN, "--csv", tmp_path / "between.csv")
    assert (result.exit_code, result.stderr) == (1, "hadagen: ranking failed; run it again\n")
    assert len((tmp_path / "between.csv").read_text().splitlines()) == 1 + 5
    assert "in all: " in result.stdout
