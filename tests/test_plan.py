"""Plans: that they compute the transform, and which are refused."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from plan_sample import KINDS, altered, at_the_end, changed, gathered, instead, plans, whole_rows, worked_example
from spaces import ARCH, families

from hadagen.errors import UsageError
from hadagen.plan.knobs import Knobs
from hadagen.plan.layout import LANE_BITS, PAIR, bit, cta, lane, reg, warp
from hadagen.plan.plan import Plan, interpret
from hadagen.plan.space import SHAPE, build_plan
from hadagen.plan.steps.base import FP16, FP32, PACKED
from hadagen.plan.steps.conversions import Correct, Narrow, Normalize, Round, Scale, Widen
from hadagen.plan.steps.exchanges import Exchange, Transpose
from hadagen.plan.steps.memory import Load, Prefetch, Store, Trigger
from hadagen.plan.steps.transforms import Butterfly, Gather, Mma, Shuffle, SwapButterfly
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.truth.reference import hadamard

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
    whole_rows = Knobs(chunks=8, warps=8, cluster=2, block_bits="load", mma_carrier="split", butterfly_carrier="fp32")
    large = dataclasses.replace(whole_rows, exchange_carrier="fp32", ahead=8)
    assert build_plan(Problem.of(1 << 15, DType.FLOAT16), large, ARCH).shares_loaded == 2


def split(**knobs: Any) -> Plan:
    """n = 256, accurate."""
    return build_plan(Problem.of(256, DType.FLOAT16), Knobs(mma_carrier="split", **knobs), ARCH)


def tf32() -> Plan:
    return build_plan(Problem.of(256, DType.BFLOAT16), Knobs(mma_carrier="tf32"), ARCH)


def short(dtype: DType, n: int = 8, **io: Any) -> Plan:
    """With butterflies and shuffles alone."""
    return build_plan(Problem.of(n, dtype, **io), Knobs(low_bits="shuffle", butterfly_carrier="fp32"), ARCH)


def packed() -> Plan:
    """n = 512, fast, with a butterfly of packed values."""
    return build_plan(Problem.of(512, DType.FLOAT16, Numerics.FAST), Knobs(chunks=2), ARCH)


def started(*before: int, **fields: Any) -> Plan:
    """A plan that lets the next kernel start in front of each of these steps."""
    steps = list(split().steps)
    for place in before:
        steps.insert(place, Trigger())
    return dataclasses.replace(split(), steps=tuple(steps), **fields)


TO_STORE = (Butterfly(PAIR), Butterfly(reg(0)), Butterfly(reg(1)), Scale(), Store())
OVER_BLOCKS = dataclasses.replace(whole_rows().steps[1], reg=2)
LATE = (0, 2, 1, *range(3, len(normalized().steps)))
ONCE = "the next kernel is let start once, and after the load"
NO_LEVEL = "only normalized values are in the range of a float16"
# Why a plan is refused, and what makes it.
REFUSED: list[tuple[str, Callable[[], Plan]]] = [
    ("by the scale once", lambda: altered(worked_example(), Mma, factor=2)),
    ("by the scale once", lambda: altered(worked_example(), Mma, factor=0)),
    ("a second time", lambda: instead(packed(), Butterfly, Butterfly(reg(2)), Butterfly(reg(2)))),
    ("whole 16-byte vectors", lambda: at_the_end(worked_example(), Transpose())),
    (
        "needs packed values but finds fp32",
        lambda: instead(worked_example(), Exchange, Exchange(((reg(2), warp(0)),), "packed")),
    ),
    ("whole 16-byte vectors", lambda: instead(short(DType.FLOAT32), Shuffle, SwapButterfly(0, reg(0)))),
    ("Butterfly names reg9, which the tile lacks", lambda: at_the_end(worked_example(), Butterfly(reg(9)))),
    (
        "Exchange names warp7, which the tile lacks",
        lambda: instead(worked_example(), Exchange, Exchange(((reg(2), warp(7)),), "packed")),
    ),
    ("the tile is stored once, at the end", lambda: at_the_end(worked_example(), worked_example().steps[-1])),
    *(
        (
            f"{stages} tiles under way; there is one, or more of a persistent grid",
            lambda stages=stages: altered(worked_example(), Load, path="cp_async", stages=stages),
        )
        for stages in (0, 2)
    ),
    ("the plan loads nothing", lambda: instead(worked_example(), Load)),
    ("min_blocks = 0; an SM holds one block at least", lambda: dataclasses.replace(worked_example(), min_blocks=0)),
    (
        "values of this type are not loaded as fp32",
        lambda: Plan(Problem.of(8, DType.FLOAT16), 0, 0, 0, (Load("plain", carrier=FP32), *TO_STORE)),
    ),
    *(
        (
            "pitched rows cannot be copied as they lie",
            lambda load=load: changed(short(DType.FLOAT16, 64, rows="pitched"), 0, Load(load)),
        )
        for load in ("cp_async", "bulk")
    ),
    ("needs fp32 values but finds packed", lambda: instead(packed(), Butterfly, Butterfly(PAIR))),
    ("needs fp32 values but finds packed", lambda: instead(packed(), Butterfly, SwapButterfly(0, reg(2)))),
    (
        "only what was just loaded is normalized",
        lambda: dataclasses.replace(normalized(), steps=tuple(map(normalized().steps.__getitem__, LATE))),
    ),
    (
        "only values of the range of a bfloat16 are normalized",
        lambda: dataclasses.replace(normalized(), problem=Problem.of(4096, DType.FLOAT16)),
    ),
    (NO_LEVEL, lambda: altered(normalized(), Mma, factor=0)),
    (NO_LEVEL, lambda: instead(tf32(), Round, Narrow(), Widen(), Round())),
    ("nothing normalizes", lambda: instead(normalized(), Normalize)),
    ("more warps than lanes", lambda: dataclasses.replace(normalized(), warp_bits=5)),
    ("it has several rows", lambda: dataclasses.replace(normalized(), cta_bits=2)),
    ("sums of packed values are not fp16", lambda: altered(normalized(), Mma, accumulator=FP16)),
    ("only an fp32 exchange has two vectors a chunk", lambda: altered(normalized(), Exchange, rounds=2)),
    (
        "levels cross to other blocks with fp16, in one exchange",
        lambda: instead(tf32(), Load, tf32().steps[0], Normalize()),
    ),
    (
        "rounds once",
        lambda: dataclasses.replace(
            build_plan(Problem.of(256, DType.FLOAT16, Numerics.FAST), Knobs(), ARCH), problem=split().problem
        ),
    ),
    ("rounds once", lambda: instead(split(), Scale, Round(), Widen(), Scale())),
    ("do not take tiles in order", lambda: dataclasses.replace(split(ahead=8), persistent=True)),
    (
        "pitched rows lie anywhere",
        lambda: dataclasses.replace(split(ahead=8), problem=split().problem.with_io(rows=Rows.PITCHED)),
    ),
    ("all chunks meet from the exchange on", lambda: dataclasses.replace(worked_example(), order="by_group")),
    (
        "order 'by_tile' is not known; choose one of by_step, by_group",
        lambda: dataclasses.replace(worked_example(), order="by_tile"),
    ),
    (r"index bits \[12\] are never transformed", lambda: altered(whole_rows(), Mma, over_blocks=False)),
    ("only what each block has loaded", lambda: instead(whole_rows(), Butterfly, OVER_BLOCKS)),
    ("are not exchanged between them", lambda: at_the_end(whole_rows(), Exchange(((reg(2), cta(0)),), PACKED))),
    *(
        ("only packed values are summed over blocks", lambda fields=fields: altered(whole_rows(), Mma, **fields))
        for fields in ({"operand": "bfloat16", "parts": 2}, {"accumulator": PACKED}, {"turned": True})
    ),
    ("by the scale once", lambda: altered(whole_rows(), Mma, factor=0)),
    *(
        (
            "whole rows take another way",
            lambda load=load: instead(whole_rows(), Load, Load(load)),
        )
        for load in ("bulk", "cp_async")
    ),
    ("no block needs the shares of others", lambda: instead(split(), Load, Load("multicast"))),
    ("no block needs the shares of others", lambda: instead(gathered(), Gather, Scale())),
    ("fp32 is summed over blocks from shared memory", lambda: altered(gathered(), Load, path="plain")),
    ("by the scale once", lambda: at_the_end(gathered(), Scale())),
    ("only what each block has loaded", lambda: instead(gathered(), Gather, gathered().steps[2], Gather())),
    ("there is one block", lambda: altered(tf32(), Mma, over_blocks=True)),
    (ONCE, lambda: started(0)),
    (ONCE, lambda: started(1, 1)),
    ("blocks that loop leave no room for the next kernel's", lambda: started(1, persistent=True)),
]


@pytest.mark.parametrize(("why", "make"), REFUSED, ids=[why for why, _ in REFUSED])
def test_a_plan_that_computes_anything_else_or_cannot_be_run_is_refused(why: str, make: Callable[[], Plan]) -> None:
    with pytest.raises(UsageError, match=why):
        make()


def test_a_lane_may_be_swapped_with_a_register_of_another_vector() -> None:
    assert SwapButterfly(0, reg(1)) in instead(short(DType.FLOAT32), Shuffle, SwapButterfly(0, reg(1))).steps


@pytest.mark.parametrize(("trigger", "at"), [("load", 1), ("store", -2)])
def test_the_next_kernel_may_start_after_the_load_or_before_the_store(trigger: str, at: int) -> None:
    knobs = Knobs(
        4, 4, 2, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32", ahead=8
    )
    plan = build_plan(Problem.of(8192, DType.BFLOAT16), dataclasses.replace(knobs, trigger=trigger), ARCH)
    assert [i for i, step in enumerate(plan.steps) if step == Trigger()] == [at % len(plan.steps)]
    kinds = [type(step) for step in plan.steps]
    assert (kinds[0], kinds[-1], kinds.count(Prefetch)) == (Load, Store, 1)


def test_equal_plans_have_equal_digests_and_others_do_not() -> None:
    plan = worked_example()
    assert plan.digest == worked_example().digest
    assert plan.digest != dataclasses.replace(plan, min_blocks=2).digest
