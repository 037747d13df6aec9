"""Tables of rotations on an H200: the speed of those with a matrix, that of products by PyTorch, what limits them, and
what signs cost."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from statistics import geometric_mean

import refresh_files as files
from refresh_markdown import grid, number
from refresh_times import Cell, Times, read_rows, shipped_rows, times_of

from hadagen.problem.problem import Numerics, Problem, Transform, padded_length
from hadagen.problem.regimes import timed_elements

DTYPE, DESTINATION = "float16", "in-place"
# Title, elements (rows · n), where the data lies before the call.
ROTATION_REGIMES = (
    ("1 M, in L2", 1 << 20, "hot"),
    ("4 M, in L2", 1 << 22, "hot"),
    ("16 M, in memory", 1 << 24, "cold"),
    ("64 M, in memory", 1 << 26, "cold"),
)
FEW_ROWS = 48  # of a matrix; rotations with no more come first in a table
TWO, ONE = "PyTorch", "PyTorch, one product"
PARTS = ("whole", "without A", "without H", "without both")
# Title, orders of the matrix, row lengths.
GROUPS = (
    ("2^m, 128 to 4096", range(1, 2), range(128, 4097)),
    ("2^m, 8192 and 16384", range(1, 2), range(8192, 16385)),
    ("2^m, from 32768", range(1, 2), range(32768, 131073)),
    ("K · 2^m, K ≤ 60, to 8192", range(2, 61), range(128, 8193)),
    ("K · 2^m, K ≤ 60, longer", range(2, 61), range(8193, 131073)),
    ("K · 2^m, K > 60", range(61, 429), range(128, 131073)),
)


def rotations_table() -> str:
    """The speed of rotations with a matrix on an H200, beside a copy and beside the next power of two, in Markdown. All
    times are those of the shipped winners."""
    if not files.OURS.exists():
        return files.NO_DATA
    rows = shipped_rows(files.H200)
    times = times_of(rows)
    known = {Problem.parse(row["problem"]).transform for row in rows}
    rotations = _sorted(transform for transform in known if transform.order > 1)
    return "\n\n".join(_rotations_of(times, rotations, numerics) for numerics in (Numerics.FAST, Numerics.ACCURATE))


def _rotations_of(times: Times, rotations: Iterable[Transform], numerics: Numerics) -> str:
    rows = []
    for transform in rotations:
        row = [_name(transform)]
        for _, nominal, cache in ROTATION_REGIMES:
            mine, other = (
                times[f"hadagen, {numerics.value}"].get(
                    Cell(DTYPE, n, timed_elements(Problem.of(n, DTYPE, order=order), nominal), DESTINATION, cache)
                )
                for n, order in ((transform.n, transform.order), (padded_length(transform.n), 1))
            )
            ratio = mine and other and mine.fraction_of_copy / other.fraction_of_copy
            row.append(f"{number(mine and mine.fraction_of_copy)} ({number(ratio)})")
        rows.append(row)
    titles = [title for title, _, _ in ROTATION_REGIMES]
    return grid("l" + "r" * len(titles), [f"{numerics.value}; n = K · 2^m", *titles], rows)


def _sorted(transforms: Iterable[Transform]) -> list[Transform]:
    return sorted(set(transforms), key=lambda transform: (transform.order > FEW_ROWS, transform.n))


def _name(transform: Transform) -> str:
    return f"{transform.n} = {transform.order} · {transform.length}"


def rotation_headline() -> str:
    """How many times as fast the accurate kernels are as two products by PyTorch, in a sentence. Where H is 1, one
    product is enough."""
    ratios = [
        ratio for (transform, _, library), ratio in products()[1].items() if library == TWO and transform.length > 1
    ]
    return (
        f"{geometric_mean(ratios):.1f} times as fast as PyTorch's product with H and then with the matrix "
        f"({len(ratios)} cells) on an H200"
    )


Products = dict[tuple[Transform, str, str], float]


def products() -> tuple[list[Transform], Products]:
    """The transforms that were timed beside products by PyTorch; and by transform, cache and library, how many times as
    fast the accurate kernels are."""
    us: dict[tuple[Transform, str], dict[str, float]] = {}
    for row in read_rows(files.ROTATIONS):
        problem = Problem.parse(row["problem"])
        if row["library"] != "hadagen" or problem.io.numerics is Numerics.ACCURATE:
            us.setdefault((problem.transform, row["cache"]), {})[row["library"]] = float(row["us"])
    ratios = {
        (*where, library): times[library] / times["hadagen"]
        for where, times in us.items()
        for library in (TWO, ONE)
        if library in times
    }
    return list(_sorted(transform for transform, _ in us)), ratios


def products_table() -> str:
    """How many times as fast as products by PyTorch the kernels are, in Markdown."""
    if not files.ROTATIONS.exists():
        return files.NO_DATA
    transforms, ratios = products()
    columns = [(library, cache) for library in (TWO, ONE) for cache in ("hot", "cold")]
    rows = [
        [_name(transform), *(number(ratios.get((transform, cache, library))) for library, cache in columns)]
        for transform in transforms
    ]
    titles = ["two products, 4 M in L2", "64 M in memory", "one product, 4 M in L2", "64 M in memory"]
    two, one = (
        geometric_mean(ratio for (*_, library), ratio in ratios.items() if library == name) for name in (TWO, ONE)
    )
    mean = f"In the geometric mean, `accurate` is {two:.1f} times as fast as two products, and {one:.1f} times as one."
    return f"{mean}\n\n{grid('l' + 'r' * 4, ['n = K · 2^m', *titles], rows)}"


def parts_table() -> str:
    """The speed of kernels of which parts are left out, as a fraction of copy, in Markdown."""
    if not files.PARTS.exists():
        return files.NO_DATA
    found: dict[tuple[Transform, Numerics], dict[tuple[str, str], float]] = {}
    for row in read_rows(files.PARTS):
        problem = Problem.parse(row["problem"])
        nominal = min(ROTATION_REGIMES[1:], key=lambda regime: abs(regime[1] - int(row["elements"])))[0]
        fractions = found.setdefault((problem.transform, problem.io.numerics), {})
        fractions[nominal, row["kernel"]] = float(row["copy_us"]) / float(row["us"])
    titles = [title for title, _, _ in ROTATION_REGIMES[1:]]
    tables = []
    for numerics in (Numerics.FAST, Numerics.ACCURATE):
        rows = []
        for transform in _sorted(transform for transform, _ in found):
            of = found[transform, numerics]
            if all((title, "without both") in of for title in titles):
                rows.append(
                    [_name(transform), *(" / ".join(number(of[title, part]) for part in PARTS) for title in titles)]
                )
        tables.append(grid("l" + "r" * len(titles), [f"{numerics.value}; n = K · 2^m", *titles], rows))
    return "\n\n".join(tables)


def signs_table() -> str:
    """How much longer kernels with signs on both sides take than the same without, in Markdown."""
    if not files.SIGNS.exists():
        return files.NO_DATA
    us: dict[tuple[Problem, str], dict[str, float]] = {}
    for row in read_rows(files.SIGNS):
        problem = Problem.parse(row["problem"])
        if problem.length > 1:  # else signs are a part of the matrix
            nominal = min(ROTATION_REGIMES[1:], key=lambda regime: abs(regime[1] - int(row["elements"])))[0]
            us.setdefault((problem, nominal), {})[row["kernel"]] = float(row["us"])
    titles = [title for title, _, _ in ROTATION_REGIMES[1:]]
    rows = []
    for (title, orders, lengths), numerics in product(GROUPS, (Numerics.FAST, Numerics.ACCURATE)):
        row = [f"{title}: {numerics.value}"]
        for nominal in titles:
            found = [
                times
                for (problem, where), times in us.items()
                if where == nominal
                and problem.order in orders
                and problem.n in lengths
                and problem.io.numerics is numerics
            ]
            whole, unread = (
                [times[kernel] / times["whole"] for times in found] for kernel in ("signed", "signed, no loads")
            )
            row.append(f"{_more(geometric_mean(whole))} ({_more(max(whole))}) / {_more(geometric_mean(unread))}")
        rows.append(row)
    return grid("l" + "r" * len(titles), ["n: numerics", *titles], rows)


def _more(ratio: float) -> str:
    return f"{round(100 * ratio) - 100}%"
