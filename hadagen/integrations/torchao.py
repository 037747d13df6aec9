"""torchao: linear layers whose inputs are rotated and quantized by hadagen, and torchao's tensors of hadagen's codes.

    from torchao.quantization import quantize_
    from hadagen.integrations.torchao import RotatedWeightConfig

    quantize_(model, RotatedWeightConfig("mxfp4", rotation=32))

Raises ImportError if torchao is not installed, or has changed.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing as _return_and_correct_aliasing

from hadagen.errors import TensorError, UsageError, choice, shown
from hadagen.integrations.host import TORCHAO as HOST
from hadagen.integrations.host import Changed
from hadagen.models import int4
from hadagen.models.layers import quantized_weight
from hadagen.models.products.eligible import can_multiply, capability
from hadagen.models.products.operator import multiply_codes
from hadagen.models.scheme import GROUPS
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
    **{each: {"to": "int8-row"} for each in GROUPS},  # of activations
    "mxfp8": {"to": "mxfp8", "rule": "rceil", "layout": "swizzled"},
    "mxfp4": {"to": "mxfp4", "rule": "rceil", "layout": "swizzled"},
    "nvfp4": {"to": "nvfp4", "layout": "swizzled"},
}
_NVFP4_RANGE = 448 * 6  # the largest scale times the largest code
# The columns of one scale, where scales are swizzled: in tiles of 128 rows and 4 scales.
_COLUMNS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
_ROWS = 128
_aten = torch.ops.aten
_tangents: Any = torch.autograd.forward_ad._set_fwd_grad_enabled
_aliased: Any = _return_and_correct_aliasing  # which has no types


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

    qdata, scale, per_tensor_scale: as in torchao's tensor of the kind. A part of swizzled scales is a view of whole
        tiles, [tiles, tiles, 32, 16]. Integers of 4 bits are packed in spans, as `hadagen.models.int4` says.
    kind: the format, as in `RotatedWeightConfig`. block: the size of the blocks that are rotated. dtype: of the weight.
    first: the row of the first tile that is the first row of the weight. is_transposed: whether it is [in, out].
    span: the elements of a span of codes of 4 bits, in the whole weight.

    Slices, `split` and `t` share the memory. Rows can be cut anywhere, columns between rotated blocks. The gradient of
    the input of a product is that of the dequantized weight; codes have none.
    """

    tensor_data_names: ClassVar[list[str]] = ["qdata", "scale"]
    tensor_attribute_names: ClassVar[list[str]] = ["kind", "block", "dtype"]
    optional_tensor_data_names: ClassVar[list[str]] = ["per_tensor_scale"]
    optional_tensor_attribute_names: ClassVar[list[str]] = ["first", "is_transposed", "span"]
    first, is_transposed, span = 0, False, 1  # where none was stored

    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        kind: str,
        block: int,
        dtype: torch.dtype,
        per_tensor_scale: torch.Tensor | None = None,
        first: int = 0,
        is_transposed: bool = False,
        span: int = 1,
    ) -> RotatedWeight:
        shape = qdata.shape[0], qdata.shape[1] * (2 if qdata.dtype == torch.uint8 else 1)
        shape = shape[::-1] if is_transposed else shape
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device)
        made.qdata, made.scale, made.per_tensor_scale = qdata, scale, per_tensor_scale
        made.kind, made.block, made.first, made.is_transposed, made.span = kind, block, first, is_transposed, span
        return made  # type: ignore[no-any-return]

    def rotated(self) -> torch.Tensor:
        """The rotated weight [out, in], as torchao's tensor."""
        codes = self.qdata.contiguous()
        if self.kind in _COLUMNS:
            return _of_blocks(self.kind, codes, self._own_scale(), self.dtype, self.per_tensor_scale)
        codes = int4.unpacked(codes, None, self.span) if self.kind in GROUPS else codes
        scale = self.scale.contiguous()
        return _of_rows(codes, scale, self.dtype, [1, codes.shape[1] // scale.shape[1]])

    def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight that codes and scales stand for, rotated back."""
        rotated: Any = self.rotated()
        values = rotated.dequantize(torch.float32)
        rotation = _rotation(values.shape[1], self.block)
        values = values if rotation is None else rotation.inverse(values)
        values = values.to(self.dtype if output_dtype is None else output_dtype)
        return values.t() if self.is_transposed else values

    def __repr__(self) -> str:
        return f"RotatedWeight({list(self.shape)}, {self.kind}, blocks of {self.block}, {self.dtype}, {self.device})"

    def _quantization_type(self) -> str:
        return f"{self.kind}, blocks of {self.block} are rotated"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in cls._ATEN_OP_TABLE[cls]:
            raise TensorError(f"a RotatedWeight has no {func}; pass what its dequantize() returns")
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _with(self, **changes: Any) -> RotatedWeight:
        names, values = self.__tensor_flatten__()
        return RotatedWeight(**{name: getattr(self, name) for name in names} | values | changes)

    # ---- parts ---------------------------------------------------------------------------------------------------
    def _cut(self, of_columns: bool, begin: int, end: int) -> RotatedWeight:
        """These rows or columns, which share the memory."""
        rows, columns = self.qdata.shape[0], self.shape[0 if self.is_transposed else 1]
        if (begin, end) == (0, columns if of_columns else rows):
            return self._with()
        tiled, scale, first = self.kind in _COLUMNS, self.scale, 0
        if not of_columns:
            codes = self.qdata[begin:end]
            if tiled:
                start, first = divmod(self.first + begin, _ROWS)
                scale = self._tiles()[start : start + max(1, -(-(first + end - begin) // _ROWS))]
            else:
                scale = scale[begin:end]
        else:
            packed = columns // self.qdata.shape[1]
            tile = 4 * _COLUMNS[self.kind] if tiled else self.span
            unit = math.lcm(self.block, tile)
            if begin % unit or (end % unit and end != columns) or begin >= end:
                raise TensorError(
                    f"the columns {begin} to {end} of {columns} have no codes and scales of their own in {self!r}; cut "
                    f"it at multiples of {unit}"
                )
            codes, first = self.qdata[:, begin // packed : end // packed], self.first
            if self.kind == "int4":
                scale = scale[:, begin // tile : end // tile]
            elif tiled:
                scale = self._tiles()[:, begin // tile : -(-end // tile)]
        return self._with(qdata=codes, scale=scale.flatten(-2) if tiled else scale, first=first)

    def _tiles(self) -> torch.Tensor:
        """The tiles of scales, [tiles, tiles, 32, 4, 4], a view. The row r of a tile is at [r % 32, r // 32]."""
        columns = -(-self.shape[0 if self.is_transposed else 1] // (4 * _COLUMNS[self.kind]))
        return self.scale.view(self.scale.numel() // (512 * columns), columns, 32, 4, 4)  # type: ignore[no-any-return]

    def _own_scale(self) -> torch.Tensor:
        """The swizzled scales, as torchao has them, of the rows and columns alone."""
        if self.scale.dim() == 2:
            return self.scale  # type: ignore[no-any-return]
        tiles = self._tiles().view(torch.uint8)
        if self.first:
            rows = self.qdata.shape[0]
            made = tiles.new_zeros(-(-rows // _ROWS), *tiles.shape[1:])
            made[_places(0, rows, made)] = tiles[_places(self.first, rows, made)]
            tiles = made
        return tiles.reshape(32 * tiles.shape[0], 16 * tiles.shape[1]).view(self.scale.dtype)

    def _write(self, other: RotatedWeight) -> None:
        """Take the codes and scales of another one, but leave the rows alone that share a tile with these."""
        mine, theirs = (each.per_tensor_scale if each.kind in _COLUMNS else each.scale for each in (self, other))
        if mine is not None and self._is_part() and not torch.equal(mine, theirs.to(mine.device)):
            raise TensorError(
                f"{self!r} has scales that other parts of its weight have too, and the weight to copy has other ones; "
                "copy whole weights"
            )
        self.qdata.copy_(other.qdata)
        if mine is not None:
            mine.copy_(theirs)
        if self.kind not in _COLUMNS:
            return
        if self.scale.dim() == other.scale.dim() == 2:
            self.scale.copy_(other.scale)
        else:
            rows, (tiles, others) = self.qdata.shape[0], (each._tiles().view(torch.uint8) for each in (self, other))
            values = others[_places(other.first, rows, others)]
            tiles[_places(self.first, rows, tiles)] = values.to(tiles.device)

    def _is_part(self) -> bool:
        """Whether a scale may belong to other parts of a weight too, from which this one was cut."""
        shares = self.kind != "int4" and self.qdata.stride(0) != self.qdata.shape[1]
        return self.scale.dim() != 2 or shares  # type: ignore[no-any-return]


def _places(first: int, rows: int, tiles: torch.Tensor) -> tuple[Any, ...]:
    """The index of rows in tiles."""
    row = torch.arange(first, first + rows, device=tiles.device)
    return row // _ROWS, slice(None), row % 32, row % _ROWS // 32


@RotatedWeight.implements(_aten.slice.Tensor)  # type: ignore[untyped-decorator]
def _sliced(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    rest: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1 :]]
    weight, (dim, begin, end, step) = args[0], rest
    if step != 1:
        raise TensorError(f"a RotatedWeight has no slice with a step of {step}; take rows or columns without gaps")
    begin, end, _ = slice(begin, end).indices(weight.shape[dim])
    made = weight._cut(bool(dim % 2) != weight.is_transposed, begin, max(begin, end))
    return _aliased(func, args, kwargs, made)


@RotatedWeight.implements([_aten.split.Tensor, _aten.split_with_sizes.default])  # type: ignore[untyped-decorator]
def _split(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    weight, sizes, *dim = args
    axis = dim[0] if dim else kwargs.get("dim", 0)
    size = weight.shape[axis]
    sizes = [sizes] * max(1, -(-size // sizes)) if isinstance(sizes, int) else sizes
    ends = list(itertools.accumulate(sizes))
    return [_aten.slice.Tensor(weight, axis, *each) for each in zip([0, *ends], ends, strict=False)]


@RotatedWeight.implements([_aten.t.default, _aten.transpose.int, _aten.permute.default])  # type: ignore[untyped-decorator]
def _transposed(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    weight, *dims = args
    if func is _aten.permute.default:
        dims = [0, dims[0][0]]
    turns = not dims or sum(dims) % 2 == 1
    return _aliased(func, args, kwargs, weight._with(is_transposed=weight.is_transposed != turns))


@RotatedWeight.implements(_aten.view.default)  # type: ignore[untyped-decorator]
def _viewed(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    weight, shape = args
    if len(shape) != 2 or any(size not in (-1, own) for size, own in zip(shape, weight.shape, strict=True)):
        raise TensorError(f"{weight!r} has no view of the shape {list(shape)}; pass what its dequantize() returns")
    return _aliased(func, args, kwargs, weight._with())


@RotatedWeight.implements([_aten.empty_like.default, _aten._to_copy.default])  # type: ignore[untyped-decorator]
def _converted(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """In another type, the codes are the same."""
    dtype = kwargs.pop("dtype", None) or args[0].dtype
    check_dtype(dtype)
    return args[0]._apply_fn_to_data(lambda x: func(x, **kwargs))._with(dtype=dtype)


@RotatedWeight.implements(_aten.copy_.default)  # type: ignore[untyped-decorator]
def _copied(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    weight, other = args[:2]
    if not all(isinstance(each, RotatedWeight) for each in args[:2]) or _what(weight) != _what(other):
        raise TensorError(
            f"{_named(other)} cannot be copied to {_named(weight)}; copy one of the same shape, kind and blocks"
        )
    weight._write(other)
    return weight


@RotatedWeight.implements([_aten.is_pinned.default, _aten._pin_memory.default])  # type: ignore[untyped-decorator]
def _pinned(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    weight, *rest = args
    if func is _aten._pin_memory.default:
        return weight._apply_fn_to_data(lambda x: func(x, *rest, **kwargs))
    return all(func(getattr(weight, name), *rest, **kwargs) for name in weight.__tensor_flatten__()[0])


def _what(weight: RotatedWeight) -> tuple[Any, ...]:
    """The properties that weights must share to be copied to each other."""
    return weight.shape, weight.kind, weight.block, weight.is_transposed


def _named(tensor: torch.Tensor) -> str:
    return repr(tensor) if isinstance(tensor, RotatedWeight) else f"a {plain(tensor.dtype)} tensor"


# ---- products --------------------------------------------------------------------------------------------------------
_PRODUCTS = (
    "a RotatedWeight multiplies rows, as linear(x, weight) or x @ weight.t(); "
    "pass other products what its dequantize() returns"
)


@RotatedWeight.implements_torch_function(torch.nn.functional.linear)  # type: ignore[untyped-decorator]
def _linear_of_rows(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.Tensor:
    return _linear(*args, **(kwargs or {}))  # type: ignore[no-any-return]


@RotatedWeight.implements_torch_function([torch.mm, torch.matmul, torch.Tensor.mm, torch.Tensor.matmul])  # type: ignore[untyped-decorator]
def _matmul_of_rows(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.Tensor:
    input, weight = args
    return _linear(input, weight.t())  # type: ignore[no-any-return]


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """input · weightᵀ + bias, in the type of the input. Raises `TensorError` for rows of another length than n."""
    if isinstance(input, RotatedWeight) or not isinstance(weight, RotatedWeight) or weight.is_transposed:
        raise TensorError(_PRODUCTS)
    n = weight.shape[-1]
    if not input.dim() or input.shape[-1] != n:
        raise TensorError(f"the input has the shape {tuple(input.shape)}, but the weight multiplies rows of {n}")
    y = _Product.apply(input.reshape(-1, n), weight)  # type: ignore[no-untyped-call]
    y = y.view(*input.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """rows · weightᵀ of rotated codes. The gradient of the rows is that of the product with the dequantized weight."""

    @staticmethod
    def forward(rows: torch.Tensor, weight: RotatedWeight) -> torch.Tensor:
        q = _quantize(rows, weight.kind, _rotation(rows.shape[-1], weight.block))
        is_whole = weight.kind == "int4-row" and weight.span == int4.span_of(rows.shape[-1])
        if is_whole and can_multiply(q.codes, weight.qdata):
            scales = q.scales.reshape(-1, 1)
            return multiply_codes(q.codes, scales, weight.qdata, weight.scale, None, None, rows.dtype)
        # Scales of rows give bfloat16 alone on a GPU.
        dtype = torch.bfloat16 if weight.kind == "fp8" and rows.is_cuda else rows.dtype
        return _product(to_torchao(q, dtype), weight.rotated()).to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return _gradient(gradient, weight), None


def _gradient(gradient: torch.Tensor, weight: RotatedWeight) -> torch.Tensor:
    """The gradient of the rows of a product with the dequantized weight, from that of the result."""
    rotated: Any = weight.rotated()
    rotation = _rotation(weight.shape[-1], weight.block)
    turned = gradient @ rotated.dequantize(gradient.dtype)
    return turned if rotation is None else rotation.inverse(turned)


@RotatedWeight.implements([_aten.mm.default, _aten.addmm.default])  # type: ignore[untyped-decorator]
def _product_of_parts(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The products of a layer of DTensors, whose parts come here, and of their gradients."""
    *bias, rows, weight = args
    if not isinstance(weight, RotatedWeight) or isinstance(rows, RotatedWeight) or kwargs:
        raise TensorError(_PRODUCTS)
    with _tangents(False):  # which cannot be asked for below autograd
        y = _Product.forward(rows, weight.t()) if weight.is_transposed else _gradient(rows, weight)
    return y + bias[0] if bias else y


def _product(x: Any, weight: Any) -> torch.Tensor:
    """x · weightᵀ of two tensors of torchao with the same kind of codes."""
    is_int8 = isinstance(x, _Int8)  # whose own product takes no codes for x
    by_row = is_int8 and weight.scale.shape[1] == 1
    if by_row and can_multiply(x.qdata, weight.qdata):
        return multiply_codes(x.qdata, x.scale, weight.qdata, weight.scale, None, None, x.dtype)
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
        for 16, and one for each tensor. "int4" and "int4-row" are formats of weights, integers of 4 bits with a scale
        for each group of up to 128 elements or for each row; their activations are "int8".
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
    rotation, to = _rotation(n, block), _FORMATS[config.kind]["to"]
    if config.kind in GROUPS:
        turned = weight.float() if rotation is None else rotation(weight.float())
        codes, scales, factors = int4.rounded(turned, int4.group_of("a linear layer", n, config.kind))
        # One tensor of scales, because transformers loads no others than torchao has.
        of_groups = scales if factors is None else scales * factors
        packed = RotatedWeight(codes, of_groups, config.kind, block, weight.dtype, span=int4.span_of(n))
        module.weight = torch.nn.Parameter(packed, requires_grad=False)
        return module
    of_rows = to in ("int8-row", "fp8-row")
    q = quantized_weight(weight, to, rotation) if of_rows else _quantize(weight, config.kind, rotation)
    made: Any = to_torchao(q, weight.dtype)
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
