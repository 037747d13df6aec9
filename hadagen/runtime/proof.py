"""Compares a kernel that was compiled on this machine with PyTorch, before its first result is given."""

from __future__ import annotations

import math

import torch

from hadagen.driver import LoadedKernel
from hadagen.launch import RowShape
from hadagen.problem import DType, Problem
from hadagen.runtime.fallback import transform

TORCH_DTYPE = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}
# So many elements at least, because the error of few may be far above that of many.
_ELEMENTS = 1 << 15
_SEED = 1


def is_right(kernel: LoadedKernel, problem: Problem) -> bool:
    """Whether its results are within the error bound of the problem, out of place and in place: for whole tiles and a
    ragged one, of rows that are cut short if the kernel reads such rows.

    Runs on the current stream of the device, which must not be captured, and waits for it. PyTorch's random numbers
    stay as they are. Raises `DriverError` if a launch fails, and PyTorch's `RuntimeError` if memory runs out.
    """
    n = problem.n
    rows = max(2 * max(1, kernel.spec.tile_elements // n), _ELEMENTS // n) + 1
    columns = max(n // 2 + 1, n - 3) if kernel.spec.reads_rows else n
    scale = n**-0.5
    device = torch.device("cuda", kernel.device)
    numbers = torch.Generator(device).manual_seed(_SEED)
    x = torch.randn(rows, columns, generator=numbers, device=device, dtype=torch.float32)
    x = x.to(TORCH_DTYPE[problem.io.input])
    wanted = torch.empty(rows, columns, dtype=torch.float64, device=device)
    transform(x.double(), wanted, scale)
    stream = torch.cuda.current_stream(device).cuda_stream
    shape = RowShape(columns, columns, columns) if kernel.spec.reads_rows else None
    for y in (torch.full_like(x, math.nan), x):
        kernel.launch(stream, x.data_ptr(), y.data_ptr(), rows * n, scale, shape)
        error = torch.linalg.vector_norm(y.double() - wanted) / torch.linalg.vector_norm(wanted)
        if not error.item() <= problem.error_bound:  # NaN is wrong too
            return False
    return True
