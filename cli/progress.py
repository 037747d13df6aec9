"""The progress of a search: a live display on a terminal, and lines of text anywhere else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hadagen.cli.output import LINE_SECONDS, clock_text, fraction_text, say
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

FEW_TRIALS = 4  # too few to tell the rate from


@dataclass(frozen=True)
class Building:
    """The compiler has built `done` of `kernels` kernels."""

    done: int
    kernels: int


@dataclass(frozen=True)
class GroupStarted:
    """A group of problems is searched, refined and written from now on. `problems`: how many it has. `seconds`: the
    most that it takes; None if there is no limit. `later`: the most seconds of each group after it."""

    problems: int
    seconds: float | None = None
    later: Sequence[float] = ()


@dataclass(frozen=True)
class Refining:
    """`done` of `kernels` kernels were timed in the current round of refining, on the GPUs of a class."""

    gpu: str
    done: int
    kernels: int


@dataclass(frozen=True)
class Writing:
    """The winners are written to a bundle."""


Shown = Event | Building | GroupStarted | Refining | Writing


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
    """How far a tune is, from its events. `problems`: how many there are in all groups. `refine_share`: the share of
    the time of a group that refining takes. `clock` gives seconds."""

    def __init__(
        self, problems: int = 0, refine_share: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.problems, self._refine_share = problems, refine_share
        self.outcomes: Counter[Outcome] = Counter()
        self.trials = 0  # of the groups so far, at their end
        self.finished = 0  # those of earlier runs included
        self.now = _CHOOSING
        self.raced = 0
        self.note = ""  # what went wrong for the first time, without an end to the search
        self.fleet = ""  # who works, and how busy; "" on one device
        self._began = clock()
        self._group: GroupStarted | None = None
        self._ended = 0  # groups
        self._before = 0, 0, 0  # problems, trials and finished trials of these
        self._forget()

    def _forget(self) -> None:
        """Begin a group."""
        self._group_began = self._clock()
        self._done: set[Problem] = set()  # whose trials are finished
        self._since = self._group_began  # when trials began
        self._tried = 0  # trials since then
        self._trying = ""
        self._built = False  # is the first batch
        self._refining: dict[str, Refining] = {}
        self._refining_since = 0.0

    def listen(self, event: Shown) -> None:
        if isinstance(event, GroupStarted):
            if self._group:
                self._ended += 1
                self._before = self._before[0] + self._group.problems, self.trials, self.finished
            self._group = event
            self._forget()
        elif isinstance(event, SearchStarted):
            self.problems = self.problems or event.problems
            self._count(event.trials, event.finished)
            self.now = _CHOOSING
            self._trying = "verifying kernels on the CPU" if event.estimated else "measuring kernels"
        elif isinstance(event, ProblemStarted):
            if self._prepares:
                self.now = f"{_CHOOSING} for {event.problem.key}"
        elif isinstance(event, Building):
            if self._prepares:
                self.now = f"building kernels: {event.done} of {event.kernels}"
        elif isinstance(event, BatchBuilt):
            if self._prepares:
                self.now, self._since = self._trying, self._clock()
            self._built = True
        elif isinstance(event, TrialFinished):
            self._count(event.trials, event.finished)
            self._tried += 1
            self.outcomes[event.trial.outcome] += 1
            self.now = f"{_where(event.trial.problem, event)}: {best_so_far(event.best)}"
        elif isinstance(event, ProblemFinished):
            self._done.add(event.problem)
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
        elif isinstance(event, Refining):
            if not event.done:
                self._refining_since = self._clock()
            self._refining[event.gpu] = event
            self.now = f"refining between the sizes of the search: {self._refined[0]} of {self._refined[1]} kernels"
        else:
            self.now = "writing the winners"

    def _count(self, trials: int, finished: int) -> None:
        self.trials, self.finished = self._before[1] + trials, self._before[2] + finished

    @property
    def _prepares(self) -> bool:
        """Whether there is nothing to try yet."""
        return not (self._tried or self._built)

    @property
    def _refined(self) -> tuple[int, int]:
        """The kernels that this round of refining has timed, and all of them, on all classes of GPUs."""
        return sum(each.done for each in self._refining.values()), sum(each.kernels for each in self._refining.values())

    @property
    def finished_problems(self) -> int:
        return self._before[0] + len(self._done)

    @property
    def counts(self) -> str:
        outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in self.outcomes.most_common())
        races = f", {self.raced} pairs raced" if self.raced else ""
        of = f"{'about ' if self._is_about else ''}{self.expected}"
        return f"{self.finished} of {of} trials" + (f" ({outcomes}{races})" if outcomes else "")

    @property
    def _begun(self) -> int:
        """The problems of all groups that have begun."""
        return self._before[0] + (self._group.problems if self._group else self.problems)

    @property
    def _is_about(self) -> bool:
        return 0 < self._begun < self.problems

    @property
    def expected(self) -> int:
        """The trials at the end of all groups; those of groups that have not begun are as many for each problem."""
        return round(self.trials * self.problems / self._begun) if self._is_about else self.trials

    @property
    def rate(self) -> str:
        """The rate, such as "3.2 trials/s"; "" if it is not known."""
        seconds = self._clock() - self._since
        return f"{self._tried / seconds:.1f} trials/s" if self._tried >= FEW_TRIALS and seconds > 0 else ""

    @property
    def seconds_left(self) -> float | None:
        """The seconds left until the end of all groups, refining too, by the rate and the limits; None if neither is
        known."""
        now, group = self._clock(), self._group or GroupStarted(0)
        left = [] if group.seconds is None else [self._group_began + group.seconds - now]
        usual = (self._group_began - self._began) / self._ended if self._ended else inf  # of a group
        searched = now - self._group_began
        done, kernels = self._refined
        if self._refining:
            if done and not left:  # how many rounds follow is not known
                left.append((now - self._refining_since) / done * (kernels - done))
        elif self.rate:
            to_search = (now - self._since) / self._tried * (self.trials - self.finished)
            left.append((searched + to_search) / (1 - self._refine_share) - searched)
        elif searched < usual < inf:
            left.append(usual - searched)
        if not left:
            return None
        return max(0.0, min(left)) + sum(min(usual, most) for most in group.later)

    def __rich__(self) -> RenderableType:
        bars = Table.grid(padding=(0, 1))
        for name, done, of, more in (
            ("problems", self.finished_problems, self.problems, ""),
            ("trials", self.finished, self.expected, self.rate),
        ):
            bars.add_row(name, ProgressBar(total=max(1, of), completed=done, width=40), f"{done}/{of}", more)
        others = {outcome: count for outcome, count in self.outcomes.items() if outcome is not Outcome.OK}
        failed = ", ".join(f"{count} {outcome.value}" for outcome, count in others.items())
        texts = f"{clock_text(self.seconds_left)} left", self.now, failed, self.fleet, self.note
        return Group(bars, *(Text(text) for text in texts if text))


_CHOOSING = "choosing kernels"


@contextmanager
def shown(problems: int = 0, refine_share: float = 0.0) -> Iterator[Callable[[Shown], None]]:
    """A listener whose events are shown on stderr until the end of the `with`. Arguments as for `State`."""
    state = State(problems, refine_share)
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(state, console=console, refresh_per_second=4, transient=True):
            yield state.listen
    else:
        yield _Lines(state).listen


class _Lines:
    """A line each minute, and one for the first thing that goes wrong."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._next = time.monotonic() + LINE_SECONDS

    def listen(self, event: Shown) -> None:
        state, noted = self._state, self._state.note
        state.listen(event)
        if state.note != noted:
            say(state.note, err=True)
        if time.monotonic() >= self._next:
            parts = f"{state.finished_problems} of {state.problems} problems", state.counts, state.rate
            left = f"{clock_text(state.seconds_left)} left; {state.now}"
            say(", ".join((*filter(None, parts), left)), err=True)
            if state.fleet:
                say(state.fleet, err=True)
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
