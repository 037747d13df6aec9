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
from hadagen.problem.prologues import Prologue, named, text_of_value
from hadagen.runtime.arguments import as_int
from hadagen.runtime.call import slow
from hadagen.runtime.call.compute import applied, rotation_of
from hadagen.runtime.call.find import problem_of
from hadagen.runtime.call.outputs import NAMES, check_outputs, check_results_apart, filling, outputs_of, written_of
from hadagen.runtime.call.rules import CALL, LINEAR, Linear, write_results
from hadagen.runtime.call.runs import (
    Range,
    Run,
    has_only_memory,
    is_dynamo_compiling,
    is_plain,
    known,
    needs_derivative,
    remember_asked,
)
from hadagen.runtime.call.sharded import check_new, is_divided, is_sharded, joined, like_heads, shards_of, whole_of
from hadagen.runtime.checks import (
    QUANTIZED,
    as_float,
    check_alike,
    check_is_flag,
    check_is_number,
    check_is_tensor,
    check_length,
    check_options,
    check_tensor,
    is_symbolic,
    kind_of,
    plain,
    shape_of,
)
from hadagen.runtime.choose.entries import BATCH_INVARIANT
from hadagen.runtime.launch import kernels
from hadagen.runtime.operands.call import Call, key_of, result_like
from hadagen.runtime.operands.packed import Factors, present, structure_of
from hadagen.runtime.operands.spec import Spec, text_of
from hadagen.runtime.quantized import Quantized
from hadagen.runtime.rotation import Rotation, buffers_of, factors_of, made_for

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
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    rotation = 1 if rotation is None else rotation
    follows = gradient is not False and _has_gradient(x, to, gradient)
    prologue = "" if before is None else text_of_value(before)
    asked = scale, to, group, rule, layout, round_first, numerics, batch_invariant, prologue
    q: Quantized | None = None
    target = None if out is None else _destination(out)
    if not follows and is_plain(x):
        width = 1 if before is None else before.width
        q = _again(x, rotation, asked, tensor_scale, target, width)
    elif is_sharded(x):
        check_new(False, out)
        q = _of_shards(x, rotation, asked, tensor_scale, before, follows)
    make = _with_gradient if follows else _quantized
    return q or make(x, rotation, asked, tensor_scale, target, before)


Asked = tuple[Any, ...]  # scale, to, group, rule, layout, round_first, numerics, batch_invariant, text of before
Target = tuple[Any, Any] | None  # codes and scales of out


# ---- calls that come again -------------------------------------------------------------------------------------------
_known: dict[Any, tuple[int, Format]] = {}  # as `_Made.quantized`, of rotations of n


def _again(
    x: torch.Tensor, rotation: Any, asked: Asked, tensor_scale: Any, target: Target, width: int
) -> Quantized | None:
    """The result of a call with a plain x that comes again; None for any other call. width: as for `Prologue`."""
    results, table, by = None, _known, rotation
    kept: Sequence[Range] = ()
    try:  # a value of a refused type may equal a number
        if isinstance(rotation, Rotation):
            made = made_for(rotation, x, width)
            table, by, kept = ({}, 0, ()) if made is None else (made.quantized, 0, made.places)
        elif isinstance(rotation, Factors):
            by, kept = _what(rotation), [*map(_range, present(rotation.matrices, rotation.signs, rotation.signs_after))]
        heads = tensor_scale.numel() if isinstance(tensor_scale, torch.Tensor) else 1
        found = table.get((by, type(by), type(asked[0]), type(asked[2]), heads, asked))
    except (RuntimeError, TypeError, ValueError):  # an argument that is refused
        found = None
    if isinstance(tensor_scale, torch.Tensor) and type(tensor_scale) not in (torch.Tensor, torch.nn.Parameter):
        found = None
    if found is not None and not (x.requires_grad and torch.is_grad_enabled()) and forward_ad._current_level < 0:
        key, form = found
        given = _tensor_scale(tensor_scale, form, x) if form.needs_scale or tensor_scale is not None else None
        run = known(x, key)
        if run is not None:
            addresses = [] if given is None else [given.data_ptr()]
            if target is None:
                results = run.new(x, *addresses)
            else:
                kept = [*kept, *map(_range, [] if given is None else [given])]
                results = _written(run, x, form, target, kept, addresses)
    return None if results is None else _with_format(results, form, given)


def _written(
    run: Run, x: torch.Tensor, form: Format, target: Any, kept: Sequence[Range], addresses: Sequence[int]
) -> Any:
    """The target, with the results; None if its tensors must be checked first."""
    places = run.places(target, x, kept)
    if places is not None:
        rest = filling(target[1]) if form.layout.in_columns else None
        run.write(target[: len(run.outputs)], [*places, *addresses])
        if rest is not None:
            rest.zero_()
    return None if places is None else target


def _range(tensor: torch.Tensor) -> Range:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _with_format(results: Any, form: Format, given: Any) -> Quantized:
    """results: codes and scales, or codes alone, where the scale is the one that was given."""
    codes, scales = (results, given) if isinstance(results, torch.Tensor) else results
    if form.group == TENSOR:
        scales, given = given, None
    return Quantized(codes, scales, form, given)


# ---- other calls -----------------------------------------------------------------------------------------------------
def _quantized(
    x: torch.Tensor, rotation: Any, asked: Asked, tensor_scale: Any, target: Target, before: Prologue | None
) -> Quantized:
    """The result of a call with a tensor that is whole here, after all checks."""
    scale, to, group, rule, layout, round_first, numerics, batch_invariant, prologue = asked
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
    of = factors(rotation, rows, scale, before)
    text = text_of(
        *structure_of(of), numerics, bool(batch_invariant), False, prologue, *fields_of(form), bool(round_first)
    )
    written = () if target is None else written_of(target, form)
    rest = None if is_dynamo_compiling() else _checked_out(x, rows, rotation, form, written)
    tensors = [x, *present(of.matrices, of.signs, of.signs_after), *([] if given is None else [given])]
    if target is None:
        codes, scales = CALL(tensors, of.scale, text)
    else:
        codes, scales = target
        write_results(tensors, of.scale, text, written)
        if rest is not None:
            rest.zero_()
    _remember(x, rotation, asked, of, text, form, 1 if given is None else given.numel())
    return _with_format((codes, scales), form, given)


def _checked_out(
    x: torch.Tensor, rows: torch.Tensor, rotation: Any, form: Format, written: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """What fills up the columns of written scales, if they have memory. Raises `TensorError` for tensors that cannot
    take codes and scales of rows, which are x or like the result of a prologue."""
    if not written:
        return None
    named = [*zip(NAMES, written, strict=False)]
    for name, each in named:
        _check_has_no_gradient(each, name)
    check_outputs(written, outputs_of(rows, form), x)
    if not all(has_only_memory(each) for each in (x, *written)):
        return None
    if isinstance(rotation, Rotation):
        check_results_apart(named, form, buffers_of(rotation))
    return filling(written[1]) if form.layout.in_columns else None


def fields_of(form: Format) -> tuple[str, int, str, str]:
    """The fields of a spec."""
    return form.name, form.group, form.rule, form.layout.value


def _remember(x: Any, rotation: Any, asked: Asked, of: Factors, text: str, form: Format, heads: int) -> None:
    """Let `_again` find a call that was made."""
    if not has_only_memory(x):
        return
    table: Any = _known
    if isinstance(rotation, Rotation):
        table, rotation = None if rotation._made is None else rotation._made.quantized, 0
    elif isinstance(rotation, Factors):
        rotation = _what(rotation)
    if table is not None and type(rotation) in (int, tuple):
        key = key_of(text, of.scale, of.matrices, of.signs, of.signs_after, heads if form.by_head else 1)
        what = rotation, type(rotation), type(asked[0]), type(asked[2]), heads
        remember_asked(table, (*what, asked), (key, form))


def _what(of: Factors) -> tuple[Any, ...]:
    """What stands for a rotation and the addresses of its operands in a key."""
    places = [None if each is None else each.data_ptr() for each in (of.matrices, of.signs, of.signs_after)]
    return of.n, len(of.orders), *of.orders, of.swapped, of.scale, *places


def _has_gradient(x: torch.Tensor, to: Any, gradient: Any) -> bool:
    """Whether the result has a gradient, with this argument. Raises TypeError, `UsageError` and `TensorError`."""
    check_is_flag(gradient, "gradient")
    if gradient and isinstance(to, str) and to == "largest":
        raise UsageError("gradient = True is not possible for largest, which has no codes; leave it out")
    if gradient:
        check_kind(x)
    return bool(gradient) and needs_derivative(x)


def _with_gradient(
    x: torch.Tensor, rotation: Any, asked: Asked, tensor_scale: Any, target: Target, before: Prologue | None
) -> Quantized:
    """The result of a call whose codes have a gradient: with the rotated values too, which have a derivative."""
    scale, *_, numerics, batch_invariant, _ = asked
    q = _quantized(x.detach(), rotation, asked, tensor_scale, target, before)
    wide = x.float() if before is None else applied(x, before)["x"]
    of = factors(rotation, wide, scale)
    text = text_of(*structure_of(of), numerics, bool(batch_invariant))
    wanted = Linear(of.matrices, of.signs, of.signs_after, of.scale, text)
    if is_dynamo_compiling():
        q._exact = LINEAR(wide, *wanted)
    else:
        with slow.quiet():  # the codes have said what is to be said
            q._exact = LINEAR(wide, *wanted)
    return q


def _of_shards(
    x: Any, rotation: Any, asked: Asked, tensor_scale: Any, before: Prologue | None, follows: bool
) -> Quantized:
    """The codes and scales of a DTensor, as DTensors that are divided like x."""
    _, to, group, rule, layout, *_ = asked
    form = Format.choose(to, as_int(group), rule, layout)
    n = rotation.block if isinstance(rotation, Rotation) else getattr(rotation, "n", rotation)
    unit = None if form.group == ROW or not isinstance(n, int) else math.lcm(n, max(form.group, 1), 2)
    shards = shards_of(x, unit, before)
    if is_divided(shards.whole) and form.layout is not Layout.ROW_MAJOR:
        raise UsageError(
            f"layout = {form.layout.value} lays out the scales of all rows together, and x is a DTensor whose ranks "
            "have parts of it; use row-major, or pass x.to_local() for scales of each part"
        )
    width = 1 if before is None else before.width
    if isinstance(rotation, Rotation):
        check_length(x.shape[-1], rotation.n, width)
        rotation = factors_of(rotation, shards.local)
    given = tensor_scale
    if isinstance(given, torch.Tensor):
        given = like_heads(given, shards) if form.by_head else whole_of(given)
    make = _with_gradient if follows else _quantized
    q = make(shards.local, rotation, asked, given, None, before)
    scales = joined(shards, q.scales, replicated=form.group == TENSOR and not form.by_head)
    made = Quantized(joined(shards, q.codes), scales, form)
    if q.tensor_scale is not None:
        made.tensor_scale = joined(shards, q.tensor_scale, replicated=True)
    if q._exact is not None:
        made._exact = joined(shards, q._exact)
    return made


def _destination(out: Any) -> tuple[Any, Any]:
    """Codes and scales of out. Raises TypeError."""
    if not isinstance(out, (Quantized, tuple, list)) or len(out) != 2:
        raise TypeError(f"out is a {type(out).__name__}; pass what rotate_quantize returned, or codes and scales")
    # torch.compile of PyTorch 2.8 and earlier cannot unpack a Quantized
    codes, scales = (out.codes, out.scales) if isinstance(out, Quantized) else out
    return codes, scales


def check_values(x: torch.Tensor) -> None:
    """Raises TypeError and `TensorError` for an x that cannot be quantized."""
    check_kind(x)
    _check_has_no_gradient(x, "x")


def check_kind(x: torch.Tensor) -> None:
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


def factors(
    rotation: Any,
    rows: torch.Tensor,
    scale: float | None,
    before: Prologue | None = None,
) -> Factors:
    """What a rotation of `rotate_quantize` is made of, with the scale of a call; None for the default.

    rows: a tensor like the rows to rotate. before: the prologue that makes them. Raises TypeError, `UsageError` and
    `TensorError` for a rotation that does not fit."""
    columns = rows.shape[-1]
    scale = scale if scale is None or is_symbolic(scale) else float(scale)
    if isinstance(rotation, Rotation):
        width = 1 if before is None else before.width
        check_length(width * columns, rotation.n, width)
        of = factors_of(rotation, rows)
        return _scaled(of, scale)
    if isinstance(rotation, Factors):
        return _scaled(rotation, scale)
    n = 1 if rotation is None else as_int(rotation)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"rotation is a {type(rotation).__name__}; pass a Rotation, a power of two, or None")
    if n < 1 or n & (n - 1) or columns % n:
        raise UsageError(
            f"rotation = {shown(n)} is no power of two that divides the {columns} columns of "
            f"{'x' if before is None else 'the result of before'}; choose one"
        )
    return Factors(n, scale=n**-0.5 if scale is None else scale)


def _scaled(of: Factors, scale: float | None) -> Factors:
    if scale is None:
        return of
    return Factors(of.n, of.orders, of.swapped, of.scale * scale, of.matrices, of.signs, of.signs_after)


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
        is_plain(given)
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
) -> tuple[Call, Problem | None, Problem | None, Problem | None]:
    """A call with rows like x; the problem of the kernel that does all of it; and the problems of the kernels that
    rotate if there is no such kernel. None if no kernel can. form: None without a quantizer. Raises what a call with
    these arguments raises."""
    of, wide = factors(rotation, x, None), torch.empty_like(x, dtype=torch.float32)
    rest = (*fields_of(form), round_first) if form else ()
    before = prologue and (named(prologue).text or prologue)
    spec = Spec.parse(text_of(*structure_of(of), numerics, batch_invariant, False, before, *rest))
    taken = x if spec.width == 1 else x.new_empty((*x.shape[:-1], spec.width * x.shape[-1]))
    asked = Call(spec, of.scale, taken, of.matrices, of.signs, of.signs_after)
    length = of.n // math.prod(of.orders)
    return (
        asked,
        problem_of(asked),
        problem_of(rotation_of(asked, wide)),
        kernels.problem_of(length, wide.dtype, "accurate", Rows.CONTIGUOUS),
    )
