"""Brings the README's numbers and picture up to date with the measured tables in `docs/data`.

    python docs/refresh.py            # write them
    python docs/refresh.py --check    # change nothing; fail, naming what is out of date

`data/h100.csv` is written by `hadagen bundle export` on an H100, `data/peers_h100.csv` holds the same cells for the
libraries we compare with. Drawing needs matplotlib (pip install 'hadagen[docs]'); checking does not.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
OURS = DOCS / "data" / "h100.csv"
PEERS = DOCS / "data" / "peers_h100.csv"
PICTURE = DOCS / "assets" / "speed.svg"
README = DOCS.parent / "README.md"

BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
NO_DATA = "*No measured table has been committed yet.*"

DTYPE, DESTINATION = "float16", "in-place"
# Title, elements (rows · n), where the data lies before the call.
REGIMES = (
    ("small: 64 K elements, in L2", 1 << 16, "hot"),
    ("medium: 8 M elements, in L2", 1 << 23, "hot"),
    ("large: 256 M elements, in memory", 1 << 28, "cold"),
)
# Name in the documents, name in the tables, color.
LIBRARIES = (
    ("hadagen, fast", "hadagen fast", "#1b6ac9"),
    ("hadagen, accurate", "hadagen accurate", "#0b2e59"),
    ("HadaCore", "hadacore", "#d9822b"),
    ("fast-hadamard-transform", "fast-hadamard-transform", "#8a8f98"),
)
COLUMNS = (2, 16, 128, 512, 1024, 4096, 8192, 16384, 32768)

# (library, elements, cache) -> {n: fraction of copy}
Curves = dict[tuple[str, int, str], dict[int, float]]


def read_curves(ours: Path = OURS, peers: Path = PEERS) -> Curves:
    """The fraction of copy of every library, size and regime, for `DTYPE` and `DESTINATION`."""
    curves: Curves = {}
    for path in (ours, peers):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if (row["dtype"], row["destination"]) != (DTYPE, DESTINATION):
                    continue
                library = row.get("kernel") if path == peers else f"hadagen {row['numerics']}"
                curve = curves.setdefault((str(library), int(row["elements"]), row["cache"]), {})
                curve[int(row["n"])] = float(row["fraction_of_copy"])
    return curves


def numbers(curves: Curves) -> str:
    """The README's table, in Markdown."""
    sizes = " | ".join(str(n) for n in COLUMNS)
    lines = [f"| {DTYPE}, {DESTINATION}: n = | {sizes} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    for title, elements, cache in REGIMES:
        for name, library, _ in LIBRARIES:
            curve = curves.get((library, elements, cache), {})
            cells = " | ".join(f"{curve[n]:.2f}" if n in curve else "–" for n in COLUMNS)
            lines.append(f"| {title}: {name} | {cells} |")
    return "\n".join(lines)


def with_numbers(readme: str, table: str) -> str:
    """The README with `table` between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise SystemExit(f"{README.name} has no {BEGIN} … {END}; put the two markers back")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def fingerprint() -> str:
    """What the picture says it was drawn from."""
    return "data " + hashlib.sha256(OURS.read_bytes() + PEERS.read_bytes()).hexdigest()


def draw(curves: Curves, path: Path = PICTURE, description: str = "") -> None:
    """One panel for each regime: fraction of copy over n, a line for each library."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    # The same data gives the same file, and text stays text.
    pyplot.rcParams.update({"svg.hashsalt": "hadagen", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, panels = pyplot.subplots(1, len(REGIMES), figsize=(11, 3.9), sharey=True, layout="constrained")
    for panel, (title, elements, cache) in zip(panels, REGIMES, strict=True):
        panel.axhline(1.0, color="#c5c9cf", linewidth=1, zorder=0)
        for name, library, color in LIBRARIES:
            curve = sorted(curves.get((library, elements, cache), {}).items())
            if curve:
                width = 2.2 if library.startswith("hadagen") else 1.5
                panel.plot(
                    *zip(*curve, strict=True), color=color, linewidth=width, marker="o", markersize=3, label=name
                )
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator([2, 16, 128, 1024, 8192]))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
        panel.set_xlabel("n")
        panel.set_ylim(0, 1.2)
        panel.grid(axis="y", color="#eceef1", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("speed, as a fraction of a plain copy")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LIBRARIES), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path, facecolor="white", metadata={"Date": None, "Description": description} if path.suffix == ".svg" else None
    )
    pyplot.close(figure)


def outdated() -> list[str]:
    """Names of the files that do not say what the data says."""
    readme = README.read_text(encoding="utf-8")
    table = numbers(read_curves()) if OURS.exists() else NO_DATA
    stale = [README.name] if with_numbers(readme, table) != readme else []
    if OURS.exists() and not (PICTURE.exists() and fingerprint() in PICTURE.read_text(encoding="utf-8")):
        stale.append(PICTURE.name)
    return stale


def main(arguments: list[str]) -> None:
    if arguments == ["--check"]:
        if stale := outdated():
            raise SystemExit(f"out of date with {OURS.parent.name}/: {', '.join(stale)}; run python docs/refresh.py")
        return
    if arguments or not OURS.exists():
        raise SystemExit(f"usage: python docs/refresh.py [--check]; it reads {OURS}")
    curves = read_curves()
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_numbers(readme, numbers(curves)), encoding="utf-8")
    draw(curves, PICTURE, fingerprint())


if __name__ == "__main__":
    main(sys.argv[1:])
