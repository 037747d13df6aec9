"""Which knobs are legal together for a problem with a matrix, and why others are not; see `hadagen.plan.legality`."""

from __future__ import annotations

from hadagen.plan.knobs import KNOBS, Knobs, matrix_steps
from hadagen.plan.layout import log2
from hadagen.plan.legality import RULES, Context, Rules, footprint
from hadagen.plan.steps.base import PACKED, Draft
from hadagen.plan.steps.matrix import COLUMN_BITS, OPERAND_SIDE, VECTOR, Shape
from hadagen.problem.problem import LEAST_LENGTH, DType, Rows


def _groups(c: Context, k: Knobs) -> int:
    """Warps that have all rows of the matrix."""
    return -(-c.problem.order // (OPERAND_SIDE * k.slabs))


def _shape(c: Context, k: Knobs) -> Shape:
    return Shape(k.rows, c.problem.order, c.problem.length, k.chunks, _groups(c, k) * k.warps)


MATRIX_RULES = Rules()
for _name, _knob in KNOBS.items():
    if not _knob.with_matrix:
        MATRIX_RULES.unused(_name, f"a kernel with a matrix has no {_name}")
MATRIX_RULES += [rule for rule in RULES if rule.last in ("stages", "ahead", "trigger")]


@MATRIX_RULES.rule("chunks")
def _(c: Context, k: Knobs) -> str | None:
    problem = c.problem
    if problem.io.input is DType.FLOAT32:
        return "an mma multiplies 16-bit values by a matrix (the dtype must be float16 or bfloat16)"
    if problem.io.rows is Rows.PITCHED:
        return "pitched rows are not multiplied by a matrix (rows must be contiguous)"
    if problem.n % VECTOR or 1 < problem.length < LEAST_LENGTH:
        return "eight columns are loaded at once (n must be a multiple of 8, and n / k 1 or more than 4)"
    if problem.length == 1:
        if problem.io.form:
            return "what is multiplied by a matrix alone is not quantized (n must be more than k)"
        return "there is one column (chunks must be 1)" if k.chunks > 1 else None
    return "a row has fewer columns (chunks must be fewer)" if 1 < k.chunks > c.problem.length >> COLUMN_BITS else None


@MATRIX_RULES.rule("rows")
def _(c: Context, k: Knobs) -> str | None:
    if c.problem.length == 1:
        least, sets = OPERAND_SIDE, k.rows // OPERAND_SIDE
    else:
        shape = Shape(k.rows, c.problem.order, c.problem.length, k.chunks, 1)
        least, sets = shape.together, k.rows // shape.together * shape.vectors
    if k.rows < least:
        return f"an mma takes columns of {least} rows at once (rows must be {least} or more)"
    if k.rows * c.problem.n % c.problem.unit:
        return f"a tile ends within a row of {c.problem.unit} (rows must be {c.problem.unit // c.problem.n} or more)"
    return "some warps would have nothing to multiply (take fewer warps, or more rows)" if k.warps > sets else None


@MATRIX_RULES.rule("slabs")
def _(c: Context, k: Knobs) -> str | None:
    if (k.slabs - 1) * OPERAND_SIDE >= c.problem.order:
        return "the matrix has fewer rows (slabs must be fewer)"
    threads, limit = 32 * _groups(c, k) * k.warps, c.arch.limits.threads_per_block
    if threads > limit:
        return f"more than {limit} threads per block (take fewer warps)"
    if c.problem.length > 1 and _shape(c, k).blocks < _shape(c, k).warps:
        return "some warps would have nothing to transform (take fewer warps, or more rows)"
    return None


@MATRIX_RULES.rule("exchange_carrier")
def _(c: Context, k: Knobs) -> str | None:
    if c.problem.length == 1:
        last = "nothing follows the matrix but the store (exchange_carrier must be packed)"
        return last if k.exchange_carrier != PACKED else None
    if k.exchange_carrier == PACKED:
        if not (c.problem.may_round_often or c.problem.may_round_within):
            return f"{c.problem.io.numerics.value} may not round before the matrix (exchange_carrier must be fp32)"
        # Sums of few values often lie in the middle between two 16-bit values.
        few = "sums of so few values round badly (exchange_carrier must be fp32)"
        return few if c.problem.order < VECTOR else None
    return None


@MATRIX_RULES.rule("load")
def _(c: Context, k: Knobs) -> str | None:
    if c.problem.length == 1:
        if k.load != "cp_async":
            return "only cp_async stages rows that are operands (load must be cp_async)"
    elif k.load not in ("plain", "bulk"):
        return "blocks of rows are loaded as they lie (load must be plain or bulk)"
    elif k.load == "bulk" and not _shape(c, k).in_order:
        return "a row of x begins inside a block (rows must be 1, or load plain)"
    # Without requests, which knobs after this one choose.
    chosen = Knobs(k.chunks, rows=k.rows, exchange_carrier=k.exchange_carrier, load=k.load)
    draft = Draft(c.problem, log2(k.chunks), 0, 0, matrix_steps(c.problem, chosen))
    lacking = min(draft.features - c.arch.features, default="")
    return f"the arch has no {lacking}" if lacking else None


@MATRIX_RULES.first_only("grid")
def _(c: Context, k: Knobs) -> str | None:
    return "nothing is loaded for the next tile" if k.load != "bulk" else None


@MATRIX_RULES.rule("min_blocks")
def _(c: Context, k: Knobs) -> str | None:
    return c.beyond_limits(
        footprint(c.problem, k),
        32 * _groups(c, k) * k.warps,
        k.min_blocks,
        wide=False,
        values="values, or the matrix and its sums, do not fit the registers (take more warps, or fewer rows or slabs)",
        fewer="rows",
    )
