"""Calls with a prologue on a GPU: kernels run them, and where nothing is summed the bits are those of PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from real_compilers import needs_compiler

from hadagen import Rotation, hadamard_transform, prologues, rotate_quantize
from hadagen.runtime.choose import tables

pytestmark = [pytest.mark.gpu, needs_compiler]


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    g, u = x.chunk(2, -1)
    return F.silu(g) * u


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    g, u = x.chunk(2, -1)
    return F.gelu(g) * u


def wide(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(rows, 2 * columns, device="cuda") * 3).to(dtype)


def ran(prologue: str) -> bool:
    """Whether a kernel with this prologue was found for a call."""
    return any(kernel is not None and kind.problem.prologue == prologue for (kind, _), kernel in tables.found.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("before", "formula"),
    [
        (prologues.SiluMul(numerics="eager"), silu_mul),
        (prologues.GeluMul(numerics="eager"), gelu_mul),
        (prologues.SiluMul(numerics="inductor"), torch.compile(silu_mul)),
    ],
    ids=["silu, eager", "gelu, eager", "silu, inductor"],
)
def test_codes_without_a_rotation_have_the_bits_of_pytorch(
    before: prologues.Prologue, formula: object, dtype: torch.dtype
) -> None:
    x = wide(33, 1408, dtype)
    found = rotate_quantize(x, to="fp8-group", before=before)
    assert ran(before.name)
    exact = rotate_quantize(formula(x), to="fp8-group")  # type: ignore[operator]
    assert torch.equal(found.codes.view(torch.uint8), exact.codes.view(torch.uint8))
    assert torch.equal(found.scales, exact.scales)


@pytest.mark.parametrize("columns", [14336, 11008, 4096])
@pytest.mark.parametrize("to", ["fp8-row", "mxfp4"])
def test_a_fused_call_equals_the_call_in_pieces(columns: int, to: str) -> None:
    x, r = wide(17, columns), Rotation(columns).cuda()
    before = prologues.SiluMul()
    found = rotate_quantize(x, r, to=to, before=before).dequantize().double()
    assert ran("silu_mul")
    g, u = x.float().chunk(2, -1)
    exact = r((F.silu(g) * u).double())
    reference = rotate_quantize(r(F.silu(g) * u), to=to).dequantize().double()
    errors = [float((each - exact).norm() / exact.norm()) for each in (found, reference)]
    assert errors[0] < 1.02 * errors[1]


def test_blocks_and_transforms() -> None:
    x = wide(9, 14336)
    y = Rotation(14336, block=128).cuda()(x, before=prologues.SiluMul())
    exact = Rotation(14336, block=128).cuda()(silu_mul(x.double()))
    assert float((y.double() - exact).norm() / exact.norm()) < 1.8e-3
    x = wide(9, 1024)
    y = hadamard_transform(x, 1024**-0.5, before=prologues.SiluMul(layout="interleaved", limit=7, alpha=1.702, beta=1))
    g, u = x.double()[:, ::2].clamp(max=7), x.double()[:, 1::2].clamp(-7, 7)
    exact = hadamard_transform(g * torch.sigmoid(1.702 * g) * (u + 1), 1024**-0.5)
    assert float((y.double() - exact).norm() / exact.norm()) < 1.8e-3


def test_a_call_in_a_graph_and_compiled() -> None:
    x, r = wide(64, 4096), Rotation(4096).cuda()

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        q = rotate_quantize(x, r, to="fp8-row", before=prologues.SiluMul())
        return [q.codes.view(torch.uint8), q.scales]

    eager = call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(x)
    graph.replay()
    for results in (captured, torch.compile(call)(x)):
        assert all(torch.equal(one, other) for one, other in zip(results, eager, strict=True))


@pytest.mark.parametrize("columns", [256, 1024, 5120])
@pytest.mark.parametrize("to", [None, "fp8-row", "mxfp4"])
def test_a_row_behind_a_prologue_has_the_same_bits_among_any_number_of_rows(columns: int, to: str | None) -> None:
    """By kernels that no bundle has."""
    tables.clear()
    most = (1 << 23) // columns
    x, r = wide(most, columns, torch.float16), Rotation(columns, signs=torch.arange(columns) % 3 % 2 * 2 - 1).cuda()

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        if to is None:
            return [r(x, before=prologues.Mul(), batch_invariant=True)]
        found = rotate_quantize(x, r, to=to, before=prologues.Mul(), batch_invariant=True)
        return [each.view(torch.uint8).reshape(len(x), -1) for each in (found.codes, found.scales)]

    whole = results(x)
    for rows in {round(most ** (i / 99)) for i in range(100)}:
        assert all(torch.equal(part, all_of[:rows]) for part, all_of in zip(results(x[:rows]), whole, strict=True))
    assert ran("mul")
