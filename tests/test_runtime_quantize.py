"""What `rotate_quantize` hands to its kernels, by `EmulatedDevice`, without a GPU."""

import ast
import sys
from collections.abc import Callable
from inspect import getsource
from textwrap import dedent
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from emulated_device import EmulatedDevice, device
from test_quantize import ALL, PERMUTED, R, normal, scale_for

import hadagen
from hadagen import Rotation, TensorError, presets, rotate_quantize
from hadagen.problem.formats import KERNEL_LAYOUTS, TENSOR, Layout
from hadagen.runtime import warmup
from hadagen.runtime.call.runs import RunOfRows
from hadagen.runtime.choose import tables
from hadagen.runtime.launch import kernels
from hadagen.runtime.quantized import Quantized
from hadagen.truth.quantizer import memory_of

__all__ = ["device"]  # a fixture
N = 256
HALF = torch.float16
BY_KERNELS = [each for each in ALL if Layout(each[2]) in KERNEL_LAYOUTS]


def new_out(found: Quantized, fill: int = 0x55) -> Quantized:
    """Tensors like the results, in memory of other bytes."""
    tensors = []
    for each in (found.codes, found.scales):
        like = torch.full_like(memory_of(each), fill)
        tensors.append(like.view(each.dtype).as_strided(each.shape, each.stride()))
    return Quantized(*tensors, found.format)


def same(found: Quantized, wanted: Quantized) -> bool:
    """In all of their memory, gaps and what fills up scales too."""
    pairs = [(found.codes, wanted.codes), (found.scales, wanted.scales)]
    return all(torch.equal(memory_of(one), memory_of(other)) for one, other in pairs)


@pytest.mark.parametrize(("name", "rule", "layout"), BY_KERNELS)
def test_a_kernel_writes_into_out(
    name: str, rule: str, layout: str, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(2, 3, N, dtype=HALF)
    options = {"to": name, "rule": rule, "layout": layout, **scale_for(name, x, rule)}
    wanted = rotate_quantize(x, 128, **options)
    monkeypatch.setattr(RunOfRows, "new", None)
    device.launched.clear()
    for is_known in (True, True, False):
        if not is_known:
            tables.forget()
        out = new_out(wanted)
        versions = out.codes._version, out.scales._version
        found = rotate_quantize(x, 128, out=out, **options)
        assert found.codes is out.codes
        assert found.codes._version > versions[0], "autograd would not know of the write"
        if found.format.group == TENSOR:
            assert found.scales is not out.scales
            assert out.scales._version == versions[1]
            assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        else:
            assert found.scales is out.scales
            assert found.scales._version > versions[1]
            assert same(found, wanted)
    assert len(device.launched) == 3


def test_out_at_any_address(device: EmulatedDevice) -> None:
    """Kernels write at multiples of 16 bytes."""
    x = normal(4, N, dtype=HALF)
    wanted = rotate_quantize(x, 64, to="mxfp8", layout="swizzled")
    memory = torch.zeros(wanted.codes.numel() + 17, dtype=torch.uint8)
    codes = memory[1 : 1 + wanted.codes.numel()].view(torch.float8_e4m3fn).view(4, N)
    scales = torch.full_like(wanted.scales, 3)
    for _ in range(2):
        assert rotate_quantize(x, 64, to="mxfp8", layout="swizzled", out=(codes, scales)).codes is codes
        assert torch.equal(codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(scales, wanted.scales)
        codes.view(torch.uint8).zero_()
        scales.fill_(3)


def test_known_calls_check_out(device: EmulatedDevice) -> None:
    x = normal(6, N, dtype=HALF)
    good = rotate_quantize(x, to="fp8-group", layout="column-major")
    assert device.runs == 1
    for out, message in (
        ((good.codes[:5], good.scales), "out.codes is "),
        ((good.codes, good.scales.contiguous()), "out.scales is strided float32 .6, 2. with the strides .2, 1. on cpu"),
        ((x.view(torch.float8_e4m3fn)[:, :N].as_strided((6, N), (N, 1)), good.scales), "out.codes shares memory with"),
        ((good.codes, torch.zeros(14).as_strided((6, 2), (1, 8))), "out.scales lies in 56 bytes but ends at byte 64"),
    ):
        with pytest.raises(TensorError, match=message):
            rotate_quantize(x, to="fp8-group", layout="column-major", out=out)


@pytest.mark.parametrize("name", ["fp8-group", "fp8-row", "fp8-tensor", "int8-row", "int4-row", "mxfp4"])
@pytest.mark.parametrize("permuted", PERMUTED)
def test_permuted_rows_are_not_copied(
    permuted: Any, name: str, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = permuted(normal(2, 3, 5, N, dtype=HALF))
    wanted = rotate_quantize(x.contiguous(), R, to=name, **scale_for(name, x))
    sources: list[int] = []
    new, write = RunOfRows.new, RunOfRows.write

    def note_new(run: RunOfRows, x: torch.Tensor, *others: int) -> Any:
        assert not run.copies
        sources.append(x.data_ptr())
        return new(run, x, *others)

    def note_write(run: RunOfRows, out: Any, addresses: list[int]) -> None:
        sources.append(addresses[0])
        write(run, out, addresses)

    monkeypatch.setattr(RunOfRows, "new", note_new)
    monkeypatch.setattr(RunOfRows, "write", note_write)
    for _ in range(2):
        found = rotate_quantize(x, R, to=name, **scale_for(name, x))
        assert found.codes.stride()[:-1] == tuple(each // (N // found.codes.shape[-1]) for each in x.stride()[:-1])
        assert torch.equal(found.codes.contiguous().view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(found.scales, wanted.scales)
        out = Quantized(torch.empty_like(found.codes), torch.empty_like(found.scales), found.format)
        into = rotate_quantize(x, R, to=name, out=out, **scale_for(name, x))
        assert torch.equal(into.codes.contiguous().view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(into.scales, wanted.scales)
    assert sources == [x.data_ptr()] * 4
    assert device.runs == 2


@pytest.mark.parametrize(
    ("dtype", "block", "fast"), [(torch.bfloat16, 256, True), (torch.bfloat16, 64, False), (HALF, 256, False)]
)
def test_numerics_name_the_kernel(dtype: torch.dtype, block: int, fast: bool, device: EmulatedDevice) -> None:
    """Of new and of known calls, with and without out=. A kernel that rounds in no step is always accurate."""
    x, plain = normal(4, N, dtype=dtype), str(dtype).removeprefix("torch.")
    signed = Rotation(N, block=block, signs=[1, -1] * (block // 2))
    for _ in range(2):
        for numerics in ("accurate", "fast"):
            found = rotate_quantize(x, block, to="mxfp8", scale=0.125, numerics=numerics)
            rotate_quantize(x, signed, to="mxfp8", numerics=numerics, out=found)
            wanted = numerics if fast else "accurate"
            assert device.ran() == [f"n{block}-{each}{plain}-to-mxfp8_32-{wanted}" for each in ("", "signed-")]
    presets.convrot_int8(x, 256, numerics="fast")
    presets.fa3_fp8(x.view(1, 4, 1, N), numerics="fast")
    assert {key.rpartition("-")[2] for key in device.ran()} == ({"fast"} if dtype != HALF else {"accurate"})


@pytest.mark.parametrize("group", [None, 64])
def test_a_kernel_finds_largest_magnitudes(group: int | None, device: EmulatedDevice) -> None:
    """A kernel knows the length of rows, which None stands for."""
    x = normal(2, 3, 5, N, dtype=HALF).transpose(1, 2)
    for _ in range(2):
        device.launched.clear()
        found = rotate_quantize(x, 64, to="largest", group=group)
        assert device.ran() == [f"n64-float16-to-largest_{group or N}-accurate"]
        assert found.codes.shape == (2, 5, 3, 0)
        # Kernels do not take float64, so no launch of theirs is remembered.
        values = hadagen.hadamard_transform(x.double().unflatten(-1, (-1, 64)), 0.125).flatten(-2).abs()
        wanted = values.unflatten(-1, (-1, group or N)).amax(-1).float()
        assert torch.allclose(found.scales, wanted if group else wanted[..., 0], rtol=1e-6)
    assert device.runs == 1


@pytest.mark.parametrize("rule", ["exact", "fa3"])
def test_a_kernel_takes_scales_of_heads(rule: str, device: EmulatedDevice) -> None:
    """Of the same x with heads of other lengths, too; PyTorch takes heads that are no whole units of a kernel."""
    dense = normal(2, 3, 5, 64, dtype=HALF)
    for x in (dense, dense.transpose(1, 2)):
        for _ in range(2):
            for leading in (1, 2, 3):
                given = torch.rand(x.shape[:leading]) + 0.1
                device.launched.clear()
                found = rotate_quantize(x, 64, to="fp8-head", rule=rule, tensor_scale=given)
                assert device.ran() == ["n64-float16-to-fp8_head" + ("_fa3" if rule == "fa3" else "") + "-accurate"]
                assert found.codes.is_contiguous()
                of_rows = given.reshape(*given.shape, *[1] * (3 - leading)).expand(x.shape[:3])
                wanted = rotate_quantize(x, 64, to="fp8-head", rule=rule, tensor_scale=of_rows)
                assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
                assert torch.equal(found.scales, given)
    assert device.runs == 6  # for x, and for a copy of x
    device.launched.clear()
    rotate_quantize(normal(4, 8, dtype=HALF), to="fp8-head", tensor_scale=torch.ones(4))
    assert device.ran() == []


@pytest.mark.parametrize("rotate", [False, True])
def test_heads_for_attention_take_two_kernels(rotate: bool, device: EmulatedDevice) -> None:
    n = 64 if rotate else 1
    for x in (normal(2, 4, 5, 64, dtype=HALF), normal(2, 5, 4, 64, dtype=HALF).transpose(1, 2)):
        for heads in (None, 2):
            device.launched.clear()
            codes, scales = presets.fa3_fp8(x, heads, rotate=rotate)
            assert device.ran() == [
                f"n{n}-float16-to-largest_64-accurate",
                f"n{n}-float16-to-fp8_head_fa3_rounded-accurate",
            ]
            assert codes.shape == x.shape
            assert scales.shape == (2, heads or 4)


def test_gradients_of_weights_take_two_kernels(device: EmulatedDevice) -> None:
    for columns, group in ((256, 128), (48, 16)):
        x = normal(columns, 32, dtype=HALF).t()
        device.launched.clear()
        found = presets.transformer_engine_nvfp4(x)
        assert device.ran() == [
            f"n16-signed-float16-to-largest_{group}_rounded-accurate",
            "n16-signed-float16-to-nvfp4_16_transformer_engine_rounded-accurate",
        ]
        assert found.codes.shape == (32, columns // 2)


def test_scales_in_other_layouts_keep_the_order_of_rows(device: EmulatedDevice) -> None:
    x = normal(2, 3, 5, N, dtype=HALF).transpose(1, 2)
    for layout in (Layout.COLUMN_MAJOR, Layout.SWIZZLED):
        found = rotate_quantize(x, R, to="mxfp8", layout=layout.value)
        assert same(found, rotate_quantize(x.contiguous(), R, to="mxfp8", layout=layout.value))


ROTATIONS = {
    "none": 1,
    "64": 64,
    "a row": Rotation(N),
    "signs": R,
    "regular": Rotation(N, "regular", block=64),
    "a matrix": Rotation(192, "dao"),
}


@pytest.mark.parametrize(("name", "rule", "layout"), ALL)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_warmup_finds_the_quantizers_that_calls_find(
    rotation: str, name: str, rule: str, layout: str, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that quantize, and without."""
    found: list[Any] = []
    find, has_kernels = kernels.find, True

    def note(kind: kernels.Kind, elements: int) -> Any:
        found.append((kind, elements))
        return find(kind, elements) if has_kernels or kind.problem.io.form is None else None

    monkeypatch.setattr(kernels, "find", note)
    monkeypatch.setattr(kernels, "timed_of", lambda kind: [1] if has_kernels or kind.problem.io.form is None else [])
    monkeypatch.setattr(warmup, "_warmed_device", lambda device: -1)
    monkeypatch.setattr(warmup, "cuda_device", lambda index: None)
    monkeypatch.setattr(warmup, "_row", lambda columns, dtype, index: torch.empty(1, columns, dtype=dtype))
    by = ROTATIONS[rotation]
    x = normal(2, 3, getattr(by, "n", N), dtype=HALF)
    if name == "fp8-group" and x.shape[-1] % 128:
        return
    columns = None if isinstance(by, Rotation) else N
    options = {"to": name, "rule": rule, "layout": layout}
    for has_kernels in (True, False):
        for flag, numerics in ((True, "accurate"), (False, "fast"), (False, None)):
            asked = {"round_first": flag, "batch_invariant": flag}
            hadagen.warmup(by, HALF, rows=6, columns=columns, numerics=numerics, **asked, **options)
            warmed = set(found)
            found.clear()
            tables.forget()
            for each in ("accurate", "fast") if numerics is None else (numerics,):
                rotate_quantize(x, by, numerics=each, **asked, **options, **scale_for(name, x))
            called = {each for each in found if has_kernels or each[0].problem.io.form is None}
            found.clear()
            assert called <= warmed
            # Fast calls take accurate kernels too, where the scale asks for that.
            assert called == warmed or not has_kernels or numerics == "fast", "loaded in vain"
            assert bool(called) == (has_kernels or rotation != "none")


# ---- the way of a call -----------------------------------------------------------------------------------------------
def walk(call: Callable[[], Quantized]) -> tuple[set[str], int]:
    """The modules of the runtime that a call enters, and how many return statements the functions have that hand on its
    result."""
    entered: set[str] = set()
    returned: list[tuple[CodeType, Any]] = []

    def note(frame: FrameType, event: str, value: Any) -> None:
        package, _, room = frame.f_globals.get("__name__", "").rpartition(".")
        if package == "hadagen.runtime":
            entered.add(room)
            if event == "return":
                returned.append((frame.f_code, value))

    sys.setprofile(note)
    try:
        codes = call().codes
    finally:
        sys.setprofile(None)

    def holds(value: Any) -> bool:
        return any(map(holds, value)) if isinstance(value, (tuple, list, Quantized)) else value is codes

    sources = {dedent(getsource(code)) for code, value in returned if holds(value)}
    return entered, sum(isinstance(node, ast.Return) for text in sources for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("by", [64, Rotation(N), Rotation(N, signs=[1, -1] * (N // 2))], ids=["n", "plain", "signed"])
def test_the_way_of_a_call_is_short(by: Any, out: bool, device: EmulatedDevice) -> None:
    """In so many modules, but for those of a Rotation, and return statements, with a kernel: first, and again."""
    x = normal(4, N, dtype=HALF)
    options = {"out": new_out(rotate_quantize(x, by, to="mxfp8"))} if out else {}
    tables.forget()
    for rooms, most in ((12, 9), (4, 6)):
        entered, returns = walk(lambda: rotate_quantize(x, by, to="mxfp8", **options))
        assert len(entered - {"rotation", "sealed", "sealed_module"}) <= rooms, entered
        assert returns <= most
    assert len(device.launched) == 2 + out


def test_known_calls_protect_memory(device: EmulatedDevice) -> None:
    """What was like the result in one call need not be in the next."""
    by, given = Rotation(N, signs=[1, -1] * (N // 2)), torch.ones(())
    x = normal(4, N, dtype=HALF)
    wanted = rotate_quantize(x, by, to="int8-row")
    codes, scales = new_out(wanted)
    rotate_quantize(x, by, to="int8-row", out=(codes, scales))
    signs = by.get_buffer("packed_signs")
    memory = torch.empty(4 * N + 16, dtype=torch.int8)
    for out, message in (
        ((codes.t().contiguous().t(), scales), "out.codes is .* with the strides .1, 4."),
        ((codes, scales[:, 0]), "out.scales is "),
        ((codes, scales.half()), "out.scales is strided float16"),
        ((codes, None), "out.scales is a NoneType"),
        ((codes.view(2, 2, N), scales), "out.codes is "),
        ((x.view(torch.int8)[:, :N].as_strided((4, N), (N, 1)), scales), "out.codes shares memory with x"),
        ((memory[: 4 * N].view(4, N), memory[-32:-16].view(torch.float32).view(4, 1)), "out.scales shares memory with"),
        ((codes, signs[:16].view(torch.float32).view(4, 1)), "out.scales shares memory with packed_signs"),
        ((codes, scales.clone().requires_grad_()), "out.scales requires a gradient"),
    ):
        before = memory_of(signs).clone()
        device.launched.clear()
        with pytest.raises((TensorError, TypeError), match=message):
            rotate_quantize(x, by, to="int8-row", out=out)
        assert device.launched == []
        assert torch.equal(memory_of(signs), before)
    with torch.inference_mode():
        theirs = new_out(wanted)
        assert same(rotate_quantize(x, by, to="int8-row", out=theirs), wanted)
    with pytest.raises(TensorError, match="was made in inference mode"):
        rotate_quantize(x, by, to="int8-row", out=theirs)
    memory = torch.ones(4 * N, dtype=torch.float32)
    theirs = memory.view(torch.float8_e4m3fn)[: 4 * N].view(4, N)
    rotate_quantize(x, to="fp8-tensor", tensor_scale=given, out=(theirs.clone(), given))
    with pytest.raises(TensorError, match=r"out\.codes shares memory with tensor_scale"):
        rotate_quantize(x, to="fp8-tensor", tensor_scale=memory[0], out=(theirs, given))


def test_a_known_call_takes_signs_that_were_changed(device: EmulatedDevice) -> None:
    by, other = (Rotation(N, signs=signs * (N // 2)) for signs in ([1, -1], [-1, -1]))
    x = normal(4, N, dtype=HALF)
    out = new_out(rotate_quantize(x, by, to="int8-row"))
    for _ in range(2):
        rotate_quantize(x, by, to="int8-row", out=out)
    by.load_state_dict(other.state_dict())
    wanted = rotate_quantize(x, other, to="int8-row")
    assert same(rotate_quantize(x, by, to="int8-row", out=out), wanted)
    assert same(rotate_quantize(x, by, to="int8-row"), wanted)
    by.get_buffer("packed_signs")[3] ^= 1
    for options in ({}, {"out": out}):
        with pytest.raises(TensorError, match="was changed since it was made"):
            rotate_quantize(x, by, to="int8-row", **options)
