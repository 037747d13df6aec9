"""`hadagen compile`: fill the cache of compiled kernels before any call, such as while a container image is built."""

from __future__ import annotations

import click

from hadagen.cli import options
from hadagen.cli.output import report_failures, say
from hadagen.compiler import recipes
from hadagen.compiler.cache import KernelCache, cache_place
from hadagen.errors import DeviceError, HadagenError, StorageError, ToolchainError, UsageError
from hadagen.owners import fault_of
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import destinations
from hadagen.runtime.choose.device import find_device
from hadagen.runtime.choose.entries import choose_from_bundles, timed_in_bundles
from hadagen.runtime.choose.reasons import how_to_tune
from hadagen.tuning_db.bundle import Bundle, BundleEntry


@click.command("compile")
@options.arch_of_target(says="  [default: arch of this machine's GPU]")
@options.problems()
@click.option("--batch-invariant", is_flag=True, help="For calls with batch_invariant=True.")
@click.option("--device", metavar="NAME", help="GPU to choose for, such as 'NVIDIA H100 80GB HBM3'.")
def compile_(arch: str | None, problems: list[Problem], batch_invariant: bool, device: str | None) -> None:
    """Compile the kernels of later calls into the cache.

    Compiles all kernels that calls choose for these problems, at any number of
    rows, unless the bundles have their code for the GPU. With --arch, no GPU is
    needed. Later calls read the kernels from HADAGEN_CACHE, which may then be
    read-only.
    """
    from hadagen.runtime.launch.loading import cpus, lacking_code

    context = click.get_current_context()
    if all(context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT for name in ("n", "keys")):
        raise UsageError("there is nothing to compile; name rows with --n, or problems with --problem")
    target, place = find_device(device, arch), cache_place()
    if problem := fault_of(place):
        raise StorageError(f"calls would not use {place}: {problem}, or set HADAGEN_CACHE to another place")
    with KernelCache(place).workspace():
        pass  # raises the right error where it cannot be written
    chosen: list[tuple[BundleEntry, Bundle | None]] = []
    unserved = []
    for each in problems:
        before = len(chosen)
        for destination in destinations(each):
            wanted = each, destination
            for elements in timed_in_bundles(*wanted, target, batch_invariant=batch_invariant):
                best = choose_from_bundles(*wanted, elements, target, batch_invariant=batch_invariant)[1]
                chosen += [best] if best else []
        if len(chosen) == before:
            unserved.append(each)
    to_compile = lacking_code(chosen, target)
    failures = []
    for of_arch in to_compile.values():
        made = recipes.compile_all(of_arch, target.arch, jobs=min(len(of_arch), cpus()))
        failures += [str(image) for image in made if isinstance(image, HadagenError)]
    lacking = sum(map(len, to_compile.values()))
    others = len({(entry.kernel, entry.problem) for entry, _ in chosen}) - lacking
    rest = f", and {others} more have code in the bundles" if others else ""
    say(f"{lacking - len(failures)} kernels for {target.gpu or target.arch} are in {place}{rest}")
    if unserved:
        few = f"{len(unserved)} problems, such as {unserved[0].key}," if len(unserved) > 1 else unserved[0].key
        say(f"PyTorch computes {few} there; {how_to_tune(unserved[0], target.arch)}", err=True)
    report_failures(failures, ToolchainError)
    if not chosen:
        raise DeviceError(f"no bundle has kernels of these problems for {target.gpu or target.arch}")
