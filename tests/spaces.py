"""Search spaces on the one arch that tests use, each made once, and a few choices out of one."""

import random
from functools import cache
from itertools import product
from typing import Any

from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space
from hadagen.problem.problem import Problem

ARCH = load_arch("sm90")


@cache
def space_of(problem: Problem) -> Space:
    return Space(problem, ARCH)


@cache
def legal_in(problem: Problem) -> frozenset[Knobs]:
    return frozenset(space_of(problem).legal)


@cache
def seeds_of(problem: Problem) -> list[Knobs]:
    return space_of(problem).seeds()


def draw(problem: Problem, choose: random.Random, **wanted: Any) -> Knobs:
    """A random legal choice, as near as there is to what is `wanted` of some knobs. Far cheaper than a look at all."""
    values = {name: choose.choice(some) for name, some in ARCH.search.items()}
    return next(space_of(problem).nearest(values | wanted))


def families(problem: Problem, *names: str, **fixed: Any) -> list[Knobs]:
    """For each combination of values of the named knobs a choice that has it and the `fixed` knobs, if there is one
    near; the other knobs are random."""
    choose = random.Random(0)
    found = []
    for values in product(*(ARCH.search[name] for name in names)):
        family = fixed | dict(zip(names, values, strict=True))
        knobs = draw(problem, choose, **family)
        if {name: getattr(knobs, name) for name in family} == family:
            found.append(knobs)
    return found
