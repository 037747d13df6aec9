"""Keys and values in codes, as a cache holds them: for each head of a token its codes, and then their scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hadagen.errors import UsageError
from hadagen.models.scheme import CACHES
from hadagen.runtime.quantize import rotate_quantize
from hadagen.runtime.rotation import Rotation

_SCALE = torch.float32
_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.int8}


@dataclass(frozen=True)
class HeadCodes:
    """Heads of `head` elements as bytes, in a format of `CACHES`.

    Codes and scale are one tensor, so a cache that appends, drops, sorts and moves tokens handles both at once, and
    bytes of zeros stand for zeros. Raises `UsageError` if the codes do not fill words, as the scale behind them needs.
    """

    cache: str
    head: int

    def __post_init__(self) -> None:
        if self.head * self._bits % (8 * _SCALE.itemsize):
            raise UsageError(
                f"head_dim = {self.head} has no cache of {self.cache}; it must be a multiple of {32 // self._bits}, so "
                "leave cache out"
            )

    @property
    def _bits(self) -> int:
        return 4 if self.cache == "int4" else 8

    @property
    def row(self) -> int:
        """Bytes of a head: its codes and the scale."""
        return self.head * self._bits // 8 + _SCALE.itemsize

    def pack(self, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """The bytes of heads that are rotated and quantized in one kernel: [..., head] → uint8 [..., row]."""
        q = rotate_quantize(x.contiguous(), rotation, to=CACHES[self.cache])  # else codes lie as x does
        scales = q.scales.to(_SCALE).reshape(*x.shape[:-1], 1)
        return torch.cat((q.codes.view(torch.uint8), _bytes_of(scales)), -1)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rotated values that bytes stand for, [..., head] of dtype."""
        at = self.row - _SCALE.itemsize
        codes, scales = packed[..., :at].view(_TYPES[self.cache]), _scales_of(packed[..., at:])
        if self.cache == "int4":  # the even element is in the low nibble
            codes = torch.stack((codes << 4 >> 4, codes >> 4), -1).flatten(-2)
        return codes.to(dtype).mul_(scales)  # exact codes, one rounding, and no float32 tensor of a whole cache


# Inductor chooses strides by itself. In PyTorch 2.11 it refuses to view some tensors as a type of another size.
# So compiled code computes what a view shows.
def _bytes_of(scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., 1] → uint8 [..., 4]."""
    if not torch.compiler.is_compiling():
        return scales.contiguous().view(torch.uint8)
    return (scales.view(torch.int32) >> _shifts(scales.device) & 255).to(torch.uint8)


def _scales_of(parts: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4] → float32 [..., 1]."""
    if not torch.compiler.is_compiling():
        return parts.view(_SCALE)
    return (parts.to(torch.int32) << _shifts(parts.device)).sum(-1, True, dtype=torch.int32).view(_SCALE)


def _shifts(device: torch.device) -> torch.Tensor:
    """Of the bytes of 32 bits, the lowest first."""
    return torch.arange(0, 32, 8, dtype=torch.int32, device=device)
