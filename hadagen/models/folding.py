"""The weights of a rotated model, tensor by tensor, from those of the model as it is.

The model is Llama-like: linear layers behind RMSNorms read the residual stream, and linear layers write it. With the
rotation "quarot", norms lose their factors, which go into the layers behind them. R1 rotates the residual stream, and
R2 the heads of values; both are folded into weights. R4 rotates the inputs of down_proj in each pass, so its inverse is
folded. The rotation "blocks" folds the inverse of a rotation of the inputs of each layer. R3 rotates queries and keys
in each pass and changes no weight: q · kᵀ stays as it is if both are rotated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from hadagen.errors import UsageError, choice, shown
from hadagen.models.cache import HeadCodes
from hadagen.models.families import LLAMA, Family
from hadagen.models.scheme import LAYERS, METHOD, Online, Scheme
from hadagen.runtime.checks import plain
from hadagen.runtime.rotation import Rotation

Get = Callable[[str], torch.Tensor]  # the tensor of a name

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"(model\.layers\.\d+)\.(.+)")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MOST_OF_A_BLOCK = 128
_MOST = 1 << 31  # no size of a model is that large
# The sizes that a configuration may leave out, as transformers has them. Without a number of heads of keys and values,
# it is that of queries, and the length of a head follows from the width.
_LLAMA = {
    "vocab_size": 32000,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_MISTRAL = _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8}
_QWEN = _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "smollm3": {
        "vocab_size": 128256,
        "num_hidden_layers": 36,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}
MODEL_TYPES = tuple(_DEFAULTS)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: of the residual stream (width), of the MLP (inner), and of heads. tied: whether the
    embedding is the last layer too."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    tied: bool
    family: Family = LLAMA

    @classmethod
    def of_model(cls, config: Any, family: Family) -> Sizes:
        """Those of the configuration of a model in memory, which has every size. family: of its `model_type`."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            inner=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head=getattr(config, "head_dim", None) or config.hidden_size // heads,
            tied=config.tie_word_embeddings,
            family=family,
        )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes | None:
        """The sizes in a `config.json`; None for another architecture than Llama's, of which nothing needs to be known.

        Raises `UsageError` for a model that is quantized already, or has impossible sizes.
        """
        if given := config.get("quantization_config"):
            method = given.get("quant_method") if isinstance(given, Mapping) else given
            by = "" if method == METHOD else f" by {shown(method)}"
            raise UsageError(f"the model is quantized already{by}; name one with weights of 16 or 32 bits")
        if config.get("model_type") not in MODEL_TYPES or config.get("hidden_act", "silu") not in ("silu", "swish"):
            return None
        width, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        return cls(
            layers=_size(config, "num_hidden_layers"),
            width=width,
            inner=_size(config, "intermediate_size"),
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", heads),
            head=_size(config, "head_dim", width // heads),
            tied=_is_tied(config),
        )

    def linears(self) -> dict[str, str]:
        """The name of each quantized layer → its last component."""
        return {f"model.layers.{at}.{_part_of(name)}.{name}": name for at in range(self.layers) for name in LAYERS}

    def is_linear(self, name: str) -> bool:
        """Whether a layer of this name, or of this last component of a name, can be quantized."""
        start, _, short = name.rpartition(".")
        if not start:
            return short in LAYERS
        at = start.removeprefix("model.layers.").partition(".")[0]
        known = at.isdecimal() and start == f"model.layers.{at}.{_part_of(short)}" and int(at[:9]) < self.layers
        return known and short in LAYERS

    def inputs(self) -> dict[str, int]:
        """The length of the input of each quantized layer."""
        lengths = {"o_proj": self.heads * self.head, "down_proj": self.inner}
        return {name: lengths.get(name, self.width) for name in LAYERS}

    def outputs(self) -> dict[str, int]:
        """The length of the output of each quantized layer."""
        lengths = {"q_proj": self.heads * self.head, "gate_proj": self.inner, "up_proj": self.inner}
        lengths |= dict.fromkeys(("k_proj", "v_proj"), self.kv_heads * self.head)
        return {name: lengths.get(name, self.width) for name in LAYERS}


def _part_of(name: str) -> str:
    """The part of a decoder layer that has a linear layer."""
    return "self_attn" if name in _ATTENTION else "mlp"


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """The rows of the embedding of a model. Raises `UsageError` if they are no size."""
    return _size(config, "vocab_size")


def _size(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    """A size in a configuration that has a known model_type. otherwise: if neither it nor transformers has one."""
    found = {**_DEFAULTS[config["model_type"]], **config}
    size = otherwise if found.get(name) is None else found[name]
    if type(size) is not int or not 1 <= size < _MOST:
        raise UsageError(f"{name} = {shown(size)} in the configuration is no size; take it from the checkpoint")
    return size


def _is_tied(config: Mapping[str, Any]) -> bool:
    found = config.get("tie_word_embeddings", _DEFAULTS[config["model_type"]]["tie_word_embeddings"])
    if not isinstance(found, bool):
        raise UsageError(f"tie_word_embeddings = {shown(found)} is neither true nor false; take it from the checkpoint")
    return found


def planned(scheme: Scheme, sizes: Sizes) -> Scheme:
    """The scheme with the rotations that run in each pass of a model of these sizes.

    Raises `UsageError` if there is no rotation of such rows, and for a name in `ignore` that is no layer of the model.
    """
    scheme = replace(scheme.resolved(is_foldable=True), layers=LAYERS)
    for name in scheme.ignore:
        if name != "lm_head" and not sizes.is_linear(name):
            raise UsageError(f"ignore names {shown(name)}, which is no linear layer; {choice(name, LAYERS)}")
    if scheme.cache:
        HeadCodes(scheme.cache, sizes.head)
    online: dict[str, Online] = {}
    if scheme.rotation == "quarot":
        online = {"down_proj": Online(sizes.inner)}
    elif scheme.rotation == "blocks":
        online = {name: Online(n, block_of(n)) for name, n in sizes.inputs().items()}
    if scheme.rotation == "quarot":
        check_rotation("intermediate_size", sizes.inner, "the input of down_proj", "blocks")
    return replace(scheme, online=online, head=head_of(scheme, sizes))


def head_of(scheme: Scheme, sizes: Sizes) -> int | None:
    """The length of heads, if those of values are rotated.

    Raises `UsageError` if a rotation of the scheme is not possible for heads, or for the residual stream.
    """
    if scheme.rotation == "quarot":
        check_rotation("hidden_size", sizes.width, "the residual stream", "blocks")
    if not scheme.rotates_values:
        return None
    is_needed = scheme.cache or scheme.rotation == "heads"
    check_rotation("head_dim", sizes.head, "a head of v_proj", "none" if is_needed else "blocks")
    return sizes.head


def block_of(n: int) -> int:
    """The elements of a block of an input of n: the largest power of two up to 128 that divides n."""
    return min(n & -n, _MOST_OF_A_BLOCK)


def check_rotation(name: str, n: int, what: str, other: str) -> None:
    """Raises `UsageError` if there is no rotation of n elements. other: a rotation of the model that is possible."""
    try:
        Rotation(n)
    except UsageError as error:
        raise UsageError(
            f"{name} = {n}: {what} cannot be rotated as a whole, because no Hadamard matrix is known for it; use "
            f"--rotation {other}"
        ) from error


class Folding:
    """The tensors of a rotated model.

    scheme: with its rotations. sizes: None for a model of which only inputs of layers are rotated, in each pass.
    device: where tensors are rotated. Raises `UsageError` if there is no rotation of the sizes of the model.
    """

    def __init__(self, scheme: Scheme, sizes: Sizes | None, device: torch.device | str = "cpu") -> None:
        self.scheme, self.sizes, self.device = scheme, sizes, device
        self.family = Family() if sizes is None else sizes.family
        self._rotation_of = cache(lambda online: online.rotation().to(device))
        self._whole = scheme.rotation == "quarot"
        self._r2: Rotation | None = None
        if sizes is None:
            return
        if self._whole:
            generator = torch.Generator().manual_seed(scheme.seed)
            signs = 1 - 2 * torch.randint(0, 2, (sizes.width,), generator=generator)
            self._r1 = Rotation(sizes.width, signs=signs).to(device)
        if scheme.rotates_values:
            self._r2 = Rotation(sizes.head).to(device)

    @property
    def is_untied(self) -> bool:
        """Whether the rotated model needs a last layer of its own, which the model as it is does not have."""
        return self._whole and self.is_tied

    @property
    def is_tied(self) -> bool:
        """Whether the model as it is has its embedding as the last layer too."""
        return self.sizes is not None and self.sizes.tied

    def made_of(self, name: str) -> list[str]:
        """The tensors of the rotated model that are made of a stored tensor. Factors of norms are read besides."""
        if name == EMBEDDING and self.is_untied:
            return [EMBEDDING, HEAD]
        if name == HEAD and self.is_tied:  # some checkpoints store the embedding twice
            return []
        return [name]

    def fold(self, name: str, get: Get) -> torch.Tensor:
        """A tensor of the rotated model, float32 if it is another than in the model as it is.

        get: returns a tensor of the model as it is. Raises what it raises for the name of a missing tensor.
        """
        source = EMBEDDING if name == HEAD and self.is_tied else name
        tensor, (module, is_bias) = get(source), module_of(name)
        _, path = place_of(module)
        if self._whole:
            if name == LAST_NORM or path in self.family.norms:
                return torch.full_like(tensor, 1 - self.family.offset)
            if name == EMBEDDING:
                return self._r1(self._wide(tensor))  # type: ignore[no-any-return]
            if name == HEAD:
                return _into(self._r1, self._wide(tensor) * self._factors(LAST_NORM, get), "input")
        if not self._changes(module):
            return tensor
        if is_bias:
            return self.bias(module, tensor)
        if self.family.is_transposed and name == module:
            return self.weight(module, tensor.mT, get).mT
        return self.weight(module, tensor, get)

    def _changes(self, module: str) -> bool:
        """Whether a rotation changes a linear layer."""
        path = place_of(module)[1]
        is_turned = self._whole and (path in self.family.readers or path in self.family.writers)
        of_heads = self._r2 is not None and path in (self.family.values, self.family.outputs)
        return is_turned or of_heads or self.scheme.online_of(module) is not None

    def weight(self, module: str, weight: torch.Tensor, get: Get) -> torch.Tensor:
        """The weight [..., out, in] of a linear layer of the rotated model, float32."""
        folded = self._wide(weight)
        layer, path = place_of(module)
        if self._whole and (norm := self.family.readers.get(path)):
            folded = _into(self._r1, folded * self._factors(f"{layer}.{norm}.weight", get), "input")
        if self._whole and path in self.family.writers:
            folded = _into(self._r1, folded, "output")
        if self._r2 and path == self.family.values:
            rest, heads = self._heads(folded)
            folded = torch.cat((rest, _into(self._r2, heads, "output").flatten(0, 1)))
        elif self._r2 and path == self.family.outputs:
            folded = _into(self._r2, folded.reshape(len(folded), -1, self._r2.n), "input").flatten(1)
        if online := self.scheme.online_of(module):
            folded = _into(self._rotation_of(online), folded, "input")
        return folded

    def bias(self, module: str, bias: torch.Tensor) -> torch.Tensor:
        """The bias [..., out] of a linear layer of the rotated model, float32 if it is another."""
        path = place_of(module)[1]
        if self._r2 and path == self.family.values:
            rest, heads = self._heads(self._wide(bias))
            return torch.cat((rest, self._r2(heads).flatten()))
        if self._whole and path in self.family.writers:
            return self._r1(self._wide(bias))  # type: ignore[no-any-return]
        return bias

    def _heads(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows before the heads of values, and these, [heads, head, ...]."""
        assert self.sizes is not None
        first = len(tensor) - self.sizes.kv_heads * self.sizes.head
        return tensor[:first], tensor[first:].reshape(-1, self.sizes.head, *tensor.shape[1:])

    def _factors(self, norm: str, get: Get) -> torch.Tensor:
        return self._wide(get(norm)) + self.family.offset

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device, torch.float32)


def module_of(name: str) -> tuple[str, bool]:
    """The linear layer of a tensor, and whether this is its bias. A packed weight of experts is a layer by its name."""
    for end, is_bias in ((".weight", False), (".bias", True), ("_bias", True)):
        if name.endswith(end):
            return name.removesuffix(end), is_bias
    return name, False


def place_of(module: str) -> tuple[str, str]:
    """The decoder layer in which a module lies, and its name in it. Both are empty if it lies in none."""
    found = _LAYER.match(module)
    return (found[1], found[2]) if found else ("", "")


def finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor. Raises `UsageError` if it has an infinity or NaN, which codes cannot stand for, or another type."""
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise UsageError(
            f"{name} has the type {plain(tensor.dtype)}; name a model that is not quantized, in 16 or 32 bits"
        )
    if tensor.numel() and not all(each.isfinite() for each in tensor.aminmax()):  # without another tensor of this size
        raise UsageError(f"{name} has infinities or NaN; get its file again, or name a model in a type with more range")
    return tensor


def _into(rotation: Rotation, weight: torch.Tensor, side: str) -> torch.Tensor:
    return rotation.fold_into(weight, side)  # type: ignore[return-value]
