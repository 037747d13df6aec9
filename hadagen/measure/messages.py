"""The requests to the worker process, and its answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hadagen.measure.cells import Cell
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Disturbed, Kernel, Outcome, Timing


@dataclass(frozen=True)
class Measure:
    """Verify a kernel, then time it. Timing stops if the kernel exceeds `limits_us` at every probe cell. `cells`: the
    cells to time; None for the cells of the service."""

    problem: Problem
    kernel: Kernel
    limits_us: dict[Cell, float]
    cells: tuple[Cell, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a kernel. `errors`: relative error by class of input, infinite where an output is not finite.
    `seconds`: how long `Measure` took in the worker."""

    outcome: Outcome
    detail: str
    errors: dict[str, float] = field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Look:
    """Say what disturbs timings now: `Disturbed`, or None. `Measure` and `Race` are answered with `Disturbed` too, if
    something did, and then there are no times."""


@dataclass(frozen=True)
class Race:
    """Time two verified kernels of one problem in turns at each cell. The answer is a list of (µs of a, µs of b)."""

    problem: Problem
    a: Kernel
    b: Kernel
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Compare:
    """Verify kernels for the same rows, then time them in turns with the other libraries and the copy.

    `kernels`: pairs of a problem and a kernel; problems differ in numerics only. `cells`: pairs of a cell and the
    indices, in `kernels`, of the kernels that are timed in it.
    """

    kernels: tuple[tuple[Problem, Kernel], ...]
    cells: tuple[tuple[Cell, tuple[int, ...]], ...]


class Times(NamedTuple):
    """Microseconds of one launch at a cell."""

    copy: float
    kernels: dict[int, float]  # by position in `Compare.kernels`, without those that failed verification
    peers: dict[str, float]  # by name


@dataclass(frozen=True)
class Comparison:
    """The answer to `Compare`.

    `answers`: the verification of each kernel. `peer_errors`: name of the library → class of input → relative error,
    without libraries that cannot transform such rows. `times`: in the order of the cells. `disturbed`: by what.
    """

    answers: tuple[Answer, ...]
    peer_errors: dict[str, dict[str, float]]
    times: tuple[Times, ...]
    disturbed: Disturbed | None = None


class Choice(NamedTuple):
    """A call that chooses one of several kernels.

    `chosen`: the position of that kernel. `cells`: (cell, share). Kernels are ranked by the product of their times in
    the cells, each to the power of its share. The shares add up to 1, and the first is the largest.
    """

    chosen: int
    cells: tuple[tuple[Cell, float], ...]


@dataclass(frozen=True)
class Rank:
    """Verify kernels of one problem, and find the fastest for each of `choices`."""

    problem: Problem
    kernels: tuple[Kernel, ...]
    choices: tuple[Choice, ...]


class ChoiceResult(NamedTuple):
    """The result for one call.

    `best`: the position of the fastest kernel. `chosen_us`, `best_us`: µs of a launch of the chosen and of the fastest
    kernel at the first cell, from a timing of these two in turns. `loss`: score of the chosen / score of the fastest
    - 1 (0.02 is 2 %).
    """

    best: int
    chosen_us: float
    best_us: float
    loss: float


@dataclass(frozen=True)
class Ranking:
    """The answer to `Rank`.

    `answers`: the verification of each kernel; those that fail are not timed. `results`: in the order of `choices`;
    None if the chosen kernel failed. `disturbed`: by what.
    """

    answers: tuple[Answer, ...]
    results: tuple[ChoiceResult | None, ...]
    disturbed: Disturbed | None = None
