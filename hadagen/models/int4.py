"""Weights of 4 bits: how codes and scales lie in memory, and how a weight is rounded to the nearest codes.

A weight [out, in] has two tensors:

    codes   uint8 [out, in/2]: byte j of a row has the code of element 2j in its low nibble, and that of element 2j + 1
            in its high nibble. A code is an integer from -8 to 7 in two's complement, so a byte, taken as int8, gives
            both codes by shifts: byte << 4 >> 4, and byte >> 4.
    scales  float32 [out, in/group], positive and finite. With a scale for each row, group = in.

Element i of row r is codes[r, i] · scales[r, i // group], whatever the rotation of the layer. Rows are independent, so
outputs can be joined and cut anywhere; inputs can be cut between groups. Products of codes [out, in] of 8 bits take
`unpacked(codes)`. Formats with codes from 0 to 15 and a zero point of 8 have the same bytes, XOR 0x88.

Codes reach -8, as in GPTQ's format: the error of rounding (RMS) is 4 to 6 % smaller than with codes from -7 to 7.
"""

from __future__ import annotations

import torch

from hadagen.errors import UsageError
from hadagen.models.scheme import GROUPS

LEAST, MOST = -8, 7  # of codes
_LEAST_GROUP = 16  # whose scales need half the memory of its codes
_CACHED = 1 << 15  # elements that a CPU rounds at once: they stay in its cache, and no threads wait for each other
_TINY = torch.finfo(torch.float32).tiny
# Candidates for the scale of a group with the largest magnitude 1. Smaller ones clip it, and have a finer grid.
_SCALES = tuple((1 - at / 20) / (MOST + 0.5) for at in range(11))


def group_of(name: str, n: int, weights: str) -> int:
    """The elements of a row of n that share a scale: n for "int4-row", else the largest power of two up to 128 that
    divides n. name: of the layer in messages. Raises `UsageError` if n is odd, or has no group of 16 elements."""
    if n < 2 or n % 2:
        raise UsageError(
            f'{name} has {n} inputs, and two codes of 4 bits fill a byte; ignore the layer, or use weights="int8"'
        )
    most = GROUPS[weights]
    if most is None:
        return n
    group = min(n & -n, most)
    if group < _LEAST_GROUP:
        raise UsageError(
            f'{name} has {n} inputs, which groups of {_LEAST_GROUP} or more do not fill; use weights="int4-row", or '
            "ignore the layer"
        )
    return group


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Integers [..., n] from -8 to 7 → uint8 [..., n/2]."""
    codes = codes.to(torch.int8)
    return (codes[..., ::2] & 15 | codes[..., 1::2] << 4).view(torch.uint8)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n/2] → int8 [..., n]."""
    pairs = codes.view(torch.int8)
    return torch.stack((pairs << 4 >> 4, pairs >> 4), -1).flatten(-2)


def values(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values [out, in] of packed codes and their scales [out, groups], in a dtype."""
    parts: torch.Tensor = unpacked(codes).unflatten(-1, (scales.shape[-1], -1))  # type: ignore[no-untyped-call]
    return (parts.float() * scales[..., None]).flatten(-2).to(dtype)


def nearest(x: torch.Tensor, scales: torch.Tensor | float) -> torch.Tensor:
    """The codes of x, in the type of x."""
    return (x / scales).round_().clamp_(LEAST, MOST)


def scales_of(groups: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """The scale of each group [..., n] with the least square error among `_SCALES`, float32 [..., 1].

    importance: of each element of a group, [n]; None for the same of all.
    """
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=_TINY)
    units = groups / amax
    least = best = torch.full_like(amax, torch.inf)
    for scale in _SCALES:
        codes = units * (1 / scale)
        error = codes.round().clamp_(LEAST, MOST).sub_(codes).square_()
        total = (error if importance is None else error.mul_(importance)).sum(-1, keepdim=True) * scale**2
        is_less = total < least
        least, best = torch.where(is_less, total, least), torch.where(is_less, scale, best)
    return best.mul_(amax).clamp_(min=_TINY)


def rounded(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales of a weight [out, in], each element rounded to the nearest code."""
    rows = max(1, _CACHED // weight.shape[1]) if weight.device.type == "cpu" else max(1, len(weight))
    parts = []
    for part in weight.split(rows):  # type: ignore[no-untyped-call]
        groups = part.float().unflatten(-1, (-1, group))
        scales = scales_of(groups)
        parts.append((packed(nearest(groups, scales).flatten(-2)), scales.squeeze(-1)))
    codes, found = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(found)
