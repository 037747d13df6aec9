"""`hadagen space`: how many choices of knobs are legal for a problem, and why the others are not."""

from __future__ import annotations

import click

from hadagen.cli import options
from hadagen.cli.output import print_json, print_table
from hadagen.problem import Problem


@click.command()
@options.arch
@options.problem
@options.as_json
def space(arch: str, problem: Problem, as_json: bool) -> None:
    """Count the legal knobs of a problem, and the reasons that rule out the others."""
    from hadagen.arch import load_arch
    from hadagen.space import Space

    report = Space(problem, load_arch(arch)).report()
    if as_json:
        print_json(
            {
                "problem": problem.key,
                "arch": arch,
                "total": report.total,
                "legal": report.legal,
                "reasons": report.reasons,
            }
        )
        return
    click.echo(
        f"{problem.key} on {arch}: {report.legal:,} of {report.total:,} choices are legal; the others, by reason:"
    )
    print_table(("choices", "reason"), ((count, reason) for reason, count in report.reasons.items()))
