"""The search on a fleet: each class of GPUs has a search of its own, and all share the workers that compile.

A search on a fleet takes results as they come, and asks for new knobs as soon as there is room for them. `ROOM`
variants are in progress for each GPU: one is measured, one waits, and others are compiled, or are finished and not
recorded yet.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Lock
from typing import Any, TypeVar

from hadagen.compiler.toolchain import BuildFailure
from hadagen.errors import DeviceError, DisturbedError
from hadagen.fleet.client import DeviceClass, Fleet, hardware
from hadagen.measure import BestTimes, Cell, Variant, without_texts
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import Knobs
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Disturbed, Kernel, NotTried, Outcome, Provenance, Timing, Trial
from hadagen.tuner.events import Event, Listener, OfClass, SearchStarted, TrialFinished, VariantNotTried
from hadagen.tuner.pipeline import ATTEMPTS, WAKE_SECONDS, Ask, Build, Keep, failed_trial, repeated
from hadagen.tuner.search import first_guesses

ROOM = 4  # variants in progress for each GPU
GIVE_UP = 1.3  # times slower than the best at each probe cell: such a kernel is not timed further
GATHER_SECONDS = 0.2  # trials that come within this time are recorded together; no GPU waits for that
RACE_SECONDS = 300.0  # for a race that waits for its GPU
WAIT_SECONDS = 120.0  # for a GPU of the class to come back; Dask starts a worker that ended again within seconds

Value = TypeVar("Value")
_Result = Trial | VariantNotTried


class FleetGpus:
    """The GPUs of one class, as a runner for `tune`."""

    def __init__(self, fleet: Fleet, of: DeviceClass) -> None:
        self._fleet = fleet
        self.environment, self._arch = of.environment, of.arch
        self._last_there = time.monotonic()

    @property
    def count(self) -> int:
        return self._fleet.count(self.environment.gpu)

    @property
    def races_at_once(self) -> int:
        """As many as there are GPUs now."""
        return max(1, self.count)

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial | NotTried]]:
        """Measure variants on all GPUs of the class, in no order. Raises `DeviceError` if the fleet is gone."""
        waiting, results = iter(variants), SimpleQueue[tuple[Variant, Trial | NotTried] | BaseException]()
        under_way = 0
        while True:
            while under_way < ROOM * max(1, self.count) and (variant := next(waiting, None)):
                self.start(self._measured(variant), results.put)
                under_way += 1
            if not under_way:
                return
            self.check()
            try:
                result = results.get(timeout=WAKE_SECONDS)
            except Empty:
                continue
            under_way -= 1
            if isinstance(result, BaseException):
                raise result
            yield result

    def race(self, a: Variant, b: Variant, cells: Sequence[Cell]) -> list[tuple[float, float]]:
        """As `DeviceRunner.race`, on one GPU of the class that has exactly its environment."""
        a, b = (replace(each, kernel=each.kernel and without_texts(each.kernel)) for each in (a, b))
        self.check()
        try:
            times = self._fleet.wait(asyncio.wait_for(self._fleet.race(a, b, cells, self.environment), RACE_SECONDS))
        except asyncio.TimeoutError:
            raise DeviceError(f"no {self.environment.gpu} raced two kernels within {RACE_SECONDS:g} s") from None
        if isinstance(times, Disturbed):
            raise DisturbedError(times.reason)
        if isinstance(times, NotTried):
            raise DeviceError(times.reason)
        return times

    async def build(self, problem: Problem, knobs: Knobs, arch: Arch) -> Kernel | BuildFailure | NotTried:
        return await self._fleet.build(problem, knobs, arch)

    async def _measured(self, variant: Variant) -> tuple[Variant, Trial | NotTried]:
        return variant, await self.measure(variant)

    async def measure(self, variant: Variant) -> Trial | NotTried:
        """The trial of a variant, with its kernel."""
        assert variant.kernel is not None
        sent = replace(variant, kernel=without_texts(variant.kernel))
        trial = await self._fleet.measure(sent, self.environment.gpu, lambda value: self._is_sound(value, variant))
        return replace(trial, kernel=variant.kernel) if isinstance(trial, Trial) else trial

    def _is_sound(self, value: Any, variant: Variant) -> bool:
        """Whether a worker's answer can be the trial of this variant."""
        if isinstance(value, NotTried):
            return True
        assert variant.kernel is not None
        return (
            isinstance(value, Trial)
            and (value.problem, value.arch, value.knobs) == (variant.problem, self._arch, variant.knobs)
            and isinstance(value.outcome, Outcome)
            and value.provenance is Provenance.MEASURED
            and isinstance(value.detail, str)
            and isinstance(value.environment, type(self.environment))
            and hardware(value.environment) == hardware(self.environment)
            and value.environment.nvcc == variant.kernel.nvcc
            and isinstance(value.errors, dict)
            and all(type(error) is float and not error < 0 for error in value.errors.values())
            and isinstance(value.timings, tuple)
            and all(map(_is_time, value.timings))
            and bool(value.timings or value.outcome is not Outcome.OK)
        )

    def start(self, coroutine: Any, put: Callable[[Any], None]) -> Future[Any]:
        """Run a coroutine on the loop of the fleet. `put` gets its result, or its exception."""

        def done(future: Future[Any]) -> None:
            if not future.cancelled():
                put(future.exception() or future.result())

        future = asyncio.run_coroutine_threadsafe(coroutine, self._fleet.loop)
        future.add_done_callback(done)
        return future

    def check(self) -> None:
        """Raises `DeviceError` if the scheduler is gone, or if the class has had no GPU for `WAIT_SECONDS`."""
        if self._fleet.failure:
            raise self._fleet.failure
        if self.count:
            self._last_there = time.monotonic()
        elif time.monotonic() - self._last_there > WAIT_SECONDS:
            raise DeviceError(
                f"no worker at {self._fleet.address} has a {self.environment.gpu} any more; start one, then run the "
                "same command again to go on"
            )


def _is_time(timing: object) -> bool:
    return (
        isinstance(timing, Timing)
        and timing.elements > 0
        and all(isfinite(us) and us > 0 for us in (timing.us, timing.us_low, timing.us_high, timing.copy_us))
    )


class FleetPipeline(AbstractContextManager["FleetPipeline"]):
    """`Work` on the GPUs of one class (`runner`). It takes results as they come.

    Variants that compile to one kernel share its trial. Knobs that were `NotTried` come again, for `ATTEMPTS` in all.
    """

    def __init__(
        self,
        arch: Arch,
        build: Build | None,
        runner: FleetGpus,
        known: Iterable[Trial] = (),
        stopped: Flag | None = None,
    ) -> None:
        self._arch, self._gpus, self._stopped = arch, runner, stopped or Flag()
        self._results: SimpleQueue[_Result | BaseException] = SimpleQueue()
        self._tasks: set[Future[Any]] = set()
        self._again: list[tuple[Problem, Knobs]] = []
        self._attempts: Counter[tuple[Problem, Knobs]] = Counter()
        self._best = BestTimes(GIVE_UP)
        # The first trial of each kernel, and those that are measured now. Only the loop of the fleet changes them.
        self._of_kernel: dict[tuple[Problem, str], Trial] = {}
        self._coming: dict[tuple[Problem, str], asyncio.Future[Trial | NotTried]] = {}
        for trial in known:
            if trial.kernel is not None:
                self._of_kernel.setdefault((trial.problem, trial.kernel.digest), replace(trial, kernel=None))
            if trial.outcome is Outcome.OK:
                self._best.note(trial.problem, trial.timings)

    def __exit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()

    def run(self, ask: Ask, keep: Keep, listen: Listener, deadline: float = inf) -> bool:
        """As `Work.run`; setting `stopped` is what Ctrl-C does here. What is in progress at the end is dropped."""
        under_way = 0
        hungry = True  # since the last time that `ask` had nothing, trials came
        while not self._stopped.is_set() and (left := deadline - time.monotonic()) > 0:
            self._gpus.check()
            room = ROOM * max(1, self._gpus.count)
            if hungry and under_way <= room * 5 // 8:
                batch, self._again = self._again or ask(room - under_way), []
                for problem, knobs in batch:
                    self._start(problem, knobs)
                under_way += len(batch)
                hungry = bool(batch)
            if not under_way:
                break
            came = self._drain(min(left, WAKE_SECONDS))
            under_way -= len(came)
            hungry = hungry or bool(came)
            if trials := [result for result in came if isinstance(result, Trial)]:
                keep(trials)
            for result in came:
                if isinstance(result, VariantNotTried):
                    self._try_again(result)
                    listen(result)
                elif not isinstance(result, Trial):
                    raise result
        return self._stopped.is_set()

    def _drain(self, seconds: float) -> list[_Result | BaseException]:
        """The results that are there, after a wait for the first."""
        try:
            came = [self._results.get(timeout=seconds)]
        except Empty:
            return []
        time.sleep(GATHER_SECONDS)
        while not self._results.empty():
            came.append(self._results.get())
        return came

    def _try_again(self, result: VariantNotTried) -> None:
        variant = result.problem, result.knobs
        self._attempts[variant] += 1
        if self._attempts[variant] == ATTEMPTS:
            raise DeviceError(
                f"{result.problem.key} could not be tried in {ATTEMPTS} attempts ({result.reason}); check the workers, "
                "then run the same command again to go on"
            )
        self._again.append(variant)

    def _start(self, problem: Problem, knobs: Knobs) -> None:
        future = self._gpus.start(self._try(problem, knobs), self._results.put)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)

    async def _try(self, problem: Problem, knobs: Knobs) -> _Result:
        built = await self._gpus.build(problem, knobs, self._arch)
        if isinstance(built, BuildFailure):
            return failed_trial(problem, knobs, built.log, self._arch, self._gpus.environment)
        if isinstance(built, NotTried):
            return VariantNotTried(problem, knobs, built.reason)
        key = problem, built.digest
        while key in self._coming:
            await asyncio.shield(self._coming[key])
        if key in self._of_kernel:
            return repeated(self._of_kernel[key], knobs.to_dict(), built)
        coming = self._coming[key] = asyncio.get_running_loop().create_future()
        trial: Trial | NotTried = NotTried("the search ended")
        try:
            trial = await self._gpus.measure(
                Variant(problem, knobs.to_dict(), built, limits=self._best.limits(problem))
            )
            if isinstance(trial, Trial):
                self._of_kernel[key] = replace(trial, kernel=None)
        finally:
            coming.set_result(trial)
            del self._coming[key]
        if isinstance(trial, NotTried):
            return VariantNotTried(problem, knobs, trial.reason, trial.advice if isinstance(trial, Disturbed) else "")
        if trial.outcome is Outcome.OK:
            self._best.note(problem, trial.timings)
        return trial


class Guesses:
    """The first knobs of problems, which the workers find ahead of the searches. All classes of an arch share them."""

    def __init__(self, fleet: Fleet, arch: Arch, problems: Iterable[Problem], trials: int) -> None:
        self._found = {
            problem: asyncio.run_coroutine_threadsafe(fleet.compute(first_guesses, problem, arch, trials), fleet.loop)
            for problem in problems
        }

    def __call__(self, problem: Problem, wait: bool) -> Sequence[Knobs] | None:
        """As `TuneOptions.guess`. Raises `DeviceError` if no worker can find them."""
        found = self._found[problem]
        return found.result() if wait or found.done() else None


def at_once(tasks: Sequence[Callable[[], Value]], stopped: Flag) -> list[Value]:
    """The results of tasks that run side by side. At Ctrl-C, or when one raises, `stopped` is set for the others, which
    then end; the first that was raised is raised."""
    with ThreadPoolExecutor(max(1, len(tasks)), "hadagen-class") as threads:
        running = [threads.submit(task) for task in tasks]
        try:
            while wait(running, WAKE_SECONDS, FIRST_EXCEPTION).not_done:
                if any(task.done() and task.exception() for task in running):
                    break
        finally:
            if not all(task.done() and not task.exception() for task in running):
                stopped.set()
    return [task.result() for task in running]


class Summed:
    """Serializes the events of several searches for one listener, and adds the class of GPUs if there are several.
    Counts are those of all searches together, and the first event comes when all have begun."""

    def __init__(self, listen: Listener, searches: int) -> None:
        self._listen, self._searches = listen, searches
        self._lock = Lock()
        self._began: dict[int, SearchStarted] = {}
        self._counts: dict[int, tuple[int, int]] = {}
        self._early: list[Event] = []

    def of(self, search: int) -> Listener:
        """The listener of one search."""
        return partial(self._hear, search)

    def tell(self, event: Event) -> None:
        """An event of no search."""
        with self._lock:
            self._listen(event)

    def _hear(self, search: int, event: Event) -> None:
        with self._lock:
            if isinstance(event, SearchStarted):
                self._began[search] = event
                self._counts[search] = event.finished, event.trials
                if len(self._began) == self._searches:
                    problems = sum(each.problems for each in self._began.values())
                    finished, trials = self._totals
                    self._listen(replace(event, problems=problems, finished=finished, trials=trials))
                    for early in self._early:
                        self._listen(early)
                return
            if isinstance(event, TrialFinished):
                self._counts[search] = event.finished, event.trials
                finished, trials = self._totals
                event = replace(event, finished=finished, trials=trials)
            if self._searches > 1 and isinstance(event, OfClass):
                event = replace(event, gpu=self._began[search].environment.gpu)
            if len(self._began) < self._searches:
                self._early.append(event)
            else:
                self._listen(event)

    @property
    def _totals(self) -> tuple[int, int]:
        """Trials that are finished, and those at the end."""
        finished, trials = zip(*self._counts.values(), strict=True)
        return sum(finished), sum(trials)
