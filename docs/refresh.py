"""Brings the numbers in the README, performance.md and search.md, and the pictures, up to date with `docs/data`.

    python docs/refresh.py            # write them
    python docs/refresh.py --check    # change nothing; fail, naming what is out of date

`data/bench_h100.csv` is one run of `hadagen bench --csv` with the libraries we compare with installed; cells that it
lacks may come from an earlier one, in `data/bench_h100_earlier.csv`. `data/bench_h200.csv` is a run on an H200, without
them. `data/h100.csv` is written by `hadagen bundle export` from the shipped bundle, `data/between_h100.csv` by `hadagen
between --csv`, `data/calls_h100.json` by `hadagen calls --json`, and `data/search.json` by `compare_search.py`. Drawing
needs matplotlib (pip install 'hadagen[docs]'); checking does not.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
OURS = DOCS / "data" / "h100.csv"
BENCH = DOCS / "data" / "bench_h100.csv"
EARLIER = DOCS / "data" / "bench_h100_earlier.csv"
BENCH_H200 = DOCS / "data" / "bench_h200.csv"
BETWEEN = DOCS / "data" / "between_h100.csv"
PICTURE = DOCS / "assets" / "speed.svg"
README = DOCS.parent / "README.md"
CALLS = DOCS / "data" / "calls_h100.json"
RECORDINGS = DOCS / "data" / "recordings"
PERFORMANCE = DOCS / "performance.md"

SEARCH = DOCS / "data" / "search.json"
SEARCH_PAGE = DOCS / "search.md"
SEARCH_PICTURE = DOCS / "assets" / "search.svg"

BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
CALLS_BEGIN, CALLS_END = "<!-- calls:begin -->", "<!-- calls:end -->"
PITCHED_BEGIN, PITCHED_END = "<!-- pitched:begin -->", "<!-- pitched:end -->"
BETWEEN_BEGIN, BETWEEN_END = "<!-- between:begin -->", "<!-- between:end -->"
H200_BEGIN, H200_END = "<!-- h200:begin -->", "<!-- h200:end -->"
CHOICES_BEGIN, CHOICES_END = "<!-- choices:begin -->", "<!-- choices:end -->"
SEARCH_BEGIN, SEARCH_END = "<!-- search:begin -->", "<!-- search:end -->"
NO_DATA = "*No measured table has been committed yet.*"

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
# What the table and the picture show.
DTYPE, DESTINATION = "float16", "in-place"
H200_DTYPE = "bfloat16"
# What a kernel is named by.
NAMING = ("n", "dtype", "numerics", "elements", "destination", "cache")
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
# From here on rows are as long as quantizers have them; what two measurements of one kernel differ by; and the elements
# of what a model's layer transforms at once, and finds in L2.
COMMON_N, NOISE, LAYER = 128, 0.02, 1 << 23
ERROR_DTYPES = ("float16", "bfloat16")
COLUMNS = (16, 128, 512, 1024, 4096, 8192, 16384, 32768)
SIDES = "l" + "r" * len(COLUMNS)  # of a table that has them
# Name in the documents → color.
LIBRARIES = {
    "hadagen, fast": "#1b6ac9",
    "hadagen, accurate": "#0b2e59",
    "HadaCore": "#d9822b",
    "fast-hadamard-transform": "#8a8f98",
}
# Of others, name in the tables → in the documents.
PEER_NAMES = {"fast_hadamard_transform": "fast-hadamard-transform"}

METHOD = """\
Everything at a cell is timed within the same seconds, by the same method{runs}. Fractions are
of the median of the fastest of four copy kernels. Launches are timed one right after another. Ours start while the one
before still ends, and some let the next one start sooner, which copies and the peers do not, and so may beat a copy
where launches are short; beside kernels of other libraries that saves less, or nothing. From memory some of ours ask
for input ahead of its use, and beat a copy by a little. The second table divides microseconds. Cells are all of a size
from 64 K to 256 M elements, a type and a destination, with the input hot in L2 or cold, that both were timed at;
fast-hadamard-transform loses most at small n."""
ONE_RUN, TWO_RUNS = ", and all cells are of one run", "; cells of {what} are of an earlier run than the others"
RETUNED = "For some cells of n = {lengths} the bundle names other kernels by now."


# Knob, its value without an idea and with it, as the table of what ideas are worth has them.
CHOICES = (
    ("cluster", 1, 8),
    ("far_bits", "registers", "lanes"),
    ("far_lanes", "shuffle", "mma"),
    ("block_bits", "exchange", "load"),
    ("low_bits", "shuffle", "mma"),
    ("mma_carrier", "split", "tf32"),
    ("exchange_carrier", "fp32", "packed"),
    ("accumulator", "fp32", "packed"),
    ("load", "plain", "cp_async"),
    ("grid", "tiles", "persistent"),
    ("order", "by_step", "by_chunk"),
    ("store", "plain", "streaming"),
)
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
    error: float | None  # on normal inputs, where the table has it


# library → cell → time
Times = dict[str, dict[Cell, Time]]


def read_times() -> Times:
    """All tables, by the names of `LIBRARIES`; and of pitched rows, which the peers have no kernels for, by `pitched`.

    The copy is the median of all that a table has of as many bytes: one in hundreds takes a third longer than the rest.
    """
    times = _timed(_rows(OURS))
    for library in LIBRARIES:
        times.pop(library, None)  # timed by the bench too
    for rows in bench_tables():
        for library, timed in _timed(rows).items():
            times[library] |= timed
    return times


def _timed(rows: Iterable[Mapping[str, str]]) -> Times:
    """The times of one table."""
    rows, times = list(rows), defaultdict[str, dict[Cell, Time]](dict)
    copies = defaultdict(list)
    for row in rows:
        copies[_traffic(row)].append(float(row["copy_us"]))
    for row in rows:
        cell = Cell(row["dtype"], int(row["n"]), int(row["elements"]), row["destination"], row["cache"])
        us, error = float(row["us"]), row.get("error")
        times[_library(row)][cell] = Time(us, median(copies[_traffic(row)]) / us, float(error) if error else None)
    return times


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def bench_tables() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The rows of the run with the peers, and those of an earlier one at cells that it lacks."""
    rows = _rows(BENCH)
    timed = {_place(row) for row in rows}
    return rows, [row for row in (_rows(EARLIER) if EARLIER.exists() else []) if _place(row) not in timed]


def _place(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in Cell._fields)


def sources() -> tuple[Path, ...]:
    """The tables that the times are read from."""
    return (OURS, BENCH, EARLIER) if EARLIER.exists() else (OURS, BENCH)


def pitched(numerics: str) -> str:
    """The name of our times of pitched rows."""
    return f"hadagen, {numerics}, pitched"


def _library(row: Mapping[str, str]) -> str:
    if not row["numerics"]:
        return PEER_NAMES.get(row["library"], row["library"])
    return pitched(row["numerics"]) if row["pitched"] == "1" else f"hadagen, {row['numerics']}"


def _traffic(row: Mapping[str, str]) -> tuple[object, ...]:
    """What tells the copies beside the times apart: bytes and places. Of pitched rows a quarter is left out, if that is
    an element."""
    pitched = row["pitched"] == "1" and int(row["n"]) >= 4
    return pitched, int(row["elements"]) * DTYPE_BYTES[row["dtype"]], row["destination"], row["cache"]


def numbers(times: Times) -> str:
    """The README's picture and tables, in Markdown."""
    picture = f"![Speed over n as a fraction of a plain copy]({PICTURE.relative_to(README.parent)})"
    table = _table(times, REGIMES, {name: name for name in LIBRARIES})
    method = METHOD.format(runs=_runs())
    if lengths := _retuned():
        method += " " + RETUNED.format(lengths=", ".join(map(str, lengths)))
    return "\n\n".join([picture, table, _comparison(times), _wrapped(method), _errors(times)])


def _runs() -> str:
    """Of how many runs the times beside the peers' are, and of what the earlier ones."""
    rows, earlier = bench_tables()
    if not earlier:
        return ONE_RUN
    kinds: tuple[Callable[[Mapping[str, str]], str], ...] = (
        lambda row: row["dtype"],
        lambda row: _size(int(row["elements"])),
        lambda row: f"{row['dtype']} at n = {row['n']}",
    )
    timed = {kind(row) for row in rows for kind in kinds}
    what = []
    for row in earlier:
        lacking = [name for kind in kinds if (name := kind(row)) not in timed]
        if not lacking:
            raise SystemExit(
                f"{EARLIER} has cells of a type, a size and an n that {BENCH.name} has too; time all in one run"
            )
        what.append(lacking[0])
    return TWO_RUNS.format(what=" and of ".join(dict.fromkeys(what)))


def _size(elements: int) -> str:
    return f"{elements >> 20} M elements" if elements >> 20 else f"{elements >> 10} K elements"


def _retuned() -> list[int]:
    """Row lengths for which the bundle names other kernels than those that the run with the peers has timed."""

    named, timed = (
        {tuple(row[name] for name in NAMING): row["kernel"] for row in rows if _library(row) in LIBRARIES}
        for rows in (_rows(OURS), [row for table in bench_tables() for row in table])
    )
    return sorted({int(cell[0]) for cell, kernel in timed.items() if named.get(cell, kernel) != kernel})


def _comparison(times: Times) -> str:
    """How many times as fast as each peer, by microseconds over all cells that both have, and where not."""
    layers, common = f"in L2, to {LAYER >> 20} M elements", f"n ≥ {COMMON_N}"
    head = [
        "as fast as … (geometric mean)",
        "all cells",
        layers,
        common,
        f"behind by more than {NOISE:.0%}",
        "worst cell",
    ]
    rows = []
    for numerics in ("accurate", "fast"):
        mine = times[f"hadagen, {numerics}"]
        for name in ("HadaCore", "fast-hadamard-transform"):
            ratios = {cell: times[name][cell].us / mine[cell].us for cell in sorted(mine.keys() & times[name].keys())}
            if not ratios:
                continue
            layer = [ratio for cell, ratio in ratios.items() if cell.cache == "hot" and cell.elements <= LAYER]
            large = [ratio for cell, ratio in ratios.items() if cell.n >= COMMON_N]
            behind = sum(ratio < 1 - NOISE for ratio in ratios.values())
            worst = min(ratios, key=ratios.__getitem__)
            means = map(_mean, (ratios.values(), layer, large))
            behind_of = f"{behind} of {len(ratios)} cells"
            rows.append([f"`{numerics}` / {name}", *means, behind_of, f"{ratios[worst]:.2f}: {worst}"])
    return _grid("lrrrrl", head, rows)


def _grid(sides: str, head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown. `sides`: l or r for each column, where its text stands."""
    rule = ("---" if side == "l" else "---:" for side in sides)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows))


def _mean(ratios: Iterable[float]) -> str:
    ratios = list(ratios)
    return f"{geometric_mean(ratios):.2f}" if ratios else "–"


def _errors(times: Times) -> str:
    """The largest error at each n, of all that were timed there."""
    found: dict[tuple[str, str, int], float] = {}
    for name in LIBRARIES:
        for cell, time in times[name].items():
            if time.error is not None:
                key = cell.dtype, name, cell.n
                found[key] = max(time.error, found.get(key, 0.0))
    text = "Relative error ‖out − ref‖ / ‖ref‖ against float64, in 10⁻⁴, on the same normal inputs:"
    rows = (
        [f"{dtype}: {name}", *(_number(found.get((dtype, name, n)), 1e4) for n in COLUMNS)]
        for dtype, name in product(ERROR_DTYPES, LIBRARIES)
    )
    return f"{text}\n\n{_grid(SIDES, ['n =', *COLUMNS], rows)}"


def _number(value: float | None, times: float = 1.0) -> str:
    return "–" if value is None else f"{value * times:.2f}"


def between_table() -> str:
    """What performance.md shows of the loss between the element counts that were tuned, in Markdown."""
    if not BETWEEN.exists():
        return NO_DATA
    rows = _rows(BETWEEN)
    problems: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        problems[row["n"], row["dtype"], row["numerics"], row["pitched"]].append(row)
    counts = len(rows) / len(problems)
    text = (
        f"On a {rows[0]['gpu']}, over {len(problems)} problems with {counts:.0f} row counts each, a call loses "
        f"{_loss(rows)} (geometric mean) to the best variant known, and {_worst(rows)} where it loses most:"
    )
    head = ("n", "dtype", "numerics", "variants", "loss, geometric mean", "worst", "at rows")
    lines = []
    for (n, dtype, numerics, is_pitched), found in problems.items():
        worst = max(found, key=lambda row: float(row["loss"]))
        kind = f"{numerics}, pitched" if is_pitched == "1" else numerics
        place = f"{worst['rows']}, {worst['destination']}"
        lines.append((n, dtype, kind, worst["variants"], _loss(found), _worst(found), place))
    return f"{_wrapped(text)}\n\n{_grid('rllrrrl', head, lines)}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _loss(rows: Iterable[Mapping[str, str]]) -> str:
    return f"{geometric_mean(1 + float(row['loss']) for row in rows) - 1:.1%}"


def _worst(rows: Iterable[Mapping[str, str]]) -> str:
    return f"{max(float(row['loss']) for row in rows):.1%}"


def choices_table() -> str:
    """What performance.md shows of how much faster the best kernel with an idea is than the best without, in Markdown:
    for each recorded problem with kernels of both kinds, at each size that was recorded."""
    recordings = []
    for path in sorted(RECORDINGS.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            head, *trials = map(json.loads, file)
        recordings.append((head, trials))
    if not recordings:
        return NO_DATA
    recordings.sort(key=lambda recording: recording[0]["problem"]["n"])
    sizes = sorted({elements for head, _ in recordings for elements, _, _ in head["cells"]})
    rows = []
    for knob, without, with_it in CHOICES:
        idea = f"`{knob}`: {without} → {with_it}"
        for head, trials in recordings:
            before, after = (_best_times(head, trials, knob, value) for value in (without, with_it))
            if before and after:
                problem = head["problem"]
                ratios = (_number(before[size] / after[size] if size in before else None) for size in sizes)
                rows.append([idea, f"{problem['n']}, {problem['dtype']}, {problem['numerics']}", *ratios])
                idea = ""  # once is enough
    return _grid("ll" + "r" * len(sizes), ["idea", "n", *map(_short, sizes)], rows)


def _short(count: int) -> str:
    return f"{count / (1 << 20):g} M" if count >= 1 << 20 else f"{count / (1 << 10):g} K"


def _best_times(
    head: Mapping[str, Any], trials: Iterable[Mapping[str, Any]], knob: str, value: object
) -> dict[int, float]:
    """By element count, the least microseconds of a recording's trials whose knob has the value; {} where none has."""
    names = list(head["ranges"])
    best: dict[int, float] = {}
    if knob not in names:  # it came later
        return best
    for trial in trials:
        if trial["us"] and trial["knobs"][names.index(knob)] == value:
            for (elements, _, _), (us, *_) in zip(head["cells"], trial["us"], strict=True):
                best[elements] = min(us, best.get(elements, us))
    return best


def pitched_table(times: Times) -> str:
    """What performance.md shows of the speed of pitched rows, in Markdown."""
    libraries = {numerics: pitched(numerics) for numerics in ("fast", "accurate")}
    return _table(times, PITCHED_REGIMES, libraries)


def h200_table() -> str:
    """What performance.md shows of the speed on an H200, in Markdown."""
    if not BENCH_H200.exists():
        return NO_DATA
    libraries = {numerics: f"hadagen, {numerics}" for numerics in ("fast", "accurate")}
    return _table(_timed(_rows(BENCH_H200)), REGIMES, libraries, H200_DTYPE)


def _table(
    times: Times, regimes: Iterable[tuple[str, int, str]], libraries: Mapping[str, str], dtype: str = DTYPE
) -> str:
    rows = []
    for (title, elements, cache), (name, library) in product(regimes, libraries.items()):
        found = (times[library].get(Cell(dtype, n, elements, DESTINATION, cache)) for n in COLUMNS)
        rows.append([f"{title}: {name}", *(_number(time and time.fraction_of_copy) for time in found)])
    return _grid(SIDES, [f"{dtype}, {DESTINATION}, fraction of copy; n =", *COLUMNS], rows)


def call_table() -> str:
    """What performance.md shows of the CPU time of calls, in Markdown."""
    if not CALLS.exists():
        return NO_DATA
    data = json.loads(CALLS.read_text(encoding="utf-8"))
    versions = f"Python {data['python']} and PyTorch {data['torch']}"
    head = f"On a {data['gpu']}, with {versions}, for a {data['tensor']} tensor:"
    calls = _grid("lr", ["call", "µs"], ((name, f"{us:.1f}") for name, us in data["us"].items()))
    once = _grid("lr", ["once in a process", "ms"], ((name, f"{ms:.0f}") for name, ms in data["ms"].items()))
    return f"{head}\n\n{calls}\n\n{once}"


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
    sides = "r" * len(searches.labels)
    longest = max(problem["budget"] for problem in problems)
    counts = [count for count in EVALUATIONS if count < longest]
    rows = [(count, *_fractions(curve[count - 1] for curve in searches.curves)) for count in counts]
    rows.append(("**budget**", *_fractions(curve[-1] for curve in searches.curves)))
    all_searches = [*data["hadagen"].values(), *data["kernel_tuner"].values()]
    by_problem = [
        (problem["name"], problem["variants"], problem["budget"], *_fractions(s["at_budget"][i] for s in all_searches))
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
            _grid("l" + sides, ["evaluations", *searches.labels], rows),
            "",
            _grid("lrr" + sides, ["after its budget", "variants", "budget", *searches.labels], by_problem),
            "",
            f"Kernel Tuner's other strategies, after the budget: {others or 'none'}.",
        ]
    )


def _fractions(values: Iterable[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def with_search(document: str) -> str:
    """search.md with its numbers between their markers."""
    return _between(SEARCH_PAGE, document, SEARCH_BEGIN, search_numbers(), SEARCH_END)


def with_numbers(readme: str, text: str) -> str:
    """The README with `text` between its markers."""
    return _between(README, readme, BEGIN, text, END)


def with_tables(document: str, of_pitched: str) -> str:
    """performance.md with its tables, each between its markers."""
    document = _between(PERFORMANCE, document, CALLS_BEGIN, call_table(), CALLS_END)
    document = _between(PERFORMANCE, document, BETWEEN_BEGIN, between_table(), BETWEEN_END)
    document = _between(PERFORMANCE, document, H200_BEGIN, h200_table(), H200_END)
    document = _between(PERFORMANCE, document, CHOICES_BEGIN, choices_table(), CHOICES_END)
    return _between(PERFORMANCE, document, PITCHED_BEGIN, of_pitched, PITCHED_END)


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
        for name, color in LIBRARIES.items():
            shown = {
                cell.n: time.fraction_of_copy
                for cell, time in sorted(times[name].items())
                if cell == Cell(DTYPE, cell.n, elements, DESTINATION, cache)
            }
            width = 2.2 if name.startswith("hadagen") else 1.5
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
    times = read_times() if all(path.exists() for path in sources()) else None
    wanted = {
        README.name: with_numbers(readme, numbers(times) if times else NO_DATA) == readme,
        PICTURE.name: not times or _is_drawn_from(PICTURE, *sources()),
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
    for path, command in ((OURS, "hadagen bundle export"), (BENCH, "hadagen bench --csv")):
        if not path.exists():
            raise SystemExit(f"{path} is missing; make it with {command}")
    times = read_times()
    performance = PERFORMANCE.read_text(encoding="utf-8")
    PERFORMANCE.write_text(with_tables(performance, pitched_table(times)), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_numbers(readme, numbers(times)), encoding="utf-8")
    draw(times, PICTURE, fingerprint(*sources()))
    SEARCH_PAGE.write_text(with_search(SEARCH_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if SEARCH.exists():
        draw_search(Searches.read(), SEARCH_PICTURE, fingerprint(SEARCH))


if __name__ == "__main__":
    main(sys.argv[1:])
