"""The table of the speeds beside other libraries, of all data that was measured beside one."""

from __future__ import annotations

from statistics import geometric_mean

import refresh_files as files
from refresh_markdown import grid, number
from refresh_rotations import ONE, TWO, products
from refresh_times import Times, read_rows


def compared_table(times: Times | None) -> str:
    """How many times as fast as each library the kernels are, in Markdown. times: beside libraries, on an H100."""
    found: dict[tuple[str, str, str], list[float]] = {}
    if times:
        mine = times["hadagen, accurate"]
        for name in ("HadaCore", "fast-hadamard-transform"):
            cells = mine.keys() & times[name].keys()
            found[name, "the transform, `accurate`", "H100"] = [times[name][cell].us / mine[cell].us for cell in cells]
    if files.ROTATIONS.exists():
        ratios = products()[1]
        for title, library in (("PyTorch, an n × n product", ONE), ("PyTorch, two products", TWO)):
            of = [ratio for (*_, name), ratio in ratios.items() if name == library]
            found[title, "a rotation with a matrix, `accurate`", "H200"] = of
    if files.TORCHAO.exists():
        of = [float(row["torchao_us"]) / float(row["ours_us"]) for row in read_rows(files.TORCHAO)]
        found["torchao", "`presets.fa3_fp8`", "H200"] = of
    if files.HUMMING.exists():
        of = [float(row["times_as_fast"]) for row in read_rows(files.HUMMING)]
        found["humming", "`rotate_quantize` of blocks to FP8 and INT8 rows", "H200"] = of
    rows = [
        (*what, number(geometric_mean(ratios)), number(min(ratios)), number(max(ratios)), len(ratios))
        for what, ratios in found.items()
        if ratios
    ]
    head = ("beside", "kernels of hadagen", "GPU", "times as fast, geometric mean", "least", "most", "cells")
    return grid("lllrrrr", head, rows) if rows else files.NO_DATA
