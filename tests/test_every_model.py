"""Models of every architecture of transformers: what folding does to them, and how they are quantized and stored."""

import copy
import csv
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.0")
import stored_folders as folders
import transformers
from command_line import run as run_command
from command_line import sentence, succeed
from every_model import BOUND, COLUMNS, KINDS, logits, made, outcome
from tiny_models import error, write_tokenizer

from hadagen.errors import HadagenError, UsageError
from hadagen.integrations.transformers import HadagenConfig
from hadagen.models.experts import QuantizedExperts, StackedLinear
from hadagen.models.families import FAMILIES
from hadagen.models.layers import QuantizedLinear
from hadagen.models.stored import checksum_of_files

TABLE = Path(__file__).resolve().parent.parent / "docs" / "data" / "models.csv"
ROWS = [row for row in csv.DictReader(TABLE.read_text().splitlines()) if row["model_type"] in KINDS and row["layers"]]
# A layer of transformers' own class, packed experts with and without transposes and conversions, and fused layers.
OTHERS = ("gpt2", "mixtral", "gpt_oss", "phi3", "gemma3_text")


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Type → the folder of a model, in several files."""

    def write(kind: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"plain-{kind}"
        if not folder.exists():
            made(kind).save_pretrained(folder, max_shard_size="60KB")
        return folder

    return write


# ---- folding ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model_type"])
def test_folding_changes_no_logits_or_is_refused(row: dict[str, str]) -> None:
    found = outcome(row["model_type"])
    assert found["layers"] == row["layers"]
    for change in ("blocks", "quarot", "cache"):
        is_number = row[change] and " " not in row[change]
        assert float(found[change]) <= BOUND if is_number else found[change] == row[change], change


def test_every_type_is_right_with_blocks_and_each_family_with_quarot() -> None:
    table = {row["model_type"]: row for row in ROWS}
    assert list(ROWS[0]) == list(COLUMNS)
    assert all(float(row["blocks"]) <= BOUND for row in ROWS)
    foldable = {kind for kind, family in FAMILIES.items() if not family.obstacle}
    assert {kind for kind, row in table.items() if " " not in row["quarot"]} == foldable
    assert {kind for kind, row in table.items() if row["cache"] and " " not in row["cache"]} > foldable


# ---- quantizing and storing ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("kind", OTHERS)
def test_every_model_is_quantized_stored_and_loaded(kind: str, weights: str, plain: Any, tmp_path: Path) -> None:
    """By transformers and by `hadagen quantize`, with the names that tensors have in the folder of the original."""
    config = HadagenConfig(weights)
    model = load(plain(kind), quantization_config=config)
    chosen = model.config.quantization_config.rotation
    foldable = not FAMILIES.get(kind, FAMILIES["gemma2"]).obstacle
    assert chosen == (None if weights == "fp8" else "quarot" if foldable else "blocks")
    assert config.rotation == "auto"  # it may serve another model
    assert error(logits(model), logits(load(plain(kind)))) < (0.3 if weights == "int4" else 0.1)
    model.save_pretrained(tmp_path / "memory")
    assert torch.equal(logits(load(tmp_path / "memory")), logits(model))
    succeed("quantize", plain(kind), tmp_path / "files", "--weights", weights)
    assert torch.equal(logits(load(tmp_path / "files")), logits(model))
    names: list[set[str]] = []
    for folder in ("memory", "files"):
        stored = {name for path in (tmp_path / folder).glob("*.safetensors") for name in folders.load_file(path)}
        names.append(stored)
    assert names[0] == names[1]
    assert json.loads((tmp_path / "files" / "config.json").read_text())["quantization_config"]["rotation"] == chosen
    if kind == "mixtral":
        assert "model.layers.0.block_sparse_moe.experts.3.w2.weight_scale" in names[0]


def test_layers_that_keep_their_type() -> None:
    """Routers, and a layer whose weight other code reads, as an output embedding and one with an odd input do."""
    from hadagen.models.linears import kept, linears, planned_of
    from hadagen.models.scheme import Scheme

    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = torch.nn.Linear(8, 3), torch.nn.Linear(8, 8)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
            self.read, self.odd, self.router_b = torch.nn.Linear(8, 8), torch.nn.Linear(7, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.read.weight

    model = torch.nn.ModuleDict({"part": Other()})
    assert kept(model, linears(model)) == {"part.gate", "part.read", "part.router_b"}
    scheme = planned_of(model, Scheme(rotation="blocks"), None)
    assert scheme.layers == ("0", "1", "2", "up")
    assert planned_of(model, Scheme(rotation=None), None).layers == ("0", "1", "2", "odd", "up")
    model["other"] = torch.nn.ModuleDict({"up": torch.nn.Linear(12, 8), "odd": torch.nn.Linear(6, 8)})
    scheme = planned_of(model, Scheme(rotation="blocks", ignore=("2",)), None)
    assert scheme.ignore == ("2", "part.odd")
    assert {name: each.block for name, each in scheme.online.items()} == {
        "0": 8,
        "1": 8,
        "odd": 2,
        "other.up": 4,
        "part.up": 8,
    }


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_with_codes_are_copied_cast_and_pickled(kind: str, plain: Any) -> None:
    model = load(plain(kind), quantization_config=HadagenConfig(rotation="blocks"))
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, QuantizedExperts)
    assert {type(each) for each in (experts.gate_up_proj, experts.down_proj)} == {StackedLinear}
    assert experts.down_proj.before
    x, at, weights = torch.randn(5, 48), torch.tensor([[0, 3]] * 4 + [[4, 1]]), torch.rand(5, 2)
    expected = experts(x, at, weights)
    for again in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(again(x, at, weights), expected)
    y, last = torch.zeros_like(x), copy.deepcopy(experts.down_proj)
    last.before = None  # computed apart
    for token in range(5):
        for expert, weight in zip(at[token].tolist(), weights[token], strict=True):
            if expert < 4:  # the number of experts stands for none
                hidden = experts.settings._apply_gate(experts.gate_up_proj.layer(expert)(x[token]))
                y[token] += weight * last.layer(expert)(hidden)
    torch.testing.assert_close(expected, y)
    half = copy.deepcopy(experts).bfloat16()
    assert (half.down_proj.weight.dtype, half.down_proj.weight_scale.dtype) == (torch.int8, torch.float32)
    assert error(half(x.bfloat16(), at, weights.bfloat16()).float(), expected) < 0.05


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_with_an_ignored_weight_keep_both(kind: str, plain: Any, tmp_path: Path) -> None:
    """With a rotation of whole rows they are folded as they are packed."""
    config = HadagenConfig(ignore=("lm_head", "down_proj"))
    model = load(plain(kind), quantization_config=config)
    assert model.config.quantization_config.rotation == "quarot"
    assert not isinstance(model.model.layers[0].mlp.experts, QuantizedExperts)
    assert error(logits(model), logits(load(plain(kind)))) < 0.05
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


# ---- refusals --------------------------------------------------------------------------------------------------------
def tampered(codes: Path, folder: Path, change: Any, **scheme: Any) -> Path:
    config, tensors = folders.read(codes)
    change(tensors)
    folders.write(folder, config, tensors)
    sums = checksum_of_files([folder / "model.safetensors"])
    config["quantization_config"] |= {"checksum": sums} | scheme
    folders.write(folder, config, tensors)
    return folder


SCALE = "model.layers.0.block_sparse_moe.experts.1.w1.weight_scale"


@pytest.mark.parametrize(
    ("change", "scheme", "message"),
    [
        (lambda t: t[SCALE].fill_(-1), {}, "gate_up_proj.weight_scale has a scale that is not positive"),
        (lambda t: t.pop(SCALE), {}, "w1.weight_scale is missing; quantize the model again"),
        (lambda t: t.update({SCALE: t[SCALE].half()}), {}, "weight_scale of F16"),
        (lambda t: t.pop("model.layers.1.self_attn.o_proj.weight"), {}, "o_proj.weight is missing"),
        (lambda t: t.pop("model.norm.weight"), {}, r"^model\.norm\.weight is not among the stored tensors"),
        (lambda t: None, {"checksum": 7}, "has other tensors than its checksum"),
        (lambda t: None, {"online": {}}, r"has online = \{\} and head None, but rotation 'blocks' of this model needs"),
        (lambda t: None, {"rotation": None}, "but rotation None of this model needs {}"),
        (lambda t: None, {"rotation": "auto"}, "has rotation 'auto', which hadagen does not write"),
        (lambda t: None, {"rotation": "quarot"}, "but rotation 'quarot' of this model needs"),
        (lambda t: None, {"layers": ["q_proj"]}, "online names the layer"),
        (lambda t: None, {"ignore": ["lm_head", "o_proj"]}, "."),
        (lambda t: None, {"weights": "fp8"}, "which are no weight of fp8; quantize the model again"),
    ],
)
def test_a_changed_folder_is_one_sentence(change: Any, scheme: Any, message: str, plain: Any, tmp_path: Path) -> None:
    load(plain("mixtral"), quantization_config=HadagenConfig(rotation="blocks")).save_pretrained(tmp_path / "codes")
    with pytest.raises(HadagenError, match=message) as caught:
        load(tampered(tmp_path / "codes", tmp_path / "t", change, **scheme))
    assert "\n" not in str(caught.value)


def test_scales_of_a_text(plain: Any, tmp_path: Path) -> None:
    """Layers of any model have them, but for experts."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(1 + at * 7 % 80) for at in range(100)))
    for kind in ("gpt2", "mixtral"):
        write_tokenizer(plain(kind))
        options = "--weights", "fp8", "--activations", "fp8-tensor", "--calibrate", text
        if kind == "mixtral":
            found = sentence(run_command("quantize", plain(kind), tmp_path / kind, *options), 2)
            assert "so fp8-tensor has no scales for them; use fp8-row" in found
            assert not (tmp_path / kind).exists()
            continue
        succeed("quantize", plain(kind), tmp_path / kind, *options)
        model = load(tmp_path / kind)
        assert model.transformer.h[0].mlp.c_fc.input_scale > 0
        assert error(logits(model), logits(load(plain(kind)))) < 0.1


def test_a_family_with_other_parts_is_one_sentence(plain: Any) -> None:
    from hadagen.models.linears import known_sizes, planned_of
    from hadagen.models.scheme import Scheme

    model = load(plain("phi3"))
    model.model.layers[1].mlp.router = torch.nn.Linear(48, 4)
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.router.* is no part of a phi3 that predicts tokens"):
        planned_of(model, Scheme(), known_sizes(model, Scheme()))


def test_conversions_of_transformers_suit_codes() -> None:
    """Renamed weights take their scales along; what moves other than rows is left out."""
    from transformers.core_model_loading import Chunk, PermuteForRope, WeightConverter, WeightRenaming

    from hadagen.integrations.transformers import of_codes
    from hadagen.models.scheme import Scheme

    layers = {name: QuantizedLinear(name, Scheme(), 8, 8) for name in ("q_proj", "k_proj", "v_proj")}
    model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict(layers)})
    given = [
        WeightRenaming("wv.weight", "attn.v_proj.weight"),
        WeightRenaming("old", "new"),
        WeightConverter(r"\.qkv\.weight", [r"\.attn\.q_proj\.weight", r"\.k_proj\.weight"], [Chunk(dim=0)]),
        WeightConverter(r"\.qkv\.bias", [r"\.attn\.q_proj\.bias", r"\.k_proj\.bias"], [Chunk(dim=0)]),
        WeightConverter(r"attn\.wq\.", "attn.q_proj.", [PermuteForRope()]),
        WeightConverter("experts.b.bias", "attn.k_proj_bias", [Chunk(dim=0)]),
    ]
    found = [(each._original_source_patterns, each._original_target_patterns) for each in of_codes(given, model)]
    assert found == [
        (["wv.weight"], ["attn.v_proj.weight"]),
        (["wv.weight_scale"], ["attn.v_proj.weight_scale"]),
        (["old"], ["new"]),
        ([r"\.qkv\.weight"], [r"\.attn\.q_proj.weight", r"\.k_proj.weight"]),
        ([r"\.qkv\.weight_scale"], [r"\.attn\.q_proj.weight_scale", r"\.k_proj.weight_scale"]),
        ([r"\.qkv\.bias"], [r"\.attn\.q_proj\.bias", r"\.k_proj\.bias"]),
        (["experts.b.bias"], ["attn.k_proj.bias"]),
    ]
