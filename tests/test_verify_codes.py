"""Verification of kernels that quantize, on a stand-in for one that is right, or wrong in many ways."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from emulated_device import read_operands
from measure_sample import array_at, memory_at

from hadagen.measure.verify import TORCH_DTYPE, Verifier
from hadagen.plan.arch import load_arch
from hadagen.plan.space import Space, build_plan
from hadagen.problem.bits import decode
from hadagen.problem.launch import LaunchSpec, RowShape
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Outcome
from hadagen.truth import quantizer
from hadagen.truth.reference import transform

KEYS = (
    "n128-bfloat16-to-fp8_group_128-accurate",
    "n32-signed-float16-to-mxfp4_32_swizzled-accurate",
    "n64-bfloat16-to-mxfp8_32_column_major-accurate",
    "n16-float16-to-nvfp4_16-accurate",
    "n128-float16-to-int8_row_512-accurate",
    "n64-bfloat16-to-fp8_tensor-accurate",
    "n64-bfloat16-to-fp8_head-accurate",
    "n32-float16-to-fp8_head_fa3-accurate",
    "n1-bfloat16-to-int4_row_256-accurate",
    "n128-float16-to-fp8_group_128_column_major-accurate",
    "n64-float32-to-largest_64-accurate",
)


@pytest.fixture(autouse=True)
def few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.measure.verify._LEAST_ELEMENTS", 1 << 14)


def launch_of(problem: Problem) -> LaunchSpec:
    arch = load_arch("sm90")
    return build_plan(problem, Space(problem, arch).seeds()[0], arch).launch


def memory(address: int, count: int) -> torch.Tensor:
    """Bytes there. Where there are none, the address may be any."""
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(memory_at(address, count))


@dataclass
class StandIn:
    """A correct kernel that runs on the CPU, and ways to break it."""

    problem: Problem
    fault: str = ""
    spec: LaunchSpec = field(init=False)
    resident_blocks: int = 4
    calls: int = 0

    def __post_init__(self) -> None:
        self.spec = launch_of(self.problem)

    def launch(
        self, stream: int, x: int, y: int, elements: int, scale: float, rows: RowShape, operands: Mapping[str, int]
    ) -> None:
        self.calls += 1
        self.spec.arguments(elements, scale, rows, operands)  # none is missing
        problem, form, dtype = self.problem, self.problem.io.form, self.problem.io.input
        given = array_at(x, elements, dtype)
        values = transform(
            problem, decode(dtype, given).reshape(-1, problem.n), scale, read_operands(problem, operands)
        )
        exact = torch.from_numpy(values).float().view(-1, problem.unit)
        of_call = None
        if form.needs_scale:
            heads = elements // problem.unit // operands["units_in_head"] if form.by_head else 1
            of_call = torch.from_numpy(memory_at(operands["tensor_scale"], heads, ctypes.c_float).copy())
            if self.fault == "the scale of another head":
                of_call = of_call.roll(1)
        if self.fault == "largest of half a group" and form.group > 0:
            groups = exact.view(-1, form.group)
            groups[:, form.group // 2 :] *= 0.5
        codes, scales = quantizer.quantize(exact, form, TORCH_DTYPE[dtype], of_call)
        raw = codes.contiguous().view(torch.uint8).flatten()
        tail = elements % self.spec.tile_elements * form.element.bits // 8
        if self.fault == "codes of a single row" and elements == problem.unit:
            raw[0] ^= 3
        elif self.fault == "differs every time":
            tiny = (raw & 0x7F < 0x10).nonzero()[:1]  # a wrong sign of it is hardly an error
            raw[tiny] ^= self.calls % 2 << 7
        elif self.fault == "swaps neighbors":
            raw = raw.view(-1, 2).flip(1).flatten()
        out = memory(y, len(raw))
        if self.fault == "leaves out the ragged tile" and tail:
            raw[-tail:] = out[-tail:]
        out.copy_(raw)
        if form.group > 0:
            stored = quantizer.memory_of(scales)
            if self.fault == "scales twice as large" and form.scale == "float32":
                scales.mul_(2)
            memory(operands["scales"], len(stored)).copy_(stored)
            if self.fault == "writes behind the scales":
                memory(operands["scales"] + len(stored), 1)[0] = 0
            elif self.fault == "scales of a single row" and elements == problem.unit:
                memory(operands["scales"], 1)[0] ^= 1
            elif self.fault == "fills up the layout":
                memory(operands["scales"], len(stored))[-1] = 1
        if self.fault == "writes behind":
            memory(y + len(raw), 1)[0] = 0
        elif self.fault == "changes its input":
            given[0] ^= 1


def outcome(problem: Problem, fault: str = "") -> tuple[Outcome, str]:
    answer = Verifier(torch.device("cpu"), 0).check(StandIn(problem, fault), problem)
    return answer.outcome, answer.detail


@pytest.mark.parametrize("key", KEYS)
def test_what_is_right_is_found_right(key: str) -> None:
    assert outcome(Problem.parse(key)) == (Outcome.OK, "")


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("largest of half a group", Outcome.WRONG_ANSWER),
        ("swaps neighbors", Outcome.WRONG_ANSWER),
        ("leaves out the ragged tile", Outcome.WRONG_ANSWER),
        ("codes of a single row", Outcome.WRONG_ANSWER),
        ("scales twice as large", Outcome.WRONG_ANSWER),
        ("writes behind", Outcome.WRONG_ANSWER),
        ("changes its input", Outcome.WRONG_ANSWER),
        ("writes behind the scales", Outcome.WRONG_ANSWER),
        ("scales of a single row", Outcome.WRONG_ANSWER),
        ("differs every time", Outcome.UNSTABLE),
    ],
)
def test_what_is_wrong_is_found_wrong(fault: str, found: Outcome) -> None:
    assert outcome(Problem.parse(KEYS[0]), fault)[0] is found


def test_each_head_has_its_scale() -> None:
    key = "n64-bfloat16-to-fp8_head-accurate"
    assert outcome(Problem.parse(key), "the scale of another head")[0] is Outcome.WRONG_ANSWER


def test_what_fills_up_a_layout_stays_zero() -> None:
    assert outcome(Problem.parse(KEYS[1]), "fills up the layout")[0] is Outcome.WRONG_ANSWER
