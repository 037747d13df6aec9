"""`Activate`: the prologues of `hadagen.problem.prologues.Activated`, an activation and a product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hadagen.plan.steps.base import AS_LOADED, FP32, PACKED, SPLIT, Cost, Draft, Roundings, Step
from hadagen.problem.problem import DType, Problem
from hadagen.problem.prologues import Activated

if TYPE_CHECKING:
    from hadagen.plan.steps.values import TileValues

# Instructions for an element, as compiled kernels have them: of an activation, and of each function that is exact.
_INSTRUCTIONS = {"silu": 8, "gelu": 24, "gelu_tanh": 22, "gelu_quick": 8, "relu2": 3, "": 1}
_OF_EXP, _OF_DIVISION = 8, 9


@dataclass(frozen=True)
class Activate(Step):
    """Computes an activation of what was loaded, times the other half of x if the prologue has a product.

    16-bit values stay packed if the prologue rounds its result, or the step does; else they are fp32 from here on, or
    `SPLIT` before a matrix.
    """

    name = "Activate"
    labels = "of carrier"

    of: Activated
    carrier: str

    template = "activate.cu.j2"
    header = "activations.cuh"
    takes = AS_LOADED
    is_prologue = holds_all = True

    @classmethod
    def for_problem(cls, of: Activated, problem: Problem, *, rounds: bool = False) -> Activate:
        """The step for the values of a problem. rounds: whether it rounds the result to the type of x in any case."""
        if (rounds or of.arithmetic.rounds != "nothing") and problem.io.input is not DType.FLOAT32:
            return cls(of, PACKED)
        return cls(of, SPLIT if problem.transform.has_matrix else FP32)

    def __str__(self) -> str:
        return f"Activate(of={self.of.name!r}, carrier={self.carrier!r})"

    @property
    def computes(self) -> str:
        return self.of.name

    @property
    def leaves(self) -> str:
        return self.carrier

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if plan.shares_loaded > 1 and not plan.tile.loads_all:
            yield "each block computes only its own share of a row"
        if plan.problem.unit < plan.vector_elements:
            yield "a vector has several rows"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.terms, so_far.form = 1, carrier  # the prologue itself says where it rounds

    def interpret(self, values: TileValues, plan: Draft) -> None:
        """Nothing: the rows that are interpreted are those of its result."""

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return self.name, self.of.name, self.carrier

    def cost(self, plan: Draft, carrier: str) -> Cost:
        how, elements = self.of.arithmetic, plan.vectors * plan.vector_elements
        each = _INSTRUCTIONS[self.of.activation] + _OF_EXP * (how.exp == "expf") + _OF_DIVISION * (how.divide == "/")
        return Cost(elements * (each + 2 * self.of.multiplies + 4 * self.of.clamped), waits={"arithmetic": 8})

    def sentence(self, bits: str) -> str:
        product = " times the other half of x" if self.of.multiplies else ""
        return f"{self.of.activation or 'gate'}{product}; {self.carrier}"

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        how = self.of.arithmetic
        flags = {
            "round_active": how.rounds == "activation and product" and self.of.multiplies,
            "exact_exp": how.exp == "expf",
            "sigmoid": how.sigmoid,
            "exact_tanh": how.tanh == "tanhf",
        }
        return {
            "leaves": self.carrier,
            "functor": f"{self.of.activation or 'same'}_of",
            "flags": {name: str(value).lower() for name, value in flags.items()},
            "division": {"/": "divide", "__fdividef": "divide_quickly", "div.full.f32": "divide_fully"}[how.divide],
        }
