"""What `hadagen.fuse()` saves in a compiled MLP: SiLU·mul, a rotation and FP8 codes as three parts, and as one kernel.

    python examples/mlp.py                  # on a GPU: a table of microseconds
    python examples/mlp.py --json mlp.json  # and all numbers in a file
    python examples/mlp.py check            # on any device, with a small MLP: both give the same, and one is fused

The MLP has the size of Llama-3-8B's. It takes x [tokens, hidden], and multiplies FP8 codes of x and of SiLU·mul, each
with a scale for each row. The rotation before the second product is an operator of hadagen; the rest is plain PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from chains import fp8_row, silu_mul
from graphs import milliseconds, write

import hadagen

HIDDEN, M = 4096, 14336
TOKENS = (16, 64, 256, 1024, 4096)  # torch._scaled_mm needs 16 or more
GRAPH, REPLAYS = 20, 15  # calls in a CUDA graph, and replays that are timed


class MLP(torch.nn.Module):
    """down(codes(rotation(SiLU(gate(x)) · up(x)))) of FP8 weights."""

    def __init__(self, hidden: int, m: int, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rotation = hadagen.Rotation(m).to(device)
        gate_up, down = (torch.randn(out, n, device=device) * n**-0.5 for out, n in ((2 * m, hidden), (hidden, m)))
        for name, weight in (("gate_up", gate_up), ("down", self.rotation.fold_into(down, "input"))):
            for what, tensor in zip(("codes", "scales"), fp8_row(weight), strict=True):
                self.register_buffer(f"{name}_{what}", tensor)

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x · weightᵀ of FP8 codes, in bfloat16."""
        weight, scales = (getattr(self, f"{name}_{what}") for what in ("codes", "scales"))
        codes, scales_of_x = fp8_row(x.float())
        if x.device.type == "cpu":
            wide = (codes.float() * scales_of_x[:, None]) @ (weight.float() * scales[:, None]).T
            return wide.to(torch.bfloat16)
        return torch._scaled_mm(codes, weight.t(), scales_of_x[:, None], scales[None, :], out_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product("down", self.rotation(silu_mul(self.product("gate_up", x))))


def compiled(mlp: MLP, fused: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The MLP compiled for the sizes of its first call, inside which the pass has to be there."""
    torch._dynamo.reset()
    graph = torch.compile(mlp, dynamic=False, fullgraph=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        with hadagen.fuse() if fused else contextlib.nullcontext():
            return graph(x)

    return call


def measured(counts: list[int]) -> list[dict[str, Any]]:
    rows = []
    mlp = MLP(HIDDEN, M, "cuda")
    for tokens in counts:
        x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
        for fused in (False, True):
            us, low, high = (1e3 * ms for ms in milliseconds(partial(compiled(mlp, fused), x), GRAPH, REPLAYS))
            rows.append({"tokens": tokens, "fused": fused, "us": us, "low": low, "high": high})
            print(f"{tokens:5} tokens  {'fused' if fused else 'as it is':8} {us:8.1f} µs", flush=True)
    return rows


@torch._inductor.config.patch(force_disable_caches=True)  # the report has no graphs from caches
def check(tokens: int = 16, hidden: int = 64, m: int = 896) -> None:
    """Raises SystemExit unless the MLP is fused, and gives what it gives as it is but for roundings."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mlp = MLP(hidden, m, device)
    x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    plain = compiled(mlp, False)(x).float()
    found = compiled(mlp, True)(x).float()
    print(*(reports := hadagen.fuse.report()), sep="\n")
    apart = float((found - plain).norm() / plain.norm())
    print(f"fused and as it is differ by {apart:.4f}")
    if not any("SiluMul" in each.what and "fp8-row" in each.what and each.reason is None for each in reports):
        raise SystemExit("nothing was fused; the report says why")
    if not apart < 0.03:
        raise SystemExit(f"the fused MLP differs by {apart:.4f}, more than roundings do")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a compiled MLP with and without hadagen.fuse().")
    parser.add_argument("command", nargs="?", choices=("measure", "check"), default="measure")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to a file")
    options = parser.parse_args()
    if (least := min(options.tokens)) < min(TOKENS):
        parser.error(f"argument --tokens: {least} is not possible; give {min(TOKENS)} or more")
    with torch.inference_mode():
        if options.command == "check":
            check()
            return
        if not torch.cuda.is_available():
            raise SystemExit("there is no GPU to measure; on a CPU, run: python examples/mlp.py check")
        rows = measured(options.tokens)
    if options.json:
        write(options.json, hadagen, torch, rows=rows)


if __name__ == "__main__":
    main()
