"""The way from public functions to operators: of rows that are rotated, whole or the part of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hadagen.problem.prologues import Prologue
from hadagen.runtime.call.rules import CALL, LINEAR, Linear, write
from hadagen.runtime.call.sharded import check_new, is_sharded, joined, shards_of
from hadagen.runtime.checks import check_alike, check_rows, stands_for_a_tensor
from hadagen.runtime.choose.entries import BATCH_INVARIANT
from hadagen.runtime.operands.packed import present
from hadagen.runtime.operands.spec import text_of


def rotate(
    x: Any,
    asked: Callable[[Any], Linear],
    *,
    takes: int | None = None,
    unit: int | None = None,
    before: Prologue | None = None,
    inplace: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rotated rows, of x's type, in a new tensor, in x or in out.

    asked: what the call asks for besides x, for tensors like x; its spec is not in place, and has `before`. takes: the
    elements of a row; None for any. unit: so many elements of a row belong together; None for all.

    Raises TypeError, `UsageError` and `TensorError` for tensors that cannot be rotated or written.
    """
    if not stands_for_a_tensor(x):
        check_rows(x, takes, before, inplace, out)
        if is_sharded(x):
            check_new(inplace, out)
            shards = shards_of(x, unit, before)
            return joined(shards, rotate(shards.local, asked, before=before))
    of, target = asked(x), x if inplace else out
    if target is not None:
        return write(x, of, target, before)
    if before is None:
        return LINEAR(x, *of)  # type: ignore[no-any-return]
    return CALL([x, *present(of.matrices, of.signs, of.signs_after)], of.scale, of.text)[0]  # type: ignore[no-any-return]


def rotated_by(
    matrix: torch.Tensor | None, order: int, n: int, x: Any, scale: float, transposed: bool = False
) -> torch.Tensor:
    """x · (A ⊗ H)ᵀ · scale, or its transpose, over the last dimension, in a new tensor.

    matrix: the entries of A, [order, order], row by row; None for H alone, with order 1. x: [..., n].
    """
    if matrix is not None and isinstance(x, torch.Tensor):
        check_alike(x, matrix, "the matrix")
    orders = () if matrix is None else (order,)
    text = text_of(n, orders, transposed=transposed, batch_invariant=BATCH_INVARIANT)
    return rotate(x, lambda _: Linear(matrix, None, None, scale, text))
