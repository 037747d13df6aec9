"""Bits and reference: what everything else is compared with, compared with slower or other people's versions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hadagen.problem.bits import decode, encode
from hadagen.problem.problem import MAX_LOG2_N, ROUNDING_ERROR, DType, Numerics, Problem
from hadagen.truth.accuracy import error_of
from hadagen.truth.quantizer import quantize
from hadagen.truth.reference import (
    INPUT_CLASSES,
    NORMAL_ELEMENTS,
    hadamard,
    input_classes,
    relative_error,
    verification_scale,
)

TORCH_TYPES = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}
ONE_ROUNDING = {DType.FLOAT16: 2.2e-4, DType.BFLOAT16: 1.8e-3, DType.FLOAT32: 3e-8}
SIGNIFICAND_BITS = {DType.FLOAT16: 11, DType.BFLOAT16: 8, DType.FLOAT32: 24}
dtypes = pytest.mark.parametrize("dtype", DType)


@dtypes
def test_every_element_survives_decode_and_encode(dtype: DType) -> None:
    if dtype is DType.FLOAT32:
        bits = np.arange(0, 1 << 32, 65521, dtype=np.uint32)
    else:
        bits = np.arange(1 << 16, dtype=np.uint16)
    values = decode(dtype, bits)
    number = ~np.isnan(values)
    assert np.array_equal(encode(dtype, values)[number], bits[number])
    assert np.isnan(decode(dtype, encode(dtype, values[~number]))).all()


@dtypes
def test_encode_rounds_fp32_as_torch_does(dtype: DType) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal(100_000) * 2.0 ** random.integers(-149, 120, 100_000)).astype(np.float32)
    bits = encode(dtype, values)
    expected = torch.from_numpy(values).to(TORCH_TYPES[dtype])
    assert torch.equal(torch.from_numpy(bits.view(f"int{8 * dtype.bytes}")).view(TORCH_TYPES[dtype]), expected)


@dtypes
def test_encode_rounds_once(dtype: DType) -> None:
    tie = 1 + 2.0 ** -SIGNIFICAND_BITS[dtype]
    # Through fp32 the second would look like the tie, and go down to even.
    assert list(decode(dtype, encode(dtype, np.array([tie, tie + 2.0**-40])))) == [1.0, 2 * tie - 1]


@pytest.mark.parametrize("n", [2, 4, 64, 512])
def test_hadamard_is_the_explicit_matrix(n: int) -> None:
    explicit = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    assert np.array_equal(hadamard(np.eye(n)), explicit)


@given(st.integers(1, 15), st.integers(0, 2**32))
def test_orthonormal_transform_keeps_length_and_undoes_itself(log2_n: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((2, 1 << log2_n))
    y = hadamard(x, 2.0 ** (-log2_n / 2))
    assert np.allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1))
    assert np.allclose(hadamard(y, 2.0 ** (-log2_n / 2)), x)


@dtypes
@pytest.mark.parametrize("n", [1 << k for k in range(1, 16)])
def test_one_rounding_keeps_every_class_within_the_accurate_bound(n: int, dtype: DType) -> None:
    problem = Problem.of(n, dtype)
    classes = input_classes(problem, max(2, NORMAL_ELEMENTS // n))
    assert tuple(classes) == INPUT_CLASSES
    for values in classes.values():
        assert np.array_equal(decode(dtype, encode(dtype, values)), values)
        result = hadamard(values, verification_scale(problem))
        assert relative_error(decode(dtype, encode(dtype, result)), result) <= ONE_ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_fast_may_err_as_often_as_hadacore_rounds(dtype: DType) -> None:
    for k in range(1, MAX_LOG2_N + 1):
        roundings = 1 + (k > 4) + (k > 8) + (k > 12)
        bound, rounding = Problem.of(1 << k, dtype, Numerics.FAST).error_bound, ONE_ROUNDING[dtype]
        assert 0.93 * rounding * roundings**0.5 < bound < 1.13 * rounding * roundings**0.5
        counted = Problem.of(1 << k, dtype, Numerics.FAST).roundings
        assert bound > 1.01 * ROUNDING_ERROR[dtype] * counted**0.5  # a sample may err a little more
    assert Problem.of(64, DType.FLOAT32, Numerics.FAST).error_bound == Problem.of(64, DType.FLOAT32).error_bound


def test_one_hot_rows_begin_with_the_first_and_the_last_place() -> None:
    one_hot = input_classes(Problem.of(64, DType.FLOAT16), 5)["one-hot"]
    assert np.array_equal(np.abs(one_hot).sum(axis=1), np.ones(5))
    assert abs(one_hot[0, 0]) == abs(one_hot[1, 63]) == 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("key", ["n64-float32-accurate", "n64-float32-to-fp8_group_64-accurate"])
def test_an_error_is_infinite_if_a_result_is_not_finite(key: str, wrong: float) -> None:
    problem, exact = Problem.parse(key), torch.randn(3, 64, dtype=torch.float64)
    form = problem.io.form
    results = [exact.clone()] if form is None else [*quantize(exact.float(), form, torch.float32, None)]
    assert error_of(problem, results, exact) == 0
    results[-1].view(-1)[0] = wrong
    assert error_of(problem, results, exact) == np.inf


def test_relative_error() -> None:
    for values, times, error in (
        ([3.0, 4.0], 1.0, 0.0),
        ([3.0, 4.5], 1.0, 0.1),
        ([3e200, 4.5e200], 1e200, 0.1),
        ([3.0, np.nan], 1.0, np.inf),
        ([0.0, 0.0], 0.0, 0.0),
    ):
        assert relative_error(np.array(values), np.array([3.0, 4.0]) * times) == pytest.approx(error)
