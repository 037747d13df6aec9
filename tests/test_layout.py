"""Laws of placements: they compose with moves, moves of swaps undo themselves, and elements are counted once."""

import itertools
from collections.abc import Callable
from math import prod
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadagen.plan.layout import MMA_MOVES, PAIR, Axis, Place, Placement, add, bit, cta, lane, reg, scatter, swaps, warp
from hadagen.plan.steps.values import TileValues
from hadagen.truth.reference import hadamard

Moves = dict[Place, Place]


def with_slower(placement: Placement, radices: list[int]) -> Placement:
    """The placement, and axes of these radices above its bits, at the next register places."""
    axes, registers = dict(placement.axes), sum(place.kind == "reg" for place in placement.axes)
    for index, radix in enumerate(radices):
        axes[reg(registers + index)] = Axis(radix, prod(radices[:index]) << len(placement.axes))
    return Placement(axes)


standard = st.builds(Placement.standard, st.integers(2, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1))
placements = st.builds(with_slower, standard, st.lists(st.integers(2, 3), max_size=2))


def binary(placement: Placement) -> list[Place]:
    return [place for place, axis in placement.axes.items() if axis.radix == 2]


@st.composite
def placed_moves(draw: st.DrawFn) -> tuple[Placement, Moves]:
    placement = draw(placements)
    places = binary(placement)
    return placement, dict(zip(places, draw(st.permutations(places)), strict=True))


@given(st.data())
def test_swaps_undo_themselves(data: st.DataObject) -> None:
    placement = data.draw(placements)
    shuffled = data.draw(st.permutations(binary(placement)))
    count = data.draw(st.integers(0, len(shuffled) // 2))
    moves = swaps(zip(shuffled[:count], shuffled[count : 2 * count], strict=True))
    assert placement.moved(moves).moved(moves) == placement


@given(placed_moves())
def test_moves_only_rename_places(case: tuple[Placement, Moves]) -> None:
    placement, moves = case
    moved = placement.moved(moves)
    assert sorted(moved.axes) == sorted(placement.axes)
    for place, axis in placement.axes.items():
        assert moved.axes[moves.get(place, place)] == axis


@given(placed_moves())
@settings(max_examples=20)
def test_every_element_has_coordinates_of_its_own(case: tuple[Placement, Moves]) -> None:
    placement, moves = case
    moved = placement.moved(moves)
    corners = itertools.product(*(range(axis.radix) for axis in moved.axes.values()))
    elements = [moved.element(dict(zip(moved.axes, corner, strict=True))) for corner in corners]
    assert sorted(elements) == list(range(len(elements)))


@given(placed_moves(), st.randoms())
def test_index_expressions_give_the_element_at_the_coordinates(case: tuple[Placement, Moves], random: Random) -> None:
    placement, moves = case
    moved = placement.moved(moves)
    kinds = {place.kind: moved.digits_of(place.kind) for place in moved.axes}
    expression = add(*(scatter(kind, digits) for kind, digits in kinds.items())).replace("/", "//")
    for _ in range(20):
        at = {place: random.randrange(axis.radix) for place, axis in moved.axes.items()}
        numbers = dict.fromkeys(kinds, 0)
        for place in sorted(at, reverse=True):  # the highest digit first
            numbers[place.kind] = numbers[place.kind] * moved.axes[place].radix + at[place]
        assert eval(expression, numbers) == moved.element(at)


def test_mma_moves_are_a_law_of_their_own_inverse() -> None:
    placement = Placement.standard(3, 0, 0, 0)
    once = placement.moved(MMA_MOVES)
    assert [once.axes[place] for place in (PAIR, lane(0), lane(1))] == [bit(5), bit(6), bit(7)]
    assert [once.axes[place] for place in (lane(2), lane(3), lane(4))] == [bit(0), bit(3), bit(4)]
    assert once.moved(MMA_MOVES) == placement


def test_the_cells_of_the_docstring() -> None:
    placement = with_slower(Placement.standard(3, 0, 0, 0), [3])
    for places, element in (
        ({}, 0),
        ({PAIR: 1}, 1),
        ({reg(1): 1}, 4),
        ({lane(0): 1, lane(1): 1, reg(0): 1, PAIR: 1}, 27),
        ({lane(0): 1, lane(1): 1, reg(1): 1, reg(2): 2}, 540),
    ):
        assert placement.element(places) == element
    assert [str(axis) for axis in placement.axes.values()] == [*"01234567", "3·256"]


def test_a_thread_holds_two_vectors_of_float32() -> None:
    placement = Placement.standard(2, 0, 0, 0)
    assert (placement.element({reg(0): 1, PAIR: 1}), placement.element({lane(0): 1})) == (3, 4)
    assert placement.element({reg(1): 1, lane(4): 1}) == 128 + 64


def test_neighboring_digits_share_a_term_of_an_index_expression() -> None:
    placement = with_slower(Placement.standard(3, 0, 1, 0), [3])
    assert scatter("r", placement.digits_of("reg")) == "r % 4 * 2 + r / 4 % 3 * 512"
    assert scatter("i", placement.digits_of("reg", first=2)) == "i % 3 * 512"
    low = {bit(0): bit(8), Axis(3, 2): Axis(3, 512)}
    assert scatter("c", low | {Axis(2, 6): Axis(2, 1536)}) == "c % 12 * 256"
    assert scatter("c", low | {Axis(2, 6): bit(0)}) == "c % 6 * 256 + c / 6 % 2"


@given(placed_moves(), st.integers(1, 2))
def test_values_are_those_of_their_elements(case: tuple[Placement, Moves], tiles: int) -> None:
    placement, moves = case
    moved, radices = placement.moved(moves), placement.radices
    x = np.arange(tiles * prod(radices)).reshape(tiles, -1)
    values = TileValues(placement, x, 1.0, {})
    values.move(moves)
    last = {place: radix - 1 for place, radix in zip(placement.axes, radices, strict=True)}
    for at in ({}, last, {place: 1 for place in last if place.kind == "lane"}):
        coordinates = tuple(at.get(place, 0) for place in placement.axes)
        np.testing.assert_array_equal(values.tiles[(slice(None), *coordinates)], x[:, moved.element(at)])
    np.testing.assert_array_equal(values.stored(moved).reshape(x.shape), x)


def test_the_bits_of_a_row_are_transformed_beside_its_slowest_axis() -> None:
    placement = with_slower(Placement.standard(3, 0, 0, 0), [3])
    x = np.random.default_rng(0).integers(-9, 9, (2, 3, 256))
    values = TileValues(placement, x, 1.0, {})
    values.transform(*binary(placement))
    np.testing.assert_array_equal(values.stored(placement).reshape(x.shape), hadamard(x))


STANDARD = Placement.standard(3, 0, 0, 0)


@pytest.mark.parametrize(
    ("why", "make"),
    [
        ("the axis at reg0 has stride 1 instead of 2", lambda: Placement({PAIR: bit(0), reg(0): bit(0)})),
        ("the axis at reg0 has stride 2 instead of 3", lambda: Placement({PAIR: Axis(3, 1), reg(0): bit(1)})),
        ("the axis at pair has stride 2 instead of 1", lambda: STANDARD.moved({reg(0): PAIR})),
        ("cannot move reg2 to lane0", lambda: with_slower(STANDARD, [3]).moved(swaps([(reg(2), lane(0))]))),
        ("cannot swap", lambda: swaps([(warp(0), warp(0))])),
        ("cannot swap", lambda: swaps([(reg(2), warp(0)), (reg(2), cta(0))])),
    ],
)
def test_what_cannot_be_is_refused(why: str, make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=why):
        make()
