"""Codes and scales of x, by a kernel or in PyTorch, and `torch.ops.hadagen.rotate_quantize`. `rotate_quantize` is the
function that calls this. A kernel takes rows without gaps at an address that is a multiple of 16 bytes, and does all of
it: rotation, largest magnitudes, codes and scales."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from hadagen.errors import TensorError, UsageError
from hadagen.problem.formats import ROW, TENSOR, Format, Layout
from hadagen.problem.operands import sizes_for
from hadagen.problem.problem import LEAST_GROUP, Problem
from hadagen.problem.prologues import Prologue
from hadagen.runtime.call import calls, decompositions, slow
from hadagen.runtime.call.calls import ALIGNMENT, Output, Run, check_apart, needs_derivative, rotation_problem, span
from hadagen.runtime.call.operators import register
from hadagen.runtime.call.rotate_operator import check_whole, rotated
from hadagen.runtime.checks import (
    check_alike,
    check_is_tensor,
    check_same_device,
    check_writable,
    is_functional,
    kind_of,
    plain,
    shape_of,
)
from hadagen.runtime.choose.reasons import Asked
from hadagen.runtime.operands.rotate_arguments import RotateArguments, check
from hadagen.truth import quantizer

_MOST_GROUPS = 1 << 32  # which kernels count in 32 bits
NAMES = "out.codes", "out.scales"

Results = tuple[torch.Tensor, torch.Tensor]  # codes and scales


# ---- how they lie ----------------------------------------------------------------------------------------------------
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


# ---- what makes them -------------------------------------------------------------------------------------------------
def make(
    x: torch.Tensor,
    of: RotateArguments,
    form: Format,
    round_first: bool,
    given: torch.Tensor | None,
    out: Sequence[torch.Tensor] | None = None,
    what: Any = None,
    values: torch.Tensor | None = None,
) -> Results:
    """Codes and scales of x, which has memory and no derivative. If the call has one scale, the returned scales mean
    nothing.

    given: the scale of the call, if the format needs one. out: the tensors to write. what: the options of a call that
    comes again without the operator; the call is remembered if a kernel takes x as it lies. values: float32 or float64
    numbers of x's shape to take in place of x, in PyTorch.
    """
    as_made = form.by_kernels
    rows = (x if values is None else values).permute(order_of(x, as_made))
    if calls.takes_kernels(x) and not calls.is_ready(rows):
        rows, what = calls.ready(rows), None
    run = _run(rows, x, of, as_made, round_first, given) if values is None else None
    if run is None:
        heads = _heads(as_made, given)
        with slow.path(x, lambda: asked_of(x, of, as_made, round_first, heads)):
            codes, scales = shaped(x, as_made, *_in_pytorch(rows, of, as_made, round_first, given, x.dtype))
    else:
        others = [] if given is None else [given.data_ptr()]
        places = [each.data_ptr() for each in out or ()]
        if what is not None and as_made is form:
            calls.remember(x, what, False, run)
        if out is not None and as_made is form and not any(place % ALIGNMENT for place in places):
            run.into(out, rows.data_ptr(), *places, *others)
            codes, scales = out[0], out[-1]
        else:
            made = run.new(rows.data_ptr(), *others)
            codes, scales = (made, made) if form.group == TENSOR else made
    if as_made is not form:
        codes, scales = as_asked(codes, scales, form)
    for each, values in zip(out or (), (codes, scales), strict=False):  # out has no scales, where the call has one
        if each is not values:
            each.copy_(values)
    return codes, scales


def as_asked(codes: torch.Tensor, scales: torch.Tensor, form: Format) -> Results:
    """Codes and scales of a format for which kernels write another layout, of what they write."""
    leading = (*codes.shape[:-2],)
    return codes.contiguous(), quantizer.laid_out(scales.reshape(-1, scales.shape[-1]), form.layout, leading)


def _run(
    rows: torch.Tensor,
    x: torch.Tensor,
    of: RotateArguments,
    form: Format,
    round_first: bool,
    given: torch.Tensor | None,
) -> Run | None:
    """The run of a kernel for rows: x, or a copy of it, with its dimensions in order; None if there is no kernel."""
    if not calls.takes_kernels(x):
        return None
    heads = _heads(form, given)
    asked = calls.number_of(of), of.numerics, of.batch_invariant
    what = *order_of(x, form), form.key, round_first, heads, *asked
    run = calls.known(rows, what)
    if run is None and (run := run_for(x, of, form, round_first, heads)):
        calls.remember(rows, what, False, run)
    return run


def _heads(form: Format, given: torch.Tensor | None) -> int:
    """How many have a scale of their own."""
    return given.numel() if form.by_head and given is not None else 1


def asked_of(
    x: torch.Tensor, of: RotateArguments, form: Format, round_first: bool, heads: int, before: Prologue | None = None
) -> Asked:
    """What a call with tensors like x asks for, of which so many heads have a scale."""
    rows, prologue = calls.result_like(x, before.width) if before else x, before.name if before else ""
    asked = slow.asked_of(rows, of, form=form, round_first=round_first, prologue=prologue)
    problem = problem_for(rows, of, form, round_first, prologue)
    misfit = problem and _misfit(rows, problem, of.batch_invariant, heads, before)
    return asked._replace(misfit=misfit) if misfit else asked


def _misfit(
    rows: torch.Tensor, problem: Problem, batch_invariant: bool, heads: int, before: Prologue | None
) -> str | None:
    """Why kernels of a problem do not take tensors like rows, of which so many heads have a scale; None if they do."""
    elements, columns, unit = rows.numel(), rows.shape[-1], problem.unit
    if elements % unit:
        return f"kernels take a multiple of {unit} elements, and the result has {elements}; pad the rows of x"
    if elements // LEAST_GROUP >= _MOST_GROUPS:
        most = LEAST_GROUP * _MOST_GROUPS
        return f"kernels take fewer than {most} elements, and the result has {elements}; divide the rows among calls"
    if batch_invariant and columns % unit:  # where kernels take some numbers of rows only
        return f"rows of {columns} elements are no multiple of {unit}; pad the rows of x, or leave out batch_invariant"
    if elements // unit % heads:
        has = elements // heads
        return f"kernels take heads of a multiple of {unit} elements, and a head has {has}; pad the rows of x"
    return misfit_after(before, problem, rows) if before else None


def misfit_after(before: Prologue, problem: Problem, rows: torch.Tensor) -> str | None:
    """Why kernels of a problem do not take tensors whose results of a prologue are like rows; None if they do."""
    if calls.numbers_for(before, problem, rows) is not None:
        return None
    return f"kernels do not take rows of {rows.shape[-1]} elements after {before.name}; compute it before the call"


def run_for(
    x: torch.Tensor, of: RotateArguments, form: Format, round_first: bool, heads: int, before: Prologue | None = None
) -> Run | None:
    """The run of a kernel for tensors like x without gaps, in which so many heads have a scale; None if there is no
    kernel. The launch takes the addresses of the codes, of the scales if there are some, and of the operands that the
    prologue writes; then those of the tensor_scale if the format needs one, and of the operands that it reads."""
    rows = calls.result_like(x, before.width) if before else x
    problem, columns = problem_for(rows, of, form, round_first, before.name if before else ""), rows.shape[-1]
    if problem is None or _misfit(rows, problem, of.batch_invariant, heads, before):
        return None
    units_in_head = rows.numel() // problem.unit // heads
    numbers = (before and calls.numbers_for(before, problem, rows)) or {}
    count, groups, of_tensor = rows.numel() // columns, form.scales_in_row(columns), form.group == TENSOR
    written, read = (before.written, before.read) if before else ([], [])
    changing = [*["scales"] * (not of_tensor), *written, *["tensor_scale"] * form.needs_scale, *read]
    numbers |= sizes_for(form, count, columns, units_in_head)
    launch = calls.launch_of(rows, of, problem, False, numbers, changing)
    if launch is None:
        return None
    of_codes, of_scales = outputs_of(rows, form)
    outputs = [of_codes, *[of_scales] * (not of_tensor), *[calls.like(rows)] * len(written)]
    dtype, make_scales = of_scales[2], None
    if not of_tensor and quantizer.room(count, groups, form.layout, dtype.itemsize) > count * groups:
        make_scales = functools.partial(quantizer.laid_out_empty, count, groups, form.layout, dtype, x.device)
    clears = make_scales is not None and form.layout is Layout.SWIZZLED
    return Run(x, launch, outputs, None, form, make_scales, clears)


def problem_for(
    x: torch.Tensor, of: RotateArguments, form: Format, round_first: bool, prologue: str = ""
) -> Problem | None:
    """The problem of a kernel that does all of it; None if no kernel can."""
    try:
        return rotation_problem(x, of, form.for_rows(x.shape[-1], round_first), prologue)
    except UsageError:  # groups that are no part of a tile
        return None


def _in_pytorch(
    rows: torch.Tensor,
    of: RotateArguments,
    form: Format,
    round_first: bool,
    given: torch.Tensor | None,
    dtype: torch.dtype,
) -> Results:
    """dtype: the type of x."""
    values = rotated(rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format), of, True)
    if round_first:
        values = values.to(dtype).float()
    return quantizer.quantize(values.view(-1, rows.shape[-1]), form, dtype, given)


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


def check_free(
    written: Sequence[torch.Tensor],
    x: torch.Tensor,
    given: torch.Tensor | None,
    form: Format,
    operands: Sequence[tuple[str, torch.Tensor]],
) -> None:
    """Raises `TensorError` for memory that PyTorch forbids to write, or that another tensor of the call has too.

    operands: the operands of the rotation, with their names in messages.
    """
    others = [("x", x), *([] if given is None else [("tensor_scale", given)]), *operands]
    for name, each in zip(NAMES, written, strict=False):
        check_writable(each)
        size = span(each)
        if name == "out.scales" and form.layout.in_columns and size:  # with what fills up the last column
            size = each.shape[-1] * each.stride(-1) * each.element_size()
        check_apart(each, name, others, size)
        others.append((name, each))


# ---- the operators ---------------------------------------------------------------------------------------------------
# The schema of all fields of `After` but the last, which has other names in stored programs.
AFTER = (
    "Tensor? matrices, int[] orders, Tensor? signs, Tensor? signs_after, int n, bool swapped, Scalar scale, "
    "str numerics, bool batch_invariant, str to, int group, str rule, str layout, bool round_first"
)
_OUT_AT = 15  # where codes and scales of out stand behind x
# In compiled code too, results have the strides that those of x say.
_EXACT_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_NO_FORMAT = "", 0, "", ""
_format_of = functools.lru_cache(maxsize=256)(Format.choose)


class After(NamedTuple):
    """The operation on x: a rotation that is not transposed, and a quantizer if there is a format. tensor_scale: that
    of the call, if the format needs one."""

    of: RotateArguments
    form: Format | None = None
    round_first: bool = False
    tensor_scale: torch.Tensor | None = None

    def at(self) -> tuple[Any, ...]:
        """The fields as arguments of operators."""
        values, form = [*self.of], self.form  # torch.compile of PyTorch 2.6 cannot slice a NamedTuple
        options = *values[:6], self.of.scale, self.of.numerics, self.of.batch_invariant
        format_options = (form.name, form.group, form.rule, form.layout.value) if form else _NO_FORMAT
        return *options, *format_options, self.round_first, self.tensor_scale

    @classmethod
    def taken(cls, *options: Any) -> After:
        """The operation that the arguments of an operator mean."""
        of: Any = *options[:6], False, *options[6:9]
        form = None if options[9:13] == _NO_FORMAT else _format_of(*options[9:13])
        return cls(RotateArguments(*of), form, *options[13:])

    @property
    def heads(self) -> int:
        """How many have a scale of their own."""
        return self.tensor_scale.numel() if self.form and self.form.by_head and self.tensor_scale is not None else 1


def _new(x: torch.Tensor, *options: Any) -> Results:
    of, form, round_first, given = _checked(x, options)
    codes, scales = make(x, of, form, round_first, given)
    return codes, no_scales(x) if form.group == TENSOR else scales


def no_scales(x: torch.Tensor) -> torch.Tensor:
    """In place of scales where the call has one, because an operator returns no argument. It says nothing."""
    return x.new_zeros((), dtype=torch.float32)


def check_arguments(x: torch.Tensor, of: RotateArguments, given: torch.Tensor | None) -> None:
    """Raises `TensorError` for arguments on different devices, because kernels would read other memory."""
    check(x, of)
    check_whole(of)
    if given is not None:
        check_same_device("tensor_scale", given.device, "x", x.device, "move one of them with .to")


def _checked(x: torch.Tensor, options: tuple[Any, ...]) -> tuple[RotateArguments, Format, bool, torch.Tensor | None]:
    """The operation that the arguments of an operator mean, field by field, after `check_arguments`."""
    of, form, round_first, given = After.taken(*options)
    check_arguments(x, of, given)
    assert form is not None
    return of, form, round_first, given


def _shapes(x: torch.Tensor, *options: Any) -> Results:
    _, form, *_ = _checked(x, options)
    return empty_results(x, form)


def empty_results(x: torch.Tensor, form: Format) -> Results:
    """Codes and scales of a tensor without memory."""
    codes, scales = (x.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in outputs_of(x, form))
    if form.layout.in_columns:  # in memory that ends with what fills up the last column
        memory = scales.new_empty(scales.shape[1] * scales.stride(1))
        scales = memory.as_strided(scales.shape, scales.stride())
    return codes, scales


def _into(x: torch.Tensor, *options: Any) -> None:
    of, form, round_first, given = _checked(x, options[:_OUT_AT])
    written = written_of(options[_OUT_AT:], form)
    check_outputs(written, outputs_of(x, form), x)
    check_free(written, x, given, form, of.tensors)
    make(x, of, form, round_first, given, written)


def _shapes_into(x: torch.Tensor, *options: Any) -> None:
    _, form, *_ = _checked(x, options[:_OUT_AT])
    check_outputs(written_of(options[_OUT_AT:], form), outputs_of(x, form), x)


def _decomposed(x: torch.Tensor, *options: Any) -> Any:
    """The results by PyTorch's own operators, with the strides of `outputs_of`; copied into out, if there is one."""
    of, form, round_first, given = _checked(x, options[:_OUT_AT])
    order = list(range(x.dim())) if decompositions.in_onnx_export() else order_of(x, form.by_kernels)
    made = decompositions.quantized(x.permute(order), of, form, round_first, given)
    if order != sorted(order):
        made = tuple(  # type: ignore[assignment]
            each if form.group == TENSOR and at else each.permute(*[order.index(i) for i in range(each.dim())])
            for at, each in enumerate(made)
        )
    for each, value in zip(options[_OUT_AT:], made, strict=False):
        if each is not None:
            each.copy_(value)
    return made if len(options) == _OUT_AT else None


def _without_derivative(operator: str) -> Any:
    def below(x: torch.Tensor, *options: Any) -> Any:
        for name, tensor in (("x", x), *(("out", each) for each in options[_OUT_AT:] if each is not None)):
            if needs_derivative(tensor):
                raise TensorError(f"{name} has a derivative, which quantized codes do not have; pass {name}.detach()")
        if decompositions.is_decomposing():
            return _decomposed(x, *options)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.hadagen, operator).default(x, *options)

    return below


NEW, INTO = (
    register(
        name,
        f"(Tensor x, {AFTER}, Tensor? given{out}) -> {results}",
        real,
        fake,
        _without_derivative(name),
        _EXACT_STRIDES,
    )
    for name, out, results, real, fake in (
        ("rotate_quantize", "", "(Tensor, Tensor)", _new, _shapes),
        ("rotate_quantize_into", ", Tensor(a!) codes, Tensor(b!)? scales", "()", _into, _shapes_into),
    )
)
