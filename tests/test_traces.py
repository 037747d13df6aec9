"""What torch.compile and torch.export make of the operators, where sizes, gradients and processes are unknown to them:
rows that nobody knows, derivatives that nobody asks for, and programs that are loaded elsewhere. No GPU needed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hadagen import Quantized, Rotation, hadamard_transform, presets, rotate_quantize
from hadagen.problem.formats import FORMATS, Element, Layout
from hadagen.prologues import SiluMul

N = 128
R = Rotation(N, signs=[1, -1] * (N // 2))
BEFORE = SiluMul(limit=7, alpha=1.702, beta=1, layout="interleaved", numerics="vllm")
Call = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
FORMS = [
    (name, rule, layout.value)
    for name, each in FORMATS.items()
    for rule in each.rules
    for layout in each.layouts
    # Every layout of a format with its last rule, and every rule with the first layout.
    if rule == each.rules[-1] or (layout is Layout.ROW_MAJOR and name not in ("mxfp4", "mxfp8"))
]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def quantized(name: str, rule: str, layout: str) -> Call:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given: Any = (
            x.float().abs().amax(-1) + 0.5 if name == "fp8-head" else 0.5 if FORMATS[name].needs_scale else None
        )
        q = rotate_quantize(x, R, to=name, rule=rule, layout=layout, tensor_scale=given)
        return (q.codes, q.scales) if q.format.element is Element.NONE else (q.codes, q.scales, q.dequantize())

    return call


def preset(of: Callable[[torch.Tensor], Quantized]) -> Call:
    return lambda x: (lambda q: (q.codes, q.scales, q.dequantize()))(of(x))


# [rows, N] → results. Of `transformer_engine_nvfp4`, rows of 16 tokens are columns.
PRESETS: dict[str, Call] = {
    "deepseek_v32_indexer": preset(presets.deepseek_v32_indexer),
    "deepseek_v4_fp4": preset(presets.deepseek_v4_fp4),
    "convrot_int8": preset(lambda x: presets.convrot_int8(x, 64)),
    "convrot_int4": preset(lambda x: presets.convrot_int4(x, 64)),
    "quarot_int4": preset(lambda x: presets.quarot_int4(x, 64)),
    "qutlass_mxfp4": preset(presets.qutlass_mxfp4),
    "transformer_engine_nvfp4": preset(
        lambda x: presets.transformer_engine_nvfp4(x.reshape(-1, 16 * N).view(-1, N).t())
    ),
    "fa3_fp8": lambda x: presets.fa3_fp8(x[None, None]),
}
CALLS: dict[str, Call] = {
    "hadamard_transform": lambda x: (hadamard_transform(x, 0.5),),
    "rotation": lambda x: (R(x), R.inverse(x)),
    **{" ".join(form): quantized(*form) for form in FORMS},
    **PRESETS,
}


def assert_same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert mine.stride() == theirs.stride() or mine.numel() == 0
        assert torch.equal(mine.float(), theirs.float()) or torch.equal(*(e.view(torch.uint8) for e in (mine, theirs)))


@pytest.mark.parametrize("name", CALLS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_one_compilation_takes_all_numbers_of_rows(name: str) -> None:
    """Also those that depend on values, such as the tokens of an expert."""
    call, unit = CALLS[name], 16 if "transformer_engine_nvfp4" in name else 1
    least = unit // 16  # tokens are columns there, and no tensor may have none

    def model(x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taken = (x * 2)[chosen]
        torch._check(taken.shape[0] >= least)
        return call(taken.reshape(-1, N))

    torch.compiler.reset()  # of one function only so many are kept
    presets._made_signs.cache_clear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = normal(9, unit, N)
    for rows in (5, 1, 9, least):
        chosen = torch.arange(9) < rows
        assert_same(compiled(x, chosen), model(x, chosen))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", CALLS)
def test_one_export_takes_all_numbers_of_rows(name: str) -> None:
    """Also where layouts are filled up to whole tiles."""
    call, unit = CALLS[name], 16 if "transformer_engine_nvfp4" in name else 1

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return call(x.view(-1, N))

    rows = torch.export.Dim("rows", min=1, max=8192)
    program = torch.export.export(Module(), (torch.zeros(5, unit, N),), dynamic_shapes={"x": {0: rows}})
    assert "torch.ops.hadagen." in program.graph_module.code
    for count in (1, 5, 300):
        x = normal(count, unit, N)
        assert_same(program.module()(x), Module()(x))


# ---- gradients -------------------------------------------------------------------------------------------------------
def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return rotate_quantize(x, R, to="mxfp8", gradient=True).dequantize()


def loss(x: torch.Tensor) -> torch.Tensor:
    return with_gradient(x).square().sum()


def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return with_gradient(x)


def tangent(x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(with_gradient, (x,), (x.flip(0),))[1]


DERIVATIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": with_gradient,
    "no_grad": without_grad,
    "detached": lambda x: with_gradient(x.detach()),
    "grad": torch.func.grad(loss),
    "grad of grad": torch.func.grad(lambda x: torch.func.grad(loss)(x).sum()),
    "jvp": tangent,
    "vjp": lambda x: torch.func.vjp(with_gradient, x)[1](x)[0],
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("way", DERIVATIVES)
def test_compiled_calls_have_the_derivatives_that_are_asked_for(way: str, requires_grad: bool) -> None:
    function = DERIVATIVES[way]
    x = normal(4, N).requires_grad_(requires_grad)
    torch.compiler.reset()
    found, wanted = torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert found.requires_grad == wanted.requires_grad
    if wanted.requires_grad:
        gradients = [torch.autograd.grad(each.sum(), x)[0] for each in (found, wanted)]
        assert torch.allclose(*gradients, atol=1e-6)


# ---- other processes -------------------------------------------------------------------------------------------------
def run(script: str, *arguments: str) -> str:
    """What Python prints in a process of its own."""
    found = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    return found.stdout


REGISTERED = """
import sys
names = sys.argv[1].split()
for name in names:
    __import__(name)
    both = {"hadagen", "torch"} <= set(sys.modules)
    assert both or not {"torch", "ctypes.util"} & set(sys.modules) or name == "torch", name
import torch, io
torch.ops.hadagen.linear, torch.ops.hadagen.call, torch.ops.hadagen.operand, torch.ops.hadagen.rotate_quantize
import torch.utils.flop_counter  # for which it waited too
assert torch.ops.hadagen.linear in torch.utils.flop_counter.flop_registry
assert "hadagen.runtime.registration" not in {type(each).__module__ for each in sys.meta_path}
assert torch.__spec__.loader.get_source("torch") and torch.__loader__ is torch.__spec__.loader
assert torch.load(sys.argv[2], weights_only=True).format.name == "mxfp8"
"""


@pytest.mark.parametrize("names", ["hadagen torch", "torch hadagen"])
def test_importing_both_registers_all(names: str, tmp_path: Path) -> None:
    torch.save(rotate_quantize(torch.ones(2, 64), to="mxfp8"), tmp_path / "q.pt")
    run(REGISTERED, names, str(tmp_path / "q.pt"))


def test_a_torch_that_cannot_be_imported_says_so_itself(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('damaged')")
    script = """
import sys, hadagen
sys.path.insert(0, sys.argv[1])
for _ in range(2):
    try:
        import torch
    except ImportError as error:
        assert str(error) == "damaged", error
    else:
        raise AssertionError
open(sys.argv[1] + "/torch.py", "w").write("first = 1")
import torch
assert torch.first
"""
    run(script, str(tmp_path))


class Everything(torch.nn.Module):
    """Every operator, with every kind of operand."""

    def __init__(self) -> None:
        super().__init__()
        signs = [1, -1] * 48
        orthogonal = torch.linalg.qr(torch.arange(9.0, dtype=torch.float64).view(3, 3).cos()).Q
        self.rotations = torch.nn.ModuleList(
            [
                Rotation(128),
                Rotation(64, signs=signs[:64]),
                Rotation(96),
                Rotation(96, signs=signs, signs_after=signs),
                Rotation(12, signs=signs[:12]),
                Rotation(64, "regular"),
                Rotation(96, torch.eye(3)[[1, 2, 0]]),
                Rotation(96, orthogonal, signs_after=signs),
            ]
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = [hadamard_transform(x, 0.5), hadamard_transform(x.clone(), inplace=True)]
        out += [hadamard_transform(x, out=torch.empty_like(x))]
        for rotation in self.rotations:
            part = x[:, : rotation.n].contiguous()
            out += [rotation(part), rotation.inverse(part), rotation(part.clone(), inplace=True)]
            q = rotate_quantize(part, rotation, to="int8-row")
            out += [q.codes, q.scales]
        for name, rule, layout in FORMS:
            out += quantized(name, rule, layout)(x)[:2]  # the C++ of several releases lacks float8 in arithmetic
        q = rotate_quantize(torch.zeros_like(x), N, to="mxfp8", layout="column-major")
        q = rotate_quantize(x, N, to="mxfp8", layout="column-major", out=q)
        out += [q.codes, q.scales]
        for call in PRESETS.values():
            out += call(x)[:2]
        rotation = self.rotations[1]
        out += [rotation(x, before=BEFORE), hadamard_transform(x[:, :24], before=BEFORE)]
        out += [rotation(x, before=BEFORE, out=torch.empty_like(x[:, :64]))]
        q = rotate_quantize(x, rotation, to="int8-row", before=BEFORE)
        return (*out, q.codes, q.scales)


LOAD = """
import sys, hadagen, torch
folder = sys.argv[1]
for load in (lambda: torch.export.load(folder + "/exported.pt2").module(),
             lambda: torch._inductor.aoti_load_package(folder + "/packaged.pt2")):
    model = load()
    for x, wanted in torch.load(folder + "/wanted.pt"):
        found = model(x)
        assert len(found) == len(wanted)
        for at, (mine, theirs) in enumerate(zip(found, wanted)):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), at
            same = torch.allclose if mine.dtype == torch.float32 else torch.equal
            if mine.dtype.itemsize == 1:
                mine, theirs = mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
            assert same(mine, theirs), at
"""


@pytest.mark.slow
def test_exported_and_packaged_programs_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    model, x = Everything(), normal(48, N)
    rows = 16 * torch.export.Dim("sixteenths", min=2, max=512)
    exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: rows}})
    torch.export.save(exported, tmp_path / "exported.pt2")
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "packaged.pt2"))
    samples = x, x[:32].clone(), normal(304, N)
    torch.save([(each, model(each)) for each in samples], tmp_path / "wanted.pt")
    run(LOAD, str(tmp_path))
