"""Kernels of transforms with a matrix or signs: their plans in float64, and the emitted source on the emulator."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from rounding import rounding_bound
from spaces import ARCH, draw, space_of

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import HostModule, compile_host, verify
from hadagen.errors import UsageError
from hadagen.plan.arch import Arch, load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import Plan, interpret
from hadagen.plan.space import Space, build_plan, rules_for
from hadagen.plan.steps.base import SPLIT
from hadagen.plan.steps.matrix import Matrix, Square
from hadagen.problem.launch import Source
from hadagen.problem.operands import kernel_operands, params_for, verification_operands
from hadagen.problem.problem import MAX_LOG2_N, MAX_ORDER, DType, Problem, kernel_order
from hadagen.runtime.operands.packed import combined
from hadagen.runtime.rotation import Rotation, factors_of
from hadagen.truth.reference import hadamard, transform

# Each has what others lack: groups of blocks beside each other; a matrix of one operand, of one that is not full, and
# of so many that they are not held; rows of X of 8, 16, 32 and more columns, or of one; signs; an odd order; sums of
# few values.
WITH_MATRIX = [
    "n14336-k28-float16-fast",
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
    "n112-k7-bfloat16-accurate",
]
# What random choices seldom have together.
CHOSEN = {
    "n14336-k28-float16-fast": [
        Knobs(chunks=4, warps=2, load="bulk", grid="persistent", stages=2),
        Knobs(chunks=8, warps=4, rows=2, slabs=2, exchange_carrier="fp32", ahead=8, trigger="store"),
    ],
    "n14336-k112-bfloat16-accurate": [
        Knobs(chunks=2, warps=2, rows=2, slabs=3, exchange_carrier="fp32", load="bulk", grid="persistent"),
    ],
    "n3584-k28-signed-bfloat16-fast": [
        Knobs(chunks=2, warps=2, slabs=2, load="bulk", trigger="load"),
        Knobs(chunks=4, exchange_carrier="fp32", load="bulk", grid="persistent", stages=2),
    ],
    "n11008-k172-float16-fast": [Knobs(chunks=2, slabs=3, load="bulk"), Knobs(slabs=1, exchange_carrier="fp32")],
    "n512-k16-float16-accurate": [
        Knobs(rows=4, warps=2, exchange_carrier="fp32", load="bulk"),
        Knobs(rows=4, warps=2, exchange_carrier="fp32", load="bulk", grid="persistent"),
    ],
    "n80-k80-bfloat16-fast": [Knobs(rows=16, slabs=5, load="cp_async")],
}
TURING = load_arch("sm75")
SIGNED = [
    "n2-signed-float16-fast",
    "n4-signed-float32-accurate",
    "n64-signed-bfloat16-accurate",
    "n512-signed-float16-fast",
    "n1024-signed-float32-accurate-pitched",
    "n2048-signed-bfloat16-fast-pitched",
    "n8192-signed-float16-accurate",
]
VARIANTS = 3


def chosen(key: str) -> list[Knobs]:
    choose = random.Random(key)
    some = (draw(Problem.parse(key), choose, first="hadamard") for _ in range(VARIANTS))  # test_product.py has others
    return list(dict.fromkeys([*CHOSEN.get(key, ()), *some]))


def plans(key: str) -> list[Plan]:
    return [build_plan(Problem.parse(key), knobs, ARCH) for knobs in chosen(key)]


@pytest.fixture(scope="module")
def sources() -> dict[str, list[Source]]:
    return {key: [render(plan) for plan in plans(key)] for key in (*WITH_MATRIX, *SIGNED)}


@pytest.fixture(scope="module")
def module(sources: dict[str, list[Source]]) -> HostModule:
    return compile_host([source for some in sources.values() for source in some])


@pytest.mark.parametrize("key", [*WITH_MATRIX, *SIGNED])
def test_plans_with_a_matrix_compute_the_transform(key: str) -> None:
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


def test_signs_of_kernels_with_a_matrix_may_be_left_out(sources: dict[str, list[Source]], module: HostModule) -> None:
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


def test_an_infinity_before_a_matrix_stays_in_its_row(sources: dict[str, list[Source]], module: HostModule) -> None:
    """Though a block of 16 rows of X may reach into the next row of x."""
    for key in ("n3584-k28-signed-bfloat16-fast", "n11008-k172-float16-fast", "n192-k12-signed-float16-fast"):
        problem = Problem.parse(key)
        operands = kernel_operands(problem, verification_operands(problem))
        infinity = {DType.FLOAT16: 0x7C00, DType.BFLOAT16: 0x7F80}[problem.io.input]
        rows = max(source.launch.tile_elements for source in sources[key]) // problem.n + 2
        x = np.random.default_rng(0).integers(0, 1 << 14, (rows, problem.n), np.uint16)
        spoiled = x.copy()
        spoiled[1] = infinity
        for source in sources[key]:
            sound, found = np.zeros_like(x), np.zeros_like(x)
            for given, into in ((x, sound), (spoiled, found)):
                module.run(source.entry, source.launch, given.ravel(), into.ravel(), scale=0.125, operands=operands)
            others = np.arange(rows) != 1
            assert np.array_equal(sound[others], found[others]), source.entry


def test_shared_memory_meets_no_bank_conflicts(sources: dict[str, list[Source]], module: HostModule) -> None:
    """Reads of what was staged, of which a thread has two vectors or more in a row, and all that crosses."""
    staged = set()
    for key in WITH_MATRIX:
        problem = Problem.parse(key)
        operands = kernel_operands(problem, verification_operands(problem))
        for plan, knobs, source in zip(plans(key), chosen(key), sources[key], strict=True):
            x = np.zeros(source.launch.tile_elements, np.uint16)
            report = module.run(source.entry, source.launch, x, x.copy(), scale=1.0, operands=operands)
            assert not report.complaint
            if isinstance(plan.tile, Matrix) and (knobs.load, knobs.chunks) != ("bulk", 1):
                assert report.bank_conflicts == 0, source.entry
                staged.add((knobs.load, plan.tile.groups(plan) > 1))
    assert staged >= {("bulk", True), ("bulk", False)}


def test_all_ways_through_kernels_with_a_matrix_are_tried() -> None:
    tried = [(plan, knobs) for key in WITH_MATRIX for plan, knobs in zip(plans(key), chosen(key), strict=True)]
    with_h = [(plan, plan.tile, knobs) for plan, knobs in tried if isinstance(plan.tile, Matrix)]
    loads = {"plain": [("tiles", 1)], "bulk": [("tiles", 1), ("persistent", 1), ("persistent", 2)]}
    both = {True, False}
    for load, ways in loads.items():
        some = [(plan, matrix, knobs) for plan, matrix, knobs in with_h if knobs.load == load]
        assert {(knobs.grid, knobs.stages) for *_, knobs in some} == set(ways)
        for way in ways:
            beside = [m.groups(plan) > 1 for plan, m, knobs in some if (knobs.grid, knobs.stages) == way]
            assert set(beside) == both, (load, way)
        assert {plan.problem.transform.signed for plan, *_ in some} == both
        assert {SPLIT in plan.carriers for plan, *_ in some} == both
        assert {matrix.held(plan) > 0 for plan, matrix, _ in some} == both
        assert {plan.problem.io.input for plan, *_ in some} == {DType.FLOAT16, DType.BFLOAT16}
        assert {matrix.blocks(plan) % plan.warps > 0 for plan, matrix, _ in some} == both
        # Whole blocks of several rows of x, and blocks that lack rows: of one row of x, or loaded plainly of several.
        lacking = {(plan.problem.order % 16 > 0, matrix.rows > 1) for plan, matrix, _ in some}
        assert lacking >= {(False, True), (True, load == "plain")}
        assert {matrix.vectors_in_row(plan) > 1 for plan, matrix, _ in some} == both
        assert {knobs.trigger for *_, knobs in some} >= {"end", "load"}
        assert {knobs.ahead > 0 for *_, knobs in some} == both
    assert {matrix.rows_at_once(plan) for plan, matrix, _ in with_h} == {1, 2, 4}
    assert {matrix.operands_in_slab(plan) % matrix.slabs > 0 for plan, matrix, _ in with_h} == both
    squares = [(plan, plan.tile) for plan, _ in tried if isinstance(plan.tile, Square)]
    assert {square.in_place(plan) for plan, square in squares} == both


@pytest.mark.parametrize(
    ("order", "length", "expected"),
    [(28, 512, 28), (12, 1024, 48), (20, 256, 40), (36, 512, 36), (52, 1024, 104), (28, 2048, 112)],
)
def test_a_small_matrix_takes_in_a_part_of_h(order: int, length: int, expected: int) -> None:
    assert kernel_order(order, length) == expected


def test_the_order_of_kernels_is_that_of_a_matrix_they_take() -> None:
    for order in range(2, MAX_ORDER + 1):
        for bits in range(((1 << MAX_LOG2_N) // order).bit_length()):
            found = kernel_order(order, 1 << bits)
            part, left = divmod(found, order)
            assert left == 0
            assert part & (part - 1) == 0
            assert found <= MAX_ORDER
            length = (1 << bits) // part
            assert length in (1 << bits, 1) or length >= 32
            assert kernel_order(found, length) == found


def test_a_row_fits_in_shared_memory_if_it_does_without_what_its_matrix_lacks() -> None:
    """`accurate` takes four bytes for each element, of a matrix of whole operands."""
    fitting = ARCH.limits.shared_per_block // 4  # elements
    whole = range(16, MAX_ORDER + 1, 16)
    longest = max(order << bits for order in whole for bits in range(17) if order << bits <= fitting)
    for order in range(2, MAX_ORDER + 1):
        for bits in range(3, (longest // order).bit_length()):
            taken = kernel_order(order, 1 << bits)
            assert -(-taken // 16) * 16 * (order << bits) // taken <= fitting, (order, 1 << bits)
    for order, length in ((28, 2048), (52, 1024)):
        keys = [f"n{order * length}-k{each}-float16-accurate" for each in (order, kernel_order(order, length))]
        spaces = [space_of(Problem.parse(key)) for key in keys]
        assert [any(knobs.first == "hadamard" for knobs in space.legal) for space in spaces] == [False, True]


def test_a_matrix_and_a_part_of_h_are_the_same_transform() -> None:
    for order, n in ((12, 12 * 256), (20, 80), (20, 20 * 64), (36, 36 * 64)):
        matrix = torch.from_numpy(np.random.default_rng(0).choice((-1, 1), (order, order)).astype(np.int8))
        (taken,) = combined([matrix], n)
        assert len(taken) == kernel_order(order, n // order)
        assert torch.equal(combined([taken], n)[0], taken)
        before, after = (np.kron(each.numpy(), hadamard(np.eye(n // len(each)))) for each in (matrix, taken))
        assert np.array_equal(before, after)


NOT_LEGAL: list[tuple[str, dict[str, int | str], str]] = [
    ("n14336-k28-float32-accurate", {}, "an mma multiplies 16-bit values by a matrix"),
    ("n14336-k28-float16-fast-pitched", {}, "rows must be contiguous"),
    ("n112-k28-float16-fast", {}, "n must be a multiple of 8, and n / k 1 or more than 4"),
    ("n96-k12-float16-fast", {"chunks": 2}, "a row has fewer columns (chunks must be fewer)"),
    ("n80-k80-float16-fast", {"chunks": 2, "rows": 16, "load": "cp_async"}, "there is one column"),
    ("n14336-k28-float16-fast", {"chunks": 4, "slabs": 3}, "the matrix has fewer rows"),
    ("n14336-k28-float16-fast", {"chunks": 4, "warps": 8}, "some warps would have nothing to multiply"),
    (
        "n11008-k172-float16-fast",
        {"chunks": 2, "warps": 2, "slabs": 1},
        "some warps would have nothing to transform",
    ),
    ("n11008-k172-float16-fast", {"warps": 32, "rows": 256}, "more than 1024 threads per block"),
    ("n14336-k28-float16-accurate", {"chunks": 4}, "accurate may not round before the matrix"),
    ("n112-k7-float16-fast", {"rows": 2}, "sums of so few values round badly"),
    ("n14336-k28-float16-fast", {"chunks": 4, "load": "cp_async"}, "load must be plain or bulk"),
    ("n80-k80-float16-fast", {"rows": 16}, "load must be cp_async"),
    ("n14336-k28-float16-fast", {"chunks": 4, "rows": 2, "load": "bulk"}, "a row of x begins inside a block"),
    ("n14336-k28-float16-fast", {"chunks": 4, "low_bits": "shuffle"}, "a kernel with a matrix has no low_bits"),
    ("n14336-k28-float16-fast", {"chunks": 4, "grid": "persistent"}, "nothing is loaded for the next tile"),
    ("n14336-k28-float16-fast", {"chunks": 4, "load": "bulk", "stages": 2}, "stages must be 1"),
    ("n14336-k28-float16-fast", {"chunks": 16, "rows": 2}, "do not fit the registers"),
    (
        "n14336-k112-float16-fast",
        {"chunks": 4, "warps": 2, "rows": 16, "slabs": 2, "load": "bulk"},
        "bytes of shared memory per block",
    ),
    (
        "n14336-k112-float16-fast",
        {"chunks": 4, "rows": 4, "slabs": 2, "load": "bulk", "min_blocks": 4},
        "min_blocks must be smaller",
    ),
    ("n192-k12-float16-fast", {}, "columns of 2 rows at once (rows must be 2 or more)"),
    ("n80-k80-float16-fast", {"rows": 8, "load": "cp_async"}, "an mma takes columns of 16 rows at once"),
    (
        "n14336-k28-float16-fast",
        {"chunks": 4, "load": "bulk", "grid": "persistent", "trigger": "load"},
        "blocks that loop leave no room",
    ),
    (
        "n14336-k28-float16-fast",
        {"chunks": 4, "load": "bulk", "grid": "persistent", "ahead": 8},
        "blocks that loop do not take tiles in order",
    ),
    (
        "n14336-k28-float16-fast",
        {"chunks": 2, "warps": 8, "rows": 4, "min_blocks": 8},
        "threads per SM (take fewer warps or a smaller min_blocks)",
    ),
    (
        "n80-k80-float16-fast",
        {"rows": 16, "load": "cp_async", "exchange_carrier": "fp32"},
        "nothing follows the matrix",
    ),
    ("n256-float16-fast", {"rows": 2}, "there is no matrix"),
]
FIRST: dict[str, int | str] = {"first": "matrix", "load": "cp_async", "grid": "persistent", "stages": 3}
IN_CLUSTERS: dict[str, int | str] = {"cluster": 2, "fold": 2, "products": "alone", "grid": "tiles", "stages": 1}
NOT_LEGAL += [
    (key, {**FIRST, **changes}, why)
    for key, changes, why in [
        ("n4096-float16-fast", {"chunks": 4, "warps": 4}, "there is no matrix (first must be hadamard)"),
        ("n14336-k28-float16-fast", {"chunks": 2}, "a block has its warps for one row (chunks and warps must be 1)"),
        ("n14336-k28-float16-fast", {"warps": 4}, "a block has its warps for one row (chunks and warps must be 1)"),
        ("n14336-k28-float16-fast", {}, "a product has from 8 to 256 columns of a row (fold must be another"),
        ("n80-k80-float16-fast", {}, "a product has from 8 to 256 columns of a row (fold must be another"),
        ("n112-k7-float16-fast", {}, "a product has 64 or 128 or 256 columns, those of all its rows"),
        ("n14336-k28-float16-fast", {"fold": 1, "rows": 2}, "a product has 64 or 128 or 256 columns"),
        ("n14336-k28-float16-fast", {"fold": 1, "products": "in_turns"}, "four warps have all rows (products must"),
        ("n14336-k28-float16-fast", {"fold": 2, "products": "ahead", "stages": 2}, "(stages must be 3 or more)"),
        (
            "n14336-k28-float16-fast",
            {"first": "hadamard", "products": "in_turns"},
            "all warps multiply what they have (products must be together)",
        ),
        ("n768-k12-bfloat16-to-int8_row_1536-accurate", {}, "a tile ends within a row of 1536"),
        ("n14336-k28-float16-fast", {"fold": 1, "slabs": 2}, "where the matrix comes first, slabs must be 1"),
        (
            "n14336-k28-float16-fast",
            {"fold": 1, "exchange_carrier": "fp32"},
            "where the matrix comes first, exchange_carrier must be packed",
        ),
        ("n14336-k28-float16-fast", {"fold": 1, "load": "bulk"}, "where the matrix comes first, load must be cp_async"),
        (
            "n14336-k28-float16-fast",
            {"fold": 1, "grid": "tiles", "stages": 1},
            "boxes of later tiles are loaded meanwhile (grid must be persistent, or cluster more)",
        ),
        (
            "n14336-k28-float16-fast",
            {"first": "hadamard", "cluster": 2},
            "where H comes first, a block has whole rows (cluster must be 1, or first matrix)",
        ),
        ("n14336-k28-float16-fast", {"fold": 1, "cluster": 8}, "a block would have no rows of the matrix"),
        (
            "n14336-k28-float16-fast",
            {"fold": 2, "cluster": 2, "products": "ahead"},
            "clusters take one tile each, with nothing beside",
        ),
        ("n14336-k28-float16-fast", {**IN_CLUSTERS, "fold": 3, "rows": 2}, "the blocks of a cluster share one row"),
        ("n14336-k28-float16-fast", {**IN_CLUSTERS, "grid": "persistent"}, "clusters take one tile each"),
        ("n14336-k28-float16-fast", {**IN_CLUSTERS, "ahead": 8}, "clusters are for few rows, which L2 has"),
        (
            "n14336-k28-float16-fast",
            {"fold": 2, "stages": 1, "products": "in_turns"},
            "(stages must be 2 or more, or products",
        ),
        ("n44032-k172-float16-fast", {"fold": 2}, "more than 1024 threads per block (fold must be less)"),
        ("n44032-k172-float16-fast", {}, "the matrix and its sums do not fit the registers (fold or min_blocks must"),
        ("n20480-k80-signed-float16-fast", {"stages": 4, "min_blocks": 2}, "bytes of shared memory per SM (min_blocks"),
        ("n32768-k128-float16-fast", {"stages": 4}, "bytes of shared memory per block (take fewer stages)"),
        ("n14336-k28-float16-fast", {"first": "hadamard", "fold": 1}, "nothing is folded where H comes first"),
        (
            "n14336-k28-float16-fast",
            {"first": "hadamard", "chunks": 4, "load": "bulk"},
            "only boxes are loaded so far ahead (stages must be fewer)",
        ),
    ]
]
NOT_LEGAL_ON_TURING: list[tuple[str, dict[str, int | str], str]] = [
    ("n3584-k28-float16-accurate", {"exchange_carrier": "fp32"}, "the arch has no bf16x2_fma"),
    ("n3584-k28-float16-fast", {"load": "bulk"}, "the arch has no bulk_copy"),
    ("n80-k80-float16-fast", {"rows": 16, "load": "cp_async"}, "the arch has no cp_async"),
    ("n3584-k28-float16-fast", {"ahead": 8}, "the arch has no bulk copies to L2"),
    ("n3584-k28-float16-fast", {"trigger": "load"}, "the arch starts no kernel before the last one ends"),
    ("n3584-k28-float16-fast", FIRST, "the arch has no cp_async (first must be hadamard)"),
]


@pytest.mark.parametrize(
    ("arch", "key", "changes", "why"),
    [
        *((ARCH, *case) for case in NOT_LEGAL),
        *((TURING, *case) for case in NOT_LEGAL_ON_TURING),
        (
            load_arch("sm80"),
            "n14336-k28-float16-fast",
            {**FIRST, **IN_CLUSTERS},
            "the arch has no clusters of 2 blocks",
        ),
    ],
)
def test_what_is_not_legal_says_why(arch: Arch, key: str, changes: dict[str, int | str], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        build_plan(Problem.parse(key), replace(Knobs(), **changes), arch)  # type: ignore[arg-type]


def test_every_reason_that_a_space_gives_has_a_case() -> None:
    known = [why for *_, why in NOT_LEGAL + NOT_LEGAL_ON_TURING]
    for arch in (ARCH, TURING):
        for key in (
            "n14336-k28-float16-fast",
            "n14336-k112-float16-fast",
            "n11008-k172-float16-fast",
            "n192-k12-bfloat16-accurate",
            "n112-k7-float16-fast",
            "n80-k80-float16-fast",
        ):
            for reason in Space(Problem.parse(key), arch).report().reasons:
                if not reason.startswith("a kernel with a matrix has no "):
                    assert any(why in reason for why in known), reason


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
    assert {rule.last for rule in rules_for(problem, ARCH)} <= set(ARCH.search)


def test_an_arch_has_the_kernels_with_a_matrix_whose_instructions_it_has() -> None:
    """sm75 has no mma of bfloat16, which `accurate` takes too, and no asynchronous copies to stage rows by."""
    keys = ("n3584-k28-float16-fast", "n3584-k28-float16-accurate", "n3584-k28-bfloat16-fast", "n80-k80-float16-fast")
    assert [bool(Space(Problem.parse(key), TURING).legal) for key in keys] == [True, False, False, False]


@pytest.mark.parametrize(("n", "order"), [(20 * 64, 40), (12 * 256, 48), (20 * 4, 80)])
def test_a_rotation_gives_a_kernel_what_it_takes(n: int, order: int) -> None:
    signs = [1 - 2 * torch.randint(0, 2, (n,), generator=torch.manual_seed(seed)) for seed in (0, 1)]
    rotation = Rotation(n, signs=signs[0], signs_after=signs[1])
    problem = Problem.of(n, "float16", order=order, signed=n > order)  # otherwise signs are a part of the matrix
    source = render(build_plan(problem, draw(problem, random.Random(0)), ARCH))
    kernel = compile_host([source])
    x = torch.randn((9, n), generator=torch.manual_seed(0)).half()
    of = factors_of(rotation, x)
    matrix, turned = of.matrices.numpy().reshape(2, -1).copy()
    names = ("signs_before", "signs_after")
    given = [each.numpy() for each in (of.signs, of.signs_after) if each is not None]
    assert len(given) == 2 * (n > order)
    signed, turned_signs = (dict(zip(names, some, strict=False)) for some in (given, given[::-1]))
    for wanted, operands in (
        (rotation(x.double()), {"matrix": matrix, **signed}),
        (rotation.inverse(x.double()), {"matrix": turned, **turned_signs}),
    ):
        y = np.zeros(x.shape, np.uint16)
        bits = x.numpy().view(np.uint16).ravel()
        kernel.run(source.entry, source.launch, bits, y.ravel(), scale=n**-0.5, operands=operands)
        error = np.linalg.norm(y.view(np.float16) - wanted.numpy()) / np.linalg.norm(wanted.numpy())
        assert error < 3e-4


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
