"""Charts of a search: effects of knobs, curves, errors and outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    DataRange1d,
    FactorRange,
    HoverTool,
    Range1d,
)
from bokeh.models.annotations import Span

from hadagen.report.curves import NEAR, Curve, mean_curve
from hadagen.report.drawing.style import (
    ACCENT,
    COLORS,
    FAINT,
    GRID,
    MARKERS,
    OUTCOME_COLORS,
    TEXT,
    WIDTH,
    Drawn,
    add_legend,
    digits,
    mark_ticks,
    new_figure,
    powers_within,
    script,
    select,
    span_of,
)
from hadagen.report.facts import ErrorPoint
from hadagen.report.knob_effects import Effects
from hadagen.report.names import SERIES

MOST_CURVES = 60
MOST_KNOBS = 12


_LINE, _FRAME = 19, 70  # pixels of a value in the chart of knobs, and around it


def knob_chart(effects: Mapping[tuple[str, str], Effects]) -> Drawn:
    """The distribution of the score over the values of each knob, the most important knob first."""
    shown = [
        (of, regime, f"{effect.knob}  {effect.importance:.0%}", value)
        for (of, regime), found in effects.items()
        for effect in found.knobs[:MOST_KNOBS]
        for value in effect.values
    ]
    rows: dict[str, list[Any]] = {
        "problems": [of for of, _, _, _ in shown],
        "regime": [regime for _, regime, _, _ in shown],
        "factor": [(label, value.value) for _, _, label, value in shown],
        "trials": [value.trials for *_, value in shown],
        "failed": [value.failed for *_, value in shown],
        **{name: [digits(getattr(value, name)) for *_, value in shown] for name in _QUARTILES},
    }
    source = ColumnDataSource(rows)
    first = next(iter(effects))
    boxes = ColumnDataSource({name: [] for name in rows})
    problems = select("Trials", first[0], (key[0] for key in effects), 220)
    where = select("Regime", first[1], (key[1] for key in effects), 220)
    lowest = min(rows["low"], default=0.0)
    chart = new_figure(
        "Speed of the trials with each value, as a fraction of the best of their problem",
        "fraction of the best",
        "",
        y_range=FactorRange(factor_padding=0.25, group_padding=0.6),
        x_range=Range1d(start=max(0.0, lowest - 0.05), end=1.03),
        height=_FRAME + _LINE,
    )
    chart.segment("low", "factor", "high", "factor", source=boxes, color=FAINT, line_width=1.5)
    box = chart.hbar(
        y="factor", left="first", right="third", height=0.75, source=boxes, color="#9ecae1", line_color=ACCENT
    )
    middle = chart.scatter(
        "median", "factor", source=boxes, marker="dash", angle=1.5708, size=13, color=TEXT, line_width=2
    )
    best = chart.scatter("best", "factor", source=boxes, marker="circle", size=5, color="#d55e00")
    tips = [
        ("", "@factor"),
        ("timed", "@trials"),
        ("failed", "@failed"),
        ("5 % below", "@low{0.000}"),
        ("a quarter below", "@first{0.000}"),
        ("median", "@median{0.000}"),
        ("a quarter above", "@third{0.000}"),
        ("best", "@best{0.000}"),
    ]
    chart.add_tools(HoverTool(renderers=[box], tooltips=tips))
    add_legend(chart, [("quartiles", [box]), ("median", [middle]), ("best", [best])])
    chart.yaxis[0].update(
        group_label_orientation="horizontal",
        group_text_font_size="12px",
        group_text_color=TEXT,
        separator_line_color=GRID,
    )
    chart.ygrid.grid_line_color = None
    update = CustomJS(
        args={
            "effects": source,
            "boxes": boxes,
            "chart": chart,
            "problems": problems,
            "regime": where,
            "line": _LINE,
            "frame": _FRAME,
        },
        code=script("knobs.js"),
    )
    for choice in (problems, where):
        choice.js_on_change("value", update)
    return Drawn(column(row(problems, where), chart, spacing=8), update)


_QUARTILES = ("low", "first", "median", "third", "high", "best")


def curve_chart(curves: Sequence[Curve]) -> Drawn:
    """A line for each search, and their mean."""
    some = [curve.steps() for curve in curves[:MOST_CURVES]]
    longest = max(len(curve.fractions) for curve in curves)
    chart = new_figure(
        "Best so far over the number of trials",
        "trials of the problem, failed ones too",
        "best possible time / best so far",
        height=380,
        x_axis_type="log",
        x_range=Range1d(start=0.9, end=longest * 1.1 + 1),
    )
    mark_ticks(chart, [digit * 10**zeros for zeros in range(7) for digit in (1, 2, 5)], str)
    source = ColumnDataSource(
        {
            # Each corner twice, so that the line stays level up to the next.
            "x": [[x for pair in zip(xs, xs[1:] + xs[-1:], strict=True) for x in pair] for xs, _ in some],
            "y": [[digits(y) for y in ys for _ in range(2)] for _, ys in some],
            "problem": [curve.problem for curve in curves[:MOST_CURVES]],
            "device": [curve.device for curve in curves[:MOST_CURVES]],
            "trials": [len(curve.fractions) for curve in curves[:MOST_CURVES]],
            "near": [curve.trials_to_near for curve in curves[:MOST_CURVES]],
        }
    )
    each = chart.multi_line("x", "y", source=source, color="#9ca3af", line_width=1.2, alpha=0.8)
    means = mean_curve(curves)
    mean = chart.line(list(range(1, len(means) + 1)), [digits(value) for value in means], color=ACCENT, line_width=3)
    chart.add_layout(Span(location=NEAR, dimension="width", line_color=TEXT, line_dash="dotted"))
    tips = [("", "@problem"), ("on", "@device"), ("trials", "@trials"), (f"to {NEAR:.0%} of the best", "@near trials")]
    chart.add_tools(HoverTool(renderers=[each], tooltips=tips, line_policy="interp"))
    add_legend(chart, [("mean of all", [mean]), ("one problem", [each])])
    return Drawn(chart)


def error_charts(points: Sequence[ErrorPoint]) -> Drawn:
    """Two charts of errors: on a logarithmic axis, and as a share of the bound of their problem."""
    lengths = [point.n for point in points]
    highest = max(1.0, *(point.error / point.bound for point in points))
    common: dict[str, Any] = {
        "x_label": "n, elements in a row",
        "height": 360,
        "x_axis_type": "log",
        "x_range": span_of(lengths),
    }
    errors = new_figure(
        "Relative error",
        y_label="‖out − ref‖ / ‖ref‖ against float64",
        width=WIDTH // 2 - 80,
        y_axis_type="log",
        **common,
    )
    shares = new_figure(
        "Relative error, as a share of the bound of the problem",
        y_label="error / bound",
        width=WIDTH // 2 + 80,
        y_range=Range1d(start=0, end=1.08 * highest),
        **common,
    )
    shares.add_layout(Span(location=1, dimension="width", line_color=TEXT, line_dash="dotted"))
    items: list[tuple[str, list[Any]]] = []
    for name in SERIES:
        of = [point for point in points if point.series == name]
        if not of:
            continue
        source = ColumnDataSource(
            {
                "n": [point.n for point in of],
                "error": [digits(point.error) for point in of],
                "bound": [digits(point.bound) for point in of],
                "share": [digits(point.error / point.bound) for point in of],
                "problem": [point.problem for point in of],
                "kernels": [point.kernels for point in of],
            }
        )
        looks = {"source": source, "color": COLORS[name], "marker": MARKERS[name], "size": 7, "alpha": 0.8}
        dots = [chart.scatter("n", y, **looks) for chart, y in ((errors, "error"), (shares, "share"))]
        dots[1].js_link("visible", dots[0], "visible")  # a legend hides marks of its own chart only
        items.append((name, dots[1:]))
    tips = [("", "@problem"), ("largest error", "@error{0.00e+0}"), ("bound", "@bound{0.00e+0}")]
    for chart in (errors, shares):
        mark_ticks(chart, powers_within(lengths, 8), str)
        chart.add_tools(HoverTool(tooltips=[*tips, ("share", "@share{0.00}"), ("kernels", "@kernels")]))
    add_legend(shares, items)
    return Drawn(row(errors, shares))


def outcome_chart(counts: Mapping[str, Mapping[str, int]]) -> Drawn:
    """A bar for each type and numerics, divided by outcome."""
    names = list(counts)
    kinds = [kind for kind in OUTCOME_COLORS if any(kind.value in each for each in counts.values())]
    chart = new_figure(
        "Trials by outcome",
        "trials",
        "",
        y_range=FactorRange(factors=names[::-1]),
        height=90 + 34 * len(names),
        x_range=DataRange1d(start=0),
    )
    columns = {kind.value: [counts[name].get(kind.value, 0) for name in names] for kind in kinds}
    bars = chart.hbar_stack(
        list(columns),
        y="name",
        height=0.7,
        color=[OUTCOME_COLORS[kind] for kind in kinds],
        source=ColumnDataSource({"name": names, **columns}),
    )
    for bar in bars:
        chart.add_tools(HoverTool(renderers=[bar], tooltips=[("", "@name"), ("$name", "@$name")]))
    add_legend(chart, [(kind.value.replace("_", " "), [bar]) for kind, bar in zip(kinds, bars, strict=True)])
    chart.ygrid.grid_line_color = None
    return Drawn(chart)
