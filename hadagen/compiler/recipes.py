"""Recipes: kernels that are compiled where they are called, by what they compute and the knobs chosen for it.

A kernel is compiled once on a machine, by NVRTC, and kept in the cache of kernels. An index stands before the cache: it
says which entry a recipe has, from this generator and this NVRTC. So a kernel that is kept costs two reads of small
files. Nothing is generated then, and no compiler is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hadagen import templates
from hadagen.compiler import nvrtc
from hadagen.compiler.cache import FILES, KernelCache, cache_root, private_root, warn_not_kept
from hadagen.errors import HadagenError, StorageError, ToolchainError, UsageError
from hadagen.problem.launch import LaunchSpec, Source
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import prologue_of
from hadagen.problem.trial import Trial, knobs_key

if TYPE_CHECKING:
    from hadagen.plan.space import Space

_ENTRY = ("kernel.json",)  # the file of an entry of the index, and of a verdict
# Folders besides the templates, with all that the text of a kernel follows from.
GENERATOR = ("arch", "problem", "plan", "compiler")
_SOURCES = (".py", ".json", ".yaml", ".j2", ".cuh", ".cu")  # kinds of files of the generator
_CUBIN, _PTX = "kernel.cubin", "kernel.ptx"  # files of a compiled kernel


@dataclass(frozen=True)
class Recipe:
    """A kernel that can be compiled for every GPU with the features of an arch.

    arch: whose rules the knobs keep. launch: how the kernel is launched, which follows from problem and knobs.
    """

    problem: Problem
    knobs: Mapping[str, Any]
    arch: str
    launch: LaunchSpec


def image_of(recipe: Recipe, target: str) -> bytes:
    """The code of a recipe for the arch of a GPU, such as "sm90": a cubin, or PTX if NVRTC does not know the arch. The
    kernel in it is called `hadagen.problem.launch.ENTRY`.

    Raises `UsageError` if the recipe is not legal on its own arch or needs what the GPU lacks, or means another launch.
    Raises `ToolchainError` if there is no NVRTC, or it cannot compile the source.
    """
    (image,) = compile_all([recipe], target)
    if isinstance(image, HadagenError):
        raise image
    return image


def compile_all(recipes: Sequence[Recipe], target: str, jobs: int = 1) -> list[bytes | HadagenError]:
    """The result or the error of `image_of` for each recipe; all are for one arch. With several jobs, each recipe is
    compiled in a process of its own, because NVRTC compiles one source at a time in a process.

    Raises `ToolchainError` if there is no NVRTC, and `UsageError` if the arch is unknown.
    """
    found = [_known(recipe, target) for recipe in recipes]
    missing = [recipe for recipe, image in zip(recipes, found, strict=True) if image is None]
    made = iter(_compile(missing, target, jobs) if missing else ())
    return [next(made) if image is None else image for image in found]


@functools.lru_cache(maxsize=1024)
def closest_recipe(problem: Problem, knobs: str, arch: str, registers: int = 0, rows: int = 0) -> Recipe | None:
    """The recipe of a problem with the legal knobs that are nearest to others; None if no knobs are legal.

    knobs: as `knobs_key` writes them, of any problem and arch. arch: whose rules the recipe keeps. registers: those of
    a thread; an SM should hold as many blocks as fit with so many registers. 0 for any number of blocks. rows: the
    number of `Problem.unit`s of a call, for which a tile is chosen by `Space.for_a_row`; 0 for the tile of the others.

    Raises `ToolchainError` if kernels cannot be generated, and `UsageError` if the arch is unknown.
    """
    try:
        from hadagen.plan.knobs import Knobs
        from hadagen.plan.space import build_plan
    except ImportError as error:  # such as numpy
        raise _no_generator(error) from None
    space = _space(problem, arch)
    wanted = Knobs.like(json.loads(knobs))
    shaped = space.for_a_row(wanted, rows) if rows else wanted
    if (found := space.closest(shaped)) is None:
        return None
    plan = build_plan(problem, found, space.arch)
    if registers and shaped == wanted:
        blocks = space.arch.limits.resident_blocks(plan.launch.threads, plan.launch.shared_bytes, registers)
        values = {found.min_blocks, *map(int, space.arch.search["min_blocks"])}
        wanted = replace(found, min_blocks=max(value for value in values if value <= max(blocks, found.min_blocks)))
        if space.closest(wanted) == wanted:
            found, plan = wanted, build_plan(problem, wanted, space.arch)
    return Recipe(problem, found.to_dict(), arch, plan.launch)


@functools.lru_cache(maxsize=1024)
def why_no_knobs(problem: Problem, arch: str) -> str | None:
    """Why no knobs are legal for a problem on an arch, so that it has no recipe; None if some are. Raises as
    `closest_recipe` does."""
    return _space(problem, arch).why_none()


@functools.lru_cache(maxsize=16)
def _space(problem: Problem, arch: str) -> Space:
    """Kept, because a new shape asks for the knobs nearest to each winner of another problem."""
    try:
        from hadagen.plan.arch import load_arch
        from hadagen.plan.space import Space
    except ImportError as error:  # such as numpy
        raise _no_generator(error) from None
    return Space(problem, load_arch(arch))


def is_recipe_of(trial: Trial) -> bool:
    """Whether the recipe of a trial's kernel can be compiled: its knobs are legal now, and mean the same launch. Knobs
    that are newer than the trial have their defaults. Raises as `closest_recipe` does."""
    recipe = closest_recipe(trial.problem, knobs_key(trial.knobs), trial.arch)
    if recipe is None or trial.kernel is None:
        return False
    from hadagen.plan.knobs import Knobs

    with suppress(UsageError):  # a knob that is gone
        return (recipe.knobs, recipe.launch) == (Knobs.from_dict(trial.knobs).to_dict(), trial.kernel.launch)
    return False


def _no_generator(error: ImportError) -> ToolchainError:
    return ToolchainError(f"kernels cannot be generated ({error}); pip install jinja2 numpy")


def _compile(recipes: Sequence[Recipe], target: str, jobs: int) -> list[bytes | HadagenError]:
    """`compile_all` of recipes that are not kept."""
    try:
        from hadagen.compiler.codegen import render
        from hadagen.compiler.compilers import NvrtcHere, NvrtcProgram
        from hadagen.compiler.toolchain import BuildFailure, Toolchain
        from hadagen.plan.arch import SPECIFIC, load_arch
        from hadagen.plan.knobs import Knobs
        from hadagen.plan.space import build_plan
        from hadagen.problem.target import known_archs
        from hadagen.problem.trial import NotTried
    except ImportError as error:  # such as Jinja2, which PyTorch brings along
        raise _no_generator(error) from None

    library, arch = nvrtc.Nvrtc.find(), load_arch(recipes[0].arch)
    features = load_arch(target).features if target in known_archs() else arch.features - SPECIFIC
    known = int(target[2:]) in library.archs
    compiled_for, name = (replace(arch, nvcc_arch=f"sm_{target[2:]}"), _CUBIN) if known else (arch, _PTX)
    results: dict[int, bytes | HadagenError] = {}
    sources: dict[int, Source] = {}
    for i, recipe in enumerate(recipes):
        try:
            plan = build_plan(recipe.problem, Knobs.from_dict(recipe.knobs), arch)
            meant = replace(plan.launch, arithmetic=recipe.launch.arithmetic and plan.launch.arithmetic)
            if recipe.launch != meant:
                raise UsageError(f"{recipe.problem.key}: the knobs of the recipe mean another launch; make it again")
            if lacking := plan.features - features:
                raise UsageError(
                    f"{recipe.problem.key}: the recipe needs {min(lacking)}, which {target} lacks; tune for it"
                )
            sources[i] = render(plan)
        except UsageError as error:
            results[i] = error

    def build() -> list[Any]:
        toolchain = Toolchain((NvrtcHere if jobs == 1 else NvrtcProgram)(library), cache=_cache())
        built = toolchain.build(list(sources.values()), compiled_for, jobs=jobs)
        return list(zip(built, (toolchain.key(source, compiled_for) for source in sources.values()), strict=True))

    try:
        made = build()
    except StorageError as error:
        _keep_for_this_process(error)
        try:
            made = build()
        except StorageError as again:
            raise ToolchainError(f"no kernel can be compiled here: {again}") from error
    for (i, source), (kernel, key) in zip(sources.items(), made, strict=True):
        if isinstance(kernel, BuildFailure | NotTried):
            why = kernel.summary if isinstance(kernel, BuildFailure) else kernel.reason
            results[i] = ToolchainError(
                f"NVRTC {library.release} cannot compile {source.entry} for {compiled_for.nvcc_arch}: {why}; install "
                "another version of it"
            )
        else:
            results[i] = kernel.cubin if known else kernel.ptx
            _keep_entry("recipes", _index_key(recipes[i], target), [key, name])
    return [results[i] for i in range(len(recipes))]


def verdict(image: bytes, problem: Problem, launch: LaunchSpec, gpu: str, driver: str) -> bool | None:
    """Whether a kernel that was compiled here was right for a problem, on a GPU of this name with this driver; None if
    it was not tried yet."""
    if not _is_ours(problem):
        return None
    found = _read("verdicts", _verdict_key(image, problem, launch, gpu, driver))
    return found if isinstance(found, bool) else None


def keep_verdict(image: bytes, problem: Problem, launch: LaunchSpec, gpu: str, driver: str, right: bool) -> None:
    """Keep a `verdict` for later processes."""
    _keep_entry("verdicts", _verdict_key(image, problem, launch, gpu, driver), right)


def _verdict_key(image: bytes, problem: Problem, launch: LaunchSpec, gpu: str, driver: str) -> str:
    return _digest(hashlib.sha256(image).hexdigest(), problem.key, launch.to_dict(), gpu, driver)


def _known(recipe: Recipe, target: str) -> bytes | None:
    """The code of a recipe that was compiled before."""
    if not _is_ours(recipe.problem):
        return None
    match _read("recipes", _index_key(recipe, target)):
        case [str(key), str(name)]:
            return (_cache().load(key) or {}).get(name)
    return None


def _is_ours(problem: Problem) -> bool:
    """Whether the kernels of a problem follow from files of hadagen alone; a program may have a prologue of its own."""
    prologue = prologue_of(problem)
    return prologue is None or type(prologue).__module__.partition(".")[0] == "hadagen"


def _index_key(recipe: Recipe, target: str) -> str:
    return _digest(
        recipe.problem.key, dict(recipe.knobs), recipe.arch, target, _generator(), nvrtc.stamp(), nvrtc.FLAGS
    )


@functools.cache
def _generator() -> str:
    """A digest of the files of this generator, which tells it from others. Places and dates of the files do not matter,
    so a cache serves every copy of an installation."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in (Path(templates.__file__).parent, *(package / room for room in GENERATOR)):
        for path in sorted(each for each in folder.rglob("*") if each.name.endswith(_SOURCES)):
            content = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            digest.update(f"{folder.name}/{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# The directories of the caches that are read. New entries go to the last.
_roots: list[Path] = []


def _cache(kind: str = "kernels", names: Sequence[str] = FILES) -> KernelCache:
    """The entries of one kind. Raises `StorageError` if there is no place for a cache."""
    if not _roots:
        _roots.append(cache_root())
    return KernelCache(_roots[-1], kind, names, beside=_roots[:-1])


def _keep_for_this_process(error: StorageError) -> None:
    """Write to a temporary directory from now on, and warn. What the cache has is still read. Raises `ToolchainError`
    if no directory can be written, because a compiler needs one."""
    try:
        private = private_root()
    except StorageError as another:
        raise ToolchainError(f"no kernel can be compiled here: {another}") from error
    if private not in _roots:
        _roots.append(private)
        warn_not_kept(error)


def _read(kind: str, place: str) -> Any:
    with suppress(StorageError, ValueError):
        files = _cache(kind, _ENTRY).load(place)
        return None if files is None else json.loads(files[_ENTRY[0]])
    return None


def _keep_entry(kind: str, place: str, said: object) -> None:
    with suppress(StorageError):  # it is only found anew
        _cache(kind, _ENTRY).store(place, {_ENTRY[0]: json.dumps(said).encode()}, {})


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
