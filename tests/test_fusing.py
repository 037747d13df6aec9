"""`hadagen.fuse`: graphs of torch.compile in which neighbors become one operator."""

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_graphs import case, difference
from torch._inductor import config, custom_graph_pass
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, relu, silu

import hadagen
from hadagen import Quantized, Rotation, UsageError, fuse, hadamard_transform, rotate_quantize
from hadagen.fusing import fuse as room
from hadagen.prologues import Arithmetic, Gelu, GeluMul, Mul, Relu2, SiluMul

BF16, FP8, M = torch.bfloat16, torch.float8_e4m3fn, 64  # columns that are rotated
R = Rotation(M, block=32, signs=[1, -1] * 16)
Q = partial(rotate_quantize, to="int8-row")
GELU = Gelu()
# As Inductor computes them. Earlier releases, such as 2.8, compute silu by a sigmoid.
SIGMOID = Arithmetic("product", "__expf", "div.full.f32", sigmoid=True)
ONCE = Arithmetic("product", "expf", "div.full.f32")
_nodes = make_fx(lambda x: silu(x), select_decomp_table())(torch.zeros(2)).graph.nodes
SILU = SIGMOID if any("sigmoid" in str(node.target) for node in _nodes) else ONCE
TAKES_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")


@pytest.fixture(autouse=True)
def passes() -> Iterator[None]:
    torch._dynamo.reset()
    with fuse():
        yield
    fuse.undo()


Pair = tuple[torch.Tensor, torch.Tensor]


def pair(q: Quantized) -> Pair:
    """Which torch.compile of earlier releases cannot unpack."""
    return q.codes, q.scales


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)


class Compiled:
    """A function, compiled but for the code that Inductor generates: the graphs run as they are after the passes."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> torch.fx.GraphModule:
            self.graphs.append(graph)
            return graph

        backend = partial(compile_fx, inner_compile=keep)
        self._call = torch.compile(function, fullgraph=True, backend=backend, **options)
        self._before = len(fuse.report())

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    @property
    def report(self) -> list[Any]:
        return fuse.report()[self._before :]

    def operators(self, at: int = 0) -> list[str]:
        """hadagen's operators of a graph."""
        targets = [str(node.target) for node in self.graphs[at].graph.nodes if node.op == "call_function"]
        return [name for name in targets if name.startswith("hadagen")]


def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.chunk(2, -1)


def sliced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.split([x.shape[-1] // 2] * 2, -1)


def pairs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[..., ::2], x[..., 1::2]


def gpt_oss(x: torch.Tensor, limit: float = 7.0) -> torch.Tensor:
    g, u = pairs(x)
    g, u = g.clamp(min=None, max=limit), u.clamp(min=-limit, max=limit)
    return (u + 1) * (g * torch.sigmoid(g * 1.702))


def vllm_clamped(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    g, u = torch.clamp(g, max=1.5), torch.clamp(u, min=-1.5, max=1.5)
    return g * torch.sigmoid(1.25 * g) * (u + 0.5)


def by(function: Callable[..., torch.Tensor], parts: Any = halves) -> Callable[..., torch.Tensor]:
    return lambda x: function(*parts(x))


def in_float32(x: torch.Tensor) -> torch.Tensor:
    g, u = halves(x.float())
    return (u * silu(g)).to(x.dtype)


# Name → what runs before the rotation, and the value of before= that it becomes.
FORMULAS = {
    "silu, chunk": (by(lambda g, u: silu(g) * u), SiluMul(numerics=SILU)),
    "silu, slices": (by(lambda g, u: u * silu(g), sliced), SiluMul(numerics=SILU)),
    "silu, split": (by(lambda g, u: silu(g) * u, split), SiluMul(numerics=SILU)),
    "silu, float32": (in_float32, SiluMul(numerics=SILU)),
    "silu, pairs": (by(lambda g, u: silu(g) * u, pairs), SiluMul(layout="interleaved", numerics=SILU)),
    "silu, written": (by(lambda g, u: g * torch.sigmoid(g) * u), SiluMul(numerics=SIGMOID)),
    "silu, alpha": (by(lambda g, u: g * torch.sigmoid(g * 1.5) * u), SiluMul(alpha=1.5, numerics=SIGMOID)),
    "vLLM, clamped": (
        by(vllm_clamped),
        SiluMul(limit=1.5, alpha=1.25, beta=0.5, numerics=SIGMOID),
    ),
    "silu, limit": (
        by(lambda g, u: silu(g.clamp(max=1.0)) * u.clamp(-1.0, 1.0)),
        SiluMul(limit=1.0, numerics=SILU),
    ),
    "gpt-oss": (gpt_oss, SiluMul(limit=7, alpha=1.702, beta=1, layout="interleaved", numerics=SIGMOID)),
    "gelu·mul": (by(lambda g, u: gelu(g) * u), GeluMul(numerics=ONCE)),
    "gelu·mul, tanh": (
        by(lambda g, u: gelu(g, approximate="tanh") * u),
        GeluMul(approximate="tanh", numerics=ONCE),
    ),
    "mul": (by(lambda g, u: g * u), Mul(numerics=ONCE)),
    "gelu": (lambda x: gelu(x), Gelu(numerics=ONCE)),
    "gelu, tanh": (lambda x: gelu(x, approximate="tanh"), Gelu(approximate="tanh", numerics=ONCE)),
    "gelu, quick": (lambda x: x * torch.sigmoid(1.702 * x), Gelu(approximate="quick", numerics=SIGMOID)),
    "relu²": (lambda x: relu(x).square(), Relu2(numerics=ONCE)),
    "relu**2": (lambda x: relu(x) ** 2, Relu2(numerics=ONCE)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_before_a_rotation(name: str) -> None:
    """It becomes the value with the same numbers and roundings, before each of the operators."""
    formula, value = FORMULAS[name]
    x = normal(3, 5, value.width * M)

    def model(x: torch.Tensor) -> Any:
        both = Q(formula(x), R)
        return R(formula(x)), hadamard_transform(formula(x), 0.125), both.codes, both.scales

    compiled = Compiled(model)
    found = compiled(x)
    assert compiled.operators() == ["hadagen.call.default"] * 3
    q = Q(x, R, before=value)
    for mine, wanted in zip(found, (R(x, before=value), hadamard_transform(x, 0.125, before=value), *q), strict=True):
        assert torch.equal(mine, wanted)
        assert mine.stride() == wanted.stride()
    assert [each.what for each in compiled.report] == [
        f"{value!r} → {rest}" for rest in ("rotation → int8-row", "rotation", "rotation")
    ]
    assert {each.reason for each in compiled.report} == {None}
    assert {(each.shape, each.dtype) for each in compiled.report} == {((3, 5, value.width * M), BF16)}
    assert all(__file__ in each.where and "in model" in each.where for each in compiled.report)


FORMATS = [
    {"to": "int8-row"},
    {"to": "int4-row"},
    {"to": "fp8-tensor", "tensor_scale": 0.05},
    {"to": "mxfp4", "layout": "swizzled"},
    {"to": "fp8-group", "group": 32, "layout": "column-major"},
    {"to": "nvfp4", "tensor_scale": 0.01},
    {"to": "largest", "group": 32},
]


@pytest.mark.parametrize("options", FORMATS, ids=lambda options: options["to"])
def test_a_rotation_before_a_quantizer(options: dict[str, Any]) -> None:
    """Through views, with the same codes, scales and strides as without the pass."""

    def model(x: torch.Tensor) -> Pair:
        return pair(rotate_quantize(R(x).view(-1, M), None, **options))

    x = normal(3, 5, M)
    compiled = Compiled(model)
    found = compiled(x)
    assert compiled.operators() == ["hadagen.call.default"]
    for mine, wanted in zip(found, model(x), strict=True):
        assert torch.equal(mine, wanted)
        assert mine.stride() == wanted.stride()
    assert [each.what for each in compiled.report] == [f"rotation → {options['to']}"]


def heads(x: torch.Tensor) -> torch.Tensor:
    return R(x).view(3, 5, 2, 32).transpose(1, 2)


# Name → values to quantize, and whether they are of a type with which a format fits.
MOVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads": heads,
    "more heads": lambda x: R(x).unflatten(-1, (2, 32)).permute(2, 0, 1, 3),
    "float32": lambda x: R(x).float()[None],
    "hadamard_transform": lambda x: hadamard_transform(x, 0.125).flatten(0, 1),
    "inverse": lambda x: R.inverse(x),
    "of permuted rows": lambda x: R(x.transpose(0, 1)),
    "after a prologue": lambda x: R(x, before=GELU).view(-1, M),
}


@pytest.mark.parametrize("name", MOVED)
def test_views_between(name: str) -> None:
    def model(x: torch.Tensor) -> Pair:
        return pair(rotate_quantize(MOVED[name](x), None, to="mxfp8"))

    x = normal(3, 5, M)
    compiled = Compiled(model)
    found = compiled(x)
    assert [each.reason for each in compiled.report] == [None]
    assert "hadagen.linear.default" not in compiled.operators()
    for mine, wanted in zip(found, model(x), strict=True):
        assert torch.equal(mine, wanted)
        assert mine.stride() == wanted.stride()


def test_fused_calls_take_any_number_of_rows() -> None:
    """From one graph; and all becomes one operator."""

    def model(x: torch.Tensor) -> Pair:
        g, u = halves(x)
        return pair(Q(R((silu(g) * u).view(-1, M)), None))

    compiled = Compiled(model)
    for rows in (7, 4, 9):
        x = normal(rows, 3, 2 * M)
        torch._dynamo.mark_dynamic(x, 0)
        q = Q(x.view(-1, 2 * M), R, before=SiluMul(numerics=SILU), round_first=True)
        assert all(map(torch.equal, compiled(x), q))
    assert len(compiled.graphs) == 1
    assert compiled.operators() == ["hadagen.call.default"]
    (fusion,) = compiled.report
    assert fusion.what.endswith("→ rotation → int8-row")
    assert isinstance(fusion.shape[0], str)
    assert {"mul", "view", "linear", "call"} < {name.rstrip("_0123456789") for name in fusion.nodes}
    assert str(fusion).startswith(f"{fusion.what} of bfloat16[{fusion.shape[0]}, 3, 128]: fused, at File")


def vllm(y: torch.Tensor) -> Pair:
    amax, _ = y.abs().max(dim=-1)
    scale = (amax.unsqueeze(-1).to(torch.float32) / 448.0).clamp(min=1.0 / (448.0 * 512.0))
    return (y.to(torch.float32) * scale.reciprocal()).clamp(-448.0, 448.0).to(FP8), scale


def vllm_032(y: torch.Tensor) -> Pair:
    amax = y.abs().amax(dim=-1).unsqueeze(-1).to(torch.float32)
    scale = (amax / 448.0).clamp(min=1.0 / (448.0 * 512.0))
    return (y.to(torch.float32) * scale.to(torch.float32).reciprocal()).clamp(-448.0, 448.0).to(FP8), scale


def divided(y: torch.Tensor) -> Pair:
    scale = (y.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1 / (448 * 512))
    return (y / scale).clamp(-448, 448).to(FP8), scale


def by_given(y: torch.Tensor, scale: torch.Tensor) -> Pair:
    return (y.float() / scale).clamp(-448, 448).to(FP8), scale


@pytest.mark.parametrize("quantizer", [vllm, vllm_032, divided, by_given])
def test_quantizers_that_are_written_in_pytorch(quantizer: Any) -> None:
    given = [torch.tensor([0.03])] if quantizer is by_given else []

    def model(x: torch.Tensor, *given: torch.Tensor) -> Any:
        g, u = halves(x)
        codes, scale = quantizer(R(silu(g) * u), *given)
        return codes, scale * 2

    x = normal(64, 2 * M)
    compiled = Compiled(model)
    codes, twice = compiled(x, *given)
    assert compiled.operators() == ["hadagen.call.default"]
    assert not [node for node in compiled.graphs[0].graph.nodes if node.name.startswith(("clamp", "reciprocal", "div"))]
    wanted, scale = quantizer(R(x, before=SiluMul(numerics=SILU)), *given)
    assert torch.equal(twice, scale * 2)
    assert codes.dtype == wanted.dtype
    # Values near the middle between two codes.
    assert float((codes.view(torch.uint8) != wanted.view(torch.uint8)).float().mean()) < 0.01
    torch.testing.assert_close(codes.float(), wanted.float(), rtol=1 / 8, atol=2**-9)


SCALES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {  # with the number of operators they leave
    "no dimension": (lambda s: s[0], 1),
    "one": (lambda s: s[1:2], 1),
    "three": (lambda s: s[:1].view(1, 1, 1), 1),
    "computed": (lambda s: s.amax() * 2, 1),
    "expanded": (lambda s: s[:1].expand(M), 2),
}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("rows", [lambda x: x.transpose(1, 2), lambda x: x.movedim(0, 1)], ids=["heads", "moved"])
def test_a_given_scale_of_rows_that_are_copied(name: str, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The first try, without a copy, leaves the scale in the graph for the second one."""
    scale, operators = SCALES[name]

    def model(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return by_given(R(rows(x)), scale(s))[0]

    compiled = Compiled(model)
    found, wanted = (each(normal(2, 5, 4, M), torch.tensor([0.05, 0.03])) for each in (compiled, model))
    assert (len(compiled.report), compiled.report[0].reason is None) == (1, operators == 1)
    assert difference(found, wanted) is None


def test_a_given_scale_that_is_no_positive_number() -> None:
    """Over 0, a 0 is 0, where PyTorch has NaN."""
    x = torch.cat((normal(3, M), torch.zeros(1, M, dtype=BF16)))
    compiled = Compiled(lambda x, s: by_given(R(x), s)[0])
    for number in (0.0, -0.05, torch.inf, torch.nan):
        s = torch.tensor(number)
        wanted = by_given(R(x), s)[0].float()
        wanted = wanted.nan_to_num(0.0) if number == 0 else wanted
        torch.testing.assert_close(compiled(x, s).float(), wanted, rtol=1 / 8, atol=2**-9, equal_nan=True)


@pytest.mark.parametrize("seed", [*range(500)])
def test_random_graphs(seed: int) -> None:
    """Results, and arguments that are written to, are those of PyTorch, but for roundings."""
    model, arguments, sizes, _ = case(seed)
    compiled = Compiled(model)
    for at in sizes:
        theirs, ours = arguments(at), arguments(at)
        try:
            wanted = model(*theirs)
        except (RuntimeError, ValueError):  # PyTorch refuses it
            return
        for mine, other in zip([*compiled(*ours), *ours], [*wanted, *theirs], strict=True):
            assert difference(mine, other) is None


def test_gradients_are_those_of_the_graph() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        g, u = halves(x)
        return R(silu(g) * u)

    x, gradient = normal(6, 2 * M).requires_grad_(), normal(6, M)
    compiled = Compiled(model)
    (found,) = torch.autograd.grad(compiled(x), x, gradient)
    assert compiled.operators(0) == ["hadagen.call.default"]
    assert "hadagen.linear.default" in compiled.operators(1)
    (wanted,) = torch.autograd.grad(model(x), x, gradient)
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)


def used_twice(x: torch.Tensor) -> Any:
    g, u = halves(x)
    product = silu(g) * u
    return R(product), product + 1


def two_tensors(x: torch.Tensor, y: torch.Tensor) -> Any:
    return R(silu(x) * y)


def computed(x: torch.Tensor) -> Any:
    g, u = halves(x * 3)
    return R(silu(g) * u)


def float64(x: torch.Tensor) -> Any:
    return R(gelu(x.double()))


def from_float32(x: torch.Tensor) -> Any:
    g, u = halves(x.float())
    return R(silu(g) * u)


def in_float64(x: torch.Tensor) -> Any:
    g, u = halves(x)
    return R((silu(g.double()) * u).to(BF16))


def rotated_twice_used(x: torch.Tensor) -> Any:
    y = R(x)
    return Q(y, None).codes, y + 1


def amax_used(x: torch.Tensor) -> Any:
    y = R(x)
    amax, _ = y.abs().max(dim=-1)
    scale = (amax.unsqueeze(-1).to(torch.float32) / 448.0).clamp(min=1.0 / (448.0 * 512.0))
    return (y.to(torch.float32) * scale.reciprocal()).clamp(-448.0, 448.0).to(FP8), amax + 1


K, K12, REGULAR = Rotation(192), Rotation(12), Rotation(M, "regular")
TWO_MATRICES, TWO_AND_H = (Rotation(n, [torch.eye(6) / 3, torch.full((64, 64), 0.5).tril()]) for n in (384, 768))
# Name → a model, the shape of its arguments, and words of the reason.
NOT_FUSED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], str]] = {
    "another user of the product": (used_twice, [(4, 2 * M)], " uses mul"),
    "u and g": (lambda x: R(silu(halves(x)[1]) * halves(x)[0]), [(4, 2 * M)], "not the two halves"),
    "two tensors": (two_tensors, [(4, M), (4, M)], "not the two halves"),
    "other parts": (lambda x: R(silu(x[:, :M]) * x[:, M : 2 * M]), [(4, 3 * M)], "not the two halves"),
    "x is computed where it is used": (computed, [(4, 2 * M)], "mul is computed in the same kernel"),
    "float64": (float64, [(4, M)], "takes torch.float64"),
    "float32 after bfloat16": (from_float32, [(4, 2 * M)], "takes torch.float32"),
    "float64 between": (in_float64, [(4, 2 * M)], "converted to another type"),
    "a transposed matrix": (lambda x: K.inverse(relu(x).square()), [(4, 192)], "inverse of a rotation with a matrix"),
    "a matrix alone": (lambda x: K12(relu(x).square()), [(4, 12)], "no kernel takes its matrix"),
    "two matrices with an H": (lambda x: TWO_AND_H(relu(x).square()), [(4, 768)], "no kernel has its matrices"),
    "regular": (lambda x: REGULAR(relu(x).square()), [(4, M)], "no kernel exchanges bits"),
    "padded rows": (lambda x: hadamard_transform(relu(x).square()), [(4, 48)], "its rows are padded"),
    "short blocks": (lambda x: hadamard_transform(relu(x).square()), [(4, 4)], "less than 16 bytes"),
    "rows moved": (lambda x: R(by(lambda g, u: silu(g) * u)(x).T), [(M, 2 * M)], "moves the last dimension"),
    "halves of other rows": (
        lambda x: R(by(lambda g, u: silu(g) * u)(x).view(-1, M)),
        [(4, 4 * M)],
        "divides or joins rows",
    ),
    "a scale of the quantizer": (lambda x: Q(R(x), None, scale=0.5).codes, [(4, M)], "has a scale"),
    "another user of rotated rows": (rotated_twice_used, [(4, M)], "uses linear too"),
    "parts of blocks": (lambda x: Q(R(x).view(-1, 16), None).codes, [(4, M)], "divides or joins rows"),
    "another type is rounded to": (
        lambda x: Q(R(x).float(), None, rule="convrot").codes,
        [(4, M)],
        "rounds to the type",
    ),
    "rounded to float16": (lambda x: Q(R(x).half(), None).codes, [(4, M)], "rounded from torch.bfloat16"),
    "amax is used": (amax_used, [(4, M)], "uses values before"),
}


def test_a_transform_after_a_prologue_is_joined_with_a_quantizer() -> None:
    x = normal(2, M)
    compiled = Compiled(lambda x: Q(hadamard_transform(x, 0.125, before=GELU).reshape(-1, M), None).codes)
    wanted = rotate_quantize(x, M, to="int8-row", scale=0.125, round_first=True, before=GELU).codes
    assert torch.equal(compiled(x), wanted)
    assert compiled.operators() == ["hadagen.call.default"]
    padded = Compiled(lambda x: Q(hadamard_transform(x, 0.125, before=GELU), None).codes)
    padded(normal(2, 48))
    assert "its rows are padded" in str(padded.report[0].reason)


def test_two_matrices_are_fused() -> None:
    x = normal(4, 384)
    compiled = Compiled(lambda x: TWO_MATRICES(relu(x).square()))
    assert torch.equal(compiled(x), TWO_MATRICES(x, before=Relu2(numerics=ONCE)))
    assert "hadagen.call.default" in compiled.operators()


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_is_not_fused_is_said_and_stays(name: str) -> None:
    model, shapes, words = NOT_FUSED[name]
    arguments = [normal(*shape) for shape in shapes]
    compiled = Compiled(model)
    found = compiled(*arguments)
    (reason,) = (each.reason for each in compiled.report)
    assert words in str(reason)
    assert f"not fused, because {compiled.report[0].reason}" in str(compiled.report[0])
    specs = [node.args[-1] for node in compiled.graphs[0].graph.nodes if str(node.target) == "hadagen.call.default"]
    assert all("before=" not in spec and spec.startswith("n=1 to=") for spec in specs)
    both = ([*each] if isinstance(each, tuple) else [each] for each in (found, model(*arguments)))
    for mine, wanted in zip(*both, strict=True):
        torch.testing.assert_close(
            mine.float(), wanted.float(), rtol=2**-6, atol=2**-6 * float(wanted.float().abs().max())
        )


@pytest.mark.parametrize(
    "formula",
    [
        lambda g, u: silu(g.clamp(max=-1.0)) * u.clamp(1.0, -1.0),
        lambda g, u: g * torch.sigmoid(g * float("inf")) * u,
        lambda g, u: g * torch.sigmoid(g * 1e300) * u,
    ],
)
def test_numbers_that_no_prologue_takes_stay_in_the_graph(formula: Callable[..., torch.Tensor]) -> None:
    x = normal(4, 2 * M)

    def model(x: torch.Tensor) -> torch.Tensor:
        return R(formula(*halves(x)))

    torch.testing.assert_close(Compiled(model)(x), model(x), rtol=2**-6, atol=2**-6)


def test_an_activation_with_another_user_is_computed_twice() -> None:
    def model(x: torch.Tensor) -> Any:
        g, u = halves(x)
        active = silu(g)
        return R(active * u), active

    x = normal(4, 2 * M)
    compiled = Compiled(model)
    y, active = compiled(x)
    assert torch.equal(y, R(x, before=SiluMul(numerics=SILU)))
    assert torch.equal(active, model(x)[1])
    assert [each.reason for each in compiled.report] == [None]


def test_roundings_that_inductor_is_asked_for() -> None:
    x = normal(64, 2 * M)
    with config.patch(emulate_precision_casts=True):
        eager = by(lambda g, u: silu(g) * u)
        compiled = Compiled(lambda x: R(eager(x)))
        assert torch.equal(compiled(x), R(x, before=SiluMul(numerics="eager")))
        assert torch.equal(compiled(x), R(eager(x)))  # as the graph says it
        torch._dynamo.reset()
        compiled = Compiled(lambda x: R(in_float32(x)))
        assert torch.equal(compiled(x), R(x, before=SiluMul(numerics=SILU)))
        torch._dynamo.reset()
        compiled = Compiled(lambda x: R(by(lambda g, u: g * torch.sigmoid(g) * u)(x)))
        assert torch.equal(compiled(x), R(by(lambda g, u: g * torch.sigmoid(g) * u)(x)))
        assert ["emulate_precision_casts" in str(each.reason) for each in compiled.report] == [True]


def whole(x: torch.Tensor) -> Pair:
    g, u = halves(x)
    return pair(Q(hadamard_transform((silu(g) * u).view(-1, M), 0.125), None))


def test_inductor_compiles_what_is_fused() -> None:
    x = normal(32, 4, 2 * M)
    with config.patch(force_disable_caches=True):
        found = torch.compile(whole, fullgraph=True)(x)
    q = Q(x.view(-1, 2 * M), M, before=SiluMul(numerics=SILU), round_first=True)
    assert all(map(torch.equal, found, q))


def test_rows_are_those_that_inductor_computes() -> None:
    """But for the last bit of a product, which may be rounded the other way where the functions differ."""
    x = normal(32, 4, 2 * M)
    with config.patch(force_disable_caches=True):
        fused = torch.compile(whole, fullgraph=True)(x)
        fuse.undo()
        torch._dynamo.reset()
        codes, scales = torch.compile(whole, fullgraph=True)(x)
    assert float((fused[0] != codes).float().mean()) < 1e-3
    assert float((fused[1] != scales).float().mean()) < 1e-2


# ---- in the configuration of Inductor --------------------------------------------------------------------------------
def other(graph: torch.fx.Graph) -> None:
    OTHERS.append(graph)


OTHERS: list[torch.fx.Graph] = []


class PlainConfig:
    """The setting of PyTorch before 2.12, one for all threads."""

    def __init__(self) -> None:
        self._config = {room._PLACE: SimpleNamespace(user_override=None)}

    @property
    def joint_custom_post_pass(self) -> Any:
        return self._config[room._PLACE].user_override

    @joint_custom_post_pass.setter
    def joint_custom_post_pass(self, passes: Any) -> None:
        self._config[room._PLACE].user_override = passes


@pytest.fixture(params=["this release", "plain", "plain, one pass"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The setting of Inductor, with passes of nobody."""
    fuse.undo()
    if request.param != "this release":
        monkeypatch.setattr(room, "config", PlainConfig())
    if request.param == "plain, one pass":
        monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    room.config.joint_custom_post_pass = None
    yield room.config
    fuse.undo()
    room.config.joint_custom_post_pass = None


def passes_of(settings: Any) -> list[Any]:
    """All passes of the setting."""
    found = settings.joint_custom_post_pass
    found = found.passes if isinstance(found, room._Both) else found
    return [*found] if isinstance(found, (list, tuple)) else [] if found is None else [found]


def test_passes_of_others_stay(settings: Any) -> None:
    takes_lists = hasattr(custom_graph_pass, "get_custom_graph_passes")
    for theirs in (None, other, *([[other], (other,)] if takes_lists else [])):
        settings.joint_custom_post_pass = theirs
        for _ in range(2):
            fuse()
            assert passes_of(settings) == [*([other] if theirs else []), room._PASS]
        fuse.undo()
        assert passes_of(settings) == ([other] if theirs else [])


def test_the_pass_of_another_runs_before_ours() -> None:
    config.joint_custom_post_pass = other if TAKES_LISTS else room._Both(other)
    compiled = Compiled(lambda x: Q(R(x), None).codes)
    compiled(normal(4, M))
    config.joint_custom_post_pass = None
    assert OTHERS
    assert [each.reason for each in compiled.report] == [None]


def test_a_call_removes_the_pass_where_no_other_needs_it(settings: Any) -> None:
    """In any order of their ends, with exceptions, and in generators."""

    def generator() -> Iterator[None]:
        with fuse():
            yield

    def is_on() -> bool:
        return room._PASS in passes_of(settings)

    with fuse():
        with fuse():
            pass
        assert is_on()
        with suppress(KeyError), fuse():
            raise KeyError
        assert is_on()
    assert not is_on()
    first, second = fuse(), fuse()
    first.close()
    first.close()
    assert is_on()
    second.close()
    assert not is_on()
    held = generator()
    next(held)
    with fuse():
        held.close()
        assert is_on()
    assert not is_on()
    with fuse():
        fuse()
    assert is_on()  # of the call that has no end
    with ExitStack() as stack:
        stack.enter_context(fuse())
        fuse.undo()
        assert not is_on()
    assert not is_on()


def test_undo_removes_a_pass_that_a_copy_of_the_settings_brought_back() -> None:
    fuse()
    with config.patch(joint_custom_post_pass=None):
        fuse.undo()
    fuse.undo()
    assert room._PASS not in passes_of(config)


def test_a_setting_of_each_thread_has_all_that_pytorch_may_call() -> None:
    """PyTorch 2.15 resets where 2.13 sets."""
    assert {name for name in dir(ContextVar) if name[0] != "_"} <= {*dir(room._InAllThreads), "name"}


def in_a_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_the_pass_is_in_all_threads() -> None:
    """Also in one that started before, and in one with a pass of its own."""
    fuse.undo()
    go, done, seen = threading.Semaphore(0), threading.Semaphore(0), []

    def early() -> None:
        config.joint_custom_post_pass = other
        for _ in range(2):
            done.release()
            go.acquire()
            seen.append(passes_of(config))

    thread = threading.Thread(target=early)
    thread.start()
    done.acquire()
    in_a_thread(fuse)
    go.release()
    done.acquire()
    assert room._PASS in passes_of(config)
    assert in_a_thread(lambda: Compiled(lambda x: Q(R(x), None).codes)(normal(4, M)) is not None)
    assert [each.reason for each in fuse.report()[-1:]] == [None]
    in_a_thread(fuse.undo)
    go.release()
    thread.join()
    assert seen == [[other, room._PASS], [other]]
    assert room._PASS not in passes_of(config)
    assert in_a_thread(lambda: passes_of(config)) in ([], [other])  # one setting for all, before PyTorch 2.12
    config.joint_custom_post_pass = None


def test_inductor_may_cache_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key has the uuid of the pass, or the pass itself, and nothing of it without the pass."""
    ours = room._PASS
    assert ours.uuid()
    assert ours.uuid() == ours.uuid()
    assert pickle.loads(pickle.dumps(ours)) is ours
    assert room._Both(ours).uuid() == (ours.uuid(), ours.uuid())
    assert room._Both(other).uuid() is None  # as that of a function, which Inductor does not cache with
    before = pickle.dumps(ours)
    monkeypatch.setattr(type(ours), "uuid", lambda _: b"another version")
    assert pickle.dumps(ours) != before


def test_a_release_without_such_passes_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "config", object())
    with pytest.raises(UsageError, match="joint_custom_post_pass, which hadagen"):
        fuse()
    fuse.undo()


def test_the_name_is_there() -> None:
    assert hadagen.fuse is fuse
    assert "fuse" in dir(hadagen)
