"""Estimates the time of a plan without a device, to order the first trials, and to rank kernels without a GPU.

    time = launch + first tile + ‖ memory, share, issue, waiting ‖

- *first tile*: to load, transform and store the tile of one block, with all its latencies, which nothing hides;
- *memory*: bytes over bandwidth, the roofline of S. Williams, A. Waterman and D. Patterson ("Roofline: an insightful
  visual performance model", CACM 52/4, 2009), with L2 for hot data that fits, and device memory for the rest;
- *share*: the same for the bandwidth of one SM, which limits if there are too few blocks to keep all SMs busy;
- *issue*: instructions, tensor core and shared memory cycles of one SM, for all its blocks but the first;
- *waiting*: the latencies of a tile once more for every further wave of blocks, because the blocks of one wave hide
  each other's latencies (V. Volkov, "Understanding latency hiding on GPUs", 2016). The number of blocks in a wave is
  the occupancy calculation of the CUDA C++ Programming Guide, from threads, registers and shared memory.

The last four overlap, but never completely: a p-norm joins them. The numbers of a target are in its YAML, `model`. The
tests compare estimates with the measured winners of the shipped bundle.
"""

from __future__ import annotations

from math import ceil

from hadagen.plan.arch import Arch
from hadagen.plan.plan import Plan
from hadagen.plan.steps.base import Cost
from hadagen.problem.regimes import Cache, Destination, buffer_bytes, buffers_besides, quantized_bytes

OVERLAP = 4.0  # p of the norm: 1 means no overlap, infinity full overlap
SCHEDULERS = 4  # of an SM; each issues one instruction of a warp in a cycle
SHARED_BYTES_PER_CYCLE = 128
# Half of the estimates differ by less than this share from what was measured of kernels of every kind; the tests check
# it. So of two kernels that differ by less, the model cannot tell which is faster.
MODEL_ERROR = 0.08
TILE_INSTRUCTIONS = 40  # index arithmetic, bounds and A operands
# Cycles until a dependent instruction may start, by the names in `Cost.waits`: after an mma, arithmetic, a shuffle, an
# access to shared memory, the reduction of one value over a warp; and the extra time of an asynchronous copy.
LATENCIES = {"mma": 33, "arithmetic": 5, "shuffle": 25, "shared": 30, "reduce": 25, "bulk": 300}


class Estimate:
    """The times of one plan. `registers`: those of a thread of the compiled kernel; None to estimate them."""

    def __init__(self, plan: Plan, arch: Arch, registers: int | None = None) -> None:
        self._arch = arch
        self._launch = plan.launch
        self._stages = plan.load.stages if plan.persistent else 1
        self._prefetches = any(step.prefetches for step in plan.steps)
        self._problem = plan.problem
        self._reads_besides, self._writes_besides = buffers_besides(plan.problem)
        wanted = plan.footprint.registers(wide=plan.wide) if registers is None else registers
        launch = plan.launch
        self._blocks_per_sm = arch.limits.resident_blocks(launch.threads, launch.shared_bytes, wanted)
        costs = costs_of(plan)
        model, warps = arch.model, plan.warps
        instructions = TILE_INSTRUCTIONS + sum(cost.instructions for cost in costs)
        self._block_cycles = warps * max(
            instructions / SCHEDULERS,
            sum(cost.mma for cost in costs) * model.mma_cycles,
            sum(cost.shared_bytes for cost in costs) / SHARED_BYTES_PER_CYCLE,
        )
        self._first_block_cycles = max(self._block_cycles, instructions)  # one warp keeps one scheduler busy
        self._more_reads = 0 if plan.load.multicast else plan.shares_loaded - 1  # how often L2 reads each row again
        block_bytes = buffer_bytes(plan.problem, plan.launch.tile_elements) / plan.launch.cluster
        read_bytes = block_bytes * (1 + self._reads_besides)
        moved_bytes = read_bytes + block_bytes * (1 + self._writes_besides)
        # Data that other blocks load for a block comes as fast as shared memory accepts it.
        others = SHARED_BYTES_PER_CYCLE if plan.load.multicast else model.sm_bytes_per_cycle
        self._block_memory_cycles = (
            moved_bytes / model.sm_bytes_per_cycle + (plan.shares_loaded - 1) * read_bytes / others
        )
        cycles = LATENCIES | {"block sync": model.block_sync_cycles, "cluster sync": model.cluster_sync_cycles}
        waits = sum(count * cycles[kind] for cost in costs for kind, count in cost.waits.items())
        self._latency_cycles = waits + sum(cost.crossed_bytes / model.cluster_bytes_per_cycle for cost in costs)

    def us(self, elements: int, destination: Destination, cache: Cache) -> float:
        """Microseconds of one launch over `elements` = rows · n, at the rows that are timed (`timed_rows`)."""
        model, launch = self._arch.model, self._launch
        moved_bytes = buffer_bytes(self._problem, elements)
        written = sum(quantized_bytes(self._problem, elements)) or moved_bytes
        moved = moved_bytes * (1 + self._reads_besides), written + moved_bytes * self._writes_besides
        in_l2, beyond, loading = _memory(self._arch, *moved, destination, cache)
        # Shares that other blocks have loaded before come from L2.
        shared = self._more_reads * moved[0] / model.l2_bytes_per_us
        chain = self._latency_cycles / model.cycles_per_us
        first_issue = self._first_block_cycles / model.cycles_per_us
        block_issue = self._block_cycles / model.cycles_per_us
        block_memory = self._block_memory_cycles / model.cycles_per_us
        blocks = ceil(elements / launch.tile_elements) * launch.cluster
        waves = ceil(blocks / (self._blocks_per_sm * model.sms))
        more = ceil(blocks / model.sms) - 1
        later = loading
        if self._prefetches:  # the data comes from L2, which has one more request
            later = min(loading, model.l2_latency_us)
            in_l2 *= 1 + model.prefetch_share
        # With stages, a block loads its next tile while it works on this one.
        waiting = (waves - 1) * (later + chain if self._stages == 1 else max(later / self._stages, chain))
        terms = (in_l2 + beyond, shared, more * block_memory, more * block_issue, waiting)
        together: float = sum(time**OVERLAP for time in terms) ** (1 / OVERLAP)
        launching = model.launch_us - (model.early_us if launch.starts_early else 0.0)
        return launching + loading + block_memory + first_issue + chain + together


def costs_of(plan: Plan) -> list[Cost]:
    """The cost of each step."""
    return [step.cost(plan, carrier) for step, carrier in zip(plan.steps, plan.carriers, strict=False)]


def copy_us(arch: Arch, read: int, written: int, destination: Destination, cache: Cache) -> float:
    """Microseconds of the copy kernel that reads and writes so many bytes: launch, one load, and the memory."""
    in_l2, beyond, loading = _memory(arch, read, written, destination, cache)
    return arch.model.launch_us + loading + in_l2 + beyond


def _memory(arch: Arch, read: int, written: int, destination: Destination, cache: Cache) -> tuple[float, float, float]:
    """Microseconds of one launch: how long L2 is busy with the data it holds, how long device memory is busy with the
    rest, and how long the first load takes."""
    model = arch.model
    moved = read + written
    footprint = read if destination is Destination.IN_PLACE else moved
    # L2 keeps data that is read in both of its halves. So data is hot up to half of L2, and cold beyond all of it.
    beyond = 1.0
    if cache is Cache.HOT and footprint <= model.l2_bytes:
        beyond = max(0.0, moved / model.l2_bytes - 1)
    near = 1 - beyond
    loading = near * model.l2_latency_us + beyond * model.dram_latency_us
    return moved * near / model.l2_bytes_per_us, moved * beyond / model.dram_bytes_per_us, loading
