"""`hadagen bundle list`: the bundles and databases, and their contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from hadagen.cli import options
from hadagen.cli.output import print_json, print_table, report_failures, say
from hadagen.errors import StorageError, install
from hadagen.problem.trial import Trial
from hadagen.runtime import bundles
from hadagen.tuning_db.bundle import Bundle, BundleEntry

if TYPE_CHECKING:
    from hadagen.tuning_db.store import Store


@click.command("list")
@options.db
@options.as_json
def list_(db: str | None, as_json: bool) -> None:
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
        count = "1 bundle" if len(untrusted) == 1 else f"{len(untrusted)} bundles"
        others = " besides those that follow" if found else ""
        say(f"{count}{others}, none signed by your keys; sign them with hadagen bundle sign, or name their keys too")
    elif not found:
        click.echo("no bundle; make one with: hadagen tune")
    if found:
        print_table(
            ("bundle", "arch", "GPUs", "problems", "winners", "kernels", "date", "signed by"),
            (
                (
                    *(b["path"], b["arch"], gpu_names(b["gpus"]), b["problems"], b["winners"], b["kernels"], b["date"]),
                    signers_text(b["signed"]).removeprefix("signed by "),
                )
                for b in found
            ),
        )
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
