"""`hadagen tune`: search, then write a bundle of the winners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hadagen.cli import options
from hadagen.cli.bundle import bundle_place, keep_winners, select_winners
from hadagen.cli.device import device_runner, find_gpu
from hadagen.cli.listing import winner_values
from hadagen.cli.output import PROBLEM_HEADERS, clock_text, print_json, print_table, problem_cells
from hadagen.cli.sentences import keeping
from hadagen.errors import HadagenError, StorageError
from hadagen.problem import Problem
from hadagen.trial import Destination, Provenance

if TYPE_CHECKING:
    from hadagen.arch import Arch
    from hadagen.knobs import Knobs
    from hadagen.measure import Runner
    from hadagen.toolchain import Toolchain
    from hadagen.trial import Environment
    from hadagen.tuning_db.bundle import BundleEntry

# Where the table at the end looks: rows · n of a small input, one in L2, and a large one; by whether rows are pitched.
SHOWN_ELEMENTS = {
    False: {"64K": 1 << 16, "8M": 1 << 23, "256M": 1 << 28},
    True: {"64K": 1 << 16, "1M": 1 << 20, "128M": 1 << 27},
}
NOT_MEASURED = (
    "there is no {arch} GPU here, so kernels are verified on the CPU and ranked by a cost model, and every winner is "
    "only estimated; run the same command on a machine with such a GPU to measure"
)


@click.command()
@click.option("--arch", help="Target architecture.  [default: that of the GPU here, or sm90]")
@options.problems
@options.only
@click.option("--trials", type=int, help="Trials of each problem, those of earlier runs included; pitched: a quarter.")
@click.option(
    "--time-budget",
    type=float,
    metavar="SECONDS",
    help="Begin nothing after this long.  [default: no limit]",
)
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
    time_budget: float | None,
    db: str | None,
    bundle: Path | None,
    device: int | None,
    from_winners: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Search for the fastest kernels, and write them to a bundle that calls find.

    Every finished trial is kept at once: a run that was interrupted goes on where it was when it is started again.
    Without a GPU of the architecture, kernels are verified on the CPU and ranked by a model, and say so.
    """
    from hadagen.arch import load_arch
    from hadagen.cli.progress import shown
    from hadagen.toolchain import Toolchain
    from hadagen.tuner import TuneOptions, check_effort
    from hadagen.tuner import tune as search
    from hadagen.tuning_db.bundle import Bundle
    from hadagen.tuning_db.bundle_writer import write_bundle
    from hadagen.tuning_db.store import Store

    check_effort(trials, time_budget)
    gpu = find_gpu(device)
    if arch is None:
        arch = options.arch_of(gpu) if gpu else options.DEFAULT_ARCH
    target = load_arch(arch).narrowed(only)
    if gpu and options.arch_of(gpu) != target.name:
        gpu = None
    path = bundle_place(bundle, target.name, db)
    provenance = f"measuring on {gpu.gpu}" if gpu else NOT_MEASURED.format(arch=target.name)
    toolchain = Toolchain.find()
    with Store.open(db or options.default_db()) as store, _runner(target, gpu, device or 0, toolchain) as runner:
        options.check_writable(store)
        to_come = [(problem, gpu.gpu) for problem in problems] if gpu else []
        keep_winners(path, store, target.name, to_come)
        wanted = TuneOptions(
            arch=target,
            problems=problems,
            store=store,
            runner=runner,
            build=lambda sources: toolchain.build(sources, target),
            trials=trials,
            time_budget=time_budget,
            seed=seed,
            known=_known_winners(target, problems) if gpu and from_winners else {},
        )
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        click.echo(f"tuning {count} for {target.name}; {provenance}", err=True)
        click.echo(f"every trial is kept in {store.place}", err=True)
        with shown(time_budget) as listen:
            report = search(wanted, listen)
        if report.stopped == "interrupted":
            raise KeyboardInterrupt
        selection = select_winners(store, target.name, path)
        if not selection:
            raise HadagenError(f"none of {report.finished} trials has won anything yet; give more time or more trials")
        write_bundle(path, target.name, selection, store.kernel)
        place = store.place
    written = Bundle.open(path)
    gpu_name = report.environment.gpu
    entries = [entry for problem in problems for entry in written.entries(problem) if entry.gpu == gpu_name]
    if as_json:
        print_json(
            {
                "arch": target.name,
                "gpu": gpu_name,
                "estimated": report.estimated,
                "database": place,
                "bundle": str(path),
                "trials": report.finished,
                "trials_before": report.finished_before,
                "outcomes": {outcome.value: count for outcome, count in report.outcomes.items()},
                "seconds": report.seconds,
                "stopped": report.stopped,
                "winners": [winner_values(entry) for entry in entries],
            }
        )
        return
    _print_winners(entries)
    new, stopped = report.finished - report.finished_before, f", {report.stopped}" if report.stopped else ""
    click.echo(f"\n{new} new trials in {clock_text(report.seconds)}{stopped}; the winners are in {path}")
    click.echo(f"estimated: {provenance}" if report.estimated else f"measured on {gpu_name}")


def _known_winners(arch: Arch, problems: Sequence[Problem]) -> dict[Problem, list[Knobs]]:
    """What wins in the bundles there are, by measurement on any GPU of the arch: the knobs of most cells first."""
    from hadagen.knobs import KNOB_NAMES, Knobs
    from hadagen.runtime import bundles

    cells: dict[Problem, Counter[Knobs]] = {problem: Counter() for problem in problems}
    for bundle in bundles.known():
        if bundle.arch != arch.name:
            continue
        try:
            for problem, found in cells.items():
                for entry in bundle.entries(problem):
                    if entry.provenance is Provenance.MEASURED and entry.knobs.keys() <= set(KNOB_NAMES):
                        found[Knobs.from_dict(entry.knobs)] += 1
        except StorageError as error:
            click.echo(f"not beginning with its winners: {error}", err=True)
    return {problem: [knobs for knobs, _ in found.most_common()] for problem, found in cells.items()}


@contextmanager
def _runner(arch: Arch, gpu: Environment | None, index: int, toolchain: Toolchain) -> Iterator[Runner]:
    """Measures on the GPU, or estimates where there is none."""
    from hadagen.tuner import EstimateRunner

    if gpu is None:
        yield EstimateRunner(arch)
        return
    with device_runner(arch, index, toolchain) as runner:
        yield runner


def _print_winners(entries: Sequence[BundleEntry]) -> None:
    """A table of the contiguous problems and one of the pitched ones: in place, at each of `SHOWN_ELEMENTS`."""
    from hadagen.knobs import Knobs

    lines: dict[bool, dict[Problem, dict[int, BundleEntry]]] = {}
    for entry in entries:
        if entry.destination is Destination.IN_PLACE and not entry.portable:
            lines.setdefault(entry.problem.pitched, {}).setdefault(entry.problem, {})[entry.elements] = entry
    for pitched, problems in sorted(lines.items()):
        shown = SHOWN_ELEMENTS[pitched]
        rows: list[list[Any]] = []
        for problem, there in problems.items():
            rows.append(list(problem_cells(problem)))
            for elements in shown.values():
                found = there.get(elements)
                rows[-1] += [found.us, found.fraction_of_copy] if found else [None, None]
            rows[-1].append(Knobs.from_dict(there[max(there)].knobs))
        times = [header for label in shown for header in (f"{label}: µs", "of copy")]
        print_table([*PROBLEM_HEADERS, *times, "knobs where large"], rows)
