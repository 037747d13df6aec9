"""Llama models in plain PyTorch: checkpoints of safetensors, the forward pass, rotations folded into the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from hadagen import Rotation

Weights = dict[str, Any]  # tensors [out, in], by the names of the checkpoint; a linear layer may have its own type
# The layers after each norm.
NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
# (q [heads, tokens, head], k and v [kv_heads, tokens, head]) → [heads, tokens, head]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Config:
    """The sizes of a model. rope: the parameters of its rotary embedding, by the names of `config.json`."""

    layers: int
    heads: int
    kv_heads: int
    head: int
    width: int
    inner: int
    vocabulary: int
    epsilon: float
    rope: Mapping[str, Any]
    tied: bool

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """The sizes in `config.json`. Ends the program with one sentence if the forward pass lacks something."""
        path = Path(folder) / "config.json"
        if not path.exists():
            raise SystemExit(f"{path} is not there; name a folder with config.json and *.safetensors")
        try:
            return cls._of(path, json.loads(path.read_text(encoding="utf-8")))
        except (KeyError, ValueError) as error:
            raise SystemExit(f"{path} is no configuration of a Llama: {error!r}; copy it from the checkpoint") from None

    @classmethod
    def _of(cls, path: Path, known: dict[str, Any]) -> Config:
        scaling = known.get("rope_parameters") or known.get("rope_scaling") or {}
        kind = {"rope_theta": known.get("rope_theta", 1e4), "rope_type": scaling.get("type", "default")}
        rope = kind | scaling  # older files say "type"
        for name, value, supported in (
            ("model_type", known.get("model_type"), ["llama"]),
            ("hidden_act", known.get("hidden_act", "silu"), ["silu"]),
            ("attention_bias", known.get("attention_bias", False), [False]),
            ("mlp_bias", known.get("mlp_bias", False), [False]),
            ("quantization_config", known.get("quantization_config"), [None]),
            ("rope_type", rope["rope_type"], ["default", "llama3"]),
        ):
            if value not in supported:
                choices = " or ".join(map(str, supported))
                raise SystemExit(f"{path} has {name} = {value}; this program only handles {choices}")
        heads, width = known["num_attention_heads"], known["hidden_size"]
        return cls(
            layers=known["num_hidden_layers"],
            heads=heads,
            kv_heads=known.get("num_key_value_heads") or heads,
            head=known.get("head_dim") or width // heads,
            width=width,
            inner=known["intermediate_size"],
            vocabulary=known["vocab_size"],
            epsilon=known["rms_norm_eps"],
            rope=rope,
            tied=known.get("tie_word_embeddings", False),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names of all weights, and their shapes."""
        of_layer = {
            "input_layernorm": (self.width,),
            "self_attn.q_proj": (self.heads * self.head, self.width),
            "self_attn.k_proj": (self.kv_heads * self.head, self.width),
            "self_attn.v_proj": (self.kv_heads * self.head, self.width),
            "self_attn.o_proj": (self.width, self.heads * self.head),
            "post_attention_layernorm": (self.width,),
            "mlp.gate_proj": (self.inner, self.width),
            "mlp.up_proj": (self.inner, self.width),
            "mlp.down_proj": (self.width, self.inner),
        }
        layers = {
            f"model.layers.{at}.{name}.weight": shape for at in range(self.layers) for name, shape in of_layer.items()
        }
        head = {} if self.tied else {"lm_head.weight": (self.vocabulary, self.width)}
        ends = {"model.embed_tokens.weight": (self.vocabulary, self.width), "model.norm.weight": (self.width,)}
        return ends | head | layers


def load(folder: str | Path, dtype: torch.dtype | None = None) -> tuple[Config, Weights]:
    """The checkpoint of a folder: config.json and *.safetensors. dtype: None keeps that of the files."""
    config, found = Config.read(folder), {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    for name, shape in config.shapes().items():
        if name not in found:
            raise SystemExit(f"{folder} has no weight {name} in *.safetensors; it is no complete Llama checkpoint")
        if tuple(found[name].shape) != shape:
            raise SystemExit(f"{name} has the shape {tuple(found[name].shape)}, but config.json says {shape}")
    return config, {name: found[name].to(dtype or found[name].dtype) for name in config.shapes()}


# ---- the forward pass ------------------------------------------------------------------------------------------------
def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]


@dataclass
class Model:
    """The forward pass. linear: (name of a layer, x, its weight) → x · weightᵀ. seen: called with each layer's x."""

    config: Config
    weights: Weights
    linear: Callable[[str, torch.Tensor, Any], torch.Tensor] = lambda name, x, weight: x @ weight.T
    attention: Attention = plain_attention
    seen: Callable[[str, torch.Tensor], None] = lambda name, x: None

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary], of one sequence of tokens."""
        embedding = self.weights["model.embed_tokens.weight"]
        x = embedding[tokens]
        angles = torch.arange(len(tokens), device=x.device)[:, None] * frequencies(self.config).to(x.device)
        cos, sin = (part.repeat(1, 2).to(x.dtype) for part in (angles.cos(), angles.sin()))

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        for layer in range(self.config.layers):
            at = f"model.layers.{layer}"
            normal = self._normal(f"{at}.input_layernorm", x)
            q, k, v = (self._heads(self._linear(f"{at}.self_attn.{part}_proj", normal)) for part in "qkv")
            found = self.attention(turned(q), turned(k), v).transpose(0, 1).flatten(1)
            x = x + self._linear(f"{at}.self_attn.o_proj", found)
            normal = self._normal(f"{at}.post_attention_layernorm", x)
            gate, up = (self._linear(f"{at}.mlp.{part}_proj", normal) for part in ("gate", "up"))
            x = x + self._linear(f"{at}.mlp.down_proj", silu(gate) * up)
        head = embedding if self.config.tied else self.weights["lm_head.weight"]
        return self._normal("model.norm", x) @ head.T

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.seen(name, x)
        return self.linear(name, x, self.weights[f"{name}.weight"])

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head)).transpose(0, 1)

    def _normal(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.epsilon)


def frequencies(config: Config) -> torch.Tensor:
    """Of the rotary embedding, float32 [head / 2]. Llama 3.1 has lower ones where a period is longer than a context."""
    rope = config.rope
    found = rope["rope_theta"] ** (-torch.arange(0, config.head, 2) / config.head)
    if rope["rope_type"] == "default":
        return found
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    periods = rope["original_max_position_embeddings"] * found / (2 * math.pi)  # in the context of the training
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return kept * found + (1 - kept) * found / rope["factor"]


# ---- rotations -------------------------------------------------------------------------------------------------------
# The rotations of a layer's inputs that a model makes in each pass, by the last part of the layer's name.
Online = dict[str, Rotation]


def rotated(config: Config, weights: Weights, seed: int = 0) -> tuple[Config, Weights, Online]:
    """The same model on activations whose whole rows are rotated. seed: of the signs of the residual stream.

    R1 of the residual stream and R2 of the heads of values are folded into the weights, and so are the factors of the
    norms. R4, of the inputs of each down_proj, is left.
    """
    embedding, last = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    signs = 1 - 2 * torch.randint(0, 2, (config.width,), generator=torch.Generator().manual_seed(seed))
    r1 = Rotation(config.width, signs=signs).to(embedding.device)
    r2, r4 = Rotation(config.head), Rotation(config.inner)
    made = {name: torch.ones_like(weight) if weight.dim() == 1 else weight for name, weight in weights.items()}
    made["model.embed_tokens.weight"] = r1(embedding)
    made["lm_head.weight"] = r1.fold_into((embedding if config.tied else weights["lm_head.weight"]) * last, "input")
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        for norm, parts in NORMS.items():
            for name in (f"{at}.{part}.weight" for part in parts):
                made[name] = r1.fold_into(weights[name] * weights[f"{at}.{norm}.weight"], "input")
        v, o, down = (f"{at}.{part}_proj.weight" for part in ("self_attn.v", "self_attn.o", "mlp.down"))
        made[v] = r2.fold_into(made[v].unflatten(0, (-1, config.head)), "output").flatten(0, 1)
        made[o] = r1.fold_into(r2.fold_into(made[o].unflatten(1, (-1, config.head)), "input").flatten(1), "output")
        made[down] = r1.fold_into(r4.fold_into(made[down], "input"), "output")
    return replace(config, tied=False), made, {"down_proj": r4}


def in_blocks(config: Config, weights: Weights, block: int) -> tuple[Config, Weights, Online]:
    """The same model with the inputs of all linear layers rotated in blocks, which is left to do in each pass."""
    made, online = dict(weights), {}
    for name, weight in weights.items():
        if "_proj." in name:
            rotation = online.setdefault(name.split(".")[-2], Rotation(weight.shape[1], block=block))
            made[name] = rotation.fold_into(weight, "input")
    return config, made, online
