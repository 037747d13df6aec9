"""A cache in codes in models of any architecture: which attention takes it, and that models with it are stored.

How exactly each type computes with it is a column of `docs/data/models.csv`.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.0")
import transformers
from command_line import succeed
from every_model import logits_of_steps, made
from tiny_models import TOKENS, error

from hadagen.errors import UsageError
from hadagen.integrations.transformers import HadagenConfig
from hadagen.integrations.transformers_attention import takes_codes, updates

FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize(
    ("kind", "options", "rotation"),
    [
        ("gemma2", {"cache": "int8"}, "blocks"),
        ("gemma2", {"cache": "int8", "weights": "fp8"}, "heads"),  # of keys alone, as values cannot be folded
        ("phi3", {"cache": "fp8"}, "quarot"),
        ("gpt_oss", {"cache": "int8", "rotation": None}, None),
    ],
)
def test_a_cache_in_codes(kind: str, options: dict[str, Any], rotation: Any, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=HadagenConfig(**options))
    assert model.config.quantization_config.rotation == rotation
    found = logits_of_steps(model)
    assert error(found, logits_of_steps(load(tmp_path / "plain"))) < (0.1 if "fp8" not in options.values() else 0.2)
    with torch.no_grad():
        assert {each.keys.dtype for each in model(TOKENS).cache.layers} == {torch.uint8}
    torch.save(model, tmp_path / "model.pt")
    for again in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(logits_of_steps(again), found)
    model.save_pretrained(tmp_path / "codes")
    assert torch.equal(logits_of_steps(load(tmp_path / "codes")), found)
    named = {name: str(value or "none") for name, value in options.items()}
    succeed("quantize", tmp_path / "plain", tmp_path / "files", *(f"--{name}={value}" for name, value in named.items()))
    again = load(tmp_path / "files")
    assert torch.equal(logits_of_steps(again), found)
    tokens = TOKENS[:, :5]
    assert torch.equal(
        again.generate(tokens, max_new_tokens=4, do_sample=False),
        again.generate(tokens, max_new_tokens=4, do_sample=False, cache_implementation="static"),
    )


def test_a_model_with_a_cache_in_codes_compiles(tmp_path: Path) -> None:
    torch._dynamo.reset()
    made("gemma2").save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=HadagenConfig(cache="int8"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        steps = [model(TOKENS[:, :12], cache=cache).logits, compiled(TOKENS[:, 12:], cache=cache).logits]
        assert error(torch.cat(steps, 1), model(TOKENS).logits) < 1e-3


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "gpt_neox",
            "GPTNeoXAttention takes no cache in codes, because hadagen does not know all that it does with keys",
        ),
        ("doge", "DogeAttention takes no cache in codes"),  # which reads values for its mask
        ("gemma4_text", "Gemma4TextAttention takes no cache in codes"),  # whose layers share keys
        ("bart", "BartAttention takes no cache in codes"),  # which reads what the cache of an encoder holds
        ("mamba", "MambaForCausalLM has no attention that keeps keys and values; leave cache out"),
    ],
)
def test_other_attention_is_one_sentence(kind: str, message: str, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=message):
        load(tmp_path, quantization_config=HadagenConfig(cache="int8"))


def test_keys_and_values_have_one_length(tmp_path: Path) -> None:
    made("mimo_v2_flash").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"MiMoV2FlashAttention has heads of \[8, 16\] elements, and a cache in codes"):
        load(tmp_path, v_head_dim=8, ignore_mismatched_sizes=True, quantization_config=HadagenConfig(cache="int8"))


# ---- the code of attention -------------------------------------------------------------------------------------------
class Attention:
    def known(self: Any, x: Any, cache: Any) -> Any:
        query, key, value = x, x, x
        if cache is not None:
            past = cache.get_seq_length()
            key, value = cache.update(key, value, past, kwargs={})
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)  # type: ignore[name-defined] # noqa: F821
        return interface(self, query, key, value, None)

    def reads_values(self: Any, x: Any, cache: Any) -> Any:
        key, value = cache.update(x, x, 0)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)  # type: ignore[name-defined] # noqa: F821
        return interface(self, x, key, value, value.sum())

    def swaps(self: Any, x: Any, cache: Any) -> Any:
        key, value = cache.update(x, x, 0)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)  # type: ignore[name-defined] # noqa: F821
        return interface(self, x, value, key)

    def hands_on(self: Any, x: Any, cache: Any) -> Any:
        key, value = cache.update(x, x, 0)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)  # type: ignore[name-defined] # noqa: F821
        return interface(self, x, key, value, cache)

    def other_attribute(self: Any, x: Any, cache: Any) -> Any:
        key, value = cache.update(x, x, cache.layers[0])
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)  # type: ignore[name-defined] # noqa: F821
        return interface(self, x, key, value)

    def own_product(self: Any, x: Any, cache: Any) -> Any:
        key, value = cache.update(x, x, 0)
        return x @ key @ value

    def keeps_some(self: Any, x: Any, cache: Any) -> Any:
        key, value = x, x
        if cache is not None and self.layer < 3:
            key, value = cache.update(key, value, 0)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)  # type: ignore[name-defined] # noqa: F821
        return interface(self, x, key, value)

    def keeps_own(self: Any, x: Any, cache: Any, shared: Any) -> Any:
        key, value = x, x
        if shared is not None:
            key, value = shared
        elif cache is not None:
            key, value = cache.update(key, value, 0)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)  # type: ignore[name-defined] # noqa: F821
        return interface(self, x, key, value)

    def keeps_none(self: Any, x: Any, cache: dict[str, Any]) -> Any:
        cache.update(x)
        return x


def test_the_code_of_attention() -> None:
    functions = {name: each for name, each in vars(Attention).items() if not name.startswith("_")}
    assert {name for name, each in functions.items() if not updates(each)} == {"keeps_none"}
    assert {name for name, each in functions.items() if takes_codes(each, FUNCTIONS)} == {"known"}
    assert not takes_codes(Attention.known, "OTHERS")
    assert not updates(eval("lambda self, x, cache: cache.update(x, x, 0)"))  # without a source
