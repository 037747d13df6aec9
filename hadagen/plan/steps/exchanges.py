"""Steps that move bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hadagen.plan.layout import MMA_MOVES, PAIR, Axis, Place, add, bit, cta, reg, scatter, swaps, warp
from hadagen.plan.steps.base import BARRIERS, FP32, PACKED, WARP_VECTOR_BYTES, Cost, Draft, Region, Step
from hadagen.problem.problem import DType


@dataclass(frozen=True)
class Transpose(Step):
    """Applies `MMA_MOVES` to packed values (movmatrix), which undoes the moves of one `Mma`."""

    name = "Transpose"
    says = "transpose back"
    moves = MMA_MOVES
    takes = PACKED

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"mma_f16"})

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(plan.words(carrier), waits={"mma": 1})


@dataclass(frozen=True)
class Exchange(Step):
    """Swaps places of a warp with warp or cta bits through (distributed) shared memory."""

    name = "Exchange"
    labels = "pairs carrier rounds shared_layout turned"

    pairs: tuple[tuple[Place, Place], ...]  # (place in a warp, warp or cta place); `pair` if and only if turned
    carrier: str
    rounds: int = 1  # how often shared memory is reused, each time for a share of the vectors
    shared_layout: str = "linear"
    turned: bool = False  # applies `MMA_MOVES` first, which an mma after it undoes

    holds_all = exchanges = True

    @property
    def moves(self) -> dict[Place, Place]:
        swapped = swaps(self.pairs)
        moved = MMA_MOVES if self.turned else {}
        return {place: swapped.get(moved.get(place, place), moved.get(place, place)) for place in {**moved, **swapped}}

    @property
    def takes(self) -> str:
        return self.carrier

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"cluster"} if self.crosses_blocks else ())

    @property
    def crosses_blocks(self) -> bool:
        return any(far.kind == "cta" for _, far in self.pairs)

    def crosses(self, plan: Draft) -> bool:
        return self.crosses_blocks

    @property
    def changes_lanes(self) -> bool:
        return self.turned or any(near.kind == "lane" for near, _ in self.pairs)

    @property
    def planes(self) -> int:
        """16-byte vectors of one chunk that a thread exchanges in one round."""
        return (2 if self.carrier == FP32 else 1) // self.rounds

    @property
    def slot_bytes(self) -> int:
        """Shared memory of one chunk of one warp."""
        lane_bytes = 16 * self.planes
        padding = 16 * 8 if self.shared_layout == "padded" else 0  # one vector after every fourth lane
        return 32 * lane_bytes + padding

    def regions(self, plan: Draft) -> Iterator[Region]:
        """Its slots. Slots that other blocks fill lie apart, so that they are free from the start. Whole rows by
        multicast take much room, so slots reuse their memory."""
        if self.crosses_blocks:
            yield BARRIERS
        size = self.slot_bytes * plan.warps << plan.chunk_bits
        yield Region("crossed" if self.crosses_blocks else "slots", size, "stages" if plan.load.multicast else "")

    def crossed_bytes(self, plan: Draft) -> int:
        """Bytes that land in a block in one round between blocks: a vector for each lane, chunk and plane, and the
        levels of all warps."""
        vectors = self.planes << plan.chunk_bits + plan.warp_bits
        return vectors * WARP_VECTOR_BYTES + plan.footprint.size("levels")

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if self.turned and (self.carrier != FP32 or self.rounds > 1):
            yield "values that are turned on their way cross all at once, in fp32"
        if self.carrier != FP32 and self.rounds > 1:
            yield "only an fp32 exchange has two vectors a chunk to take in rounds"
        if self.turned != any(near == PAIR for near, _ in self.pairs):
            yield "the pair is swapped where values are turned on their way, and only there"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        vectors = self.planes * self.rounds << plan.chunk_bits
        conflicts = 2 if self.shared_layout == "linear" and self.planes == 2 else 1
        return Cost(
            instructions=4 * vectors,
            shared_bytes=2 * WARP_VECTOR_BYTES * conflicts * vectors,
            waits={"shared": 2 * self.rounds, "cluster sync" if self.crosses_blocks else "block sync": self.rounds},
            # the stores of a block to others wait for each other
            crossed_bytes=self.rounds * self.crossed_bytes(plan) if self.crosses_blocks else 0,
        )

    def sentence(self, bits: str) -> str:
        through = "distributed shared memory" if self.crosses_blocks else "shared memory"
        swapped = ", ".join(f"{near}↔{far}" for near, far in self.pairs)
        means = "exchange, turned," if self.turned else "exchange"
        rounds = f", {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{means} {swapped} through {through}: {self.carrier}, {self.shared_layout}{rounds}"

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        """Where the vectors of a thread go.

        Those of chunk c go to slot (warp', chunk') of block rank', and there to lane'; a prime means that the bits that
        move are replaced. If values change lanes, a vector lies at lane ^ lane', for the writer and for the reader. So
        neither meets bank conflicts: the eight lanes that access shared memory together differ there in all three bits.
        """
        there = _routes(plan, self.moves)
        back = _routes(plan, {after: before for before, after in self.moves.items()})
        return {
            "offset": plan.footprint.offset("crossed" if self.crosses_blocks else "slots"),
            "slot_bytes": self.slot_bytes,
            "slot_thread": _route(there, "slot", "warp", "rank", "lane") or "0",
            "slot_chunk": _route(there, "slot", "c") or "0",
            "slot_read": f"warp * {1 << plan.chunk_bits}" if plan.warps > 1 else "0",
            "writes_to": f"lane ^ ({_route(there, 'lane', 'warp', 'rank', 'lane')})" if self.changes_lanes else "",
            "reads_from": f"lane ^ ({_route(back, 'lane', 'warp', 'rank', 'lane')})" if self.changes_lanes else "",
            "remote": self.crosses_blocks,
            "rank": _route(there, "rank", "rank", "lane", "c"),
            "rounds": [self._round(plan, at, number) for number in range(self.rounds)],
        }

    def _round(self, plan: Draft, at: int, number: int) -> dict[str, Any]:
        """The vectors of a chunk that cross, and the barriers between the reader of a slot and its next writer.

        `block_sync` frees the slots of one block. The slots of a cluster are free when all its blocks have arrived: a
        block arrives when it has read its slots (or, at the start, when it runs), and waits before it stores to others.
        Values have come when all expected bytes have landed at the barrier of the block. The barrier then expects the
        bytes of the next round.
        """
        earlier = [step for step in plan.steps[:at] if isinstance(step, Exchange)]
        later = [step for step in plan.steps[at + 1 :] if step.crosses(plan)]
        free = not earlier and number == 0 and _slots_are_free(plan)
        before, between, after = [] if free else ["block_sync()"], ["block_sync()"], list[str]()
        if self.crosses_blocks:
            crossings = number + sum(step.rounds for step in earlier if step.crosses_blocks)
            before, between = ["cluster_wait()"], [f"remote_barrier_wait(crossed, {crossings % 2})"]
            if following := [*[self] * (number < self.rounds - 1), *later][:1]:
                expected = following[0].crossed_bytes(plan)
                between.append(f"if (thread_index() == 0) barrier_expect(crossed, {expected}u)")
                after.append("cluster_arrive()")
        planes = [self._plane(plan, plane, number * self.planes + plane) for plane in range(self.planes)]
        return {"before": before, "between": between, "after": after, "planes": planes}

    def _plane(self, plan: Draft, plane: int, vector: int) -> dict[str, Any]:
        """A vector of a chunk that crosses in a round: its values, and where in a slot it is written and read.

        If values are turned, a vector has one half of all pairs. The half that is written decides a bit of the lane
        that reads it. The half as which it is read follows from a bit of the warp or rank that writes it.
        """
        first, apart = (vector, 2) if self.turned else (4 * vector, 1)
        values = [f"f[8 * c + {first + apart * word}]" for word in range(4)]
        if self.carrier != FP32:
            values = [f"p[4 * c + {word}]" for word in range(4)]
        to, of = ("writes_to", "reads_from") if self.changes_lanes else ("lane", "lane")
        written = str(plane)
        if self.turned:
            to = f"(writes_to ^ {1 << self.moves[PAIR].index})" if vector else to
            written = f"({_route(_routes(plan, self.moves), 'half', 'warp', 'rank')})"
        return {"values": values, "write": self._in_slot(to, written), "read": self._in_slot(of, str(plane))}

    def _in_slot(self, at: str, plane: str) -> str:
        """The expression for the bytes from the beginning of a slot to a vector of lane `at`."""
        if self.shared_layout == "swizzled":
            return f"{at} * 32 + 16 * ({at} / 4 % 2 ^ {plane})"
        padding = f" + {at} / 4 * 16" if self.shared_layout == "padded" else ""
        return f"{at} * {16 * self.planes}{padding}" + (f" + 16 * {plane}" if plane != "0" else "")


# Kind of the target of a move → name of the source in index expressions → bit → bit.
Routes = dict[str, dict[str, dict[Axis, Axis]]]


def _routes(plan: Draft, moves: Mapping[Place, Place]) -> Routes:
    """Where the bits of the chunk number c, the warp and the rank go, and the lane bits that move: to bits of the slot,
    the rank, the lane, or to the half of the pairs."""
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
            routes[kind][name][bit(_number(place))] = bit(_number(target) + above)
    if plan.problem.odd_factor > 1:
        digit = Axis(plan.problem.odd_factor, 1 << plan.warp_bits)
        routes["slot"]["warp"][digit] = Axis(digit.radix, digit.stride << plan.chunk_bits)
    return routes


def _route(routes: Routes, kind: str, *names: str) -> str:
    return add(*(scatter(name, routes[kind][name]) for name in names))


def _number(place: Place) -> int:
    """The number of the bit in its index expression: for a register, the bit of the chunk number."""
    return place.index - 2 if place.kind == "reg" else place.index


def _slots_are_free(plan: Draft) -> bool:
    """Whether no thread still reads the slots of the first exchange when a tile reaches it.

    Rows that came by multicast may still be read, because the slots reuse their memory. In a persistent grid, the tile
    before may still be read, unless a barrier of the block came since. If a stage is copied in bulk, that barrier comes
    after the stage was read. If steps run group by group, it comes before the last group was read, and this tile writes
    to the slots of that group only after another barrier.
    """
    if plan.persistent:
        return plan.load.path == "bulk" or plan.order == "by_group"
    return not plan.load.multicast
