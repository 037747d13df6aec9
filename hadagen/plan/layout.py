"""Placements: where the digits of an element's index live.

An *axis* is one digit of an index. Its *radix* is the number of values of the digit, and its *stride* the distance in
elements from one value to the next. Index bit b is the axis of radix 2 and stride 2^b. A *placement* says, for each
place, which axis of a tile lives there: the digit of the axis is the coordinate of the element at that place.

    n = 256 in one warp, as loaded: thread t holds elements 8t … 8t+7, two to a register

        index bit   0     1     2     3      4      5      6      7
        place       pair  reg0  reg1  lane0  lane1  lane2  lane3  lane4

    in float32 a thread holds elements 4t … 4t+3 and 128 + 4t …, in what would be two registers for a pair

        index bit   0     1     2      3      4      5      6      7
        place       pair  reg0  lane0  lane1  lane2  lane3  lane4  reg1

Rule: the element held at some coordinates is the sum of coordinate · stride, each with the stride of the axis at that
place. For bits, that is the sum of 2^b over the index bits b whose place has coordinate 1.

    lane 0, reg 0, low half                        element 0
    lane 0, reg 0, high half   (pair = 1)          element 1
    lane 0, reg 2              (reg1 = 1)          element 4
    lane 3, reg 1, high half   (lanes 0 1, reg0)   element 24 + 2 + 1 = 27

A step that moves data moves bits from place to place: after `MMA_MOVES` bit 0 is found at lane2 and bit 5 at pair.
Chunks of 256 elements add places reg2, reg3, …; the warps of a block warp0 …; the blocks of a cluster cta0 …

A row of n = K · 2^m elements is a matrix of K rows and 2^m columns. Its slowest axis, which is no bit, is found at the
place `row`, and bit b at column b. An axis is written radix·stride, a bit as its number. Several rows of x make up
a tile with more rows.

    n = 12 · 256, two rows of x: bits 0 to 7 at column0 … column7, and the axis 24·256 at row

    row 2, column 28   element 512 + 28 = 540

In general a placement is a one-to-one map from axes to places, and the axes number the elements of a tile as digits of
mixed radix do. Moves are permutations of places of one radix and act on the left, so placements compose with moves as
permutations do, and every move list of swaps is its own inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


class Axis(NamedTuple):
    """One digit of a number: number // stride % radix. The number is an index in a tile, or a coordinate: the lane."""

    radix: int
    stride: int

    def __str__(self) -> str:
        number = self.stride.bit_length() - 1
        return str(number) if self == bit(number) else f"{self.radix}·{self.stride}"


def bit(number: int) -> Axis:
    return Axis(2, 1 << number)


def log2(value: int) -> int:
    """Of a power of two."""
    return value.bit_length() - 1


@dataclass(frozen=True, order=True)
class Place:
    """One coordinate digit of where an element is held; a bit, unless an axis of another radix lives there."""

    kind: str  # pair, reg, lane, warp, cta, column, row or tile
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("pair", "row") else f"{self.kind}{self.index}"


PAIR = Place("pair")
LANE_BITS = 5
VECTOR_BYTES = 16
CHUNK_BITS = 8
CHUNK_ELEMENTS = 1 << CHUNK_BITS
THREAD_ELEMENTS = CHUNK_ELEMENTS // 32  # of one chunk in one thread


def reg(index: int) -> Place:
    return Place("reg", index)


def lane(index: int) -> Place:
    return Place("lane", index)


def warp(index: int) -> Place:
    return Place("warp", index)


def cta(index: int) -> Place:
    return Place("cta", index)


def column(index: int) -> Place:
    return Place("column", index)


def row_of_x(index: int) -> Place:
    return Place("tile", index)


# The number of a row of a tile whose columns are bits of `column`.
ROW = Place("row")


def swaps(pairs: Iterable[tuple[Place, Place]]) -> dict[Place, Place]:
    """The moves that exchange the two places of each pair."""
    moves: dict[Place, Place] = {}
    for a, b in pairs:
        if a == b or a in moves or b in moves:
            raise ValueError(f"cannot swap {a} with {b}: each place may be swapped once, with another")
        moves[a], moves[b] = b, a
    return moves


# mma.m16n8k16, whose operands are 16×16 and 16×8, and whose sums are 16×8. With the constant as A and data as B: B row
# k = 2·(lane % 4) + pair of column lane / 4 comes back as row lane / 4, column 2·(lane % 4) + pair (PTX ISA, "Matrix
# fragments for mma.m16n8k16").
MMA_ROWS, MMA_COLUMNS = 16, 8
MMA_MOVES = swaps([(PAIR, lane(2)), (lane(0), lane(3)), (lane(1), lane(4))])


@dataclass(frozen=True)
class Placement:
    """`axes[place]` is the axis that lives at a place; they go from stride 1 on, each from the end of the one before.

    Raises `ValueError` if they do not, because some element then has no coordinates, or two.
    """

    axes: Mapping[Place, Axis]

    def __post_init__(self) -> None:
        stride = 1
        for place, axis in self.axes.items():
            if axis.stride != stride:
                raise ValueError(f"the axis at {place} has stride {axis.stride} instead of {stride} in {self}")
            stride *= axis.radix

    @classmethod
    @cache
    def standard(
        cls, vector_bits: int, chunk_bits: int, warp_bits: int, cta_bits: int, odd_warps: int = 1
    ) -> Placement:
        """The placement of a tile that is loaded in vectors of 2^vector_bits elements (2 or 3): chunks of 256 elements,
        then warps (`odd_warps` times a power of two), then blocks."""
        in_thread = (PAIR, reg(0), reg(1))
        in_block = (
            *in_thread[:vector_bits],
            *(lane(j) for j in range(LANE_BITS)),
            *in_thread[vector_bits:],
            *(reg(2 + j) for j in range(chunk_bits)),
            *(warp(j) for j in range(warp_bits)),
        )
        axes = {place: bit(number) for number, place in enumerate(in_block)}
        size = 1 << len(in_block)
        if odd_warps > 1:
            axes[warp(warp_bits)] = Axis(odd_warps, size)
        return cls(axes | {cta(j): Axis(2, odd_warps * size << j) for j in range(cta_bits)})

    def __str__(self) -> str:
        return " ".join(f"{axis}@{place}" for place, axis in self.axes.items())

    @property
    def radices(self) -> tuple[int, ...]:
        """The radix of each axis, low to high; their product is the number of elements."""
        return tuple(axis.radix for axis in self.axes.values())

    def moved(self, moves: Mapping[Place, Place]) -> Placement:
        """The axis at place p moves to `moves[p]`; places that are not named keep their axes.

        Raises `ValueError` if an axis comes to a place of another radix, or two axes to one place.
        """
        for place, target in moves.items():
            if self.axes[place].radix != self.axes[target].radix:
                raise ValueError(f"cannot move {place} to {target}: the axes there have different radices in {self}")
        return Placement({moves.get(place, place): axis for place, axis in self.axes.items()})

    def element(self, coordinates: Mapping[Place, int]) -> int:
        """Index of the element at these coordinates (0 where a place is not named)."""
        return sum(coordinates.get(place, 0) * axis.stride for place, axis in self.axes.items())

    def digits_of(self, kind: str, first: int = 0) -> dict[Axis, Axis]:
        """Digit → axis that lives there, for the number that the places of a kind make up from `first` on."""
        digits: dict[Axis, Axis] = {}
        stride = 1
        for place, axis in sorted(self.axes.items()):
            if place.kind == kind and place.index >= first:
                digits[Axis(axis.radix, stride)] = axis
                stride *= axis.radix
        return digits


def scatter(name: str, digits: Mapping[Axis, Axis]) -> str:
    """C expression that puts each digit of `name` where `digits` says, one term for each run of neighbors."""
    runs: list[tuple[int, int, int]] = []  # radix of the run, its stride in `name`, its stride in the result
    for digit, axis in sorted(digits.items(), key=lambda item: item[0].stride):
        radix, source, target = runs[-1] if runs else (0, 0, 0)
        if (digit.stride, axis.stride) == (radix * source, radix * target):
            runs[-1] = radix * digit.radix, source, target
        else:
            runs.append((digit.radix, digit.stride, axis.stride))
    return " + ".join(
        name + (f" / {source}" if source > 1 else "") + f" % {radix}" + (f" * {target}" if target > 1 else "")
        for radix, source, target in runs
    )


def add(*terms: str) -> str:
    """C expression of the sum of the terms that are not empty."""
    return " + ".join(filter(None, terms))
