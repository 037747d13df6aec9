"""Which provider multiplies: by times that were measured on such a GPU for the nearest sizes, else by a rule."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hadagen.models.products.providers import LIBRARY

SHIPPED = Path(__file__).with_name("times.json")
MOST_ROWS = 8192  # that are measured, from 1 on, in powers of two


class Choice(NamedTuple):
    """Providers in the order in which they are tried.

    us: microseconds of each where they were measured, for `rows` rows of a weight [out, n]; empty by the rule.
    """

    providers: tuple[str, ...]
    us: tuple[float, ...] = ()
    rows: int = 0
    n: int = 0
    out: int = 0


@cache
def measured() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, list[list[Any]]]]]]:
    """GPU → kind of codes → "n,out" → rows → [provider, microseconds] in the order of times."""
    found = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return {name: {kind: of[kind] for kind in of if kind != "versions"} for name, of in found["gpus"].items()}


@cache
def choose(gpu: str, kind: str, n: int, out: int, rows: int) -> Choice:
    """The providers for codes [rows, n] of a kind and a weight [out, n] on a GPU of this name."""
    shapes = measured().get(gpu, {}).get(kind)
    rule = tuple(_by_rule(kind, rows))
    if not shapes:
        return Choice(rule)
    n_, out_ = min(_sizes(shapes), key=lambda each: abs(math.log2(each[0] / n)) + abs(math.log2(each[1] / out)))
    bucket = min(MOST_ROWS, 1 << max(0, round(math.log2(max(rows, 1)))))
    times = shapes[f"{n_},{out_}"][str(bucket)]
    names = tuple(name for name, _ in times)
    return Choice(
        (*names, *(each for each in rule if each not in names)), tuple(us for _, us in times), bucket, n_, out_
    )


def _sizes(shapes: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    for key in shapes:
        n, _, out = key.partition(",")
        yield int(n), int(out)


def _by_rule(kind: str, rows: int) -> Iterator[str]:
    """Tiles that fit on most GPUs. Sums of FP8 in a tile are exact enough in float16 alone, which is as fast for few
    rows."""
    if rows <= 16:
        yield "tile 16x32x256, 4, 5"
    elif rows <= 32:
        yield "tile 32x32x256, 4, 4"
    if kind == "fp8":
        yield LIBRARY
    yield "tile 64x64x128, 4, 5"
    yield LIBRARY
