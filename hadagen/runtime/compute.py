"""The transform of tensors that have memory, without derivatives: by a kernel if there is one, else in plain PyTorch.

There are two kinds of kernels. A *contiguous* kernel takes whole rows of n elements without gaps, at addresses that are
multiples of 16 bytes. A *pitched* kernel takes rows of up to n elements, which it zero-pads, at any address and any
distance from each other. Only tensors with yet another order of elements are copied, such as transposed ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hadagen.driver import Launch, LoadedKernel
from hadagen.errors import TensorError
from hadagen.launch import RowShape
from hadagen.problem import Problem, Rows, padded_length
from hadagen.runtime import fallback, kernels, repeat, streams, tables
from hadagen.runtime.checks import check_call, check_like, check_writable
from hadagen.runtime.repeat import ALIGNMENT, increment_version


class Options(NamedTuple):
    """What a call asks for, beside its tensors and where the result goes."""

    scale: float
    numerics: str
    batch_invariant: bool = False


class Call(NamedTuple):
    """A call with arguments that were checked."""

    run: repeat.Run
    options: Options


# `key_of` → what to do for all calls that differ only in the address of x, by a multiple of 16. So a repeated call
# costs one look-up. Only checked arguments are in here.
calls: dict[tuple[Any, ...], Call] = tables.table()
# The same for contiguous tensors and out=, with the bytes that must lie between the two addresses.
_calls_into: dict[tuple[Any, ...], tuple[Launch, int]] = tables.table()


def key_of(
    x: torch.Tensor, address: int, scale: float, numerics: str, batch_invariant: bool, inplace: bool
) -> tuple[Any, ...]:
    """The key of a call in `calls`."""
    strides = x.is_contiguous() or x.stride()
    device = x.get_device()
    return x.shape, strides, x.dtype, device, address % ALIGNMENT, scale, numerics, batch_invariant, inplace


def compute(x: torch.Tensor, options: Options, inplace: bool) -> torch.Tensor:
    """The transform of x, into x or into a new contiguous tensor. Raises what `hadamard_transform` does."""
    try:
        address = x.data_ptr()
        key = key_of(x, address, *options, inplace)
        call = calls[key]
    except KeyError:
        pass
    except (RuntimeError, TypeError):  # a sparse or nested tensor, or a bad scale
        check_call(x, options.scale, options.numerics)
        raise
    else:
        if address:
            return call.run(x, address)
    check_call(x, options.scale, options.numerics)
    if inplace:
        check_writable(x)
    if takes_kernels(x):
        prepared = _prepare_call(x, address, options, inplace)
        if prepared is not None:
            tables.remember(calls, key, prepared)
            return prepared.run(x, address)
        result = _transformed_copy(x, options)
        if result is not None:
            return x.copy_(result) if inplace else result.contiguous()
    if inplace and x.is_contiguous():
        increment_version((x,))
        fallback.transform(x, x, options.scale, batch_invariant=options.batch_invariant)
        return x
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    fallback.transform(x, y, options.scale, batch_invariant=options.batch_invariant)
    return x.copy_(y) if inplace else y


def compute_into(x: torch.Tensor, y: torch.Tensor, options: Options) -> None:
    """The transform of x into y, which has the same shape, type and device. y is the same memory as x, or shares none.

    If it is hard to know whether they share memory, the result is right anyway. Raises what `hadamard_transform` does.
    """
    try:
        source, target = x.data_ptr(), y.data_ptr()
        dense = x.is_contiguous() and y.is_contiguous()
        like = x.shape, x.dtype, x.get_device(), y.shape, y.dtype, y.get_device()
        key = (*like, dense, (source | target) % ALIGNMENT, options)
        launch, size = _calls_into[key]
    except KeyError:
        pass
    except (RuntimeError, TypeError):  # a sparse or nested tensor, or a bad scale
        check_call(x, options.scale, options.numerics)
        check_like(x, y)
        raise
    else:
        if source and target and abs(source - target) >= size and not y.is_inference():
            increment_version((y,))
            streams.queue(launch, x.get_device(), source, target)
            return
    check_call(x, options.scale, options.numerics)
    check_like(x, y)
    check_writable(y)
    if source == target and (dense or y.stride() == x.stride()):
        compute(y, options, True)
        return
    if dense and abs(source - target) < x.nbytes:
        raise TensorError("out overlaps x without being x; pass x itself or memory of its own")
    increment_version((y,))
    has_kernels = takes_kernels(x)
    if may_overlap(x, y) or (has_kernels and row_pitch(x) is None):
        x = x.clone(memory_format=torch.contiguous_format)
    if has_kernels:
        found = _find_launch(x, y, options)
        if found is not None:
            if dense:
                tables.remember(_calls_into, key, (found, x.nbytes))
            streams.queue(found, x.get_device(), x.data_ptr(), target)
            return
        result = _transformed_copy(x, options)
        if result is not None:
            y.copy_(result)
            return
    if y.is_contiguous():
        fallback.transform(x, y, options.scale, batch_invariant=options.batch_invariant)
    else:
        y.copy_(compute(x, options, False))


def takes_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and x.numel() > 0


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


def _prepare_call(x: torch.Tensor, address: int, options: Options, inplace: bool) -> Call | None:
    pitch = row_pitch(x)
    if pitch is None:
        return None
    columns = x.shape[-1]
    aligned = address % ALIGNMENT == 0
    target_pitch = pitch if inplace else columns
    launch = _prepare_launch(x, pitch, target_pitch, aligned, inplace, options)
    if launch is None:
        return None
    return Call(repeat.runner(x, launch, inplace), options)


def _prepare_launch(
    x: torch.Tensor, x_pitch: int, y_pitch: int, aligned: bool, in_place: bool, options: Options
) -> Launch | None:
    """The launch of a kernel for x and a target with these pitches, in elements; None if there is no such kernel."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    n = padded_length(columns)
    dense = aligned and x_pitch == y_pitch == columns == n
    for rows_lie in (Rows.CONTIGUOUS, Rows.PITCHED) if dense else (Rows.PITCHED,):
        problem = kernels.problem_of(n, x.dtype, options.numerics, rows_lie)
        if problem is None:
            return None
        kernel = _find_kernel(x, problem, in_place, rows * n, options)
        if kernel is not None:
            return kernel.prepared(rows * n, options.scale, RowShape(columns, x_pitch, y_pitch))
    return None


def _find_kernel(
    x: torch.Tensor, problem: Problem, in_place: bool, elements: int, options: Options
) -> LoadedKernel | None:
    """The kernel for a problem, on the device of x; None if PyTorch must do the work."""
    kind = kernels.Kind(x.get_device(), problem, in_place, options.batch_invariant)
    return kernels.find_for_scale(kind, elements, options.scale)


def _find_launch(x: torch.Tensor, y: torch.Tensor, options: Options) -> Launch | None:
    """The launch of a kernel that takes x and y as they are; None if there is none. x and y share no element."""
    x_pitch, y_pitch = row_pitch(x), row_pitch(y)
    if x_pitch is None or y_pitch is None:
        return None
    aligned = (x.data_ptr() | y.data_ptr()) % ALIGNMENT == 0
    return _prepare_launch(x, x_pitch, y_pitch, aligned, False, options)


def _transformed_copy(x: torch.Tensor, options: Options) -> torch.Tensor | None:
    """The transform of x by a kernel that works in place on a copy of x; None if there is no kernel."""
    columns = x.shape[-1]
    n, rows = padded_length(columns), x.numel() // columns
    kinds = ((columns, Rows.PITCHED), (n, Rows.CONTIGUOUS))  # elements of a row of the copy, and how rows lie
    for width, rows_lie in kinds if columns < n else reversed(kinds):
        problem = kernels.problem_of(n, x.dtype, options.numerics, rows_lie)
        if problem is None:
            return None
        kernel = _find_kernel(x, problem, True, rows * n, options)
        if kernel is None:
            continue
        copy = x.new_empty((*x.shape[:-1], width))
        part = copy[..., :columns]
        part.copy_(x)
        copy[..., columns:].zero_()
        launch = kernel.prepared(rows * n, options.scale, RowShape(width, width, width))
        streams.queue(launch, x.get_device(), copy.data_ptr(), copy.data_ptr())
        return part
    return None


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


def check_apart(y: torch.Tensor, name: str, others: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises `TensorError` if y, which is written, shares memory with one of the others, which all have names."""
    size = span(y)
    for other, tensor in others:
        if -size < y.data_ptr() - tensor.data_ptr() < span(tensor):
            raise TensorError(f"{name} shares memory with {other}; pass memory of its own")


def span(x: torch.Tensor) -> int:
    """Bytes from the begin of the first to the end of the last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0
