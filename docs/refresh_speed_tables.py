"""Tables of speed, beside a copy and beside other libraries, and of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from statistics import geometric_mean

import refresh_files as files
from refresh_markdown import grid, number, wrapped
from refresh_times import (
    DTYPE_BYTES,
    LIBRARIES,
    Cell,
    Times,
    assembled,
    bench_tables,
    library_of,
    our_rows,
    pitched,
    read_rows,
    times_of,
)

# The table and the picture show this type and destination.
DTYPE, DESTINATION = "float16", "in-place"
H200_DTYPE = "bfloat16"
# The columns that say which kernel a call runs.
NAMING = ("n", "dtype", "numerics", "elements", "destination", "cache")
# Title, elements (rows · n), where the data lies before the call.
REGIMES = (
    ("64 K elements, in L2", 1 << 16, "hot"),
    ("8 M elements, in L2", 1 << 23, "hot"),
    ("256 M elements, in memory", 1 << 28, "cold"),
)
# Of pitched rows, which are timed at other element counts.
PITCHED_REGIMES = (
    ("64 K elements, in L2", 1 << 16, "hot"),
    ("1 M elements, in L2", 1 << 20, "hot"),
    ("128 M elements, in memory", 1 << 27, "cold"),
)
# The shortest rows of common quantizers; the difference of two measurements of one kernel; the most elements that a
# layer of a model transforms at once, with its input in L2.
COMMON_N, NOISE, LAYER = 128, 0.02, 1 << 23
ERROR_DTYPES = ("float16", "bfloat16")
COLUMNS = (16, 128, 512, 1024, 4096, 8192, 16384, 32768)
LONG_COLUMNS = (*COLUMNS, 65536, 131072)  # other libraries have no such rows

METHOD = """\
All times of a cell are taken within the same seconds, by the same method{runs}. The second table divides times in
microseconds. Its cells are the element counts from 64 K to 256 M, types and destinations, hot in L2 or cold, at which
both were timed. fast-hadamard-transform loses most at small n."""
ONE_RUN, TWO_RUNS = ", and all cells are of one run", "; cells of {what} are of an earlier run than the others"
RETUNED = "For some cells of n = {lengths} the bundle names other kernels by now."


LEAST_USUAL = 128  # the shortest rows of the README's headline


def transform_headline(times: Times) -> str:
    """How many times as fast the accurate kernels are as other libraries, in a sentence. Shorter rows, where other
    libraries are slower still, are left out."""
    mine = times["hadagen, accurate"]
    said = []
    for name in ("HadaCore", "fast-hadamard-transform"):
        cells = [cell for cell in mine.keys() & times[name].keys() if cell.n >= LEAST_USUAL]
        if cells:
            mean = geometric_mean(times[name][cell].us / mine[cell].us for cell in cells)
            said.append(f"{mean:.2f} times as fast as {name} ({len(cells)} cells)")
    return f"{' and '.join(said)} on an H100, from n = {LEAST_USUAL} on"


def picture() -> str:
    """The picture for the README, in Markdown."""
    return f"![Speed over n as a fraction of a plain copy]({files.PICTURE.relative_to(files.README.parent)})"


def numbers(times: Times) -> str:
    """The tables of the speed beside other libraries, in Markdown."""
    table = _table(times, REGIMES, {name: name for name in LIBRARIES})
    method = f"{copy_rates(times, DTYPE)} {METHOD.format(runs=_runs())}"
    if lengths := _retuned():
        method += " " + RETUNED.format(lengths=", ".join(map(str, lengths)))
    return "\n\n".join([table, _comparison(times), wrapped(method), _errors(times)])


def _runs() -> str:
    """How many runs the times beside other libraries come from, and which cells an earlier run has."""
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
                f"{files.EARLIER} has cells of a type, a size and an n that {files.BENCH.name} has too; "
                "time all in one run"
            )
        what.append(lacking[0])
    return TWO_RUNS.format(what=" and of ".join(dict.fromkeys(what)))


def _size(elements: int) -> str:
    return f"{elements >> 20} M elements" if elements >> 20 else f"{elements >> 10} K elements"


def _retuned() -> list[int]:
    """Row lengths for which the bundle names other kernels than the run with the other libraries has timed."""
    named, timed = (
        {tuple(row[name] for name in NAMING): row["kernel"] for row in rows if library_of(row) in LIBRARIES[:2]}
        for rows in (our_rows(), [row for table in bench_tables() for row in table])
    )
    now = assembled()
    return sorted(
        {int(cell[0]) for cell, kernel in timed.items() if named.get(cell) not in (None, now.get(kernel, kernel))}
    )


def _comparison(times: Times) -> str:
    """How many times as fast as each other library, over all cells that both have, and the cells that are slower."""
    layers, common = f"in L2, to {LAYER >> 20} M elements", f"n ≥ {COMMON_N}"
    head = [
        "times as fast (geometric mean)",
        "all cells",
        layers,
        common,
        f"slower by more than {NOISE:.0%}",
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
    return grid("lrrrrl", head, rows)


def _mean(ratios: Iterable[float]) -> str:
    ratios = list(ratios)
    return f"{geometric_mean(ratios):.2f}" if ratios else "–"


def _errors(times: Times) -> str:
    """The largest error at each n, over all cells with that n."""
    found: dict[tuple[str, str, int], float] = {}
    for name in LIBRARIES:
        for cell, time in times[name].items():
            if time.error is not None:
                key = cell.dtype, name, cell.n
                found[key] = max(time.error, found.get(key, 0.0))
    text = "Relative error ‖out − ref‖ / ‖ref‖ against float64, in 10⁻⁴, on the same normal inputs:"
    rows = (
        [f"{dtype}: {name}", *(number(found.get((dtype, name, n)), 1e4) for n in COLUMNS)]
        for dtype, name in product(ERROR_DTYPES, LIBRARIES)
    )
    return f"{text}\n\n{_by_n('n =', COLUMNS, list(rows))}"


def pitched_table(times: Times) -> str:
    """The speed of pitched rows beside a copy, in Markdown."""
    libraries = {numerics: pitched(numerics) for numerics in ("fast", "accurate")}
    return _table(times, PITCHED_REGIMES, libraries)


def h200_table() -> str:
    """The speed on an H200, beside a copy and beside other libraries, in Markdown."""
    if not files.BENCH_H200.exists():
        return files.NO_DATA
    libraries = {numerics: f"hadagen, {numerics}" for numerics in ("fast", "accurate")}
    times = times_of(read_rows(files.BENCH_H200))
    rates, comparison = wrapped(copy_rates(times, H200_DTYPE)), _comparison(times)
    for library, timed in times_of(read_rows(files.BENCH_H200_LONG)).items():
        times[library] |= timed
    table = _table(times, REGIMES, libraries, H200_DTYPE, LONG_COLUMNS)
    return f"{table}\n\n{rates}\n\n{comparison}"


def copy_rates(times: Times, dtype: str) -> str:
    """A sentence with the speed of the copy that 1.00 stands for: bytes read and written, divided by its time."""
    rates = []
    for title, elements, cache in REGIMES:
        timed = {n: times["hadagen, fast"].get(Cell(dtype, n, elements, DESTINATION, cache)) for n in COLUMNS}
        if time := next(filter(None, timed.values()), None):
            moved = 2 * elements * DTYPE_BYTES[dtype]
            rates.append(f"{moved / (time.us * time.fraction_of_copy) / 1000:.0f} GB/s at {title}")
    return f"In the table, 1.00 is a copy that reads and writes {'; '.join(rates)}."


def _table(
    times: Times,
    regimes: Iterable[tuple[str, int, str]],
    libraries: Mapping[str, str],
    dtype: str = DTYPE,
    columns: Sequence[int] = COLUMNS,
) -> str:
    rows = []
    for (title, elements, cache), (name, library) in product(regimes, libraries.items()):
        found = (times[library].get(Cell(dtype, n, elements, DESTINATION, cache)) for n in columns)
        rows.append([f"{title}: {name}", *(number(time and time.fraction_of_copy) for time in found)])
    return _by_n(f"{dtype}, {DESTINATION}, fraction of copy; n =", columns, rows)


def _by_n(title: str, columns: Sequence[int], rows: list[list[str]]) -> str:
    """A table with a column for each n."""
    return grid("l" + "r" * len(columns), [title, *columns], rows)
