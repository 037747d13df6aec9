"""The table of winners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from typing import Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, CustomJS
from bokeh.models.widgets.inputs import TextInput
from bokeh.models.widgets.tables import (
    CellFormatter,
    DataTable,
    NumberFormatter,
    ScientificFormatter,
    StringFormatter,
    TableColumn,
)

from hadagen.report.drawing.style import WIDTH, Drawn, digits, script
from hadagen.report.facts import WinnerRow

MOST_ROWS = 20_000

# Field, title, width in pixels, and what makes the formatter.
_COLUMNS: tuple[tuple[str, str, int, Callable[[], CellFormatter]], ...] = (
    ("problem", "problem", 230, StringFormatter),
    ("device", "GPU", 200, StringFormatter),
    ("destination", "result", 85, StringFormatter),
    ("cache", "input", 45, StringFormatter),
    ("elements", "elements", 85, partial(NumberFormatter, format="0,0", text_align="right")),
    ("us", "µs", 65, partial(NumberFormatter, format="0.00", text_align="right")),
    ("fraction", "of copy", 60, partial(NumberFormatter, format="0.000", text_align="right")),
    ("error", "error", 65, partial(ScientificFormatter, precision=2, text_align="right", nan_format="–")),
    ("date", "date", 80, StringFormatter),
    ("knobs", "knobs other than their defaults", 560, StringFormatter),
)


def winner_table(rows: Sequence[WinnerRow]) -> Drawn:
    """The winners, sorted by a click on the head of a column, and filtered by words."""
    some = rows[:MOST_ROWS]
    texts: dict[str, list[str]] = {}
    codes: dict[str, list[Any]] = {}
    for name, *_ in _COLUMNS:
        values = [getattr(each, name) for each in some]
        if isinstance(values[0], str):
            known = {text: number for number, text in enumerate(dict.fromkeys(values))}
            texts[name] = list(known)
            codes[name] = [known[value] for value in values]
        else:
            codes[name] = [digits(nan if value is None else value) for value in values]
    shown = ColumnDataSource({name: [] for name in codes})
    words = TextInput(title="Only winners with these words", placeholder="such as: n4096 h200 in-place", width=420)
    update = CustomJS(
        args={
            "codes": ColumnDataSource(codes),
            "names": list(texts),
            "texts": list(texts.values()),
            "shown": shown,
            "filter": words,
        },
        code=script("winners.js"),
    )
    words.js_on_change("value_input", update)
    table = DataTable(
        source=shown,
        columns=[
            TableColumn(field=name, title=title, width=width, formatter=of()) for name, title, width, of in _COLUMNS
        ],
        width=WIDTH,
        height=460,
        index_position=None,
        reorderable=False,
        row_height=24,
        autosize_mode="none",
    )
    return Drawn(column(words, table, spacing=8), update)
