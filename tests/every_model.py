"""Tiny random models of every causal language model type of transformers, and what folding a rotation does to each.

`python tests/every_model.py > docs/data/models.csv` writes, for each type, how many linear layers have codes, and the
relative error of the logits in float32 after the rotations of "blocks" and of "quarot" are folded, without codes, and
with a cache of rotated keys, without codes too; or the sentence with which hadagen refuses it, or why transformers
makes no tiny model of the type. Nothing stands for a cache that transformers does not return.
"""

from __future__ import annotations

import csv
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from tiny_models import SIZES, TOKENS, error
from torch.nn.functional import linear
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hadagen.errors import UsageError
from hadagen.integrations import transformers_cache
from hadagen.models import linears, modules
from hadagen.models.cache import HeadCodes
from hadagen.models.folding import Sizes, planned
from hadagen.models.scheme import Scheme

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
COLUMNS = ("model_type", "layers", "blocks", "quarot", "cache")
FIRST = 12  # tokens that fill the cache
BOUND = 1e-5
MOST = 20_000_000  # parameters of a tiny model
# The sizes that configurations take, by all of their names.
_WIDTHS = ("n_embd", "d_model", "embedding_size", "emb_dim", "lru_width", "conv_dim", "block_dim", "dim")
_WIDTHS += ("input_embedding_size", "output_embedding_size", "attention_hidden_size", "word_embed_proj_dim")
_INNER = ("n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "mamba_d_ssm")
_INNER += ("mlp_dim", "dense_intermediate_size", "intermediate_size_mlp")
_TWO = ("n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers", "num_experts_per_tok", "moe_topk")
_TWO += ("num_experts_per_token", "moe_top_k", "moe_k", "linear_num_key_heads", "num_codebooks", "mamba_expand")
_TWO += ("index_n_heads", "swa_num_key_value_heads")
_FOUR = ("n_head", "num_heads", "n_heads", "decoder_attention_heads", "encoder_attention_heads", "num_experts")
_FOUR += ("num_local_experts", "n_routed_experts", "moe_num_experts", "mamba_n_heads", "mamba_num_heads")
_FOUR += ("linear_num_value_heads", "time_step_rank", "mamba_dt_rank", "swa_num_attention_heads", "adapter_rank")
_EIGHT = ("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "mamba_d_state", "linear_key_head_dim")
_EIGHT += ("linear_value_head_dim", "hidden_size_per_layer_input", "rotary_dim", "index_topk")
_SIXTEEN = ("d_kv", "kv_lora_rank", "v_head_dim", "qk_head_dim", "mamba_chunk_size", "chunk_size", "kv_channels")
_SIXTEEN += ("sliding_window", "window_size", "attention_window", "query_pre_attn_scalar", "attention_head_dim")
_SIXTEEN += ("index_head_dim", "swa_head_dim", "swa_v_head_dim")
_24 = ("q_lora_rank", "mamba_d_head", "mamba_headdim", "mamba_head_dim")
_32 = ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_dim")
_ONE = ("n_shared_experts", "n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "mamba_n_groups")
_ONE += ("n_groups", "num_mem_blocks", "decoder_start_token_id")
_VALUES: dict[str, Any] = SIZES | {"n_positions": 128, "n_ctx": 128, "vocab_size_per_layer_input": 89, "dropout": 0.0}
_VALUES |= {"moe_layer_start_index": 0, "num_kv_shared_layers": 0, "use_mamba_kernels": False}
_VALUES |= {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 32)}
for _names, _value in (
    *((_WIDTHS, 48), (_INNER, 96), (_TWO, 2), (_FOUR, 4), (_EIGHT, 8), (_SIXTEEN, 16)),
    *((_24, 24), (_32, 32), (_ONE, 1)),
):
    _VALUES |= dict.fromkeys(_names, _value)
# What a type needs besides.
_OPTIONS: dict[str, dict[str, Any]] = {
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "helium": {"head_dim": 12},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "mamba2": {"head_dim": 24},
    "moshi": {"audio_vocab_size": 89},
    "stablelm": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "zaya": {"num_experts_per_tok": 1},
}


def _taken(kind: Any) -> set[str]:
    """The names of the arguments that a class of configurations takes."""
    found: set[str] = set()
    for each in kind.__mro__:
        found |= set(getattr(each, "__annotations__", {}))
        if "__init__" in vars(each):
            found |= set(inspect.signature(each.__init__).parameters)
    return found


def _options(kind: Any) -> dict[str, Any]:
    taken = _taken(kind)
    given = {name: value for name, value in _VALUES.items() if name in taken}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if part.__name__ != "AutoConfig":
            given[name] = _options(part) | {"model_type": part.model_type}
    return given


def made(kind: str) -> Any:
    """A model whose parameters are all random, factors of norms and biases too."""
    config_class = transformers.CONFIG_MAPPING[kind]
    config = config_class(**_options(config_class) | _OPTIONS.get(kind, {}))
    config.is_decoder = True
    load: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        count = sum(each.numel() for each in load(config).parameters())
    if count > MOST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = load(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and parameter.is_floating_point():
            parameter += (0.3 if name.endswith("bias") else 0.1) * torch.randn_like(parameter)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits.double()  # type: ignore[no-any-return]


# ---- layers without codes --------------------------------------------------------------------------------------------
class Floats(torch.nn.Module):
    """A layer, or a stack of layers, with a folded weight in float32 in place of codes."""

    def __init__(self, name: str, scheme: Scheme, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        online = scheme.online_of(name)
        self.rotation = online.rotation() if online else None

    @classmethod
    def of(cls, name: str, scheme: Scheme, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Floats:
        return cls(name, scheme, weight, bias)

    def forward(self, x: torch.Tensor, at: int | None = None) -> torch.Tensor:
        weight, bias = ((each if at is None or each is None else each[at]) for each in (self.weight, self.bias))
        return linear(x if self.rotation is None else self.rotation(x), weight, bias)


@contextmanager
def _without_codes() -> Iterator[None]:
    with (
        mock.patch.object(modules, "QuantizedLinear", Floats),
        mock.patch.object(modules, "StackedLinear", Floats),
    ):
        yield


def folded(model: Any, rotation: str) -> Scheme:
    """Fold a rotation into a model in place, as `HadagenConfig` does, but for codes. Returns the scheme."""
    sizes, scheme = Sizes.of(model.config.to_dict()), Scheme(rotation=rotation)
    if sizes:
        scheme = planned(scheme, sizes)
    else:
        sizes = linears.known_sizes(model, scheme)
        scheme = linears.planned_of(model, scheme, sizes)
    with _without_codes():
        modules.quantize(model, scheme, sizes)
    return scheme


class Kept(HeadCodes):
    """Heads in a cache as they are, in bytes."""

    row = property(lambda self: 4 * self.head)  # type: ignore[assignment]

    def pack(self, x: torch.Tensor, rotation: Any) -> torch.Tensor:
        assert x.shape[-1] == self.head
        return (x if rotation is None else rotation(x.contiguous())).contiguous().view(torch.uint8)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return packed.contiguous().view(dtype)


def logits_of_steps(model: Any) -> torch.Tensor:
    """The logits of some tokens, and then of the others with the cache of these."""
    with torch.no_grad():
        first = model(TOKENS[:, :FIRST], use_cache=True)
        second = model(TOKENS[:, FIRST:], use_cache=True, cache=first.cache)
    return torch.cat((first.logits, second.logits), 1).double()


def outcome_of_cache(kind: str) -> str:
    model = made(kind)
    try:
        with mock.patch.object(transformers_cache, "HeadCodes", Kept):
            scheme = Scheme(rotation="blocks", cache="int8")
            transformers_cache.quantize_cache(model, scheme, Sizes.of(model.config.to_dict()))
    except UsageError as reason:
        return str(reason)
    try:
        expected = logits_of_steps(made(kind))
    except Exception:  # transformers' own, of a model that is as it was
        return ""
    return f"{error(logits_of_steps(model), expected):.1e}"


def outcome(kind: str) -> dict[str, str]:
    """The row of a type in the table."""
    row = dict.fromkeys(COLUMNS, "") | {"model_type": kind}
    for rotation in ("blocks", "quarot"):
        try:
            model = made(kind)
            expected = logits(model)
        except Exception as reason:
            why = " ".join(str(reason).split())[:80]
            return row | {"blocks": f"not made: {type(reason).__name__}: {why}"}
        try:
            scheme = folded(model, rotation)
        except UsageError as reason:
            row[rotation] = str(reason)
            continue
        count = sum(isinstance(each, Floats) for each in model.modules())
        row["layers"] = row["layers"] or str(count)
        assert count, scheme
        row[rotation] = f"{error(logits(model), expected):.1e}"
    return row | {"cache": outcome_of_cache(kind)}


def main() -> None:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for kind in KINDS:
        writer.writerow(outcome(kind))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
