"""Placements: where the bits of an element's index live.

A *placement* says, for each index bit of a tile, the *place* whose coordinate bit it is.

    n = 256 in one warp, as loaded: thread t holds elements 8t … 8t+7, two to a register

        index bit   0     1     2     3      4      5      6      7
        place       pair  reg0  reg1  lane0  lane1  lane2  lane3  lane4

    in float32 a thread holds elements 4t … 4t+3 and 128 + 4t …, in what would be two registers for a pair

        index bit   0     1     2      3      4      5      6      7
        place       pair  reg0  lane0  lane1  lane2  lane3  lane4  reg1

Rule: the element held at some coordinates is the sum of 2^b over the index bits b whose place has coordinate 1.

    lane 0, reg 0, low half                        element 0
    lane 0, reg 0, high half   (pair = 1)          element 1
    lane 0, reg 2              (reg1 = 1)          element 4
    lane 3, reg 1, high half   (lanes 0 1, reg0)   element 24 + 2 + 1 = 27

A step that moves data moves bits from place to place: after `MMA_MOVES` bit 0 is found at lane2 and bit 5 at pair.
Chunks of 256 elements add places reg2, reg3, …; the warps of a block warp0 …; the blocks of a cluster cta0 …

In general a placement is a one-to-one map from {0 … t−1} to places; moves are permutations of places and act on the
left, so placements compose with moves as permutations do, and every move list of swaps is its own inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, order=True)
class Place:
    """One coordinate bit of where an element is held."""

    kind: str  # pair, reg, lane, warp or cta
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "pair" else f"{self.kind}{self.index}"


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


def swaps(pairs: Iterable[tuple[Place, Place]]) -> dict[Place, Place]:
    """The moves that exchange the two places of each pair."""
    moves: dict[Place, Place] = {}
    for a, b in pairs:
        if a == b or a in moves or b in moves:
            raise ValueError(f"cannot swap {a} with {b}: each place may be swapped once, with another")
        moves[a], moves[b] = b, a
    return moves


# mma.m16n8k16 with the constant as A and data as B: B row k = 2·(lane % 4) + pair of column lane / 4 comes back as
# row lane / 4, column 2·(lane % 4) + pair (PTX ISA, "Matrix fragments for mma.m16n8k16").
MMA_MOVES = swaps([(PAIR, lane(2)), (lane(0), lane(3)), (lane(1), lane(4))])


@dataclass(frozen=True)
class Placement:
    """`places[b]` is where index bit b lives. Raises `ValueError` if two bits share a place."""

    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        if len(set(self.places)) != len(self.places):
            raise ValueError(f"two index bits share a place in {self}")

    @classmethod
    @cache
    def standard(cls, vector_bits: int, chunk_bits: int, warp_bits: int, cta_bits: int) -> Placement:
        """As loaded in vectors of 2^vector_bits elements (2 or 3): 256-element chunks, then warps, then blocks."""
        in_thread = (PAIR, reg(0), reg(1))
        return cls(
            (
                *in_thread[:vector_bits],
                *(lane(j) for j in range(LANE_BITS)),
                *in_thread[vector_bits:],
                *(reg(2 + j) for j in range(chunk_bits)),
                *(warp(j) for j in range(warp_bits)),
                *(cta(j) for j in range(cta_bits)),
            )
        )

    def __len__(self) -> int:
        return len(self.places)

    def __str__(self) -> str:
        return " ".join(f"{bit}@{place}" for bit, place in enumerate(self.places))

    def bit_at(self, place: Place) -> int:
        return self.places.index(place)

    def moved(self, moves: Mapping[Place, Place]) -> Placement:
        """What was at place p is now at `moves[p]`; places not named keep what they hold."""
        return Placement(tuple(moves.get(place, place) for place in self.places))

    def element(self, coordinates: Mapping[Place, int]) -> int:
        """Index of the element at these coordinates (0 where a place is not named)."""
        return sum(coordinates.get(place, 0) << bit for bit, place in enumerate(self.places))

    def bits_of(self, kind: str) -> dict[int, int]:
        """Index within the kind → index bit, for every place of the kind."""
        return {place.index: bit for bit, place in enumerate(self.places) if place.kind == kind}


def scatter(name: str, bits: Mapping[int, int]) -> str:
    """C expression that puts bit i of `name` at bit `bits[i]`, one term for each run of neighbours."""
    terms: list[str] = []
    todo = sorted(bits.items())
    while todo:
        source, target = todo[0]
        length = 1
        while length < len(todo) and todo[length] == (source + length, target + length):
            length += 1
        todo = todo[length:]
        value = f"{name} / {1 << source}" if source else name
        terms.append(f"{value} % {1 << length}" + (f" * {1 << target}" if target else ""))
    return " + ".join(terms)


def add(*terms: str) -> str:
    """C expression of the sum of those that are not empty."""
    return " + ".join(filter(None, terms))
