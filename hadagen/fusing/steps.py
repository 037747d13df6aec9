"""hadagen's operators in a graph: which there are, and one in the place of two."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from hadagen.fusing.graphs import arguments, columns_of, made, value_of
from hadagen.problem.formats import ROW, TENSOR
from hadagen.runtime.call.rules import CALL, LINEAR
from hadagen.runtime.operands.spec import Spec


class FusedCall(NamedTuple):
    """A call of an operator of hadagen, which is not transposed.

    node: the call, of which `result` is the first tensor. x: what it takes. operands: those of the rotation, as the
    operator takes them. fault: why it cannot become a part of another call; None if it can.
    """

    node: Node
    x: Node
    spec: Spec
    scale: Any = 1.0
    operands: tuple[Node, ...] = ()
    tensor_scale: Node | None = None
    fault: str | None = None

    @property
    def words(self) -> list[str]:
        """What is done, for a report."""
        spec = self.spec
        return [
            *([repr(spec.prologue)] if spec.prologue else []),
            *["rotation"] * spec.rotates,
            *[spec.to] * bool(spec.to),
        ]

    def made(self, x: Node) -> Node:
        """A new node that does this with x. Its results are a list: codes and scales, or the rotated rows."""
        tensors = [x, *self.operands, *([] if self.tensor_scale is None else [self.tensor_scale])]
        return made(self.node, CALL.default, [tensors, self.scale, self.spec.text])


def step_of(node: Node) -> FusedCall | None:
    """The call that a node is; None if it is another one."""
    if node.op != "call_function":
        return None
    target, fault = cast(Any, node.target), None
    if target is CALL.default:
        (x, *others), scale, text = arguments(node)
        spec = Spec.parse(text)
        *has, needs_scale, read = spec.roles
        if read:
            fault = "its prologue has tensors of its own"
        count = sum(has)
        if not spec.n:
            spec, fault = _of_whole_rows(spec, x, fault)
        return FusedCall(node, x, spec, scale, tuple(others[:count]), others[count] if needs_scale else None, fault)
    if target is not LINEAR.default:
        return None
    x, matrices, signs, signs_after, scale, text = arguments(node)
    spec = Spec.parse(text)
    if not spec.n:
        spec, fault = _of_whole_rows(spec, x, fault)
    elif spec.transposed and not spec.orders and not spec.swapped:  # H is symmetric
        signs, signs_after = signs_after, signs
        spec = replace(spec, transposed=False, signs=spec.signs_after, signs_after=spec.signs)
    elif spec.transposed:
        fault = "it is the inverse of a rotation with a matrix"
    operands = tuple(each for each in (matrices, signs, signs_after) if each is not None)
    return FusedCall(node, x, spec, scale, operands, None, fault)


def _of_whole_rows(spec: Spec, x: Node, fault: str | None) -> tuple[Spec, str | None]:
    """The spec with the length of rows of x, and why it cannot become a part of another call."""
    n = (columns_of(x) or 0) // spec.width
    is_whole = n > 0 and n & (n - 1) == 0
    return replace(spec, n=n), fault if is_whole else "its rows are padded, or their length is open"


def rotated_by(node: Node) -> FusedCall | None:
    """The call that a node is the rotated rows of; None if it is no such rows."""
    if node.target is operator.getitem and node.args[1] == 0 and isinstance(node.args[0], Node):
        step = step_of(node.args[0])
        return step if step and step.node.target is CALL.default and not step.spec.to else None
    return step_of(node) if node.target is LINEAR.default else None


def why_without_kernel(step: FusedCall, x: torch.Tensor, columns: int) -> str | None:
    """Why PyTorch computes a prologue before this, wherever it runs; None if a kernel may do all of it.

    x: a tensor of the type of the rows, which have so many columns.
    """
    spec, form = step.spec, step.spec.form
    group = form.group if form and form.group not in (ROW, TENSOR) else 1
    if x.dtype == torch.float64:
        return "no kernel takes float64"
    if spec.orders and value_of(step.operands[0]).dtype != torch.uint8:
        return "no kernel has its matrices"
    if spec.orders and (x.dtype == torch.float32 or spec.n == spec.orders[0]):
        return "no kernel takes its matrix for these rows"
    if spec.swapped and form is None:
        return "no kernel exchanges bits without a quantizer"
    if max(spec.n, group, columns if form and form.group == ROW else 1) * x.element_size() < 16:
        return "its blocks have less than 16 bytes"
    return None
