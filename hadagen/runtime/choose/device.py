"""`Device`: the arch and the class of a GPU, by which kernels are chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadagen.errors import UsageError, shown
from hadagen.gpu.gpu_class import class_of
from hadagen.problem.target import arch_named, arch_of_gpu, check_arch, generation, known_archs, model_of, nearest_arch

if TYPE_CHECKING:
    import torch

_NUMBER = re.compile("-?[0-9]+|cuda(:[0-9]+)?")  # the number of a CUDA device, as in PyTorch


@dataclass(frozen=True)
class Device:
    """`arch`: such as "sm90". `gpu`: the name of its class (`hadagen.gpu.gpu_class`), which of a GPU as it comes is
    that in CUDA, such as "NVIDIA H100 80GB HBM3"; "" for any."""

    arch: str
    gpu: str = ""

    def __post_init__(self) -> None:
        check_arch(self.arch)

    @property
    def generation(self) -> int:
        """The generation of its arch. A GPU runs the PTX of every generation up to its own."""
        return generation(self.arch)

    def is_named(self, gpu: str) -> bool:
        """Whether `gpu` is the name of its class, with or without that of its maker."""
        return bool(gpu) and _plain(gpu) == _plain(self.gpu)

    def is_model(self, gpu: str) -> bool:
        """Whether `gpu` is such a GPU, of its class or another."""
        return bool(gpu) and _plain(model_of(gpu)) == _plain(model_of(self.gpu))


def _plain(gpu: str) -> str:
    return " ".join(gpu.casefold().removeprefix("nvidia").split())


def how_to_get_kernels(arch: str) -> str:
    """Advice if no bundle serves an arch."""
    if nearest := nearest_arch(arch):
        return f"to make some: hadagen tune --arch {nearest}"
    return f"hadagen makes kernels for {', '.join(known_archs())} only"


def cuda_device(index: int) -> Device | None:
    """The CUDA device with PyTorch's number `index`; None if PyTorch is built for GPUs of another maker."""
    import torch

    if torch.version.cuda is None:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return Device(f"sm{major}{minor}", class_of(index, torch.cuda.get_device_name(index)))


def find_device(device: int | str | torch.device | None = None, arch: str | None = None) -> Device:
    """The device of these arguments: with `arch` the GPU named `device`, or any; else a CUDA device of this machine.
    `arch` may be the name of a GPU, such as "H100", and means its arch.

    Raises `UsageError` if there is none, if a number is given instead of a name, or if the name is that of a GPU of
    another arch.
    """
    if arch is not None:
        if device is not None and (not isinstance(device, str) or _NUMBER.fullmatch(device)):
            raise UsageError(
                f"device {shown(device)} is no name of a GPU, which is wanted beside an arch; "
                "write a name like 'NVIDIA H100 80GB HBM3', or leave out one of the two"
            )
        arch = arch_named(arch)
        target = Device(arch, device or "")
        if (its := arch_of_gpu(target.gpu)) not in (None, arch):
            raise UsageError(
                f"device {shown(device)} is a GPU of {its}, not of {arch}; give that arch, or another device"
            )
        return target
    import torch

    if not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device to choose for; name an arch, for instance sm90")
    index = cuda_index(device)
    found = None if index is None else cuda_device(index)
    if found is None:
        raise UsageError(f"device {shown(device)} is not a CUDA device of this machine; name one, or name an arch too")
    return found


def cuda_index(device: Any = None) -> int | None:
    """The number of a CUDA device of this machine, by default the current one; None if it is no such device."""
    import torch

    if device is None:
        return torch.cuda.current_device()
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return index if index < torch.cuda.device_count() else None
