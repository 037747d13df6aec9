"""What is added to winners between the counts that they were tuned at, with kernels that take what a formula says."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, isqrt, log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_trials import H100, H200, in_clusters, make_kernel, make_trial, times

from hadagen.measure import Cell, Variant, cells_at
from hadagen.problem.problem import DType, Numerics, Problem, Transform
from hadagen.problem.regimes import LOSS, Cache, Destination, element_buckets, nearest
from hadagen.problem.trial import Outcome, Timing, Trial
from hadagen.tuner import refine as refine_module
from hadagen.tuner.refine import MOST_KERNELS, SHORT_GAP, refine
from hadagen.tuning_db import winners
from hadagen.tuning_db.store import Store
from hadagen.tuning_db.winners import portfolio

LONG = Problem.of(1 << 15, DType.FLOAT16, Numerics.FAST)
IN_PLACE, OUT = Destination.IN_PLACE, Destination.OUT_OF_PLACE
Formula = Callable[[int], float]  # µs of so many rows
KernelByRows = dict[int, int]  # the number of the kernel that wins, by rows


def waves(of: int, us: float) -> Formula:
    """A kernel of which so many rows are one wave."""
    return lambda rows: us * ceil(rows / of)


class Bench:
    """A store of kernels that take what their formulas say, in place, and a device that times them so.

    `rounds` is where kernels were timed, `endings` how those end that are not ok, and `luck` is what the first times at
    so many rows are multiplied by, by kernel. `clusters`: of how many blocks those are that are not of 1, by kernel.
    """

    def __init__(self, formulas: Sequence[Formula], problem: Problem = LONG) -> None:
        self.problem, self.formulas = problem, formulas
        self.store = Store.open("sqlite://")
        self.rounds: list[tuple[list[int], list[int]]] = []
        self.endings: dict[int, Outcome] = {}
        self.luck: dict[tuple[int, int], float] = {}
        self.clusters: dict[int, int] = {}

    def tune(self, rows: Sequence[int] = ()) -> None:
        """Time all kernels at these numbers of rows, by default at those of the buckets."""
        counts = [each * self.problem.n for each in rows] or element_buckets(self.problem)
        for number in range(len(self.formulas)):
            self.store.record(self.trial(number, [Cell(count, IN_PLACE, Cache.HOT) for count in counts]))

    def run(self) -> None:
        assert refine([self.problem], self.store, "sm90", H100, self.measure) == [self.problem]

    def refine(self) -> KernelByRows:
        """What it adds."""
        before = self.winners()
        self.run()
        after = self.winners()
        assert before.items() <= after.items()
        return dict(after.items() - before.items())

    def winners(self) -> KernelByRows:
        found = {cell: trial for cell, trial in portfolio(self.store.trials()).items() if not cell.portable}
        return {cell.elements // self.problem.n: trial.knobs["chunks"] for cell, trial in found.items()}

    def loss(self, selection: KernelByRows, rows: int) -> float:
        """Of a call, at so many rows."""
        return self.formulas[selection[nearest(sorted(selection), rows)]](rows) / self.best(rows) - 1

    def best(self, rows: int) -> float:
        return min(formula(rows) for formula in self.formulas)

    def trial(self, number: int, cells: Sequence[Cell]) -> Trial:
        def us(cell: Cell) -> float:
            rows = cell.elements // self.problem.n
            lucky = self.luck.pop((number, rows), 1.0) if cell.cache is Cache.HOT else 1.0
            return self.formulas[number](rows) * lucky

        timings = [Timing(*cell, *(3 * [us(cell)]), 1.0) for cell in cells]
        outcome = self.endings.get(number, Outcome.OK)
        blocks = self.clusters.get(number, 1)
        return in_clusters(blocks, number, problem=self.problem, timings=tuple(timings), outcome=outcome)

    def measure(self, cells: Mapping[Problem, Sequence[Cell]], variants: Sequence[Variant]) -> Iterator[Trial]:
        there = [cell for cell in cells[self.problem] if cell.destination is IN_PLACE]
        numbers = [variant.knobs["chunks"] for variant in variants]
        self.rounds.append((sorted({cell.elements // self.problem.n for cell in there}), numbers))
        for variant in variants:
            yield replace(self.trial(variant.knobs["chunks"], there), kernel=variant.kernel)

    @property
    def looked_at(self) -> list[list[int]]:
        """KernelByRows, round by round."""
        return [rows for rows, _ in self.rounds]


def tuned(formulas: Sequence[Formula], rows: Sequence[int] = ()) -> Bench:
    """A bench whose kernels were timed at these numbers of rows, by default at those of the buckets."""
    bench = Bench(formulas)
    bench.tune(rows)
    return bench


def test_the_end_of_a_wave_is_found() -> None:
    """264 rows are a wave of one kernel, and from there on the other is faster, as it is with less than 234."""
    bench = tuned([waves(264, 7.0), lambda rows: 0.03 * rows], [128, 256, 384, 512])
    assert bench.loss(bench.winners(), 271) > 0.7
    added = bench.refine()
    found = bench.winners()
    assert added == dict.fromkeys((215, 269, 443), 1)
    assert bench.loss(found, 271) == 0
    # All gaps are looked at once, only those between different winners again, and what names a winner twice.
    assert bench.looked_at == [[181, 313, 443], [215, 283, 476], [234, 269], [215, 269, 443]]
    counts = sorted({128, 256, 384, 512}.union(*bench.looked_at))
    for rows in (rows for rows in range(128, 513) if bench.loss(found, rows) > LOSS):
        above = bisect(counts, rows)
        assert counts[above] / counts[above - 1] < SHORT_GAP


def test_what_is_for_gpus_that_hold_no_large_clusters_ends_no_gap() -> None:
    """One kernel wins at both ends of every gap and between, so each is looked at once."""
    bench = Bench([lambda rows: rows, lambda rows: 1.5 * rows])
    bench.clusters = {0: 16}
    bench.tune([128, 256, 384, 512])
    assert bench.refine() == {}
    assert bench.looked_at == [[181, 313, 443]]
    assert [trial.knobs["chunks"] for trial in portfolio(bench.store.trials()).values()] == [0, 1] * 4


def test_where_calls_change_kernels_is_looked_at_though_the_same_wins_around() -> None:
    """The second kernel wins at 789 rows, so calls take it from 635 on: between 512 and 724, where the first wins."""
    bench = tuned(
        [
            lambda rows: 1.0,
            lambda rows: 1.5 if rows < 700 else 1.01 if rows < 750 else 0.9,
            lambda rows: 1.01 if 700 < rows < 750 else 1.5 if rows < 850 else 0.89,
        ],
        [512, 1024],
    )
    assert bench.refine() == {663: 0, 789: 1}
    assert bench.looked_at == [[724], [861], [789], [608, 938], [663], [663, 789]]
    assert max(bench.loss(bench.winners(), rows) for rows in range(512, 1025)) <= LOSS


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0.5, 3.0)), min_size=1, max_size=4),
    st.sampled_from([1 << 11, 1 << 15]),
)
def test_calls_lose_nothing_at_any_count_that_was_looked_at(shapes: list[tuple[int, float]], n: int) -> None:
    bench = Bench([waves(of, us * of / 100) for of, us in shapes], replace(LONG, transform=Transform(n)))
    bench.tune([count // n for count in element_buckets(bench.problem) if count <= 1 << 24])
    added = bench.refine()
    looked_at = {rows for there in bench.looked_at for rows in there}
    assert added.keys() <= looked_at
    found, tuned = bench.winners(), {count // n for count in element_buckets(bench.problem) if count <= 1 << 24}
    counts = sorted(looked_at | tuned)
    for rows in range(counts[0], counts[-1] + 1):
        at = nearest(counts, rows)
        if at in looked_at:
            assert bench.formulas[found[nearest(sorted(found), rows)]](at) <= (1 + LOSS + 1e-9) * bench.best(at)
    for low, high in pairwise(sorted(found)):
        above = bisect(counts, isqrt(low * high))
        assert found[low] == found[high] or counts[above] <= max(SHORT_GAP * counts[above - 1], counts[above - 1] + 1)
    before = len(bench.rounds)
    assert bench.refine() == {}
    assert {rows for there in bench.looked_at[before:] for rows in there} <= added.keys()  # the rest is known


def test_one_kernel_needs_no_more_winners() -> None:
    bench = tuned([waves(100, 1.0)])
    assert bench.refine() == {}
    assert not bench.rounds


def test_where_the_best_takes_longer_by_more_than_its_share_another_is_looked_for() -> None:
    """Past 264 rows, where a wave of the first kernel ends. It wins at 283, as at 256, and loses between."""
    bench = tuned([waves(264, 7.0), lambda rows: 12.0 if rows < 283 else 14.1], [256, 384])
    assert bench.refine() == {269: 1}
    assert bench.looked_at == [[313], [283], [269], [346], [329], [269]]


def test_near_ties_need_no_more_winners() -> None:
    bench = tuned(
        [lambda rows: 1.0 + 0.0075 * log2(rows / 64), lambda rows: 1.03 - 0.0075 * log2(rows / 64)],
        [count // LONG.n for count in element_buckets(LONG) if 64 <= count // LONG.n <= 1024],
    )
    assert set(bench.winners().values()) == {0, 1}
    assert bench.refine() == {}


def test_a_lucky_time_names_no_winner() -> None:
    """At 181 rows the second kernel is timed once as if it were faster."""
    bench = tuned([lambda rows: 1.0 * rows, lambda rows: 1.0 * rows + (rows != 512)], [128, 256, 512])
    bench.luck = {(1, 181): 0.5}
    assert bench.refine() == {}
    assert bench.looked_at[-1] == [181]


@pytest.mark.parametrize("outcome", [Outcome.WRONG_ANSWER, Outcome.UNSTABLE])
def test_a_kernel_that_is_wrong_by_now_wins_nothing_any_more(outcome: Outcome) -> None:
    """Not by its trials on another driver either, and it is not timed again."""
    bench = tuned([waves(264, 7.0), lambda rows: 0.03 * rows], [256, 384])
    bench.store.record(replace(bench.store.trials()[1], environment=replace(H100, driver="1"), detail="older"))
    bench.endings = {1: outcome}
    assert bench.winners() == {256: 0, 384: 1}
    bench.run()
    assert bench.winners() == {256: 0, 384: 0}
    assert [numbers for _, numbers in bench.rounds] == [[0, 1]]
    outcomes = {trial.knobs["chunks"]: trial.outcome for trial in bench.store.trials()}
    assert outcomes == {0: Outcome.OK, 1: outcome}
    assert all(kernel.source for kernel in (trial.kernel for trial in bench.store.trials()) if kernel)


@pytest.mark.parametrize(
    "other", [{"environment": H200}, {"problem": LONG.with_io(numerics=Numerics.ACCURATE)}], ids=["GPU", "problem"]
)
def test_a_kernel_that_is_wrong_on_one_gpu_or_for_one_problem_keeps_what_it_won_elsewhere(other: Any) -> None:
    """As when two contracts have compiled to the same code."""
    bench = tuned([waves(264, 7.0), lambda rows: 0.03 * rows], [256, 384])
    bench.store.record(replace(bench.store.trials()[1], **other))
    bench.endings = {1: Outcome.WRONG_ANSWER}
    bench.run()
    outcomes = [trial.outcome for trial in bench.store.trials() if trial.knobs["chunks"] == 1]
    assert outcomes == [Outcome.WRONG_ANSWER, Outcome.OK]


def test_a_place_is_looked_at_once_though_a_kernel_was_not_timed_there() -> None:
    class Hasty(Bench):
        def measure(self, cells: Mapping[Problem, Sequence[Cell]], variants: Sequence[Variant]) -> Iterator[Trial]:
            assert len(self.rounds) < 9, "it never ends"
            return super().measure(cells, variants[:1])

    bench = Hasty([lambda rows: 1.0 * rows, lambda rows: 2.0 * rows])
    bench.tune([128, 256, 512])
    assert bench.refine() == {}
    assert bench.looked_at == [[181, 362]]


def test_where_all_kernels_are_wrong_by_now_nothing_wins() -> None:
    bench = tuned([waves(264, 7.0), lambda rows: 0.03 * rows], [256, 384])
    bench.endings = dict.fromkeys((0, 1), Outcome.WRONG_ANSWER)
    bench.run()
    assert (bench.winners(), len(bench.rounds)) == ({}, 1)
    assert refine([bench.problem], bench.store, "sm90", H100, bench.measure) == []


def test_a_kernel_that_fails_otherwise_keeps_what_it_won_and_is_left_out() -> None:
    bench = tuned([waves(264, 7.0), lambda rows: 0.03 * rows], [256, 384])
    bench.endings = {1: Outcome.TIMEOUT}
    assert bench.refine() == {}
    assert [numbers for _, numbers in bench.rounds] == [[0, 1]]
    bench.endings = dict.fromkeys((0, 1), Outcome.TIMEOUT)
    bench.run()
    assert all(numbers for _, numbers in bench.rounds)
    bench.endings = {}
    assert set(bench.refine().values()) == {1}


def test_only_the_newest_kernel_of_knobs_competes() -> None:
    bench = tuned([waves(264, 7.0), lambda rows: 0.03 * rows], [256, 384])
    (_, second) = bench.store.trials()
    older = replace(second, environment=replace(H100, driver="1"), date="2024", kernel=make_kernel(b"older"))
    faster = tuple(replace(timing, us=0.9 * timing.us) for timing in older.timings)
    bench.store.record(replace(older, timings=faster))
    before = bench.store.trials()[1]
    bench.run()
    (_, found, _) = bench.store.trials()
    assert bench.rounds[0][1] == [0, 1]
    assert found.kernel == before.kernel
    assert set(before.timings) < set(found.timings)


def test_a_second_time_counts_on_another_driver_too() -> None:
    """A kernel that was lucky on an older one."""
    bench = tuned([lambda rows: 1.0 * rows, lambda rows: 1.0 * rows + (rows != 512)], [128, 256, 512])
    cells = cells_at(LONG, 181 * LONG.n, IN_PLACE, H100.l2_bytes)
    lucky = replace(bench.trial(1, cells), environment=replace(H100, driver="1"), date="2024")
    bench.store.record(replace(lucky, timings=tuple(replace(timing, us=1.0) for timing in lucky.timings)))
    bench.run()
    assert set(bench.winners()) == {128, 256, 512}


def test_no_row_count_is_skipped() -> None:
    """Between 2 and 4 rows lies 3, though their geometric mean is below it."""
    bench = tuned([lambda rows: 1.0 if rows in (2, 4) else 2.0, lambda rows: 1.5], [2, 4, 8])
    assert bench.refine() == {3: 1, 5: 1}


def test_a_tie_goes_to_a_kernel_at_an_end_of_the_gap() -> None:
    """So that gaps are not halved for kernels that are as fast."""
    bench = tuned([lambda rows: 1.0, lambda rows: {181: 0.99, 512: 0.5}.get(rows, 9.0)], [128, 256, 512])
    bench.refine()
    assert {rows for there in bench.looked_at for rows in there if rows < 256} == {181}


def test_kernels_that_win_nowhere_yet_compete() -> None:
    """As many as are allowed, those first that come nearest to winning."""
    bench = tuned(
        [lambda rows: 1.0, *(lambda rows, i=i: 1.1 + i if rows in (128, 256) else 0.5 for i in range(40))], [128, 256]
    )
    assert set(bench.winners().values()) == {0}
    assert set(bench.refine().values()) == {1}
    assert sorted(bench.rounds[0][1]) == list(range(MOST_KERNELS))


@pytest.mark.parametrize(("near", "then"), [(0, 215), (1, 152)])
def test_what_wins_at_either_end_wins_the_middle_if_it_is_near_the_best(near: int, then: int) -> None:
    """So only the other half is looked at again, though a third kernel is a little faster in the middle."""
    us = [{128: 1.0}, {256: 1.0}, {181: 1.0}]
    us[near][181] = 1.01
    bench = tuned([lambda rows, us=us: us.get(rows, 9.0) for us in us], [128, 256])
    assert bench.winners() == {128: 0, 256: 1}
    bench.refine()
    assert bench.looked_at[:2] == [[181], [then]]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many kernels may compete: fewer than there are buckets to win at."""
    monkeypatch.setattr("hadagen.tuner.refine.MOST_KERNELS", 16)
    return 16


def test_no_more_compete_than_are_allowed_and_the_winners_do_first(few: int) -> None:
    """One that is near the best everywhere wins, though others are a little faster at one count each."""
    rows = [1 << k for k in range(13)] + [3 << k for k in range(2, 8)]
    bench = tuned([lambda rows: 1.01, *(lambda rows, best=best: 1.0 if rows == best else 2.0 for best in rows)], rows)
    assert set(bench.winners().values()) == {0}
    bench.refine()
    assert (len(bench.rounds[0][1]), bench.rounds[0][1][0]) == (few, 0)


def test_all_that_win_compete(few: int) -> None:
    rows = [1 << k for k in range(13)] + [3 << k for k in range(2, 8)]
    bench = tuned([lambda rows, best=best: 1.0 if rows == best else 2.0 for best in rows], rows)
    bench.formulas = [*bench.formulas, lambda rows: 3.0]
    bench.tune(rows)
    bench.refine()
    assert sorted(bench.rounds[0][1]) == list(range(len(rows)))
    assert len(rows) > few


def test_what_an_earlier_run_timed_is_not_timed_again() -> None:
    """But where a new kernel competes, all are."""
    bench = tuned([lambda rows: 1.0 * rows, lambda rows: 2.0 * rows], [128, 256, 512])
    assert bench.refine() == {}
    assert bench.looked_at == [[181, 362]]
    assert bench.refine() == {}
    assert len(bench.rounds) == 1
    bench.formulas = [*bench.formulas, lambda rows: 0.5 * rows if rows == 181 else 1.01 * rows]
    bench.tune([128, 256, 512])
    assert bench.refine() == {181: 2}
    assert bench.looked_at[1][:2] == [181, 362]


def test_a_new_winner_at_a_bucket_leaves_no_stale_one_beside_it() -> None:
    bench = tuned([waves(264, 7.0), lambda rows: 0.03 * rows], [256, 384])
    assert set(bench.refine().values()) == {1}
    bench.formulas = [*bench.formulas, lambda rows: 0.01 * rows]
    bench.tune([256, 384])
    assert bench.winners() == {256: 2, 384: 2}


def test_problems_and_destinations_are_apart() -> None:
    """The faster kernel is another in each, and has one name in all."""
    problems = LONG, LONG.with_io(numerics=Numerics.ACCURATE)
    between = {(problems[0], IN_PLACE): 0, (problems[0], OUT): 1, (problems[1], IN_PLACE): 1, (problems[1], OUT): 0}
    asked = []

    def trial(problem: Problem, number: int, cells: Sequence[Cell]) -> Trial:
        """Each kernel is the faster one at one of the two buckets, and one of them is between."""
        timings = []
        for cell in cells:
            rows = cell.elements // problem.n
            best = {64: 0, 256: 1}.get(rows, between[problem, cell.destination])
            fast = number == best
            timings.append(Timing(*cell, *(3 * [1.0 if fast else 2.0]), 1.0))
        kernel = make_kernel(f"{problem.key} {number}".encode())
        return make_trial(number, problem=problem, timings=tuple(timings), kernel=kernel)

    def measure(cells: Mapping[Problem, Sequence[Cell]], variants: Sequence[Variant]) -> Iterator[Trial]:
        asked.append([(variant.problem, variant.knobs["chunks"]) for variant in variants])
        yield from (trial(c.problem, c.knobs["chunks"], cells[c.problem]) for c in variants)

    store = Store.open("sqlite://")
    h20 = replace(H100, gpu="NVIDIA H20")
    for problem in problems:
        for number in (0, 1):
            there = [
                Cell(rows * LONG.n, destination, Cache.HOT) for rows in (64, 256) for destination in (IN_PLACE, OUT)
            ]
            store.record(trial(problem, number, there))
            store.record(replace(trial(problem, number, there), environment=h20))
    alone, elsewhere = replace(LONG, transform=Transform(4096)), replace(LONG, transform=Transform(8192))
    store.record(make_trial(problem=alone, timings=times({1 << 20: 1.0})))  # no gap
    store.record(make_trial(problem=elsewhere, environment=h20))
    found = refine([*problems, alone, elsewhere], store, "sm90", H100, measure)
    assert found == [*problems, alone]
    assert asked[0] == [(problem, number) for problem in problems for number in (0, 1)]
    added: dict[winners.WinnerCell, set[int]] = defaultdict(set)
    for cell, named in portfolio(store.trials()).items():
        if not cell.is_bucket:
            added[cell.line].add(named.knobs["chunks"])
    assert {cell.gpu for cell in added} == {H100.gpu}
    assert {(cell.problem, cell.destination): numbers for cell, numbers in added.items()} == {
        place: {number} for place, number in between.items()
    }
    assert all(kernel.source and kernel.ptx for kernel in (trial.kernel for trial in store.trials()) if kernel)


@pytest.mark.parametrize(
    ("elements", "caches"),
    [
        (1 << 16, [Cache.HOT, Cache.COLD]),
        (3 << 20, [Cache.HOT, Cache.COLD]),
        (1 << 24, [Cache.COLD, Cache.HOT]),
        (1 << 26, [Cache.COLD]),
    ],
)
def test_kernels_are_timed_in_the_regimes_that_name_winners(elements: int, caches: list[Cache]) -> None:
    cells = cells_at(LONG, elements, IN_PLACE, H100.l2_bytes)
    assert {cell[:2] for cell in cells} == {(elements, IN_PLACE)}
    assert [cell.cache for cell in cells] == caches


def test_past_the_deadline_nothing_is_timed_and_the_next_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until the device has timed one kernel."""
    bench = tuned([waves(264, 7.0), lambda rows: 0.03 * rows], [128, 256, 384, 512])
    before = bench.winners()
    now = [0.0]
    monkeypatch.setattr(refine_module.time, "monotonic", lambda: now[0])

    def measure(cells: Mapping[Problem, Sequence[Cell]], variants: Sequence[Variant]) -> Iterator[Trial]:
        for trial in bench.measure(cells, variants):
            now[0] += 1.0
            yield trial

    def run(deadline: float) -> list[int]:
        refine([bench.problem], bench.store, "sm90", H100, measure, deadline)
        return sorted(len(trial.timings) for trial in bench.store.trials())

    assert run(0.0) == [4, 4]
    assert bench.rounds == []
    assert run(0.5) == [4, 4 + 3 * 2]
    assert (bench.winners(), len(bench.rounds)) == (before, 1)
    assert bench.refine() == dict.fromkeys((215, 269, 443), 1)
