"""How the layers of known architectures read and write the residual stream, as data.

Rotations of whole rows, "quarot", are folded into weights only where each layer that reads the stream, and each that
writes it, is known. A type of models is one line here. Scalar multipliers, as of embeddings, residuals, attention and
logits in Gemma and Granite, commute with rotations, so they need no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
_QKV = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ATTENTION_NORM)
_GATE_UP = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), MLP_NORM)


@dataclass(frozen=True)
class Family:
    """The parts of a decoder layer, `model.layers.N`, by their names in it.

    readers: a layer that reads the residual stream → the RMSNorm before it, whose factors go into the layer.
    writers: layers whose outputs are added to the stream.
    rotated: writers whose inputs are rotated in each pass, because a function comes before them.
    values: the layer whose last rows are the heads of values. outputs: the layer that reads heads.
    offset: a norm multiplies by offset + weight.
    is_transposed: whether packed weights of experts are [experts, in, out].
    others: parts that no rotation changes.
    obstacle: why no rotation of whole rows can be folded, as a clause; empty if it can be.
    """

    readers: Mapping[str, str] = field(default_factory=dict)
    writers: tuple[str, ...] = ()
    rotated: tuple[str, ...] = ()
    values: str = "self_attn.v_proj"
    outputs: str = "self_attn.o_proj"
    offset: int = 0
    is_transposed: bool = False
    others: tuple[str, ...] = ("self_attn.q_norm", "self_attn.k_norm")
    obstacle: str = ""

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms before layers that read the stream."""
        return tuple(dict.fromkeys(self.readers.values()))

    def knows(self, path: str) -> bool:
        """Whether a part of a decoder layer is known."""
        return path in {*self.readers, *self.writers, *self.norms, *self.others}


def _mlp(readers: Mapping[str, str], *down: str, **options: object) -> Family:
    """Attention as Llama's, and MLPs or experts with these layers."""
    return Family(_QKV | dict(readers), ("self_attn.o_proj", *down), down, **options)  # type: ignore[arg-type]


def _after(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, MLP_NORM)


LLAMA = _mlp(_GATE_UP, "mlp.down_proj")
_EXPERTS = _mlp(_after("mlp.gate", "mlp.experts.gate_up_proj"), "mlp.experts.down_proj")
_SPARSE = replace(
    _EXPERTS,  # in some layers; others have an MLP
    readers={**_EXPERTS.readers, **_GATE_UP},
    writers=(*_EXPERTS.writers, "mlp.down_proj"),
    rotated=(*_EXPERTS.rotated, "mlp.down_proj"),
)
_SHARED = tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
_POST_NORM = "a norm with factors of its own stands between {} and the residual stream"
_AFTER_BOTH = _POST_NORM.format("self_attn and mlp")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3"), LLAMA),
    **dict.fromkeys(("ministral3", "granite", "cwm", "seed_oss", "iquestcoder", "internlm3", "ernie4_5"), LLAMA),
    "hunyuan_v1_dense": replace(LLAMA, others=("self_attn.query_layernorm", "self_attn.key_layernorm")),
    "helium": LLAMA,
    "arcee": _mlp(_after("mlp.up_proj"), "mlp.down_proj"),
    "gemma": replace(LLAMA, offset=1),
    "phi3": Family(
        {"self_attn.qkv_proj": ATTENTION_NORM, "mlp.gate_up_proj": MLP_NORM},
        ("self_attn.o_proj", "mlp.down_proj"),
        ("mlp.down_proj",),
        values="self_attn.qkv_proj",
    ),
    "glm": _mlp(_after("mlp.gate_up_proj"), "mlp.down_proj"),
    **dict.fromkeys(("mixtral", "olmoe"), _EXPERTS),
    "qwen3_moe": _SPARSE,
    "qwen2_moe": replace(
        _SPARSE,
        readers={**_SPARSE.readers, **_after("mlp.shared_expert_gate", *_SHARED[:2])},
        writers=(*_SPARSE.writers, _SHARED[2]),
        rotated=(*_SPARSE.rotated, _SHARED[2]),
    ),
    "gpt_oss": _mlp(
        _after("mlp.router", "mlp.experts.gate_up_proj"),
        "mlp.experts.down_proj",
        is_transposed=True,
        others=("self_attn.sinks",),
    ),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3", "glm4"), Family(obstacle=_AFTER_BOTH)),
    **dict.fromkeys(("cohere", "cohere2"), Family(obstacle="its norms subtract the mean of a row")),
}
