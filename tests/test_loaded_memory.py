"""The memory of a loaded model: its codes and scales, what keeps its type, and little else."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.0")
import transformers
from tiny_models import TOKENS, config_of

from hadagen.integrations.transformers import HadagenConfig
from hadagen.models.layers import TYPES
from hadagen.models.merged import unmerged

MORE = 1.03
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64}
# A Llama-like model, one whose activation is another, and experts.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"query_pre_attn_scalar": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def storages() -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors of this process, by where they lie."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return {each.data_ptr(): each for each in (tensor.untyped_storage() for tensor in tensors)}


def held(before: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of the storages that came since."""
    return sum(each.nbytes() for at, each in storages().items() if at not in before)


def wanted(model: Any, weights: str) -> int:
    """Bytes of codes, scales, and tensors without codes: in 16 bits, but for buffers."""
    state = {(each.data_ptr(), each.nbytes): each for each in unmerged(model).values()}.values()  # tied ones once
    kinds = {each.dtype for each in state}
    assert kinds == {TYPES[weights], torch.float32, torch.bfloat16}
    return sum(each.nbytes for each in (*state, *model.buffers()))


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_is_its_codes_and_scales(kind: str, weights: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = config_of(kind, **SIZES | KINDS[kind])
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "plain")
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    for folder, options in (("plain", {"quantization_config": HadagenConfig(weights)}), ("codes", {})):
        before = storages()
        model = load(tmp_path / folder, dtype=torch.bfloat16, **options)
        limit = MORE * wanted(model, weights)
        assert held(before) <= limit, folder
        with torch.no_grad():
            model(TOKENS)
        assert held(before) <= limit, "after a pass"
        if folder == "plain":
            model.save_pretrained(tmp_path / "codes")
        del model
