"""Steps that transform bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hadagen.plan.layout import MMA_MOVES, PAIR, Place, lane, reg, swaps
from hadagen.plan.steps.base import FP16, FP32, IN_16_BITS, PACKED, WARP_BYTES, Cost, Draft, Roundings, Step
from hadagen.problem.problem import DType
from hadagen.problem.scale import ScaleForm

LEAST_POWER = -4  # with 2^-4 of the scale in an mma, sums of 16 values are no larger than the largest value
NORMALIZER = 3  # as the `factor` of an `Mma`
_FACTORS = ("", "the first factor of the scale", "the second factor of the scale", "what normalizes the warp")


class MmaType(NamedTuple):
    """A type that an mma multiplies.

    feature: what the arch must have for it. products: how many mma of the device make up one of m16n8k16; each takes
    as long. parts: type of the problem → number of parts of this type that an fp32 value becomes; none for types
    without the range of fp32. splitting: number of parts → instructions that split a pair of fp32 values.
    """

    feature: str
    products: int = 1
    parts: Mapping[DType, int] = {}
    splitting: Mapping[int, int] = {}


# The types in parts have the range of fp32. A bfloat16 has 8 bits, a tf32 11. So the parts have more bits than a 16-bit
# result shows, and of a float32 all 24, or 22 as two tf32. A float16 shows 11 bits itself: one tf32 would count as four
# roundings, and two cost more than two bfloat16. An mma cuts a value off to one tf32 by itself.
MMA_TYPES = {
    "float16": MmaType("mma_f16"),
    FP16: MmaType("mma_f16"),
    "bfloat16": MmaType(
        "mma_bf16", parts={DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 3}, splitting={2: 6, 3: 11}
    ),
    "tf32": MmaType("mma_tf32", products=2, parts={DType.BFLOAT16: 1, DType.FLOAT32: 2}, splitting={2: 8}),
}
PARTS = {name: each.parts for name, each in MMA_TYPES.items() if each.parts}

_PACKED_SUM = 1.15  # roundings that a sum of packed values counts as, fitted to errors of measured kernels
# The error of cutting an fp32 off to the 11 bits of a tf32, for a result with the 8 bits of a bfloat16.
# If u is the last place of the result, that of the tf32 is u/8, and the error lies between 0 and u/8. Its mean square,
# mean² + variance, is (u/16)² + (u/8)²/12 = u²/192; that of a rounding is u²/12. A mean that is not 0 does not matter,
# because the transform keeps sums of squares. Sums of the first 16 values have few bits to cut off, so the error is a
# sixth less than this.
_CUT = 1 / 16


@dataclass(frozen=True)
class Gather(Step):
    """Transforms the bits at cta: sums the shares of a row that a multicast has brought, in fp32, times the scale."""

    name = "Gather"
    says = "sum over blocks, times the scale: bits {bits}"
    template = "loads.cu.j2"
    over_blocks = True
    takes = FP32
    multiplies = "scale"

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if not plan.load.multicast:
            yield "fp32 is summed over blocks from shared memory (load must be multicast)"
        yield from self.faults_over_blocks(plan, at)

    def cost(self, plan: Draft, carrier: str) -> Cost:
        shares = plan.shares_loaded
        return Cost(shares * plan.words(carrier), waits={"arithmetic": shares})

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return {"gathers": True}


@dataclass(frozen=True)
class Mma(Step):
    """Transforms the four bits at {pair, lane0, lane1, reg}, or all but the first `idle` of them, multiplies by a
    factor of the scale, and applies `MMA_MOVES`.

    It takes packed values or fp16 as they are, and each fp32 as a sum of `parts` values of the type that `operand`
    names. It leaves the type of its accumulators: fp32, or 16 bits (float16 only). All four bits must be bits of the
    row, also those that are idle. Otherwise rows would meet in a sum with weight 0, and an infinity in one row would
    make its neighbors NaN.
    """

    name = "Mma"
    labels = "reg operand parts accumulator factor turned over_blocks idle"

    reg: int
    operand: str = PACKED  # or fp16, or a type of `MMA_TYPES` with parts
    parts: int = 1
    accumulator: str = FP32
    # 0: none. 1 or 2: the first or second factor, if the scale came as two; if it came whole, the first or second power
    # of two that is taken from it, at most 1 and at least 2^`least_power`. `NORMALIZER`: what `Normalize` found.
    factor: int = 0
    # The operand is transposed first, 16 bits at a time: transforms {lane2, lane3, lane4, reg} and moves nothing.
    turned: bool = False
    # Also sums over the blocks of a cluster, which have all loaded the whole row: transforms the bits at cta too.
    over_blocks: bool = False
    idle: int = 0  # how many of the first `operand_places` keep their bits as they are

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        # What is turned goes through movmatrix, which comes with the first mma.
        return frozenset({"mma_f16", self._type(dtype).feature})

    def _type(self, dtype: DType) -> MmaType:
        return MMA_TYPES[dtype.value if self.operand == PACKED else self.operand]

    @property
    def in_parts(self) -> bool:
        """Whether this mma takes fp32."""
        return self.operand in PARTS

    @property
    def cuts(self) -> bool:
        """Whether this mma cuts values off to one tf32."""
        return self.operand == "tf32" and self.parts == 1

    @property
    def takes(self) -> str:
        return FP32 if self.in_parts else self.operand

    @property
    def leaves(self) -> str:
        return self.accumulator

    @property
    def multiplies(self) -> str:
        return ("", "factor 1", "factor 2", "normalizer")[self.factor]

    @property
    def places(self) -> tuple[Place, ...]:
        return self.operand_places[self.idle :]

    @property
    def operand_places(self) -> tuple[Place, ...]:
        """The places of the four bits of its operand."""
        return (*((lane(2), lane(3), lane(4)) if self.turned else (PAIR, lane(0), lane(1))), reg(self.reg))

    @property
    def moves(self) -> dict[Place, Place]:
        return {} if self.turned else MMA_MOVES

    def least_power(self, plan: Draft) -> int:
        """The exponent of the smallest power of two that it takes from a whole scale."""
        least = LEAST_POWER - (plan.cta_bits if self.over_blocks else 0)
        if self.factor == 1 and plan.folds_scale:  # at the end; so no sum before may be larger than a result
            least += min(
                0,
                -LEAST_POWER * sum(isinstance(step, Mma) and step.factor > 0 for step in plan.steps)
                - plan.problem.bits,
            )
        return least

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        parts = PARTS[self.operand].get(plan.problem.io.input) if self.in_parts else 1
        if self.parts != parts:
            yield f"takes values as {self.parts} {self.operand} instead of {parts or 'another type'}"
        if self.cuts and plan.problem.keeps_16_bits:
            yield "cuts values off to 11 bits, but those that are quantized accurately keep 16"
        if self.turned and self.operand == "tf32":
            yield "only 16-bit values are transposed on their way in"
        if self.idle and (self.operand == "tf32" or len(self.places) < 2):
            yield "it transforms two bits at least, and leaves none as it is of a tf32"
        if any(plan.before(at).axes[place].stride >= plan.problem.n for place in self.operand_places):
            yield "mixes bits beyond the row"
        if self.over_blocks:
            if self != Mma(self.reg, factor=self.factor, over_blocks=True):
                yield "only packed values are summed over blocks, as they lie, in fp32"
            if self.factor and plan.scale_form is not ScaleForm.FP32:
                yield "sums over blocks outgrow what a factor in 16 bits is made for"
        if self.factor == NORMALIZER and not (plan.normalizes and self.operand == PACKED):
            yield "nothing normalizes the rows, or not these values"
        if self.accumulator not in (FP32, self.operand):
            yield f"sums of {self.operand} values are not {self.accumulator}"
        if self.over_blocks:
            yield from self.faults_over_blocks(plan, at)

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        terms = so_far.terms << len(self.places)
        if carrier != FP32:
            so_far.add_sums(carrier, terms)
        else:
            so_far.count += _CUT if self.cuts else 0.0
            so_far.terms = terms

    def share(self, left: float, plan: Draft) -> float:
        if self.factor in (0, NORMALIZER):  # `Scale` undoes that
            return 1.0
        if plan.scale_form is ScaleForm.FP32:
            return 2.0 ** max(self.least_power(plan), min(0, math.frexp(left)[1] - 1))
        return (1.0, left)[self.factor - 1]  # the second factor, or the correction, counts as the whole scale

    def cost(self, plan: Draft, carrier: str) -> Cost:
        # mma into one accumulator; beside them, instructions that split and transpose the four pairs of a chunk
        takes = self._type(plan.problem.io.input)
        mma = self.parts * takes.products
        instructions = 2 * mma + 4 * takes.splitting.get(self.parts, 0) + (4 * self.parts if self.turned else 0)
        shares = plan.shares_loaded if self.over_blocks else 1
        chunks = shares << plan.chunk_bits
        return Cost(instructions * chunks, 2 * mma * chunks, waits={"mma": (mma + self.turned) * shares})

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        # The order of its operand decides the order of its sums.
        operand = tuple(str(plan.before(at).axes[place]) for place in self.operand_places)
        powers = self.least_power(plan) if self.factor else 0
        how = self.idle, self.operand, self.parts, self.accumulator, self.factor, powers
        return *super().arithmetic(plan, at), operand, *how

    def sentence(self, bits: str) -> str:
        packed = f", {self.accumulator} accumulators" if self.accumulator != FP32 else ""
        how = f" as {self.parts} {self.operand}" if self.in_parts else packed
        times = f", times {_FACTORS[self.factor]}" if self.factor else ""
        means = ", turned" if self.turned else ", over blocks" if self.over_blocks else ""
        rest = f", {self.idle} idle" if self.idle else ""
        return f"mma reg{self.reg}{means}{rest}: bits {bits}{how}{times}"

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        view = {"stride": 1 << self.reg, "idle": (1 << self.idle) - 1, "in_parts": self.in_parts}
        if self.factor not in (0, NORMALIZER):
            view["power"] = -self.least_power(plan)
        return view | {"normalizes": self.factor == NORMALIZER}


class _Sum(Step):
    """Transforms by add and subtract."""

    holds_all = True

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        packed = carrier == PACKED and self.leaves != FP32
        return frozenset({"bf16x2_fma"} if packed and dtype is DType.BFLOAT16 else ())

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return "sum", *map(str, self.axes(plan.before(at))), plan.carriers[at + 1]

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        if carrier == FP32:
            so_far.terms *= 2
        else:
            so_far.add(carrier, _PACKED_SUM)


@dataclass(frozen=True)
class Butterfly(_Sum):
    """Transforms the bit at `place` (pair or a register bit) by add and subtract."""

    name = "Butterfly"
    labels = "place"

    place: Place

    says = "butterfly {place}: bit {bits}"

    @property
    def takes(self) -> str | None:
        return FP32 if self.place == PAIR else None  # the two values of a packed pair are one operand

    @property
    def places(self) -> tuple[Place, ...]:
        return (self.place,)

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return {"stride": _stride(self.place, plan.carriers[at])}


class _Shuffle(_Sum):
    """Transforms across lanes."""

    lane: int

    @property
    def places(self) -> tuple[Place, ...]:
        return (lane(self.lane),)

    def cost(self, plan: Draft, carrier: str) -> Cost:
        words = plan.words(carrier)
        return Cost(3 * words, shared_bytes=WARP_BYTES * words, waits={"shuffle": 1})

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return {"mask": 1 << self.lane}


@dataclass(frozen=True)
class Shuffle(_Shuffle):
    """Transforms the bit at lane[`lane`] by a warp shuffle with the other lane, then add or subtract. With `widen` it
    takes 16-bit values and leaves fp32, so that half as many words cross."""

    name = "Shuffle"
    labels = "lane widen"

    lane: int
    widen: bool = False

    @property
    def takes(self) -> str | None:
        return IN_16_BITS if self.widen else None

    @property
    def leaves(self) -> str | None:
        return FP32 if self.widen else None

    def sentence(self, bits: str) -> str:
        return f"shuffle lane{self.lane}: bit {bits}" + (", widening to fp32" if self.widen else "")


@dataclass(frozen=True)
class SwapButterfly(_Shuffle):
    """Swaps the bits at lane[`lane`] and `place`, a register bit, by a warp shuffle of fp32 values. Then it transforms
    the bit that came to the register by add and subtract. Half as many values cross as in a `Shuffle`."""

    name = "SwapButterfly"
    labels = "lane place"

    lane: int
    place: Place

    says = "swap lane{lane}↔{place}, then butterfly: bit {bits}"
    takes = FP32

    @property
    def moves(self) -> dict[Place, Place]:
        return swaps([(lane(self.lane), self.place)])

    def cost(self, plan: Draft, carrier: str) -> Cost:
        whole = super().cost(plan, carrier)
        return whole._replace(shared_bytes=whole.shared_bytes / 2)

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return super().view(plan, at) | {"stride": _stride(self.place, FP32)}


def _stride(place: Place, carrier: str) -> int:
    """The distance in p or f between the two values of a butterfly."""
    if place == PAIR:
        return 1
    return 1 << (place.index + 1 if carrier == FP32 else place.index)
