"""Kernels for problems with a matrix, signs, a format or a prologue that no bundle has: recipes with the knobs that are
good for the nearest problem that one has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from hadagen.problem.problem import Io, Problem, Rows, difference
from hadagen.problem.target import known_archs
from hadagen.problem.trial import Environment, Provenance, knobs_key, recipe_digest
from hadagen.runtime.choose.device import Device
from hadagen.tuning_db.bundle import Bundle, BundleEntry


def may_be_guessed(problem: Problem) -> bool:
    """Whether a problem has contiguous rows, and a matrix, signs, a format or a prologue, so that a rotation or a
    quantizer may ask for it."""
    of = problem.transform
    special = of.has_matrix or of.signed or problem.io.form is not None or problem.prologue
    return problem.io.rows is Rows.CONTIGUOUS and bool(special)


def nearest_problems(problem: Problem, known: Iterable[Problem]) -> list[Problem]:
    """The known problems of the same io, or, if the problem has a format, of a similar format or none; with a matrix if
    the problem has one, else without; of real numbers, or with a second matrix, only if the problem's is; and with the
    same prologue or none. Nearest first: by the ratios of orders and of lengths, and by how similar formats are. Among
    problems that are equally near, the same io comes first, then the same prologue, then the same kind of entries, then
    as many matrices, then the same use of signs."""

    def distance(other: Problem) -> tuple[float, bool, bool, bool, bool, bool, Problem]:
        apart = difference(problem, other) + (_apart(other.io, problem.io) or 0)
        of, mine = other.transform, problem.transform
        differ = other.io != problem.io, other.prologue != problem.prologue, of.real != mine.real
        return apart, *differ, of.paired != mine.paired, of.signed != mine.signed, other

    def is_similar(other: Problem) -> bool:
        return (
            other.transform.has_matrix is problem.transform.has_matrix
            and other.transform.real <= problem.transform.real
            and other.transform.paired <= problem.transform.paired
            and other.prologue in ("", problem.prologue)
            and _apart(other.io, problem.io) is not None
        )

    return sorted(set(filter(is_similar, known)) - {problem}, key=distance)


def _apart(one: Io, other: Io) -> int | None:
    """0 for the same io, or formats with codes of as many bits and groups of the same size; 1 and 2 for formats that
    are less similar; 3 where one has none; one more for other numerics of a format; None for others."""
    if one == other:
        return 0
    form, wanted = one.form, other.form
    if wanted is None or (one.input, one.rows) != (other.input, other.rows):
        return None
    apart = 3 if form is None else (form.element.bits != wanted.element.bits) + (form.group != wanted.group)
    return apart + (one.numerics is not other.numerics)


def adapted(
    problem: Problem, entries: Mapping[int, BundleEntry], bundle: Bundle, device: Device
) -> dict[int, BundleEntry]:
    """Entries of another problem, by element count, as estimates for this one: recipes with the nearest legal knobs.
    None where no knobs are legal. Signs and a prologue take registers of a thread. An SM should hold as many blocks in
    spite of them.

    Raises `ToolchainError` if kernels cannot be generated here, and `StorageError` if the bundle is damaged.
    """
    from hadagen.compiler.recipes import closest_recipe  # here, because a call that finds a cubin needs none of it

    found: dict[int, BundleEntry] = {}
    for elements, entry in entries.items():
        arch = rules_of(device, entry)
        adds_signs = problem.transform.signed and not entry.problem.transform.signed
        takes_more = adds_signs or problem.prologue != entry.problem.prologue
        registers = _registers(bundle, entry.kernel) if takes_more and entry.compiled and arch == entry.arch else 0
        rows = max(1, entry.elements // problem.unit)
        recipe = closest_recipe(problem, knobs_key(entry.knobs), arch, registers, rows)
        if recipe is not None:
            found[elements] = replace(
                entry,
                problem=problem,
                arch=arch,
                environment=Environment(),
                kernel=recipe_digest(problem, recipe.knobs, recipe.launch),
                launch=recipe.launch,
                knobs=recipe.knobs,
                errors={},
                provenance=Provenance.ESTIMATED,
                nvcc="",
                hot_us=None,
                hot_copy_us=None,
                cold_us=None,
                cold_copy_us=None,
                compiled=False,
                portable=False,
            )
    return found


def rules_of(device: Device, entry: BundleEntry) -> str:
    """The arch whose rules the recipes for a device keep that are made of an entry."""
    return device.arch if device.arch in known_archs() else entry.arch


@lru_cache(maxsize=1024)
def _registers(bundle: Bundle, digest: str) -> int:
    """The registers of a thread of a kernel. Kept, because calls of new shapes ask for the same kernels, and each
    kernel is read with its code."""
    return bundle.kernel(digest).registers
