"""Kernels of transforms with a matrix or signs: their plans in float64, and the emitted source on the emulator."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
from rounding import rounding_bound
from spaces import ARCH, draw, space_of

from hadagen.arch import load_arch
from hadagen.codegen import render
from hadagen.emulator import HostModule, compile_host, verify
from hadagen.errors import UsageError
from hadagen.knobs import Knobs
from hadagen.launch import Source, params_for
from hadagen.plan import Plan, interpret
from hadagen.problem import Problem
from hadagen.reference import hadamard, kernel_operands, transform, verification_operands
from hadagen.space import Space, build_plan, rules_for

# Each has what others lack: a matrix of several warps, of one slab that is not full, of 16 rows exactly; rows of H of
# 8, 16, … columns, of one, and of more than mma transforms; signs; an odd order; sums of few values.
WITH_MATRIX = [
    "n14336-k56-float16-fast",
    "n14336-k112-bfloat16-accurate",
    "n12288-k48-float16-accurate",
    "n3584-k28-signed-bfloat16-fast",
    "n11008-k172-float16-fast",
    "n4480-k140-bfloat16-accurate",
    "n512-k16-float16-accurate",
    "n192-k12-signed-float16-fast",
    "n96-k12-bfloat16-accurate",
    "n112-k112-signed-float16-accurate",
    "n80-k80-bfloat16-fast",
    "n48-k3-float16-accurate",
    "n112-k7-bfloat16-fast",
]
SIGNED = [
    "n2-signed-float16-fast",
    "n4-signed-float32-accurate",
    "n64-signed-bfloat16-accurate",
    "n512-signed-float16-fast",
    "n1024-signed-float32-accurate-pitched",
    "n2048-signed-bfloat16-fast-pitched",
    "n8192-signed-float16-accurate",
]
VARIANTS = 5


def chosen(key: str) -> list[Knobs]:
    choose = random.Random(key)
    return list(dict.fromkeys(draw(Problem.parse(key), choose) for _ in range(VARIANTS)))


def plans(key: str) -> list[Plan]:
    return [build_plan(Problem.parse(key), knobs, ARCH) for knobs in chosen(key)]


@pytest.fixture(scope="module")
def sources() -> dict[str, list[Source]]:
    return {key: [render(plan) for plan in plans(key)] for key in (*WITH_MATRIX, *SIGNED)}


@pytest.fixture(scope="module")
def module(sources: dict[str, list[Source]]) -> HostModule:
    return compile_host([source for some in sources.values() for source in some])


@pytest.mark.parametrize("key", [*WITH_MATRIX, *SIGNED])
def test_plans_compute_the_transform(key: str) -> None:
    for plan in plans(key):
        problem, operands = plan.problem, verification_operands(plan.problem)
        x = np.random.default_rng(0).standard_normal((2 * plan.rows_per_tile, problem.n))
        wanted = transform(problem, x, 0.25, operands)
        assert np.allclose(interpret(plan, x, 0.25, operands), wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())
        assert plan.launch.params == params_for(problem)


@pytest.mark.parametrize("key", [*WITH_MATRIX, *SIGNED])
def test_kernels_are_right(key: str, sources: dict[str, list[Source]], module: HostModule) -> None:
    problem = Problem.parse(key)
    for number, source in enumerate(sources[key]):
        errors = verify(problem, source, module=module, in_place=number % 2 == 0, order_seed=number % 3)
        for name, error in errors.items():
            assert error <= rounding_bound(problem), (source.entry, name)


def test_signs_may_be_left_out(sources: dict[str, list[Source]], module: HostModule) -> None:
    for key in ("n3584-k28-signed-bfloat16-fast", "n512-signed-float16-fast"):
        problem = Problem.parse(key)
        x = np.random.default_rng(0).integers(0, 1 << 14, problem.n, np.uint16)  # bits of small finite numbers
        plain = {name: each for name, each in verification_operands(problem).items() if name == "matrix"}
        none = {**kernel_operands(problem, plain), "signs_before": 0, "signs_after": 0}
        positive = np.zeros(problem.n // 8, np.uint8)
        for source in sources[key]:
            with_none, with_positive = np.zeros_like(x), np.zeros_like(x)
            module.run(source.entry, source.launch, x, with_none, scale=0.125, operands=none)
            given = {**none, "signs_before": positive, "signs_after": positive}
            module.run(source.entry, source.launch, x, with_positive, scale=0.125, operands=given)
            assert np.array_equal(with_none, with_positive)


def test_staged_columns_meet_no_bank_conflicts(sources: dict[str, list[Source]], module: HostModule) -> None:
    """Reads of X as columns and of the product as rows, and writes of the product. Only zeros that stand for missing
    rows may meet another row."""
    for key in ("n14336-k56-float16-fast", "n3584-k28-signed-bfloat16-fast", "n192-k12-signed-float16-fast"):
        problem = Problem.parse(key)
        operands = kernel_operands(problem, verification_operands(problem))
        for source in sources[key]:
            x = np.zeros(source.launch.tile_elements, np.uint16)
            report = module.run(source.entry, source.launch, x, x.copy(), scale=1.0, operands=operands)
            assert report.bank_conflicts <= report.wavefronts // 5, source.entry
            assert not report.complaint


def test_every_value_of_the_knobs_is_tried() -> None:
    some = [knobs for key in WITH_MATRIX for knobs in chosen(key)]
    for name in ("rows", "slabs", "grid", "stages", "exchange_carrier"):
        tried = {getattr(knobs, name) for knobs in some}
        assert len(tried) >= min(4, len(ARCH.search[name])) - (name == "slabs"), name


@pytest.mark.parametrize(
    ("key", "changes", "why"),
    [
        ("n14336-k28-float32-accurate", {}, "an mma multiplies 16-bit values by a matrix"),
        ("n14336-k28-float16-fast-pitched", {}, "rows must be contiguous"),
        ("n112-k28-float16-fast", {}, "n must be a multiple of 8, and n / k 1 or more than 4"),
        ("n24-k3-float16-fast", {}, "k must be even"),
        ("n14336-k28-float16-fast", {"chunks": 1}, "more than 7 bits would be left for mma"),
        ("n14336-k28-float16-fast", {"chunks": 4, "slabs": 3}, "the matrix has fewer rows"),
        ("n14336-k28-float16-accurate", {"chunks": 4}, "accurate may not round after the matrix"),
        ("n14336-k28-float16-fast", {"chunks": 4, "load": "plain"}, "load must be cp_async"),
        ("n14336-k28-float16-fast", {"chunks": 4, "low_bits": "shuffle"}, "a kernel with a matrix has no low_bits"),
        ("n14336-k28-float16-fast", {"chunks": 4, "rows": 16}, "bytes of shared memory per block"),
        ("n192-k12-float16-fast", {"warps": 8}, "some warps would have nothing to multiply"),
        ("n80-k80-float16-fast", {"rows": 8}, "an mma takes 16 rows at once"),
        ("n56-k7-float16-fast", {}, "k must be even"),
        ("n112-k7-float16-fast", {}, "sums of so few values round badly"),
        ("n4096-float16-fast", {"rows": 2}, "there is no matrix"),
    ],
)
def test_what_is_not_legal_says_why(key: str, changes: dict[str, int | str], why: str) -> None:
    problem = Problem.parse(key)
    knobs = replace(Knobs(load="cp_async" if problem.order > 1 else "plain"), **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=re.escape(why)):
        build_plan(problem, knobs, ARCH)


@pytest.mark.parametrize("key", ["n14336-k28-float16-fast", "n192-k12-bfloat16-accurate"])
def test_legal_choices_mean_different_plans_and_fit(key: str) -> None:
    problem = Problem.parse(key)
    legal = space_of(problem).legal
    some = random.Random(0).sample(legal, min(60, len(legal)))
    made = [build_plan(problem, knobs, ARCH) for knobs in some]
    assert len({plan.digest for plan in made}) == len(made)
    assert all(plan.launch.shared_bytes <= ARCH.limits.shared_per_block for plan in made)
    assert all(plan.launch.threads <= ARCH.limits.threads_per_block for plan in made)
    assert space_of(problem).seeds()
    assert {rule.last for rule in rules_for(problem)} <= set(ARCH.search)


def test_an_arch_without_asynchronous_copies_has_no_kernels_with_a_matrix() -> None:
    assert not Space(Problem.parse("n14336-k28-float16-fast"), load_arch("sm75")).legal


def test_a_packed_matrix_is_that_of_the_mma() -> None:
    problem = Problem.of(96, "float16", order=12)
    matrix = np.arange(144).reshape(12, 12) % 3 - 1
    packed = kernel_operands(problem, {"matrix": matrix})["matrix"].reshape(32, 4, 2)
    for lane in range(32):
        for word in range(4):
            for half in range(2):
                row, column = lane // 4 + word % 2 * 8, lane % 4 * 2 + half + word // 2 * 8
                entry = matrix[row, column] if max(row, column) < 12 else 0
                assert packed[lane, word, half] == {-1: 0xBC, 0: 0, 1: 0x3C}[entry]


def test_the_reference_is_a_product_of_matrices() -> None:
    problem = Problem.of(40, "float32", order=5, signed=True)
    operands = verification_operands(problem)
    before, after = (
        1.0 - 2.0 * np.unpackbits(operands[name], count=40, bitorder="little")
        for name in ("signs_before", "signs_after")
    )
    whole = np.diag(before) @ np.kron(operands["matrix"], hadamard(np.eye(8))).T @ np.diag(after)
    x = np.random.default_rng(0).standard_normal((3, 40))
    assert np.allclose(transform(problem, x, 0.5, operands), 0.5 * x @ whole)
