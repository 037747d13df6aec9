"""`best_config`: the kernel that a call runs, without the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from hadagen.errors import UsageError
from hadagen.problem.choices import FormatName, LayoutName, NumericsName, RuleName
from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import MAX_LOG2_N, Problem, Rows, kernel_order, padded_length
from hadagen.problem.prologues import Prologue
from hadagen.problem.prologues import name_of as name_of_prologue
from hadagen.problem.regimes import Destination
from hadagen.problem.target import arch_of_gpu
from hadagen.problem.trial import Provenance
from hadagen.runtime.arguments import as_int, as_whole, check_flags, explained, is_count, is_one_of, name_of
from hadagen.runtime.choose.device import Device, find_device
from hadagen.runtime.choose.entries import BATCH_INVARIANT, Match, as_problem, choose_from_bundles
from hadagen.runtime.choose.reasons import Asked, why_none

if TYPE_CHECKING:
    import torch

    from hadagen.runtime.rotation import Rotation


@dataclass(frozen=True)
class BestConfig:
    """The kernel that a call runs for a problem on a device, and what is known about it.

    `rows`: the number of rows of `problem.n` elements. `kernel`: its digest. `relative_error`: the largest ‖out − ref‖
    / ‖ref‖ against float64 that was measured; None if the kernel never ran. `us`, `copy_us`: microseconds of one
    launch, and of a plain copy of the same bytes; None unless measured on a GPU of this class, at an element count
    (rows · n) within a factor of two. `provenance`: "kind" (measured or estimated), "arch", "gpu", "driver", "nvcc",
    "date" (UTC), "elements" (the element count of the winner), and "us" and "copy_us" at this count on this GPU, or
    None for estimates.

    All of these are None if `match` is GENERIC. Then `reason` is a sentence on why PyTorch computes the call, and what
    would have a kernel; else it is None.
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
    reason: str | None = None

    @property
    def fraction_of_copy(self) -> float | None:
        return None if self.us is None or self.copy_us is None else self.copy_us / self.us

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
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
            "reason": self.reason,
        }


def _problem_of_call(
    n: Any, dtype: Any, numerics: Any, said: Mapping[str, Any], asked: Mapping[str, Any]
) -> tuple[Problem, int]:
    """The problem of the kernel of a call, and the elements of a row of x. said: order and signed. asked: a format."""
    name = name_of(dtype)
    if hasattr(n, "transform"):  # a Rotation
        if said:
            raise UsageError("a Rotation says itself whether it has a matrix and signs; leave out order and signed")
        of, width = n.transform, n.n
        if of is None:
            try:
                n._transform()
            except UsageError as error:
                raise UsageError(f"no kernel computes this Rotation, so PyTorch does: {error}") from None
        if asked["to"] is not None and asked["columns"] is None:
            asked = {**asked, "columns": width}
        parts = {"order": of.order, "signed": of.signed, "swapped": of.swapped, "real": of.real}
        parts |= {"paired": of.paired}
        return Problem.of(of.n, name, numerics, **parts, **asked), asked["columns"] or width
    n = as_whole(n, "n", "a whole number, at least 1, a Rotation or a problem")
    pads = asked["to"] is None and not said and not asked["prologue"]  # as hadamard_transform does
    if pads and n & (n - 1) and n < 1 << MAX_LOG2_N:
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
    numerics: NumericsName = "accurate",
    arch: str | None = None,
    batch_invariant: bool | None = None,
    order: int = 1,
    signed: bool = False,
    to: FormatName | None = None,
    columns: int | None = None,
    group: int | None = None,
    rule: RuleName | None = None,
    layout: LayoutName = "row-major",
    round_first: bool = False,
    before: Prologue | str | None = None,
) -> BestConfig:
    """The kernel that a call of `hadamard_transform`, a `Rotation` or `rotate_quantize` runs; nothing is run. With
    `arch` it needs no GPU. Arguments are as for `warmup`, with one value each.

    If a kernel does not fit on the device, a call runs the next nearest instead. This function does not check that.

    n: the last dimension of x, or a `Rotation`; with `to` the rotation: a `Rotation`, or a power of two, 1 for no
        rotation. Or a whole problem, without a dtype: a `Problem`, its key, such as "n4096-float16-fast", or the
        arguments of `Problem.of`, {"n": 4096, "dtype": torch.float16, "numerics": "fast"}. `best_config(problem, rows)`
        is possible then.
    dtype: the type of x, such as torch.float16 or "float16".
    rows: the number of rows of x: all dimensions but the last, multiplied.
    device: a CUDA device of this machine, the current one if none is given. With `arch` (for instance "sm90") the name
        of a GPU, such as "NVIDIA H100 80GB HBM3", or any GPU of that arch. Where neither the bundles nor hadagen know
        a GPU of that name, the `match` is ESTIMATED at best.
    inplace: whether the result overwrites the input.
    batch_invariant: the argument of the call. If True, a `match` of GENERIC also stands for a call that raises, because
        only calls that are not batch-invariant have kernels.
    order, signed: those of a rotation of n elements: K, or 1 without a matrix, and whether it has signs. A `Rotation`,
        a `Problem` and a key say that themselves.
    to, columns, group, rule, layout, round_first, before: as for `warmup`, one value each. The n of a Rotation, and n,
        are those of the result of before.

    Raises `UsageError` for missing or too many arguments, a bad problem, order, flag, format or arch, a rotation that
    no kernel computes, a device of another arch, rows below 1, or if there is no device; `StorageError` if
    HADAGEN_BUNDLE names a file that is damaged or no bundle.
    """
    prologue = name_of_prologue(before)
    is_whole = isinstance(n, (Problem, str, Mapping))
    if is_whole and rows is None:
        rows, dtype = cast(Any, dtype), None
    for name, value in (("rows", rows), *(() if is_whole else (("dtype", dtype),))):
        if value is None:
            raise UsageError(f"best_config: missing a required argument: {name!r}; {_EXAMPLE}")
    if is_whole and (dtype is not None or to is not None or prologue or not is_one_of(numerics, ["accurate"])):
        raise UsageError("a problem has its dtype, numerics and format; leave out dtype, numerics, to and before")
    rows = as_whole(rows, "rows", "a whole number of rows, at least 1")
    if batch_invariant is None:
        batch_invariant = BATCH_INVARIANT
    check_flags(inplace=inplace, batch_invariant=batch_invariant, signed=signed, round_first=round_first)
    order, width = as_int(order), 0
    said: dict[str, Any] = {} if is_count(order) and order == 1 else {"order": order}
    said |= {"signed": True} if signed else {}
    if not is_whole:
        form = {"group": as_int(group), "rule": rule, "layout": layout, "round_first": bool(round_first)}
        asked = {"to": to, "columns": as_int(columns), **form, "prologue": prologue}
        problem, width = _problem_of_call(n, dtype, numerics, said, asked)
        rows = rows * width // problem.n
    elif isinstance(n, Mapping):
        problem = as_problem({**said, **n})
    else:
        problem = as_problem(n)
        problem = replace(problem, transform=replace(problem.transform, **said))
    if "order" in said and not problem.transform.real:
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
        wanted = Asked.of(problem, width or problem.unit, destination, bool(batch_invariant))
        return BestConfig(*found, reason=why_none(wanted, target))
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
