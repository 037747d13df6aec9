"""The GPU of this machine, for commands that measure on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hadagen.cli import options

if TYPE_CHECKING:
    from hadagen.measure import DeviceRunner
    from hadagen.trial import Environment


@contextmanager
def measuring(environment: Environment, index: int) -> Iterator[DeviceRunner]:
    """A runner on the CUDA device of that index, which is what `environment` says, with the copy kernels built for it.

    Raises `ToolchainError` where they cannot be, and `UsageError` where its arch is not known.
    """
    from hadagen.arch import load_arch
    from hadagen.measure import DeviceRunner, copy_sources
    from hadagen.toolchain import BuildFailure, Toolchain

    sources = [(source, source.launch) for source in copy_sources()]
    built = Toolchain.find().build(sources, load_arch(options.arch_of(environment)))
    with DeviceRunner(index, [kernel for kernel in built if not isinstance(kernel, BuildFailure)]) as runner:
        yield runner
