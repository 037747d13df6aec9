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
from hadagen.runtime.operands.spec import Spec

Formula = TypeVar("Formula", bound=Callable[..., int])


def _of(*names: str) -> Callable[[Formula], Formula]:
    """Registers a formula for operators. It takes their arguments, with a shape in place of each tensor."""
    operators: Any = torch.ops.hadagen
    register: Any = register_flop_formula([getattr(operators, name) for name in names])
    return register  # type: ignore[no-any-return]


@_of("linear")
def linear_flops(x: Sequence[int], *rest: Any, **_: Any) -> int:
    return _flops(x, rest[-1])


@_of("call")
def call_flops(tensors: Sequence[Sequence[int]], scale: float, text: str, **_: Any) -> int:
    return _flops(tensors[0], text)


@_of("call_into")
def flops_into(
    written: Sequence[Sequence[int]], read: Sequence[Sequence[int]], scale: float, text: str, **_: Any
) -> int:
    return _flops(written[0] if Spec.parse(text).inplace else read[0], text)


def _flops(x: Sequence[int], text: str) -> int:
    """The operations of a call with an x of this shape."""
    spec = Spec.parse(text)
    columns = x[-1] // spec.width
    n = spec.n or padded_length(columns)
    bits = (n // prod(spec.orders)).bit_length() - 1
    return prod(x[:-1]) * (columns if spec.n else n) * (bits + 2 * sum(order for order in spec.orders if order > 1))


@_of("multiply_codes")
def product_flops(codes: Sequence[int], scales: Any, weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(codes) * weight[0]
