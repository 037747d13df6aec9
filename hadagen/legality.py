"""Which knobs are legal together for a problem on an arch, and why the others are not.

If a knob would not change the kernel (such as a shared layout without an exchange), only its first value is legal. So
no two legal choices mean the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from hadagen.arch import Arch, Limits
from hadagen.knobs import (
    EXCHANGE,
    FAR_MMA,
    KNOB_NAMES,
    LANES,
    LOAD,
    MAX_EXCHANGED_LANES,
    MMA_LANES,
    WHOLE,
    Knobs,
    exchanges_of,
    steps_of,
    turns_in_exchange,
)
from hadagen.layout import CHUNK_BITS, LANE_BITS, VECTOR_BYTES, log2, reg
from hadagen.problem import DType, Numerics, Problem, Rows
from hadagen.steps.base import FP32, PACKED, Draft, Footprint, Step, mixed_chunk_bits, roundings
from hadagen.steps.conversions import Normalize
from hadagen.steps.exchanges import Exchange
from hadagen.steps.memory import Load, Prefetch
from hadagen.steps.transforms import PARTS, Butterfly, Gather, Mma

MAX_EXCHANGES = 2
# Blocks that each load a whole row. More blocks compute less each, but load as much, and were never faster.
MAX_SHARES = 8
ROUNDINGS_SPREAD = 0.03  # tolerance of the count of roundings; half a percent of the error


@dataclass(frozen=True)
class Context:
    problem: Problem
    arch: Arch

    @property
    def bits(self) -> int:
        return self.problem.bits

    def registers(self, threads: int, min_blocks: int) -> int:
        """The most registers of a thread, by an estimate that is high. Kernels with signs are made like others that
        were compiled, so that estimate does not limit their `min_blocks`."""
        limits, blocks = self.arch.limits, 1 if self.problem.transform.signed else min_blocks
        return min(limits.registers_per_thread, limits.registers_per_sm // (threads * blocks))


@dataclass(frozen=True)
class Rule:
    """`broken`: why knobs are not legal together, or None. It reads no knob after `last` in `KNOB_NAMES`."""

    last: str
    broken: Callable[[Context, Knobs], str | None]


RULES: list[Rule] = []


def _rule(last: str) -> Callable[[Callable[[Context, Knobs], str | None]], None]:
    def add(broken: Callable[[Context, Knobs], str | None]) -> None:
        RULES.append(Rule(last, broken))

    return add


def beyond_threads(limits: Limits, threads: int, min_blocks: int) -> str | None:
    """Why so many threads of a block do not fit on an SM as often as `min_blocks` says, or None."""
    if min_blocks * threads > limits.threads_per_sm:
        return f"more than {limits.threads_per_sm} threads per SM (take fewer warps or a smaller min_blocks)"
    return None


def beyond_shared(limits: Limits, footprint: Footprint, min_blocks: int, fewer: str) -> str | None:
    """Why the shared memory of a block does not fit, on its own or as often as `min_blocks` says, or None. fewer: the
    knobs that take less."""
    if footprint.shared_bytes > limits.shared_per_block:
        return f"more than {limits.shared_per_block} bytes of shared memory per block (take fewer {fewer})"
    if min_blocks * (footprint.shared_bytes + limits.shared_reserved_per_block) > limits.shared_per_sm:
        return f"more than {limits.shared_per_sm} bytes of shared memory per SM (min_blocks must be smaller)"
    return None


def _warps(c: Context, k: Knobs) -> int:
    return c.problem.parts * k.warps


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
    blocks = 0 if k.block_bits == LOAD else log2(k.cluster)
    return _far(c, k) - min(blocks, log2(k.chunks))


def _rounds_once(c: Context, k: Knobs) -> bool:
    """Whether only the store may round. With fp16 other steps may, because it has more bits than a bfloat16 result."""
    return not (k.normalizes or c.problem.may_round_often or c.problem.may_round_within)


def _lacking(c: Context, step: Step, carrier: str = "") -> str:
    """A feature that the step needs and the arch lacks; "" if there is none. carrier: as in `Step.features`."""
    return min(step.features(c.problem.io.input, carrier) - c.arch.features, default="")


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


# The knobs before `min_blocks`, without those that change neither shared memory nor registers.
_NO_ROOM = ("accumulator", "butterfly_carrier", "order", "grid")
_ROOM = [name for name in KNOB_NAMES[: KNOB_NAMES.index("min_blocks")] if name not in _NO_ROOM]
_room_of = attrgetter(*_ROOM)


@lru_cache(maxsize=1024)  # enough while a walk changes the other knobs
def _footprint(problem: Problem, *room: Any) -> Footprint:
    """The footprint of the plan that the knobs mean, from the steps that take shared memory or registers."""
    k = Knobs(**dict(zip(_ROOM, room, strict=True)))
    if problem.io.form:  # how many magnitudes cross shared memory depends on where all steps leave the values
        return Footprint(Draft(problem, log2(k.chunks), log2(k.warps), log2(k.cluster), steps_of(problem, k)))
    through = k.exchange_carrier, k.exchange_rounds, k.shared_layout
    steps: list[Step] = [Load(k.load, k.stages), *(Exchange(pairs, *through) for pairs in exchanges_of(problem, k))]
    steps += [Normalize()] * k.normalizes + [Gather()] * (k.block_bits == LOAD)
    return Footprint(Draft(problem, log2(k.chunks), log2(k.warps), log2(k.cluster), tuple(steps)))


for _name, _what in {"rows": "no tile is multiplied", "slabs": "no rows are held"}.items():

    @_rule(_name)
    def _(c: Context, k: Knobs, name: str = _name, what: str = _what) -> str | None:
        return f"there is no matrix, so {what} ({name} must be 1)" if getattr(k, name) > 1 else None


@_rule("warps")
def _(c: Context, k: Knobs) -> str | None:
    limit = c.arch.limits.threads_per_block
    return f"more than {limit} threads per block (take fewer warps)" if 32 * _warps(c, k) > limit else None


@_rule("cluster")
def _(c: Context, k: Knobs) -> str | None:
    what = "row" if c.problem.unit == c.problem.n else f"group of {c.problem.unit}"
    return (
        f"the tile is shorter than a {what} (take more chunks, warps or blocks)"
        if _tile(c, k) < c.problem.unit
        else None
    )


@_rule("cluster")
def _(c: Context, k: Knobs) -> str | None:
    several = c.problem.parts > 1 and _tile(c, k) > c.problem.unit
    return f"a row of {c.problem.unit} fills a tile alone (take fewer chunks or warps)" if several else None


@_rule("cluster")
def _(c: Context, k: Knobs) -> str | None:
    if k.cluster == 1:
        return None
    if c.problem.io.form:
        return "blocks of a cluster do not know each other's largest values (cluster must be 1)"
    if "cluster" not in c.arch.features or k.cluster > c.arch.limits.cluster_blocks:
        return f"the arch has no clusters of {k.cluster} blocks"
    if _tile(c, k) > c.problem.n:
        return "the tile of several blocks is longer than a row (take fewer chunks, warps or blocks)"
    return None


@_rule("low_bits")
def _(c: Context, k: Knobs) -> str | None:
    if k.block_bits == EXCHANGE:
        return None
    if k.cluster == 1:
        return "there are no other blocks whose share to load (block_bits must be exchange)"
    if k.cluster > MAX_SHARES:
        return f"more than {MAX_SHARES} blocks would each load the whole row (block_bits must be exchange)"
    if c.problem.io.input is DType.FLOAT32:
        split = k.low_bits == "mma"
        return "the mma of fp32 values does not sum over blocks (low_bits must be shuffle)" if split else None
    alone = k.low_bits == "shuffle"
    return "only an mma sums 16-bit values over blocks (block_bits must be exchange)" if alone else None


@_rule("accumulator")
def _(c: Context, k: Knobs) -> str | None:
    packed = k.accumulator == PACKED or (k.low_bits == "mma" and k.mma_carrier == PACKED)
    if k.block_bits == LOAD and packed:
        return "sums over blocks may outgrow 16 bits (mma_carrier must not be packed, accumulator must be fp32)"
    return None


@_rule("load")
def _(c: Context, k: Knobs) -> str | None:
    load = Load(k.load)
    if k.block_bits == LOAD:
        if c.problem.io.input is DType.FLOAT32:
            return None if load.multicast else "fp32 is summed over blocks from shared memory (load must be multicast)"
        allowed = load.multicast or not load.staged
        return None if allowed else "whole rows take another way (load must be plain or multicast)"
    return "no block needs the shares of others (load must not be multicast)" if load.multicast else None


@_rule("far_lanes")
def _(c: Context, k: Knobs) -> str | None:
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


@_rule("low_bits")
def _(c: Context, k: Knobs) -> str | None:
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
    return None


@_rule("low_bits")
def _(c: Context, k: Knobs) -> str | None:
    if c.problem.transform.swapped and k.low_bits == "mma_shuffle":
        return "one mma leaves bits in lanes that are exchanged with others (low_bits must be another)"
    moved = k.far_bits == LANES and k.low_bits == "mma_shuffle"
    return "one mma leaves bits in lanes that must come back from there (low_bits must be another)" if moved else None


@_rule("shuffles")
def _(c: Context, k: Knobs) -> str | None:
    if k.shuffles == WHOLE:
        return None
    if c.problem.io.input is not DType.FLOAT32:
        # In 16 bits, few bits are left to shuffles. Swapping those with chunk bits was never faster.
        return "only float32 has a register bit of its own to swap with one of lanes (shuffles must be whole)"
    shuffled = k.far_bits == LANES or (k.low_bits == "shuffle" and c.bits > 2)
    return None if shuffled else "no bit is transformed by a shuffle (shuffles must be whole)"


@_rule("low_bits")
def _(c: Context, k: Knobs) -> str | None:
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


@_rule("mma_carrier")
def _(c: Context, k: Knobs) -> str | None:
    between, parts = k.low_bits == "mma", PARTS["tf32"].get(c.problem.io.input, 0)
    tf32 = parts > (1 if c.problem.keeps_16_bits else 0)  # one has 11 bits, two have 22
    if k.mma_carrier == PACKED:
        wide = "split or tf32" if tf32 else "split"
        said = f"{c.problem.io.numerics.value} may not round between two mma (mma_carrier must be {wide})"
        return said if between and _rounds_once(c, k) else None
    if not between:
        return "no value passes from one mma to another (mma_carrier must be packed)"
    if k.mma_carrier == "tf32" and c.problem.keeps_16_bits and tf32 and PARTS["tf32"][c.problem.io.input] == 1:
        return "accurate codes are of values with 16 bits, and a tf32 has 11 (mma_carrier must be split)"
    if k.mma_carrier == "tf32" and not tf32:
        few = "fewer bits than accurate codes need" if parts else f"no more bits than a {c.problem.io.input.value}"
        return f"a tf32 has {few} (mma_carrier must be another)"
    operand = "bfloat16" if k.mma_carrier == "split" else k.mma_carrier
    lacking = _lacking(c, Mma(1, operand)) or (k.normalizes and _lacking(c, Normalize()))
    return f"the arch has no {lacking} (mma_carrier must be another)" if lacking else None


@_rule("accumulator")
def _(c: Context, k: Knobs) -> str | None:
    if k.accumulator == FP32 or k.normalizes:
        return None
    if k.low_bits == "shuffle" or k.mma_carrier != PACKED:
        return "no mma leaves packed values (accumulator must be fp32)"
    if c.problem.io.input is not DType.FLOAT16:
        return "no mma sums in bfloat16 (accumulator must be fp32)"
    if not c.problem.may_round_often:
        return f"{c.problem.io.numerics.value} may not round inside an mma (accumulator must be fp32)"
    return None


@_rule("exchange_carrier")
def _(c: Context, k: Knobs) -> str | None:
    if not k.normalizes:
        return None
    if c.problem.io.input is not DType.BFLOAT16:
        return f"fp16 has no more bits than a {c.problem.io.input.value} (mma_carrier must be another)"
    if c.problem.io.numerics is Numerics.FAST:
        return "fast may carry bfloat16 (mma_carrier must be another)"
    if k.cluster == 1 or k.block_bits == LOAD:
        # Within a block it was never faster: finding the level costs more than the exchange saves.
        return "only between blocks fp16 saves more than its level costs (mma_carrier must be another)"
    if k.exchange_carrier == FP32:
        return "levels cross with fp16 (exchange_carrier must be packed)"
    if len(exchanges_of(c.problem, k)) > 1:
        return "levels cross in one exchange (far_bits must be lanes, or chunks more)"
    if k.warps * k.cluster > 1 << LANE_BITS:
        return "each lane of a warp reads the level of one (warps or cluster must be fewer)"
    return None


@_rule("butterfly_carrier")
def _(c: Context, k: Knobs) -> str | None:
    if k.butterfly_carrier == FP32:
        carries = _has_butterflies(c, k) or _has_exchange(c, k)
        return None if carries else "no butterfly has a carrier (butterfly_carrier must be packed)"
    if not c.problem.may_round_often and _has_butterflies(c, k):
        return f"{c.problem.io.numerics.value} may not round between butterflies (butterfly_carrier must be fp32)"
    if _has_butterflies(c, k) and not k.normalizes and (lacking := _lacking(c, Butterfly(reg(2)), PACKED)):
        return f"the arch has no {lacking} (butterfly_carrier must be fp32)"
    if k.low_bits != "mma":
        return "packed shuffles and butterflies round too often (butterfly_carrier must be fp32, or low_bits mma)"
    return None


@_rule("exchange_carrier")
def _(c: Context, k: Knobs) -> str | None:
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


@_rule("exchange_carrier")
def _(c: Context, k: Knobs) -> str | None:
    if _rounds_once(c, k):
        return None
    if roundings(steps_of(c.problem, k)) > c.problem.roundings + ROUNDINGS_SPREAD:
        return f"it rounds more often than {c.problem.io.numerics.value} may (take fp32 carriers)"
    return None


@_rule("exchange_carrier")
def _(c: Context, k: Knobs) -> str | None:
    if not turns_in_exchange(k):
        return None
    few = _far(c, k) - log2(k.chunks) > MMA_LANES["mma"]
    return "an mma of tf32 leaves room for three bits in lanes (chunks must be more)" if few else None


@_rule("exchange_carrier")
def _(c: Context, k: Knobs) -> str | None:
    if k.far_lanes not in MMA_LANES or k.exchange_carrier == PACKED or turns_in_exchange(k):
        return None
    lacking = _lacking(c, replace(FAR_MMA, operand="bfloat16"))
    return f"the arch has no {lacking} for fp32 in parts (exchange_carrier must be packed)" if lacking else None


@_rule("exchange_rounds")
def _(c: Context, k: Knobs) -> str | None:
    if k.exchange_rounds > 1 and turns_in_exchange(k):
        return "values that are turned on their way cross all at once (exchange_rounds must be 1)"
    if k.exchange_rounds > 1 and k.exchange_carrier == PACKED:
        return "only an fp32 exchange has two vectors a chunk to take in rounds (exchange_rounds must be 1)"
    return None


@_rule("shared_layout")
def _(c: Context, k: Knobs) -> str | None:
    conflicts = k.exchange_carrier == FP32 and k.exchange_rounds == 1
    if k.shared_layout != "linear" and not conflicts:
        return "one vector a lane meets no bank conflict (shared_layout must be linear)"
    return None


@_rule("order")
def _(c: Context, k: Knobs) -> str | None:
    if k.order != "by_step" and c.problem.io.form:
        return "what is quantized is stored at once (order must be by_step)"
    return "one chunk has no order (order must be by_step)" if k.order != "by_step" and k.chunks == 1 else None


@_rule("order")
def _(c: Context, k: Knobs) -> str | None:
    if k.order != "by_group":
        return None
    if k.cluster > 1 or k.exchange_rounds > 1 or not _has_exchange(c, k):
        return "there is no exchange within a block, of all vectors at once (order must be another)"
    far_mma = (FAR_MMA,) if k.far_lanes in MMA_LANES else ()
    first = Exchange(exchanges_of(c.problem, k)[0], k.exchange_carrier)  # where there is another, all chunks meet in it
    all_meet = mixed_chunk_bits((first, *far_mma)) >= log2(k.chunks)
    return "all chunks meet from the exchange on (order must be another, or chunks more)" if all_meet else None


@_rule("load")
def _(c: Context, k: Knobs) -> str | None:
    load = Load(k.load)
    if lacking := _lacking(c, load):
        return f"the arch has no {lacking} (load must be another)"
    if load.staged:
        if c.problem.n * c.problem.io.input.bytes < VECTOR_BYTES:
            return "rows shorter than 16 bytes cannot be copied asynchronously (load must be another)"
        if c.problem.io.rows is Rows.PITCHED:
            return "pitched rows cannot be copied as they lie (load must be another)"
    return None


@_rule("grid")
def _(c: Context, k: Knobs) -> str | None:
    # Clusters are the fastest if rows are few, and then there are no further tiles.
    loops = k.cluster > 1 and k.grid == "persistent"
    return "clusters take one tile each (grid must be tiles)" if loops else None


@_rule("ahead")
def _(c: Context, k: Knobs) -> str | None:
    if not k.ahead:
        return None
    if _lacking(c, Prefetch(k.ahead)):
        return "the arch has no bulk copies to L2 (ahead must be 0)"
    if c.problem.io.rows is Rows.PITCHED:
        return "pitched rows lie anywhere (ahead must be 0)"
    return "blocks that loop do not take tiles in order (ahead must be 0)" if k.grid == "persistent" else None


@_rule("trigger")
def _(c: Context, k: Knobs) -> str | None:
    if k.trigger == "end":
        return None
    if not c.arch.starts_early:
        return "the arch starts no kernel before the last one ends (trigger must be end)"
    # Clusters are the fastest if blocks are few. If blocks are many, those of the next kernel take their SMs.
    return "only few blocks leave room for the next kernel's (trigger must be end)" if k.cluster == 1 else None


@_rule("stages")
def _(c: Context, k: Knobs) -> str | None:
    alone = k.grid == "tiles" and k.stages > 1
    return "one tile a block leaves nothing to have under way (stages must be 1)" if alone else None


@_rule("min_blocks")
def _(c: Context, k: Knobs) -> str | None:
    return beyond_threads(c.arch.limits, 32 * _warps(c, k), k.min_blocks)


@_rule("min_blocks")
def _(c: Context, k: Knobs) -> str | None:
    limits, footprint = c.arch.limits, _footprint(c.problem, *_room_of(k))
    # All values are in fp32 at once if they cross shared memory in fp32, or are not rounded before the store.
    wide = k.exchange_carrier == FP32 or _rounds_once(c, k) or c.problem.io.form is not None
    registers = footprint.registers(wide=wide)
    if registers > c.registers(32 * _warps(c, k), k.min_blocks):
        return "a thread's values do not fit its registers (take fewer chunks, stages or min_blocks)"
    return beyond_shared(limits, footprint, k.min_blocks, "stages or warps")
