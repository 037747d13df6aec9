"""What several tests of measuring need: a problem, a kernel that no GPU runs, and where it would be timed."""

from __future__ import annotations

import ctypes

import numpy as np

from hadagen.launch import LaunchSpec
from hadagen.measure import Cell
from hadagen.problem import DType, Problem, Rows
from hadagen.regimes import Cache, Destination

H100_L2 = 52428800
PROBLEM = Problem.of(256, DType.FLOAT16)
SPEC = LaunchSpec(threads=128, cluster=1, shared_bytes=0, tile_elements=4096, persistent=False)
CELL = Cell(1 << 16, Destination.IN_PLACE, Cache.HOT)
ALL_PROBLEMS = [Problem.of(1 << k, dtype, rows=rows) for k in range(1, 16) for dtype in DType for rows in Rows]


def array_at(address: int, elements: int, dtype: DType) -> np.ndarray:
    kind = ctypes.c_uint16 if dtype.bytes == 2 else ctypes.c_uint32
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), (elements,))
