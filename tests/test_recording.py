"""Recordings: every legal variant within cut ranges, kept as it is measured, read back as it was."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run, sentence, succeed
from fake_search import CELLS, GPU, FakeRunner, arch, build, problems

from hadagen import measure
from hadagen.arch import Arch
from hadagen.cli import record as record_command
from hadagen.errors import StorageError, UsageError
from hadagen.measure import Cell, Variant
from hadagen.problem import Problem
from hadagen.regimes import Destination
from hadagen.space import Space
from hadagen.trial import Outcome, Trial
from hadagen.tuner.events import ProblemFinished, TrialFinished
from hadagen.tuner.record import RecordOptions, RecordReport, deciding_cells, record
from hadagen.tuner.recording import Recording, read_recording, write_recording

TIMED = tuple(Cell(elements, Destination.IN_PLACE, cache) for elements, cache in CELLS)
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
        from hadagen.toolchain import BuildFailure

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
    part = next((tmp_path / "parts").glob("*.part"))
    with part.open("a") as file:
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
        patch.setattr("hadagen.tuner.record.write_recording", full)
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
    monkeypatch.setattr("hadagen.tuner.record.Space", lambda problem, arch: SimpleNamespace(legal=()))
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
        with pytest.raises(StorageError, match=r"is not a recording .*; make one with hadagen dev record"):
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
        with pytest.raises(StorageError, match=rf"is not a recording \(.*{reason}.*\); make one with hadagen dev"):
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
class FakeDevice(FakeRunner):
    """Stands for a `DeviceRunner` on an H100."""

    def __init__(self, device_index: int, copy_kernels: object, *, cells: Any, give_up: float) -> None:
        super().__init__()
        self._cells = cells
        assert give_up == float("inf")

    def trial(self, variant: Variant) -> Trial:
        trial = super().trial(variant)
        (timing, *_) = trial.timings
        cells = self._cells[variant.problem]
        timings = (replace(timing, **cell._asdict(), us=timing.us + i) for i, cell in enumerate(cells))
        return replace(trial, timings=tuple(timings))

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def fake_gpu(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "device_environment", lambda index=0: FakeDevice.environment)
    monkeypatch.setattr(measure, "DeviceRunner", FakeDevice)


ONE = ("dev", "record", "--n", "64", "--dtype", "float16", "--numerics", "fast", "--contiguous")
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
    asked = ("dev", "record", *named, "--contiguous", "--like", path, "--dry-run", "--json")
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


def test_the_command_records(fake_gpu: None, tmp_path: Path) -> None:
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
    fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*ONE, *CUT, "--elements", "64K", "--out", tmp_path)
    (counted,) = json.loads(succeed(*arguments, "--dry-run", "--json"))
    monkeypatch.setattr(record_command, "MOST_VARIANTS", counted["variants"] - 1)
    assert sentence(run(*arguments), 2).startswith(f"{counted['variants']} variants are too many to measure")
    monkeypatch.setattr(record_command, "MOST_VARIANTS", counted["variants"])
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


def test_recording_needs_a_gpu_of_that_arch(fake_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = replace(FakeDevice.environment, compute_capability="8.0")
    monkeypatch.setattr(measure, "device_environment", lambda index=0: ampere)
    said = sentence(run(*ONE, *CUT, "--arch", "sm90", "--out", tmp_path), 1)
    assert said.startswith("there is no sm90 GPU here; record on a machine")
