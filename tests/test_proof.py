"""What is compared with PyTorch of a kernel that was compiled here, without a GPU: see `EmulatedKernel`."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_device import EmulatedKernel
from sample_trials import launch_for

from hadagen.problem.problem import Problem
from hadagen.runtime.launch import proof
from hadagen.truth.reference import transform

# Param → the problem whose kernels are right if they read it, and wrong if they do not.
READ = {
    "matrix": "n96-k12-float16-fast",
    "signs_before": "n96-k12-signed-float16-fast",
    "signs_after": "n64-signed-float32-accurate",
    "right_matrix": "n384-k6-c64-real-float16-accurate",
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few elements are compared, on the CPU."""
    device = torch.device
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr("torch.device", lambda *which: device("cpu"))
    monkeypatch.setattr(proof, "_ELEMENTS", 1 << 12)


def is_right(kind: type[EmulatedKernel], problem: Problem) -> bool:
    kernel: Any = kind(problem, None, replace(launch_for(problem), tile_elements=problem.unit), [])
    object.__setattr__(kernel, "device", 0)
    return proof.is_right(kernel, problem)


class Blind(EmulatedKernel):
    """Does not read one of its operands."""

    unread = ""

    def _read(self, operands: Any) -> Any:
        found = super()._read(operands)
        return found | {self.unread: found[self.unread] * 0}


@pytest.mark.parametrize(("unread", "key"), [*READ.items(), ("matrix", "n96-k12-real-signed-float16-accurate")])
def test_every_operand_is_compared(unread: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blind, "unread", unread)
    problem = Problem.parse(key)
    assert (is_right(EmulatedKernel, problem), is_right(Blind, problem)) == (True, False)


class FirstHead(EmulatedKernel):
    """Takes the scale of the first head for all."""

    def prepared(self, elements: int, scale: float, rows: Any, operands: Any = None, changing: Any = ()) -> Any:
        one_head = {**operands, "units_in_head": elements // self.problem.unit}
        return super().prepared(elements, scale, rows, one_head, changing)


@pytest.mark.parametrize("key", ["n64-float16-to-fp8_head-accurate", "n64-float16-to-fp8_head_fa3_rounded-accurate"])
def test_scales_of_heads_are_compared(key: str) -> None:
    problem = Problem.parse(key)
    assert (is_right(EmulatedKernel, problem), is_right(FirstHead, problem)) == (True, False)


@pytest.mark.parametrize(
    "key",
    [
        "n64-float16-fast",
        "n64-float32-accurate",
        "n64-float16-to-fp8_group_128-accurate",
        "n32-float32-to-mxfp4_32_even-accurate",
        "n32-float16-to-nvfp4_16-accurate",
        "n64-float32-to-fp8_head-accurate",
        "n64-float32-to-largest_64-accurate",
    ],
)
def test_large_values_are_compared(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right kernels are found right, and those whose sums overflow are not."""
    problem = Problem.parse(key)
    assert is_right(EmulatedKernel, problem)

    def overflowing(problem: Problem, x: Any, *others: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return transform(problem, np.where(np.abs(x) > 2.0**13, np.inf, x), *others)

    monkeypatch.setattr("emulated_device.transform", overflowing)
    assert not is_right(EmulatedKernel, problem)


def test_rows_without_operands_are_compared_as_before() -> None:
    for key in ("n64-float16-fast", "n64-float16-accurate-pitched"):
        problem = Problem.parse(key)
        kernel: Any = EmulatedKernel(problem, None, replace(launch_for(problem), tile_elements=64), [])
        object.__setattr__(kernel, "device", 0)
        columns = 61 if "pitched" in key else 64
        assert proof._is_right(kernel, problem, columns, False, 1.0)
        assert len(kernel.launched) == 2
