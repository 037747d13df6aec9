"""`hadamard_transform` in plain PyTorch, its checks, and how kernels are found. No GPU needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_bundle import hide_bundles, write_sample
from sample_trials import H100, PROBLEM

import hadagen
from hadagen import hadamard_transform
from hadagen.driver import DriverError, LoadedKernel
from hadagen.errors import UsageError
from hadagen.reference import hadamard
from hadagen.runtime import bundles, fallback, kernels
from hadagen.runtime.device import Device

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Largest relative error of normal inputs; rounding a 16-bit result once costs four fifths of it.
BOUNDS = {torch.float16: 2.2e-4, torch.bfloat16: 1.8e-3, torch.float32: 3e-7, torch.float64: 1e-15}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def expected(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The transform in float64."""
    return torch.from_numpy(hadamard(x.detach().double().numpy(), scale))


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log2_n", range(17))
def test_every_n_against_float64(log2_n: int, dtype: torch.dtype) -> None:
    n = 1 << log2_n
    x = normal(max(2, 8192 // n), n, dtype=dtype)
    y = hadamard_transform(x, n**-0.5)
    assert y.dtype == dtype
    assert error(y, expected(x, n**-0.5)) <= BOUNDS[dtype]


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_against_the_explicit_matrix(n: int) -> None:
    matrix = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    assert torch.equal(hadamard_transform(torch.eye(n, dtype=torch.float64)), torch.tensor(matrix).double())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_sixteen_bit_results_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(-100, 100, (64, 256))).to(dtype)  # every sum is exact
    assert torch.equal(hadamard_transform(x, 0.25), expected(x, 0.25).to(dtype))


def test_many_rows_are_done_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_CPU_BLOCK", 64)
    for n in (16, 64, 256):
        x = normal(11, n)
        assert error(hadamard_transform(x), expected(x)) < 1e-15
        y = x.clone()
        assert torch.equal(hadamard_transform(y, inplace=True), hadamard_transform(x))


reals = st.floats(-1e3, 1e3)


@given(log2_n=st.integers(0, 10), rows=st.integers(0, 4), seed=st.integers(0, 999), scale=reals, factor=reals)
def test_laws(log2_n: int, rows: int, seed: int, scale: float, factor: float) -> None:
    n = 1 << log2_n
    x, z = normal(rows, n, seed=seed), normal(rows, n, seed=seed + 1)
    y = hadamard_transform(x)
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9 * n}
    torch.testing.assert_close(hadamard_transform(y, 1 / n), x, **close)  # involution
    torch.testing.assert_close(hadamard_transform(x, scale), y * scale, **close)
    linear = y + factor * hadamard_transform(z)
    torch.testing.assert_close(hadamard_transform(x + factor * z), linear, rtol=1e-9, atol=1e-6 * n)
    torch.testing.assert_close(y.square().sum(-1), n * x.square().sum(-1), **close)  # Parseval


# ---- shapes and memory -----------------------------------------------------------------------------------------------
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "one row": lambda x: x[0, 0],
    "strided rows": lambda x: x[:, ::2, :32],
    "strided elements": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, 2)[..., :4],
    "misaligned": lambda x: x.view(-1)[1:-63].view(-1, 64),
    "flipped": lambda x: x.flip(1),
    "no rows": lambda x: x[:0],
    "no rows inside": lambda x: x[:, :0],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    whole = normal(6, 4, 64, dtype=dtype)
    x = view(whole)
    wanted = expected(x, 0.5).to(dtype)

    y = hadamard_transform(x, 0.5)
    assert y.is_contiguous()
    assert y.dtype == dtype
    assert torch.equal(y, wanted)
    assert torch.equal(whole, normal(6, 4, 64, dtype=dtype)), "the input was changed"

    target = view(torch.full_like(whole, 7.0))
    assert hadamard_transform(x, 0.5, out=target) is target
    assert torch.equal(target, wanted)

    assert hadamard_transform(x, 0.5, inplace=True) is x
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_kernels_see_contiguous_vectors_of_sixteen_bytes(
    view: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(hadagen.runtime.transform, "_run", lambda x, y, *_: seen.extend((x, y)))
    whole = normal(6, 4, 64, dtype=torch.float16)
    x = view(whole)
    hadamard_transform(x)
    version = x._version
    hadamard_transform(x, inplace=True)
    assert x._version > version, "autograd would not know of the write"
    for other in VIEWS.values():
        if other(whole).shape == x.shape:
            hadamard_transform(x, out=other(torch.empty_like(whole)))
    assert len(seen) >= 6
    for tensor in seen:
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0


def test_writing_a_view_leaves_its_surroundings_alone() -> None:
    whole = normal(8, 64)
    before = whole.clone()
    hadamard_transform(whole[2:5, 16:32], inplace=True)
    whole[2:5, 16:32] = before[2:5, 16:32]
    assert torch.equal(whole, before)


def test_expanded_input() -> None:
    x = normal(64).expand(5, 64)
    assert torch.equal(hadamard_transform(x), expected(x))


def test_out_may_be_x_or_interleave_with_it() -> None:
    x = normal(4, 64)
    wanted = hadamard_transform(x)
    whole = torch.cat((x, x), dim=1)
    hadamard_transform(whole[:, :64], out=whole[:, 64:])
    assert torch.equal(whole, torch.cat((x, wanted), dim=1))
    assert hadamard_transform(x, out=x, inplace=True) is x
    alias = x.view(4, 64)
    assert hadamard_transform(x, out=alias) is alias
    assert torch.equal(x, hadamard_transform(wanted))


def test_out_that_overlaps_a_strided_x_is_still_right() -> None:
    whole = normal(9, 64)
    x, y = whole[::2], whole[1:6]
    wanted = hadamard_transform(x)
    assert torch.equal(hadamard_transform(x, out=y), wanted)


# ---- derivatives -----------------------------------------------------------------------------------------------------
def test_derivatives() -> None:
    x = normal(3, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: hadamard_transform(x, 0.3), x)
    assert torch.autograd.gradgradcheck(lambda x: hadamard_transform(x, 0.3), x)
    assert torch.autograd.gradcheck(lambda x: hadamard_transform(x * 1, 0.3, inplace=True), x)
    assert torch.autograd.gradcheck(lambda x: hadamard_transform(x.t().contiguous().t() * 1, 0.3, inplace=True), x)


def test_the_gradient_keeps_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = hadagen.runtime.transform._run
    monkeypatch.setattr(hadagen.runtime.transform, "_run", lambda *args: (seen.append(args[3]), run(*args)))
    hadamard_transform(normal(3, 8).requires_grad_(), numerics="fast").sum().backward()
    assert seen == ["fast", "fast"]


def test_a_write_in_place_is_known_to_autograd() -> None:
    x = normal(3, 8)
    weight = normal(3, 8, seed=1).requires_grad_()
    product = x * weight
    with torch.no_grad():
        hadamard_transform(x, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ---- torch.compile ---------------------------------------------------------------------------------------------------
def compiled(function: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def test_compile_without_graph_break_or_recompilation() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return hadamard_transform(x * 2, 0.5, numerics="fast") + 1

    with torch._dynamo.config.patch(error_on_recompile=True):
        call = compiled(model, dynamic=True)
        for rows in (2, 3, 50):
            x = normal(rows, 8).requires_grad_()
            y = call(x)
            torch.testing.assert_close(y, model(x))
            (gradient,) = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(gradient, expected(torch.ones(rows, 8)))


def test_compile_in_place_and_out() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hadamard_transform(x, 0.5, inplace=True)
        return hadamard_transform(x, 0.5, out=y) + x

    call = compiled(model)
    ours, theirs = normal(3, 8), normal(3, 8)
    out = torch.empty(3, 8, dtype=torch.float64)
    torch.testing.assert_close(call(ours, out), model(theirs, torch.empty_like(theirs)))
    assert torch.equal(ours, theirs)
    assert torch.equal(out, hadamard_transform(theirs, 0.5))


def test_the_operator_keeps_the_rules_of_pytorch() -> None:
    torch.library.opcheck(torch.ops.hadagen.hadamard_transform, (normal(3, 8).requires_grad_(), 0.5, "accurate"))
    torch.library.opcheck(torch.ops.hadagen.hadamard_transform, (normal(8, 4).t(), 0.5, "fast"))


# ---- bad input -------------------------------------------------------------------------------------------------------
X = torch.ones(2, 8)
SPARSE = torch.eye(8).to_sparse()


@pytest.mark.parametrize(
    ("x", "options", "kind", "message"),
    [
        ([1.0, 2.0], {}, TypeError, "x is a list; pass a torch.Tensor"),
        (X.long(), {}, RuntimeError, "x has the type int64; convert it to float16, bfloat16"),
        (X.cfloat(), {}, RuntimeError, "x has the type complex64"),
        (SPARSE, {}, RuntimeError, "x has the layout sparse_coo"),
        (torch.tensor(1.0), {}, RuntimeError, "x has no dimension"),
        (X[:, :0], {}, ValueError, "the last dimension of x is 0"),
        (X, {"scale": float("nan")}, ValueError, "scale = nan is not finite"),
        (X, {"scale": float("inf")}, ValueError, "scale = inf is not finite"),
        (X, {"scale": -1e39}, ValueError, r"scale = -1e\+39 is not finite in float32; pass a number up to 3.4e\+38"),
        (X, {"scale": 10**400}, ValueError, "is not finite"),
        (X, {"scale": "1"}, TypeError, "scale is a str"),
        (X, {"scale": torch.ones(())}, TypeError, "scale is a Tensor"),
        (X, {"scale": 1j}, TypeError, "scale is a complex"),
        (X, {"numerics": "exact"}, ValueError, "numerics 'exact' is not supported; choose one of accurate, fast"),
        (X, {"numerics": ["fast"]}, ValueError, "is not supported"),
        (X, {"out": [1.0]}, TypeError, "out is a list"),
        (X, {"out": torch.ones(8, 2)}, RuntimeError, r"out has the shape \(8, 2\) but x has \(2, 8\)"),
        (X, {"out": X.double()}, RuntimeError, "out has the dtype float64 but x has float32"),
        (X, {"out": X.to("meta")}, RuntimeError, "out has the device meta but x has cpu"),
        (X, {"out": torch.ones(2, 8), "inplace": True}, ValueError, "two places"),
        (X[0].expand(2, 8), {"inplace": True}, RuntimeError, "share memory"),
        (X, {"out": X[0].expand(2, 8)}, RuntimeError, "share memory"),
        (X.view(-1)[:8], {"out": X.view(-1)[4:12]}, RuntimeError, "out overlaps x"),
        (X.clone().requires_grad_(), {"inplace": True}, RuntimeError, "is a leaf"),
        (X.clone().requires_grad_()[1:], {"inplace": True}, RuntimeError, "is a leaf"),
        (X.clone().requires_grad_(), {"out": X.clone()}, RuntimeError, "no_grad"),
        (X, {"out": X.clone().requires_grad_()}, RuntimeError, "no_grad"),
    ],
)
def test_bad_input(x: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        hadamard_transform(x, **options)
    assert isinstance(caught.value, (TypeError, UsageError))
    assert torch.equal(X, torch.ones(2, 8)), "something was written"


def test_a_leaf_may_be_written_without_gradients() -> None:
    x = normal(2, 8).requires_grad_()
    wanted = expected(x)
    with torch.no_grad():
        hadamard_transform(x, inplace=True)
        assert torch.equal(hadamard_transform(x, 1 / 8, out=torch.empty_like(x)), expected(wanted, 1 / 8))
    assert torch.equal(x, wanted)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = normal(2, 8)
        hadamard_transform(x, inplace=True)
    with pytest.raises(RuntimeError, match="inference"):
        hadamard_transform(x, inplace=True)
    assert torch.equal(x, expected(normal(2, 8)))


# ---- finding kernels -------------------------------------------------------------------------------------------------
class Loader:
    """Stands in for `hadagen.driver.load` and notes what it was asked for."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.error: Exception | None = None

    def __call__(self, image: bytes, entry: str, spec: Any, device: int) -> LoadedKernel:
        time.sleep(0.01)  # so that threads meet
        self.images.append(image)
        if self.error:
            raise self.error
        return LoadedKernel(entry, spec, device, 1, "module", "function")


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loader:
    """A machine with an H100 and a bundle with one kernel for it, for n = 256 in place."""
    loader = Loader()
    hide_bundles(tmp_path, monkeypatch)
    monkeypatch.setenv(bundles.VARIABLE, str(write_sample(tmp_path / "a.db")))
    monkeypatch.setattr(kernels, "cuda_device", lambda index: Device("sm90", H100.gpu))
    monkeypatch.setattr(kernels, "_found", {})
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels.driver, "load", loader)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    return loader


def find(elements: int = 1 << 13, device: int = 0, **other: Any) -> LoadedKernel | None:
    asked = {"n": 256, "dtype": torch.float16, "numerics": "accurate", "in_place": True, **other}
    return kernels.find(device, elements=elements, **asked)


def test_a_kernel_is_loaded_once_for_all_buckets_of_a_device(loader: Loader) -> None:
    first = find()
    assert first
    assert first.spec.tile_elements == 4096
    assert find(1 << 28) is first
    assert loader.images == [b"cubin 1"]
    second = find(device=1)
    assert second
    assert second.device == 1
    assert len(loader.images) == 2


def test_threads_load_a_kernel_once(loader: Loader) -> None:
    start = threading.Barrier(8)

    def work(index: int) -> LoadedKernel | None:
        start.wait()
        return find(1 << 10 + index)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(work, range(8))))) == 1
    assert len(loader.images) == 1


def test_a_known_bucket_opens_no_file_and_takes_no_lock(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find()
    monkeypatch.setattr(kernels, "_lock", None)
    monkeypatch.setattr(bundles, "known", None)
    assert find((1 << 13) + 256) is first


@pytest.mark.parametrize("other", [{"n": 1 << 16}, {"n": 1}, {"dtype": torch.float32}, {"numerics": "fast"}])
def test_what_has_no_kernel(other: dict[str, Any], loader: Loader) -> None:
    assert find(1 << 16, **other) is None
    assert loader.images == []


@pytest.mark.parametrize("target", [0x1000, 0x9000])
def test_a_tensor_on_a_gpu_is_launched_with_its_addresses(
    target: int, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, launched = [], []
    monkeypatch.setattr(kernels, "find", lambda *arguments: asked.append(arguments) or "kernel")
    monkeypatch.setattr(kernels, "launch", lambda *arguments: launched.append(arguments))

    def on_gpu(address: int) -> Any:
        return SimpleNamespace(
            is_cuda=True,
            shape=(3, 256),
            dtype=torch.float16,
            numel=lambda: 768,
            get_device=lambda: 1,
            data_ptr=lambda: address,
        )

    hadagen.runtime.transform._run(on_gpu(0x1000), on_gpu(target), 0.5, "fast")
    assert asked == [(1, 256, torch.float16, "fast", target == 0x1000, 768)]
    assert launched == [("kernel", 0x1000, target, 768, 0.5)]


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_is_queued_on_the_current_stream_of_its_device(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    @contextmanager
    def active(device: int) -> Iterator[None]:
        calls.append(("active", device))
        yield

    kernel = SimpleNamespace(device=1, launch=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(kernels, "_raw_stream", lambda device: 100 + device)
    monkeypatch.setattr(kernels.driver, "active", active)
    monkeypatch.setattr("torch.cuda.current_device", lambda: current)
    kernels.launch(kernel, 16, 32, 768, 0.5)  # type: ignore[arg-type]
    assert calls == [("active", 1)] * (current != 1) + [(101, 16, 32, 768, 0.5)]


def test_a_newer_gpu_gets_ptx(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cuda_device", lambda index: Device("sm100", "NVIDIA B200"))
    assert find()
    assert loader.images == [b"// ptx of cubin 1"]


def test_an_older_gpu_and_other_makers_get_none(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    for here in (Device("sm80", "NVIDIA A100-SXM4-80GB"), None):
        monkeypatch.setattr(kernels, "cuda_device", lambda index, here=here: here)
        monkeypatch.setattr(kernels, "_found", {})
        assert find() is None


def test_a_kernel_that_does_not_load_is_replaced_with_a_warning(loader: Loader) -> None:
    loader.error = DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU", "loading k failed; update the driver")
    with pytest.warns(RuntimeWarning, match=f"{PROBLEM.name} here: loading k failed; update the driver"):
        assert find() is None
    assert find() is None
    assert len(loader.images) == 1


def test_a_kernel_that_does_not_load_ends_a_graph_capture(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    loader.error = DriverError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "loading k failed; call it before")
    with pytest.raises(DriverError):
        find()
    loader.error = None
    assert find()


# ---- the package -----------------------------------------------------------------------------------------------------
def test_the_package_offers_what_it_says() -> None:
    assert set(hadagen.__all__) <= set(dir(hadagen))
    for name in (*hadagen.__all__, "__version__"):
        assert getattr(hadagen, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hadagen.nothing  # noqa: B018
