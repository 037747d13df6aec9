"""Formulas in PyTorch, and where a graph computes one.

A formula is decomposed as Inductor decomposes graphs, and then compared with a graph node by node. So a release of
PyTorch with other decompositions needs no other formulas. Conversions of types are skipped: Inductor computes all that
it fuses in float32, whatever the types of nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from hadagen.fusing.graphs import Part, arguments, columns_of, is_convert, number_of, part_of

_aten = torch.ops.aten
_COMMUTE = _aten.mul.Tensor, _aten.add.Tensor
# Numbers of a formula, with values that it has nowhere else.
_NUMBERS = {"limit": 7.03125, "alpha": 1.640625, "beta": 0.84375}
# Of its tensors, the parts of one tensor, and a tensor of one element.
_PARTS, _ONE = ("g", "u"), "s"


class Formula:
    """What a function computes.

    function: takes g and u, the parts of one tensor, or x, and s, a tensor with one float32; then numbers of
        `_NUMBERS`. Returns one tensor, or several; the first follows from all others.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        names = list(inspect.signature(function).parameters)
        self.tensors = [name for name in names if name not in _NUMBERS]
        self.numbers = [name for name in names if name in _NUMBERS]

    @cached_property
    def outputs(self) -> list[Node]:
        """The nodes of what it returns, as Inductor decomposes it."""
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        numbers = [_NUMBERS[name] for name in self.numbers]
        with _disable_current_modes(), torch.no_grad():
            x, one = torch.zeros(2, 2, dtype=torch.bfloat16, device="cpu"), torch.zeros((), device="cpu")
            tensors = [(one if name == _ONE else x).clone() for name in self.tensors]  # each another one
            graph = make_fx(lambda *tensors: self._function(*tensors, *numbers), select_decomp_table())(*tensors).graph
        self._graph = graph  # which its nodes do not keep
        *_, output = graph.nodes
        (returned,) = output.args
        found = returned if isinstance(returned, (list, tuple)) else [returned]
        return [_before_conversions(cast(Node, each))[0] for each in found]

    def find(self, node: Node) -> Iterator[Found]:
        """The ways in which a node may be the first of what it returns."""
        return _compared(self.outputs[0], node, Found(self))


@dataclass(frozen=True)
class Found:
    """Where a graph computes a formula.

    parts, numbers: what it takes, by name. nodes: the nodes that compute it, conversions included, the result first.
    outputs: the nodes of what it returns.
    """

    formula: Formula
    parts: dict[str, Part] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    outputs: dict[Node, Node] = field(default_factory=dict)


def _before_conversions(node: Node) -> tuple[Node, list[Node]]:
    """The node whose value was converted, and the conversions."""
    skipped = []
    while is_convert(node):
        skipped.append(node)
        node = cast(Node, node.args[0])
    return node, skipped


def _compared(wanted: Any, given: Any, found: Found) -> Iterator[Found]:
    """What is known after something was compared with a node or an argument of a formula; nothing where they differ."""
    if isinstance(wanted, (list, tuple)):
        if isinstance(given, (list, tuple)) and len(given) == len(wanted):
            yield from _all_compared(wanted, given, found)
    elif not isinstance(wanted, Node):
        yield from _compared_numbers(wanted, given, found)
    elif isinstance(given, Node):
        wanted, _ = _before_conversions(wanted)
        node, skipped = _before_conversions(given)
        if wanted.op == "placeholder":
            name = found.formula.tensors[list(wanted.graph.nodes).index(wanted)]  # placeholders are the first nodes
            part = part_of(node) if name in _PARTS else Part(node, 0, 1, columns_of(node))
            if found.parts.get(name, part) == part:
                yield replace(found, parts={**found.parts, name: part}, nodes=(*found.nodes, *skipped))
        elif node.op == "call_function" and node.target is wanted.target:
            outputs = {**found.outputs, **({wanted: node} if wanted in found.formula.outputs else {})}
            known = replace(found, nodes=(*found.nodes, *skipped, node), outputs=outputs)
            mine = arguments(node)
            orders = [mine, [mine[1], mine[0], *mine[2:]]] if node.target in _COMMUTE else [mine]
            for order in orders:
                yield from _all_compared(arguments(wanted), order, known)


def _all_compared(wanted: Sequence[Any], given: Sequence[Any], found: Found) -> Iterator[Found]:
    if not wanted:
        yield found
        return
    for known in _compared(wanted[0], given[0], found):
        yield from _all_compared(wanted[1:], given[1:], known)


def _compared_numbers(wanted: Any, given: Any, found: Found) -> Iterator[Found]:
    number = number_of(given)
    for name in found.formula.numbers:
        if number is not None and wanted in (_NUMBERS[name], -_NUMBERS[name]):
            value = number if wanted > 0 else -number
            if found.numbers.get(name, value) == value:
                yield replace(found, numbers={**found.numbers, name: value})
            return
    # True == 1 in Python, so a flag fits only itself.
    if (wanted == given and type(wanted) is not bool) or wanted is given:
        yield found
