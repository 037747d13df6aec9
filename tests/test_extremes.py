"""Values at the edges of each type: nothing overflows on the way to a finite result, and subnormal inputs count."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from slow import cases_of
from spaces import ARCH, draw

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import HostModule, compile_host, verification_rows
from hadagen.plan.knobs import wide_range
from hadagen.plan.plan import Plan
from hadagen.plan.space import build_plan
from hadagen.plan.steps.base import FP16
from hadagen.plan.steps.transforms import PARTS, Mma
from hadagen.problem.bits import Bits, decode, encode
from hadagen.problem.launch import Source
from hadagen.problem.problem import DType, Numerics, Problem
from hadagen.truth.reference import hadamard


@dataclass(frozen=True)
class Edges:
    """The largest value of a type, the smallest normal and the smallest of all, and half a unit in the last place."""

    largest: float
    normal: float
    smallest: float
    rounding: float


EDGES = {
    DType.FLOAT16: Edges(65504.0, 2.0**-14, 2.0**-24, 2.0**-11),
    DType.BFLOAT16: Edges(2.0**128 - 2.0**120, 2.0**-126, 2.0**-133, 2.0**-8),
    DType.FLOAT32: Edges(2.0**128 - 2.0**104, 2.0**-126, 2.0**-149, 2.0**-24),
}
# A few values over and over are not rounded as the average is: half a unit in the last place, and some of these.
SLACK = {Numerics.ACCURATE: 1, Numerics.FAST: 8}
# float32 is rounded in each sum, and where an mma takes it in parts it keeps multiples of the least number of the type
# of these: seven bits below an exponent of -126, or ten.
FLOAT32_SLACK = 16
LEAST_IN_PARTS = {"bfloat16": 2.0 ** (-126 - 7), "tf32": 2.0 ** (-126 - 10)}
NORMALIZED = DType.BFLOAT16, Numerics.ACCURATE
EACH = 2  # plans of each n, type and numerics


def sample() -> list[Plan]:
    choose = random.Random(7)
    problems = dict.fromkeys(
        Problem.of(1 << k, dtype, numerics) for k in range(1, 16) for dtype in DType for numerics in Numerics
    )
    some = [(problem, draw(problem, choose)) for problem in problems for _ in range(EACH)]
    # Whose first sums are the longest: over blocks too.
    long = [problem for problem in problems if problem.n >= 2048]
    some += [(problem, draw(problem, choose, chunks=4, cluster=8, block_bits="load")) for problem in long]
    # And which are brought to the range of float16.
    levels = {"cluster": 4, "far_bits": "lanes", "low_bits": "mma", "mma_carrier": FP16, "exchange_carrier": "packed"}
    normalized = [problem for problem in long if (problem.io.input, problem.io.numerics) == NORMALIZED]
    some += [
        (problem, draw(problem, choose, block_bits="exchange", **levels)) for problem in normalized for _ in range(EACH)
    ]
    return [build_plan(problem, knobs, ARCH) for problem, knobs in some]


PLANS = list({plan.digest: plan for plan in sample()}.values())


@pytest.fixture(scope="module")
def sources(request: pytest.FixtureRequest) -> dict[int, Source]:
    """Of the plans that this session tests."""
    return {number: render(PLANS[number]) for number in cases_of(request, "number")}


@pytest.fixture(scope="module")
def module(sources: dict[int, Source]) -> HostModule:
    return compile_host(list(sources.values()))


def operands(plan: Plan) -> set[str]:
    """As what each `Mma` takes its values."""
    return {step.operand for step in plan.steps if isinstance(step, Mma)}


def test_there_are_plans_with_every_operand() -> None:
    found = {(plan.problem.io.input, operand) for plan in PLANS for operand in operands(plan)}
    assert {(dtype, operand) for operand, parts in PARTS.items() for dtype in parts} <= found
    assert sum(plan.normalizes for plan in PLANS) >= 3


def inputs(plan: Plan, rows: int) -> dict[str, tuple[np.ndarray, float]]:
    """Rows and a scale, with which every result is finite."""
    n, edges = plan.problem.n, EDGES[plan.problem.io.input]
    generator = np.random.default_rng(n)
    signs = generator.choice([-1.0, 1.0], (rows, n))
    alone = np.arange(n) == np.arange(rows)[:, None] % n
    part = np.zeros((rows, n))
    part[:, : 1 << plan.problem.bits // 2] = edges.largest
    found = {
        "random signs of the largest": (edges.largest * signs, 1 / n),
        "the largest everywhere": (np.full((rows, n), edges.largest), 1 / n),
        "the largest in a part of the row": (part, n**-0.5),
        "the largest by turns": (edges.largest * np.where(np.arange(n) % 2, signs[:, :1], 1.0), 1 / n),
    }
    if wide_range(plan.problem.io.input):
        powers = np.repeat(generator.integers(-60, 1, min(32, n)), n // min(32, n))
        found["of very different sizes"] = np.ldexp(generator.standard_normal((rows, n)), powers), n**-0.5
        found["small, times a small scale"] = np.ldexp(signs, -60), 2.0**-60
        found["large, times a tiny scale"] = np.ldexp(signs, 100), 2.0**-140
        found["tiny, times a large scale"] = np.ldexp(signs, -120), 2.0**100
        found["large and alone, times a large scale"] = 2.0**113 * alone, 2.0**12
    least = max(edges.smallest, *(LEAST_IN_PARTS[operand] for operand in operands(plan) & set(LEAST_IN_PARTS)), 0.0)
    found["subnormals"] = least * generator.integers(-127, 128, (rows, n)), 1.0
    found["the smallest, alone"] = least * alone, 1.0
    return found


@pytest.mark.parametrize("number", range(len(PLANS)), ids=lambda at: f"{PLANS[at].problem.key}-{PLANS[at].digest[:8]}")
def test_the_edges_of_a_type(number: int, sources: dict[int, Source], module: HostModule) -> None:
    plan, source = PLANS[number], sources[number]
    problem = plan.problem
    least, greatest = plan.scale_form.range
    slack = FLOAT32_SLACK if problem.io.input is DType.FLOAT32 else SLACK[problem.io.numerics]
    for name, (x, scale) in inputs(plan, max(2, verification_rows(problem, plan.launch) // 8)).items():
        if not least <= scale <= greatest:
            continue  # the runtime asks the accurate kernel
        bits: Bits = encode(problem.io.input, x)
        out = np.full_like(bits, 0x7FFF)
        module.run(source.entry, plan.launch, bits.reshape(-1), out.reshape(-1), scale=scale)
        # Far below the largest, for the squares of an error's norm to be finite.
        unit = np.abs(x).max()
        y, wanted = decode(problem.io.input, out) / unit, hadamard(x / unit, scale)
        assert np.isfinite(y).all(), name
        error = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
        assert error <= slack * EDGES[problem.io.input].rounding, (name, error)
