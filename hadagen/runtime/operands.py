"""What a rotation takes beside x: `Operands`, their forms in memory, and the checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import torch

from hadagen.errors import TensorError
from hadagen.problem import MAX_ORDER
from hadagen.runtime.checks import check_call

# Kernels take a matrix of at most MAX_ORDER, and transform its rows alone or rows of at least so many elements.
_LEAST_LENGTH = 8


class Operands(NamedTuple):
    """All but x, in the order in which the operator takes them. Tensors are on x's device.

    Each block of n elements of the last dimension of x is multiplied by scale · M, or by scale · Mᵀ if `transposed`,
    with M = D_in · (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · D_out:

    matrices: the entries of A1, A2, …, row by row, one matrix behind the other: [ΣK²] of any real type; None for none.
        There are kernels for a single int8 matrix, whose entries must be −1, 0 and 1. (Not a list of tensors, for which
        autograd's `is_grads_batched` has no rule.)
    orders: K of each matrix. n is the product of all K times a power of two, the order of H.
    signs, signs_after: the diagonals of D_in and D_out, uint8 [⌈n/8⌉]: bit i % 8 of byte i // 8 is 1 where element i is
        −1; or None.
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
        size = -(-of.n // 8)
        if signs.shape != (size,) or signs.dtype != torch.uint8:
            plain = str(signs.dtype).removeprefix("torch.")
            raise TensorError(
                f"{name} is {plain} of the shape {tuple(signs.shape)}; it must be uint8 of ({size},), a bit each"
            )
        _check_place(x, signs, f"{name} is")


def _check_place(x: torch.Tensor, operand: torch.Tensor, subject: str) -> None:
    if operand.device != x.device:
        raise TensorError(f"{subject} on {operand.device} but x on {x.device}; move the rotation with .to(x.device)")


def unpack_matrices(matrices: torch.Tensor | None, orders: Sequence[int]) -> list[torch.Tensor]:
    """The matrices, each [K, K]."""
    if matrices is None:
        return []
    parts = matrices.split([order**2 for order in orders])  # type: ignore[no-untyped-call]
    return [part.view(order, order) for part, order in zip(parts, orders, strict=True)]


def addresses(of: Operands) -> dict[str, int]:
    """What a kernel takes for them, as `LaunchSpec.arguments` does. The tensors must stay where they are until it has
    run."""
    before, after = (of.signs_after, of.signs) if of.transposed else (of.signs, of.signs_after)
    tensors = {"matrix": of.matrices, "signs_before": before, "signs_after": after}
    found = {name: 0 if each is None else each.data_ptr() for name, each in tensors.items()}
    return found | {"transposed": int(of.transposed)}


def pack_signs(signs: torch.Tensor) -> torch.Tensor:
    """The operand for [n] numbers of ±1, on their device."""
    bits = torch.nn.functional.pad((signs < 0).to(torch.uint8), (0, -len(signs) % 8)).view(-1, 8)
    return (bits << _places(signs.device)).sum(1, dtype=torch.uint8)


def unpack_signs(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The n numbers of ±1, int8, of an operand."""
    bits = (packed[:, None] >> _places(packed.device)) & 1
    return 1 - 2 * bits.flatten()[:n].to(torch.int8)


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def combined(matrices: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    """Matrices whose product with the H that is left of n is the same, such that a kernel takes them if there is a way:
    several matrices become one, and an H that is too short for kernels becomes a part of it."""
    order = prod(map(len, matrices))
    rest = n // order
    short = rest if 1 < rest < _LEAST_LENGTH else 1
    fits = order * short <= MAX_ORDER and all(each.dtype == torch.int8 for each in matrices)
    if not matrices or not fits or (len(matrices) == 1 and short == 1):
        return matrices
    pair = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
    return [reduce(torch.kron, [*matrices, *[pair] * (short.bit_length() - 1)])]
