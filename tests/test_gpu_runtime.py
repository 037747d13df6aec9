"""`hadamard_transform` on a GPU: every shipped kernel, tensors of any kind, what is refused, and what a call costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_tensors import (
    DTYPES,
    assert_good,
    bound,
    error,
    found,
    kernels_for_this_gpu,
    normal,
    nothing_loaded,
    reference,
    require,
)
from test_runtime import VIEWS, expected

import hadagen
from hadagen import Match, Problem, best_config, hadamard_transform
from hadagen.gpu import driver
from hadagen.problem.problem import Rows, padded_length
from hadagen.problem.regimes import Destination
from hadagen.runtime.choose import bundles
from hadagen.runtime.choose.device import find_device
from hadagen.runtime.choose.entries import called_by_size
from hadagen.runtime.launch import kernels, streams

__all__ = ["kernels_for_this_gpu", "nothing_loaded"]  # fixtures
pytestmark = pytest.mark.gpu

SIZES = [1 << k for k in range(1, 16)]
GUARD = 4096  # elements on either side of a tensor that must not be written


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inplace", [False, True], ids=["out-of-place", "in-place"])
@pytest.mark.parametrize("numerics", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_kernel_against_float64(n: int, dtype: str, numerics: str, inplace: bool) -> None:
    """At every bucket's size and a ragged one beside it; nothing outside of the result is written."""
    problem = Problem.of(n, dtype, numerics)
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


@pytest.mark.parametrize("numerics", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("n", [*SIZES, 1 << 16, 1 << 17])
def test_a_row_transforms_to_the_same_bits_among_any_number_of_rows(n: int, dtype: torch.dtype, numerics: str) -> None:
    """Of 1,000 numbers of rows without gaps, in place too, and of some with gaps, of which a copy has none."""
    most = max(8, (1 << 23) // n)
    counts = [round(most ** (i / 999)) for i in range(1000)]
    options: dict[str, Any] = {"numerics": numerics, "batch_invariant": True}
    whole, wide = normal(most, n, dtype=dtype), normal(most, n + 8, dtype=dtype, seed=1)[:, :n]
    for x in (whole, wide):
        y = hadamard_transform(x, n**-0.5, **options)
        differ = []
        for number, rows in enumerate(counts if x is whole else counts[::20]):
            part = x[:rows].clone() if number % 10 == 0 else x[:rows]
            result = hadamard_transform(part, n**-0.5, inplace=number % 10 == 0, **options)
            differ.append((result != y[:rows]).any())
        assert not bool(torch.stack(differ).any())


def test_ptx_gives_the_same(nothing_loaded: None) -> None:
    """What a newer GPU would run: PTX, compiled by the driver."""
    problem, device = Problem.of(4096, "float16"), find_device()
    entries, bundle = called_by_size(problem, Destination.OUT_OF_PLACE, device)
    kernels = [bundle.kernel(entry.kernel) for entry in entries.values()]
    kernel = next((each for each in kernels if each.ptx), None)
    if kernel is None:
        pytest.skip(f"no shipped kernel of {problem.key} has PTX; all are compiled from recipes")
    x = normal(64, 4096)
    loaded = driver.load(kernel.ptx, kernel.entry, kernel.launch, x.get_device())
    y = torch.empty_like(x)
    streams.queue(loaded.prepared(x.numel(), 0.5), x.get_device(), x.data_ptr(), y.data_ptr())
    assert_good(y, x, 0.5)


@pytest.mark.parametrize(("n", "dtype"), [(1 << 18, torch.float16), (1, torch.bfloat16), (256, torch.float64)])
def test_what_has_no_kernel_runs_in_pytorch(n: int, dtype: torch.dtype) -> None:
    x = normal(3, n, dtype=dtype)
    assert kernels.problem_of(n, dtype, "accurate", Rows.CONTIGUOUS) is None
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


def test_a_gpu_without_kernels_runs_pytorch(nothing_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "known", list)
    x = normal(3, 256)
    assert best_config(Problem.of(256, "float16"), 3).match is Match.GENERIC
    with pytest.warns(RuntimeWarning, match="on this GPU, which is slower: no bundle has kernels for "):
        y = hadagen.hadamard_transform(x, 1 / 16)
    assert found(x) is None
    assert error(y, x, 1 / 16) <= bound(Problem.of(256, "float16"), x.numel())


# ---- rows of any length, anywhere ------------------------------------------------------------------------------------
@pytest.mark.parametrize("inplace", [False, True], ids=["out-of-place", "in-place"])
@pytest.mark.parametrize("numerics", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [2, 3, 7, 48, 96, 100, 192, 255, 257, 1000, 4095, 5120, 11008, 14336, 18944, 32767])
def test_pitched_rows_against_float64(columns: int, dtype: str, numerics: str, inplace: bool) -> None:
    """Padded, at any address and pitch; nothing between the rows or around them is written."""
    problem = Problem.of(padded_length(columns), dtype, numerics, rows="pitched")
    for rows, pitch, offset in ((1, columns, 0), (3, columns + 1, 1), (65, columns + 8, 8), (1030, columns, 3)):
        x = normal(rows, columns, dtype=DTYPES[dtype], seed=rows)
        require(found(x, numerics, inplace, rows=Rows.PITCHED))
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
    require(found(x, rows=Rows.PITCHED))
    y = hadamard_transform(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hadamard_transform(x, out=y)
    hadamard_transform(x, inplace=True)
    assert torch.cuda.max_memory_allocated() == before


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_kernels_transform_views_on_a_gpu(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
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
@pytest.mark.parametrize("n", [2, 128, 4096, 32768, 131072])
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
    assert error(y[picked], some, n**-0.5) <= bound(Problem.of(n, "bfloat16"), some.numel())
    y[picked] = 0
    assert not any(part.any() for part in y.view(-1).split(1 << 28)), "a row of zeros was changed"


# ---- what is refused, and what a call costs --------------------------------------------------------------------------
def test_what_calls_cost() -> None:
    from hadagen.runtime.costs import call_costs

    costs = call_costs()
    assert list(costs)[:4] == ["cuLaunchKernelEx", "+ setting the addresses", "+ finding the launch", "in place"]
    assert all(0 < us < 1e4 for us in costs.values())
