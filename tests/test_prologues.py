"""`before=` of the three calls, with the values of `hadagen.prologues`."""

import math
import pickle
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from command_line import run, sentence, succeed
from spaces import ARCH
from test_new_source import Emulated, MadeUp, launched
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from hadagen import (
    Match,
    Quantized,
    Rotation,
    TensorError,
    UsageError,
    best_config,
    hadamard_transform,
    rotate_quantize,
    warmup,
)
from hadagen.compiler import codegen
from hadagen.compiler.emulator import compile_host
from hadagen.plan.space import Space, build_plan
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import ARITHMETIC, Prologue, parsed
from hadagen.prologues import Arithmetic, Gelu, GeluMul, Mul, Relu2, SiluMul
from hadagen.runtime import warmup as warming
from hadagen.runtime.call import runs
from hadagen.runtime.call.compute import applied
from hadagen.runtime.call.rules import CALL
from hadagen.runtime.choose import tables
from hadagen.runtime.launch import kernels, streams
from hadagen.runtime.operands.spec import text_of

HALF, BF16, DTYPES = torch.float16, torch.bfloat16, (torch.float16, torch.bfloat16, torch.float32, torch.float64)
N = 64  # columns of results


def gelu_tanh(g: torch.Tensor) -> torch.Tensor:
    return g * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))


# Name of a value → how it is made, and its activation in float64.
ACTIVATIONS: dict[str, tuple[Callable[..., Prologue], Callable[[torch.Tensor], torch.Tensor]]] = {
    "SiluMul": (SiluMul, lambda g: g / (1 + (-g).exp())),
    "SiluMul, clamped": (partial(SiluMul, limit=1, alpha=1.702, beta=0.5), lambda g: g / (1 + (-1.702 * g).exp())),
    "SiluMul, with alpha": (partial(SiluMul, alpha=0.5), lambda g: g / (1 + (-0.5 * g).exp())),
    "GeluMul": (GeluMul, lambda g: g * (1 + torch.erf(g / math.sqrt(2))) / 2),
    "GeluMul, tanh": (partial(GeluMul, approximate="tanh"), gelu_tanh),
    "GeluMul, quick": (partial(GeluMul, approximate="quick"), lambda g: g / (1 + (-1.702 * g).exp())),
    "Mul": (Mul, lambda g: g),
    "Gelu": (Gelu, lambda g: g * (1 + torch.erf(g / math.sqrt(2))) / 2),
    "Gelu, tanh": (partial(Gelu, approximate="tanh"), gelu_tanh),
    "Gelu, quick": (partial(Gelu, approximate="quick"), lambda g: g / (1 + (-1.702 * g).exp())),
    "Relu2": (Relu2, lambda g: g.clamp(min=0) ** 2),
}
CASES = [
    (name, layout)
    for name in ACTIVATIONS
    for layout in ("halves", "interleaved")
    if layout == "halves" or "Mul" in name
]
V = SiluMul()


def made(name: str, layout: str, **options: Any) -> Prologue:
    return ACTIVATIONS[name][0](**options, **({} if layout == "halves" else {"layout": layout}))


def wide(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """x for a product."""
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def x_for(value: Prologue, rows: int, dtype: torch.dtype = torch.float32, columns: int = N) -> torch.Tensor:
    return wide(rows, value.width * columns, dtype=dtype)


def exact(name: str, layout: str, x: torch.Tensor, rounds: str) -> torch.Tensor:
    """The result in float64, rounded to x's type where `rounds` says."""
    act = ACTIVATIONS[name][1]

    def rounded(values: torch.Tensor, *kinds: str) -> torch.Tensor:
        return values.to(x.dtype).double() if rounds in kinds else values

    values, twice = x.double(), "activation and product"
    if "Mul" not in name:
        return rounded(act(values), "product", twice)
    g, u = (values[:, ::2], values[:, 1::2]) if layout == "interleaved" else values.chunk(2, 1)
    if "clamped" in name:
        g, u = rounded(g.clamp(max=1), twice), rounded(u.clamp(-1, 1), twice) + 0.5
    return rounded(rounded(act(g), twice) * u, "product", twice)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_value_computes_and_rounds_as_it_says(name: str, layout: str) -> None:
    for numerics in ARITHMETIC:
        value = made(name, layout, numerics=numerics)
        for dtype in DTYPES:
            x = x_for(value, 64, dtype)
            found, wanted = applied(x, value)["x"], exact(name, layout, x, ARITHMETIC[numerics].rounds)
            assert found.dtype == torch.promote_types(dtype, torch.float32)
            if dtype in (HALF, BF16) and value.is_rounded:  # the same but for ties, of which there are few
                assert float((found != wanted).double().mean()) < 0.03, (numerics, dtype)
                torch.testing.assert_close(found.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
            else:
                tolerance = 1e-12 if dtype == torch.float64 else 2e-6
                torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def rotations(n: int) -> list[Any]:
    given = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    return [Rotation(n), Rotation(n, block=16, signs=[1, -1] * 8), Rotation(n, given), 16, None]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_calls_do_it_before_the_rotation(name: str, layout: str) -> None:
    for dtype in DTYPES:
        for numerics in ("exact", "eager"):
            value = made(name, layout, numerics=numerics)
            for columns in (N, 48):  # rows of 48 are padded
                x = x_for(value, 5, dtype, columns)
                first = applied(x, value)["x"]
                for shaped in (x, x.view(5, 1, -1), torch.cat((x, x), 1)[:, : x.shape[1]], x[0]):
                    y = hadamard_transform(shaped, 0.25, before=value)
                    wanted = hadamard_transform(first, 0.25).to(dtype)[: 1 if shaped.dim() == 1 else 5]
                    assert (y.shape, y.dtype) == ((*shaped.shape[:-1], columns), dtype)
                    assert y.is_contiguous()
                    torch.testing.assert_close(y.view(wanted.shape), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
            x = x_for(value, 5, dtype)
            first = applied(x, value)["x"]
            for of in rotations(N):
                if isinstance(of, Rotation):
                    y, wanted = of(x, before=value), of(first).to(dtype)
                    torch.testing.assert_close(y, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
                if dtype == torch.float64:
                    continue
                q = rotate_quantize(x, of, to="fp8-group", group=32, before=value)
                # From the same values, as float32 holds all of them.
                theirs = rotate_quantize(first, of, to="fp8-group", group=32)
                assert torch.equal(q.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
                assert torch.equal(q.scales, theirs.scales)


FORMATS = [
    {"to": "int8-row"},
    {"to": "int4-row"},
    {"to": "fp8-tensor", "tensor_scale": 0.05},
    {"to": "mxfp4", "layout": "swizzled"},
    {"to": "mxfp8", "layout": "batched-swizzled"},
    {"to": "fp8-group", "group": 32, "layout": "column-major"},
    {"to": "nvfp4", "tensor_scale": 0.01, "round_first": True},
    {"to": "largest", "group": 32},
]


def formats(rows: int) -> list[dict[str, Any]]:
    return [*FORMATS, {"to": "fp8-head", "tensor_scale": torch.arange(1, rows + 1) / 50}]


def pair(q: Any) -> list[torch.Tensor]:
    return [each.reshape(-1).contiguous().view(torch.uint8) for each in q if each.numel()]


@pytest.mark.parametrize("value", [SiluMul(numerics="vllm"), Relu2()], ids=repr)
def test_every_format_and_out(value: Prologue) -> None:
    for options in formats(6):
        x = x_for(value, 6, BF16)
        if options.get("layout") == "batched-swizzled":
            x = x[None]
        q = rotate_quantize(x, 16, before=value, **options)
        first = applied(x, value)["x"]
        theirs = rotate_quantize(first.to(BF16) if value.is_rounded else first, 16, **options)
        if value.is_rounded:  # others have scales and rounded values of another type
            assert all(map(torch.equal, pair(q), pair(theirs))), options
        out = rotate_quantize(torch.zeros_like(first, dtype=BF16), 16, **options)
        into = rotate_quantize(x, 16, before=value, out=out, **options)
        assert into.codes is out.codes
        assert all(map(torch.equal, pair(into), pair(q))), options


def test_out_and_inplace() -> None:
    x, of = wide(5, 2 * N), Rotation(N)
    for call in (of, hadamard_transform, lambda x, **more: hadamard_transform(x[:, :96], **more)):
        wanted = call(x, before=V)
        out = torch.full((5, 2 * wanted.shape[1]), torch.nan)
        for part in (out[:, : wanted.shape[1]], torch.full_like(wanted, torch.nan)):
            assert call(x, before=V, out=part) is part
            assert torch.equal(part, wanted)
    for call in (of, hadamard_transform, partial(Rotation(N, block=32), inplace=False)):
        y = wide(5, N)
        wanted = call(y, before=Gelu())
        assert call(y, before=Gelu(), **({} if isinstance(call, partial) else {"inplace": True})) is y or call
        assert isinstance(call, partial) or torch.equal(y, wanted)
        y = wide(5, N)
        assert call(y, before=Gelu(), out=y) is y
        assert torch.equal(y, wanted)


# ---- values ----------------------------------------------------------------------------------------------------------
def test_values_are_values() -> None:
    values = [made(name, layout, numerics=each) for name, layout in CASES for each in ARITHMETIC]
    values += [SiluMul(numerics=Arithmetic("product", tanh="tanhf", sigmoid=True)), SiluMul(limit=7), SiluMul(beta=1)]
    for value in values:
        for other in (pickle.loads(pickle.dumps(value)), eval(repr(value))):
            assert (other, hash(other), other.text) == (value, hash(value), value.text)
        assert parsed(value.text).text == value.text
        Problem.of(N, "float16", prologue=value.name)
    different = set(values)
    assert len({each.text for each in different}) == len(different)
    assert SiluMul() == SiluMul(layout="halves", limit=None, alpha=1, beta=0.0, numerics=Arithmetic())
    assert SiluMul(limit=math.inf) == SiluMul() != SiluMul(limit=7)
    assert SiluMul(numerics="vllm") == SiluMul(numerics="eager") != SiluMul(numerics="sglang")
    assert Gelu(numerics="vllm") == Gelu(numerics="sglang")  # which has no exp, and rounds once
    assert repr(SiluMul(limit=7, layout="interleaved", numerics="sglang")) == (
        "SiluMul(limit=7.0, layout='interleaved', numerics='sglang')"
    )


# ---- kernels ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls find kernels, which run on the CPU, for rows that a prologue makes."""
    launched.clear()
    tables.forget()
    monkeypatch.setattr(runs, "takes_kernels", lambda x: x.numel() > 0)
    monkeypatch.setattr(
        kernels, "find", lambda kind, elements: kernel_of(kind.problem) if kind.problem.prologue else None
    )
    monkeypatch.setattr(streams, "raw_stream", lambda device: 0)
    monkeypatch.setattr(streams, "current_device", lambda: -1)


@cache
def kernel_of(problem: Problem) -> Emulated | None:
    if not (seeds := Space(problem, ARCH).seeds()):
        return None
    source = codegen.render(build_plan(problem, seeds[0], ARCH))
    return Emulated(problem, source, compile_host([source]))


SIGNED = Rotation(4 * N, block=2 * N, signs=[1, -1, -1, 1] * (N // 2))
# A value, a rotation of 256 columns or the whole row, and a format.
KERNELS: list[tuple[Prologue, Any, dict[str, Any]]] = [
    (SiluMul(), Rotation(4 * N), {}),
    (SiluMul(numerics="vllm"), SIGNED, {}),
    (SiluMul(layout="interleaved", limit=1, alpha=1.702, beta=1, numerics="eager"), SIGNED, {}),
    (SiluMul(), Rotation(4 * N), {"to": "mxfp8", "layout": "swizzled"}),
    (SiluMul(numerics="sglang"), 128, {"to": "int8-row"}),
    (GeluMul(layout="interleaved"), 64, {"to": "fp8-group"}),
    (SiluMul(limit=2), 64, {"to": "fp8-tensor", "tensor_scale": 0.05}),
    (SiluMul(limit=3), None, {"to": "mxfp8", "layout": "batched-swizzled"}),
    (Relu2(), 32, {"to": "fp8-head", "tensor_scale": torch.arange(1, 7) / 50}),
    (Gelu(approximate="tanh"), Rotation(4 * N), {}),
]


@pytest.mark.parametrize(("value", "of", "options"), KERNELS, ids=lambda each: repr(each)[:40])
def test_one_kernel_does_prologue_and_rotation(value: Prologue, of: Any, options: dict[str, Any], device: None) -> None:
    """Eagerly, when a call comes again, into out, and for tensors that it does not take as they lie."""

    def call(x: torch.Tensor, **more: Any) -> list[torch.Tensor]:
        if options:
            return list(rotate_quantize(x, of, before=value, **options, **more))
        return [of(x, before=value, **more)]

    def near(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
        for one, other in zip(found, wanted, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            if one.dtype.itemsize == 1:
                is_near = float((one.view(torch.uint8) != other.view(torch.uint8)).double().mean()) <= 0.02
            else:
                is_near = float((one.double() - other.double()).norm() / other.double().norm()) <= 4e-3
            if not is_near:
                return False
        return True

    x = x_for(value, 6, BF16, 4 * N)[None]
    if options.get("to") == "fp8-head":
        x = x[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "takes_kernels", lambda x: False)
        wanted = call(x)
    assert launched == []
    assert near(call(x), wanted)
    assert len(launched) == 1
    assert value.name in launched[0]
    assert all(map(torch.equal, map(_bits, call(x)), map(_bits, call(x))))
    assert len(launched) == 3
    known = len({id(run) for run in tables.calls.values()})
    assert known == 1
    apart = torch.cat((x, x), -1)[..., : x.shape[-1]]
    shifted = torch.empty(x.numel() + 1, dtype=BF16)[1:].view(x.shape).copy_(x)
    for other in (apart, shifted, x.transpose(0, -2).contiguous().transpose(0, -2)):
        assert near(call(other), wanted)
    assert len(launched) == 6
    out = [torch.zeros_like(each) for each in wanted]
    written = (out[0], out[-1]) if options else out[0]
    for _ in range(2):
        assert near(call(x, out=written), wanted)
    assert near(out[:1], wanted[:1])
    assert len(launched) == 8
    if not options:  # an out with gaps, whose gaps stay as they are
        held = torch.full((*wanted[0].shape[:-1], 2 * wanted[0].shape[-1]), 7, dtype=BF16)
        assert torch.equal(call(x, out=held[..., ::2])[0], call(x)[0])
        assert bool((held[..., 1::2] == 7).all())
    # For other numbers and other values the same options mean another call.
    if value == SiluMul(limit=2):
        limited = SiluMul(limit=0.5)
        q = rotate_quantize(x, of, before=limited, **options)
        first = applied(x, limited)["x"]
        assert torch.allclose(q.dequantize(), rotate_quantize(first, of, **options).dequantize(), atol=0.3)
        assert not near(list(q), wanted)


def _bits(each: torch.Tensor) -> torch.Tensor:
    return each.reshape(-1).view(torch.uint8)


def test_a_kernel_computes_what_has_a_gradient(device: None) -> None:
    x = wide(6, 8 * N, dtype=BF16)
    for value in (V, SiluMul(layout="interleaved", limit=2, numerics="eager")):

        def call(x: torch.Tensor, value: Prologue = value) -> torch.Tensor:
            return SIGNED(x, before=value).float().square()

        def again(x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor] = call) -> torch.Tensor:
            leaf = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(call(leaf).sum(), leaf, create_graph=True)
            return torch.autograd.grad(first.float().square().sum(), leaf)[0]

        launched.clear()
        found, twice = gradient(call, x), again(x)
        assert len(launched) == 2  # derivatives launch none with a prologue
        assert torch.equal(SIGNED(x.clone().requires_grad_(), before=value), SIGNED(x, before=value))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs, "takes_kernels", lambda x: False)
            torch.testing.assert_close(found, gradient(call, x), rtol=0.02, atol=0.3)
            assert float((twice - again(x)).norm() / twice.norm()) < 0.02


def test_what_no_kernel_takes_is_computed_in_pytorch(device: None) -> None:
    for dtype, columns, n in ((BF16, 4, 4), (BF16, 24, 24), (torch.float64, N, N), (HALF, 8, 8)):
        x, of = wide(3, 2 * columns, dtype=dtype), Rotation(n)
        wanted = of(applied(x, V)["x"]).to(dtype)
        torch.testing.assert_close(of(x, before=V), wanted, rtol=1e-2, atol=1e-2)
    assert launched == [f"n8-after-{V.name}-float16-accurate"]
    assert rotate_quantize(wide(3, 16, dtype=HALF), to="int8-row", before=V).codes.shape == (3, 8)
    assert len(launched) == 1  # a unit has two rows
    assert hadamard_transform(wide(0, 2 * N, dtype=HALF), before=V).shape == (0, N)


@pytest.mark.parametrize("value", [V, SiluMul(limit=2, numerics="vllm")], ids=repr)
@pytest.mark.parametrize("options", [{}, {"to": "mxfp8"}, {"to": "int8-row"}], ids=str)
def test_warmup_finds_the_prologues_that_calls_find(
    value: Prologue, options: dict[str, Any], device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that have the prologue, and without."""
    found: list[Any] = []
    has_kernels = True

    def note(kind: kernels.Kind, elements: int) -> Emulated | None:
        found.append((kind, elements))
        return kernel_of(kind.problem) if has_kernels or not kind.problem.prologue else None

    monkeypatch.setattr(kernels, "find", note)
    monkeypatch.setattr(kernels, "timed_of", lambda kind: [1] if has_kernels or not kind.problem.prologue else [])
    monkeypatch.setattr(warming, "_warmed_device", lambda device: -1)
    monkeypatch.setattr(warming, "cuda_device", lambda index: None)
    monkeypatch.setattr(warming, "_row", lambda columns, dtype, index: torch.empty(1, columns, dtype=dtype))
    for has_kernels in (True, False):
        for before in (value, value.name):
            found.clear()
            warmup(SIGNED, BF16, rows=6, numerics="accurate", before=before, **options)
            warmed = set(found)
            found.clear()
            tables.forget()
            x = wide(6, 8 * N, dtype=BF16)
            if options:
                rotate_quantize(x, SIGNED, before=value, **options)
            else:
                SIGNED(x, before=value)
            called = {each for each in found if has_kernels or not each[0].problem.prologue}
            # If PyTorch makes codes of rows that a kernel rotated, the kernel writes over them.
            assert {(kind._replace(in_place=True), size) for kind, size in called} <= {
                (kind._replace(in_place=True), size) for kind, size in warmed
            }
            assert called


def test_the_kernel_of_a_call_has_a_name() -> None:
    asked = {"rows": 6, "arch": "sm90", "to": "mxfp8"}
    best = best_config(256, "bfloat16", before=SiluMul(limit=7), **asked)
    assert (best.match, best.problem.prologue) == (Match.ESTIMATED, "silu_mul_clamped")
    assert best.launch is not None
    assert best.launch.signature.endswith("u32 limit, u32 alpha, u32 beta")
    by_name = best_config(256, "bfloat16", before="silu_mul_clamped", **asked)
    assert (by_name.problem, by_name.kernel) == (best.problem, best.kernel)
    of_rotation = best_config(SIGNED, "bfloat16", rows=6, arch="sm90", before=V)
    assert of_rotation.problem.key == "n128-signed-after-silu_mul-bfloat16-accurate"
    command = ["best", "--arch", "sm90", "--n", "128", "--rows", "8", "--dtype", "bfloat16", "--before", "silu_mul"]
    form = ["--to", "mxfp8", "--columns", "256"]
    key = "n128-after-silu_mul-bfloat16-to-mxfp8_32-accurate"
    assert f"{key}, 16 rows" in succeed(*command, *form)
    assert key in succeed("best", "--arch", "sm90", "--rows", "8", "--problem", key.replace("mxfp8_32", "mxfp8"))
    wrong = run(*command[:-1], "silu_mull")
    assert sentence(wrong, 2).startswith("prologue 'silu_mull' is not known; did you mean silu or silu_mul")
    assert "no kernels for pitched rows" in sentence(run(*command, "--pitched"), 2)


# ---- traces ----------------------------------------------------------------------------------------------------------
NUMBERED = SiluMul(limit=7, alpha=1.702, beta=1, layout="interleaved", numerics="vllm")
OF = Rotation(N, block=32, signs=[1, -1] * 16)
WIDE, ALONE = Rotation(2 * N), Gelu(approximate="tanh")


def parts(q: Quantized) -> list[torch.Tensor]:
    return [q.codes, q.scales]


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "transform": lambda x: hadamard_transform(x, 0.5, before=NUMBERED),
    "padded": lambda x: hadamard_transform(x[:, :48], 0.5, before=V),
    "rotation": lambda x: OF(x, before=NUMBERED),
    "wide": lambda x: WIDE(x, before=ALONE),
    "codes": lambda x: parts(rotate_quantize(x, OF, to="int8-row", before=NUMBERED)),
    "swizzled": lambda x: parts(rotate_quantize(x, None, to="mxfp4", layout="swizzled", before=V)),
    "scaled": lambda x: [rotate_quantize(x, 32, to="fp8-tensor", tensor_scale=0.1, before=V).codes.view(torch.uint8)],
    "out": lambda x: OF(x, before=NUMBERED, out=torch.empty_like(x[:, :N])),
}


def as_list(found: Any) -> list[torch.Tensor]:
    return [*found] if isinstance(found, (list, tuple)) else [found]


def check_alike(found: Any, wanted: Any) -> None:
    for one, other in zip(as_list(found), as_list(wanted), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_calls_with_a_prologue_trace(way: str) -> None:
    """torch.compile, once for all numbers of rows; torch.export; fake tensors; the dispatcher."""
    call, x = WAYS[way], wide(6, 2 * N)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, dynamic=True, fullgraph=True)
    frames = []
    for rows in (6, 5, 4):
        check_alike(compiled(x[:rows].clone()), call(x[:rows].clone()))
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 3

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return call(x)

    if way not in ("rotation", "codes", "out", "wide"):  # which hold a module that is not exported
        exported = torch.export.export(Module(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows", max=64)}})
        check_alike(exported.module()(x[:3]), call(x[:3]))
    with FakeTensorMode() as mode:
        if way not in ("rotation", "codes", "out"):
            for fake, real in zip(as_list(call(mode.from_tensor(x))), as_list(call_outside(call, x)), strict=True):
                assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_torch_fx_records_calls() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OF(hadamard_transform(x, 0.1, before=NUMBERED).repeat(1, 2), before=V)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return False

    module, x = Module(), wide(3, 2 * N)
    module.of = OF
    traced = torch.fx.GraphModule(module, Tracer().trace(module))
    check_alike(traced(x), module(x))


def call_outside(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    with torch.utils._python_dispatch._disable_current_modes():
        return call(x)


def test_the_operator_keeps_its_promises() -> None:
    for value in (NUMBERED, Gelu()):
        arguments = [x_for(value, 3)], 0.25, text_of(16, before=value.text)
        utils = "test_schema", "test_faketensor", "test_autograd_registration"
        torch.library.opcheck(CALL.default, arguments, test_utils=utils)
        (found,), (wanted,) = CALL.default(*arguments), CALL(*arguments)
        assert torch.equal(found, wanted)
    for text in ("silu_mul:1.0", "silu_mul_clamped", "silu_mul_clamped:1:2", "silu_mul_clamped:a:b:c", "silu_mull"):
        with pytest.raises(UsageError, match=r"prologue '.*' is not known; "):
            CALL.default([wide(3, 2 * N)], 0.25, text_of(16, before=text))


def test_the_gradient_of_a_call_that_comes_again(device: None) -> None:
    """A transform after a prologue too, whose kernel is known."""
    x = x_for(Gelu(), 3)
    wanted = gradient(lambda x: hadamard_transform(torch.nn.functional.gelu(x), 0.5), x)
    for _ in range(3):
        hadamard_transform(x, 0.5, before=Gelu())
        torch.testing.assert_close(gradient(lambda x: hadamard_transform(x, 0.5, before=Gelu()), x), wanted)


def test_batches_of_vmap() -> None:
    x = wide(4, 3, 2 * N)
    for call in (
        lambda x: OF(x, before=NUMBERED),
        lambda x: hadamard_transform(x, before=V),
        lambda x: hadamard_transform(x[..., :48], before=V),
        lambda x: rotate_quantize(x, OF, to="int8-row", before=V).codes,
    ):
        for dim in (0, 1):
            wanted = torch.stack([call(each) for each in x.unbind(dim)])
            torch.testing.assert_close(torch.vmap(call, dim)(x), wanted)
        of_rows = torch.vmap(torch.vmap(call))(x)
        torch.testing.assert_close(of_rows, call(x))
        assert torch.equal(torch.vmap(call)(x[:0]), call(x[:0]))


def test_a_tangent_far_below_zero_is_a_number_without_gradients_too() -> None:
    x = torch.full((1, 16), -1e4)
    with torch.no_grad():
        _, tangent = torch.func.jvp(lambda x: Rotation(8)(x, before=V), (x,), (torch.ones_like(x),))
    assert bool(tangent.isfinite().all())


def test_an_arithmetic_of_a_list_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"exp = \[\] is not supported; choose one of"):
        Arithmetic(exp=[])  # type: ignore[arg-type]


# ---- derivatives -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_are_those_of_the_formula(name: str, layout: str) -> None:
    value, of = made(name, layout), Rotation(8, block=4)
    x = 0.7 * x_for(value, 1, torch.float64, 8) + 0.01
    for call in (lambda x: of(x, before=value), lambda x: hadamard_transform(x, before=value)):
        assert torch.autograd.gradcheck(call, x.clone().requires_grad_(), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, x.clone().requires_grad_())
        assert torch.allclose(torch.func.grad(lambda x, call=call: call(x).sum())(x), gradient(call, x))
    for numerics in ("exact", "eager"):
        rounding = made(name, layout, numerics=numerics)
        given = x_for(rounding, 6, BF16)

        def sums(x: torch.Tensor, rounding: Prologue = rounding) -> torch.Tensor:
            return OF(x, before=rounding).float().square()

        wanted = gradient(lambda x: OF(exact(name, layout, x, "nothing")).square(), given.double())
        torch._dynamo.reset()
        compiled = torch.compile(sums, backend="aot_eager", fullgraph=True)
        for call in (sums, compiled):
            torch.testing.assert_close(gradient(call, given).double(), wanted, rtol=0.05, atol=0.2)


def gradient(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    call(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_a_quantizer_has_the_gradient_of_what_it_rounds() -> None:
    x = wide(6, 2 * N, dtype=BF16)

    def values(x: torch.Tensor) -> torch.Tensor:
        q = rotate_quantize(x, OF, to="int8-row", before=V, gradient=True)
        return q.dequantize().square()

    wanted = gradient(lambda x: OF(exact("SiluMul", "halves", x, "nothing")).square(), x.double())
    torch.testing.assert_close(gradient(values, x).double(), wanted, rtol=0.1, atol=0.6)
    with pytest.raises(TensorError, match=r"x requires a gradient, .*; pass x.detach\(\), or gradient=True"):
        rotate_quantize(x.requires_grad_(), OF, to="int8-row", before=V)


def test_odd_gates_are_those_of_pytorch() -> None:
    gates = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, -90.0, -200.0, 3e38, -3e38, 1e9, -1e9])
    odd = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
    silu = torch.nn.functional.silu
    for dtype in (BF16, torch.float32):
        g = torch.cat((gates, odd)).to(dtype)
        x = torch.cat((g, torch.ones_like(g)))[None]
        found = applied(x, V)["x"][0].to(dtype)
        torch.testing.assert_close(found, silu(g), equal_nan=True)
        finite = gates.to(dtype)
        with_ones = torch.cat((finite, torch.ones_like(finite)))[None]
        grads = gradient(lambda x: hadamard_transform(x, before=Mul()) * 0 + applied(x, V)["x"], with_ones)
        mine = gradient(silu, finite)
        torch.testing.assert_close(grads[0, : len(finite)], mine)
        clamped = applied(x, SiluMul(limit=7, alpha=1.702, beta=1))["x"][0]
        assert bool(clamped[-2:].isnan().all())
        assert bool(clamped[:-3].isfinite().all())


ODD = (0.0, 1e-30, 0.3, 1.0, 2.5, 7.0, 30.0, 89.0, 104.0, 3e4, 6e4, math.inf)


@pytest.mark.parametrize("numerics", ARITHMETIC)
@pytest.mark.parametrize(
    "make",
    [
        *(make for make, _ in ACTIVATIONS.values()),
        partial(SiluMul, limit=7),
        partial(SiluMul, limit=0),
        partial(SiluMul, beta=-0.5),
        partial(SiluMul, alpha=-1.5),
    ],
)
def test_odd_values_of_kernels_are_those_of_pytorch(
    make: Callable[..., Prologue], numerics: str, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes have the sign of a zero, NaN, and the largest value for an infinity; with gradients enabled or not."""
    value = make(numerics=numerics)
    g = torch.tensor([*ODD, *(-each for each in ODD), math.nan], dtype=BF16)
    parts = torch.cartesian_prod(*[g] * 2).T[-value.width :, None, :624]
    x = value.joined(parts if value.width == 2 else parts[0])

    def codes() -> torch.Tensor:
        return _bits(rotate_quantize(x, None, to="fp8-tensor", tensor_scale=1.0, before=value).codes)

    found = codes()
    assert len(launched) == 1
    monkeypatch.setattr(runs, "takes_kernels", lambda x: False)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert torch.equal(codes(), found)


def test_zeros_have_the_signs_of_pytorch() -> None:
    x = torch.tensor([[2.0, -3.0] * 8 + [-0.0, 0.0] * 8, [-0.0, 0.0] * 8 + [1.0, -1.0] * 8], dtype=BF16)
    g, u = x.chunk(2, -1)
    for limit in (None, 10):
        for numerics in ARITHMETIC:
            y = torch.nn.functional.silu(g if limit is None else g.clamp(max=limit)) * u
            assert torch.equal(applied(x, SiluMul(limit=limit, numerics=numerics))["x"].signbit(), y.signbit())


# ---- errors ----------------------------------------------------------------------------------------------------------
X = wide(4, 2 * N)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: SiluMul(limit=-1), UsageError, "limit = -1.0 is not possible; pass a number of at least 0, or None"),
    (lambda: SiluMul(limit=math.nan), UsageError, "limit = nan is not possible"),
    (lambda: SiluMul(limit=1e39), UsageError, "limit = 1e.39 is not possible; pass a number up to 3.4e.38"),
    (lambda: SiluMul(alpha=math.inf), UsageError, "alpha = inf is not possible"),
    (lambda: SiluMul(beta=10**400), UsageError, "beta = inf is not possible"),
    (lambda: SiluMul(limit=True), TypeError, "limit is a bool; pass a real number"),
    (lambda: SiluMul(alpha="1"), TypeError, "alpha is a str; pass a real number"),
    (lambda: SiluMul(limit=torch.ones(())), TypeError, "limit is a Tensor; pass a real number"),
    (lambda: SiluMul(layout="half"), UsageError, "layout 'half' is not known; choose one of halves, in"),
    (lambda: Mul(layout=None), UsageError, "layout None is not known; choose one of halves, interleaved"),
    (lambda: Gelu(approximate="erf"), UsageError, "approximate 'erf' is not known; choose one of none, tanh, quick"),
    (lambda: Relu2(numerics="vlm"), UsageError, "numerics 'vlm' is not known; did you mean vllm"),
    (lambda: Relu2(numerics=[]), UsageError, "numerics .. is not known; choose one of exact,"),
    (lambda: Arithmetic("twice"), UsageError, "rounds = 'twice' is not supported; choose one of nothing, product"),
    (lambda: OF(X, before="silu_mul"), TypeError, "before is a str; pass a value of hadagen.prologues"),
    (lambda: hadamard_transform(X, before=SiluMul), TypeError, "before is a function; pass a value of"),
    (lambda: rotate_quantize(X, to="int8-row", before=1), TypeError, "before is a int; pass a value of"),
    (lambda: hadamard_transform(X[:, 1:], before=V), TensorError, "last dimension of x is 127; it must be a multiple"),
    (lambda: hadamard_transform(X[:, :1], before=V), TensorError, "last dimension of x is 1; it must be a multiple"),
    (lambda: OF(X[:, :N], before=V), TensorError, "last dimension of x is 64; this rotation takes 2 · 64 with before="),
    (lambda: OF(X, before=Gelu()), TensorError, "last dimension of x is 128; this rotation takes 64"),
    (lambda: rotate_quantize(X[:, 2:], OF, to="int8-row", before=V), TensorError, "x is 126; this rotation takes 2 ·"),
    (lambda: rotate_quantize(X, 128, to="int8-row", before=V), UsageError, "divides the 64 columns of the result"),
    (
        lambda: rotate_quantize(X[:, :6], to="int4-row", before=V),
        TensorError,
        "result of before has 3 columns; 4-b",
    ),
    (lambda: OF(X, before=V, inplace=True), UsageError, r"inplace=True is not possible with before = SiluMul\(\),"),
    (lambda: hadamard_transform(X, before=V, inplace=True), UsageError, "inplace=True is not possible with before"),
    (lambda: OF(X, before=V, out=X.clone()), TensorError, r"out is float32 \(4, 128\) on cpu; .* float32 \(4, 64\)"),
    (lambda: hadamard_transform(X, before=V, out=X.clone()), TensorError, r"out is float32 \(4, 128\) on cpu; with"),
    (lambda: hadamard_transform(X, before=V, out=X[:, :N]), TensorError, "out shares memory with x"),
    (lambda: hadamard_transform(X, before=V, out=X[:, :N].half()), TensorError, "out is float16"),
    (
        lambda: rotate_quantize(X, OF, to="int8-row", before=V, out=rotate_quantize(X, to="int8-row")),
        TensorError,
        r"out.codes is .* \(4, 128\) .* needs strided int8 \(4, 64\)",
    ),
    (lambda: OF(X.to(torch.float8_e4m3fn), before=V), TensorError, "x has the type float8_e4m3fn; convert it to"),
    (lambda: hadamard_transform(X.int(), before=V), TensorError, "x has the type int32; convert it to float16"),
    (lambda: rotate_quantize(X.double(), to="int8-row", before=V), TensorError, "x has the type float64; pass values"),
    (
        lambda: OF(X.clone().requires_grad_(), before=V, out=X[:, :N].clone()),
        TensorError,
        "x or out requires grad, and out= has no derivative",
    ),
    (lambda: OF(X[:, :N].clone().requires_grad_(), before=Gelu(), inplace=True), TensorError, "x is a leaf"),
    (lambda: OF(X[:1, :N].expand(4, N), before=Gelu(), inplace=True), TensorError, "share memory"),
    (lambda: OF(X, before=MadeUp()), UsageError, "before = made_up has tensors of its own, gate, weight, total, which"),
    (lambda: OF.inverse(X, before=V), TypeError, "before"),
]


@pytest.mark.parametrize("at", range(len(BAD)))
def test_bad_input_is_a_sentence(at: int) -> None:
    call, kind, message = BAD[at]
    with pytest.raises(kind, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
