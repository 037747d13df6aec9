"""Counts the codes of shipped kernels that are not those of exactly rotated values.

Needs a GPU. Writes a row for each problem that has accurate and fast kernels. The input is normal, and the same for
both. Exact values are rotated in float64 and rounded to float32 before PyTorch quantizes them.

    python docs/measure_codes.py docs/data/codes_h100.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch

import hadagen
from hadagen.problem.formats import ROW
from hadagen.problem.problem import Numerics, Problem
from hadagen.truth import quantizer
from hadagen.tuning_db.bundle import Bundle, shipped

ELEMENTS = 1 << 24
SEED = 1
COLUMNS = ("problem", "gpu", "codes", "differing", "scales", "scales_differing")


def main(out: Path, device: str = "cuda") -> None:
    arch = "sm{}{}".format(*torch.cuda.get_device_capability()) if device == "cuda" else "sm90"
    fast = [each for each in Bundle.open(shipped()[arch]).problems() if each.io.form and is_fast(each)]
    with out.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for problem in fast:
            for each in (problem.with_io(numerics=Numerics.ACCURATE), problem):
                gpu = torch.cuda.get_device_name() if device == "cuda" else "PyTorch"
                rows.writerow([each.key, gpu, *differing(each, device)])


def is_fast(problem: Problem) -> bool:
    return problem.io.numerics is Numerics.FAST


def differing(problem: Problem, device: str) -> tuple[int, int, int, int]:
    """The number of codes and of differing codes, and the same two numbers for scales."""
    form = problem.io.form
    assert form is not None
    columns = max(problem.unit, problem.n)
    rotation = hadagen.Rotation(columns, k=problem.order, block=problem.n).to(device)
    numbers = torch.Generator(device).manual_seed(SEED)
    x = torch.randn(ELEMENTS // columns, columns, generator=numbers, device=device).to(torch.bfloat16)
    group = {} if form.groups[0] == ROW else {"group": form.group}
    options = {"to": form.name, "rule": form.rule, "layout": form.layout.value, **group}
    found = hadagen.rotate_quantize(x, rotation, **options, numerics=problem.io.numerics.value)
    codes, scales = quantizer.quantize(rotation(x.double()).float(), form, x.dtype, None)
    return *unequal(found.codes, codes, form.element.bits), *unequal(found.scales.reshape(scales.shape), scales, 8)


def unequal(one: torch.Tensor, other: torch.Tensor, bits: int) -> tuple[int, int]:
    """The number of values, and of differing values. bits: the bits of a value, if a byte has two values."""
    assert one.shape == other.shape
    if bits == 4:
        one, other = (torch.stack((each & 15, each >> 4)) for each in (one, other))
    elif one.element_size() == 1:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return one.numel(), int((one != other).sum())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
