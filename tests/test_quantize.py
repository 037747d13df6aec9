"""`rotate_quantize`: the rotation and the quantizer are those of the parts; operators, shapes, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_rotation import some_signs
from torch.autograd import forward_ad

from hadagen import Rotation, TensorError, UsageError, hadamard_transform, quantizer, rotate_quantize
from hadagen.formats import FORMATS, Format, Layout

N = 256
R = Rotation(N, signs=some_signs(64), block=64)
ALL = [(name, rule, layout.value) for name, each in FORMATS.items() for rule in each.rules for layout in each.layouts]
OPERATOR: Any = torch.ops.hadagen.rotate_quantize.default


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def scale_for(name: str) -> dict[str, Any]:
    return {"tensor_scale": 0.01} if FORMATS[name].needs_scale else {}


@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rotation", "rotated"),
    [
        (None, lambda x: x),
        (R, R),
        (Rotation(N, "regular"), Rotation(N, "regular")),
        (np.int64(128), lambda x: hadamard_transform(x.unflatten(-1, (-1, 128))).flatten(-2)),
    ],
)
def test_it_is_the_rotation_and_then_the_quantizer(
    rotation: Any, rotated: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, round_first: bool
) -> None:
    x, scale = normal(3, 5, N, dtype=dtype), 2.0**-3  # a power of two rounds nothing
    found = rotate_quantize(x, rotation, to="fp8-group", scale=scale, round_first=round_first)
    values = rotated(x.float()) * scale
    if round_first:
        values = values.to(dtype).float()
    codes, scales = quantizer.quantize(
        values.view(15, N), Format.choose("fp8-group", None, None, "row-major"), dtype, None
    )
    assert torch.equal(found.codes.view(torch.uint8), codes.view(3, 5, N).view(torch.uint8))
    assert torch.equal(found.scales, scales.view(3, 5, 2))


@pytest.mark.parametrize(("name", "rule", "layout"), ALL)
def test_values_come_back(name: str, rule: str, layout: str) -> None:
    x = normal(2, 3, 3 * N)[..., :N]  # rows with gaps
    given = {"tensor_scale": 4.0} if rule == "transformer_engine" else scale_for(name)
    found = rotate_quantize(x, R, to=name, rule=rule, layout=layout, **given)
    values, wanted = found.dequantize(), R(x.float())
    assert values.shape == x.shape
    error = float((values - wanted).norm() / wanted.norm())
    assert error < {8: 0.035 if FORMATS[name].element.value == "e4m3" else 0.01, 4: 0.2}[FORMATS[name].element.bits]
    assert found.dequantize(torch.float16).dtype == torch.float16
    assert found.codes.shape == (2, 3, N * FORMATS[name].element.bits // 8)
    rows = {-1: (), 0: (2, 3), 128: (2, 3, 2), 32: (2, 3, 8), 16: (2, 3, 16)}[found.format.group]
    if name == "int8-row":
        rows = (2, 3, 1)
    if found.format.layout is Layout.ROW_MAJOR:
        assert found.scales.shape == rows
    elif found.format.layout is Layout.COLUMN_MAJOR:
        assert found.scales.shape == (6, rows[-1])
        assert found.scales.stride() == (1, 8)
    else:
        assert found.scales.shape == (128 * max(4, rows[-1]),)


@pytest.mark.parametrize(("name", "rule", "layout"), ALL)
def test_every_check_of_an_operator(name: str, rule: str, layout: str) -> None:
    form = Format.choose(name, None, rule, layout)
    given = torch.tensor(0.01) if form.needs_scale else None
    for rows in (0, 5):
        of = (None, [], None, None, 64, False, 0.125)
        options = (normal(rows, N), *of, name, form.group, rule, layout, False, given)
        torch.library.opcheck(OPERATOR, options, test_utils=("test_schema", "test_faketensor"))
    meta = rotate_quantize(torch.empty(5, N, device="meta", dtype=torch.half), to=name, rule=rule, **scale_for(name))
    assert meta.codes.is_meta


def test_it_compiles_without_a_break() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        first = rotate_quantize(x + 1, R, to="mxfp4", layout="swizzled")
        return first.dequantize() + rotate_quantize(x, 64, to="int8-row").dequantize()

    x = normal(7, N)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.parametrize("as_scale", [float, torch.tensor])
def test_one_compiled_call_takes_every_scale(as_scale: Callable[[float], Any]) -> None:
    def model(x: torch.Tensor, scale: Any) -> torch.Tensor:
        return rotate_quantize(x, R, to="nvfp4", tensor_scale=scale).dequantize()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, scale in ((3, 0.01), (7, 0.5)):
        x = normal(rows, N)
        assert torch.equal(compiled(x, as_scale(scale)), model(x, as_scale(scale)))


def test_transforms_see_the_operator() -> None:
    def model(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return rotate_quantize(x, R, to="nvfp4", tensor_scale=scale).dequantize()

    x, scales = normal(3, 4, N), torch.tensor([0.01, 0.1, 1.0])
    assert torch.equal(torch.vmap(model)(x, scales), torch.stack(list(map(model, x, scales))))
    with forward_ad.dual_level(), pytest.raises(TensorError, match=r"x has a derivative, .*; pass x.detach\(\)"):
        model(forward_ad.make_dual(x, x), scales[0])


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, rule, layout in ALL if layout == "row-major"])
def test_gradients_are_those_of_the_rotation_but_where_values_are_clipped(name: str, rule: str) -> None:
    x = normal(5, N, dtype=torch.float32).requires_grad_()
    given = {"tensor_scale": 4.0 if rule == "transformer_engine" else 1e-3} if FORMATS[name].needs_scale else {}
    g = normal(5, N, dtype=torch.float32)
    found = rotate_quantize(x, R, to=name, rule=rule, scale=0.5, gradient=True, **given)
    without = rotate_quantize(x.detach(), R, to=name, rule=rule, scale=0.5, **given)
    values = found.dequantize()
    assert torch.equal(values, without.dequantize())
    values.backward(g)
    y = R(x.detach()) * 0.5
    kept = torch.ones_like(y)
    if name == "fp8-tensor":
        kept = (y.abs() <= 464 * 1e-3).float()
        assert 0.1 < kept.mean() < 0.9
    elif rule in ("floor", "even"):  # whose scales may be too small for the largest
        scales = torch.exp2(found.scales.float() - 127).repeat_interleave(32, -1)
        kept = (y.abs() / scales <= {"mxfp8": 464, "mxfp4": 7}[name]).float()
    assert x.grad is not None
    assert torch.allclose(x.grad, R.inverse(g * kept) * 0.5, atol=1e-6)


def test_a_default_type_or_device_changes_nothing() -> None:
    x = normal(3, N)
    found = rotate_quantize(x, R, to="nvfp4", tensor_scale=0.01)
    values = found.dequantize()
    torch.set_default_dtype(torch.float64)
    try:
        assert found.dequantize().dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        again = rotate_quantize(x, R, to="nvfp4", tensor_scale=0.01).dequantize()
    assert torch.equal(again, values)


def test_rows_need_not_be_there() -> None:
    for name in FORMATS:
        found = rotate_quantize(normal(0, N), R, to=name, **scale_for(name))
        assert found.codes.shape[0] == 0
        assert found.dequantize().shape == (0, N)
    assert rotate_quantize(normal(N), to="int4-row").dequantize().shape == (N,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: rotate_quantize([1.0], to="mxfp8"), TypeError, "x is a list; pass a torch.Tensor"),
        (lambda x: rotate_quantize(x, to=["mxfp8"]), TypeError, "to is a list; pass a string"),
        (lambda x: rotate_quantize(x, to="mxfp8", rule=np.ones(2)), TypeError, "rule is a ndarray; pass a string"),
        (lambda x: rotate_quantize(x, to="mxfp8", group=32.0), TypeError, "group is a float; pass an integer or None"),
        (lambda x: rotate_quantize(x, to="mxfp8").dequantize(torch.int8), UsageError, "dtype torch.int8 is not poss"),
        (lambda x: rotate_quantize(x, to="fp6"), UsageError, "to = 'fp6' is no format; choose from fp8-group, "),
        (
            lambda x: rotate_quantize(x, to="mxfp8", group=64),
            UsageError,
            "group = 64 does not exist for mxfp8; choose 32",
        ),
        (
            lambda x: rotate_quantize(x, to="int8-row", group=64),
            UsageError,
            "choose none, as its scales are not of groups",
        ),
        (lambda x: rotate_quantize(x, to="mxfp8", rule="exact"), UsageError, "rule = 'exact' does not exist for mxfp8"),
        (lambda x: rotate_quantize(x, to="fp8-row", layout="swizzled"), UsageError, "choose from row-major"),
        (lambda x: rotate_quantize(x[:, :48], to="fp8-group"), UsageError, "groups of 128 do not fill rows of 48"),
        (lambda x: rotate_quantize(x[:, :5], to="int4-row"), TensorError, "x has 5 columns; 4-bit codes need an even"),
        (
            lambda x: rotate_quantize(x.to(torch.float8_e4m3fn), to="mxfp8"),
            TensorError,
            "x has the type float8_e4m3fn; pass",
        ),
        (lambda x: rotate_quantize(x.double(), to="mxfp8"), TensorError, "x has the type float64; pass values of"),
        (
            lambda x: rotate_quantize(x, 96, to="mxfp8"),
            UsageError,
            "rotation = 96 is no power of two that divides the 256",
        ),
        (lambda x: rotate_quantize(x, 512, to="mxfp8"), UsageError, "rotation = 512 is no power of two that divides"),
        (
            lambda x: rotate_quantize(x, "auto", to="mxfp8"),
            TypeError,
            "rotation is a str; pass a Rotation, a power of two",
        ),
        (lambda x: rotate_quantize(x, True, to="mxfp8"), TypeError, "rotation is a bool; pass a Rotation"),
        (lambda x: rotate_quantize(x, Rotation(64), to="mxfp8"), TensorError, "64"),
        (lambda x: rotate_quantize(x, to="mxfp8", scale=float("nan")), UsageError, "scale = nan is not finite"),
        (lambda x: rotate_quantize(x, to="mxfp8", round_first=2), TypeError, "round_first is 2; pass True or False"),
        (lambda x: rotate_quantize(x.float().requires_grad_(), to="mxfp8"), TensorError, "x requires a gradient"),
        (lambda x: rotate_quantize(x, to="nvfp4"), UsageError, "nvfp4 needs a tensor_scale; pass a number"),
        (
            lambda x: rotate_quantize(x, to="mxfp8", tensor_scale=1.0),
            UsageError,
            "mxfp8 has no tensor_scale; leave it out",
        ),
        (lambda x: rotate_quantize(x, to="nvfp4", tensor_scale=0.0), UsageError, "tensor_scale = 0.0 is not possible"),
        (lambda x: rotate_quantize(x, to="nvfp4", tensor_scale=1e-50), UsageError, "tensor_scale = 1e-50 is not poss"),
        (lambda x: rotate_quantize(x, to="nvfp4", tensor_scale=1e39), UsageError, "up to 3.4e.38"),
        (lambda x: rotate_quantize(x, to="nvfp4", tensor_scale=10**400), UsageError, "tensor_scale = inf is not poss"),
        (lambda x: rotate_quantize(x, to="nvfp4", tensor_scale="1"), TypeError, "tensor_scale is a str; pass a real"),
        (
            lambda x: rotate_quantize(x, to="nvfp4", tensor_scale=torch.ones((), requires_grad=True)),
            TensorError,
            "tensor_scale requires a gradient",
        ),
        (
            lambda x: rotate_quantize(x, to="nvfp4", tensor_scale=torch.ones(1).to_sparse()),
            TensorError,
            "tensor_scale is sparse_coo float32 with 1 elements",
        ),
        (
            lambda x: rotate_quantize(x, to="nvfp4", tensor_scale=torch.tensor(float("nan"))),
            UsageError,
            "tensor_scale = nan is not possible; pass a positive number",
        ),
        (
            lambda x: rotate_quantize(x, to="nvfp4", tensor_scale=torch.ones(2)),
            TensorError,
            "tensor_scale is strided float32 with 2 elements on cpu; it must be strided float32 with one element",
        ),
    ],
)
def test_bad_input_is_one_sentence(call: Callable[[torch.Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(normal(4, N))
