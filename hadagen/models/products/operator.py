"""The operator `torch.ops.hadagen.multiply_codes`, which chooses a provider by the number of rows of each call."""

from __future__ import annotations

import warnings

import torch
from torch.nn.functional import linear

from hadagen.errors import DeviceError, SlowPathWarning, shortened
from hadagen.models.products import providers
from hadagen.models.products.choice import choose
from hadagen.models.products.library import capability, int8_product
from hadagen.runtime.choose import BATCH_INVARIANT
from hadagen.runtime.operators import register

_KINDS = {dtype: kind for kind, dtype in providers.KINDS.items()}
_INVARIANT = "tile 64x64x128, 4, 5"  # whose sums of FP8 codes are those of each row alone, in one order
_failed: set[tuple[str, int, str, torch.dtype]] = set()  # (provider, device, kind, type of results) that cannot run
_told: set[tuple[str, str]] = set()  # (GPU, kind) without any provider


def multiply_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(codes · scales) · (weight · weight_scale)ᵀ + bias, [rows, out], for codes that `can_multiply`.

    codes: int8 or float8_e4m3fn [rows, n]. scales: float32 [rows, 1], or one element. weight: codes of the same type
    [out, n]. weight_scale: float32 [out, 1]. bias: [out], or None. dtype: of the result, float16, bfloat16 or float32.

    The sums of INT8 codes are exact; they are multiplied by scales and weight_scale in float32 and rounded, and then
    the bias is added. So all providers give the same bits. The sums of FP8 codes are float32. With
    HADAGEN_BATCH_INVARIANT=1, they are those of one kernel of Triton for any number of rows, which is slower for many.

    If no provider multiplies such codes on a GPU, the values that they stand for are multiplied, with a
    `SlowPathWarning`. Raises `DeviceError` in place of that under HADAGEN_BATCH_INVARIANT=1.
    """
    added = None if bias is None else bias.to(dtype)
    if codes.device.type == "cuda":
        return _multiply(codes, scales, weight, weight_scale, added, dtype)  # type: ignore[no-any-return]
    y = int8_product(codes, scales, weight, weight_scale).to(dtype)
    return y if added is None else y + added


def _real(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    (rows, n), out = codes.shape, weight.shape[0]
    if not rows or not out:
        return codes.new_empty((rows, out), dtype=dtype)
    device, kind = codes.device, _KINDS[codes.dtype]
    gpu = torch.cuda.get_device_name(device)
    operands = codes.contiguous(), scales.contiguous(), weight.contiguous(), weight_scale.contiguous()
    is_fixed = BATCH_INVARIANT and kind != "int8"  # whose sums are exact
    chosen = (_INVARIANT,) if is_fixed else choose(gpu, capability(device), kind, n, out, rows).providers
    for name in chosen:
        key = name, device.index or 0, kind, dtype
        if key in _failed or not providers.supports(name, codes, weight, dtype):
            continue
        try:
            return providers.run(name, *operands, bias, dtype)
        except Exception as error:  # of a compiler or its launcher, which Triton does not name
            is_of_call = isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA error" in str(error)
            if is_of_call or torch.cuda.is_current_stream_capturing():
                raise
            _failed.add(key)
            warnings.warn(
                f"products of codes on {gpu} go on without the provider {name!r}: {shortened(str(error))}", stacklevel=2
            )
    what = f"no provider multiplies {kind} codes [{rows}, {n}] and [{out}, {n}] on {gpu}"
    if BATCH_INVARIANT:
        raise DeviceError(f"{what} with the same bits in every call; install Triton, or unset HADAGEN_BATCH_INVARIANT")
    if (gpu, kind) not in _told:
        _told.add((gpu, kind))
        warnings.warn(
            f"{what}, so values are multiplied, which is slower; install Triton", SlowPathWarning, stacklevel=2
        )
    y = linear(codes.to(dtype) * scales.to(dtype), (weight.float() * weight_scale).to(dtype))
    return y if bias is None else y + bias


def _fake(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=dtype)


_multiply = register(
    "multiply_codes",
    "(Tensor codes, Tensor scales, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    _real,
    _fake,
)
