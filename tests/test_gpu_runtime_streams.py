"""`hadamard_transform` on a GPU: streams, graphs, threads, devices, and kernels that start early."""

import threading
from collections.abc import Callable

import pytest
import torch
from gpu_tensors import assert_good, error, kernels_for_this_gpu, normal, nothing_loaded
from test_runtime import padded

import hadagen
from hadagen import hadamard_transform
from hadagen.gpu import driver
from hadagen.runtime.choose import bundles

__all__ = ["kernels_for_this_gpu", "nothing_loaded"]  # fixtures
pytestmark = pytest.mark.gpu


# ---- streams and graphs ----------------------------------------------------------------------------------------------
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
def test_cuda_graphs_replay_calls(inplace: bool) -> None:
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


# ---- threads and devices ---------------------------------------------------------------------------------------------
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
