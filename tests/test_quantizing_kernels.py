"""Kernels that quantize, on the emulator: the codes and scales of the quantizer in PyTorch, bit for bit."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as given_by_hypothesis
from hypothesis import strategies
from spaces import draw
from test_quantizer import ALL, TYPES, given, hard_rows

from hadagen import Rotation
from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import HostModule, compile_host, verify
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import interpret
from hadagen.plan.space import Space, build_plan
from hadagen.problem.formats import FORMATS, TENSOR, Element, Format, Layout
from hadagen.problem.launch import Source
from hadagen.problem.operands import kernel_operands, verification_operands
from hadagen.problem.problem import Problem, odd_part
from hadagen.runtime.call import runs
from hadagen.runtime.quantize import problems_of
from hadagen.truth.quantizer import memory_of, quantize
from hadagen.truth.reference import hadamard, transform

ARCH = load_arch("sm90")
POISON = 0xA5


def form(name: str, rule: str, group: int = 0, layout: str = "row-major", rounded: bool = False) -> Format:
    known = FORMATS[name]
    size = TENSOR if known.groups[0] == TENSOR else group or known.groups[0] or 256
    key = Format(**{**vars(known), "group": size, "rule": rule, "layout": Layout(layout), "rounded": rounded}).key
    return Format.parse(key)


def source(problem: Problem, **wanted: Any) -> Source:
    knobs = Space(problem, ARCH).closest(Knobs(**{"min_blocks": 1, **wanted}))
    return render(build_plan(problem, knobs, ARCH))


def emulated(
    problem: Problem,
    kernel: Source,
    module: HostModule,
    x: torch.Tensor,
    scale: float = 1.0,
    of_call: torch.Tensor | None = None,
    **operands: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x, [rows, columns], as `quantize` returns them. of_call: `given` by default."""
    to = problem.io.form
    of_call = given(to, len(x)) if of_call is None else of_call
    codes, scales = quantize(torch.zeros(x.shape), to, x.dtype, of_call)  # for their shapes
    codes.view(torch.uint8).fill_(POISON)
    in_row = x.shape[1] // to.group if to.group > 0 else 1
    operands |= {"scales_in_row": in_row, "scale_pitch": scales.stride(-1) if scales.dim() else 0}
    if of_call is not None:
        units = x.numel() // problem.unit
        operands |= {"tensor_scale": of_call.reshape(-1).numpy(), "units_in_head": units // of_call.numel()}
    memory = all_bytes(scales)
    report = module.run(
        kernel.entry,
        kernel.launch,
        aligned(x.contiguous()),
        all_bytes(codes),
        scale=scale,
        operands=operands,
        outputs={} if to.group == TENSOR else {"scales": (memory, x.shape[0] * in_row * scales.element_size())},
    )
    assert (report.complaint, report.uninitialized_reads) == ("", 0)
    return codes, scales


def all_bytes(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, gaps and all."""
    return memory_of(tensor).numpy()


def aligned(x: torch.Tensor) -> Any:
    """A copy of its bits, at a multiple of 16 bytes."""
    memory = np.empty(x.nbytes + 16, np.uint8)
    held = memory[-memory.ctypes.data % 16 :][: x.nbytes]
    held[:] = all_bytes(x)
    return held.view(np.uint32 if x.element_size() == 4 else np.uint16)


def unsigned_zeros(codes: torch.Tensor, to: Format) -> torch.Tensor:
    """Codes of which a negative zero is a zero: the sign of a sum that is 0 depends on the order of its terms."""
    raw = codes.view(torch.uint8)
    if to.element is Element.E4M3:
        return torch.where(raw == 0x80, 0, raw)
    if to.element is Element.E2M1:
        low, high = raw & 15, raw >> 4
        return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4
    return raw


def check(
    problem: Problem,
    found: tuple[torch.Tensor, torch.Tensor],
    y: torch.Tensor,
    dtype: torch.dtype,
    of_call: torch.Tensor | None = None,
) -> None:
    """Compare with the quantizer of rotated values, float32 [rows, columns]; every NaN is as good as another."""
    to = problem.io.form
    of_call = given(to, len(y)) if of_call is None else of_call
    codes, scales = quantize(y.to(dtype).float() if to.rounded else y, to, dtype, of_call)
    same = unsigned_zeros(found[0], to) == unsigned_zeros(codes, to)
    if to.element is Element.INT8 and problem.n > 1:  # in the middle between two integers either is right
        quotients = (y.double().view(*scales.shape, -1) / scales[..., None].double()).flatten(-2)
        same |= ((quotients - quotients.floor() - 0.5).abs() < 1e-5) & ((found[0].int() - codes.int()).abs() <= 1)
    assert same.all(), problem.key
    if to.group == TENSOR:
        return
    if to.scale in ("float32", "input"):
        assert torch.equal(found[1].nan_to_num(-1.0), scales.nan_to_num(-1.0)), problem.key
    else:
        assert torch.equal(found[1].view(torch.uint8), scales.view(torch.uint8)), problem.key


@pytest.mark.parametrize(
    ("rotation", "to", "key"),
    [
        (Rotation(896, "quarot"), "int8-row", "n896-k28-float16-to-int8_row_896-accurate"),
        (Rotation(1792, "quarot", block=896), "mxfp8", "n896-k28-float16-to-mxfp8_32-accurate"),
        (Rotation(768, "regular", block=256), "int8-row", "n256-swapped-signed-float16-to-int8_row_768-accurate"),
        (Rotation(768, block=128), "fp8-row", "n128-float16-to-fp8_row_768-accurate"),
        (Rotation(768, torch.eye(3) / 2, block=96), "mxfp8", "n96-k3-real-float16-to-mxfp8_32-accurate"),
        (Rotation(768, torch.eye(96) / 2, block=96), "mxfp8", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_kernel_that_a_rotation_asks_for(
    rotation: Rotation, to: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "takes_kernels", lambda x: True)
    x = torch.empty(2, rotation.n, dtype=torch.float16)
    _, problem, *_ = problems_of(x, rotation, Format.choose(to, None, None, "row-major"), False, "accurate", False)
    assert (problem and problem.key) == key


@pytest.mark.parametrize("dtype", TYPES)
def test_hard_values_of_every_format_and_rule(dtype: str) -> None:
    x = hard_rows(TYPES[dtype])
    x[0, 0], x[1, 40], x[2, 80] = torch.nan, torch.inf, -torch.inf
    problems = [Problem.of(1, dtype, to=form(name, rule)) for name, rule in ALL]
    kernels = [source(problem) for problem in problems]
    module = compile_host(kernels)
    for problem, kernel in zip(problems, kernels, strict=True):
        check(problem, emulated(problem, kernel, module, x), x.float(), x.dtype)


def test_rotated_values_up_to_the_largest() -> None:
    """Sums that fill the range of a type, and each of its largest numbers alone: kernels multiply by the scale of the
    call and the reciprocal of that of a group at once. Scales of finite values are finite."""
    n = 64
    problems = [Problem.of(n, dtype, to=form(name, "even")) for dtype in TYPES for name in ("mxfp8", "mxfp4")]
    problems += [Problem.of(n, list(TYPES)[at % 3], to=form(*each)) for at, each in enumerate(ALL) if each[1] != "even"]
    kernels = [source(problem) for problem in problems]
    module = compile_host(kernels)
    for problem, kernel in zip(problems, kernels, strict=True):
        dtype = TYPES[problem.io.input.value]
        largest = torch.finfo(dtype).max
        columns, unit = 1024, largest / (2 / torch.finfo(dtype).eps - 1)  # of the last bit
        numbers = torch.Generator().manual_seed(0)
        alone = torch.zeros(24, columns, dtype=torch.float64)
        alone[:, ::n] = largest - unit * torch.arange(24).double()[:, None]
        sums = torch.randint(-1, 2, (24, columns), generator=numbers).double() * unit * (int(largest / unit) // n)
        x = torch.cat([alone, sums]).to(dtype)
        y = torch.from_numpy(hadamard(x.double().view(-1, n).numpy())).view(-1, columns).float()
        found = emulated(problem, kernel, module, x)
        check(problem, found, y, dtype)
        scales = found[1].view(torch.uint8) == 0xFF if problem.io.form.scale == "e8m0" else ~found[1].float().isfinite()
        assert not scales.any() or problem.io.form.group == TENSOR, problem.key


@pytest.mark.parametrize("n", [1, 64])
def test_a_scale_of_zero(n: int) -> None:
    """Zeros keep their codes, and all else has the largest ones, as in PyTorch."""
    forms = [form(name, rule) for name, rule in ALL if FORMATS[name].needs_scale]
    forms += [form("fp8-head", "exact", rounded=True), form("nvfp4", "exact", rounded=True)]
    problems = [Problem.of(n, dtype, to=to) for dtype in TYPES for to in forms]
    kernels = [source(problem) for problem in problems]
    module = compile_host(kernels)
    for problem, kernel in zip(problems, kernels, strict=True):
        to, dtype = problem.io.form, TYPES[problem.io.input.value]
        limits = torch.finfo(dtype)
        x = torch.zeros(24, 256)
        x[4:12:2, ::64] = torch.tensor([[1.0], [-limits.max], [limits.smallest_normal * limits.eps], [torch.inf]])
        x[5, 3], x[6, 70] = -3.0, 0.5
        if n == 1:
            x[:, 1::2] = torch.where(x[:, 1::2] == 0, -0.0, x[:, 1::2])
            x[8, 0] = torch.nan
        x = x.to(dtype)
        y = torch.from_numpy(hadamard(x.double().view(-1, n).numpy())).view(24, 256).float() if n > 1 else x.float()
        for zero in (0.0, -0.0):
            of_call = torch.full((6,), zero) if to.by_head else torch.tensor(zero)
            if to.by_head:
                of_call[3] = 0.01
            check(problem, emulated(problem, kernel, module, x, of_call=of_call), y, dtype, of_call)


@pytest.mark.parametrize("dtype", TYPES)
def test_largest_magnitudes_of_every_class_of_input(dtype: str) -> None:
    """Of large values too, whose squares float32 cannot hold."""
    problem = Problem.of(64, dtype, to=form("largest", "exact", group=64))
    errors = verify(problem, source(problem))
    assert {name: error for name, error in errors.items() if not error <= problem.error_bound} == {}


@pytest.mark.parametrize("rounded", [False, True])
def test_sums_beyond_float16_do_not_overflow(rounded: bool) -> None:
    """Whatever the knobs and the numerics are. A result that is quantized need not be a float16; if it is rounded to
    one, only those beyond its range are infinite."""
    choose = random.Random(0)
    plans = [
        build_plan(problem, draw(problem, choose), ARCH)
        for n in (64, 256, 1024, 4096)
        for problem in [Problem.of(n, "float16", "fast", to=form("largest", "exact", 32, rounded=rounded))]
        for _ in range(5)
    ]
    kernels = [render(plan) for plan in plans]
    module = compile_host(kernels)
    for plan, kernel in zip(plans, kernels, strict=True):
        n = plan.problem.n
        columns = max(n, 256)
        x = torch.full((max(4, kernel.launch.tile_elements // columns), columns), 60000.0).half()
        x[1::2] *= torch.from_numpy(np.random.default_rng(n).choice([-1.0, 1.0], columns)).half()
        for scale in (n**-0.5, 1.0):
            y = torch.from_numpy(hadamard(x.double().view(-1, n).numpy(), scale)).view(len(x), -1, 32)
            wanted = (y.half() if rounded else y).abs().amax(-1).float()
            found = emulated(plan.problem, kernel, module, x, scale)[1]
            assert torch.allclose(found, wanted, rtol=2e-3, atol=1.0), (plan.problem.key, plan.digest)


# Problem → knobs. Values of rows of few small integers are exact in fp32, so their codes are those of PyTorch.
CASES: dict[str, dict[str, Any]] = {
    "n16-float16-to-nvfp4_16-accurate": {},
    "n32-bfloat16-to-mxfp4_32_swizzled-accurate": {"chunks": 2, "low_bits": "mma_shuffle"},
    "n64-bfloat16-to-mxfp8_32_column_major-accurate": {"chunks": 2, "grid": "persistent"},
    "n128-bfloat16-to-fp8_group_128-accurate": {"chunks": 4, "warps": 2, "low_bits": "mma_shuffle"},
    "n128-float16-to-fp8_group_128_column_major-accurate": {"chunks": 2, "warps": 2, "low_bits": "mma_shuffle"},
    "n128-signed-bfloat16-to-fp8_group_128_rounded-accurate": {"chunks": 2, "low_bits": "mma_shuffle"},
    "n128-bfloat16-to-int8_row_4096_convrot-accurate": {"chunks": 4, "warps": 4, "grid": "persistent"},
    "n128-float32-to-int8_row_1024-accurate": {"chunks": 2, "warps": 2},
    "n256-float16-to-fp8_tensor-accurate": {"chunks": 2, "mma_carrier": "split"},
    "n256-bfloat16-to-fp8_group_64-fast": {"chunks": 2, "accumulator": "packed"},
    "n512-float32-to-mxfp8_32_even-accurate": {"chunks": 2, "warps": 4},
    "n4096-bfloat16-to-int4_row_4096-accurate": {"chunks": 4, "warps": 4, "far_bits": "lanes", "far_lanes": "mma"},
    "n4096-bfloat16-to-mxfp4_32_qutlass-fast": {"chunks": 4, "warps": 4, "far_bits": "lanes"},
    "n4096-float16-to-fp8_group_128-accurate": {"chunks": 2, "warps": 8, "far_bits": "lanes"},
    "n1-bfloat16-to-int8_row_768-accurate": {},
    "n128-float32-to-fp8_row_3584-accurate": {"warps": 2},
    "n256-bfloat16-to-int8_row_3072_convrot-accurate": {"chunks": 2, "warps": 2, "grid": "persistent", "load": "bulk"},
    "n1-float16-to-int8_row_272-accurate": {},
    "n16-float32-to-int4_row_80-accurate": {},
    "n64-swapped-signed-bfloat16-to-int8_row_2880-accurate": {"chunks": 4},
    "n128-signed-bfloat16-to-fp8_row_1408-accurate": {"load": "cp_async", "grid": "persistent", "stages": 2},
    "n512-bfloat16-to-fp8_row_18944-accurate": {"chunks": 4, "grid": "persistent", "stages": 2},
    "n16-swapped-bfloat16-to-mxfp4_32-accurate": {},
    "n64-swapped-signed-float16-to-int4_row_1024-accurate": {"chunks": 2},
    "n256-swapped-signed-bfloat16-to-int8_row_3072_convrot-accurate": {"chunks": 2, "warps": 2},
    "n256-swapped-float32-to-fp8_group_128-accurate": {"chunks": 2},
    "n4096-bfloat16-to-int4_row_12288-accurate": {"chunks": 2, "warps": 8, "exchange_carrier": "fp32"},
    "n160-k20-bfloat16-to-mxfp8_32-accurate": {"warps": 2, "rows": 8},
    "n256-k8-bfloat16-to-fp8_head-accurate": {"rows": 1},
    "n352-k44-float16-to-int8_row_352-accurate": {"rows": 4, "slabs": 2},
    "n896-k28-signed-bfloat16-to-mxfp4_32_swizzled-accurate": {"rows": 4, "warps": 2},
    "n1536-k12-float16-to-nvfp4_16-accurate": {"chunks": 2, "warps": 2},
    "n1536-k12-bfloat16-to-fp8_group_128-fast": {"chunks": 2, "warps": 2, "rows": 2},
    "n2560-k40-float16-to-fp8_row_5120-accurate": {"rows": 4, "warps": 2},
    "n3584-k28-signed-bfloat16-to-int8_row_3584-accurate": {"chunks": 2, "load": "bulk", "grid": "persistent"},
    "n16-bfloat16-to-fp8_head_rounded-accurate": {"chunks": 2, "low_bits": "mma_shuffle"},
    "n64-float16-to-fp8_head-accurate": {"chunks": 2, "warps": 2, "grid": "persistent"},
    "n64-swapped-signed-float16-to-fp8_head_fa3-accurate": {"chunks": 2},
    "n128-bfloat16-to-fp8_head_fa3_rounded-accurate": {"chunks": 4, "low_bits": "mma_shuffle"},
    "n256-float32-to-fp8_head_fa3-accurate": {"warps": 2},
    "n896-k28-signed-bfloat16-to-fp8_head_fa3-accurate": {"rows": 4, "warps": 2},
    "n4096-bfloat16-to-fp8_head-fast": {"chunks": 4, "warps": 4, "far_bits": "lanes", "far_lanes": "mma"},
    "n4096-float16-to-fp8_row_4096-accurate": {"chunks": 8, "warps": 4, "exchange_carrier": "fp32"},
    "n128-bfloat16-to-fp8_row_65536-accurate": {"chunks": 4, "warps": 8},
    "n1280-k20-signed-bfloat16-to-int8_row_3840-accurate": {"rows": 4, "warps": 2, "load": "bulk"},
}


@pytest.mark.parametrize("key", [key for key in CASES if "-k" in key or "swapped" in key or "12288" in key])
def test_quantizing_plans_compute_the_transform(key: str) -> None:
    """With a matrix, numbered anew, or over an odd number of warps, step by step in float64."""
    problem = Problem.parse(key)
    operands = verification_operands(problem)
    for knobs in Space(problem, ARCH).seeds()[:3]:
        plan = build_plan(problem, knobs, ARCH)
        x = np.random.default_rng(0).standard_normal((plan.rows_per_tile, problem.n))
        assert np.allclose(interpret(plan, x, 0.3, operands), transform(problem, x, 0.3, operands))


# Tiles with more room than a row fills, for each way to load a row of two parts.
PADDED: dict[str, dict[str, Any]] = {
    "n1-after-silu_mul-float32-to-fp8_row_2000-accurate": {"load": "bulk", "grid": "persistent", "stages": 2},
    "n1-after-silu_mul-float16-to-int8_row_1008-accurate": {"grid": "persistent", "stages": 2},
    "n32-after-silu_mul_interleaved-float16-to-int4_row_2080-accurate": {"load": "cp_async", "grid": "persistent"},
    "n64-after-silu_mul_interleaved-float16-to-int8_row_1408-accurate": {"load": "bulk"},
    "n128-after-silu_mul-bfloat16-to-fp8_row_1408-accurate": {},
    "n96-k12-after-silu_mul_interleaved-bfloat16-to-fp8_row_480-accurate": {"slabs": 1},
    "n1152-k36-signed-after-gelu-bfloat16-to-int8_row_3456-fast": {"first": "matrix", "stages": 2},
    "n448-k28-real-after-silu_mul-bfloat16-to-int4_row_1344-accurate": {"first": "matrix", "products": "alone"},
}


@pytest.mark.parametrize("key", PADDED)
def test_rows_that_do_not_fill_their_tile_are_read_alone(key: str) -> None:
    """All rows differ, so that the largest magnitude of a row is not that of its neighbor."""
    problem = Problem.parse(key)
    assert problem.is_padded
    errors = verify(problem, source(problem, **PADDED[key]))
    assert {name: error for name, error in errors.items() if not error <= problem.error_bound} == {}


# Rows that no block holds: the largest magnitude of a row, or values of H too, cross the blocks of a cluster.
CLUSTERS: dict[str, dict[str, Any]] = {
    "n1-after-silu_mul_interleaved-float32-to-int4_row_57040-accurate": {"load": "cp_async"},
    "n64-signed-after-silu_mul-float16-to-fp8_row_100096-accurate": {"load": "bulk"},
    "n65536-bfloat16-to-int8_row_65536-accurate": {"chunks": 4, "warps": 8, "exchange_rounds": 2},
    "n131072-bfloat16-to-fp8_group_128-accurate": {"chunks": 8, "warps": 8},
}


@pytest.mark.parametrize("key", CLUSTERS)
def test_rows_that_no_block_holds(key: str) -> None:
    problem = Problem.parse(key)
    kernel = source(problem, **CLUSTERS[key])
    assert kernel.launch.cluster > 1
    errors = verify(problem, kernel)
    assert {name: error for name, error in errors.items() if not error <= problem.error_bound} == {}


def test_blocks_share_a_row_that_none_holds_alone() -> None:
    """And each of them has a part of it: the last 16th of a tile for 65792 elements is beyond the row."""
    for columns, clusters in ((53248, {1}), (65536, {2, 4, 8, 16}), (65792, {2, 4, 8})):
        space = Space(Problem.of(1, "bfloat16", to="fp8-row", columns=columns), ARCH)
        assert {knobs.cluster for knobs in space.legal} == clusters


@given_by_hypothesis(strategies.integers(1, 8192), strategies.sampled_from([1, 16, 128, 512, 4096]))
def test_a_tile_has_room_for_whole_blocks_of_a_row(blocks: int, n: int) -> None:
    """And for no more than the next 2^m times an odd number of up to 15, from 512 on, or of up to 7 times 256."""
    columns = max(n, 16) * (1 + blocks % (65536 // max(n, 16)))
    problem = Problem.of(n, "bfloat16", to="fp8-row", columns=columns)
    assert problem.room >= problem.unit == columns
    assert problem.room == columns or problem.room % max(256, n) == 0
    assert odd_part(problem.room) <= 15
    tiles = [k << m for m in range(8, 18) for k in range(1, 16) if m > 8 or k <= 7]
    assert [tile for tile in tiles if columns <= tile < problem.room and tile % n == 0] == []


@pytest.fixture(scope="module")
def rotating() -> list[tuple[Problem, Source, HostModule]]:
    problems = [Problem.parse(key) for key in CASES]
    kernels = [source(problem, **knobs) for problem, knobs in zip(problems, CASES.values(), strict=True)]
    module = compile_host(kernels)
    return [(problem, kernel, module) for problem, kernel in zip(problems, kernels, strict=True)]


def operands_for(problem: Problem) -> dict[str, Any]:
    return verification_operands(problem) if problem.transform.signed or problem.order > 1 else {}


def columns_for(problem: Problem) -> int:
    columns = max(problem.unit, 1024 if problem.n == 4096 else 512)
    return -(-columns // problem.unit) * problem.unit


def test_rotated_values(rotating: list[tuple[Problem, Source, HostModule]]) -> None:
    numbers = np.random.default_rng(0)
    for problem, kernel, module in rotating:
        dtype = TYPES[problem.io.input.value]
        columns = columns_for(problem)
        rows = 1 + 3 * kernel.launch.tile_elements // columns
        x = torch.zeros(rows, columns)
        places = torch.from_numpy(numbers.integers(0, columns, (rows, 6)))
        x.scatter_(1, places, torch.from_numpy(numbers.integers(-15, 16, (rows, 6)).astype(np.float32)))
        operands, exact = operands_for(problem), x.double().numpy()
        y = transform(problem, exact.reshape(-1, problem.n), 0.25, operands).reshape(rows, columns)
        found = emulated(problem, kernel, module, x.to(dtype), 0.25, **kernel_operands(problem, operands))
        check(problem, found, torch.from_numpy(y).float(), dtype)


def in_the_middle(largest: int) -> torch.Tensor:
    """Pairs of integers a > b that bfloat16 holds, such that (a - b) / (a + b) of the largest code is in the middle
    between two codes: integers, or floats of three fraction bits."""
    a, b = torch.meshgrid(torch.arange(1, 257), torch.arange(256), indexing="ij")
    ratio = (a - b).double() * largest / (a + b)
    ulp = ratio.clamp(min=2**-6).log2().floor().exp2() / 8 if largest == 448 else torch.ones(())
    return torch.stack((a, b), -1)[(a > b) & ((ratio / ulp) % 1 == 0.5)]


def test_codes_do_not_depend_on_other_groups(rotating: list[tuple[Problem, Source, HostModule]]) -> None:
    """Not even values in the middle between two codes: NaN and infinity make their warp encode the longer way."""
    changed = {}
    for problem, kernel, module in rotating:
        form, scale = problem.io.form, problem.n**-0.5
        if max(kernel.launch.tile_elements, problem.unit) == form.group:
            continue  # a block has one group
        columns = problem.unit if form.by_head else columns_for(problem)
        largest = 127 if form.element is Element.INT8 else 448
        pairs = in_the_middle(largest)
        pairs = pairs[:: 1 + (len(pairs) * problem.unit >> 15)]  # fewer of long rows
        of_row = columns // problem.unit
        rows = max(1 + 2 * kernel.launch.tile_elements // columns, -(-2 * len(pairs) // of_row))
        x = torch.zeros(rows * of_row, problem.unit // problem.n, problem.n)
        mine = pairs[torch.arange(len(x)) // 2 % len(pairs)]
        x[..., : min(problem.n, 2)] = mine[:, None, : problem.n]
        amax = mine.sum(-1) * scale if form.by_head else None
        of_call = amax if amax is None or form.rule == "fa3" else amax / largest
        among = x.clone() if form.by_head else x.index_fill(0, torch.arange(0, len(x), 2), torch.nan)
        given_among = None if of_call is None else of_call.index_fill(0, torch.arange(0, len(x), 2), torch.inf)
        operands = kernel_operands(problem, operands_for(problem))
        alone, other = (
            emulated(problem, kernel, module, each.view(rows, columns).to(dtype), scale, given, **operands)
            for dtype in [TYPES[problem.io.input.value]]
            for each, given in ((x, of_call), (among, given_among))
        )
        apart = alone[0].view(torch.uint8) != other[0].view(torch.uint8)
        changed[problem.key] = int(apart.view(len(x), -1)[1::2].sum())
    assert {key: count for key, count in changed.items() if count} == {}


def test_few_accurate_codes_differ_from_those_of_exact_values() -> None:
    """Random values, which nearly all lie apart from the middle between two codes."""
    differing = {}
    for numerics, carrier in (("accurate", "split"), ("fast", "tf32")):
        problem = Problem.parse(f"n256-bfloat16-to-int8_row_4096_convrot-{numerics}")
        kernel = source(problem, chunks=4, warps=4, low_bits="mma", mma_carrier=carrier)
        x = torch.randn(16, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
        y = transform(problem, x.double().numpy().reshape(-1, 256), 1 / 16, {}).reshape(x.shape)
        codes, _ = quantize(torch.from_numpy(y).float(), problem.io.form, x.dtype, None)
        found, _ = emulated(problem, kernel, compile_host([kernel]), x, 1 / 16)
        differing[numerics] = float((codes != found).float().mean())
    assert differing["accurate"] < 1e-4 < 1e-3 < differing["fast"]
