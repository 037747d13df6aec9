"""The program of the studies: text, perplexity in windows, the file of results, and the comparison with an earlier file.

A study is a list of rows. A row has a name, the rotation, the seed, and two figures of each window of the text: "loss",
the mean of the negative log-likelihood of a token, and "same_top", the share of positions with the same most likely
next token as without quantization.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from llama import Config, Model, Weights, load
from tokenizers import Tokenizer

from hadagen import __version__

TEXT = Path(__file__).with_name("text.txt")  # "Alice's Adventures in Wonderland", by Lewis Carroll, in the public domain
WINDOW = 512  # tokens; each window is a sequence of its own
WINDOWS = 16

Row = dict[str, Any]
# (config, weights, windows of the text, windows for calibration, formats, seeds) → rows, and what else is stored.
Study = Callable[[Config, Weights, torch.Tensor, torch.Tensor, Sequence[str], range], Iterator[Row]]


def read_windows(folder: Path, count: int) -> torch.Tensor:
    """The first windows of the text in the tokens of a model, [count, WINDOW]."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise SystemExit(f"{path} is not there; copy it from the checkpoint")
    numbers = Tokenizer.from_file(str(path)).encode(TEXT.read_text(encoding="utf-8")).ids
    if count * WINDOW > len(numbers):
        raise SystemExit(f"the text has {len(numbers) // WINDOW} windows of {WINDOW} tokens; --windows asks for {count}")
    return torch.tensor(numbers[: count * WINDOW]).view(count, WINDOW)


def loss_of(logits: torch.Tensor, window: torch.Tensor) -> float:
    """Mean negative log-likelihood of each token but the first, in nats."""
    return float(torch.nn.functional.cross_entropy(logits[:-1].float(), window[1:]))


def figures(model: Model, windows: torch.Tensor, tops: list[torch.Tensor]) -> dict[str, list[float]]:
    """Of each window. tops: the most likely next tokens without quantization; filled if it is empty."""
    found: dict[str, list[float]] = {"loss": [], "same_top": []}
    known = bool(tops)
    for at, window in enumerate(windows):
        logits = model.logits(window)
        if not known:
            tops.append(logits.argmax(-1))
        found["loss"].append(round(loss_of(logits, window), 6))
        found["same_top"].append(round(float((logits.argmax(-1) == tops[at]).float().mean()), 4))
    return found


def versions() -> dict[str, str]:
    """What computes."""
    return {"hadagen": __version__, "torch": torch.__version__, "python": platform.python_version()} | {
        "machine": f"{platform.machine()}, CPU"
    }


def name_of(row: Row) -> tuple[str, str]:
    return row["format"], row["rotation"]
