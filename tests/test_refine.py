"""What is added to winners between the counts that they were tuned at, with kernels that take what a formula says."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_trials import H100, make_trial

from hadagen.measure import Candidate, Cell, cells_at
from hadagen.problem import DType, Numerics, Problem
from hadagen.runtime.choose import nearest
from hadagen.trial import Cache, Destination, Outcome, Timing, Trial, element_buckets
from hadagen.tuner.refine import LEAST_GAIN, SHORT_GAP, refine
from hadagen.tuning_db import winners
from hadagen.tuning_db.winners import best_by_cell

LONG = Problem(1 << 15, DType.FLOAT16, Numerics.FAST)
IN_PLACE, OUT = Destination.IN_PLACE, Destination.OUT_OF_PLACE
Formula = Callable[[int], float]  # µs of so many rows
Selection = dict[winners.Cell, Trial]


def waves(of: int, us: float) -> Formula:
    """A kernel of which so many rows are one wave."""
    return lambda rows: us * ceil(rows / of)


class Bench:
    """Times kernels by their formulas, and remembers where. `wrong` are those that verification refuses."""

    def __init__(self, problem: Problem, formulas: Sequence[Formula]) -> None:
        self.problem = problem
        self.rounds: list[tuple[Sequence[Cell], Sequence[Candidate]]] = []
        self.wrong: set[int] = set()
        self._formulas = dict(enumerate(formulas))
        self._trials = [make_trial(i, problem=problem, timings=()) for i in self._formulas]

    def trial(self, number: int, cells: Sequence[Cell]) -> Trial:
        formula = self._formulas[number]
        times = [Timing(*cell, *(3 * [formula(cell.elements // self.problem.n)]), 1.0) for cell in cells]
        outcome = Outcome.WRONG_ANSWER if number in self.wrong else Outcome.OK
        return replace(self._trials[number], timings=tuple(times), outcome=outcome)

    def __call__(self, cells: Mapping[Problem, Sequence[Cell]], candidates: Sequence[Candidate]) -> Iterator[Trial]:
        (there,) = cells.values()
        self.rounds.append((there, candidates))
        yield from (self.trial(candidate.knobs["chunks"], there) for candidate in candidates)

    def tuned(self, counts: Sequence[int]) -> Selection:
        """The winners at these element counts."""
        cells = [Cell(count, IN_PLACE, Cache.HOT) for count in counts]
        trials = [self.trial(number, cells) for number in self._formulas]
        return {cell: trial for cell, (trial, _) in best_by_cell(trials).items()}

    def loss(self, selection: Selection, count: int) -> float:
        """Of a call, at an element count."""
        at = {cell.elements: trial.knobs["chunks"] for cell, trial in selection.items()}
        rows = count // self.problem.n
        us = {number: self._formulas[number](rows) for number in at.values()}
        return us[at[nearest(sorted(at), count)]] / min(us.values()) - 1


def test_the_end_of_a_wave_is_found() -> None:
    """264 rows are a wave of one kernel, and from there on the other is faster, as it is with less than 234."""
    bench = Bench(LONG, [waves(264, 7.0), lambda rows: 0.03 * rows])
    tuned = bench.tuned([LONG.n * rows for rows in (128, 256, 384, 512)])
    assert bench.loss(tuned, 271 * LONG.n) > 0.7
    found = tuned | refine(tuned, bench, H100.l2_bytes)
    assert bench.loss(found, 271 * LONG.n) == 0
    # All gaps are looked at once, and only those between different winners again.
    looked = [sorted({cell.elements // LONG.n for cell in cells}) for cells, _ in bench.rounds]
    assert looked == [[181, 313, 443], [215, 283, 476], [234, 269]]
    counts = sorted({128, 256, 384, 512}.union(*looked))
    losing = [rows for rows in range(128, 513) if bench.loss(found, rows * LONG.n) > LEAST_GAIN]
    for rows in losing:
        above = bisect(counts, rows)
        assert counts[above] / counts[above - 1] < SHORT_GAP


@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0.5, 3.0)), min_size=1, max_size=4),
    st.sampled_from([1 << 11, 1 << 15]),
)
def test_calls_lose_nothing_at_any_count_that_was_looked_at(shapes: list[tuple[int, float]], n: int) -> None:
    problem = replace(LONG, n=n)
    bench = Bench(problem, [waves(of, us * of / 100) for of, us in shapes])
    tuned = bench.tuned([count for count in element_buckets(problem) if count <= 1 << 24])
    added = refine(tuned, bench, H100.l2_bytes)
    assert not set(added) & set(tuned)
    assert all(cell.elements % n == 0 for cell in added)
    looked = {cell.elements for cells, _ in bench.rounds for cell in cells}
    assert {cell.elements for cell in added} <= looked
    for count in looked:
        assert bench.loss(tuned | added, count) <= LEAST_GAIN
    for cell, trial in added.items():  # a bundle keeps these times
        assert any((t.elements, t.destination) == (cell.elements, cell.destination) for t in trial.timings)


def test_one_kernel_needs_no_more_winners() -> None:
    bench = Bench(LONG, [waves(100, 1.0)])
    assert refine(bench.tuned(element_buckets(LONG)), bench, H100.l2_bytes) == {}
    assert len(bench.rounds) == 1


def test_near_ties_need_no_more_winners() -> None:
    bench = Bench(LONG, [lambda rows: 1.0 + 0.0001 * rows, lambda rows: 1.01 + 0.00007 * rows])
    tuned = bench.tuned([LONG.n * rows for rows in (64, 128, 512, 1024)])
    assert len({trial.knobs["chunks"] for trial in tuned.values()}) == 2
    assert refine(tuned, bench, H100.l2_bytes) == {}


def test_a_kernel_that_is_wrong_by_now_is_not_added() -> None:
    bench = Bench(LONG, [waves(264, 8.0), lambda rows: 0.03 * rows])
    tuned = bench.tuned([LONG.n * rows for rows in (256, 384)])
    bench.wrong = {1}
    assert refine(tuned, bench, H100.l2_bytes) == {}
    bench.wrong = {0, 1}
    assert refine(tuned, bench, H100.l2_bytes) == {}


def test_no_row_count_is_skipped() -> None:
    """Between 2 and 4 rows lies 3, though their geometric mean is below it."""
    bench = Bench(LONG, [lambda rows: 1.0 if rows in (2, 4) else 2.0, lambda rows: 1.5])
    tuned = bench.tuned([LONG.n * rows for rows in (2, 4, 8)])
    assert {cell.elements // LONG.n for cell in refine(tuned, bench, H100.l2_bytes)} == {3, 5}


def test_a_tie_goes_to_a_kernel_at_an_end_of_the_gap() -> None:
    """So that gaps are not halved for kernels that are as fast."""
    bench = Bench(LONG, [lambda rows: 1.0, lambda rows: {181: 0.99, 512: 0.5}.get(rows, 9.0)])
    tuned = bench.tuned([LONG.n * rows for rows in (128, 256, 512)])
    refine(tuned, bench, H100.l2_bytes)
    looked = {cell.elements // LONG.n for cells, _ in bench.rounds for cell in cells}
    assert {rows for rows in looked if rows < 256} == {181}


def test_problems_destinations_and_gpus_are_apart() -> None:
    """The faster kernel is another in each, and has one name in all."""
    problems = LONG, replace(LONG, numerics=Numerics.ACCURATE)
    us = {(problems[0], IN_PLACE): (1, 2), (problems[0], OUT): (2, 1), (problems[1], IN_PLACE): (2, 1)}
    us[problems[1], OUT] = (1, 2)

    def trial(problem: Problem, number: int, cells: Sequence[Cell]) -> Trial:
        timings = (Timing(*cell, *(3 * [float(us[problem, cell.destination][number])]), 1.0) for cell in cells)
        return make_trial(number, problem=problem, timings=tuple(timings))

    asked = []

    def measure(cells: Mapping[Problem, Sequence[Cell]], candidates: Sequence[Candidate]) -> Iterator[Trial]:
        asked.append([(candidate.problem, candidate.knobs["chunks"]) for candidate in candidates])
        yield from (trial(c.problem, c.knobs["chunks"], cells[c.problem]) for c in candidates)

    tuned: Selection = {}
    for problem, destination in us:
        for number, rows in enumerate((64, 256)):
            cell = winners.Cell(problem, "sm90", H100.gpu, destination, rows * LONG.n)
            tuned[cell] = trial(problem, number, [Cell(cell.elements, destination, Cache.HOT)])
    elsewhere = {replace(cell, gpu="NVIDIA H20"): found for cell, found in tuned.items()}
    alone = {replace(cell, problem=replace(LONG, n=4096)): found for cell, found in list(tuned.items())[:1]}  # no gap
    added = refine(tuned | elsewhere | alone, measure, H100.l2_bytes)
    assert asked[0] == [(problem, number) for problem in sorted(problems) for number in (0, 1)]
    assert {cell.gpu for cell in added} == {H100.gpu}
    for (problem, destination), (first, second) in us.items():
        here = [cell for cell in added if (cell.problem, cell.destination) == (problem, destination)]
        assert {added[cell].knobs["chunks"] for cell in here} == {0 if first < second else 1}


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
