"""Codes and scales: their shapes, strides and types by formula, and the tensors of a caller that take them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from hadagen.errors import TensorError
from hadagen.problem.formats import ROW, TENSOR, Format, Layout
from hadagen.runtime.call.runs import Output, check_apart, has_only_memory, span
from hadagen.runtime.checks import (
    check_alike,
    check_is_tensor,
    check_rows_like,
    check_writable,
    is_functional,
    kind_of,
    plain,
    shape_of,
)
from hadagen.runtime.operands.call import Call
from hadagen.truth import quantizer

NAMES = "out.codes", "out.scales"

# In compiled code too, results have the strides that those of x say.
EXACT_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)

Results = tuple[torch.Tensor, torch.Tensor]  # codes and scales


def order_of(x: torch.Tensor, form: Format) -> list[int]:
    """The dimensions of x in the order of its rows: by their strides, so that a permuted x is not copied; as they are
    where the layout of scales counts rows, heads are stretches of rows, or a dimension was expanded."""
    leading, strides = list(range(x.dim() - 1)), x.stride()
    if form.layout is Layout.ROW_MAJOR and not form.by_head and not x.is_contiguous() and 0 not in strides[:-1]:
        leading.sort(key=lambda dimension: -strides[dimension])
    return [*leading, x.dim() - 1]


def shaped(x: torch.Tensor, form: Format, codes: torch.Tensor, scales: torch.Tensor) -> Results:
    """View contiguous codes and scales as `outputs_of` says."""
    of_codes, of_scales = outputs_of(x, form)
    codes = codes.as_strided(*of_codes[:2])
    return codes, scales if form.group == TENSOR else scales.as_strided(*of_scales[:2])


def outputs_of(x: torch.Tensor, form: Format) -> tuple[Output, Output]:
    """Shape, strides and type of the codes and scales of x. By formula, so that sizes of x may be symbols without
    guards."""
    *leading, columns = x.shape
    order, rows, groups = order_of(x, form), prod(leading), form.scales_in_row(columns)
    of_codes, of_scales = quantizer.types(form, x.dtype)
    codes = (*leading, columns * form.element.bits // 8)
    scales = quantizer.shape_of_scales(leading, groups, form.layout)
    if form.group == TENSOR:
        scales = ()
    elif form.group == ROW and not form.keeps_dimension:
        scales = scales[:-1]
    strides = _strides(scales, order)
    if form.layout.in_columns:
        pitch, _ = form.layout.filled_up(rows, groups, of_scales.itemsize)
        strides = 1, torch.sym_max(pitch, 1)  # type: ignore[no-untyped-call]
    return (codes, _strides(codes, order), of_codes), (scales, strides, of_scales)


def _strides(sizes: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps, whose dimensions lie in memory in this order, the fastest last."""
    strides, step = [1] * len(sizes), 1
    for dimension in reversed(order[: len(sizes)]):
        strides[dimension] = step
        step *= torch.sym_max(sizes[dimension], 1)  # type: ignore[no-untyped-call]
    return tuple(strides)


def filling(scales: torch.Tensor) -> torch.Tensor | None:
    """What fills up each column of scales; None for nothing. PyTorch does not know that this memory belongs to the
    tensor, so an operator may not write it. Raises `TensorError` where the memory ends before."""
    (rows, groups), size = scales.shape, scales.element_size()
    pitch = Layout.COLUMN_MAJOR.filled_up(rows, groups, size)[0]
    if pitch == rows or not groups:
        return None
    first = scales.storage_offset()
    has, needs = scales.untyped_storage().nbytes(), (first + pitch * groups) * size
    if has < needs:
        raise TensorError(
            f"out.scales lies in {has} bytes but ends at byte {needs}, as columns are filled up to {pitch} rows; pass "
            "scales that a call returned"
        )
    return scales.as_strided((groups, pitch - rows), (pitch, 1), first + rows)


def as_asked(codes: torch.Tensor, scales: torch.Tensor, form: Format) -> Results:
    """Codes and scales of a format for which kernels write another layout, of what they write."""
    leading = (*codes.shape[:-2],)
    return codes.contiguous(), quantizer.laid_out(scales.reshape(-1, scales.shape[-1]), form.layout, leading)


def no_scales(x: torch.Tensor) -> torch.Tensor:
    """In place of scales where the call has one, because an operator returns no argument. It says nothing."""
    return x.new_zeros((), dtype=torch.float32)


def empty_results(x: torch.Tensor, form: Format) -> Results:
    """Codes and scales of a tensor without memory."""
    codes, scales = (x.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in outputs_of(x, form))
    if form.layout.in_columns:  # in memory that ends with what fills up the last column
        memory = scales.new_empty(scales.shape[1] * scales.stride(1))
        scales = memory.as_strided(scales.shape, scales.stride())
    return codes, scales


# ---- out= ------------------------------------------------------------------------------------------------------------
def written_of(destination: Sequence[Any], form: Format) -> Sequence[torch.Tensor]:
    """The tensors of a destination that are written: without scales, if the call has one scale. Raises TypeError."""
    written = destination[: 1 if form.group == TENSOR else 2]
    for name, each in zip(NAMES[: len(written)], written, strict=True):  # older Dynamos take False for True
        check_is_tensor(each, name)
    return [quantizer.as_bytes(each) for each in written]


def check_outputs(written: Sequence[torch.Tensor], outputs: Sequence[Output], x: torch.Tensor) -> None:
    """Raises `TensorError` for a tensor that is not like the result for x."""
    for name, each, (shape, strides, dtype) in zip(NAMES, written, outputs, strict=False):
        check_alike(x, each, name)
        if each.is_neg():
            raise TensorError(f"{name} is a view that negates what it reads; pass {name}.resolve_neg()")
        if is_functional(each) or is_functional(x):
            raise TensorError("out= is not possible under torch.func.functionalize; leave it out")
        is_like = each.layout is torch.strided and not each.is_nested and each.shape == shape and each.dtype == dtype
        if not is_like or each.device != x.device or not _lies_like(each, strides):
            lies = f" with the strides {each.stride()}" if each.layout is torch.strided and not each.is_nested else ""
            raise TensorError(
                f"{name} is {kind_of(each)} {shape_of(each)}{lies} on {each.device}; this call needs strided "
                f"{plain(dtype)} {shape} with the strides {strides} on {x.device}"
            )


def _lies_like(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has these strides, where they decide the place of an element."""
    each = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() == 0 or all(size == 1 or mine == wanted for size, mine, wanted in each)


def check_written(call: Call, written: Sequence[torch.Tensor]) -> None:
    """Raises `TensorError` for tensors that are not like the first results of a call, for memory that PyTorch forbids
    to write, and for memory that another tensor of the call has too."""
    form, given = call.spec.form, call.tensor_scale
    others = [("x", call.x), *([] if given is None else [("tensor_scale", given)]), *call.operands]
    if form is None:
        check_rows_like(call.x, written[0], call.spec.width)
        if has_only_memory(written[0]):
            check_writable(written[0])
            check_apart(written[0], "out", others)
        return
    check_outputs(written, outputs_of(call.rows, form), call.x)
    for name, each in zip(NAMES, written, strict=False):
        if has_only_memory(each):
            check_writable(each)
            check_results_apart([(name, each)], form, others)
            others.append((name, each))


def check_results_apart(
    written: Sequence[tuple[str, torch.Tensor]], form: Format, others: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Raises `TensorError` where codes or scales share memory with one of the others."""
    for name, each in written:
        size = span(each)
        if name == "out.scales" and form.layout.in_columns and size:  # with what fills up the last column
            size = each.shape[-1] * each.stride(-1) * each.element_size()
        check_apart(each, name, others, size)
