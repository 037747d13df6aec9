"""Near-ties, raced: the two fastest kernels of a cell are timed again by turns before a winner is named.

Winners are a view of the trials, so that is where the result goes: the times of both kernels get the ratio that they
had in the race, and their detail says by how much it was won. The winner keeps its time, for the other kernels of the
cell were timed then, and the device may be a little faster or slower today.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from hadagen.errors import DeviceError
from hadagen.measure import Cell, Variant
from hadagen.trial import Kernel, Trial, deciding_cache
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import may_win

NEAR = 0.01  # kernels no further apart than this are raced
ROUNDS = 2  # for after a race another kernel may be second

RaceTimes = Mapping[Cell, tuple[float, float]]  # µs of a kernel, and of the one it raced with


@runtime_checkable
class Racing(Protocol):
    """A runner that can time two kernels by turns: (µs of a, µs of b) for each cell. Raises `DeviceError`."""

    def race(self, a: Variant, b: Variant, cells: Sequence[Cell]) -> list[tuple[float, float]]: ...


def race_near_ties(trials: Iterable[Trial], store: Store, runner: Racing) -> Iterator[tuple[float, ...]]:
    """Race the near-ties of one problem on one device, record the results, and yield the margins, pair by pair.

    A margin is by how much of the winner's time the loser was slower, one for each cell. `trials` need no blobs. A pair
    whose race fails is left as it is. Raises `StorageError` where a result cannot be recorded.
    """
    field: dict[str, list[Trial]] = defaultdict(list)  # the trials that may win, by the digest of their kernel
    for trial in trials:
        if trial.kernel is not None and may_win(trial):
            field[trial.kernel.digest].append(trial)
    met: set[tuple[Cell, str, str]] = set()
    for _ in range(ROUNDS):
        for (a, b), cells in _near_ties(field, met).items():
            met |= {(cell, a, b) for cell in cells}
            kernel_a, kernel_b = store.kernel(a), store.kernel(b)
            try:
                times = runner.race(_variant(field[a][0], kernel_a), _variant(field[b][0], kernel_b), cells)
            except DeviceError:
                continue
            before = [{Cell.of(timing): timing.us for timing in field[digest][0].timings} for digest in (a, b)]
            of_a = {
                cell: _settled((before[0][cell], before[1][cell]), raced)
                for cell, raced in zip(cells, times, strict=True)
            }
            of_b = {cell: (mine, other) for cell, (other, mine) in of_a.items()}
            for digest, kernel, result, opponent in ((a, kernel_a, of_a, b), (b, kernel_b, of_b, a)):
                field[digest] = [_with_race(trial, result) for trial in field[digest]]
                note = _note(result, opponent)
                for trial in field[digest]:
                    raced = tuple(timing for timing in trial.timings if Cell.of(timing) in result)
                    store.add_timings(replace(trial, kernel=kernel, timings=raced, detail=note, seconds=0.0))
            yield tuple(max(pair) / min(pair) - 1 for pair in times)


def _settled(before: tuple[float, float], raced: tuple[float, float]) -> tuple[float, float]:
    """Two times as far apart as those of a race; that of its winner is what it was before."""
    if raced[0] <= raced[1]:
        return before[0], before[0] * raced[1] / raced[0]
    return before[1] * raced[0] / raced[1], before[1]


def _near_ties(
    field: Mapping[str, Sequence[Trial]], met: set[tuple[Cell, str, str]]
) -> dict[tuple[str, str], list[Cell]]:
    """Digests of two kernels, in order → the cells in which they are the fastest, near each other, and have not met."""
    times: dict[Cell, list[tuple[float, str]]] = defaultdict(list)
    for digest, (trial, *_) in field.items():
        for timing in trial.timings:
            cell = Cell.of(timing)
            if cell.cache is deciding_cache(trial.problem, cell.elements, cell.destination, trial.environment.l2_bytes):
                times[cell].append((timing.us, digest))
    ties: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell, ranked in times.items():
        if len(ranked) > 1:
            (first_us, first), (second_us, second) = sorted(ranked)[:2]
            a, b = sorted((first, second))
            if second_us <= first_us * (1 + NEAR) and (cell, a, b) not in met:
                ties[a, b].append(cell)
    return ties


def _with_race(trial: Trial, times: RaceTimes) -> Trial:
    """The trial with its times of a race."""
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


def _variant(trial: Trial, kernel: Kernel) -> Variant:
    return Variant(trial.problem, trial.knobs, kernel)
