"""The transform in plain PyTorch, on the CPU: every row length, every type, in place and not, block by block."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_runtime import BOUNDS, error, normal, padded
from torch.utils._python_dispatch import TorchDispatchMode

import hadagen
from hadagen.runtime.plain import transform as plain_transform

LENGTHS = (1, 2, 3, 4, 5, 8, 12, 16, 31, 32, 64, 100, 137, 512, 1000, 4096, 5000, 40960, 1 << 16, 1 << 17)


def transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    y = torch.full(x.shape, 7.0, dtype=x.dtype)
    plain_transform.transform(x, y, scale)
    return y


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_transform, "_CPU_BLOCK", 64)


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("m", LENGTHS)
def test_every_length_against_float64(m: int, dtype: torch.dtype) -> None:
    x = normal(max(2, 8192 // m), m, dtype=dtype)
    before = x.clone()
    assert error(transform(x, m**-0.5), padded(x, m**-0.5)) <= BOUNDS[dtype]
    assert torch.equal(x, before), "the input was changed"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [200, 256])
def test_sixteen_bit_results_of_pytorch_are_rounded_once(m: int, dtype: torch.dtype) -> None:
    x = torch.randint(-100, 100, (64, m), generator=torch.Generator().manual_seed(0)).to(dtype)  # every sum is exact
    assert torch.equal(transform(x, 0.25), padded(x, 0.25).to(dtype))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_matrix_products_does_not_change_a_transform(precision: str) -> None:
    x = normal(64, 4096, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert error(transform(x), padded(x)) <= BOUNDS[torch.float32]
    finally:
        torch.set_float32_matmul_precision(before)


def test_products_that_round_are_not_taken(monkeypatch: pytest.MonkeyPatch, small_blocks: None) -> None:
    x, product, taken = normal(64, 256, dtype=torch.float32), torch.mm, list[int]()

    def rounding(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        taken.append(len(a))
        return product(a.bfloat16().float(), b, out=out)

    wanted = transform(x)
    monkeypatch.setattr(torch, "mm", rounding)
    assert error(transform(x), padded(x)) <= BOUNDS[torch.float32]
    assert taken == [16]  # of the probe
    assert torch.allclose(transform(x), wanted, rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_stays_in_its_row() -> None:
    for m in (48, 64):
        x = normal(5, m, dtype=torch.float32)
        x[1, 3], x[3, 0] = float("inf"), float("nan")
        finite = torch.isfinite(transform(x)).all(-1)
        assert finite.tolist() == [True, False, True, False, True]


@given(m=st.integers(1, 300), rows=st.integers(0, 4), seed=st.integers(0, 99), scale=st.floats(-1e3, 1e3))
def test_any_rows_against_float64(m: int, rows: int, seed: int, scale: float) -> None:
    x = normal(rows, m, seed=seed)
    torch.testing.assert_close(transform(x, scale), padded(x, scale), rtol=1e-9, atol=1e-9 * m)


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("m", [1, 5, 16, 48, 64, 100, 128])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_in_place_and_not(m: int, dtype: torch.dtype) -> None:
    x = normal(11, m, dtype=dtype)
    y = transform(x)
    assert torch.equal(y, padded(x).to(dtype)) or error(y, padded(x)) <= BOUNDS[dtype]
    plain_transform.transform(x, x, 1.0)
    assert torch.equal(x, y)


@pytest.mark.parametrize("m", [32, 24])
@pytest.mark.usefixtures("small_blocks")
def test_any_strides(m: int) -> None:
    whole = normal(6, 4, 64)
    views = {
        "pitched": whole[:, 0, :m],
        "every other element": whole[..., : 2 * m : 2],
        "transposed": whole[..., :m].transpose(0, 1),
        "turned": normal(m, 9).t(),
        "expanded": normal(m).expand(5, m),
        "no rows": whole[:0, :, :m],
    }
    for name, x in views.items():
        torch.testing.assert_close(transform(x), padded(x), rtol=1e-12, atol=1e-12, msg=lambda m, name=name: name + m)
    pitched = views["pitched"]
    wanted, outside = transform(pitched), whole[:, :, m:].clone()
    plain_transform.transform(pitched, pitched, 1.0)
    assert torch.equal(pitched, wanted)
    assert torch.equal(whole[:, :, m:], outside)


class Largest(TorchDispatchMode):
    """Notes the largest storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("m", [96, 128])
@pytest.mark.usefixtures("small_blocks")
def test_no_copy_of_the_whole(m: int, dtype: torch.dtype) -> None:
    x = normal(50, m, dtype=dtype)
    y = torch.empty_like(x)
    with Largest() as largest:
        plain_transform.transform(x, y, 1.0)
    assert largest.bytes == 2 * 128 * 4, "two buffers of one block of float32"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("rows", [1, 70000])  # few, and enough for a product of the lowest bits
def test_no_sum_overflows_where_no_result_does(rows: int, dtype: torch.dtype) -> None:
    most = 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 1)  # a power of two, so that nothing is rounded
    x = torch.full((rows, 64), most, dtype=dtype)
    wanted = torch.zeros_like(x)
    wanted[:, 0] = most
    assert torch.equal(hadagen.hadamard_transform(x, 1 / 64), wanted)
    alone = torch.zeros_like(x)
    alone[:, 0] = most / 64
    assert torch.equal(hadagen.hadamard_transform(alone, 64.0), torch.full_like(x, most))


# ---- on a GPU without kernels ----------------------------------------------------------------------------------------
@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    """PyTorch answers for this attribute without having it, so monkeypatch would delete it in the end."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    yield
    matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("m", [1, 8, 137, 4096, 1 << 16])
def test_the_transform_of_pytorch_on_a_gpu(
    m: int, dtype: torch.dtype, tf32_allowed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_transform, "_GPU_BLOCK", 1 << 14)
    x = normal(max(3, 50000 // m), m, dtype=dtype).cuda()
    y = torch.full_like(x, 7.0)
    plain_transform.transform(x, y, m**-0.5)
    assert error(y.cpu(), padded(x.cpu(), m**-0.5)) <= BOUNDS[dtype]
    plain_transform.transform(x, x, m**-0.5)
    assert torch.equal(x, y)
