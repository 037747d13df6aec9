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

SiLU·mul, a rotation and codes of several formats, without a product, are also timed in three ways, for the first model:

    compiled            torch.compile of all three, with products in place of the rotation (`chains.py`)
    two kernels         SiLU·mul of torch.compile, then a rotation with codes in one kernel
    fused               one kernel
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from chains import BLOCKS, Chain, silu_mul
from graphs import milliseconds, write

import hadagen
from hadagen import Rotation, prologues, rotate_quantize

MODELS = {"Llama-3-8B": (4096, 14336), "Qwen2.5-7B": (3584, 18944)}  # name → hidden size and m
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
CHAIN_TOKENS = (16, 64, 256, 1024, 4096, 16384)  # from 1024 on, x is larger than the L2 of an H100
GRAPH, REPLAYS = 20, 15  # launches of a piece in a CUDA graph, and replays that are timed
BEFORE = prologues.SiluMul()


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


def random(tokens: int, m: int) -> torch.Tensor:
    return torch.randn(tokens, m, device="cuda").to(torch.bfloat16)


def compiled_silu_mul() -> Callable[[torch.Tensor], torch.Tensor]:
    """A kernel for the sizes of its first call. Those that were made before are dropped, because PyTorch keeps few."""
    torch._dynamo.reset()
    return torch.compile(silu_mul, dynamic=False, fullgraph=True)


def pieces(layer: Layer, tokens: int) -> dict[str, dict[str, Callable[[Any], Any]]]:
    """Name of a layer → name of a piece → a function of what the piece before it returns. The first takes x."""
    plain, rotated = (layer.codes(each) for each in (False, True))
    activation = {"SiLU·mul": compiled_silu_mul()}
    least = 16  # tokens, as torch._scaled_mm needs
    enough = rotate_quantize(random(least, layer.weight.shape[1]), to="fp8-row")

    def quantized(to: str, **options: Any) -> Callable[[Any], Any]:
        return partial(rotate_quantize, to=to, **options)

    def times(weight: hadagen.Quantized) -> Callable[[Any], Any]:
        return lambda codes: product(codes if tokens >= least else enough, weight)

    turned = {"rotation": layer.rotation}
    fused = {**turned, "before": BEFORE}
    return {
        "bfloat16": {**activation, "product": partial(F.linear, weight=layer.weight)},
        "fp8": {**activation, "codes": quantized("fp8-row"), "product": times(plain)},
        "fp8, rotated": {**activation, "codes": quantized("fp8-row", **turned), "product": times(rotated)},
        "fp8, fused": {"codes": quantized("fp8-row", **fused), "product": times(rotated)},
        "mxfp4, rotated": {**activation, "codes": quantized("mxfp4", **turned)},
        "mxfp4, fused": {"codes": quantized("mxfp4", **fused)},
    }


def in_turn(calls: Iterable[Callable[[Any], Any]], x: torch.Tensor) -> Any:
    return reduce(lambda value, call: call(value), calls, x)


def measured(models: list[str], counts: list[int]) -> list[dict[str, Any]]:
    rows = []
    for model in models:
        layer = Layer.random(*MODELS[model], "cuda")
        for tokens in counts:
            x = random(tokens, 2 * layer.weight.shape[1])
            for name, parts in pieces(layer, tokens).items():
                times, value = {}, x
                for piece, call in parts.items():
                    times[piece] = microseconds(partial(call, value))
                    value = call(value)
                whole = microseconds(partial(in_turn, parts.values(), x))
                rows.append({"model": model, "tokens": tokens, "layer": name, "pieces": times, **whole})
                each = ", ".join(f"{piece} {time['us']:.1f}" for piece, time in times.items())
                print(f"{model:12} {tokens:5} tokens  {name:15} {rows[-1]['us']:8.1f} µs  ({each})", flush=True)
    return rows


def ways(chain: Chain) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Name of a way → a function of x: SiLU·mul, a rotation and codes."""
    activation, options = compiled_silu_mul(), {"rotation": chain.rotation, **chain.options}
    return {
        "compiled": chain.compiled(),
        "two kernels": lambda x: rotate_quantize(activation(x), **options),
        "fused": partial(rotate_quantize, before=BEFORE, **options),
    }


def measured_chains(model: str, counts: list[int]) -> list[dict[str, Any]]:
    m = MODELS[model][1]
    rows = []
    for to in BLOCKS:
        chain = Chain.of(to, m, "cuda", torch.bfloat16)
        for tokens in counts:
            x = random(tokens, 2 * m)
            for way, call in ways(chain).items():
                time = microseconds(partial(call, x))
                rows.append({"model": model, "tokens": tokens, "to": to, "block": BLOCKS[to] or m, "way": way, **time})
                print(f"{model:12} {tokens:5} tokens  {to:9}  {way:11} {time['us']:8.1f} µs", flush=True)
    return rows


# ---- the check -------------------------------------------------------------------------------------------------------
def check_chains(device: str, tokens: int = 32, m: int = 896) -> None:
    """Raises SystemExit unless chains give our codes but for roundings: of float32 to other last bits; of bfloat16 also
    of what is between SiLU·mul, the products and the codes. On a GPU, torch.compile makes the kernels of the chains."""
    for dtype, allowed in ((torch.float32, 0.001), (torch.bfloat16, 0.15)):
        for to in BLOCKS:
            chain = Chain.of(to, m, device, dtype)
            x = torch.randn(tokens, 2 * m, device=device).to(dtype)
            ours = rotate_quantize(x, chain.rotation, before=BEFORE, **chain.options)
            codes, scales = (chain.compiled() if device == "cuda" else chain)(x)
            others = float((codes.view(torch.uint8) != ours.codes.view(torch.uint8)).double().mean())
            apart = float((scales.float() - ours.scales.float()).norm() / ours.scales.float().norm())
            print(f"{to} of {str(dtype)[6:]}, as a chain: {others:.2%} of the codes are others")
            if not max(others, apart) < allowed:
                raise SystemExit(f"of the codes to {to}, {others:.2%} are others, and scales are off by {apart:.4f}")


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
    check_chains(device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the down projection of an MLP with a fused rotation.")
    parser.add_argument("command", nargs="?", choices=("measure", "check"), default="measure")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N")
    parser.add_argument("--chain-tokens", nargs="+", type=int, default=list(CHAIN_TOKENS), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to a file")
    options = parser.parse_args()
    for name in ("tokens", "chain_tokens"):
        if (least := min(getattr(options, name))) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: {least} is not possible; give 1 or more")
    if options.command == "check":
        check()
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure; on a CPU, run: python examples/layer.py check")
    compiled_silu_mul()(random(1, 2))  # loads the modules that compile
    gc.freeze()  # because torch.cuda.graph collects garbage each time, and looks at all objects that are there
    rows = measured(options.models, options.tokens)
    chains = measured_chains(options.models[0], options.chain_tokens)
    if options.json:
        write(options.json, hadagen, torch, rows=rows, chains=chains)


if __name__ == "__main__":
    main()
