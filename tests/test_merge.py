"""Several bundles become one, and lose nothing by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sample_bundle import write_trials
from sample_trials import H100, H200, PROBLEM, in_clusters, make_timing, make_trial, times

from hadagen.errors import UsageError
from hadagen.problem import Numerics, Transform
from hadagen.regimes import Cache, Destination
from hadagen.trial import Environment, Provenance
from hadagen.tuning_db.bundle import Bundle, shipped
from hadagen.tuning_db.merge import arithmetic_of, merge_bundles, selection_of, write_selection
from hadagen.tuning_db.winners import WinnerCell, portfolio


def test_merging_keeps_every_winner_and_its_kernel(tmp_path: Path) -> None:
    cold = replace(make_timing(3.0, cache=Cache.COLD), copy_us=2.5)
    estimate = make_trial(
        4,
        problem=replace(PROBLEM, transform=Transform(512)),
        environment=Environment(),
        provenance=Provenance.ESTIMATED,
    )
    ours = portfolio([make_trial(1, timings=(make_timing(), cold)), estimate])
    theirs = portfolio([make_trial(2, environment=H200)])
    for name, selection in (("h100.db", ours), ("h200.db", theirs), ("both.db", ours | theirs)):
        write_selection(tmp_path / name, "sm90", selection, {})
    merge_bundles([tmp_path / "h100.db", tmp_path / "h200.db"], tmp_path / "merged.db")
    merged, both = Bundle.open(tmp_path / "merged.db"), Bundle.open(tmp_path / "both.db")
    merged.verify()
    assert merged.digest == both.digest
    merge_bundles([tmp_path / "merged.db"], tmp_path / "again.db")
    assert Bundle.open(tmp_path / "again.db").digest == merged.digest


def test_merging_keeps_what_is_for_gpus_that_hold_no_large_clusters(tmp_path: Path) -> None:
    small, between, large = 1 << 20, 9 << 17, 3 << 19

    def merged(*names: str) -> list[tuple[int, bool, int]]:
        selection = merge_bundles([tmp_path / name for name in names], tmp_path / "merged.db")
        assert len(Bundle.open(tmp_path / "merged.db").entries(PROBLEM)) == len(selection)
        return [(cell.elements, cell.portable, trial.knobs["chunks"]) for cell, trial in selection.items()]

    old = [
        in_clusters(16, 1, timings=times({small: 1.0, between: 3.0, large: 3.0})),
        in_clusters(16, 2, timings=times({small: 3.0, between: 1.0, large: 1.0})),
        in_clusters(8, 4, timings=times({small: 2.0, between: 2.0, large: 2.0})),
    ]
    write_trials(tmp_path / "old.db", old)
    found = [(small, False, 1), (small, True, 4), (between, False, 2), (between, True, 4)]
    found += [(large, False, 2), (large, True, 4)]
    assert merged("old.db") == found
    assert Bundle.open(tmp_path / "merged.db").digest == Bundle.open(tmp_path / "old.db").digest
    write_trials(tmp_path / "slower.db", [in_clusters(1, 8, timings=times({small: 1.5}))])
    found[1] = (small, True, 8)
    assert merged("old.db", "slower.db") == merged("slower.db", "old.db") == found
    write_trials(tmp_path / "faster.db", [in_clusters(1, 8, timings=times({large: 0.5}))])
    assert merged("old.db", "faster.db") == [(small, False, 1), (small, True, 4), (large, False, 8)]


def test_merging_leaves_nothing_beside_a_winner_between_buckets_that_every_gpu_holds(tmp_path: Path) -> None:
    low, between, high = 1 << 20, 9 << 17, 3 << 19
    around = make_trial(1, timings=times({low: 1.0, between: 3.0, high: 1.0}))
    large = in_clusters(16, 2, timings=times({low: 2.0, between: 1.0, high: 2.0}))
    beside = in_clusters(8, 4, timings=times({low: 2.0, between: 1.5, high: 2.0}))
    write_trials(tmp_path / "old.db", [around, large, beside])
    write_trials(tmp_path / "new.db", [around, make_trial(8, timings=times({low: 2.0, between: 0.9, high: 2.0}))])
    selection = merge_bundles([tmp_path / "old.db", tmp_path / "new.db"], tmp_path / "merged.db")
    named = [(cell.elements, cell.portable, trial.knobs["chunks"]) for cell, trial in selection.items()]
    assert named == [(low, False, 1), (between, False, 8), (high, False, 1)]


def test_merging_a_bundle_with_itself_changes_nothing(tmp_path: Path) -> None:
    """Though what stands beside a winner for other GPUs is a little faster, of another set of kernels."""
    low, between, high = 1 << 20, 9 << 17, 3 << 19
    trials = [
        in_clusters(16, 1, timings=times({low: 1.01, between: 3.0, high: 1.0})),
        in_clusters(8, 2, timings=times({low: 1.0, between: 1.0, high: 2.0})),
        in_clusters(8, 4, timings=times({low: 2.0, between: 2.0, high: 1.9})),
    ]
    write_trials(tmp_path / "one.db", trials)
    found = Bundle.open(tmp_path / "one.db")
    (winner, beside), *_ = ([e for e in found.entries(PROBLEM) if e.elements == count] for count in (low, between))
    assert (winner.us, winner.portable, beside.us, beside.portable) == (1.01, False, 1.0, True)
    merge_bundles([tmp_path / "one.db"], tmp_path / "merged.db")
    assert Bundle.open(tmp_path / "merged.db").digest == found.digest


def test_merging_a_shipped_bundle_with_itself_changes_nothing(tmp_path: Path) -> None:
    """A part of one of measured winners, and one of estimated winners; the others are made like the latter."""
    measured, part = Bundle.open(shipped()["sm90"]), tmp_path / "part.db"
    some = measured.problems()[::10]
    selection = {cell: trial for cell, trial in selection_of(measured).items() if cell.problem in some}
    write_selection(part, "sm90", selection, arithmetic_of(measured))
    for path in (part, shipped()["sm80"]):
        merge_bundles([path], tmp_path / "merged.db")
        assert Bundle.open(tmp_path / "merged.db").digest == Bundle.open(path).digest


def test_merging_leaves_out_what_misses_a_bound_that_is_stricter_now(tmp_path: Path) -> None:
    fast, bound = PROBLEM.with_io(numerics=Numerics.FAST), PROBLEM.error_bound
    assert fast.error_bound > bound
    old = make_trial(1, problem=fast, errors={"normal": 2 * fast.error_bound}, timings=times({1 << 13: 1.0}))
    new = make_trial(2, problem=fast, errors={"normal": fast.error_bound}, timings=times({1 << 13: 2.0}))
    only_old = replace(old, problem=replace(fast, transform=Transform(512)))
    for name, trials in (("old.db", [old, only_old]), ("new.db", [new])):
        selection = {WinnerCell(t.problem, "sm90", H100.gpu, Destination.IN_PLACE, 1 << 13): t for t in trials}
        write_selection(tmp_path / name, "sm90", selection, {})
    merge_bundles([tmp_path / "old.db", tmp_path / "new.db"], tmp_path / "merged.db")
    merged = Bundle.open(tmp_path / "merged.db")
    assert merged.problems() == [fast]
    assert new.kernel
    assert [entry.kernel for entry in merged.entries(fast)] == [new.kernel.digest]


def test_merging_takes_winners_between_buckets_only_beside_those_they_were_found_with(tmp_path: Path) -> None:
    low, between, high = (WinnerCell(PROBLEM, "sm90", H100.gpu, Destination.IN_PLACE, k << 17) for k in (8, 9, 12))

    def write(name: str, us: dict[int, tuple[float, float, float]]) -> None:
        """Times of kernels at the three counts."""
        counts = low.elements, between.elements, high.elements
        trials = [make_trial(c, timings=times(dict(zip(counts, each, strict=True)))) for c, each in us.items()]
        write_trials(tmp_path / name, trials)

    def merged(*names: str) -> list[int]:
        selection = merge_bundles([tmp_path / name for name in names], tmp_path / "merged.db")
        assert Bundle.open(tmp_path / "merged.db").entries(PROBLEM)
        assert list(selection) == sorted(selection)
        return [trial.knobs["chunks"] for trial in selection.values()]

    write("old.db", {1: (1.0, 3.0, 3.0), 2: (2.0, 2.0, 2.0)})
    assert merged("old.db") == [1, 2, 2]
    write("small.db", {3: (0.9, 1.0, 9.0)})
    assert merged("old.db", "small.db") == merged("small.db", "old.db") == [3, 2]
    write("large.db", {3: (9.0, 1.0, 0.9)})
    assert merged("old.db", "large.db") == [1, 3]
    write("same.db", {1: (0.9, 3.0, 3.0), 2: (2.0, 1.5, 1.5)})
    assert merged("old.db", "same.db") == [1, 2, 2]


def test_bundles_of_several_archs_cannot_be_merged(tmp_path: Path) -> None:
    for arch in ("sm90", "sm120"):
        write_selection(tmp_path / arch, arch, portfolio([make_trial(1, arch=arch)]), {})
    with pytest.raises(UsageError, match="2 archs"):
        merge_bundles([tmp_path / "sm90", tmp_path / "sm120"], tmp_path / "out.db")
    assert not (tmp_path / "out.db").exists()
