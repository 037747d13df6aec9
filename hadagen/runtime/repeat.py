"""What makes the launch of a call that comes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hadagen.driver import Launch
from hadagen.runtime import streams
from hadagen.runtime.checks import check_writable

ALIGNMENT = 16  # bytes; contiguous kernels read and write vectors of this size

Run = Callable[[torch.Tensor, int], torch.Tensor]  # on x, whose address is given too


def _find_increment_version() -> Any:
    """A function that tells autograd of a write to tensors: PyTorch's, without its wrapper if that takes several."""
    try:
        torch._C._increment_version(())
    except TypeError:
        return torch.autograd.graph.increment_version
    return torch._C._increment_version


increment_version = _find_increment_version()


def _find_empty_strided(device_type: str) -> Any:
    """A function that makes a tensor on the current device, from sizes, strides and type. If PyTorch has it, it is that
    of code of torch.compile, which takes half the time of torch.empty_like."""

    def empty_strided(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device_type)

    guards = getattr(torch._C, "_dynamo", None)
    return getattr(getattr(guards, "guards", None), f"_empty_strided_{device_type}", empty_strided)


empty_strided = {name: _find_empty_strided(name) for name in ("cuda", "cpu")}


def runner(x: torch.Tensor, launch: Launch, inplace: bool) -> Run:
    """What makes a launch for each tensor that differs from x in its address only: into it, or into a new contiguous
    tensor."""
    device, dtype = x.get_device(), x.dtype
    current_device, raw_stream = streams.current_device, streams.raw_stream
    alone = torch.cuda.device_count() == 1  # a single device is always current
    queue, count_write, make_empty = streams.queue, increment_version, empty_strided[x.device.type]
    sizes, strides = tuple(x.shape), torch.empty(x.shape, device="meta").stride()

    def run_in_place(x: torch.Tensor, address: int) -> torch.Tensor:
        if x.is_inference():
            check_writable(x)
        count_write((x,))  # PyTorch does not see that a kernel writes
        if alone or current_device() == device:
            launch(raw_stream(device), address, address)
        else:
            queue(launch, device, address, address)
        return x

    def run_out_of_place(x: torch.Tensor, address: int) -> torch.Tensor:
        if alone or current_device() == device:
            y: torch.Tensor = make_empty(sizes, strides, dtype)
            launch(raw_stream(device), address, y.data_ptr())
        else:
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            queue(launch, device, address, y.data_ptr())
        return y

    return run_in_place if inplace else run_out_of_place
