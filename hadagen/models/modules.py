"""Quantized layers in place of the linear layers of a model in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.nn.functional import embedding, linear

from hadagen.errors import UsageError
from hadagen.models.experts import QuantizedExperts, StackedLinear
from hadagen.models.families import Family
from hadagen.models.folding import EMBEDDING, HEAD, LAST_NORM, Folding, Sizes, finite, module_of, place_of
from hadagen.models.layers import QuantizedLinear
from hadagen.models.linears import Linear, linears
from hadagen.models.scheme import Scheme
from hadagen.models.stored import check_is_whole, kinds_of
from hadagen.runtime.rotation import Rotation


def check(model: torch.nn.Module, sizes: Sizes, kind: str) -> None:
    """Raise what `check_is_whole` raises, for a model of 16 or 32 bits whose weights need not be there yet.

    Raises `UsageError` if the model has no last layer, or other names than Llama's.
    """
    _check_is_causal(model)
    check_is_whole(kinds_of(model.state_dict() | dict(model.named_buffers())), sizes, kind)


def insert(model: torch.nn.Module, scheme: Scheme) -> None:
    """Put layers in place of those that have codes, for a state dict to fill.

    Raises `UsageError` if what comes after the rotated residual stream is not the last layer of the checkpoint.
    """
    if scheme.rotation == "quarot":
        _check_is_causal(model)
    for name, layer in _linears(model, scheme).items():
        weight, bias = layer.weight, layer.bias
        options: dict[str, Any] = {"bias": bias is not None, "device": weight.device, "dtype": weight.dtype}
        *count, outputs, inputs = weight.shape
        kind: Any = StackedLinear if layer.part else QuantizedLinear
        _put(model, name, layer, kind(name, scheme, *count, inputs, outputs, **options))


def quantize(model: torch.nn.Module, scheme: Scheme, sizes: Sizes | None) -> bool:
    """Rotate and quantize the weights of a model, one layer after the other, each on the device where it is.

    scheme: with the rotations of `planned`, or of `planned_of`. sizes: of a model whose architecture is known.

    Returns whether a last layer that was tied to the embedding is a tensor of its own now. Raises `UsageError` if the
    model has no last layer, or other names than Llama's.
    """
    names = [name for name, _ in model.named_parameters()] if sizes else []  # without, only inputs are rotated
    is_tied = False
    if sizes:
        _check_is_causal(model)
        is_tied = model.get_parameter(HEAD) is model.get_parameter(EMBEDDING)
        sizes = replace(sizes, tied=is_tied)
    folding_on = cache(lambda device: Folding(scheme, sizes, device))
    factors = {name: each.data for name, each in model.named_parameters() if each.dim() == 1}  # norms change on the way

    def get(name: str) -> torch.Tensor:
        return factors[name] if name in factors else model.get_parameter(name).data

    found = _linears(model, scheme)
    for name, layer in found.items():
        folding = folding_on(layer.weight.device)
        weight = finite(f"{name}.weight", folding.weight(name, layer.weight.data, get))
        bias = None if layer.bias is None else folding.bias(name, layer.bias.data).to(layer.bias.dtype)
        kind = StackedLinear if layer.part else QuantizedLinear
        _put(model, name, layer, kind.of(name, scheme, weight, bias))
    for name in names:
        if module_of(name)[0] in found:  # done above
            continue
        stored = get(name)
        folding = folding_on(stored.device)
        # All of them before the first is set: two may be made of the same stored tensor.
        made = {each: finite(each, folding.fold(each, get).to(stored.dtype)) for each in folding.made_of(name)}
        for changed, tensor in made.items():
            module, _, part = changed.rpartition(".")
            setattr(model.get_submodule(module), part, torch.nn.Parameter(tensor, requires_grad=False))
    return is_tied and scheme.rotation == "quarot"


def _linears(model: torch.nn.Module, scheme: Scheme) -> dict[str, Linear]:
    return {name: layer for name, layer in linears(model).items() if scheme.is_quantized(name)}


def _put(model: torch.nn.Module, name: str, layer: Linear, made: Any) -> None:
    """Put a layer with codes, or a stack of them, in place of a layer or a packed weight."""
    if not layer.part:
        model.set_submodule(name, made)
        return
    place = name.rpartition(".")[0]
    if not isinstance(model.get_submodule(place), QuantizedExperts):
        model.set_submodule(place, QuantizedExperts(layer.module))
    experts: Any = model.get_submodule(place)
    experts.take(layer.part, made)


def _check_is_causal(model: torch.nn.Module) -> None:
    for name in (EMBEDDING, HEAD):
        if name not in dict(model.named_parameters(remove_duplicate=False)):
            raise UsageError(f"{type(model).__name__} has no {name}; load it as a causal language model")


# ---- layers that are rotated, and have no codes ----------------------------------------------------------------------
_ADAPTED = ("modules_to_save", "ln_tuning_layers")  # where PEFT keeps copies of layers
_WHY = 'the model is rotated, so {} of the original model do not fit; quantize it with rotation="blocks", or None'


class RotatedLinear(torch.nn.Module):
    """A linear layer without codes in a rotated model. It is no `torch.nn.Linear`, so no adapter takes it for one."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _refuse_parametrizations(self)
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return _WHY.format("adapters")


class RotatedEmbedding(torch.nn.Module):
    """An embedding in a rotated model. It is no `torch.nn.Embedding`, so no adapter takes it for one."""

    weight: torch.Tensor
    padding_idx: int | None
    extra_repr = RotatedLinear.extra_repr

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _refuse_parametrizations(self)
        found = embedding(tokens, self.weight, self.padding_idx)
        scale = getattr(self, "embed_scale", None)  # as in Gemma
        return found if scale is None else found * scale.to(found.dtype)


def guard(model: torch.nn.Module, scheme: Scheme, family: Family) -> None:
    """Let what rotations have changed refuse the adapters and embeddings of the original model."""
    whole = scheme.rotation == "quarot"
    turned = {family.values, family.outputs} if scheme.rotates_values else set()
    turned |= {*family.readers, *family.writers} if whole else set()
    for name, layer in model.named_modules():
        path = place_of(name)[1]
        if isinstance(layer, torch.nn.Linear) and (path in turned or (whole and f"{name}.weight" == HEAD)):
            layer.__class__ = RotatedLinear  # type: ignore[assignment]
        elif whole and f"{name}.weight" == EMBEDDING:
            layer.__class__ = RotatedEmbedding
        elif not (whole and (path in family.norms or f"{name}.weight" == LAST_NORM)):
            continue
        layer.register_load_state_dict_pre_hook(_refuse_copies)
    if whole:
        model.get_submodule(EMBEDDING.partition(".")[0]).register_forward_pre_hook(_refuse_embeddings, with_kwargs=True)
        for name in ("load_adapter", "add_adapter"):  # of transformers
            setattr(model, name, _refuse_adapters)


def _refuse_adapters(*_: Any, **__: Any) -> None:
    raise UsageError(_WHY.format("adapters"))


def _refuse_parametrizations(layer: torch.nn.Module) -> None:
    if "parametrizations" in layer._modules:  # as PEFT adapts parameters
        _refuse_adapters()


def _refuse_copies(layer: torch.nn.Module, state: Any, prefix: str, *_: Any) -> None:
    if any(f".{name}." in f".{prefix}" for name in _ADAPTED):
        _refuse_adapters()


def _refuse_embeddings(model: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    given = any(isinstance(each, torch.Tensor) and each.dim() == 3 for each in arguments)
    if given or options.get("inputs_embeds") is not None:
        raise UsageError(_WHY.format("inputs_embeds"))


# ---- devices ---------------------------------------------------------------------------------------------------------
def place_rotations(model: torch.nn.Module) -> None:
    """Move each rotation to the device of its layer.

    Those made before a model was loaded are on the meta device, where every call would look for its kernel again.
    """
    for layer in model.modules():
        for rotation in layer.children():
            if isinstance(rotation, Rotation):
                rotation.to(next(layer.parameters()).device)
