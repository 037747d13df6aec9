"""How a report names devices and problems. What a file says may be hostile, so every name is `printable`."""

from __future__ import annotations

from functools import lru_cache

from hadagen.errors import printable
from hadagen.problem.formats import FORMATS, Format, Layout
from hadagen.problem.problem import Problem, Rows

# The names of series, by type and numerics of a problem, in the order of their colours.
SERIES = ("float16 accurate", "float16 fast", "bfloat16 accurate", "bfloat16 fast", "float32 accurate")


PLAIN = "contiguous rows"
_LONGEST = 48  # characters of a text in a chart


@lru_cache(maxsize=4096)
def short_text(text: str, most: int = _LONGEST) -> str:
    """The text on one line, cut if it is long."""
    line = printable(text[: 4 * most])
    return line if len(line) <= most else line[: most - 1] + "…"


def device_name(gpu: str, arch: str) -> str:
    """The name of a device, such as "NVIDIA H200 (sm90)"; "estimated for sm80" where no GPU ran."""
    return short_text(f"{gpu} ({arch})" if gpu else f"estimated for {arch}")


def series_name(problem: Problem) -> str:
    """The type of its input and its numerics, one of `SERIES`."""
    return f"{problem.io.input.value} {problem.io.numerics.value}"


@lru_cache(maxsize=1024)
def kind_name(problem: Problem) -> str:
    """The kind of a problem, without n, type and numerics: "contiguous rows", "with a matrix, signed, to int8-row"."""
    of, form = problem.transform, problem.io.form
    rows = "pitched rows" if problem.io.rows is Rows.PITCHED else PLAIN
    matrices = "rows with two real matrices" if of.paired else "rows with a real matrix" if of.real else ""
    parts = [matrices or ("rows with a matrix" if of.has_matrix else rows)]
    parts += ["swapped bits"] * of.swapped + ["signs"] * of.signed + ([f"to {format_name(form)}"] if form else [])
    return ", ".join(parts)


def format_name(form: Format) -> str:
    """The name of a format, and its options that are not the default. The length of rows is not named."""
    known = FORMATS[form.name]
    parts = [form.name]
    parts += [f"groups of {form.group}"] if len(known.groups) > 1 and form.group in known.groups else []
    parts += [form.rule.replace("_", " ")] if form.rule != known.rules[0] else []
    parts += [form.layout.value] if form.layout is not Layout.ROW_MAJOR else []
    return " ".join([*parts, *(["rounded first"] if form.rounded else [])])


def size_name(problem: Problem) -> str:
    """The n of a problem, with its factors or the length of rows: "4096", "14336 = 28 · 512", "128 in rows of 4096"."""
    size = problem.transform.size
    return f"{size} in rows of {problem.unit}" if problem.unit > problem.n and problem.n > 1 else size


def short_count(elements: int) -> str:
    """A number of elements as text, such as 64K, 1.5M or 14336."""
    for size, suffix in ((1 << 20, "M"), (1 << 10, "K")):
        if elements >= size and elements * 8 % size == 0:
            return f"{elements / size:g}{suffix}"
    return str(elements)
