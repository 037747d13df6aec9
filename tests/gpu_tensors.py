"""Tensors on a GPU, what their transform is and how far off it may be, and the kernels that do it."""

import pytest
import torch

from hadagen import Match, Problem, best_config, hadamard_transform
from hadagen.gpu import driver
from hadagen.problem.problem import Rows, padded_length
from hadagen.runtime.call import slow
from hadagen.runtime.choose import tables
from hadagen.runtime.launch import kernels

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def kernels_for_this_gpu() -> None:
    if best_config(Problem.of(4096, "float16"), 16).match is Match.GENERIC:
        pytest.skip(f"no bundle has kernels for {torch.cuda.get_device_name()}; run `hadagen tune`")


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timed", "found", "loaded"):
        monkeypatch.setattr(tables, name, {})
    for name in ("_told", "_seen"):
        monkeypatch.setattr(slow, name, set())
    tables.forget()


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
    x: torch.Tensor, numerics: str = "accurate", in_place: bool = False, rows: Rows = Rows.CONTIGUOUS
) -> driver.LoadedKernel | None:
    n = padded_length(x.shape[-1])
    problem = kernels.problem_of(n, x.dtype, numerics, rows)
    return problem and kernels.find(kernels.Kind(x.get_device(), problem, in_place), x.numel() // x.shape[-1] * n)


def dtype_name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def assert_good(y: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> None:
    assert found(x), "plain PyTorch did it"
    torch.cuda.synchronize()
    assert error(y, x, scale) <= bound(Problem.of(x.shape[-1], dtype_name(x)), x.numel())


def require(kernel: driver.LoadedKernel | None) -> driver.LoadedKernel:
    if kernel is None:
        pytest.skip("no bundle has such a kernel")
    return kernel
