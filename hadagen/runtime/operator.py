"""`torch.ops.hadagen.hadamard_transform`: the transform as an operator; see `LinearOperator` for its three forms.

The scale is a Scalar: for each float torch.compile would compile anew.
"""

from __future__ import annotations

from typing import Any

import torch

from hadagen.runtime.checks import check_call
from hadagen.runtime.compute import Call, Options, compute, compute_into
from hadagen.runtime.linear import LinearOperator, OneLevelFunction

# The matrix is symmetric. If rows are padded and the result is cut, its first rows and columns are left, which are
# symmetric too. So gradients and tangents are transformed exactly like x.
HADAMARD = LinearOperator(
    "hadamard_transform",
    Options,
    "Scalar scale, str numerics",
    "bool batch_invariant=False",
    compute=lambda x, options, inplace: compute(x, options, inplace),
    compute_into=lambda x, out, options: compute_into(x, out, options),
    check=lambda x, options: check_call(x, options.scale, options.numerics),
    transpose=lambda options: options,
)
functional, in_place, into = HADAMARD.functional, HADAMARD.in_place, HADAMARD.into


class Remembered(OneLevelFunction):
    """The derivative of a repeated call that bypasses the dispatcher: x is a plain tensor without a tangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call, address: int) -> torch.Tensor:
        ctx.call = call
        return call.run(x, address)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return HADAMARD.apply(gradient, ctx.call.options), None, None
