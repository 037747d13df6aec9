"""Where bits of warps and blocks come to in an exchange, what transforms them there, and which chunks go together."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plan_sample import FAR_LANES, changed, worked_example
from spaces import ARCH

from hadagen.bits import encode
from hadagen.codegen import render
from hadagen.emulator import compile_host
from hadagen.errors import UsageError
from hadagen.knobs import Knobs
from hadagen.layout import PAIR, bit, lane, reg, warp
from hadagen.plan import Plan
from hadagen.problem import DType, Numerics, Problem
from hadagen.space import SHAPE, build_plan
from hadagen.steps.base import PACKED, mixed_chunk_bits
from hadagen.steps.conversions import Round
from hadagen.steps.exchanges import Exchange, Transpose
from hadagen.steps.memory import Load, Prefetch, Store, Trigger
from hadagen.steps.transforms import Butterfly, Mma, Shuffle, SwapButterfly

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
    assert mixed_chunk_bits([Load("plain"), Mma(1), Butterfly(reg(1)), Shuffle(4), Store()]) == 0
    assert mixed_chunk_bits([Mma(0)]) == 0
    assert mixed_chunk_bits([Butterfly(reg(4)), Mma(2, turned=True)]) == 3
    assert mixed_chunk_bits([Mma(2, turned=True), Butterfly(PAIR)]) == 1
    assert mixed_chunk_bits([SwapButterfly(4, reg(3))]) == 2
    assert mixed_chunk_bits([Exchange(((lane(4), warp(0)), (reg(3), warp(1))), PACKED)]) == 2


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
    plan = worked_example()
    with pytest.raises(UsageError, match="all chunks meet from the exchange on"):
        dataclasses.replace(plan, order="by_group")
    with pytest.raises(UsageError, match="order 'by_tile' is not known; choose one of by_step, by_group"):
        dataclasses.replace(plan, order="by_tile")
    knobs = Knobs(8, 8, far_bits="lanes", far_lanes="mma", butterfly_carrier="fp32", order="by_group")
    grouped = build_plan(Problem.of(16384, DType.FLOAT16, Numerics.FAST), knobs, ARCH)
    for asked in (Trigger(), Prefetch(4)):
        with pytest.raises(UsageError, match="what a tile asks for once has no place among groups"):
            changed(grouped, len(grouped.steps) - 1, asked, grouped.steps[-1])
