"""What several tests of plans need: plans to begin with, and changes to them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from spaces import ARCH, space_of

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import EmulationReport, compile_host
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import Plan
from hadagen.plan.space import build_plan
from hadagen.plan.steps.base import Step
from hadagen.problem.bits import Bits
from hadagen.problem.problem import DType, Numerics, Problem

# float32 has one contract, and pitched rows change no step.
KINDS = [(DType.FLOAT16, Numerics.FAST), (DType.FLOAT16, Numerics.ACCURATE), (DType.FLOAT32, Numerics.ACCURATE)]


@st.composite
def plans(draw: st.DrawFn, kinds: Sequence[tuple[DType, Numerics]] = KINDS) -> Plan:
    dtype, numerics = draw(st.sampled_from(kinds))
    problem = Problem.of(1 << draw(st.integers(1, 15)), dtype, numerics)
    wanted = {name: draw(st.sampled_from(values)) for name, values in ARCH.search.items()}
    return build_plan(problem, next(space_of(problem).nearest(wanted)), ARCH)


def worked_example() -> Plan:
    """n = 4096 over 4 warps of 4 chunks, fast."""
    problem = Problem.of(4096, DType.FLOAT16, Numerics.FAST)
    return build_plan(problem, Knobs(chunks=4, warps=4, butterfly_carrier="fp32", exchange_carrier="fp32"), ARCH)


def emulate(plan: Plan, bits: Bits, scale: float = 1.0) -> tuple[Bits, EmulationReport]:
    """What the kernel of a plan makes of rows, and what the machine noted."""
    source, out = render(plan), np.zeros_like(bits)
    return out, compile_host([source]).run(source.entry, plan.launch, bits, out, scale=scale)


def changed(plan: Plan, index: int, *steps: object) -> Plan:
    return dataclasses.replace(plan, steps=(*plan.steps[:index], *steps, *plan.steps[index + 1 :]))


def instead(plan: Plan, kind: type[Step], *steps: Step) -> Plan:
    """The plan with these steps in place of its first one of a kind."""
    return changed(plan, next(i for i, step in enumerate(plan.steps) if isinstance(step, kind)), *steps)


def altered(plan: Plan, kind: type[Step], **fields: Any) -> Plan:
    """The plan with another value of some fields of its first step of a kind."""
    step = next(step for step in plan.steps if isinstance(step, kind))
    return instead(plan, kind, dataclasses.replace(step, **fields))


def at_the_end(plan: Plan, step: Step) -> Plan:
    """The plan with one more step, before it stores."""
    return changed(plan, len(plan.steps) - 1, step, plan.steps[-1])


FAR_LANES = Knobs(far_bits="lanes", far_lanes="mma", butterfly_carrier="fp32", exchange_carrier="fp32")


def whole_rows() -> Plan:
    """n = 8192 over 2 blocks of 4 warps of 4 chunks."""
    knobs = Knobs(4, 4, 2, block_bits="load", mma_carrier="split", butterfly_carrier="fp32", exchange_carrier="fp32")
    return build_plan(Problem.of(8192, DType.BFLOAT16), knobs, ARCH)


def gathered() -> Plan:
    """n = 2048 of float32 over 2 blocks of 4 warps, whose shares are summed from shared memory."""
    knobs = Knobs(
        1,
        4,
        2,
        block_bits="load",
        far_bits="lanes",
        low_bits="shuffle",
        butterfly_carrier="fp32",
        exchange_carrier="fp32",
    )
    return build_plan(Problem.of(2048, DType.FLOAT32), dataclasses.replace(knobs, load="multicast"), ARCH)
