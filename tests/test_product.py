"""Kernels that multiply by the matrix first: their plans in float64, and the emitted source on the emulator."""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run, sentence, succeed
from real_compilers import is_there, needs_compiler, needs_nvrtc
from sample_bundle import write_trials
from sample_trials import make_kernel, make_timing, make_trial
from slow import cases_of
from spaces import ARCH
from test_quantizer import TYPES
from test_quantizing_kernels import check, emulated

from hadagen.compiler import recipes
from hadagen.compiler.cache import KernelCache
from hadagen.compiler.codegen import render
from hadagen.compiler.compilers import COMPILERS, Ptxas
from hadagen.compiler.cubin import is_cubin
from hadagen.compiler.emulator import HostModule, compile_host, verify
from hadagen.compiler.ptx_version import lowered
from hadagen.compiler.recipes import Recipe, closest_recipe, image_of, is_recipe_of
from hadagen.compiler.toolchain import BuildFailure, Toolchain, assembled
from hadagen.errors import UsageError
from hadagen.plan.arch import Arch, load_arch
from hadagen.plan.knobs import MATRIX_FIRST, Knobs
from hadagen.plan.plan import Plan, interpret
from hadagen.plan.space import Space, build_plan
from hadagen.plan.steps.base import roundings
from hadagen.plan.steps.product import PRODUCT_COLUMNS, BoxProduct, Product, WarpProduct
from hadagen.plan.steps.right import RightProduct
from hadagen.problem.bits import decode
from hadagen.problem.formats import Element
from hadagen.problem.launch import Source
from hadagen.problem.operands import (
    LIFT,
    kernel_operands,
    pack_real,
    pack_right,
    rows_of_right,
    verification_operands,
)
from hadagen.problem.problem import ACCURATE_BOUND, RIGHT_ORDERS, DType, Numerics, Problem
from hadagen.problem.regimes import Cache, element_buckets
from hadagen.problem.target import known_archs
from hadagen.problem.trial import knobs_key
from hadagen.runtime.operands.given import as_matrices
from hadagen.runtime.operands.packed import in_rows
from hadagen.truth.reference import transform
from hadagen.tuner.estimate import shortlist
from hadagen.tuner.transfer import estimated_winners
from hadagen.tuning_db.bundle import Bundle


@dataclass(frozen=True)
class Choice:
    """A problem, and a choice for it."""

    key: str
    fold: int
    stages: int
    rows: int = 1
    products: str = "together"
    cluster: int = 1

    def __str__(self) -> str:
        how = f", {self.products.replace('_', ' ')}" * (self.products != "together")
        how += f", {self.cluster} blocks" * (self.cluster > 1)
        return f"{self.key}, {self.rows} rows, fold {self.fold}, {self.stages} stages{how}"

    @property
    def problem(self) -> Problem:
        return Problem.parse(self.key)

    @property
    def plan(self) -> Plan:
        knobs: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "key"}
        knobs["grid"] = "tiles" if self.cluster > 1 else "persistent"
        return build_plan(self.problem, product_first(**knobs), BLACKWELL if self.products == "alone" else ARCH)


BLACKWELL = load_arch("sm100")  # which has no wgmma


def product_first(**knobs: Any) -> Knobs:
    return replace(Knobs(first=MATRIX_FIRST, load="cp_async", grid="persistent", stages=3), **knobs)


# Every number of columns with every fold; matrices of whole operands and others, that fill all warps and not; rows of
# every length that share a product.
CHOICES = [
    Choice("n768-k12-bfloat16-accurate", 0, 2),
    Choice("n448-k7-float16-accurate", 0, 4),
    Choice("n4096-k64-float16-fast", 0, 3),
    Choice("n11008-k172-signed-float16-accurate", 0, 3),
    Choice("n10240-k80-signed-bfloat16-fast", 0, 4),
    Choice("n7168-k28-float16-accurate", 0, 4),
    Choice("n1536-k12-signed-bfloat16-fast", 1, 4),
    Choice("n4096-k16-float16-accurate", 1, 2),
    Choice("n20480-k40-bfloat16-accurate", 1, 2),
    Choice("n3072-k12-signed-float16-fast", 2, 2),
    Choice("n14336-k28-bfloat16-accurate", 2, 3),
    Choice("n12288-k12-signed-float16-accurate", 2, 4),
    Choice("n6144-k12-bfloat16-fast", 3, 3),
    Choice("n20480-k20-signed-float16-accurate", 3, 2),
    Choice("n24576-k12-bfloat16-accurate", 3, 4),
    Choice("n96-k12-signed-bfloat16-accurate", 0, 3, rows=32),
    Choice("n112-k7-float16-fast", 0, 2, rows=4),
    Choice("n640-k20-bfloat16-accurate", 0, 4, rows=8),
    Choice("n768-k12-signed-float16-accurate", 0, 3, rows=2),
    Choice("n192-k12-bfloat16-fast", 1, 2, rows=16),
    Choice("n384-k12-signed-float16-accurate", 2, 3, rows=8),
    Choice("n896-k28-bfloat16-accurate", 1, 3, rows=4),
    Choice("n3072-k12-float16-accurate", 3, 2, rows=4),
    Choice("n11008-k172-bfloat16-fast", 0, 4, products="in_turns"),
    Choice("n7168-k28-signed-float16-accurate", 2, 2, 4, "in_turns"),
    Choice("n11008-k172-signed-bfloat16-accurate", 0, 3, products="ahead"),
    Choice("n1536-k12-float16-fast", 1, 4, products="ahead"),
    Choice("n96-k12-bfloat16-accurate", 0, 3, 8, "ahead"),
    Choice("n4096-k64-real-bfloat16-accurate", 0, 3, products="ahead"),
    Choice("n11008-k172-real-signed-float16-accurate", 0, 2),
    Choice("n5120-k20-real-bfloat16-fast", 2, 3),
    Choice("n448-k28-real-signed-bfloat16-accurate", 1, 2, rows=8),
    Choice("n1536-k12-real-float16-fast", 0, 4),
    Choice("n384-k12-real-signed-float16-accurate", 2, 3, rows=8),
    Choice("n8192-k128-real-bfloat16-accurate", 0, 3, products="in_turns"),
    Choice("n11008-k172-signed-float16-accurate", 0, 3, products="streamed"),
    Choice("n448-k7-float16-accurate", 0, 4, products="streamed"),
    Choice("n20480-k40-bfloat16-accurate", 1, 2, products="streamed"),
    Choice("n24576-k12-bfloat16-accurate", 3, 1, products="streamed"),
    Choice("n384-k12-real-signed-float16-accurate", 2, 3, 8, "streamed"),
    Choice("n192-k12-float16-fast", 1, 1, 16, "streamed"),
    Choice("n5120-k20-c256-real-float16-accurate", 0, 1, products="streamed"),
    Choice("n4096-k64-c64-real-bfloat16-accurate", 0, 3),
    Choice("n1792-k28-c64-real-signed-float16-fast", 0, 2, rows=2),
    Choice("n384-k12-c32-real-bfloat16-accurate", 0, 3, rows=4),
    Choice("n1536-k12-c128-real-signed-bfloat16-accurate", 0, 4),
    Choice("n5120-k20-c256-real-float16-accurate", 0, 2),
]
# Each has one more rounding: that of the entries of the matrix.
ROUNDED = [
    Choice("n11008-k172-real-signed-bfloat16-fast", 0, 3),
    Choice("n12288-k96-real-float16-fast", 1, 2),
    Choice("n1536-k192-real-bfloat16-fast", 0, 4, rows=8),
    Choice("n4096-k64-c64-real-signed-bfloat16-fast", 0, 2, products="alone"),  # of the second one
    Choice("n9216-k144-c64-real-bfloat16-fast", 0, 2),
]
CHOICES += [
    *(replace(each, products="alone") for each in CHOICES if each.products == "together"),
    Choice("n2560-k20-signed-bfloat16-accurate", 1, 1, products="alone"),
    Choice("n192-k12-float16-fast", 1, 1, rows=16, products="alone"),
    Choice("n4096-k64-real-signed-bfloat16-accurate", 0, 1),
    Choice("n11008-k172-signed-bfloat16-accurate", 0, 1, products="alone", cluster=2),
    Choice("n14336-k28-signed-float16-accurate", 2, 1, cluster=2),
    Choice("n11008-k172-bfloat16-accurate", 0, 1, products="streamed", cluster=2),
    Choice("n20480-k40-bfloat16-accurate", 3, 1, products="streamed", cluster=4),
    Choice("n9472-k148-float16-accurate", 0, 1, products="alone", cluster=4),
    Choice("n1536-k12-signed-float16-fast", 1, 1, products="alone", cluster=2),
    Choice("n14336-k28-bfloat16-accurate", 3, 1, products="alone", cluster=4),
    Choice("n4096-k64-real-signed-bfloat16-accurate", 0, 1, products="alone", cluster=4),
    Choice("n10240-k80-c128-real-signed-float16-accurate", 0, 1, products="alone", cluster=2),
]
QUANTIZING = [
    Choice("n1536-k12-signed-bfloat16-to-int8_row_1536-accurate", 1, 3),
    Choice("n3072-k12-float16-to-int8_row_3072_convrot-accurate", 2, 2),
    Choice("n11008-k172-signed-bfloat16-to-int4_row_11008-accurate", 0, 3),
    Choice("n2560-k20-float16-to-fp8_row_2560-accurate", 1, 2),
    Choice("n14336-k28-bfloat16-to-fp8_group_128-accurate", 2, 3),
    Choice("n1536-k12-float16-to-fp8_group_128_column_major-accurate", 0, 2),
    Choice("n6144-k12-bfloat16-to-fp8_group_64_rounded-accurate", 3, 3),
    Choice("n3072-k12-bfloat16-to-fp8_tensor-accurate", 0, 4),
    Choice("n768-k12-signed-float16-to-fp8_head-accurate", 0, 3),
    Choice("n1536-k12-bfloat16-to-fp8_head_fa3_rounded-accurate", 1, 3),
    Choice("n11008-k172-bfloat16-to-mxfp8_32_swizzled-accurate", 0, 2),
    Choice("n1536-k12-signed-float16-to-mxfp8_32_column_major-accurate", 1, 4),
    Choice("n7168-k28-bfloat16-to-mxfp4_32_qutlass-accurate", 0, 3),
    Choice("n3072-k12-signed-bfloat16-to-mxfp4_32_swizzled-fast", 1, 3),
    Choice("n1536-k12-float16-to-nvfp4_16-accurate", 1, 3),
    Choice("n4096-k16-bfloat16-to-nvfp4_16_swizzled-accurate", 0, 2),
    Choice("n2560-k20-float16-to-largest_32-accurate", 0, 3),
    Choice("n192-k12-signed-bfloat16-to-int8_row_768-accurate", 0, 3, rows=8),
    Choice("n384-k12-float16-to-mxfp8_32-accurate", 0, 3, rows=4),
    Choice("n640-k20-bfloat16-to-nvfp4_16-accurate", 1, 2, rows=4),
    Choice("n192-k12-float16-to-fp8_head-accurate", 1, 3, rows=16),
    Choice("n11008-k172-float16-to-fp8_row_11008-accurate", 0, 2, products="in_turns"),
    Choice("n11008-k172-bfloat16-to-int8_row_11008-accurate", 0, 4, products="ahead"),
    Choice("n3072-k12-signed-float16-to-fp8_row_3072-accurate", 2, 3, products="ahead"),
    Choice("n7168-k28-bfloat16-to-mxfp4_32-accurate", 2, 3, products="ahead"),
    Choice("n4096-k64-real-bfloat16-to-fp8_row_4096-accurate", 0, 3),
    Choice("n2560-k20-real-signed-float16-to-int8_row_2560-accurate", 1, 2),
    Choice("n4096-k32-real-bfloat16-to-mxfp4_32-accurate", 0, 3),
    Choice("n5120-k160-real-signed-bfloat16-to-int8_row_5120-fast", 0, 2, rows=2),
    Choice("n1536-k12-signed-bfloat16-to-int8_row_1536-accurate", 1, 3, products="streamed"),
    Choice("n11008-k172-bfloat16-to-mxfp8_32_swizzled-accurate", 0, 2, products="streamed"),
    Choice("n11008-k172-signed-bfloat16-to-mxfp4_32-accurate", 0, 1, products="streamed"),
    Choice("n192-k12-float16-to-fp8_head-accurate", 1, 1, 16, "streamed"),
    Choice("n4096-k64-c64-real-signed-bfloat16-to-int8_row_4096-accurate", 0, 3),
    Choice("n1792-k28-c64-real-float16-to-fp8_row_1792-accurate", 0, 2),
    Choice("n1536-k12-c128-real-bfloat16-to-mxfp4_32-fast", 0, 3, rows=2),
]
QUANTIZING += [
    *(replace(each, products="alone") for each in QUANTIZING if each.products == "together"),
    Choice("n2560-k20-bfloat16-to-int8_row_2560-accurate", 1, 1, products="alone"),
    Choice("n11008-k172-signed-bfloat16-to-int8_row_11008-accurate", 0, 1, products="alone", cluster=4),
    Choice("n14336-k28-float16-to-fp8_row_14336-accurate", 2, 1, products="alone", cluster=2),
    Choice("n14336-k28-bfloat16-to-fp8_row_14336-accurate", 2, 1, cluster=2),
    Choice("n18944-k148-bfloat16-to-mxfp4_32-accurate", 0, 1, products="streamed", cluster=2),
    Choice("n3072-k12-bfloat16-to-mxfp4_32-accurate", 2, 1, products="alone", cluster=2),
    Choice("n4096-k64-real-bfloat16-to-int8_row_4096-accurate", 0, 1, products="alone", cluster=2),
]
with_each = pytest.mark.parametrize("choice", CHOICES, ids=str)


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest) -> HostModule:
    return compile_host([source_of(each) for each in cases_of(request, "choice")])


@cache
def source_of(choice: Choice) -> Source:
    return render(choice.plan)


@pytest.mark.parametrize("choice", [*CHOICES, *ROUNDED, *QUANTIZING], ids=str)
def test_a_plan_computes_the_transform(choice: Choice) -> None:
    problem, operands = choice.problem, verification_operands(choice.problem)
    x = np.random.default_rng(0).standard_normal((3 * choice.rows, problem.n))
    wanted = transform(problem, x, 0.25, operands)
    assert np.allclose(interpret(choice.plan, x, 0.25, operands), wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


@with_each
def test_a_kernel_rounds_once(choice: Choice, module: HostModule) -> None:
    at = CHOICES.index(choice)
    errors = verify(choice.problem, source_of(choice), module=module, in_place=at % 2 == 0, order_seed=at % 3)
    assert {name: error for name, error in errors.items() if error > ACCURATE_BOUND[choice.problem.io.input]} == {}


@pytest.mark.parametrize("choice", ROUNDED, ids=str)
def test_a_fast_kernel_rounds_large_real_matrices(choice: Choice, module: HostModule) -> None:
    errors = verify(choice.problem, source_of(choice), module=module)
    bound, once = choice.problem.error_bound, ACCURATE_BOUND[choice.problem.io.input]
    assert {name: error for name, error in errors.items() if not once < error <= bound} == {}


@with_each
def test_products_take_any_number_of_rows(choice: Choice, module: HostModule) -> None:
    """No tile for the second of two blocks, fewer than stages, and more; tiles that lack rows."""
    problem, source = choice.problem, source_of(choice)
    operands = verification_operands(problem)
    tiles = (1, 2, 3, 5, 2 * choice.stages + 1)
    counts = dict.fromkeys(
        each for most in tiles for each in (most * choice.rows - choice.rows // 2, most * choice.rows)
    )
    for number, rows in enumerate(counts):
        x = np.random.default_rng(rows).integers(0, 1 << 14, (rows, problem.n), np.uint16)  # small finite numbers
        exact = transform(problem, decode(problem.io.input, x), 2.0**-6, operands)
        out = x if number % 2 else np.full_like(x, 0xFFFF)
        beyond = rows <= choice.rows and source.launch.persistent
        launch = replace(source.launch, tile_elements=source.launch.tile_elements // (1 + beyond))
        report = module.run(
            source.entry,
            launch,
            x.ravel(),
            out.ravel(),
            scale=2.0**-6,
            operands=kernel_operands(problem, operands),
            order_seed=number,
        )
        assert (report.complaint, report.uninitialized_reads) == ("", 0), rows
        assert (report.bank_conflicts, report.excess_sectors) == (0, 0)
        half = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}[problem.io.input]  # of the last bit
        found = decode(problem.io.input, out)
        assert np.allclose(found, exact, rtol=1.001 * half, atol=1e-5 * np.abs(exact).max()), rows


@with_each
def test_nan_and_infinity_fill_their_row_and_no_other(choice: Choice, module: HostModule) -> None:
    problem, source = choice.problem, source_of(choice)
    operands = kernel_operands(problem, verification_operands(problem))
    infinity = {DType.FLOAT16: 0x7C00, DType.BFLOAT16: 0x7F80}[problem.io.input]
    x = np.random.default_rng(0).integers(0, 1 << 14, (6 + choice.rows, problem.n), np.uint16)
    spoiled = x.copy()
    spoiled[2, problem.n // 3] = infinity + 1  # NaN
    spoiled[5, -1] = infinity
    sound, found = np.zeros_like(x), np.zeros_like(x)
    for given, into in ((x, sound), (spoiled, found)):
        module.run(source.entry, source.launch, given.ravel(), into.ravel(), scale=0.0625, operands=operands)
    others = [row for row in range(len(x)) if row not in (2, 5)]
    assert np.array_equal(sound[others], found[others])
    assert np.isnan(decode(problem.io.input, found[2])).all()
    assert not np.isfinite(decode(problem.io.input, found[5])).any()


def test_signs_of_products_may_be_left_out() -> None:
    choice = next(each for each in CHOICES if each.problem.transform.signed)
    problem, source = choice.problem, source_of(choice)
    kernel = compile_host([source])
    x = np.random.default_rng(0).integers(0, 1 << 14, (2, problem.n), np.uint16)
    plain = {name: each for name, each in verification_operands(problem).items() if name == "matrix"}
    positive, results = np.zeros(problem.n // 8, np.uint8), []
    for signs in (0, positive):
        given = {**kernel_operands(problem, plain), "signs_before": signs, "signs_after": signs}
        results.append(np.zeros_like(x))
        kernel.run(source.entry, source.launch, x.ravel(), results[-1].ravel(), scale=0.125, operands=given)
    assert np.array_equal(*results)


@pytest.mark.parametrize("choice", QUANTIZING, ids=str)
def test_codes_and_scales_are_those_of_the_quantizer(choice: Choice, module: HostModule) -> None:
    """Of rows of few small integers, whose values are exact in fp32; so are sums with real entries of few bits."""
    problem, source = choice.problem, source_of(choice)
    numbers, dtype = np.random.default_rng(0), TYPES[choice.problem.io.input.value]
    columns = max(problem.unit, 128 // problem.unit * problem.unit)
    rows = (2 * choice.stages + 1) * choice.rows * problem.n // columns + 1
    x = torch.zeros(rows, columns)
    places = torch.from_numpy(numbers.integers(0, columns, (rows, 6)))
    x.scatter_(1, places, torch.from_numpy(numbers.integers(-15, 16, (rows, 6)).astype(np.float32)))
    operands = verification_operands(problem)
    if problem.transform.real:
        # In one piece; and values near the middle between two codes of E2M1 may count as in the middle.
        is_coarse = problem.io.numerics is Numerics.FAST or problem.io.form.element is Element.E2M1  # type: ignore[union-attr]
        parts = 16 if is_coarse else 128
        if problem.transform.paired:  # whose products have the bits of both
            parts = 4 if is_coarse else 16
        for name in {"matrix", "right_matrix"} & set(operands):
            operands[name] = np.round(parts * operands[name]) / parts
    exact = transform(problem, x.double().numpy().reshape(-1, problem.n), 0.25, operands)
    y = torch.from_numpy(exact).float().view(rows, columns)
    check(problem, emulated(problem, source, module, x.to(dtype), 0.25, **kernel_operands(problem, operands)), y, dtype)


@pytest.mark.parametrize("choice", QUANTIZING, ids=str)
def test_codes_of_every_class_of_input_are_within_the_bound(choice: Choice, module: HostModule) -> None:
    errors = verify(choice.problem, source_of(choice), 2, module=module)
    assert {name: error for name, error in errors.items() if not error <= choice.problem.error_bound} == {}


@pytest.mark.parametrize("kind", [Product, WarpProduct])
def test_all_ways_through_a_product_are_tried(kind: type[BoxProduct]) -> None:
    plans = [(each, each.plan) for each in CHOICES]
    products = [(each, plan, plan.tile) for each, plan in plans if isinstance(plan.tile, kind)]
    assert {(each.fold, tile.columns(plan)) for each, plan, tile in products if each.rows == 1} == {
        (fold, columns) for fold in range(4) for columns in PRODUCT_COLUMNS
    }
    assert {tile.length(plan) for each, plan, tile in products if each.rows > 1} == {8, 16, 32, 64}
    both = {True, False}
    for fold in range(4):
        some = [plan.problem for each, plan, _ in products if each.fold == fold]
        assert {problem.transform.signed for problem in some} == both
        assert {problem.io.input for problem in some} == {DType.FLOAT16, DType.BFLOAT16}
    assert {each.stages for each, _, _ in products} == {1, 2, 3, 4}
    assert {tile.order(plan) % 16 > 0 for _, plan, tile in products} == both
    assert {tile.order(plan) % 64 > 0 for _, plan, tile in products} == both
    # Whether all threads copy as many vectors.
    assert {tile.order(plan) % (4 * plan.warps) > 0 for _, plan, tile in products} == both
    if kind is Product:
        ways = {(more, each) for more in both for each in ("together", "streamed", "ahead")}
        assert {(plan.warps > 4, each.products) for each, plan, _ in products} == ways | {(True, "in_turns")}
    else:  # rows of a box are swizzled in two ways where warps are odd in number
        assert {(plan.warps > 1, plan.warps % 2) for _, plan, _ in products} == {(False, 1), (True, 0), (True, 1)}
    forms = [each.problem.io.form for each in QUANTIZING if isinstance(each.plan.tile, kind)]
    assert {form.layout.value for form in forms if form} >= {"row-major", "column-major", "swizzled"}
    assert {form.rounded for form in forms if form} == both


def test_fast_and_accurate_have_the_same_kernel() -> None:
    for choice in CHOICES[:4]:
        other = {"fast": "accurate", "accurate": "fast"}[choice.problem.io.numerics.value]
        twin = replace(choice, key=re.sub("(fast|accurate)$", other, choice.key))
        plans = choice.plan, twin.plan
        assert plans[0].steps == plans[1].steps
        assert plans[0].arithmetic == plans[1].arithmetic
        bodies = [re.sub(r"^.*//.*$", "", source_of(each).text_to_compile, flags=re.M) for each in (choice, twin)]
        assert bodies[0] == bodies[1]


def test_the_result_has_the_only_rounding() -> None:
    for choice in CHOICES:
        assert roundings(choice.plan.steps) == 1.0
        assert sum(step.name == "Round" for step in choice.plan.steps) == 1
    for choice in QUANTIZING:
        assert roundings(choice.plan.steps) == float(choice.problem.io.form.rounds_first)  # type: ignore[union-attr]


KEY = "n1536-k12-bfloat16-accurate"


@pytest.mark.parametrize("name", known_archs())
def test_only_hopper_has_wgmma_and_turing_has_no_product(name: str) -> None:
    problem, arch = Problem.parse(KEY), load_arch(name)
    ways = {"sm75": set(), "sm90": {"together", "streamed", "alone", "in_turns", "ahead"}}.get(name, {"alone"})
    space = Space(problem, arch)
    assert {knobs.products for knobs in space.legal if knobs.first == MATRIX_FIRST} == ways
    assert {knobs.products for knobs in space.seeds() if knobs.first == MATRIX_FIRST} == ways - {"in_turns", "ahead"}
    for products in {"together", "streamed", "alone"} - ways:
        lacking = "cp_async (first must be hadamard)" if name == "sm75" else "wgmma (products must be another)"
        with pytest.raises(UsageError, match=re.escape(f"the arch has no {lacking}")):
            build_plan(problem, product_first(products=products), arch)


@pytest.mark.parametrize("key", [KEY, "n12288-k12-float16-fast", "n768-k12-signed-bfloat16-to-mxfp4_32-accurate"])
@pytest.mark.parametrize("arch", [ARCH, load_arch("sm80"), BLACKWELL], ids=lambda arch: arch.name)
def test_searches_choose_it_too(arch: Arch, key: str) -> None:
    problem = Problem.parse(key)
    space = Space(problem, arch)
    first = [knobs for knobs in space.legal if knobs.first == MATRIX_FIRST]
    plans = [build_plan(problem, knobs, arch) for knobs in first]
    assert len({plan.digest for plan in plans}) == len(plans) > 0
    ways = ("together", "streamed", "alone") if arch is ARCH else ("alone",)
    folds = {fold for fold in range(4) if 8 <= problem.length >> fold <= PRODUCT_COLUMNS[-1]}
    wanted = {(way, fold, stages) for way in ways for fold in folds for stages in (1, 2, 3, 4)}
    assert {(knobs.products, knobs.fold, knobs.stages) for knobs in first if knobs.products in ways} == wanted
    seeds = [knobs for knobs in space.seeds() if knobs.first == MATRIX_FIRST]
    assert {(knobs.products, knobs.fold, knobs.stages) for knobs in seeds} == wanted
    assert all(plan.launch.shared_bytes <= arch.limits.shared_per_block for plan in plans)
    assert all("CrossButterflies" in [step.name for step in plan.steps] for plan in plans)


# ---- real matrices ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [2, 12, 64, 100, 172, 192])
@pytest.mark.parametrize("numerics", ["accurate", "fast"])
def test_kernels_for_a_real_matrix_multiply_by_it_first(order: int, numerics: str) -> None:
    problem = Problem.of(64 * order, "bfloat16", numerics, order=order, real=True)
    space = Space(problem, ARCH)
    plans = [build_plan(problem, knobs, ARCH) for knobs in space.legal]
    assert {knobs.first for knobs in (*space.legal, *space.seeds())} == {MATRIX_FIRST}
    rounds = numerics == "fast" and order > 64
    assert {plan.tile.pieces(plan) for plan in plans if isinstance(plan.tile, BoxProduct)} == {2 - rounds}
    with pytest.raises(UsageError, match=re.escape("a real matrix comes first (first must be matrix)")):
        build_plan(problem, Knobs(), ARCH)


@pytest.mark.parametrize(
    ("key", "arch"),
    [
        ("n98304-k192-real-bfloat16-accurate", "sm90"),  # more than shared memory holds
        ("n1664-k208-real-bfloat16-accurate", "sm90"),
        ("n48-k12-real-float16-accurate", "sm90"),
        ("n4096-k64-real-float32-accurate", "sm90"),
        ("n4096-k64-real-float16-fast", "sm75"),
        ("n4096-k64-c64-real-float16-fast", "sm75"),
        ("n24576-k192-c128-real-bfloat16-accurate", "sm89"),  # more than the shared memory holds
    ],
)
def test_other_real_matrices_have_no_kernel(key: str, arch: str) -> None:
    problem = Problem.parse(key)
    assert Space(problem, load_arch(arch)).seeds() == []
    assert closest_recipe(problem, knobs_key(Knobs().to_dict()), arch) is None


@pytest.mark.parametrize("order", RIGHT_ORDERS)
def test_three_products_of_pieces_keep_16_bits(order: int) -> None:
    values, matrix = torch.randn(2048, order, dtype=torch.float64), torch.randn(order, order, dtype=torch.float64)
    first = values.bfloat16().double()
    second = (values - first).bfloat16().double()
    pieces = pack_right(matrix).view(torch.bfloat16).double().chunk(2)
    c = [in_rows(piece, order)[rows_of_right(order).argsort()].T for piece in pieces]
    exact = values @ matrix.T
    for found, bound in ((first @ c[0] + second @ c[0] + first @ c[1], 2.0**-17), (values @ c[0], 2.0**-9)):
        assert bound / 2 < (found - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("order", [12, 100, 192])
@pytest.mark.parametrize(("dtype", "numerics"), [("bfloat16", "accurate"), ("bfloat16", "fast"), ("float16", "fast")])
def test_kernels_for_two_matrices_round_one_of_them_at_most(order: int, dtype: str, numerics: str) -> None:
    problem = Problem.of(64 * order, dtype, numerics, order=order, real=True, paired=True)
    space = Space(problem, ARCH)
    assert {(knobs.first, knobs.fold, knobs.products == "ahead") for knobs in space.legal} == {(MATRIX_FIRST, 0, False)}
    for plan in (build_plan(problem, knobs, ARCH) for knobs in space.seeds()):
        (right,) = (step for step in plan.steps if isinstance(step, RightProduct))
        assert isinstance(plan.tile, BoxProduct)
        rounds = numerics == "fast" and order > 64, (numerics, dtype) == ("fast", "bfloat16") and order <= 64
        assert (plan.tile.pieces(plan) == 1, right.products == 2) == rounds
        assert right.keeps == (order > 128)


@pytest.mark.parametrize(
    ("dtype", "step", "least"), [(DType.FLOAT16, 2.0**-22, 2.0**-35), (DType.BFLOAT16, 2.0**-16, 0.0)]
)
def test_two_pieces_keep_the_entries(dtype: DType, step: float, least: float) -> None:
    """`step` of each, or `least`; of matrices whose entries are as different as they may be too."""
    uneven = torch.zeros(192, 192)
    uneven[0, 0], uneven[1] = 1.0, torch.logspace(-12, 0, 192)
    for given in (torch.linalg.qr(torch.randn(172, 172))[0] * 1e-20, torch.randn(7, 7) * 1e9, uneven):
        ((matrix,), _) = as_matrices(given)
        pieces = pack_real(matrix, dtype).view(TYPES[dtype.value]).double().chunk(2)
        found = sum(in_rows(piece, len(matrix)) for piece in pieces) / (1 << LIFT[dtype])
        assert ((found - matrix.double()).abs() <= torch.clamp(step * matrix.double().abs(), min=least)).all()
        assert 0.7 < matrix.double().norm() / len(matrix) ** 0.5 < 1.42


@pytest.mark.parametrize(
    "key",
    [
        "n4096-real-float16-fast",
        "n4096-k64-signed-real-float16-fast",
        "n4096-k64-c64-float16-fast",
        "n4096-k64-c128-real-float16-fast",
        "n4096-c64-real-float16-fast",
        "n1024-k64-c16-real-float16-fast",
    ],
)
def test_a_key_says_real_behind_the_orders(key: str) -> None:
    with pytest.raises(UsageError):
        Problem.parse(key)
    pair = Problem.parse("n4096-k64-c64-real-signed-float16-fast")
    assert pair.parent == Problem.parse("n4096-k64-c64-real-float16-fast")
    assert pair.parent.parent == Problem.parse("n4096-k64-real-float16-fast")
    assert Problem.parse("n4096-k64-real-signed-float16-fast").parent == Problem.parse("n4096-k64-real-float16-fast")
    assert Problem.parse("n4096-k64-real-float16-fast").parent == Problem.parse("n4096-k64-float16-fast")


def test_what_does_not_fit_the_shared_memory_of_an_arch_is_not_legal() -> None:
    problem = Problem.parse("n28672-k112-bfloat16-accurate")
    assert build_plan(problem, product_first(products="alone", stages=2), load_arch("sm80"))
    for name in ("sm86", "sm89", "sm120"):
        with pytest.raises(UsageError, match="more than 101376 bytes of shared memory per block"):
            build_plan(problem, product_first(products="alone", stages=2), load_arch(name))
        assert {(knobs.first, knobs.stages) for knobs in Space(problem, load_arch(name)).legal} == {(MATRIX_FIRST, 1)}


# ---- instructions of one arch ----------------------------------------------------------------------------------------
SMALL = Choice("n768-k12-bfloat16-accurate", 0, 2)


@pytest.mark.parametrize(
    ("target", "told"), [("sm_90", "sm_90a"), ("sm_90a", "sm_90a"), ("sm_100f", "sm_100a"), ("sm_120", "sm_120a")]
)
def test_compilers_are_told_a_target_that_has_them(target: str, told: str) -> None:
    source = source_of(SMALL)
    assert source.specific
    assert source.compiled_for(target) == told
    assert replace(source, specific=False).compiled_for(target) == target


@needs_compiler
@pytest.mark.parametrize("kind", COMPILERS)
def test_it_compiles_and_its_ptx_assembles(kind: str, tmp_path: Path) -> None:
    if not is_there(kind):
        pytest.skip(f"no {kind} is here")
    toolchain, source = Toolchain(COMPILERS[kind].find(), cache=KernelCache(tmp_path)), source_of(SMALL)
    assert toolchain.key(source, ARCH) != toolchain.key(replace(source, specific=False), ARCH)
    (made,) = toolchain.build_all([source], ARCH)
    ptx = lowered(made.ptx.decode())
    assert re.findall(r"^\.(?:version|target) (\S+)$", ptx, re.M) == ["8.0", "sm_90a"]
    if is_there("nvcc"):
        again = assembled([replace(made, ptx=ptx.encode())], ARCH, Ptxas.find())[made.digest]
        assert is_cubin(again.cubin)
    (failed,) = toolchain.build([replace(source, specific=False)], ARCH)
    assert isinstance(failed, BuildFailure)
    assert "not supported on .target 'sm_90'" in failed.summary


@needs_nvrtc
def test_its_recipe_is_compiled_for_that_arch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_roots", [tmp_path])
    recipe = Recipe(SMALL.problem, product_first(stages=2).to_dict(), "sm90", SMALL.plan.launch)
    for target in ("sm95", "sm100", "sm121", "sm130"):  # two of these are not known
        with pytest.raises(UsageError, match=f"the recipe needs wgmma, which {target} lacks; tune for it$"):
            image_of(recipe, target)
    assert is_cubin(image_of(recipe, "sm90"))


@pytest.mark.parametrize("arch", ["sm80", "sm100", "sm121"])
def test_on_another_arch_each_warp_of_the_recipe_multiplies_alone(arch: str) -> None:
    knobs = knobs_key(product_first(stages=2).to_dict())
    other = closest_recipe(SMALL.problem, knobs, arch)
    assert other
    assert other.knobs == product_first(stages=2, products="alone").to_dict()
    same = closest_recipe(SMALL.problem, knobs, "sm90")
    assert same
    assert same.knobs == product_first(stages=2).to_dict()


def test_estimates_for_other_archs_propose_it_without_wgmma(tmp_path: Path) -> None:
    trial = make_trial(
        problem=SMALL.problem,
        knobs=product_first(stages=2).to_dict(),
        kernel=make_kernel(launch=SMALL.plan.launch),
        timings=tuple(make_timing(elements=element_buckets(SMALL.problem)[0], cache=cache) for cache in Cache),
    )
    for name in set(known_archs()) - {"sm90"}:
        chosen = shortlist(Space(Problem.parse("n11008-k172-bfloat16-accurate"), load_arch(name)), 4)
        ways = {knobs.products for knobs in chosen if knobs.first == MATRIX_FIRST}
        assert ways == (set() if name == "sm75" else {"alone"}), name
        assert not is_recipe_of(replace(trial, arch=name))
    assert is_recipe_of(trial)
    source = Bundle.open(write_trials(tmp_path / "sm90.db", [trial]))
    source.verify()
    assert {entry.knobs["products"] for entry in source.all_entries()} == {"together"}
    for name in ("sm86", "sm100"):
        estimated, _ = estimated_winners(source, load_arch(name))
        assert {(each.knobs["first"], each.knobs["products"]) for each in estimated.values()} == {
            (MATRIX_FIRST, "alone")
        }


WGMMA = "first=matrix,products=together"
KNOBS = "first=matrix,load=cp_async,grid=persistent,stages=2"


def test_emit_names_the_target_that_has_it() -> None:
    text = succeed("emit", "--problem", SMALL.key, "--knobs", KNOBS, "--standalone")
    assert " -arch=sm_90a -cubin " in text
    assert "Launch min(ceil(elements / 768), as many as the GPU holds at once) blocks of 128 threads." in text
    said = sentence(run("emit", "--arch", "sm100", "--problem", SMALL.key, "--knobs", WGMMA), 2)
    assert said.endswith("the arch has no wgmma (products must be another)")
    report = json.loads(succeed("emit", "--space", "--problem", SMALL.key, "--json"))
    assert report["legal"] + sum(report["reasons"].values()) == report["total"]
