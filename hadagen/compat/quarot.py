"""The functions of QuaRot's `hadamard_utils` and `quarot.functional.hadamard`, and of SpinQuant's and QuIP#'s modules.

    from hadagen.compat import quarot as hadamard_utils

These functions run on any device, take any strides, compute in float32 (float64 for float64), round once and have right
gradients. The originals raise AssertionError for an impossible n; these functions raise `UsageError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch.overrides import handle_torch_function

from hadagen.errors import TensorError, UsageError, shown
from hadagen.problem.matrices import find_matrix, find_orders
from hadagen.problem.problem import kernel_order
from hadagen.runtime import transform
from hadagen.runtime.arguments import as_int, is_count
from hadagen.runtime.call.entry import rotated_by
from hadagen.runtime.call.named import matrix_of, named_matrix
from hadagen.runtime.call.runs import has_only_memory
from hadagen.runtime.checks import (
    check_alike,
    check_is_flag,
    check_is_tensor,
    check_tensor,
    kind_of,
    stands_for_a_tensor,
)
from hadagen.runtime.operands.given import as_count
from hadagen.runtime.operands.packed import combined, pack_matrices

__all__ = [
    "HadamardTransform",
    "apply_exact_had_to_linear",
    "get_hadK",
    "hadamard_matrix",
    "is_pow2",
    "matmul_hadU",
    "matmul_hadU_cuda",
    "matmul_hadUt",
    "matmul_hadUt_cuda",
    "random_hadamard_matrix",
]


def get_hadK(n: int, transpose: bool = False) -> tuple[torch.Tensor | None, int]:
    """H_K and K for rows of n elements: a float32 tensor [K, K] on the CPU; None and 1 for a power of two.

    K is the first of 172 156 140 124 116 108 60 52 36 28 44 40 20 12 that divides n. Raises `UsageError` if n / K is no
    power of two.
    """
    check_is_flag(transpose, "transpose")
    k = _order(n)
    if k == 1:
        return None, 1
    matrix = matrix_of("quarot", k).float()
    return matrix.T if transpose else matrix, k


def matmul_hadU(X: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    """X · (H_K ⊗ H)ᵀ / √n over the last dimension, or its transpose, with the K of `get_hadK`. Orthonormal.

    Returns a new tensor of X's shape and type. Raises `UsageError` for an n without such a K, and what
    `hadagen.hadamard_transform` raises.
    """
    if stands_for_a_tensor(X):
        return handle_torch_function(matmul_hadU, (X,), X, transpose)
    check_is_flag(transpose, "transpose")
    n = _length(X)
    k = _order(n)
    if k == 1:
        return _rotated(X, None, 1, transpose)
    return _rotated(X, named_matrix("quarot", [k], n, str(X.device)), kernel_order(k, n // k), transpose)


def matmul_hadUt(X: torch.Tensor) -> torch.Tensor:
    """The inverse of `matmul_hadU`."""
    return matmul_hadU(X, transpose=True)


def matmul_hadU_cuda(
    X: torch.Tensor,
    hadK: torch.Tensor | None,
    K: int,
    transpose: bool = False,
) -> torch.Tensor:
    """X · (hadK ⊗ H)ᵀ / √n over the last dimension, or its transpose: `matmul_hadU` with a matrix from `get_hadK`.

    X: [..., n] on any device. hadK: [K, K] of real numbers, on any device; not used if K is 1, and without a gradient.

    Raises TypeError if X or hadK is no tensor; `UsageError` if K is no integer of at least 1, or hadK is None;
    `TensorError` if n is not K times a power of two, or hadK is not dense, real and [K, K].
    """
    if stands_for_a_tensor(X):
        return handle_torch_function(matmul_hadU_cuda, (X,), X, hadK, K, transpose)
    k = as_count(K, "K")
    check_is_flag(transpose, "transpose")
    check_is_tensor(X, "X")
    if k == 1:
        return _rotated(X, None, 1, transpose)
    if hadK is None:
        raise UsageError(f"hadK is None but K = {k}; pass both as get_hadK returned them")
    _check_matrix(hadK, "hadK", k, X)
    matrix, order = _operand(hadK, k, _length(X))
    return _rotated(X, matrix.to(X.device), order, transpose)


def matmul_hadUt_cuda(X: torch.Tensor, hadK: torch.Tensor | None, K: int) -> torch.Tensor:
    """The inverse of `matmul_hadU_cuda`. (The original raises a TypeError.)"""
    return matmul_hadU_cuda(X, hadK, K, transpose=True)


def random_hadamard_matrix(size: int, device: torch.device | str) -> torch.Tensor:
    """diag(s) · (H_K ⊗ H)ᵀ / √size in float64, with random signs s of PyTorch's generator for the CPU."""
    signs = torch.randint(low=0, high=2, size=(size,), device="cpu").to(torch.float64) * 2 - 1
    return matmul_hadU(torch.diag(signs)).to(device)


def hadamard_matrix(size: int, device: torch.device | str) -> torch.Tensor:
    """(H_K ⊗ H)ᵀ / √size in float32."""
    return matmul_hadU(torch.eye(size, device="cpu")).to(device)


def apply_exact_had_to_linear(
    module: torch.nn.Linear,
    had_dim: int = -1,
    output: bool = False,
    R2: torch.Tensor | None = None,
) -> None:
    """Folds a rotation into the weight of a layer, in place, on the device where the weight is.

    had_dim: -1 rotates the whole input or output, as `matmul_hadU` does. A power of two rotates each block of had_dim
        features, such as a head.
    output: rotate the output instead of the input. The bias is left as it is, as in the original. R2: SpinQuant's
        matrix [had_dim, had_dim] of real numbers, on any device. Blocks are multiplied by R2 instead of H. R2 is
        ignored if had_dim is -1, as in the original.

    Raises TypeError if the module is no torch.nn.Linear, or R2 no tensor; `UsageError` for a had_dim that is no power
    of two or does not divide the features; `TensorError` if R2 is not dense, real and [had_dim, had_dim].
    """
    if not isinstance(module, torch.nn.Linear):
        raise TypeError(f"module is a {type(module).__name__}; pass a torch.nn.Linear")
    check_is_flag(output, "output")
    had_dim = as_int(had_dim)
    weight = module.weight.data.T if output else module.weight.data
    n = weight.shape[-1]
    if isinstance(had_dim, int) and had_dim == -1:
        rotated = matmul_hadU(weight)
    elif not is_count(had_dim) or not is_pow2(had_dim) or n % had_dim:
        raise UsageError(
            f"had_dim = {shown(had_dim)} is not a power of two that divides {n}; choose one, or -1 for all"
        )
    else:
        blocks = weight.unflatten(-1, (n // had_dim, had_dim))  # type: ignore[no-untyped-call]
        if R2 is None:
            rotated = transform.hadamard_transform(blocks, had_dim**-0.5)
        else:
            _check_matrix(R2, "R2", had_dim, weight)
            rotated = (blocks.double() @ R2.detach().to(weight.device, torch.float64)).to(weight.dtype)
        rotated = rotated.reshape(weight.shape)
    module.weight.data = (rotated.T if output else rotated).contiguous()


def is_pow2(n: int) -> bool:
    """Whether n is a power of two."""
    return n > 0 and n & (n - 1) == 0


class HadamardTransform:
    """SpinQuant's function of this name, which its users call as `HadamardTransform.apply(u)`."""

    @staticmethod
    def apply(u: torch.Tensor) -> torch.Tensor:
        """u · H over the last dimension."""
        return transform.hadamard_transform(u)


def __getattr__(name: str) -> Callable[[], torch.Tensor]:
    """get_had12 to get_had172: functions that return the matrix of an order, float32 on the CPU."""
    order = name.removeprefix("get_had")
    try:
        find_matrix("quarot", int(order) if name.startswith("get_had") else 0)
    except ValueError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return partial(_as_float, int(order))


def _as_float(order: int) -> torch.Tensor:
    return matrix_of("quarot", order).float()


def _check_matrix(matrix: torch.Tensor, name: str, order: int, other: torch.Tensor) -> None:
    """Raises TypeError and `TensorError` unless the matrix is dense, real and [order, order], and can go
    to the device of other."""
    check_is_tensor(matrix, name)
    dense = not matrix.is_nested and matrix.layout is torch.strided and (other.is_meta or not matrix.is_meta)
    if not dense or matrix.is_complex() or matrix.dtype == torch.bool or matrix.is_quantized:
        raise TensorError(
            f"{name} is a {kind_of(matrix)} tensor on {matrix.device}; pass a dense tensor of real numbers"
        )
    check_alike(other, matrix, name)
    if matrix.shape != (order, order):
        raise TensorError(f"{name} has the shape {tuple(matrix.shape)}; it must be ({order}, {order})")


def _operand(matrix: torch.Tensor, order: int, n: int) -> tuple[torch.Tensor, int]:
    """The matrix as `rotate` takes it, and its order then. On the CPU, a matrix of −1, 0 and 1 is packed for kernels.
    The entries of a matrix on a GPU are not read, because reading would wait for the GPU."""
    matrix = matrix.detach()
    if matrix.device.type == "cpu" and has_only_memory(matrix):
        wide = matrix.double()
        if ((wide == 0) | (wide.abs() == 1)).all():
            (taken,) = combined([wide.to(torch.int8)], n)
            return cast(torch.Tensor, pack_matrices([taken], n, matrix.device)), len(taken)
    return (matrix.to(torch.int16) if matrix.dtype == torch.uint8 else matrix).reshape(-1), order


def _order(n: int) -> int:
    orders = find_orders("quarot", as_count(n, "n"))
    return orders[0] if orders else 1


def _length(x: torch.Tensor) -> int:
    check_is_tensor(x, "X")
    if not torch.compiler.is_dynamo_compiling():  # where the operator's own checks do more for the message
        check_tensor(x)
    return int(x.shape[-1]) if x.dim() else 1  # a tensor in a trace


def _rotated(x: torch.Tensor, matrix: torch.Tensor | None, k: int, transpose: bool) -> torch.Tensor:
    n = _length(x)
    return rotated_by(matrix, k, n, x, n**-0.5, transpose)
