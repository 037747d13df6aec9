"""`Step`: the base class of all steps, with its defaults; `Cost`; and `roundings`, the error of a list of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hadagen.launch import Param
from hadagen.layout import Axis, Place, Placement, cta
from hadagen.problem import DType

if TYPE_CHECKING:
    from hadagen.steps.draft import Draft
    from hadagen.steps.values import Values

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

# Bytes of one register, and of one 16-byte vector, of all threads of a warp.
WARP_BYTES, WARP_VECTOR_BYTES = 128, 512


class Cost(NamedTuple):
    """The cost of a step for one warp and one tile."""

    instructions: float = 0
    mma: int = 0
    shared_bytes: float = 0
    # Latency → how often the next step waits for it, once for all chunks of the warp. Latencies are those of
    # `costmodel.LATENCIES`, and the sync of a block or cluster.
    waits: Mapping[str, int] = {}
    crossed_bytes: int = 0  # bytes from other blocks that the block waits for


class Step:
    """What a step does to the bits of an index, to the form of values and to their error, and what it costs.

    Each kind is a frozen dataclass. The defaults are those of a step that does arithmetic on every value in its place,
    in any form, and transforms no bit. Its block in a kernel is the macro of its name in `template`.

    Stored recipes depend on the name of a step and the labels of its fields, through the arithmetic and the digest of a
    plan. So neither ever changes, whatever its class and fields are called.
    """

    name: ClassVar[str]
    labels: ClassVar[str] = ""  # of its fields, but for those with repr=False, in their order
    template = "steps.cu.j2"
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
        """Whether it transforms the bits at cta too. Each block must then have loaded the shares of all blocks."""
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

    @property
    def params(self) -> tuple[Param, ...]:
        """What the kernel must take for this step, besides what all kernels take."""
        return ()

    def features(self, dtype: DType, carrier: str) -> frozenset[str]:
        """The features that the arch must have (`hadagen.arch.Feature`). dtype: of the input; carrier: the form of the
        values before it."""
        return frozenset()

    loads = False  # loads the tile, or makes a request once a tile
    prefetches = False  # brings the input of later tiles to L2, so that only the first come from memory
    holds_all = False  # leaves all chunks at once; the compiler may make other steps leave fp32 chunk by chunk

    @property
    def changes_values(self) -> bool:
        """Whether it does arithmetic. Steps that only move or convert values do not."""
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
        if not all(step.loads for step in plan.steps[:at]) or (plan.load.staged and not plan.load.multicast):
            yield "only what each block has loaded, straight to registers or by multicast, is summed over blocks"
        if plan.crosses_blocks:
            yield "bits that are summed over blocks are not exchanged between them"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        """Add its roundings to `so_far`. carrier: the form that it leaves."""

    def interpret(self, values: Values, plan: Draft) -> None:
        """Carry it out in float64."""
        across = [cta(j) for j in range(plan.cta_bits) if self.over_blocks]
        values.transform(*across, *self.places)
        values.multiply(self.share(values.left, plan))
        values.move(self.moves)

    def share(self, left: float, plan: Draft) -> float:
        """Its factor. left: the product that this and the later steps have to multiply by."""
        return left if self.multiplies else 1.0

    def arithmetic(self, plan: Draft, at: int) -> tuple[Any, ...]:
        """All that the last bits of its results depend on, as step `at` of the plan; () if it is exact. Plans whose
        steps say the same give the same bits."""
        if not (self.changes_values or self.leaves):
            return ()
        return self.name, *map(str, self.axes(plan.before(at))), *plan.carriers[at : at + 2]

    def cost(self, plan: Draft, carrier: str) -> Cost:
        """Its cost. carrier: the form of the values before it."""
        return Cost(plan.words(carrier), waits={"arithmetic": 1})

    def sentence(self, bits: str) -> str:
        """What it does, in words. bits: the numbers of the bits that it transforms, as text."""
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


# Number of terms → the error of rounding an fp32 sum of that many rounded values, in roundings of normal values. Half
# of the sums of two lie in the middle between two values. Fitted to the errors of 1285 measured kernels.
_ROUNDED_SUM = {2: 1.17, 4: 1.05}
_OF_FP16 = 1 / 64  # of the squared error of a rounding to bfloat16; fp16 has three more bits


@dataclass
class Roundings:
    """How many roundings of normal values have the same error as all those of the steps so far."""

    count: float = 0.0
    # How many values, rounded to `form`, each fp32 sum has; 0: many, or values times a scale.
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
