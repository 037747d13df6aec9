"""What may run before a rotation, and after it, as formulas in PyTorch. Something else that a prologue computes is one
more row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, relu, silu

from hadagen.fusing.graphs import value_of
from hadagen.fusing.matching import Formula, Found
from hadagen.problem.prologues import ARITHMETIC, Arithmetic, Prologue
from hadagen.prologues import Gelu, GeluMul, Mul, Relu2, SiluMul


class KnownPrologue(NamedTuple):
    """Something that may run before a rotation: a formula, and the function that makes its value of `before=`, of the
    numbers in the formula by name, `numerics`, and `layout` of halves."""

    value: Callable[..., Prologue]
    formula: Formula


def _clamped(g: torch.Tensor, u: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (u + beta) * (g * torch.sigmoid(g * alpha))


# The first row that fits counts, so a part of a formula stands behind it.
BEFORE = [
    KnownPrologue(value, Formula(function))
    for value, function in (
        (SiluMul, lambda g, u: silu(g) * u),
        (SiluMul, lambda g, u: g * torch.sigmoid(g) * u),
        (SiluMul, lambda g, u, alpha: g * torch.sigmoid(g * alpha) * u),
        (SiluMul, _clamped),
        (SiluMul, lambda g, u, limit: silu(g.clamp(max=limit)) * u.clamp(-limit, limit)),
        (GeluMul, lambda g, u: gelu(g) * u),
        (partial(GeluMul, approximate="tanh"), lambda g, u: gelu(g, approximate="tanh") * u),
        (Mul, lambda g, u: g * u),
        (Gelu, lambda x: gelu(x)),
        (partial(Gelu, approximate="tanh"), lambda x: gelu(x, approximate="tanh")),
        (partial(Gelu, approximate="quick"), lambda x: x * torch.sigmoid(x * 1.702)),
        (Relu2, lambda x: relu(x).square()),
        (Relu2, lambda x: relu(x) * relu(x)),
    )
]


def rounding(found: Found, dtype: torch.dtype) -> Arithmetic | str:
    """How Inductor computes a formula for parts of a type, or why a prologue cannot compute it so.

    Inductor computes in float32 all that it fuses into one kernel, whatever the types of nodes, and rounds what it
    stores, which is the product alone. With `emulate_precision_casts` it rounds each node of a 16-bit type, as PyTorch
    does.
    """
    from torch._inductor import config

    how = ARITHMETIC["inductor"]
    if any(node.target is torch.ops.aten.sigmoid.default for node in found.nodes):
        how = replace(how, exp="__expf", sigmoid=True)
    if getattr(getattr(config, "eager_numerics", None), "division_rounding", False):
        how = replace(how, divide="/")
    if getattr(config, "emulate_precision_casts", False):
        product, *others = found.nodes
        active = [node for node in product.all_input_nodes if node in others]
        rounded = [node for node in others if value_of(node).dtype == dtype != torch.float32]
        if [node for node in rounded if node not in active]:
            return "each of its values is rounded, as torch._inductor.config.emulate_precision_casts asks for"
        how = replace(how, rounds="activation and product" if rounded else "product")
    return how


# ---- after a rotation ------------------------------------------------------------------------------------------------
_MOST = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 1 / (_MOST * 512)  # of the scale of a row
Tensors = tuple[torch.Tensor, torch.Tensor]


def _by_reciprocal(x: torch.Tensor, s: torch.Tensor) -> Tensors:
    return (x.float() * s.reciprocal()).clamp(-_MOST, _MOST), s


def _by_scale(x: torch.Tensor, s: torch.Tensor) -> Tensors:
    return (x.float() / s).clamp(-_MOST, _MOST), s


def _of_rows(amax: Callable[[torch.Tensor], torch.Tensor], by: Callable[..., Tensors], x: torch.Tensor) -> Tensors:
    return by(x, (amax(x).float() / _MOST).clamp(min=_LEAST))


# How amax of a row may be written.
_AMAX: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.abs().amax(-1).unsqueeze(-1),  # vLLM 0.32
    lambda x: x.abs().max(-1)[0].unsqueeze(-1),  # earlier releases of vLLM
    lambda x: x.abs().amax(-1, keepdim=True),
    lambda x: x.abs().max(-1, keepdim=True)[0],
)


class KnownQuantizer(NamedTuple):
    """A quantizer that is written in PyTorch and gives the same codes and scales as a format: the format, the type of
    its codes, and a formula for codes that are not yet of this type, and scales [..., 1]."""

    to: str
    dtype: torch.dtype
    formula: Formula


_BY = _by_reciprocal, _by_scale
AFTER = [
    *(
        KnownQuantizer("fp8-row", torch.float8_e4m3fn, Formula(partial(_of_rows, amax, by)))
        for amax in _AMAX
        for by in _BY
    ),
    *(KnownQuantizer("fp8-tensor", torch.float8_e4m3fn, Formula(by)) for by in _BY),
]
