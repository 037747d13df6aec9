"""Calls that come again. A `Run` is the launch that a call makes. One table remembers the runs of transforms, rotations
and quantizers, so that a call that comes again costs one look-up and one launch.

A kernel that takes contiguous rows takes them at addresses that are multiples of 16 bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import mul
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_unary

from hadagen.errors import TensorError
from hadagen.gpu.driver import Launch
from hadagen.problem.formats import Format
from hadagen.problem.launch import RowShape
from hadagen.problem.problem import Problem, Rows
from hadagen.problem.prologues import Prologue
from hadagen.runtime.call.decompositions import check_exporter
from hadagen.runtime.checks import check_writable
from hadagen.runtime.choose import tables
from hadagen.runtime.launch import kernels, streams
from hadagen.runtime.operands.rotate_arguments import RotateArguments, addresses, is_packed, is_pair, is_real

ALIGNMENT = 16  # bytes; contiguous kernels read and write vectors of this size
_MOST_UNITS = 1 << 31  # of the result of a prologue with two parts, as `prologues.reciprocal` says
_MAX_CALLS = 4096  # because a program may have ever new row counts

Output = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and type of a result
Range = tuple[int, int]  # addresses: the first, and the first behind the last

# Needed in every call, so that they are looked up only once.
_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
dispatch_modes: Any = torch._C._len_torch_dispatch_stack
in_functorch: Any = torch._C._are_functorch_transforms_active
_unpack_dual: Any = torch._C._VariableFunctions._unpack_dual
_next_number = itertools.count().__next__


def _find_increment_version() -> Any:
    """A function that tells autograd of a write to tensors: PyTorch's, without its wrapper if that takes several."""
    try:
        torch._C._increment_version(())
    except TypeError:
        return torch.autograd.graph.increment_version
    return torch._C._increment_version


def _find_empty_strided(device_type: str) -> Any:
    """A function that makes a tensor on the current device, from sizes, strides and type. If PyTorch has it, it is that
    of code of torch.compile, which takes half the time of torch.empty_like."""

    def empty_strided(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device_type)

    guards = getattr(torch._C, "_dynamo", None)
    return getattr(getattr(guards, "guards", None), f"_empty_strided_{device_type}", empty_strided)


increment_version = _find_increment_version()
_EMPTY = {name: _find_empty_strided(name) for name in ("cuda", "cpu")}


class Run:
    """One launch of a kernel, for all tensors that differ from x in their address only, by a multiple of 16 bytes.

    launch: takes the addresses of x, of each result, and of all other tensors that differ from call to call.
    outputs: shape, strides and type of each result. Tensors that are written instead have the same.
    of, options: the operator with whose derivative the call comes again, and its options; or the format of codes.
    make_scales: makes the second result; by default it holds any values.
    clears: whether a tensor that takes the last result is filled with zeros first.
    """

    def __init__(
        self,
        x: torch.Tensor,
        launch: Launch,
        outputs: Sequence[Output],
        of: Any = None,
        options: Any = None,
        make_scales: Callable[[], torch.Tensor] | None = None,
        clears: bool = False,
    ) -> None:
        self.launch, self.device, self.outputs, self.of, self.options = launch, x.get_device(), outputs, of, options
        self._bytes, self._sizes = span(x), [_bytes_of(output) for output in outputs]
        makers: list[Callable[[], torch.Tensor]] = [partial(_EMPTY[x.device.type], *output) for output in outputs]
        if make_scales is not None:
            makers[1] = make_scales
        self._make, *self._others = makers
        self._clears = clears
        self._alone = torch.cuda.device_count() == 1  # a single device is always current

    def new(self, x: int, *others: int) -> Any:
        """The result, or a tuple of the results, for x at this address. others: the last arguments of the launch."""
        device = self.device
        if not (self._alone or streams.current_device() == device):
            with torch.cuda.device(device):
                return self.new(x, *others)
        y: torch.Tensor = self._make()
        result: Any = y
        if self._others:
            more = [make() for make in self._others]
            result, others = (y, *more), (*[each.data_ptr() for each in more], *others)
        if others:
            self.launch(streams.raw_stream(device), x, y.data_ptr(), *others)
        else:
            self.launch(streams.raw_stream(device), x, y.data_ptr())
        return result

    def into(self, out: Sequence[torch.Tensor], *addresses: int) -> None:
        """Write the results into tensors. addresses: those of x and of the tensors, and then `others` of `new`."""
        if self._clears:
            out[-1].zero_()
        increment_version(out)  # PyTorch does not see that a kernel writes
        if self._alone or streams.current_device() == self.device:
            self.launch(streams.raw_stream(self.device), *addresses)
        else:
            streams.queue(self.launch, self.device, *addresses)

    def over(self, x: torch.Tensor, address: int) -> torch.Tensor:
        """Write the result into x, which lies at this address."""
        if x.is_inference():
            check_writable(x)
        self.into((x,), address, address)
        return x

    def places(self, x: torch.Tensor, out: Sequence[Any], kept: Iterable[Range] = ()) -> list[int] | None:
        """The addresses of x and of a caller's tensors that are like `outputs` and may be written; None if they are
        anything else, or share memory with each other, with x or with what is kept."""
        with_gradient = _is_grad_enabled()
        if in_functorch() or (with_gradient and x.requires_grad):
            return None
        begin = x.data_ptr()
        found, taken = [begin], [(begin, begin + self._bytes), *kept]
        try:
            for y, (shape, strides, dtype), size in zip(out, self.outputs, self._sizes):  # noqa: B905 (faster)
                if (
                    type(y) is not _Tensor
                    or y.dtype != dtype
                    or y.shape != shape
                    or y.stride() != strides
                    or y.get_device() != self.device
                    or y.is_neg()
                    or (with_gradient and y.requires_grad)
                    or (y.is_inference() and not torch.is_inference_mode_enabled())
                ):
                    return None
                begin = y.data_ptr()
                end = begin + size
                for first, last in taken:
                    if first < end and begin < last:
                        return None
                if not begin or begin % ALIGNMENT:
                    return None
                taken.append((begin, end))
                found.append(begin)
        except RuntimeError:  # it has no shape, strides or memory
            return None
        return found


def is_ready(x: torch.Tensor) -> bool:
    """Whether kernels for contiguous rows take x as it lies."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def ready(x: torch.Tensor) -> torch.Tensor:
    """x as such kernels take it: itself or a copy."""
    return x if is_ready(x) else x.clone(memory_format=torch.contiguous_format)


def span(x: torch.Tensor) -> int:
    """Bytes from the begin of the first to the end of the last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


def check_apart(
    y: torch.Tensor, name: str, others: Iterable[tuple[str, torch.Tensor]], size: int | None = None
) -> None:
    """Raises `TensorError` if y, which is written, shares memory with one of the others, which all have names. size:
    bytes that are written, by default `span`."""
    size = span(y) if size is None else size
    for other, tensor in others:
        if -size < y.data_ptr() - tensor.data_ptr() < span(tensor):
            raise TensorError(f"{name} shares memory with {other}; pass memory of its own")


def like(x: torch.Tensor) -> Output:
    """A contiguous result of x's shape and type."""
    return tuple(x.shape), torch.empty(x.shape, device="meta").stride(), x.dtype


def _bytes_of(output: Output) -> int:
    """The bytes of the memory of a result, counting the zeros that fill up columns."""
    shape, strides, dtype = output
    return 0 if 0 in shape else max(map(mul, shape, strides), default=1) * dtype.itemsize


# ---- calls that come again -------------------------------------------------------------------------------------------
def is_plain(x: Any) -> bool:
    """Whether x is a tensor of no subclass, and no mode, trace of Dynamo or lazy negation has to do with it. So a call
    need not go through PyTorch's dispatcher, but for what x alone does not tell: derivatives and transforms."""
    return (
        not is_dynamo_compiling()
        and type(x) is _Tensor
        and not has_torch_function_unary(x)
        and not x.is_neg()
        and not dispatch_modes()
    )


def has_only_memory(x: torch.Tensor) -> bool:
    """Whether x is a plain tensor with memory, and no mode, transform or trace watches the dispatcher."""
    if not is_plain(x) or in_functorch():
        return False
    if torch._C._is_tracing():
        check_exporter()
        return False
    try:
        return x.data_ptr() != 0
    except RuntimeError:
        return False


def needs_derivative(x: torch.Tensor) -> bool:
    """Whether autograd or a transform may ask for the derivative of what follows from x."""
    if x.requires_grad and _is_grad_enabled():
        return True
    # Dynamo cannot look for tangents. It knows the transforms that are a part of what it compiles.
    return in_functorch() if is_dynamo_compiling() else has_tangent(x)


def has_tangent(x: torch.Tensor) -> bool:
    """Whether x has a tangent, as `forward_ad.unpack_dual` says. This works in compiled code too, where Python's count
    of levels does not change."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    if type(x) is torch.Tensor and not dispatch_modes():
        return _unpack_dual(x, level=0)[1] is not None
    with torch._C._DisableTorchDispatch():  # otherwise a trace would record this, and a subclass would see it
        return _unpack_dual(x, level=0)[1] is not None


def known(x: torch.Tensor, what: Any, inplace: bool = False) -> Run | None:
    """The run of a call with x that comes again, with arguments that were checked; else None. (In traces that are not
    Dynamo's, sizes are tensors, so no call is known.)

    what: all options of the call. An entry is right whatever lies at the addresses of operands, because `what` has a
    number that stands for them.
    """
    try:
        address, strides = x.data_ptr(), x.is_contiguous() or x.stride()
        key = x.shape, strides, x.dtype, x.get_device(), address % ALIGNMENT, inplace, what
        return tables.calls[key] if address else None
    except (KeyError, RuntimeError, TypeError):  # a new call, no memory or shape, or a bad argument
        return None


def remember(x: torch.Tensor, what: Any, inplace: bool, run: Run) -> Run:
    """Let `known` find the run of a call."""
    if len(tables.calls) >= _MAX_CALLS:
        tables.calls.clear()
    strides = x.is_contiguous() or x.stride()
    tables.calls[x.shape, strides, x.dtype, x.get_device(), x.data_ptr() % ALIGNMENT, inplace, what] = run
    return run


def again(x: torch.Tensor, what: Any, inplace: bool = False, out: Any = None, kept: Sequence[Range] = ()) -> Any:
    """The result of a call with a plain x that comes again, or out with the result; None for any other call.

    kept: memory of the call's other tensors, which must not be written.
    """
    run = known(x, what, inplace)
    if run is None or forward_ad._current_level >= 0:
        return None
    if out is None and not inplace:
        if not (x.requires_grad and _is_grad_enabled()):
            return run.new(x.data_ptr())
        return None if run.of is None or in_functorch() else run.of.follow(x, run)
    if out is not None:
        places = None if inplace else run.places(x, (out,), kept)
        if places is not None:
            run.into((out,), *places)
            return out
    elif not (in_functorch() or (x.requires_grad and _is_grad_enabled())):
        begin = x.data_ptr()
        if not kept or all(last <= begin or begin + x.nbytes <= first for first, last in kept):
            return run.over(x, begin)
    return None


# ---- rotations -------------------------------------------------------------------------------------------------------
def number_of(of: RotateArguments, columns: int | None = None) -> int:
    """A number that stands for operands and their addresses, as long as that memory is theirs. With numbers, keys are
    cheap to compare. columns: the last dimension of x, if only one fits."""
    matrices, orders, signs, signs_after, n, swapped, _, scale, *_ = of
    key = (
        matrices is not None and (matrices.data_ptr(), matrices.dtype, *orders),
        signs is not None and signs.data_ptr(),
        signs_after is not None and signs_after.data_ptr(),
        (n, swapped, scale, columns),
    )
    number = tables.numbers.get(key)
    if number is None:
        if len(tables.numbers) >= _MAX_CALLS:
            tables.numbers.clear()
        number = tables.numbers[key] = _next_number()
    return number


def takes_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and x.numel() > 0


def rotation_problem(
    x: torch.Tensor, of: RotateArguments, to: Format | None = None, prologue: str = ""
) -> Problem | None:
    """The problem of a kernel that does all of a rotation; None if no kernel can. to: the format of the result.
    prologue: the name of the prologue, or "". Raises `UsageError` where the format does not fit the rows."""
    order = of.orders[0] if of.matrices is not None else 1
    paired = is_pair(of.matrices, of.orders)
    operands = [each for each in (of.matrices, of.signs, of.signs_after) if each is not None]
    if (
        not takes_kernels(x)
        or (of.matrices is not None and not is_packed(of.matrices))
        or any(each.data_ptr() % ALIGNMENT or not each.is_contiguous() for each in operands)
        or (of.swapped and (to is None or of.n == 1))
    ):
        return None
    return kernels.problem_of(
        of.n,
        x.dtype,
        of.numerics,
        Rows.CONTIGUOUS,
        order=order,
        signed=of.signs is not None or of.signs_after is not None,
        swapped=of.swapped,
        real=paired or is_real(of.matrices, of.orders),
        paired=paired,
        to=to,
        prologue=prologue,
    )


def result_like(x: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor of the shape, type and device of the result of a prologue of this width. It has no memory of its own for
    each element, and stands for a contiguous one. Raises `TensorError` where rows of x are no multiple of the width."""
    columns = x.shape[-1] // width
    if columns * width != x.shape[-1] or not columns:
        raise TensorError(
            f"the last dimension of x is {x.shape[-1]}; it must be a multiple of {width}, as before= takes {width} "
            "elements of x for each element of its result"
        )
    return x.new_empty(()).expand(*x.shape[:-1], columns)


def numbers_for(prologue: Prologue, problem: Problem, rows: torch.Tensor) -> dict[str, int] | None:
    """The numbers that kernels of a problem may take for a prologue; None if no kernel takes such rows. rows: a tensor
    like its result."""
    units_in_row, rest = divmod(rows.shape[-1], problem.unit)
    if prologue.width > 1 and (
        rest or problem.unit * rows.element_size() < ALIGNMENT or rows.numel() // problem.unit >= _MOST_UNITS
    ):
        return None
    return prologue.numbers(max(units_in_row, 1))


def launch_of(
    x: torch.Tensor,
    of: RotateArguments,
    problem: Problem,
    in_place: bool,
    sizes: dict[str, int] | None = None,
    changing: Sequence[str] = (),
) -> Launch | None:
    """The launch of a kernel for tensors like x without gaps; None if there is no such kernel. sizes: more
    operands. changing: the names of operands that differ from call to call, as `LoadedKernel.prepared` takes them."""
    kind = kernels.Kind(x.get_device(), problem, in_place, of.batch_invariant)
    operands = addresses(of, x.dtype) | (sizes or {})
    return kernels.prepared(kind, x.numel(), of.scale, RowShape(of.n, of.n, of.n), operands, changing)
