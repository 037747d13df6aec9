"""hadagen's hooks in vLLM, with vLLM on a CPU. `make engine-test` downloads it; other runs skip this."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_program import PROMPT, TOKENS

VLLM = os.environ.get("HADAGEN_TEST_VLLM", "")
pytestmark = pytest.mark.skipif(not VLLM, reason="needs vLLM: run make engine-test")

PROGRAM = Path(__file__).parent / "vllm_program.py"
FAST = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles its sampler even with enforce_eager
}


def run(*arguments: str | Path, **environment: str) -> Any:
    """What `vllm_program.py` prints."""
    command = [sys.executable, PROGRAM, *arguments]
    variables = os.environ | FAST | {"PYTHONPATH": VLLM} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False, dtype="float32")
    with torch.device("cpu"):
        return LlamaForCausalLM(config).float().eval()


def greedy(model: Any) -> list[int]:
    """The tokens that transformers generates."""
    tokens = torch.tensor([PROMPT], device="cpu")
    with torch.inference_mode():
        for _ in range(TOKENS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(PROMPT) :].tolist()


def save(folder: Path, model: Any, quantization: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    config = json.loads(model.config.to_json_string()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    save_file(
        {name: each.detach().clone().contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    return folder


# ---- transforms of compressed-tensors --------------------------------------------------------------------------------
GATE_AND_UP = ["re:.*gate_proj", "re:.*up_proj"]


def transformed(folder: Path, *, block: int | None = None, randomize: bool = False, wrong: bool = False) -> list[int]:
    """Write a checkpoint of compressed-tensors, and return the tokens of the model before its transforms.

    block: of the random transform. wrong: the random matrix has one wrong entry.
    """
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    def scheme(type: str, targets: str | list[str], location: str, behind: str | list[str], **rest: Any) -> Any:
        online = {"targets": targets, "location": location}
        folded = {"targets": behind, "location": "weight_input", "inverse": True}
        return {"type": type, "apply": [online, folded], **rest}

    model = small_llama()
    tokens = greedy(model)
    groups = {
        "R2": scheme("hadamard", "re:.*v_proj", "output", "re:.*o_proj", head_dim=32),
        "R4": scheme("random-hadamard", "re:.*down_proj", "input", "re:.*down_proj", head_dim=block),
        "R5": scheme("hadamard", GATE_AND_UP, "input", GATE_AND_UP),
    }
    config = TransformConfig(config_groups=groups)
    apply_transform_config(model, config)
    tensors = model.state_dict()
    if wrong:
        next(each for name, each in tensors.items() if "R4" in name)[3, 5] *= -1  # both layers share it
    written = json.loads(config.model_dump_json())
    written["config_groups"]["R4"]["randomize"] = randomize
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    save(folder, model, quantization | {"transform_config": written}, tensors)
    return tokens


def test_transforms_of_a_checkpoint_run_on_hadagen(tmp_path: Path) -> None:
    tokens = transformed(tmp_path / "model")
    found = run("transforms", tmp_path / "model")
    print(f"least margin of the log-probabilities: {found['margin']:.3g}")
    assert found["tokens"] == tokens
    assert found["margin"] > 1e-4  # hundreds of roundings of float32
    assert not found["warned"]
    assert found["dense"] == found["hadacore"] == 0

    alone = run("transforms", tmp_path / "model", HADAGEN_INTEGRATIONS="none")
    assert alone["tokens"] == tokens
    assert alone["dense"] > 0
    assert alone["hadacore"] > 0
    assert not alone["warned"]


def test_a_changed_host_computes_transforms_by_itself(tmp_path: Path) -> None:
    tokens = transformed(tmp_path / "model")
    found = run("transforms", tmp_path / "model", "changed")
    assert found["tokens"] == tokens
    assert found["dense"] > 0
    [said] = found["warned"]
    assert "HadamardTransform.forward takes self, x, part_id, not self, value, part_id" in said


def test_a_weight_that_is_no_hadamard_matrix_is_multiplied_by_the_host(tmp_path: Path) -> None:
    transformed(tmp_path / "model", wrong=True)
    found = run("transforms", tmp_path / "model")
    [said] = found["warned"]
    assert "in the transform R4, weight is not diag(signs) times a Hadamard matrix" in said
    assert found["dense"] == 2 * TOKENS
    assert found["hadacore"] == 0


def test_the_operator_of_hadacore_runs_on_hadagen_and_permutations_are_refused(tmp_path: Path) -> None:
    transformed(tmp_path / "model", randomize=True)
    found = run("refusals", tmp_path / "model")
    assert found["error"] < 1e-5
    assert found["kept"]
    assert found["inplace"]
    assert found["hadacore"] == 0
    assert found["refused"].startswith("UsageError: the transform R4 has randomize=true")


def test_transforms_in_blocks_run_with_tensor_parallelism(tmp_path: Path) -> None:
    """Each of two ranks has 3 of 6 blocks of R4, 1 of 2 heads of R2, and the whole input of R5."""
    tokens = transformed(tmp_path / "model", block=32)
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    found = run("parallel", tmp_path / "model", **several)
    assert found["tokens"] == tokens
