"""A rotation in plain PyTorch: for the CPU, for all operands without a kernel, and to compare kernels with.

PyTorch's settings for the precision of matrix products have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from hadagen.runtime.operands.packed import unpack_matrices, unpack_signs
from hadagen.runtime.plain import transform as plain_transform

# (x, y, scale): y = (x · H) · scale over the last dimension, where y is x or shares no memory with it.
Transform = Callable[[torch.Tensor, torch.Tensor, float], None]


def rotate_into(x: torch.Tensor, y: torch.Tensor, of: Any, transform: Transform) -> None:
    """y = x · M · scale or x · Mᵀ · scale, as a `Call` says, rounded to y's type once.

    y is contiguous, and the same memory as x or none of it. With matrices, computes in float64 for float64; otherwise
    `transform` gets float32, and products with matrices are in float64 (float32 on a device without float64). Without,
    `transform` gets x and y.
    """
    blocks = (*x.shape[:-1], x.shape[-1] // of.spec.n, of.spec.n)
    x, y = x.view(blocks), y.view(blocks)
    diagonals = [None if signs is None else unpack_signs(signs, of.spec.n) for signs in (of.signs, of.signs_after)]
    first, last = reversed(diagonals) if of.spec.transposed else diagonals
    if of.matrices is not None:
        _multiply(x, y, first, of, transform)
    else:
        # Signs are exact, so this rounds once too.
        if first is not None:
            torch.mul(x, first, out=y)
            x = y
        transform(x, y, of.scale)
    if of.spec.swapped:
        y.copy_(_swapped(y))
    if last is not None:
        y.mul_(last)


def _multiply(x: torch.Tensor, y: torch.Tensor, signs: torch.Tensor | None, of: Any, transform: Transform) -> None:
    """y = x · diag(signs) · (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · scale, with each A transposed if `of` is."""
    source, target = x.reshape(-1, of.spec.n), y.view(-1, of.spec.n)
    block = plain_transform.rows_at_a_time(source, of.spec.n)
    dtype = plain_transform.type_to_compute_in(x)
    # No setting lowers the precision of products of float64, unlike that of float32.
    exact = dtype if x.device.type == "mps" else torch.float64
    matrices = [matrix.to(exact) for matrix in unpack_matrices(of.matrices, of.spec.orders)]
    factors = [matrix.T for matrix in matrices] if of.spec.transposed else matrices
    length = of.spec.n // prod(of.spec.orders)  # of the rows that H transforms
    first_scale, last_scale = plain_transform.split_scale(x, of.scale)
    for first in range(0, source.shape[0], block):
        values = source[first : first + block].to(dtype, copy=True, memory_format=torch.contiguous_format)
        if signs is not None:
            values.mul_(signs)
        values = values.view(-1, length)
        transform(values, values, first_scale)
        right = of.spec.n  # elements behind one index of the next matrix and all indices before it
        for factor in factors:
            order = len(factor)
            right //= order
            values = values.to(factor.dtype).reshape(-1, order, right)
            if of.spec.batch_invariant:
                values = _summed(factor, values)
            else:
                values = values[..., 0] @ factor.T if right == 1 else factor @ values
        torch.mul(values.reshape(-1, of.spec.n), last_scale, out=target[first : first + block])


def _summed(matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """matrix @ values, [rows, K, right], in an order of sums that does not depend on the number of rows."""
    result = matrix[:, :1] * values[:, :1]
    for column in range(1, len(matrix)):
        result.addcmul_(matrix[:, column, None], values[:, column, None])
    return result


def _swapped(y: torch.Tensor) -> torch.Tensor:
    """A copy of y, [..., 4^k], with the two bits of each base-4 digit of the last index exchanged."""
    digits = (y.shape[-1].bit_length() - 1) // 2
    rows = y.reshape(-1, *(2,) * (2 * digits))
    order = [axis for digit in range(digits) for axis in (2 * digit + 2, 2 * digit + 1)]
    return rows.permute(0, *order).reshape(y.shape).clone()
