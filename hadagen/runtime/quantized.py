"""`Quantized`: codes and scales with their format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from hadagen.errors import TensorError, UsageError, shown
from hadagen.problem.formats import ROW, TENSOR, Element, Format, Layout
from hadagen.runtime.call.sharded import Shards, is_sharded, joined, local_of
from hadagen.runtime.checks import (
    check_alike,
    check_dtype,
    check_is_flag,
    check_is_tensor,
    check_same_device,
    is_functional,
    kind_of,
    plain,
)
from hadagen.truth import quantizer


class Quantized:
    """The result of `rotate_quantize`. `codes, scales = q` gives its two tensors.

    codes: the codes, in x's shape. 4-bit codes are uint8 of half as many columns, with the even column in the low
        nibble. The format "largest" has no codes: [..., 0].
    scales: one scale for each group, in the layout of the format. Scales of rows are [...], for int8-row [..., 1]. For
        fp8-tensor and fp8-head, scales are the tensor_scale of the call. Row-major scales, and their codes, are dense,
        and their leading dimensions lie in memory in the same order as the dimensions of x, as with `torch.empty_like`.
        In the other layouts, and for fp8-head, codes are contiguous.
    format: the format of both.
    tensor_scale: for nvfp4 the tensor_scale of the call, float32 with one element; else None.

    E8M0 scales and 4-bit codes are uint8. `as_torch_types` returns views as `torch.float8_e8m0fnu` and
    `torch.float4_e2m1fn_x2`, which are accepted wherever uint8 is.

    A `Quantized` is a node of PyTorch's pytrees, so torch.export, torch.vmap and others take it. Once hadagen is
    imported, `torch.load` with weights_only=True reads a stored `Quantized`. Gradients are not stored.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: Format
    tensor_scale: torch.Tensor | None

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, format: Format, tensor_scale: torch.Tensor | None = None
    ) -> None:
        self.codes, self.scales, self.format, self.tensor_scale = codes, scales, format, tensor_scale
        self._exact: torch.Tensor | None = None  # the rotated values, float32, if dequantize has their gradient

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The rotated values that codes and scales stand for, of x's shape. They are not rotated back.

        dtype: float16, bfloat16, float32 or float64. A value beyond the largest number of dtype becomes this number, if
            its scale is finite.

        After a call with gradient=True, the result has the gradient of the rotated values, as if codes were not
        rounded, and 0 where a value is beyond the largest code.

        Raises `UsageError` for another dtype, and for a format without codes; TypeError and `TensorError` for codes,
        scales or a tensor_scale that the format does not have.
        """
        check_dtype(dtype)
        if is_sharded(self.codes):
            parts = Quantized(local_of(self.codes), local_of(self.scales), self.format, local_of(self.tensor_scale))
            parts._exact = local_of(self._exact)
            return joined(Shards(self.codes, parts.codes), parts.dequantize(dtype))
        self._check()
        form = self.format
        codes = quantizer.as_bytes(self.codes)
        # Floats are reshaped and not FP8, which ONNX Runtime cannot reshape.
        rows = _in_rows(codes.float() if form.element.bits == 8 else codes)
        scales = self.scales
        if form.by_head:  # one for each row
            scales = scales[(...,) + (None,) * (codes.dim() - 1 - scales.dim())].expand(codes.shape[:-1])
        values = quantizer.dequantize(rows, scales, form, self.tensor_scale, dtype)
        shape = *codes.shape[:-1], values.shape[-1]
        if self._exact is None:
            return values.view(shape).to(dtype)
        exact = self._exact.reshape(values.shape)
        clipped = quantizer.is_clipped(exact.detach(), _in_rows(codes), scales, form, self.tensor_scale)
        nothing = (exact - exact.detach()).nan_to_num(0.0)  # but for its gradient
        return torch.where(clipped, values, values + nothing).view(shape).to(dtype)

    def to(
        self, device: torch.device | str | int | torch.Tensor, *, non_blocking: bool = False, copy: bool = False
    ) -> Quantized:
        """Move codes and scales to a device, or to the device of a tensor. Returns itself if copy is False and all are
        there.

        Raises `UsageError` for anything but a device or a tensor, such as a dtype: codes are never converted.
        """
        check_is_flag(non_blocking, "non_blocking")
        check_is_flag(copy, "copy")
        if isinstance(device, torch.dtype):
            raise UsageError(f"codes are never converted, to {device} neither; pass a device, or call dequantize")
        try:
            place = device.device if isinstance(device, torch.Tensor) else torch.device(device)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            raise UsageError(f"device {shown(device)} is no device; pass one such as cpu or cuda:0") from None

        for name, part in self._check_kinds():
            if part.is_meta and place.type != "meta":
                raise TensorError(f"{name} has no values to move to {place}; load or compute them first")
        leaves, context = _flatten(self)
        found = [each.to(place, non_blocking=bool(non_blocking), copy=bool(copy)) for each in leaves]
        if all(new is old for new, old in zip(found, leaves, strict=True)):
            return self
        made = _unflatten(found, context)
        if self.format.layout.in_columns and made.scales is not self.scales:
            made.scales = quantizer.laid_out(made.scales, Layout.COLUMN_MAJOR)  # with what fills up its columns
        return made

    def as_torch_types(self) -> Quantized:
        """Return views of PyTorch's own types: `torch.float8_e8m0fnu` for E8M0 scales, and `torch.float4_e2m1fn_x2` for
        FP4 codes. Other codes and scales keep their types: PyTorch has no type for INT4.

        Raises `UsageError` if this version of PyTorch lacks the type.
        """
        self._check_parts()
        made = _unflatten(*_flatten(self))
        of_code, of_scale = self.format.kinds
        made.codes, made.scales = _as_native(self.codes, of_code), _as_native(self.scales, of_scale)
        return made

    # ---- as a pair ---------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over codes and scales."""
        return iter((self.codes, self.scales))

    def __len__(self) -> int:
        """2, as of a pair."""
        return 2

    def __getitem__(self, index: Any) -> Any:
        """The codes for 0, the scales for 1."""
        return (self.codes, self.scales)[index]

    def __repr__(self) -> str:
        form = self.format.text if isinstance(self.format, Format) else shown(self.format)
        parts = {"codes": self.codes, "scales": self.scales, "tensor_scale": self.tensor_scale}
        said = [f"{name}={_said(part)}" for name, part in parts.items() if part is not None]
        return ", ".join([f"Quantized({form}", *said, *([] if self._exact is None else ["gradient=True"])]) + ")"

    def __reduce__(self) -> Any:
        for name, part in self._check_kinds():
            if isinstance(part, FakeTensor) or is_functional(part):
                raise TensorError(f"{name} stands for a tensor in a trace and has no values; store it after the trace")
        # Types of one byte as uint8, because pickle alone cannot read float8 back.
        stored = [each.view(torch.uint8) if each.dtype.itemsize == 1 else each for each in self]
        types = self.codes.dtype, self.scales.dtype
        return _restored, (*stored, types, _described(self.format), self.tensor_scale)

    # ---- checks ------------------------------------------------------------------------------------------------------
    def _check_kinds(self) -> list[tuple[str, torch.Tensor]]:
        """The parts, with their names. Raises TypeError and `TensorError` unless they are dense tensors of a format."""
        _check_format(self.format)
        parts: list[tuple[str, Any]] = [("codes", self.codes), ("scales", self.scales)]
        parts += [] if self.tensor_scale is None else [("tensor_scale", self.tensor_scale)]
        for name, part in parts:
            check_is_tensor(part, name)
            if part.is_nested or part.layout is not torch.strided or part.is_quantized:
                raise TensorError(f"{name} is {kind_of(part)}; {self.format.name} has dense tensors of plain types")
        return parts

    def _check_parts(self) -> None:
        """Raises TypeError, `UsageError` and `TensorError` for types and devices that the format does not have."""
        _check_format(self.format)
        form = self.format
        of_code, of_scale = form.kinds
        _check_part(self.codes, "codes", form, quantizer.KINDS[of_code], self.codes)
        _check_part(self.scales, "scales", form, quantizer.KINDS[of_scale], self.codes)
        if form.needs_scale and form.group != TENSOR:
            _check_part(self.tensor_scale, "tensor_scale", form, (torch.float32,), self.codes)
        elif self.tensor_scale is not None:
            raise UsageError(f"{form.name} has no tensor_scale; leave it out")

    def _check(self) -> None:
        """Raises TypeError, `UsageError` and `TensorError` for tensors that the format does not have. Reads no
        memory."""
        self._check_parts()
        form = self.format
        if form.element is Element.NONE:
            raise UsageError(f"{form.name} has no codes to dequantize; use its scales")
        if torch.compiler.is_compiling():
            return  # where sizes may be unknown
        if not self.codes.dim():
            raise TensorError("codes have no dimension; pass codes of the shape [..., m]")
        *leading, last = self.codes.shape
        rows, groups = prod(leading), form.scales_in_row(last * 8 // form.element.bits)
        if form.by_head:
            shape, fits = "those of leading dimensions of codes", (*leading,)[: self.scales.dim()] == self.scales.shape
        elif form.group == TENSOR:
            shape, fits = "one element", self.scales.numel() == 1
        else:
            shapes = [quantizer.shape_of_scales(leading, groups, form.layout)]
            if form.layout is Layout.ROW_MAJOR:
                shapes += [(rows, groups), *([(*leading,), (rows,)] if form.group == ROW else [])]
            shape, fits = f"{shapes[0]}", tuple(self.scales.shape) in shapes
        if not fits:
            raise TensorError(
                f"scales have the shape {tuple(self.scales.shape)}; {form.name} in the layout {form.layout.value} "
                f"needs {shape} for codes of the shape {tuple(self.codes.shape)}"
            )
        if form.needs_scale and form.group != TENSOR and self.tensor_scale.numel() != 1:  # type: ignore[union-attr]
            raise TensorError(
                f"tensor_scale has {self.tensor_scale.numel()} elements; {form.name} has one"  # type: ignore[union-attr]
            )


def _in_rows(codes: torch.Tensor) -> torch.Tensor:
    return codes.flatten(0, -2) if codes.dim() > 1 else codes[None]


def _check_format(form: Any) -> None:
    if not isinstance(form, Format):
        raise TypeError(f"format is a {type(form).__name__}; pass that of a Quantized that rotate_quantize returned")


def _check_part(part: Any, name: str, form: Format, types: tuple[torch.dtype, ...], codes: torch.Tensor) -> None:
    check_is_tensor(part, name)
    if part.is_nested or part.layout is not torch.strided or part.dtype not in types:
        wanted = " or ".join(map(plain, dict.fromkeys(types)))
        raise TensorError(f"{name} is {kind_of(part)}; {form.name} has strided {wanted}")
    check_alike(codes, part, name)
    check_same_device(name, part.device, "codes", codes.device, "move them with .to")


def _as_native(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if kind not in quantizer.NATIVE:
        return tensor
    name, version = quantizer.NATIVE[kind]
    if not hasattr(torch, name):
        raise UsageError(f"PyTorch {torch.__version__} has no torch.{name}; use {version} or newer, or uint8 as it is")
    return tensor.view(getattr(torch, name))


def _said(part: Any) -> str:
    if not isinstance(part, torch.Tensor) or is_lazy(part):
        return type(part).__name__
    shape = "?" if part.is_nested else ", ".join(map(str, part.shape))
    return f"{plain(part.dtype)}[{shape}] on {part.device}"


# ---- as plain values, for pytrees and for storing --------------------------------------------------------------------
Described = tuple[str, int, str, str, bool]


def _described(form: Format) -> Described:
    return form.name, form.group, form.rule, form.layout.value, form.rounded


def _format_of(described: Any) -> Format:
    name, group, rule, layout, rounded = described
    form = Format.choose(name, group, rule, layout)
    return replace(form, rounded=True) if rounded else form


def _restored(
    codes: torch.Tensor,
    scales: torch.Tensor,
    types: tuple[torch.dtype, torch.dtype],
    described: Described,
    tensor_scale: torch.Tensor | None,
) -> Quantized:
    return Quantized(codes.view(types[0]), scales.view(types[1]), _format_of(described), tensor_scale)


_OPTIONAL = ("tensor_scale", "_exact")


def _flatten(quantized: Quantized) -> tuple[list[Any], tuple[Any, ...]]:
    """The tensors that are there, and all else in plain values."""
    present = [getattr(quantized, name) is not None for name in _OPTIONAL]
    leaves = [getattr(quantized, name) for name, has in zip(_OPTIONAL, present, strict=True) if has]
    return [quantized.codes, quantized.scales, *leaves], (*_described(quantized.format), *present)


def _unflatten(leaves: Any, context: Any) -> Quantized:
    codes, scales, *others = leaves
    *described, has_scale, has_exact = context
    made = Quantized(codes, scales, _format_of(described), others[0] if has_scale else None)
    if has_exact:
        made._exact = others[-1]
    return made


def _flatten_with_keys(quantized: Quantized) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    leaves, context = _flatten(quantized)
    names = ["codes", "scales", *(name for name, has in zip(_OPTIONAL, context[-2:], strict=True) if has)]
    return [(_pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], context


_pytree.register_pytree_node(
    Quantized,
    _flatten,
    _unflatten,
    serialized_type_name="hadagen.Quantized",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([_restored])
