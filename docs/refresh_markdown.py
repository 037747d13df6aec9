"""Tables, numbers and lines of text in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable


def grid(sides: str, head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown. `sides`: l or r for each column, where its text stands."""
    rule = ("---" if side == "l" else "---:" for side in sides)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows))


def number(value: float | None, times: float = 1.0) -> str:
    """So many times the value, with two digits after the point; – where there is none."""
    return "–" if value is None else f"{value * times:.2f}"


def wrapped(text: str, indent: str = "") -> str:
    """The text in lines of 120 characters at most. indent: of all lines but the first."""
    return textwrap.fill(text, 120, break_on_hyphens=False, subsequent_indent=indent)
