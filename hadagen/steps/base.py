"""`Step`: all that is said of one, and what holds where a step says nothing else. `mixed_chunk_bits`, `roundings`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hadagen.launch import Param
from hadagen.layout import Place, Placement, cta

if TYPE_CHECKING:
    from hadagen.steps.draft import Draft
    from hadagen.steps.values import Values

PACKED = "packed"  # two 16-bit elements to a register
FP32 = "fp32"
# Two float16 to a register, which have three bits more than the bfloat16 of a problem but a short range: so they hold
# values times a power of two, the same for all that are summed.
FP16 = "fp16"
# As what a step takes: packed or fp16; or the form that the load leaves.
IN_16_BITS, AS_LOADED = "in 16 bits", "as loaded"

# Of the registers of every thread of a warp, one, and a vector.
WARP_BYTES, WARP_VECTOR_BYTES = 128, 512


class Cost(NamedTuple):
    """What a step asks of one warp for one tile."""

    instructions: float = 0
    mma: int = 0
    shared_bytes: float = 0
    # How often what comes next has to wait, by the name of what it waits for (`costmodel.LATENCIES`, or the sync of a
    # block or cluster); once for all of the warp's chunks.
    waits: Mapping[str, int] = {}
    crossed_bytes: int = 0  # what the block waits for from others


class Step:
    """What a step does to the bits of an index, to the form of values and to their error, and what that takes.

    Each kind is a frozen dataclass. Where one says nothing else, it does arithmetic on every value where it is, in any
    form, and transforms no bit. Its block in a kernel is the macro of its name in `template`."""

    template = "steps.cu.j2"
    says = ""  # its `sentence`, for what it transforms and its fields to be put in

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the bits are that it transforms."""
        return ()

    @property
    def moves(self) -> Mapping[Place, Place]:
        """Where bits go, after that."""
        return {}

    @property
    def over_blocks(self) -> bool:
        """Whether it transforms the bits at cta too. Then each block must have loaded the shares of all."""
        return False

    @property
    def takes(self) -> str | None:
        """The form of the values that it takes; None: any."""
        return None

    @property
    def leaves(self) -> str | None:
        """The form of the values that it leaves; None: as it finds them."""
        return None

    @property
    def multiplies(self) -> str:
        """The part of the scale that it multiplies by; empty: none."""
        return ""

    @property
    def params(self) -> tuple[Param, ...]:
        """What the kernel takes for its sake, beside what all kernels take."""
        return ()

    @property
    def features(self) -> frozenset[str]:
        """What the arch must have."""
        return frozenset()

    loads = False  # brings the tile in, or only asks memory for something, once a tile
    prefetches = False  # finds the input of later tiles in L2, but for the first
    by_chunk = True  # may be done chunk by chunk, if it neither loads nor mixes them
    holds_all = False  # leaves all chunks at once, where others that leave fp32 may do so chunk by chunk

    @property
    def changes_values(self) -> bool:
        """Whether it does arithmetic, not only moves or converts."""
        return bool(self.places or self.multiplies)

    def bits(self, before: Placement) -> tuple[int, ...]:
        """The index bits that it transforms, given where they live before it."""
        across = before.bits_of("cta").values() if self.over_blocks else ()
        return (*map(before.bit_at, self.places), *across)

    def faults(self, plan: Draft, at: int) -> Iterator[str]:
        """Why it cannot be step `at` of the plan, beyond what is said above."""
        return iter(())

    def faults_over_blocks(self, plan: Draft, at: int) -> Iterator[str]:
        """Why it cannot sum over blocks as step `at` of the plan."""
        if not plan.cta_bits:
            yield "there is one block, and no other to sum over"
        if not all(step.loads for step in plan.steps[:at]) or (plan.load.staged and not plan.load.multicast):
            yield "only what each block has loaded, straight to registers or by multicast, is summed over blocks"
        if plan.crosses_blocks:
            yield "bits that are summed over blocks are not exchanged between them"

    def count_roundings(self, so_far: Roundings, carrier: str) -> None:
        """Adds its own. carrier: the form that it leaves."""

    def interpret(self, values: Values, plan: Draft) -> None:
        """Carries it out in float64."""
        across = [cta(j) for j in range(plan.cta_bits) if self.over_blocks]
        values.transform(*across, *self.places)
        values.multiply(self.share(values.left, plan))
        values.move(self.moves)

    def share(self, left: float, plan: Draft) -> float:
        """What it multiplies by, where steps have still to multiply by `left`."""
        return left if self.multiplies else 1.0

    def cost(self, plan: Draft, carrier: str) -> Cost:
        """carrier: the form that it finds values in."""
        return Cost(plan.words(carrier), waits={"arithmetic": 1})

    def sentence(self, bits: str) -> str:
        """What it does, in words. bits: the numbers of those that it transforms."""
        return self.says.format(bits=bits, **vars(self))

    def view(self, plan: Draft, at: int) -> dict[str, Any]:
        """What its block needs to know beside its fields, as step `at` of the plan."""
        return {}


def mixed_chunk_bits(steps: Iterable[Step]) -> int:
    """The lowest bits of the chunk number, so many, beyond which none of the steps moves or transforms any."""
    touched = [place for step in steps for place in (*step.places, *step.moves)]
    return max((place.index - 1 for place in touched if place.kind == "reg" and place.index > 0), default=0)


# The rounding of an fp32 sum of so many rounded values: half of the sums of two lie in the middle between two. Against
# one rounding of normal values, as the errors of 1285 measured kernels have it.
_ROUNDED_SUM = {2: 1.17, 4: 1.05}
_OF_FP16 = 1 / 64  # of a rounding to bfloat16: of three bits more, so an eighth of the error


@dataclass
class Roundings:
    """How many roundings of normal values have the same error as all those of the steps so far."""

    count: float = 0.0
    # Values rounded to a form in each fp32 sum since; 0: many, or values times a scale.
    terms: int = 0
    form: str = ""

    def add(self, form: str, worth: float) -> None:
        """Every value was rounded to a form of 16 bits."""
        self.count += worth * (_OF_FP16 if form == FP16 else 1.0)
        self.terms, self.form = 1, form

    def add_sums(self, form: str, terms: int) -> None:
        """Sums of so many values that were rounded before were."""
        self.add(form, _ROUNDED_SUM.get(terms, 1.0))


def roundings(steps: Iterable[Step]) -> float:
    """How many roundings of normal values have the same error as all those of the steps together."""
    carrier, so_far = "", Roundings()
    for step in steps:
        carrier = step.leaves or carrier
        step.count_roundings(so_far, carrier)
    return so_far.count
