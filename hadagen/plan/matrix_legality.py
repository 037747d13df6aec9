"""Which knobs are legal together for a problem with a matrix, and why others are not; see `hadagen.plan.legality`."""

from __future__ import annotations

from hadagen.plan.knobs import AHEAD, HADAMARD, IN_TURNS, KNOBS, MATRIX_FIRST, TOGETHER, Knobs, KnobValue
from hadagen.plan.legality import RULES, Context, Rules, Why, footprint, halves_in_bulk
from hadagen.plan.steps.base import PACKED, Draft
from hadagen.plan.steps.matrix import COLUMN_BITS, OPERAND_SIDE, VECTOR, Matrix, Multiplies
from hadagen.plan.steps.product import PRODUCT_COLUMNS, BoxProduct, Product
from hadagen.problem.problem import LEAST_LENGTH, DType, Rows


def _draft(c: Context, k: Knobs) -> tuple[Draft, Multiplies | BoxProduct]:
    """The plan, and its step that multiplies by the matrix."""
    draft = footprint(c.problem, k).plan
    return draft, next(step for step in draft.steps if isinstance(step, Multiplies | BoxProduct))


def _cuts_row(c: Context, k: Knobs) -> str | None:
    """Why a tile does not hold whole rows that have one scale, or None."""
    tile, unit, room = k.rows * c.problem.n, c.problem.unit, c.problem.room
    if tile % room:
        return f"a tile ends within a row of {unit} (rows must be {room // c.problem.n} or more)"
    too_many = c.problem.is_padded and tile > room
    return f"a row of {unit} fills a tile alone (rows must be {room // c.problem.n})" if too_many else None


MATRIX_RULES = Rules()


def _of_hadamard(rule: Why) -> Why:
    """The rule, for kernels that multiply by H first."""
    return lambda c, k: None if k.first == MATRIX_FIRST else rule(c, k)


def _of_product(last: str, *values: KnobValue) -> None:
    """The values of a knob that are legal where the matrix comes first."""
    must = f"where the matrix comes first, {last} must be {' or '.join(map(str, values))}"
    MATRIX_RULES.rule(last)(lambda c, k: must if k.first == MATRIX_FIRST and getattr(k, last) not in values else None)


for _name, _knob in KNOBS.items():
    if not _knob.with_matrix:
        MATRIX_RULES.unused(_name, f"a kernel with a matrix has no {_name}")
MATRIX_RULES += [rule for rule in RULES if rule.last in ("stages", "ahead", "trigger")]


@MATRIX_RULES.rule("first")
def _matrix_may_come_first(c: Context, k: Knobs) -> str | None:
    if k.first == HADAMARD:
        if k.cluster > 1:
            return "where H comes first, a block has whole rows (cluster must be 1, or first matrix)"
        return "a real matrix comes first (first must be matrix)" if c.problem.transform.real else None
    if c.has_wide_prologue and c.problem.io.input is DType.FLOAT16 and c.problem.transform.real:
        return "a real matrix of float16 is not multiplied by sums of two bfloat16 (first must be hadamard)"
    if "cp_async" not in c.arch.features:
        return "the arch has no cp_async (first must be hadamard)"
    if k.chunks > 1 or k.warps > 1:
        return "where the matrix comes first, a block has its warps for one row (chunks and warps must be 1)"
    if k.cluster > 1 and ("cluster" not in c.arch.features or k.cluster > c.arch.limits.cluster_blocks):
        return f"the arch has no clusters of {k.cluster} blocks"
    return None


@MATRIX_RULES.rule("fold")
def _fold_leaves_columns(c: Context, k: Knobs) -> str | None:
    if k.first == HADAMARD:
        return "nothing is folded where H comes first (fold must be 0)" if k.fold else None
    if c.problem.transform.paired and k.fold:
        return "a second matrix takes the place of H, of which no bits are left (fold must be 0)"
    most = PRODUCT_COLUMNS[-1]
    if not VECTOR <= c.problem.length >> k.fold <= most:
        return f"a product has from {VECTOR} to {most} columns of a row (fold must be another, or first hadamard)"
    limit, operands = c.arch.limits.threads_per_block, -(-(c.problem.order << k.fold) // OPERAND_SIDE)
    if (in_block := -(-operands // k.cluster)) * 32 > limit:
        return f"more than {limit} threads per block (fold must be less)"
    if in_block * (k.cluster - 1) >= operands:
        return "a block would have no rows of the matrix (cluster must be less, or fold more)"
    return None


@MATRIX_RULES.rule("products")
def _warps_share_products(c: Context, k: Knobs) -> str | None:
    if k.first == HADAMARD:
        return None if k.products == TOGETHER else "all warps multiply what they have (products must be together)"
    if k.cluster > 1 and k.products in (IN_TURNS, AHEAD):
        return "clusters take one tile each, with nothing beside its product (products must be another, or cluster 1)"
    if c.problem.transform.paired and k.products == AHEAD:
        return "a second product takes the registers of the next tile (products must be another)"
    draft, product = _draft(c, k)
    if lacking := min(product.features(c.problem.io.input, PACKED) - c.arch.features, default=""):
        return f"the arch has no {lacking} (products must be another)"
    all_rows = k.products == IN_TURNS and draft.warps == Product.together
    return "four warps have all rows (products must be together)" if all_rows else None


@MATRIX_RULES.rule("rows")
def _rows_fill_columns(c: Context, k: Knobs) -> str | None:
    if k.first == HADAMARD:
        return None
    if k.rows * c.problem.length >> k.fold not in PRODUCT_COLUMNS:
        numbers = " or ".join(map(str, PRODUCT_COLUMNS))
        return f"a product has {numbers} columns, those of all its rows (rows must be others)"
    if why := _cuts_row(c, k):
        return why
    if k.cluster > 1 and k.rows > 1:
        return "the blocks of a cluster share one row (rows must be 1, or cluster)"
    return None


_of_product("slabs", 1)
_of_product("exchange_carrier", PACKED)
_of_product("load", "cp_async")


@MATRIX_RULES.rule("grid")
def _boxes_follow(c: Context, k: Knobs) -> str | None:
    if k.first == HADAMARD or k.grid == ("tiles" if k.cluster > 1 else "persistent"):
        return None
    if k.cluster > 1:
        return "clusters take one tile each (grid must be tiles)"
    return "boxes of later tiles are loaded meanwhile (grid must be persistent, or cluster more)"


@MATRIX_RULES.rule("stages")
def _boxes_are_staged(c: Context, k: Knobs) -> str | None:
    if k.first == HADAMARD or k.products not in (IN_TURNS, AHEAD) or k.stages > 1:
        return None
    return "a box is loaded while another one is multiplied (stages must be 2 or more, or products another)"


@MATRIX_RULES.first_only("ahead")
def _clusters_prefetch_nothing(c: Context, k: Knobs) -> str | None:
    return "clusters are for few rows, which L2 has" if k.first == MATRIX_FIRST else None


@MATRIX_RULES.rule("stages")
def _tiles_land_meanwhile(c: Context, k: Knobs) -> str | None:
    if k.products == AHEAD and k.stages < 3:
        return "a tile lands while the next one is multiplied and this one is transformed (stages must be 3 or more)"
    return None


@MATRIX_RULES.rule("chunks")
def _chunks_have_columns(c: Context, k: Knobs) -> str | None:
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
@_of_hadamard
def _rows_fill_operands(c: Context, k: Knobs) -> str | None:
    draft, tile = _draft(c, k)
    assert isinstance(tile, Multiplies)
    if k.rows < (least := tile.rows_at_once(draft)):
        return f"an mma takes columns of {least} rows at once (rows must be {least} or more)"
    if why := _cuts_row(c, k):
        return why
    if k.warps > tile.sets(draft):
        return "some warps would have nothing to multiply (take fewer warps, or more rows)"
    return None


@MATRIX_RULES.rule("slabs")
@_of_hadamard
def _slabs_have_rows(c: Context, k: Knobs) -> str | None:
    draft, tile = _draft(c, k)
    assert isinstance(tile, Multiplies)
    if k.slabs > tile.operands_in_slab(draft):
        return "the matrix has fewer rows (slabs must be fewer)"
    if 32 * draft.warps > (limit := c.arch.limits.threads_per_block):
        return f"more than {limit} threads per block (take fewer warps)"
    if isinstance(tile, Matrix) and tile.blocks(draft) < draft.warps:
        return "some warps would have nothing to transform (take fewer warps, or more rows)"
    return None


@MATRIX_RULES.rule("exchange_carrier")
@_of_hadamard
def _rounds_before_matrix(c: Context, k: Knobs) -> str | None:
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
def _matrix_load_is_possible(c: Context, k: Knobs) -> str | None:
    draft, tile = _draft(c, k)
    for why in tile.faults(draft, draft.steps.index(tile)):
        return why
    if k.load == "bulk" and draft.width > 1 and not halves_in_bulk(c, draft.tile_elements):
        return "the parts of rows lie apart (load must be plain)"
    lacking = min(draft.features - c.arch.features, default="")
    return f"the arch has no {lacking}" if lacking else None


@MATRIX_RULES.first_only("grid")
@_of_hadamard
def _tiles_are_loaded_meanwhile(c: Context, k: Knobs) -> str | None:
    return "nothing is loaded for the next tile" if k.load != "bulk" else None


@MATRIX_RULES.rule("min_blocks")
def _matrix_fits_registers(c: Context, k: Knobs) -> str | None:
    if k.first == MATRIX_FIRST:
        values = "the matrix and its sums do not fit the registers (fold or min_blocks must be another)"
        return c.beyond_limits(k, wide=False, values=values, fewer="stages")
    values = "values, or the matrix and its sums, do not fit the registers (take more warps, or fewer rows or slabs)"
    return c.beyond_limits(k, wide=False, values=values, fewer="rows")
