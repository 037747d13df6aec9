"""Weights of 4 bits: how codes and scales lie in memory, and how a weight is rounded to the nearest codes.

A weight [out, in] has two or three tensors:

    codes    uint8 [out, in/2]. A row is cut into spans of `span_of(in)` elements. Byte j of a span has the code of its
             element j in the low nibble, and that of element span/2 + j in the high one, so a kernel multiplies each
             half of a span by contiguous inputs. A code is an integer from -8 to 7 in two's complement.
    scales   float32 [out, 1], positive and finite.
    factors  uint8 [out, in/group], integers from 1 to 16. Weights with a scale for each row have none.

Element i of row r is codes[r, i] · factors[r, i // group] · scales[r], whatever the rotation of the layer. A code times
its factor fits in 8 bits, so products of such weights are those of INT8 codes, and as exact (QServe, Lin et al., 2024,
has two levels of scales for this too). Rows are independent, so outputs can be joined and cut anywhere; inputs can be
cut between groups and spans. Kernels for INT8 codes take `unpacked(codes, factors)`.

Codes reach -8, as in GPTQ's format: the error of rounding (RMS) is 4 to 6 % smaller than with codes from -7 to 7.
"""

from __future__ import annotations

import torch

from hadagen.errors import UsageError
from hadagen.models.scheme import GROUPS

LEAST, MOST = -8, 7  # of codes
MOST_FACTOR = 16
_OF_LARGEST = 15  # the factor of the largest scale of a row, so that one may grow while GPTQ rounds others
_SPAN = 128
_LEAST_GROUP = 16  # whose factors need an eighth of the memory of its codes
_CACHED = 1 << 15  # elements that a CPU rounds at once: they stay in its cache, and no threads wait for each other
_TINY = torch.finfo(torch.float32).tiny
# Candidates for the scale of a group with the largest magnitude 1. Smaller ones clip it, and have a finer grid.
_SCALES = tuple((1 - at / 20) / (MOST + 0.5) for at in range(11))


def group_of(name: str, n: int, weights: str) -> int | None:
    """The elements of a row of n that share a factor: the largest power of two up to 128 that divides n. None for
    "int4-row". name: of the layer in messages. Raises `UsageError` if n is odd, or has no group of 16 elements."""
    if n < 2 or n % 2:
        raise UsageError(
            f'{name} has {n} inputs, and two codes of 4 bits fill a byte; ignore the layer, or use weights="int8"'
        )
    if not GROUPS[weights]:
        return None
    group = span_of(n)  # as kernels take a factor for each span
    if group < _LEAST_GROUP:
        raise UsageError(
            f'{name} has {n} inputs, which groups of {_LEAST_GROUP} or more do not fill; use weights="int4-row", or '
            "ignore the layer"
        )
    return group


def span_of(n: int) -> int:
    """The elements of a span of a row of n: the largest power of two up to 128 that divides n."""
    return min(n & -n, _SPAN)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Integers [..., n] from -8 to 7 → uint8 [..., n/2]."""
    low, high = _halves(codes.to(torch.int8), span_of(codes.shape[-1]) // 2).unbind(-2)
    return (low & 15 | high << 4).view(torch.uint8).flatten(-2)


def unpacked(codes: torch.Tensor, factors: torch.Tensor | None = None, span: int | None = None) -> torch.Tensor:
    """uint8 [..., n/2] → int8 [..., n], the codes or their products with the factors [..., groups].

    span: of the row from which these columns were cut; None for whole rows.
    """
    half = (span or span_of(2 * codes.shape[-1])) // 2
    pairs: torch.Tensor = codes.view(torch.int8).unflatten(-1, (-1, half))  # type: ignore[no-untyped-call]
    found = torch.stack((pairs << 4 >> 4, pairs >> 4), -2).flatten(-3)
    if factors is None:
        return found
    groups: torch.Tensor = found.unflatten(-1, (factors.shape[-1], -1))  # type: ignore[no-untyped-call]
    return (groups * factors.to(torch.int8)[..., None]).flatten(-2)


def _halves(x: torch.Tensor, half: int) -> torch.Tensor:
    """[..., n] → [..., spans, 2, half]."""
    return x.unflatten(-1, (-1, 2, half))  # type: ignore[no-untyped-call, no-any-return]


def values(codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The values [out, in] of packed codes with their scales and factors, in a dtype."""
    return (unpacked(codes, factors).float() * scales).to(dtype)


def nearest(x: torch.Tensor, scales: torch.Tensor | float) -> torch.Tensor:
    """The codes of x, in the type of x."""
    return (x / scales).round_().clamp_(LEAST, MOST)


def scales_of(groups: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """The scale of each group [..., n] with the least square error among `_SCALES` times its amax, float32 [..., 1].

    importance: of each element of a group, [n] or [groups, n]; None for the same of all.
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


def row_scales(scales: torch.Tensor) -> torch.Tensor:
    """The scale of each row [..., 1] whose groups have the best scales [..., groups]."""
    return (scales.amax(-1, keepdim=True) / _OF_LARGEST).clamp_(min=_TINY)


def factors_of(
    groups: torch.Tensor, best: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """The factor of each group [..., n] next to its best scale that has the least square error, float32 [..., 1].

    best: [..., 1]. scales: of rows, which the factors multiply, like best. importance: as in `scales_of`.
    """
    below = (best / scales).floor().clamp_(1, MOST_FACTOR)
    above = (below + 1).clamp_(max=MOST_FACTOR)

    def loss(factors: torch.Tensor) -> torch.Tensor:
        scale = factors * scales
        error = (nearest(groups, scale) - groups / scale).square_()
        return (error if importance is None else error.mul_(importance)).sum(-1, keepdim=True) * factors**2

    return torch.where(loss(above) < loss(below), above, below)


def rounded(weight: torch.Tensor, group: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Packed codes, scales and factors of a weight [out, in], each element rounded to the nearest code.

    group: the elements with one factor; None for weights with a scale for each row, which have no factors.
    """
    rows = max(1, _CACHED // weight.shape[1]) if weight.device.type == "cpu" else max(1, len(weight))
    parts: list[tuple[torch.Tensor, ...]] = []
    for part in weight.split(rows):  # type: ignore[no-untyped-call]
        groups = part.float().unflatten(-1, (-1, group or part.shape[1]))
        best = scales_of(groups)
        if group is None:
            parts.append((packed(nearest(groups, best).flatten(-2)), best.squeeze(-1)))
            continue
        scales = row_scales(best.squeeze(-1))
        factors = factors_of(groups, best, scales[..., None])
        codes = packed(nearest(groups, factors * scales[..., None]).flatten(-2))
        parts.append((codes, scales, factors.squeeze(-1).to(torch.uint8)))
    of_codes, of_scales, *of_factors = (torch.cat(each) for each in zip(*parts, strict=True))
    return of_codes, of_scales, of_factors[0] if of_factors else None
