"""Joins neighbors in a graph: a rotation and the quantizer after it, and a formula and the rotation after it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from hadagen.errors import UsageError
from hadagen.fusing.formulas import AFTER, BEFORE, rounding
from hadagen.fusing.graphs import (
    VIEWS,
    are_alike,
    columns_of,
    erase,
    is_convert,
    made,
    moved,
    names,
    users_but,
    value_of,
    views_before,
    why_not_moved,
)
from hadagen.fusing.matching import Found
from hadagen.fusing.steps import FusedCall, rotated_by, step_of, why_without_kernel
from hadagen.problem.formats import Format
from hadagen.problem.prologues import text_of_value
from hadagen.prologues import Mul
from hadagen.runtime.checks import QUANTIZED
from hadagen.runtime.operands.spec import Spec

_aten = torch.ops.aten
_HERE = str(Path(__file__).parents[1])
_ELSEWHERE = "its results would lie in memory in another order"


class Fusion(NamedTuple):
    """Something that `hadagen.fuse` found in a graph.

    what: the parts, such as "SiluMul(numerics='inductor') → rotation → int8-row".
    shape, dtype: of the tensor that the first part takes. Sizes that are open in the graph are strings.
    nodes: the names of the graph's nodes that are one operator now, or would be.
    where: the line of the program that rotates or quantizes; "" if the graph does not know it.
    reason: why they are not fused; None if they are.
    """

    what: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    nodes: tuple[str, ...]
    where: str
    reason: str | None = None

    def __str__(self) -> str:
        fused = "fused" if self.reason is None else f"not fused, because {self.reason}"
        shape = ", ".join(map(str, self.shape))
        where = f", at {self.where}" if self.where else ""
        return f"{self.what} of {str(self.dtype).removeprefix('torch.')}[{shape}]: {fused}{where}"


Joined = tuple[Fusion, Node | None]  # what was found, and the node that does it all, if there is one now


def fuse_all(graph: Graph) -> list[Fusion]:
    """Join all neighbors in a graph, and say of each that was found whether it was joined."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    apart: list[tuple[int, Fusion]] = []  # with its place in the graph
    joined: dict[Node, Fusion] = {}
    for join in (_with_rotation, _written_with_rotation, _with_formula):  # so that a formula finds all after it
        for node in list(graph.nodes):
            result = None if node._erased else join(node)
            if result is None:
                continue
            fusion, place = result
            if place is None:
                apart.append((order[node], fusion))
                continue
            if earlier := joined.pop(node, None):  # with the nodes that are one already
                fusion = fusion._replace(nodes=(*fusion.nodes[:-1], *earlier.nodes))
            joined[place], order[place] = fusion, order[node]
    found = [*apart, *((order[node], fusion) for node, fusion in joined.items())]
    return [fusion for _, fusion in sorted(found, key=operator.itemgetter(0))]


def _fusion(what: Sequence[str], x: Node, nodes: Sequence[Node], reason: str | None) -> Fusion:
    trace = (nodes[-1].meta.get("stack_trace") or "").splitlines()
    lines = [line.strip() for line in trace if line.lstrip().startswith("File ") and _HERE not in line]
    shape = tuple(int(size) if isinstance(size, int) else str(size) for size in value_of(x).shape)
    named = tuple(node.name for node in nodes)
    return Fusion(" → ".join(what), shape, value_of(x).dtype, named, lines[-1] if lines else "", reason)


def _used_elsewhere(chain: Sequence[Node]) -> str | None:
    """Who else uses a value on its way; None if nobody does."""
    for node, following in pairwise(chain):
        if others := users_but(node, [following]):
            return f"{names(others)} uses {node.name} too"
    return None


def _put(
    of: FusedCall, x: Node, views: Sequence[Node], before: Node, results: Callable[[Node], dict[Node, Node]]
) -> Node | None:
    """Put a step of these views of x into the graph, and return its node. None if its results would lie in memory in
    another order.

    before: where to put it. results: makes the nodes that take the place of others, which are the keys.
    """
    left, place = list[Node](), None
    with before.graph.inserting_before(before):
        rows = made(of.node, _aten.clone.default, [x], {"memory_format": torch.contiguous_format})
        for source in (x, rows):
            node = of.made(moved(views, source, of.spec.width))
            places = results(node)
            if all(are_alike(value_of(new), value_of(old)) for old, new in places.items()):
                for old, new in places.items():
                    old.replace_all_uses_with(new)
                left, place = [*left, *places], node
                break
            left += places.values()
    for each in (*left, rows):  # at the end, because what one try leaves the next may need
        erase(each)
    return place


def _result_node(node: Node, at: int) -> Node:
    return made(node, operator.getitem, [node, at])


# ---- rotation → quantizer --------------------------------------------------------------------------------------------
def _quantized(rotation: FusedCall, to: Spec, tensor_scale: Node | None) -> FusedCall:
    """A rotation, and the quantizer of this spec of its rounded rows."""
    both = rotation.spec.batch_invariant or to.batch_invariant
    form: dict[str, Any] = {"to": to.to, "group": to.group, "rule": to.rule, "layout": to.layout}
    spec = replace(rotation.spec, batch_invariant=both, round_first=True, **form)
    return rotation._replace(spec=spec, tensor_scale=tensor_scale)


def _why_not_quantized(
    rotation: FusedCall, rows: Node, views: Sequence[Node], quantizer: Spec, scale: Any, to: torch.dtype
) -> Any:
    """Why a quantizer, of values of the type `to`, cannot follow in one operator; None if it can."""
    dtype = value_of(rows).dtype
    if dtype not in QUANTIZED:
        return f"the rotated values are {dtype}"
    if any(value_of(view).dtype not in (dtype, torch.float32) for view in views):
        return f"the rotated values are rounded from {dtype} to another type"
    if dtype != to and (quantizer.to == "int4-row" or quantizer.rule == "convrot"):
        return f"{quantizer.to} rounds to the type of what it quantizes, which is {to}, and x is {dtype}"
    if scale != 1:
        return "the quantizer has a scale, by which it multiplies rounded values"
    n, whole = rotation.spec.n, rotation.spec.width > 1
    return why_not_moved(views, lambda before, after: before == after if whole else before % n == 0 == after % n)


def _with_rotation(node: Node) -> Joined | None:
    """Join a quantizer and the rotation before it."""
    step = step_of(node)
    if step is None or not step.spec.to or step.spec.rotates or step.spec.before:
        return None
    views = views_before(step.x)
    rows = cast(Node, views[0].args[0]) if views else step.x
    rotation = rotated_by(rows)
    if rotation is None:
        return None
    chain = list(dict.fromkeys((rotation.node, rows, *views, node)))
    reason = rotation.fault or _used_elsewhere(chain)
    reason = reason or _why_not_quantized(rotation, rows, views, step.spec, step.scale, value_of(step.x).dtype)
    words, place = [*rotation.words, step.spec.to], None
    fusion = _fusion(words, rotation.x, chain, reason)
    if reason is None:
        both = _quantized(rotation, step.spec, step.tensor_scale)
        place = _put(both, rotation.x, views, node, lambda new: {node: new})
    return fusion if reason or place else fusion._replace(reason=_ELSEWHERE), place


def _written_with_rotation(node: Node) -> Joined | None:
    """Join a quantizer that is written in PyTorch, whose codes a node is, and the rotation before it."""
    if not is_convert(node):
        return None
    for row in AFTER:
        if value_of(node).dtype != row.dtype:
            continue
        for found in row.formula.find(cast(Node, node.args[0])):
            joined = _found_with_rotation(node, row.to, found)
            if joined:
                return joined
    return None


def _found_with_rotation(codes: Node, to: str, found: Found) -> Joined | None:
    views = views_before(found.parts["x"].source)
    rows = cast(Node, views[0].args[0]) if views else found.parts["x"].source
    rotation = rotated_by(rows)
    if rotation is None:
        return None
    scale = found.parts["s"].source if "s" in found.parts else found.outputs[found.formula.outputs[1]]
    chain = list(dict.fromkeys((rotation.node, rows, *views)))
    form = Format.choose(to, None, None, "row-major")
    quantizer = Spec(n=1, to=to, group=form.group, rule=form.rule, layout=form.layout.value)
    reason = rotation.fault or _used_elsewhere(chain) or _why_not_computed(found, codes, scale, chain[-1])
    reason = reason or _why_not_quantized(rotation, rows, views, quantizer, 1, torch.float32)
    if value_of(scale).dtype != torch.float32 or (form.needs_scale and value_of(scale).numel() != 1):
        reason = reason or f"its scale, {scale.name}, is {value_of(scale).dtype} {tuple(value_of(scale).shape)}"
    nodes = [*chain, *reversed(found.nodes), codes]
    fusion, place = _fusion([*rotation.words, to], rotation.x, nodes, reason), None
    if reason is None:
        place = _put_for(codes, scale, form, rotation, quantizer, views, found)
    return fusion if reason or place else fusion._replace(reason=_ELSEWHERE), place


def _why_not_computed(found: Found, codes: Node, scale: Node, rows: Node) -> str | None:
    """Why the nodes of a quantizer cannot be left out: others use their values, or they have another type."""
    inside = [codes, *found.nodes]
    used = [user for each in found.nodes if each is not scale for user in users_but(each, inside)]
    if used := list(dict.fromkeys([*used, *users_but(rows, inside)])):
        return f"{names(used)} uses values before they are quantized"
    types = {value.dtype for each in found.nodes if isinstance(value := value_of(each), torch.Tensor)}
    if types - {value_of(rows).dtype, torch.float32}:
        return "values are converted to another type on their way"
    return None


def _put_for(
    codes: Node, scale: Node, form: Format, rotation: FusedCall, quantizer: Spec, views: Sequence[Node], found: Found
) -> Node | None:
    """Put a rotation with a quantizer in the place of the nodes of a formula. Returns what `_put` does."""
    if not form.needs_scale:
        order = {each: at for at, each in enumerate(codes.graph.nodes)}
        first = min(found.nodes, key=order.__getitem__)  # as scales may be used before the codes

        def both(new: Node) -> dict[Node, Node]:
            return {codes: _result_node(new, 0), scale: made(new, _aten.unsqueeze.default, [_result_node(new, 1), -1])}

        return _put(_quantized(rotation, quantizer, None), rotation.x, views, first, both)
    with codes.graph.inserting_before(codes):
        given = made(scale, _aten.reshape.default, [scale, []])
    step = _quantized(rotation, quantizer, given)
    place = _put(step, rotation.x, views, codes, lambda new: {codes: _result_node(new, 0)})
    erase(given)
    return place


# ---- formula → rotation, formula → quantizer -------------------------------------------------------------------------
def _with_formula(node: Node) -> Joined | None:
    """Join a step and the formula before it."""
    step = step_of(node)
    if step is None or step.spec.before:
        return None
    views = views_before(step.x)
    product = cast(Node, views[0].args[0]) if views else step.x
    first = None

    def results(new: Node) -> dict[Node, Node]:
        return {node: _result_node(new, 0) if isinstance(value_of(node), torch.Tensor) else new}

    for row in BEFORE:
        for found in row.formula.find(product):
            x, layout = _halves(found) if "g" in found.parts else (found.parts["x"].source, "")
            if layout is None and row.value is Mul:  # of any two tensors
                continue
            x = _widened(x)
            how = rounding(found, value_of(x).dtype)
            if layout is None:
                reason: str | None = "the factors are not the two halves of the rows of one tensor"
            else:
                reason = step.fault or _used_elsewhere([product, *views, node])
                reason = reason or _why_not_before(found, x, views, step) or (how if isinstance(how, str) else None)
            options = {"numerics": "exact" if isinstance(how, str) else how, **({"layout": layout} if layout else {})}
            try:
                before = row.value(**options, **found.numbers)
            except UsageError:  # no prologue has such numbers
                continue
            words = [repr(before), *step.words]
            fusion = _fusion(words, x, [*reversed(found.nodes), *views, node], reason)
            if reason is None:
                place = _put(
                    step._replace(spec=replace(step.spec, before=text_of_value(before))), x, views, node, results
                )
                if place:
                    return fusion, place
                fusion = fusion._replace(reason=_ELSEWHERE)
            first = first or (fusion, None)
    return first


def _halves(found: Found) -> tuple[Node, str | None]:
    """The tensor with g and u, and how they lie; None if they are no parts of one tensor, or other parts."""
    g, u = found.parts["g"], found.parts["u"]
    m = g.columns
    if g.source is not u.source or m is None or (u.columns, columns_of(g.source)) != (m, 2 * m):
        return g.source, None
    ways = {(0, m, 1, 1): "halves", (0, 1, 2, 2): "interleaved"}
    return g.source, ways.get((g.first, u.first, g.step, u.step))


def _widened(x: Node) -> Node:
    """x before it was converted to float32."""
    while is_convert(x) and value_of(x).dtype == torch.float32:
        x = cast(Node, x.args[0])
    return x


def _why_not_before(found: Found, x: Node, views: Sequence[Node], step: FusedCall) -> str | None:
    dtype, taken = value_of(x).dtype, value_of(step.x).dtype
    if dtype not in QUANTIZED or dtype != taken:
        return f"x is {dtype}, and what comes after takes {taken}"
    if any(value_of(node).dtype not in (dtype, torch.float32) for node in (*found.nodes, *views)):
        return "values are converted to another type on their way"
    is_whole, columns = "g" in found.parts, columns_of(step.x)
    reason = why_not_moved(views, lambda before, after: before == after or not is_whole)
    if reason or columns is None:
        return reason or "the length of rows is open"
    if is_whole and _is_made_with(found, x):
        return f"{x.name} is computed in the same kernel as the product, and would have to be written"
    return why_without_kernel(step, value_of(step.x), columns)


def _is_made_with(found: Found, x: Node) -> bool:
    """Whether x is the result of an operation that Inductor computes where it is used, and nobody else uses it."""
    origin = x
    while origin.target in VIEWS or is_convert(origin):
        origin = cast(Node, origin.args[0])
    inside, queue = set[Node](), [found.nodes[0]]
    while queue:
        node = queue.pop()
        if node not in inside and node is not x:
            inside.add(node)
            queue += node.all_input_nodes
    return torch.Tag.pointwise in getattr(origin.target, "tags", ()) and not users_but(x, list(inside))
