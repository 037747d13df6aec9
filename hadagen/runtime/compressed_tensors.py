"""The rotation whose dense matrix a checkpoint of compressed-tensors carries."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch

from hadagen.errors import UsageError
from hadagen.problem.matrices import MAX_GIVEN_ORDER, find_orders
from hadagen.runtime.call.named import matrix_of
from hadagen.runtime.checks import DTYPES, check_is_tensor, has_values, kind_of, plain
from hadagen.runtime.overlap import overlaps_itself

_NAME = "compressed-tensors"
_ROWS_AT_A_TIME = 1024


def rotation_of(make: Any, weight: torch.Tensor, n: int | None, perm: torch.Tensor | None) -> Any:
    """The rotation that `Rotation.from_compressed_tensors` returns. Raises the same errors. make: `Rotation`."""
    check_is_tensor(weight, "weight")
    strange = weight.is_nested or weight.layout is not torch.strided or not has_values(weight)
    if strange or weight.dtype not in (*DTYPES, torch.int8):
        raise UsageError(
            f"weight is a {plain(weight.dtype)} tensor without values of ±c; pass the tensor of the checkpoint"
        )
    if weight.dim() != 2 or weight.shape[0] != weight.shape[1] or not len(weight):
        raise UsageError(f"weight has the shape {tuple(weight.shape)}; it must be square")
    size = len(weight)
    if overlaps_itself(weight.shape, weight.stride()):  # the rest would take memory for all of it
        raise UsageError(f"several elements of weight [{size}, {size}] share memory; those of a Hadamard matrix differ")
    weight = weight.detach().cpu()
    magnitudes = weight.abs()
    least, most = float(magnitudes.min()), float(magnitudes.max())
    if not 0.99 * most <= least <= most < math.inf or not least:
        raise UsageError(
            f"weight has magnitudes from {least:.3g} to {most:.3g}; those of a Hadamard matrix are all the same"
        )
    found = _recognized(make, weight, size if n is None else n)
    if found is None:
        raise UsageError(
            f"weight is not diag(signs) times a Hadamard matrix of compressed-tensors of order {size}; pass the "
            "tensor of a transform of type random-hadamard or hadamard, not transposed"
        )
    if perm is None:
        return found
    order = _as_permutation(perm, size)
    weight = weight[order][:, order]
    permuted = _recognized(make, weight, found.n)
    if permuted is not None:
        return permuted
    if size > MAX_GIVEN_ORDER:
        raise UsageError(
            f"a permuted matrix of order {size} has no kernel, as its order may be at most {MAX_GIVEN_ORDER}; "
            "multiply by weight[perm][:, perm] itself"
        )
    return make(found.n, weight.sign().to(torch.int8).T, block=size)


def _recognized(make: Any, weight: torch.Tensor, n: int) -> Any:
    """The rotation, over blocks, whose named matrix this weight is; None if it is of none."""
    size = len(weight)
    for k in _orders_of(size):
        matrix = matrix_of(_NAME, k[0]) if k else torch.tensor([[1]], dtype=torch.int8, device="cpu")
        # Row 0 of A ⊗ H is that of A, each entry repeated: H begins with ones.
        signs = weight[:, 0].sign().to(torch.int8) * matrix[0].repeat_interleave(size // len(matrix))
        if all(_agrees(matrix, signs, weight, first) for first in range(0, size, _ROWS_AT_A_TIME)):
            return make(n, _NAME, k=k, signs=signs, block=size)
    return None


def _as_permutation(perm: Any, size: int) -> torch.Tensor:
    """As int64 on the CPU. Raises TypeError and `UsageError` for what is no permutation of so many indices."""
    check_is_tensor(perm, "perm")
    whole = perm.layout is torch.strided and not perm.is_nested and has_values(perm)
    if whole and perm.shape == (size,) and not perm.is_floating_point() and not perm.is_complex():
        order: torch.Tensor = perm.detach().to("cpu", torch.int64)
        if torch.equal(order.sort().values, torch.arange(size, device="cpu")):
            return order
    raise UsageError(
        f"perm is {kind_of(perm)} of the shape {tuple(perm.shape)}; it must have each integer from 0 to {size - 1} once"
    )


def _orders_of(size: int) -> list[tuple[int, ...]]:
    """The orders that its matrices of this size may have, those of its rule first."""
    found: list[tuple[int, ...]] = []
    for k in (None, (), *((order,) for order in range(256, 0, -4))):
        with suppress(UsageError):
            found.append(find_orders(_NAME, size, k))
    return list(dict.fromkeys(found))


def _agrees(matrix: torch.Tensor, signs: torch.Tensor, weight: torch.Tensor, first: int) -> bool:
    """Whether some rows of the weight, from `first` on, have the signs of diag(signs) · (A ⊗ H)ᵀ."""
    size = len(weight)
    length = size // len(matrix)
    index = torch.arange(first, min(first + _ROWS_AT_A_TIME, size), device="cpu")
    rows = signs[index, None] * matrix.T[index // length]
    h = torch.ones(len(index), 1, dtype=torch.int8, device="cpu")  # rows of H
    while h.shape[1] < length:
        bit = (index % length // h.shape[1]) % 2
        h = torch.cat([h, h * (1 - 2 * bit[:, None]).to(torch.int8)], dim=1)
    return torch.equal((rows[:, :, None] * h[:, None, :]).flatten(1) > 0, weight[index[0] : index[-1] + 1] > 0)
