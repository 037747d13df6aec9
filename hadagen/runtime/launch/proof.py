"""Compares a kernel that was compiled on this machine with PyTorch, before its first result is given."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch

from hadagen.gpu.driver import LoadedKernel
from hadagen.problem.formats import Format
from hadagen.problem.launch import RowShape
from hadagen.problem.operands import MATRIX, sizes_for, verification_operands
from hadagen.problem.problem import LARGE, DType, Problem
from hadagen.problem.prologues import prologue_of
from hadagen.problem.regimes import destinations
from hadagen.runtime.operands.call import Call
from hadagen.runtime.operands.packed import addresses, pack_matrix, pack_pair, pack_real
from hadagen.runtime.operands.spec import Spec
from hadagen.runtime.plain import transform as plain_transform
from hadagen.runtime.plain.rotation import rotate_into
from hadagen.truth import quantizer
from hadagen.truth.accuracy import TORCH_DTYPE, relative_error, sample_scale

# So many elements at least, because the error of few may be far above that of many.
_ELEMENTS = 1 << 15
_SEED = 1
_FAR_OFF = 0x7F  # this byte, repeated, is a NaN or a large number
_UNITS = 3  # of a row of codes: an odd number of rows or groups of a problem


def is_right(kernel: LoadedKernel, problem: Problem) -> bool:
    """Whether a kernel's results are within the error bound of the problem, out of place and in place: for whole tiles
    and a ragged one, more tiles than the GPU holds at once if blocks loop over tiles, for whole rows and rows that are
    cut short if the kernel reads such rows, for a matrix and its transpose if it takes one, and for large values unless
    a prologue may make them larger. Codes and scales may represent the exact values less well than those of PyTorch's
    quantizer do, but only within the error bound.

    Runs on the current stream of the kernel's device, which must be the current device and must not capture a graph.
    Waits for it. PyTorch's random numbers stay as they are. Raises `DriverError` if a launch fails, and PyTorch's
    `RuntimeError` if memory runs out.
    """
    n, form = problem.n, problem.io.form
    large = () if problem.prologue else (LARGE[problem.io.input],)
    if form:
        return all(_quantizes_right(kernel, problem, form, size) for size in (1.0, *large))
    lengths = (n, max(n // 2 + 1, n - 3)) if kernel.spec.reads_rows else (n,)
    transposed = (False, True) if MATRIX.is_taken(problem) else (False,)
    ways = [*product(lengths, transposed, (1.0,)), *((n, False, size) for size in large)]
    return all(_is_right(kernel, problem, *way) for way in ways)


class _Case(NamedTuple):
    """Rows of so many elements, one behind the other, and the exact results for them."""

    x: torch.Tensor
    exact: torch.Tensor  # the transform
    of: Call
    written: dict[str, tuple[torch.Tensor, torch.Tensor]]  # name → the memory of a result, and the exact
    operands: dict[str, int]  # as `LaunchSpec.arguments` takes them
    memory: list[torch.Tensor]  # of operands


def _case(
    kernel: LoadedKernel, problem: Problem, rows: int, columns: int, transposed: bool, size: float, exact: torch.dtype
) -> _Case:
    """Normal values times `size`."""
    device, dtype = torch.device("cuda", kernel.device), TORCH_DTYPE[problem.io.input]
    numbers = torch.Generator(device).manual_seed(_SEED)
    prologue = prologue_of(problem)
    shape = (prologue.width, rows, columns) if prologue and prologue.width > 1 else (rows, columns)
    parts = (torch.randn(shape, generator=numbers, device=device, dtype=torch.float32) * size).to(dtype)
    x = prologue.joined(parts) if prologue else parts
    values = verification_operands(problem, max(1, rows * columns // problem.unit))
    given = {name: torch.from_numpy(each.copy()).to(device) for name, each in values.items()}
    matrix: torch.Tensor | None = None
    orders: tuple[int, ...] = ()
    if "matrix" in given:
        given_matrix, orders = given["matrix"], (problem.order,)
        matrix = pack_real(given_matrix) if problem.transform.real else pack_matrix(given_matrix.to(torch.int8))
    if "right_matrix" in given:
        matrix, orders = pack_pair(given["matrix"], given["right_matrix"]), (problem.order, problem.length)
    n = problem.n if problem.io.form else columns  # a row of codes has several units, others may be cut short
    signs = given.get("signs_before"), given.get("signs_after")
    has_signs, has_signs_after = (each is not None for each in signs)
    spec = Spec(n, orders, has_signs, has_signs_after, problem.transform.swapped, transposed)
    of = Call(spec, problem.n**-0.5, x, matrix, *signs)
    wide, written = parts.to(exact, copy=True), {}
    operands, memory = addresses(of, dtype), list[torch.Tensor]()
    if prologue:
        read = {name: given[name].to(exact) for name in prologue.read}
        made = prologue.results(wide.view(*shape[:-2], -1, n), read, dtype)
        wide = made["x"].reshape(rows, columns)
        written = {name: (torch.full_like(x, math.nan), made[name].view(x.shape)) for name in prologue.written}
        operands |= prologue.numbers(max(1, columns // problem.unit))
        memory = [given[name].to(dtype) for name in prologue.read]
        operands |= {name: each.data_ptr() for name, each in zip(prologue.read, memory, strict=True)}
        operands |= {name: each.data_ptr() for name, (each, _) in written.items()}
    transformed = wide if n == 1 else torch.empty_like(wide)
    if n > 1:
        rotate_into(wide, transformed, of, plain_transform.transform)
    return _Case(x, transformed, of, written, operands, memory)


def _tiles(kernel: LoadedKernel) -> int:
    """More than the GPU holds at once, if blocks loop over tiles."""
    return 2 + (kernel.resident_blocks // kernel.spec.cluster if kernel.spec.persistent else 0)


def _is_right(kernel: LoadedKernel, problem: Problem, columns: int, transposed: bool, size: float) -> bool:
    n = problem.n
    rows = max(_tiles(kernel) * kernel.spec.tile_elements // n, _ELEMENTS // n) + 1
    exact = torch.float64 if problem.io.input is DType.FLOAT32 else torch.float32
    case = _case(kernel, problem, rows, columns, transposed, size, exact)
    x, stream = case.x, torch.cuda.current_stream(case.x.device).cuda_stream
    shape = RowShape(columns, columns, columns) if kernel.spec.reads_rows else None
    for y in (torch.full_like(case.exact, math.nan, dtype=x.dtype), x)[: len(destinations(problem))]:
        kernel.launch(stream, x.data_ptr(), y.data_ptr(), rows * n, case.of.scale, shape, case.operands)
        pairs = [(y, case.exact), *case.written.values()]
        if any(relative_error(found, right.double()) > problem.error_bound for found, right in pairs):
            return False
    return True


def _quantizes_right(kernel: LoadedKernel, problem: Problem, form: Format, size: float) -> bool:
    prologue = prologue_of(problem)
    is_whole = prologue is not None and prologue.is_halved and not prologue.takes_rows(problem)
    columns = problem.unit if is_whole else _UNITS * problem.unit
    rows = max(_tiles(kernel) * kernel.spec.tile_elements, _ELEMENTS) // columns | 1  # odd: the last tile is ragged
    case = _case(kernel, problem, rows, columns, False, size, torch.float32)
    x, device = case.x, case.x.device
    given = sample_scale(form, rows, device)
    given = given if given is None else given * size
    codes, scales = quantizer.empty(rows, columns, form, x.dtype, device)
    for each in (codes, scales):
        quantizer.memory_of(each).fill_(_FAR_OFF)
    operands = case.operands | sizes_for(form, rows, columns, _UNITS)
    operands |= {"scales": scales.data_ptr(), "tensor_scale": 0 if given is None else given.data_ptr()}
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch(stream, x.data_ptr(), codes.data_ptr(), rows * columns, case.of.scale, None, operands)
    errors = [quantizer.excess_error(codes, scales, case.exact.double(), form, x.dtype, given)]
    errors += [relative_error(found, right.double()) for found, right in case.written.values()]
    return all(error.item() <= problem.error_bound for error in errors)  # which NaN is not
