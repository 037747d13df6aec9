"""`hadagen.prepare`. No GPU needed."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice, device
from test_rotation import some_signs
from test_runtime import normal

from hadagen import Rotation, TensorError, UsageError, prepare, prologues, rotate_quantize, warmup
from hadagen.runtime import prepared
from hadagen.runtime.choose import tables
from hadagen.runtime.quantized import Quantized

__all__ = ["device"]  # a fixture
HALF = torch.float16
N = 256
SIGNED = Rotation(N, signs=some_signs(N))
SILU = prologues.SiluMul()

# Arguments, the width of x, and the same call by another function.
CASES: dict[str, tuple[dict[str, Any], int, Callable[[torch.Tensor], Any]]] = {
    "Rotation": ({"rotation": SIGNED}, N, SIGNED),
    "Rotation, before": ({"rotation": SIGNED, "before": SILU}, 2 * N, lambda x: SIGNED(x, before=SILU)),
    "scale": ({"rotation": SIGNED, "scale": 2.0}, N, lambda x: 2 * SIGNED(x)),
    "blocks": ({"rotation": 64}, N, lambda x: Rotation(N, block=64)(x)),
    "row": ({"rotation": SIGNED, "to": "int8-row"}, N, lambda x: rotate_quantize(x, SIGNED, to="int8-row")),
    "no rotation": ({"to": "mxfp8"}, N, lambda x: rotate_quantize(x, to="mxfp8")),
    "columns": (
        {"rotation": 64, "to": "fp8-group", "layout": "column-major", "scale": 0.5},
        N,
        lambda x: rotate_quantize(x, 64, to="fp8-group", layout="column-major", scale=0.5),
    ),
    "before, as wide": (
        {"rotation": SIGNED, "to": "int8-row", "before": prologues.Gelu()},
        N,
        lambda x: rotate_quantize(x, SIGNED, to="int8-row", before=prologues.Gelu()),
    ),
    "before and row": (
        {"rotation": SIGNED, "to": "int8-row", "before": SILU},
        2 * N,
        lambda x: rotate_quantize(x, SIGNED, to="int8-row", before=SILU),
    ),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one.format == other.format and torch.equal(one.dequantize(), other.dequantize())


@pytest.mark.parametrize("name", CASES)
def test_a_prepared_call_is_the_call(name: str, device: EmulatedDevice) -> None:
    """First, again, after it was stored and copied, and into memory of its own."""
    options, width, call = CASES[name]
    p, x = prepare(**options), normal(4, width, dtype=HALF)
    for each in (p, pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        for given in (x, x, normal(4, width, dtype=HALF, seed=1), normal(2, 3, width, dtype=HALF).transpose(0, 1)):
            wanted = call(given)
            assert same(each(given), wanted)
            out = each.out_like(given)
            found = each(given, out=out)
            assert same(found, wanted)
            assert found is out if isinstance(out, torch.Tensor) else found.codes is out[0]
    assert p.dtype == (None if p.format is None else p(x).codes.dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_prepared_call_that_comes_again_is_one_look_up(
    name: str, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, width, call = CASES[name]
    p, x = prepare(**options), normal(4, width, dtype=HALF)
    wanted = call(x)
    p(x)
    searches = device.searches
    for slow in ("rotate", "rotate_quantize", "factors"):
        monkeypatch.setattr(prepared, slow, None)
    monkeypatch.setattr(Rotation, "_run", None)
    assert same(p(x.clone()), wanted)
    assert device.searches == searches
    tables.forget()
    with pytest.raises(TypeError):
        p(x)


@pytest.mark.parametrize("name", CASES)
def test_a_prepared_call_compiles(name: str) -> None:
    options, width, call = CASES[name]
    p = prepare(**options)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: p(x + 1), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = normal(rows, width, dtype=HALF)
        found = compiled(x)
        assert same(found, call(x + 1)) if isinstance(found, (torch.Tensor, Quantized)) else False


def test_a_prepared_call_follows_its_rotation(device: EmulatedDevice) -> None:
    """To other signs that are loaded, and refuses rows of another length."""
    r, x = Rotation(N, signs=some_signs(N)), normal(4, N, dtype=HALF)
    p, q = prepare(r), prepare(r, to="int8-row")
    for _ in range(2):
        p(x), q(x)
    other = Rotation(N, signs=some_signs(N, seed=1))
    r.load_state_dict(other.state_dict())
    for _ in range(2):
        assert same(p(x), other(x))
        assert same(q(x), rotate_quantize(x, other, to="int8-row"))
    blocks = prepare(Rotation(2 * N, block=64)), prepare(Rotation(2 * N, block=64), to="mxfp8")
    wide = normal(4, 2 * N, dtype=HALF)
    prepare(64)(x), prepare(64, to="mxfp8")(x)
    for each in blocks:
        each(wide), each(wide)
        with pytest.raises(TensorError, match="the last dimension of x is 256; this rotation takes 512"):
            each(x)


def test_a_gradient_goes_through() -> None:
    x = normal(3, N).requires_grad_()
    p = prepare(SIGNED)
    p(x.detach())
    assert torch.autograd.gradcheck(p, x, fast_mode=True)
    with pytest.raises(TensorError, match="x requires a gradient"):
        prepare(64, to="mxfp8")(x.float())


def test_a_scale_of_the_call_is_given_with_x(device: EmulatedDevice) -> None:
    p, x = prepare(64, to="fp8-tensor"), normal(4, N, dtype=HALF)
    for scale in (0.5, torch.tensor(0.25)):
        for _ in range(2):
            found = p(x, tensor_scale=scale)
            assert same(found, rotate_quantize(x, 64, to="fp8-tensor", tensor_scale=scale))
    codes, scales = p.out_like(x)
    assert scales is None
    assert p(x, tensor_scale=0.5, out=(codes, scales)).codes is codes


def test_kernels_of_a_prepared_call(device: EmulatedDevice) -> None:
    best = prepare(SIGNED, to="int8-row").best("float16", rows=8, arch="sm90")
    assert best.problem.key == f"n{N}-signed-float16-to-int8_row_{N}-accurate"
    assert prepare(SIGNED).best("float16", rows=8, arch="sm90").problem.key == f"n{N}-signed-float16-accurate"
    assert (
        prepare(SIGNED, to="int8-row").warmup("float16", device="cpu") == warmup(SIGNED, "float16", device="cpu") == 0
    )


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"rotation": 3}, UsageError, "rotation = 3 is no power of two; choose one, or pass a Rotation"),
        ({"rotation": "auto"}, TypeError, "rotation is a str; pass a Rotation, a power of two, or None"),
        ({}, UsageError, "nothing is asked for; pass a rotation, or a format as to="),
        ({"rotation": 4, "rule": "exact"}, UsageError, "are those of a format; give to as well"),
        ({"rotation": 4, "to": "mxfp5"}, UsageError, "to = 'mxfp5' is no format"),
        ({"rotation": 4, "numerics": "best"}, UsageError, "numerics 'best' is not supported"),
        ({"rotation": 4, "scale": "1"}, TypeError, "scale is a str; pass a real number"),
        ({"rotation": 4, "batch_invariant": 3}, TypeError, "batch_invariant is 3; pass True or False"),
        ({"rotation": 4, "before": "silu_mul"}, TypeError, "before is a str; pass a value of hadagen.prologues"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        prepare(**options)


def test_a_bad_call_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="rotated rows have no tensor_scale; leave it out"):
        prepare(SIGNED)(normal(4, N), tensor_scale=1.0)
    with pytest.raises(TypeError, match=r"x is a list; pass a torch\.Tensor"):
        prepare(SIGNED)([1.0])  # type: ignore[arg-type]
    assert repr(prepare(64, to="mxfp8", scale=0.5)) == "prepare(64, to='mxfp8', scale=0.5)"
