"""torchao's tensors of hadagen's codes, and its `quantize_` with hadagen. `make engine-test` downloads torchao."""

import copy
import importlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear

from hadagen import Rotation, TensorError, UsageError, rotate_quantize

TORCHAO = os.environ.get("HADAGEN_TEST_TORCHAO", "")
if not TORCHAO:
    pytest.skip("needs torchao: run make engine-test", allow_module_level=True)
sys.path.insert(0, TORCHAO)

from torchao.core.config import config_from_dict, config_to_dict  # noqa: E402
from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import MXTensor  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale  # noqa: E402
from torchao.quantization import quantize_  # noqa: E402

from hadagen.integrations.torchao import RotatedWeight, RotatedWeightConfig, _quantize, _rotation, to_torchao  # noqa: E402

KINDS = ("int8", "fp8", "mxfp8", "mxfp4", "nvfp4")
ROTATIONS = ("rows", 32, None)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    x[..., 3] *= 20
    return x.to(dtype)


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn.Linear(192, 256), torch.nn.GELU(), torch.nn.Linear(256, 64, bias=False)
    return torch.nn.Sequential(*layers).to(dtype)


# ---- tensors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 192), (130, 320), (3, 5, 64)])
@pytest.mark.parametrize(
    "options",
    [
        {"to": "int8-row"},
        {"to": "fp8-row"},
        {"to": "fp8-group", "group": 64},
        {"to": "fp8-tensor", "tensor_scale": 0.1},
        {"to": "mxfp8"},
        {"to": "mxfp4", "rule": "rceil"},
        {"to": "mxfp4", "layout": "swizzled"},
        {"to": "nvfp4", "tensor_scale": 0.02},
        {"to": "nvfp4", "tensor_scale": 0.02, "layout": "swizzled"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_values_are_the_same(options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if len(shape) == 3 and "layout" in options:
        pytest.skip("swizzled scales are of two dimensions")
    q = rotate_quantize(values(*shape), Rotation(shape[-1], block=64), **options)
    made = to_torchao(q, dtype)
    assert made.shape == shape
    assert made.dtype == dtype
    torch.testing.assert_close(made.dequantize(), q.dequantize(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("to", ["mxfp8", "mxfp4"])
def test_codes_and_swizzled_scales_are_those_of_torchao(to: str) -> None:
    x = values(130, 320)
    element = torch.float8_e4m3fn if to == "mxfp8" else torch.float4_e2m1fn_x2
    theirs = MXTensor.to_mx(x, element, scaling_mode=ScaleCalculationMode.RCEIL, is_swizzled_scales=True)
    ours = to_torchao(rotate_quantize(x, to=to, rule="rceil", layout="swizzled"))
    assert torch.equal(ours.qdata.view(torch.uint8), theirs.qdata.view(torch.uint8))
    assert torch.equal(ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))


def test_nvfp4_is_that_of_torchao() -> None:
    x = values(130, 320)
    scale = per_tensor_amax_to_scale(x.abs().amax())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=True)
    ours = to_torchao(rotate_quantize(x, to="nvfp4", tensor_scale=scale, layout="swizzled"))
    assert torch.equal(ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))
    assert torch.equal(ours.dequantize(), theirs.dequantize())


@pytest.mark.parametrize("kind", ["fp8", "mxfp8", "mxfp4"])
def test_torchao_multiplies_both(kind: str) -> None:
    x, weight = (_quantize(values(n, 192), kind, _rotation(192, 192)) for n in (40, 64))
    exact = x.dequantize(torch.float64) @ weight.dequantize(torch.float64).T
    found = linear(to_torchao(x), to_torchao(weight))
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "int4-row"}, "torchao has no tensor for int4-row; use int8-row"),
        ({"to": "mxfp4", "rule": "qutlass"}, "torchao has no tensor for the rule qutlass of mxfp4; use another"),
        ({"to": "mxfp8", "layout": "column-major"}, "no tensor for column-major scales of mxfp8 with 2 dimensions"),
    ],
)
def test_what_torchao_does_not_have_is_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        to_torchao(rotate_quantize(values(4, 64), **options))
    with pytest.raises(TypeError, match="q is a Tensor; pass what rotate_quantize returned"):
        to_torchao(values(4, 64))  # type: ignore[arg-type]


# ---- quantize_ -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_multiplies_rotated_codes(kind: str, rotation: Any, dtype: torch.dtype) -> None:
    layer, x = model(dtype)[0], values(2, 5, 192, dtype=dtype)
    exact = linear(x.double(), layer.weight.double(), layer.bias.double())
    of_rows = _rotation(192, {"rows": 192, None: 1}.get(rotation, rotation))
    turned = [_quantize(each.reshape(-1, 192), kind, of_rows).dequantize(torch.float64) for each in (x, layer.weight)]
    expected = (turned[0] @ turned[1].T).view(2, 5, 256) + layer.bias.double()
    quantize_(layer, RotatedWeightConfig(kind, rotation))
    assert isinstance(layer.weight, RotatedWeight)
    found = layer(x)
    assert found.dtype == dtype
    # Products of codes are exact in float32; MX tensors of torchao are multiplied in x's type on a CPU.
    margin = float(expected.abs().max()) * (2e-2 if dtype == torch.bfloat16 or kind == "fp8" else 1e-4)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=margin)
    assert float((found - exact).norm() / exact.norm()) < (0.3 if kind.endswith("fp4") else 0.08)
    weight = model(dtype)[0].weight
    assert float((layer.weight.dequantize() - weight).norm() / weight.norm()) < (0.15 if kind.endswith("fp4") else 0.03)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_compiles_and_is_stored(kind: str, rotation: Any) -> None:
    made, x = model(), values(10, 192)
    quantize_(made, RotatedWeightConfig(kind, rotation))
    expected = made(x)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        loaded = model()
    loaded.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(loaded(x), expected)
    assert torch.equal(copy.deepcopy(made)(x), expected)
    torch._dynamo.reset()
    _rotation.cache_clear()
    compiled = torch.compile(loaded, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x[:3]), made(x[:3]))


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_takes_any_number_of_rows(kind: str, rotation: Any) -> None:
    made = model()
    quantize_(made, RotatedWeightConfig(kind, rotation))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(made, fullgraph=True, dynamic=True, backend=counter)
    for rows in (40, 2, 16, 17, 33):
        torch.testing.assert_close(compiled(values(rows, 192)), made(values(rows, 192)))
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_model_in_a_cuda_graph(kind: str, rows: int) -> None:
    made, x = model().cuda(), values(rows, 192).cuda()
    quantize_(made, RotatedWeightConfig(kind))
    expected, stream = made(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        made(x)
        with torch.cuda.graph(graph, stream=stream):
            found = made(x)
        found.zero_()
        graph.replay()
    stream.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_quantizes_and_stores(tmp_path: Path, kind: str) -> None:
    """In torchao's safetensors format."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1, "vocab_size": 32}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).bfloat16()
    base.save_pretrained(tmp_path / "base")
    options = {"dtype": torch.bfloat16, "quantization_config": TorchAoConfig(RotatedWeightConfig(kind, 32))}
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options)
    made.save_pretrained(tmp_path / "made")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.bfloat16)
    tokens = torch.arange(8)[None]
    for each in (made, loaded):
        assert isinstance(each.model.layers[0].mlp.down_proj.weight.data, RotatedWeight)
    assert torch.equal(loaded(tokens).logits, made(tokens).logits)


def test_a_configuration_is_stored_as_json() -> None:
    config = RotatedWeightConfig("mxfp4", 32)
    assert config_from_dict(config_to_dict(config)) == config


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(UsageError, match="kind = 'q6_k' is not known; choose one of int8, fp8, mxfp8, mxfp4, nvfp4"):
        RotatedWeightConfig("q6_k")
    for rotation in ("blocks", 0, True, 1.5):
        with pytest.raises(UsageError, match=f"rotation = {rotation!r} is not known; pass rows, the size of blocks"):
            RotatedWeightConfig("fp8", rotation)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="block = 100 does not divide n = 192"):
        quantize_(model(), RotatedWeightConfig("fp8", 100))
    made = model()
    quantize_(made, RotatedWeightConfig())
    with pytest.raises(UsageError, match="a weight is a RotatedWeight of bfloat16; quantize the original model"):
        quantize_(made, RotatedWeightConfig())
    for shape in ((), (3, 190)):
        with pytest.raises(TensorError, match=rf"has the shape \({', '.join(map(str, shape))}\), but .* rows of 192"):
            made(torch.ones(shape, dtype=torch.bfloat16))
    with torch.enable_grad(), pytest.raises(TensorError, match=r"requires a gradient.*; use torch.no_grad\(\)"):
        made(values(4, 192).requires_grad_())


def test_a_torchao_that_has_changed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torchao.quantization.Int8Tensor")
    monkeypatch.delitem(sys.modules, "hadagen.integrations.torchao")
    with pytest.raises(ImportError, match=r"it has no torchao\.quantization\.Int8Tensor; install torchao 0\.18\.0"):
        importlib.import_module("hadagen.integrations.torchao")
