"""`Problem`: what is computed, a transform between an input and an output. No hardware is in it, and no choice of the
search.

The `key` of a problem names it wherever it is written down: in databases, bundles, tables, recordings, kernel names and
on the command line. Here alone it is written and parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from math import hypot, log2, prod
from typing import Any

from hadagen.errors import UsageError, choice, shown
from hadagen.problem.formats import FORMATS, ROW, Element, Format

MAX_LOG2_N = 17
# Of the matrix of a transform.
MAX_ORDER = 428
# The least order of H for which there are kernels with a matrix.
LEAST_LENGTH = 8
# The greatest orders of a matrix of real numbers and of H for which there may be kernels.
MAX_REAL_ORDER, MAX_REAL_LENGTH = 192, 2048
# The orders of C, of two matrices of real numbers, for which there may be kernels.
RIGHT_ORDERS = (32, 64, 128, 256)
# The least elements of a group with one scale: those of a vector of 8-bit codes.
LEAST_GROUP = 16
# The elements of a chunk, which a warp takes at once. The greatest odd factor of the warps of a block, if they take
# several chunks, and if they take one. With more, a block has so many threads that few rows fit on an SM.
_CHUNK, _MAX_ODD_WARPS, _MAX_WARPS_OF_ONE_CHUNK = 256, 15, 7
# Elements of the longest row with a matrix that fits in the shared memory of a block with four bytes each.
_LONGEST = 57344
# Index bits of the shortest H with two mma. A shorter one has no exchange either.
_BITS_OF_TWO_MMA = 8


class DType(str, Enum):
    """Element type of an input or an output."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


class Numerics(str, Enum):
    """`accurate` rounds to the type once, at the store; `fast` may round between steps, no more often than HadaCore.

    If the result is quantized, every value of `accurate` keeps 16 significant bits until then, and `fast` may round
    values to 16 bits, or cut them off to 11, once. A problem in which `fast` would change nothing has only `accurate`,
    such as all problems of float32."""

    ACCURATE = "accurate"
    FAST = "fast"


class Rows(str, Enum):
    """How the rows of the input and the output lie in memory."""

    # n elements each, one row right behind the other, the first at a multiple of 16 bytes.
    CONTIGUOUS = "contiguous"
    # Up to n elements each, at any address and any distance. The elements that a row lacks up to n count as zeros.
    PITCHED = "pitched"


# Largest ‖out − ref‖ / ‖ref‖ against float64 that a kernel may show and still be used: of `accurate` ones at every n,
ACCURATE_BOUND = {DType.FLOAT16: 2.2e-4, DType.BFLOAT16: 1.8e-3, DType.FLOAT32: 3e-7}
# of those that quantize 16-bit input, whose values keep 16 significant bits,
CODES_BOUND = 2.0**-15
# and of `fast` ones HadaCore's at the same n, so that they are nowhere less accurate than the fast kernels in use; here
# for n = 2, 4, 8 … 32768 as measured on an H100 over 4 M normal elements. They show how often it rounds: once up to
# n = 16, twice up to 256, three times up to 4096, four times beyond. It has no longer rows; ours round no more often.
HADACORE_ERROR = {
    DType.FLOAT16: [1e-6 * e for e in (234, 212, 233, 208, 313, 297, 313, 294, 375, 362, 375, 360, 429, 418, 429)],
    DType.BFLOAT16: [1e-5 * e for e in (166, 169, 166, 166, 235, 238, 235, 235, 288, 290, 288, 288, 333, 334, 332)],
}
# The error of one rounding of normal values, which do not fill their range evenly.
ROUNDING_ERROR = {DType.FLOAT16: 2.08e-4, DType.BFLOAT16: 1.66e-3}
# A "large" element is a standard normal one times this. It is near the maximum of the type; results stay finite.
LARGE = {DType.FLOAT16: 4096.0, DType.BFLOAT16: 1e30, DType.FLOAT32: 1e30}
# Word in the name of a prologue → the error of its results that the function behind it causes. An error of 2^-11 may
# round a value to the next bfloat16, 2^-8 away: one of eight, so that the error is the root of 2^-11 · 2^-8 or less.
FUNCTION_ERRORS = {"fasttanh": 2.0**-9}
# A factor on the bound of `fast`: kernels are verified with small samples, whose error may exceed HadaCore's by this.
_SAMPLED = 1.03


@dataclass(frozen=True, order=True)
class Transform:
    """Each row of n elements times diag(s) · (A ⊗ H)ᵀ · diag(t), times a scale.

    H is the Walsh–Hadamard matrix of order `length` = n / order in natural order. A is a matrix that a call gives,
    transposed or not, with entries −1, 0 and 1, or `real` ones; there is none if `order` is 1. s and t are vectors of
    ±1 that a call may give if it is `signed`. If it is `swapped`, the two bits of each base-4 digit of an output's
    index are exchanged before t: with signs, that is the regular Hadamard matrix. If it is `paired`, a matrix C of real
    numbers, of order `length`, takes the place of H. A row of n = 1 is not transformed, only multiplied by the scale,
    and then quantized.

    Raises `UsageError` unless `length` is a power of two, of four if `swapped`, n is up to 131072, and `order` is from
    1 to 428, 1 if `swapped`, and more than 1 if `real`; or if it is `paired`, but not `real`, or `length` is not 32,
    64, 128 or 256.
    """

    n: int
    order: int = 1
    signed: bool = False
    swapped: bool = False
    real: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        most = 1 << MAX_LOG2_N
        if not _is_size(self.order, 1, MAX_ORDER):
            raise UsageError(
                f"order = {shown(self.order)} is not supported; the order of a matrix is from 1 to {MAX_ORDER}"
            )
        for name in ("signed", "swapped", "real", "paired"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name} = {shown(value)} is not supported; give True or False")
        times = f"{self.order} times " if self.has_matrix else ""
        if not _is_size(self.n, 1, most) or self.n % self.order or self.length & (self.length - 1):
            raise UsageError(
                f"n = {shown(self.n)} is not supported; n must be {times}a power of two, and from 2 to {most}"
            )
        if self.swapped and (self.has_matrix or self.n.bit_length() % 2 == 0 or self.n == 1):
            raise UsageError(
                f"swapped bits of n = {self.n} are not supported; n must be a power of four, without a matrix"
            )
        if self.real and not self.has_matrix:
            raise UsageError("real = True is not supported without a matrix; give its order")
        if self.paired and not (self.real and self.length in RIGHT_ORDERS):
            raise UsageError(
                f"paired = True of n = {times}{self.length} is not supported; both matrices must be real, and the "
                f"second one of the order {' or '.join(map(str, RIGHT_ORDERS))}"
            )

    @property
    def length(self) -> int:
        """The order of H: a row is `order` rows of this length one after the other."""
        return self.n // self.order

    @property
    def has_matrix(self) -> bool:
        """Whether a call gives A."""
        return self.order > 1

    @property
    def size(self) -> str:
        """n with its factors: "4096", or "14336 = 28 · 512" with a matrix."""
        return f"{self.n} = {self.order} · {self.length}" if self.has_matrix else str(self.n)

    @property
    def formula(self) -> str:
        """The matrix that a row is multiplied by, in words: "H_4096", "(A_28 ⊗ H_512)ᵀ" with a matrix, or
        "(A_64 ⊗ C_64)ᵀ" with two."""
        right = "C" if self.paired else "H"
        factors = f"(A_{self.order} ⊗ {right}_{self.length})ᵀ" if self.has_matrix else f"H_{self.n}"
        factors += " · P" * self.swapped  # which exchanges the bits of each base-4 digit
        return f"D_before · {factors} · D_after" if self.signed else factors


def _is_size(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True, order=True)
class Io:
    """The input and output of a transform, and how often it may round in between. `fast` means `accurate` for float32,
    and for float16 that is quantized, because rounded sums could leave its range.

    output: the type of the input, or the format in which the result is quantized. Its key will do.

    Raises `UsageError` where a value is unknown, the output has another type than the input, or pitched rows are to be
    quantized.
    """

    input: DType
    output: DType | Format
    numerics: Numerics = Numerics.ACCURATE
    rows: Rows = Rows.CONTIGUOUS

    def __post_init__(self) -> None:
        kinds: dict[str, type[Enum]] = {"input": DType, "output": DType, "numerics": Numerics, "rows": Rows}
        if isinstance(self.output, str) and self.output not in {each.value for each in DType} and "_" in self.output:
            object.__setattr__(self, "output", Format.parse(self.output))
        if isinstance(self.output, Format):
            del kinds["output"]
        for name, kind in kinds.items():
            object.__setattr__(self, name, _member(kind, getattr(self, name), "dtype" if kind is DType else name))
        if isinstance(self.output, Format):
            if self.rows is not Rows.CONTIGUOUS or self.output.group == ROW:
                raise UsageError(f"{self.output.key} of {self.rows.value} rows is not supported; quantize whole rows")
        elif self.output is not self.input:
            raise UsageError(
                f"output {self.output.value} of input {self.input.value} is not supported; choose {self.input.value}"
            )
        if self.input is DType.FLOAT32 or (self.form and self.input is DType.FLOAT16):
            object.__setattr__(self, "numerics", Numerics.ACCURATE)

    @property
    def form(self) -> Format | None:
        """The format of the output if it is quantized."""
        return self.output if isinstance(self.output, Format) else None


# Such as n4096-float16-fast-pitched, n14336-k28-signed-float16-fast, n4096-k64-real-float16-fast,
# n4096-k64-c64-real-float16-fast or n128-bfloat16-to-fp8_group_128-accurate. A part "to" with the output stands behind
# the input if the two differ, and a part "after" with a prologue before it.
_KEY = re.compile(
    r"n([0-9]{1,9})(?:-k([0-9]{1,9}))?(?:-c([0-9]{1,9}))?(-real)?(-swapped)?(-signed)?(?:-after-([a-z][a-z0-9_]*))?"
    r"-([a-z]+[0-9]+[a-z0-9_]*)(?:-to-([a-z0-9_]+))?-([a-z]+)(?:-([a-z]+))?"
)


@dataclass(frozen=True, order=True)
class Problem:
    """A transform of the last dimension of x, and what is read and written for it. If the result is quantized, and no
    plan would round between steps, `fast` means `accurate`.

    prologue: the name of a `hadagen.problem.prologues.Prologue` whose result is transformed in place of x; "" for none.

    Raises `UsageError` for anything else than these two; `Problem.of` takes n and the names of types.
    """

    transform: Transform
    io: Io
    prologue: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.transform, Transform) and isinstance(self.io, Io)):
            raise UsageError(
                f"Problem({shown(self.transform)}, {shown(self.io)}) is not supported; give a Transform and an Io, or "
                'call such as Problem.of(4096, "float16")'
            )
        form = self.io.form
        if self.n == 1 and (form is None or self.transform.signed):
            raise UsageError(f"n = 1 is not supported; n must be a power of two, and from 2 to {1 << MAX_LOG2_N}")
        if form and 0 < form.group < LEAST_GROUP:
            raise UsageError(
                f"groups of {form.group} elements have no kernel; pad rows to {LEAST_GROUP} elements or more"
            )
        if form and form.group > 0 and (self.unit % self.n or self.unit % form.group):
            raise UsageError(f"groups of {form.group} do not fill rows of {self.n}, nor rows groups; choose another")
        if self.transform.swapped and form is None:
            raise UsageError("swapped bits of a result that is not quantized are not supported; give it a format")
        if form and not self._has_steps_to_round_between:
            object.__setattr__(self, "io", replace(self.io, numerics=Numerics.ACCURATE))

    @classmethod
    def of(
        cls,
        n: int,
        dtype: DType | str,
        numerics: Numerics | str = Numerics.ACCURATE,
        rows: Rows | str = Rows.CONTIGUOUS,
        *,
        order: int = 1,
        signed: bool = False,
        swapped: bool = False,
        real: bool = False,
        paired: bool = False,
        to: Format | str | None = None,
        columns: int | None = None,
        group: int | None = None,
        rule: str | None = None,
        layout: str = "row-major",
        round_first: bool = False,
        prologue: str = "",
    ) -> Problem:
        """The problem whose output has the type of its input, or is quantized to a format. Raises `UsageError`, as
        `Transform` and `Io` do.

        to: a format as in a `key`, or its name as in `hadagen.rotate_quantize`. With a name, group, rule, layout and
            round_first mean what they mean there, and columns is the number of elements in a row of x, n by default.
        """
        output: Any = dtype if to is None else to
        transform = Transform(n, order, signed, swapped, real, paired)
        is_key = isinstance(to, str) and to not in FORMATS and "_" in to
        if to is not None and not isinstance(to, Format) and not is_key:
            columns = n if columns is None else columns
            if not _is_size(columns, 1, (1 << 63) - 1) or columns % n:
                raise UsageError(f"columns = {shown(columns)} is not supported; rows are a multiple of n = {n}")
            if not isinstance(round_first, bool):
                raise UsageError(f"round_first = {shown(round_first)} is not supported; give True or False")
            output = Format.choose(to, group, rule, layout).for_rows(columns, round_first)
        else:
            check_no_format(columns, group, rule, layout, round_first)
        return cls(transform, Io(dtype, output, numerics, rows), prologue)  # type: ignore[arg-type]  # it converts

    @classmethod
    def parse(cls, key: str) -> Problem:
        """The problem of a `key`. Raises `UsageError` for any other text."""
        if found := _parsed(key) if isinstance(key, str) else None:
            return found
        raise UsageError(f"{shown(key)} names no problem; write one such as n4096-float16-fast or n64-float32-accurate")

    @cached_property
    def key(self) -> str:
        """Its canonical name, such as "n4096-float16-fast". A key that names no rows means contiguous rows."""
        output = ("to", self.io.form.key) if self.io.form else ()
        rows = () if self.io.rows is Rows.CONTIGUOUS else (self.io.rows.value,)
        orders = (f"k{self.order}",) * self.transform.has_matrix + (f"c{self.length}",) * self.transform.paired
        flags = tuple(name for name in ("real", "swapped", "signed") if getattr(self.transform, name))
        after = ("after", self.prologue) if self.prologue else ()
        return "-".join(
            (f"n{self.n}", *orders, *flags, *after, self.io.input.value, *output, self.io.numerics.value, *rows)
        )

    @property
    def n(self) -> int:
        return self.transform.n

    @property
    def order(self) -> int:
        return self.transform.order

    @property
    def length(self) -> int:
        return self.transform.length

    @property
    def unit(self) -> int:
        """The elements that a tile holds whole: a row, or those that are quantized together if these are more."""
        return max(self.n, self.io.form.group, LEAST_GROUP) if self.io.form else self.n

    @cached_property
    def room(self) -> int:
        """The elements of a tile that holds one `unit`: `unit`, or more for a row with one scale if no tile is as long.
        With a matrix, a tile has n times a power of two. The tile neither reads nor writes elements beyond the row."""
        unit, form = self.unit, self.io.form
        if form is None or form.group != unit or unit & (unit - 1) == 0:
            return unit
        if self.transform.has_matrix:
            return padded_length(unit // self.n) * self.n
        least = max(_CHUNK, self.n)
        while True:
            found = -(-unit // least) * least
            most = _MAX_WARPS_OF_ONE_CHUNK if found // odd_part(found) == _CHUNK else _MAX_ODD_WARPS
            if odd_part(found) <= most:
                return found
            least *= 2

    @property
    def is_padded(self) -> bool:
        """Whether a row does not fill its tile."""
        return self.room > self.unit

    @property
    def odd_factor(self) -> int:
        """The odd factor of `room`; 1 with a matrix. A tile has this number of warps, times a power of two."""
        return 1 if self.transform.has_matrix else odd_part(self.room)

    @property
    def bits(self) -> int:
        """The number of index bits that H transforms: log2 of `length`."""
        return self.length.bit_length() - 1

    @property
    def parent(self) -> Problem | None:
        """The problem whose winners are the first guess for this one: the same with contiguous rows, without swapped
        bits, without a format, without signs, with H in place of C, with entries −1, 0 and 1, or without a prologue.
        None if none of these applies, or if only the format could be left out and n is 1."""
        if self.prologue:
            return replace(self, prologue="")
        if self.io.rows is not Rows.CONTIGUOUS:
            return self.with_io(rows=Rows.CONTIGUOUS)
        if self.transform.swapped:
            return replace(self, transform=replace(self.transform, swapped=False))
        if self.io.form:
            return self.with_io(output=self.io.input) if self.n > 1 else None
        for name in ("signed", "paired", "real"):
            if getattr(self.transform, name):
                return replace(self, transform=replace(self.transform, **{name: False}))
        return None

    def with_io(self, **changes: Any) -> Problem:
        """The same transform with some fields of its `io` changed."""
        return replace(self, io=replace(self.io, **changes))

    @property
    def _has_steps_to_round_between(self) -> bool:
        """Whether a kernel that quantizes has steps to round between: two mma for H, an exchange, or H and a matrix.
        Between H and a matrix, values are rounded in no other way than to 16 bits."""
        if self.transform.has_matrix:
            return self.bits > 0 and not (self.io.form and self.io.form.rounds_first)
        return self.bits >= _BITS_OF_TWO_MMA

    @property
    def keeps_16_bits(self) -> bool:
        """Whether every value must keep 16 significant bits until it is quantized."""
        return self.io.form is not None and self.io.numerics is Numerics.ACCURATE

    @property
    def may_round_within(self) -> bool:
        """Whether values may be rounded to 16 bits once between steps, because the result is quantized without being
        rounded to 16 bits first. Values of bfloat16 stay in range then, whatever the scale."""
        form = self.io.form
        return form is not None and not form.rounds_first and self.io.numerics is Numerics.FAST

    @property
    def may_round_often(self) -> bool:
        """Whether steps may round as often as HadaCore's, sum in 16 bits, and multiply by a scale in 16-bit parts."""
        return self.io.form is None and self.io.numerics is Numerics.FAST

    @property
    def error_bound(self) -> float:
        """Largest ‖out − ref‖ / ‖ref‖ against float64, on any class of input, with which a kernel may be used."""
        of_function = max((FUNCTION_ERRORS.get(word, 0.0) for word in self.prologue.split("_")), default=0.0)
        if self.keeps_16_bits and self.io.input is not DType.FLOAT32:
            return hypot(CODES_BOUND, of_function)
        return hypot(self._usual_error * (_SAMPLED if self.may_round_often else 1.0), of_function)

    @property
    def roundings(self) -> float:
        """How many roundings of a 16-bit value may add up. They are independent, so the squares of their errors add."""
        dtype = self.io.input
        return 0.0 if dtype is DType.FLOAT32 else (self._usual_error / ROUNDING_ERROR[dtype]) ** 2

    @property
    def _usual_error(self) -> float:
        """The error that kernels are compared with: if they may round often, that of HadaCore, or with a matrix, of two
        roundings."""
        if not self.may_round_often:
            return ACCURATE_BOUND[self.io.input]
        if self.transform.has_matrix:
            return ROUNDING_ERROR[self.io.input] * 2**0.5
        errors = HADACORE_ERROR[self.io.input]
        return errors[min(self.bits, len(errors)) - 1]


@lru_cache(maxsize=1024)  # every bundle names the same problems
def _parsed(key: str) -> Problem | None:
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    n, order, right, real, swapped, signed, prologue, given, output, numerics, rows = found.groups()
    transform = Transform(int(n), int(order or 1), bool(signed), bool(swapped), bool(real), bool(right))
    io = Io(given, output or given, numerics, rows or Rows.CONTIGUOUS)  # type: ignore[arg-type]
    problem = Problem(transform, io, prologue or "")
    return problem if problem.key == key else None


def kernel_order(order: int, length: int) -> int:
    """The order of the matrix with which kernels multiply by a matrix of this order and an H of this length.

    It is `order`, or that of the matrix and a part of H. If H is shorter than kernels take, the part is all of H,
    provided that a matrix of that order is supported. Else the part is H of order 2, 4, …, as long as H of order 32 is
    left: operands have 16 rows each, and what a matrix lacks to a multiple of 16 rows is computed and kept like the
    rest. So a matrix of less than 32 rows takes in a part if more than a fifth of the rows of its operands would be
    empty, and any matrix if a long row fits in shared memory without what it lacks, but not with it. 1, no matrix,
    stays 1.
    """
    if order == 1:
        return 1
    if 1 < length < LEAST_LENGTH:
        return order * length if order * length <= MAX_ORDER else order
    n = order * length
    while length >= 64:
        lacking = -order % 16
        if not (order < 32 and 4 * lacking > order) and not n <= _LONGEST < n + lacking * length:
            break
        order, length = 2 * order, length // 2
    return order


def may_have_kernels(order: int, length: int) -> bool:
    """Whether kernels may multiply by a real matrix of this order and an H of this length."""
    return 1 < order <= MAX_REAL_ORDER and LEAST_LENGTH <= length <= MAX_REAL_LENGTH


def may_have_paired(orders: Sequence[int]) -> bool:
    """Whether kernels may multiply by two real matrices of these orders, A and C."""
    return len(orders) == 2 and 1 < orders[0] <= MAX_REAL_ORDER and orders[1] in RIGHT_ORDERS


def transform_for(n: int, orders: Sequence[int], *, signed: bool, swapped: bool, real: bool) -> Transform:
    """The transform of kernels that multiply rows of n elements by matrices of these orders, each from 2 on, and by H.
    real: whether the entries of a matrix are other numbers than −1, 0 and 1. Raises `UsageError` if no kernel does."""
    most, given = 1 << MAX_LOG2_N, prod(orders)
    if real and may_have_paired(orders) and given == n:
        return Transform(n, orders[0], signed, swapped, real, paired=True)
    even = n & -n
    blocks = f"rotate in blocks of {min(even, most)}" if even > 1 else "rotate rows of an even length in blocks"
    if len(orders) > 1:
        several = " · ".join(map(str, orders))
        raise UsageError(
            f"no kernel multiplies by matrices of the orders {several}, but by one, or by two of real numbers without "
            f"an H, the first of up to {MAX_REAL_ORDER} and the second of {_either(RIGHT_ORDERS)}; {blocks}"
        )
    if n > most:
        raise UsageError(f"no kernel has rows or blocks of {n} elements, but of up to {most}; {blocks}")
    if given > MAX_ORDER:
        raise UsageError(f"no kernel multiplies by a matrix of order {given}, but of up to {MAX_ORDER}; {blocks}")
    if real and given > 1 and not may_have_kernels(given, n // given):
        raise UsageError(
            f"no kernel multiplies by a matrix of {given}² real numbers and an H of order {n // given}, but by up to "
            f"{MAX_REAL_ORDER}² and an H from {LEAST_LENGTH} to {MAX_REAL_LENGTH}; take such orders, or {blocks}"
        )
    return Transform(n, given, signed, swapped, real and given > 1)


def _either(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def check_tunable(problems: Iterable[Problem]) -> None:
    """Raises `UsageError` if a problem has signs or swapped bits, because its kernels are made like the winners of the
    same without them, or if it has no codes, because they are made like those that quantize."""
    for problem in problems:
        if problem.io.form and problem.io.form.element is Element.NONE:
            raise UsageError(
                f"{problem.key} is not tuned, because kernels without codes are made like others; tune one of those, "
                f"such as {problem.with_io(output='fp8_tensor').key}"
            )
        if problem.transform.signed or problem.transform.swapped:
            plain = replace(problem, transform=replace(problem.transform, signed=False, swapped=False))
            raise UsageError(
                f"{problem.key} is not tuned, because kernels with signs or swapped bits are made like those without; "
                f"tune {plain.key}"
            )


def check_no_format(columns: Any, group: Any, rule: Any, layout: Any, round_first: Any) -> None:
    """Raises `UsageError` where an option of a format is given, for a call that has none."""
    is_default = isinstance(layout, str) and layout == "row-major"
    if not is_default or round_first is not False or any(each is not None for each in (columns, group, rule)):
        raise UsageError("columns, group, rule, layout and round_first are those of a format; give to as well")


def difference(one: Problem, other: Problem) -> float:
    """The distance of two transforms, to find kernels that may be good for both: |log2| of the ratio of their orders
    plus |log2| of the ratio of the lengths of H."""
    return abs(log2(one.order / other.order)) + abs(log2(one.length / other.length))


def odd_part(number: int) -> int:
    """The greatest odd factor of a number ≥ 1."""
    return number // (number & -number)


def padded_length(columns: int) -> int:
    """The length to which rows of `columns` ≥ 1 elements are padded: the least power of two that is not below it."""
    return 1 << (columns - 1).bit_length()


def _member(kind: type[Enum], value: Any, what: str) -> Any:
    known = [str(member.value) for member in kind]
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{what} {shown(value)} is not supported; {choice(value, known)}")
    return kind(value)
