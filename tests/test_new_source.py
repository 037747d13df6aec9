"""A prologue that no module knows: a tensor like x, a vector of n and a second output, all in this file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
import pytest
import torch
from spaces import ARCH
from test_laws import EmulatedLaunch

from hadagen.compiler import codegen
from hadagen.compiler.emulator import compile_host, verification_rows, verify
from hadagen.errors import UsageError
from hadagen.measure.verify import Verifier
from hadagen.plan.costmodel import Estimate
from hadagen.plan.space import Space, build_plan
from hadagen.plan.steps.base import PACKED, Cost, Draft, Step
from hadagen.problem.bits import decode, encode
from hadagen.problem.operands import PROLOGUES, Prologue, params_for, rows_like_x, vector_of_n
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.trial import Outcome

BLOCK = """
{% import "loads.cu.j2" as loads with context %}
{% macro made_up(step, p, f, chunks) %}
{
{% call loads.each_vector("gate") %}
        const i64 here = at + {{ vector_at }};
        if (here >= elements) break;
        const Vec16 by = load16(static_cast<const byte*>(weight) + {{ bytes }} * (here % {{ plan.problem.n }}));
        Vec16 sum;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            sum.word[w] = add<T>(p[4 * i + w], v.word[w]);
            const u32 t = sum.word[w], u = by.word[w];
            p[4 * i + w] = pack<T>(low<T>(t) * low<T>(u), high<T>(t) * high<T>(u));
        }
        store16(static_cast<byte*>(total) + {{ bytes }} * here, sum);
{% endcall %}
}
{% endmacro %}
"""
OPERANDS = rows_like_x("gate"), vector_of_n("weight"), rows_like_x("total", is_written=True)


@dataclass(frozen=True)
class AddAndMultiply(Step):
    """(x + gate) · weight, rounded to x's type after each; x + gate is written to `total`."""

    name = "made_up"
    template = "made_up.cu.j2"
    says = "add a gate, multiply by a weight"
    takes = PACKED
    operands = OPERANDS
    loads = is_prologue = True

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.rows_per_tile > 1 and plan.problem.n < plan.vector_elements:
            yield "a vector has several rows"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost(6 * plan.words(carrier))


class MadeUp(Prologue):
    name = "made_up"
    operands = OPERANDS

    def step(self) -> Step:
        return AddAndMultiply()

    def results(self, problem: Problem, x: Any, values: Any) -> dict[str, Any]:
        def rounded(exact: Any) -> Any:
            return decode(problem.io.input, encode(problem.io.input, exact))

        total = rounded(x + values["gate"])
        return {"x": rounded(total * values["weight"]), "total": total}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROLOGUES, "made_up", MadeUp())
    loaders = [jinja2.DictLoader({"made_up.cu.j2": BLOCK}), codegen.ENVIRONMENT.loader]
    monkeypatch.setattr(codegen.ENVIRONMENT, "loader", jinja2.ChoiceLoader([each for each in loaders if each]))


KEYS = "n1024-after-made_up-float16-fast", "n256-after-made_up-bfloat16-to-mxfp8_32-accurate"


@pytest.mark.parametrize("key", KEYS)
def test_a_source_is_one_file(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse(key)
    assert problem.key == key
    knobs = Space(problem, ARCH).seeds()[0]
    plan = build_plan(problem, knobs, ARCH)
    assert plan.launch.signature.endswith("const void* gate, const void* weight, void* total")
    source = codegen.render(plan)
    module = compile_host([source])
    errors = verify(problem, source, verification_rows(problem, source.launch, 1 << 12), module=module)
    assert max(errors.values()) <= problem.error_bound

    monkeypatch.setattr("hadagen.measure.verify._LEAST_ELEMENTS", 1 << 13)
    answer = Verifier(torch.device("cpu"), 0).check(EmulatedLaunch(problem, source, module), problem)
    assert (answer.outcome, answer.detail) == (Outcome.OK, "")

    cell = 1 << 22, Destination.OUT_OF_PLACE, Cache.COLD
    plain = build_plan(Problem.parse(key.replace("-after-made_up", "")), knobs, ARCH)
    assert Estimate(plan, ARCH).us(*cell) > 1.5 * Estimate(plain, ARCH).us(*cell)


def test_a_source_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="prologue 'made_upp' is not known; did you mean made_up"):
        params_for(Problem.parse("n1024-after-made_upp-float16-fast"))
