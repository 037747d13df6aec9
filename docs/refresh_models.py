"""Tables of the effect of quantization on a model, with and without rotation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import refresh_files as files
from refresh_markdown import grid, number


def read(path: Path) -> dict[str, Any]:
    """The results of a program of `examples`."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _pairs(path: Path) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any], dict[str, Any]]]]:
    """The row without quantization; and for each format its name, its row without rotation, and that with."""
    rows = {(row["format"], row["rotated"]): row for row in read(path)["rows"]}
    names = dict.fromkeys(name for name, _ in rows if name != "none")
    return rows["none", False], [(name, rows[name, False], rows[name, True]) for name in names]


def _perplexity(row: dict[str, Any]) -> str:
    return f"{row['perplexity']:.{1 if row['perplexity'] < 1000 else 0}f}"


def attention_table() -> str:
    """Attention with quantized heads, in Markdown."""
    if not files.ATTENTION.exists():
        return files.NO_DATA
    none, pairs = _pairs(files.ATTENTION)
    rows = [["none", _perplexity(none), "", "", ""]]
    for name, plain, rotated in pairs:
        errors = [number(row["error"]) for row in (plain, rotated)]
        rows.append([name, _perplexity(plain), _perplexity(rotated), *errors])
    titles = ["q and k in", "perplexity", "rotated", "error of attention", "rotated"]
    return grid("lrrrr", titles, rows)


def models_table() -> str:
    """A model with quantized weights and activations, in Markdown."""
    if not files.QUAROT.exists():
        return files.NO_DATA
    none, pairs = _pairs(files.QUAROT)
    rows = [["none", _perplexity(none), "", "100%", ""]]
    for name, plain, rotated in pairs:
        tops = [f"{row['same_top']:.0%}" for row in (plain, rotated)]
        rows.append([name, _perplexity(plain), _perplexity(rotated), *tops])
    titles = ["weights and activations", "perplexity", "rotated", "same first choice", "rotated"]
    return grid("lrrrr", titles, rows)
