"""Which knobs are legal together for a problem on an arch, and why the others are not.

If a knob would not change the kernel (such as a shared layout without an exchange), only its first value is legal. So
no two legal choices mean the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

from hadagen.plan.arch import Arch
from hadagen.plan.knobs import (
    EXCHANGE,
    FAR_MMA,
    HADAMARD,
    KNOB_NAMES,
    KNOBS,
    LANES,
    LOAD,
    MAX_EXCHANGED_LANES,
    MMA_LANES,
    Knobs,
    KnobValue,
    blocks_spanned,
    exchanges_of,
    prologue_steps,
    steps_of,
    turns_in_exchange,
)
from hadagen.plan.layout import CHUNK_BITS, CHUNK_ELEMENTS, LANE_BITS, VECTOR_BYTES, log2, reg
from hadagen.plan.steps.base import FP16, FP32, PACKED, Draft, Footprint, Step, mixed_chunk_bits, roundings
from hadagen.plan.steps.conversions import Normalize
from hadagen.plan.steps.exchanges import Exchange
from hadagen.plan.steps.memory import Load, Prefetch, Trigger
from hadagen.plan.steps.transforms import PARTS, Butterfly, Gather, Mma
from hadagen.problem.problem import DType, Numerics, Problem
from hadagen.problem.prologues import prologue_of

MAX_EXCHANGES = 2
_TRIGGER = Trigger()
ROUNDINGS_SPREAD = 0.03  # tolerance of the count of roundings; half a percent of the error


@dataclass(frozen=True, eq=False)  # so that it is a key that is quick to hash
class Context:
    problem: Problem
    arch: Arch

    @cached_property
    def bits(self) -> int:
        return self.problem.bits

    @cached_property
    def has_wide_prologue(self) -> bool:
        """Whether a prologue makes fp32 of 16-bit values."""
        steps = prologue_steps(self.problem)
        return self.problem.io.input is not DType.FLOAT32 and any(step.leaves != PACKED for step in steps)

    @cached_property
    def odd_factor(self) -> int:
        return self.problem.odd_factor

    @cached_property
    def held_tiles(self) -> tuple[Draft, ...]:
        """The tiles of `Problem.room` elements whose values the registers of one block hold, loaded plainly: one for
        each number of chunks."""
        limits, found = self.arch.limits, []
        for chunks in map(int, KNOBS["chunks"].values):
            warps, rest = divmod(self.problem.room, chunks * self.odd_factor << CHUNK_BITS)
            threads = 32 * warps * self.odd_factor
            if rest or not 0 < threads <= limits.threads_per_block:
                continue
            tile = Draft(self.problem, log2(chunks), log2(warps), 0, (Load("plain"),))
            held = min(limits.registers_per_thread, limits.registers_per_sm // threads)
            if Footprint(tile).registers(wide=True) <= held:
                found.append(tile)
        return tuple(found)

    def beyond_limits(self, k: Knobs, *, wide: bool, values: str, fewer: str) -> str | None:
        """Why a block does not fit on an SM as often as `min_blocks` says, or None.

        wide: as in `Footprint.registers`. values: why they are too many for the registers. fewer: the knobs that take
        less shared memory.
        """
        limits, min_blocks, needed = self.arch.limits, k.min_blocks, footprint(self.problem, k)
        threads = 32 * needed.plan.warps
        if min_blocks * threads > limits.threads_per_sm:
            return f"more than {limits.threads_per_sm} threads per SM (take fewer warps or a smaller min_blocks)"
        # The estimate of registers is high. Kernels with signs are made like others that were compiled, so the estimate
        # does not limit their `min_blocks`, unless the others may have had a matrix in fewer registers.
        of = self.problem.transform
        blocks = 1 if of.signed and not of.real else min_blocks
        if needed.registers(wide=wide) > min(
            limits.registers_per_thread, limits.registers_per_sm // (threads * blocks)
        ):
            return values
        if needed.shared_bytes > limits.shared_per_block:
            return f"more than {limits.shared_per_block} bytes of shared memory per block (take fewer {fewer})"
        if min_blocks * (needed.shared_bytes + limits.shared_reserved_per_block) > limits.shared_per_sm:
            return f"more than {limits.shared_per_sm} bytes of shared memory per SM (min_blocks must be smaller)"
        return None


# Why knobs are not legal together, or None.
Why = Callable[[Context, Knobs], str | None]


@dataclass(frozen=True)
class Rule:
    """`why` reads no knob after `last` in `KNOB_NAMES`, and is asked where `last` has one of `values`."""

    last: str
    values: tuple[KnobValue, ...]
    why: Why

    def broken(self, c: Context, k: Knobs) -> str | None:
        return self.why(c, k) if getattr(k, self.last) in self.values else None


class Rules(list[Rule]):
    """The rules of a kind of kernel, each made by decorating its `why`."""

    def rule(self, last: str) -> Callable[[Why], None]:
        """A rule about all values of a knob."""
        return lambda why: self.append(Rule(last, KNOBS[last].values, why))

    def first_only(self, last: str) -> Callable[[Why], None]:
        """A rule that says why only the first value of a knob is legal."""
        first, *others = KNOBS[last].values

        def add(why: Why) -> None:
            must = f" ({last} must be {first})"
            self.append(Rule(last, tuple(others), lambda c, k: (said := why(c, k)) and said + must))

        return add

    def unused(self, last: str, why: str) -> None:
        """Only the first value of a knob is legal, because kernels of this kind do not have it."""
        self.first_only(last)(lambda c, k: why)


RULES = Rules()


def never_faster(arch: Arch, *, with_matrix: bool) -> list[Rule]:
    """The rules that leave out what was never faster on an arch."""

    def rule(knobs: Mapping[str, tuple[KnobValue, ...]], why: str) -> Rule:
        last = max(knobs, key=KNOB_NAMES.index)
        others = [(attrgetter(name), values) for name, values in knobs.items() if name != last]

        def broken(c: Context, k: Knobs) -> str | None:
            for value_of, values in others:
                if value_of(k) not in values:
                    return None
            return why

        return Rule(last, knobs[last], broken)

    return [rule(each.knobs, each.why) for each in arch.never_faster if each.with_matrix is with_matrix]


def _warps(c: Context, k: Knobs) -> int:
    return c.odd_factor * k.warps


def _tile(c: Context, k: Knobs) -> int:
    return k.chunks * _warps(c, k) * k.cluster << CHUNK_BITS


def _shares_loaded(k: Knobs) -> int:
    """How many blocks' shares of a row each block loads."""
    return k.cluster if k.block_bits == LOAD else 1


def _far(c: Context, k: Knobs) -> int:
    """How many bits of warps and blocks exchanges bring to registers or lanes; 0 or less if there is no exchange."""
    return c.bits - CHUNK_BITS - log2(k.chunks) - log2(_shares_loaded(k))


def _far_beside_blocks(c: Context, k: Knobs) -> int:
    """How many far bits are left for lanes, when the bits of blocks have gone to registers."""
    blocks = 0 if k.block_bits == LOAD else blocks_spanned(c.problem, k)
    return _far(c, k) - min(blocks, log2(k.chunks))


def _rounds_once(c: Context, k: Knobs) -> bool:
    """Whether only the store may round. With fp16 other steps may, because it has more bits than a bfloat16 result."""
    return not (k.normalizes or c.problem.may_round_often or c.problem.may_round_within)


def _lacking(c: Context, step: Step, carrier: str = "") -> str:
    """A feature that the step needs and the arch lacks; "" if there is none. carrier: as in `Step.features`."""
    return min(step.features(c.problem.io.input, carrier) - c.arch.features, default="")


@lru_cache(maxsize=64)
def _fault(c: Context, grid: str, step: Step) -> str | None:
    """The fault of a plan in which a step comes right after the load; None if there is none."""
    plan = Draft(c.problem, 0, 0, 0, (Load("plain"), step), persistent=grid == "persistent")
    return next(step.faults(plan, 1), None)


def _has_exchange(c: Context, k: Knobs) -> bool:
    return _far(c, k) > 0


def _has_butterflies(c: Context, k: Knobs) -> bool:
    """Whether butterflies transform bits, because no mma does."""
    if k.low_bits != "mma":
        return True
    far_mma = 0
    if k.far_lanes in MMA_LANES:  # and one more bit: a chunk bit, or another far bit
        far_mma = min(MMA_LANES[k.far_lanes], _far_beside_blocks(c, k)) + 1
    return c.bits > CHUNK_BITS + log2(_shares_loaded(k)) + far_mma


_ROOM = [name for name, knob in KNOBS.items() if knob.room]
_room_of = attrgetter(*_ROOM)


def footprint(problem: Problem, k: Knobs) -> Footprint:
    """The footprint of the plan that the knobs mean, from the steps that take shared memory or registers."""
    return _footprint(problem, *_room_of(k))


@lru_cache(maxsize=1024)  # enough while a walk changes the other knobs
def _footprint(problem: Problem, *room: Any) -> Footprint:
    k = Knobs(**dict(zip(_ROOM, room, strict=True)))
    if problem.io.form or problem.transform.has_matrix:  # where it depends on all steps
        steps = steps_of(problem, k)
    else:
        through = k.exchange_carrier, k.exchange_rounds, k.shared_layout
        exchanges = [Exchange(pairs, *through) for pairs in exchanges_of(problem, k)]
        others = [Normalize()] * k.normalizes + [Gather()] * (k.block_bits == LOAD)
        steps = Load(k.load, k.stages), *exchanges, *others
    return Footprint(Draft(problem, log2(k.chunks), log2(k.warps), log2(k.cluster), steps))


RULES.unused("first", "there is no matrix")
RULES.unused("fold", "there is no matrix")
RULES.unused("products", "there is no matrix")
RULES.unused("rows", "there is no matrix, so no tile is multiplied")
RULES.unused("slabs", "there is no matrix, so no rows are held")


@RULES.rule("warps")
def _fits_threads(c: Context, k: Knobs) -> str | None:
    limit = c.arch.limits.threads_per_block
    row = c.problem.unit * c.problem.io.input.bytes
    if c.problem.prologue and row < VECTOR_BYTES:
        return "a prologue has rows of 16 bytes at least"
    if c.problem.is_padded and row % VECTOR_BYTES:
        return f"rows of {row} bytes are no multiple of {VECTOR_BYTES} bytes"
    return f"more than {limit} threads per block (take fewer warps)" if 32 * _warps(c, k) > limit else None


@RULES.rule("cluster")
def _cluster_holds_rows(c: Context, k: Knobs) -> str | None:
    tile, unit, room = _tile(c, k), c.problem.unit, c.problem.room
    if tile < room:
        what = "row" if unit == c.problem.n else f"group of {unit}"
        return f"the tile is shorter than a {what} (take more chunks, warps or blocks)"
    if (c.odd_factor > 1 or c.problem.is_padded) and tile > room:
        return f"a row of {unit} fills a tile alone (take fewer chunks or warps)"
    if k.cluster == 1:
        return None
    form, share = c.problem.io.form, tile // k.cluster
    if form and c.held_tiles:
        return "one block holds what is quantized together (cluster must be 1)"
    if "cluster" not in c.arch.features or k.cluster > c.arch.limits.cluster_blocks:
        return f"the arch has no clusters of {k.cluster} blocks"
    if tile > room:
        return "the tile of several blocks is longer than a row (take fewer chunks, warps or blocks)"
    if share * (k.cluster - 1) >= unit:
        return f"the last block would have no part of a row of {unit} (take fewer blocks)"
    if form and share < form.group < unit:
        return f"a group of {form.group} is longer than the share of a block (take fewer blocks)"
    if c.odd_factor > 1 and blocks_spanned(c.problem, k):
        return f"H spans {c.odd_factor} warps, which is no power of two (take more chunks or warps)"
    return None


@RULES.rule("low_bits")
def _loads_shares_for_mma(c: Context, k: Knobs) -> str | None:
    if k.block_bits == EXCHANGE:
        return None
    if k.cluster == 1:
        return "there are no other blocks whose share to load (block_bits must be exchange)"
    if c.problem.io.input is DType.FLOAT32:
        split = k.low_bits == "mma"
        return "the mma of fp32 values does not sum over blocks (low_bits must be shuffle)" if split else None
    alone = k.low_bits == "shuffle"
    return "only an mma sums 16-bit values over blocks (block_bits must be exchange)" if alone else None


@RULES.first_only("block_bits")
def _block_bits_come_alone(c: Context, k: Knobs) -> str | None:
    if c.problem.io.form:
        return "the largest magnitude of a row crosses blocks as values of an exchange do"
    return "what comes before the transform is computed by one block alone" if c.problem.prologue else None


@RULES.rule("accumulator")
def _sums_over_blocks_fit(c: Context, k: Knobs) -> str | None:
    packed = k.accumulator == PACKED or (k.low_bits == "mma" and k.mma_carrier == PACKED)
    if k.block_bits == LOAD and packed:
        return "sums over blocks may outgrow 16 bits (mma_carrier must not be packed, accumulator must be fp32)"
    return None


@RULES.rule("far_bits")
def _groups_stay_in_blocks(c: Context, k: Knobs) -> str | None:
    form = c.problem.io.form
    if form is None or not 0 < form.group < c.problem.unit or not blocks_spanned(c.problem, k):
        return None
    if form.group > CHUNK_ELEMENTS:
        return f"values of a group of {form.group} would cross to other blocks (cluster must be 1)"
    crosses = k.far_bits == LANES
    return "values of one group would cross to several blocks (far_bits must be registers)" if crosses else None


@RULES.rule("far_lanes")
def _exchanges_have_bits(c: Context, k: Knobs) -> str | None:
    if k.far_bits == LANES:
        lanes = _far(c, k) - log2(k.chunks)
        if lanes > MAX_EXCHANGED_LANES:
            return f"more than {MAX_EXCHANGED_LANES} lane bits to exchange with (take more chunks)"
        if lanes <= 0 and k.far_lanes == "shuffle":
            return "register bits are enough to exchange with (far_bits must be registers, or far_lanes an mma)"
        if k.far_lanes == "mma_two" and lanes > MMA_LANES["mma_two"]:
            return "more than two lane bits to exchange with (far_lanes must be mma or shuffle)"
        return None
    if not _has_exchange(c, k):
        return None
    if k.chunks == 1:
        return "one chunk leaves no register bit to exchange with (chunks must be 2 or more, or far_bits lanes)"
    count = len(exchanges_of(c.problem, k))
    return f"more than {MAX_EXCHANGES} exchanges (more chunks need fewer)" if count > MAX_EXCHANGES else None


@RULES.rule("low_bits")
def _mma_has_bits(c: Context, k: Knobs) -> str | None:
    if k.low_bits == "shuffle":
        return None
    single = c.problem.io.input is DType.FLOAT32
    lacking = [_lacking(c, Mma(0, operand)) for operand in (PARTS if single else (PACKED,))]
    if all(lacking):
        return f"the arch has no {lacking[0]} (low_bits must be shuffle)"
    if c.bits < 5:
        return "an mma would mix bits of two rows (low_bits must be shuffle)"
    if k.low_bits == "mma" and c.bits < CHUNK_BITS:
        others = "shuffle" if single else "mma_shuffle or shuffle"
        return f"two mma transform eight bits, more than the row has (low_bits must be {others})"
    if k.low_bits == "mma_shuffle" and single:
        return "the transpose after one mma moves only 16-bit values (low_bits must be another)"
    if k.low_bits == "mma_shuffle" and c.problem.transform.swapped:
        return "one mma leaves bits in lanes that are exchanged with others (low_bits must be another)"
    if k.low_bits == "mma_shuffle" and k.far_bits == LANES:
        return "one mma leaves bits in lanes that must come back from there (low_bits must be another)"
    return None


@RULES.first_only("shuffles")
def _shuffles_have_bits(c: Context, k: Knobs) -> str | None:
    if c.problem.io.input is not DType.FLOAT32:
        # In 16 bits, few bits are left to shuffles. Swapping those with chunk bits was never faster.
        return "only float32 has a register bit of its own to swap with one of lanes"
    shuffled = k.far_bits == LANES or (k.low_bits == "shuffle" and c.bits > 2)
    return None if shuffled else "no bit is transformed by a shuffle"


@RULES.rule("low_bits")
def _far_mma_has_bits(c: Context, k: Knobs) -> str | None:
    if k.far_lanes == "shuffle":
        return None
    if k.far_bits != LANES or k.low_bits != "mma":
        return "no bit comes to lanes after an mma (far_lanes must be shuffle)"
    if c.problem.io.input is DType.FLOAT32:
        return "what the scale has made small loses bits where an mma takes it apart (far_lanes must be shuffle)"
    lanes = _far_beside_blocks(c, k)
    if k.chunks == 1 or lanes < 1:
        return "an mma needs a bit in lanes and one in registers (far_lanes must be shuffle)"
    few = k.far_lanes == "mma" and lanes < MMA_LANES["mma"]
    return "fewer than three bits come to lanes (far_lanes must be mma_two or shuffle)" if few else None


@RULES.rule("mma_carrier")
def _carrier_between_mma(c: Context, k: Knobs) -> str | None:
    between, parts = k.low_bits == "mma", PARTS["tf32"].get(c.problem.io.input, 0)
    tf32 = parts > (1 if c.problem.keeps_16_bits else 0)  # one has 11 bits, two have 22
    if k.mma_carrier == FP16 and c.problem.prologue:
        return "what comes before the transform has another range (mma_carrier must be another)"
    if k.mma_carrier == PACKED:
        wide = "split or tf32" if tf32 else "split"
        said = f"{c.problem.io.numerics.value} may not round between two mma (mma_carrier must be {wide})"
        return said if between and (_rounds_once(c, k) or c.has_wide_prologue) else None
    if not between:
        return "no value passes from one mma to another (mma_carrier must be packed)"
    if k.mma_carrier == "tf32" and not tf32:
        few = "fewer bits than accurate codes need" if parts else f"no more bits than a {c.problem.io.input.value}"
        return f"a tf32 has {few} (mma_carrier must be another)"
    operand = "bfloat16" if k.mma_carrier == "split" else k.mma_carrier
    lacking = _lacking(c, Mma(1, operand)) or (k.normalizes and _lacking(c, Normalize()))
    return f"the arch has no {lacking} (mma_carrier must be another)" if lacking else None


@RULES.first_only("accumulator")
def _mma_leaves_packed(c: Context, k: Knobs) -> str | None:
    if k.normalizes:
        return None
    if k.low_bits == "shuffle" or k.mma_carrier != PACKED:
        return "no mma leaves packed values"
    if c.problem.io.input is not DType.FLOAT16:
        return "no mma sums in bfloat16"
    if c.has_wide_prologue:
        return "what comes before the transform leaves fp32"
    return None if c.problem.may_round_often else f"{c.problem.io.numerics.value} may not round inside an mma"


@RULES.rule("exchange_carrier")
def _normalizes_between_blocks(c: Context, k: Knobs) -> str | None:
    if not k.normalizes:
        return None
    if c.problem.io.input is not DType.BFLOAT16:
        return f"fp16 has no more bits than a {c.problem.io.input.value} (mma_carrier must be another)"
    if c.problem.io.numerics is Numerics.FAST:
        return "fast may carry bfloat16 (mma_carrier must be another)"
    if k.cluster == 1 or k.block_bits == LOAD or c.problem.io.form:
        return "only between blocks fp16 saves more than its level costs (mma_carrier must be another)"
    if k.exchange_carrier == FP32:
        return "levels cross with fp16 (exchange_carrier must be packed)"
    if len(exchanges_of(c.problem, k)) > 1:
        return "levels cross in one exchange (far_bits must be lanes, or chunks more)"
    if k.warps * k.cluster > 1 << LANE_BITS:
        return "each lane of a warp reads the level of one (warps or cluster must be fewer)"
    return None


@RULES.rule("butterfly_carrier")
def _butterflies_may_round(c: Context, k: Knobs) -> str | None:
    butterflies = _has_butterflies(c, k)
    if k.butterfly_carrier == FP32:
        carries = butterflies or _has_exchange(c, k)
        return None if carries else "no butterfly has a carrier (butterfly_carrier must be packed)"
    if not c.problem.may_round_often and butterflies:
        return f"{c.problem.io.numerics.value} may not round between butterflies (butterfly_carrier must be fp32)"
    if butterflies and not k.normalizes and (lacking := _lacking(c, Butterfly(reg(2)), PACKED)):
        return f"the arch has no {lacking} (butterfly_carrier must be fp32)"
    if k.low_bits != "mma":
        return "packed shuffles and butterflies round too often (butterfly_carrier must be fp32, or low_bits mma)"
    return None


@RULES.rule("exchange_carrier")
def _exchange_may_round(c: Context, k: Knobs) -> str | None:
    if k.exchange_carrier == FP32:
        if not _has_exchange(c, k):
            return "there is no exchange (exchange_carrier must be packed)"
        if k.butterfly_carrier == PACKED:
            return "packed butterflies have nothing in fp32 to exchange (exchange_carrier must be packed)"
        return None
    if k.butterfly_carrier == FP32 and not _has_butterflies(c, k):
        return "no butterfly has a carrier (butterfly_carrier must be as exchange_carrier)"
    if _rounds_once(c, k) and _has_exchange(c, k):
        return f"{c.problem.io.numerics.value} may not round before an exchange (exchange_carrier must be fp32)"
    return None


@RULES.rule("exchange_carrier")
def _rounds_as_often_as_allowed(c: Context, k: Knobs) -> str | None:
    if not _rounds_once(c, k) and roundings(steps_of(c.problem, k)) > c.problem.roundings + ROUNDINGS_SPREAD:
        return f"it rounds more often than {c.problem.io.numerics.value} may (take fp32 carriers)"
    if turns_in_exchange(k):
        few = _far(c, k) - log2(k.chunks) > MMA_LANES["mma"]
        return "an mma of tf32 leaves room for three bits in lanes (chunks must be more)" if few else None
    if k.far_lanes not in MMA_LANES or k.exchange_carrier == PACKED:
        return None
    lacking = _lacking(c, replace(FAR_MMA, operand="bfloat16"))
    return f"the arch has no {lacking} for fp32 in parts (exchange_carrier must be packed)" if lacking else None


@RULES.first_only("exchange_rounds")
def _exchange_has_rounds(c: Context, k: Knobs) -> str | None:
    return _fault(c, "tiles", Exchange((), k.exchange_carrier, k.exchange_rounds, turned=turns_in_exchange(k)))


@RULES.first_only("shared_layout")
def _layout_avoids_conflicts(c: Context, k: Knobs) -> str | None:
    conflicts = k.exchange_carrier == FP32 and k.exchange_rounds == 1
    return None if conflicts else "one vector a lane meets no bank conflict"


@RULES.first_only("order")
def _chunks_have_order(c: Context, k: Knobs) -> str | None:
    if c.problem.io.form:
        return "what is quantized is stored at once"
    return "one chunk has no order" if k.chunks == 1 else None


@RULES.rule("order")
def _groups_meet_before_exchange(c: Context, k: Knobs) -> str | None:
    if k.order != "by_group":
        return None
    if k.cluster > 1 or k.exchange_rounds > 1 or not _has_exchange(c, k):
        return "there is no exchange within a block, of all vectors at once (order must be another)"
    far_mma = (FAR_MMA,) if k.far_lanes in MMA_LANES else ()
    first = Exchange(exchanges_of(c.problem, k)[0], k.exchange_carrier)  # where there is another, all chunks meet in it
    all_meet = mixed_chunk_bits((first, *far_mma)) >= log2(k.chunks)
    return "all chunks meet from the exchange on (order must be another, or chunks more)" if all_meet else None


@RULES.rule("load")
def _load_is_possible(c: Context, k: Knobs) -> str | None:
    return _load_fault(c, k.load, k.block_bits)


def halves_in_bulk(c: Context, tile: int) -> bool:
    """Whether x has the halves of rows one behind the other, and a tile of so many elements is of one row."""
    prologue = prologue_of(c.problem)
    return prologue is not None and prologue.is_halved and tile <= c.problem.room


@RULES.rule("load")
def _halves_lie_together(c: Context, k: Knobs) -> str | None:
    prologue = prologue_of(c.problem)
    if k.load == "bulk" and prologue and prologue.is_halved and not halves_in_bulk(c, _tile(c, k)):
        return "halves of several rows lie apart (load must not be bulk, or the tile smaller)"
    return None


@lru_cache(maxsize=64)
def _load_fault(c: Context, path: str, block_bits: str) -> str | None:
    load = Load(path, carrier=FP32 if c.problem.io.input is DType.FLOAT32 else PACKED)
    sums = [Gather() if load.carrier == FP32 else Mma(0, over_blocks=True)] * (block_bits == LOAD)
    plan = Draft(c.problem, 0, 0, len(sums), (load, *sums))
    for at, step in reversed([*enumerate(plan.steps)]):
        for why in step.faults(plan, at):
            return why
    lacking = _lacking(c, load)
    return f"the arch has no {lacking} (load must be another)" if lacking else None


@RULES.first_only("grid")
def _tiles_follow(c: Context, k: Knobs) -> str | None:
    # Clusters are the fastest if rows are few, and then there are no further tiles.
    return "clusters take one tile each" if k.cluster > 1 else None


@RULES.first_only("stages")
def _stages_have_tiles(c: Context, k: Knobs) -> str | None:
    return "one tile a block leaves nothing to have under way" if k.grid == "tiles" else None


@RULES.rule("stages")
def _stages_have_boxes(c: Context, k: Knobs) -> str | None:
    return "only boxes are loaded so far ahead (stages must be fewer)" if k.stages > 2 and k.first == HADAMARD else None


@RULES.rule("min_blocks")
def _fits_registers(c: Context, k: Knobs) -> str | None:
    # All values are in fp32 at once if they cross shared memory in fp32, or are not rounded before the store.
    wide = k.exchange_carrier == FP32 or _rounds_once(c, k) or c.problem.io.form is not None
    return c.beyond_limits(
        k,
        wide=wide,
        values="a thread's values do not fit its registers (take fewer chunks, stages or min_blocks)",
        fewer="stages or warps",
    )


@RULES.first_only("ahead")
def _prefetches_tiles(c: Context, k: Knobs) -> str | None:
    if _lacking(c, Prefetch(k.ahead)):
        return "the arch has no bulk copies to L2"
    return _fault(c, k.grid, Prefetch(k.ahead))


@RULES.first_only("trigger")
def _starts_early(c: Context, k: Knobs) -> str | None:
    if not c.arch.starts_early:
        return "the arch starts no kernel before the last one ends"
    return _fault(c, k.grid, _TRIGGER)
