"""Calls that come again. A `Run` is the launch that a call makes. One table remembers the runs of all calls, so that a
call that comes again costs one look-up and one launch.

A kernel that takes contiguous rows takes them at addresses that are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_unary

from hadagen.errors import TensorError
from hadagen.gpu.driver import Launch
from hadagen.runtime.call.decompositions import check_exporter
from hadagen.runtime.choose import tables
from hadagen.runtime.launch import streams

ALIGNMENT = 16  # bytes; contiguous kernels read and write vectors of this size
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

    launch: takes the addresses of x and of the result.
    outputs: shape, strides and type of each result. Tensors that are written instead have the same.
    text, scale: of the call, for derivatives; only of H alone.
    is_direct: whether the kernel writes tensors like the results as they lie. copies: whether it takes a copy of x.
    """

    text, scale = "", 1.0
    is_direct, copies = True, False

    def __init__(self, x: torch.Tensor, launch: Launch, outputs: Sequence[Output]) -> None:
        self.launch, self.device, self.outputs = launch, x.get_device(), outputs
        self._bytes, self._sizes = span(x), [_bytes_of(output) for output in outputs]
        self._make: Callable[[], torch.Tensor] = partial(_EMPTY[x.device.type], *outputs[0])
        self._alone = torch.cuda.device_count() == 1  # a single device is always current

    def new(self, x: torch.Tensor) -> Any:
        """The result, in a new tensor."""
        device = self.device
        if not (self._alone or streams.current_device() == device):
            with torch.cuda.device(device):
                return self.new(x)
        y = self._make()
        self.launch(streams.raw_stream(device), x.data_ptr(), y.data_ptr())
        return y

    def into(self, out: Sequence[torch.Tensor], x: torch.Tensor, *others: int) -> None:
        """Write the results into tensors, which `lies_like` the results. others: the last arguments of the launch."""
        self.write(out, [x.data_ptr(), *[each.data_ptr() for each in out], *others])

    def write(self, out: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """The same, with all addresses."""
        increment_version(out)  # PyTorch does not see that a kernel writes
        self._queue(*addresses)

    def over(self, x: torch.Tensor) -> torch.Tensor:
        """Write the result into x, which may be written."""
        increment_version((x,))
        address = x.data_ptr()
        self._queue(address, address)
        return x

    def lies_like(self, out: Sequence[torch.Tensor]) -> bool:
        """Whether tensors lie as results do, at addresses that kernels take."""
        lie = [(each.stride(), each.data_ptr() % ALIGNMENT) for each in out]
        return self.is_direct and lie == [(strides, 0) for _, strides, _ in self.outputs]

    def _queue(self, *addresses: int) -> None:
        if self._alone or streams.current_device() == self.device:
            self.launch(streams.raw_stream(self.device), *addresses)
        else:
            streams.queue(self.launch, self.device, *addresses)

    def places(self, out: Sequence[Any], x: torch.Tensor, kept: Iterable[Range] = ()) -> list[int] | None:
        """The addresses of x and of a caller's tensors that are like `outputs` and may be written; None if they are
        anything else, or share memory with each other, with x or with what is kept."""
        with_gradient = _is_grad_enabled()
        if not self.is_direct or self.copies or in_functorch() or (with_gradient and x.requires_grad):
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


class RunOfRows(Run):
    """A launch with several results, or of rows that may have to be copied.

    launch: takes the addresses of x, of each result, and of all other tensors that differ from call to call.
    order: the dimensions of x in the order of the rows that the kernel takes. x is copied if it does not lie so.
    finish: makes the codes and scales that are asked for of those that the kernel writes; None if they are the same.
    make_scales: makes the second result; by default it holds any values.
    clears: whether a tensor that takes the last result is filled with zeros first.
    """

    def __init__(
        self,
        x: torch.Tensor,
        launch: Launch,
        outputs: Sequence[Output],
        order: Sequence[int],
        finish: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None,
        make_scales: Callable[[], torch.Tensor] | None,
        clears: bool,
    ) -> None:
        super().__init__(x, launch, outputs)
        makers: list[Callable[[], torch.Tensor]] = [partial(_EMPTY[x.device.type], *output) for output in outputs[1:]]
        if make_scales is not None:
            makers[0] = make_scales
        self._others, self._finish, self._clears, self._order = makers, finish, clears, order
        self.copies, self.is_direct = not is_ready(x.permute(*order)), finish is None
        self._make_second = makers[0] if len(makers) == 1 and finish is None else None

    def new(self, x: torch.Tensor, *others: int) -> Any:
        """The result, or a tuple of the results. others: the last arguments of the launch."""
        device = self.device
        if not (self._alone or streams.current_device() == device):
            with torch.cuda.device(device):
                return self.new(x, *others)
        rows = ready(x.permute(*self._order)) if self.copies else x  # alive until the launch
        y = self._make()
        if self._make_second is not None:  # as for most calls, and a loop takes longer
            z = self._make_second()
            self.launch(streams.raw_stream(device), rows.data_ptr(), y.data_ptr(), z.data_ptr(), *others)
            return y, z
        more = [make() for make in self._others]
        addresses = [each.data_ptr() for each in more]
        self.launch(streams.raw_stream(device), rows.data_ptr(), y.data_ptr(), *addresses, *others)
        if self._finish is not None:
            return *self._finish(y, more[0]), *more[1:]
        return (y, *more) if more else y

    def into(self, out: Sequence[torch.Tensor], x: torch.Tensor, *others: int) -> None:
        super().into(out, ready(x.permute(*self._order)) if self.copies else x, *others)

    def write(self, out: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        if self._clears:
            out[-1].zero_()
        super().write(out, addresses)


class RunOfCopy(Run):
    """A launch that works in place on a copy of x. width: the elements of a row of the copy, which zeros fill up."""

    is_direct = False

    def __init__(self, x: torch.Tensor, launch: Launch, width: int) -> None:
        super().__init__(x, launch, (like(x),))
        self._width = width

    def new(self, x: torch.Tensor) -> Any:
        return self._transformed(x).contiguous()

    def over(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._transformed(x))

    def _transformed(self, x: torch.Tensor) -> torch.Tensor:
        columns = x.shape[-1]
        copy = x.new_empty((*x.shape[:-1], self._width))
        part = copy[..., :columns]
        part.copy_(x)
        copy[..., columns:].zero_()
        streams.queue(self.launch, self.device, copy.data_ptr(), copy.data_ptr())
        return part


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


def known(x: torch.Tensor, key: Any) -> Run | None:
    """The run of a call with x that comes again, with arguments that were checked; else None. (In traces that are not
    Dynamo's, sizes are tensors, so no call is known.)

    key: `Call.key`. An entry is right whatever lies at the addresses of operands, because the key has a number that
    stands for them.
    """
    try:
        address, strides = x.data_ptr(), x.is_contiguous() or x.stride()
        whole = x.shape, strides, x.dtype, x.get_device(), address % ALIGNMENT, key
        return tables.calls[whole] if address else None
    except (KeyError, RuntimeError, TypeError):  # a new call, no memory or shape, or a bad argument
        return None


def remember(x: torch.Tensor, key: Any, run: Run) -> None:
    """Let `known` find the run of a call."""
    if len(tables.calls) >= _MAX_CALLS:
        tables.calls.clear()
    strides = x.is_contiguous() or x.stride()
    tables.calls[x.shape, strides, x.dtype, x.get_device(), x.data_ptr() % ALIGNMENT, key] = run


def again(
    x: torch.Tensor,
    table: Mapping[Any, int],
    asked: Any,
    columns: int = 0,
    inplace: bool = False,
    out: Any = None,
    kept: Sequence[Range] = (),
    follow: Callable[..., torch.Tensor] | None = None,
) -> Any:
    """The result of a linear call, or of one with a prologue, with a plain x that comes again, or out with the result;
    None for any other call.

    table: the keys of calls that were made before, by what was `asked`. columns: those of x; 0 for any. kept: memory of
    the call's other tensors, which must not be written. follow: (x, run) → the result with its derivative;
    None if a call whose x requires one is not one that comes again.
    """
    try:
        address, shape, strides, key = x.data_ptr(), x.shape, x.is_contiguous() or x.stride(), table[asked]
        run: Run = tables.calls[shape, strides, x.dtype, x.get_device(), address % ALIGNMENT, key]
    except (KeyError, RuntimeError, TypeError):  # a new call, no memory or shape, or a bad argument
        return None
    if not address or (columns and shape[-1] != columns) or forward_ad._current_level >= 0:
        return None
    if out is None and not inplace:
        if not (x.requires_grad and _is_grad_enabled()):
            return run.new(x)
        return None if follow is None or in_functorch() else follow(x, run)
    if out is not None:
        places = None if inplace else run.places((out,), x, kept)
        if places is not None:
            run.write((out,), places)
            return out
        return None
    if in_functorch() or (x.requires_grad and _is_grad_enabled()):
        return None
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return None
    is_apart = not kept or all(last <= address or address + x.nbytes <= first for first, last in kept)
    return run.over(x) if is_apart else None


_MOST_ASKED = 4096
_CONSTANTS = {type(None), int, float, bool, str, type}


def remember_asked(table: dict[Any, Any], asked: tuple[Any, ...], found: Any) -> None:
    """Let the next call find what one with these arguments found, unless a value is no constant, and may change. Not
    while PyTorch compiles."""
    values = [each for some in asked for each in (some if isinstance(some, tuple) else (some,))]
    if not _CONSTANTS.issuperset(map(type, values)):
        return
    if len(table) >= _MOST_ASKED:
        table.clear()
    table[asked] = found


def takes_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and x.numel() > 0
