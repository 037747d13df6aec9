"""torchao: linear layers whose inputs are rotated and quantized by hadagen, and torchao's tensors of hadagen's codes.

    from torchao.quantization import quantize_
    from hadagen.integrations.torchao import RotatedWeightConfig

    quantize_(model, RotatedWeightConfig("mxfp4", rotation=32))

Raises ImportError if torchao is not installed, or has changed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hadagen.errors import TensorError, UsageError, choice, shown
from hadagen.integrations.host import TORCHAO as HOST
from hadagen.integrations.host import Changed
from hadagen.models.layers import capability, int8_product, multiplies
from hadagen.runtime.checks import QUANTIZED, check_dtype, plain
from hadagen.runtime.quantize import rotate_quantize
from hadagen.runtime.quantized import Quantized
from hadagen.runtime.rotation import Rotation

_MX = "torchao.prototype.mx_formats"
try:
    _Config = HOST.get("torchao.core.config:AOBaseConfig")
    _MODULES = HOST.get("torchao.core.config:ALLOWED_AO_MODULES")
    _CLASSES = HOST.get("torchao.prototype.safetensors.safetensors_utils:ALLOWED_CLASSES")
    _NAMES = HOST.get("torchao.prototype.safetensors.safetensors_utils:ALLOWED_TENSORS_SUBCLASSES")
    _Tensor = HOST.get("torchao.utils:TorchAOBaseTensor")
    _register = HOST.get("torchao.quantization.transform_module:register_quantize_module_handler")
    _Int8 = HOST.get("torchao.quantization:Int8Tensor")
    _Float8 = HOST.get("torchao.quantization:Float8Tensor")
    _MMConfig = HOST.get("torchao.float8.inference:Float8MMConfig")
    _MXTensor = HOST.get(f"{_MX}.mx_tensor:MXTensor")
    _NVFP4 = HOST.get(f"{_MX}.nvfp4_tensor:NVFP4Tensor")
    _NVFP4Kwargs = HOST.get(f"{_MX}.nvfp4_tensor:QuantizeTensorToNVFP4Kwargs")
    _Preference = HOST.get("torchao.quantization.quantize_.common:KernelPreference")
except Changed as changed:
    raise ImportError(
        f"hadagen.integrations.torchao does not fit this torchao: {changed}; install torchao {HOST.tested}"
    ) from None

# The arguments of rotate_quantize for each format of weights and activations.
_FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"to": "int8-row"},
    "fp8": {"to": "fp8-row"},
    "mxfp8": {"to": "mxfp8", "rule": "rceil", "layout": "swizzled"},
    "mxfp4": {"to": "mxfp4", "rule": "rceil", "layout": "swizzled"},
    "nvfp4": {"to": "nvfp4", "layout": "swizzled"},
}
_NVFP4_RANGE = 448 * 6  # the largest scale times the largest code


# ---- tensors ---------------------------------------------------------------------------------------------------------
def to_torchao(q: Quantized, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The tensor of torchao with the codes and scales of q, which are not copied.

    q: a result of `rotate_quantize`, in the format int8-row (`Int8Tensor`), fp8-row, fp8-group or fp8-tensor
        (`Float8Tensor`), mxfp8 or mxfp4 (`MXTensor`), or nvfp4 (`NVFP4Tensor`). The layout is row-major, or for the
        last three swizzled, with two dimensions.
    dtype: the type that the tensor says it has, and to which it dequantizes.

    Raises TypeError if q is no Quantized, and `UsageError` for another format or layout.
    """
    if not isinstance(q, Quantized):
        raise TypeError(f"q is a {type(q).__name__}; pass what rotate_quantize returned")
    check_dtype(dtype)
    name, layout = q.format.name, q.format.layout.value
    swizzled = layout == "swizzled"
    blocks = name in ("mxfp8", "mxfp4", "nvfp4")
    if name not in ("int8-row", "fp8-row", "fp8-group", "fp8-tensor") and not blocks:
        raise UsageError(f"torchao has no tensor for {name}; use int8-row, fp8-row, mxfp8, mxfp4 or nvfp4")
    if q.format.rule in ("qutlass", "transformer_engine"):  # whose values are not code · scale
        raise UsageError(f"torchao has no tensor for the rule {q.format.rule} of {name}; use another rule")
    if layout != "row-major" and not (swizzled and blocks and q.codes.dim() == 2):
        raise UsageError(
            f"torchao has no tensor for {layout} scales of {name} with {q.codes.dim()} dimensions; use row-major"
        )
    scale = q.scales
    if swizzled:  # torchao has 32 rows of scales for the 128 rows of a tile
        # A graph may leave the number of rows open.
        tiles: Any = torch.sym_max(1, (q.codes.shape[0] + 127) // 128)  # type: ignore[no-untyped-call]
        scale = scale.view(32 * tiles, -1)
    if blocks:
        per_tensor = None if q.tensor_scale is None else q.tensor_scale.reshape(())
        return _of_blocks(name, q.codes, scale, dtype, per_tensor, swizzled)
    *leading, columns = q.codes.shape
    block = [1] * len(leading) + [q.format.group if name == "fp8-group" else columns]
    if name == "fp8-tensor":
        block = list(q.codes.shape)
    scale = scale.reshape([size // part if part else 1 for size, part in zip(q.codes.shape, block, strict=True)])
    return _of_rows(q.codes, scale, dtype, block)


def _of_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: list[int]) -> torch.Tensor:
    """An `Int8Tensor` or `Float8Tensor` with a scale for each block."""
    if codes.dtype == torch.int8:
        return _Int8(codes, scale, block, dtype)  # type: ignore[no-any-return]
    return _Float8(codes, scale, block, _MMConfig(use_fast_accum=True), dtype=dtype)  # type: ignore[no-any-return]


def _of_blocks(
    kind: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    per_tensor: torch.Tensor | None,
    swizzled: bool = True,
) -> torch.Tensor:
    """An `MXTensor` or `NVFP4Tensor`."""
    if kind == "nvfp4":
        options = {"is_swizzled_scales": swizzled, "act_quant_kwargs": _NVFP4Kwargs(is_swizzled_scales=True)}
        return _NVFP4(codes, scale, 16, dtype, per_tensor, **options)  # type: ignore[no-any-return]
    element = torch.float8_e4m3fn if kind == "mxfp8" else torch.float4_e2m1fn_x2
    prefers = _Preference.AUTO if _multiplies_blocks(codes.device) else _Preference.EMULATED
    scale = scale.view(torch.float8_e8m0fnu)
    return _MXTensor(codes, scale, element, 32, dtype, prefers, None, swizzled)  # type: ignore[no-any-return]


class RotatedWeight(_Tensor):  # type: ignore[misc, valid-type]
    """The rotated, quantized weight [out, in] of a linear layer. Its product rotates and quantizes the activations.

    qdata, scale, per_tensor_scale: as in torchao's tensor of the kind. kind: the format, as in `RotatedWeightConfig`.
    block: the size of the blocks that are rotated. dtype: of the weight.
    """

    tensor_data_names: ClassVar[list[str]] = ["qdata", "scale"]
    tensor_attribute_names: ClassVar[list[str]] = ["kind", "block", "dtype"]
    optional_tensor_data_names: ClassVar[list[str]] = ["per_tensor_scale"]

    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        kind: str,
        block: int,
        dtype: torch.dtype,
        per_tensor_scale: torch.Tensor | None = None,
    ) -> RotatedWeight:
        shape = qdata.shape[0], qdata.shape[1] * (2 if qdata.dtype == torch.uint8 else 1)
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device)
        made.qdata, made.scale, made.per_tensor_scale = qdata, scale, per_tensor_scale
        made.kind, made.block = kind, block
        return made  # type: ignore[no-any-return]

    def rotated(self) -> torch.Tensor:
        """The rotated weight, as torchao's tensor."""
        if self.kind in ("int8", "fp8"):
            return _of_rows(self.qdata, self.scale, self.dtype, [1, self.shape[-1]])
        return _of_blocks(self.kind, self.qdata, self.scale, self.dtype, self.per_tensor_scale)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight that codes and scales stand for, rotated back."""
        rotation = _rotation(self.shape[-1], self.block)
        rotated: Any = self.rotated()
        values = rotated.dequantize(torch.float32)
        values = values if rotation is None else rotation.inverse(values)
        return values.to(self.dtype if output_dtype is None else output_dtype)

    def __repr__(self) -> str:
        return f"RotatedWeight({list(self.shape)}, {self.kind}, blocks of {self.block}, {self.dtype}, {self.device})"

    def _quantization_type(self) -> str:
        return f"{self.kind}, blocks of {self.block} are rotated"


@RotatedWeight.implements_torch_function(torch.nn.functional.linear)  # type: ignore[untyped-decorator]
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.Tensor:
    if args[0].requires_grad and torch.is_grad_enabled():
        raise TensorError("the input of a RotatedWeight requires a gradient, which codes lack; use torch.no_grad()")
    return _linear(*args, **(kwargs or {}))  # type: ignore[no-any-return]


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def _linear(input: torch.Tensor, weight: RotatedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """input · weightᵀ + bias, in the type of the input. Raises `TensorError` for rows of another length than n."""
    n = weight.shape[-1]
    if not input.dim() or input.shape[-1] != n:
        raise TensorError(f"the input has the shape {tuple(input.shape)}, but the weight multiplies rows of {n}")
    rows = input.reshape(-1, n)
    q = _quantize(rows, weight.kind, _rotation(n, weight.block))
    # Scales of rows give bfloat16 alone on a GPU.
    dtype = torch.bfloat16 if weight.kind == "fp8" and rows.is_cuda else input.dtype
    y = _product(to_torchao(q, dtype), weight.rotated()).to(input.dtype)
    y = y.view(*input.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _product(x: Any, weight: Any) -> torch.Tensor:
    """x · weightᵀ of two tensors of torchao with the same kind of codes."""
    is_int8 = isinstance(x, _Int8)  # whose own product takes no codes for x
    if is_int8 and multiplies(x.qdata, weight.qdata, capability(x.device)):
        return int8_product(x.qdata, x.scale, weight.qdata, weight.scale)
    if is_int8 or (isinstance(x, _NVFP4) and not _multiplies_blocks(x.device)):
        x, weight = (each.dequantize(torch.float32) for each in (x, weight))
    return torch.nn.functional.linear(x, weight)


def _quantize(rows: torch.Tensor, kind: str, rotation: Rotation | None) -> Quantized:
    """Rotated rows [rows, n] in the format of a kind."""
    options = _FORMATS[kind]
    if kind == "nvfp4":
        largest = rotate_quantize(rows, rotation, to="largest").scales
        options = {**options, "tensor_scale": torch.nn.functional.pad(largest, (0, 1)).amax() / _NVFP4_RANGE}
    return rotate_quantize(rows, rotation, **options)


@functools.cache  # an operand of kernels is held once for each size
def _rotation(n: int, block: int) -> Rotation | None:
    return None if block == 1 else Rotation(n, block=block)


def _multiplies_blocks(device: torch.device) -> bool:
    """Whether a GPU multiplies MX and NVFP4 codes."""
    return capability(device) >= 100  # type: ignore[no-any-return]


# ---- the configuration -----------------------------------------------------------------------------------------------
@dataclass
class RotatedWeightConfig(_Config):  # type: ignore[misc, valid-type]
    """A configuration of `torchao.quantization.quantize_`: rotated, quantized weights and activations.

    kind: the format of both: "int8" and "fp8" have a scale for each row, "mxfp8" and "mxfp4" for 32 elements, "nvfp4"
        for 16, and one for each tensor.
    rotation: "rows" rotates whole rows of activations, an integer blocks of so many elements, and None nothing. Rows
        and blocks have a size n of `hadagen.Rotation(n)`.

    Weights become a `RotatedWeight`, into which the inverse of the rotation is folded. Activations are rotated and
    quantized at run time by one kernel, nvfp4 by two.

    Raises `UsageError` for other values.
    """

    kind: str = "fp8"
    rotation: str | int | None = "rows"

    def __post_init__(self) -> None:
        if self.kind not in _FORMATS:
            raise UsageError(f"kind = {shown(self.kind)} is not known; {choice(self.kind, _FORMATS)}")
        is_block = isinstance(self.rotation, int) and not isinstance(self.rotation, bool) and self.rotation > 0
        if self.rotation not in ("rows", None) and not is_block:
            raise UsageError(f"rotation = {shown(self.rotation)} is not known; pass rows, the size of blocks, or None")


@_register(RotatedWeightConfig)  # type: ignore[untyped-decorator]
def _rotate_linear(module: torch.nn.Linear, config: RotatedWeightConfig) -> torch.nn.Linear:
    """Replace the weight of a layer by a `RotatedWeight`."""
    weight = module.weight.detach()
    if isinstance(weight, _Tensor) or weight.dtype not in QUANTIZED:
        raise UsageError(f"a weight is a {type(weight).__name__} of {plain(weight.dtype)}; quantize the original model")
    n = weight.shape[-1]
    block = n if config.rotation == "rows" else config.rotation or 1
    assert isinstance(block, int)
    made: Any = to_torchao(_quantize(weight, config.kind, _rotation(n, block)), weight.dtype)
    per_tensor = getattr(made, "per_tensor_scale", None)
    rotated = RotatedWeight(made.qdata, made.scale, config.kind, block, weight.dtype, per_tensor)
    module.weight = torch.nn.Parameter(rotated, requires_grad=False)
    return module


# Where torchao finds the classes of what was stored: of configurations as JSON, and of tensors in safetensors.
_MODULES.add(__name__)
_CLASSES["RotatedWeight"] = RotatedWeight
if "RotatedWeight" not in _NAMES:  # as after a reload
    _NAMES.append("RotatedWeight")
torch.serialization.add_safe_globals([RotatedWeight])
