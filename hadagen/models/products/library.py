"""Products of codes by PyTorch's own functions."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hadagen.models import int4
from hadagen.models.products.operands import Operands

_ROWS = 17  # the fewest rows of INT8 codes that torch._int_mm takes on a GPU


def multiplies(codes: torch.Tensor, weight: torch.Tensor, capability: int) -> bool:
    """Whether PyTorch multiplies codes of both types on a device. Codes of 4 bits become INT8 codes first.

    capability: of the GPU, 10 · major + minor; 0 for another device.
    """
    kind = torch.int8 if weight.dtype == torch.uint8 else weight.dtype
    if kind != codes.dtype or not codes.numel():
        return False
    if weight.device.type == "cpu":
        return kind == torch.int8
    return capability >= (75 if kind == torch.int8 else 89) and fits(kind, weight.shape[0], codes.shape[-1])


def fits(dtype: torch.dtype, out: int, n: int) -> bool:
    """Whether PyTorch's products on GPUs take codes of these sizes."""
    by = 8 if dtype == torch.int8 else 16
    return out % by == 0 and n % by == 0


def with_int8_weight(of: Operands) -> Operands:
    """The same with INT8 codes of the weight in place of codes of 4 bits."""
    if of.weight.dtype != torch.uint8:
        return of
    # Not by _replace, which torch.compile of PyTorch 2.6 lacks.
    weight = int4.unpacked(of.weight, of.factors)
    return Operands(of.codes, of.scales, weight, of.weight_scale, None, of.bias, of.dtype)


def int8_product(of: Operands) -> torch.Tensor:
    """The product of INT8 codes without the bias, float32 [rows, out]."""
    assert of.scales is not None
    rows = of.codes.shape[0]  # no property, which torch.compile of PyTorch 2.6 does not know
    # The type of device comes first, so that graphs for a CPU take any number of rows.
    is_short = of.codes.device.type != "cpu" and rows < _ROWS
    filled = pad(of.codes, (0, 0, 0, _ROWS - rows)) if is_short else of.codes
    return torch._int_mm(filled, of.weight.T)[:rows] * of.scales * of.weight_scale.T


def fp8_product(of: Operands, *, by_row: bool) -> torch.Tensor:
    """The product of FP8 codes without the bias, [rows, out].

    by_row: whether the product itself applies the scales, which gives bfloat16. If not, the result is float32.
    """
    assert of.scales is not None
    if by_row:
        scales = of.scales.expand(of.rows, 1).contiguous()
        return torch._scaled_mm(
            of.codes, of.weight.T, scale_a=scales, scale_b=of.weight_scale.T, out_dtype=torch.bfloat16
        )
    one = of.weight_scale.new_ones(())
    sums = torch._scaled_mm(of.codes, of.weight.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return sums * of.scales * of.weight_scale.T


def capability(device: torch.device) -> int:
    """10 · major + minor of an NVIDIA GPU, 0 of another device."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    major, minor = torch.cuda.get_device_capability(device) if is_nvidia else (0, 0)
    return 10 * major + minor
