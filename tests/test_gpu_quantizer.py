"""The quantizer on a GPU gives the bits that it gives on a CPU."""

from __future__ import annotations

import pytest
import torch
from test_quantizer import ALL, TYPES, chosen, given, hard_rows

from hadagen import rotate_quantize
from hadagen.runtime.quantizer import quantize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "rule"), ALL)
def test_codes_and_scales_are_the_same_on_every_device(name: str, rule: str, dtype: str) -> None:
    x, to = hard_rows(TYPES[dtype]).float(), chosen(name, rule)
    x[0, 0], x[1, 0], x[2, 0] = torch.nan, torch.inf, -torch.inf
    scale = given(to)
    on_cpu = quantize(x, to, TYPES[dtype], scale)
    on_gpu = quantize(x.cuda(), to, TYPES[dtype], None if scale is None else scale.cuda())
    for wanted, found in zip(on_cpu, on_gpu, strict=True):
        found, wanted = (each.cpu().flatten() for each in (found, wanted))
        if wanted.dtype.is_floating_point and wanted.dtype.itemsize > 1:  # a NaN has other bits on a GPU
            assert torch.equal(found.isnan(), wanted.isnan())
            found, wanted = found.nan_to_num(), wanted.nan_to_num()
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_a_rotation_and_a_quantizer_in_a_cuda_graph() -> None:
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    wanted = rotate_quantize(x, 128, to="mxfp4", layout="swizzled")  # loads the kernels, too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rotate_quantize(x, 128, to="mxfp4", layout="swizzled")
    graph.replay()
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
