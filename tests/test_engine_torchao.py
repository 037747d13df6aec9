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

COARSE = ("int4", "int4-row", "mxfp4", "nvfp4")
KINDS = ("int8", "fp8", "int4", "mxfp8", "mxfp4", "nvfp4")
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


# ---- the weight as a tensor ------------------------------------------------------------------------------------------
def weight_of(kind: str, rotation: Any = 32, rows: int = 300, seed: int = 0) -> Any:
    """A weight whose rows have other codes and scales each: three tiles of rows and columns, the last not full."""
    layer = torch.nn.Linear(320, rows, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    layer.weight.copy_(torch.randn(rows, 320, generator=generator) * torch.rand(rows, 1, generator=generator))
    quantize_(layer, RotatedWeightConfig(kind, rotation))
    return layer.weight.detach()


PARTS = {
    "a tile": lambda w: w[128:256],
    "first rows": lambda w: w[:16],
    "last rows": lambda w: w[-45:],
    "rows over tiles": lambda w: w[100:290],
    "rows of rows": lambda w: w[100:290][60:100],
    "no rows": lambda w: w[7:7],
    "narrow": lambda w: w.narrow(0, 3, 200),
    "chunk": lambda w: w.chunk(7)[4],
    "last chunk": lambda w: w.chunk(7, 0)[-1],
    "split": lambda w: w.split(90)[3],
    "split of sizes": lambda w: w.split([10, 150, 140])[1],
    "all": lambda w: w[:],
    "view": lambda w: w.view(-1, 320),
    "columns": lambda w: w[:, 128:256],
    "last columns": lambda w: w[:, 256:],
    "columns of rows": lambda w: w[130:][5:, :128],
    "rows of columns": lambda w: w.narrow(1, 128, 192)[130:],
    "t": lambda w: w.t(),
    "T": lambda w: w[5:].T,
    "mT": lambda w: w.mT[128:, 130:],
    "transpose": lambda w: w.transpose(1, 0).t(),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("kind", [*KINDS, "int4-row"])
def test_a_part_is_a_view(kind: str, part: Any) -> None:
    """Its values, its product, a copy of it, and what is written to it, and to nothing else."""
    whole, other = weight_of(kind), weight_of(kind, seed=1)
    name = {"nvfp4": "per_tensor_scale", "int8": "scale", "fp8": "scale", "int4-row": "scale"}.get(kind)
    if name:
        getattr(other, name).copy_(getattr(whole, name))  # which all columns of a row, or all rows, share
    expected, mine = part(whole.dequantize()), part(whole)
    assert isinstance(mine, RotatedWeight)
    for each in (mine, mine.clone(), mine.contiguous(), copy.deepcopy(mine), mine.to(torch.float32).to(torch.bfloat16)):
        assert each.shape == expected.shape
        assert torch.equal(each.dequantize(), expected)
    straight = mine.t() if mine.is_transposed else mine
    x = values(3, straight.shape[1])
    quantized = _quantize(x, kind, _rotation(x.shape[1], 32)).dequantize(torch.float32)
    turned = _rotation(x.shape[1], 32).inverse(quantized) @ straight.dequantize(torch.float32).T
    if turned.numel():  # torchao multiplies no FP4 tensor without rows
        torch.testing.assert_close(linear(x, straight).float(), turned, rtol=0.02, atol=0.05)
    wanted = whole.dequantize()
    part(wanted).copy_(part(other.dequantize()))
    part(whole).copy_(part(other))
    assert torch.equal(whole.dequantize(), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_stores_and_loads(kind: str, rotation: Any, tmp_path: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    made, other = model(), model()
    other[0].weight.mul_(2)
    for each in (made, other):
        quantize_(each, RotatedWeightConfig(kind, rotation))
    checkpoint.save(get_model_state_dict(made), checkpoint_id=tmp_path, no_dist=True)
    empty = copy.deepcopy(other).to("meta").to_empty(device="cpu")
    for each in (other, empty):
        state = get_model_state_dict(each)
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
        set_model_state_dict(each, state)
        assert torch.equal(each(values(3, 192)), made(values(3, 192)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_another_type(kind: str, dtype: torch.dtype) -> None:
    made, x = model(), values(5, 192, dtype=dtype)
    quantize_(made, RotatedWeightConfig(kind))
    expected = made(x.bfloat16())
    found = made.to(dtype)(x)
    assert found.dtype == made[0].weight.dtype == dtype
    assert float((found - expected).norm() / expected.norm()) < (0.2 if kind in COARSE else 0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_a_transposed_weight(kind: str) -> None:
    weight, x = weight_of(kind), values(4, 320)
    for found in (x @ weight.t(), torch.mm(x, weight.T), torch.matmul(x, weight.mT), x.mm(weight.transpose(0, 1))):
        assert torch.equal(found, linear(x, weight))
    # As parts of DTensors come.
    aten, bias = torch.ops.aten, values(300)
    assert torch.equal(aten.mm.default(x, weight.t()), linear(x, weight))
    assert torch.equal(aten.addmm.default(bias, x, weight.t()), linear(x, weight, bias))
    found, y = aten.mm.default(values(4, 300).float(), weight), values(4, 300).float()
    torch.testing.assert_close(found, y @ weight.dequantize(torch.float32), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda w: w[:, 16:],
            r"the columns 16 to 320 of 320 have no codes and scales of their own in .*multiples of 32",
        ),
        (lambda w: w[::2], "no slice with a step of 2; take rows or columns without gaps"),
        (lambda w: w[0], "a RotatedWeight has no aten.select.int; pass what its dequantize"),
        (lambda w: w + 1, "a RotatedWeight has no aten.add.Tensor; pass what its dequantize"),
        (lambda w: w.view(-1), r"has no view of the shape \[-1\]; pass what its dequantize"),
        (lambda w: w.to(torch.int8), "dtype 'int8' is not possible; pass one of"),
        (lambda w: torch.ops.aten.mm.default(w, values(320, 4)), "a RotatedWeight multiplies rows, as linear"),
        (lambda w: values(2, 320) @ w, r"a RotatedWeight multiplies rows, as linear\(x, weight\) or x @ weight.t\(\)"),
        (lambda w: w.copy_(w[:5]), r"RotatedWeight\(\[5, 320\].* cannot be copied to RotatedWeight\(\[300, 320\]"),
        (lambda w: w.copy_(w.dequantize()), "a bfloat16 tensor cannot be copied to RotatedWeight"),
        (lambda w: w.dequantize().copy_(w), "cannot be copied to a bfloat16 tensor"),
    ],
)
def test_what_a_weight_cannot_do_is_one_sentence(call: Any, message: str) -> None:
    with pytest.raises((TensorError, UsageError), match=message) as caught:
        call(weight_of("int8"))
    assert "\n" not in str(caught.value)


def test_parts_of_mx_and_nvfp4_share_tiles_and_a_scale() -> None:
    with pytest.raises(TensorError, match="cut it at multiples of 128"):
        weight_of("mxfp8")[:, :64]
    with pytest.raises(TensorError, match="cut it at multiples of 320"):
        weight_of("int8", "rows")[:, :64]
    with pytest.raises(
        TensorError, match=r"has scales that other parts of its weight have too, .*; copy whole weights"
    ):
        weight_of("nvfp4")[:5].copy_(weight_of("nvfp4", seed=1)[:5])
    with pytest.raises(
        TensorError, match=r"has scales that other parts of its weight have too, .*; copy whole weights"
    ):
        weight_of("fp8")[:, :64].copy_(weight_of("fp8", seed=1)[:, :64])


# ---- training --------------------------------------------------------------------------------------------------------
class Adapted(torch.nn.Module):
    """A LoRA adapter of a layer."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Linear(base.in_features, 4, bias=False, dtype=base.bias.dtype)
        self.b = torch.nn.Linear(4, base.out_features, bias=False, dtype=base.bias.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_the_input_is_that_of_the_dequantized_weight(kind: str, rotation: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    layer, x = model(torch.float32)[0], values(2, 5, 192, dtype=torch.float32)
    quantize_(layer, RotatedWeightConfig(kind, rotation))
    with torch.enable_grad():
        x.requires_grad_()
        call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        y = call(x)
        gradient = values(*y.shape, dtype=torch.float32)
        (found,) = torch.autograd.grad(y, x, gradient)
    torch.testing.assert_close(y, layer(x.detach()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, gradient @ layer.weight.dequantize(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_trained(kind: str, compiled: bool) -> None:
    torch._dynamo.reset()
    base = model(torch.float32)
    quantize_(base, RotatedWeightConfig(kind))
    adapted = torch.nn.Sequential(Adapted(base[0]), base[1], Adapted(torch.nn.Linear(256, 64)))
    step = torch.compile(adapted, backend="aot_eager", fullgraph=True) if compiled else adapted
    x, target = values(20, 192, dtype=torch.float32), values(20, 64, dtype=torch.float32)
    optimizer = torch.optim.Adam([each for each in adapted.parameters() if each.requires_grad], lr=0.01)
    losses = []
    with torch.enable_grad():
        for _ in range(8):
            loss = (step(x) - target).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


# ---- quantize_ -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", [*KINDS, "int4-row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_multiplies_rotated_codes(kind: str, rotation: Any, dtype: torch.dtype) -> None:
    layer, x = model(dtype)[0], values(2, 5, 192, dtype=dtype)
    exact = linear(x.double(), layer.weight.double(), layer.bias.double())
    of_rows = _rotation(192, {"rows": 192, None: 1}.get(rotation, rotation))
    turned = [_quantize(each.reshape(-1, 192), kind, of_rows).dequantize(torch.float64) for each in (x, layer.weight)]
    quantize_(layer, RotatedWeightConfig(kind, rotation))
    if kind.startswith("int4"):  # which is no format of activations
        turned[1] = layer.weight.rotated().dequantize(torch.float32).double()
    expected = (turned[0] @ turned[1].T).view(2, 5, 256) + layer.bias.double()
    assert isinstance(layer.weight, RotatedWeight)
    found = layer(x)
    assert found.dtype == dtype
    # Products of codes are exact in float32; MX tensors of torchao are multiplied in x's type on a CPU.
    margin = float(expected.abs().max()) * (2e-2 if dtype == torch.bfloat16 or kind == "fp8" else 1e-4)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=margin)
    assert float((found - exact).norm() / exact.norm()) < (0.3 if kind in COARSE else 0.08)
    weight = model(dtype)[0].weight
    assert float((layer.weight.dequantize() - weight).norm() / weight.norm()) < (0.15 if kind in COARSE else 0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_tiny_rows_keep_their_accuracy(kind: str, rotation: Any, dtype: torch.dtype) -> None:
    layer = model(torch.float32)[0].to(dtype)
    layer.weight.mul_(torch.logspace(0, -33, 256)[:, None])
    weight, largest = layer.weight.double(), {"int8": 127, "fp8": 448}[kind]
    turned = weight if rotation is None else Rotation(192, block={"rows": 192}.get(rotation, rotation))(weight)
    scale = turned.abs().amax(1, keepdim=True) / largest
    quantize_(layer, RotatedWeightConfig(kind, rotation))
    found = layer.weight.rotated().dequantize(torch.float32).double()
    half = 2**-4 * turned.abs() + 2**-10 * scale if kind == "fp8" else 0.5 * scale  # half a step between codes
    assert ((found - turned).abs() <= 1.001 * half + 1e-6 * largest * scale).all()


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
    with pytest.raises(UsageError, match="kind = 'q6_k' is not known; choose one of int8, fp8, int4, int4-row"):
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


def test_a_torchao_that_has_changed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torchao.quantization.Int8Tensor")
    monkeypatch.delitem(sys.modules, "hadagen.integrations.torchao")
    with pytest.raises(ImportError, match=r"it has no torchao\.quantization\.Int8Tensor; install torchao 0\.18\.0"):
        importlib.import_module("hadagen.integrations.torchao")
