"""Builds one batch of variants while another is measured, on one device."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import takewhile
from math import inf
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import current_thread, main_thread
from typing import Any, Protocol

from hadagen.compiler.codegen import render
from hadagen.compiler.toolchain import BuildFailure
from hadagen.errors import DisturbedError
from hadagen.measure import Runner, Variant
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import Knobs, knobs_text, plan_of
from hadagen.problem.launch import Source
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Disturbed, Environment, Kernel, NotTried, Outcome, Provenance, Trial, utc_now
from hadagen.tuner.events import BatchBuilt, Listener, VariantNotTried

ATTEMPTS = 3  # to compile a variant whose compiler dies; then the variant is to blame
BATCHES = 3  # in progress at once: one is measured, one is built, one is being built
BATCH_SIZE = 64
WAKE_SECONDS = 1.0

Batch = list[tuple[Problem, Knobs]]  # legal ones
Ask = Callable[[int], Batch]  # of at most so many variants
Keep = Callable[[Sequence[Trial]], None]
_Result = BatchBuilt | VariantNotTried | Trial
_Built = Kernel | BuildFailure | NotTried | None  # None: the runner needs no kernels
Build = Callable[[Sequence[Source]], Sequence[Kernel | BuildFailure | NotTried]]
_KernelKey = tuple[Problem, str]  # variants with the same key do the same thing in the same time


class Work(AbstractContextManager["Work"], Protocol):
    """Builds and measures what a search asks for. As a context manager it ends its threads."""

    def run(self, ask: Ask, keep: Keep, listen: Listener, deadline: float = inf) -> bool:
        """Try the batches that `ask` returns. `keep` gets the trials, `listen` all other results.

        Ends when `ask` has no more, at the deadline (of `time.monotonic()`), or at Ctrl-C. An empty batch means that
        there is none now: more may come when trials were kept. Returns whether Ctrl-C came.
        """


class Pipeline(AbstractContextManager["Pipeline"]):
    """Takes batches of knobs. Returns, in the same order, a `BatchBuilt` for each batch and a trial for its knobs.

    `build` compiles variants and returns results in their order; None for a runner that needs no kernels. A kernel is
    measured once: other knobs that compile to it get its trial with their own knobs. Knobs that were `NotTried` come
    again in a later batch, for `ATTEMPTS` in all; then their trial has failed, or the run if the device was disturbed.
    `known`: trials whose kernels were measured before. `stopped`: set to stop building. As a context manager it ends
    its threads.
    """

    def __init__(
        self, arch: Arch, build: Build | None, runner: Runner, known: Iterable[Trial] = (), stopped: Flag | None = None
    ) -> None:
        self._arch, self._build_kernels, self._runner = arch, build, runner
        # The first trial of each kernel; without the kernel, which would fill the memory.
        self._of_kernel: dict[_KernelKey, Trial] = {}
        for trial in known:
            self._remember(trial)
        self._results: SimpleQueue[_Result | BaseException | None] = SimpleQueue()  # None ends a batch
        self._under_way = 0  # batches
        self._attempts: Counter[tuple[Problem, Knobs]] = Counter()  # of knobs that were not tried
        self._again: list[tuple[Problem, Knobs]] = []  # knobs that come again in the next batch
        self._stopped = stopped or Flag()
        self._builder = ThreadPoolExecutor(1, "hadagen-build")
        self._measurer = ThreadPoolExecutor(1, "hadagen-measure")

    def run(self, ask: Ask, keep: Keep, listen: Listener, deadline: float = inf) -> bool:
        """As `Work.run`. At the end the variant that is measured is finished, and builds are dropped.

        `BATCHES` are in progress at once; the next is asked for when one is complete. Raises what a thread raised, and
        `DisturbedError` if the device was busy or throttled in all attempts at some knobs.
        """
        interrupted = False
        try:
            for results in self._come(ask, deadline):
                trials = [result for result in results if isinstance(result, Trial)]
                with _finishing() as interrupts:
                    if trials:
                        keep(trials)
                if interrupts:
                    raise KeyboardInterrupt
                for result in results:
                    if not isinstance(result, Trial):
                        listen(result)
        except KeyboardInterrupt:
            interrupted = True
        except DisturbedError:
            if trials := self._stop():
                keep(trials)
            raise
        with _finishing() as interrupts:
            if trials := self._stop():
                keep(trials)
        return interrupted or bool(interrupts)

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _come(self, ask: Ask, deadline: float) -> Iterator[list[_Result]]:
        """The results of the batches as they come, those that are there at the same time together."""
        self._refill(ask, deadline)
        while self._under_way and (left := deadline - time.monotonic()) > 0:
            try:
                # Wake up now and then: Ctrl-C just before a wait begins does not end that wait.
                came = [self._results.get(timeout=min(left, WAKE_SECONDS))]
            except Empty:
                continue
            # What ends a batch, or the run, waits until all that came before is kept.
            while isinstance(came[-1], _Result) and not self._results.empty():
                came.append(self._results.get())
            last = came[-1]
            yield [
                self._attempted(result) if isinstance(result, VariantNotTried) else result
                for result in came
                if isinstance(result, _Result)
            ]
            if isinstance(last, BaseException):
                raise last
            if last is None:
                self._under_way -= 1
                self._refill(ask, deadline)

    def _attempted(self, result: VariantNotTried) -> _Result:
        """The same result, and its knobs come again; after the last attempt a failed trial, if the device is not to
        blame."""
        variant = result.problem, result.knobs
        self._attempts[variant] += 1
        if self._attempts[variant] < ATTEMPTS:
            self._again.append(variant)
            return result
        if result.advice:
            raise DisturbedError(
                f"nothing can be timed: {result.reason}, in each of {ATTEMPTS} attempts; {result.advice}; finished "
                "trials are kept"
            )
        return self._failed_trial(*variant, f"{result.reason}, in each of {ATTEMPTS} attempts")

    def _stop(self) -> list[Trial]:
        """Start nothing more, wait for work in progress, and return its trials."""
        self._stopped.set()
        self._builder.shutdown(cancel_futures=True)
        self._measurer.shutdown(cancel_futures=True)
        trials = []
        while not self._results.empty():
            if isinstance(result := self._results.get(), Trial):
                trials.append(result)
        return trials

    def _refill(self, ask: Ask, deadline: float) -> None:
        while self._under_way < BATCHES and time.monotonic() < deadline:
            batch, self._again = self._again or ask(BATCH_SIZE), []
            if not batch:
                return
            self._measurer.submit(self._measure, batch, self._builder.submit(self._build, batch))
            self._under_way += 1

    def _build(self, batch: Batch) -> Sequence[_Built]:
        """The kernel of each source of a batch, or why it has none."""
        if self._build_kernels is None:
            return [None] * len(batch)
        plans = (plan_of(problem, knobs, starts_early=self._arch.starts_early) for problem, knobs in batch)
        return self._build_kernels([render(plan) for plan in plans])

    def _measure(self, batch: Batch, built: Future[Sequence[_Built]]) -> None:
        try:
            fresh: list[Variant] = []
            known: list[Variant] = []  # other knobs have the same kernel
            without: list[Trial | VariantNotTried] = []  # a kernel
            seen = set(self._of_kernel)
            for (problem, knobs), kernel in zip(batch, built.result(), strict=True):
                if isinstance(kernel, BuildFailure):
                    without.append(self._failed_trial(problem, knobs, kernel.log))
                elif isinstance(kernel, NotTried):
                    without.append(VariantNotTried(problem, knobs, kernel.reason))
                else:
                    key = (problem, kernel.digest) if kernel else None
                    (known if key in seen else fresh).append(Variant(problem, knobs.to_dict(), kernel))
                    if key:
                        seen.add(key)
            failed = sum(isinstance(each, Trial) for each in without)
            for event in (BatchBuilt(len(fresh), len(known), failed), *without):
                self._results.put(event)
            for variant, result in self._runner.run(takewhile(lambda _: not self._stopped.is_set(), fresh)):
                if isinstance(result, Trial):
                    self._remember(result)
                    self._results.put(result)
                else:
                    self._not_tried(variant, result.reason, result.advice if isinstance(result, Disturbed) else "")
            if not self._stopped.is_set():  # if stopped, some of these kernels may have no trial
                for variant in known:
                    self._repeat(variant)
                self._results.put(None)
        except BaseException as error:  # for the main thread to raise
            self._stopped.set()
            self._results.put(error)

    def _remember(self, trial: Trial) -> None:
        if trial.kernel is not None:
            self._of_kernel.setdefault((trial.problem, trial.kernel.digest), replace(trial, kernel=None))

    def _failed_trial(self, problem: Problem, knobs: Knobs, detail: str) -> Trial:
        return failed_trial(problem, knobs, detail, self._arch, self._runner.environment)

    def _not_tried(self, variant: Variant, reason: str, advice: str = "") -> None:
        self._results.put(VariantNotTried(variant.problem, Knobs.from_dict(variant.knobs), reason, advice))

    def _repeat(self, variant: Variant) -> None:
        """Report the trial of the same kernel, which other knobs had before, for these knobs."""
        assert variant.kernel is not None  # a runner without kernels has no known ones
        first = self._of_kernel.get((variant.problem, variant.kernel.digest))
        if first is None:
            self._not_tried(variant, "other knobs have the same kernel, which was not tried")
            return
        self._results.put(repeated(first, variant.knobs, variant.kernel))


def failed_trial(problem: Problem, knobs: Knobs, detail: str, arch: Arch, environment: Environment) -> Trial:
    """The trial of knobs whose source does not compile. Without a device (`gpu` is "") it is an estimate."""
    return Trial(
        problem=problem,
        arch=arch.name,
        knobs=knobs.to_dict(),
        outcome=Outcome.COMPILE_FAILED,
        provenance=Provenance.MEASURED if environment.gpu else Provenance.ESTIMATED,
        detail=detail,
        environment=environment,
        date=utc_now(),
    )


def repeated(first: Trial, knobs: dict[str, Any], kernel: Kernel) -> Trial:
    """The trial of knobs whose kernel had one before."""
    detail = f"same kernel as {knobs_text(first.knobs)}"
    return replace(first, knobs=knobs, kernel=kernel, detail=detail, date=utc_now(), seconds=0.0)


@contextmanager
def _finishing() -> Iterator[list[int]]:
    """A context in which Ctrl-C adds to the list instead of interrupting, so that work in progress ends and is kept."""
    came: list[int] = []
    # A program with its own handler keeps it. Only the main thread may change handlers.
    interrupting = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if current_thread() is main_thread() and signal.getsignal(number) is signal.default_int_handler
    ]
    for number in interrupting:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        for number in interrupting:
            signal.signal(number, signal.default_int_handler)
