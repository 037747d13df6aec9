"""Every quantized format in numpy, from its definition: the quantizer alone, for values that are already rotated.

Where a definition says fp32, the arithmetic is fp32, operation by operation, so that codes and scales are exact. Where
two projects do the same thing in another order, the order has a name, and a caller says which. Reals come as
[rows, columns], and a group is a run of columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

F = np.float32
FLOAT_MAX = np.finfo(np.float32).max
# Bits of the fraction, the least exponent of a normal number, and the largest finite value.
FORMATS = {
    "float32": (23, -126, float(FLOAT_MAX)),
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, 255 * 2.0**120),
    "e4m3fn": (3, -6, 448.0),
    "e2m1": (1, 0, 6.0),
}
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Quantized:
    """Codes, one for each value; scales, one for each group, as they are stored; and what the two stand for.

    Codes are bytes of e4m3fn, nibbles of E2M1, or integers. E8M0 and e4m3 scales are bytes. Values are exact products.
    """

    codes: NDArray[Any]
    scales: NDArray[Any]
    values: Reals


# Rounding


def nearest(x: NDArray[Any], fraction: int, least_exponent: int) -> Reals:
    """The nearest value with so many bits of fraction, half to even, however large; subnormal below the exponent."""
    with np.errstate(invalid="ignore"):
        x = np.asarray(x, np.float64)
        exponent = np.maximum(np.frexp(x)[1] - 1, least_exponent)
        step = np.ldexp(1.0, exponent - fraction)
        return np.where(np.isfinite(x), np.rint(x / step) * step, x)


def rounded(x: NDArray[Any] | np.float32, dtype: str) -> Floats:
    """x as float16, bfloat16 or float32 holds it. A float64 becomes a float32 first, as in a kernel."""
    with np.errstate(over="ignore"):
        x = np.asarray(x).astype(F)
    fraction, least, largest = FORMATS[dtype]
    y = nearest(x, fraction, least)
    with np.errstate(over="ignore"):
        return np.where(np.abs(y) > largest, np.copysign(np.inf, y), y).astype(F)


def encode_e4m3fn(x: NDArray[Any]) -> Bytes:
    """Half to even; infinity and all beyond 448 become ±448, NaN becomes 0x7f."""
    return _encode(x, "e4m3fn", 7, E4M3_NAN)


def encode_e2m1(x: NDArray[Any]) -> Bytes:
    """Half to even; infinity and all beyond 6 become ±6. NaN becomes 0."""
    return _encode(x, "e2m1", 3, 0)


def _encode(x: NDArray[Any], name: str, sign: int, nan: int) -> Bytes:
    fraction, least, largest = FORMATS[name]
    size = np.minimum(np.abs(nearest(x, fraction, least)), largest)
    size = np.where(np.isnan(size), 0, size)
    exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, least), least)
    # A normal number has a leading one, which raises the field of the exponent from 0 to 1, and so on.
    code = (exponent - least) * 2**fraction + np.ldexp(size, fraction - exponent)
    code = code.astype(np.uint8) | (np.signbit(x).astype(np.uint8) << sign)
    return np.where(np.isnan(x), np.uint8(nan), code)


def decode_e4m3fn(codes: Bytes) -> Reals:
    field, fraction = codes.astype(np.int64) >> 3 & 15, codes & 7
    size = np.where(field > 0, np.ldexp(1 + fraction / 8, field - 7), fraction * 2.0**-9)
    size = np.where(codes & 0x7F == E4M3_NAN, np.nan, size)
    return np.where(codes & 0x80, -size, size)


def decode_e2m1(codes: Bytes) -> Reals:
    return E2M1_VALUES[codes]


def round_integer(x: Floats, low: int, high: int) -> NDArray[np.int8]:
    """Half to even, then clamped. NaN becomes 0."""
    return np.clip(np.where(np.isnan(x), 0, np.rint(x)), low, high).astype(np.int8)


def encode_e8m0(exponents: NDArray[Any], finite: NDArray[np.bool_]) -> Bytes:
    """2^exponent from 2^-127 on, and no larger than 2^127; 0xff where the largest magnitude was not finite."""
    return np.where(finite, np.clip(exponents, -127, 127) + 127, E8M0_NAN).astype(np.uint8)


def decode_e8m0(codes: Bytes) -> Reals:
    return np.where(codes == E8M0_NAN, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def pack_nibbles(codes: NDArray[Any]) -> Bytes:
    """Two codes to a byte, an integer in two's complement. The even element is in the low nibble."""
    nibbles = codes.astype(np.uint8) & np.uint8(15)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4)


# Largest magnitudes, and powers of two


def in_groups(x: Floats, group: int) -> Floats:
    return x.reshape(len(x), -1, group)


def amax(x: Floats, nan: str = "kept") -> Floats:
    """The largest magnitude of each group. A NaN makes it NaN, as in PyTorch, or is `skipped`, as by fmaxf from 0."""
    size = np.abs(x)
    if nan == "skipped":
        size = np.where(np.isnan(size), F(0), size)
    return np.asarray(size.max(axis=-1))


def floor_log2(x: Floats) -> NDArray[np.int64]:
    """Of finite numbers; far below any scale for 0."""
    return np.where(x > 0, np.frexp(x)[1].astype(np.int64) - 1, -(2**20))


def ceil_log2(x: Floats) -> NDArray[np.int64]:
    fraction, exponent = np.frexp(x)
    return np.where(x > 0, exponent.astype(np.int64) - (fraction == 0.5), -(2**20))


def over_given(x: Floats, scale: NDArray[Any] | np.float32) -> Floats:
    """x / scale, where 0 over a scale of 0 is 0, and any other value over it is infinite. (No project says this.)"""
    zero = np.broadcast_to(scale == 0, x.shape)
    return np.where(zero, np.where(x == 0, x, x * F(np.inf)), x / scale).astype(F)


def _quiet() -> Any:
    return np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore")


def _spread(scales: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Scales [rows, groups] as wide as the values."""
    return np.repeat(scales, shape[1] // scales.shape[1], axis=1)


def _result(codes: NDArray[Any], decoded: NDArray[Any], scales: NDArray[Any], reals: NDArray[Any]) -> Quantized:
    with _quiet():
        return Quantized(codes, scales, decoded * _spread(reals.astype(np.float64), codes.shape))


# fp8, with fp32 scales


def fp8_group(values: NDArray[Any], dtype: str = "bfloat16", order: str = "deepseek") -> Quantized:
    """The indexer of DeepSeek V3.2 and V4. The orders:

    - `deepseek`: scale max(amax, 1e-4) · fp32(1/448), codes of x / scale.
    - `power_of_two`: that scale, or the next power of two up.
    """
    x = in_groups(rounded(values, dtype), 128)
    with _quiet():
        scales = np.maximum(amax(x), F(1e-4)) * F(1 / 448)
        if order == "power_of_two":
            scales = _power_of_two_up(scales)
        codes = encode_e4m3fn((x / scales[..., None]).reshape(values.shape))
    return _result(codes, decode_e4m3fn(codes), scales, scales)


def fp8_row(values: NDArray[Any], dtype: str = "bfloat16") -> Quantized:
    """vLLM's rule for a token: max(amax / 448, 1 / (448·512)); codes of x / scale."""
    x = rounded(values, dtype)
    with _quiet():
        scales = np.maximum(amax(x) / F(448), F(1) / F(448 * 512))
        codes = encode_e4m3fn(x / scales[:, None])
    return _result(codes, decode_e4m3fn(codes), scales, scales[:, None])


def fp8_tensor(values: NDArray[Any], scale: float, dtype: str = "bfloat16") -> Quantized:
    """One given scale: codes of x / scale."""
    x, s = rounded(values, dtype), F(scale)
    with _quiet():
        codes = encode_e4m3fn(over_given(x, s))
    return _result(codes, decode_e4m3fn(codes), s.reshape(1), s.reshape(1, 1))


def fp8_head(values: NDArray[Any], given: Floats, dtype: str = "bfloat16", order: str = "divide") -> Quantized:
    """One given scale for each of as many runs of rows: codes of x / scale. Or its largest magnitude, as torchao has it
    before FlashAttention 3: codes of x · fp32(448 / amax), scale fp32(amax / 448), both 1 up to 1e-12."""
    x, each = rounded(values, dtype), np.repeat(given.astype(F), len(values) // len(given))[:, None]
    with _quiet():
        if order == "divide":
            codes, scales = encode_e4m3fn(over_given(x, each)), each
        else:
            codes = encode_e4m3fn(x * np.where(each > F(1e-12), F(448) / each, F(1)))
            scales = np.where(each > F(1e-12), each / F(448), F(1))
    return _result(codes, decode_e4m3fn(codes), given, scales)


def _power_of_two_up(x: Floats) -> Floats:
    """2^ceil(log2 x) by the bits of x: the field of the exponent, and one more if any bit of the fraction is set."""
    bits = x.view(np.uint32)
    field = (bits >> 23 & 255) + (bits & 0x7FFFFF != 0)
    return np.where(np.isfinite(x), (field << 23).astype(np.uint32).view(F), x)


# Integers, with a scale for each row


def int8_row(values: NDArray[Any], dtype: str = "bfloat16", order: str = "plain") -> Quantized:
    """Codes of x / scale, half to even. The orders:

    - `plain`: scale max(amax / 127, 1e-30), all in fp32; codes of −127 to 127.
    - `comfy_eager`: that scale, stored; divided by it as dtype holds it, the least normal number in place of 0; the
      quotient rounded to dtype; codes of −128 to 127.
    """
    x = rounded(values, dtype)
    with _quiet():
        scales = np.maximum(amax(x) / F(127), F(1e-30))
        if order == "plain":
            quotient, low = x / scales[:, None], -127
        else:
            divisor = rounded(scales, dtype)
            divisor = np.where(divisor == 0, F(2.0 ** FORMATS[dtype][1]), divisor)
            quotient, low = rounded(x / divisor[:, None], dtype), -128
    codes = round_integer(quotient, low, 127)
    return _result(codes, codes, scales[:, None], scales[:, None])


def int4_row(values: NDArray[Any], dtype: str = "float16", order: str = "quarot") -> Quantized:
    """Codes of x / scale, half to even, not packed. The orders:

    - `quarot`: scale amax / 7 and the quotient rounded to dtype, no floor (0 / 0 gives 0); codes of −8 to 7.
    - `comfy_eager`: the same with a floor of 1e-10 under amax, as dtype holds it; codes of −7 to 7.
    """
    x = rounded(values, dtype)
    floor = rounded(F(1e-10), dtype) if order == "comfy_eager" else F(0)
    with _quiet():
        scales = rounded(np.maximum(amax(x), floor) / F(7), dtype)
        quotient = rounded(x / scales[:, None], dtype)
    codes = round_integer(quotient, -8 if order == "quarot" else -7, 7)
    return _result(codes, codes, scales, scales[:, None])


# Microscaling: a power of two for 32 values


def mx_exponents(largest: Floats, element: str, rule: str) -> NDArray[np.int64]:
    """The exponent of the scale, by the rules of torchao: `floor`, `ceil`, `rceil`, `even`."""
    fraction, _, peak = FORMATS[element]
    if rule == "rceil":
        return ceil_log2(largest * F(1 / peak))
    exponent = ceil_log2(largest) if rule == "ceil" else floor_log2(largest)
    if rule == "even":
        # Up where the fraction, rounded half up to as many bits as an element has, would be 2.
        exponent += np.frexp(largest)[0] >= 1 - 2.0 ** -(fraction + 2)
    return exponent - int(np.log2(peak))


def mx(values: NDArray[Any], element: str, rule: str = "floor", dtype: str = "bfloat16") -> Quantized:
    """E8M0 scales of 32, codes of x / scale. A group with a NaN or an infinity has the scale 0xff and no codes but NaN,
    or 0 in E2M1."""
    x = in_groups(rounded(values, dtype), 32)
    largest = amax(x)
    finite = np.isfinite(largest)
    with _quiet():
        exponents = mx_exponents(np.where(finite, largest, F(0)), element, rule)
    return _scaled_by_powers(x, encode_e8m0(exponents, finite), element)


def mxfp8(values: NDArray[Any], rule: str = "floor", dtype: str = "bfloat16") -> Quantized:
    return mx(values, "e4m3fn", rule, dtype)


def mxfp4(values: NDArray[Any], rule: str = "ocp", dtype: str = "bfloat16") -> Quantized:
    """The rules of `mx_exponents`, with `ocp` for `floor`, and two more:

    - `deepseek_v4`: the power of two up from max(amax, 6·2^-126) · fp32(1/6), NaN skipped.
    - `qutlass`: the power of two down from amax + 1e-8, NaN skipped, in fp32; codes of (x / scale) · 3, so that a value
      is code · scale / 3.
    """
    x = in_groups(rounded(values, dtype), 32)
    if rule == "deepseek_v4":
        scales = np.maximum(amax(x, "skipped"), F(6 * 2.0**-126)) * F(1 / 6)
        return _scaled_by_powers(x, _finite_e8m0(ceil_log2, scales), "e2m1")
    if rule == "qutlass":
        return _scaled_by_powers(x, _finite_e8m0(floor_log2, amax(x, "skipped") + F(1e-8)), "e2m1", 3)
    return mx(values, "e2m1", "floor" if rule == "ocp" else rule, dtype)


def _finite_e8m0(log2: Callable[[Floats], NDArray[np.int64]], scales: Floats) -> Bytes:
    finite = np.isfinite(scales)
    return encode_e8m0(log2(np.where(finite, scales, F(0))), finite)


def _scaled_by_powers(x: Floats, scales: Bytes, element: str, factor: int = 1) -> Quantized:
    """Codes of (x / scale) · factor, where the division is exact, or falls below all that matters."""
    with _quiet():
        scaled = (x / decode_e8m0(scales)[..., None]).astype(F) * F(factor)
    scaled = scaled.reshape(len(x), -1)
    codes = encode_e4m3fn(scaled) if element == "e4m3fn" else encode_e2m1(scaled)
    decoded = decode_e4m3fn(codes) if element == "e4m3fn" else decode_e2m1(codes)
    return _result(codes, decoded / factor, scales, decode_e8m0(scales))


# NVFP4: e4m3 for 16 values, and fp32 for all


def nvfp4(values: NDArray[Any], given: float, dtype: str = "bfloat16", order: str = "te") -> Quantized:
    """E2M1 codes, e4m3 scales of 16. What is given is amax of all for `te`, and the scale of all for `torchao`.

    - `te`: genc = 448·6 / amax, at most the largest float, 1 if amax or genc is 0. Scale e4m3(amax₁₆ · (genc · (1/6))),
      codes of x · min(1 / (scale · (1 / genc)), the largest float).
    - `torchao`: scale e4m3(clamp((amax₁₆ / 6) / s, 2^-6, 448)), codes of x · ((1 / s) / scale).
    """
    x = in_groups(rounded(values, dtype), 16)
    largest, s = amax(x), F(given)
    with _quiet():
        if order == "te":
            genc = np.minimum(F(448) * F(6) / s, FLOAT_MAX)
            genc = F(1) if s == 0 or genc == 0 else genc
            s = F(1) / genc
            scales = encode_e4m3fn(largest * (genc * F(1 / 6)))
        else:
            scales = encode_e4m3fn(np.clip(over_given(largest / F(6), s), F(2.0**-6), F(448)))
        held = decode_e4m3fn(scales).astype(F)[..., None]
        inverse = np.minimum(F(1) / (held * s), FLOAT_MAX) if order == "te" else (F(1) / s) / held
        codes = encode_e2m1((x * inverse).reshape(values.shape))
    return _result(codes, decode_e2m1(codes), scales, decode_e4m3fn(scales) * np.float64(s))


# Layouts of scales


def swizzled(scales: Bytes) -> Bytes:
    """As memory has it: tiles of 128 rows and 4 groups, along a row first, padded with zeros.

    In a tile, row r and group c are at byte (r % 32) · 16 + (r // 32) · 4 + c.
    """
    padded = _padded(scales, 128, 4)
    tiles = padded.reshape(len(padded) // 128, 4, 32, -1, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(-1)


def four_to_a_word(scales: Bytes) -> NDArray[np.int32]:
    """E8M0 scales [rows, groups / 4], the first of four groups lowest; padded with zeros. DeepGEMM takes them
    column-major."""
    padded = _padded(scales, 1, 4).astype(np.uint32).reshape(len(scales), -1, 4)
    words = padded << np.arange(0, 32, 8, dtype=np.uint32)
    return np.asarray(words.sum(axis=-1, dtype=np.uint32)).view(np.int32)


def _padded(scales: NDArray[Any], rows: int, groups: int) -> NDArray[Any]:
    return np.pad(scales, ((0, -len(scales) % rows), (0, -scales.shape[1] % groups)))
