"""The functions of fast_hadamard_transform (version 1.1.0): same names, arguments and results.

    from hadagen.compat.fast_hadamard_transform import hadamard_transform

These functions accept more than the originals: rows longer than 32768, float64, tensors on the CPU, second derivatives.
Gradients of `hadamard_transform_20N`, `_28N` and `_40N` are right. The originals multiply the gradient by the matrix
instead of its transpose, and the matrix is not symmetric.
"""

from __future__ import annotations

from numbers import Complex
from typing import Any, cast

import torch
from torch.nn.functional import pad
from torch.overrides import handle_torch_function

from hadagen.errors import TensorError, shown
from hadagen.problem.problem import kernel_order, padded_length
from hadagen.runtime import transform
from hadagen.runtime.arguments import is_flag
from hadagen.runtime.call.entry import rotated_by
from hadagen.runtime.call.named import named_matrix
from hadagen.runtime.checks import check_call, check_is_tensor, has_values, is_symbolic, stands_for_a_tensor

__all__ = [
    "hadamard_transform",
    "hadamard_transform_12N",
    "hadamard_transform_20N",
    "hadamard_transform_28N",
    "hadamard_transform_40N",
    "hadamard_transform_ref",
]

# The smallest and the largest n / K, a power of two, for which the originals have a kernel.
_LEAST, _MOST = 4, 1024


def hadamard_transform(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """(x · H_n) · scale over the last dimension, in a new tensor of x's shape and type; differentiable in x.

    x: [..., m] with any m ≥ 1. n is m or the next power of two: x is zero-padded to n, and the first m results are
        returned.
    scale: a number, a value that `float` converts, or a tensor of one element, which gets no gradient.

    Raises what `hadagen.hadamard_transform` raises.
    """
    if stands_for_a_tensor(x):
        return handle_torch_function(hadamard_transform, (x,), x, scale)
    if isinstance(scale, torch.Tensor):
        check_is_tensor(x, "x")
    return transform.hadamard_transform(x, _number(scale))


def hadamard_transform_ref(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`hadamard_transform` as a product with the explicit matrix, in x's type. For tests: it is slow and takes O(m²)
    memory."""
    # A TorchScript cannot call the checks, and its scale is always a float.
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        if stands_for_a_tensor(x):
            return handle_torch_function(hadamard_transform_ref, (x,), x, scale)
        check_is_tensor(x, "x")
        scale = _number(scale)
        check_call(x, scale, "accurate")
    m = x.shape[-1]
    matrix = x.new_ones((1, 1))
    while matrix.shape[0] < m:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    # The zeros of a padded x would meet only the rows that are cut off here.
    return torch.nn.functional.linear(x, matrix[:m, :m]) * scale


def hadamard_transform_12N(x: torch.Tensor, scale: float | torch.Tensor = 1.0, *, exact: bool = False) -> torch.Tensor:
    """(x · (H_12 ⊗ H)ᵀ) · scale over the last dimension, in a new tensor of x's shape and type; differentiable in x.

    x: [..., m] with m ≤ 12 · 1024. Each row is zero-padded to 12 · 4, 12 · 8, …, and the first m results are returned.
        So rows of 12 and 12 · 2 lose a part of their transform, as in the original.
    scale: as in `hadamard_transform`.
    exact: take rows of any length that is 12 times a power of two, and do not pad.

    Raises `TensorError` for another m, and what `hadagen.hadamard_transform` raises.
    """
    return _of_order(12, hadamard_transform_12N, x, scale, exact)


def hadamard_transform_20N(x: torch.Tensor, scale: float | torch.Tensor = 1.0, *, exact: bool = False) -> torch.Tensor:
    """(x · (H_20 ⊗ H)ᵀ) · scale over the last dimension, in a new tensor of x's shape and type; differentiable in x.

    x: [..., m] with m ≤ 20 · 1024. Each row is zero-padded to 20 · 4, 20 · 8, …, and the first m results are returned.
        So rows of 20 and 20 · 2 lose a part of their transform, as in the original.
    scale: as in `hadamard_transform`.
    exact: take rows of any length that is 20 times a power of two, and do not pad.

    Raises `TensorError` for another m, and what `hadagen.hadamard_transform` raises.
    """
    return _of_order(20, hadamard_transform_20N, x, scale, exact)


def hadamard_transform_28N(x: torch.Tensor, scale: float | torch.Tensor = 1.0, *, exact: bool = False) -> torch.Tensor:
    """(x · (H_28 ⊗ H)ᵀ) · scale over the last dimension, in a new tensor of x's shape and type; differentiable in x.

    x: [..., m] with m ≤ 28 · 1024. Each row is zero-padded to 28 · 4, 28 · 8, …, and the first m results are returned.
        So rows of 28 and 28 · 2 lose a part of their transform, as in the original.
    scale: as in `hadamard_transform`.
    exact: take rows of any length that is 28 times a power of two, and do not pad.

    Raises `TensorError` for another m, and what `hadagen.hadamard_transform` raises.
    """
    return _of_order(28, hadamard_transform_28N, x, scale, exact)


def hadamard_transform_40N(x: torch.Tensor, scale: float | torch.Tensor = 1.0, *, exact: bool = False) -> torch.Tensor:
    """(x · (H_40 ⊗ H)ᵀ) · scale over the last dimension, in a new tensor of x's shape and type; differentiable in x.

    x: [..., m] with m ≤ 40 · 1024. Each row is zero-padded to 40 · 4, 40 · 8, …, and the first m results are returned.
        So rows of 40 and 40 · 2 lose a part of their transform, as in the original.
    scale: as in `hadamard_transform`.
    exact: take rows of any length that is 40 times a power of two, and do not pad.

    Raises `TensorError` for another m, and what `hadagen.hadamard_transform` raises.
    """
    return _of_order(40, hadamard_transform_40N, x, scale, exact)


def _of_order(k: int, function: Any, x: Any, scale: Any, exact: bool) -> torch.Tensor:
    if stands_for_a_tensor(x):
        return cast(torch.Tensor, handle_torch_function(function, (x,), x, scale, exact=exact))
    check_is_tensor(x, "x")
    if not is_flag(exact):
        raise TypeError(f"exact is {shown(exact)}; pass True or False")
    scale = _number(scale)
    if not torch.compiler.is_dynamo_compiling():  # where the operator's own checks do more for the message
        check_call(x, scale, "accurate")
    m = int(x.shape[-1]) if x.dim() else 0  # a tensor in a trace
    n = k * max(padded_length(-(-m // k)), 1 if exact else _LEAST) if m else k
    if exact and m != n:
        raise TensorError(f"the last dimension of x is {m}; with exact=True it must be {k} times a power of two")
    if not exact and m > k * _MOST:
        raise TensorError(f"the last dimension of x is {m}; it may be at most {k * _MOST}, or pass exact=True")
    if not is_symbolic(scale):
        scale = float(scale)
    matrix = named_matrix("dao", [k], n, str(x.device))
    y = rotated_by(matrix, kernel_order(k, n // k), n, pad(x, (0, n - m)), scale)
    return y if n == m else y[..., :m].contiguous()


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
    check_is_tensor(scale, "scale")
    if not has_values(scale):
        raise TypeError("scale is a FakeTensor, which has no value; pass a number, or a tensor that has one")
    if scale.is_complex() or scale.numel() != 1:
        plain = str(scale.dtype).removeprefix("torch.")
        raise TypeError(
            f"scale is a {plain} tensor of shape {tuple(scale.shape)}; pass a real number, or a tensor of one"
        )
    return float(scale.detach())
