"""`hadagen tune`: search, refine between the sizes that were searched, then write a bundle of the winners."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import click

from hadagen.cli import options
from hadagen.cli.bundle import bundle_place
from hadagen.cli.output import clock_text, counted_text, print_json, program, report_failures, say
from hadagen.cli.products import or_products
from hadagen.cli.sentences import keeping
from hadagen.cli.wanted import FEW, Wanted, by_row_length, heaviest
from hadagen.errors import DeviceError, StorageError, UsageError
from hadagen.problem.problem import Numerics, Problem, check_tunable
from hadagen.problem.trial import Environment, Outcome, Provenance, Trial
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.device import Device

if TYPE_CHECKING:
    from hadagen.cli.progress import Shown
    from hadagen.cli.searchers import Here, Searcher, There
    from hadagen.measure import Cell, Variant
    from hadagen.plan.arch import Arch
    from hadagen.plan.knobs import Knobs
    from hadagen.tuner.events import TuneReport
    from hadagen.tuning_db.merge import Selection
    from hadagen.tuning_db.store import Store

REFINE_SHARE = 0.2  # of the time of a group of problems; the rest is for the search
SECONDS = 60.0  # for the problems of one row length on a GPU
ESTIMATE_SECONDS = 20.0  # for a problem without a GPU, by default
QUICK = 0.5  # the share of these that --quick leaves
WRITE_SHARE = 0.1  # of the time, at most, for bundles that are written before the end


class _Told(click.Command):
    """A command whose context has the arguments as they were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_GIVEN] = tuple(args)
        return super().parse_args(ctx, args)


_GIVEN = "hadagen.given"


@click.command(cls=_Told)
@options.arch_of_target(says="  [default: arch of the GPU, or sm90; all archs of a fleet]")
@options.problems(shipped=True)
@options.only
@click.option(
    "--quick", is_flag=True, help=f"Take half the time: {SECONDS * QUICK:g} s for the problems of one row length."
)
@click.option(
    "--time-budget",
    type=float,
    metavar="SECONDS",
    help="Time for everything, in equal parts for the row lengths.  "
    f"[default: {SECONDS:g} s for each row length; without a GPU {ESTIMATE_SECONDS:g} s for each problem]",
)
@click.option(
    "--trials",
    type=int,
    help="Trials of each problem, including trials of earlier runs; pitched problems get a quarter. Without a time "
    "budget there is then no limit to the time. 0 only refines.  [default: 50; without a GPU 4]",
)
@click.option(
    "--refine/--no-refine",
    default=True,
    show_default=True,
    help="Whether to also find winners between the sizes of the search. Needs a GPU; estimates are not refined.",
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
@or_products
@keeping()
def tune(
    arch: str | None,
    problems: Wanted,
    only: dict[str, list[int | str]],
    quick: bool,
    time_budget: float | None,
    trials: int | None,
    refine: bool,
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

    By default this tunes all problems that hadagen ships kernels for, heaviest first: the weight of a problem is the
    longest time of its shipped kernels. Without a GPU, these are the three heaviest of each kind. The problems of one
    row length are tuned together, within a minute, and calls use their winners from then on.

    All kernels are timed at the same sizes. Then the best kernels of each problem are timed between these sizes, and a
    winner is added wherever calls would clearly be slower without it. --no-refine leaves out this second step. If
    several runs share a database, the last run to end does it. Every finished trial and time is kept at once, and the
    same command continues a run that was interrupted. Without a GPU of the architecture, kernels are verified on the
    CPU and ranked by a model, and the output says so.
    """
    from hadagen.cli.ending import Ending
    from hadagen.cli.progress import shown
    from hadagen.cli.searchers import place
    from hadagen.tuner.events import summed
    from hadagen.tuner.gains import Called, gains
    from hadagen.tuner.search import check_effort
    from hadagen.tuning_db.make import check_keeps_winners

    started = time.monotonic()
    check_effort(trials, time_budget)
    if quick and time_budget is not None:
        raise UsageError("--quick and --time-budget both limit the time; leave out one of them")
    check_tunable(problems.named)
    with place(fleet, arch, only, device, compiler) as where:
        targets = where.targets
        archs = list(dict.fromkeys(target.name for target, _ in targets))
        measured = all(gpu for _, gpu in targets)
        refine = refine and measured
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
        chosen = problems.find(archs)
        if not (measured or problems.by_size):
            chosen = heaviest(chosen)
        limited = quick or trials is None or time_budget is not None
        groups = by_row_length(chosen) if limited else [chosen]
        if time_budget is not None:
            budget = Budget(started, [time_budget / len(groups)] * len(groups), moves=True)
        else:
            each = [SECONDS if measured else ESTIMATE_SECONDS * len(group) for group in groups]
            each = [seconds * (QUICK if quick else 1) for seconds in each]
            budget = Budget(started, each if limited else (), moves=not measured)
        paths = {name: bundle_place(bundle, name, db) for name in archs}
        with options.open_db(db, new=trials != 0) as store, keeping(_what_is_kept(store, archs, db, bundle)):
            store.check_writable()
            for name, path in paths.items():
                gpus = [gpu.gpu for target, gpu in targets if gpu and target.name == name and trials != 0]
                check_keeps_winners(path, store, name, [(problem, gpu) for problem in chosen for gpu in gpus])
            for target, gpu in targets:
                say(_first_line(len(chosen), not problems.by_size, budget, trials, target, gpu), err=True)
            say(f"every trial is kept in {store.place}; Ctrl-C stops, and the same command continues", err=True)
            before = [
                {problem: Called.now(problem, Device(target.name, gpu.gpu if gpu else "")) for problem in chosen}
                for target, gpu in targets
            ]
            known = {target.name: _known_winners(target, chosen) for target, gpu in targets if gpu and from_winners}
            with shown(len(chosen), REFINE_SHARE * refine) as show:
                run = _Run(where, store, paths, trials, refine, known, seed, show, _given_again(db, store))
                for number, group in enumerate(groups):
                    if number == 0 or time.monotonic() < budget.end:
                        run.tune(group, budget.until(number), budget.seconds[number + 1 :])
                if trials == 0 and not run.refined:
                    names = " or ".join(gpu.gpu for _, gpu in targets if gpu)
                    raise UsageError(f"{store.place} has no trial of such problems on {names}; tune them here first")
                selections = run.write()
            stopped = "out of time" if run.is_late or time.monotonic() >= budget.end else ""
            endings = [
                Ending(
                    target,
                    gpu,
                    report := summed(reports),
                    report.stopped or stopped,
                    paths[target.name],
                    list(selections[target.name]),
                    chosen,
                    called,
                    gains(called, selections[target.name], store, gpu.gpu) if gpu else [],
                )
                for (target, gpu), reports, called in zip(targets, zip(*run.reports, strict=True), before, strict=True)
            ]
        failures = list(where.failures)
    seconds = time.monotonic() - started
    if as_json:
        common = {"database": store.place, "seconds": seconds}
        values = [ending.values() for ending in endings]
        print_json(common | (values[0] if fleet is None else {"fleet": fleet, "classes": values}))
    else:
        for ending in endings:
            ending.say(seconds)
    report_failures(failures, DeviceError)


@dataclass(frozen=True)
class Budget:
    """The time for a tune. `started`: when it began, by `time.monotonic`. `seconds`: those for each group of problems;
    none if there is no limit. `moves`: whether time that a group leaves is for the groups after it."""

    started: float
    seconds: Sequence[float] = ()
    moves: bool = False

    @property
    def end(self) -> float:
        return self.started + (sum(self.seconds) if self.seconds else inf)

    def until(self, number: int) -> float:
        """When the group of this number, which begins now, has to end."""
        latest = self.end - sum(self.seconds[number + 1 :])
        return latest if self.moves or not self.seconds else min(latest, time.monotonic() + self.seconds[number])


@dataclass
class _Run:
    """Tunes one group of problems after another. `paths`: of the bundles, by arch."""

    where: Here | There
    store: Store
    paths: Mapping[str, Path]
    trials: int | None
    refines: bool
    known: Mapping[str, Mapping[Problem, Sequence[Knobs]]]  # by arch
    seed: int
    show: Callable[[Shown], None]
    command: str  # this one, as it was given
    reports: list[list[TuneReport]] = field(default_factory=list)  # of each group, for each target
    refined: set[Problem] = field(default_factory=set)
    is_late: bool = False  # whether refining could not end in time
    _selections: dict[str, Selection] | None = None  # the winners by arch, if they were written since the last trial
    _written: float = -inf  # when bundles were written last
    _writing: float = 0.0  # the seconds that it took

    def tune(self, group: Sequence[Problem], until: float, later: Sequence[float]) -> None:
        """Search, write and refine. `until`: when all this has to end. `later`: the seconds for the groups after it."""
        from hadagen.cli.progress import GroupStarted

        where, stop = self.where, Event()
        left = until - time.monotonic()
        self.show(GroupStarted(len(group), None if left == inf else left, later))
        self._selections = None
        to_search = (left - self._writing) * (1 - REFINE_SHARE * self.refines)
        with where.searchers(group, self.trials, stop, self.show) as searchers:
            search = partial(self._search, group, None if left == inf else max(to_search, _NO_TIME), stop)
            self.reports.append(where.each([partial(search, searcher) for searcher in searchers], stop))
        if any(report.stopped == "interrupted" for report in self.reports[-1]):
            raise KeyboardInterrupt
        is_due = time.monotonic() - self._written >= self._writing / WRITE_SHARE
        if is_due and all(
            any(each[i].outcomes.get(Outcome.OK) for each in self.reports) for i in range(len(searchers))
        ):
            self.write()  # found by calls, however long the rest takes
        if self.refines:
            refine = partial(self._refine, group, until - self._writing)
            where.each(
                [
                    partial(refine, target, gpu, report)
                    for (target, gpu), report in zip(where.targets, self.reports[-1], strict=True)
                    if gpu
                ],
                stop,
            )

    def _search(self, group: Sequence[Problem], seconds: float | None, stop: Event, searcher: Searcher) -> TuneReport:
        from hadagen.tuner.search import TuneOptions
        from hadagen.tuner.search import tune as search

        wanted = TuneOptions(
            arch=searcher.arch,
            problems=group,
            store=self.store,
            runner=searcher.runner,
            build=searcher.build,
            trials=self.trials,
            time_budget=seconds,
            seed=self.seed,
            known=self.known.get(searcher.arch.name, {}),
            stopped=stop,
            work=searcher.work,
            guess=searcher.guess,
        )
        return search(wanted, searcher.listen)

    def _refine(
        self, group: Sequence[Problem], deadline: float, target: Arch, gpu: Environment, report: TuneReport
    ) -> None:
        from hadagen.cli.searchers import Again
        from hadagen.tuner.refine import refine

        if report.under_way:  # the run that ends last refines
            self.refined.update(group)
            return

        def again(cells: Mapping[Problem, Sequence[Cell]], variants: Sequence[Variant]) -> Iterator[Trial]:
            self._selections = None
            yield from self.where.again(gpu, Again(self.show, deadline), cells, variants)

        self.refined.update(refine(group, self.store, target.name, gpu, again, deadline))
        self.is_late |= time.monotonic() >= deadline - 1  # then `Again` has ended it

    def write(self) -> dict[str, Selection]:
        """Write the winners so far, unless they were written since the last trial. Returns them by arch."""
        from hadagen.cli.progress import Writing
        from hadagen.tuning_db.make import make_bundle

        if self._selections is None:
            self.show(Writing())
            began = time.monotonic()
            self._selections = {
                name: make_bundle(self.store, name, path, command=self.command) for name, path in self.paths.items()
            }
            self._written = time.monotonic()
            self._writing = self._written - began
        return self._selections


_NO_TIME = 1e-9  # seconds


def _first_line(
    count: int, by_default: bool, budget: Budget, trials: int | None, target: Arch, gpu: Environment | None
) -> str:
    """What will be tuned, and how long that takes."""
    problems = counted_text(count, "problem")
    if gpu:
        what = f"tuning {problems} for {target.name}, heaviest first; measuring on {gpu.gpu}"
    else:
        which = f", the {FEW} heaviest of each kind," if by_default else ""
        what = (
            f"tuning {problems}{which} for {target.name}; there is no {target.name} GPU here, so kernels are verified "
            "on the CPU and ranked by a cost model"
        )
    if not budget.seconds:
        return f"{what}; {counted_text(trials or 0, 'trial')} for each problem, without a limit to the time"
    lengths = f", {budget.seconds[0]:g} s for each of {len(budget.seconds)} row lengths"
    lengths = lengths if gpu and len(budget.seconds) > 1 else ""
    return f"{what}; this takes at most {clock_text(sum(budget.seconds))}{lengths}"


def _what_is_kept(store: Store, archs: Sequence[str], db: str | None, bundle: Path | None) -> str:
    """The sentence at Ctrl-C: where trials are kept, and how to make a bundle of them."""
    rest = ["--db", store.place] * (db is not None) + [str(bundle)] * (bundle is not None)
    commands = " and ".join(f"{program()} {shlex.join(['bundle', 'make', '--arch', arch, *rest])}" for arch in archs)
    return (
        f"every finished trial is kept in {store.place}, and the same command continues; "
        f"to write a bundle of the winners so far: {commands}"
    )


def _given_again(db: str | None, store: Store) -> str:
    """This command with the options that it was given. The place of the database shows no password."""
    places = {db: store.place, f"--db={db}": f"--db={store.place}"}
    given = click.get_current_context().meta[_GIVEN]
    return f"{program()} {shlex.join(['tune', *(places.get(each, each) for each in given)])}"


def _known_winners(arch: Arch, problems: Sequence[Problem]) -> dict[Problem, list[Knobs]]:
    """The knobs of the winners in all bundles for the arch, the knobs that win most cells first. Winners were measured
    on any GPU, or are estimates if no winner of the problem was measured. A problem without winners gets the winners of
    its other numerics if its result is quantized, and with a matrix the winners of the most similar problem."""
    from hadagen.plan.knobs import Knobs
    from hadagen.runtime.choose.guesses import nearest_problems

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
