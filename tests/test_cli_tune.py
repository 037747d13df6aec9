"""`hadagen tune`: what it tries, with a GPU that is made up and without one, the bundle it leaves, and its progress."""

import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL_TUNE, TINY_TUNE, raising, run, sentence, succeed
from fake_device import FakeDevice
from fake_search import CELLS, FakeRunner, problems
from sample_bundle import write_sample, write_trials
from sample_store import recorded
from sample_trials import H100, H200, PROBLEM, in_clusters, launch_for, make_kernel, make_trial, times

from hadagen import measure
from hadagen.cli import ending, options, output, progress, searchers, tune
from hadagen.cli.output import clock_text
from hadagen.cli.progress import GroupStarted, Refining, State, Writing, best_so_far, in_parts, shown
from hadagen.cli.wanted import KINDS, kind_of
from hadagen.compiler.emulator import EmulationError
from hadagen.measure import Answer, Variant
from hadagen.plan.arch import load_arch
from hadagen.problem.problem import DType, Numerics, Problem, Transform
from hadagen.problem.regimes import Destination, destinations, element_buckets
from hadagen.problem.trial import Disturbed, Environment, Outcome, Provenance, Timing, Trial
from hadagen.runtime.choose.bundles import VARIABLE, why_unused
from hadagen.tuner import estimate
from hadagen.tuner import search as tuning
from hadagen.tuner.estimate import BUILT_AT_ONCE
from hadagen.tuner.events import (
    BatchBuilt,
    Event,
    Listener,
    PairRaced,
    ProblemFinished,
    ProblemStarted,
    RaceDisturbed,
    SearchStarted,
    TrialFinished,
    TuneReport,
)
from hadagen.tuner.fleet_search import Summed
from hadagen.tuner.gains import Called, Gain
from hadagen.tuner.search import TuneOptions
from hadagen.tuning_db import make
from hadagen.tuning_db.bundle import Bundle, shipped
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import portfolio

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[TuneOptions]:
    """What was asked of searches, each of which ends at once."""
    asked: list[TuneOptions] = []

    def interrupted(options: TuneOptions, listen: Listener) -> TuneReport:
        asked.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupted)
    return asked


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune", raising(AssertionError("it searched")))


def test_a_tune_without_a_gpu_estimates_is_found_and_goes_on() -> None:
    result = run(*TINY_TUNE)
    assert result.exit_code == 0, result.output
    first, kept = result.stderr.splitlines()
    assert first.startswith("tuning 1 problem for sm90; there is no sm90 GPU here, so kernels are verified on the CPU")
    assert kept.endswith("; Ctrl-C stops, and the same command continues")
    tried, speeds, estimated, where, following = result.stdout.splitlines()
    assert re.fullmatch(r"1 new trial for 1 problem in 0:\d\d \(1 ok\)", tried)
    assert re.fullmatch(
        r"the winners as a fraction of a copy by the cost model: latency [\d.]+, L2 [\d.]+, memory [\d.]+", speeds
    )
    assert "so speeds and winners are only estimated, and no gain is known" in estimated
    path = options.default_bundle("sm90")
    assert where == f"the winners are in {path}; calls on sm90 GPUs use them from now on"
    succeed(*shlex.split(following.rpartition("; or ")[2])[1:])

    again = json.loads(succeed(*TINY_TUNE, "--json"))
    assert (again["trials"], again["trials_before"], again["outcomes"]) == (1, 1, {})
    assert again["estimated"]
    assert (again["winners"][0]["provenance"], again["database"]) == ("estimated", str(options.default_db()))
    found = json.loads(succeed("best", "--arch", "sm90", "--n", "2", "--numerics", "accurate", "--rows", "9", "--json"))
    assert found["match"] == "estimated"
    assert found["kernel"] in {winner["kernel"] for winner in again["winners"]}
    assert "estimated" in succeed("bundle", "list")


def test_a_tune_says_if_calls_will_not_use_its_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does whatever else writes a bundle."""
    succeed(*TINY_TUNE)
    path = options.default_bundle("sm90")
    assert json.loads(succeed(*TINY_TUNE, "--json"))["unused"] == why_unused(path) == ""
    monkeypatch.setenv("HADAGEN_TRUSTED_KEYS", "MCow")
    assert "calls do not use it: HADAGEN_TRUSTED_KEYS is set; sign it with" in succeed(
        "bundle", "make", "--arch", "sm90"
    )
    monkeypatch.delenv("HADAGEN_TRUSTED_KEYS")
    path.parent.chmod(0o777)
    why = f"others can write to {path.parent}; run: chmod go-w {path.parent}, or name the bundle in HADAGEN_BUNDLE"
    said = succeed(*TINY_TUNE)
    assert f"the winners are in {path}, and calls do not use it: {why}\n" in said
    assert json.loads(succeed(*TINY_TUNE, "--json"))["unused"] == why
    elsewhere = tmp_path / "elsewhere.db"
    said = succeed("bundle", "make", "--arch", "sm90", elsewhere)
    assert said.endswith(" MB\n")
    assert succeed("bundle", "merge", elsewhere, elsewhere, path.with_name("b.db")).endswith(
        f", and calls do not use it: {why}\n"
    )
    monkeypatch.setenv(VARIABLE, str(path))
    assert json.loads(succeed(*TINY_TUNE, "--json"))["unused"] == ""


def test_the_winners_of_a_tune_name_another_for_gpus_that_do_not_hold_one() -> None:
    fields: dict[str, Any] = {"provenance": Provenance.ESTIMATED, "environment": Environment()}
    fields["problem"] = PROBLEM.with_io(numerics=Numerics.FAST)
    trials = (in_clusters(16, 1, timings=times({1 << 16: 1.5}), **fields),)
    trials += (in_clusters(8, 2, timings=times({1 << 16: 2.5}), **fields),)
    recorded(options.default_db(), *trials)
    tuned = ("tune", "--problem", "n256-float16-fast", "--trials", "2")
    found = json.loads(succeed(*tuned, "--json"))["winners"]
    assert [(winner["us"], winner["portable"]) for winner in found] == [(1.5, False), (2.5, True)]


FORMATS_OF_64 = [
    f"n64-{dtype}-to-{form}-accurate"
    for dtype in ("float16", "bfloat16")
    for form in ("mxfp4_32", "mxfp8_32", "nvfp4_16")
]
FORMATS_OF_64 += [
    f"n64-{before}bfloat16-to-{form}_row_2880-accurate"
    for before in ("", "after-silu_mul-")
    for form in ("fp8", "int8")
]


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
    wanted: list[TuneOptions],
) -> None:
    result = run("tune", "--n", "64", *arguments, *kind)
    expected = {f"n64-{name}{end}" for name in names.split() for end in ends}
    expected |= {key for key in FORMATS_OF_64 if not kind or "" in ends if not arguments or key[4:11] in names}
    assert {problem.key for problem in wanted[0].problems} == expected
    assert f"tuning {len(expected)} problem{'s' * (len(expected) > 1)} for sm90;" in result.stderr
    assert len(wanted[0].problems) == len(expected)


@pytest.mark.parametrize("place", [".", "file/sm90.db", "link.db"], ids=["a directory", "beneath a file", "a link"])
def test_a_bad_place_for_the_bundle_is_noticed_before_the_search(place: str, tmp_path: Path, no_search: None) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link.db").symlink_to(tmp_path / "file" / "sm90.db")
    path = tmp_path / place
    assert f"{path} cannot be written" in sentence(run(*TINY_TUNE, "--bundle", path), 1)
    assert not options.default_db().exists()


def test_a_tune_replaces_nothing_but_bundles(tmp_path: Path, no_search: None) -> None:
    letter, database = tmp_path / "letter.txt", tmp_path / "tuning.db"
    letter.write_text("Dear reader")
    Store.open(database).close()
    for path, db in ((letter, database), (database, tmp_path / "other.db")):
        before = path.read_bytes()
        said = sentence(run(*TINY_TUNE, "--bundle", path, "--db", db), 1)
        assert f"{path} is there already and is not a hadagen bundle; name another place" in said
        assert path.read_bytes() == before


@pytest.mark.parametrize("db", ["{0}/new.db", "sqlite:///{0}/new.db", "{0}/sub/../new.db", "{0}/link.db", "new.db"])
def test_one_file_is_not_both_database_and_bundle(
    db: str, no_search: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new = tmp_path / "new.db"
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.db").symlink_to(new)
    said = sentence(run(*TINY_TUNE, "--bundle", new, "--db", db.format(tmp_path)), 2)
    assert said == f"{new} cannot be both the database and the bundle; name two places"
    assert not new.exists()


@pytest.mark.parametrize("named", [False, True])
def test_an_interrupted_tune_says_what_is_kept_and_how_it_becomes_a_bundle(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that it names does that."""
    db, bundle = tmp_path / "the trials.db", tmp_path / "winners.db"
    names = ["--db", str(db), "--bundle", str(bundle)] if named else []
    succeed(*TINY_TUNE, *names)
    written = bundle if named else options.default_bundle("sm90")
    written.unlink()
    monkeypatch.setattr("hadagen.tuner.search.tune", raising(KeyboardInterrupt()))
    result = run(*TINY_TUNE, *names)
    assert result.exit_code == 1
    kept, _, command = result.stderr.splitlines()[-1].partition("; to write a bundle of the winners so far: ")
    place = db if named else options.default_db()
    assert kept == (f"hadagen: interrupted; every finished trial is kept in {place}, and the same command continues")
    succeed(*shlex.split(command)[1:])
    assert [entry.problem.n for entry in Bundle.open(written).all_entries()][:1] == [2]


# A search that takes its time, in which every trial that was measured is a line.
SLOW_TUNE = """
import sys, time
from fake_search import FakeRunner, build, options
from hadagen.tuner import search as tuning
from hadagen.plan.arch import load_arch
from hadagen.cli import tune
from hadagen.cli.main import main
class SlowRunner(FakeRunner):
    def trial(self, variant):
        time.sleep(0.3)
        trial = super().trial(variant)
        print("measured", flush=True)
        return trial
def build_slowly(sources):
    time.sleep(1)
    return build(sources)
search = tuning.tune
tuning.tune = lambda wanted, listen: search(options(wanted.store, SlowRunner(), build=build_slowly), listen)
tune.find_target = lambda arch, device: (load_arch(arch), None)
main(sys.argv[1:])
"""


def test_impatient_interrupts_lose_nothing_and_are_one_sentence(tmp_path: Path) -> None:
    db = tmp_path / "trials.db"
    arguments = [*TINY_TUNE, "--db", str(db), "--bundle", str(tmp_path / "bundle.db")]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TUNE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
    ) as process:
        measured = process.stdout.readline()
        for _ in range(5):
            time.sleep(0.12)
            process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    assert process.returncode == 1, errors
    assert errors.splitlines()[-1].startswith(f"hadagen: interrupted; every finished trial is kept in {db}")
    assert "Traceback" not in errors
    with Store.open(db) as store:
        assert len(store.trials()) == len((measured + rest).splitlines())


def test_a_tune_without_a_winner_says_why_and_keeps_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.shutil, "which", lambda name: name)
    given = (*TINY_TUNE, "--db", str(tmp_path / "my trials.db"))
    with monkeypatch.context() as patch:
        patch.setattr(estimate, "_verify", raising(EmulationError("2 races; the first: thread 0")))
        said = run(*given).stderr.splitlines()[-1]
    assert said == (
        "hadagen: there is no winner for sm90 to write, because trials failed (1 wrong_answer, such as "
        f"n2-float16-accurate: 2 races; the first: thread 0); give hadagen {shlex.join(given)} more time or more trials"
    )
    without_time = (*TINY_TUNE, "--time-budget", "1e-9")
    assert run(*without_time).stderr.splitlines()[-1] == (
        "hadagen: there is no winner for sm90 to write; "
        f"give hadagen {shlex.join(without_time)} more time or more trials"
    )
    failed = [
        make_trial(count, outcome=outcome, timings=(), detail=f"error {count}\nof several")
        for count, outcome in ((1, Outcome.WRONG_ANSWER), (2, Outcome.COMPILE_FAILED), (4, Outcome.COMPILE_FAILED))
    ]
    db = recorded(tmp_path / "failed.db", *failed)
    assert sentence(run("bundle", "make", "--arch", "sm90", "--db", db), 1) == (
        f"there is no winner for sm90 to write, because trials failed (2 compile_failed, such as {PROBLEM.key}: "
        f"error 2; 1 wrong_answer, such as {PROBLEM.key}: error 1); "
        f"give hadagen tune --arch sm90 --db {db} more time or more trials"
    )


def test_a_tune_with_a_gpu_measures(fake_gpu: None) -> None:
    result = run(*SMALL_TUNE, "--no-refine")
    assert result.exit_code == 0, result.output
    said = (
        "tuning 1 problem for sm90, heaviest first; measuring on Test GPU; 3 trials for each problem, without a limit"
    )
    assert result.stderr.startswith(said)
    report = json.loads(result.stdout)
    assert (report["gpu"], report["estimated"], report["outcomes"]) == ("Test GPU", False, {"ok": 3})
    assert {winner["elements"] for winner in report["winners"]} == {elements for elements, _ in CELLS}
    assert report["winners"][0]["provenance"] == "measured"


def test_a_tune_begins_with_the_winners_there_are(
    fake_gpu: None, wanted: list[TuneOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_sample(tmp_path / "winners.db", chunks=2)
    problem = Problem.of(256, DType.FLOAT16)
    monkeypatch.setenv(VARIABLE, str(bundle))
    run("tune", "--n", "128,256", "--kind", "transform", "--dtype", "float16", "--trials", "1", "--contiguous")
    run("tune", "--n", "256", "--from-scratch")
    assert [knobs.chunks for knobs in wanted[0].known[problem]] == [2]
    assert (wanted[0].known[replace(problem, transform=Transform(128))], wanted[1].known) == ([], {})


def test_a_tune_of_a_new_problem_begins_with_the_winners_of_a_similar_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a matrix, of the most similar one; of codes, of the other numerics."""
    like, far = Problem.of(10240, DType.FLOAT16, order=20), Problem.of(172 << 6, DType.FLOAT16, order=172)
    fast = Problem.parse("n256-bfloat16-to-int8_row_4096-fast")
    trials = [
        make_trial(
            chunks,
            problem=each,
            kernel=make_kernel(b"cubin %d" % chunks, launch=launch_for(each)),
            timings=times({element_buckets(each)[0]: 2.0}, destinations(each)[0]),
        )
        for chunks, each in ((2, like), (4, far), (8, PROBLEM), (16, fast))
    ]
    monkeypatch.setenv(VARIABLE, str(write_trials(tmp_path / "winners.db", trials)))
    accurate = fast.with_io(numerics=Numerics.ACCURATE)
    asked = [Problem.of(14336, DType.FLOAT16, order=28), like, replace(PROBLEM, transform=Transform(128)), accurate]
    known = tune._known_winners(load_arch("sm90"), asked)
    assert [[knobs.chunks for knobs in known[each]] for each in asked] == [[2], [2], [], [16]]


@pytest.mark.parametrize(
    ("others", "chunks"),
    [
        ([{"provenance": Provenance.ESTIMATED, "environment": Environment()}], [2]),
        ([{"provenance": Provenance.ESTIMATED, "environment": Environment()}, {}], [4]),
        ([{"arch": "sm80"}], []),
    ],
)
def test_a_tune_begins_with_estimates_only_if_nothing_was_measured_on_its_arch(
    others: list[dict[str, object]],
    chunks: list[int],
    fake_gpu: None,
    wanted: list[TuneOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = [make_trial(2 << i, **fields) for i, fields in enumerate(others)]
    kernels = {trial.kernel.digest: trial.kernel for trial in trials if trial.kernel}
    write_bundle(tmp_path / "winners.db", trials[0].arch, portfolio(trials), kernels.__getitem__, {})
    monkeypatch.setenv(VARIABLE, str(tmp_path / "winners.db"))
    run("tune", "--problem", "n256-float16-accurate")
    assert [[knobs.chunks for knobs in known] for known in wanted[0].known.values()] == [chunks]


def test_a_tune_reports_the_winners_of_its_own_gpu(fake_gpu: None) -> None:
    recorded(options.default_db(), make_trial(problem=Problem.of(4, DType.FLOAT16, Numerics.FAST), environment=H200))
    assert {winner["gpu"] for winner in json.loads(succeed(*SMALL_TUNE))["winners"]} == {"Test GPU"}


def test_a_tune_of_fewer_values(fake_gpu: None) -> None:
    report = json.loads(succeed(*SMALL_TUNE, "--only", "warps=2,4", "--only", "trigger=end"))
    assert report["trials"] == 3
    for winner in report["winners"]:
        assert (winner["knobs"]["warps"] in (2, 4), winner["knobs"]["trigger"]) == (True, "end")
    assert "knob warps = 3 is not searched on sm90" in sentence(run(*SMALL_TUNE, "--only", "warps=3"), 2)


def test_a_gpu_of_another_arch_is_not_measured(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = replace(FakeDevice.environment, compute_capability="8.0")
    monkeypatch.setattr(measure, "device_environment", lambda index=0: ampere)
    assert "there is no sm90 GPU here" in run(*TINY_TUNE).stderr
    volta = replace(ampere, compute_capability="7.0")
    monkeypatch.setattr(measure, "device_environment", lambda index=0: volta)
    assert sentence(run("tune", "--n", "2"), 2).startswith("arch 'sm70' is not known; choose one of sm75, sm80, ")


# ---- between the sizes of the search ---------------------------------------------------------------------------------
REFINE = ("tune", "--trials", "0", "--n")


@pytest.fixture
def one_is_faster(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 on which kernels of one chunk take 1 µs, and those of two 2 µs, wherever they are timed."""
    monkeypatch.setattr(FakeDevice, "environment", H100)

    def trial(self: FakeDevice, variant: Variant) -> Trial:
        chunks = variant.knobs["chunks"]
        answer = FakeDevice.refusals.get(chunks, Answer(Outcome.OK, ""))
        timings = tuple(Timing(*cell, *(3 * [float(chunks)]), copy_us=1.0) for cell in self.cells_of(variant) or ())
        fields = {"outcome": answer.outcome, "detail": answer.detail, "environment": H100, "timings": timings}
        return make_trial(chunks, problem=variant.problem, kernel=variant.kernel, **fields)

    monkeypatch.setattr(FakeDevice, "trial", trial)


def fill(path: Path | None = None, **fields: Any) -> Path:
    """A database in which one kernel of n = 256 wins at 1M elements, and another at 2M, by a lucky time; returns it."""
    one = make_trial(1, timings=times({1 << 20: 1.0, 1 << 21: 2.0}), **fields)
    other = make_trial(2, timings=times({1 << 20: 2.0, 1 << 21: 1.0}), **fields)
    return recorded(path or options.default_db(), one, other)


def test_winners_are_found_between_those_that_were_tuned(one_is_faster: None, tmp_path: Path) -> None:
    db = fill()
    mine = options.default_bundle("sm90")
    assert json.loads(succeed(*REFINE, "128,256", "--contiguous", "--json"))["between"] == 1
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
    of_another = make_trial(problem=replace(PROBLEM, transform=Transform(512)), timings=times({1 << 20: 1.0}))
    recorded(fill(), of_another, in_clusters(16, 1, timings=times({1 << 20: 1.0, 1 << 21: 2.0})))
    report = json.loads(succeed(*REFINE, "256", "--contiguous", "--json"))
    assert (report["between"], len(report["winners"])) == (1, 5)


def sizes_timed() -> set[int]:
    with Store.open(options.default_db()) as store:
        return {timing.elements for trial in store.trials() for timing in trial.timings}


def test_a_tune_times_the_best_between_its_sizes_unless_told_not_to(fake_gpu: None) -> None:
    of_the_search = {elements for elements, _ in CELLS}
    assert json.loads(succeed(*SMALL_TUNE, "--no-refine"))["between"] == 0
    assert sizes_timed() == of_the_search
    succeed(*SMALL_TUNE)
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
    assert budgets == [pytest.approx(800, abs=20), pytest.approx(1000, abs=20), None]
    (deadline, unlimited) = deadlines
    assert before + 990 <= deadline <= after + 1000  # what is left is for writing
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
    said, _, command = result.stderr.splitlines()[-1].partition("; to write a bundle of the winners so far: ")
    assert said.startswith("hadagen: interrupted; every finished trial is kept in ")
    searched = options.default_bundle("sm90").read_bytes()
    assert ": 6 winners, " in succeed(*shlex.split(command)[1:])
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
    monkeypatch.setattr(searchers, "MOST_FAILURES", 1)
    FakeDevice.refusals[2] = Answer(Outcome.WRONG_ANSWER, "it is off")
    result = run(*REFINE, "256")
    said = result.stderr.splitlines()[-1]
    assert (result.exit_code, result.stdout) == (1, "")
    assert said.endswith("so many failures mean that the device fails; run hadagen doctor")
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
    assert result.exit_code == 1
    entries = Bundle.open(options.default_bundle("sm90")).entries(PROBLEM)
    assert len({entry.kernel for entry in entries}) == kernels
    said = f"for n256-float16-accurate ended as {outcome.value}: it is off; {advice}"
    assert [line.endswith(said) for line in result.stderr.splitlines() if " ended as " in line] == [True]


# ---- progress --------------------------------------------------------------------------------------------------------
SCORES = (0.5, 0.75, 1.0)


def finished(state: State, now: list[float], trials: range, of: int, step: float = 2.0) -> None:
    """Each trial takes `step` seconds."""
    for number in trials:
        now[0] += step
        state.listen(TrialFinished(make_trial(), SCORES, number, of))


def search(trials: int, finished: int = 0) -> SearchStarted:
    return SearchStarted(1, trials, finished, FakeRunner.environment, estimated=False)


def test_progress_says_how_far_the_search_is_and_what_time_is_left() -> None:
    now = [0.0]
    state = State(clock=lambda: now[0])
    state.listen(GroupStarted(1, 1000.0))
    state.listen(search(103, 2))
    assert (state.counts, state.rate, state.seconds_left) == ("2 of 103 trials", "", 1000.0)
    finished(state, now, range(3, 23), 103)
    assert (state.counts, state.rate) == ("22 of 103 trials (20 ok)", "0.5 trials/s")
    assert state.seconds_left == pytest.approx(2.0 * 81)
    state.listen(TrialFinished(make_trial(outcome=Outcome.TIMEOUT), SCORES, 23, trials=103))
    assert state.counts == "23 of 103 trials (20 ok, 1 timeout)"
    assert state.now == "n256-float16-accurate: best so far, as fraction of copy: latency 0.50, L2 0.75, memory 1.00"
    assert best_so_far((0.0, 0.0421, 1.0)).endswith(": latency -, L2 0.042, memory 1.00")  # the first is not timed
    state.listen(PairRaced(make_trial().problem, (0.01,)))
    assert state.counts == "23 of 103 trials (20 ok, 1 timeout, 1 pairs raced)"
    now[0] = 999.0
    assert state.seconds_left == 1.0
    now[0] = 1001.0
    assert state.seconds_left == 0.0


def test_the_time_left_is_that_of_all_phases_of_all_groups() -> None:
    """A fifth of the time of each group is for refining."""
    now = [0.0]
    state = State(problems=4, refine_share=0.2, clock=lambda: now[0])
    state.listen(GroupStarted(2, 60.0, (60.0, 60.0)))
    state.listen(search(100))
    finished(state, now, range(1, 41), 100, step=0.5)
    assert state.seconds_left == 40 + 120  # by the rate it would be 42.5 s, beyond the limit
    finished(state, now, range(41, 61), 100, step=0.1)
    assert state.seconds_left == pytest.approx((22 + 22 / 60 * 40) / 0.8 - 22 + 120)
    state.listen(ProblemFinished(PROBLEM, 50, SCORES))
    now[0] = 30.0
    state.listen(Refining("A", 0, 10))
    now[0] = 35.0
    state.listen(Refining("A", 5, 10))
    assert state.now == "refining between the sizes of the search: 5 of 10 kernels"
    assert state.seconds_left == 25 + 120  # more rounds may follow
    now[0] = 40.0
    state.listen(GroupStarted(1, 60.0, (60.0,)))
    assert state.seconds_left == 40 + 40  # the first took 40 s
    now[0] = 90.0
    assert state.seconds_left == 10 + 40  # not this one
    state.listen(search(50, 10))
    assert (state.finished_problems, state.counts) == (2, "70 of about 200 trials (60 ok)")
    state.listen(Writing())
    assert state.now == "writing the winners"


def test_without_a_limit_refining_lasts_as_long_as_its_kernels() -> None:
    now = [0.0]
    state = State(problems=1, refine_share=0.2, clock=lambda: now[0])
    state.listen(GroupStarted(1))
    state.listen(search(100))
    assert state.seconds_left is None
    finished(state, now, range(1, 41), 100)
    assert state.seconds_left == pytest.approx((80 + 120) / 0.8 - 80)
    state.listen(Refining("A", 0, 10))
    state.listen(Refining("B", 0, 10))
    now[0] += 5.0
    state.listen(Refining("A", 5, 10))
    assert state.seconds_left == 15.0


def test_elsewhere_than_on_a_terminal_a_line_comes_each_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with shown(2) as listen:
        listen(GroupStarted(1, 100.0, (100.0,)))
        listen(search(12))
        for number in range(1, 13):
            now[0] += 15.0
            listen(TrialFinished(make_trial(), SCORES, number, trials=12))
    lines = capsys.readouterr().err.splitlines()
    start = r"0 of 2 problems, 4 of about 24 trials \(4 ok\), [\d.]+ trials/s, \d:\d\d left; n256-float16-accurate: "
    assert re.match(start, lines[0])
    assert [line.split(", ")[1].split(" of ")[0] for line in lines] == ["4", "8", "12"]


@pytest.mark.parametrize(
    ("names", "of_problem", "of_note"), [(("A",), "", ""), (("A", "B"), " on B", "B: ")], ids=["one", "two"]
)
def test_the_progress_of_a_fleet_names_the_class_if_it_has_several(
    names: tuple[str, ...], of_problem: str, of_note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, state = make_trial().problem, State()
    with shown() as listen:

        def both(event: Event) -> None:
            listen(event)
            state.listen(event)

        summed = Summed(both, len(names))
        for i, name in enumerate(names):
            environment = replace(FakeRunner.environment, gpu=name)
            summed.of(i)(SearchStarted(1, 2, 0, environment, estimated=False))
        tell = summed.of(len(names) - 1)
        tell(RaceDisturbed(problem, "it is busy"))
        tell(TrialFinished(make_trial(), SCORES, 1, trials=2))
        assert state.now.startswith(f"{problem.key}{of_problem}: best so far")
        tell(PairRaced(problem, (0.01,)))
        assert state.now == f"{problem.key}{of_problem}: racing near-ties"
    assert capsys.readouterr().err.splitlines() == [f"{of_note}it is busy"]


@pytest.mark.parametrize(
    ("estimated", "trying"), [(True, "verifying kernels on the CPU"), (False, "measuring kernels")]
)
def test_until_the_first_trial_of_a_group_progress_says_what_is_done(estimated: bool, trying: str) -> None:
    count, state = 2 * BUILT_AT_ONCE + 1, State()
    said = [state.now]

    def listen(event: Any) -> None:
        state.listen(event)
        said.extend([state.now] * (state.now != said[-1]))

    for _ in range(2):
        listen(GroupStarted(1))
        listen(replace(search(2), estimated=estimated))
        listen(ProblemStarted(make_trial().problem, 0))
        build: Any = in_parts(lambda sources: sources, listen)
        assert build([*range(count)]) == [*range(count)]
        listen(BatchBuilt(fresh=count, known=0, failed=0))
        build([1, 2])  # the next batch
        listen(TrialFinished(make_trial(), SCORES, 1, trials=2))
        build([1, 2])
    done = ["choosing kernels", "choosing kernels for n256-float16-accurate"]
    done += [f"building kernels: {i} of {count}" for i in (0, BUILT_AT_ONCE, 2 * BUILT_AT_ONCE, count)]
    done += [trying, "n256-float16-accurate: best so far, as fraction of copy: latency 0.50, L2 0.75, memory 1.00"]
    assert said == 2 * done


def test_a_time_is_shown_as_on_a_clock() -> None:
    assert [clock_text(seconds) for seconds in (0.0, 187.9, 4000.0, None)] == ["0:00", "3:07", "66:40", "?:??"]


def test_progress_is_bars_on_a_terminal() -> None:
    from rich.console import Console

    now = [0.0]
    state = State(problems=3, clock=lambda: now[0])
    state.listen(GroupStarted(1, 60.0, (60.0, 60.0)))
    state.listen(search(20))
    finished(state, now, range(1, 11), 20)
    state.listen(TrialFinished(make_trial(outcome=Outcome.WRONG_ANSWER), SCORES, 11, trials=20))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(state)
    problems, trials, left, *best, failed = map(str.strip, captured.get().splitlines())
    assert re.fullmatch("problems +[━╺ ]+ 0/3", problems)
    assert re.fullmatch(r"trials +[━╸╺ ]+ 11/60 0\.6 trials/s", trials)
    assert left == "2:16 left"
    assert " ".join(best).startswith("n256-float16-accurate: best so far")
    assert failed == "1 wrong_answer"
    assert max(map(len, captured.get().splitlines())) <= 80


# ---- what is tuned, and in which time --------------------------------------------------------------------------------
SHIPPED = Bundle.open(shipped()["sm90"]).problems()


def test_by_default_all_that_is_shipped_is_tuned_heaviest_first_by_row_length(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TuneOptions] = []
    report = TuneReport(FakeRunner.environment, False, 0, 0, 0, 0, {}, {}, 0, "", 0.0)
    monkeypatch.setattr(tuning, "tune", lambda options, listen: asked.append(options) or report)
    result = run("tune", "--no-refine")
    assert result.stderr.splitlines()[-1].endswith("hadagen tune --no-refine more time or more trials")
    lengths = [{problem.n for problem in each.problems} for each in asked]
    assert {len(each) for each in lengths} == {1}
    assert sorted(problem for each in asked for problem in each.problems) == SHIPPED
    count = len(asked)
    page = Path(__file__).parent.parent / "docs" / "tuning.md"
    assert f"`hadagen tune`\ntakes {count} minutes at most" in page.read_text()
    said = f"tuning {len(SHIPPED)} problems for sm90, heaviest first; measuring on Test GPU; this takes at most "
    assert result.stderr.startswith(f"{said}{count}:00, 60 s for each of {count} row lengths\n")
    longest = [max(entry.us for entry in Bundle.open(shipped()["sm90"]).entries(each.problems[0])) for each in asked]
    assert longest == sorted(longest, reverse=True)
    assert {each.trials for each in asked} == {None}
    assert all(each.time_budget is not None and 0 < each.time_budget <= 60 for each in asked)


def test_without_a_gpu_the_three_heaviest_of_each_kind_are_tuned(wanted: list[TuneOptions]) -> None:
    result = run("tune", "--trials", "1")
    assert sorted(map(kind_of, wanted[0].problems), key=KINDS.index) == [kind for kind in KINDS for _ in range(3)]
    assert result.stderr.startswith("tuning 9 problems, the 3 heaviest of each kind, for sm90; there is no sm90 GPU")
    run("tune", "--trials", "1", "--kind", "rotation", "--kind", "format", "--dtype", "bfloat16")
    assert {each.io.input for each in wanted[1].problems} == {DType.BFLOAT16}
    assert sorted(map(kind_of, wanted[1].problems)) == [kind for kind in ("format", "rotation") for _ in range(3)]
    run("tune", "--trials", "1", "--kind", "format", "--n", "4096")  # named by size, so that all are tuned
    assert {each.n for each in wanted[2].problems} == {4096}
    assert len(wanted[2].problems) == sum(
        each.n == 4096 and kind_of(each) == "format" and not each.transform.real for each in SHIPPED
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kind", "format", "--n", "224"), "hadagen ships no kernels for such problems; name one with --problem"),
        (("--kind", "format", "--problem", "n64-float16-fast"), "--problem names all of a problem; leave it out, or"),
        (("--dtype", "float17"), "dtype 'float17' is not supported"),
        (("--quick", "--time-budget", "9"), "--quick and --time-budget both limit the time; leave out one of them"),
    ],
)
def test_what_cannot_be_tuned_is_a_sentence(arguments: tuple[str, ...], said: str, no_search: None) -> None:
    assert said in sentence(run("tune", *arguments), 2)


def test_a_group_has_its_minute_and_leaves_no_time_to_the_next_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [5.0]  # it took 5 s to begin
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    minutes, parts = tune.Budget(0.0, [60.0, 60.0, 60.0]), tune.Budget(0.0, [60.0, 60.0, 60.0], moves=True)
    assert [(each.end, each.until(0)) for each in (minutes, parts)] == [(180, 60), (180, 60)]
    now[0] = 20.0
    assert (minutes.until(1), parts.until(1)) == (80, 120)
    assert (tune.Budget(0.0).end, tune.Budget(0.0).until(0)) == (math.inf, math.inf)


@pytest.mark.parametrize(("option", "seconds"), [((), 60), (("--quick",), 30), (("--time-budget", "7"), 7)])
def test_all_phases_end_in_time(
    option: tuple[str, ...], seconds: float, fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement takes a second, and writing 2 s, on a clock that only they move."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trial, write, writes, sleep = FakeDevice.trial, make.make_bundle, [], time.sleep

    def slow_trial(self: FakeDevice, variant: Variant) -> Trial:
        now[0] += 1.0
        sleep(0.02)  # for other threads to see that time is over
        return trial(self, variant)

    def slow_write(*arguments: Any, **options: Any) -> Any:
        now[0] += 2.0
        writes.append(now[0])
        return write(*arguments, **options)

    monkeypatch.setattr(FakeDevice, "trial", slow_trial)
    monkeypatch.setattr(make, "make_bundle", slow_write)
    report = json.loads(succeed("tune", "--problem", "n4-float16-fast", "--json", *option))
    assert seconds - 3 <= report["seconds"] <= seconds + 8  # without limits, more than 80
    refined = len(sizes_timed()) > len(CELLS)
    assert (len(writes), refined) == ((1, False) if seconds < 9 else (2, True))  # and no file is written twice


# ---- what is said at the end -----------------------------------------------------------------------------------------
def test_winners_are_compared_with_what_calls_ran_before_by_the_times_of_this_tune(
    one_is_faster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast that was where it was measured."""
    fill()
    calls = make_trial(2, timings=times({1 << 20: 0.001, 1 << 21: 0.001}))
    write_trials(user_bundle("z.db"), [calls])
    said = succeed("tune", "--trials", "0", "--problem", PROBLEM.key, "--bundle", tmp_path / "new.db")
    assert f"{PROBLEM.key}: 100 % faster at 2 of 3 sizes, from 4,096 to 7,511 rows; the rest as before" in said
    assert "calls use them where HADAGEN_BUNDLE names this file" in said
    assert said.splitlines()[-1].endswith(f"hadagen bench --problem {PROBLEM.key}")
    report = json.loads(succeed("tune", "--trials", "0", "--problem", PROBLEM.key, "--json"))
    assert report["faster"] == [
        {"problem": PROBLEM.key, "sizes": 3, "faster": 2, "times_as_fast": 2.0, "not_compared": 0}
    ]
    said = succeed("tune", "--trials", "0", "--problem", PROBLEM.key)  # which calls run by now
    assert "no winner is more than 2 % faster than what calls ran before" in said
    assert f"calls on {H100.gpu} use them from now on" in said
    first = write_trials(user_bundle("a.db"), [calls])
    said = succeed("tune", "--trials", "0", "--problem", PROBLEM.key)
    assert f"calls on {H100.gpu} go on with {first}, which comes first" in said


def user_bundle(name: str) -> Path:
    path = options.default_bundle("sm90").with_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_gains_are_summed_up_in_few_lines() -> None:
    place = Destination.IN_PLACE

    def gain(n: int, *ratios: float | None) -> Gain:
        problem = replace(PROBLEM, transform=Transform(n))
        return Gain(problem, {(place, n << i): ratio for i, ratio in enumerate(ratios)})

    def said(*gains: Gain, is_shipped: bool = True) -> list[str]:
        return list(ending.gain_sentences(gains, {PROBLEM: Called({}, is_shipped)}))

    assert said(gain(2, 1.0, 1.01, 0.99)) == ["no winner is more than 2 % faster than what calls ran before"]
    assert said(gain(1024, 1.0, 1.03)) == ["n1024-float16-accurate: 3 % faster at 2 rows; the rest as shipped"]
    assert said(gain(1024, 1.034)) == ["n1024-float16-accurate: 3 % faster at all sizes"]
    assert said(gain(4, 1.03, 1.5, None, 1.0), is_shipped=False) == [
        "n4-float16-accurate: 3-50 % faster at 2 of 4 sizes, from 1 to 2 rows; the rest as before; 1 size not compared"
    ]
    many = [gain(2 << i, 1.0, 1.1) for i in range(9)]
    assert said(gain(1 << 12, 1.2, 1.0), *many, gain(1 << 13, 1.0))[:2] == [
        "10 of 11 problems are faster than before, by 11 % in the mean at 10 of 21 sizes; the rest as shipped",
        "n4096-float16-accurate: 20 % faster at 1 row",
    ]
    assert len(said(*many)) == 4


def test_the_end_has_at_most_ten_lines_on_a_terminal(fake_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (TINY_TUNE, (*SMALL_TUNE[:-1], "--n", "8")):
        assert 5 <= len(succeed(*arguments).splitlines()) <= 10


def test_the_program_is_named_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert output.program() == "hadagen"
    (tmp_path / ".venv" / "hadagen").touch()
    assert output.program() == ".venv/hadagen"
    (tmp_path / "hadagen").touch(0o755)
    assert output.program() == "hadagen"
