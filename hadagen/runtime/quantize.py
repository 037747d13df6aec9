"""`rotate_quantize`: a rotation, and the quantizer behind it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from hadagen import quantizer
from hadagen.errors import TensorError, UsageError, shown
from hadagen.formats import TENSOR, Format
from hadagen.problem import Problem, Rows
from hadagen.runtime import compute, kernels, quantizing, tables
from hadagen.runtime.arguments import as_int
from hadagen.runtime.checks import (
    check_alike,
    check_is_flag,
    check_is_number,
    check_is_tensor,
    check_options,
    check_tensor,
    check_writable,
    is_functional,
    is_symbolic,
    kind_of,
    shape_of,
)
from hadagen.runtime.choose import BATCH_INVARIANT
from hadagen.runtime.linear import LIBRARY, has_only_memory, needs_derivative
from hadagen.runtime.operands import Operands, check
from hadagen.runtime.quantized import Quantized
from hadagen.runtime.quantizing import copy_into, is_ready, order_of, parts_of, shaped
from hadagen.runtime.repeat import ALIGNMENT
from hadagen.runtime.rotate import ROTATE, problem_of, rotated
from hadagen.runtime.rotation import Rotation

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LEAST, _MOST = 2.0**-149, torch.finfo(torch.float32).max  # of a scale, in float32


def rotate_quantize(
    x: torch.Tensor,
    rotation: Rotation | Operands | int | None = None,
    *,
    to: str,
    scale: float | None = None,
    group: int | None = None,
    rule: str | None = None,
    layout: str = "row-major",
    tensor_scale: torch.Tensor | float | None = None,
    round_first: bool = False,
    gradient: bool = False,
    numerics: str = "accurate",
    batch_invariant: bool | None = None,
    out: Quantized | tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> Quantized:
    """Rotate the last dimension of x, and quantize the result.

    x: [..., m] of type float16, bfloat16 or float32, with any strides. 4-bit codes need an even m.
    rotation: a `hadagen.Rotation` of rows of m elements; or n, a power of two, for H_n · n^-½ over blocks of n
        elements; None for no rotation. (`hadagen.presets` passes operands of a Rotation.)
    to: the format. docs/quantization.md has the formats, their rules, groups and layouts.
    scale: for a Rotation and for None a factor on the values before they are quantized, 1 by default. For n the whole
        factor on H_n: by default n^-½, which makes it orthonormal; scale=1 is the unnormalized H_n.
    group: the group size, the number of neighboring elements with one scale; None is the default of the format.
    rule: how a scale follows from amax, the largest magnitude of its group; None is the default of the format.
    layout: of the scales, "row-major", "column-major", "packed", "swizzled" or "batched-swizzled".
    tensor_scale: for fp8-tensor the scale of all values; for nvfp4 the scale of all scales, or with the rule
        transformer_engine the amax of all values. A number, or float32 with one element on x's device. For fp8-head the
        scale of each head, or with the rule fa3 the amax of each head: float32 on x's device, with the shape
        x.shape[:k] of k ≥ 1 leading dimensions.
    round_first: round the rotated values to x's type before they are quantized. By default they stay float32.
    gradient: whether the result of `dequantize` has gradients, if x requires one. The rotation is then computed twice,
        and its float32 values are kept.
    numerics: "accurate" keeps at least 16 significant bits of every value until codes are made, on every GPU; only the
        conversion to FP4 may look at fewer, as docs/quantization.md says. "fast" may round values to fewer bits between
        steps. float32 is always accurate.
    batch_invariant: as for `hadagen.hadamard_transform`. If the kernels that quantize do not give the same bits in
        every call, PyTorch quantizes, with one RuntimeWarning. The default is True if HADAGEN_BATCH_INVARIANT is 1.
    out: the codes and scales to write and return: an earlier result, or a pair of tensors like the results of the call.
        They must not share memory with x. For fp8-tensor and fp8-head, the scales of out are ignored.

    Rotation and quantizer compute in float32, and codes are rounded half to even. A value beyond the largest code gets
    the largest code. In formats without a code for NaN, a NaN gets 0, and an infinity gets the largest code. The E8M0
    scale of a group with a NaN or an infinity is 0xff, which stands for NaN.

    Raises TypeError for an argument of a wrong type; `UsageError` for a format, group, rule or layout that do not exist
    together, and for a bad scale; `TensorError` for an x that cannot be quantized, such as an x that requires a
    gradient without gradient=True, and for an out that is not like the result.
    """
    check_is_flag(gradient, "gradient")
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    check_is_flag(batch_invariant, "batch_invariant")
    asked = numerics, bool(batch_invariant)
    if gradient and isinstance(to, str) and to == "largest":
        raise UsageError("gradient = True is not possible for largest, which has no codes; leave it out")
    destination = None if out is None else _destination(out)
    if gradient:
        _check_kind(x)
    if gradient and needs_derivative(x):
        quantized = rotate_quantize(
            x.detach(),
            rotation,
            to=to,
            scale=scale,
            group=group,
            rule=rule,
            layout=layout,
            tensor_scale=tensor_scale,
            round_first=round_first,
            numerics=numerics,
            batch_invariant=batch_invariant,
            out=out,
        )
        quantized._exact = _rotated(x, rotation, scale, *asked)
        return quantized
    key = _key_of(x, rotation, tensor_scale, to, scale, group, rule, layout, round_first, *asked)
    known = key and _calls.get(key)
    if known and has_only_memory(x) and not needs_derivative(x):
        form, run = known
        given = _tensor_scale(tensor_scale, form, x) if form.needs_scale else None
        if destination is None:
            return _quantized(form, given, *run(x.data_ptr(), given))
        written = _written(destination, form)
        if all(has_only_memory(each) and not needs_derivative(each) for each in written):
            _check_like(written, run.parts, x)
            _check_apart(written, x, given, form, rotation)
            _fill_up(written, form)
            run.into(x.data_ptr(), given, written)
            return _quantized(form, given, *destination)
    check_values(x)
    check_is_flag(round_first, "round_first")
    form, columns = Format.choose(to, as_int(group), rule, layout), x.shape[-1]
    form.scales_in_row(columns)
    if form.element.bits == 4 and columns % 2:
        raise TensorError(f"x has {columns} columns; 4-bit codes need an even number")
    check_options(1.0 if scale is None else scale, numerics, torch.float32)
    given = _tensor_scale(tensor_scale, form, x)
    of = _operands(x, rotation, scale if scale is None or is_symbolic(scale) else float(scale), *asked)
    values = [*of]  # torch.compile of PyTorch 2.6 cannot slice a NamedTuple
    options = *values[:6], of.scale, *asked, form.name, form.group, form.rule, form.layout.value, round_first, given
    if destination is None:
        result = _quantized(form, given, *_OPERATOR(x, *options))
    else:
        written = _written(destination, form)
        if not torch.compiler.is_dynamo_compiling():  # where the operator's own checks do
            for name, each in zip(_NAMES, written, strict=False):
                _check_has_no_gradient(each, name)
            _check_like(written, parts_of(x, form), x)
            if all(has_only_memory(each) for each in (x, *written)):
                _check_apart(written, x, given, form, rotation)
                _fill_up(written, form)
            x = x.resolve_neg()  # which PyTorch does only for operators with a result
        _INTO(x, *options, written[0], None if form.group == TENSOR else written[1])
        result = _quantized(form, given, *destination)
    if key and is_ready(x.permute(order_of(x, form))):
        run = _runs.get(_key_of_run(x, of, form, round_first, _heads(form, given)))
        if run:
            tables.remember(_calls, key, (form, run))
    return result


def _quantized(form: Format, given: torch.Tensor | None, codes: torch.Tensor, scales: Any) -> Quantized:
    return (
        Quantized(codes, given, form)
        if form.group == TENSOR and given is not None
        else Quantized(codes, scales, form, given)
    )


# ---- out= ------------------------------------------------------------------------------------------------------------
_NAMES = "out.codes", "out.scales"


def _destination(out: Any) -> tuple[Any, Any]:
    """Codes and scales of out. Raises TypeError."""
    if not isinstance(out, (Quantized, tuple, list)) or len(out) != 2:
        raise TypeError(f"out is a {type(out).__name__}; pass what rotate_quantize returned, or codes and scales")
    if isinstance(out, Quantized):
        return out.codes, out.scales  # which torch.compile of PyTorch 2.8 and earlier cannot unpack
    codes, scales = out
    return codes, scales


def _written(destination: Sequence[Any], form: Format) -> Sequence[torch.Tensor]:
    """What is written of a destination: without scales, where the call has one. Raises TypeError."""
    written = destination[: 1 if form.group == TENSOR else 2]
    for name, each in zip(_NAMES[: len(written)], written, strict=True):  # older Dynamos take False for True
        check_is_tensor(each, name)
    return [quantizer.as_bytes(each) for each in written]


def _check_like(written: Sequence[torch.Tensor], parts: Sequence[quantizing.Part], x: torch.Tensor) -> None:
    """Raises `TensorError` for what is not like the result for x."""
    for name, each, (shape, strides, dtype) in zip(_NAMES, written, parts, strict=False):
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
                f"{str(dtype).removeprefix('torch.')} {shape} with the strides {strides} on {x.device}"
            )


def _lies_like(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether it has these strides, as far as they say where an element lies."""
    each = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() == 0 or all(size == 1 or mine == wanted for size, mine, wanted in each)


def _check_apart(
    written: Sequence[torch.Tensor], x: torch.Tensor, given: torch.Tensor | None, form: Format, rotation: Any
) -> None:
    """Raises `TensorError` for memory that PyTorch forbids to write, or that is that of another tensor of the call."""
    others = [
        (name, each, compute.span(each)) for name, each in (("x", x), ("tensor_scale", given)) if each is not None
    ]
    if isinstance(rotation, (Rotation, Operands)):
        others += [(name, each, compute.span(each)) for name, each in rotation.tensors]
    for name, each in zip(_NAMES, written, strict=False):
        check_writable(each)
        size = compute.span(each)
        if name == "out.scales" and form.layout.in_columns and size:  # with what fills up the last column
            size = each.shape[-1] * each.stride(-1) * each.element_size()
        for other, tensor, of_other in others:
            if -size < each.data_ptr() - tensor.data_ptr() < of_other:
                raise TensorError(f"{name} shares memory with {other}; pass memory of its own")
        others.append((name, each, size))


def _fill_up(written: Sequence[torch.Tensor], form: Format) -> None:
    """Write the zeros that fill up columns of scales. PyTorch does not know that they belong to the tensor, so an
    operator may not."""
    if form.layout.in_columns:
        quantizing.fill_up(written[1])


# What to do for calls that differ only in the address of x, by a multiple of 16. Only checked arguments are in here. An
# entry is right for whatever lies at the addresses of the operands of its rotation, because they are in the key.
_calls: dict[tuple[Any, ...], tuple[Format, quantizing.Run]] = tables.table()
_runs: dict[tuple[Any, ...], quantizing.Run] = tables.table()


_PLAIN = {None, type(None), int, float, bool, str}


def _key_of(x: torch.Tensor, rotation: Any, tensor_scale: Any, *options: Any) -> tuple[Any, ...] | None:
    """The key of a call in `_calls`; None where nothing is remembered."""
    if torch.compiler.is_dynamo_compiling() or not isinstance(x, torch.Tensor) or not compute.takes_kernels(x):
        return None
    made = isinstance(rotation, (Rotation, Operands))
    given = None if isinstance(tensor_scale, torch.Tensor) else tensor_scale
    # Of equal numbers of several types some are refused, and what is no plain value may change.
    types = None if made else type(rotation), type(given), *map(type, options)
    if not _PLAIN.issuperset(types):
        return None
    try:
        address = x.data_ptr() % ALIGNMENT
        heads = tensor_scale.numel() if isinstance(tensor_scale, torch.Tensor) else 0
        like = x.shape, x.stride(), x.dtype, x.get_device(), address
        rotated = rotation.identity if made else rotation
    except (RuntimeError, ValueError):  # no memory, or no shape
        return None
    return *like, rotated, given, heads, *options, types


def check_values(x: torch.Tensor) -> None:
    """Raises TypeError and `TensorError` for what cannot be quantized."""
    _check_kind(x)
    _check_has_no_gradient(x, "x")


def _check_kind(x: torch.Tensor) -> None:
    """The same, but for an x that requires a gradient."""
    check_is_tensor(x, "x")
    if x.dtype not in _DTYPES:
        plain = str(x.dtype).removeprefix("torch.")
        raise TensorError(f"x has the type {plain}; pass values of float16, bfloat16 or float32 that are not quantized")
    check_tensor(x)


def _check_has_no_gradient(x: torch.Tensor, name: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        fix = f"pass {name}.detach(){', or gradient=True' if name == 'x' else ''}"
        raise TensorError(f"{name} requires a gradient, which quantized codes do not have; {fix}")


def _rotated(
    x: torch.Tensor,
    rotation: Rotation | Operands | int | None,
    scale: float | None,
    numerics: str,
    batch_invariant: bool,
) -> torch.Tensor:
    """What is quantized, with its gradient. The arguments were checked."""
    wide = x.float()
    return ROTATE.apply(wide, _operands(wide, rotation, scale, numerics, batch_invariant))


def _operands(
    x: torch.Tensor,
    rotation: Rotation | Operands | int | None,
    scale: float | None,
    numerics: str,
    batch_invariant: bool,
) -> Operands:
    """scale: None for the default."""
    columns = x.shape[-1]
    factor = 1.0 if scale is None else scale
    if isinstance(rotation, Rotation):
        return rotation.operands_for(x, factor, numerics, batch_invariant)
    if isinstance(rotation, Operands):
        made = rotation.scaled(factor, numerics, batch_invariant)
        if not torch.compiler.is_dynamo_compiling():  # where the operator's own checks do
            check(x, made)
        return made
    n = 1 if rotation is None else as_int(rotation)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"rotation is a {type(rotation).__name__}; pass a Rotation, a power of two, or None")
    if n < 1 or n & (n - 1) or columns % n:
        raise UsageError(
            f"rotation = {shown(n)} is no power of two that divides the {columns} columns of x; choose one"
        )
    factor = n**-0.5 if scale is None else scale
    return Operands(None, [1], None, None, n, False, False, factor, numerics, batch_invariant)


def _tensor_scale(given: torch.Tensor | float | None, form: Format, x: torch.Tensor) -> torch.Tensor | None:
    """As float32 on x's device, without dimensions or with those of heads. A tensor on a GPU is not looked at, because
    that would wait."""
    if not form.needs_scale:
        if given is not None:
            raise UsageError(f"{form.name} has no tensor_scale; leave it out, or choose fp8-tensor, fp8-head or nvfp4")
        return None
    if form.by_head:
        return _scales_of_heads(given, form, x)
    if given is None:
        raise UsageError(f"{form.name} needs a tensor_scale; pass a number, or a tensor with one element")
    if isinstance(given, torch.Tensor):
        check_is_tensor(given, "tensor_scale")
        is_plain = given.layout is torch.strided and given.dtype == torch.float32 and given.numel() == 1
        if not is_plain or given.is_nested or given.device != x.device:
            what = f"{kind_of(given)} with {given.numel()} elements on {given.device}"
            raise TensorError(f"tensor_scale is {what}; it must be strided float32 with one element on {x.device}")
        check_alike(x, given, "tensor_scale")
        _check_has_no_gradient(given, "tensor_scale")
        if given.device.type == "cpu" and has_only_memory(given):
            _check_is_possible(float(given), form)
        return given.detach().resolve_neg().reshape(())
    check_is_number(given, "tensor_scale")
    if not is_symbolic(given):
        try:
            given = float(given)
        except OverflowError:  # an integer beyond every float
            given = math.inf
        _check_is_possible(given, form)
        given = given if given <= _MOST else math.inf
    return torch.full((), given, dtype=torch.float32, device=x.device)


def _scales_of_heads(given: Any, form: Format, x: torch.Tensor) -> torch.Tensor:
    def wanted() -> str:
        return f"float32 with the shape of leading dimensions of x, such as {tuple(x.shape[:1])}, on {x.device}"

    if given is None:
        raise UsageError(f"{form.name} needs a tensor_scale; pass {wanted()}")
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"tensor_scale is a {type(given).__name__}; {form.name} needs a tensor, {wanted()}")
    if x.dim() == 1:
        raise TensorError(f"x has one dimension; {form.name} needs another for its heads, such as x[None]")
    check_is_tensor(given, "tensor_scale")
    is_plain = given.layout is torch.strided and given.dtype == torch.float32 and not given.is_nested
    fits = is_plain and 1 <= given.dim() < x.dim() and given.shape == x.shape[: given.dim()]
    if not fits or given.device != x.device:
        what = f"{kind_of(given)} {shape_of(given)} on {given.device}"
        raise TensorError(f"tensor_scale is {what}; it must be strided {wanted()}")
    check_alike(x, given, "tensor_scale")
    _check_has_no_gradient(given, "tensor_scale")
    if given.device.type == "cpu" and has_only_memory(given) and given.numel():
        for number in given.aminmax():
            _check_is_possible(float(number), form)
    return given.detach().resolve_neg().contiguous()


def _heads(form: Format, given: torch.Tensor | None) -> int:
    """How many heads have a scale; 1 where x has one, or groups."""
    return given.numel() if form.by_head and given is not None else 1


def _check_is_possible(number: float, form: Format) -> None:
    # A largest magnitude is what the values make it: 0, infinite or NaN too.
    is_magnitude = form.rule in ("transformer_engine", "fa3")
    is_possible = not number < 0 if is_magnitude else number == 0 or _LEAST <= number <= _MOST
    if not is_possible:
        raise UsageError(
            f"tensor_scale = {number} is not possible; pass a positive number that float32 has, up to {_MOST:.3g}, or 0"
        )


def _compute(
    x: torch.Tensor, of: Operands, form: Format, round_first: bool, given: torch.Tensor | None
) -> quantizing.Results:
    """Codes and scales of x, which has memory and no derivative: by a kernel if there is one."""
    if form.by_kernels is not form:
        return _laid_out(x, form, *_compute(x, of, form.by_kernels, round_first, given))
    rows, run = _find(x, of, form, round_first, _heads(form, given))
    if run:
        return run(rows.data_ptr(), given)
    return shaped(x, form, *_in_pytorch(rows, of, form, round_first, given))


def _laid_out(x: torch.Tensor, form: Format, codes: torch.Tensor, scales: torch.Tensor) -> quantizing.Results:
    """Codes and row-major scales of x as the layout has them."""
    rows = scales.reshape(-1, scales.shape[-1])
    return codes.contiguous(), quantizer.laid_out(rows, form.layout, (*x.shape[:-2],))


def _compute_into(
    x: torch.Tensor,
    of: Operands,
    form: Format,
    round_first: bool,
    given: torch.Tensor | None,
    out: Sequence[torch.Tensor],
) -> None:
    """The same into what `Run.into` takes."""
    if form.by_kernels is not form:
        return copy_into(out, _compute(x, of, form, round_first, given))
    rows, run = _find(x, of, form, round_first, _heads(form, given))
    if run:
        run.into(rows.data_ptr(), given, out)
    else:
        copy_into(out, shaped(x, form, *_in_pytorch(rows, of, form, round_first, given)))


def _find(
    x: torch.Tensor, of: Operands, form: Format, round_first: bool, heads: int
) -> tuple[torch.Tensor, quantizing.Run | None]:
    """x with its dimensions in order, and what launches a kernel for it as it then lies."""
    rows = x.permute(order_of(x, form))
    if not compute.takes_kernels(x):
        return rows, None
    if not is_ready(rows):
        rows = rows.clone(memory_format=torch.contiguous_format)
    key = _key_of_run(x, of, form, round_first, heads)
    run = _runs.get(key)
    if run is None and (run := quantizing.find(x, of, form, round_first, heads)):
        tables.remember(_runs, key, run)
    return rows, run


def problems_of(
    x: torch.Tensor,
    rotation: Rotation | int,
    form: Format,
    round_first: bool,
    numerics: str,
    batch_invariant: bool,
) -> tuple[Problem | None, ...]:
    """The problems of the kernel that quantizes tensors like x, and of the kernels that rotate if there is no such
    kernel. None if no kernel can. Raises what a call with these arguments raises."""
    of, wide = _operands(x, rotation, None, numerics, batch_invariant), torch.empty_like(x, dtype=torch.float32)
    form = form.by_kernels
    length = of.n // math.prod(of.orders)
    return (
        quantizing.problem_for(x, of, form, round_first),
        problem_of(wide, of),
        kernels.problem_of(length, wide.dtype, "accurate", Rows.CONTIGUOUS),
    )


def _key_of_run(x: torch.Tensor, of: Operands, form: Format, round_first: bool, heads: int) -> tuple[Any, ...]:
    return x.shape, *order_of(x, form), x.dtype, x.get_device(), form.key, round_first, heads, of.identity


def _in_pytorch(
    x: torch.Tensor, of: Operands, form: Format, round_first: bool, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    values = rotated(values, of)
    if round_first:
        values = values.to(x.dtype).float()
    return quantizer.quantize(values.view(-1, x.shape[-1]), form, x.dtype, given)


# ---- the operators ---------------------------------------------------------------------------------------------------
_OUT_AT = 15  # where codes and scales of out stand behind x
# In compiled code too, results have the strides that those of x say.
_TAGS = torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_format = functools.lru_cache(maxsize=256)(Format.choose)


def _arguments(
    matrices: torch.Tensor | None,
    orders: Sequence[int],
    signs: torch.Tensor | None,
    signs_after: torch.Tensor | None,
    n: int,
    swapped: bool,
    scale: float,
    numerics: str,
    batch_invariant: bool,
    to: str,
    group: int,
    rule: str,
    layout: str,
    round_first: bool,
    given: torch.Tensor | None,
) -> tuple[Operands, Format, bool, torch.Tensor | None]:
    of = Operands(matrices, orders, signs, signs_after, n, swapped, False, scale, numerics, batch_invariant)
    return of, _format(to, group, rule, layout), round_first, given


def _new(x: torch.Tensor, *options: Any) -> quantizing.Results:
    arguments = _arguments(*options)
    _check(x, *arguments)
    return _compute(x, *arguments)


def _check(x: torch.Tensor, of: Operands, form: Format, round_first: bool, given: torch.Tensor | None) -> None:
    """Raises `TensorError` for arguments of different devices, of which kernels would read any memory."""
    check(x, of)
    if given is not None and given.device != x.device:
        raise TensorError(f"tensor_scale is on {given.device} but x on {x.device}; move one of them with .to")


def _shapes(x: torch.Tensor, *options: Any) -> quantizing.Results:
    """Codes and scales of a tensor without memory."""
    arguments = _arguments(*options)
    _check(x, *arguments)
    form = arguments[1]
    codes, scales = (x.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in parts_of(x, form))
    if form.layout.in_columns:  # in memory that ends with what fills up the last column
        memory = scales.new_empty(scales.shape[1] * scales.stride(1))
        scales = memory.as_strided(scales.shape, scales.stride())
    return codes, scales


def _into(x: torch.Tensor, *options: Any) -> None:
    of, form, round_first, given = _arguments(*options[:_OUT_AT])
    _check(x, of, form, round_first, given)
    written = _written(options[_OUT_AT:], form)
    _check_like(written, parts_of(x, form), x)
    _check_apart(written, x, given, form, of)
    _compute_into(x, of, form, round_first, given, written)


def _shapes_into(x: torch.Tensor, *options: Any) -> None:
    arguments = _arguments(*options[:_OUT_AT])
    _check(x, *arguments)
    form = arguments[1]
    _check_like(_written(options[_OUT_AT:], form), parts_of(x, form), x)


def _autograd(operator: str) -> Any:
    def below(x: torch.Tensor, *options: Any) -> Any:
        for name, tensor in (("x", x), *(("out", each) for each in options[_OUT_AT:] if each is not None)):
            if needs_derivative(tensor):
                raise TensorError(f"{name} has a derivative, which quantized codes do not have; pass {name}.detach()")
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.hadagen, operator).default(x, *options)

    return below


for _name, _out, _results, _real, _fake in (
    ("rotate_quantize", "", "(Tensor, Tensor)", _new, _shapes),
    ("rotate_quantize_into", ", Tensor(a!) codes, Tensor(b!)? scales", "()", _into, _shapes_into),
):
    LIBRARY.define(
        f"{_name}(Tensor x, Tensor? matrices, int[] orders, Tensor? signs, Tensor? signs_after, int n, bool swapped, "
        "Scalar scale, str numerics, bool batch_invariant, str to, int group, str rule, str layout, bool round_first, "
        f"Tensor? given{_out}) -> {_results}",
        tags=_TAGS,
    )
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, _autograd(_name), "Autograd")
    torch.library.register_fake(f"hadagen::{_name}", _fake, lib=LIBRARY)
_OPERATOR: Any = torch.ops.hadagen.rotate_quantize.default
_INTO: Any = torch.ops.hadagen.rotate_quantize_into.default
