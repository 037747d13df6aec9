"""Operators of earlier versions, which stored programs call by name: each gives what the call of today does."""

from typing import Any

import pytest
import torch
from test_rotation import some_signs
from test_runtime import normal

from hadagen import Rotation, hadamard_transform, prologues, rotate_quantize
from hadagen.runtime.rotation import factors_of

OPS: Any = torch.ops.hadagen
N = 96
R = Rotation(N, signs=some_signs(N), signs_after=some_signs(N, seed=1))
G = Rotation(N, torch.linalg.qr(normal(12, 12)).Q, signs=some_signs(N))
X = normal(4, N, dtype=torch.float32)
H = (None, [1], None, None, 32, False)  # a rotation without operands


def of(rotation: Rotation) -> tuple[Any, ...]:
    it = factors_of(rotation, X)
    return it.matrices, list(it.orders) or [1], it.signs, it.signs_after, it.n, it.swapped


def in_place(operator: Any, *rest: Any) -> torch.Tensor:
    x = X.clone()
    assert operator(x, *rest) is None
    return x


def into(operator: Any, *rest: Any) -> torch.Tensor:
    *before, after = rest
    out = torch.empty_like(X)
    assert operator(X, *before, out, after) is None
    return out


CALLS = {
    "transform": (lambda: OPS.hadamard_transform(X, 0.5, "accurate"), lambda: hadamard_transform(X, 0.5)),
    "transform in place": (
        lambda: in_place(OPS.hadamard_transform_, 0.5, "fast", True),
        lambda: hadamard_transform(X, 0.5, numerics="fast", batch_invariant=True),
    ),
    "transform out": (
        lambda: into(OPS.hadamard_transform_out, 0.5, "accurate", False),
        lambda: hadamard_transform(X, 0.5),
    ),
    "rotate": (lambda: OPS.rotate(X, *of(R), False, float(R._scale), "accurate"), lambda: R(X)),
    "rotate back": (lambda: OPS.rotate(X, *of(G), True, float(G._scale), "accurate", False), lambda: G.inverse(X)),
    "rotate in place": (lambda: in_place(OPS.rotate_, *of(R), False, float(R._scale), "accurate"), lambda: R(X)),
    "rotate out": (lambda: into(OPS.rotate_out, *of(G), False, float(G._scale), "accurate", False), lambda: G(X)),
    "named matrix": (
        lambda: OPS.named_matrix("dao", [12], N, "cpu"),
        lambda: factors_of(Rotation(N, "dao", k=12), X).matrices,
    ),
    "stored matrix": (
        lambda: OPS.stored_matrix(G.packed_matrices, None, None, G.name, list(G.k), N, G._scale),
        lambda: factors_of(G, X).matrices,
    ),
}
CODES = {
    "quantize": (
        lambda: OPS.rotate_quantize(
            X, *H, 32**-0.5, "accurate", False, "mxfp4", 32, "floor", "row-major", False, None
        ),
        lambda: rotate_quantize(X, 32, to="mxfp4"),
    ),
    "after": (
        lambda: OPS.rotate_after(
            [X.repeat(1, 2)], "silu_mul", *of(R), float(R._scale), "accurate", False,
            "int8-row", 0, "exact", "row-major", True, None,
        ),
        lambda: rotate_quantize(X.repeat(1, 2), R, to="int8-row", before=prologues.SiluMul(), round_first=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_of_an_earlier_version_is_the_call_of_today(name: str) -> None:
    old, new = CALLS[name]
    assert torch.equal(old(), new())


@pytest.mark.parametrize("name", CODES)
def test_a_quantizer_of_an_earlier_version_is_the_call_of_today(name: str) -> None:
    old, new = CODES[name]
    for mine, wanted in zip(old(), new(), strict=True):
        assert torch.equal(mine, wanted)


def test_a_quantizer_of_an_earlier_version_writes_into_tensors() -> None:
    wanted = rotate_quantize(X, 32, to="fp8-tensor", tensor_scale=0.5)
    codes = torch.empty_like(wanted.codes)
    form = "fp8-tensor", -1, "exact", "row-major"
    OPS.rotate_quantize_into(X, *H, 32**-0.5, "accurate", False, *form, False, torch.tensor(0.5), codes, None)
    assert torch.equal(codes.view(torch.uint8), wanted.codes.view(torch.uint8))
    wanted = rotate_quantize(X, 32, to="mxfp4")
    out = [torch.empty_like(each) for each in wanted]
    form = "mxfp4", 32, "floor", "row-major"
    OPS.rotate_quantize_into(X, *H, 32**-0.5, "accurate", False, *form, False, None, *out)
    assert all(map(torch.equal, out, wanted))


def test_gradients_and_batches_of_an_earlier_version() -> None:
    x = X.double().requires_grad_()
    call = lambda x: OPS.rotate(x, *of(R), False, 0.25, "accurate")  # noqa: E731
    assert torch.autograd.gradcheck(call, x, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.equal(torch.vmap(call)(X[:, None]), call(X[:, None]))
