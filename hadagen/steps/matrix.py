"""The step that multiplies by the matrix of a transform, and the step that flips signs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadagen.problem import DType
from hadagen.steps.base import FP32, PACKED, WARP_VECTOR_BYTES, Cost, Roundings, Step

if TYPE_CHECKING:
    from hadagen.steps.draft import Draft
    from hadagen.steps.values import Values

ORDER_STEP = 16  # rows and columns of the matrix in an operand of an mma
COLUMNS = 8  # columns of a row, seen as an order × length matrix, that an mma multiplies
OPERAND_REGISTERS = 4
# 8×8 parts of a column that are read at once.
_READ_ROWS = 32
# The sums of up to 428 values of a bfloat16 outgrow no fp32 if each is times 2^-9, which is taken from the scale.
SUMS_POWER = 9
# Sums that are under way at once in a warp, so that an mma need not wait for the one before it.
_SUMS = 4


@dataclass(frozen=True)
class Matrix(Step):
    """Multiplies each row, seen as a matrix X of order × length elements, by the matrix A of the transform from the
    left, and by the scale. X comes from shared memory, where the load has staged a tile of `rows` rows. A·X goes to
    shared memory as `carrier`, in the order of elements in memory. After it, warps take pieces of the tile in turns.

    A block has a group of warps for each column range (2^warp_bits of them). Each warp of a group holds `slabs` times
    16 rows of A in registers, those of all warps of a group make up A.

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
        if not all(step.loads or isinstance(step, Signs) for step in plan.steps[:at]):
            yield "the matrix comes first"
        if plan.load.path != "cp_async":
            yield "a tile is staged in an order that only cp_async makes"
        if plan.problem.length not in (1, *(1 << bits for bits in range(3, 18))):
            yield "eight columns are multiplied at once"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        if carrier != FP32:
            so_far.add_sums(carrier, 0)
        so_far.terms = 0 if carrier == FP32 else so_far.terms

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
        """Column groups that a warp multiplies at once."""
        return max(1, _SUMS // self.slabs)

    def registers(self, plan: Draft) -> int:
        """Of a thread for A, for as long as the kernel runs."""
        return OPERAND_REGISTERS * self.slabs * self.operands(plan)

    def shared_bytes(self, plan: Draft) -> int:
        return plan.tile_elements * (4 if self.carrier == FP32 else 2)

    def column_groups(self, plan: Draft) -> int:
        """Of a tile; with a length of 1, groups of 16 rows."""
        if plan.problem.length == 1:
            return self.rows // ORDER_STEP
        return self.rows * plan.problem.length // COLUMNS

    def cost(self, plan: Draft, carrier: str) -> Cost:
        order = plan.problem.order
        groups = self.column_groups(plan) / (1 << plan.warp_bits)  # of one warp
        mma = self.slabs * self.operands(plan) * (2 if plan.problem.length == 1 else 1)
        reads = -(-order // _READ_ROWS)
        written = 4 * self.slabs * (32 if self.carrier == FP32 else 16) * (2 if plan.problem.length == 1 else 1)
        staged = plan.vectors * plan.turns  # as the load counts for one piece, of which this warp has `turns`
        return Cost(
            instructions=groups * (mma + 6 * reads + 6 * self.slabs) + 4 * staged,
            mma=round(groups * mma),
            shared_bytes=groups * (reads * WARP_VECTOR_BYTES + 4 * written) + 2 * WARP_VECTOR_BYTES * staged,
            waits={"mma": self.operands(plan), "shared": 2, "block sync": 2},
        )

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        problem = plan.problem
        columns = problem.length // COLUMNS
        # A 16-byte vector of the tile lies at its number, with bits exchanged so that the same column of eight rows of X
        # lies in eight groups of banks.
        shift, mask = max(3, columns.bit_length() - 1), min(7, columns - 1) if columns else 0
        view = {} if problem.io.input is DType.FLOAT16 else {"factor": 1, "power": SUMS_POWER}
        return view | {
            "order": problem.order,
            "dense": problem.length == 1,
            "slabs": self.slabs,
            "columns": columns,  # vectors of a row of X
            "operands": self.operands(plan),
            "reads": [min(2, self.operands(plan) - 2 * read) for read in range(-(-self.operands(plan) // 2))],
            "groups": self.column_groups(plan),
            "parts": 1 << plan.warp_bits,
            "warps_of_group": self.warps(plan),
            "at_once": self.at_once,
            "pieces": plan.tile_elements // plan.piece_elements,
            "piece": plan.piece_elements,
            "crossed": plan.footprint.matrix_offset,
            "swizzle": f" ^ (at >> {shift} & {mask}u)" if mask else "",
            # The same for vectors of four fp32, of which lanes write two at once and read every other.
            "swizzle_fp32": _swizzle_of_fp32(columns),
        }


def _swizzle_of_fp32(columns: int) -> str:
    """The term that exchanges bits of the number `at` of a vector of fp32. A warp writes 8 bytes at a time, of four rows
    of X at once. It reads every other of 16 vectors in a row."""
    row = max(3, columns.bit_length())  # the lowest bit of the number of a row, or where it lies above the banks
    rows = {1: 0, 2: 1}.get(columns, 3)
    written = f" ^ (at >> {row} & {rows}u) << 1" if rows else ""
    return f"{written} ^ (at >> 3 & 1u)"


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
