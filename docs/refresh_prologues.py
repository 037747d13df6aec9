"""Tables of kernels with a prologue on an H100: their speed, the layers that call them, and what keeps kernels busy."""

from __future__ import annotations

import refresh_files as files
from refresh_formats import DESTINATION, REGIMES
from refresh_markdown import grid, number
from refresh_times import read_rows, shipped_rows

from hadagen.problem.problem import Numerics, Problem
from hadagen.problem.regimes import timed_elements

TOKENS = (1, 16, 64, 256, 1024, 4096)
# Layer of `examples/layer.py` → its title.
LAYERS = {
    "bfloat16": "bfloat16",
    "fp8": "FP8",
    "fp8, rotated": "FP8, rotated",
    "fp8, fused": "FP8, rotated and fused",
    "mxfp4, rotated": "MXFP4 codes, rotated",
    "mxfp4, fused": "MXFP4 codes, rotated and fused",
}
RESOURCES = {
    "issue_slots": "issue slots",
    "tensor": "tensor cores",
    "special": "special functions",
    "shared": "shared memory",
    "l2": "L2",
    "dram": "memory",
    "warps": "warps",
}


def prologues_table() -> str:
    """The speed of the winners with a prologue, as a fraction of a kernel that reads and writes as many bytes."""
    if not files.OURS.exists():
        return files.NO_DATA
    rows = [
        row for quantized in (False, True) for row in shipped_rows(files.OUR_GPU, quantized=quantized, prologues=True)
    ]
    fractions = {
        (Problem.parse(row["problem"]), int(row["elements"]), row["cache"]): float(row["copy_us"]) / float(row["us"])
        for row in rows
        if row["destination"] == DESTINATION
    }
    table = []
    for problem in sorted({problem for problem, *_ in fractions}, key=lambda problem: (problem.n, problem.key)):
        form = problem.io.form
        to = problem.io.input.value if form is None else form.name + (f", {form.group}" if form.group > 0 else "")
        size = problem.transform.size if problem.n > 1 else "no rotation"
        found = [fractions.get((problem, timed_elements(problem, nominal), cache)) for _, nominal, cache in REGIMES]
        fast = ", fast" * (problem.io.numerics is Numerics.FAST)
        table.append([size, to + fast, *map(number, found)])
    titles = [title for title, _, _ in REGIMES]
    return grid("ll" + "r" * len(titles), ["block n", "to", *titles], table)


def layer_table() -> str:
    """Microseconds of the second half of an MLP."""
    if (data := files.read_json(files.LAYER)) is None:
        return files.NO_DATA
    us = {(row["model"], row["layer"], row["tokens"]): row["us"] for row in data["rows"]}
    table = [
        [model, title, *(f"{us[model, layer, tokens]:.1f}" for tokens in TOKENS)]
        for model in dict.fromkeys(model for model, *_ in us)
        for layer, title in LAYERS.items()
    ]
    versions = data["versions"]
    with_these = f"On an {versions['device']}, PyTorch {versions['torch']}; microseconds by tokens:"
    return f"{with_these}\n\n{grid('ll' + 'r' * len(TOKENS), ['model', 'layer', *TOKENS], table)}"


def decoder_table() -> str:
    """Milliseconds of a pass through layers of a model, and those with rotations over those without."""
    if (data := files.read_json(files.DECODER)) is None:
        return files.NO_DATA
    ms = {(row["model"], row["pass"]): row["ms"] for row in data["rows"]}
    models, passes = (list(dict.fromkeys(key[i] for key in ms)) for i in (0, 1))
    table = [
        [each, *(f"{ms[model, each]:.2f}" for model in models), number(ms["fp8, rotated", each] / ms["fp8", each])]
        for each in passes
    ]
    versions = data["versions"]
    with_these = f"On an {versions['device']}, PyTorch {versions['torch']}, transformers {versions['transformers']}:"
    heads = ["pass", *(f"{model}, ms" for model in models), "rotated / not"]
    return f"{with_these}\n\n{grid('l' + 'r' * (len(models) + 1), heads, table)}"


def resources_table() -> str:
    """How busy each resource is, in percent of its peak."""
    if not files.RESOURCES.exists():
        return files.NO_DATA
    table = []
    for row in read_rows(files.RESOURCES):
        problem = Problem.parse(row["problem"])
        form = problem.io.form.name if problem.io.form else problem.io.input.value
        before = "SiLU·mul, " if problem.prologue else ""
        busy = (f"{float(row[name]):.0f}" for name in RESOURCES)
        table.append([problem.transform.size, before + form, row["cache"], f"{float(row['us']):.1f}", *busy])
    titles = ["n = K · 2^m", "kernel", "x", "µs", *RESOURCES.values()]
    return grid("lll" + "r" * (1 + len(RESOURCES)), titles, table)
