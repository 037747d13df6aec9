"""The warning of a call on a GPU that PyTorch computes: once for each problem and device, and one for each call. None
comes while PyTorch compiles, or captures a CUDA graph."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hadagen.errors import SlowPathWarning
from hadagen.problem.problem import Numerics, Rows, padded_length
from hadagen.problem.regimes import Destination
from hadagen.runtime.call.runs import ALIGNMENT
from hadagen.runtime.checks import plain
from hadagen.runtime.choose import tables
from hadagen.runtime.choose.device import cuda_device
from hadagen.runtime.choose.reasons import Asked, why_none
from hadagen.runtime.operands.packed import is_packed, is_pair, is_real

_MOST_SEEN = 4096  # because a program may have ever new row lengths
_seen: set[tuple[int, Asked]] = set()  # calls whose problem has been told, as they were asked
_told: set[tuple[Any, ...]] = set()  # device, and problem or what has none


class _Here(threading.local):
    """Of this thread: whether a call is under way whose warning was given."""

    inside = False


_here = _Here()


def is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda and x.numel() > 0


@contextmanager
def path(x: torch.Tensor, asked: Callable[[], Asked]) -> Iterator[None]:
    """A context in which PyTorch computes a call with x. Gives the warning before anything is computed, unless x is on
    no GPU or empty, or the call is a part of another one that gave a warning. asked: what the call asks for."""
    if not is_on_gpu(x) or _here.inside:
        yield
        return
    _tell(x.get_device(), asked)
    with quiet():
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which calls give no warning, because they are parts of another call."""
    before, _here.inside = _here.inside, True
    try:
        yield
    finally:
        _here.inside = before


def _tell(device: int, asked: Callable[[], Asked]) -> None:
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return
    what = asked()
    seen = device, what._replace(scale=None)
    if seen in _seen:
        return
    tell(device, what)
    with tables.lock:
        if _key(device, what) in _told:  # Python made no error of the warning, in this thread or another one
            if len(_seen) >= _MOST_SEEN:
                _seen.clear()
            _seen.add(seen)


def _key(device: int, what: Asked) -> tuple[Any, ...]:
    """What has one warning: a problem, or a call that has none, and why kernels do not take its tensors, whatever
    numbers the reason names."""
    misfit = what.misfit and re.sub(r"\d+", "", what.misfit)
    try:
        return device, what.problem, what.batch_invariant, misfit
    except ValueError:
        return device, *what._replace(scale=None, misfit=misfit, columns=0)


def tell(device: int, what: Asked) -> None:
    """Warn that PyTorch computes this on a CUDA device, unless that was told of its problem. Where Python makes an
    error of the warning, the next call gives it again."""
    key = _key(device, what)
    with tables.lock:
        if key in _told:
            return
        if len(_told) >= _MOST_SEEN:
            _told.clear()
        _told.add(key)
    try:
        accurate = what._replace(numerics=Numerics.ACCURATE.value)  # whose kernels take scales that others do not
        problems = [_key(device, each)[1] for each in (what, accurate)]
        failed = [why for kind, why in [*tables.failed.items()] if kind.device == device and kind.problem in problems]
        reason = why_none(what, cuda_device(device)) or next(iter(failed), "no kernel takes its tensors; copy them")
        message = f"PyTorch computes {what.text} on this GPU, which is slower: {reason}"
        warnings.warn(message, SlowPathWarning, stacklevel=_level())
    except BaseException:
        with tables.lock:
            _told.discard(key)
            _seen.clear()  # of calls in other threads, which were not told either
        raise


def _level() -> int:
    """The stacklevel, in `tell`, of the first caller that is neither hadagen nor PyTorch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        is_made = frame.f_code.co_filename.startswith("<eval_with_key>")  # by PyTorch, for a graph
        if not is_made and frame.f_globals.get("__name__", "").split(".")[0] not in _OURS:
            break
        level, frame = level + 1, frame.f_back
    return level


_OURS = "hadagen", "torch", "contextlib"


def asked_of(of: Any) -> Asked:
    """What a `Call` asks for, where PyTorch computes it."""
    spec, rows, matrices, misfit = of.spec, of.rows, of.matrices, None
    columns = rows.shape[-1]
    asked: dict[str, Any] = {
        "numerics": spec.numerics,
        "batch_invariant": spec.batch_invariant,
        "scale": float(of.scale),
    }
    if spec.is_linear and spec.is_h_alone:  # no kernel takes a copy of x either, which is transformed in place
        n = padded_length(of.n)
        lie = Rows.CONTIGUOUS if of.n == n else Rows.PITCHED
        return Asked(n, plain(rows.dtype), rows=lie, destination=Destination.IN_PLACE, **asked)
    if matrices is not None and not is_packed(matrices):
        misfit = "its matrix is not packed as kernels take it; make a hadagen.Rotation of the matrix"
    elif any(each.data_ptr() % ALIGNMENT or not each.is_contiguous() for _, each in of.operands):
        misfit = f"a tensor of the rotation has gaps, or an address that is no multiple of {ALIGNMENT}; clone it"
    if is_packed(matrices):
        real = is_real(matrices, spec.orders) or is_pair(matrices, spec.orders)
    else:
        real = matrices is not None and matrices.dtype != torch.int8
    return Asked(
        of.n if spec.orders or not of.n & (of.n - 1) else 1,
        plain(rows.dtype),
        columns=columns,
        orders=spec.orders,
        real=real,
        signed=spec.signs or spec.signs_after,
        swapped=spec.swapped,
        form=spec.form and spec.form.by_kernels,
        round_first=spec.round_first,
        prologue=spec.prologue.name if spec.prologue else "",
        misfit=misfit,
        **asked,
    )
