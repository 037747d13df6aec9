"""Compares kernels with each other and with other libraries, on the GPU of the worker process.

`compare` times everything that computes the same rows within the same seconds. Each is timed like a trial: by a CUDA
graph of as many launches in the same slots. `rank` finds the fastest of many kernels of one problem. All kernels are
timed once, and those near the best once more, in turns. The margin of the best comes from a third timing of two kernels
only, because the least of many noisy times is less than the time of any kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial

import torch

from hadagen.gpu.driver import DoesNotFit, LoadedKernel
from hadagen.measure.cells import Cell
from hadagen.measure.messages import Answer, Choice, ChoiceResult, Compare, Comparison, Rank, Ranking, Times
from hadagen.measure.peer import Peer, Peers, calls_of
from hadagen.measure.timing import GRAPHS, Stopwatch, Turns, Work, transform_work
from hadagen.measure.verify import Verifier
from hadagen.measure.yardstick import Yardstick
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Destination
from hadagen.problem.trial import Kernel, Outcome

_REPLAYS = 5
# For a call that takes milliseconds, fewer replays are enough.
_FEW_REPLAYS = 2
_LONG_US = 20_000.0

_SCREENING_REPLAYS = 3
# Kernels this near the best of the screening are timed again in turns, but no more than `_FINALISTS`.
_NEAR, _FINALISTS = 1.06, 6
_RACE_REPLAYS = 9
_FINAL_REPLAYS = 15

Load = Callable[[Kernel], AbstractContextManager[LoadedKernel]]


class Comparer:
    """`load` returns a context with a kernel on the device. The stream of the stopwatch is PyTorch's current stream."""

    def __init__(self, stopwatch: Stopwatch, verifier: Verifier, yardstick: Yardstick, l2_bytes: int, load: Load):
        self._stopwatch = stopwatch
        self._verifier = verifier
        self._yardstick = yardstick
        self._l2_bytes = l2_bytes
        self._load = load
        self._peers: Peers | None = None

    def compare(self, request: Compare) -> Comparison:
        if self._peers is None:
            self._peers = Peers()
        problem, _ = request.kernels[0]
        with torch.no_grad(), ExitStack() as loaded:
            answers, right = self._verified(loaded, request.kernels)
            operands = self._stopwatch.operands(problem)
            peers = self._peers.serving(problem, operands.device)
            peer_errors = self._peer_errors(problem, peers)
            self._stopwatch.fill(problem.io.input, [cell.traffic(problem) for cell, _ in request.cells])
            peers = [peer for peer in peers if peer.name in peer_errors]
            times = []
            for cell, wanted in request.cells:
                timed = {i: right[i] for i in wanted if i in right}
                times.append(self._times(problem, transform_work(problem, cell, operands), timed, peers))
            return Comparison(answers, peer_errors, tuple(times))

    def rank(self, request: Rank) -> Ranking:
        problem = request.problem
        with ExitStack() as loaded:
            answers, right = self._verified(loaded, [(problem, kernel) for kernel in request.kernels])
            cells = list(dict.fromkeys(cell for choice in request.choices for cell, _ in choice.cells))
            operands = self._stopwatch.operands(problem)
            works = {cell: transform_work(problem, cell, operands) for cell in cells}
            self._stopwatch.fill(problem.io.input, [work.traffic for work in works.values()])
            screened: dict[Cell, dict[int, float]] = {cell: {} for cell in cells}
            for i, kernel in right.items():
                turns = [self._stopwatch.turns([kernel], work, _SCREENING_REPLAYS) for work in works.values()]
                for cell, (sample,) in zip(cells, self._stopwatch.time(turns), strict=True):
                    screened[cell][i] = sample.us
            results = (
                self._choice_result(choice, works, right, screened) if choice.chosen in right else None
                for choice in request.choices
            )
            return Ranking(answers, tuple(results))

    def _verified(
        self, loaded: ExitStack, kernels: Iterable[tuple[Problem, Kernel]]
    ) -> tuple[tuple[Answer, ...], dict[int, LoadedKernel]]:
        """All answers, and the correct kernels by position, which stay loaded until the stack closes. A kernel that
        does not fit on the device is not correct."""
        answers, right = [], {}
        for i, (problem, kernel) in enumerate(kernels):
            try:
                on_device = loaded.enter_context(self._load(kernel))
            except DoesNotFit as error:
                answers.append(Answer(Outcome.LAUNCH_FAILED, str(error)))
                continue
            answers.append(self._verifier.check(on_device, problem))
            if answers[-1].outcome is Outcome.OK:
                right[i] = on_device
        return tuple(answers), right

    def _peer_errors(self, problem: Problem, peers: Iterable[Peer]) -> dict[str, dict[str, float]]:
        errors = {}
        for peer in peers:
            with suppress(RuntimeError):  # it has no kernel for such rows
                errors[peer.name] = self._verifier.errors_of(partial(_transform, peer, problem), problem)
        return errors

    def _times(self, problem: Problem, work: Work, kernels: dict[int, LoadedKernel], peers: Iterable[Peer]) -> Times:
        assert self._peers is not None
        traffic = work.traffic
        self._yardstick.refresh([traffic])
        timed: dict[int | str, Turns] = {
            i: self._stopwatch.turns([kernel], work, _REPLAYS) for i, kernel in kernels.items()
        }
        launches = traffic.launches(self._l2_bytes)
        inputs = self._stopwatch.inputs(problem.io.input, work, work.elements // problem.n)
        for peer in peers:
            calls = calls_of(peer, problem, inputs, traffic.destination is Destination.IN_PLACE)
            try:
                calls[0]()  # the first call takes longer, and may do what a capture forbids
                us = self._stopwatch.once(calls[0])
            except RuntimeError:  # too many rows for the library, or for the memory
                continue
            replays = _FEW_REPLAYS if us * launches > _LONG_US else _REPLAYS
            timed[peer.name] = Turns([partial(self._peers.graph, calls, launches)], traffic, replays)
        samples = self._stopwatch.time(timed.values(), GRAPHS)
        found = {name: sample.us for name, (sample,) in zip(timed, samples, strict=True)}
        return Times(
            self._yardstick.us[traffic],
            {i: found[i] for i in kernels},
            {name: us for name, us in found.items() if isinstance(name, str)},
        )

    def _choice_result(
        self,
        choice: Choice,
        works: dict[Cell, Work],
        kernels: dict[int, LoadedKernel],
        screened: dict[Cell, dict[int, float]],
    ) -> ChoiceResult:
        rank = {i: _score(choice, {cell: screened[cell][i] for cell, _ in choice.cells}) for i in kernels}
        near = sorted((i for i in rank if rank[i] <= _NEAR * min(rank.values())), key=rank.__getitem__)
        raced = self._race(
            choice, works, kernels, list(dict.fromkeys([choice.chosen, *near[:_FINALISTS]])), _RACE_REPLAYS
        )
        scores = {i: _score(choice, times) for i, times in raced.items()}
        best = min(scores, key=scores.__getitem__)
        first, _ = choice.cells[0]
        if best == choice.chosen:
            us = raced[best][first]
            return ChoiceResult(best, us, us, 0.0)
        final = self._race(choice, works, kernels, [choice.chosen, best], _FINAL_REPLAYS)
        loss = _score(choice, final[choice.chosen]) / _score(choice, final[best]) - 1
        if loss <= 0:  # the lead was noise
            best, loss = choice.chosen, 0.0
        return ChoiceResult(best, final[choice.chosen][first], final[best][first], loss)

    def _race(
        self,
        choice: Choice,
        works: dict[Cell, Work],
        kernels: dict[int, LoadedKernel],
        racing: Sequence[int],
        replays: int,
    ) -> dict[int, dict[Cell, float]]:
        """Microseconds of the racing kernels in each cell of a choice: the less of two races, each with its own
        graphs."""
        running = [kernels[i] for i in racing]
        turns = [self._stopwatch.turns(running, works[cell], replays) for cell, _ in choice.cells]
        found: dict[int, dict[Cell, float]] = {i: {} for i in racing}
        for (cell, _), samples in zip(choice.cells, self._stopwatch.time(turns, GRAPHS), strict=True):
            for i, sample in zip(racing, samples, strict=True):
                found[i][cell] = sample.us
        return found


def _transform(peer: Peer, problem: Problem, x: torch.Tensor) -> torch.Tensor:
    (call,) = calls_of(peer, problem, [x], in_place=False)
    return call()


def _score(choice: Choice, us: dict[Cell, float]) -> float:
    """The score of a kernel from its times; less is better."""
    return math.exp(math.fsum(share * math.log(us[cell]) for cell, share in choice.cells))
