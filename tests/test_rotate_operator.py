"""`torch.ops.hadagen.linear`: what torch.compile, autograd and torch.func make of a rotation. No GPU needed."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rotation import NAMED, linear_of, some_signs
from test_runtime import normal
from test_runtime_operator import R, compiled

from hadagen import Rotation
from hadagen.errors import TensorError
from hadagen.runtime.call.named import OPERAND, named_matrix, named_on, stored_matrix
from hadagen.runtime.call.rules import INTO, LINEAR, Linear
from hadagen.runtime.operands.packed import pack_pair, pack_signs, present
from hadagen.runtime.rotation import factors_of

SIGNS = {"signs": some_signs(40), "signs_after": some_signs(40, seed=1)}
REGULAR = Rotation(64, "regular", block=16, signs=some_signs(16))
NOTHING = {"matrices": None, "orders": (), "signs": None, "signs_after": None}


def asked(rotation: Rotation = R, transposed: bool = False, **changes: Any) -> Linear:
    """What the operator gets after x."""
    own = factors_of(rotation, torch.empty(rotation.n))
    if rotation is R:  # its matrix has the signs
        signs, signs_after = map(pack_signs, (R.signs, R.signs_after))
        own = own._replace(matrices=named_on("dao", (20,), 40, "cpu"), signs=signs, signs_after=signs_after)
    return linear_of(own._replace(**changes), transposed)


def rotated_in_place(x: torch.Tensor, of: Linear) -> None:
    read = present(of.matrices, of.signs, of.signs_after)
    INTO.default([x], read or [x.new_empty(0)], of.scale, f"{of.text} inplace")


# ---- the rules of PyTorch --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rotation", "view", "dtype", "transposed", "requires_grad"),
    [
        (R, lambda x: x, torch.float64, False, True),
        (R, lambda x: x.t().contiguous().t(), torch.float64, True, True),
        (R, lambda x: x[:0], torch.bfloat16, False, False),
        (R, lambda x: x[0], torch.float64, False, True),
        (R, lambda x: x, torch.float16, True, False),
        (REGULAR, lambda x: x, torch.float64, False, True),
        (Rotation(64), lambda x: x, torch.float64, False, True),
    ],
)
def test_every_check_of_the_operator_that_rotates(
    rotation: Rotation, view: Any, dtype: torch.dtype, transposed: bool, requires_grad: bool
) -> None:
    x = view(normal(4, rotation.n, dtype=dtype)).requires_grad_(requires_grad)
    of = asked(rotation, transposed)
    read = present(of.matrices, of.signs, of.signs_after)
    tolerances: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2}  # between eager and compiled, not with the truth
    if tolerances.keys() - inspect.signature(torch.library.opcheck).parameters.keys():
        tolerances = {}
    torch.library.opcheck(LINEAR.default, (x, *of), **tolerances)
    in_place = f"{of.text} inplace"
    torch.library.opcheck(INTO.default, ([x.clone()], read or [x.new_empty(0)], of.scale, in_place), **tolerances)
    if not requires_grad:
        torch.library.opcheck(INTO.default, ([x.clone()], [x, *read], of.scale, of.text), **tolerances)


def test_rotations_of_fake_tensors_and_those_without_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 40)
        assert type(R(x)) is type(x)
    meta = Rotation(40, "dao", k=20).to("meta")
    x = torch.empty(40, 3, device="meta").t()
    y = meta(x)
    assert (y.shape, y.device, y.is_contiguous()) == (x.shape, x.device, True)
    assert meta(x, out=y) is y
    assert meta(x, inplace=True) is x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 48}, "the last dimension of x is 40; it must be a multiple of 48"),
        ({"n": 20, "matrices": torch.ones(64), "orders": [8]}, "n = 20 is not 8 times a power of two"),
        ({"matrices": torch.ones(0), "orders": [0]}, "n = 40 is not 0 times a power of two"),
        ({"matrices": torch.ones(40)}, r"matrices has the shape \(40,\); matrices of the orders \[40\] have \(1600,\)"),
        (
            {"matrices": torch.ones(404, dtype=torch.uint8), "orders": [2, 20]},
            r"matrices is uint8 of the shape \(404,\), but no packed matrices of the orders \[2, 20\] for n = 40 are",
        ),
        (
            {"matrices": pack_pair(torch.eye(2), torch.eye(32)), "orders": [2, 32]},
            r"but no packed matrices of the orders \[2, 32\] for n = 40 are",
        ),
        (
            {"matrices": torch.ones(1600, device="meta")},
            "the matrix of the rotation is on meta but x on cpu; a tensor on meta has no values; put",
        ),
        ({"signs": SIGNS["signs"]}, r"signs is int64 of the shape \(40,\); it must be uint8 of \(5,\)"),
        ({"signs_after": torch.ones(20).byte()}, r"signs_after is uint8 of the shape \(20,\); it must be uint8 of"),
        (
            {"signs": torch.ones(5, dtype=torch.uint8, device="meta")},
            "the vector signs of the rotation is on meta but x on cpu; a tensor on meta has no values; put",
        ),
        ({"swapped": True}, "n = 40 must be a power of 4 without matrices"),
        ({"swapped": True, **NOTHING, "n": 8}, "n = 8 must be a power of 4 without matrices"),
        ({"scale": float("inf")}, "scale = inf is not finite"),
    ],
    ids=str,
)
def test_bad_operands_are_the_same_sentence_everywhere(changes: dict[str, Any], message: str) -> None:
    of = asked(**changes)
    for call in (lambda x, of: LINEAR.default(x, *of), rotated_in_place):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(2, 40), of)
    if "meta" not in str(of):  # and where no memory is read
        on_meta = torch.utils._pytree.tree_map(lambda o: o.to("meta") if isinstance(o, torch.Tensor) else o, of)
        with pytest.raises(ValueError, match=message):
            LINEAR.default(torch.ones(2, 40, device="meta"), *on_meta)


def test_a_named_matrix_is_a_tensor_of_its_own() -> None:
    for n in (12, 12 * 128):  # whose kernels take orders of 12 and 48
        torch.library.opcheck(OPERAND, (None, None, None, "dao", [12], n, "", "cpu"))
        named_matrix("dao", [12], n, "cpu").zero_()
        r = Rotation(n, "dao")
        assert torch.equal(named_matrix("dao", [12], n, "cpu"), factors_of(r, torch.empty(n)).matrices)
    torch.library.opcheck(OPERAND, (None, None, None, "regular", [1], 64, "", "cpu"))
    torch.library.opcheck(OPERAND, (None, None, None, "auto", [76, 36], 10944, "", "cpu"))


@pytest.mark.parametrize(
    "rotation",
    [
        Rotation(56, torch.linalg.qr(normal(7, 7)).Q),
        Rotation(56, [torch.eye(7).float() * 0.5, torch.ones(2, 2)]),
        Rotation(24, torch.eye(3), signs=some_signs(24)),
        Rotation(128, [torch.eye(4) * 3, torch.linalg.qr(normal(32, 32)).Q], signs=some_signs(128)),
        Rotation(12, torch.eye(12), signs=some_signs(12), signs_after=some_signs(12, seed=1)),
        R,
    ],
    ids=repr,
)
def test_a_stored_matrix_is_a_tensor_of_its_own(rotation: Rotation) -> None:
    of = factors_of(rotation, torch.empty(rotation.n))
    signs = (None, None) if of.signs is not None else (rotation.packed_signs, rotation.packed_signs_after)
    arguments = rotation.packed_matrices, *signs, rotation.name, list(rotation.k), rotation.block, rotation._scale
    torch.library.opcheck(OPERAND, (*arguments, ""))
    assert torch.equal(stored_matrix(*arguments), of.matrices)


def test_compiled_bad_input_is_the_sentence_too() -> None:
    for x, message in ((torch.ones(2, 48), "this rotation takes 40"), (torch.ones(40).long(), "x has the type int64")):
        with pytest.raises(RuntimeError, match=message):
            compiled(lambda x: R(x))(x)


# ---- derivatives -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "order"), NAMED)
def test_gradients_of_every_named_matrix(name: str, order: int) -> None:
    r = Rotation(2 * order, name, k=order)
    x = normal(2, 2 * order).requires_grad_()
    assert torch.autograd.gradcheck(r, x, check_forward_ad=True, fast_mode=True)
    upstream = normal(2, 2 * order, seed=1)
    (gradient,) = torch.autograd.grad(r(x), x, upstream)
    assert torch.equal(gradient, r.inverse(upstream))


@pytest.mark.parametrize(
    "function",
    [
        R,
        R.inverse,
        lambda x: R(x * 1, inplace=True),
        lambda x: R(x.t().contiguous().t() * 1, inplace=True),
        Rotation(40, torch.linalg.qr(normal(5, 5)).Q, **SIGNS),
        Rotation(40, block=20, signs=some_signs(20)),
        lambda x: REGULAR(torch.nn.functional.pad(x, (0, 24))),
    ],
    ids=["new", "inverse", "in place", "in place, transposed", "given", "blocks", "regular"],
)
def test_derivatives_of_a_rotation(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = normal(1, 40).requires_grad_()
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True, fast_mode=True)
    jacobian = torch.autograd.functional.jacobian(function, x[0].detach())
    twice = torch.autograd.functional.hessian(lambda x: function(x).square().sum() / 2, x[0].detach())
    torch.testing.assert_close(twice, jacobian.T @ jacobian)


def test_what_has_no_derivative_is_refused() -> None:
    x = normal(2, 40).requires_grad_()
    with pytest.raises(TensorError, match="out= has no derivative"):
        R(x, out=torch.empty(2, 40, dtype=torch.float64))
    with pytest.raises(TensorError, match="x is a leaf"):
        R(x, inplace=True)


# ---- torch.func ------------------------------------------------------------------------------------------------------
def test_a_batch_of_operands_is_refused() -> None:
    x = normal(40)
    for change in ("signs", "matrices"):
        whole: Any = asked()._asdict()[change]
        batch = whole.expand(3, *whole.shape)

        def call(part: Any, change: str = change) -> Any:
            return LINEAR.default(x, *asked()._replace(**{change: part}))

        with pytest.raises(TensorError, match="has a batch dimension of vmap; only x may have one"):
            torch.vmap(call)(batch)


# ---- torch.compile ---------------------------------------------------------------------------------------------------
def test_torch_fx_traces_a_module() -> None:
    model = torch.nn.Sequential(Rotation(40, "dao", k=20, **SIGNS), torch.nn.ReLU())
    x = normal(3, 40)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [False, True])
def test_torch_jit_traces_a_module(given: bool) -> None:
    rotation = Rotation(40, torch.linalg.qr(normal(20, 20)).Q) if given else Rotation(40, "dao", k=20, **SIGNS)
    assert all(hasattr(rotation, name) for name in dir(rotation) if name != "__abstractmethods__")
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), rotation).double()
    x = normal(7, 40)
    assert torch.equal(torch.jit.trace(model, normal(3, 40))(x), model(x))
