"""The inputs, the float64 transform and the error measure that kernels are checked with, on emulator and device."""

from __future__ import annotations

import numpy as np

from hadagen.problem.bits import Reals, decode, encode
from hadagen.problem.operands import OperandValues
from hadagen.problem.problem import LARGE, DType, Problem
from hadagen.problem.prologues import Activated, prologue_of

INPUT_CLASSES = ("normal", "constant", "one-hot", "uneven", "large")

# With this many normal elements, the measured error lies within a few percent of its expected value.
NORMAL_ELEMENTS = 8192

# Each run of this many elements of an "uneven" row is up to this power of two smaller than the largest run.
UNEVEN_RUN, UNEVEN_POWER = 256, 40


def verification_scale(problem: Problem) -> float:
    """The scale that makes the transform orthonormal, n**-0.5, so that results are as large as inputs.

    With a matrix it has the eight bits of a bfloat16. A single ±1 then gives exact results, which would else have one
    and the same error of up to half of a last place.
    """
    scale = float(problem.n**-0.5)
    if not problem.transform.has_matrix:
        return scale
    return float(decode(DType.BFLOAT16, encode(DType.BFLOAT16, np.array([scale])))[0])


def exact_results(problem: Problem, x: Reals, scale: float, operands: OperandValues) -> tuple[Reals, dict[str, Reals]]:
    """The exact transform of a problem over the last dimension of x, after its prologue; and the operands that the
    prologue writes, by name. x: [rows, n], or the parts of rows, as `Prologue.results` takes them."""
    prologue = prologue_of(problem)
    if prologue is None:
        return transform(problem, x, scale, operands), {}
    import torch

    from hadagen.truth.accuracy import TORCH_DTYPE

    values = {name: torch.from_numpy(operands[name]) for name in prologue.read}
    made = prologue.results(torch.from_numpy(x), values, TORCH_DTYPE[problem.io.input])
    written = {name: made[name].numpy() for name in prologue.written}
    return transform(problem, made["x"].numpy(), scale, operands), written


def transform(problem: Problem, x: Reals, scale: float, operands: OperandValues) -> Reals:
    """The exact transform of a problem over the last dimension of x, without its prologue."""

    def signs(name: str) -> Reals:
        packed = operands.get(name, np.zeros(-(-problem.n // 8), np.uint8))
        return 1.0 - 2.0 * np.unpackbits(packed, count=problem.n, bitorder="little").astype(np.float64)

    rows = (x * signs("signs_before")).reshape(-1, problem.length)
    if problem.transform.paired:
        y = rows @ operands["right_matrix"].astype(np.float64).T * scale
    else:
        y = hadamard(rows, scale)
    if problem.transform.has_matrix:
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
    - `one-hot`: one ±1 in each row, at the first position in row 0, at the last in row 1, then anywhere. Not with
      a real matrix, for the same reason.
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
    dtype, of = problem.io.input, problem.transform
    left_out = {"constant"} if of.has_matrix or of.signed else set()
    left_out |= {"one-hot"} if of.real else set()
    return {
        name: decode(dtype, encode(dtype, reals))
        for name, reals in zip(INPUT_CLASSES, values, strict=True)
        if name not in left_out
    }


def input_parts(problem: Problem, classes: dict[str, Reals]) -> dict[str, Reals]:
    """By class, x as `Prologue.results` takes it, for a problem with a prologue. classes: the first parts. The others
    are normal, so that a product of a large value stays in range. Not the classes in which a row has one value other
    than 0: after an activation, all its results have one and the same rounding error."""
    prologue = prologue_of(problem)
    if not isinstance(prologue, Activated):
        return classes
    width = prologue.width
    # Squares are out of range; so is the transform of results that have a mean.
    too_large = prologue.activation == "relu2" or (width == 1 and problem.io.input is DType.FLOAT16)
    lacking = ["constant", "one-hot", *["large"] * too_large]
    classes = {name: values for name, values in classes.items() if name not in lacking}
    if width == 1:
        return classes
    random = np.random.default_rng(1)
    dtype = problem.io.input

    def parts(first: Reals) -> Reals:
        others = (decode(dtype, encode(dtype, random.standard_normal(first.shape))) for _ in range(width - 1))
        return np.stack((first, *others))

    return {name: parts(first) for name, first in classes.items()}


def hadamard(x: Reals, scale: float = 1.0) -> Reals:
    """(x · H_n) · scale over the last dimension in float64; H[i, j] = (−1)^popcount(i & j), n a power of two."""
    n = x.shape[-1]
    y: Reals = np.asarray(x, dtype=np.float64).reshape(-1, n)
    width = 1
    while width < n:
        halves = y.reshape(-1, n // (2 * width), 2, width)
        even, odd = halves[:, :, 0], halves[:, :, 1]
        with np.errstate(invalid="ignore"):  # of infinities
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
