"""`search.py record`: measure every legal variant, to compare searches on the recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import click

from hadagen.cli import options
from hadagen.cli.device import find_target, find_toolchain, measuring
from hadagen.cli.output import PROBLEM_HEADERS, clock_text, print_json, print_table, problem_cells, say
from hadagen.cli.sentences import keeping
from hadagen.errors import DeviceError, UsageError
from hadagen.problem.problem import Problem, check_tunable
from hadagen.problem.regimes import timed_elements
from hadagen.problem.trial import Outcome

if TYPE_CHECKING:
    from hadagen.plan.arch import Arch

# Beyond so many it would take hours; ranges are cut first.
MOST_VARIANTS = 20_000


@click.command()
@options.problems()
@options.only
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure the same values of knobs as this recording has. Knobs that the recording lacks keep their defaults.",
)
@options.elements("64K,1M,8M,64M")
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("recordings"),
    show_default=True,
    help="Folder that gets a file for each problem.",
)
@options.compiler
@click.option("--device", type=int, metavar="INDEX", help="CUDA device to measure on.  [default: 0]")
@click.option("--dry-run", is_flag=True, help="Only count the variants; needs no GPU.")
@options.arch_of_target(says="  [default: arch of the GPU here, or sm90]")
@options.as_json
@keeping()
def record(
    problems: list[Problem],
    only: dict[str, list[int | str]],
    like: Path | None,
    elements: list[int],
    folder: Path,
    compiler: str,
    device: int | None,
    dry_run: bool,
    arch: str | None,
    as_json: bool,
) -> None:
    """Measure every legal variant of problems, and keep all trials.

    The trials go to files that search.py replay reads. There are tens of thousands of variants, so give fewer values
    of some knobs with --only, or take the values of a recording with --like. Each variant is verified, then timed, in
    place if the result may replace the input: in L2 if the data fits in half of L2, else in device memory. Every
    finished trial is kept at once, and the same command continues a run that was interrupted.
    """
    from hadagen.cli.progress import shown
    from hadagen.plan.space import Space
    from searches.record import RecordOptions, deciding_cells
    from searches.record import record as measure_all

    check_tunable(problems)
    target, gpu = find_target(arch, None if dry_run else device)
    if like is not None:
        target = _narrowed_like(like, target)
    target = target.narrowed(only)
    variants = {problem: len(Space(problem, target).legal) for problem in problems}
    for problem, legal in variants.items():
        if not legal:
            raise UsageError(f"no knobs of these ranges are legal for {problem.key}; give more values with --only")
        if not any(timed_elements(problem, count) for count in elements):
            raise UsageError(
                f"--elements {options.short_list(elements)} holds no row of {problem.n} elements; give a larger size"
            )
    if dry_run:
        _print_variants(variants, as_json)
        return
    if (total := sum(variants.values())) > MOST_VARIANTS:
        raise UsageError(
            f"{total} variants are too many to measure, the limit is {MOST_VARIANTS}; "
            "name fewer values of some knobs with --only"
        )
    if gpu is None:
        raise DeviceError(
            f"there is no {target.name} GPU here; record on a machine that has one, or count with --dry-run"
        )
    toolchain, stopped = find_toolchain(compiler), Event()
    cells = {problem: deciding_cells(problem, elements, gpu.l2_bytes) for problem in problems}
    # All cells of all kernels are timed, however slow.
    with (
        measuring(gpu, device or 0, toolchain, cells=cells, give_up=float("inf")) as runner,
        shown() as listen,
    ):
        report = measure_all(
            RecordOptions(
                arch=target,
                cells=cells,
                runner=runner,
                build=lambda sources: toolchain.build(sources, target, stopped=stopped),
                environment=replace(gpu, nvcc=toolchain.compiler.release),
                folder=folder,
                stopped=stopped,
            ),
            listen,
        )
    if report.interrupted:
        raise KeyboardInterrupt
    if as_json:
        print_json(
            {
                "arch": target.name,
                "gpu": gpu.gpu,
                "trials": report.finished,
                "seconds": report.seconds,
                "recordings": [
                    {
                        "problem": problem.key,
                        "variants": variants[problem],
                        "outcomes": {outcome.value: count for outcome, count in report.outcomes[problem].items()},
                        "file": str(path),
                    }
                    for problem, path in report.files.items()
                ],
            }
        )
        return
    print_table(
        [*PROBLEM_HEADERS, "variants", "ok", "bytes", "file"],
        [
            [
                *problem_cells(problem),
                variants[problem],
                report.outcomes[problem].get(Outcome.OK, 0),
                path.stat().st_size,
                str(path),
            ]
            for problem, path in report.files.items()
        ],
    )
    click.echo()
    say(f"{report.finished} new trials in {clock_text(report.seconds)}, measured on {gpu.gpu}")


def _narrowed_like(path: Path, target: Arch) -> Arch:
    """The target with the ranges of a recording. Raises `UsageError` if the recording is of another arch."""
    from searches.recording import read_recording

    found = read_recording(path)
    if found.arch != target.name:
        raise UsageError(f"{path} is of {found.arch}, not of {target.name}; name a recording of {target.name}")
    return found.target


def _print_variants(variants: dict[Problem, int], as_json: bool) -> None:
    if as_json:
        print_json([{"problem": problem.key, "variants": legal} for problem, legal in variants.items()])
        return
    print_table(
        [*PROBLEM_HEADERS, "variants"], [[*problem_cells(problem), legal] for problem, legal in variants.items()]
    )
