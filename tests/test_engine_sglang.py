"""SGLang's plugins with hadagen, on its real registry of hooks. `make engine-test` downloads it; other runs skip this.

Modules of SGLang that need a GPU are replaced by modules with the same functions: those that this file computes have
the signatures of the real ones, and all others are the real ones.
"""

import ast
import copy
import importlib.metadata
import inspect
import logging
import os
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import hadagen
from hadagen.compat.fast_hadamard_transform import hadamard_transform_ref
from hadagen.errors import UsageError
from hadagen.integrations import host
from hadagen.integrations import sglang as ours

SGLANG = os.environ.get("HADAGEN_TEST_SGLANG", "")
pytestmark = pytest.mark.skipif(not SGLANG, reason="needs SGLang: run make engine-test")
ROOT = Path(__file__).resolve().parent.parent
KPOOL = "sglang.srt.layers.attention.dsa.dsa_indexer_kpool"
NAMES = ["hadamard_transform", *(f"hadamard_transform_{order}n" for order in (12, 20, 28, 40))]


def source_of(module: str, name: str) -> ast.FunctionDef:
    """The real definition of a function, or of a method as Class.method."""
    path = Path(SGLANG, *module.split(".")).with_suffix(".py")
    nodes: list[Any] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        (found,) = (each for each in nodes if getattr(each, "name", None) == part)
        nodes = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


def real(module: str, name: str, **names: Any) -> Any:
    """The real function, without decorators, where these names are those of its module."""
    definition = source_of(module, name)
    definition.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    names["__name__"] = module
    exec(compile(ast.Module([*future, definition], []), module, "exec"), names)
    return names[definition.name]


def with_real_signature(module: str, name: str, function: Any) -> Any:
    """A copy of the function, after a look at whether the real one has the same parameters and defaults."""
    made = types.FunctionType(function.__code__, globals(), name, function.__defaults__)
    given, expected = (inspect.signature(each).parameters.values() for each in (made, real(module, name)))
    assert [(each.name, each.default) for each in given] == [(each.name, each.default) for each in expected]
    return made


def module_of(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> Any:
    """A module with these contents, in place of the real one. Packages above it are the real folders."""
    *parents, _ = name.split(".")
    for depth in range(1, len(parents) + 1):
        package = ".".join(parents[:depth])
        if package not in sys.modules:
            made = types.ModuleType(package)
            made.__path__ = [str(Path(SGLANG, *parents[:depth]))]
            monkeypatch.setitem(sys.modules, package, made)
    made = types.ModuleType(name)
    vars(made).update(contents)
    for each in contents.values():
        if isinstance(each, types.FunctionType):
            each.__module__ = name
    monkeypatch.setitem(sys.modules, name, made)
    return made


def theirs(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    calls.append("hadamard")
    return hadamard_transform_ref(x, scale)


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel of Triton computes it."""
    calls.append("act_quant")
    groups = x.float().unflatten(-1, (-1, block_size))
    scales = groups.abs().amax(-1).clamp(min=1e-4) * torch.tensor(1 / 448)
    scales = scales.log2().ceil().exp2() if scale_fmt else scales
    codes = (groups / scales[..., None]).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
    return codes, scales


class Indexer:
    """What the real methods use."""

    head_dim, rope_head_dim, block_size, alt_stream = 128, 64, 128, None
    use_dsa_indexer_fusion = use_aiter_fused_fp8_writer = False
    _maybe_rotate: Any
    _get_q_k_bf16: Any

    def __init__(self, scale_fmt: str | None = "ue8m0") -> None:
        self.scale_fmt = scale_fmt
        self.wq_b = lambda q: (q @ queries(64, 4 * 128), None)
        self.wk = lambda x: (x @ queries(32, 128), None)
        self.k_norm = lambda key: key
        self.rotary_emb = lambda positions, q, k: (q * 1, k * 1)


def with_real_methods(monkeypatch: pytest.MonkeyPatch, rotate: Any) -> type[Indexer]:
    names: dict[str, Any] = {"torch": torch, "rotate_activation": rotate, "nullcontext": nullcontext}
    names |= {"is_cp_active": lambda _: False, "rearrange": lambda x, _, d: x.unflatten(-1, (-1, d))}
    for name in ("_maybe_rotate", "_get_q_k_bf16", "_update_rope_guarded"):
        function = real(ours._INDEXER, f"Indexer.{name}", **names)
        made = staticmethod(function) if name == "_update_rope_guarded" else function
        monkeypatch.setattr(Indexer, name, made, raising=False)
    return Indexer


calls: list[str] = []


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang with its real registry, and stand-ins; a function that loads plugins as SGLang does."""
    calls.clear()
    monkeypatch.setattr(host, "_warned", set())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    hadamard = {name: with_real_signature(ours._HADAMARD, name, theirs) for name in NAMES}
    module_of(monkeypatch, ours._HADAMARD, **hadamard)
    module_of(monkeypatch, ours._ACT_QUANT, act_quant=with_real_signature(ours._ACT_QUANT, "act_quant", act_quant))
    rotate = real(ours._INDEXER, "rotate_activation", torch=torch, _is_hip=False, _is_xpu=False)
    module_of(monkeypatch, ours._INDEXER, rotate_activation=rotate, Indexer=with_real_methods(monkeypatch, rotate))
    monkeypatch.setattr(host, "version", {"sglang": ours.HOST.tested}.__getitem__)
    module_of(monkeypatch, KPOOL, rotate_activation=rotate)  # which imports it by name, before plugins are loaded
    for name in ("sglang.srt.environ", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugins = importlib.import_module("sglang.srt.plugins")
    assert plugins.__file__ == str(Path(SGLANG, "sglang", "srt", "plugins", "__init__.py"))
    (value,) = (
        line.partition("=")[2].strip(' "')
        for line in (ROOT / "pyproject.toml")
        .read_text()
        .partition('entry-points."sglang.srt.plugins"]')[2]
        .splitlines()[1:2]
    )
    entry = importlib.metadata.EntryPoint("hadagen", value, "sglang.srt.plugins")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    with torch.inference_mode():  # as SGLang runs models
        yield plugins.load_plugins
    for name in [each for each in sys.modules if each.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)


def queries(*shape: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 4
    x[0, ..., 5] = 100
    return x.bfloat16()


def at(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


def test_transforms_are_those_of_hadagen(sglang: Any) -> None:
    x = {1: 64, 12: 96, 20: 160, 28: 224, 40: 320}
    before = {name: at(ours._HADAMARD, name) for name in NAMES}
    sglang()
    for name, length in zip(NAMES, x.values(), strict=True):
        rows = queries(3, length)
        found = at(ours._HADAMARD, name)(rows, scale=0.25)
        assert found.dtype == rows.dtype
        assert torch.equal(found, getattr(ours.functions, name)(rows, 0.25))
        assert at(ours._HADAMARD, name).__wrapped__ is before[name]
    assert calls == []


def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The lengths that rotate_quantize rotates, or None, in the order of its calls."""
    lengths, quantize = [], ours.rotate_quantize
    monkeypatch.setattr(ours, "rotate_quantize", lambda x, n, **rest: lengths.append(n) or quantize(x, n, **rest))
    return lengths


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("where", ["dsa_indexer", "another version", "dsa_indexer_kpool"])
def test_queries_are_rotated_and_quantized(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, where: str, scale_fmt: str | None
) -> None:
    """At once in the indexer of the tested version, else by a kernel each."""

    def quantized(x: torch.Tensor) -> Any:
        rotate = at(KPOOL, "rotate_activation") if "kpool" in where else Indexer(scale_fmt)._maybe_rotate
        rotated = rotate(x)
        x.zero_()  # as in a buffer of a CUDA graph
        return at(ours._ACT_QUANT, "act_quant")(rotated, 128, scale_fmt)

    x = queries(5, 8, 128)
    if where == "another version":
        monkeypatch.setattr(host, "version", {"sglang": "0.5.24"}.__getitem__)
    codes, scales = quantized(x.clone())
    assert calls == ["hadamard", "act_quant"]
    sglang()
    calls.clear()
    lengths = fused_calls(monkeypatch)
    found, of_found = quantized(x.clone())
    assert lengths == [128 if where == "dsa_indexer" else None]
    assert calls == []
    assert (found.dtype, found.shape, of_found.dtype, of_found.shape) == (codes.dtype, x.shape, scales.dtype, (5, 8, 1))
    preset = hadagen.presets.deepseek_v32_indexer(x, power_of_two=scale_fmt is not None)
    assert torch.equal(found.view(torch.uint8), preset.codes.view(torch.uint8))
    assert torch.equal(of_found, preset.scales)
    # Rotated values differ by a rounding to bfloat16, of which a code has 4 bits.
    torch.testing.assert_close(of_found, scales, rtol=2**-7, atol=0)
    exact = hadamard_transform_ref(x.double(), 128**-0.5)
    for each in (found.double() * of_found, codes.double() * scales):
        assert float((each - exact).norm() / exact.norm()) < 0.05


def test_only_act_quant_of_the_indexer_uses_a_quantized_query(sglang: Any) -> None:
    sglang()
    query, quantize = Indexer()._maybe_rotate(queries(5, 8, 128)), at(ours._ACT_QUANT, "act_quant")
    for use, name in {
        (lambda: quantize(query, 64, "ue8m0"), "act_quant with block_size=64 and scale_fmt='ue8m0'"),
        (lambda: quantize(query), "act_quant with block_size=128 and scale_fmt=None"),
        (lambda: query.data_ptr(), "data_ptr"),
        (lambda: query[:2], "indexing"),
        (lambda: torch.ones(1) * query, "mul"),
        (lambda: torch.empty(5, 8, 128).copy_(query), "copy_"),
        (lambda: copy.copy(query), "__setstate__"),
    }:
        with pytest.raises(UsageError, match=f"^{name} needs the values of a rotated query, .*; set HADAGEN_INT"):
            use()


def test_what_hadagen_does_not_quantize_is_quantized_by_the_host(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang()
    quantize = at(ours._ACT_QUANT, "act_quant")
    for x, block in ((queries(2, 3, 256), 256), (queries(2, 3, 128).double(), 128)):
        monkeypatch.setattr(Indexer, "block_size", block)
        expected = act_quant(hadagen.hadamard_transform(x, x.shape[-1] ** -0.5), block)
        calls.clear()
        found = quantize(Indexer()._maybe_rotate(x), block)
        assert calls == ["act_quant"]
        assert all(torch.equal(each.float(), other.float()) for each, other in zip(found, expected, strict=True))
    monkeypatch.setattr(Indexer, "use_dsa_indexer_fusion", True)
    assert Indexer()._maybe_rotate(x) is x


def test_the_real_indexer_calls_one_kernel_for_queries(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code from projections to codes."""
    q, x = queries(6, 64) / 8, queries(6, 32) / 8
    indexer = Indexer()
    expected = indexer._get_q_k_bf16(q, x, None, False, None)
    sglang()
    lengths = fused_calls(monkeypatch)
    query, key, _ = indexer._get_q_k_bf16(q, x, None, False, None)
    codes, scales = at(ours._ACT_QUANT, "act_quant")(query, indexer.block_size, indexer.scale_fmt)
    assert lengths == [128]
    torch.testing.assert_close(key, expected[1], rtol=2**-7, atol=1e-2)  # kernels store keys
    values = codes.double() * scales
    assert float((values - expected[0]).norm() / values.norm()) < 0.05


@pytest.mark.parametrize("module", [ours._INDEXER, "sglang.srt.layers.attention.dsa.dsa_prefill_cuda_graph"])
def test_queries_are_only_quantized(module: str) -> None:
    """In the sources: the query that `_get_q_k_bf16` returns goes to act_quant alone."""
    path = Path(SGLANG, *module.split(".")).with_suffix(".py")
    functions = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.FunctionDef)]
    callers = [each for each in functions if any(name_of(call) == "_get_q_k_bf16" for call in ast.walk(each))]
    assert callers
    for caller in callers:
        names = [each for each in ast.walk(caller) if isinstance(each, ast.Name) and each.id == "query"]
        read = [each for each in names if isinstance(each.ctx, ast.Load)]
        quantized = [call.args[0] for call in ast.walk(caller) if name_of(call) == "act_quant"]
        assert read
        assert all(each in quantized for each in read), f"{caller.name} uses query elsewhere"


def name_of(node: Any) -> str | None:
    """The name of what a call calls."""
    function = getattr(node, "func", None)
    return getattr(function, "id", getattr(function, "attr", None))


@pytest.mark.parametrize("off", ["switch", "no CUDA"])
def test_hooks_are_switched_off(sglang: Any, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    before = at(ours._ACT_QUANT, "act_quant")
    if off == "switch":
        monkeypatch.setenv(host.SWITCH, "vllm")
    else:
        monkeypatch.setattr(torch.version, "cuda", None)
    sglang()
    assert at(ours._ACT_QUANT, "act_quant") is before


def test_an_sglang_that_has_changed_keeps_its_own(sglang: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    module_of(monkeypatch, ours._INDEXER, Indexer=type("Indexer", (), {"_maybe_rotate": lambda self, hidden: hidden}))
    before = at(ours._ACT_QUANT, "act_quant")
    with pytest.warns(UserWarning, match="Indexer._maybe_rotate takes self, hidden, not self, x; hadagen was tested w"):
        sglang()
    assert at(ours._ACT_QUANT, "act_quant") is before
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
