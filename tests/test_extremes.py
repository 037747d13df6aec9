"""Values at the edges of float16: nothing overflows on the way to a finite result, and subnormal inputs count."""

from __future__ import annotations

import random

import numpy as np
import pytest
from spaces import ARCH, draw

from hadagen.bits import Bits, decode, encode
from hadagen.codegen import Source, render
from hadagen.emulator import HostModule, compile_host, verification_rows
from hadagen.plan import Plan
from hadagen.problem import DType, Numerics, Problem
from hadagen.reference import hadamard
from hadagen.space import build_plan

LARGEST, SMALLEST = 65504.0, 2.0**-24
EACH = 2  # plans of each n and numerics
# A few values over and over are not rounded as the average is: half a unit in the last place, and some of these.
BOUNDS = {Numerics.ACCURATE: 2.0**-11, Numerics.FAST: 8 * 2.0**-11}


def sample() -> list[Plan]:
    choose = random.Random(7)
    problems = [Problem(1 << k, DType.FLOAT16, numerics) for k in range(1, 16) for numerics in Numerics]
    return [build_plan(problem, draw(problem, choose), ARCH) for problem in problems for _ in range(EACH)]


PLANS = list({plan.digest: plan for plan in sample()}.values())
SOURCES: list[Source] = [render(plan) for plan in PLANS]


@pytest.fixture(scope="module")
def module() -> HostModule:
    return compile_host(SOURCES)


def inputs(problem: Problem, rows: int) -> dict[str, tuple[np.ndarray, float]]:
    """Rows and a scale, with which every result is finite."""
    generator = np.random.default_rng(problem.n)
    signs = generator.choice([-1.0, 1.0], (rows, problem.n))
    part = np.zeros((rows, problem.n))
    part[:, : 1 << problem.log2_n // 2] = LARGEST
    return {
        "random signs of the largest": (LARGEST * signs, 1 / problem.n),
        "the largest everywhere": (np.full((rows, problem.n), LARGEST), 1 / problem.n),
        "the largest in a part of the row": (part, problem.n**-0.5),
        "subnormals": (SMALLEST * generator.integers(-1023, 1024, (rows, problem.n)), 1.0),
        "the smallest, alone": (SMALLEST * np.eye(problem.n)[np.arange(rows) % problem.n], 1.0),
    }


@pytest.mark.parametrize("number", range(len(PLANS)), ids=lambda number: SOURCES[number].entry)
def test_the_edges_of_float16(number: int, module: HostModule) -> None:
    plan, source = PLANS[number], SOURCES[number]
    problem = plan.problem
    least, greatest = plan.scale_form.range
    for name, (x, scale) in inputs(problem, max(2, verification_rows(problem, plan.launch) // 8)).items():
        if not least <= scale <= greatest:
            continue  # the runtime asks the accurate kernel
        bits: Bits = encode(problem.dtype, x)
        out = np.full_like(bits, 0x7FFF)
        module.run(source.entry, plan.launch, bits.reshape(-1), out.reshape(-1), scale=scale)
        y, wanted = decode(problem.dtype, out), hadamard(x, scale)
        assert np.isfinite(y).all(), name
        error = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
        assert error <= BOUNDS[problem.numerics], (name, error)
