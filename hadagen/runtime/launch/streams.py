"""Devices and streams, as a launch needs them."""

from __future__ import annotations

from typing import Any

import torch

from hadagen.gpu import driver

# torch.cuda.current_stream builds an object, which takes longer than the launch.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


def queue(launch: driver.Launch, device: int, *addresses: int) -> None:
    """Queue a prepared launch on the current stream of its device. addresses: those of x, of y and
    of the other operands. Raises `DriverError`."""
    if current_device() == device:
        launch(raw_stream(device), *addresses)
    else:
        with driver.active(device):
            launch(raw_stream(device), *addresses)
