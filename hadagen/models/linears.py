"""The linear layers of any model, which have codes if nothing is known of its architecture.

Each layer of PyTorch's class `Linear`, each `Conv1D` of transformers, and each packed weight of experts multiplies its
input by a weight. So the inverse of a rotation of the input is folded into the weight, and nothing else changes. Layers
that keep their type: see `kept`.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from hadagen.errors import UsageError, choice, shown
from hadagen.models.experts import are_experts, packed_parts
from hadagen.models.families import FAMILIES, Family
from hadagen.models.folding import (
    EMBEDDING,
    HEAD,
    LAST_NORM,
    Sizes,
    block_of,
    check_rotation,
    head_of,
    module_of,
    place_of,
)
from hadagen.models.scheme import AUTO, GROUPS, Online, Scheme
from hadagen.models.stored import BUFFERS

# Classes of transformers that compute what `torch.nn.Linear` does.
_ALIKE = ("Conv1D", "FalconLinear")
# Attributes of models of transformers: the parts that it keeps in float32.
_FLOAT32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
# Functions of a module that read weights before there are codes.
_EARLY = ("__init__", "_init_weights", "reset_parameters", "tie_weights")


@dataclass(frozen=True)
class Linear:
    """A linear layer of a model. part: the name of the packed weight, if the module has experts."""

    module: Any
    part: str = ""

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], or [experts, out, in]."""
        stored: torch.Tensor = getattr(self.module, self.part) if self.part else self.module.weight
        return stored.mT if (self.module.is_transposed if self.part else _is_conv1d(self.module)) else stored

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], or [experts, out]."""
        return getattr(self.module, f"{self.part}_bias" if self.part else "bias", None)


def linears(model: torch.nn.Module) -> dict[str, Linear]:
    """All linear layers of a model, by their names. Other subclasses of `torch.nn.Linear` may compute anything."""
    found = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear or type(module).__name__ in _ALIKE:
            found[name] = Linear(module)
        elif are_experts(module):
            found |= {f"{name}.{part}": Linear(module, part) for part in packed_parts(module)}
    return found


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Whether a linear layer has a weight [in, out]."""
    return type(module).__name__ == "Conv1D"


def known_sizes(model: Any, scheme: Scheme) -> Sizes | None:
    """The sizes of a model whose residual stream or heads the scheme rotates, "auto" if that is possible; else None.

    Raises `UsageError` if that is not possible.
    """
    rotation = scheme.resolved(is_foldable=True).rotation
    if rotation not in ("quarot", "heads"):
        return None
    kind = str(getattr(model.config, "model_type", None))
    family = FAMILIES.get(kind, Family(obstacle="its layers are not known"))
    if not family.obstacle:
        return Sizes.of_model(model.config, family)
    if scheme.rotation == AUTO or (scheme.rotation == "heads" and scheme.cache):  # which needs no folding
        return None
    raise UsageError(f'{shown(kind)} takes no rotation = {shown(rotation)}: {family.obstacle}; use "blocks", or None')


def planned_of(model: Any, scheme: Scheme, sizes: Sizes | None) -> Scheme:
    """The scheme with the layers that have codes, and the rotations of their inputs.

    sizes: those of `known_sizes`. Layers that keep their type are added to `ignore`, and so is a weight of experts
    whose other weight is in it.

    Raises `UsageError` for a name in `ignore` that is no linear layer, and a model without a layer to quantize.
    """
    scheme = scheme.resolved(sizes is not None)
    found = linears(model)
    shorts = {name.rpartition(".")[2] for name in found}
    for name in scheme.ignore:
        if name != "lm_head" and name not in found and name not in shorts:
            raise UsageError(f"ignore names {shown(name)}, which is no linear layer; {choice(name, sorted(shorts))}")
    whole = replace(scheme, layers=tuple(sorted(shorts)), online={})
    with_codes = {name for name in found if whole.is_quantized(name)} - kept(model, found)
    if scheme.rotation == "blocks" or scheme.weights in GROUPS:
        with_codes = {name for name in with_codes if found[name].weight.shape[-1] % 2 == 0}
    whole_experts = Counter(name.rpartition(".")[0] for name in with_codes if found[name].part)
    with_codes = {name for name in with_codes if not found[name].part or whole_experts[name.rpartition(".")[0]] == 2}
    if not with_codes:
        raise UsageError(f"{type(model).__name__} has no linear layer that hadagen quantizes; load it as it is")
    layers = {name.rpartition(".")[2] for name in with_codes}
    ignored = [name for name in found if name.rpartition(".")[2] in layers and name not in with_codes]
    ignored = [name for name in ignored if whole.is_quantized(name)]
    made = replace(whole, layers=tuple(sorted(layers)), ignore=(*scheme.ignore, *ignored))
    if sizes:
        _check_parts(model, sizes)
    return rotated(model, made, sizes)


def _check_parts(model: Any, sizes: Sizes) -> None:
    """Raise `UsageError` for a part that may read or write the residual stream without our knowledge."""
    for name, tensor in {**model.state_dict(), **dict(model.named_buffers())}.items():
        layer, path = place_of(module_of(name)[0])
        is_known = sizes.family.knows(path) if layer else name in (EMBEDDING, HEAD, LAST_NORM)
        if not is_known and tensor.numel() > 1 and not name.endswith(BUFFERS):  # one is a multiplier
            raise UsageError(
                f"{name} is no part of a {model.config.model_type} that predicts tokens, so how to rotate it is not "
                'known; use "blocks", or None'
            )


def rotated(model: torch.nn.Module, scheme: Scheme, sizes: Sizes | None) -> Scheme:
    """The scheme with the rotations that its layers need.

    Raises `UsageError` if there is no rotation of such rows.
    """
    inputs = {name: each.weight.shape[-1] for name, each in linears(model).items() if scheme.is_quantized(name)}
    found = {name: rotation_of_input(scheme.rotation, name, n, sizes) for name, n in inputs.items()}
    online = {name: each for name, each in found.items() if each}
    if scheme.rotation == "quarot":
        for name, each in online.items():
            check_rotation(name, each.n, "its input", "blocks")
    return replace(scheme, online=_named(online), head=head_of(scheme, sizes) if sizes else None)


def rotation_of_input(rotation: str | None, name: str, n: int, sizes: Sizes | None) -> Online | None:
    """The rotation of the input [..., n] of a layer with codes that runs in each pass, for a `rotation` of a scheme.

    sizes: of a model whose architecture is known, as "quarot" needs.
    """
    if rotation == "blocks":
        return Online(n, block_of(n))
    is_rotated = rotation == "quarot" and sizes and name.endswith(sizes.family.rotated)
    return Online(n) if is_rotated else None


def _named(online: dict[str, Online]) -> dict[str, Online]:
    """Rotations by the last components of names, or by names if those of layers that end alike differ."""
    found: dict[str, set[Online]] = {}
    for name, each in online.items():
        found.setdefault(name.rpartition(".")[2], set()).add(each)
    named = {
        short if len(found[short := name.rpartition(".")[2]]) == 1 else name: each for name, each in online.items()
    }
    return dict(sorted(named.items()))


def check_scheme_of(model: torch.nn.Module, scheme: Scheme, sizes: Sizes | None) -> None:
    """Raise `UsageError` for a stored scheme that hadagen would not have written for this model."""
    made = rotated(model, scheme, sizes)
    if (scheme.online, scheme.head) != (made.online, made.head):
        found, wanted = ({name: (each.n, each.block) for name, each in of.online.items()} for of in (scheme, made))
        raise UsageError(
            f"quantization_config has online = {shown(found)} and head {shown(scheme.head)}, but rotation "
            f"{shown(scheme.rotation)} of this model needs {shown(wanted)} and {shown(made.head)}; quantize it again"
        )
    check_is_untied(scheme, sizes)


def check_is_untied(scheme: Scheme, sizes: Sizes | None) -> None:
    """Raise `UsageError` if the last layer of a stored model is its embedding, which "quarot" rotates differently."""
    if sizes and sizes.tied and scheme.rotation == "quarot":
        raise UsageError("config.json has tie_word_embeddings, but rotation 'quarot' unties them; set it to false")


def kept(model: Any, found: dict[str, Linear]) -> set[str]:
    """The layers that keep their type.

    These are the output embedding, layers that share a weight with another, layers that transformers keeps in float32,
    routers, and layers whose weight other code of the model reads, which would take codes for values.
    """
    given = getattr(model, "get_output_embeddings", None)
    last = given() if given else None
    named = model.named_parameters(remove_duplicate=False)
    times = Counter(id(each) for _, each in named)
    tied = getattr(model, "all_tied_weights_keys", {})
    shared = {*tied, *tied.values()}
    wide = [part for name in _FLOAT32 for part in getattr(model, name, None) or ()]
    modules = dict(model.named_modules())

    def is_kept(name: str, layer: Linear) -> bool:
        stored = getattr(layer.module, layer.part) if layer.part else layer.module.weight
        return (
            layer.module is last
            or times[id(stored)] > 1
            or f"{name}.weight" in shared
            or any(re.search(rf"(^|\.){each}($|\.)", name) for each in wide)
            or _is_router(name, layer, modules)
            or (not layer.part and _is_read(name, modules))
        )

    return {name for name, layer in found.items() if is_kept(name, layer)}


def _is_router(name: str, layer: Linear, modules: dict[str, torch.nn.Module]) -> bool:
    """Whether a layer is named so, or stands beside experts and has an output for each of them, or one for all."""
    parent, _, short = name.rpartition(".")
    if layer.part or "router" in short:
        return not layer.part
    for part in (parent, parent.rpartition(".")[0]):
        experts = getattr(modules[part], "experts", None)
        count = len(experts) if isinstance(experts, torch.nn.ModuleList) else getattr(experts, "num_experts", None)
        if count is not None and layer.weight.shape[0] in (1, count):
            return True
    return False


def _is_read(name: str, modules: dict[str, torch.nn.Module]) -> bool:
    """Whether the code of a module around a layer reads its weight."""
    *around, short = name.split(".")
    kinds: list[Any] = [type(modules[".".join(around[:at])]) for at in range(len(around) + 1)]
    return any(short in _read_by(kind) for kind in kinds)


@cache
def _read_by(kind: type) -> set[str]:
    """The names X in `X.weight` in the code of a class."""
    return {name for each in kind.__mro__ if each.__module__ != "torch.nn.modules.module" for name in _reads(each)}


def _reads(kind: type) -> Iterator[str]:
    for name, function in vars(kind).items():
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is None or name in _EARLY:
            continue
        steps = [each.argval for each in dis.get_instructions(code)]
        yield from (a for a, b in pairwise(steps) if b == "weight" and isinstance(a, str))
