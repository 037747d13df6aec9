"""`hadagen bench between`: how much time calls lose at sizes between those at which kernels were tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hadagen.cli import options
from hadagen.cli.device import find_device, measuring, no_kernels, refusal, runnable
from hadagen.cli.output import (
    PROBLEM_HEADERS,
    counted,
    print_json,
    print_table,
    problem_cells,
    report_failures,
    say,
    until_interrupted,
)
from hadagen.errors import DeviceError
from hadagen.measure import Cell, Choice, Ranking, Variant, cells_at, rows_between
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination, other_share
from hadagen.problem.trial import Outcome
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import choose_from_bundles
from hadagen.tuning_db.table import write_table
from hadagen.tuning_db.winners import closest_trials

if TYPE_CHECKING:
    from hadagen.tuning_db.store import Store

COLUMNS = (
    "gpu",
    "problem",
    "rows",
    "elements",
    "destination",
    "cache",
    "variants",
    "us",
    "best_us",
    "loss",
    "kernel",
    "best_kernel",
)
DEFAULT_SIZES = "64,256,1024,4096,16384,32768"
# Of a database, the variants that come nearest to the best somewhere.
MOST_TRIALS = 24

Row = dict[str, Any]  # by `COLUMNS`
# Format specifications of columns that a table does not write with `str`.
FORMS = {"us": ".3f", "best_us": ".3f", "loss": ".4f", "kernel": ".12", "best_kernel": ".12"}


@click.command()
@options.problems(sizes=DEFAULT_SIZES, one_kind=True)
@click.option(
    "--counts",
    default=20,
    show_default=True,
    callback=options.within(2, 100),
    help="Sizes of each problem.",
)
@options.destinations
@click.option("--db", metavar="PATH|URL", help="Tuning database whose best trials on this GPU are timed too.")
@options.device
@options.csv
@options.as_json
def between(
    problems: list[Problem],
    counts: int,
    destinations: list[Destination],
    db: str | None,
    device: int,
    table: Path | None,
    as_json: bool,
) -> None:
    """Time what calls run at sizes between the tuned sizes.

    Each problem is timed with odd numbers of rows, spread evenly over all sizes; two destinations take turns. The
    kernel of a call is timed against every known variant: all kernels that the bundles have for the problem, and with
    --db the best two dozen of a tuning database. The loss of a call says how much slower its kernel is than the fastest
    known variant, by the score that names winners. Needs a compiler for the copy kernel.
    """
    environment, target = find_device(device)
    rows: list[Row] = []
    failures: list[str] = []
    with nullcontext() if db is None else options.open_db(db) as store:
        all_candidates = [
            _candidates(problem, counts, destinations, target, environment.l2_bytes, store) for problem in problems
        ]
        all_candidates = [candidates for candidates in all_candidates if candidates.choices]
        if not all_candidates:
            raise no_kernels(target, problems)
        with measuring(environment, device) as runner, until_interrupted(failures):
            for candidates in counted(all_candidates, "timing"):
                try:
                    ranking = runner.rank(candidates.variants, candidates.choices)
                except DeviceError as error:
                    failures.append(str(error))
                    continue
                rows += _rows(target.gpu, candidates, ranking)
                failures += _refusals(candidates, ranking)
    losses = [row["loss"] for row in rows]
    if rows:
        summary = {"geometric_mean_loss": geometric_mean(1 + loss for loss in losses) - 1, "worst_loss": max(losses)}
        if table:
            write_table(table, COLUMNS, rows, FORMS)
        if as_json:
            print_json({"gpu": environment.gpu, "driver": environment.driver, **summary, "results": rows})
        else:
            _print(environment.gpu, rows, *summary.values())
    report_failures(failures, DeviceError)


class Candidates(NamedTuple):
    """The kernels that are compared for a problem, and where."""

    problem: Problem
    variants: list[Variant]
    digests: list[str]  # of the variants' kernels
    rows: list[int]
    choices: list[Choice]


def _candidates(
    problem: Problem, counts: int, ways: Sequence[Destination], target: Device, l2_bytes: int, store: Store | None
) -> Candidates:
    known: dict[str, Variant] = {}
    for bundle in bundles.known():
        for entry in bundle.entries(problem) if bundle.arch == target.arch else []:
            if entry.kernel not in known:
                known[entry.kernel] = Variant(problem, dict(entry.knobs), runnable(bundle, entry))
    if store:
        trials = store.trials(problem, target.arch, target.gpu, Outcome.OK, blobs=False)
        for trial in closest_trials(trials, MOST_TRIALS):
            if trial.kernel and trial.kernel.digest not in known:
                known[trial.kernel.digest] = Variant(problem, trial.knobs, store.kernel(trial.kernel.digest))
    candidates = Candidates(problem, list(known.values()), list(known), [], [])
    for number, rows in enumerate(rows_between(problem, counts)):
        destination = ways[number % len(ways)]
        _, found = choose_from_bundles(problem, destination, rows * problem.n, target)
        if found and found[0].arch == target.arch:
            cells = _cells(problem, rows * problem.n, destination, l2_bytes)
            candidates.rows.append(rows)
            candidates.choices.append(Choice(candidates.digests.index(found[0].kernel), cells))
    return candidates


def _cells(problem: Problem, elements: int, destination: Destination, l2_bytes: int) -> tuple[tuple[Cell, float], ...]:
    """The regimes that rank kernels: the regime that decides, and the other regime if kernels are timed in it too."""
    decides, *others = cells_at(problem, elements, destination, l2_bytes)
    share = other_share(problem, elements, destination, l2_bytes) if others else 0.0
    return (decides, 1 - share), *((other, share) for other in others)


def _rows(gpu: str, candidates: Candidates, ranking: Ranking) -> Iterator[Row]:
    """One row for each choice in which the kernel that calls run was not refused."""
    problem, variants = candidates.problem, sum(answer.outcome is Outcome.OK for answer in ranking.answers)
    for rows, choice, result in zip(candidates.rows, candidates.choices, ranking.results, strict=True):
        if result is not None:
            (cell, _), *_ = choice.cells
            where = problem.key, rows, cell.elements, cell.destination.value, cell.cache.value, variants
            times = result.chosen_us, result.best_us, result.loss
            kernels = candidates.digests[choice.chosen], candidates.digests[result.best]
            yield dict(zip(COLUMNS, (gpu, *where, *times, *kernels), strict=True))


def _refusals(candidates: Candidates, ranking: Ranking) -> list[str]:
    """Sentences on the kernels that calls run and verification refused."""
    chosen = {choice.chosen: ranking.answers[choice.chosen] for choice in candidates.choices}
    refused = {position: answer for position, answer in chosen.items() if answer.outcome is not Outcome.OK}
    return [refusal(candidates.problem, candidates.digests[position], answer) for position, answer in refused.items()]


def _print(gpu: str, rows: Sequence[Row], mean: float, worst: float) -> None:
    """A line for each problem."""
    by_problem: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_problem.setdefault(problem_cells(Problem.parse(row["problem"])), []).append(row)
    say(f"{gpu}: what calls lose to the best known variant between the element counts that were tuned")
    print_table(
        (*PROBLEM_HEADERS, "row counts", "variants", "loss, mean", "loss, worst", "at rows", "destination"),
        (_line(key, found) for key, found in by_problem.items()),
    )
    click.echo(f"in all: {mean:.2%} (geometric mean), {worst:.2%} (worst)")


def _line(key: tuple[Any, ...], rows: Sequence[Row]) -> tuple[Any, ...]:
    worst = max(rows, key=lambda row: row["loss"])
    mean = geometric_mean(1 + row["loss"] for row in rows) - 1
    place = worst["rows"], worst["destination"]
    return *key, len(rows), worst["variants"], f"{mean:.2%}", f"{worst['loss']:.2%}", *place
