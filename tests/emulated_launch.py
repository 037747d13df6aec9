"""A kernel on the emulator, launched as one on a GPU: with addresses of memory that PyTorch has on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from measure_sample import array_at

from hadagen import quantizer
from hadagen.emulator import RESIDENT_CLUSTERS, EmulationError, HostModule
from hadagen.formats import TENSOR
from hadagen.launch import LaunchSpec, RowShape, Source
from hadagen.operands import kernel_operands, verification_operands
from hadagen.problem import Problem


def bytes_at(address: int, count: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (count,))


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
                given[name] = bytes_at(operands[name], array.nbytes)
        numbers = {param.name for param in self.spec.params} - {"x", "y", "elements", "scale_word", "scales", *given}
        given |= {name: operands[name] for name in numbers if name in operands}
        source = array_at(x, (count - 1) * x_pitch + columns, problem.io.input)
        scales = None
        if form is None:
            out = array_at(y, (count - 1) * y_pitch + columns, problem.io.input)
        else:
            out = bytes_at(y, elements * form.element.bits // 8)
            units, groups = elements // problem.unit, form.scales_in_row(problem.unit)
            if form.needs_scale:
                given["tensor_scale"] = bytes_at(operands["tensor_scale"], 4 * (units if form.by_head else 1))
            if form.group != TENSOR:
                size = form.scale_bytes(problem.io.input.bytes)
                room = quantizer.room(units, groups, form.layout, size)
                scales = bytes_at(operands["scales"], room * size), units * groups * size
        report = self.module.run(
            self.source.entry,
            self.spec,
            source,
            source if x == y else out,
            scale=scale,
            elements=elements,
            rows=count if self.spec.reads_rows else 0,
            shape=rows if self.spec.reads_rows else None,
            operands=given,
            scales=scales,
        )
        if report.complaint:
            raise EmulationError(report.complaint)
