"""The problems that `hadagen tune` tunes: those that options name, and those that hadagen ships kernels for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hadagen.errors import UsageError
from hadagen.problem.problem import Problem
from hadagen.tuning_db.bundle import Bundle, shipped

KINDS = ("transform", "rotation", "format")
FEW = 3  # problems of each kind that are tuned by default where nothing can be measured


def kind_of(problem: Problem) -> str:
    """One of `KINDS`: a problem that quantizes is a format, another problem with a matrix is a rotation."""
    if problem.io.form:
        return "format"
    return "rotation" if problem.transform.has_matrix else "transform"


@dataclass(frozen=True)
class Wanted:
    """The problems that options ask for. `named`: whether or not hadagen ships kernels for them. `fits`: whether a
    problem of a shipped bundle is wanted. `by_size`: whether options name problems or row lengths."""

    named: Sequence[Problem]
    fits: Callable[[Problem], bool]
    by_size: bool

    def find(self, archs: Iterable[str]) -> list[Problem]:
        """These problems for some archs, heaviest first. The weight of a problem is the longest time of a kernel that
        hadagen ships for it. Raises `UsageError` if there are none."""
        weights = dict.fromkeys(self.named, 0.0)
        for bundle in (Bundle.open(shipped()[arch]) for arch in archs if arch in shipped()):
            for problem in bundle.problems():
                if problem in weights or self.fits(problem):
                    longest = max((entry.us for entry in bundle.entries(problem)), default=0.0)
                    weights[problem] = max(longest, weights.get(problem, 0.0))
        if not weights:
            raise UsageError(
                "hadagen ships no kernels for such problems; name one with --problem, a row length with --n, or a "
                "format with --to"
            )
        return sorted(weights, key=lambda problem: -weights[problem])


def heaviest(problems: Iterable[Problem]) -> list[Problem]:
    """The first `FEW` problems of each kind."""
    seen: Counter[str] = Counter()
    found = []
    for problem in problems:
        seen[kind_of(problem)] += 1
        if seen[kind_of(problem)] <= FEW:
            found.append(problem)
    return found


def by_row_length(problems: Iterable[Problem]) -> list[list[Problem]]:
    """The problems of each n together, in the order of the first of each."""
    first = {problem.n: place for place, problem in reversed(list(enumerate(problems)))}
    ordered = sorted(problems, key=lambda problem: first[problem.n])
    return [list(of) for _, of in groupby(ordered, key=lambda problem: problem.n)]
