"""Finds the launch of a call: a kernel that takes its tensors as they lie, or one that takes a copy of x.

There are two kinds of kernels. A *contiguous* kernel takes whole rows of n elements without gaps, at addresses that are
multiples of 16 bytes. A *strided* kernel takes rows of up to n elements, which it zero-pads, at any address and any
distance from each other; only H alone has one.
"""

from __future__ import annotations

import functools

import torch

from hadagen.errors import UsageError
from hadagen.gpu.driver import Launch
from hadagen.problem.formats import TENSOR, Layout
from hadagen.problem.launch import RowShape
from hadagen.problem.operands import sizes_for
from hadagen.problem.problem import LEAST_GROUP, Problem, Rows, padded_length
from hadagen.runtime.call import runs, slow
from hadagen.runtime.call.outputs import as_asked, order_of, outputs_of
from hadagen.runtime.call.runs import ALIGNMENT, Run, RunOfCopy, RunOfRows, is_ready, like, row_pitch
from hadagen.runtime.choose.reasons import Asked
from hadagen.runtime.launch import kernels
from hadagen.runtime.operands.call import Call, kernel_form
from hadagen.runtime.operands.packed import addresses, is_packed, is_pair, is_real
from hadagen.truth import quantizer

_MOST_GROUPS = 1 << 32  # which kernels count in 32 bits
_MOST_UNITS = 1 << 31  # of the result of a prologue with two parts, as `prologues.reciprocal` says


def find(call: Call) -> Run | None:
    """The run of a call, for all calls that differ in addresses only; None if PyTorch computes it."""
    key = call.key
    run = runs.known(call.x, key)
    if run is None and runs.takes_kernels(call.x):
        run = _linear(call) if call.spec.is_linear else _of_rows(call)
        if run is not None:
            run.text, run.scale = call.spec.text, call.scale
            runs.remember(call.x, key, run)
    return run


# ---- the problem -----------------------------------------------------------------------------------------------------
def problem_of(call: Call, lie: Rows = Rows.CONTIGUOUS) -> Problem | None:
    """The problem of a kernel that does all of a call; None if no kernel can."""
    spec, form, rows = call.spec, kernel_form(call), call.rows
    for _, each in call.operands:
        if each.data_ptr() % ALIGNMENT or not each.is_contiguous():
            return None
    if (call.matrices is not None and not is_packed(call.matrices)) or (spec.swapped and (form is None or spec.n == 1)):
        return None
    paired = is_pair(call.matrices, spec.orders)
    try:
        return kernels.problem_of(
            spec.n or padded_length(rows.shape[-1]),
            rows.dtype,
            spec.numerics,
            lie,
            order=spec.orders[0] if spec.orders else 1,
            signed=spec.signs or spec.signs_after,
            swapped=spec.swapped,
            real=paired or is_real(call.matrices, spec.orders),
            paired=paired,
            to=form.for_rows(rows.shape[-1], spec.round_first) if form else None,
            prologue=spec.prologue.name if spec.prologue else "",
        )
    except UsageError:  # groups that are no part of a tile
        return None


def misfit(call: Call, problem: Problem) -> str | None:
    """Why kernels of a problem do not take the tensors of a call; None if they do."""
    rows, form, prologue, heads = call.rows, call.spec.form, call.spec.prologue, call.heads
    elements, columns, unit = rows.numel(), rows.shape[-1], problem.unit
    if form is not None:
        if elements % unit:
            return f"kernels take a multiple of {unit} elements, and the result has {elements}; pad the rows of x"
        if elements // LEAST_GROUP >= _MOST_GROUPS:
            most = LEAST_GROUP * _MOST_GROUPS
            return (
                f"kernels take fewer than {most} elements, and the result has {elements}; divide the rows among calls"
            )
        if call.spec.batch_invariant and columns % unit:  # where kernels take some numbers of rows only
            return (
                f"rows of {columns} elements are no multiple of {unit}; pad the rows of x, or leave out batch_invariant"
            )
        if elements // unit % heads:
            has = elements // heads
            return f"kernels take heads of a multiple of {unit} elements, and a head has {has}; pad the rows of x"
    if prologue is not None and prologue.width > 1:
        row_rest, size = columns % unit, unit * rows.element_size()
        if row_rest or size < ALIGNMENT or elements // unit >= _MOST_UNITS:
            return f"kernels do not take rows of {columns} elements after {prologue.name}; compute it before the call"
    return None


def asked_of(call: Call) -> Asked:
    """What a call asks for, where PyTorch computes it; with what does not fit, if a problem has kernels."""
    asked, problem = slow.asked_of(call), None if call.spec.is_linear else problem_of(call)
    reason = problem and misfit(call, problem)
    return asked._replace(misfit=reason) if reason else asked


# ---- rotations alone -------------------------------------------------------------------------------------------------
def _linear(call: Call) -> Run | None:
    """The run of a rotation without prologue and quantizer."""
    x, spec = call.x, call.spec
    if spec.is_h_alone:
        return _h_alone(call)
    problem = problem_of(call)
    if problem is None:
        return None
    if is_ready(x) and (launch := _launch(call, problem, spec.inplace)):
        return Run(x, launch, (like(x),))
    launch = _launch(call, problem, True)
    return RunOfCopy(x, launch, x.shape[-1]) if launch else None


def _h_alone(call: Call) -> Run | None:
    x, spec = call.x, call.spec
    pitch = row_pitch(blocks_of(call, x))
    launch = launch_of_h(call, pitch, pitch if spec.inplace else call.n, x.data_ptr() % ALIGNMENT == 0, spec.inplace)
    if launch is not None:
        return Run(x, launch, (like(x),))
    columns, n = call.n, padded_length(call.n)
    kinds = ((columns, Rows.PITCHED), (n, Rows.CONTIGUOUS))  # elements of a row of the copy, and how rows lie
    for width, lie in kinds if columns < n else reversed(kinds):
        launch = _launch_of_rows(call, lie, True, RowShape(width, width, width))
        if launch is not None:
            return RunOfCopy(x, launch, width if not spec.n else x.shape[-1])
    return None


def launch_of_h(call: Call, x_pitch: int | None, y_pitch: int | None, aligned: bool, in_place: bool) -> Launch | None:
    """The launch of a kernel for H alone that takes x and a target as they are, with these `row_pitch`es; None if there
    is none. In place or without a shared element."""
    if x_pitch is None or y_pitch is None:
        return None
    columns = call.n
    dense = aligned and x_pitch == y_pitch == columns == padded_length(columns)
    for lie in (Rows.CONTIGUOUS, Rows.PITCHED) if dense else (Rows.PITCHED,):
        launch = _launch_of_rows(call, lie, in_place, RowShape(columns, x_pitch, y_pitch))
        if launch is not None:
            return launch
    return None


def blocks_of(call: Call, x: torch.Tensor) -> torch.Tensor:
    """x with a row for each block."""
    return x.unflatten(-1, (-1, call.spec.n)) if call.spec.n else x  # type: ignore[no-untyped-call]


def _launch_of_rows(call: Call, lie: Rows, in_place: bool, shape: RowShape) -> Launch | None:
    problem = problem_of(call, lie)
    if problem is None:
        return None
    kind = kernels.Kind(call.x.get_device(), problem, in_place, call.spec.batch_invariant)
    return kernels.prepared(kind, call.x.numel() // call.n * problem.n, call.scale, shape)


def _launch(
    call: Call, problem: Problem, in_place: bool, numbers: dict[str, int] | None = None, changing: tuple[str, ...] = ()
) -> Launch | None:
    """The launch of a kernel for rows without gaps; None if there is no such kernel."""
    spec, rows = call.spec, call.rows
    kind = kernels.Kind(call.x.get_device(), problem, in_place, spec.batch_invariant)
    operands = addresses(call, rows.dtype) | (numbers or {})
    return kernels.prepared(kind, rows.numel(), call.scale, RowShape(call.n, call.n, call.n), operands, changing)


# ---- prologues and quantizers ----------------------------------------------------------------------------------------
def _of_rows(call: Call) -> Run | None:
    """The run of a call with a prologue or a quantizer. The launch takes the addresses of the first result, of the
    scales if there are some, and of the operands that the prologue writes; then those of the tensor_scale if the format
    needs one, and of the operands that the prologue reads."""
    spec, form, rows, prologue = call.spec, kernel_form(call), call.rows, call.spec.prologue
    problem = problem_of(call)
    if problem is None or (not spec.n and problem.n != call.n) or misfit(call, problem):
        return None
    columns, has_scales = rows.shape[-1], form is not None and form.group != TENSOR
    numbers: dict[str, int] = {}
    if prologue is not None:
        numbers |= prologue.numbers(max(columns // problem.unit, 1))
    written, read = (prologue.written, prologue.read) if prologue else ([], [])
    outputs, make_scales, clears = [like(rows)], None, False
    needs_scale = form is not None and form.needs_scale
    if form is not None:
        count, groups = rows.numel() // columns, form.scales_in_row(columns)
        numbers |= sizes_for(form, count, columns, rows.numel() // problem.unit // call.heads)
        outputs = [*outputs_of(rows, form)][: 1 + has_scales]
        dtype = outputs_of(rows, form)[1][2]
        if has_scales and quantizer.room(count, groups, form.layout, dtype.itemsize) > count * groups:
            made = count, groups, form.layout, dtype, call.x.device
            make_scales = functools.partial(quantizer.laid_out_empty, *made)
            clears = form.layout is Layout.SWIZZLED
    changing = *["scales"] * has_scales, *written, *["tensor_scale"] * needs_scale, *read
    launch = _launch(call, problem, False, numbers, changing)
    if launch is None:
        return None
    outputs += [like(rows)] * len(written)
    order = order_of(call.x, form) if form and prologue is None else list(range(call.x.dim()))
    finish = functools.partial(as_asked, form=spec.form) if spec.form and form is not spec.form else None
    if len(outputs) == 1 and not (needs_scale or read) and is_ready(call.x.permute(*order)):
        return Run(call.x, launch, outputs)
    return RunOfRows(call.x, launch, outputs, order, finish, make_scales, clears)
