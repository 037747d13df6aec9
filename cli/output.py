"""How results are printed: JSON for programs, and for people text and tables that fit the terminal."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import click

from hadagen.errors import HadagenError, printable
from hadagen.problem.formats import FORMATS, ROW
from hadagen.problem.problem import Problem
from hadagen.report.names import format_name

Item = TypeVar("Item")
LINE_SECONDS = 60.0  # between two lines on how far a command is, at least


def say(text: str, *, err: bool = False) -> None:
    """Print a sentence, with control characters escaped, because stored text may contain anything. On a terminal, lines
    fit it. A file or a pipe gets one line, which programs find."""
    stream = sys.stderr if err else sys.stdout
    is_shown = stream.isatty() or os.environ.get("COLUMNS")
    for line in folded(text, terminal_width()) if is_shown else [printable(text)]:
        click.echo(line, err=err)


def terminal_width() -> int:
    """Columns of the terminal, at least 40. `COLUMNS` counts first; a file or a pipe has 80."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return max(40, shutil.get_terminal_size().columns) if is_known else 80


def folded(text: Any, columns: int) -> list[str]:
    """The lines of a text. Only a word that is longer, such as a path, makes a line longer than `columns`."""
    text = printable(str(text))
    if len(text) <= columns:
        return [text]
    return textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """Names on the left and texts on the right; a path that does not fit there stands alone on its line."""
    fields = list(fields)
    left = max(len(name) for name, _ in fields) + 2
    for name, text in fields:
        for line in folded(text, terminal_width() - left):
            if left + len(line) > terminal_width():
                if name:
                    click.echo(name.rstrip())
                click.echo(line.rjust(terminal_width()))
            else:
                click.echo(name.ljust(left) + line)
            name = ""


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns as wide as their widest cell, two blanks apart; numbers lean right.

    In a table that is wider than the terminal, long texts are wrapped. If this is not enough, the columns that do not
    fit stand on further lines of each row.
    """
    rows = list(rows)
    cells = [list(headers), *([_cell(value) for value in row] for row in rows)]
    numeric = [all(isinstance(row[column], (int, float, type(None))) for row in rows) for column in range(len(headers))]
    widths = _fitted(cells)
    for line in cells:
        for start, end in _parts(widths):
            texts = [folded(line[column], widths[column]) for column in range(start, end)]
            for each in zip_longest(*texts, fillvalue=""):
                padded = (
                    text.rjust(width) if right else text.ljust(width)
                    for text, width, right in zip(each, widths[start:end], numeric[start:end], strict=True)
                )
                click.echo((_INDENT * (start > 0) + _GAP.join(padded)).rstrip())


_GAP, _INDENT = "  ", "    "


def _fitted(cells: Sequence[Sequence[str]]) -> list[int]:
    """Widths of columns that fit the terminal; the natural widths, cut to one line, if no widths fit."""
    columns = range(len(cells[0]))
    natural = [max(len(line[column]) for line in cells) for column in columns]
    least = [max(len(word) for line in cells for word in [*line[column].split(), ""]) for column in columns]
    room = terminal_width() - len(_GAP) * (len(natural) - 1)
    widths = list(natural)
    while sum(widths) > room:
        long = [column for column in columns if widths[column] > least[column]]
        if not long:
            most = terminal_width() - len(_INDENT)
            return [max(min(width, most), word) for width, word in zip(natural, least, strict=True)]
        widths[max(long, key=widths.__getitem__)] -= 1
    return widths


def _parts(widths: Sequence[int]) -> list[tuple[int, int]]:
    """The columns of each line of a row, from one to before another."""
    starts, used = [0], widths[0]
    for column, width in enumerate(widths[1:], 1):
        used += len(_GAP) + width
        if used > terminal_width():
            starts.append(column)
            used = len(_INDENT) + width
    return [*zip(starts, [*starts[1:], len(widths)], strict=True)]


def counted(items: Sequence[Item], doing: str) -> Iterator[Item]:
    """The items. A bar on a terminal's stderr shows how many are done, and elsewhere a line in each minute does."""
    if not sys.stderr.isatty():
        said = time.monotonic()
        for done, item in enumerate(items, 1):
            yield item
            if time.monotonic() - said >= LINE_SECONDS:
                say(f"{doing}: {done} of {len(items)}", err=True)
                said = time.monotonic()
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
    flags = ("real", "swapped", "signed")
    matrices = [f"K = {of.order}"] * of.has_matrix + [f"C of order {of.length}"] * of.paired
    operands = matrices + [name for name in flags if getattr(of, name)]
    if form is None:
        return operands
    longer = [f"in rows of {form.group}"] if form.group > problem.n and ROW in FORMATS[form.name].groups else []
    return [*operands, " ".join((f"to {format_name(form)}", *longer))]


def program() -> str:
    """How this shell calls hadagen: by its name, or by the path of the program beside this Python."""
    beside = Path(sys.executable).with_name("hadagen")
    if shutil.which("hadagen") or not beside.exists():
        return "hadagen"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def counted_text(count: int, noun: str) -> str:
    """A count with its noun, such as "1 row" or "1,024 rows"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


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
