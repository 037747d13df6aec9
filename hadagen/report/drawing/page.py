"""The page: sections of what a source has, each with a text, a chart and tables, in one HTML file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.resources import INLINE
from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined

from hadagen.errors import printable
from hadagen.problem.regimes import LATENCY_ELEMENTS
from hadagen.report import curves, facts
from hadagen.report.drawing.search_charts import (
    MOST_CURVES,
    MOST_KNOBS,
    curve_chart,
    error_charts,
    knob_chart,
    outcome_chart,
)
from hadagen.report.drawing.speed_charts import speed_charts, times_left_out
from hadagen.report.drawing.style import Drawn
from hadagen.report.drawing.winner_table import MOST_ROWS, winner_table
from hadagen.report.knob_effects import ALL_PROBLEMS, knob_effects
from hadagen.report.names import short_count, short_text
from hadagen.report.scores import ALL, Search, searches
from hadagen.report.sources import Source
from hadagen.report.speed import speed_over_n, speed_over_sizes

# How every page begins.
BEGINNING = b"<!DOCTYPE html>\n<!-- hadagen report -->\n"
MOST_ENVIRONMENTS = 50

READING = (
    "Speeds are fractions of a copy: the time of a copy of the same bytes, divided by the time of the kernel. 1 means "
    "as fast as a copy, and more is better. Times fall into three regimes. latency: up to "
    f"{short_count(LATENCY_ELEMENTS)} elements (rows times n), with the input in the L2 cache; L2: more elements, with "
    "the input in L2; memory: inputs that are too large for L2. Move the pointer over a mark to see its numbers. Click "
    "a name in a legend to hide it."
)


@dataclass(frozen=True)
class Table:
    """head: the name of each column, and whether it has numbers. lines: a cell for each column."""

    head: Sequence[tuple[str, bool]]
    lines: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    drawn: Drawn | None = None
    tables: Sequence[Table] = ()
    root: str = ""  # the name of what is drawn


def report_page(source: Source) -> str:
    """One HTML file that needs no network. The source has at least one trial or winner."""
    sections = list(_sections(source))
    document = Document()
    for section in sections:
        if section.drawn:
            section.drawn.body.name = section.root
            document.add_root(section.drawn.body)
            if section.drawn.update:
                document.js_on_event("document_ready", section.drawn.update)
    head = facts.head_of(source)
    templates = Templates(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    templates.globals["policy"] = _policy
    shown = {
        "heading": f"hadagen: {source.kind} of {short_text(', '.join(head.gpus or head.archs))}",
        "place": printable(source.place),
        "head": _head(head),
        "reading": READING,
        "sections": sections,
    }
    return file_html(document, INLINE, template=templates.get_template("page.html.j2"), template_variables=shown)


def _policy(*parts: str) -> str:
    """A content security policy: only these scripts of Bokeh run, by their SHA-256, and nothing is fetched."""
    scripts = re.findall(r'<script(?: type="text/javascript")?>(.*?)</script>', "".join(parts), re.DOTALL)
    sums = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in sums)
    # Charts call `new Function` for what is selected, and set styles.
    return (
        f"default-src 'none'; script-src {allowed} 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src data:"
    )


def _head(head: facts.Head) -> Iterator[tuple[str, str]]:
    yield "arch", ", ".join(head.archs)
    yield "GPU", ", ".join(head.gpus) or "none"
    yield "problems", f"{head.problems:,}"
    if head.trials:
        yield "trials", f"{head.trials:,}"
        yield "outcomes", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in head.outcomes.items())
    yield "winners", f"{head.winners:,}"
    yield "kernels that win", f"{head.kernels:,}"
    names = {"measured": head.measured, "estimated": head.estimated}
    known = {name: count for name, count in names.items() if count}
    yield (
        "times are",
        " and ".join(known) if len(known) < 2 else ", ".join(f"{n:,} {name}" for name, n in known.items()),
    )
    if head.first:
        yield "dates", " to ".join(sorted({head.first[:10], head.last[:10]}))


def _sections(source: Source) -> Iterator[Section]:
    found = searches(source.trials)
    if source.winners:
        yield _speed(source)
    yield from _search(found)
    if points := facts.error_points(source):
        yield Section(
            "Errors",
            "Each mark is a problem: the largest relative error over all classes of input, of the least exact kernel "
            "that was found right. A kernel is used only if it keeps the bound of its problem (dotted line).",
            error_charts(points),
            root="errors",
        )
    if source.trials:
        yield _outcomes(source)
    yield _environments(source)
    if source.winners:
        yield _winners(source)


def _speed(source: Source) -> Section:
    lines = speed_over_sizes(source.winners)
    text = (
        "The upper charts show the winners of all sizes at once, in the geometric mean. The lower chart shows the "
        "winners of one n at each size, hot and cold. Unfilled marks are times that decide nothing, such as of cold "
        "data where data usually lies in L2."
    )
    if left_out := times_left_out(lines):
        text += f" The lower chart has no room for {left_out:,} more times."
    return Section("Speed", text, speed_charts(speed_over_n(source.winners), lines), root="speed")


def _search(found: Sequence[Search]) -> Iterator[Section]:
    effects = knob_effects(found)
    if any(each.knobs for each in effects.values()):
        most = effects[ALL_PROBLEMS, ALL]
        text = (
            f"From {most.trials:,} timed trials. A trial scores the geometric mean, over the sizes and destinations at "
            "which it was timed, of the best time of its problem divided by its own. A box reaches from the first to "
            "the third quartile, a line from the 5th to the 95th percentile. The number beside a knob is the share of "
            "the variance of the logarithm of the score, within problems, that its values explain by themselves, less "
            "what chance explains. A search tries good values more often, so these are the effects among what it tried."
        )
        if len(most.knobs) > MOST_KNOBS:
            text += f" The {MOST_KNOBS} most important of {len(most.knobs)} knobs are shown."
        if most.fixed:
            text += f" Only one value was tried of {', '.join(most.fixed)}."
        yield Section("Effects of the knobs", text, knob_chart(effects), root="knobs")
    if lines := curves.curves(found):
        text = (
            "How soon the search came near to the best that it found in the end, in the geometric mean over all sizes. "
            "Until a trial of a size was right, the slowest time of the search counts there. A search that has ended "
            f"counts as 1 in the mean. In the median of {len(lines):,} searches, {curves.NEAR:.0%} of the best (dotted "
            f"line) was reached after {curves.median_trials_to_near(lines):,.0f} trials."
        )
        if len(lines) > MOST_CURVES:
            text += f" Single lines are those of the {MOST_CURVES} longest searches; the mean is over all."
        yield Section("Search", text, curve_chart(lines), root="search")


def _outcomes(source: Source) -> Section:
    counts = facts.outcomes_by_series(source.trials)
    alike, others = facts.failures(source.trials)
    if not alike:
        return Section("Failures", "No trial failed.", outcome_chart(counts), root="outcomes")
    text = (
        "The most frequent failures, each with what was said of the first. Failures that differ only in numbers count "
        "together."
    )
    if others:
        text += f" {others:,} more trials failed in other ways."
    head = [
        ("outcome", False),
        ("trials", True),
        ("problems", True),
        ("detail", False),
        ("problem", False),
        ("knobs", False),
    ]
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
    return Section("Failures", text, outcome_chart(counts), [Table(head, lines)], root="outcomes")


def _environments(source: Source) -> Section:
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
    files: list[tuple[str, str]] = [(source.kind, printable(source.place))]
    if source.digest:
        files += [("content digest", printable(source.digest)), ("written by", f"hadagen {printable(source.version)}")]
    files += [("report made by", f"hadagen {version('hadagen')}")]
    return Section(
        "Provenance",
        text,
        tables=[Table(head, lines), Table([("what", False), ("which", False)], files)],
    )


def _winners(source: Source) -> Section:
    rows = facts.winner_rows(source.winners)
    text = "The kernel that a call runs near each size. Click the head of a column to sort by it."
    if len(rows) > MOST_ROWS:
        text += f" The table has the first {MOST_ROWS:,} of {len(rows):,} winners; hadagen bundle show --json has all."
    return Section("Winners", text, winner_table(rows), root="winners")
