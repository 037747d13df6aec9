"""Programs that run without hadagen, and what other tools of PyTorch make of its operators. No GPU needed."""

import ctypes
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hadagen import Quantized, Rotation, UsageError, decompose, hadamard_transform, rotate_quantize
from hadagen.problem.formats import FORMATS, Layout
from hadagen.prologues import GeluMul, SiluMul

N = 192  # columns of x
GIVEN = torch.linalg.qr(torch.arange(64.0, dtype=torch.float64).view(8, 8).cos()).Q


def signs(n: int) -> list[int]:
    return [1 if i % 3 else -1 for i in range(n)]


# With every kind of operand.
ROTATIONS = [
    Rotation(64),
    Rotation(128, block=64, signs=signs(64)),
    Rotation(96),
    Rotation(12, signs=signs(12), signs_after=signs(12)),
    Rotation(64, "regular", signs_after=signs(64)),
    Rotation(96, torch.eye(3)[[1, 2, 0]], signs=signs(96)),
    Rotation(96, GIVEN[:3, :3].double() @ torch.linalg.inv(GIVEN[:3, :3])),
    Rotation(64, [GIVEN, GIVEN.float()]),
]
Call = Callable[[torch.Tensor], Any]
BEFORE = SiluMul(limit=7, alpha=1.702, beta=1, layout="interleaved", numerics="vllm")
CALLS: list[Call] = [
    *ROTATIONS,
    lambda x: hadamard_transform(x[:, :128], 0.3),
    lambda x: hadamard_transform(x[:, :48]),
    lambda x: hadamard_transform(x[:, :1]),
    lambda x: hadamard_transform(x[:, :64].clone(), inplace=True),
    lambda x: hadamard_transform(x[:, :64], out=torch.empty_like(x[:, :64])),
    lambda x: ROTATIONS[2](x[:, :96].clone(), inplace=True),
    lambda x: ROTATIONS[3].inverse(x[:, :12]),
    lambda x: ROTATIONS[2](x, before=SiluMul()),
    lambda x: hadamard_transform(x[:, :96], before=GeluMul()),
    lambda x: rotate_quantize(x, 64, to="int8-row"),
    lambda x: rotate_quantize(x[:, :64], ROTATIONS[4], to="int8-row", rule="convrot"),
    lambda x: rotate_quantize(x, 64, to="int8-row", round_first=True).dequantize(),
    lambda x: rotate_quantize(x.view(-1, 2, 96).transpose(0, 1), 32, to="int8-row"),
    lambda x: rotate_quantize(x, 32, to="int8-row", before=BEFORE),
    lambda x: rotate_quantize(x, ROTATIONS[2], to="int8-row", before=GeluMul()),
    lambda x: rotate_quantize(x[:, :128], 128, to="fp8-group"),
    lambda x: rotate_quantize(x, to="fp8-row").dequantize(),
    lambda x: rotate_quantize(x, 64, to="fp8-tensor", tensor_scale=0.01),
    lambda x: rotate_quantize(x[None], 64, to="fp8-head", rule="fa3", tensor_scale=torch.tensor([2.0])),
]
FORMS = [
    (name, rule, layout.value)
    for name, each in FORMATS.items()
    for rule in each.rules
    for layout in each.layouts
    if not each.by_head and (rule == each.rules[-1] or layout is Layout.ROW_MAJOR)
]


def of_form(name: str, rule: str, layout: str) -> Call:
    given = 0.5 if FORMATS[name].needs_scale else None
    return lambda x: rotate_quantize(x[:, :128], 32, to=name, rule=rule, layout=layout, tensor_scale=given)


class Model(torch.nn.Module):
    """The results of calls, one after the other."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls
        self.rotations = torch.nn.ModuleList(each for each in calls if isinstance(each, Rotation))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        made = [call(x[:, : call.n]) if isinstance(call, Rotation) else call(x) for call in self.calls]
        return [part for each in made for part in (each if isinstance(each, Quantized) else (each,))]


def parts(calls: list[Call]) -> list[list[Call]]:
    """A few calls of different kinds in each: one model takes less time than a model for each call."""
    return [calls[at::12] for at in range(12)]


def normal(rows: int, columns: int = N) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Codes may be those of neighbors where values are nearly in the middle."""
    for at, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), at
        if mine.dtype.itemsize == 1:
            differ = mine.contiguous().view(torch.uint8) != theirs.contiguous().view(torch.uint8)
            assert differ.sum() <= 0.01 * differ.numel(), at
        elif theirs.numel() and theirs.dtype.is_floating_point:
            tolerance = 4e-3 if theirs.dtype == torch.float16 else 2e-6
            assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max(), at


# ---- decompose -------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("calls", [*parts(CALLS), *parts([of_form(*form) for form in FORMS])])
def test_a_decomposed_program_has_no_operator_of_hadagen(calls: list[Call]) -> None:
    model = Model(calls)
    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(model, (normal(4),), dynamic_shapes={"x": {0: rows}})
    decomposed = decompose(exported)
    assert "hadagen" in exported.graph_module.code
    assert "hadagen" not in decomposed.graph_module.code
    stored = io.BytesIO()
    torch.export.save(decomposed, stored)
    stored.seek(0)
    module = torch.export.load(stored).module()
    for count in (3, 300):
        x = normal(count)
        found, wanted = list(module(x)), model(x)
        assert_close(found, wanted)
        assert [each.stride() for each in found] == [each.stride() for each in wanted]


def test_decompose_takes_exported_programs_only() -> None:
    with pytest.raises(TypeError, match=r"program is a Rotation; pass what torch\.export\.export returned"):
        decompose(Rotation(4))


def test_a_rotation_is_exported_by_itself() -> None:
    rotation, x = Rotation(12, signs_after=signs(12)), normal(2, 12)
    assert torch.equal(torch.export.export(rotation, (x,)).module()(x), rotation(x))


@pytest.mark.skipif(not hasattr(torch.export, "draft_export"), reason="this release of PyTorch lacks draft_export")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_draft_export_takes_calls() -> None:
    model = Model([ROTATIONS[0], ROTATIONS[3], lambda x: rotate_quantize(x, 64, to="int8-row")])
    assert_close(list(torch.export.draft_export(model, (normal(3),)).module()(normal(3))), model(normal(3)))


# ---- ONNX ------------------------------------------------------------------------------------------------------------
def runtime() -> Any:
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def of_onnx(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor of a result of ONNX Runtime, which gives NumPy no FP8."""
    if "float8e4m3fn" not in value.data_type():
        return torch.from_numpy(value.numpy().copy())
    taken = bytearray(ctypes.string_at(value.data_ptr(), like.numel()))
    return torch.frombuffer(taken, dtype=torch.float8_e4m3fn).view(tuple(value.shape()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("calls", parts(CALLS))
@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_gives_the_same(calls: list[Call], dtype: torch.dtype, tmp_path: Path) -> None:
    onnx = runtime()
    model = Model(calls)
    rows = torch.export.Dim("rows")
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": {"x": {0: rows}}, "verbose": False}
    torch.onnx.export(model, (normal(4).to(dtype),), tmp_path / "model.onnx", **options)
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 1 << 20  # no H of all rows
    session = onnx.InferenceSession(tmp_path / "model.onnx")
    for count in (1, 7, 300):
        x = normal(count).to(dtype)
        given = {session.get_inputs()[0].name: onnx.OrtValue.ortvalue_from_numpy(x.numpy())}
        wanted = model(x)
        found = zip(session.run_with_ort_values(None, given), wanted, strict=True)
        assert_close([of_onnx(*each) for each in found], wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "dynamo", "said"),
    [
        (of_form("mxfp8", "floor", "row-major"), True, "mxfp8 cannot be exported to ONNX; choose int8-row, or an fp8"),
        (of_form("fp8-group", "exact", "column-major"), True, "layout=column-major cannot be exported to ONNX"),
        (hadamard_transform, False, "dynamo=False does not know hadagen's operators; pass dynamo=True"),
        (
            lambda x: rotate_quantize(x, 64, to="int8-row"),
            False,
            "dynamo=False does not know hadagen's operators; pass dynamo=True",
        ),
        (
            lambda x: ROTATIONS[2](x, before=SiluMul()),
            False,
            "dynamo=False does not know hadagen's operators; pass dynamo=True",
        ),
    ],
)
def test_onnx_refuses(call: Call, dynamo: bool, said: str, tmp_path: Path) -> None:
    runtime()
    with pytest.raises(Exception, match=said):
        torch.onnx.export(Model([call]), (normal(2),), tmp_path / "model.onnx", dynamo=dynamo)


# ---- torch.jit and FLOPs ---------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model", [Rotation(4), torch.nn.Sequential(torch.nn.Linear(4, 4), Rotation(4))])
def test_torch_jit_script_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(UsageError, match=r"script cannot compile a Rotation; use torch\.export\.export, or torch\.jit"):
        torch.jit.script(model)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (lambda x: hadamard_transform(x[:, :64]), 64 * 6),
        (lambda x: hadamard_transform(x[:, :48]), 64 * 6),
        (lambda x: hadamard_transform(x[:, :64].clone(), inplace=True), 64 * 6),
        (lambda x: hadamard_transform(x[:, :64], out=torch.empty_like(x[:, :64])), 64 * 6),
        (ROTATIONS[1], 128 * 6),
        (lambda x: Rotation(96, GIVEN[:3, :3])(x[:, :96]), 96 * (5 + 2 * 3)),
        (lambda x: Rotation(48)(x[:, :48]), 48 * 2 * 48),
        (lambda x: rotate_quantize(x, 64, to="int8-row"), N * 6),
        (lambda x: rotate_quantize(x, 32, to="int8-row", before=SiluMul()), N // 2 * 5),
    ],
)
def test_flops_are_counted(call: Call, flops: int) -> None:
    x = normal(3)[:, :128] if isinstance(call, Rotation) else normal(3)
    with FlopCounterMode(display=False) as counter:
        call(x)
    assert counter.get_total_flops() == 3 * flops
