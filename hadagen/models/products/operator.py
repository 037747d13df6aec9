"""The operator `torch.ops.hadagen.multiply_codes`, which chooses a provider by the number of rows of each call."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.functional import linear

from hadagen.errors import DeviceError, SlowPathWarning, shortened
from hadagen.models.products import providers
from hadagen.models.products.choice import choose, chosen
from hadagen.models.products.library import capability, int8_product, with_int8_weight
from hadagen.models.products.operands import Operands, check_rows
from hadagen.runtime.call.operators import register
from hadagen.runtime.choose.entries import BATCH_INVARIANT

_KINDS = {dtype: kind for kind, dtype in providers.KINDS.items()}
_failed: set[tuple[str, int, torch.dtype, torch.dtype]] = set()  # (provider, device, types of codes and results)
_told: set[tuple[str, str]] = set()  # (GPU, kind) without any provider


def multiply_codes(
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    factors: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(codes · scales) · weightᵀ + bias, [rows, out], for what `can_multiply`. The arguments are those of `Operands`.

    The sums of INT8 codes are exact, with weights of 4 bits too; they are multiplied by scales and weight_scale in
    float32 and rounded, and then the bias is added. So all providers give the same bits. Other sums are float32. With
    HADAGEN_BATCH_INVARIANT=1, they are those of one kernel of Triton for any number of rows, which is slower for many.

    If no provider multiplies such codes on a GPU, the values that they stand for are multiplied, with a
    `SlowPathWarning`. Raises `DeviceError` in place of that under HADAGEN_BATCH_INVARIANT=1, and `TensorError` for rows
    of another length than the weight has.
    """
    added = None if bias is None else bias.to(dtype)
    of = Operands(codes, scales, weight, weight_scale, factors, added, dtype)
    if codes.device.type == "cuda":
        return _multiply(*of)  # type: ignore[no-any-return]
    check_rows(codes, weight)
    y = int8_product(with_int8_weight(of)).to(dtype)
    return y if added is None else y + added


def _real(*operands: Any) -> torch.Tensor:
    parts: Any = (each.contiguous() if isinstance(each, torch.Tensor) else each for each in operands)
    of = Operands(*parts)
    check_rows(of.codes, of.weight)
    if not of.rows or not of.out:
        return _fake(*operands)
    if of.weight.dtype == torch.uint8:
        of = of._replace(weight=_aligned(of.weight), factors=None if of.factors is None else _aligned(of.factors))
    device = of.codes.device
    is_aligned = (of.codes.data_ptr() | of.weight.data_ptr()) % providers.ALIGNMENT == 0
    sizes = (of.rows - 1).bit_length(), of.n, of.out, is_aligned  # all that `choose` and `supports` ask for
    key = *sizes, of.codes.dtype, of.weight.dtype, of.dtype, device.index
    if (known := chosen.get(key)) is not None:
        return run(known, of)
    kind = _KINDS[of.weight.dtype]
    gpu = torch.cuda.get_device_name(device)
    is_fixed = BATCH_INVARIANT and of.codes.dtype != torch.int8  # whose sums are exact
    choice = choose(gpu, capability(device), kind, of.n, of.out, of.rows)
    for name in (providers.invariant(of),) if is_fixed else choice.providers:
        failure = name, device.index or 0, of.codes.dtype, of.dtype
        if failure in _failed or not providers.supports(name, of):
            continue
        try:
            found = run(name, of)
            chosen[key] = name
            return found
        except Exception as error:  # of a compiler or its launcher, which Triton does not name
            is_of_call = isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA error" in str(error)
            if is_of_call or torch.cuda.is_current_stream_capturing():
                raise
            _failed.add(failure)
            warnings.warn(
                f"products of codes on {gpu} go on without the provider {name!r}: {shortened(str(error))}", stacklevel=2
            )
    what = f"no provider multiplies {kind} codes of [{of.rows}, {of.n}] and [{of.out}, {of.n}] on {gpu}"
    if BATCH_INVARIANT:
        raise DeviceError(f"{what} with the same bits in every call; install Triton, or unset HADAGEN_BATCH_INVARIANT")
    if (gpu, kind) not in _told:
        _told.add((gpu, kind))
        warnings.warn(
            f"{what}, so values are multiplied, which is slower; install Triton", SlowPathWarning, stacklevel=2
        )
    whole, x = with_int8_weight(of), of.codes.to(of.dtype)
    rows = x if of.scales is None else x * of.scales.to(of.dtype)
    y = linear(rows, (whole.weight.float() * of.weight_scale).to(of.dtype))
    return y if of.bias is None else y + of.bias


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x or a copy of it, as kernels for codes of 4 bits take it."""
    return x.clone() if x.data_ptr() % providers.ALIGNMENT else x


def run(name: str, of: Operands) -> torch.Tensor:
    """The result of a provider that supports these contiguous operands, with at least one row."""
    if name == providers.UNPACK:
        return _real(*of._replace(weight=providers.int8_weight(of), factors=None))
    return providers.run(name, of)


def _fake(*operands: Any) -> torch.Tensor:
    of = Operands(*operands)
    check_rows(of.codes, of.weight)
    return of.codes.new_empty((of.codes.shape[0], of.weight.shape[0]), dtype=of.dtype)


_multiply = register(
    "multiply_codes",
    "(Tensor codes, Tensor? scales, Tensor weight, Tensor weight_scale, Tensor? factors, Tensor? bias, "
    "ScalarType dtype) -> Tensor",
    _real,
    _fake,
)
