"""Searches on recordings: curves, their laws, and the same recordings as caches of Kernel Tuner."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean

import pytest
from command_line import run, sentence, succeed
from fake_search import CELLS, GPU, arch, make_trial, problems
from simulate_fleet import MORE, InTurn, OneByOne

from hadagen.arch import Arch
from hadagen.errors import UsageError
from hadagen.measure import Cell, ReplayRunner, Variant
from hadagen.problem import Problem
from hadagen.regimes import Destination
from hadagen.space import Space
from hadagen.trial import Outcome, Trial
from hadagen.tuner.export import kernel_tuner_cache, objective, write_kernel_tuner_cache
from hadagen.tuner.recording import Recording, write_recording
from hadagen.tuner.replay import Field, curve, default_search, random_search, run_searches, times_of

TIMED = tuple(Cell(elements, Destination.IN_PLACE, cache) for elements, cache in CELLS)
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
    short = Field.of(replace(recording, cells=cells, trials=tuple(trials[:2])))
    both = curve([field, short], [[[]], [[]]])
    worst = [12**-0.5, 4**-0.5]  # and so it stays where a search finds nothing, of the shorter one too
    assert both.at_budget == pytest.approx(worst)
    assert both.values == pytest.approx([geometric_mean(worst)] * 3)


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
    assert judged.trials == field.trials
    assert judged.best == {**field.best, **times_of(former)}
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
    report = json.loads(succeed("dev", "replay", *files, "--seeds", "2", "--json"))
    curves = run_searches([small_field(), field_of()], range(2))
    assert {name: tuple(each["curve"]) for name, each in report["searches"].items()} == {
        name: each.values for name, each in curves.items()
    }
    assert [problem["budget"] for problem in report["problems"]] == [small_field().budget, field_of().budget]
    lines = succeed("dev", "replay", *files, "--seeds", "2").splitlines()
    assert lines[0].startswith("Test GPU, 2 seeds: ")
    assert lines[2].split() == ["evaluations", "hadagen", "random"]
    (final,) = (line for line in lines if line.startswith("budget"))
    assert final.split()[1:] == [f"{each.final:.4f}" for each in curves.values()]
    assert lines[-1].split()[-2:] == [f"{each.at_budget[1]:.4f}" for each in curves.values()]


def test_a_search_that_was_interrupted_has_no_curve(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: ReplayRunner, variants: object) -> Iterator[tuple[Variant, Trial]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReplayRunner, "run", interrupted)
    result = run("dev", "replay", *files)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "hadagen: interrupted; start the same command again"


def test_the_command_exports(files: list[Path], tmp_path: Path) -> None:
    (written,) = succeed("dev", "replay", files[0], "--export", tmp_path / "caches").splitlines()
    assert json.loads(Path(written).read_text()) == kernel_tuner_cache(small_field().recording)
    succeed("dev", "replay", files[0], "--export", tmp_path / "caches")  # an earlier export is replaced
    Path(written).write_text('{"notes": "not ours"}')
    said = sentence(run("dev", "replay", files[0], "--export", tmp_path / "caches"), 1)
    assert said.startswith(f"{written} is there already and is not an export of hadagen; ")
    assert Path(written).read_text() == '{"notes": "not ours"}'


def test_of_two_recordings_of_a_problem_none_is_exported(files: list[Path], tmp_path: Path) -> None:
    said = sentence(run("dev", "replay", *files, "--export", tmp_path / "caches"), 2)
    assert said.startswith(f"{files[0]} and {files[1]} are both of {PROBLEM.key}; export one of them")
    assert not (tmp_path / "caches").exists()


def test_bad_usage_is_a_sentence(files: list[Path], tmp_path: Path) -> None:
    assert sentence(run("dev", "replay", *files, "--seeds", "0"), 2) == "--seeds 0 is not supported; give 1 to 1000"
    assert "cannot be read: No such file" in sentence(run("dev", "replay", tmp_path / "absent"), 1)
    other = small_field().recording
    write_recording(replace(other, environment=replace(GPU, gpu="Another")), files[0])
    said = sentence(run("dev", "replay", *files), 2)
    assert said == "the recordings come from several devices (Another, Test GPU); replay those of one"
    (tmp_path / "file").touch()
    assert "cannot be written" in sentence(run("dev", "replay", files[0], "--export", tmp_path / "file" / "in"), 1)
