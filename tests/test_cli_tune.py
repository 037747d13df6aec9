"""`hadagen tune` and `hadagen bench`: with no GPU, with one that is made up, and what they show meanwhile."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from command_line import TINY_TUNE, machine, raising, run, sentence, succeed
from fake_search import CELLS, FakeRunner
from sample_bundle import write_sample
from sample_trials import H100, PROBLEM, make_trial, times

from hadagen import measure
from hadagen.cli import options
from hadagen.cli import refine as refine_command
from hadagen.cli.progress import State, shown
from hadagen.errors import DeviceError
from hadagen.measure import Answer, Candidate, Cell, Comparison, Place, Ranking, Standing, Times
from hadagen.problem import DType, Problem
from hadagen.runtime.bundles import VARIABLE
from hadagen.trial import Destination, Kernel, Outcome, Timing, Trial
from hadagen.tuner import PairRaced, ProblemFinished, SearchStarted, TrialFinished, TuneOptions
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.store import Store

__all__ = ["machine"]  # a fixture
pytestmark = pytest.mark.usefixtures("machine")

ONE = ("--n", "4", "--dtype", "float16", "--numerics", "fast")
SMALL_TUNE = ("tune", *ONE, "--contiguous", "--trials", "3", "--json")


def test_a_tune_without_a_gpu_estimates_is_found_and_goes_on() -> None:
    result = run(*TINY_TUNE)
    assert result.exit_code == 0, result.output
    assert "every winner is only estimated" in result.stderr.splitlines()[0]
    assert "n2-float16-accurate: 1 trials" in result.stderr
    assert result.stdout.splitlines()[-1].startswith("estimated: there is no sm90 GPU here")
    assert result.stdout.splitlines()[1].startswith("2  float16  accurate  contiguous")

    again = json.loads(succeed(*TINY_TUNE, "--json"))
    assert (again["trials"], again["trials_before"], again["outcomes"]) == (1, 1, {})
    assert again["estimated"]
    assert again["winners"][0]["provenance"] == "estimated"
    assert again["database"] == str(options.default_db())
    found = json.loads(succeed("best", "--arch", "sm90", "--n", "2", "--numerics", "accurate", "--rows", "9", "--json"))
    assert found["match"] == "estimated"
    assert found["kernel"] in {winner["kernel"] for winner in again["winners"]}
    assert "estimated" in succeed("list")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), "float16-accurate float16-fast bfloat16-accurate bfloat16-fast float32-accurate"),
        (("--dtype", "float32"), "float32-accurate"),
        (("--dtype", "float32", "--numerics", "fast"), "float32-accurate"),
        (("--dtype", "float16", "--numerics", "fast"), "float16-fast"),
    ],
)
@pytest.mark.parametrize(
    ("kind", "ends"), [((), ("", "-pitched")), (("--pitched",), ("-pitched",)), (("--contiguous",), ("",))]
)
def test_what_is_tuned(
    arguments: tuple[str, ...],
    names: str,
    kind: tuple[str, ...],
    ends: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted: list[TuneOptions] = []
    monkeypatch.setattr(
        "hadagen.tuner.tune", lambda options, listen: wanted.append(options) or raising(KeyboardInterrupt())()
    )
    result = run("tune", "--n", "64", *arguments, *kind)
    expected = {f"n64-{name}{end}" for name in names.split() for end in ends}
    assert {problem.name for problem in wanted[0].problems} == expected
    assert f"tuning {len(expected)} problems" in result.stderr
    assert len(wanted[0].problems) == len(expected)


@pytest.mark.parametrize("place", ["a directory", "beneath a file"])
def test_a_bad_place_for_the_bundle_is_noticed_before_the_search(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadagen.tuner.tune", raising(AssertionError("it searched")))
    (tmp_path / "file").touch()
    path = tmp_path if place == "a directory" else tmp_path / "file" / "sm90.db"
    assert f"{path} cannot be written" in sentence(run(*TINY_TUNE, "--bundle", path), 1)
    assert not options.default_db().exists()


def test_what_is_no_bundle_is_not_replaced_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.tuner.tune", raising(AssertionError("it searched")))
    letter, database = tmp_path / "letter.txt", tmp_path / "tuning.db"
    letter.write_text("Dear reader")
    Store.open(database).close()
    for path, db in ((letter, database), (database, tmp_path / "other.db")):
        before = path.read_bytes()
        said = sentence(run(*TINY_TUNE, "--bundle", path, "--db", db), 1)
        assert f"{path} is there already and is not a hadagen bundle; name another place" in said
        assert path.read_bytes() == before
    new = tmp_path / "new.db"
    assert f"{new} cannot be both the database and the bundle" in sentence(
        run(*TINY_TUNE, "--bundle", new, "--db", new), 2
    )
    assert not new.exists()


def test_an_interrupted_tune_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.tuner.tune", raising(KeyboardInterrupt()))
    result = run(*TINY_TUNE)
    assert result.exit_code == 1
    assert (
        result.stderr.splitlines()[-1]
        == "hadagen: interrupted; what had finished is kept, and the same command goes on from there"
    )


def test_a_tune_without_time_says_that_nothing_was_found() -> None:
    result = run(*TINY_TUNE, "--time-budget", "1e-9")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("has won anything yet; give more time or more trials")


def test_a_gpu_that_disappears_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.tuner.tune", raising(DeviceError("CUDA device 0 was lost; restart the process")))
    result = run(*TINY_TUNE)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "hadagen: CUDA device 0 was lost; restart the process"


class FakeDevice(FakeRunner):
    """Stands for a `DeviceRunner` on an H100. `peers`: other libraries and what they take; what does not begin with
    "one" serves n = 4 alone. `refusals`: what is found of kernels, by n."""

    peers: ClassVar[dict[str, float]] = {}
    refusals: ClassVar[dict[int, Answer]] = {}
    compared: ClassVar[list[tuple[list[Problem], list[Cell]]]] = []
    ranked: ClassVar[list[tuple[list[Candidate], list[Place]]]] = []

    def __init__(self, device_index: int, copy_kernels: Sequence[Kernel], cells: Any = None, **others: object) -> None:
        super().__init__()
        self.cells = cells
        assert cells is None or others["give_up"] == math.inf
        assert device_index == 0
        assert len(copy_kernels) == len(measure.copy_sources())

    def compare(self, candidates: Sequence[Candidate], cells: Sequence[tuple[Cell, Sequence[int]]]) -> Comparison:
        """Ours take 1 µs at the position in `candidates`, and one more at each after it; the copy takes 0.5 µs."""
        self.compared.append(([candidate.problem for candidate in candidates], [cell for cell, _ in cells]))
        answers = [self.refusals.get(c.problem.n, Answer(Outcome.OK, "", {"normal": 2e-4})) for c in candidates]
        peers = {name: us for name, us in self.peers.items() if name == "one" or candidates[0].problem.n == 4}
        times = [
            Times(0.5, {i: 1.0 + i for i in wanted if answers[i].outcome is Outcome.OK}, peers) for _, wanted in cells
        ]
        return Comparison(tuple(answers), {name: {"normal": 3e-4} for name in self.peers}, tuple(times))

    def rank(self, candidates: Sequence[Candidate], places: Sequence[Place]) -> Ranking:
        """Each place is lost by one percent more than the one before it."""
        self.ranked.append((list(candidates), list(places)))
        answers = [self.refusals.get(c.problem.n, Answer(Outcome.OK, "")) for c in candidates]
        right = all(answer.outcome is Outcome.OK for answer in answers)
        standings = [Standing(0, 2.0 + i / 50, 2.0, i / 100) if right else None for i, _ in enumerate(places)]
        return Ranking(tuple(answers), tuple(standings))

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("peers", {}), ("refusals", {}), ("compared", []), ("ranked", [])):
        monkeypatch.setattr(FakeDevice, name, empty)
    monkeypatch.setattr(measure, "device_environment", lambda index=0: FakeDevice.environment)
    monkeypatch.setattr(measure, "DeviceRunner", FakeDevice)


def test_a_tune_with_a_gpu_measures(fake_gpu: None) -> None:
    result = run(*SMALL_TUNE)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("tuning 1 problems for sm90; measuring on Test GPU\n")
    report = json.loads(result.stdout)
    assert (report["gpu"], report["estimated"], report["outcomes"]) == ("Test GPU", False, {"ok": 3})
    assert {winner["elements"] for winner in report["winners"]} == {elements for elements, _ in CELLS}
    assert report["winners"][0]["provenance"] == "measured"


def test_a_tune_begins_with_the_winners_there_are(
    fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[TuneOptions] = []
    monkeypatch.setattr(
        "hadagen.tuner.tune", lambda options, listen: wanted.append(options) or raising(KeyboardInterrupt())()
    )
    bundle = write_sample(tmp_path / "winners.db", chunks=2)
    problem = Problem(256, DType.FLOAT16)
    monkeypatch.setenv(VARIABLE, str(bundle))
    run("tune", "--n", "128,256", "--dtype", "float16", "--numerics", "accurate", "--contiguous")
    run("tune", "--n", "256", "--from-scratch")
    assert [knobs.chunks for knobs in wanted[0].known[problem]] == [2]
    assert wanted[0].known[replace(problem, n=128)] == []
    assert wanted[1].known == {}


def test_a_tune_of_fewer_values(fake_gpu: None) -> None:
    report = json.loads(succeed(*SMALL_TUNE, "--only", "warps=2,4", "--only", "store=streaming"))
    assert report["trials"] == 3
    for winner in report["winners"]:
        assert (winner["knobs"]["warps"] in (2, 4), winner["knobs"]["store"]) == (True, "streaming")
    assert "knob warps = 3 is not searched on sm90" in sentence(run(*SMALL_TUNE, "--only", "warps=3"), 2)


def test_a_gpu_of_another_arch_is_not_measured(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = replace(FakeDevice.environment, compute_capability="8.0")
    monkeypatch.setattr(measure, "device_environment", lambda index=0: ampere)
    assert "there is no sm90 GPU here" in run(*TINY_TUNE).stderr
    assert sentence(run("tune", "--n", "2"), 2) == "arch 'sm80' is not known; choose one of sm90"


# ---- bench -----------------------------------------------------------------------------------------------------------
COUNTS = ",".join(str(elements) for elements, _ in CELLS)
GRID = ("--inplace", "--out-of-place", "--hot", "--cold")
BENCH = ("bench", "--n", "2,4", "--numerics", "fast", "--elements", COUNTS)


def test_bench_prints_one_table(fake_gpu: None) -> None:
    tuned = json.loads(succeed(*SMALL_TUNE))
    report = json.loads(succeed(*BENCH, "--inplace", "--json"))
    (problems, cells), *others = FakeDevice.compared
    assert not others
    assert {(problem.n, problem.numerics.value) for problem in problems} == {(4, "fast")}
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
    assert said.startswith("no bundle has kernels for Test GPU")

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
    keys = ("library", "numerics", "dtype", "n", "elements", "destination", "cache")
    lines = [tuple(row[key] for key in keys) for row in rows]
    assert len(set(lines)) == len(lines)
    libraries = ("hadagen", "accurate"), ("hadagen", "fast"), ("one", "")
    assert {line[:3] for line in lines} == {(*each, dtype) for each in libraries for dtype in ("float16", "bfloat16")}
    regimes = {line[4:] for line in lines}
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
    assert {line.split(",")[5] for line in (tmp_path / "bench.csv").read_text().splitlines()} == {"n", "4"}
    FakeDevice.refusals[4] = FakeDevice.refusals[2]
    assert run(*BENCH, "--csv", tmp_path / "none.csv").stdout == ""
    assert not (tmp_path / "none.csv").exists()


def test_a_device_that_fails_on_some_rows_is_asked_for_the_others(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed("tune", "--n", "2,4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "1")
    compare = FakeDevice.compare

    def fails_at_two(self: FakeDevice, candidates: Sequence[Candidate], cells: Any) -> Comparison:
        if candidates[0].problem.n == 2:
            raise DeviceError("comparing failed; run it again")
        return compare(self, candidates, cells)

    monkeypatch.setattr(FakeDevice, "compare", fails_at_two)
    result = run(*BENCH)
    assert (result.exit_code, result.stderr) == (1, "hadagen: comparing failed; run it again\n")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["n", "4"]


def test_bench_without_kernels_says_what_to_do(fake_gpu: None) -> None:
    said = sentence(run("bench", "--n", "4"), 1)
    assert said == "no bundle has kernels for Test GPU (sm90); run hadagen tune on this machine"


# ---- between ---------------------------------------------------------------------------------------------------------
BETWEEN = ("between", "--n", "2,4", "--numerics", "fast", "--inplace", "--out-of-place", "--counts", "5")


def test_what_calls_lose_between_the_sizes_that_were_tuned(fake_gpu: None, tmp_path: Path) -> None:
    succeed("tune", "--n", "4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "3")
    table = tmp_path / "between.csv"
    report = json.loads(succeed(*BETWEEN, "--csv", table, "--json"))
    ((candidates, places),) = FakeDevice.ranked
    shipped = {entry["kernel"] for entry in json.loads(succeed("bundle", "show", "--json"))[0]["entries"]}
    assert {candidate.kernel.digest for candidate in candidates if candidate.kernel} == shipped
    assert report["worst_loss"] == 0.04
    assert report["geometric_mean_loss"] == pytest.approx(0.02, abs=1e-3)
    results = report["results"]
    assert [row["rows"] * row["n"] for row in results] == [row["elements"] for row in results]
    assert all(row["rows"] % 2 for row in results)
    assert [row["destination"] for row in results] == ["in-place", "out-of-place"] * 2 + ["in-place"]
    assert {row["best_kernel"] for row in results} == {candidates[0].kernel.digest if candidates[0].kernel else ""}
    assert [row["loss"] for row in results] == [0.0, 0.01, 0.02, 0.03, 0.04]
    for row, place in zip(results, places, strict=True):
        (first, share), *others = place.cells
        assert (first.elements, first.destination.value, first.cache.value) == tuple(
            row[name] for name in ("elements", "destination", "cache")
        )
        assert share + sum(other for _, other in others) == 1
        assert all(other <= share for _, other in others)
        chosen = candidates[place.chosen].kernel
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
    digests = [candidate.kernel.digest for candidate in many if candidate.kernel]
    assert len(set(digests)) == len(digests) > len(few)
    assert many[: len(few)] == few
    said = sentence(run(*BETWEEN, "--db", "missing.db"), 1)
    assert said.startswith("there is no tuning database missing.db; ")


def test_between_is_refused_where_it_cannot_be(fake_gpu: None) -> None:
    assert sentence(run("between", "--counts", "1"), 2) == "--counts 1 is not supported; give 2 to 100"
    said = sentence(run("between", "--n", "4"), 1)
    assert said == "no bundle has kernels for Test GPU (sm90); run hadagen tune on this machine"
    succeed("tune", "--n", "4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "1")
    FakeDevice.refusals[4] = Answer(Outcome.WRONG_ANSWER, "it is off")
    assert "for n4-float16-fast ended as wrong_answer: it is off; tune again" in sentence(run(*BETWEEN), 1)


def test_between_says_what_it_could_not_time_and_shows_the_rest(
    fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed("tune", "--n", "2,4", "--dtype", "float16", "--numerics", "fast", "--contiguous", "--trials", "1")
    rank = FakeDevice.rank

    def fails_at_two(self: FakeDevice, candidates: Sequence[Candidate], places: Sequence[Place]) -> Ranking:
        if candidates[0].problem.n == 2:
            raise DeviceError("ranking failed; run it again")
        return rank(self, candidates, places)

    monkeypatch.setattr(FakeDevice, "rank", fails_at_two)
    result = run(*BETWEEN, "--csv", tmp_path / "between.csv")
    assert (result.exit_code, result.stderr) == (1, "hadagen: ranking failed; run it again\n")
    assert len((tmp_path / "between.csv").read_text().splitlines()) == 1 + 5
    assert "in all: " in result.stdout


# ---- refine ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def one_is_faster(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 on which kernels of one chunk take 1 µs, and those of two 2 µs, wherever they are timed."""
    monkeypatch.setattr(FakeDevice, "environment", H100)

    def trial(self: FakeDevice, candidate: Candidate) -> Trial:
        chunks = candidate.knobs["chunks"]
        answer = FakeDevice.refusals.get(chunks, Answer(Outcome.OK, ""))
        timings = tuple(Timing(*cell, *(3 * [float(chunks)]), copy_us=1.0) for cell in self.cells[candidate.problem])
        fields = {"outcome": answer.outcome, "detail": answer.detail, "environment": H100, "timings": timings}
        return make_trial(chunks, problem=candidate.problem, kernel=candidate.kernel, **fields)

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
    assert [entry.elements / (1 << 20) for entry in entries] == pytest.approx([1, 1.68, 2], rel=1e-2)
    assert [entry.us for entry in entries] == [1.0, 1.0, 1.0]
    with Store.open(db) as store:
        assert [len(trial.timings) for trial in store.trials()] == [4 + 3 * 2] * 2  # at three counts in two regimes
    other = tmp_path / "other.db"
    report = json.loads(succeed("refine", "--n", "256", "--bundle", other, "--json"))
    places = {"database": str(db), "bundle": str(other)}
    assert report == {"gpu": H100.gpu, **places, "winners": 3, "between": 1}
    assert other.read_bytes() == mine.read_bytes()
    assert succeed("bundle", "make", tmp_path / "again.db").startswith(f"{tmp_path / 'again.db'}: 3 winners, 2 kernels")


def test_refine_is_refused_where_nothing_was_tuned_or_can_be_kept(
    one_is_faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = fill(tmp_path / "h20.db", environment=replace(H100, gpu="NVIDIA H20"))
    said = sentence(run("refine", "--db", db), 2)
    assert said == f"{db} has no trial of such problems on {H100.gpu}; tune them here first"
    assert not options.default_bundle("sm90").exists()
    assert "there is no tuning database" in sentence(run("refine"), 1)
    assert "cannot be both the database and the bundle" in sentence(run("refine", "--db", db, "--bundle", db), 2)
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


# ---- progress --------------------------------------------------------------------------------------------------------
SCORES = (0.5, 0.75, 1.0)


def test_progress_says_how_far_the_search_is_and_what_time_is_left() -> None:
    now = [0.0]
    state = State(time_budget=1000.0, clock=lambda: now[0])
    state.listen(SearchStarted(problems=1, trials=103, finished=2, environment=FakeRunner.environment, estimated=False))
    assert (state.counts, state.seconds_left) == ("2 of 103 trials", 1000.0)
    for finished in range(3, 23):
        now[0] += 2.0
        state.listen(TrialFinished(make_trial(), SCORES, finished, trials=103))
    assert (state.counts, state.seconds_left) == ("22 of 103 trials (20 ok)", 2.0 * 81)
    state.listen(TrialFinished(make_trial(outcome=Outcome.TIMEOUT), SCORES, 23, trials=103))
    assert state.counts == "23 of 103 trials (20 ok, 1 timeout)"
    assert state.now == "n256-float16-accurate: best so far, as fraction of copy: latency 0.50, L2 0.75, memory 1.00"
    state.listen(PairRaced(make_trial().problem, (0.01,)))
    assert state.counts == "23 of 103 trials (20 ok, 1 timeout, 1 pairs raced)"
    now[0] = 999.0
    assert state.seconds_left == 1.0


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(None) as listen:
        listen(TrialFinished(make_trial(), SCORES, 1, trials=2))
        listen(ProblemFinished(make_trial().problem, 2, SCORES))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("n256-float16-accurate: 2 trials, best so far")


def test_progress_is_drawn_on_a_terminal() -> None:
    from rich.console import Console

    state = State(time_budget=None)
    state.listen(TrialFinished(make_trial(), SCORES, 1, trials=2))
    console = Console(width=100)
    with console.capture() as captured:
        console.print(state)
    bar, counts, now = captured.get().splitlines()
    assert bar.startswith("━")
    assert counts.strip() == "1 of 2 trials (1 ok), ?:?? left"
    assert now.startswith("n256-float16-accurate: best so far")
