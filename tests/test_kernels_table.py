"""The table in docs/formats.md of what runs on sm90."""

import re
import sys
from itertools import product
from pathlib import Path

import pytest

from hadagen.problem.regimes import Destination
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import timed_in_bundles

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import refresh_kernels as table  # noqa: E402

CELLS = [*product(table.TO, table.BEFORE, table.BLOCKS, (False, True), table.DTYPES)]


def shown() -> str:
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    return text.partition(table.MARKERS[0])[2].partition(table.MARKERS[1])[0].strip("\n")


def in_pytorch(to: str, before: str, block: int, signed: bool, dtype: str) -> set[int]:
    """The row lengths of a cell that PyTorch computes, as the document says."""
    name = {table.NONE: "none", table.ROW: "whole rows"}.get(block, str(block))
    names = {f"{name}*", f"{name} with signs" if signed else name}
    said = []
    for line in shown().splitlines():
        if line.startswith("|"):
            formats, befores, rotations, *cells = (part.strip() for part in line.strip("|").split("|"))
            of = [each.strip("`").replace("none", "") for each in befores.split(" or ")]
            if to in formats.split(", ") and before in of and names & {*rotations.split(", ")}:
                said.append(cells[table.DTYPES.index(dtype)])
    (cell,) = said
    found: set[int] = set()
    for part in re.split(r"\*\*[a-z]+\*\*", cell)[1:]:
        numbers = {int(number) for number in re.findall("[0-9]+", part)}
        others = {width for width in table.WIDTHS if width & (width - 1)} - numbers
        found |= others if "all but" in part else numbers
    return found


@pytest.mark.parametrize("to", table.TO)
def test_a_cell_says_what_calls_find(to: str) -> None:
    """By the whole rule of calls, of a few row lengths of some cells of each format."""
    tried = 0
    for number, cell in enumerate(each for each in CELLS if each[0] == to):
        asked = {width: each for width in table.WIDTHS if (each := table.asked_for(*cell, width))}
        for width in [*asked][number % 7 :: 23] if number % 3 == 0 else []:
            wanted, problem = width in in_pytorch(*cell), None
            try:
                problem = asked[width].problem
            except ValueError:
                assert wanted
            if problem:
                found = timed_in_bundles(problem, Destination.OUT_OF_PLACE, Device("sm90"))
                assert (not found) == wanted, (cell, width)
            tried += 1
    assert tried > 10


def test_the_table_is_that_of_the_command() -> None:
    assert shown() == table.kernels_table(), "run: python docs/refresh_kernels.py"


def test_each_reason_has_a_letter() -> None:
    letters = re.findall(r"^- \*\*([a-z])\*\*: ", shown(), re.M)
    assert letters == sorted({*re.findall(r"[:;] \*\*([a-z])\*\*", shown())})
    assert letters
