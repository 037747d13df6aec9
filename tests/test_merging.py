"""Merged layers of models of any architecture: what is merged, and that nothing else changes."""

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import dropout, gelu, silu

pytest.importorskip("transformers", "5.0")
import transformers
from every_model import logits, made
from tiny_models import error

from hadagen.integrations import transformers as integration
from hadagen.integrations.transformers import HadagenConfig
from hadagen.models import gates
from hadagen.models.experts import QuantizedExperts, StackedLinear
from hadagen.models.layers import QuantizedLinear
from hadagen.models.merged import JoinedLinear, QuantizedMLP, unmerged
from hadagen.models.merging import merge
from hadagen.models.scheme import Scheme
from hadagen.prologues import Gelu, GeluMul, Relu2, SiluMul

OF_OSS = SiluMul(limit=7.0, alpha=1.702, beta=1.0, layout="interleaved")
# Type → the layers that are joined, and the prologues of MLPs and experts.
MERGED: dict[str, tuple[set[tuple[str, ...]], set[Any]]] = {
    "phi3": (set(), {SiluMul()}),
    "gemma2": ({("q_proj", "k_proj", "v_proj")}, {GeluMul(approximate="tanh")}),
    "starcoder2": ({("q_proj", "k_proj", "v_proj")}, {Gelu(approximate="tanh")}),
    "gpt_neox": (set(), {Gelu()}),
    "nemotron_h": ({("q_proj", "k_proj", "v_proj")}, {Relu2()}),
    "gpt_oss": ({("q_proj", "k_proj", "v_proj")}, {OF_OSS}),
    "deepseek_v3": ({("q_a_proj", "kv_a_proj_with_mqa")}, {SiluMul()}),
    "lfm2": ({("q_proj", "k_proj", "v_proj")}, {SiluMul()}),
    "bitnet": ({("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}, set()),
    "bart": ({("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj")}, set()),
}


@pytest.mark.parametrize("kind", MERGED)
def test_merging_changes_no_logits(kind: str, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path / "plain")

    def load(folder: str, **options: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32, **options)

    model = load("plain", quantization_config=HadagenConfig(rotation="blocks"))
    joined = [each for each in model.modules() if isinstance(each, JoinedLinear)]
    befores = {each.before for each in model.modules() if isinstance(each, QuantizedLinear) and each.before}
    assert ({each.names for each in joined}, befores) == MERGED[kind]
    with mock.patch.object(integration, "merge"):
        apart = load("plain", quantization_config=HadagenConfig(rotation="blocks"))
    found = logits(model)
    assert error(found, logits(apart)) < 1e-6
    assert all(each._of_all is None for each in joined), "the first layer of each is called first"
    state, wanted = unmerged(model), apart.state_dict()
    assert {name: each.shape for name, each in state.items()} == {name: each.shape for name, each in wanted.items()}
    assert all(torch.equal(state[name].float(), each.float()) for name, each in wanted.items())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), found)
    model.save_pretrained(tmp_path / "codes")
    again = load("codes")
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), found)


@pytest.mark.parametrize("kind", ["phi3", "gemma2"])
def test_merged_models_compile(kind: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    made(kind).save_pretrained(tmp_path)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, dtype=torch.float32, quantization_config=HadagenConfig(rotation="blocks"))
    assert any(isinstance(each, QuantizedMLP) for each in model.modules())
    assert error(logits(torch.compile(model, backend="aot_eager", fullgraph=True)), logits(model)) < 1e-3


def test_attention_whose_layers_have_other_inputs() -> None:
    def attention(**attributes: Any) -> torch.nn.Module:
        made = torch.nn.Module()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(made, name, QuantizedLinear.of(name, Scheme(rotation=None), torch.randn(16, 48)))
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    model = torch.nn.ModuleDict(
        {"EncDecAttention": attention(), "shared": attention(is_kv_shared_layer=True), "own": attention()}
    )
    merge(model)
    joined = {name for name, each in model.named_modules() if isinstance(each, JoinedLinear)}
    assert joined == {f"EncDecAttention.{at}_proj" for at in "kv"} | {f"own.{at}_proj" for at in "qkv"}


# ---- which prologue the code of a module computes --------------------------------------------------------------------
class MLP(torch.nn.Module):
    """An MLP whose forward has one change."""

    def __init__(self, change: str = "", width: int = 2) -> None:
        super().__init__()
        layers = {"gate_up_proj": (width * 96, 48), "down_proj": (48, 96)}
        if width == 2 and change != "packed":
            layers = {"gate_proj": (96, 48), "up_proj": (96, 48), "down_proj": (48, 96)}
        for name, (outputs, inputs) in layers.items():
            weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))
            setattr(self, name, QuantizedLinear.of(name, Scheme(rotation=None), weight))
        self.change, self.limit = change, 7.0
        if change == "parameter":
            self.scale = torch.nn.Parameter(torch.ones(()))
        if change == "child":
            self.norm = torch.nn.LayerNorm(96)
        if change == "hook":
            self.register_forward_hook(lambda module, given, y: y + 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        if self.change == "packed":
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x if self.change != "input" else 2 * x), self.up_proj(x)
        if self.change == "clamped":
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.change == "far_limit":
            gate = gate.clamp(max=5000)
        if self.change == "sparse":
            gate = torch.where(gate > gate.mean(-1, True), gate, 0)
        hidden = silu(gate) * up * (1.01 if self.change == "multiplier" else 1)
        y = self.down_proj(dropout(hidden, 0.1, self.training) if self.change == "dropout" else hidden)
        if self.change == "of_float16" and y.dtype == torch.float16:
            y = y.clamp(-3, 3)
        if self.change == "in_training" and self.training:
            y = 2 * y
        if self.change == "bounded":
            y = y.clamp(-65504, 65504)
        return y + x if self.change == "residual" else y


def merged(change: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What merging makes of an MLP; an input, and what the MLP returned for it before."""
    model = torch.nn.ModuleDict({"mlp": MLP(change).eval()})
    x = torch.randn(5, 48)
    apart = model["mlp"](x)
    merge(model)
    return model["mlp"], x, apart


@pytest.mark.parametrize("change", ["", "packed", "clamped"])
def test_an_mlp_that_a_prologue_computes_is_replaced(change: str) -> None:
    mlp, x, apart = merged(change)
    assert isinstance(mlp, QuantizedMLP)
    assert mlp.down_proj.before == (SiluMul(limit=7.0) if change == "clamped" else SiluMul())
    assert error(mlp(x), apart) < 1e-3
    assert torch.equal(mlp(hidden_states=x), mlp(x))


@pytest.mark.parametrize(
    "change",
    [
        *("multiplier", "sparse", "input", "dropout", "residual", "parameter", "child", "hook"),
        *("of_float16", "in_training", "bounded", "far_limit"),
    ],
)
def test_an_mlp_that_computes_anything_else_stays(change: str) -> None:
    mlp, x, apart = merged(change)
    assert isinstance(mlp, MLP)
    assert not mlp.training
    assert isinstance(mlp.gate_proj, JoinedLinear)
    assert torch.equal(mlp(x), apart)


@pytest.mark.parametrize(
    "before", [SiluMul(), SiluMul(limit=3.0), OF_OSS, GeluMul(), GeluMul(approximate="quick"), Gelu(), Relu2()], ids=str
)
def test_the_prologue_of_a_function(before: Any) -> None:
    class Holder:
        limit = getattr(before, "limit", None)
        swiglu_alpha = getattr(before, "alpha", None)

    def function(x: torch.Tensor) -> torch.Tensor:
        return before.results(before.parts(x), {}, x.dtype)["x"]  # type: ignore[no-any-return]

    assert gates.of_function(function, Holder, before.width) == before
    assert gates.of_function(lambda x: 1.001 * function(x), Holder, before.width) is None
    assert gates.of_function(lambda x: function(x)[:1], Holder, before.width) is None
    assert gates.of_function(gelu, Holder, 2) is None


def test_experts_without_a_known_prologue_keep_theirs() -> None:
    experts = made("mixtral").model.layers[0].mlp.experts
    experts.act_fn = torch.nn.Tanh()
    quantized = QuantizedExperts(experts)
    for part, out, n in (("gate_up_proj", 192, 48), ("down_proj", 48, 96)):
        quantized.take(part, StackedLinear.of(part, Scheme(rotation=None), torch.randn(4, out, n)))
    quantized.fuse()
    assert quantized.down_proj.before is None
