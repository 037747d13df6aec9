"""Where `hadagen tune` searches: on the GPU of this machine, on its CPU, or on each class of GPUs of a fleet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from threading import Event as Flag
from typing import TYPE_CHECKING, TypeVar

from hadagen.cli.device import find_target, find_toolchain, measuring, refusal
from hadagen.cli.output import say
from hadagen.cli.progress import Refining, Shown, fleet_text, in_parts
from hadagen.compiler.toolchain import Toolchain
from hadagen.errors import DeviceError, UsageError
from hadagen.measure import Cell, DeviceRunner, Runner, Variant
from hadagen.plan.arch import Arch, load_arch
from hadagen.plan.knobs import Knobs
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Disturbed, Environment, Kernel, NotTried, Outcome, Trial
from hadagen.tuner.estimate import EstimateRunner
from hadagen.tuner.events import FleetChanged, Listener
from hadagen.tuner.pipeline import Build, Pipeline, Work
from hadagen.tuner.search import MEASURED_TRIALS

if TYPE_CHECKING:
    from hadagen.fleet.client import Fleet

MOST_FAILURES = 5  # of kernels that were right when they were tuned; then it is the device
LOCAL = "local"  # the fleet of this machine alone

Value = TypeVar("Value")
Show = Callable[[Shown], None]


@dataclass(frozen=True)
class Searcher:
    """One search, with what builds and measures for it. Fields as in `TuneOptions`."""

    arch: Arch
    runner: Runner
    build: Build | None
    listen: Listener
    work: Callable[..., Work]
    guess: Callable[[Problem, bool], Sequence[Knobs] | None] | None = None


class Failures(list[str]):
    """Sentences on kernels that failed though they were right when they were tuned."""

    def take(self, variant: Variant, trial: Trial | NotTried) -> Iterator[Trial]:
        """Yields the trials among the results, and adds a sentence for each result that is no trial or failed. Raises
        `DeviceError` when `MOST_FAILURES` have failed."""
        if isinstance(trial, Disturbed):
            said = f"kernels of {variant.problem.key} were not timed again, because {trial.reason}; {trial.advice}"
            if said not in self:
                self.append(said)
        elif isinstance(trial, NotTried):
            self.append(f"a kernel of {variant.problem.key} was not timed again: {trial.reason}; refine again")
        else:
            if trial.outcome is not Outcome.OK and variant.kernel:
                self._fail(trial, variant.kernel)
            yield trial

    def _fail(self, trial: Trial, kernel: Kernel) -> None:
        lost = trial.outcome in (Outcome.WRONG_ANSWER, Outcome.UNSTABLE)
        advice = "it wins nothing any more" if lost else "it was left out"
        self.append(refusal(trial.problem, kernel.digest, trial, advice))
        if len(self) == MOST_FAILURES:
            raise DeviceError(f"{self[-1]}; so many failures mean that the device fails; run hadagen doctor")


@dataclass(frozen=True)
class Again:
    """How kernels are timed once more. No kernel is begun in the last second before `deadline`, so that the measuring
    process, which has the next kernel already, need not be ended."""

    show: Show
    deadline: float

    def time(
        self,
        runner: Runner,
        gpu: Environment,
        cells: Mapping[Problem, Sequence[Cell]],
        variants: Sequence[Variant],
        failures: Failures,
    ) -> Iterator[Trial]:
        # A kernel that is slow here may be fast there, so that none is given up.
        wanted = (replace(variant, cells=tuple(cells[variant.problem]), limits={}) for variant in variants)
        in_time = takewhile(lambda _: time.monotonic() < self.deadline - 1, wanted)
        self.show(Refining(gpu.gpu, 0, len(variants)))
        for done, (variant, trial) in enumerate(runner.run(in_time), 1):
            yield from failures.take(variant, trial)
            self.show(Refining(gpu.gpu, done, len(variants)))


@dataclass
class Here:
    """This machine, with its GPU if the GPU has the arch."""

    target: Arch
    gpu: Environment | None
    index: int
    toolchain: Toolchain
    failures: Failures
    until_the_end: ExitStack

    @cached_property
    def _device(self) -> DeviceRunner:
        """Measures in one process for all searches, which takes seconds to start."""
        assert self.gpu
        return self.until_the_end.enter_context(measuring(self.gpu, self.index, self.toolchain))

    @property
    def targets(self) -> list[tuple[Arch, Environment | None]]:
        return [(self.target, self.gpu)]

    @contextmanager
    def searchers(
        self, problems: Sequence[Problem], trials: int | None, stop: Flag, show: Show
    ) -> Iterator[list[Searcher]]:
        toolchain, target = self.toolchain, self.target
        runner = self._device if self.gpu else EstimateRunner(target, stop)
        build = in_parts(lambda sources: toolchain.build(sources, target, stopped=stop), show)
        yield [Searcher(target, runner, build, show, Pipeline)]

    def each(self, tasks: Sequence[Callable[[], Value]], stop: Flag) -> list[Value]:
        """The results of the tasks, one for each of `targets`. Tasks run in this thread, because it gets Ctrl-C."""
        return [task() for task in tasks]

    def again(
        self, gpu: Environment, again: Again, cells: Mapping[Problem, Sequence[Cell]], variants: Sequence[Variant]
    ) -> Iterator[Trial]:
        """Times kernels once more, for `refine`."""
        yield from again.time(self._device, gpu, cells, variants, self.failures)


@dataclass
class There:
    """A fleet, with a searcher for each class of GPUs."""

    fleet: Fleet
    only: dict[str, list[int | str]]
    failures: Failures

    def __post_init__(self) -> None:
        self._classes = self.fleet.classes  # the classes that the fleet has at the start

    @cached_property
    def targets(self) -> list[tuple[Arch, Environment | None]]:
        return [(load_arch(each.arch).narrowed(self.only), each.environment) for each in self._classes]

    @contextmanager
    def searchers(
        self, problems: Sequence[Problem], trials: int | None, stop: Flag, show: Show
    ) -> Iterator[list[Searcher]]:
        from hadagen.tuner.fleet_search import FleetGpus, FleetPipeline, Guesses, Summed

        classes = self._classes
        targets = {each.arch: target for each, (target, _) in zip(classes, self.targets, strict=True)}
        guesses = {
            name: Guesses(self.fleet, target, problems, MEASURED_TRIALS if trials is None else trials)
            for name, target in targets.items()
        }
        summed = Summed(show, len(classes))
        self.fleet.look = lambda state: summed.tell(FleetChanged(state))
        try:
            yield [
                Searcher(
                    targets[each.arch],
                    FleetGpus(self.fleet, each),
                    None,
                    summed.of(i),
                    FleetPipeline,
                    guesses[each.arch],
                )
                for i, each in enumerate(classes)
            ]
        finally:
            self.fleet.look = lambda state: None

    def each(self, tasks: Sequence[Callable[[], Value]], stop: Flag) -> list[Value]:
        """The results of the tasks, one for each of `targets`, which run side by side."""
        from hadagen.tuner.fleet_search import at_once

        return at_once(tasks, stop)

    def again(
        self, gpu: Environment, again: Again, cells: Mapping[Problem, Sequence[Cell]], variants: Sequence[Variant]
    ) -> Iterator[Trial]:
        """As `Here.again`."""
        from hadagen.tuner.fleet_search import FleetGpus

        (of,) = (each for each in self._classes if each.environment.gpu == gpu.gpu)
        yield from again.time(FleetGpus(self.fleet, of), gpu, cells, variants, self.failures)


@contextmanager
def place(
    fleet: str | None, arch: str | None, only: dict[str, list[int | str]], device: int | None, compiler: str
) -> Iterator[Here | There]:
    """The place to tune: this machine or a fleet. Raises `DeviceError` if there is no such device or fleet, or if the
    fleet cannot tune."""
    failures = Failures()
    if fleet is None:
        target, gpu = find_target(arch, device)
        with ExitStack() as until_the_end:
            yield Here(target.narrowed(only), gpu, device or 0, find_toolchain(compiler), failures, until_the_end)
        return
    if device is not None:
        raise UsageError("--device picks one GPU for a search without a fleet; leave out --device or --fleet")
    from hadagen.fleet.client import Fleet

    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # `Fleet` says what matters in its log
    with ExitStack() as until_the_end:
        address = fleet
        if fleet == LOCAL:
            from hadagen.fleet.local import local_cluster

            address = until_the_end.enter_context(local_cluster())
        there = until_the_end.enter_context(
            Fleet(address, compiler, None if arch is None else [arch], lambda sentence: say(sentence, err=True))
        )
        _check(there, arch)
        say(f"fleet at {address}: {fleet_text(there.state)}; its dashboard is {there.dashboard}", err=True)
        yield There(there, only, failures)


def _check(fleet: Fleet, arch: str | None) -> None:
    """Raises `DeviceError` if no worker of a fleet measures, or none compiles."""
    start = f"dask worker {fleet.address} --preload hadagen.fleet"
    if not fleet.classes:
        of = f" of {arch}" if arch else ""
        raise DeviceError(
            f"no worker of the fleet at {fleet.address} has a GPU{of}; start `{start}` where there is one"
        )
    if not fleet.compiling:
        raise DeviceError(
            f"no worker of the fleet at {fleet.address} compiles; start `{start}` with more --nthreads than it has GPUs"
        )
