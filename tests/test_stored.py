"""`hadagen.models.stored`: a folder of codes is right, or it is refused."""

import copy
import random
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.0")
import accelerate
import safetensors.torch
import stored_folders as folders
import transformers
from tiny_models import TOKENS, logits, model_of
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.func import functional_call
from torch.nn.utils import parametrize
from transformers.quantizers import auto

from hadagen.errors import HadagenError, UsageError
from hadagen.integrations.transformers import HadagenConfig, HadagenQuantizer
from hadagen.models.modules import RotatedLinear
from hadagen.models.scheme import LAYERS
from hadagen.models.stored import UNFINISHED, checksum_of_files

ROOT = Path(__file__).resolve().parent.parent
SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {},
    "fp8": {
        "weights": "fp8",
        "rotation": "heads",
        "cache": "int8",
        "ignore": ["lm_head", "model.layers.1.mlp.up_proj"],
    },
    "blocks": {"rotation": "blocks", "activations": None},
    "int4": {"weights": "int4"},
}


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name → a folder that hadagen has written, and one of the same model without codes."""

    @cache
    def write(name: str) -> tuple[Path, Path]:
        folder: Path = tmp_path_factory.mktemp(name)
        model_of("qwen3", tie_word_embeddings=name == "fp8").save_pretrained(folder / "plain")
        load(folder / "plain", quantization_config=HadagenConfig(**SCHEMES[name])).save_pretrained(folder / "codes")
        return folder / "plain", folder / "codes"

    return write


def outcome(folder: Path, wanted: list[Any]) -> str:
    """Whether a folder is "refused", by hadagen or another, "right", or "silent": wrong without an error."""
    try:
        found = logits(load(folder))
    except HadagenError as error:
        return "several lines" if "\n" in str(error) else "refused"
    except Exception as error:
        own = [
            each.filename
            for each in traceback.extract_tb(error.__traceback__)
            if str(ROOT / "hadagen") in each.filename
        ]
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        return f"a fault of hadagen: {error!r}" if own and str(ROOT / "hadagen") in last else "refused by transformers"
    for make in wanted:
        try:
            expected = make()
        except Exception:
            continue
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-3, equal_nan=True):
            return "right"
    return "silent"


def changed(seed: int, written: Any, folder: Path) -> tuple[str, str]:
    """What was changed in a folder, and its outcome."""
    draw = random.Random(seed)
    name = draw.choice(sorted(SCHEMES))
    plain, codes = written(name)
    config, tensors = folders.read(codes)
    wanted = [lambda: logits(load(codes))]
    if draw.random() < 0.5:
        done = folders.change_config(config, draw)
        other, parameters = folders.read(plain)
        given = copy.deepcopy(config)
        quantization = given.pop("quantization_config", None)
        folders.write(folder / "plain", other | given, parameters)
        said = quantization if isinstance(quantization, dict) else {}
        for scheme in (SCHEMES[name], {key: said[key] for key in folders.SCHEME if key in said}):
            wanted.append(lambda s=scheme: logits(load(folder / "plain", quantization_config=HadagenConfig(**s))))
    else:
        done = folders.change_tensor(tensors, draw)
    folders.write(folder / "codes", config, tensors)
    return f"{name}: {done}", outcome(folder / "codes", wanted)


@pytest.mark.parametrize("chunk", range(125))
def test_a_changed_folder_is_right_or_refused(chunk: int, written: Any, tmp_path: Path) -> None:
    found = {seed: changed(seed, written, tmp_path) for seed in range(8 * chunk, 8 * chunk + 8)}
    print(Counter(end for _, end in found.values()))
    bad = {seed: each for seed, each in found.items() if each[1] not in ("right", "refused", "refused by transformers")}
    assert not bad


# ---- values that the checksum does not notice ------------------------------------------------------------------------
def tampered(codes: Path, folder: Path, change: Any, **scheme: Any) -> Path:
    """A folder with a change of its tensors, and the checksum of the new ones."""
    config, tensors = folders.read(codes)
    change(tensors)
    folders.write(folder, config, tensors)
    config["quantization_config"] |= {"checksum": checksum_of_files([folder / "model.safetensors"])} | scheme
    folders.write(folder, config, tensors)
    return folder


SCALE, CODES = "model.layers.1.mlp.up_proj.weight_scale", "model.layers.0.self_attn.k_proj.weight"
NOT_WRITTEN = "which hadagen does not write; quantize the model again"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", ["int8", "blocks", "int4"])
def test_impossible_scales_are_one_sentence(scheme: str, value: float, written: Any, tmp_path: Path) -> None:
    folder = tampered(written(scheme)[1], tmp_path / "t", lambda tensors: tensors[SCALE].view(-1)[5].fill_(value))
    with pytest.raises(UsageError, match=f"up_proj.weight_scale has a scale that is not positive and .*{NOT_WRITTEN}"):
        load(folder)


@pytest.mark.parametrize(("scheme", "byte"), [("int8", 0x80), ("fp8", 0x7F), ("fp8", 0xFF)])
def test_impossible_codes_are_one_sentence(scheme: str, byte: int, written: Any, tmp_path: Path) -> None:
    plain, codes = written(scheme)
    poke = lambda tensors, name=CODES: tensors[name].view(torch.uint8).view(-1)[7].fill_(byte)  # noqa: E731
    with pytest.raises(UsageError, match=f"k_proj.weight has (NaN|-128), {NOT_WRITTEN}"):
        load(tampered(codes, tmp_path / "t", poke))
    model = load(plain, quantization_config=HadagenConfig(**SCHEMES[scheme]))
    state = model.state_dict()
    before = logits(model)
    joined = CODES.replace("k_proj.", "q_proj.joined.")
    state[joined] = state[joined].clone()
    poke(state, joined)
    with pytest.raises(UsageError, match=NOT_WRITTEN):
        model.load_state_dict(state)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), "has no tensor model.layers.1.mlp.up_proj.weight_scale; download"),
        (lambda t: t.pop(CODES), "has no tensor model.layers.0.self_attn.k_proj.weight; download"),
        (lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"), "q_norm.weight is not among the stored tensors"),
        (
            lambda t: t.update({CODES: t[CODES].squeeze(-1)}),
            r"the shape \[32, 48\], but .* says \[32, 48, 1",
        ),
        (lambda t: t.update({SCALE: t[SCALE].half()}), "has the type F16; quantize the model again, for F32"),
        (lambda t: t.update({"model.norm.bias": torch.zeros(48)}), "model.norm.bias is no part of a qwen3"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}),
            "bias is stored, but config",
        ),
    ],
)
def test_other_tensors_are_one_sentence(change: Any, message: str, written: Any, tmp_path: Path) -> None:
    with pytest.raises(HadagenError, match=message):
        load(tampered(written("int8")[1], tmp_path / "t", change))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"online": {}}, r"has online = \{\}, but rotation 'quarot' of this model needs \{'down_proj': \(96, None\)"),
        ({"online": {"down_proj": {"n": 96, "block": 32}}}, r"has online = \{'down_proj': \(96, 32\)\}, but"),
        ({"rotation": None}, r"but rotation None of this model needs \{\}"),
        ({"ignore": ["lm_head", "o_proj"]}, "o_proj.weight has the type I8; quantize the model again, for F16"),
        ({"head": None}, "has rotation 'quarot' and head None, which do not go together; quantize"),
        ({"head": 8}, "has heads of 8, but config.json says 16"),
        ({"head": 0}, "head = 0 is no length of heads"),
        ({"activations": "fp8-tensor"}, "has no tensor model.layers.0.self_attn.q_proj.input_scale"),
        ({"checksum": None}, "has other tensors than its checksum in config.json says"),
    ],
)
def test_another_scheme_is_one_sentence(scheme: Any, message: str, written: Any, tmp_path: Path) -> None:
    with pytest.raises(HadagenError, match=message):
        load(tampered(written("int8")[1], tmp_path / "t", lambda tensors: None, **scheme))


def test_a_folder_that_is_not_complete_is_one_sentence(written: Any, tmp_path: Path) -> None:
    folder = tampered(written("int8")[1], tmp_path / "t", lambda tensors: None)
    (folder / UNFINISHED).write_text("{}")
    with pytest.raises(UsageError, match="is not complete; run the hadagen quantize that began it again"):
        load(folder)


def test_a_state_dict_that_lacks_a_tensor_is_one_sentence(written: Any) -> None:
    config = transformers.AutoConfig.from_pretrained(written("int8")[1])
    kind, state = transformers.Qwen3ForCausalLM, folders.read(written("int8")[1])[1]
    want = logits(load(written("int8")[1]))
    assert torch.equal(logits(kind.from_pretrained(None, config=config, state_dict=dict(state))), want)
    del state[SCALE]
    with pytest.raises(UsageError, match=r"up_proj\.weight_scale is not among the stored tensors"):
        kind.from_pretrained(None, config=config, state_dict=state)


# ---- programs that know nothing of hadagen ---------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_other_programs_refuse_codes(scheme: str, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, codes = written(scheme)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "hadagen")
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "hadagen")
    state = folders.read(codes)[1]
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(codes)
    model = load(plain)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state, strict=False, assign=True)
    for device_map in (None, {"": "cpu"}):
        with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|this looks incorrect"):
            accelerate.load_checkpoint_in_model(model, str(codes), device_map=device_map)


# ---- what a rotation has changed -------------------------------------------------------------------------------------
def test_adapters_and_embeddings_of_the_original_model_are_refused(written: Any) -> None:
    """PEFT adapts layers of PyTorch's classes, copies, and parametrized weights."""
    plain, codes = written("int8")
    for model in (load(codes), load(plain, quantization_config=HadagenConfig(ignore=("lm_head", "o_proj")))):
        kinds = torch.nn.Linear, torch.nn.Embedding
        assert not [name for name, layer in model.named_modules() if isinstance(layer, kinds)]
        for given in (
            {"inputs_embeds": torch.ones(1, 3, 48)},
            {"input_ids": None, "inputs_embeds": torch.ones(1, 3, 48)},
        ):
            with pytest.raises(
                UsageError, match="the model is rotated, so inputs_embeds of the original model do not fit"
            ):
                model(**given)
        with pytest.raises(UsageError, match="so inputs_embeds of the original"):
            model.model(None, None, None, None, torch.ones(1, 3, 48))
        for method in (model.load_adapter, model.add_adapter):
            with pytest.raises(UsageError, match="so adapters of the original model do not fit"):
                method("adapter")
        for name in ("lm_head", "model.embed_tokens", "model.norm"):
            layer = model.get_submodule(name)
            wrapper = torch.nn.ModuleDict({"modules_to_save": torch.nn.ModuleDict({"default": copy.deepcopy(layer)})})
            layer.load_state_dict(layer.state_dict())
            with pytest.raises(UsageError, match="so adapters of the original model do not fit"):
                wrapper.load_state_dict(wrapper.state_dict())
        parametrize.register_parametrization(model.lm_head, "weight", torch.nn.Identity())
        with pytest.raises(UsageError, match="so adapters of the original model do not fit"):
            logits(model)


def test_layers_that_no_rotation_has_changed_stay_as_they_are(written: Any) -> None:
    model = load(written("int8")[0], quantization_config=HadagenConfig(rotation="heads", ignore=("lm_head", *LAYERS)))
    changed = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, RotatedLinear)}
    assert changed == {"v_proj", "o_proj"}
    assert logits(model).isfinite().all()
    model(inputs_embeds=torch.ones(1, 3, 48))


@pytest.mark.parametrize("rotation", ["quarot", "blocks", None])
@pytest.mark.parametrize("extra", ["norm", "buffer", "module"])
def test_custom_code_with_more_tensors_is_one_sentence(extra: str, rotation: str | None, written: Any) -> None:
    model = load(written("int8")[0])
    if extra == "norm":
        model.model.embed_norm = type(model.model.norm)(48)
    elif extra == "buffer":
        model.model.register_buffer("gains", torch.ones(48), persistent=False)
    else:
        model.model.layers[1].mlp.router = torch.nn.Linear(48, 4)
    quantizer = HadagenQuantizer(HadagenConfig(rotation=rotation), pre_quantized=False)
    with pytest.raises(UsageError, match=r"(embed_norm|gains|router)\S* is no part of a qwen3 that predicts tokens"):
        quantizer._process_model_before_weight_loading(model)


# ---- the state dict of an MLP ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_other_programs_move_and_store_a_model_in_memory(weights: str, written: Any, tmp_path: Path) -> None:
    def made(seed: int = 0) -> Any:
        return load(written("int8")[0], quantization_config=HadagenConfig(weights, rotation="quarot", seed=seed))

    def found(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(TOKENS).logits

    model, cpu = made(), torch.device("cpu")
    want, state = found(model), model.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    assert get_model_state_dict(model).keys() == state.keys()
    with torch.no_grad():
        assert torch.equal(functional_call(made(1), dict(model.named_parameters()), (TOKENS,)).logits, want)
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    other = made(1)
    safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(found(other), want)
    for device_map in (None, {"": "cpu"}):
        other = made(1)
        accelerate.load_checkpoint_in_model(other, str(tmp_path / "model.safetensors"), device_map=device_map)
        assert torch.equal(found(other), want)
    assert torch.equal(found(accelerate.cpu_offload(copy.deepcopy(model), cpu)), want)
    assert torch.equal(found(accelerate.disk_offload(copy.deepcopy(model), str(tmp_path / "disk"), cpu)), want)
    model.save_pretrained(tmp_path / "folder")
    assert torch.equal(found(load(tmp_path / "folder")), want)
    for device_map in (None, {"": "cpu"}):  # where gate and up are two tensors
        with pytest.raises(ValueError, match=r"load a folder by from_pretrained|this looks incorrect"):
            accelerate.load_checkpoint_in_model(made(1), str(tmp_path / "folder"), device_map=device_map)
