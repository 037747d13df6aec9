"""Tables of kernels that quantize, on an H200: beside a copy of as many bytes, the transform alone, and two passes. And
on an H100, those that are accurate beside those that are fast."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean

import refresh_files as files
from refresh_markdown import grid, number
from refresh_times import read_rows, shipped_rows

from hadagen.problem.problem import Numerics, Problem
from hadagen.problem.regimes import timed_elements

DTYPE, DESTINATION = "bfloat16", "out-of-place"
# Title, elements, where the data lies before the call.
REGIMES = (
    ("64 K, in L2", 1 << 16, "hot"),
    ("1 M, in L2", 1 << 20, "hot"),
    ("4 M, in L2", 1 << 22, "hot"),
    ("64 M, in memory", 1 << 26, "cold"),
)


# Kernels without some of their parts.
PARTS = (
    "whole",
    "without the largest magnitude",
    "without codes",
    "without the rotation",
    "loads and stores alone",
)


def formats_table() -> str:
    """The speed as a fraction of copy, and in brackets how many times as fast it is as the transform alone."""
    if not files.OURS.exists():
        return files.NO_DATA
    rows = shipped_rows(files.H200, quantized=True)
    codes, plain = _times(rows), _times(shipped_rows(files.H200))
    table = []
    for problem in sorted({problem for problem, _, _ in codes}, key=_order):
        if problem.io.input.value != DTYPE:
            continue
        cells = []
        for _, nominal, cache in REGIMES:
            elements = timed_elements(problem, nominal)
            mine = codes.get((problem, elements, cache))
            other = plain.get((problem.parent, elements, cache)) if problem.parent else None
            ratio = number(other[0] / mine[0]) if mine and other else "–"
            cells.append(f"{number(mine and mine[1] / mine[0])} ({ratio})")
        table.append([_name(problem), *cells])
    titles = [title for title, _, _ in REGIMES]
    return grid("l" + "r" * len(titles), ["format, group size; n", *titles], table)


def rotations_on_h100_table() -> str:
    """The speed as a fraction of copy of the winners with a matrix on an H100, with and without a quantizer."""
    if not files.OURS.exists():
        return files.NO_DATA
    rows = [row for quantized in (False, True) for row in shipped_rows(files.OUR_GPU, quantized=quantized)]
    times = {place: us for place, us in _times(rows).items() if place[0].transform.has_matrix}
    table = []
    for problem in sorted({problem for problem, _, _ in times}, key=lambda problem: (problem.n, problem.key)):
        cells = []
        for _, nominal, cache in REGIMES[1:]:
            us, copy_us = times.get((problem, timed_elements(problem, nominal), cache), (None, None))
            cells.append(number(us and copy_us and copy_us / us))
        form = problem.io.form.name if problem.io.form else problem.io.input.value
        of = problem.transform
        given = ", two real matrices" if of.paired else ", a real matrix" if of.real else ""
        table.append([f"{of.size}{given}", form, problem.io.numerics.value, *cells])
    titles = [title for title, _, _ in REGIMES[1:]]
    return grid("lll" + "r" * len(titles), ["n = K · 2^m", "to", "numerics", *titles], table)


def accurate_codes_table() -> str:
    """How long accurate kernels take beside fast ones, and how many codes of both differ from those of exact values."""
    if not (files.ACCURATE_CODES.exists() and files.CODES.exists()):
        return files.NO_DATA
    times = _times(read_rows(files.ACCURATE_CODES))
    counted = {Problem.parse(row["problem"]): row for row in read_rows(files.CODES)}
    table = []
    for fast in sorted({problem for problem, _, _ in times if problem.io.numerics is Numerics.FAST}, key=_order):
        accurate = fast.with_io(numerics=Numerics.ACCURATE)
        cells = []
        for _, nominal, cache in REGIMES:
            place = timed_elements(fast, nominal), cache
            mine, other = times.get((accurate, *place)), times.get((fast, *place))
            cells.append(number(mine[0] / other[0] if mine and other else None))
        for each in (accurate, fast):
            row = counted.get(each)
            cells.append(f"{1e6 * int(row['differing']) / int(row['codes']):,.0f}" if row else "–")
        table.append([_name(accurate), *cells])
    titles = [*(title for title, _, _ in REGIMES), "accurate", "fast"]
    return grid("l" + "r" * len(titles), ["format, group size; n", *titles], table)


def quantizing_headline() -> str:
    """How many times as fast one kernel is as two passes, in a sentence."""
    ratios = [ratio for found in _passes().values() for ratio in found.values()]
    mean = f"{geometric_mean(ratios):.1f} times as fast ({len(ratios)} cells)"
    return f"{mean} as our transform and then a quantizer made by torch.compile, on an H200"


def _passes() -> dict[Problem, dict[str, float]]:
    """By problem and regime, how many times as fast one kernel is as two passes."""
    times: dict[Problem, dict[str, float]] = {}
    for row in read_rows(files.PASSES):
        title = next(name for name, elements, _ in REGIMES if elements == int(row["elements"]))
        times.setdefault(Problem.parse(row["problem"]), {})[title] = float(row["two_us"]) / float(row["one_us"])
    return times


def passes_table() -> str:
    """How many times as fast one kernel is as two passes, in Markdown."""
    if not files.PASSES.exists():
        return files.NO_DATA
    times = _passes()
    titles = [title for title, _, _ in REGIMES if any(title in found for found in times.values())]
    rows = [[_name(problem), *(number(found.get(title)) for title in titles)] for problem, found in times.items()]
    return grid("l" + "r" * len(titles), ["format, group size; n", *titles], rows)


def quantized_parts_table() -> str:
    """The speed of kernels of which parts are left out, as a fraction of copy: in L2, and in memory."""
    if not files.QUANTIZED_PARTS.exists():
        return files.NO_DATA
    found: dict[Problem, dict[tuple[str, str], float]] = {}
    for row in read_rows(files.QUANTIZED_PARTS):
        fraction = float(row["copy_us"]) / float(row["us"])
        title = next(name for name, elements, _ in REGIMES if elements == int(row["elements"]))
        found.setdefault(Problem.parse(row["problem"]), {})[row["kernel"], title] = fraction
    shown = [title for title, _, _ in REGIMES[2:]]
    rows = [
        [_name(problem), *(" / ".join(number(found[problem].get((part, title))) for title in shown) for part in PARTS)]
        for problem in sorted(found, key=_order)
    ]
    return grid("l" + "r" * len(PARTS), ["format, group size; n", *PARTS], rows)


def torchao_numbers() -> str:
    """How many times as fast `presets.fa3_fp8` is as torchao's kernels: the least and the most, by size."""
    if not files.TORCHAO.exists():
        return files.NO_DATA
    found: dict[str, list[float]] = {}
    for row in read_rows(files.TORCHAO):
        size = "up to 1 M elements" if int(row["elements"]) <= 1 << 20 else "of more"
        found.setdefault(size, []).append(float(row["torchao_us"]) / float(row["ours_us"]))
    sizes = ", ".join(f"{min(of):.1f} to {max(of):.1f} times as fast for tensors {size}" for size, of in found.items())
    return f"It is {sizes}."


def _order(problem: Problem) -> tuple[str, int, int, str]:
    form = problem.io.form
    assert form is not None
    return form.name, form.group, problem.n, problem.key


def _name(problem: Problem) -> str:
    form = problem.io.form
    assert form is not None
    size = f", {form.group}" if form.group > 0 else ""
    factors = f" = {problem.order} · {problem.length}" if problem.order > 1 else ""
    numerics = ", fast" if problem.io.numerics is Numerics.FAST else ""
    return f"{form.name}{size}; n = {problem.n}{factors}{numerics}"


Times = dict[tuple[Problem | None, int, str], tuple[float, float]]


def _times(rows: Iterable[dict[str, str]]) -> Times:
    """(Problem, elements, cache) → microseconds of the kernel, and of the copy."""
    return {
        (Problem.parse(row["problem"]), int(row["elements"]), row["cache"]): (float(row["us"]), float(row["copy_us"]))
        for row in rows
        if row["destination"] == DESTINATION
    }
