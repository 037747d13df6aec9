"""Plans whose mma take fp32 values in parts, or as one tf32 each."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plan_sample import FAR_LANES, changed
from spaces import ARCH

from hadagen.bits import decode, encode
from hadagen.codegen import render
from hadagen.emulator import compile_host
from hadagen.errors import UsageError
from hadagen.knobs import Knobs
from hadagen.layout import MMA_MOVES, PAIR, bit, lane, reg
from hadagen.problem import DType, Problem
from hadagen.reference import hadamard
from hadagen.space import build_plan
from hadagen.steps.conversions import Scale
from hadagen.steps.exchanges import Exchange
from hadagen.steps.transforms import Mma


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
        with pytest.raises(UsageError, match="only all fp32 values at once are turned"):
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
    out, source = np.zeros_like(bits), render(plan)
    compile_host([source]).run(source.entry, plan.launch, bits, out, scale=2**-6)
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
    bits = encode(DType.BFLOAT16, x)
    out, source = np.zeros_like(bits), render(plan)
    compile_host([source]).run(source.entry, plan.launch, bits, out, scale=1.0)
    np.testing.assert_array_equal(out, encode(DType.BFLOAT16, hadamard(x)))
