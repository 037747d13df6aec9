"""What several tests of measuring need: a problem, a kernel that no GPU runs, and where it would be timed."""

import ctypes
from typing import Any

import numpy as np

from hadagen.measure import Cell
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import DType, Problem, Rows
from hadagen.problem.regimes import Cache, Destination

H100_L2 = 52428800
PROBLEM = Problem.of(256, DType.FLOAT16)
SPEC = LaunchSpec(threads=128, cluster=1, shared_bytes=0, tile_elements=4096, persistent=False)
CELL = Cell(1 << 16, Destination.IN_PLACE, Cache.HOT)
PLAIN_PROBLEMS = [Problem.of(1 << k, dtype, rows=rows) for k in range(1, 18) for dtype in DType for rows in Rows]
# With a matrix: the order, and the order of H.
ORDERS = [(28, 512), (24, 1), (3, 8), (3, 1 << 15), (12, 1 << 13), (172, 64), (428, 256), (4, 1 << 12)]
MATRIX_PROBLEMS = [Problem.of(order * length, DType.BFLOAT16, order=order) for order, length in ORDERS]
ALL_PROBLEMS = PLAIN_PROBLEMS + MATRIX_PROBLEMS


def memory_at(address: int, count: int, kind: Any = ctypes.c_uint8) -> np.ndarray:
    """So many values of this type that lie at an address."""
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), (count,))


def array_at(address: int, elements: int, dtype: DType) -> np.ndarray:
    return memory_at(address, elements, ctypes.c_uint16 if dtype.bytes == 2 else ctypes.c_uint32)
