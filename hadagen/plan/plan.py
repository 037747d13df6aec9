"""Plans: checked lists of steps over a placement, and what they compute.

The transform is a Kronecker product of the matrix, if there is one, and of a 2×2 factor for each index bit that is
left. So a plan is right exactly when it multiplies by the matrix once, transforms every other bit of the row once, and
stores every element where it belongs. `Plan` checks that, symbolically, when it is made; `interpret` carries a plan out
in float64.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from hadagen.errors import UsageError, choice, shown
from hadagen.plan.layout import Axis
from hadagen.plan.steps.base import AS_LOADED, FP32, IN_16_BITS, PACKED, Draft
from hadagen.plan.steps.matrix import Signs
from hadagen.plan.steps.memory import Load, Store
from hadagen.plan.steps.quantize import Quantize, Renumber
from hadagen.problem.launch import ARITHMETIC_DIGITS, LaunchSpec
from hadagen.problem.problem import Io

if TYPE_CHECKING:
    from hadagen.plan.steps.values import Reals
    from hadagen.problem.operands import OperandValues

ORDERS = ("by_step", "by_group")  # values of the knob `order`

# The sequences of factors that multiply by the scale once. Either it comes whole: an `Mma` may take powers of two from
# it, or it may undo a normalizer. Or it comes in two 16-bit parts, whose error `accurate` does not allow.
WHOLE_SCALE = (["scale"], ["factor 1", "scale"], ["factor 1", "factor 2", "scale"], ["normalizer", "scale"])
SCALE_IN_PARTS = (["factor 1", "factor 2"], ["factor 1", "correction"])


@dataclass(frozen=True)
class Plan(Draft):
    """A draft that is right.

    Raises `UsageError`, naming the step, if the steps do not compute the problem within its numeric contract.
    """

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def launch(self) -> LaunchSpec:
        return LaunchSpec(
            threads=32 * self.warps,
            cluster=1 << self.cta_bits,
            shared_bytes=self.footprint.shared_bytes,
            tile_elements=self.elements_in_memory,
            persistent=self.persistent,
            scale_form=self.scale_form,
            params=self.params,
            starts_early=self.starts_early,
            arithmetic=self.arithmetic,
        )

    @cached_property
    def arithmetic(self) -> str:
        """The name of its arithmetic: plans of a problem with the same name give the same bits on one GPU arch."""
        said = [each for at, step in enumerate(self.steps) if (each := step.arithmetic(self, at))]
        return hashlib.sha256(repr((self.scale_form.value, said)).encode()).hexdigest()[:ARITHMETIC_DIGITS]

    @property
    def digest(self) -> str:
        """SHA-256 of all fields of the plan."""
        return hashlib.sha256(_digested(self).encode()).hexdigest()

    def describe(self) -> list[str]:
        """One line per step."""
        return [step.sentence(" ".join(map(str, step.axes(self.before(at))))) for at, step in enumerate(self.steps)]


def _digested(plan: Plan) -> str:
    """All fields of a plan under names that never change, whatever classes and fields are called."""
    transform, io = plan.problem.transform, plan.problem.io
    after = f", prologue={plan.problem.prologue!r}" if plan.problem.prologue else ""
    real = ", real=True" * transform.real + ", paired=True" * transform.paired
    return (
        f"Plan(problem=Problem(transform=Transform(n={transform.n}, order={transform.order}, "
        f"signed={transform.signed}, swapped={transform.swapped}{real}), io=Io(input={_member('DType', io.input)}, "
        f"output={_output(io)}, numerics={_member('Numerics', io.numerics)}, rows={_member('Rows', io.rows)}){after}), "
        f"chunk_bits={plan.chunk_bits}, warp_bits={plan.warp_bits}, cta_bits={plan.cta_bits}, "
        f"steps=({', '.join(map(str, plan.steps))}), persistent={plan.persistent}, min_blocks={plan.min_blocks}, "
        f"order={plan.order!r}, starts_early={plan.starts_early})"
    )


def _output(io: Io) -> str:
    if (form := io.form) is None:
        return _member("DType", io.input)
    layouts = "".join(f"{_member('Layout', each)}, " for each in form.layouts)
    return (
        f"Format(name={form.name!r}, element={_member('Element', form.element)}, scale={form.scale!r}, "
        f"groups={form.groups}, rules={form.rules}, layouts=({layouts[: -1 if len(form.layouts) == 1 else -2]}), "
        f"needs_scale={form.needs_scale}, group={form.group}, rule={form.rule!r}, "
        f"layout={_member('Layout', form.layout)}, rounded={form.rounded})"
    )


def _member(kind: str, member: Enum) -> str:
    return f"<{kind}.{member.value.upper().replace('-', '_')}: {member.value!r}>"


def _check(plan: Draft) -> None:
    name = plan.problem.key
    if plan.tile_elements < plan.problem.room:
        raise UsageError(
            f"a tile of {plan.tile_elements} elements is shorter than a row of {plan.problem.room}; "
            "give it more chunks, warps or blocks"
        )
    if plan.persistent and plan.cta_bits:
        raise UsageError(f"{name}: a cluster takes one tile, so its grid cannot be persistent")
    if not any(isinstance(step, Load) for step in plan.steps):
        raise UsageError(f"{name}: the plan loads nothing")
    if plan.min_blocks < 1:
        raise UsageError(f"{name}: min_blocks = {plan.min_blocks}; an SM holds one block at least")
    placement = plan.loaded
    for step in plan.steps:
        if unknown := {*step.places, *step.moves} - set(placement.axes):
            raise UsageError(f"{name}: {step.name} names {min(unknown)}, which the tile lacks")
        placement = step.placed(placement, plan)
    exact, done = True, set[Axis]()
    for at, step in enumerate(plan.steps):
        if why := _fault(plan, at, exact=exact, done=done):
            raise UsageError(f"step {at + 1} ({step.name}) of {name}: {why}")
        done.update(step.axes(plan.before(at)))
        if plan.carriers[at + 1] == PACKED and (step.changes_values or plan.carriers[at] == FP32):
            exact = False
    length = plan.problem.length
    if left := [str(axis) for axis in plan.loaded.axes.values() if axis.stride < length and axis not in done]:
        raise UsageError(f"{name}: index bits [{', '.join(left)}] are never transformed")
    if sum(step.is_product for step in plan.steps) != plan.problem.transform.has_matrix:
        raise UsageError(f"{name}: the steps do not multiply by the matrix once")
    if sum(step.is_right_product for step in plan.steps) != plan.problem.transform.paired:
        raise UsageError(f"{name}: the steps do not multiply by the second matrix once")
    if sum(isinstance(step, Renumber) for step in plan.steps) != plan.problem.transform.swapped:
        raise UsageError(f"{name}: the steps do not exchange the bits of digits once")
    if [step.computes for step in plan.steps if step.computes] != [plan.problem.prologue] * bool(plan.problem.prologue):
        raise UsageError(f"{name}: the steps do not compute the prologue of the problem once")
    flips = [step.before for step in plan.steps if isinstance(step, Signs)]
    if flips != [*plan.tile.flips] * plan.problem.transform.signed:
        raise UsageError(f"{name}: the steps do not multiply by the signs before and after the transform")
    in_parts = SCALE_IN_PARTS if plan.problem.may_round_often else ()
    if (multiplied := plan.multiplied()) not in (*WHOLE_SCALE, *in_parts):
        raise UsageError(f"{name}: the steps do not multiply by the scale once; they do by {multiplied}")
    if plan.order not in ORDERS:
        raise UsageError(f"{name}: order {shown(plan.order)} is not known; {choice(plan.order, ORDERS)}")
    if plan.order == "by_group":
        if len(plan.exchanges) != 1 or plan.cta_bits or plan.exchanges[0].rounds > 1:
            raise UsageError(f"{name}: only one exchange, of all vectors in a block, goes group by group")
        if plan.group_chunks >= 1 << plan.chunk_bits:
            raise UsageError(f"{name}: all chunks meet from the exchange on, so there is one group")
        if any(step.loads for step in plan.steps[plan.grouped_from :]):
            raise UsageError(f"{name}: what a tile asks for once has no place among groups of chunks")
    moved = any(plan.placements[-1].axes[at] != plan.loaded.axes[at] for at in plan.vector_places)
    if moved or not isinstance(plan.steps[-1], Store):
        raise UsageError(f"{name}: the plan does not end with a Store of whole 16-byte vectors")
    if isinstance(plan.steps[-1], Quantize) != (plan.problem.io.form is not None):
        raise UsageError(f"{name}: the plan does not store what the problem asks for")


def _fault(plan: Draft, at: int, *, exact: bool, done: set[Axis]) -> str | None:
    """Why step `at` is wrong, or None. The steps before it have transformed the axes `done`, `exact` or rounded."""
    step, carrier = plan.steps[at], plan.carriers[at]
    for why in step.faults(plan, at):
        return why
    forms = {None: carrier, AS_LOADED: plan.load.carrier, IN_16_BITS: PACKED if carrier == FP32 else carrier}
    if carrier != (needs := forms.get(step.takes, step.takes)):
        return f"needs {needs or 'no'} values but finds {carrier or 'none'}"
    for i, axis in enumerate(axes := step.axes(plan.before(at))):
        if axis in done or axis in axes[:i] or axis.stride >= plan.problem.length:
            return f"transforms index bit {axis} a second time or beyond the row"
    may_round = plan.problem.may_round_often or plan.problem.may_round_within
    if not may_round and not exact and step.changes_values:
        return "computes with rounded values, but accurate rounds once, at the end"
    return None


def interpret(plan: Plan, x: Reals, scale: float = 1.0, operands: OperandValues | None = None) -> Reals:
    """The result of the plan, computed step by step in float64. x: [rows, n], rows a multiple of `rows_per_tile`."""
    import numpy as np

    from hadagen.plan.steps.values import TileValues

    more = plan.tile_elements - plan.elements_in_memory
    tiles = np.pad(np.asarray(x).reshape(-1, plan.elements_in_memory), ((0, 0), (0, more)))
    values = TileValues(plan.loaded, tiles, scale, operands or {})
    for step in plan.steps:
        step.interpret(values, plan)
    stored = values.stored(plan.placements[-1]).reshape(tiles.shape)
    return stored[:, : plan.elements_in_memory].reshape(x.shape)
