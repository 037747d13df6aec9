"""The kernel of a call that quantizes: which one it is, and a `Run` that launches it. A kernel takes contiguous x, at
an address that is a multiple of 16 bytes, and does all of it: the rotation, the largest magnitudes, codes and scales.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hadagen import quantizer
from hadagen.driver import Launch
from hadagen.errors import UsageError
from hadagen.formats import ROW, TENSOR, Format, Layout
from hadagen.launch import RowShape
from hadagen.problem import LEAST_GROUP, Problem
from hadagen.runtime import kernels, repeat
from hadagen.runtime.operands import Operands, addresses
from hadagen.runtime.repeat import ALIGNMENT
from hadagen.runtime.rotate import problem_of

_MOST_GROUPS = 1 << 32  # which kernels count in 32 bits


def is_ready(x: torch.Tensor) -> bool:
    """Whether kernels take x as it lies."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def shaped(
    x: torch.Tensor, form: Format, codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x's shape, and scales, from those of rows."""
    if form.group == TENSOR:
        scales = x.new_zeros((), dtype=torch.float32)  # the caller's; an operator returns no argument
    elif form.layout is Layout.ROW_MAJOR:
        has_groups = form.group != ROW or form.name == "int8-row"
        scales = scales.view(x.shape[:-1] + (scales.shape[1:] if has_groups else ()))
    return codes.view(*x.shape[:-1], codes.shape[-1]), scales


class Run:
    """Launches a kernel for tensors that differ from x in their address only."""

    def __init__(self, x: torch.Tensor, form: Format, launch: Launch) -> None:
        columns = x.shape[-1]
        rows, groups = x.numel() // columns, form.scales_in_row(columns)
        codes, scales = quantizer.empty(rows, columns, form, x.dtype, torch.device("meta"))
        self._laid_out = rows, groups, form.layout, scales.dtype
        self._is_filled_up = scales.untyped_storage().nbytes() > rows * groups * scales.element_size()
        self._parts = [
            (tuple(part.shape), part.stride(), part.dtype) for part in shaped(x.to("meta"), form, codes, scales)
        ]
        self._launch, self._device, self._of_tensor = launch, x.get_device(), form.group == TENSOR
        self._empty = repeat.empty_strided["cuda"]

    def __call__(self, address: int, given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of x at that address. given: the scale of the call, if the format needs one."""
        if kernels.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(address, given)
        codes, scales = self._parts
        made: torch.Tensor = self._empty(*codes)
        of_groups: torch.Tensor
        if self._of_tensor:
            of_groups = made.new_zeros((), dtype=torch.float32)  # the operator's second result, which says nothing
        elif self._is_filled_up:
            of_groups = quantizer.laid_out_empty(*self._laid_out, made.device)
        else:
            of_groups = self._empty(*scales)
        changing = [] if self._of_tensor else [of_groups.data_ptr()]
        if given is not None:
            changing.append(given.data_ptr())
        self._launch(kernels.raw_stream(self._device), address, made.data_ptr(), *changing)
        return made, of_groups


def find(x: torch.Tensor, of: Operands, form: Format, round_first: bool) -> Run | None:
    """What launches a kernel for tensors like x; None if there is none."""
    problem = _problem_of(x, of, form, round_first)
    if problem is None or x.numel() % problem.unit or x.numel() // LEAST_GROUP >= _MOST_GROUPS:
        return None
    kernel = kernels.find_for_scale(kernels.Kind(x.get_device(), problem, in_place=False), x.numel(), of.scale)
    if kernel is None:
        return None
    changing = ([] if form.group == TENSOR else ["scales"]) + ["tensor_scale"] * form.needs_scale
    columns = x.shape[-1]
    like = quantizer.laid_out_empty(
        x.numel() // columns, form.scales_in_row(columns), form.layout, torch.uint8, torch.device("meta")
    )
    operands = addresses(of)
    operands |= {"scales_in_row": form.scales_in_row(columns), "scale_pitch": quantizer.pitch(like)}
    rows = RowShape(of.n, of.n, of.n)
    return Run(x, form, kernel.prepared(x.numel(), of.scale, rows, operands, changing))


def _problem_of(x: torch.Tensor, of: Operands, form: Format, round_first: bool) -> Problem | None:
    """The problem of a kernel that does all of it; None if no kernel can."""
    group = x.shape[-1] if form.group == ROW else form.group
    to = replace(form, group=group, rounded=round_first and not form.rounds_first)
    try:
        return None if of.batch_invariant else problem_of(x, of, to)
    except UsageError:  # groups that are no part of a tile
        return None
