"""The values of tiles while a plan is interpreted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from hadagen.plan.layout import Place, Placement
from hadagen.problem.operands import OperandValues
from hadagen.problem.problem import Problem

Reals = NDArray[np.float64]
_HADAMARD = np.array([[1.0, 1.0], [1.0, -1.0]])


class TileValues:
    """The values at all coordinates, in float64. `tiles` has an axis for the tiles, then one for each place."""

    def __init__(self, loaded: Placement, x: Reals, scale: float, operands: OperandValues) -> None:
        self._operands = operands
        self.left = scale  # the product of all factors still to come
        self._places = tuple(loaded.axes)
        # The axis of stride 1 varies fastest in memory, so a reshape has it last.
        tiles = np.asarray(x, np.float64).reshape(-1, *reversed(loaded.radices))
        self.tiles: Reals = tiles.transpose(0, *range(len(self._places), 0, -1))

    def transform(self, *places: Place) -> None:
        """Transform the bits at these places."""
        for place in places:
            axis = 1 + self._places.index(place)
            self.tiles = np.moveaxis(np.tensordot(_HADAMARD, self.tiles, (1, axis)), 0, axis)

    def multiply(self, factor: float) -> None:
        """Multiply by a part of the scale."""
        self.left = self.left / factor if factor != self.left else 1.0
        self.tiles = self.tiles * factor

    def multiply_rows(self, problem: Problem, loaded: Placement) -> None:
        """Multiply by the matrix of the transform, while values lie as loaded."""
        matrix = self._operands["matrix"].astype(np.float64)
        rows = self.stored(loaded)
        self._take(loaded, (matrix @ rows.reshape(-1, problem.order, problem.length)).reshape(rows.shape))

    def multiply_columns(self, problem: Problem, placement: Placement) -> None:
        """Multiply by the transpose of the second matrix, while values lie as a placement says."""
        matrix = self._operands["right_matrix"].astype(np.float64)
        rows = self.stored(placement)
        self._take(placement, (rows.reshape(-1, problem.length) @ matrix.T).reshape(rows.shape))

    def flip(self, problem: Problem, placement: Placement, name: str) -> None:
        """Multiply by the signs of this name."""
        packed = self._operands.get(name)
        if isinstance(packed, np.ndarray):
            signs = 1.0 - 2.0 * np.unpackbits(packed, count=problem.n, bitorder="little")
            rows = self.stored(placement)
            self._take(placement, (rows.reshape(-1, problem.n) * signs).reshape(rows.shape))

    def move(self, moves: Mapping[Place, Place]) -> None:
        back = {after: before for before, after in moves.items()}
        self.tiles = self._ordered(back.get(place, place) for place in self._places)

    def rename(self, places: Mapping[Place, Place]) -> None:
        """Call places otherwise."""
        self._places = tuple(places.get(place, place) for place in self._places)

    def stored(self, placement: Placement) -> Reals:
        """The values in memory order, for this placement."""
        return self._ordered(reversed([*placement.axes]))

    def _take(self, placement: Placement, rows: Reals) -> None:
        """Take values in memory order for this placement."""
        found = TileValues(placement, rows, self.left, self._operands)
        self.tiles = found._ordered(self._places)

    def _ordered(self, places: Iterable[Place]) -> Reals:
        """The values with their axes in the order of these places."""
        return self.tiles.transpose(0, *(1 + self._places.index(place) for place in places))
