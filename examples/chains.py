"""SiLU·mul, a rotation and codes in plain PyTorch, which torch.compile makes kernels of. `layer.py` times them.

A rotation of blocks of 2^m elements is a product with a Hadamard matrix H. A rotation of whole rows of K · 2^m elements
is two products, by H and by the matrix A of order K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hadagen import Rotation, hadamard_transform

# Format → elements of a rotated block; None for whole rows.
BLOCKS = {"fp8-row": None, "fp8-group": 128, "mxfp4": 32, "nvfp4": 16}
TENSOR_SCALE = 0.001  # of nvfp4


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Chain:
    """Takes x [tokens, 2·m], and returns codes and scales as `hadagen.rotate_quantize` does with `options`."""

    to: str
    rotation: Rotation
    h: torch.Tensor  # with entries of ±1, as A has
    a: torch.Tensor | None
    tensor_scale: torch.Tensor | None  # on the device, where a CUDA graph can read it

    @classmethod
    def of(cls, to: str, m: int, device: str, dtype: torch.dtype) -> Chain:
        """dtype: of x."""
        rotation = Rotation(m, block=BLOCKS[to])
        (order,) = rotation.k or (1,)
        h = hadamard_transform(torch.eye(rotation.block // order))
        a = Rotation(order, k=order).matrix(torch.float32).T.sign() if rotation.k else None
        scale = torch.full((), TENSOR_SCALE, device=device) if to == "nvfp4" else None
        return cls(to, rotation.to(device), h.to(device, dtype), a if a is None else a.to(device, dtype), scale)

    @property
    def options(self) -> dict[str, Any]:
        return {"to": self.to, "tensor_scale": self.tensor_scale}

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotated_codes(x, self.h, self.a, self.to)

    def compiled(self) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        one_graph = torch.compile(rotated_codes, dynamic=False, fullgraph=True)
        return partial(one_graph, h=self.h, a=self.a, to=self.to)


def rotated_codes(
    x: torch.Tensor, h: torch.Tensor, a: torch.Tensor | None, to: str
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = silu_mul(x).unflatten(-1, (-1, len(h))) @ h
    order = 1
    if a is not None:
        blocks, order = a @ blocks, len(a)
    return QUANTIZERS[to](blocks.flatten(-2).float() * (order * len(h)) ** -0.5)


# ---- codes and scales of float32 values ------------------------------------------------------------------------------
def in_groups(y: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """y [tokens, groups, size], and the largest magnitude of each group, [tokens, groups, 1]."""
    groups = y.unflatten(-1, (-1, size))
    return groups, groups.abs().amax(-1, keepdim=True)


def e4m3(y: torch.Tensor) -> torch.Tensor:
    return y.clamp(-448, 448).to(torch.float8_e4m3fn)


def e2m1(y: torch.Tensor) -> torch.Tensor:
    """Two codes in each byte, half to even."""
    size = y.abs()
    codes = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    codes = codes + (size > 2.5) + (size >= 3.5) + (size > 5) | y.signbit().to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


def fp8_row(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return e4m3(y / scales), scales.squeeze(-1)


def fp8_group(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups, peak = in_groups(y, 128)
    scales = peak.clamp(min=1e-4) / 448
    return e4m3(groups / scales).flatten(-2), scales.squeeze(-1)


def mxfp4(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups, peak = in_groups(y, 32)
    exponents = ((peak.view(torch.int32) >> 23) - 2).clamp(0, 254)
    factors = ((254 - exponents) << 23).view(torch.float32)
    return e2m1((groups * factors).flatten(-2)), exponents.to(torch.uint8).squeeze(-1)


def nvfp4(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups, peak = in_groups(y, 16)
    scales = (peak / 6 / TENSOR_SCALE).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    return e2m1((groups * (1 / TENSOR_SCALE / scales.float())).flatten(-2)), scales.squeeze(-1)


QUANTIZERS = {"fp8-row": fp8_row, "fp8-group": fp8_group, "mxfp4": mxfp4, "nvfp4": nvfp4}
