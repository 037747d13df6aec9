"""Finds the kernel of a call. It is chosen and loaded once for each device, problem, destination and nearest timed
element count; later it is a dictionary hit."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hadagen import driver
from hadagen.driver import DoesNotFit, LoadedKernel
from hadagen.errors import (
    DeviceError,
    HadagenError,
    StorageError,
    ToolchainError,
    UsageError,
    printable,
    shown,
)
from hadagen.formats import Format
from hadagen.problem import MAX_LOG2_N, MAX_ORDER, DType, Numerics, Problem, Rows, check_no_format, padded_length
from hadagen.regimes import Destination, nearest
from hadagen.runtime import bundles
from hadagen.runtime.arguments import as_int, explained, is_count, is_flag
from hadagen.runtime.choose import BATCH_INVARIANT, choose_from_bundles, is_served, timed_in_bundles
from hadagen.runtime.device import Device, cuda_device, cuda_index, how_to_get_kernels
from hadagen.runtime.guesses import may_be_guessed
from hadagen.runtime.loading import compile_missing, load
from hadagen.runtime.proof import TORCH_DTYPE
from hadagen.tuning_db.bundle import Bundle, BundleEntry

if TYPE_CHECKING:
    from hadagen.runtime.rotation import Rotation

AUTOTUNE = "HADAGEN_AUTOTUNE"  # the variable that makes calls measure problems that nobody measured

_DTYPES = {dtype: name for name, dtype in TORCH_DTYPE.items()}


class Kind(NamedTuple):
    """What decides about the kernel of a call, beside its number of elements."""

    device: int
    problem: Problem
    in_place: bool
    batch_invariant: bool = False

    @property
    def destination(self) -> Destination:
        return Destination.IN_PLACE if self.in_place else Destination.OUT_OF_PLACE


_timed: dict[Kind, list[int]] = {}  # the element counts of its kernels, ascending
_found: dict[tuple[Kind, int], LoadedKernel | None] = {}  # by a timed element count
_loaded: dict[tuple[int, str], LoadedKernel] = {}  # by device and digest: buckets share kernels
_unfit: dict[int, dict[str, HadagenError]] = defaultdict(dict)  # device → digest → why the kernel does not run there
_unserved: set[int] = set()  # devices for which the user was warned that no bundle serves them
_lock = threading.Lock()  # for entering into `_timed` and `_found`

# torch.cuda.current_stream builds an object, which takes longer than the launch.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


@functools.lru_cache(maxsize=1024)  # calls that are not remembered ask for few problems again and again
def problem_of(
    n: int,
    dtype: torch.dtype,
    numerics: str,
    rows: Rows,
    *,
    order: int = 1,
    signed: bool = False,
    swapped: bool = False,
    to: Format | None = None,
) -> Problem | None:
    """The problem of rows of n elements, which are `order` times a power of two; None if no kernel supports this n,
    dtype or order. signed, swapped: as in `Transform`. to: the format of the result. Raises `UsageError` where that
    does not fit the rows."""
    least = 2 if to is None else 1
    if dtype not in _DTYPES or not least <= n <= 1 << MAX_LOG2_N or order > MAX_ORDER:
        return None
    return Problem.of(n, _DTYPES[dtype], numerics, rows, order=order, signed=signed, swapped=swapped, to=to)


def find(kind: Kind, elements: int) -> LoadedKernel | None:
    """The kernel for `elements` = rows · n, ready to launch; None if PyTorch must do the work.

    Raises `DeviceError` if the call is to be batch-invariant and only calls that are not have kernels.
    """
    timed = _timed_of(kind)
    if not timed:
        return None
    key = kind, nearest(timed, elements)
    try:
        return _found[key]
    except KeyError:
        with _lock:
            if key not in _found:
                _found[key] = _find(*key)
            return _found[key]


def find_for_scale(kind: Kind, elements: int, scale: float) -> LoadedKernel | None:
    """`find`, or the accurate kernel if the scale is out of the range of the fast one."""
    kernel = find(kind, elements)
    if kernel is None:
        return None
    least, greatest = kernel.spec.scale_form.range
    if least <= abs(scale) <= greatest:
        return kernel
    if kind.problem.io.numerics is Numerics.ACCURATE:
        return None
    accurate = kind.problem.with_io(numerics=Numerics.ACCURATE)
    return find_for_scale(kind._replace(problem=accurate), elements, scale)


def queue(launch: driver.Launch, device: int, x: int, y: int) -> None:
    """Queue a prepared launch on the current stream of its device. x, y: addresses there. Raises `DriverError`."""
    if current_device() == device:
        launch(raw_stream(device), x, y)
    else:
        with driver.active(device):
            launch(raw_stream(device), x, y)


@explained(TypeError)
def warmup(
    n: int | Rotation | Iterable[int | Rotation],
    dtype: torch.dtype | str | Iterable[torch.dtype | str],
    *,
    rows: int | Iterable[int] | None = None,
    inplace: bool | None = None,
    numerics: str | None = None,
    device: int | str | torch.device | None = None,
    batch_invariant: bool | None = None,
    to: str | Iterable[str] | None = None,
    columns: int | Iterable[int] | None = None,
    group: int | None = None,
    rule: str | None = None,
    layout: str = "row-major",
    round_first: bool = False,
) -> int:
    """Load the kernels of later calls now, so that no call waits for one, and none is loaded in a CUDA graph capture.
    Kernels without a cubin for the GPU are compiled, as many at a time as there are CPUs.

    n: last dimensions of the later tensors, each at least 1.
    dtype: their types, such as torch.float16 or "float16".
    rows: their numbers of rows, the product of all dimensions but the last; by default any number.
    inplace, numerics: as in the later calls; by default both. `out=` counts as not in place.
    device: of the later tensors; by default the current CUDA device. Other kinds of devices have no kernels.
    batch_invariant: as in the later calls; by default what HADAGEN_BATCH_INVARIANT says.

    to: formats of later calls of `rotate_quantize`. n is then what they rotate by: a `Rotation`, or a power of two, 1
        for no rotation. inplace does not matter to them.
    columns: the last dimensions of the later tensors; by default n, or that of the `Rotation`.
    group, rule, layout, round_first: as in the later calls.

    Tensors whose rows have gaps, or whose address is no multiple of 16 bytes, have other kernels, which are loaded too.
    With HADAGEN_AUTOTUNE=1, each problem that these calls may ask for is measured first, if it was not yet.

    Returns the number of different kernels that the calls may run; 0 if PyTorch does the work.

    Raises `UsageError` for a bad argument or a missing device, `DeviceError` if a kernel cannot be loaded while a graph
    is captured, and `StorageError` if HADAGEN_BUNDLE names a file that is damaged or no bundle.
    """
    if inplace is not None and not is_flag(inplace):
        raise UsageError(f"inplace = {shown(inplace)} is not supported; give True, False, or nothing for both")
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    elif not is_flag(batch_invariant):
        raise UsageError(f"batch_invariant = {shown(batch_invariant)} is not supported; give True or False")
    if not is_flag(round_first):
        raise UsageError(f"round_first = {shown(round_first)} is not supported; give True or False")
    if to is None:
        check_no_format(columns, group, rule, layout, bool(round_first))
    rotations = _several(n)
    lengths = [_whole(each if to is None else getattr(each, "n", each), "n") for each in rotations]
    dtypes = [_dtype(value) for value in _several(dtype)]
    contracts = [Numerics.ACCURATE]
    if numerics is None or Problem.of(2, DType.FLOAT16, numerics).io.numerics is Numerics.FAST:
        contracts.append(Numerics.FAST)  # falls back to accurate if the scale is out of its range
    counts = None if rows is None else [_whole(value, "rows") for value in _several(rows)]
    forms = [Format.choose(name, as_int(group), rule, layout) for name in _several(() if to is None else to)]
    widths = None if columns is None else [_whole(value, "columns") for value in _several(columns)]
    for length, form in product(widths or lengths, forms):
        form.scales_in_row(length)
    index = _warmed_device(device)
    if index is None:
        return 0
    kinds: list[tuple[Kind, int]] = []  # and the elements of a row
    for rotation, length in zip(rotations, lengths, strict=True):
        for given in dtypes:
            if to is not None:
                for form, width in product(forms, widths or [length]):
                    row_of_x = _row(width, given, index)
                    for contract in contracts:
                        kinds += _quantizing(
                            index, rotation, row_of_x, form, bool(round_first), contract, bool(batch_invariant)
                        )
                continue
            row = padded_length(length)
            for problem in {problem_of(row, given, contract.value, lie) for contract in contracts for lie in Rows}:
                if problem:
                    # Tensors that must be copied are transformed in place, in the copy.
                    places = {bool(inplace), True}
                    kinds += [(Kind(index, problem, place, bool(batch_invariant)), row) for place in places]
    asked: list[tuple[Kind, int]] = []
    for kind, row in dict.fromkeys(kinds):
        timed = _timed_of(kind)
        # Without `rows`, all counts from a single row on.
        wanted = [row, *(e for e in timed if e > row)] if counts is None else [row * count for count in counts]
        asked += [(kind, elements) for elements in wanted]
    if target := cuda_device(index):
        compile_missing([chosen for each in asked if (chosen := _choose(*each, target))], target)
    return len({id(find(*each)) for each in asked} - {id(None)})


def _quantizing(
    device: int,
    rotation: Any,
    x: torch.Tensor,
    form: Format,
    round_first: bool,
    numerics: Numerics,
    batch_invariant: bool,
) -> list[tuple[Kind, int]]:
    """What `rotate_quantize` asks for with tensors like x, and the elements of a row."""
    from hadagen.runtime.quantize import problems_of  # here, because it imports this module

    quantizing, *others = problems_of(x, rotation, form, round_first, numerics.value, batch_invariant)
    if quantizing and _timed_of(kind := Kind(device, quantizing, False, batch_invariant)):
        return [(kind, x.shape[-1])]
    # PyTorch quantizes what other kernels rotate, in place.
    return [(Kind(device, each, True, batch_invariant), x.shape[-1]) for each in others if each]


def _choose(
    kind: Kind, elements: int, target: Device, without: Collection[str] = ()
) -> tuple[BundleEntry, Bundle | None] | None:
    wanted = kind.problem, kind.destination, elements, target, without
    return choose_from_bundles(*wanted, batch_invariant=kind.batch_invariant)[1]


def _warmed_device(device: int | str | torch.device | None) -> int | None:
    """The CUDA index of a device; None if such a device has no kernels. Raises `UsageError` if it does not exist."""
    if device is None and not torch.cuda.is_available():
        return None
    with suppress(RuntimeError, TypeError, ValueError, OverflowError):  # it names no device
        if device is not None and torch.device(device).type != "cuda":
            return None
    index = cuda_index(device)
    if index is None:
        raise UsageError(f"device {shown(device)} is not a CUDA device of this machine; name one of those it has")
    return index


def _row(columns: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    return torch.empty((1, columns), dtype=dtype, device=f"cuda:{device}")


def _several(values: Any) -> list[Any]:
    try:
        return [values] if isinstance(values, str) else list(values)
    except (TypeError, ValueError, RuntimeError):  # no iterable, or an array without a dimension
        return [values]


def _whole(value: Any, name: str) -> int:
    number: int = as_int(value)
    if not is_count(number):
        raise UsageError(f"{name} = {shown(value)} is not supported; give whole numbers, at least 1")
    return number


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype {shown(value)} is not supported; give a floating-point type, such as torch.float16")
    return found


def _timed_of(kind: Kind) -> list[int]:
    """The element counts at which its kernels were timed, ascending; [] if PyTorch must do the work. Raises as `find`
    does."""
    found = _timed.get(kind)
    if found is None:
        target = cuda_device(kind.device)
        if target is not None:
            _autotune_if_wanted(kind, target)
        with _lock:
            if kind not in _timed:
                _timed[kind] = [] if target is None else _timed_on(kind, target)
            found = _timed[kind]
        if target is not None and not found and not is_served(target):
            _tell_unserved(kind.device, target)
    return found


def _autotune_if_wanted(kind: Kind, target: Device) -> None:
    """Measure a problem before its first call if HADAGEN_AUTOTUNE is set, and not to 0; never in a graph capture."""
    if os.environ.get(AUTOTUNE, "0") in ("", "0") or torch.cuda.is_current_stream_capturing():
        return
    from hadagen.runtime.autotune import autotune_once  # here, because it imports this module

    autotune_once(kind.problem, kind.destination, kind.device, target)


def _timed_on(kind: Kind, target: Device) -> list[int]:
    wanted = kind.problem, kind.destination, target
    found = timed_in_bundles(*wanted, batch_invariant=kind.batch_invariant)
    # Other rows are copied to contiguous ones then, and rotations are computed with kernels for H alone.
    alone = kind.problem.io.rows is Rows.CONTIGUOUS and not may_be_guessed(kind.problem)
    quantizes = kind.problem.io.form is not None
    if kind.batch_invariant and not found and (alone or quantizes) and timed_in_bundles(*wanted):
        said = f"no kernels of {kind.problem.key} give the same bits in every call on {printable(target.gpu)}"
        if not quantizes:
            raise DeviceError(f"{said}; leave out batch_invariant, or pass a shorter row")
        warnings.warn(
            f"{said}, so PyTorch quantizes there, which is slower; leave out batch_invariant",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _tell_unserved(device: int, target: Device) -> None:
    """Warn, once for each GPU, that PyTorch does all the work there. Otherwise a user would not learn why a program is
    not faster with hadagen."""
    with _lock:
        if device in _unserved:
            return
        _unserved.add(device)
    said = f"no bundle has kernels for {printable(target.gpu)} ({target.arch}), so plain PyTorch transforms there"
    warnings.warn(f"{said}, which is slower; {how_to_get_kernels(target.arch)}", RuntimeWarning, stacklevel=2)


def _find(kind: Kind, elements: int) -> LoadedKernel | None:
    try:
        return _fitting(kind, elements)
    except (DeviceError, ToolchainError) as error:
        if kind.batch_invariant or torch.cuda.is_current_stream_capturing():
            # Otherwise plain PyTorch would stay in the graph, or give other bits than other calls.
            raise error if isinstance(error, DeviceError) else DeviceError(str(error)) from error
        warnings.warn(f"plain PyTorch transforms {kind.problem.key} here: {error}", RuntimeWarning, stacklevel=2)
        return None


def _fitting(kind: Kind, elements: int) -> LoadedKernel | None:
    """The best kernel that fits on the device; None if there is no kernel. Raises `DeviceError`."""
    # Chosen again, because a bundle may have been replaced since its element counts were read.
    target = cuda_device(kind.device)
    if target is None:
        return None
    unfit = _unfit[kind.device]
    while chosen := _choose(kind, elements, target, unfit):
        entry, bundle = chosen
        try:
            return _load(bundle, entry, kind.device, target)
        except StorageError as error:
            if bundle is None:
                raise
            bundles.leave_out(bundle, error)
        except (DoesNotFit, ToolchainError) as error:
            unfit[entry.kernel] = error
    best = _choose(kind, elements, target)
    if best and (why := unfit.get(best[0].kernel)):
        raise why
    return None


def _load(bundle: Bundle | None, entry: BundleEntry, device: int, target: Device) -> LoadedKernel:
    """`load`, once for each kernel of a bundle, or of none."""
    # The digest of a kernel covers its cubin. For what is made from its recipe or PTX, that of the bundle counts too.
    place = (device, f"{entry.kernel} {bundle and bundle.digest} {entry.problem.key}")
    if place not in _loaded:
        _loaded[place] = load(bundle, entry, device, target)
    return _loaded[place]


def forget(problem: Problem) -> None:
    """Find the kernels of a problem anew for later calls. Those that were loaded stay, because graphs may hold them."""
    with _lock:
        for kind in [kind for kind in _timed if kind.problem == problem]:
            del _timed[kind]
        for key in [(kind, timed) for kind, timed in _found if kind.problem == problem]:
            del _found[key]


def _forget() -> None:
    """Start anew in a forked child: loaded kernels belong to the parent, a thread of which may hold the lock."""
    global _lock
    _lock = threading.Lock()
    _timed.clear()
    _found.clear()
    _loaded.clear()
    _unfit.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
