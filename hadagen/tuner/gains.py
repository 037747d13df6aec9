"""What a tune changes for calls: its winners beside the kernels that calls ran before, by the same measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean

from hadagen.plan.knobs import Knobs
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import LOSS, Destination, destinations, nearest
from hadagen.problem.trial import Outcome, Trial
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import called_by_size
from hadagen.tuning_db.bundle import shipped
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import WinnerCell, cell_value

Place = tuple[Destination, int]  # destination and element count


@dataclass(frozen=True)
class Called:
    """The kernels that calls of a problem run: for each destination the knobs by element count, of which the nearest
    counts. `shipped`: whether all come with hadagen."""

    knobs: Mapping[Destination, Mapping[int, Knobs]]
    shipped: bool

    @classmethod
    def now(cls, problem: Problem, device: Device) -> Called:
        """Those that calls on a device run now. Raises `StorageError` as `called_by_size` does."""
        found = {destination: called_by_size(problem, destination, device) for destination in destinations(problem)}
        return cls(
            {
                destination: {count: Knobs.like(entry.knobs) for count, entry in entries.items()}
                for destination, (entries, _) in found.items()
            },
            all(bundle is None or bundle.path in shipped().values() for _, bundle in found.values()),
        )

    def at(self, destination: Destination, elements: int) -> Knobs | None:
        """The knobs of the kernel that a call runs; None if there is no kernel."""
        known = self.knobs.get(destination)
        return known[nearest(sorted(known), elements)] if known else None


@dataclass(frozen=True)
class Gain:
    """How much faster the winners of a problem are than the kernels that calls ran before. `ratios`: the time of the
    former kernel over that of the winner, at each size with a winner; 1 for the same kernel, None if there was no
    kernel, or it was not timed there."""

    problem: Problem
    ratios: Mapping[Place, float | None]

    @cached_property
    def faster(self) -> dict[Place, float]:
        """The ratios of more than `LOSS`; kernels that differ by less count as equally fast."""
        return {place: ratio for place, ratio in self.ratios.items() if ratio and ratio > 1 + LOSS}

    @property
    def unknown(self) -> int:
        return sum(ratio is None for ratio in self.ratios.values())

    @property
    def mean(self) -> float:
        """The geometric mean of `faster`; 1 if that is empty."""
        return geometric_mean(self.faster.values()) if self.faster else 1.0


def gains(before: Mapping[Problem, Called], winners: Mapping[WinnerCell, Trial], store: Store, gpu: str) -> list[Gain]:
    """The gain of each problem that has winners on a GPU.

    before: what calls ran, of all problems of interest. winners: those that calls run now.
    """
    found: dict[Problem, dict[WinnerCell, Trial]] = {problem: {} for problem in before}
    for cell, trial in winners.items():
        if cell.gpu == gpu and not cell.portable and cell.problem in found:
            found[cell.problem][cell] = trial
    return [Gain(problem, _ratios(before[problem], ours, store, gpu)) for problem, ours in found.items() if ours]


def _ratios(before: Called, winners: Mapping[WinnerCell, Trial], store: Store, gpu: str) -> dict[Place, float | None]:
    former = {cell: before.at(cell.destination, cell.elements) for cell in winners}
    changed = {cell for cell, trial in winners.items() if former[cell] != Knobs.like(trial.knobs)}
    timed: dict[Knobs, Trial] = {}
    if changed:
        cell = next(iter(changed))
        timed = _by_knobs(store.trials(cell.problem, cell.arch, gpu, Outcome.OK, blobs=False))
    ratios: dict[Place, float | None] = {}
    for cell, trial in winners.items():
        place = cell.destination, cell.elements
        knobs = former[cell]
        ratios[place] = 1.0
        if cell in changed:
            old = timed.get(knobs) if knobs else None
            ratios[place] = _ratio(old, trial, cell) if old else None
    return ratios


def _by_knobs(trials: Iterable[Trial]) -> dict[Knobs, Trial]:
    """The trials by knobs; of several trials of the same knobs that with most times."""
    return {Knobs.like(trial.knobs): trial for trial in sorted(trials, key=lambda trial: len(trial.timings))}


def _ratio(old: Trial, new: Trial, cell: WinnerCell) -> float | None:
    one, other = (cell_value(each, cell.destination, cell.elements, each.environment.l2_bytes) for each in (old, new))
    return one.us / other.us if one and other and one.cache is other.cache else None
