"""`hadagen tune`: search, refine between the sizes that were searched, then write a bundle of the winners."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import geometric_mean
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from hadagen.cli import options
from hadagen.cli.bundle import bundle_place, unused_text
from hadagen.cli.listing import winner_values
from hadagen.cli.output import (
    PROBLEM_HEADERS,
    clock_text,
    fraction_text,
    print_json,
    print_table,
    problem_cells,
    range_text,
    report_failures,
    say,
)
from hadagen.cli.sentences import keeping
from hadagen.errors import DeviceError, StorageError, UsageError
from hadagen.problem.problem import Numerics, Problem, check_tunable
from hadagen.problem.regimes import LATENCY_ELEMENTS, REGIMES
from hadagen.problem.trial import Environment, Provenance
from hadagen.report.names import short_count
from hadagen.runtime import bundles
from hadagen.runtime.bundles import why_unused
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.winners import WinnerCell

if TYPE_CHECKING:
    from hadagen.cli.searchers import Searcher
    from hadagen.plan.arch import Arch
    from hadagen.plan.knobs import Knobs
    from hadagen.tuner.events import TuneReport
    from hadagen.tuner.study import Scores
    from hadagen.tuning_db.store import Store

# The words of the table at the end, which are those of the lines while it runs.
LEGEND = (
    "As a fraction of the speed of a plain copy: the mean over n, and in brackets the least and the most.\n"
    "latency: up to {latency} elements; L2: more, found in the L2 cache; memory: found in device memory;\n"
    "-: not timed, because rows of this length are only timed at more elements"
)
NOT_MEASURED = (
    "there is no {arch} GPU here, so kernels are verified on the CPU and ranked by a cost model, and every winner is "
    "only estimated; run the same command on a machine with such a GPU to measure"
)
REFINE_SHARE = 0.2  # of a time budget; the rest is for the search


@click.command()
@click.option("--arch", help="Target architecture.  [default: arch of the GPU, or sm90; all archs of a fleet]")
@options.problems()
@options.only
@click.option(
    "--trials",
    type=int,
    help="Trials of each problem, including trials of earlier runs; pitched problems get a quarter. 0 only refines.",
)
@click.option(
    "--refine/--no-refine",
    default=True,
    show_default=True,
    help="Whether to also find winners between the sizes of the search. Needs a GPU; estimates are not refined.",
)
@click.option(
    "--time-budget",
    type=float,
    metavar="SECONDS",
    help="Begin no trial after this time; with --refine, the search gets four fifths of it.  [default: no limit]",
)
@options.compiler
@options.db
@options.bundle
@click.option("--device", type=int, metavar="INDEX", help="CUDA device to measure on.  [default: 0]")
@click.option(
    "--fleet",
    metavar="ADDRESS",
    help="Tune on the workers of a Dask cluster, such as tls://HOST:8786, or `local` for all GPUs of this machine. "
    "Every class of GPUs gets its own winners. Without --arch, all archs of the workers are tuned.",
)
@click.option(
    "--from-winners/--from-scratch",
    default=True,
    show_default=True,
    help="Whether to try the winners of existing bundles first. Trials in the database count either way.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="With the same seed and timings, the search is the same, except on a fleet.",
)
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
    fleet: str | None,
    from_winners: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Search for the fastest kernels, and write the winners to a bundle.

    All kernels are timed at the same sizes. Then the best kernels of each problem are timed between these sizes, and a
    winner is added wherever calls would clearly be slower without it. --no-refine leaves out this second step. If
    several runs share a database, the last run to end does it. Every finished trial and time is kept at once, and the
    same command continues a run that was interrupted. Without a GPU of the architecture, kernels are verified on the
    CPU and ranked by a model, and the output says so.
    """
    from hadagen.cli.progress import shown
    from hadagen.cli.searchers import place
    from hadagen.tuner.refine import refine as look_between
    from hadagen.tuner.search import TuneOptions, check_effort
    from hadagen.tuner.search import tune as search
    from hadagen.tuning_db.make import check_keeps_winners, make_bundle

    started = time.monotonic()
    check_effort(trials, time_budget)
    check_tunable(problems)
    with place(fleet, arch, only, device, compiler) as where:
        targets = where.targets
        archs = list(dict.fromkeys(target.name for target, _ in targets))
        refine = refine and all(gpu for _, gpu in targets)
        if trials == 0 and not refine:
            raise UsageError(
                f"trials = 0 leaves only refining, which needs a GPU of {archs[0]} and no --no-refine; give 1 trial or "
                "more"
            )
        if bundle is not None and len(archs) > 1:
            raise UsageError(
                f"--bundle names one file, and the fleet has GPUs of {' and '.join(archs)}; choose one with --arch, or "
                "leave --bundle out"
            )
        paths = {name: bundle_place(bundle, name, db) for name in archs}
        with options.open_db(db, new=trials != 0) as store, keeping(_what_is_kept(store, archs, db, bundle)):
            store.check_writable()
            for name, path in paths.items():
                gpus = [gpu.gpu for target, gpu in targets if gpu and target.name == name and trials != 0]
                check_keeps_winners(path, store, name, [(problem, gpu) for problem in problems for gpu in gpus])
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            for target, gpu in targets:
                say(f"tuning {count} for {target.name}; {_provenance(target, gpu)}", err=True)
            say(f"every trial is kept in {store.place}", err=True)
            to_search = time_budget and time_budget * (1 - REFINE_SHARE if refine else 1)
            stop = Event()
            known = {target.name: _known_winners(target, problems) for target, gpu in targets if gpu and from_winners}

            def search_in(searcher: Searcher) -> TuneReport:
                wanted = TuneOptions(
                    arch=searcher.arch,
                    problems=problems,
                    store=store,
                    runner=searcher.runner,
                    build=searcher.build,
                    trials=trials,
                    time_budget=to_search,
                    seed=seed,
                    known=known.get(searcher.arch.name, {}),
                    stopped=stop,
                    work=searcher.work,
                    guess=searcher.guess,
                )
                return search(wanted, searcher.listen)

            def refine_on(target: Arch, gpu: Environment, report: TuneReport) -> None:
                if report.under_way:  # the run that ends last refines
                    return
                found = look_between(
                    problems, store, target.name, gpu, partial(where.again, gpu), started + (time_budget or inf)
                )
                if not found and trials == 0:
                    raise UsageError(f"{store.place} has no trial of such problems on {gpu.gpu}; tune them here first")

            with shown(to_search) as show, where.searchers(problems, trials, stop, show) as searchers:
                reports = where.each([partial(search_in, searcher) for searcher in searchers], stop)
            if any(report.stopped == "interrupted" for report in reports):
                raise KeyboardInterrupt
            if refine:
                if trials != 0:
                    for name, path in paths.items():
                        make_bundle(store, name, path)  # found by calls, however long refining takes
                where.each(
                    [
                        partial(refine_on, target, gpu, report)
                        for (target, gpu), report in zip(targets, reports, strict=True)
                        if gpu
                    ],
                    stop,
                )
            selections = {name: make_bundle(store, name, path) for name, path in paths.items()}
        results = [
            _Result(target, gpu, report, paths[target.name], list(selections[target.name]), problems)
            for (target, gpu), report in zip(targets, reports, strict=True)
        ]
        failures = list(where.failures)
    seconds = time.monotonic() - started
    late = seconds > (time_budget or inf)
    if as_json:
        common = {"database": store.place, "seconds": seconds}
        values = [result.values(late) for result in results]
        print_json(common | (values[0] if fleet is None else {"fleet": fleet, "classes": values}))
    else:
        for result in results:
            result.say(seconds, late, refine)
    report_failures(failures, DeviceError)


@dataclass(frozen=True)
class _Result:
    """The results of a search for an arch, with or without a GPU."""

    target: Arch
    gpu: Environment | None
    report: TuneReport
    path: Path
    selection: Sequence[WinnerCell]
    problems: Sequence[Problem]

    @property
    def _ours(self) -> list[WinnerCell]:
        gpu = self.report.environment.gpu
        return [cell for cell in self.selection if cell.gpu == gpu and cell.problem in self.problems]

    @property
    def _between(self) -> int:
        """How many winners are between the sizes of the search."""
        return sum(not (cell.is_bucket or cell.portable) for cell in self._ours)

    def _stopped(self, late: bool) -> str:
        return self.report.stopped or ("out of time" if late else "")

    def values(self, late: bool) -> dict[str, Any]:
        """For programs."""
        report, written = self.report, Bundle.open(self.path)
        entries = [entry for problem in self.problems for entry in written.entries(problem)]
        return {
            "arch": self.target.name,
            "gpu": report.environment.gpu,
            "estimated": report.estimated,
            "bundle": str(self.path),
            "unused": why_unused(self.path),
            "trials": report.finished,
            "trials_before": report.finished_before,
            "trials_of_other_runs": report.elsewhere,
            "under_way_in_other_runs": report.under_way,
            "outcomes": {outcome.value: count for outcome, count in report.outcomes.items()},
            "stopped": self._stopped(late),
            "between": self._between,
            "winners": [winner_values(entry) for entry in entries if entry.gpu == report.environment.gpu],
        }

    def say(self, seconds: float, late: bool, refined: bool) -> None:
        """For people."""
        report, stopped = self.report, self._stopped(late)
        if report.best:
            _print_best(report.best)
            click.echo()
        new = f"{sum(report.outcomes.values())} new trials"
        new += f", {report.elsewhere} more of other runs" if report.elsewhere else ""
        end = f", {stopped}" if stopped else ""
        say(f"{new} in {clock_text(seconds)}{end}; the winners are in {self.path}{unused_text(self.path)}")
        if report.under_way:
            say(f"other runs have {report.under_way} trials under way; hadagen bundle make adds their winners")
        if refined:
            say(f"{self._between} of {len(self._ours)} winners are between the sizes of the search")
        say(f"every winner: {shlex.join(['hadagen', 'bundle', 'show', '--all', str(self.path)])}")
        provenance = _provenance(self.target, self.gpu)
        say(f"estimated: {provenance}" if report.estimated else f"measured on {report.environment.gpu}")


def _provenance(target: Arch, gpu: Environment | None) -> str:
    return f"measuring on {gpu.gpu}" if gpu else NOT_MEASURED.format(arch=target.name)


def _what_is_kept(store: Store, archs: Sequence[str], db: str | None, bundle: Path | None) -> str:
    """The sentence at Ctrl-C: where trials are kept, and how to make a bundle of them."""
    rest = ["--db", store.place] * (db is not None) + [str(bundle)] * (bundle is not None)
    commands = " and ".join(shlex.join(["hadagen", "bundle", "make", "--arch", arch, *rest]) for arch in archs)
    return (
        f"every finished trial is kept in {store.place}, and the same command continues; "
        f"to write a bundle of the winners so far: {commands}"
    )


def _known_winners(arch: Arch, problems: Sequence[Problem]) -> dict[Problem, list[Knobs]]:
    """The knobs of the winners in all bundles for the arch, the knobs that win most cells first. Winners were measured
    on any GPU, or are estimates if no winner of the problem was measured. A problem without winners gets the winners of
    its other numerics if its result is quantized, and with a matrix the winners of the most similar problem."""
    from hadagen.plan.knobs import Knobs
    from hadagen.runtime.guesses import nearest_problems

    here = [bundle for bundle in bundles.known() if bundle.arch == arch.name]
    tuned = {problem for bundle in here for problem in bundle.problems()}
    like = dict(zip(problems, problems, strict=True))
    for problem in like.keys() - tuned:
        others = [problem.with_io(numerics=each) for each in Numerics] if problem.io.form else []
        others += nearest_problems(problem, tuned) if problem.transform.has_matrix else []
        like[problem] = next((other for other in others if other in tuned), problem)
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
    """A line for the problems that differ only in n, with the values that the progress of the search called best so
    far."""
    groups: dict[tuple[str, ...], dict[int, Scores]] = {}
    for problem, scores in best.items():
        groups.setdefault(problem_cells(problem)[1:], {})[problem.n] = scores
    rows = []
    for kind, found in groups.items():
        by_regime = (dict(zip(found, each, strict=True)) for each in zip(*found.values(), strict=True))
        rows.append((*kind, range_text(found), *map(_mean, by_regime)))
    print_table((*PROBLEM_HEADERS[1:], "n", *REGIMES), rows)
    for line in LEGEND.format(latency=short_count(LATENCY_ELEMENTS)).splitlines():
        say(line)


def _mean(fractions: Mapping[int, float]) -> str:
    """The table cell with the mean of fractions of copy, one for each n. A fraction of 0 was not timed; the cell then
    names the n that were timed."""
    known = {n: fraction for n, fraction in fractions.items() if fraction}
    if not known:
        return "-"
    text = fraction_text(geometric_mean(known.values()))
    if len(known) > 1:
        text += f" ({fraction_text(min(known.values()))}-{fraction_text(max(known.values()))})"
    return text if len(known) == len(fractions) else f"{text} of n = {range_text(known)}"
