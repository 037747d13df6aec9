"""Generated kernels on the emulator: every structural family × dtype × a spread of n, against float64."""

import os
import random
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_sample import emulate
from rounding import rounding_bound
from slow import cases_of
from spaces import ARCH, draw, families, seeds_of

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import EmulationError, HostModule, compile_host, verification_rows, verify
from hadagen.plan.knobs import KNOB_NAMES, Knobs, plan_of
from hadagen.plan.plan import Plan
from hadagen.plan.space import build_plan
from hadagen.plan.steps.transforms import Mma
from hadagen.problem.bits import decode, encode
from hadagen.problem.launch import LaunchSpec, RowShape, Source
from hadagen.problem.problem import DType, Numerics, Problem, Rows
from hadagen.truth.reference import INPUT_CLASSES, hadamard

PROBLEMS = list(
    dict.fromkeys(
        Problem.of(1 << k, dtype, numerics, rows)
        for k in range(1, 16)
        for dtype in DType
        for numerics in Numerics
        for rows in Rows
    )
)
# Random choices for each problem, of which those that show something new are run.
TRIES = 40


@dataclass(frozen=True)
class Variant:
    knobs: Knobs
    plan: Plan
    source: Source


def exchange_kind(plan: Plan) -> str:
    match plan.exchanges:
        case ():
            return "none"
        case (only,):
            return "cluster" if only.crosses_blocks else "block"
        case _:
            return "two"


def features(knobs: Knobs, plan: Plan) -> Iterator[tuple[object, ...]]:
    """What is particular to a variant: each pair of choices that meet in the emitted code, and every knob's value."""
    problem, k, exchange = plan.problem, knobs, exchange_kind(plan)
    ragged = "vector" if problem.n < plan.vector_elements else "tile" if plan.rows_per_tile > 1 else "never"
    yield "problem", problem
    yield "values", problem.io.input, k.low_bits, k.mma_carrier, k.accumulator, k.butterfly_carrier
    yield "order", k.order, k.low_bits, exchange
    yield "low bits", problem.n, k.low_bits, k.butterfly_carrier
    yield "exchange", problem.io.input, exchange, k.exchange_carrier, k.exchange_rounds, k.shared_layout
    yield "far bits", problem.io.input, exchange, k.far_bits, k.far_lanes, k.exchange_carrier
    yield "shuffles", k.shuffles, k.low_bits, k.order, exchange, problem.io.input.bytes
    yield "exchange in a loop", exchange, k.load, k.grid
    yield "pipeline", exchange, k.load, k.grid, k.stages, ragged
    if any(step.turned for step in plan.exchanges):
        yield "turned exchange", exchange, k.block_bits, k.shared_layout
        yield "turned exchange", k.chunks, k.warps, k.cluster
    yield "prefetch", k.ahead > 0, k.cluster > 1, k.load, ragged
    yield "store", ragged, problem.io.input.bytes
    if plan.shares_loaded > 1:
        yield (
            "whole rows",
            k.cluster,
            k.low_bits,
            exchange,
            k.order,
            k.chunks > 1,
            k.load,
            problem.io.rows is Rows.PITCHED,
        )
        yield "values of whole rows", problem.io.input, problem.io.numerics, k.cluster, k.mma_carrier, exchange
    if problem.io.rows is Rows.PITCHED:
        yield "pitched", exchange, k.load, k.grid, k.stages, ragged, problem.io.input.bytes
    yield from ((name, getattr(k, name), problem.io.input) for name in KNOB_NAMES)


def cover() -> dict[Problem, list[Variant]]:
    """A few legal variants of every problem that have, together, every feature found in a random sample."""
    choose = random.Random(0)
    seen: set[tuple[object, ...]] = set()
    chosen = defaultdict(list)
    for problem in choose.sample(PROBLEMS * TRIES, len(PROBLEMS) * TRIES):
        knobs = draw(problem, choose)
        plan = build_plan(problem, knobs, ARCH)
        new = set(features(knobs, plan)) - seen
        if new:
            seen |= new
            chosen[problem].append(Variant(knobs, plan, render(plan)))
    return chosen


@pytest.fixture(scope="module")
def variants() -> dict[Problem, list[Variant]]:
    return cover()


@pytest.fixture(scope="module")
def module(variants: dict[Problem, list[Variant]], request: pytest.FixtureRequest) -> HostModule:
    """Of the problems that this session tests."""
    problems = cases_of(request, "problem")
    return compile_host([variant.source for problem in problems for variant in variants[problem]])


def test_the_variants_have_every_value_of_every_knob(variants: dict[Problem, list[Variant]]) -> None:
    chosen = [variant for some in variants.values() for variant in some]
    for name, values in ARCH.search.items():
        # Kernels with a matrix have tests of their own.
        if name in ("first", "fold", "products", "rows", "slabs"):
            continue
        without_matrix = values[:2] if name == "stages" else values
        assert {getattr(variant.knobs, name) for variant in chosen} == set(without_matrix), name
    for dtype in DType:
        assert {
            (exchange_kind(variant.plan), variant.knobs.far_bits, variant.knobs.far_lanes)
            for variant in chosen
            if variant.plan.problem.io.input is dtype
        } == {
            ("none", "registers", "shuffle"),
            ("two", "registers", "shuffle"),
            *product(("block", "cluster"), ("registers",), ("shuffle",)),
            *product(
                ("block", "cluster"), ("lanes",), ARCH.search["far_lanes"][: 1 if dtype is DType.FLOAT32 else None]
            ),
        }


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_variants_are_right(problem: Problem, variants: dict[Problem, list[Variant]], module: HostModule) -> None:
    for number, variant in enumerate(variants[problem]):
        in_place = number % 2 == 0
        for shape in shapes(problem.n, in_place) if problem.io.rows is Rows.PITCHED else [None]:
            errors = verify(
                problem,
                variant.source,
                module=module,
                shape=shape,
                in_place=in_place,
                order_seed=number % 3,
            )
            for name, error in errors.items():
                assert error <= rounding_bound(problem), (variant.knobs, shape, name)


def shapes(n: int, in_place: bool) -> list[RowShape]:
    """Rows of whole vectors and rows of any length, with and without gaps, in pitches that allow vectors and not."""
    even, odd = n - n // 4, (n - n // 8 - 1) | 1
    pairs = [(even, -(-even // 8) * 8 + 8), (odd, odd), (n, n + 3)]
    return [RowShape(columns, pitch, pitch if in_place else pitch + 8) for columns, pitch in pairs]


@pytest.mark.parametrize(
    ("n", "knobs", "rows"),
    [
        (4096, {"chunks": 4, "warps": 4}, 70),
        (4096, {"chunks": 2, "warps": 4, "cluster": 2}, 70),
        (1024, {"chunks": 4, "warps": 4, "load": "cp_async"}, 4 * 70 + 1),  # four to a tile, the last of one row alone
    ],
)
def test_every_whole_tile_is_prefetched_once_from_so_far_behind(n: int, knobs: dict[str, Any], rows: int) -> None:
    """All but those that are within 1 MiB of the beginning: of tiles of 16 KiB the first 64."""
    problem = Problem.of(n, DType.FLOAT32)
    plan = plan_of(
        problem, Knobs(low_bits="shuffle", butterfly_carrier="fp32", exchange_carrier="fp32", **knobs, ahead=1)
    )
    _, report = emulate(plan, np.zeros(n * rows, np.uint32))
    assert report.prefetched_bytes == (70 - 64) * 16384


@pytest.mark.parametrize(("layout", "conflicts"), [("linear", 64), ("padded", 0), ("swizzled", 0)])
def test_layouts_keep_a_wide_exchange_free_of_bank_conflicts(layout: str, conflicts: int) -> None:
    problem = Problem.of(1024, DType.FLOAT16)
    knobs = Knobs(
        chunks=2,
        warps=2,
        low_bits="shuffle",
        butterfly_carrier="fp32",
        exchange_carrier="fp32",
        shared_layout=layout,
    )
    _, report = emulate(build_plan(problem, knobs, ARCH), np.zeros(problem.n, np.uint16))
    # 16 accesses of a warp, each served in 4 wavefronts, or 8 where two lanes meet in a bank.
    assert (report.wavefronts, report.bank_conflicts) == (64 + conflicts, conflicts)
    assert (report.excess_sectors, report.uninitialized_reads) == (0, 0)


SINGLE: dict[str, object] = {"low_bits": "shuffle", "exchange_carrier": "fp32", "shared_layout": "swizzled"}
EXCHANGES: dict[str, tuple[DType, dict[str, object]]] = {
    "packed": (DType.FLOAT16, {}),
    "fp32": (DType.FLOAT16, {"mma_carrier": "split", "exchange_carrier": "fp32", "shared_layout": "swizzled"}),
    "fp32 in rounds": (DType.FLOAT16, {"mma_carrier": "split", "exchange_carrier": "fp32", "exchange_rounds": 2}),
    "float32": (DType.FLOAT32, SINGLE),
    "float32, swapped": (DType.FLOAT32, SINGLE | {"shuffles": "half"}),
}
# Three bits come to lanes, for an mma.
EXCHANGES_FOR_MMA: dict[str, tuple[DType, dict[str, object]]] = {
    "packed": (DType.FLOAT16, {}),
    "fp32": (DType.FLOAT16, {"mma_carrier": "split", "exchange_carrier": "fp32", "shared_layout": "swizzled"}),
    "turned": (DType.BFLOAT16, {"mma_carrier": "tf32", "exchange_carrier": "fp32", "shared_layout": "swizzled"}),
}


@pytest.mark.parametrize(
    ("chunks", "warps", "cluster", "lanes"),
    [(4, 8, 1, 1), (2, 16, 1, 3), (1, 16, 1, 4), (4, 4, 2, 1), (2, 4, 4, 3), (1, 4, 4, 4), (4, 2, 16, 3)],
)
def test_an_exchange_with_lanes_is_free_of_bank_conflicts_and_stores_whole_sectors(
    chunks: int, warps: int, cluster: int, lanes: int
) -> None:
    shape = {"chunks": chunks, "warps": warps, "cluster": cluster}
    check_exchanges([exchanging(dtype, shape | values) for dtype, values in EXCHANGES.values()], lanes)


@pytest.mark.parametrize(
    ("chunks", "warps", "cluster"),
    [(2, 8, 1), (4, 8, 1), (8, 8, 1), (2, 16, 1), (4, 16, 1), (2, 8, 2), (4, 8, 2), (4, 8, 4), (4, 2, 16)],
)
def test_so_is_one_that_brings_bits_to_an_mma(chunks: int, warps: int, cluster: int) -> None:
    shape = {"chunks": chunks, "warps": warps, "cluster": cluster, "far_lanes": "mma"}
    plans = [exchanging(dtype, shape | values) for dtype, values in EXCHANGES_FOR_MMA.values()]
    check_exchanges(plans, 3)
    for plan in plans:
        far = [step for step in plan.steps if isinstance(step, Mma)][-1]
        assert (far.reg, far.turned) == (2, far.operand != "tf32")


def exchanging(dtype: DType, values: dict[str, object]) -> Plan:
    knobs = Knobs.from_dict({"far_bits": "lanes", "butterfly_carrier": "fp32", **values})
    if (knobs.chunks, knobs.warps, knobs.cluster, knobs.exchange_carrier) == (2, 8, 1, "packed"):
        knobs = replace(knobs, butterfly_carrier="packed")  # for want of butterflies
    return build_plan(Problem.of(256 * knobs.chunks * knobs.warps * knobs.cluster, dtype, Numerics.FAST), knobs, ARCH)


def check_exchanges(plans: list[Plan], lanes: int) -> None:
    """All in one module: each has one exchange, of so many bits with lanes (or pairs), without a conflict."""
    sources = [render(plan) for plan in plans]
    module = compile_host(sources)
    for plan, source in zip(plans, sources, strict=True):
        (exchange,) = plan.exchanges
        assert [near.kind in ("lane", "pair") for near, _ in exchange.pairs].count(True) == lanes
        assert exchange.crosses_blocks == (plan.cta_bits > 0)
        x = encode(plan.problem.io.input, np.zeros((2, plan.problem.n)))
        report = module.run(source.entry, plan.launch, x, np.zeros_like(x), scale=1.0)
        # Of each vector of 16 bytes, written and read.
        vectors = 2 * x.size * (4 if exchange.carrier == "fp32" else 2) // 16
        assert (report.wavefronts, report.bank_conflicts) == (vectors // 8, 0)
        assert (report.sectors, report.excess_sectors) == (2 * x.nbytes // 32, 0)
        assert (report.complaint, report.uninitialized_reads) == ("", 0)


@pytest.mark.parametrize("rows_left_over", [1, 2, 3, 63, 127])
def test_kernels_take_any_number_of_rows(rows_left_over: int) -> None:
    problem = Problem.of(32, DType.BFLOAT16)
    knobs = Knobs(chunks=2, warps=4, low_bits="shuffle", butterfly_carrier="fp32", load="bulk", grid="persistent")
    plan = build_plan(problem, knobs, ARCH)
    assert plan.rows_per_tile == 64
    assert max(verify(problem, render(plan), rows=128 + rows_left_over).values()) <= problem.error_bound


RAGGED = [
    "n32-bfloat16-fast",
    "n64-float32-accurate",
    "n128-float16-to-mxfp8_32-accurate",
    "n128-bfloat16-to-int8_row_512-accurate",
    "n40-k40-float16-accurate",
    "n112-k112-bfloat16-accurate",
]


@pytest.fixture(scope="module")
def ragged() -> list[Source]:
    """Kernels that stage tiles of several rows in shared memory, of every kind of load and grid."""
    problems = [Problem.parse(key) for key in RAGGED]
    choices = [(problem, knobs) for problem in problems for knobs in families(problem, "load", "grid", "stages")]
    plans = [build_plan(problem, knobs, ARCH) for problem, knobs in choices]
    # `verify` may give a kernel that quantizes an even number of rows.
    return [render(plan) for plan in plans if plan.load.staged and plan.is_ragged and plan.rows_per_tile > 2]


def problem_of(source: Source) -> Problem:
    (found,) = (key for key in RAGGED if source.entry.startswith(f"hadagen_{key.replace('-', '_')}_"))
    return Problem.parse(found)


def test_a_tile_of_too_few_rows_is_read_as_far_as_it_was_written(ragged: list[Source]) -> None:
    module = compile_host(ragged)
    assert {problem_of(source).key for source in ragged} == set(RAGGED)
    for source in ragged:
        verify(problem_of(source), source, rows=1, module=module)


def test_a_read_of_what_was_never_written_is_a_fault_that_names_its_step(ragged: list[Source]) -> None:
    """Where nothing is put in the place of missing rows."""
    unfilled = r"cp_async16_or_zero\((.*), ([^,\n]*<.*)\);", r"if (\2) cp_async16(\1);"
    unguarded = r"load_at \+ i \* \d+ < here \? (shared_load16\(.*\)) : zero16\(\)", r"\1"
    broken = []
    for source in ragged:
        text, changes = re.subn(*(unguarded if "bulk_copy(" in source.text else unfilled), source.text)
        assert changes == 1
        broken.append(replace(source, text=text))
    module = compile_host(broken)
    for source in broken:
        with pytest.raises(EmulationError) as caught:
            verify(problem_of(source), source, rows=1, module=module)
        fault = (
            r"thread \d+ of block \d+ reads byte \d+ of shared memory, which was never written in its block, in step "
        )
        step = r"1\. load \w+" if " load_at" in source.text else r"\d\. matrix of the transform"
        assert re.match(rf"{source.entry}: \d+ uninitialized reads; the first: {fault}{step}", str(caught.value))


def test_rows_of_a_verification_show_a_ragged_tile_and_come_round_a_persistent_loop() -> None:
    problem = Problem.of(256, DType.FLOAT16)
    for tile_bits in range(9, 17):
        rows = verification_rows(problem, LaunchSpec(256, 1, 0, 1 << tile_bits, persistent=True))
        all_rows = len(INPUT_CLASSES) * rows - 1
        assert all_rows % (1 << tile_bits - 8)
        assert all_rows * 256 > 10 << tile_bits
    assert verification_rows(Problem.of(32768, DType.FLOAT16), LaunchSpec(256, 1, 0, 1 << 15, persistent=False)) == 1


def test_a_verification_has_a_row_too_few_for_whole_tiles() -> None:
    """So what is stored beyond the last row shows."""
    problem = Problem.of(128, DType.FLOAT16)
    source = render(build_plan(problem, Knobs(low_bits="shuffle", butterfly_carrier="fp32"), ARCH))
    assert source.launch.tile_elements == 2 * problem.n
    unguarded, guards = re.subn(r"if \(left > [^)]*\)", "if (true)", source.text)
    assert guards
    with pytest.raises(EmulationError, match="stores 8 elements at element 1152 of y, which has 1152"):
        verify(problem, replace(source, text=unguarded), rows=2)


@pytest.mark.parametrize("dtype", DType)
def test_rows_of_an_odd_pitch_begin_beside_a_multiple_of_16_bytes(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, begun = Problem.of(16, dtype, rows=Rows.PITCHED), []

    def run(self: object, entry: str, launch: object, x: Any, out: Any, **others: Any) -> None:
        begun.append((x.ctypes.data % 16, out.ctypes.data % 16))
        raise EmulationError("seen")

    monkeypatch.setattr(HostModule, "run", run)
    source, module = render(build_plan(problem, seeds_of(problem)[0], ARCH)), object.__new__(HostModule)
    for shape in (RowShape(16, 16, 17), RowShape(16, 17, 16)):
        with pytest.raises(EmulationError, match="seen"):
            verify(problem, source, module=module, shape=shape)
    assert begun == [(0, dtype.bytes), (dtype.bytes, 0)]


def test_verify_raises_for_what_the_result_does_not_show() -> None:
    problem = Problem.of(512, DType.FLOAT16)
    plan = build_plan(problem, Knobs(low_bits="shuffle", chunks=2, butterfly_carrier="fp32"), ARCH)
    source = render(plan)
    again, stores = re.subn(r"(store16\(.*\));", r"\1, \1;", source.text)
    assert stores == 1
    with pytest.raises(EmulationError, match="more than once"):
        verify(problem, replace(source, text=again))


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("n", [2, 8, 16, 32, 64, 128, 256, 1024])
def test_an_infinity_stays_in_its_row(n: int, dtype: DType) -> None:
    """Rows that share a chunk, a block or a tile do not meet in any sum, not even with weight 0."""
    problem = Problem.of(n, dtype, Numerics.ACCURATE)
    some = families(problem, "low_bits", "load", chunks=2, warps=2, cluster=1)
    plans = [build_plan(problem, knobs, ARCH) for knobs in some]
    sources = [render(plan) for plan in plans]
    module = compile_host(sources)
    for plan, source in zip(plans, sources, strict=True):
        rows = plan.rows_per_tile + 2
        x = np.ones((rows, n))
        x[1, 0], x[-1, -1] = np.inf, np.nan
        bits = encode(dtype, x)
        out = np.zeros_like(bits)
        module.run(source.entry, plan.launch, bits, out, scale=1.0)
        finite = np.isfinite(decode(dtype, out)).all(axis=1)
        assert not finite[[1, -1]].any()
        assert finite[[0, *range(2, rows - 1)]].all()


@pytest.mark.parametrize(("far_lanes", "kept"), [("shuffle", True), ("mma", True), ("mma_two", False)])
def test_an_infinity_comes_out_as_nan_where_an_mma_leaves_bits_as_they_are(far_lanes: str, kept: bool) -> None:
    """For what it leaves out, it multiplies by 0."""
    knobs = Knobs(chunks=4, warps=8, far_bits="lanes", far_lanes=far_lanes, butterfly_carrier="fp32")
    if far_lanes == "shuffle":
        knobs = replace(knobs, chunks=2, warps=16)
    plan = build_plan(Problem.of(8192, DType.FLOAT16, Numerics.FAST), knobs, ARCH)
    x = np.ones((2, 8192))
    x[1, 77] = np.inf
    y = decode(DType.FLOAT16, emulate(plan, encode(DType.FLOAT16, x), 2**-13)[0])
    assert np.isfinite(y[0]).all()
    assert (np.isinf(y[1]) if kept else np.isnan(y[1])).all()


@pytest.mark.parametrize(
    ("dtype", "carrier"),
    [
        (DType.FLOAT16, "split"),
        (DType.BFLOAT16, "split"),
        (DType.BFLOAT16, "tf32"),
        (DType.FLOAT32, "split"),
        (DType.FLOAT32, "tf32"),
    ],
)
@pytest.mark.parametrize("n", [256, 1024])
def test_nan_comes_out_as_nan_and_an_infinity_as_nan_where_values_are_taken_apart(
    n: int, dtype: DType, carrier: str
) -> None:
    """Whatever the bits of a NaN: quiet or not, of either sign, all of them or one. One tf32 is not taken apart."""
    few = {} if n == 256 else {"butterfly_carrier": "fp32"}
    plan = build_plan(Problem.of(n, dtype), Knobs(chunks=4, mma_carrier=carrier, **few), ARCH)
    bits = encode(dtype, np.random.default_rng(n).standard_normal((9, n)))
    infinity, sign = encode(dtype, np.array([np.inf, -0.0]))
    quiet = infinity | infinity >> 1
    nans = [quiet, quiet | sign, infinity | 1, infinity | sign | 1, ~sign, sign | ~sign]
    for row, word in enumerate([*nans, infinity, infinity | sign]):
        bits[row, 31 * row] = word
    y = decode(dtype, emulate(plan, bits, n**-0.5)[0])
    assert np.isnan(y[: len(nans)]).all()
    taken_apart = (dtype, carrier) != (DType.BFLOAT16, "tf32")
    assert (np.isnan(y[len(nans) : -1]) if taken_apart else np.isinf(y[len(nans) : -1])).all()
    assert np.isfinite(y[-1]).all()


def floats_from(exponent: int) -> np.ndarray:
    """Float32 of any size from 2^exponent on, both ends among them."""
    random = np.random.default_rng(0)
    values = np.ldexp(random.uniform(1.0, 2.0, 500), random.integers(exponent, 128, 500)).astype(np.float32)
    values[:4] = np.finfo(np.float32).max, 2.0**exponent * (2.0 - 2.0**-23), 1.0 + 2.0**-23, 1.0 - 2.0**-24
    return values


def each_alone(values: np.ndarray, carrier: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 256 with one of the values each, somewhere and of either sign; and what a kernel makes of them."""
    problem, random, rows = Problem.of(256, DType.FLOAT32), np.random.default_rng(1), len(values)
    plan = build_plan(problem, Knobs(mma_carrier=carrier), ARCH)
    x = np.zeros((rows, problem.n))
    x[np.arange(rows), random.integers(0, problem.n, rows)] = values * random.choice((-1.0, 1.0), rows)
    return x, decode(problem.io.input, emulate(plan, encode(problem.io.input, x))[0])


def test_mma_takes_all_24_bits_of_a_float32_of_any_size() -> None:
    """From 2^-108 to the largest, alone in its row, whose transform then is exact."""
    x, y = each_alone(floats_from(-108), "split")
    np.testing.assert_array_equal(y, hadamard(x))


def test_mma_takes_22_bits_of_a_float32_as_tf32() -> None:
    """From 2^-114 to the largest, alone in its row; and all that lies above 2^-136 of smaller ones."""
    values = floats_from(-114)
    values[4::3] = np.ldexp(np.random.default_rng(0).integers(1, 1 << 15, len(values[4::3])), -136)
    x, y = each_alone(values, "tf32")
    kept = np.abs(y)
    assert (kept == kept[:, :1]).all()
    np.testing.assert_array_equal(y, hadamard(x / values[:, None]) * kept[:, :1])
    np.testing.assert_array_equal(kept[4::3, 0], values[4::3])
    np.testing.assert_allclose(kept[:, 0], values, rtol=2.0**-22)


def test_kernels_of_every_kind_touch_no_memory_beyond_their_arrays() -> None:
    """Under AddressSanitizer and UndefinedBehaviorSanitizer. Stacks are not checked, because fibers jump between
    them. Compilers run without the library of the sanitizer, which would make them slow."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    library = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip(f"{compiler[0]} has no libasan.so, as g++ has")
    flags = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "--param", "asan-stack=0"
    environment = {
        **os.environ,
        "CXX": shlex.join(["env", "-u", "LD_PRELOAD", *compiler, *flags]),
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    program = Path(__file__).with_name("sanitized_kernels.py")
    ended = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[:4000]
    assert int(ended.stdout) > 100
