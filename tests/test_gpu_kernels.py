"""Kernels of every type that an mma takes: of a value alone a GPU makes the same as the emulator, to the last bit. What
is at several levels, or as large or small as may be. And what multicasts bring, in place."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from real_compilers import needs_compiler

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import compile_host
from hadagen.compiler.toolchain import Toolchain
from hadagen.gpu import driver
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.plan import Plan
from hadagen.plan.space import build_plan
from hadagen.problem.bits import Bits, decode, encode
from hadagen.problem.launch import Source
from hadagen.problem.problem import DType, Problem
from hadagen.problem.trial import Kernel
from hadagen.truth.reference import hadamard, input_classes, relative_error, verification_scale

pytestmark = [pytest.mark.gpu, needs_compiler]

ARCH = load_arch("sm90")
CARRIERS = [
    (256, DType.FLOAT16, Knobs(warps=2, mma_carrier="split")),
    (256, DType.BFLOAT16, Knobs(warps=2, mma_carrier="split")),
    (256, DType.BFLOAT16, Knobs(warps=2, mma_carrier="tf32")),
    (256, DType.FLOAT32, Knobs(warps=2, mma_carrier="split")),
    (256, DType.FLOAT32, Knobs(warps=2, mma_carrier="tf32")),
    (2048, DType.BFLOAT16, Knobs(2, 1, 4, far_bits="lanes", mma_carrier="fp16", butterfly_carrier="fp32")),
]
# Of the raw bits of an element.
BITS = {2: torch.int16, 4: torch.int32}
LARGEST = {DType.FLOAT16: 65504.0, DType.BFLOAT16: 2.0**128 - 2.0**120, DType.FLOAT32: 2.0**128 - 2.0**104}


@dataclass(frozen=True)
class Built:
    plan: Plan
    source: Source
    kernel: driver.LoadedKernel

    @property
    def n(self) -> int:
        return self.plan.problem.n

    @property
    def dtype(self) -> DType:
        return self.plan.problem.io.input

    def on_gpu(self, x: Bits, scale: float) -> Bits:
        words = torch.from_numpy(x.view(f"i{self.dtype.bytes}")).to("cuda")
        out = torch.full_like(words, torch.iinfo(BITS[self.dtype.bytes]).max)
        self.kernel.launch(torch.cuda.current_stream().cuda_stream, words.data_ptr(), out.data_ptr(), x.size, scale)
        torch.cuda.synchronize()
        return out.cpu().numpy().view(f"u{self.dtype.bytes}")

    def emulated(self, x: Bits, scale: float) -> Bits:
        out = np.zeros_like(x)
        compile_host([self.source]).run(self.source.entry, self.plan.launch, x, out, scale=scale)
        return out


def build(plan: Plan) -> Built:
    torch.cuda.init()  # the context that kernels are loaded into
    source = render(plan)
    (kernel,) = Toolchain.find().build([source], ARCH)
    assert isinstance(kernel, Kernel), kernel
    return Built(plan, source, driver.load(kernel.cubin, kernel.entry, plan.launch))


@pytest.fixture(params=CARRIERS, ids=lambda of: f"{of[1].value}-{of[2].mma_carrier}", scope="module")
def built(request: pytest.FixtureRequest) -> Built:
    n, dtype, knobs = request.param
    return build(build_plan(Problem.of(n, dtype), knobs, ARCH))


def test_a_value_alone_comes_out_as_on_the_emulator(built: Built) -> None:
    """Of any bits, of every size down to the smallest, infinities and NaNs, by a scale that each mma has a part of."""
    random, rows = np.random.default_rng(0), (1 << 19) // built.n
    words = random.integers(0, 1 << 8 * built.dtype.bytes, rows, dtype=f"u{built.dtype.bytes}")
    infinity, sign = encode(built.dtype, np.array([np.inf, -0.0]))
    edges = [
        infinity,
        infinity | sign,
        infinity - 1,
        infinity - 1 | sign,
        infinity | infinity >> 1,
        infinity + 1,
        ~sign,
    ]
    words[: len(edges)] = edges
    words[len(edges) : len(edges) + 64] = random.integers(1, 1 << 16, 64)  # subnormals, of float32 at least
    x = np.zeros((rows, built.n), words.dtype)
    x[np.arange(rows), random.integers(0, built.n, rows)] = words
    for scale in (1.0, 2.0**-8):
        found, wanted = (decode(built.dtype, y) for y in (built.on_gpu(x, scale), built.emulated(x, scale)))
        np.testing.assert_array_equal(found, wanted)  # a NaN being as good as another


def test_a_nan_is_in_all_of_its_row_and_in_no_other(built: Built) -> None:
    x = encode(built.dtype, np.random.default_rng(1).standard_normal((64, built.n)))
    infinity, sign = encode(built.dtype, np.array([np.inf, -0.0]))
    for row, word in enumerate([infinity | infinity >> 1, infinity + 1, infinity + 1 | sign, ~sign, sign | ~sign]):
        x[8 * row, 31 * row] = word
    y = decode(built.dtype, built.on_gpu(x, built.n**-0.5))
    nan = np.isnan(decode(built.dtype, x)).any(axis=1)
    assert nan.sum() == 5
    assert np.isnan(y[nan]).all()
    assert np.isfinite(y[~nan]).all()


def test_the_largest_values_come_out_finite(built: Built) -> None:
    largest, signs = LARGEST[built.dtype], np.random.default_rng(2).choice([-1.0, 1.0], (64, built.n))
    signs[:8] = 1.0
    signs[8:16] = hadamard(np.eye(built.n))[:8]
    y = decode(built.dtype, built.on_gpu(encode(built.dtype, largest * signs), 1 / built.n)) / largest
    assert np.isfinite(y).all()
    assert relative_error(y, hadamard(signs, 1 / built.n)) <= built.plan.problem.error_bound


def test_uneven_rows_are_within_the_bound_one_by_one(built: Built) -> None:
    problem = built.plan.problem
    x = input_classes(problem, 256)["uneven"]
    y = decode(built.dtype, built.on_gpu(encode(built.dtype, x), verification_scale(problem)))
    errors = [relative_error(*rows) for rows in zip(y, hadamard(x, verification_scale(problem)), strict=True)]
    assert max(errors) <= 1.3 * problem.error_bound  # of few values each
    assert np.sqrt(np.mean(np.square(errors))) <= problem.error_bound


# Chunks, warps and blocks of a row, which comes to all of its blocks by multicast.
MULTICASTS = [
    (DType.FLOAT16, 4096, (2, 1, 8)),
    (DType.FLOAT16, 8192, (8, 2, 2)),
    (DType.BFLOAT16, 16384, (4, 4, 4)),
    (DType.FLOAT16, 32768, (4, 4, 8)),
    (DType.FLOAT32, 2048, (2, 2, 2)),
    (DType.FLOAT32, 8192, (2, 2, 8)),
]


@pytest.mark.parametrize("trigger", ["end", "load"])
@pytest.mark.parametrize(("dtype", "n", "shape"), MULTICASTS)
def test_what_a_multicast_brings_is_read_for_all_blocks_before_results_lie_there(
    dtype: DType, n: int, shape: tuple[int, int, int], trigger: str
) -> None:
    """In place, launch after launch, over rows in L2 and from memory: to the last bit as out of place."""
    wide = Knobs(
        *shape, block_bits="load", butterfly_carrier="fp32", exchange_carrier="fp32", load="multicast", trigger=trigger
    )
    if dtype is DType.FLOAT32:
        knobs = replace(wide, low_bits="shuffle")
    else:
        knobs = replace(wide, mma_carrier="split", exchange_carrier="fp32" if shape[1] > 1 else "packed")
    kernel = build(build_plan(Problem.of(n, dtype), knobs, ARCH)).kernel
    for elements, launches in ((1 << 17, 400), (1 << 20, 200), (1 << 25, 20)):
        x = torch.randn(elements, device="cuda").to(getattr(torch, dtype.value))
        once, again = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(stream, x.data_ptr(), once.data_ptr(), elements, n**-0.5)
        same = []
        for _ in range(launches):
            again.copy_(x)
            kernel.launch(stream, again.data_ptr(), again.data_ptr(), elements, n**-0.5)
            same.append((again == once).all())
        assert bool(torch.stack(same).all()), elements
