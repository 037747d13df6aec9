"""The GPU that a command measures on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hadagen.errors import DeviceError

if TYPE_CHECKING:
    from hadagen.arch import Arch
    from hadagen.measure import DeviceRunner
    from hadagen.toolchain import Toolchain
    from hadagen.trial import Environment


def find_gpu(index: int | None) -> Environment | None:
    """The CUDA device asked for; where none was asked for, the first one, or None. Raises `DeviceError`."""
    from hadagen.measure import device_environment

    try:
        return device_environment(index or 0)
    except DeviceError:
        if index is not None:
            raise
        return None


@contextmanager
def device_runner(arch: Arch, index: int, toolchain: Toolchain, **how: Any) -> Iterator[DeviceRunner]:
    """A runner on a device, with the copy kernels beside which it times; `how` as `DeviceRunner` takes it."""
    from hadagen.measure import DeviceRunner, copy_sources
    from hadagen.toolchain import BuildFailure

    built = toolchain.build([(source, source.launch) for source in copy_sources()], arch)
    with DeviceRunner(index, [kernel for kernel in built if not isinstance(kernel, BuildFailure)], **how) as runner:
        yield runner
