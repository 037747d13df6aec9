"""`torch.ops.hadagen`: what torch.compile, autograd and torch.func make of the transform, and of a rotation where
they make the same of both. No GPU needed."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_rotation import some_signs
from test_runtime import expected, normal, padded
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from hadagen import Rotation, hadamard_transform
from hadagen.errors import TensorError, UsageError
from hadagen.prologues import Gelu
from hadagen.runtime.call import compute
from hadagen.runtime.call.rules import INTO, LINEAR
from hadagen.runtime.operands.spec import text_of

SIZES = [8, 6]  # and one whose rows are zero-padded


def matrix(m: int) -> torch.Tensor:
    """Of the transform of rows of m elements: symmetric, the leading part of a Hadamard matrix."""
    return padded(torch.eye(m))


Function = Callable[[torch.Tensor], torch.Tensor]


def transform(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return hadamard_transform(x, 0.5, **options)


@dataclass(frozen=True)
class Map:
    """A call, and its matrix in float64."""

    call: Callable[..., torch.Tensor]
    matrix: torch.Tensor

    def normal(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """[*shape, n]"""
        return normal(*shape, len(self.matrix), dtype=dtype, seed=seed)


# Neither symmetric; with other signs on each side, so that a transposed rotation is told from the rotation.
R = Rotation(40, "dao", k=20, signs=some_signs(40), signs_after=some_signs(40, seed=1))
MAPS = {f"rows of {m}": Map(transform, matrix(m) * 0.5) for m in SIZES}
MAPS["rotation"] = Map(R, R.matrix())
of_each = pytest.mark.parametrize("of", MAPS.values(), ids=MAPS)


# ---- the rules of PyTorch --------------------------------------------------------------------------------------------
CHECKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.t(),
    "padded": lambda x: x[:, 1:7],
    "no rows": lambda x: x[:0],
    "one row": lambda x: x[0],
}


def transformed(x: torch.Tensor, scale: Any, text: str) -> Any:
    return LINEAR.default(x, None, None, None, scale, text)


def transformed_in_place(x: torch.Tensor, scale: Any, text: str) -> None:
    INTO.default([x], [torch.empty(0, device=x.device)], scale, f"{text} inplace")


@pytest.mark.parametrize(
    ("view", "dtype", "numerics", "requires_grad"),
    [
        *((name, torch.float64, "accurate", True) for name in CHECKED),
        ("dense", torch.float16, "fast", True),
        ("padded", torch.float64, "accurate", False),
        ("no rows", torch.bfloat16, "fast", False),
    ],
    ids=str,
)
def test_every_check_of_the_operator_that_transforms(
    view: str, dtype: torch.dtype, numerics: str, requires_grad: bool
) -> None:
    x = CHECKED[view](normal(4, 8, dtype=dtype).requires_grad_(requires_grad))
    # Gradients are compared between eager and compiled, not with the truth. Before PyTorch 2.7 there is no choice.
    tolerances: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2}
    if tolerances.keys() - inspect.signature(torch.library.opcheck).parameters.keys():
        tolerances = {}
    text = text_of(numerics=numerics)
    torch.library.opcheck(LINEAR.default, (x, None, None, None, 0.5, text), **tolerances)
    torch.library.opcheck(INTO.default, ([x.clone()], [x.new_empty(0)], 0.5, f"{text} inplace"), **tolerances)
    if not requires_grad:
        torch.library.opcheck(INTO.default, ([x.clone()], [x], 0.5, text), **tolerances)


@of_each
def test_autocast_leaves_the_type(of: Map) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float16, torch.float32, torch.float64):
            x = of.normal(3, dtype=dtype).requires_grad_()
            y = of.call(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert y.dtype == gradient.dtype == dtype


def test_transforms_of_fake_tensors_and_those_without_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 6)
        assert type(hadamard_transform(x)) is type(x)
        assert hadamard_transform(x, inplace=True) is x
    meta = torch.empty(4, 3, device="meta").t()
    y = hadamard_transform(meta)
    assert (y.shape, y.device, y.is_contiguous()) == (meta.shape, meta.device, True)
    assert hadamard_transform(meta, out=y) is y
    assert torch.equal(hadamard_transform(torch._efficientzerotensor((3, 8))), torch.zeros(3, 8))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((torch.ones(2, 8).long(), 1.0, "accurate"), TensorError, "x has the type int64"),
        ((torch.tensor(1.0), 1.0, "accurate"), TensorError, "x has no dimension"),
        ((torch.ones(2, 0), 1.0, "accurate"), TensorError, "the last dimension of x is 0"),
        ((torch.ones(2, 8), float("nan"), "accurate"), UsageError, "scale = nan is not finite"),
        ((torch.ones(2, 8), 1.0, "exact"), UsageError, "numerics 'exact' is not supported"),
    ],
)
def test_bad_input_is_the_same_sentence_everywhere(
    arguments: tuple[Any, ...], kind: type[Exception], message: str
) -> None:
    x, scale, numerics = arguments
    for call in (transformed, transformed_in_place):
        for tensor in (x, x.to("meta")):
            with pytest.raises(kind, match=message):
                call(tensor, scale, text_of(numerics=numerics))
    with pytest.raises(RuntimeError, match=message):  # PyTorch's own error, with ours in it
        compiled(lambda x: hadamard_transform(x, scale, numerics=numerics))(x)


@pytest.mark.parametrize("out", [torch.ones(2, 4), torch.ones(2, 8).half()])
def test_an_out_unlike_x_is_the_same_sentence_everywhere(out: torch.Tensor) -> None:
    x = torch.ones(2, 8)
    for where in ("cpu", "meta"):
        with pytest.raises(TensorError, match="pass an out like x"):
            INTO.default([out.to(where)], [x.to(where)], 1.0, "")


def test_a_scalar_must_be_real() -> None:
    for call in (transformed, transformed_in_place):
        with pytest.raises(TypeError, match="scale is a complex; pass a real number"):
            call(torch.ones(2, 8), 1j, "")
    assert torch.equal(transformed(torch.ones(2, 8), 2, ""), hadamard_transform(torch.ones(2, 8), 2.0))


@pytest.mark.parametrize(
    ("text", "signs"),
    [
        ("n=8", torch.zeros(1, dtype=torch.uint8)),
        ("n=8 signs", None),
        ("n=8 orders=4", None),
        ("before=gelu", None),
        ("inplace", None),
        ("n=8 to=mxfp4 group=32 rule=floor layout=row-major", None),
    ],
)
def test_a_spec_that_is_not_of_the_operator_is_refused(text: str, signs: torch.Tensor | None) -> None:
    with pytest.raises(TensorError, match="does not fit: linear takes a rotation that is not in place"):
        LINEAR.default(torch.ones(2, 8), None, signs, None, 1.0, text)


@pytest.mark.parametrize("text", ["n=8 n=4", "n", "signs=1", "n=x", "m=8", "numerics", "orders=4,x"])
def test_a_spec_that_nobody_wrote_is_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=r"spec '.*' has '.*', which is not known; call a function of hadagen"):
        transformed(torch.ones(2, 8), 1.0, text)
    with pytest.raises(TensorError, match="is in place, which only a rotation alone is"):
        INTO.default([torch.ones(2, 8)], [torch.ones(1)], 1.0, "inplace before=gelu")


@pytest.mark.filterwarnings("ignore")
@of_each
def test_a_trace_of_torch_jit_keeps_what_is_written(of: Map) -> None:
    for function in (
        lambda x: of.call(x * 1, inplace=True),
        lambda x: of.call(x, out=torch.empty_like(x)),
        lambda x: of.call(x * 1, inplace=True, before=Gelu()),
        lambda x: of.call(x, out=torch.empty_like(x), before=Gelu()),
    ):
        x = of.normal(3, seed=1)
        assert torch.equal(torch.jit.trace(function, of.normal(3), check_trace=False)(x), function(x))


# ---- derivatives -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: hadamard_transform(x, 0.3),
        lambda x: hadamard_transform(x * 1, 0.3, inplace=True),
        lambda x: hadamard_transform(x.t().contiguous().t() * 1, 0.3, inplace=True),
        lambda x: torch.ops.hadagen.hadamard_transform(x, 0.3, "accurate"),
    ],
    ids=["new", "in place", "in place, transposed", "operator"],
)
def test_derivatives_of_a_transform(function: Callable[[torch.Tensor], torch.Tensor], m: int) -> None:
    x = normal(3, m).requires_grad_()
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True, check_batched_grad=True)


def test_the_gradient_keeps_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = compute.check
    monkeypatch.setattr(compute, "check", lambda call: (seen.append(call.spec.numerics), real(call)))
    hadamard_transform(normal(3, 8).requires_grad_(), numerics="fast").sum().backward()
    assert seen == ["fast", "fast"]


@pytest.mark.parametrize("mode", ["new", "in place", "into"])
@of_each
def test_a_write_is_known_to_autograd(of: Map, mode: str) -> None:
    n = len(of.matrix)
    for x in (of.normal(3), normal(n, 3).t()):
        product = x * of.normal(3, seed=1).requires_grad_()
        with torch.no_grad():
            of.call(x, inplace=mode == "in place", out=x if mode == "into" else None)
        if mode == "new":
            product.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.chunk(2, -1)[0],
        lambda y: y.unbind()[0],
        torch.no_grad()(lambda y: y.view(8, 4)),
    ],
    ids=["chunk", "unbind", "no_grad"],
)
def test_a_view_that_autograd_cannot_follow_is_left_as_it_is(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(normal(4, 8).requires_grad_() * 1)
    before = x.detach().clone()
    with pytest.raises(TensorError, match="x is a view that autograd cannot follow"):
        hadamard_transform(x, inplace=True)
    assert torch.equal(x.detach(), before)


def test_out_refuses_a_tangent() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return hadamard_transform(x, out=torch.empty_like(x))

    x = torch.randn(3, 8)
    for call in (lambda: torch.func.jvp(function, (x,), (x,)), lambda: torch.func.jacfwd(function)(x)):
        with pytest.raises(TensorError, match="out= has no derivative"):
            call()
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(function(x)).tangent is None
        with pytest.raises(TensorError, match="x or out has a tangent"):
            function(forward_ad.make_dual(x, x))


class Watched(torch.Tensor):
    """A subclass that knows one operator, and wraps the tensor it is computed on."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Watched":
        made: Watched = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is LINEAR.default
        x, *options = args
        return Watched(function(x.inner, *options))


def test_nothing_else_is_asked_of_a_subclass() -> None:
    x = normal(3, 8)
    assert torch.equal(transformed(Watched(x), 0.5, "").inner, hadamard_transform(x, 0.5))


def test_a_trace_within_a_dual_level_has_nothing_else() -> None:
    with forward_ad.dual_level():
        traced = make_fx(lambda x: hadamard_transform(x * 2, 0.5))(normal(3, 8))
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert called == ["aten.mul.Tensor", "hadagen.linear.default"]


# ---- torch.func ------------------------------------------------------------------------------------------------------
def new(of: Map) -> Function:
    return of.call


def in_place(of: Map) -> Function:
    return lambda x: of.call(x * 1, inplace=True)


def written(of: Map) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        of.call(x, inplace=True)
        return x

    return function


@pytest.mark.parametrize("in_dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("way", [new, in_place, written])
@of_each
def test_a_batch_in_any_dimension(of: Map, way: Callable[[Map], Function], in_dim: int) -> None:
    n = len(of.matrix)
    x = of.normal(n, n)
    wanted = torch.stack([part @ of.matrix for part in x.unbind(in_dim)], in_dim)
    torch.testing.assert_close(torch.vmap(way(of), in_dim, in_dim)(x.clone()), wanted)


def test_batches_of_batches_and_none() -> None:
    x, out_of_place = normal(3, 5, 8), new(MAPS["rows of 8"])
    torch.testing.assert_close(torch.vmap(torch.vmap(out_of_place))(x), expected(x, 0.5))
    torch.testing.assert_close(torch.vmap(torch.vmap(out_of_place, 0), 1, 1)(x), expected(x, 0.5))
    both = torch.vmap(lambda x, y: out_of_place(x) + out_of_place(y), (0, None))(x, x[0])
    torch.testing.assert_close(both, expected(x, 0.5) + expected(x[0], 0.5))
    with pytest.raises(TensorError, match="no dimension"):
        torch.vmap(out_of_place)(x[0, 0])


@pytest.mark.parametrize("way", [new, in_place])
@of_each
def test_transforms_of_functions(of: Map, way: Callable[[Map], Function]) -> None:
    function, m = way(of), of.matrix
    x, other, close = of.normal(3), of.normal(3, seed=1), torch.testing.assert_close
    close(torch.func.grad(lambda x: (function(x) * other).sum())(x), other @ m.T)
    close(torch.func.jvp(function, (x,), (other,))[1], other @ m)
    close(torch.func.jacrev(function)(x[0]), m.T)
    close(torch.func.jacfwd(function)(x[0]), m.T)
    hessian = 6 * m * (x[0] @ m) @ m.T
    close(torch.func.hessian(lambda x: function(x).pow(3).sum())(x[0]), hessian)
    close(torch.func.jacrev(torch.func.grad(lambda x: function(x).pow(3).sum()))(x[0]), hessian)
    twice = torch.func.jvp(lambda x: torch.func.jvp(lambda x: function(x**3), (x,), (other,))[1], (x,), (other,))[1]
    close(twice, 6 * x * other**2 @ m)
    close(torch.vmap(torch.func.grad(lambda x: function(x).pow(3).sum()))(x), 3 * (x @ m) ** 2 @ m.T)


# ---- torch.compile ---------------------------------------------------------------------------------------------------
def compiled(function: Callable[..., torch.Tensor], backend: Any = "aot_eager", **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@of_each
def test_compile_once_for_all_row_counts(of: Map) -> None:
    """Of calls that write to what they are given, too."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = of.call(x * 2, numerics="fast") + 1
        of.call(first, inplace=True)
        of.call(x, inplace=True)
        return of.call(first, out=y) + first

    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(model, counter, dynamic=True)
    for rows in (2, 3, 50, 1000):
        ours, theirs = ((of.normal(rows), of.normal(rows)) for _ in range(2))
        torch.testing.assert_close(call(*ours), model(*theirs))
        torch.testing.assert_close(ours, theirs)
    assert counter.frame_count == 1


@pytest.mark.parametrize("inplace", [False, True])
@of_each
def test_compile_gradients(of: Map, inplace: bool) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return of.call(x * 2, inplace=inplace).square() + 1

    with torch._dynamo.config.patch(error_on_recompile=True):
        call = compiled(model, dynamic=True)
        for rows in (2, 3, 50):
            x = of.normal(rows).requires_grad_()
            y, wanted = call(x), model(x)
            torch.testing.assert_close(y, wanted)
            ours, theirs = (torch.autograd.grad(each.sum(), x) for each in (y, wanted))
            torch.testing.assert_close(ours, theirs)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole": lambda x: hadamard_transform(x, 0.5, inplace=True),
    "out": lambda x: hadamard_transform(x, 0.5, out=x),
    "a part": lambda x: hadamard_transform(x[:, 2:6], 0.5, inplace=True),
    "another shape": lambda x: hadamard_transform(x.view(6, 4), 0.5, inplace=True),
    "operator": lambda x: torch.ops.hadagen.hadamard_transform_(x, 0.5, "accurate"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_compile_gradients_of_a_written_argument(write: Callable[[torch.Tensor], Any]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        write(x)
        return x * torch.arange(8)

    x = normal(3, 8).requires_grad_()
    ours, theirs = (torch.autograd.grad(call(x * 1).sum(), x) for call in (compiled(model), model))
    torch.testing.assert_close(ours, theirs)


def dual(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


def jvp(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(function, (x,), (tangent,))[1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", [new, in_place])
@pytest.mark.parametrize("derivative", [dual, jvp])
@of_each
def test_compile_tangents(of: Map, derivative: Any, way: Callable[[Map], Function], backend: str) -> None:
    """Where something else has a tangent too, that of the call would be missed by nobody."""
    x, tangent = of.normal(3), of.normal(3, seed=1)
    function = way(of)
    call = compiled(lambda x, tangent: derivative(lambda y: function(y) + y.sin(), x, tangent), backend)
    torch.testing.assert_close(call(x, tangent), tangent @ of.matrix + tangent * x.cos())


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_autograd_of_an_eager_call(inplace: bool) -> None:
    torch.compiler.reset()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        hadamard_transform(x * 1, inplace=inplace).square().sum().backward()
    torch.testing.assert_close(x.grad, 16 * x.detach())


@pytest.mark.filterwarnings("ignore:rows of 1000 elements are padded")
def test_compile_once_where_the_scale_depends_on_the_shape() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(lambda x: hadamard_transform(x, x.shape[-1] ** -0.5), counter, dynamic=True)
    for n in (4, 64, 1000, 2048):
        x = torch.randn(3, n)
        torch.testing.assert_close(call(x), hadamard_transform(x, n**-0.5))
    assert counter.frame_count == 1


@of_each
def test_views_into_conjugates(of: Map) -> None:
    """They have a bit that says: negate what you read."""
    z = torch.randn(4, len(of.matrix), dtype=torch.complex64)
    wanted = (-z.imag.double() @ of.matrix).float()
    x, y = z.clone().conj().imag, z.clone().conj().imag
    assert x.is_neg()
    torch.testing.assert_close(of.call(x), wanted)
    of.call(x, out=y)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(of.call(x, inplace=True), wanted)
    torch.testing.assert_close(x, wanted)


def test_compile_with_out_that_is_x() -> None:
    call = compiled(lambda x: hadamard_transform(x, 0.5, out=x) + 1)
    x = normal(3, 8)
    wanted = expected(x, 0.5)
    torch.testing.assert_close(call(x), wanted + 1)
    torch.testing.assert_close(x, wanted)


def test_torch_fx_traces_a_call() -> None:
    traced = torch.fx.symbolic_trace(lambda x: hadamard_transform(x, 0.5, numerics="fast") + 1)
    x = normal(3, 8)
    assert torch.equal(traced(x), hadamard_transform(x, 0.5) + 1)
