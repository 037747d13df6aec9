"""Steps between memory and registers, and requests to L2 and to the next kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hadagen.plan.layout import VECTOR_BYTES
from hadagen.plan.steps.base import AS_LOADED, BARRIERS, FP32, PACKED, WARP_VECTOR_BYTES, Cost, Draft, Region, Step
from hadagen.problem.problem import DType, Rows


@dataclass(frozen=True)
class Load(Step):
    """Global memory → registers, in 16-byte vectors, with `stages` tiles in flight. Before a `Gather` it loads to
    shared memory only, where the `Gather` reads."""

    name = "Load"
    labels = "path stages carrier"

    path: str  # plain, cp_async, bulk or multicast
    stages: int = 1
    carrier: str = PACKED  # fp32 for float32

    template = "loads.cu.j2"
    takes = ""
    loads = reads_x = holds_all = True

    @property
    def leaves(self) -> str:
        return self.carrier

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        if self.multicast:
            return frozenset({"bulk_copy", "cluster", "multicast_in_place"})
        return frozenset({"bulk_copy"} if self.in_bulk else {"cp_async"} if self.staged else ())

    @property
    def staged(self) -> bool:
        """Whether tiles go through shared memory."""
        return self.path == "cp_async" or self.in_bulk

    @property
    def in_bulk(self) -> bool:
        """Whether one thread starts the copy of a whole share to shared memory, whose end an mbarrier signals."""
        return self.path in ("bulk", "multicast")

    @property
    def multicast(self) -> bool:
        """Whether every block of a cluster copies its share to all blocks, so that each has whole rows."""
        return self.path == "multicast"

    def regions(self, plan: Draft) -> Iterator[Region]:
        if self.in_bulk:
            yield BARRIERS
        if self.staged:
            yield Region("stages", self.stages * plan.stage_bytes)

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if self.stages < 1 or (self.stages > 1 and not plan.persistent):
            yield f"{self.stages} tiles under way; there is one, or more of a persistent grid"
        if self.carrier != (FP32 if plan.problem.io.input is DType.FLOAT32 else PACKED):
            yield f"values of this type are not loaded as {self.carrier}"
        if self.multicast and plan.shares_loaded == 1:
            yield "no block needs the shares of others (load must not be multicast)"
        if self.staged and plan.problem.unit * plan.problem.io.input.bytes < VECTOR_BYTES:
            yield "rows shorter than 16 bytes cannot be copied asynchronously (load must be another)"
        if self.multicast and plan.width > 1:
            yield "what comes before the transform is computed by one block alone (load must not be multicast)"
        if self.in_bulk and plan.prologue and plan.prologue.is_halved and plan.tile_elements > plan.problem.room:
            yield "halves of several rows lie apart (load must not be bulk, or a tile smaller)"
        if self.staged and plan.problem.io.rows is Rows.PITCHED:
            yield "pitched rows cannot be copied as they lie (load must be another)"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        vectors = plan.vectors * plan.shares_loaded * plan.width
        if not self.staged:
            return Cost(2 * vectors)
        instructions, landing = (1, "bulk") if self.in_bulk else (3, "shared")
        return Cost(instructions * vectors, shared_bytes=2 * WARP_VECTOR_BYTES * vectors, waits={landing: 1})

    def sentence(self, bits: str) -> str:
        return f"load {self.path}" + (f", {self.stages} stages" if self.stages > 1 else "")


class _Asks(Step):
    """Makes a request, once a tile."""

    loads = True

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost()


@dataclass(frozen=True)
class Prefetch(_Asks):
    """Asks L2 for the input about `mib` MiB behind the tile that was just loaded, for a tile that starts later."""

    name = "Prefetch"
    labels = "mib"

    mib: int

    says = "prefetch to L2 what is {mib} MiB ahead"
    template = "loads.cu.j2"
    takes = AS_LOADED
    prefetches = True

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"bulk_copy"})

    def tiles_ahead(self, plan: Draft) -> int:
        """The distance of the prefetched tile from the loaded one, in tiles. At least 1, as tiles are below 1 MiB."""
        return (self.mib << 20) // (plan.tile_elements * plan.width * plan.problem.io.input.bytes)

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.problem.io.rows is Rows.PITCHED:
            yield "pitched rows lie anywhere"
        if plan.persistent:
            yield "blocks that loop do not take tiles in order"

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return {"tiles": self.tiles_ahead(plan)}


@dataclass(frozen=True)
class Trigger(_Asks):
    """Lets the next kernel in the stream start on free SMs. It waits for the end of this one all the same."""

    name = "Trigger"
    says = "let the next kernel start"

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"dependent_launch"})

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.persistent:
            yield "blocks that loop leave no room for the next kernel's"
        if at == 0 or self in plan.steps[:at]:
            yield "the next kernel is let start once, and after the load"


@dataclass(frozen=True)
class Store(Step):
    """Registers → global memory, each 16-byte vector to its address. Values have the form that `Load` left."""

    name = "Store"
    says = "store"

    @property
    def takes(self) -> str | None:
        return AS_LOADED

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if at < len(plan.steps) - 1:
            yield "the tile is stored once, at the end"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(2 * plan.vectors)
