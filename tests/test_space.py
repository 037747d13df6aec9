"""The search space: every legal choice is a plan of its own, every illegal one has a reason."""

from __future__ import annotations

import random
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadagen.arch import load_arch
from hadagen.errors import UsageError
from hadagen.problem import DType, Numerics, Problem
from hadagen.space import KNOB_NAMES, Knobs, Space, build_plan, space_of

ARCH = load_arch("sm90")
PROBLEMS = [Problem(n, DType.FLOAT16, numerics) for n in (2, 32, 256, 4096, 32768) for numerics in Numerics]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_no_two_legal_choices_mean_the_same_plan(problem: Problem) -> None:
    legal = random.Random(1).sample(space_of(problem, "sm90").legal, 400)
    digests = {build_plan(problem, knobs, ARCH).digest for knobs in legal}
    assert len(digests) == len(legal)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_every_choice_is_legal_or_has_a_reason(problem: Problem) -> None:
    report = space_of(problem, "sm90").report()
    assert report.total == prod(len(ARCH.search[name]) for name in KNOB_NAMES)
    assert report.legal + sum(report.reasons.values()) == report.total
    assert report.legal > 100


@given(st.sampled_from(PROBLEMS), st.data())
@settings(max_examples=100)
def test_a_random_choice_builds_exactly_if_it_is_legal(problem: Problem, data: st.DataObject) -> None:
    values = {name: data.draw(st.sampled_from(ARCH.search[name]), label=name) for name in KNOB_NAMES}
    knobs = Knobs.from_dict(values)
    if knobs in set(space_of(problem, "sm90").legal):
        build_plan(problem, knobs, ARCH)
    else:
        with pytest.raises(UsageError, match=problem.name):
            build_plan(problem, knobs, ARCH)


@given(st.sampled_from(PROBLEMS), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_walking_the_choices_ends_in_a_legal_one(problem: Problem, pick: random.Random) -> None:
    space = space_of(problem, "sm90")
    prefix: dict[str, object] = {}
    while True:
        name, values = space.choices(prefix)
        if name is None:
            break
        assert values, prefix
        prefix[name] = pick.choice(values)
    assert Knobs.from_dict(prefix) in set(space.legal)
    assert space.choices({KNOB_NAMES[0]: "no such value"})[1] == ()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_seeds_and_neighbours_are_legal(problem: Problem) -> None:
    space = space_of(problem, "sm90")
    legal = set(space.legal)
    seeds = space.seeds()
    assert seeds and set(seeds) <= legal and len(set(seeds)) == len(seeds)
    near = space.neighbours(seeds[0])
    assert near and set(near) <= legal and seeds[0] not in near


def test_bad_knobs_are_named() -> None:
    problem = Problem(4096, DType.FLOAT16, Numerics.FAST)
    with pytest.raises(UsageError, match="knob 'color' is not known"):
        Knobs.from_dict({"color": 3})
    with pytest.raises(UsageError, match="knob chunks = 3 is not searched"):
        build_plan(problem, Knobs(chunks=3), ARCH)
    with pytest.raises(UsageError, match="shorter than a row"):
        build_plan(problem, Knobs(chunks=1), ARCH)


def test_an_arch_without_a_feature_never_uses_it() -> None:
    import dataclasses

    bare = dataclasses.replace(ARCH, features=frozenset())
    legal = Space(Problem(1024, DType.FLOAT16, Numerics.FAST), bare).legal
    assert legal
    assert {k.low_bits for k in legal} == {"shuffle"}
    assert {k.load for k in legal} == {"plain", "no_allocate"}
    assert {k.cluster for k in legal} == {1}
