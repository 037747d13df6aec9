"""`hadagen.models.int4` and `.gptq`: weights of 4 bits."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run, sentence, succeed
from torch.nn.functional import linear

pytest.importorskip("transformers", "5.0")
pytest.importorskip("tokenizers")
from test_cli_models import load, plain, saved, tensors, text  # noqa: F401
from tiny_models import TOKENS, error, logits

from hadagen.errors import UsageError
from hadagen.integrations.transformers import HadagenConfig
from hadagen.models import gptq, int4
from hadagen.models.checkpoint import convert
from hadagen.models.layers import QuantizedLinear, check_values
from hadagen.models.output import UNFINISHED
from hadagen.models.scheme import GROUPS, Scheme

pytestmark = pytest.mark.usefixtures("machine")


# ---- codes and scales ------------------------------------------------------------------------------------------------
def test_the_layout_is_the_documented_one() -> None:
    codes = torch.tensor([[-8, 7, 0, -1], [1, 2, 3, -4]])
    packed = int4.packed(codes)
    assert packed.tolist() == [[0x08, 0xF7], [0x31, 0xC2]]  # a span of 4
    every = torch.arange(256, dtype=torch.uint8)[None]
    assert torch.equal(int4.packed(int4.unpacked(every)), every)
    scales, factors = torch.tensor([[1.0], [0.5]]), torch.tensor([[1, 16], [2, 3]], dtype=torch.uint8)
    assert int4.unpacked(packed, factors).tolist() == [[-8, 7, 0, -16], [2, 4, 9, -12]]
    expected = torch.tensor([[-8.0, 7.0, 0.0, -16.0], [1.0, 2.0, 4.5, -6.0]])
    assert torch.equal(int4.values(packed, scales, factors, torch.float32), expected)
    halves = int4.unpacked(torch.full((1, 96), 0x21, dtype=torch.uint8))  # spans of 64
    assert torch.equal(halves, torch.tensor([1, 2], dtype=torch.int8).repeat_interleave(32).repeat(3)[None])


@pytest.mark.parametrize("magnitude", [1e-35, 1e-3, 1e35])
@pytest.mark.parametrize("group", [32, None])
def test_the_scale_of_a_group_has_the_least_error(group: int | None, magnitude: float) -> None:
    """Of a row exactly. Scales of groups are multiples, so some are not the best."""
    torch.manual_seed(0)
    weight = torch.randn(9, 96) * magnitude
    weight[3] = 0
    codes, scales, factors = int4.rounded(weight, group)
    groups = (weight.double() / magnitude).unflatten(1, (-1, group or 96))
    amax = groups.abs().amax(-1, keepdim=True)

    def loss(scale: torch.Tensor) -> torch.Tensor:
        return (int4.nearest(groups, scale) * scale - groups).square().sum(-1)

    of_groups = scales if factors is None else scales * factors
    found = loss((of_groups.double() / magnitude)[..., None].clamp(min=1e-30))
    best = torch.stack([loss((amax * part / 7.5).clamp(min=1e-30)) for part in (0.5, 0.6, 0.7, 0.8, 0.9, 1)]).amin(0)
    assert found.sum() <= best.sum() * (1.02 if group else 1 + 1e-5)
    values = int4.values(codes, scales, factors, torch.float32)
    assert torch.equal(values[3], weight[3])
    assert error(values.double(), weight.double()) < 0.12
    check_values("x.", {"weight": codes, "weight_scale": scales, "weight_factor": factors})


def test_groups_follow_from_the_input() -> None:
    assert [int4.group_of("x", n, "int4") for n in (16, 48, 576, 1536, 14336)] == [16, 16, 64, 128, 128]
    assert int4.group_of("x", 50, "int4-row") is None
    for n, weights, fix in ((24, "int4", "int4-row"), (7, "int4", "int8"), (7, "int4-row", "int8"), (0, "int4", "")):
        with pytest.raises(UsageError, match=f"down_proj has {n} inputs, .*{fix}") as caught:
            QuantizedLinear("mlp.down_proj", Scheme(weights), n, 16)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", GROUPS)
def test_a_layer_holds_half_a_byte_for_each_weight(weights: str) -> None:
    layer = QuantizedLinear.of("q_proj", Scheme(weights), torch.randn(24, 256), torch.randn(24))
    x = torch.randn(5, 256)
    factors = {"int4": 2, "int4-row": 0}[weights]
    assert sum(each.nbytes for each in layer.parameters()) == 24 * (128 + 4 + factors + 4)
    expected = layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    other = QuantizedLinear.of("q_proj", Scheme(weights), torch.randn(24, 256), torch.randn(24))
    other.load_state_dict(layer.state_dict())
    for again in (copy.deepcopy(layer), torch.load(buffer, weights_only=False), other):
        assert torch.equal(again(x), expected)
    if weights == "int4":
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), expected)
    with pytest.raises(UsageError, match=r"^weight is int8 \[24, 256, 1\], but the layer has codes in uint8 \[24, 128"):
        layer.load_state_dict(QuantizedLinear.of("q_proj", Scheme("int8"), torch.randn(24, 256)).state_dict())


# ---- GPTQ ------------------------------------------------------------------------------------------------------------
def hessian_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hessian = x.T @ x
    return hessian.diagonal().clone(), gptq._factor(hessian)


@pytest.mark.parametrize("group", [32, None])
def test_codes_by_gptq_lose_less_for_inputs_that_are_alike(group: int | None) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(600, 288) @ torch.randn(288, 288) + 3, torch.randn(40, 288)
    x[:, 5] = 0
    exact = linear(x, weight)
    found, nearest = (
        error(linear(x, int4.values(*each, torch.float32)), exact)
        for each in (gptq.rounded(weight, *hessian_of(x), group), int4.rounded(weight, group))
    )
    assert found < 0.75 * nearest


@pytest.mark.parametrize("group", [32, None])
def test_codes_by_gptq_for_independent_inputs_are_the_nearest(group: int | None) -> None:
    weight = torch.randn(40, 288, generator=torch.Generator().manual_seed(0))
    for mine, other in zip(
        gptq.rounded(weight, *hessian_of(torch.eye(288)), group), int4.rounded(weight, group), strict=True
    ):
        assert mine is other or torch.equal(mine, other)


@pytest.mark.parametrize("weights", GROUPS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_calibrated_weights_lose_less(kind: str, weights: str, text: Path, tmp_path: Path) -> None:  # noqa: F811
    """In one file, and in several."""
    original = saved(tmp_path / "plain", kind, "5GB" if kind == "llama" else "30KB")
    options = "--weights", weights, "--activations", "none"
    succeed("quantize", original, tmp_path / "near", *options)
    succeed("quantize", original, tmp_path / "out", *options, "--calibrate", text)
    names = {path.name for path in (tmp_path / "near").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    near, found = tensors(tmp_path / "near"), tensors(tmp_path / "out")
    assert {name for name in near if not torch.equal(near[name], found[name])} >= {
        name for name in near if name.endswith("_proj.weight")
    }
    tokens = torch.tensor([list(map(int, text.read_text().split()))])
    with torch.no_grad():
        expected, *others = (load(tmp_path / each)(tokens).logits for each in ("plain", "near", "out"))
    assert error(others[1], expected) < 0.9 * error(others[0], expected)


def test_one_text_rounds_weights_and_scales_activations(plain: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    options = "--weights", "int4", "--activations", "fp8-tensor"
    succeed("quantize", plain, tmp_path / "out", *options, "--calibrate", text)
    assert error(logits(load(tmp_path / "out")), logits(load(plain))) < 0.5
    said = sentence(run("quantize", plain, tmp_path / "other", *options), 2)
    assert said.endswith("give both --activations fp8-tensor and --calibrate")
    in_memory = HadagenConfig("int4", "fp8-tensor")
    with pytest.raises(UsageError, match="takes its scales from a text; use hadagen quantize with --calibrate"):
        load(plain, quantization_config=in_memory)


def test_a_run_that_was_killed_while_rounding_is_continued_with_a_text_alone(
    plain: Path,  # noqa: F811
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    scheme, out = Scheme("int4"), tmp_path / "out"

    def kill(folder: Path, fold: Any) -> Any:
        assert load(folder).config.quantization_config.activations is None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(convert(plain, out, scheme, calibrate=kill))
    assert (out / UNFINISHED).exists()
    assert "with other options" in sentence(run("quantize", plain, out, "--weights", "int4"), 2)
    succeed("quantize", plain, out, "--weights", "int4", "--calibrate", text)
    succeed("quantize", plain, tmp_path / "again", "--weights", "int4", "--calibrate", text)
    found, expected = tensors(out), tensors(tmp_path / "again")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_inputs_without_a_hessian_are_one_sentence(plain: Path) -> None:  # noqa: F811
    model = load(plain, quantization_config=HadagenConfig("int4", None))
    model.model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(UsageError, match=r"the inputs of .*q_proj are not finite; calibrate with another text"):
        gptq.round_weights(model, TOKENS, lambda name: torch.zeros(48, 48))
    assert not any(each._forward_pre_hooks for each in model.modules() if isinstance(each, QuantizedLinear))
