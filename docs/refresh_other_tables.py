"""Tables of the losses between sizes, of the CPU time of calls, of the knobs, and of what each idea is worth."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import refresh_files as files
from refresh_markdown import grid, number, wrapped
from refresh_times import read_rows

from hadagen.plan.knobs import KNOBS
from hadagen.problem.problem import Problem, Rows

# Row lengths that share a line in the table of batch-invariant calls.
INVARIANT_ROWS = ((2, 128), (256, 1024), (2048, 4096), (8192, 32768), (65536, 131072))
MOST_LOST = 0.03  # by leaving out a value of a knob
# For each idea: its knob, the value without the idea, the value with it.
CHOICES = (
    ("cluster", 1, 8),
    ("far_bits", "registers", "lanes"),
    ("far_lanes", "shuffle", "mma"),
    ("block_bits", "exchange", "load"),
    ("low_bits", "shuffle", "mma"),
    ("mma_carrier", "split", "tf32"),
    ("exchange_carrier", "fp32", "packed"),
    ("accumulator", "fp32", "packed"),
    ("load", "plain", "cp_async"),
    ("grid", "tiles", "persistent"),
    ("order", "by_step", "by_chunk"),
    ("store", "plain", "streaming"),
)


def between_table() -> str:
    """The loss of calls between the element counts that were tuned, in Markdown."""
    if not files.BETWEEN.exists():
        return files.NO_DATA
    rows = read_rows(files.BETWEEN)
    head = ("n", "dtype", "numerics", "variants", "loss, geometric mean", "worst", "at rows")
    lines = []
    for (n, dtype, numerics, rows_lie), found in _by_problem(rows).items():
        worst = max(found, key=lambda row: float(row["loss"]))
        kind = numerics if rows_lie == Rows.CONTIGUOUS else f"{numerics}, {rows_lie}"
        place = f"{worst['rows']}, {worst['destination']}"
        lines.append((n, dtype, kind, worst["variants"], _loss(found), _worst(found), place))
    return grid("rllrrrl", head, lines)


def lost_between() -> str:
    """The loss of calls between these counts, in a sentence for each GPU."""
    tables = [read_rows(path) for path in (files.BETWEEN, files.BETWEEN_H200) if path.exists()]
    return "\n".join(wrapped(f"- {_lost_between(rows)}", "  ") for rows in tables) or files.NO_DATA


Row = Mapping[str, str]


def _lost_between(rows: Sequence[Row]) -> str:
    problems = len(_by_problem(rows))
    counts = len(rows) / problems
    return (
        f"On an {rows[0]['gpu']}, over {problems} problems with {counts:.0f} row counts each, a call loses "
        f"{_loss(rows)} (geometric mean) to the best variant known, and {_worst(rows)} where it loses most."
    )


def _by_problem(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    problems: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        problems[row["n"], row["dtype"], row["numerics"], row["rows_lie"]].append(row)
    return problems


def _loss(rows: Iterable[Row]) -> str:
    return f"{geometric_mean(1 + float(row['loss']) for row in rows) - 1:.1%}"


def _worst(rows: Iterable[Row]) -> str:
    return f"{max(float(row['loss']) for row in rows):.1%}"


def knobs_table() -> str:
    """The values and the meaning of each knob, in Markdown."""
    rows = (
        (f"`{name}`", " ".join(f"`{value}`" for value in knob.values), knob.meaning) for name, knob in KNOBS.items()
    )
    return grid("lll", ["knob", "values", "meaning"], rows)


def choices_table() -> str:
    """How much faster the best kernel with each idea is than the best kernel without it, in Markdown.

    A row for each recorded problem that has kernels of both kinds, a column for each recorded size.
    """
    recordings = []
    for path in sorted(files.RECORDINGS.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            head, *trials = map(json.loads, file)
        recordings.append((head, trials))
    if not recordings:
        return files.NO_DATA
    recordings.sort(key=lambda recording: Problem.parse(recording[0]["problem"]).n)
    sizes = sorted({elements for head, _ in recordings for elements, _, _ in head["cells"]})
    rows = []
    for knob, without, with_it in CHOICES:
        idea = f"`{knob}`: {without} → {with_it}"
        for head, trials in recordings:
            before, after = (_best_times(head, trials, knob, value) for value in (without, with_it))
            if before and after:
                problem = Problem.parse(head["problem"])
                ratios = (number(before[size] / after[size] if size in before else None) for size in sizes)
                rows.append([idea, f"{problem.n}, {problem.io.input.value}, {problem.io.numerics.value}", *ratios])
                idea = ""  # named in its first row only
    return grid("ll" + "r" * len(sizes), ["idea", "n", *map(_short, sizes)], rows)


def pruned_table() -> str:
    """The cost of leaving out values of knobs, for the shipped winners that had them, in Markdown."""
    if not files.PRUNED.exists():
        return files.NO_DATA
    with files.PRUNED.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for what in [name for name in rows[0] if name not in ("problem", "elements", "destination", "cache")]:
        losses = [float(row[what]) for row in rows if row[what]]
        mean, above = geometric_mean(1 + loss for loss in losses) - 1, sum(loss > MOST_LOST for loss in losses)
        lines.append((f"`{what}`", len(losses), f"{mean:.1%}", f"{max(losses):.1%}", above))
    return grid("lrrrr", ["without", "cells", "loss, geometric mean", "worst", f"cells above {MOST_LOST:.0%}"], lines)


def invariant_table() -> str:
    """How much longer batch-invariant calls take, in Markdown."""
    if not files.INVARIANT.exists():
        return files.NO_DATA
    found: dict[tuple[int, int], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    with files.INVARIANT.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            problem = Problem.parse(row["problem"])
            span = next((first, last) for first, last in INVARIANT_ROWS if first <= problem.n <= last)
            found[span][f"{problem.io.input.value}, {problem.io.numerics.value}"].append(row)
    kinds = list(dict.fromkeys(kind for of_kind in found.values() for kind in of_kind))
    lines = [(f"{first} to {last}", *map(_cost, map(found[first, last].get, kinds))) for first, last in INVARIANT_ROWS]
    return grid("l" + "r" * len(kinds), ["n", *kinds], lines)


def _cost(rows: Sequence[Row] | None) -> str:
    """The mean loss over all cells of some problems, and the worst; – where there is none."""
    if not rows:
        return "–"
    mean = geometric_mean(float(row["mean"]) for row in rows for _ in range(int(row["cells"]))) - 1
    return f"{mean:.1%} ({max(float(row['worst']) for row in rows) - 1:.0%})"


def _short(count: int) -> str:
    return f"{count / (1 << 20):g} M" if count >= 1 << 20 else f"{count / (1 << 10):g} K"


def _best_times(
    head: Mapping[str, Any], trials: Iterable[Mapping[str, Any]], knob: str, value: object
) -> dict[int, float]:
    """Element count → least µs of the recorded trials whose knob has the value; {} if no trial has it."""
    names = list(head["ranges"])
    best: dict[int, float] = {}
    if knob not in names:  # the knob is newer than the recording
        return best
    for trial in trials:
        if trial["us"] and trial["knobs"][names.index(knob)] == value:
            for (elements, _, _), (us, *_) in zip(head["cells"], trial["us"], strict=True):
                best[elements] = min(us, best.get(elements, us))
    return best


def call_table() -> str:
    """The CPU time of calls, in Markdown."""
    if not files.CALLS.exists():
        return files.NO_DATA
    data = json.loads(files.CALLS.read_text(encoding="utf-8"))
    versions = f"Python {data['python']} and PyTorch {data['torch']}"
    head = f"On an {data['gpu']}, with {versions}, for a {data['tensor']} tensor:"
    calls = grid("lr", ["call", "µs"], ((name, f"{us:.1f}") for name, us in data["us"].items()))
    once = grid("lr", ["once in a process", "ms"], ((name, f"{ms:.0f}") for name, ms in data["ms"].items()))
    return f"{head}\n\n{calls}\n\n{once}"
