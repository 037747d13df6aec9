"""The second product of a transform by two matrices, in place of the steps that multiply by H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadagen.plan.layout import PAIR, Place, lane, reg, swaps
from hadagen.plan.steps.base import FP32, WARP_VECTOR_BYTES, Cost, Draft, Region, Roundings, Step
from hadagen.plan.steps.product import FEW_ROWS, BoxProduct
from hadagen.problem.operands import RIGHT_MATRIX
from hadagen.problem.problem import DType, Numerics, Problem

if TYPE_CHECKING:
    from hadagen.plan.steps.values import TileValues

_SIDE = 16  # columns of A · X, and rows of C, in an operand of an mma
# Columns of which registers have both the values and their products with C, and rows of A whose operands they have too.
_MOST_COLUMNS, _MOST_ROWS = 128, 128


@dataclass(frozen=True)
class RightProduct(Step):
    """Multiplies A · X by Cᵀ, and by the scale if it `scales`, by mma. Swaps the bits at `reg0` and `lane0`, and those
    at `reg1` and `lane1`.

    Sums of a product by A lie in threads as the left operand of an mma does. Each sum is split into two bfloat16, which
    have the range of fp32, and together 16 significant bits. The first is multiplied by both pieces of C, and the
    second by the first piece of C. The error of all is less than 2^-17 of the result. With two `products` instead of
    three, both are multiplied by the first piece of C alone. Rows of C are packed in such an order that a thread ends
    with eight neighbors, so that nothing crosses lanes.
    """

    name = "RightProduct"
    labels = "bits products scales keeps"

    bits: int  # of a column
    products: int
    scales: bool
    keeps: bool  # whether operands of the values lie in shared memory, so that registers have the products alone

    template = "right.cu.j2"
    header = "right.cuh"
    takes = leaves = FP32
    moves = swaps([(lane(0), reg(0)), (lane(1), reg(1))])
    operands = (RIGHT_MATRIX,)
    holds_all = is_right_product = True

    @classmethod
    def for_problem(cls, problem: Problem, *, scales: bool) -> RightProduct:
        # One rounding of a kernel that may round once more: of the entries of C, unless those of A are rounded, or what
        # a prologue gives. Values of float16 have more bits than a bfloat16 has.
        may_round = problem.io.numerics is Numerics.FAST and problem.io.input is DType.BFLOAT16
        rounds = may_round and problem.order <= FEW_ROWS and not (problem.prologue and problem.may_round_within)
        keeps = problem.length > _MOST_COLUMNS or problem.order > _MOST_ROWS
        return cls(problem.bits, 2 if rounds else 3, scales, keeps)

    @property
    def places(self) -> tuple[Place, ...]:
        return (PAIR, lane(0), lane(1), *(reg(number) for number in range(self.bits - 3)))

    @property
    def multiplies(self) -> str:
        return "scale" if self.scales else ""

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"mma_bf16"})

    @property
    def length(self) -> int:
        """The order of C."""
        return 1 << self.bits

    @property
    def parts(self) -> int:
        """Operands of 16 columns in a row."""
        return self.length // _SIDE

    def regions(self, plan: Draft) -> Iterator[Region]:
        if self.keeps:
            yield Region("operands", plan.warps * self.kept_bytes(plan))

    def rows(self, plan: Draft) -> int:
        """Rows of x, whose columns a warp has."""
        return _SIDE * plan.eights // self.length

    def at_once(self, plan: Draft) -> int:
        """Rows of x that are multiplied by an operand of C that was read once."""
        return 2 if self.rows(plan) > 1 and 2 * self.length <= _MOST_COLUMNS else 1

    def kept_bytes(self, plan: Draft) -> int:
        """Bytes of the operands of a warp."""
        return 2 * self.at_once(plan) * self.parts * WARP_VECTOR_BYTES

    def more_registers(self, plan: Draft) -> int:
        return 0 if self.keeps else self.at_once(plan) * self.length // 2

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if not isinstance(plan.tile, BoxProduct) or plan.tile.fold or self.bits != plan.problem.bits:
            yield "it multiplies whole rows of a product with A"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.terms = 0

    def interpret(self, values: TileValues, plan: Draft) -> None:
        values.multiply_columns(plan.problem, plan.before(plan.steps.index(self)))
        values.multiply(self.share(values.left, plan))
        values.move(self.moves)

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return self.name, self.products, self.scales

    def cost(self, plan: Draft, carrier: str) -> Cost:
        operands = self.rows(plan) * self.parts**2
        loads = operands * (self.products - 1) // self.at_once(plan)  # of pieces of C, from L1
        kept = self.rows(plan) * 2 * self.parts * (1 + self.parts // 4) if self.keeps else 0
        mma = 2 * self.products * operands
        return Cost(
            instructions=mma + 2 * loads + kept + 8 * plan.words(FP32),
            mma=mma,
            shared_bytes=WARP_VECTOR_BYTES * (loads + kept),
            waits={"mma": 2 * self.parts, "shared": self.parts, "arithmetic": 4},
        )

    def sentence(self, bits: str) -> str:
        return f"second matrix in place of bits {bits}, {self.products} products{', times the scale' * self.scales}"

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return {
            "length": self.length,
            "at_once": self.at_once(plan),
            "kept_bytes": self.kept_bytes(plan),
            "kept_at": plan.footprint.offset("operands") if self.keeps else 0,
        }
