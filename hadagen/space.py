"""Knobs ↔ plans: what the search may choose, which choices are legal for a problem on an arch, and why others are not.

Knobs are independent. Where a knob would not change the kernel (a shared layout without an exchange), only its first
value is legal, so no two legal choices mean the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, reduce
from itertools import product
from math import prod
from typing import Any

from hadagen.arch import Arch
from hadagen.errors import UsageError
from hadagen.layout import LANE_BITS, PAIR, Place, cta, reg, warp
from hadagen.plan import (
    BARRIER_BYTES,
    CHUNK_BITS,
    FP32,
    MMA_EXPONENT,
    OVERHEAD_REGISTERS,
    PACKED,
    Butterfly,
    Exchange,
    Load,
    Mma,
    Plan,
    Round,
    Scale,
    Shuffle,
    Step,
    Store,
    Transpose,
    Widen,
    carrier_after,
)
from hadagen.problem import DType, Numerics, Problem

MAX_EXCHANGES = 2
IN_THREAD_BITS = 3  # index bits 0–2 sit inside a 16-byte vector


@dataclass(frozen=True, order=True)
class Knobs:
    """What the search may choose. The values of each that are searched stand in the arch's YAML, under `search`."""

    chunks: int = 1  # 256-element chunks per warp, 8 elements of each in a thread
    warps: int = 1  # per block
    cluster: int = 1  # blocks per cluster
    low_bits: str = "mma"  # what transforms index bits 0–7: mma (two), mma_shuffle (one, then shuffles) or shuffle
    mma_carrier: str = PACKED  # values between two mma: packed, or split into high + low halves
    accumulator: str = FP32  # what mma sums in; packed sums (float16 only) need no conversion
    butterfly_carrier: str = PACKED  # values that butterflies and shuffles work on
    exchange_carrier: str = PACKED  # values that cross shared memory
    exchange_rounds: int = 1  # shared memory used this many times over in one exchange
    shared_layout: str = "linear"  # linear, padded or swizzled
    order: str = "by_step"  # each step over all chunks, or runs of steps chunk by chunk, which need fewer registers
    load: str = "plain"  # plain, no_allocate, cp_async or bulk
    grid: str = "tiles"  # a block per tile, or a persistent grid that loops over tiles
    stages: int = 1  # tiles under way in a persistent grid
    store: str = "plain"  # plain or streaming
    min_blocks: int = 1  # blocks per SM the compiler must leave registers for; fewer let it overlap more

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Knobs:
        unknown = sorted(set(values) - set(KNOB_NAMES))
        if unknown:
            raise UsageError(f"knob {unknown[0]!r} is not known; choose from {', '.join(KNOB_NAMES)}")
        return cls(**values)

    def __str__(self) -> str:
        """The knobs that differ from their defaults, as `k=v` pairs."""
        changed = [f"{k}={v}" for k, v in self.to_dict().items() if v != getattr(Knobs, k)]
        return " ".join(changed) or "defaults"


KNOB_NAMES = tuple(field.name for field in fields(Knobs))
_SHAPE = ("chunks", "warps", "cluster")
# What proved good on H100s, whatever the tile; where it is not legal, the nearest that is.
PROVEN = Knobs(
    accumulator=PACKED, shared_layout="swizzled", order="by_chunk", load="no_allocate", store="streaming", min_blocks=2
)


def build_plan(problem: Problem, knobs: Knobs, arch: Arch) -> Plan:
    """The plan that the knobs mean. Raises `UsageError` with the reason if they are not legal for problem and arch."""
    for name in KNOB_NAMES:
        value = getattr(knobs, name)
        if value not in arch.search[name]:
            known = ", ".join(map(str, arch.search[name]))
            raise UsageError(f"knob {name} = {value!r} is not searched on {arch.name}; choose one of {known}")
    context = _Context(problem, arch)
    for rule in RULES:
        if why := rule.broken(context, knobs):
            raise UsageError(f"{problem.name} with {knobs}: {why}")
    return _build(problem, knobs)


# ---- from knobs to steps -------------------------------------------------------------------------------------------


def _log2(value: int) -> int:
    return value.bit_length() - 1


def _build(problem: Problem, knobs: Knobs) -> Plan:
    steps: list[Step] = [Load(knobs.load, knobs.stages)]
    steps += _low_bits(problem, knobs)
    bits = problem.log2_n
    if bits > CHUNK_BITS:
        chunk_bits = min(_log2(knobs.chunks), bits - CHUNK_BITS)
        convert = _Converter(steps)
        if chunk_bits or knobs.butterfly_carrier == FP32:
            convert.to(knobs.butterfly_carrier)
        steps += [Butterfly(reg(2 + j)) for j in range(chunk_bits)]
        for pairs in _exchanges(problem, knobs):
            convert.to(knobs.exchange_carrier)
            steps.append(Exchange(pairs, knobs.exchange_carrier, knobs.exchange_rounds, knobs.shared_layout))
            convert.to(knobs.butterfly_carrier)
            steps += [Butterfly(near) for near, _ in pairs]
    steps = _with_scale(steps)
    if knobs.low_bits == "mma_shuffle":
        steps.append(Transpose())
    steps.append(Store(knobs.store))
    return Plan(
        problem,
        _log2(knobs.chunks),
        _log2(knobs.warps),
        _log2(knobs.cluster),
        tuple(steps),
        persistent=knobs.grid == "persistent",
        min_blocks=knobs.min_blocks,
        by_chunk=knobs.order == "by_chunk",
    )


class _Converter:
    """Appends the `Widen` or `Round` that brings the values into a wanted form."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    @property
    def carrier(self) -> str:
        return reduce(lambda carrier, step: carrier_after(step, carrier), self.steps, "")

    def to(self, carrier: str) -> None:
        if self.carrier != carrier:
            self.steps.append(Round() if carrier == PACKED else Widen())


def _low_bits(problem: Problem, knobs: Knobs) -> list[Step]:
    """The steps that transform index bits 0–7, as far as the row has them."""
    bits = problem.log2_n
    if knobs.low_bits == "mma":
        # mma(reg0) finds bits 0 3 4 1 at its places and leaves 5 6 7 there, which mma(reg1) transforms with bit 2.
        if knobs.mma_carrier == "split":
            return [Mma(0), Mma(1, split=True)]
        if knobs.accumulator == PACKED:
            return [Mma(0, accumulator=PACKED), Mma(1, accumulator=PACKED)]
        return [Mma(0), Round(), Mma(1)]
    if knobs.low_bits == "mma_shuffle":
        # Bits 5 6 7 are left at pair, lane0, lane1, and bit 2 at reg1.
        steps: list[Step] = [Mma(0, accumulator=knobs.accumulator)]
        _Converter(steps).to(knobs.butterfly_carrier)
        rest: list[Step] = [Butterfly(reg(1)), Butterfly(PAIR), Shuffle(0), Shuffle(1)]
        return steps + rest[: bits - 4]
    inside: list[Step] = [Butterfly(PAIR), Butterfly(reg(0)), Butterfly(reg(1))]
    across = range(max(0, min(bits - IN_THREAD_BITS, LANE_BITS)))
    if knobs.butterfly_carrier == PACKED:
        return [*inside[:bits], *(Shuffle(j) for j in across)]
    if not across:
        return [Widen(), *inside[:bits]]
    return [*(Shuffle(j, widen=j == 0) for j in across), *inside]


def _exchanges(problem: Problem, knobs: Knobs) -> list[tuple[tuple[Place, Place], ...]]:
    """The swaps of each exchange: all far bits at once if they fit in the chunk bits, warps before blocks if not.

    Where there are any, chunks must be 2 or more."""
    room = _log2(knobs.chunks)
    cta_bits = _log2(knobs.cluster)
    warp_bits = max(0, problem.log2_n - CHUNK_BITS - room - cta_bits)
    warps, ctas = [warp(j) for j in range(warp_bits)], [cta(j) for j in range(cta_bits)]
    far: list[Place] = warps + ctas
    if not far:
        return []
    groups = [far] if len(far) <= room else [g[i : i + room] for g in (warps, ctas) for i in range(0, len(g), room)]
    return [tuple((reg(2 + i), place) for i, place in enumerate(group)) for group in groups]


def _with_scale(steps: list[Step]) -> list[Step]:
    """Adds `Scale` and the final `Round`. It scales as late as it can in fp32, but before values are rounded and summed
    on, so that 16-bit sums stay in range."""
    scale = Scale(-MMA_EXPONENT * sum(isinstance(step, Mma) for step in steps))
    after = 1 + max(i for i, step in enumerate(steps) if isinstance(step, Load | Mma))
    rounds = [i for i, step in enumerate(steps) if isinstance(step, Round) and i >= after]
    if _Converter(steps).carrier == FP32:
        steps = [*steps, Round()]
        rounds.append(len(steps) - 1)
    if rounds:
        return [*steps[: rounds[0]], scale, *steps[rounds[0] :]]
    return [*steps[:after], Widen(), scale, Round(), *steps[after:]]


# ---- what is legal -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    problem: Problem
    arch: Arch

    @property
    def bits(self) -> int:
        return self.problem.log2_n


@dataclass(frozen=True)
class Rule:
    """`broken` says why the knobs it `reads` are not legal together, or nothing."""

    reads: tuple[str, ...]
    broken: Callable[[_Context, Knobs], str | None]


RULES: list[Rule] = []


def _rule(*reads: str) -> Callable[[Callable[[_Context, Knobs], str | None]], None]:
    def add(broken: Callable[[_Context, Knobs], str | None]) -> None:
        RULES.append(Rule(reads, broken))

    return add


def _shape(knobs: Knobs) -> tuple[int, int, int]:
    return knobs.chunks, knobs.warps, knobs.cluster


def _tile(knobs: Knobs) -> int:
    return knobs.chunks * knobs.warps * knobs.cluster << CHUNK_BITS


def _has_exchange(c: _Context, k: Knobs) -> bool:
    return c.problem.n > k.chunks << CHUNK_BITS


def _has_butterflies(c: _Context, k: Knobs) -> bool:
    return k.low_bits != "mma" or c.bits > CHUNK_BITS


@_rule("warps")
def _(c: _Context, k: Knobs) -> str | None:
    limit = c.arch.limits.threads_per_block
    return f"more than {limit} threads per block (take fewer warps)" if 32 * k.warps > limit else None


@_rule(*_SHAPE)
def _(c: _Context, k: Knobs) -> str | None:
    return "the tile is shorter than a row (take more chunks, warps or blocks)" if _tile(k) < c.problem.n else None


@_rule(*_SHAPE)
def _(c: _Context, k: Knobs) -> str | None:
    if k.cluster == 1:
        return None
    if "cluster" not in c.arch.features or k.cluster > c.arch.limits.cluster_blocks:
        return f"the arch has no clusters of {k.cluster} blocks"
    if _tile(k) > c.problem.n:
        return "the tile of several blocks is longer than a row (take fewer chunks, warps or blocks)"
    return None


@_rule(*_SHAPE)
def _(c: _Context, k: Knobs) -> str | None:
    if not _has_exchange(c, k):
        return None
    if k.chunks == 1:
        return "one chunk leaves no register bit to exchange with (chunks must be 2 or more)"
    count = len(_exchanges(c.problem, k))
    return f"more than {MAX_EXCHANGES} exchanges (more chunks need fewer)" if count > MAX_EXCHANGES else None


@_rule("low_bits")
def _(c: _Context, k: Knobs) -> str | None:
    if k.low_bits == "shuffle":
        return None
    if "mma" not in c.arch.features:
        return "the arch has no mma (low_bits must be shuffle)"
    if c.bits < 5:
        return "an mma would mix bits of two rows (low_bits must be shuffle)"
    if k.low_bits == "mma" and c.bits < CHUNK_BITS:
        return "two mma transform eight bits, more than the row has (low_bits must be mma_shuffle or shuffle)"
    return None


@_rule("low_bits", "mma_carrier")
def _(c: _Context, k: Knobs) -> str | None:
    between = k.low_bits == "mma"
    if k.mma_carrier == "split":
        return None if between else "no value passes from one mma to another (mma_carrier must be packed)"
    accurate = c.problem.numerics is Numerics.ACCURATE
    return "accurate may not round between two mma (mma_carrier must be split)" if between and accurate else None


@_rule("low_bits", "mma_carrier", "accumulator")
def _(c: _Context, k: Knobs) -> str | None:
    if k.accumulator == FP32:
        return None
    if k.low_bits == "shuffle" or k.mma_carrier == "split":
        return "no mma leaves packed values (accumulator must be fp32)"
    if c.problem.dtype is not DType.FLOAT16:
        return "no mma sums in bfloat16 (accumulator must be fp32)"
    if c.problem.numerics is Numerics.ACCURATE:
        return "accurate may not round inside an mma (accumulator must be fp32)"
    return None


@_rule("low_bits", "butterfly_carrier")
def _(c: _Context, k: Knobs) -> str | None:
    if k.butterfly_carrier == FP32:
        return None if _has_butterflies(c, k) else "no butterfly has a carrier (butterfly_carrier must be packed)"
    accurate = c.problem.numerics is Numerics.ACCURATE
    if accurate and _has_butterflies(c, k):
        return "accurate may not round between butterflies (butterfly_carrier must be fp32)"
    return None


@_rule("chunks", "butterfly_carrier", "exchange_carrier")
def _(c: _Context, k: Knobs) -> str | None:
    if k.exchange_carrier == FP32:
        if not _has_exchange(c, k):
            return "there is no exchange (exchange_carrier must be packed)"
        if k.butterfly_carrier == PACKED:
            return "packed butterflies have nothing in fp32 to exchange (exchange_carrier must be packed)"
        return None
    accurate = c.problem.numerics is Numerics.ACCURATE
    if accurate and _has_exchange(c, k):
        return "accurate may not round before an exchange (exchange_carrier must be fp32)"
    return None


@_rule("exchange_carrier", "exchange_rounds")
def _(c: _Context, k: Knobs) -> str | None:
    if k.exchange_rounds > 1 and k.exchange_carrier == PACKED:
        return "only an fp32 exchange has two vectors a chunk to take in rounds (exchange_rounds must be 1)"
    return None


@_rule("exchange_carrier", "exchange_rounds", "shared_layout")
def _(c: _Context, k: Knobs) -> str | None:
    conflicts = k.exchange_carrier == FP32 and k.exchange_rounds == 1
    if k.shared_layout != "linear" and not conflicts:
        return "one vector a lane meets no bank conflict (shared_layout must be linear)"
    return None


@_rule("chunks", "order")
def _(c: _Context, k: Knobs) -> str | None:
    return "one chunk has no order (order must be by_step)" if k.order == "by_chunk" and k.chunks == 1 else None


@_rule("load")
def _(c: _Context, k: Knobs) -> str | None:
    if k.load in ("cp_async", "bulk"):
        needed = {"cp_async": "cp_async", "bulk": "bulk_copy"}[k.load]
        if needed not in c.arch.features:
            return f"the arch has no {needed} (load must be another)"
        if c.bits < IN_THREAD_BITS:
            return "rows shorter than 16 bytes cannot be copied asynchronously (load must be plain or no_allocate)"
    return None


@_rule("load", "grid", "stages")
def _(c: _Context, k: Knobs) -> str | None:
    if k.stages == 1:
        return None
    if k.grid == "tiles":
        return "one tile a block leaves nothing to have under way (stages must be 1)"
    limit = 4 if k.load in ("cp_async", "bulk") else 2
    return f"more than {limit} stages of registers (more need cp_async or bulk)" if k.stages > limit else None


@_rule("warps", "min_blocks")
def _(c: _Context, k: Knobs) -> str | None:
    limit = c.arch.limits.threads_per_sm
    if k.min_blocks * k.warps * 32 > limit:
        return f"more than {limit} threads per SM (take fewer warps or a smaller min_blocks)"
    return None


@_rule("chunks", "warps", "butterfly_carrier", "load", "stages", "min_blocks")
def _(c: _Context, k: Knobs) -> str | None:
    wide = k.butterfly_carrier == FP32 or c.problem.numerics is Numerics.ACCURATE
    data = k.chunks * (8 if wide else 4)
    if k.stages > 1 and k.load in ("plain", "no_allocate"):
        data += k.chunks * 4
    threads = 32 * k.warps
    available = min(c.arch.limits.registers_per_thread, c.arch.limits.registers_per_sm // (threads * k.min_blocks))
    if data + OVERHEAD_REGISTERS > available:
        return "a thread's values do not fit its registers (take fewer chunks, stages or min_blocks)"
    return None


@_rule("chunks", "warps", "exchange_carrier", "exchange_rounds", "shared_layout", "load", "stages", "min_blocks")
def _(c: _Context, k: Knobs) -> str | None:
    block = k.chunks * k.warps << CHUNK_BITS
    staged = k.stages * block * c.problem.dtype.bytes if k.load in ("cp_async", "bulk") else 0
    exchanged = 0
    if _has_exchange(c, k):
        slot = Exchange((), k.exchange_carrier, k.exchange_rounds, k.shared_layout).slot_bytes
        exchanged = k.chunks * k.warps * slot
    bytes_ = BARRIER_BYTES + staged + exchanged  # barriers or not: a little room to spare
    limits = c.arch.limits
    if bytes_ > limits.shared_per_block:
        return f"more than {limits.shared_per_block} bytes of shared memory per block (take fewer stages or warps)"
    if k.min_blocks * (bytes_ + limits.shared_reserved_per_block) > limits.shared_per_sm:
        return f"more than {limits.shared_per_sm} bytes of shared memory per SM (min_blocks must be smaller)"
    return None


# ---- the space of one problem --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpaceReport:
    """How many choices there are, how many are legal, and how many each reason rules out (the first that applies)."""

    total: int
    legal: int
    reasons: dict[str, int]


class Space:
    """All legal knobs of a problem on an arch."""

    def __init__(self, problem: Problem, arch: Arch) -> None:
        self.problem = problem
        self.arch = arch
        self._context = _Context(problem, arch)

    @cached_property
    def legal(self) -> tuple[Knobs, ...]:
        return self._enumerated[0]

    def report(self) -> SpaceReport:
        legal, reasons = self._enumerated
        total = prod(len(self.arch.search[name]) for name in KNOB_NAMES)
        return SpaceReport(total, len(legal), dict(reasons.most_common()))

    def seeds(self) -> list[Knobs]:
        """Legal choices that tend to be good, for a search to start from: each tile shape, with a block per tile and
        with a persistent grid; shapes of 16 chunks in a block first."""
        search = self.arch.search
        shapes = [
            Knobs.from_dict(dict(zip(_SHAPE, shape, strict=True)))
            for shape in product(*(search[name] for name in _SHAPE))
        ]
        found: dict[Knobs, None] = {}
        for shape in sorted(shapes, key=lambda k: (k.cluster, abs(k.chunks * k.warps - 16), k.warps)):
            wanted = replace(PROVEN, chunks=shape.chunks, warps=shape.warps, cluster=shape.cluster)
            for start in (wanted, replace(wanted, load="cp_async", grid="persistent", stages=2)):
                knobs = next(self.nearest(start.to_dict()))
                if _shape(knobs) == _shape(wanted):
                    found[knobs] = None
        return list(found)

    def nearest(self, wanted: Mapping[str, Any]) -> Iterator[Knobs]:
        """All legal choices, nearest to `wanted` first: knob by knob, each as near in its range as those before let it.

        For a value that is not searched, the first of the range stands in."""
        ranges = []
        for name in KNOB_NAMES:
            values = self.arch.search[name]
            place = values.index(wanted[name]) if wanted[name] in values else 0
            ranges.append(sorted(values, key=lambda value: abs(values.index(value) - place)))
        return self._walk(ranges, Counter())

    @cached_property
    def _enumerated(self) -> tuple[tuple[Knobs, ...], Counter[str]]:
        reasons: Counter[str] = Counter()
        return tuple(self._walk([self.arch.search[name] for name in KNOB_NAMES], reasons)), reasons

    @cached_property
    def _rules(self) -> list[list[Rule]]:
        """For each knob the rules that can be asked once it is chosen."""
        last = [max(KNOB_NAMES.index(name) for name in rule.reads) for rule in RULES]
        return [[rule for rule, at in zip(RULES, last, strict=True) if at == i] for i in range(len(KNOB_NAMES))]

    def _walk(self, ranges: Sequence[Sequence[Any]], reasons: Counter[str]) -> Iterator[Knobs]:
        """The legal choices, knob by knob in the order of `ranges`. Each rule is asked as soon as the knobs it reads
        are chosen, so a dead branch is counted, not walked."""
        below = [prod(map(len, ranges[i + 1 :])) for i in range(len(ranges))]

        def walk(knobs: Knobs, level: int) -> Iterator[Knobs]:
            if level == len(KNOB_NAMES):
                yield knobs
                return
            for value in ranges[level]:
                chosen = replace(knobs, **{KNOB_NAMES[level]: value})
                why = next((w for rule in self._rules[level] if (w := rule.broken(self._context, chosen))), None)
                if why:
                    reasons[why] += below[level]
                else:
                    yield from walk(chosen, level + 1)

        return walk(Knobs(), 0)
