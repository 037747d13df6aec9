"""Runners: they take variants and return trials. The search knows nothing else about measuring."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Protocol

from hadagen.errors import DeviceError, DisturbedError, UsageError
from hadagen.measure.cells import Cell, Cells
from hadagen.measure.messages import Answer, Choice, Compare, Comparison, Look, Measure, Race, Rank, Ranking
from hadagen.measure.watch import SILENCE_S
from hadagen.measure.worker import Failure, Service, Worker
from hadagen.problem.problem import Numerics, Problem
from hadagen.problem.trial import Disturbed, Environment, Kernel, NotTried, Outcome, Provenance, Timing, Trial, utc_now

_log = logging.getLogger("hadagen")

_REPLAYS = 7
_PAUSES_S = (2.0, 8.0)  # before what was disturbed is timed again
_DISTURBED_IN_A_ROW = 3  # variants that were disturbed in all attempts; then the device is given up
_LOOK_S = 20.0  # for a new worker to say how the device is
_ATTEMPTS = 3  # at a request whose worker was killed
COMPARISON_TIMEOUT_S = 300.0  # a library may take a second for some of what our kernels do in a millisecond


@dataclass(frozen=True)
class Variant:
    """Knobs of a problem, to try. `kernel` is None only for runners that run nothing.

    Where a runner measures for a search on another machine, that search knows best which cells to time, and the
    `limits`, in microseconds, beyond which a kernel is not timed further. None leaves both to the runner.
    """

    problem: Problem
    knobs: dict[str, Any]
    kernel: Kernel | None = None
    cells: tuple[Cell, ...] | None = None
    limits: dict[Cell, float] | None = None


class BestTimes:
    """The best time of each cell of each problem so far. A kernel `give_up` times slower at each probe cell is not
    timed further."""

    def __init__(self, give_up: float) -> None:
        self._give_up = give_up
        self._best: dict[Problem, dict[Cell, float]] = {}

    def note(self, problem: Problem, timings: Iterable[Timing]) -> None:
        best = self._best.setdefault(problem, {})
        for timing in timings:
            cell = Cell.of(timing)
            best[cell] = min(timing.us, best.get(cell, timing.us))

    def limits(self, problem: Problem) -> dict[Cell, float]:
        """Cell → the most microseconds that a kernel may take there."""
        return {cell: us * self._give_up for cell, us in self._best.get(problem, {}).items()}


_Request = Look | Measure | Race | Compare | Rank


class Runner(Protocol):
    """Turns variants into trials, one by one, in their order. No outcome of a variant ends the run. The result is
    `NotTried` if a compiler died, and `Disturbed` if the device was busy or throttled, which may pass."""

    @property
    def environment(self) -> Environment: ...

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial | NotTried]]: ...


def _device_service(*arguments: Any) -> Service:
    from hadagen.measure.service import DeviceService  # PyTorch is for the worker process only

    return DeviceService(*arguments)


class DeviceRunner:
    """Verifies and times kernels on one CUDA device, in a process of its own that is replaced whenever it breaks.

    copy_kernels: the compiled `copy_sources()`.
    cells: the cells to time, for all problems or by problem; by default `all_cells` for the L2 of the device.
    give_up: a kernel this many times slower than the best of its problem so far, at each of three probe cells, is not
        timed further. Its trial is `ok`, with the timings so far.
    timeout_s: seconds for one variant.
    silence_s: seconds without a sign of life from the device, after which a kernel counts as hung. See `Watch`.
    deadline: a time of `time.monotonic()`. Work that goes on then is ended, and a run has no more trials.
    make_service: runs in the worker instead of the GPU; for tests.

    The worker starts at the first use, and `close` kills it. Every use raises `DeviceError` if it cannot start, or
    then has a device of another class. If another program kills the worker, a new one gets the request again, for three
    attempts in all.

    Kernels that are timed while the device is busy or throttled are timed again after a pause, up to three times in
    all.
    """

    def __init__(
        self,
        device_index: int,
        copy_kernels: Sequence[Kernel],
        *,
        cells: Cells | None = None,
        give_up: float = 1.3,
        timeout_s: float = 20.0,
        silence_s: float = SILENCE_S,
        deadline: float = inf,
        make_service: Callable[..., Service] = _device_service,
    ) -> None:
        if not copy_kernels:
            raise UsageError("no copy kernel was given; build `copy_sources()` and pass the kernels")
        copies = tuple(without_texts(kernel) for kernel in copy_kernels)
        self._worker = Worker(make_service, (device_index, copies, cells, _REPLAYS), silence_s)
        self._environment: Environment | None = None
        self._best = BestTimes(give_up)
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._disturbed = 0  # variants in a row
        self._warned: set[str] = set()

    @property
    def environment(self) -> Environment:
        """The environment of the device. `nvcc` is "" here, and is filled in for each trial."""
        if self._environment is None:
            self._start()
        assert self._environment is not None
        return self._environment

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial | Disturbed]]:
        """Yields each variant with its trial as soon as it is finished. Raises `DisturbedError` if the device was busy
        or throttled for `_DISTURBED_IN_A_ROW` variants in a row.

        The next variant is drawn and handed to the worker before a trial is yielded, so the device works while the
        caller records. Leaving the loop early kills the worker if it is busy. Give variants of one problem together:
        the worker keeps the reference of the last problem only.
        """
        waiting = iter(variants)
        current = next(waiting, None)
        try:
            if current is not None:
                self._submit(current)
            while current is not None:
                trial = self._collect(current)
                if trial is None:
                    return
                following = next(waiting, None)
                at_once = self._worker.is_running  # a worker that has to be started would hold up the trial
                if following is not None and at_once:
                    self._submit(following)
                yield current, trial
                if following is not None and not at_once:
                    self._submit(following)
                current = following
        finally:
            if self._worker.is_busy:
                self._worker.stop()

    @property
    def races_at_once(self) -> int:
        return 1

    def race(self, a: Variant, b: Variant, cells: Sequence[Cell]) -> list[tuple[float, float]]:
        """Time two verified variants of one problem in turns: (µs of a, µs of b) for each cell.

        Raises `DeviceError` if the worker fails or exceeds the time of a variant, and `DisturbedError` if the device
        was busy or throttled in all attempts.
        """
        if a.problem != b.problem:
            raise UsageError(f"{a.problem.key} cannot be raced against {b.problem.key}; give two of one problem")
        request = Race(a.problem, without_texts(_kernel(a)), without_texts(_kernel(b)), tuple(cells))
        ask = partial(self._ask, request, "a race", self._timeout_s)
        answer = self._undisturbed(ask(), ask)
        if isinstance(answer, Disturbed):
            raise DisturbedError(f"a race has no times ({answer.reason}); {answer.advice}")
        return list(answer)

    def compare(self, variants: Sequence[Variant], cells: Sequence[tuple[Cell, Sequence[int]]]) -> Comparison:
        """Verify variants whose problems differ in numerics only, then time them in turns with the other libraries and
        the copy.

        cells: each cell, and which variants are timed in it, as indices into `variants`. Raises `DeviceError` if the
        worker fails or takes longer than `COMPARISON_TIMEOUT_S`. If the device was busy or throttled meanwhile, a
        warning is logged.
        """
        kinds = {variant.problem.with_io(numerics=Numerics.ACCURATE).key for variant in variants}
        if len(kinds) != 1:
            raise UsageError(f"{' and '.join(sorted(kinds))} cannot be compared; give variants of one n and dtype")
        kernels = tuple((variant.problem, without_texts(_kernel(variant))) for variant in variants)
        request = Compare(kernels, tuple((cell, tuple(wanted)) for cell, wanted in cells))
        return self._ask(request, f"comparing kernels for {variants[0].problem.key}")  # type: ignore[no-any-return]

    def rank(self, variants: Sequence[Variant], choices: Sequence[Choice]) -> Ranking:
        """Verify variants of one problem, and find the fastest for each of `choices`.

        Raises `DeviceError` if the worker fails or takes longer than `COMPARISON_TIMEOUT_S`. If the device was busy or
        throttled meanwhile, a warning is logged.
        """
        problem = variants[0].problem
        if any(variant.problem != problem for variant in variants):
            raise UsageError(f"not all variants are for {problem.key}; give those of one problem")
        request = Rank(problem, tuple(without_texts(_kernel(variant)) for variant in variants), tuple(choices))
        return self._ask(request, f"ranking kernels for {problem.key}")  # type: ignore[no-any-return]

    def _ask(self, request: Race | Compare | Rank, doing: str, timeout_s: float = COMPARISON_TIMEOUT_S) -> Any:
        self._send(request)
        answer = self._receive(request, timeout_s)
        if isinstance(answer, Failure):
            again = "ask for fewer cells at a time" if answer.hung else "run the same command again"
            raise DeviceError(f"{doing} failed ({answer.detail}); {again}")
        if isinstance(answer, Comparison | Ranking):
            self._warn(answer.disturbed)
        return answer

    def close(self) -> None:
        self._worker.stop()

    def __enter__(self) -> DeviceRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        environment = self._worker.start(self._deadline)
        if self._environment not in (None, environment):
            self._worker.stop()
            raise DeviceError(
                f"the GPU was {_class_text(self._environment)}, and is {_class_text(environment)} now; run the same "
                "command again to measure it as it is"
            )
        self._environment = environment

    def _warn(self, disturbed: Disturbed | None) -> None:
        """Log a warning, once for each reason."""
        if disturbed and disturbed.reason not in self._warned:
            self._warned.add(disturbed.reason)
            _log.warning("these times may be wrong: %s; %s", disturbed.reason, disturbed.advice)

    def _undisturbed(self, answer: Any, again: Callable[[], Any]) -> Any:
        """An answer, or where that is `Disturbed` the answer of new attempts, each after a pause. There are none if
        waiting did not help before, or if the deadline does not leave the time."""
        left = self._deadline - time.monotonic() if self._disturbed < _DISTURBED_IN_A_ROW else 0.0
        for pause in _PAUSES_S:
            if isinstance(answer, Disturbed) and pause < left:
                time.sleep(pause)
                answer = again()
        self._disturbed = self._disturbed + 1 if isinstance(answer, Disturbed) else 0
        return answer

    def _send(self, request: _Request) -> None:
        if self._worker.is_busy or not self._worker.is_running:  # busy with what nobody waits for any more
            self._start()
        self._worker.send(request)

    def _receive(self, request: _Request, timeout_s: float, deadline: float = inf) -> Any:
        """The answer to the request that the worker has, or a `Failure`. timeout_s: the limit of each attempt. No
        attempt goes on after the deadline."""
        attempt = 1
        while True:
            answer = self._worker.receive(max(0.0, min(timeout_s, deadline - time.monotonic())))
            if not (isinstance(answer, Failure) and answer.killed) or attempt == _ATTEMPTS:
                return answer
            attempt += 1
            self._send(request)

    def _submit(self, variant: Variant) -> None:
        self._send(self._request(variant))

    def _request(self, variant: Variant) -> Measure:
        limits = self._best.limits(variant.problem) if variant.limits is None else variant.limits
        return Measure(variant.problem, without_texts(_kernel(variant)), limits, variant.cells)

    def _collect(self, variant: Variant) -> Trial | Disturbed | None:
        """The trial of the variant that the worker has; None if the deadline came before. Raises `DisturbedError`."""

        def again() -> Answer | Disturbed | None:
            self._submit(variant)
            return self._received(variant)

        answer = self._undisturbed(self._received(variant), again)
        if answer is None:
            return None
        if isinstance(answer, Disturbed):
            if self._disturbed >= _DISTURBED_IN_A_ROW:
                raise DisturbedError(
                    f"nothing can be timed: {answer.reason}, each time that {self._disturbed} kernels were timed; "
                    f"{answer.advice}; finished trials are kept"
                )
            return answer
        return self._trial(variant, answer)

    def _received(self, variant: Variant) -> Answer | Disturbed | None:
        """The answer of the worker, or the outcome that its failure means; None if the deadline came before."""
        started = time.monotonic()
        answer = self._receive(self._request(variant), self._timeout_s, self._deadline)
        if not isinstance(answer, Failure):
            received: Answer | Disturbed = answer
            return received
        seconds = time.monotonic() - started
        if not answer.hung:
            return Answer(Outcome.LAUNCH_FAILED, answer.detail, seconds=seconds)
        if time.monotonic() >= self._deadline:
            return None
        return self._disturbed_now() or Answer(Outcome.TIMEOUT, answer.detail, seconds=seconds)

    def _disturbed_now(self) -> Disturbed | None:
        """The disturbance that a new worker finds. A variant may have exceeded its time because others use the
        device."""
        try:
            self._send(Look())
        except DeviceError:  # which the next variant meets again, once this one has its trial
            return None
        found = self._worker.receive(_LOOK_S)
        return found if isinstance(found, Disturbed) else None

    def _trial(self, variant: Variant, answer: Answer) -> Trial:
        if answer.outcome is Outcome.OK:
            self._best.note(variant.problem, answer.timings)
        kernel = _kernel(variant)
        return Trial(
            problem=variant.problem,
            arch=kernel.arch,
            knobs=variant.knobs,
            outcome=answer.outcome,
            provenance=Provenance.MEASURED,
            kernel=kernel,
            detail=answer.detail,
            errors=answer.errors,
            timings=answer.timings,
            environment=replace(self.environment, nvcc=kernel.nvcc),
            date=utc_now(),
            seconds=answer.seconds,
        )


def _class_text(environment: Environment | None) -> str:
    return "" if environment is None else f"{environment.gpu} with {environment.power_limit_watts} W"


def _kernel(variant: Variant) -> Kernel:
    if variant.kernel is None:
        raise UsageError(f"a variant for {variant.problem.key} has no kernel; build it before it is measured")
    return variant.kernel


def without_texts(kernel: Kernel) -> Kernel:
    """The kernel without its texts, which a worker does not need."""
    return replace(kernel, source="", ptx=b"")
