"""Plans of every structure: far bits in exchanges, wide values in mma, whole rows, and how often each rounds."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from plan_sample import FAR_LANES, changed, emulate, gathered, plans, whole_rows
from spaces import ARCH

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import compile_host
from hadagen.errors import UsageError
from hadagen.plan.knobs import Knobs
from hadagen.plan.layout import MMA_MOVES, PAIR, bit, lane, reg, warp
from hadagen.plan.legality import ROUNDINGS_SPREAD
from hadagen.plan.plan import Plan
from hadagen.plan.space import SHAPE, build_plan
from hadagen.plan.steps.base import FP16, PACKED, Step, mixed_chunk_bits, roundings
from hadagen.plan.steps.conversions import Correct, Narrow, Normalize, Round, Scale, Widen
from hadagen.plan.steps.exchanges import Exchange, Transpose
from hadagen.plan.steps.memory import Load, Prefetch, Store, Trigger
from hadagen.plan.steps.transforms import NORMALIZER, Butterfly, Gather, Mma, Shuffle, SwapButterfly
from hadagen.problem.bits import decode, encode
from hadagen.problem.problem import HADACORE_ERROR, ROUNDING_ERROR, DType, Numerics, Problem
from hadagen.truth.reference import hadamard, relative_error, verification_scale

# ---- bits of warps and blocks in an exchange -------------------------------------------------------------------------
# chunks, warps and blocks of a row, how blocks come together, and the chunk bits, from 0, that have a butterfly.
NEAR = [
    (2, 8, 1, "exchange", []),  # the one chunk bit is that of the mma
    (4, 8, 1, "exchange", [1]),
    (8, 8, 1, "exchange", [1, 2]),
    (2, 16, 1, "exchange", [0]),  # a fourth far bit takes its place
    (4, 16, 1, "exchange", [0, 1]),
    (4, 32, 1, "exchange", [0, 1]),
    (2, 8, 2, "exchange", [0]),  # the bit of blocks does
    (4, 8, 4, "exchange", [0, 1]),
    (4, 2, 16, "exchange", [0, 1]),
    (2, 8, 2, "load", []),  # the bit of blocks is not exchanged
    (4, 8, 4, "load", [1]),
    (4, 16, 2, "load", [0, 1]),
]


@pytest.mark.parametrize("carrier", ["split", "tf32"])
@pytest.mark.parametrize(("chunks", "warps", "cluster", "block_bits", "near"), NEAR)
def test_a_chunk_bit_waits_for_the_mma_of_far_bits_where_none_comes_to_its_place(
    chunks: int, warps: int, cluster: int, block_bits: str, near: list[int], carrier: str
) -> None:
    shape = Knobs(chunks, warps, cluster, block_bits=block_bits)
    tile = {name: getattr(shape, name) for name in (*SHAPE, "block_bits")}
    knobs = dataclasses.replace(FAR_LANES, **tile, mma_carrier=carrier)
    plan = build_plan(Problem.of(256 * chunks * warps * cluster, DType.BFLOAT16), knobs, ARCH)
    (at,) = [i for i, step in enumerate(plan.steps) if isinstance(step, Exchange)]
    assert [step.place for step in plan.steps[:at] if isinstance(step, Butterfly)] == [reg(2 + j) for j in near]
    exchange, far = plan.steps[at], plan.steps[at + 1]
    assert isinstance(exchange, Exchange)
    assert isinstance(far, Mma)
    assert sum(place.kind in ("lane", "pair") for place, _ in exchange.pairs) == 3
    # What a butterfly leaves there gives its place to a far bit, and only that.
    assert (reg(2) in dict(exchange.pairs)) == (0 in near)
    far_bits = {plan.placements[at - 1].axes[place] for _, place in exchange.pairs}
    taken = {plan.placements[at].axes[place] for place in far.places}
    assert len(taken & far_bits) == (4 if 0 in near else 3)


# chunks, warps and blocks, the far bits that come to lanes, and the chunk bits, from 0, that have a butterfly.
NEAR_TWO = [
    (2, 2, 1, 1, []),
    (2, 4, 1, 2, []),
    (4, 4, 1, 2, [1]),
    (2, 8, 1, 2, [0]),
    (4, 16, 1, 2, [0, 1]),
    (2, 4, 2, 2, [0]),
    (4, 2, 4, 1, [0, 1]),
]


@pytest.mark.parametrize(("chunks", "warps", "cluster", "lanes", "near"), NEAR_TWO)
def test_an_mma_takes_fewer_far_bits_and_leaves_the_others_at_its_places_as_they_are(
    chunks: int, warps: int, cluster: int, lanes: int, near: list[int]
) -> None:
    knobs = dataclasses.replace(FAR_LANES, chunks=chunks, warps=warps, cluster=cluster, far_lanes="mma_two")
    problem = Problem.of(256 * chunks * warps * cluster, DType.BFLOAT16)
    plan = build_plan(problem, dataclasses.replace(knobs, mma_carrier="split"), ARCH)
    (at,) = [i for i, step in enumerate(plan.steps) if isinstance(step, Exchange)]
    assert [step.place for step in plan.steps[:at] if isinstance(step, Butterfly)] == [reg(2 + j) for j in near]
    exchange, far = plan.steps[at], plan.steps[at + 1]
    assert isinstance(exchange, Exchange)
    assert {place for place, _ in exchange.pairs if place.kind == "lane"} == {lane(4 - i) for i in range(lanes)}
    assert far == Mma(2, "bfloat16", 2, turned=True, idle=3 - lanes)
    assert far.places == (*(lane(5 - lanes + i) for i in range(lanes)), reg(2))
    # The lowest lane bits, as many as are left, keep 128 bytes together or more.
    assert [plan.placements[-1].axes[lane(j)] for j in range(5 - lanes)] == [bit(3 + j) for j in range(5 - lanes)]


def test_an_idle_place_holds_a_bit_of_the_row_and_no_tf32() -> None:
    knobs = Knobs(chunks=2, warps=4, far_bits="lanes", far_lanes="mma_two")
    plan = build_plan(Problem.of(2048, DType.FLOAT16, Numerics.FAST), knobs, ARCH)
    far = next(i for i, step in enumerate(plan.steps) if isinstance(step, Mma) and step.turned)
    assert plan.describe()[far] == "mma reg2, turned, 1 idle: bits 10 9 8"
    for wrong in ({"idle": 3}, {"operand": "tf32", "parts": 1, "turned": False}):
        problem = plan.problem.with_io(input=DType.BFLOAT16, output=DType.BFLOAT16)
        steps = (*plan.steps[:far], dataclasses.replace(plan.steps[far], **wrong), *plan.steps[far + 1 :])
        with pytest.raises(UsageError, match="it transforms two bits at least, and leaves none as it is of a tf32"):
            dataclasses.replace(plan, problem=problem, steps=steps)
    # Two rows of 512 in a tile: which of them it is comes to lane2, where nothing is transformed.
    two_rows = Exchange(((lane(2), warp(0)),), PACKED)
    steps = (Load("plain"), Mma(0, factor=1), Round(), Transpose(), two_rows, Mma(2, turned=True, idle=1))
    with pytest.raises(UsageError, match=r"step 6 \(Mma\) .*: mixes bits beyond the row"):
        Plan(Problem.of(512, DType.FLOAT16, Numerics.FAST), 1, 1, 0, steps)


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ({"chunks": 16, "warps": 8}, 2),  # the mma of three far bits takes the lowest chunk bit
        ({"chunks": 8, "warps": 16}, 2),  # or a far bit in its place
        ({"chunks": 16, "warps": 4, "far_lanes": "mma_two"}, 2),
        ({"chunks": 4, "warps": 2, "far_bits": "registers", "far_lanes": "shuffle"}, 2),
        ({"chunks": 8, "warps": 4, "far_bits": "registers", "far_lanes": "shuffle"}, 4),
    ],
)
def test_groups_are_as_small_as_chunks_that_meet_from_the_exchange_on(shape: dict[str, Any], chunks: int) -> None:
    knobs = dataclasses.replace(FAR_LANES, mma_carrier="split", order="by_group", **shape)
    plan = build_plan(Problem.of(256 * knobs.chunks * knobs.warps, DType.BFLOAT16), knobs, ARCH)
    assert plan.group_chunks == chunks
    bits = encode(DType.BFLOAT16, np.random.default_rng(0).standard_normal((3, plan.problem.n)))
    out, report = emulate(plan, bits, 2**-6)
    assert (report.complaint, report.excess_sectors) == ("", 0)
    expected, _ = emulate(dataclasses.replace(plan, order="by_step"), bits, 2**-6)
    assert (out == expected).all()


@pytest.mark.parametrize(
    ("steps", "bits"),
    [
        ([Load("plain"), Mma(1), Butterfly(reg(1)), Shuffle(4), Store()], 0),
        ([Mma(0)], 0),
        ([Butterfly(reg(4)), Mma(2, turned=True)], 3),
        ([Mma(2, turned=True), Butterfly(PAIR)], 1),
        ([SwapButterfly(4, reg(3))], 2),
        ([Exchange(((lane(4), warp(0)), (reg(3), warp(1))), PACKED)], 2),
    ],
)
def test_chunks_meet_in_what_moves_or_transforms_a_bit_of_their_number(steps: list[Step], bits: int) -> None:
    assert mixed_chunk_bits(steps) == bits


def test_only_one_exchange_in_a_block_goes_group_by_group() -> None:
    wide = {"mma_carrier": "split", "butterfly_carrier": "fp32"}
    for knobs in (
        Knobs(4, 8, exchange_carrier="fp32", **wide),  # two
        Knobs(8, 4, exchange_carrier="fp32", exchange_rounds=2, **wide),
        Knobs(8, 2, 2, exchange_carrier="fp32", **wide),  # between blocks
        Knobs(8, **wide),  # none
    ):
        plan = build_plan(Problem.of(256 * knobs.chunks * knobs.warps * knobs.cluster, DType.BFLOAT16), knobs, ARCH)
        with pytest.raises(UsageError, match="only one exchange, of all vectors in a block, goes group by group"):
            dataclasses.replace(plan, order="by_group")
    knobs = Knobs(8, 8, far_bits="lanes", far_lanes="mma", butterfly_carrier="fp32", order="by_group")
    grouped = build_plan(Problem.of(16384, DType.FLOAT16, Numerics.FAST), knobs, ARCH)
    for asked in (Trigger(), Prefetch(4)):
        with pytest.raises(UsageError, match="what a tile asks for once has no place among groups"):
            changed(grouped, len(grouped.steps) - 1, asked, grouped.steps[-1])


# ---- values of more bits than an mma takes ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "carrier", "operand", "needed", "other"),
    [
        (DType.FLOAT32, "split", "bfloat16", 3, 2),
        (DType.FLOAT32, "tf32", "tf32", 2, 1),
        (DType.BFLOAT16, "split", "bfloat16", 2, 3),
        (DType.BFLOAT16, "tf32", "tf32", 1, 2),
        (DType.FLOAT16, "split", "bfloat16", 2, 3),
    ],
)
def test_mma_takes_fp32_in_as_many_parts_as_its_type_needs(
    dtype: DType, carrier: str, operand: str, needed: int, other: int
) -> None:
    plan = build_plan(Problem.of(256, dtype), Knobs(mma_carrier=carrier), ARCH)
    last = max(i for i, step in enumerate(plan.steps) if isinstance(step, Mma))
    factor = 0 if dtype is DType.FLOAT16 else 2
    assert plan.steps[last] == Mma(1, operand, needed, factor=factor)
    with pytest.raises(
        UsageError, match=rf"step {last + 1} \(Mma\) .*: takes values as {other} {operand} instead of {needed}"
    ):
        changed(plan, last, Mma(1, operand, other, factor=factor))
    with pytest.raises(UsageError, match="needs packed values but finds fp32"):
        changed(plan, last, Mma(1, factor=factor))


@pytest.mark.parametrize("parts", [1, 2])
def test_no_float16_goes_through_mma_as_tf32(parts: int) -> None:
    plan = build_plan(Problem.of(256, DType.FLOAT16), Knobs(mma_carrier="split"), ARCH)
    last = max(i for i, step in enumerate(plan.steps) if isinstance(step, Mma))
    with pytest.raises(UsageError, match=f"takes values as {parts} tf32 instead of another type"):
        changed(plan, last, Mma(1, "tf32", parts))


def test_nothing_is_transposed_as_tf32() -> None:
    knobs = Knobs(chunks=2, warps=16, far_bits="lanes", far_lanes="mma", mma_carrier="split", butterfly_carrier="fp32")
    plan = build_plan(Problem.of(8192, DType.BFLOAT16), dataclasses.replace(knobs, exchange_carrier="fp32"), ARCH)
    turned = next(i for i, step in enumerate(plan.steps) if isinstance(step, Mma) and step.turned)
    assert plan.steps[turned] == Mma(2, "bfloat16", 2, turned=True)
    with pytest.raises(UsageError, match="only 16-bit values are transposed"):
        changed(plan, turned, Mma(2, "tf32", 1, turned=True))


def test_values_are_turned_on_their_way_to_an_mma_of_tf32() -> None:
    knobs = Knobs(chunks=2, warps=16, far_bits="lanes", far_lanes="mma", mma_carrier="tf32", butterfly_carrier="fp32")
    plan = build_plan(Problem.of(8192, DType.BFLOAT16), dataclasses.replace(knobs, exchange_carrier="fp32"), ARCH)
    at = next(i for i, step in enumerate(plan.steps) if isinstance(step, Exchange))
    exchange = plan.steps[at]
    assert isinstance(exchange, Exchange)
    assert exchange.turned
    assert plan.steps[at + 1] == Mma(2, "tf32", 1)
    # What the last mma had brought back is moved once more on the way, for the next to bring it back.
    before, after, end = plan.placements[at - 1], plan.placements[at], plan.placements[at + 1]
    for near, other in MMA_MOVES.items():
        if near.kind != "lane" or near.index < 2:
            assert after.axes[other] == before.axes[near] == end.axes[near]
    assert {after.axes[place] for place in (PAIR, lane(0), lane(1), reg(2))} == {*map(bit, (9, 10, 11, 12))}
    for other in (dataclasses.replace(exchange, rounds=2), dataclasses.replace(exchange, carrier="packed")):
        with pytest.raises(UsageError, match="values that are turned on their way cross all at once, in fp32"):
            changed(plan, at, other)
    (_, *others), straight = exchange.pairs, dataclasses.replace(exchange, turned=False)
    for other in (straight, dataclasses.replace(exchange, pairs=tuple(others))):
        with pytest.raises(UsageError, match="the pair is swapped where values are turned"):
            changed(plan, at, other)


def test_what_one_tf32_loses_is_in_the_scale() -> None:
    def lifted(**values: Any) -> list[bool]:
        knobs = Knobs(chunks=2, warps=16, far_bits="lanes", butterfly_carrier="fp32", exchange_carrier="fp32", **values)
        plan = build_plan(Problem.of(8192, DType.BFLOAT16), knobs, ARCH)
        return [step.lifted for step in plan.steps if isinstance(step, Scale)]

    assert lifted(far_lanes="mma", mma_carrier="tf32") == [True]
    assert lifted(far_lanes="shuffle", mma_carrier="tf32") == [False]  # the scale comes after the cut
    assert lifted(far_lanes="mma", mma_carrier="split") == [False]


@pytest.mark.parametrize("far_lanes", ["shuffle", "mma"])
def test_the_scale_is_lifted_by_what_values_lose_in_the_mean_when_they_are_cut_off_after_it(far_lanes: str) -> None:
    """So results are too small by what the second mma cuts off alone, before the scale, and not by the third's too."""
    knobs = dataclasses.replace(FAR_LANES, chunks=2, warps=16, far_lanes=far_lanes, mma_carrier="tf32")
    plan = build_plan(Problem.of(8192, DType.BFLOAT16), knobs, ARCH)
    bits = encode(DType.BFLOAT16, np.random.default_rng(0).standard_normal((32, 8192)))
    out, _ = emulate(plan, bits, 2**-6)
    expected = hadamard(decode(DType.BFLOAT16, bits), 2**-6)
    gain = np.vdot(decode(DType.BFLOAT16, out), expected) / np.vdot(expected, expected) - 1
    assert gain == pytest.approx(-(2**-10) / 3, rel=0.15)


@pytest.mark.parametrize("far_lanes", ["shuffle", "mma"])
def test_a_value_of_11_bits_stays_as_it_is_lifted_and_cut_off(far_lanes: str) -> None:
    """And is rounded once: ties to even, which a little more or less would decide."""
    knobs = dataclasses.replace(FAR_LANES, chunks=2, warps=16, far_lanes=far_lanes, mma_carrier="tf32")
    plan = build_plan(Problem.of(8192, DType.BFLOAT16), knobs, ARCH)
    high, low = (8 * np.arange(128, 256)).repeat(8), np.tile(np.arange(8), 128)
    x = np.zeros((len(high), 8192))
    x[:, 3], x[:, 3 + 128] = high, low  # whose sums an mma takes that does not cut off
    out, _ = emulate(plan, encode(DType.BFLOAT16, x))
    np.testing.assert_array_equal(out, encode(DType.BFLOAT16, hadamard(x)))


# ---- whole rows ------------------------------------------------------------------------------------------------------
def test_a_multicast_brings_what_is_summed_over_blocks() -> None:
    plan = changed(whole_rows(), 0, Load("multicast"))
    assert plan.shares_loaded == 2
    assert plan.stage_bytes == 2 * 8192  # the whole row
    (exchange,) = plan.exchanges
    assert (
        plan.footprint.offset("slots") == plan.footprint.offset("stages") == 128
    )  # its slots take the place of the row
    assert plan.footprint.shared_bytes == 128 + plan.stage_bytes + 16 * (exchange.slot_bytes - 1024)
    of_four = Knobs(4, 2, 4, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    longer = build_plan(plan.problem, dataclasses.replace(of_four, load="multicast"), ARCH)
    assert longer.footprint.shared_bytes == 128 + longer.stage_bytes > 128 + 8 * longer.exchanges[0].slot_bytes


def test_shares_of_float32_are_gathered_once_and_scaled_then() -> None:
    plan = gathered()
    assert [type(step) for step in plan.steps[:3]] == [Load, Gather, Butterfly]
    assert Scale not in {type(step) for step in plan.steps}
    assert plan.describe()[1] == "sum over blocks, times the scale: bits 10"


def test_sums_over_blocks_are_not_scaled_by_factors_of_16_bits() -> None:
    """Which are made for sums of 16. What is taken of a whole scale may be as much smaller as there are blocks."""
    fast = build_plan(Problem.of(512, DType.FLOAT16, Numerics.FAST), Knobs(cluster=2, far_bits="lanes"), ARCH)
    with pytest.raises(UsageError, match="outgrow what a factor in 16 bits"):
        changed(fast, 1, dataclasses.replace(fast.steps[1], over_blocks=True))
    plan = whole_rows()
    assert [step.least_power(plan) for step in plan.steps if isinstance(step, Mma)] == [-5, -4]


# ---- roundings and the error that follows ----------------------------------------------------------------------------
# Where packed values are summed, and where fp32 is rounded, most where it is a sum of two rounded values; but not where
# values are moved, widened or summed in fp32.
LOAD, STORE, FLIP = Load("plain"), Store(), Butterfly(reg(0))
TURNED = Mma(2, accumulator=PACKED, turned=True)
EXCHANGE = Exchange(((reg(2), warp(0)),), PACKED)
NORMALIZED = Normalize(), Mma(0, factor=NORMALIZER), Narrow()


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([LOAD, STORE], 0.0),
        ([LOAD, Mma(0), Round(), STORE], 1.0),
        ([LOAD, Mma(0), Mma(1, "bfloat16", 2), Butterfly(reg(2)), Scale(), Round(), STORE], 1.0),
        ([LOAD, Mma(0), Mma(1, "tf32"), Butterfly(reg(2)), Scale(), Round(), STORE], 1.0625),
        ([LOAD, Mma(0), Round(), Mma(1), Round(), STORE], 2.0),
        ([LOAD, Mma(0, accumulator=PACKED), Mma(1, accumulator=PACKED), TURNED, STORE], 3.0),
        ([LOAD, Mma(0, accumulator=PACKED), Correct(), Widen(), FLIP, Round(), Transpose(), STORE], 2.25 + 0.17),
        ([LOAD, Mma(0), Round(), Transpose(), EXCHANGE, Widen(), FLIP, Shuffle(0), Round(), STORE], 2.05),
        ([LOAD, FLIP, Shuffle(0), EXCHANGE, FLIP, STORE], 3 * 1.15),
        ([LOAD, FLIP, Shuffle(0, widen=True), Shuffle(1), Round(), STORE], 1.15 + 1.05),
        ([LOAD, *NORMALIZED, Mma(1, FP16), Narrow(), Widen(), FLIP, Scale(), Round(), STORE], 1 + 2 / 64),
        ([LOAD, *NORMALIZED, Mma(1, FP16, accumulator=FP16), Widen(), FLIP, Scale(), Round(), STORE], 1 + 2 / 64),
        ([LOAD, *NORMALIZED, Mma(1, FP16), Narrow(), FLIP, Widen(), Scale(), Round(), STORE], 1 + 3.15 / 64),
        ([Load("plain", carrier="fp32"), FLIP, Mma(0, "bfloat16", 3), Scale(), STORE], 0.0),
        ([Load("plain", carrier="fp32"), Mma(0, "tf32", 2), Mma(1, "tf32", 2), Scale(), STORE], 0.0),
    ],
)
def test_roundings_are_those_of_packed_values(steps: list[Step], count: float) -> None:
    assert roundings(steps) == pytest.approx(count)


@given(plans([(dtype, Numerics.FAST) for dtype in HADACORE_ERROR]))
@settings(max_examples=100)
def test_fast_rounds_no_more_often_than_its_bound_lets_it(plan: Plan) -> None:
    problem, count = plan.problem, roundings(plan.steps)
    assert 1.0 <= count <= problem.roundings + ROUNDINGS_SPREAD
    assert ROUNDING_ERROR[problem.io.input] * math.sqrt(count) <= problem.error_bound


@given(plans([(dtype, Numerics.ACCURATE) for dtype in DType]))
@settings(max_examples=60)
def test_accurate_counts_one_rounding_and_what_a_tf32_or_a_float16_lacks(plan: Plan) -> None:
    tf32 = sum(isinstance(step, Mma) and step.operand == "tf32" for step in plan.steps)
    cut = tf32 if plan.problem.io.input is DType.BFLOAT16 else 0
    narrowed = sum(
        isinstance(step, Narrow) or (isinstance(step, Mma) and step.accumulator == FP16) for step in plan.steps
    )
    assert not (cut and narrowed)
    least = (plan.problem.io.input is not DType.FLOAT32) + cut / 16 + narrowed / 64
    assert least <= roundings(plan.steps) <= least + 0.17 * narrowed / 64


# n, type, and knobs: of each way to round one.
ROUNDING = [
    (64, DType.BFLOAT16, {"low_bits": "shuffle", "butterfly_carrier": "fp32"}),
    (256, DType.FLOAT16, {}),
    (256, DType.BFLOAT16, {}),
    (256, DType.BFLOAT16, {"mma_carrier": "tf32"}),
    (256, DType.FLOAT16, {"accumulator": "packed"}),
    (128, DType.FLOAT16, {"low_bits": "mma_shuffle", "accumulator": "packed", "butterfly_carrier": "fp32"}),
    (512, DType.FLOAT16, {"chunks": 2, "mma_carrier": "split"}),
    (512, DType.FLOAT16, {"chunks": 2}),
    (512, DType.FLOAT16, {"chunks": 2, "accumulator": "packed", "butterfly_carrier": "fp32"}),
    (4096, DType.BFLOAT16, {"far_bits": "lanes", "chunks": 2, "warps": 8, "butterfly_carrier": "fp32"}),
    (8192, DType.FLOAT16, {"far_bits": "lanes", "far_lanes": "mma", "mma_carrier": "split", "chunks": 2, "warps": 16}),
    (
        32768,
        DType.FLOAT16,
        {"far_bits": "lanes", "accumulator": "packed", "butterfly_carrier": "fp32", "chunks": 4, "warps": 32},
    ),
]


def errors_of(plans: Sequence[Plan]) -> list[float]:
    """Of normal values, emulated."""
    sources, errors = [render(plan) for plan in plans], []
    module = compile_host(sources)
    for plan, source in zip(plans, sources, strict=True):
        problem, scale = plan.problem, verification_scale(plan.problem)
        bits = encode(problem.io.input, np.random.default_rng(0).standard_normal(((1 << 17) // problem.n, problem.n)))
        out = np.zeros_like(bits)
        module.run(source.entry, plan.launch, bits, out, scale=scale)
        errors.append(relative_error(decode(problem.io.input, out), hadamard(decode(problem.io.input, bits), scale)))
    return errors


def test_the_error_is_that_of_as_many_roundings() -> None:
    some = [build_plan(Problem.of(n, dtype, Numerics.FAST), Knobs(**knobs), ARCH) for n, dtype, knobs in ROUNDING]
    assert {round(roundings(plan.steps), 2) for plan in some} == {1.0, 1.06, 2.0, 2.15, 2.25, 3.0, 3.15, 3.17, 4.05}
    for plan, error in zip(some, errors_of(some), strict=True):
        expected = ROUNDING_ERROR[plan.problem.io.input] * math.sqrt(roundings(plan.steps))
        assert error == pytest.approx(expected, rel=0.04), (plan.describe(), error / expected)


def test_a_tf32_lacks_a_sixteenth_of_a_rounding_of_a_bfloat16() -> None:
    """A little less: sums of 16 have few bits beyond those that it has."""
    problem = Problem.of(256, DType.BFLOAT16)
    parts, cut = errors_of([build_plan(problem, Knobs(mma_carrier=carrier), ARCH) for carrier in ("split", "tf32")])
    assert 0.75 / 16 < (cut / parts) ** 2 - 1 < 1 / 16


@pytest.mark.parametrize("change", [{}, {"accumulator": "packed"}, {"far_lanes": "mma"}])
def test_a_float16_lacks_a_64th_of_a_rounding_of_a_bfloat16(change: dict[str, str]) -> None:
    knobs = Knobs(2, 2, 8, far_bits="lanes", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    levels = dataclasses.replace(knobs, mma_carrier="fp16", exchange_carrier="packed", **change)
    plans = [build_plan(Problem.of(8192, DType.BFLOAT16), each, ARCH) for each in (knobs, levels)]
    parts, float16 = errors_of(plans)
    assert (float16 / parts) ** 2 == pytest.approx(roundings(plans[1].steps), abs=0.7 / 64)


def test_the_rounding_of_a_sum_of_four_rounded_values_counts_a_little_more() -> None:
    """As that of two butterflies does: an mma that leaves two of four bits as they are sums four values."""
    rounded = [Load("plain"), Mma(0), Round()]
    for steps, count in (
        ([Mma(2, turned=True, idle=2), Round()], 2.05),
        ([Widen(), Butterfly(reg(2)), Butterfly(reg(3)), Round()], 2.05),
        ([Mma(2, turned=True, idle=2, accumulator=PACKED)], 2.05),
        ([Mma(2, turned=True, idle=1), Round()], 2),
        ([Mma(2, turned=True), Round()], 2),
    ):
        assert roundings([*rounded, *steps]) == pytest.approx(count)
