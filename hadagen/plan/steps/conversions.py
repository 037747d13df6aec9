"""Steps that convert values to another form, or scale them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hadagen.plan.layout import LANE_BITS, VECTOR_BYTES
from hadagen.plan.steps.base import FP16, FP32, IN_16_BITS, PACKED, Cost, Draft, Region, Roundings, Step
from hadagen.problem.problem import DType

_CORRECTION = 0.25  # roundings, as measured: a correction changes values by a fraction of their last places


@dataclass(frozen=True)
class Widen(Step):
    """Packed or fp16 → fp32, exact."""

    name = "Widen"
    says = "widen to fp32"
    takes = IN_16_BITS
    leaves = FP32

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return ()

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

    name = "Narrow"
    says = "narrow to fp16"
    leaves = FP16

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.multiplied(at) != ["normalizer"]:
            yield "only normalized values are in the range of a float16"


@dataclass(frozen=True)
class Round(_Rounding):
    """fp32 → packed, to nearest even."""

    name = "Round"
    says = "round to 16 bits"
    leaves = PACKED


@dataclass(frozen=True)
class Normalize(Step):
    """Finds the level of the values that a warp has loaded: the next power of two above the largest, in steps of 2^8.

    If the largest value is not subnormal, the level is less than a step above it. The first `Mma` divides by half of
    the level, so that no sum of a row is beyond float16. `Scale` multiplies by it again. The `Exchange` between blocks
    brings values to the highest level of all warps. Most often all levels are equal, and it changes nothing.
    """

    name = "Normalize"
    says = "find the level of the warp"
    takes = PACKED
    normalizes = True

    def regions(self, plan: Draft) -> Iterator[Region]:
        """The levels of all warps of the cluster, one vector each."""
        yield Region("levels", VECTOR_BYTES << plan.warp_bits + plan.cta_bits)

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"xorsign_bf16x2"})

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

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return self.name, plan.chunk_bits, plan.warp_bits, plan.cta_bits  # which values share a level

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(plan.words(carrier), waits={"reduce": 3, "shared": 1})  # one in the warp, two as levels cross


@dataclass(frozen=True)
class Scale(Step):
    """Multiplies by the scale, or by the part of it that is left after `Mma` steps."""

    name = "Scale"
    labels = "lifted"

    # Also multiplies by 1 + 2^-10/3, for values that are cut off to one tf32 later. That is their mean loss there: the
    # least squares of m · d − 2^-10 · u over u in [0, 1) and mantissas m in [1, 2) of density 1/m. A value of 11 bits
    # stays the same.
    lifted: bool = False

    takes = FP32
    multiplies = "scale"

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        # The compiler may make one instruction of a product and the sum after it, which rounds once.
        return self.name, self.lifted, plan.steps[at + 1].name

    def sentence(self, bits: str) -> str:
        return "scale" + (", lifted by what a tf32 loses" if self.lifted else "")


@dataclass(frozen=True)
class Correct(Step):
    """Multiplies packed values by 1 + b. The scale is a · (1 + b), and an `Mma` has multiplied by a."""

    name = "Correct"
    says = "correct the scale"
    takes = PACKED
    multiplies = "correction"

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"bf16x2_fma"} if dtype is DType.BFLOAT16 else ())

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.count += _CORRECTION
