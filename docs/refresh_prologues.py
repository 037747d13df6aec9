"""Tables of kernels with a prologue on an H100: their speed, the layers that call them, and what keeps kernels busy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import geometric_mean
from typing import Any

import refresh_files as files
from refresh_formats import DESTINATION, REGIMES
from refresh_markdown import grid, number, wrapped
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
SHOWN = "Llama-3-8B"  # in the picture
ONE_KERNEL = {"FP8": ("fp8, rotated", "fp8, fused"), "MXFP4 codes": ("mxfp4, rotated", "mxfp4, fused")}
# Beside one kernel for SiLU·mul, rotation and codes: a way of `examples/layer.py` → its title.
WAYS = {"compiled": "torch.compile", "two kernels": "two kernels"}
FEW = 1024  # tokens; x of more is several times as large as L2
SIZES = f"up to {FEW} tokens", f"more than {FEW} tokens"
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
    """Microseconds of the second half of an MLP, what one kernel saves, and one kernel beside torch.compile."""
    if (data := files.read_json(files.LAYER)) is None:
        return files.NO_DATA
    us = {(row["model"], row["layer"], row["tokens"]): row["us"] for row in data["rows"]}
    table = [
        [model, title, *(f"{us[key]:.1f}" if key in us else "–" for key in keys)]
        for model in dict.fromkeys(model for model, *_ in us)
        for layer, title in LAYERS.items()
        if us.keys() & (keys := [(model, layer, tokens) for tokens in TOKENS])
    ]
    versions = data["versions"]
    parts = [
        f"On an {versions['device']}, PyTorch {versions['torch']}; microseconds by tokens:",
        grid("ll" + "r" * len(TOKENS), ["model", "layer", *TOKENS], table),
        "How many times as fast one kernel is, the geometric mean and the range over models and tokens:",
        _saved(us),
        f"![Microseconds of a layer of {SHOWN} by tokens](assets/{files.LAYER_PICTURE.name})",
        *_chains(data.get("chains", [])),
    ]
    return "\n\n".join(filter(None, parts))


def layer_times(data: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Title of a layer with a product → tokens → microseconds, of the model in the picture.

    data: the content of `layer_h100.json`."""
    rows = [row for row in data["rows"] if row["model"] == SHOWN]
    products = {layer: title for layer, title in LAYERS.items() if any("product" in row["pieces"] for row in rows)}
    times = {
        title: {row["tokens"]: row["us"] for row in rows if row["layer"] == layer and "product" in row["pieces"]}
        for layer, title in products.items()
    }
    return {title: dict(sorted(of.items())) for title, of in times.items() if of}


def _saved(us: Mapping[tuple[str, str, int], float]) -> str:
    """How many times as fast one kernel makes a layer, over models and tokens."""
    table = []
    for title, (two, one) in ONE_KERNEL.items():
        pairs = {tokens: [] for *_, tokens in us}
        for (model, layer, tokens), time in us.items():
            if layer == one and (model, two, tokens) in us:
                pairs[tokens].append((us[model, two, tokens], time))
        table.append([title, *_few_and_many(pairs)])
    return grid("lrr", ["rotated and fused, beside rotated", *SIZES], table)


def _chains(rows: list[dict[str, Any]]) -> Iterable[str]:
    """One kernel beside other ways to compute SiLU·mul, a rotation and codes, in microseconds and in ratios."""
    if not rows:
        return
    us = {(row["to"], row["block"], row["way"], row["tokens"]): row["us"] for row in rows}
    counts = sorted({row["tokens"] for row in rows})
    whats = list(dict.fromkeys((to, block) for to, block, *_ in us))
    ways = {**WAYS, "fused": "one kernel"}
    yield wrapped(
        f"SiLU·mul, a rotation and codes for {rows[0]['model']}, without the product with the weight. torch.compile "
        "makes one graph of all three, in which products with Hadamard matrices rotate (`examples/chains.py`). Two "
        "kernels are SiLU·mul of torch.compile, then `rotate_quantize`. Microseconds by tokens:"
    )
    table = [
        [to, block, title, *(f"{us[key]:.1f}" if key in us else "–" for key in keys)]
        for to, block in whats
        for way, title in ways.items()
        if us.keys() & (keys := [(to, block, way, tokens) for tokens in counts])
    ]
    yield grid("lrl" + "r" * len(counts), ["to", "block n", "computed by", *counts], table)
    yield "How many times as fast one kernel is, the geometric mean and the range over tokens:"
    ratios = []
    for to, block in whats:
        row: list[object] = [to, block]
        for way in WAYS:
            both = {tokens: [(to, block, each, tokens) for each in (way, "fused")] for tokens in counts}
            row += _few_and_many({tokens: [(us[a], us[b])] for tokens, (a, b) in both.items() if {a, b} <= us.keys()})
        ratios.append(row)
    titles = [f"as {title}, {size}" for title in WAYS.values() for size in SIZES]
    yield grid("lr" + "r" * len(titles), ["to", "block n", *titles], ratios)


def _few_and_many(pairs: Mapping[int, list[tuple[float, float]]]) -> list[str]:
    """Of few tokens and of many: how many times as long the first of two times is, the geometric mean and the range.

    pairs: tokens → pairs of times."""
    found = []
    for few in (True, False):
        ratios = [a / b for tokens, each in pairs.items() if (tokens <= FEW) == few for a, b in each]
        mean = f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "–"
        found.append(mean)
    return found


def mlp_table() -> str:
    """Microseconds of a compiled MLP by tokens, with and without `hadagen.fuse()`."""
    if (data := files.read_json(files.MLP)) is None:
        return files.NO_DATA
    us = {(row["tokens"], row["fused"]): row["us"] for row in data["rows"]}
    counts = list(dict.fromkeys(tokens for tokens, _ in us))
    table = [
        ["without, µs", *(f"{us[tokens, False]:.1f}" for tokens in counts)],
        ["with fuse(), µs", *(f"{us[tokens, True]:.1f}" for tokens in counts)],
        ["without / with", *(number(us[tokens, False] / us[tokens, True]) for tokens in counts)],
    ]
    versions = data["versions"]
    of = f"On an {versions['device']}, PyTorch {versions['torch']}, by tokens:"
    return f"{of}\n\n{grid('l' + 'r' * len(counts), ['', *counts], table)}"


def decoder_table() -> str:
    """Milliseconds of a pass through layers of a model, how many times as fast as bfloat16, and what rotations cost."""
    if (data := files.read_json(files.DECODER)) is None:
        return files.NO_DATA
    versions = data["versions"]
    with_these = f"On an {versions['device']}, PyTorch {versions['torch']}, transformers {versions['transformers']}"
    of_modules, compiled = (_passes([row for row in data["rows"] if row["compiled"] is each]) for each in (False, True))
    return f"{with_these}:\n\n{of_modules}\n\nThe same with `torch.compile`, bfloat16 too:\n\n{compiled}"


def _passes(rows: list[dict[str, Any]]) -> str:
    ms = {(row["model"], row["pass"]): row["ms"] for row in rows}
    models, passes = (list(dict.fromkeys(key[i] for key in ms)) for i in (0, 1))
    table = []
    for model in models:
        plain = model.partition(",")[0]
        cells = [f"{ms[model, each]:.2f}" for each in passes]
        cells += [f"{ms[models[0], each] / ms[model, each]:.2f}" for each in passes]
        is_rotated = model != plain and plain in models
        cost = f"{max(ms[model, each] / ms[plain, each] - 1 for each in passes):.1%}" if is_rotated else "–"
        table.append([model, *cells, cost])
    heads = ["", *(f"{each}, ms" for each in passes), *(f"{each}, ×" for each in passes), "rotation costs at most"]
    return grid("l" + "r" * (2 * len(passes) + 1), heads, table)


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
