"""`Knobs`: the choices of a search, and the plan that they mean.

Knobs are independent: each may take any of its values, whatever the others are. `hadagen.plan.legality` says which
choices are legal together for a problem on an arch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hadagen.errors import UsageError, choice, shown
from hadagen.plan.layout import CHUNK_BITS, LANE_BITS, MMA_MOVES, PAIR, Place, cta, lane, log2, reg, warp
from hadagen.plan.plan import Plan
from hadagen.plan.steps.activate import Activate
from hadagen.plan.steps.base import FP16, FP32, PACKED, SPLIT, Step
from hadagen.plan.steps.conversions import Correct, Narrow, Normalize, Round, Scale, Widen
from hadagen.plan.steps.exchanges import Exchange, Transpose
from hadagen.plan.steps.matrix import COLUMN_BITS, Columns, LoadColumns, Matrix, Signs, Square
from hadagen.plan.steps.memory import Load, Prefetch, Store, Trigger
from hadagen.plan.steps.product import CrossButterflies, LoadBoxes, Product, ProductAhead, StreamedProduct, WarpProduct
from hadagen.plan.steps.quantize import Largest, Quantize, Renumber
from hadagen.plan.steps.right import RightProduct
from hadagen.plan.steps.transforms import NORMALIZER, PARTS, Butterfly, Gather, Mma, Shuffle, SwapButterfly
from hadagen.problem.formats import TENSOR
from hadagen.problem.problem import DType, Problem
from hadagen.problem.prologues import Activated, prologue_of

EXCHANGE, LOAD = "exchange", "load"
REGISTERS, LANES = "registers", "lanes"
WHOLE, HALF = "whole", "half"
HADAMARD, MATRIX_FIRST = "hadamard", "matrix"
TOGETHER, ALONE, STREAMED, IN_TURNS, AHEAD = "together", "alone", "streamed", "in_turns", "ahead"
MAX_EXCHANGED_LANES = 4  # the fifth lane bit stays, so that stores write whole sectors of 32 bytes
# `far_lanes` → how many far bits come to lanes before others come to registers; bits of blocks go to registers first.
# With two, stores write whole lines of 128 bytes.
MMA_LANES = {"mma": 3, "mma_two": 2}
# Transforms the bits that came to the upper three lane places, and the bit at the lowest chunk place: another far bit,
# or the chunk bit of that place, which was left for it.
FAR_MMA = Mma(2, turned=True)


KnobValue = int | str


@dataclass(frozen=True)
class Knob:
    """One knob: everything about it, except the steps that `steps_of` makes of it.

    values: all that a plan can be built with, in the order of a search, so that the nearest values are neighbours. The
    first is the default. It means a plan without the knob, and is the only legal value where the knob would change
    nothing. An arch may search fewer of them.

    with_matrix: whether kernels with a matrix have it. room: whether it may change the shared memory or the registers
    of a kernel. estimated: how many of the values the cost model tells apart; None for all.
    """

    values: tuple[KnobValue, ...]
    meaning: str
    with_matrix: bool = False
    room: bool = True
    estimated: int | None = None


def _knob(values: tuple[KnobValue, ...], meaning: str, **said: Any) -> Any:
    """A field of `Knobs`, as `Knob` says."""
    return field(default=values[0], metadata={"knob": Knob(values, meaning, **said)})


@dataclass(frozen=True, order=True)
class Knobs:
    """The choices of a search, in the order in which they are made."""

    chunks: int = _knob(
        (1, 2, 4, 8, 16),
        "256-element chunks per warp, 8 elements of each in a thread; with a matrix, groups of 32 columns",
        with_matrix=True,
    )
    warps: int = _knob(
        (1, 2, 4, 8, 16, 32),
        "warps per block, times the odd factor of a row that is quantized; with a matrix, groups of warps",
        with_matrix=True,
    )
    cluster: int = _knob(
        (1, 2, 4, 8, 16), "blocks per cluster; where a matrix comes first, blocks that share its rows", with_matrix=True
    )
    first: str = _knob(
        (HADAMARD, MATRIX_FIRST),
        "what a kernel with a matrix multiplies by first; by its matrix, so that one rounding is left",
        with_matrix=True,
    )
    fold: int = _knob((0, 1, 2, 3), "bits of H that the matrix takes in, where it comes first", with_matrix=True)
    products: str = _knob(
        (TOGETHER, ALONE, STREAMED, IN_TURNS, AHEAD),
        "how warps multiply by the matrix where it comes first: each alone with mma; or in fours with wgmma, which "
        "begin together, also with the matrix in shared memory (`streamed`), in turns, or a tile ahead of the steps "
        "after them",
        with_matrix=True,
        estimated=2,
    )
    rows: int = _knob(
        (1, 2, 4, 8, 16, 32, 64, 128, 256), "rows of a tile that is multiplied by a matrix", with_matrix=True
    )
    slabs: int = _knob((1, 2, 3, 4, 5), "slabs of 16 rows of the matrix that one warp multiplies by", with_matrix=True)
    block_bits: str = _knob(
        (EXCHANGE, LOAD), "what brings bits of blocks together: an exchange, or loads of whole rows"
    )
    far_bits: str = _knob(
        (REGISTERS, LANES),
        "what bits of warps and blocks are swapped with: register bits, or register and lane bits at once",
    )
    far_lanes: str = _knob(
        ("shuffle", "mma_two", "mma"),
        "what transforms bits that came to lanes: shuffles, an mma of one or two bits, or an mma of three",
    )
    low_bits: str = _knob(
        ("mma", "mma_shuffle", "shuffle"),
        "what transforms index bits 0 to 7: two mma, one mma and then shuffles, or shuffles",
    )
    shuffles: str = _knob(
        (WHOLE, HALF), "what crosses lanes to transform a bit there: all values, or the half that is swapped"
    )
    mma_carrier: str = _knob(
        (PACKED, FP16, "tf32", "split"),
        "values between two mma: 16 bits; or float16, of bfloat16 rows brought into its range, which `packed` of the "
        "other carriers then means too; or fp32, in parts of tf32 or (`split`) of bfloat16",
    )
    accumulator: str = _knob(
        (FP32, PACKED), "sums of an mma; packed sums, of float16 alone, need no conversion", room=False, estimated=1
    )
    butterfly_carrier: str = _knob((PACKED, FP32), "values that butterflies and shuffles work on", room=False)
    exchange_carrier: str = _knob(
        (PACKED, FP32),
        "values that cross shared memory; between a matrix and the steps after it, `fp32` means two bfloat16",
        with_matrix=True,
    )
    exchange_rounds: int = _knob((1, 2), "how many times one exchange uses its shared memory")
    shared_layout: str = _knob(("linear", "padded", "swizzled"), "how the vectors of an exchange lie in shared memory")
    order: str = _knob(
        ("by_step", "by_group"),
        "each step over all chunks; or all steps from the exchange on for one group of chunks after another, so that "
        "one group is stored while the next crosses",
        room=False,
        estimated=1,
    )
    load: str = _knob(
        ("plain", "cp_async", "bulk", "multicast"),
        "how a tile is loaded; whole rows also by multicast to all blocks of a cluster",
        with_matrix=True,
    )
    grid: str = _knob(
        ("tiles", "persistent"),
        "a block or cluster per tile, or persistent blocks that loop over tiles",
        with_matrix=True,
        room=False,
    )
    stages: int = _knob((1, 2, 3, 4), "tiles under way at once in a persistent grid", with_matrix=True)
    min_blocks: int = _knob(
        (1, 2, 3, 4, 5, 6, 7, 8),
        "blocks per SM that the compiler must leave registers for; with fewer, it can overlap more",
        with_matrix=True,
        room=False,
        estimated=1,
    )
    ahead: int = _knob(
        (0, 8, 16),
        "MiB of the input between a tile and the tile that is prefetched to L2 meanwhile; 0 for no prefetch",
        with_matrix=True,
        room=False,
        estimated=2,
    )
    trigger: str = _knob(
        ("end", "store", "load"),
        "when the next kernel in the stream may start: at the end, before the store, or after the load",
        with_matrix=True,
        room=False,
        estimated=1,
    )

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def normalizes(self) -> bool:
        """Whether values are brought into the range of float16."""
        return self.mma_carrier == FP16

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Knobs:
        """Raises `UsageError` if a knob is unknown, unless it is a former one with the value that all kernels have
        now."""
        known = {name: value for name, value in values.items() if _FORMER.get(name) != value}
        unknown = sorted(set(known) - set(KNOB_NAMES))
        if unknown:
            gone = "gone, though kernels that have it still run" if unknown[0] in _FORMER else "not known"
            raise UsageError(f"knob {shown(unknown[0])} is {gone}; {choice(unknown[0], KNOB_NAMES)}")
        return cls(**known)

    @classmethod
    def like(cls, values: Mapping[str, Any]) -> Knobs:
        """A stored choice without knobs that no longer exist. It is not legal if a value no longer exists."""
        return cls(**{name: value for name, value in values.items() if name in KNOB_NAMES})

    def __str__(self) -> str:
        return knobs_text(self.to_dict())


def are_known(values: Mapping[str, Any]) -> bool:
    """Whether all knobs and values of a stored choice still exist."""
    return all(value in KNOB_VALUES.get(name, ()) for name, value in values.items())


def knobs_text(values: Mapping[str, Any]) -> str:
    """The knobs that differ from their defaults, as `k=v` pairs. Stored knobs may have values that no longer exist."""
    changed = [f"{k}={v}" for k, v in values.items() if v != getattr(Knobs, k, _FORMER.get(k))]
    return " ".join(changed) or "defaults"


# Knobs that stored choices may still have, each with the value that all kernels have now.
_FORMER = {"store": "plain"}
KNOBS: dict[str, Knob] = {knob.name: knob.metadata["knob"] for knob in fields(Knobs)}
KNOB_NAMES = tuple(KNOBS)
KNOB_VALUES = {name: knob.values for name, knob in KNOBS.items()}


def plan_of(problem: Problem, knobs: Knobs, *, starts_early: bool = False) -> Plan:
    """The plan that legal knobs mean; `hadagen.plan.space.build_plan` also says why others are not legal.

    starts_early: as the arch says."""
    return Plan(
        problem,
        log2(knobs.chunks),
        log2(knobs.warps),
        log2(knobs.cluster),
        steps_of(problem, knobs),
        persistent=knobs.grid == "persistent",
        min_blocks=knobs.min_blocks,
        order=knobs.order,
        starts_early=starts_early,
    )


def steps_of(problem: Problem, knobs: Knobs) -> tuple[Step, ...]:
    """The steps of the plan that legal knobs mean."""
    if problem.transform.has_matrix:
        return matrix_steps(problem, knobs)
    steps: list[Step] = [Load(knobs.load, knobs.stages, FP32 if problem.io.input is DType.FLOAT32 else PACKED)]
    steps += prologue_steps(problem)
    wide = _Converter(steps).carrier == FP32
    steps += _float32_low_bits(problem, knobs) if problem.io.input is DType.FLOAT32 else _low_bits(problem, knobs, wide)
    if knobs.block_bits == LOAD:
        first = steps[1]
        steps[1:2] = [replace(first, over_blocks=True)] if isinstance(first, Mma) else [Gather(), first]
    bits = problem.bits
    if bits > CHUNK_BITS:
        convert = _Converter(steps, FP16 if knobs.normalizes else PACKED)
        if places := near_butterflies(problem, knobs):
            convert.to(knobs.butterfly_carrier)
        steps += [Butterfly(place) for place in places]
        for pairs in exchanges_of(problem, knobs):
            convert.to(knobs.exchange_carrier)
            through = convert.carrier, knobs.exchange_rounds, knobs.shared_layout
            steps.append(Exchange(pairs, *through, turned=turns_in_exchange(knobs)))
            _add_far_bits(convert, problem, knobs, [near for near, _ in pairs])
    folds = _folds_scale(problem, knobs)
    steps = steps if folds else _with_scale(problem, knobs, steps)
    if knobs.normalizes:
        steps.insert(1, Normalize())
    turned = knobs.low_bits == "mma_shuffle"
    if problem.io.form:
        steps += _to_codes(problem, steps, folds, turned)
    else:
        steps += [Transpose()] * turned + [Store()]
    return _with_signs(problem, _with_requests(knobs, steps))


def prologue_steps(problem: Problem, *, rounds: bool = False) -> list[Step]:
    """The step that computes the prologue, if the problem has one. rounds: as in `Activate.for_problem`."""
    prologue = prologue_of(problem)
    if isinstance(prologue, Activated):
        return [Activate.for_problem(prologue, problem, rounds=rounds)]
    return [prologue.step()] if prologue else []


def _to_codes(problem: Problem, steps: list[Step], folds: bool, turned: bool) -> list[Step]:
    """The steps that quantize; what rounds at the end of `steps` goes if it need not. folds: as `Quantize` says.
    turned: an mma has left bits of neighbors in lanes, and one of these bits must come back."""
    form = problem.io.form
    assert form is not None
    if isinstance(steps[-1], Round) and not form.rounds_first:
        steps.pop()
    rest = _Converter(list(steps))
    if form.rounds_first and problem.io.input is not DType.FLOAT32:
        rest.to(PACKED)
    rest.to(FP32)
    swapped = [(MMA_MOVES[PAIR], PAIR)] if turned else []
    if problem.transform.swapped:
        swapped += [(PAIR, reg(0))]
        # In 16 bits a vector has one bit of the next digit, and the lowest lane the other one.
        swapped += [(lane(0), reg(1))] * (problem.io.input is not DType.FLOAT32 and problem.bits > 2)
    found = rest.steps[len(steps) :] + [Renumber()] * problem.transform.swapped
    return [*found, *[Largest()] * (form.group != TENSOR), Quantize(folds, tuple(swapped))]


def _with_requests(knobs: Knobs, steps: list[Step]) -> list[Step]:
    """Adds the steps that make requests once a tile: after the load, or before the step that stores."""
    if knobs.ahead:
        steps.insert(1, Prefetch(knobs.ahead))
    if knobs.trigger != "end":
        steps.insert(1 if knobs.trigger == "load" else len(steps) - 1, Trigger())
    return steps


def _with_signs(problem: Problem, steps: list[Step]) -> tuple[Step, ...]:
    if problem.transform.signed:
        last_load = max(at for at, step in enumerate(steps) if isinstance(step, Load) or step.computes)
        steps = [
            *steps[: last_load + 1],
            Signs(before=True),
            *steps[last_load + 1 : -1],
            Signs(before=False),
            steps[-1],
        ]
    return tuple(steps)


def matrix_steps(problem: Problem, knobs: Knobs) -> tuple[Step, ...]:
    """The steps of the plan that legal knobs mean for a problem with a matrix."""
    if knobs.first == MATRIX_FIRST:
        return _product_steps(problem, knobs)
    bits = problem.bits
    signs = [Signs(before=True)] * problem.transform.signed
    if not bits:
        return tuple(
            _with_requests(knobs, [Load(knobs.load), *prologue_steps(problem), *signs, Square(knobs.rows, knobs.slabs)])
        )
    carrier = PACKED if knobs.exchange_carrier == PACKED else SPLIT
    form = problem.io.form
    # What crosses has the range of fp32, so that the quantizer may multiply by the scale.
    folds = form is not None and not form.rounds_first and (carrier == SPLIT or wide_range(problem.io.input))
    columns = Columns(carrier, min(bits, COLUMN_BITS + log2(knobs.chunks)), scales=not folds)
    matrix = Matrix(knobs.rows, knobs.slabs, (columns.bits, bits), stores=form is None)
    steps = [LoadColumns(knobs.load, knobs.stages), *prologue_steps(problem), *signs, columns, matrix]
    return tuple(_with_requests(knobs, steps + _to_codes(problem, steps, folds, False) if form else steps))


def _product_steps(problem: Problem, knobs: Knobs) -> tuple[Step, ...]:
    """The same where the matrix comes first."""
    form = problem.io.form
    folds = form is not None and not form.rounds_first
    in_registers = problem.bits - knobs.fold - 3  # bits of a column
    in_fours = {AHEAD: ProductAhead, STREAMED: StreamedProduct}.get(knobs.products, Product)
    steps: list[Step] = [
        LoadBoxes(knobs.load, knobs.stages),
        *prologue_steps(problem, rounds=problem.may_round_within),  # which then has one product, not two
        WarpProduct(knobs.fold, knobs.rows)
        if knobs.products == ALONE
        else in_fours(knobs.fold, knobs.rows, knobs.products == IN_TURNS),
    ]
    if problem.transform.paired:
        steps.append(RightProduct.for_problem(problem, scales=not folds))
    else:
        steps += [Butterfly(reg(j)) for j in range(2, in_registers)]
        steps.append(CrossButterflies(min(2, max(0, in_registers)), scales=not folds))
    steps += _to_codes(problem, steps, folds, False) if form else [Round(), Store()]
    return _with_signs(problem, _with_requests(knobs, steps))


class _Converter:
    """Appends the `Widen`, `Narrow` or `Round` that converts the values to the form that a knob names.

    packed: the form that the knob value "packed" means."""

    def __init__(self, steps: list[Step], packed: str = PACKED) -> None:
        self.steps = steps
        self._packed = packed

    @property
    def carrier(self) -> str:
        return next((step.leaves for step in reversed(self.steps) if step.leaves), "")

    def to(self, carrier: str) -> None:
        carrier = self._packed if carrier == PACKED else carrier
        if self.carrier != carrier:
            self.steps.append(Widen() if carrier == FP32 else Narrow() if carrier == FP16 else Round())


def _low_bits(problem: Problem, knobs: Knobs, wide: bool) -> list[Step]:
    """The steps that transform index bits 0–7 of packed values, or of fp32 values if `wide`, or all bits of a shorter
    row."""
    bits = problem.bits
    first, second = (1, 2) if _scales_in_mma(problem, knobs) or wide_range(problem.io.input) else (0, 0)
    if knobs.low_bits == "mma":
        # mma(reg0) finds bits 0 3 4 1 at its places and leaves 5 6 7 there, which mma(reg1) transforms with bit 2.
        if knobs.normalizes:
            accumulator = FP16 if knobs.accumulator == PACKED else FP32
            return [Mma(0, factor=NORMALIZER), Narrow(), Mma(1, FP16, accumulator=accumulator)]
        if knobs.mma_carrier != PACKED:
            of_first = _split_mma(problem, first) if wide else Mma(0, factor=first)
            return [of_first, _wide_mma(1, problem, knobs, second)]
        if knobs.accumulator == PACKED:
            return [Mma(0, accumulator=PACKED, factor=first), Mma(1, accumulator=PACKED, factor=second)]
        return [Mma(0, factor=first), Round(), Mma(1, factor=second)]
    if knobs.low_bits == "mma_shuffle":
        # Bits 5 6 7 are left at pair, lane0, lane1, and bit 2 at reg1.
        of_packed = Mma(0, accumulator=knobs.accumulator, factor=first)
        steps: list[Step] = [_split_mma(problem, first) if wide else of_packed]
        if _scales_in_mma(problem, knobs):
            steps.append(Correct())
        _Converter(steps).to(FP32)
        rest: list[Step] = [Butterfly(reg(1)), Butterfly(PAIR), Shuffle(0), Shuffle(1)]
        return steps + rest[: bits - 4]
    inside: list[Step] = [Butterfly(PAIR), Butterfly(reg(0)), Butterfly(reg(1))]
    across = range(max(0, min(bits - len(inside), LANE_BITS)))
    if wide or not across or wide_range(problem.io.input):  # it is scaled as soon as it is wide
        return [*[Widen()] * (not wide), *inside[:bits], *(Shuffle(j) for j in across)]
    return [*(Shuffle(j, widen=j == 0) for j in across), *inside]


def _wide_mma(register: int, problem: Problem, knobs: Knobs, factor: int) -> Mma:
    """An `Mma` that takes fp32 values in the parts that `mma_carrier` names."""
    operand = "bfloat16" if knobs.mma_carrier == "split" else knobs.mma_carrier
    return Mma(register, operand, PARTS[operand][problem.io.input], factor=factor)


def _split_mma(problem: Problem, factor: int) -> Mma:
    """The first `Mma`, of fp32 values in parts of bfloat16: one tf32 would cut off too many of their bits."""
    return Mma(0, "bfloat16", PARTS["bfloat16"][problem.io.input], factor=factor)


def turns_in_exchange(knobs: Knobs) -> bool:
    """Whether the exchange turns values, because the mma of far bits takes tf32 and cannot turn them itself."""
    return knobs.far_lanes == "mma" and knobs.mma_carrier == "tf32" and knobs.exchange_carrier == FP32


def near_butterflies(problem: Problem, knobs: Knobs) -> list[Place]:
    """The places of the row's chunk bits that butterflies transform before any exchange: all but the place of
    `FAR_MMA`; that place too if a far bit comes there."""
    chunk_bits = min(log2(knobs.chunks), problem.bits - CHUNK_BITS)
    places = [reg(2 + j) for j in range(chunk_bits)]
    if knobs.far_lanes in MMA_LANES:
        exchanged = [near for pairs in exchanges_of(problem, knobs) for near, _ in pairs]
        places = [place for place in places if place not in FAR_MMA.places or place in exchanged]
    return places


def _add_far_bits(convert: _Converter, problem: Problem, knobs: Knobs, near: list[Place]) -> None:
    """Appends the steps that transform the bits which an exchange brought to the places `near`. Steps over lanes come
    first, because they can take packed values as they are and leave fp32."""
    lanes, others = [[p for p in near if (p.kind != "reg") == in_lanes] for in_lanes in (True, False)]
    steps = convert.steps
    if knobs.far_lanes in MMA_LANES:
        far = replace(FAR_MMA, idle=max(0, MMA_LANES["mma"] - len(lanes)))
        if turns_in_exchange(knobs):
            far = _wide_mma(FAR_MMA.reg, problem, knobs, factor=0)
        elif convert.carrier == FP32:
            far = replace(far, operand="bfloat16", parts=PARTS["bfloat16"][problem.io.input])
        else:
            far = replace(far, operand=convert.carrier)
        lanes, others = [[p for p in places if p not in far.places] for places in (lanes, others)]
        packed = knobs.accumulator == PACKED and not far.in_parts
        if packed and (knobs.butterfly_carrier == PACKED or not lanes + others):
            far = replace(far, accumulator=far.operand)
        steps.append(far)
    elif lanes and convert.carrier != FP32 and knobs.butterfly_carrier == FP32:
        steps.append(Shuffle(lanes.pop(0).index, widen=True))
    if lanes or others:
        convert.to(knobs.butterfly_carrier)
    steps += [*(_shuffle(knobs, place.index) for place in lanes), *(Butterfly(place) for place in others)]


def _shuffle(knobs: Knobs, index: int) -> Step:
    """The step that transforms the bit at a lane place. A swap uses a register place that no exchange uses."""
    return SwapButterfly(index, reg(1)) if knobs.shuffles == HALF else Shuffle(index)


def _float32_low_bits(problem: Problem, knobs: Knobs) -> list[Step]:
    """The steps that transform index bits 0–7 of float32, or all bits of a shorter row."""
    if knobs.low_bits == "mma":
        # mma(reg0) finds bits 0 2 3 1 at its places and leaves 4 5 6 there, which mma(reg1) transforms with bit 7.
        # Parts of bfloat16 lose nothing of values whose 24 bits are all above 2^-133, the least bfloat16: values from
        # 2^-110 on, or from 2^-106 if the first mma multiplies by 2^-4. Two tf32, the least being 2^-136, are
        # values rounded to 22 bits from 2^-114 on, or 2^-110. Of smaller values, the second tf32 is subnormal and cut
        # off.
        return [_wide_mma(register, problem, knobs, 1 + register) for register in (0, 1)]
    bits = problem.bits
    inside = (Butterfly(PAIR), Butterfly(reg(0)))[:bits]
    between = (Butterfly(reg(1)),) if bits >= CHUNK_BITS else ()
    # Swaps begin with the lowest lane. Then all lanes but that one keep neighbors in memory together.
    across = [_shuffle(knobs, j) for j in range(max(0, min(bits - len(inside), LANE_BITS)))]
    return [*inside, *between, *across] if knobs.shuffles == HALF else [*inside, *across, *between]


def _scales_in_mma(problem: Problem, knobs: Knobs) -> bool:
    """Whether the scale is multiplied by mma, in 16-bit factors; packed values then need no step for it."""
    if not problem.may_round_often:
        return False  # for the sake of scales of any size
    if knobs.low_bits == "mma":
        return knobs.mma_carrier == PACKED
    return knobs.accumulator == PACKED


def exchanges_of(problem: Problem, knobs: Knobs) -> list[tuple[tuple[Place, Place], ...]]:
    """The swaps of each exchange. If the far bits fit in the chunk bits, or may go to lanes too, there is one exchange;
    otherwise bits of warps go before bits of blocks.

    If there are far bits, chunks must be 2 or more, or `far_bits` must be lanes."""
    room = log2(knobs.chunks)
    cta_bits = blocks_spanned(problem, knobs)
    warp_bits = max(0, problem.bits - CHUNK_BITS - room - cta_bits)
    warps = [warp(j) for j in range(warp_bits)]
    ctas = [cta(j) for j in range(cta_bits) if knobs.block_bits == EXCHANGE]
    if not warps + ctas:
        return []
    near = [reg(2 + i) for i in range(room)]
    if knobs.far_bits == LANES:
        # Bits of blocks are swapped with register bits first, so that a warp stores to one block at a time. The highest
        # lane bits are swapped first, because the lowest keep neighbors in memory together.
        lanes = [lane(LANE_BITS - 1 - i) for i in range(MAX_EXCHANGED_LANES)]
        if knobs.low_bits == "shuffle" and knobs.shuffles == HALF:
            lanes = [lane(0), *lanes[:-1]]  # lane 0 no longer keeps neighbors together
        if turns_in_exchange(knobs):
            lanes = [PAIR, lane(0), lane(1)]
        first, through_mma = (len(ctas), MMA_LANES[knobs.far_lanes]) if knobs.far_lanes in MMA_LANES else (room, 0)
        near = near[:first] + lanes[:through_mma] + near[first:] + lanes[through_mma:]
        groups = [ctas + warps]
    elif len(warps + ctas) <= room:
        groups = [warps + ctas]
    else:
        groups = [group[i : i + room] for group in (warps, ctas) for i in range(0, len(group), room)]
    return [tuple(zip(near, group, strict=False)) for group in groups]


def blocks_spanned(problem: Problem, knobs: Knobs) -> int:
    """log2 of the blocks of a cluster that H spans: of all blocks, unless a row has several H."""
    beyond_a_block = problem.bits - CHUNK_BITS - log2(knobs.chunks) - log2(knobs.warps)
    return min(log2(knobs.cluster), max(0, beyond_a_block))


def wide_range(dtype: DType) -> bool:
    """Whether the type has the range of fp32, so that sums of its values may leave that range."""
    return dtype is not DType.FLOAT16


def _folds_scale(problem: Problem, knobs: Knobs) -> bool:
    """Whether a quantizer multiplies by the scale, or by what the mma leave of it. Values are not rounded until then,
    and are quantized as if the product were not, which is within the error of a transform. Sums of a wide range must
    have taken their part of the scale before."""
    form = problem.io.form
    if form is None or form.rounds_first or problem.n == 1 or _scales_in_mma(problem, knobs) or knobs.normalizes:
        return False
    return not wide_range(problem.io.input) or (problem.io.input is DType.BFLOAT16 and knobs.low_bits != "shuffle")


def _with_scale(problem: Problem, knobs: Knobs, steps: list[Step]) -> list[Step]:
    """Adds `Scale` and the final `Round`.

    Values of a wide range are scaled as soon as they are in fp32 and no later mma takes a part of the scale. Only sums
    and differences follow then, and none of those exceeds the largest result. Other values are scaled as late as
    possible in fp32, but before they are rounded and summed again, so that 16-bit sums stay in range.
    """
    if any(step.multiplies == "scale" for step in steps):
        return steps  # a step scales already
    if _scales_in_mma(problem, knobs):
        return [*steps, Round()] if _Converter(steps).carrier == FP32 else steps
    after = 1 + max(
        i
        for i, step in enumerate(steps)
        if isinstance(step, Load) or step.computes or (isinstance(step, Mma) and step.reg < 2)
    )
    if problem.io.input is DType.FLOAT32:
        return [*steps[:after], Scale(), *steps[after:]]
    if knobs.normalizes:  # scaled values might leave the range of float16
        _Converter(steps).to(FP32)
        return [*steps, Scale(), Round()]
    if _Converter(steps).carrier == FP32:
        steps = [*steps, Round()]
    wide = next(i for i in range(after, len(steps)) if _Converter(steps[:i]).carrier == FP32)
    rounds = next(i for i in range(wide, len(steps)) if isinstance(steps[i], Round))
    at = wide if wide_range(problem.io.input) else rounds
    cut = any(isinstance(step, Mma) and step.cuts for step in steps[at:])
    return [*steps[:at], Scale(lifted=cut), *steps[at:]]
