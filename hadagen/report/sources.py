"""`Source`: the subject of a report, a tuning database or a bundle, read into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hadagen.problem.problem import Problem
from hadagen.problem.trial import Outcome, Trial
from hadagen.tuning_db.bundle import Bundle, BundleEntry
from hadagen.tuning_db.bundle_writer import entry_of
from hadagen.tuning_db.winners import portfolio_of, ranked_by_cell

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
    def timed(self) -> Sequence[Trial | BundleEntry]:
        """The trials, or the winners if there are none."""
        return self.trials or self.winners

    @property
    def problems(self) -> list[Problem]:
        return sorted({trial.problem for trial in self.trials} | {entry.problem for entry in self.winners})


def read_bundle(bundle: Bundle) -> Source:
    """The winners of a bundle. Raises `StorageError` if some are damaged."""
    return Source("bundle", str(bundle.path), tuple(bundle.all_entries()), digest=bundle.digest, version=bundle.version)


def read_store(store: Store) -> Source:
    """All trials of a tuning database, and the winners among them. Raises `StorageError` if some are damaged."""
    trials = tuple(store.trials(blobs=False))
    return Source("tuning database", store.place, winners_of(trials), trials)


def winners_of(trials: tuple[Trial, ...]) -> tuple[BundleEntry, ...]:
    """The winners that a bundle of these trials would have, in the order of their cells."""
    selection = portfolio_of(ranked_by_cell(trial for trial in trials if trial.outcome is Outcome.OK))
    return tuple(entry_of(cell, trial) for cell, trial in selection.items())
