"""The table of what runs on sm90, a kernel or PyTorch, by the shipped bundle; `python docs/refresh_kernels.py` writes
it into docs/formats.md, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import refresh_files as files
from refresh_markdown import grid, wrapped

from hadagen.errors import UsageError
from hadagen.problem.formats import ROW as OF_ROW
from hadagen.problem.formats import Format
from hadagen.problem.problem import DType
from hadagen.runtime.choose import reasons
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.reasons import Asked
from hadagen.runtime.rotation import Rotation

# Hidden sizes, sizes of heads and of layers between in models.
# fmt: off
WIDTHS = (
    768, 896, 1024, 1408, 1536, 2048, 2560, 2816, 2880, 3072, 3584, 4096, 4864, 5120, 5632, 6144, 6912, 7168, 8192,
    8960, 9216, 9728, 10240, 11008, 12288, 13696, 13824, 14336, 16384, 17408, 17920, 18432, 18944, 20480, 22016, 24576,
    25600, 27648, 28672, 29568, 32768, 36864, 53248,
)
# fmt: on
NO_FORMAT = "none"
TO = (NO_FORMAT, "fp8-row", "int8-row", "int4-row", "fp8-tensor", "fp8-group", "mxfp8", "mxfp4", "nvfp4")
BEFORE = ("", "silu_mul")
NONE, ROW = 1, 0  # in place of the elements of a block that is rotated
BLOCKS = (NONE, 32, 64, 128, 512, ROW)
DTYPES = tuple(each.value for each in DType)
_SM90 = Device("sm90")
MARKERS = "<!-- kernels:begin -->", "<!-- kernels:end -->"

# Row length → why PyTorch computes rows of this length; None for those with a kernel.
Answers = Mapping[int, str | None]


def asked_for(to: str, before: str, block: int, signed: bool, dtype: str, width: int) -> Asked | None:
    """What the calls of a cell ask for; None where there are none, because blocks or groups do not fill the row."""
    if (block == NONE and (signed or to == NO_FORMAT)) or (block != ROW and width % block):
        return None
    form = None if to == NO_FORMAT else Format.choose(to, None, None, "row-major")
    try:
        if form:
            form.scales_in_row(width)
    except UsageError:
        return None
    orders = _orders(width) if block == ROW else ()
    return Asked(block or width, dtype, width, orders, signed=signed, form=form, prologue=before)


@functools.cache
def _orders(width: int) -> tuple[int, ...]:
    """The orders of the matrices of a rotation of whole rows, as kernels get them."""
    orders = Rotation(width)._orders
    return () if orders == (1,) else orders


@functools.cache
def _why_none(asked: Asked) -> str | None:
    return reasons.why_none(asked, _SM90, advises=False)


def answers(to: str, before: str, block: int, signed: bool, dtype: str) -> Answers:
    """Of all rows of a cell that there are."""
    asked = {width: asked_for(to, before, block, signed, dtype, width) for width in WIDTHS}
    return {width: _why_none(_without_width(each)) for width, each in asked.items() if each}


def _without_width(asked: Asked) -> Asked:
    """The same without the length of rows that have not one scale each, on which their kernels do not depend."""
    form = asked.form
    if form is not None and form.group == OF_ROW:
        return asked
    return asked._replace(columns=asked.n * max(form.group, 1) if form else asked.n)


def kernels_table(formats: Sequence[str] = TO, befores: Sequence[str] = BEFORE) -> str:
    """The table in Markdown, with its reasons."""
    lines: dict[tuple[str, ...], dict[tuple[str, str], list[str]]] = {}
    notes: dict[str, str] = {}
    for to, before, block, signed in product(formats, befores, BLOCKS, (False, True)):
        found = [answers(to, before, block, signed, dtype) for dtype in DTYPES]
        if any(found):
            cells = tuple(_cell(each, notes) for each in found)
            lines.setdefault(cells, {}).setdefault((to, before), []).append(_rotation(block, signed))
    shown = [
        (*what, ", ".join(rotations), *cells)
        for cells, by_what in lines.items()
        for what, rotations in _merged(by_what)
    ]
    listed = [wrapped(f"- **{letter}**: {why.partition(';')[0]}.", "  ") for why, letter in notes.items()]
    lengths = wrapped(f"Row lengths: {', '.join(map(str, WIDTHS))}.")
    return "\n".join([lengths, "", grid("llllll", ("`to`", "`before`", "rotation", *DTYPES), shown), "", *listed])


def _merged(by_what: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """Formats and prologues with the same rotations in one row: those of a format first, then formats alike."""
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for (to, before), rotations in by_what.items():
        groups.setdefault(tuple(_joined(rotations)), {}).setdefault(to, []).append(before)
    for rotations, befores in groups.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for to, names in befores.items():
            alike.setdefault(tuple(names), []).append(to)
        for names, formats in alike.items():
            yield (", ".join(formats), " or ".join(f"`{each}`" if each else "none" for each in names)), [*rotations]


def _rotation(block: int, signed: bool) -> str:
    name = {NONE: "none", ROW: "whole rows"}.get(block, str(block))
    return f"{name} with signs" if signed else name


def _joined(rotations: Sequence[str]) -> list[str]:
    """The names of rotations, where those with and without signs are one."""
    both = [each for each in rotations if f"{each} with signs" in rotations]
    of = [each for each in rotations if each.removesuffix(" with signs") not in both or each in both]
    return [f"{each}*" if each in both else each for each in of]


def _cell(found: Answers, notes: dict[str, str]) -> str:
    """The row lengths that PyTorch computes, by the letters of their reasons."""
    by_why: dict[str, list[int]] = {}
    for width, why in found.items():
        if why:
            by_why.setdefault(why, []).append(width)
    said = []
    for why, widths in by_why.items():
        letter = notes.setdefault(why, chr(ord("a") + len(notes)))
        said.append(f"**{letter}** {_listed(widths, found)}")
    return f"PyTorch: {'; '.join(said)}" if said else "kernel"


def _listed(widths: Sequence[int], found: Iterable[int]) -> str:
    """Row lengths as text. found: all of the cell."""
    others = [each for each in found if each & (each - 1) and each not in widths]
    if len(widths) > len(WIDTHS) // 2 and all(each & (each - 1) for each in widths):
        return "all but powers of two" + "".join(f" and {each}" for each in others)
    return ", ".join(map(str, widths))


def main() -> None:
    begin, end = MARKERS
    text = files.FORMATS.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    files.FORMATS.write_text(f"{before}{begin}\n{kernels_table()}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
