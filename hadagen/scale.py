"""How the scale of a call travels to a kernel: one 32-bit word, in the form that the kernel reads.

An mma multiplies by a constant matrix, so it can multiply by a factor too, at no cost. That factor is 16 bits long,
which alone is too coarse for a scale; but a product of two of them, or one and a small correction, is not.
"""

from __future__ import annotations

import math
import struct
from enum import Enum
from functools import lru_cache


class ScaleForm(str, Enum):
    """What the word holds. Of two 16-bit numbers a is the low half and b the high half."""

    FP32 = "fp32"  # the scale
    FLOAT16_FACTORS = "float16-factors"  # scale ≈ a · b
    BFLOAT16_FACTORS = "bfloat16-factors"
    FLOAT16_CORRECTED = "float16-corrected"  # scale ≈ a · (1 + b)
    BFLOAT16_CORRECTED = "bfloat16-corrected"

    __hash__ = str.__hash__  # of members that are keys on the way of every call

    @property
    def significand_bits(self) -> int:
        """Of a and b."""
        return {"float16": 11, "bfloat16": 8}.get(self.value.split("-")[0], 24)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest |scale| that the form holds well; beyond, a kernel of the form FP32 must do."""
        match self:
            case ScaleForm.FP32:
                return 0.0, math.inf
            case ScaleForm.FLOAT16_FACTORS:
                return 2.0**-17, 2.0**15
            case ScaleForm.FLOAT16_CORRECTED:
                return 2.0**-14, 2.0**15
        return 2.0**-100, 2.0**100


# With |a| at most this, or at most |scale|, no sum of 16 products with a exceeds both the largest |x| and the largest
# result; so nothing overflows in between whose result does not.
_LARGEST_FIRST_FACTOR = 2.0**-4


@lru_cache(maxsize=1024)
def scale_word(form: ScaleForm, scale: float) -> int:
    """The word that stands for `scale`, whose size lies in the range of the form.

    Relative error of a · b: below 1e-5 (float16) and 3e-4 (bfloat16); none where scale is a power of two. Of
    a · (1 + b): below 1e-5.
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
    """The a and b of `bits` significant bits each whose product is nearest to `scale` > 0; a is as large as allowed."""
    least = 1 << (bits - 1)
    fraction, exponent = math.frexp(scale)
    found = []
    for power in (2 * bits - 1, 2 * bits):  # a · b as integers of `bits` bits have one or the other length
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
    """To nearest with `bits` significant bits, and in float16 no finer than its subnormals."""
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
