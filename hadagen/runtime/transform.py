"""`hadamard_transform`: the public function, and its fast path for repeated calls."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch.overrides import handle_torch_function

from hadagen.problem.choices import NumericsName
from hadagen.problem.problem import padded_length
from hadagen.problem.prologues import Prologue, text_of_value
from hadagen.runtime.call.entry import rotate
from hadagen.runtime.call.rules import Linear, follow
from hadagen.runtime.call.runs import again, is_dynamo_compiling, is_plain, remember_asked
from hadagen.runtime.checks import (
    REAL,
    as_float,
    check_is_flag,
    check_is_number,
    check_is_tensor,
    check_numerics,
    is_symbolic,
    stands_for_a_tensor,
)
from hadagen.runtime.choose.entries import BATCH_INVARIANT
from hadagen.runtime.operands.call import key_of
from hadagen.runtime.operands.spec import text_of

_NEARLY = 1e-3  # relative, as a scale may have been rounded
_has_warned = False


def hadamard_transform(
    x: torch.Tensor,
    scale: float = 1.0,
    *,
    inplace: bool = False,
    out: torch.Tensor | None = None,
    numerics: NumericsName = "accurate",
    batch_invariant: bool | None = None,
    before: Prologue | None = None,
) -> torch.Tensor:
    """(x · H_n) · scale over the last dimension, where H_n is the Hadamard matrix of ±1 in Sylvester's order.

    x: [..., m] with m at least 1, of type float16, bfloat16, float32 or float64, with any strides, on any device. If m
        is no power of two, each row is zero-padded to n, the next power of two, and the first m results are returned.
        This is not an orthonormal transform of m elements, whatever the scale, and has no inverse;
        `hadagen.Rotation(m)` is one. Kernels for the GPU run for all types except float64, and for m from 2 to 131072.
        All other calls run in plain PyTorch; on a GPU, the first of each problem gives a `SlowPathWarning`. The number
        of rows may be 0. With a product in before=, [..., 2·m]. The result of a DTensor is a DTensor, as
        docs/rotations.md says.
    scale: n ** -0.5 makes the transform orthonormal and its own inverse if m = n. For another m, n ** -0.5 gives a
        warning once. With the default of 1, results are about √n times as large as x, and at most n times. So float16
        overflows for n = 32768 if values of x are around 300.
    inplace: overwrite x and return it.
    out: the tensor to write and return, of the result's shape, dtype and device; either x itself or without overlap
        with x.
    numerics: "accurate" rounds to the type of x once, when the result is stored. "fast" may also round between steps,
        but no more often than HadaCore.
    batch_invariant: whether a row gives the same bits among any number of rows, with any strides, on every GPU of the
        same arch. Batch-invariant calls are slower at some sizes. The default is True if HADAGEN_BATCH_INVARIANT is 1
        when hadagen is first used.
    before: a value of `hadagen.prologues`, such as SiluMul(), which runs before the transform; in the same kernel, if m
        is a power of two.

    Returns a tensor [..., m] of x's dtype and device, also under autocast. It is contiguous, unless it is x or out.
    The function is differentiable in x, any number of times. It runs on the current stream of x's device.

    Raises TypeError if x, out, scale, a flag or before is of a wrong type; `UsageError`, a ValueError, for a bad scale
    or numerics, and for inplace=True where x is wider than the result; `TensorError`, also a RuntimeError, for a tensor
    that cannot be transformed or written; `DeviceError` if the GPU refuses the launch, or has no kernels that give the
    same bits in every call; `StorageError` if HADAGEN_BUNDLE names a file that is damaged or no bundle. Nothing is
    written before all arguments are checked.
    """
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    prologue = "" if before is None else text_of_value(before)
    asked = scale, numerics, batch_invariant, inplace, prologue
    # A repeated call goes straight to its kernel, past PyTorch's dispatcher, if the dispatcher has nothing to do. A
    # scale of a refused type must not be found because it equals a number.
    if is_plain(x) and isinstance(scale, REAL):
        y = again(x, _known, asked, 0, inplace, out, (), None if prologue else follow)
        if y is not None:
            return cast(torch.Tensor, y)
    if stands_for_a_tensor(x):
        named: dict[str, Any] = {"inplace": inplace, "out": out, "numerics": numerics}
        named |= {} if before is None else {"before": before}
        return handle_torch_function(hadamard_transform, (x,), x, scale, **named, batch_invariant=batch_invariant)
    check_is_flag(batch_invariant, "batch_invariant")
    check_is_tensor(x, "x")
    given: Any = scale
    if isinstance(given, torch.Tensor) and not is_dynamo_compiling() and torch._C._is_tracing():
        scale = float(given)  # computed from a shape that was traced
    check_is_number(scale)
    if not is_dynamo_compiling():  # where the operator's own checks do more for the message
        check_numerics(numerics)
        _warn_of_padding(x, 1 if before is None else before.width, scale)
    if not is_symbolic(scale):
        scale = as_float(scale)
    text = text_of(numerics=numerics, batch_invariant=bool(batch_invariant), before=prologue)
    y = rotate(x, lambda _: Linear(None, None, None, scale, text), before=before, inplace=inplace, out=out)
    if is_dynamo_compiling():
        return y
    if not (inplace and prologue):  # of which PyTorch makes two steps
        key = key_of(f"{text} inplace".strip() if inplace else text, scale)
        remember_asked(_known, (scale, *asked[1:]), key)
    return y


_known: dict[Any, int] = {}  # the keys of calls that were made, by their arguments


def _warn_of_padding(x: torch.Tensor, width: int, scale: Any) -> None:
    """Warn, once, if the scale is that of an orthonormal transform but rows are padded. In a trace, either may be open;
    then it does not warn. width: as for `Prologue`."""
    global _has_warned
    if _has_warned or is_symbolic(scale) or x.is_nested or not x.dim() or type(x.shape[-1]) is not int:
        return
    columns = x.shape[-1] // width
    n = padded_length(columns)
    if n != columns and any(abs(abs(float(scale)) * length**0.5 - 1) < _NEARLY for length in (columns, n)):
        _has_warned = True
        warnings.warn(
            f"rows of {columns} elements are padded to {n}, and {n - columns} results are cut off, so the transform is "
            f"not orthonormal with scale = {float(scale):.4g}; use hadagen.Rotation({columns}), which is",
            UserWarning,
            stacklevel=3,  # the caller of hadamard_transform
        )
