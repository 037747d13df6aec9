"""Products of codes by PyTorch's own functions."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

_ROWS = 17  # the fewest rows of INT8 codes that torch._int_mm takes on a GPU


def multiplies(codes: torch.Tensor, weight: torch.Tensor, capability: int) -> bool:
    """Whether PyTorch multiplies codes of both types on a device. If not, they are dequantized.

    capability: of the GPU, 10 · major + minor; 0 for another device.
    """
    if weight.dtype != codes.dtype or not codes.numel():
        return False
    if weight.device.type == "cpu":
        return weight.dtype == torch.int8
    return capability >= (75 if weight.dtype == torch.int8 else 89) and fits(weight.dtype, *weight.shape)


def fits(dtype: torch.dtype, out: int, n: int) -> bool:
    """Whether PyTorch's products on GPUs take codes of these sizes."""
    by = 8 if dtype == torch.int8 else 16
    return out % by == 0 and n % by == 0


def int8_product(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """(codes · scales) · (weight · weight_scale)ᵀ, float32 [rows, out]. scales: float32 [rows, 1]."""
    rows = codes.shape[0]
    # The type of device comes first, so that graphs for a CPU take any number of rows.
    filled = pad(codes, (0, 0, 0, _ROWS - rows)) if codes.device.type != "cpu" and rows < _ROWS else codes
    return torch._int_mm(filled, weight.T)[:rows] * scales * weight_scale.T


def fp8_product(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, *, by_row: bool
) -> torch.Tensor:
    """(codes · scales) · (weight · weight_scale)ᵀ of FP8 codes, [rows, out].

    by_row: whether the product itself applies the scales, which gives bfloat16. If not, the result is float32.
    """
    if by_row:
        scales = scales.expand(codes.shape[0], 1).contiguous()
        return torch._scaled_mm(codes, weight.T, scale_a=scales, scale_b=weight_scale.T, out_dtype=torch.bfloat16)
    one = weight_scale.new_ones(())
    sums = torch._scaled_mm(codes, weight.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return sums * scales * weight_scale.T


def capability(device: torch.device) -> int:
    """10 · major + minor of an NVIDIA GPU, 0 of another device."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    major, minor = torch.cuda.get_device_capability(device) if is_nvidia else (0, 0)
    return 10 * major + minor
