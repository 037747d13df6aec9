"""The operations that `torch.utils.flop_counter.FlopCounterMode` counts for operators.

A block of n = K1 · K2 · … · 2^m elements counts n · m additions for H and 2 · n · K for each matrix, as PyTorch counts
products of matrices. Signs, scales, prologues and quantizers count nothing, like PyTorch's operations on single
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

from hadagen.problem.problem import padded_length
from hadagen.problem.prologues import parsed

Formula = TypeVar("Formula", bound=Callable[..., int])


def _of(*names: str) -> Callable[[Formula], Formula]:
    """Registers a formula for operators. It takes their arguments, with a shape in place of each tensor."""
    operators: Any = torch.ops.hadagen
    register: Any = register_flop_formula([getattr(operators, name) for name in names])
    return register  # type: ignore[no-any-return]


@_of("hadamard_transform", "hadamard_transform_", "hadamard_transform_out")
def transform_flops(x: Sequence[int], *_: Any, **__: Any) -> int:
    n = padded_length(x[-1])
    return prod(x[:-1]) * n * (n.bit_length() - 1)


@_of("rotate", "rotate_", "rotate_out", "rotate_quantize", "rotate_quantize_into")
def rotation_flops(
    x: Sequence[int], matrices: Any, orders: Sequence[int], signs: Any, signs_after: Any, n: int, *_: Any, **__: Any
) -> int:
    orders = [order for order in orders if order > 1]
    bits = (n // prod(orders)).bit_length() - 1
    return prod(x) * (bits + 2 * sum(orders))


@_of("rotate_after")
def flops_after(tensors: Sequence[Sequence[int]], prologue: str, *rotation: Any, **_: Any) -> int:
    return rotation_flops(tensors[0], *rotation) // parsed(prologue).width


@_of("multiply_codes")
def product_flops(codes: Sequence[int], scales: Any, weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(codes) * weight[0]
