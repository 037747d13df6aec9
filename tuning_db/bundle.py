"""`Bundle`: the winners of one arch with their kernels, in one SQLite file that is only read.

Read with the standard library alone, so that calling a kernel needs nothing else. A program uses few of the thousands
of winners, so only what it asks for is read: the list of problems on opening, the winners of a problem when they are
first asked for, a cubin and its PTX when the kernel is loaded. A file descriptor is held only while reading: a `Bundle`
may be shared by threads and survives a fork. If the file was replaced in between, the new file is read.

Everything in the file is protected, and checked when it is read. `meta` holds the content digest: the SHA-256 of the
rows that are read on opening. Among these, the row of a problem holds the SHA-256 of the rows of its winners. Among
those, the row of a kernel holds the SHA-256 of its cubin and that of its PTX. `Bundle.verify` checks all of them.

A digest shows accidents only, because whoever changes a file can make its digests anew. So the file must also have
these tables and nothing else, no view or trigger. What is read is bounded, and every value must lie in its range.
Beside the content lie signatures of it: a signature of the content digest is one of all that is read (`signatures`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hadagen.errors import StorageError
from hadagen.files.opening import (
    FileState,
    connect_read_only,
    file_state,
    inflated,
    limit_values,
    read_start,
    state_of,
)
from hadagen.problem.launch import PORTABLE_CLUSTER, LaunchSpec
from hadagen.problem.operands import params_for
from hadagen.problem.problem import Numerics, Problem
from hadagen.problem.regimes import Cache, Destination
from hadagen.problem.target import check_arch
from hadagen.problem.trial import Environment, Kernel, Provenance, check_knobs, recipe_digest
from hadagen.tuning_db.signatures import Signature, Statement

SQLITE_MAGIC = b"SQLite format 3\0"
APPLICATION_ID = 0x68616461  # "hada", in the header of the file
FORMAT = 8  # the format of the tables below; the header names it too
# The oldest format that is read. Before 8, accurate kernels that quantize could round between steps; before 7, there
# are no signatures; before 6, no problem names an arithmetic; before 5, every kernel has a cubin.
OLDEST_FORMAT = 4
SIGNED, ACCURATE_CODES = 7, 8  # formats since which that is so

# Every table with its columns; launch, knobs and errors are JSON objects. An environment is there without memory and
# power limit, because calls choose by `gpu`, the class. The first three are read on opening, the others problem by
# problem; the column `winners` has the SHA-256 of the rows of a problem in the others.
TABLES = {
    "meta": "key TEXT PRIMARY KEY, value TEXT",
    "problems": "id INTEGER PRIMARY KEY, key TEXT, arithmetic TEXT, winners TEXT",
    "environments": "id INTEGER PRIMARY KEY, gpu TEXT, compute_capability TEXT, sms INTEGER, l2_bytes INTEGER, "
    "driver TEXT, cuda TEXT, nvcc TEXT, sm_clock_mhz INTEGER, memory_clock_mhz INTEGER",
    "kernels": "id INTEGER PRIMARY KEY, digest TEXT UNIQUE, entry TEXT, launch TEXT, registers INTEGER, "
    "spill_bytes INTEGER, nvcc TEXT, cubin_sha256 TEXT, ptx_sha256 TEXT",
    "trials": "id INTEGER PRIMARY KEY, problem INTEGER REFERENCES problems, "
    "environment INTEGER REFERENCES environments, kernel INTEGER REFERENCES kernels, "
    "knobs TEXT, errors TEXT, provenance TEXT, date TEXT",
    "entries": "id INTEGER PRIMARY KEY, trial INTEGER REFERENCES trials, destination TEXT, elements INTEGER, "
    "cache TEXT, hot_us REAL, hot_copy_us REAL, cold_us REAL, cold_copy_us REAL",
}
OPENED = ("meta", "problems", "environments")
# How the rows of a problem are found, by table: the rows of `kernels` first, then those of `trials` and `entries`.
OF_PROBLEM = {
    "kernels": "id IN (SELECT kernel FROM trials WHERE problem = ?)",
    "trials": "problem = ?",
    "entries": "trial IN (SELECT id FROM trials WHERE problem = ?)",
}
INDEXES = {"trials": "problem", "entries": "trial"}
# The table of compressed cubins and PTX, with one row for each kernel that has a cubin. It is a table of its own, so
# that the tables above are read without it. A kernel without a cubin is only a recipe: the problem and the knobs of its
# trials. Row `SHARED`, if it is there, has the dictionaries that all other rows are compressed with. A damaged
# dictionary shows when a row is inflated with it.
SHARED = 0
NO_BLOBS = "", ""  # in place of the SHA-256 of cubin and PTX, for a kernel without a cubin
BLOBS = "kernel INTEGER PRIMARY KEY REFERENCES kernels, cubin BLOB, ptx BLOB"
# The content digest does not cover the signatures, because they sign it.
SIGNATURES = "CREATE TABLE signatures (id INTEGER PRIMARY KEY, key TEXT, signature TEXT)"


def columns_of(table: str) -> list[str]:
    """The names of the columns of one of `TABLES`."""
    return [column.split()[0] for column in TABLES[table].split(", ")]


# The file has these tables and indexes alone, in this order.
UNSIGNED_SCHEMA = [
    *(f"CREATE TABLE {table} ({columns})" for table, columns in {**TABLES, "blobs": BLOBS}.items()),
    *(f"CREATE INDEX {table}_by_{column} ON {table} ({column})" for table, column in INDEXES.items()),
]
SCHEMA = [*UNSIGNED_SCHEMA, SIGNATURES]
FORMER_SCHEMA = [statement.replace("arithmetic TEXT, ", "") for statement in UNSIGNED_SCHEMA]

# Limits that no sound bundle comes near: rows of a table that are read at once, and characters in them; characters of a
# text; names in a JSON object; signatures; thousands of steps of SQLite for all that is read at once. A page that is
# its own child would take many steps.
MOST_ROWS = 1 << 14
MOST_CHARACTERS = 1 << 22
MOST_OF_TEXT = 1 << 14
MOST_NAMES = 100
MOST_SIGNATURES = 16
MOST_STEPS = 8000
# Pages that several trees share, and compressed zeros, are more than the file that has them. So there are also limits
# by the size of the file, for rows, characters and inflated bytes: so many of them, and so many more for each byte.
MOST_IN_FILE = {"rows": (1 << 12, 1 / 16), "characters": (1 << 20, 8), "inflated bytes": (1 << 24, 32)}

Row = tuple[Any, ...]
Tables = dict[str, list[Row]]
Found = TypeVar("Found")


@dataclass(frozen=True)
class BundleEntry:
    """The winner of one cell: a problem on a GPU, in place or out of place, at a number of elements (rows · n).

    `portable`: whether it is the second winner of its cell, for GPUs that do not hold the clusters of the first.

    Times are microseconds for one launch, None where not measured. `cache` says which of them decided.
    `errors` is the relative error ‖out − ref‖ / ‖ref‖ against float64, by class of input; an estimate of a kernel that
    never ran has none.
    """

    problem: Problem
    arch: str
    environment: Environment
    destination: Destination
    elements: int
    kernel: str  # digest
    launch: LaunchSpec
    knobs: Mapping[str, Any]
    errors: Mapping[str, float]
    provenance: Provenance
    date: str
    nvcc: str
    cache: Cache
    hot_us: float | None
    hot_copy_us: float | None
    cold_us: float | None
    cold_copy_us: float | None
    compiled: bool = True  # whether the bundle has the code of the kernel, or only the recipe
    portable: bool = False

    @property
    def gpu(self) -> str:
        return self.environment.gpu

    @property
    def times(self) -> dict[Cache, tuple[float, float]]:
        """The time of the kernel and of a copy, hot and cold, where they were measured."""
        known = (Cache.HOT, self.hot_us, self.hot_copy_us), (Cache.COLD, self.cold_us, self.cold_copy_us)
        return {cache: (us, copy_us) for cache, us, copy_us in known if us is not None and copy_us is not None}

    @property
    def us(self) -> float:
        return self.times[self.cache][0]  # the writer names a regime that was timed

    @property
    def copy_us(self) -> float:
        return self.times[self.cache][1]

    @property
    def fraction_of_copy(self) -> float:
        return self.copy_us / self.us

    @property
    def relative_error(self) -> float | None:
        """The largest of `errors`; None if there are none."""
        return max(self.errors.values(), default=None)


class NoKernelError(StorageError):
    """A bundle has no kernel of a digest. If an entry named this digest, the file was replaced since: choose again."""


# Raises `StorageError` if the file at a path must not be used, judged by its statement and its signatures.
Accept = Callable[[Path, Statement, Sequence[Signature]], None]


def accept_all(path: Path, statement: Statement, signatures: Sequence[Signature]) -> None:
    """Accept a bundle whether or not anybody signed it."""


class Bundle:
    """A bundle that was found sound when it was opened."""

    def __init__(self, path: Path, accept: Accept = accept_all) -> None:
        self.path = path
        self._accept = accept
        self._now = _read(path, self._content)

    @classmethod
    def open(cls, path: str | os.PathLike[str], accept: Accept = accept_all) -> Bundle:
        """Open the bundle at `path`.

        accept: called before anything of the content is used, and again where the file was replaced since.

        Raises `StorageError` if it is missing, foreign, damaged, or of a format that is not read, and what `accept`
        raises.
        """
        return cls(Path(path).absolute(), accept)

    @property
    def arch(self) -> str:
        return self._now.meta["arch"]

    @property
    def digest(self) -> str:
        """The content digest."""
        return self._now.meta["digest"]

    @property
    def date(self) -> str:
        """The date of the newest trial."""
        return self._now.meta["date"]

    @property
    def version(self) -> str:
        """The version of hadagen that wrote the bundle."""
        return self._now.meta["hadagen"]

    @property
    def state(self) -> FileState:
        """The identity of the file when it was read."""
        return self._now.opened.state

    @property
    def statement(self) -> Statement:
        """The statement that a signature of the bundle signs."""
        return self._now.statement

    @property
    def signatures(self) -> Sequence[Signature]:
        """The signatures in the file, valid or not (`Signature.is_of`)."""
        return self._now.signatures

    def problems(self) -> list[Problem]:
        """The problems that were tuned, in order."""
        return sorted(self.tuned)

    @property
    def tuned(self) -> Collection[Problem]:
        """The same in any order, which takes no time."""
        return self._now.numbers.keys()

    def gpus(self) -> list[str]:
        """The GPUs that the winners were timed on, in order; "" stands for an estimate."""
        return sorted({environment.gpu for environment in self._now.environments.values()})

    def entries(self, problem: Problem) -> list[BundleEntry]:
        """The winners of a problem, by GPU, destination and elements; [] if it was not tuned.

        Raises `StorageError` where they are damaged.
        """
        if problem in self._now.numbers and problem not in self._now.entries:
            return list(self._read_now(lambda now, connection: now.read_winners(connection, problem)))
        return list(self._now.entries.get(problem, ()))

    def arithmetic(self, problem: Problem) -> str:
        """`LaunchSpec.arithmetic` of the winners that batch-invariant calls run; "" if there are none."""
        return self._now.arithmetic.get(problem, "")

    def all_entries(self) -> Iterator[BundleEntry]:
        """The winners of all problems. Raises `StorageError` where some are damaged."""
        for problem in self.problems():
            yield from self.entries(problem)

    def kernel(self, digest: str) -> Kernel:
        """Load a kernel, without its source, and without code if there is only a recipe of it.

        Raises `NoKernelError` if the bundle has none of this digest, and `StorageError` if it is damaged.
        """

        def read(now: _Content, connection: sqlite3.Connection) -> Kernel | None:
            if digest not in now.kernels:
                now.read_winners_with(connection, digest)
            return now.read_kernel(connection, digest) if digest in now.kernels else None

        if found := self._read_now(read):
            return found
        raise NoKernelError(f"{self.path} holds no kernel {digest}; ask for one that its entries name")

    def verify(self) -> None:
        """Check all of the file, as it is now. Raises `StorageError` where any row was changed, or is one too many."""

        def check(connection: sqlite3.Connection, opened: _Opened) -> None:
            now = self._content(connection, opened)
            for problem in now.numbers:
                now.read_winners(connection, problem)
            for digest in now.kernels:
                now.read_kernel(connection, digest)
            entries, trials = sum(map(len, now.entries.values())), sum(now.trials.values())
            now.check_counts(connection, entries, trials, [sums for _, _, sums in now.kernels.values()])
            self._now = now

        _read(self.path, check)

    def verify_digests(self) -> None:
        """Check that no row was changed, and that none is one too many, without making winners of them: several times
        as fast as `verify`. Whoever can make the digests anew gets past this check. Raises what `verify` raises."""

        def check(connection: sqlite3.Connection, opened: _Opened) -> None:
            now = self._content(connection, opened)
            entries = trials = 0
            kernels: dict[int, tuple[str, str]] = {}
            for problem in now.numbers:
                tables = now.rows_of(connection, problem)
                entries, trials = entries + len(tables["entries"]), trials + len(tables["trials"])
                kernels |= {number: (cubin, ptx) for number, *_, cubin, ptx in tables["kernels"]}
            for number, sums in kernels.items():
                now.read_blobs(connection, number, sums)
            now.check_counts(connection, entries, trials, kernels.values())

        _read(self.path, check)

    def compilers(self) -> dict[str, str]:
        """A kernel of each compiler that made code in the bundle: its digest, by the name of the compiler."""
        query = "SELECT nvcc, min(digest) FROM kernels WHERE cubin_sha256 != '' GROUP BY nvcc LIMIT ?"
        return self._read_now(lambda _, connection: dict(connection.execute(query, (MOST_NAMES,)).fetchall()))

    def _read_now(self, read: Callable[[_Content, sqlite3.Connection], Found]) -> Found:
        """Return what `read` makes of the file as it is now, and keep what was read for later calls."""

        def read_now(connection: sqlite3.Connection, opened: _Opened) -> Found:
            now = self._now if self._now.opened == opened else self._content(connection, opened)
            found = read(now, connection)
            self._now = now
            return found

        return _read(self.path, read_now)

    def _content(self, connection: sqlite3.Connection, opened: _Opened) -> _Content:
        """The content of the file as it is now. Raises what `accept` raises."""
        now = _Content(connection, opened)
        self._accept(self.path, now.statement, now.signatures)
        return now


class _Opened(NamedTuple):
    """A file that was opened: its state, and the format in its header."""

    state: FileState
    format: int


class _Content:
    """The content of one state of a file, as far as it was read and checked."""

    def __init__(self, connection: sqlite3.Connection, opened: _Opened) -> None:
        self.opened = opened
        self._read_of_file = dict.fromkeys(MOST_IN_FILE, 0)
        tables = self._counted({table: read_rows(connection, table) for table in OPENED})
        self.meta = {key: _text(value) for key, value in tables["meta"]}
        if sorted(key for key, _ in tables["meta"]) != ["arch", "date", "digest", "hadagen"]:
            raise ValueError("its head has other rows")
        check_arch(self.meta["arch"])
        if self.meta["digest"] != content_digest(tables):
            raise ValueError("the content digest does not match")
        self.statement = Statement(opened.format, self.meta["arch"], self.meta["digest"])
        self.signatures = _signatures(connection) if opened.format >= SIGNED else ()
        self.environments = {number: _environment(row) for number, row in _by_id(tables, "environments").items()}
        self.numbers: dict[Problem, int] = {}
        self._named: dict[Problem, Problem] = {}  # problem → the problem as the file names it
        self._sums: dict[int, str] = {}
        self.arithmetic: dict[Problem, str] = {}
        for number, key, *former, winners in tables["problems"]:
            named = Problem.parse(key)
            may_round = opened.format < ACCURATE_CODES and named.io.form
            problem = named.with_io(numerics=Numerics.FAST) if may_round else named
            self._named[problem] = named
            if problem in self.numbers:
                raise ValueError(f"{problem.key} is there twice")
            self.numbers[problem] = number
            self.arithmetic[problem] = _text(former[0]) if former else ""
            self._sums[number] = winners
        # Of the problems that were read: how many trials, the winners, and the kernels by digest, without their blobs
        # but with the number of these and their SHA-256.
        self.trials: dict[Problem, int] = {}
        self.entries: dict[Problem, list[BundleEntry]] = {}
        self.kernels: dict[str, tuple[Kernel, int, tuple[str, str]]] = {}
        self._shared: tuple[bytes, bytes] | None = None
        self._inflated: set[int] = set()  # numbers of kernels whose blobs were counted

    def read_winners(self, connection: sqlite3.Connection, problem: Problem) -> Sequence[BundleEntry]:
        """The winners of a problem, read once; none if it was not tuned."""
        if problem not in self.numbers or problem in self.entries:
            return self.entries.get(problem, ())
        tables = self.rows_of(connection, problem)
        rows = _by_id(tables, "kernels")
        kernels = {number: _kernel(self.meta["arch"], row) for number, row in rows.items()}
        recipes = {number for number, row in rows.items() if (row["cubin_sha256"], row["ptx_sha256"]) == NO_BLOBS}
        trials = {
            number: self._trial(problem, row, kernels, row["kernel"] in recipes)
            for number, row in _by_id(tables, "trials").items()
        }
        entries: list[BundleEntry] = []
        clusters: dict[tuple[str, Destination, int], int] = {}  # of what was named first in each cell
        for row in _by_id(tables, "entries").values():
            trial = trials[row["trial"]]
            destination, elements = Destination(row["destination"]), row["elements"]
            cell, cluster = (trial["environment"].gpu, destination, elements), trial["launch"].cluster
            entries.append(_timed(trial, row, destination, is_second := cell in clusters))
            if is_second and not cluster <= PORTABLE_CLUSTER < clusters[cell]:
                raise ValueError(f"{problem.key} has two winners in one place")
            clusters[cell] = 0 if is_second else cluster
        for number, row in rows.items():
            kernel = kernels[number]
            self.kernels[kernel.digest] = kernel, number, (row["cubin_sha256"], row["ptx_sha256"])
        self.trials[problem] = len(trials)
        self.entries[problem] = entries
        return entries

    def read_winners_with(self, connection: sqlite3.Connection, digest: str) -> None:
        """Reads the winners of a problem that has this kernel, if one has."""
        query = "SELECT problem FROM trials JOIN kernels ON kernels.id = trials.kernel WHERE digest = ?"
        found = connection.execute(query, (digest,)).fetchone()
        for problem, number in self.numbers.items():
            if found == (number,):
                self.read_winners(connection, problem)

    def read_kernel(self, connection: sqlite3.Connection, digest: str) -> Kernel:
        """One of `kernels`, with its blobs."""
        kernel, number, sums = self.kernels[digest]
        if sums == NO_BLOBS:
            return kernel
        cubin, ptx = self.read_blobs(connection, number, sums)
        kernel = replace(kernel, cubin=cubin, ptx=ptx)
        kernel.check()
        return kernel

    def rows_of(self, connection: sqlite3.Connection, problem: Problem) -> Tables:
        """The rows of the winners of a problem of `numbers`, which match their SHA-256."""
        number = self.numbers[problem]
        tables = self._counted(winners_of(connection, number))
        if self._sums[number] != rows_digest(tables):
            raise ValueError(f"the winners of {problem.key} do not match their SHA-256")
        return tables

    def read_blobs(self, connection: sqlite3.Connection, number: int, sums: tuple[str, str]) -> tuple[bytes, bytes]:
        """The cubin and the PTX of the kernel of this number, which match these SHA-256; both empty if it has none."""
        if sums == NO_BLOBS:
            return b"", b""
        blobs = connection.execute("SELECT cubin, ptx FROM blobs WHERE kernel = ?", (number,)).fetchone()
        cubin, ptx = map(inflated, blobs, self.read_shared(connection))
        if (sha256(cubin), sha256(ptx)) != sums:
            raise ValueError("a blob does not match its SHA-256")
        if number not in self._inflated:
            self._inflated.add(number)
            self._count("inflated bytes", len(cubin) + len(ptx))
        return cubin, ptx

    def check_counts(
        self, connection: sqlite3.Connection, entries: int, trials: int, kernels: Collection[tuple[str, str]]
    ) -> None:
        """Raises `ValueError` if the file has other rows than those of its problems. kernels: the SHA-256 of blobs."""
        blobs = sum(sums != NO_BLOBS for sums in kernels) + any(self.read_shared(connection))
        ours = {"entries": entries, "trials": trials, "kernels": len(kernels), "blobs": blobs}
        for table, count in ours.items():
            some = f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {count + 1})"
            if connection.execute(some).fetchone() != (count,):
                raise ValueError(f"{table} has rows that belong to no problem")

    def read_shared(self, connection: sqlite3.Connection) -> tuple[bytes, bytes]:
        """The dictionaries of cubins and of PTX, read once; both empty if there are none."""
        if self._shared is None:
            found = connection.execute("SELECT cubin, ptx FROM blobs WHERE kernel = ?", (SHARED,)).fetchone()
            self._shared = (inflated(found[0]), inflated(found[1])) if found else (b"", b"")
        return self._shared

    def _counted(self, tables: Tables) -> Tables:
        """The same. Raises `ValueError` if all that was read is more than a file of this size has."""
        for rows in tables.values():
            self._count("rows", len(rows))
            self._count("characters", sum(map(_characters, rows)))
        return tables

    def _count(self, what: str, more: int) -> None:
        least, rate = MOST_IN_FILE[what]
        self._read_of_file[what] += more
        if self._read_of_file[what] > least + rate * self.opened.state.size:
            raise ValueError(f"it has more {what} than a file of its size")

    def _trial(
        self, problem: Problem, row: Mapping[str, Any], kernels: dict[int, Kernel], without_code: bool
    ) -> dict[str, Any]:
        """The fields that all entries of a trial share. Kernels without code get the digests of this version."""
        kernel = kernels[row["kernel"]]
        # Calls have no other arguments to give.
        if kernel.launch.params != params_for(problem) or kernel.launch.tile_elements % problem.n:
            raise ValueError(f"{problem.key} has a kernel for other rows or params")
        knobs, errors = _object(row["knobs"]), _object(row["errors"])
        check_knobs(knobs)
        if without_code:
            named = dict.fromkeys((self._named[problem], problem))  # one, but in former formats
            *_, today = digests = [recipe_digest(each, knobs, kernel.launch) for each in named]
            if kernel.digest not in digests:  # another trial may have renamed it
                raise ValueError(f"{problem.key} has a kernel without code that is not of its recipe")
            kernel = kernels[row["kernel"]] = replace(kernel, digest=today)
        provenance = Provenance(row["provenance"])
        known = bool(errors) or provenance is Provenance.ESTIMATED
        if not known or not all(type(error) in (int, float) and 0 <= error <= 1e9 for error in errors.values()):
            raise ValueError(f"{row['errors']!r:.40} are no errors")
        return {
            "problem": problem,
            "arch": self.meta["arch"],
            "environment": self.environments[row["environment"]],
            "kernel": kernel.digest,
            "launch": kernel.launch,
            "knobs": knobs,
            "errors": errors,
            "provenance": provenance,
            "date": _text(row["date"]),
            "nvcc": kernel.nvcc,
            "compiled": not without_code,
        }


def _environment(row: Mapping[str, Any]) -> Environment:
    check: dict[str, Callable[[object], Any]] = {"str": _text, "int": _count}
    kinds = {each.name: str(each.type) for each in fields(Environment)}
    return Environment(**{name: check[kinds[name]](value) for name, value in row.items()})


def _kernel(arch: str, row: Mapping[str, Any]) -> Kernel:
    """The kernel of a row, without its blobs."""
    launch = LaunchSpec.from_dict(_object(row["launch"]))
    used = _count(row["registers"]), _count(row["spill_bytes"])
    return Kernel(_text(row["digest"]), _text(row["entry"]), arch, "", b"", b"", launch, *used, _text(row["nvcc"]))


def _timed(trial: dict[str, Any], row: Mapping[str, Any], destination: Destination, portable: bool) -> BundleEntry:
    times = {name: row[name] for name in ("hot_us", "hot_copy_us", "cold_us", "cold_copy_us")}
    for us in times.values():
        if us is not None and not (type(us) is float and 1e-6 < us < 1e12):
            raise ValueError(f"{times} are no microseconds")
    cache, elements = Cache(row["cache"]), row["elements"]
    if times[f"{cache.value}_us"] is None or any(
        (times[f"{each}_us"] is None) != (times[f"{each}_copy_us"] is None) for each in ("hot", "cold")
    ):
        raise ValueError(f"{times} lack one that decides")
    if _count(elements) == 0 or elements % trial["problem"].n:
        raise ValueError(f"{elements!r:.40} is no number of elements")
    return BundleEntry(**trial, **times, destination=destination, elements=elements, cache=cache, portable=portable)


def _text(value: object) -> str:
    if not (isinstance(value, str) and len(value) <= MOST_OF_TEXT and value.isprintable()):
        raise ValueError(f"{value!r:.40} is no line of text")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _object(text: object) -> dict[str, Any]:
    values = json.loads(_text(text))
    if not isinstance(values, dict) or len(values) > MOST_NAMES:
        raise ValueError(f"{text!r:.40} is no JSON object, or is too large")
    for each in (*values, *values.values()):
        if isinstance(each, str):
            _text(each)
    return values


def shipped() -> dict[str, Path]:
    """The bundles that come with hadagen, by arch."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "bundles").glob("*.db"))}


def _signatures(connection: sqlite3.Connection) -> tuple[Signature, ...]:
    query = "SELECT key, signature FROM signatures ORDER BY id LIMIT ?"
    found = tuple(Signature(*map(_text, row)) for row in connection.execute(query, (MOST_SIGNATURES + 1,)))
    if len(found) > MOST_SIGNATURES or len({each.key for each in found}) < len(found):
        raise ValueError("it has too many signatures")
    return found


def read_rows(connection: sqlite3.Connection, table: str, where: str = "true", *values: int) -> list[Row]:
    """Rows of a table of `TABLES`, in order. Raises `ValueError` where they are more than any bundle has."""
    query = f"SELECT * FROM {table} WHERE {where} ORDER BY 1"
    rows: list[Row] = []
    characters = 0
    for row in connection.execute(query, values):
        rows.append(row)
        characters += _characters(row)
        if len(rows) > MOST_ROWS or characters > MOST_CHARACTERS:
            raise ValueError(f"{table} has more than any search finds")
    return rows


def _characters(row: Row) -> int:
    return sum([len(value) for value in row if isinstance(value, (str, bytes))])  # faster than with str | bytes


def winners_of(connection: sqlite3.Connection, problem: int) -> Tables:
    """The rows of the winners of a problem, which is named by its number."""
    return {table: read_rows(connection, table, where, problem) for table, where in OF_PROBLEM.items()}


def content_digest(tables: Tables) -> str:
    """SHA-256 of the rows of `OPENED`, without the row of `meta` that holds this digest."""
    return rows_digest(tables | {"meta": [row for row in tables["meta"] if row[0] != "digest"]})


def rows_digest(tables: Tables) -> str:
    """SHA-256 of rows."""
    return sha256(json.dumps(tables, separators=(",", ":")).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _by_id(tables: Tables, table: str) -> dict[int, dict[str, Any]]:
    """Rows of a table as {column: value} without the id, by id."""
    names = columns_of(table)[1:]
    return {number: dict(zip(names, values, strict=True)) for number, *values in tables[table]}


def is_bundle(header: bytes) -> bool:
    """Whether a file that begins so is a bundle of some format.

    https://www.sqlite.org/fileformat.html#the_database_header: user version at 60, application id at 68, big-endian.
    """
    return header.startswith(SQLITE_MAGIC) and int.from_bytes(header[68:72], "big") == APPLICATION_ID


def _allow_steps(connection: sqlite3.Connection) -> None:
    """Ends what SQLite does with a connection, in an error, after `MOST_STEPS`."""
    thousands = iter(range(MOST_STEPS))
    connection.set_progress_handler(lambda: next(thousands, None) is None, 1000)


def _read(path: Path, read: Callable[[sqlite3.Connection, _Opened], Found]) -> Found:
    """The result of `read` for a file, once its header is that of a bundle of our format. If `read` then fails to read
    or to understand anything, the file is damaged."""
    for seconds in (0.01, 0.1):
        before = file_state(path)
        try:
            return _read_once(path, read)
        except StorageError:
            if file_state(path) == before:
                raise
            time.sleep(seconds)  # for it is being replaced
    return _read_once(path, read)


def _read_once(path: Path, read: Callable[[sqlite3.Connection, _Opened], Found]) -> Found:
    make = "with `hadagen bundle make`, or `hadagen tune` where nothing was tuned yet"
    again = f"make it again {make}, or reinstall hadagen if it came with it"
    try:
        header, found = read_start(path, 72)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}); name another bundle, or make one {make}"
        ) from error
    if not is_bundle(header):
        raise StorageError(f"{path} is not a hadagen bundle; name one, or make one {make}")
    version = int.from_bytes(header[60:64], "big")
    if version > FORMAT:
        raise StorageError(f"{path} is a bundle of format {version}, later than {FORMAT}; upgrade hadagen to read it")
    if version < OLDEST_FORMAT:
        raise StorageError(f"{path} is a bundle of format {version}, earlier than {FORMAT}; {again}")
    try:
        page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
        if found.st_size != pages * (1 << 16 if page == 1 else page):
            raise ValueError("it was cut off, or more follows it")
        with closing(connect_read_only(path, immutable=True)) as connection:
            limit_values(connection)
            _allow_steps(connection)
            query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT ?"
            schema = SCHEMA if version >= SIGNED else UNSIGNED_SCHEMA if version == 6 else FORMER_SCHEMA
            if connection.execute(query, (len(schema) + 1,)).fetchall() != [(statement,) for statement in schema]:
                raise ValueError("it has other tables")
            state = state_of(found)
            # SQLite opened the file by its name. Whether that is the file whose header was read shows only now.
            if connection.execute("PRAGMA user_version").fetchone() != (version,) or file_state(path) != state:
                raise ValueError("it was replaced while it was opened")
            return read(connection, _Opened(state, version))
    except (sqlite3.Error, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({' '.join(str(error).split()):.200}); {again}") from error
