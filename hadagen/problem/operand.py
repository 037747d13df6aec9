"""`Operand`: a tensor that a kernel takes besides x and y."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadagen.problem.launch import Param
from hadagen.problem.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Operand:
    """A tensor in device memory, by the name of the param that points to it.

    is_taken: whether the kernels of a problem take it.
    sample: values to verify the kernels of a problem with, for so many `Problem.unit`s; None for what a kernel writes.
    packed: an array of the bytes that a kernel takes for values.
    numbers: the params that belong to it, such as a pitch.
    is_optional: whether a null pointer stands for none.
    like_x: whether it has rows like those of x. Its values are [rows, n].
    """

    name: str
    is_taken: Callable[[Problem], bool]
    sample: Callable[[Problem, int, np.random.Generator], NDArray[Any]] | None
    packed: Callable[[Problem, NDArray[Any]], NDArray[Any]] = lambda problem, values: values
    numbers: Callable[[Problem], tuple[Param, ...]] = lambda problem: ()
    is_optional: bool = False
    like_x: bool = False

    @property
    def is_written(self) -> bool:
        """Whether a kernel writes it."""
        return self.sample is None

    @property
    def param(self) -> Param:
        return Param("void*" if self.is_written else "const void*", self.name)


def rows_like_x(name: str, *, is_written: bool = False) -> Operand:
    """An operand with rows like those of x, of its type."""
    return Operand(name, _always, None if is_written else _random_rows, _encoded, like_x=True)


def vector_of_n(name: str) -> Operand:
    """An operand of n elements, of x's type."""
    return Operand(name, _always, lambda problem, units, random: _normal(problem, (problem.n,), random), _encoded)


def _always(problem: Problem) -> bool:
    return True


def _random_rows(problem: Problem, units: int, random: np.random.Generator) -> NDArray[Any]:
    return _normal(problem, (units * problem.unit // problem.n, problem.n), random)


def _normal(problem: Problem, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[Any]:
    from hadagen.problem.bits import decode, encode

    return decode(problem.io.input, encode(problem.io.input, random.standard_normal(shape)))


def _encoded(problem: Problem, values: NDArray[Any]) -> NDArray[Any]:
    from hadagen.problem.bits import encode

    return encode(problem.io.input, values)
