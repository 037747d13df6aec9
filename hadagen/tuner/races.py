"""Races of near-ties: before a winner is named, the two best kernels of a cell are timed again in turns, hot and cold.

Winners are a view of the trials, so the result of a race goes into the trials. The times of both kernels get the ratio
that they had in the race, and their detail tells the margin. The faster kernel keeps its time: the other kernels of the
cell were timed on the same day, and the device may be a little faster or slower today.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol, runtime_checkable

from hadagen.errors import DeviceError, DisturbedError
from hadagen.measure import Cell, Variant
from hadagen.problem.regimes import Cache
from hadagen.problem.trial import Trial
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import RankedTrial, digest_of, may_win, ranked_by_cell

NEAR = 0.01  # kernels whose scores differ by no more than this are raced
ROUNDS = 2  # after a race, another kernel may be second

RaceTimes = Mapping[Cell, tuple[float, float]]  # µs of a kernel, and of the other kernel in the race


@runtime_checkable
class Racing(Protocol):
    """A runner that can time two kernels in turns."""

    @property
    def races_at_once(self) -> int:
        """How many threads may race at the same time."""

    def race(self, a: Variant, b: Variant, cells: Sequence[Cell]) -> list[tuple[float, float]]:
        """(µs of a, µs of b) for each cell. Raises `DeviceError`, and `DisturbedError` if the device was busy or
        throttled."""


def race_near_ties(trials: Iterable[Trial], store: Store, runner: Racing) -> Iterator[tuple[float, ...]]:
    """Race the near-ties of one problem on one device, record the results, and yield the margins, pair by pair.

    A margin is slower time / faster time - 1, one for each cell. `trials` need no blobs. A pair whose race fails keeps
    its times, and is not raced again. Raises `StorageError` if a result cannot be recorded, and `DisturbedError` at the
    end if a pair has no times because the device was busy or throttled.
    """
    field: dict[str, list[Trial]] = defaultdict(list)  # the trials that may win, by the digest of their kernel
    for trial in filter(may_win, trials):
        field[digest_of(trial)].append(trial)
    met: set[tuple[Cell, str, str]] = set()
    disturbed: DisturbedError | None = None
    for _ in range(ROUNDS):
        for (a, b), before in _near_ties(field, met).items():
            cells = list(before)
            met |= {(cell, a, b) for cell in cells}
            try:
                times = runner.race(_variant(field[a][0], store), _variant(field[b][0], store), cells)
            except DisturbedError as error:
                disturbed = error
                continue
            except DeviceError:
                continue
            of_a = {cell: _settled(before[cell], raced) for cell, raced in zip(cells, times, strict=True)}
            of_b = {cell: (mine, other) for cell, (other, mine) in of_a.items()}
            for digest, result, opponent in ((a, of_a, b), (b, of_b, a)):
                field[digest] = [_with_race(trial, result) for trial in field[digest]]
                note = _note(result, opponent)
                for trial in field[digest]:
                    raced = tuple(timing for timing in trial.timings if Cell.of(timing) in result)
                    store.add_timings(replace(trial, timings=raced, detail=note, seconds=0.0))
            yield tuple(max(pair) / min(pair) - 1 for pair in times)
    if disturbed:
        raise disturbed


def _settled(before: tuple[float, float], raced: tuple[float, float]) -> tuple[float, float]:
    """Two times with the ratio that they had in the race; the faster kernel keeps the time it had before."""
    if raced[0] <= raced[1]:
        return before[0], before[0] * raced[1] / raced[0]
    return before[1] * raced[0] / raced[1], before[1]


def _near_ties(
    field: Mapping[str, Sequence[Trial]], met: set[tuple[Cell, str, str]]
) -> dict[tuple[str, str], RaceTimes]:
    """Digests of two kernels, in order → cell → their times.

    The cells are those in which the two have the best scores, near each other, and were not raced yet.
    """
    ties: dict[tuple[str, str], dict[Cell, tuple[float, float]]] = defaultdict(dict)
    for place, ranked in ranked_by_cell(chain.from_iterable(field.values())).items():
        best: dict[str, RankedTrial] = {}  # by digest
        for each in ranked:
            best.setdefault(digest_of(each.trial), each)
        if len(best) == 1:
            continue
        first, second = list(best)[:2]
        if best[second].score <= best[first].score * (1 + NEAR):
            a, b = sorted((first, second))
            mine, theirs = _times(best[a].trial), _times(best[b].trial)
            for cache in Cache:
                cell = Cell(place.elements, place.destination, cache)
                if cell in mine and cell in theirs and (cell, a, b) not in met:
                    ties[a, b][cell] = mine[cell], theirs[cell]
    return {pair: cells for pair, cells in ties.items() if cells}


def _times(trial: Trial) -> dict[Cell, float]:
    return {Cell.of(timing): timing.us for timing in trial.timings}


def _with_race(trial: Trial, times: RaceTimes) -> Trial:
    """The trial with the times of the race."""
    timings = []
    for timing in trial.timings:
        us, _ = times.get(Cell.of(timing), (timing.us, 0.0))
        timings.append(replace(timing, us=us, us_low=min(us, timing.us_low), us_high=max(us, timing.us_high)))
    return replace(trial, timings=tuple(timings))


def _note(times: RaceTimes, opponent: str) -> str:
    slower = (
        f"{cell.elements} {cell.destination.value} {cell.cache.value} {mine / other - 1:+.2%}"
        for cell, (mine, other) in times.items()
    )
    return f"raced with kernel {opponent[:12]}, slower by {', '.join(slower)}"


def _variant(trial: Trial, store: Store) -> Variant:
    return Variant(trial.problem, trial.knobs, store.kernel(digest_of(trial)))
