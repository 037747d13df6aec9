"""The transform in plain PyTorch: for the CPU, and wherever no kernel fits."""

from __future__ import annotations

import torch

from hadagen.problem import padded_length

# Elements transformed at a time. On the CPU the two work buffers then stay in cache; on a GPU they stay out of the way.
_CPU_BLOCK = 1 << 20
_GPU_BLOCK = 1 << 24
# Where the innermost dimension is shorter than this, the CPU is faster with one column of it at a time.
_SHORT = 4


def transform(x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
    """y = (x · H_n) · scale over the last dimension, with x continued by zeros from m to n elements, and y cut to m.

    x, y: floating point, of the same shape [..., m] with m ≥ 1, the same tensor or not overlapping; y can be viewed as
    [rows, m]. n is m or the next power of two. Computes in float64 for float64 and in float32 otherwise, and rounds to
    y's type once. There are no matrix products in it, which could be told to round their operands (TF32, bfloat16).
    """
    m = x.shape[-1]
    n = padded_length(m)
    source, target = x.reshape(-1, m), y.view(-1, m)
    block = max(1, min(source.shape[0], (_CPU_BLOCK if x.device.type == "cpu" else _GPU_BLOCK) // n))
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    buffers = torch.empty((2, block, n), dtype=dtype, device=x.device)
    for first in range(0, source.shape[0], block):
        rows = slice(first, first + block)
        torch.mul(_butterflies(source[rows], buffers)[:, :m], scale, out=target[rows])


def _butterflies(x: torch.Tensor, buffers: torch.Tensor) -> torch.Tensor:
    """x · H_n for x of shape [rows, m]: one pass of sums and differences per index bit.

    buffers: [2, at least rows, n] of the type to compute in. The result is in one of them, or x itself where n = 1.
    """
    rows, m = x.shape
    n = buffers.shape[-1]
    values, (result, other) = x, buffers[:, :rows]
    if m < n or x.dtype != buffers.dtype:
        values = other
        values[:, :m] = x
        values[:, m:] = 0
    for bit in range(n.bit_length() - 1):
        width = 1 << bit
        halves = (rows, n // (2 * width), 2, width)
        views = *values.view(halves).unbind(2), *result.view(halves).unbind(2)
        by_column = width < _SHORT and x.device.type == "cpu"
        for even, odd, sums, differences in zip(*(v.unbind(2) for v in views), strict=True) if by_column else (views,):
            torch.add(even, odd, out=sums)
            torch.sub(even, odd, out=differences)
        values, result, other = result, other, result
    return values
