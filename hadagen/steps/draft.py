"""`Draft`: an unchecked plan, and what follows from its steps. `Footprint`: its shared memory and registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from hadagen.launch import Param, params_for
from hadagen.layout import PAIR, ROW, THREAD_ELEMENTS, VECTOR_BYTES, Axis, Place, Placement, bit, column, reg
from hadagen.problem import DType, Problem
from hadagen.scale import ScaleForm
from hadagen.steps.base import FP32, Step, mixed_chunk_bits
from hadagen.steps.conversions import Normalize
from hadagen.steps.exchanges import Exchange
from hadagen.steps.matrix import Multiplies
from hadagen.steps.memory import Load
from hadagen.steps.quantize import Groups, Largest, Quantize

# Registers of a thread besides its values: addresses, the A operands of the mma, accumulators under way.
OVERHEAD_REGISTERS = 24
BARRIER_BYTES = 128  # room for all mbarriers; keeps what follows aligned


@dataclass(frozen=True)
class Draft:
    """The steps of a problem over 2^chunk_bits chunks per warp, `parts` · 2^warp_bits warps and 2^cta_bits blocks.

    With a matrix, chunks are the columns that a warp adds and subtracts, and there are 2^warp_bits groups of warps.

    A step asks its draft about the other steps. A `Plan` is a draft that was checked.
    """

    problem: Problem
    chunk_bits: int
    warp_bits: int
    cta_bits: int
    steps: tuple[Step, ...]
    persistent: bool = False
    min_blocks: int = 1
    order: str = "by_step"  # how steps are written, one of `ORDERS`
    starts_early: bool = False  # as in `LaunchSpec`

    @cached_property
    def loaded(self) -> Placement:
        vector_bits = self.vector_elements.bit_length() - 1
        if self.matrix is None:
            return Placement.standard(vector_bits, self.chunk_bits, self.warp_bits, self.cta_bits, self.problem.parts)
        columns = {column(number): bit(number) for number in range(self.problem.bits)}
        return Placement({**columns, ROW: Axis(self.matrix.rows * self.problem.order, self.problem.length)})

    @cached_property
    def matrix(self) -> Multiplies | None:
        """The step that multiplies by the matrix of the transform, if there is one."""
        return next((step for step in self.steps if isinstance(step, Multiplies)), None)

    @property
    def warps(self) -> int:
        """Of a block."""
        return (self.problem.parts if self.matrix is None else self.matrix.warps(self)) << self.warp_bits

    @property
    def vector_elements(self) -> int:
        return VECTOR_BYTES // self.problem.io.input.bytes

    @property
    def vector_places(self) -> tuple[Place, ...]:
        """The places of the bits that number the elements of a 16-byte vector that a thread loads and stores."""
        if self.matrix:
            return ()
        return PAIR, *(reg(j) for j in range(self.vector_elements.bit_length() - 2))

    @property
    def vectors(self) -> int:
        """16-byte vectors of a tile in one thread."""
        if self.matrix:
            return self.matrix.vectors(self)
        return (THREAD_ELEMENTS << self.chunk_bits) // self.vector_elements

    @property
    def eights(self) -> int:
        """How many times eight values a thread has between steps; 0 with a matrix, if nothing is quantized."""
        if self.matrix:
            return 0 if self.matrix.stores else self.matrix.values(self) // THREAD_ELEMENTS
        return 1 << self.chunk_bits

    def words(self, carrier: str) -> int:
        """Registers of a thread for its share of a tile in that form."""
        return (8 if carrier == FP32 else 4) * (self.eights or 1 << self.chunk_bits)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placement after each step."""
        trace, placement = [], self.loaded
        for step in self.steps:
            placement = step.placed(placement, self)
            trace.append(placement)
        return tuple(trace)

    def before(self, at: int) -> Placement:
        """The placement before step `at`."""
        return self.placements[at - 1] if at else self.loaded

    @cached_property
    def carriers(self) -> tuple[str, ...]:
        """The form of the values before each step and after the last: `PACKED`, `FP16`, `FP32`; "" before the load."""
        trace = [""]
        for step in self.steps:
            trace.append(step.leaves or trace[-1])
        return tuple(trace)

    def multiplied(self, end: int | None = None) -> list[str]:
        """The parts of the scale that the steps before `end` multiply by."""
        return [step.multiplies for step in self.steps[:end] if step.multiplies]

    @property
    def scale_form(self) -> ScaleForm:
        parts = self.multiplied()
        if "scale" in parts:
            return ScaleForm.FP32
        return ScaleForm(f"{self.problem.io.input.value}-{'corrected' if 'correction' in parts else 'factors'}")

    @cached_property
    def load(self) -> Load:
        return next(step for step in self.steps if isinstance(step, Load))

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(step for step in self.steps if isinstance(step, Exchange))

    @property
    def crosses_blocks(self) -> bool:
        return any(step.crosses_blocks for step in self.exchanges)

    @property
    def params(self) -> tuple[Param, ...]:
        """What the kernel takes: for its problem, and for its steps besides."""
        of_steps = (param for step in self.steps for param in step.params)
        return tuple(dict.fromkeys((*params_for(self.problem), *of_steps)))

    @property
    def folds_scale(self) -> bool:
        """Whether values are multiplied by what is left of the scale only as they are quantized."""
        return isinstance(self.steps[-1], Quantize) and self.steps[-1].folds

    @property
    def normalizes(self) -> bool:
        return any(isinstance(step, Normalize) for step in self.steps)

    @cached_property
    def shares_loaded(self) -> int:
        """How many blocks' shares of a tile each block loads: those of all blocks of the cluster, or 1, its own."""
        return 1 << self.cta_bits if any(step.over_blocks for step in self.steps) else 1

    @property
    def grouped_from(self) -> int:
        """The position of the first step that runs group by group: the exchange. Only for the order `by_group`."""
        return self.steps.index(self.exchanges[0])

    @property
    def group_chunks(self) -> int:
        """Chunks of each group. Only for the order `by_group`."""
        return 1 << mixed_chunk_bits(self.steps[self.grouped_from :])

    @property
    def tile_elements(self) -> int:
        """Elements that one cluster transforms at a time."""
        return prod(self.loaded.radices)

    @property
    def rows_per_tile(self) -> int:
        return self.tile_elements // self.problem.n

    @property
    def is_ragged(self) -> bool:
        """Whether the last tile may be partly beyond the end of the array, because tiles hold several of what there are
        whole ones of."""
        return self.tile_elements > self.problem.unit

    @property
    def block_elements(self) -> int:
        """Elements of a tile that one block loads."""
        return self.tile_elements >> self.cta_bits

    @property
    def wide(self) -> bool:
        """Whether all values of a thread are in fp32 at once."""
        return any(step.holds_all and form == FP32 for step, form in zip(self.steps, self.carriers[1:], strict=True))

    @property
    def features(self) -> frozenset[str]:
        """The features that the arch must have."""
        of_steps = (
            step.features(self.problem.io.input, form) for step, form in zip(self.steps, self.carriers, strict=False)
        )
        return frozenset({"dependent_launch"} if self.starts_early else ()).union(*of_steps)

    @property
    def footprint(self) -> Footprint:
        return Footprint(self)


@dataclass(frozen=True)
class Footprint:
    """The shared memory and registers of a plan, or of a draft that has only the steps that take any.

    Shared memory holds, in this order: barriers, or zeros for a `Square`; staged tiles; slots that a block fills
    itself, or what a matrix multiplies; slots that other blocks fill; the levels of warps; and their largest
    magnitudes. Whole rows by multicast take much room, so the slots reuse their memory.
    """

    plan: Draft

    def registers(self, *, wide: bool) -> int:
        """The least registers of a thread: its values in the widest form that all take at once, fp32 if `wide`."""
        if self.plan.matrix:
            return OVERHEAD_REGISTERS + self.plan.matrix.registers(self.plan)
        dtype, load = self.plan.problem.io.input, self.plan.load
        loaded = 2 * dtype.bytes  # registers for a chunk
        shares = 1 if dtype is DType.FLOAT32 else self.plan.shares_loaded  # fp32 is summed vector by vector
        fetched = loaded if load.stages > 1 and not load.staged else 0
        return OVERHEAD_REGISTERS + (max(8 if wide else 4, loaded * shares) + fetched << self.plan.chunk_bits)

    @cached_property
    def shared_bytes(self) -> int:
        return self.peaks_offset + self.peaks_bytes

    @property
    def stages_offset(self) -> int:
        staged = self.plan.matrix is not None and self.plan.load.staged
        return BARRIER_BYTES if self.plan.crosses_blocks or self.plan.load.in_bulk or staged else 0

    @property
    def stage_bytes(self) -> int:
        """Bytes of one staged tile, as far as a block loads it."""
        plan = self.plan
        if not plan.load.staged:
            return 0
        if plan.matrix:
            return plan.matrix.staged_bytes(plan)
        return plan.shares_loaded * plan.block_elements * plan.problem.io.input.bytes

    def exchange_offset(self, step: Exchange) -> int:
        """The offset of its slots. Slots that other blocks fill are separate, so that they are free from the start."""
        return self._slots_offset + (self._slots_bytes(crossing=False) if step.crosses_blocks else 0)

    def crossed_bytes(self, step: Exchange) -> int:
        """Bytes that land in a block in one round of an exchange between blocks: a vector for each lane, chunk and
        plane, and the levels of all warps."""
        return step.planes * (32 * VECTOR_BYTES << self.plan.chunk_bits + self.plan.warp_bits) + self.levels_bytes

    @property
    def matrix_offset(self) -> int:
        """The offset of a tile times the matrix."""
        return self._stages_end

    @property
    def levels_offset(self) -> int:
        slots_end = self._slots_offset + self._slots_bytes(crossing=False) + self._slots_bytes(crossing=True)
        return max(self._stages_end, slots_end)

    @property
    def levels_bytes(self) -> int:
        """Bytes for the levels of all warps of the cluster, one vector each."""
        return VECTOR_BYTES << self.plan.warp_bits + self.plan.cta_bits if self.plan.normalizes else 0

    @property
    def peaks_offset(self) -> int:
        """The offset of the largest magnitudes that warps tell each other."""
        return self.levels_offset + self.levels_bytes

    @property
    def peaks_bytes(self) -> int:
        return Groups.of(self.plan).shared_bytes if any(isinstance(step, Largest) for step in self.plan.steps) else 0

    @property
    def _stages_end(self) -> int:
        return self.stages_offset + self.plan.load.stages * self.stage_bytes

    @property
    def _slots_offset(self) -> int:
        return self.stages_offset if self.plan.load.multicast else self._stages_end

    def _slots_bytes(self, *, crossing: bool) -> int:
        if self.plan.matrix:
            return 0 if crossing else self.plan.matrix.shared_bytes(self.plan)
        sizes = [step.slot_bytes for step in self.plan.exchanges if step.crosses_blocks == crossing]
        return max(sizes, default=0) * self.plan.warps << self.plan.chunk_bits
