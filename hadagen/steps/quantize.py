"""Steps that quantize: the largest magnitude of each group, then codes and scales.

A group is so many neighboring elements of a row. The bits of an index that tell its elements apart may live in any
place of a block. Those at places of a thread are told apart by the number of a value in it, `value`: its lowest bit is
`pair`, and the next ones are those of the register.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hadagen.formats import TENSOR, Element, Format
from hadagen.layout import PAIR, Axis, Place, Placement, bit, lane, scatter, swaps
from hadagen.steps.base import FP32, WARP_BYTES, Cost, Step
from hadagen.steps.memory import Store

if TYPE_CHECKING:
    from hadagen.steps.draft import Draft

_SIGNS_OF_BYTE = 8
_WORDS = 4  # of shared memory that are read at once
# Instructions for each element, to encode it, on a GPU with conversions to the type.
_ENCODED = {Element.E4M3: 1.5, Element.E2M1: 8.0, Element.INT8: 4.0, Element.INT4: 5.0}


class Groups(NamedTuple):
    """Where the elements of groups are, by the placement before they are quantized, as numbers of bits.

    A thread has values of 2^kept groups. At first several lanes have values of the same groups. They share the work:
    by each bit of `shared`, a lane goes on with half of its groups, so that it makes the scales of 2^mine.
    """

    values: tuple[int, ...]  # bits of `value` that tell elements of a group apart
    others: tuple[int, ...]  # and those that tell groups apart
    shared: tuple[int, ...]  # bits of `lane` that tell elements apart: of those that share the work,
    lanes: tuple[int, ...]  # and of the others
    other_lanes: tuple[int, ...]  # bits of `lane` that tell groups apart
    warps: tuple[int, ...]  # bits of `warp` that tell elements apart,
    other_warps: tuple[int, ...]  # and groups

    @classmethod
    def of(cls, plan: Draft) -> Groups:
        form = plan.problem.io.form
        return _groups(tuple(_before(plan).axes.items()), form.group if form else 1)

    @property
    def kept(self) -> int:
        return 1 << len(self.others)

    @property
    def mine(self) -> int:
        return self.kept >> len(self.shared)

    @property
    def width(self) -> int:
        """Words of shared memory for the largest magnitudes that warps have found of one group."""
        return max(_WORDS, 1 << len(self.warps))

    @property
    def shared_bytes(self) -> int:
        groups = self.mine << len(self.shared) + len(self.other_lanes) + len(self.other_warps)
        return 4 * self.width * groups if self.warps else 0

    @property
    def slot(self) -> str:
        """C expression for the number of a group in shared memory, of group `g` of those that a thread has."""
        lanes = self.mine
        warps = lanes << len(self.shared) + len(self.other_lanes)
        parts = (
            "g",
            _numbered("lane", (*self.shared, *self.other_lanes), lanes),
            _numbered("warp", self.other_warps, warps),
        )
        return " + ".join(filter(None, parts))


@lru_cache(maxsize=1024)
def _groups(axes: tuple[tuple[Place, Axis], ...], size: int) -> Groups:
    inside: dict[str, list[int]] = {"value": [], "lane": [], "warp": [], "cta": []}
    outside: dict[str, list[int]] = {"value": [], "lane": [], "warp": [], "cta": []}
    for place, axis in axes:
        kind, number = _coordinate(place)
        (inside if axis.stride < size else outside)[kind].append(number)
    values, others = sorted(inside["value"]), sorted(outside["value"])
    lanes = sorted(inside["lane"])
    count = min(len(others), len(lanes))
    return Groups(
        tuple(values),
        tuple(others),
        tuple(lanes[:count]),
        tuple(lanes[count:]),
        tuple(sorted(outside["lane"])),
        tuple(sorted(inside["warp"])),
        tuple(sorted(outside["warp"])),
    )


def _coordinate(place: Place) -> tuple[str, int]:
    """The kind of coordinate that a place is a bit of, and which bit."""
    if place == PAIR:
        return "value", 0
    return ("value", place.index + 1) if place.kind == "reg" else (place.kind, place.index)


def _before(plan: Draft) -> Placement:
    """The placement before values are quantized."""
    return plan.before(next(at for at, step in enumerate(plan.steps) if isinstance(step, Largest | Quantize)))


def _numbered(name: str, bits: tuple[int, ...], factor: int = 1) -> str:
    """C expression for the number that some bits of `name` make up, the first the lowest, times a factor."""
    return _scattered(name, {number: factor << at for at, number in enumerate(bits)})


def _scattered(name: str, weights: Mapping[int, int]) -> str:
    return scatter(name, {bit(number): Axis(2, weight) for number, weight in sorted(weights.items())})


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
        shuffles = groups.kept - groups.mine + groups.mine * len(groups.lanes)
        waits = {"arithmetic": 2, "shuffle": len(groups.shared) + len(groups.lanes)}
        if groups.warps:
            waits |= {"shared": 1, "block sync": 1}
        return Cost(words + 4 * shuffles, shared_bytes=WARP_BYTES * shuffles, waits=waits)

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        groups = Groups.of(plan)
        return {
            "groups": groups,
            "group_of_value": _numbered("value", groups.others) or "0",
            "place": _numbered("warp", groups.warps) or "0",
            "some_lanes": sum(1 << number for number in groups.lanes),
            "peaks_offset": plan.footprint.peaks_offset,
        }


@dataclass(frozen=True)
class Quantize(Store):
    """Encodes the values, and stores codes and scales."""

    folds: bool = False  # multiplies by the scale, or what is left of it, with the same product that quantizes
    swapped: int | None = None  # the bit at this lane and that at `pair` are swapped, once values are codes

    template = "quantize.cu.j2"
    takes = FP32

    @property
    def multiplies(self) -> str:
        return "scale" if self.folds else ""

    @property
    def moves(self) -> Mapping[Place, Place]:
        return {} if self.swapped is None else swaps([(lane(self.swapped), PAIR)])

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        yield from super().faults(plan, at)
        form = plan.problem.io.form
        if form is None:
            yield "the result is not quantized"
        elif form.group != TENSOR and not any(isinstance(step, Largest) for step in plan.steps[:at]):
            yield "a scale needs the largest magnitude of its group"
        elif plan.order != "by_step":
            yield "what is stored depends on all chunks"
        elif self.folds and (form.rounds_first or plan.problem.n == 1):
            yield "what is rounded, or not transformed, is scaled before it is quantized"
        elif self.swapped is not None and plan.vector_elements < 8:
            yield "a vector has no two values for each of two lanes"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        form = plan.problem.io.form
        assert form is not None
        moved = plan.vectors * (0 if self.swapped is None else 7)
        groups = Groups.of(plan) if form.group != TENSOR else None
        scales = 20 * groups.mine + 3 * groups.kept if groups else 0
        return Cost(
            (1 + _ENCODED[form.element]) * plan.words(carrier) + 3 * plan.vectors + moved + scales,
            waits={"arithmetic": 6, "shuffle": 1},
        )

    def sentence(self, bits: str) -> str:
        swapped = "" if self.swapped is None else f", swap lane{self.swapped}↔pair"
        return f"quantize{', times the scale' if self.folds else ''}{swapped}, and store codes and scales"

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        form, before = plan.problem.io.form, _before(plan)
        assert form is not None
        coordinates: dict[str, dict[int, int]] = {"value": {}, "lane": {}, "warp": {}}
        for place, axis in before.axes.items():
            kind, number = _coordinate(place)
            coordinates.setdefault(kind, {})[number] = axis.stride
        near = plan.problem.n > 1 and not form.rounds_first
        view: dict[str, Any] = {
            "form": form,
            "code": _code(form, near),
            "near": near and form.element is Element.E2M1,
            "bits": form.element.bits,
            "rule": f"{form.name.replace('-', '_')}_{form.rule}",
            "scale_bytes": form.scale_bytes(plan.problem.io.input.bytes),
            "count": plan.vector_elements,
            "groups": None,
        }
        if plan.problem.transform.signed:
            view |= _signs(coordinates)
        if form.group == TENSOR:
            return view
        groups = Groups.of(plan)
        # Group g of those that a lane makes the scale of begins at value · stride.
        starts = {at: coordinates["value"][number] for at, number in enumerate(groups.others)}
        own = len(groups.others) - len(groups.shared)
        of_lane = {number: starts[own + at] for at, number in enumerate(groups.shared)}
        rest = {number: stride for number, stride in coordinates["lane"].items() if number in groups.other_lanes}
        outer = {number: stride for number, stride in coordinates["warp"].items() if number in groups.other_warps}
        group_at = (
            _scattered("g", {at: starts[at] for at in range(own)}),
            _scattered("lane", {**of_lane, **rest}),
            _scattered("warp", outer),
        )
        masks = {"lane": groups.lanes, "warp": groups.warps}
        return view | {
            "groups": groups,
            "group_of_value": _numbered("value", groups.others) or "0",
            "group_at": " + ".join(filter(None, group_at)) or "0",
            "shared_mask": sum(1 << number for number in groups.shared),
            # The bits of lanes that make the scale of group g.
            "lane_of_group": _scattered("g", {own + at: 1 << number for at, number in enumerate(groups.shared)}),
            "alone": " && ".join(f"!({name} & {sum(1 << n for n in mask)})" for name, mask in masks.items() if mask),
        }


def _signs(coordinates: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Where the bits of the signs after the transform are, of which a byte has eight neighbors. coordinates: kind → bit
    of such a coordinate → stride."""
    values = coordinates["value"]
    bytes_of = tuple(number for number, stride in values.items() if stride >= _SIGNS_OF_BYTE)
    within = {number: stride for number, stride in values.items() if stride < _SIGNS_OF_BYTE}
    thread = (_scattered(kind, coordinates[kind]) for kind in ("lane", "warp"))
    return {
        "thread_at": " + ".join(filter(None, thread)),
        "sign_bytes": 1 << len(bytes_of),
        "sign_byte": _numbered("value", bytes_of) or "0",
        "sign_byte_at": _scattered("part", {at: values[number] for at, number in enumerate(bytes_of)}),
        "sign_bit": _scattered("value", within),
    }


def _code(form: Format, near: bool) -> str:
    """The type of its codes in `templates/common/codes.cuh`. near: values were just rounded."""
    name = form.element.value.capitalize()
    if near and form.element is Element.E2M1:
        return f"{name}Near"
    lowest = "true" if form.rule in ("convrot", "quarot") else "false"  # whether the least integer is a code
    return f"{name}<{lowest}>" if form.element in (Element.INT8, Element.INT4) else name
