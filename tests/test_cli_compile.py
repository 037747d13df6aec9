"""`hadagen compile`: what it leaves in the cache, and what calls then need no compiler for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run, sentence, succeed
from real_compilers import needs_nvrtc
from sample_bundle import write_trials
from sample_trials import make_trial, times
from test_recipes import forbid_work, recipe_of

from hadagen import recipes
from hadagen.launch import ENTRY
from hadagen.recipes import Recipe, image_of
from hadagen.regimes import Destination
from hadagen.runtime.bundles import VARIABLE
from hadagen.trial import Environment, Kernel, Provenance, recipe_digest

pytestmark = pytest.mark.usefixtures("machine")
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
        "hadagen.recipes.compile_all", lambda found, target, jobs: [recipes.ToolchainError("of no use")]
    )
    result = run(*COMPILE)
    assert (result.exit_code, result.stderr) == (1, "hadagen: of no use\n")
    assert result.stdout.startswith("0 kernels for sm90 are in ")
