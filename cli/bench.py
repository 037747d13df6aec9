"""`hadagen bench`: the kernels that calls run, timed on this machine's GPU beside a copy and other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import click

from hadagen.cli import options
from hadagen.cli.between import between
from hadagen.cli.calls import calls
from hadagen.cli.device import find_device, measuring, no_kernels, refusal, runnable
from hadagen.cli.groups import Group
from hadagen.cli.output import (
    counted,
    fraction_text,
    operand_words,
    print_json,
    print_table,
    report_failures,
    say,
    until_interrupted,
)
from hadagen.errors import DeviceError, UsageError
from hadagen.measure import Cell, Comparison, Variant, is_timed
from hadagen.problem.problem import Numerics, Problem, Rows
from hadagen.problem.regimes import Cache, Destination, deciding_cache, timed_elements
from hadagen.problem.trial import Environment, Outcome
from hadagen.report.names import short_count
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import choose_from_bundles
from hadagen.tuning_db.bundle import Bundle, BundleEntry
from hadagen.tuning_db.table import write_table

DEFAULT_ELEMENTS = "64K,1M,8M,64M,256M"
OURS = "hadagen"
COLUMNS = (
    "library",
    "problem",
    "elements",
    "destination",
    "cache",
    "us",
    "copy_us",
    "fraction_of_copy",
    "error",
    "kernel",
)
Row = dict[str, Any]  # by `COLUMNS`
# Format specifications of columns that a table does not write with `str`.
FORMS = {"us": ".3f", "copy_us": ".3f", "fraction_of_copy": ".3f", "error": ".3e", "kernel": ".12"}


@click.command()
@options.problems(one_kind=True)
@options.elements(DEFAULT_ELEMENTS)
@options.destinations
@click.option("--hot", is_flag=True, help="Time with the data in L2: reuse a buffer of at most twice its size.")
@click.option("--cold", is_flag=True, help="Time with the data in device memory, from 65536 elements on.")
@options.device
@options.csv
@options.as_json
def kernels(
    problems: list[Problem],
    elements: list[int],
    destinations: list[Destination],
    hot: bool,
    cold: bool,
    device: int,
    table: Path | None,
    as_json: bool,
) -> None:
    """Time the kernels that calls run, beside a plain copy.

    Without --hot and --cold, data that fits in half of L2 lies in L2, and larger data in device memory. Pitched rows
    have three quarters of n elements. With a matrix, the nearest whole number of rows to each size is timed. Needs a
    compiler for the copy kernel. Other libraries that are installed are timed too, by the same method within the same
    seconds: fast_hadamard_transform, and HadaCore as faster_hadamard_transform. With a matrix, PyTorch is timed
    instead: one product with the n×n matrix; and H, by a product or by fast_hadamard_transform, and then a product with
    the K×K matrix.

    Errors are ‖out − ref‖ / ‖ref‖ against float64, for normally distributed input.
    """
    environment, target = find_device(device)
    named = product(problems, elements, destinations)
    asked = list(dict.fromkeys((problem, timed_elements(problem, count), way) for problem, count, way in named))
    caches = [cache for cache, wanted in ((Cache.HOT, hot), (Cache.COLD, cold)) if wanted]
    choices = list(_choose(asked, caches, target, environment.l2_bytes))
    if not choices:
        if not any(_found(asked, target)):
            raise no_kernels(target, problems)
        raise UsageError(
            f"nothing is timed at {options.short_list(elements)} elements of these problems; give --elements of at "
            "least one row, and leave out --hot and --cold where the data is too large or too small for them"
        )
    rows, failures = _time(choices, environment, device)
    if rows:
        if table:
            write_table(table, COLUMNS, rows, FORMS)
        if as_json:
            print_json({"gpu": environment.gpu, "driver": environment.driver, "results": rows})
        else:
            _print(environment.gpu, rows, elements, bool(caches))
    report_failures(failures, DeviceError)


class Bench(Group):
    default = "kernels"


@click.group(cls=Bench, commands=[kernels, between, calls])
def bench() -> None:
    """Time what calls run, on a GPU of this machine.

    Without a command, hadagen bench does the same as hadagen bench kernels, with the same options.
    """


class Choice(NamedTuple):
    """The winner of a cell of a problem, and the bundle that holds it."""

    problem: Problem
    cell: Cell
    entry: BundleEntry
    bundle: Bundle

    @property
    def kernel(self) -> tuple[Problem, str]:
        return self.problem, self.entry.kernel


def _choose(
    asked: Iterable[tuple[Problem, int, Destination]], caches: Sequence[Cache], target: Device, l2_bytes: int
) -> Iterator[Choice]:
    """Yields the kernel of a call in each regime; with empty `caches`, only in the regime that decides."""
    for problem, elements, destination, found in _found(asked, target):
        if not elements:
            continue
        for cache in caches or [deciding_cache(problem, elements, destination, l2_bytes)]:
            cell = Cell(elements, destination, cache)
            if is_timed(problem, cell, l2_bytes):
                yield Choice(problem, cell, *found)


def _found(
    asked: Iterable[tuple[Problem, int, Destination]], target: Device
) -> Iterator[tuple[Problem, int, Destination, tuple[BundleEntry, Bundle]]]:
    """The choice with the kernel that a call runs on the device, if it was compiled for the arch."""
    for problem, elements, destination in asked:
        entry, bundle = choose_from_bundles(problem, destination, elements or problem.n, target)[1] or (None, None)
        if entry and bundle and entry.arch == target.arch:
            yield problem, elements, destination, (entry, bundle)


def _time(choices: Sequence[Choice], environment: Environment, index: int) -> tuple[list[Row], list[str]]:
    """Verify and time the choices on a device, and the other libraries beside them; rows of a kind together.

    Also returns sentences on kernels that were not timed, because verification refused them, the device failed or
    somebody interrupted.
    """
    rows: list[Row] = []
    failures: list[str] = []

    def kind(choice: Choice) -> Problem:
        return _any_numerics(choice.problem)

    kinds = [list(group) for _, group in groupby(sorted(choices, key=lambda c: (kind(c), c.cell, c.problem)), kind)]
    with measuring(environment, index) as runner, until_interrupted(failures):
        for group in counted(kinds, "timing"):
            kernels = {choice.kernel: choice for choice in group}
            positions = {kernel: position for position, kernel in enumerate(kernels)}
            variants = [Variant(c.problem, dict(c.entry.knobs), runnable(c.bundle, c.entry)) for c in kernels.values()]
            by_cell = {cell: list(some) for cell, some in groupby(group, lambda choice: choice.cell)}
            cells = [(cell, [positions[c.kernel] for c in some]) for cell, some in by_cell.items()]
            try:
                comparison = runner.compare(variants, cells)
            except DeviceError as error:
                failures.append(str(error))
                continue
            answers = zip(kernels, comparison.answers, strict=True)
            failures += [refusal(*kernel, answer) for kernel, answer in answers if answer.outcome is not Outcome.OK]
            rows += _rows(by_cell, positions, comparison)
    return rows, failures


def _rows(
    by_cell: Mapping[Cell, Sequence[Choice]], positions: Mapping[tuple[Problem, str], int], comparison: Comparison
) -> Iterator[Row]:
    for (cell, choices), times in zip(by_cell.items(), comparison.times, strict=True):
        problem = choices[0].problem
        for choice in choices:
            position = positions[choice.kernel]
            if position in times.kernels:
                error = comparison.answers[position].errors["normal"]
                us = times.kernels[position]
                yield _row(OURS, choice.problem, cell, us, times.copy, error, choice.entry.kernel)
        for name, us in times.peers.items():
            error = comparison.peer_errors[name]["normal"]
            yield _row(name, _any_numerics(problem), cell, us, times.copy, error, "")


def _any_numerics(problem: Problem) -> Problem:
    """Another library has no numerics: its rows name the accurate problem."""
    return problem.with_io(numerics=Numerics.ACCURATE)


def _row(library: str, problem: Problem, cell: Cell, us: float, copy_us: float, error: float, kernel: str) -> Row:
    where = problem.key, cell.elements, cell.destination.value, cell.cache.value
    return dict(zip(COLUMNS, (library, *where, us, copy_us, copy_us / us, error, kernel), strict=True))


def _print(gpu: str, rows: Sequence[Row], elements: Sequence[int], by_regime: bool) -> None:
    """A table for each dtype, numerics, kind of rows, matrix and destination, and for each regime if any was asked for.
    A column has the rows that were timed for a size that was asked for."""
    ours = [row for row in rows if row["library"] == OURS]
    others: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["library"] != OURS:
            others.setdefault(_place(row), {})[row["library"]] = row
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in ours:
        regime = [row["cache"]] if by_regime else []
        problem = Problem.parse(row["problem"])
        io = problem.io
        rows_lie = [] if io.rows is Rows.CONTIGUOUS else [io.rows.value]
        key = (io.input.value, io.numerics.value, *rows_lie, *operand_words(problem), row["destination"], *regime)
        tables.setdefault(key, []).append(row)
    for key, found in sorted(tables.items()):
        say(f"{gpu}, {', '.join(key)}: speed as a fraction of a plain copy")
        if names := dict.fromkeys(name for row in found for name in others.get(_place(row), ())):
            say(f"×: as many times as fast as {', '.join(names)}")
        timed = ((Problem.parse(row["problem"]), row) for row in found)
        by_cell = {
            (problem.n, count): row
            for (problem, row), count in product(timed, elements)
            if timed_elements(problem, count) == row["elements"]
        }
        counts = sorted({count for _, count in by_cell})
        print_table(
            ["n", *map(short_count, counts)],
            [
                [n, *(_cell(by_cell.get((n, count)), others) for count in counts)]
                for n in sorted({n for n, _ in by_cell})
            ],
        )


def _place(row: Row) -> tuple[Any, ...]:
    return _any_numerics(Problem.parse(row["problem"])), row["elements"], row["destination"], row["cache"]


def _cell(row: Row | None, others: Mapping[tuple[Any, ...], Mapping[str, Row]]) -> str:
    if row is None:
        return "-"
    faster = (f" ×{fraction_text(other['us'] / row['us'])}" for other in others.get(_place(row), {}).values())
    return f"{fraction_text(row['fraction_of_copy'])}{''.join(faster)}"
