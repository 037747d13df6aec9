"""Measures one problem on one GPU within seconds, and adds the winners to a bundle that later calls find.

This is no search over a whole space: known recipes are timed first, and then, while time is left, their nearest
neighbours. It needs no database and no Optuna.

Many processes may share a bundle, such as the ranks of a job. A lock file lies beside it. While one process measures,
the others wait, and then find what they want in the bundle.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer
from typing import Any

from hadagen.compiler.codegen import render
from hadagen.compiler.compilers import NvrtcProgram
from hadagen.compiler.programs import Stopped
from hadagen.compiler.toolchain import BuildFailure, Toolchain
from hadagen.errors import DeviceError, DisturbedError, StorageError
from hadagen.files.lock_file import turn
from hadagen.measure import DeviceRunner, Variant, copy_sources, device_environment
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs, plan_of
from hadagen.plan.space import Space
from hadagen.problem.problem import Problem, check_tunable
from hadagen.problem.trial import Disturbed, Environment, Kernel, NotTried, Trial
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.merge import Selection, arithmetic_of, selection_of, write_selection
from hadagen.tuning_db.winners import invariant_arithmetic, portfolio, portfolio_of, ranked_by_cell

MEASURING_SHARE = 0.9  # of the seconds; the rest is for ending the measuring process and for the file
PATIENCE = 4  # times the seconds that others may hold the lock without a new winner
AHEAD = 4  # neighbours that are compiled while one is measured


def add_winners(
    path: Path,
    problem: Problem,
    device_index: int,
    arch_name: str,
    known: Iterable[Mapping[str, Any]],
    seconds: float,
    jobs: int,
) -> None:
    """Measure a problem on a CUDA device, and add its winners to the bundle at `path`, which need not exist. Does
    nothing if the bundle has measured winners of the problem on such a GPU.

    arch_name: a known arch, that of the device. known: the knobs of all entries of the problem in other bundles, for
    any arch; without any, the seeds of the space are tried. seconds: from the moment when no other process measures
    until the winners are written. jobs: how many kernels are compiled at a time.

    Raises `UsageError` for a problem with signs, `DeviceError` if nothing could be measured, `ToolchainError` if there
    is no NVRTC, and `StorageError` if the bundle cannot be written, or is damaged or of another format, or if other
    processes measure for too long.
    """
    check_tunable([problem])
    here = device_environment(device_index)
    with turn(path, PATIENCE * seconds, lambda: _has_winners(path, problem, here)) as ours:
        if not ours:
            return
        started = time.monotonic()
        _read(path, arch_name)  # before anything is measured that could not be kept
        space = Space(problem, load_arch(arch_name))
        first = first_knobs(space, known)
        if not first:
            raise DeviceError(f"no kernel of {problem.key} is possible on {arch_name}; PyTorch computes it there")
        measuring = Measuring(space, device_index, first, started + MEASURING_SHARE * seconds, jobs)
        measuring.run()
        if not measuring.trials:
            took = time.monotonic() - started
            why = f" ({measuring.failure})" if measuring.failure else ""
            raise DeviceError(
                f"nothing was measured of {problem.key} on {here.gpu} in {took:.1f} s{why}; pass more seconds, such "
                f"as autotune({problem.key!r}, seconds={2 * seconds:g})"
            )
        rankings = ranked_by_cell(measuring.trials)
        found = portfolio_of(rankings)
        if not found:
            ended = measuring.trials[0]
            raise DeviceError(
                f"none of {len(measuring.trials)} kernels of {problem.key} worked on {here.gpu}, and the first ended "
                f"as {ended.outcome.value} ({ended.detail}); free some device memory, or see hadagen doctor"
            )
        before, arithmetic = _read(path, arch_name)
        others = {cell: trial for cell, trial in before.items() if (cell.problem, cell.gpu) != (problem, here.gpu)}
        arithmetic |= invariant_arithmetic(found, rankings)
        write_selection(path, arch_name, dict(sorted((others | found).items())), arithmetic)


def _has_winners(path: Path, problem: Problem, here: Environment) -> bool:
    """Whether a bundle has measured winners of a problem on a GPU of this class. Raises `StorageError` as `_read`."""
    with _not_replaced(path):
        entries = Bundle.open(path).entries(problem) if os.path.lexists(path) else ()
    return any(_class_of(entry.environment) == _class_of(here) for entry in entries)  # an estimate has no GPU


def _class_of(environment: Environment) -> tuple[str, int, int]:
    """The values that are equal on all GPUs for which the same kernels win."""
    return environment.gpu, environment.sms, environment.memory_clock_mhz


def _read(path: Path, arch_name: str) -> tuple[Selection, dict[Problem, str]]:
    """The winners in a bundle, and what it names as their arithmetic; none if it is not there. Raises `StorageError` if
    it is damaged, or of another format or arch."""
    if not os.path.lexists(path):
        return {}, {}
    with _not_replaced(path):
        bundle = Bundle.open(path)
        if bundle.arch != arch_name:
            raise StorageError(f"its winners are of {bundle.arch}, not of {arch_name}; give it another name")
        return selection_of(bundle), arithmetic_of(bundle)


@contextmanager
def _not_replaced(path: Path) -> Iterator[None]:
    """A context in which an error with a bundle also says that therefore no other bundle replaces it."""
    try:
        yield
    except StorageError as error:
        raise StorageError(
            f"no winners are added to {path}, because those that it has would be lost: {error}; or move it away"
        ) from error


def first_knobs(space: Space, known: Iterable[Mapping[str, Any]]) -> list[Knobs]:
    """The legal knobs nearest to known ones, those of most entries first; without any, the seeds of the space."""
    found: Counter[Knobs] = Counter()
    for stored, count in Counter(map(Knobs.like, known)).items():
        if nearest := space.closest(stored):
            found[nearest] += count
    return [knobs for knobs, _ in found.most_common()] or space.seeds()


class Measuring:
    """Compiles and measures kernels of a problem until a deadline (of `time.monotonic()`), or until no neighbour of a
    winner is left.

    first: the knobs to begin with. jobs: how many kernels are compiled at a time. `trials`: what was measured, in
    order. `failure`: why the last kernel was not measured; "" if each was.
    """

    def __init__(self, space: Space, device_index: int, first: Sequence[Knobs], deadline: float, jobs: int) -> None:
        """Raises `ToolchainError` if there is no NVRTC."""
        self.trials: list[Trial] = []
        self.failure = ""
        self._space, self._device_index, self._first, self._deadline = space, device_index, list(first), deadline
        self._toolchain = Toolchain(NvrtcProgram.find())
        self._builder = ThreadPoolExecutor(jobs, "hadagen-autotune")
        self._stopped = Event()  # ends all compilers
        self._under_way: deque[tuple[Knobs, Future[Kernel | BuildFailure | NotTried]]] = deque()
        self._asked: set[Knobs] = set()
        self._near: dict[Knobs, Iterator[Knobs]] = {}  # neighbours that were not looked at
        self._turn = 0

    def run(self) -> None:
        """Raises `ToolchainError` if nothing can be compiled, and `DeviceError` if the device is lost, or the measuring
        process cannot start, before the deadline."""
        alarm = Timer(max(0.0, self._deadline - time.monotonic()), self._stopped.set)
        alarm.daemon = True
        alarm.start()
        try:
            sources = copy_sources(for_prologues=bool(self._space.problem.prologue))
            copies = self._toolchain.build_all(sources, self._space.arch, stopped=self._stopped)
            with DeviceRunner(self._device_index, copies, deadline=self._deadline) as runner:
                for _, trial in runner.run(self._variants()):
                    if isinstance(trial, Disturbed):
                        self.failure = f"{trial.reason}; {trial.advice}"
                        continue
                    self.trials.append(trial)
                    self._look_ahead()  # while the device has the next kernel
        except DisturbedError as error:  # what was measured before it was is sound
            self.failure = str(error)
        except (DeviceError, Stopped) as error:
            if time.monotonic() < self._deadline:
                raise
            self.failure = str(error) or self.failure
        finally:
            alarm.cancel()
            self._stopped.set()
            self._builder.shutdown(cancel_futures=True)

    def _variants(self) -> Iterator[Variant]:
        """The kernels to measure, as they are compiled; other knobs that mean the same kernel are left out."""
        for knobs in self._first:
            self._compile(knobs)
        seen: set[str] = set()
        while True:  # the runner ends it at the deadline
            if not self._under_way:
                self._look_ahead()
            if not self._under_way:
                return
            knobs, built = self._under_way.popleft()
            try:
                kernel = built.result()
            except Stopped:
                return
            if isinstance(kernel, Kernel):
                if kernel.digest not in seen:
                    seen.add(kernel.digest)
                    yield Variant(self._space.problem, knobs.to_dict(), kernel)
            else:
                self.failure = kernel.summary if isinstance(kernel, BuildFailure) else kernel.reason

    def _compile(self, knobs: Knobs) -> None:
        """Begin to compile a kernel in the background."""
        arch = self._space.arch

        def build() -> Kernel | BuildFailure | NotTried:
            source = render(plan_of(self._space.problem, knobs, starts_early=arch.starts_early))
            return self._toolchain.build([source], arch, jobs=1, stopped=self._stopped)[0]

        self._asked.add(knobs)
        self._under_way.append((knobs, self._builder.submit(build)))

    def _look_ahead(self) -> None:
        """Begin to compile new neighbours of the winners so far, which take turns. Before there are winners, those of
        the first knobs."""
        if len(self._under_way) >= AHEAD:
            return
        winners = (
            list(dict.fromkeys(Knobs.from_dict(trial.knobs) for trial in portfolio(self.trials).values()))
            or self._first
        )
        left = len(winners)  # of those in a row that had no new neighbour
        while left and len(self._under_way) < AHEAD:
            knobs = winners[self._turn % len(winners)]
            self._turn += 1
            near = self._near.setdefault(knobs, self._space.neighbors(knobs))
            if new := next((each for each in near if each not in self._asked), None):
                self._compile(new)
                left = len(winners)
            else:
                left -= 1
