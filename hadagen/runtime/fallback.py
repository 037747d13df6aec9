"""The transform in plain PyTorch: for the CPU, and wherever no kernel fits."""

from __future__ import annotations

import torch

# Elements transformed at a time. On the CPU the two work buffers then stay in cache; on a GPU they stay out of the way.
_CPU_BLOCK = 1 << 20
_GPU_BLOCK = 1 << 24


def transform(x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
    """y = (x · H_n) · scale over the last dimension.

    x, y: floating point, of the same shape [..., n] with n a power of two, the same tensor or not overlapping; y can
    be viewed as [rows, n]. Computes in float64 for float64 and in float32 otherwise, and rounds to y's type once.
    """
    n = x.shape[-1]
    source = x.reshape(-1, n)
    target = y.view(-1, n)
    block = max(1, (_CPU_BLOCK if x.device.type == "cpu" else _GPU_BLOCK) // n)
    for first in range(0, source.shape[0], block):
        rows = slice(first, first + block)
        torch.mul(_butterflies(source[rows]), scale, out=target[rows])


def _butterflies(x: torch.Tensor) -> torch.Tensor:
    """x · H_n for contiguous-able x of shape [rows, n]: one pass of sums and differences per index bit."""
    values = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    n = x.shape[-1]
    buffers = torch.empty((2, *x.shape), dtype=values.dtype, device=x.device)
    for bit in range(n.bit_length() - 1):
        halves = values.reshape(-1, 2, 1 << bit)
        values = buffers[bit % 2]
        result = values.view(-1, 2, 1 << bit)
        torch.add(halves[:, 0], halves[:, 1], out=result[:, 0])
        torch.sub(halves[:, 0], halves[:, 1], out=result[:, 1])
    return values
