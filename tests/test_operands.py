"""What kernels take beside x and y, in memory: with it, what is timed again and again stays as large as it is."""

import ctypes

import numpy as np
import pytest
import torch
from emulated_device import read_operands
from measure_sample import memory_at

from hadagen.measure.device_operands import DeviceOperands, Orthonormal, orthogonal_matrix
from hadagen.problem.problem import MAX_ORDER, Problem
from hadagen.truth.reference import transform

CPU = torch.device("cpu")


@pytest.mark.parametrize("order", [*range(2, 61), 84, 172, 254, 256, 316, MAX_ORDER])
def test_a_matrix_has_orthogonal_rows_and_few_zeros(order: int) -> None:
    matrix = orthogonal_matrix(order)
    assert (matrix.dtype, matrix.shape) == (torch.int8, (order, order))
    squares = matrix.double() @ matrix.double().T
    assert torch.equal(squares, squares[0, 0] * torch.eye(order, dtype=torch.float64))
    assert set(matrix.unique().tolist()) <= {-1, 0, 1}
    known = order % 4 == 0 and order <= 252
    assert squares[0, 0] == order or not known
    assert squares[0, 0] > 1 or order % 2


@pytest.mark.parametrize("order", [1, 2, 7, 14, 28])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("real", "paired"), [(False, False), (True, False), (True, True)])
def test_a_timed_transform_is_orthonormal(order: int, signed: bool, real: bool, paired: bool) -> None:
    flags = {"signed": signed, "real": real and order > 1, "paired": paired and order > 1}
    problem = Problem.of(order * 64, "float16", order=order, **flags)
    operands = Orthonormal(problem, CPU)
    read = read_operands(problem, operands)
    x = np.random.default_rng(0).standard_normal((4, problem.n))
    y = transform(problem, x, operands.scale, read)
    rel = 1e-5 if paired else 1e-6 if real else 1e-12
    assert np.linalg.norm(y, axis=1) == pytest.approx(np.linalg.norm(x, axis=1), rel=rel)
    assert len(operands) == (order > 1) * (1 + paired) + 2 * signed


def test_what_is_written_to_operands_is_seen() -> None:
    matrix = np.ones((3, 3), np.int8)
    for place in (None, 0, 8, -1, 256):
        operands = DeviceOperands(Problem.of(48, "float16", order=3), {"matrix": matrix}, CPU)
        assert operands["matrix"] % 16 == 0
        if place is not None:
            memory_at(operands["matrix"] + place, 1, ctypes.c_int8)[0] = 5
        assert operands.are_whole() == (place is None)
    assert (matrix == 1).all()
