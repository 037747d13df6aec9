"""Winners for an arch without a measured GPU: recipes of another arch, ranked by the cost model.

Only a recipe that won on a measured GPU may win here: the cost model would choose much slower kernels too. Such a
recipe is taken as it is where it is legal on the arch, and else the nearest legal knobs. Where nothing is legal there
is no winner, and PyTorch computes the transform.

The model does not see all that makes one kernel faster than another. So among kernels that it cannot tell apart, the
one that won on a measured GPU with as many elements for each SM ranks first. On the recordings of an H100, that comes
nearer to the best kernel, and loses nothing where the winners have quite other element counts.

No kernel runs. So these winners are marked `estimated` and have no errors: a call compares a kernel that is compiled
there with PyTorch first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hadagen.errors import StorageError, UsageError
from hadagen.plan.arch import Arch
from hadagen.plan.costmodel import MODEL_ERROR, Estimate
from hadagen.plan.knobs import Knobs, plan_of
from hadagen.plan.space import Space
from hadagen.problem.launch import ENTRY
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination, element_buckets, nearest
from hadagen.problem.trial import Environment, Kernel, Outcome, Provenance, Trial, recipe_digest
from hadagen.tuner.estimate import timings
from hadagen.tuning_db.bundle import Bundle, BundleEntry
from hadagen.tuning_db.make import measured_in
from hadagen.tuning_db.merge import Selection, write_selection
from hadagen.tuning_db.winners import cell_value, digest_of, invariant_arithmetic, portfolio_of, ranked_by_cell

DIGITS = 3  # significant digits of a time that is written; no estimate is more precise

# Knobs of a problem → for each destination and element count, the share of the measured GPUs on which they won there.
Recipes = dict[tuple[Problem, Knobs], dict[tuple[Destination, int], float]]


def estimate_bundle(source: Bundle, arch: Arch, path: Path) -> Selection:
    """Write the estimated winners of an arch to a bundle at `path`, and return them. Equal sources give equal bytes.

    source: the recipes are those of its measured winners, and for a problem without any, of its estimated ones.

    Raises `UsageError` if the source is of this arch, or the bundle at `path` has measured winners, which would be
    lost. Raises `StorageError` if the source has none, or as `write_bundle` does.
    """
    if measured_in(path):
        raise UsageError(f"{path} has measured winners, and they would be lost; name another place")
    selection, arithmetic = estimated_winners(source, arch)
    write_selection(path, arch.name, selection, arithmetic)
    return selection


def estimated_winners(source: Bundle, arch: Arch) -> tuple[Selection, dict[Problem, str]]:
    """The winners of an arch, each with the time that decides in its cell, and their `invariant_arithmetic`. Raises as
    `estimate_bundle` does."""
    if source.arch == arch.name:
        raise UsageError(f"{source.path} has winners of {arch.name} already; estimate those of another arch")
    entries = list(source.all_entries())
    measured = [entry for entry in entries if entry.provenance is Provenance.MEASURED]
    if not measured:
        raise StorageError(f"{source.path} has no measured winners to estimate from; name a bundle that has some")
    date, known = max(entry.date for entry in measured), {entry.problem for entry in measured}
    entries = [entry for entry in entries if entry.provenance is Provenance.MEASURED or entry.problem not in known]
    trials: dict[str, Trial] = {}
    favored = []
    for (problem, knobs), won in _recipes(entries, arch).items():
        trial = _trial(problem, knobs, arch, date)
        trials[digest_of(trial)] = trial
        times = (replace(t, us=t.us / (1 + MODEL_ERROR * won[t.destination, t.elements])) for t in trial.timings)
        favored.append(replace(trial, timings=tuple(times)))
    rankings = ranked_by_cell(favored)
    winners = portfolio_of(rankings)
    selection = {
        cell: _in_cell(trials[digest_of(trial)], cell.destination, cell.elements) for cell, trial in winners.items()
    }
    return selection, invariant_arithmetic(winners, rankings)


def _recipes(entries: Iterable[BundleEntry], arch: Arch) -> Recipes:
    """The recipes that may win on an arch, and where each won with as many elements for each SM."""
    spaces: dict[Problem, Space] = {}
    legal: dict[tuple[Problem, Knobs], Knobs | None] = {}
    # For each GPU, with its number of SMs: the winner at each element count.
    lines: dict[tuple[Problem, Destination, str, int], dict[int, Knobs]] = defaultdict(dict)
    for entry in reversed(list(entries)):  # the winner of a cell comes after its portable one
        problem, knobs = entry.problem, Knobs.like(entry.knobs)
        if (problem, knobs) not in legal:
            legal[problem, knobs] = spaces.setdefault(problem, Space(problem, arch)).closest(knobs)
        line = lines[problem, entry.destination, entry.gpu, entry.environment.sms]
        fits = entry.launch.cluster <= arch.limits.cluster_blocks
        if (found := legal[problem, knobs]) and (fits or entry.elements not in line):
            line[entry.elements] = found
    recipes: Recipes = {(problem, found): defaultdict(float) for (problem, _), found in legal.items() if found}
    gpus = Counter((problem, destination) for problem, destination, _, _ in lines)
    for (problem, destination, _, sms), line in lines.items():
        for elements in element_buckets(problem) if line else ():
            there = nearest(sorted(line), elements * sms // arch.model.sms)
            recipes[problem, line[there]][destination, elements] += 1 / gpus[problem, destination]
    return recipes


def _trial(problem: Problem, knobs: Knobs, arch: Arch, date: str) -> Trial:
    """The estimate of a kernel that is compiled where it is called."""
    plan, model = plan_of(problem, knobs, starts_early=arch.starts_early), arch.model
    digest = recipe_digest(problem, knobs.to_dict(), plan.launch)
    return Trial(
        problem=problem,
        arch=arch.name,
        knobs=knobs.to_dict(),
        outcome=Outcome.OK,
        provenance=Provenance.ESTIMATED,
        kernel=Kernel(digest, ENTRY, arch.name, "", b"", b"", plan.launch, 0, 0, ""),
        timings=timings(Estimate(plan, arch), problem, arch),
        environment=Environment(compute_capability=arch.compute_capability, sms=model.sms, l2_bytes=model.l2_bytes),
        date=date,
    )


def _in_cell(trial: Trial, destination: Destination, elements: int) -> Trial:
    """The trial with the time that decides in a cell alone, in `DIGITS` digits: it is all that a call reads, and short
    numbers make a small file."""
    decided = cell_value(trial, destination, elements, trial.environment.l2_bytes)
    assert decided is not None  # or it would not win there
    us, copy_us = (float(f"{time:.{DIGITS}g}") for time in (decided.us, decided.copy_us))
    return replace(trial, timings=(replace(decided, us=us, us_low=us, us_high=us, copy_us=copy_us),))
