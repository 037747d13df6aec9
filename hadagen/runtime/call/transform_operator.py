"""The transform of tensors that have memory, without derivatives: by a kernel if there is one, else in plain PyTorch.

There are two kinds of kernels. A *contiguous* kernel takes whole rows of n elements without gaps, at addresses that are
multiples of 16 bytes. A *pitched* kernel takes rows of up to n elements, which it zero-pads, at any address and any
distance from each other. Only tensors with yet another order of elements are copied, such as transposed ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hadagen.errors import TensorError
from hadagen.gpu.driver import Launch
from hadagen.problem.launch import RowShape
from hadagen.problem.problem import Rows, padded_length
from hadagen.problem.regimes import Destination
from hadagen.runtime.call import calls, decompositions, slow
from hadagen.runtime.call.calls import ALIGNMENT, Run, increment_version, span
from hadagen.runtime.call.operators import LinearOperator
from hadagen.runtime.checks import check_call, check_like, check_writable, plain
from hadagen.runtime.choose.reasons import Asked
from hadagen.runtime.launch import kernels, streams
from hadagen.runtime.plain import transform as plain_transform


class Options(NamedTuple):
    """The options of a call: all but its tensors and its destination."""

    scale: float
    numerics: str
    batch_invariant: bool = False


def compute(x: torch.Tensor, options: Options, inplace: bool) -> torch.Tensor:
    """The transform of x, into x or into a new contiguous tensor. Raises what `hadamard_transform` does."""
    run = calls.known(x, options, inplace)
    if run is None:
        check_call(x, options.scale, options.numerics)
        if inplace:
            check_writable(x)
        if calls.takes_kernels(x):
            pitch, aligned = row_pitch(x), x.data_ptr() % ALIGNMENT == 0
            launch = _launch(x, pitch, pitch if inplace else x.shape[-1], aligned, inplace, options)
            run = _remembered(x, launch, options, inplace)
    if run is not None:
        return run.over(x, x.data_ptr()) if inplace else run.new(x.data_ptr())
    result = _transformed_copy(x, options)
    if result is None:
        with slow.path(x, lambda: _asked(x, options)):
            if inplace and x.is_contiguous():
                result = x
                increment_version((x,))
            else:
                result = torch.empty_like(x, memory_format=torch.contiguous_format)
            plain_transform.transform(x, result, options.scale, batch_invariant=options.batch_invariant)
    return x.copy_(result) if inplace else result.contiguous()


def compute_into(x: torch.Tensor, y: torch.Tensor, options: Options) -> None:
    """The transform of x into y, which has the same shape, type and device. y is the same memory as x, or shares none.

    If it is hard to know whether they share memory, the result is right anyway. Raises what `hadamard_transform` does.
    """
    run = calls.known(x, options)
    places = run and run.places(x, (y,))
    if run and places:
        return run.into((y,), *places)
    check_call(x, options.scale, options.numerics)
    check_like(x, y)
    check_writable(y)
    dense = x.is_contiguous() and y.is_contiguous()
    if x.data_ptr() == y.data_ptr() and (dense or y.stride() == x.stride()):
        compute(y, options, True)
        return None
    if dense and abs(x.data_ptr() - y.data_ptr()) < x.nbytes:
        raise TensorError("out overlaps x without being x; pass x itself or memory of its own")
    increment_version((y,))
    has_kernels = calls.takes_kernels(x)
    if may_overlap(x, y) or (has_kernels and row_pitch(x) is None):
        x = x.clone(memory_format=torch.contiguous_format)
    if has_kernels:
        aligned = (x.data_ptr() | y.data_ptr()) % ALIGNMENT == 0
        found = _launch(x, row_pitch(x), row_pitch(y), aligned, False, options)
        if found is not None:
            if calls.is_ready(y):
                _remembered(x, found, options, False)
            return streams.queue(found, x.get_device(), x.data_ptr(), y.data_ptr())
    if y.is_contiguous() and not has_kernels:
        plain_transform.transform(x, y, options.scale, batch_invariant=options.batch_invariant)
    else:
        y.copy_(compute(x, options, False))
    return None


def row_pitch(x: torch.Tensor) -> int | None:
    """Elements from one row of x to the next; None if rows have gaps or are not all equally far apart."""
    (*sizes, columns), (*strides, step) = x.shape, x.stride()
    if columns > 1 and step != 1:
        return None
    rows, pitch = 1, columns
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if rows == 1:
            pitch = stride
        elif stride != pitch * rows:
            return None
        rows *= size
    return pitch


def _remembered(x: torch.Tensor, launch: Launch | None, options: Options, inplace: bool) -> Run | None:
    """The run of all later calls like this one; None if there is no launch for them."""
    if launch is None:
        return None
    return calls.remember(x, options, inplace, Run(x, launch, (calls.like(x),), HADAMARD, options))


def _launch(
    x: torch.Tensor, x_pitch: int | None, y_pitch: int | None, aligned: bool, in_place: bool, options: Options
) -> Launch | None:
    """The launch of a kernel that takes x and a target as they are, with these `row_pitch`es; None if there is none. In
    place or without a shared element."""
    if x_pitch is None or y_pitch is None:
        return None
    columns = x.shape[-1]
    rows, n = x.numel() // columns, padded_length(columns)
    dense = aligned and x_pitch == y_pitch == columns == n
    for rows_lie in (Rows.CONTIGUOUS, Rows.PITCHED) if dense else (Rows.PITCHED,):
        launch = _launch_of(x, rows_lie, in_place, options, RowShape(columns, x_pitch, y_pitch), rows * n)
        if launch is not None:
            return launch
    return None


def _launch_of(
    x: torch.Tensor, rows_lie: Rows, in_place: bool, options: Options, shape: RowShape, elements: int
) -> Launch | None:
    problem = kernels.problem_of(padded_length(x.shape[-1]), x.dtype, options.numerics, rows_lie)
    if problem is None:
        return None
    kind = kernels.Kind(x.get_device(), problem, in_place, options.batch_invariant)
    return kernels.prepared(kind, elements, options.scale, shape)


def _transformed_copy(x: torch.Tensor, options: Options) -> torch.Tensor | None:
    """The transform of x by a kernel that works in place on a copy of x; None if there is no kernel."""
    if not calls.takes_kernels(x):
        return None
    columns = x.shape[-1]
    n, rows = padded_length(columns), x.numel() // columns
    kinds = ((columns, Rows.PITCHED), (n, Rows.CONTIGUOUS))  # elements of a row of the copy, and how rows lie
    for width, rows_lie in kinds if columns < n else reversed(kinds):
        launch = _launch_of(x, rows_lie, True, options, RowShape(width, width, width), rows * n)
        if launch is None:
            continue
        copy = x.new_empty((*x.shape[:-1], width))
        part = copy[..., :columns]
        part.copy_(x)
        copy[..., columns:].zero_()
        streams.queue(launch, x.get_device(), copy.data_ptr(), copy.data_ptr())
        return part
    return None


def _asked(x: torch.Tensor, options: Options) -> Asked:
    """What a call asks for where no kernel takes a copy of x either, which is transformed in place."""
    columns = x.shape[-1]
    n = padded_length(columns)
    lie = Rows.CONTIGUOUS if columns == n else Rows.PITCHED
    asked = Asked(n, plain(x.dtype), rows=lie, numerics=options.numerics, batch_invariant=options.batch_invariant)
    return asked._replace(destination=Destination.IN_PLACE, scale=float(options.scale))


def may_overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether x and y may share an element. Rows that interleave are recognized as not sharing any."""
    apart = y.data_ptr() - x.data_ptr()
    if apart >= span(x) or -apart >= span(y):
        return False
    pitch, columns = row_pitch(x), x.shape[-1]
    if pitch is None or pitch != row_pitch(y) or not pitch:
        return True
    offset, rest = divmod(apart, x.element_size())
    return rest != 0 or not columns <= offset % pitch <= pitch - columns


# The matrix is symmetric. If rows are padded and the result is cut, its first rows and columns are left, which are
# symmetric too. So gradients and tangents are transformed exactly like x. The scale is a Scalar: for each float
# torch.compile would compile anew.
HADAMARD = LinearOperator(
    "hadamard_transform",
    Options,
    "Scalar scale, str numerics",
    "bool batch_invariant=False",
    compute=lambda x, options, inplace: compute(x, options, inplace),
    compute_into=lambda x, out, options: compute_into(x, out, options),
    check=lambda x, options: check_call(x, options.scale, options.numerics),
    transpose=lambda options: options,
    decomposed=lambda x, options: decompositions.transform(x, options.scale),
)
