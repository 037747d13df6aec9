"""Rotations by real matrices on a GPU with wgmma: one kernel, as exact as PyTorch."""

import pytest
import torch
from real_compilers import needs_compiler

from hadagen import Rotation, rotate_quantize
from hadagen.problem.problem import Problem
from hadagen.runtime.choose import tables
from hadagen.truth.accuracy import relative_error

pytestmark = [pytest.mark.gpu, needs_compiler]
DTYPES = [torch.float16, torch.bfloat16]


def rotation(n: int, order: int, norm: float = 1.0, *, signed: bool = False) -> Rotation:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only sm_90 has wgmma")
    random = torch.Generator().manual_seed(order)
    matrix = torch.linalg.qr(torch.randn(order, order, generator=random, dtype=torch.float64)).Q * norm
    signs = torch.randint(0, 2, (n,), generator=random) * 2 - 1 if signed else None
    return Rotation(n, matrix, signs=signs).cuda()


def pair(n: int, order: int) -> Rotation:
    random = torch.Generator().manual_seed(order)
    two = (torch.linalg.qr(torch.randn(k, k, generator=random, dtype=torch.float64)).Q for k in (order, n // order))
    return Rotation(n, list(two)).cuda()


def ran(problem: Problem) -> bool:
    return any(kind.problem == problem and kernel is not None for (kind, _), kernel in tables.found.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", ["accurate", "fast"])
@pytest.mark.parametrize(
    ("n", "order"), [(4096, 64), (5120, 20), (14336, 28), (11008, 172), (12288, 96), (16384, 128), (160, 20)]
)
def test_one_kernel_is_as_exact_as_its_bound(n: int, order: int, numerics: str, dtype: torch.dtype) -> None:
    for norm, signed in ((1.0, False), (3e-20, True)):
        r = rotation(n, order, norm, signed=signed)
        x = torch.randn(517, n, device="cuda", dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        problem = Problem.of(n, name, numerics, order=order, real=True, signed=signed)
        for call in (r, r.inverse):
            y = call(x, numerics=numerics)
            assert ran(problem)
            assert float(relative_error(y, call(x.double()))) <= problem.error_bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", ["accurate", "fast"])
@pytest.mark.parametrize(
    ("n", "order"), [(4096, 64), (14336, 112), (8192, 64), (9472, 148), (5120, 20), (24576, 96), (896, 14), (1024, 32)]
)
def test_one_kernel_multiplies_by_two_matrices(n: int, order: int, numerics: str, dtype: torch.dtype) -> None:
    r, x = pair(n, order), torch.randn(517, n, device="cuda", dtype=dtype)
    problem = Problem.of(n, str(dtype).removeprefix("torch."), numerics, order=order, real=True, paired=True)
    for call in (r, r.inverse):
        y = call(x, numerics=numerics)
        assert ran(problem)
        assert float(relative_error(y, call(x.double()))) <= problem.error_bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", ["int8-row", "fp8-row", "mxfp4"])
@pytest.mark.parametrize("paired", [False, True])
def test_codes_are_near_those_of_pytorch(to: str, dtype: torch.dtype, paired: bool) -> None:
    r = pair(4096, 64) if paired else rotation(4096, 64, signed=True)
    x = torch.randn(130, 4096, device="cuda", dtype=dtype)
    found, exact = rotate_quantize(x, r, to=to), rotate_quantize(r(x.float()), to=to)
    assert any(
        kind.problem.transform.real and kind.problem.transform.paired is paired and kind.problem.io.form
        for kind, _ in tables.found
    )
    assert (found.codes.view(torch.uint8) != exact.codes.view(torch.uint8)).double().mean() < 1e-2
