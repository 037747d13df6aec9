"""The page: sections of what a source has, each with a text, charts and tables, in one HTML file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined

from hadagen.errors import printable
from hadagen.problem.regimes import LATENCY_ELEMENTS, REGIMES, Cache
from hadagen.report import curves, facts
from hadagen.report.against import Comparison
from hadagen.report.drawing.charts import (
    COLORS,
    MOST_CURVES,
    curve_chart,
    digits,
    error_chart,
    size_charts,
    speed_charts,
)
from hadagen.report.knob_effects import ALL_PROBLEMS, Effects, knob_effects
from hadagen.report.names import SERIES, short_count, short_text
from hadagen.report.scores import ALL, Search, searches
from hadagen.report.sources import Source
from hadagen.report.speed import Mean, OverSizes, Speed, speed_over_sizes, speeds

# How every page begins.
BEGINNING = b"<!DOCTYPE html>\n<!-- hadagen report -->\n"
MOST_ENVIRONMENTS = 50
MOST_KNOBS = 12
MOST_TIMES = 40_000  # in the charts over sizes
MOST_WINNERS = 20_000

_REGIME_WORDS = {
    "latency": f"up to {short_count(LATENCY_ELEMENTS)} elements, in L2",
    "L2": "more elements, in L2",
    "memory": "too large for L2",
}
# Field of `facts.WinnerRow`, and title.
_WINNERS = {
    "problem": "problem",
    "device": "GPU",
    "destination": "result",
    "cache": "input",
    "elements": "elements",
    "us": "µs",
    "fraction": "of a copy",
    "error": "error",
    "date": "date",
    "knobs": "knobs other than their defaults",
}


@dataclass(frozen=True)
class Table:
    """head: the name of each column, and whether it has numbers. lines: a cell for each column."""

    head: Sequence[tuple[str, bool]]
    lines: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Section:
    """charts: captions and figures. series: names and colors, each with a box to tick. winners: titles of columns."""

    title: str
    text: str
    charts: Sequence[tuple[str, Any]] = ()
    tables: Sequence[Table] = ()
    speeds: Sequence[Speed] = ()
    series: Mapping[str, str] = field(default_factory=dict)
    effects: Mapping[tuple[str, str], Effects] = field(default_factory=dict)
    winners: Sequence[str] = ()


def report_page(source: Source, compared: Comparison | None = None) -> str:
    """One HTML file that needs no network. The source has at least one trial or winner.

    compared: the source beside another one, which then is what the page begins with.
    """
    head = facts.head_of(source)
    lines = speed_over_sizes(source.winners)
    sections = list(_sections(source, lines, compared))
    figures = [chart for section in sections for _, chart in section.charts]
    plots, drawn = components(figures) if figures else ("", ())
    bokeh = Resources(mode="inline", components=["bokeh"]).render_js() if figures else ""
    scripts = f"{plots}\n<script>{Path(__file__).with_name('page.js').read_text(encoding='utf-8')}</script>"
    templates = Templates(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    names = list(dict.fromkeys(line.series for line in lines))
    return templates.get_template("page.html.j2").render(
        title=f"hadagen: {source.kind} of {_devices(head)}",
        headline=compared.summary if compared else facts.headline(source),
        place=printable(source.place),
        policy=_policy(bokeh, scripts),
        bokeh=bokeh,
        scripts=scripts,
        sections=sections,
        drawn=dict(zip((chart.name for chart in figures), drawn, strict=True)),
        regimes=_REGIME_WORDS,
        microseconds=_microseconds,
        lowest=_lowest,
        most_knobs=MOST_KNOBS,
        way=facts.way(head),
        data={
            "regimes": REGIMES,
            "caches": [cache.value for cache in Cache],
            "series": [name for name in SERIES if name in names],
            "lines": [_line(line) for line in _some_lines(lines)],
            "winners": _winner_data(facts.winner_rows(source.winners)[:MOST_WINNERS]),
        },
    )


def _devices(head: facts.Head) -> str:
    return short_text(", ".join(head.gpus or head.archs))


def _policy(*parts: str) -> str:
    """A content security policy: only these scripts run, by their SHA-256, and nothing is fetched."""
    scripts = re.findall(r'<script(?: type="text/javascript")?>(.*?)</script>', "".join(parts), re.DOTALL)
    sums = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in sums)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"


def _sections(source: Source, lines: Sequence[OverSizes], compared: Comparison | None) -> Iterator[Section]:
    if compared:
        yield _compared(compared)
    if source.winners:
        yield from _speed(source, lines)
    yield from _search(searches(source.trials), facts.way(facts.head_of(source)))
    if points := facts.error_points(source):
        yield _errors(points)
    if source.trials:
        yield _outcomes(source)
    yield _provenance(source)
    if source.winners:
        yield _winners(source)


def _compared(compared: Comparison) -> Section:
    numbers = "factor", "least", "largest", "cells"
    lines = [
        (
            each.problem,
            each.verdict,
            *(f"{getattr(each, name):.3f}" if each.cells else "–" for name in numbers[:3]),
            f"{each.cells:,}",
            each.device,
        )
        for each in compared.problems
    ]
    text = (
        "The factor is the time of the second over that of the first, in the geometric mean over the cells that both "
        "have. More than 1 means that the first is faster. The slowest come first."
    )
    head = [("problem", False), ("is", False), *((name, True) for name in numbers), ("GPU", False)]
    return Section("Comparison", text, tables=[Table(head, lines)])


def _speed(source: Source, lines: Sequence[OverSizes]) -> Iterator[Section]:
    found = speeds(source.winners)
    text = (
        "Enter the length of your rows. A number is the speed of the kernels that calls run, as a fraction of a copy: "
        "the time of a copy of the same bytes over theirs, in the geometric mean over sizes. 1 is as fast as a copy, "
        "and more is better. Below stand the times of one launch at the smallest and at the largest size."
    )
    if facts.head_of(source).estimated:
        text += " Times estimated for an arch come from a cost model; no kernel ran there."
    yield Section("Your n", text, speeds=found)
    names = [name for name in SERIES if any(each.series == name for each in found)]
    yield Section(
        "Speed over n",
        "The same numbers for every n, of what is chosen above. Move the pointer over a mark to see its numbers.",
        [
            (f"{regime}: {_REGIME_WORDS[regime]}", chart)
            for regime, chart in zip(REGIMES, speed_charts(names, [each.n for each in found]), strict=True)
        ],
        series={name: COLORS[name] for name in names},
    )
    words = "hot: the input lies in L2", "cold: the input lies in memory"
    text = (
        "One n at each size. Data of the shaded sizes is larger than L2. A call runs the kernel that is fastest where "
        "data of its size usually lies, in L2 or in memory; unfilled marks are its times in the other place."
    )
    if left_out := sum(len(each.elements) for each in lines[len(_some_lines(lines)) :]):
        text += f" The charts have no room for {left_out:,} more times."
    charts = list(zip((f'n = <span class="n"></span>, {each}' for each in words), size_charts(names), strict=True))
    yield Section("Speed over sizes", text, charts)


def _search(found: Sequence[Search], way: str) -> Iterator[Section]:
    effects = knob_effects(found)
    if any(each.knobs for each in effects.values()):
        most = effects[ALL_PROBLEMS, ALL]
        text = (
            f"From {most.trials:,} {way} trials. A trial scores the geometric mean, over the sizes and destinations at "
            f"which it was {way}, of the best time of its problem divided by its own. A box reaches from the first to "
            "the third quartile, with a line at the median; the thin line reaches from the 5th to the 95th percentile, "
            "and the dot is the best. The number beside a knob is the share of the variance of the logarithm of the "
            "score, within problems, that its values explain by themselves, less what chance explains. A search tries "
            "good values more often, so these are the effects among what it tried."
        )
        if len(most.knobs) > MOST_KNOBS:
            text += f" The {MOST_KNOBS} most important of {len(most.knobs)} knobs are shown."
        if most.fixed:
            text += f" Only one value was tried of {', '.join(most.fixed)}."
        yield Section("Effects of the knobs", text, effects=effects)
    if lines := curves.curves(found):
        text = (
            "How soon the search came near to the best that it found in the end, in the geometric mean over all sizes. "
            "Until a trial of a size was right, the slowest time of the search counts there. A search that has ended "
            f"counts as 1 in the mean. In the median of {len(lines):,} searches, {curves.NEAR:.0%} of the best (dotted "
            f"line) was reached after {curves.median_trials_to_near(lines):,.0f} trials."
        )
        if len(lines) > MOST_CURVES:
            text += f" Single lines are those of the {MOST_CURVES} longest searches; the mean is over all."
        yield Section("Search", text, [("Thin: each search; thick: the mean of all", curve_chart(lines))])


def _errors(points: Sequence[facts.ErrorPoint]) -> Section:
    near = max(points, key=lambda point: point.error / point.bound)
    text = (
        "Each mark is a problem: the largest relative error ‖out − ref‖ / ‖ref‖ against float64 over all classes of "
        "input, of the least exact kernel that was found right. A kernel that misses the bound of its problem is never "
        f"used. The nearest to its bound is {near.problem}, with {near.error / near.bound:.2f} of it. A bound of "
        "16-bit results is only a little more than the roundings to this type that the problem allows, so errors are "
        "near to it at every n."
    )
    return Section("Errors", text, [("Relative error", error_chart(points))])


def _outcomes(source: Source) -> Section:
    counts = facts.outcomes_by_series(source.trials)
    kinds = list(facts.head_of(source).outcomes)
    head = ("trials of", False), *((kind.replace("_", " "), True) for kind in kinds)
    tables = [Table(head, [(name, *(f"{of.get(kind, 0):,}" for kind in kinds)) for name, of in counts.items()])]
    alike, others = facts.failures(source.trials)
    if not alike:
        return Section("Failures", "No trial failed.", tables=tables)
    text = (
        "The most frequent failures, each with what was said of the first. Failures that differ only in numbers count "
        "together."
    )
    if others:
        text += f" {others:,} more trials failed in other ways."
    head = (
        ("outcome", False),
        ("trials", True),
        ("problems", True),
        ("detail", False),
        ("problem", False),
        ("knobs", False),
    )
    lines = [
        (
            each.outcome.replace("_", " "),
            f"{each.trials:,}",
            f"{each.problems:,}",
            each.detail,
            each.problem,
            each.knobs,
        )
        for each in alike
    ]
    return Section("Failures", text, tables=[*tables, Table(head, lines)])


def _provenance(source: Source) -> Section:
    head = [
        ("GPU", False),
        ("compute capability", False),
        ("SMs", True),
        ("L2, MiB", True),
        ("driver", False),
        ("CUDA", False),
        ("compiler", False),
        ("SM, MHz", True),
        ("memory, MHz", True),
        ("memory, GiB", True),
        ("power limit, W", True),
        ("trials" if source.trials else "winners", True),
    ]
    known = facts.environments(source)
    lines = [
        [
            *(printable(text) or "–" for text in (where.gpu or "estimated", where.compute_capability)),
            where.sms or "–",
            f"{where.l2_bytes / (1 << 20):g}" if where.l2_bytes else "–",
            *(printable(text) or "–" for text in (where.driver, where.cuda, where.nvcc)),
            where.sm_clock_mhz or "–",
            where.memory_clock_mhz or "–",
            f"{where.memory_bytes / (1 << 30):g}" if where.memory_bytes else "–",
            where.power_limit_watts or "–",
            f"{count:,}",
        ]
        for where, count in known[:MOST_ENVIRONMENTS]
    ]
    text = "The devices and the software that the times come from. Clocks are the highest that a GPU allows."
    if len(known) > MOST_ENVIRONMENTS:
        text += f" The table has {MOST_ENVIRONMENTS} of {len(known):,} environments."
    return Section(
        "Provenance",
        text,
        tables=[Table([("what", False), ("which", False)], list(_about(source))), Table(head, lines)],
    )


def _about(source: Source) -> Iterator[tuple[str, str]]:
    head = facts.head_of(source)
    yield source.kind, printable(source.place)
    if source.digest:
        yield "content digest", printable(source.digest)
        yield "written by", f"hadagen {printable(source.version)}"
    yield "report made by", f"hadagen {version('hadagen')}"
    yield "arch", ", ".join(head.archs)
    yield "problems", f"{head.problems:,}"
    if head.trials:
        yield "trials", f"{head.trials:,}"
    yield "winners", f"{head.winners:,}"
    yield "kernels that win", f"{head.kernels:,}"
    names = {"measured": head.measured, "estimated": head.estimated}
    yield "times", ", ".join(f"{count:,} {name}" for name, count in names.items() if count)
    if head.first:
        yield "dates", " to ".join(sorted({head.first[:10], head.last[:10]}))


def _winners(source: Source) -> Section:
    text = "The kernel that a call runs near each size. A click on the head of a column sorts by it."
    if len(source.winners) > MOST_WINNERS:
        text += f" The page has the first {MOST_WINNERS:,} of {len(source.winners):,} winners;"
        text += " hadagen bundle show --json has all."
    return Section("Winners", text, winners=list(_WINNERS.values()))


def _winner_data(rows: Sequence[facts.WinnerRow]) -> dict[str, Any]:
    """rows: a value for each of `_WINNERS`. texts: column → its texts, once each; rows have their numbers."""
    columns: list[list[Any]] = []
    texts: dict[int, list[str]] = {}
    for number, name in enumerate(_WINNERS):
        values = [getattr(row, name) for row in rows]
        if any(isinstance(value, str) for value in values):
            known = {text: index for index, text in enumerate(dict.fromkeys(values))}
            texts[number], values = list(known), [known[value] for value in values]
        columns.append([digits(value) for value in values])
    return {"rows": list(zip(*columns, strict=True)), "texts": texts}


def _some_lines(lines: Sequence[OverSizes]) -> list[OverSizes]:
    """As many of the first lines as have no more than `MOST_TIMES` times."""
    times = accumulate(len(line.elements) for line in lines)
    return [line for line, so_far in zip(lines, times, strict=True) if so_far <= MOST_TIMES]


def _line(line: OverSizes) -> dict[str, Any]:
    numbers = {"": -1} | {name: number for number, name in enumerate(REGIMES)}
    return {
        "device": line.shown.device,
        "kind": line.shown.kind,
        "destination": line.shown.destination,
        "series": line.series,
        "n": line.n,
        "problem": line.problem,
        "cache": line.cache,
        "l2_elements": line.l2_elements,
        "x": line.elements,
        "y": [digits(value) for value in line.fraction],
        "us": [digits(value) for value in line.us],
        "regime": [numbers[name] for name in line.regime],
    }


def _microseconds(mean: Mean) -> str:
    """The times of a mean, such as "0.88–2.1 µs"."""
    return f"{'–'.join(dict.fromkeys(f'{us:#.3g}'.rstrip('.') for us in (mean.least_us, mean.largest_us)))} µs"


def _lowest(effects: Effects) -> float:
    """Where the axis of the boxes begins."""
    return min((value.low for knob in effects.knobs for value in knob.values), default=0.0)
