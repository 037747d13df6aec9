"""Charts of the speed of winners, over n and over sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    DataRange1d,
    HoverTool,
)
from bokeh.models.annotations import BoxAnnotation, Label
from bokeh.models.widgets.groups import CheckboxGroup

from hadagen.problem.regimes import ELEMENT_BUCKETS, LATENCY_ELEMENTS, REGIMES, Cache
from hadagen.report.drawing.style import (
    BAND,
    COLORS,
    FAINT,
    MARKERS,
    WIDTH,
    Drawn,
    colored_labels,
    copy_line,
    digits,
    mark_ticks,
    new_figure,
    powers_within,
    script,
    select,
    span_of,
)
from hadagen.report.names import PLAIN, SERIES, short_count
from hadagen.report.speed import OverN, OverSizes

MOST_TIMES = 40_000  # in the chart over sizes
SPEED = "speed, as a fraction of a copy"
# The columns of a line; `speed.js` fills them.
_OVER_N = ("x", "y", "sizes")
_OVER_SIZES = ("x", "y", "us", "regime", "problem", "cache", "fill")


def speed_charts(over_n: Sequence[OverN], over_sizes: Sequence[OverSizes]) -> Drawn:
    """Three panels over n, one for each regime, and a chart over sizes; what they show is selected above them."""
    some = _some_lines(over_sizes)
    first = _first_shown(some)
    names = [name for name in SERIES if any(line.series == name for line in some)]
    shown = [line.shown for line in some]
    device = select("GPU", first.shown.device, (each.device for each in shown), 330)
    kind = select("Computes", first.shown.kind, (each.kind for each in shown), 330)
    destination = select("Result", first.shown.destination, (each.destination for each in shown), 160)
    size = select("n of the lower chart", first.size, (line.size for line in some), 260)
    series = CheckboxGroup(
        labels=list(names),
        active=list(range(len(names))),
        inline=True,
        stylesheets=[colored_labels([COLORS[name] for name in names])],
    )
    shared = DataRange1d(start=0, range_padding=0.08, only_visible=True)
    panels = [_Panel(regime, names, [line.n for line in some], shared) for regime in REGIMES]
    chart = _SizesChart(names)
    update = CustomJS(
        args={
            "over_n": _over_n_source(over_n),
            "sizes": _over_sizes_source(some),
            "panels": [panel.sources for panel in panels],
            "lines": chart.sources,
            # Each list is by series, as `names` is.
            "renderers": [list(each) for each in zip(*(panel.dots for panel in panels), *chart.renderers, strict=True)],
            "joints": [list(each) for each in zip(*(panel.joints for panel in panels), strict=True)],
            "regimes": list(REGIMES),
            "names": names,
            "colors": [COLORS[name] for name in names],
            "beyond_l2": chart.beyond_l2,
            "memory_label": chart.memory_label,
            "device": device,
            "kind": kind,
            "destination": destination,
            "size": size,
            "series": series,
        },
        code=script("speed.js"),
    )
    for each in (device, kind, destination, size):
        each.js_on_change("value", update)
    series.js_on_change("active", update)
    over_lengths = row(*(panel.figure for panel in panels))
    return Drawn(column(row(device, kind, destination), series, over_lengths, size, chart.figure, spacing=8), update)


class _Panel:
    """The fraction of copy over n in one regime. By series: `sources`, and the marks and lines that show them."""

    def __init__(self, regime: str, names: Sequence[str], lengths: Sequence[int], y_range: DataRange1d) -> None:
        self.figure = new_figure(
            f"{regime}: {_REGIME_WORDS[regime]}",
            "n, elements in a row",
            SPEED if regime == REGIMES[0] else "",
            width=WIDTH // 3,
            height=300,
            x_axis_type="log",
            x_range=span_of(lengths),
            y_range=y_range,
        )
        mark_ticks(self.figure, powers_within(lengths, 7), str)
        self.figure.add_layout(copy_line())
        self.sources = [ColumnDataSource({column: [] for column in _OVER_N}) for _ in names]
        self.joints, self.dots = [], []
        for name, source in zip(names, self.sources, strict=True):
            looks = {"source": source, "color": COLORS[name]}
            self.joints.append(self.figure.line("x", "y", line_width=2, **looks))
            self.dots.append(self.figure.scatter("x", "y", size=6, marker=MARKERS[name], name=name, **looks))
        tips = [("", "$name"), ("n", "@x"), ("of copy", "@y{0.000}"), ("mean over", "@sizes times")]
        self.figure.add_tools(HoverTool(renderers=self.dots, tooltips=tips))


class _SizesChart:
    """The fraction of copy over elements, hot and cold. `sources`, `renderers`: by the kind of line, and by series."""

    def __init__(self, names: Sequence[str]) -> None:
        self.figure = new_figure(
            "One n over sizes. Solid: hot, input in L2; dashed: cold, input in memory; filled: what names winners",
            "elements, rows times n",
            SPEED,
            height=380,
            x_axis_type="log",
            y_range=DataRange1d(start=0, range_padding=0.12, only_visible=True),
            x_range=span_of(ELEMENT_BUCKETS),
        )
        mark_ticks(self.figure, ELEMENT_BUCKETS, short_count)
        band: dict[str, Any] = {"fill_color": BAND, "fill_alpha": 1, "level": "image"}
        self.beyond_l2 = BoxAnnotation(left=ELEMENT_BUCKETS[-1], **band)
        starts = self.figure.x_range.start, LATENCY_ELEMENTS, ELEMENT_BUCKETS[-1]
        labels = [self._label(regime, start) for regime, start in zip(REGIMES, starts, strict=True)]
        self.memory_label = labels[-1]
        for each in (BoxAnnotation(right=LATENCY_ELEMENTS, **band), self.beyond_l2, *labels, copy_line()):
            self.figure.add_layout(each)
        self.sources = [[ColumnDataSource({column: [] for column in _OVER_SIZES}) for _ in names] for _ in Cache]
        self.renderers: list[list[Any]] = []
        dots = []
        for sources, dash in zip(self.sources, ("solid", "dashed"), strict=True):
            known = list(zip(names, sources, strict=True))
            looks: dict[str, Any] = {"line_width": 2, "line_dash": dash}
            self.renderers.append(
                [self.figure.line("x", "y", source=source, color=COLORS[name], **looks) for name, source in known]
            )
            looks = {"fill_color": "fill", "size": 7}
            marks = [
                self.figure.scatter("x", "y", source=source, line_color=COLORS[name], marker=MARKERS[name], **looks)
                for name, source in known
            ]
            self.renderers.append(marks)
            dots += marks
        tips = [("", "@problem, @cache"), ("elements", "@x{0,0}"), ("µs", "@us{0.00}"), ("of copy", "@y{0.000}")]
        self.figure.add_tools(HoverTool(renderers=dots, tooltips=[*tips, ("regime", "@regime")]))

    @staticmethod
    def _label(text: str, x: float) -> Label:
        """A label at the top of the chart."""
        place: dict[str, Any] = {"x": x, "y": 290, "x_offset": 6, "y_units": "screen"}
        return Label(text=text, text_font_size="12px", text_color=FAINT, **place)


_REGIME_WORDS = {
    "latency": f"up to {short_count(LATENCY_ELEMENTS)} elements, in L2",
    "L2": "more elements, in L2",
    "memory": "inputs too large for L2",
}


def _some_lines(lines: Sequence[OverSizes]) -> list[OverSizes]:
    """As many of the first lines as have no more than `MOST_TIMES` times."""
    times = accumulate(len(line.elements) for line in lines)
    return [line for line, so_far in zip(lines, times, strict=True) if so_far <= MOST_TIMES]


def times_left_out(lines: Sequence[OverSizes]) -> int:
    """How many times the chart over sizes has no room for."""
    return sum(len(line.elements) for line in lines) - sum(len(line.elements) for line in _some_lines(lines))


def _first_shown(over_sizes: Sequence[OverSizes]) -> OverSizes:
    """The line that is shown first: of the device, kind and destination with the most lines (of plain rows if there are
    any), the line of the middle n."""
    plain = [line for line in over_sizes if line.shown.kind == PLAIN] or over_sizes
    most, _ = max(sorted(Counter(line.shown for line in plain).items()), key=lambda item: item[1])
    lines = sorted((line for line in plain if line.shown == most), key=lambda line: line.n)
    return lines[len(lines) // 2]


def _over_n_source(lines: Sequence[OverN]) -> ColumnDataSource:
    return ColumnDataSource(
        {
            "device": [line.shown.device for line in lines],
            "kind": [line.shown.kind for line in lines],
            "destination": [line.shown.destination for line in lines],
            "series": [line.series for line in lines],
            "regime": [line.regime for line in lines],
            "x": [line.n for line in lines],
            "y": [[digits(value) for value in line.fraction] for line in lines],
            "sizes": [line.sizes for line in lines],
            "joined": [line.joined for line in lines],
        }
    )


def _over_sizes_source(lines: Sequence[OverSizes]) -> ColumnDataSource:
    numbers = {"": -1} | {name: number for number, name in enumerate(REGIMES)}
    return ColumnDataSource(
        {
            "device": [line.shown.device for line in lines],
            "kind": [line.shown.kind for line in lines],
            "destination": [line.shown.destination for line in lines],
            "series": [line.series for line in lines],
            "n": [line.n for line in lines],
            "size": [line.size for line in lines],
            "problem": [line.problem for line in lines],
            "cache": [line.cache for line in lines],
            "l2_elements": [line.l2_elements for line in lines],
            "x": [line.elements for line in lines],
            "y": [[digits(value) for value in line.fraction] for line in lines],
            "us": [[digits(value) for value in line.us] for line in lines],
            "regime": [[numbers[name] for name in line.regime] for line in lines],
        }
    )
