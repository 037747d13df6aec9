"""A small bundle for the tests of choosing and of the runtime, and a machine that has no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_trials import make_trial, times

from hadagen.runtime import bundles
from hadagen.tuning_db.bundle_writer import write_bundle
from hadagen.tuning_db.winners import portfolio


def hide_bundles(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves no bundle to be found; those of the user would now lie in `directory`."""
    monkeypatch.delenv(bundles.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(directory / "data"))
    monkeypatch.setattr(bundles, "shipped", dict)


def write_sample(path: Path, chunks: int = 1) -> Path:
    """Writes a bundle of one winner, timed in place on an H100 at 8K and 64K elements; returns its path."""
    trial = make_trial(chunks, timings=times({1 << 13: 2.0, 1 << 16: 4.0}))
    assert trial.kernel
    write_bundle(path, "sm90", portfolio([trial]), {trial.kernel.digest: trial.kernel}.__getitem__)
    return path
