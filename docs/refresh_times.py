"""The times in the documents, read from the shipped bundle and the tables that `hadagen` wrote."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from io import StringIO
from pathlib import Path
from statistics import median
from typing import NamedTuple

import refresh_files as files

from hadagen.problem.problem import Problem, Rows
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.merge import selection_of
from hadagen.tuning_db.table import print_csv

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
OURS = "hadagen"  # in the tables
LIBRARIES = ("hadagen, fast", "hadagen, accurate", "HadaCore", "fast-hadamard-transform")  # names in the documents
# Of other libraries: name in the tables → name in the documents.
PEER_NAMES = {"fast_hadamard_transform": "fast-hadamard-transform"}


class Cell(NamedTuple):
    dtype: str
    n: int
    elements: int
    destination: str
    cache: str

    def __str__(self) -> str:
        return f"{self.dtype}, n = {self.n}, {self.elements >> 10} K elements, {self.destination}, {self.cache}"


class Time(NamedTuple):
    us: float
    fraction_of_copy: float
    error: float | None  # on normal inputs, if the table has it


# library → cell → time
Times = dict[str, dict[Cell, Time]]


def read_times() -> Times:
    """All times, by the names of `LIBRARIES`; times of pitched rows, which other libraries have not, by `pitched`.

    The time of a copy is the median of all times that a table has for as many bytes, because one in hundreds takes a
    third longer than the rest.
    """
    times = times_of(our_rows())
    for library in LIBRARIES:
        times.pop(library, None)  # timed by the bench too
    for rows in bench_tables():
        for library, timed in times_of(rows).items():
            times[library] |= timed
    return times


def times_of(rows: Iterable[Mapping[str, str]]) -> Times:
    """The times of one table."""
    rows, times = list(rows), defaultdict[str, dict[Cell, Time]](dict)
    copies = defaultdict(list)
    for row in rows:
        copies[_traffic(row)].append(float(row["copy_us"]))
    for row in rows:
        cell = Cell(row["dtype"], int(row["n"]), int(row["elements"]), row["destination"], row["cache"])
        us, error = float(row["us"]), row.get("error")
        times[library_of(row)][cell] = Time(us, median(copies[_traffic(row)]) / us, float(error) if error else None)
    return times


@cache
def our_rows() -> list[dict[str, str]]:
    """The rows of the winners of `OUR_GPU` in the shipped bundle."""
    return shipped_rows(files.OUR_GPU)


def shipped_rows(gpu: str, *, quantized: bool = False, prologues: bool = False) -> list[dict[str, str]]:
    """The rows of the winners of a GPU in the shipped bundle, as `hadagen bundle export` writes them: only the
    winners that quantize, or only the others; and only those with a prologue, or only the others."""
    table = StringIO()
    winners = selection_of(Bundle.open(files.OURS))
    wanted = {
        cell: trial
        for cell, trial in winners.items()
        if (cell.gpu, cell.problem.io.form is not None, bool(cell.problem.prologue)) == (gpu, quantized, prologues)
    }
    print_csv(wanted, table)
    return [_told(row) for row in csv.DictReader(StringIO(table.getvalue()))]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table, by the names of its columns and of the parts of the problem's key."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_told(row) for row in csv.DictReader(file)]


def assembled() -> dict[str, str]:
    """The first digits of the digests of kernels before and after `hadagen bundle assemble`."""
    if not files.ASSEMBLED.exists():
        return {}
    with files.ASSEMBLED.open(newline="", encoding="utf-8") as file:
        return {row["kernel"]: row["assembled"] for row in csv.DictReader(file)}


def _told(row: dict[str, str]) -> dict[str, str]:
    problem = Problem.parse(row["problem"])
    io = problem.io
    return row | {
        "n": str(problem.n),
        "dtype": io.input.value,
        "numerics": io.numerics.value,
        "rows_lie": io.rows.value,
    }


def bench_tables() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The rows of the run with other libraries, and those of an earlier run at cells that this run lacks."""
    rows = read_rows(files.BENCH)
    timed = {_place(row) for row in rows}
    earlier = read_rows(files.EARLIER) if files.EARLIER.exists() else []
    return rows, [row for row in earlier if _place(row) not in timed]


def _place(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in Cell._fields)


def sources() -> tuple[Path, ...]:
    """The files of the tables that have times beside other libraries."""
    return (files.BENCH, files.EARLIER) if files.EARLIER.exists() else (files.BENCH,)


def pitched(numerics: str) -> str:
    """The name of our times of pitched rows."""
    return f"hadagen, {numerics}, pitched"


def library_of(row: Mapping[str, str]) -> str:
    """The name in the documents of the library that a row has the time of."""
    name = row.get("library", OURS)
    if name != OURS:
        return PEER_NAMES.get(name, name)
    return pitched(row["numerics"]) if row["rows_lie"] == Rows.PITCHED else f"{OURS}, {row['numerics']}"


def _traffic(row: Mapping[str, str]) -> tuple[object, ...]:
    """The bytes and places that tell the copies in a table apart. Of pitched rows, a quarter is left out if that is at
    least an element."""
    pitched = row["rows_lie"] == Rows.PITCHED and int(row["n"]) >= 4
    return pitched, int(row["elements"]) * DTYPE_BYTES[row["dtype"]], row["destination"], row["cache"]
