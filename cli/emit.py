"""`hadagen emit`: the source of one variant, or what the compiler makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hadagen.cli import options
from hadagen.errors import ToolchainError, UsageError
from hadagen.problem import Problem

if TYPE_CHECKING:
    from hadagen.arch import Arch
    from hadagen.plan import Plan

LARGE_ELEMENTS = 1 << 26


@click.command()
@options.arch
@options.problem
@click.option("--knobs", multiple=True, metavar="K=V", help="Set a knob; may be given several times.")
@click.option("--ptx", "form", flag_value="ptx", help="Print the PTX that nvcc makes of it.")
@click.option("--sass", "form", flag_value="sass", help="Print the machine code.")
def emit(arch: str, problem: Problem, knobs: tuple[str, ...], form: str | None) -> None:
    """Print the CUDA C++ source of a kernel.

    Knobs that are not set are as near as is legal to those of the known winner for large inputs, or to the first seed
    where no winner is known.
    """
    from hadagen.arch import load_arch
    from hadagen.codegen import render

    target = load_arch(arch)
    plan = _complete(options.parse_knobs(knobs), problem, target)
    source = render(plan)
    if form is None:
        click.echo(source.text, nl=False)
        return

    from hadagen.toolchain import BuildFailure, Toolchain, disassemble

    (built,) = Toolchain.find().build([source], target)
    if isinstance(built, BuildFailure):
        raise ToolchainError(f"nvcc refuses {source.entry}, which is a bug of hadagen: {built.summary}")
    click.echo(built.ptx.decode() if form == "ptx" else disassemble(built), nl=False)


def _complete(given: dict[str, int | str], problem: Problem, arch: Arch) -> Plan:
    """The plan of the legal knobs with the given values that are nearest to the default ones, knob by knob.

    Raises `UsageError` where there are none, with the reason why the default ones are not legal with those given.
    """
    from hadagen.knobs import Knobs
    from hadagen.runtime.choose import best_config
    from hadagen.space import Space, build_plan

    space = Space(problem, arch)
    winner = best_config(problem, max(1, LARGE_ELEMENTS // problem.n), arch=arch.name, inplace=True)
    default = space.seeds()[0] if winner.knobs is None else Knobs.from_dict(winner.knobs)
    both = Knobs.from_dict({**default.to_dict(), **given})
    try:
        return build_plan(problem, both, arch)
    except UsageError:
        with_given = arch.narrowed({name: [value] for name, value in given.items()})
        nearest = Space(problem, with_given).closest(both)
        if nearest is None:
            raise
        return build_plan(problem, nearest, arch)
