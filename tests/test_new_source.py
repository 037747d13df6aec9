"""A prologue that no module knows: a tensor like x, a vector of n and a second output, all in this file."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import torch
from real_compilers import needs_compiler
from spaces import ARCH
from test_laws import EmulatedLaunch
from torch._dynamo.testing import CompileCounterWithBackend

from hadagen import Match, TensorError, best_config, hadamard_transform, warmup
from hadagen.compiler import codegen, recipes
from hadagen.compiler.emulator import compile_host
from hadagen.compiler.toolchain import Toolchain
from hadagen.errors import UsageError
from hadagen.measure import Cell, copy_sources, timing
from hadagen.measure.messages import Answer, Measure
from hadagen.measure.verify import Verifier
from hadagen.plan.costmodel import Estimate
from hadagen.plan.space import Space, build_plan
from hadagen.plan.steps.base import PACKED, Cost, Draft, Step
from hadagen.problem.formats import Format
from hadagen.problem.launch import RowShape
from hadagen.problem.operand import rows_like_x, vector_of_n
from hadagen.problem.operands import params_for
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import PROLOGUES, Prologue, rounded
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.trial import Outcome
from hadagen.runtime.call import runs
from hadagen.runtime.call.rules import CALL
from hadagen.runtime.choose import tables
from hadagen.runtime.launch import kernels, proof, streams
from hadagen.runtime.operands.spec import Spec
from hadagen.truth import quantizer
from hadagen.truth.accuracy import TORCH_DTYPE
from hadagen.tuner import estimate

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
    monkeypatch.setattr(estimate, "ELEMENTS", 1 << 12)
    errors = estimate._verify(problem, source, module)
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


class Emulated(EmulatedLaunch):
    """A kernel of the made-up source for calls, which runs on the CPU."""

    def prepared(self, elements: int, scale: float, rows: Any, operands: Any = None, changing: Any = ()) -> Any:
        def launch(stream: int, x: int, y: int, *others: int) -> None:
            launched.append(self.problem.key)
            told = {**(operands or {}), **dict(zip(changing, others, strict=True))}
            self.launch(stream, x, y, elements, scale, rows, told)

        return launch

    def launch(self, stream: int, x: int, y: int, elements: int, scale: float, rows: Any, operands: Any) -> None:
        super().launch(stream, x, y, elements, scale, rows or RowShape(*[self.problem.n] * 3), operands)


launched: list[str] = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls find kernels of the made-up source for tensors on the CPU."""
    launched.clear()
    tables.forget()

    @cache
    def found(problem: Problem) -> Emulated:
        source = codegen.render(build_plan(problem, Space(problem, ARCH).seeds()[0], ARCH))
        return Emulated(problem, source, compile_host([source]))

    monkeypatch.setattr(runs, "takes_kernels", lambda x: x.numel() > 0)
    monkeypatch.setattr(kernels, "find", lambda kind, elements: found(kind.problem) if kind.problem.prologue else None)
    monkeypatch.setattr(streams, "raw_stream", lambda device: 0)
    monkeypatch.setattr(streams, "current_device", lambda: -1)
    yield
    tables.forget()  # launches for tensors on the CPU


def call_of(key: str) -> tuple[Problem, list[torch.Tensor], Spec]:
    problem = Problem.parse(key)
    torch.manual_seed(0)
    x, gate = (torch.randn(6, problem.n).to(TORCH_DTYPE[problem.io.input]) for _ in range(2))
    spec = Spec(problem.n, numerics=problem.io.numerics.value, before="made_up")
    if problem.io.form:
        form = Format.choose("mxfp8", None, None, "row-major")
        spec = replace(spec, to=form.name, group=form.group, rule=form.rule, layout=form.layout.value)
    return problem, [x, gate, torch.rand(problem.n).to(x.dtype)], spec


def exact_results(tensors: list[torch.Tensor], spec: Spec) -> list[torch.Tensor]:
    """As the parts compute them, in float32."""
    x, gate, weight = tensors
    total = x + gate
    rows = hadamard_transform((total * weight).float(), spec.n**-0.5)
    if spec.form is None:
        return [rows.to(x.dtype), total]
    return [*quantizer.quantize(rows, spec.form, x.dtype, None), total]


def values_of(results: list[torch.Tensor], spec: Spec) -> list[torch.Tensor]:
    if spec.form is None:
        return results
    codes, scales, total = results
    return [quantizer.dequantize(codes, scales, spec.form, None), total]


@pytest.mark.parametrize("key", KEYS)
def test_calls_run_a_source(key: str, device: None) -> None:
    """Eagerly, when they come again, compiled for any number of rows, exported, and in PyTorch without a kernel."""
    problem, tensors, spec = call_of(key)
    scale, text = spec.n**-0.5, spec.text
    wanted = values_of(exact_results(tensors, spec), spec)

    def check(results: list[torch.Tensor]) -> None:
        assert [(each.shape, each.stride(), each.dtype) for each in results] == [
            (each.shape, each.stride(), each.dtype) for each in made
        ]
        for found, exact in zip(values_of(results, spec), wanted, strict=True):
            assert float((found.double() - exact.double()).norm() / exact.double().norm()) <= 4e-3

    x, *given = tensors
    made = CALL(tensors, scale, spec.text)
    check(made)
    assert launched == [key]
    for _ in range(2):
        check(CALL(tensors, scale, spec.text))
    assert launched == [key] * 3
    assert len(tables.calls) == 1
    apart = torch.cat((tensors[1], tensors[1]), 1)[:, : problem.n]  # with gaps
    check(CALL([x, apart, given[1]], scale, spec.text))
    torch.library.opcheck(
        CALL.default,
        (tensors, scale, spec.text),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )

    def call(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return CALL([x, gate, weight], scale, text)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, dynamic=True, fullgraph=True)
    check(compiled(*tensors))
    frames = counter.frame_count
    for rows in (5, 4):
        results = compiled(x[:rows].clone(), given[0][:rows].clone(), given[1])
        assert [each.shape[0] for each in results[:2]] == [rows, rows]
    assert counter.frame_count == frames

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
            return call(*tensors)

    check(torch.export.export(Module(), tuple(tensors)).module()(*tensors))


@pytest.mark.parametrize("key", KEYS)
def test_calls_without_a_kernel_run_the_formula(key: str) -> None:
    _, tensors, spec = call_of(key)
    for results in (each(tensors, spec.n**-0.5, spec.text) for each in (CALL, CALL.default)):
        for found, exact in zip(values_of(results, spec), values_of(exact_results(tensors, spec), spec), strict=True):
            assert float((found.double() - exact.double()).norm() / exact.double().norm()) <= 4e-3


def test_gradients_of_a_source_are_those_of_its_formula(device: None) -> None:
    _, tensors, spec = call_of(KEYS[0])
    text = spec.text

    def gradients(call: Any) -> list[torch.Tensor]:
        inputs = [each.clone().requires_grad_() for each in tensors]
        y, total = call(inputs)
        (y.float().square().sum() + total.float().sum()).backward()
        return [each.grad for each in inputs]  # type: ignore[misc]

    def of_operator(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return CALL(inputs, 1024**-0.5, text)

    wanted = gradients(lambda inputs: exact_results(inputs, spec))
    compiled = torch.compile(of_operator, backend="aot_eager", fullgraph=True)
    for call in (of_operator, compiled):
        for found, exact in zip(gradients(call), wanted, strict=True):
            torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
    _, tensors, quantized = call_of(KEYS[1])
    with pytest.raises(TensorError, match="which quantized codes do not have; detach"):
        CALL([tensors[0].requires_grad_(), *tensors[1:]], 1024**-0.5, quantized.text)


def test_a_source_is_found_loaded_and_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `best_config`, `warmup` and the check at first use."""
    problem = Problem.parse(KEYS[1])
    best = best_config(problem, 6, arch="sm90")
    assert (best.match, best.problem) == (Match.ESTIMATED, problem)
    assert best.launch is not None
    assert best.launch.signature.endswith("const void* gate, const void* weight, void* total")
    plain = best_config(256, "bfloat16", rows=6, arch="sm90", to="mxfp8", before="made_up")
    assert (plain.problem, plain.kernel) == (problem, best.kernel)

    # A program may change its prologue at any time, so nothing that was compiled for it earlier counts.
    monkeypatch.setattr(recipes, "_read", None)
    recipe = recipes.Recipe(problem, best.knobs or {}, "sm90", best.launch)
    assert (recipes._known(recipe, "sm90"), recipes.verdict(b"", problem, best.launch, "", "")) == (None, None)

    on_cpu = torch.device("cpu")
    monkeypatch.setattr("torch.device", lambda *which: on_cpu)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(proof, "_ELEMENTS", 1 << 12)
    source = codegen.render(build_plan(problem, Space(problem, ARCH).seeds()[0], ARCH))
    wrong = replace(source, text=source.text.replace("add<T>(p[4 * i + w], v.word[w])", "p[4 * i + w]"))
    assert wrong.text != source.text
    for each, right in ((source, True), (wrong, False)):
        kernel: Any = Emulated(problem, each, compile_host([each]))
        kernel.device = 0
        assert proof.is_right(kernel, problem) is right


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (0, "spec .*before=made_up.* takes 3 tensors, but got 1; pass all"),
        (1, r"gate is .* \(5, 1024\) .*; made_up needs float16 \(6, 1024\) on cpu"),
        (2, r"weight is .* \(512,\) .*; made_up needs float16 \(1024,\) on cpu"),
    ],
)
def test_tensors_that_do_not_fit_a_source_are_refused(values: int, said: str) -> None:
    _, (x, gate, weight), spec = call_of(KEYS[0])
    given = [(), (gate[:5], weight), (gate, weight[:512])][values]
    with pytest.raises(TensorError, match=said):
        CALL([x, *given], 1.0, spec.text)


def test_a_source_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="prologue 'made_upp' is not known; did you mean made_up"):
        params_for(Problem.parse("n1024-after-made_upp-float16-fast"))
    _, tensors, spec = call_of(KEYS[0])
    with pytest.raises(UsageError, match="prologue 'made_upp' is not known; did you mean made_up"):
        CALL(tensors, 1.0, spec.text.replace("made_up", "made_upp"))


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("key", KEYS)
def test_a_source_is_verified_timed_and_called_on_a_gpu(key: str) -> None:
    from hadagen.measure.service import DeviceService
    from hadagen.measure.watch import Watch

    problem, tensors, spec = call_of(key)
    toolchain = Toolchain.find()
    (kernel,) = toolchain.build_all([codegen.render(build_plan(problem, Space(problem, ARCH).seeds()[0], ARCH))], ARCH)
    stream = torch.cuda.current_stream()
    try:
        service = DeviceService(Watch(), 0, toolchain.build_all(copy_sources(), ARCH), None, 5)
        answer = service.handle(Measure(problem, kernel, {}))
    finally:
        torch.cuda.set_stream(stream)
    assert isinstance(answer, Answer)
    assert (answer.outcome, answer.detail) == (Outcome.OK, "")
    assert {timing.destination for timing in answer.timings} == {Destination.OUT_OF_PLACE}
    assert all(0.02 < timing.fraction_of_copy < 1.5 for timing in answer.timings)
    largest = max(answer.timings, key=lambda timing: timing.copy_us)
    moved = Cell.of(largest).traffic(problem).footprint
    assert 2e3 < moved / largest.copy_us / 1e3 < 6e3  # GB/s

    rotation = {"to": "mxfp8"} if spec.form else {}
    assert warmup(problem.n, tensors[0].dtype, before="made_up", **rotation) > 0
    on_gpu = [each.cuda() for each in tensors]
    results = values_of(CALL(on_gpu, spec.n**-0.5, spec.text), spec)
    assert problem in {kind.problem for kind, _ in tables.found}
    for found, exact in zip(results, values_of(exact_results(tensors, spec), spec), strict=True):
        assert float((found.cpu().double() - exact.double()).norm() / exact.double().norm()) <= 4e-3
