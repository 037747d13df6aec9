"""`hadagen tune`: search, refine between the sizes that were searched, then write a bundle of the winners."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from statistics import geometric_mean
from threading import Event
from typing import TYPE_CHECKING

import click

from hadagen.cli import options
from hadagen.cli.bundle import bundle_place
from hadagen.cli.device import find_target, find_toolchain, measuring, refusal
from hadagen.cli.listing import winner_values
from hadagen.cli.output import (
    PROBLEM_HEADERS,
    clock_text,
    counted,
    print_json,
    print_table,
    problem_cells,
    range_text,
    report_failures,
    say,
)
from hadagen.cli.sentences import keeping
from hadagen.errors import DeviceError, StorageError, UsageError
from hadagen.problem import Problem, check_tunable
from hadagen.trial import Disturbed, Outcome, Provenance

if TYPE_CHECKING:
    from hadagen.arch import Arch
    from hadagen.knobs import Knobs
    from hadagen.measure import Cell, Runner, Variant
    from hadagen.toolchain import Toolchain
    from hadagen.trial import Environment, Trial
    from hadagen.tuner.study import Scores
    from hadagen.tuning_db.store import Store

# The words of the table at the end, which are those of the lines while it runs.
LEGEND = (
    "As a fraction of the speed of a plain copy: the mean over n, and in brackets the least and the most.\n"
    "latency: up to {latency} elements; L2: more, found in the L2 cache; memory: found in device memory"
)
NOT_MEASURED = (
    "there is no {arch} GPU here, so kernels are verified on the CPU and ranked by a cost model, and every winner is "
    "only estimated; run the same command on a machine with such a GPU to measure"
)
REFINE_SHARE = 0.2  # of a time budget; the rest is for the search
MOST_FAILURES = 5  # of kernels that were right when they were tuned; then it is the device


@click.command()
@click.option("--arch", help="Target architecture.  [default: that of the GPU here, or sm90]")
@options.problems()
@options.only
@click.option(
    "--trials",
    type=int,
    help="Trials of each problem, those of earlier runs included; pitched problems get a quarter. 0 only refines.",
)
@click.option(
    "--refine/--no-refine",
    default=True,
    show_default=True,
    help="Whether to find winners between the sizes of the search too. Needs a GPU; estimates are not refined.",
)
@click.option(
    "--time-budget",
    type=float,
    metavar="SECONDS",
    help="Begin nothing after this long; with refining, the search has four fifths of it.  [default: no limit]",
)
@options.compiler
@options.db
@options.bundle
@click.option("--device", type=int, metavar="INDEX", help="CUDA device to measure on.  [default: 0]")
@click.option(
    "--from-winners/--from-scratch",
    default=True,
    show_default=True,
    help="Whether to try first what wins in the bundles there are. Trials in the database count either way.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed and same timings: same search.")
@options.as_json
@keeping()
def tune(
    arch: str | None,
    problems: list[Problem],
    only: dict[str, list[int | str]],
    trials: int | None,
    refine: bool,
    time_budget: float | None,
    compiler: str,
    db: str | None,
    bundle: Path | None,
    device: int | None,
    from_winners: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Search for the fastest kernels, and write the winners to a bundle.

    All kernels are timed at the same sizes. Then the best of each problem are timed between these sizes. A winner is
    added wherever calls would clearly be slower without it. --no-refine leaves that out. If several runs share a
    database, the last to end does it. Every finished trial and time is kept at once. A run that was interrupted goes on
    where it was when it is started again. Without a GPU of the architecture, kernels are verified on the CPU and ranked
    by a model, and the output says so.
    """
    from hadagen.cli.progress import in_parts, shown
    from hadagen.tuner.estimate import EstimateRunner
    from hadagen.tuner.refine import refine as look_between
    from hadagen.tuner.search import TuneOptions, check_effort
    from hadagen.tuner.search import tune as search
    from hadagen.tuning_db.bundle import Bundle
    from hadagen.tuning_db.make import check_keeps_winners, make_bundle

    started = time.monotonic()
    check_effort(trials, time_budget)
    check_tunable(problems)
    target, gpu = find_target(arch, device)
    target = target.narrowed(only)
    if trials == 0 and not (gpu and refine):
        raise UsageError(
            f"trials = 0 leaves only refining, which needs a GPU of {target.name} and no --no-refine; give 1 trial or "
            "more"
        )
    path = bundle_place(bundle, target.name, db)
    provenance = f"measuring on {gpu.gpu}" if gpu else NOT_MEASURED.format(arch=target.name)
    toolchain, stop = find_toolchain(compiler), Event()
    failures: list[str] = []
    with options.open_db(db, new=trials != 0) as store, keeping(_what_is_kept(store, target.name, db, bundle)):
        options.check_writable(store)
        to_come = [(problem, gpu.gpu) for problem in problems] if gpu and trials != 0 else []
        check_keeps_winners(path, store, target.name, to_come)
        known = _known_winners(target, problems) if gpu and from_winners else {}
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        say(f"tuning {count} for {target.name}; {provenance}", err=True)
        say(f"every trial is kept in {store.place}", err=True)
        to_search = time_budget and time_budget * (1 - REFINE_SHARE if gpu and refine else 1)
        runs: AbstractContextManager[Runner] = (
            measuring(gpu, device or 0, toolchain) if gpu else nullcontext(EstimateRunner(target, stop))
        )
        with runs as runner, shown(to_search) as listen:
            wanted = TuneOptions(
                arch=target,
                problems=problems,
                store=store,
                runner=runner,
                build=in_parts(lambda sources: toolchain.build(sources, target, stopped=stop), listen),
                trials=trials,
                time_budget=to_search,
                seed=seed,
                known=known,
                stopped=stop,
            )
            report = search(wanted, listen)
        if report.stopped == "interrupted":
            raise KeyboardInterrupt
        if gpu and refine and not report.under_way:  # else the run that ends last refines
            if trials != 0:
                make_bundle(store, target.name, path)  # found by calls, however long refining takes
            measure = partial(_timed_again, gpu, device or 0, toolchain, failures)
            deadline = started + (time_budget or inf)
            if not look_between(problems, store, target.name, gpu, measure, deadline) and trials == 0:
                raise UsageError(f"{store.place} has no trial of such problems on {gpu.gpu}; tune them here first")
        selection = make_bundle(store, target.name, path)
        place = store.place
    seconds = time.monotonic() - started
    stopped = report.stopped or ("out of time" if seconds > (time_budget or inf) else "")
    gpu_name = report.environment.gpu
    ours = [cell for cell in selection if cell.gpu == gpu_name and cell.problem in problems]
    between = sum(not (cell.is_bucket or cell.portable) for cell in ours)
    if as_json:
        written = Bundle.open(path)
        entries = [entry for problem in problems for entry in written.entries(problem) if entry.gpu == gpu_name]
        print_json(
            {
                "arch": target.name,
                "gpu": gpu_name,
                "estimated": report.estimated,
                "database": place,
                "bundle": str(path),
                "trials": report.finished,
                "trials_before": report.finished_before,
                "trials_of_other_runs": report.elsewhere,
                "under_way_in_other_runs": report.under_way,
                "outcomes": {outcome.value: count for outcome, count in report.outcomes.items()},
                "seconds": seconds,
                "stopped": stopped,
                "between": between,
                "winners": [winner_values(entry) for entry in entries],
            }
        )
    else:
        if report.best:
            _print_best(report.best)
            click.echo()
        new = f"{sum(report.outcomes.values())} new trials"
        new += f", {report.elsewhere} more of other runs" if report.elsewhere else ""
        end = f", {stopped}" if stopped else ""
        say(f"{new} in {clock_text(seconds)}{end}; the winners are in {path}")
        if report.under_way:
            say(f"other runs have {report.under_way} trials under way; hadagen bundle make adds what these find")
        if gpu and refine:
            say(f"{between} of {len(ours)} winners are between the sizes of the search")
        say(f"every winner: {shlex.join(['hadagen', 'bundle', 'show', '--all', str(path)])}")
        say(f"estimated: {provenance}" if report.estimated else f"measured on {gpu_name}")
    report_failures(failures, DeviceError)


def _timed_again(
    gpu: Environment,
    index: int,
    toolchain: Toolchain,
    failures: list[str],
    cells: Mapping[Problem, Sequence[Cell]],
    variants: Sequence[Variant],
) -> Iterator[Trial]:
    """Times kernels on a device at `cells`, and adds a sentence to `failures` for each that fails. Raises `DeviceError`
    when `MOST_FAILURES` have failed, or if the device is busy or throttled for long."""
    say(f"refining: timing {len(variants)} kernels between the sizes of the search", err=True)
    with measuring(gpu, index, toolchain, cells=cells, give_up=inf) as runner:  # slow here may be fast there
        for variant, trial in runner.run(counted(variants, "timing")):
            if isinstance(trial, Disturbed):
                said = f"kernels of {variant.problem.key} were not timed again, because {trial.reason}; {trial.advice}"
                failures += [said] if said not in failures else []
                continue
            if trial.outcome is not Outcome.OK and variant.kernel:
                lost = trial.outcome in (Outcome.WRONG_ANSWER, Outcome.UNSTABLE)
                advice = "it wins nothing any more" if lost else "it was left out"
                failures.append(refusal(trial.problem, variant.kernel.digest, trial, advice))
                if len(failures) == MOST_FAILURES:
                    raise DeviceError(f"{failures[-1]}; that many fail where the device does; run hadagen doctor")
            yield trial


def _what_is_kept(store: Store, arch: str, db: str | None, bundle: Path | None) -> str:
    """What is said at Ctrl-C: where trials are, and how they become a bundle."""
    make = ["hadagen", "bundle", "make", "--arch", arch]
    make += ["--db", store.place] * (db is not None) + [str(bundle)] * (bundle is not None)
    return (
        f"every finished trial is kept in {store.place}, and the same command goes on from there; "
        f"to write a bundle of what has won so far: {shlex.join(make)}"
    )


def _known_winners(arch: Arch, problems: Sequence[Problem]) -> dict[Problem, list[Knobs]]:
    """What wins in the bundles there are for the arch, the knobs of most cells first: by measurement on any GPU, or by
    estimate if no winner of the problem was measured. A problem with a matrix that has none gets the winners of the
    most similar one."""
    from hadagen.knobs import Knobs
    from hadagen.runtime import bundles
    from hadagen.tuner.search import nearest_matrices

    here = [bundle for bundle in bundles.known() if bundle.arch == arch.name]
    tuned = {problem for bundle in here for problem in bundle.problems()}
    like = dict(zip(problems, problems, strict=True))
    for problem in like.keys() - tuned:
        if problem.order > 1:
            like[problem] = next(iter(nearest_matrices(problem, tuned)), problem)
    cells: dict[Problem, dict[Provenance, Counter[Knobs]]]
    cells = {problem: {provenance: Counter() for provenance in Provenance} for problem in like.values()}
    for bundle in here:
        try:
            for problem, found in cells.items():
                for entry in bundle.entries(problem):
                    found[entry.provenance][Knobs.like(entry.knobs)] += 1
        except StorageError as error:
            say(f"not beginning with its winners: {error}", err=True)
    most = {
        problem: [knobs for knobs, _ in (found[Provenance.MEASURED] or found[Provenance.ESTIMATED]).most_common()]
        for problem, found in cells.items()
    }
    return {problem: most[similar] for problem, similar in like.items()}


def _print_best(best: Mapping[Problem, Scores]) -> None:
    """A line for the problems that differ in n alone, with what the lines of the search called best so far."""
    from hadagen.tuner.mirror import REGIMES
    from hadagen.tuner.study import LATENCY_ELEMENTS

    groups: dict[tuple[str, ...], dict[int, Scores]] = {}
    for problem, scores in best.items():
        groups.setdefault(problem_cells(problem)[1:], {})[problem.n] = scores
    print_table(
        (*PROBLEM_HEADERS[1:], "n", *REGIMES),
        ((*kind, range_text(found), *map(_mean, zip(*found.values(), strict=True))) for kind, found in groups.items()),
    )
    click.echo(LEGEND.format(latency=options.short_elements(LATENCY_ELEMENTS)))


def _mean(fractions: Sequence[float]) -> str:
    known = [fraction for fraction in fractions if fraction]  # 0 where nothing was timed
    if len(known) < 2:
        return f"{known[0]:.2f}" if known else "-"
    return f"{geometric_mean(known):.2f} ({min(known):.2f}-{max(known):.2f})"
