"""The pictures of the documents. Each contains a fingerprint of the data it was drawn from.

The background is transparent, and every color is legible on white and on the dark pages of GitHub.

The picture of activations divides the largest magnitude of each channel by the RMS of all inputs of the layer. The
file `data/quarot.json` has these in "inputs" and "rms", both without and then with rotation, by the same two names:
`"inputs": {"none": [0.99, …], "rows": [5.8, …]}, "rms": {"none": 1.9, "rows": 1.9}`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refresh_search import Searches
from refresh_speed_tables import DESTINATION, DTYPE, REGIMES
from refresh_times import LIBRARIES, Cell, Times

COLORS = ("#2f81f7", "#9461d6", "#d9731a", "#7d858f")  # of `LIBRARIES`
# Of our searches; of those of Kernel Tuner, the best first.
SEARCH_COLORS = ("#2f81f7", "#7d858f"), ("#d9731a", "#a8860f", "#c75a8f")
LAYER_COLORS = ("#7d858f", "#d9731a", "#9461d6", "#2f81f7")  # of layers with a product
INK = "#6e7781"  # text, axes and lines behind the data
# The lower end of the axis in the picture of searches.
LEAST_FRACTION = 0.85


def fingerprint(*tables: Path) -> str:
    """The text in a picture that names the data it was drawn from."""
    return "data " + hashlib.sha256(b"".join(table.read_bytes() for table in tables)).hexdigest()


def is_drawn_from(picture: Path, *tables: Path) -> bool:
    """Whether the picture was drawn from the tables in their present state."""
    return picture.exists() and fingerprint(*tables) in picture.read_text(encoding="utf-8")


def _pyplot() -> Any:
    """The drawing library, set up so that the same data gives the same file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # svg.fonttype: text stays text
    pyplot.rcParams.update({"svg.hashsalt": "hadagen", "svg.fonttype": "none", "font.family": "sans-serif"})
    inked = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"
    pyplot.rcParams.update(dict.fromkeys(inked, INK))
    return pyplot


def _save(pyplot: Any, figure: Any, path: Path, description: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Description": description})
    pyplot.close(figure)


def _style(panel: Any) -> None:
    panel.grid(axis="y", alpha=0.25, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def draw_activations(layer: Mapping[str, Any], path: Path, description: str) -> None:
    """The largest magnitude of each channel over the RMS of the layer, without and with rotation.

    layer: the content of `quarot.json`."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 2.8), layout="constrained", sharey=True)
    titles = "as they are", "rotated"
    for panel, title, (way, peaks), color in zip(panels, titles, layer["inputs"].items(), COLORS[::2], strict=True):
        ratios = [peak / layer["rms"][way] for peak in peaks]
        panel.plot(ratios, color=color, linewidth=1)
        panel.set_title(f"{title}: at most {max(ratios):,.0f}", fontsize=10, loc="left")
        panel.set_xlabel(f"channel of the inputs of {layer['layer']}")
        panel.set_ylim(bottom=0)
        _style(panel)
    panels[0].set_ylabel("largest magnitude / RMS")
    _save(pyplot, figure, path, description)


def draw_search(searches: Searches, path: Path, description: str) -> None:
    """A line for each search: the fraction of the best over evaluations."""
    pyplot = _pyplot()
    figure, panel = pyplot.subplots(figsize=(8, 3.9), layout="constrained")
    panel.axhline(1.0, color=INK, linewidth=1, zorder=0)
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


def draw_layer(times: Mapping[str, Mapping[int, float]], path: Path, description: str) -> None:
    """A line for each layer: microseconds by tokens, both on axes of powers of two.

    times: title of a layer → tokens → microseconds."""
    pyplot = _pyplot()
    from matplotlib.ticker import NullLocator

    figure, panel = pyplot.subplots(figsize=(8, 3.9), layout="constrained")
    for (title, of), color in zip(times.items(), LAYER_COLORS, strict=False):
        panel.plot(of.keys(), of.values(), color=color, linewidth=1.8, marker="o", markersize=3, label=title)
    for axis, ticks in ((panel.xaxis, sorted({tokens for of in times.values() for tokens in of})), (panel.yaxis, None)):
        (panel.set_xscale if ticks else panel.set_yscale)("log", base=2)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
        if ticks:
            axis.set_ticks(ticks)
    panel.set_xlabel("tokens")
    panel.set_ylabel("µs")
    _style(panel)
    panel.legend(loc="upper left", frameon=False)
    _save(pyplot, figure, path, description)


def draw(times: Times, path: Path, description: str) -> None:
    """One panel for each regime, a line for each library."""
    pyplot = _pyplot()
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, panels = pyplot.subplots(1, len(REGIMES), figsize=(9.6, 3.9), sharey=True, layout="constrained")
    for panel, (title, elements, cache) in zip(panels, REGIMES, strict=True):
        panel.axhline(1.0, color=INK, linewidth=1, zorder=0)
        for name, color in zip(LIBRARIES, COLORS, strict=True):
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
        panel.annotate("a plain copy", (0, 1), (3, -10), ("axes fraction", "data"), "offset points", fontsize=8)
        _style(panel)
    panels[0].set_ylabel("speed, as a fraction of a plain copy")
    figure.suptitle(f"H100, {DTYPE}, {DESTINATION}", fontsize=10, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LIBRARIES), frameon=False)
    _save(pyplot, figure, path, description)
