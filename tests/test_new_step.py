"""Steps that no module knows: a class and a template block are all there is to write, for what a kernel takes too."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jinja2
import numpy as np
import pytest
from plan_sample import changed
from spaces import ARCH

from hadagen.compiler import codegen
from hadagen.compiler.emulator import EmulationError, compile_host, verification_rows, verify
from hadagen.errors import UsageError
from hadagen.plan.costmodel import Estimate, costs_of
from hadagen.plan.knobs import Knobs
from hadagen.plan.layout import Place, reg
from hadagen.plan.plan import Plan, interpret
from hadagen.plan.space import build_plan
from hadagen.plan.steps.base import FP32, Cost, Draft, Region, Roundings, Step
from hadagen.plan.steps.conversions import Round
from hadagen.plan.steps.transforms import Butterfly
from hadagen.problem.bits import decode, encode
from hadagen.problem.launch import PARAMS
from hadagen.problem.operand import Operand
from hadagen.problem.problem import DType, Problem
from hadagen.problem.regimes import Cache, Destination
from hadagen.truth.reference import hadamard

QUAD = """
{% macro Quad(step, p, f, chunks) %}
#pragma unroll
for (int i = 0; i < 2 * {{ chunks }}; ++i) {
    const int a = i / {{ step.stride }} * {{ 4 * step.stride }} + i % {{ step.stride }};
    const int b = a + {{ step.stride }}, c = b + {{ step.stride }}, d = c + {{ step.stride }};
    const float s = {{ f }}[a] + {{ f }}[b], t = {{ f }}[a] - {{ f }}[b];
    const float u = {{ f }}[c] + {{ f }}[d], v = {{ f }}[c] - {{ f }}[d];
    {{ f }}[a] = s + u, {{ f }}[b] = t + v, {{ f }}[c] = s - u, {{ f }}[d] = t - v;
}
{% endmacro %}
"""


@dataclasses.dataclass(frozen=True)
class Quad(Step):
    """Transforms the bits at reg[`low`] and the next at once."""

    name = "Quad"
    labels = "low"
    template = "quad.cu.j2"
    says = "quad from reg{low}: bits {bits}"
    takes = FP32
    holds_all = True

    low: int

    @property
    def places(self) -> tuple[Place, ...]:
        return reg(self.low), reg(self.low + 1)

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.terms *= 4

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(2 * plan.words(carrier), waits={"arithmetic": 2})

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return {"stride": 2 << self.low}


def test_a_step_is_a_class_and_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(1024, DType.FLOAT16)
    known = build_plan(problem, Knobs(4, mma_carrier="split", butterfly_carrier="fp32"), ARCH)
    first = known.steps.index(Butterfly(reg(2)))
    assert known.steps[first + 1] == Butterfly(reg(3))

    def with_quad(quad: Quad) -> Plan:
        return dataclasses.replace(known, steps=(*known.steps[:first], quad, *known.steps[first + 2 :]))

    plan = with_quad(Quad(2))
    assert plan.describe()[first] == "quad from reg2: bits 8 9"
    with pytest.raises(UsageError, match=r"step 4 \(Quad\) of .*: transforms index bit 2 a second time"):
        with_quad(Quad(1))
    with pytest.raises(UsageError, match="Quad names reg4, which the tile lacks"):
        with_quad(Quad(3))
    with pytest.raises(UsageError, match=r"step 5 \(Quad\) of .*: needs fp32 values but finds packed"):
        changed(plan, first, Round(), Quad(2))

    x = np.random.default_rng(0).standard_normal((2, problem.n))
    np.testing.assert_allclose(interpret(plan, x, 0.5), hadamard(x, 0.5), rtol=0, atol=1e-9)

    assert sum(cost.instructions for cost in costs_of(plan)) == sum(cost.instructions for cost in costs_of(known))
    cell = 1 << 20, Destination.IN_PLACE, Cache.HOT
    assert Estimate(plan, ARCH).us(*cell) == Estimate(known, ARCH).us(*cell)

    loaders = [jinja2.DictLoader({"quad.cu.j2": QUAD}), codegen.ENVIRONMENT.loader]
    monkeypatch.setattr(codegen.ENVIRONMENT, "loader", jinja2.ChoiceLoader([each for each in loaders if each]))
    source = codegen.render(plan)
    assert f"// {first + 1}. quad from reg2: bits 8 9\n#pragma unroll\n" in source.text.replace("    ", "")
    errors = verify(problem, source, verification_rows(problem, source.launch, 1 << 12))
    assert max(errors.values()) <= problem.error_bound


BIAS = """
{% macro AddBias(step, p, f, chunks) %}
#pragma unroll
for (int i = 0; i < 8 * {{ chunks }}; ++i) {{ f }}[i] += as_float(load16(bias).word[0]);
{% endmacro %}
"""


@dataclasses.dataclass(frozen=True)
class AddBias(Step):
    """Adds the one float at the address that the kernel is given as `bias`."""

    name = "AddBias"
    template = "bias.cu.j2"
    says = "add the bias"
    takes = FP32
    operands = (Operand("bias", lambda problem: True, lambda problem, *_: np.ones(4, np.float32)),)

    def regions(self, plan: Draft) -> Iterator[Region]:
        yield Region("bias", 16 * plan.warps)


def test_what_a_step_asks_for_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(256, DType.FLOAT32)
    known = build_plan(problem, Knobs(low_bits="shuffle", butterfly_carrier="fp32"), ARCH)
    plan = dataclasses.replace(known, steps=(*known.steps[:-1], AddBias(), known.steps[-1]))
    assert known.launch.params == PARAMS
    assert plan.launch.signature == f"{known.launch.signature}, const void* bias"
    assert plan.footprint.offset("bias") == known.launch.shared_bytes
    assert plan.launch.shared_bytes == known.launch.shared_bytes + 16 * plan.warps

    loaders = [jinja2.DictLoader({"bias.cu.j2": BIAS}), codegen.ENVIRONMENT.loader]
    monkeypatch.setattr(codegen.ENVIRONMENT, "loader", jinja2.ChoiceLoader([each for each in loaders if each]))
    source = codegen.render(plan)
    module = compile_host([source])
    x = np.random.default_rng(0).standard_normal((3, problem.n))
    bits, out = encode(problem.io.input, x), encode(problem.io.output, np.zeros_like(x))
    bias = np.array([0.75, 0, 0, 0], dtype=np.float32)

    def run(operands: dict[str, Any]) -> None:
        module.run(source.entry, source.launch, bits.ravel(), out.ravel(), scale=1.0, operands=operands)

    run({"bias": bias})
    np.testing.assert_allclose(decode(problem.io.output, out), hadamard(x, 1.0) + 0.75, rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match=r"const void\* bias; give bias too"):
        run({})
    with pytest.raises(EmulationError, match=r"loads 4 elements at element .* of x"):
        run({"bias": bias[:2]})
