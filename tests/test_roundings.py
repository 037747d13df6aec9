"""How often a plan rounds, and the error that follows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from plan_sample import plans
from spaces import ARCH

from hadagen.bits import decode, encode
from hadagen.codegen import render
from hadagen.emulator import compile_host
from hadagen.knobs import Knobs
from hadagen.layout import reg, warp
from hadagen.legality import ROUNDINGS_SPREAD
from hadagen.plan import Plan
from hadagen.problem import HADACORE_ERROR, ROUNDING_ERROR, DType, Numerics, Problem
from hadagen.reference import hadamard, relative_error, verification_scale
from hadagen.space import build_plan
from hadagen.steps.base import FP16, PACKED, Step, roundings
from hadagen.steps.conversions import Correct, Narrow, Normalize, Round, Scale, Widen
from hadagen.steps.exchanges import Exchange, Transpose
from hadagen.steps.memory import Load, Store
from hadagen.steps.transforms import NORMALIZER, Butterfly, Mma, Shuffle

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
    assert roundings([*rounded, Mma(2, turned=True, idle=2), Round()]) == pytest.approx(2.05)
    assert roundings([*rounded, Widen(), Butterfly(reg(2)), Butterfly(reg(3)), Round()]) == pytest.approx(2.05)
    assert roundings([*rounded, Mma(2, turned=True, idle=2, accumulator=PACKED)]) == pytest.approx(2.05)
    assert roundings([*rounded, Mma(2, turned=True, idle=1), Round()]) == 2
    assert roundings([*rounded, Mma(2, turned=True), Round()]) == 2
