"""`Quantized` on its own: a pair, a node of pytrees, what can be stored and moved, and its checks."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_quantize import ALL, WITH_CODES, N, R, normal, scale_for
from torch.utils import _pytree

from hadagen import Quantized, TensorError, UsageError, rotate_quantize
from hadagen.problem.formats import Element
from hadagen.truth.quantizer import memory_of

E8M0, FP4 = (getattr(torch, name, None) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2"))
needs_types = pytest.mark.skipif(E8M0 is None or FP4 is None, reason="this PyTorch lacks them")


def made(name: str = "mxfp4", rule: str | None = None, layout: str = "row-major", **options: Any) -> Quantized:
    x = normal(2, 3, N, dtype=torch.float32)
    return rotate_quantize(x, R, to=name, rule=rule, layout=layout, **scale_for(name, x, rule or ""), **options)


def bits(tensor: torch.Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: Quantized, other: Quantized) -> bool:
    tensors = ((each.codes, each.scales, each.tensor_scale) for each in (one, other))
    pairs = list(zip(*tensors, strict=True))
    return one.format == other.format and all(bits(mine) == bits(theirs) for mine, theirs in pairs)


def stored(q: Quantized) -> Quantized:
    memory = io.BytesIO()
    torch.save({"q": q}, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)["q"]


def exported(q: Quantized) -> Quantized:
    class Module(torch.nn.Module):
        def forward(self, given: Quantized) -> Quantized:
            return Quantized(given.codes.clone(), given.scales.clone(), given.format, given.tensor_scale)

    memory = io.BytesIO()
    torch.export.save(torch.export.export(Module(), (q,)), memory)
    memory.seek(0)
    return torch.export.load(memory).module()(q)


COPIES: dict[str, Callable[[Quantized], Quantized]] = {
    "save": stored,
    "export": exported,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "to": lambda q: q.to("cpu", copy=True),
    "clone": lambda q: _pytree.tree_map(torch.clone, q),
    "flat": lambda q: _pytree.tree_unflatten(*_pytree.tree_flatten(q)),
    "spec": lambda q: _pytree.tree_unflatten(
        _pytree.tree_leaves(q), _pytree.treespec_loads(_pytree.treespec_dumps(_pytree.tree_structure(q)))
    ),
    "compile": torch.compile(lambda q: _pytree.tree_map(torch.clone, q), fullgraph=True, backend="eager"),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_the_same(way: str) -> None:
    slow = way in ("export", "compile")
    for name, rule, layout in (("nvfp4", "exact", "swizzled"), ("int8-row", "exact", "row-major")) if slow else ALL:
        q = made(name, rule, layout)
        again = COPIES[way](q)
        assert isinstance(again, Quantized)
        assert again is not q
        assert same(again, q)
        assert q.format.element is Element.NONE or torch.equal(again.dequantize(), q.dequantize())
        if way != "clone":  # which lets go of what fills up columns
            assert again.scales.stride() == q.scales.stride()


def test_it_is_a_pair() -> None:
    q = made()
    codes, scales = q
    assert codes is q.codes is q[0] is q[-2]
    assert scales is q.scales is q[1]
    assert (len(q), q[:2]) == (2, (codes, scales))
    assert q != made()
    assert {q: 1}[q] == 1
    with pytest.raises(IndexError):
        q[2]


def test_its_repr_is_one_line() -> None:
    assert repr(made("nvfp4")) == (
        "Quantized(nvfp4, codes=uint8[2, 3, 128] on cpu, scales=float8_e4m3fn[2, 3, 16] on cpu, "
        "tensor_scale=float32[] on cpu)"
    )
    assert repr(made("int8-row")).startswith("Quantized(int8-row, codes=int8[2, 3, 256] on cpu")
    x = normal(3, N).requires_grad_()
    assert repr(rotate_quantize(x, to="mxfp8", gradient=True)).endswith(" on cpu, gradient=True)")
    assert repr(_pytree.tree_map(lambda leaf: 3, made())) == "Quantized(mxfp4, codes=int, scales=int)"


def test_gradients_pass_through_trees_and_moves() -> None:
    x = normal(3, N, dtype=torch.float32).requires_grad_()
    q = rotate_quantize(x, R, to="nvfp4", tensor_scale=0.01, gradient=True)
    (wanted,) = torch.autograd.grad(q.dequantize().sum(), x, retain_graph=True)
    for again in (
        _pytree.tree_map(lambda leaf: leaf + 0 if leaf.dtype == torch.float32 else leaf, q),
        q.to("cpu", copy=True),
    ):
        (found,) = torch.autograd.grad(again.dequantize().sum(), x, retain_graph=True)
        assert torch.equal(found, wanted)
    for again in (copy.deepcopy(q), stored(q)):
        assert not again.dequantize().requires_grad


def test_transforms_return_it() -> None:
    x = normal(4, 3, N)
    q = torch.vmap(lambda x: rotate_quantize(x, R, to="mxfp8"))(x)
    assert same(q, rotate_quantize(x, R, to="mxfp8"))
    compiled = torch.compile(lambda x: rotate_quantize(x, R, to="mxfp8"), fullgraph=True, backend="aot_eager")(x)
    assert same(compiled, q)

    def model(x: torch.Tensor) -> torch.Tensor:
        codes, scales = rotate_quantize(x, R, to="mxfp8")
        return Quantized(codes, scales, q.format).dequantize()

    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), q.dequantize())


def test_it_moves() -> None:
    q = made("nvfp4")
    assert q.to("cpu") is q
    assert q.to(torch.ones(1)) is q
    assert {each.device.type for each in _pytree.tree_leaves(q.to("meta", non_blocking=True))} == {"meta"}
    for bad in ("gpu", 3.5, [1], None):
        with pytest.raises(UsageError, match=r"is no device; pass one such as"):
            q.to(bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="codes are never converted"):
        q.to(torch.float16)  # type: ignore[arg-type]


def test_columns_stay_filled_up_where_they_move() -> None:
    q = made("fp8-group", layout="column-major")
    again = q.to("cpu", copy=True)
    assert again.scales.stride() == q.scales.stride() == (1, 8)
    assert torch.equal(memory_of(again.scales), memory_of(q.scales))
    rotate_quantize(normal(2, 3, N, dtype=torch.float32), to="fp8-group", layout="column-major", out=again)


def test_accelerate_moves_it() -> None:
    send = pytest.importorskip("accelerate.utils").send_to_device
    assert send({"q": made()}, torch.device("meta"))["q"].codes.is_meta


# ---- PyTorch's own types ---------------------------------------------------------------------------------------------
@needs_types
@pytest.mark.parametrize(("name", "rule", "layout"), WITH_CODES)
def test_types_of_pytorch_are_taken(name: str, rule: str, layout: str) -> None:
    """By dequantize, by out=, and where gradients are cut."""
    x = normal(2, 3, N, dtype=torch.float32).requires_grad_()
    options = {"to": name, "rule": rule, "layout": layout, **scale_for(name, x, rule)}
    q = rotate_quantize(x, R, gradient=True, **options)
    native = q.as_torch_types()
    element, scale = q.format.element, q.format.scale
    assert native.codes.dtype == (FP4 if element is Element.E2M1 else q.codes.dtype)
    assert native.scales.dtype == (E8M0 if scale == "e8m0" and layout != "packed" else q.scales.dtype)
    assert torch.equal(native.dequantize(), q.dequantize())
    gradients = [torch.autograd.grad(each.dequantize().sum(), x, retain_graph=True)[0] for each in (q, native)]
    assert torch.equal(*gradients)
    memory_of(native.codes).fill_(0x55)
    found = rotate_quantize(x.detach(), R, out=native, **options)
    assert found.codes is native.codes
    again = rotate_quantize(x.detach(), R, **options)
    assert bits(found.codes) == bits(again.codes)
    assert bits(found.scales) == bits(again.scales)
    compiled = torch.compile(lambda q: q.dequantize(), fullgraph=True, backend="aot_eager")
    torch.compiler.reset()
    assert torch.equal(compiled(found), again.dequantize())


@needs_types
def test_a_scale_of_8_is_8() -> None:
    codes = torch.full((1, 32), 3.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[130]], dtype=torch.uint8)
    for each in (scales, scales.view(E8M0)):  # type: ignore[call-overload]
        assert Quantized(codes, each, made("mxfp8").format).dequantize().eq(24).all()


def test_a_type_that_this_pytorch_lacks_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    q = made("mxfp8")
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)
    with pytest.raises(UsageError, match=r"has no torch.float8_e8m0fnu; use 2.7 or newer, or uint8 as it is"):
        q.as_torch_types()
    assert q.dequantize().shape == (2, 3, N)


# ---- what was put together wrongly -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"codes": 3}, TypeError, "codes is a int; pass a torch.Tensor"),
        ({"scales": None}, TypeError, "scales is a NoneType; pass a torch.Tensor"),
        ({"format": "mxfp8"}, TypeError, "format is a str; pass that of a Quantized"),
        ({"tensor_scale": torch.ones(())}, UsageError, "mxfp4 has no tensor_scale; leave it out"),
        ({"codes": lambda t: t.float()}, TensorError, "codes is strided float32; mxfp4 has strided uint8"),
        ({"scales": lambda t: t.int()}, TensorError, "scales is strided int32; mxfp4 has strided uint8"),
        ({"scales": lambda t: t.to_sparse()}, TensorError, "scales is sparse_coo uint8; mxfp4 has strided uint8"),
        ({"codes": lambda t: torch.nested.nested_tensor([t[0]])}, TensorError, "codes is nested; mxfp4 has"),
        (
            {"scales": lambda t: t.to("meta")},
            TensorError,
            "scales is on meta but codes on cpu; a tensor on meta has no values; put",
        ),
        (
            {"scales": lambda t: t[..., :4]},
            TensorError,
            r"scales have the shape \(2, 3, 4\); mxfp4 in the layout ",
        ),
        ({"scales": lambda t: t.transpose(0, 1)}, TensorError, r"needs \(2, 3, 8\) for codes of the shape \(2, 3, 128"),
        ({"codes": lambda t: t[..., :100]}, UsageError, "groups of 32 do not fill rows of 200 elements"),
    ],
)
def test_a_part_that_does_not_fit_is_one_sentence(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    q = made()
    for name, part in wrong.items():
        setattr(q, name, part(getattr(q, name)) if callable(part) else part)
    with pytest.raises(error, match=message):
        q.dequantize()


@pytest.mark.parametrize(
    ("name", "layout", "wrong", "message"),
    [
        ("mxfp8", "swizzled", {"scales": lambda t: t[:-1]}, r"needs \(1024,\) for codes"),
        ("nvfp4", "row-major", {"tensor_scale": lambda t: t.expand(2)}, "tensor_scale has 2 elements; nvfp4 has one"),
        ("nvfp4", "row-major", {"tensor_scale": lambda t: t.double()}, "tensor_scale is strided float64; nvfp4 has"),
        ("fp8-tensor", "row-major", {"scales": lambda t: t.expand(2)}, "needs one element for codes"),
        ("fp8-head", "row-major", {"scales": lambda t: t[:1]}, "needs those of leading dimensions of codes"),
        (
            "int4-row",
            "row-major",
            {"scales": lambda t: t.double()},
            "int4-row has strided float16 or bfloat16",
        ),
    ],
)
def test_layouts_and_given_scales_are_checked_too(name: str, layout: str, wrong: dict[str, Any], message: str) -> None:
    q = made(name, layout=layout)
    for part, change in wrong.items():
        setattr(q, part, change(getattr(q, part)))
    with pytest.raises(TensorError, match=message):
        q.dequantize()
