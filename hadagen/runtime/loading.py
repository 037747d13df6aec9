"""Loads the kernel of an entry of a bundle: its cubin, or what its recipe makes for the GPU, or its PTX."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from hadagen import driver
from hadagen.driver import DriverError, LoadedKernel
from hadagen.errors import DeviceError, HadagenError, ToolchainError, UsageError, printable
from hadagen.launch import ENTRY
from hadagen.runtime.device import Device
from hadagen.runtime.proof import is_right
from hadagen.tuning_db.bundle import Bundle, BundleEntry

if TYPE_CHECKING:
    from hadagen.recipes import Recipe


def load(bundle: Bundle, entry: BundleEntry, device: int, target: Device) -> LoadedKernel:
    """The kernel of an entry on a CUDA device, of which `target` says what it is. The first of these that works:

    1. the cubin, if it is for this arch;
    2. what the recipe makes, compiled by NVRTC now or earlier;
    3. the PTX, which the driver compiles.

    A kernel that was compiled on this machine is compared with PyTorch before it is used for the first time.

    Raises `DriverError` or `ToolchainError` if none works, and `StorageError` if the bundle is damaged.
    """
    kernel = bundle.kernel(entry.kernel)
    failure: HadagenError | None = None
    if kernel.cubin and entry.arch == target.arch:
        try:
            return driver.load(kernel.cubin, kernel.entry, kernel.launch, device)
        except DriverError as error:
            if error.code not in driver.NOT_LOADABLE:
                raise
            failure = error
    from hadagen.recipes import image_of  # here, because a call that finds a cubin needs none of it

    try:
        return _proven(image_of(_recipe(entry), target.arch), ENTRY, entry, device, target)
    except (ToolchainError, UsageError) as error:
        failure = failure or error
    if kernel.ptx:
        return _proven(kernel.ptx, kernel.entry, entry, device, target)
    if isinstance(failure, UsageError):
        raise ToolchainError(f"the recipe of {entry.problem.key} cannot be compiled: {failure}")
    raise failure


def compile_missing(chosen: Iterable[tuple[BundleEntry, Bundle]], target: Device) -> None:
    """Compile the kernels of these entries that have no cubin for this arch, several at a time. Whatever fails will
    fail again when it is loaded."""
    by_arch: dict[str, dict[str, Recipe]] = defaultdict(dict)
    for entry, _ in chosen:
        if entry.arch != target.arch or not entry.compiled:
            by_arch[entry.arch].setdefault(entry.kernel, _recipe(entry))
    for recipes in by_arch.values():
        from hadagen.recipes import compile_all

        with suppress(ToolchainError):
            compile_all(list(recipes.values()), target.arch, jobs=min(len(recipes), os.cpu_count() or 1))


def _recipe(entry: BundleEntry) -> Recipe:
    from hadagen.recipes import Recipe

    return Recipe(entry.problem, entry.knobs, entry.arch, entry.launch)


def _proven(image: bytes, name: str, entry: BundleEntry, device: int, target: Device) -> LoadedKernel:
    """Load a kernel that was compiled on this machine. Raises `ToolchainError` if it is wrong."""
    from hadagen import recipes

    kernel = driver.load(image, name, entry.launch, device)
    version = driver.driver_version()
    right = recipes.verdict(image, entry.launch, target.gpu, version)
    if right is None:
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                f"a kernel of {entry.problem.key} was compiled here, and cannot be checked while a graph is captured; "
                "call hadagen.warmup before the graph capture begins"
            )
        right = is_right(kernel, entry.problem)
        recipes.keep_verdict(image, entry.launch, target.gpu, version, right)
    if not right:
        raise ToolchainError(
            f"a kernel of {entry.problem.key} that was compiled here is wrong on {printable(target.gpu)}; report it "
            "with the output of hadagen doctor"
        )
    return kernel
