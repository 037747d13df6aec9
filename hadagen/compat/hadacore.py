"""The function of HadaCore, and vLLM's wrapper of it, with the same names, arguments and results.

    from hadagen.compat.hadacore import hadamard_transform  # for: from faster_hadamard_transform import …
    from hadagen.compat.hadacore import hadacore_transform  # for: from vllm._custom_ops import …

These functions accept more than the originals: rows longer than 32768, float32 and float64, tensors on the CPU, any
strides and numbers of rows. Results are rounded once. They have gradients; results of the originals have none.
"""

from __future__ import annotations

import torch
from torch.overrides import handle_torch_function

from hadagen.errors import TensorError
from hadagen.runtime import transform
from hadagen.runtime.checks import check_is_tensor, stands_for_a_tensor

__all__ = ["hadacore_transform", "hadamard_transform"]


def hadamard_transform(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """(x · H_n) / √n over the last dimension: orthonormal, so its own inverse.

    x: [..., n] with n a power of two.
    inplace: overwrite x and return it; else the result is a new tensor of x's shape and type.

    Raises `TensorError`, a RuntimeError and a ValueError, for another n, and what `hadagen.hadamard_transform` raises.
    """
    if stands_for_a_tensor(x):
        return handle_torch_function(hadamard_transform, (x,), x, inplace)
    check_is_tensor(x, "x")
    # The transform reports all other errors.
    n = x.shape[-1] if not x.is_nested and x.dim() else 1
    if n & (n - 1):
        raise TensorError(f"the last dimension of x is {n}; it must be a power of two, so pad it with zeros")
    return transform.hadamard_transform(x, max(n, 1) ** -0.5, inplace=inplace)


def hadacore_transform(x: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """`hadamard_transform`, with vLLM's name and default: it overwrites x."""
    return hadamard_transform(x, inplace)
