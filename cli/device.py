"""The GPU of this machine, for commands that measure on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hadagen import measure
from hadagen.cli import options
from hadagen.cli.output import say
from hadagen.compiler.compilers import DEFAULT
from hadagen.compiler.recipes import Recipe, image_of
from hadagen.errors import DeviceError
from hadagen.problem.problem import Problem
from hadagen.problem.target import nearest_arch
from hadagen.problem.trial import Environment, Kernel, Trial
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.reasons import has_bundle, how_to_tune
from hadagen.tuning_db.bundle import Bundle, BundleEntry

if TYPE_CHECKING:
    from hadagen.compiler.toolchain import Toolchain
    from hadagen.plan.arch import Arch


def find_target(arch: str | None, index: int | None) -> tuple[Arch, Environment | None]:
    """The arch and the CUDA device to work for.

    arch: by default the arch of the GPU here, or the nearest older known arch; without a GPU, sm90. device: by default
    the first GPU. The device is None if it was not given and there is no GPU, or if the GPU has another arch.

    Raises `DeviceError` if the given device cannot be used, and `UsageError` if the arch is not known.
    """
    from hadagen.plan.arch import load_arch

    try:
        gpu = measure.device_environment(index or 0)
    except DeviceError:
        if index is not None:
            raise
        gpu = None
    here = gpu and options.arch_of(gpu)
    if arch is None:
        arch = (nearest_arch(here) or here) if here else options.DEFAULT_ARCH
    return load_arch(arch), gpu if here == arch else None


def find_device(index: int) -> tuple[Environment, Device]:
    """The environment of the CUDA device of an index, and the device as `choose` takes it. Raises `DeviceError`."""
    environment = measure.device_environment(index)
    return environment, Device(options.arch_of(environment), environment.gpu)


def runnable(bundle: Bundle, entry: BundleEntry) -> Kernel:
    """The kernel of an entry. If the bundle has only its recipe, it is compiled for the arch of the entry.

    Raises `StorageError` as `Bundle.kernel` does, and `UsageError` or `ToolchainError` as `image_of` does.
    """
    kernel = bundle.kernel(entry.kernel)
    if kernel.cubin:
        return kernel
    return replace(kernel, cubin=image_of(Recipe(entry.problem, entry.knobs, entry.arch, entry.launch), entry.arch))


def no_kernels(target: Device, problems: Sequence[Problem]) -> DeviceError:
    """The error for calls of problems without a kernel on a device, with the command that makes kernels."""
    of = f" of {problems[0].key}" if has_bundle(target.arch) else ""
    return DeviceError(
        f"no bundle has kernels{of} for {target.gpu} ({target.arch}); {how_to_tune(problems[0], target.arch)}"
    )


def refusal(problem: Problem, digest: str, answer: measure.Answer | Trial, advice: str = "tune again") -> str:
    """A sentence on a kernel that did not end well."""
    return f"kernel {digest[:12]} for {problem.key} ended as {answer.outcome.value}: {answer.detail}; {advice}"


def find_toolchain(kind: str = DEFAULT) -> Toolchain:
    """The toolchain with a compiler. If another compiler replaces it, stderr says why. Raises `ToolchainError`."""
    from hadagen.compiler.toolchain import Toolchain

    toolchain = Toolchain.find(kind)
    if toolchain.note:
        say(toolchain.note, err=True)
    return toolchain


@contextmanager
def measuring(
    environment: Environment, index: int, toolchain: Toolchain | None = None, **how: Any
) -> Iterator[measure.DeviceRunner]:
    """A runner on the CUDA device of an index, which `environment` describes; `how` as for `DeviceRunner`.

    Raises `UsageError` if its arch is not known, and `ToolchainError` if the copy kernels cannot be built.
    """
    from hadagen.plan.arch import load_arch

    toolchain = toolchain or find_toolchain()
    kernels = toolchain.build_all(measure.copy_sources(), load_arch(options.arch_of(environment)))
    with measure.DeviceRunner(index, kernels, **how) as runner:
        yield runner
