"""Rows of 65536 and 131072, which are spread over a cluster: they have winners, and these are right."""

from dataclasses import replace

import pytest
from spaces import space_of

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import verify
from hadagen.errors import UsageError
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import build_plan
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.problem.regimes import Destination
from hadagen.tuning_db.bundle import Bundle, BundleEntry, shipped

ARCH = load_arch("sm90")
PROBLEMS = list(
    dict.fromkeys(
        Problem.of(n, dtype, numerics) for n in (1 << 16, 1 << 17) for dtype in DType for numerics in Numerics
    )
)


def winners(problem: Problem) -> list[BundleEntry]:
    """In place, by ascending elements."""
    entries = Bundle.open(shipped()["sm90"]).entries(problem)
    return [entry for entry in entries if entry.destination is Destination.IN_PLACE and not entry.portable]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_what_is_shipped_for_long_rows_is_right(problem: Problem) -> None:
    """Or what is nearest to it today, where a value of its knobs is gone."""
    few, *_, many = winners(problem)
    for knobs in dict.fromkeys(space_of(problem).closest(Knobs.like(each.knobs)) for each in (few, many)):
        assert knobs
        plan = build_plan(problem, knobs, ARCH)
        assert max(verify(problem, render(plan), rows=2).values()) <= problem.error_bound
    assert winners(problem.with_io(rows=Rows.PITCHED))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_fast_rounds_no_more_often_than_at_32768(dtype: DType) -> None:
    assert len({Problem.of(n, dtype, Numerics.FAST).error_bound for n in (1 << 15, 1 << 16, 1 << 17)}) == 1


def test_more_warps_than_lanes_have_no_levels() -> None:
    """One lane reads the level of one warp."""
    problem = Problem.of(1 << 16, DType.BFLOAT16)
    knobs = Knobs(
        chunks=8,
        warps=16,
        cluster=2,
        far_bits="lanes",
        far_lanes="mma",
        mma_carrier="fp16",
        butterfly_carrier="fp32",
        exchange_carrier="packed",
    )
    build_plan(problem, knobs, ARCH)
    with pytest.raises(UsageError, match="each lane of a warp reads the level of one"):
        build_plan(problem, replace(knobs, chunks=4, warps=32), ARCH)
