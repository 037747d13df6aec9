"""Plans: that they compute the transform, and which are refused."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from plan_sample import KINDS, changed, gathered, plans, worked_example
from spaces import ARCH, families

from hadagen.errors import UsageError
from hadagen.knobs import Knobs
from hadagen.layout import LANE_BITS, PAIR, bit, lane, reg, warp
from hadagen.plan import Plan, interpret
from hadagen.problem import DType, Numerics, Problem, Rows
from hadagen.reference import hadamard
from hadagen.space import SHAPE, build_plan
from hadagen.steps.base import FP16, FP32, PACKED
from hadagen.steps.conversions import Correct, Narrow, Normalize, Round, Scale, Widen
from hadagen.steps.exchanges import Exchange, Transpose
from hadagen.steps.memory import Load, Prefetch, Store, Trigger
from hadagen.steps.transforms import Butterfly, Gather, Mma, Shuffle, SwapButterfly

LANES = [lane(j) for j in range(LANE_BITS)]


@pytest.mark.parametrize(("dtype", "numerics"), KINDS)
@pytest.mark.parametrize("log2_n", range(1, 16))
def test_every_n_equals_the_explicit_matrix(log2_n: int, dtype: DType, numerics: Numerics) -> None:
    """A plan of every tile shape and family, over a few rows of basis vectors and noise."""
    n, problem = 1 << log2_n, Problem.of(1 << log2_n, dtype, numerics)
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
    problem = Problem.of(8192, dtype, numerics)
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
    assert all(stored.axes[place] == plan.loaded.axes[place] for place in plan.vector_places)
    swaps = any(isinstance(step, SwapButterfly) for step in plan.steps)
    # A lane has the other half of each sector of 32 bytes, unless the only lane bit of a row was swapped to a register.
    swaps_sectors = swaps and plan.problem.n == 2 * plan.vector_elements
    assert [*stored.axes][len(plan.vector_places)].kind == "lane" or swaps_sectors
    moves_lanes = swaps or any(getattr(step, "changes_lanes", False) for step in plan.steps)
    assert moves_lanes or all(stored.axes[place] == plan.loaded.axes[place] for place in LANES)
    assert sorted(stored.axes) == sorted(plan.loaded.axes)
    named = [bits for line in plan.describe() for bits in re.findall(r": bits? ([\d ]+)", line)]
    assert sorted(int(bit) for bit in " ".join(named).split()) == list(range(plan.problem.bits))


@given(plans())
@settings(max_examples=60)
def test_accurate_rounds_once(plan: Plan) -> None:
    if plan.problem.io.numerics is Numerics.ACCURATE:
        kinds = [type(step) for step in plan.steps]
        assert kinds.count(Round) == (plan.problem.io.input is not DType.FLOAT32)
        if Round in kinds:
            rest = set(kinds[kinds.index(Round) :])
            assert not {Mma, Butterfly, Shuffle, SwapButterfly, Scale, Exchange} & rest


def test_a_swapped_lane_bit_comes_to_the_register_and_what_was_there_goes_to_the_lane() -> None:
    knobs = Knobs(2, 8, far_bits="lanes", low_bits="shuffle", shuffles="half")
    plan = build_plan(
        Problem.of(4096, DType.FLOAT32),
        dataclasses.replace(knobs, butterfly_carrier="fp32", exchange_carrier="fp32"),
        ARCH,
    )
    after = dict(zip(plan.describe(), plan.placements, strict=True))
    assert [line for line in after if line.startswith("swap")] == [
        *(f"swap lane{j}↔reg1, then butterfly: bit {2 + j}" for j in range(5)),
        "swap lane0↔reg1, then butterfly: bit 10",
        "swap lane4↔reg1, then butterfly: bit 11",
    ]
    low = after["swap lane4↔reg1, then butterfly: bit 6"]
    assert [low.axes[place] for place in (reg(1), *LANES)] == [*map(bit, (6, 7, 2, 3, 4, 5))]
    # The lanes that give theirs for far bits are the one without a neighbor, and the highest.
    assert "exchange reg2↔warp0, lane0↔warp1, lane4↔warp2 through shared memory: fp32, linear" in after
    assert [plan.placements[-1].axes[place] for place in (reg(1), *LANES)] == [*map(bit, (11, 6, 2, 3, 4, 10))]


def normalized() -> Plan:
    """n = 4096 over 2 blocks of 2 warps of 4 chunks, with levels."""
    knobs = Knobs(4, 2, 2, mma_carrier="fp16", butterfly_carrier="fp32")
    return build_plan(Problem.of(4096, DType.BFLOAT16), knobs, ARCH)


CORRECTED = Knobs(low_bits="mma_shuffle", accumulator="packed", butterfly_carrier="fp32")


def examples() -> list[Plan]:
    """Plans that have, together, every step that computes."""
    return [
        worked_example(),
        build_plan(Problem.of(128, DType.FLOAT16, Numerics.FAST), CORRECTED, ARCH),
        build_plan(Problem.of(8, DType.FLOAT32), Knobs(low_bits="shuffle", butterfly_carrier="fp32"), ARCH),
        build_plan(Problem.of(256, DType.FLOAT32), Knobs(mma_carrier="split"), ARCH),
        build_plan(Problem.of(256, DType.BFLOAT16), Knobs(mma_carrier="tf32"), ARCH),
        gathered(),
        normalized(),
    ]


KINDS = [Normalize, Gather, Mma, Butterfly, Shuffle, Exchange, Scale, Correct, Narrow, Widen, Round, Transpose]


@pytest.mark.parametrize("kind", KINDS)
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
    plan = build_plan(Problem.of(256, DType.FLOAT16), Knobs(mma_carrier="split", ahead=8), ARCH)
    assert [type(step) for step in plan.steps[:2]] == [Load, Prefetch]
    assert Prefetch(8).tiles_ahead(plan) == 8 << 20 >> 9
    assert Prefetch(1).tiles_ahead(plan) == Prefetch(8).tiles_ahead(plan) // 8
    with pytest.raises(UsageError, match="do not take tiles in order"):
        dataclasses.replace(plan, persistent=True)
    with pytest.raises(UsageError, match="pitched rows lie anywhere"):
        dataclasses.replace(plan, problem=plan.problem.with_io(rows=Rows.PITCHED))
    whole_rows = Knobs(chunks=8, warps=8, cluster=2, block_bits="load", mma_carrier="split", butterfly_carrier="fp32")
    large = dataclasses.replace(whole_rows, exchange_carrier="fp32", ahead=8)
    assert build_plan(Problem.of(1 << 15, DType.FLOAT16), large, ARCH).shares_loaded == 2


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
    float32 = build_plan(Problem.of(8, DType.FLOAT32), Knobs(low_bits="shuffle", butterfly_carrier="fp32"), ARCH)
    across = float32.steps.index(Shuffle(0))
    changed(float32, across, SwapButterfly(0, reg(1)))
    with pytest.raises(UsageError, match="whole 16-byte vectors"):
        changed(float32, across, SwapButterfly(0, reg(0)))


def test_what_names_no_place_of_the_tile_or_cannot_be_run_is_refused() -> None:
    plan, last = worked_example(), len(worked_example().steps) - 1
    with pytest.raises(UsageError, match="Butterfly names reg9, which the tile lacks"):
        changed(plan, last, Butterfly(reg(9)), plan.steps[-1])
    exchange = next(i for i, step in enumerate(plan.steps) if isinstance(step, Exchange))
    with pytest.raises(UsageError, match="Exchange names warp7, which the tile lacks"):
        changed(plan, exchange, Exchange(((reg(2), warp(7)),), "packed"))
    with pytest.raises(UsageError, match="the tile is stored once, at the end"):
        changed(plan, last, plan.steps[-1], plan.steps[-1])
    for stages in (0, 2):
        with pytest.raises(UsageError, match=f"{stages} tiles under way; there is one, or more of a persistent grid"):
            changed(plan, 0, dataclasses.replace(plan.load, path="cp_async", stages=stages))
    with pytest.raises(UsageError, match="the plan loads nothing"):
        changed(plan, 0)
    with pytest.raises(UsageError, match="min_blocks = 0; an SM holds one block at least"):
        dataclasses.replace(plan, min_blocks=0)


def test_values_are_loaded_in_the_form_of_their_type() -> None:
    steps = (Butterfly(PAIR), Butterfly(reg(0)), Butterfly(reg(1)), Scale(), Store())
    with pytest.raises(UsageError, match="values of this type are not loaded as fp32"):
        Plan(Problem.of(8, DType.FLOAT16), 0, 0, 0, (Load("plain", carrier=FP32), *steps))


@pytest.mark.parametrize("load", ["cp_async", "bulk"])
def test_pitched_rows_are_loaded_straight_to_registers(load: str) -> None:
    knobs = Knobs(low_bits="shuffle", butterfly_carrier="fp32")
    plan = build_plan(Problem.of(64, DType.FLOAT16, rows="pitched"), knobs, ARCH)
    with pytest.raises(UsageError, match="pitched rows are not copied to shared memory as they lie"):
        changed(plan, 0, Load(load))


def test_no_butterfly_is_between_the_packed_values_of_a_pair_nor_across_lanes_by_swaps() -> None:
    plan = build_plan(Problem.of(512, DType.FLOAT16, Numerics.FAST), Knobs(chunks=2), ARCH)
    packed = next(i for i, step in enumerate(plan.steps) if isinstance(step, Butterfly))
    assert plan.carriers[packed] == PACKED
    with pytest.raises(UsageError, match="needs fp32 values but finds packed"):
        changed(plan, packed, plan.steps[packed], Butterfly(PAIR))
    with pytest.raises(UsageError, match="needs fp32 values but finds packed"):
        changed(plan, packed, plan.steps[packed], SwapButterfly(0, reg(2)))


def test_only_what_was_loaded_of_one_row_and_crosses_blocks_once_is_normalized() -> None:
    plan = normalized()
    first = plan.steps[2]
    assert plan.steps[1] == Normalize()
    with pytest.raises(UsageError, match="only what was just loaded is normalized"):
        dataclasses.replace(plan, steps=(plan.steps[0], first, Normalize(), *plan.steps[3:]))
    with pytest.raises(UsageError, match="only values of the range of a bfloat16 are normalized"):
        dataclasses.replace(plan, problem=Problem.of(4096, DType.FLOAT16))
    with pytest.raises(UsageError, match="only normalized values are in the range of a float16"):
        changed(plan, 2, dataclasses.replace(first, factor=0))
    with pytest.raises(UsageError, match="nothing normalizes"):
        changed(plan, 1)
    with pytest.raises(UsageError, match="more warps than lanes"):
        dataclasses.replace(plan, warp_bits=5)
    with pytest.raises(UsageError, match="it has several rows"):
        dataclasses.replace(plan, cta_bits=2)
    with pytest.raises(UsageError, match="sums of packed values are not fp16"):
        changed(plan, 2, dataclasses.replace(first, accumulator=FP16))
    exchange = next(i for i, step in enumerate(plan.steps) if isinstance(step, Exchange))
    with pytest.raises(UsageError, match="only an fp32 exchange has two vectors a chunk"):
        changed(plan, exchange, dataclasses.replace(plan.steps[exchange], rounds=2))
    wide = build_plan(Problem.of(256, DType.BFLOAT16), Knobs(mma_carrier="tf32"), ARCH)
    with pytest.raises(UsageError, match="levels cross to other blocks with fp16, in one exchange"):
        dataclasses.replace(wide, steps=(wide.steps[0], Normalize(), *wide.steps[1:]))
    narrow = next(i for i, step in enumerate(wide.steps) if isinstance(step, Round))
    with pytest.raises(UsageError, match="only normalized values are in the range of a float16"):
        changed(wide, narrow, Narrow(), Widen(), Round())


def test_accurate_refuses_a_round_between_steps() -> None:
    fast = build_plan(Problem.of(256, DType.FLOAT16, Numerics.FAST), Knobs(), ARCH)
    with pytest.raises(UsageError, match="rounds once"):
        dataclasses.replace(fast, problem=Problem.of(256, DType.FLOAT16, Numerics.ACCURATE))
    accurate = build_plan(Problem.of(256, DType.FLOAT16, Numerics.ACCURATE), Knobs(mma_carrier="split"), ARCH)
    with pytest.raises(UsageError, match="rounds once"):
        changed(accurate, accurate.steps.index(Scale()), Round(), Widen(), Scale())


@pytest.mark.parametrize(("trigger", "at"), [("load", 1), ("store", -2)])
def test_the_next_kernel_may_start_after_the_load_or_before_the_store(trigger: str, at: int) -> None:
    knobs = Knobs(
        4, 4, 2, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32", ahead=8
    )
    plan = build_plan(Problem.of(8192, DType.BFLOAT16), dataclasses.replace(knobs, trigger=trigger), ARCH)
    assert [i for i, step in enumerate(plan.steps) if step == Trigger()] == [at % len(plan.steps)]
    assert isinstance(plan.steps[0], Load)
    assert isinstance(plan.steps[-1], Store)
    assert sum(isinstance(step, Prefetch) for step in plan.steps) == 1
    why = "the next kernel is let start once, and after the load"
    alone = build_plan(Problem.of(256, DType.FLOAT16), Knobs(mma_carrier="split"), ARCH)
    steps = list(alone.steps)
    for wrong in ([Trigger(), *steps], [steps[0], Trigger(), Trigger(), *steps[1:]]):
        with pytest.raises(UsageError, match=why):
            dataclasses.replace(alone, steps=tuple(wrong))
    with pytest.raises(UsageError, match="blocks that loop leave no room for the next kernel's"):
        dataclasses.replace(alone, steps=(steps[0], Trigger(), *steps[1:]), persistent=True)


def test_equal_plans_have_equal_digests_and_others_do_not() -> None:
    plan = worked_example()
    assert plan.digest == worked_example().digest
    assert plan.digest != dataclasses.replace(plan, min_blocks=2).digest
