"""The functions of SGLang's `sgl_kernel.hadamard` and `sglang.jit_kernel.hadamard`: same names, arguments and results.

    from hadagen.compat.sglang import hadamard_transform, hadamard_transform_12n  # for: from sgl_kernel import …

All but `hadamard_transform_with_signs` are functions of `hadagen.compat.fast_hadamard_transform` by other names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function

from hadagen.compat.fast_hadamard_transform import (
    hadamard_transform,
    hadamard_transform_12N,
    hadamard_transform_20N,
    hadamard_transform_28N,
    hadamard_transform_40N,
)
from hadagen.errors import TensorError
from hadagen.runtime.call.runs import check_apart, has_only_memory
from hadagen.runtime.checks import (
    check_alike,
    check_autograd_follows,
    check_is_tensor,
    check_like,
    check_same_device,
    check_tensor,
    check_writable,
    kind_of,
    stands_for_a_tensor,
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
    x: torch.Tensor,
    signs1: torch.Tensor,
    signs2: torch.Tensor,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """signs2 · ((signs1 · x) · H) · scale over the last dimension, in a new tensor of x's shape and type.

    x, scale: as in `hadamard_transform`.
    signs1, signs2: [n] of ±1, in any real type, on x's device.
    out: the tensor to write and return instead, of x's shape, type and device. It may be x.

    Raises TypeError if x, signs or out is no tensor; `TensorError` for signs or an out that do not fit x; and what
    `hadamard_transform` raises.
    """
    if stands_for_a_tensor(x):
        arguments = (x, signs1, signs2, scale, out)
        return handle_torch_function(hadamard_transform_with_signs, (x,), *arguments)
    check_is_tensor(x, "x")
    check_tensor(x)
    _check_signs(signs1, "signs1", x)
    _check_signs(signs2, "signs2", x)
    if out is not None:
        check_is_tensor(out, "out")
        check_like(x, out)
        check_writable(out)
        if all(has_only_memory(each) for each in (out, signs1, signs2)):
            check_apart(out, "out", (("signs1", signs1), ("signs2", signs2)))
        if torch.is_grad_enabled() and out.requires_grad:
            check_autograd_follows(out, "out")
    y = hadamard_transform(x * signs1.to(x.dtype), scale) * signs2.to(x.dtype)
    return y if out is None else out.copy_(y)


def _check_signs(signs: Any, name: str, x: torch.Tensor) -> None:
    check_is_tensor(signs, name)
    strange = signs.is_nested or signs.layout is not torch.strided or signs.is_quantized
    if strange or signs.is_complex() or signs.dtype == torch.bool:
        raise TensorError(
            f"{name} is a {kind_of(signs)} tensor; pass a dense tensor of integers or real numbers, each 1 or -1"
        )
    check_alike(x, signs, name)
    if signs.shape != x.shape[-1:]:
        raise TensorError(f"{name} has the shape {tuple(signs.shape)}; it must be ({x.shape[-1]},), as the rows of x")
    check_same_device(name, signs.device, "x", x.device, "move it with .to(x.device)")
