"""How all charts look: colors, marks, axes and legends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from bokeh.models import CustomJS, FixedTicker, InlineStyleSheet, Range1d
from bokeh.models.annotations import Legend, LegendItem, Span
from bokeh.models.ui import UIElement
from bokeh.models.widgets.inputs import Select
from bokeh.plotting import figure

from hadagen.problem.trial import Outcome
from hadagen.report.names import SERIES

WIDTH = 1120  # pixels
# The colors of Okabe and Ito, which people with any kind of color vision tell apart; two of one family for a type.
COLORS = dict(zip(SERIES, ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73"), strict=True))
MARKERS = dict(zip(SERIES, ("circle", "square", "triangle", "inverted_triangle", "diamond"), strict=True))
OUTCOME_COLORS = {
    Outcome.ILLEGAL: "#999999",
    Outcome.COMPILE_FAILED: "#e69f00",
    Outcome.WRONG_ANSWER: "#d55e00",
    Outcome.LAUNCH_FAILED: "#cc79a7",
    Outcome.TIMEOUT: "#000000",
    Outcome.UNSTABLE: "#009e73",
    Outcome.OK: "#bfd7ea",
}
ACCENT, TEXT, FAINT, GRID, BAND = "#0072b2", "#1f2430", "#6b7280", "#e5e7eb", "#f3f4f6"


class Drawn(NamedTuple):
    """An element of a page, and the script that fills it once the page is open, if it has one."""

    body: UIElement
    update: CustomJS | None = None


def new_figure(title: str, x_label: str, y_label: str, *, width: int = WIDTH, height: int = 380, **options: Any) -> Any:
    """An empty chart. options: as `bokeh.plotting.figure` takes them."""
    chart: Any = figure(
        title=title, width=width, height=height, tools="pan,box_zoom,reset,save", toolbar_location="right", **options
    )
    chart.toolbar.update(logo=None, autohide=True)
    chart.title.update(text_font_size="13px", text_color=TEXT)
    chart.outline_line_color = None
    chart.grid.grid_line_color = GRID
    for (axis,), label in ((chart.xaxis, x_label), (chart.yaxis, y_label)):
        axis.update(
            axis_label=label,
            axis_label_text_font_style="normal",
            axis_label_text_font_size="12px",
            axis_label_text_color=TEXT,
            axis_line_color=FAINT,
            major_label_text_font_size="12px",
            major_label_text_color=TEXT,
            major_tick_line_color=FAINT,
            minor_tick_line_color=None,
        )
    return chart


def powers_within(values: Iterable[int], most: int) -> list[int]:
    """At most `most` powers of two, from about the least value to about the largest. Each is the one before times the
    same factor."""
    known = list(values)
    powers = [1 << k for k in range(min(known).bit_length() - 1, max(known).bit_length() + 1)]
    return powers[:: -(-len(powers) // most)]


def span_of(values: Iterable[int]) -> Range1d:
    """From a little below the least value to a little above the largest, on a logarithmic axis."""
    known = list(values)
    return Range1d(start=min(known) * 0.75, end=max(known) * 1.33)


def mark_ticks(chart: Any, ticks: Sequence[int], text_of: Callable[[int], str]) -> None:
    """Puts the marks of the logarithmic x axis at `ticks`."""
    chart.xaxis.ticker = FixedTicker(ticks=list(ticks))
    chart.xaxis.major_label_overrides = {tick: text_of(tick) for tick in ticks}
    chart.xgrid.ticker = chart.xaxis[0].ticker


def add_legend(chart: Any, items: Iterable[tuple[str, Sequence[Any]]]) -> None:
    """Add a legend beside the chart, where it hides no data. A click on a name hides or shows its marks.

    items: names, each with its renderers of the chart.
    """
    legend = Legend(
        items=[LegendItem(label=name, renderers=list(renderers)) for name, renderers in items],
        click_policy="hide",
        border_line_color=None,
        label_text_font_size="12px",
        label_text_color=TEXT,
        location="top_left",
    )
    chart.add_layout(legend, "right")


def select(title: str, chosen: str, values: Iterable[str], width: int) -> Select:
    """A list to choose from: each of the values once, in their order."""
    options: Any = list(dict.fromkeys(values))
    return Select(title=title, value=chosen, options=options, width=width)


def copy_line() -> Span:
    """The speed of a copy."""
    return Span(location=1, dimension="width", line_color=FAINT, line_width=1.5, level="underlay")


def colored_labels(colors: Sequence[str]) -> InlineStyleSheet:
    """Colors the names beside the boxes of a `CheckboxGroup`."""
    rules = [f"label:nth-of-type({number}) {{ color: {color}; }}" for number, color in enumerate(colors, 1)]
    return InlineStyleSheet(css="label { font-weight: 600; font-size: 13px; } " + " ".join(rules))


def digits(value: float | int) -> float:
    """Four significant digits, which are enough to draw, and short in the page. Whole numbers stay as they are."""
    return float(f"{value:.4g}") if isinstance(value, float) and isfinite(value) else value


def script(name: str) -> str:
    """The JavaScript of a file beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
