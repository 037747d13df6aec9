"""`Step`: the base class of all steps, with its defaults. `Draft`: an unchecked plan, and what follows from its steps.
`Tile`: how the values of a tile lie. `Footprint`: the shared memory and registers of a draft. `roundings`: the error of
a list of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

from hadagen.plan.layout import PAIR, THREAD_ELEMENTS, VECTOR_BYTES, Axis, Place, Placement, add, cta, reg, scatter
from hadagen.problem.launch import Param
from hadagen.problem.operand import Operand
from hadagen.problem.operands import params_for
from hadagen.problem.problem import DType, Problem
from hadagen.problem.prologues import Prologue, prologue_of
from hadagen.problem.scale import ScaleForm

if TYPE_CHECKING:
    from hadagen.plan.steps.values import TileValues

PACKED = "packed"  # two 16-bit elements to a register
FP32 = "fp32"
# Two float16 to a register. They have three bits more than the bfloat16 of the problem, but a short range. So they hold
# values times a power of two, which is the same for all values that are summed.
FP16 = "fp16"
# Each value as a sum of two bfloat16, high and low, pairs of either in registers of their own.
SPLIT = "split"
# For `Step.takes`: packed, fp16 or split; the form that the load leaves.
IN_16_BITS, AS_LOADED = "in 16 bits", "as loaded"

# Kind of coordinate, such as "lane" → digit of it → the axis that lives there, as `Placement.digits_of` says.
Coordinates = Mapping[str, Mapping[Axis, Axis]]

# Bytes that all threads of a warp have in one register each, and in one 16-byte vector each.
WARP_BYTES, WARP_VECTOR_BYTES = 128, 512
# Registers of a thread besides its values: addresses, the A operands of the mma, accumulators under way.
OVERHEAD_REGISTERS = 24


class Cost(NamedTuple):
    """The cost of a step for one warp and one tile."""

    instructions: float = 0
    mma: int = 0
    shared_bytes: float = 0
    # Latency → how often the next step waits for it, once for all chunks of the warp. Latencies are those of
    # `costmodel.LATENCIES`, and the sync of a block or cluster.
    waits: Mapping[str, int] = {}
    crossed_bytes: int = 0  # bytes from other blocks that the block waits for


class Region(NamedTuple):
    """Shared memory that a step needs.

    name: regions of one name share their memory. Regions of several names lie in the order of `REGIONS`, and others
        behind those, in the order of the steps.
    over: the name of a region whose memory this one and those after it take, because it was read by then.
    """

    name: str
    size: int
    over: str = ""


REGIONS = ("barriers", "stages", "slots", "crossed", "levels", "peaks")
BARRIERS = Region("barriers", 128)  # room for all mbarriers; keeps what follows aligned


class Step:
    """A step of a plan: its effect on the bits of an index, on the form of values and on their error, and its cost.

    Each kind is a frozen dataclass. The defaults are those of a step that does arithmetic on every value in its place,
    in any form, and transforms no bit. Its block in a kernel is the macro of its name in `template`.

    Stored recipes depend on the name of a step and the labels of its fields, through the arithmetic and the digest of a
    plan. So neither ever changes, whatever its class and fields are called.
    """

    name: ClassVar[str]
    labels: ClassVar[str] = ""  # of its fields, but for those with repr=False, in their order
    template = "steps.cu.j2"
    header = ""  # the name of a header that its block needs
    says = ""  # format of its `sentence`, with its fields and {bits}

    @property
    def places(self) -> tuple[Place, ...]:
        """The places whose axes it transforms."""
        return ()

    @property
    def moves(self) -> Mapping[Place, Place]:
        """Place → place, for the axes that it moves after that."""
        return {}

    def placed(self, placement: Placement, plan: Draft) -> Placement:
        """The placement after it, from the one before."""
        return placement.moved(self.moves) if self.moves else placement

    @property
    def over_blocks(self) -> bool:
        """Whether the step transforms bits at cta too. Each block must then have loaded the shares of all blocks."""
        return False

    @property
    def takes(self) -> str | None:
        """The form of the values that it takes; None for any form."""
        return None

    @property
    def leaves(self) -> str | None:
        """The form of the values that it leaves; None if it keeps their form."""
        return None

    @property
    def multiplies(self) -> str:
        """The part of the scale that it multiplies by; "" for none."""
        return ""

    operands: tuple[Operand, ...] = ()  # operands that the kernel takes for this step, if its problem has them

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        """The features that the arch must have (`hadagen.plan.arch.Feature`). dtype: the type of the input; carrier:
        the form of the values before it."""
        return frozenset()

    def regions(self, plan: Draft) -> Iterator[Region]:
        """The shared memory that it needs."""
        return iter(())

    loads = False  # loads the tile, or makes a request once a tile
    reads_x = False  # loads the tile
    is_product = False  # multiplies by the matrix of the transform
    is_right_product = False  # multiplies by the second one of two, in place of H
    is_prologue = False  # computes a prologue, of values as loaded
    exchanges = False  # moves values between warps
    normalizes = False  # finds the level of the values of a warp
    folds = False  # multiplies by what is left of the scale only as it quantizes
    prefetches = False  # brings the input of later tiles to L2, so that only the first come from memory
    holds_all = False  # leaves all chunks at once; the compiler may make other steps leave fp32 chunk by chunk

    @property
    def computes(self) -> str:
        """The name of the prologue that it computes; "" for none."""
        return self.name if self.is_prologue else ""

    @property
    def changes_values(self) -> bool:
        """Whether the step does arithmetic. Steps that only move or convert values do not."""
        return bool(self.places or self.multiplies)

    def axes(self, before: Placement) -> tuple[Axis, ...]:
        """The axes that it transforms. before: the placement before it."""
        across = before.digits_of("cta").values() if self.over_blocks else ()
        return (*(before.axes[place] for place in self.places), *across)

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        """Reasons why it cannot be step `at` of the plan, beyond those that follow from the properties above."""
        return iter(())

    def faults_over_blocks(self, plan: Draft, at: int) -> Iterator[str]:
        """Reasons why it cannot sum over blocks as step `at` of the plan."""
        if not plan.cta_bits:
            yield "there is one block, and no other to sum over"
        if not all(step.loads for step in plan.steps[:at]):
            yield "only what each block has loaded is summed over blocks"
        if plan.load.staged and not plan.load.multicast:
            yield "whole rows take another way (load must be plain or multicast)"
        if plan.crosses_blocks:
            yield "bits that are summed over blocks are not exchanged between them"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        """Add its roundings to `so_far`. carrier: the form that it leaves."""

    def interpret(self, values: TileValues, plan: Draft) -> None:
        """Carry it out in float64."""
        across = [cta(j) for j in range(plan.cta_bits) if self.over_blocks]
        values.transform(*across, *self.places)
        values.multiply(self.share(values.left, plan))
        values.move(self.moves)

    def share(self, left: float, plan: Draft) -> float:
        """Its factor. left: the product that this and the later steps have to multiply by."""
        return left if self.multiplies else 1.0

    def more_registers(self, plan: Draft) -> int:
        """Registers of a thread that it takes beside those of the tile."""
        return 0

    def crosses(self, plan: Draft) -> bool:
        """Whether it sends values to the other blocks of a cluster."""
        return False

    def crossed_bytes(self, plan: Draft) -> int:
        """Bytes that a block waits for at a time, where values cross."""
        return 0

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        """Everything that decides the last bits of this step's results when it is step `at` of the plan; () if the step
        is exact. Plans whose steps return the same give the same bits."""
        if not (self.changes_values or self.leaves):
            return ()
        return self.name, *map(str, self.axes(plan.before(at))), *plan.carriers[at : at + 2]

    def cost(self, plan: Draft, carrier: str) -> Cost:
        """Its cost. carrier: the form of the values before it."""
        return Cost(plan.words(carrier), waits={"arithmetic": 1})

    def sentence(self, bits: str) -> str:
        """The step in words. bits: the numbers of the bits that it transforms, as text."""
        return self.says.format(bits=bits, **vars(self))

    def __str__(self) -> str:
        """As digests of plans have it."""
        values = (getattr(self, each.name) for each in fields(self) if each.repr)  # type: ignore[arg-type]
        labelled = (f"{label}={_digested(value)}" for label, value in zip(self.labels.split(), values, strict=True))
        return f"{self.name}({', '.join(labelled)})"

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        """Names and values for its block in the template, beside its fields, as step `at` of the plan."""
        return {}


def _digested(value: Any) -> str:
    if isinstance(value, Place):
        return f"Place(kind={value.kind!r}, index={value.index})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_digested, value))}{',' * (len(value) == 1)})"
    return repr(value)


def mixed_chunk_bits(steps: Iterable[Step]) -> int:
    """The number of low bits of the chunk number that the steps move or transform; they leave all higher ones alone."""
    touched = [place for step in steps for place in (*step.places, *step.moves)]
    return max((place.index - 1 for place in touched if place.kind == "reg" and place.index > 0), default=0)


class Loading(Protocol):
    """The step that loads a tile, as other steps see it; see `hadagen.plan.steps.memory.Load`."""

    path: str
    stages: int
    carrier: str

    @property
    def staged(self) -> bool: ...

    @property
    def in_bulk(self) -> bool: ...

    @property
    def multicast(self) -> bool: ...


class Exchanging(Protocol):
    """An exchange, as other steps see it; see `hadagen.plan.steps.exchanges.Exchange`."""

    carrier: str
    rounds: int

    @property
    def slot_bytes(self) -> int: ...

    @property
    def crosses_blocks(self) -> bool: ...


class Tile:
    """How the values of a tile lie, from the load to the store. A plan has one.

    The base class is that of whole rows in registers, where each thread has the vectors that it loads. A step that
    derives from it says how else values lie.
    """

    flips: ClassVar[tuple[bool, ...]] = (True, False)  # the `before` of the steps `Signs` of a signed transform
    # The file whose macros go before those of the same name that other steps have in theirs.
    template = "steps.cu.j2"
    warps_part: ClassVar[bool] = False  # whether a warp may be at a later tile than the other warps of its block
    loads_all: ClassVar[bool] = False  # whether each block of a cluster loads the whole tile to shared memory

    def held_from(self, plan: Draft) -> int:
        """The number of steps after which threads hold values in registers."""
        return 1

    def placement(self, plan: Draft) -> Placement:
        """The placement as loaded."""
        vector_bits = plan.vector_elements.bit_length() - 1
        return Placement.standard(vector_bits, plan.chunk_bits, plan.warp_bits, plan.cta_bits, plan.problem.odd_factor)

    def warps(self, plan: Draft) -> int:
        """Warps of a block for each of 2^warp_bits."""
        return plan.problem.odd_factor

    def vectors(self, plan: Draft) -> int:
        """16-byte vectors of a tile in one thread."""
        return (THREAD_ELEMENTS << plan.chunk_bits) // plan.vector_elements

    def eights(self, plan: Draft) -> int:
        """The number of groups of eight values that a thread has between steps; 0 if it has none."""
        return 1 << plan.chunk_bits

    def staged_bytes(self, plan: Draft) -> int:
        """Bytes of a staged tile, as far as a block loads it."""
        return plan.width * plan.shares_loaded * plan.block_elements * plan.problem.io.input.bytes

    def registers(self, plan: Draft, *, wide: bool) -> int:
        """The least registers of a thread for its values, fp32 if `wide`."""
        dtype, load = plan.problem.io.input, plan.load
        loaded = 2 * dtype.bytes * plan.width  # registers for a chunk
        shares = 1 if dtype is DType.FLOAT32 else plan.shares_loaded  # fp32 is summed vector by vector
        fetched = loaded if load.stages > 1 and not load.staged else 0
        return max(8 if wide else 4, loaded * shares) + fetched << plan.chunk_bits

    def coordinates(self, plan: Draft, before: Placement) -> Coordinates:
        """The digits of coordinates of the fp32 values of a thread, as `Placement.digits_of` says. The lowest digit of
        `value` is `pair`. before: the placement of the values."""
        values = {Axis(digit.radix, 2 * digit.stride): axis for digit, axis in before.digits_of("reg").items()}
        threads = {kind: before.digits_of(kind) for kind in ("lane", "warp", "cta")}
        return {"value": {Axis(2, 1): before.axes[PAIR], **values}, **threads}

    def rows_apart(self, plan: Draft) -> Coordinates:
        """The digits of `coordinates` that tell rows of X apart, if some rows lie beyond the end of X."""
        return {}

    def _moves(self, plan: Draft) -> bool:
        """Whether a thread stores elsewhere than it loads."""
        return plan.placements[-1] != plan.loaded or plan.cta_bits > 0

    def of_thread(self, plan: Draft) -> dict[str, str]:
        """The values that a thread computes once, besides its lane: name → C expression."""
        loaded, stored = plan.loaded, plan.placements[-1]
        load_lane, lanes = f"lane * {plan.vector_elements}", stored.digits_of("lane")
        store_lane = load_lane if lanes == loaded.digits_of("lane") else scatter("lane", lanes)
        store_at = add(store_lane, scatter("warp", stored.digits_of("warp")), scatter("rank", stored.digits_of("cta")))
        return {
            **({"warp": "thread_index() / 32"} if plan.warps > 1 else {}),
            **({"rank": "cluster_rank()"} if plan.cta_bits else {}),
            "load_at": add(load_lane, scatter("warp", loaded.digits_of("warp"))),
            **({"store_at": store_at} if self._moves(plan) else {}),
        }

    def names(self, plan: Draft) -> dict[str, Any]:
        """Names and values for the template of a kernel."""
        stored = plan.placements[-1]
        return {
            "stages_from": "loads.cu.j2",  # the template that says how tiles are staged
            "in_vectors": True,  # a thread loads vectors of whole rows
            "vectors": plan.vectors,
            "stored_at": "store_at" if self._moves(plan) else "load_at",
            # Offset of vector i of a thread from its first.
            "store_vector": scatter("i", stored.digits_of("reg", first=len(plan.vector_places) - 1)) or "0",
        }


_ROWS = Tile()


@dataclass(frozen=True)
class Draft:
    """The steps of a problem, for a tile of 2^chunk_bits chunks in each warp, `odd_factor` · 2^warp_bits warps in each
    block, and 2^cta_bits blocks.

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
    def tile(self) -> Tile:
        """How the values of a tile lie."""
        return next((step for step in self.steps if isinstance(step, Tile)), _ROWS)

    @cached_property
    def loaded(self) -> Placement:
        """The placement of a tile before the first step."""
        return self.tile.placement(self)

    @cached_property
    def warps(self) -> int:
        """Warps of a block."""
        return self.tile.warps(self) << self.warp_bits

    @cached_property
    def prologue(self) -> Prologue | None:
        """The prologue of the problem."""
        return prologue_of(self.problem)

    @property
    def width(self) -> int:
        """Elements of x for each element of a tile."""
        return self.prologue.width if self.prologue else 1

    @property
    def vector_elements(self) -> int:
        """Elements of a 16-byte vector."""
        return VECTOR_BYTES // self.problem.io.input.bytes

    @property
    def vector_places(self) -> tuple[Place, ...]:
        """The places of the bits that number the elements of a 16-byte vector that a thread loads and stores."""
        places = PAIR, *(reg(j) for j in range(self.vector_elements.bit_length() - 2))
        return tuple(place for place in places if place in self.loaded.axes)

    @property
    def vectors(self) -> int:
        """16-byte vectors of a tile in one thread."""
        return self.tile.vectors(self)

    @property
    def eights(self) -> int:
        """The number of groups of eight values that a thread has between steps."""
        return self.tile.eights(self)

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
    def load(self) -> Loading:
        """The step that loads a tile."""
        return cast(Loading, next(step for step in self.steps if step.reads_x))

    @cached_property
    def exchanges(self) -> tuple[Exchanging, ...]:
        """The steps that move values between warps."""
        return tuple(cast(Exchanging, step) for step in self.steps if step.exchanges)

    @property
    def crosses_blocks(self) -> bool:
        """Whether values move between blocks."""
        return any(step.crosses(self) for step in self.steps)

    @property
    def params(self) -> tuple[Param, ...]:
        """The params of the kernel."""
        return params_for(self.problem, [operand for step in self.steps for operand in step.operands])

    @property
    def folds_scale(self) -> bool:
        """Whether the step that quantizes also multiplies by the scale, or by what is left of it."""
        return self.steps[-1].folds

    @property
    def normalizes(self) -> bool:
        """Whether values are divided by a level of their warp."""
        return any(step.normalizes for step in self.steps)

    @cached_property
    def shares_loaded(self) -> int:
        """How many blocks' shares of a tile each block loads: those of all blocks of the cluster, or 1, its own."""
        return 1 << self.cta_bits if self.tile.loads_all or any(step.over_blocks for step in self.steps) else 1

    @property
    def grouped_from(self) -> int:
        """The position of the first step that runs group by group: the exchange. Only for the order `by_group`."""
        return next(at for at, step in enumerate(self.steps) if step.exchanges)

    @property
    def group_chunks(self) -> int:
        """Chunks of each group. Only for the order `by_group`."""
        return 1 << mixed_chunk_bits(self.steps[self.grouped_from :])

    @property
    def tile_elements(self) -> int:
        """Elements that one cluster transforms at a time."""
        return prod(self.loaded.radices)

    @property
    def elements_in_memory(self) -> int:
        """Elements of a tile that lie in memory: all, or those of a row that does not fill its tile."""
        return self.problem.unit if self.problem.is_padded else self.tile_elements

    @property
    def rows_per_tile(self) -> int:
        return self.elements_in_memory // self.problem.n

    @property
    def is_ragged(self) -> bool:
        """Whether the last tile may reach beyond the end of the array. It may if a tile holds several `Problem.unit`s,
        because an array may hold any number of them."""
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
    def stage_bytes(self) -> int:
        """Bytes of a staged tile, as far as a block loads it; 0 if tiles are not staged."""
        return self.tile.staged_bytes(self) if self.load.staged else 0

    @cached_property
    def footprint(self) -> Footprint:
        return Footprint(self)


class Footprint:
    """The shared memory and registers of a plan, or of a draft that has only the steps that take any."""

    def __init__(self, plan: Draft) -> None:
        self.plan = plan

    def registers(self, *, wide: bool) -> int:
        """The least registers of a thread: its values in the widest form that all take at once, fp32 if `wide`."""
        more = sum(step.more_registers(self.plan) for step in self.plan.steps)
        return OVERHEAD_REGISTERS + self.plan.tile.registers(self.plan, wide=wide) + more

    @cached_property
    def shared_bytes(self) -> int:
        return max((offset + size for offset, size in self._regions.values()), default=0)

    def offset(self, name: str) -> int:
        """The offset of the region of this name; if no step asks for it, the offset at which it would begin."""
        return self._regions[name][0]

    def size(self, name: str) -> int:
        """Bytes of the region of this name."""
        return self._regions[name][1]

    @cached_property
    def _regions(self) -> dict[str, tuple[int, int]]:
        """Name → offset and size."""
        asked = [region for step in self.plan.steps for region in step.regions(self.plan)]
        placed: dict[str, tuple[int, int]] = {}
        end = reused = 0  # of all memory, and of that which regions take again
        for name in dict.fromkeys((*REGIONS, *(region.name for region in asked))):
            size = max((region.size for region in asked if region.name == name), default=0)
            over = next((region.over for region in asked if region.name == name and region.over), "")
            start = max(placed[over][0], reused) if over else end
            placed[name] = start, size
            reused = start + size if over else reused
            end = max(end, start + size)
        return placed


# Number of terms → the error of rounding an fp32 sum of that many rounded values, in roundings of normal values. Half
# of the sums of two lie in the middle between two values. Fitted to the errors of 1285 measured kernels.
_ROUNDED_SUM = {2: 1.17, 4: 1.05}
_OF_FP16 = 1 / 64  # of the squared error of a rounding to bfloat16; fp16 has three more bits


@dataclass
class Roundings:
    """How many roundings of normal values have the same error as all those of the steps so far."""

    count: float = 0.0
    # Terms per fp32 sum that are rounded to `form`; 0 if unknown.
    terms: int = 0
    form: str = ""

    def add(self, form: str, worth: float) -> None:
        """Add a rounding of every value to a 16-bit form."""
        self.count += worth * (_OF_FP16 if form == FP16 else 1.0)
        self.terms, self.form = 1, form

    def add_sums(self, form: str, terms: int) -> None:
        """Add a rounding of sums of `terms` values that were rounded before."""
        self.add(form, _ROUNDED_SUM.get(terms, 1.0))


def roundings(steps: Iterable[Step]) -> float:
    """How many roundings of normal values have the same error as all those of the steps together."""
    carrier, so_far = "", Roundings()
    for step in steps:
        carrier = step.leaves or carrier
        step.count_roundings(so_far, carrier)
    return so_far.count
