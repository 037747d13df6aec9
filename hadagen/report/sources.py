"""`Source`: what a report is of, a tuning database or a bundle, read into memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache
from hadagen.problem.trial import Outcome, Trial
from hadagen.tuning_db.bundle import Bundle, BundleEntry
from hadagen.tuning_db.winners import WinnerCell, cell_value, digest_of, portfolio_of, ranked_by_cell

if TYPE_CHECKING:
    from hadagen.tuning_db.store import Store


@dataclass(frozen=True)
class Source:
    """The winners, and the trials that they come from.

    winners: as a bundle has them; of a database, those that `hadagen bundle make` would write.
    trials: in the order in which they were first recorded, without the code of their kernels; none of a bundle.
    digest, version: those of a bundle, "" of a database.
    """

    kind: str  # "tuning database" or "bundle"
    place: str
    winners: tuple[BundleEntry, ...]
    trials: tuple[Trial, ...] = ()
    digest: str = ""
    version: str = ""

    @property
    def problems(self) -> list[Problem]:
        return sorted({trial.problem for trial in self.trials} | {entry.problem for entry in self.winners})


def read_bundle(bundle: Bundle) -> Source:
    """The winners of a bundle. Raises `StorageError` if some are damaged."""
    winners = tuple(bundle.all_entries())
    return Source("bundle", str(bundle.path), winners, digest=bundle.digest, version=bundle.version)


def read_store(store: Store) -> Source:
    """All trials of a tuning database, and the winners among them. Raises `StorageError` if some are damaged."""
    trials = tuple(store.trials(blobs=False))
    return Source("tuning database", store.place, winners_of(trials), trials)


def winners_of(trials: tuple[Trial, ...]) -> tuple[BundleEntry, ...]:
    """The winners that a bundle of these trials would have, in the order of their cells."""
    selection = portfolio_of(ranked_by_cell(trial for trial in trials if trial.outcome is Outcome.OK))
    return tuple(_entry(cell, trial) for cell, trial in selection.items())


def _entry(cell: WinnerCell, trial: Trial) -> BundleEntry:
    times = {t.cache: t for t in trial.timings if (t.destination, t.elements) == (cell.destination, cell.elements)}
    decided = cell_value(trial, cell.destination, cell.elements, trial.environment.l2_bytes)
    assert decided is not None  # no timing, no winner
    assert trial.kernel is not None  # no kernel, no winner
    hot, cold = times.get(Cache.HOT), times.get(Cache.COLD)
    return BundleEntry(
        problem=cell.problem,
        arch=cell.arch,
        environment=trial.environment,
        destination=cell.destination,
        elements=cell.elements,
        kernel=digest_of(trial),
        launch=trial.kernel.launch,
        knobs=trial.knobs,
        errors=trial.errors,
        provenance=trial.provenance,
        date=trial.date,
        nvcc=trial.kernel.nvcc,
        cache=decided.cache,
        hot_us=hot.us if hot else None,
        hot_copy_us=hot.copy_us if hot else None,
        cold_us=cold.us if cold else None,
        cold_copy_us=cold.copy_us if cold else None,
        portable=cell.portable,
    )
