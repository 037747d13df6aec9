"""`rotate_quantize`: the rotation and the quantizer are those of the parts; operators, shapes, and bad input."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from emulated_device import EmulatedDevice
from test_rotation import some_signs
from torch.autograd import forward_ad

from hadagen import (
    Quantized,
    Rotation,
    TensorError,
    UsageError,
    hadamard_transform,
    presets,
    rotate_quantize,
)
from hadagen.problem.formats import FORMATS, TENSOR, Element, Format, Layout
from hadagen.runtime.call.rules import CALL, INTO
from hadagen.runtime.choose import tables
from hadagen.runtime.operands.spec import text_of
from hadagen.truth import quantizer
from hadagen.truth.accuracy import sample_scale
from hadagen.truth.quantizer import memory_of

N = 256
R = Rotation(N, signs=some_signs(64), block=64)
ALL = [
    (name, rule, layout.value)
    for name, each in FORMATS.items()
    for rule in each.rules
    for layout in each.layouts
    if layout is not Layout.PACKED or each.scale == "e8m0" or rule == "power_of_two"
]
WITH_CODES = [each for each in ALL if FORMATS[each[0]].element is not Element.NONE]
# Of a dense [a, b, c, N].
PERMUTED: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.transpose(1, 2),
    lambda x: x.permute(2, 0, 1, 3),
    lambda x: x[:1].transpose(0, 2),
)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def scale_for(name: str, x: torch.Tensor, rule: str = "exact") -> dict[str, Any]:
    if FORMATS[name].by_head:
        heads = torch.arange(1, len(x) + 1, dtype=torch.float32, device=x.device)
        return {"tensor_scale": heads * (4.48 if rule == "fa3" else 0.01)}
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


@pytest.mark.parametrize("gradient", [False, True])
def test_a_number_rotates_as_a_rotation_of_it_does(gradient: bool) -> None:
    """Without a scale; a scale is the whole factor of a number, and a further one of a Rotation."""
    x = normal(3, N).requires_grad_(gradient)
    for n in (1, 2, 64, 256):
        factor = n**-0.5
        for mine, theirs in ((None, None), (2 * factor, 2.0), (1.0, 1 / factor), (0.0, 0.0)):
            found = rotate_quantize(x, n, to="int8-row", scale=mine, gradient=gradient)
            wanted = rotate_quantize(x, Rotation(N, block=n), to="int8-row", scale=theirs, gradient=gradient)
            assert torch.allclose(found.scales, wanted.scales, rtol=1e-6)
            assert (found.codes - wanted.codes).abs().max() <= 1
    for rotation in (None, presets._rotation(x.detach(), 64, regular=True), R):
        default, one = (
            rotate_quantize(x.detach(), rotation, to="largest", **options).scales for options in ({}, {"scale": 1})
        )
        assert torch.equal(default, one)


def small_rotations(n: int) -> Iterator[Any]:
    """All kinds of rotations of rows of n elements, among them those of blocks of one element."""
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {
        "-1": torch.tensor([[-1]]),
        "2": torch.tensor([[2.0]]),
        "H": torch.tensor([[1, 1], [1, -1]]),
        "-1, H": [torch.tensor([[-1.0]]), torch.tensor([[1, 1], [1, -1]])],
        "any": torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0], [1.5, 0.25, -2.0]]),
    }
    for block in (block for block in range(1, n + 1) if n % block == 0):
        for matrix in ("auto", "regular", *given.values()):
            for before, after in ((False, False), (True, False), (False, True), (True, True)):
                signs = [
                    (-1) ** torch.randint(2, (block,), generator=generator) if f else None for f in (before, after)
                ]
                with suppress(UsageError):  # a block that these matrices do not have
                    yield Rotation(n, matrix, signs=signs[0], signs_after=signs[1], block=block)
        if block & (block - 1) == 0:
            yield block
    yield None


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 12, 16])
def test_small_blocks_are_rotated_too(n: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quantized is what the rotation gives, by itself, with gradients, and into out."""
    if kernels:
        EmulatedDevice(monkeypatch)
    count = 0
    for rotation in small_rotations(n):
        x = normal(5, n, dtype=torch.float32)
        leaf = x.clone().requires_grad_()
        if isinstance(rotation, Rotation):
            y, wide = rotation(x), rotation(leaf)
        else:
            size = rotation or 1
            y, wide = (hadamard_transform(each.unflatten(-1, (-1, size)), size**-0.5).flatten(-2) for each in (x, leaf))
        wanted = quantizer.quantize(y, Format.choose("int8-row", None, None, "row-major"), x.dtype, None)
        out = rotate_quantize(torch.zeros(5, n), to="int8-row")
        traced = rotate_quantize(leaf, rotation, to="int8-row", gradient=True)
        for found in (
            rotate_quantize(x, rotation, to="int8-row"),
            rotate_quantize(x, rotation, to="int8-row"),  # known, where a kernel did it
            rotate_quantize(x, rotation, to="int8-row", out=out),
            traced,
        ):
            assert torch.allclose(found.scales, wanted[1], rtol=1e-5), rotation
            assert (found.codes - wanted[0]).abs().max() <= (1 if kernels else 0), rotation
        g = normal(5, n, dtype=torch.float32)
        expected, gradient = (torch.autograd.grad((each * g).sum(), leaf)[0] for each in (wide, traced.dequantize()))
        assert torch.allclose(gradient, expected, atol=1e-5), rotation
        count += 1
    tables.forget()
    assert count >= 18


@pytest.mark.parametrize("options", [{"signs": [-1]}, {"signs_after": [-1]}, {"matrix": torch.tensor([[-1.0]])}, {}])
def test_compiled_calls_rotate_small_blocks_too(options: dict[str, Any]) -> None:
    rotation, x = Rotation(4, block=1, **options), torch.arange(1.0, 5.0)
    torch.compiler.reset()  # of one function only so many are kept
    compiled = torch.compile(
        lambda x: rotate_quantize(x, rotation, to="int8-row").codes, fullgraph=True, backend="aot_eager"
    )
    wanted = x / 4 * (-1 if options else 1)
    assert torch.equal(compiled(x), (127 * wanted).round().to(torch.int8))


@pytest.mark.parametrize(("name", "rule", "layout"), WITH_CODES)
def test_values_come_back(name: str, rule: str, layout: str) -> None:
    x = normal(2, 3, 3 * N)[..., :N]  # rows with gaps
    given = {"tensor_scale": 4.0} if rule == "transformer_engine" else scale_for(name, x, rule)
    found = rotate_quantize(x, R, to=name, rule=rule, layout=layout, **given)
    values, wanted = found.dequantize(), R(x.float())
    assert values.shape == x.shape
    error = float((values - wanted).norm() / wanted.norm())
    assert error < {8: 0.035 if FORMATS[name].element.value == "e4m3" else 0.01, 4: 0.2}[FORMATS[name].element.bits]
    assert found.dequantize(torch.float16).dtype == torch.float16
    assert found.codes.shape == (2, 3, N * FORMATS[name].element.bits // 8)
    rows = {-1: (), 0: (2, 3), 128: (2, 3, 2), 32: (2, 3, 8), 16: (2, 3, 16)}[found.format.group]
    if name in ("int8-row", "fp8-head"):
        rows = {"int8-row": (2, 3, 1), "fp8-head": (2,)}[name]
    if found.format.layout is Layout.ROW_MAJOR:
        assert found.scales.shape == rows
    elif found.format.layout.in_columns:
        is_packed = found.format.layout is Layout.PACKED
        assert found.scales.shape == (6, -(-rows[-1] // 4) if is_packed else rows[-1])
        assert found.scales.stride(0) == 1
        assert found.scales.stride(1) * found.scales.element_size() == (32 if found.scales.element_size() > 1 else 16)
    else:
        matrices = (2,) if found.format.layout is Layout.BATCHED_SWIZZLED else ()
        assert found.scales.shape == (*matrices, 128 * max(4, rows[-1]))


@pytest.mark.parametrize(("name", "rule", "layout"), ALL)
def test_every_check_of_the_operator_that_quantizes(name: str, rule: str, layout: str) -> None:
    form = Format.choose(name, None, rule, layout)
    for rows in (0, 5):
        given = sample_scale(form, rows, torch.device("cpu"))
        text = text_of(64, to=name, group=form.group, rule=rule, layout=layout)
        options = [normal(rows, N), *([] if given is None else [given])], 0.125, text
        torch.library.opcheck(CALL.default, options, test_utils=("test_schema", "test_faketensor"))
    x = torch.empty(5, N, device="meta", dtype=torch.half)
    assert rotate_quantize(x, to=name, rule=rule, **scale_for(name, x)).codes.is_meta


@pytest.mark.parametrize(("name", "rule", "layout"), ALL)
def test_every_check_of_the_operator_with_out(name: str, rule: str, layout: str) -> None:
    form = Format.choose(name, None, rule, layout)
    for x in (normal(0, N), normal(5, N), normal(2, 3, N).transpose(0, 1)):
        given = sample_scale(form, len(x), torch.device("cpu"))
        like = rotate_quantize(x, to=name, rule=rule, layout=layout, **scale_for(name, x))
        scales = None if form.group == TENSOR else torch.zeros_like(like.scales)
        of_format = {"to": name, "group": form.group, "rule": rule, "layout": layout}
        text = text_of(64, numerics="fast", batch_invariant=True, **of_format)
        written = [torch.zeros_like(like.codes), *([] if scales is None else [scales])]
        options = written, [x, *([] if given is None else [given])], 0.125, text
        if scales is None or scales.stride() == like.scales.stride():
            of_fp8 = torch.float8_e4m3fn in (like.codes.dtype, like.scales.dtype)  # which test_schema cannot compare
            torch.library.opcheck(INTO.default, options, test_utils=("test_schema", "test_faketensor")[of_fp8:])


@pytest.mark.parametrize(("name", "rule", "layout"), ALL)
def test_results_in_out(name: str, rule: str, layout: str) -> None:
    x = normal(2, 3, N)
    options = {"to": name, "rule": rule, "layout": layout, "scale": 0.5, **scale_for(name, x, rule)}
    wanted = rotate_quantize(x, R, **options)
    out = rotate_quantize(torch.zeros_like(x), R, **options)
    if out.format.group == TENSOR:
        out.scales = out.scales.clone()  # not those of the call
    for given in (out, out[:2], list(out[:2])):
        memory_of(out.codes).fill_(0x55)
        memory_of(out.scales).fill_(0x55)
        found = rotate_quantize(x, R, out=given, **options)
        assert found.codes is out.codes
        assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        if found.format.group == TENSOR:
            assert memory_of(out.scales).eq(0x55).all()
            assert torch.equal(found.scales, wanted.scales)
        else:
            assert found.scales is out.scales
            assert torch.equal(memory_of(found.scales), memory_of(wanted.scales)), "what fills up is no zero"
        assert name == "largest" or torch.equal(found.dequantize(), wanted.dequantize())
    if out.format.group == TENSOR:
        assert rotate_quantize(x, R, out=(out.codes, None), **options).codes is out.codes


def test_out_without_memory() -> None:
    x = torch.empty(2, 3, N, device="meta", dtype=torch.half)
    out = rotate_quantize(x, 64, to="fp8-group", layout="column-major")
    assert rotate_quantize(x, 64, to="fp8-group", layout="column-major", out=out).codes is out.codes
    with pytest.raises(TensorError, match=r"out\.scales is .* this call needs"):
        rotate_quantize(x, 64, to="fp8-group", out=out)


def test_a_negated_x_and_out() -> None:
    x = torch._neg_view(normal(3, N))
    out = rotate_quantize(normal(3, N), to="int8-row")
    assert torch.equal(rotate_quantize(x, 64, to="int8-row", out=out).codes, rotate_quantize(x, 64, to="int8-row")[0])


def test_out_and_gradients() -> None:
    x = normal(3, N, dtype=torch.float32).requires_grad_()
    wanted = rotate_quantize(x, R, to="mxfp8", gradient=True)
    out = rotate_quantize(torch.zeros(3, N), R, to="mxfp8")
    found = rotate_quantize(x, R, to="mxfp8", gradient=True, out=out)
    assert found.codes is out.codes
    (expected,) = torch.autograd.grad(wanted.dequantize().sum(), x)
    (gradient,) = torch.autograd.grad(found.dequantize().sum(), x)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("name", "layout"), [("mxfp4", "swizzled"), ("fp8-group", "column-major"), ("fp8-tensor", "")])
def test_out_compiles_without_a_break(name: str, layout: str, backend: str) -> None:
    options = {"to": name, "layout": layout or "row-major", **scale_for(name, normal(1, N))}

    def model(x: torch.Tensor, out: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
        found = rotate_quantize(x + 1, R, out=out, **options)
        return found.codes, found.dequantize() * 2

    for rows in (7, 3):
        x = normal(rows, N)
        out, wanted = (rotate_quantize(torch.zeros_like(x), **options) for _ in range(2))
        codes, values = torch.compile(model, fullgraph=True, backend=backend)(x, out)
        assert torch.equal(values, model(x, wanted)[1])
        assert torch.equal(codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        for mine, theirs in zip(out[:2], wanted[:2], strict=True):
            assert torch.equal(memory_of(mine), memory_of(theirs))


@pytest.mark.parametrize("permuted", PERMUTED)
@pytest.mark.parametrize("name", FORMATS)
def test_results_lie_as_x_does(name: str, permuted: Callable[[torch.Tensor], torch.Tensor]) -> None:
    dense = normal(2, 3, 5, N, dtype=torch.float32)
    gaps = torch.zeros(2, 3, 5, 2 * N)
    gaps[..., N:] = dense
    for x in (permuted(dense), permuted(gaps[..., N:])):
        wanted = rotate_quantize(x.contiguous(), R, to=name, **scale_for(name, x))
        found = rotate_quantize(x, R, to=name, **scale_for(name, x))
        like = torch.empty_like(x.contiguous() if found.format.by_head else permuted(dense))
        bits = FORMATS[name].element.bits
        assert found.codes.shape[:-1] == x.shape[:-1]
        assert not bits or found.codes.stride() == (*(each * bits // 8 for each in like.stride()[:-1]), 1)
        assert torch.equal(found.codes.contiguous().view(torch.uint8), wanted.codes.view(torch.uint8))
        assert found.scales.shape == wanted.scales.shape
        assert torch.equal(found.scales, wanted.scales)
        if found.format.group != TENSOR:
            groups = found.format.scales_in_row(N)
            assert found.scales.stride()[:3] == tuple(each // N * groups for each in like.stride()[:-1])
        assert not bits or torch.equal(found.dequantize(), wanted.dequantize())
        fake = torch.empty_strided(x.shape, x.stride(), device="meta")
        fakes = rotate_quantize(fake, 64, to=name, **scale_for(name, fake))
        assert (fakes.codes.stride(), fakes.scales.stride()) == (found.codes.stride(), found.scales.stride())


@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("moved", [lambda x: x, *PERMUTED])
def test_largest_magnitudes(
    moved: Callable[[torch.Tensor], torch.Tensor], group: int | None, round_first: bool
) -> None:
    """Of rows, or of groups; out has them too."""
    x = moved(normal(2, 3, 5, N))
    options = {"to": "largest", "group": group, "round_first": round_first}
    values = R(x.float()).to(x.dtype if round_first else torch.float32).float().abs()
    wanted = values.unflatten(-1, (-1, group)).amax(-1) if group else values.amax(-1)
    found = rotate_quantize(x, R, **options)
    assert (found.codes.shape, found.codes.dtype) == ((*x.shape[:-1], 0), torch.uint8)
    assert found.scales.dtype == torch.float32
    assert torch.equal(found.scales, wanted)
    out = rotate_quantize(torch.zeros_like(x), R, **options)
    assert rotate_quantize(x, R, out=out, **options).scales is out.scales
    assert torch.equal(out.scales, wanted)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-head", "nvfp4"])
@pytest.mark.parametrize("zero", [True, False])
def test_zeros_by_the_scale_of_their_largest_magnitude(name: str, zero: bool) -> None:
    """As docs/formats.md finds it: of a tensor of zeros, or of one head of zeros, it is 0. Eager, compiled, with a
    number, and with gradients."""
    x = torch.zeros(3, 2, N) if zero else normal(3, 2, N, dtype=torch.float32)
    x[1] = 0
    magnitudes = rotate_quantize(x, R, to="largest").scales
    scale = (magnitudes.amax(1) if name == "fp8-head" else magnitudes.amax()) / (448 * (6 if name == "nvfp4" else 1))

    def model(x: torch.Tensor, scale: torch.Tensor | float) -> tuple[torch.Tensor, ...]:
        found = rotate_quantize(x, R, to=name, tensor_scale=scale)
        return found.codes.view(torch.uint8), found.scales.float(), found.dequantize()

    torch.compiler.reset()  # of one function only so many are kept
    codes, scales, values = model(x, scale)
    for other in torch.compile(model, fullgraph=True, backend="aot_eager")(x, scale), model(x, scale):
        assert all(torch.equal(one, wanted) for one, wanted in zip(other, (codes, scales, values), strict=True))
    if name != "fp8-head":
        assert all(
            torch.equal(one, wanted) for one, wanted in zip(model(x, float(scale)), model(x, scale), strict=True)
        )
    error = (values - R(x)).norm() if zero else (values - R(x)).norm() / x.norm()
    assert error < (0.15 if name == "nvfp4" else 0.04) * (not zero) or error == 0
    assert scales.isfinite().all()
    assert not values[1].any()
    assert not (codes[1] & (0x77 if name == "nvfp4" else 0x7F)).any()
    wide = x.clone().requires_grad_()
    found = rotate_quantize(wide, R, to=name, tensor_scale=scale, gradient=True).dequantize()
    (gradient,) = torch.autograd.grad(found.sum(), wide)
    assert torch.allclose(gradient[1], R.inverse(torch.ones(2, N)), atol=1e-5)


def test_the_gradient_of_values_beyond_a_scale_of_zero() -> None:
    x = torch.tensor([[0.0, 1.0, -2.0, 0.0]]).requires_grad_()
    values = rotate_quantize(x, to="fp8-tensor", tensor_scale=0.0, gradient=True).dequantize()
    (gradient,) = torch.autograd.grad(values.sum(), x)
    assert torch.equal(values, torch.zeros_like(values))
    assert torch.equal(gradient, torch.tensor([[1.0, 0.0, 0.0, 1.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "rule", "layout"), WITH_CODES)
def test_finite_values_stay_finite(name: str, rule: str, layout: str, dtype: torch.dtype) -> None:
    """Also in the type of x, whose largest number a code may round up."""
    largest = torch.finfo(dtype).max
    x = torch.full((2, N), largest * 0.3).to(dtype)
    x[0, 3::16], x[1] = largest, -largest
    scale = scale_for(name, x, rule)
    if FORMATS[name].needs_scale:
        most = torch.full((2,), largest) if name == "fp8-head" else torch.tensor(largest)
        scale = {
            "tensor_scale": most / (1 if rule in ("fa3", "transformer_engine") else 448 if "fp8" in name else 2688)
        }
    found = rotate_quantize(x, to=name, rule=rule, layout=layout, **scale)
    for to in (dtype, torch.float32, torch.float64):
        values = found.dequantize(to)
        assert values.isfinite().all()
        assert (
            (values.double() - x.double()).abs() <= largest * (1 / 8 if FORMATS[name].element.bits == 8 else 1 / 4)
        ).all()


@pytest.mark.parametrize("rule", ["exact", "fa3"])
@pytest.mark.parametrize("leading", [1, 2, 3])
@pytest.mark.parametrize("moved", [lambda x: x, *PERMUTED])
def test_scales_of_heads(moved: Callable[[torch.Tensor], torch.Tensor], leading: int, rule: str) -> None:
    """Each head is quantized as if it were a tensor."""
    x = moved(normal(2, 3, 5, N))
    shape = x.shape[:leading]
    given = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * (8.0 if rule == "fa3" else 0.02)
    given = given.transpose(0, -1).contiguous().transpose(0, -1)
    found = rotate_quantize(x, R, to="fp8-head", rule=rule, tensor_scale=given, round_first=True)
    assert torch.equal(found.scales, given)
    assert found.tensor_scale is None
    for at in np.ndindex(*shape):
        one = given[at].reshape(1)
        part = x[at].reshape(1, -1, N)
        alone = rotate_quantize(part, R, to="fp8-head", rule=rule, tensor_scale=one, round_first=True)
        assert torch.equal(found.codes[at].view(torch.uint8).flatten(), alone.codes.view(torch.uint8).flatten())
        assert torch.equal(found.dequantize()[at].flatten(), alone.dequantize().flatten())
        if rule == "exact":
            plain = rotate_quantize(part, R, to="fp8-tensor", tensor_scale=float(one), round_first=True)
            assert torch.equal(plain.codes.view(torch.uint8), alone.codes.view(torch.uint8))
            assert torch.equal(plain.dequantize(), alone.dequantize())


@pytest.mark.parametrize("shape", [(0, 3, N), (2, 0, N)])
def test_heads_without_rows(shape: tuple[int, ...]) -> None:
    for leading in (1, 2):
        given = torch.ones(shape[:leading])
        found = rotate_quantize(torch.zeros(shape), to="fp8-head", tensor_scale=given)
        assert found.dequantize().shape == shape


def test_magnitudes_of_the_rule_fa3_may_be_any() -> None:
    given = torch.tensor([0.0, 1e-12, 2e-12, torch.inf, torch.nan])
    found = rotate_quantize(torch.ones(5, 8), to="fp8-head", rule="fa3", tensor_scale=given)
    assert found.codes.float()[:, 0].tolist() == [1, 1, 448, 0, 1]


@pytest.mark.parametrize("rotation", [None, 64])
def test_gradients_of_permuted_rows(rotation: int | None) -> None:
    x = normal(2, 3, 5, N, dtype=torch.float32)
    g = normal(3, 5, 2, N, dtype=torch.float32)
    gradients = []
    for move in (lambda x: x, torch.Tensor.contiguous):
        leaf = x.clone().requires_grad_()
        found = rotate_quantize(move(leaf.permute(1, 2, 0, 3)), rotation, to="int8-row", gradient=True)
        found.dequantize().backward(g)
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_permuted_rows_compile(dynamic: bool, backend: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = x.view(*x.shape[:2], 2, 3, N).transpose(1, 3).unbind(2)
        found = [rotate_quantize(each, R, to="mxfp4") for each in (q, (k + 1).contiguous().transpose(0, 1))]
        found.append(rotate_quantize(q[:, :1].expand(-1, 4, -1, -1), 64, to="int8-row"))
        return tuple(part for each in found for part in (*each[:2], each.dequantize()))

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for batch, length in ((2, 5), (3, 7)):
        x = normal(batch, length, 6 * N)
        for mine, wanted in zip(compiled(x), model(x), strict=True):
            assert torch.equal(mine, wanted)
            assert mine.stride() == wanted.stride()


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


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, rule, layout in WITH_CODES if layout == "row-major"])
def test_gradients_are_those_of_the_rotation_but_where_values_are_clipped(name: str, rule: str) -> None:
    x = normal(5, N, dtype=torch.float32).requires_grad_()
    given = {"tensor_scale": 4.0 if rule == "transformer_engine" else 1e-3} if FORMATS[name].needs_scale else {}
    if name == "fp8-head":
        given = {"tensor_scale": scale_for(name, x, rule)["tensor_scale"] / 10}
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
    elif name == "fp8-head":
        kept = (y.abs() <= 464 * scale_for(name, x)["tensor_scale"][:, None] / 10).float()
        assert 0.5 < kept.mean() < 1
        assert kept[0].mean() < kept[-1].mean()
    elif rule in ("floor", "even"):  # whose scales may be too small for the largest
        scales = torch.exp2(found.scales.float() - 127).repeat_interleave(32, -1)
        kept = (y.abs() / scales <= {"mxfp8": 464, "mxfp4": 7}[name]).float()
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
        found = rotate_quantize(normal(0, N), R, to=name, **scale_for(name, normal(0, N)))
        assert found.codes.shape[0] == 0
        assert name == "largest" or found.dequantize().shape == (0, N)
    assert rotate_quantize(normal(N), to="int4-row").dequantize().shape == (N,)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (lambda x, q: q.codes, TypeError, "out is a Tensor; pass what rotate_quantize returned, or codes and scales"),
        (lambda x, q: (q.codes,), TypeError, "out is a tuple; pass what"),
        (lambda x, q: (q.codes, None), TypeError, "out.scales is a NoneType; pass a torch.Tensor"),
        (lambda x, q: (3, q.scales), TypeError, "out.codes is a int; pass a torch.Tensor"),
        (
            lambda x, q: (q.codes[:2], q.scales),
            TensorError,
            r"out.codes is strided float8_e4m3fn \(2, 256\) with the strides \(256, 1\) on cpu; this call needs "
            r"strided float8_e4m3fn \(4, 256\) with the strides \(256, 1\) on cpu",
        ),
        (
            lambda x, q: (q.codes.view(torch.uint8), q.scales),
            TensorError,
            "out.codes is strided uint8 .* needs strided",
        ),
        (lambda x, q: (q.codes.t().contiguous().t(), q.scales), TensorError, r"with the strides \(1, 4\) on cpu; this"),
        (lambda x, q: (q.codes, q.scales.double()), TensorError, "out.scales is strided float64"),
        (lambda x, q: (q.codes.to("meta"), q.scales), TensorError, "on meta; this call needs"),
        (
            lambda x, q: (q.codes, q.scales.to_sparse()),
            TensorError,
            r"out.scales is sparse_coo float32 \(4, 2\) on cpu",
        ),
        (
            lambda x, q: (x.view(torch.float8_e4m3fn).view(-1)[N:].as_strided((4, N), (N, 1)), q.scales),
            TensorError,
            "out.codes shares memory with x; pass memory of its own",
        ),
        (
            lambda x, q: (q.codes, q.codes.view(-1)[-32:].view(torch.float32).view(4, 2)),
            TensorError,
            "out.scales shares memory with out.codes",
        ),
        (lambda x, q: (q.codes, torch._neg_view(q.scales)), TensorError, "out.scales is a view that negates what it"),
        (lambda x, q: (q.codes, q.scales.clone().requires_grad_()), TensorError, "out.scales requires a gradient"),
    ],
)
def test_a_bad_out_is_one_sentence(out: Callable[..., Any], error: type[Exception], message: str) -> None:
    x = normal(4, N)
    with pytest.raises(error, match=message):
        rotate_quantize(x, to="fp8-group", out=out(x, rotate_quantize(x, to="fp8-group")))


def test_compiled_calls_check_out() -> None:
    def model(x: torch.Tensor, codes: torch.Tensor, scales: Any) -> torch.Tensor:
        return rotate_quantize(x, to="fp8-group", out=(codes, scales)).codes

    good = rotate_quantize(normal(4, N), to="fp8-group")
    for out in ((good.codes[:2], good.scales), (good.codes, None)):
        with pytest.raises(Exception, match=r"this call needs strided|pass a torch\.Tensor"):
            torch.compile(model, fullgraph=True, backend="aot_eager")(normal(4, N), *out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", [64, R], ids=["n", "Rotation"])
def test_torch_jit_traces_codes(by: Any) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(rotate_quantize(x, by, to="int8-row"))

    x = normal(3, N)
    for mine, wanted in zip(torch.jit.trace(model, normal(5, N), check_trace=False)(x), model(x), strict=True):
        assert torch.equal(mine, wanted)


def test_out_under_vmap_is_refused() -> None:
    out = torch.empty(4, N, dtype=torch.int8), torch.empty(4, 1)
    with pytest.raises(TensorError, match="out= is not possible under torch"):
        torch.vmap(lambda x: rotate_quantize(x, 64, to="int8-row", out=out).codes)(normal(2, 4, N))


def test_out_has_no_derivative() -> None:
    good = rotate_quantize(normal(4, N), to="fp8-group")
    scales = torch.zeros_like(good.scales)
    with forward_ad.dual_level(), pytest.raises(TensorError, match="out has a tangent, and out= has no derivative"):
        rotate_quantize(normal(4, N), to="fp8-group", out=(good.codes, forward_ad.make_dual(scales, scales)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: rotate_quantize([1.0], to="mxfp8"), TypeError, "x is a list; pass a torch.Tensor"),
        (lambda x: rotate_quantize(x, to=["mxfp8"]), TypeError, "to is a list; pass a string"),
        (lambda x: rotate_quantize(x, to="mxfp8", rule=np.ones(2)), TypeError, "rule is a ndarray; pass a string"),
        (lambda x: rotate_quantize(x, to="mxfp8", group=32.0), TypeError, "group is a float; pass an integer or None"),
        (lambda x: rotate_quantize(x, to="mxfp8").dequantize(torch.int8), UsageError, "dtype 'int8' is not poss"),
        (
            lambda x: rotate_quantize(x, to="largest").dequantize(),
            UsageError,
            "largest has no codes to dequantize; use its scales",
        ),
        (
            lambda x: rotate_quantize(x, to="largest", gradient=True),
            UsageError,
            "gradient = True is not possible for largest, which has no codes; leave it out",
        ),
        (lambda x: rotate_quantize(x, to="largest", group=8), UsageError, "choose 16, 32, 64, 128"),
        (lambda x: rotate_quantize(x, to="fp6"), UsageError, "to = 'fp6' is no format; choose one of fp8-group, "),
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
        (lambda x: rotate_quantize(x, to="fp8-row", layout="swizzled"), UsageError, "for fp8-row; choose row-major"),
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
        (
            lambda x: rotate_quantize(x, to="mxfp8", numerics="x"),
            UsageError,
            "numerics 'x' is not supported; choose one of accurate, fast",
        ),
        (lambda x: rotate_quantize(x.float().requires_grad_(), to="mxfp8"), TensorError, "x requires a gradient"),
        (lambda x: rotate_quantize(x, to="nvfp4"), UsageError, "nvfp4 needs a tensor_scale; pass a number"),
        (
            lambda x: rotate_quantize(x, to="fp8-head"),
            UsageError,
            r"fp8-head needs a tensor_scale; pass float32 with the shape of leading dimensions of x, such as \(4,\)",
        ),
        (
            lambda x: rotate_quantize(x, to="fp8-head", tensor_scale=0.1),
            TypeError,
            "tensor_scale is a float; fp8-head needs a tensor, float32 with the shape",
        ),
        *(
            (
                lambda x, given=given: rotate_quantize(x, to="fp8-head", tensor_scale=given(torch.ones(4))),
                TensorError,
                f"tensor_scale is {said}; it must be strided float32 with the shape of leading dimensions of x",
            )
            for given, said in (
                (lambda of: of[:3], r"strided float32 \(3,\) on cpu"),
                (lambda of: of[:, None], r"strided float32 \(4, 1\) on cpu"),
                (lambda of: of[:, None].expand(-1, N), r"strided float32 \(4, 256\) on cpu"),
                (lambda of: of[0], r"strided float32 \(\) on cpu"),
                (lambda of: of.double(), r"strided float64 \(4,\) on cpu"),
                (lambda of: of.to("meta"), r"strided float32 \(4,\) on meta"),
                (lambda of: of.to_sparse(), r"sparse_coo float32 \(4,\) on cpu"),
            )
        ),
        (
            lambda x: rotate_quantize(x, to="fp8-head", tensor_scale=torch.ones(4, requires_grad=True)),
            TensorError,
            "tensor_scale requires a gradient",
        ),
        (
            lambda x: rotate_quantize(x, to="fp8-head", tensor_scale=torch.tensor([1.0, 2.0, -0.5, 3.0])),
            UsageError,
            "tensor_scale = -0.5 is not possible; pass a positive number that float32 has, up to 3.4e.38, or 0",
        ),
        (
            lambda x: rotate_quantize(x, to="fp8-head", tensor_scale=torch.tensor([1.0, torch.inf, 1.0, torch.nan])),
            UsageError,
            "tensor_scale = nan is not possible",
        ),
        (
            lambda x: rotate_quantize(x, to="fp8-head", rule="fa3", tensor_scale=torch.tensor([1.0, -1.0, 1.0, 1.0])),
            UsageError,
            "tensor_scale = -1.0 is not possible",
        ),
        (
            lambda x: rotate_quantize(x[0], to="fp8-head", tensor_scale=torch.ones(N)),
            TensorError,
            r"x has one dimension; fp8-head needs another for its heads, such as x\[None\]",
        ),
        (
            lambda x: rotate_quantize(x, to="mxfp8", tensor_scale=1.0),
            UsageError,
            "mxfp8 has no tensor_scale; leave it out",
        ),
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
def test_bad_input_of_a_quantizer_is_one_sentence(
    call: Callable[[torch.Tensor], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(normal(4, N))


def test_what_fills_up_scales_is_memory_of_its_own() -> None:
    groups, rows, pitch = 2, 5, 8
    memory = torch.randn(pitch * groups + rows * groups * 128)
    scales = memory.as_strided((rows, groups), (1, pitch))
    x = memory[pitch * groups - 2 :][: rows * groups * 128].view(rows, -1)  # begins where the last column is filled up
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    before = memory.clone()
    with pytest.raises(TensorError, match=r"out\.scales shares memory with x"):
        rotate_quantize(x, 128, to="fp8-group", layout="column-major", out=(codes, scales))
    assert torch.equal(memory, before)
