"""The time of a pass through layers of Llama-3-8B's size: in bfloat16, and with FP8 and INT8 codes, rotated or not.

    python examples/decoder.py                      # on a GPU: a table of milliseconds
    python examples/decoder.py --json decoder.json  # and all numbers in a file
    python examples/decoder.py --compile            # also with torch.compile, beside bfloat16 with it
    python examples/decoder.py check                # on any device, with a small model: errors against float32

The weights are random. Each pass runs in a CUDA graph, and ends with the logits of the last token of each sequence:

    bfloat16         transformers' own layers
    fp8, int8        codes of weights and activations of all linear layers but the last; SiLU·mul and its codes in one
                     kernel
    fp8, blocks      the same, with the inputs of all layers rotated in blocks by the kernels that quantize them
    int8, quarot     the same, with the inputs of down_proj rotated whole, and the rest folded into the weights
    int4, quarot     the same with weights of 4 bits
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from graphs import milliseconds, write

import hadagen
from hadagen.models.folding import Sizes, planned
from hadagen.models.merging import merge
from hadagen.models.modules import quantize
from hadagen.models.scheme import Scheme

# Name of a pass → sequences, tokens of each.
PASSES = {"1 token": (1, 1), "64 tokens": (64, 1), "prefill of 512": (1, 512), "prefill of 4096": (1, 4096)}
REPLAYS, ROUNDS = 15, 5  # of a graph in a round; models take turns, because clocks drift


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; by default those of Llama-3-8B with fewer layers and a smaller vocabulary."""

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    num_hidden_layers: int = 4
    vocab_size: int = 32000

    def model(self, device: str, dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**asdict(self), max_position_embeddings=4096, use_cache=False)
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)

    def schemes(self) -> dict[str, Scheme | None]:
        found: dict[str, Scheme | None] = {"bfloat16": None}
        kinds = ("fp8", None), ("fp8", "blocks"), ("int8", None), ("int8", "quarot"), ("int4", "quarot")
        for weights, rotation in kinds:
            found[f"{weights}, {rotation}" if rotation else weights] = Scheme(weights, rotation=rotation)
        return found


def with_codes(model: Any, scheme: Scheme | None) -> Any:
    """The model with codes in place of weights, rotated as the scheme says."""
    if scheme:
        sizes = Sizes.of(model.config.to_dict())
        quantize(model, planned(scheme, sizes), sizes)
        merge(model)
    return model


# ---- times -----------------------------------------------------------------------------------------------------------
def measured(shape: Shape, compiled: bool) -> list[dict[str, Any]]:
    models = {name: with_codes(shape.model("cuda", torch.bfloat16), scheme) for name, scheme in shape.schemes().items()}
    if compiled:
        # Models share their code, and each pass compiles once or twice: beyond the limit, PyTorch would not compile.
        torch._dynamo.config.recompile_limit = 2 * len(models) * len(PASSES)
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        models = {name: torch.compile(model, dynamic=False) for name, model in models.items()}
    found: dict[tuple[str, str], list[float]] = {}
    for _, title in product(range(ROUNDS), PASSES):
        ids = torch.randint(shape.vocab_size, PASSES[title], device="cuda")
        for name, model in models.items():
            ms, *_ = milliseconds(partial(model, ids, logits_to_keep=1), 1, REPLAYS)
            found.setdefault((name, title), []).append(ms)
    rows = []
    for name, title in product(models, PASSES):
        times = found[name, title]
        spread = {"ms": median(times), "low": min(times), "high": max(times)}
        rows.append({"model": name, "pass": title, "compiled": compiled} | spread)
        print(f"{name:13} {title:16} {rows[-1]['ms']:8.3f} ms{', compiled' * compiled}", flush=True)
    return rows


# ---- the check -------------------------------------------------------------------------------------------------------
def check() -> None:
    """Raises SystemExit unless codes, rotated or not, give nearly the logits of the model without codes."""
    small = Shape(256, 896, 8, 4, 2, 128)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.randint(small.vocab_size, (2, 24), device=device)
    exact = small.model(device, torch.float32)(ids).logits
    for name, scheme in small.schemes().items():
        found = with_codes(small.model(device, torch.bfloat16), scheme)(ids).logits
        error = float((found - exact).norm() / exact.norm())
        print(f"{name}: relative error {error:.4f}")
        most = 0.3 if scheme and scheme.weights == "int4" else 0.1
        if not error < most:
            raise SystemExit(f"the logits of {name} are off by {error:.4f}; codes allow {most}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time passes through layers of Llama-3-8B's size.")
    parser.add_argument("command", nargs="?", choices=("measure", "check"), default="measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to a file")
    parser.add_argument("--compile", action="store_true", help="measure compiled models too")
    options = parser.parse_args()
    with torch.inference_mode():
        if options.command == "check":
            check()
            return
        if not torch.cuda.is_available():
            raise SystemExit("there is no GPU to measure; on a CPU, run: python examples/decoder.py check")
        rows = [row for compiled in {False, options.compile} for row in measured(Shape(), compiled)]
    if options.json:
        write(options.json, hadagen, torch, transformers, rows=rows)


if __name__ == "__main__":
    main()
