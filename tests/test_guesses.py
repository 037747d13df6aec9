"""Kernels of problems with a matrix or signs that no bundle has, from the knobs of problems that one has."""

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_compilers import needs_nvrtc
from sample_bundle import hide_bundles, write
from sample_trials import H100, H200, PROBLEM, launch_for, make_kernel, make_trial, times
from test_runtime_kernels import Loader, find, loader

import hadagen
from hadagen import Match, UsageError
from hadagen.compiler import recipes
from hadagen.errors import ToolchainError
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import build_plan
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination
from hadagen.problem.trial import Provenance, Trial, recipe_digest
from hadagen.runtime.choose import bundles, tables
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import choose_from_bundles, is_settled
from hadagen.runtime.choose.guesses import nearest_problems
from hadagen.runtime.launch import autotune, kernels, loading
from hadagen.tuning_db.winners import WinnerCell

__all__ = ["loader"]  # a fixture
SIGNED = Problem.parse("n256-signed-float16-accurate")
HERE = Device("sm90", H100.gpu)


def trial(key: str, chunks: int = 1, **fields: Any) -> Trial:
    """A winner in place, of 32 rows unless its timings are given."""
    problem = Problem.parse(key)
    kernel = make_kernel(b"cubin of %s %d" % (key.encode(), chunks), launch=launch_for(problem))
    timings = fields.pop("timings", times({32 * problem.n: 2.0}))
    return make_trial(chunks, problem=problem, kernel=kernel, timings=timings, **fields)


def pin(directory: Path, trials: Sequence[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    """These winners are in the only bundle."""
    hide_bundles(directory, monkeypatch)
    selection = {
        WinnerCell(each.problem, "sm90", each.environment.gpu, Destination.IN_PLACE, timing.elements): each
        for each in trials
        for timing in each.timings
    }
    monkeypatch.setenv(bundles.VARIABLE, str(write(directory / "pinned.db", selection)))


def problems(*keys: str) -> list[Problem]:
    return [Problem.parse(key) for key in keys]


@pytest.mark.parametrize(
    ("wanted", "known"),
    [
        ("n256-signed-float16-fast", ["n256-float16-fast", "n512-signed-float16-fast", "n64-float16-fast"]),
        (
            "n3584-k28-signed-float16-fast",
            [
                "n3584-k28-float16-fast",
                "n4608-k36-signed-float16-fast",  # the order is 1.29 times as large
                "n4608-k36-float16-fast",
                "n14336-k28-float16-fast",  # two bits longer
                "n4096-k4-float16-fast",
            ],
        ),
        (
            "n4096-k64-real-float16-fast",
            ["n4096-k64-real-signed-float16-fast", "n4096-k64-float16-fast", "n8192-k64-real-float16-fast"],
        ),
        (
            "n4096-k64-c64-real-float16-fast",
            ["n4096-k64-real-signed-float16-fast", "n4096-k64-float16-fast", "n8192-k64-c128-real-float16-fast"],
        ),
    ],
)
def test_the_nearest_problem(wanted: str, known: list[str]) -> None:
    others = ["n256-float16-accurate", "n256-bfloat16-fast", "n256-float16-fast-pitched", "n3584-k28-float16-accurate"]
    others += ["n3584-k28-float16-fast"] if "-k" not in wanted else ["n256-float16-fast"]
    others += ["n3584-k28-real-float16-fast"] if "-real" not in wanted else []
    others += ["n4096-k64-c64-real-float16-fast"] if "-c64" not in wanted else []
    found = nearest_problems(Problem.parse(wanted), problems(wanted, *reversed(known), *others))
    assert [each.key for each in found] == known


def test_the_nearest_problem_of_codes() -> None:
    """Numerics count as much as a length that is twice as long."""
    wanted = "n1024-bfloat16-to-int8_row_4096-fast"
    known = [
        "n1024-bfloat16-to-fp8_row_4096-fast",
        "n512-bfloat16-to-int8_row_4096-fast",
        "n1024-bfloat16-to-int8_row_4096-accurate",
        "n256-bfloat16-to-int8_row_4096-fast",
        "n512-bfloat16-to-mxfp4_32-accurate",
    ]
    others = ["n1024-float16-to-int8_row_4096-accurate", "n14336-k28-bfloat16-to-int8_row_14336-fast"]
    found = nearest_problems(Problem.parse(wanted), problems(wanted, *reversed(known), *others))
    assert [each.key for each in found] == known


def test_fast_codes_that_no_bundle_has_are_accurate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have kernels of their own where a bundle has some, and no kernel for another length is as near."""
    accurate, fast, longer = problems(
        *(f"n{n}-bfloat16-to-int8_row_4096-{kind}" for n, kind in ((256, "accurate"), (256, "fast"), (512, "fast")))
    )
    elements, place = 1 << 17, Destination.OUT_OF_PLACE
    trials = [
        make_trial(chunks, problem=each, kernel=make_kernel(each.key.encode(), launch=launch_for(each)))
        for chunks, each in ((1, accurate), (2, longer), (4, fast))
    ]

    def chosen(*winners: Trial, **options: bool) -> tuple[Match, Problem | None]:
        hide_bundles(tmp_path, monkeypatch)
        cells = {WinnerCell(each.problem, "sm90", each.environment.gpu, place, elements): each for each in winners}
        timed = {cell: replace(each, timings=times({elements: 2.0}, place)) for cell, each in cells.items()}
        monkeypatch.setenv(bundles.VARIABLE, str(write(tmp_path / f"{len(winners)}.db", timed)))
        match, found = choose_from_bundles(fast, place, elements, HERE, **options)
        return match, found and found[0].problem

    assert chosen(*trials[:2]) == (Match.SAME_GPU, accurate)
    assert chosen(*trials) == (Match.SAME_GPU, fast)
    assert chosen(trials[1]) == (Match.ESTIMATED, fast)
    assert chosen(*trials[:2], batch_invariant=True) == (Match.ESTIMATED, fast)  # the bundle names no arithmetic


@pytest.mark.parametrize("gpu", [H100.gpu, ""])
def test_signs_take_the_kernels_of_the_same_rows(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(tmp_path, [trial(PROBLEM.key, i, timings=times({1 << (6 + 7 * i): 2.0})) for i in (1, 2)], monkeypatch)
    for elements, chunks in ((1 << 13, 1), (1 << 20, 2)):
        asked: dict[str, Any] = {"arch": "sm90", "device": gpu or None, "inplace": True}
        best = hadagen.best_config(PROBLEM, elements >> 8, signed=True, **asked)
        assert best == hadagen.best_config(SIGNED, elements >> 8, **asked)
        assert (best.problem, best.match) == (SIGNED, Match.ESTIMATED)
        assert best.knobs["chunks"] == chunks
        assert best.launch == build_plan(SIGNED, Knobs.from_dict(best.knobs), load_arch("sm90")).launch
        assert best.kernel == recipe_digest(SIGNED, best.knobs, best.launch)
        assert (best.us, best.copy_us, best.relative_error) == (None, None, None)
        assert (best.provenance["kind"], best.provenance["gpu"], best.provenance["us"]) == ("estimated", "", None)
        assert hadagen.best_config(SIGNED, 1, arch="sm90").match is Match.GENERIC  # none out of place
        invariant = hadagen.best_config(SIGNED, elements >> 8, **asked, batch_invariant=True)
        assert (invariant.match, invariant.knobs["chunks"]) == (Match.ESTIMATED, chunks)  # whose arithmetic is the same
        assert hadagen.best_config("n256-signed-float16-accurate-pitched", 1, arch="sm90").match is Match.GENERIC
    assert not is_settled(SIGNED, Destination.IN_PLACE, HERE)


def test_signs_leave_registers_for_as_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for registers in (168, 80, 60, 40):  # of a thread; of 256
        kernel = make_kernel(launch=launch_for(PROBLEM), registers=registers)
        knobs = {"chunks": 1, "warps": 8, "grid": "tiles"}
        winner = make_trial(problem=PROBLEM, knobs=knobs, kernel=kernel, timings=times({1 << 13: 2.0}))
        pin(tmp_path / str(registers), [winner], monkeypatch)
        found[registers] = hadagen.best_config(SIGNED, 32, arch="sm90", inplace=True).knobs["min_blocks"]
    assert found == {168: 1, 80: 3, 60: 4, 40: 4}


def test_a_matrix_takes_the_nearest_order_and_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"n3584-k28-float16-fast": 1, "n14336-k112-float16-fast": 2, "n4096-float16-fast": 4}
    pin(tmp_path, [trial(key, chunks) for key, chunks in known.items()], monkeypatch)
    found = {}
    for order in (28, 40, 100, 12):  # a kernel takes 48 in place of 12
        wanted = {"n": order * 128, "dtype": "float16", "numerics": "fast"}
        best = hadagen.best_config(wanted, 8, arch="sm90", inplace=True, order=order)
        assert best.problem.key == f"n{order * 128}-k{48 if order == 12 else order}-float16-fast"
        found[order] = best.knobs["chunks"]
    assert found == {28: 1, 40: 1, 100: 2, 12: 1}
    assert hadagen.best_config("n3584-k28-float32-accurate", 8, arch="sm90", inplace=True).match is Match.GENERIC
    with pytest.raises(UsageError, match="n must be 28 times a power of two"):
        hadagen.best_config({"n": 4096, "dtype": "float16"}, 8, arch="sm90", order=28)
    with pytest.raises(UsageError, match="signed = 2 is not supported"):
        hadagen.best_config(PROBLEM, 8, arch="sm90", signed=2)  # type: ignore[arg-type]


def test_where_no_knobs_are_legal_there_is_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(tmp_path, [trial("n3584-k28-float16-fast")], monkeypatch)
    assert hadagen.best_config("n112-k28-float16-fast", 8, arch="sm90", inplace=True).match is Match.GENERIC


def test_an_arch_that_hadagen_does_not_know_takes_the_rules_of_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(tmp_path, [trial(PROBLEM.key)], monkeypatch)
    for arch, rules in (("sm100", "sm100"), ("sm199", "sm90")):
        best = hadagen.best_config(SIGNED, 8, arch=arch, inplace=True)
        assert (best.match, best.provenance["arch"]) == (Match.ESTIMATED, rules)


def test_a_call_compiles_it_once_and_compares_it(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compared: list[Problem] = []

    def image_of(recipe: recipes.Recipe, target: str) -> bytes:
        compiled.append(recipe.problem.key)
        return b"made here"

    monkeypatch.setattr(recipes, "image_of", image_of)
    monkeypatch.setattr(loading, "is_right", lambda kernel, problem: compared.append(problem) or True)
    monkeypatch.setattr(loading.driver, "driver_version", lambda: "580")
    kernel = find(problem=SIGNED)
    assert [param.name for param in kernel.spec.params][-2:] == ["signs_before", "signs_after"]
    assert find(1 << 28, problem=SIGNED) is kernel
    assert (compiled, compared, loader.images) == ([SIGNED.key], [SIGNED], [b"made here"])
    assert find() is not kernel
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(loading.driver, "unload", lambda kernel: None)
    longer = Problem.parse("n512-signed-float16-accurate")
    with pytest.raises(hadagen.DeviceError, match="while a graph is captured; call the rotation once before"):
        find(problem=longer)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_failure_is_remembered_and_pytorch_does_it(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(recipe: recipes.Recipe, target: str) -> bytes:
        asked.append(recipe.problem.key)
        raise ToolchainError("refused")

    monkeypatch.setattr(recipes, "image_of", refuse)
    assert find(problem=SIGNED) is None
    assert find(problem=SIGNED) is None
    assert [why.rpartition(": ")[2] for why in tables.failed.values()] == ["refused"]
    assert asked == [SIGNED.key]
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    tables.forget(SIGNED)
    with pytest.raises(hadagen.DeviceError, match="refused"):  # or plain PyTorch would stay in the graph
        find(1 << 20, problem=SIGNED)


@needs_nvrtc
@pytest.mark.filterwarnings("ignore:the kernel cache .* is neither read nor written")
@pytest.mark.parametrize("place", ["read-only", "open to others"])
def test_where_nothing_can_be_written_pytorch_does_it(
    loader: Loader, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle is not blamed: other kernels of it run."""

    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    def unwritable(path: Path, mode: int = 0) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(recipes, "_roots", [])
    monkeypatch.setattr("hadagen.compiler.cache._private", [])
    monkeypatch.setattr("hadagen.compiler.cache._IN_MEMORY", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.gettempdir", refuse)
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "cache"))
    if place == "read-only":
        monkeypatch.setattr("hadagen.compiler.cache.make_folder", unwritable)
    else:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)
    assert find(problem=SIGNED) is None
    assert "no place for temporary" in next(iter(tables.failed.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(problem=SIGNED) is None
        assert find() is not None


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_without_a_generator_pytorch_does_it(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes.closest_recipe.cache_clear()
    monkeypatch.setitem(sys.modules, "hadagen.plan.space", None)
    assert find(problem=SIGNED) is None
    reason = hadagen.best_config(SIGNED, 4, arch="sm90").reason
    assert str(reason).startswith(f"no kernel is made for {SIGNED.key}: kernels cannot be generated")
    assert "numpy" in str(reason)
    assert find(problem=SIGNED) is None


def test_only_kernels_for_h_alone_must_be_batch_invariant(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation is computed with those where there are no others."""
    monkeypatch.setattr(recipes, "closest_recipe", lambda *_: None)
    assert kernels.find(kernels.Kind(0, SIGNED, True, batch_invariant=True), 1 << 13) is None


def test_no_guess_is_worse_than_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(tmp_path, [trial(PROBLEM.key, 1), trial(SIGNED.key, 2, environment=H200)], monkeypatch)
    match, chosen = choose_from_bundles(SIGNED, Destination.IN_PLACE, 1 << 13, HERE)
    assert match is Match.SAME_ARCH
    assert (chosen[0].knobs["chunks"], chosen[0].provenance) == (2, Provenance.MEASURED)


def test_autotune_begins_with_the_nearest_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(tmp_path, [trial("n3584-k28-float16-fast", 1), trial("n14336-k112-float16-fast", 2)], monkeypatch)
    for key, chunks in (("n3584-k28-signed-float16-fast", 1), ("n25600-k100-signed-float16-fast", 2)):
        assert [knobs["chunks"] for knobs in autotune._known_knobs(Problem.parse(key))] == [chunks]
    assert autotune._known_knobs(Problem.parse("n512-float16-fast")) == []
