"""What a rotation hands to a kernel that does all of it, and when there is none; by `EmulatedDevice`, without a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from emulated_device import EmulatedDevice, device, read_operands, same
from test_rotation import VIEWS, linear_of, some_signs
from test_runtime import normal

from hadagen import Rotation
from hadagen.compat import fast_hadamard_transform as fast
from hadagen.compat import quarot
from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import compile_host
from hadagen.errors import TensorError
from hadagen.plan.arch import load_arch
from hadagen.plan.knobs import Knobs
from hadagen.plan.space import Space, build_plan
from hadagen.problem.problem import Problem
from hadagen.runtime.call import compute, entry, rules
from hadagen.runtime.call.rules import LINEAR
from hadagen.runtime.choose import tables
from hadagen.runtime.operands.call import Call
from hadagen.runtime.operands.packed import (
    Factors,
    addresses,
    pack_matrix,
    pack_signs,
    packed_size,
    unpack_matrices,
    unpack_signs,
)
from hadagen.runtime.operands.spec import Spec
from hadagen.runtime.rotation import factors_of
from hadagen.truth.accuracy import TORCH_DTYPE

__all__ = ["device"]  # a fixture
HALF = torch.float16


def signed(n: int, matrix: Any = "auto", **options: Any) -> Rotation:
    block = options.get("block", n)
    return Rotation(n, matrix, signs=some_signs(block), signs_after=some_signs(block, seed=1), **options)


def ran(device: EmulatedDevice) -> list[str]:
    return [name.replace("-float16-accurate", "") for name in device.ran()]


@pytest.mark.parametrize(
    ("rotation", "name"),
    [
        (signed(224, "quarot"), "n224-k28-signed"),
        (Rotation(224, "quarot"), "n224-k28"),
        (Rotation(224, "quarot", signs=some_signs(224)), "n224-k28-signed"),
        (Rotation(96, "dao", signs_after=some_signs(96)), "n96-k12-signed"),
        (signed(448, "quarot", block=224), "n224-k28-signed"),
        (signed(56, "quarot"), "n56-k56"),  # H of order 2 becomes a part of the matrix, and so do signs if no H is left
        (signed(768, k=12), "n768-k24-signed"),  # so does one of order 2, of which the matrix has 16 rows or more
        (signed(240, k=(20, 12)), "n240-k240"),
        (Rotation(3840, k=(12, 20)), "n3840-k240"),
        (signed(344, "quarot"), "n344-k344"),
        (signed(40, torch.tril(torch.ones(5, 5))), "n40-k5-signed"),
        (signed(256), "n256-signed"),
        (Rotation(256), "n256"),
        (signed(512, block=128), "n128-signed"),
        (signed(224, normal(28, 28)), "n224-k28-real-signed"),
        (Rotation(512, 1e-30 * torch.linalg.qr(normal(32, 32)).Q, block=256), "n256-k32-real"),
        (signed(768, [normal(6, 6), normal(64, 64)], block=384), "n384-k6-c64-real-signed"),
        (Rotation(512, [1e-30 * normal(4, 4), torch.eye(128).half()]), "n512-k4-c128-real"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_kernel_does_signs_and_matrices(rotation: Rotation, name: str, device: EmulatedDevice) -> None:
    x = normal(3, 2, rotation.n, dtype=HALF)
    m = rotation.matrix()
    device.ran()
    for _ in range(2):
        for transposed in (False, True):
            wanted = x.double() @ (m.T if transposed else m)

            def run(x: torch.Tensor, transposed: bool = transposed, **options: Any) -> torch.Tensor:
                return rotation._run(x, options.get("inplace", False), options.get("out"), "accurate", None, transposed)

            before = x.clone()
            assert same(run(x), wanted)
            assert torch.equal(x, before), "the input was changed"
            out = torch.empty_like(x)
            assert run(x, out=out) is out
            assert same(out, wanted)
            again = x.clone()
            assert run(again, inplace=True) is again
            assert same(again, wanted)
            assert run(before, out=before) is before
            assert same(before, wanted)
            assert ran(device) == [name] * 4


@pytest.mark.parametrize(
    ("rotation", "dtype", "names"),
    [
        (signed(112, normal(28, 28)), HALF, ["n4-float32-accurate"]),
        (signed(224, normal(28, 28)), torch.float32, ["n8-float32-accurate"]),
        (signed(1600, normal(200, 200)), HALF, ["n8-float32-accurate"]),
        (signed(512, [normal(4, 4), normal(8, 8)]), HALF, ["n16-float32-accurate"]),
        (signed(128, [normal(8, 8), normal(16, 16)]), HALF, []),
        (Rotation(768, [normal(6, 6), normal(64, 64)]), HALF, ["n2-float32-accurate"]),
        (Rotation(12800, [normal(200, 200), normal(64, 64)]), HALF, []),
        (signed(224, "quarot"), torch.float32, ["n8-float32-accurate"]),
        (signed(688, "quarot"), HALF, ["n4-float32-accurate"]),  # 172 · 4 is above the largest order
        (signed(64, "regular"), HALF, ["n64-float16-accurate"]),
        (signed(224, "quarot"), torch.float64, []),
        (signed(28, "quarot"), HALF, []),
        (signed(224, "quarot"), torch.bfloat16, ["n8-float32-accurate"]),
    ],
)
def test_where_no_kernel_does_all_of_it_pytorch_does(
    rotation: Rotation, dtype: torch.dtype, names: list[str], device: EmulatedDevice
) -> None:
    x = normal(3, rotation.n, dtype=dtype)
    wanted = x.double() @ rotation.matrix()
    device.ran()
    for _ in range(2):
        assert same(rotation(x), wanted)
        assert device.ran() == names


@pytest.mark.parametrize("name", ["n224-k28-signed-float16-accurate", "n256-signed-float16-accurate"])
def test_without_a_kernel_of_the_problem_pytorch_does_it(name: str, device: EmulatedDevice) -> None:
    n = 224 if "k28" in name else 256
    r, x = signed(n), normal(3, n, dtype=HALF)
    wanted = x.double() @ r.matrix()
    device.without.add(name)
    device.ran()
    assert same(r(x), wanted)
    assert device.ran() == ["n8-float32-accurate" if n == 224 else "n256-float16-accurate"]


def at_an_odd_address(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


COPIED = {name: VIEWS[name] for name in ("transposed", "last dimension first", "pitched", "expanded")}


@pytest.mark.parametrize("view", [*COPIED, "at an odd address"])
def test_rows_that_kernels_do_not_take_are_copied(view: str, device: EmulatedDevice) -> None:
    r = signed(48, "dao", block=24)
    x = COPIED.get(view, at_an_odd_address)(normal(4, 3, 48, dtype=HALF))
    wanted = x.double() @ r.matrix()
    device.ran()
    dense = torch.empty(x.shape, dtype=HALF)
    assert same(r(x), wanted)
    assert same(r(x, out=dense), wanted)
    if view != "expanded":
        strided = torch.empty_like(x)
        assert same(r(x, out=strided), wanted)
        assert r(x, inplace=True) is x
        assert same(x, wanted)
    assert set(ran(device)) == {"n24-k24"}


def test_memory_that_overlaps(device: EmulatedDevice) -> None:
    r = signed(224)
    for later in (0, 224):
        flat = normal(3 * 224, dtype=HALF)
        x, y = flat[later : later + 448].view(2, 224), flat[224 - later : 672 - later].view(2, 224)
        wanted = x.double() @ r.matrix()
        assert same(r(x, out=y), wanted)


def test_rows_of_h_alone_may_have_gaps(device: EmulatedDevice) -> None:
    r, x = Rotation(256), normal(3, 2, 256, dtype=HALF)[:, 0]
    wanted = x.double() @ r.matrix()
    device.ran()
    assert same(r(x), wanted)
    assert same(r(x, out=torch.empty_like(x)), wanted)
    assert ran(device) == ["n256-pitched"] * 2


def test_a_matrix_of_order_1(device: EmulatedDevice) -> None:
    r, x = Rotation(256, -torch.ones(1, 1)), normal(3, 256, dtype=HALF)
    assert same(r(x), x.double() @ -Rotation(256).matrix())


def test_no_rows(device: EmulatedDevice) -> None:
    assert signed(224)(torch.empty(0, 224, dtype=HALF)).shape == (0, 224)
    assert device.ran() == []


def test_operands_in_memory_that_kernels_cannot_read(device: EmulatedDevice) -> None:
    r, x = signed(224), normal(3, 224, dtype=HALF)
    wanted = x.double() @ r.matrix()
    device.ran()
    matrices, *of = linear_of(factors_of(r, x))
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), matrices])[1:]
    strided = torch.stack([matrices, matrices], 1)[:, 0]
    for matrices in (odd, strided):
        assert same(LINEAR.default(x, matrices, *of), wanted)
    assert "n224-k28-signed" not in ran(device)


# ---- calls that come again -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inplace", [False, True])
def test_a_rotation_that_comes_again_is_one_look_up(
    inplace: bool, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    r, x = signed(224), normal(3, 224, dtype=HALF)
    wanted = x.double() @ r.matrix()
    r(x.clone(), inplace=inplace)
    searches = device.searches
    for module, name in ((entry, "LINEAR"), (rules, "INTO"), (compute, "check")):
        monkeypatch.setattr(module, name, None)
    y = r(x, inplace=inplace)
    assert same(y, wanted)
    assert (y is x) == inplace
    assert device.searches == searches
    with pytest.raises(TypeError):
        r(normal(4, 224, dtype=HALF), inplace=inplace)  # a new call, which would be checked
    tables.forget()
    assert not tables.calls


def test_other_operands_are_another_call(device: EmulatedDevice) -> None:
    """Also where they lie at the same addresses, but are of another kind."""
    x = normal(3, 224, dtype=HALF)
    matrices = pack_matrix(torch.zeros(28, 28, dtype=torch.int8))
    signs = pack_signs(some_signs(224))
    of = linear_of(Factors(224, (28,), False, 0.0625, matrices, signs))
    for values in (1, -1):
        matrices.copy_(pack_matrix(torch.full((28, 28), values, dtype=torch.int8)))
        assert same(LINEAR.default(x, *of), LINEAR.default(x.double(), *of))
    for matrix in (torch.ones(28 * 28, dtype=torch.int8), matrices.clone().zero_()):
        given = of._replace(matrices=matrix)
        assert same(LINEAR.default(x, *given), LINEAR.default(x.double(), *given))
    for other in (signs, pack_signs(some_signs(224, seed=1))):
        given = of._replace(signs=other)
        assert same(LINEAR.default(x, *given), LINEAR.default(x.double(), *given))
    r = signed(224)
    for other in (r, Rotation(224, signs=some_signs(224, seed=2), signs_after=some_signs(224, seed=3))):
        assert same(torch.func.functional_call(r, other.state_dict(), x), x.double() @ other.matrix())
    assert same(r(x), x.double() @ signed(224).matrix())
    for r in (signed(224), Rotation(224, signs=some_signs(224)), Rotation(224, signs=some_signs(224, seed=1))):
        for numerics in ("accurate", "fast"):
            assert same(r(x, numerics=numerics), x.double() @ r.matrix())
            assert same(r.inverse(x, numerics=numerics), x.double() @ r.matrix().T)


def test_a_known_call_of_another_rotation_is_checked(device: EmulatedDevice) -> None:
    x = normal(3, 256, dtype=HALF)
    Rotation(256, block=128)(x)
    for bad, message in ((x, "this rotation takes 128"), (x[0, 0], "has no dimension"), (x.int(), "has the type int")):
        with pytest.raises(ValueError, match=message):
            Rotation(128)(bad)
    r = Rotation(256)
    r(x)
    for options in ({"inplace": []}, {"numerics": []}, {"inplace": "no"}):
        with pytest.raises((TypeError, ValueError)):
            r(x, **options)


def test_gradients_and_writes_are_known_to_autograd(device: EmulatedDevice) -> None:
    r = signed(224)
    m = r.matrix()
    for _ in range(2):
        x = normal(3, 224, dtype=HALF).requires_grad_()
        upstream = normal(3, 224, dtype=HALF, seed=1)
        (gradient,) = torch.autograd.grad(r(x), x, upstream)
        assert same(gradient, upstream.double() @ m.T)
        with pytest.raises(TensorError, match="x is a leaf"):
            r(x, inplace=True)
    for out in (False, True):
        y = normal(3, 224, dtype=HALF)
        version = y._version
        for count in (1, 2):
            if out:
                r(upstream, out=y)
            else:
                r(y, inplace=True)
            assert y._version == version + count
    with torch.inference_mode():
        z = normal(3, 224, dtype=HALF)
        r(z, inplace=True)
        assert same(r(upstream, out=z), upstream.double() @ m)
    with pytest.raises(TensorError, match="was made in inference mode"):
        r(z, inplace=True)


def test_batches_and_modes_see_the_operator(device: EmulatedDevice) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    r, x = signed(224), normal(3, 224, dtype=HALF)
    wanted = x.double() @ r.matrix()
    r(x)
    assert same(torch.vmap(r)(x), wanted)
    assert same(r(torch._neg_view(x)), -wanted)
    with Mode():
        r(x)
    assert "hadagen.linear.default" in seen


def test_a_scale_beyond_the_fast_kernel_takes_the_accurate_one(device: EmulatedDevice) -> None:
    r, x = signed(224), normal(3, 224, dtype=HALF)
    LINEAR.default(x, *linear_of(factors_of(r, x)._replace(scale=1e-9), numerics="fast"))
    assert device.ran() == ["n224-k28-signed-float16-accurate"]


def test_functions_of_other_projects_take_these_kernels(device: EmulatedDevice) -> None:
    for n, name in ((56, "n56-k56"), (768, "n768-k24"), (224, "n224-k28")):
        x = normal(3, n, dtype=HALF)
        m = Rotation(n, "quarot").matrix()
        for transpose in (False, True):
            wanted = x.double() @ (m.T if transpose else m)
            device.ran()
            assert same(quarot.matmul_hadU(x, transpose=transpose), wanted)
            assert same(quarot.matmul_hadU_cuda(x, *quarot.get_hadK(n), transpose=transpose), wanted)
            assert ran(device) == [name] * 2
    rows = normal(3, 1280, dtype=HALF)
    wanted = rows.double() @ Rotation(1280, "dao", k=20).matrix()
    device.ran()
    assert same(fast.hadamard_transform_20N(rows, 1280**-0.5), wanted)
    assert ran(device) == ["n1280-k40"]
    twos = torch.full((28, 28), 2, dtype=torch.int8)
    assert same(quarot.matmul_hadU_cuda(x, twos, 28), quarot.matmul_hadU_cuda(x.double(), twos.double(), 28))
    assert "n224-k28" not in ran(device)


# ---- kernels that are generated --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rotation", "key"),
    [
        (signed(224, "quarot"), "n224-k28-signed-float16-accurate"),
        (signed(768, k=12), "n768-k24-signed-float16-accurate"),  # the matrix and H of order 2
        (Rotation(64, -torch.eye(64) + torch.ones(64, 64).tril()), "n64-k64-float16-accurate"),
        (Rotation(512, signs=some_signs(512)), "n512-signed-float16-accurate"),
        (signed(1280, normal(20, 20)), "n1280-k20-real-signed-float16-accurate"),
        (signed(1280, [normal(20, 20), normal(64, 64)]), "n1280-k20-c64-real-signed-float16-accurate"),
        (Rotation(256, torch.diag(2.0 ** torch.linspace(0, -8, 32))), "n256-k32-real-float16-accurate"),
    ],
)
def test_a_generated_kernel_computes_the_rotation(rotation: Rotation, key: str) -> None:
    problem = Problem.parse(key)
    space = Space(problem, load_arch("sm90"))
    source = render(build_plan(problem, space.closest(Knobs()), space.arch))
    module = compile_host([source])
    x = normal(5, problem.n, dtype=HALF)
    for transposed in (False, True):
        given = linear_of(factors_of(rotation, x), transposed)
        of = Call(Spec.parse(given.text), given.scale, x, *given[:3])
        arrays = {each.data_ptr(): each.numpy() for each in (of.signs, of.signs_after) if each is not None}
        operands: dict[str, Any] = {name: arrays.get(value, value) for name, value in addresses(of, HALF).items()}
        size = packed_size(problem.order) * 4 // (2 if problem.transform.real else 8)
        for name in {"matrix", "right_matrix"} & set(operands) if of.matrices is not None else ():
            first = operands[name] - of.matrices.data_ptr()
            operands[name] = of.matrices.numpy()[first:][: size if name == "matrix" else 4 * problem.length**2]
        y = np.zeros(x.shape, np.uint16)
        module.run(source.entry, source.launch, x.numpy().view(np.uint16), y, scale=of.scale, operands=operands)
        m = rotation.matrix()
        assert same(torch.from_numpy(y.view(np.float16)), x.double() @ (m.T if transposed else m))


@pytest.mark.parametrize(
    "key", ["n640-k20-real-float16-accurate", "n640-k20-real-bfloat16-fast", "n1280-k20-c64-real-bfloat16-accurate"]
)
def test_a_real_matrix_lies_where_kernels_read_it(key: str) -> None:
    problem = Problem.parse(key)
    dtype = TORCH_DTYPE[problem.io.input]
    matrices = [normal(20, 20), *[normal(64, 64)] * problem.transform.paired]
    r, x = Rotation(problem.n, matrices), normal(1, problem.n, dtype=dtype)
    for transposed in (False, True):
        given = linear_of(factors_of(r, x), transposed)
        of = Call(Spec.parse(given.text), given.scale, x, *given[:3])
        found = read_operands(problem, addresses(of, dtype))
        for name, each in zip(("matrix", "right_matrix"), unpack_matrices(of.matrices, of.spec.orders), strict=False):
            wanted = each.double().T if transposed else each.double()
            assert torch.allclose(torch.from_numpy(found[name]), wanted, rtol=2.0**-16, atol=0)


# ---- operands --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 7, 8, 28, 40, 1024])
def test_signs_are_bits(n: int) -> None:
    signs = some_signs(n)
    packed = pack_signs(signs)
    assert (packed.dtype, packed.shape) == (torch.uint8, (-(-n // 8),))
    for i in range(n):
        assert bool(packed[i // 8] >> i % 8 & 1) == (signs[i] == -1)
    assert torch.equal(unpack_signs(packed, n), signs.to(torch.int8))
