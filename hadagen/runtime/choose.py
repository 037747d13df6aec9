"""Chooses the kernel of a call: a pure function of the bundles and the arguments. So all ranks of a job agree if their
GPUs are the same.

Problem and destination of an entry must be those of the call. If the call asks for batch-invariant results, the entry
must have the one arithmetic that `bundles.by_authority` names for the problem, and a kernel that every GPU of its arch
holds. Among the remaining entries, the first of these rules that separates two entries decides:

    1. an entry of a pinned bundle
    2. the better `Match`
    3. the newer architecture (PTX of an older one runs on a newer GPU, so several may match)
    4. measured before estimated
    5. the bundle that was found first, and in it the first GPU, whatever its element counts are
    6. the nearest element count on a logarithmic scale; of two equally near the larger; of equal counts the first

If no bundle has a problem with a matrix or signs, the entries of the nearest problem that a bundle has are taken as
estimates, with knobs that are legal for the new problem (see `guesses`); but not for batch-invariant calls, because no
bundle names their arithmetic. If no bundle has a kernel of fast codes, the kernel of accurate codes makes them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any

from hadagen.errors import ToolchainError, UsageError, printable, shown
from hadagen.problem.launch import PORTABLE_CLUSTER
from hadagen.problem.problem import Numerics, Problem, Rows
from hadagen.problem.regimes import Destination, destinations, nearest
from hadagen.problem.target import generation
from hadagen.problem.trial import Provenance
from hadagen.runtime import bundles, tables
from hadagen.runtime.arguments import as_int, name_of
from hadagen.runtime.device import Device
from hadagen.runtime.guesses import adapted, may_be_guessed, nearest_problems, rules_of
from hadagen.tuning_db.bundle import Bundle, BundleEntry

# Whether calls that do not say want the same bits for a row in every call.
BATCH_INVARIANT = os.environ.get("HADAGEN_BATCH_INVARIANT", "") not in ("", "0")


class Match(str, Enum):
    """How well an entry matches the device, from best to worst."""

    SAME_GPU = "same-gpu"  # measured on a GPU of this class
    SAME_MODEL = "same-model"  # measured on such a GPU with another power limit, clock or memory
    SAME_ARCH = "same-arch"  # measured on another GPU of this arch
    ESTIMATED = "estimated"  # not known to be timed on this arch: by the cost model, or PTX of an older arch
    GENERIC = "generic"  # no kernel: plain PyTorch


_RANK = {match: rank for rank, match in enumerate(Match)}


def match_of(entry: BundleEntry, device: Device) -> Match:
    """How well an entry matches a device."""
    if entry.arch == device.arch:
        if entry.provenance is Provenance.ESTIMATED:
            return Match.ESTIMATED
        if device.is_named(entry.gpu):
            return Match.SAME_GPU
        return Match.SAME_MODEL if device.is_model(entry.gpu) else Match.SAME_ARCH
    return Match.ESTIMATED if Device(entry.arch).generation < device.generation else Match.GENERIC


def entries_by_size(
    entries: Iterable[BundleEntry], problem: Problem, destination: Destination, device: Device
) -> tuple[Match, dict[int, BundleEntry]]:
    """How well the best entries of a bundle match, and these entries by element count, ascending.

    Only the element count decides among these entries. All are of one GPU, because each GPU has its own element counts,
    at which its winners were compared. With GENERIC there are no entries.
    """
    fitting = [entry for entry in entries if entry.problem == problem and entry.destination is destination]
    candidates = [(match, entry) for entry in fitting if (match := match_of(entry, device)) is not Match.GENERIC]
    if not candidates:
        return Match.GENERIC, {}
    least = min(_badness(*candidate) for candidate in candidates)
    best = [candidate for candidate in candidates if _badness(*candidate) == least]
    match, first = best[0]
    by_size = {entry.elements: entry for _, entry in reversed(best) if entry.gpu == first.gpu}
    return match, dict(sorted(by_size.items()))


def _badness(match: Match, entry: BundleEntry) -> tuple[int, int, bool]:
    return _RANK[match], -Device(entry.arch).generation, entry.provenance is Provenance.ESTIMATED


def choose_from_bundles(
    problem: Problem,
    destination: Destination,
    elements: int,
    device: Device,
    without: Collection[str] = (),
    *,
    batch_invariant: bool = False,
) -> tuple[Match, tuple[BundleEntry, Bundle | None] | None]:
    """How well the best entry matches, the entry, and the bundle that holds its kernel, or None if there is only a
    recipe; (GENERIC, None) if no entry does.

    elements: rows · n, at least 1.
    without: digests of kernels that do not fit on the device.
    batch_invariant: only among kernels that give the same bits, whatever `elements` is.

    Raises `StorageError` if HADAGEN_BUNDLE names a file that is damaged or no bundle.
    """
    best = _best(problem, destination, device, without, batch_invariant)
    if best is None:
        return Match.GENERIC, None
    match, found, bundle = best
    return match, (found[nearest(list(found), elements)], bundle)


def timed_in_bundles(
    problem: Problem, destination: Destination, device: Device, *, batch_invariant: bool = False
) -> list[int]:
    """The element counts, ascending, among which `choose_from_bundles` finds the nearest; [] if no entry matches.

    Raises as `choose_from_bundles` does.
    """
    best = _best(problem, destination, device, batch_invariant=batch_invariant)
    return list(best[1]) if best else []


def has_kernel(problem: Problem, destination: Destination, device: Device, *, batch_invariant: bool = False) -> bool:
    """Whether `choose_from_bundles` finds an entry. This makes no recipe, so it is quicker.

    Raises as `choose_from_bundles` does, and `ToolchainError` if kernels cannot be generated here.
    """
    if _best_of_codes(problem, destination, device, (), batch_invariant):
        return True
    if batch_invariant or not may_be_guessed(problem):
        return False
    near = _nearest(problem, destination, device)
    if near is None:
        return False
    from hadagen.compiler.recipes import why_no_knobs  # here, because a call that finds a cubin needs none of it

    return why_no_knobs(problem, rules_of(device, next(iter(near[1].values())))) is None


def no_such_bits(problem: Problem, device: Device) -> str:
    """Why a batch-invariant call has no kernel where others have one."""
    return f"no kernels of {problem.key} give the same bits in every call on {printable(device.gpu or device.arch)}"


def called_by_size(
    problem: Problem, destination: Destination, device: Device
) -> tuple[dict[int, BundleEntry], Bundle | None]:
    """The entries among which `choose_from_bundles` takes that of the nearest element count, by that count, ascending,
    and the bundle that holds their kernels; ({}, None) if no entry matches.

    Raises as `choose_from_bundles` does.
    """
    best = _best(problem, destination, device)
    return (best[1], best[2]) if best else ({}, None)


def where_measured(problem: Problem, device: Device) -> Path | None:
    """The bundle whose kernels calls run, in place if they may, if kernels in all destinations were measured on a GPU
    of this class; else None.

    Raises as `choose_from_bundles` does.
    """
    best = [_best_bundle(problem, destination, device) for destination in destinations(problem)]
    measured = [found[2].path for found in best if found and found[0] is Match.SAME_GPU]
    return measured[0] if len(measured) == len(best) else None


def is_settled(problem: Problem, destination: Destination, device: Device) -> bool:
    """Whether measuring on a device would change nothing for its calls: kernels were measured on a GPU of this class,
    or are pinned.

    Raises as `choose_from_bundles` does.
    """
    best = _best_bundle(problem, destination, device)
    return best is not None and (best[0] is Match.SAME_GPU or best[2] in bundles.pinned())


def is_served(device: Device) -> bool:
    """Whether any bundle has kernels, for any problem, that run on a device.

    Raises as `choose_from_bundles` does.
    """
    return bool(serving(bundles.known(), device))


def _best(
    problem: Problem,
    destination: Destination,
    device: Device,
    without: Collection[str] = (),
    batch_invariant: bool = False,
) -> tuple[Match, dict[int, BundleEntry], Bundle | None] | None:
    """`_best_bundle`, for fast codes or else for accurate ones, or else entries that are adapted from those of the
    nearest problem, without a bundle."""
    best = _best_of_codes(problem, destination, device, without, batch_invariant)
    if best or batch_invariant or not may_be_guessed(problem):
        return best
    near = _nearest(problem, destination, device)
    if near is None:
        return None
    try:
        found = adapted(problem, near[1], near[2], device)
    except ToolchainError as error:
        tables.unmade[problem] = str(error)  # of which the warning of the call tells
        return None
    found = {elements: entry for elements, entry in found.items() if entry.kernel not in without}
    return (Match.ESTIMATED, found, None) if found else None


def _best_of_codes(
    problem: Problem, destination: Destination, device: Device, without: Collection[str], batch_invariant: bool
) -> tuple[Match, dict[int, BundleEntry], Bundle] | None:
    """`_best_bundle`, for fast codes or else for accurate ones."""
    best = _best_bundle(problem, destination, device, without, batch_invariant)
    if best is None and problem.io.form:  # fast codes may be as accurate as others
        accurate = problem.with_io(numerics=Numerics.ACCURATE)
        best = None if accurate == problem else _best_bundle(accurate, destination, device, without, batch_invariant)
    return best


def _nearest(
    problem: Problem, destination: Destination, device: Device
) -> tuple[Match, dict[int, BundleEntry], Bundle] | None:
    """`_best_bundle` of the nearest problem that has one."""
    served = (each for asked in bundles.in_turn() for bundle in serving(asked, device) for each in bundle.tuned)
    for near in nearest_problems(problem, served):
        if best := _best_bundle(near, destination, device):
            return best
    return None


def _best_bundle(
    problem: Problem,
    destination: Destination,
    device: Device,
    without: Collection[str] = (),
    batch_invariant: bool = False,
) -> tuple[Match, dict[int, BundleEntry], Bundle] | None:
    """The match, the `entries_by_size` and the bundle that come first by the rules of this module; None if none does.

    Pinned bundles are asked before all others.
    """
    arithmetic = _invariant_arithmetic(problem, device) if batch_invariant else None
    for asked in bundles.in_turn():
        # Nothing of an older architecture comes before what serves of a newer one, so it need not be read.
        for _, similar in groupby(serving(asked, device), key=_generation):
            matching = []
            for bundle in similar:
                entries = [
                    entry
                    for entry in bundles.entries_of(bundle, problem)
                    if entry.kernel not in without and (arithmetic is None or _keeps(entry, arithmetic))
                ]
                match, found = entries_by_size(entries, problem, destination, device)
                if found:
                    badness = _badness(match, next(iter(found.values())))  # the same for all that are found
                    matching.append((badness, (match, found, bundle)))
            if matching:
                # A bundle with few kernels of an arithmetic must not hide one with more.
                return min(matching, key=lambda each: (each[0], -len(each[1][1]) if batch_invariant else 0))[1]
    return None


def _invariant_arithmetic(problem: Problem, device: Device) -> str:
    """The arithmetic of batch-invariant calls; "" if no bundle names any. It is the same however rows lie, because a
    single row is contiguous wherever it lies."""
    problem = problem.with_io(rows=Rows.CONTIGUOUS)
    for asked in bundles.by_authority():
        for bundle in serving(asked, device):
            if arithmetic := bundle.arithmetic(problem):
                return arithmetic
    return ""


def _keeps(entry: BundleEntry, arithmetic: str) -> bool:
    """Whether batch-invariant calls of this arithmetic may run an entry: every GPU of its arch holds its clusters."""
    return entry.launch.arithmetic == arithmetic != "" and entry.launch.cluster <= PORTABLE_CLUSTER


def serving(asked: Iterable[Bundle], device: Device) -> list[Bundle]:
    """The bundles of architectures whose kernels run on a device, the newest first."""
    return sorted((each for each in asked if _generation(each) <= device.generation), key=_generation, reverse=True)


def _generation(bundle: Bundle) -> int:
    return generation(bundle.arch)


_WHOLE = '{"n": 4096, "dtype": "float16"}'


def as_problem(given: Any) -> Problem:
    """The problem that a program names: by itself, by its key, or by the arguments of `Problem.of`. Raises
    `UsageError`."""
    if isinstance(given, Problem):
        return given
    if isinstance(given, str):
        return Problem.parse(given)
    try:
        values = dict(given)
        name = name_of(values.pop("dtype"))
        return Problem.of(as_int(values.pop("n")), name, **values)
    except UsageError:
        raise
    except KeyError as error:
        raise UsageError(f"problem = {shown(given)} lacks {error}; give a dict like {_WHOLE}") from None
    except (TypeError, ValueError):
        advice = f"give a Problem, its key, or a dict like {_WHOLE}"
        raise UsageError(f"problem = {shown(given)} names no problem; {advice}") from None
