"""What the study's process and the worker process say to each other about kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hadagen.measure.cells import Cell
from hadagen.problem import Problem
from hadagen.trial import Kernel, Outcome, Timing


@dataclass(frozen=True)
class Measure:
    """Verify a kernel, then time it. It is given up where it exceeds `limits_us` at every probe cell."""

    problem: Problem
    kernel: Kernel
    limits_us: dict[Cell, float]


@dataclass(frozen=True)
class Answer:
    """What came of a kernel. `errors`: relative error by class of input, infinite where an output is not finite.
    `seconds`: what `Measure` took in the worker."""

    outcome: Outcome
    detail: str
    errors: dict[str, float] = field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Race:
    """Time two verified kernels of one problem by turns at each cell; the answer is a list of (µs of a, µs of b)."""

    problem: Problem
    a: Kernel
    b: Kernel
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Compare:
    """Verify kernels that transform rows of one kind, then time them side by side, with the peers and the copy.

    `kernels`: each with its problem; problems differ in numerics only. `cells`: each with the positions in `kernels` of
    those that are timed there.
    """

    kernels: tuple[tuple[Problem, Kernel], ...]
    cells: tuple[tuple[Cell, tuple[int, ...]], ...]


class Times(NamedTuple):
    """Microseconds of one launch at a cell."""

    copy: float
    kernels: dict[int, float]  # by position in `Compare.kernels`; those that verification refused are left out
    peers: dict[str, float]  # by name


@dataclass(frozen=True)
class Comparison:
    """What came of `Compare`. `answers`: of the kernels' verification. `peer_errors`: relative error by class of input,
    by name of the peer; those that cannot transform such rows are left out. `times`: in the order of the cells."""

    answers: tuple[Answer, ...]
    peer_errors: dict[str, dict[str, float]]
    times: tuple[Times, ...]


class Contest(NamedTuple):
    """Where one of several kernels is chosen: its position among them, and the cells by whose times, each to the power
    of its share, kernels are ranked there. The shares add up to 1; the first cell's is no smaller than another's."""

    chosen: int
    cells: tuple[tuple[Cell, float], ...]


@dataclass(frozen=True)
class Rank:
    """Verify kernels of one problem, and find the fastest of each contest."""

    problem: Problem
    kernels: tuple[Kernel, ...]
    contests: tuple[Contest, ...]


class Standing(NamedTuple):
    """What came of a contest: the position of the fastest kernel, times in µs of a launch at the first cell of the
    chosen one and of the fastest, from one race between the two, and by how much of the fastest one's score that of the
    chosen one is worse (0.02 is 2 %)."""

    best: int
    chosen_us: float
    best_us: float
    loss: float


@dataclass(frozen=True)
class Ranking:
    """What came of `Rank`. `answers`: of the kernels' verification; those it refused are not timed. `standings`: in the
    order of the contests, None where it refused the chosen kernel."""

    answers: tuple[Answer, ...]
    standings: tuple[Standing | None, ...]
