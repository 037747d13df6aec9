"""A prologue that no module knows: a tensor like x, a vector of n and a second output, all in this file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import torch
from spaces import ARCH
from test_laws import EmulatedLaunch

from hadagen.compiler import codegen
from hadagen.compiler.emulator import compile_host, verification_rows, verify
from hadagen.errors import UsageError
from hadagen.measure import Cell, timing
from hadagen.measure.verify import Verifier
from hadagen.plan.costmodel import Estimate
from hadagen.plan.space import Space, build_plan
from hadagen.plan.steps.base import PACKED, Cost, Draft, Step
from hadagen.problem.operands import PROLOGUES, Prologue, params_for, rounded, rows_like_x, vector_of_n
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.trial import Outcome

BLOCK = """
{% macro made_up(step, p, f, chunks) %}
{
    const i64 first = {{ share }} + load_at;
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
        const i64 at = first + {{ vector_at }};
        if (at >= elements) break;
        const Vec16 g = load16(static_cast<const byte*>(gate) + {{ bytes }} * at);
        const Vec16 w = load16(static_cast<const byte*>(weight) + {{ bytes }} * (at % {{ plan.problem.n }}));
        Vec16 sum;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            sum.word[word] = add<T>(p[4 * i + word], g.word[word]);
            const u32 t = sum.word[word], v = w.word[word];
            p[4 * i + word] = pack<T>(low<T>(t) * low<T>(v), high<T>(t) * high<T>(v));
        }
        store16(static_cast<byte*>(total) + {{ bytes }} * at, sum);
    }
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

    def results(self, x: torch.Tensor, values: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        total = rounded(x + values["gate"], dtype)
        return {"x": rounded(total * values["weight"], dtype), "total": total}


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


@pytest.mark.parametrize("key", KEYS)
def test_a_source_is_timed_beside_a_copy_of_the_same_bytes(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch has memory of its own for each tensor like x."""
    problem, l2_bytes = Problem.parse(key), 1 << 16
    launched: list[list[int]] = []

    def prepared(*known: object, changing: list[str]) -> Any:
        names.append(changing)
        return lambda stream, *places: launched.append(list(places))

    def captured(stream: int, kernel: Any, addresses: list[tuple[int, int]], work: timing.Work) -> None:
        launch = timing.prepared(kernel, work)
        for x, y in addresses:
            launch(stream, x, y)

    monkeypatch.setattr(timing, "LaunchGraph", captured)
    stopwatch = timing.Stopwatch(SimpleNamespace(device=torch.device("cpu"), cuda_stream=0), l2_bytes)  # type: ignore[arg-type]
    cell = Cell(1 << 14, Destination.OUT_OF_PLACE, Cache.COLD)
    of_source = timing.transform_work(problem, cell, stopwatch.operands(problem))
    stopwatch.fill(problem.io.input, [of_source.traffic])
    traffic, size = of_source.traffic, of_source.traffic.buffer_bytes
    results = traffic.codes_bytes + traffic.scales_bytes if problem.io.form else size
    assert traffic.footprint == 2 * size + results + size
    for work in (of_source, timing.copy_work(traffic)):
        names: list[list[str]] = []
        launched.clear()
        stopwatch.graph(SimpleNamespace(prepared=prepared), work)  # type: ignore[arg-type]
        order = ["x", "y", *names[0]]
        assert {"gate", "total"} <= set(order) or {"more_x", "more_y"} <= set(order)
        lengths = {"y": traffic.codes_bytes or size, "scales": traffic.scales_bytes}
        spans = sorted(
            (at, at + lengths.get(name, size))
            for places in launched[1:]
            for name, at in zip(order, places, strict=True)
        )
        distinct = sorted(set(spans))
        assert len(distinct) == traffic.slots(l2_bytes) * len(order) > len(order)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(distinct))


def test_a_source_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="prologue 'made_upp' is not known; did you mean made_up"):
        params_for(Problem.parse("n1024-after-made_upp-float16-fast"))
