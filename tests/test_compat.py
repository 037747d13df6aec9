"""Other projects' functions by their own names: arguments, defaults, results, aliasing, padding, gradients."""

import inspect
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from test_runtime import error, normal

from hadagen.compat import fast_hadamard_transform as fast
from hadagen.compat import hadacore, quarot, sglang
from hadagen.errors import TensorError, UsageError
from hadagen.problem.matrices import find_matrix

# Largest relative error where few elements are compared: one rounding costs at most 2^-11 (float16) or 2^-8 (bfloat16).
BOUNDS = {torch.float16: 4.9e-4, torch.bfloat16: 3.9e-3, torch.float32: 3e-7, torch.float64: 1e-15}
DTYPES = tuple(BOUNDS)


def matrix(m: int) -> torch.Tensor:
    """The first m rows and columns of H, in float64: what is left of it where x is padded and the result is cut."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(m)] for i in range(m)], dtype=torch.float64)


def signature(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_names_and_arguments() -> None:
    for name in fast.__all__:
        more = [("exact", False)] if name.endswith("N") else []
        assert signature(getattr(fast, name)) == [("x", inspect.Parameter.empty), ("scale", 1.0), *more]
    assert signature(hadacore.hadamard_transform) == [("x", inspect.Parameter.empty), ("inplace", False)]
    assert signature(hadacore.hadacore_transform) == [("x", inspect.Parameter.empty), ("inplace", True)]


# ---- fast_hadamard_transform -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 12, 137, 256])
def test_rows_of_any_length(m: int, dtype: torch.dtype) -> None:
    x = normal(2, 5, m, dtype=dtype).requires_grad_()
    before = x.detach().clone()
    y = fast.hadamard_transform(x, 0.5)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert error(y.detach(), x.detach().double() @ matrix(m) / 2) <= BOUNDS[dtype]
    assert torch.equal(x, before)
    weight = normal(2, 5, m, dtype=dtype)
    (gradient,) = torch.autograd.grad(y, x, weight)
    assert error(gradient, weight.double() @ matrix(m) / 2) <= BOUNDS[dtype]


def test_the_scale_is_one_by_default_and_may_be_a_tensor() -> None:
    x = normal(3, 8)
    assert torch.equal(fast.hadamard_transform(x), fast.hadamard_transform(x, scale=1))
    scale = 1.0 / torch.tensor(8).sqrt()
    assert torch.equal(fast.hadamard_transform(x, scale), fast.hadamard_transform(x, float(scale)))
    torch.testing.assert_close(fast.hadamard_transform_ref(x, scale), fast.hadamard_transform_ref(x, float(scale)))


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 13), (2, 3, 64)])
@pytest.mark.filterwarnings("ignore:rows of .* elements are padded")
def test_the_reference(shape: tuple[int, ...]) -> None:
    x = normal(*shape).requires_grad_()
    y = fast.hadamard_transform_ref(x, 0.25)
    torch.testing.assert_close(y, x @ matrix(shape[-1]) / 4)
    torch.testing.assert_close(y, fast.hadamard_transform(x, 0.25))
    assert fast.hadamard_transform_ref(x.half()).dtype == torch.float16
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.ones(shape).double() @ matrix(shape[-1]) / 4)


BOTH = pytest.mark.parametrize(
    "function", [fast.hadamard_transform, fast.hadamard_transform_ref, fast.hadamard_transform_20N]
)


@BOTH
@pytest.mark.parametrize(
    ("scale", "kind", "said"),
    [
        (torch.tensor(1j), TypeError, r"scale is a complex64 tensor of shape \(\); pass a real number, or"),
        (torch.ones(2), TypeError, r"scale is a float32 tensor of shape \(2,\); pass a real number, or"),
        (torch.ones(0), TypeError, r"scale is a float32 tensor of shape \(0,\); pass a real number, or"),
        (torch.ones((), device="meta"), TypeError, "scale is on the meta device, where it has no value; pass a number"),
        (1j, TypeError, "scale is a complex; pass a real number"),
        (np.complex64(1j), TypeError, "scale is a complex64; pass a real number"),
        ("1", TypeError, "scale is a str; pass a real number"),
        (float("inf"), UsageError, "scale = inf is not finite in float64"),
        (torch.tensor(float("nan")), UsageError, "scale = nan is not finite in float64"),
    ],
    ids=str,
)
def test_a_bad_scale(function: Callable[..., torch.Tensor], scale: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        function(normal(3, 8), scale)
    with pytest.raises(TypeError, match=r"x is a list; pass a torch\.Tensor"):
        function([1.0], scale)


@BOTH
@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_tensor_as_scale_is_a_number(function: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    x, scale = normal(8).half(), torch.full(shape, 0.5, dtype=torch.float64, requires_grad=True)
    y = function(x, scale)
    assert torch.equal(y, function(x, 0.5))
    assert (y.dtype, y.shape, y.requires_grad) == (torch.float16, x.shape, False)


@BOTH
@pytest.mark.filterwarnings("ignore")
def test_traces_take_a_scale_of_either_kind(function: Callable[..., torch.Tensor]) -> None:
    x, scale = normal(3, 8), torch.tensor(0.5, dtype=torch.float64)
    for arguments in ((x,), (x, scale)):
        torch.testing.assert_close(torch.jit.trace(function, arguments)(*arguments), function(*arguments))


@pytest.mark.filterwarnings("ignore")
def test_the_reference_in_a_script() -> None:
    x = normal(3, 8)
    torch.testing.assert_close(
        torch.jit.script(fast.hadamard_transform_ref)(x, 0.5), fast.hadamard_transform_ref(x, 0.5)
    )


# ---- rows of K times a power of two ----------------------------------------------------------------------------------
ORDERS = {k: getattr(fast, f"hadamard_transform_{k}N") for k in (12, 20, 28, 40)}


def of_order(name: str, k: int, n: int) -> torch.Tensor:
    """(H_K ⊗ H)ᵀ in float64."""
    entries = torch.frombuffer(bytearray(find_matrix(name, k).entries()), dtype=torch.int8).view(k, k)
    return torch.kron(entries.double() * 2 - 1, matrix(n // k)).T


@pytest.mark.parametrize("k", ORDERS)
def test_rows_are_padded_as_by_the_original(k: int) -> None:
    padded = {1: 4, k: 4, 2 * k: 4, 3 * k + 1: 4, 4 * k: 4, 4 * k + 1: 8, 5 * k: 8, 8 * k: 8, 9 * k: 16}
    for m, power in padded.items():
        x = normal(2, 3, m).requires_grad_()
        wanted = of_order("dao", k, power * k)[:m, :m] / 2
        y = ORDERS[k](x, 0.5)
        torch.testing.assert_close(y, x @ wanted)
        assert y.is_contiguous()
        upstream = normal(2, 3, m, seed=1)
        torch.testing.assert_close(torch.autograd.grad(y, x, upstream)[0], upstream @ wanted.T)
    assert torch.autograd.gradgradcheck(ORDERS[k], normal(1, 2 * k).requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", ORDERS)
def test_results_of_an_order_round_once(k: int, dtype: torch.dtype) -> None:
    x = normal(5, 8 * k, dtype=dtype)
    y = ORDERS[k](x, torch.tensor((8 * k) ** -0.5, dtype=torch.float64))
    wanted = x.double() @ of_order("dao", k, 8 * k) * (8 * k) ** -0.5
    assert error(y, wanted) <= BOUNDS[dtype]
    assert y.dtype == dtype


@pytest.mark.parametrize("k", ORDERS)
def test_exact_rows_are_not_padded(k: int) -> None:
    for power in (1, 2, 4, 2048):
        x = normal(2, power * k)
        y = ORDERS[k](x, (power * k) ** -0.5, exact=True)
        torch.testing.assert_close(y.norm(), x.norm())  # nothing is cut off
        if power < 8:
            torch.testing.assert_close(y, x @ of_order("dao", k, power * k) * (power * k) ** -0.5)
    for m in (k - 1, 3 * k):
        with pytest.raises(TensorError, match=f"is {m}; with exact=True it must be {k} times a power of two"):
            ORDERS[k](torch.ones(m), exact=True)
    with pytest.raises(TensorError, match=f"it may be at most {k * 1024}, or pass exact=True"):
        ORDERS[k](torch.ones(k * 1024 + 1))
    assert ORDERS[k](torch.ones(k * 1024)).shape == (k * 1024,)
    with pytest.raises(TypeError, match="exact is 3; pass True or False"):
        ORDERS[k](torch.ones(k), exact=3)


# ---- QuaRot and SpinQuant --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 64, 12, 80, 112, 176, 344, 496])
def test_quarot_multiplies_by_its_matrices(n: int) -> None:
    given_k, k = quarot.get_hadK(n)
    wanted = of_order("quarot", k, n) if k > 1 else matrix(n)
    wanted = wanted * n**-0.5
    x = normal(2, 3, n).requires_grad_()
    upstream = normal(2, 3, n, seed=1)
    forward = (quarot.matmul_hadU, lambda x: quarot.matmul_hadU_cuda(x, given_k, k))
    backward = (
        quarot.matmul_hadUt,
        lambda x: quarot.matmul_hadUt_cuda(x, given_k, k),
        lambda x: quarot.matmul_hadU_cuda(x, quarot.get_hadK(n, transpose=True)[0], k),
        lambda x: quarot.matmul_hadU(x, transpose=True),
    )
    for calls, m in ((forward, wanted), (backward, wanted.T)):
        for call in calls:
            y = call(x)
            torch.testing.assert_close(y, x @ m)
            torch.testing.assert_close(torch.autograd.grad(y, x, upstream)[0], upstream @ m.T)
    if given_k is not None:
        assert given_k.dtype == torch.float32
        assert torch.equal(getattr(quarot, f"get_had{k}")(), given_k)
    half = normal(3, n, dtype=torch.float16)
    assert error(quarot.matmul_hadU(half), half.double() @ wanted) <= BOUNDS[torch.float16]


def test_quarot_takes_any_matrix() -> None:
    a = torch.linalg.qr(normal(7, 7)).Q
    x = normal(2, 28)
    torch.testing.assert_close(quarot.matmul_hadU_cuda(x, a, 7), x @ torch.kron(a.contiguous(), matrix(4)).T * 28**-0.5)


def test_matrices_of_quarot() -> None:
    torch.manual_seed(3)
    ours = quarot.random_hadamard_matrix(24, "cpu")
    torch.manual_seed(3)
    signs = torch.randint(low=0, high=2, size=(24,)).double() * 2 - 1  # its own draw
    torch.testing.assert_close(ours, signs[:, None] * of_order("quarot", 12, 24) * 24**-0.5)
    torch.testing.assert_close(quarot.hadamard_matrix(8, "cpu"), (matrix(8) * 8**-0.5).float())
    assert torch.equal(quarot.HadamardTransform.apply(torch.eye(8)), matrix(8).float())
    assert [quarot.is_pow2(n) for n in (0, 1, 2, 3, 12, 64)] == [False, True, True, False, False, True]


@pytest.mark.parametrize(
    ("options", "rotation"),
    [
        ({}, of_order("quarot", 12, 24) * 24**-0.5),
        ({"R2": normal(8, 8)}, of_order("quarot", 12, 24) * 24**-0.5),
        ({"had_dim": np.int64(8)}, torch.block_diag(*[matrix(8) * 8**-0.5] * 3)),
        ({"had_dim": 8, "R2": normal(8, 8).requires_grad_()}, torch.block_diag(*[normal(8, 8)] * 3)),
    ],
    ids=str,
)
def test_folding_into_a_layer_as_quarot_does(options: dict[str, Any], rotation: torch.Tensor) -> None:
    layer = torch.nn.Linear(24, 24).double()
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    quarot.apply_exact_had_to_linear(layer, **options)
    torch.testing.assert_close(layer.weight.detach(), weight @ rotation)
    layer.weight.data = weight
    quarot.apply_exact_had_to_linear(layer, output=True, **options)
    torch.testing.assert_close(layer.weight.detach(), rotation.T @ weight)
    assert torch.equal(layer.bias, bias)
    assert layer.weight.is_contiguous()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: quarot.get_hadK(37),
            UsageError,
            r"matrix = 'quarot' has no matrices for 37 = 37 · 2\^0 elements; pad it to",
        ),
        (lambda: quarot.get_hadK(0), UsageError, "n = 0 is not possible"),
        (lambda: quarot.matmul_hadU(torch.ones(37)), UsageError, "matrix = 'quarot' has no matrices"),
        (lambda: quarot.matmul_hadU([1.0]), TypeError, "X is a list"),
        (lambda: quarot.matmul_hadU(torch.ones(12).long()), TensorError, "x has the type int64"),
        (lambda: quarot.matmul_hadU(torch.tensor(1.0)), TensorError, "x has no dimension"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(24), None, 12), UsageError, "hadK is None but K = 12"),
        (
            lambda: quarot.matmul_hadU_cuda(torch.ones(24), torch.ones(3, 3), 12),
            TensorError,
            r"hadK has the shape \(3, 3\); it",
        ),
        (lambda: quarot.matmul_hadU_cuda([1.0], torch.ones(3, 3), 3), TypeError, "X is a list; pass a torch.Tensor"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(24), [[1.0]], 12), TypeError, "hadK is a list; pass"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(24), torch.ones(144), 12), TensorError, r"hadK has the .*\(144,\)"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(3), torch.eye(3).cfloat(), 3), TensorError, "strided complex64"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(3), torch.eye(3).to_sparse(), 3), TensorError, "sparse_coo float"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(3), torch.eye(3).to("meta"), 3), TensorError, "tensor on meta; "),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(3), torch.eye(3), 3.0), UsageError, "K = 3.0 is not possible"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(3), torch.eye(3), None), UsageError, "K = None is not possible"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(3), torch.eye(3), 0), UsageError, "K = 0 is not possible"),
        (
            lambda: quarot.apply_exact_had_to_linear(torch.nn.Linear(8, 8), "8"),
            UsageError,
            "had_dim = '8' is not a power",
        ),
        (
            lambda: quarot.apply_exact_had_to_linear(torch.nn.Linear(8, 8), 4.0),
            UsageError,
            "had_dim = 4.0 is not a power",
        ),
        (lambda: quarot.apply_exact_had_to_linear(torch.nn.Linear(8, 8), 4, R2=[1]), TypeError, "R2 is a list"),
        (
            lambda: quarot.apply_exact_had_to_linear(torch.nn.Linear(8, 8), 4, R2=torch.eye(8)),
            TensorError,
            r"R2 has the shape \(8, 8\); it must be \(4, 4\)",
        ),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(24), torch.ones(5, 5), 5), TensorError, "n = 24 is not 5 times"),
        (lambda: quarot.matmul_hadU_cuda(torch.ones(36), torch.ones(12, 12), 12), TensorError, "n = 36 is not 12 tim"),
        (lambda: quarot.apply_exact_had_to_linear(None), TypeError, "module is a NoneType"),
        (lambda: quarot.apply_exact_had_to_linear(torch.nn.Linear(8, 8), 3), UsageError, "had_dim = 3 is not a power"),
        (
            lambda: quarot.apply_exact_had_to_linear(torch.nn.Linear(8, 8), 16),
            UsageError,
            "had_dim = 16 is not a power",
        ),
        (lambda: quarot.get_had92, AttributeError, "has no attribute 'get_had92'"),
        (lambda: quarot.get_had, AttributeError, "has no attribute 'get_had'"),
        (lambda: quarot.something, AttributeError, "has no attribute 'something'"),
    ],
)
def test_bad_calls_of_quarot_are_one_sentence(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


# ---- SGLang ----------------------------------------------------------------------------------------------------------
def test_names_of_sglang() -> None:
    for k, function in ORDERS.items():
        assert getattr(sglang, f"hadamard_transform_{k}n") is function
    assert sglang.hadamard_transform is fast.hadamard_transform
    x, first, second = normal(3, 16), normal(16).sign(), normal(16, seed=1).sign()
    y = sglang.hadamard_transform_with_signs(x, first.float(), second, 0.25)
    torch.testing.assert_close(y, (x * first) @ matrix(16) * second / 4)
    assert sglang.hadamard_transform_with_signs(x.half(), first.float(), second.char()).dtype == torch.float16
    for out in (torch.empty(16, 3, dtype=x.dtype).t(), x):
        assert sglang.hadamard_transform_with_signs(x, first, second, 0.25, out=out) is out
        assert torch.equal(out, y)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"x": [1.0]}, TypeError, "x is a list"),
        ({"x": torch.ones(2, 8).long()}, TensorError, "x has the type int64"),
        ({"x": torch.tensor(1.0)}, TensorError, "x has no dimension"),
        ({"signs1": [1.0] * 8}, TypeError, "signs1 is a list"),
        ({"signs1": torch.ones(1)}, TensorError, r"signs1 has the shape \(1,\); it must be \(8,\)"),
        ({"signs2": torch.ones(2, 8)}, TensorError, r"signs2 has the shape \(2, 8\); it must be \(8,\)"),
        ({"signs2": torch.ones(8).cfloat()}, TensorError, "signs2 is a strided complex64 tensor; pass a dense tensor"),
        ({"signs2": torch.ones(8).to_sparse()}, TensorError, "signs2 is a sparse_coo float32 tensor"),
        (
            {"signs2": torch.ones(8, device="meta")},
            TensorError,
            "signs2 is on meta but x on cpu; a tensor on meta has no values; put",
        ),
        ({"out": 3}, TypeError, "out is a int"),
        ({"out": torch.ones(8)}, TensorError, "out has the shape"),
        ({"out": torch.ones(1, 8).expand(2, 8)}, TensorError, "share memory"),
    ],
)
def test_bad_calls_of_sglang_are_one_sentence(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.ones(2, 8), "signs1": torch.ones(8), "signs2": torch.ones(8)}
    with pytest.raises(kind, match=message):
        sglang.hadamard_transform_with_signs(**arguments | changes)


def call_both(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return fast.hadamard_transform(x, scale), fast.hadamard_transform_ref(x, scale), fast.hadamard_transform(x)


def call_all_of_hadacore(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return hadacore.hadamard_transform(x), hadacore.hadacore_transform(y), y


def call_others(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rotated = quarot.matmul_hadU_cuda(quarot.matmul_hadU(x), *quarot.get_hadK(24))
    signed = sglang.hadamard_transform_with_signs(x, torch.ones(24), -torch.ones(24))
    return fast.hadamard_transform_12N(x, 0.5, exact=True), rotated, signed


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (call_both, (normal(3, 8), torch.tensor(0.5))),
        (call_all_of_hadacore, (normal(3, 8), normal(3, 8))),
        (call_others, (normal(3, 24),)),
    ],
)
def test_torch_fx_traces_calls(function: Callable[..., tuple[torch.Tensor, ...]], arguments: Any) -> None:
    """Whose scale may depend on a length that is not known then."""
    ours = torch.fx.symbolic_trace(function)(*(x.clone() for x in arguments))
    torch.testing.assert_close(ours, function(*arguments))


@BOTH
@pytest.mark.parametrize("scale", [np.float32(0.5), np.array(0.5), Decimal("0.5")], ids=repr)
def test_what_float_makes_a_number_of_is_a_scale(function: Callable[..., torch.Tensor], scale: Any) -> None:
    assert torch.equal(function(normal(3, 8), scale), function(normal(3, 8), 0.5))


# ---- HadaCore --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (1, 128), (42, 64), (3, 7, 2), (5, 256)])
def test_orthonormal_and_in_place_or_not(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*shape, dtype=dtype)
    before = x.clone()
    y = hadacore.hadamard_transform(x)
    assert y.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)
    assert error(y, x.double() @ matrix(shape[-1]) * shape[-1] ** -0.5) <= BOUNDS[dtype]
    assert torch.equal(hadacore.hadacore_transform(x, inplace=False), y)
    assert torch.equal(x, before)
    for call in (hadacore.hadacore_transform, lambda x: hadacore.hadamard_transform(x, inplace=True)):
        z = before.clone()
        assert call(z) is z
        assert torch.equal(z, y)


def test_heads_of_a_row_in_place() -> None:
    x = normal(6, 4 * 32)
    wanted = hadacore.hadamard_transform(x.view(6, 4, 32))
    assert torch.equal(hadacore.hadacore_transform(x.unflatten(-1, (-1, 32))), wanted)
    assert torch.equal(x, wanted.flatten(1)), "the view was transformed, but not its rows"
    whole = normal(6, 64)
    wanted = hadacore.hadamard_transform(whole[:, :32].contiguous())
    hadacore.hadacore_transform(whole[:, :32])
    assert torch.equal(whole[:, :32], wanted)
    assert torch.equal(whole[:, 32:], normal(6, 64)[:, 32:])


@pytest.mark.parametrize(
    "function",
    [
        fast.hadamard_transform,
        fast.hadamard_transform_ref,
        fast.hadamard_transform_28N,
        hadacore.hadamard_transform,
        quarot.matmul_hadU,
        lambda x: quarot.matmul_hadU_cuda(x, torch.eye(4), 4),
        lambda x: sglang.hadamard_transform_with_signs(x, torch.ones(8), -torch.ones(8)),
    ],
)
def test_compile_without_graph_break(function: Callable[..., torch.Tensor]) -> None:
    torch.compiler.reset()
    x = normal(3, 8)
    torch.testing.assert_close(
        torch.compile(lambda x: function(x) + 1, fullgraph=True, backend="aot_eager")(x), function(x) + 1
    )


@pytest.mark.parametrize(
    "function",
    [
        fast.hadamard_transform,
        fast.hadamard_transform_ref,
        fast.hadamard_transform_40N,
        hadacore.hadamard_transform,
        hadacore.hadacore_transform,
        quarot.matmul_hadU,
    ],
)
@pytest.mark.parametrize(
    ("x", "kind"),
    [
        ([1.0], TypeError),
        (torch.ones(2, 8).long(), RuntimeError),
        (torch.tensor(1.0), RuntimeError),
        (torch.ones(2, 0), ValueError),
    ],
    ids=["list", "int64", "no dimension", "empty rows"],
)
def test_bad_input_of_functions_of_other_projects_is_a_sentence(
    function: Callable[..., torch.Tensor], x: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"; |must have"):
        function(x)


def test_hadacore_has_no_padding() -> None:
    x = torch.ones(2, 12)
    with pytest.raises(TensorError, match="the last dimension of x is 12; it must be a power of two"):
        hadacore.hadacore_transform(x)
    assert torch.equal(x, torch.ones(2, 12))


# ---- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 64, 137, 4096])
def test_functions_of_other_projects_on_a_gpu(m: int, dtype: torch.dtype) -> None:
    x = normal(5, 3, m, dtype=dtype).cuda().requires_grad_()
    y = fast.hadamard_transform(x, m**-0.5)
    wanted = fast.hadamard_transform_ref(x.detach().cpu().double(), m**-0.5)
    assert error(y.detach().cpu(), wanted) <= BOUNDS[dtype]
    (gradient,) = torch.autograd.grad(y, x, x.detach())
    assert error(gradient.cpu(), wanted) <= BOUNDS[dtype]
    if m & (m - 1) == 0:
        z = x.detach().clone()
        assert hadacore.hadacore_transform(z).data_ptr() == z.data_ptr()
        assert error(z.cpu(), wanted) <= BOUNDS[dtype]
