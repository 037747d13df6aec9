"""Steps that quantize: the largest magnitude of each group, then codes and scales.

A group is so many neighboring elements of a row. The bits of an index that tell its elements apart may live in any
place of a block: in registers, in lanes, and in warps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hadagen.formats import TENSOR, Element, Format
from hadagen.layout import LANE_BITS, PAIR, Axis, Place, bit, lane, scatter, swaps
from hadagen.steps.base import FP32, WARP_BYTES, Cost, Step
from hadagen.steps.memory import Store

if TYPE_CHECKING:
    from hadagen.steps.draft import Draft

_WORDS = 4  # of shared memory that are read at once
# Instructions for each element: to find the largest magnitude, and to encode it, on a GPU with conversions to the type.
_LARGEST, _ENCODED = 1.0, {Element.E4M3: 4.0, Element.E2M1: 10.0, Element.INT8: 6.0, Element.INT4: 7.0}


class Groups(NamedTuple):
    """Where the elements of a group are when they are stored. Vectors, lanes and warps are each numbered by the bits of
    an int. `vectors`, `lanes`, `warps`: the bits that tell elements of one group apart."""

    vectors: int
    lanes: int
    warps: int
    kept: int  # groups that a thread has elements of
    slots: int  # groups of a block that have elements in several warps

    @classmethod
    def of(cls, plan: Draft) -> Groups:
        return _groups(plan)

    @property
    def together(self) -> int:
        """Warps with elements of one group."""
        return 1 << self.warps.bit_count()

    @property
    def shared_bytes(self) -> int:
        """For the largest magnitudes of all warps."""
        return 4 * self.slots * max(_WORDS, self.together) if self.warps else 0


@lru_cache(maxsize=256)
def _groups(plan: Draft) -> Groups:
    form, stored = plan.problem.io.form, plan.placements[-1]
    size = form.group if form else 1
    first = len(plan.vector_places) - 1  # the first register place that numbers vectors
    found = {"reg": 0, "lane": 0, "warp": 0, "cta": 0}
    for place, axis in stored.axes.items():
        if axis.stride < size and place not in plan.vector_places:
            found[place.kind] |= 1 << (place.index - first if place.kind == "reg" else place.index)
    kept = plan.vectors >> found["reg"].bit_count()
    slots = kept << LANE_BITS - found["lane"].bit_count() + plan.warp_bits - found["warp"].bit_count()
    return Groups(found["reg"], found["lane"], found["warp"], kept, slots)


def _outside(name: str, mask: int, bits: int, factor: int = 1) -> str:
    """C expression that numbers the values of those bits of `name` that are not in the mask, times a factor."""
    others = [number for number in range(bits) if not mask >> number & 1]
    return scatter(name, {bit(number): Axis(2, factor << at) for at, number in enumerate(others)})


@dataclass(frozen=True)
class Swap(Step):
    """Swaps the bits at lane[`lane`] and `place`, a register bit, by a warp shuffle of fp32 values."""

    lane: int
    place: Place = PAIR

    says = "swap lane{lane}↔{place}"
    template = "quantize.cu.j2"
    takes = FP32

    @property
    def moves(self) -> dict[Place, Place]:
        return swaps([(lane(self.lane), self.place)])

    def cost(self, plan: Draft, carrier: str) -> Cost:
        words = plan.words(carrier)
        return Cost(2 * words, shared_bytes=WARP_BYTES * words / 2, waits={"shuffle": 1})

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return {"mask": 1 << self.lane, "stride": 1 if self.place == PAIR else 2 << self.place.index}


@dataclass(frozen=True)
class Largest(Step):
    """Finds the largest magnitude of each group, a NaN where there is one: of a thread, then of the lanes by shuffles,
    then of the warps through shared memory."""

    says = "the largest magnitude of each group"
    template = "quantize.cu.j2"
    takes = FP32
    holds_all = True

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        form = plan.problem.io.form
        if form is None or form.group == TENSOR:
            yield "no group has a scale of its own"
        elif form.group & (form.group - 1) or form.group < plan.vector_elements or plan.matrix:
            yield f"groups of {form.group} are no bits of an index"
        elif plan.cta_bits:
            yield "no block knows the values of another"
        elif form.group > plan.tile_elements:
            yield f"a tile of {plan.tile_elements} elements is shorter than a group of {form.group}"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        groups, words = Groups.of(plan), plan.words(carrier)
        shuffles = groups.kept * groups.lanes.bit_count()
        waits = {"arithmetic": 2, "shuffle": groups.lanes.bit_count()}
        if groups.warps:
            waits |= {"shared": 1, "block sync": 1}
        return Cost(_LARGEST * words + 2 * shuffles, shared_bytes=WARP_BYTES * shuffles, waits=waits)

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        groups = Groups.of(plan)
        row = [
            _outside("i", groups.vectors, plan.vectors.bit_length() - 1),
            _outside("lane", groups.lanes, LANE_BITS, groups.kept),
            _outside("warp", groups.warps, plan.warp_bits, groups.kept << LANE_BITS - groups.lanes.bit_count()),
        ]
        return {
            "of_vectors": [1 << number for number in range(8) if groups.vectors >> number & 1],
            "of_lanes": [1 << number for number in range(LANE_BITS) if groups.lanes >> number & 1],
            "several": groups.vectors,
            "lanes_mask": groups.lanes,
            "warps_mask": groups.warps,
            "row": " + ".join(filter(None, row)) or "0",
            "place": scatter("warp", {bit(n): bit(place) for place, n in enumerate(_bits(groups.warps))}) or "0",
            "together": groups.together,
            "width": max(_WORDS, groups.together),
            "peaks_offset": plan.footprint.peaks_offset,
        }


def _bits(mask: int) -> list[int]:
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


@dataclass(frozen=True)
class Quantize(Store):
    """Encodes the values, and stores codes and scales."""

    says = "quantize, and store codes and scales"
    template = "quantize.cu.j2"
    takes = FP32

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        yield from super().faults(plan, at)
        form = plan.problem.io.form
        if form is None:
            yield "the result is not quantized"
        elif form.group != TENSOR and not any(isinstance(step, Largest) for step in plan.steps[:at]):
            yield "a scale needs the largest magnitude of its group"
        elif plan.order != "by_step":
            yield "what is stored depends on all chunks"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        form = plan.problem.io.form
        assert form is not None
        return Cost(_ENCODED[form.element] * plan.words(carrier) + 2 * plan.vectors, waits={"arithmetic": 4})

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        form = plan.problem.io.form
        assert form is not None
        groups = Groups.of(plan) if form.group != TENSOR else Groups(0, 0, 0, 0, 0)
        return {
            "form": form,
            "code": _code(form),
            "bits": form.element.bits,
            "rule": _rule(form),
            "scale_bytes": form.scale_bytes(plan.problem.io.input.bytes),
            "count": plan.vector_elements,
            "several": groups.vectors,
            "first": " && ".join(
                f"!({name} & {mask})"
                for name, mask in (("i", groups.vectors), ("lane", groups.lanes), ("warp", groups.warps))
                if mask
            ),
        }


def _code(form: Format) -> str:
    """The type of the codes there."""
    name = form.element.value.capitalize()
    lowest = "true" if form.rule in ("convrot", "quarot") else "false"  # whether the least integer is a code
    return f"{name}<{lowest}>" if form.element in (Element.INT8, Element.INT4) else name


def _rule(form: Format) -> str:
    """The name of the function that makes a scale of the largest magnitude, in `templates/common/codes.cuh`."""
    return f"{form.name.replace('-', '_')}_{form.rule}"
