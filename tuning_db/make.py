"""The winners of a tuning database, written as a bundle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from hadagen.errors import StorageError, UsageError, shortened
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import LOSS
from hadagen.problem.trial import Outcome, Provenance, Trial
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.merge import Selection
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import invariant_arithmetic, portfolio_of, ranked_by_cell

_LONGEST_LINE = 200  # characters of a failure in a sentence


def make_bundle(store: Store, arch: str, path: Path, loss: float = LOSS, command: str = "") -> Selection:
    """Write the winners of a database to a bundle at `path`, and return them (`loss` as in `winners.portfolio`).

    command: what finds more winners, for the sentence that there is none; "" for a tune of the arch.

    Raises `UsageError` as `check_keeps_winners` does, and `StorageError` as `write_bundle` does. If there is no winner,
    the error says why the trials failed.
    """
    trials = [trial for trial in store.checked() if trial.arch == arch]
    rankings = ranked_by_cell(trial for trial in trials if trial.outcome is Outcome.OK)
    selection = portfolio_of(rankings, loss)
    if not selection:
        command = command or f"hadagen tune --arch {arch}"
        raise StorageError(
            f"there is no winner for {arch} to write{_why(trials)}; give {command} more time or more trials"
        )
    check_keeps_winners(path, store, arch, ((cell.problem, cell.gpu) for cell in selection))
    write_bundle(path, arch, selection, store.kernel, invariant_arithmetic(selection, rankings))
    return selection


def _why(trials: Iterable[Trial]) -> str:
    """Why trials failed: how many of each outcome, and the first line of the first failure of each."""
    failed: dict[Outcome, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.outcome is not Outcome.OK:
            failed[trial.outcome].append(trial)
    said = []
    for outcome, some in sorted(failed.items(), key=lambda each: -len(each[1])):
        line = next(iter(some[0].detail.splitlines()), "without a reason")
        said.append(f"{len(some)} {outcome.value}, such as {some[0].problem.key}: {shortened(line, _LONGEST_LINE)}")
    return f", because trials failed ({'; '.join(said)})" if said else ""


def check_keeps_winners(path: Path, store: Store, arch: str, known: Iterable[tuple[Problem, str]] = ()) -> None:
    """Raises `UsageError` if replacing the bundle at `path` would lose measured winners.

    Winners of a problem on a GPU would be lost if the database has no ok trial of that problem on that GPU. Winners
    whose kernels the database itself refuses may go.

    known: pairs of a problem and a GPU for which the database has such trials, or will have them before the bundle is
        replaced.
    """
    lost = measured_in(path)
    for place in known:
        lost.pop(place, None)
    for trial in store.trials(arch=arch, blobs=False) if lost else ():
        place = trial.problem, trial.environment.gpu
        if trial.outcome is Outcome.OK or (trial.kernel and trial.kernel.digest in lost.get(place, ())):
            lost.pop(place, None)
    if lost:
        name, gpu = min((problem.key, gpu) for problem, gpu in lost)
        raise UsageError(
            f"{path} has winners that {store.place} has no working trial of, such as of {name} on {gpu}, and they "
            "would be lost; name another place, remove it first, or name their database"
        )


def measured_in(path: Path) -> dict[tuple[Problem, str], set[str]]:
    """The digests of the measured winners of a bundle, if it is there, by problem and GPU."""
    found: dict[tuple[Problem, str], set[str]] = defaultdict(set)
    try:
        for entry in Bundle.open(path).all_entries() if path.exists() else ():
            if entry.provenance is Provenance.MEASURED:
                found[entry.problem, entry.gpu].add(entry.kernel)
    except StorageError:
        return {}  # of what is damaged, or of another version, nothing is used any more
    return found
