"""Plans → CUDA C++. Each step becomes one commented block of a kernel; `templates/steps.cu.j2` holds the blocks,
`templates/loads.cu.j2` those of Load, Prefetch and Gather.

What is computed here are the index expressions that follow from placements; what a block looks like is the template's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jinja2

from hadagen.launch import Source
from hadagen.layout import PAIR, Place, cta, reg, warp
from hadagen.plan import CROSSED_BARRIER, Plan
from hadagen.steps import (
    FP32,
    NORMALIZER,
    Butterfly,
    Exchange,
    Gather,
    Load,
    Mma,
    Normalize,
    Prefetch,
    Scale,
    Shuffle,
    Step,
    Store,
    SwapButterfly,
    Trigger,
    mixed_chunk_bits,
)


def render(plan: Plan) -> Source:
    """The CUDA C++ of a plan. The same plan always gives the same text."""
    problem = plan.problem
    entry = f"hadagen_n{problem.n}_{problem.dtype.value}_{problem.numerics.value}_{plan.digest[:8]}"
    text = _environment().get_template("kernel.cu.j2").render(_view(plan, entry))
    return Source(entry, text, plan.launch)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("hadagen.templates", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _view(plan: Plan, entry: str) -> dict[str, Any]:
    """What the templates may see: the plan, its numbers and its index expressions. No launch argument is among them."""
    stored = plan.placements[-1]
    cluster = plan.launch.cluster
    lane_at = f"lane * {plan.vector_elements}"
    lanes = stored.bits_of("lane")
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
        "places": _place_lines(plan),
        "groups": _groups(plan),
        "tile": plan.tile_elements,
        "block": plan.block_elements,
        "cluster": cluster,
        "warps": plan.launch.threads // 32,
        "chunks": 1 << plan.chunk_bits,
        "span": span,  # between one vector of a thread and the next
        "bytes": plan.problem.dtype.bytes,
        "scale_form": plan.scale_form.value,
        "powers": [
            (step.factor, -plan.least_power(step))
            for step in plan.steps
            if isinstance(step, Mma) and step.factor not in (0, NORMALIZER)
        ],
        "lifted": any(isinstance(step, Scale) and step.lifted for step in plan.steps),
        "packed": any(carrier != FP32 for carrier in plan.carriers),
        "wide": FP32 in plan.carriers,
        "gathered": any(isinstance(step, Gather) for step in plan.steps),
        "fetches_next": plan.load.stages > 1 and not plan.load.staged,
        # Each block of a cluster has one barrier for what the others store in it.
        "crossed_barrier": CROSSED_BARRIER,
        "crossed_bytes": next((plan.crossed_bytes(step) for step in plan.exchanges if step.crosses_blocks), 0),
        # The last tile may be partly beyond the end of the array; a vector only where it holds several rows.
        "ragged": plan.rows_per_tile > 1,
        "ragged_vector": plan.problem.n < plan.vector_elements,
        "first_tile": "block_index()" + (f" / {cluster}" if cluster > 1 else ""),
        "share": _sum(f"tile * {plan.tile_elements}", block_at),
        "block_at": block_at,  # in the tile: from where a block loads
        # Vector i that a thread loads, from its first; those of one block's share after those of another's.
        "vector_at": vector_at(1),
        "vector_bytes_at": vector_at(plan.problem.dtype.bytes),
        "loaded": f"{plan.shares_loaded} * " if loads_all else "",  # times the vectors of a thread: what it loads
        "moved": stored != plan.loaded or loads_all,  # does a thread store from elsewhere than where it loads?
        # Results may lie in place, so a block waits until the others have loaded all. What came by multicast was read
        # once, for all of them.
        "waits_for_loads": loads_all and not plan.load.multicast,
        "load_thread": _sum(lane_at, _scatter("warp", plan.loaded.bits_of("warp"))),
        "store_thread": _sum(
            lane_at if lanes == plan.loaded.bits_of("lane") else _scatter("lane", lanes),
            _scatter("warp", stored.bits_of("warp")),
            _scatter("rank", stored.bits_of("cta")),
        ),
        "store_vector": _scatter("i", _vector_bits(plan, stored.bits_of("reg"))) or "0",
        # Of the vector at `at` of a pitched tile.
        "row_of_vector": f"tile * {plan.rows_per_tile} + at / {n}" if plan.rows_per_tile > 1 else "tile",
        "column_of_vector": f"at % {n}" if plan.rows_per_tile > 1 else "at",
    }


def _place_lines(plan: Plan) -> list[str]:
    """For each kind of place, the index bits that live there as loaded, low to high."""
    kinds = {
        "pair": "half of a register",
        "reg": "register of the thread",
        "lane": "thread of the warp",
        "warp": "warp of the block",
        "cta": "block of the cluster",
    }
    held = {kind: plan.loaded.bits_of(kind) for kind in kinds}
    return [f"{kind:5}{' '.join(map(str, held[kind].values())):17}{what}" for kind, what in kinds.items() if held[kind]]


def _groups(plan: Plan) -> list[dict[str, Any]]:
    """The steps as they are written: each over all chunks; runs of steps that stay in a chunk, chunk by chunk; or all
    from the exchange on, group by group."""
    groups: list[dict[str, Any]] = []
    loop = ""
    for step, view in zip(plan.steps, _steps(plan), strict=True):
        before = loop
        if plan.order == "by_group":
            loop = "group" if isinstance(step, Exchange) else loop
        else:
            loop = "chunk" if plan.order == "by_chunk" and _stays_in_chunk(step) else ""
        if loop and loop == before:
            groups[-1]["steps"].append(view)
        else:
            groups.append({"loop": loop, "steps": [view]})
    for group in groups:
        for form in ("wide", "packed", "over_blocks"):
            group[form] = any(view.get(form) for view in group["steps"])
    return groups


def _stays_in_chunk(step: Step) -> bool:
    if isinstance(step, Load | Prefetch | Trigger | Normalize | Gather | Store | Exchange):
        return False
    return not mixed_chunk_bits([step])


def _steps(plan: Plan) -> list[dict[str, Any]]:
    """What the block of each step needs to know."""
    views: list[dict[str, Any]] = []
    rounds = _rounds(plan)
    carrier = ""
    lines = zip(plan.steps, plan.describe(), plan.carriers, strict=True)
    for number, (step, line, carrier_after) in enumerate(lines, 1):
        view: dict[str, Any] = {"kind": type(step).__name__, "number": number, "line": line, "carrier": carrier}
        forms = {carrier, carrier_after} - {""}
        view |= {"wide": FP32 in forms, "packed": bool(forms - {FP32})}
        if isinstance(step, Mma):
            view |= {"stride": 1 << step.reg, "operand": step.operand, "parts": step.parts, "turned": step.turned}
            view |= {"accumulator": step.accumulator, "factor": step.factor, "over_blocks": step.over_blocks}
            view |= {"in_parts": step.in_parts, "normalizes": step.factor == NORMALIZER}
            view |= {"idle": (1 << step.idle) - 1}
        elif isinstance(step, Prefetch):
            view |= {"tiles": plan.tiles_ahead(step)}
        elif isinstance(step, Butterfly):
            view |= {"stride": _stride(step.place, carrier)}
        elif isinstance(step, Shuffle):
            view |= {"mask": 1 << step.lane, "widen": step.widen}
        elif isinstance(step, SwapButterfly):
            view |= {"mask": 1 << step.lane, "stride": _stride(step.place, FP32)}
        elif isinstance(step, Exchange):
            view |= _exchange(plan, step) | {"rounds": [next(rounds) for _ in range(step.rounds)]}
        carrier = carrier_after
        views.append(view)
    return views


def _stride(place: Place, carrier: str) -> int:
    """How far apart in p or f the two values of a butterfly lie."""
    if place == PAIR:
        return 1
    return 1 << (place.index + 1 if carrier == FP32 else place.index)


def _vector_bits(plan: Plan, reg_bits: Mapping[int, int]) -> dict[int, int]:
    """Bit of the number of a vector → index bit: the register places above those inside a vector."""
    inside = len(plan.vector_places) - 1
    return {index - inside: bit for index, bit in reg_bits.items() if index >= inside}


def _exchange(plan: Plan, step: Exchange) -> dict[str, Any]:
    """Where the vectors of a thread go: those of chunk c to slot (warp', chunk') of block rank', there to lane', the
    bits that move replaced.

    What changes lanes lies at lane ^ lane', as seen by who writes and by who reads it, so that neither meets bank
    conflicts: the eight lanes that access shared memory together differ there in all three bits.
    """
    there = _routes(plan, step.moves)
    back = _routes(plan, {after: before for before, after in step.moves.items()})
    return {
        "offset": plan.exchange_offset(step),
        "slot_bytes": step.slot_bytes,
        "slot_thread": _route(there, "slot", "warp", "rank", "lane") or "0",
        "slot_chunk": _route(there, "slot", "c") or "0",
        "slot_read": f"warp * {1 << plan.chunk_bits}" if plan.warp_bits else "0",
        "writes_to": f"lane ^ ({_route(there, 'lane', 'warp', 'rank', 'lane')})" if step.changes_lanes else "",
        "reads_from": f"lane ^ ({_route(back, 'lane', 'warp', 'rank', 'lane')})" if step.changes_lanes else "",
        "remote": step.crosses_blocks,
        "rank": _route(there, "rank", "rank", "lane", "c"),
    }


# By kind of what moves take bits to, and by what an index expression calls them, bit → bit.
Routes = dict[str, dict[str, dict[int, int]]]


def _routes(plan: Plan, moves: Mapping[Place, Place]) -> Routes:
    """Where bits of the chunk number c, the warp and the rank go, and of the lane those that move: to bits of the slot,
    the rank, the lane, or which half of the pairs it is."""
    names = ("c", "warp", "rank", "lane")
    routes: Routes = {kind: {name: {} for name in names} for kind in ("slot", "rank", "lane", "half")}
    for name, places in (
        ("c", [reg(2 + j) for j in range(plan.chunk_bits)]),
        ("warp", [warp(j) for j in range(plan.warp_bits)]),
        ("rank", [cta(j) for j in range(plan.cta_bits)]),
        ("lane", [place for place in moves if place.kind == "lane"]),
    ):
        for place in places:
            target = moves.get(place, place)
            kind = {"lane": "lane", "cta": "rank", "pair": "half"}.get(target.kind, "slot")
            above = plan.chunk_bits if target.kind == "warp" else 0
            routes[kind][name][_number(place)] = _number(target) + above
    return routes


def _route(routes: Routes, kind: str, *names: str) -> str:
    return _sum(*(_scatter(name, routes[kind][name]) for name in names))


def _rounds(plan: Plan) -> Iterator[dict[str, Any]]:
    """The rounds of all exchanges: which vectors of a chunk cross, and what keeps a slot's reader from its next writer.

    Slots of one block are freed by `block_sync`. Those of a cluster are freed by all its blocks having arrived: each
    arrives when it has read what lies there (or, at the start, when it runs), and waits before it stores to others.
    What was stored is there when as many bytes have landed at the barrier of the block; it then expects the next.
    """
    crossings = 0
    rounds = [(step, number) for step in plan.exchanges for number in range(step.rounds)]
    for i, (step, number) in enumerate(rounds):
        last = i == len(rounds) - 1
        free = i == 0 and _slots_are_free(plan)
        before = ["cluster_wait()"] if step.crosses_blocks else [] if free else ["block_sync()"]
        between, after = ["block_sync()"], list[str]()
        if step.crosses_blocks:
            between = [f"remote_barrier_wait(crossed, {crossings % 2})"]
            if not last:  # exchanges that cross come last
                between.append(f"if (thread_index() == 0) barrier_expect(crossed, {plan.crossed_bytes(step)}u)")
                after.append("cluster_arrive()")
            crossings += 1
        planes = [_plane(plan, step, plane, number * step.planes + plane) for plane in range(step.planes)]
        yield {"before": before, "between": between, "after": after, "planes": planes}


def _slots_are_free(plan: Plan) -> bool:
    """Whether nobody reads the slots of the first exchange any more when a tile comes to it.

    Rows that came by multicast lay where they are. In a persistent grid the tile before may still be read there, unless
    all have met since: where a stage is copied in bulk, when it was read; and group by group, before the last group was
    read, whose slots this tile writes to only after it has met again.
    """
    if plan.persistent:
        return plan.load.path == "bulk" or plan.order == "by_group"
    return not plan.load.multicast


def _number(place: Place) -> int:
    """Which bit it is of what its index expression names; of the chunk number where it is a register."""
    return place.index - 2 if place.kind == "reg" else place.index


def _plane(plan: Plan, step: Exchange, plane: int, vector: int) -> dict[str, Any]:
    """A vector of a chunk that crosses in a round: its values, and where in a slot it is written and read.

    Where values are turned, a vector is of one half of the pairs. As written, which half it is of decides a bit of the
    lane that reads it; and as which half it is read there, a bit of the warp or rank that writes it.
    """
    first, apart = (vector, 2) if step.turned else (4 * vector, 1)
    values = [f"f[8 * c + {first + apart * word}]" for word in range(4)]
    if step.carrier != FP32:
        values = [f"p[4 * c + {word}]" for word in range(4)]
    to, of = ("writes_to", "reads_from") if step.changes_lanes else ("lane", "lane")
    written = str(plane)
    if step.turned:
        to = f"(writes_to ^ {1 << step.moves[PAIR].index})" if vector else to
        written = f"({_route(_routes(plan, step.moves), 'half', 'warp', 'rank')})"
    return {"values": values, "write": _in_slot(step, to, written), "read": _in_slot(step, of, str(plane))}


def _in_slot(step: Exchange, at: str, plane: str) -> str:
    """Bytes from the beginning of a slot to a vector of the lane there."""
    if step.shared_layout == "swizzled":
        return f"{at} * 32 + 16 * ({at} / 4 % 2 ^ {plane})"
    padding = f" + {at} / 4 * 16" if step.shared_layout == "padded" else ""
    return f"{at} * {16 * step.planes}{padding}" + (f" + 16 * {plane}" if plane != "0" else "")


def _scatter(name: str, bits: Mapping[int, int]) -> str:
    """C expression that puts bit i of `name` at bit `bits[i]`, one term for each run of neighbours."""
    terms: list[str] = []
    todo = sorted(bits.items())
    while todo:
        source, target = todo[0]
        length = 1
        while length < len(todo) and todo[length] == (source + length, target + length):
            length += 1
        todo = todo[length:]
        value = f"{name} / {1 << source}" if source else name
        terms.append(f"{value} % {1 << length}" + (f" * {1 << target}" if target else ""))
    return " + ".join(terms)


def _sum(*terms: str) -> str:
    return " + ".join(term for term in terms if term)
