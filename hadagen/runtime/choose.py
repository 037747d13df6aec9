"""Chooses the kernel of a call: a pure function of the bundles and the arguments. So all ranks of a job agree if their
GPUs are the same.

Problem and destination of an entry must be those of the call. If the call asks for batch-invariant results, the entry
must have the one arithmetic that `bundles.by_authority` names for the problem, and a kernel that every GPU of its arch
holds. Among the entries left, the first of these rules that
tells two apart decides:

    1. an entry of a pinned bundle
    2. the better `Match`
    3. the newer architecture, because PTX of older ones runs too
    4. measured before estimated
    5. the bundle that was found first, and in it the first GPU, whatever its element counts are
    6. the nearest element count on a logarithmic scale; of two equally near the larger; of equal counts the first

A problem with a matrix or signs that no bundle has takes the entries of the nearest problem that one has, with knobs
that are legal for it, as estimates (see `guesses`); but not for batch-invariant calls, because no bundle names an
arithmetic of theirs. Fast codes that no bundle has are made by the kernel for accurate ones, if one has that.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hadagen.errors import StorageError, ToolchainError, UsageError, shown
from hadagen.launch import PORTABLE_CLUSTER, LaunchSpec
from hadagen.problem import MAX_LOG2_N, Numerics, Problem, Rows, kernel_order, padded_length
from hadagen.regimes import Destination, destinations, nearest
from hadagen.runtime import bundles
from hadagen.runtime.arguments import as_int, explained, is_count, is_flag, is_one_of
from hadagen.runtime.device import Device, find_device
from hadagen.runtime.guesses import adapted, may_be_guessed, nearest_problems
from hadagen.target import arch_of_gpu, generation
from hadagen.trial import Provenance
from hadagen.tuning_db.bundle import Bundle, BundleEntry

if TYPE_CHECKING:
    import torch

    from hadagen.runtime.rotation import Rotation

# Whether calls that do not say want the same bits for a row in every call.
BATCH_INVARIANT = os.environ.get("HADAGEN_BATCH_INVARIANT", "") not in ("", "0")


class Match(str, Enum):
    """How well an entry matches the device, best first."""

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

    Only the element count decides among them. All are of one GPU, because winners were compared at the counts of their
    GPU. With GENERIC there are none.
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
    best = _best_bundle(problem, destination, device, without, batch_invariant)
    if best is None and problem.io.form:  # fast codes may be as accurate as others
        accurate = problem.with_io(numerics=Numerics.ACCURATE)
        best = None if accurate == problem else _best_bundle(accurate, destination, device, without, batch_invariant)
    if best or batch_invariant or not may_be_guessed(problem):
        return best
    served = {each for asked in bundles.in_turn() for bundle in serving(asked, device) for each in bundle.problems()}
    for near in nearest_problems(problem, served):
        if best := _best_bundle(near, destination, device):
            try:
                found = adapted(problem, best[1], best[2], device)
            except ToolchainError as error:
                warnings.warn(f"no kernel is made for {problem.key}: {error}", RuntimeWarning, stacklevel=2)
                return None
            found = {elements: entry for elements, entry in found.items() if entry.kernel not in without}
            return (Match.ESTIMATED, found, None) if found else None
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
                try:
                    entries = [
                        entry
                        for entry in bundle.entries(problem)
                        if entry.kernel not in without and (arithmetic is None or _keeps(entry, arithmetic))
                    ]
                except StorageError as error:
                    bundles.leave_out(bundle, error)
                    continue
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


@dataclass(frozen=True)
class BestConfig:
    """The kernel that a call runs for a problem on a device, and what is known about it.

    `rows`: of `problem.n` elements each.
    `kernel`: its digest.
    `relative_error`: the largest ‖out − ref‖ / ‖ref‖ against float64 that was measured; None if the kernel never ran.
    `us`, `copy_us`: microseconds of one launch, and of a plain copy of the same bytes; None unless measured on a GPU
        of this class, at an element count (rows · n) within a factor of two.
    `provenance`: "kind" (measured or estimated), "arch", "gpu", "driver", "nvcc", "date" (UTC), "elements" where the
        kernel was chosen, and its "us" and "copy_us" there, on that GPU; None if these are only estimated.

    All of these are None if `match` is GENERIC.
    """

    problem: Problem
    rows: int
    destination: Destination
    device: Device
    match: Match
    kernel: str | None = None
    knobs: Mapping[str, Any] | None = None
    launch: LaunchSpec | None = None
    us: float | None = None
    copy_us: float | None = None
    relative_error: float | None = None
    provenance: Mapping[str, Any] | None = None

    @property
    def fraction_of_copy(self) -> float | None:
        return None if self.us is None or self.copy_us is None else self.copy_us / self.us

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "problem": self.problem.key,
            "rows": self.rows,
            "destination": self.destination.value,
            "arch": self.device.arch,
            "gpu": self.device.gpu,
            "match": self.match.value,
            "kernel": self.kernel,
            "knobs": None if self.knobs is None else dict(self.knobs),
            "launch": None if self.launch is None else self.launch.to_dict(),
            "us": self.us,
            "copy_us": self.copy_us,
            "fraction_of_copy": self.fraction_of_copy,
            "relative_error": self.relative_error,
            "provenance": None if self.provenance is None else dict(self.provenance),
        }


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
        dtype = values.pop("dtype")
        name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")  # torch.float16 is "float16"
        return Problem.of(as_int(values.pop("n")), name, **values)
    except UsageError:
        raise
    except KeyError as error:
        raise UsageError(f"problem = {shown(given)} lacks {error}; give such as {_WHOLE}") from None
    except (TypeError, ValueError):
        said = f"problem = {shown(given)} is not one"
        raise UsageError(f"{said}; give a Problem, its key, or such as {_WHOLE}") from None


def _problem_of_call(
    n: Any, dtype: Any, numerics: Any, said: Mapping[str, Any], asked: Mapping[str, Any]
) -> tuple[Problem, int]:
    """The problem of the kernel of a call, and the elements of a row of x. said: order and signed. asked: a format."""
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, str) else dtype
    if hasattr(n, "transform"):  # a Rotation
        if said:
            raise UsageError("a Rotation says itself whether it has a matrix and signs; leave out order and signed")
        of, width = n.transform, n.n
        if of is None:
            raise UsageError("no kernel computes this Rotation, so PyTorch does; best_config has nothing to say of it")
        if asked["to"] is not None and asked["columns"] is None:
            asked = {**asked, "columns": width}
        parts = {"order": of.order, "signed": of.signed, "swapped": of.swapped}
        return Problem.of(of.n, name, numerics, **parts, **asked), asked["columns"] or width
    n = as_int(n)
    if not is_count(n):
        raise UsageError(f"n = {shown(n)} is not supported; give a whole number, at least 1, a Rotation or a problem")
    if asked["to"] is None and not said and n & (n - 1) and n < 1 << MAX_LOG2_N:  # which hadamard_transform pads
        problem = Problem.of(padded_length(n), name, numerics, Rows.PITCHED, **asked)
        return problem, problem.n
    return Problem.of(n, name, numerics, **said, **asked), asked["columns"] or n


def is_near(timed: int, elements: int) -> bool:
    """Whether a time at one element count also tells the time at another: within a factor of two.

    The bucket nearest to a count is always that near, except beyond the first and the last bucket.
    """
    return timed <= 2 * elements and elements <= 2 * timed


_EXAMPLE = 'call it such as best_config(4096, "float16", rows=8)'


@explained(UsageError, _EXAMPLE, {"problem": "n"})
def best_config(
    n: int | Rotation | Problem | str | Mapping[str, Any],
    dtype: torch.dtype | str | int | None = None,
    device: int | str | torch.device | None = None,
    *,
    rows: int | None = None,
    inplace: bool = False,
    numerics: str = "accurate",
    arch: str | None = None,
    batch_invariant: bool | None = None,
    order: int = 1,
    signed: bool = False,
    to: str | None = None,
    columns: int | None = None,
    group: int | None = None,
    rule: str | None = None,
    layout: str = "row-major",
    round_first: bool = False,
) -> BestConfig:
    """The kernel that a call of `hadamard_transform`, a `Rotation` or `rotate_quantize` runs; nothing is run. With
    `arch` it needs no GPU. Arguments are those of `warmup`, each with one value.

    If a kernel does not fit on the device, a call runs the next nearest instead. This function does not check that.

    n: the last dimension of x, or a `Rotation`; with `to` what is rotated by: a `Rotation`, or a power of two, 1 for no
        rotation. Or a whole problem, without a dtype: a `Problem`, its key, such as "n4096-float16-fast", or the
        arguments of `Problem.of`, {"n": 4096, "dtype": torch.float16, "numerics": "fast"}. `best_config(problem, rows)`
        is possible then.
    dtype: of x, such as torch.float16 or "float16".
    rows: the number of rows of x: all dimensions but the last, multiplied.
    device: a CUDA device of this machine, the current one if none is given. With `arch` (for instance "sm90") the name
        of a GPU, such as "NVIDIA H100 80GB HBM3", or any GPU of that arch. Where neither the bundles nor hadagen know
        a GPU of that name, the `match` is ESTIMATED at best.
    inplace: whether the result overwrites the input.
    batch_invariant: as in the call. If True, a `match` of GENERIC also stands for a call that raises, because others
        have kernels.
    order, signed: of a rotation by n elements: K, or 1 without a matrix, and whether it has signs. A `Rotation`, a
        `Problem` and a key say that themselves.
    to, columns, group, rule, layout, round_first: as for `warmup`, one format each.

    Raises `UsageError` for missing or too many arguments, a bad problem, order, flag, format or arch, a rotation that
    no kernel computes, a device of another arch, rows below 1, or if there is no device; `StorageError` if
    HADAGEN_BUNDLE names a file that is damaged or no bundle.
    """
    is_whole = isinstance(n, (Problem, str, Mapping))
    if is_whole and rows is None:
        rows, dtype = cast(Any, dtype), None
    for name, value in (("rows", rows), *(() if is_whole else (("dtype", dtype),))):
        if value is None:
            raise UsageError(f"best_config: missing a required argument: {name!r}; {_EXAMPLE}")
    if is_whole and (dtype is not None or to is not None or not is_one_of(numerics, ["accurate"])):
        raise UsageError("a problem has its dtype, numerics and format; leave out dtype, numerics and to")
    rows = as_int(rows)
    if not is_count(rows):
        raise UsageError(f"rows = {shown(rows)} is not supported; give a whole number of rows, at least 1")
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    for name, flag in (
        ("inplace", inplace),
        ("batch_invariant", batch_invariant),
        ("signed", signed),
        ("round_first", round_first),
    ):
        if not is_flag(flag):
            raise UsageError(f"{name} = {shown(flag)} is not supported; give True or False")
    order = as_int(order)
    said: dict[str, Any] = {} if is_count(order) and order == 1 else {"order": order}
    said |= {"signed": True} if signed else {}
    if not is_whole:
        form = {"group": as_int(group), "rule": rule, "layout": layout, "round_first": bool(round_first)}
        asked = {"to": to, "columns": as_int(columns), **form}
        problem, width = _problem_of_call(n, dtype, numerics, said, asked)
        rows = rows * width // problem.n
    elif isinstance(n, Mapping):
        problem = as_problem({**said, **n})
    else:
        problem = as_problem(n)
        problem = replace(problem, transform=replace(problem.transform, **said))
    if said.get("order") and problem.order > 1:
        of_kernels = kernel_order(problem.order, problem.length)
        problem = replace(problem, transform=replace(problem.transform, order=of_kernels))
    target = find_device(device, arch)
    destination = Destination.IN_PLACE if inplace else Destination.OUT_OF_PLACE
    match, chosen = choose_from_bundles(
        problem, destination, rows * problem.n, target, batch_invariant=bool(batch_invariant)
    )
    if match is Match.SAME_ARCH and arch and target.gpu and arch_of_gpu(target.gpu) is None:
        match = Match.ESTIMATED  # only the caller says that a GPU of this name is of that arch
    found = (problem, rows, destination, target, match)
    if chosen is None:
        return BestConfig(*found)
    entry, _ = chosen
    measured = entry.provenance is Provenance.MEASURED
    us, copy_us = (entry.us, entry.copy_us) if measured else (None, None)
    provenance = {
        "kind": entry.provenance.value,
        "arch": entry.arch,
        "gpu": entry.gpu,
        "driver": entry.environment.driver,
        "nvcc": entry.nvcc,
        "date": entry.date,
        "elements": entry.elements,
        "us": us,
        "copy_us": copy_us,
    }
    if match is not Match.SAME_GPU or not is_near(entry.elements, rows * problem.n):
        us = copy_us = None
    return BestConfig(*found, entry.kernel, entry.knobs, entry.launch, us, copy_us, entry.relative_error, provenance)
