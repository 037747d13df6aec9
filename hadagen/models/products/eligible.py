"""Whether a layer multiplies its codes, or what they stand for. Dynamo may trace this."""

from __future__ import annotations

import torch

from hadagen.models.products import library, providers


def can_multiply(codes: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether any provider multiplies codes [rows, n] by those of a weight [out, n] on their device, or by codes of 4
    bits [out, n/2], which values of 16 bits are multiplied by too. If not, they are dequantized."""
    if not codes.numel():
        return False
    if library.multiplies(codes, weight, capability(codes.device)):
        return True
    return providers.has_tile(codes.dtype, weight.dtype, codes.shape[-1]) and _has_tiles(codes.dtype, codes.device)


# Dynamo compares no constant tuples before PyTorch 2.13, and looks for no modules.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def capability(device: torch.device) -> int:
    """10 · major + minor of a GPU, 0 of another device."""
    return library.capability(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_tiles(dtype: torch.dtype, device: torch.device) -> bool:
    return providers.has_tiles(dtype, library.capability(device))
