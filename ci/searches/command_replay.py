"""`search.py replay`: how soon searches find the best variants of recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hadagen.cli import options
from hadagen.cli.output import PROBLEM_HEADERS, print_json, print_table, problem_cells, say
from hadagen.errors import UsageError

if TYPE_CHECKING:
    from searches.recording import Recording
    from searches.replay import Curve, Field

# Counts of evaluations that the table shows, as far as the largest budget goes.
SHOWN = (1, 5, 10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000)


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--seeds",
    default=20,
    show_default=True,
    callback=options.within(1, 1000),
    help="Searches for each problem.",
)
@click.option(
    "--export",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Only write the recordings there, as caches for Kernel Tuner.",
)
@options.as_json
def replay(files: tuple[Path, ...], seeds: int, folder: Path | None, as_json: bool) -> None:
    """Compare how soon searches of recordings find the best variant.

    Compares the search of hadagen tune with random search. FILES are recordings that search.py record wrote on one
    device. A search may try a tenth of a problem's variants, but at least 60. The same files and seeds give the same
    numbers.
    """
    from searches.export import write_kernel_tuner_cache
    from searches.recording import read_recording
    from searches.replay import Field, run_searches

    recordings = [read_recording(path) for path in files]
    if folder is not None:
        _check_are_of_different_problems(files, recordings)
        written = [str(write_kernel_tuner_cache(recording, folder)) for recording in recordings]
        print_json(written) if as_json else click.echo("\n".join(written))
        return
    fields = [Field.of(recording) for recording in recordings]
    gpus = sorted({recording.environment.gpu for recording in recordings})
    if len(gpus) > 1:
        raise UsageError(
            f"the recordings come from several devices ({', '.join(gpus)}); replay the recordings of one device"
        )
    curves = run_searches(fields, range(seeds))
    if as_json:
        print_json(
            {
                "gpu": gpus[0],
                "seeds": seeds,
                "problems": [
                    {
                        "problem": field.recording.problem.key,
                        "variants": len(field.trials),
                        "budget": field.budget,
                        "cells": [[cell.elements, cell.destination, cell.cache] for cell in field.best],
                    }
                    for field in fields
                ],
                "searches": {
                    name: {"curve": curve.values, "at_budget": curve.at_budget} for name, curve in curves.items()
                },
            }
        )
        return
    _print_curves(fields, curves, gpus[0], seeds)


def _check_are_of_different_problems(files: Sequence[Path], recordings: Sequence[Recording]) -> None:
    """Raises `UsageError` if exports would replace each other, because their files are named after problems."""
    found: dict[str, Path] = {}
    for path, recording in zip(files, recordings, strict=True):
        name = recording.problem.key
        if name in found:
            raise UsageError(
                f"{found[name]} and {path} are both of {name}; export one of them, or each to its own folder"
            )
        found[name] = path


def _print_curves(fields: Sequence[Field], curves: Mapping[str, Curve], gpu: str, seeds: int) -> None:
    say(f"{gpu}, {seeds} seeds: best possible time / best found so far, geometric mean over problems and cells")
    click.echo()
    longest = max(field.budget for field in fields)
    counts = [count for count in SHOWN if count < longest]
    rows = [[str(count), *(_fraction(curve.values[count - 1]) for curve in curves.values())] for count in counts]
    print_table(["evaluations", *curves], [*rows, ["budget", *(_fraction(curve.final) for curve in curves.values())]])
    click.echo()
    print_table(
        [*PROBLEM_HEADERS, "variants", "budget", *curves],
        [
            [
                *problem_cells(field.recording.problem),
                len(field.trials),
                field.budget,
                *(_fraction(curve.at_budget[i]) for curve in curves.values()),
            ]
            for i, field in enumerate(fields)
        ],
    )


def _fraction(value: float) -> str:
    return f"{value:.4f}"
