"""The quantizer in PyTorch gives the codes and scales of the exact definitions, bit for bit, and layouts are undone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import quantizer_reference as exact
import torch

from hadagen.problem.formats import FORMATS, KERNEL_LAYOUTS, TENSOR, Element, Format, Layout
from hadagen.truth.quantizer import (
    _decode,
    dequantize,
    empty,
    encode_e2m1,
    encode_e4m3,
    laid_out,
    quantize,
    rows_of_scales,
)

COLUMNS = 256
GIVEN = 0.0123
FLOAT_MAX = torch.finfo(torch.float32).max
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
Reference = Callable[[Any, str], exact.Quantized]
# (format, rule) → the definition of its codes and scales, for values of a type.
REFERENCES: dict[tuple[str, str], Reference] = {
    ("fp8-group", "exact"): lambda x, dtype: exact.fp8_group(x, dtype),
    ("fp8-group", "power_of_two"): lambda x, dtype: exact.fp8_group(x, dtype, "power_of_two"),
    ("fp8-row", "exact"): lambda x, dtype: exact.fp8_row(x, dtype),
    ("fp8-tensor", "exact"): lambda x, dtype: exact.fp8_tensor(x, GIVEN, dtype),
    ("fp8-head", "exact"): lambda x, dtype: exact.fp8_head(x, of_heads(len(x)).numpy(), dtype),
    ("fp8-head", "fa3"): lambda x, dtype: exact.fp8_head(x, of_heads(len(x)).numpy(), dtype, "attention"),
    ("int8-row", "exact"): lambda x, dtype: exact.int8_row(x, dtype),
    ("int8-row", "convrot"): lambda x, dtype: exact.int8_row(x, dtype, "comfy_eager"),
    ("int4-row", "exact"): lambda x, dtype: exact.int4_row(x, dtype, "comfy_eager"),
    ("int4-row", "quarot"): lambda x, dtype: exact.int4_row(x, dtype, "quarot"),
    **{("mxfp8", rule): (lambda x, dtype, rule=rule: exact.mxfp8(x, rule, dtype)) for rule in FORMATS["mxfp8"].rules},
    **{("mxfp4", rule): (lambda x, dtype, rule=rule: exact.mxfp4(x, rule, dtype)) for rule in FORMATS["mxfp4"].rules},
    ("nvfp4", "exact"): lambda x, dtype: exact.nvfp4(x, GIVEN, dtype, "torchao"),
    ("nvfp4", "transformer_engine"): lambda x, dtype: exact.nvfp4(x, GIVEN, dtype, "te"),
}
ALL = [(name, rule) for name, form in FORMATS.items() for rule in form.rules]
WITH_CODES = [(name, rule) for name, rule in ALL if FORMATS[name].element is not Element.NONE]


def chosen(name: str, rule: str | None = None, layout: str = "row-major") -> Format:
    return Format.choose(name, None, rule, layout)


def of_heads(rows: int) -> torch.Tensor:
    """What a call gives for heads of four rows, or of one if there are not so many: first usual numbers, then what is
    no scale, where the rule fa3 changes, and numbers of every size."""
    heads = rows // 4 if rows % 4 == 0 else rows
    usual = [GIVEN, 0.0371, 5.1, 77.0]
    least = torch.tensor(1e-12)
    hard = [
        0.0,
        torch.inf,
        torch.nan,
        1e-12,
        float(least.nextafter(torch.tensor(1.0))),
        3.4e38,
        2.0**-149,
        2 - 2.0**-23,
    ]
    sizes = 2.0 ** torch.linspace(-149, 127.9, max(heads, 20)).double()
    return torch.cat([torch.tensor(usual + hard), sizes.float()])[:heads]


def given(to: Format, rows: int) -> torch.Tensor | None:
    if to.by_head:
        return of_heads(rows)
    return torch.tensor(GIVEN) if to.needs_scale else None


def hard_rows(dtype: torch.dtype) -> torch.Tensor:
    """Of every size that a type has, with outliers, halves between codes, subnormals, zeros of both signs, and up to
    the largest number: alone in each group, everywhere, and the 42 numbers before it."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(400, COLUMNS, generator=g)
    sizes = 2.0 ** torch.randint(-140, 120, (400, 1), generator=g).double()
    outliers = torch.where(torch.rand(400, COLUMNS, generator=g) < 0.01, normal * 300, normal)
    halves = torch.randint(-31, 32, (400, COLUMNS), generator=g) / 4.0  # many are half way between two codes
    zeros = torch.where(torch.arange(COLUMNS) % 3 == 0, -0.0, 0.0).expand(3, COLUMNS)
    limits = torch.finfo(dtype)
    columns = torch.arange(COLUMNS)
    alone = torch.where(columns % 16 == 5, limits.max, 0.3 * limits.max)
    before = limits.max * (1 - limits.eps / 2 * torch.arange(42).double()[:, None].repeat(1, COLUMNS))
    rows = torch.cat(
        [normal, outliers, halves, (normal.double() * sizes).float(), zeros, torch.full((1, COLUMNS), 3e38)]
    )
    least = limits.smallest_normal * limits.eps * (columns % 9 - 4)
    rows = torch.cat([rows.double(), *(each.expand(2, COLUMNS).double() for each in (alone, -alone, least)), before])
    return rows.clamp(limits.min, limits.max).to(dtype)


@pytest.mark.parametrize("group", [None, 32])
def test_largest_magnitudes_have_no_codes(group: int | None) -> None:
    x = hard_rows(torch.float32)
    x[0, 40], x[1, 80] = torch.nan, -torch.inf
    codes, scales = quantize(x, Format.choose("largest", group, None, "row-major"), x.dtype, None)
    assert codes.shape == (len(x), 0)
    assert torch.equal(scales.nan_to_num(-1.0), x.view(len(x), -1, group or COLUMNS).abs().amax(-1).nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "rule"), WITH_CODES)
def test_codes_and_scales_are_those_of_the_definition(name: str, rule: str, dtype: str) -> None:
    x = hard_rows(TYPES[dtype])
    to = chosen(name, rule)
    scale = given(to, len(x))
    codes, scales = quantize(x.float(), to, x.dtype, scale)
    wanted = REFERENCES[name, rule](x.float().numpy(), dtype)
    packed = wanted.codes if to.element.bits == 8 else exact.pack_nibbles(wanted.codes)
    assert np.array_equal(codes.view(torch.uint8).numpy(), packed.view(np.uint8))
    if to.group != TENSOR:
        assert to.scale == "input" or np.array_equal(
            raw(scales), wanted.scales.view(raw(scales).dtype).reshape(scales.shape)
        )
        assert np.array_equal(scales.float().numpy().ravel(), scales_of(to, wanted).ravel(), equal_nan=True)
    values = dequantize(codes, scales, to, scale).double().numpy()
    with np.errstate(over="ignore"):
        exactly = np.where(np.isfinite(wanted.values), wanted.values.clip(-FLOAT_MAX, FLOAT_MAX), wanted.values)
        assert np.allclose(values, exactly.astype(np.float32), rtol=1e-6, atol=1e-44, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "rule"), WITH_CODES)
def test_finite_values_have_finite_scales_and_come_back(name: str, rule: str, dtype: str) -> None:
    """Up to the largest number, in each type too. No error is larger than that of the rule `floor`, which cuts off an
    eighth or a quarter of the largest magnitude."""
    to, x = chosen(name, rule), hard_rows(TYPES[dtype])
    magnitudes = x.float().abs().amax(1)
    exact_scale = {"fp8-tensor": magnitudes.amax() / 448, "fp8-head": magnitudes / 448}
    scale = exact_scale.get(name, magnitudes.amax() / (448 * 6)) if to.needs_scale else None
    if rule in ("fa3", "transformer_engine"):
        scale = magnitudes if rule == "fa3" else magnitudes.amax()
    codes, scales = quantize(x.float(), to, x.dtype, scale)
    assert scales.dtype != torch.uint8 or 0xFF not in scales
    values = dequantize(codes, scales, to, scale, x.dtype)
    assert values.isfinite().all()
    assert values.to(x.dtype).isfinite().all()
    most = magnitudes if to.by_head or not to.needs_scale else magnitudes.amax()
    error = (values.double() - x.double()).abs().amax(1)
    assert (error <= most.double() * (1 / 8 if to.element.bits == 8 else 1 / 4) + 1e-3).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, rule in ALL if FORMATS[name].needs_scale])
def test_a_scale_of_zero_keeps_zeros(name: str, rule: str, dtype: str) -> None:
    """Any other value has the largest code with its sign. All of them stand for 0, or come back where 0 is the largest
    magnitude. Other heads are as they were."""
    to = chosen(name, rule)
    limits = torch.finfo(TYPES[dtype])
    some = [0.0, -0.0, limits.smallest_normal * limits.eps, -limits.smallest_normal, 1.0, -limits.max, torch.inf]
    x = torch.tensor([some[at % 7] for at in range(7 * 16)] + [0.0] * 16).to(TYPES[dtype]).float()[None].expand(2, -1)
    scale = torch.tensor([0.0, 2.0]) if to.by_head else torch.tensor(0.0)
    codes, scales = quantize(x, to, TYPES[dtype], scale)
    usual = quantize(x, to, TYPES[dtype], torch.full_like(scale, 2.0))[0]
    assert not to.by_head or torch.equal(codes[1].view(torch.uint8), usual[1].view(torch.uint8))
    values = dequantize(codes, scales, to, scale)[0]
    if rule in ("fa3", "transformer_engine"):  # the magnitude of zeros
        assert (values[x[0] == 0] == 0).all()
        return
    assert torch.equal(_decode(to, codes)[0], torch.where(x[0] == 0, 0.0, x[0].sign() * to.element.largest))
    assert torch.equal(values, torch.zeros_like(values))
    groups = x[0].view(-1, 16).abs().amax(1)
    assert name != "nvfp4" or torch.equal(scales[0].float(), torch.where(groups == 0, 2.0**-6, 448.0))
    far = x.clone()
    far[0, 0] = torch.nan
    codes, scales = quantize(far, to, TYPES[dtype], scale)
    assert _decode(to, codes)[0, 0].isnan() if to.element is Element.E4M3 else scales[0, 0].isnan()


def raw(scales: torch.Tensor) -> Any:
    return scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[scales.element_size()]).numpy()


def scales_of(to: Format, wanted: exact.Quantized) -> Any:
    """Their values; bytes of E8M0 are numbers too."""
    return exact.decode_e4m3fn(wanted.scales) if to.scale == "e4m3" else wanted.scales.astype(np.float32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("name", "rule"), WITH_CODES)
def test_what_is_not_finite(name: str, rule: str, value: float) -> None:
    """NaN is the NaN of a format that has one, and else 0. An infinity is the largest code of a format without NaN.
    The scale of the group is no number of E8M0. Other groups are as they were."""
    x = torch.linspace(-3, 3, 2 * COLUMNS).view(2, COLUMNS)
    to = chosen(name, rule)
    before = quantize(x, to, torch.bfloat16, given(to, 2))[0]
    x[1, 0] = value
    codes, scales = quantize(x, to, torch.bfloat16, given(to, 2))
    assert torch.equal(codes[0].view(torch.uint8), before[0].view(torch.uint8))
    first = int(codes[1].view(torch.uint8)[0])
    is_nan = value != value
    if to.element is Element.E4M3:
        assert first & 0x7F in ((0x7F,) if is_nan or to.group != TENSOR else (0x7E,))
    elif to.element is Element.E2M1:
        assert first & 15 == (0 if is_nan else 7 if value > 0 else 15)
    else:
        largest = to.element.largest + (value < 0 and rule in ("convrot", "quarot"))
        code = first if to.element is Element.INT8 else first & 15
        assert code == (0 if is_nan else largest if value > 0 else (1 << to.element.bits) - largest)
    if to.scale == "e8m0":
        assert int(scales[1, 0]) == 0xFF
        assert 0xFF not in scales[0]
    elif to.scale in ("float32", "input") and to.group != TENSOR:
        first_scale = scales.flatten()[scales.numel() // 2]
        assert first_scale.isnan() if is_nan else first_scale.isinf()
        assert scales.flatten()[: scales.numel() // 2].isfinite().all()


@pytest.mark.parametrize(("name", "rule"), [("int8-row", "convrot"), ("int4-row", "exact"), ("int4-row", "quarot")])
def test_what_the_type_of_x_cannot_hold_is_infinite(name: str, rule: str) -> None:
    x = torch.tensor([[1.0, -1e5]])  # float16 ends at 65504
    to = chosen(name, rule)
    codes = quantize(x, to, torch.float16, None)[0]
    assert torch.equal(codes, quantize(x.half().float(), to, torch.float16, None)[0])
    assert codes.any()


def test_every_float_has_the_nearest_code() -> None:
    sizes = torch.cat(
        [torch.arange(0, 1 << 16).to(torch.int32) << 15, (torch.arange(0, 1 << 16).to(torch.int32) << 15) + 1]
    )
    x = sizes.view(torch.float32)
    x = torch.cat([x, -x])
    assert np.array_equal(encode_e4m3(x).view(torch.uint8).numpy(), exact.encode_e4m3fn(x.numpy()))
    x = x[~x.isnan()]
    assert np.array_equal(encode_e2m1(x).numpy(), exact.encode_e2m1(x.numpy()))


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (5, 3), (128, 4), (129, 9), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32])
def test_a_layout_is_undone(rows: int, groups: int, dtype: torch.dtype) -> None:
    scales = (torch.arange(rows * groups, dtype=torch.float32).view(rows, groups) % 200 + 1).to(dtype)
    column = laid_out(scales, Layout.COLUMN_MAJOR)
    aligned = 16 // dtype.itemsize
    assert column.stride() == (1, -(-rows // aligned) * aligned) or rows < 2
    assert torch.equal(rows_of_scales(column, Layout.COLUMN_MAJOR, rows, groups).float(), scales.float())
    if dtype == torch.float32 or not rows:
        return
    tiles = laid_out(scales, Layout.SWIZZLED)
    assert np.array_equal(tiles.view(torch.uint8).numpy(), exact.swizzled(scales.view(torch.uint8).numpy()))
    assert torch.equal(rows_of_scales(tiles, Layout.SWIZZLED, rows, groups).float(), scales.float())
    batch = laid_out(torch.cat([scales, scales.flip(0)]), Layout.BATCHED_SWIZZLED, (1, 2))
    for mine, of in zip(batch[0], (scales, scales.flip(0)), strict=True):
        assert np.array_equal(mine.view(torch.uint8).numpy(), exact.swizzled(of.contiguous().view(torch.uint8).numpy()))
    both = rows_of_scales(batch, Layout.BATCHED_SWIZZLED, 2 * rows, groups)
    assert torch.equal(both.float(), torch.cat([scales, scales.flip(0)]).float())


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (5, 3), (128, 4), (129, 9), (0, 4)])
def test_powers_of_two_are_packed(rows: int, groups: int) -> None:
    exponents = (torch.arange(rows * groups).view(rows, groups) * 7 % 255).to(torch.uint8)
    as_floats = torch.where(exponents > 0, exponents.int() << 23, 1 << 22).view(torch.float32)
    words = laid_out(exponents, Layout.PACKED)
    assert words.stride() == (1, -(-rows // 4) * 4) or rows < 2
    assert words.shape == (rows, -(-groups // 4))
    assert not rows or np.array_equal(words.numpy(), exact.four_to_a_word(exponents.numpy()))
    assert torch.equal(laid_out(as_floats, Layout.PACKED), words)
    assert torch.equal(rows_of_scales(words, Layout.PACKED, rows, groups), exponents)
    not_finite = laid_out(torch.tensor([[torch.nan, torch.inf, 1.0]]), Layout.PACKED)
    assert not_finite.item() == 0x007FFFFF


@pytest.mark.parametrize("layout", KERNEL_LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES.values())
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_empty_results_are_like_those_of_the_quantizer(layout: Layout, dtype: torch.dtype, rows: int) -> None:
    for form in (form for form in FORMATS.values() if layout in form.layouts):
        to = chosen(form.name, layout=layout.value)
        found = quantize(torch.zeros(rows, COLUMNS), to, dtype, given(to, rows))
        for device in (torch.device("cpu"), torch.device("meta")):
            pairs = list(zip(empty(rows, COLUMNS, to, dtype, device), found, strict=True))
            for made, like in pairs[:1] if to.group == TENSOR else pairs:
                assert (made.dtype, made.shape, made.stride()) == (like.dtype, like.shape, like.stride())
                assert made.untyped_storage().nbytes() == like.untyped_storage().nbytes()
