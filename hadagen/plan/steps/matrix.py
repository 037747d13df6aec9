"""The steps of a transform with a matrix, and the step that flips signs.

A row of x is taken as a matrix X of order × length elements, and the transform is A · X · H, times the scale. `Columns`
multiplies by H and `Matrix` by A. Between the two, values cross shared memory, in the form of operands of `Matrix`. If
the length is 1, `Square` does both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hadagen.plan.layout import MMA_COLUMNS, MMA_ROWS, ROW, Axis, Place, Placement, add, bit, column, log2, scatter
from hadagen.plan.steps.base import (
    BARRIERS,
    FP32,
    PACKED,
    SPLIT,
    WARP_BYTES,
    WARP_VECTOR_BYTES,
    Coordinates,
    Cost,
    Draft,
    Region,
    Roundings,
    Step,
    Tile,
)
from hadagen.plan.steps.memory import Load, Store
from hadagen.plan.steps.transforms import MMA_TYPES
from hadagen.problem.operands import ENTRY_FACTOR, MATRIX, SIGNS
from hadagen.problem.problem import DType

if TYPE_CHECKING:
    from hadagen.plan.steps.values import TileValues

OPERAND_SIDE = MMA_ROWS  # rows and columns of A in an operand of an mma
_OPERAND_REGISTERS = OPERAND_SIDE**2 // 2 // 32
VECTOR = MMA_COLUMNS  # columns of X in a vector
COLUMN_BITS = 5  # bits of the columns that a warp loads of a block of rows at once, in a vector of each thread
_SUMS = OPERAND_SIDE << COLUMN_BITS >> 5  # registers of a thread for the sums of 16 rows and 32 columns
# Registers that a thread has for A. If it needs more, it loads each operand when it multiplies by it.
_MOST_HELD = 64


@dataclass(frozen=True)
class LoadColumns(Load):
    """Global memory → registers, for `Columns`, directly or through shared memory.

    A warp loads blocks of 16 rows of X. A thread loads two of these rows, eight columns of every 32. If X has fewer
    columns, a block holds the same rows of X for several rows of x.
    """

    name = "LoadColumns"
    template = "matrix.cu.j2"

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        yield from super().faults(plan, at)
        if self.staged and plan.width > 1 and not (plan.prologue and plan.prologue.is_halved):
            yield "the parts of rows lie element by element (load must be plain)"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return super().cost(plan, carrier) if self.staged else Cost(4 * plan.vectors * plan.width)


@dataclass(frozen=True)
class Columns(Step):
    """X · H, times the scale or the part of it that an mma takes, to shared memory, packed or split.

    An mma whose left operand is H transforms four bits, and a second one in the same accumulator a fifth. The next
    bits, which number the vectors of a thread, are transformed by add and subtract. An mma leaves the
    values of two neighboring rows of X in one column in a thread. Once rounded, these two values form a word of
    a right operand of `Matrix`.
    """

    name = "Columns"
    labels = "carrier bits"

    carrier: str
    bits: int  # that it transforms, from the lowest on
    scales: bool = field(default=True, repr=False)  # by the whole scale

    template = "matrix.cu.j2"

    @property
    def multiplies(self) -> str:
        return "scale" if self.scales else "factor 1"

    @property
    def leaves(self) -> str:
        return self.carrier

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(map(column, range(self.bits)))

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({MMA_TYPES["bfloat16" if carrier == SPLIT else dtype.value].feature})

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if not isinstance(plan.load, LoadColumns):
            yield "it transforms what a thread has of blocks of rows"
        if plan.carriers[at] not in (PACKED, SPLIT):
            yield f"it takes packed or split values but finds {plan.carriers[at] or 'none'}"
        if self.bits != min(plan.problem.bits, COLUMN_BITS + plan.chunk_bits):
            yield "a thread has vectors of other bits"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        if carrier == PACKED:
            so_far.add(carrier, 1.0)

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return self.name, self.carrier, self.bits

    def sentence(self, bits: str) -> str:
        return f"mma with H, then add and subtract: bits {bits}{'; times the scale' * self.scales}; {self.carrier}"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        elements = plan.vectors * VECTOR  # of a thread
        planes = 2 if self.carrier == SPLIT else 1
        added = max(0, self.bits - COLUMN_BITS)
        mma = plan.vectors * 4 * max(1, (1 << COLUMN_BITS) // plan.problem.length) * (1 + (carrier == SPLIT))
        return Cost(
            instructions=mma + elements * (1 + added + (0.5 if planes == 1 else 3)) + 2 * plan.vectors,
            mma=mma,
            shared_bytes=planes * plan.vectors * WARP_VECTOR_BYTES,
            waits={"mma": 2, "arithmetic": added + 2, "shared": 1, "block sync": 1},
        )

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        # A power of two of the scale goes to the operand, so that sums stay in the range of fp32.
        power = {"factor": 1, "power": plan.problem.bits} if plan.problem.io.input is DType.BFLOAT16 else {}
        return {"split": self.carrier == SPLIT, "of_split": plan.carriers[at] == SPLIT, **power}


@dataclass(frozen=True)
class Multiplies(Store, Tile):
    """Multiplies by A, and stores, or leaves the product in fp32 to steps that quantize it. The base class of `Matrix`
    and `Square`.

    A block has 2^warp_bits groups of warps. Each warp of a group multiplies by `slabs` times 16 rows of A; those of all
    its warps make up A. A tile is `rows` rows of x.
    """

    rows: int
    slabs: int
    stores: bool = field(default=True, repr=False, kw_only=True)

    template = "matrix.cu.j2"
    operands = MATRIX, *SIGNS
    is_product = True
    flips = (True,)  # those after the transform are flipped as it stores

    @property
    def takes(self) -> str | None:
        return None

    @property
    def leaves(self) -> str:
        return PACKED if self.stores else FP32

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if self.stores:
            yield from super().faults(plan, at)
        if self.rows % self.rows_at_once(plan) or self.sets(plan) < 1 << plan.warp_bits:
            yield "the rows of the tile do not fill each mma of each warp"

    def interpret(self, values: TileValues, plan: Draft) -> None:
        values.multiply_rows(plan.problem, plan.loaded)
        super().interpret(values, plan)
        values.flip(plan.problem, plan.placements[-1], "signs_after")

    def rows_at_once(self, plan: Draft) -> int:
        """The rows of x that have columns in one mma."""
        return OPERAND_SIDE

    def sets(self, plan: Draft) -> int:
        """The number of sets of columns that a group of warps multiplies by A, one after the other."""
        return self.rows // self.rows_at_once(plan)

    def operands_in_slab(self, plan: Draft) -> int:
        """Operands of a slab, each of 16 columns of A."""
        return -(-plan.problem.order // OPERAND_SIDE)

    def warps(self, plan: Draft) -> int:
        """Warps of a group."""
        return -(-self.operands_in_slab(plan) // self.slabs)

    def shared_bytes(self, plan: Draft) -> int:
        """Bytes of what it multiplies or leaves in shared memory, besides what the load has staged."""
        raise NotImplementedError

    def regions(self, plan: Draft) -> Iterator[Region]:
        if plan.load.staged:
            yield BARRIERS  # or the zeros that a `Square` reads
        yield Region("slots", self.shared_bytes(plan))

    def held_from(self, plan: Draft) -> int:
        return 1 + plan.steps.index(self)

    def placement(self, plan: Draft) -> Placement:
        columns = {column(number): bit(number) for number in range(plan.problem.bits)}
        return Placement({**columns, ROW: Axis(self.rows * plan.problem.order, plan.problem.length)})

    def staged_bytes(self, plan: Draft) -> int:
        return plan.tile_elements * plan.problem.io.input.bytes

    def vectors(self, plan: Draft) -> int:
        return -(-plan.tile_elements // (plan.vector_elements * 32 * plan.warps))

    def eights(self, plan: Draft) -> int:
        return 0

    def held(self, plan: Draft) -> int:
        """Registers of a thread for A; 0 if it loads operands when it multiplies by them."""
        needed = _OPERAND_REGISTERS * self.slabs * self.operands_in_slab(plan)
        return needed if needed <= _MOST_HELD else 0

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return {
            "order": plan.problem.order,
            "slabs": self.slabs,
            "operands": self.operands_in_slab(plan),
            "parts": 1 << plan.warp_bits,
            "warps_of_group": self.warps(plan),
            "padded": self.is_padded(plan),
        }

    def of_thread(self, plan: Draft) -> dict[str, str]:
        return {"warp": "thread_index() / 32"}

    def names(self, plan: Draft) -> dict[str, Any]:
        return {"stages_from": "loads.cu.j2" if plan.load.in_bulk else self.template, "m": self.view(plan, 0)}

    def is_padded(self, plan: Draft) -> bool:
        """Whether the last warp of a group holds rows that A lacks."""
        return plan.problem.order % OPERAND_SIDE > 0 or self.operands_in_slab(plan) % self.slabs > 0


@dataclass(frozen=True)
class Matrix(Multiplies):
    """A times what a `Columns` left in shared memory, by mma whose left operand is A.

    It adds and subtracts columns whose numbers differ in the outer bits. Then it rounds, multiplies by the signs after
    the transform and stores, or leaves all that a thread has. Of 32 columns a thread has eight neighbors in a row.
    """

    name = "Matrix"
    labels = "rows slabs outer"

    outer: tuple[int, int]  # the first bit that it transforms, and the end

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        yield from super().faults(plan, at)
        if not any(isinstance(step, Columns) for step in plan.steps[:at]):
            yield "it multiplies what `Columns` left in shared memory"
        if plan.load.staged and plan.load.path != "bulk":
            yield "blocks of rows are loaded as they lie (load must be plain or bulk)"
        if plan.load.staged and not self.in_order(plan):
            yield "a row of x begins inside a block (rows must be 1, or load plain)"

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        wide = carrier == SPLIT or dtype is DType.BFLOAT16
        return frozenset({"mma_bf16", "bf16x2_fma"} if wide else {"mma_f16"})

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        if self.stores:
            so_far.add_sums(carrier, 0)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(map(column, range(*self.outer)))

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return self.name, self.outer

    def sentence(self, bits: str) -> str:
        then = "; round and store" if self.stores else ""
        return f"matrix of the transform{f', then add and subtract: bits {bits}' if bits else ''}{then}"

    def rows_at_once(self, plan: Draft) -> int:
        """More than one if a row of X has fewer columns than a warp loads."""
        return max(1, (1 << COLUMN_BITS) // plan.problem.length)

    def in_order(self, plan: Draft) -> bool:
        """Whether blocks of rows of X lie one behind the other in memory, in a tile as in what crosses shared
        memory."""
        return self.rows_at_once(plan) == 1 and (self.rows == 1 or plan.problem.order % OPERAND_SIDE == 0)

    def vectors_in_row(self, plan: Draft) -> int:
        """Vectors of a thread in a row of a block."""
        return min(1 << plan.chunk_bits, max(1, plan.problem.length >> COLUMN_BITS))

    def groups(self, plan: Draft) -> int:
        """Blocks beside each other in the same rows. It adds and subtracts their results."""
        return max(1, plan.problem.length >> COLUMN_BITS + plan.chunk_bits)

    def blocks(self, plan: Draft) -> int:
        """The number of blocks of a tile."""
        return self.rows // self.rows_at_once(plan) * self.operands_in_slab(plan) * self.groups(plan)

    def blocks_of_warp(self, plan: Draft) -> int:
        """The most that a warp has."""
        return -(-self.blocks(plan) // plan.warps)

    def sets(self, plan: Draft) -> int:
        """The number of sets. A set has 32 columns, and the same columns of the groups beside them."""
        return super().sets(plan) * self.vectors_in_row(plan)

    def sets_of_warp(self, plan: Draft) -> int:
        return max(1, self.sets(plan) >> plan.warp_bits)

    def values(self, plan: Draft) -> int:
        """Values of a thread that it leaves in registers."""
        return _SUMS * self.slabs * self.groups(plan) * self.sets_of_warp(plan)

    def coordinates(self, plan: Draft, before: Placement) -> Coordinates:
        """The coordinates of the product. Rows that A lacks lie beyond the end of a row of x."""
        problem = plan.problem
        rows = {
            kind: {digit: Axis(axis.radix, axis.stride * problem.length) for digit, axis in digits.items()}
            for kind, digits in self._rows(plan).items()
        }
        number = OPERAND_SIDE * self.slabs  # of values in a set: groups, then sets, then warps
        first = COLUMN_BITS + log2(self.vectors_in_row(plan))
        places = [*(bit(first + at) for at in range(log2(self.groups(plan)))), *self._of_sets(plan)]
        held = log2(self.groups(plan) * self.sets_of_warp(plan))
        lanes = log2(4 // self.rows_at_once(plan))
        return {
            "value": {bit(at): bit(at) for at in range(3)}
            | rows["value"]
            | {Axis(2, number << at): place for at, place in enumerate(places[:held])},
            "lane": {bit(at): bit(3 + at) for at in range(lanes)}
            | {bit(lanes + at): Axis(2, problem.n << at) for at in range(2 - lanes)}
            | rows["lane"],
            "warp": rows["warp"] | {Axis(2, self.warps(plan) << at): place for at, place in enumerate(places[held:])},
        }

    def _of_sets(self, plan: Draft) -> list[Axis]:
        """The axes that tell sets apart: columns, then rows of x."""
        rows = log2(self.rows // self.rows_at_once(plan))
        return [
            *(bit(COLUMN_BITS + at) for at in range(log2(self.vectors_in_row(plan)))),
            *(Axis(2, self.rows_at_once(plan) * plan.problem.n << at) for at in range(rows)),
        ]

    def rows_apart(self, plan: Draft) -> Coordinates:
        return self._rows(plan) if self.is_padded(plan) else {}

    def _rows(self, plan: Draft) -> Coordinates:
        """The digits of `coordinates` that tell rows of X apart, each with the number of a row in place of an index."""
        slabs, warps = Axis(self.slabs, OPERAND_SIDE), Axis(self.warps(plan), 1)
        return {
            "value": {bit(3): bit(3)} | ({slabs: slabs} if self.slabs > 1 else {}),
            "lane": {bit(2 + at): bit(at) for at in range(3)},
            "warp": {warps: Axis(warps.radix, OPERAND_SIDE * self.slabs)} if warps.radix > 1 else {},
        }

    def vectors(self, plan: Draft) -> int:
        return 2 * self.blocks_of_warp(plan) * self.vectors_in_row(plan)

    def names(self, plan: Draft) -> dict[str, Any]:
        if self.stores:
            return super().names(plan)
        coordinates = self.coordinates(plan, plan.loaded)
        at = {
            "vectors": self.eights(plan),
            "stored_at": add(*(scatter(kind, coordinates[kind]) for kind in ("lane", "warp"))),
            "store_vector": of_vector(coordinates) or "0",
        }
        return super().names(plan) | at

    def eights(self, plan: Draft) -> int:
        return 0 if self.stores else self.values(plan) // VECTOR

    def registers(self, plan: Draft, *, wide: bool) -> int:
        """The larger of what `Columns` needs, loads and sums, and what this step needs, A and its sums."""
        columns = VECTOR * self.vectors_in_row(plan)
        at_once = 2 * self.vectors_in_row(plan) if plan.load.staged else self.vectors(plan)
        loaded = _OPERAND_REGISTERS * (at_once * plan.width + self.vectors_in_row(plan))
        sums = _SUMS * self.slabs * self.groups(plan) if self.stores else self.values(plan)
        return max(loaded + columns // 2, self.held(plan) + sums + 2 * VECTOR)

    def plane_bytes(self, plan: Draft) -> int:
        """Bytes of packed operands of all blocks."""
        return 2 * self.blocks(plan) * self.vectors_in_row(plan) * WARP_VECTOR_BYTES

    def staged_bytes(self, plan: Draft) -> int:
        """As many as operands of all blocks have, which replace what was staged."""
        return plan.width * self.plane_bytes(plan)

    def shared_bytes(self, plan: Draft) -> int:
        planes = 2 if plan.carriers[plan.steps.index(self)] == SPLIT else 1
        return self.plane_bytes(plan) * max(0, planes - plan.width * plan.load.staged)

    def cost(self, plan: Draft, carrier: str) -> Cost:
        planes = 2 if carrier == SPLIT else 1
        sets = self.sets(plan) / (1 << plan.warp_bits)  # of a warp
        groups = sets * self.groups(plan)  # of 32 columns
        loaded = self.slabs * self.operands_in_slab(plan) * (1 if self.held(plan) else sets)  # operands of A
        mma = 4 * planes * groups * self.slabs * self.operands_in_slab(plan)
        reads = 2 * planes * groups * self.operands_in_slab(plan)
        return Cost(
            instructions=mma + reads + groups * self.slabs * (24 + 16 * log2(self.groups(plan))) + 5 * loaded,
            mma=round(mma),
            shared_bytes=reads * WARP_VECTOR_BYTES,
            waits={"shared": 1, "mma": self.operands_in_slab(plan) * planes},
        )

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        lanes = 4 // self.rows_at_once(plan)  # that have columns of one row of x
        return super().view(plan, at) | {
            "length": plan.problem.length,
            "together": self.rows_at_once(plan),
            "lanes": lanes,
            "idle": 8 - 2 * lanes if lanes < 4 else 0,  # bits of the numbers of columns that tell rows of x apart
            "vectors": self.vectors_in_row(plan),
            "groups": self.groups(plan),
            "held": self.held(plan) > 0,
            "sets": self.sets_of_warp(plan),
            "blocks": self.blocks(plan),
            "share": self.blocks_of_warp(plan),
            "others": plan.footprint.offset("slots") + (0 if plan.load.staged else self.plane_bytes(plan)),
        }


@dataclass(frozen=True)
class Square(Multiplies):
    """Where H is 1: multiplies the rows that `Load` staged by Aᵀ and the scale, in mma of 16 rows by 8 columns of Aᵀ.
    The result goes through shared memory, is multiplied by the signs after the transform, and is stored."""

    name = "Square"
    labels = "rows slabs"
    multiplies = "scale"

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        yield from super().faults(plan, at)
        if plan.problem.length > 1:
            yield "H has more than one column"
        if not all(step.loads for step in plan.steps[:at]) or plan.load.path != "cp_async":
            yield "only cp_async stages rows that are operands (load must be cp_async)"

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({MMA_TYPES[dtype.value].feature})

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.add(carrier, 1.0)

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return (self.name,)

    def sentence(self, bits: str) -> str:
        return "matrix of the transform, times the scale; round and store"

    def registers(self, plan: Draft, *, wide: bool) -> int:
        return _OPERAND_REGISTERS * self.slabs * (self.operands_in_slab(plan) + 2)

    def in_place(self, plan: Draft) -> bool:
        """Whether the result overwrites the staged rows, which it may if no other warp reads them."""
        return self.warps(plan) == 1

    def shared_bytes(self, plan: Draft) -> int:
        return 0 if self.in_place(plan) else plan.stage_bytes

    def cost(self, plan: Draft, carrier: str) -> Cost:
        groups = self.sets(plan) / (1 << plan.warp_bits)  # of 16 rows, of one warp
        mma = 2 * groups * self.slabs * self.operands_in_slab(plan)
        words = 4 * groups * self.slabs
        staged = self.vectors(plan)
        return Cost(
            instructions=mma + 3 * groups * self.operands_in_slab(plan) + 7 * words + 4 * staged,
            mma=round(mma),
            shared_bytes=groups * self.operands_in_slab(plan) * WARP_VECTOR_BYTES
            + words * WARP_BYTES
            + WARP_VECTOR_BYTES * staged,
            waits={"mma": self.operands_in_slab(plan), "shared": 2, "block sync": 2},
        )

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return super().view(plan, at) | {
            "sets": self.sets(plan),
            "in_place": self.in_place(plan),
            "product": plan.footprint.offset("slots"),
            "undo": round(1 / ENTRY_FACTOR[plan.problem.io.input]),
        }


def of_vector(coordinates: Coordinates) -> str:
    """C expression for how far vector `i` of a thread is from its first."""
    digits = {digit: axis for digit, axis in coordinates["value"].items() if digit.stride >= VECTOR}
    return scatter("i", {Axis(digit.radix, digit.stride // VECTOR): axis for digit, axis in digits.items()})


@dataclass(frozen=True)
class Signs(Step):
    """Multiplies by the signs before or after the transform, if the call gives some."""

    name = "Signs"
    labels = "before"
    operands = SIGNS

    before: bool

    @property
    def loads(self) -> bool:  # type: ignore[override]  # those before belong to what a tile has loaded
        return self.before

    def interpret(self, values: TileValues, plan: Draft) -> None:
        name = "signs_before" if self.before else "signs_after"
        values.flip(plan.problem, plan.placements[plan.steps.index(self)], name)

    def sentence(self, bits: str) -> str:
        return f"signs {'before' if self.before else 'after'} the transform"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(3 * plan.words(carrier))
