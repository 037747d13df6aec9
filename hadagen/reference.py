"""The inputs, the float64 transform and the error measure that kernels are checked with, on emulator and device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadagen.bits import Reals, decode, encode
from hadagen.launch import ENTRY_BYTES
from hadagen.problem import LARGE, DType, Problem

INPUT_CLASSES = ("normal", "constant", "one-hot", "uneven", "large")

# With this many normal elements, the measured error lies within a few percent of its expected value.
NORMAL_ELEMENTS = 8192

# Each run of this many elements of an "uneven" row is up to this power of two smaller than the largest run.
UNEVEN_RUN, UNEVEN_POWER = 256, 40

# What a transform takes beside x and the scale: "matrix", its entries [order, order]; "signs_before" and "signs_after"
# as the params of these names. Signs that are not there are none.
Operands = Mapping[str, NDArray[Any]]


def verification_scale(problem: Problem) -> float:
    """The scale that makes the transform orthonormal, n**-0.5, so that results are as large as inputs.

    With a matrix it has the eight bits of a bfloat16. A single ±1 then gives exact results, which would else have one
    and the same error of up to half of a last place.
    """
    scale = float(problem.n**-0.5)
    return scale if problem.order == 1 else float(decode(DType.BFLOAT16, encode(DType.BFLOAT16, np.array([scale])))[0])


def verification_operands(problem: Problem) -> dict[str, NDArray[Any]]:
    """A matrix of random −1, 0 and 1, few of them 0, and random signs, where the problem has some. Its rows are no
    more orthogonal than random ones, and it is not symmetric, so that transposed it gives another result."""
    random = np.random.default_rng(problem.order)
    operands: dict[str, NDArray[Any]] = {}
    if problem.order > 1:
        operands["matrix"] = random.choice((-1, 0, 1), (problem.order, problem.order), p=(0.48, 0.04, 0.48))
    if problem.transform.signed:
        size = -(-problem.n // 8)
        operands |= {name: random.integers(0, 256, size, np.uint8) for name in ("signs_before", "signs_after")}
    return operands


def kernel_operands(problem: Problem, operands: Operands) -> dict[str, NDArray[Any]]:
    """The operands as a kernel takes them: the matrix as `MATRIX_PARAMS` says."""
    if problem.order == 1:
        return dict(operands)
    count = -(-problem.order // 16)
    padded = np.zeros((16 * count, 16 * count), np.uint8)
    matrix = operands["matrix"]
    padded[: problem.order, : problem.order] = sum((matrix == entry) * byte for entry, byte in ENTRY_BYTES.items())
    # Row 16 i + 8 a + g and column 16 j + 8 b + 2 t + c → part (i, j), lane 4 g + t, word 2 b + a, half c.
    parts = padded.reshape(count, 2, 8, count, 2, 4, 2).transpose(0, 3, 2, 5, 4, 1, 6)
    return {**operands, "matrix": np.ascontiguousarray(parts).reshape(-1)}


def transform(problem: Problem, x: Reals, scale: float, operands: Operands) -> Reals:
    """The transform of a problem over the last dimension of x, in float64."""

    def signs(name: str) -> Reals:
        packed = operands.get(name, np.zeros(-(-problem.n // 8), np.uint8))
        return 1.0 - 2.0 * np.unpackbits(packed, count=problem.n, bitorder="little").astype(np.float64)

    y = hadamard((x * signs("signs_before")).reshape(-1, problem.length), scale)
    if problem.order > 1:
        y = operands["matrix"].astype(np.float64) @ y.reshape(-1, problem.order, problem.length)
    return _renumbered(problem, y.reshape(x.shape)) * signs("signs_after")


def _renumbered(problem: Problem, y: Reals) -> Reals:
    """With the two bits of each base-4 digit of the last index exchanged, if the problem says so."""
    if not problem.transform.swapped:
        return y
    digits = problem.bits // 2
    order = [axis for digit in range(digits) for axis in (2 * digit + 2, 2 * digit + 1)]
    return y.reshape(-1, *(2,) * problem.bits).transpose(0, *order).reshape(y.shape)


def input_classes(problem: Problem, rows: int) -> dict[str, Reals]:
    """Inputs by class, in the order of `INPUT_CLASSES`, each [rows, n] float64 that the problem's dtype holds exactly.

    - `normal`: standard normal. Rounding the result has an error of 2.08e-4 (float16) or 1.66e-3 (bfloat16) on average,
      if rows · n is `NORMAL_ELEMENTS` or more.
    - `constant`: all elements of a row are one signed power of two, so the result is one element and exact zeros. Not
      with a matrix or signs, which make few values of it, whose rounding does not average out.
    - `one-hot`: one ±1 in each row, at the first position in row 0, at the last in row 1, then anywhere.
    - `uneven`: normal, with every run of `UNEVEN_RUN` elements times a power of two; the largest in each row is 1.
    - `large`: normal times `LARGE`.
    """
    random = np.random.default_rng(0)
    shape = (rows, problem.n)

    places = random.integers(0, problem.n, rows)
    places[:2] = (0, problem.n - 1)[:rows]
    one_hot = np.zeros(shape)
    one_hot[np.arange(rows), places] = random.choice((-1.0, 1.0), rows)

    constants = np.ldexp(random.choice((-1.0, 1.0), rows), random.integers(-2, 3, rows))
    normal = random.standard_normal(shape)
    large = random.standard_normal(shape) * LARGE[problem.io.input]

    powers = random.integers(-UNEVEN_POWER, 1, (rows, -(-problem.n // UNEVEN_RUN)))
    powers -= powers.max(axis=1, keepdims=True)
    runs = np.repeat(np.ldexp(1.0, powers), UNEVEN_RUN, axis=1)[:, : problem.n]

    values = (
        normal,
        np.repeat(constants[:, None], problem.n, axis=1),
        one_hot,
        random.standard_normal(shape) * runs,
        large,
    )
    dtype, plain = problem.io.input, problem.order == 1 and not problem.transform.signed
    return {
        name: decode(dtype, encode(dtype, reals))
        for name, reals in zip(INPUT_CLASSES, values, strict=True)
        if plain or name != "constant"
    }


def hadamard(x: Reals, scale: float = 1.0) -> Reals:
    """(x · H_n) · scale over the last dimension in float64; H[i, j] = (−1)^popcount(i & j), n a power of two."""
    n = x.shape[-1]
    y: Reals = np.asarray(x, dtype=np.float64).reshape(-1, n)
    width = 1
    while width < n:
        halves = y.reshape(-1, n // (2 * width), 2, width)
        even, odd = halves[:, :, 0], halves[:, :, 1]
        y = np.stack((even + odd, even - odd), axis=2)
        width *= 2
    return y.reshape(x.shape) * scale


def relative_error(out: Reals, reference: Reals) -> float:
    """‖out − reference‖ / ‖reference‖ over all elements, in float64; infinity if any value in `out` is not finite."""
    if not np.isfinite(out).all():
        return float("inf")
    # Divided by the peak first: squares of large values stay finite.
    peak = float(np.abs(reference).max(initial=0.0)) or 1.0
    return _norm((out - reference) / peak) / (_norm(reference / peak) or 1.0)


def _norm(values: Reals) -> float:
    """The norm, without BLAS: its threads wait long for each other if the CPUs have other work, such as compilers."""
    return float(np.sqrt(np.square(values).sum()))
