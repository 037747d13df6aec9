"""The step that multiplies by the matrix of a transform, and the step that flips signs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadagen.problem import DType
from hadagen.steps.base import PACKED, SPLIT, WARP_BYTES, WARP_VECTOR_BYTES, Cost, Roundings, Step

if TYPE_CHECKING:
    from hadagen.steps.draft import Draft
    from hadagen.steps.values import Values

ORDER_STEP = 16  # rows and columns of the matrix in an operand of an mma
COLUMNS = 8  # columns of a row, seen as an order × length matrix, that an mma multiplies
OPERAND_REGISTERS = 4
VECTORS_OF_BANKS = 8  # 16-byte vectors that all banks hold
# The sums of up to 428 values of a bfloat16 outgrow no fp32 if each is times 2^-9, which is taken from the scale.
SUMS_POWER = 9
# Sums that are under way at once in a warp, so that an mma need not wait for the one before it.
_SUMS = 4


@dataclass(frozen=True)
class Matrix(Step):
    """Multiplies each row, seen as a matrix X of order × length elements, by the matrix A of the transform from the
    left, and by the scale. X comes from shared memory, where the load has staged a tile of `rows` rows. A·X goes to
    shared memory, packed or split, in the order of elements in memory. After it, warps take pieces of the tile in turns.

    A block has 2^warp_bits groups of warps, and each group a share of the columns. Each warp of a group holds `slabs`
    times 16 rows of A in registers, those of all its warps make up A. If a group is one warp, packed values and the high
    halves of split ones replace what they come from; else they go elsewhere, because other warps may still read it.

    If the length is 1, the roles change: rows of x are rows of the left operand, and columns of Aᵀ those of the right.
    """

    rows: int
    slabs: int
    carrier: str
    lifted: int = 0  # as for `Scale`: how often values are cut off to one tf32 later

    says = "matrix of the transform times the row, times the scale"
    template = "matrix.cu.j2"
    takes = PACKED
    multiplies = "scale"

    @property
    def leaves(self) -> str:
        return self.carrier

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"mma_f16", "mma_bf16" if dtype is DType.BFLOAT16 else "mma_f16"})

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.problem.order == 1:
            yield "the transform has no matrix"
        if not all(step.loads for step in plan.steps[:at]):
            yield "the matrix comes first"
        if plan.load.path != "cp_async":
            yield "a tile is staged in an order that only cp_async makes"
        if plan.problem.length not in (1, *(1 << bits for bits in range(3, 18))):
            yield "eight columns are multiplied at once"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        if carrier == PACKED:
            so_far.add(carrier, 1.0)

    def interpret(self, values: Values, plan: Draft) -> None:
        values.multiply_rows(plan.problem, plan.loaded)
        values.multiply(self.share(values.left, plan))

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return type(self).__name__, self.carrier, self.lifted, plan.problem.length == 1

    def operands(self, plan: Draft) -> int:
        """Operands of 16 columns of A that a warp holds of each slab."""
        return -(-plan.problem.order // ORDER_STEP)

    def warps(self, plan: Draft) -> int:
        """Warps of a group."""
        return -(-self.operands(plan) // self.slabs)

    @property
    def at_once(self) -> int:
        """Groups of columns that a warp multiplies at once."""
        return max(1, _SUMS // self.slabs)

    def registers(self, plan: Draft) -> int:
        """Of a thread for A, for as long as the kernel runs."""
        return OPERAND_REGISTERS * self.slabs * self.operands(plan)

    def in_place(self, plan: Draft) -> bool:
        """Whether A·X replaces X."""
        return self.warps(plan) == 1

    def shared_bytes(self, plan: Draft) -> int:
        """For A·X, besides what the load has staged."""
        planes = 2 if self.carrier == SPLIT else 1
        return plan.footprint.stage_bytes * (planes - self.in_place(plan))

    def gap(self, plan: Draft) -> int:
        """The number of vectors in shared memory after which one is left out; 0 for none. So eight rows of X have the
        same column in eight groups of banks."""
        return 0 if plan.problem.length == 1 else max(VECTORS_OF_BANKS, plan.problem.length // COLUMNS)

    def column_groups(self, plan: Draft) -> int:
        """Of a tile; with a length of 1, groups of 16 rows."""
        if plan.problem.length == 1:
            return self.rows // ORDER_STEP
        return self.rows * plan.problem.length // COLUMNS

    def cost(self, plan: Draft, carrier: str) -> Cost:
        groups = self.column_groups(plan) / (1 << plan.warp_bits)  # of one warp
        wide = 2 if plan.problem.length == 1 else 1  # a group of 16 rows takes as many reads, but two mma each
        mma = self.slabs * self.operands(plan) * wide
        reads = -(-self.operands(plan) // 2) * wide
        words = 4 * self.slabs * wide * (2 if self.carrier == SPLIT else 1)
        staged = plan.vectors * plan.turns
        return Cost(
            instructions=groups * (mma + 6 * reads + 5 * words) + 6 * staged,
            mma=round(groups * mma),
            shared_bytes=groups * (reads * WARP_VECTOR_BYTES + words * WARP_BYTES) + 2 * WARP_VECTOR_BYTES * staged,
            waits={"mma": self.operands(plan), "shared": 2, "block sync": 2},
        )

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        problem = plan.problem
        columns = problem.length // COLUMNS
        view = {} if problem.io.input is DType.FLOAT16 else {"factor": 1, "power": SUMS_POWER}
        at_once = 1 if problem.length == 1 else self.at_once
        return view | {
            "order": problem.order,
            "dense": problem.length == 1,
            "slabs": self.slabs,
            "at_once": at_once,
            "columns": columns,  # vectors of a row of X
            "gap": self.gap(plan),
            "operands": self.operands(plan),
            # Operands of B that each load of four 8×8 matrices is for.
            "reads": [min(2, self.operands(plan) - first) for first in range(0, self.operands(plan), 2)],
            "groups": self.column_groups(plan),
            "parts": 1 << plan.warp_bits,
            # Whether every warp has so many groups of whole tiles.
            "even": self.column_groups(plan) % (at_once << plan.warp_bits) == 0 and plan.rows_per_tile == 1,
            "warps_of_group": self.warps(plan),
            # Whether the last warp of a group holds rows that A lacks.
            "padded": problem.order % ORDER_STEP > 0 or self.operands(plan) % self.slabs > 0,
            "pieces": plan.tile_elements // plan.piece_elements,
            "piece": plan.piece_elements,
            "split": self.carrier == SPLIT,
            "in_place": self.in_place(plan),
            "product": plan.footprint.matrix_offset,
        }


@dataclass(frozen=True)
class Signs(Step):
    """Multiplies by the signs before or after the transform, if the call gives some."""

    before: bool

    @property
    def changes_values(self) -> bool:
        return False  # exact

    @property
    def loads(self) -> bool:  # type: ignore[override]  # of what a tile has loaded
        return self.before

    def interpret(self, values: Values, plan: Draft) -> None:
        name = "signs_before" if self.before else "signs_after"
        values.flip(plan.problem, plan.placements[plan.steps.index(self)], name)

    def sentence(self, bits: str) -> str:
        return f"signs {'before' if self.before else 'after'} the transform"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(3 * plan.words(carrier))
