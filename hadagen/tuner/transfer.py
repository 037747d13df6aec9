"""Winners for an arch of which no GPU was measured: recipes of another arch, ranked by the cost model.

A recipe that won on a measured GPU is taken as it is where it is legal on the arch. Elsewhere the nearest legal choice
takes its place. What is legal nowhere has no winner, and PyTorch computes it. No kernel runs here. So these winners are
marked `estimated` and have no errors: a call compares a kernel that is compiled there with PyTorch first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hadagen.arch import Arch
from hadagen.costmodel import MODEL_ERROR, Estimate
from hadagen.errors import StorageError, UsageError
from hadagen.knobs import Knobs, plan_of
from hadagen.launch import ENTRY
from hadagen.plan import Plan
from hadagen.problem import Problem
from hadagen.regimes import Destination
from hadagen.space import Space
from hadagen.trial import Environment, Kernel, Outcome, Provenance, Timing, Trial, recipe_digest
from hadagen.tuner.estimate import timings
from hadagen.tuning_db.bundle import Bundle, BundleEntry
from hadagen.tuning_db.make import measured_in
from hadagen.tuning_db.merge import Selection, write_selection
from hadagen.tuning_db.winners import cell_value, portfolio

DIGITS = 3  # of a time that is written; no estimate is more precise


def estimate_bundle(source: Bundle, arch: Arch, path: Path) -> Selection:
    """Write the estimated winners of an arch to a bundle at `path`, and return them. Equal sources give equal bytes.

    source: whose measured winners are the recipes to choose from.

    Raises `UsageError` if the source has measured winners of this arch, or the bundle at `path` has any, which would be
    lost. Raises `StorageError` if the source has none at all, or as `write_bundle` does.
    """
    if measured_in(path):
        raise UsageError(f"{path} has measured winners, and they would be lost; name another place")
    selection = estimated_winners(source, arch)
    write_selection(path, arch.name, selection)
    return selection


def estimated_winners(source: Bundle, arch: Arch) -> Selection:
    """The winners of an arch, with the time that decides in each cell. Raises as `estimate_bundle` does."""
    measured = [entry for entry in source.all_entries() if entry.provenance is Provenance.MEASURED]
    if not measured:
        raise StorageError(f"{source.path} has no measured winners to estimate from; name a bundle that has some")
    if source.arch == arch.name:
        raise UsageError(f"{source.path} has measured winners of {arch.name}; estimate those of another arch")
    date = max(entry.date for entry in measured)
    selection = portfolio(_trials(measured, arch, date), loss=MODEL_ERROR)
    return {cell: _in_cell(trial, cell.destination, cell.elements) for cell, trial in selection.items()}


def _trials(measured: Iterable[BundleEntry], arch: Arch, date: str) -> Iterator[Trial]:
    """A trial for each kernel that may win."""
    spaces: dict[Problem, Space] = {}
    # Many entries have equal knobs, and several knobs may have the same nearest legal ones.
    wanted = dict.fromkeys((entry.problem, Knobs.like(entry.knobs)) for entry in measured)
    found: dict[tuple[Problem, Knobs], None] = {}
    for problem, knobs in wanted:
        space = spaces.setdefault(problem, Space(problem, arch))
        if legal := space.closest(knobs):
            found[problem, legal] = None
    environment = Environment(
        compute_capability=arch.compute_capability, sms=arch.model.sms, l2_bytes=arch.model.l2_bytes
    )
    for problem, knobs in found:
        plan = plan_of(problem, knobs, starts_early=arch.starts_early)
        yield Trial(
            problem=problem,
            arch=arch.name,
            knobs=knobs.to_dict(),
            outcome=Outcome.OK,
            provenance=Provenance.ESTIMATED,
            kernel=_recipe(plan, knobs, arch),
            timings=timings(Estimate(plan, arch), problem, arch),
            environment=environment,
            date=date,
        )


def _recipe(plan: Plan, knobs: Knobs, arch: Arch) -> Kernel:
    """A kernel that is compiled where it is called."""
    digest = recipe_digest(plan.problem, knobs.to_dict(), plan.launch)
    return Kernel(digest, ENTRY, arch.name, "", b"", b"", plan.launch, 0, 0, "")


def _in_cell(trial: Trial, destination: Destination, elements: int) -> Trial:
    """The trial with nothing but the time that decides in a cell, in `DIGITS` digits: this is all that a call reads, and
    short numbers make small files."""
    decided = cell_value(trial, destination, elements, trial.environment.l2_bytes)
    assert decided is not None  # or it would not win there
    us, copy_us = (float(f"{time:.{DIGITS}g}") for time in (decided.us, decided.copy_us))
    return replace(trial, timings=(replace(decided, us=us, us_low=us, us_high=us, copy_us=copy_us),))
