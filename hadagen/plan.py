"""Plans: lists of steps over a placement, their legality, and what they compute.

The transform is a Kronecker product of one 2×2 factor per index bit, so a plan is right exactly when every row bit is
transformed once and every element is stored where it belongs. `Plan` checks that, symbolically, when it is made;
`interpret` carries a plan out in float64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hadagen.errors import UsageError
from hadagen.launch import LaunchSpec
from hadagen.layout import LANE_BITS, PAIR, Place, Placement, cta, reg
from hadagen.problem import DType, Numerics, Problem
from hadagen.scale import ScaleForm
from hadagen.steps import (
    FP16,
    FP32,
    LEAST_POWER,
    NORMALIZER,
    PACKED,
    PARTS,
    Butterfly,
    Correct,
    Exchange,
    Gather,
    Load,
    Mma,
    Narrow,
    Normalize,
    Prefetch,
    Round,
    Scale,
    Shuffle,
    Step,
    Store,
    SwapButterfly,
    Transpose,
    Trigger,
    Widen,
    carrier_after,
    changes_values,
    mixed_chunk_bits,
    sentence,
    transformed_bits,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Reals = NDArray[np.float64]

VECTOR_BYTES = 16
CHUNK_BITS = 8
CHUNK_ELEMENTS = 1 << CHUNK_BITS
THREAD_ELEMENTS = CHUNK_ELEMENTS // 32  # of one chunk in one thread
# Registers of a thread besides its values: addresses, the A operands of the mma, accumulators under way.
OVERHEAD_REGISTERS = 24
CROSSED_BARRIER = 15  # number of the mbarrier for other blocks' stores; those of the stages come first
ORDERS = ("by_step", "by_chunk", "by_group")  # as the knob of this name has them
BARRIER_BYTES = 128  # room for all mbarriers; keeps what follows aligned

# What a plan may multiply by, in this order, to have multiplied by the scale once: as a whole, of which an `Mma` may
# take powers of two, or which undoes what has normalized; or in two 16-bit parts, whose error `accurate` does not
# allow.
WHOLE_SCALE = (["scale"], ["factor 1", "scale"], ["factor 1", "factor 2", "scale"], ["normalizer", "scale"])
SCALE_IN_PARTS = (["factor 1", "factor 2"], ["factor 1", "correction"])


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
    order: str = "by_step"  # how steps are written, one of `ORDERS`
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
    def vector_places(self) -> tuple[Place, ...]:
        """Where the bits are that tell the elements of a vector apart."""
        return PAIR, *(reg(j) for j in range(self.vector_elements.bit_length() - 2))

    @property
    def vectors(self) -> int:
        """16-byte vectors of a tile in one thread."""
        return (THREAD_ELEMENTS << self.chunk_bits) // self.vector_elements

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placement after each step."""
        trace, placement = [], self.loaded
        for step in self.steps:
            placement = placement.moved(step.moves)
            trace.append(placement)
        return tuple(trace)

    @cached_property
    def carriers(self) -> tuple[str, ...]:
        """The form of the values after each step: `PACKED`, `FP16` or `FP32`."""
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
        return 1 << self.cta_bits if any(step.over_blocks for step in self.steps) else 1

    def tiles_ahead(self, step: Prefetch) -> int:
        """How many tiles after the one that was loaded the one comes that is prefetched; none is as large as 1 MiB."""
        return (step.mib << 20) // (self.tile_elements * self.problem.dtype.bytes)

    @property
    def normalizes(self) -> bool:
        return any(isinstance(step, Normalize) for step in self.steps)

    @property
    def levels_bytes(self) -> int:
        """Shared memory for the levels of all warps of the cluster, each in a vector."""
        return VECTOR_BYTES << self.warp_bits + self.cta_bits if self.normalizes else 0

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(step for step in self.steps if isinstance(step, Exchange))

    @property
    def grouped_steps(self) -> tuple[Step, ...]:
        """What is done group by group, where that is the order: the steps from the exchange on."""
        return self.steps[self.steps.index(self.exchanges[0]) :]

    @property
    def group_chunks(self) -> int:
        """Chunks of each group, where that is the order."""
        return 1 << mixed_chunk_bits(self.grouped_steps)

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
        """Shared memory of one staged tile, as far as a block loads it."""
        return self.shares_loaded * self.block_elements * self.problem.dtype.bytes if self.load.staged else 0

    @property
    def crosses_blocks(self) -> bool:
        return any(step.crosses_blocks for step in self.exchanges)

    @property
    def stages_offset(self) -> int:
        """Where in shared memory the staged tiles begin: after the barriers."""
        return BARRIER_BYTES if self.crosses_blocks or self.load.in_bulk else 0

    def exchange_offset(self, step: Exchange) -> int:
        """Where in shared memory the slots of an exchange begin: after the staged tiles, or over the one there is where
        whole rows take much room; and those that other blocks fill after those of this block alone, so that they are
        free from the start."""
        return self._slots_offset + (self._slots_bytes(crossing=False) if step.crosses_blocks else 0)

    def crossed_bytes(self, step: Exchange) -> int:
        """What lands in a block in one round of an exchange across blocks: a vector for each lane, chunk and plane, and
        the levels of all warps."""
        return step.planes * (32 * VECTOR_BYTES << self.chunk_bits + self.warp_bits) + self.levels_bytes

    @property
    def shared_bytes(self) -> int:
        return self.levels_offset + self.levels_bytes

    @property
    def levels_offset(self) -> int:
        """Where in shared memory the levels of warps begin: behind all else."""
        slots_end = self._slots_offset + self._slots_bytes(crossing=False) + self._slots_bytes(crossing=True)
        return max(self._stages_end, slots_end)

    @property
    def _stages_end(self) -> int:
        return self.stages_offset + self.load.stages * self.stage_bytes

    @property
    def _slots_offset(self) -> int:
        return self.stages_offset if self.load.multicast else self._stages_end

    def _slots_bytes(self, *, crossing: bool) -> int:
        slots = 1 << (self.chunk_bits + self.warp_bits)
        return max((slots * step.slot_bytes for step in self.exchanges if step.crosses_blocks == crossing), default=0)

    @cached_property
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
        if any(isinstance(step, Gather | Scale) for step in self.steps):
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
            lines.append(sentence(step, before))
            before = after
        return lines


def _check(plan: Plan) -> None:
    n_bits = plan.problem.log2_n
    if plan.tile_elements < plan.problem.n:
        raise UsageError(
            f"a tile of {plan.tile_elements} elements is shorter than a row of {plan.problem.n}; "
            "give it more chunks, warps or blocks"
        )
    if plan.persistent and plan.cta_bits:
        raise UsageError(f"{plan.problem.name}: a cluster takes one tile, so its grid cannot be persistent")
    if not any(isinstance(step, Load) for step in plan.steps):
        raise UsageError(f"{plan.problem.name}: the plan loads nothing")
    if plan.min_blocks < 1:
        raise UsageError(f"{plan.problem.name}: min_blocks = {plan.min_blocks}; an SM holds one block at least")
    if plan.load.stages < 1 or (plan.load.stages > 1 and not plan.persistent):
        raise UsageError(
            f"{plan.problem.name}: {plan.load.stages} tiles under way; there is one, or more of a persistent grid"
        )
    places = set(plan.loaded.places)
    for step in plan.steps:
        if unknown := {*step.places, *step.moves} - places:
            raise UsageError(f"{plan.problem.name}: {type(step).__name__} names {min(unknown)}, which the tile lacks")
    carrier, exact, done = "", True, set[int]()
    multiplied = list[str]()  # by the parts of the scale
    before = plan.loaded
    for number, (step, after) in enumerate(zip(plan.steps, plan.placements, strict=True), 1):

        def refuse(why: str, number: int = number, step: Step = step) -> UsageError:
            return UsageError(f"step {number} ({type(step).__name__}) of {plan.problem.name}: {why}")

        in_16_bits = carrier if carrier != FP32 else PACKED
        needs = {
            Round: FP32,
            Narrow: FP32,
            Scale: FP32,
            Correct: PACKED,
            Widen: in_16_bits,
            Transpose: PACKED,
            Store: plan.load.carrier,
            Load: "",
            Prefetch: plan.load.carrier,
            Normalize: PACKED,
            Gather: FP32,
        }.get(type(step), carrier)
        if isinstance(step, Mma):
            parts = PARTS[step.operand].get(plan.problem.dtype) if step.in_parts else 1
            if step.parts != parts:
                raise refuse(f"takes values as {step.parts} {step.operand} instead of {parts or 'another type'}")
            if step.turned and step.operand == "tf32":
                raise refuse("only 16-bit values are transposed on their way in")
            if step.idle and (step.operand == "tf32" or len(step.places) < 2):
                raise refuse("it transforms two bits at least, and leaves none as it is of a tf32")
            if any(before.bit_at(place) >= n_bits for place in step.operand_places):
                raise refuse("mixes bits beyond the row")
            if step.over_blocks and step != Mma(step.reg, factor=step.factor, over_blocks=True):
                raise refuse("only packed values are summed over blocks, as they lie, in fp32")
            if step.over_blocks and step.factor and plan.scale_form is not ScaleForm.FP32:
                raise refuse("sums over blocks outgrow what a factor in 16 bits is made for")
            if step.factor == NORMALIZER and not (plan.normalizes and step.operand == PACKED):
                raise refuse("nothing normalizes the rows, or not these values")
            if step.accumulator not in (FP32, step.operand):
                raise refuse(f"sums of {step.operand} values are not {step.accumulator}")
            needs = FP32 if step.in_parts else step.operand
        elif isinstance(step, Shuffle) and step.widen:
            needs = in_16_bits
        elif isinstance(step, SwapButterfly) or (isinstance(step, Butterfly) and step.place == PAIR):
            needs = FP32  # the two values of a packed pair are one operand
        elif isinstance(step, Exchange):
            needs = step.carrier
            if step.turned and (step.carrier != FP32 or step.rounds > 1):
                raise refuse("only all fp32 values at once are turned on their way")
            if step.carrier != FP32 and step.rounds > 1:
                raise refuse("only fp32 values have two vectors a chunk to take in rounds")
            if step.turned != any(near == PAIR for near, _ in step.pairs):
                raise refuse("the pair is swapped where values are turned on their way, and only there")
        elif isinstance(step, Normalize):
            _check_normalize(plan, number, refuse)
        elif isinstance(step, Narrow) and multiplied != ["normalizer"]:
            raise refuse("only normalized values are in the range of a float16")
        elif isinstance(step, Store) and number < len(plan.steps):
            raise refuse("the tile is stored once, at the end")
        if step.over_blocks:
            _check_over_blocks(plan, number, step, refuse)
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
            multiplied.append("normalizer" if step.factor == NORMALIZER else f"factor {step.factor}")
        elif isinstance(step, Gather | Scale):
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
    if plan.load.multicast and plan.shares_loaded == 1:
        raise UsageError(f"{plan.problem.name}: no step needs the shares of other blocks that a multicast brings")
    if plan.problem.pitched and plan.load.staged:
        raise UsageError(f"{plan.problem.name}: pitched rows are not copied to shared memory as they lie")
    if any(isinstance(step, Prefetch) for step in plan.steps) and (plan.persistent or plan.problem.pitched):
        raise UsageError(f"{plan.problem.name}: only of whole rows, a tile a block, the order of tiles is known ahead")
    triggers = [at for at, step in enumerate(plan.steps) if isinstance(step, Trigger)]
    if triggers and (plan.persistent or triggers[0] == 0 or len(triggers) > 1):
        raise UsageError(f"{plan.problem.name}: the next kernel is let start once, after the load, and not in a loop")
    if plan.order not in ORDERS:
        raise UsageError(f"{plan.problem.name}: order {plan.order!r} is not known; choose from {', '.join(ORDERS)}")
    if plan.order == "by_group":
        if len(plan.exchanges) != 1 or plan.cta_bits or plan.exchanges[0].rounds > 1:
            raise UsageError(f"{plan.problem.name}: only one exchange, of all vectors in a block, goes group by group")
        if plan.group_chunks >= 1 << plan.chunk_bits:
            raise UsageError(f"{plan.problem.name}: all chunks meet from the exchange on, so there is one group")
        if any(isinstance(step, Prefetch | Trigger) for step in plan.grouped_steps):
            raise UsageError(f"{plan.problem.name}: what a tile asks for once has no place among groups of chunks")
    moved = any(before.bit_at(at) != plan.loaded.bit_at(at) for at in plan.vector_places)
    if moved or not isinstance(plan.steps[-1], Store):
        raise UsageError(f"{plan.problem.name}: the plan does not end with a Store of whole 16-byte vectors")


def _check_over_blocks(plan: Plan, number: int, step: Step, refuse: Callable[[str], UsageError]) -> None:
    if not plan.cta_bits:
        raise refuse("there is one block, and no other to sum over")
    loads = all(isinstance(before, Load | Prefetch | Trigger) for before in plan.steps[: number - 1])
    if not loads or (plan.load.staged and not plan.load.multicast):
        raise refuse("only what each block has loaded, straight to registers or by multicast, is summed over blocks")
    if isinstance(step, Gather) and not plan.load.multicast:
        raise refuse("it finds what a multicast has brought")
    if plan.crosses_blocks:
        raise refuse("bits that are summed over blocks are not exchanged between them")


def _check_normalize(plan: Plan, number: int, refuse: Callable[[str], UsageError]) -> None:
    if plan.problem.dtype is not DType.BFLOAT16:
        raise refuse("only values of the range of a bfloat16 are normalized")
    if not all(isinstance(before, Load | Prefetch | Trigger) for before in plan.steps[: number - 1]):
        raise refuse("only what was just loaded is normalized")
    if plan.warp_bits + plan.cta_bits > LANE_BITS:
        raise refuse("each lane reads one level, and there are more warps than lanes")
    if plan.rows_per_tile > 1:
        raise refuse("all values of a tile are brought to one level, but it has several rows")
    if not plan.crosses_blocks or len(plan.exchanges) > 1 or plan.exchanges[0].carrier != FP16:
        raise refuse("levels cross to other blocks with fp16, in one exchange")


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
        across = (cta(j) for j in range(plan.cta_bits) if step.over_blocks)
        for place in (*across, *step.places):
            axis = 1 + axes.index(place)
            tile = np.moveaxis(np.tensordot(hadamard, tile, (1, axis)), 0, axis)
        if isinstance(step, Mma):
            factor = _factor(plan, step, left)
            left /= factor
            tile = tile * factor
        elif isinstance(step, Gather | Scale | Correct):
            tile = tile * left
        tile = _permute(tile, axes, step.moves)
    stored = plan.placements[-1]
    order = [1 + axes.index(stored.places[bit]) for bit in reversed(range(bits))]
    stored_tile: Reals = tile.transpose(0, *order)
    return stored_tile.reshape(np.shape(x))


def _factor(plan: Plan, step: Mma, left: float) -> float:
    """What an `Mma` multiplies by, where steps have still to multiply by `left`."""
    if step.factor in (0, NORMALIZER):  # `Scale` undoes that
        return 1.0
    if plan.scale_form is ScaleForm.FP32:
        return 2.0 ** max(plan.least_power(step), min(0, math.frexp(left)[1] - 1))
    return (1.0, left)[step.factor - 1]  # the whole scale stands for the second, or for the correction


def _permute(tile: Reals, axes: tuple[Place, ...], moves: Mapping[Place, Place]) -> Reals:
    back = {after: before for before, after in moves.items()}
    permuted: Reals = tile.transpose(0, *(1 + axes.index(back.get(place, place)) for place in axes))
    return permuted
