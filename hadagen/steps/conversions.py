"""Steps that bring values into another form or size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hadagen.layout import LANE_BITS
from hadagen.problem import DType
from hadagen.steps.base import FP16, FP32, IN_16_BITS, PACKED, Cost, Roundings, Step

if TYPE_CHECKING:
    from hadagen.steps.draft import Draft

_CORRECTION = 0.25  # of a rounding, measured: a correction changes values by a fraction of their last places


@dataclass(frozen=True)
class Widen(Step):
    """Packed or fp16 → fp32, exact."""

    says = "widen to fp32"
    takes = IN_16_BITS
    leaves = FP32

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(2 * plan.words(carrier), waits={"arithmetic": 1})


class _Rounding(Step):
    """fp32 → 16 bits."""

    takes = FP32

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.add_sums(carrier, so_far.terms if so_far.form == carrier else 0)

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(plan.words(carrier) / 2, waits={"arithmetic": 1})


@dataclass(frozen=True)
class Narrow(_Rounding):
    """fp32 → fp16, to nearest even."""

    says = "narrow to fp16"
    leaves = FP16

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.multiplied(at) != ["normalizer"]:
            yield "only normalized values are in the range of a float16"


@dataclass(frozen=True)
class Round(_Rounding):
    """fp32 → packed, to nearest even."""

    says = "round to 16 bits"
    leaves = PACKED


@dataclass(frozen=True)
class Normalize(Step):
    """Finds the level of what each warp has loaded: a power of two, in steps of 2^8, that its largest value is below,
    by less than a step if that is not subnormal. The first `Mma` divides by half of it, so that no sum of a row is
    beyond float16, and `Scale` multiplies by it again. The `Exchange` between blocks brings values to the highest level
    of all warps. Mostly it is the level of each, and nothing is to be done."""

    says = "find the level of the warp"
    takes = PACKED
    by_chunk = False

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.problem.io.input is not DType.BFLOAT16:
            yield "only values of the range of a bfloat16 are normalized"
        if not all(step.loads for step in plan.steps[:at]):
            yield "only what was just loaded is normalized"
        if plan.warp_bits + plan.cta_bits > LANE_BITS:
            yield "each lane reads one level, and there are more warps than lanes"
        if plan.rows_per_tile > 1:
            yield "all values of a tile are brought to one level, but it has several rows"
        if not plan.crosses_blocks or len(plan.exchanges) > 1 or plan.exchanges[0].carrier != FP16:
            yield "levels cross to other blocks with fp16, in one exchange"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(plan.words(carrier), waits={"reduce": 3, "shared": 1})  # in the warp; and twice as levels cross


@dataclass(frozen=True)
class Scale(Step):
    """Multiplies by the scale, or by what is left of it where `Mma` steps took powers of two or normalized rows."""

    # Times 1 + 2^-10/3 too, for values that are cut off to one tf32 later: that is what they lose there in the mean
    # (least squares of m · d − 2^-10 · u over u in [0, 1) and mantissas m in [1, 2) of density 1/m), and a value of 11
    # bits stays as it is.
    lifted: bool = False

    takes = FP32
    multiplies = "scale"

    def sentence(self, bits: str) -> str:
        return "scale" + (", lifted by what a tf32 loses" if self.lifted else "")


@dataclass(frozen=True)
class Correct(Step):
    """Multiplies packed values by 1 + b, where the scale came as a · (1 + b) and an `Mma` has multiplied by a."""

    says = "correct the scale"
    takes = PACKED
    multiplies = "correction"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.count += _CORRECTION
