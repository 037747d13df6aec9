"""`torch.ops.hadagen.rotate`: rows times a product of signs, small matrices and a Hadamard matrix, as an operator.

Here alone a rotation is computed: H by the kernels of `hadamard_transform` where there are some, the rest in plain
PyTorch. PyTorch's settings for the precision of matrix products have no effect. `Rotation` makes the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from hadagen.errors import TensorError
from hadagen.runtime import compute, fallback
from hadagen.runtime.checks import check_call, check_like, check_writable
from hadagen.runtime.choose import BATCH_INVARIANT
from hadagen.runtime.linear import LinearOperator


class Operands(NamedTuple):
    """All but x, in the order in which the operator takes them. Tensors are on x's device.

    Each block of n elements of the last dimension of x is multiplied by scale · M, or by scale · Mᵀ if `transposed`,
    with M = D_in · (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · D_out:

    matrices: the entries of A1, A2, …, row by row, one matrix behind the other: [ΣK²] of any real type; None for none.
        (Not a list of tensors, for which autograd's `is_grads_batched` has no rule.)
    orders: K of each matrix. n is the product of all K times a power of two, the order of H.
    signs, signs_after: the diagonals of D_in and D_out, int8 of ±1, [n]; or None.
    swapped: the two bits of each base-4 digit of an output's index are exchanged, between H and D_out. n is a power of
        4, and there are no matrices.
    """

    matrices: torch.Tensor | None
    orders: Sequence[int]
    signs: torch.Tensor | None
    signs_after: torch.Tensor | None
    n: int
    swapped: bool
    transposed: bool
    scale: float
    numerics: str
    batch_invariant: bool = False


def check(x: torch.Tensor, of: Operands) -> None:
    """Raises TypeError, `UsageError` or `TensorError` for operands that do not fit x. Reads no memory."""
    check_call(x, of.scale, of.numerics)
    if of.n < 1 or x.shape[-1] % of.n:
        raise TensorError(f"the last dimension of x is {x.shape[-1]}; it must be a multiple of {of.n}")
    size = sum(order**2 for order in of.orders)
    if of.matrices is None:
        if size:
            raise TensorError(f"matrices is None but the orders are {list(of.orders)}; pass their {size} entries")
    elif of.matrices.shape != (size,):
        shape = tuple(of.matrices.shape)
        raise TensorError(f"matrices has the shape {shape}; matrices of the orders {list(of.orders)} have ({size},)")
    else:
        _check_place(x, of.matrices, "matrices is")
    rest, left = divmod(of.n, max(prod(of.orders), 1))
    if min(of.orders, default=1) < 1 or left or rest & (rest - 1):
        orders = " · ".join(map(str, of.orders)) or "1"
        raise TensorError(f"n = {of.n} is not {orders} times a power of two; pass other matrices")
    if of.swapped and (of.orders or rest.bit_length() % 2 == 0):
        raise TensorError(f"n = {of.n} must be a power of 4 without matrices, so that bits can be exchanged")
    for name, signs in (("signs", of.signs), ("signs_after", of.signs_after)):
        if signs is None:
            continue
        if signs.shape != (of.n,) or signs.dtype != torch.int8:
            plain = str(signs.dtype).removeprefix("torch.")
            raise TensorError(f"{name} is {plain} of the shape {tuple(signs.shape)}; it must be int8 of ({of.n},)")
        _check_place(x, signs, f"{name} is")


def _check_place(x: torch.Tensor, operand: torch.Tensor, subject: str) -> None:
    if operand.device != x.device:
        raise TensorError(f"{subject} on {operand.device} but x on {x.device}; move the rotation with .to(x.device)")


def unpack(matrices: torch.Tensor | None, orders: Sequence[int]) -> list[torch.Tensor]:
    """The matrices, each [K, K]."""
    if matrices is None:
        return []
    parts = matrices.split([order**2 for order in orders])  # type: ignore[no-untyped-call]
    return [part.view(order, order) for part, order in zip(parts, orders, strict=True)]


def _compute(x: torch.Tensor, of: Operands, inplace: bool) -> torch.Tensor:
    check(x, of)
    if inplace:
        check_writable(x)
        if x.is_contiguous():
            _rotate(x, x, of)
            return x
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotate(x, y, of)
    return x.copy_(y) if inplace else y


def _compute_into(x: torch.Tensor, y: torch.Tensor, of: Operands) -> None:
    check(x, of)
    check_like(x, y)
    check_writable(y)
    same = x.data_ptr() == y.data_ptr() and x.stride() == y.stride()
    if y.is_contiguous() and (same or not compute.may_overlap(x, y)):
        _rotate(x, y, of)
    else:
        y.copy_(_compute(x, of, False))


def _rotate(x: torch.Tensor, y: torch.Tensor, of: Operands) -> None:
    """Into y, which is contiguous, and the same memory as x or none of it."""
    blocks = (*x.shape[:-1], x.shape[-1] // of.n, of.n)
    x, y = x.view(blocks), y.view(blocks)
    first, last = (of.signs_after, of.signs) if of.transposed else (of.signs, of.signs_after)
    if of.matrices is not None:
        matrices = unpack(of.matrices, of.orders)
        _multiply(x, y, [matrix.T for matrix in matrices] if of.transposed else matrices, first, of)
    else:
        options = compute.Options(of.scale, of.numerics, of.batch_invariant)
        # Signs are exact, so this rounds once too.
        if first is not None:
            torch.mul(x, first, out=y)
            x = y
        if x.data_ptr() == y.data_ptr():
            compute.compute(y, options, True)
        else:
            compute.compute_into(x, y, options)
    if of.swapped:
        y.copy_(_swapped(y))
    if last is not None:
        y.mul_(last)


def _multiply(
    x: torch.Tensor, y: torch.Tensor, matrices: list[torch.Tensor], signs: torch.Tensor | None, of: Operands
) -> None:
    """y = x · diag(signs) · (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · scale, rounded to y's type once.

    Computes in float64 for float64. Otherwise H is computed in float32, and products with matrices in float64 (float32
    on a device without float64).
    """
    source, target = x.reshape(-1, of.n), y.view(-1, of.n)
    block = fallback.rows_at_a_time(source, of.n)
    dtype = fallback.type_to_compute_in(x)
    # No setting lowers the precision of products of float64, unlike that of float32.
    factors = [matrix.to(dtype if x.device.type == "mps" else torch.float64) for matrix in matrices]
    length = of.n // prod(of.orders)  # of the rows that H transforms
    first_scale, last_scale = fallback.split_scale(x, of.scale)
    options = compute.Options(first_scale, "accurate", of.batch_invariant)
    for first in range(0, source.shape[0], block):
        values = source[first : first + block].to(dtype, copy=True, memory_format=torch.contiguous_format)
        if signs is not None:
            values.mul_(signs)
        values = compute.compute(values.view(-1, length), options, True)
        right = of.n  # elements behind one index of the next matrix and all indices before it
        for factor in factors:
            order = len(factor)
            right //= order
            values = values.to(factor.dtype).reshape(-1, order, right)
            if of.batch_invariant:
                values = _summed(factor, values)
            else:
                values = values[..., 0] @ factor.T if right == 1 else factor @ values
        torch.mul(values.reshape(-1, of.n), last_scale, out=target[first : first + block])


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


ROTATE = LinearOperator(
    "rotate",
    Operands,
    "Tensor? matrices, int[] orders, Tensor? signs, Tensor? signs_after, int n, bool swapped, bool transposed, "
    "Scalar scale, str numerics",
    "bool batch_invariant=False",
    compute=_compute,
    compute_into=_compute_into,
    check=check,
    transpose=lambda of: of._replace(transposed=not of.transposed),
)


def rotate(
    x: torch.Tensor, matrix: torch.Tensor | None, order: int, n: int, *, scale: float, transposed: bool = False
) -> torch.Tensor:
    """x · (A ⊗ H)ᵀ · scale, or its transpose, over the last dimension, in a new tensor.

    x: [..., n]. matrix: the entries of A, of this order, row by row; None for H alone, and then order is 1.
    """
    orders = [] if matrix is None else [order]
    return ROTATE.apply(
        x, Operands(matrix, orders, None, None, n, False, transposed, scale, "accurate", BATCH_INVARIANT)
    )
