"""Checks of the arguments of a `Rotation`: counts, orders, matrices and signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hadagen.errors import UsageError, shown
from hadagen.problem.matrices import MAX_GIVEN_ORDER
from hadagen.runtime.arguments import as_int, is_count
from hadagen.runtime.checks import DTYPES, check_is_tensor, has_values, kind_of, plain

# How far the rows of a given matrix may be from orthonormal where an inverse is asked: a few roundings of its type, but
# at least this much, because many matrices are computed in float32.
_LEAST_TOLERANCE = 1e-5
_SIGNS_ADVICE = "pass a dense tensor of integers or real numbers, each 1 or -1"
_TYPES = (torch.int8, *DTYPES)  # of given matrices; their places are stored


def as_count(value: Any, name: str) -> int:
    """Raises `UsageError`, with the name, unless it is an integer from 1 to 2^63 - 1."""
    value = as_int(value)
    if not is_count(value) or value >= 1 << 63:
        raise UsageError(f"{name} = {shown(value)} is not possible; it must be an integer from 1 to 2^63 - 1")
    return int(value)


def as_orders(k: Any) -> tuple[int, ...]:
    """One order or several. Raises `UsageError` as `as_count` does."""
    whole = as_int(k)
    try:
        orders = [whole] if isinstance(whole, int) else list(k)
    except TypeError:  # for arrays without a dimension too, which have __iter__
        orders = [k]
    return tuple(as_count(order, "k") for order in orders)


def is_unknown(values: Any) -> bool:
    """Whether `values` is a tensor without values (such as on the meta device); a state dict may supply them later."""
    return isinstance(values, torch.Tensor) and not has_values(values)


def pack_given(given: list[torch.Tensor]) -> torch.Tensor:
    """Matrices as bytes: their entries in the least type that holds all, and a byte for the type of each."""
    entries = torch.cat([each.flatten().to(_least_type(given)) for each in given])
    types = torch.tensor([_TYPES.index(each.dtype) for each in given], dtype=torch.uint8, device="cpu")
    return torch.cat([entries.view(torch.uint8), types])


def size_of_given(given: list[torch.Tensor]) -> int:
    """The number of bytes that `pack_given` returns."""
    return sum(each.numel() for each in given) * _least_type(given).itemsize + len(given)


def unpack_given(packed: torch.Tensor, orders: Sequence[int]) -> list[torch.Tensor]:
    """The matrices of `pack_given`, on the CPU."""
    count = len(orders)
    types = [_TYPES[code] for code in packed[-count:].tolist()]
    empty = [torch.empty(0, dtype=dtype, device="meta") for dtype in types]
    entries = packed[:-count].clone().view(_least_type(empty))
    parts = entries.split([order**2 for order in orders])  # type: ignore[no-untyped-call]
    return [part.view(order, order).to(dtype) for part, order, dtype in zip(parts, orders, types, strict=True)]


def _least_type(matrices: list[torch.Tensor]) -> torch.dtype:
    types = {each.dtype for each in matrices}
    return torch.int8 if types == {torch.int8} else torch.float64 if torch.float64 in types else torch.float32


def as_matrices(matrix: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The matrices as operands, and copies in types that hold them and tell their precision. All on the CPU.

    All operands have one type. A matrix with other entries than −1, 0 and 1 is divided by a power of two, which is
    exact, so that neither the norm of its rows nor the scale of the rotation is far from 1.

    matrix: a tensor [K, K] of real numbers, or several. Raises TypeError and `UsageError` for anything else.
    """
    given = listed(matrix)
    matrices = [_checked(each) for each in given]
    copies, operands = [], []
    for wide, each in zip(matrices, given, strict=True):
        whole = bool(((wide == 0) | (wide.abs() == 1)).all())
        copies.append(wide.to(torch.int8 if whole else each.dtype if each.dtype in DTYPES else torch.float64))
        operands.append(wide if whole else wide / 2.0 ** (math.frexp(mean_square_of_rows(wide))[1] // 2))
    least = _least_type(copies)
    return [operand.to(least) for operand in operands], copies


def listed(matrix: Any) -> Sequence[torch.Tensor]:
    """One matrix or several. Raises TypeError and `UsageError` for anything else."""
    given = [matrix] if isinstance(matrix, torch.Tensor) else matrix
    if not isinstance(given, Sequence) or not all(isinstance(each, torch.Tensor) for each in given):
        raise TypeError(f"matrix is a {type(matrix).__name__}; pass a name, a K×K tensor or a list of them")
    if not given:
        raise UsageError("matrix is an empty list; pass a name, a K×K tensor or a list of them")
    return given


def as_unknown(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies as by `as_matrices` of matrices without values: only types and shapes. Raises `UsageError`."""
    for each in given:
        _check_kind(each)
    types = [each.dtype if each.dtype in _TYPES else torch.float64 for each in given]
    return [torch.empty(each.shape, dtype=dtype, device="meta") for each, dtype in zip(given, types, strict=True)]


def _checked(matrix: torch.Tensor) -> torch.Tensor:
    """A copy in float64 on the CPU."""
    _check_kind(matrix)
    if is_unknown(matrix):
        raise UsageError("the matrix has no values, unlike another; make all of them on the same device")
    # Contiguous, so that what follows from equal matrices is equal to the last bit.
    copy = matrix.detach().to("cpu", torch.float64, copy=True, memory_format=torch.contiguous_format)
    if not copy.isfinite().all():
        raise UsageError("the matrix has entries that are not finite; replace them")
    if not 0 < mean_square_of_rows(copy) < math.inf:
        raise UsageError(f"the matrix has the norm {float(copy.norm()):.3g}, and cannot be made orthonormal; scale it")
    return copy


def _check_kind(matrix: torch.Tensor) -> None:
    """Raises TypeError, `UsageError` and `TensorError`. Reads no values."""
    check_is_tensor(matrix, "matrix")
    if matrix.is_nested or matrix.layout is not torch.strided:
        raise UsageError("the matrix is sparse or nested; pass a dense tensor")
    if matrix.is_complex() or matrix.dtype == torch.bool or matrix.is_quantized:
        raise UsageError(f"the matrix is a {plain(matrix.dtype)} tensor; pass real numbers")
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise UsageError(f"the matrix has the shape {tuple(matrix.shape)}; it must be square")
    if len(matrix) > MAX_GIVEN_ORDER:
        raise UsageError(f"the matrix has the order {len(matrix)}; it may be at most {MAX_GIVEN_ORDER}")
    if matrix.requires_grad:
        raise UsageError("the matrix requires grad, but a Rotation has gradients of x alone; pass matrix.detach()")


def why_not_orthogonal(matrix: torch.Tensor, given: torch.Tensor) -> str | None:
    """The sentence that says why a matrix has no inverse; None if its rows are orthogonal and of the same norm, up to
    roundings of its type.

    given: the matrix of the type in which it was given.
    """
    wide = matrix.double()
    apart = wide @ wide.T / mean_square_of_rows(wide) - torch.eye(len(wide), dtype=torch.float64, device="cpu")
    most = float(apart.abs().max())
    tolerance = max(_LEAST_TOLERANCE, 4 * torch.finfo(given.dtype).eps if given.is_floating_point() else 0.0)
    if most <= tolerance:
        return None
    return (
        f"the matrix of order {len(matrix)} has no inverse here: its rows are {most:.1e} from orthonormal, and at most "
        f"{tolerance:.1e} is allowed; make it orthogonal first"
    )


def mean_square_of_rows(matrix: torch.Tensor) -> float:
    """‖A‖² / K: the square of the norm of a row, on average."""
    return float(matrix.double().square().sum()) / len(matrix)


def check_orders(orders: tuple[int, ...], asked: tuple[int, ...] | None, block: int) -> None:
    """Raises `UsageError` unless the orders of given matrices are those that were asked for, if any, and a block is
    their product times a power of two."""
    product = " · ".join(map(str, orders))
    if asked is not None and asked != orders:
        raise UsageError(f"k = {asked} does not fit matrices of the orders {product}; leave k out")
    rest, left = divmod(block, math.prod(orders))
    if left or rest & (rest - 1):
        raise UsageError(f"n = {block} is not {product} times a power of two; choose such blocks or other matrices")


def as_signs(values: Any, name: str, length: int) -> torch.Tensor | None:
    """`length` numbers of ±1, as int8 on the CPU; None for a tensor without values. Raises TypeError and `UsageError`,
    with the name, for others."""
    if isinstance(values, torch.Tensor):
        check_is_tensor(values, name)
        if values.is_nested or values.is_quantized:
            raise UsageError(f"{name} is a {kind_of(values)} tensor; {_SIGNS_ADVICE}")
    try:
        signs = values if is_unknown(values) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(f"{name} is a {type(values).__name__}; pass a tensor or a list of 1 and -1") from None
    if signs.shape != (length,):
        raise UsageError(f"{name} has the shape {tuple(signs.shape)}; it must have the {length} elements of a block")
    if signs.is_complex() or signs.dtype == torch.bool or signs.layout is not torch.strided:
        raise UsageError(f"{name} is a {plain(signs.dtype)} tensor; {_SIGNS_ADVICE}")
    if is_unknown(signs):
        return None
    signs = signs.detach().double()
    wrong = (signs.abs() != 1).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise UsageError(f"{name}[{place}] is {signs[place].item():g}; each must be 1 or -1")
    return signs.to(torch.int8, copy=True)
