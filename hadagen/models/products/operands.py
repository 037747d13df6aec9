"""What a product of codes takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hadagen.errors import TensorError


class Operands(NamedTuple):
    """(codes · scales) · weightᵀ + bias, as `multiply_codes` takes them.

    codes: int8 or float8_e4m3fn [rows, n]; or values of type float16 or bfloat16, whose scales are None. scales:
    float32 [rows, 1], or one element. weight: codes of the same type [out, n]; or uint8 [out, n/2], two codes of 4 bits
    to a byte, as `hadagen.models.int4` packs them. weight_scale: float32 [out, 1]. factors: of codes of 4 bits, uint8
    [out, groups], or None. bias: [out] of type dtype, or None. dtype: of the result.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    weight: torch.Tensor
    weight_scale: torch.Tensor
    factors: torch.Tensor | None
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def n(self) -> int:
        """The length of rows."""
        return self.codes.shape[1]

    @property
    def out(self) -> int:
        return self.weight.shape[0]


def check_rows(codes: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise `TensorError` unless the weight takes rows of this length."""
    columns = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
    if codes.dim() != 2 or codes.shape[1] != columns:
        raise TensorError(f"rows have the shape {[*codes.shape]}; the weight takes [rows, {columns}]")
