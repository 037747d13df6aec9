"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hadagen.cli.wanted import KINDS, Wanted, kind_of
from hadagen.compiler.compilers import DEFAULT
from hadagen.errors import StorageError, UsageError, shortened, shown
from hadagen.owners import make_folder
from hadagen.problem.formats import FORMATS, Format
from hadagen.problem.matrices import find_orders
from hadagen.problem.problem import MAX_LOG2_N, MAX_ORDER, DType, Numerics, Problem, Rows, Transform, kernel_order
from hadagen.problem.prologues import name_of
from hadagen.problem.regimes import BUCKETS_BETWEEN, BUCKETS_OF_LONG_ROWS, ELEMENT_BUCKETS, Destination
from hadagen.problem.target import arch_named, is_model
from hadagen.problem.trial import Environment
from hadagen.report.names import short_count
from hadagen.runtime.choose.bundles import user_directory
from hadagen.tuning_db.bundle import shipped
from hadagen.tuning_db.table import check_table_place

if TYPE_CHECKING:
    from hadagen.tuning_db.store import Store

DEFAULT_ARCH = "sm90"
ALL_SIZES = f"2-{1 << MAX_LOG2_N}"
NUMERICS = "accurate rounds once, to the type of x; fast may round between steps. float32 is always accurate."
Command = Callable[..., None]
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20}
# The parts of a key that leave out an order, or name a format as a caller does.
_KEY = re.compile(
    "(n([0-9]{1,9}))(-k[0-9]{1,9}(?:-c[0-9]{1,9})?)?((?:-real)?(?:-swapped)?(?:-signed)?(?:-after-[a-z0-9_]+)?)(-[a-z]+[0-9]+)(?:-to-(.+?))?(-[a-z]+(?:-contiguous|-pitched)?)"
)
_MOST_DIGITS = 20  # more than any value has; of thousands, Python makes no number


def within(least: float, most: float) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that refuses values outside of a range. click's own ranges accept NaN."""

    def check(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if not least <= value <= most:
            raise UsageError(f"{parameter.opts[0]} {value} is not supported; give {least} to {most}")
        return value

    return check


def _checked_table(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path:
        check_table_place(path)
    return path


def arch_of_target(*, default: str | None = None, says: str) -> Callable[[Command], Command]:
    """`--arch`, of which the command receives the name. says: the default where there is no constant one."""
    return click.option(
        "--arch",
        default=default,
        show_default=bool(default),
        callback=lambda context, parameter, name: None if name is None else arch_named(name),
        help=f"Target architecture, such as sm90, or the name of a GPU, such as H100.{says}",
    )


arch = arch_of_target(default=DEFAULT_ARCH, says="")
compiler = click.option(
    "--compiler",
    default=DEFAULT,
    show_default=True,
    help="Compiler of kernels: nvrtc or nvcc. Without NVRTC, nvcc compiles.",
)
inplace = click.option("--inplace", is_flag=True, help="The result overwrites the input.")
device = click.option(
    "--device", type=int, default=0, show_default=True, metavar="INDEX", help="CUDA device to run on."
)
db = click.option(
    "--db",
    metavar="PATH|URL",
    help="Tuning database: a file or a postgresql:// URL.  [default: tuning.db in hadagen's data directory]",
)


class BundlePath(click.Path):
    """The path of a bundle. An arch such as sm90 names the bundle that hadagen ships for it, unless a file does."""

    name = "bundle"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, parameter, context)))
        return path if path.exists() else shipped_for(str(path)) or path


def shipped_for(name: str) -> Path | None:
    """The bundle that hadagen ships for an arch of this name, or a GPU of this name; None if there is none."""
    return shipped().get(arch_named(name) if is_model(name) else name)


bundle = click.option(
    "--bundle", type=click.Path(path_type=Path), help="Where the winners go.  [default: where calls find them]"
)


def csv_of(says: str) -> Callable[[Command], Command]:
    """`--csv`, which the command receives as `table`."""
    return click.option(
        "--csv", "table", type=click.Path(path_type=Path), metavar="FILE", callback=_checked_table, help=says
    )


csv = csv_of("Write all numbers to FILE too.")
knobs = click.option(
    "--knobs",
    multiple=True,
    metavar="K=V",
    callback=lambda context, parameter, texts: parse_knobs(texts),
    help="Set a knob; may be given several times.",
)
only = click.option(
    "--only",
    multiple=True,
    metavar="KNOB=V1,V2,...",
    callback=lambda context, parameter, texts: parse_ranges(texts),
    help="Search these values of a knob and no others; may be given for several knobs.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def elements(default: str) -> Callable[[Command], Command]:
    """`--elements`, which the command receives as the list of `parse_elements`."""
    return click.option(
        "--elements",
        default=default,
        show_default=True,
        callback=lambda context, parameter, text: parse_elements(text),
        help="Sizes of the input, rows times n; K is 1024, M its square.",
    )


AUTO = "auto"
k = click.option(
    "--k",
    default=AUTO,
    show_default=True,
    metavar=f"INTEGER|{AUTO}",
    help=f"Order K of the matrix of rows of K · 2^m elements, 1 for none; {AUTO}: as hadagen.Rotation.",
)
KEY = (
    "by its key, such as n4096-float16-fast or n128-bfloat16-to-int8-row-accurate, in place of the options that follow"
)
PITCHED = "Rows that may be shorter than n, and may lie apart in memory"


def _check_key_is_alone() -> None:
    """Raises `UsageError` if an option names a part of the problem besides `--problem`, which names the whole
    problem."""
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
        if given and option.name in _PARTS:
            names = "/".join(option.opts + option.secondary_opts)
            raise UsageError(f"--problem names all of a problem; leave it out, or {names}")


FORMAT_OPTIONS = "columns", "group", "rule", "layout", "round_first"
_PARTS = "kinds", "n", "k", "dtype", "numerics", "pitched", "signed", "before", "to", *FORMAT_OPTIONS  # of a key


before = click.option(
    "--before",
    default="",
    metavar="NAME",
    callback=lambda context, parameter, name: name_of(name),
    help="What runs before the rotation, such as silu_mul. docs/prologues.md explains it.",
)


def formats(*, several: bool) -> Callable[[Command], Command]:
    """`--to`, several times or once, and `--columns --group --rule --layout --round-first`, all spelled as arguments of
    `hadagen.rotate_quantize` are."""
    once = "" if not several else " May be given several times."

    def with_options(command: Command) -> Command:
        for option in (
            click.option("--round-first", is_flag=True, help="Round to the type of x before quantizing."),
            click.option(
                "--layout",
                default="row-major",
                show_default=True,
                help="Layout of the scales.",
            ),
            click.option("--rule", help="Rule of the scales.  [default: of the format]"),
            click.option("--group", type=int, help="Elements that share a scale.  [default: of the format]"),
            click.option("--columns", type=int, help="Length of a quantized row, a multiple of n.  [default: n]"),
            click.option(
                "--to",
                metavar="FORMAT",
                multiple=several,
                help=f"Quantize the result: {', '.join(FORMATS)}. docs/formats.md explains them.{once}",
            ),
        ):
            command = option(command)
        return command

    return with_options


def parse_problem(key: str) -> Problem:
    """The problem of a key. A format in the key may be spelled as in `hadagen.rotate_quantize`. If the key has no order
    K, the problem gets the order that `--n` finds. Raises `UsageError` for any other text."""
    if found := _KEY.fullmatch(key):
        head, n, order, flags, dtype, to, rest = found.groups()
        size = int(n)
        if order is None and size & (size - 1):
            order = f"-k{parse_transform(size).order}"
        if to and "_" not in to:
            to = Format.choose(to, None, None, "row-major").for_rows(size, round_first=False).key
        key = "".join((head, order or "", flags, dtype, f"-to-{to}" if to else "", rest))
    return Problem.parse(key)


def problem(command: Command) -> Command:
    """`--problem`, or `--n --k --dtype --numerics --pitched --signed --before` and the options of `formats`, which the
    command receives as one `Problem`."""

    @click.option("--problem", "key", metavar="KEY", help=f"The problem {KEY}.")
    @click.option("--n", type=int, help=f"Row length, from 2 to {1 << MAX_LOG2_N}: K times a power of two.")
    @k
    @click.option("--dtype", default=DType.FLOAT16.value, show_default=True, help="float16, bfloat16 or float32.")
    @click.option("--numerics", default=Numerics.ACCURATE.value, show_default=True, help=NUMERICS)
    @click.option("--pitched", is_flag=True, help=f"{PITCHED}.")
    @click.option("--signed", is_flag=True, help="With signs, as in hadagen.Rotation(n, signs=...).")
    @before
    @formats(several=False)
    @functools.wraps(command)
    def with_problem(
        *,
        key: str | None,
        n: int | None,
        k: str,
        dtype: str,
        numerics: str,
        pitched: bool,
        signed: bool,
        before: str,
        to: str | None,
        **others: Any,
    ) -> None:
        form = {"to": to, "prologue": before, **{name: others.pop(name) for name in FORMAT_OPTIONS}}
        if key is not None:
            _check_key_is_alone()
            command(problem=parse_problem(key), **others)
        elif n is not None:
            of, rows = parse_transform(n, k), Rows.PITCHED if pitched else Rows.CONTIGUOUS
            _check_rows(of, rows, before)
            command(problem=Problem.of(of.n, dtype, numerics, rows, order=of.order, signed=signed, **form), **others)
        else:
            raise UsageError("no problem is named; give --n, or --problem with a key such as n4096-float16-fast")

    return with_problem


def destinations(command: Command) -> Command:
    """`--inplace --out-of-place`, which the command receives as a list of `destinations`: out of place if neither is
    given."""

    @inplace
    @click.option("--out-of-place", is_flag=True, help="The result is a new tensor (default).")
    @functools.wraps(command)
    def with_destinations(*, inplace: bool, out_of_place: bool, **others: Any) -> None:
        asked = {Destination.IN_PLACE: inplace, Destination.OUT_OF_PLACE: out_of_place or not inplace}
        command(destinations=[destination for destination, wanted in asked.items() if wanted], **others)

    return with_destinations


def problems(*, sizes: str = ALL_SIZES, one_kind: bool = False, shipped: bool = False) -> Callable[[Command], Command]:
    """`--problem`, or `--n --k --dtype --numerics --pitched/--contiguous --to` and the other options of `formats`. The
    options before K and the formats may name several values; the command receives a list of `problems`, each once.

    sizes: the default row lengths. one_kind: whether the defaults are only contiguous rows of float16 with accurate
        numerics. Else the defaults are all dtypes, numerics and rows that have kernels. shipped: whether the default
        is what hadagen ships kernels for. The other options then choose among that, `--n` and `--to` add to it, there
        is `--kind`, and the command receives `problems` as `Wanted`.
    """
    each = slice(1 if one_kind else None)

    def several(name: str, values: Sequence[str], text: str) -> Callable[[Command], Command]:
        known: Any = "all that hadagen ships kernels for" if shipped and name == "n" else True
        return click.option(f"--{name}", multiple=True, default=values, show_default=known, help=text)

    def with_options(command: Command) -> Command:
        @click.option("--problem", "keys", multiple=True, metavar="KEY", help=f"A problem {KEY}; repeatable.")
        @_kinds(shipped)
        @several("n", [sizes], "Row lengths, such as 4096 or 128,256 or 2-64 or 14336.")
        @k
        @several("dtype", [t.value for t in DType][each], "float16, bfloat16 or float32; may be given several times.")
        @several("numerics", [t.value for t in Numerics][each], f"{NUMERICS} May be given twice.")
        @click.option(
            "--pitched/--contiguous",
            default=False if one_kind else None,
            help=f"{PITCHED}; or only dense rows of n.  [default: {'contiguous' if one_kind else 'both'}]",
        )
        @before
        @formats(several=True)
        @functools.wraps(command)
        def with_problems(
            *,
            keys: Sequence[str],
            n: Sequence[str],
            k: str,
            dtype: Sequence[str],
            numerics: Sequence[str],
            pitched: bool | None,
            before: str,
            to: Sequence[str],
            **others: Any,
        ) -> None:
            form = {"prologue": before, **{name: others.pop(name) for name in FORMAT_OPTIONS}}
            kinds = others.pop("kinds", ()) or KINDS
            if keys:
                _check_key_is_alone()
            context = click.get_current_context()
            sources = {name: context.get_parameter_source(name) for name in _PARTS}
            given = {name for name, source in sources.items() if source not in (None, ParameterSource.DEFAULT)}
            told = (
                problem
                for each in to or (None,)
                for problem in _product(
                    parse_sizes(n, k), dtype, numerics, pitched, sources["dtype"], {"to": each, **form}
                )
                if kind_of(problem) in kinds
            )
            if not shipped:
                command(problems=list(dict.fromkeys(map(parse_problem, keys) if keys else told)), **others)
                return
            list(
                _product([Transform(2)], dtype, numerics, pitched, None, {"to": None, "prologue": ""})
            )  # checks values
            by_size = bool(given & {"n", "k", "before", "to", *FORMAT_OPTIONS})
            sizes = parse_sizes(n, k) if by_size else ()
            only_named = bool(keys or given & {"before", "to", *FORMAT_OPTIONS})

            def fits(problem: Problem) -> bool:
                io = problem.io
                return (
                    not only_named
                    and kind_of(problem) in kinds
                    and (not by_size or problem.transform in sizes)
                    and ("dtype" not in given or io.input.value in dtype)
                    and any(problem.with_io(numerics=each) == problem for each in numerics)
                    and pitched in (None, io.rows is Rows.PITCHED)
                )

            named = map(parse_problem, keys) if keys else told if by_size else ()
            command(problems=Wanted(list(dict.fromkeys(named)), fits, bool(keys) or by_size), **others)

        return with_problems

    return with_options


def _kinds(shown: bool) -> Callable[[Command], Command]:
    """`--kind`, which a command that does not show it lacks."""
    return (
        click.option(
            "--kind",
            "kinds",
            multiple=True,
            type=click.Choice(KINDS),
            help="transform: without a matrix; rotation: with one; format: whatever quantizes. May be given several "
            "times.  [default: all]",
        )
        if shown
        else lambda command: command
    )


def _product(
    transforms: Iterable[Transform],
    dtypes: Iterable[str],
    numerics: Iterable[str],
    pitched: bool | None,
    source_of_dtypes: ParameterSource | None,
    form: Mapping[str, Any],
) -> Iterator[Problem]:
    """All problems of these values. Kernels with a matrix take contiguous rows of 16-bit types, and kernels with a
    prologue or a format take contiguous rows. Other problems of these kinds are included only if an option asks for
    them. form: `to`, the other options of a format, and `prologue`. Raises `UsageError`."""
    asked = {None: tuple(Rows), False: (Rows.CONTIGUOUS,), True: (Rows.PITCHED,)}[pitched]
    for of, dtype, kind, rows in product(transforms, dtypes, numerics, asked):
        by_default = (dtype == DType.FLOAT32.value and source_of_dtypes is ParameterSource.DEFAULT) or (
            rows is Rows.PITCHED and pitched is None
        )
        takes_pitched = form["to"] is None and not form["prologue"]
        if not by_default or (not of.has_matrix and (takes_pitched or rows is Rows.CONTIGUOUS)):
            _check_rows(of, rows, form["prologue"])
            yield Problem.of(of.n, dtype, kind, rows, order=of.order, **form)


def _check_rows(transform: Transform, rows: Rows, prologue: str) -> None:
    if prologue and rows is Rows.PITCHED:
        raise UsageError(f"there are no kernels for pitched rows with --before {prologue}; leave out --pitched")
    if transform.has_matrix and rows is Rows.PITCHED:
        raise UsageError(
            f"n = {transform.n} takes a matrix of order {transform.order}, and there are no kernels for pitched rows "
            "with a matrix; leave out --pitched"
        )


def parse_transform(n: int, k: str = AUTO) -> Transform:
    """The transform of rows of n elements with a matrix of order K, without signs.

    k: a whole number, or `AUTO` for the order that kernels of `hadagen.Rotation` take, which is 1 if n is a power of
        two. Raises `UsageError` for any other k, and if n and K are not supported together.
    """
    order = _order_of(n, k)
    if k == AUTO:
        order = kernel_order(order, n // order)
    return Transform(n, order)


def _order_of(n: int, k: str) -> int:
    """The order of the matrix of `hadagen.Rotation`, or the given order; 1 without a matrix."""
    if k != AUTO:
        if not _is_whole(k):
            raise UsageError(f"--k {shown(k)} is not an order; write a number like 28, or {AUTO}")
        return int(k)
    if not 2 <= n <= 1 << MAX_LOG2_N:
        return 1  # `Transform` says why not
    orders = find_orders(AUTO, n)
    if len(orders) > 1:
        raise UsageError(
            f"n = {n} takes matrices of the orders {' and '.join(map(str, orders))}, and a kernel takes only one "
            f"matrix; name an order up to {MAX_ORDER} with --k"
        )
    return orders[0] if orders else 1


def parse_sizes(texts: Iterable[str], k: str = AUTO) -> list[Transform]:
    """The transforms of row lengths named by texts such as `4096`, `128,256`, `2-32768` (every power of two between)
    and `224-14336` (28 times every power of two between), ascending. k: as `parse_transform` takes it.

    Raises `UsageError` if a text names no size, or a size that is not supported.
    """
    sizes: set[Transform] = set()
    for text in (part.strip() for given in texts for part in given.split(",")):
        first, dash, last = text.partition("-")
        if not _is_whole(first) or (dash and not _is_whole(last)):
            raise UsageError(f"--n {shown(text)} is not a size; write 4096, 128,256 or 2-32768")
        low = high = parse_transform(int(first), k)
        if dash:
            high = parse_transform(int(last), k)
            one, other = (_order_of(size.n, k) for size in (low, high))
            if one != other:
                raise UsageError(
                    f"--n {shown(text)} goes from a matrix of order {one} to one of {other}; name each size, or --k"
                )
        if low.n > high.n:
            raise UsageError(
                f"--n {shown(text)} is an empty range; write the smaller size first, as in {high.n}-{low.n}"
            )
        sizes.update(parse_transform(low.n << m, k) for m in range((high.n // low.n).bit_length()))
    return sorted(sizes)


def parse_knobs(texts: Iterable[str]) -> dict[str, int | str]:
    """Knobs from texts such as `warps=4`; the space checks the values.

    Raises `UsageError` if a text does not have this form.
    """
    values: dict[str, int | str] = {}
    for text in (part.strip() for given in texts for part in given.split(",")):
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"--knobs {shown(text)} is not of the form k=v; write for example --knobs warps=4")
        if name in values:
            raise UsageError(
                f"--knobs sets {shortened(name)} twice, to {shortened(str(values[name]))} and {shortened(value)}; give "
                "one value"
            )
        values[name] = int(value) if _is_whole(value) else value
    return values


def parse_ranges(texts: Iterable[str]) -> dict[str, list[int | str]]:
    """Values by knob, from texts such as `warps=2,4`; the arch checks the values.

    Raises `UsageError` if a text does not have this form, or a knob is named twice.
    """
    ranges: dict[str, list[int | str]] = {}
    for text in texts:
        name, _, listed = (part.strip() for part in text.partition("="))
        values = [value.strip() for value in listed.split(",")]
        if not (name and all(values)):
            raise UsageError(
                f"--only {shown(text)} is not of the form KNOB=V1,V2,...; write for example --only warps=2,4"
            )
        if name in ranges:
            raise UsageError(
                f"--only names {shortened(name)} twice; give all its values at once, as in "
                f"{shortened(name)}={shortened(listed)},..."
            )
        ranges[name] = [int(value) if _is_whole(value) else value for value in values]
    return ranges


def parse_elements(text: str) -> list[int]:
    """Sizes of an input, rows · n, from a text such as `65536,1.5M,8M` (K is 1024, M its square), ascending, each once.

    Raises `UsageError` if a size is no number, or if kernels are not timed at it.
    """
    counts = set()
    for part in (part.strip() for part in text.split(",")):
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KM]?)", part)
        if not found or len(found[1]) > _MOST_DIGITS:
            raise UsageError(f"--elements {shown(part)} is not a size; write for example 65536,1M")
        count = Fraction(found[1]) * _FACTORS[found[2]]
        others = *BUCKETS_BETWEEN, *BUCKETS_OF_LONG_ROWS
        if count not in ELEMENT_BUCKETS and count not in others:
            known = f"powers of two from {ELEMENT_BUCKETS[0]} to {ELEMENT_BUCKETS[-1]}"
            raise UsageError(f"--elements {part} is not supported; give {known}, or {short_list(sorted(others))}")
        counts.add(int(count))
    return sorted(counts)


def short_list(counts: Iterable[int]) -> str:
    """The text of input sizes, as `parse_elements` takes it."""
    return ",".join(map(short_count, counts))


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def arch_of(gpu: Environment) -> str:
    """The arch of a device, such as "sm90"."""
    return f"sm{gpu.compute_capability.replace('.', '')}"


def default_db() -> Path:
    """The default database of trials, beside the bundles that the runtime looks for."""
    return user_directory().parent / "tuning.db"


def default_bundle(arch: str) -> Path:
    """The default path of a bundle, where the runtime finds it."""
    return user_directory() / f"{arch}.db"


def open_db(where: str | None, *, new: bool = False) -> Store:
    """The tuning database named by `--db`. If `new`, a missing database is created. Raises `StorageError`."""
    from hadagen.tuning_db.database import file_of
    from hadagen.tuning_db.store import Store

    place = where or str(default_db())
    if not where:
        with suppress(OSError):  # which opening it says better
            make_folder(default_db().parent)  # bundles lie there too, which calls use only if others cannot write there
    file = file_of(place)
    if file is not None and not (new or file.exists()):
        raise StorageError(f"there is no tuning database {place}; run hadagen tune first, or name another with --db")
    return Store.open(place)
