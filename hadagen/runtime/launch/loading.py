"""Loads the kernel of an entry of a bundle: its cubin, or what its recipe makes for the GPU, or its PTX."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from hadagen.errors import DeviceError, HadagenError, ToolchainError, UsageError, printable
from hadagen.gpu import driver
from hadagen.gpu.driver import DriverError, LoadedKernel
from hadagen.problem.launch import ENTRY
from hadagen.problem.problem import Problem
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.guesses import may_be_guessed
from hadagen.runtime.launch.proof import is_right
from hadagen.tuning_db.bundle import Bundle, BundleEntry

if TYPE_CHECKING:
    from hadagen.compiler.recipes import Recipe


def load(bundle: Bundle | None, entry: BundleEntry, device: int, target: Device) -> LoadedKernel:
    """The kernel of an entry on a CUDA device, whose arch and name `target` has. The first of these that works:

    1. the cubin, if it is for this arch;
    2. the kernel of the recipe, compiled by NVRTC now or earlier;
    3. the PTX, which the driver compiles.

    A kernel that was compiled on this machine is compared with PyTorch before it is used for the first time.

    bundle: the bundle of the entry; None if there is only the recipe.

    Raises `DriverError` or `ToolchainError` if none works, and `StorageError` if the bundle is damaged.
    """
    kernel = bundle and bundle.kernel(entry.kernel)
    ways: list[Callable[[], LoadedKernel]] = [lambda: _proven(_compiled(entry, target), ENTRY, entry, device, target)]
    if kernel and kernel.cubin and entry.arch == target.arch:
        ways.insert(0, lambda: driver.load(kernel.cubin, kernel.entry, kernel.launch, device))
    # A multicast in place relies on what only one arch was seen to do.
    if kernel and kernel.ptx and (entry.arch == target.arch or entry.knobs.get("load") != "multicast"):
        ways.append(lambda: _proven(kernel.ptx, kernel.entry, entry, device, target))
    failures: list[HadagenError] = []
    for way in ways:
        try:
            return way()
        except (ToolchainError, UsageError) as error:
            failures.append(error)
        except DriverError as error:
            if error.code not in driver.NOT_LOADABLE:
                raise
            failures.append(error)
    raise ToolchainError(f"no kernel of {entry.problem.key} can be loaded on {printable(target.gpu)}: {failures[0]}")


def compile_missing(chosen: Iterable[tuple[BundleEntry, Bundle | None]], target: Device) -> None:
    """Compile the kernels of these entries that have no cubin for this arch, several at a time. Whatever fails will
    fail again when it is loaded."""
    for recipes in lacking_code(chosen, target).values():
        from hadagen.compiler.recipes import compile_all

        with suppress(HadagenError):
            compile_all(recipes, target.arch, jobs=min(len(recipes), cpus()))


def lacking_code(chosen: Iterable[tuple[BundleEntry, Bundle | None]], target: Device) -> dict[str, list[Recipe]]:
    """The recipes of these entries that have no cubin for this arch, each once, by the arch whose rules they keep."""
    found = {(e.arch, e.kernel, e.problem): e for e, _ in chosen if e.arch != target.arch or not e.compiled}
    by_arch: dict[str, list[Recipe]] = defaultdict(list)
    for entry in found.values():
        by_arch[entry.arch].append(_recipe(entry))
    return by_arch


def _compiled(entry: BundleEntry, target: Device) -> bytes:
    from hadagen.compiler.recipes import image_of  # here, because a call that finds a cubin needs none of it

    return image_of(_recipe(entry), target.arch)


def _recipe(entry: BundleEntry) -> Recipe:
    from hadagen.compiler.recipes import Recipe

    return Recipe(entry.problem, entry.knobs, entry.arch, entry.launch)


def cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _proven(image: bytes, name: str, entry: BundleEntry, device: int, target: Device) -> LoadedKernel:
    """Load a kernel that was compiled on this machine.

    Raises `ToolchainError` if it is wrong, and `DeviceError` if that cannot be found out now.
    """
    from hadagen.compiler import recipes

    kernel = driver.load(image, name, entry.launch, device)
    judged = image, entry.problem, entry.launch, target.gpu, driver.driver_version()
    try:
        right = recipes.verdict(*judged)
        if right is None:
            right = _compare(kernel, entry.problem)
            recipes.keep_verdict(*judged, right)
        if not right:
            raise ToolchainError(
                f"a kernel of {entry.problem.key} that was compiled here is wrong on {printable(target.gpu)}; report "
                "it with the output of hadagen doctor"
            )
    except HadagenError:
        driver.unload(kernel)
        raise
    return kernel


def _compare(kernel: LoadedKernel, problem: Problem) -> bool:
    """`is_right`. Raises `DeviceError` while a graph is captured, or if memory runs out."""
    with torch.cuda.device(kernel.device):
        if torch.cuda.is_current_stream_capturing():
            what = "the rotation once" if may_be_guessed(problem) else "hadagen.warmup"
            raise DeviceError(
                f"a kernel of {problem.key} was compiled here, and cannot be checked while a graph is captured; call "
                f"{what} before the graph capture begins"
            )
        try:
            return is_right(kernel, problem)
        except RuntimeError as error:
            if isinstance(error, HadagenError):
                raise
            said = " ".join(str(error).split())[:200]
            raise DeviceError(f"a kernel of {problem.key} could not be checked ({said}); free some memory") from error
