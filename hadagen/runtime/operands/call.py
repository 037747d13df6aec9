"""`Call`: a spec, a scale and tensors by role, with the checks of each role. A spec knows no tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from hadagen.errors import TensorError
from hadagen.problem.formats import Format
from hadagen.problem.prologues import Prologue
from hadagen.runtime.checks import (
    check_alike,
    check_is_tensor,
    check_options,
    check_same_device,
    check_tensor,
    plain,
    shape_of,
)
from hadagen.runtime.operands import sealed
from hadagen.runtime.operands.packed import TRAILER, check_matrices
from hadagen.runtime.operands.spec import Spec

_MOST_NUMBERS = 4096
_next_number = itertools.count(1).__next__
_numbers: dict[tuple[Any, ...], int] = {}  # of `key_of`


class Call(NamedTuple):
    """What operators compute: a spec, the scale of its rotation, and tensors by role.

    x: [..., m], or what the prologue makes such rows of.
    matrices, signs, signs_after: the operands of the rotation, as in `Factors`, if the spec has them.
    tensor_scale: float32 on x's device, with one element or those of heads, if the format needs one.
    values: what the prologue reads besides x: tensors of x's type, of x's shape or [n].
    """

    spec: Spec
    scale: float
    x: torch.Tensor
    matrices: torch.Tensor | None = None
    signs: torch.Tensor | None = None
    signs_after: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    values: tuple[torch.Tensor, ...] = ()

    @classmethod
    def taken(cls, tensors: Sequence[torch.Tensor], scale: float, text: str) -> Call:
        """The call of the arguments of an operator: the tensors that its spec has, in the order of the fields."""
        spec = Spec.parse(text)
        *has, read = spec.roles
        if len(tensors) != 1 + sum(has) + read:
            raise TensorError(f"spec {text!r} takes {1 + sum(has) + read} tensors, but got {len(tensors)}; pass all")
        left = iter(tensors[1:])
        named = [next(left) if there else None for there in has]
        return cls(spec, scale, tensors[0], *named, tuple(left))  # type: ignore[arg-type, call-arg]

    @property
    def operands(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the rotation, with their names in messages."""
        named = ("the matrix", self.matrices), ("the vector signs", self.signs), ("the vector signs_after", self[5])
        return [(f"{name} of the rotation", each) for name, each in named if each is not None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that are there, in the order of the fields."""
        others = self.matrices, self.signs, self.signs_after, self.tensor_scale
        return [self.x, *[each for each in others if each is not None], *self.values]

    @property
    def heads(self) -> int:
        """How many have a scale of their own."""
        form, given = self.spec.form, self.tensor_scale
        return given.numel() if form is not None and form.by_head and given is not None else 1

    @property
    def rows(self) -> torch.Tensor:
        """A tensor like the rows that are rotated: x, or one without memory of its own."""
        prologue = self.spec.prologue
        return self.x if prologue is None else result_like(self.x, prologue.width)

    @property
    def n(self) -> int:
        """The elements of a block, before rows are padded."""
        return self.spec.n or self.rows.shape[-1]

    @property
    def key(self) -> int:
        """A number that stands for what decides about the launch of a call besides x: the other part of the key of a
        call that comes again."""
        return key_of(self.spec.text, self.scale, self.matrices, self.signs, self.signs_after, self.heads)


def key_of(
    text: str,
    scale: float,
    matrices: torch.Tensor | None = None,
    signs: torch.Tensor | None = None,
    signs_after: torch.Tensor | None = None,
    heads: int = 1,
) -> int:
    """A number that stands for a spec, a scale, how many heads there are, and for operands at their addresses, as long
    as that memory is theirs. Numbers are cheap to compare."""
    places = tuple(each is not None and (each.data_ptr(), each.dtype) for each in (matrices, signs, signs_after))
    what = text, scale, places, heads
    number = _numbers.get(what)
    if number is None:
        if len(_numbers) >= _MOST_NUMBERS:
            _numbers.clear()
        number = _numbers[what] = _next_number()
    return number


def result_like(x: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor of the shape, type and device of the result of a prologue of this width. It has no memory of its own for
    each element, and stands for a contiguous one. Raises `TensorError` where rows of x are no multiple of the width."""
    columns = x.shape[-1] // width
    if columns * width != x.shape[-1] or not columns:
        raise TensorError(
            f"the last dimension of x is {x.shape[-1]}; it must be a multiple of {width}, as before= takes {width} "
            "elements of x for each element of its result"
        )
    return x.new_empty(()).expand(*x.shape[:-1], columns)


# ---- checks, by role -------------------------------------------------------------------------------------------------
def check(call: Call) -> None:
    """Raises TypeError, `UsageError` or `TensorError` for tensors that do not fit the spec or each other. Reads no
    memory but that of sealed signs, which must be whole."""
    spec, x = call.spec, call.x
    check_is_tensor(x, "x")
    check_options(call.scale, spec.numerics, x.dtype)
    check_tensor(x)
    rows = call.rows
    if spec.n:
        _check_rotation(call, rows)
    elif not spec.is_h_alone:
        raise TensorError(f"spec {spec.text!r} has operands but no n; call a function of hadagen")
    if call.tensor_scale is not None:
        check_same_device("tensor_scale", call.tensor_scale.device, "x", x.device, "move one of them with .to")
    if spec.prologue is not None:
        _check_values(call, spec.prologue)
    sealed.check(call.signs, call.signs_after, least=-(-spec.n // 8))


def _check_rotation(call: Call, rows: torch.Tensor) -> None:
    spec, n = call.spec, call.spec.n
    if rows.shape[-1] % n:
        raise TensorError(f"the last dimension of x is {rows.shape[-1]}; it must be a multiple of {n}")
    if call.matrices is not None:
        check_matrices(call.matrices, spec.orders, n)
    rest, left = divmod(n, max(prod(spec.orders), 1))
    if min(spec.orders, default=1) < 1 or left or rest & (rest - 1):
        orders = " · ".join(map(str, spec.orders)) or "1"
        raise TensorError(f"n = {n} is not {orders} times a power of two; pass other matrices")
    if spec.swapped and (spec.orders or rest.bit_length() % 2 == 0):
        raise TensorError(f"n = {n} must be a power of 4 without matrices, so that bits can be exchanged")
    for name, signs in (("signs", call.signs), ("signs_after", call.signs_after)):
        size = -(-n // 8)
        if signs is not None and (signs.shape not in ((size,), (size + TRAILER,)) or signs.dtype != torch.uint8):
            raise TensorError(
                f"{name} is {plain(signs.dtype)} of the shape {tuple(signs.shape)}; it must be uint8 of ({size},), "
                "a bit each"
            )
    for name, operand in call.operands:
        check_alike(call.x, operand, name)
        check_same_device(name, operand.device, "x", call.x.device, "move the rotation with .to(x.device)")


def _check_values(call: Call, prologue: Prologue) -> None:
    x = call.x
    wanted = [each for each in prologue.operands if not each.is_written]
    for operand, value in zip(wanted, call.values, strict=True):
        check_alike(x, value, operand.name)
        shape = x.shape if operand.like_x else (call.spec.n,)
        if value.shape != shape or value.dtype != x.dtype or value.device != x.device:
            raise TensorError(
                f"{operand.name} is {value.dtype} {shape_of(value)} on {value.device}; {call.spec.before} needs "
                f"{plain(x.dtype)} {tuple(shape)} on {x.device}"
            )


def kernel_form(call: Call) -> Format | None:
    """The format that kernels write for a call, which may have another layout than the format of the call."""
    return call.spec.form and call.spec.form.by_kernels
