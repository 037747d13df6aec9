"""Plans: what is legal computes the transform, and what would not is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import ARCH, families, space_of

from hadagen.bits import decode, encode
from hadagen.codegen import render
from hadagen.emulator import compile_host
from hadagen.errors import UsageError
from hadagen.knobs import Knobs
from hadagen.layout import LANE_BITS, MMA_MOVES, PAIR, cta, lane, reg, warp
from hadagen.legality import ROUNDINGS_SPREAD, SHAPE
from hadagen.plan import Plan, interpret
from hadagen.problem import HADACORE_ERROR, ROUNDING_ERROR, DType, Numerics, Problem
from hadagen.reference import hadamard, relative_error, verification_scale
from hadagen.space import build_plan
from hadagen.steps import (
    PACKED,
    Butterfly,
    Correct,
    Exchange,
    Gather,
    Load,
    Mma,
    Prefetch,
    Round,
    Scale,
    Shuffle,
    Step,
    Store,
    Transpose,
    Trigger,
    Widen,
    mixed_chunk_bits,
    roundings,
)

LANES = [lane(j) for j in range(LANE_BITS)]
# float32 has one contract, and pitched rows change no step.
KINDS = [(DType.FLOAT16, Numerics.FAST), (DType.FLOAT16, Numerics.ACCURATE), (DType.FLOAT32, Numerics.ACCURATE)]


@st.composite
def plans(draw: st.DrawFn, kinds: Sequence[tuple[DType, Numerics]] = KINDS) -> Plan:
    dtype, numerics = draw(st.sampled_from(kinds))
    problem = Problem(1 << draw(st.integers(1, 15)), dtype, numerics)
    wanted = {name: draw(st.sampled_from(values)) for name, values in ARCH.search.items()}
    return build_plan(problem, next(space_of(problem).nearest(wanted)), ARCH)


@pytest.mark.parametrize(("dtype", "numerics"), KINDS)
@pytest.mark.parametrize("log2_n", range(1, 16))
def test_every_n_equals_the_explicit_matrix(log2_n: int, dtype: DType, numerics: Numerics) -> None:
    """A plan of every tile shape and family, over a few rows of basis vectors and noise."""
    n, problem = 1 << log2_n, Problem(1 << log2_n, dtype, numerics)
    some = [build_plan(problem, knobs, ARCH) for knobs in families(problem, *SHAPE, "low_bits")]
    x = np.random.default_rng(log2_n).standard_normal((max(4, *(plan.rows_per_tile for plan in some)), n))
    picks = np.random.default_rng(log2_n).integers(0, n, 3)
    x[:3] = np.arange(n) == picks[:, None]
    expected = 0.5 * hadamard(x)
    expected[:3] = [[0.5 - bin(i & j).count("1") % 2 for j in range(n)] for i in picks]
    for plan in some:
        rows = max(plan.rows_per_tile, 4)
        out = interpret(plan, x[:rows], 0.5)
        np.testing.assert_array_equal(out[:3], expected[:3])
        np.testing.assert_allclose(out[3:], expected[3:rows], rtol=0, atol=1e-9 * n)


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "numerics"), KINDS[:2])
def test_blocks_that_load_whole_rows_sum_over_blocks_and_exchange_only_inside(
    dtype: DType, numerics: Numerics, cluster: int
) -> None:
    problem = Problem(8192, dtype, numerics)
    x = np.random.default_rng(cluster).standard_normal((3, problem.n))
    some = families(problem, "chunks", "warps", "low_bits", cluster=cluster, block_bits="load")
    assert {knobs.low_bits for knobs in some} == {"mma", "mma_shuffle"}
    for scale in (1.0, problem.n**-0.5):
        for plan in (build_plan(problem, knobs, ARCH) for knobs in some):
            np.testing.assert_allclose(interpret(plan, x, scale), hadamard(x, scale), rtol=0, atol=1e-10 * problem.n)
            assert plan.shares_loaded == cluster
            assert not plan.crosses_blocks
            blocks = " ".join(str(13 - bit) for bit in range(cluster.bit_length() - 1, 0, -1))
            first = next(line for line in plan.describe() if line.startswith("mma"))
            assert first.startswith(f"mma reg0, over blocks: bits 0 3 4 1 {blocks}")


@given(plans())
@settings(max_examples=60)
def test_each_bit_is_transformed_once_and_stored_where_it_belongs(plan: Plan) -> None:
    stored = plan.placements[-1]
    assert all(stored.bit_at(place) == plan.loaded.bit_at(place) for place in (PAIR, reg(0), reg(1)))
    neighbors = [lane(0)] if any(step.changes_lanes for step in plan.exchanges) else LANES
    assert all(stored.bit_at(place) == plan.loaded.bit_at(place) for place in neighbors)
    assert sorted(stored.places) == sorted(plan.loaded.places)
    named = [bits for line in plan.describe() for bits in re.findall(r": bits? ([\d ]+)", line)]
    assert sorted(int(bit) for bit in " ".join(named).split()) == list(range(plan.problem.log2_n))


@given(plans())
@settings(max_examples=60)
def test_accurate_rounds_once(plan: Plan) -> None:
    if plan.problem.numerics is Numerics.ACCURATE:
        kinds = [type(step) for step in plan.steps]
        assert kinds.count(Round) == (plan.problem.dtype is not DType.FLOAT32)
        if Round in kinds:
            assert not {Mma, Butterfly, Shuffle, Scale, Exchange} & set(kinds[kinds.index(Round) :])


# ---- how often it rounds ---------------------------------------------------------------------------------------------
# Where packed values are summed, and where fp32 is rounded, most where it is a sum of two rounded values; but not where
# values are moved, widened or summed in fp32.
LOAD, STORE, FLIP = Load("plain"), Store("plain"), Butterfly(reg(0))
TURNED = Mma(2, accumulator=PACKED, turned=True)
EXCHANGE = Exchange(((reg(2), warp(0)),), PACKED)


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
    assert ROUNDING_ERROR[problem.dtype] * math.sqrt(count) <= problem.error_bound


@given(plans([(dtype, Numerics.ACCURATE) for dtype in DType]))
@settings(max_examples=60)
def test_accurate_counts_one_rounding_and_what_a_tf32_lacks(plan: Plan) -> None:
    cut = plan.problem.dtype is DType.BFLOAT16 and any(
        isinstance(step, Mma) and step.operand == "tf32" for step in plan.steps
    )
    assert roundings(plan.steps) == (plan.problem.dtype is not DType.FLOAT32) + cut / 16


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
        bits = encode(problem.dtype, np.random.default_rng(0).standard_normal(((1 << 17) // problem.n, problem.n)))
        out = np.zeros_like(bits)
        module.run(source.entry, plan.launch, bits, out, scale=scale)
        errors.append(relative_error(decode(problem.dtype, out), hadamard(decode(problem.dtype, bits), scale)))
    return errors


def test_the_error_is_that_of_as_many_roundings() -> None:
    some = [build_plan(Problem(n, dtype, Numerics.FAST), Knobs(**knobs), ARCH) for n, dtype, knobs in ROUNDING]
    assert {round(roundings(plan.steps), 2) for plan in some} == {1.0, 1.06, 2.0, 2.15, 2.25, 3.0, 3.15, 3.17, 4.05}
    for plan, error in zip(some, errors_of(some), strict=True):
        expected = ROUNDING_ERROR[plan.problem.dtype] * math.sqrt(roundings(plan.steps))
        assert error == pytest.approx(expected, rel=0.04), (plan.describe(), error / expected)


def test_a_tf32_lacks_a_sixteenth_of_a_rounding_of_a_bfloat16() -> None:
    """A little less: sums of 16 have few bits beyond those that it has."""
    problem = Problem(256, DType.BFLOAT16)
    parts, cut = errors_of([build_plan(problem, Knobs(mma_carrier=carrier), ARCH) for carrier in ("split", "tf32")])
    assert 0.75 / 16 < (cut / parts) ** 2 - 1 < 1 / 16


# ---- what is refused -------------------------------------------------------------------------------------------------
def worked_example() -> Plan:
    """n = 4096 over 4 warps of 4 chunks, fast."""
    problem = Problem(4096, DType.FLOAT16, Numerics.FAST)
    return build_plan(problem, Knobs(chunks=4, warps=4, butterfly_carrier="fp32", exchange_carrier="fp32"), ARCH)


def changed(plan: Plan, index: int, *steps: object) -> Plan:
    return dataclasses.replace(plan, steps=(*plan.steps[:index], *steps, *plan.steps[index + 1 :]))


CORRECTED = Knobs(low_bits="mma_shuffle", accumulator="packed", butterfly_carrier="fp32")


def examples() -> list[Plan]:
    """Plans that have, together, every step that computes."""
    return [
        worked_example(),
        build_plan(Problem(128, DType.FLOAT16, Numerics.FAST), CORRECTED, ARCH),
        build_plan(Problem(8, DType.FLOAT32), Knobs(low_bits="shuffle", butterfly_carrier="fp32"), ARCH),
        build_plan(Problem(256, DType.FLOAT32), Knobs(mma_carrier="split"), ARCH),
        build_plan(Problem(256, DType.BFLOAT16), Knobs(mma_carrier="tf32"), ARCH),
        gathered(),
    ]


@pytest.mark.parametrize("kind", [Gather, Mma, Butterfly, Shuffle, Exchange, Scale, Correct, Round, Transpose])
def test_a_plan_without_one_of_its_steps_is_refused(kind: type) -> None:
    found = 0
    for plan in examples():
        for index, step in enumerate(plan.steps):
            if isinstance(step, kind):
                found += 1
                with pytest.raises(UsageError):
                    changed(plan, index)
    assert found


def test_only_where_the_order_of_tiles_is_known_is_one_prefetched() -> None:
    plan = build_plan(Problem(256, DType.FLOAT16), Knobs(mma_carrier="split", ahead=4), ARCH)
    assert [type(step) for step in plan.steps[:2]] == [Load, Prefetch]
    assert plan.tiles_ahead(Prefetch(4)) == 4 << 20 >> 9
    assert plan.tiles_ahead(Prefetch(1)) == plan.tiles_ahead(Prefetch(4)) // 4
    with pytest.raises(UsageError, match="the order of tiles"):
        dataclasses.replace(plan, persistent=True)
    with pytest.raises(UsageError, match="the order of tiles"):
        dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, pitched=True))
    whole_rows = Knobs(chunks=8, warps=8, cluster=2, block_bits="load", mma_carrier="split", butterfly_carrier="fp32")
    large = dataclasses.replace(whole_rows, exchange_carrier="fp32", ahead=4)
    assert build_plan(Problem(1 << 15, DType.FLOAT16), large, ARCH).shares_loaded == 2


def test_the_scale_is_multiplied_once() -> None:
    plan = worked_example()
    first = next(i for i, step in enumerate(plan.steps) if isinstance(step, Mma))
    with pytest.raises(UsageError, match="by the scale once"):
        changed(plan, first, dataclasses.replace(plan.steps[first], factor=2))
    with pytest.raises(UsageError, match="by the scale once"):
        changed(plan, first, dataclasses.replace(plan.steps[first], factor=0))


def test_what_would_be_computed_twice_or_displaced_is_refused() -> None:
    plan = worked_example()
    first = next(i for i, step in enumerate(plan.steps) if isinstance(step, Butterfly))
    with pytest.raises(UsageError, match="a second time"):
        changed(plan, first, plan.steps[first], plan.steps[first])
    with pytest.raises(UsageError, match="whole 16-byte vectors"):
        changed(plan, len(plan.steps) - 1, Transpose(), plan.steps[-1])
    exchange = next(i for i, step in enumerate(plan.steps) if isinstance(step, Exchange))
    with pytest.raises(UsageError):
        changed(plan, exchange, Exchange(((reg(2), warp(0)),), "packed"))


def test_no_butterfly_is_between_the_packed_values_of_a_pair() -> None:
    plan = build_plan(Problem(512, DType.FLOAT16, Numerics.FAST), Knobs(chunks=2), ARCH)
    packed = next(i for i, step in enumerate(plan.steps) if isinstance(step, Butterfly))
    assert plan.carriers[packed] == PACKED
    with pytest.raises(UsageError, match="needs fp32 values but finds packed"):
        changed(plan, packed, plan.steps[packed], Butterfly(PAIR))


def test_accurate_refuses_a_round_between_steps() -> None:
    fast = build_plan(Problem(256, DType.FLOAT16, Numerics.FAST), Knobs(), ARCH)
    with pytest.raises(UsageError, match="rounds once"):
        dataclasses.replace(fast, problem=Problem(256, DType.FLOAT16, Numerics.ACCURATE))


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
    plan = build_plan(Problem(256, dtype), Knobs(mma_carrier=carrier), ARCH)
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
    plan = build_plan(Problem(256, DType.FLOAT16), Knobs(mma_carrier="split"), ARCH)
    last = max(i for i, step in enumerate(plan.steps) if isinstance(step, Mma))
    with pytest.raises(UsageError, match=f"takes values as {parts} tf32 instead of another type"):
        changed(plan, last, Mma(1, "tf32", parts))


def test_nothing_is_transposed_as_tf32() -> None:
    knobs = Knobs(chunks=2, warps=16, far_bits="lanes", far_lanes="mma", mma_carrier="split", butterfly_carrier="fp32")
    plan = build_plan(Problem(8192, DType.BFLOAT16), dataclasses.replace(knobs, exchange_carrier="fp32"), ARCH)
    turned = next(i for i, step in enumerate(plan.steps) if isinstance(step, Mma) and step.turned)
    assert plan.steps[turned] == Mma(2, "bfloat16", 2, turned=True)
    with pytest.raises(UsageError, match="only 16-bit values are transposed"):
        changed(plan, turned, Mma(2, "tf32", 1, turned=True))


def test_values_are_turned_on_their_way_to_an_mma_of_tf32() -> None:
    knobs = Knobs(chunks=2, warps=16, far_bits="lanes", far_lanes="mma", mma_carrier="tf32", butterfly_carrier="fp32")
    plan = build_plan(Problem(8192, DType.BFLOAT16), dataclasses.replace(knobs, exchange_carrier="fp32"), ARCH)
    at = next(i for i, step in enumerate(plan.steps) if isinstance(step, Exchange))
    exchange = plan.steps[at]
    assert isinstance(exchange, Exchange)
    assert exchange.turned
    assert plan.steps[at + 1] == Mma(2, "tf32", 1)
    # What the last mma had brought back is moved once more on the way, for the next to bring it back.
    before, after, end = plan.placements[at - 1], plan.placements[at], plan.placements[at + 1]
    for near, other in MMA_MOVES.items():
        if near.kind != "lane" or near.index < 2:
            assert after.bit_at(other) == before.bit_at(near) == end.bit_at(near)
    assert {after.bit_at(place) for place in (PAIR, lane(0), lane(1), reg(2))} == {9, 10, 11, 12}
    for other in (dataclasses.replace(exchange, rounds=2), dataclasses.replace(exchange, carrier="packed")):
        with pytest.raises(UsageError, match="only all fp32 values at once are turned"):
            changed(plan, at, other)
    (_, *others), straight = exchange.pairs, dataclasses.replace(exchange, turned=False)
    for other in (straight, dataclasses.replace(exchange, pairs=tuple(others))):
        with pytest.raises(UsageError, match="the pair is swapped where values are turned"):
            changed(plan, at, other)


FAR_LANES = Knobs(far_bits="lanes", far_lanes="mma", butterfly_carrier="fp32", exchange_carrier="fp32")


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
    shape = Knobs(chunks, warps, cluster, block_bits)
    tile = {name: getattr(shape, name) for name in (*SHAPE, "block_bits")}
    knobs = dataclasses.replace(FAR_LANES, **tile, mma_carrier=carrier)
    plan = build_plan(Problem(256 * chunks * warps * cluster, DType.BFLOAT16), knobs, ARCH)
    (at,) = [i for i, step in enumerate(plan.steps) if isinstance(step, Exchange)]
    assert [step.place for step in plan.steps[:at] if isinstance(step, Butterfly)] == [reg(2 + j) for j in near]
    exchange, far = plan.steps[at], plan.steps[at + 1]
    assert isinstance(exchange, Exchange)
    assert isinstance(far, Mma)
    assert sum(place.kind in ("lane", "pair") for place, _ in exchange.pairs) == 3
    # What a butterfly leaves there gives its place to a far bit, and only that.
    assert (reg(2) in dict(exchange.pairs)) == (0 in near)
    far_bits = {plan.placements[at - 1].bit_at(place) for _, place in exchange.pairs}
    taken = {plan.placements[at].bit_at(place) for place in far.places}
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
    problem = Problem(256 * chunks * warps * cluster, DType.BFLOAT16)
    plan = build_plan(problem, dataclasses.replace(knobs, mma_carrier="split"), ARCH)
    (at,) = [i for i, step in enumerate(plan.steps) if isinstance(step, Exchange)]
    assert [step.place for step in plan.steps[:at] if isinstance(step, Butterfly)] == [reg(2 + j) for j in near]
    exchange, far = plan.steps[at], plan.steps[at + 1]
    assert isinstance(exchange, Exchange)
    assert {place for place, _ in exchange.pairs if place.kind == "lane"} == {lane(4 - i) for i in range(lanes)}
    assert far == Mma(2, "bfloat16", 2, turned=True, idle=3 - lanes)
    assert far.places == (*(lane(5 - lanes + i) for i in range(lanes)), reg(2))
    # The lowest lane bits, as many as are left, keep 128 bytes together or more.
    assert [plan.placements[-1].bit_at(lane(j)) for j in range(5 - lanes)] == [3 + j for j in range(5 - lanes)]


def test_an_idle_place_holds_a_bit_of_the_row_and_no_tf32() -> None:
    knobs = Knobs(chunks=2, warps=4, far_bits="lanes", far_lanes="mma_two")
    plan = build_plan(Problem(2048, DType.FLOAT16, Numerics.FAST), knobs, ARCH)
    far = next(i for i, step in enumerate(plan.steps) if isinstance(step, Mma) and step.turned)
    assert plan.describe()[far] == "mma reg2, turned, 1 idle: bits 10 9 8"
    for wrong in ({"idle": 3}, {"operand": "tf32", "parts": 1, "turned": False}):
        problem = dataclasses.replace(plan.problem, dtype=DType.BFLOAT16)
        steps = (*plan.steps[:far], dataclasses.replace(plan.steps[far], **wrong), *plan.steps[far + 1 :])
        with pytest.raises(UsageError, match="it transforms two bits at least, and leaves none as it is of a tf32"):
            dataclasses.replace(plan, problem=problem, steps=steps)
    # Two rows of 512 in a tile: which of them it is comes to lane2, where nothing is transformed.
    two_rows = Exchange(((lane(2), warp(0)),), PACKED)
    steps = (Load("plain"), Mma(0, factor=1), Round(), Transpose(), two_rows, Mma(2, turned=True, idle=1))
    with pytest.raises(UsageError, match=r"step 6 \(Mma\) .*: mixes bits beyond the row"):
        Plan(Problem(512, DType.FLOAT16, Numerics.FAST), 1, 1, 0, steps)


def test_the_rounding_of_a_sum_of_four_rounded_values_counts_a_little_more() -> None:
    """As that of two butterflies does: an mma that leaves two of four bits as they are sums four values."""
    rounded = [Load("plain"), Mma(0), Round()]
    assert roundings([*rounded, Mma(2, turned=True, idle=2), Round()]) == pytest.approx(2.05)
    assert roundings([*rounded, Widen(), Butterfly(reg(2)), Butterfly(reg(3)), Round()]) == pytest.approx(2.05)
    assert roundings([*rounded, Mma(2, turned=True, idle=2, accumulator=PACKED)]) == pytest.approx(2.05)
    assert roundings([*rounded, Mma(2, turned=True, idle=1), Round()]) == 2
    assert roundings([*rounded, Mma(2, turned=True), Round()]) == 2


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
    plan = build_plan(Problem(256 * knobs.chunks * knobs.warps, DType.BFLOAT16), knobs, ARCH)
    assert plan.group_chunks == chunks
    source = render(plan)
    module = compile_host([source])
    bits = encode(DType.BFLOAT16, np.random.default_rng(0).standard_normal((3, plan.problem.n)))
    out = np.zeros_like(bits)
    report = module.run(source.entry, plan.launch, bits, out, scale=2**-6)
    assert (report.complaint, report.excess_sectors) == ("", 0)
    by_step = render(dataclasses.replace(plan, order="by_step"))
    expected = np.zeros_like(bits)
    compile_host([by_step]).run(by_step.entry, plan.launch, bits, expected, scale=2**-6)
    assert (out == expected).all()


def test_chunks_meet_in_what_moves_or_transforms_a_bit_of_their_number() -> None:
    assert mixed_chunk_bits([Load("plain"), Mma(1), Butterfly(reg(1)), Shuffle(4), Store("plain")]) == 0
    assert mixed_chunk_bits([Mma(0)]) == 0
    assert mixed_chunk_bits([Butterfly(reg(4)), Mma(2, turned=True)]) == 3
    assert mixed_chunk_bits([Mma(2, turned=True), Butterfly(PAIR)]) == 1
    assert mixed_chunk_bits([Exchange(((lane(4), warp(0)), (reg(3), warp(1))), PACKED)]) == 2


def test_only_one_exchange_in_a_block_goes_group_by_group() -> None:
    wide = {"mma_carrier": "split", "butterfly_carrier": "fp32"}
    for knobs in (
        Knobs(4, 8, exchange_carrier="fp32", **wide),  # two
        Knobs(8, 4, exchange_carrier="fp32", exchange_rounds=2, **wide),
        Knobs(8, 2, 2, exchange_carrier="fp32", **wide),  # between blocks
        Knobs(8, **wide),  # none
    ):
        plan = build_plan(Problem(256 * knobs.chunks * knobs.warps * knobs.cluster, DType.BFLOAT16), knobs, ARCH)
        with pytest.raises(UsageError, match="only one exchange, of all vectors in a block, goes group by group"):
            dataclasses.replace(plan, order="by_group")
    plan = worked_example()
    with pytest.raises(UsageError, match="all chunks meet from the exchange on"):
        dataclasses.replace(plan, order="by_group")
    with pytest.raises(UsageError, match="order 'by_tile' is not known; choose from by_step, by_chunk, by_group"):
        dataclasses.replace(plan, order="by_tile")
    knobs = Knobs(8, 8, far_bits="lanes", far_lanes="mma", butterfly_carrier="fp32", order="by_group")
    grouped = build_plan(Problem(16384, DType.FLOAT16, Numerics.FAST), knobs, ARCH)
    for asked in (Trigger(), Prefetch(4)):
        with pytest.raises(UsageError, match="what a tile asks for once has no place among groups"):
            changed(grouped, len(grouped.steps) - 1, asked, grouped.steps[-1])


def test_what_one_tf32_loses_is_in_the_scale() -> None:
    def lifted(**values: Any) -> list[bool]:
        knobs = Knobs(chunks=2, warps=16, far_bits="lanes", butterfly_carrier="fp32", exchange_carrier="fp32", **values)
        plan = build_plan(Problem(8192, DType.BFLOAT16), knobs, ARCH)
        return [step.lifted for step in plan.steps if isinstance(step, Scale)]

    assert lifted(far_lanes="mma", mma_carrier="tf32") == [True]
    assert lifted(far_lanes="shuffle", mma_carrier="tf32") == [False]  # the scale comes after the cut
    assert lifted(far_lanes="mma", mma_carrier="split") == [False]


@pytest.mark.parametrize("far_lanes", ["shuffle", "mma"])
def test_the_scale_is_lifted_by_what_values_lose_in_the_mean_when_they_are_cut_off_after_it(far_lanes: str) -> None:
    """So results are too small by what the second mma cuts off alone, before the scale, and not by the third's too."""
    knobs = dataclasses.replace(FAR_LANES, chunks=2, warps=16, far_lanes=far_lanes, mma_carrier="tf32")
    plan = build_plan(Problem(8192, DType.BFLOAT16), knobs, ARCH)
    bits = encode(DType.BFLOAT16, np.random.default_rng(0).standard_normal((32, 8192)))
    out, source = np.zeros_like(bits), render(plan)
    compile_host([source]).run(source.entry, plan.launch, bits, out, scale=2**-6)
    expected = hadamard(decode(DType.BFLOAT16, bits), 2**-6)
    gain = np.vdot(decode(DType.BFLOAT16, out), expected) / np.vdot(expected, expected) - 1
    assert gain == pytest.approx(-(2**-10) / 3, rel=0.15)


@pytest.mark.parametrize("far_lanes", ["shuffle", "mma"])
def test_a_value_of_11_bits_stays_as_it_is_lifted_and_cut_off(far_lanes: str) -> None:
    """And is rounded once: ties to even, which a little more or less would decide."""
    knobs = dataclasses.replace(FAR_LANES, chunks=2, warps=16, far_lanes=far_lanes, mma_carrier="tf32")
    plan = build_plan(Problem(8192, DType.BFLOAT16), knobs, ARCH)
    high, low = (8 * np.arange(128, 256)).repeat(8), np.tile(np.arange(8), 128)
    x = np.zeros((len(high), 8192))
    x[:, 3], x[:, 3 + 128] = high, low  # whose sums an mma takes that does not cut off
    bits = encode(DType.BFLOAT16, x)
    out, source = np.zeros_like(bits), render(plan)
    compile_host([source]).run(source.entry, plan.launch, bits, out, scale=1.0)
    np.testing.assert_array_equal(out, encode(DType.BFLOAT16, hadamard(x)))


def whole_rows() -> Plan:
    """n = 8192 over 2 blocks of 4 warps of 4 chunks."""
    knobs = Knobs(4, 4, 2, "load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    return build_plan(Problem(8192, DType.BFLOAT16), knobs, ARCH)


def test_the_bits_of_blocks_are_summed_over_once() -> None:
    plan = whole_rows()
    over = plan.steps[1]
    assert over == Mma(0, factor=1, over_blocks=True)
    with pytest.raises(UsageError, match=r"index bits \[12\] are never transformed"):
        changed(plan, 1, Mma(0, factor=1))
    butterfly = next(i for i, step in enumerate(plan.steps) if isinstance(step, Butterfly))
    with pytest.raises(UsageError, match="only what each block has loaded"):
        changed(plan, butterfly, dataclasses.replace(over, reg=2))
    with pytest.raises(UsageError, match="are not exchanged between them"):
        changed(plan, len(plan.steps) - 1, Exchange(((reg(2), cta(0)),), PACKED), plan.steps[-1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"operand": "bfloat16", "parts": 2}, "only packed values are summed over blocks"),
        ({"accumulator": PACKED}, "only packed values are summed over blocks"),
        ({"turned": True}, "only packed values are summed over blocks"),
        ({"factor": 0}, "by the scale once"),
    ],
)
def test_only_packed_values_as_they_lie_are_summed_over_blocks(change: dict[str, object], why: str) -> None:
    plan = whole_rows()
    with pytest.raises(UsageError, match=why):
        changed(plan, 1, dataclasses.replace(plan.steps[1], **change))


@pytest.mark.parametrize("load", [Load("bulk"), Load("cp_async"), Load("plain", stages=2)])
def test_only_what_each_block_has_loaded_is_summed_over_blocks(load: Load) -> None:
    with pytest.raises(UsageError, match="only what each block has loaded, straight to registers or by multicast"):
        changed(whole_rows(), 0, load)


def test_a_multicast_brings_what_is_summed_over_blocks() -> None:
    plan = changed(whole_rows(), 0, Load("multicast"))
    assert plan.shares_loaded == 2
    assert plan.stage_bytes == 2 * 8192  # the whole row
    (exchange,) = plan.exchanges
    assert plan.exchange_offset(exchange) == plan.stages_offset == 128  # its slots take the place of the row
    assert plan.shared_bytes == 128 + plan.stage_bytes + 16 * (exchange.slot_bytes - 1024)
    of_four = Knobs(4, 2, 4, "load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    longer = build_plan(plan.problem, dataclasses.replace(of_four, load="multicast"), ARCH)
    assert longer.shared_bytes == 128 + longer.stage_bytes > 128 + 8 * longer.exchanges[0].slot_bytes
    with pytest.raises(UsageError, match="no step needs the shares of other blocks"):
        changed(build_plan(Problem(256, DType.BFLOAT16), Knobs(mma_carrier="split"), ARCH), 0, Load("multicast"))
    float32_rows = gathered()
    with pytest.raises(UsageError, match="it finds what a multicast has brought"):
        changed(float32_rows, 0, dataclasses.replace(float32_rows.load, path="plain"))


def gathered() -> Plan:
    """n = 2048 of float32 over 2 blocks of 4 warps, whose shares are summed from shared memory."""
    knobs = Knobs(1, 4, 2, "load", "lanes", low_bits="shuffle", butterfly_carrier="fp32", exchange_carrier="fp32")
    return build_plan(Problem(2048, DType.FLOAT32), dataclasses.replace(knobs, load="multicast"), ARCH)


def test_shares_of_float32_are_gathered_once_and_scaled_then() -> None:
    plan = gathered()
    assert [type(step) for step in plan.steps[:3]] == [Load, Gather, Butterfly]
    assert Scale not in {type(step) for step in plan.steps}
    assert plan.describe()[1] == "sum over blocks, times the scale: bits 10"
    with pytest.raises(UsageError, match=r"index bits \[10\] are never transformed"):
        changed(plan, 1, Scale())
    with pytest.raises(UsageError, match="by the scale once"):
        changed(plan, len(plan.steps) - 1, Scale(), plan.steps[-1])
    with pytest.raises(UsageError, match="only what each block has loaded"):
        changed(plan, 1, plan.steps[2], plan.steps[1])


@pytest.mark.parametrize(("trigger", "at"), [("load", 1), ("store", -2)])
def test_the_next_kernel_may_start_after_the_load_or_before_the_store(trigger: str, at: int) -> None:
    knobs = Knobs(4, 4, 2, "load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32", ahead=4)
    plan = build_plan(Problem(8192, DType.BFLOAT16), dataclasses.replace(knobs, trigger=trigger), ARCH)
    assert [i for i, step in enumerate(plan.steps) if step == Trigger()] == [at % len(plan.steps)]
    assert isinstance(plan.steps[0], Load)
    assert isinstance(plan.steps[-1], Store)
    assert sum(isinstance(step, Prefetch) for step in plan.steps) == 1
    why = "the next kernel is let start once, after the load, and not in a loop"
    alone = build_plan(Problem(256, DType.FLOAT16), Knobs(mma_carrier="split"), ARCH)
    steps = list(alone.steps)
    for wrong in ([Trigger(), *steps], [steps[0], Trigger(), Trigger(), *steps[1:]]):
        with pytest.raises(UsageError, match=why):
            dataclasses.replace(alone, steps=tuple(wrong))
    with pytest.raises(UsageError, match=why):
        dataclasses.replace(alone, steps=(steps[0], Trigger(), *steps[1:]), persistent=True)


def test_one_block_has_no_others_to_sum_over() -> None:
    plan = build_plan(Problem(256, DType.BFLOAT16), Knobs(mma_carrier="split"), ARCH)
    with pytest.raises(UsageError, match="there is one block"):
        changed(plan, 1, dataclasses.replace(plan.steps[1], over_blocks=True))


def test_sums_over_blocks_are_not_scaled_by_factors_of_16_bits() -> None:
    """Which are made for sums of 16. What is taken of a whole scale may be as much smaller as there are blocks."""
    fast = build_plan(Problem(512, DType.FLOAT16, Numerics.FAST), Knobs(cluster=2, far_bits="lanes"), ARCH)
    with pytest.raises(UsageError, match="outgrow what a factor in 16 bits"):
        changed(fast, 1, dataclasses.replace(fast.steps[1], over_blocks=True))
    plan = whole_rows()
    assert [plan.least_power(step) for step in plan.steps if isinstance(step, Mma)] == [-5, -4]


def test_equal_plans_have_equal_digests_and_others_do_not() -> None:
    plan = worked_example()
    assert plan.digest == worked_example().digest
    assert plan.digest != dataclasses.replace(plan, min_blocks=2).digest
