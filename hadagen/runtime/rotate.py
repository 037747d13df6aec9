"""`torch.ops.hadagen.rotate`: rows times a product of signs, small matrices and a Hadamard matrix, as an operator.

Here alone a rotation is computed. One kernel does all of it if there is one: for float16 and bfloat16 with at most one
matrix of −1, 0 and 1, and for signs without a matrix. Kernels take contiguous rows; other tensors are copied. Where
there is none, PyTorch does it, and H goes through the kernels of `hadamard_transform`. `Rotation` makes the operands.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hadagen.driver import Launch
from hadagen.formats import Format
from hadagen.launch import RowShape
from hadagen.problem import Problem, Rows
from hadagen.runtime import compute, kernels, product, repeat, sealed, streams, tables
from hadagen.runtime.checks import check_alike, check_like, check_writable
from hadagen.runtime.choose import BATCH_INVARIANT
from hadagen.runtime.linear import LinearOperator
from hadagen.runtime.operands import Operands, addresses, check, is_packed
from hadagen.runtime.repeat import ALIGNMENT, increment_version

# `key_of` → what to do for all calls that differ only in the address of x. Only checked arguments are in here. An
# entry is right for whatever lies at the addresses of its operands, because they are in the key.
calls: dict[tuple[Any, ...], repeat.Run] = tables.table()
# The same for out=, where x and out are contiguous and share no memory.
_launches: dict[tuple[Any, ...], Launch] = tables.table()


# What operands are and where they lie → a number that no other has. With numbers, keys are cheap to compare.
_numbers: dict[tuple[Any, ...], int] = tables.table()
_next_number = itertools.count().__next__


def number_of(of: Operands) -> int:
    """The same for operands that are the same in memory, as long as that memory is theirs."""
    matrices, orders, signs, signs_after = of[:4]
    key = (
        matrices is not None and (matrices.data_ptr(), matrices.dtype, *orders),
        signs is not None and signs.data_ptr(),
        signs_after is not None and signs_after.data_ptr(),
        of[4:],
    )
    number = _numbers.get(key)
    if number is None:
        number = _next_number()
        tables.remember(_numbers, key, number)
    return number


def known(x: torch.Tensor, number: int, inplace: bool) -> torch.Tensor | None:
    """The result of a call that comes again, with arguments that were checked then; None for any other.

    number: that of the operands. Their shapes must be right, and their memory contiguous.
    """
    try:
        address = x.data_ptr()
        run = calls[key_of(x, address, number, inplace)]
    except (KeyError, RuntimeError, TypeError):  # a new call, no memory, or a bad argument
        return None
    return run(x, address) if address else None


def key_of(x: torch.Tensor, address: int, number: int, inplace: bool) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.get_device(), x.is_contiguous() and address % ALIGNMENT == 0, inplace, number


def _compute(x: torch.Tensor, of: Operands, inplace: bool) -> torch.Tensor:
    check(x, of)
    check_whole(of)
    if inplace:
        check_writable(x)
        compute.check_apart(x, "x", of.tensors)
    problem = problem_of(x, of)
    if problem is not None:
        y = known(x, number_of(of), inplace)
        if y is None:
            y = _by_kernel(x, of, problem, inplace)
        if y is not None:
            return y
    if inplace and x.is_contiguous():
        _rotate(x, x, of)
        return x
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotate(x, y, of)
    return x.copy_(y) if inplace else y


def check_whole(of: Operands) -> None:
    """Raises `TensorError` for sealed signs that are not whole."""
    sealed.check(of.signs, of.signs_after, least=-(-of.n // 8))


def rotated(x: torch.Tensor, of: Operands) -> torch.Tensor:
    """The rotation of x, which is contiguous and may be overwritten."""
    return _compute(x, of, True)


def _compute_into(x: torch.Tensor, y: torch.Tensor, of: Operands) -> None:
    check(x, of)
    check_whole(of)
    check_like(x, y)
    check_writable(y)
    compute.check_apart(y, "out", of.tensors)
    if x.data_ptr() == y.data_ptr() and x.stride() == y.stride():
        _compute(y, of, True)
    elif not y.is_contiguous() or compute.may_overlap(x, y):
        y.copy_(_compute(x, of, False))
    elif (problem := problem_of(x, of)) is None:
        _rotate(x, y, of)
    elif not _launched_into(x, y, of, problem):
        if _is_plain(of):  # whose rows need not be contiguous
            _rotate(x, y, of)
        else:
            _compute(y.copy_(x), of, True)


def _is_plain(of: Operands) -> bool:
    """Whether it is H alone."""
    return of.matrices is None and of.signs is None and of.signs_after is None and not of.swapped


def _by_kernel(x: torch.Tensor, of: Operands, problem: Problem, inplace: bool) -> torch.Tensor | None:
    """The result by a kernel that does all of it; None if there is none, or those for H alone copy less."""
    address = x.data_ptr()
    if x.is_contiguous() and address % ALIGNMENT == 0:
        launch = _launch(x, of, problem, inplace)
        if launch is not None:
            run = repeat.runner(x, launch, inplace)
            tables.remember(calls, key_of(x, address, number_of(of), inplace), run)
            return run(x, address)
    if _is_plain(of):
        return None
    launch = _launch(x, of, problem, True)
    if launch is None:
        return None
    y = x.clone(memory_format=torch.contiguous_format)
    streams.queue(launch, x.get_device(), y.data_ptr(), y.data_ptr())
    return x.copy_(y) if inplace else y


def _launched_into(x: torch.Tensor, y: torch.Tensor, of: Operands, problem: Problem) -> bool:
    """Whether there is a kernel that does all of it, from x into y, which shares no memory with x. It is launched."""
    source, target = x.data_ptr(), y.data_ptr()
    if not x.is_contiguous() or (source | target) % ALIGNMENT:
        return False
    key = key_of(x, source, number_of(of), False)
    launch = _launches.get(key)
    if launch is None:
        launch = _launch(x, of, problem, False)
        if launch is None:
            return False
        tables.remember(_launches, key, launch)
    increment_version((y,))
    streams.queue(launch, x.get_device(), source, target)
    return True


def problem_of(x: torch.Tensor, of: Operands, to: Format | None = None) -> Problem | None:
    """The problem of a kernel that does all of it; None if no kernel can. to: the format of the result. Raises
    `UsageError` where that does not fit the rows."""
    if not compute.takes_kernels(x):
        return None
    order = 1
    if of.matrices is not None:
        if not is_packed(of.matrices):
            return None
        order = of.orders[0]
    operands = [each for each in (of.matrices, of.signs, of.signs_after) if each is not None]
    if any(each.data_ptr() % ALIGNMENT or not each.is_contiguous() for each in operands):
        return None
    if of.swapped and (to is None or of.n == 1):
        return None
    signed = of.signs is not None or of.signs_after is not None
    return kernels.problem_of(
        of.n, x.dtype, of.numerics, Rows.CONTIGUOUS, order=order, signed=signed, swapped=of.swapped, to=to
    )


def _launch(x: torch.Tensor, of: Operands, problem: Problem, in_place: bool) -> Launch | None:
    """The launch of a kernel for contiguous tensors like x; None if there is no such kernel."""
    kind = kernels.Kind(x.get_device(), problem, in_place, of.batch_invariant)
    kernel = kernels.find_for_scale(kind, x.numel(), of.scale)
    if kernel is None:
        return None
    return kernel.prepared(x.numel(), of.scale, RowShape(of.n, of.n, of.n), addresses(of))


def _rotate(x: torch.Tensor, y: torch.Tensor, of: Operands) -> None:
    """In PyTorch, with kernels for H alone; into y, which is contiguous, and the same memory as x or none of it."""

    def transform(x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        options = compute.Options(scale, of.numerics, of.batch_invariant)
        if x.data_ptr() == y.data_ptr():
            compute.compute(y, options, True)
        else:
            compute.compute_into(x, y, options)

    product.rotate_into(x, y, of, transform)


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
    if matrix is not None:
        check_alike(x, matrix, "the matrix")
    return ROTATE.apply(
        x, Operands(matrix, [order], None, None, n, False, transposed, scale, "accurate", BATCH_INVARIANT)
    )
