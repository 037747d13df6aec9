"""`hadagen emit`: the source, PTX or machine code of one variant, or the number of variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from hadagen.cli import options
from hadagen.cli.device import find_toolchain
from hadagen.cli.output import print_json, print_table, say
from hadagen.errors import UsageError
from hadagen.gpu.driver import DEFAULT_SHARED_BYTES
from hadagen.problem.launch import PORTABLE_CLUSTER, Source
from hadagen.problem.operands import params_for
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import prologue_of
from hadagen.problem.regimes import Destination, destinations
from hadagen.problem.scale import scale_word
from hadagen.runtime.best import best_config

if TYPE_CHECKING:
    from hadagen.plan.arch import Arch
    from hadagen.plan.plan import Plan

LARGE_ELEMENTS = 1 << 26
# What the scale word of a kernel holds, by form.
SCALE_WORDS = {
    "fp32": "the bits of the scale as a float",
    "factors": "scale = a * b, the bits of a as a {half} below those of b",
    "corrected": "scale = a * (1 + b), the bits of a as a {half} below those of b",
}


@click.command()
@options.arch
@options.problem
@options.knobs
@click.option("--ptx", "form", flag_value="ptx", help="Print the PTX.")
@click.option("--sass", "form", flag_value="sass", help="Print the machine code.")
@click.option(
    "--standalone",
    "form",
    flag_value="standalone",
    help="Print one file that compiles alone.",
)
@click.option(
    "--space",
    "form",
    flag_value="space",
    help="Count the legal choices of knobs, given the knobs that are set, and say what rules out the others.",
)
@options.compiler
@click.option("--json", "as_json", is_flag=True, help="With --space: print JSON.")
def emit(
    arch: str, problem: Problem, knobs: dict[str, int | str], form: str | None, compiler: str, as_json: bool
) -> None:
    """Print the source of a kernel, or count the legal kernels.

    Knobs that are not set get the legal values nearest to the known winner for large inputs, or the values that a
    search tries first if no winner is known.
    """
    from hadagen.compiler.codegen import render, with_headers
    from hadagen.plan.arch import load_arch

    target = load_arch(arch)
    if form == "space":
        _print_space(problem, _with(knobs, target), as_json)
        return
    if as_json:
        raise UsageError("--json is for --space alone, a kernel is text; leave it out or add --space")
    plan = _complete(knobs, problem, target)
    source = render(plan)
    if form is None:
        click.echo(source.text, nl=False)
        return

    from hadagen.compiler.toolchain import device_headers, disassemble

    if form == "standalone":
        click.echo(_how_to_use(plan, source, target) + with_headers(source, device_headers()), nl=False)
        return
    (built,) = find_toolchain(compiler).build_all([source], target)
    click.echo(built.ptx.decode() if form == "ptx" else disassemble(built), nl=False)


def _how_to_use(plan: Plan, source: Source, arch: Arch) -> str:
    """The head of a file that compiles alone: how to compile and launch it."""
    of, launch = plan.problem.transform, source.launch
    n = of.n
    tiles = f"ceil(elements / {launch.tile_elements})"
    if launch.persistent:
        tiles = f"min({tiles}, as many as the GPU holds at once)"
    blocks, together = tiles, ""
    if launch.cluster > 1:
        blocks, together = f"{launch.cluster} * {tiles}", f", in clusters of {launch.cluster}"
    attributes = {
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": launch.shared_bytes > DEFAULT_SHARED_BYTES,
        "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED": launch.cluster > PORTABLE_CLUSTER,
    }
    half, _, form = launch.scale_form.value.rpartition("-")
    where = "device addresses" if launch.reads_rows else "device addresses that are multiples of 16"
    target = source.compiled_for(arch.nvcc_arch)
    lines = [
        "One kernel of hadagen, with all that it includes. It compiles with:",
        f"  nvcc -std=c++17 -O3 -arch={target} -cubin {source.entry}.cu -o {source.entry}.cubin",
        f"Launch {blocks} blocks of {launch.threads} threads{together}.",
        f"A block has {launch.shared_bytes} bytes of dynamic shared memory.",
        *(f"Set {attribute} first." for attribute, needed in attributes.items() if needed),
        "Arguments:",
        f"  x, y        {where}; {'in place, y is x' if _in_place(plan.problem) else 'y must not overlap x'}",
        f"  elements    rows * {n}",
        f"  scale_word  {SCALE_WORDS[form].format(half=half)};",
        f"              0x{scale_word(launch.scale_form, n**-0.5):08x} makes the transform orthonormal"
        + (f", if rows of A have the norm {of.order}**0.5" if of.real else "")
        + (f", and rows of C {of.length}**0.5" if of.paired else "")
        + (", if the matrix is Hadamard's" if of.has_matrix and not of.real else ""),
    ]
    if launch.reads_rows:
        lines.append("  columns, x_pitch, y_pitch  elements of a row, and between the starts of two rows")
    if of.has_matrix:
        right = "transposed(C)" if of.paired else "H"
        lines += [
            f"  matrix      device address of A: y = A X {right}, where X [{of.order}, {of.length}] is a row of x;",
            "              hadagen.problem.operands.pack_real says how its entries lie there"
            if of.real
            else "              hadagen.problem.operands.ENTRY_BYTES says how its entries, -1, 0 and 1, lie there",
        ]
    if of.paired:
        lines += [
            "  right_matrix  device address of C;",
            "              hadagen.problem.operands.pack_right says how its entries lie there",
        ]
    if of.signed:
        lines += [
            f"  signs_before, signs_after  device addresses of {-(-n // 8)} bytes each: bit i % 8 of byte i / 8 is 1",
            "              where element i is negated, of x and of y; null for no signs",
        ]
    lines += _of_prologue(plan.problem) + _of_codes(plan.problem)
    return "".join(f"// {line}\n" for line in lines) + "\n"


def _in_place(problem: Problem) -> bool:
    return Destination.IN_PLACE in destinations(problem)


def _of_prologue(problem: Problem) -> list[str]:
    """Lines about x and the params of a kernel with a prologue."""
    prologue = prologue_of(problem)
    if prologue is None:
        return []
    lines = []
    if prologue.width > 1:
        order = "the first of all, then the second" if prologue.is_halved else "neighbors"
        lines.append(f"  x has {prologue.width} elements for each element of a row of results: {order}")
    meanings = {
        "units_in_row": f"a row of results has units_in_row * {problem.unit} elements",
        "row_reciprocal": "hadagen.problem.prologues.reciprocal(units_in_row) gives",
        "row_shift": "row_reciprocal and row_shift",
    }
    params = [param.name for param in prologue.params(problem)]
    lines += [f"  {name:16}{meanings.get(name, 'the bits of a float, a number of the prologue')}" for name in params]
    of_operand = "device address of an operand of the prologue"
    return lines + [f"  {operand.name:16}{of_operand}" for operand in prologue.operands]


def _of_codes(problem: Problem) -> list[str]:
    """Lines about y and the params of a kernel that quantizes."""
    form = problem.io.form
    if form is None:
        return []
    two = ", two to a byte, the first in the lower half" if form.element.bits == 4 else ""
    of_call = "scales of a call, one for each head" if form.by_head else "scale of a call"
    meanings = {
        "scales": f"device address of the scales, one for each {form.group} codes, {form.layout.value}",
        "tensor_scale": f"device address of the {of_call}",
        "units_in_head": f"a head has units_in_head * {problem.unit} elements",
        "scales_in_row": "scales of a row",
        "scale_pitch": "scales from the start of one column to the start of the next",
    }
    names = [param.name for param in params_for(problem)]
    return [
        f"  y has codes of {form.element.bits} bits{two}",
        *(f"  {name:16}{meaning}" for name, meaning in meanings.items() if name in names),
    ]


def _with(given: Mapping[str, int | str], arch: Arch) -> Arch:
    """The arch with only these values of knobs. Raises `UsageError` if the arch has no such values."""
    return arch.narrowed({name: [value] for name, value in given.items()})


def _print_space(problem: Problem, arch: Arch, as_json: bool) -> None:
    from hadagen.plan.space import Space

    report = Space(problem, arch).report()
    if as_json:
        counts = {"total": report.total, "legal": report.legal, "reasons": report.reasons}
        print_json({"problem": problem.key, "arch": arch.name, **counts})
        return
    counted = f"{report.legal:,} of {report.total:,} choices are legal"
    say(f"{problem.key} on {arch.name}: {counted}; the others, by reason:")
    print_table(("choices", "reason"), ((count, reason) for reason, count in report.reasons.items()))


def _complete(given: Mapping[str, int | str], problem: Problem, arch: Arch) -> Plan:
    """The plan of the legal knobs that have the given values and are nearest to the defaults, knob by knob.

    Raises `UsageError` if no knobs are legal, with the reason why the defaults are not legal with the given values.
    """
    from hadagen.plan.knobs import Knobs
    from hadagen.plan.space import Space, build_plan

    rows = max(1, LARGE_ELEMENTS // problem.n)
    winner = best_config(problem, rows, arch=arch.name, inplace=_in_place(problem))
    default = Knobs.like(winner.knobs) if winner.knobs else next(iter(Space(problem, arch).seeds()), None)
    if default is None:
        raise UsageError(f"{problem.key} has no kernel on {arch.name}; take a smaller n, or see why with --space")
    both = Knobs.from_dict({**default.to_dict(), **given})
    try:
        return build_plan(problem, both, arch)
    except UsageError:
        nearest = Space(problem, _with(given, arch)).closest(both)
        if nearest is None:
            raise
        return build_plan(problem, nearest, arch)
