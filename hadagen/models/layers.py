"""Linear layers with codes of 8 or 4 bits, whose inputs are rotated and quantized in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from hadagen.errors import UsageError
from hadagen.models import int4
from hadagen.models.products.eligible import can_multiply
from hadagen.models.products.operator import multiply_codes
from hadagen.models.scheme import GROUPS, WEIGHTS, Scheme
from hadagen.problem.prologues import Prologue
from hadagen.runtime.checks import plain
from hadagen.runtime.quantize import rotate_quantize
from hadagen.runtime.quantized import Quantized
from hadagen.runtime.rotation import Rotation


class OfWeight(NamedTuple):
    """A weight [out, in]: its codes, or with two to a byte [out, in/2]; its scales; and its factors, if it has any."""

    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor | None


TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, **dict.fromkeys(GROUPS, torch.uint8)}
LOAD_AGAIN = "load a folder by from_pretrained, or the state dict of a model that was quantized in the same way"
OF_WEIGHT = ("weight", "weight_scale", "weight_factor")  # the tensors of `codes_of`
HELD = (*OF_WEIGHT, "input_scale")  # parameters of layers with codes, which keep their types


# Format of weights → the exponent of the largest power of two by which rows are multiplied before they are quantized,
# and scales divided afterwards. By a larger one, the least scale of the format would be no normal float32.
_POWERS = {"int8-row": 26, "fp8-row": 108}


def quantized_weight(weight: torch.Tensor, to: str, rotation: Rotation | None = None) -> Quantized:
    """A weight [out, in], rotated, in "int8-row" or "fp8-row", whose least scales are those of activations. Tiny rows
    keep their relative accuracy, because each row is multiplied by a power of two, which changes no bit of codes."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.bfloat16))  # float16 has no such powers
    amax = wide.abs().amax(-1).float() if wide.numel() else wide.new_zeros(len(wide), dtype=torch.float32)
    above = 127 - (amax.view(torch.int32) >> 23)  # to the magnitudes from 1 to 2
    power = torch.where(amax > 0, above.clamp(0, _POWERS[to]), 0)
    made = rotate_quantize(wide * _power(power).to(wide.dtype)[:, None], rotation, to=to)
    made.scales = made.scales * _power(-power).view(made.scales.shape)
    return made


def _power(exponents: torch.Tensor) -> torch.Tensor:
    return ((exponents + 127) << 23).view(torch.float32)


def shapes_of(name: str, out: int, n: int, weights: str) -> dict[str, list[int]]:
    """The shapes of the codes, scales and factors of a weight [out, n] of a layer, by the names of its parameters.

    Codes have a last dimension of 1, so that no program takes them for the weight of a linear layer. Only weights of 4
    bits with groups have factors. Raises what `int4.group_of` does.
    """
    if weights not in GROUPS:
        return {"weight": [out, n, 1], "weight_scale": [out, 1]}
    group = int4.group_of(name, n, weights)
    factors = {"weight_factor": [out, n // group]} if group else {}
    return {"weight": [out, n // 2, 1], "weight_scale": [out, 1], **factors}


def codes_of(name: str, weight: torch.Tensor, weights: str) -> dict[str, torch.Tensor]:
    """Codes of the weight [out, in] of a layer, and their scales and factors, in the shapes of `shapes_of`."""
    if weights in GROUPS:
        parts = int4.rounded(weight, int4.group_of(name, weight.shape[1], weights))
        codes, *others = (each for each in parts if each is not None)
    else:
        made = quantized_weight(weight, WEIGHTS[weights])
        codes, others = made.codes, [made.scales.reshape(-1, 1)]
    return dict(zip(OF_WEIGHT, (codes[..., None], *others), strict=False))


def values_of(
    weight: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The values [out, in] that codes stand for, in a dtype. Codes of 4 bits are packed, with factors, as in `int4`."""
    if weight.dtype == torch.uint8:
        return int4.values(weight, scales, factors, dtype)
    return (weight.float() * scales).to(dtype)


def codes_of_input(
    x: torch.Tensor, rotation: Rotation | None, to: str, before: Prologue | None, scale: torch.Tensor | None
) -> Quantized:
    """The input of a layer in codes. What a prologue returns may be rounded to the type of x, as models round it."""
    numerics = "fast" if before else "accurate"
    return rotate_quantize(x, rotation, to=to, before=before, tensor_scale=scale, numerics=numerics)


def type_of(part: str, weights: str) -> torch.dtype:
    """The type of a parameter of `shapes_of`."""
    return {"weight": TYPES[weights], "weight_scale": torch.float32, "weight_factor": torch.uint8}[part]


def product_of(
    x: torch.Tensor | Quantized, weight: OfWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x · weightᵀ + bias, [..., out] of a dtype, for rows [..., n] as values or in codes with a scale for each row, or
    one for all. What no provider of products takes is dequantized."""
    codes, scales = (x.codes, x.scales.reshape(-1, 1)) if isinstance(x, Quantized) else (x, None)
    has_gradient = codes.requires_grad and torch.is_grad_enabled()  # which products of codes have not
    if can_multiply(codes, weight.codes) and not has_gradient:
        y = multiply_codes(codes.reshape(-1, codes.shape[-1]), scales, *weight, bias, dtype)
        return y.view(*codes.shape[:-1], weight.codes.shape[0])
    if not isinstance(x, Quantized):
        return linear(x, values_of(*weight, x.dtype), bias)
    wide = torch.float32 if codes.device.type == "cpu" else dtype  # CPUs multiply 16-bit types slowly
    y = linear(x.dequantize(wide), values_of(*weight, wide)).to(dtype)
    return y if bias is None else y + bias.to(dtype)


class QuantizedLinear(torch.nn.Module):
    """y = x · weightᵀ + bias, with codes in place of the weight, and of x if the scheme quantizes activations.

    name: of the layer in its model, by which the scheme says whether its input is rotated. bias: whether there is one.
    dtype: of the bias.

    Parameters: weight, int8 or float8_e4m3fn [out, in, 1], so that no program takes the codes for the weight of a
    linear layer, or codes of 4 bits as `hadagen.models.int4` packs them, uint8 [out, in/2, 1]; weight_scale, float32
    [out, 1]; weight_factor, uint8 [out, groups], if rows of codes of 4 bits have groups; bias [out]; and input_scale,
    float32 [], if the scheme has one scale for all activations of a layer. Codes, scales and factors keep their types
    in `.half()` and the like.

    forward takes x [..., in] of type float16, bfloat16 or float32, without a gradient, and returns [..., out] of the
    same type. With `before`, a prologue such as SiluMul(), x is [..., 2·in].
    """

    weight: torch.nn.Parameter
    weight_scale: torch.nn.Parameter
    weight_factor: torch.nn.Parameter | None

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.activations = scheme.activations
        self.before: Prologue | None = None
        online = scheme.online_of(name)
        if online and online.n != in_features:
            raise UsageError(
                f"{name} has {in_features} inputs, but the quantization_config rotates {online.n}; quantize it again"
            )
        self.rotation = online.rotation() if online else None
        self.weight_factor = None
        for part, shape in shapes_of(name, out_features, in_features, scheme.weights).items():
            setattr(self, part, frozen(torch.empty(shape, device=device, dtype=type_of(part, scheme.weights))))
        self.bias = frozen(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        per_tensor = scheme.activations == "fp8-tensor"
        self.input_scale = frozen(torch.ones((), device=device, dtype=torch.float32)) if per_tensor else None

    @classmethod
    def of(cls, name: str, scheme: Scheme, weight: torch.Tensor, bias: torch.Tensor | None = None) -> QuantizedLinear:
        """The layer of a weight [out, in], into which the inverse of the rotation is folded already."""
        made = cls(name, scheme, weight.shape[1], weight.shape[0], device="meta")
        for part, tensor in codes_of(name, weight, scheme.weights).items():
            setattr(made, part, frozen(tensor))
        made.bias = None if bias is None else frozen(bias)
        if made.input_scale is not None:
            made.input_scale = frozen(torch.ones((), device=weight.device))
        return made

    @property
    def codes(self) -> torch.Tensor:
        """The codes of the weight, [out, in], or with two to a byte [out, in/2]."""
        return self.weight.view(self.out_features, self.in_features // (2 if self.weight.dtype == torch.uint8 else 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activations is None:
            turned = x if self.rotation is None else self.rotation(x)
            return product_of(turned, self.of_weight(), self.bias, x.dtype)
        return self.of_rows(x)

    def of_rows(self, x: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """The outputs of some rows of the weight, for a layer that quantizes its input."""
        assert self.activations is not None
        q = codes_of_input(x, self.rotation, self.activations, self.before, self.input_scale)
        bias = None if self.bias is None else self.bias[rows]
        return product_of(q, self.of_weight(rows), bias, x.dtype)

    def of_weight(self, rows: slice = slice(None)) -> OfWeight:
        """Some rows of the weight."""
        factors = None if self.weight_factor is None else self.weight_factor[rows]
        return OfWeight(self.codes[rows], self.weight_scale[rows], factors)

    def is_like(self, other: QuantizedLinear, *, with_scales: bool = True) -> bool:
        """Whether another layer makes the same codes of an input, on the same device. with_scales: whether by the same
        scale, if it has one for all activations."""
        mine, theirs = (
            (each.in_features, each.activations, each.before, each.weight.device, each.weight.dtype, each.bias is None)
            for each in (self, other)
        )
        if mine != theirs or repr(self.rotation) != repr(other.rotation):
            return False
        scales = self.input_scale, other.input_scale
        return not with_scales or all(each is None for each in scales) or torch.equal(*scales)  # type: ignore[arg-type]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """Codes and scales are moved as bytes, so that no change of a type reaches them."""
        if self.bias is not None:
            self.bias = frozen(fn(self.bias.data))
        for name in HELD:
            held = getattr(self, name)
            if held is not None:
                dtype = held.dtype
                bits = torch.uint8 if dtype.itemsize == 1 else torch.int32
                setattr(self, name, frozen(fn(held.data.view(bits)).view(dtype)))
        if self.rotation is not None:
            self.rotation._apply(fn)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Raises `UsageError` for tensors that are no codes and scales of this layer, which PyTorch might cast."""
        given = {name: state_dict[f"{prefix}{name}"] for name in HELD if f"{prefix}{name}" in state_dict}
        for name, tensor in given.items():
            if getattr(self, name) is not None:
                check_is_alike(f"{prefix}{name}", tensor, getattr(self, name))
        check_values(prefix, given)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype}, activations={self.activations!r}"


def check_values(prefix: str, held: Mapping[str, torch.Tensor | None]) -> None:
    """Raise `UsageError` for codes and scales of a layer that `codes_of` never makes.

    prefix: of the names in messages. held: tensors, by names in `HELD`.
    """
    for name, tensor in held.items():
        if tensor is None or tensor.is_meta or not tensor.numel():
            continue
        if name == "weight":
            is_right = _are_codes(tensor)
            wrong = "NaN" if tensor.is_floating_point() else -128
        elif name == "weight_factor":
            least, most = tensor.aminmax()
            is_right, wrong = int(least) >= 1 and int(most) <= int4.MOST_FACTOR, "a factor that is not from 1 to 16"
        else:
            least, most = tensor.aminmax()
            is_right, wrong = bool(least > 0) and bool(most < torch.inf), "a scale that is not positive and finite"
        if not is_right:
            raise UsageError(f"{prefix}{name} has {wrong}, which hadagen does not write; quantize the model again")


def _are_codes(tensor: torch.Tensor) -> bool:
    """Whether there is no NaN among FP8 codes, and no -128 among INT8 codes. Every byte is two codes of 4 bits."""
    if tensor.dtype == torch.uint8:
        return True
    if tensor.dtype == torch.int8:
        return int(tensor.min()) > -128
    return int((tensor.view(torch.uint8) & 0x7F).max()) < 0x7F


def check_is_alike(name: str, tensor: torch.Tensor, held: torch.Tensor) -> None:
    """Raise `UsageError` for a tensor that is not of the type and the shape of the layer's codes or scales."""
    if (tensor.dtype, tensor.shape) != (held.dtype, held.shape):
        raise UsageError(f"{name} is {_kind(tensor)}, but the layer has codes in {_kind(held)}; {LOAD_AGAIN}")


def _kind(tensor: torch.Tensor) -> str:
    return f"{plain(tensor.dtype)} {[*tensor.shape]}"


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    """A parameter that is not trained."""
    return torch.nn.Parameter(tensor, requires_grad=False)
