"""The functions of fast_hadamard_transform (version 1.1.0): same names, arguments and results.

    from hadagen.compat.fast_hadamard_transform import hadamard_transform

These functions accept more than the originals: rows longer than 32768, float64, tensors on the CPU, second derivatives.
"""

from __future__ import annotations

from numbers import Complex
from typing import Any

import torch
from torch.overrides import handle_torch_function

from hadagen.runtime import transform
from hadagen.runtime.checks import check_call, check_is_tensor, is_symbolic, stands_for_a_tensor

__all__ = [
    "hadamard_transform",
    "hadamard_transform_12N",
    "hadamard_transform_20N",
    "hadamard_transform_28N",
    "hadamard_transform_40N",
    "hadamard_transform_ref",
]


def hadamard_transform(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """(x · H_n) · scale over the last dimension, in a new tensor of x's shape and type; differentiable in x.

    x: [..., m] with any m ≥ 1. If m is no power of two, n is the next one: x is zero-padded, and the first m results
        are returned.
    scale: a number, a value that `float` converts, or a tensor of one element, which gets no gradient.

    Raises what `hadagen.hadamard_transform` raises.
    """
    if stands_for_a_tensor(x):
        return handle_torch_function(hadamard_transform, (x,), x, scale)
    if isinstance(scale, torch.Tensor):
        check_is_tensor(x, "x")
    return transform.hadamard_transform(x, _number(scale))


def hadamard_transform_ref(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The same by a product with the explicit matrix, in x's type. It is slow and takes O(m²) memory; for tests."""
    # A TorchScript cannot call the checks, and its scale is always a float.
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        if stands_for_a_tensor(x):
            return handle_torch_function(hadamard_transform_ref, (x,), x, scale)
        check_is_tensor(x, "x")
        scale = _number(scale)
        check_call(x, scale, "accurate")
    m = x.shape[-1]
    matrix = torch.ones((1, 1), dtype=x.dtype, device=x.device)
    factor = torch.tensor([[1, 1], [1, -1]], dtype=x.dtype, device=x.device)
    while matrix.shape[0] < m:
        matrix = torch.kron(factor, matrix)
    # The zeros of a padded x would meet only the rows that are cut off here.
    return torch.nn.functional.linear(x, matrix[:m, :m]) * scale


def hadamard_transform_12N(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Planned. Raises NotImplementedError."""
    raise _planned(12)


def hadamard_transform_20N(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Planned. Raises NotImplementedError."""
    raise _planned(20)


def hadamard_transform_28N(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Planned. Raises NotImplementedError."""
    raise _planned(28)


def hadamard_transform_40N(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Planned. Raises NotImplementedError."""
    raise _planned(40)


def _number(scale: Any) -> Any:
    """The only element of a tensor, or the float value of an array or a Decimal; any other scale unchanged.

    Raises TypeError for a tensor without a value, and for a tensor or array that has not exactly one element or is
    complex.
    """
    if not isinstance(scale, torch.Tensor):
        known = isinstance(scale, Complex) or is_symbolic(scale) or not hasattr(type(scale), "__float__")
        return scale if known else float(scale)
    if scale.is_meta:
        raise TypeError("scale is on the meta device, where it has no value; pass a number, or a tensor that has one")
    if scale.is_complex() or scale.numel() != 1:
        plain = str(scale.dtype).removeprefix("torch.")
        raise TypeError(
            f"scale is a {plain} tensor of shape {tuple(scale.shape)}; pass a real number, or a tensor of one"
        )
    return float(scale.detach())


def _planned(k: int) -> NotImplementedError:
    return NotImplementedError(
        f"hadamard_transform_{k}N is not in hadagen yet (planned: n = K·2^m, K = {k} among them); "
        "import it from fast_hadamard_transform until then"
    )
