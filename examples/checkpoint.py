"""A Llama checkpoint of safetensors becomes a rotated model with INT8 or MXFP4 codes, in plain PyTorch.

    python examples/checkpoint.py convert smollm2 smollm2-int8 --to int8-row
    python examples/checkpoint.py perplexity smollm2 smollm2-int8

docs/checkpoint.md explains the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import llama
import study
import torch
from llama import Config, Model, Online, Weights

from hadagen import Quantized, Rotation, rotate_quantize
from hadagen.errors import HadagenError

ROTATIONS = {"int8-row": "rows", "mxfp4": "blocks"}  # what is best for a format
BLOCK = 32  # elements, as many as share a scale in MXFP4
FILE = "model.pt"


def quantized(
    config: Config, weights: Weights, to: str, rotation: str, seed: int = 0
) -> tuple[Config, Weights, Online]:
    """The model with codes in all layers but the first and the last. rotation: "rows", "blocks" or "none"."""
    online: Online = {}
    if rotation == "rows":
        config, weights, online = llama.rotated(config, weights, seed)
    elif rotation == "blocks":
        config, weights, online = llama.in_blocks(config, weights, BLOCK)
    codes = {name: rotate_quantize(weight, to=to) for name, weight in weights.items() if "_proj." in name}
    return config, weights | codes, online


def linear(online: Online, name: str, x: torch.Tensor, weight: Quantized) -> torch.Tensor:
    """x · weightᵀ by codes. One kernel rotates x, where `online` has a rotation of the layer, and quantizes it."""
    rotation = online.get(name.rpartition(".")[2])
    return product(rotate_quantize(x, rotation, to=weight.format.name), weight).to(x.dtype)


def product(x: Quantized, weight: Quantized) -> torch.Tensor:
    """x · weightᵀ, float32. PyTorch has no public product of MXFP4 codes, so they are dequantized."""
    if weight.format.name != "int8-row":
        return x.dequantize() @ weight.dequantize().T
    rows = len(x.codes)
    codes = torch.nn.functional.pad(x.codes, (0, 0, 0, max(0, 17 - rows)))  # cuBLAS takes more than 16 rows
    return torch._int_mm(codes, weight.codes.T)[:rows] * x.scales * weight.scales.T


# ---- files -----------------------------------------------------------------------------------------------------------
def save(folder: Path, source: Path, weights: Weights, online: Online, tied: bool) -> None:
    """Write the model, with the configuration and the tokenizer of the checkpoint `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if (source / "tokenizer.json").exists():
        shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    rotations = {name: rotation.to_dict() for name, rotation in online.items()}
    torch.save({"weights": weights, "online": rotations}, folder / FILE)


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """The model that `save` wrote, or a checkpoint of safetensors. dtype: of all that is no code."""
    if not (folder / FILE).exists():
        config, weights = llama.load(folder, dtype)
        return Model(config, {name: weight.to(device) for name, weight in weights.items()})
    found = torch.load(folder / FILE, map_location=device, weights_only=True)
    weights = {
        name: weight.to(device) if isinstance(weight, Quantized) else weight.to(device, dtype)
        for name, weight in found["weights"].items()
    }
    online = {name: Rotation.from_dict(known).to(device) for name, known in found["online"].items()}
    return Model(Config.read(folder), weights, linear=partial(linear, online))


# ---- the program -----------------------------------------------------------------------------------------------------
def convert(options: argparse.Namespace) -> None:
    if options.folder.exists():
        raise SystemExit(f"{options.folder} is there already; name a new folder")
    config, weights = llama.load(options.checkpoint)
    kept = weights["model.embed_tokens.weight"].dtype
    weights = {name: weight.float() for name, weight in weights.items()}
    rotation = options.rotation or ROTATIONS[options.to]
    config, made, online = quantized(config, weights, options.to, rotation, options.seed)
    stored = {name: weight if isinstance(weight, Quantized) else weight.to(kept) for name, weight in made.items()}
    save(options.folder, options.checkpoint, stored, online, config.tied)


def perplexity(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for folder in options.folders:
        model = load(folder, options.device, getattr(torch, options.dtype))
        text = study.first(study.read_windows(folder, options.device), options.windows)
        losses = [study.loss(model.logits(window), window) for window in text]
        size = sum(path.stat().st_size for pattern in (FILE, "*.safetensors") for path in folder.glob(pattern))
        rows.append({"model": folder.name, "bytes": size, "loss": losses})
        print(f"{folder.name:20}  perplexity {math.exp(mean(losses)):8.2f}  {size / 1e6:8.0f} MB", flush=True)
    if options.json:
        found = {"window": study.WINDOW, "windows": options.windows, "versions": study.versions(options.device)}
        options.json.write_text(json.dumps(found | {"rows": rows}) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("convert", help="quantize a checkpoint of safetensors")
    command.add_argument("checkpoint", type=Path, help="folder with config.json and *.safetensors")
    command.add_argument("folder", type=Path, help="folder to write")
    command.add_argument("--to", choices=ROTATIONS, required=True, help="format of weights and activations")
    command.add_argument(
        "--rotation", choices=("rows", "blocks", "none"), help="(default: rows for int8-row, else blocks)"
    )
    command.add_argument("--seed", type=int, default=0, help="of random signs (default: %(default)s)")
    command.set_defaults(run=convert)
    command = commands.add_parser("perplexity", help="of checkpoints and of what convert wrote, on a text")
    command.add_argument("folders", type=Path, nargs="+", metavar="folder", help="with tokenizer.json")
    command.add_argument("--windows", type=int, default=8, help=f"of {study.WINDOW} tokens (default: %(default)s)")
    command.add_argument("--device", type=study.device, default="cpu", help="(default: %(default)s)")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    command.add_argument("--json", type=Path, help="write the results to this file")
    command.set_defaults(run=perplexity)
    options = parser.parse_args(arguments)
    try:
        with torch.inference_mode():
            options.run(options)
    except HadagenError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
