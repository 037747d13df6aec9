"""`hadagen best`, `emit` and `compile`: the kernel of a call, its source, and its code in the cache."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import BEST, run, sentence, succeed, unfolded
from real_compilers import needs_nvcc, needs_nvrtc
from sample_bundle import write_sample, write_trials
from sample_trials import H100, PROBLEM, make_trial, times
from test_recipes import forbid_work, recipe_of

import hadagen
from hadagen.cli import best, emit
from hadagen.compiler import recipes, toolchain
from hadagen.compiler.recipes import Recipe, image_of
from hadagen.compiler.toolchain import Toolchain
from hadagen.plan.arch import load_arch
from hadagen.problem.launch import ENTRY, LaunchSpec, Source
from hadagen.problem.operands import params_for
from hadagen.problem.problem import DType, Problem
from hadagen.problem.regimes import Destination
from hadagen.problem.target import known_archs
from hadagen.problem.trial import Environment, Kernel, Provenance, recipe_digest
from hadagen.runtime.choose.bundles import VARIABLE
from hadagen.runtime.choose.device import Device
from hadagen.tuning_db.bundle import shipped
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import portfolio

pytestmark = pytest.mark.usefixtures("machine")


# ---- best ------------------------------------------------------------------------------------------------------------
def test_best_prints_one_object(sample: Path) -> None:
    found = json.loads(succeed(*BEST, "256", "--rows", "256", "--inplace", "--device", H100.gpu, "--json"))
    assert found == hadagen.best_config(PROBLEM, 256, H100.gpu, arch="sm90", inplace=True).to_dict()


def test_best_says_how_a_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_BUNDLE", str(shipped()["sm90"]))
    assert "elements a tile, starts early measured" in unfolded(succeed(*BEST, "4096", "--rows", "1024"))


def test_best_names_what_a_batch_invariant_call_runs(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = *BEST, "256", "--rows", "32", "--inplace", "--batch-invariant"
    assert "compiled where it is called" in succeed(*asked)  # a recipe, because the bundle names no arithmetic
    with monkeypatch.context() as patched:
        patched.setattr("hadagen.compiler.recipes.closest_recipe", lambda *_: None)
        refused = run(*asked)
    assert "n256-float16-accurate has no kernels that give the same bits in every call; leave out" in sentence(
        refused, 2
    )
    monkeypatch.setenv("HADAGEN_BUNDLE", str(shipped()["sm90"]))
    found = [
        json.loads(succeed(*BEST, "8192", "--rows", str(rows), "--batch-invariant", "--json"))["launch"]["arithmetic"]
        for rows in (1, 64, 4096)
    ]
    assert len(set(found)) == 1


def test_best_is_readable(sample: Path) -> None:
    text = succeed(*BEST, "256", "--inplace", "--rows", "32", "--device", H100.gpu)
    asked, kernel, *_ = text.splitlines()
    assert asked == f"n256-float16-accurate, 32 rows, in-place on {H100.gpu}"
    assert kernel.startswith("kernel    ")
    assert "match     same-gpu" in text
    assert "knobs" not in text
    assert "knobs     chunks=1 grid=tiles" in succeed(
        *BEST, "256", "--inplace", "--rows", "32", "--device", H100.gpu, "--knobs"
    )
    assert "time      2.00 µs for 8192 elements, 0.95 of a plain copy (1.90 µs)\n" in text
    assert f"measured  {H100.gpu}, driver 580.65, compiler 13.0.48" in text


def test_best_names_gpus_as_they_are_spoken() -> None:
    names = {"H100 80GB HBM3": "an", "A100-SXM4-40GB": "an", "RTX 4090": "an", "B200": "a", "Tesla V100": "a"}
    assert [best._with_article(name) for name in names] == [f"{article} {name}" for name, article in names.items()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "on this GPU: estimated from an H100 80GB HBM3"),
        (("--device", "NVIDIA H200"), "on this GPU: estimated from an H100 80GB HBM3"),
        (("--device", "RTX"), "on this GPU: estimated from an H100 80GB HBM3"),
        (("--device", H100.gpu, "--rows", str(10**9)), "at 256000000000 elements: estimated from 65536 elements"),
        (("--rows", "1"), "on this GPU at 256 elements: estimated from an H100 80GB HBM3 at 8192"),
    ],
)
def test_estimated_is_said_first(options: tuple[str, ...], said: str, sample: Path) -> None:
    _, first, *others = succeed(*BEST, "256", "--rows", "32", "--inplace", *options).splitlines()
    assert first == f"not measured {said}"
    assert (f"elements on {H100.gpu}, 0." in unfolded("\n".join(others))) == ("on this GPU" in said)


def test_the_time_of_the_cost_model_is_not_told(sample: Path) -> None:
    trial = make_trial(environment=Environment(), provenance=Provenance.ESTIMATED)
    write_bundle(sample, "sm90", portfolio([trial]), {trial.kernel.digest: trial.kernel}.__getitem__, {})
    text = succeed(*BEST, "256", "--inplace")
    assert "\nnot measured on any GPU: estimated by a cost model\nkernel " in text
    assert "\nmatch      estimated\n" in text
    assert "µs" not in text


def test_best_tells_pitched_rows_from_contiguous_ones(sample: Path) -> None:
    pitched = json.loads(succeed(*BEST, "256", "--inplace", "--pitched", "--json"))
    assert (pitched["problem"], pitched["match"]) == ("n256-float16-accurate-pitched", "generic")
    trial = make_trial(problem=Problem.of(4096, DType.FLOAT32, rows="pitched"), errors={"normal": 1e-7})
    trial = replace(trial, timings=times({1 << 16: 2.0}))
    write_bundle(sample, "sm90", portfolio([trial]), {trial.kernel.digest: trial.kernel}.__getitem__, {})
    asked = ("best", "--arch", "sm90", "--n", "4096", "--dtype", "float32", "--rows", "8", "--inplace")
    shown = unfolded(succeed(*asked, "--pitched"))
    assert f"65536 elements, rows of 3072 on {H100.gpu}, 0.95 of a plain copy" in shown
    assert json.loads(succeed(*asked, "--json"))["match"] == "generic"


def test_best_on_a_gpu_that_there_is_no_target_for(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.runtime.best.find_device", lambda name, arch: Device(arch or "sm70", "Tesla V100"))
    known = ", ".join(known_archs())
    said = succeed("best", "--n", "256", "--rows", "4")
    reason = f"no bundle has kernels for Tesla V100 (sm70); hadagen makes kernels for {known} only"
    assert f"no kernel, PyTorch computes it: {reason}" in said
    asked = sentence(run("best", "--arch", "sm70", "--n", "256", "--rows", "4"), 2)
    assert asked == f"arch 'sm70' is not known and no bundle serves it; choose one of {known}"


def test_best_says_that_there_is_no_kernel(sample: Path) -> None:
    reason = "no bundle has a kernel of n512-float16-accurate for sm90; to make some: hadagen tune --arch sm90"
    assert f"no kernel, PyTorch computes it: {reason}" in unfolded(succeed(*BEST, "512"))
    found = json.loads(succeed(*BEST, "512", "--json"))
    assert found["match"] == "generic"
    assert found["reason"].startswith(reason)


# ---- emit ------------------------------------------------------------------------------------------------------------
def test_space_accounts_for_every_choice() -> None:
    report = json.loads(succeed("emit", "--space", "--n", "4096", "--json"))
    assert report["legal"] > 100
    assert report["legal"] + sum(report["reasons"].values()) == report["total"]
    assert f"{report['legal']:,} of {report['total']:,} choices are legal" in succeed("emit", "--space", "--n", "4096")


def test_where_no_choice_is_legal_emit_says_so() -> None:
    problem = ("emit", "--arch", "sm75", "--n", "65536")
    assert "float16-accurate has no kernel on sm75; take a smaller n, or see why with --space" in sentence(
        run(*problem), 2
    )
    assert "0 of " in succeed(*problem, "--space")


def test_the_space_is_that_of_the_knobs_that_are_set() -> None:
    def legal(*knobs: str) -> int:
        return int(json.loads(succeed("emit", "--space", "--n", "64", *knobs, "--json"))["legal"])

    assert legal() > legal("--knobs", "warps=4") + legal("--knobs", "warps=8") > 0
    assert legal("--knobs", "warps=4") > legal("--knobs", "warps=4,chunks=2") > 0


def test_emit_prints_source_that_says_its_plan() -> None:
    source = succeed("emit", "--n", "64", "--dtype", "bfloat16")
    assert "over rows of n = 64, bfloat16, accurate" in source
    assert source == succeed("emit", "--n", "64", "--dtype", "bfloat16")


def test_emit_sets_the_knobs_it_is_given_and_completes_the_others() -> None:
    source = succeed(
        "emit", "--n", "4096", "--numerics", "fast", "--knobs", "chunks=8", "--knobs", "cluster=2,stages=1"
    )
    assert "constexpr int chunks = 8, vectors = 8;" in source
    assert "__cluster_dims__(2, 1, 1)" in source


def test_emit_changes_others_where_what_it_is_given_calls_for_it() -> None:
    given = ("emit", "--n", "8192", "--dtype", "bfloat16", "--knobs")
    assert "constexpr int chunks = 2, vectors = 2;" in succeed(*given, "chunks=2")
    assert "the tile is shorter than a row" in sentence(run(*given, "chunks=1,warps=1,cluster=1"), 2)


def test_emit_starts_from_the_known_winner(sample: Path) -> None:
    write_sample(sample, chunks=2)
    assert "constexpr int chunks = 2, vectors = 2;" in succeed("emit", "--n", "256")


def test_emit_prints_ptx() -> None:
    assert ".target sm_90" in succeed("emit", "--n", "2", "--numerics", "fast", "--ptx")


def test_emit_prints_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "disassemble", lambda kernel: f"code of {len(kernel.cubin)} bytes")
    assert succeed("emit", "--n", "2", "--numerics", "fast", "--sass").startswith("code of ")


STANDALONE = {
    ("--n", "4096", "--dtype", "bfloat16", "--knobs", "cluster=16"): (
        "Launch 16 * ceil(elements / 4096) blocks of 32 threads, in clusters of 16.",
        "Set CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED first.",
    ),
    ("--n", "256", "--numerics", "fast", "--knobs", "grid=persistent,chunks=2,warps=4"): (
        "Launch min(ceil(elements / 2048), as many as the GPU holds at once) blocks of 128 threads.",
        "scale_word  scale = a * b, the bits of a as a float16 below those of b;",
    ),
    ("--n", "8", "--dtype", "float32", "--pitched"): (
        "x, y        device addresses; in place, y is x",
        "0x3eb504f3 makes the transform orthonormal",
        "columns, x_pitch, y_pitch",
    ),
}


@pytest.mark.parametrize(
    "key",
    [
        "n512-float16-accurate",
        "n512-signed-float16-accurate",
        "n14336-k28-float16-accurate",
        "n14336-k28-signed-float16-accurate",
        "n512-after-gelu-float16-accurate",
        "n512-signed-after-silu_mul_clamped-float16-accurate",
        "n512-after-silu_mul_interleaved-bfloat16-to-mxfp4_32_swizzled-accurate",
        "n128-after-silu_mul-bfloat16-to-fp8_group_128_column_major-accurate",
        "n128-float16-to-fp8_head-accurate",
        "n16-float16-to-nvfp4_16-accurate",
    ],
)
def test_the_head_of_a_standalone_kernel_says_what_its_operands_are(key: str) -> None:
    problem = Problem.parse(key)
    source = Source("kernel", "", LaunchSpec(128, 1, 0, problem.n, False, params=params_for(problem)))
    plan: Any = SimpleNamespace(problem=problem)
    head = emit._how_to_use(plan, source, load_arch("sm90"))
    for param in source.launch.params:
        assert re.search(rf"^//   .*\b{param.name}\b", head, re.MULTILINE)
    order, apart = problem.order, bool(problem.prologue or problem.io.form)
    assert ("y = A X H, where X [28, 512]" in head) == ("if the matrix is Hadamard's" in head) == (order == 28)
    assert (f"{problem.n // 8} bytes each" in head) == problem.transform.signed
    assert ("in place, y is x" in head, "y must not overlap x" in head) == (not apart, apart)
    assert ("x has 2 elements for each element of a row of results" in head) == ("mul" in key)
    assert ("two to a byte" in head) == ("fp4" in key)
    assert max(map(len, head.splitlines())) <= 120


def test_emit_begins_with_the_winner_of_results_that_cannot_replace_x(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    found = SimpleNamespace(knobs=None)
    monkeypatch.setattr(emit, "best_config", lambda *at, inplace, **where: asked.append(inplace) or found)
    for key in ("n128-bfloat16-accurate", "n128-after-gelu-bfloat16-accurate", "n128-bfloat16-to-fp8_head-accurate"):
        emit._complete({}, Problem.parse(key), load_arch("sm90"))
    assert asked == [True, False, False]


@pytest.mark.parametrize(("arguments", "said"), STANDALONE.items())
def test_a_standalone_kernel_includes_nothing_of_ours_and_says_how_to_use_it(
    arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    text = succeed("emit", *arguments, "--standalone")
    assert not re.search('#include "|#pragma once', text)
    assert all(each in text for each in said)


@needs_nvcc
@pytest.mark.parametrize("arguments", STANDALONE)
def test_a_standalone_kernel_compiles_by_its_own_command_to_the_very_same_code(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    found, arch = Toolchain.find("nvcc"), load_arch("sm90")
    text = succeed("emit", *arguments, "--standalone")
    command = re.search("^//   (nvcc .*)$", text, re.MULTILINE)
    entry = re.search(r"-o (\w+)\.cubin", text)
    (tmp_path / f"{entry[1]}.cu").write_text(text)
    subprocess.run([found.compiler.path, *shlex.split(command[1])[1:]], cwd=tmp_path, check=True)
    assert (tmp_path / f"{entry[1]}.cubin").stat().st_size
    launch = LaunchSpec(threads=32, cluster=1, shared_bytes=0, tile_elements=32, persistent=False)
    plain = Source(entry[1], succeed("emit", *arguments), launch)
    alone, built = found.build([replace(plain, text=text), plain], arch)
    assert alone == replace(built, source=alone.source)


# ---- compile ---------------------------------------------------------------------------------------------------------
COMPILE = ("compile", "--arch", "sm90", "--problem", "n64-float16-fast")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The only kernel there is, without code; the cache is empty."""
    recipe = recipe_of("sm90")
    digest = recipe_digest(recipe.problem, recipe.knobs, recipe.launch)
    kernel = Kernel(digest, ENTRY, "sm90", "", b"", b"", recipe.launch, 0, 0, "")
    known = {"arch": "sm90", "provenance": Provenance.ESTIMATED, "environment": Environment(), "errors": {}}
    timings = [each for place in Destination for each in times({1 << 13: 2.0, 1 << 16: 4.0}, place)]
    trial = make_trial(problem=recipe.problem, kernel=kernel, timings=tuple(timings), **known)
    write_trials(tmp_path / "sm90.db", [replace(trial, knobs=dict(recipe.knobs))])
    monkeypatch.setenv(VARIABLE, str(tmp_path / "sm90.db"))
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recipes, "_roots", [])
    return recipe


@needs_nvrtc
def test_what_was_compiled_needs_neither_generator_nor_compiler(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_kernel = f"1 kernels for sm90 are in {tmp_path / 'cache'}\n"
    assert succeed(*COMPILE) == with_a_kernel
    forbid_work(monkeypatch)
    assert image_of(recipe, "sm90")
    assert succeed(*COMPILE) == with_a_kernel


def test_what_cannot_be_compiled_or_used_is_said(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing to compile; name rows with --n" in sentence(run("compile", "--arch", "sm90"), 2)
    result = run("compile", "--arch", "sm90", "--problem", "n128-float16-fast")
    assert result.exit_code == 1
    assert "PyTorch computes n128-float16-fast there; to make some: hadagen tune --arch sm90" in result.stderr
    assert "no bundle has kernels of these problems for sm90" in result.stderr
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache").chmod(0o777)
    said = sentence(run(*COMPILE), 1)
    assert said == (
        f"calls would not use {tmp_path / 'cache'}: others can write to {tmp_path / 'cache'}; run: chmod go-w "
        f"{tmp_path / 'cache'}, or set HADAGEN_CACHE to another place"
    )
    (tmp_path / "file").touch()
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "file"))
    assert "cannot be written (Not a directory)" in sentence(run(*COMPILE), 1)


@needs_nvrtc
def test_a_recipe_that_fails_is_said_and_the_others_are_kept(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hadagen.compiler.recipes.compile_all", lambda found, target, jobs: [recipes.ToolchainError("of no use")]
    )
    result = run(*COMPILE)
    assert (result.exit_code, result.stderr) == (1, "hadagen: of no use\n")
    assert result.stdout.startswith("0 kernels for sm90 are in ")
