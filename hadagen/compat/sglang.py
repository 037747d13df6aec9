"""The functions of SGLang's `sgl_kernel.hadamard` and `sglang.jit_kernel.hadamard`: same names, arguments and results.

    from hadagen.compat.sglang import hadamard_transform, hadamard_transform_12n  # for: from sgl_kernel import …

They are those of `hadagen.compat.fast_hadamard_transform` by other names.
"""

from __future__ import annotations

import torch

from hadagen.compat.fast_hadamard_transform import (
    hadamard_transform,
    hadamard_transform_12N,
    hadamard_transform_20N,
    hadamard_transform_28N,
    hadamard_transform_40N,
)

__all__ = [
    "hadamard_transform",
    "hadamard_transform_12n",
    "hadamard_transform_20n",
    "hadamard_transform_28n",
    "hadamard_transform_40n",
    "hadamard_transform_with_signs",
]

hadamard_transform_12n = hadamard_transform_12N
hadamard_transform_20n = hadamard_transform_20N
hadamard_transform_28n = hadamard_transform_28N
hadamard_transform_40n = hadamard_transform_40N


def hadamard_transform_with_signs(
    x: torch.Tensor, signs1: torch.Tensor, signs2: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """signs2 · ((signs1 · x) · H) · scale over the last dimension, in a new tensor of x's shape and type.

    x, scale: as for `hadamard_transform`. signs1, signs2: [n] of ±1, of any real type, on x's device.
    """
    return hadamard_transform(x * signs1.to(x.dtype), scale) * signs2.to(x.dtype)
