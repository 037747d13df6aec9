"""What the studies share: the text, perplexity in windows, the file of results, and the comparison with an earlier one.

A study is a list of rows: a format, a rotation, a seed, and for each window of the text "loss", the mean negative
log-likelihood of a token, and "same_top", the share of positions with the same most likely next token as without
quantization. A seed chooses the random signs of a rotation. It also changes the embedding in its last bits, as another
order of sums would, so rows without random signs have a spread too.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from llama import Config, Model, Weights, load
from tokenizers import Tokenizer

from hadagen import __version__

TEXT = Path(__file__).with_name("text.txt")  # "Alice's Adventures in Wonderland" by Lewis Carroll, in the public domain
WINDOW = 512  # tokens; each window is a sequence of its own
CALIBRATION = 8  # windows at the end of the text, which no perplexity is measured with
# Of the loss of one window, in nats: two kinds of CPU, whose products sum in other orders, differed by up to 0.02.
LEAST_SPREAD = 0.03

Row = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """What a study is made of. windows, calibration: tokens [windows, WINDOW]. keep: takes each row once found."""

    config: Config
    weights: Weights
    windows: torch.Tensor
    calibration: torch.Tensor
    formats: Sequence[str]
    seeds: Sequence[int]
    keep: Callable[[Row], None]

    def of_seed(self, seed: int) -> Weights:
        """The weights with an embedding that differs in its last bits."""
        name = "model.embed_tokens.weight"
        noise = torch.randn(self.weights[name].shape, generator=torch.Generator().manual_seed(seed))
        return self.weights | {name: self.weights[name] * (1 + 2.0**-20 * noise.to(self.windows.device))}


def read_windows(folder: Path, device: str = "cpu") -> torch.Tensor:
    """The whole text in the tokens of a model, int64 [windows, WINDOW]."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise SystemExit(f"{path} is not there; copy it from the checkpoint")
    numbers = Tokenizer.from_file(str(path)).encode(TEXT.read_text(encoding="utf-8")).ids
    return torch.tensor(numbers[: len(numbers) // WINDOW * WINDOW], device=device).view(-1, WINDOW)


def first(windows: torch.Tensor, count: int, kept: int = 0) -> torch.Tensor:
    """So many of the first windows, without the last `kept`."""
    if not 0 < count <= len(windows) - kept:
        raise SystemExit(f"--windows is {count}; the text has 1 to {len(windows) - kept} for this model")
    return windows[:count]


def device(name: str) -> str:
    """The value of --device."""
    if name != "cpu" and not (name.startswith("cuda") and torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f"PyTorch finds no device {name} here; leave --device out")
    return name


def loss(logits: torch.Tensor, window: torch.Tensor) -> float:
    """Mean negative log-likelihood of each token but the first, in nats."""
    return round(float(torch.nn.functional.cross_entropy(logits[:-1].float(), window[1:])), 6)


def tops(model: Model, windows: torch.Tensor) -> list[torch.Tensor]:
    """The most likely next tokens of each window."""
    return [model.logits(window).argmax(-1) for window in windows]


def figures(model: Model, windows: torch.Tensor, expected: Iterable[torch.Tensor]) -> dict[str, list[float]]:
    """The figures of a row. expected: the most likely next tokens without quantization."""
    found: dict[str, list[float]] = {"loss": [], "same_top": []}
    for window, top in zip(windows, expected, strict=True):
        logits = model.logits(window)
        found["loss"].append(loss(logits, window))
        found["same_top"].append(round(float((logits.argmax(-1) == top).float().mean()), 4))
    return found


def versions(device: str = "cpu") -> dict[str, str]:
    """What computes."""
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {platform.machine()}"
    return {"hadagen": __version__, "torch": torch.__version__, "python": platform.python_version(), "device": where}


# ---- the program -----------------------------------------------------------------------------------------------------
def run(description: str, formats: Sequence[str], study: Callable[[Given], dict[str, Any]]) -> None:
    """The program of a study. study: calls `keep` with each row, and returns what else the file of results has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint", type=Path, help="folder with config.json, *.safetensors and tokenizer.json")
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="(default: 0 1)")
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats, help="(default: all)")
    parser.add_argument("--device", type=device, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--compare", type=Path, help="fail where a row differs from this file by more than its spread")
    options = parser.parse_args()
    if options.compare and not options.compare.exists():
        raise SystemExit(f"{options.compare} is not there; name a file that --json wrote")
    config, weights = load(options.checkpoint, torch.float32)
    text = read_windows(options.checkpoint, options.device)
    windows = first(text, options.windows, CALIBRATION)
    rows: list[Row] = []

    def write(more: dict[str, Any]) -> None:
        found = {"window": WINDOW, "windows": options.windows, "versions": versions(options.device)}
        options.json.write_text(json.dumps(found | {"rows": rows} | more) + "\n", encoding="utf-8")

    def keep(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)
        if options.json:
            write({})

    with torch.inference_mode():
        weights = {name: weight.to(options.device) for name, weight in weights.items()}
        more = study(Given(config, weights, windows, text[-CALIBRATION:], options.formats, options.seeds, keep))
    if options.json:
        write(more)
    if options.compare:
        compare(rows, json.loads(options.compare.read_text(encoding="utf-8"))["rows"], options.windows)


def line(row: Row) -> str:
    said = [
        f"{row['format']:10}  {row['rotation']:6}  seed {row['seed']}",
        f"perplexity {math.exp(mean(row['loss'])):8.2f}",
    ]
    said.append(f"the same first choice {mean(row['same_top']):.1%}")
    return "  ".join(said + ([f"error of attention {row['error']:.3f}"] if "error" in row else []))


def losses(rows: Iterable[Row], windows: int | None = None) -> dict[tuple[str, str], list[float]]:
    """(format, rotation) → the mean loss of each seed, over the first windows."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["format"], row["rotation"]), []).append(mean(row["loss"][:windows]))
    return found


def compare(rows: Iterable[Row], earlier: Iterable[Row], windows: int) -> None:
    """Ends the program where a mean loss is further from that of earlier rows than twice the spread of their seeds."""
    known, beyond = losses(earlier, windows), []
    for name, found in losses(rows, windows).items():
        if name not in known:
            raise SystemExit(
                f"the file to compare with has no row of {name[0]}, {name[1]}; leave it out with --formats"
            )
        allowed = max(2 * (max(known[name]) - min(known[name])), LEAST_SPREAD / math.sqrt(windows))
        difference = mean(found) - mean(known[name])
        print(f"{name[0]:10}  {name[1]:6}  {difference:+.4f} nats from the file, of {allowed:.4f} allowed")
        beyond += [", ".join(name)] if not abs(difference) <= allowed else []
    if beyond:
        raise SystemExit(f"{'; '.join(beyond)}: not within the spread of the file")
