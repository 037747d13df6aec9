"""The second half of an MLP, with and without a rotation: the time of each piece on a GPU, and what fusing them saves.

    python examples/layer.py                    # on a GPU: a table of microseconds
    python examples/layer.py --json layer.json  # and all numbers in a file
    python examples/layer.py check              # on any device: the fused layer equals the layer in pieces

The layer takes x [tokens, 2·m], which the merged projection of gate and up has written, and returns [tokens, hidden]:

    bfloat16            SiLU·mul, then a product
    fp8                 SiLU·mul, then codes of rows, then a product of codes
    fp8, rotated        SiLU·mul, then a rotation with codes of rows in one kernel, then a product of codes
    fp8, fused          SiLU·mul, rotation and codes in one kernel, then a product of codes
    mxfp4, rotated      the first kernels alone: this GPU has no product of FP4 codes
    mxfp4, fused        the first kernel alone
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from graphs import milliseconds

import hadagen
from hadagen import Rotation, prologues, rotate_quantize

MODELS = {"Llama-3-8B": (4096, 14336), "Qwen2.5-7B": (3584, 18944)}  # name → hidden size and m
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
GRAPH, REPLAYS = 20, 15  # launches of a piece in a CUDA graph, and replays that are timed
BEFORE = prologues.SiluMul()


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Layer:
    """A down projection: its weights [hidden, m], and the rotation of what it multiplies."""

    rotation: Rotation
    weight: torch.Tensor

    @classmethod
    def random(cls, hidden: int, m: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Layer:
        weight = torch.randn(hidden, m, device=device).mul(m**-0.5).to(dtype)
        return cls(Rotation(m).to(device), weight)

    def codes(self, rotated: bool) -> hadagen.Quantized:
        weight = self.rotation.fold_into(self.weight, "input") if rotated else self.weight
        return rotate_quantize(weight, to="fp8-row")


def product(codes: hadagen.Quantized, weight: hadagen.Quantized) -> torch.Tensor:
    """The product of FP8 codes, [tokens, hidden]."""
    scales = codes.scales[:, None], weight.scales[None, :]
    return torch._scaled_mm(codes.codes, weight.codes.t(), *scales, out_dtype=torch.bfloat16)


# ---- times -----------------------------------------------------------------------------------------------------------
def microseconds(call: Callable[[], Any]) -> dict[str, float]:
    """The time of a call in a CUDA graph: median and quartiles over replays."""
    us, low, high = (1e3 * each for each in milliseconds(call, GRAPH, REPLAYS))
    return {"us": us, "low": low, "high": high}


def pieces(layer: Layer, tokens: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Name of a layer → name of a piece → its call, in order."""
    m = layer.weight.shape[1]
    x = torch.randn(tokens, 2 * m, device="cuda").to(torch.bfloat16)
    inner, compiled = silu_mul(x), torch.compile(silu_mul)
    rows = max(tokens, 16)  # as torch._scaled_mm needs
    plain, rotated = (layer.codes(each) for each in (False, True))
    rotation = layer.rotation
    enough = rotate_quantize(torch.randn(rows, m, device="cuda", dtype=torch.bfloat16), to="fp8-row")
    activation = {"SiLU·mul": partial(compiled, x)}

    def quantized(to: str, **options: Any) -> Callable[[], Any]:
        return partial(rotate_quantize, x if "before" in options else inner, to=to, **options)

    return {
        "bfloat16": {**activation, "product": partial(F.linear, inner, layer.weight)},
        "fp8": {**activation, "codes": quantized("fp8-row"), "product": partial(product, enough, plain)},
        "fp8, rotated": {
            **activation,
            "codes": quantized("fp8-row", rotation=rotation),
            "product": partial(product, enough, rotated),
        },
        "fp8, fused": {
            "codes": quantized("fp8-row", rotation=rotation, before=BEFORE),
            "product": partial(product, enough, rotated),
        },
        "mxfp4, rotated": {**activation, "codes": quantized("mxfp4", rotation=rotation)},
        "mxfp4, fused": {"codes": quantized("mxfp4", rotation=rotation, before=BEFORE)},
    }


def in_turn(calls: Iterable[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def measured(models: list[str], counts: list[int]) -> list[dict[str, Any]]:
    rows = []
    for model in models:
        layer = Layer.random(*MODELS[model], "cuda")
        for tokens in counts:
            for name, parts in pieces(layer, tokens).items():
                times = {piece: microseconds(call) for piece, call in parts.items()}
                whole = microseconds(partial(in_turn, parts.values()))
                rows.append({"model": model, "tokens": tokens, "layer": name, "pieces": times, **whole})
                each = ", ".join(f"{piece} {time['us']:.1f}" for piece, time in times.items())
                print(f"{model:12} {tokens:5} tokens  {name:15} {rows[-1]['us']:8.1f} µs  ({each})", flush=True)
    return rows


# ---- the check -------------------------------------------------------------------------------------------------------
def check(tokens: int = 32, hidden: int = 64, m: int = 896) -> None:
    """Raises SystemExit unless the fused layer equals the layer in pieces, up to the rounding of SiLU·mul to bfloat16,
    and both are as near to the layer without codes as 8-bit codes allow."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = Layer.random(hidden, m, device)
    x = torch.randn(tokens, 2 * m, device=device).to(torch.bfloat16)
    exact = F.linear(silu_mul(x.double()), layer.weight.double())
    weight = layer.codes(rotated=True).dequantize().double()
    fused = rotate_quantize(x, layer.rotation, to="fp8-row", before=BEFORE)
    parts = rotate_quantize(silu_mul(x), layer.rotation, to="fp8-row")
    results = {name: F.linear(q.dequantize().double(), weight) for name, q in (("fused", fused), ("in pieces", parts))}
    for name, result in results.items():
        error = float((result - exact).norm() / exact.norm())
        print(f"{name}: relative error {error:.4f}")
        if not error < 0.06:
            raise SystemExit(f"the layer {name} is off by {error:.4f}; 8-bit codes allow 0.06")
    apart = float((results["fused"] - results["in pieces"]).norm() / exact.norm())
    print(f"fused and in pieces differ by {apart:.4f}")
    if not apart < 0.03:
        raise SystemExit(f"the fused layer differs from the layer in pieces by {apart:.4f}, more than roundings do")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the down projection of an MLP with a fused rotation.")
    parser.add_argument("command", nargs="?", choices=("measure", "check"), default="measure")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to a file")
    options = parser.parse_args()
    if min(options.tokens) < 1:
        parser.error(f"argument --tokens: {min(options.tokens)} is not possible; give 1 or more")
    if options.command == "check":
        check()
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure; on a CPU, run: python examples/layer.py check")
    rows = measured(options.models, options.tokens)
    if options.json:
        device = torch.cuda.get_device_name()
        versions = {"hadagen": hadagen.__version__, "torch": torch.__version__, "device": device}
        options.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
