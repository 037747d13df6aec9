"""`hadagen bundle`: list, make, estimate, check, sign, show, merge, assemble and export bundles."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from hadagen.cli import options
from hadagen.cli.groups import Group
from hadagen.cli.listing import (
    bundle_summary,
    counted_bundles,
    list_,
    print_bundles,
    print_summary,
    print_winners,
    signers,
    winner_values,
)
from hadagen.cli.output import Item, print_json, program, report_failures, say
from hadagen.compiler.compilers import Ptxas
from hadagen.compiler.recipes import is_recipe_of
from hadagen.errors import StorageError, UsageError, shortened
from hadagen.problem.regimes import LOSS
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.bundles import why_unused
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.bundle_writer import check_bundle_place, sign_bundle
from hadagen.tuning_db.merge import (
    Selection,
    arithmetic_of,
    kernels_of,
    merge_bundles,
    selection_of,
    write_selection,
)
from hadagen.tuning_db.signatures import SigningKey, public_keys
from hadagen.tuning_db.table import ASSEMBLED, export_csv, print_csv, write_table
from hadagen.tuning_db.winners import digest_of


@click.group(cls=Group, commands=[list_])
def bundle() -> None:
    """Make, check, sign and merge bundles, the files that ship winners."""


@bundle.command()
@options.db
@options.arch
@click.option(
    "--loss",
    type=float,
    callback=options.within(0, 1),
    default=LOSS,
    show_default=True,
    help="Fraction of the speed that may be lost, at any size, to keep fewer kernels.",
)
@click.argument("path", type=click.Path(path_type=Path), required=False)
def make(db: str | None, arch: str, loss: float, path: Path | None) -> None:
    """Write the winners of a tuning database to a bundle.

    The bundle goes to PATH, or to the directory where hadagen looks for bundles.
    """
    from hadagen.tuning_db.make import make_bundle

    path = bundle_place(path, arch, db)
    with options.open_db(db) as store:
        rest = ["--db", store.place] * (db is not None)
        tune = f"{program()} {shlex.join(['tune', '--arch', arch, *rest])}"
        selection = make_bundle(store, arch, path, loss, tune)
    _say_written(path, selection)


@bundle.command()
@options.arch
@click.argument("source", type=options.BundlePath())
@click.argument("out", type=click.Path(path_type=Path))
def estimate(arch: str, source: Path, out: Path) -> None:
    """Estimate winners for an arch without a measured GPU.

    The cost model chooses them among the winners of another arch, in the bundle at SOURCE. The written bundle has no
    code: each kernel is compiled at its first call. hadagen tune replaces these winners with measured winners.
    """
    from hadagen.plan.arch import load_arch
    from hadagen.tuner.transfer import estimate_bundle

    selection = estimate_bundle(Bundle.open(source), load_arch(arch), out)
    _say_written(out, selection)


@bundle.command()
@click.argument("paths", type=options.BundlePath(), nargs=-1)
@click.option(
    "--key",
    metavar="PUBLIC",
    help="The public key that must have signed the bundles: a PEM file, or its base64.",
)
@click.option("--all", "every", is_flag=True, help="Print the digest of every bundle too.")
@options.as_json
def verify(paths: tuple[Path, ...], key: str | None, every: bool, as_json: bool) -> None:
    """Check the contents of bundles.

    Checks the bundles at PATHS, or all bundles that hadagen finds; an arch such as sm90 names the bundle that hadagen
    ships for it. The output says who signed each bundle, and the digests of bundles that are named. With --key, a
    bundle that this key did not sign is a failure. If the file has several keys, any one of these keys suffices.
    """
    wanted = {each.fingerprint for each in public_keys(key)} if key else set()
    sound: list[dict[str, Any]] = []
    damaged: list[str] = []
    for path in _some(paths or bundles.files()):
        try:
            each = Bundle.open(path)
            each.verify()
            by = signers(each, must_check=bool(wanted))
        except StorageError as error:
            damaged.append(str(error))
            continue
        if wrong := [fingerprint for fingerprint, is_right in by.items() if is_right is False]:
            damaged.append(f"the signature of {path} by {wrong[0]} does not match its contents; sign it again")
        elif wanted and not wanted & by.keys():
            damaged.append(f"{path} is not signed by {' or '.join(sorted(wanted))}; get one that is")
        else:
            sound.append(bundle_summary(each) | {"path": str(path), "signed": by})
    if as_json:
        digests, signed = ({b["path"]: b[name] for b in sound} for name in ("digest", "signed"))
        by_path = {path: list(fingerprints) for path, fingerprints in signed.items()}
        print_json({"sound": digests, "signed": by_path, "damaged": damaged})
    elif sound:
        of = f"{len(sound)} of {len(sound) + len(damaged)} bundles" if damaged else counted_bundles(len(sound))
        say(f"{of} {'is' if len(sound) == 1 else 'are'} sound")
        print_bundles(sound, every or bool(paths))
    report_failures(damaged, StorageError)


@bundle.command()
@click.argument("paths", type=options.BundlePath(), nargs=-1, required=True)
@click.option("--key", metavar="FILE", required=True, type=click.Path(path_type=Path), help="The private key, in PEM.")
def sign(paths: tuple[Path, ...], key: Path) -> None:
    """Sign the bundles at PATHS with an Ed25519 key.

    \b
    This makes a key, and prints its public half:
      openssl genpkey -algorithm ed25519 -out key.pem
      openssl pkey -in key.pem -pubout

    The signature goes into the bundle, beside signatures of other keys. It covers all contents, so a bundle that is
    written anew has no signature. If HADAGEN_TRUSTED_KEYS names the public key, calls use only signed bundles.
    """
    signing = SigningKey.read(key, partial(_passphrase, key))
    for path in paths:
        sign_bundle(path, signing)
        say(f"{path}: signed by {signing.public.fingerprint}")
    say(f"public key: {signing.public.text}")


def _passphrase(key: Path) -> str:
    if not sys.stdin.isatty():
        raise UsageError(f"{key} is protected by a passphrase, and there is no terminal to ask for it; sign in one")
    return str(click.prompt(f"passphrase of {key}", hide_input=True, err=True, default="", show_default=False))


@bundle.command()
@click.argument("paths", type=options.BundlePath(), nargs=-1)
@click.option("--all", "every", is_flag=True, help="Show every winner too.")
@options.as_json
def show(paths: tuple[Path, ...], every: bool, as_json: bool) -> None:
    """Show what bundles hold.

    Shows the bundles at PATHS, or all bundles that hadagen uses; an arch such as sm90 names the bundle that hadagen
    ships for it. With --all or --json, every winner is shown.
    """
    shown = _some([Bundle.open(path) for path in paths] if paths else bundles.known())
    if as_json:
        print_json([bundle_summary(each) | {"entries": [*map(winner_values, each.all_entries())]} for each in shown])
        return
    for number, each in enumerate(shown):
        if number:
            click.echo()
        print_summary(bundle_summary(each), every)
        print_winners(each.all_entries(), every)


@bundle.command()
@click.argument("paths", type=options.BundlePath(), nargs=-1, required=True)
@click.argument("out", type=click.Path(path_type=Path))
def merge(paths: tuple[Path, ...], out: Path) -> None:
    """Write the winners of several bundles to one.

    The bundles at PATHS, of several GPUs or searches for one arch, become the bundle OUT. If two bundles have a winner
    for the same cell, the better winner is taken. OUT is a new file, or one of PATHS.
    """
    _keep_others(out, paths, f"{out} twice to add to it")
    selection = merge_bundles(paths, out)
    _say_written(out, selection)


@bundle.command()
@click.option("--ptxas", metavar="PATH", help="The assembler.  [default: on PATH, in $CUDA_HOME or the packages]")
@click.option("--drop-ptx", is_flag=True, help="Leave out the PTX of kernels that can be generated anew.")
@options.csv_of("Write to FILE which kernel became which.")
@click.argument("path", type=options.BundlePath())
@click.argument("out", type=click.Path(path_type=Path))
def assemble(path: Path, out: Path, ptxas: str | None, drop_ptx: bool, table: Path | None) -> None:
    """Assemble the kernels of a bundle anew, for older drivers.

    ptxas makes the cubins of the bundle OUT from the PTX of the bundle at PATH. A driver loads a cubin if it is of the
    same CUDA major release as ptxas, or newer. Everything else stays the same, also the times: measure kernels again if
    they may be slower now. OUT is a new file, or PATH. A kernel without PTX runs only where its cubin loads or NVRTC is
    installed, and cannot be assembled again.
    """
    from hadagen.cli.doctor import oldest_driver
    from hadagen.compiler.toolchain import assembled
    from hadagen.plan.arch import load_arch

    _keep_others(out, [path], f"{path} to replace it")
    check_bundle_place(out)
    opened, assembler = Bundle.open(path), Ptxas.find(ptxas)
    selection = selection_of(opened)
    before = list(kernels_of(selection).values())
    if not any(kernel.ptx for kernel in before):
        raise UsageError(f"no kernel in {path} has PTX to assemble; name a bundle of measured winners")
    kernels = assembled(before, load_arch(opened.arch), assembler)
    if drop_ptx:
        anew = {digest_of(trial) for trial in selection.values() if is_recipe_of(trial)}
        kernels |= {digest: replace(kernels[digest], ptx=b"") for digest in anew}
    selection = {cell: replace(trial, kernel=kernels[digest_of(trial)]) for cell, trial in selection.items()}
    write_selection(out, opened.arch, selection, arithmetic_of(opened))
    if table:
        rows = (dict(zip(ASSEMBLED, (old, new.digest), strict=True)) for old, new in sorted(kernels.items()))
        write_table(table, ASSEMBLED, rows, dict.fromkeys(ASSEMBLED, ".12"))
    _say_written(out, selection, f", by {assembler.release}{oldest_driver(Bundle.open(out))}")


@bundle.command()
@click.option("--gpu", metavar="NAME", help="Only the winners of this GPU.  [default: of all]")
@click.argument("path", type=options.BundlePath())
@click.argument("out", type=click.Path(allow_dash=True))
def export(path: Path, out: str, gpu: str | None) -> None:
    """Write the times of the winners in a bundle as CSV.

    The bundle is at PATH. If OUT is -, the CSV goes to standard output.
    """
    opened = Bundle.open(path)
    selection = {cell: trial for cell, trial in selection_of(opened).items() if gpu in (None, cell.gpu)}
    if not selection:
        known = ", ".join(filter(None, opened.gpus()))
        advice = f"choose one of {known}" if known else "leave out --gpu"
        raise UsageError(f"{path} has no winner of {shortened(str(gpu))}; {advice}")
    if out == "-":
        print_csv(selection, sys.stdout)
        return
    export_csv(selection, out)
    say(f"{out}: {count_of(selection)}")


def _keep_others(out: Path, sources: Iterable[Path], instead: str) -> None:
    """Raises `UsageError` if `out` would replace a file that is not among the sources."""
    if out.exists() and not any(source.exists() and source.samefile(out) for source in sources):
        raise UsageError(f"{out} is there already and would be lost; name a new file last, or {instead}")


def _say_written(path: Path, selection: Selection, how: str = "") -> None:
    say(f"{path}: {count_of(selection)}, {path.stat().st_size / 1e6:.1f} MB{how}{unused_text(path)}")


def unused_text(path: Path) -> str:
    """Why calls will not use a bundle that was written, as the end of a line; "" if they will."""
    why = why_unused(path)
    return f", and calls do not use it: {why}" if why else ""


def bundle_place(given: Path | None, arch: str, db: str | None) -> Path:
    """Where the winners of a database go: to `given`, or where calls find them.

    Raises `UsageError` if this is the database, and `StorageError` if no bundle can be written there.
    """
    from hadagen.tuning_db.database import file_of

    path = given or options.default_bundle(arch)
    file = file_of(db or options.default_db())
    if file is not None and os.path.realpath(path) == os.path.realpath(file):
        raise UsageError(f"{path} cannot be both the database and the bundle; name two places")
    check_bundle_place(path)
    return path


def count_of(selection: Selection) -> str:
    kernels = {trial.kernel.digest for trial in selection.values() if trial.kernel}
    return f"{len(selection)} winners, {len(kernels)} kernels"


def _some(found: Sequence[Item]) -> Sequence[Item]:
    """The paths. Raises `StorageError` if there are none."""
    if not found:
        raise StorageError("there is no bundle; make one with hadagen tune, or name one")
    return found
