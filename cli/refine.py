"""`hadagen refine`: winners between the sizes that kernels were tuned at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hadagen.cli import options
from hadagen.cli.bundle import bundle_place, count_of, keep_winners, write_winners
from hadagen.cli.device import measuring, refusal
from hadagen.cli.output import counted, print_json, report_failures, say
from hadagen.cli.sentences import keeping
from hadagen.errors import DeviceError, UsageError
from hadagen.trial import Outcome

if TYPE_CHECKING:
    from hadagen.measure import Cell, Variant
    from hadagen.problem import Problem
    from hadagen.trial import Trial

MOST_FAILURES = 5  # of kernels that were right when they were tuned; then it is the device


@click.command()
@options.problems
@options.db
@options.bundle
@options.device
@options.as_json
@keeping()
def refine(problems: list[Problem], db: str | None, bundle: Path | None, device: int, as_json: bool) -> None:
    """Find winners between the sizes that kernels were tuned at, and write all winners to the bundle that calls find.

    The best kernels of each problem in the tuning database are timed on this GPU between the sizes that all are timed
    at. A winner is named there wherever calls would clearly be slower without. Every time is kept at once: a run that
    was interrupted goes on with the round in which it was when it is started again. Needs nvcc, for the copy kernel.
    """
    from hadagen.measure import device_environment
    from hadagen.tuner.refine import refine as look_between

    gpu = device_environment(device)
    arch = options.arch_of(gpu)
    path = bundle_place(bundle, arch, db)
    failures: list[str] = []

    def measure(cells: Mapping[Problem, Sequence[Cell]], variants: Sequence[Variant]) -> Iterator[Trial]:
        with measuring(gpu, device, cells=cells, give_up=inf) as runner:  # slow here may be fast there
            for variant, trial in runner.run(counted(variants, "timing")):
                if trial.outcome is not Outcome.OK and variant.kernel:
                    lost = trial.outcome in (Outcome.WRONG_ANSWER, Outcome.UNSTABLE)
                    advice = "it wins nothing any more" if lost else "it was left out"
                    failures.append(refusal(trial.problem, variant.kernel.digest, trial, advice))
                    if len(failures) == MOST_FAILURES:
                        raise DeviceError(f"{failures[-1]}; that many fail where the device does; run hadagen doctor")
                yield trial

    with options.open_db(db) as store:
        options.check_writable(store)
        keep_winners(path, store, arch)
        if not look_between(problems, store, arch, gpu, measure):
            raise UsageError(f"{store.place} has no trial of such problems on {gpu.gpu}; tune them here first")
        selection = write_winners(store, arch, path)
    between = [cell for cell in selection if cell.gpu == gpu.gpu and not (cell.is_bucket or cell.portable)]
    if as_json:
        places = {"database": store.place, "bundle": str(path)}
        print_json({"gpu": gpu.gpu, **places, "winners": len(selection), "between": len(between)})
    else:
        say(f"{path}: {count_of(selection)}; {len(between)} between the sizes that were tuned")
    report_failures(failures, DeviceError)
