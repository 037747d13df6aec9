"""Laws of placements: they compose with moves, moves of swaps undo themselves, and elements are counted once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadagen.layout import MMA_MOVES, PAIR, Place, Placement, cta, lane, reg, swaps, warp

placements = st.builds(Placement.standard, st.integers(2, 3), st.integers(0, 4), st.integers(0, 5), st.integers(0, 3))


@st.composite
def placed_swaps(draw: st.DrawFn) -> tuple[Placement, dict[Place, Place]]:
    placement = draw(placements)
    shuffled = draw(st.permutations(placement.places))
    count = draw(st.integers(0, len(shuffled) // 2))
    return placement, swaps(zip(shuffled[:count], shuffled[count : 2 * count], strict=True))


@given(placed_swaps())
def test_swaps_undo_themselves(case: tuple[Placement, dict[Place, Place]]) -> None:
    placement, moves = case
    assert placement.moved(moves).moved(moves) == placement


@given(placed_swaps())
def test_moves_only_rename_places(case: tuple[Placement, dict[Place, Place]]) -> None:
    placement, moves = case
    moved = placement.moved(moves)
    assert sorted(moved.places) == sorted(placement.places)
    for bit, place in enumerate(placement.places):
        assert moved.bit_at(moves.get(place, place)) == bit


@given(st.integers(2, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1))
def test_every_element_has_coordinates_of_its_own(vector_bits: int, chunks: int, warps: int, ctas: int) -> None:
    placement = Placement.standard(vector_bits, chunks, warps, ctas)
    corners = itertools.product((0, 1), repeat=len(placement))
    elements = [placement.element(dict(zip(placement.places, corner, strict=True))) for corner in corners]
    assert sorted(elements) == list(range(1 << len(placement)))


def test_mma_moves_are_a_law_of_their_own_inverse() -> None:
    placement = Placement.standard(3, 0, 0, 0)
    once = placement.moved(MMA_MOVES)
    assert [once.bit_at(place) for place in (PAIR, lane(0), lane(1))] == [5, 6, 7]
    assert [once.bit_at(place) for place in (lane(2), lane(3), lane(4))] == [0, 3, 4]
    assert once.moved(MMA_MOVES) == placement


def test_the_cells_of_the_docstring() -> None:
    placement = Placement.standard(3, 0, 0, 0)
    assert placement.element({}) == 0
    assert placement.element({PAIR: 1}) == 1
    assert placement.element({reg(1): 1}) == 4
    assert placement.element({lane(0): 1, lane(1): 1, reg(0): 1, PAIR: 1}) == 27


def test_a_thread_holds_two_vectors_of_float32() -> None:
    placement = Placement.standard(2, 0, 0, 0)
    assert placement.element({reg(0): 1, PAIR: 1}) == 3
    assert placement.element({lane(0): 1}) == 4
    assert placement.element({reg(1): 1, lane(4): 1}) == 128 + 64


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="share a place"):
        Placement((PAIR, PAIR))
    with pytest.raises(ValueError, match="cannot swap"):
        swaps([(warp(0), warp(0))])
    with pytest.raises(ValueError, match="cannot swap"):
        swaps([(reg(2), warp(0)), (reg(2), cta(0))])
