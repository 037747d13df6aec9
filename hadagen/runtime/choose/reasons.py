"""Why PyTorch computes a call on a GPU, and what would have a kernel: for the warning of the call, for `best_config`
and `warmup`, which say it before the call, and for the table in docs/formats.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from hadagen.errors import ToolchainError, UsageError, printable
from hadagen.problem.formats import ROW, Format
from hadagen.problem.problem import (
    LEAST_GROUP,
    MAX_LOG2_N,
    DType,
    Io,
    Numerics,
    Problem,
    Rows,
    Transform,
    transform_for,
)
from hadagen.problem.regimes import Destination
from hadagen.problem.target import nearest_arch
from hadagen.runtime.choose import bundles, tables
from hadagen.runtime.choose.device import Device, how_to_get_kernels
from hadagen.runtime.choose.entries import choose_from_bundles, has_kernel, is_served, no_such_bits

_VECTOR = 16  # bytes, of which the rows of a kernel have a multiple
_TYPES = tuple(each.value for each in DType)


class Asked(NamedTuple):
    """What decides whether a call has a kernel.

    n: the elements of a row, or of a block that is rotated. dtype: the type of x, such as "float16". columns: the
    elements of a row of the result; 0 for n. orders: of the matrices, if there are some; and whether one has `real`
    entries. form, round_first: of `rotate_quantize`. destination: that of the result. scale: None for any that kernels
    take. misfit: why kernels do not take the tensors of the call, if they take others.
    """

    n: int
    dtype: str
    columns: int = 0
    orders: Sequence[int] = ()
    real: bool = False
    signed: bool = False
    swapped: bool = False
    rows: Rows = Rows.CONTIGUOUS
    form: Format | None = None
    round_first: bool = False
    prologue: str = ""
    numerics: str = "accurate"
    batch_invariant: bool = False
    destination: Destination = Destination.OUT_OF_PLACE
    scale: float | None = None
    misfit: str | None = None

    @classmethod
    def of(cls, problem: Problem, columns: int, destination: Destination, batch_invariant: bool) -> Asked:
        """What calls of a problem ask for, with results in rows of so many elements."""
        of, io = problem.transform, problem.io
        orders = (of.order, of.length) if of.paired else (of.order,) * of.has_matrix
        parts = columns, orders, of.real, of.signed, of.swapped, io.rows, io.form, bool(io.form and io.form.rounded)
        asked = problem.prologue, io.numerics.value, batch_invariant, destination
        return cls(of.n, io.input.value, *parts, *asked)

    @property
    def problem(self) -> Problem:
        """The problem of its kernels. Raises `UsageError`, with the reason, if there can be none."""
        columns = self.columns or self.n
        if self.dtype not in _TYPES:
            raise UsageError(f"{self.dtype} has no kernels; pass {', '.join(_TYPES[:-1])} or {_TYPES[-1]}")
        if self.n == 1 and self.form is None:
            raise UsageError(
                f"no kernel transforms rows of {columns} elements"
                + (f" after {self.prologue}" if self.prologue else "")
                + "; pass rows of a power of two from 2 on, or use a hadagen.Rotation of the whole row"
            )
        if self.swapped and self.form is None:
            raise UsageError(
                "the regular matrix has kernels only where the result is quantized; use rotate_quantize, or the matrix "
                "'auto'"
            )
        transform = transform_for(
            self.n, self.orders, signed=self.signed, swapped=self.swapped and self.n > 1, real=self.real
        )
        form = self.form and self.form.by_kernels.for_rows(columns, self.round_first)
        dtype = DType(self.dtype)
        io = Io(dtype, form or dtype, Numerics(self.numerics), self.rows)
        return Problem(transform, io, self.prologue)

    @property
    def text(self) -> str:
        """The key of its problem, or what is asked for if there is none."""
        try:
            return self.problem.key
        except UsageError:
            to = f" to {self.form.text}" if self.form else ""
            after = f" after {self.prologue}" if self.prologue else ""
            return f"n = {self.n} of {self.dtype}{to}{after}"


def why_none(asked: Asked, device: Device | None, *, advises: bool = True) -> str | None:
    """Why no kernel computes what is asked for on a device, and what would have a kernel, without a full stop; None if
    a kernel does.

    device: None for a GPU of another maker than NVIDIA. advises: whether to try what would have a kernel where no knobs
    are legal, which takes a moment.

    Raises `StorageError` if HADAGEN_BUNDLE names a file that is damaged or no bundle.
    """
    if device is None:
        return "PyTorch is built for GPUs of another maker here; kernels need a PyTorch for CUDA and a GPU of NVIDIA"
    try:
        problem = asked.problem
    except UsageError as error:
        return str(error)
    gpu = f"{printable(device.gpu)} ({device.arch})" if device.gpu else device.arch
    if not is_served(device):
        return f"no bundle has kernels for {gpu}; {how_to_get_kernels(device.arch)}"
    try:
        return _why_none(problem, asked, device, gpu, advises)
    except ToolchainError as error:
        return f"no kernel is made for {problem.key}: {error}"


def _why_none(problem: Problem, asked: Asked, device: Device, gpu: str, advises: bool) -> str | None:
    def has(other: Problem, batch_invariant: bool = False) -> bool:
        return has_kernel(other, asked.destination, device, batch_invariant=batch_invariant)

    if has(problem, asked.batch_invariant):
        return asked.misfit or _why_not_scale(problem, asked, device)
    if why := tables.unmade.get(problem):
        return f"no kernel is made for {problem.key}: {why}"
    if asked.batch_invariant and has(problem):
        return f"{no_such_bits(problem, device)}; leave out batch_invariant"
    from hadagen.compiler.recipes import why_no_knobs  # here, because a call that finds a cubin needs none of it

    arch = nearest_arch(device.arch)
    why = why_no_knobs(problem, arch) if arch else None
    if why is None:
        return f"no bundle has a kernel of {problem.key} for {gpu}; {how_to_tune(problem, device.arch)}"
    # The advice of a rule is on knobs, or names no value that was tried.
    remedies = [*islice(_remedies(problem, asked.columns or asked.n, has), 2 if advises else 0)]
    return f"{why.partition(' (')[0]}; {', or '.join(remedies)}" if remedies else why


def _why_not_scale(problem: Problem, asked: Asked, device: Device) -> str | None:
    if asked.scale is None:
        return None
    accurate = problem.with_io(numerics=Numerics.ACCURATE)  # which takes the most scales
    columns = asked.columns or asked.n
    _, chosen = choose_from_bundles(accurate, asked.destination, columns, device, batch_invariant=asked.batch_invariant)
    least, most = chosen[0].launch.scale_form.range if chosen else (0.0, math.inf)
    if least <= abs(asked.scale) <= most:
        return None
    return f"scale = {asked.scale:.3g} is out of the range of its kernels; pass one from {least:.3g} to {most:.3g}"


def _remedies(problem: Problem, columns: int, has: Callable[[Problem], bool]) -> Iterator[str]:
    """What would have a kernel in place of a problem: other types, shorter rows, a prologue apart, or blocks."""
    io, form = problem.io, problem.io.form
    if form and form.group == columns and (rest := -columns * io.input.bytes % _VECTOR):
        yield f"pad rows to {columns + rest // io.input.bytes} elements"
        return
    found = []
    for each in {DType.FLOAT32: (DType.BFLOAT16, DType.FLOAT16), DType.FLOAT16: (DType.BFLOAT16,)}.get(io.input, ()):
        if has(replace(problem, io=replace(io, input=each, output=form or each))):
            found.append(each)
    if found:
        yield f"pass {' or '.join(each.value for each in found)}"
    if form and form.group == columns and ROW in form.groups and (most := _longest(problem, form, columns, has)):
        yield f"take rows of up to {most} elements"
    if problem.prologue and has(replace(problem, prologue="")):
        yield f"compute {problem.prologue} before the call, without before="
    block = min(columns & -columns, 1 << MAX_LOG2_N)
    while block > 1:
        if has(replace(problem, transform=Transform(block))):
            yield f"rotate in blocks of {block}"
            return
        block //= 2
    if form and problem.n > 1 and has(problem.with_io(output=io.input)):
        yield "rotate without a format, and quantize the result"


def _longest(problem: Problem, form: Format, columns: int, has: Callable[[Problem], bool]) -> int:
    """A number of whole blocks below so many columns with a kernel for rows with one scale; 0 if none is found. Longer
    rows are taken to have none if shorter ones have none."""
    step = math.lcm(problem.n, LEAST_GROUP, _VECTOR // problem.io.input.bytes)

    def fits(count: int) -> bool:
        return has(problem.with_io(output=replace(form, group=count * step)))

    few, many = columns // step // 2, columns // step
    while few and not fits(few):
        few, many = few // 2, few
    while few and many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return few * step


def how_to_tune(problem: Problem, arch: str) -> str:
    """Advice if no bundle has kernels of a problem for an arch: to tune all problems if the arch has no bundle and the
    problem no matrix, else to tune this problem without its signs and swapped bits."""
    how = how_to_get_kernels(arch)
    if nearest_arch(arch) and (problem.transform.has_matrix or has_bundle(arch)):
        how += f" --problem {replace(problem, transform=replace(problem.transform, signed=False, swapped=False)).key}"
    return how


def has_bundle(arch: str) -> bool:
    """Whether there is a bundle of this very arch."""
    return any(bundle.arch == arch for bundle in bundles.known())
