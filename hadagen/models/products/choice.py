"""Which provider multiplies: by times that were measured on such a GPU for the nearest sizes, else by a rule.

Times lie in two files of one form: `SHIPPED`, and that of `hadagen tune --product` in the user's data directory.

    {"gpus": {"NVIDIA H200": {"capability": 90, "int8": {"14336,4096": {"64": [["tile 64x32x256, 4, 4", 25.4], …]}}}}}

are microseconds of providers in their order, for INT8 codes [64, 14336] and a weight [4096, 14336].
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hadagen.errors import HadagenError, StorageError
from hadagen.files.atomic_file import atomic_file
from hadagen.models.json_file import read_json
from hadagen.models.products.providers import KINDS, LIBRARY, UNPACK, fits, tile_of
from hadagen.owners import fault_of
from hadagen.runtime.choose.bundles import user_directory

SHIPPED = Path(__file__).with_name("times.json")
MOST_ROWS = 8192  # that are measured, from 1 on, in powers of two

chosen: dict[tuple[Any, ...], str] = {}  # sizes, types and a GPU → the provider that ran for them in this process

Times = dict[str, list[tuple[str, float]]]  # rows → providers and microseconds


class Choice(NamedTuple):
    """Providers in the order in which they are tried.

    us: microseconds of the first ones, where they were measured: on `gpu`, for `rows` rows of a weight [out, n].
    """

    providers: tuple[str, ...]
    us: tuple[float, ...] = ()
    gpu: str = ""
    rows: int = 0
    n: int = 0
    out: int = 0


def choose(gpu: str, capability: int, kind: str, n: int, out: int, rows: int) -> Choice:
    """The providers for codes [rows, n] and a weight [out, n] of a kind: "int8", "fp8" or "int4".

    gpu, capability: the name of the GPU, and 10 · major + minor, or 0 if it is not known. Times of another GPU of its
    capability count if their sizes are nearer by more than a factor of 2.
    """
    return _choose(gpu, capability, kind, n, out, min(MOST_ROWS, 1 << max(0, rows - 1).bit_length()))


@cache
def _choose(gpu: str, capability: int, kind: str, n: int, out: int, rows: int) -> Choice:
    def distance(sizes: tuple[str, int, int]) -> float:
        where, n_, out_ = sizes
        return abs(math.log2(n_ / n)) + abs(math.log2(out_ / out)) + (where != gpu)

    found = _measured()
    alike = [name for name, of in found.items() if kind in of and (name == gpu or of["capability"] == capability)]
    near = min(((name, *sizes) for name in alike for sizes in found[name][kind]), key=distance, default=None)
    names, us = zip(*found[near[0]][kind][near[1:]][str(rows)], strict=True) if near else ((), ())
    order = dict.fromkeys((*names, *_by_rule(kind, rows)))
    fitting = tuple(name for name in order if fits(name, KINDS[kind], n, out))
    times = tuple(us[names.index(name)] for name in fitting if name in names)
    return Choice(fitting, times, near[0], rows, *near[1:]) if near else Choice(fitting)


def _by_rule(kind: str, rows: int) -> Iterator[str]:
    """Tiles that fit on most GPUs, and the library, which is fast for many rows of FP8."""
    if kind == "int4":
        tile, depths = ("16x32", "512, 256, 128, 64") if rows <= 16 else ("32x64" if rows <= 32 else "64x64", "128, 64")
        yield from (f"pairs {tile}x{depth}, 4, 4, 1" for depth in depths.split(", "))
        yield UNPACK
        return
    if rows <= 16:
        yield "tile 16x32x256, 4, 5"
    elif rows <= 32:
        yield "tile 32x32x256, 4, 4"
    if kind == "fp8":
        yield LIBRARY
    yield "tile 64x64x128, 4, 5"
    if kind != "fp8":
        yield LIBRARY


# ---- files -----------------------------------------------------------------------------------------------------------
def place() -> Path:
    """The file of the times of this machine. Raises `StorageError` if no home directory is known."""
    return user_directory().parent / "products.json"


def keep(gpu: str, capability: int, kind: str, shapes: Mapping[str, Any], path: Path) -> None:
    """Add times to a file: "n,out" → rows → [provider, microseconds]. Raises `StorageError` if it cannot be written, or
    holds something else."""
    content = read_json(path) if path.exists() else {"gpus": {}}
    _parsed(content, path)
    of_gpu = content["gpus"].setdefault(gpu, {"capability": capability})
    of_gpu.setdefault(kind, {}).update(shapes)
    with atomic_file(path) as new:
        new.write_text(json.dumps(content).replace(']]}, "', ']]},\n "') + "\n", encoding="utf-8")  # a line a product
    _measured.cache_clear()
    _choose.cache_clear()
    chosen.clear()


@cache
def _measured() -> dict[str, dict[str, Any]]:
    """GPU → "capability", and kind → (n, out) → `Times`. Times of this machine count before shipped ones."""
    found = _parsed(read_json(SHIPPED), SHIPPED)
    try:
        path = place()
    except StorageError:  # without a home directory there are no others
        return found
    try:
        if path.exists():
            if fault := fault_of(path):
                raise StorageError(f"{fault}, or remove it")
            for gpu, of in _parsed(read_json(path), path).items():
                known = found.setdefault(gpu, of)
                known |= {kind: known.get(kind, {}) | of[kind] for kind in KINDS if kind in of}
    except (HadagenError, OSError) as error:
        warnings.warn(f"products of codes go on without times of this machine: {error}", stacklevel=2)
    return found


def _parsed(content: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Raises `StorageError` for a file that `keep` does not write."""
    try:
        found: dict[str, dict[str, Any]] = {}
        for gpu, of in content["gpus"].items():
            found[gpu] = {"capability": int(of["capability"])}
            for kind in KINDS.keys() & of.keys():
                found[gpu][kind] = {_sizes(key): _times(times) for key, times in of[kind].items()}
                if not of[kind]:
                    raise ValueError(kind)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise StorageError(f"{path} holds no times of products ({type(error).__name__}); remove it") from None
    return found


def _sizes(key: str) -> tuple[int, int]:
    n, out = map(int, key.split(","))
    if not (1 <= n < 1 << 31 and 1 <= out < 1 << 31):
        raise ValueError(key)
    return n, out


def _times(times: Mapping[str, Any]) -> Times:
    found = {rows: [(name, float(us)) for name, us in times[rows]] for rows in map(str, all_rows())}
    for each in found.values():
        names, us = zip(*each, strict=True)  # which fails without any
        if len({*names}) < len(names) or not all(0 < one < math.inf for one in us):
            raise ValueError(each)
        for name in names:
            tile_of(name)
    return found


def all_rows() -> list[int]:
    """The numbers of rows that are measured."""
    return [1 << bit for bit in range(MOST_ROWS.bit_length())]
