"""Which element counts, destinations and caches are timed, and how many launches a cell gets."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure_sample import ALL_PROBLEMS, CELL, H100_L2, MATRIX_PROBLEMS, PLAIN_PROBLEMS, PROBLEM

from hadagen.measure import Cell, all_cells
from hadagen.measure.cells import EVICTION, probe_cells
from hadagen.problem import DType, Problem, Rows
from hadagen.regimes import (
    BUCKETS_BETWEEN,
    BUCKETS_OF_LONG_ROWS,
    ELEMENT_BUCKETS,
    PITCHED_ELEMENT_BUCKETS,
    Cache,
    Destination,
    deciding_cache,
    element_buckets,
    main_buckets,
    may_be_hot,
    timed_elements,
    timed_rows,
)


def test_cells_of_an_h100() -> None:
    cells = all_cells(PROBLEM, H100_L2)
    assert len(set(cells)) == len(cells) == 64
    assert {cell.elements for cell in cells} == {*ELEMENT_BUCKETS, *BUCKETS_BETWEEN}
    cold = {cell.elements for cell in cells if cell.cache is Cache.COLD}
    assert cold == {12 << 20, *(e for e in ELEMENT_BUCKETS if e >= 1 << 16)}
    hot = [cell for cell in cells if cell.cache is Cache.HOT]
    assert max(cell.elements for cell in hot if cell.destination is Destination.IN_PLACE) == 1 << 25
    assert max(cell.elements for cell in hot if cell.destination is Destination.OUT_OF_PLACE) == 1 << 24
    wide = all_cells(Problem.of(256, DType.FLOAT32), H100_L2)
    assert max(cell.elements for cell in wide if cell.cache is Cache.HOT) == 1 << 24
    pitched = all_cells(PROBLEM.with_io(rows=Rows.PITCHED), H100_L2)
    assert {cell.elements for cell in pitched} == set(PITCHED_ELEMENT_BUCKETS)
    for n in (1 << 13, 1 << 15):
        long = {cell.elements for cell in all_cells(Problem.of(n, DType.FLOAT16), H100_L2)}
        assert long == {*filter(n.__le__, ELEMENT_BUCKETS), *BUCKETS_BETWEEN, *BUCKETS_OF_LONG_ROWS}
    shorter = {cell.elements for cell in all_cells(Problem.of(1 << 12, DType.FLOAT16), H100_L2)}
    assert not shorter & set(BUCKETS_OF_LONG_ROWS)


@given(st.sampled_from(ALL_PROBLEMS), st.integers(10, 28).map(lambda k: 1 << k) | st.just(H100_L2))
def test_every_element_count_is_timed_where_it_decides(problem: Problem, l2_bytes: int) -> None:
    """Main buckets also in the other regime, where kernels are timed in it; what lies between only if both count."""
    cells = all_cells(problem, l2_bytes)
    buckets = element_buckets(problem)
    assert list(buckets) == sorted(set(buckets))
    assert not any(elements % problem.n for elements in buckets)
    for elements, destination in product(buckets, Destination):
        decides = deciding_cache(problem, elements, destination, l2_bytes)
        caches = {cell.cache for cell in cells if cell[:2] == (elements, destination)}
        assert decides in caches or elements < 1 << 16
        if elements not in main_buckets(problem):
            assert caches == (set(Cache) if may_be_hot(problem, elements, destination, l2_bytes) else {decides})


@pytest.mark.parametrize("problem", PLAIN_PROBLEMS, ids=lambda problem: problem.key)
def test_buckets_of_powers_of_two_are_the_nominal_counts(problem: Problem) -> None:
    """Databases and bundles have their times there."""
    nominal = PITCHED_ELEMENT_BUCKETS
    if problem.io.rows is Rows.CONTIGUOUS:
        nominal = *ELEMENT_BUCKETS, *BUCKETS_BETWEEN, *(BUCKETS_OF_LONG_ROWS if problem.n >= 1 << 13 else ())
    assert element_buckets(problem) == tuple(sorted(count for count in nominal if count >= problem.n))
    assert main_buckets(problem) == tuple(count for count in ELEMENT_BUCKETS if count >= problem.n)


@pytest.mark.parametrize("problem", MATRIX_PROBLEMS, ids=lambda problem: problem.key)
def test_buckets_with_a_matrix_are_whole_rows_near_the_nominal_counts(problem: Problem) -> None:
    buckets, n = element_buckets(problem), problem.n
    assert set(main_buckets(problem)) <= set(buckets)
    assert n in buckets or n < ELEMENT_BUCKETS[0] // 2
    for nominal in (*ELEMENT_BUCKETS, *BUCKETS_BETWEEN):
        assert abs(timed_elements(problem, nominal) - nominal) <= n // 2
    assert all(high <= 3 * low for low, high in pairwise(buckets))  # no call is far from all


@pytest.mark.parametrize("problem", ALL_PROBLEMS, ids=lambda problem: problem.key)
def test_the_rows_that_are_timed(problem: Problem) -> None:
    columns, x_pitch, y_pitch = timed_rows(problem)
    assert columns == x_pitch == y_pitch <= problem.n
    assert columns == problem.n or problem.io.rows is Rows.PITCHED
    assert columns > problem.n // 2 or problem.n == 2
    assert problem.io.rows is Rows.CONTIGUOUS or columns == problem.n * 3 // 4 or problem.n < 32
    for cell in all_cells(problem, H100_L2):  # the copy kernel moves vectors of 16 bytes
        assert cell.traffic(problem).buffer_bytes % 16 == 0


@given(st.sampled_from(ALL_PROBLEMS), st.data(), st.integers(20, 28).map(lambda k: 1 << k))
def test_launches_of_a_cell(problem: Problem, data: st.DataObject, l2_bytes: int) -> None:
    cell = data.draw(st.sampled_from(all_cells(problem, H100_L2)))
    traffic = cell.traffic(problem)
    assert traffic.buffer_bytes == cell.elements // problem.n * timed_rows(problem).columns * problem.io.input.bytes
    assert traffic.footprint == traffic.buffer_bytes * (1 if cell.destination is Destination.IN_PLACE else 2)
    assert 1 <= traffic.launches(l2_bytes) <= 96
    rotation = traffic.slots(l2_bytes) * traffic.footprint
    if cell.cache is Cache.HOT:
        assert rotation == traffic.footprint
        assert not traffic.needs_flush(l2_bytes)
    else:  # by the other slots or by a flush, a slot is always evicted before it is touched again
        assert traffic.slots(l2_bytes) == traffic.launches(l2_bytes)
        assert traffic.needs_flush(l2_bytes) == (rotation < EVICTION * l2_bytes)


def test_probe_cells() -> None:
    def probes(problem: Problem) -> tuple[Cell, ...]:
        return probe_cells(problem, all_cells(problem, H100_L2), H100_L2)

    assert probes(PROBLEM) == (
        Cell(1 << 13, Destination.IN_PLACE, Cache.HOT),
        Cell(12 << 20, Destination.IN_PLACE, Cache.HOT),
        Cell(1 << 28, Destination.IN_PLACE, Cache.COLD),
    )
    assert probes(Problem.of(256, DType.FLOAT32))[1].elements == 6 << 20
    assert [cell.elements for cell in probes(PROBLEM.with_io(rows=Rows.PITCHED))] == [1 << 16, 1 << 24, 1 << 27]
    assert probe_cells(PROBLEM, [CELL], H100_L2) == (CELL,)
    assert probe_cells(PROBLEM, [], H100_L2) == ()
