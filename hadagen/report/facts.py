"""The contents of a source as plain tables: its head, errors, failures, environments and winners."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import isfinite
from statistics import geometric_mean

from hadagen.errors import printable
from hadagen.plan.knobs import knobs_text
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Environment, Outcome, Provenance, Trial
from hadagen.report.names import PLAIN, device_name, kind_name, series_name, short_text
from hadagen.report.sources import Source
from hadagen.tuning_db.bundle import BundleEntry

MOST_DETAILS = 12  # kinds of failures in the table
_DETAIL_LENGTH = 240


@dataclass(frozen=True)
class Head:
    """The devices of a source, its counts and its dates. outcomes: outcome → number of trials, the most frequent first.
    first, last: dates of trials, or of winners if there are no trials."""

    archs: tuple[str, ...]
    gpus: tuple[str, ...]
    problems: int
    winners: int
    kernels: int
    trials: int
    outcomes: dict[str, int]
    first: str
    last: str
    measured: int
    estimated: int


def head_of(source: Source) -> Head:
    """`measured` and `estimated` count trials, or winners if there are no trials."""
    dates = sorted(each.date for each in source.timed if each.date)
    provenances = Counter(each.provenance for each in source.timed)
    return Head(
        archs=tuple(sorted({printable(each.arch) for each in source.timed})),
        gpus=tuple(sorted({printable(each.environment.gpu) for each in source.timed} - {""})),
        problems=len(source.problems),
        winners=len(source.winners),
        kernels=len({entry.kernel for entry in source.winners}),
        trials=len(source.trials),
        outcomes=dict(Counter(trial.outcome.value for trial in source.trials).most_common()),
        first=printable(dates[0]) if dates else "",
        last=printable(dates[-1]) if dates else "",
        measured=provenances[Provenance.MEASURED],
        estimated=provenances[Provenance.ESTIMATED],
    )


def way(head: Head) -> str:
    """How the times of a source came about: "timed", "estimated", or "timed or estimated"."""
    return " or ".join(["timed"] * bool(head.measured) + ["estimated"] * bool(head.estimated))


def headline(source: Source) -> str:
    """The one sentence on top of a page."""
    head = head_of(source)
    where = ", ".join(head.gpus or head.archs)
    if not source.winners:
        return f"{where}: none of {head.trials:,} trials gave a kernel that may be used."
    kinds = Counter(kind_name(entry.problem) for entry in source.winners)
    kind = PLAIN if PLAIN in kinds else kinds.most_common(1)[0][0]
    fractions = [entry.fraction_of_copy for entry in source.winners if kind_name(entry.problem) == kind]
    run = {"timed": "run", "estimated": "are estimated to run"}.get(way(head), "run, or are estimated to run,")
    return (
        f"{where}: kernels for {kind} {run} at {geometric_mean(fractions):.2f} times the speed of a plain copy, in the "
        f"geometric mean of {len(fractions):,} winners."
    )


@dataclass(frozen=True, order=True)
class ErrorPoint:
    """The largest relative error ‖out − ref‖ / ‖ref‖ against float64 among kernels of a problem, over all classes of
    input, and the bound of the problem. kernels: how many were measured."""

    series: str
    n: int
    problem: str
    error: float
    bound: float
    kernels: int


def error_points(source: Source) -> list[ErrorPoint]:
    """The errors of the winners and of all ok trials, by series and n. An error that is 0 or not finite is left out,
    because no logarithmic axis has a place for it."""
    errors: dict[Problem, dict[object, float]] = defaultdict(dict)
    right: Iterable[Trial | BundleEntry] = (trial for trial in source.trials if trial.outcome is Outcome.OK)
    for each in (*source.winners, *right):
        if each.errors:
            kernel = each.kernel if isinstance(each, BundleEntry) else each.kernel and each.kernel.digest
            known = errors[each.problem]
            known[kernel] = max(known.get(kernel, 0.0), *each.errors.values())
    points = []
    for problem, by_kernel in errors.items():
        largest = max(by_kernel.values())
        if isfinite(largest) and largest > 0:
            name = series_name(problem), problem.n, problem.key
            points.append(ErrorPoint(*name, largest, problem.error_bound, len(by_kernel)))
    return sorted(points)


def outcomes_by_series(trials: Iterable[Trial]) -> dict[str, dict[str, int]]:
    """Type and numerics → outcome → number of trials."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        counts[series_name(trial.problem)][trial.outcome.value] += 1
    return {name: dict(counts[name]) for name in sorted(counts)}


@dataclass(frozen=True)
class Failure:
    """Trials that failed alike. detail, problem, knobs: those of the first trial."""

    outcome: str
    trials: int
    problems: int
    detail: str
    problem: str
    knobs: str


def failures(trials: Iterable[Trial], most: int = MOST_DETAILS) -> tuple[list[Failure], int]:
    """The most frequent failures, and how many trials failed in other ways. Details that differ in numbers only count
    as alike."""
    alike: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.outcome is not Outcome.OK:
            alike[trial.outcome.value, re.sub(r"[0-9][0-9a-f.x]*", "#", trial.detail)].append(trial)
    ordered = sorted(alike.items(), key=lambda item: (-len(item[1]), item[0]))
    found = [
        Failure(
            outcome,
            len(group),
            len({trial.problem for trial in group}),
            short_text(" ".join(group[0].detail.split()), _DETAIL_LENGTH) or "no detail",
            group[0].problem.key,
            printable(knobs_text(group[0].knobs)),
        )
        for (outcome, _), group in ordered[:most]
    ]
    return found, sum(len(group) for _, group in ordered[most:])


def environments(source: Source) -> list[tuple[Environment, int]]:
    """The devices and software, with the number of trials, or of winners if there are no trials; in order."""
    counts = Counter(each.environment for each in source.timed)
    return sorted(counts.items(), key=lambda item: astuple(item[0]))


@dataclass(frozen=True)
class WinnerRow:
    """A line of the table of winners. fraction: fraction of copy. error: None for an estimate that never ran."""

    problem: str
    device: str
    destination: str
    cache: str
    elements: int
    us: float
    fraction: float
    error: float | None
    knobs: str
    kernel: str
    date: str


def winner_rows(winners: Iterable[BundleEntry]) -> list[WinnerRow]:
    """A row for each winner, in their order. `knobs` has the knobs that are not defaults."""
    return [
        WinnerRow(
            entry.problem.key,
            device_name(entry.gpu, entry.arch),
            entry.destination.value + (", small clusters" if entry.portable else ""),
            entry.cache.value,
            entry.elements,
            entry.us,
            entry.fraction_of_copy,
            entry.relative_error,
            printable(knobs_text(entry.knobs)),
            printable(entry.kernel[:12]),
            printable(entry.date[:10]),
        )
        for entry in winners
    ]
