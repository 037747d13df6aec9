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
    ragged one, more tiles than the GPU holds at once if blocks loop over tiles, and for whole rows and rows that are
    cut short if the kernel reads such rows.

    Runs on the current stream of the kernel's device, which must be the current device and must not capture a graph.
    Waits for it. PyTorch's random numbers stay as they are. Raises `DriverError` if a launch fails, and PyTorch's
    `RuntimeError` if memory runs out.
    """
    spec, n = kernel.spec, problem.n
    tiles = 2 + (kernel.resident_blocks // spec.cluster if spec.persistent else 0)
    rows = max(tiles * spec.tile_elements // n, _ELEMENTS // n) + 1
    lengths = (n, max(n // 2 + 1, n - 3)) if spec.reads_rows else (n,)
    return all(_is_right(kernel, problem, rows, columns) for columns in lengths)


def _is_right(kernel: LoadedKernel, problem: Problem, rows: int, columns: int) -> bool:
    """For rows of so many elements, one behind the other."""
    device, scale = torch.device("cuda", kernel.device), problem.n**-0.5
    numbers = torch.Generator(device).manual_seed(_SEED)
    x = torch.randn(rows, columns, generator=numbers, device=device, dtype=torch.float32)
    x = x.to(TORCH_DTYPE[problem.io.input])
    exact = torch.float64 if problem.io.input is DType.FLOAT32 else torch.float32
    wanted = torch.empty(rows, columns, dtype=exact, device=device)
    transform(x.to(exact), wanted, scale)
    stream = torch.cuda.current_stream(device).cuda_stream
    shape = RowShape(columns, columns, columns) if kernel.spec.reads_rows else None
    for y in (torch.full_like(x, math.nan), x):
        kernel.launch(stream, x.data_ptr(), y.data_ptr(), rows * problem.n, scale, shape)
        error = torch.linalg.vector_norm(y.to(exact) - wanted) / torch.linalg.vector_norm(wanted)
        if not error.item() <= problem.error_bound:  # NaN is wrong too
            return False
    return True
