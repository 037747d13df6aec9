"""What a call hands to its kernel, and in which process: the tests of `hadagen.runtime` that need no GPU to launch."""

import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from emulated_device import EmulatedDevice, device, same
from test_runtime import VIEWS, normal, padded
from torch.autograd import forward_ad

from hadagen import hadamard_transform
from hadagen.compat import hadacore
from hadagen.errors import TensorError
from hadagen.problem.problem import Rows
from hadagen.problem.scale import ScaleForm
from hadagen.runtime.call import entry, runs
from hadagen.runtime.choose import tables

__all__ = ["device"]  # a fixture
HALF = torch.float16
# Views of a whole of shape [6, 4, 64], and the kind of kernel that serves each without a copy; "" where there is none.
KINDS = {
    "contiguous": "n64",
    "one row": "n64",
    "strided rows": "n32-pitched",
    "strided elements": "",
    "transposed": "",
    "misaligned": "n64-pitched",
    "flipped": "n64",
    "no rows": None,
    "no rows inside": None,
}


def kind(name: str) -> str:
    return name.replace("-float16-accurate", "")


@pytest.mark.parametrize("name", KINDS)
def test_kernels_transform_views(name: str, device: EmulatedDevice) -> None:
    view = VIEWS[name]
    wanted_kinds = [] if KINDS[name] is None else [KINDS[name]] if KINDS[name] else None
    whole = normal(6, 4, 64, dtype=HALF)
    x = view(whole)
    wanted = padded(x, 0.5)
    for _ in range(2):  # found, and then known
        y = hadamard_transform(x, 0.5)
        assert y.is_contiguous()
        assert same(y, wanted)
        assert torch.equal(whole, normal(6, 4, 64, dtype=HALF)), "the input was changed"
        ran = [kind(each) for each in device.ran()]
        assert ran == wanted_kinds or (wanted_kinds is None and len(ran) == 1)
    whole_target = torch.full_like(whole, 7.0)
    target = view(whole_target)
    assert hadamard_transform(x, 0.5, out=target) is target
    assert same(target, wanted)
    target.fill_(7.0)
    assert bool((whole_target == 7.0).all()), "written outside of out"

    device.ran()
    version = x._version
    assert hadamard_transform(x, 0.5, inplace=True) is x
    assert same(x, wanted)
    assert x._version > version or not x.numel(), "autograd would not know of the write"
    assert len(device.ran()) == (0 if wanted_kinds == [] else 1)
    x.copy_(view(normal(6, 4, 64, dtype=HALF)))
    assert torch.equal(whole, normal(6, 4, 64, dtype=HALF)), "written outside of x"


@pytest.mark.filterwarnings("ignore:rows of 100 elements are padded")
@pytest.mark.parametrize("served", [tuple(Rows), (Rows.CONTIGUOUS,), (Rows.PITCHED,), ()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 3, 48, 64, 65, 100, 127])
def test_any_row_length_with_any_kernels(
    columns: int, dtype: torch.dtype, served: tuple[Rows, ...], device: EmulatedDevice
) -> None:
    """The same result, whichever kinds of kernel a bundle has."""
    device.served = served
    for x in (
        normal(2, 3, columns, dtype=dtype),
        normal(6, 130, dtype=dtype)[:, 2 : columns + 2],
        normal(columns, 7, dtype=dtype).t(),
        normal(columns, dtype=dtype).expand(4, columns),
        normal(400, dtype=dtype).unfold(0, columns, 20),  # windows, which overlap
    ):
        before = x.clone()
        wanted = padded(x, 0.1)
        assert same(hadamard_transform(x, 0.1), wanted)
        assert torch.equal(x, before), "the input was changed"
        assert bool(device.ran()) == (columns > 1 and bool(served))
        for out in (torch.empty_like(before), torch.empty(columns, *x.shape[:-1], dtype=dtype).movedim(0, -1)):
            assert same(hadamard_transform(x, 0.1, out=out), wanted)
        assert same(hadamard_transform(before.clone(), 0.1, inplace=True), wanted)


def test_interleaved_rows_need_no_copy(device: EmulatedDevice) -> None:
    whole = normal(5, 200, dtype=HALF)
    x, y = whole[:, :96], whole[:, 100:196]
    wanted = padded(x)
    hadamard_transform(x, out=y)
    assert device.launched[0].problem.io.rows is Rows.PITCHED
    assert len(device.ran()) == 1
    assert same(y, wanted)
    assert torch.equal(x, normal(5, 200, dtype=HALF)[:, :96])


@pytest.mark.parametrize("rows", [slice(1, 6), slice(0, 5), slice(4, 9)])
def test_out_that_overlaps_rows_of_x_is_still_right(rows: slice, device: EmulatedDevice) -> None:
    whole = normal(9, 64, dtype=HALF)
    x, y = whole[::2], whole[rows]
    wanted = padded(x)
    assert same(hadamard_transform(x, out=y), wanted)
    assert len(device.ran()) == 1


@pytest.mark.parametrize("shift", [1, 50, 95, 150, 250])
def test_out_that_overlaps_columns_of_x_is_still_right(shift: int, device: EmulatedDevice) -> None:
    flat = normal(2000, dtype=HALF)
    y, x = flat.as_strided((5, 96), (200, 1)), flat.as_strided((5, 96), (200, 1), shift)
    wanted = padded(x)
    assert same(hadamard_transform(x, out=y), wanted)


@pytest.mark.parametrize("scale", [0.0, 1e-30, -1e-30, 1e30, 0.5, -0.5])
def test_a_scale_out_of_the_range_of_a_kernel(scale: float, device: EmulatedDevice) -> None:
    x = normal(3, 64, dtype=HALF)
    assert same(hadamard_transform(x, scale, numerics="fast"), padded(x, scale).half())
    assert device.ran() == [f"n64-float16-{'fast' if abs(scale) == 0.5 else 'accurate'}"]


def test_a_scale_that_no_kernel_holds(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScaleForm, "range", (1.0, 2.0))
    x = normal(3, 64, dtype=HALF)
    assert same(hadamard_transform(x, 0.5, numerics="fast"), padded(x, 0.5))
    assert device.ran() == []


def test_a_transform_that_comes_again_is_one_look_up(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(3, 64, dtype=HALF)
    hadamard_transform(x, 0.5)
    searches = device.searches
    monkeypatch.setattr(entry, "LINEAR", None)  # the dispatcher is not asked
    for again in (x, x.clone()):
        assert same(hadamard_transform(again, 0.5), padded(x, 0.5))
    assert device.searches == searches
    assert len(tables.calls) == 1


@pytest.mark.parametrize("scale", [1, np.float32(1.0), Fraction(1)], ids=repr)
def test_a_number_of_another_kind_is_the_same_call(scale: Any, device: EmulatedDevice) -> None:
    x = normal(3, 64, dtype=HALF)
    for _ in range(2):
        for each in (scale, 1.0):
            assert same(hadamard_transform(x, each), padded(x))
    assert (device.searches, len(tables.calls)) == (1, 1)


@pytest.mark.parametrize("scale", [Decimal(1), 1 + 0j, np.True_], ids=repr)
def test_what_is_no_number_is_refused_whatever_was_called_before(scale: Any, device: EmulatedDevice) -> None:
    x = normal(3, 64, dtype=HALF)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"scale is a .*; pass a real number"):
            hadamard_transform(x, scale)
        assert same(hadamard_transform(x, 1.0), padded(x))


def test_a_call_with_out_that_comes_again_is_one_look_up(device: EmulatedDevice) -> None:
    flat = torch.zeros(2, 4, 64, dtype=HALF)
    x, y = normal(3, 64, dtype=HALF), flat[0, :3]
    hadamard_transform(x, 0.5, out=y)
    searches = device.searches
    for target in (y, flat[1, 1:]):
        assert hadamard_transform(x, 0.5, out=target) is target
        assert same(target, padded(x, 0.5))
    assert device.searches == searches
    overlapping = flat.view(-1)[64 : 64 + 192].view(3, 64)
    with pytest.raises(TensorError, match="out overlaps x without being x"):
        hadamard_transform(y, 0.5, out=overlapping)
    assert hadamard_transform(y, 0.5, out=y) is y
    assert same(y, padded(padded(x, 0.5), 0.5))
    version = y._version
    hadamard_transform(x, 0.5, out=y)
    assert y._version == version + 1
    with pytest.raises(TensorError, match="shape"):
        hadamard_transform(x, 0.5, out=flat[0])


def test_a_known_shape_at_another_address(device: EmulatedDevice) -> None:
    flat = normal(400, dtype=HALF)
    for offset in (0, 1, 8, 3, 0):
        x = flat[offset : offset + 192].view(3, 64)
        assert same(hadamard_transform(x), padded(x))
        assert [kind(name) for name in device.ran()] == ["n64" if offset % 8 == 0 else "n64-pitched"]


def test_how_far_apart_a_single_row_lies_from_others_is_no_matter(device: EmulatedDevice) -> None:
    assert runs.row_pitch(normal(4, 5, 64)[:1, :3]) == 64
    x = normal(5, 200, dtype=HALF)[:1, :64]
    assert same(hadamard_transform(x), padded(x))
    assert [kind(name) for name in device.ran()] == ["n64"]


def test_known_calls_are_not_kept_without_end(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_MAX_CALLS", 10)
    for rows in range(1, 30):
        x = normal(rows, 8, dtype=HALF)
        assert same(hadamard_transform(x), padded(x))
        assert len(tables.calls) <= 10


def test_gradients_past_the_dispatcher(device: EmulatedDevice) -> None:
    x = normal(3, 48, dtype=torch.float32).requires_grad_()
    g = normal(3, 48, dtype=torch.float32, seed=1).requires_grad_()
    for _ in range(2):
        y = hadamard_transform(x, 0.5)
        assert same(y, padded(x, 0.5))
        (gradient,) = torch.autograd.grad(y, x, g, create_graph=True)
        assert same(gradient, padded(g, 0.5))
        (twice,) = torch.autograd.grad(gradient, g, torch.ones_like(g))
        assert same(twice, padded(torch.ones_like(g), 0.5))
        assert device.ran() == ["n64-float32-accurate-pitched"] * 3


@pytest.mark.filterwarnings("ignore")  # it is deprecated, but must not be wrong
def test_what_wants_to_see_the_operator_does_see_it(device: EmulatedDevice) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = normal(3, 64, dtype=HALF)
    for _ in range(2):
        hadamard_transform(x)
    with Mode():
        hadamard_transform(x)
    assert "hadagen.linear.default" in seen
    traced = torch.jit.trace(hadamard_transform, (x,), check_trace=False)
    scaled = torch.jit.trace(lambda x: hadamard_transform(x, x.shape[-1] ** -0.5), (x,), check_trace=False)
    renamed = torch.jit.trace(hadacore.hadamard_transform, (x,), check_trace=False)
    other = normal(3, 64, dtype=HALF, seed=1)
    assert same(traced(other), padded(other))
    assert same(scaled(other), padded(other, 0.125))
    assert same(renamed(other), padded(other, 0.125))
    assert same(torch.vmap(lambda row: hadamard_transform(row))(x), padded(x))


def test_a_tangent_of_a_known_shape(device: EmulatedDevice) -> None:
    x, direction = normal(3, 64, dtype=HALF), normal(3, 64, dtype=HALF, seed=1)
    for _ in range(2):
        hadamard_transform(x)
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(hadamard_transform(forward_ad.make_dual(x, direction)))
    assert same(primal, padded(x))
    assert same(tangent, padded(direction))


def test_a_negated_view_of_a_known_shape(device: EmulatedDevice) -> None:
    x = normal(3, 64, dtype=HALF)
    for _ in range(2):
        assert same(hadamard_transform(x), padded(x))
    assert same(hadamard_transform(torch._neg_view(x)), padded(-x))


def test_an_inference_tensor_is_not_written_later(device: EmulatedDevice) -> None:
    ordinary = normal(3, 64, dtype=HALF)
    hadamard_transform(ordinary, inplace=True)
    with torch.inference_mode():
        x = normal(3, 64, dtype=HALF)
        hadamard_transform(x, inplace=True)
    with pytest.raises(RuntimeError, match="inference"):
        hadamard_transform(x, inplace=True)
    hadamard_transform(ordinary, out=torch.empty_like(ordinary))
    with pytest.raises(TensorError, match="was made in inference mode"):
        hadamard_transform(ordinary, out=x)


def test_bad_input_launches_nothing(device: EmulatedDevice) -> None:
    x = normal(2, 64, dtype=HALF)
    for options in (
        {"scale": float("nan")},
        {"numerics": "exact"},
        {"numerics": []},
        {"out": x[:1]},
        {"scale": "1"},
        {"inplace": "no"},
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            hadamard_transform(x, **options)  # type: ignore[arg-type]
    assert device.ran() == []


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_call_on_the_cpu_never_touches_cuda() -> None:
    program = """
import torch, hadagen
from hadagen.gpu import driver
x = torch.randn(3, 8).requires_grad_()
hadagen.hadamard_transform(x).sum().backward()
hadagen.warmup(8, "float16", device="cpu")
print(torch.cuda.is_initialized(), driver.bindings.cache_info().currsize)
"""
    assert run(program) == "False 0"


def test_a_forked_child_knows_nothing_of_its_parent() -> None:
    """Not even that a thread, which is not in the child, holds the lock."""
    program = """
import os
import torch, hadagen
from hadagen.problem.problem import Problem, Rows
from hadagen.runtime.launch import kernels
from hadagen.runtime.choose import tables
hadagen.hadamard_transform(torch.randn(3, 8))
remembered = (tables.timed, tables.found, tables.loaded, tables.unfit, tables.calls)
for table in remembered:
    table["key"] = "of the parent"
tables.lock.acquire()
if child := os.fork():
    assert all(list(table) == ["key"] for table in remembered)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print("done")
else:
    status = 1
    try:
        assert not any(remembered)
        kernels.cuda_device = lambda index: None
        assert kernels.find(kernels.Kind(0, Problem.of(8, "float16"), True), 8) is None
        torch.set_num_threads(1)
        x = torch.ones(1, 8)
        assert hadagen.hadamard_transform(x)[0, 0] == 8
        status = 0
    finally:
        os._exit(status)
"""
    assert run(program) == "done"
