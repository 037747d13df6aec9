"""Finds the kernel of a call. It is chosen and loaded once for each device, problem, destination and nearest timed
element count; later it is a dictionary hit."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hadagen.errors import DeviceError, StorageError, ToolchainError
from hadagen.gpu.driver import DoesNotFit, Launch, LoadedKernel
from hadagen.problem.formats import Format
from hadagen.problem.launch import RowShape
from hadagen.problem.problem import MAX_LOG2_N, MAX_ORDER, Numerics, Problem, Rows
from hadagen.problem.regimes import Destination, nearest
from hadagen.runtime.choose import bundles, tables
from hadagen.runtime.choose.device import Device, cuda_device
from hadagen.runtime.choose.entries import choose_from_bundles, no_such_bits, timed_in_bundles
from hadagen.runtime.choose.guesses import may_be_guessed
from hadagen.runtime.launch.loading import load
from hadagen.truth.accuracy import TORCH_DTYPE
from hadagen.tuning_db.bundle import Bundle, BundleEntry

AUTOTUNE = "HADAGEN_AUTOTUNE"  # the variable that makes calls measure problems that nobody measured

_DTYPES = {dtype: name for name, dtype in TORCH_DTYPE.items()}


class Kind(NamedTuple):
    """The properties of a call that decide about its kernel, besides the number of elements."""

    device: int
    problem: Problem
    in_place: bool
    batch_invariant: bool = False

    @property
    def destination(self) -> Destination:
        return Destination.IN_PLACE if self.in_place else Destination.OUT_OF_PLACE


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
    real: bool = False,
    paired: bool = False,
    to: Format | None = None,
    prologue: str = "",
) -> Problem | None:
    """The problem of rows of n elements, which are `order` times a power of two; None if no kernel supports this n,
    dtype or order. signed, swapped, real, paired: as in `Transform`. to: the format of the result. prologue: as in
    `Problem`. Raises `UsageError` where the format does not fit the rows."""
    least = 2 if to is None else 1
    if dtype not in _DTYPES or not least <= n <= 1 << MAX_LOG2_N or order > MAX_ORDER:
        return None
    flags: dict[str, Any] = {"signed": signed, "swapped": swapped, "real": real, "paired": paired}
    return Problem.of(n, _DTYPES[dtype], numerics, rows, order=order, **flags, to=to, prologue=prologue)


def find(kind: Kind, elements: int) -> LoadedKernel | None:
    """The kernel for `elements` = rows · n, ready to launch; None if PyTorch must do the work.

    Raises `DeviceError` if the call is to be batch-invariant and only calls that are not have kernels.
    """
    timed = timed_of(kind)
    if not timed:
        return None
    key = kind, nearest(timed, elements)
    try:
        return tables.found[key]
    except KeyError:
        with tables.lock:
            if key not in tables.found:
                tables.found[key] = _find(*key)
            return tables.found[key]


def prepared(
    kind: Kind,
    elements: int,
    scale: float,
    rows: RowShape,
    operands: Mapping[str, int] | None = None,
    changing: Sequence[str] = (),
) -> Launch | None:
    """The launch of the kernel that `find` finds, or of the accurate kernel if the scale is out of the range of the
    fast one; None without one. The arguments are those of `LoadedKernel.prepared`."""
    kernel = find(kind, elements)
    if kernel is None:
        return None
    least, greatest = kernel.spec.scale_form.range
    if least <= abs(scale) <= greatest:
        return kernel.prepared(elements, scale, rows, operands, changing)
    if kind.problem.io.numerics is Numerics.ACCURATE:
        return None
    accurate = kind._replace(problem=kind.problem.with_io(numerics=Numerics.ACCURATE))
    return prepared(accurate, elements, scale, rows, operands, changing)


def choose(
    kind: Kind, elements: int, target: Device, without: Collection[str] = ()
) -> tuple[BundleEntry, Bundle | None] | None:
    wanted = kind.problem, kind.destination, elements, target, without
    return choose_from_bundles(*wanted, batch_invariant=kind.batch_invariant)[1]


def timed_of(kind: Kind) -> list[int]:
    """The element counts at which its kernels were timed, ascending; [] if PyTorch must do the work. Raises as `find`
    does."""
    found = tables.timed.get(kind)
    if found is None:
        target = cuda_device(kind.device)
        if target is not None:
            _autotune_if_wanted(kind, target)
        with tables.lock:
            if kind not in tables.timed:
                tables.timed[kind] = [] if target is None else _timed_on(kind, target)
            found = tables.timed[kind]
    return found


def _autotune_if_wanted(kind: Kind, target: Device) -> None:
    """Measure a problem before its first call if HADAGEN_AUTOTUNE is set, and not to 0; never in a graph capture."""
    if os.environ.get(AUTOTUNE, "0") in ("", "0") or torch.cuda.is_current_stream_capturing():
        return
    from hadagen.runtime.launch.autotune import autotune_once  # here, because few calls need it

    autotune_once(kind.problem, kind.destination, kind.device, target)


def _timed_on(kind: Kind, target: Device) -> list[int]:
    wanted = kind.problem, kind.destination, target
    found = timed_in_bundles(*wanted, batch_invariant=kind.batch_invariant)
    # Other rows are copied to contiguous ones then, and rotations are computed with kernels for H alone.
    alone = kind.problem.io.rows is Rows.CONTIGUOUS and not may_be_guessed(kind.problem)
    if kind.batch_invariant and not found and alone and timed_in_bundles(*wanted):
        raise DeviceError(f"{no_such_bits(kind.problem, target)}; leave out batch_invariant, or pass a shorter row")
    return found


def _find(kind: Kind, elements: int) -> LoadedKernel | None:
    try:
        return _fitting(kind, elements)
    except (DeviceError, ToolchainError) as error:
        none_can_be_made = isinstance(error, ToolchainError) and _is_guessed(kind, elements)
        if (kind.batch_invariant and not none_can_be_made) or torch.cuda.is_current_stream_capturing():
            # Otherwise plain PyTorch would stay in the graph, or give other bits than other calls.
            raise error if isinstance(error, DeviceError) else DeviceError(str(error)) from error
        tables.failed[kind] = str(error)  # of which the warning of the call tells
        return None


def _is_guessed(kind: Kind, elements: int) -> bool:
    """Whether no bundle has its kernel. If one of these kernels cannot be made, `_fitting` has tried all of them, so
    PyTorch does the work at every element count."""
    target = cuda_device(kind.device)
    chosen = choose(kind, elements, target) if target else None
    return chosen is not None and chosen[1] is None


def _fitting(kind: Kind, elements: int) -> LoadedKernel | None:
    """The best kernel that fits on the device; None if there is no kernel. Raises `DeviceError`."""
    # Chosen again, because a bundle may have been replaced since its element counts were read.
    target = cuda_device(kind.device)
    if target is None:
        return None
    unfit = tables.unfit[kind.device]
    while chosen := choose(kind, elements, target, unfit):
        entry, bundle = chosen
        try:
            return _load(bundle, entry, kind.device, target)
        except StorageError as error:
            if bundle is None:
                raise
            bundles.leave_out(bundle, error)
        except (DoesNotFit, ToolchainError) as error:
            unfit[entry.kernel] = error
    best = choose(kind, elements, target)
    if best and (why := unfit.get(best[0].kernel)):
        raise why
    return None


def _load(bundle: Bundle | None, entry: BundleEntry, device: int, target: Device) -> LoadedKernel:
    """`load`, once for each kernel of a bundle, or of none."""
    # The digest of a kernel covers its cubin. For what is made from its recipe or PTX, that of the bundle counts too.
    place = (device, f"{entry.kernel} {bundle and bundle.digest} {entry.problem.key}")
    if place not in tables.loaded:
        tables.loaded[place] = load(bundle, entry, device, target)
    return tables.loaded[place]
