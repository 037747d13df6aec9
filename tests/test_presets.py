"""Presets are the definitions of their projects, behind the rotation in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import quantizer_reference as exact
import torch
from test_quantize import normal
from torch._subclasses import FakeTensor, FakeTensorMode

from hadagen import Rotation, TensorError, UsageError, hadamard_transform, presets, rotate_quantize
from hadagen.truth import reference
from hadagen.truth.quantizer import dequantize, encode_e4m3

SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])  # `get_wgrad_sign_vector`


def hadamard(n: int) -> torch.Tensor:
    return torch.from_numpy(reference.hadamard(np.eye(n)))


REGULAR = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64) / 2


def rotated(x: torch.Tensor, matrix: torch.Tensor) -> Any:
    """Blocks of x times a matrix, in float64."""
    return (x.double().unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2).numpy()


@pytest.mark.parametrize(
    ("preset", "dtype", "matrix", "reference"),
    [
        (presets.deepseek_v32_indexer, "bfloat16", hadamard(128) * 128**-0.5, exact.fp8_group),
        (
            lambda x: presets.deepseek_v32_indexer(x, power_of_two=True),
            "bfloat16",
            hadamard(128) * 128**-0.5,
            lambda y: exact.fp8_group(y, order="power_of_two"),
        ),
        (presets.deepseek_v4_fp4, "bfloat16", hadamard(128) * 128**-0.5, lambda y: exact.mxfp4(y, "deepseek_v4")),
        (
            lambda x: presets.convrot_int8(x, 16),
            "bfloat16",
            torch.kron(REGULAR, REGULAR),
            lambda y: exact.int8_row(y, order="comfy_eager"),
        ),
        (
            lambda x: presets.convrot_int4(x, 16),
            "bfloat16",
            torch.kron(REGULAR, REGULAR),
            lambda y: exact.int4_row(y, "bfloat16", "comfy_eager"),
        ),
        (lambda x: presets.quarot_int4(x, Rotation(256)), "float16", hadamard(256) / 16, exact.int4_row),
        (
            presets.qutlass_mxfp4,
            "bfloat16",
            (hadamard(32) * float(torch.tensor(32**-0.5).bfloat16())),
            lambda y: exact.mxfp4(y, "qutlass", "float32"),
        ),
        (
            presets.transformer_engine_nvfp4,
            "bfloat16",
            SIGNS.double().diag() @ hadamard(16) / 4,
            lambda y: exact.nvfp4(y, float(np.abs(exact.rounded(y, "bfloat16")).max())),
        ),
    ],
)
def test_a_preset_is_the_definition(
    preset: Callable[[torch.Tensor], Any], dtype: str, matrix: torch.Tensor, reference: Callable[[Any], exact.Quantized]
) -> None:
    """But for values so near to half way that float32 and float64 are rounded to different numbers."""
    x = normal(64, 256, dtype=getattr(torch, dtype))
    found = preset(x)
    wanted = reference(rotated(x, matrix))
    values = dequantize(found.codes, found.scales, found.format, found.tensor_scale).double().numpy()
    assert np.mean(np.abs(values - wanted.values) <= 1e-6 * np.abs(wanted.values)) > 0.995
    assert np.mean(found.scales.float().numpy().ravel() == scales_of(found, wanted).ravel()) > 0.99
    error = np.linalg.norm(values - rotated(x, matrix)) / np.linalg.norm(rotated(x, matrix))
    assert error < 0.25


def scales_of(found: Any, wanted: exact.Quantized) -> Any:
    return exact.decode_e4m3fn(wanted.scales) if found.format.scale == "e4m3" else wanted.scales.astype(np.float32)


def test_heads_of_zeros_or_without_rows() -> None:
    zeros, ones = presets.fa3_fp8(torch.zeros(1, 2, 3, 8))
    assert not zeros.float().any()
    assert torch.equal(ones, torch.ones(1, 2))
    assert presets.fa3_fp8(torch.zeros(1, 2, 0, 8))[1].shape == (1, 2)
    assert presets.fa3_fp8(torch.zeros(0, 2, 3, 8))[1].shape == (0, 2)


def test_zeros_stay_zeros() -> None:
    """Also where a preset finds the largest magnitude of all values itself."""
    x = torch.zeros(4, 256)
    made = (getattr(presets, name) for name in ("deepseek_v32_indexer", "deepseek_v4_fp4", "qutlass_mxfp4"))
    for preset in (*made, presets.convrot_int8, presets.quarot_int4, presets.transformer_engine_nvfp4):
        found = preset(x)
        assert found.scales.float().isfinite().all()
        assert torch.equal(found.dequantize(), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_heads_are_those_of_float32(kv_heads: int | None, rotate: bool, dtype: torch.dtype) -> None:
    """Bit for bit: the largest magnitude is that of float32, and values are rounded before they are multiplied."""
    x = (
        normal(3, 7, 4, 64, dtype=dtype).transpose(1, 2)
        * torch.tensor([1e-14, 1e-3, 1.0]).to(dtype)[:, None, None, None]
    )
    y = hadamard_transform(x.float(), 64**-0.5) if rotate else x.float()
    heads = kv_heads or 4
    largest = y.abs().amax((2, 3)).view(3, heads, -1).amax(-1)
    peak, is_scaled = torch.tensor(448.0), largest > 1e-12
    factors = torch.where(is_scaled, peak / largest, 1.0).repeat_interleave(4 // heads, 1)[..., None, None]
    codes, scales = presets.fa3_fp8(x, kv_heads, rotate=rotate)
    assert torch.equal(codes.view(torch.uint8), encode_e4m3(y.to(dtype).float() * factors).view(torch.uint8))
    assert torch.equal(scales, torch.where(is_scaled, largest / peak, 1.0))
    assert scales[0].eq(1).all()
    assert not scales[1:].eq(1).any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: presets.fa3_fp8(x, 3), UsageError, "kv_heads = 3 does not divide the 4 heads of x"),
        (lambda x: presets.fa3_fp8(x, -1), UsageError, "kv_heads = -1 is not possible"),
        (lambda x: presets.fa3_fp8(x[0]), TensorError, r"pass \[batch, heads, sequence, D\]"),
        (lambda x: presets.fa3_fp8(x[:, :0]), TensorError, "with at least one head"),
        (lambda x: presets.fa3_fp8(x.double()), TensorError, "x has the type float64"),
        (lambda x: presets.fa3_fp8(x.requires_grad_()), TensorError, "x requires a gradient"),
        (lambda x: presets.fa3_fp8(x, rotate="no"), TypeError, "rotate is 'no'; pass True or False"),
        (lambda x: presets.qutlass_mxfp4(x, 0), UsageError, "block = 0 is not possible"),
        (lambda x: presets.convrot_int8(x, 0), UsageError, "block = 0 is not possible"),
        (lambda x: presets.convrot_int8(x, 8), UsageError, "n = 8 is no power of 4"),
        (lambda x: presets.convrot_int4(x), UsageError, "block = 256 does not divide the 128 columns of x; choose one"),
        (lambda x: presets.transformer_engine_nvfp4(x[..., :24]), UsageError, "block = 16 does not divide the 24 col"),
        (lambda x: presets.transformer_engine_nvfp4(x.int()), TensorError, "x has the type int32; pass values of"),
        (lambda x: presets.qutlass_mxfp4(x, 16), UsageError, "choose 32, 64 or 128"),
        (lambda x: presets.deepseek_v32_indexer(x, power_of_two=3), TypeError, "power_of_two is 3"),
    ],
)
def test_bad_input_of_a_preset_is_one_sentence(
    call: Callable[[torch.Tensor], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(2, 4, 3, 128))


def test_what_only_the_project_does() -> None:
    """Each of these values tells a preset's rule from the next most similar one."""
    assert presets.deepseek_v4_fp4(torch.zeros(1, 128)).scales.eq(1).all()  # 2^-126
    tiny = torch.tensor([[3 * 2.0**-24, -3 * 2.0**-24]]).half()  # over 7 it is 0 in float16
    assert presets.quarot_int4(tiny).codes.item() == 0x87  # 7 and −8
    assert presets.convrot_int4(tiny, 1).codes.item() == 0x97  # 7 and −7
    row = torch.zeros(1, 32)
    row[0, 0] = 1.1786  # three times its code is just below 5, and above 5 with 32^-½ in float32
    assert presets.qutlass_mxfp4(row).codes.eq(0x66).all()
    assert presets.fa3_fp8(torch.full((1, 1, 1, 8), 1e-13), rotate=False)[1].item() == 1


def test_a_default_device_changes_nothing() -> None:
    x = normal(4, 256)
    for preset in (presets.convrot_int8, presets.qutlass_mxfp4, presets.transformer_engine_nvfp4):
        presets._made_signs.cache_clear()
        with torch.device("meta"):
            codes = preset(x).codes
        assert torch.equal(codes, preset(x).codes)


def test_values_that_are_not_finite_are_no_error() -> None:
    assert presets.transformer_engine_nvfp4(torch.full((2, 16), torch.inf)).codes.shape == (2, 8)


SIGNED = (presets.convrot_int8, presets.convrot_int4, presets.transformer_engine_nvfp4)


@pytest.mark.parametrize("preset", SIGNED)
def test_signs_are_made_once(preset: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    presets._made_signs.cache_clear()
    with torch.inference_mode():
        wanted = preset(normal(3, 256)).codes.clone()
    with FakeTensorMode() as mode:
        fake = torch.empty(3, 256)
        assert isinstance(preset(fake).codes, FakeTensor)
    outside = preset(fake)  # whose mode is not on any more
    assert isinstance(outside.codes, FakeTensor)
    assert outside.codes.fake_mode is mode
    monkeypatch.setattr(presets, "Rotation", None)
    assert torch.equal(preset(normal(3, 256)).codes, wanted)
    assert preset(normal(3, 512)).codes.shape[0] == 3


def test_what_presets_pass_has_gradients() -> None:
    x = normal(3, 256, dtype=torch.float32).requires_grad_()
    of = presets._rotation(x.detach(), 64, regular=True)
    gradients = []
    for rotation in (of, Rotation(256, "regular", block=64)):
        found = rotate_quantize(x, rotation, to="int8-row", scale=2.0, gradient=True)
        gradients += torch.autograd.grad(found.dequantize().square().sum(), x)
    assert torch.equal(*gradients)
