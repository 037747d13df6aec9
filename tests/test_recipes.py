"""Recipes: compiled where they are called, once, and found again without generator and compiler."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from real_compilers import needs_nvrtc

import hadagen.compiler.cache
from hadagen.compiler import codegen, nvrtc, recipes
from hadagen.compiler.cache import private_root
from hadagen.compiler.cubin import is_cubin
from hadagen.compiler.recipes import Recipe, compile_all, image_of
from hadagen.errors import NoCompilerError, ToolchainError, UsageError
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import Plan
from hadagen.plan.space import build_plan
from hadagen.problem.launch import LaunchSpec, Source
from hadagen.problem.problem import Problem

PROBLEM = Problem.of(64, "float16", "fast")
SHUFFLES = {"low_bits": "shuffle", "butterfly_carrier": "fp32"}


def recipe_of(arch: str = "sm90", problem: Problem = PROBLEM, **knobs: int | str) -> Recipe:
    chosen = Knobs.from_dict({**SHUFFLES, **knobs})
    return Recipe(problem, chosen.to_dict(), arch, build_plan(problem, chosen, load_arch(arch)).launch)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an empty cache."""
    monkeypatch.setattr(recipes, "_roots", [])
    nvrtc.stamp.cache_clear()
    monkeypatch.setenv("HADAGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def forbid_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither the generator be imported nor a compiler be loaded."""
    for module in ("compiler.codegen", "plan.space", "plan.knobs", "compiler.toolchain", "compiler.compilers"):
        monkeypatch.setitem(sys.modules, f"hadagen.{module}", None)
    monkeypatch.setattr(nvrtc, "_load", None)


@needs_nvrtc
def test_what_was_compiled_is_found_again_without_generator_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    first = image_of(recipe_of(), "sm90")
    assert is_cubin(first)
    forbid_work(monkeypatch)
    assert image_of(recipe_of(), "sm90") == first
    assert compile_all([recipe_of(), recipe_of()], "sm90", jobs=2) == [first, first]


@needs_nvrtc
@pytest.mark.parametrize("change", ["knobs", "problem", "arch", "target", "generator", "compiler"])
def test_whatever_a_kernel_depends_on_is_a_part_of_its_name(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image_of(recipe_of(), "sm90")
    recipe, target = recipe_of(), "sm90"
    if change == "knobs":
        recipe = recipe_of(warps=2)
    elif change == "problem":
        recipe = replace(recipe, problem=Problem.of(32, "float16", "fast"))
    elif change == "arch":
        recipe = replace(recipe, arch="sm80")
    elif change == "target":
        target = "sm80"
    elif change == "generator":
        monkeypatch.setattr(recipes, "_generator", lambda: "another")
    else:
        monkeypatch.setattr(nvrtc, "stamp", lambda: "another")
    assert recipes._known(recipe_of(), "sm90") is None or change not in ("generator", "compiler")
    assert recipes._known(recipe, target) is None


@needs_nvrtc
@pytest.mark.parametrize("kind", ["recipes", "kernels"])
def test_a_damaged_entry_is_made_again(kind: str, root: Path) -> None:
    first = image_of(recipe_of(), "sm90")
    for path in (root / kind).rglob("kernel.*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert image_of(recipe_of(), "sm90") == first


@needs_nvrtc
def test_a_gpu_newer_than_the_compiler_gets_ptx() -> None:
    assert b".target sm_90" in image_of(recipe_of(), "sm990")


@needs_nvrtc
def test_a_recipe_is_compiled_for_the_gpu_that_calls_it() -> None:
    """With the features of its own arch."""
    older, newer = (image_of(recipe_of("sm80"), target) for target in ("sm80", "sm90"))
    assert older != newer
    assert b"griddepcontrol" not in recipes._cache().load(_key(recipe_of("sm80"), "sm90"))["kernel.ptx"]


def _key(recipe: Recipe, target: str) -> str:
    return str(recipes._read("recipes", recipes._index_key(recipe, target))[0])


def test_knobs_that_are_not_legal_never_reach_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    good = recipe_of()
    monkeypatch.setattr("hadagen.compiler.codegen.render", None)
    for change in ({"warps": 3}, {"load": "no_allocate"}, {"store": "streaming"}, {"colour": 1}, {"warps": "{{ 1 }}"}):
        with pytest.raises(UsageError, match=r"is (not searched|not known|gone)"):
            image_of(replace(good, knobs={**good.knobs, **change}), "sm90")


@needs_nvrtc
def test_a_launch_that_does_not_follow_from_the_knobs_is_refused() -> None:
    launch = LaunchSpec(**{**vars(recipe_of().launch), "threads": 1024})
    with pytest.raises(UsageError, match="the knobs of the recipe mean another launch"):
        image_of(replace(recipe_of(), launch=launch), "sm90")


def test_without_nvrtc_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADAGEN_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    with pytest.raises(NoCompilerError, match="pip install nvidia-cuda-nvrtc"):
        image_of(recipe_of(), "sm90")


@needs_nvrtc
def test_a_source_that_does_not_compile_gives_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    render = codegen.render

    def broken(plan: Plan) -> Source:
        source = render(plan)
        return replace(source, text=source.text.replace("{", "{ int broken = nothing;", 1))

    monkeypatch.setattr(codegen, "render", broken)
    said = r"NVRTC [0-9.]+ cannot compile hadagen_n64\w+ for sm_90: .*nothing.*; "
    with pytest.raises(ToolchainError, match=said) as found:
        image_of(recipe_of(), "sm90")
    assert "\n" not in str(found.value)


@needs_nvrtc
def test_of_several_recipes_each_has_its_own_result() -> None:
    bad = replace(recipe_of(), knobs={"warps": 3})
    one, wrong, two = compile_all([recipe_of(), bad, recipe_of(warps=2)], "sm90", jobs=2)
    assert isinstance(wrong, UsageError)
    assert image_of(recipe_of(), "sm90") == one
    assert image_of(recipe_of(warps=2), "sm90") == two


PROGRAM = """
import json, sys
from hadagen.compiler import recipes
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import Problem
key, knobs, launch = json.loads(sys.argv[1])
recipe = recipes.Recipe(Problem.parse(key), knobs, "sm90", LaunchSpec.from_dict(launch))
assert recipes.image_of(recipe, "sm90")
print(recipes.__file__, "hadagen.compiler.codegen" in sys.modules, [str(root) for root in recipes._roots])
"""


def run_copy(folder: Path, cache: Path) -> str:
    """The output of a program that needs a kernel, with the hadagen and the NVRTC of a folder."""
    recipe = recipe_of()
    given = json.dumps([recipe.problem.key, dict(recipe.knobs), recipe.launch.to_dict()])
    variables = {**os.environ, "PYTHONPATH": str(folder), "HADAGEN_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    variables["HADAGEN_NVRTC"] = str(next(folder.rglob("libnvrtc.so.*")))
    command = [sys.executable, "-W", "error", "-c", PROGRAM, given]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_nvrtc
def test_a_cache_serves_a_copy_of_the_installation_at_another_place_and_time(tmp_path: Path) -> None:
    """As in a container, where one step of the build fills a cache that later ones only read."""
    library = Path(nvrtc.Nvrtc.find().path)
    first, second = tmp_path / "first", tmp_path / "image" / "second"
    for name, source in {"": "hadagen", "templates": "templates", "tuning_db": "tuning_db"}.items():
        ignored = shutil.ignore_patterns("__pycache__", "*.db", "*.pyc")
        shutil.copytree(
            Path(hadagen.__file__).parent.parent / source, first / "hadagen" / name, ignore=ignored, dirs_exist_ok=True
        )
    (first / "lib").mkdir()
    for each in library.parent.glob("libnvrtc*"):
        (first / "lib" / each.name).symlink_to(each)
    assert "True" in run_copy(first, tmp_path / "cache")
    shutil.copytree(first, second, copy_function=shutil.copy)
    shutil.copytree(tmp_path / "cache", tmp_path / "image" / "cache", copy_function=shutil.copy)
    for path in (tmp_path / "image").rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    shutil.rmtree(first)
    shutil.rmtree(tmp_path / "cache")
    said = run_copy(second, tmp_path / "image" / "cache")
    assert str(second) in said
    assert "False" in said  # nothing was generated


def test_the_generator_is_known_by_what_is_in_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def digest() -> str:
        return recipes._generator.__wrapped__()

    for folder in ("hadagen/plan/steps", "hadagen/arch", "templates/common", "templates/device"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("1")
    monkeypatch.setattr(recipes, "__file__", str(tmp_path / "hadagen" / "compiler" / "recipes.py"))
    monkeypatch.setattr(recipes.templates, "__file__", str(tmp_path / "templates" / "__init__.py"))
    seen = {digest()}
    changed = tmp_path / "templates" / "common" / "a.py"
    status = changed.stat()
    changed.write_text("2")
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    seen.add(digest())
    changed.rename(changed.with_name("b.py"))
    seen.add(digest())
    assert len(seen) == 3
    (tmp_path / "hadagen" / "plan" / "steps" / "a.cpython-311.pyc").write_bytes(b"times")
    (tmp_path / "hadagen" / "plan" / "steps" / "a.py").touch()
    assert digest() in seen


@pytest.mark.filterwarnings("error::RuntimeWarning")
@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word. Kernels that it lacks are kept for this process."""
    first = image_of(recipe_of(), "sm90")
    monkeypatch.setattr(recipes, "_roots", [])
    monkeypatch.setattr(hadagen.compiler.cache, "make_folder", refuse_within(root))
    with monkeypatch.context() as patch:
        forbid_work(patch)
        assert image_of(recipe_of(), "sm90") == first
        recipes.keep_verdict(first, PROBLEM, recipe_of().launch, "GPU", "580", True)
    with pytest.warns(RuntimeWarning, match="are not kept for later processes: .* cannot be written"):
        second = image_of(recipe_of(warps=2), "sm90")
    forbid_work(monkeypatch)
    assert (image_of(recipe_of(), "sm90"), image_of(recipe_of(warps=2), "sm90")) == (first, second)


@needs_nvrtc
def test_where_nothing_can_be_written_no_kernel_is_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does the work then, and no bundle is blamed."""
    monkeypatch.setattr(hadagen.compiler.cache, "_private", [])
    monkeypatch.setattr(hadagen.compiler.cache, "make_folder", refuse_within(root))
    monkeypatch.setattr(hadagen.compiler.cache, "_IN_MEMORY", str(root / "missing"))

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    for _ in range(2):
        with pytest.raises(ToolchainError, match=r"compiled here: .* \(No usable temporary .*; set TMPDIR to a folder"):
            image_of(recipe_of(), "sm90")
    monkeypatch.delenv("HADAGEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(recipes, "_roots", [])
    monkeypatch.setattr(Path, "home", _no_home)
    with pytest.raises(ToolchainError, match="set TMPDIR to a folder"):
        image_of(recipe_of(), "sm90")


def _no_home() -> Path:
    raise RuntimeError("no home")


def refuse_within(folder: Path) -> Callable[..., None]:
    """`make_folder` where a folder is on a disk that is only read."""
    make = hadagen.compiler.cache.make_folder

    def made(path: Path, mode: int = 0o755) -> None:
        if path.is_relative_to(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        make(path, mode)

    return made


def test_a_verdict_is_of_one_image_problem_launch_gpu_and_driver(root: Path) -> None:
    given = (b"image", PROBLEM, recipe_of().launch, "GPU", "580")
    recipes.keep_verdict(*given, False)
    assert recipes.verdict(*given) is False
    changes = (b"other", Problem.of(64, "float16"), recipe_of(warps=2).launch, "another", "590")
    others = [(*given[:i], change, *given[i + 1 :]) for i, change in enumerate(changes)]
    assert [recipes.verdict(*other) for other in others] == [None] * 5
    for path in (root / "verdicts").rglob("kernel.json"):
        path.write_text("true")
    assert recipes.verdict(*given) is None  # damaged


@needs_nvrtc
def test_a_cache_that_fills_up_later_is_left_for_another(root: Path) -> None:
    root.mkdir()
    (root / "kernels").write_text("no folder")
    with pytest.warns(RuntimeWarning, match="are not kept for later processes"):
        first = image_of(recipe_of(), "sm90")
    assert image_of(recipe_of(), "sm90") == first
    assert recipes._roots == [root, private_root()]


@needs_nvrtc
def test_a_recipe_that_needs_what_the_gpu_lacks_is_refused() -> None:
    problem = Problem.of(8192, "float16")
    knobs = Knobs(
        8,
        2,
        2,
        block_bits="load",
        mma_carrier="split",
        butterfly_carrier="fp32",
        exchange_carrier="fp32",
        load="multicast",
    )
    recipe = Recipe(problem, knobs.to_dict(), "sm90", build_plan(problem, knobs, load_arch("sm90")).launch)
    with pytest.raises(UsageError, match="needs multicast_in_place, which sm100 lacks"):
        image_of(recipe, "sm100")


def test_without_jinja2_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hadagen.compiler.codegen", None)
    with pytest.raises(ToolchainError, match="pip install jinja2"):
        image_of(recipe_of(), "sm90")
