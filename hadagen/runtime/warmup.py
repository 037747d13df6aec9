"""`warmup`: loads the kernels of later calls."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from typing import Any

import torch

from hadagen.errors import UsageError, shown
from hadagen.problem.choices import FormatName, LayoutName, NumericsName, RuleName
from hadagen.problem.formats import Format
from hadagen.problem.problem import DType, Numerics, Problem, Rows, check_no_format, padded_length
from hadagen.problem.prologues import Prologue, name_of, named
from hadagen.problem.regimes import Destination
from hadagen.runtime.arguments import as_int, as_whole, check_flags, explained, is_flag
from hadagen.runtime.call.find import asked_of
from hadagen.runtime.call.slow import tell
from hadagen.runtime.checks import plain
from hadagen.runtime.choose import tables
from hadagen.runtime.choose.device import cuda_device, cuda_index
from hadagen.runtime.choose.entries import BATCH_INVARIANT, is_served
from hadagen.runtime.choose.reasons import Asked, why_none
from hadagen.runtime.launch import kernels
from hadagen.runtime.launch.kernels import Kind, problem_of
from hadagen.runtime.launch.loading import compile_missing
from hadagen.runtime.quantize import problems_of
from hadagen.runtime.rotation import Rotation


@explained(TypeError)
def warmup(
    n: int | Rotation | Iterable[int | Rotation],
    dtype: torch.dtype | str | Iterable[torch.dtype | str],
    *,
    rows: int | Iterable[int] | None = None,
    inplace: bool | None = None,
    numerics: NumericsName | None = None,
    device: int | str | torch.device | None = None,
    batch_invariant: bool | None = None,
    to: FormatName | Iterable[FormatName] | None = None,
    columns: int | Iterable[int] | None = None,
    group: int | None = None,
    rule: RuleName | None = None,
    layout: LayoutName = "row-major",
    round_first: bool = False,
    before: Prologue | str | None = None,
    strict: bool = False,
) -> int:
    """Load the kernels of later calls now, so that no call waits for a kernel or loads it during a CUDA graph capture.
    Kernels without a cubin for the GPU are compiled, as many at a time as there are CPUs.

    n: last dimensions of the later tensors, each at least 1, or the `Rotation` of later calls.
    dtype: their types, such as torch.float16 or "float16".
    rows: their numbers of rows (the product of all dimensions but the last); by default any number.
    inplace, numerics: the arguments of the later calls; by default both values. `out=` counts as not in place.
    device: the device of the later tensors; by default the current CUDA device. Other kinds of devices have no kernels.
    batch_invariant: the argument of the later calls; by default what HADAGEN_BATCH_INVARIANT says.

    to: formats of later calls of `rotate_quantize`. n is then the rotation: a `Rotation`, or a power of two, 1 for no
        rotation. inplace is ignored.
    columns: the last dimensions of the later results; by default n, or the n of the `Rotation`. With a product in
        before=, the later tensors are twice as wide.
    group, rule, layout, round_first: the arguments of the later calls.
    before: the argument of the later calls, or its name, such as "silu_mul". n is then the rotation, as for `to`.
        Kernels do not depend on limit, alpha and beta.
    strict: raise `UsageError`, with the first reason, if PyTorch computes any of the later calls: before any kernel is
        loaded, unless one turns out to be missing only then. Without it, a `SlowPathWarning` tells of kernels that
        cannot be loaded.

    Tensors whose rows have gaps, or whose address is no multiple of 16 bytes, have other kernels, which are loaded too.
    With HADAGEN_AUTOTUNE=1, each problem of these calls is measured first, unless it was measured before.

    Returns the number of different kernels that the calls may run; 0 if PyTorch computes them.

    Raises `UsageError` for a bad argument or a missing device, and as `strict` says; `DeviceError` if a kernel cannot
    be loaded while a graph is captured; and `StorageError` if HADAGEN_BUNDLE names a file that is damaged or no bundle.
    """
    if inplace is not None and not is_flag(inplace):
        raise UsageError(f"inplace = {shown(inplace)} is not supported; give True, False, or nothing for both")
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    check_flags(batch_invariant=batch_invariant, round_first=round_first, strict=strict)
    if to is None:
        check_no_format(columns, group, rule, layout, bool(round_first))
    prologue = name_of(before)
    rotations, of_rotation = _several(n), to is not None or prologue != ""
    lengths = [_whole(getattr(each, "n", each), "n") for each in rotations]
    dtypes = [_dtype(value) for value in _several(dtype)]
    contracts = [Numerics.ACCURATE]
    if numerics is None or Problem.of(2, DType.FLOAT16, numerics).io.numerics is Numerics.FAST:
        contracts.append(Numerics.FAST)  # falls back to accurate if the scale is out of its range
    counts = None if rows is None else [_whole(value, "rows") for value in _several(rows)]
    forms: list[Format | None] = [
        None if to is None else Format.choose(name, as_int(group), rule, layout)
        for name in _several((None,) if to is None else to)
    ]
    widths = None if columns is None else [_whole(value, "columns") for value in _several(columns)]
    for length, each in product(widths or lengths, filter(None, forms)):
        each.scales_in_row(length)
    index = _warmed_device(device)
    if index is None:
        if strict:
            raise UsageError(
                f"no kernel runs on device {shown(device or 'cpu')}, so PyTorch computes these calls; name a CUDA "
                "device, or leave out strict"
            )
        return 0
    kinds: list[tuple[Kind, int]] = []  # and the elements of a row
    slow: list[Asked] = []  # what PyTorch computes
    for rotation, length in zip(rotations, lengths, strict=True):
        for given in dtypes:
            if of_rotation or isinstance(rotation, Rotation):
                places = (False,) if of_rotation else (bool(inplace), True)
                for form, width, contract in product(forms, widths or [length], contracts):
                    how = form, bool(round_first), contract, bool(batch_invariant), prologue, places
                    found, asks = _rotating(index, rotation, _row(width, given, index), *how)
                    kinds += found
                    slow += [asks] if asks else []
                continue
            row = padded_length(length)
            for contract, lie in product(contracts, Rows):
                if problem := problem_of(row, given, contract.value, lie):
                    # Tensors that must be copied are transformed in place, in the copy.
                    ways = dict.fromkeys((bool(inplace), True))
                    kinds += [(Kind(index, problem, place, bool(batch_invariant)), row) for place in ways]
            for contract in contracts if strict else ():
                last = [problem_of(row, given, contract.value, lie) for lie in Rows]  # of which one takes a copy
                if not any(p and kernels.timed_of(Kind(index, p, True, bool(batch_invariant))) for p in last):
                    lie = Rows.CONTIGUOUS if row == length else Rows.PITCHED
                    asks = Asked(row, plain(given), rows=lie, destination=Destination.IN_PLACE)
                    slow.append(asks._replace(numerics=contract.value, batch_invariant=bool(batch_invariant)))
    if strict and slow:
        first, others = slow[0], len({each.text for each in slow}) - 1
        rest = f" and {others} more problem{'s' * (others > 1)}" if others else ""
        raise UsageError(f"PyTorch computes {first.text}{rest} on this GPU: {why_none(first, cuda_device(index))}")
    asked: list[tuple[Kind, int]] = []
    for kind, row in dict.fromkeys(kinds):
        timed = kernels.timed_of(kind)
        # Without `rows`, all counts from a single row on.
        wanted = [row, *(e for e in timed if e > row)] if counts is None else [row * count for count in counts]
        asked += [(kind, elements) for elements in wanted]
    if target := cuda_device(index):
        compile_missing([chosen for each in asked if (chosen := kernels.choose(*each, target))], target)
    loaded = {each: kernels.find(*each) for each in asked}
    there = {_contiguous(kind) for (kind, _), kernel in loaded.items() if kernel is not None}
    missed = [kind for kind, _ in dict.fromkeys(kinds) if kind in tables.failed and _contiguous(kind) not in there]
    if strict and missed:
        raise UsageError(f"PyTorch computes {missed[0].problem.key} on this GPU: {tables.failed[missed[0]]}")
    if target and not is_served(target):
        missed = [kind for kind, _ in kinds[:1]]
    for kind in missed:  # whose calls may be captured, without a word
        tell(index, Asked.of(kind.problem, kind.problem.unit, kind.destination, kind.batch_invariant))
    return len({id(kernel) for kernel in loaded.values()} - {id(None)})


def _contiguous(kind: Kind) -> Problem:
    """Its problem for contiguous rows. The kernels of all rows and destinations stand for each other, on a copy."""
    return kind.problem.with_io(rows=Rows.CONTIGUOUS)


def _rotating(
    device: int,
    rotation: Any,
    x: torch.Tensor,
    form: Format | None,
    round_first: bool,
    numerics: Numerics,
    batch_invariant: bool,
    prologue: str,
    places: tuple[bool, ...],
) -> tuple[list[tuple[Kind, int]], Asked | None]:
    """The kinds of kernels of calls with a rotation and results like x, in place or not, each with the elements of a
    row; and what the calls ask for, if PyTorch computes them with these kernels at best."""
    of, whole, *others = problems_of(x, rotation, form, round_first, numerics.value, batch_invariant, prologue)
    found = [Kind(device, whole, place, batch_invariant) for place in dict.fromkeys(places)] if whole else []
    if any(map(kernels.timed_of, found)):
        return [(kind, x.shape[-1]) for kind in found], None
    asked = asked_of(of)._replace(scale=None)
    if prologue and named(prologue).is_rounded:  # whose result kernels without a prologue take
        return _rotating(device, rotation, x, form, round_first, numerics, batch_invariant, "", places)[0], asked
    # PyTorch does all but the rotation, for which other kernels are, in place.
    return [(Kind(device, each, True, batch_invariant), x.shape[-1]) for each in others if each], asked


def _warmed_device(device: int | str | torch.device | None) -> int | None:
    """The CUDA index of a device; None if such a device has no kernels. Raises `UsageError` if it does not exist."""
    if device is None and not torch.cuda.is_available():
        return None
    with suppress(RuntimeError, TypeError, ValueError, OverflowError):  # it names no device
        if device is not None and torch.device(device).type != "cuda":
            return None
    index = cuda_index(device)
    if index is None:
        raise UsageError(f"device {shown(device)} is not a CUDA device of this machine; name a device of this machine")
    return index


def _row(columns: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    return torch.empty((1, columns), dtype=dtype, device=f"cuda:{device}")


def _several(values: Any) -> list[Any]:
    try:
        return [values] if isinstance(values, str) else list(values)
    except (TypeError, ValueError, RuntimeError):  # no iterable, or an array without a dimension
        return [values]


def _whole(value: Any, name: str) -> int:
    return as_whole(value, name, "whole numbers, at least 1")


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype {shown(value)} is not supported; give a floating-point type, such as torch.float16")
    return found
