"""How long a plan should take, without a device: to order what is tried first, and to rank where nothing can be timed.

    time = launch + first tile + ‖ memory, share, issue, waiting ‖

- *first tile*: load, transform and store the tile of one block, from latency to latency, which nothing hides;
- *memory*: bytes over bandwidth, the roofline of S. Williams, A. Waterman and D. Patterson ("Roofline: an insightful
  visual performance model", CACM 52/4, 2009), with L2 for what is hot and fits and device memory for what does not;
- *share*: the same for what one SM alone can load and store, where there are fewer blocks than would keep all busy;
- *issue*: instructions, tensor core and shared memory cycles of one SM for its further blocks;
- *waiting*: the latencies of a tile once more for every further wave of blocks, for the blocks of a wave hide each
  other's (V. Volkov, "Understanding latency hiding on GPUs", 2016). How many blocks make a wave is the occupancy
  calculation of the CUDA C++ Programming Guide, from threads, registers and shared memory.

The last four overlap, but never wholly: a p-norm joins them. What differs from target to target is in its YAML,
`model`. How near it comes to the winners of the shipped bundle, which were timed, is what its tests hold it to.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import ceil

from hadagen.arch import Arch
from hadagen.plan import OVERHEAD_REGISTERS, Plan
from hadagen.steps import (
    FP16,
    FP32,
    PACKED,
    Butterfly,
    Exchange,
    Load,
    Mma,
    Narrow,
    Normalize,
    Prefetch,
    Round,
    Shuffle,
    Step,
    Store,
    SwapButterfly,
    Transpose,
    Trigger,
    Widen,
)
from hadagen.trial import Cache, Destination, buffer_bytes

OVERLAP = 4.0  # p of the norm: 1 would overlap nothing, infinity everything
SCHEDULERS = 4  # of an SM; each issues one instruction of a warp in a cycle
SHARED_BYTES_PER_CYCLE = 128
REGISTER_GRANULE = 8  # a thread gets its registers in eights
CHUNK_BYTES = 512  # of packed values, which is what an exchange moves at a time
WARP_BYTES = 128  # one register of every thread
TILE_INSTRUCTIONS = 40  # index arithmetic, bounds and A operands
# That take a pair of fp32 values into this many parts; an mma cuts a value off to one tf32 by itself.
PART_INSTRUCTIONS = {
    (PACKED, 1): 0,
    (FP16, 1): 0,
    ("bfloat16", 2): 6,
    ("bfloat16", 3): 11,
    ("tf32", 1): 0,
    ("tf32", 2): 8,
}
MMA_OF_TF32 = 2  # m16n8k8 take as long as one m16n8k16, each
# Cycles until a dependent instruction may start.
MMA_LATENCY = 33
ARITHMETIC_LATENCY = 5
SHUFFLE_LATENCY = 25
SHARED_LATENCY = 30
REDUCE_LATENCY = 25  # of one value over a warp
BULK_LATENCY = 300  # what an asynchronous copy takes beyond the load itself


# What other steps leave in fp32 they leave chunk by chunk, and the next one may take it from there.
HOLDS_ALL = (Load, Butterfly, Shuffle, SwapButterfly, Exchange)


@dataclass(frozen=True)
class Cost:
    """What a step asks of one warp for one tile. `latency` in cycles, once for all of the warp's chunks."""

    instructions: float = 0.0
    mma: float = 0.0
    shared_bytes: float = 0.0
    latency: float = 0.0


class Estimate:
    """The times of one plan. `registers`: of a thread, where a compiled kernel has told; estimated otherwise."""

    def __init__(self, plan: Plan, arch: Arch, registers: int | None = None) -> None:
        self._arch = arch
        self._launch = plan.launch
        self._stages = plan.load.stages if plan.persistent else 1
        self._prefetches = any(isinstance(step, Prefetch) for step in plan.steps)
        self._problem = plan.problem
        wanted = _registers(plan) if registers is None else registers
        self._blocks_per_sm = resident_blocks(plan, arch, wanted)
        costs = _costs(plan, arch)
        model, warps = arch.model, plan.launch.threads // 32
        instructions = sum(cost.instructions for cost in costs)
        self._block_cycles = warps * max(
            instructions / SCHEDULERS,
            sum(cost.mma for cost in costs) * model.mma_cycles,
            sum(cost.shared_bytes for cost in costs) / SHARED_BYTES_PER_CYCLE,
        )
        self._first_block_cycles = max(self._block_cycles, instructions)  # one warp keeps one scheduler busy
        self._more_reads = 0 if plan.load.multicast else plan.shares_loaded - 1  # of each row, from L2
        block_bytes = buffer_bytes(plan.problem, plan.launch.tile_elements) / plan.launch.cluster
        # What others load for a block comes as fast as shared memory takes it.
        others = SHARED_BYTES_PER_CYCLE if plan.load.multicast else model.sm_bytes_per_cycle
        self._block_memory_cycles = block_bytes * (2 / model.sm_bytes_per_cycle + (plan.shares_loaded - 1) / others)
        self._latency_cycles = sum(cost.latency for cost in costs)

    def us(self, elements: int, destination: Destination, cache: Cache) -> float:
        """Microseconds of one launch over `elements` = rows · n, at the rows that are timed (`timed_rows`)."""
        model, launch = self._arch.model, self._launch
        moved_bytes = buffer_bytes(self._problem, elements)
        in_l2, beyond, loading = _memory(self._arch, moved_bytes, destination, cache)
        # Shares that other blocks have loaded too come from L2.
        shared = self._more_reads * moved_bytes / model.l2_bytes_per_us
        chain = self._latency_cycles / model.cycles_per_us
        first_issue = self._first_block_cycles / model.cycles_per_us
        block_issue = self._block_cycles / model.cycles_per_us
        block_memory = self._block_memory_cycles / model.cycles_per_us
        blocks = ceil(elements / launch.tile_elements) * launch.cluster
        waves = ceil(blocks / (self._blocks_per_sm * model.sms))
        more = ceil(blocks / model.sms) - 1
        later = loading
        if self._prefetches:  # then it comes from L2, which was asked once more
            later = min(loading, model.l2_latency_us)
            in_l2 *= 1 + model.prefetch_share
        # With stages, a block loads its next tile while it works on this one.
        waiting = (waves - 1) * (later + chain if self._stages == 1 else max(later / self._stages, chain))
        terms = (in_l2 + beyond, shared, more * block_memory, more * block_issue, waiting)
        together: float = sum(time**OVERLAP for time in terms) ** (1 / OVERLAP)
        launching = model.launch_us - (model.early_us if launch.starts_early else 0.0)
        return launching + loading + block_memory + first_issue + chain + together


def copy_us(arch: Arch, copied_bytes: int, destination: Destination, cache: Cache) -> float:
    """Microseconds of the copy kernel over a buffer: launch, one load, and the memory."""
    in_l2, beyond, loading = _memory(arch, copied_bytes, destination, cache)
    return arch.model.launch_us + loading + in_l2 + beyond


def resident_blocks(plan: Plan, arch: Arch, registers: int) -> int:
    """Blocks that an SM holds at once when a thread has `registers`; at least 1."""
    limits, launch = arch.limits, plan.launch
    granted = -(-registers // REGISTER_GRANULE) * REGISTER_GRANULE
    return max(
        1,
        min(
            limits.blocks_per_sm,
            limits.threads_per_sm // launch.threads,
            limits.registers_per_sm // (granted * launch.threads),
            limits.shared_per_sm // (launch.shared_bytes + limits.shared_reserved_per_block),
        ),
    )


def _memory(arch: Arch, moved_bytes: int, destination: Destination, cache: Cache) -> tuple[float, float, float]:
    """Microseconds that L2 is busy with what it holds of one launch, that device memory is with the rest, and that the
    first load takes."""
    model = arch.model
    footprint = moved_bytes * (1 if destination is Destination.IN_PLACE else 2)
    # L2 keeps what is read in both of its halves: it is hot up to half of L2, and nothing is beyond the whole.
    beyond = 1.0
    if cache is Cache.HOT and footprint <= model.l2_bytes:
        beyond = max(0.0, 2 * moved_bytes / model.l2_bytes - 1)
    near = 1 - beyond
    moved = 2 * moved_bytes  # read and written
    loading = near * model.l2_latency_us + beyond * model.dram_latency_us
    return moved * near / model.l2_bytes_per_us, moved * beyond / model.dram_bytes_per_us, loading


def _registers(plan: Plan) -> int:
    """A guess at the registers of a thread: its values in the widest form that all of them take at once."""
    words = [
        _words(carrier) for step, carrier in zip(plan.steps, plan.carriers, strict=True) if isinstance(step, HOLDS_ALL)
    ]
    if plan.load.carrier == PACKED:  # fp32 is summed vector by vector
        words[0] *= plan.shares_loaded
    prefetched = _width(plan) * 4 if plan.load.stages > 1 and not plan.load.staged else 0
    return OVERHEAD_REGISTERS + (max(words) + prefetched << plan.chunk_bits)


def _width(plan: Plan) -> int:
    """How many times as many bytes as 16-bit elements those of the plan are."""
    return plan.problem.dtype.bytes // 2


def _words(carrier: str) -> int:
    """Registers of a thread that hold its share of a chunk."""
    return 8 if carrier == FP32 else 4


def _costs(plan: Plan, arch: Arch) -> list[Cost]:
    """One for each step, and one for the tile as a whole."""
    chunks = 1 << plan.chunk_bits
    before = ("", *plan.carriers[:-1])
    moved = chunks * _width(plan)
    steps = [
        _cost(step, chunks, moved, _words(carrier), arch) for step, carrier in zip(plan.steps, before, strict=True)
    ]
    for step in plan.exchanges:
        if step.crosses_blocks:  # a block's stores to others wait for each other
            crossing = step.rounds * plan.crossed_bytes(step)
            steps.append(Cost(latency=crossing / arch.model.cluster_bytes_per_cycle))
    if plan.levels_bytes:
        steps.append(Cost(latency=SHARED_LATENCY + 2 * REDUCE_LATENCY))
    if plan.shares_loaded > 1:  # by the load, and summed; what comes between costs nothing
        summed = 1 + next(at for at, step in enumerate(plan.steps) if step.over_blocks)
        steps[:summed] = [_times(plan.shares_loaded, cost) for cost in steps[:summed]]
    if plan.load.staged:
        steps.append(Cost(latency=BULK_LATENCY if plan.load.in_bulk else SHARED_LATENCY))
    return [Cost(TILE_INSTRUCTIONS), *steps]


def _times(count: int, cost: Cost) -> Cost:
    return Cost(*(count * part for part in astuple(cost)))


def _cost(step: Step, chunks: int, moved: int, words: int, arch: Arch) -> Cost:
    """Of one step over a warp's chunks, each `words` registers in a thread before the step, which are `moved` times
    `CHUNK_BYTES` in memory."""
    match step:
        case Load() if step.staged:
            return Cost((1 if step.in_bulk else 3) * moved, shared_bytes=2 * CHUNK_BYTES * moved)
        case Load() | Store():
            return Cost(instructions=2 * moved)
        case Mma(operand=operand, parts=parts, turned=turned):
            # so many mma into one accumulator, what takes the four pairs of a chunk apart, and what transposes them
            mma = parts * (MMA_OF_TF32 if operand == "tf32" else 1)
            instructions = 2 * mma + 4 * PART_INSTRUCTIONS[operand, parts] + (4 * parts if turned else 0)
            return Cost(instructions * chunks, 2 * mma * chunks, latency=(mma + turned) * MMA_LATENCY)
        case Prefetch() | Trigger():
            return Cost()
        case Transpose():
            return Cost(words * chunks, latency=MMA_LATENCY)
        case Shuffle() | SwapButterfly():
            crossing = words * chunks / (2 if isinstance(step, SwapButterfly) else 1)
            return Cost(3 * words * chunks, shared_bytes=WARP_BYTES * crossing, latency=SHUFFLE_LATENCY)
        case Exchange():
            vectors = step.planes * step.rounds * chunks
            conflicts = 2 if step.shared_layout == "linear" and step.planes == 2 else 1
            sync = arch.model.cluster_sync_cycles if step.crosses_blocks else arch.model.block_sync_cycles
            return Cost(
                instructions=4 * vectors,
                shared_bytes=2 * CHUNK_BYTES * conflicts * vectors,
                latency=step.rounds * (2 * SHARED_LATENCY + sync),
            )
        case Normalize():
            return Cost(words * chunks, latency=REDUCE_LATENCY)
        case Round() | Narrow():
            return Cost(words / 2 * chunks, latency=ARITHMETIC_LATENCY)
        case Widen():
            return Cost(2 * words * chunks, latency=ARITHMETIC_LATENCY)
    return Cost(words * chunks, latency=ARITHMETIC_LATENCY)  # arithmetic on every value where it is
