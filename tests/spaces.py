"""Search spaces on the one arch that tests use, each made once."""

from __future__ import annotations

from functools import cache

from hadagen.arch import load_arch
from hadagen.problem import Problem
from hadagen.space import Space

ARCH = load_arch("sm90")


@cache
def space_of(problem: Problem) -> Space:
    return Space(problem, ARCH)
