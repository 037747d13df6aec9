"""Activations that a layer of vLLM takes in codes, from a layer before it that has quantized them.

vLLM calls them `QuantizedActivation`. A layer says by its `QuantKey` which codes it takes.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.fusion import quant_activation
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, QuantKey, ScaleDesc

from hadagen.errors import UsageError
from hadagen.problem.formats import Format, Layout
from hadagen.runtime.checks import plain
from hadagen.runtime.quantized import Quantized

_FIX = "switch off the plugin or the fusion that makes them"
_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def key_of(activations: str) -> QuantKey:
    """vLLM's name of "int8-row", "fp8-row" or "fp8-tensor"."""
    kind, _, group = activations.partition("-")
    is_static = group == "tensor"
    shape = GroupShape.PER_TENSOR if is_static else GroupShape.PER_TOKEN
    return QuantKey(_TYPES[kind], ScaleDesc(torch.float32, is_static, shape), symmetric=True)


def is_quantized(x: Any) -> bool:
    """Whether x is a `QuantizedActivation`."""
    return isinstance(x, quant_activation.QuantizedActivation)


def expose(layer: torch.nn.Module, method: Any) -> None:
    """Let the layers before this one know the `method.input_quant_key()` of its input."""
    quant_activation.expose_input_quant_key(layer, method)


def codes_given(prefix: str, given: Any, activations: str | None, size: int) -> Quantized:
    """The codes [..., size] of a `QuantizedActivation` for a layer.

    prefix: the name of the layer. activations: the format that the layer takes; None if it takes no codes.

    Raises `UsageError` for other codes or scales than those of the format.
    """
    if activations is None:
        raise UsageError(f"{prefix} needs its input before it is quantized, but is given codes; {_FIX}")
    if given.quant_key != key_of(activations):
        raise UsageError(f"{prefix} takes codes of {key_of(activations)}, but is given {given.quant_key}; {_FIX}")
    codes, scales = given.data, given.scale
    kind = _TYPES[activations.partition("-")[0]]
    if codes.dtype != kind or scales.dtype != torch.float32:
        found = f"{plain(codes.dtype)} and {plain(scales.dtype)}"
        raise UsageError(f"{prefix} takes codes and scales of {plain(kind)} and float32, not {found}; {_FIX}")
    leading = codes.shape[:-1]
    if codes.shape != given.orig_shape or codes.shape[-1] != size:
        found = f"{[*codes.shape]} for a shape of {[*given.orig_shape]}"
        raise UsageError(f"{prefix} takes codes [..., {size}] of the shape of the input, not {found}; {_FIX}")
    per_tensor = activations == "fp8-tensor"
    if scales.numel() != (1 if per_tensor else prod(leading)):
        wanted = "one scale" if per_tensor else "one scale a row"
        raise UsageError(f"{prefix} takes {wanted}, not {[*scales.shape]} for codes {[*codes.shape]}; {_FIX}")
    scales = scales.reshape(()) if per_tensor else scales.reshape(*leading, 1)
    return Quantized(codes, scales, Format.choose(activations, None, None, Layout.ROW_MAJOR.value))
