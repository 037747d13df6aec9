"""Chooses the kernel of a call: a pure function of the bundles and the arguments. So all ranks of a job agree if their
GPUs are the same.

Problem and destination of an entry must be those of the call. If the call asks for batch-invariant results, the entry
must have the one arithmetic that `_best_invariant` finds for the problem, whatever the element count, the destination
and the GPU of an arch are, and a kernel that every GPU of its arch holds. Among the remaining entries, the first of
these rules that separates two entries decides:

    1. an entry of a pinned bundle
    2. the better `Match`
    3. the newer architecture (PTX of an older one runs on a newer GPU, so several may match)
    4. measured before estimated
    5. the bundle that was found first, and in it the first GPU, whatever its element counts are
    6. the nearest element count on a logarithmic scale; of two equally near the larger; of equal counts the first

If no bundle has a problem with a matrix or signs, the entries of the nearest problem that a bundle has are taken as
estimates, with knobs that are legal for the new problem (see `guesses`). Batch-invariant calls take those of them that
have one arithmetic. If no bundle has a kernel of fast codes, the kernel of accurate codes makes them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
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
from hadagen.runtime.arguments import as_int, name_of
from hadagen.runtime.choose import bundles, tables
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.guesses import adapted, may_be_guessed, nearest_problems, rules_of
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
    """Whether `choose_from_bundles` finds an entry. Without `batch_invariant` this makes no recipe, so it is quicker.

    Raises as `choose_from_bundles` does, and `ToolchainError` if kernels cannot be generated here.
    """
    if batch_invariant:
        return _best_invariant(problem, destination, device) is not None
    if _best_of_codes(problem, destination, device):
        return True
    near = _nearest(problem, destination, device) if may_be_guessed(problem) else None
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
    if batch_invariant:
        return _best_invariant(problem, destination, device, without)
    if best := _best_of_codes(problem, destination, device, without):
        return best
    near = _nearest(problem, destination, device) if may_be_guessed(problem) else None
    return _estimated(_adapted(problem, near[1], near[2], device), without) if near else None


def _best_of_codes(
    problem: Problem, destination: Destination, device: Device, without: Collection[str] = ()
) -> tuple[Match, dict[int, BundleEntry], Bundle] | None:
    """`_best_bundle`, for fast codes or else for accurate ones."""
    for asked in _as_asked(problem):
        if best := _best_bundle(asked, destination, device, without):
            return best
    return None


def _nearest(
    problem: Problem, destination: Destination, device: Device
) -> tuple[Match, dict[int, BundleEntry], Bundle] | None:
    """`_best_bundle` of the nearest problem that has one."""
    served = (each for asked in bundles.in_turn() for bundle in serving(asked, device) for each in bundle.tuned)
    for near in nearest_problems(problem, served):
        if best := _best_bundle(near, destination, device):
            return best
    return None


def _best_invariant(
    problem: Problem, destination: Destination, device: Device, without: Collection[str] = ()
) -> tuple[Match, dict[int, BundleEntry], Bundle | None] | None:
    """`_best` among kernels of one arithmetic. The first of these that there is decides which:

    1. the arithmetic that a bundle names for the problem, or else for accurate codes
    2. the arithmetic of `_recipes`, which are taken where no bundle has kernels of it

    Pinned bundles and those that hadagen ships are asked for both before all others. So machines agree, whatever was
    tuned on each. It is the same however rows lie, because a single row is contiguous wherever it lies.
    """
    pinned, shipped, known = bundles.by_authority()
    for authority in ([pinned, shipped], [known]):
        serving_here = [bundle for asked in authority for bundle in serving(asked, device)]
        is_named = False
        for asked in _as_asked(problem):
            if arithmetic := _named(asked, serving_here):
                is_named = True
                if best := _best_bundle(asked, destination, device, without, arithmetic):
                    return best
        if is_named:
            return None  # kernels of another arithmetic must not take over where these do not fit
        if recipes := _recipes(problem, destination, device, serving_here):
            arithmetic = next(iter(recipes.values())).launch.arithmetic
            best = _best_bundle(problem, destination, device, without, arithmetic)
            if best or problem.io.rows is not Rows.CONTIGUOUS:
                return best
            return _estimated(recipes, without)
    return None


def _as_asked(problem: Problem) -> list[Problem]:
    """The problem, and for fast codes the accurate ones, which may stand for them."""
    return list(dict.fromkeys([problem, problem.with_io(numerics=Numerics.ACCURATE) if problem.io.form else problem]))


def _estimated(
    found: dict[int, BundleEntry], without: Collection[str]
) -> tuple[Match, dict[int, BundleEntry], None] | None:
    found = {elements: entry for elements, entry in found.items() if entry.kernel not in without}
    return (Match.ESTIMATED, found, None) if found else None


def _adapted(
    problem: Problem, entries: Mapping[int, BundleEntry], bundle: Bundle, device: Device
) -> dict[int, BundleEntry]:
    """`adapted`; none if kernels cannot be generated here."""
    try:
        return adapted(problem, entries, bundle, device)
    except ToolchainError as error:
        tables.unmade[problem] = str(error)  # of which the warning of the call tells
        return {}


def _named(problem: Problem, found: Iterable[Bundle]) -> str:
    """The arithmetic that the first of these bundles names that names one; "" if none does."""
    problem = problem.with_io(rows=Rows.CONTIGUOUS)
    return next((arithmetic for bundle in found if (arithmetic := bundle.arithmetic(problem))), "")


def _recipes(
    problem: Problem, destination: Destination, device: Device, found: Sequence[Bundle]
) -> dict[int, BundleEntry]:
    """Entries of one arithmetic for contiguous rows, by element count: `adapted` from the entries of the problem itself
    in the first of these bundles that has some, or else from those of the nearest problem that may be guessed from.

    All entries of the bundle count, of all GPUs and destinations: of those with the arithmetic that is named for their
    own problem, or else of all, the arithmetic that most of the adapted entries have is chosen.
    """
    problem = problem.with_io(rows=Rows.CONTIGUOUS)
    served = {each for bundle in found for each in bundle.tuned} if may_be_guessed(problem) else set()
    for near in (problem, *nearest_problems(problem, served)):
        named = _named(near, found)
        for bundle in found:
            entries = [each for each in bundles.entries_of(bundle, near) if match_of(each, device) is not Match.GENERIC]
            kept = [entry for entry in entries if _keeps(entry, named)]
            for some in filter(None, (kept, entries)):
                made = _adapted(problem, dict(enumerate(some)), bundle, device)
                if not made:  # no knobs are legal, whatever they are adapted from
                    return {}
                if alike := _alike([(some[at], each) for at, each in made.items()]):
                    # Each kernel can write to both destinations.
                    there = [entry for entry in alike if entry.destination is destination]
                    there = there or [replace(entry, destination=destination) for entry in alike]
                    return _adapted(problem, entries_by_size(there, near, destination, device)[1], bundle, device)
    return {}


def _alike(made: Sequence[tuple[BundleEntry, BundleEntry]]) -> list[BundleEntry]:
    """Of pairs of an entry and what is `adapted` from it, the entries of the arithmetic that most of the latter have;
    none if each needs larger clusters than every GPU holds."""
    names = [(entry, each.launch.arithmetic) for entry, each in made if _keeps(each, each.launch.arithmetic)]
    counts = Counter(name for _, name in names)
    most = min(counts, key=lambda name: (-counts[name], name), default="")
    return [entry for entry, name in names if name == most]


def _best_bundle(
    problem: Problem,
    destination: Destination,
    device: Device,
    without: Collection[str] = (),
    arithmetic: str | None = None,
) -> tuple[Match, dict[int, BundleEntry], Bundle] | None:
    """The match, the `entries_by_size` and the bundle that come first by the rules of this module; None if none does.

    Pinned bundles are asked before all others. arithmetic: that of batch-invariant calls; None for others.
    """
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
                return min(matching, key=lambda each: (each[0], -len(each[1][1]) if arithmetic else 0))[1]
    return None


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
