"""Steps that quantize: the largest magnitude of each group, then codes and scales.

A group is so many neighboring elements of a row. The digits of an index that tell its elements apart may live in any
place of a block. The digits at places of a thread are digits of `value`, the number of a value in its thread: the
lowest bit of `value` is `pair`, and the next ones are those of the register.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from hadagen.plan.layout import LANE_BITS, PAIR, VECTOR_BYTES, Axis, Place, Placement, add, bit, reg, scatter, swaps
from hadagen.plan.steps.base import BARRIERS, FP32, WARP_BYTES, Coordinates, Cost, Draft, Region, Step
from hadagen.plan.steps.matrix import VECTOR, of_vector
from hadagen.plan.steps.memory import Store
from hadagen.problem.formats import TENSOR, Element, Format
from hadagen.problem.operands import SCALES, TENSOR_SCALE

_BIT = 2  # the radix of a bit
_SIGNS_OF_BYTE = 8
_WORDS = 4  # of shared memory that are read at once
_NAMES = {"lane": "lane", "warp": "warp", "cta": "rank"}  # kind of a place of threads → the name of its number
# Instructions for each element, to encode it, on a GPU with conversions to the type.
_ENCODED = {Element.E4M3: 1.5, Element.E2M1: 8.0, Element.INT8: 4.0, Element.INT4: 5.0, Element.NONE: 0.0}


class Groups(NamedTuple):
    """Where the elements of groups are, before they are quantized: which digits of coordinates tell them apart. Where
    heads have scales, units of the problem are such groups, because a head has several of them.

    A thread has values of `kept` groups. At first several lanes have values of the same groups. They share the work: by
    each digit of `shared`, a lane goes on with half of its groups, so that it makes the scales of `mine`.
    """

    others: tuple[Axis, ...]  # digits of `value` that tell groups apart, bits last
    shared: tuple[Axis, ...]  # digits of `lane` that tell elements apart: by which lanes share the work,
    lanes: tuple[Axis, ...]  # and all others
    other_lanes: tuple[Axis, ...]  # digits of `lane` that tell groups apart
    warps: tuple[Axis, ...]  # digits of `warp` that tell elements apart,
    other_warps: tuple[Axis, ...]  # and groups
    blocks: tuple[Axis, ...]  # digits of the rank in a cluster that tell elements apart,
    other_blocks: tuple[Axis, ...]  # and groups

    @classmethod
    def of(cls, plan: Draft) -> Groups:
        problem, form = plan.problem, plan.problem.io.form
        size = problem.unit if form and form.by_head else form.group if form else 1
        return _groups(tuple(_flat(_coordinates(plan))), problem.room if problem.is_padded else size)

    @property
    def kept(self) -> int:
        return _count(self.others)

    @property
    def mine(self) -> int:
        return self.kept >> len(self.shared)

    @property
    def holders(self) -> int:
        """How many warps have values of a group."""
        return _count(self.warps) * _count(self.blocks)

    @property
    def place(self) -> str:
        """C expression for the number of a warp among the `holders`."""
        return add(scatter("warp", _numbers(self.warps)), scatter("rank", _numbers(self.blocks, _count(self.warps))))

    @property
    def width(self) -> int:
        """Words of shared memory for the largest magnitudes that warps have found of one group."""
        return -(-self.holders // _WORDS) * _WORDS

    @property
    def shared_bytes(self) -> int:
        groups = self.mine * _count((*self.shared, *self.other_lanes, *self.other_warps))
        return 4 * self.width * groups if self.warps and not self.blocks else 0

    @property
    def slot(self) -> str:
        """C expression for the number in shared memory of group `g` of a thread."""
        lanes = (*self.shared, *self.other_lanes)
        of_lane, of_warp = _numbers(lanes, self.mine), _numbers(self.other_warps, self.mine * _count(lanes))
        return add("g", scatter("lane", of_lane), scatter("warp", of_warp))


@lru_cache(maxsize=1024)
def _groups(digits: tuple[tuple[str, Axis, Axis], ...], size: int) -> Groups:
    inside: dict[str, list[Axis]] = {"value": [], "lane": [], "warp": [], "cta": []}
    outside: dict[str, list[Axis]] = {"value": [], "lane": [], "warp": [], "cta": []}
    for kind, digit, axis in digits:
        (inside if axis.stride < size else outside)[kind].append(digit)
    others = sorted(outside["value"], key=lambda digit: (digit.radix == _BIT, digit.stride))
    lanes = inside["lane"]
    count = min(sum(digit.radix == _BIT for digit in others), len(lanes))
    return Groups(
        tuple(others),
        tuple(lanes[:count]),
        tuple(lanes[count:]),
        tuple(outside["lane"]),
        tuple(inside["warp"]),
        tuple(outside["warp"]),
        tuple(inside["cta"]),
        tuple(outside["cta"]),
    )


def _coordinates(plan: Draft) -> Coordinates:
    """The coordinates of values before they are quantized."""
    at = next(at for at, step in enumerate(plan.steps) if isinstance(step, Largest | Quantize))
    return plan.tile.coordinates(plan, plan.before(at))


def _flat(coordinates: Coordinates) -> Iterator[tuple[str, Axis, Axis]]:
    return ((kind, digit, axis) for kind, digits in coordinates.items() for digit, axis in digits.items())


def _count(digits: Iterable[Axis]) -> int:
    return prod(digit.radix for digit in digits)


def _numbers(digits: Iterable[Axis], factor: int = 1) -> dict[Axis, Axis]:
    """For `scatter`: the number that some digits make up, the first the lowest, times a factor."""
    numbers = {}
    for digit in digits:
        numbers[digit] = Axis(digit.radix, factor)
        factor *= digit.radix
    return numbers


@dataclass(frozen=True)
class Largest(Step):
    """Finds the largest magnitude of each group, or NaN if the group has one: within a thread, then across lanes by
    shuffles, then across warps through shared memory."""

    name = "Largest"
    says = "the largest magnitude of each group"
    template = "quantize.cu.j2"
    takes = FP32
    holds_all = True

    def regions(self, plan: Draft) -> Iterator[Region]:
        """The memory for the maxima of a group, through which the warps that have its values share them. Where warps
        may part, the maxima of one tile and of the next have memory of their own."""
        groups = Groups.of(plan)
        if self.crosses(plan):
            yield BARRIERS
            yield Region("peaks", VECTOR_BYTES * groups.holders)
        else:
            yield Region("peaks", groups.shared_bytes << plan.tile.warps_part)

    def crosses(self, plan: Draft) -> bool:
        groups = Groups.of(plan)
        return bool(groups.blocks) or (plan.cta_bits > 0 and plan.tile.loads_all and bool(groups.warps))

    def crossed_bytes(self, plan: Draft) -> int:
        return VECTOR_BYTES * Groups.of(plan).holders

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        form = plan.problem.io.form
        if form is None or form.group == TENSOR:
            yield "no group has a scale of its own"
        elif form.group < plan.vector_elements:
            yield f"a vector has more than a group of {form.group}"
        elif plan.cta_bits and plan.tile.loads_all and Groups.of(plan).holders > 1 << LANE_BITS:
            yield "each lane of a warp reads what one warp has found (cluster must be less)"
        elif Groups.of(plan).blocks and form.group < plan.problem.unit:
            yield "blocks tell each other one largest magnitude, that of a whole tile"
        elif form.group > plan.tile_elements:
            yield f"a tile of {plan.tile_elements} elements is shorter than a group of {form.group}"
        elif not plan.problem.is_padded and (
            plan.tile_elements % form.group or (plan.problem.odd_factor > 1 and form.group < plan.tile_elements)
        ):
            yield f"groups of {form.group} are no digits of an index in a tile of {plan.tile_elements} elements"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        groups, words = Groups.of(plan), plan.words(carrier)
        shuffles = groups.kept - groups.mine + groups.mine * len(groups.lanes)
        waits = {"arithmetic": 2, "shuffle": len(groups.shared) + len(groups.lanes)}
        if groups.warps or groups.blocks:
            waits |= {"shared": 1, "cluster sync" if self.crosses(plan) else "block sync": 1}
        return Cost(words + 4 * shuffles, shared_bytes=WARP_BYTES * shuffles, waits=waits)

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        groups = Groups.of(plan)
        return {
            "groups": groups,
            "group_of_value": scatter("value", _numbers(groups.others)) or "0",
            "place": groups.place or "0",
            "some_lanes": sum(digit.stride for digit in groups.lanes),
            "peaks_offset": plan.footprint.offset("peaks"),
            "crosses": self.crosses(plan),
            "crossings": sum(step.rounds for step in plan.exchanges if step.crosses_blocks),  # before this one
            "in_turn": groups.shared_bytes if plan.tile.warps_part else 0,
            # Whether one instruction finds the amax of a warp. The text of older kernels has shuffles instead.
            "reduces": plan.tile.warps_part and len(groups.lanes) == LANE_BITS,
        }


@dataclass(frozen=True)
class Quantize(Store):
    """Encodes the values, and stores codes and scales."""

    name = "Quantize"
    labels = "folds swapped"

    folds: bool = False  # multiplies by the scale, or what is left of it, with the same product that quantizes
    # The bits at the two places of each pair are swapped, once values are codes.
    swapped: tuple[tuple[Place, Place], ...] = ()

    template = "quantize.cu.j2"
    takes = FP32
    operands = SCALES, TENSOR_SCALE

    @property
    def multiplies(self) -> str:
        return "scale" if self.folds else ""

    @property
    def moves(self) -> Mapping[Place, Place]:
        return swaps(self.swapped)

    @property
    def _across(self) -> tuple[Place, Place] | None:
        """The lane place and the one of a thread that are swapped, if any."""
        return next((pair for pair in self.swapped if pair[0].kind == "lane"), None)

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
        elif self._across is not None and plan.vector_elements < 8:
            yield "a vector has no two values for each of two lanes"

    @property
    def _of_pairs(self) -> bool:
        """Whether neighbors come from two lanes."""
        return self._across is not None and self._across[1] == PAIR

    def _element(self, count: int, bits: int) -> str:
        """C expression for which of `count` values gives byte `at` of word `part` of codes. 4-bit codes of even and of
        odd elements have a word each, or half a word, so that they are joined at once."""
        if self._of_pairs:
            return "part + 2 * at"
        turned = (PAIR, reg(0)) in self.swapped  # the two lowest bits are exchanged
        if bits == 8:
            return "4 * part + at % 2 * 2 + at / 2" if turned else "4 * part + at"
        if count == 4:
            return "at" if turned else "at % 2 * 2 + at / 2"
        return "2 * part + at % 2 + at / 2 * 4" if turned else "part + 2 * at"

    def _rounds_otherwise(self, form: Format) -> bool:
        """Whether the quick way may give another last bit than the longer one, as it multiplies by a reciprocal instead
        of dividing, or as it multiplies the scale of the call by the factor of a group first."""
        if form.rule == "exact" and form.scale == "float32":  # a `Divisor` of codes.cuh
            return True
        power_of_two = form.rule == "power_of_two" or (form.scale == "e8m0" and form.rule != "qutlass")
        return self.folds and not power_of_two

    def cost(self, plan: Draft, carrier: str) -> Cost:
        form = plan.problem.io.form
        assert form is not None
        moved = plan.vectors * (0 if self._across is None else 7)
        groups = Groups.of(plan) if form.group != TENSOR or form.by_head else None
        scales = 20 * groups.mine + 3 * groups.kept if groups else 0
        return Cost(
            (1 + _ENCODED[form.element]) * plan.words(carrier) + 3 * plan.vectors + moved + scales,
            waits={"arithmetic": 6, "shuffle": 1},
        )

    def sentence(self, bits: str) -> str:
        swapped = "".join(f", swap {one}↔{other}" for one, other in self.swapped)
        return f"quantize{', times the scale' if self.folds else ''}{swapped}, and store codes and scales"

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        form, coordinates = plan.problem.io.form, _coordinates(plan)
        assert form is not None
        in_pairs = plan.vector_elements == VECTOR  # elements of 16 bits
        near = plan.problem.n > 1 and not form.rounds_first
        code, plain = _code(form, near, in_pairs)
        view: dict[str, Any] = {
            "form": form,
            "code": code,
            "plain": plain,
            "near": near,
            "bits": form.element.bits,
            "rule": f"{form.name.replace('-', '_')}_{form.rule}",
            "scale_bytes": form.scale_bytes(plan.problem.io.input.bytes),
            "count": plan.vector_elements,
            "element": self._element(plan.vector_elements, form.element.bits),
            "across": self._across and 1 << self._across[0].index,
            "of_pairs": self._of_pairs,
            "groups": None,
            "row": "",
        }
        if plan.problem.transform.signed:
            view |= _signs(coordinates)
        if rows := plan.tile.rows_apart(plan):  # where some that a thread has are beyond the end of X
            view["row"] = add(scatter("lane", rows["lane"]), scatter("warp", rows["warp"]), of_vector(rows))
        if form.group == TENSOR and not form.by_head:
            return view
        groups = Groups.of(plan)
        lanes = sum(digit.stride for digit in groups.lanes)
        first = f"!(lane & {lanes})" if lanes else "", f"({groups.place}) == 0" if groups.place else ""
        of_g = _numbers(groups.others)  # digit of `value` → that of g
        handed = dict(zip(groups.shared, groups.others[len(groups.others) - len(groups.shared) :], strict=True))
        return view | {
            "groups": groups,
            "group_of_value": scatter("value", of_g) or "0",
            "group_at": _first_of_group(groups, coordinates) or "0",
            "row_of_group": _first_of_group(groups, rows) if rows else "",
            "shared_mask": sum(digit.stride for digit in groups.shared),
            # Whether a warp has several groups, and the longer way rounds the values of those that are quick otherwise.
            "mixed": near and self._rounds_otherwise(form) and (groups.kept > 1 or bool(groups.other_lanes)),
            # The bits of lanes that make the scale of group g.
            "lane_of_group": scatter("g", {of_g[of]: digit for digit, of in handed.items()}),
            "alone": " && ".join(filter(None, first)),
        }


def _first_of_group(groups: Groups, coordinates: Coordinates) -> str:
    """C expression for the first element of group `g` among the groups whose scales a lane makes. A digit that is not
    among the coordinates counts as 0."""
    own = len(groups.others) - len(groups.shared)
    numbers = _numbers(groups.others[:own])
    handed = dict(zip(groups.shared, groups.others[own:], strict=True))
    value = coordinates["value"]

    def axes(kind: str, digits: Iterable[Axis]) -> dict[Axis, Axis]:
        return {digit: coordinates[kind][digit] for digit in digits if digit in coordinates[kind]}

    of_lane = {digit: value[of] for digit, of in handed.items() if of in value} | axes("lane", groups.other_lanes)
    of_value = {numbers[digit]: axis for digit, axis in axes("value", groups.others[:own]).items()}
    of_warp, of_block = axes("warp", groups.other_warps), axes("cta", groups.other_blocks)
    return add(scatter("g", of_value), scatter("lane", of_lane), scatter("warp", of_warp), scatter("rank", of_block))


def _signs(coordinates: Coordinates) -> dict[str, Any]:
    """Where the bits of the signs after the transform lie. A byte has the bits of eight neighbors."""
    values = coordinates["value"]
    bytes_of = {digit: axis for digit, axis in values.items() if axis.stride >= _SIGNS_OF_BYTE}
    numbers = _numbers(bytes_of)
    threads = (scatter(name, coordinates.get(kind, {})) for kind, name in _NAMES.items())
    return {
        "signs_at": add(*threads),
        "sign_bytes": _count(bytes_of),
        "sign_byte": scatter("value", numbers) or "0",
        "sign_byte_at": scatter("part", {numbers[digit]: axis for digit, axis in bytes_of.items()}),
        "sign_bit": scatter("value", {digit: axis for digit, axis in values.items() if digit not in bytes_of}),
    }


@dataclass(frozen=True)
class Renumber(Step):
    """Exchanges the two bits of each base-4 digit of an index. No value moves: each is another element from here on."""

    name = "Renumber"
    says = "exchange the bits of each base-4 digit of an index"
    template = "quantize.cu.j2"

    def placed(self, placement: Placement, plan: Draft) -> Placement:
        numbered = {place: self._other(axis, plan) for place, axis in placement.axes.items()}
        return Placement(dict(sorted(numbered.items(), key=lambda item: item[1].stride)))

    def _other(self, axis: Axis, plan: Draft) -> Axis:
        number = axis.stride.bit_length() - 1
        return bit(number ^ 1) if axis == bit(number) and number < plan.problem.bits else axis

    def cost(self, plan: Draft, carrier: str) -> Cost:
        return Cost()


def _code(form: Format, near: bool, in_pairs: bool) -> tuple[str, str]:
    """The type of the codes of a format in `templates/common/codes.cuh`, and the C expression for a value that the type
    encodes quickly. near: values are not rounded before. in_pairs: they were of 16 bits."""
    name, plain = form.element.value.capitalize(), "plain(f[value])"
    lowest = "true" if form.rule in ("convrot", "quarot") else "false"  # whether the least integer is a code
    if form.element is Element.E2M1 and near and in_pairs:
        return f"{name}Near", plain
    if form.element is Element.INT8:
        return (f"{name}Near", "plus(f[value], 0x1.8p23f)") if near else (f"{name}<{lowest}>", plain)
    if form.element is Element.INT4:
        return (f"{name}Rounded<T, {lowest}>", "quotient(f[value])") if in_pairs else (f"{name}<{lowest}>", plain)
    return name, plain
