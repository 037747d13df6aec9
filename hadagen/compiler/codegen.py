"""Plans → CUDA C++. Each step becomes one commented block of a kernel; `templates/steps.cu.j2` holds the blocks,
`templates/loads.cu.j2` those of Load, Prefetch and Gather.

The values that a block needs come from its step (`Step.view`). The values that all blocks need come from here. The
template decides the text of a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jinja2

from hadagen.plan.arch import SPECIFIC
from hadagen.plan.layout import add
from hadagen.plan.plan import Plan
from hadagen.plan.steps.base import FP32
from hadagen.problem.launch import Source

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("hadagen.templates", "."),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
# The mbarrier that a block uses for stores by other blocks of its cluster. The barriers of stages come first.
CROSSED_BARRIER = 15

_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def render(plan: Plan) -> Source:
    """The CUDA C++ of a plan. The same plan always gives the same text."""
    entry = f"hadagen_{plan.problem.key.replace('-', '_')}_{plan.digest[:8]}"
    blocks: dict[str, Any] = {}
    view = _view(plan, entry) | {"blocks": blocks}
    names = {plan.tile.template, *(step.template for step in plan.steps)}
    modules = {name: ENVIRONMENT.get_template(name).make_module(view) for name in names}
    of_tile = modules[plan.tile.template]
    for step in plan.steps:
        blocks[step.name] = getattr(of_tile, step.name, None) or getattr(modules[step.template], step.name)
    text = ENVIRONMENT.get_template("kernel.cu.j2").render(view)
    return Source(entry, text, plan.launch, specific=bool(plan.features & SPECIFIC))


def with_headers(source: Source, headers: Mapping[str, str]) -> str:
    """The text of a kernel, with each included header put in its place, once. `headers`: name → text."""
    waiting = dict(headers)

    def put_in(text: str) -> str:
        return _INCLUDE.sub(lambda match: put_in(waiting.pop(match[1], "")), text.replace("#pragma once\n", ""))

    return put_in(source.text)


def _view(plan: Plan, entry: str) -> dict[str, Any]:
    """The values for the templates: the plan, its numbers and its index expressions. It has no launch arguments."""
    views = _steps(plan)
    cluster = plan.launch.cluster
    n = plan.problem.n
    span = 32 * plan.vector_elements
    loads_all = plan.shares_loaded > 1
    block_at = f"rank * {plan.block_elements}" if cluster > 1 and not loads_all else ""

    def vector_at(size: int) -> str:
        share, within = plan.block_elements * size, span * size
        return f"i / vectors * {share} + i % vectors * {within}" if loads_all else f"i * {within}"

    return {
        "plan": plan,
        "entry": entry,
        "signature": re.sub(r"\b(i64|u32) ", r"hadagen::\1 ", plan.launch.signature),
        "places": _place_lines(plan),
        "groups": _groups(plan, views),
        "tile": plan.elements_in_memory,
        "padded": plan.problem.is_padded,  # a tile ends with room that its row does not fill
        "block": min(plan.block_elements, plan.elements_in_memory),
        "cluster": cluster,
        "warps": plan.warps,
        "chunks": plan.eights,
        "span": span,  # elements from one vector of a thread to the next
        "bytes": plan.problem.io.input.bytes,
        "scale_form": plan.scale_form.value,
        "powers": [(view["factor"], view["power"]) for view in views if "power" in view],
        "lifted": any(view.get("lifted") for view in views),
        "lift": sum(view.get("lift", 0) for view in views),  # log2 of a factor of the operands, which the scale undoes
        "packed": plan.eights > 0 and any(carrier != FP32 for carrier in plan.carriers[plan.tile.held_from(plan) :]),
        "wide": FP32 in plan.carriers,
        "gathered": any(view.get("gathers") for view in views),
        "headers": sorted({step.header for step in plan.steps} - {""}),
        "halved": plan.prologue is not None and plan.prologue.is_halved,
        # Whether the length of a row of x is known, because the kernel takes no number for it.
        "whole_rows": plan.prologue is None or not plan.prologue.takes_rows(plan.problem),
        "fetches_next": plan.load.stages > 1 and not plan.load.staged,
        "crossed_barrier": CROSSED_BARRIER,
        "crossed_bytes": next((step.crossed_bytes(plan) for step in plan.steps if step.crosses(plan)), 0),
        # The last tile may be partly beyond the end of the array. A vector may only if it holds several rows.
        "ragged": plan.is_ragged,
        "ragged_vector": plan.problem.unit < plan.vector_elements,
        "first_tile": "block_index()" + (f" / {cluster}" if cluster > 1 else ""),
        "share": add(f"tile * {plan.elements_in_memory}", block_at),
        "block_at": block_at,  # offset in the tile from which a block loads
        # Offset of vector i of a thread from its first vector; vectors of one share come after those of another.
        "vector_at": vector_at(1),
        "vector_bytes_at": vector_at(plan.problem.io.input.bytes),
        "held_shares": plan.shares_loaded,  # in the registers of a thread
        "loaded": f"{plan.shares_loaded} * " if loads_all else "",  # times the vectors of a thread: those it loads
        # Results may lie in place, so a block waits until the other blocks have loaded the row. A multicast has read it
        # once, for all of them.
        "waits_for_loads": loads_all and not plan.load.multicast and plan.problem.io.form is None,
        # Row and column of the vector at offset `at` of a tile.
        "row_of_vector": f"tile * {plan.rows_per_tile} + at / {n}" if plan.rows_per_tile > 1 else "tile",
        "column_of_vector": f"at % {n}" if plan.rows_per_tile > 1 else "at",
        "of_thread": {"lane": "thread_index() % 32", **plan.tile.of_thread(plan)},
        "part_bytes": plan.stage_bytes // plan.width,  # of a stage, from one part of x to the next
        "in_vectors": False,
        **plan.tile.names(plan),
    }


def _place_lines(plan: Plan) -> list[str]:
    """For each kind of place, the axes that live there after the load, low to high."""
    kinds = {
        "pair": "half of a register",
        "reg": "register of the thread",
        "lane": "thread of the warp",
        "warp": "warp of the block",
        "cta": "block of the cluster",
        "column": "column of X, which a row of x makes up",
        "row": "row of X",
        "tile": "row of x",
    }
    held = {kind: plan.loaded.digits_of(kind) for kind in kinds}
    axes = {kind: " ".join(map(str, held[kind].values())) for kind in kinds if held[kind]}
    return [f"{kind + ' ':5}{axes[kind]:16} {what}" for kind, what in kinds.items() if held[kind]]


def _groups(plan: Plan, views: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps in groups, as they are written: each step over all chunks, or all steps from the exchange on group of
    chunks by group of chunks."""
    alone = plan.grouped_from if plan.order == "by_group" else len(views)
    groups = [[view] for view in views[:alone]]
    return [*groups, views[alone:]] if views[alone:] else groups


def _steps(plan: Plan) -> list[dict[str, Any]]:
    """The values that the block of each step needs."""
    views: list[dict[str, Any]] = []
    for at, (step, line) in enumerate(zip(plan.steps, plan.describe(), strict=True)):
        forms = {*plan.carriers[at : at + 2]} - {""}
        view = {"kind": step.name, "number": at + 1, "line": line, "carrier": plan.carriers[at]}
        view |= {"wide": FP32 in forms, "packed": bool(forms - {FP32})}
        views.append({**vars(step), **view, **step.view(plan, at)})
    return views
