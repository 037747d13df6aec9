"""Operands of rotations, made once for each device: from the names of matrices, and from sealed buffers.

`torch.ops.hadagen.operand` makes both too, so that torch.compile does not look inside. Operands lie outside of modules,
where nobody casts, moves, leaves out or stores them. Operands that depend only on a name are never freed, because CUDA
graphs keep addresses. There are few names and lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hadagen.errors import TensorError
from hadagen.problem.matrices import find_matrix
from hadagen.problem.problem import kernel_order
from hadagen.runtime.call import decompositions
from hadagen.runtime.call.operators import register
from hadagen.runtime.operands import sealed
from hadagen.runtime.operands.given import as_matrices, mean_square_of_rows, unpack_given
from hadagen.runtime.operands.packed import (
    TRAILER,
    combined,
    pack_matrices,
    pack_signs,
    size_of_packed,
    size_of_pair,
    unpack_signs,
)

REGULAR = "regular"


def matrix_of(name: str, order: int) -> torch.Tensor:
    """[order, order], int8 of ±1, on the CPU.

    Raises `UsageError` if there is no such matrix, and `StorageError` if it is damaged.
    """
    entries = torch.frombuffer(bytearray(find_matrix(name, order).entries()), dtype=torch.int8)
    return entries.view(order, order) * 2 - 1


def regular_diagonal(n: int) -> torch.Tensor:
    """⊗ diag(1, 1, 1, −1) for n = 4^k: the regular matrix is D · H · P · D, where P exchanges bits."""
    diagonal = torch.tensor([1], dtype=torch.int8, device="cpu")
    digit = torch.tensor([1, 1, 1, -1], dtype=torch.int8, device="cpu")
    while len(diagonal) < n:
        diagonal = torch.kron(diagonal, digit)
    return diagonal


@functools.cache
def named_on(name: str, orders: tuple[int, ...], n: int, device: str) -> torch.Tensor:
    """The matrices as `rotate` takes them for rows of n, `combined` and packed; for `regular` the packed diagonal."""
    with _disable_current_modes(), torch.inference_mode(False):  # whose tensors would outlive them here
        if name == REGULAR:
            return pack_signs(regular_diagonal(n)).to(device)
        operand = pack_matrices(combined([matrix_of(name, order) for order in orders], n), n, torch.device(device))
        assert operand is not None
        return operand.to(device)


def _empty(entries: torch.dtype, orders: Sequence[int], n: int, device: torch.device) -> torch.Tensor:
    """The operand of matrices with such entries, without values."""
    order = prod(orders)
    if entries == torch.int8:
        order = kernel_order(order, n // order)
    if (entries == torch.int8 or len(orders) == 1) and (size := size_of_packed(entries, order, n, device)):
        return torch.empty(size, dtype=torch.uint8, device=device)
    if size := size_of_pair(entries, orders, n, device):
        return torch.empty(size, dtype=torch.uint8, device=device)
    return torch.empty(sum(order**2 for order in orders), dtype=_held_by(device, entries), device=device)


def _held_by(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if device.type == "mps" and dtype == torch.float64 else dtype  # which has no float64


# ---- what depends on sealed buffers ----------------------------------------------------------------------------------
def scale_of(squares: Sequence[float], orders: Sequence[int], n: int) -> str:
    """The scale that makes the product with H orthonormal. squares: `mean_square_of_rows` of each matrix.

    As text: torch.compile takes a float for a variable, and compiles twice.
    """
    return repr((n // prod(orders) * prod(squares)) ** -0.5)


def folds(matrices: Sequence[torch.Tensor], n: int) -> bool:
    """Whether signs become a part of the matrix that `combined` gave. If there is no H, signs then cost nothing."""
    return len(matrices) == 1 and matrices[0].dtype == torch.int8 and len(matrices[0]) == n


# Addresses and versions of the buffers, and the rest of the arguments → the buffers, and the operand.
_stored: dict[tuple[Any, ...], tuple[list[Any], torch.Tensor]] = {}


def stored_on(
    matrices: torch.Tensor | None,
    signs: torch.Tensor | None,
    signs_after: torch.Tensor | None,
    name: str,
    orders: Sequence[int],
    n: int,
    scale: str,
) -> torch.Tensor:
    """The matrices as `rotate` takes them for rows of n, on the device of the sealed buffers from which they follow.

    matrices: given matrices, as `pack_given` stores them; None for the matrices of the name. signs, signs_after: signs
        that become a part of the matrix. scale: the result of `scale_of` for which the call was made.

    Raises `TensorError` if a buffer is not whole, and for matrices of −1, 0 and 1 of another scale.
    """
    buffers = [each for each in (matrices, signs, signs_after) if each is not None]
    places = tuple(
        None if each is None else (each.data_ptr(), sealed.version_of(each)) for each in (matrices, signs, signs_after)
    )
    device = buffers[0].device
    key = *places, name, tuple(orders), n, device, scale
    found = _stored.get(key)
    if found is not None and not any(each.expired() for each in found[0]):
        return found[1]
    with _disable_current_modes(), torch.inference_mode(False):
        sealed.check(*buffers, least=0)
        signs_in, signs_out = (
            None if each is None else unpack_signs(sealed.on_cpu(each), n) for each in (signs, signs_after)
        )
        if matrices is None:
            parts = [matrix_of(name, order) for order in orders]
        else:
            parts, _ = as_matrices(unpack_given(sealed.on_cpu(matrices)[:-TRAILER], orders))
            own = scale_of(list(map(mean_square_of_rows, parts)), orders, n)
            if own != scale and parts[0].dtype == torch.int8:
                raise TensorError(
                    f"the given matrices need the scale {own}, but the call was traced for matrices of the scale "
                    f"{scale}; trace the call again"
                )
            if own != scale:  # a trace has the scale of the matrices with which it was made
                parts[0] = (parts[0].double() * (float(own) / float(scale))).to(parts[0].dtype)
        parts = combined(parts, n)
        if signs_in is not None:
            parts = [parts[0] * signs_in]
        if signs_out is not None:
            parts = [signs_out[:, None] * parts[0]]
        operand = pack_matrices(parts, n, device)
        assert operand is not None
        operand = operand.to(device, _held_by(device, operand.dtype))
    for dead in [each for each, (memory, _) in list(_stored.items()) if any(one.expired() for one in memory)]:
        _stored.pop(dead, None)
    if len(_stored) >= 256:
        _stored.clear()
    _stored[key] = [sealed.StorageWeakRef(each.untyped_storage()) for each in buffers], operand
    return operand


# ---- as an operator --------------------------------------------------------------------------------------------------
def _copy(*asked: Any) -> torch.Tensor:
    """A copy, because compiled code may reuse the memory of a result."""
    *buffers, name, orders, n, scale, device = asked
    if any(each is not None for each in buffers):
        matrices, signs, signs_after = buffers
        return stored_on(matrices, signs, signs_after, name, orders, n, scale).clone()
    return named_on(name, tuple(orders), n, device).clone()


def _fake(*asked: Any) -> torch.Tensor:
    *buffers, name, orders, n, _, device = asked
    present = [each for each in buffers if each is not None]
    place, entries, matrices = present[0].device if present else torch.device(device), torch.int8, buffers[0]
    if not present and name == REGULAR:
        return torch.empty(-(-n // 8), dtype=torch.uint8, device=place)
    if matrices is not None:
        size = (matrices.numel() - TRAILER - len(orders)) // sum(order**2 for order in orders)
        entries = torch.int8 if size == 1 else torch.float32 if size == 4 else torch.float64
    return _empty(entries, orders, n, place)


def _autograd(*asked: Any) -> torch.Tensor:
    if decompositions.is_decomposing():
        return _decomposed(*asked)
    with torch._C._AutoDispatchBelowAutograd():
        return OPERAND(*asked)  # type: ignore[no-any-return]


def _decomposed(*asked: Any) -> torch.Tensor:
    *buffers, name, orders, n, scale, device = asked
    with _disable_current_modes():  # under which entries would be symbols
        is_named = buffers[0] is None and name != REGULAR
        entries = [matrix_of(name, order).tolist() for order in orders] if is_named else []
    if any(each is not None for each in buffers):
        matrices, signs, signs_after = buffers
        return decompositions.stored_matrix(matrices, signs, signs_after, entries, orders, n, scale)
    if name == REGULAR:
        return decompositions.regular_signs(n, torch.device(device))
    return decompositions.named_matrix(entries, n, torch.device(device))


# What `stored_on` gives for sealed buffers, or `named_on` without, in a new tensor. For `regular`, orders is [1].
# The device is text, because traces of torch.jit have no devices in operators.
OPERAND = register(
    "operand",
    "(Tensor? matrices, Tensor? signs, Tensor? signs_after, str name, int[] orders, int n, str scale, str device) "
    "-> Tensor",
    _copy,
    _fake,
    _autograd,
)
decompositions.TABLE[OPERAND] = _decomposed


def named_matrix(name: str, orders: Sequence[int], n: int, device: str) -> torch.Tensor:
    """What `named_on` gives, by the operator."""
    asked = None, None, None, name, orders, n, "", device
    if not torch.compiler.is_dynamo_compiling() and decompositions.is_decomposing():
        return _decomposed(*asked)
    return OPERAND(*asked)  # type: ignore[no-any-return]


def stored_matrix(
    matrices: torch.Tensor | None, signs: torch.Tensor | None, signs_after: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """What `stored_on` gives, by the operator."""
    return OPERAND(matrices, signs, signs_after, *rest, "")  # type: ignore[no-any-return]
