"""hadagen's operators in a graph: which there are, and one in the place of two."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from hadagen.fusing.graphs import arguments, columns_of, made, value_of
from hadagen.problem.formats import ROW, TENSOR, Format
from hadagen.problem.prologues import parsed
from hadagen.runtime.call.prologue_operator import OPERATOR
from hadagen.runtime.call.quantize_operator import NEW
from hadagen.runtime.call.rotate_operator import ROTATE
from hadagen.runtime.call.transform_operator import HADAMARD


class Options(NamedTuple):
    """The arguments of hadagen's operators between x, or a prologue, and the tensor_scale: those of a rotation that is
    not transposed, and of a quantizer, if `to` is not ""."""

    matrices: Node | None
    orders: list[int]
    signs: Node | None
    signs_after: Node | None
    n: int
    swapped: bool
    scale: Any
    numerics: str
    batch_invariant: bool
    to: str = ""
    group: int = 0
    rule: str = ""
    layout: str = ""
    round_first: bool = False
    tensor_scale: Node | None = None

    @property
    def rotates(self) -> bool:
        """Whether there is a rotation, and not a quantizer alone."""
        return (self.n, self.matrices, self.signs, self.signs_after) != (1, None, None, None)

    @property
    def form(self) -> Format | None:
        """The format of the results."""
        return Format.choose(self.to, self.group, self.rule, self.layout) if self.to else None

    @property
    def words(self) -> list[str]:
        """What is done, for a report."""
        return ["rotation"] * self.rotates + [self.to] * bool(self.to)


class FusedCall(NamedTuple):
    """A call of an operator of hadagen.

    node: the call, of which `result` is the first tensor. x: what it takes. before: the text of its prologue, or "".
    fault: why it cannot become a part of another one; None if it can.
    """

    node: Node
    x: Node
    options: Options
    before: str = ""
    fault: str | None = None

    @property
    def words(self) -> list[str]:
        """What is done, for a report."""
        return [*([repr(parsed(self.before))] if self.before else []), *self.options.words]

    @property
    def width(self) -> int:
        """The number of elements of x for each element of a row that is rotated."""
        return parsed(self.before).width if self.before else 1

    def made(self, x: Node) -> Node:
        """A new node that does this with x. Its results are codes and scales, or a list with the rotated rows."""
        if self.before or not self.options.to:
            return made(self.node, OPERATOR, [[x], self.before, *self.options])
        return made(self.node, NEW, [x, *self.options])


def step_of(node: Node) -> FusedCall | None:
    """The call that a node is; None if it is another one."""
    if node.op != "call_function":
        return None
    target = cast(Any, node.target)
    if target is ROTATE.functional:
        x, matrices, orders, signs, signs_after, n, swapped, transposed, *asked = arguments(node)
        fault = None
        if transposed and matrices is None and not swapped:  # H is symmetric
            signs, signs_after = signs_after, signs
        elif transposed:
            fault = "it is the inverse of a rotation with a matrix"
        return FusedCall(node, x, Options(matrices, orders, signs, signs_after, n, swapped, *asked), "", fault)
    if target is HADAMARD.functional:
        x, *asked = arguments(node)
        n = columns_of(x) or 0
        fault = None if n and n & (n - 1) == 0 else "its rows are padded, or their length is open"
        return FusedCall(node, x, Options(None, [1], None, None, n, False, *asked), "", fault)
    if target is NEW:
        x, *asked = arguments(node)
        return FusedCall(node, x, Options(*asked))
    if target is OPERATOR:
        tensors, before, *asked = arguments(node)
        fault = "its prologue has tensors of its own" if len(tensors) > 1 else None
        return FusedCall(node, tensors[0], Options(*asked), before, fault)
    return None


def rotated_by(node: Node) -> FusedCall | None:
    """The call that a node is the rotated rows of; None if it is no such rows."""
    if node.target is operator.getitem and node.args[1] == 0 and isinstance(node.args[0], Node):
        step = step_of(node.args[0])
        return step if step and step.node.target is OPERATOR and not step.options.to else None
    step = step_of(node)
    return step if step and step.node.target not in (NEW, OPERATOR) else None


def why_without_kernel(options: Options, x: torch.Tensor, columns: int) -> str | None:
    """Why PyTorch computes a prologue before this, wherever it runs; None if a kernel may do all of it.

    x: a tensor of the type of the rows, which have so many columns.
    """
    form = options.form
    group = form.group if form and form.group not in (ROW, TENSOR) else 1
    has_matrix = options.matrices is not None
    if x.dtype == torch.float64:
        return "no kernel takes float64"
    if has_matrix and value_of(options.matrices).dtype != torch.uint8:
        return "no kernel has its matrices"
    if has_matrix and (x.dtype == torch.float32 or options.n == options.orders[0]):
        return "no kernel takes its matrix for these rows"
    if options.swapped and form is None:
        return "no kernel exchanges bits without a quantizer"
    if max(options.n, group, columns if form and form.group == ROW else 1) * x.element_size() < 16:
        return "its blocks have less than 16 bytes"
    return None
