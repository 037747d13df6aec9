"""The kernel of a call that quantizes: which one it is, and a `Run` that launches it. A kernel takes rows without gaps
at an address that is a multiple of 16 bytes, and does all of it: rotation, largest magnitudes, codes and scales."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from hadagen import quantizer
from hadagen.driver import Launch
from hadagen.errors import TensorError, UsageError
from hadagen.formats import ROW, TENSOR, Format, Layout
from hadagen.launch import RowShape
from hadagen.operands import sizes_for
from hadagen.problem import LEAST_GROUP, Problem
from hadagen.runtime import kernels, repeat, streams
from hadagen.runtime.operands import Operands, addresses
from hadagen.runtime.repeat import ALIGNMENT
from hadagen.runtime.rotate import check_whole, problem_of

_MOST_GROUPS = 1 << 32  # which kernels count in 32 bits


Part = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and type
Results = tuple[torch.Tensor, torch.Tensor]  # codes and scales


def order_of(x: torch.Tensor, form: Format) -> list[int]:
    """The dimensions of x in the order of its rows: by their strides, so that a permuted x is not copied; as they are
    where the layout of scales counts rows, heads are stretches of rows, or a dimension was expanded."""
    leading, strides = list(range(x.dim() - 1)), x.stride()
    if form.layout is Layout.ROW_MAJOR and not form.by_head and not x.is_contiguous() and 0 not in strides[:-1]:
        leading.sort(key=lambda dimension: -strides[dimension])
    return [*leading, x.dim() - 1]


def is_ready(x: torch.Tensor) -> bool:
    """Whether kernels take x, whose dimensions are in order, as it lies."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def shaped(x: torch.Tensor, form: Format, codes: torch.Tensor, scales: torch.Tensor) -> Results:
    """Codes and scales like `parts_of` x, of contiguous codes of rows in their order and their scales."""
    of_codes, of_scales = parts_of(x, form)
    if form.group == TENSOR:
        scales = codes.new_zeros((), dtype=torch.float32)  # the caller's; an operator returns no argument
    return codes.as_strided(*of_codes[:2]), scales.as_strided(*of_scales[:2])


def parts_of(x: torch.Tensor, form: Format) -> tuple[Part, Part]:
    """What codes and scales of x are. By formula, so that sizes of x may be symbols, without a guard on them."""
    *leading, columns = x.shape
    order, rows, groups = order_of(x, form), prod(leading), form.scales_in_row(columns)
    of_codes, of_scales = quantizer.types(form, x.dtype)
    codes = (*leading, columns * form.element.bits // 8)
    scales = quantizer.shape_of_scales(leading, groups, form.layout)
    if form.group == TENSOR:
        scales = ()
    elif form.group == ROW and form.name != "int8-row":
        scales = scales[:-1]
    strides = _strides(scales, order)
    if form.layout.in_columns:
        pitch, _ = form.layout.filled_up(rows, groups, of_scales.itemsize)
        strides = 1, torch.sym_max(pitch, 1)  # type: ignore[no-untyped-call]
    return (codes, _strides(codes, order), of_codes), (scales, strides, of_scales)


def _strides(sizes: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    """Those of a tensor without gaps, whose dimensions lie in memory in this order, the fastest last."""
    strides, step = [1] * len(sizes), 1
    for dimension in reversed(order[: len(sizes)]):
        strides[dimension] = step
        step *= torch.sym_max(sizes[dimension], 1)  # type: ignore[no-untyped-call]
    return tuple(strides)


class Run:
    """Launches a kernel for tensors that differ from x in their address only. `parts`: what codes and scales are."""

    def __init__(self, x: torch.Tensor, form: Format, launch: Launch) -> None:
        self.parts = parts_of(x, form)
        columns = x.shape[-1]
        rows, groups = x.numel() // columns, form.scales_in_row(columns)
        self._laid_out = rows, groups, form.layout, self.parts[1][2]
        self._is_filled_up = quantizer.room(rows, groups, form.layout, self.parts[1][2].itemsize) > rows * groups
        self._launch, self._device, self._of_tensor = launch, x.get_device(), form.group == TENSOR
        self._empty = repeat.empty_strided[x.device.type]

    def __call__(self, address: int, given: torch.Tensor | None) -> Results:
        """Codes and scales of x at that address. given: the scale of the call, if the format needs one."""
        if streams.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(address, given)
        codes: torch.Tensor = self._empty(*self.parts[0])
        scales: torch.Tensor
        if self._of_tensor:
            scales = codes.new_zeros((), dtype=torch.float32)  # the operator's second result, which says nothing
        elif self._is_filled_up:
            scales = quantizer.laid_out_empty(*self._laid_out, codes.device)
        else:
            scales = self._empty(*self.parts[1])
        self._start(address, [codes.data_ptr()] if self._of_tensor else [codes.data_ptr(), scales.data_ptr()], given)
        return codes, scales

    def into(self, address: int, given: torch.Tensor | None, out: Sequence[torch.Tensor]) -> None:
        """The same into tensors like `parts`; without the second, where the call has one scale."""
        if streams.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.into(address, given, out)
        targets = [each.data_ptr() for each in out]
        if any(target % ALIGNMENT for target in targets):
            return copy_into(out, self(address, given))
        if self._is_filled_up and self._laid_out[2] is Layout.SWIZZLED:
            out[1].zero_()
        repeat.increment_version(out)  # PyTorch does not see that a kernel writes
        self._start(address, targets, given)

    def _start(self, address: int, targets: list[int], given: torch.Tensor | None) -> None:
        if given is not None:
            targets.append(given.data_ptr())
        self._launch(streams.raw_stream(self._device), address, *targets)


def fill_up(scales: torch.Tensor) -> None:
    """Zero what fills up each column of scales. Raises `TensorError` where their memory ends before."""
    (rows, groups), size = scales.shape, scales.element_size()
    pitch = Layout.COLUMN_MAJOR.filled_up(rows, groups, size)[0]
    if pitch == rows or not groups:
        return
    first = scales.storage_offset()
    has, needs = scales.untyped_storage().nbytes(), (first + pitch * groups) * size
    if has < needs:
        raise TensorError(
            f"out.scales lies in {has} bytes but ends at byte {needs}, as columns are filled up to {pitch} rows; pass "
            "scales that a call returned"
        )
    scales.as_strided((groups, pitch - rows), (pitch, 1), first + rows).zero_()


def copy_into(out: Sequence[torch.Tensor], made: Results) -> None:
    for each, values in zip(out, made, strict=False):  # out has no scales, where the call has one
        each.copy_(values)


def find(x: torch.Tensor, of: Operands, form: Format, round_first: bool, heads: int) -> Run | None:
    """What launches a kernel for tensors like x; None if there is none. heads: how many have a scale, where they do."""
    check_whole(of)
    problem = problem_for(x, of, form, round_first)
    if problem is None or x.numel() % problem.unit or x.numel() // LEAST_GROUP >= _MOST_GROUPS:
        return None
    if of.batch_invariant and x.shape[-1] % problem.unit:  # where kernels take some numbers of rows only
        return None
    units_in_head, rest = divmod(x.numel() // problem.unit, heads)
    if rest:
        return None
    kind = kernels.Kind(x.get_device(), problem, False, of.batch_invariant)
    kernel = kernels.find_for_scale(kind, x.numel(), of.scale)
    if kernel is None:
        return None
    changing = ([] if form.group == TENSOR else ["scales"]) + ["tensor_scale"] * form.needs_scale
    columns = x.shape[-1]
    operands = addresses(of) | sizes_for(form, x.numel() // columns, columns, units_in_head)
    rows = RowShape(of.n, of.n, of.n)
    return Run(x, form, kernel.prepared(x.numel(), of.scale, rows, operands, changing))


def problem_for(x: torch.Tensor, of: Operands, form: Format, round_first: bool) -> Problem | None:
    """The problem of a kernel that does all of it; None if no kernel can."""
    try:
        return problem_of(x, of, form.for_rows(x.shape[-1], round_first))
    except UsageError:  # groups that are no part of a tile
        return None
