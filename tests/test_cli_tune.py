"""`hadagen tune` and `hadagen bench`: with no GPU, with one that is made up, and what they show meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import TINY_TUNE, empty_machine, raising, run, sentence, succeed
from fake_search import CELLS, FakeRunner
from sample_bundle import write_sample
from sample_trials import make_trial

from hadagen import measure
from hadagen.cli import options
from hadagen.cli.progress import State, shown
from hadagen.errors import DeviceError
from hadagen.measure import peer
from hadagen.problem import DType, Problem
from hadagen.runtime.bundles import VARIABLE
from hadagen.trial import Kernel, Outcome
from hadagen.tuner import PairRaced, ProblemFinished, SearchStarted, TrialFinished, TuneOptions
from hadagen.tuning_db.store import Store

ONE = ("--n", "4", "--dtype", "float16", "--numerics", "fast")
SMALL_TUNE = ("tune", *ONE, "--contiguous", "--trials", "3", "--json")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_machine(tmp_path, tmp_path_factory, monkeypatch)


def test_a_tune_without_a_gpu_estimates_is_found_and_goes_on() -> None:
    result = run(*TINY_TUNE)
    assert result.exit_code == 0, result.output
    assert "every winner is only estimated" in result.stderr.splitlines()[0]
    assert "n2-float16-fast: 1 trials" in result.stderr
    assert result.stdout.splitlines()[-1].startswith("estimated: there is no sm90 GPU here")
    assert result.stdout.splitlines()[1].startswith("2  float16  fast      contiguous")

    again = json.loads(succeed(*TINY_TUNE, "--json"))
    assert (again["trials"], again["trials_before"], again["outcomes"]) == (1, 1, {})
    assert again["estimated"]
    assert again["winners"][0]["provenance"] == "estimated"
    assert again["database"] == str(options.default_db())
    found = json.loads(succeed("best", "--arch", "sm90", "--n", "2", "--numerics", "fast", "--rows", "9", "--json"))
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
    """Stands for a `DeviceRunner` on an H100."""

    def __init__(self, device_index: int, copy_kernels: Sequence[Kernel], **others: object) -> None:
        super().__init__()
        assert device_index == 0
        assert len(copy_kernels) == len(measure.copy_sources())

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_bench_prints_one_table(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = json.loads(succeed(*SMALL_TUNE))
    fastest = min(winner["us"] for winner in tuned["winners"])
    counts = ",".join(str(elements) for elements, _ in CELLS)
    arguments = ("bench", "--n", "2,4", "--numerics", "fast", "--inplace", "--elements", counts)
    report = json.loads(succeed(*arguments, "--json"))
    assert [result["elements"] for result in report["results"]] == [elements for elements, _ in CELLS]
    assert report["results"][0]["us"] == fastest
    assert report["results"][0]["times_as_fast_as"] == {}
    title, header, two, four = succeed(*arguments).splitlines()
    assert title == "Test GPU, float16, fast, in-place: speed as a fraction of a plain copy"
    assert header.split() == ["n", "16K", "4M", "64M"]
    assert two.split() == ["2", "-", "-", "-"]
    assert four.split()[:2] == ["4", f"{1 / fastest:.2f}"]

    (title, *_) = succeed("bench", "--n", "4", "--numerics", "fast", "--elements", counts).splitlines()
    assert title.startswith("Test GPU, float16, fast, out-of-place: ")
    said = sentence(run("bench", "--n", "4", "--dtype", "float32", "--numerics", "fast", "--pitched"), 1)
    assert said.startswith("no bundle has kernels for Test GPU")

    serving = {"one": frozenset(DType), "no float16": frozenset({DType.BFLOAT16}), "other": frozenset(DType)}
    peers = [peer.Peer(name, dtypes, False, False, lambda x, *_: x) for name, dtypes in serving.items()]
    monkeypatch.setattr(peer, "find_peers", lambda: peers)
    monkeypatch.setattr(peer, "time_peer", lambda each, *_: fastest * (3 if each.name == "one" else 2))
    printed = succeed(*arguments)
    assert "×: as many times as fast as one, other\n" in printed
    assert f"{1 / fastest:.2f} ×3.00 ×2.00" in printed


def test_bench_without_kernels_says_what_to_do(fake_gpu: None) -> None:
    said = sentence(run("bench", "--n", "4"), 1)
    assert said == "no bundle has kernels for Test GPU (sm90); run hadagen tune on this machine"


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
