"""`rotate_quantize`: a rotation, and the quantizer behind it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hadagen.driver import Launch
from hadagen.errors import TensorError, UsageError
from hadagen.formats import ROW, TENSOR, Element, Format, Layout
from hadagen.launch import RowShape
from hadagen.problem import Problem, Rows
from hadagen.runtime import compute, kernels, quantizer, repeat
from hadagen.runtime.arguments import as_int
from hadagen.runtime.checks import (
    DTYPES,
    check_is_flag,
    check_is_number,
    check_is_tensor,
    check_options,
    check_tensor,
    is_symbolic,
    kind_of,
)
from hadagen.runtime.choose import BATCH_INVARIANT
from hadagen.runtime.linear import LIBRARY, has_only_memory, needs_derivative
from hadagen.runtime.operands import Operands, addresses
from hadagen.runtime.repeat import ALIGNMENT
from hadagen.runtime.rotate import rotated
from hadagen.runtime.rotation import Rotation

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_GROUPS = 1 << 32  # which kernels count in 32 bits
_LEAST, _MOST = 2.0**-149, torch.finfo(torch.float32).max  # of a scale, in float32


class Quantized(NamedTuple):
    """What `rotate_quantize` returns.

    codes: of x's shape; of 4-bit codes uint8 of half as many columns, the even one in the low nibble.
    scales: one for each group, in the layout of the format; of a whole row [...], for int8-row [..., 1].
    format: what they are.
    tensor_scale: for nvfp4 that of the call, float32 with one element; else None. For fp8-tensor it is the scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: Format
    tensor_scale: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values that codes and scales stand for, rotated as they are, of x's shape.

        dtype: float16, bfloat16, float32 or float64. Raises `UsageError` for another.
        """
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r:.80} is not possible; pass one of {', '.join(map(str, DTYPES))}")
        codes = self.codes.flatten(0, -2) if self.codes.dim() > 1 else self.codes[None]
        values = quantizer.dequantize(codes, self.scales, self.format, self.tensor_scale)
        return values.view(*self.codes.shape[:-1], values.shape[-1]).to(dtype)


def rotate_quantize(
    x: torch.Tensor,
    rotation: Rotation | int | None = None,
    *,
    to: str,
    scale: float = 1.0,
    group: int | None = None,
    rule: str | None = None,
    layout: str = "row-major",
    tensor_scale: torch.Tensor | float | None = None,
    round_first: bool = False,
) -> Quantized:
    """Rotate the last dimension of x, and quantize the result.

    x: [..., m] of type float16, bfloat16 or float32, with any strides. 4-bit codes need an even m.
    rotation: a `hadagen.Rotation` of rows of m; or n, for H_n, unnormalized, over blocks of n; None for no rotation.
    to: the format. docs/quantization.md has the formats, their rules, groups and layouts.
    scale: the rotated values are multiplied by it, before anything else is done with them.
    group: how many neighboring elements have one scale; None is the default of the format.
    rule: how a scale follows from the largest magnitude; None is the default of the format.
    layout: of the scales, "row-major", "column-major" or "swizzled".
    tensor_scale: for fp8-tensor the scale of all values; for nvfp4 that of all scales, or with the rule
        transformer_engine the largest magnitude of all values. A number, or float32 with one element on x's device.
    round_first: round the rotated values to x's type before they are quantized. By default they stay float32.

    Rotation and quantizer compute in float32, and codes are rounded half to even. What is larger than the largest code
    becomes that. In formats without a code for NaN, a NaN gets 0, and an infinity the largest code. The E8M0 scale of a
    group with either is 0xff, which is no number.

    Raises TypeError for an argument of a wrong type; `UsageError` for a format, group, rule or layout that do not exist
    together, and for a bad scale; `TensorError` for an x that cannot be quantized, such as one that requires gradients.
    """
    check_values(x)
    check_is_flag(round_first, "round_first")
    form, columns = Format.choose(to, as_int(group), rule, layout), x.shape[-1]
    form.scales_in_row(columns)
    if form.element.bits == 4 and columns % 2:
        raise TensorError(f"x has {columns} columns; 4-bit codes need an even number")
    check_options(scale, "accurate", torch.float32)
    given = _tensor_scale(tensor_scale, form, x)
    of = _operands(x, rotation, scale if is_symbolic(scale) else float(scale))
    codes, scales = _OPERATOR(x, *of, form.name, form.group, form.rule, form.layout.value, round_first, given)
    if form.group == TENSOR and given is not None:
        return Quantized(codes, given, form)
    return Quantized(codes, scales, form, given)


def check_values(x: torch.Tensor) -> None:
    """Raises TypeError and `TensorError` for what cannot be quantized."""
    check_is_tensor(x, "x")
    if x.dtype not in _DTYPES:
        plain = str(x.dtype).removeprefix("torch.")
        raise TensorError(f"x has the type {plain}; pass values of float16, bfloat16 or float32 that are not quantized")
    check_tensor(x)
    _check_has_no_gradient(x, "x")


def _check_has_no_gradient(x: torch.Tensor, name: str) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise TensorError(f"{name} requires a gradient, which quantized codes do not have; pass {name}.detach()")


class _Rotation(NamedTuple):
    """What the operator takes for a rotation, as `Operands` has it. Rows of n = 1 are not rotated."""

    matrices: torch.Tensor | None
    orders: Sequence[int]
    signs: torch.Tensor | None
    signs_after: torch.Tensor | None
    n: int
    swapped: bool
    scale: float

    @property
    def operands(self) -> Operands:
        return Operands(*self[:6], False, self.scale, "accurate", BATCH_INVARIANT)


def _operands(x: torch.Tensor, rotation: Rotation | int | None, scale: float) -> _Rotation:
    columns = x.shape[-1]
    if isinstance(rotation, Rotation):
        of = rotation.operands_for(x, scale)
        return _Rotation(*of[:6], of.scale)
    n = 1 if rotation is None else as_int(rotation)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"rotation is a {type(rotation).__name__}; pass a Rotation, a power of two, or None")
    if n < 1 or n & (n - 1) or columns % n:
        raise UsageError(f"rotation = {n} is no power of two that divides the {columns} columns of x; choose one")
    return _Rotation(None, [], None, None, n, False, scale)


def _tensor_scale(given: torch.Tensor | float | None, form: Format, x: torch.Tensor) -> torch.Tensor | None:
    """As float32 without dimensions, on x's device. A tensor on a GPU is not looked at, because that would wait."""
    if not form.needs_scale:
        if given is not None:
            raise UsageError(f"{form.name} has no tensor_scale; leave it out, or choose fp8-tensor or nvfp4")
        return None
    if given is None:
        raise UsageError(f"{form.name} needs a tensor_scale; pass a number, or a tensor with one element")
    if isinstance(given, torch.Tensor):
        is_plain = given.layout is torch.strided and given.dtype == torch.float32 and given.numel() == 1
        if not is_plain or given.is_nested or given.device != x.device:
            what = f"{kind_of(given)} with {given.numel()} elements on {given.device}"
            raise TensorError(f"tensor_scale is {what}; it must be strided float32 with one element on {x.device}")
        _check_has_no_gradient(given, "tensor_scale")
        if given.device.type == "cpu" and has_only_memory(given):
            _check_is_possible(float(given), form)
        return given.detach().reshape(())
    check_is_number(given, "tensor_scale")
    if not is_symbolic(given):
        try:
            given = float(given)
        except OverflowError:  # an integer beyond every float
            given = math.inf
        _check_is_possible(given, form)
        given = given if given <= _MOST else math.inf
    return torch.full((), given, dtype=torch.float32, device=x.device)


def _check_is_possible(number: float, form: Format) -> None:
    # A largest magnitude is what the values make it: 0, infinite or NaN too.
    is_possible = not number < 0 if form.rule == "transformer_engine" else _LEAST <= number <= _MOST
    if not is_possible:
        raise UsageError(
            f"tensor_scale = {number} is not possible; pass a positive number that float32 has, up to {_MOST:.3g}"
        )


# ---- the operator ----------------------------------------------------------------------------------------------------
# What is launched for calls that differ only in addresses. Only checked arguments are in here.
_launches: dict[tuple[Any, ...], Launch] = repeat.table()
_CODES = {Element.E4M3: torch.float8_e4m3fn, Element.INT8: torch.int8}
_SCALES = {"float32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


_format = functools.lru_cache(maxsize=256)(Format.choose)


def _rotate_quantize(
    x: torch.Tensor,
    matrices: torch.Tensor | None,
    orders: Sequence[int],
    signs: torch.Tensor | None,
    signs_after: torch.Tensor | None,
    n: int,
    swapped: bool,
    scale: float,
    to: str,
    group: int,
    rule: str,
    layout: str,
    round_first: bool,
    given: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    form = _format(to, group, rule, layout)
    of = _Rotation(matrices, orders, signs, signs_after, n, swapped, scale)
    if compute.takes_kernels(x) and (found := _by_kernel(x, of, form, round_first, given)):
        return found
    return _shaped(x, form, *_in_pytorch(x, of, form, round_first, given))


def _by_kernel(
    x: torch.Tensor, of: _Rotation, form: Format, round_first: bool, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and scales by a kernel that does all of it; None if there is none."""
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    columns, device = x.shape[-1], x.get_device()
    rows, groups = x.numel() // columns, form.scales_in_row(columns)
    codes = x.new_empty((rows, columns * form.element.bits // 8), dtype=_CODES.get(form.element, torch.uint8))
    scales = x.new_empty(0)
    if form.group != TENSOR:
        scales = quantizer.laid_out_empty(rows, groups, form.layout, _SCALES.get(form.scale, x.dtype), x.device)
    key = (x.shape, x.dtype, device, form.key, round_first, *map(_identity, of))
    launch = _launches.get(key)
    if launch is None:
        launch = _launch(x, of, form, round_first, groups, quantizer.pitch(scales))
        if launch is None:
            return None
        repeat.remember(_launches, key, launch)
    changing = [] if form.group == TENSOR else [scales.data_ptr()]
    changing += [] if given is None else [given.data_ptr()]
    kernels.queue(launch, device, x.data_ptr(), codes.data_ptr(), *changing)
    return _shaped(x, form, codes, scales)


def _identity(operand: Any) -> Any:
    if isinstance(operand, torch.Tensor):
        return operand.data_ptr(), operand.dtype
    return tuple(operand) if isinstance(operand, Sequence) else operand


def _launch(x: torch.Tensor, of: _Rotation, form: Format, round_first: bool, groups: int, pitch: int) -> Launch | None:
    """The launch of a kernel for contiguous tensors like x; None if there is no such kernel."""
    problem = _problem_of(x, of, form, round_first)
    if problem is None or x.numel() % problem.unit or x.numel() // problem.unit >= _MOST_GROUPS:
        return None
    kernel = kernels.find_for_scale(kernels.Kind(x.get_device(), problem, in_place=False), x.numel(), of.scale)
    if kernel is None:
        return None
    changing = ([] if form.group == TENSOR else ["scales"]) + ["tensor_scale"] * form.needs_scale
    operands = {**addresses(of.operands), "scales_in_row": groups, "scale_pitch": pitch}
    return kernel.prepared(x.numel(), of.scale, RowShape(of.n, of.n, of.n), operands, changing)


def _problem_of(x: torch.Tensor, of: _Rotation, form: Format, round_first: bool) -> Problem | None:
    """The problem of a kernel that does all of it; None if no kernel can."""
    aligned = all(each is None or each.data_ptr() % ALIGNMENT == 0 for each in (of.signs, of.signs_after))
    if of.matrices is not None or of.swapped or BATCH_INVARIANT or not aligned:
        return None
    group = x.shape[-1] if form.group == ROW else form.group
    to = replace(form, group=group, rounded=round_first and not form.rounds_first)
    signed = of.signs is not None or of.signs_after is not None
    try:
        return kernels.problem_of(of.n, x.dtype, "accurate", Rows.CONTIGUOUS, signed=signed, to=to)
    except UsageError:  # groups that are no part of a tile
        return None


def _in_pytorch(
    x: torch.Tensor, of: _Rotation, form: Format, round_first: bool, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if of.n == 1:
        values.mul_(of.scale)
    elif values.numel():
        values = rotated(values, of.operands)
    if round_first:
        values = values.to(x.dtype).float()
    return quantizer.quantize(values.view(-1, x.shape[-1]), form, x.dtype, given)


def _shapes(x: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a tensor without memory."""
    to, group, rule, layout, _, given = options[-6:]
    form = Format.choose(to, group, rule, layout)
    return _shaped(x, form, *quantizer.quantize(x.reshape(-1, x.shape[-1]).float(), form, x.dtype, given))


def _shaped(
    x: torch.Tensor, form: Format, codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x's shape, and scales, from those of rows."""
    if form.group == TENSOR:
        scales = x.new_zeros((), dtype=torch.float32)  # the caller's; an operator returns no argument
    elif form.layout is Layout.ROW_MAJOR:
        has_groups = form.group != ROW or form.name == "int8-row"
        scales = scales.view(x.shape[:-1] + (scales.shape[1:] if has_groups else ()))
    return codes.view(*x.shape[:-1], codes.shape[-1]), scales


def _autograd(x: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if needs_derivative(x):
        raise TensorError("x has a derivative, which quantized codes do not have; pass x.detach()")
    with torch._C._AutoDispatchBelowAutograd():
        return _OPERATOR(x, *options)  # type: ignore[no-any-return]


LIBRARY.define(
    "rotate_quantize(Tensor x, Tensor? matrices, int[] orders, Tensor? signs, Tensor? signs_after, int n, "
    "bool swapped, Scalar scale, str to, int group, str rule, str layout, bool round_first, Tensor? given) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("rotate_quantize", _rotate_quantize, "CompositeExplicitAutograd")
LIBRARY.impl("rotate_quantize", _autograd, "Autograd")
torch.library.register_fake("hadagen::rotate_quantize", _shapes, lib=LIBRARY)
_OPERATOR: Any = torch.ops.hadagen.rotate_quantize.default
