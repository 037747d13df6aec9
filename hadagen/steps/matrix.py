"""The steps of a transform with a matrix, and the step that flips signs.

A row of x is taken as a matrix X of order × length elements, and the transform is A · X · H, times the scale. `Matrix`
multiplies by A from the left, and transforms the upper column bits. `Columns` transforms the lower column bits, and
stores. Between them values cross shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadagen.launch import ENTRY_FACTOR
from hadagen.layout import Place, column
from hadagen.problem import DType
from hadagen.steps.base import PACKED, SPLIT, WARP_BYTES, WARP_VECTOR_BYTES, Cost, Roundings, Step
from hadagen.steps.memory import Store

if TYPE_CHECKING:
    from hadagen.steps.draft import Draft
    from hadagen.steps.values import Values

OPERAND_SIDE = 16  # rows and columns of A in an operand of an mma; rows of X in one of the second step
COLUMNS = 8  # columns of X that an mma multiplies, and elements of a 16-byte vector
OPERAND_REGISTERS = 4
VECTORS_OF_BANKS = 8  # 16-byte vectors that all banks hold
# Bits that `Columns` transforms at most and at least; with one more bit, an mma in the second step does twice as much.
MOST_BITS, LEAST_BITS = 7, 3
# Sums that are under way at once in a warp, so that an mma need not wait for the one before it.
_SUMS = 4
_OUTPUTS = 64  # columns of the result that a warp has in registers


@dataclass(frozen=True)
class Matrix(Step):
    """A · X, times the scale, and the transform of the upper column bits by add and subtract.

    X comes from shared memory, where the load has staged a tile of `rows` rows of x. The result goes there too, packed
    or split. A block has 2^warp_bits groups of warps, and each group a share of the columns. Each warp of a group holds
    `slabs` times 16 rows of A in registers, those of all its warps make up A. If a group is one warp, packed values and
    the high halves of split ones replace what they come from; else they go elsewhere, because other warps may still
    read it. A warp has 2^chunk_bits groups of columns at once, whose numbers differ in the upper bits.

    If the length is 1, the roles change: rows of x are rows of the left operand, and columns of Aᵀ those of the right.
    """

    rows: int
    slabs: int
    carrier: str
    upper: tuple[int, ...]  # the bits that it transforms

    template = "matrix.cu.j2"
    takes = PACKED
    multiplies = "scale"

    @property
    def leaves(self) -> str:
        return self.carrier

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(map(column, self.upper))

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"cp_async", "mma_f16", "mma_bf16" if dtype is DType.BFLOAT16 else "mma_f16"})

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.problem.order == 1:
            yield "the transform has no matrix"
        if not all(step.loads for step in plan.steps[:at]) or plan.load.path != "cp_async":
            yield "the matrix multiplies what cp_async has staged"
        if self.upper != tuple(range(plan.problem.bits - plan.chunk_bits, plan.problem.bits)):
            yield "a warp has the columns of other bits"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        if carrier == PACKED:
            so_far.add(carrier, 1.0)

    def interpret(self, values: Values, plan: Draft) -> None:
        values.multiply_rows(plan.problem, plan.loaded)
        super().interpret(values, plan)

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return type(self).__name__, self.carrier, self.upper, plan.problem.length == 1

    def sentence(self, bits: str) -> str:
        after = f", then add and subtract: bits {bits}" if bits else ""
        return f"matrix of the transform, times the scale{after}; {self.carrier}"

    def operands(self, plan: Draft) -> int:
        """Operands of 16 columns of A that a warp holds of each slab."""
        return -(-plan.problem.order // OPERAND_SIDE)

    def warps(self, plan: Draft) -> int:
        """Warps of a group."""
        return -(-self.operands(plan) // self.slabs)

    def in_place(self, plan: Draft) -> bool:
        """Whether the result replaces X."""
        return self.warps(plan) == 1

    def at_once(self, plan: Draft) -> int:
        """Sets of groups of columns that a warp multiplies at once."""
        return 1 if plan.problem.length == 1 else max(1, _SUMS // (self.slabs << plan.chunk_bits))

    def registers(self, plan: Draft) -> int:
        """Of a thread, for A and the sums."""
        sums = 2 if plan.problem.length == 1 else self.at_once(plan) << plan.chunk_bits
        return OPERAND_REGISTERS * self.slabs * (self.operands(plan) + sums)

    def shared_bytes(self, plan: Draft) -> int:
        """For the result, besides what the load has staged."""
        planes = 2 if self.carrier == SPLIT else 1
        return plan.footprint.stage_bytes * (planes - self.in_place(plan))

    def gap(self, plan: Draft) -> int:
        """The number of vectors in shared memory after which one is left out; 0 for none. So eight rows of X have the
        same column in eight groups of banks."""
        return 0 if plan.problem.length == 1 else max(VECTORS_OF_BANKS, plan.problem.length // COLUMNS)

    def sets(self, plan: Draft) -> int:
        """Sets of groups of columns of a tile; with a length of 1, groups of 16 rows."""
        if plan.problem.length == 1:
            return self.rows // OPERAND_SIDE
        return self.rows * plan.problem.length // COLUMNS >> plan.chunk_bits

    def cost(self, plan: Draft, carrier: str) -> Cost:
        wide = 2 if plan.problem.length == 1 else 1 << plan.chunk_bits
        groups = wide * self.sets(plan) / (1 << plan.warp_bits)  # of one warp
        mma = self.slabs * self.operands(plan)
        reads = -(-self.operands(plan) // 2)
        planes = 2 if self.carrier == SPLIT else 1
        words = 2 * self.slabs
        staged = plan.tile_elements / (COLUMNS * 32 * plan.warps)  # vectors of a thread
        return Cost(
            instructions=groups * (mma + 3 * reads + words * (3 + len(self.upper) + 4 * planes)) + 4 * staged,
            mma=round(groups * mma),
            shared_bytes=groups * (reads * WARP_VECTOR_BYTES + planes * words * WARP_BYTES)
            + WARP_VECTOR_BYTES * staged,
            waits={"mma": self.operands(plan), "shared": 2, "block sync": 2},
        )

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        problem, sets = plan.problem, self.sets(plan)
        return {
            "order": problem.order,
            "dense": problem.length == 1,
            "slabs": self.slabs,
            "columns": problem.length // COLUMNS,  # vectors of a row of X
            "gap": self.gap(plan),
            "operands": self.operands(plan),
            # Operands of B that each load of four 8×8 matrices is for.
            "reads": [min(2, self.operands(plan) - first) for first in range(0, self.operands(plan), 2)],
            "wide": 1 << plan.chunk_bits,
            "at_once": self.at_once(plan),
            "sets": sets,
            "parts": 1 << plan.warp_bits,
            # Whether every warp has so many sets of whole tiles.
            "even": sets % (self.at_once(plan) << plan.warp_bits) == 0 and plan.rows_per_tile == 1,
            "warps_of_group": self.warps(plan),
            # Whether the last warp of a group holds rows that A lacks.
            "padded": problem.order % OPERAND_SIDE > 0 or self.operands(plan) % self.slabs > 0,
            "split": self.carrier == SPLIT,
            "in_place": self.in_place(plan),
            "product": plan.footprint.matrix_offset,
            "undo": round(1 / ENTRY_FACTOR[problem.io.input]),
        }


@dataclass(frozen=True)
class Columns(Store):
    """Transforms the lower column bits of what a `Matrix` left in shared memory, by mma of 16 rows of X with H. Sums of
    several mma make up for more than four bits. It rounds, multiplies by the signs after the transform, and stores what
    a thread has of neighbors at once."""

    lower: tuple[int, ...]

    template = "matrix.cu.j2"
    leaves = PACKED

    @property
    def takes(self) -> None:
        return None

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(map(column, self.lower))

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        yield from super().faults(plan, at)
        if not plan.matrix or plan.carriers[at] != plan.matrix.carrier:
            yield "it finds what a matrix left in shared memory"
        if self.lower and not LEAST_BITS <= len(self.lower) <= MOST_BITS:
            yield f"it transforms from {LEAST_BITS} to {MOST_BITS} bits"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        if self.lower:
            so_far.add_sums(carrier, so_far.terms << len(self.lower) if so_far.form == carrier else 0)

    def interpret(self, values: Values, plan: Draft) -> None:
        super().interpret(values, plan)
        values.flip(plan.problem, plan.placements[-1], "signs_after")

    def sentence(self, bits: str) -> str:
        return f"mma with H: bits {bits}; round and store" if bits else "store"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        elements = plan.tile_elements / (32 * plan.warps)  # of a thread
        planes, bits = 2 if carrier == SPLIT else 1, len(self.lower)
        mma = planes * elements * max(2**bits, OPERAND_SIDE) / 64
        return Cost(
            instructions=mma + elements,
            mma=round(mma),
            shared_bytes=2 * 32 * planes * elements * max(1, 2**bits // _OUTPUTS),
            waits={"shared": 1, "mma": max(1, 2**bits // OPERAND_SIDE) * planes},
        )

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        bits = max(len(self.lower), 4)  # eight columns of two rows are taken as 16, of which only the others meet
        width = 1 << bits
        outputs = min(width, _OUTPUTS)
        vector = min(COLUMNS, width // 4)  # columns that a thread stores at once
        return {
            "idle": len(self.lower) == 3,
            "width": width,
            "steps": width // OPERAND_SIDE,
            "tiles": outputs // COLUMNS,  # of eight columns each, which one mma makes
            "outputs": outputs,
            "vector": vector,
            "row": max(plan.problem.length, width),  # elements
            "blocks": max(1, plan.problem.length // width),
            "undo": round(1 / ENTRY_FACTOR[plan.problem.io.input]),
            "words": [
                [_operand(step, tile, vector, idle=len(self.lower) == 3) for tile in range(outputs // COLUMNS)]
                for step in range(width // 16)
            ],
        }


def _operand(step: int, tile: int, vector: int, *, idle: bool) -> list[str]:
    """The names of what is exclusive-ored to make the two words of the right operand of an mma: signs of H where row
    i = 16 · step + 8 · half + 2 · t + pair meets column o.

    Of o, n is in the lanes, and `tile` is the same for all lanes. The lowest bit of n is the lowest of o. Then come
    bits of `tile` up to the bits that a thread stores at once, then the other two of n, then the rest of `tile`. idle:
    the highest bit of o and i tells two rows apart, and has no sign.
    """
    low = vector.bit_length() - 2  # bits of the tile below those of n
    words = []
    for half in range(2):
        index = 16 * step + 8 * half
        names = [f"t{bit}" for bit in range(low) if tile >> bit & 1]
        names += [f"n{bit}" for bit in range(2 - idle) if index >> (low + 1 + bit) & 1]
        if (index >> low + 3 & tile >> low).bit_count() % 2:
            names.append("minus")
        words.append(" ^ ".join(["h", *names]))
    return words


@dataclass(frozen=True)
class Signs(Step):
    """Multiplies by the signs before or after the transform, if the call gives some."""

    before: bool

    @property
    def changes_values(self) -> bool:
        return False  # exact

    @property
    def loads(self) -> bool:  # type: ignore[override]  # those before belong to what a tile has loaded
        return self.before

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return ()

    def interpret(self, values: Values, plan: Draft) -> None:
        name = "signs_before" if self.before else "signs_after"
        values.flip(plan.problem, plan.placements[plan.steps.index(self)], name)

    def sentence(self, bits: str) -> str:
        return f"signs {'before' if self.before else 'after'} the transform"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(3 * plan.words(carrier))
