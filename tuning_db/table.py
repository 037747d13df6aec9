"""The winners as a CSV table, from which the pictures and tables of the documentation are made."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from hadagen.files.atomic_file import atomic_file, check_place
from hadagen.problem.trial import Timing, Trial
from hadagen.tuning_db.winners import WinnerCell, digest_of

COLUMNS = (
    "gpu",
    "problem",
    "elements",
    "destination",
    "cache",
    "us",
    "copy_us",
    "fraction_of_copy",
    "kernel",
)
# What is not written as it is.
FORMS = {"us": ".3f", "copy_us": ".3f", "fraction_of_copy": ".3f", "kernel": ".12"}
# Of the table of `hadagen bundle assemble`: the digests of a kernel before and after.
ASSEMBLED = ("kernel", "assembled")
# How every table that hadagen writes begins: this one and that of `hadagen bench between`, that of `hadagen bench`, and
# that of `hadagen bundle assemble`; and how those of earlier versions did.
BEGINNINGS = (
    b"gpu,problem,",
    b"library,problem,",
    b"kernel,assembled",
    b"gpu,numerics,dtype,",
    b"library,numerics,dtype,",
)


def export_csv(selection: Mapping[WinnerCell, Trial], path: str | os.PathLike[str]) -> None:
    """Write what `print_csv` does to a file. A table that is there is replaced once the new one is complete. Raises
    `StorageError` where it cannot be written, or another file is there."""
    check_table_place(path)
    write_table(path, *_table(selection), FORMS)


def print_csv(selection: Mapping[WinnerCell, Trial], file: TextIO) -> None:
    """Write one line for each cell of `selection` (see `winners.portfolio`) and regime that its winner was timed in.

    Columns: `COLUMNS`, then the knobs; times in microseconds, `problem` its key, `kernel` the first 12 digits of the
    digest.
    """
    _write(file, *_table(selection), FORMS)


def _table(selection: Mapping[WinnerCell, Trial]) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows."""
    rows = [
        _row(cell, selection[cell], timing)
        for cell in sorted((cell for cell in selection if not cell.portable), key=_order)
        for timing in sorted(selection[cell].timings, key=lambda timing: timing.cache)
        if (timing.destination, timing.elements) == (cell.destination, cell.elements)
    ]
    knobs = list(dict.fromkeys(knob for trial in selection.values() for knob in trial.knobs))
    return [*COLUMNS, *knobs], rows


def check_table_place(path: str | os.PathLike[str]) -> None:
    """Raises `StorageError` if no table can be written at `path`, or if another kind of file is there."""
    check_place(path, "a table of hadagen", lambda header: header.startswith(BEGINNINGS))


def write_table(
    path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Mapping[str, Any]], forms: Mapping[str, str]
) -> None:
    """Write rows as CSV, where a column that a row lacks is empty. A file that is there is replaced once the new one is
    complete. `forms`: format specifications of columns that are not written as they are. Raises `StorageError` where it
    cannot be written."""
    with atomic_file(path) as new, new.open("w", newline="", encoding="utf-8") as file:
        _write(file, columns, rows, forms)


def _write(file: TextIO, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], forms: Mapping[str, str]) -> None:
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **{name: format(row[name], form) for name, form in forms.items()}} for row in rows)


def _order(cell: WinnerCell) -> tuple[Any, ...]:
    problem = cell.problem
    return cell.gpu, problem.io.rows, problem.io.numerics, problem.io.input, cell.elements, problem.n, cell.destination


def _row(cell: WinnerCell, trial: Trial, timing: Timing) -> dict[str, Any]:
    where = cell.gpu, cell.problem.key, cell.elements, cell.destination.value, timing.cache.value
    times = timing.us, timing.copy_us, timing.fraction_of_copy
    return dict(zip(COLUMNS, (*where, *times, digest_of(trial)), strict=True)) | trial.knobs
