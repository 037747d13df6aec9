"""Tables of the effect of quantization on a model, with and without rotation: what the programs of `examples` found."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import refresh_files as files
from refresh_markdown import grid, number, wrapped

Row = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    """The results of a program of `examples`."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _rows(path: Path) -> dict[str, dict[str, list[Row]]]:
    """Format → rotation → the rows of all seeds."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in read(path)["rows"]:
        found.setdefault(row["format"], {}).setdefault(row["rotation"], []).append(row)
    return found


def _perplexity(rows: Sequence[Row] | None) -> str:
    """The mean of the seeds, and half of their range; – where there is no row."""
    if not rows:
        return "–"
    found = [math.exp(mean(row["loss"])) for row in rows]
    digits = 1 if mean(found) < 1000 else 0
    return f"{mean(found):.{digits}f} ± {(max(found) - min(found)) / 2:.{digits}f}"


def _of_seeds(rows: Sequence[Row] | None) -> str:
    """`_perplexity`, without a range of one seed."""
    return _perplexity(rows) if rows is None or len(rows) > 1 else _perplexity(rows).partition(" ±")[0]


def _mean(rows: Sequence[Row] | None, figure: str) -> float | None:
    return mean(mean(row[figure]) if isinstance(row[figure], list) else row[figure] for row in rows) if rows else None


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _change(of: Sequence[Row], base: Sequence[Row]) -> str:
    """How much higher a perplexity is, in percent, and the standard error of that over the windows of the text."""
    windows = [
        mean(row["loss"][at] for row in of) - mean(row["loss"][at] for row in base)
        for at in range(len(base[0]["loss"]))
    ]
    error = stdev(windows) / math.sqrt(len(windows)) if len(windows) > 1 else 0.0
    factor = math.exp(mean(windows))
    return f"{100 * (factor - 1):+.1f} ± {100 * factor * error:.1f}%".replace("-", "−")


def _made_with(path: Path) -> str:
    found = read(path)
    made = "hadagen {hadagen}, PyTorch {torch}, Python {python}, {device}".format(**found["versions"])
    seeds = len({row["seed"] for row in found["rows"] if "seed" in row})
    return wrapped(
        f"{found['windows']} windows of {found['window']} tokens{f', {seeds} seeds' if seeds else ''}; {made}."
    )


def attention_table() -> str:
    """Attention with quantized queries and keys, in Markdown."""
    return _heads_table(files.ATTENTION, "q and k in")


def cache_table() -> str:
    """Attention with quantized keys and values, in Markdown."""
    return _heads_table(files.CACHE, "k and v in")


def _heads_table(path: Path, what: str) -> str:
    if not path.exists():
        return files.NO_DATA
    rows = []
    for name, ways in _rows(path).items():
        plain, turned = ways.get("none"), ways.get("heads")
        errors = ["", ""] if name == "none" else [number(_mean(each, "error")) for each in (plain, turned)]
        rows.append([name, _perplexity(plain), _perplexity(turned), *errors])
    titles = [what, "perplexity", "rotated", "error of attention", "rotated"]
    return "\n\n".join((grid("lrrrr", titles, rows), _made_with(path)))


def models_table() -> str:
    """A model with quantized weights and activations, in Markdown."""
    if not files.QUAROT.exists():
        return files.NO_DATA
    found = _rows(files.QUAROT)
    ways = "none", "rows", "blocks"
    rows = [
        [
            name,
            *(_perplexity(of_format.get(way)) for way in ways),
            *(_percent(_mean(of_format.get(way), "same_top")) for way in ways),
        ]
        for name, of_format in found.items()
    ]
    titles = ["weights and activations", "perplexity", "rows rotated", "blocks rotated"]
    table = grid("lrrrrrr", [*titles, "same first choice", "rows rotated", "blocks rotated"], rows)
    changes = []
    for name, of_format in found.items():
        if len(of_format) == len(ways):
            of_rows, of_blocks = (_change(of_format[way], of_format["none"]) for way in ways[1:])
            said = f"the perplexity changes by {of_rows} if whole rows are rotated, and by {of_blocks} if blocks are."
            changes.append(f"- {name}: {said}")
    return "\n\n".join((table, "\n".join(wrapped(line, "  ") for line in changes), _made_with(files.QUAROT)))


def checkpoint_table() -> str:
    """A checkpoint, and what it was converted to, in Markdown."""
    if not files.CHECKPOINT.exists():
        return files.NO_DATA
    found = read(files.CHECKPOINT)["rows"]
    rows = [
        [
            f"`{row['model']}`",
            f"{math.exp(mean(row['loss'])):.2f}",
            "" if row is found[0] else _change([row], found[:1]),
            f"{row['bytes'] / 1e6:.0f}",
        ]
        for row in found
    ]
    return "\n\n".join((grid("lrrr", ["folder", "perplexity", "change", "MB"], rows), _made_with(files.CHECKPOINT)))


def weights_table() -> str:
    """A model with codes of weights, rounded to the nearest and by a text, in Markdown."""
    if not files.WEIGHTS.exists():
        return files.NO_DATA
    base, *found = read(files.WEIGHTS)["rows"]
    cells: dict[tuple[str, str], dict[bool, list[Row]]] = {}
    for row in found:
        of_cell = cells.setdefault((row["rotation"] or "none", row["weights"]), {})
        of_cell.setdefault(row["is_calibrated"], []).append(row)
    rows = [["", "none", _of_seeds([base]), "", "", "", f"{base['bytes'] / 1e6:.0f}"]]
    for (rotation, weights), ways in cells.items():
        shown = [rotation, weights]
        for is_calibrated in (False, True):
            of_way = ways.get(is_calibrated)
            shown += [_of_seeds(of_way), _change_of_all(of_way, base) if of_way else ""]
        rows.append([*shown, f"{ways[False][0]['bytes'] / 1e6:.0f}"])
    titles = ["rotation", "weights", "nearest", "change", "`--calibrate`", "change", "MB"]
    return "\n\n".join((grid("llrrrrr", titles, rows), _made_with(files.WEIGHTS)))


def _change_of_all(of: Sequence[Row], base: Row) -> str:
    """`_change` of the mean of all seeds."""
    losses = [mean(of_seeds) for of_seeds in zip(*(row["loss"] for row in of), strict=True)]
    return _change([{"loss": losses}], [base])


def types_numbers() -> str:
    """Of how many types of models a rotation can be folded, and how exactly, in Markdown."""
    if not files.TYPES.exists():
        return files.NO_DATA
    rows = list(csv.DictReader(files.TYPES.read_text(encoding="utf-8").splitlines()))
    made = [row for row in rows if row["layers"]]
    whole = [row for row in made if " " not in row["quarot"]]
    names = ", ".join(row["model_type"] for row in whole)
    worst = {name: max(float(row[name]) for row in of) for name, of in (("blocks", made), ("quarot", whole))}
    said = (
        f"Of the {len(rows)} types of causal language models of transformers 5.24, {len(made)} make a tiny model "
        f"within seconds. `blocks` suits all {len(made)}: folded without codes, in float32, logits change by at most "
        f"{worst['blocks']:.0e} of their norm."
    )
    known = f"`quarot` suits {len(whole)}, with changes of at most {worst['quarot']:.0e}: {names}."
    return "\n\n".join((wrapped(said), wrapped(f"{known} The others are refused in a sentence."), _EACH))


_EACH = "[models.csv](data/models.csv) has each type. `python tests/every_model.py` writes it."
