"""`hadagen bundle list`: the bundles and databases, and their contents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hadagen.cli import options
from hadagen.cli.output import (
    PROBLEM_HEADERS,
    print_fields,
    print_json,
    print_table,
    problem_cells,
    range_text,
    report_failures,
    say,
    short_knobs,
)
from hadagen.errors import StorageError, install
from hadagen.problem.trial import Trial
from hadagen.runtime.choose import bundles
from hadagen.tuning_db.bundle import Bundle, BundleEntry

if TYPE_CHECKING:
    from hadagen.tuning_db.store import Store


@click.command("list")
@options.db
@click.option("--all", "every", is_flag=True, help="Show digests and times of day too.")
@options.as_json
def list_(db: str | None, every: bool, as_json: bool) -> None:
    """List the bundles that calls use, and the tuning database.

    If several bundles match a GPU equally well, calls use the first.
    """
    found, damaged = [], []
    for bundle in bundles.known():
        try:
            found.append(bundle_summary(bundle))
        except StorageError as error:
            damaged.append(str(error))
    databases = []
    if db is not None or _has_default_db():
        with options.open_db(db) as store:
            databases.append(_database_summary(store))
    untrusted = bundles.untrusted()
    if as_json:
        print_json({"bundles": found, "untrusted": [str(path) for path in untrusted], "databases": databases})
        report_failures(damaged, StorageError)
        return
    if untrusted:
        count = counted_bundles(len(untrusted))
        others = " besides those that follow" if found else ""
        say(f"{count}{others}, none signed by your keys;")
        say("sign them with hadagen bundle sign, or name their keys too")
    elif not found:
        click.echo("no bundle; make one with: hadagen tune")
    if found:
        print_bundles(found, every)
    for each in databases:
        click.echo()
        say(f"database {each['path']}" + (", read-only" if each["read_only"] else ""))
        if not each["runs"]:
            click.echo("no trials yet")
            continue
        print_table(
            ("arch", "GPU", "problems", "trials", "outcomes"),
            (
                (run["arch"], gpu_names([run["gpu"]]), run["problems"], run["trials"], _outcomes(run["outcomes"]))
                for run in each["runs"]
            ),
        )
    report_failures(damaged, StorageError)


def _has_default_db() -> bool:
    with suppress(StorageError):  # no home directory is known
        return options.default_db().exists()
    return False


def counted_bundles(count: int) -> str:
    return "1 bundle" if count == 1 else f"{count} bundles"


def print_bundles(summaries: Sequence[Mapping[str, Any]], every: bool) -> None:
    """A table of each folder of bundles, of what `bundle_summary` returns. `every`: with digests and times of day."""
    for folder, found in groupby(summaries, key=lambda summary: os.path.dirname(summary["path"])):
        if folder:
            say(f"{folder}:")
        print_table(
            ("bundle", "arch", "GPUs", "problems", "winners", "kernels", "date", "signed by", *["digest"] * every),
            (
                (
                    os.path.basename(b["path"]),
                    b["arch"],
                    gpu_names(gpu.removeprefix("NVIDIA ") for gpu in b["gpus"]),
                    b["problems"],
                    b["winners"],
                    b["kernels"],
                    b["date"] if every else _day(b["date"]),
                    signers_text(b["signed"]).removeprefix("signed by "),
                    *[b["digest"]] * every,
                )
                for b in found
            ),
        )


def print_summary(summary: Mapping[str, Any], every: bool) -> None:
    """The lines of one bundle, of what `bundle_summary` returns. `every`: with the digest and the time of day."""
    fields = [
        ("bundle", summary["path"]),
        ("arch", summary["arch"]),
        ("GPUs", gpu_names(summary["gpus"])),
        ("problems", summary["problems"]),
        ("winners", summary["winners"]),
        ("kernels", summary["kernels"]),
        ("date", summary["date"] if every else _day(summary["date"])),
        ("signed by", signers_text(summary["signed"]).removeprefix("signed by ")),
    ]
    print_fields(fields + [("digest", summary["digest"])] * every)


def _day(date: str) -> str:
    return date.partition("T")[0]


def print_winners(entries: Iterable[BundleEntry], every: bool) -> None:
    """Tables that sum up the winners of each GPU. `every`: by rows and format too, and then a line for each winner."""
    for gpu, found in sorted(_grouped(entries, _gpu).items()):
        if not every:
            click.echo()
            say(gpu)
            _print_groups((*PROBLEM_HEADERS[1:-1], "kind"), _grouped(found, _kind))
            continue
        for series, some in sorted(_grouped(found, _series).items()):
            click.echo()
            say(f"{gpu}, {' '.join(series)}")
            _print_groups(PROBLEM_HEADERS[-1:], _grouped(some, _rows))
        for key, some in _grouped(found, _problem).items():
            click.echo()
            say(f"{gpu}, {key}")
            _print_each(some)


Key = TypeVar("Key")


def _grouped(entries: Iterable[BundleEntry], key: Callable[[BundleEntry], Key]) -> dict[Key, list[BundleEntry]]:
    groups: dict[Key, list[BundleEntry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def _gpu(entry: BundleEntry) -> str:
    return entry.gpu or "estimated"


def _series(entry: BundleEntry) -> tuple[str, str]:
    """The dtype and the numerics."""
    return entry.problem.io.input.value, entry.problem.io.numerics.value


def _kind(entry: BundleEntry) -> tuple[str, str, str]:
    """The series, and what else the kernel does in one word."""
    problem = entry.problem
    kind = "matrix" if problem.transform.has_matrix else problem.io.rows.value
    return *_series(entry), "quantized" if problem.io.form else kind


def _rows(entry: BundleEntry) -> tuple[str]:
    """All of a problem but n and the series."""
    return (problem_cells(entry.problem)[-1],)


def _problem(entry: BundleEntry) -> str:
    return entry.problem.key


def _print_groups(headers: Sequence[str], groups: Mapping[tuple[str, ...], Sequence[BundleEntry]]) -> None:
    print_table(
        (*headers, "n", "winners", "kernels", "of copy, mean", "largest error"),
        (
            (
                *key,
                range_text([entry.problem.n for entry in group]),
                len(group),
                len({entry.kernel for entry in group}),
                geometric_mean(entry.fraction_of_copy for entry in group),
                max((error for entry in group if (error := entry.relative_error) is not None), default=None),
            )
            for key, group in sorted(groups.items())
        ),
    )


def _print_each(entries: Iterable[BundleEntry]) -> None:
    """A line for each winner of a problem, and then the knobs of each kernel."""
    knobs: dict[tuple[str, str], None] = {}
    rows = []
    for entry in entries:
        kernel = entry.kernel[:12]
        knobs[kernel, short_knobs(entry.knobs)] = None
        numbers = entry.elements, entry.us, entry.fraction_of_copy, entry.relative_error
        rows.append((entry.destination.value, *numbers, kernel))
    print_table(("destination", "elements", "us", "of copy", "error", "kernel"), rows)
    print_fields((f"  {kernel}", text) for kernel, text in knobs)


def bundle_summary(bundle: Bundle) -> dict[str, Any]:
    """The contents of a bundle, as plain values; the GPU "" stands for an estimate."""
    entries = list(bundle.all_entries())
    return {
        "path": str(bundle.path),
        "arch": bundle.arch,
        "gpus": bundle.gpus(),
        "problems": len(bundle.problems()),
        "winners": len(entries),
        "kernels": len({entry.kernel for entry in entries}),
        "date": bundle.date,
        "version": bundle.version,
        "digest": bundle.digest,
        "signed": signers(bundle),
    }


def signers(bundle: Bundle, must_check: bool = False) -> dict[str, bool | None]:
    """The fingerprints of the keys that a bundle says signed it, and whether they did; None without cryptography. With
    `must_check`, raises `StorageError` then."""
    found: dict[str, bool | None] = {}
    for each in bundle.signatures:
        try:
            found[each.signer.fingerprint] = each.is_of(bundle.statement)
        except StorageError:
            if must_check:
                raise
            found[each.signer.fingerprint] = None
    return found


def signers_text(signed: Mapping[str, bool | None]) -> str:
    """The result of `signers` as text."""
    notes = {True: "", False: " (wrong)", None: f" (not checked, {install('sign')})"}
    return f"signed by {', '.join(key + notes[right] for key, right in signed.items())}" if signed else "not signed"


def winner_values(entry: BundleEntry) -> dict[str, Any]:
    """A winner as plain values, in the words of `hadagen best`."""
    return {
        "problem": entry.problem.key,
        "destination": entry.destination.value,
        "elements": entry.elements,
        "portable": entry.portable,
        "cache": entry.cache.value,
        "gpu": entry.gpu,
        "kernel": entry.kernel,
        "knobs": dict(entry.knobs),
        "us": entry.us,
        "copy_us": entry.copy_us,
        "fraction_of_copy": entry.fraction_of_copy,
        "relative_error": entry.relative_error,
        "provenance": entry.provenance.value,
        "date": entry.date,
    }


def _database_summary(store: Store) -> dict[str, Any]:
    """The contents of a database, as plain values: its trials by arch and GPU."""
    trials: dict[tuple[str, str], list[Trial]] = {}
    for trial in store.trials(blobs=False):
        trials.setdefault((trial.arch, trial.environment.gpu), []).append(trial)
    runs = [
        {
            "arch": arch,
            "gpu": gpu,
            "problems": len({trial.problem for trial in group}),
            "trials": len(group),
            "outcomes": dict(Counter(trial.outcome.value for trial in group).most_common()),
        }
        for (arch, gpu), group in sorted(trials.items())
    ]
    return {"path": store.place, "read_only": store.read_only, "runs": runs}


def gpu_names(gpus: Iterable[str]) -> str:
    return ", ".join(gpu or "estimated" for gpu in gpus)


def _outcomes(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
