"""Which knobs are legal together for a problem with a matrix, and why the others are not; see `hadagen.legality`."""

from __future__ import annotations

from functools import lru_cache

from hadagen.knobs import KNOB_NAMES, KNOB_VALUES, Knobs, log2, matrix_steps
from hadagen.legality import Context, Rule
from hadagen.problem import DType, Numerics, Problem, Rows
from hadagen.steps.base import PACKED
from hadagen.steps.draft import Draft, Footprint
from hadagen.steps.matrix import COLUMNS, LEAST_BITS, MOST_BITS, OPERAND_SIDE, Matrix

# The knobs that kernels with a matrix have. All others have their first value.
_KNOBS = ("chunks", "warps", "rows", "slabs", "exchange_carrier", "load", "grid", "stages", "min_blocks")
_LOAD = "cp_async"


def _warps(c: Context, k: Knobs) -> int:
    """Of a block."""
    return -(-c.problem.order // (OPERAND_SIDE * k.slabs)) * k.warps


@lru_cache(maxsize=1024)  # enough while a walk changes the other knobs
def _footprint(
    problem: Problem, chunks: int, warps: int, rows: int, slabs: int, carrier: str, stages: int
) -> Footprint:
    k = Knobs(chunks, warps, 1, rows, slabs, exchange_carrier=carrier, load=_LOAD, stages=stages)
    return Footprint(Draft(problem, log2(chunks), log2(warps), 0, matrix_steps(problem, k)))


def _chunks(c: Context, k: Knobs) -> str | None:
    problem = c.problem
    if problem.io.input is DType.FLOAT32:
        return "an mma multiplies 16-bit values by a matrix (the dtype must be float16 or bfloat16)"
    if problem.io.rows is Rows.PITCHED:
        return "pitched rows are not staged for a matrix (rows must be contiguous)"
    if problem.n % COLUMNS or problem.length in (2, 4):
        return "eight columns are multiplied at once (n must be a multiple of 8, and n / k 1 or more than 4)"
    if lacking := Matrix(1, 1, PACKED, ()).features(problem.io.input, PACKED) - c.arch.features:
        return f"the arch has no {min(lacking)}"
    if problem.bits == LEAST_BITS and problem.order % 2:
        return "an mma takes two rows of eight columns at once (k must be even)"
    if problem.length == 1:
        return "there is one column (chunks must be 1)" if k.chunks > 1 else None
    lower = c.bits - log2(k.chunks)
    if lower > MOST_BITS:
        return f"more than {MOST_BITS} bits would be left for mma (take more chunks)"
    least = min(LEAST_BITS + 2, c.bits)
    return f"fewer than {least} bits would be left for mma (take fewer chunks)" if lower < least else None


def _rows(c: Context, k: Knobs) -> str | None:
    if c.problem.length == 1 and k.rows % OPERAND_SIDE:
        return f"an mma takes {OPERAND_SIDE} rows at once (rows must be {OPERAND_SIDE} or more)"
    sets = k.rows // OPERAND_SIDE if c.problem.length == 1 else k.rows * c.problem.length // (COLUMNS * k.chunks)
    return "some warps would have nothing to multiply (take fewer warps, or more rows)" if k.warps > sets else None


def _slabs(c: Context, k: Knobs) -> str | None:
    if (k.slabs - 1) * OPERAND_SIDE >= c.problem.order:
        return "the matrix has fewer rows (slabs must be fewer)"
    limit = c.arch.limits.threads_per_block
    return f"more than {limit} threads per block (take fewer warps)" if 32 * _warps(c, k) > limit else None


def _exchange_carrier(c: Context, k: Knobs) -> str | None:
    if c.problem.length == 1:
        last = "nothing follows the matrix but the store (exchange_carrier must be packed)"
        return last if k.exchange_carrier != PACKED else None
    if k.exchange_carrier == PACKED:
        if c.problem.io.numerics is Numerics.ACCURATE:
            return "accurate may not round after the matrix (exchange_carrier must be fp32)"
        # Sums of few values often lie in the middle between two 16-bit values.
        return (
            "sums of so few values round badly (exchange_carrier must be fp32)" if c.problem.order < COLUMNS else None
        )
    lacking = "mma_bf16" not in c.arch.features
    return "the arch has no mma_bf16 for two bfloat16 (exchange_carrier must be packed)" if lacking else None


def _load(c: Context, k: Knobs) -> str | None:
    return f"only {_LOAD} stages a tile with gaps (load must be {_LOAD})" if k.load != _LOAD else None


def _stages(c: Context, k: Knobs) -> str | None:
    alone = k.grid == "tiles" and k.stages > 1
    return "one tile a block leaves nothing to have under way (stages must be 1)" if alone else None


def _min_blocks(c: Context, k: Knobs) -> str | None:
    limits, warps = c.arch.limits, _warps(c, k)
    if k.min_blocks * warps * 32 > limits.threads_per_sm:
        return f"more than {limits.threads_per_sm} threads per SM (take fewer warps or a smaller min_blocks)"
    footprint = _footprint(c.problem, k.chunks, k.warps, k.rows, k.slabs, k.exchange_carrier, k.stages)
    room = limits.registers_per_sm // (32 * warps * k.min_blocks)
    if footprint.registers(wide=False) > min(limits.registers_per_thread, room):
        return "the matrix and its sums do not fit the registers (take fewer chunks, slabs or min_blocks)"
    if footprint.shared_bytes > limits.shared_per_block:
        return f"more than {limits.shared_per_block} bytes of shared memory per block (take fewer stages or rows)"
    if k.min_blocks * (footprint.shared_bytes + limits.shared_reserved_per_block) > limits.shared_per_sm:
        return f"more than {limits.shared_per_sm} bytes of shared memory per SM (min_blocks must be smaller)"
    return None


def _unused(name: str) -> Rule:
    def broken(c: Context, k: Knobs) -> str | None:
        first = KNOB_VALUES[name][0]
        return f"a kernel with a matrix has no {name} ({name} must be {first})" if getattr(k, name) != first else None

    return Rule(name, broken)


MATRIX_RULES: list[Rule] = [
    *(_unused(name) for name in KNOB_NAMES if name not in _KNOBS),
    *(
        Rule(broken.__name__.removeprefix("_"), broken)
        for broken in (_chunks, _rows, _slabs, _exchange_carrier, _load, _stages, _min_blocks)
    ),
]
