"""The transform in plain PyTorch: for the CPU, and for all calls without a kernel."""

from __future__ import annotations

import torch

from hadagen.problem.problem import padded_length

# Elements transformed at a time. On the CPU the two work buffers then stay in cache; on a GPU they stay small.
_CPU_BLOCK = 1 << 20
_GPU_BLOCK = 1 << 24
# If the innermost dimension is shorter than this, the CPU is faster with one column of it at a time.
_SHORT = 4
# Butterflies between neighbors are slow on the CPU. If there are many blocks, a matrix product does the lowest bits.
_PRODUCT = 16
_MANY_BLOCKS = 4


def transform(x: torch.Tensor, y: torch.Tensor, scale: float, *, batch_invariant: bool = False) -> None:
    """y = (x · H_n) · scale over the last dimension, with x zero-padded from m to n elements, and y cut to m.

    x, y: floating point, of the same shape [..., m] with m ≥ 1, the same tensor or without overlap; y can be viewed as
    [rows, m]. n is m or the next power of two. Computes in float64 for float64 and in float32 otherwise, and rounds to
    y's type once. PyTorch's settings for the precision of matrix products have no effect.
    batch_invariant: a row gives the same bits among any number of rows. Many rows take longer then, on the CPU.
    """
    m = x.shape[-1]
    n = padded_length(m)
    source, target = x.reshape(-1, m), y.view(-1, m)
    block = rows_at_a_time(source, n)
    dtype = type_to_compute_in(x)
    buffers = torch.empty((2, block, n), dtype=dtype, device=x.device)
    many = x.device.type == "cpu" and n >= _PRODUCT and source.shape[0] >= _MANY_BLOCKS * block
    low = _exact_product(buffers) if many and not batch_invariant else None
    first_scale, last_scale = split_scale(x, scale)
    if low is not None:
        low, first_scale = low * first_scale, 1.0
    for first in range(0, source.shape[0], block):
        rows = slice(first, first + block)
        torch.mul(_hadamard(source[rows], buffers, low, first_scale)[:, :m], last_scale, out=target[rows])


def rows_at_a_time(x: torch.Tensor, n: int) -> int:
    """The number of rows of x, [rows, …], to transform at a time, with n elements each."""
    return max(1, min(x.shape[0], (_CPU_BLOCK if x.device.type == "cpu" else _GPU_BLOCK) // n))


def type_to_compute_in(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def split_scale(x: torch.Tensor, scale: float) -> tuple[float, float]:
    """The factors to multiply by before and after all sums. A scale below 1 comes first, so that no sum is larger than
    a result. A scale above 1 comes last, for the same reason. Sums of float16 are far below the maximum of float32."""
    return (scale, 1.0) if abs(scale) < 1 and x.dtype != torch.float16 else (1.0, scale)


def _hadamard(x: torch.Tensor, buffers: torch.Tensor, low: torch.Tensor | None, scale: float) -> torch.Tensor:
    """(x · scale) · H_n for x of shape [rows, m]: the lowest bits by a product with `low`, if given, and one pass of
    sums and differences for each other index bit.

    buffers: [2, at least rows, n] of the type to compute in. The result is in one of them, or x itself if n = 1.
    """
    rows, m = x.shape
    n = buffers.shape[-1]
    values, (result, other) = x, buffers[:, :rows]
    if m < n or x.dtype != buffers.dtype or scale != 1 or not (low is None or x.is_contiguous()):
        values = other
        values[:, :m] = x
        values[:, m:] = 0
        if scale != 1:
            values.mul_(scale)
    done = 0
    if low is not None:
        torch.mm(values.view(-1, _PRODUCT), low, out=result.view(-1, _PRODUCT))
        values, result, other = result, other, result
        done = _PRODUCT.bit_length() - 1
    for bit in range(done, n.bit_length() - 1):
        width = 1 << bit
        halves = (rows, n // (2 * width), 2, width)
        views = *values.view(halves).unbind(2), *result.view(halves).unbind(2)
        by_column = width < _SHORT and x.device.type == "cpu"
        for even, odd, sums, differences in zip(*(v.unbind(2) for v in views), strict=True) if by_column else (views,):
            torch.add(even, odd, out=sums)
            torch.sub(even, odd, out=differences)
        values, result, other = result, other, result
    return values


def _exact_product(buffers: torch.Tensor) -> torch.Tensor | None:
    """H of the lowest bits; None if matrix products of the shape of the blocks round their operands.

    Many settings of PyTorch and its libraries cause that (bfloat16, TF32), so this tries a product.
    """
    low = torch.ones(1, 1, dtype=buffers.dtype)
    while low.shape[0] < _PRODUCT:
        low = torch.cat([torch.cat([low, low], 1), torch.cat([low, -low], 1)])
    probe, result = (buffer.view(-1, _PRODUCT) for buffer in buffers)
    value = 1 + torch.finfo(buffers.dtype).eps
    probe.zero_()
    probe[:, 0] = value
    torch.mm(probe, low, out=result)
    return low if result[-1].tolist() == [value] * _PRODUCT else None
