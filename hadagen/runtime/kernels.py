"""The kernel of a call: chosen and loaded once per device, problem, destination and the element count that was timed
nearest to the call's, then a dictionary hit."""

from __future__ import annotations

import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from hadagen import driver
from hadagen.driver import DoesNotFit, LoadedKernel
from hadagen.errors import DeviceError, StorageError, UsageError, printable
from hadagen.problem import MAX_LOG2_N, DType, Numerics, Problem, Rows, padded_length
from hadagen.regimes import Destination, nearest
from hadagen.runtime import bundles
from hadagen.runtime.arguments import as_int, is_count, is_flag
from hadagen.runtime.choose import choose_from_bundles, is_served, timed_in_bundles
from hadagen.runtime.device import Device, cuda_device, cuda_index, how_to_get_kernels
from hadagen.tuning_db.bundle import Bundle

_DTYPES = {torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16, torch.float32: DType.FLOAT32}

Kind = tuple[int, Problem, bool]  # device, problem, whether in place
Key = tuple[int, Problem, bool, int]  # the same and an element count that was timed

_timed: dict[Kind, list[int]] = {}  # the element counts of its kernels, ascending
_found: dict[Key, LoadedKernel | None] = {}
_loaded: dict[tuple[int, str], LoadedKernel] = {}  # by device and digest: buckets share kernels
_too_large: dict[int, dict[str, DoesNotFit]] = defaultdict(dict)  # by device, then digest: what it does not hold
_unserved: set[int] = set()  # devices of which a user was told that no bundle serves them
_lock = threading.Lock()  # taken by those who find nothing in `_timed` or `_found`

# torch.cuda.current_stream builds an object, which takes longer than the launch.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


def problem_of(n: int, dtype: torch.dtype, numerics: str, rows: Rows) -> Problem | None:
    """None if no kernel supports such rows or their type."""
    if dtype not in _DTYPES or not 2 <= n <= 1 << MAX_LOG2_N:
        return None
    return Problem.of(n, _DTYPES[dtype], numerics, rows)


def find(device: int, problem: Problem, in_place: bool, elements: int) -> LoadedKernel | None:
    """The kernel for `elements` = rows · n on a CUDA device, ready to launch; None where PyTorch must do it."""
    timed = _timed_of(device, problem, in_place)
    if not timed:
        return None
    key = (device, problem, in_place, nearest(timed, elements))
    if key not in _found:
        with _lock:
            if key not in _found:
                _found[key] = _find(*key)
    return _found[key]


def find_for_scale(device: int, problem: Problem, in_place: bool, elements: int, scale: float) -> LoadedKernel | None:
    """`find`, or the accurate kernel where the fast one cannot hold the scale."""
    kernel = find(device, problem, in_place, elements)
    if kernel is None:
        return None
    least, greatest = kernel.spec.scale_form.range
    if least <= abs(scale) <= greatest:
        return kernel
    if problem.io.numerics is Numerics.ACCURATE:
        return None
    return find_for_scale(device, problem.with_io(numerics=Numerics.ACCURATE), in_place, elements, scale)


def queue(launch: driver.Launch, device: int, x: int, y: int) -> None:
    """Queues a prepared launch on the current stream of its device. x, y: addresses on it. Raises `DriverError`."""
    if current_device() == device:
        launch(raw_stream(device), x, y)
    else:
        with driver.active(device):
            launch(raw_stream(device), x, y)


def warmup(
    n: int | Iterable[int],
    dtype: torch.dtype | str | Iterable[torch.dtype | str],
    *,
    rows: int | Iterable[int] | None = None,
    inplace: bool | None = None,
    numerics: str | None = None,
    device: int | str | torch.device | None = None,
) -> int:
    """Loads the kernels of later calls now, so that none of those waits, and none loads while a CUDA graph is captured.

    n: last dimensions of the tensors to come, each at least 1. dtype: their types, such as torch.float16 or "float16".
    rows: how many rows they will have, all dimensions but the last multiplied; any number, if not given.
    inplace, numerics: as in the calls to come; both of each, if not given. `out=` counts as not in place.
    device: that of the tensors to come; the current CUDA device, if not given. Other devices have no kernels.

    Tensors whose rows lie apart, or whose address is no multiple of 16 bytes, have kernels of their own; those are
    loaded too. Returns how many different kernels the calls may now run; 0 where PyTorch does the work.

    Raises `UsageError` for a bad argument or where there is no such device, `DeviceError` where a kernel does not load
    while a graph is being captured, `StorageError` where HADAGEN_BUNDLE names no sound bundle.
    """
    if inplace is not None and not is_flag(inplace):
        raise UsageError(f"inplace = {inplace!r} is not supported; give True, False, or nothing for both")
    lengths = [_whole(value, "n") for value in _several(n)]
    dtypes = [_dtype(value) for value in _several(dtype)]
    contracts = [Numerics.ACCURATE]
    if numerics is None or Problem.of(2, DType.FLOAT16, numerics).io.numerics is Numerics.FAST:
        contracts.append(Numerics.FAST)  # which falls back to accurate where the scale is out of its range
    counts = None if rows is None else [_whole(value, "rows") for value in _several(rows)]
    index = _warmed_device(device)
    if index is None:
        return 0
    ready: set[int] = set()
    for length in lengths:
        row = padded_length(length)
        given = None if counts is None else [row * count for count in counts]
        problems = {
            problem_of(row, kind, contract.value, rows_lie)
            for kind in dtypes
            for contract in contracts
            for rows_lie in Rows
        }
        for problem in filter(None, problems):
            # Tensors that have to be copied are transformed in place, in their copy.
            for in_place in (True,) if inplace else (False, True):
                # From a single row on, where any number may come.
                wanted = [row, *(e for e in _timed_of(index, problem, in_place) if e > row)] if given is None else given
                ready.update(id(find(index, problem, in_place, elements)) for elements in wanted)
    return len(ready - {id(None)})


def _warmed_device(device: int | str | torch.device | None) -> int | None:
    """Its CUDA index; None where it has no kernels. Raises `UsageError` where this machine has no such device."""
    if device is None and not torch.cuda.is_available():
        return None
    with suppress(RuntimeError, TypeError):  # it names none
        if device is not None and torch.device(device).type != "cuda":
            return None
    index = cuda_index(device)
    if index is None:
        raise UsageError(f"device {device!r} is not a CUDA device of this machine; name one of those it has")
    return index


def _several(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def _whole(value: Any, name: str) -> int:
    number: int = as_int(value)
    if not is_count(number):
        raise UsageError(f"{name} = {value!r} is not supported; give whole numbers, at least 1")
    return number


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype {value!r} is not supported; give a floating-point type, such as torch.float16")
    return found


def _timed_of(device: int, problem: Problem, in_place: bool) -> list[int]:
    """The element counts that its kernels were timed at, ascending; none where PyTorch must do all."""
    kind = (device, problem, in_place)
    if kind not in _timed:
        target = cuda_device(device)
        with _lock:
            if kind not in _timed:
                _timed[kind] = [] if target is None else timed_in_bundles(problem, _destination(in_place), target)
        if target is not None and not _timed[kind] and not is_served(target):
            _tell_unserved(device, target)
    return _timed[kind]


def _tell_unserved(device: int, target: Device) -> None:
    """Warns, once for each GPU, that PyTorch does all the work there: a program that changed one import to be fast
    would not see why it is not."""
    with _lock:
        if device in _unserved:
            return
        _unserved.add(device)
    said = f"no bundle has kernels for {printable(target.gpu)} ({target.arch}), so plain PyTorch transforms there"
    warnings.warn(f"{said}, which is slower; {how_to_get_kernels(target.arch)}", RuntimeWarning, stacklevel=2)


def _destination(in_place: bool) -> Destination:
    return Destination.IN_PLACE if in_place else Destination.OUT_OF_PLACE


def _find(device: int, problem: Problem, in_place: bool, elements: int) -> LoadedKernel | None:
    try:
        return _fitting(device, problem, in_place, elements)
    except DeviceError as error:
        if torch.cuda.is_current_stream_capturing():
            raise  # plain PyTorch would stay in the graph for good
        warnings.warn(f"plain PyTorch transforms {problem.key} here: {error}", RuntimeWarning, stacklevel=2)
        return None


def _fitting(device: int, problem: Problem, in_place: bool, elements: int) -> LoadedKernel | None:
    """What is chosen of the kernels that fit on the device; None where there is no kernel. Raises `DeviceError`."""
    # Chosen anew, for a bundle may have been replaced since its element counts were read.
    target = cuda_device(device)
    if target is None:
        return None
    wanted, too_large = (problem, _destination(in_place), elements, target), _too_large[device]
    while chosen := choose_from_bundles(*wanted, too_large)[1]:
        entry, bundle = chosen
        try:
            return _load(bundle, entry.kernel, device, compiled=entry.arch == target.arch)
        except DoesNotFit as error:
            too_large[entry.kernel] = error
        except StorageError as error:
            bundles.leave_out(bundle, error)
    best = choose_from_bundles(*wanted)[1]
    if best and (why := too_large.get(best[0].kernel)):
        raise why
    return None


def _load(bundle: Bundle, digest: str, device: int, *, compiled: bool) -> LoadedKernel:
    """The kernel on the device: the cubin where that was `compiled` for it, else PTX that the driver compiles."""
    # A digest covers the cubin; what the PTX beside it does is known of its own bundle alone.
    place = (device, digest if compiled else f"{digest} {bundle.digest}")
    if place not in _loaded:
        kernel = bundle.kernel(digest)
        _loaded[place] = driver.load(kernel.cubin if compiled else kernel.ptx, kernel.entry, kernel.launch, device)
    return _loaded[place]


def _forget() -> None:
    """In a forked child: what is loaded belongs to the parent, and a thread that is not here may hold the lock."""
    global _lock
    _lock = threading.Lock()
    _timed.clear()
    _found.clear()
    _loaded.clear()
    _too_large.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
