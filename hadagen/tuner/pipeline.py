"""Building one batch while another is measured."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import current_thread, main_thread

from hadagen.arch import Arch
from hadagen.codegen import render
from hadagen.knobs import Knobs
from hadagen.launch import Source
from hadagen.measure import Runner, Variant
from hadagen.problem import Problem
from hadagen.space import build_plan
from hadagen.toolchain import BuildFailure
from hadagen.trial import Kernel, Outcome, Provenance, Trial, utc_now
from hadagen.tuner.events import BatchBuilt, Listener

BATCHES = 3  # under way at once: one is measured, one is built, one is being built
BATCH_SIZE = 64

Batch = Sequence[tuple[Problem, Knobs]]
Build = Callable[[Sequence[Source]], Sequence[Kernel | BuildFailure]]
_KernelKey = tuple[Problem, str]  # variants with the same key do the same thing in the same time


@dataclass(frozen=True)
class _BuiltBatch:
    """A batch after the compiler: what will be measured, what has a kernel that others had before, what failed."""

    fresh: tuple[Variant, ...]
    known: tuple[Variant, ...]
    failed: tuple[tuple[Problem, Knobs, BuildFailure], ...]
    seconds: float


class Pipeline:
    """Batches of knobs in; out come, in the same order, a `BatchBuilt` of each and a trial of each of its knobs.

    `build` compiles variants and answers in their order; None for a runner that needs no kernels. A kernel is measured
    once: other knobs that compile to it get its trial under their name. `known`: trials whose kernels were measured
    before. As a context manager it ends its threads.
    """

    def __init__(self, arch: Arch, build: Build | None, runner: Runner, known: Iterable[Trial] = ()) -> None:
        self._arch, self._build_kernels, self._runner = arch, build, runner
        # The first trial of each kernel; without the kernel, which would fill the memory.
        self._of_kernel: dict[_KernelKey, Trial] = {}
        for trial in known:
            self._remember(trial)
        self._compiled = set(self._of_kernel)  # and those that are not measured yet
        self._results: SimpleQueue[BatchBuilt | Trial | BaseException | None] = SimpleQueue()  # None ends a batch
        self._under_way = 0  # batches
        self._stopped = Flag()
        self._builder = ThreadPoolExecutor(1, "hadagen-build")
        self._measurer = ThreadPoolExecutor(1, "hadagen-measure")

    def run(
        self, ask: Callable[[], Batch], keep: Callable[[Trial], None], listen: Listener, deadline: float = inf
    ) -> bool:
        """Try the batches that `ask` gives, until it has no more, `time.monotonic()` is past the deadline, or Ctrl-C;
        what is under way then is finished. `keep` gets each trial, `listen` each `BatchBuilt`.

        `BATCHES` are under way at once. Another is asked for when one came to its end; an empty one says that there is
        none now. Returns whether Ctrl-C came. Raises what was raised in a thread.
        """
        interrupted = False
        try:
            for result in self._come(ask, deadline):
                if isinstance(result, Trial):
                    with _finishing() as interrupts:
                        keep(result)
                    if interrupts:
                        raise KeyboardInterrupt
                else:
                    listen(result)
        except KeyboardInterrupt:
            interrupted = True
        with _finishing() as interrupts:
            for trial in self._stop():
                keep(trial)
        return interrupted or bool(interrupts)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _come(self, ask: Callable[[], Batch], deadline: float) -> Iterator[BatchBuilt | Trial]:
        """What comes of the batches, as `run` gets it."""
        self._refill(ask, deadline)
        while self._under_way and (left := deadline - time.monotonic()) > 0:
            try:
                result = self._results.get(timeout=None if left == inf else left)
            except Empty:
                return
            if isinstance(result, BaseException):
                raise result
            if result is None:
                self._under_way -= 1
                self._refill(ask, deadline)
            else:
                yield result

    def _stop(self) -> list[Trial]:
        """Start nothing more, wait for what is under way, and return the trials that came of it."""
        self._stopped.set()
        self._builder.shutdown(cancel_futures=True)
        self._measurer.shutdown(cancel_futures=True)
        trials = []
        while not self._results.empty():
            if isinstance(result := self._results.get(), Trial):
                trials.append(result)
        return trials

    def _refill(self, ask: Callable[[], Batch], deadline: float) -> None:
        while self._under_way < BATCHES and time.monotonic() < deadline and (batch := ask()):
            built = self._builder.submit(self._build, batch)
            self._measurer.submit(self._measure, built)
            self._under_way += 1

    def _build(self, batch: Batch) -> _BuiltBatch:
        started = time.monotonic()
        if self._build_kernels is None:
            return _BuiltBatch(tuple(Variant(problem, knobs.to_dict()) for problem, knobs in batch), (), (), 0.0)
        plans = [build_plan(problem, knobs, self._arch) for problem, knobs in batch]
        kernels = self._build_kernels([render(plan) for plan in plans])
        fresh: list[Variant] = []
        known: list[Variant] = []
        failed: list[tuple[Problem, Knobs, BuildFailure]] = []
        for (problem, knobs), kernel in zip(batch, kernels, strict=True):
            if isinstance(kernel, BuildFailure):
                failed.append((problem, knobs, kernel))
                continue
            key = _key(problem, kernel)
            (known if key in self._compiled else fresh).append(Variant(problem, knobs.to_dict(), kernel))
            self._compiled.add(key)
        return _BuiltBatch(tuple(fresh), tuple(known), tuple(failed), time.monotonic() - started)

    def _measure(self, future: Future[_BuiltBatch]) -> None:
        try:
            built = future.result()
            self._results.put(BatchBuilt(len(built.fresh), len(built.known), len(built.failed), built.seconds))
            for problem, knobs, failure in built.failed:
                self._results.put(self._failed_trial(problem, knobs, failure))
            for _, trial in self._runner.run(self._until_stopped(built.fresh)):
                self._remember(trial)
                self._results.put(trial)
            if not self._stopped.is_set():  # else some of these kernels may have no trial
                for variant in built.known:
                    self._results.put(self._same_kernel_trial(variant))
                self._results.put(None)
        except BaseException as error:  # for the main thread to raise
            self._stopped.set()
            self._results.put(error)

    def _until_stopped(self, variants: Sequence[Variant]) -> Iterator[Variant]:
        for variant in variants:
            if self._stopped.is_set():
                return
            yield variant

    def _remember(self, trial: Trial) -> None:
        if trial.kernel is not None:
            self._of_kernel.setdefault(_key(trial.problem, trial.kernel), replace(trial, kernel=None))

    def _failed_trial(self, problem: Problem, knobs: Knobs, failure: BuildFailure) -> Trial:
        """The trial of knobs whose source does not compile. On no device (`gpu` is ""), it is an estimate."""
        environment = self._runner.environment
        return Trial(
            problem=problem,
            arch=self._arch.name,
            knobs=knobs.to_dict(),
            outcome=Outcome.COMPILE_FAILED,
            provenance=Provenance.MEASURED if environment.gpu else Provenance.ESTIMATED,
            detail=failure.log,
            environment=environment,
            date=utc_now(),
        )

    def _same_kernel_trial(self, variant: Variant) -> Trial:
        """The trial of knobs that compile to the kernel that other knobs had before."""
        assert variant.kernel is not None
        first = self._of_kernel[_key(variant.problem, variant.kernel)]
        return replace(
            first,
            knobs=variant.knobs,
            kernel=variant.kernel,
            detail=f"same kernel as {Knobs.from_dict(first.knobs)}",
            date=utc_now(),
            seconds=0.0,
        )


@contextmanager
def _finishing() -> Iterator[list[int]]:
    """Within it Ctrl-C interrupts nothing, but adds to the list: what is under way ends soon, and is then kept."""
    came: list[int] = []
    # A program that handles or ignores it in its own way goes on doing so. Only the main thread may change that.
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _key(problem: Problem, kernel: Kernel) -> _KernelKey:
    return problem, kernel.digest
