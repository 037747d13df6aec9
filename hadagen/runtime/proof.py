"""Compares a kernel that was compiled on this machine with PyTorch, before its first result is given."""

from __future__ import annotations

import math
from itertools import product

import torch

from hadagen.gpu.driver import LoadedKernel
from hadagen.problem.formats import Format
from hadagen.problem.launch import RowShape
from hadagen.problem.operands import sizes_for
from hadagen.problem.problem import LARGE, DType, Problem
from hadagen.runtime import plain_transform
from hadagen.runtime.plain_rotation import rotate_into
from hadagen.runtime.rotate_arguments import RotateArguments, addresses, pack_matrix
from hadagen.truth import quantizer
from hadagen.truth.accuracy import TORCH_DTYPE, sample_scale

# So many elements at least, because the error of few may be far above that of many.
_ELEMENTS = 1 << 15
_SEED = 1
_FAR_OFF = 0x7F  # a byte of which a NaN or a large number is made
_UNITS = 3  # of a row that is quantized: an odd number of rows or groups of a problem


def is_right(kernel: LoadedKernel, problem: Problem) -> bool:
    """Whether its results are within the error bound of the problem, out of place and in place: for whole tiles and a
    ragged one, more tiles than the GPU holds at once if blocks loop over tiles, for whole rows and rows that are cut
    short if the kernel reads such rows, for a matrix and its transpose if it takes one, and for large values.

    Runs on the current stream of the kernel's device, which must be the current device and must not capture a graph.
    Waits for it. PyTorch's random numbers stay as they are. Raises `DriverError` if a launch fails, and PyTorch's
    `RuntimeError` if memory runs out.
    """
    if problem.io.form:
        form = problem.io.form
        return all(_quantizes_right(kernel, problem, form, size) for size in (1.0, LARGE[problem.io.input]))
    spec, n = kernel.spec, problem.n
    tiles = 2 + (kernel.resident_blocks // spec.cluster if spec.persistent else 0)
    rows = max(tiles * spec.tile_elements // n, _ELEMENTS // n) + 1
    lengths = (n, max(n // 2 + 1, n - 3)) if spec.reads_rows else (n,)
    transposed = (False, True) if problem.transform.has_matrix else (False,)
    device = torch.device("cuda", kernel.device)
    ways = [*product(lengths, transposed, (1.0,)), (n, False, LARGE[problem.io.input])]
    return all(_is_right(kernel, problem, device, rows, *way) for way in ways)


def _is_right(
    kernel: LoadedKernel,
    problem: Problem,
    device: torch.device,
    rows: int,
    columns: int,
    transposed: bool,
    size: float = 1.0,
) -> bool:
    """For rows of so many elements, one behind the other: normal values times `size`."""
    scale = problem.n**-0.5
    numbers = torch.Generator(device).manual_seed(_SEED)
    x = torch.randn(rows, columns, generator=numbers, device=device, dtype=torch.float32)
    x = (x * size).to(TORCH_DTYPE[problem.io.input])
    exact = torch.float64 if problem.io.input is DType.FLOAT32 else torch.float32
    wanted = torch.empty(rows, columns, dtype=exact, device=device)
    of = _operands(problem, transposed, numbers)
    rotate_into(x.to(exact), wanted, of._replace(n=columns, scale=scale), plain_transform.transform)
    stream = torch.cuda.current_stream(device).cuda_stream
    shape = RowShape(columns, columns, columns) if kernel.spec.reads_rows else None
    for y in (torch.full_like(x, math.nan), x):
        kernel.launch(stream, x.data_ptr(), y.data_ptr(), rows * problem.n, scale, shape, addresses(of))
        error = _norm(y.to(exact) - wanted) / _norm(wanted)
        if not error <= problem.error_bound:  # NaN is wrong too
            return False
    return True


def _norm(values: torch.Tensor) -> float:
    """The norm, in float64: squares of large values stay finite."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _quantizes_right(kernel: LoadedKernel, problem: Problem, form: Format, size: float = 1.0) -> bool:
    """Whether codes and scales stand for the rotated values as well as those of the quantizer in PyTorch, but for the
    error bound: for whole tiles and a ragged one, and for more tiles than the GPU holds at once. The values are normal
    ones times `size`."""
    spec, device = kernel.spec, torch.device("cuda", kernel.device)
    columns = _UNITS * problem.unit
    tiles = 2 + (kernel.resident_blocks // spec.cluster if spec.persistent else 0)
    rows = max(tiles * spec.tile_elements, _ELEMENTS) // columns | 1  # odd, so that the last tile is ragged
    numbers, scale = torch.Generator(device).manual_seed(_SEED), problem.n**-0.5
    x = (torch.randn(rows, columns, generator=numbers, device=device) * size).to(TORCH_DTYPE[problem.io.input])
    of = _operands(problem, False, numbers)._replace(scale=scale)
    wanted = x.to(torch.float32, copy=True)
    if problem.n > 1:
        rotate_into(x.float(), wanted, of, plain_transform.transform)
    given = sample_scale(form, rows, device)
    given = given if given is None else given * size
    exact = wanted.double()
    codes, scales = quantizer.empty(rows, columns, form, x.dtype, device)
    for each in (codes, scales):
        quantizer.memory_of(each).fill_(_FAR_OFF)
    operands = addresses(of) | sizes_for(form, rows, columns, _UNITS)
    operands |= {"scales": scales.data_ptr(), "tensor_scale": 0 if given is None else given.data_ptr()}
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch(stream, x.data_ptr(), codes.data_ptr(), rows * columns, scale, None, operands)
    return quantizer.excess_error(codes, scales, exact, form, x.dtype, given).item() <= problem.error_bound


def _operands(problem: Problem, transposed: bool, numbers: torch.Generator) -> RotateArguments:
    """A random matrix of ±1 with a 0, and random signs, where the problem has some."""

    def random(end: int, size: int) -> torch.Tensor:
        return torch.randint(end, (size,), generator=numbers, device=numbers.device, dtype=torch.uint8)

    matrix, orders = None, [1]
    if problem.transform.has_matrix:
        entries = random(2, problem.order**2).to(torch.int8).view(problem.order, problem.order) * 2 - 1
        entries[0, 0] = 0
        matrix, orders = pack_matrix(entries), [problem.order]
    before, after = (random(256, -(-problem.n // 8)) if problem.transform.signed else None for _ in range(2))
    return RotateArguments(
        matrix, orders, before, after, problem.n, problem.transform.swapped, transposed, 1.0, "accurate"
    )
