"""What the study's process and the worker process say to each other about kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """What came of `Measure`. `seconds`: what it took in the worker."""

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
    replays: int
