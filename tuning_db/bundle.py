"""`Bundle`: the winners of one arch with their kernels, in one SQLite file that is only read.

Read with the standard library alone, so that calling a kernel needs nothing else. A program uses few of the thousands
of winners, so only what it asks for is read: the list of problems on opening, the winners of a problem when they are
first asked for, a cubin and its PTX when the kernel is loaded. A file descriptor is held only while reading: a `Bundle`
may be shared by threads and survives a fork.

Everything in the file is protected, and checked when it is read. The content digest in `meta` is the SHA-256 of the
rows that are read on opening; the row of a problem among them holds the SHA-256 of its winners, and the row of a kernel
among these those of its cubin and PTX. `Bundle.verify` checks all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hadagen.errors import StorageError
from hadagen.launch import LaunchSpec
from hadagen.problem import Problem
from hadagen.trial import Cache, Destination, Environment, Kernel, Provenance

SQLITE_MAGIC = b"SQLite format 3\0"
APPLICATION_ID = 0x68616461  # "hada", in the header of the file
FORMAT = 3  # of the tables below; in the header too

# Every table with its columns; launch, knobs and errors are JSON objects. The first three are read on opening, the
# others problem by problem; `winners` is the SHA-256 of what these have of it.
TABLES: dict[str, dict[str, str]] = {
    "meta": {"key": "TEXT PRIMARY KEY", "value": "TEXT"},
    "problems": {
        "id": "INTEGER PRIMARY KEY",
        "n": "INTEGER",
        "dtype": "TEXT",
        "numerics": "TEXT",
        "pitched": "INTEGER",
        "winners": "TEXT",
    },
    "environments": {
        "id": "INTEGER PRIMARY KEY",
        "gpu": "TEXT",
        "compute_capability": "TEXT",
        "sms": "INTEGER",
        "l2_bytes": "INTEGER",
        "driver": "TEXT",
        "cuda": "TEXT",
        "nvcc": "TEXT",
        "sm_clock_mhz": "INTEGER",
        "memory_clock_mhz": "INTEGER",
    },
    "kernels": {
        "id": "INTEGER PRIMARY KEY",
        "digest": "TEXT UNIQUE",
        "entry": "TEXT",
        "launch": "TEXT",
        "registers": "INTEGER",
        "spill_bytes": "INTEGER",
        "nvcc": "TEXT",
        "cubin_sha256": "TEXT",
        "ptx_sha256": "TEXT",
    },
    "trials": {
        "id": "INTEGER PRIMARY KEY",
        "problem": "INTEGER REFERENCES problems",
        "environment": "INTEGER REFERENCES environments",
        "kernel": "INTEGER REFERENCES kernels",
        "knobs": "TEXT",
        "errors": "TEXT",
        "provenance": "TEXT",
        "date": "TEXT",
    },
    "entries": {
        "id": "INTEGER PRIMARY KEY",
        "trial": "INTEGER REFERENCES trials",
        "destination": "TEXT",
        "elements": "INTEGER",
        "cache": "TEXT",
        "hot_us": "REAL",
        "hot_copy_us": "REAL",
        "cold_us": "REAL",
        "cold_copy_us": "REAL",
    },
}
OPENED = ("meta", "problems", "environments")
# How the rows of a problem are found, by table: the rows of `kernels` first, then those of `trials` and `entries`.
OF_PROBLEM = {
    "kernels": "id IN (SELECT kernel FROM trials WHERE problem = ?)",
    "trials": "problem = ?",
    "entries": "trial IN (SELECT id FROM trials WHERE problem = ?)",
}
INDEXES = {"trials": "problem", "entries": "trial"}
# Compressed, one row per kernel; apart from the tables above so that those are read without them.
BLOBS = {"kernel": "INTEGER PRIMARY KEY REFERENCES kernels", "cubin": "BLOB", "ptx": "BLOB"}

Row = tuple[Any, ...]
Tables = dict[str, list[Row]]


@dataclass(frozen=True)
class BundleEntry:
    """The winner of one cell: a problem on a GPU, in place or out of place, at a number of elements (rows · n).

    `portable`: whether it is the second of its cell, for GPUs that do not hold the clusters of the first.

    Times are microseconds for one launch, None where not measured. `cache` says which of them decided.
    `errors` is the relative error ‖out − ref‖ / ‖ref‖ against float64, by class of input.
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
    portable: bool = False

    @property
    def gpu(self) -> str:
        return self.environment.gpu

    @property
    def us(self) -> float:
        return self._decisive(self.hot_us, self.cold_us)

    @property
    def copy_us(self) -> float:
        return self._decisive(self.hot_copy_us, self.cold_copy_us)

    @property
    def fraction_of_copy(self) -> float:
        return self.copy_us / self.us

    @property
    def relative_error(self) -> float:
        """The largest of `errors`."""
        return max(self.errors.values())

    def _decisive(self, hot: float | None, cold: float | None) -> float:
        time = hot if self.cache is Cache.HOT else cold
        assert time is not None  # the writer names a regime that was timed
        return time


class Bundle:
    """A bundle that was found sound when it was opened. Attributes: `path`, `arch`, `digest`, `date`, `version`.

    `digest` is the content digest, `date` that of the newest trial, `version` that of the hadagen that wrote it.
    """

    def __init__(self, path: Path, tables: Tables) -> None:
        """`tables`: those of `OPENED`."""
        meta = _meta(tables)
        self.path = path
        self.arch = meta["arch"]
        self.digest = meta["digest"]
        self.date = meta["date"]
        self.version = meta["hadagen"]
        self._environments = {number: Environment(**row) for number, row in _by_id(tables, "environments").items()}
        self._numbers: dict[Problem, int] = {}
        self._sums: dict[int, str] = {}
        for number, row in _by_id(tables, "problems").items():
            self._sums[number] = row.pop("winners")
            self._numbers[Problem.from_dict(row | {"pitched": bool(row["pitched"])})] = number
        self._entries: dict[Problem, list[BundleEntry]] = {}
        self._kernels: dict[str, tuple[int, dict[str, Any]]] = {}  # of the problems that were read, by digest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """Open the bundle at `path`. Raises `StorageError` where it is missing, foreign, newer or damaged."""
        path = Path(path).absolute()
        with _reading(path) as connection:
            tables = {table: read_rows(connection, table) for table in OPENED}
            if _meta(tables)["digest"] != content_digest(tables):
                raise ValueError("the content digest does not match")
            return cls(path, tables)

    def problems(self) -> list[Problem]:
        """The problems that were tuned, in order."""
        return sorted(self._numbers)

    def gpus(self) -> list[str]:
        """The GPUs that the winners were timed on, in order; "" stands for an estimate."""
        return sorted({environment.gpu for environment in self._environments.values()})

    def entries(self, problem: Problem) -> list[BundleEntry]:
        """The winners of a problem, by GPU, destination and elements; none where it was not tuned.

        Raises `StorageError` where they are damaged, or the file is another than the one that was opened.
        """
        number = self._numbers.get(problem)
        if number is None:
            return []
        if problem not in self._entries:
            self._read(problem, number)
        return list(self._entries[problem])

    def kernel(self, digest: str) -> Kernel:
        """Load a kernel, without its source. Raises `StorageError` where the bundle has none of this digest or it is
        damaged."""
        if digest not in self._kernels:
            self._read_problem_of(digest)
        number, row = self._kernels[digest]
        with _reading(self.path) as connection:
            blobs = connection.execute("SELECT cubin, ptx FROM blobs WHERE kernel = ?", (number,)).fetchone()
            cubin, ptx = map(zlib.decompress, blobs)
            if (sha256(cubin), sha256(ptx)) != (row["cubin_sha256"], row["ptx_sha256"]):
                raise ValueError("a blob does not match its SHA-256")
        launch, used = LaunchSpec.from_dict(json.loads(row["launch"])), (row["registers"], row["spill_bytes"])
        return Kernel(digest, row["entry"], self.arch, "", cubin, ptx, launch, *used, row["nvcc"])

    def verify(self) -> None:
        """Check all of the file, as it is now. Raises `StorageError` where any row was changed, or is one too many."""
        now = Bundle.open(self.path)
        entries = [entry for problem in now.problems() for entry in now.entries(problem)]
        for digest in now._kernels:
            now.kernel(digest)
        with _reading(self.path) as connection:
            numbers, kernels = ", ".join(map(str, now._numbers.values())), len(now._kernels)
            known = f"SELECT count(*) FROM trials WHERE problem IN ({numbers})"
            (trials,) = connection.execute(known).fetchone()
            ours = {"entries": len(entries), "trials": trials, "kernels": kernels, "blobs": kernels}
            for table, count in ours.items():
                if connection.execute(f"SELECT count(*) FROM {table}").fetchone() != (count,):
                    raise ValueError(f"{table} has rows that belong to no problem")

    def _read_problem_of(self, digest: str) -> None:
        """Read the winners of a problem that has this kernel."""
        with _reading(self.path) as connection:
            found = connection.execute(
                "SELECT problem FROM trials JOIN kernels ON kernels.id = trials.kernel WHERE digest = ?", (digest,)
            ).fetchone()
        problem = next((problem for problem, number in self._numbers.items() if found == (number,)), None)
        if problem is None:
            raise StorageError(f"{self.path} holds no kernel {digest}; ask for one that its entries name")
        self._read(problem, self._numbers[problem])

    def _read(self, problem: Problem, number: int) -> None:
        """Read and check the winners of a problem."""
        with _reading(self.path) as connection:
            tables = winners_of(connection, number)
            if self._sums[number] != rows_digest(tables):
                raise ValueError(f"the winners of {problem.name} do not match their SHA-256")
            kernels, trials = _by_id(tables, "kernels"), _by_id(tables, "trials")
            for trial in trials.values():
                trial["kernel"] = kernels[trial["kernel"]]
                trial["launch"] = LaunchSpec.from_dict(json.loads(trial["kernel"]["launch"]))
                trial["knobs"], trial["errors"] = json.loads(trial["knobs"]), json.loads(trial["errors"])
            entries: list[BundleEntry] = []
            firsts = set()
            for row in _by_id(tables, "entries").values():
                entry = self._entry(problem, trials[row["trial"]], row)
                cell = entry.gpu, entry.destination, entry.elements
                entries.append(replace(entry, portable=True) if cell in firsts else entry)
                firsts.add(cell)
        self._kernels |= {row["digest"]: (kernel, row) for kernel, row in kernels.items()}
        self._entries[problem] = entries

    def _entry(self, problem: Problem, trial: Mapping[str, Any], row: Mapping[str, Any]) -> BundleEntry:
        kernel = trial["kernel"]
        return BundleEntry(
            problem=problem,
            arch=self.arch,
            environment=self._environments[trial["environment"]],
            destination=Destination(row["destination"]),
            elements=row["elements"],
            kernel=kernel["digest"],
            launch=trial["launch"],
            knobs=trial["knobs"],
            errors=trial["errors"],
            provenance=Provenance(trial["provenance"]),
            date=trial["date"],
            nvcc=kernel["nvcc"],
            cache=Cache(row["cache"]),
            hot_us=row["hot_us"],
            hot_copy_us=row["hot_copy_us"],
            cold_us=row["cold_us"],
            cold_copy_us=row["cold_copy_us"],
        )


def shipped() -> dict[str, Path]:
    """The bundles that come with hadagen, by arch."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "bundles").glob("*.db"))}


def read_rows(connection: sqlite3.Connection, table: str, where: str = "true", *values: int) -> list[Row]:
    """Rows of a table of `TABLES`, in order."""
    query = f"SELECT {', '.join(TABLES[table])} FROM {table} WHERE {where} ORDER BY 1"
    return connection.execute(query, values).fetchall()


def winners_of(connection: sqlite3.Connection, problem: int) -> Tables:
    """The rows of the winners of a problem, which is named by its number."""
    return {table: read_rows(connection, table, where, problem) for table, where in OF_PROBLEM.items()}


def content_digest(tables: Tables) -> str:
    """SHA-256 of the rows of `OPENED` but the one of `meta` that holds it."""
    return rows_digest(tables | {"meta": [row for row in tables["meta"] if row[0] != "digest"]})


def rows_digest(tables: Tables) -> str:
    """SHA-256 of rows."""
    return sha256(json.dumps(tables, separators=(",", ":")).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _meta(tables: Tables) -> dict[str, str]:
    return {row[0]: row[1] for row in tables["meta"]}


def _by_id(tables: Tables, table: str) -> dict[int, dict[str, Any]]:
    """Rows of a table as {column: value} without the id, by id."""
    names = list(TABLES[table])[1:]
    return {number: dict(zip(names, values, strict=True)) for number, *values in tables[table]}


def is_bundle(header: bytes) -> bool:
    """Whether a file that begins so is a bundle of some format.

    https://www.sqlite.org/fileformat.html#the_database_header: user version at 60, application id at 68, big-endian.
    """
    return header.startswith(SQLITE_MAGIC) and int.from_bytes(header[68:72], "big") == APPLICATION_ID


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The file, known to be a bundle of our format. Whatever then fails to be read or understood means damage."""
    make = "with `hadagen bundle make`, or `hadagen tune` where nothing was tuned yet"
    again = f"make it again {make}, or reinstall hadagen if it came with it"
    try:
        with path.open("rb") as file:
            header = file.read(72)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}); name another bundle, or make one {make}"
        ) from error
    if not is_bundle(header):
        raise StorageError(f"{path} is not a hadagen bundle; name one, or make one {make}")
    version = int.from_bytes(header[60:64], "big")
    if version > FORMAT:
        raise StorageError(f"{path} is a bundle of format {version}, later than {FORMAT}; upgrade hadagen to read it")
    if version < FORMAT:
        raise StorageError(f"{path} is a bundle of format {version}, earlier than {FORMAT}; {again}")
    try:
        uri = f"file:{quote(str(path))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            yield connection
    except (sqlite3.Error, zlib.error, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{path} is damaged ({error}); {again}") from error
