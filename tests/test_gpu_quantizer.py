"""The quantizer on a GPU gives the bits that it gives on a CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_quantizer import ALL, TYPES, chosen, given, hard_rows
from test_rotation import some_signs

from hadagen import Rotation, presets, rotate_quantize
from hadagen.problem.formats import FORMATS, KERNEL_LAYOUTS, TENSOR, Element, Layout
from hadagen.runtime.call.runs import RunOfRows
from hadagen.runtime.choose import tables
from hadagen.runtime.quantized import Quantized
from hadagen.truth import quantizer
from hadagen.truth.quantizer import quantize
from hadagen.truth.reference import hadamard

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "rule"), ALL)
def test_codes_and_scales_are_the_same_on_every_device(name: str, rule: str, dtype: str) -> None:
    x, to = hard_rows(TYPES[dtype]).float(), chosen(name, rule)
    x[0, 0], x[1, 0], x[2, 0] = torch.nan, torch.inf, -torch.inf
    scale = given(to, len(x))
    on_cpu = quantize(x, to, TYPES[dtype], scale)
    on_gpu = quantize(x.cuda(), to, TYPES[dtype], None if scale is None else scale.cuda())
    for wanted, found in zip(on_cpu, on_gpu, strict=True):
        found, wanted = (each.cpu().flatten() for each in (found, wanted))
        if wanted.dtype.is_floating_point and wanted.dtype.itemsize > 1:  # a NaN has other bits on a GPU
            assert torch.equal(found.isnan(), wanted.isnan())
            found, wanted = found.nan_to_num(), wanted.nan_to_num()
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


ROTATIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "16": lambda: 16,
    "64": lambda: 64,
    "128": lambda: 128,
    "signed": lambda: Rotation(COLUMNS, signs=some_signs(256), signs_after=some_signs(256), block=256).cuda(),
    "row": lambda: Rotation(COLUMNS).cuda(),
    "regular": lambda: Rotation(3 * 256, "regular", block=256).cuda(),
    "matrix": lambda: Rotation(28 * 64, "quarot").cuda(),
    "matrix, real": lambda: Rotation(64 * 64, torch.linalg.qr(torch.randn(64, 64)).Q).cuda(),
    "matrix, signed": lambda: Rotation(12 * 128, "dao", signs=some_signs(12 * 128)).cuda(),
}
COLUMNS = 1024


def launches() -> int:
    """How many launches of kernels that quantize are remembered."""
    return len({id(run) for run in tables.calls.values() if isinstance(run, RunOfRows)})


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_kernels_quantize_what_the_rotation_gives(rotation: str, dtype: str) -> None:
    r = ROTATIONS[rotation]()
    if "matrix" in rotation and dtype == "float32":
        return  # kernels with a matrix take 16-bit values
    if "real" in rotation and torch.cuda.get_device_capability() != (9, 0):
        return  # and those with a real matrix need wgmma
    columns = r.n if isinstance(r, Rotation) else COLUMNS
    x = torch.randn(130, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    x[::7, ::50] *= 100
    x = x.to(TYPES[dtype])
    exact = x.double()
    if isinstance(r, Rotation):
        exact = exact @ r.matrix().double()
    elif r:
        exact = exact.view(-1, r) @ torch.from_numpy(hadamard(np.eye(r), r**-0.5)).cuda()
        exact = exact.view(130, columns)
    for name, rule in ALL:
        for layout in filter(KERNEL_LAYOUTS.__contains__, FORMATS[name].layouts):
            values, scale = x, {"tensor_scale": 0.05} if FORMATS[name].needs_scale else {}
            if name == "fp8-head":  # of 13 rows
                values, heads = x.view(10, 13, columns), torch.arange(1.0, 11.0, device="cuda")
                scale = {"tensor_scale": heads * (22.4 if rule == "fa3" else 0.05)}
            launched = launches()
            found = rotate_quantize(values, r, to=name, rule=rule, layout=layout.value, **scale)
            assert launches() == launched + 1, f"{name} {rule} {layout}: no kernel"
            assert_near(found, exact, x.dtype, f"{name} {rule} {layout.value}")


def assert_near(found: Quantized, exact: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Scales are those of the quantizer, but for the error of the rotation, and so are the codes with these scales."""
    form, given = found.format, found.tensor_scale
    error = {torch.float16: 2e-3, torch.bfloat16: 4e-3, torch.float32: 1e-5}[dtype]
    error *= 3 if form.rounds_first else 1  # to the next of the type, value and scale
    codes, scales = quantizer.quantize(exact.float(), form, dtype, found.scales if form.group == TENSOR else given)
    if form.group != TENSOR:
        mine, theirs = (
            quantizer._decode_scales(quantizer.rows_of_scales(each, form.layout, *shape))
            for shape in [(len(exact), form.scales_in_row(exact.shape[1]))]
            for each in (found.scales, scales)
        )
        ratio = (mine / theirs).double()
        if form.scale in ("float32", "input"):
            assert ((ratio - 1).abs() <= error).all(), what
        else:  # of few bits, which may be the next
            step = {"e8m0": 2.0, "e4m3": 9 / 8}[form.scale]
            assert ((ratio >= 1 / step) & (ratio <= step)).all(), what
            assert (ratio != 1).double().mean() <= 0.02, what
    if form.element is Element.NONE:
        return
    values = found.dequantize().double().view(exact.shape)
    best = quantizer.dequantize(codes, found.scales if form.group == TENSOR else scales, form, given).double()
    norm = torch.linalg.vector_norm(exact)
    mine, theirs = (float(torch.linalg.vector_norm(each - exact) / norm) for each in (values, best))
    assert mine <= theirs * 1.01 + error, f"{what}: {mine} instead of {theirs}"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "rule"), ALL)
def test_kernels_without_a_rotation_give_the_same_bits(name: str, rule: str, dtype: str) -> None:
    x = hard_rows(TYPES[dtype])
    x[0, 0], x[1, 40], x[2, 80] = torch.nan, torch.inf, -torch.inf
    to, scale = chosen(name, rule), given(chosen(name, rule), len(x))
    if name == "fp8-head":
        x = x.view(len(scale), -1, x.shape[1])
    launched = launches()
    found = rotate_quantize(x.cuda(), to=name, rule=rule, tensor_scale=None if scale is None else scale.cuda())
    assert launches() == launched + 1
    codes, scales = quantizer.quantize(x.float().flatten(0, -2), to, x.dtype, scale)
    assert torch.equal(found.codes.cpu().view(torch.uint8).flatten(), codes.view(torch.uint8).flatten())
    if to.group != TENSOR:
        mine, theirs = found.scales.cpu().flatten(), scales.flatten()
        if to.scale in ("float32", "input"):
            mine, theirs = mine.nan_to_num(-1.0), theirs.nan_to_num(-1.0)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rotation", [None, 64])
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.needs_scale])
def test_a_scale_of_zero_is_the_same_on_every_device(name: str, rotation: int | None, dtype: str) -> None:
    """By kernels, eager and compiled: values of 0 have the code 0, all others the largest."""
    x = torch.zeros(8, 256)
    x[3, 64:128], x[5, 7], x[6] = 1.0, -1e-6, torch.finfo(TYPES[dtype]).max / 64
    x = x.to(TYPES[dtype])
    scale = torch.zeros(8) if name == "fp8-head" else torch.zeros(())
    values = x[:, None] if name == "fp8-head" else x

    def model(x: torch.Tensor, scale: Any) -> tuple[torch.Tensor, ...]:
        found = rotate_quantize(x, rotation, to=name, tensor_scale=scale)
        return found.codes.view(torch.uint8), found.scales, found.dequantize()

    codes, scales, zeros = model(values, scale)
    torch.compiler.reset()  # of one function only so many are kept
    scales_given = [scale.cuda()] if name == "fp8-head" else [scale.cuda(), 0.0]
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        for zero in scales_given:
            found = [each.cpu() for each in run(values.cuda(), zero)]
            of_format = chosen(name)
            mine, theirs = (
                quantizer._decode(of_format, each.flatten(0, -2).view(quantizer.types(of_format, x.dtype)[0]))
                for each in (found[0], codes)
            )
            assert torch.equal(mine, theirs)
            assert torch.equal(found[1].float(), scales.float())
            assert torch.equal(found[2], zeros)
            assert not zeros.any()


def test_calls_that_come_again() -> None:
    """At any address, with any tensor_scale, and what an earlier call returned may be changed."""
    for part in torch.randn(4, 8 * 64 + 8, device="cuda", dtype=torch.bfloat16):
        x = part[1 : 1 + 8 * 64].view(8, 64)  # no multiple of 16 bytes
        for scale in (0.05, 0.01):
            wanted = quantizer.quantize(x.float(), chosen("nvfp4"), x.dtype, torch.tensor(scale, device="cuda"))
            for tensor_scale in (scale, torch.tensor(scale, device="cuda")):
                found = rotate_quantize(x, to="nvfp4", tensor_scale=tensor_scale)
                assert torch.equal(found.codes, wanted[0])
                assert torch.equal(found.scales.view(torch.uint8), wanted[1].view(torch.uint8))
                found.tensor_scale.mul_(3)


def test_a_rotation_and_a_quantizer_in_a_cuda_graph() -> None:
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    wanted = rotate_quantize(x, 128, to="mxfp4", layout="swizzled")  # loads the kernels, too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rotate_quantize(x, 128, to="mxfp4", layout="swizzled")
    graph.replay()
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)


@pytest.mark.parametrize(("name", "rule"), [("mxfp8", "floor"), ("fp8-group", "power_of_two")])
def test_layouts_that_are_made_of_row_major_scales(name: str, rule: str) -> None:
    x = torch.randn(3, 61, 4096, device="cuda", dtype=torch.bfloat16)
    rows = rotate_quantize(x, 128, to=name, rule=rule)
    for layout in set(FORMATS[name].layouts) - set(KERNEL_LAYOUTS):
        found = rotate_quantize(x, 128, to=name, rule=rule, layout=layout.value)
        assert torch.equal(found.codes.view(torch.uint8), rows.codes.view(torch.uint8))
        assert torch.equal(found.dequantize(), rows.dequantize())
        wanted = rotate_quantize(x.cpu(), 128, to=name, rule=rule, layout=layout.value)
        assert (found.scales.shape, found.scales.stride()) == (wanted.scales.shape, wanted.scales.stride())


@pytest.mark.parametrize("layout", [each.value for each in Layout])
def test_results_in_out_with_and_without_a_cuda_graph(layout: str) -> None:
    x = torch.randn(61, 4096, device="cuda", dtype=torch.bfloat16)
    wanted = rotate_quantize(x, 128, to="mxfp8", layout=layout)
    out = rotate_quantize(torch.zeros_like(x), 128, to="mxfp8", layout=layout)

    def run() -> None:
        assert rotate_quantize(x, 128, to="mxfp8", layout=layout, out=out).codes is out.codes

    def check() -> None:
        for mine, theirs in zip(out[:2], wanted[:2], strict=True):
            mine, theirs = (quantizer.memory_of(each) for each in (mine, theirs))
            assert torch.equal(mine, theirs)
            mine.fill_(0x55)

    for _ in range(3):
        run()
        check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    check()


@pytest.mark.parametrize("name", FORMATS)
def test_permuted_rows(name: str) -> None:
    x = torch.randn(2, 17, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    scale = {"tensor_scale": 0.05} if FORMATS[name].needs_scale else {}
    if name == "fp8-head":  # whose x is copied
        scale = {"tensor_scale": torch.tensor([0.05, 0.1], device="cuda")}
    wanted = rotate_quantize(x.contiguous(), 128, to=name, **scale)
    for _ in range(2):
        found = rotate_quantize(x, 128, to=name, **scale)
        assert name == "largest" or found.codes.stride()[-2] == (1 if name == "fp8-head" else 8) * found.codes.shape[-1]
        for mine, theirs in zip(found[:2], wanted[:2], strict=True):
            assert torch.equal(mine.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))
        assert name == "largest" or torch.equal(found.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_heads_for_attention(kv_heads: int | None, rotate: bool, dtype: str) -> None:
    """By two kernels. Without a rotation they have the bits of a CPU, at any length of heads and any address."""
    for tokens in (1, 61, 256):
        launched = launches()
        for x in (
            torch.randn(3, 8, tokens, 128, device="cuda").to(TYPES[dtype]),
            torch.randn(3, tokens, 8, 128, device="cuda").to(TYPES[dtype]).transpose(1, 2),
        ):
            x[0, 1] *= 100
            x[1] = 0
            codes, scales = presets.fa3_fp8(x, kv_heads, rotate=rotate)
            assert launches() == launched + 2
            for found, other in zip(presets.fa3_fp8(x, kv_heads, rotate=rotate), (codes, scales), strict=True):
                assert torch.equal(found.view(torch.uint8), other.view(torch.uint8))
            wanted = presets.fa3_fp8(x.cpu(), kv_heads, rotate=rotate)
            near = 1e-5 if rotate else 0
            assert torch.allclose(scales.cpu(), wanted[1], rtol=near, atol=0)
            same = (codes.cpu().view(torch.uint8) == wanted[0].view(torch.uint8)).double().mean()
            assert same > 0.99 if rotate else same == 1
            assert scales[1].eq(1).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [48, 256, 4096])
def test_gradients_of_weights(columns: int, dtype: str) -> None:
    """The kernels of the two calls round the same rotated values."""
    numbers = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(columns, 96, device="cuda", generator=numbers).to(TYPES[dtype]).t()
    launched = launches()
    found = presets.transformer_engine_nvfp4(x)
    assert launches() == launched + 2
    wanted = presets.transformer_engine_nvfp4(x.cpu())
    assert torch.allclose(found.tensor_scale.cpu(), wanted.tensor_scale, rtol=1e-2)
    assert (found.codes.cpu() == wanted.codes).double().mean() > 0.9
