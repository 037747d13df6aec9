"""Writes a bundle: one file with the winners of many problems on one arch, which `hadagen.tuning_db.bundle` reads."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from hadagen.compiler.ptx_version import lowered
from hadagen.errors import StorageError, UsageError
from hadagen.files.atomic_file import atomic_file, check_place
from hadagen.files.opening import connect_alone, deflated
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache
from hadagen.problem.target import check_arch
from hadagen.problem.trial import Kernel, Trial, knobs_key, recipe_digest
from hadagen.tuning_db.bundle import (
    APPLICATION_ID,
    FORMAT,
    MOST_SIGNATURES,
    NO_BLOBS,
    OPENED,
    SCHEMA,
    SHARED,
    SIGNATURES,
    SIGNED,
    Bundle,
    BundleEntry,
    Row,
    Tables,
    columns_of,
    content_digest,
    is_bundle,
    read_rows,
    rows_digest,
    sha256,
    winners_of,
)
from hadagen.tuning_db.signatures import Signature, SigningKey
from hadagen.tuning_db.winners import WinnerCell, cell_value, digest_of

# Kernels in a dictionary: the number of 4, 8, 16 and 32 that makes the shipped bundle the smallest. The bytes that zlib
# looks back. The number of kernels from which on a dictionary saves more than it takes.
_IN_DICTIONARY, _LOOKS_BACK, _MANY = 8, 1 << 15, 64

OLDEST_TO_SIGN = 6  # the format; the digest of earlier ones is of other columns


def check_bundle_place(path: str | os.PathLike[str]) -> None:
    """Raises `StorageError` if no bundle can be written at `path`, or if another kind of file is there."""
    check_place(path, "a hadagen bundle", is_bundle)


def write_bundle(
    path: str | os.PathLike[str],
    arch: str,
    selection: Mapping[WinnerCell, Trial],
    kernel_of: Callable[[str], Kernel],
    arithmetic: Mapping[Problem, str],
) -> str:
    """Write the winners `selection` (see `winners.portfolio`) as a bundle and return its content digest.

    `kernel_of`: returns the kernel of a digest with its cubin and PTX (`Store.kernel`), or without both if it is to be
    compiled where it is called; called once for each digest.
    `arithmetic`: problem → arithmetic of the winners that batch-invariant calls run (`winners.invariant_arithmetic`).
    The same selection gives the same digest. An old bundle is replaced only when the new one is complete and was read.

    Raises `UsageError` for a bad arch or a selection of another arch. Raises `StorageError` if the selection is empty
    or has values out of their range, if the file cannot be written, or if another kind of file is there.
    """
    check_arch(arch)
    if not selection:
        raise StorageError(
            f"there is no winner for {arch} to write; give hadagen tune --arch {arch} more time or more trials"
        )
    others = sorted({cell.arch for cell in selection} - {arch})
    if others:
        raise UsageError(f"the winners are for {others[0]} and the bundle for {arch}; write a bundle for each arch")
    check_bundle_place(path)
    kernels = [_for_drivers(kernel_of(digest)) for digest in sorted({digest_of(t) for t in selection.values()})]
    recipes = {recipe_digest(t.problem, t.knobs, t.kernel.launch) for t in selection.values() if t.kernel}
    if not all(kernel.cubin or kernel.digest in recipes for kernel in kernels):
        raise UsageError("a kernel of the bundle has no cubin; give kernels that were read with their blobs")

    with atomic_file(path) as new:
        new.chmod(new.stat().st_mode & ~0o022)  # a bundle that others could change is not found
        with closing(connect_alone(new)) as connection:
            digest = _fill(connection, _tables(arch, selection, kernels, arithmetic), kernels)
        try:
            Bundle.open(new).verify()
        except StorageError as error:
            raise StorageError(
                f"{path} was not written, because calls would refuse it ({error.__cause__}); tune its problem again"
            ) from error
    return digest


def sign_bundle(path: str | os.PathLike[str], key: SigningKey) -> Signature:
    """Add a signature to a bundle, in place of one that the key made before, and return it. The content stays.

    A bundle of format 6 becomes one of format 7. The file is replaced only when the new one is complete.

    Raises `StorageError` if it is missing, foreign or damaged, of an earlier format, or cannot be written.
    """
    Bundle.open(path)  # raises the right error where it is none
    with atomic_file(path) as new:
        shutil.copyfile(path, new)
        before = Bundle.open(new)
        before.verify()
        if before.statement.format < OLDEST_TO_SIGN:
            raise StorageError(
                f"{path} is a bundle of format {before.statement.format}, and formats before {OLDEST_TO_SIGN} have no "
                "signatures; write it anew with `hadagen bundle merge`"
            )
        signed = max(before.statement.format, SIGNED)  # whose keys mean the same
        signature = key.sign(replace(before.statement, format=signed))
        others = [each for each in before.signatures if each.key != signature.key]
        if len(others) >= MOST_SIGNATURES:
            raise StorageError(f"{path} has {len(others)} signatures, which is the most; write it anew and sign that")
        with closing(connect_alone(new)) as connection:
            connection.execute("BEGIN")
            if before.statement.format < signed:
                connection.execute(SIGNATURES)
                connection.execute(f"PRAGMA user_version = {signed}")
            connection.execute("DELETE FROM signatures")
            rows = [(each.key, each.signature) for each in (*others, signature)]
            connection.executemany("INSERT INTO signatures (key, signature) VALUES (?, ?)", rows)
            connection.execute("COMMIT")
        after = Bundle.open(new)
        if after.digest != before.digest or not after.signatures[-1].is_of(after.statement):
            raise StorageError(f"{path} was changed while it was signed; sign it again")
    return signature


def _for_drivers(kernel: Kernel) -> Kernel:
    """The kernel with PTX that older drivers compile too."""
    return replace(kernel, ptx=lowered(kernel.ptx.decode("latin-1")).encode("latin-1"))


def _fill(connection: sqlite3.Connection, tables: Tables, kernels: Sequence[Kernel]) -> str:
    """Write all rows in one transaction. Returns the content digest."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute("BEGIN")
    compiled = {number: kernel for number, kernel in enumerate(kernels, 1) if kernel.cubin}
    cubins = _dictionary([each.cubin for each in compiled.values()])
    ptx = _dictionary([each.ptx for each in compiled.values()])
    with ThreadPoolExecutor() as pool:
        deflating = pool.map(lambda each: (deflated(each.cubin, cubins), deflated(each.ptx, ptx)), compiled.values())
        blobs = [(number, *both) for number, both in zip(compiled, deflating, strict=True)]
    if cubins:
        blobs.append((SHARED, deflated(cubins), deflated(ptx)))
    for statement in SCHEMA:
        connection.execute(statement)
    for table, rows in {**tables, "blobs": blobs}.items():
        for row in rows:
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    for number, *_ in tables["problems"]:
        connection.execute(
            "UPDATE problems SET winners = ? WHERE id = ?", (rows_digest(winners_of(connection, number)), number)
        )
    digest = content_digest({table: read_rows(connection, table) for table in OPENED})
    connection.execute("INSERT INTO meta VALUES ('digest', ?)", (digest,))
    connection.execute("COMMIT")
    return digest


def _dictionary(texts: Sequence[bytes]) -> bytes:
    """A dictionary for zlib: the beginnings of some texts. Empty for few texts, which it would not make smaller."""
    some = texts[:: len(texts) // _IN_DICTIONARY] if len(texts) >= _MANY else ()
    return b"".join(text[: _LOOKS_BACK // _IN_DICTIONARY] for text in some[:_IN_DICTIONARY])


def _tables(
    arch: str, selection: Mapping[WinnerCell, Trial], kernels: Iterable[Kernel], arithmetic: Mapping[Problem, str]
) -> Tables:
    """The rows of `bundle.TABLES`: each distinct one once, numbered in sorted order, so that files are reproducible."""
    trials = selection.values()
    problems = _numbered((trial.problem.key, arithmetic.get(trial.problem, "")) for trial in trials)
    environments = _numbered(map(_environment_row, trials))
    kernel_rows = _numbered(_kernel_row(kernel) for kernel in kernels)
    kernel_numbers = {row[0]: number for row, number in kernel_rows.items()}

    def trial_row(trial: Trial) -> Row:
        return (
            problems[trial.problem.key, arithmetic.get(trial.problem, "")],
            environments[_environment_row(trial)],
            kernel_numbers[digest_of(trial)],
            knobs_key(trial.knobs),
            _json(trial.errors),
            trial.provenance.value,
            trial.date,
        )

    trial_rows = _numbered(trial_row(trial) for trial in trials)
    entries = [
        (trial_rows[trial_row(selection[cell])], *_entry_row(entry_of(cell, selection[cell])))
        for cell in sorted(selection)
    ]
    return {
        "meta": [("arch", arch), ("date", max(trial.date for trial in trials)), ("hadagen", version("hadagen"))],
        "problems": [(*row, "") for row in _with_numbers(problems)],
        "environments": _with_numbers(environments),
        "kernels": _with_numbers(kernel_rows),
        "trials": _with_numbers(trial_rows),
        "entries": [(number, *row) for number, row in enumerate(entries, 1)],
    }


def _numbered(rows: Iterable[Row]) -> dict[Row, int]:
    return {row: number for number, row in enumerate(sorted(set(rows)), 1)}


def _with_numbers(numbers: Mapping[Row, int]) -> list[Row]:
    return [(number, *row) for row, number in numbers.items()]


def _environment_row(trial: Trial) -> Row:
    return tuple(getattr(trial.environment, name) for name in columns_of("environments")[1:])


def _kernel_row(kernel: Kernel) -> Row:
    return (
        kernel.digest,
        kernel.entry,
        _json(kernel.launch.to_dict()),
        kernel.registers,
        kernel.spill_bytes,
        kernel.nvcc,
        *((sha256(kernel.cubin), sha256(kernel.ptx)) if kernel.cubin else NO_BLOBS),
    )


def entry_of(cell: WinnerCell, trial: Trial) -> BundleEntry:
    """The winner of a cell as a bundle has it."""
    times = {t.cache: t for t in trial.timings if (t.destination, t.elements) == (cell.destination, cell.elements)}
    decided = cell_value(trial, cell.destination, cell.elements, trial.environment.l2_bytes)
    assert decided is not None  # no timing, no winner
    assert trial.kernel is not None  # no kernel, no winner
    hot, cold = times.get(Cache.HOT), times.get(Cache.COLD)
    return BundleEntry(
        problem=cell.problem,
        arch=cell.arch,
        environment=trial.environment,
        destination=cell.destination,
        elements=cell.elements,
        kernel=trial.kernel.digest,
        launch=trial.kernel.launch,
        knobs=trial.knobs,
        errors=trial.errors,
        provenance=trial.provenance,
        date=trial.date,
        nvcc=trial.kernel.nvcc,
        cache=decided.cache,
        hot_us=hot.us if hot else None,
        hot_copy_us=hot.copy_us if hot else None,
        cold_us=cold.us if cold else None,
        cold_copy_us=cold.copy_us if cold else None,
        portable=cell.portable,
    )


def _entry_row(entry: BundleEntry) -> Row:
    times = entry.hot_us, entry.hot_copy_us, entry.cold_us, entry.cold_copy_us
    return entry.destination.value, entry.elements, entry.cache.value, *times


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))
