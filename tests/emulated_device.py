"""Tensors on the CPU, for which the runtime takes kernels as if they were on a GPU. The kernels read and write memory
by address alone, as real ones do, and check what they were promised."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from sample_trials import launch_for

from hadagen.problem.formats import TENSOR
from hadagen.problem.launch import LaunchSpec, RowShape
from hadagen.problem.operands import LIFT, PIECES, rows_of_right
from hadagen.problem.problem import DType, Problem, Rows, may_have_kernels
from hadagen.problem.scale import ScaleForm
from hadagen.runtime.call import runs
from hadagen.runtime.choose import tables
from hadagen.runtime.launch import kernels, streams
from hadagen.runtime.operands.packed import in_rows, packed_size, unpack_matrices
from hadagen.truth import quantizer
from hadagen.truth.accuracy import TORCH_DTYPE
from hadagen.truth.reference import transform

# What numpy takes for an element. It has no bfloat16, of which there are only kernels that quantize.
_ELEMENT = {DType.FLOAT16: np.float16, DType.FLOAT32: np.float32}


@dataclass(frozen=True)
class EmulatedKernel:
    """`in_place`: None if it takes both destinations."""

    problem: Problem
    in_place: bool | None
    spec: LaunchSpec
    launched: list["EmulatedKernel"]

    def prepared(
        self,
        elements: int,
        scale: float,
        rows: RowShape | None,
        operands: Mapping[str, int] | None = None,
        changing: Sequence[str] = (),
    ) -> Callable[..., None]:
        problem = self.problem
        self.spec.arguments(elements, scale, rows, {**(operands or {}), **dict.fromkeys(changing, 0)})
        low, high = self.spec.scale_form.range
        assert low <= abs(scale) <= high
        assert elements % problem.n == 0
        if problem.io.rows is Rows.CONTIGUOUS:
            assert rows in (None, (problem.n, problem.n, problem.n))
            rows = RowShape(problem.n, problem.n, problem.n)
        count, size = elements // problem.n, problem.io.input.bytes
        form = problem.io.form

        def quantize(stream: int, x: int, codes: int, *others: int) -> None:
            at = {**(operands or {}), **dict(zip(changing, others, strict=True))}
            assert (x | codes | at.get("scales", 0)) % 16 == 0
            columns = problem.n if form.group < 0 else form.group * at["scales_in_row"]
            source = _memory(x, getattr(torch, problem.io.input.value), elements).view(-1, problem.n).double().numpy()
            values = transform(problem, source, scale, self._read(operands or {})) if problem.n > 1 else source * scale
            heads = elements // problem.unit // at["units_in_head"] if form.by_head else 1
            given = _memory(at["tensor_scale"], torch.float32, heads) if form.needs_scale else None
            dtype = getattr(torch, problem.io.input.value)
            exact = torch.from_numpy(values).float().view(-1, columns)
            found, scales = quantizer.quantize(exact.to(dtype).float() if form.rounded else exact, form, dtype, given)
            _memory(codes, torch.uint8, found.numel()).copy_(found.view(torch.uint8).flatten())
            if form.group != TENSOR:  # but for what fills them up
                shape = len(exact), form.scales_in_row(columns)
                room = quantizer.room(*shape, form.layout, scales.element_size())
                target = quantizer.arranged(_memory(at["scales"], scales.dtype, room), *shape, form.layout)
                is_one = quantizer.laid_out(torch.ones(shape, dtype=torch.uint8), form.layout).bool()
                if scales.element_size() == 1:  # an element of FP8 is not chosen by every release of PyTorch
                    scales, target = scales.view(torch.uint8), target.view(torch.uint8)
                target.copy_(torch.where(is_one, scales, target))
            self.launched.append(self)

        def launch(stream: int, x: int, y: int) -> None:
            assert self.in_place in (None, x == y)
            assert (x | y) % (size if problem.io.rows is Rows.PITCHED else 16) == 0
            if x == y:
                assert rows.x_pitch == rows.y_pitch
            source = self._rows(x, count, rows.columns, rows.x_pitch)
            target = self._rows(y, count, rows.columns, rows.y_pitch)
            row = np.zeros((1, problem.n))
            read = self._read(operands or {})
            with np.errstate(over="ignore"):  # infinities are what a kernel stores too
                for index in reversed(range(count)):  # one after the other, so that rows that overlap would show
                    row[0, : rows.columns] = source[index]
                    target[index] = transform(problem, row, scale, read)[0, : rows.columns]
            self.launched.append(self)

        return launch if form is None else quantize

    def launch(self, stream: int, x: int, y: int, *arguments: Any) -> None:
        self.prepared(*arguments)(stream, x, y)

    def _read(self, operands: Mapping[str, int]) -> dict[str, Any]:
        return read_operands(self.problem, operands)

    def _rows(self, address: int, count: int, columns: int, pitch: int) -> Any:
        size = self.problem.io.input.bytes
        memory = (ctypes.c_byte * (((count - 1) * pitch + columns) * size)).from_address(address)
        flat = np.frombuffer(memory, _ELEMENT[self.problem.io.input])
        return np.lib.stride_tricks.as_strided(flat, (count, columns), (pitch * size, size))


def _memory(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    if not count:  # such as codes of a format without codes, which torch.frombuffer refuses
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_byte * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def read_operands(problem: Problem, operands: Mapping[str, int]) -> dict[str, Any]:
    """What lies at the addresses of the operands now."""
    order, signs = problem.order, -(-problem.n // 8)
    found: dict[str, Any] = {}
    pieces = PIECES * 2 if problem.transform.real else 1  # bytes of an entry
    sizes = {"matrix": pieces * packed_size(order) // 2, "signs_before": signs, "signs_after": signs}
    if problem.transform.paired:
        sizes["right_matrix"] = 2 * PIECES * problem.length**2
    for name, size in sizes.items():
        if address := operands.get(name, 0):
            assert address % 16 == 0
            found[name] = np.frombuffer((ctypes.c_byte * size).from_address(address), np.uint8)
    if problem.transform.real:
        numbers = torch.from_numpy(found["matrix"].copy()).view(TORCH_DTYPE[problem.io.input]).double()
        entries = sum(in_rows(piece, order) for piece in numbers.chunk(PIECES))
        found["matrix"] = (entries / (1 << LIFT[problem.io.input])).numpy()
        if problem.transform.paired:
            numbers = torch.from_numpy(found["right_matrix"].copy()).view(torch.bfloat16).double()
            entries = sum(in_rows(piece, problem.length) for piece in numbers.chunk(PIECES))
            found["right_matrix"] = entries[rows_of_right(problem.length).argsort()].numpy()
    elif order > 1:
        found["matrix"] = unpack_matrices(torch.from_numpy(np.tile(found["matrix"], 2)), [order])[0].numpy()
    return found


class EmulatedDevice:
    """`launched`: the kernels that ran. `served`: the rows that there are kernels for, and `without`: the problems that
    there are none for. `form`: that of fast kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[EmulatedKernel] = []
        self.served: tuple[Rows, ...] = tuple(Rows)
        self.without: set[str] = set()  # keys
        self.form = ScaleForm.FLOAT16_FACTORS
        self.searches = 0
        tables.forget()
        monkeypatch.setattr(runs, "takes_kernels", lambda x: x.numel() > 0)
        monkeypatch.setattr(kernels, "find", self._find)
        monkeypatch.setattr(streams, "raw_stream", lambda device: 0)
        monkeypatch.setattr(streams, "current_device", lambda: -1)  # what PyTorch calls the CPU

    def _find(self, kind: kernels.Kind, elements: int) -> EmulatedKernel | None:
        self.searches += 1
        problem = kind.problem
        if problem.io.rows not in self.served or problem.key in self.without:
            return None
        if problem.io.input is DType.BFLOAT16 and not problem.io.form:
            return None
        if problem.order > 1 and (problem.io.input is DType.FLOAT32 or problem.n % 8 or problem.length in (2, 4)):
            return None
        if problem.transform.real and not (problem.transform.paired or may_have_kernels(problem.order, problem.length)):
            return None
        form = self.form if problem.may_round_often else ScaleForm.FP32
        spec = replace(launch_for(problem), scale_form=form)
        return EmulatedKernel(problem, kind.in_place, spec, self.launched)

    @property
    def runs(self) -> int:
        """How many different launches are remembered."""
        return len({id(run) for run in tables.calls.values()})

    def ran(self) -> list[str]:
        """The names of the problems of the kernels that ran since this was asked last."""
        names = [kernel.problem.key for kernel in self.launched]
        self.launched.clear()
        return names


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield EmulatedDevice(monkeypatch)
    tables.forget()


def same(y: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(y.double(), wanted.double(), rtol=1e-3, atol=1e-2)
