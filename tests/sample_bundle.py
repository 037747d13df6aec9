"""A small bundle for the tests of choosing and of the runtime, and a machine that has no other."""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sample_trials import H100, PROBLEM, make_trial, times

from hadagen.problem.regimes import Destination
from hadagen.problem.trial import Trial
from hadagen.runtime.choose import bundles
from hadagen.tuning_db.bundle import OPENED, content_digest, read_rows, rows_digest, winners_of
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import WinnerCell, portfolio


def hide_bundles(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves no bundle to be found; those of the user would now lie in `directory`."""
    monkeypatch.delenv(bundles.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(directory / "data"))
    monkeypatch.setattr(bundles, "shipped", dict)


def write_sample(path: Path, chunks: int = 1) -> Path:
    """Writes a bundle of one winner, timed in place on an H100 at 8K and 64K elements; returns its path."""
    return write_trials(path, [make_trial(chunks, timings=times({1 << 13: 2.0, 1 << 16: 4.0}))])


def write_winners(path: Path, chunks: Mapping[int, int]) -> Path:
    """Writes a bundle of a winner for each of these element counts, timed in place on an H100; returns its path."""
    line = WinnerCell(PROBLEM, "sm90", H100.gpu, Destination.IN_PLACE, 0)
    return write(
        path,
        {
            replace(line, elements=elements): make_trial(each, timings=times({elements: 2.0}))
            for elements, each in chunks.items()
        },
    )


def write_trials(path: Path, trials: Sequence[Trial]) -> Path:
    """Writes a bundle of the winners among trials; returns its path."""
    return write(path, portfolio(trials))


def write(path: Path, selection: Mapping[WinnerCell, Trial]) -> Path:
    """Writes a bundle of these winners; returns its path."""
    kernels = {trial.kernel.digest: trial.kernel for trial in selection.values() if trial.kernel}
    write_bundle(path, "sm90", selection, kernels.__getitem__, {})
    return path


def change(path: Path, *statements: str, given: Sequence[object] = ()) -> None:
    """Executes statements in a file of SQLite. given: the values of their question marks."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement, given)


def remake(path: Path, connect: Callable[[Path], sqlite3.Connection] = sqlite3.connect) -> None:
    """Makes every digest anew, as somebody could who changed the rows of a bundle."""
    with closing(connect(path)) as connection, connection:
        for number, *_ in read_rows(connection, "problems"):
            winners = rows_digest(winners_of(connection, number))
            connection.execute("UPDATE problems SET winners = ? WHERE id = ?", (winners, number))
        digest = content_digest({table: read_rows(connection, table) for table in OPENED})
        connection.execute("UPDATE meta SET value = ? WHERE key = 'digest'", (digest,))
