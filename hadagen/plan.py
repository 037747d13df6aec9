"""Plans: lists of steps over a placement, their legality, and what they compute.

The transform is a Kronecker product of one 2×2 factor per index bit, so a plan is right exactly when every row bit is
transformed once and every element is stored where it belongs. `Plan` checks that, symbolically, when it is made;
`interpret` carries a plan out in float64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hadagen.errors import UsageError
from hadagen.launch import LaunchSpec
from hadagen.layout import MMA_MOVES, PAIR, Place, Placement, cta, lane, reg, swaps
from hadagen.problem import DType, Numerics, Problem
from hadagen.scale import ScaleForm

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Reals = NDArray[np.float64]

VECTOR_BYTES = 16
CHUNK_BITS = 8
CHUNK_ELEMENTS = 1 << CHUNK_BITS
THREAD_ELEMENTS = CHUNK_ELEMENTS // 32  # of one chunk in one thread
IN_VECTORS = (PAIR, reg(0), reg(1))  # places of a thread's share of a chunk
LEAST_POWER = -4  # 2^-4 of the scale in an mma: sums of 16 are then no larger than what is summed
# As what an `Mma` takes fp32 values, and in how many parts. Both types have the range of fp32; a bfloat16 has 8 bits, a
# tf32 11. Together they are more than a 16-bit result shows, and of float32 all 24 bits or, as two tf32, 22. A float16
# shows 11 itself: one tf32 would count as four roundings, and two cost more than two bfloat16.
PARTS = {
    "bfloat16": {DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 3},
    "tf32": {DType.BFLOAT16: 1, DType.FLOAT32: 2},
}
# Registers of a thread besides its values: addresses, the A operands of the mma, accumulators under way.
OVERHEAD_REGISTERS = 24
CROSSED_BARRIER = 15  # number of the mbarrier for other blocks' stores; those of the stages come first
BARRIER_BYTES = 128  # room for all mbarriers; keeps what follows aligned

PACKED = "packed"  # two 16-bit elements to a register
FP32 = "fp32"


@dataclass(frozen=True)
class Load:
    """Global memory → registers, in 16-byte vectors, `stages` tiles under way."""

    path: str  # plain, no_allocate, cp_async or bulk
    stages: int = 1
    carrier: str = PACKED  # fp32 for float32

    @property
    def staged(self) -> bool:
        """Whether tiles land in shared memory first."""
        return self.path in ("cp_async", "bulk")


@dataclass(frozen=True)
class Mma:
    """Transforms the four bits at {pair, lane0, lane1, reg}, times a factor of the scale, and applies `MMA_MOVES`.

    Takes packed values as they are, or fp32 as a sum of `parts` of the type of its `operand`. Leaves what it
    accumulates in: fp32, or packed (float16 only). All four must be bits of the row: were one not, rows would meet in a
    sum with weight 0, and an infinity in one would make NaN of its neighbors.
    """

    reg: int
    operand: str = PACKED  # or a type of `PARTS`
    parts: int = 1
    accumulator: str = FP32
    # 1 or 2: the first or second of those that the scale came as; where it came whole, the first or second power of two
    # taken from it, at most 1 and at least 2^`Plan.least_power`. 0: none.
    factor: int = 0
    # Transposed on its way in, 16 bits at a time: transforms {lane2, lane3, lane4, reg} and moves nothing.
    turned: bool = False
    # Sums over the blocks of a cluster too, each of which has loaded the whole row: transforms the bits at cta as well.
    over_blocks: bool = False

    @property
    def places(self) -> tuple[Place, ...]:
        return (*((lane(2), lane(3), lane(4)) if self.turned else (PAIR, lane(0), lane(1))), reg(self.reg))

    @property
    def moves(self) -> dict[Place, Place]:
        return {} if self.turned else MMA_MOVES


@dataclass(frozen=True)
class Butterfly:
    """Transforms the bit at `place` (pair or a register bit) by add and subtract."""

    place: Place


@dataclass(frozen=True)
class Shuffle:
    """Transforms the bit at lane[`lane`] by a warp shuffle with the lane across, then add or subtract. `widen` takes
    packed values and leaves fp32, so that half as many words cross."""

    lane: int
    widen: bool = False


@dataclass(frozen=True)
class Transpose:
    """Applies `MMA_MOVES` to packed values (movmatrix): brings the bits back that one `Mma` moved."""


@dataclass(frozen=True)
class Exchange:
    """Swaps places of a warp with warp or cta bits through (distributed) shared memory."""

    pairs: tuple[tuple[Place, Place], ...]  # (place of a warp, warp or cta place); pair only if turned
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
class Scale:
    """Multiplies by the scale, or by what is left of it where `Mma` steps took powers of two."""

    # Times 1 + 2^-10/3 too, for values that are cut off to one tf32 later: that is what they lose there in the mean
    # (least squares of m · d − 2^-10 · u over u in [0, 1) and mantissas m in [1, 2) of density 1/m), and a value of 11
    # bits stays as it is.
    lifted: bool = False


@dataclass(frozen=True)
class Correct:
    """Multiplies packed values by 1 + b, where the scale came as a · (1 + b) and an `Mma` has multiplied by a."""


@dataclass(frozen=True)
class Widen:
    """Packed → fp32, exact."""


@dataclass(frozen=True)
class Round:
    """fp32 → packed, to nearest even."""


@dataclass(frozen=True)
class Store:
    """Registers → global memory, each 16-byte vector where it belongs; values as `Load` left them."""

    path: str  # plain or streaming


# What a plan may multiply by, in this order, to have multiplied by the scale once: as a whole, of which an `Mma` may
# take powers of two; or in two 16-bit parts, whose error `accurate` does not allow.
WHOLE_SCALE = (["scale"], ["factor 1", "scale"], ["factor 1", "factor 2", "scale"])
SCALE_IN_PARTS = (["factor 1", "factor 2"], ["factor 1", "correction"])

Step = Load | Mma | Transpose | Butterfly | Shuffle | Exchange | Scale | Correct | Widen | Round | Store


@dataclass(frozen=True)
class Plan:
    """A problem's steps over 2^chunk_bits chunks per warp, 2^warp_bits warps, 2^cta_bits blocks.

    Raises `UsageError`, naming the step, if the steps do not compute the problem within its numeric contract.
    """

    problem: Problem
    chunk_bits: int
    warp_bits: int
    cta_bits: int
    steps: tuple[Step, ...]
    persistent: bool = False
    min_blocks: int = 1
    by_chunk: bool = False  # steps that stay in a chunk are written chunk by chunk, not each over all chunks
    starts_early: bool = False  # as in `LaunchSpec`

    def __post_init__(self) -> None:
        _check(self)

    @property
    def loaded(self) -> Placement:
        vector_bits = self.vector_elements.bit_length() - 1
        return Placement.standard(vector_bits, self.chunk_bits, self.warp_bits, self.cta_bits)

    @property
    def vector_elements(self) -> int:
        return VECTOR_BYTES // self.problem.dtype.bytes

    @property
    def vectors(self) -> int:
        """16-byte vectors of a tile in one thread."""
        return (THREAD_ELEMENTS << self.chunk_bits) // self.vector_elements

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placement after each step."""
        trace, placement = [], self.loaded
        for step in self.steps:
            if isinstance(step, Mma):
                placement = placement.moved(step.moves)
            elif isinstance(step, Transpose):
                placement = placement.moved(MMA_MOVES)
            elif isinstance(step, Exchange):
                placement = placement.moved(step.moves)
            trace.append(placement)
        return tuple(trace)

    @cached_property
    def carriers(self) -> tuple[str, ...]:
        """The form of the values after each step: `PACKED` or `FP32`."""
        trace, carrier = [], ""
        for step in self.steps:
            carrier = carrier_after(step, carrier)
            trace.append(carrier)
        return tuple(trace)

    @property
    def load(self) -> Load:
        return next(step for step in self.steps if isinstance(step, Load))

    @property
    def shares_loaded(self) -> int:
        """Of how many blocks each block loads the share of the tile: of all in the cluster, or of itself alone."""
        over_blocks = any(isinstance(step, Mma) and step.over_blocks for step in self.steps)
        return 1 << self.cta_bits if over_blocks else 1

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(step for step in self.steps if isinstance(step, Exchange))

    @property
    def tile_elements(self) -> int:
        """Elements that one cluster transforms at a time."""
        return 1 << len(self.loaded)

    @property
    def rows_per_tile(self) -> int:
        return self.tile_elements // self.problem.n

    @property
    def block_elements(self) -> int:
        """Elements of a tile that one block loads."""
        return self.tile_elements >> self.cta_bits

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one staged tile."""
        return self.block_elements * self.problem.dtype.bytes if self.load.staged else 0

    @property
    def crosses_blocks(self) -> bool:
        return any(step.crosses_blocks for step in self.exchanges)

    @property
    def stages_offset(self) -> int:
        """Where in shared memory the staged tiles begin: after the barriers."""
        return BARRIER_BYTES if self.crosses_blocks or self.load.path == "bulk" else 0

    def exchange_offset(self, step: Exchange) -> int:
        """Where in shared memory the slots of an exchange begin: after the staged tiles, and those that other blocks
        fill after those of this block alone, so that they are free from the start."""
        return self._slots_offset + (self._slots_bytes(crossing=False) if step.crosses_blocks else 0)

    @property
    def shared_bytes(self) -> int:
        return self._slots_offset + self._slots_bytes(crossing=False) + self._slots_bytes(crossing=True)

    @property
    def _slots_offset(self) -> int:
        return self.stages_offset + self.load.stages * self.stage_bytes

    def _slots_bytes(self, *, crossing: bool) -> int:
        slots = 1 << (self.chunk_bits + self.warp_bits)
        return max((slots * step.slot_bytes for step in self.exchanges if step.crosses_blocks == crossing), default=0)

    @property
    def launch(self) -> LaunchSpec:
        return LaunchSpec(
            threads=32 << self.warp_bits,
            cluster=1 << self.cta_bits,
            shared_bytes=self.shared_bytes,
            tile_elements=self.tile_elements,
            persistent=self.persistent,
            scale_form=self.scale_form,
            pitched=self.problem.pitched,
            starts_early=self.starts_early,
        )

    @property
    def scale_form(self) -> ScaleForm:
        if any(isinstance(step, Scale) for step in self.steps):
            return ScaleForm.FP32
        corrected = any(isinstance(step, Correct) for step in self.steps)
        return ScaleForm(f"{self.problem.dtype.value}-{'corrected' if corrected else 'factors'}")

    def least_power(self, step: Mma) -> int:
        """Exponent of the least power of two that an `Mma` takes from a whole scale."""
        return LEAST_POWER - (self.cta_bits if step.over_blocks else 0)

    @property
    def digest(self) -> str:
        """SHA-256 over everything the plan says."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self) -> list[str]:
        """One line per step."""
        lines, before = [], self.loaded
        for step, after in zip(self.steps, self.placements, strict=True):
            lines.append(_sentence(step, before))
            before = after
        return lines


def transformed_bits(step: Step, before: Placement) -> tuple[int, ...]:
    """The index bits that a step transforms, given where they live before it."""
    if isinstance(step, Mma):
        across = before.bits_of("cta").values() if step.over_blocks else ()
        return (*(before.bit_at(place) for place in step.places), *across)
    if isinstance(step, Butterfly):
        return (before.bit_at(step.place),)
    if isinstance(step, Shuffle):
        return (before.bit_at(lane(step.lane)),)
    return ()


def carrier_after(step: Step, carrier: str) -> str:
    """The form of the values that a step leaves, given the form it finds."""
    if isinstance(step, Load):
        return step.carrier
    if isinstance(step, Round):
        return PACKED
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


def roundings(steps: Iterable[Step]) -> float:
    """How many roundings of normal values have the same error as all those of the steps together."""
    carrier, count = "", 0.0
    terms = 0  # rounded values in each fp32 sum since they were rounded; 0: many, or values times a scale
    for step in steps:
        carrier = carrier_after(step, carrier)
        sums = isinstance(step, Butterfly | Shuffle)
        if isinstance(step, Round):
            count += _ROUNDED_SUM.get(terms, 1.0)
        elif isinstance(step, Mma) and carrier == PACKED:
            count += 1.0
        elif isinstance(step, Correct):
            count += _CORRECTION
        elif isinstance(step, Mma) and step.operand == "tf32" and step.parts == 1:
            count += _CUT
        elif sums and carrier == PACKED:
            count += _PACKED_SUM
        if isinstance(step, Round | Mma) or (sums and carrier == PACKED):
            terms = int(carrier == PACKED)
        elif sums:
            terms *= 2
    return count


def _check(plan: Plan) -> None:
    n_bits = plan.problem.log2_n
    if plan.tile_elements < plan.problem.n:
        raise UsageError(
            f"a tile of {plan.tile_elements} elements is shorter than a row of {plan.problem.n}; "
            "give it more chunks, warps or blocks"
        )
    if plan.persistent and plan.cta_bits:
        raise UsageError(f"{plan.problem.name}: a cluster takes one tile, so its grid cannot be persistent")
    carrier, exact, done = "", True, set[int]()
    multiplied = list[str]()  # by the parts of the scale
    before = plan.loaded
    for number, (step, after) in enumerate(zip(plan.steps, plan.placements, strict=True), 1):

        def refuse(why: str, number: int = number, step: Step = step) -> UsageError:
            return UsageError(f"step {number} ({type(step).__name__}) of {plan.problem.name}: {why}")

        needs = {
            Round: FP32,
            Scale: FP32,
            Correct: PACKED,
            Widen: PACKED,
            Transpose: PACKED,
            Store: plan.load.carrier,
            Load: "",
        }.get(type(step), carrier)
        if isinstance(step, Mma):
            parts = 1 if step.operand == PACKED else PARTS[step.operand].get(plan.problem.dtype)
            if step.parts != parts:
                raise refuse(f"takes values as {step.parts} {step.operand} instead of {parts or 'another type'}")
            if step.turned and step.operand == "tf32":
                raise refuse("only 16-bit values are transposed on their way in")
            if step.over_blocks:
                _check_over_blocks(plan, number, step, refuse)
            needs = PACKED if step.operand == PACKED else FP32
        elif isinstance(step, Shuffle) and step.widen:
            needs = PACKED
        elif isinstance(step, Butterfly) and step.place == PAIR:
            needs = FP32  # the two values of a pair are one operand
        elif isinstance(step, Exchange):
            needs = step.carrier
            if step.turned and (step.carrier == PACKED or step.rounds > 1):
                raise refuse("only all fp32 values at once are turned on their way")
        if carrier != needs:
            raise refuse(f"needs {needs or 'no'} values but finds {carrier or 'none'}")
        for bit in transformed_bits(step, before):
            if bit in done or bit >= n_bits:
                raise refuse(f"transforms index bit {bit} a second time or beyond the row")
            done.add(bit)
        if plan.problem.numerics is Numerics.ACCURATE and not exact and changes_values(step):
            raise refuse("computes with rounded values, but accurate rounds once, at the end")
        carrier = carrier_after(step, carrier)
        if isinstance(step, Round) or (changes_values(step) and carrier == PACKED):
            exact = False
        if isinstance(step, Mma) and step.factor:
            multiplied.append(f"factor {step.factor}")
        elif isinstance(step, Scale):
            multiplied.append("scale")
        elif isinstance(step, Correct):
            multiplied.append("correction")
        before = after
    if done != set(range(n_bits)):
        raise UsageError(f"{plan.problem.name}: index bits {sorted(set(range(n_bits)) - done)} are never transformed")
    in_parts = SCALE_IN_PARTS if plan.problem.numerics is Numerics.FAST else ()
    if multiplied not in (*WHOLE_SCALE, *in_parts):
        raise UsageError(f"{plan.problem.name}: the steps do not multiply by the scale once; they do by {multiplied}")
    if plan.load.carrier != (FP32 if plan.problem.dtype is DType.FLOAT32 else PACKED):
        raise UsageError(f"{plan.problem.name}: values of this type are not loaded as {plan.load.carrier}")
    if plan.problem.pitched and plan.load.staged:
        raise UsageError(f"{plan.problem.name}: pitched rows are not copied to shared memory as they lie")
    if not isinstance(plan.steps[-1], Store) or any(before.bit_at(at) != plan.loaded.bit_at(at) for at in IN_VECTORS):
        raise UsageError(f"{plan.problem.name}: the plan does not end with a Store of whole 16-byte vectors")


def _check_over_blocks(plan: Plan, number: int, step: Mma, refuse: Callable[[str], UsageError]) -> None:
    if not plan.cta_bits:
        raise refuse("there is one block, and no other to sum over")
    if number != 2 or plan.load.staged or plan.load.stages > 1:
        raise refuse("only what each block has loaded straight to registers is summed over blocks")
    if step != Mma(step.reg, factor=step.factor, over_blocks=True):
        raise refuse("only packed values are summed over blocks, as they lie, in fp32")
    if step.factor and plan.scale_form is not ScaleForm.FP32:
        raise refuse("sums over blocks outgrow what a factor in 16 bits is made for")
    if plan.crosses_blocks:
        raise refuse("bits that are summed over blocks are not exchanged between them")


def changes_values(step: Step) -> bool:
    """Whether a step does arithmetic, not only moves or converts."""
    return isinstance(step, Mma | Butterfly | Shuffle | Scale | Correct)


def _sentence(step: Step, before: Placement) -> str:
    bits = " ".join(str(bit) for bit in transformed_bits(step, before))
    match step:
        case Load(path, stages):
            return f"load {path}" + (f", {stages} stages" if stages > 1 else "")
        case Mma(register, operand, parts, accumulator, factor, turned, over_blocks):
            packed = ", packed accumulators" if accumulator == PACKED else ""
            how = packed if operand == PACKED else f" as {parts} {operand}"
            times = f", times the {('first', 'second')[factor - 1]} factor of the scale" if factor else ""
            means = ", turned" if turned else ", over blocks" if over_blocks else ""
            return f"mma reg{register}{means}: bits {bits}{how}{times}"
        case Transpose():
            return "transpose back"
        case Butterfly(place):
            return f"butterfly {place}: bit {bits}"
        case Shuffle(index, widen):
            return f"shuffle lane{index}: bit {bits}" + (", widening to fp32" if widen else "")
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
        case Round():
            return "round to 16 bits"
        case Store(path):
            return f"store {path}"


def interpret(plan: Plan, x: Reals, scale: float = 1.0) -> Reals:
    """What the plan computes, in float64, step by step. x: [rows, n], rows a multiple of `rows_per_tile`."""
    import numpy as np

    axes = plan.loaded.places
    bits = len(axes)
    # Axis i of `tile` is the coordinate of place axes[i]; bit 0 varies fastest in memory, so a reshape has it last.
    tile = np.asarray(x, np.float64).reshape((-1,) + (2,) * bits).transpose(0, *range(bits, 0, -1))
    hadamard = np.array([[1.0, 1.0], [1.0, -1.0]])
    left = scale  # to multiply by
    for step in plan.steps:
        touched: tuple[Place, ...] = ()
        if isinstance(step, Mma):
            touched = step.places + tuple(cta(j) for j in range(plan.cta_bits) if step.over_blocks)
        elif isinstance(step, Butterfly):
            touched = (step.place,)
        elif isinstance(step, Shuffle):
            touched = (lane(step.lane),)
        for place in touched:
            axis = 1 + axes.index(place)
            tile = np.moveaxis(np.tensordot(hadamard, tile, (1, axis)), 0, axis)
        if isinstance(step, Mma):
            factor = _factor(plan, step, left)
            left /= factor
            tile = _permute(tile * factor, axes, step.moves)
        elif isinstance(step, Transpose):
            tile = _permute(tile, axes, MMA_MOVES)
        elif isinstance(step, Exchange):
            tile = _permute(tile, axes, step.moves)
        elif isinstance(step, Scale | Correct):
            tile = tile * left
    stored = plan.placements[-1]
    order = [1 + axes.index(stored.places[bit]) for bit in reversed(range(bits))]
    stored_tile: Reals = tile.transpose(0, *order)
    return stored_tile.reshape(np.shape(x))


def _factor(plan: Plan, step: Mma, left: float) -> float:
    """What an `Mma` multiplies by, where steps have still to multiply by `left`."""
    if not step.factor:
        return 1.0
    if plan.scale_form is ScaleForm.FP32:
        return 2.0 ** max(plan.least_power(step), min(0, math.frexp(left)[1] - 1))
    return (1.0, left)[step.factor - 1]  # the whole scale stands for the second, or for the correction


def _permute(tile: Reals, axes: tuple[Place, ...], moves: dict[Place, Place]) -> Reals:
    back = {after: before for before, after in moves.items()}
    permuted: Reals = tile.transpose(0, *(1 + axes.index(back.get(place, place)) for place in axes))
    return permuted
