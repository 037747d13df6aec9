"""The steps of a transform that multiplies by its matrix first.

A row of x is a matrix X of order × length elements, and the transform is A · X · H, times the scale. `LoadBoxes` brings
X to shared memory as it is. `Product` multiplies it by A on the tensor cores, with warps in fours, or `WarpProduct`
with each warp alone, and leaves sums in fp32. Then steps for bits transform the columns that each thread has. So the
only rounding is that of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hadagen.plan.layout import (
    PAIR,
    ROW,
    Axis,
    Place,
    Placement,
    add,
    bit,
    column,
    lane,
    log2,
    reg,
    row_of_x,
    scatter,
    swaps,
)
from hadagen.plan.steps.base import (
    BARRIERS,
    FP32,
    PACKED,
    SPLIT,
    WARP_BYTES,
    WARP_VECTOR_BYTES,
    Coordinates,
    Cost,
    Draft,
    Region,
    Roundings,
    Step,
    Tile,
)
from hadagen.plan.steps.matrix import OPERAND_SIDE, VECTOR, of_vector
from hadagen.plan.steps.memory import Load
from hadagen.problem.operands import LIFT, MATRIX, PIECES, SIGNS
from hadagen.problem.problem import DType, Numerics

if TYPE_CHECKING:
    from hadagen.plan.steps.values import TileValues

# The numbers of columns that hadagen has a product for, by wgmma.m64nNk16 (PTX ISA, "Asynchronous Warpgroup Level
# Matrix Instructions") or by mma.m16n8k16.
PRODUCT_COLUMNS = (64, 128, 256)
BOX_COLUMNS = 64  # of 16-bit values in the 128 bytes of a swizzled row
_BOX_ROW_BYTES = 128
_ALIGNED = 1024  # swizzled rows repeat after so many bytes, where boxes of wgmma begin
FEW_ROWS = 64  # of a real matrix, of which `fast` multiplies by both pieces
_MORE_REGISTERS = 12  # of a thread, besides `OVERHEAD_REGISTERS`, as compiled kernels have


@dataclass(frozen=True)
class LoadBoxes(Load):
    """Global memory → shared memory, for `BoxProduct`: boxes of 64 columns of X, whose rows are swizzled.

    A row of a box has 128 bytes. Its 16-byte vector v lies where vector v XOR (row mod 8) would lie otherwise, so that
    neither rows nor columns meet in a bank. Each thread flips the signs of the vectors that it has copied.
    """

    name = "LoadBoxes"
    template = "product.cu.j2"

    def regions(self, plan: Draft) -> Iterator[Region]:
        assert isinstance(plan.tile, BoxProduct)
        yield Region("barriers", plan.tile.boxes_from)
        yield Region("stages", self.stages * plan.stage_bytes)

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        yield from super().faults(plan, at)
        if self.path != "cp_async":
            yield "only asynchronous copies of vectors swizzle rows (load must be cp_async)"
        if self.stages < 2 and isinstance(plan.tile, Product) and (plan.tile.in_turns or plan.tile.ahead):
            yield "a box is loaded while another one is multiplied (stages must be 2 or more)"

    def cost(self, plan: Draft, carrier: str) -> Cost:
        vectors = plan.tile.vectors(plan) * plan.width
        return Cost(3 * vectors + 30, shared_bytes=vectors * WARP_VECTOR_BYTES, waits={"shared": 1, "block sync": 1})


@dataclass(frozen=True)
class BoxProduct(Step, Tile):
    """A times what `LoadBoxes` left in shared memory. The sums stay in fp32. The base class of `Product` and
    `WarpProduct`.

    The entries of a real matrix come in two pieces of 16 bits, both of which are multiplied; in `fast`, the first piece
    of more than 64 rows alone. The matrix takes in the H of the upper `fold` bits of a column: A ⊗ H, times a matrix of
    2^fold times as many, shorter rows. A warp has 16 rows of it; the number of a row is in three lane bits, a register
    bit and the warp, whose number counts on through the blocks of a cluster. The lowest bit of a column is at `pair`,
    the next two are in lanes, and the others in registers.
    """

    fold: int
    rows: int = 1  # of x, whose columns lie side by side

    together: ClassVar[int]  # warps that carry out a product together
    boxes_from: ClassVar[int] = BARRIERS.size  # bytes of shared memory before the boxes
    template = "product.cu.j2"
    operands = MATRIX, *SIGNS
    leaves = FP32
    holds_all = True
    is_product = True
    flips = (True, False)
    warps_part = loads_all = True

    def order(self, plan: Draft) -> int:
        """Rows of the matrix that it multiplies by."""
        return plan.problem.order << self.fold

    def length(self, plan: Draft) -> int:
        """Columns of a row of x."""
        return plan.problem.length >> self.fold

    def columns(self, plan: Draft) -> int:
        """Columns of the product."""
        return self.rows * self.length(plan)

    def all_warps(self, plan: Draft) -> int:
        """Warps of all blocks of a cluster, which have the rows of the matrix in turn."""
        return plan.warps << plan.cta_bits

    def operands_in_slab(self, plan: Draft) -> int:
        """Operands of 16 columns of the matrix."""
        return -(-self.order(plan) // OPERAND_SIDE)

    def pieces(self, plan: Draft) -> int:
        """Tables of numbers whose sum it multiplies by."""
        # By few rows, warps multiply twice in the time in which they would otherwise wait for memory.
        rounds = plan.problem.io.numerics is Numerics.FAST and plan.problem.order > FEW_ROWS
        return PIECES if plan.problem.transform.real and not rounds else 1

    def planes(self, plan: Draft) -> int:
        """The number of sets of boxes in a stage whose sum is X."""
        return 2 if any(step.computes and step.leaves == SPLIT for step in plan.steps) else 1

    def operand_type(self, plan: Draft) -> DType:
        """The type of the numbers that are multiplied: bfloat16, which has the range of fp32, if X is a sum."""
        return DType.BFLOAT16 if self.planes(plan) > 1 else plan.problem.io.input

    def axes(self, before: Placement) -> tuple[Axis, ...]:
        columns = sorted((place for place in before.axes if place.kind == "column"), key=lambda place: place.index)
        return tuple(before.axes[place] for place in columns[len(columns) - self.fold :] if self.fold)

    def renamed(self, plan: Draft) -> dict[Place, Place]:
        """Place of a bit of a column, or of a row of x, as loaded → place in a thread or lane."""
        loaded = [column(number) for number in range(log2(self.length(plan)))]
        loaded += [row_of_x(number) for number in range(log2(self.rows))]
        places = (PAIR, lane(0), lane(1), *(reg(j) for j in range(len(loaded) - 3)))
        return dict(zip(loaded, places, strict=True))

    def placed(self, placement: Placement, plan: Draft) -> Placement:
        places = self.renamed(plan)
        return Placement({places.get(place, place): axis for place, axis in placement.axes.items()})

    @property
    def multiplies(self) -> str:
        return "factor 1"

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        if not isinstance(plan.load, LoadBoxes):
            yield "it multiplies what lies in boxes"
        if plan.carriers[at] != PACKED and (plan.carriers[at] != SPLIT or self.planes(plan) == 1):
            yield f"it takes packed values, or bfloat16 in two parts, but finds {plan.carriers[at] or 'none'}"
        if self.columns(plan) not in PRODUCT_COLUMNS:
            numbers = ", ".join(map(str, PRODUCT_COLUMNS))
            yield f"it has {self.columns(plan)} columns instead of {numbers} (rows or fold must be another)"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.terms = 0

    def interpret(self, values: TileValues, plan: Draft) -> None:
        values.multiply_rows(plan.problem, plan.loaded)
        count = log2(self.length(plan))
        values.transform(*(column(count + number) for number in range(self.fold)))
        values.rename(self.renamed(plan))

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return self.name, self.fold

    def sentence(self, bits: str) -> str:
        return "matrix of the transform" + (f", which takes in bits {bits}" if bits else "")

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        real, dtype = plan.problem.transform.real, plan.problem.io.input
        # A power of two of the scale goes to the matrix, so that sums stay in the range of fp32.
        of = self.operand_type(plan)
        power = {"factor": 1, "power": (plan.problem.n - 1).bit_length()} if of is DType.BFLOAT16 else {}
        lift = {"lift": LIFT[dtype]} if real else {}
        return {
            "fold": self.fold,
            "order": self.order(plan),
            "length": self.length(plan),
            "steps": self.operands_in_slab(plan),
            "real": real,
            "pieces": self.pieces(plan),
            "planes": self.planes(plan),
            "type": "T" if of is dtype else of.value,
            "padded": self._padded(plan),
            "box_bytes": _BOX_ROW_BYTES * self._padded(plan),
            "plane_bytes": self.plane_bytes(plan),
            "boxes": self.columns(plan) // BOX_COLUMNS,
            "rows_at_once": 32 * plan.warps // 8,  # of a box, in each of which eight threads copy
            "slabs_given": -(-plan.problem.order // OPERAND_SIDE),
            "spare_warps": self.all_warps(plan) > self.operands_in_slab(plan),
            "stages": plan.load.stages,
            "in_turns": False,
            "ahead": False,
            "alone": self.together == 1,
            "streamed": False,
            **power,
            **lift,
        }

    def _padded(self, plan: Draft) -> int:
        """Rows of a box: those of X, and rows of zeros to whole operands."""
        return OPERAND_SIDE * self.operands_in_slab(plan)

    def _fills_warps(self, plan: Draft) -> bool:
        """Whether the matrix has all rows that the warps multiply by."""
        return self.order(plan) == OPERAND_SIDE * self.all_warps(plan)

    # ---- as the tile -------------------------------------------------------------------------------------------------
    def held_from(self, plan: Draft) -> int:
        return 1 + plan.steps.index(self)

    def placement(self, plan: Draft) -> Placement:
        columns = {column(number): bit(number) for number in range(plan.problem.bits)}
        rows = {row_of_x(number): Axis(2, plan.problem.n << number) for number in range(log2(self.rows))}
        return Placement({**columns, ROW: Axis(plan.problem.order, plan.problem.length), **rows})

    def warps(self, plan: Draft) -> int:
        return self.together * -(-self.order(plan) // (OPERAND_SIDE * self.together << plan.cta_bits))

    def vectors(self, plan: Draft) -> int:
        """16-byte vectors of a tile that a thread copies."""
        return -(-plan.tile_elements // (VECTOR * 32 * plan.warps))

    def eights(self, plan: Draft) -> int:
        return self.columns(plan) // 16

    def plane_bytes(self, plan: Draft) -> int:
        return self.columns(plan) // BOX_COLUMNS * _BOX_ROW_BYTES * self._padded(plan)

    def staged_bytes(self, plan: Draft) -> int:
        return max(plan.width, self.planes(plan)) * self.plane_bytes(plan)

    def registers(self, plan: Draft, *, wide: bool) -> int:
        of = plan.problem.transform
        signs = self.vectors(plan) if of.real and of.signed else 0
        return self.sums(plan) + 4 * self.held_operands(plan) + signs + _MORE_REGISTERS

    def held_operands(self, plan: Draft) -> int:
        """Operands of the matrix that a thread has in registers."""
        return self.pieces(plan) * self.operands_in_slab(plan)

    def sums(self, plan: Draft) -> int:
        """Registers of a thread for sums."""
        return self.columns(plan) // 2

    def coordinates(self, plan: Draft, before: Placement) -> Coordinates:
        length = self.length(plan)
        rows = {
            kind: {digit: Axis(axis.radix, axis.stride * length) for digit, axis in digits.items()}
            for kind, digits in self._rows(plan).items()
        }
        registers = {Axis(digit.radix, 2 * digit.stride): axis for digit, axis in before.digits_of("reg").items()}
        return {
            "value": {bit(0): before.axes[PAIR], **registers} | rows["value"],
            "lane": before.digits_of("lane") | rows["lane"],
            "warp": rows["warp"],
        }

    def rows_apart(self, plan: Draft) -> Coordinates:
        if self._fills_warps(plan):
            return {}
        return {
            kind: {
                digit: Axis(axis.radix, axis.stride >> self.fold)
                for digit, axis in digits.items()
                if axis.stride >> self.fold
            }
            for kind, digits in self._rows(plan).items()
        }

    def _rows(self, plan: Draft) -> Coordinates:
        """The digits of `coordinates` that tell rows of the product apart, each with the number of a row."""
        return {
            "value": {Axis(2, self.columns(plan) // 4): bit(3)},
            "lane": {bit(2 + number): bit(number) for number in range(3)},
            "warp": {Axis(self.all_warps(plan), 1): Axis(self.all_warps(plan), OPERAND_SIDE)},
        }

    def of_thread(self, plan: Draft) -> dict[str, str]:
        if not plan.cta_bits:
            return {"warp": "thread_index() / 32"}
        return {"rank": "cluster_rank()", "warp": f"{plan.warps} * rank + thread_index() / 32"}

    def names(self, plan: Draft) -> dict[str, Any]:
        coordinates = self.coordinates(plan, plan.placements[-1])
        rows = self._rows(plan)
        return {
            "stages_from": self.template,
            "m": self.view(plan, 0),
            "held_shares": 1,
            "shares_peaks": plan.footprint.size("peaks") > 0 and not plan.crosses_blocks,
            "vectors": self.eights(plan),
            "stored_at": add(*(scatter(kind, coordinates[kind]) for kind in ("lane", "warp"))),
            "store_vector": of_vector(coordinates) or "0",
            # The row of vector i; "" if the matrix has all rows.
            "stored_row": ""
            if self._fills_warps(plan)
            else add(scatter("lane", rows["lane"]), scatter("warp", rows["warp"]), of_vector(rows)),
        }


@dataclass(frozen=True)
class Product(BoxProduct):
    """The product by wgmma, which four warps carry out together."""

    name = "Product"
    labels = "fold rows in_turns"

    in_turns: bool = False  # whether four warps begin when the four before them have begun

    together = 4
    boxes_from = _ALIGNED
    ahead: ClassVar[bool] = False  # whether a warp begins the product of the next tile before it transforms this one

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        return frozenset({"wgmma"})

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return Product.name, self.fold

    def cost(self, plan: Draft, carrier: str) -> Cost:
        steps = self.pieces(plan) * self.planes(plan) * self.operands_in_slab(plan)
        # In mma.m16n8k16, of which the tensor cores carry out one and a half in the time that the model counts for one.
        mma = steps * self.columns(plan) / 8 / 1.5
        waits = {"shared": 2, "block sync": 1} | ({} if self.ahead else {"mma": steps})
        return Cost(4 * steps + 40, mma=round(mma), waits=waits)

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        own = {"in_turns": self.in_turns, "ahead": self.ahead, "takers": plan.warps // self.together}
        return super().view(plan, at) | own

    def sums(self, plan: Draft) -> int:
        return super().sums(plan) << self.ahead


@dataclass(frozen=True)
class ProductAhead(Product):
    """The product of this tile, which is under way since the tile before, and the start of the next tile's. So tensor
    cores multiply while the same warps transform."""

    name = "ProductAhead"
    ahead = True


@dataclass(frozen=True)
class StreamedProduct(Product):
    """The same, with the matrix in shared memory. So registers have room for the sums of more rows."""

    name = "StreamedProduct"

    def regions(self, plan: Draft) -> Iterator[Region]:
        yield Region("matrix", WARP_VECTOR_BYTES * plan.warps * self.pieces(plan) * self.operands_in_slab(plan))

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        return super().view(plan, at) | {"streamed": True}

    def held_operands(self, plan: Draft) -> int:
        return 0


@dataclass(frozen=True)
class WarpProduct(BoxProduct):
    """The product by mma, which each warp carries out alone."""

    name = "WarpProduct"
    labels = "fold rows"

    together = 1

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        in_bfloat16 = dtype is DType.BFLOAT16 or carrier == SPLIT
        return frozenset({"mma_bf16", "bf16x2_fma"} if in_bfloat16 else {"mma_f16"})

    def cost(self, plan: Draft, carrier: str) -> Cost:
        steps = self.operands_in_slab(plan)
        loads = steps * self.planes(plan) * self.columns(plan) // 16  # of the right operands of two mma
        mma = 2 * self.pieces(plan) * loads
        # Each latency counts twice, because a block has few warps to hide it: as kernels on an H100 took.
        waits = {"mma": 2 * steps, "shared": steps, "block sync": 1}
        return Cost(mma + loads + 40, mma=mma, shared_bytes=WARP_VECTOR_BYTES * loads, waits=waits)


@dataclass(frozen=True)
class CrossButterflies(Step):
    """Swaps the bits at `reg0` and `lane0`, and those at `reg1` and `lane1`, transforms those at `pair`, in lanes and
    the first `registers` of the others, and multiplies by the scale if it `scales`. Half of the values cross for each
    lane bit.

    A lane that has the upper value of a pair subtracts the wrong way round. The sign that its difference then lacks
    goes through what follows, which is linear, to the last product.
    """

    name = "CrossButterflies"
    labels = "registers scales"

    registers: int  # 0, 1 or 2
    scales: bool

    template = "product.cu.j2"
    takes = FP32
    moves = swaps([(lane(0), reg(0)), (lane(1), reg(1))])
    holds_all = True

    @property
    def places(self) -> tuple[Place, ...]:
        return (PAIR, *(reg(number) for number in range(self.registers)), lane(0), lane(1))

    @property
    def multiplies(self) -> str:
        return "scale" if self.scales else ""

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        so_far.terms <<= len(self.places)

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        return self.name, *map(str, self.axes(plan.before(at))), self.scales

    def cost(self, plan: Draft, carrier: str) -> Cost:
        words = plan.words(carrier)
        return Cost(6 * words, shared_bytes=WARP_BYTES * words, waits={"shuffle": 2, "arithmetic": 6})

    def sentence(self, bits: str) -> str:
        return f"swap lane0↔reg0 and lane1↔reg1, with butterflies: bits {bits}{', times the scale' * self.scales}"
