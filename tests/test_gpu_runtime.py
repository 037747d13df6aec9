"""`hadamard_transform` on a GPU: every shipped kernel, and every way to call one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_runtime import VIEWS, expected, padded

import hadagen
from hadagen import Match, Problem, best_config, driver, hadamard_transform
from hadagen.problem import padded_length
from hadagen.runtime import bundles, compute, kernels, operator
from hadagen.runtime.choose import choose_from_bundles
from hadagen.runtime.device import find_device
from hadagen.trial import Destination

pytestmark = pytest.mark.gpu

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SIZES = [1 << k for k in range(1, 16)]
GUARD = 4096  # elements on either side of a tensor that must not be written


@pytest.fixture(scope="module", autouse=True)
def kernels_for_this_gpu() -> None:
    if best_config(Problem(4096, "float16"), 16).match is Match.GENERIC:
        pytest.skip(f"no bundle has kernels for {torch.cuda.get_device_name()}; run `hadagen tune`")


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_timed", {})
    monkeypatch.setattr(kernels, "_found", {})
    monkeypatch.setattr(kernels, "_loaded", {})
    compute.calls.clear()


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def reference(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """In float64, by plain PyTorch, which test_runtime.py checks."""
    return hadamard_transform(x.double(), scale)


def error(y: torch.Tensor, x: torch.Tensor, scale: float) -> float:
    wanted = reference(x, scale)
    return float((y.double() - wanted).norm() / wanted.norm())


def bound(problem: Problem, elements: int) -> float:
    """The largest error allowed; of few elements one may be rounded much worse than the average."""
    return problem.error_bound * (1 if elements >= 8192 else 3)


def found(
    x: torch.Tensor, numerics: str = "accurate", in_place: bool = False, pitched: bool = False
) -> driver.LoadedKernel | None:
    n = padded_length(x.shape[-1])
    problem = kernels.problem_of(n, x.dtype, numerics, pitched)
    return problem and kernels.find(x.get_device(), problem, in_place, x.numel() // x.shape[-1] * n)


def dtype_name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def assert_good(y: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> None:
    assert found(x), "plain PyTorch did it"
    torch.cuda.synchronize()
    assert error(y, x, scale) <= bound(Problem(x.shape[-1], dtype_name(x)), x.numel())


def require(kernel: driver.LoadedKernel | None) -> driver.LoadedKernel:
    if kernel is None:
        pytest.skip("no bundle has such a kernel")
    return kernel


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inplace", [False, True], ids=["out-of-place", "in-place"])
@pytest.mark.parametrize("numerics", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_kernel_against_float64(n: int, dtype: str, numerics: str, inplace: bool) -> None:
    """At every bucket's size and a ragged one beside it; nothing outside of the result is written."""
    problem = Problem(n, dtype, numerics)
    require(found(normal(1, n, dtype=DTYPES[dtype]), numerics, inplace))
    counts = {1, 3} | {max(1, (1 << k) // n) + ragged for k in range(13, 26, 2) for ragged in (0, 1)}
    for rows in sorted(counts):
        scale = 0.3 * n**-0.5
        x = normal(rows, n, dtype=DTYPES[dtype], seed=rows)
        buffer = torch.full((GUARD + rows * n + GUARD,), 7.0, dtype=x.dtype, device="cuda")
        y = buffer[GUARD:-GUARD].view(rows, n)
        if inplace:
            y.copy_(x)
            hadamard_transform(y, scale, inplace=True, numerics=numerics)
        else:
            y.fill_(float("nan"))
            before = x.clone()
            hadamard_transform(x, scale, out=y, numerics=numerics)
            assert torch.equal(x, before), f"{rows} rows: the input was changed"
        kernel = found(x, numerics, inplace)
        assert kernel
        assert kernel.spec == best_config(problem, rows, inplace=inplace).launch
        assert error(y, x, scale) <= bound(problem, rows * n), f"{rows} rows: {kernel}"
        assert bool((buffer[:GUARD] == 7).all() & (buffer[-GUARD:] == 7).all()), f"{rows} rows: written outside"


@pytest.mark.parametrize("numerics", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("n", SIZES[:12])
def test_the_matrix_itself(n: int, dtype: torch.dtype, numerics: str) -> None:
    """±1 is exact in every type and wherever it was rounded, so each element must be right to the bit."""
    eye = torch.eye(n, device="cuda", dtype=dtype)
    assert torch.equal(hadamard_transform(eye, numerics=numerics).double(), reference(eye))


def test_ptx_gives_the_same(nothing_loaded: None) -> None:
    """What a newer GPU would run: PTX, compiled by the driver."""
    x = normal(64, 4096)
    _, chosen = choose_from_bundles(Problem(4096, "float16"), Destination.OUT_OF_PLACE, x.numel(), find_device())
    assert chosen
    entry, bundle = chosen
    kernel = bundle.kernel(entry.kernel)
    loaded = driver.load(kernel.ptx, kernel.entry, kernel.launch, x.get_device())
    y = torch.empty_like(x)
    kernels.queue(loaded.prepared(x.numel(), 0.5), x.get_device(), x.data_ptr(), y.data_ptr())
    assert_good(y, x, 0.5)


@pytest.mark.parametrize(("n", "dtype"), [(1 << 16, torch.float16), (1, torch.bfloat16), (256, torch.float64)])
def test_what_has_no_kernel_runs_in_pytorch(n: int, dtype: torch.dtype) -> None:
    x = normal(3, n, dtype=dtype)
    assert kernels.problem_of(n, dtype, "accurate", False) is None
    y = hadamard_transform(x, 0.5)
    torch.testing.assert_close(y.cpu(), expected(x.cpu(), 0.5).to(dtype), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1e-30, -1e-20, 0.01, -3.0, 1e5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_scale_with_fast_kernels(dtype: str, scale: float) -> None:
    x = normal(64, 512, dtype=DTYPES[dtype]) * 2.0**-10
    for _ in range(2):
        y = hadamard_transform(x, scale, numerics="fast")
        wanted = (reference(x) * scale).to(x.dtype)
        torch.testing.assert_close(y, wanted, rtol=2e-2, atol=float(wanted.abs().max()) * 1e-2)


# ---- rows of any length, anywhere ------------------------------------------------------------------------------------
@pytest.mark.parametrize("inplace", [False, True], ids=["out-of-place", "in-place"])
@pytest.mark.parametrize("numerics", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [2, 3, 7, 48, 96, 100, 192, 255, 257, 1000, 4095, 5120, 11008, 14336, 18944, 32767])
def test_pitched_rows_against_float64(columns: int, dtype: str, numerics: str, inplace: bool) -> None:
    """Padded, at any address and pitch; nothing between the rows or around them is written."""
    problem = Problem(padded_length(columns), dtype, numerics, pitched=True)
    for rows, pitch, offset in ((1, columns, 0), (3, columns + 1, 1), (65, columns + 8, 8), (1030, columns, 3)):
        x = normal(rows, columns, dtype=DTYPES[dtype], seed=rows)
        require(found(x, numerics, inplace, pitched=True))
        buffer = torch.full((GUARD + offset + rows * pitch + GUARD,), 7.0, dtype=x.dtype, device="cuda")
        y = buffer[GUARD + offset :].as_strided((rows, columns), (pitch, 1))
        scale = 0.3 * columns**-0.5
        if inplace:
            y.copy_(x)
            hadamard_transform(y, scale, inplace=True, numerics=numerics)
        else:
            hadamard_transform(x, scale, out=y, numerics=numerics)
        limit = bound(problem, x.numel())
        assert error(y, x, scale) <= limit, f"{rows} rows, pitch {pitch}, offset {offset}"
        if not inplace:  # and read from there
            assert error(hadamard_transform(y, numerics=numerics), y, 1.0) <= limit
        y.fill_(7.0)
        assert bool((buffer == 7).all()), f"{rows} rows, pitch {pitch}, offset {offset}: written outside"


@pytest.mark.parametrize("name", ["strided rows", "misaligned"])
def test_rows_apart_need_no_copy(name: str) -> None:
    x = VIEWS[name](normal(6, 4, 64))
    require(found(x, pitched=True))
    y = hadamard_transform(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hadamard_transform(x, out=y)
    hadamard_transform(x, inplace=True)
    assert torch.cuda.max_memory_allocated() == before


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = normal(6, 4, 64)
    before = whole.clone()
    x = view(whole)
    wanted = expected(x.cpu(), 0.5)

    def close(y: torch.Tensor) -> bool:
        return torch.allclose(y.cpu().double(), wanted, rtol=1e-3, atol=1e-3)

    assert close(hadamard_transform(x, 0.5))
    assert torch.equal(whole, before), "the input was changed"
    target = view(torch.full_like(whole, 7.0))
    assert hadamard_transform(x, 0.5, out=target) is target
    assert close(target)
    assert hadamard_transform(x, 0.5, inplace=True) is x
    assert close(x)


@pytest.mark.parametrize("inplace", [False, True], ids=["out-of-place", "in-place"])
@pytest.mark.parametrize("n", [2, 128, 4096, 32768])
def test_more_elements_than_fit_in_31_bits(n: int, inplace: bool) -> None:
    rows = (1 << 31) // n + 1
    if torch.cuda.mem_get_info()[0] < rows * n * (3 if inplace else 5):
        pytest.skip("needs more free memory on the GPU")
    x = torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda")
    picked = [0, rows // 2, rows - 2, rows - 1]
    some = normal(len(picked), n, dtype=torch.bfloat16)
    x[picked] = some
    y = hadamard_transform(x, n**-0.5, inplace=inplace)
    assert found(x, in_place=inplace)
    assert error(y[picked], some, n**-0.5) <= bound(Problem(n, "bfloat16"), some.numel())
    y[picked] = 0
    assert not any(part.any() for part in y.view(-1).split(1 << 28)), "a row of zeros was changed"


# ---- streams, graphs, threads, devices -------------------------------------------------------------------------------
def test_the_current_stream_is_used() -> None:
    x = torch.zeros(256, 4096, dtype=torch.float16, device="cuda")
    hadamard_transform(x)  # loaded now
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(normal(256, 4096))
        y = hadamard_transform(x, 1 / 64)
    stream.synchronize()
    assert_good(y, x, 1 / 64)


@pytest.mark.parametrize("inplace", [False, True], ids=["out-of-place", "in-place"])
def test_graphs(inplace: bool) -> None:
    x = torch.zeros(100, 1024, dtype=torch.float16, device="cuda")

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        y = hadamard_transform(x, 1 / 32, inplace=inplace)
        return y, hadamard_transform(x.t().contiguous().t(), 1 / 32)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, z = work()
    for seed in range(3):
        values = normal(100, 1024, seed=seed)
        x.copy_(values)
        graph.replay()
        assert_good(y, values, 1 / 32)
        assert_good(z, y if inplace else values, 1 / 32)


@pytest.mark.parametrize("elements", [1 << 15, 1 << 18, 1 << 23])
@pytest.mark.parametrize("numerics", ["accurate", "fast"])
def test_kernels_that_start_early_read_what_was_written_before(elements: int, numerics: str) -> None:
    """Rows of each length cross those of the length before, and kernels of others come in between."""

    def chain(x: torch.Tensor, after_each: Callable[[], object]) -> torch.Tensor:
        for length in (4096, 2, 32768, 64, 1024, 128, 16384, 8, 2048, 256) * 3:
            y = hadamard_transform(x.view(-1, length), length**-0.5, numerics=numerics)
            after_each()
            hadamard_transform(y.view(-1, 512), 512**-0.5, inplace=True, numerics=numerics)
            after_each()
            hadamard_transform(y.view(64, -1).t(), 1 / 8, out=x.view(-1, 64), numerics=numerics)
            after_each()
            if length > 1000:
                x = x.roll(4096)
        return x

    start = normal(elements)
    wanted = chain(start.clone(), torch.cuda.synchronize)
    x, graph = start.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x, lambda: None)
    for _ in range(5):
        assert torch.equal(chain(start.clone(), lambda: None), wanted)
        x.copy_(start)
        graph.replay()
        assert torch.equal(y, wanted)


def test_early_kernels_after_copies_and_joins_in_a_graph() -> None:
    """What comes before a kernel may be no kernel, or be on several streams."""
    source, x, y = normal(256, 4096), *(torch.zeros(256, 4096, dtype=torch.float16, device="cuda") for _ in range(2))
    side, graph, scale = torch.cuda.Stream(), torch.cuda.CUDAGraph(), 1 / 64

    def work() -> torch.Tensor:
        x.copy_(source)
        hadamard_transform(x, scale, inplace=True)
        y.zero_()
        hadamard_transform(x[:128], scale, out=y[:128])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            hadamard_transform(x[128:], scale, out=y[128:])
        z = hadamard_transform(x, 2 * scale)
        torch.cuda.current_stream().wait_stream(side)
        hadamard_transform(y, scale, inplace=True)
        return z

    work()
    with torch.cuda.graph(graph):
        z = work()
    for seed in range(5):
        source.copy_(normal(256, 4096, seed=seed))
        graph.replay()
        torch.testing.assert_close(z, source * 2, rtol=4e-3, atol=1e-2)
        assert error(y, source, scale) <= 1e-3  # rounded three times


def test_the_first_call_may_be_captured(nothing_loaded: None) -> None:
    x = torch.zeros(100, 1024, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hadamard_transform(x, 1 / 32)
    x.copy_(normal(100, 1024))
    graph.replay()
    assert_good(y, x, 1 / 32)


def test_a_warm_call_loads_nothing(nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hadagen.warmup([1024, 96], torch.float16, device="cuda") > 0
    monkeypatch.setattr(bundles, "known", None)
    monkeypatch.setattr(driver, "load", None)
    for x in (normal(100, 1024), normal(100, 1025)[:, 1:], normal(100, 96), normal(1 << 15, 1024)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = hadamard_transform(x, 1 / 32, numerics="fast")
            z = hadamard_transform(x, 1 / 32)
        graph.replay()
        torch.cuda.synchronize()
        for each in (y, z):
            wanted = padded(x[:100].cpu(), 1 / 32)
            assert float((each[:100].cpu().double() - wanted).norm() / wanted.norm()) <= 4e-4


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_first_call_may_be_captured_on_any_stream(mode: str, nothing_loaded: None) -> None:
    x = torch.zeros(100, 512, dtype=torch.float16, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        y = hadamard_transform(x, 1 / 16)
        hadamard_transform(y, 1 / 16, inplace=True)
    x.copy_(normal(100, 512))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, x * 2, rtol=4e-3, atol=1e-2)


def in_threads(work: Callable[[int], None], count: int = 8) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            start.wait()
            work(index)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_threads_on_streams_of_their_own(nothing_loaded: None) -> None:
    inputs = [normal(64 + index, 512, seed=index) for index in range(8)]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = hadamard_transform(inputs[index], 0.1 * (index + 1))
            torch.cuda.current_stream().synchronize()
            assert_good(y, inputs[index], 0.1 * (index + 1))

    in_threads(work)


def test_a_thread_whose_first_cuda_call_is_ours() -> None:
    x = [normal(8, 256, seed=index) for index in range(8)]
    before = [each.clone() for each in x]
    hadamard_transform(x[0].clone(), inplace=True)
    torch.cuda.synchronize()

    def work(index: int) -> None:
        hadamard_transform(x[index], 1 / 16, inplace=True)

    in_threads(work)
    torch.cuda.synchronize()
    for after, values in zip(x, before, strict=True):
        assert_good(after, values, 1 / 16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    with torch.cuda.device(0):
        x = normal(64, 4096).to("cuda:1")
        y = hadamard_transform(x, 1 / 64)
        assert torch.cuda.current_device() == 0
    assert y.device == x.device
    with torch.cuda.device(1):
        assert_good(y, x, 1 / 64)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------
def test_gradients() -> None:
    x = normal(64, 256).requires_grad_()
    g = normal(64, 256, seed=1)
    hadamard_transform(x, 1 / 16).backward(g)
    assert x.grad is not None
    assert_good(x.grad, g, 1 / 16)


def test_compile() -> None:
    torch.compiler.reset()

    def model(x: torch.Tensor) -> torch.Tensor:
        return hadamard_transform(x * 2, 1 / 16) + 1

    call = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 50, 999):
        x = normal(rows, 256)
        assert torch.equal(call(x), model(x))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_operator_keeps_the_rules_of_pytorch(requires_grad: bool) -> None:
    x = normal(16, 256, dtype=torch.float32).requires_grad_(requires_grad)
    torch.library.opcheck(operator.functional, (x, 1 / 16, "accurate"))
    torch.library.opcheck(operator.in_place, (x.clone(), 1 / 16, "accurate"))
    if not requires_grad:
        torch.library.opcheck(operator.into, (x, 1 / 16, "accurate", x.clone()))


def test_compile_with_inductor() -> None:
    torch.compiler.reset()

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hadamard_transform(x, 1 / 16, inplace=True)
        return hadamard_transform(x + 1, 1 / 16, out=y) * 2

    with torch._dynamo.config.patch(error_on_recompile=True):
        call = torch.compile(model, fullgraph=True, dynamic=True)
        for rows in (2, 50, 999):
            ours, theirs = normal(rows, 256), normal(rows, 256)
            torch.testing.assert_close(call(ours, torch.empty_like(ours)), model(theirs, torch.empty_like(theirs)))
            assert torch.equal(ours, theirs)


def test_batches_and_autocast() -> None:
    x = normal(8, 64, 256, dtype=torch.float32)
    for dim in (0, 1):
        y = torch.vmap(lambda x: hadamard_transform(x, 1 / 16), dim, dim)(x)
        assert torch.equal(y, hadamard_transform(x, 1 / 16))
    with torch.autocast("cuda"):
        assert hadamard_transform(x).dtype == torch.float32


def test_what_calls_cost() -> None:
    from hadagen.runtime.costs import call_costs

    costs = call_costs()
    assert list(costs)[:4] == ["cuLaunchKernelEx", "+ setting the addresses", "+ finding the launch", "in place"]
    assert all(0 < us < 1e4 for us in costs.values())


def in_new_process(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr


def test_a_fork_before_cuda_is_used() -> None:
    in_new_process("""
import os
import torch, hadagen
hadagen.hadamard_transform(torch.ones(3, 256, dtype=torch.float16))
children = []
for _ in range(2):
    if not (child := os.fork()):
        y = hadagen.hadamard_transform(torch.ones(3, 256, dtype=torch.float16, device="cuda"))
        os._exit(0 if y[:, 0].eq(256).all() and y[:, 1:].eq(0).all() else 1)
    children.append(child)
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
print("done")
""")


def test_a_fork_after_cuda_was_used_gets_the_error_of_pytorch() -> None:
    in_new_process("""
import os
import torch, hadagen
x = torch.ones(3, 256, dtype=torch.float16, device="cuda")
hadagen.hadamard_transform(x, inplace=True)
torch.cuda.synchronize()
if not (child := os.fork()):
    status = 1
    try:
        hadagen.hadamard_transform(x, inplace=True)
    except RuntimeError as error:
        status = 0 if "forked subprocess" in str(error) else 2
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
""")


def test_a_call_imports_no_tuner_and_needs_no_compiler() -> None:
    program = """
import sys
import torch
x = torch.randn(64, 4096, device="cuda", dtype=torch.float16)
before = set(sys.modules)
import hadagen
hadagen.hadamard_transform(x, inplace=True)
torch.cuda.synchronize()
from hadagen.runtime import kernels
assert kernels._found and all(kernels._found.values()), "plain PyTorch did it"
print(sorted({"optuna", "jinja2", "click", "sqlalchemy", "alembic", "yaml"} & set(sys.modules) - before))
"""
    environment = {**os.environ, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stdout + done.stderr


def test_a_gpu_without_kernels_runs_pytorch(nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "known", list)
    x = normal(3, 256)
    assert best_config(Problem(256, "float16"), 3).match is Match.GENERIC
    y = hadagen.hadamard_transform(x, 1 / 16)
    assert found(x) is None
    assert error(y, x, 1 / 16) <= bound(Problem(256, "float16"), x.numel())


@pytest.mark.parametrize("options", [{"scale": float("nan")}, {"numerics": "exact"}, {"out": torch.ones(2, 256)}])
def test_bad_input_launches_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.LoadedKernel, "prepared", None)
    with pytest.raises((ValueError, RuntimeError)):
        hadamard_transform(normal(2, 256), **options)
