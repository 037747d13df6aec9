"""Estimates for machines without the device: which kernels look best, and whether they are right.

`shortlist` ranks knobs by the cost model, which needs no compiler. `EstimateRunner` then verifies kernels on the
emulator, and writes the times of the cost model into their trials, which are marked `estimated`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import fsum, log
from operator import attrgetter
from threading import Event
from typing import Any

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import (
    EmulationError,
    HostCompileError,
    HostCompilerDied,
    HostModule,
    compile_host,
    verification_rows,
    verify,
)
from hadagen.compiler.programs import Patience
from hadagen.errors import told_apart
from hadagen.measure import Cell, Variant, all_cells
from hadagen.plan.arch import Arch
from hadagen.plan.costmodel import Estimate, copy_us
from hadagen.plan.knobs import KNOBS, Knobs, plan_of
from hadagen.plan.plan import Plan
from hadagen.plan.space import Space
from hadagen.problem.launch import RowShape, Source
from hadagen.problem.operands import verification_operands
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import prologue_of
from hadagen.problem.regimes import Destination, destinations, main_buckets, regime
from hadagen.problem.trial import Environment, NotTried, Outcome, Provenance, Timing, Trial, utc_now
from hadagen.truth.reference import NORMAL_ELEMENTS

BUILT_AT_ONCE = 8 * (os.cpu_count() or 1)  # for the host; a search that is stopped waits for them
# Elements of each class of input. They must be many for the error to lie within the few hundredths that a bound leaves:
# in uneven rows, a few elements have nearly all of the norm.
ELEMENTS = 4 * NORMAL_ELEMENTS
# Kernels that differ in one of these differ much.
_SHAPE = attrgetter("chunks", "warps", "cluster", "first", "low_bits", "butterfly_carrier")
ORDER_SEED = 2  # for a random order of the emulator's threads
UNITS_IN_ROW = 3  # so that rows end within tiles


def _seen(space: Space) -> Space:
    """The part of a space that the cost model tells apart."""
    search = {name: values[: KNOBS[name].estimated] for name, values in space.arch.search.items()}
    return Space(space.problem, replace(space.arch, search=search))


def shortlist(space: Space, count: int) -> list[Knobs]:
    """At most `count` legal knobs with the best estimates: the best of each regime, then the second best, and so on.

    The knobs of one regime differ in `_SHAPE`, because two similar kernels tell no more than one.
    """
    arch, problem = space.arch, space.problem
    plans = {knobs: plan_of(problem, knobs, starts_early=arch.starts_early) for knobs in _seen(space).legal}
    estimates = {knobs: Estimate(plan, arch) for knobs, plan in plans.items()}
    ranked = []
    for cells in _cells_by_regime(problem, arch).values():
        times = {knobs: fsum(log(estimate.us(*cell)) for cell in cells) for knobs, estimate in estimates.items()}
        best: dict[Any, Knobs] = {}
        for knobs in sorted(times, key=times.__getitem__):
            best.setdefault(_SHAPE(knobs), knobs)
        ranked.append(list(best.values()))
    return list(islice(dict.fromkeys(chain.from_iterable(zip(*ranked, strict=True))), count))


def _cells_by_regime(problem: Problem, arch: Arch) -> dict[str, list[Cell]]:
    """Regime → its cells at the main buckets, so that all sizes have the same weight."""
    cells: dict[str, list[Cell]] = {}
    for cell in all_cells(problem, arch.model.l2_bytes):
        where = regime(problem, *cell, arch.model.l2_bytes)
        if where and cell.elements in main_buckets(problem):
            cells.setdefault(where, []).append(cell)
    return cells


class EstimateRunner:
    """A runner for machines without the device. The emulator verifies kernels, and the cost model estimates times.

    Setting `stopped` kills host compilers that run, which raises `Stopped`.
    """

    def __init__(self, arch: Arch, stopped: Event | None = None) -> None:
        self._arch, self._stopped, self._patience = arch, stopped or Event(), Patience()
        self.environment = Environment(
            compute_capability=arch.compute_capability, sms=arch.model.sms, l2_bytes=arch.model.l2_bytes
        )

    def run(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Trial | NotTried]]:
        """Builds `BUILT_AT_ONCE` variants for the host at a time, and yields each variant with its trial.

        Raises `ToolchainError` if the host compiler dies for several kernels in a row.
        """
        waiting = iter(variants)
        while some := list(islice(waiting, BUILT_AT_ONCE)):
            plans = [plan_of(c.problem, Knobs.from_dict(c.knobs), starts_early=self._arch.starts_early) for c in some]
            sources = [render(plan) for plan in plans]
            module = self._compile_all(sources)
            for variant, plan, source in zip(some, plans, sources, strict=True):
                yield variant, self._try(variant, plan, source, module)

    def _compile_all(self, sources: Sequence[Source]) -> HostModule | None:
        """All kernels in one module; None if that fails, so that each must be compiled alone."""
        try:
            return compile_host(sources, stopped=self._stopped)
        except (HostCompileError, HostCompilerDied):
            return None

    def _try(self, variant: Variant, plan: Plan, source: Source, module: HostModule | None) -> Trial | NotTried:
        started = time.monotonic()
        kernel = variant.kernel
        environment = self.environment if kernel is None else replace(self.environment, nvcc=kernel.nvcc)
        trial = Trial(
            problem=variant.problem,
            arch=self._arch.name,
            knobs=variant.knobs,
            outcome=Outcome.OK,
            provenance=Provenance.ESTIMATED,
            kernel=kernel,
            environment=environment,
            date=utc_now(),
        )
        try:
            module = module or compile_host([source], stopped=self._stopped)
            errors = _verify(variant.problem, source, module)
        except HostCompilerDied as error:
            self._patience.lose(source.text, "the host compiler", f"fails ({error})")
            return NotTried(str(error))
        except HostCompileError as error:
            trial = replace(trial, outcome=Outcome.COMPILE_FAILED, detail=str(error))
        except EmulationError as error:
            trial = replace(trial, outcome=Outcome.WRONG_ANSWER, detail=str(error))
        else:
            trial = replace(trial, errors=errors)
            worst = max(errors, key=errors.__getitem__)
            bound = variant.problem.error_bound
            if errors[worst] <= bound:
                estimate = Estimate(plan, self._arch, None if kernel is None else kernel.registers)
                trial = replace(trial, timings=timings(estimate, variant.problem, self._arch))
            else:
                found, allowed = told_apart(errors[worst], bound)
                trial = replace(
                    trial,
                    outcome=Outcome.WRONG_ANSWER,
                    detail=f"relative error {found} for {worst} inputs is above {allowed}",
                )
        self._patience.worked()
        return replace(trial, seconds=time.monotonic() - started)


def timings(estimate: Estimate, problem: Problem, arch: Arch) -> tuple[Timing, ...]:
    """The estimated time of a kernel of a problem in each cell that a device of the arch has, and that of a copy."""
    times = ((cell, estimate.us(*cell)) for cell in all_cells(problem, arch.model.l2_bytes))
    return tuple(Timing(*cell, us, us, us, _copy_us(arch, problem, cell)) for cell, us in times)


def _copy_us(arch: Arch, problem: Problem, cell: Cell) -> float:
    traffic = cell.traffic(problem)
    return copy_us(arch, traffic.input_bytes, traffic.result_bytes, cell.destination, cell.cache)


def _verify(problem: Problem, source: Source, module: HostModule) -> dict[str, float]:
    """Class of input → the larger of the errors of two launches. The second launch is in place where the result may
    replace x. It has odd addresses and rows of several units where the kernel allows them, the matrix transposed, and
    threads in a random order."""
    rows = verification_rows(problem, source.launch, ELEMENTS)
    first = verify(problem, source, rows, module=module)
    columns = max(problem.n // 2 + 1, problem.n - problem.n // 4 - 1)
    odd = RowShape(columns, columns | 1, columns | 1) if source.launch.reads_rows else None
    matrix = verification_operands(problem).get("matrix")
    prologue = prologue_of(problem)
    second = verify(
        problem,
        source,
        rows,
        module=module,
        operands={} if matrix is None else {"matrix": matrix.T},
        shape=odd,
        in_place=Destination.IN_PLACE in destinations(problem),
        units_in_row=UNITS_IN_ROW if prologue and prologue.takes_rows(problem) else 1,
        order_seed=ORDER_SEED,
    )
    return {name: max(first[name], second[name]) for name in first}
