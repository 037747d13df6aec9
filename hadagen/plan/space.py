"""The search space of a problem on an arch: all legal knobs, the nearest to any others, and knobs to start with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product, zip_longest
from math import log2 as log2_of
from math import prod
from typing import Any, NamedTuple

from hadagen.errors import UsageError, shown
from hadagen.plan.arch import Arch
from hadagen.plan.knobs import (
    ALONE,
    HALF,
    KNOB_NAMES,
    LOAD,
    MATRIX_FIRST,
    STREAMED,
    TOGETHER,
    Knobs,
    KnobValue,
    plan_of,
)
from hadagen.plan.layout import CHUNK_BITS, log2
from hadagen.plan.legality import RULES, Context, Rule, Why, never_faster
from hadagen.plan.matrix_legality import MATRIX_RULES
from hadagen.plan.plan import Plan
from hadagen.plan.steps.base import FP16, PACKED, Draft, Footprint
from hadagen.plan.steps.matrix import OPERAND_SIDE
from hadagen.plan.steps.memory import Load
from hadagen.plan.steps.product import PRODUCT_COLUMNS
from hadagen.problem.problem import DType, Numerics, Problem

# Knobs for `fast` that proved good on H100 and H200 for all tiles. Where they are not legal, the nearest are used.
PROVEN = Knobs(far_bits="lanes", far_lanes="mma", shuffles=HALF, accumulator=PACKED, shared_layout="swizzled")
# Knobs that proved good on an H200 with a matrix.
PROVEN_WITH_MATRIX = Knobs(min_blocks=4, ahead=8, trigger="load")
PROVEN_WITH_PRODUCT = Knobs(first=MATRIX_FIRST, load="cp_async", grid="persistent")
SHAPE = ("chunks", "warps", "cluster")  # of a tile
LEAST_CHUNKS = 8  # of a tile, even if its rows are shorter


def check_legal(problem: Problem, knobs: Knobs, arch: Arch) -> None:
    """Raises `UsageError` with the reason where the knobs are not legal for problem and arch."""
    for name in KNOB_NAMES:
        value = getattr(knobs, name)
        if value not in arch.search[name]:
            known = ", ".join(map(str, arch.search[name]))
            raise UsageError(f"knob {name} = {shown(value)} is not searched on {arch.name}; choose one of {known}")
    context = Context(problem, arch)
    for rule in rules_for(problem, arch):
        if why := rule.broken(context, knobs):
            raise UsageError(f"{problem.key} with {knobs}: {why}")


def rules_for(problem: Problem, arch: Arch) -> list[Rule]:
    """The rules that say which knobs are legal together, in the order in which the knobs are chosen."""
    matrix = problem.transform.has_matrix
    rules = [*(MATRIX_RULES if matrix else RULES), *never_faster(arch, with_matrix=matrix)]
    return sorted(rules, key=lambda rule: KNOB_NAMES.index(rule.last))


def build_plan(problem: Problem, knobs: Knobs, arch: Arch) -> Plan:
    """The plan that the knobs mean. Raises `UsageError` with the reason where they are not legal for problem and arch;
    for those of a `Space`, which are, `plan_of` is faster."""
    check_legal(problem, knobs, arch)
    return plan_of(problem, knobs, starts_early=arch.starts_early)


@dataclass(frozen=True)
class SpaceReport:
    """The number of choices, of legal choices, and of choices that each reason rules out (the first that applies)."""

    total: int
    legal: int
    reasons: dict[str, int]


_TILE_KNOBS = KNOB_NAMES.index("block_bits")  # so many knobs say what a block holds


class _TileOfRow(NamedTuple):
    """threads: of a block. blocks: how many of them an SM holds at once, as far as known without a compiler."""

    draft: Draft
    threads: int
    blocks: int
    knobs: Knobs


class Space:
    """All legal knobs of a problem on an arch."""

    def __init__(self, problem: Problem, arch: Arch) -> None:
        self.problem = problem
        self.arch = arch
        self._context = Context(problem, arch)
        self._barren: set[tuple[KnobValue, ...]] = set()  # the first knobs, where no others make them legal

    @cached_property
    def legal(self) -> tuple[Knobs, ...]:
        return self._enumerated[0]

    def report(self) -> SpaceReport:
        legal, reasons = self._enumerated
        total, found = prod(len(self.arch.search[name]) for name in KNOB_NAMES), Counter[str]()
        for (_, why), count in reasons.items():
            found[why] += count
        return SpaceReport(total, len(legal), dict(found.most_common()))

    def why_none(self) -> str | None:
        """Why no knobs are legal; None if some are. One reason that rules out all choices is given with its advice,
        which is then about the problem. Of several reasons it is the one that most choices meet of those with which
        the rules got furthest, without its advice on knobs."""
        reasons: Counter[tuple[int, str]] = Counter()
        wanted = PROVEN_WITH_PRODUCT if self.problem.transform.has_matrix else self._proven  # often legal at once
        if next(self._walk([self._by_distance(name, getattr(wanted, name)) for name in KNOB_NAMES], reasons), None):
            return None
        furthest = max(level for level, _ in reasons)
        _, why = max(reasons, key=lambda each: (each[0] == furthest, reasons[each]))
        return why if len(reasons) == 1 else why.partition(" (")[0]

    def seeds(self) -> list[Knobs]:
        """Legal choices that tend to be good, for the start of a search.

        There are up to three for each tile shape: with a block per tile, with blocks of a cluster that load whole rows,
        and with a persistent grid that loads the next tile early. Cluster sizes take turns. Of each size, tiles of one
        row come first, or of `LEAST_CHUNKS` if rows are short, with about as many chunks as warps. Float32 goes through
        an mma in parts, so there each choice comes with shuffles too. With a matrix, `_seeds_with_matrix` says which.
        """
        if self.problem.transform.has_matrix:
            return self._seeds_with_matrix()
        shapes: dict[int, list[Knobs]] = defaultdict(list)
        for shape in product(*(self.arch.search[name] for name in SHAPE)):
            tile = Knobs.from_dict(self._proven.to_dict() | dict(zip(SHAPE, shape, strict=True)))
            shapes[tile.cluster].append(tile)
        in_turn = zip_longest(*(sorted(shapes[cluster], key=self._oddity) for cluster in sorted(shapes)))
        kinds = ("mma", "shuffle") if self.problem.io.input is DType.FLOAT32 else (self._proven.low_bits,)
        found: dict[Knobs, None] = {}
        for shaped, low_bits in product(filter(None, chain.from_iterable(in_turn)), kinds):
            tile = replace(shaped, low_bits=low_bits)
            two_buffers = replace(tile, load="cp_async", grid="persistent", stages=2)
            one_buffer = replace(tile, exchange_rounds=2, load="bulk", grid="persistent")  # leaves more shared memory
            plain, two, one = (self._keeping(wanted, *SHAPE) for wanted in (tile, two_buffers, one_buffer))
            whole = self._whole_rows(tile)
            looping = [knobs for knobs in (two, one) if knobs and knobs.grid == "persistent"]
            ahead = next((knobs for knobs in looping if Load(knobs.load).staged), looping[0] if looping else None)
            found |= dict.fromkeys(filter(None, (plain, whole, ahead)))
        return list(found)

    def _seeds_with_matrix(self) -> list[Knobs]:
        """For each number of chunks and the two largest numbers of slabs that leave few warps without rows, loaded
        plainly and in bulk, with about four warps in a block. A tile is one row, or 2048 elements where rows are
        shorter. Then for each number of stages and each fold, with the matrix first, multiplied by in each way, and by
        the blocks of a cluster."""
        operands = -(-self.problem.order // OPERAND_SIDE)
        known = (5, 3, 2, 1) if operands == 5 else (3, 2, 1)
        slabs = [slabs for slabs in known if 5 * (-operands % slabs) <= operands][:2]
        rows = 1 << max(0, log2(LEAST_CHUNKS) + CHUNK_BITS - self.problem.n.bit_length() + 1)
        loads = ("plain", "bulk") if self.problem.length > 1 else ("cp_async",)
        found: dict[Knobs, None] = {}
        for held, chunks, load in product(slabs, (4, 2, 8, 1), loads):
            warps = 1 << max(0, round(log2_of(4 * held / operands)))
            tile = replace(PROVEN_WITH_MATRIX, chunks=chunks, slabs=held, warps=warps, rows=rows, load=load)
            if knobs := self._keeping(tile, "chunks", "slabs", "load"):
                found[knobs] = None
        ways = [*product((TOGETHER, STREAMED, ALONE), (3, 2, 4, 1), (1,)), *product((ALONE, TOGETHER), (1,), (2, 4))]
        for (products, stages, cluster), fold in product(ways, (0, 1, 2, 3)):
            few = max(1, PRODUCT_COLUMNS[0] // max(1, self.problem.length >> fold))
            boxes = replace(PROVEN_WITH_PRODUCT, products=products, stages=stages, cluster=cluster, fold=fold, rows=few)
            if knobs := self._keeping(boxes, "cluster", "first", "fold", "products", "stages"):
                found[knobs] = None
        return list(found)

    @property
    def _proven(self) -> Knobs:
        """Knobs that proved good for this problem. Far bits go through an mma if it takes them in 16 bits. If it takes
        them in parts, butterflies are faster."""
        if self.problem.io.numerics is Numerics.FAST:
            return PROVEN
        if self.problem.io.input is DType.BFLOAT16:
            return replace(PROVEN, mma_carrier=FP16)
        # tf32 is not legal for float16; split is the nearest that is.
        return replace(PROVEN, mma_carrier="tf32", far_lanes="shuffle")

    def _oddity(self, knobs: Knobs) -> tuple[int, ...]:
        """The distance of the shape of a tile from a shape that tends to be good."""
        chunks, warps, cluster = map(log2, shape_of(knobs))
        wanted = log2(max(LEAST_CHUNKS, self.problem.n >> CHUNK_BITS))
        return abs(chunks + warps + cluster - wanted), abs(chunks - warps), warps

    def _whole_rows(self, tile: Knobs) -> Knobs | None:
        """The closest knobs to a tile with whole rows, by multicast; if that is not legal, loaded by each block."""
        kept = (*SHAPE, "block_bits", "low_bits")  # float32 is not summed over blocks by mma
        each = replace(tile, block_bits=LOAD)
        return self._keeping(replace(each, load="multicast"), *kept, "load") or self._keeping(each, *kept)

    def _keeping(self, wanted: Knobs, *names: str) -> Knobs | None:
        """The closest legal knobs, or None if they differ in one of `names`."""
        knobs = self.closest(wanted)
        return knobs if knobs and all(getattr(knobs, name) == getattr(wanted, name) for name in names) else None

    def neighbors(self, knobs: Knobs) -> Iterator[Knobs]:
        """The legal choices with one knob changed, and others only where the rules then demand it: the nearest value of
        each knob, then the next nearest, and so on. Some come twice."""
        others = []
        for name in KNOB_NAMES:
            others.append([(name, value) for value in self._by_distance(name, getattr(knobs, name))[1:]])
        for name, value in filter(None, chain.from_iterable(zip_longest(*others))):
            if found := self._keeping(Knobs.from_dict({**knobs.to_dict(), name: value}), name):
                yield found

    def closest(self, wanted: Knobs) -> Knobs | None:
        """The first of `nearest`; None if no knobs are legal."""
        return next(self.nearest(wanted.to_dict()), None)

    def for_a_row(self, wanted: Knobs, rows: int) -> Knobs:
        """`wanted` with the tile, the loads and the `min_blocks` that were fast on an H200, for rows with one scale
        whose length is no power of two; `wanted` for all other problems.

        Where there are more rows than SMs, as many rows as possible are on an SM at once. Behind a prologue, which is
        arithmetic, as many threads as possible are, of at least two rows if they fit. If one row fits in registers and
        two in shared memory, a block loads the next row meanwhile. Where there are fewer rows, a block has about 512
        threads. No tile with one chunk was measured. docs/internals/experiments.md says how fast these tiles are.
        """
        problem = self.problem
        is_power_of_two = problem.room & (problem.room - 1) == 0 and not problem.is_padded
        if problem.transform.has_matrix or is_power_of_two or not (tiles := list(self._tiles_of_a_row(wanted))):
            return wanted
        tiles = [tile for tile in tiles if tile.knobs.chunks > 1] or tiles
        if rows <= self.arch.model.sms:
            return min(tiles, key=lambda tile: abs(log2_of(tile.threads / 512))).knobs
        if problem.prologue:
            found = max(tiles, key=lambda tile: (tile.blocks > 1, tile.blocks * tile.threads, tile.blocks))
        else:
            found = max(tiles, key=lambda tile: (tile.blocks, tile.threads))
        fewest = min(tiles, key=lambda tile: tile.threads)
        ahead = replace(fewest.draft, steps=(Load("cp_async", 2),), persistent=True)
        fits = Footprint(ahead).shared_bytes <= self.arch.limits.shared_per_block
        if found.blocks > 1 or not fits or not ahead.features <= self.arch.features:
            return found.knobs
        return replace(fewest.knobs, load="cp_async", grid="persistent", stages=2)

    def _tiles_of_a_row(self, wanted: Knobs) -> Iterator[_TileOfRow]:
        """`wanted` with each tile of one row that a block holds, loaded plainly. An H of up to 512 elements lies in the
        chunks of a warp, so that nothing crosses warps but the largest magnitude."""
        plainly = replace(wanted, cluster=1, load="plain", grid="tiles", stages=1, ahead=0)
        for draft in self._context.held_tiles:
            chunks, warps = 1 << draft.chunk_bits, 1 << draft.warp_bits
            if chunks << CHUNK_BITS < min(self.problem.n, 512):
                continue
            threads = 32 * draft.warps
            blocks = self.arch.limits.resident_blocks(threads, 0, Footprint(draft).registers(wide=True))
            held = max(value for value in map(int, self.arch.search["min_blocks"]) if value <= blocks)
            yield _TileOfRow(draft, threads, blocks, replace(plainly, chunks=chunks, warps=warps, min_blocks=held))

    def nearest(self, wanted: Mapping[str, Any]) -> Iterator[Knobs]:
        """All legal choices, nearest to `wanted` first: knob by knob, each as near in its range as earlier knobs allow.

        A value that is not searched counts as the first of its range.
        """
        return self._walk([self._by_distance(name, wanted[name]) for name in KNOB_NAMES], None)

    def _by_distance(self, name: str, wanted: Any) -> list[KnobValue]:
        """The values of a knob, nearest to the wanted one first."""
        values = self.arch.search[name]
        place = values.index(wanted) if wanted in values else 0
        return sorted(values, key=lambda value: abs(values.index(value) - place))

    @cached_property
    def _enumerated(self) -> tuple[tuple[Knobs, ...], Counter[tuple[int, str]]]:
        reasons: Counter[tuple[int, str]] = Counter()
        return tuple(self._walk([self.arch.search[name] for name in KNOB_NAMES], reasons)), reasons

    @cached_property
    def _rules(self) -> dict[tuple[str, KnobValue], list[Why]]:
        """(Knob, value) → the rules that can be checked once the knob has this value."""
        found: dict[tuple[str, KnobValue], list[Why]] = defaultdict(list)
        for rule in rules_for(self.problem, self.arch):
            for value in rule.values:
                found[rule.last, value].append(rule.why)
        return found

    def _walk(self, ranges: Sequence[Sequence[Any]], reasons: Counter[tuple[int, str]] | None) -> Iterator[Knobs]:
        """The legal choices, knob by knob in the order of `ranges`. Each rule is checked as soon as the knobs that it
        needs are chosen. So the choices of an illegal branch are counted, not walked: in `reasons`, by the number of
        knobs before the one that the rule is about, and by the reason. Without `reasons`, first
        knobs that were found to have no legal choices are not tried again."""
        below = [prod(map(len, ranges[i + 1 :])) for i in range(len(ranges))]
        rules = self._rules
        chosen = Knobs()  # changed in place; rules do not look at knobs that are not chosen yet
        todo, before, count = [iter(ranges[0])], [0], 0  # before: the count of legal choices when a level began
        while todo:
            level = len(todo) - 1
            name = KNOB_NAMES[level]
            for value in todo[level]:
                object.__setattr__(chosen, name, value)
                for ask in rules[name, value]:
                    if why := ask(self._context, chosen):
                        if reasons is not None:
                            reasons[level, why] += below[level]
                        break
                else:
                    if reasons is None and level < _TILE_KNOBS and _first_of(chosen, level + 1) in self._barren:
                        continue
                    if level + 1 < len(ranges):
                        todo.append(iter(ranges[level + 1]))
                        before.append(count)
                        break
                    count += 1
                    found = object.__new__(Knobs)  # a copy, several times as fast as copy.copy
                    vars(found).update(vars(chosen))
                    yield found
            else:
                todo.pop()
                if before.pop() == count and level <= _TILE_KNOBS:
                    self._barren.add(_first_of(chosen, level))


def _first_of(knobs: Knobs, count: int) -> tuple[KnobValue, ...]:
    return tuple(getattr(knobs, name) for name in KNOB_NAMES[:count])


def shape_of(knobs: Knobs) -> tuple[int, int, int]:
    return knobs.chunks, knobs.warps, knobs.cluster
