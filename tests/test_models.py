"""`hadagen.models`: schemes, folded weights, and layers with codes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from hadagen import Rotation, rotate_quantize
from hadagen.errors import UsageError
from hadagen.models import int4
from hadagen.models.cache import HeadCodes
from hadagen.models.folding import Folding, Sizes, planned
from hadagen.models.layers import (
    QuantizedLinear,
    quantized_weight,
    values_of,
)
from hadagen.models.merged import QuantizedMLP, unmerged
from hadagen.models.products.library import fp8_product, multiplies
from hadagen.models.products.operands import Operands
from hadagen.models.scheme import ACTIVATIONS, CACHES, GROUPS, ROTATIONS, WEIGHTS, Online, Scheme
from hadagen.prologues import SiluMul

pytest.importorskip("transformers", "5.0")
from tiny_models import KINDS, error, logits, model_of

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BLOCKS = {"q_proj": Online(48, 16), "down_proj": Online(96, 32)}


# ---- schemes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rotation", [None, Rotation(96)])
@pytest.mark.parametrize("to", ["int8-row", "fp8-row"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_of_weights(to: str, rotation: Rotation | None, dtype: torch.dtype) -> None:
    """They are those of activations. Rows of any magnitude keep their accuracy, and scales are normal numbers."""
    magnitudes = [1e-38, 1e-37, *torch.logspace(-35, 3 if dtype == torch.float16 else 35, 71).tolist()]
    w = torch.randn(len(magnitudes), 96, generator=torch.Generator().manual_seed(0))
    tiny = (w * torch.tensor(magnitudes)[:, None]).to(dtype)
    exact = (tiny if rotation is None else rotation(tiny.double())).double()
    made = quantized_weight(tiny, to, rotation)
    scales = made.scales.reshape(-1, 1)
    assert float(scales.min()) >= torch.finfo(torch.float32).tiny
    is_exact = tiny.abs().amax(1) > (1e-35 if dtype != torch.float16 else 1e-5)  # not subnormal numbers of the type
    of_rows = values_of(made.codes, scales, None, torch.float32).double() - exact
    assert float((of_rows.norm(dim=1) / exact.norm(dim=1))[is_exact].max()) < 0.04
    assert int(is_exact.sum()) >= (12 if dtype == torch.float16 else 70)

    usual = (w * torch.logspace(-2, 3, len(w))[:, None]).to(dtype)
    usual[0], usual[1, 3], usual[2, 4] = 0, torch.inf, torch.nan
    found, wanted = quantized_weight(usual, to, rotation), rotate_quantize(usual, rotation, to=to)
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_a_scheme_is_stored_and_read(weights: str, activations: str | None, rotation: str | None) -> None:
    for cache in (*CACHES, None):
        ignored = "lm_head", "model.layers.0.mlp.down_proj"
        scheme = Scheme(weights, activations, rotation, 3, ignored, BLOCKS, cache)
        assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


def test_the_rotation_follows_from_the_codes() -> None:
    def chosen(*arguments: Any, is_foldable: bool = True, **options: Any) -> str | None:
        return Scheme(*arguments, **options).resolved(is_foldable).rotation

    assert chosen("int8") == chosen("int8", cache="fp8") == "quarot"
    assert chosen("int4") == chosen("int4-row") == "quarot"
    assert Scheme("int4").activations == Scheme("int4-row").activations == "int8-row"
    assert chosen("int8", is_foldable=False) == chosen("fp8", rotation="blocks") == "blocks"
    assert chosen("fp8") is chosen("fp8", is_foldable=False) is None
    assert chosen("fp8", cache="int4") == "heads"
    assert not Scheme("fp8", rotation=None, cache="int4").rotates_keys
    assert Scheme("fp8", rotation="heads").rotates_values
    assert not Scheme("fp8", rotation="blocks").rotates_values
    assert Scheme("fp8", rotation="blocks", cache="int8").rotates_values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "int9"}, "weights = 'int9' is not known; did you mean int8"),
        ({"weights": ["int8"]}, r"weights = \['int8'\] is not known"),
        ({"activations": "fp4"}, "activations = 'fp4' is not known; choose one of int8-row, fp8-row, fp8-tensor, None"),
        ({"rotation": "quip"}, "rotation = 'quip' is not known"),
        ({"cache": "int3"}, "cache = 'int3' is not known; did you mean int8"),
        ({"cache": True}, "cache = True is not known"),
        ({"seed": -1}, "seed = -1 is not possible"),
        ({"seed": True}, "seed = True is not possible"),
        ({"ignore": "lm_head"}, "ignore = 'lm_head' is no list of names"),
        ({"ignore": [1]}, "no list of names"),
        ({"online": {"down_proj": 96}}, "online = .* has no rotations"),
        ({"online": {"fc1": {"n": 96, "block": None}}}, "names the layer 'fc1', which is not known"),
        ({"online": {"down_proj": {"n": 97 * 31, "block": None}}}, "n"),
        ({"version": 1}, "has version 1; this hadagen reads version 3"),
        ({"version": 2, "weights": "int4-row"}, "has version 2; this hadagen reads version 3"),
        ({"quant_method": "awq"}, "is not of hadagen; its quant_method must be hadagen"),
        ({"bits": 8}, "has bits, which is not known"),
    ],
)
def test_a_bad_scheme_is_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Scheme.from_dict(Scheme().to_dict() | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "is quantized already by 'awq'"),
        ({"quantization_config": ["awq"]}, r"is quantized already by \['awq'\]"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 in the configuration is no size"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 in the configuration is no size"),
        ({"hidden_size": 2}, "head_dim = 0 in the configuration is no size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers = 'two' in"),
    ],
)
def test_a_model_that_cannot_be_rotated_is_one_sentence(change: dict[str, Any], message: str) -> None:
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 48,
    }
    config["intermediate_size"] = 96
    config = {name: value for name, value in (config | change).items() if value is not None}
    with pytest.raises(UsageError, match=message):
        Sizes.of(config)


# ---- folding ---------------------------------------------------------------------------------------------------------
def folded(model: Any, scheme: Scheme) -> tuple[Any, Scheme]:
    """The rotated model in the type of its weights, with the rotations that are left as hooks, and its scheme."""
    sizes = Sizes.of(model.config.to_dict())
    scheme = planned(scheme, sizes)
    folding, state = Folding(scheme, sizes), model.state_dict()
    made = {made: folding.fold(made, state.__getitem__) for name in state for made in folding.made_of(name)}
    config = model.config.to_dict() | {"tie_word_embeddings": sizes.tied and not folding.is_untied}
    other = type(model)(type(model.config)(**config)).eval().requires_grad_(False)
    missing = other.load_state_dict(made, strict=False).missing_keys
    assert missing == ([] if not sizes.tied or folding.is_untied else ["lm_head.weight"])
    for name, module in other.named_modules():
        if online := scheme.online_of(name):
            rotation = online.rotation()
            module.register_forward_pre_hook(lambda _, args, rotation=rotation: (rotation(args[0]),))
    return other, scheme


BIASES = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_folded_model_computes_the_same(kind: str, rotation: str | None, tied: bool) -> None:
    model = model_of(kind, tie_word_embeddings=tied, **BIASES.get(kind, {}))
    ignored, cache = ("lm_head", "model.layers.1.mlp.down_proj"), "int8" if tied else None
    other, _ = folded(model, Scheme(rotation=rotation, seed=5, ignore=ignored, cache=cache))
    assert error(logits(other), logits(model)) < 2e-6
    if rotation in ("heads", "blocks"):
        values, plain = (each.model.layers[0].self_attn.v_proj.weight for each in (other, model))
        if rotation == "blocks":
            values = Rotation(48, block=16).inverse(values)
        turns = rotation == "heads" or cache
        expected = Rotation(16).fold_into(plain.view(2, 16, -1), "output").flatten(0, 1) if turns else plain
        assert error(values, expected) < 1e-5
    if rotation == "quarot":
        weight = "model.layers.0.self_attn.v_proj.weight"
        assert error(other.get_parameter(weight), model.get_parameter(weight)) > 0.5
        assert (other.model.norm.weight == 1).all()


def test_the_rotations_are_those_of_the_example() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import llama
    finally:
        sys.path.remove(str(EXAMPLES))
    model = model_of("llama", tie_word_embeddings=True)
    sizes, state = Sizes.of(model.config.to_dict()), model.state_dict()
    config = llama.Config(2, 4, 2, 16, 48, 96, 89, 1e-6, {}, True)
    for rotation, (_, expected, _) in {
        "quarot": llama.rotated(config, {name: state[name] for name in config.shapes()}, 3),
        "blocks": llama.in_blocks(config, state, 16),
    }.items():
        scheme = planned(Scheme(rotation=rotation, seed=3), sizes)
        if rotation == "blocks":
            assert scheme.online["q_proj"] == Online(48, 16)
            assert scheme.online["down_proj"] == Online(96, 32)
            scheme = replace(scheme, online={name: Online(each.n, 16) for name, each in scheme.online.items()})
        folding = Folding(scheme, sizes)
        for name, tensor in expected.items():
            torch.testing.assert_close(folding.fold(name, state.__getitem__), tensor, rtol=1e-6, atol=1e-6)


# ---- heads of a cache ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", [48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", CACHES)
def test_heads_are_packed_as_they_are_quantized(cache: str, dtype: torch.dtype, head: int) -> None:
    torch.manual_seed(0)
    x, codes = torch.randn(2, 5, 3, head, dtype=dtype).transpose(1, 2), HeadCodes(cache, head)
    for rotation in (Rotation(head), None):
        packed = codes.pack(x, rotation)
        assert (packed.dtype, packed.shape) == (torch.uint8, (2, 3, 5, head // (2 if cache == "int4" else 1) + 4))
        expected = rotate_quantize(x, rotation, to=CACHES[cache]).dequantize(dtype)
        assert torch.equal(codes.unpack(packed, dtype), expected)
        late = torch.cat((packed, packed), -2)[:, 1:, 4:]  # as a sliding window keeps it
        assert torch.equal(codes.unpack(late, dtype), torch.cat((expected, expected), -2)[:, 1:, 4:])
    assert not codes.unpack(torch.zeros_like(packed), dtype).any()
    assert codes.unpack(codes.pack(x[:, :, :0], None), dtype).shape == (2, 3, 0, head)


def test_compiled_heads_are_packed_alike() -> None:
    x = torch.randn(2, 5, 3, 48, dtype=torch.bfloat16).transpose(1, 2)
    codes, rotation = HeadCodes("int8", 48), Rotation(48)

    @torch.compile(fullgraph=True)
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = codes.pack(x, rotation)
        return packed, codes.unpack(packed, x.dtype)

    packed, values = both(x)
    assert torch.equal(packed, codes.pack(x, rotation))
    assert torch.equal(values, codes.unpack(packed, x.dtype))


def test_heads_that_cannot_be_packed_are_one_sentence() -> None:
    sizes = Sizes(2, 48, 96, 4, 2, 12, False)
    with pytest.raises(UsageError, match="head_dim = 12 has no cache of int4; it must be a multiple of 8, so"):
        planned(Scheme(cache="int4"), sizes)
    assert planned(Scheme(cache="int8"), sizes).cache == "int8"
    with pytest.raises(UsageError, match=f"head_dim = {4 * 97 * 31}"):
        planned(Scheme("fp8", cache="int8"), replace(sizes, head=4 * 97 * 31))


# ---- layers ----------------------------------------------------------------------------------------------------------
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_layer_multiplies_what_its_codes_stand_for(weights: str, activations: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scheme = Scheme(weights, activations, online={"down_proj": Online(96, 32)})
    x, weight, bias = torch.randn(2, 3, 96, dtype=dtype), torch.randn(40, 96), torch.randn(40, dtype=dtype)
    layer = QuantizedLinear.of("mlp.down_proj", scheme, weight, bias)
    given = {}
    if activations == "fp8-tensor":
        layer.input_scale.data = given["tensor_scale"] = torch.tensor(0.01)
    turned = scheme.online["down_proj"].rotation()
    values = turned(x) if activations is None else rotate_quantize(x, turned, to=activations, **given).dequantize()
    values = values.to(torch.float32)
    if weights in GROUPS:
        stands_for = int4.values(*int4.rounded(weight, 32 if weights == "int4" else None), torch.float32)
    else:
        stands_for = rotate_quantize(weight, to=WEIGHTS[weights]).dequantize()
    expected = linear(values, stands_for, bias.float())
    found = layer(x)
    assert found.dtype == dtype
    assert error(found.float(), expected) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_exported_layer_takes_any_number_of_rows(weights: str) -> None:
    layer = QuantizedLinear.of("q_proj", Scheme(weights), torch.randn(24, 48))
    rows = {0: torch.export.Dim("rows", min=1, max=4096)}
    for strict in (False, True):
        program = torch.export.export(layer, (torch.randn(40, 48),), dynamic_shapes=(rows,), strict=strict).module()
        for count in (1, 16, 17, 100):
            x = torch.randn(count, 48)
            assert torch.equal(program(x), layer(x))


@pytest.mark.parametrize("by_row", [False, True])
def test_products_of_fp8_codes(by_row: bool) -> None:
    """As on GPUs: layers on a CPU dequantize FP8 codes, because not every release of PyTorch multiplies them there."""
    torch.manual_seed(0)
    x, w = (rotate_quantize(torch.randn(rows, 96), to="fp8-row") for rows in (6, 32))
    of = Operands(x.codes, x.scales[:, None], w.codes, w.scales[:, None], None, None, torch.float32)
    found = fp8_product(of, by_row=by_row)
    assert found.dtype == (torch.bfloat16 if by_row else torch.float32)
    assert error(found.float(), x.dequantize() @ w.dequantize().T) < 4 * torch.finfo(found.dtype).eps


def test_what_pytorch_multiplies() -> None:
    """By the types of the codes, the GPU, and the length of rows."""
    int8, fp8 = (torch.empty(64, 96, device="meta", dtype=each) for each in (torch.int8, torch.float8_e4m3fn))
    assert multiplies(int8, int8, 75)
    assert multiplies(fp8, fp8, 89)
    assert not multiplies(fp8, fp8, 86)
    assert not multiplies(int8, int8, 0)
    assert not multiplies(fp8, int8, 90)
    assert not multiplies(fp8[:, :88], fp8[:, :88], 90)
    assert multiplies(int8[:, :88], int8[:, :88], 90)
    assert not multiplies(int8[:0], int8, 90)


def test_one_row_and_no_row() -> None:
    layer = QuantizedLinear.of("q_proj", Scheme("int8", "int8-row"), torch.randn(24, 48))
    x = torch.randn(5, 48)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert layer(x[:0]).shape == (0, 24)


@pytest.mark.parametrize(("weights", "activations"), [("int8", "int8-row"), ("fp8", "fp8-row"), ("fp8", "fp8-tensor")])
def test_the_mlp_is_its_layers(weights: str, activations: str) -> None:
    torch.manual_seed(0)
    scheme = Scheme(weights, activations, online={"down_proj": Online(96)})
    r, x = scheme.online["down_proj"].rotation(), torch.randn(4, 48)
    weights_of = {"gate_proj": (96, 48), "up_proj": (96, 48), "down_proj": (48, 96)}
    plain = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in weights_of.items()}
    folded = plain | {"down_proj": r.fold_into(plain["down_proj"], "input")}

    def layers(seed: int) -> dict[str, QuantizedLinear]:
        torch.manual_seed(seed)
        of = QuantizedLinear.of
        made = {name: of(name, scheme, weight, torch.randn(len(weight))) for name, weight in folded.items()}
        for each in made.values():
            if each.input_scale is not None:
                each.input_scale.data = torch.tensor(0.01)
        return made

    gate, up, down = layers(1).values()
    hidden = silu(gate(x)) * up(x)
    mlp = QuantizedMLP(layers(1), SiluMul())
    assert error(mlp(x), down(hidden)) < 0.01
    exact = silu(linear(x, plain["gate_proj"], gate.bias)) * linear(x, plain["up_proj"], up.bias)
    assert error(mlp(x), linear(exact, plain["down_proj"], down.bias)) < 0.1

    assert list(mlp.state_dict()) == [name for name, _ in mlp.named_parameters()]
    model = torch.nn.ModuleDict({"mlp": mlp})
    state = {name.removeprefix("mlp."): each for name, each in unmerged(model).items()}
    names = [f"{name}.{part}" for name, each in zip(plain, (gate, up, down), strict=True) for part in each.state_dict()]
    assert sorted(state) == sorted(names)
    assert torch.equal(state["up_proj.weight"].view(torch.uint8), up.weight.view(torch.uint8))
    other = QuantizedMLP(layers(2), SiluMul())
    other.load_state_dict(mlp.state_dict())
    assert torch.equal(other(x), mlp(x))
    with pytest.raises(
        UsageError, match=r"down_proj.weight is .*; load a folder by from_pretrained, or the state dict"
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.bfloat16, lambda m: m.to(torch.float64)])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_codes_and_scales_keep_their_types(weights: str, change: Any) -> None:
    layer = QuantizedLinear.of("q_proj", Scheme(weights), torch.randn(16, 48), torch.randn(16))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    after = change(layer).state_dict()
    for name in ("weight", "weight_scale"):
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].float(), before[name].float())
    assert after["bias"].dtype != torch.float32


def test_a_rotation_of_another_length_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"down_proj has 48 inputs, but the quantization_config rotates 96"):
        QuantizedLinear("mlp.down_proj", Scheme(online={"down_proj": Online(96)}), 48, 16)
