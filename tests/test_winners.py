"""Winners and portfolios: laws over arbitrary trials, what may and may not win, and bundles that are merged."""

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_bundle import write_trials
from sample_trials import H100, H200, PROBLEM, competitors, in_clusters, make_timing, make_trial, times

from hadagen.errors import UsageError
from hadagen.problem.problem import Numerics, Transform
from hadagen.problem.regimes import LOSS, Cache, Destination
from hadagen.problem.trial import Environment, Outcome, Provenance, Trial
from hadagen.tuning_db import bundle_writer
from hadagen.tuning_db.bundle import Bundle, shipped
from hadagen.tuning_db.merge import arithmetic_of, merge_bundles, selection_of, write_selection
from hadagen.tuning_db.table import export_csv
from hadagen.tuning_db.winners import (
    WinnerCell,
    _calls_about,
    best_by_cell,
    cell_value,
    closest_trials,
    may_win,
    portfolio,
)

IN_PLACE, OUT_OF_PLACE = Destination.IN_PLACE, Destination.OUT_OF_PLACE
CELL = WinnerCell(PROBLEM, "sm90", H100.gpu, IN_PLACE, 1 << 13)


def time_in(trial: Trial, cell: WinnerCell) -> float:
    timing = cell_value(trial, cell.destination, cell.elements, trial.environment.l2_bytes)
    return timing.us


@given(competitors(), st.sampled_from([0.0, 0.02, 0.05]))
def test_a_portfolio_serves_every_cell_within_the_loss(trials: list[Trial], loss: float) -> None:
    best = {cell: found for cell, found in best_by_cell(trials).items() if cell.is_bucket}
    chosen = portfolio(trials, loss)
    assert chosen.keys() == best.keys()
    for cell, trial in chosen.items():
        assert (trial.problem, trial.arch, trial.environment.gpu) == (cell.problem, cell.arch, cell.gpu)
        assert best[cell][1].us <= time_in(trial, cell) <= best[cell][1].us * (1 + loss)


@given(competitors())
def test_a_cell_gets_the_fastest_kernel_of_the_portfolio(trials: list[Trial]) -> None:
    chosen = portfolio(trials, loss=0.05)
    kernels = {trial.kernel for trial in chosen.values()}
    small = [trial for trial in trials if trial.kernel in kernels]
    assert {cell: time_in(trial, cell) for cell, trial in chosen.items()} == {
        cell: timing.us for cell, (_, timing) in best_by_cell(small).items() if cell.is_bucket
    }


@given(st.data())
def test_the_order_of_the_trials_does_not_matter(data: st.DataObject) -> None:
    trials = data.draw(competitors())
    shuffled = data.draw(st.permutations(trials))
    assert list(best_by_cell(shuffled).items()) == list(best_by_cell(trials).items())
    assert list(portfolio(shuffled).items()) == list(portfolio(trials).items())


@pytest.mark.parametrize("fields", [{"date": "2026"}, {"environment": replace(H100, driver="1")}])
def test_the_order_of_trials_that_tie_in_all_but_when_and_on_what_driver_does_not_matter(
    fields: dict[str, object],
) -> None:
    trials = [make_trial(), make_trial(**fields)]
    assert best_by_cell(trials) == best_by_cell(trials[::-1])


@given(st.data(), st.integers(1, 6))
def test_closest_trials_come_nearest_to_the_best(data: st.DataObject, most: int) -> None:
    trials = [trial for trial in data.draw(competitors()) if trial.problem == PROBLEM]
    found = closest_trials(trials, most)
    assert closest_trials(data.draw(st.permutations(trials)), most) == found
    every = closest_trials(trials, len(trials))
    assert found == every[:most]
    kernels = [trial.kernel for trial in every]
    assert len(set(kernels)) == len(kernels)
    assert {trial.kernel for trial, _ in best_by_cell(trials).values()} <= set(kernels)
    assert all(may_win(trial) for trial in every)


def test_who_wins_one_cell_comes_before_who_is_near_in_all() -> None:
    small, large = 1 << 13, 1 << 20
    trials = [
        make_trial(1, timings=times({small: 1.02, large: 1.01})),
        make_trial(2, timings=times({small: 1.00, large: 9.0})),
        make_trial(4, timings=times({small: 9.00, large: 1.0})),
        make_trial(8, timings=times({small: 5.00, large: 5.0})),
    ]
    assert [trial.knobs["chunks"] for trial in closest_trials(trials, 3)][2] == 1
    assert {trial.knobs["chunks"] for trial in closest_trials(trials, 2)} == {2, 4}


@given(competitors())
def test_nothing_eligible_is_faster_than_the_best(trials: list[Trial]) -> None:
    best = best_by_cell(trials)
    for trial in filter(may_win, trials):
        for timing in trial.timings:
            cell = WinnerCell(trial.problem, trial.arch, trial.environment.gpu, timing.destination, timing.elements)
            if trial.provenance is Provenance.MEASURED:
                assert best[cell][1].us <= timing.us


def test_one_kernel_close_to_the_best_everywhere_is_enough() -> None:
    specialists = [
        make_trial(1, timings=times({1 << 13: 1.00, 1 << 20: 9.0})),
        make_trial(2, timings=times({1 << 13: 9.00, 1 << 20: 2.0})),
    ]
    generalist = make_trial(4, timings=times({1 << 13: 1.01, 1 << 20: 2.03}))
    assert set(map(id, portfolio([*specialists, generalist]).values())) == {id(generalist)}
    assert set(map(id, portfolio([*specialists, generalist], loss=0.005).values())) == set(map(id, specialists))


@pytest.mark.parametrize(("near", "nearer"), [(1, 2), (2, 1)])
def test_of_kernels_that_serve_as_much_the_nearest_to_the_best_is_taken(near: int, nearer: int) -> None:
    trials = [
        make_trial(near, timings=times({1 << 13: 1.00, 1 << 20: 1.015})),
        make_trial(nearer, timings=times({1 << 13: 1.01, 1 << 20: 1.00})),
    ]
    assert [trial.knobs["chunks"] for trial in portfolio(trials).values()] == [nearer, nearer]


def test_gpus_of_one_arch_share_a_kernel() -> None:
    trials = [
        make_trial(1, timings=times({1 << 13: 1.00})),
        make_trial(2, timings=times({1 << 13: 1.01})),
        make_trial(1, timings=times({1 << 13: 1.30}), environment=H200),
        make_trial(2, timings=times({1 << 13: 1.20}), environment=H200),
    ]
    assert [trial.knobs["chunks"] for trial in portfolio(trials).values()] == [2, 2]


# Half of the L2 of an H100 is 25 MiB: 13107200 elements of two bytes in place, half as many out of place.
@pytest.mark.parametrize(
    ("destination", "elements", "cache"),
    [
        (IN_PLACE, 13107200, Cache.HOT),
        (IN_PLACE, 13107201, Cache.COLD),
        (OUT_OF_PLACE, 6553600, Cache.HOT),
        (OUT_OF_PLACE, 6553601, Cache.COLD),
    ],
)
def test_hot_decides_up_to_half_of_l2(destination: Destination, elements: int, cache: Cache) -> None:
    hot = make_timing(1.0, elements, destination, Cache.HOT)
    cold = make_timing(2.0, elements, destination, Cache.COLD)
    assert cell_value(make_trial(timings=(cold, hot)), destination, elements, H100.l2_bytes).cache is cache


def test_the_other_regime_counts_only_where_the_deciding_one_is_missing() -> None:
    cold = make_trial(1, timings=(make_timing(1.0, cache=Cache.COLD),))
    hot = make_trial(2, timings=(make_timing(5.0, cache=Cache.HOT),))
    assert best_by_cell([cold])[CELL][0] is cold
    assert best_by_cell([cold, hot])[CELL][0] is hot
    assert portfolio([cold, hot], loss=10)[CELL] is hot
    assert cell_value(hot, OUT_OF_PLACE, CELL.elements, H100.l2_bytes) is None


@pytest.mark.parametrize(
    "fields",
    [
        *({"outcome": outcome} for outcome in Outcome if outcome is not Outcome.OK),
        {"errors": {"normal": 1e-4, "large": 2.3e-4}},
        {"errors": {"normal": math.nan}},
        {"errors": {}},
        {"kernel": None},
    ],
)
def test_what_is_unverified_or_inexact_never_wins(fields: dict[str, object]) -> None:
    assert best_by_cell([make_trial()])
    assert not best_by_cell([make_trial(**fields)])


def test_a_measured_trial_outranks_a_faster_estimate() -> None:
    measured = make_trial(1, timings=times({1 << 13: 5.0}))
    estimate = make_trial(2, timings=times({1 << 13: 1.0, 1 << 20: 1.0}), provenance=Provenance.ESTIMATED)
    assert portfolio([measured, estimate], loss=10)[CELL] is measured
    # Also where the estimate is for no GPU in particular: it keeps only the cell that nobody measured.
    anywhere = replace(estimate, environment=Environment())
    assert list(portfolio([measured, anywhere])) == [replace(CELL, gpu="", elements=1 << 20), CELL]


def test_the_table_has_a_line_for_each_regime(tmp_path: Path) -> None:
    path = tmp_path / "winners.csv"
    beside = in_clusters(1, 4, timings=times({1 << 20: 2.0}))  # which the table leaves out
    export_csv(portfolio([make_trial(2), in_clusters(16, 1, timings=times({1 << 20: 1.5})), beside]), path)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["elements"], line["cache"], line["us"], line["chunks"]) for line in lines] == [
        ("8192", "cold", "3.000", "2"),
        ("8192", "hot", "2.000", "2"),
        ("1048576", "cold", "1.500", "1"),
        ("1048576", "hot", "1.500", "1"),
    ]
    assert lines[1]["fraction_of_copy"] == "0.950"


def test_a_line_of_the_table_has_the_times_of_its_own_cell(tmp_path: Path) -> None:
    trial = make_trial(
        timings=(make_timing(2.0), make_timing(5.0, destination=OUT_OF_PLACE), make_timing(9.0, 1 << 20))
    )
    export_csv(portfolio([trial]), tmp_path / "winners.csv")
    with (tmp_path / "winners.csv").open(newline="") as file:
        lines = [(line["elements"], line["destination"], line["us"]) for line in csv.DictReader(file)]
    assert lines == [
        ("8192", "in-place", "2.000"),
        ("8192", "out-of-place", "5.000"),
        ("1048576", "in-place", "9.000"),
    ]


def test_among_kernels_that_tie_where_it_decides_the_other_regime_has_a_say() -> None:
    cell = (1 << 26, OUT_OF_PLACE)

    def trial(chunks: int, cold: float, hot: float) -> Trial:
        return make_trial(chunks, timings=(make_timing(cold, *cell, Cache.COLD), make_timing(hot, *cell, Cache.HOT)))

    slow_when_hot, fast_when_hot, slower = trial(1, 100.0, 150.0), trial(2, 100.5, 100.0), trial(4, 110.0, 90.0)
    ((winner, timing),) = best_by_cell([slow_when_hot, fast_when_hot, slower]).values()
    assert winner == fast_when_hot
    assert timing.cache is Cache.COLD
    untimed = make_trial(8, timings=(make_timing(100.0, *cell, Cache.COLD),))
    ((winner, _),) = best_by_cell([slow_when_hot, fast_when_hot, untimed]).values()
    assert winner == fast_when_hot


@pytest.mark.parametrize(
    "cell", [(3 << 20, IN_PLACE, Cache.HOT), (12 << 20, OUT_OF_PLACE, Cache.COLD), (1 << 28, IN_PLACE, Cache.COLD)]
)
def test_where_only_one_regime_was_timed_a_loss_is_one_of_time(cell: tuple[int, Destination, Cache]) -> None:
    elements, destination, cache = cell

    def trial(chunks: int, us: float) -> Trial:
        aside = make_timing(1.0 if chunks == 2 else 9.0, 1 << 13)
        return make_trial(chunks, timings=(make_timing(us, elements, destination, cache), aside))

    best, general, near = trial(1, 100.0), trial(2, 102.1), trial(2, 101.9)
    where = replace(CELL, destination=destination, elements=elements)
    assert portfolio([best, general])[where] == best
    assert portfolio([best, near])[where] == near
    assert closest_trials([general, best], 2) == closest_trials([best, general], 2)


def test_where_data_may_well_be_hot_both_regimes_count_alike() -> None:
    cell = (1 << 24, IN_PLACE)  # 32 MiB: more than half of L2, and less than all of it
    cold_king = make_trial(1, timings=(make_timing(20.0, *cell, Cache.COLD), make_timing(15.0, *cell, Cache.HOT)))
    all_round = make_trial(2, timings=(make_timing(21.0, *cell, Cache.COLD), make_timing(10.0, *cell, Cache.HOT)))
    ((winner, timing),) = best_by_cell([cold_king, all_round]).values()
    assert winner == all_round
    assert timing.cache is Cache.COLD


# ---- between buckets -------------------------------------------------------------------------------------------------
BETWEEN = 9 << 17  # of rows of 256 elements, which are tuned at 1M and 1.5M


PLACES = 1 << 20, BETWEEN, 3 << 19
MORE_PLACES = 1 << 20, BETWEEN, BETWEEN + (1 << 16), 3 << 19


def winners(*us: Sequence[float | None], at: Sequence[int] = PLACES, loss: float = LOSS) -> dict[int, int]:
    """Which of the kernels 1, 2 and so on is named at which count of elements. us: the times of each, None for none."""
    timed = [{count: each for count, each in zip(at, some, strict=True) if each} for some in us]
    trials = [make_trial(number, timings=times(some)) for number, some in enumerate(timed, 1)]
    return {cell.elements: trial.knobs["chunks"] for cell, trial in portfolio(trials, loss).items()}


def test_between_buckets_a_winner_is_named_where_calls_lose_without() -> None:
    """A call takes the kernel of 1M there."""
    small, large, third = (1.0, 2.0, 3.0), (2.0, 1.9, 2.0), (2.0, 1.88, 3.0)
    assert winners(small, large) == dict(zip(PLACES, (1, 2, 2), strict=True))
    assert BETWEEN not in winners(small, large, loss=0.06)
    assert winners(small, large, third)[BETWEEN] == 2  # which is there anyway
    assert winners(small, large, third, loss=0.01)[BETWEEN] == 3
    assert winners(small, (2.0, None, 2.0), third)[BETWEEN] == 3


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.02, 0.05, 0.3])
@pytest.mark.parametrize("first", [1.0, 2.3, 7.7])
def test_a_kernel_just_as_far_behind_as_it_may_be_is_near_the_best(loss: float, first: float) -> None:
    """By one rule, however quotients and products round."""
    worse = first * (1 + loss)
    us = (1.0, worse, 3.0), (2.0, worse, 2.0), (2.0, first, 3.0)
    trials = [
        make_trial(chunks, timings=tuple(make_timing(*each) for each in zip(some, PLACES, strict=True)))
        for chunks, some in enumerate(us, 1)
    ]
    assert replace(CELL, elements=BETWEEN) not in portfolio(trials, loss)


def test_between_buckets_all_calls_count_to_which_no_other_is_nearer() -> None:
    """Calls take the kernel of 1.5M from 1.22M on, and of what was timed 1.1875M is the nearest to those."""
    found = winners((1.0, 1.0, 1.0, 2.0), (2.0, 2.0, 2.0, 1.0), at=MORE_PLACES)
    assert found == {1 << 20: 1, BETWEEN + (1 << 16): 1, 3 << 19: 2}
    assert list(winners((1.0, 1.0, 1.0, 2.0), (2.0, 2.0, 1.02, 1.0), at=MORE_PLACES)) == [1 << 20, 3 << 19]


def test_a_call_half_way_between_two_counts_is_about_the_larger() -> None:
    """As it takes the larger one's winner: of 1, 2 and 4 rows, 2 are as near to 1 as to 4."""
    assert _calls_about([1, 4], 1) == {1: (1, 1), 4: (2, 4)}
    assert _calls_about([8, 24, 64], 8) == {8: (8, 8), 24: (16, 32), 64: (40, 64)}


def test_only_at_buckets_are_closest_trials_compared() -> None:
    """Between them a few were timed, each of which comes near to the best of few."""
    trials = [make_trial(chunks, timings=times({1 << 20: float(chunks)})) for chunks in (1, 2, 4)]
    trials.append(make_trial(8, timings=times({1 << 20: 8.0, BETWEEN: 1.0})))
    assert [trial.knobs["chunks"] for trial in closest_trials(trials, 3)] == [1, 2, 4]


def test_between_buckets_no_winner_is_named_where_the_kernel_that_calls_take_was_not_timed() -> None:
    assert list(winners((1.0, 2.0, 3.0), (2.0, 1.9, 2.0), (0.5, None, None)).values()) == [3, 2]
    assert winners((None, 2.0, None)) == {}


def test_of_one_kernel_the_fastest_trial_counts_at_a_bucket_and_the_newest_between() -> None:
    fast = times({1 << 20: 1.0, BETWEEN: 1.0})
    older = make_trial(timings=fast, environment=replace(H100, driver="1"), date="2024")
    newer = make_trial(timings=times({1 << 20: 2.0, BETWEEN: 2.0}))
    best = best_by_cell([older, newer])
    assert [best[replace(CELL, elements=count)][0] for count in (1 << 20, BETWEEN)] == [older, newer]


def test_what_is_added_between_buckets_may_help_at_the_next() -> None:
    """As the same kernel may be best there; but what is added where it loses itself calls for another."""
    small = 1.0, 2.0, 2.0, 3.0
    assert list(winners(small, (3.0, 1.0, 1.0, 1.0), at=MORE_PLACES)) == [1 << 20, BETWEEN, 3 << 19]
    assert list(winners(small, (3.0, 1.0, 9.0, 1.0), at=MORE_PLACES).values()) == [1, 2, 1, 2]


# ---- where large clusters do not fit ---------------------------------------------------------------------------------
def test_beside_a_winner_in_large_clusters_stands_the_best_that_every_gpu_holds() -> None:
    trials = [
        in_clusters(16, 1, timings=times({1 << 13: 1.0, 1 << 14: 1.0, 1 << 20: 9.0})),
        in_clusters(8, 2, timings=times({1 << 13: 1.31, 1 << 14: 1.30, 1 << 20: 5.0})),
        in_clusters(1, 3, timings=times({1 << 13: 1.30, 1 << 14: 1.50, 1 << 20: 4.0})),
        in_clusters(16, 4, timings=times({1 << 13: 1.1, 1 << 14: 1.1, 1 << 20: 4.5})),
    ]

    def named(trials: list[Trial], loss: float) -> list[tuple[int, bool, int]]:
        return [(cell.elements, cell.portable, t.knobs["chunks"]) for cell, t in portfolio(trials, loss).items()]

    beginning = [(1 << 13, False, 1), (1 << 13, True, 2), (1 << 14, False, 1), (1 << 14, True, 2)]
    assert named(trials, 0.02) == [*beginning, (1 << 20, False, 3)]  # one for both, as it is near the best
    beginning[1] = (1 << 13, True, 3)
    assert named(trials, 0.001) == [*beginning, (1 << 20, False, 3)]
    assert named(trials[:1], 0.02) == [(1 << 13, False, 1), (1 << 14, False, 1), (1 << 20, False, 1)]
    between = in_clusters(16, 1, timings=times({1 << 20: 1.0, BETWEEN: 1.0, 3 << 19: 3.0}))
    large = in_clusters(1, 3, timings=times({1 << 20: 2.0, BETWEEN: 3.0, 3 << 19: 2.0}))
    larger = in_clusters(16, 4, timings=times({1 << 20: 2.0, BETWEEN: 0.5, 3 << 19: 2.5}))
    found = named([between, large, larger], 0.02)
    assert found[2:] == [(BETWEEN, False, 4), (BETWEEN, True, 3), (3 << 19, False, 3)]


@given(competitors(), st.sampled_from([0.0, 0.02, 0.05]))
def test_without_large_clusters_nothing_is_slower_than_the_best_by_more_than_the_loss(
    trials: list[Trial], loss: float
) -> None:
    def clustered(trial: Trial) -> Trial:
        blocks = 16 if trial.knobs["chunks"] > 2 else 8
        return replace(trial, kernel=replace(trial.kernel, launch=replace(trial.kernel.launch, cluster=blocks)))

    trials = [clustered(trial) for trial in trials]
    chosen = portfolio(trials, loss)
    small = best_by_cell(trial for trial in trials if trial.knobs["chunks"] <= 2)
    for cell, trial in chosen.items():
        if cell.portable:
            bare = replace(cell, portable=False)
            assert chosen[bare].knobs["chunks"] > 2
            assert small[bare][1].us <= time_in(trial, cell) <= small[bare][1].us * (1 + loss)
        elif trial.knobs["chunks"] > 2 and trial.provenance is Provenance.MEASURED:
            there = cell in small and small[cell][0].provenance is Provenance.MEASURED
            assert (replace(cell, portable=True) in chosen) == there


# ---- several bundles become one --------------------------------------------------------------------------------------
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


def test_merging_a_shipped_bundle_with_itself_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part of one of measured winners, and one of estimated winners; the others are made like the latter."""
    # The digest covers the version that writes.
    monkeypatch.setattr(bundle_writer, "version", lambda name: Bundle.open(shipped()["sm80"]).version)
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
