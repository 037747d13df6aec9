"""The progress of a search: a live display on a terminal, and lines of text anywhere else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from hadagen.cli.output import clock_text, fraction_text, say
from hadagen.compiler.toolchain import BuildFailure
from hadagen.problem.launch import Source
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import REGIMES
from hadagen.problem.trial import Kernel, NotTried, Outcome
from hadagen.tuner.estimate import BUILT_AT_ONCE
from hadagen.tuner.events import (
    BatchBuilt,
    Event,
    FleetChanged,
    OfClass,
    PairRaced,
    ProblemFinished,
    ProblemStarted,
    RaceDisturbed,
    SearchStarted,
    TrialFinished,
    VariantNotTried,
)
from hadagen.tuner.pipeline import Build

if TYPE_CHECKING:
    from hadagen.fleet.client import FleetState

LINE_SECONDS = 10.0  # between two lines of text, at least
FEW_TRIALS = 10  # too few to tell the rate from


@dataclass(frozen=True)
class Building:
    """The compiler has built `done` of `kernels` kernels."""

    done: int
    kernels: int


def in_parts(build: Build, listen: Callable[[Building], None]) -> Build:
    """The same, a few sources after others, with a `Building` before each part and at the end; it counts all calls."""
    given = 0

    def built(sources: Sequence[Source]) -> Sequence[Kernel | BuildFailure | NotTried]:
        nonlocal given
        before, given = given, given + len(sources)
        kernels: list[Kernel | BuildFailure | NotTried] = []
        for done in range(0, len(sources), BUILT_AT_ONCE):
            listen(Building(before + done, given))
            kernels += build(sources[done : done + BUILT_AT_ONCE])
        listen(Building(given, given))
        return kernels

    return built


class State:
    """How far a search is, from its events. `clock` gives seconds."""

    def __init__(self, time_budget: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._time_budget = time_budget
        self._started = clock()
        self.outcomes: Counter[Outcome] = Counter()
        self.trials = 0  # that will be finished at the end
        self.finished = 0  # those of earlier runs included
        self._first = 0.0  # when the first trial was finished
        self.now = "choosing kernels"
        self.raced = 0
        self.note = ""  # what went wrong for the first time, without an end to the search
        self.fleet = ""  # who works, and how busy; "" on one device
        self._built = False  # is the first batch
        self._trying = ""
        self._problems, self._started_problems = 0, 0

    @property
    def has_begun(self) -> bool:
        """Whether a trial was finished or a pair was raced; until then only `now` has a text to show."""
        return bool(self.outcomes or self.raced)

    @property
    def _prepares(self) -> bool:
        """Whether there is nothing to try yet."""
        return not (self.has_begun or self._built)

    def listen(self, event: Event | Building) -> None:
        if isinstance(event, SearchStarted):
            self.trials, self.finished = event.trials, event.finished
            self._problems = event.problems
            self._trying = "verifying kernels on the CPU" if event.estimated else "measuring kernels"
        elif isinstance(event, ProblemStarted):
            self._started_problems += 1
            if self._prepares:
                self.now = f"choosing kernels: problem {self._started_problems} of {self._problems}"
        elif isinstance(event, Building):
            if self._prepares:
                self.now = f"building kernels: {event.done} of {event.kernels}"
        elif isinstance(event, BatchBuilt):
            if self._prepares:
                self.now = self._trying
            self._built = True
        elif isinstance(event, TrialFinished):
            self.trials, self.finished = event.trials, event.finished
            self._first = self._first or self._clock()
            self.outcomes[event.trial.outcome] += 1
            self.now = f"{_where(event.trial.problem, event)}: {best_so_far(event.best)}"
        elif isinstance(event, VariantNotTried):
            again = (
                "kernels timed at that time are timed again" if event.advice else "interrupted trials are tried again"
            )
            self.note = self.note or f"{_reason(event)}; {again}"
        elif isinstance(event, RaceDisturbed):
            self.note = self.note or _reason(event)
        elif isinstance(event, FleetChanged):
            self.fleet = fleet_text(event.state)
        elif isinstance(event, PairRaced):
            self.raced += 1
            self.now = f"{_where(event.problem, event)}: racing near-ties"

    @property
    def counts(self) -> str:
        outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in self.outcomes.most_common())
        races = f", {self.raced} pairs raced" if self.raced else ""
        return f"{self.finished} of {self.trials} trials" + (f" ({outcomes}{races})" if outcomes else "")

    @property
    def rate(self) -> str:
        """The rate, such as "3.2 trials/s, "; "" if it is not known."""
        done, seconds = sum(self.outcomes.values()) - 1, self._clock() - self._first
        return f"{done / seconds:.1f} trials/s, " if done >= FEW_TRIALS and seconds > 0 else ""

    @property
    def seconds_left(self) -> float | None:
        """The seconds left, by the rate since the first trial and the time budget; None if the rate is not known."""
        now = self._clock()
        left = [] if self._time_budget is None else [self._started + self._time_budget - now]
        done = sum(self.outcomes.values()) - 1
        if done >= FEW_TRIALS:
            left.append((now - self._first) / done * (self.trials - self.finished))
        return max(0.0, min(left)) if left else None

    def __rich__(self) -> RenderableType:
        lines = Table.grid()
        lines.add_row(ProgressBar(total=max(1, self.trials), completed=self.finished, width=60))
        lines.add_row(f"{self.counts}, {self.rate}{clock_text(self.seconds_left)} left")
        lines.add_row(self.now)
        if self.fleet:
            lines.add_row(self.fleet)
        if self.note:
            lines.add_row(self.note)
        return lines


@contextmanager
def shown(time_budget: float | None) -> Iterator[Callable[[Event | Building], None]]:
    """A listener whose events are shown on stderr until the end of the `with`."""
    state = State(time_budget)
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(state, console=console, refresh_per_second=4):
            yield state.listen
    else:
        yield _Lines(state).listen


class _Lines:
    """A line for each thing done before the first trial, then one now and then, and one for every finished problem."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._next = time.monotonic() + LINE_SECONDS
        say(state.now, err=True)

    def listen(self, event: Event | Building) -> None:
        before, noted = self._state.now, self._state.note
        self._state.listen(event)
        if self._state.note != noted:
            say(self._state.note, err=True)
        if isinstance(event, ProblemFinished):
            result = f"{event.finished} trials, {best_so_far(event.best)}"
            result = result if event.finished else "no choice of knobs is legal on this arch, so it gets no kernel"
            say(f"{_where(event.problem, event)}: {result}", err=True)
        elif not self._state.has_begun:
            if self._state.now != before:
                say(self._state.now, err=True)
        elif time.monotonic() >= self._next:
            say(f"{self._state.counts}, {self._state.rate}{clock_text(self._state.seconds_left)} left", err=True)
            if self._state.fleet:
                say(self._state.fleet, err=True)
            self._next = time.monotonic() + LINE_SECONDS


def fleet_text(fleet: FleetState) -> str:
    """The state of a fleet, such as "3 workers, 24 kernels compiled at once, 2 NVIDIA H200 97% busy"."""
    workers = "1 worker" if fleet.workers == 1 else f"{fleet.workers} workers"
    gpus = [
        f"{count} {gpu}" + (f" {fleet.busy[gpu]:.0%} busy" if gpu in fleet.busy else "")
        for gpu, count in fleet.gpus.items()
    ]
    return ", ".join([workers, f"{fleet.compiling} kernels compiled at once", *gpus])


def _where(problem: Problem, event: OfClass) -> str:
    return f"{problem.key} on {event.gpu}" if event.gpu else problem.key


def _reason(event: VariantNotTried | RaceDisturbed) -> str:
    return f"{event.gpu}: {event.reason}" if event.gpu else event.reason


def best_so_far(best: tuple[float, ...]) -> str:
    """The best fraction of copy in each regime; "-" in one in which the problem is not timed."""
    scores = ", ".join(f"{regime} {fraction_text(score)}" for regime, score in zip(REGIMES, best, strict=True))
    return f"best so far, as fraction of copy: {scores}"
