"""Building one batch while another is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from queue import Empty, SimpleQueue
from threading import Event as Flag

from hadagen.arch import Arch
from hadagen.codegen import Source, render
from hadagen.knobs import Knobs
from hadagen.launch import LaunchSpec
from hadagen.measure import Candidate, Runner
from hadagen.problem import Problem
from hadagen.space import build_plan
from hadagen.toolchain import BuildFailure
from hadagen.trial import Environment, Kernel, Outcome, Provenance, Trial

BATCHES = 3  # under way at once: one is measured, one is built, one is being built
BATCH_SIZE = 64

Build = Callable[[Sequence[tuple[Source, LaunchSpec]]], Sequence[Kernel | BuildFailure]]
KernelKey = tuple[Problem, str]


@dataclass(frozen=True)
class Built:
    """A batch after the compiler: what will be measured, what has a kernel that is measured elsewhere, what failed."""

    fresh: tuple[Candidate, ...]
    known: tuple[Candidate, ...]
    failed: tuple[tuple[Problem, Knobs, BuildFailure], ...]
    seconds: float


@dataclass(frozen=True)
class Measured:
    """The end of a batch: all trials of `built.fresh` came before."""

    built: Built


Result = Built | Trial | Measured


def kernel_key(problem: Problem, kernel: Kernel) -> KernelKey:
    """Candidates with the same key do the same thing in the same time."""
    return problem, kernel.digest


def failed_trial(problem: Problem, knobs: Knobs, failure: BuildFailure, arch: Arch, environment: Environment) -> Trial:
    """The trial of knobs whose source does not compile. On no device (`gpu` is ""), it is an estimate."""
    return Trial(
        problem=problem,
        arch=arch.name,
        knobs=knobs.to_dict(),
        outcome=Outcome.COMPILE_FAILED,
        provenance=Provenance.MEASURED if environment.gpu else Provenance.ESTIMATED,
        detail=failure.log,
        environment=environment,
        date=_now(),
    )


def same_kernel_trial(candidate: Candidate, of_kernel: Mapping[KernelKey, Trial]) -> Trial:
    """The trial of knobs that compile to the kernel that other knobs had before, whose trial is among `of_kernel`."""
    assert candidate.kernel is not None
    first = of_kernel[kernel_key(candidate.problem, candidate.kernel)]
    return replace(
        first,
        knobs=candidate.knobs,
        kernel=candidate.kernel,
        detail=f"same kernel as {Knobs.from_dict(first.knobs)}",
        date=_now(),
        seconds=0.0,
    )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Pipeline:
    """Batches of knobs in; for each, in the same order, a `Built`, its trials and a `Measured` out.

    `build` compiles variants and answers in their order; None for a runner that needs no kernels. `known`: kernels that
    need not be measured. As a context manager it ends its threads.
    """

    def __init__(self, arch: Arch, build: Build | None, runner: Runner, known: set[KernelKey]) -> None:
        self._arch, self._build_kernels, self._runner, self._known = arch, build, runner, known
        self._results: SimpleQueue[Result | BaseException] = SimpleQueue()
        self._stopped = Flag()
        self._builder = ThreadPoolExecutor(1, "hadagen-build")
        self._measurer = ThreadPoolExecutor(1, "hadagen-measure")

    def submit(self, batch: Sequence[tuple[Problem, Knobs]]) -> None:
        built = self._builder.submit(self._build, batch)
        self._measurer.submit(self._measure, built)

    def next(self, timeout: float | None = None) -> Result | None:
        """The next result, or None after `timeout` seconds. Raises what was raised in a thread."""
        try:
            result = self._results.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> list[Trial]:
        """Start nothing more, wait for what is under way, and return the trials that came of it."""
        self._stopped.set()
        self._builder.shutdown(cancel_futures=True)
        self._measurer.shutdown(cancel_futures=True)
        trials = []
        while not self._results.empty():
            if isinstance(result := self._results.get(), Trial):
                trials.append(result)
        return trials

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _build(self, batch: Sequence[tuple[Problem, Knobs]]) -> Built:
        started = time.monotonic()
        if self._build_kernels is None:
            return Built(tuple(Candidate(problem, knobs.to_dict()) for problem, knobs in batch), (), (), 0.0)
        plans = [build_plan(problem, knobs, self._arch) for problem, knobs in batch]
        kernels = self._build_kernels([(render(plan), plan.launch) for plan in plans])
        fresh: list[Candidate] = []
        known: list[Candidate] = []
        failed: list[tuple[Problem, Knobs, BuildFailure]] = []
        for (problem, knobs), kernel in zip(batch, kernels, strict=True):
            if isinstance(kernel, BuildFailure):
                failed.append((problem, knobs, kernel))
                continue
            key = kernel_key(problem, kernel)
            (known if key in self._known else fresh).append(Candidate(problem, knobs.to_dict(), kernel))
            self._known.add(key)
        return Built(tuple(fresh), tuple(known), tuple(failed), time.monotonic() - started)

    def _measure(self, future: Future[Built]) -> None:
        try:
            built = future.result()
            self._results.put(built)
            for _, trial in self._runner.run(self._until_stopped(built.fresh)):
                self._results.put(trial)
            self._results.put(Measured(built))
        except BaseException as error:  # for the main thread to raise
            self._results.put(error)

    def _until_stopped(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        for candidate in candidates:
            if self._stopped.is_set():
                return
            yield candidate
