"""Weights of 4 bits, rounded so that the errors of a row's codes cancel in the products with typical inputs.

The method is GPTQ (Frantar et al., 2022). Columns are rounded one after the other, and each error is spread over the
columns that are not rounded yet, weighted by the inverse of the Hessian xᵀ · x of a layer's rotated inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hadagen.errors import UsageError
from hadagen.models.evaluate import check_vocabulary
from hadagen.models.int4 import factors_of, nearest, packed, row_scales, scales_of
from hadagen.models.layers import OF_WEIGHT, QuantizedLinear

_CHUNK = 128  # columns; errors reach the columns behind a chunk in one product
_DAMPING = (0.01, 0.1, 1)  # parts of the mean of the diagonal; the first that has a Cholesky factor
Progress = Callable[[Sequence[str]], Iterable[str]]  # returns the names of layers; shows how many are done


def round_weights(
    model: Any, windows: torch.Tensor, fold: Callable[[str], torch.Tensor], progress: Progress = iter
) -> dict[str, torch.Tensor]:
    """Round the weights of a model of transformers anew, in one pass with all windows, and return codes and scales by
    the names of tensors.

    A layer gets its codes when its inputs come, just before it runs, so they come from layers with new codes.

    model: with weights of 4 bits in any codes, and activations as they are. windows: int64 [windows, tokens] of a text
    that is like later inputs. fold: returns the rotated weight of a name. A layer that gets no inputs keeps its codes.

    Raises `UsageError` if the tokens are not of the model's vocabulary, or for inputs that are not finite.
    """
    check_vocabulary(windows, model.config.vocab_size)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    shown, found = iter(progress([*layers])), dict[str, torch.Tensor]()
    last: list[Any] = [None, None]  # the inputs of a layer, and what follows from them; the next one may share them

    def see(layer: QuantizedLinear, arguments: tuple[torch.Tensor], name: str) -> None:
        if f"{name}.weight" in found:  # a layer that runs twice
            return
        next(shown, None)
        if last[0] is not arguments[0]:
            last[:] = arguments[0], _curvature(name, layer, arguments[0])
        weight = fold(f"{name}.weight").to(layer.weight.device, torch.float32)
        importance, factor = last[1]
        group = None if layer.weight_factor is None else layer.in_features // layer.weight_factor.shape[1]
        codes, *scales = rounded(weight, importance, factor, group)
        for part, tensor in zip(OF_WEIGHT, (codes[..., None], *scales), strict=True):
            if tensor is not None:
                getattr(layer, part).copy_(tensor)
                found[f"{name}.{part}"] = tensor.cpu()

    hooks = [each.register_forward_pre_hook(partial(see, name=name)) for name, each in layers.items()]
    try:
        with torch.no_grad():
            body = getattr(model, model.base_model_prefix)  # without the last layer, whose outputs nothing needs
            body(windows.to(model.device), use_cache=True)  # a cache in codes counts too
    finally:
        for hook in hooks:
            hook.remove()
    for _ in shown:  # a bar ends with the last name
        pass
    return found


def _curvature(name: str, layer: QuantizedLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turned = (x if layer.rotation is None else layer.rotation(x)).flatten(0, -2).float()
    hessian = turned.T @ turned
    if not hessian.isfinite().all():
        raise UsageError(f"the inputs of {name} are not finite; calibrate with another text")
    return hessian.diagonal().clone(), _factor(hessian)


def _factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian. An input that is always 0 counts as independent."""
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    mean = diagonal.mean()
    for part in _DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(part * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed:
                return upper  # type: ignore[no-any-return]
    return torch.eye(len(hessian), device=hessian.device)  # each column on its own


def rounded(
    weight: torch.Tensor, importance: torch.Tensor, factor: torch.Tensor, group: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Packed codes, scales and factors of a weight [out, in], float32.

    importance: of each input, [in]. factor: the upper Cholesky factor of the inverse Hessian of inputs, [in, in].
    group: the number of columns with one factor, which divides in; None for a scale for each row.
    """
    left, n = weight.T.clone(), weight.shape[1]  # columns are contiguous
    codes, factors = torch.empty_like(left), []
    size = group or n
    groups = weight.unflatten(1, (-1, size))  # type: ignore[no-untyped-call]
    best = scales_of(groups, importance.view(-1, size)).squeeze(-1)
    scales = scale = row_scales(best) if group else best
    step = min(size, _CHUNK)
    for first in range(0, n, step):
        end = min(first + step, n)
        if group:  # whose elements have changed
            now, weights = left[first:end].T, importance[first:end]
            factors.append(factors_of(now, scales_of(now, weights), scales, weights))
            scale = factors[-1] * scales
        errors, by = torch.empty_like(left[first:end]), scale.squeeze(-1)
        for at in range(first, end):
            codes[at] = nearest(left[at], by)
            errors[at - first] = (left[at] - codes[at] * by) / factor[at, at]
            left[at + 1 : end].addr_(factor[at, at + 1 : end], errors[at - first], alpha=-1)
        left[end:] -= factor[first:end, end:].T @ errors
    return packed(codes.T), scales, torch.cat(factors, 1).to(torch.uint8) if factors else None
