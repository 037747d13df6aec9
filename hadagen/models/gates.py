"""The prologue that the code of a model computes between two products, found by running this code on a few numbers.

Names of classes and configurations say little: models clamp, scale or thin out what they multiply. So the code itself
decides. What no prologue computes, or what fails, stays as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch

from hadagen import prologues
from hadagen.problem.prologues import LAYOUTS, Prologue

# Attributes of modules with the numbers of `SiluMul`.
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
_GELUS = ("none", "tanh", "quick")
_ROWS, _COLUMNS, _SEED = 16, 64, 0
_ERRORS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative; codes may round between steps
_MOST_OF_HALF = 100.0  # whose products float16 holds


def of_function(function: Callable[[torch.Tensor], torch.Tensor], holder: Any, width: int) -> Prologue | None:
    """The prologue that a function computes; None if it computes anything else.

    function: takes [rows, width · m] of any type, and returns [rows, m] of this type. holder: the module that has its
    numbers, such as a limit. width: 2 if the function multiplies an activation of one half of a row by the other half,
    else 1.
    """
    results = []
    for dtype, error in _ERRORS.items():  # code may depend on the type
        x = _numbers(width, dtype)
        try:
            with torch.no_grad():
                found = function(x.clone())
        except Exception:  # the code may be anyone's
            return None
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != ((_ROWS, _COLUMNS), dtype):
            return None
        results.append((x, found.float(), error))

    def is_alike(each: Prologue, x: torch.Tensor, found: torch.Tensor, error: float) -> bool:
        parts = each.parts(x)
        wanted = each.results(parts, {}, x.dtype)["x"].float()
        bound = (1 + parts.float().abs()).prod(0) if width > 1 else 1 + wanted.abs()
        return bool(((found - wanted).abs() <= error * bound).all())

    alike = (each for each in _candidates(holder, width) if all(is_alike(each, *result) for result in results))
    return next(alike, None)


def of_mlp(module: torch.nn.Module, names: Sequence[str], width: int) -> Prologue | None:
    """The prologue of a module that computes last(prologue(first(x))), or last(prologue([first(x), second(x)])), and
    does nothing else; None if it does.

    names: of the first layers and the last one. width: as for `of_function`.
    """
    *firsts, last = names
    others = {name: each for name, each in module.named_children() if name not in names}
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    held += [tensor for each in others.values() for tensor in (*each.parameters(), *each.buffers())]
    if held or module._forward_hooks or module._forward_pre_hooks or not _takes_one(module):
        return None

    def run(x: torch.Tensor, is_training: bool) -> torch.Tensor:
        given = torch.arange(1, _ROWS + 1, dtype=x.dtype, device="cpu")[:, None]  # not 0, so that sums with it are seen
        taken: list[torch.Tensor] = []
        stubs: dict[str, Any] = {last: _Stub(taken)}
        for name, part in zip(firsts, x.chunk(len(firsts), -1), strict=True):
            stubs[name] = _Stub(taken, given, part)
        made = copy.copy(module)
        made._modules = copy.deepcopy(others) | stubs
        found = type(module).forward(made.train(is_training), given)
        if len(taken) != len(names) or not torch.equal(found, taken[-1]):
            raise ValueError("the layers are not all that the module computes with")
        return found  # type: ignore[no-any-return]

    def run_both(x: torch.Tensor) -> torch.Tensor:
        found = run(x, False)
        if not torch.equal(found, run(x, True)):  # as with dropout, which a prologue has not
            raise ValueError("the module computes something else in training")
        return found

    return of_function(run_both, module, width)


class _Stub(torch.nn.Module):
    """A layer that returns a known output for a known input, or without them its input."""

    def __init__(self, taken: list[torch.Tensor], x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> None:
        super().__init__()
        self.taken, self.x, self.y = taken, x, y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.x is not None and x is not self.x:
            raise ValueError("a layer has another input than the module")
        self.taken.append(x)
        return x if self.y is None else self.y


def _takes_one(module: torch.nn.Module) -> bool:
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    return [each.kind for each in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _numbers(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of all magnitudes from 0.01 to 100000, of 16 bits up to `_MOST_OF_HALF`, [rows, width · columns]."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = (_ROWS, width * _COLUMNS)
    powers = 7 * torch.rand(shape, generator=generator, device="cpu") - 2
    found = torch.randn(shape, generator=generator, device="cpu").sign() * 10**powers
    return found if dtype == torch.float32 else found.clamp(-_MOST_OF_HALF, _MOST_OF_HALF).to(dtype)


def _candidates(holder: Any, width: int) -> Iterator[Prologue]:
    if width == 1:
        yield prologues.Relu2()
        yield from (prologues.Gelu(approximate=each) for each in _GELUS)
        return
    for layout in LAYOUTS:
        yield prologues.SiluMul(layout=layout)
        yield from (prologues.GeluMul(approximate=each, layout=layout) for each in _GELUS)
        for limit, alpha, beta in product((None, *_of(holder, _LIMITS)), (1.0, *_of(holder, _ALPHAS)), (0.0, 1.0)):
            yield prologues.SiluMul(layout=layout, limit=limit, alpha=alpha, beta=beta)


def _of(holder: Any, names: Sequence[str]) -> list[float]:
    """The positive numbers among attributes of a module."""
    found = (getattr(holder, name, None) for name in names)
    return [float(each) for each in found if isinstance(each, float | int) and each > 0]
