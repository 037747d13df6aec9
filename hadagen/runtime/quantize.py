"""`rotate_quantize`: a rotation, and the quantizer behind it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hadagen.errors import TensorError, UsageError
from hadagen.formats import ROW, TENSOR, Format, Layout
from hadagen.runtime import quantizer
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
from hadagen.runtime.linear import LIBRARY, has_only_memory, needs_derivative
from hadagen.runtime.rotation import Rotation
from hadagen.runtime.transform import hadamard_transform

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
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
    values = _rotated(x, rotation, scale if is_symbolic(scale) else float(scale))
    if round_first:
        values = values.to(x.dtype).float()
    codes, scales = _QUANTIZE(values, form.name, form.group, form.rule, form.layout.value, x.dtype, given)
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


def _rotated(x: torch.Tensor, rotation: Rotation | int | None, scale: float) -> torch.Tensor:
    columns, wide = x.shape[-1], x.float()
    if rotation is None:
        return wide * scale
    if isinstance(rotation, Rotation):
        return rotation(wide) * scale  # type: ignore[no-any-return]
    rotation = as_int(rotation)
    if isinstance(rotation, bool) or not isinstance(rotation, int):
        raise TypeError(f"rotation is a {type(rotation).__name__}; pass a Rotation, a power of two, or None")
    if rotation < 1 or rotation & (rotation - 1) or columns % rotation:
        raise UsageError(
            f"rotation = {rotation} is no power of two that divides the {columns} columns of x; choose one"
        )
    blocks = wide.reshape(*x.shape[:-1], columns // rotation, rotation)
    return hadamard_transform(blocks, scale).flatten(-2)


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


# ---- the operator: for torch.compile, which would round differently, and for meta tensors ----------------------------
def _quantize(
    x: torch.Tensor, to: str, group: int, rule: str, layout: str, dtype: torch.dtype, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    form = Format.choose(to, group, rule, layout)
    codes, scales = quantizer.quantize(x.reshape(-1, x.shape[-1]), form, dtype, given)
    if form.group == TENSOR:
        scales = x.new_zeros(())  # the caller's; an operator returns no argument
    elif form.layout is Layout.ROW_MAJOR:
        has_groups = form.group != ROW or form.name == "int8-row"
        scales = scales.view(x.shape[:-1] + (scales.shape[1:] if has_groups else ()))
    return codes.view(*x.shape[:-1], codes.shape[-1]), scales


def _autograd(x: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if needs_derivative(x):
        raise TensorError("x has a derivative, which quantized codes do not have; pass x.detach()")
    with torch._C._AutoDispatchBelowAutograd():
        return _QUANTIZE(x, *options)  # type: ignore[no-any-return]


LIBRARY.define(
    "quantize(Tensor x, str to, int group, str rule, str layout, ScalarType dtype, Tensor? given) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("quantize", _quantize, "CompositeExplicitAutograd")
LIBRARY.impl("quantize", _autograd, "Autograd")
torch.library.register_fake("hadagen::quantize", _quantize, lib=LIBRARY)  # for a tensor without memory too
_QUANTIZE: Any = torch.ops.hadagen.quantize.default
