"""The scale of a call as a kernel gets it: one 32-bit word, in the form that the kernel reads.

An mma multiplies by a constant matrix, so it can multiply by a factor too, at no cost. That factor has 16 bits, which
is too coarse for a scale. The product of two such factors, or one factor and a small correction, is fine enough.
"""

from __future__ import annotations

import math
import struct
from enum import Enum
from functools import lru_cache


class ScaleForm(str, Enum):
    """The meaning of the word. If it holds two 16-bit numbers, a is the low half and b the high half."""

    FP32 = "fp32"  # the scale
    FLOAT16_FACTORS = "float16-factors"  # scale ≈ a · b
    BFLOAT16_FACTORS = "bfloat16-factors"
    FLOAT16_CORRECTED = "float16-corrected"  # scale ≈ a · (1 + b)
    BFLOAT16_CORRECTED = "bfloat16-corrected"

    __hash__ = str.__hash__  # faster: members are keys in every call

    @property
    def significand_bits(self) -> int:
        """Significant bits of a and b; of the scale for FP32."""
        return {"float16": 11, "bfloat16": 8}.get(self.value.split("-")[0], 24)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest |scale| that the form holds well. Beyond, a call needs the form FP32."""
        match self:
            case ScaleForm.FP32:
                return 0.0, math.inf
            case ScaleForm.FLOAT16_FACTORS:
                return 2.0**-17, 2.0**15
            case ScaleForm.FLOAT16_CORRECTED:
                return 2.0**-14, 2.0**15
        return 2.0**-100, 2.0**100


# If |a| is at most this, or at most |scale|, no sum of 16 products with a exceeds both the largest |x| and the largest
# result. So no sum overflows unless the result does.
_LARGEST_FIRST_FACTOR = 2.0**-4


@lru_cache(maxsize=1024)
def scale_word(form: ScaleForm, scale: float) -> int:
    """The word for `scale`, whose magnitude must lie in the range of the form.

    The relative error of a · b is below 1e-5 (float16) and 3e-4 (bfloat16), and 0 if the scale is a power of two. That
    of a · (1 + b) is below 1e-5.
    """
    if form is ScaleForm.FP32:
        return int.from_bytes(struct.pack("<f", scale), "little")
    bits = form.significand_bits
    if form in (ScaleForm.FLOAT16_FACTORS, ScaleForm.BFLOAT16_FACTORS):
        a, b = _factors(abs(scale), bits)
        a = math.copysign(a, scale)
    else:
        a = _rounded(scale, bits)
        b = _rounded((scale - a) / a, bits)
    return _half(a, bits) | _half(b, bits) << 16


def _factors(scale: float, bits: int) -> tuple[float, float]:
    """The a and b of `bits` significant bits each with the product nearest to `scale` > 0; a as large as allowed."""
    least = 1 << (bits - 1)
    fraction, exponent = math.frexp(scale)
    found = []
    for power in (2 * bits - 1, 2 * bits):  # the product of two integers of `bits` bits has one of these lengths
        target = math.ldexp(fraction, power)
        for i in range(least, 2 * least):
            j = round(target / i)
            if least <= j < 2 * least:
                found.append((abs(i * j / target - 1.0), i, j, exponent - power))
    _, i, j, shift = min(found)
    limit = max(scale, _LARGEST_FIRST_FACTOR)
    power = math.floor(math.log2(limit / i))
    return math.ldexp(i, power), math.ldexp(j, shift - power)


def _rounded(value: float, bits: int) -> float:
    """The nearest value with `bits` significant bits; in float16 no finer than its subnormals."""
    if value == 0.0:
        return 0.0
    step = math.frexp(value)[1] - bits
    if bits == 11:
        step = max(step, -24)
    return math.ldexp(round(math.ldexp(value, -step)), step)


def _half(value: float, bits: int) -> int:
    """The 16 bits of a value that float16 (11 bits) or bfloat16 (8 bits) holds exactly."""
    if bits == 11:
        return int.from_bytes(struct.pack("<e", value), "little")
    return int.from_bytes(struct.pack("<f", value), "little") >> 16
