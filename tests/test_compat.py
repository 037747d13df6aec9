"""Other projects' functions by their own names: arguments, defaults, results, aliasing, padding, gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from test_runtime import error, normal

from hadagen.compat import fast_hadamard_transform as fast
from hadagen.compat import hadacore
from hadagen.errors import TensorError, UsageError

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
        assert signature(getattr(fast, name)) == [("x", inspect.Parameter.empty), ("scale", 1.0)]
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
def test_the_reference(shape: tuple[int, ...]) -> None:
    x = normal(*shape).requires_grad_()
    y = fast.hadamard_transform_ref(x, 0.25)
    torch.testing.assert_close(y, x @ matrix(shape[-1]) / 4)
    torch.testing.assert_close(y, fast.hadamard_transform(x, 0.25))
    assert fast.hadamard_transform_ref(x.half()).dtype == torch.float16
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.ones(shape).double() @ matrix(shape[-1]) / 4)


BOTH = pytest.mark.parametrize("function", [fast.hadamard_transform, fast.hadamard_transform_ref])


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
        traced = torch.jit.trace(function, arguments)
        torch.testing.assert_close(traced(*arguments), function(*arguments))


@pytest.mark.filterwarnings("ignore")
def test_the_reference_in_a_script() -> None:
    x = normal(3, 8)
    torch.testing.assert_close(
        torch.jit.script(fast.hadamard_transform_ref)(x, 0.5), fast.hadamard_transform_ref(x, 0.5)
    )


@pytest.mark.parametrize("k", [12, 20, 28, 40])
def test_what_is_planned_says_so(k: int) -> None:
    with pytest.raises(
        NotImplementedError, match=rf"hadamard_transform_{k}N is not in hadagen yet \(planned: n = K·2\^m"
    ):
        getattr(fast, f"hadamard_transform_{k}N")(normal(2, 4 * k))


def call_both(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return fast.hadamard_transform(x, scale), fast.hadamard_transform_ref(x, scale), fast.hadamard_transform(x)


def call_all_of_hadacore(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return hadacore.hadamard_transform(x), hadacore.hadacore_transform(y), y


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(call_both, (normal(3, 8), torch.tensor(0.5))), (call_all_of_hadacore, (normal(3, 8), normal(3, 8)))],
)
def test_torch_fx_traces_calls(function: Callable[..., tuple[torch.Tensor, ...]], arguments: Any) -> None:
    """Whose scale may depend on a length that is not known then."""
    traced = torch.fx.symbolic_trace(function)
    ours = traced(*(x.clone() for x in arguments))
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
    "function", [fast.hadamard_transform, fast.hadamard_transform_ref, hadacore.hadamard_transform]
)
def test_compile_without_graph_break(function: Callable[..., torch.Tensor]) -> None:
    torch.compiler.reset()
    x = normal(3, 8)
    torch.testing.assert_close(
        torch.compile(lambda x: function(x) + 1, fullgraph=True, backend="aot_eager")(x), function(x) + 1
    )


@pytest.mark.parametrize(
    "function",
    [fast.hadamard_transform, fast.hadamard_transform_ref, hadacore.hadamard_transform, hadacore.hadacore_transform],
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
def test_bad_input(function: Callable[..., torch.Tensor], x: Any, kind: type[Exception]) -> None:
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
def test_on_a_gpu(m: int, dtype: torch.dtype) -> None:
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
