"""Brings the numbers in the README, performance.md and search.md, and the pictures, up to date with `docs/data`.

    python docs/refresh.py            # write them
    python docs/refresh.py --check    # change nothing; fail, naming what is out of date

`data/h100.csv` is written by `hadagen bundle export` from the shipped bundle; `data/peers_h100.csv` holds the same
cells for the libraries we compare with. `data/calls_h100.json` is written by `hadagen calls --json`, and
`data/search.json` by `compare_search.py`. Drawing needs matplotlib (pip install 'hadagen[docs]'); checking does not.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
OURS = DOCS / "data" / "h100.csv"
PEERS = DOCS / "data" / "peers_h100.csv"
PICTURE = DOCS / "assets" / "speed.svg"
README = DOCS.parent / "README.md"
CALLS = DOCS / "data" / "calls_h100.json"
PERFORMANCE = DOCS / "performance.md"

SEARCH = DOCS / "data" / "search.json"
SEARCH_PAGE = DOCS / "search.md"
SEARCH_PICTURE = DOCS / "assets" / "search.svg"

BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
CALLS_BEGIN, CALLS_END = "<!-- calls:begin -->", "<!-- calls:end -->"
PITCHED_BEGIN, PITCHED_END = "<!-- pitched:begin -->", "<!-- pitched:end -->"
SEARCH_BEGIN, SEARCH_END = "<!-- search:begin -->", "<!-- search:end -->"
NO_DATA = "*No measured table has been committed yet.*"

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
# What the table and the picture show.
DTYPE, DESTINATION = "float16", "in-place"
# Title, elements (rows · n), where the data lies before the call.
REGIMES = (
    ("64 K elements, in L2", 1 << 16, "hot"),
    ("8 M elements, in L2", 1 << 23, "hot"),
    ("256 M elements, in memory", 1 << 28, "cold"),
)
# The same of pitched rows, whose element counts are others.
PITCHED_REGIMES = (
    ("64 K elements, in L2", 1 << 16, "hot"),
    ("1 M elements, in L2", 1 << 20, "hot"),
    ("128 M elements, in memory", 1 << 27, "cold"),
)
# From here on rows are as long as quantizers have them; and what two measurements of one kernel differ by.
COMMON_N, NOISE = 128, 0.02
COLUMNS = (16, 128, 512, 1024, 4096, 8192, 16384, 32768)
# Name in the documents → name in the tables and color.
LIBRARIES = {
    "hadagen, fast": ("hadagen fast", "#1b6ac9"),
    "hadagen, accurate": ("hadagen accurate", "#0b2e59"),
    "HadaCore": ("hadacore", "#d9822b"),
    "fast-hadamard-transform": ("fast-hadamard-transform", "#8a8f98"),
}


# Of our searches, and of Kernel Tuner's from the best on.
SEARCH_COLORS = ("#1b6ac9", "#8a8f98"), ("#d9822b", "#e3b341", "#a05a2c")
# Counts of evaluations that the table shows, and the least fraction that the picture does.
EVALUATIONS, LEAST_FRACTION = (1, 5, 10, 20, 30, 40, 60, 80, 100, 150, 200), 0.85


class Cell(NamedTuple):
    dtype: str
    n: int
    elements: int
    destination: str
    cache: str

    def __str__(self) -> str:
        return f"{self.dtype}, n = {self.n}, {self.elements >> 10} K elements, {self.destination}, {self.cache}"


class Time(NamedTuple):
    us: float
    fraction_of_copy: float


# library → cell → time
Times = dict[str, dict[Cell, Time]]


def read_times(ours: Path, peers: Path) -> Times:
    """Both tables, by the names of `LIBRARIES`; and of pitched rows, which the peers have no kernels for.

    The copy is the median of all that a table has of as many bytes: one in hundreds takes a third longer than the rest.
    """
    times: Times = defaultdict(dict)
    for path in (ours, peers):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        copies = defaultdict(list)
        for row in rows:
            copies[_traffic(row)].append(float(row["copy_us"]))
        for row in rows:
            library = f"hadagen {row['numerics']}" if path == ours else row["kernel"]
            if path == ours and row["pitched"] == "1":
                library += ", pitched"
            cell = Cell(row["dtype"], int(row["n"]), int(row["elements"]), row["destination"], row["cache"])
            us = float(row["us"])
            times[library][cell] = Time(us, median(copies[_traffic(row)]) / us)
    return times


def _traffic(row: Mapping[str, str]) -> tuple[object, ...]:
    """What tells the copies beside the times apart: bytes and places. Of pitched rows a quarter is left out, if that is
    an element."""
    pitched = row.get("pitched") == "1" and int(row["n"]) >= 4
    return pitched, int(row["elements"]) * DTYPE_BYTES[row["dtype"]], row["destination"], row["cache"]


def numbers(times: Times) -> str:
    """The README's picture and tables, in Markdown."""
    picture = f"![Speed over n as a fraction of a plain copy]({PICTURE.relative_to(README.parent)})"
    table = _table(times, REGIMES, {name: library for name, (library, _) in LIBRARIES.items()})
    return f"{picture}\n\n{table}\n\n{_comparison(times)}"


def _comparison(times: Times) -> str:
    """How many times as fast as each peer, by microseconds over all cells that both have, and where not."""
    lines = [
        f"| as fast as … (geometric mean) | all n | n ≥ {COMMON_N} | behind by more than {NOISE:.0%} | worst |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for numerics in ("accurate", "fast"):
        mine = times[f"hadagen {numerics}"]
        for name in ("HadaCore", "fast-hadamard-transform"):
            theirs = times[LIBRARIES[name][0]]
            ratios = {cell: theirs[cell].us / mine[cell].us for cell in sorted(mine.keys() & theirs.keys())}
            large = [ratio for cell, ratio in ratios.items() if cell.n >= COMMON_N]
            behind = sum(ratio < 1 - NOISE for ratio in ratios.values())
            worst = min(ratios, key=ratios.__getitem__)
            lines.append(
                f"| `{numerics}` / {name} | {geometric_mean(ratios.values()):.2f} | {geometric_mean(large):.2f} "
                f"| {behind} of {len(ratios)} cells | {ratios[worst]:.2f}: {worst} |"
            )
    return "\n".join(lines)


def pitched_table(times: Times) -> str:
    """What performance.md shows of the speed of pitched rows, in Markdown."""
    libraries = {numerics: f"hadagen {numerics}, pitched" for numerics in ("fast", "accurate")}
    return _table(times, PITCHED_REGIMES, libraries)


def _table(times: Times, regimes: Iterable[tuple[str, int, str]], libraries: Mapping[str, str]) -> str:
    header = " | ".join(str(n) for n in COLUMNS)
    lines = [f"| {DTYPE}, {DESTINATION}, fraction of copy; n = | {header} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    for title, elements, cache in regimes:
        for name, library in libraries.items():
            found = (times[library].get(Cell(DTYPE, n, elements, DESTINATION, cache)) for n in COLUMNS)
            cells = " | ".join("–" if time is None else f"{time.fraction_of_copy:.2f}" for time in found)
            lines.append(f"| {title}: {name} | {cells} |")
    return "\n".join(lines)


def call_table() -> str:
    """What performance.md shows of the CPU time of calls, in Markdown."""
    if not CALLS.exists():
        return NO_DATA
    data = json.loads(CALLS.read_text(encoding="utf-8"))
    versions = f"Python {data['python']} and PyTorch {data['torch']}"
    head = f"On a {data['gpu']}, with {versions}, for a {data['tensor']} tensor:"
    calls = [f"| {name} | {us:.1f} |" for name, us in data["us"].items()]
    once = [f"| {name} | {ms:.0f} |" for name, ms in data["ms"].items()]
    rule = "| --- | ---: |"
    return "\n".join([head, "", "| call | µs |", rule, *calls, "", "| once in a process | ms |", rule, *once])


class Searches(NamedTuple):
    """What search.json says. `ours` and `theirs`: name → after 1, 2, … evaluations, the fraction of the best."""

    data: dict[str, Any]
    ours: dict[str, list[float]]
    theirs: dict[str, list[float]]

    @classmethod
    def read(cls) -> Searches:
        data = json.loads(SEARCH.read_text(encoding="utf-8"))
        ours, theirs = (
            {name: search["curve"] for name, search in data[whose].items()} for whose in ("hadagen", "kernel_tuner")
        )
        return cls(data, ours, theirs)

    @property
    def labels(self) -> list[str]:
        return [*self.ours, *(f"Kernel Tuner: {name}" for name in self.theirs)]

    @property
    def curves(self) -> list[list[float]]:
        return [*self.ours.values(), *self.theirs.values()]


def search_numbers() -> str:
    """What search.md shows, in Markdown."""
    if not SEARCH.exists():
        return NO_DATA
    searches = Searches.read()
    data, problems = searches.data, searches.data["problems"]
    environment, versions = data["environment"], data["versions"]
    head = " | ".join(searches.labels)
    rule = " ---: |" * len(searches.labels)
    longest = max(problem["budget"] for problem in problems)
    counts = [count for count in EVALUATIONS if count < longest]
    rows = [f"| {count} | {_fractions(curve[count - 1] for curve in searches.curves)} |" for count in counts]
    all_searches = [*data["hadagen"].values(), *data["kernel_tuner"].values()]
    by_problem = [
        f"| {problem['name']} | {problem['variants']} | {problem['budget']} "
        f"| {_fractions(search['at_budget'][i] for search in all_searches)} |"
        for i, problem in enumerate(problems)
    ]
    others = ", ".join(f"{name} {value:.3f}" for name, value in data["kernel_tuner_others"].items())
    return "\n".join(
        [
            f"![Fraction of the best over evaluations]({SEARCH_PICTURE.relative_to(SEARCH_PAGE.parent)})",
            "",
            f"Recorded on a {environment['gpu']} (driver {environment['driver']}, nvcc {environment['nvcc']}); "
            f"{data['seeds']} seeds; Optuna {versions['optuna']}, Kernel Tuner {versions['kernel_tuner']}.",
            "",
            f"| evaluations | {head} |",
            f"| --- |{rule}",
            *rows,
            f"| **budget** | {_fractions(curve[-1] for curve in searches.curves)} |",
            "",
            f"| after its budget | variants | budget | {head} |",
            f"| --- | ---: | ---: |{rule}",
            *by_problem,
            "",
            f"Kernel Tuner's other strategies, after the budget: {others or 'none'}.",
        ]
    )


def _fractions(values: Iterable[float]) -> str:
    return " | ".join(f"{value:.3f}" for value in values)


def with_search(document: str) -> str:
    """search.md with its numbers between their markers."""
    return _between(SEARCH_PAGE, document, SEARCH_BEGIN, search_numbers(), SEARCH_END)


def with_numbers(readme: str, text: str) -> str:
    """The README with `text` between its markers."""
    return _between(README, readme, BEGIN, text, END)


def with_tables(document: str, pitched: str) -> str:
    """performance.md with the table of calls, and the one of pitched rows, between their markers."""
    document = _between(PERFORMANCE, document, CALLS_BEGIN, call_table(), CALLS_END)
    return _between(PERFORMANCE, document, PITCHED_BEGIN, pitched, PITCHED_END)


def _between(path: Path, document: str, first: str, text: str, last: str) -> str:
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise SystemExit(f"{path.name} has no {first} … {last}; put the two markers back")
    return f"{before}{first}\n{text}\n{last}{after}"


def fingerprint(*tables: Path) -> str:
    """What a picture says it was drawn from."""
    return "data " + hashlib.sha256(b"".join(table.read_bytes() for table in tables)).hexdigest()


def _pyplot() -> Any:
    """What draws. The same data gives the same file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # svg.fonttype: text stays text
    pyplot.rcParams.update({"svg.hashsalt": "hadagen", "svg.fonttype": "none", "font.family": "sans-serif"})
    return pyplot


def _save(pyplot: Any, figure: Any, path: Path, description: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None, "Description": description})
    pyplot.close(figure)


def _style(panel: Any) -> None:
    panel.grid(axis="y", color="#eceef1", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def draw_search(searches: Searches, path: Path, description: str) -> None:
    """A line for each search: the fraction of the best over evaluations."""
    pyplot = _pyplot()
    figure, panel = pyplot.subplots(figsize=(8, 3.9), layout="constrained")
    panel.axhline(1.0, color="#c5c9cf", linewidth=1, zorder=0)
    ours, theirs = SEARCH_COLORS
    colors = [*ours[: len(searches.ours)], *theirs[: len(searches.theirs)]]
    for label, curve, color in zip(searches.labels, searches.curves, colors, strict=True):
        width = 2.2 if label == "hadagen" else 1.5
        panel.plot(range(1, len(curve) + 1), curve, color=color, linewidth=width, label=label)
    panel.set_xlabel("evaluations")
    panel.set_ylabel("best possible time / best so far")
    panel.set_ylim(bottom=LEAST_FRACTION)
    _style(panel)
    panel.legend(loc="lower right", frameon=False)
    _save(pyplot, figure, path, description)


def draw(times: Times, path: Path, description: str) -> None:
    """One panel for each regime, a line for each library."""
    pyplot = _pyplot()
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, panels = pyplot.subplots(1, len(REGIMES), figsize=(11, 3.9), sharey=True, layout="constrained")
    for panel, (title, elements, cache) in zip(panels, REGIMES, strict=True):
        panel.axhline(1.0, color="#c5c9cf", linewidth=1, zorder=0)
        for name, (library, color) in LIBRARIES.items():
            shown = {
                cell.n: time.fraction_of_copy
                for cell, time in sorted(times[library].items())
                if cell == Cell(DTYPE, cell.n, elements, DESTINATION, cache)
            }
            width = 2.2 if library.startswith("hadagen") else 1.5
            panel.plot(shown.keys(), shown.values(), color=color, linewidth=width, marker="o", markersize=3, label=name)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator([2, 16, 128, 1024, 8192]))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlabel("n")
        panel.set_ylim(bottom=0)
        _style(panel)
    panels[0].set_ylabel("speed, as a fraction of a plain copy")
    figure.suptitle(f"H100, {DTYPE}, {DESTINATION}", fontsize=10, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LIBRARIES), frameon=False)
    _save(pyplot, figure, path, description)


def outdated() -> list[str]:
    """Names of the files that do not say what the data says."""
    readme, performance = README.read_text(encoding="utf-8"), PERFORMANCE.read_text(encoding="utf-8")
    search = SEARCH_PAGE.read_text(encoding="utf-8")
    times = read_times(OURS, PEERS) if OURS.exists() else None
    wanted = {
        README.name: with_numbers(readme, numbers(times) if times else NO_DATA) == readme,
        PICTURE.name: not times or _is_drawn_from(PICTURE, OURS, PEERS),
        PERFORMANCE.name: with_tables(performance, pitched_table(times) if times else NO_DATA) == performance,
        SEARCH_PAGE.name: with_search(search) == search,
        SEARCH_PICTURE.name: not SEARCH.exists() or _is_drawn_from(SEARCH_PICTURE, SEARCH),
    }
    return [name for name, fresh in wanted.items() if not fresh]


def _is_drawn_from(picture: Path, *tables: Path) -> bool:
    return picture.exists() and fingerprint(*tables) in picture.read_text(encoding="utf-8")


def main(arguments: list[str]) -> None:
    if arguments == ["--check"]:
        if stale := outdated():
            raise SystemExit(f"{', '.join(stale)}: out of date with docs/data; run python docs/refresh.py")
        return
    if arguments:
        raise SystemExit("usage: python docs/refresh.py [--check]")
    if not OURS.exists():
        raise SystemExit(f"{OURS} is missing; make it with hadagen bundle export")
    times = read_times(OURS, PEERS)
    performance = PERFORMANCE.read_text(encoding="utf-8")
    PERFORMANCE.write_text(with_tables(performance, pitched_table(times)), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_numbers(readme, numbers(times)), encoding="utf-8")
    draw(times, PICTURE, fingerprint(OURS, PEERS))
    SEARCH_PAGE.write_text(with_search(SEARCH_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if SEARCH.exists():
        draw_search(Searches.read(), SEARCH_PICTURE, fingerprint(SEARCH))


if __name__ == "__main__":
    main(sys.argv[1:])
