"""The search space of a problem on an arch: all legal knobs, how to get near them, and where to start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from hadagen.arch import Arch
from hadagen.errors import UsageError
from hadagen.knobs import KNOB_NAMES, Knobs, plan_of
from hadagen.legality import RULES, SHAPE, Context, Rule
from hadagen.plan import PACKED, Load, Plan
from hadagen.problem import DType, Problem

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
    context = Context(problem, arch)
    for rule in RULES:
        if why := rule.broken(context, knobs):
            raise UsageError(f"{problem.name} with {knobs}: {why}")
    return plan_of(problem, knobs, starts_early="dependent_launch" in arch.features)


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
        self._context = Context(problem, arch)

    @cached_property
    def legal(self) -> tuple[Knobs, ...]:
        return self._enumerated[0]

    def report(self) -> SpaceReport:
        legal, reasons = self._enumerated
        total = prod(len(self.arch.search[name]) for name in KNOB_NAMES)
        return SpaceReport(total, len(legal), dict(reasons.most_common()))

    def seeds(self) -> list[Knobs]:
        """Legal choices that tend to be good, for a search to start from: each tile shape, with a block per tile and
        with a persistent grid that has the next tile under way; shapes of 16 chunks in a block first. Float32 needs
        three times the mma, so there each comes with shuffles too."""
        shapes = product(*(self.arch.search[name] for name in SHAPE))
        tiles = [Knobs.from_dict(PROVEN.to_dict() | dict(zip(SHAPE, shape, strict=True))) for shape in shapes]
        if self.problem.dtype is DType.FLOAT32:
            tiles = [replace(tile, low_bits=low_bits) for tile in tiles for low_bits in ("mma", "shuffle")]
        found: dict[Knobs, None] = {}
        for tile in sorted(tiles, key=lambda k: (k.cluster, abs(k.chunks * k.warps - 16), k.warps)):
            two_buffers = replace(tile, load="cp_async", grid="persistent", stages=2)
            one_buffer = replace(tile, exchange_rounds=2, load="bulk", grid="persistent")  # leaves it more room
            plain, two, one = map(self._of_shape, (tile, two_buffers, one_buffer))
            ahead = next((knobs for knobs in (two, one) if knobs and Load(knobs.load).staged), two)
            found |= dict.fromkeys(filter(None, (plain, ahead)))
        return list(found)

    def _of_shape(self, wanted: Knobs) -> Knobs | None:
        """The closest, where that keeps the shape of its tile."""
        knobs = self.closest(wanted)
        return knobs if knobs and shape_of(knobs) == shape_of(wanted) else None

    def closest(self, wanted: Knobs) -> Knobs | None:
        """The first of `nearest`; None where nothing is legal."""
        return next(self.nearest(wanted.to_dict()), None)

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
        chosen = Knobs()  # the one choice that changes along the way; rules read only what is chosen so far
        todo = [iter(ranges[0])]
        while todo:
            level = len(todo) - 1
            for value in todo[level]:
                object.__setattr__(chosen, KNOB_NAMES[level], value)
                for rule in self._rules[level]:
                    if why := rule.broken(self._context, chosen):
                        reasons[why] += below[level]
                        break
                else:
                    if level + 1 < len(ranges):
                        todo.append(iter(ranges[level + 1]))
                        break
                    yield copy(chosen)
            else:
                todo.pop()


def shape_of(knobs: Knobs) -> tuple[int, int, int]:
    return knobs.chunks, knobs.warps, knobs.cluster
