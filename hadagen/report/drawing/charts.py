"""The charts, drawn with Bokeh: their axes and marks. `page.js` fills those of the speed with what is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.models.annotations import BoxAnnotation, Label, Span
from bokeh.plotting import figure

from hadagen.problem.regimes import ELEMENT_BUCKETS, REGIMES, Cache
from hadagen.report.curves import NEAR, Curve, mean_curve
from hadagen.report.facts import ErrorPoint
from hadagen.report.names import SERIES, short_count

MOST_CURVES = 60
# Like the colors of Okabe and Ito, which people with any kind of color vision tell apart; two of one family for a type.
# On a dark page, a filter inverts lightness. All are legible on both.
COLORS = dict(zip(SERIES, ("#0072b2", "#3f9bdb", "#b34700", "#c58700", "#009e73"), strict=True))
MARKERS = dict(zip(SERIES, ("circle", "square", "triangle", "inverted_triangle", "diamond"), strict=True))
ACCENT, TEXT, FAINT = "#0072b2", "#1f2430", "#6b7280"


def speed_charts(names: Sequence[str], lengths: Iterable[int]) -> list[Any]:
    """Empty charts over n, one for each regime. names: of series, each a line and marks of that name."""
    known = list(lengths)
    charts = [_chart(regime, "n, elements in a row", known, x_range=_around(known)) for regime in REGIMES]
    for chart in charts:
        _add_series(chart, names, [("n", "@x"), ("of a copy", "@y{0.000}"), ("mean of", "@times sizes")])
    return charts


def size_charts(names: Sequence[str]) -> list[Any]:
    """Empty charts over sizes, one for each `Cache`. In a band named like the chart, data is larger than L2."""
    charts = []
    for cache in Cache:
        chart = _chart(cache.value, "elements, rows times n", ELEMENT_BUCKETS, x_range=_around(ELEMENT_BUCKETS))
        band = BoxAnnotation(left=ELEMENT_BUCKETS[-1], fill_color=FAINT, fill_alpha=0.12, level="image")
        band.name = f"{cache.value} band"
        chart.add_layout(band)
        tips = [("", "@problem"), ("elements", "@x{0,0}"), ("µs", "@us{0.00}"), ("of a copy", "@y{0.000}")]
        _add_series(chart, names, [*tips, ("", "@regime")])
        charts.append(chart)
    return charts


def error_chart(points: Sequence[ErrorPoint]) -> Any:
    """The largest error of each problem, over n."""
    lengths = [point.n for point in points]
    chart = _chart(
        "errors", "n, elements in a row", lengths, "relative error", y_axis_type="log", x_range=_around(lengths)
    )
    for name in SERIES:
        of = [point for point in points if point.series == name]
        columns = {
            "n": [point.n for point in of],
            "error": [digits(point.error) for point in of],
            "bound": [digits(point.bound) for point in of],
            "problem": [point.problem for point in of],
            "kernels": [point.kernels for point in of],
        }
        looks: dict[str, Any] = {"color": COLORS[name], "marker": MARKERS[name], "size": 7, "alpha": 0.8}
        chart.scatter("n", "error", source=ColumnDataSource(columns), name=name, **looks)
    tips = [("", "@problem"), ("largest error", "@error{0.00e+0}"), ("bound", "@bound{0.00e+0}"), ("of", "@kernels")]
    chart.add_tools(HoverTool(tooltips=tips))
    return chart


def curve_chart(curves: Sequence[Curve]) -> Any:
    """A thin line for each search, and a thick one for their mean."""
    some = curves[:MOST_CURVES]
    steps = [curve.steps() for curve in some]
    longest = max(len(curve.fractions) for curve in curves)
    chart = _chart(
        "curves",
        "trials of the problem, failed ones too",
        [10**zeros for zeros in range(7)],
        "best possible time / best so far",
        x_range=Range1d(start=0.9, end=longest * 1.1 + 1),
    )
    source = ColumnDataSource(
        {
            # Each corner twice, so that the line stays level up to the next.
            "x": [[x for pair in zip(xs, xs[1:] + xs[-1:], strict=True) for x in pair] for xs, _ in steps],
            "y": [[digits(y) for y in ys for _ in range(2)] for _, ys in steps],
            "problem": [curve.problem for curve in some],
            "device": [curve.device for curve in some],
            "trials": [len(curve.fractions) for curve in some],
            "near": [curve.trials_to_near for curve in some],
        }
    )
    each = chart.multi_line("x", "y", source=source, color="#9ca3af", line_width=1.2, alpha=0.8)
    means = [digits(value) for value in mean_curve(curves)]
    chart.line(list(range(1, len(means) + 1)), means, color=ACCENT, line_width=3)
    chart.add_layout(Span(location=NEAR, dimension="width", line_color=TEXT, line_dash="dotted"))
    tips = [("", "@problem"), ("on", "@device"), ("trials", "@trials"), (f"to {NEAR:.0%} of the best", "@near trials")]
    chart.add_tools(HoverTool(renderers=[each], tooltips=tips, line_policy="interp"))
    return chart


def digits(value: float) -> float:
    """Four significant digits, which are enough to draw, and short in the page. Whole numbers stay as they are."""
    return float(f"{value:.4g}") if isinstance(value, float) and isfinite(value) else value


def _chart(
    name: str, x_label: str, ticks: Sequence[int], y_label: str = "times the speed of a copy", **how: Any
) -> Any:
    """An empty chart as wide as its place in the page, over a logarithmic axis with at most six marks."""
    chart: Any = figure(
        name=name, height=300, sizing_mode="stretch_width", tools="", toolbar_location=None, x_axis_type="log", **how
    )
    chart.update(background_fill_color=None, border_fill_color=None, outline_line_color=None)
    chart.grid.grid_line_color, chart.grid.grid_line_alpha = FAINT, 0.2
    powers = [1 << k for k in range(min(ticks).bit_length() - 1, max(ticks).bit_length() + 1)]
    shown = powers[:: -(-len(powers) // 6)] if len(ticks) > 7 else list(ticks)
    chart.xaxis.ticker = FixedTicker(ticks=shown)
    chart.xaxis.major_label_overrides = {tick: short_count(tick) for tick in shown}
    chart.xgrid.ticker = chart.xaxis[0].ticker
    for (axis,), label in ((chart.xaxis, x_label), (chart.yaxis, y_label)):
        axis.update(
            axis_label=label,
            axis_label_text_font_style="normal",
            axis_label_text_font_size="13px",
            axis_label_text_color=TEXT,
            axis_line_color=FAINT,
            major_label_text_font_size="13px",
            major_label_text_color=TEXT,
            major_tick_line_color=FAINT,
            minor_tick_line_color=None,
        )
    return chart


def _around(values: Iterable[int]) -> Range1d:
    """From a little below the least value to a little above the largest, on a logarithmic axis."""
    known = list(values)
    return Range1d(start=min(known) * 0.75, end=max(known) * 1.33)


def _add_series(chart: Any, names: Sequence[str], tips: Sequence[tuple[str, str]]) -> None:
    """Lines and marks that `page.js` fills, and the speed of a copy."""
    chart.y_range = Range1d(start=0.8, end=1.2)
    chart.add_layout(Span(location=1, dimension="width", line_color=FAINT, line_width=1.5, level="underlay"))
    where: dict[str, Any] = {"x": chart.x_range.end, "y": 1, "x_offset": -4, "y_offset": 2, "text_align": "right"}
    chart.add_layout(Label(text="a copy", text_font_size="12px", text_color=FAINT, level="underlay", **where))
    dots = []
    for name in names:
        source = ColumnDataSource({"x": [], "y": [], "fill": []})
        looks: dict[str, Any] = {"source": source, "name": name}
        chart.line("x", "y", line_width=2, color=COLORS[name], **looks)
        looks |= {"marker": MARKERS[name], "size": 7, "line_color": COLORS[name], "fill_color": COLORS[name]}
        dots.append(chart.scatter("x", "y", fill_alpha="fill", **looks))
    chart.add_tools(HoverTool(renderers=dots, tooltips=[("", "$name"), *tips]))
