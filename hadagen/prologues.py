"""Values of `before=`: what runs before a rotation, in the same kernel.

    y = hadagen.rotate_quantize(x, rotation, to="fp8-row", before=hadagen.prologues.SiluMul())

SiluMul, GeluMul, Mul: an activation of one half of x times the other half. x is [..., 2·m], the result [..., m].
Gelu, Relu2: an activation of x, with a result of x's shape.
Arithmetic: the class of `numerics`, of which docs/prologues.md names some.

The functions return equal values for arguments that mean the same. Values are hashable, and pickle can store them.
Make them outside of functions that are compiled. docs/prologues.md has examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from hadagen.errors import UsageError, choice, shown
from hadagen.problem.prologues import ARITHMETIC, LAYOUTS, Activated, Arithmetic, Prologue, canonical
from hadagen.runtime.checks import REAL, as_float

__all__ = ["Arithmetic", "Gelu", "GeluMul", "Mul", "Relu2", "SiluMul"]

_GELU = {"none": "gelu", "tanh": "gelu_tanh", "quick": "gelu_quick"}
_Function = TypeVar("_Function", bound=Callable[..., Prologue])
_MOST = float.fromhex("0x1.fffffep127")  # the largest number of float32


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})


def _constant(function: _Function) -> _Function:
    """Let Dynamo call the function when it compiles a call, in place of tracing it."""
    return cast(_Function, torch.compiler.assume_constant_result(function))  # type: ignore[no-untyped-call]


@_constant
def SiluMul(
    *,
    layout: str = "halves",
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    numerics: str | Arithmetic = "exact",
) -> Prologue:
    """g · sigmoid(alpha · g) · (u + beta), for x [..., 2·m] with the elements of g and u, m each in a row.

    layout: "halves": a row of x has all of g first, and then all of u, as after a merged projection of gate and up.
        "interleaved": g0 u0 g1 u1 …, as in gpt-oss.
    limit: before that, g is clamped to at most limit, and u to ±limit; None for no limit.
    alpha, beta: 1 and 0 for SiLU·mul. limit=7, alpha=1.702, beta=1 is the SwiGLU of gpt-oss.
    numerics: after which values it rounds to the type of x, and which functions it uses: "exact" rounds nothing before
        the rotation; "eager", "vllm", "sglang" and "inductor" give the bits of these, as docs/prologues.md says. Or an
        `Arithmetic`. With alpha or beta, "eager" is not the bits of PyTorch, which rounds the result of each operation.

    Raises TypeError for a limit, alpha or beta that is no number, and `UsageError` for any other bad value. Source:
    `silu_and_mul`, `silu_and_mul_clamp` and `swigluoai_and_mul` in vLLM's csrc/activation_kernels.cu.
    """
    limit = math.inf if limit is None else _number(limit, "limit", finite=False)
    if not limit >= 0:
        raise UsageError(f"limit = {limit} is not possible; pass a number of at least 0, or None for no limit")
    alpha, beta = _number(alpha, "alpha"), _number(beta, "beta")
    clamped = limit < math.inf or alpha != 1 or beta != 0
    return _made("silu", True, layout, numerics, clamped=clamped, limit=limit, alpha=alpha, beta=beta)


@_constant
def GeluMul(*, approximate: str = "none", layout: str = "halves", numerics: str | Arithmetic = "exact") -> Prologue:
    """gelu(g) · u, for x [..., 2·m] with the elements of g and u, m each in a row.

    approximate: as for `Gelu`. layout, numerics: as for `SiluMul`. Raises `UsageError` for a bad value.
    """
    return _made(_gelu(approximate), True, layout, numerics)


@_constant
def Gelu(*, approximate: str = "none", numerics: str | Arithmetic = "exact") -> Prologue:
    """gelu(x), with a result of x's shape.

    approximate: "none": x · ½ · (1 + erf(x / √2)). "tanh": x · ½ · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), as in
        `torch.nn.functional.gelu`. "quick": x · sigmoid(1.702 · x). PyTorch rounds the result of each operation of
        "quick", but numerics="eager" rounds the last one alone.
    numerics: as for `SiluMul`. Raises `UsageError` for a bad value.
    """
    return _made(_gelu(approximate), False, "halves", numerics)


@_constant
def Relu2(*, numerics: str | Arithmetic = "exact") -> Prologue:
    """max(x, 0)², with a result of x's shape. numerics: as for `SiluMul`. Raises `UsageError` for a bad value."""
    return _made("relu2", False, "halves", numerics)


@_constant
def Mul(*, layout: str = "halves", numerics: str | Arithmetic = "exact") -> Prologue:
    """g · u, for x [..., 2·m] with the elements of g and u, m each in a row.

    layout, numerics: as for `SiluMul`. Raises `UsageError` for a bad value.
    """
    return _made("", True, layout, numerics)


def _made(activation: str, multiplies: bool, layout: Any, numerics: Any, **numbers: Any) -> Activated:
    if isinstance(numerics, str) and numerics in ARITHMETIC:
        numerics = ARITHMETIC[numerics]
    if not isinstance(numerics, Arithmetic):
        raise UsageError(
            f"numerics {shown(numerics)} is not known; {choice(numerics, ARITHMETIC)}, or pass an Arithmetic"
        )
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise UsageError(f"layout {shown(layout)} is not known; {choice(layout, LAYOUTS)}")
    return canonical(Activated(activation, multiplies, layout, arithmetic=numerics, **numbers))


def _gelu(approximate: Any) -> str:
    if not isinstance(approximate, str) or approximate not in _GELU:
        raise UsageError(f"approximate {shown(approximate)} is not known; {choice(approximate, _GELU)}")
    return _GELU[approximate]


def _number(value: Any, name: str, *, finite: bool = True) -> float:
    """The number as a float. Raises TypeError, and `UsageError` for one that float32 does not have."""
    if isinstance(value, bool) or not isinstance(value, REAL):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a real number")
    number = as_float(cast(float, value))
    if math.isnan(number) or (abs(number) > _MOST and (finite or number < math.inf)):
        raise UsageError(f"{name} = {number} is not possible; pass a number up to {_MOST:.3g}")
    return number
