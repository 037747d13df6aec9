"""Damages bundles in ten thousand ways, and judges what becomes of each.

    python tests/bundle_damage.py 10000 docs/data/bundle_damage.csv

A case is a kind of damage and a seed. It changes a sound, signed bundle: its bytes, its pages, its rows, or its schema.
In every other case all digests are then made anew, as somebody could who writes the file. Each bundle must be refused
with a `StorageError`, or hold what it held before. With digests made anew it may hold something else, but never where a
signature is asked for. Nothing may take more than `MOST_SECONDS`, or more than `MOST_MEMORY`.
"""

import csv
import functools
import itertools
import json
import resource
import sqlite3
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519
from sample_bundle import remake, write_trials
from sample_trials import H100, H200, PROBLEM, make_kernel, make_timing, make_trial, times

from hadagen.errors import StorageError
from hadagen.files.opening import MOST_BYTES, deflated
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import Transform
from hadagen.problem.regimes import Cache
from hadagen.problem.trial import Trial, kernel_digest
from hadagen.runtime.choose.trust import accepting
from hadagen.tuning_db.bundle import TABLES, Accept, Bundle, accept_all, columns_of, sha256
from hadagen.tuning_db.bundle_writer import sign_bundle
from hadagen.tuning_db.signatures import SigningKey

MOST_SECONDS = 2.0
MOST_MEMORY = 256 << 20  # bytes more than before
IN_A_PROCESS = 500  # cases, so that one that crashes ends no more
COLUMNS = (
    *("kind", "digests", "cases", "refused", "as before", "other"),
    *("signed: refused", "signed: as before", "slowest ms", "memory MB"),
)
OTHER = replace(PROBLEM, transform=Transform(512))
TRIALS = [
    make_trial(1, timings=(make_timing(1.5), make_timing(2.5, cache=Cache.COLD))),
    make_trial(2, timings=times({1 << 13: 3.0, 1 << 28: 170.25})),
    make_trial(4, environment=H200, timings=(make_timing(1.25),)),
    make_trial(9, problem=OTHER),
]


def _many() -> list[Trial]:
    """Enough kernels for shared dictionaries."""
    common = Random(1).randbytes(1500)
    kernels = [make_kernel(common + b"%d" % k, ptx=common[::-1] + b"%d" % k) for k in range(70)]
    return [make_trial(k, kernel=each, environment=replace(H100, gpu=f"GPU {k}")) for k, each in enumerate(kernels)]


class Sound:
    """Sound bundles in a folder: two to damage, and one of another author that is spliced into them."""

    def __init__(self, folder: Path) -> None:
        key, stranger = (SigningKey(ed25519.Ed25519PrivateKey.generate()) for _ in range(2))
        self.accept = accepting([key.public])
        self.paths = [write_trials(folder / "few.db", TRIALS), write_trials(folder / "many.db", _many())]
        changed = [make_trial(1, environment=H200), make_trial(3, problem=OTHER), make_trial(5, date="2026")]
        self.other = write_trials(folder / "other.db", changed)
        for path in self.paths:
            sign_bundle(path, key)
        sign_bundle(self.other, stranger)
        self.damaged = folder / "damaged.db"
        self.contents = {path: content(path) for path in (*self.paths, self.other)}


def content(path: Path, accept: Accept = accept_all) -> list[Any]:
    """All that calls may read of a bundle."""
    bundle = Bundle.open(path, accept)
    entries = list(bundle.all_entries())
    used = [(entry.us, entry.copy_us, entry.fraction_of_copy, entry.relative_error) for entry in entries]
    return [bundle.digest, bundle.arch, bundle.date, entries, used, [bundle.kernel(each.kernel) for each in entries]]


# ---- damage to bytes -------------------------------------------------------------------------------------------------
def flips(r: Random, data: bytearray, other: bytes) -> bytearray:
    used = [place for place, byte in enumerate(data) if byte]
    for _ in range(r.choice((1, 1, 1, 2, 8))):
        data[r.choice((r.choice(used), r.randrange(len(data))))] ^= 1 << r.randrange(8)
    return data


def runs(r: Random, data: bytearray, other: bytes) -> bytearray:
    start, size = r.randrange(len(data)), r.choice((1, 4, 64, 512, 4096))
    size = min(size, len(data) - start)
    data[start : start + size] = r.choice((bytes(size), b"\xff" * size, r.randbytes(size)))
    return data


def truncations(r: Random, data: bytearray, other: bytes) -> bytearray:
    return data[: r.choice((r.randrange(len(data)), r.randrange(len(data) // 4096) * 4096, len(data) - 1))]


def additions(r: Random, data: bytearray, other: bytes) -> bytearray:
    return data + r.choice((r.randbytes(r.randrange(1, 9000)), bytes(4096), other))


def splices(r: Random, data: bytearray, other: bytes) -> bytearray:
    unit = r.choice((1, 512, 4096, 4096))
    size = min(len(data), len(other)) // unit
    start, end = sorted((r.randrange(size + 1), r.randrange(size + 1)))
    data[start * unit : end * unit] = other[start * unit : end * unit]
    return data if r.random() < 0.7 else data[: end * unit] + other[end * unit :]


def pages(r: Random, data: bytearray, other: bytes) -> bytearray:
    one, two = (r.randrange(len(data) // 4096) * 4096 for _ in range(2))
    first, second = bytes(data[one : one + 4096]), bytes(data[two : two + 4096])
    data[one : one + 4096] = second
    if r.random() < 0.5:
        data[two : two + 4096] = first
    return data


# Offset → size, in the header: https://www.sqlite.org/fileformat.html#the_database_header
HEADER = {16: 2, 18: 1, 19: 1, 20: 1, 21: 1, 24: 4, 28: 4, 32: 4, 36: 4, 40: 4, 44: 4, 48: 4, 52: 4, 56: 4, 60: 4}


def headers(r: Random, data: bytearray, other: bytes) -> bytearray:
    """Page sizes, WAL mode, numbers of pages, lists of free pages, encodings, formats."""
    for _ in range(r.choice((1, 1, 2, 3))):
        place = r.choice(list(HEADER))
        value = r.choice((0, 1, 2, 3, 4, 6, 7, 255, 4096, 65535, (1 << 31) - 1, (1 << 32) - 1, r.getrandbits(32)))
        data[place : place + HEADER[place]] = (value % (1 << 8 * HEADER[place])).to_bytes(HEADER[place], "big")
    return data


def trees(r: Random, data: bytearray, other: bytes) -> bytearray:
    """Pages that are their own children or follow themselves, cells that lie elsewhere, and payloads without end."""
    for _ in range(r.choice((1, 1, 4))):
        page = r.randrange(len(data) // 4096)
        start = page * 4096 + (100 if page == 0 else 0)
        match r.randrange(6):
            case 0:  # an inner page with one child, many times
                child = r.choice((page + 1, r.randrange(1, len(data) // 4096 + 2)))
                cells = r.choice((1, 10, 400))
                data[start : start + 12] = (
                    b"\5\0\0" + cells.to_bytes(2, "big") + (2048).to_bytes(2, "big") + b"\0" + child.to_bytes(4, "big")
                )
                data[start + 12 : start + 12 + 2 * cells] = (2048).to_bytes(2, "big") * cells
                data[start + 2048 : start + 2053] = child.to_bytes(4, "big") + b"\1"
            case 1:
                data[start + 3 : start + 5] = r.getrandbits(16).to_bytes(2, "big")  # the number of cells
            case 2:
                place = start + 8 + 2 * r.randrange(20)
                data[place : place + 2] = r.getrandbits(12).to_bytes(2, "big")
            case 3:  # a varint of the size of a cell
                first = int.from_bytes(data[start + 8 : start + 10], "big") % 4087
                data[page * 4096 + first : page * 4096 + first + 9] = r.choice(
                    (b"\xff" * 9, b"\x87\xff\xff\xff\x7f\1\1\1\1")
                )
            case 4:  # the page that an overflow goes on with
                data[start : start + 4] = (page + 1).to_bytes(4, "big")
            case _:  # a list of free pages without an end
                data[32:40] = (page + 1).to_bytes(4, "big") + r.choice((1, 1 << 30)).to_bytes(4, "big")
                if page:
                    data[start : start + 8] = (page + 1).to_bytes(4, "big") + (1022).to_bytes(4, "big")
    return data


# ---- damage by SQL ---------------------------------------------------------------------------------------------------
JOURNAL = bytes.fromhex("d9d505f920a163d7") + (1).to_bytes(4, "big") + bytes(8) + b"\0\0\2\0\0\0\x10\0" + bytes(484)
JUNK: list[Any] = [
    *(None, 0, 1, -1, 1 << 62, 1.5, -0.0, 1e308, "", "x", b"", b"\xff", "{}", "[]", "\x1b[31m", "a\nb", "9" * 400),
    *(
        "[" * 5000,
        '{"a":' * 2000,
        "x" * 20_000,
        "n256-float16-fast",
        "n256-float16-accurate-pitched",
        "sm80",
        "measured",
    ),
    *('{"normal": NaN}', '{"normal": -1}', '{"a": 1}', "in_place", "hot", "0" * 64),
]


def values(r: Random, connection: sqlite3.Connection, sound: Sound) -> None:
    for _ in range(r.choice((1, 1, 2, 5))):
        table = r.choice(list(TABLES))
        column = r.choice(columns_of(table))
        new = r.choice(("?", "?", f"{column} || ?", f"{column} + 1", f"(SELECT {column} FROM {table} LIMIT 1)"))
        where = "rowid = 1 + abs(random() % 4)" if r.random() < 0.7 else "true"
        connection.execute(f"UPDATE {table} SET {column} = {new} WHERE {where}", [r.choice(JUNK)] * new.count("?"))


def rows(r: Random, connection: sqlite3.Connection, sound: Sound) -> None:
    table = r.choice([*TABLES, "blobs", "signatures"])
    columns = ["kernel", "cubin", "ptx"] if table == "blobs" else ["id", "key", "signature"]
    columns = columns_of(table) if table in TABLES else columns
    others = ", ".join(columns[1:])
    many = "WITH RECURSIVE r(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM r WHERE i < ?) INSERT OR IGNORE INTO"
    match r.randrange(4):
        case 0:
            connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (r.randrange(1, 4),))
        case 1:
            connection.execute(
                f"INSERT OR IGNORE INTO {table} SELECT {columns[0]} + 100, {others} FROM {table} LIMIT 2"
            )
        case 2:
            last = r.choice((1010, 3000, 20_000))
            connection.execute(f"{many} {table} SELECT i, {others} FROM r, (SELECT * FROM {table} LIMIT 1)", (last,))
        case _:
            connection.execute(f"UPDATE {table} SET {columns[0]} = {columns[0]} + {r.randrange(1, 3)}")


def spliced_rows(r: Random, connection: sqlite3.Connection, sound: Sound) -> None:
    """Tables of another bundle."""
    connection.execute("ATTACH ? AS other", (str(sound.other),))
    for table in r.sample([*TABLES, "blobs", "signatures"], r.choice((1, 1, 2, 4))):
        if r.random() < 0.6:
            connection.execute(f"DELETE FROM main.{table}")
        connection.execute(f"INSERT OR REPLACE INTO main.{table} SELECT * FROM other.{table}")
    connection.commit()
    connection.execute("DETACH other")


ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT"
HOSTILE = [
    f"DROP TABLE meta; CREATE VIEW meta AS {ENDLESS} i AS key, i AS value FROM r",
    f"DROP TABLE blobs; CREATE VIEW blobs AS {ENDLESS} i AS kernel, x'' AS cubin, x'' AS ptx FROM r",
    f"DROP TABLE signatures; CREATE VIEW signatures AS {ENDLESS} i AS id, i AS key, i AS signature FROM r",
    "DROP TABLE meta; CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT AS (hex(zeroblob(400000000))))",
    "DROP TABLE entries; CREATE TABLE entries (id INTEGER PRIMARY KEY, trial AS (randomblob(1 << 30)))",
    "CREATE TRIGGER x AFTER INSERT ON meta BEGIN DELETE FROM entries; END",
    "CREATE TRIGGER x BEFORE DELETE ON signatures BEGIN INSERT INTO signatures VALUES (9, '', ''); END",
    "CREATE INDEX x ON meta (length(key))",
    "CREATE INDEX x ON entries (hot_us) WHERE abs(hot_us) > 0",
    "CREATE TABLE x (y)",
    "CREATE TABLE x (y CHECK (length(zeroblob(1 << 29)) > 0))",
    "CREATE TABLE x (y DEFAULT (randomblob(1 << 29)))",
    "CREATE VIRTUAL TABLE x USING fts5(y)",
    "CREATE VIRTUAL TABLE x USING rtree(a, b, c)",
    "CREATE VIEW x AS SELECT load_extension('x.so')",
    "CREATE VIEW x AS SELECT * FROM x",
    "CREATE TABLE x (y INTEGER PRIMARY KEY AUTOINCREMENT); INSERT INTO x VALUES (1)",
    "ANALYZE",
    "PRAGMA journal_mode = WAL; UPDATE meta SET value = value",
    "PRAGMA auto_vacuum = 2; VACUUM",
    "PRAGMA page_size = 65536; VACUUM",
    "PRAGMA page_size = 512; VACUUM",
    "VACUUM",
    "ALTER TABLE entries RENAME TO trials2; ALTER TABLE trials2 RENAME TO entries",
    "ALTER TABLE problems ADD COLUMN more",
    "PRAGMA encoding = 'UTF-16le'; VACUUM",
]


def schemas(r: Random, connection: sqlite3.Connection, sound: Sound) -> None:
    """Views, triggers, generated columns, functions in the schema, other modes."""
    connection.commit()
    connection.executescript(r.choice(HOSTILE))


def schema_rows(r: Random, connection: sqlite3.Connection, sound: Sound) -> None:
    """The table of the schema itself: each statement as it should be, over the pages of something else."""
    connection.execute("PRAGMA writable_schema = ON")
    change = r.choice(
        (
            "rootpage = 1 + abs(random() % 30)",
            "rootpage = (SELECT rootpage FROM sqlite_master WHERE name = 'blobs')",
            f"rootpage = {r.choice((0, 1, -1, 1 << 31, 999_999))}",
            "type = 'view'",
            "type = 'trigger'",
            "type = 'index'",
            "name = 'sqlite_sequence'",
            "name = name || 'x'",
            "tbl_name = 'meta'",
            "sql = replace(sql, 'TEXT', 'BLOB')",
            "sql = replace(sql, 'PRIMARY KEY', '')",
            "sql = NULL",
            "sql = 'CREATE TABLE ' || name || '(x)'",
        )
    )
    number = r.randrange(1, 14)
    where = f"rowid = {number}" if r.random() < 0.8 else f"name IN ('entries', 'trials', 'kernels') OR rowid = {number}"
    connection.execute(f"UPDATE sqlite_master SET {change} WHERE {where}")
    if r.random() < 0.3:
        more = ("table", "more", "more", r.randrange(30), None)
        connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", more)


def blobs(r: Random, connection: sqlite3.Connection, sound: Sound) -> None:
    """Code that is whole, but of another kernel or of none; and dictionaries."""
    column = r.choice(("cubin", "ptx"))
    another = f"(SELECT {r.choice(('cubin', 'ptx'))} FROM blobs WHERE kernel = {r.randrange(5)})"
    new, given = r.choice(((another, []), ("?", [deflated(r.randbytes(r.choice((0, 9, 2000))))])))
    connection.execute(f"UPDATE blobs SET {column} = {new} WHERE kernel = ?", [*given, r.randrange(4)])


@functools.cache
def _zeros() -> list[tuple[bytes, bytes]]:
    """Kernels as large as they may be, and what they are compressed."""
    return [(zeros, zlib.compress(zeros)) for zeros in (bytes(MOST_BYTES - k) for k in range(8))]


ZEROS = zlib.compress(bytes(MOST_BYTES), 9)
TOO_MANY_ZEROS = zlib.compress(bytes(4 * MOST_BYTES), 9)


def bombs(r: Random, connection: sqlite3.Connection, sound: Sound) -> None:
    """What takes little room and much time: compressed zeros, and winners that all problems share."""
    match r.randrange(5):
        case 0:
            column = r.choice(("cubin", "ptx"))
            connection.execute(f"UPDATE blobs SET {column} = ?", (r.choice((ZEROS, TOO_MANY_ZEROS)),))
        case 1:
            connection.execute("INSERT OR REPLACE INTO blobs VALUES (0, ?, ?)", (ZEROS, deflated(b"")))
        case 2:  # kernels whose digests are right
            found = connection.execute("SELECT id, launch FROM kernels LIMIT 8").fetchall()
            for (number, launch), (zeros, blob) in zip(found, _zeros(), strict=False):
                digest = kernel_digest(zeros, LaunchSpec.from_dict(json.loads(launch)))
                sums = sha256(zeros), sha256(b"")
                statement = "UPDATE kernels SET digest = ?, cubin_sha256 = ?, ptx_sha256 = ? WHERE id = ?"
                connection.execute(statement, (digest, *sums, number))
                connection.execute(
                    "UPDATE blobs SET cubin = ?, ptx = ? WHERE kernel = ?", (blob, deflated(b""), number)
                )
            connection.execute("DELETE FROM blobs WHERE kernel = 0")
        case 3:  # problems without winners of their own
            keys = (f"n{1 << k}-float16-fast" for k in range(1, 16))
            connection.executemany("INSERT OR IGNORE INTO problems VALUES (?, ?, '', '')", enumerate(keys, 100))
        case _:
            many = "WITH RECURSIVE r(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM r WHERE i < ?)"
            connection.execute(
                f"{many} INSERT INTO trials SELECT i, {', '.join(columns_of('trials')[1:])} FROM r, "
                "(SELECT * FROM trials LIMIT 1)",
                (r.choice((2000, 12_000, 40_000)),),
            )


BYTES: list[Callable[[Random, bytearray, bytes], bytearray]] = [
    *(flips, runs, truncations, additions, splices, pages, headers, trees)
]
SQL: list[Callable[[Random, sqlite3.Connection, Sound], None]] = [
    *(values, rows, spliced_rows, blobs, schemas, schema_rows, bombs)
]
KINDS = [each.__name__ for each in (*BYTES, *SQL)]


@dataclass(frozen=True)
class Case:
    """`remade`: whether all digests are made anew afterwards, as far as SQLite can read the file."""

    kind: str
    remade: bool
    seed: int


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """So many cases, of all kinds in turn."""
    kinds = itertools.product(KINDS, (False, True))
    for number, (kind, remade) in zip(range(count), itertools.cycle(list(kinds)), strict=False):
        yield Case(kind, remade, seed + number)


def damage(case: Case, sound: Sound) -> Path:
    """Damages a copy of a sound bundle. Returns which one."""
    r = Random(f"{case.kind} {case.remade} {case.seed}")
    source = r.choice((sound.paths[0], sound.paths[0], sound.paths[1]))
    for name in ("", "-wal", "-shm", "-journal"):
        sound.damaged.with_name(sound.damaged.name + name).unlink(missing_ok=True)
    content = source.read_bytes()
    for change in BYTES:
        if change.__name__ == case.kind:
            content = bytes(change(r, bytearray(content), sound.other.read_bytes()))
    sound.damaged.write_bytes(content)
    if r.random() < 0.1:  # files that SQLite looks for beside it
        beside = sound.damaged.with_name(sound.damaged.name + r.choice(("-wal", "-journal")))
        beside.write_bytes(r.choice((r.randbytes(5000), content[:5000], JOURNAL + content[:5000])))
    for alter in SQL:
        if alter.__name__ == case.kind:
            with suppress(sqlite3.Error), closing(_connect(sound.damaged)) as connection, connection:
                alter(r, connection, sound)
    if case.remade:
        with suppress(sqlite3.Error, ValueError, TypeError, MemoryError):
            remake(sound.damaged, _connect)
    return source


def _connect(path: Path) -> sqlite3.Connection:
    """A connection whose statements end, in an error if need be."""
    connection = sqlite3.connect(path)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 26) if sys.version_info >= (3, 11) else None
    steps = iter(range(3000))
    connection.set_progress_handler(lambda: next(steps, None) is None, 1000)
    return connection


@dataclass(frozen=True)
class Judged:
    """What became of a case: "refused", "as before", "other", or what is wrong. `signed`: where a signature is asked
    for. `seconds`: of the slowest of what was read."""

    outcome: str
    signed: str
    seconds: float

    def wrong(self, case: Case) -> str:
        """Why the case is a failure; "" if it is none."""
        good = {"refused", "as before", *(["other"] if case.remade else [])}
        if self.outcome not in good:
            return self.outcome
        return "" if self.signed in ("refused", "as before") else f"signed: {self.signed}"


def judge(case: Case, sound: Sound) -> Judged:
    """Damages a bundle, and reads it in all ways."""
    source = damage(case, sound)
    slowest = 0.0

    def outcome(read: Callable[[], Any], known: list[Any]) -> str:
        nonlocal slowest
        start = time.perf_counter()
        try:
            found = read()
            return "as before" if found in known or found is None else "other"
        except StorageError as error:
            said = str(error)
            return "refused" if str(sound.damaged) in said and "\n" not in said else f"it says {said!r:.200}"
        except Exception as error:
            return f"{type(error).__name__}: {error!r:.200}"
        finally:
            slowest = max(slowest, time.perf_counter() - start)

    known = [sound.contents[source], sound.contents[sound.other]]
    verified = outcome(lambda: Bundle.open(sound.damaged).verify(), [])
    read = outcome(lambda: content(sound.damaged), known)
    signed = outcome(lambda: content(sound.damaged, sound.accept), known[:1])
    # What is no part of any problem matters to `verify` alone.
    if verified not in ("refused", "as before") or (verified == "as before" and read == "refused"):
        return Judged(f"verify: {verified}, but read: {read}", signed, slowest)
    return Judged(read, signed, slowest)


def memory() -> int:
    """The most bytes that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1 << 10)


def run(batch: list[Case]) -> list[tuple[Case, Judged, int]]:
    """Judges cases in a process of its own. Returns each with the memory that it took beyond what was taken before."""
    with tempfile.TemporaryDirectory() as folder:
        sound = Sound(Path(folder))
        _zeros()
        before, found = memory(), []
        for case in batch:
            found.append((case, judge(case, sound), memory() - before))
            before = max(before, memory())
        return found


def main(count: int, path: Path) -> int:
    """Judges so many cases, and writes a table of them. Returns the number of failures."""
    counts: dict[tuple[str, bool], Counter[str]] = {
        (kind, remade): Counter() for kind in KINDS for remade in (False, True)
    }
    failures: list[str] = []
    everything = list(cases(count))
    for at in range(0, count, IN_A_PROCESS):
        batch = everything[at : at + IN_A_PROCESS]
        print(f"\r{at} of {count}", end="", file=sys.stderr)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                found = pool.submit(run, batch).result()
            except BrokenProcessPool:
                failures.append(f"the process that read {batch[0]} and the next {len(batch) - 1} cases died")
                continue
        for case, judged, taken in found:
            of_kind = counts[case.kind, case.remade]
            of_kind.update(["cases", judged.outcome, f"signed: {judged.signed}"])
            of_kind["slowest ms"] = max(of_kind["slowest ms"], round(judged.seconds * 1e3))
            of_kind["memory MB"] = max(of_kind["memory MB"], taken >> 20)
            wrong = judged.wrong(case)
            if judged.seconds > MOST_SECONDS or taken > MOST_MEMORY:
                wrong = wrong or f"it took {judged.seconds:.2f} s and {taken >> 20} MB"
            if wrong:
                failures.append(f"{case}: {wrong}")
    print(file=sys.stderr)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for (kind, remade), of_kind in counts.items():
            said = "made anew" if remade else "as they were"
            table.writerow([kind.replace("_", " "), said, *(of_kind[name] for name in COLUMNS[2:])])
    print(*failures, sep="\n")
    return len(failures)


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), Path(sys.argv[2]))))
