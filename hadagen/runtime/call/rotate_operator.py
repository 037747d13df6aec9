"""`torch.ops.hadagen.rotate`: rows times a product of signs, small matrices and a Hadamard matrix, as an operator.

Here alone a rotation is computed. One kernel does all of it if there is one: for float16 and bfloat16 with at most one
matrix of −1, 0 and 1, and for signs without a matrix. Kernels take contiguous rows; other tensors are copied. Where
there is none, PyTorch does it, and H goes through the kernels of `hadamard_transform`. `Rotation` makes the operands.
"""

from __future__ import annotations

import torch

from hadagen.problem.problem import Problem
from hadagen.runtime.call import calls, decompositions, slow, transform_operator
from hadagen.runtime.call.calls import ALIGNMENT, Run, launch_of, number_of, rotation_problem
from hadagen.runtime.call.operators import LinearOperator
from hadagen.runtime.call.sharded import is_sharded, joined, shards_of
from hadagen.runtime.checks import check_alike, check_like, check_writable
from hadagen.runtime.choose.entries import BATCH_INVARIANT
from hadagen.runtime.launch import streams
from hadagen.runtime.operands import sealed
from hadagen.runtime.operands.rotate_arguments import RotateArguments, check
from hadagen.runtime.plain import rotation as plain_rotation


def rotated(x: torch.Tensor, of: RotateArguments, inplace: bool) -> torch.Tensor:
    check(x, of)
    check_whole(of)
    if inplace:
        check_writable(x)
        calls.check_apart(x, "x", of.tensors)
    problem = rotation_problem(x, of)
    run = None if problem is None else _run(x, of, problem, inplace)
    if run is not None:
        return run.over(x, x.data_ptr()) if inplace else run.new(x.data_ptr())
    if problem is not None and not _is_plain(of):
        launch = launch_of(x, of, problem, True)
        if launch is not None:
            y = x.clone(memory_format=torch.contiguous_format)
            streams.queue(launch, x.get_device(), y.data_ptr(), y.data_ptr())
            return x.copy_(y) if inplace else y
    y = x if inplace and x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotate(x, y, of)
    return x.copy_(y) if inplace and y is not x else y


def check_whole(of: RotateArguments) -> None:
    """Raises `TensorError` for sealed signs that are not whole."""
    sealed.check(of.signs, of.signs_after, least=-(-of.n // 8))


def _compute_into(x: torch.Tensor, y: torch.Tensor, of: RotateArguments) -> None:
    check(x, of)
    check_whole(of)
    check_like(x, y)
    check_writable(y)
    calls.check_apart(y, "out", of.tensors)
    if x.data_ptr() == y.data_ptr() and x.stride() == y.stride():
        rotated(y, of, True)
    elif not y.is_contiguous() or transform_operator.may_overlap(x, y):
        y.copy_(rotated(x, of, False))
    elif (problem := rotation_problem(x, of)) is None:
        _rotate(x, y, of)
    elif (run := _run(x, of, problem, False)) and not y.data_ptr() % ALIGNMENT:
        run.into((y,), x.data_ptr(), y.data_ptr())
    elif _is_plain(of) or launch_of(x, of, problem, True) is None:  # and rows need not be contiguous
        _rotate(x, y, of)
    else:
        rotated(y.copy_(x), of, True)


def _is_plain(of: RotateArguments) -> bool:
    """Whether a rotation is H alone."""
    return of.matrices is None and of.signs is None and of.signs_after is None and not of.swapped


def _run(x: torch.Tensor, of: RotateArguments, problem: Problem, inplace: bool) -> Run | None:
    """The run of a kernel that does all of a rotation for tensors like x; None if there is no kernel, or it does not
    take x as it lies."""
    if not calls.is_ready(x):
        return None
    what = number_of(of, x.shape[-1]), of.transposed, of.numerics, of.batch_invariant
    run = calls.known(x, what, inplace)
    if run is None and (launch := launch_of(x, of, problem, inplace)):
        run = calls.remember(x, what, inplace, Run(x, launch, (calls.like(x),)))
    return run


def _rotate(x: torch.Tensor, y: torch.Tensor, of: RotateArguments) -> None:
    """Rotate in PyTorch, with kernels for H alone, into y, which is contiguous, and the same memory as x or none of
    it."""

    def transform(x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        options = transform_operator.Options(scale, of.numerics, of.batch_invariant)
        if x.data_ptr() == y.data_ptr():
            transform_operator.compute(y, options, True)
        else:
            transform_operator.compute_into(x, y, options)

    if _is_plain(of):  # of which `transform` warns
        plain_rotation.rotate_into(x, y, of, transform)
        return
    with slow.path(x, lambda: slow.asked_of(x, of)):
        plain_rotation.rotate_into(x, y, of, transform)


ROTATE = LinearOperator(
    "rotate",
    RotateArguments,
    "Tensor? matrices, int[] orders, Tensor? signs, Tensor? signs_after, int n, bool swapped, bool transposed, "
    "Scalar scale, str numerics",
    "bool batch_invariant=False",
    compute=rotated,
    compute_into=_compute_into,
    check=check,
    transpose=lambda of: of._replace(transposed=not of.transposed),
    decomposed=decompositions.rotation,
)


def rotate(
    x: torch.Tensor, matrix: torch.Tensor | None, order: int, n: int, *, scale: float, transposed: bool = False
) -> torch.Tensor:
    """x · (A ⊗ H)ᵀ · scale, or its transpose, over the last dimension, in a new tensor.

    x: [..., n]. matrix: the entries of A, [order, order], row by row; None for H alone, with order 1.
    """
    if is_sharded(x):
        shards = shards_of(x, None)
        return joined(shards, rotate(shards.local, matrix, order, n, scale=scale, transposed=transposed))
    if matrix is not None:
        check_alike(x, matrix, "the matrix")
    return ROTATE.apply(
        x, RotateArguments(matrix, [order], None, None, n, False, transposed, scale, "accurate", BATCH_INVARIANT)
    )
