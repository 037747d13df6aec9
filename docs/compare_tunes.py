"""Times the winners of two separate tunes of one GPU against each other, in turns.

    hadagen tune --db a.db --bundle a-bundle.db --from-scratch --n 1024,4096 --trials 100
    hadagen tune --db b.db --bundle b-bundle.db --from-scratch --n 1024,4096 --trials 100 --seed 1
    python docs/compare_tunes.py a-bundle.db b-bundle.db --csv docs/data/tunes_h200.csv

The table has a row for each cell that both tunes have a winner of. Where both chose the same kernel there is nothing to
time, and the two times are equal. Of the others, each pair is raced `RACES` times, and the medians are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hadagen.cli.device import find_device, measuring, runnable
from hadagen.measure import Cell, DeviceRunner, Variant
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination
from hadagen.tuning_db.bundle import Bundle, BundleEntry
from hadagen.tuning_db.table import write_table

COLUMNS = ("gpu", "problem", "elements", "destination", "cache", "us_a", "us_b", "kernel_a", "kernel_b")
FORMS = {"us_a": ".4f", "us_b": ".4f", "kernel_a": ".12", "kernel_b": ".12"}
RACES = 3

Place = tuple[Destination, int]
Pair = tuple[BundleEntry, BundleEntry]


def pairs(a: Bundle, b: Bundle, problem: Problem, gpu: str) -> list[Pair]:
    """The winners of both for a problem on a GPU, cell by cell."""

    def winners(bundle: Bundle) -> dict[Place, BundleEntry]:
        entries = (entry for entry in bundle.entries(problem) if entry.gpu == gpu and not entry.portable)
        return {(entry.destination, entry.elements): entry for entry in entries}

    of_a, of_b = winners(a), winners(b)
    return [(of_a[place], of_b[place]) for place in sorted(of_a.keys() & of_b.keys())]


def compared(runner: DeviceRunner, a: Bundle, b: Bundle, gpu: str) -> list[dict[str, Any]]:
    """The rows of the table."""
    rows = []
    for problem in sorted(set(a.problems()) & set(b.problems())):
        by_kernels: dict[tuple[str, str], list[Pair]] = defaultdict(list)
        for one, other in pairs(a, b, problem, gpu):
            by_kernels[one.kernel, other.kernel].append((one, other))
        for some in by_kernels.values():
            rows += [
                {
                    "gpu": gpu,
                    "problem": problem.key,
                    "elements": one.elements,
                    "destination": one.destination.value,
                    "cache": one.cache.value,
                    "us_a": us_a,
                    "us_b": us_b,
                    "kernel_a": one.kernel,
                    "kernel_b": other.kernel,
                }
                for (one, other), (us_a, us_b) in zip(some, _raced(runner, a, b, some), strict=True)
            ]
    return rows


def _raced(runner: DeviceRunner, a: Bundle, b: Bundle, some: Sequence[Pair]) -> list[tuple[float, float]]:
    """Microseconds of two kernels, in the cells of the pairs that have these kernels."""
    one, other = some[0]
    if one.kernel == other.kernel:
        return [(entry.us, entry.us) for entry, _ in some]
    first, second = (
        Variant(entry.problem, dict(entry.knobs), runnable(bundle, entry)) for bundle, entry in ((a, one), (b, other))
    )
    cells = [Cell(entry.elements, entry.destination, entry.cache) for entry, _ in some]
    races = [runner.race(first, second, cells) for _ in range(RACES)]
    return [(median(us for us, _ in of_cell), median(us for _, us in of_cell)) for of_cell in zip(*races, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="the bundle of one tune")
    parser.add_argument("b", type=Path, help="that of the other")
    parser.add_argument("--csv", type=Path, required=True, help="the table to write")
    given = parser.parse_args(arguments)
    a, b = Bundle.open(given.a), Bundle.open(given.b)
    environment, _ = find_device(0)
    with measuring(environment, 0) as runner:
        rows = compared(runner, a, b, environment.gpu)
    if not rows:
        sys.exit(f"the two bundles have no cell in common for {environment.gpu}; tune the same problems twice on it")
    write_table(given.csv, COLUMNS, rows, FORMS)
    near = sum(max(row["us_a"], row["us_b"]) <= 1.02 * min(row["us_a"], row["us_b"]) for row in rows)
    print(f"{near} of {len(rows)} cells ({near / len(rows):.1%}) differ by 2 % or less")


if __name__ == "__main__":
    main()
