"""Steps: what a plan is made of. What each does to the bits of an index, to the form of values, and to their error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hadagen.layout import MMA_MOVES, PAIR, Place, Placement, lane, reg, swaps
from hadagen.problem import DType

PACKED = "packed"  # two 16-bit elements to a register
FP32 = "fp32"
# Two float16 to a register, which have three bits more than the bfloat16 of a problem but a short range: so they hold
# values times a power of two, the same for all that are summed.
FP16 = "fp16"

LEAST_POWER = -4  # 2^-4 of the scale in an mma: sums of 16 are then no larger than what is summed
# As what an `Mma` takes fp32 values, and in how many parts. Both types have the range of fp32; a bfloat16 has 8 bits, a
# tf32 11. Together they are more than a 16-bit result shows, and of float32 all 24 bits or, as two tf32, 22. A float16
# shows 11 itself: one tf32 would count as four roundings, and two cost more than two bfloat16.
PARTS = {
    "bfloat16": {DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 3},
    "tf32": {DType.BFLOAT16: 1, DType.FLOAT32: 2},
}


NORMALIZER = 3  # as the `factor` of an `Mma`


class _Step:
    """What a step does to bits, where it says nothing else: nothing."""

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the bits are that it transforms."""
        return ()

    @property
    def moves(self) -> Mapping[Place, Place]:
        """Where bits go, after that."""
        return {}

    @property
    def over_blocks(self) -> bool:
        """Whether it transforms the bits at cta too. Then each block must have loaded the shares of all."""
        return False


@dataclass(frozen=True)
class Load(_Step):
    """Global memory → registers, in 16-byte vectors, `stages` tiles under way. Before a `Gather`, which takes them from
    there, it ends in shared memory."""

    path: str  # plain, no_allocate, cp_async, bulk or multicast
    stages: int = 1
    carrier: str = PACKED  # fp32 for float32

    @property
    def staged(self) -> bool:
        """Whether tiles land in shared memory first."""
        return self.path == "cp_async" or self.in_bulk

    @property
    def in_bulk(self) -> bool:
        """Whether one thread starts the copy of a whole share to shared memory, and an mbarrier tells of its end."""
        return self.path in ("bulk", "multicast")

    @property
    def multicast(self) -> bool:
        """Whether every block of a cluster copies its share to all of them, so that each has whole rows."""
        return self.path == "multicast"


@dataclass(frozen=True)
class Prefetch(_Step):
    """Asks L2 to bring in what lies about so many MiB behind what was just loaded, for a tile that starts later."""

    mib: int


@dataclass(frozen=True)
class Trigger(_Step):
    """Lets the next kernel in the stream start where there is room; it waits for the end of this one all the same."""


@dataclass(frozen=True)
class Normalize(_Step):
    """Finds the level of what each warp has loaded: a power of two, in steps of 2^8, that its largest value is below,
    by less than a step if that is not subnormal. The first `Mma` divides by half of it, so that no sum of a row is
    beyond float16, and `Scale` multiplies by it again. The `Exchange` between blocks brings values to the highest level
    of all warps. Mostly it is the level of each, and nothing is to be done."""


@dataclass(frozen=True)
class Gather(_Step):
    """Sums the shares of a row that a multicast has brought, fp32 times the scale: transforms the bits at cta."""

    over_blocks = True


@dataclass(frozen=True)
class Mma(_Step):
    """Transforms the four bits at {pair, lane0, lane1, reg}, or all but the first `idle` of them, times a factor of the
    scale, and applies `MMA_MOVES`.

    Takes packed values or fp16 as they are, or fp32 as a sum of `parts` of the type of its `operand`. Leaves what it
    accumulates in: fp32, or 16 bits (float16 only). All four must be bits of the row, the idle too: were one not, rows
    would meet in a sum with weight 0, and an infinity in one would make NaN of its neighbors.
    """

    reg: int
    operand: str = PACKED  # or fp16, or a type of `PARTS`
    parts: int = 1
    accumulator: str = FP32
    # 1 or 2: the first or second of those that the scale came as; where it came whole, the first or second power of two
    # taken from it, at most 1 and at least 2^`Plan.least_power`. `NORMALIZER`: what `Normalize` found. 0: none.
    factor: int = 0
    # Transposed on its way in, 16 bits at a time: transforms {lane2, lane3, lane4, reg} and moves nothing.
    turned: bool = False
    # Sums over the blocks of a cluster too, each of which has loaded the whole row: transforms the bits at cta as well.
    over_blocks: bool = False
    idle: int = 0  # the bits at the first so many of its `operand_places` are left as they are

    @property
    def in_parts(self) -> bool:
        """Whether it takes fp32."""
        return self.operand in PARTS

    @property
    def places(self) -> tuple[Place, ...]:
        return self.operand_places[self.idle :]

    @property
    def operand_places(self) -> tuple[Place, ...]:
        """Where the four bits are that its operand has."""
        return (*((lane(2), lane(3), lane(4)) if self.turned else (PAIR, lane(0), lane(1))), reg(self.reg))

    @property
    def moves(self) -> dict[Place, Place]:
        return {} if self.turned else MMA_MOVES


@dataclass(frozen=True)
class Butterfly(_Step):
    """Transforms the bit at `place` (pair or a register bit) by add and subtract."""

    place: Place

    @property
    def places(self) -> tuple[Place, ...]:
        return (self.place,)


@dataclass(frozen=True)
class Shuffle(_Step):
    """Transforms the bit at lane[`lane`] by a warp shuffle with the lane across, then add or subtract. `widen` takes
    16-bit values and leaves fp32, so that half as many words cross."""

    lane: int
    widen: bool = False

    @property
    def places(self) -> tuple[Place, ...]:
        return (lane(self.lane),)


@dataclass(frozen=True)
class SwapButterfly(_Step):
    """Swaps the bits at lane[`lane`] and `place`, a register bit, by a warp shuffle of fp32 values, and transforms the
    one that comes to the register by add and subtract: half as many values cross as in a `Shuffle`."""

    lane: int
    place: Place

    @property
    def places(self) -> tuple[Place, ...]:
        return (lane(self.lane),)

    @property
    def moves(self) -> dict[Place, Place]:
        return swaps([(lane(self.lane), self.place)])


@dataclass(frozen=True)
class Transpose(_Step):
    """Applies `MMA_MOVES` to packed values (movmatrix): brings the bits back that one `Mma` moved."""

    moves = MMA_MOVES


@dataclass(frozen=True)
class Exchange(_Step):
    """Swaps places of a warp with warp or cta bits through (distributed) shared memory."""

    pairs: tuple[tuple[Place, Place], ...]  # (place of a warp, warp or cta place); the pair only, and always, if turned
    carrier: str
    rounds: int = 1  # shared memory is used this many times over, a share of the vectors each time
    shared_layout: str = "linear"
    turned: bool = False  # applies `MMA_MOVES` first, so that an mma after it brings back what they moved

    @property
    def moves(self) -> dict[Place, Place]:
        swapped = swaps(self.pairs)
        moved = MMA_MOVES if self.turned else {}
        return {place: swapped.get(moved.get(place, place), moved.get(place, place)) for place in {**moved, **swapped}}

    @property
    def crosses_blocks(self) -> bool:
        return any(far.kind == "cta" for _, far in self.pairs)

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


@dataclass(frozen=True)
class Scale(_Step):
    """Multiplies by the scale, or by what is left of it where `Mma` steps took powers of two or normalized rows."""

    # Times 1 + 2^-10/3 too, for values that are cut off to one tf32 later: that is what they lose there in the mean
    # (least squares of m · d − 2^-10 · u over u in [0, 1) and mantissas m in [1, 2) of density 1/m), and a value of 11
    # bits stays as it is.
    lifted: bool = False


@dataclass(frozen=True)
class Correct(_Step):
    """Multiplies packed values by 1 + b, where the scale came as a · (1 + b) and an `Mma` has multiplied by a."""


@dataclass(frozen=True)
class Widen(_Step):
    """Packed or fp16 → fp32, exact."""


@dataclass(frozen=True)
class Narrow(_Step):
    """fp32 → fp16, to nearest even."""


@dataclass(frozen=True)
class Round(_Step):
    """fp32 → packed, to nearest even."""


@dataclass(frozen=True)
class Store(_Step):
    """Registers → global memory, each 16-byte vector where it belongs; values as `Load` left them."""

    path: str  # plain or streaming


Step = (
    Load
    | Prefetch
    | Trigger
    | Normalize
    | Gather
    | Mma
    | Transpose
    | Butterfly
    | Shuffle
    | SwapButterfly
    | Exchange
    | Scale
    | Correct
    | Widen
    | Narrow
    | Round
    | Store
)


def transformed_bits(step: Step, before: Placement) -> tuple[int, ...]:
    """The index bits that a step transforms, given where they live before it."""
    across = before.bits_of("cta").values() if step.over_blocks else ()
    return (*map(before.bit_at, step.places), *across)


def mixed_chunk_bits(steps: Iterable[Step]) -> int:
    """The lowest bits of the chunk number, so many, beyond which none of the steps moves or transforms any."""
    touched = [place for step in steps for place in (*step.places, *step.moves)]
    return max((place.index - 1 for place in touched if place.kind == "reg" and place.index > 0), default=0)


def carrier_after(step: Step, carrier: str) -> str:
    """The form of the values that a step leaves, given the form it finds."""
    if isinstance(step, Load):
        return step.carrier
    if isinstance(step, Round):
        return PACKED
    if isinstance(step, Narrow):
        return FP16
    if isinstance(step, Mma):
        return step.accumulator
    if isinstance(step, Widen) or (isinstance(step, Shuffle) and step.widen):
        return FP32
    return carrier


# What a sum of packed values counts, and a correction, which changes values by a fraction of their last places: against
# one rounding of normal values, as the errors of 1285 measured kernels have it.
_PACKED_SUM, _CORRECTION = 1.15, 0.25
# Cutting an fp32 off to the 11 bits of a tf32, where the result has the 8 of a bfloat16 (as `PARTS` has it): the error
# is anything up to the last place, u/8 if that of the result is u, so its mean square, mean² + variance, is (u/16)² +
# (u/8)²/12 = u²/192, to u²/12 of a rounding. That the mean is not 0 is no matter: the transform keeps sums of squares.
# Sums of the first 16 have few bits to cut off, so it is a sixth less than this.
_CUT = 1 / 16
# And the rounding of an fp32 sum of so many rounded values: half of the sums of two lie in the middle between two.
_ROUNDED_SUM = {2: 1.17, 4: 1.05}
_OF_FP16 = 1 / 64  # of a rounding to bfloat16: of three bits more, so an eighth of the error


def roundings(steps: Iterable[Step]) -> float:
    """How many roundings of normal values have the same error as all those of the steps together."""
    carrier, count = "", 0.0
    terms, of = 0, ""  # values rounded to a form in each fp32 sum since; 0: many, or values times a scale
    for step in steps:
        carrier = carrier_after(step, carrier)
        sums = isinstance(step, Butterfly | Shuffle | SwapButterfly)
        one = _OF_FP16 if carrier == FP16 else 1.0
        if isinstance(step, Round | Narrow):
            count += one * (_ROUNDED_SUM.get(terms, 1.0) if of == carrier else 1.0)
        elif isinstance(step, Mma) and carrier != FP32:
            count += one * _ROUNDED_SUM.get(terms << len(step.places), 1.0)
        elif isinstance(step, Correct):
            count += _CORRECTION
        elif isinstance(step, Mma) and step.operand == "tf32" and step.parts == 1:
            count += _CUT
        elif sums and carrier != FP32:
            count += one * _PACKED_SUM
        if isinstance(step, Mma) and carrier == FP32:
            terms <<= len(step.places)
        elif isinstance(step, Round | Narrow | Mma) or (sums and carrier != FP32):
            terms, of = int(carrier != FP32), carrier
        elif sums:
            terms *= 2
    return count


def changes_values(step: Step) -> bool:
    """Whether a step does arithmetic, not only moves or converts."""
    return bool(step.places) or isinstance(step, Gather | Scale | Correct)


_FACTORS = ("", "the first factor of the scale", "the second factor of the scale", "what normalizes the warp")


def sentence(step: Step, before: Placement) -> str:
    bits = " ".join(str(bit) for bit in transformed_bits(step, before))
    match step:
        case Load(path, stages):
            return f"load {path}" + (f", {stages} stages" if stages > 1 else "")
        case Prefetch(mib):
            return f"prefetch to L2 what is {mib} MiB ahead"
        case Trigger():
            return "let the next kernel start"
        case Normalize():
            return "find the level of the warp"
        case Gather():
            return f"sum over blocks, times the scale: bits {bits}"
        case Mma(register, operand, parts, accumulator, factor, turned, over_blocks, idle):
            packed = f", {accumulator} accumulators" if accumulator != FP32 else ""
            how = f" as {parts} {operand}" if step.in_parts else packed
            times = f", times {_FACTORS[factor]}" if factor else ""
            means = ", turned" if turned else ", over blocks" if over_blocks else ""
            rest = f", {idle} idle" if idle else ""
            return f"mma reg{register}{means}{rest}: bits {bits}{how}{times}"
        case Transpose():
            return "transpose back"
        case Butterfly(place):
            return f"butterfly {place}: bit {bits}"
        case Shuffle(index, widen):
            return f"shuffle lane{index}: bit {bits}" + (", widening to fp32" if widen else "")
        case SwapButterfly(index, place):
            return f"swap lane{index}↔{place}, then butterfly: bit {bits}"
        case Exchange(pairs, carrier, rounds, shared_layout, turned):
            through = "distributed shared memory" if step.crosses_blocks else "shared memory"
            swapped = ", ".join(f"{near}↔{far}" for near, far in pairs)
            means = "exchange, turned," if turned else "exchange"
            return f"{means} {swapped} through {through}: {carrier}, {shared_layout}" + (
                f", {rounds} rounds" if rounds > 1 else ""
            )
        case Scale(lifted):
            return "scale" + (", lifted by what a tf32 loses" if lifted else "")
        case Correct():
            return "correct the scale"
        case Widen():
            return "widen to fp32"
        case Narrow():
            return "narrow to fp16"
        case Round():
            return "round to 16 bits"
        case Store(path):
            return f"store {path}"
