"""Recipes: kernels that are compiled where they are called, by what they compute and the knobs chosen for it.

A kernel is compiled once on a machine, by NVRTC, and kept in the cache of kernels. An index stands before the cache: it
says which entry a recipe has, from this generator and this NVRTC. So a kernel that is kept costs two reads of small
files. Nothing is generated then, and no compiler is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hadagen import nvrtc, templates
from hadagen.cache import KernelCache, cache_root
from hadagen.errors import HadagenError, StorageError, ToolchainError, UsageError
from hadagen.launch import LaunchSpec
from hadagen.problem import Problem

_ENTRY = ("kernel.json",)  # the file of an entry of the index, and of a verdict


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
    kernel in it is called `hadagen.launch.ENTRY`.

    Raises `UsageError` if the knobs are not legal on the arch of the recipe, or mean another launch. Raises
    `ToolchainError` if there is no NVRTC, or it cannot compile the source.
    """
    return _known(recipe, target) or _raised(compile_all([recipe], target)[0])


def compile_all(recipes: Sequence[Recipe], target: str, jobs: int = 1) -> list[bytes | HadagenError]:
    """What `image_of` returns or raises, for several recipes of one arch. With more than one job, each is compiled in a
    process of its own, because NVRTC compiles one source at a time in a process."""
    from hadagen.arch import load_arch
    from hadagen.codegen import render
    from hadagen.compilers import NvrtcHere, NvrtcProgram
    from hadagen.knobs import Knobs
    from hadagen.space import build_plan
    from hadagen.toolchain import BuildFailure, Toolchain
    from hadagen.trial import NotTried

    found: list[bytes | HadagenError | None] = [_known(recipe, target) for recipe in recipes]
    missing = [i for i, image in enumerate(found) if image is None]
    if not missing:
        return [image for image in found if image is not None]
    library = nvrtc.Nvrtc.find()
    arch = load_arch(recipes[0].arch)
    known = int(target[2:]) in library.archs
    name = "kernel.cubin" if known else "kernel.ptx"
    sources = {}
    for i in missing:
        recipe = recipes[i]
        try:
            source = render(build_plan(recipe.problem, Knobs.from_dict(recipe.knobs), arch))
            if source.launch != recipe.launch:
                raise UsageError(f"{recipe.problem.key}: the knobs of the recipe mean another launch; make it again")
            sources[i] = source
        except UsageError as error:
            found[i] = error
    cache = KernelCache(_root())
    toolchain = Toolchain((NvrtcHere if jobs == 1 else NvrtcProgram)(library), cache=cache)
    compiled_for = replace(arch, nvcc_arch=f"sm_{target[2:]}") if known else arch
    built = toolchain.build(list(sources.values()), compiled_for, jobs=jobs)
    for (i, source), kernel in zip(sources.items(), built, strict=True):
        if isinstance(kernel, BuildFailure | NotTried):
            why = kernel.summary if isinstance(kernel, BuildFailure) else kernel.reason
            said = f"NVRTC {library.release} cannot compile {source.entry} for {compiled_for.nvcc_arch}: {why}"
            found[i] = ToolchainError(f"{said}; install another version of it")
            continue
        found[i] = kernel.cubin if known else kernel.ptx
        _keep("recipes", _place(recipes[i], target), [toolchain.key(source, compiled_for), name])
    return [image for image in found if image is not None]


def verdict(image: bytes, launch: LaunchSpec, gpu: str, driver: str) -> bool | None:
    """Whether a kernel that was compiled here was right on a GPU of this name with this driver; None if it was not
    tried yet."""
    said = _read("verdicts", _digest(hashlib.sha256(image).hexdigest(), launch.to_dict(), gpu, driver))
    return said if isinstance(said, bool) else None


def keep_verdict(image: bytes, launch: LaunchSpec, gpu: str, driver: str, right: bool) -> None:
    """Keep a `verdict` for later processes."""
    _keep("verdicts", _digest(hashlib.sha256(image).hexdigest(), launch.to_dict(), gpu, driver), right)


def _known(recipe: Recipe, target: str) -> bytes | None:
    """The code of a recipe that was compiled before."""
    said = _read("recipes", _place(recipe, target))
    if not (isinstance(said, list) and len(said) == 2):
        return None
    key, name = said
    return (KernelCache(_root()).load(str(key)) or {}).get(name)


def _place(recipe: Recipe, target: str) -> str:
    """The name of the entry of the index."""
    return _digest(
        recipe.problem.key, dict(recipe.knobs), recipe.arch, target, _generator(), nvrtc.stamp(), nvrtc.FLAGS
    )


def _raised(image: bytes | HadagenError) -> bytes:
    if isinstance(image, HadagenError):
        raise image
    return image


@functools.cache
def _generator() -> str:
    """What tells this generator from others: the sizes and times of its files."""
    here = Path(__file__).parent
    texts = Path(templates.__file__).parent
    folders = [here, here / "steps", here / "arch", texts, texts / "common", texts / "device"]
    files = [entry for folder in folders for entry in os.scandir(folder) if entry.is_file()]
    return _digest(sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@functools.cache
def _root() -> Path:
    """The directory of the cache, or one for this process alone if that cannot be written."""
    try:
        root = cache_root()
        with KernelCache(root).workspace():
            return root
    except StorageError as error:
        folder = tempfile.mkdtemp(prefix="hadagen-")
        weakref.finalize(KernelCache, shutil.rmtree, folder, ignore_errors=True)
        said = f"kernels that are compiled here are not kept for later processes: {error}"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
        return Path(folder)


def _read(kind: str, place: str) -> Any:
    files = KernelCache(_root(), kind, _ENTRY).load(place)
    with suppress(ValueError):
        return None if files is None else json.loads(files[_ENTRY[0]])
    return None


def _keep(kind: str, place: str, said: object) -> None:
    with suppress(StorageError):  # it is only found anew
        KernelCache(_root(), kind, _ENTRY).store(place, {_ENTRY[0]: json.dumps(said).encode()}, {})


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
