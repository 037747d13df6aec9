"""Laws that hold for every kernel, on the emulator for some shipped ones; `test_gpu_laws.py` has all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_verify
import test_verify_codes
import torch
from laws import broken_laws
from measure_sample import array_at, memory_at

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import RESIDENT_CLUSTERS, EmulationError, HostModule, compile_host
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs, plan_of
from hadagen.problem.bits import decode, encode
from hadagen.problem.formats import TENSOR
from hadagen.problem.launch import LaunchSpec, RowShape, Source
from hadagen.problem.operands import kernel_operands, operands_of, params_for, verification_operands
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import width_of
from hadagen.truth import quantizer
from hadagen.tuning_db.bundle import Bundle


@dataclass(frozen=True)
class EmulatedLaunch:
    """A `Launchable`. Raises `EmulationError` for a race, and for a bad access."""

    problem: Problem
    source: Source
    module: HostModule

    @property
    def spec(self) -> LaunchSpec:
        return self.source.launch

    @property
    def resident_blocks(self) -> int:
        return RESIDENT_CLUSTERS * self.spec.cluster

    def launch(
        self, stream: int, x: int, y: int, elements: int, scale: float, rows: RowShape, operands: Mapping[str, int]
    ) -> None:
        problem, form = self.problem, self.problem.io.form
        columns, x_pitch, y_pitch = rows
        count = elements // problem.n
        given: dict[str, Any] = {}
        for name, array in kernel_operands(problem, verification_operands(problem)).items():
            if operands[name]:
                given[name] = memory_at(operands[name], array.nbytes)
        outputs: dict[str, Any] = {}
        for each in (each for each in operands_of(problem) if each.like_x):
            rows_of = memory_at(operands[each.name], elements * problem.io.input.bytes)
            given[each.name] = rows_of
            if each.is_written:
                outputs[each.name] = given.pop(each.name), rows_of.nbytes
        numbers = {param.name for param in self.spec.params} - {
            "x",
            "y",
            "elements",
            "scale_word",
            "scales",
            *given,
            *outputs,
        }
        given |= {name: operands[name] for name in numbers if name in operands}
        width, of_row = width_of(problem), operands.get("units_in_row", 1) * problem.unit
        x_elements = -(-elements // of_row) * of_row * width if width > 1 else (count - 1) * x_pitch + columns
        source = array_at(x, x_elements, problem.io.input)
        if form is None:
            out = array_at(y, (count - 1) * y_pitch + columns, problem.io.input)
        else:
            out = memory_at(y, elements * form.element.bits // 8)
            units, groups = elements // problem.unit, form.scales_in_row(problem.unit)
            if form.needs_scale:
                given["tensor_scale"] = memory_at(operands["tensor_scale"], 4 * (units if form.by_head else 1))
            if form.group != TENSOR:
                size = form.scale_bytes(problem.io.input.bytes)
                room = quantizer.room(units, groups, form.layout, size)
                outputs["scales"] = memory_at(operands["scales"], room * size), units * groups * size
        report = self.module.run(
            self.source.entry,
            self.spec,
            source,
            source if x == y else out,
            scale=scale,
            elements=elements,
            rows=count if self.spec.reads_rows else 0,
            shape=rows if self.spec.reads_rows else None,
            x_elements=x_elements,
            operands=given,
            outputs=outputs,
        )
        if report.complaint:
            raise EmulationError(report.complaint)


BUNDLE = Path(__file__).resolve().parent.parent / "tuning_db" / "bundles" / "sm90.db"
CPU = torch.device("cpu")
# One of each kind with short rows: its shipped kernel for few elements, and that for many.
KEYS = (
    "n256-float16-fast",
    "n128-bfloat16-accurate",
    "n512-float32-accurate",
    "n64-float16-fast-pitched",
    "n96-k12-bfloat16-fast",
    "n128-bfloat16-to-fp8_group_128-accurate",
    "n64-float16-to-mxfp4_32-accurate",
    "n16-bfloat16-to-nvfp4_16-accurate",
    "n128-after-silu_mul-bfloat16-to-fp8_group_128-accurate",
)
SIGNED = "n96-k12-signed-float16-accurate"  # has the knobs of the problem without signs


@pytest.fixture(scope="module")
def kernels() -> list[EmulatedLaunch]:
    bundle, early = Bundle.open(BUNDLE), load_arch("sm90").starts_early
    chosen: dict[tuple[Problem, str], Knobs] = {}
    for key in (*KEYS, SIGNED):
        problem = Problem.parse(key)
        entries = sorted(bundle.entries(Problem.parse(key.replace("-signed", ""))), key=lambda each: each.elements)
        for entry in (entries[0], entries[-1]):
            chosen[problem, entry.kernel] = Knobs.like(entry.knobs)
    sources = [(problem, render(plan_of(problem, knobs, starts_early=early))) for (problem, _), knobs in chosen.items()]
    module = compile_host([source for _, source in sources])
    return [EmulatedLaunch(problem, source, module) for problem, source in sources]


def test_shipped_kernels_keep_the_laws(kernels: list[EmulatedLaunch]) -> None:
    assert {kernel.problem.key for kernel in kernels} == {*KEYS, SIGNED}
    broken = {kernel.source.entry: broken_laws(kernel, kernel.problem, CPU, 0) for kernel in kernels}
    assert {entry: laws for entry, laws in broken.items() if laws} == {}


Change = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], None]  # of results, given the rows, both float64


def add(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    y += 0.1


def scale(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    y *= 1.01


def swap(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    y[:, [0, 1]] = y[:, [1, 0]]


def look_at_another_row(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    y[1:] += 0.0 * x[:-1, :1]


def differ_alone(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    y[:, 0] += 0.01 * (len(y) == 1)


@dataclass
class Changed:
    """A right kernel, whose results are changed."""

    problem: Problem
    change: Change
    spec: LaunchSpec
    resident_blocks: int = 4

    def launch(
        self, stream: int, x: int, y: int, elements: int, scale: float, rows: RowShape, operands: Mapping[str, int]
    ) -> None:
        dtype, shape = self.problem.io.input, (-1, self.problem.n)
        given = decode(dtype, array_at(x, elements, dtype)).reshape(shape).copy()
        test_verify.StandIn(self.problem, spec=self.spec).launch(stream, x, y, elements, scale, rows, operands)
        out = array_at(y, elements, dtype)
        results = decode(dtype, out).reshape(shape).copy()
        self.change(given, results)
        out[:] = encode(dtype, results).reshape(-1)


@pytest.mark.parametrize(
    ("law", "change"),
    [("linear", add), ("norm", scale), ("inverse", swap), ("rows", look_at_another_row), ("ragged", differ_alone)],
)
def test_a_law_that_a_kernel_breaks_is_named(law: str, change: Change) -> None:
    problem = Problem.of(256, "float16", signed=True)
    spec = test_verify.replace(test_verify.SPEC, params=params_for(problem))
    with np.errstate(invalid="ignore"):
        assert broken_laws(Changed(problem, lambda x, y: None, spec), problem, CPU, 0) == []
        broken = broken_laws(Changed(problem, change, spec), problem, CPU, 0)
    assert any(sentence.startswith(law) for sentence in broken)
    assert all("outside" not in sentence for sentence in broken)


@pytest.mark.parametrize("fault", ["writes behind", "writes before", "changes its input"])
def test_what_is_written_elsewhere_is_noticed(fault: str) -> None:
    (broken,) = broken_laws(test_verify.StandIn(test_verify.PROBLEM, fault), test_verify.PROBLEM, CPU, 0)
    assert broken.startswith("outside")


@dataclass
class ChangedCodes(test_verify_codes.StandIn):
    """`fault` may name one of these too."""

    def launch(
        self, stream: int, x: int, y: int, elements: int, scale: float, rows: RowShape, operands: Mapping[str, int]
    ) -> None:
        super().launch(stream, x, y, elements, scale, rows, operands)
        if self.fault == "a scale of nothing":
            memory_at(operands["scales"], 1)[0] = 0xFF
            return
        codes, scales = memory_at(y, elements), memory_at(operands["scales"], elements // 128 * 4).view(np.float32)
        given = decode(self.problem.io.input, array_at(x, elements, self.problem.io.input))
        if self.fault == "a code of nothing":
            codes[-1] = 0x7F
        elif self.fault == "looks at another row" and not np.isfinite(given[:128]).all():
            codes[128:] ^= 1
        elif self.fault == "a scale with an offset":
            scales += 0.01


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("rows", "looks at another row"),
        ("ragged", "codes of a single row"),
        ("ragged", "scales of a single row"),
        ("outside", "writes behind"),
        ("outside", "writes behind the scales"),
        ("outside", "changes its input"),
        ("range", "a code of nothing"),
        ("scale", "a scale with an offset"),
        ("", ""),
    ],
)
def test_a_law_of_codes_that_a_kernel_breaks_is_named(law: str, fault: str) -> None:
    problem = Problem.parse("n128-bfloat16-to-fp8_group_128-accurate")
    with np.errstate(invalid="ignore"):
        broken = broken_laws(ChangedCodes(problem, fault), problem, CPU, 0)
    assert law in {sentence.partition(":")[0] for sentence in broken} if law else broken == []


@pytest.mark.parametrize("fault", ["a scale of nothing", ""])
def test_scales_that_are_bytes_are_numbers(fault: str) -> None:
    problem = Problem.parse("n32-bfloat16-to-mxfp8_32_even-accurate")
    kernel = ChangedCodes(problem, fault) if fault else test_verify_codes.StandIn(problem)
    with np.errstate(invalid="ignore"):
        broken = broken_laws(kernel, problem, CPU, 0)
    assert broken == ["range: a scale of finite values is not finite"] * 2 * bool(fault)
