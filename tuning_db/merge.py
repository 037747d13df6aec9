"""Reads bundles as selections of winners, to merge those of several GPUs, and to export them as tables."""

from __future__ import annotations

import os
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from hadagen.errors import UsageError
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import destinations
from hadagen.problem.trial import Kernel, Outcome, Timing, Trial
from hadagen.tuning_db.bundle import Bundle, BundleEntry
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import (
    WinnerCell,
    arithmetic_in,
    best_by_cell,
    digest_of,
    portable_winners,
    ranked_by_cell,
)

Selection = dict[WinnerCell, Trial]


def selection_of(bundle: Bundle) -> Selection:
    """The winners of a bundle as `write_bundle` takes them. Each has the times of its own cell, without their
    quartiles, and a kernel without source."""
    kernels: dict[str, Kernel] = {}
    selection: Selection = {}
    for entry in bundle.all_entries():
        if entry.kernel not in kernels:
            kernels[entry.kernel] = bundle.kernel(entry.kernel)
        cell = WinnerCell(entry.problem, entry.arch, entry.gpu, entry.destination, entry.elements, entry.portable)
        selection[cell] = _trial(entry, kernels[entry.kernel])
    return selection


def merge_bundles(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Selection:
    """Write one bundle with the winners of several of one arch, such as of an H100 and an H200, and return them.

    If two bundles have a winner for the same cell, the better winner is taken, as a search would do. A winner between
    buckets was found together with the winners of the buckets around it, and is taken only with them. A winner that
    misses its problem's error bound, which may have been wider when it was found, is left out. Batch-invariant calls
    keep the arithmetic of the first bundle that names one for a problem, if winners in both destinations still have it.

    Raises `UsageError` if there are no bundles, or bundles of several archs, and `StorageError` as `Bundle.open` and
    `write_bundle` do.
    """
    bundles = [Bundle.open(Path(path)) for path in paths]
    archs = {bundle.arch for bundle in bundles}
    if len(archs) != 1:
        raise UsageError(
            f"bundles of {len(archs)} archs ({', '.join(sorted(archs))}) cannot be one; merge those of one arch"
        )
    selections = [selection_of(bundle) for bundle in bundles]
    named = [{cell: trial for cell, trial in each.items() if not cell.portable} for each in selections]
    buckets = _best({cell: trial for cell, trial in each.items() if cell.is_bucket} for each in named)
    winners = buckets | _best(_between(each, buckets) for each in named)
    rankings = ranked_by_cell(trial for each in selections for trial in each.values())
    selection = dict(sorted((winners | portable_winners(winners, rankings)).items()))
    left = {(cell.problem, arithmetic_in(trial), cell.destination) for cell, trial in selection.items()}
    arithmetic = {
        problem: name
        for bundle in reversed(bundles)
        for problem, name in arithmetic_of(bundle).items()
        if name and all((problem, name, destination) in left for destination in destinations(problem))
    }
    write_selection(out, archs.pop(), selection, arithmetic)
    return selection


def _best(selections: Iterable[Selection]) -> Selection:
    """Cell → the best of its winners."""
    trials = [trial for selection in selections for trial in selection.values()]
    return {cell: trial for cell, (trial, _) in best_by_cell(trials).items()}


def _between(selection: Selection, buckets: Selection) -> Selection:
    """The winners between buckets whose two nearest buckets have the same kernels in `buckets` as in `selection`."""
    counts: dict[WinnerCell, list[int]] = defaultdict(list)
    for cell in sorted(buckets):
        counts[cell.line].append(cell.elements)
    found = {}
    for cell, trial in selection.items():
        there = counts[cell.line]
        above = bisect(there, cell.elements)
        around = [replace(cell, elements=count) for count in there[max(0, above - 1) : above + 1]]
        same = (each in selection and digest_of(selection[each]) == digest_of(buckets[each]) for each in around)
        if not cell.is_bucket and around and all(same):
            found[cell] = trial
    return found


def arithmetic_of(bundle: Bundle) -> dict[Problem, str]:
    """Problem → arithmetic, as `write_bundle` takes it besides the winners of a bundle."""
    return {problem: bundle.arithmetic(problem) for problem in bundle.problems()}


def write_selection(
    path: str | os.PathLike[str], arch: str, selection: Selection, arithmetic: Mapping[Problem, str]
) -> None:
    """`write_bundle` with the kernels of the trials. Raises what it raises."""
    write_bundle(path, arch, selection, kernels_of(selection).__getitem__, arithmetic)


def kernels_of(selection: Selection) -> dict[str, Kernel]:
    """The kernels of winners by their digests."""
    return {trial.kernel.digest: trial.kernel for trial in selection.values() if trial.kernel}


def _trial(entry: BundleEntry, kernel: Kernel) -> Trial:
    return Trial(
        problem=entry.problem,
        arch=entry.arch,
        knobs=dict(entry.knobs),
        outcome=Outcome.OK,
        provenance=entry.provenance,
        kernel=kernel,
        errors=dict(entry.errors),
        timings=tuple(
            Timing(entry.elements, entry.destination, cache, us, us, us, copy_us)
            for cache, (us, copy_us) in entry.times.items()
        ),
        environment=entry.environment,
        date=entry.date,
    )
