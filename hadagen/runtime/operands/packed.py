"""The operands of rotations: matrices and signs, as kernels and operators take them in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import torch

from hadagen.errors import TensorError
from hadagen.problem import operands
from hadagen.problem.operands import ENTRY_BYTES, PIECES
from hadagen.problem.problem import MAX_ORDER, DType, kernel_order, may_have_kernels, may_have_paired

TRAILER = 128  # bytes behind the values of a sealed buffer; see `hadagen.runtime.operands.sealed`
_PART = 16  # rows and columns of a part of a packed matrix


class Factors(NamedTuple):
    """What a rotation is made of. Each block of n elements of a row is multiplied by scale · M, where M is D_in ·
    (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · D_out. Tensors are on the device of the rows.

    n: the elements of a block, the product of all K times a power of two, the order of H.
    orders: K of each matrix; () without matrices.
    swapped: the two bits of each base-4 digit of an output's index are exchanged, between H and D_out. n is a power of
        4, and there are no matrices.
    matrices: the entries of A1, A2, …, row by row, one matrix behind the other: [ΣK²] of any real type but uint8; None
        for none. Or one matrix as kernels take it: uint8, what `pack_matrix` or `pack_real` gives; or two, without H,
        as `pack_pair` gives them. (Not a list of tensors, for which autograd's `is_grads_batched` has no rule.)
    signs, signs_after: the diagonals of D_in and D_out, uint8 [⌈n/8⌉]: bit i % 8 of byte i // 8 is 1 where element i is
        −1; or a `sealed` buffer of these bytes; or None.
    """

    n: int
    orders: Sequence[int] = ()
    swapped: bool = False
    scale: float = 1.0
    matrices: torch.Tensor | None = None
    signs: torch.Tensor | None = None
    signs_after: torch.Tensor | None = None


def structure_of(of: Factors) -> tuple[int, Sequence[int], bool, bool, bool, bool]:
    """The first fields of a `Spec`: those of the rotation, which is not transposed. (A function, because torch.compile
    of PyTorch 2.6 knows no properties of NamedTuples.)"""
    return of.n, of.orders, of.signs is not None, of.signs_after is not None, of.swapped, False


def present(matrices: torch.Tensor | None, *signs: torch.Tensor | None) -> list[torch.Tensor]:
    """The operands that are there."""
    return [each for each in (matrices, *signs) if each is not None]


def check_matrices(matrices: torch.Tensor, orders: Sequence[int], n: int) -> None:
    """Raises `TensorError` for a tensor that holds no matrices of these orders for blocks of n elements."""
    size, shape = sum(order**2 for order in orders), tuple(matrices.shape)
    if is_packed(matrices) and len(orders) == 1:
        size = matrices.numel() if is_real(matrices, orders) else packed_size(orders[0])
    elif is_packed(matrices):
        size = matrices.numel()
        if not is_pair(matrices, orders) or prod(orders) != n:
            raise TensorError(
                f"matrices is uint8 of the shape {shape}, but no packed matrices of the orders {list(orders)} for "
                f"n = {n} are; pass entries of another type"
            )
    if shape != (size,):
        kind = "packed matrices" if is_packed(matrices) else "matrices"
        raise TensorError(f"matrices has the shape {shape}; {kind} of the orders {list(orders)} have ({size},)")


def unpack_matrices(matrices: torch.Tensor | None, orders: Sequence[int]) -> list[torch.Tensor]:
    """The matrices, each [K, K]; int8 where they were packed with entries −1, 0 and 1."""
    if matrices is None:
        return []
    if is_real(matrices, orders):
        matrices = matrices[_pieces_size(orders[0]) :].view(_REAL[_real_sizes(orders[0]).index(len(matrices))])
    if is_pair(matrices, orders):
        matrices = matrices[_pair_size(orders) :].view(_REAL[_pair_sizes(orders).index(matrices.numel())])
    if is_packed(matrices):
        (order,) = orders
        entries = in_rows(matrices[: len(matrices) // 2], order)
        return [(entries == ENTRY_BYTES[1]).to(torch.int8) - (entries == ENTRY_BYTES[-1]).to(torch.int8)]
    parts = matrices.split([order**2 for order in orders])  # type: ignore[no-untyped-call]
    return [part.view(order, order) for part, order in zip(parts, orders, strict=True)]


def in_rows(packed: torch.Tensor, order: int) -> torch.Tensor:
    """Entries [order, order], of [side²] in the order of operands."""
    count = _side(order) // _PART
    parts = packed.view(count, count, 8, 4, 2, 2, 2)
    # Part (i, j), lane 4 g + t, word 2 b + a, half c → row 16 i + 8 a + g, column 16 j + 8 b + 2 t + c
    return parts.permute(0, 5, 2, 1, 4, 3, 6).reshape(count * _PART, count * _PART)[:order, :order]


def addresses(of: Any, dtype: torch.dtype) -> dict[str, int]:
    """The addresses of the operands of a `Call` for rows of this type, as `LaunchSpec.arguments` takes them. The
    tensors must stay where they are until the kernel has run."""
    matrices, orders, transposed = of.matrices, of.spec.orders, of.spec.transposed
    signs_in, signs_out = (of.signs_after, of.signs) if transposed else (of.signs, of.signs_after)
    matrix = right = None
    if is_pair(matrices, orders):
        size, end = _pieces_size(orders[0]) // 4, _pair_size(orders)
        matrix = matrices[size * (2 * (dtype == torch.bfloat16) + transposed) :]
        right = matrices[end - _right_size(orders[1]) // (1 + transposed) :]
    elif matrices is not None:
        first, size = 0, len(matrices) // 2
        if is_real(matrices, orders):
            size = _pieces_size(orders[0]) // 4
            first = 2 * size * (dtype == torch.bfloat16)
        matrix = matrices[first + size * transposed :]
    tensors = {"matrix": matrix, "signs_before": signs_in, "signs_after": signs_out}
    tensors |= {} if right is None else {"right_matrix": right}
    return {name: 0 if each is None else each.data_ptr() for name, each in tensors.items()}


def is_packed(matrices: torch.Tensor | None) -> bool:
    return matrices is not None and matrices.dtype == torch.uint8


def is_real(matrices: torch.Tensor | None, orders: Sequence[int]) -> bool:
    """Whether it is one real matrix as kernels take it."""
    return matrices is not None and is_packed(matrices) and len(orders) == 1 and len(matrices) in _real_sizes(orders[0])


def is_pair(matrices: torch.Tensor | None, orders: Sequence[int]) -> bool:
    """Whether it is two real matrices as kernels take them."""
    if matrices is None or not is_packed(matrices) or not may_have_paired(orders):
        return False
    return matrices.numel() in _pair_sizes(orders)


def _side(order: int) -> int:
    """Rows and columns of a matrix that is filled up."""
    return -(-order // _PART) * _PART


def packed_size(order: int) -> int:
    """Elements of a packed matrix."""
    return 2 * _side(order) ** 2


# The types of the entries of a real matrix that was packed.
_REAL = torch.float32, torch.float64


def _pieces_size(order: int) -> int:
    """Bytes of the pieces of a real matrix, for both types of x, as it is and transposed."""
    return 8 * PIECES * _side(order) ** 2


def _real_sizes(order: int) -> list[int]:
    """Elements of a packed real matrix, for each type of its entries."""
    return [_pieces_size(order) + order**2 * dtype.itemsize for dtype in _REAL]


def _right_size(order: int) -> int:
    """Bytes of the pieces of the second of two matrices, as it is and transposed."""
    return 4 * PIECES * order**2


def _pair_size(orders: Sequence[int]) -> int:
    """Bytes of the pieces of two matrices."""
    return _pieces_size(orders[0]) + _right_size(orders[1])


def _pair_sizes(orders: Sequence[int]) -> list[int]:
    """Elements of two packed matrices, for each type of their entries."""
    return [_pair_size(orders) + sum(order**2 for order in orders) * dtype.itemsize for dtype in _REAL]


def size_of_pair(entries: torch.dtype, orders: Sequence[int], n: int, device: torch.device) -> int | None:
    """Elements of the operand of two matrices with entries of a type, for rows of n on a device; None if it is not
    packed."""
    if entries not in _REAL or device.type == "mps" or not may_have_paired(orders) or prod(orders) != n:
        return None
    return _pair_sizes(orders)[_REAL.index(entries)]


def size_of_packed(entries: torch.dtype, order: int, n: int, device: torch.device) -> int | None:
    """Elements of the operand of one matrix with entries of a type, for rows of n on a device; None if it is not
    packed. A real matrix is packed where there may be kernels, but not on a device without float64."""
    if entries == torch.int8:
        return packed_size(order) if 1 < order <= MAX_ORDER else None
    if entries not in _REAL or device.type == "mps" or not may_have_kernels(order, n // order):
        return None
    return _real_sizes(order)[_REAL.index(entries)]


def pack_matrices(matrices: list[torch.Tensor], n: int, device: torch.device) -> torch.Tensor | None:
    """The operand for matrices [K, K], on their device, for rows of n on another device; one matrix is packed if
    `size_of_packed` says so, and two if `size_of_pair` does."""
    if len(matrices) == 1 and size_of_packed(matrices[0].dtype, len(matrices[0]), n, device):
        return (pack_matrix if matrices[0].dtype == torch.int8 else pack_real)(matrices[0])
    if len(matrices) == 2 and size_of_pair(matrices[0].dtype, list(map(len, matrices)), n, device):
        return pack_pair(*matrices)
    return torch.cat([each.flatten() for each in matrices]) if matrices else None


def pack_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """The operand for a matrix of −1, 0 and 1, uint8 [2 · side²]: what `hadagen.problem.operands.pack_matrix` makes of
    it, and of the matrix transposed."""
    return torch.cat((operands.pack_matrix(matrix), operands.pack_matrix(matrix.T)))


def pack_real(matrix: torch.Tensor) -> torch.Tensor:
    """The operand for a matrix of float32 or float64: what `hadagen.problem.operands.pack_real` makes of it, and of the
    matrix transposed, for float16 and then for bfloat16; and then the bytes of its entries, for PyTorch."""
    return torch.cat([*_pieces(matrix), matrix.flatten().view(torch.uint8)])


def pack_pair(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The operand for two matrices of float32 or of float64, A and C: the pieces of A as in `pack_real`; what
    `hadagen.problem.operands.pack_right` makes of C, and of C transposed; and then the bytes of the entries of both,
    for PyTorch."""
    pieces = [*_pieces(matrix), operands.pack_right(right), operands.pack_right(right.T)]
    return torch.cat([*pieces, *(each.flatten().view(torch.uint8) for each in (matrix, right))])


def _pieces(matrix: torch.Tensor) -> list[torch.Tensor]:
    ways = [(each, dtype) for dtype in (DType.FLOAT16, DType.BFLOAT16) for each in (matrix, matrix.T)]
    return [operands.pack_real(each, dtype) for each, dtype in ways]


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
    """Matrices with the same product with the rest of H, in the form of a kernel if possible: several matrices become
    one, which includes the part of H that `kernel_order` says."""
    order = prod(map(len, matrices))
    rest, left = divmod(n, order)
    if not matrices or order > MAX_ORDER or any(each.dtype != torch.int8 for each in matrices):
        return matrices
    if left or rest & (rest - 1):  # `check` refuses such an n
        return matrices
    part = kernel_order(order, rest) // order
    pair = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
    whole = [each.contiguous() for each in matrices]  # torch.kron takes no others
    return [reduce(torch.kron, [*whole, *[pair] * (part.bit_length() - 1)])]
