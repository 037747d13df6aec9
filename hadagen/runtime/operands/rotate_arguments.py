"""`RotateArguments`: the arguments of a rotation besides x; their forms in memory, and the checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import torch

from hadagen.errors import TensorError
from hadagen.problem import operands
from hadagen.problem.operands import ENTRY_BYTES, PIECES
from hadagen.problem.problem import MAX_ORDER, DType, kernel_order, may_have_kernels, may_have_paired
from hadagen.runtime.checks import check_alike, check_call, check_same_device, plain

TRAILER = 128  # bytes behind the values of a sealed buffer; see `hadagen.runtime.operands.sealed`
_PART = 16  # rows and columns of a part of a packed matrix


class RotateArguments(NamedTuple):
    """The arguments of a rotation besides x, in the order of the operator. Tensors are on x's device.

    Each block of n elements of the last dimension of x is multiplied by scale · M, or by scale · Mᵀ if `transposed`,
    with M = D_in · (A1 ⊗ A2 ⊗ … ⊗ H)ᵀ · D_out:

    matrices: the entries of A1, A2, …, row by row, one matrix behind the other: [ΣK²] of any real type but uint8; None
        for none. Or one matrix as kernels take it: uint8, what `pack_matrix` or `pack_real` gives; or two, without H,
        as `pack_pair` gives them. (Not a list of tensors, for which autograd's `is_grads_batched` has no rule.)
    orders: K of each matrix, or [1] without matrices, as AOTInductor cannot pass an empty list. n is the product of all
        K times a power of two, the order of H.
    signs, signs_after: the diagonals of D_in and D_out, uint8 [⌈n/8⌉]: bit i % 8 of byte i // 8 is 1 where element i is
        −1; or a `sealed` buffer of these bytes; or None.
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

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are not None, with their names in messages."""
        named = ("the matrix", self.matrices), ("the vector signs", self.signs), ("the vector signs_after", self[3])
        return [(f"{name} of the rotation", each) for name, each in named if each is not None]

    def scaled(self, factor: float, numerics: str, batch_invariant: bool) -> RotateArguments:
        """The same times a factor, with these numerics."""
        # Not by _replace, which torch.compile of PyTorch 2.6 lacks.
        tensors = self.matrices, self.orders, self.signs, self.signs_after
        asked = self.scale * factor, numerics, batch_invariant
        return RotateArguments(*tensors, self.n, self.swapped, self.transposed, *asked)


def check(x: torch.Tensor, of: RotateArguments) -> None:
    """Raises TypeError, `UsageError` or `TensorError` for operands that do not fit x. Reads no memory."""
    check_call(x, of.scale, of.numerics)
    if of.n < 1 or x.shape[-1] % of.n:
        raise TensorError(f"the last dimension of x is {x.shape[-1]}; it must be a multiple of {of.n}")
    size = sum(order**2 for order in of.orders)
    if of.matrices is not None and is_packed(of.matrices) and len(of.orders) == 1:
        size = packed_size(of.orders[0])
        if is_real(of.matrices, of.orders):
            size = of.matrices.numel()
    elif of.matrices is not None and is_packed(of.matrices):
        size = of.matrices.numel()
        if not is_pair(of.matrices, of.orders) or prod(of.orders) != of.n:
            raise TensorError(
                f"matrices is uint8 of the shape {tuple(of.matrices.shape)}, but no packed matrices of the orders "
                f"{list(of.orders)} for n = {of.n} are; pass entries of another type"
            )
    if of.matrices is None:
        if prod(of.orders) != 1:  # exported by earlier versions, it may be empty
            raise TensorError(f"matrices is None but the orders are {list(of.orders)}; pass their {size} entries")
    elif of.matrices.shape != (size,):
        shape = tuple(of.matrices.shape)
        kind = "packed matrices" if is_packed(of.matrices) else "matrices"
        raise TensorError(f"matrices has the shape {shape}; {kind} of the orders {list(of.orders)} have ({size},)")
    else:
        _check_place(x, of.matrices, "the matrix")
    rest, left = divmod(of.n, max(prod(of.orders), 1))
    if min(of.orders, default=1) < 1 or left or rest & (rest - 1):
        orders = " · ".join(map(str, of.orders)) or "1"
        raise TensorError(f"n = {of.n} is not {orders} times a power of two; pass other matrices")
    if of.swapped and (of.matrices is not None or rest.bit_length() % 2 == 0):
        raise TensorError(f"n = {of.n} must be a power of 4 without matrices, so that bits can be exchanged")
    for name, signs in (("signs", of.signs), ("signs_after", of.signs_after)):
        if signs is None:
            continue
        size = -(-of.n // 8)
        if signs.shape not in ((size,), (size + TRAILER,)) or signs.dtype != torch.uint8:
            raise TensorError(
                f"{name} is {plain(signs.dtype)} of the shape {tuple(signs.shape)}; it must be uint8 of ({size},), "
                "a bit each"
            )
        _check_place(x, signs, f"the vector {name}")


def _check_place(x: torch.Tensor, operand: torch.Tensor, name: str) -> None:
    name = f"{name} of the rotation"
    check_alike(x, operand, name)
    check_same_device(name, operand.device, "x", x.device, "move the rotation with .to(x.device)")


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


def addresses(of: RotateArguments, dtype: torch.dtype) -> dict[str, int]:
    """The addresses of the operands for x of this type, as `LaunchSpec.arguments` takes them. The tensors must stay
    where they are until the kernel has run."""
    signs_in, signs_out = (of.signs_after, of.signs) if of.transposed else (of.signs, of.signs_after)
    matrix = right = None
    if is_pair(of.matrices, of.orders):
        size, end = _pieces_size(of.orders[0]) // 4, _pair_size(of.orders)
        matrix = of.matrices[size * (2 * (dtype == torch.bfloat16) + of.transposed) :]  # type: ignore[index]
        right = of.matrices[end - _right_size(of.orders[1]) // (1 + of.transposed) :]  # type: ignore[index]
    elif of.matrices is not None:
        first, size = 0, len(of.matrices) // 2
        if is_real(of.matrices, of.orders):
            size = _pieces_size(of.orders[0]) // 4
            first = 2 * size * (dtype == torch.bfloat16)
        matrix = of.matrices[first + size * of.transposed :]
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
