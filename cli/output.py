"""How results are printed: JSON for programs, aligned columns for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from hadagen.errors import HadagenError, printable
from hadagen.problem.formats import FORMATS, ROW
from hadagen.problem.problem import Problem
from hadagen.report.names import format_name

Item = TypeVar("Item")


def say(line: str, *, err: bool = False) -> None:
    """Print one line, with control characters escaped, because stored text may contain anything."""
    click.echo(printable(line), err=err)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns as wide as their widest cell, two blanks apart; numbers lean right."""
    rows = list(rows)
    cells = [list(headers), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headers))]
    numeric = [all(isinstance(row[column], (int, float, type(None))) for row in rows) for column in range(len(headers))]
    for line in cells:
        padded = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def counted(items: Sequence[Item], doing: str) -> Iterator[Item]:
    """The items, with a bar on a terminal's stderr that shows how many are done."""
    if not sys.stderr.isatty():
        yield from items
        return
    with click.progressbar(items, label=doing, file=sys.stderr, show_pos=True) as shown:
        yield from shown


def short_knobs(knobs: Mapping[str, Any]) -> str:
    """Knobs on one line, in the order of the search: `chunks=4 warps=2 ...`."""
    return " ".join(f"{name}={value}" for name, value in knobs.items())


def range_text(sizes: Collection[int]) -> str:
    """A range of sizes such as 2-32768, or the only size."""
    least, most = min(sizes), max(sizes)
    return str(least) if least == most else f"{least}-{most}"


def fraction_text(fraction: float) -> str:
    """A fraction of the speed of a copy, with two decimals or two significant digits; "-" for 0, which is not timed."""
    if not fraction:
        return "-"
    return f"{fraction:.2f}" if fraction >= 0.1 else f"{fraction:.2g}"


# Headers of `problem_cells`.
PROBLEM_HEADERS = ("n", "dtype", "numerics", "rows")


def problem_cells(problem: Problem) -> tuple[int, str, str, str]:
    """A problem as cells of a table."""
    rows = ", ".join((problem.io.rows.value, *operand_words(problem)))
    return problem.n, problem.io.input.value, problem.io.numerics.value, rows


def operand_words(problem: Problem) -> list[str]:
    """The words for a title that say what a transform has besides H, and its format: "K = 28", "signed", "to int8-row".
    Two problems of equal n, types, numerics and rows have different words."""
    form, of = problem.io.form, problem.transform
    operands = [f"K = {of.order}"] * of.has_matrix + ["swapped"] * of.swapped + ["signed"] * of.signed
    if form is None:
        return operands
    longer = [f"in rows of {form.group}"] if form.group > problem.n and ROW in FORMATS[form.name].groups else []
    return [*operands, " ".join((f"to {format_name(form)}", *longer))]


def clock_text(seconds: float | None) -> str:
    """A duration such as 3:07."""
    return "?:??" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else printable(str(value))


@contextmanager
def until_interrupted(failures: list[str]) -> Iterator[None]:
    """Stops the items at Ctrl-C with a sentence on stderr, so that finished results are still printed and written."""
    try:
        yield
    except KeyboardInterrupt:
        failures.append("interrupted; the results have only what was finished")


def report_failures(failures: Sequence[str], kind: type[HadagenError]) -> None:
    """Print failures to stderr, and raise the last failure as an error of the kind, if there are any."""
    for failure in failures[:-1]:
        say(f"hadagen: {failure}", err=True)
    if failures:
        raise kind(failures[-1])
