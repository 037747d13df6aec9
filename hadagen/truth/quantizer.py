"""The quantizer in plain PyTorch: codes and scales of float32 values, and back. Kernels are compared with it.

All arithmetic is in float32, operation by operation, and the same on every device. PyTorch divides by a number of
Python on a CPU, but multiplies by its reciprocal on a GPU. So a divisor is always a tensor here, and where a definition
multiplies by a reciprocal, that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from hadagen.problem.formats import POWERS, TENSOR, TILE, Element, Format, Layout

_FLOAT_MAX = torch.finfo(torch.float32).max
_E8M0_NAN = 0xFF
_FRACTION_BITS = {Element.E4M3: 3, Element.E2M1: 1}
# PyTorch's own types of `Format.kinds` that are uint8 here, with the version that brought them.
NATIVE = {"e8m0": ("float8_e8m0fnu", "2.7"), "e2m1": ("float4_e2m1fn_x2", "2.8")}
# The types that codes or scales of a kind may have. Those that are made here have the first.
KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "e4m3": (torch.float8_e4m3fn,),
    "int8": (torch.int8,),
    "int4": (torch.uint8,),
    "none": (torch.uint8,),
    "float32": (torch.float32,),
    "packed": (torch.int32,),
    "input": (torch.float16, torch.bfloat16, torch.float32),
    **{kind: (torch.uint8, getattr(torch, name, torch.uint8)) for kind, (name, _) in NATIVE.items()},
}
_NATIVE = {KINDS[kind][1] for kind in NATIVE} - {torch.uint8}  # which stands for types that this PyTorch lacks


def quantize(
    x: torch.Tensor, to: Format, dtype: torch.dtype, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales.

    x: float32 [rows, columns]. dtype: the type of the input, to which INT4 and the rule convrot round. given: the scale
    that the format needs, float32 with one element; or the scales of heads, which have the same number of rows.

    Returns codes, [rows, columns], or uint8 [rows, columns / 2] of 4-bit codes, the even one in the low nibble; and
    scales in their layout.
    """
    values, scaled, scales = scaled_by(x, to, dtype, given)
    return encode(to, scaled, values), scales if to.group == TENSOR else laid_out(scales, to.layout)


def scaled_by(
    x: torch.Tensor, to: Format, dtype: torch.dtype, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The values that are quantized, the quotients that `encode` makes codes of, and the scales, [rows, groups] unless
    the call has one. Arguments are those of `quantize`."""
    if to.element is Element.INT4 or to.rule == "convrot":
        x = _rounded(x, dtype)  # here, as what this makes infinite has the code of an infinity
    groups = _in_groups(x, to)
    largest = groups.abs().amax(-1, keepdim=True) if groups.numel() else groups.new_zeros((*groups.shape[:-1], 1))
    scales, scaled = _RULES[to.name, to.rule](groups, largest, dtype, given)
    return x, scaled.flatten(-2), scales if to.group == TENSOR else scales.squeeze(-1)


def types(to: Format, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The types of codes and of scales. dtype: the type of the input."""
    of_codes, of_scales = to.kinds
    return KINDS[of_codes][0], dtype if of_scales == "input" else KINDS[of_scales][0]


def empty(
    rows: int, columns: int, to: Format, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as `quantize` returns them for x of [rows, columns], with any values, but with the zeros that
    fill up a layout. If one scale is given for the tensor, scales are [rows, 1] and mean nothing."""
    of_codes, of_scales = types(to, dtype)
    codes = torch.empty((rows, columns * to.element.bits // 8), dtype=of_codes, device=device)
    return codes, laid_out_empty(rows, to.scales_in_row(columns), to.layout, of_scales, device)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    to: Format,
    given: torch.Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The values that codes and scales stand for, float32 [rows, columns]. The format has codes.

    The product of a code and a finite scale is at most the largest number of dtype, and of float32. A value near that
    number may be rounded up to a code whose product would exceed it; the product is then clamped.
    """
    most = min(torch.finfo(dtype).max, _FLOAT_MAX)
    codes, scales = as_bytes(codes), as_bytes(scales)
    values = _decode(to, codes)
    rows, columns = values.shape
    if to.group == TENSOR:
        return _times(values, _scales_of_heads(scales, to, rows) if to.by_head else scales.float(), most)
    count = to.scales_in_row(columns)
    each = _decode_scales(rows_of_scales(scales, to.layout, rows, count))
    if to.rule == "qutlass":
        each = each / _tensor(3.0, each)
    if given is not None:
        each = each * _global_scale(to, given)
    return _times(_in_groups(values, to), each[..., None], most).flatten(-2)


def _times(values: torch.Tensor, scales: torch.Tensor, most: float) -> torch.Tensor:
    # No infinity or NaN is written here or below, because torch.export.save of PyTorch 2.8 stores neither.
    limits = torch.where(scales.isfinite(), most, scales.abs())
    return (values * scales).clamp(-limits, limits)


def is_clipped(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, to: Format, given: torch.Tensor | None
) -> torch.Tensor:
    """Where values are so far beyond the largest code that they would have got the next one if there were one.

    values: float32 [rows, columns], from which the codes and scales were made.
    """
    largest, beyond = {
        Element.E4M3: (0x7E, 464 / 448),
        Element.E2M1: (0x77, 7 / 6),
        Element.INT8: (127, 127.5 / 127),
        Element.INT4: (0x77, 7.5 / 7),
    }[to.element]
    limit = torch.full_like(codes.view(torch.uint8), largest).view(codes.dtype)
    return values.abs() > beyond * dequantize(limit, scales, to, given)


def excess_error(
    codes: torch.Tensor,
    scales: torch.Tensor,
    exact: torch.Tensor,
    to: Format,
    dtype: torch.dtype,
    given: torch.Tensor | None,
) -> torch.Tensor:
    """How much farther from exact values the codes and scales of a kernel are than those of `quantize`, in the norm of
    the values; NaN if they stand for what is not finite.

    exact: float64 [rows, columns] that float32 holds nearly. dtype: the type of the input. Half of a percent of the
    error of `quantize` is not counted, because values that are nearly in the middle between two codes may get either.
    """
    values = exact.float()
    best = quantize(values.to(dtype).float() if to.rounded else values, to, dtype, given)
    if to.element is Element.NONE:
        return distance(scales, best[1])

    def error(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scales = given if to.group == TENSOR and given is not None else scales
        return distance(dequantize(codes, scales, to, given), exact)

    return (error(codes, scales) - 1.005 * error(*best)).clamp(min=0.0)


def distance(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """‖found − exact‖ / ‖exact‖, in float64."""
    norm, exact = torch.linalg.vector_norm, exact.double()
    relative: torch.Tensor = norm(found.double() - exact) / norm(exact)
    return relative


def _in_groups(x: torch.Tensor, to: Format) -> torch.Tensor:
    """[rows, groups, elements]."""
    count = to.scales_in_row(x.shape[-1])
    return x.view(x.shape[0], count, x.shape[-1] // count)


# ---- elements --------------------------------------------------------------------------------------------------------
def encode(to: Format, scaled: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The nearest codes, half to even, of values that are scaled already. x: the values before they were scaled."""
    if to.element is Element.E4M3:
        return encode_e4m3(scaled)
    if to.element is Element.NONE:
        return scaled.new_empty((*scaled.shape[:-1], 0), dtype=torch.uint8)
    # These have no code for NaN and infinity. Infinity over an infinite scale is NaN.
    scaled = torch.where(x.isinf(), x, scaled).nan_to_num(0.0, torch.inf, -torch.inf)
    if to.element is Element.E2M1:
        return _packed(encode_e2m1(scaled))
    largest = to.element.largest
    lowest = -largest - 1 if to.rule in ("convrot", "quarot") else -largest
    codes = scaled.round().clamp(lowest, largest).to(torch.int8)
    return codes if to.element is Element.INT8 else _packed(codes.view(torch.uint8) & 15)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn, half to even. A value beyond 448 becomes 448, and NaN becomes 0x7f."""
    codes = x.clamp(-448.0, 448.0)
    return torch.where(x.isnan(), codes.abs(), codes).to(torch.float8_e4m3fn)  # a NaN without its sign


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """E2M1 in the low bits of uint8, half to even, for numbers and infinities. A value beyond 6 becomes 6."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code += (size > 2.5).to(torch.uint8) + (size >= 3.5) + (size > 5.0)
    return code | x.signbit().to(torch.uint8) << 3


def _decode(to: Format, codes: torch.Tensor) -> torch.Tensor:
    if to.element.bits == 8:
        return codes.float()
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    if to.element is Element.INT4:
        return (nibbles ^ 8).to(torch.int8).float() - 8.0
    size = (nibbles & 7).float()
    size = torch.maximum(torch.maximum(size / 2, size - 2), 2 * size - 8)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    return torch.where(nibbles > 7, -size, size)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


# ---- rules: groups [rows, groups, elements], largest magnitudes, type of x, the given scale → scales, quotients ------
Scaled = tuple[torch.Tensor, torch.Tensor]


def _tensor(value: float, like: torch.Tensor) -> torch.Tensor:
    return like.new_full((), value, dtype=torch.float32)


def _over(x: torch.Tensor, divisor: float) -> torch.Tensor:
    return x / _tensor(divisor, x)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).float()


def _fp8_group(x: torch.Tensor, largest: torch.Tensor, *_: Any) -> Scaled:
    scales = largest.clamp(min=1e-4) * _tensor(1 / 448, x)
    return scales, x / scales


def _fp8_power_of_two(x: torch.Tensor, largest: torch.Tensor, *_: Any) -> Scaled:
    exact = _fp8_group(x, largest)[0]
    scales = torch.where(exact.isfinite(), _power(_ceil_exponent(exact.view(torch.int32))), exact)
    return scales, x / scales


def _fp8_row(x: torch.Tensor, largest: torch.Tensor, *_: Any) -> Scaled:
    scales = torch.maximum(_over(largest, 448), 1 / _tensor(448 * 512, x))
    return scales, x / scales


def _over_given(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """x / given. Over a scale of 0 a value of 0 is 0, and any other is infinite with its own sign."""
    return torch.where((given == 0) & (x == 0), x, x / (given + 0.0))  # a sum with 0.0 is no negative zero


def _of_rows(given: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, 1]: the number of each head, repeated for its rows."""
    of_heads = given.reshape(-1, 1)
    if of_heads.shape[0] == rows:  # len() would make the number of a trace constant
        return of_heads
    return of_heads.expand(-1, rows // max(len(of_heads), 1)).reshape(rows, 1)


def _fp8_given(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, given: torch.Tensor) -> Scaled:
    return given, _over_given(x, _of_rows(given, x.shape[0])[..., None])


def _fp8_head_fa3(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, given: torch.Tensor) -> Scaled:
    """given: the largest magnitude of each head. If it is 1e-12 or less, the scale of the head is 1."""
    factors = torch.where(given > 1e-12, _tensor(448, x) / given, 1.0)
    return given, x * _of_rows(factors, x.shape[0])[..., None]


def _scales_of_heads(given: torch.Tensor, to: Format, rows: int) -> torch.Tensor:
    """The factor by which the codes of each row are multiplied, [rows, 1]."""
    return _of_rows(fa3_scales(given) if to.rule == "fa3" else given, rows)


def fa3_scales(largest: torch.Tensor) -> torch.Tensor:
    """The scales of the rule fa3 for the largest magnitudes of heads."""
    return torch.where(largest > 1e-12, _over(largest, 448), _tensor(1.0, largest))


def _int8(x: torch.Tensor, largest: torch.Tensor, *_: Any) -> Scaled:
    scales = _over(largest, 127).clamp(min=1e-30)
    return scales, x / scales


def _int8_convrot(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, *_: Any) -> Scaled:
    """The scale is rounded to the type of x before it divides, and the quotient too."""
    scales = _int8(x, largest)[0]
    divisor = _rounded(scales, dtype)
    divisor = torch.where(divisor == 0, torch.finfo(dtype).tiny, divisor)
    return scales, _rounded(x / divisor, dtype)


def _int4(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, *_: Any) -> Scaled:
    floor = _rounded(_tensor(1e-10, x), dtype)
    return _int4_quarot(x, torch.maximum(largest, floor), dtype)


def _int4_quarot(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, *_: Any) -> Scaled:
    """Scale and quotient are rounded to the type of x. There is no least scale, and 0 / 0 is 0."""
    scales = _rounded(_over(largest, 7), dtype)
    return scales.to(dtype), _rounded(x / scales, dtype)


def _largest(x: torch.Tensor, largest: torch.Tensor, *_: Any) -> Scaled:
    return largest, x


def _mx(element: Element, rule: str) -> Any:
    def scaled(x: torch.Tensor, largest: torch.Tensor, *_: Any) -> Scaled:
        peak = element.largest.bit_length() - 1  # of its largest power of two
        finite = largest.isfinite()
        bits = torch.where(finite, largest, 0.0).view(torch.int32)
        if rule == "rceil":
            exponents = _ceil_exponent((largest * _tensor(1 / element.largest, x)).view(torch.int32))
        elif rule == "ceil":
            exponents = _ceil_exponent(bits) - peak
        else:
            if rule == "even":  # up where the fraction, rounded to as many bits as an element has, would be 2
                bits = bits + (1 << 22 - _FRACTION_BITS[element])
            exponents = (bits >> 23) - peak
        return _by_powers(x, exponents, finite)

    return scaled


def _mxfp4_deepseek(x: torch.Tensor, largest: torch.Tensor, *_: Any) -> Scaled:
    up = largest.clamp(min=6 * 2.0**-126) * _tensor(1 / 6, x)
    return _by_powers(x, _ceil_exponent(up.view(torch.int32)), up.isfinite())


def _mxfp4_qutlass(x: torch.Tensor, largest: torch.Tensor, *_: Any) -> Scaled:
    """Encode 3x / scale; a code decodes to code · scale / 3."""
    down = largest + _tensor(1e-8, x)
    scales, scaled = _by_powers(x, down.view(torch.int32) >> 23, down.isfinite())
    return scales, scaled * 3


def _ceil_exponent(bits: torch.Tensor) -> torch.Tensor:
    """The biased exponent of the next power of two, 0 for 2^-127 and less."""
    field, fraction = bits >> 23, bits & 0x7FFFFF
    return field + torch.where(field == 0, fraction > 0x400000, fraction != 0)


def _by_powers(x: torch.Tensor, exponents: torch.Tensor, finite: torch.Tensor) -> Scaled:
    """E8M0 scales of biased exponents, and x over them, which is exact."""
    exponents = exponents.clamp(0, 254)
    scales = torch.where(finite, exponents, _E8M0_NAN).to(torch.uint8)
    return scales, x * torch.where(finite, _power(254 - exponents), torch.nan)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2^(exponent − 127) of biased exponents, which is subnormal for 0."""
    return torch.where(exponents > 0, exponents << 23, 1 << 22).view(torch.float32)


def _nvfp4(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, given: torch.Tensor) -> Scaled:
    scales = encode_e4m3(_over_given(_over(largest, 6), given).clamp(2.0**-6, 448.0))
    return scales, x * ((1 / given) / scales.float())


def _nvfp4_transformer_engine(
    x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, given: torch.Tensor
) -> Scaled:
    """given: the largest magnitude of all values."""
    encoding = _encoding(given)
    scales = encode_e4m3(largest * (encoding * _tensor(1 / 6, x)))
    return scales, x * (1 / (scales.float() * (1 / encoding))).clamp(max=_FLOAT_MAX)


def _encoding(largest: torch.Tensor) -> torch.Tensor:
    """448·6 / the largest magnitude; 1 if either is 0."""
    encoding = (_tensor(448 * 6, largest) / largest).clamp(max=_FLOAT_MAX)
    return torch.where((largest == 0) | (encoding == 0), 1.0, encoding)


def _global_scale(to: Format, given: torch.Tensor) -> torch.Tensor:
    return 1 / _encoding(given) if to.rule == "transformer_engine" else given


_RULES: dict[tuple[str, str], Any] = {
    ("fp8-group", "exact"): _fp8_group,
    ("fp8-group", "power_of_two"): _fp8_power_of_two,
    ("fp8-row", "exact"): _fp8_row,
    ("fp8-tensor", "exact"): _fp8_given,
    ("fp8-head", "exact"): _fp8_given,
    ("fp8-head", "fa3"): _fp8_head_fa3,
    ("int8-row", "exact"): _int8,
    ("int8-row", "convrot"): _int8_convrot,
    ("int4-row", "exact"): _int4,
    ("int4-row", "quarot"): _int4_quarot,
    **{("mxfp8", rule): _mx(Element.E4M3, rule) for rule in POWERS},
    **{("mxfp4", rule): _mx(Element.E2M1, rule) for rule in POWERS},
    ("mxfp4", "deepseek_v4"): _mxfp4_deepseek,
    ("mxfp4", "qutlass"): _mxfp4_qutlass,
    ("nvfp4", "exact"): _nvfp4,
    ("largest", "exact"): _largest,
    ("nvfp4", "transformer_engine"): _nvfp4_transformer_engine,
}


# ---- scales ----------------------------------------------------------------------------------------------------------
def _decode_scales(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.where(scales == _E8M0_NAN, 0x7FC00000, _power(scales.int()).view(torch.int32)).view(torch.float32)


def laid_out(scales: torch.Tensor, layout: Layout, matrices: tuple[int, ...] = ()) -> torch.Tensor:
    """Scales [rows, groups] in their layout. matrices: for batched-swizzled, the leading sizes of a batch of matrices
    that have these rows together."""
    if layout is Layout.ROW_MAJOR:
        return scales.contiguous()
    if layout is Layout.PACKED:
        scales = _packed_exponents(scales)
        layout = Layout.COLUMN_MAJOR
    rows, groups = scales.shape
    if layout is Layout.COLUMN_MAJOR:
        memory = scales.new_zeros(room(rows, groups, layout, scales.element_size()))
        arranged(memory, rows, groups, layout).copy_(scales)
        return arranged(memory, rows, groups, layout)
    count = prod(matrices)
    rows = rows // max(count, 1)
    memory = scales.new_zeros((*matrices, room(rows, groups, layout, 1)), dtype=torch.uint8)
    memory.view(-1)[_swizzled(rows, groups, count, scales.device).flatten()] = scales.view(torch.uint8).flatten()
    return memory.view(scales.dtype)


def shape_of_scales(leading: Sequence[int], groups: int, layout: Layout) -> tuple[int, ...]:
    """The shape of the scales of codes [..., columns] in a layout. leading: all sizes of the codes but the last."""
    if layout is Layout.ROW_MAJOR:
        return *leading, groups
    if layout.in_columns:
        return prod(leading), layout.filled_up(0, groups, 4)[1]
    matrices = [*leading[:-1]] if layout is Layout.BATCHED_SWIZZLED else []
    return *matrices, room(prod(leading[len(matrices) :]), groups, layout, 1)


def room(rows: int, groups: int, layout: Layout, size: int) -> int:
    """How many elements the memory of scales has, counting those that fill it up. size: bytes of an element."""
    return prod(layout.filled_up(rows, groups, size))


def arranged(memory: torch.Tensor, rows: int, groups: int, layout: Layout) -> torch.Tensor:
    """Scales as `laid_out` returns them, in memory of one dimension that has `room` for them."""
    if layout is Layout.COLUMN_MAJOR:
        return memory.view(groups, -1 if groups else 0).T[:rows]
    return memory if layout is Layout.SWIZZLED else memory.view(rows, groups)


def laid_out_empty(rows: int, groups: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Scales as `laid_out` returns them, with any values, but with the zeros that fill them up."""
    size = room(rows, groups, layout, dtype.itemsize)
    make = torch.empty if size == rows * groups else torch.zeros
    return arranged(make(size, dtype=dtype, device=device), rows, groups, layout)


def rows_of_scales(scales: torch.Tensor, layout: Layout, rows: int, groups: int) -> torch.Tensor:
    """Scales [rows, groups] of what `laid_out` returned; packed ones as bytes."""
    if layout.in_columns:  # an index, as other operations ask traces whether columns have gaps
        row, column = (torch.arange(size, device=scales.device) for size in (rows, scales.shape[1]))
        taken = scales.view(torch.uint8) if scales.element_size() == 1 else scales
        taken = taken[row[:, None], column].view(scales.dtype)
        if layout is Layout.COLUMN_MAJOR:
            return taken
        each = taken[..., None] >> torch.arange(0, 32, 8, device=scales.device)
        return (each & 0xFF).to(torch.uint8).flatten(-2)[:, :groups]
    if layout is Layout.ROW_MAJOR:
        return scales.reshape(rows, groups)
    count = prod(scales.shape[:-1])
    places = _swizzled(rows // max(count, 1), groups, count, scales.device)
    return scales.view(torch.uint8).flatten()[places].view(scales.dtype)


def _swizzled(rows: int, groups: int, matrices: int, device: torch.device) -> torch.Tensor:
    """Where swizzled scales lie: int64 [matrices · rows, groups]. Each matrix has memory of its own."""
    of_rows, of_groups = TILE
    tiles_down, tiles_across = -(-rows // of_rows), -(-groups // of_groups)
    row, group = torch.arange(rows, device=device)[:, None], torch.arange(groups, device=device)
    tile = torch.arange(matrices, device=device)[:, None, None] * tiles_down + row // of_rows
    tile = tile * tiles_across + group // of_groups
    within = row % 32 * 16 + row % of_rows // 32 * 4 + group % of_groups
    return (tile * prod(TILE) + within).flatten(0, 1)


def _packed_exponents(scales: torch.Tensor) -> torch.Tensor:
    """int32 [rows, ⌈groups/4⌉] of scales that are powers of two. Of one that is not finite it is 0xff, no number."""
    exponents = scales if scales.dtype == torch.uint8 else (scales.view(torch.int32) >> 23).to(torch.uint8)
    return torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4)).contiguous().view(torch.int32)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """E8M0 scales and FP4 codes of PyTorch's own types as a view of uint8, as they are here; others unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype in _NATIVE else tensor


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes that a tensor lies in, gaps and all."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
