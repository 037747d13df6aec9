"""Real numbers ↔ the raw bits of elements. numpy has no bfloat16, so all types travel as uint16 or uint32 arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadagen.problem.problem import DType

Bits = NDArray[np.uint16] | NDArray[np.uint32]
Reals = NDArray[np.float64]

_OF_NUMPY = {DType.FLOAT16: np.float16, DType.FLOAT32: np.float32}
_BFLOAT16_PRECISION = 8  # significant bits, the hidden one included
_BFLOAT16_LEAST = -133  # log2 of the smallest subnormal


def encode(dtype: DType, values: NDArray[Any]) -> Bits:
    """The bits of `values` (any shape, taken as float64) rounded once to `dtype`, to nearest with ties to even.

    A value that is too large becomes an infinity; a NaN stays a NaN.
    """
    reals = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in _OF_NUMPY:
            bits: Bits = reals.astype(_OF_NUMPY[dtype]).view(f"uint{8 * dtype.bytes}")
            return bits
        _, exponent = np.frexp(reals)
        step = np.maximum(exponent - _BFLOAT16_PRECISION, _BFLOAT16_LEAST)
        # Scaling by a power of two is exact, so `rint` is the only rounding; float32 then holds the result exactly.
        rounded = np.ldexp(np.rint(np.ldexp(reals, -step)), step).astype(np.float32)
        words: NDArray[np.uint32] = rounded.view(np.uint32) >> np.uint32(16)
        return words.astype(np.uint16)


def decode(dtype: DType, bits: Bits) -> Reals:
    """The values of raw `dtype` bits, exact."""
    with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one
        if dtype in _OF_NUMPY:
            return bits.view(_OF_NUMPY[dtype]).astype(np.float64)
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32).astype(np.float64)
