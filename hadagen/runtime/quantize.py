"""`rotate_quantize`: a rotation followed by a quantizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from hadagen.errors import TensorError, UsageError, shown
from hadagen.problem.choices import FormatName, LayoutName, NumericsName, RuleName
from hadagen.problem.formats import ROW, TENSOR, Format, Layout
from hadagen.problem.problem import Problem, Rows
from hadagen.problem.prologues import Prologue
from hadagen.runtime.arguments import as_int
from hadagen.runtime.call import calls, slow
from hadagen.runtime.call.calls import Run, has_only_memory, needs_derivative, number_of, result_like, rotation_problem
from hadagen.runtime.call.prologue_operator import Before, applied, rotate_after, text_of
from hadagen.runtime.call.quantize_operator import (
    INTO,
    NAMES,
    NEW,
    After,
    check_free,
    check_outputs,
    fill_up,
    make,
    outputs_of,
    problem_for,
    written_of,
)
from hadagen.runtime.call.rotate_operator import ROTATE
from hadagen.runtime.call.sharded import check_new, is_divided, is_sharded, joined, like_heads, shards_of, whole_of
from hadagen.runtime.checks import (
    QUANTIZED,
    REAL,
    as_float,
    check_alike,
    check_is_flag,
    check_is_number,
    check_is_tensor,
    check_options,
    check_tensor,
    is_symbolic,
    kind_of,
    plain,
    shape_of,
)
from hadagen.runtime.choose.entries import BATCH_INVARIANT
from hadagen.runtime.launch import kernels
from hadagen.runtime.operands.rotate_arguments import RotateArguments, check
from hadagen.runtime.quantized import Quantized
from hadagen.runtime.rotation import Rotation, buffers_of, memory_of, number_for, operands_of

_LEAST, _MOST = 2.0**-149, torch.finfo(torch.float32).max  # of a scale, in float32


def rotate_quantize(
    x: torch.Tensor,
    rotation: Rotation | int | None = None,
    *,
    to: FormatName,
    scale: float | None = None,
    group: int | None = None,
    rule: RuleName | None = None,
    layout: LayoutName = "row-major",
    tensor_scale: torch.Tensor | float | None = None,
    round_first: bool = False,
    gradient: bool = False,
    numerics: NumericsName = "accurate",
    batch_invariant: bool | None = None,
    out: Quantized | tuple[torch.Tensor, torch.Tensor | None] | None = None,
    before: Prologue | None = None,
) -> Quantized:
    """Rotate the last dimension of x, and quantize the result.

    x: [..., m] of type float16, bfloat16 or float32, with any strides. 4-bit codes need an even m. With a product in
        before=, [..., 2·m]. Codes and scales of a DTensor are DTensors, as docs/rotations.md says.
    rotation: a `hadagen.Rotation` of rows of m elements; or n, a power of two, for H_n · n^-½ over blocks of n
        elements; None for no rotation.
    to: the format. docs/formats.md has the formats, their rules, groups and layouts.
    scale: for a Rotation and for None a factor on the values before they are quantized, 1 by default. For n the whole
        factor on H_n: by default n^-½, which makes it orthonormal; scale=1 is the unnormalized H_n.
    group: the group size, the number of neighboring elements with one scale; None is the default of the format.
    rule: how a scale follows from amax, the largest magnitude of its group; None is the default of the format.
    layout: the layout of the scales, "row-major", "column-major", "packed", "swizzled" or "batched-swizzled".
    tensor_scale: for fp8-tensor the scale of all values; for nvfp4 the scale of all scales, or with the rule
        transformer_engine the amax of all values. A number, or float32 with one element on x's device. For fp8-head,
        one value for each head: its scale, or its amax if the rule is fa3. These values are float32 on x's device, with
        the shape x.shape[:k] of k ≥ 1 leading dimensions.
    round_first: round the rotated values to x's type before they are quantized. By default they stay float32.
    gradient: whether the result of `dequantize` has gradients, if x requires one. The rotation is then computed twice,
        and its float32 values are kept.
    numerics: "accurate" keeps at least 16 significant bits of every value until codes are made, on every GPU; only the
        conversion to FP4 may look at fewer, as docs/formats.md says. "fast" may round values to fewer bits between
        steps. float32 is always accurate.
    batch_invariant: as for `hadagen.hadamard_transform`. If no kernels can be made that give the same bits in every
        call, PyTorch quantizes, with a `SlowPathWarning`. The default is True if HADAGEN_BATCH_INVARIANT is 1.
    out: the codes and scales to write and return: an earlier result, or a pair of tensors like the results of the call.
        They must not share memory with x. For fp8-tensor and fp8-head, the scales of out are ignored.
    before: a value of `hadagen.prologues`, such as SiluMul(), which runs before the rotation in the same kernel. Codes
        and scales are then contiguous, but for the layout of the scales.

    Rotation and quantizer compute in float32, and codes are rounded half to even. A value beyond the largest code gets
    the largest code. In formats without a code for NaN, a NaN gets 0, and an infinity gets the largest code. The E8M0
    scale of a group with a NaN or an infinity is 0xff, which stands for NaN.

    Raises TypeError for an argument of a wrong type; `UsageError` for a format, group, rule or layout that do not exist
    together, and for a bad scale; `TensorError` for an x that cannot be quantized, such as an x that requires a
    gradient without gradient=True, and for an out that is not like the result.
    """
    target = None if out is None else _destination(out)
    text = "" if before is None else text_of(before)
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    source, results, what = x, None, None
    quantized: Quantized | None = None
    given: Any
    if gradient is not False:
        check_is_flag(gradient, "gradient")
        if gradient and isinstance(to, str) and to == "largest":
            raise UsageError("gradient = True is not possible for largest, which has no codes; leave it out")
        if gradient:
            _check_kind(x)
            x = x.detach() if needs_derivative(x) else x
    if calls.is_plain(x):
        asked = to, scale, group, rule, layout, round_first, numerics, batch_invariant, text
        what = _what(x, rotation, tensor_scale, *asked)
        run = None if what is None else calls.known(x, what)
        if run is not None and not (x.requires_grad and torch.is_grad_enabled()) and forward_ad._current_level < 0:
            form = run.options
            given = _tensor_scale(tensor_scale, form, x) if form.needs_scale else None
            results = _again(run, x, rotation, given, target)
    elif is_sharded(x):
        check_new(False, out)
        of_format = to, scale, group, rule, layout, tensor_scale, round_first, gradient
        quantized = _of_shards(source, rotation, *of_format, numerics, batch_invariant, before)
        results = quantized.codes, quantized.scales
    if results is None:
        check_values(x)
        check_is_flag(round_first, "round_first")
        check_is_flag(batch_invariant, "batch_invariant")
        rows = x if before is None else result_like(x, before.width)
        form, columns = Format.choose(to, as_int(group), rule, layout), rows.shape[-1]
        form.scales_in_row(columns)
        if form.element.bits == 4 and columns % 2:
            whose = "x has" if before is None else "the result of before has"
            raise TensorError(f"{whose} {columns} columns; 4-bit codes need an even number")
        check_options(1.0 if scale is None else scale, numerics, torch.float32)
        given = _tensor_scale(tensor_scale, form, x)
        scale = scale if scale is None or is_symbolic(scale) else float(scale)
        of = _operands(rows, rotation, scale, numerics, bool(batch_invariant), before)
        written = None if target is None else written_of(target, form)
        if written is not None:
            _check_written(x, rows, rotation, form, given, written)
        if before is None:
            results = _made(x, of, form, bool(round_first), given, written, what)
        else:
            after = After(of, form, bool(round_first), given)
            made = rotate_after(x, Before(text), after, written or (), _remembered(what))
            results = (made[0], made[1]) if written is None else (written[0], written[-1])
    if quantized is None:
        codes, scales = results if target is None else target
        quantized = Quantized(codes, given, form) if form.group == TENSOR else Quantized(codes, scales, form, given)
        if source is not x:
            wide = source.float() if before is None else applied(source, before)["x"]
            wanted = _operands(wide, rotation, scale, numerics, bool(batch_invariant))
            if torch.compiler.is_dynamo_compiling():
                quantized._exact = ROTATE.apply(wide, wanted)
            else:
                with slow.quiet():  # the codes have said what is to be said
                    quantized._exact = ROTATE.apply(wide, wanted)
    return quantized


def _of_shards(
    x: Any,
    rotation: Any,
    to: str,
    scale: float | None,
    group: int | None,
    rule: str | None,
    layout: str,
    tensor_scale: Any,
    round_first: bool,
    gradient: bool,
    numerics: str,
    batch_invariant: bool,
    before: Prologue | None,
) -> Quantized:
    """The codes and scales of a DTensor, as DTensors that are divided like x."""
    form = Format.choose(to, as_int(group), rule, layout)
    n = rotation.block if isinstance(rotation, Rotation) else getattr(rotation, "n", rotation or 1)
    unit = None if form.group == ROW or not isinstance(n, int) else math.lcm(n, max(form.group, 1), 2)
    shards = shards_of(x, unit, before)
    if is_divided(shards.whole) and form.layout is not Layout.ROW_MAJOR:
        raise UsageError(
            f"layout = {form.layout.value} lays out the scales of all rows together, and x is a DTensor whose ranks "
            "have parts of it; use row-major, or pass x.to_local() for scales of each part"
        )
    width = 1 if before is None else before.width
    if isinstance(rotation, Rotation):
        rows = result_like(shards.local, width)
        rotation = operands_of(rotation, rows, 1.0, numerics, batch_invariant, before, x.shape[-1] / width)
    given = tensor_scale
    if isinstance(given, torch.Tensor):
        given = like_heads(given, shards) if form.by_head else whole_of(given)
    named: dict[str, Any] = {"round_first": round_first, "gradient": gradient, "numerics": numerics}
    named |= {"batch_invariant": batch_invariant, "before": before, "tensor_scale": given, "layout": layout}
    q = rotate_quantize(shards.local, rotation, to=to, scale=scale, group=group, rule=rule, **named)
    scales = joined(shards, q.scales, replicated=form.group == TENSOR and not form.by_head)
    made = Quantized(joined(shards, q.codes), scales, form)
    if q.tensor_scale is not None:
        made.tensor_scale = joined(shards, q.tensor_scale, replicated=True)
    if q._exact is not None:
        made._exact = joined(shards, q._exact)
    return made


# ---- calls that come again -------------------------------------------------------------------------------------------
_PLAIN = {None, type(None), int, float, bool, str}


def _what(x: torch.Tensor, rotation: Any, tensor_scale: Any, to: Any, scale: Any, group: Any, *options: Any) -> Any:
    """The options of a call, as `calls.known` takes them; None if the call is not remembered."""
    if isinstance(rotation, Rotation):
        by = number_for(rotation, x)
        if by is None:
            return None
    elif isinstance(rotation, RotateArguments):
        by = number_of(rotation)
    elif rotation is None or type(rotation) is int:
        by = rotation
    else:
        return None
    if not (scale is None or isinstance(scale, REAL)):  # a refused type, which may equal a number
        return None
    heads = 0 if tensor_scale is None else -1
    if isinstance(tensor_scale, torch.Tensor):
        if type(tensor_scale) not in (torch.Tensor, torch.nn.Parameter):
            return None
        heads = tensor_scale.numel()
    return by, type(rotation), type(group), heads, to, scale, group, *options


def _again(
    run: Run, x: torch.Tensor, rotation: Any, given: torch.Tensor | None, target: tuple[Any, Any] | None
) -> tuple[Any, Any] | None:
    """Codes and scales of a call that comes again; None if the tensors that it writes must be checked."""
    addresses = [] if given is None else [given.data_ptr()]
    if target is None:
        made = run.new(x.data_ptr(), *addresses)
        return made if len(run.outputs) > 1 else (made, None)
    kept = [] if given is None else [(addresses[0], addresses[0] + given.nbytes)]
    if isinstance(rotation, Rotation):
        kept += memory_of(rotation)
    elif isinstance(rotation, RotateArguments):
        kept += [(each.data_ptr(), each.data_ptr() + each.nbytes) for _, each in rotation.tensors]
    places = run.places(x, target, kept)
    if places is None:
        return None
    if run.options.layout.in_columns:
        fill_up(target[1])
    run.into(target[: len(run.outputs)], *places, *addresses)
    return target


# ---- other calls -----------------------------------------------------------------------------------------------------
def _check_written(
    x: torch.Tensor,
    rows: torch.Tensor,
    rotation: Any,
    form: Format,
    given: torch.Tensor | None,
    written: Sequence[torch.Tensor],
) -> None:
    """Raises `TensorError` for tensors that cannot take codes and scales of rows, which are x or like the result of a
    prologue. Zeros what fills up columns of scales."""
    if torch.compiler.is_dynamo_compiling():  # where the operator's own checks do
        return
    for name, each in zip(NAMES, written, strict=False):
        _check_has_no_gradient(each, name)
    check_outputs(written, outputs_of(rows, form), x)
    if all(has_only_memory(each) for each in (x, *written)):
        kept = buffers_of(rotation) if isinstance(rotation, Rotation) else ()
        kept = rotation.tensors if isinstance(rotation, RotateArguments) else kept
        check_free(written, x, given, form, kept)
        if form.layout.in_columns:  # PyTorch does not know that these zeros belong to it, so an operator may not
            fill_up(written[1])


def _remembered(what: Any) -> Any:
    """The options of a call if it may be remembered: a value of another type may change."""
    return what if what is not None and _PLAIN.issuperset(map(type, what[4:])) else None


def _made(
    x: torch.Tensor,
    of: RotateArguments,
    form: Format,
    round_first: bool,
    given: torch.Tensor | None,
    written: Sequence[torch.Tensor] | None,
    what: Any,
) -> tuple[Any, Any]:
    """Codes and scales of a call without a prologue whose arguments were checked; it bypasses the dispatcher if the
    dispatcher has nothing to do."""
    tensors = [x, given, of.matrices, of.signs, of.signs_after, *(written or ())]
    is_plain = not torch.compiler.is_dynamo_compiling() and all(
        each is None or (has_only_memory(each) and not needs_derivative(each)) for each in tensors
    )
    if is_plain:
        results = make(x, of, form, round_first, given, written, _remembered(what))
    else:
        options = After(of, form, round_first, given).at()
        if written is None:
            results = NEW(x, *options)
        else:
            if not torch.compiler.is_dynamo_compiling():
                x = x.resolve_neg()  # which PyTorch does only for operators with a result
            INTO(x, *options, written[0], None if form.group == TENSOR else written[1])
            results = written[0], written[-1]
    return results


def _destination(out: Any) -> tuple[Any, Any]:
    """Codes and scales of out. Raises TypeError."""
    if not isinstance(out, (Quantized, tuple, list)) or len(out) != 2:
        raise TypeError(f"out is a {type(out).__name__}; pass what rotate_quantize returned, or codes and scales")
    if isinstance(out, Quantized):
        return out.codes, out.scales  # which torch.compile of PyTorch 2.8 and earlier cannot unpack
    codes, scales = out
    return codes, scales


def check_values(x: torch.Tensor) -> None:
    """Raises TypeError and `TensorError` for an x that cannot be quantized."""
    _check_kind(x)
    _check_has_no_gradient(x, "x")


def _check_kind(x: torch.Tensor) -> None:
    """The same, but for an x that requires a gradient."""
    check_is_tensor(x, "x")
    if x.dtype not in QUANTIZED:
        raise TensorError(
            f"x has the type {plain(x.dtype)}; pass values of float16, bfloat16 or float32 that are not quantized"
        )
    check_tensor(x)


def _check_has_no_gradient(x: torch.Tensor, name: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        fix = f"pass {name}.detach(){', or gradient=True' if name == 'x' else ''}"
        raise TensorError(f"{name} requires a gradient, which quantized codes do not have; {fix}")


def _operands(
    x: torch.Tensor,
    rotation: Any,
    scale: float | None,
    numerics: str,
    batch_invariant: bool,
    before: Prologue | None = None,
) -> RotateArguments:
    """x: a tensor like the rows to rotate. scale: None for the default. before: the prologue that makes the rows."""
    columns = x.shape[-1]
    factor = 1.0 if scale is None else scale
    if isinstance(rotation, Rotation):
        return operands_of(rotation, x, factor, numerics, batch_invariant, before)
    if isinstance(rotation, RotateArguments):
        made = rotation.scaled(factor, numerics, batch_invariant)
        if not torch.compiler.is_dynamo_compiling():  # where the operator's own checks do
            check(x, made)
        return made
    n = 1 if rotation is None else as_int(rotation)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"rotation is a {type(rotation).__name__}; pass a Rotation, a power of two, or None")
    if n < 1 or n & (n - 1) or columns % n:
        raise UsageError(
            f"rotation = {shown(n)} is no power of two that divides the {columns} columns of "
            f"{'x' if before is None else 'the result of before'}; choose one"
        )
    factor = n**-0.5 if scale is None else scale
    return RotateArguments(None, [1], None, None, n, False, False, factor, numerics, batch_invariant)


def _tensor_scale(given: torch.Tensor | float | None, form: Format, x: torch.Tensor) -> torch.Tensor | None:
    """The tensor_scale as float32 on x's device, without dimensions or with those of heads. The values of a tensor on a
    GPU are not read, because that would wait."""
    if not form.needs_scale:
        if given is not None:
            raise UsageError(f"{form.name} has no tensor_scale; leave it out, or choose fp8-tensor, fp8-head or nvfp4")
        return None
    if given is None:
        what = _scales_of_heads(x) if form.by_head else "a number, or a tensor with one element"
        raise UsageError(f"{form.name} needs a tensor_scale; pass {what}")
    if isinstance(given, torch.Tensor):
        return given if not form.by_head and _is_ready(given, x) else _checked_scale(given, form, x)
    if form.by_head:
        raise TypeError(f"tensor_scale is a {type(given).__name__}; {form.name} needs a tensor, {_scales_of_heads(x)}")
    check_is_number(given, "tensor_scale")
    if not is_symbolic(given):
        given = as_float(given)
        _check_is_possible(given, form)
        given = given if given <= _MOST else math.inf
    return torch.full((), given, dtype=torch.float32, device=x.device)


def _is_ready(given: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether `given` can be used unchanged as the result of `_tensor_scale`, as nearly always on a GPU."""
    return (
        calls.is_plain(given)
        and given.is_cuda
        and given.get_device() == x.get_device()
        and given.dim() == 0
        and given.dtype == torch.float32
        and not given.requires_grad
        and has_only_memory(given)
    )


def _checked_scale(given: torch.Tensor, form: Format, x: torch.Tensor) -> torch.Tensor:
    if form.by_head and x.dim() == 1:
        raise TensorError(f"x has one dimension; {form.name} needs another for its heads, such as x[None]")
    check_is_tensor(given, "tensor_scale")
    fits = given.layout is torch.strided and given.dtype == torch.float32 and not given.is_nested
    if form.by_head:
        fits = fits and 1 <= given.dim() < x.dim() and given.shape == x.shape[: given.dim()]
    else:
        fits = fits and given.numel() == 1
    if not fits or given.device != x.device:
        has = shape_of(given) if form.by_head else f"with {given.numel()} elements"
        wanted = _scales_of_heads(x) if form.by_head else f"float32 with one element on {x.device}"
        raise TensorError(f"tensor_scale is {kind_of(given)} {has} on {given.device}; it must be strided {wanted}")
    check_alike(x, given, "tensor_scale")
    _check_has_no_gradient(given, "tensor_scale")
    if given.device.type == "cpu" and has_only_memory(given) and given.numel():
        for number in given.aminmax():
            _check_is_possible(float(number), form)
    given = given.detach().resolve_neg()
    return given.contiguous() if form.by_head else given.reshape(())


def _scales_of_heads(x: torch.Tensor) -> str:
    """Which tensors these are, for a message."""
    return f"float32 with the shape of leading dimensions of x, such as {tuple(x.shape[:1])}, on {x.device}"


def _check_is_possible(number: float, form: Format) -> None:
    # A largest magnitude follows from the values, so it may be 0, infinite or NaN.
    is_magnitude = form.rule in ("transformer_engine", "fa3")
    is_possible = not number < 0 if is_magnitude else number == 0 or _LEAST <= number <= _MOST
    if not is_possible:
        raise UsageError(
            f"tensor_scale = {number} is not possible; pass a positive number that float32 has, up to {_MOST:.3g}, or 0"
        )


def problems_of(
    x: torch.Tensor,
    rotation: Rotation | int,
    form: Format | None,
    round_first: bool,
    numerics: str,
    batch_invariant: bool,
    prologue: str = "",
) -> tuple[RotateArguments, Problem | None, Problem | None, Problem | None]:
    """The arguments of the rotation; the problem of the kernel that does all of a call with tensors like x; and the
    problems of the kernels that rotate if there is no such kernel. None if no kernel can. form: None without a
    quantizer. Raises what a call with these arguments raises."""
    of, wide = _operands(x, rotation, None, numerics, batch_invariant), torch.empty_like(x, dtype=torch.float32)
    length = of.n // math.prod(of.orders)
    whole = (
        problem_for(x, of, form.by_kernels, round_first, prologue) if form else rotation_problem(x, of, None, prologue)
    )
    return (
        of,
        whole,
        rotation_problem(wide, of),
        kernels.problem_of(length, wide.dtype, "accurate", Rows.CONTIGUOUS),
    )
