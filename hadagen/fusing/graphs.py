"""Nodes of graphs of torch.fx, as Inductor has them: values, arguments, parts of rows, and views."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._guards import detect_fake_mode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

_aten = torch.ops.aten
_RESHAPED = _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default
_SAME_ROWS = _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.permute.default, _aten.transpose.int
VIEWS: frozenset[Any] = frozenset((*_RESHAPED, *_SAME_ROWS))
_STRIDES = "eager_input_vals"  # by which newer releases keep the strides of what an operator takes
_SPLITS: frozenset[Any] = frozenset((_aten.split.Tensor, _aten.split_with_sizes.default))


def value_of(node: Any) -> Any:
    """The tensors without memory that a node stands for; an argument that is no node as it is."""
    return node.meta.get("val") if isinstance(node, Node) else node


def number_of(value: Any) -> float | None:
    """The number; None if it is none, or open in this graph."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def size_of(size: Any) -> int | None:
    """The size; None if it is open in this graph."""
    if isinstance(size, torch.SymInt):
        return cast("int | None", size.node.maybe_as_int())
    return int(size)


def columns_of(node: Node) -> int | None:
    """The last dimension of the tensor of a node; None if it has none or it is open."""
    shape: Sequence[Any] = getattr(value_of(node), "shape", ())
    return size_of(shape[-1]) if len(shape) else None


def arguments(node: Node) -> list[Any]:
    """All arguments of an operator in the order of its schema, those with a default too."""
    if node.target is operator.getitem:
        return list(node.args)
    schema = cast(Any, node.target)._schema.arguments
    given = dict(zip([each.name for each in schema], node.args, strict=False)) | node.kwargs
    return [given.get(each.name, each.default_value) for each in schema]


def is_convert(node: Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default


def users_but(node: Node, others: Sequence[Node]) -> list[Node]:
    return [user for user in node.users if user not in others]


# ---- parts of rows ---------------------------------------------------------------------------------------------------
class Part(NamedTuple):
    """The elements first, first + step, … of each row of a tensor: so many columns of it."""

    source: Node
    first: int
    step: int
    columns: int | None


def part_of(node: Node) -> Part:
    """What a node is a part of; of itself, if it is no part."""
    whole = Part(node, 0, 1, columns_of(node))
    if node.op != "call_function" or whole.columns is None:
        return whole
    if node.target is _aten.slice.Tensor:
        source, dim, first, _, step = arguments(node)
        is_known = isinstance(first, (int, type(None))) and isinstance(step, int) and (first or 0) >= 0
        if is_known and dim in (-1, value_of(source).dim() - 1):
            return Part(source, first or 0, step, whole.columns)
    if node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].target in _SPLITS:
        split, at = node.args
        source, _, dim = arguments(cast(Node, split))
        before = [size_of(each.shape[-1]) for each in value_of(split)[:at]]
        if None not in before and dim in (-1, value_of(source).dim() - 1):
            return Part(source, sum(cast("list[int]", before)), 1, whole.columns)
    return whole


# ---- views -----------------------------------------------------------------------------------------------------------
def views_before(node: Node) -> list[Node]:
    """The views and conversions that make a node of the value of another, the first of them first."""
    found = []
    while node.op == "call_function" and (node.target in VIEWS or is_convert(node)):
        found.append(node)
        node = cast(Node, node.args[0])
    return found[::-1]


def why_not_moved(views: Sequence[Node], is_possible: Callable[[int, int], bool]) -> str | None:
    """Why views cannot be taken of x before all elements of a row are computed; None if they can.

    is_possible: whether rows of so many columns may become rows of so many columns.
    """
    for view in views:
        source = cast(Node, view.args[0])
        before, after, last = columns_of(source), columns_of(view), value_of(source).dim() - 1
        if before is None or after is None:
            return "the length of rows is open"
        if not is_possible(before, after):
            return f"{view.name} divides or joins rows"
        _, *dims = arguments(view)
        is_moved = view.target is _aten.permute.default and dims[0][-1] not in (-1, last)
        if is_moved or (view.target is _aten.transpose.int and {-1, last}.intersection(dims)):
            return f"{view.name} moves the last dimension"
    return None


def moved(views: Sequence[Node], x: Node, width: int) -> Node:
    """The same views of x, whose rows are so many times as long. Conversions are left out."""
    for view in views:
        if is_convert(view):
            continue
        target, args = cast(Any, view.target), arguments(view)
        if target in _RESHAPED:
            target = _aten.reshape.default
            args[1] = [*args[1][:-1], cast(int, columns_of(view)) * width]
        x = made(view, target, [x, *args[1:]])
    return x


# ---- new nodes -------------------------------------------------------------------------------------------------------
def made(like: Node, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Node:
    """A new node where the graph inserts nodes, for the same line of the program as another one."""
    node = like.graph.call_function(target, tuple(args), kwargs)
    node.meta.update((key, value) for key, value in like.meta.items() if key not in (_STRIDES, "tensor_meta"))
    values = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    if _STRIDES in like.meta and getattr(target, "namespace", "") == "hadagen":
        node.meta[_STRIDES] = values
    fake = detect_fake_mode([value_of(each) for each in node.all_input_nodes])
    assert fake is not None
    with fake:
        node.meta["val"] = target(*values[0], **values[1])
    return node


def are_alike(one: Any, other: Any) -> bool:
    """Whether tensors have the same shapes, strides and types for certain, so that one can take the other's place."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_alike, one, other))
    sizes = [*one.shape, *one.stride()], [*other.shape, *other.stride()]
    if one.dtype != other.dtype or len(sizes[0]) != len(sizes[1]):
        return False
    return all(statically_known_true(mine == theirs) for mine, theirs in zip(*sizes, strict=True))


def erase(node: Node) -> None:
    """Erase a node that nobody uses, and then what it alone used."""
    if node.users or node._erased or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        erase(each)


def names(nodes: Iterator[Node] | Sequence[Node]) -> str:
    return ", ".join(node.name for node in nodes)
