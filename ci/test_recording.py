"""Recordings: every legal variant within cut ranges, kept as it is measured, read back, and searched again."""

import errno
import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import pytest
import search
import torch
from command_line import SMALL, sentence
from command_line import run as run_program
from command_line import succeed as succeed_in
from fake_device import FakeDevice
from fake_search import CELLS, GPU, FakeRunner, arch, build, make_trial, problems
from sample_bundle import hide_bundles
from searches import command_record
from searches.export import kernel_tuner_cache, objective, write_kernel_tuner_cache
from searches.record import RecordOptions, RecordReport, deciding_cells, record
from searches.recording import Recording, read_recording, write_recording
from searches.replay import Field, ReplayRunner, curve, default_search, random_search, run_searches, times_of
from simulate_fleet import MORE, InTurn, OneByOne
from test_cli_width import fits, terminal

from hadagen import measure
from hadagen.compiler.toolchain import BuildFailure
from hadagen.errors import StorageError, UsageError
from hadagen.measure import Cell, Variant
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space
from hadagen.problem.problem import DType, Numerics, Problem
from hadagen.problem.regimes import Destination, destinations
from hadagen.problem.trial import Outcome, Trial
from hadagen.tuner.events import ProblemFinished, TrialFinished

__all__ = ["terminal"]  # fixture
run, succeed = partial(run_program, program=search.main), partial(succeed_in, program=search.main)
TIMED = tuple(Cell(elements, Destination.IN_PLACE, regime) for elements, regime in CELLS)
NVCC = "13.0"
SHIPPED = Path(__file__).resolve().parent.parent / "docs" / "data" / "recordings"


def small() -> Arch:
    return arch().narrowed({"chunks": (1, 2), "warps": (2, 4), "min_blocks": (1,), "order": ("by_step",)})


def options(folder: Path, runner: Any = None, **fields: Any) -> RecordOptions:
    known = {
        "arch": small(),
        "cells": dict.fromkeys(problems(64, 256), TIMED),
        "build": build,
        "environment": replace(GPU, nvcc=NVCC),
    }
    return RecordOptions(runner=runner or FakeRunner(), folder=folder, **known | fields)


class Interrupted(FakeRunner):
    """Ctrl-C comes with a certain trial."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def trial(self, variant: Variant) -> Trial:
        if len(self.asked) > self._after:
            raise KeyboardInterrupt
        return super().trial(variant)


class Failing(FakeRunner):
    """A third of all kernels is wrong, and one has a time of a third of its cells."""

    def trial(self, variant: Variant) -> Trial:
        trial = super().trial(variant)
        if len(self.asked) % 3 == 0:
            return replace(trial, outcome=Outcome.WRONG_ANSWER, timings=(), detail="error 1.0\nat row 3")
        return replace(trial, timings=trial.timings[:2]) if len(self.asked) == 1 else trial


def read_all(report: RecordReport) -> dict[Problem, Recording]:
    return {problem: read_recording(path) for problem, path in report.files.items()}


# ---- ranges --------------------------------------------------------------------------------------------------------
def test_a_cut_range_contains_its_values_and_no_others() -> None:
    (problem,) = problems(4096)
    only = {"warps": (8, 2), "load": ("cp_async",)}
    legal = Space(problem, arch().narrowed(only)).legal
    assert legal
    expected = {knobs for knobs in Space(problem, arch()).legal if knobs.warps in (2, 8) and knobs.load == "cp_async"}
    assert set(legal) == expected
    assert arch().narrowed(only).search["warps"] == (2, 8)
    assert arch().narrowed({}) == arch()


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ({"warp": (2,)}, "knob 'warp' is not known; did you mean warps"),
        ({"warps": (3,)}, "knob warps = 3 is not searched on sm90; choose one of 1, 2, 4, 8"),
        ({"warps": ("2",)}, "knob warps = '2' is not searched on sm90"),
        ({"warps": ()}, "knob warps is left no value to search; give at least one of 1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_cut(only: dict[str, tuple[int | str, ...]], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        arch().narrowed(only)


def test_cells_are_those_that_decide() -> None:
    (problem,) = problems(1024)
    rows = deciding_cells(Problem.of(14336, "float16", order=28), [1 << 16, 1 << 14, 512, 1 << 13], l2_bytes=50 << 20)
    assert [cell.elements for cell in rows] == [14336, 5 * 14336]
    cells = deciding_cells(problem, [1 << 26, 512, 1 << 20], l2_bytes=50 << 20)
    assert [(cell.elements, cell.cache.value) for cell in cells] == [(1 << 20, "hot"), (1 << 26, "cold")]
    for key in (problem.key, "n4096-after-silu_mul-float16-accurate", "n1024-float16-to-fp8_row_1024-accurate"):
        each = Problem.parse(key)
        found = {cell.destination for cell in deciding_cells(each, [1 << 16, 1 << 26], l2_bytes=50 << 20)}
        assert found == {destinations(each)[0]}


# ---- recording -----------------------------------------------------------------------------------------------------
def test_every_legal_variant_is_recorded_once(tmp_path: Path) -> None:
    events: list[Any] = []
    runner = FakeRunner()
    report = record(options(tmp_path, runner), events.append)
    recordings = read_all(report)
    assert set(recordings) == set(problems(64, 256))
    for problem, recording in recordings.items():
        legal = Space(problem, small()).legal
        assert [trial.knobs for trial in recording.trials] == [knobs.to_dict() for knobs in legal]
        assert (recording.environment.gpu, recording.environment.nvcc) == (GPU.gpu, NVCC)
        assert {len(trial.timings) for trial in recording.trials} == {len(CELLS)}
        assert Space(problem, recording.target).legal == legal
        assert report.outcomes[problem] == {Outcome.OK: len(legal)}
    assert not list(tmp_path.glob("*.part"))
    finished = [event for event in events if isinstance(event, TrialFinished)]
    assert len(finished) == report.finished == finished[-1].trials == finished[-1].finished
    assert sum(isinstance(event, ProblemFinished) for event in events) == 2
    # Those whose kernel others had before are not measured again.
    again = sum("same kernel as" in event.trial.detail for event in finished)
    assert len(runner.asked) == report.finished - again


def test_variants_are_not_measured_in_the_order_of_their_knobs(tmp_path: Path) -> None:
    """Or what drifts would look like the effect of one."""
    (problem,) = problems(64)
    runner = FakeRunner()
    record(options(tmp_path, runner, cells={problem: TIMED}))
    legal = [knobs.to_dict() for knobs in Space(problem, small()).legal]
    places = [legal.index(knobs) for _, knobs in runner.asked]
    assert places != sorted(places)


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    for recording in read_all(record(options(tmp_path, Failing()))).values():
        assert Counter(trial.outcome for trial in recording.trials)[Outcome.WRONG_ANSWER] > 1
        assert min(len(trial.timings) for trial in recording.trials if trial.outcome is Outcome.OK) in (1, 3)
        assert "error 1.0" in {trial.detail for trial in recording.trials}
        copy = tmp_path / "copy.jsonl.gz"
        write_recording(recording, copy)
        assert read_recording(copy) == recording
        first = copy.read_bytes()
        write_recording(recording, copy)
        assert copy.read_bytes() == first


def test_variants_that_do_not_compile_are_recorded_too(tmp_path: Path) -> None:
    def failing(sources: Iterable[Any]) -> list[Any]:
        return [
            BuildFailure("k", "no room\nat all") if i % 2 else kernel for i, kernel in enumerate(build(list(sources)))
        ]

    for recording in read_all(record(options(tmp_path, build=failing))).values():
        failed = [trial for trial in recording.trials if trial.outcome is Outcome.COMPILE_FAILED]
        assert failed
        assert {trial.detail for trial in failed} == {"no room"}


@pytest.mark.parametrize("after", [0, 5, 40])
def test_an_interrupted_recording_goes_on_where_it_was(tmp_path: Path, after: int) -> None:
    whole = read_all(record(options(tmp_path / "whole")))
    first = record(options(tmp_path / "parts", Interrupted(after)))
    assert first.interrupted
    with next((tmp_path / "parts").glob("*.part")).open("a") as file:
        file.write('{"knobs": [1, 2')  # a line that was cut off
    second = record(options(tmp_path / "parts"))
    assert not second.interrupted
    assert first.finished + second.finished == sum(len(recording.trials) for recording in whole.values())
    for problem, recording in read_all(second).items():
        assert [trial.timings for trial in recording.trials] == [trial.timings for trial in whole[problem].trials]
    third = record(options(tmp_path / "parts"))
    assert (third.finished, set(third.files)) == (0, set(whole))


def test_a_recording_whose_last_write_failed_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    wanted = options(tmp_path, cells=dict.fromkeys(problems(64), TIMED))
    with monkeypatch.context() as patch:
        patch.setattr("searches.record.write_recording", full)
        with pytest.raises(StorageError, match="No space left"):
            record(wanted)
    report = record(wanted)
    assert report.finished == 0
    ((path, recording),) = [(path, read_recording(path)) for path in report.files.values()]
    assert len(recording.trials) == len(Space(recording.problem, small()).legal)
    assert list(tmp_path.iterdir()) == [path]
    path.with_suffix(".part").write_text("as before the whole file was written")
    record(wanted)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_without_a_whole_line_is_begun_anew(tmp_path: Path) -> None:
    wanted = options(tmp_path, cells=dict.fromkeys(problems(64), TIMED))
    (tmp_path / "n64-float16-fast.jsonl.part").write_text('{"hadagen rec')  # as on a full disk
    assert set(record(wanted).files) == set(problems(64))


def test_lines_that_are_no_text_are_not_continued(tmp_path: Path) -> None:
    part = tmp_path / "n64-float16-fast.jsonl.part"
    part.write_bytes(b"\xff\xfe\n")
    with pytest.raises(StorageError, match=r"\.part is there already and of other ranges"):
        record(options(tmp_path, cells=dict.fromkeys(problems(64), TIMED)))
    assert part.read_bytes() == b"\xff\xfe\n"


def test_a_recording_of_something_else_is_not_continued(tmp_path: Path) -> None:
    record(options(tmp_path / "a"))
    record(options(tmp_path / "b", Interrupted(3)))
    other = options(tmp_path).arch.narrowed({"chunks": (1,)})
    for folder in ("a", "b"):
        with pytest.raises(StorageError, match="is there already and of other ranges, cells or another device; name"):
            record(options(tmp_path / folder, arch=other))
        with pytest.raises(StorageError, match="is there already"):
            record(options(tmp_path / folder, environment=replace(GPU, gpu="Another")))


def test_a_recording_of_what_is_no_longer_legal_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = dict.fromkeys(problems(64), TIMED)
    record(options(tmp_path, Interrupted(3), cells=cells))
    monkeypatch.setattr("searches.record.Space", lambda problem, arch: SimpleNamespace(legal=()))
    with pytest.raises(StorageError, match="is there already and of other ranges"):
        record(options(tmp_path, cells=cells))


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    (path,) = record(options(tmp_path, cells=dict.fromkeys(problems(64), TIMED))).files.values()
    header, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    other = json.loads(header) | {"hadagen recording": 99}
    unknown = json.loads(header)
    unknown["ranges"] = {"wraps": [1], **unknown["ranges"]}
    damaged = tmp_path / "damaged.jsonl.gz"
    for content in (
        b"",
        b"text",
        path.read_bytes()[:-20],
        gzip.compress(b"[]"),
        gzip.compress(b"{"),
        gzip.compress(json.dumps(other).encode()),
        gzip.compress("\n".join([header, lines[0][:-9]]).encode()),
        gzip.compress("\n".join([header, "{}"]).encode()),
        gzip.compress("\n".join([json.dumps(unknown), *lines]).encode()),
        gzip.compress(b"[" * 100_000),
        gzip.compress(bytes((1 << 26) + 1)),
    ):
        damaged.write_bytes(content)
        with pytest.raises(StorageError, match=r"is not a recording .*; make one with python ci/search.py record"):
            read_recording(damaged)
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        read_recording(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="cannot be read: Not a regular file"):
        read_recording(tmp_path / "pipe")


def test_times_that_are_none_are_damage(tmp_path: Path) -> None:
    (path,) = record(options(tmp_path, cells=dict.fromkeys(problems(64), TIMED))).files.values()
    header, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    trial = json.loads(next(line for line in lines if '"outcome":"ok"' in line))
    first, *others = trial["us"]
    for times, reason in (
        ([[0.0, *first[1:]], *others], "are no times"),
        ([first, *others[:-1], [*first[:3], -1.0]], "are no times"),
        ([[math.nan] * 4, *others], "are no times"),
        ([[math.inf] * 4, *others], "are no times"),
        ([first[:3], *others], "TypeError"),
        (others, "shorter"),
        ([], "a trial is ok without a time"),
    ):
        path.write_bytes(gzip.compress("\n".join([header, json.dumps(trial | {"us": times})]).encode()))
        with pytest.raises(StorageError, match=rf"is not a recording \(.*{reason}.*\); make one with python ci"):
            read_recording(path)


def test_a_knob_that_came_later_has_its_default(tmp_path: Path) -> None:
    (path,) = record(options(tmp_path, cells=dict.fromkeys(problems(64), TIMED))).files.values()
    recording = read_recording(path)
    older = replace(
        recording,
        ranges={name: values for name, values in recording.ranges.items() if name != "stages"},
        trials=tuple(trial for trial in recording.trials if trial.knobs["stages"] == 1),
    )
    write_recording(older, path)
    assert read_recording(path) == older
    assert older.target.search["stages"] == (1,)


# ---- the command -----------------------------------------------------------------------------------------------------
ONE = ("record", "--n", "64", "--dtype", "float16", "--numerics", "fast", "--contiguous")
CUT = tuple(
    f"--only={cut}"
    for cut in (
        "chunks=1",
        "warps=4",
        "load=plain",
        "min_blocks=1",
        "low_bits=shuffle",
        "order=by_step",
        "grid=tiles",
    )
)


def test_the_command_counts_without_a_gpu(machine: None) -> None:
    (counted,) = json.loads(succeed(*ONE, *CUT, "--dry-run", "--json"))
    assert 0 < counted["variants"] < 20
    assert succeed(*ONE, *CUT, "--dry-run").split()[-1] == str(counted["variants"])


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.jsonl.gz")), ids=lambda path: path.name)
def test_the_command_finds_the_variants_of_a_shipped_recording_again(machine: None, path: Path) -> None:
    recording = read_recording(path)
    problem = recording.problem
    named = ("--n", str(problem.n), "--dtype", problem.io.input.value, "--numerics", problem.io.numerics.value)
    asked = ("record", *named, "--contiguous", "--like", path, "--dry-run", "--json")
    (counted,) = json.loads(succeed(*asked))
    assert counted["variants"] == len(recording.trials)
    (cut,) = json.loads(succeed(*asked, "--only", "chunks=2"))
    assert cut["variants"] == sum(trial.knobs["chunks"] == 2 for trial in recording.trials)


def test_trials_of_knobs_that_are_gone_are_kept_apart() -> None:
    recording = read_recording(SHIPPED / "n128-float16-fast.jsonl.gz")
    assert len(recording.trials) == len(recording.former) == 360
    assert {trial.knobs["store"] for trial in recording.former} == {"streaming"}
    assert "store" not in recording.ranges
    assert not any("store" in trial.knobs for trial in recording.trials)


def test_the_ranges_of_another_arch_are_refused(machine: None, tmp_path: Path) -> None:
    recording = read_recording(SHIPPED / "n128-float16-fast.jsonl.gz")
    write_recording(replace(recording, arch="sm80", trials=()), tmp_path / "other.jsonl.gz")
    said = sentence(run(*ONE, "--like", tmp_path / "other.jsonl.gz", "--dry-run"), 2)
    assert said == f"{tmp_path / 'other.jsonl.gz'} is of sm80, not of sm90; name a recording of sm90"


def test_the_command_records(machine: None, fake_gpu: None, tmp_path: Path) -> None:
    arguments = (*ONE, *CUT, "--elements", "64K,64M", "--out", tmp_path / "new")
    (counted,) = json.loads(succeed(*arguments, "--dry-run", "--json"))
    report = json.loads(succeed(*arguments, "--json"))
    assert report["trials"] == counted["variants"]
    (found,) = report["recordings"]
    recording = read_recording(found["file"])
    assert len(recording.trials) == found["variants"] == found["outcomes"]["ok"] == counted["variants"]
    assert [(cell.elements, cell.cache.value) for cell in recording.cells] == [(1 << 16, "hot"), (1 << 26, "cold")]
    assert recording.environment.nvcc
    assert "0 new trials in 0:00, measured on Test GPU" in succeed(*arguments)


def test_the_command_records_as_many_variants_as_the_limit(
    machine: None, fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*ONE, *CUT, "--elements", "64K", "--out", tmp_path)
    (counted,) = json.loads(succeed(*arguments, "--dry-run", "--json"))
    monkeypatch.setattr(command_record, "MOST_VARIANTS", counted["variants"] - 1)
    assert sentence(run(*arguments), 2).startswith(f"{counted['variants']} variants are too many to measure")
    monkeypatch.setattr(command_record, "MOST_VARIANTS", counted["variants"])
    succeed(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "warps"), "--only 'warps' is not of the form KNOB=V1,V2,...; write for example --only warps=2,4"),
        (("--only", "warps=1,"), "--only 'warps=1,' is not of the form KNOB=V1,V2,..."),
        (("--only", "warps=1", "--only", "warps=2"), "--only names warps twice; give all its values at once"),
        (("--only", "warps=3"), "knob warps = 3 is not searched on sm90; choose one of 1, 2, 4, 8, 16, 32"),
        (("--only", "cluster=8"), "no knobs of these ranges are legal for n64-float16-fast; give more values"),
        (("--elements", "64k"), "--elements '64k' is not a size; write for example 65536,1M"),
        (("--elements", "9M"), "--elements 9M is not supported; give powers of two from 8192 to 268435456, or 384K"),
        (("--n", "32768", "--elements", "8K"), "--elements 8K holds no row of 32768 elements; give a larger size"),
        (("--n", "4096"), "variants are too many to measure, the limit is 20000; name fewer values"),
    ],
)
def test_bad_usage_is_a_sentence(machine: None, arguments: tuple[str, ...], said: str) -> None:
    assert said in sentence(run(*ONE, *arguments), 2)


def test_recording_needs_a_gpu(machine: None) -> None:
    said = sentence(run(*ONE, *CUT), 1)
    assert said == "there is no sm90 GPU here; record on a machine that has one, or count with --dry-run"


def test_recording_needs_a_gpu_of_that_arch(
    machine: None, fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ampere = replace(FakeDevice.environment, compute_capability="8.0")
    monkeypatch.setattr(measure, "device_environment", lambda index=0: ampere)
    said = sentence(run(*ONE, *CUT, "--arch", "sm90", "--out", tmp_path), 1)
    assert said.startswith("there is no sm90 GPU here; record on a machine")


# ---- searches on recordings ------------------------------------------------------------------------------------------
(PROBLEM,) = problems(1024)


def few(**only: tuple[int | str, ...]) -> Arch:
    """Ranges that leave some hundred variants."""
    return arch().narrowed({"low_bits": ("mma",), "shared_layout": ("linear",), **only})


def make_recording(problem: Problem, target: Arch) -> Recording:
    empty = Recording(problem, "sm90", dict(target.search), TIMED, GPU, "2026-01-02T03:04:05+00:00")
    trials = [empty.as_kept(_beside_copies(make_trial(problem, k.to_dict()))) for k in Space(problem, target).legal]
    # Every seventh is wrong, so some of the best are.
    wrong = [replace(trial, outcome=Outcome.WRONG_ANSWER, timings=()) for trial in trials]
    return replace(empty, trials=tuple(wrong[i] if i % 7 == 3 else trials[i] for i in range(len(trials))))


def _beside_copies(trial: Trial) -> Trial:
    """The trial, with a copy that takes longer the more elements there are."""
    return replace(trial, timings=tuple(replace(each, copy_us=each.elements / (1 << 16)) for each in trial.timings))


@cache
def field_of(problem: Problem = PROBLEM) -> Field:
    return Field.of(make_recording(problem, few()))


@cache
def small_field() -> Field:
    """Of which a budget covers all."""
    return Field.of(
        make_recording(PROBLEM, few(cluster=(1,), grid=("tiles",), warps=(4,), order=("by_step",), min_blocks=(1,)))
    )


def test_replay_gives_back_what_was_recorded() -> None:
    first, second = (make_trial(PROBLEM, Knobs(warps=warps).to_dict()) for warps in (2, 4))
    again = replace(first, seconds=3.0)
    replayed = ReplayRunner([first, second, again])
    asked = [Variant(PROBLEM, each.knobs) for each in (second, first, second)]
    assert list(replayed.run(asked)) == list(zip(asked, (second, again, second), strict=True))
    assert replayed.environment == GPU


@pytest.mark.parametrize(
    "variant",
    [
        Variant(PROBLEM, {"warps": 5}),
        Variant(PROBLEM, {}),
        Variant(PROBLEM.with_io(numerics=Numerics.ACCURATE), Knobs().to_dict()),
    ],
)
def test_replay_calls_the_unknown_illegal(variant: Variant) -> None:
    ((_, answer),) = ReplayRunner([make_trial(PROBLEM, Knobs().to_dict())]).run([variant])
    assert (answer.outcome, answer.kernel, answer.timings) == (Outcome.ILLEGAL, None, ())
    assert (answer.problem, answer.knobs) == (variant.problem, variant.knobs)


def keys(order: object) -> list[str]:
    return [str(trial.knobs) for trial in order]  # type: ignore[attr-defined]


# ---- laws ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("search", [default_search, random_search])
def test_a_search_of_everything_ends_at_the_best(search: object) -> None:
    field = small_field()
    assert field.budget == len(field.trials) < 60
    order = search(field, 0)  # type: ignore[operator]
    assert sorted(keys(order)) == sorted(keys(field.trials))
    assert curve([field], [[order]]).final == 1.0


@pytest.mark.parametrize("search", [default_search, random_search])
def test_a_search_tries_nothing_twice_and_keeps_to_its_budget(search: object) -> None:
    field = field_of()
    assert len(field.trials) > 100
    order = search(field, 1)  # type: ignore[operator]
    assert len(set(keys(order))) == len(order) == field.budget == max(60, math.ceil(len(field.trials) / 10))
    assert set(keys(order)) <= set(keys(field.trials))


def test_curves_never_fall_and_a_seed_has_one() -> None:
    fields = [field_of(), small_field()]
    curves = run_searches(fields, range(2))
    for each in curves.values():
        assert all(a <= b for a, b in pairwise(each.values))
        assert each.values[0] > 0
        assert each.values[-1] <= 1
        assert len(each.values) == max(field.budget for field in fields)
        assert each.final == pytest.approx(geometric_mean(each.at_budget))
    assert run_searches(fields, range(2)) == curves
    assert run_searches(fields, range(2, 4)) != curves


def test_the_default_search_is_ahead_of_chance() -> None:
    curves = run_searches([field_of()], range(3))
    assert curves["hadagen"].final > curves["random"].final


def test_a_search_with_many_variants_in_progress_finds_kernels_that_are_as_good() -> None:
    """After as many times the evaluations as `simulate_fleet` allows."""
    timed = [replace(trial, seconds=sum(each.us for each in trial.timings)) for trial in field_of().trials]
    field = replace(field_of(), trials=tuple(timed))
    more = replace(field, evaluations=round(MORE * field.budget))
    one_by_one, in_turn = (
        curve([each], [[default_search(each, seed, work) for seed in range(3)]]).final
        for each, work in ((field, OneByOne), (more, InTurn))
    )
    assert in_turn >= one_by_one


def test_a_curve_says_what_was_found_when() -> None:
    """Of two cells, one evaluation after another."""
    recording = make_recording(PROBLEM, few())
    ok = [trial for trial in recording.trials if trial.outcome is Outcome.OK][:3]
    times = ([4.0, 9.0], [1.0, 9.0], [4.0, 3.0])
    cells = TIMED[:2]
    trials = [_with_times(trial, cells, us) for trial, us in zip(ok, times, strict=True)]
    field = Field.of(replace(recording, cells=cells, trials=tuple(trials)))
    assert list(field.best.values()) == [1.0, 3.0]
    failed = replace(trials[1], outcome=Outcome.UNSTABLE)
    late = [failed, trials[2], failed, trials[1]]  # beyond the budget
    orders: list[list[Trial]] = [trials, [failed, trials[2], trials[1]], [trials[1]], [], late]
    # Means of 1/4 and 3/9, of 1 and 3/9, of 1/4 and 1, and of 1 and 1.
    values = [[12**-0.5, 3**-0.5, 1.0], [12**-0.5, 4**-0.5, 1.0], [3**-0.5] * 3, [12**-0.5] * 3]
    values += [[12**-0.5, 4**-0.5, 4**-0.5]]
    for order, expected in zip(orders, values, strict=True):
        assert curve([field], [[order]]).values == pytest.approx(expected)
    together = [geometric_mean(each) for each in zip(*values, strict=True)]
    assert curve([field], [orders]).values == pytest.approx(together)
    both = curve([field, Field.of(replace(recording, cells=cells, trials=tuple(trials[:2])))], [[[]], [[]]])
    worst = [12**-0.5, 4**-0.5]  # and so it stays where a search finds nothing, of the shorter one too
    assert (both.at_budget, both.values) == (pytest.approx(worst), pytest.approx([geometric_mean(worst)] * 3))


@pytest.mark.parametrize(("variants", "budget"), [(59, 59), (61, 60), (600, 60), (601, 61), (6000, 600)])
def test_a_search_is_judged_after_a_tenth_of_the_variants(variants: int, budget: int) -> None:
    assert replace(field_of(), trials=field_of().trials[:1] * variants).budget == budget


def _with_times(trial: Trial, cells: tuple[Cell, ...], us: list[float]) -> Trial:
    timings = [replace(trial.timings[0], **cell._asdict(), us=each) for cell, each in zip(cells, us, strict=True)]
    return replace(trial, timings=tuple(timings))


def test_what_is_no_longer_legal_is_left_out() -> None:
    recording = make_recording(PROBLEM, few())
    odd = replace(recording.trials[0], knobs={**recording.trials[0].knobs, "chunks": 1, "warps": 1})
    assert Field.of(replace(recording, trials=(odd, *recording.trials))).trials == field_of().trials
    with pytest.raises(UsageError, match="no kernel that the recording of n1024-float16-fast has is legal and right"):
        Field.of(replace(recording, trials=(odd,)))


def test_a_search_is_judged_by_the_best_of_knobs_that_are_gone_too() -> None:
    field = field_of()
    best = min(field.recording.trials, key=lambda trial: sum(times_of(trial).values()) or math.inf)
    faster = tuple(replace(timing, us=timing.us / 2) for timing in best.timings)
    former = replace(best, knobs={**best.knobs, "store": "streaming"}, timings=faster)
    judged = Field.of(replace(field.recording, former=(former,)))
    assert (judged.trials, judged.best) == (field.trials, {**field.best, **times_of(former)})
    assert judged.worst == field.worst


# ---- Kernel Tuner ----------------------------------------------------------------------------------------------------
def test_an_export_has_the_same_times(tmp_path: Path) -> None:
    recording = small_field().recording
    exported = json.loads(write_kernel_tuner_cache(recording, tmp_path / "new").read_text())
    assert exported == kernel_tuner_cache(recording)
    names = exported["tune_params_keys"]
    assert list(exported["tune_params"]) == names == list(recording.ranges)
    assert len(exported["cache"]) == len(recording.trials)
    for trial in recording.trials:
        entry = exported["cache"][",".join(str(trial.knobs[name]) for name in names)]
        assert {name: entry[name] for name in names} == trial.knobs
        if trial.outcome is not Outcome.OK:
            assert (entry["time"], entry["us"]) == ("RuntimeFailedConfig", [])
            continue
        assert entry["us"] == list(times_of(trial).values())
        assert entry["time"] == objective(trial) == pytest.approx(geometric_mean(entry["times"]))


def test_what_did_not_compile_says_so() -> None:
    recording = small_field().recording
    failed = replace(recording.trials[0], outcome=Outcome.COMPILE_FAILED, timings=())
    (entry,) = kernel_tuner_cache(replace(recording, trials=(failed,)))["cache"].values()
    assert entry["time"] == "CompilationFailedConfig"


# ---- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    write_recording(small_field().recording, paths[0])
    write_recording(field_of().recording, paths[1])
    return paths


def test_the_command_prints_curves(files: list[Path]) -> None:
    report = json.loads(succeed("replay", *files, "--seeds", "2", "--json"))
    curves = run_searches([small_field(), field_of()], range(2))
    assert {name: tuple(each["curve"]) for name, each in report["searches"].items()} == {
        name: each.values for name, each in curves.items()
    }
    assert [problem["budget"] for problem in report["problems"]] == [small_field().budget, field_of().budget]
    lines = succeed("replay", *files, "--seeds", "2").splitlines()
    assert lines[0].startswith("Test GPU, 2 seeds: ")
    assert lines[2].split() == ["evaluations", "hadagen", "random"]
    (final,) = (line for line in lines if line.startswith("budget"))
    assert final.split()[1:] == [f"{each.final:.4f}" for each in curves.values()]
    assert lines[-1].split()[-2:] == [f"{each.at_budget[1]:.4f}" for each in curves.values()]


def test_a_search_that_was_interrupted_has_no_curve(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: ReplayRunner, variants: object) -> Iterator[tuple[Variant, Trial]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReplayRunner, "run", interrupted)
    result = run("replay", *files)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "hadagen: interrupted; start the same command again"


def test_the_command_exports(files: list[Path], tmp_path: Path) -> None:
    (written,) = succeed("replay", files[0], "--export", tmp_path / "caches").splitlines()
    assert json.loads(Path(written).read_text()) == kernel_tuner_cache(small_field().recording)
    succeed("replay", files[0], "--export", tmp_path / "caches")  # an earlier export is replaced
    Path(written).write_text('{"notes": "not ours"}')
    said = sentence(run("replay", files[0], "--export", tmp_path / "caches"), 1)
    assert said.startswith(f"{written} is there already and is not an export of hadagen; ")
    assert Path(written).read_text() == '{"notes": "not ours"}'


def test_of_two_recordings_of_a_problem_none_is_exported(files: list[Path], tmp_path: Path) -> None:
    said = sentence(run("replay", *files, "--export", tmp_path / "caches"), 2)
    assert said.startswith(f"{files[0]} and {files[1]} are both of {PROBLEM.key}; export one of them")
    assert not (tmp_path / "caches").exists()


def test_bad_usage_of_a_replay_is_a_sentence(files: list[Path], tmp_path: Path) -> None:
    assert sentence(run("replay", *files, "--seeds", "0"), 2) == "--seeds 0 is not supported; give 1 to 1000"
    assert "cannot be read: No such file" in sentence(run("replay", tmp_path / "absent"), 1)
    write_recording(replace(small_field().recording, environment=replace(GPU, gpu="Another")), files[0])
    said = sentence(run("replay", *files), 2)
    assert said == "the recordings come from several devices (Another, Test GPU); replay the recordings of one device"
    (tmp_path / "file").touch()
    assert "cannot be written" in sentence(run("replay", files[0], "--export", tmp_path / "file" / "in"), 1)


@pytest.mark.gpu
def test_what_is_recorded_can_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two types, whose 8M elements are decided in L2 and in memory."""
    hide_bundles(tmp_path, monkeypatch)
    cut = ("chunks=2", "warps=4", "low_bits=mma", "order=by_step", "load=plain", "min_blocks=1")
    arguments = ["record", "--n", "256", "--dtype", "float16", "--dtype", "float32", "--numerics", "accurate"]
    arguments += [
        "--contiguous",
        *(f"--only={each}" for each in cut),
        "--elements",
        "64K,8M",
        "--out",
        str(tmp_path / "new"),
    ]
    report = json.loads(succeed(*arguments, "--json"))
    for found in report["recordings"]:
        recording = read_recording(found["file"])
        assert found["outcomes"] == {"ok": found["variants"]}
        assert {len(trial.timings) for trial in recording.trials} == {2}
        large = "hot" if recording.problem.io.input is DType.FLOAT16 else "cold"
        assert [cell.cache.value for cell in recording.cells] == ["hot", large]
        assert recording.environment.gpu == torch.cuda.get_device_name(0)
    again = json.loads(succeed(*arguments, "--json"))
    assert (again["trials"], again["recordings"]) == (0, report["recordings"])
    replayed = json.loads(succeed("replay", *(found["file"] for found in report["recordings"]), "--json"))
    assert [search["curve"][-1] for search in replayed["searches"].values()] == [1.0, 1.0]


def test_every_line_of_a_replay_fits(terminal: None) -> None:
    fits(run("replay", min(SHIPPED.glob("*.gz")), "--seeds", "1"))


def test_every_line_of_a_recording_fits(terminal: None, machine: None, fake_gpu: None, tmp_path: Path) -> None:
    fits(run("record", "--dry-run", "--n", "2-4"))
    fits(run("record", *SMALL, "--contiguous", "--only", "warps=2", "--out", tmp_path / "recordings"))
