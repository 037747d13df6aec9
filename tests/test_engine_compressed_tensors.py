"""Checkpoints that llm-compressor writes, on hadagen. `make engine-test` downloads it; other runs skip this."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = os.environ.get("HADAGEN_TEST_LLMCOMPRESSOR", "")
pytestmark = pytest.mark.skipif(not ENGINE, reason="needs llm-compressor: run make engine-test")

# Writes a checkpoint of a small Llama with transforms, then loads it with transformers, and prints the differences of
# logits: of the loaded model from that of llm-compressor, with the host's product and with hadagen; the largest logit;
# how often the host multiplied by a dense matrix, without hadagen, with it, and with it after llm-compressor has run
# again; and how many elements of the weights of that run differ.
PROGRAM = """
import sys
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
import compressed_tensors.transform.factory.hadamard as theirs
from hadagen.integrations import compressed_tensors

folder, recipe, dtype = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3])
torch.manual_seed(0)
settings = LlamaConfig(
    hidden_size=96, intermediate_size=384, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
    head_dim=32, vocab_size=128, initializer_range=0.2,
)
base = folder + "/base"
LlamaForCausalLM(settings).to(dtype).save_pretrained(base)
model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
oneshot(model=model, recipe=eval(recipe), pipeline="datafree")
weights = {name: each.clone() for name, each in model.state_dict().items()}
ids = torch.arange(32)[None]
with torch.no_grad():
    expected = model(ids).logits
model.save_pretrained(folder, save_compressed=True)
products, counts = [], []
product = theirs.apply_transform_weight
theirs.apply_transform_weight = lambda *given: products.append(1) or product(*given)

def logits():
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    compressed_tensors.load_transforms(loaded, folder)
    products.clear()
    with torch.no_grad():
        found = loaded(ids).logits
    counts.append(len(products))
    return found

off = logits()
assert compressed_tensors.enable()
on = logits()
again = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
oneshot(model=again, recipe=eval(recipe), pipeline="datafree")  # with weights that hadagen rotates
counts.append(len(products))
state = again.state_dict()
assert list(state) == list(weights)
# A zero may be the rounding error of float64 instead.
counts.append(sum(int(((each - state[name]).abs() > 1e-15).sum()) for name, each in weights.items()))
print(*[float((each - expected).abs().max()) for each in (off, on)], float(expected.abs().max()), *counts)
"""


SPINQUANT = "[SpinQuantModifier(rotations=['R1', 'R2', 'R3', 'R4'], transform_type='random-hadamard')]"
BLOCKS = "[SpinQuantModifier(rotations=['R1', 'R2', 'R4'], transform_type='hadamard', transform_block_size=32)]"
QUIP = "[QuIPModifier(rotations=['v', 'u'], transform_type='random-hadamard')]"
W8A8 = QUIP[:-1] + ", QuantizationModifier(targets='Linear', scheme='W8A8', ignore=['lm_head'])]"


@pytest.mark.parametrize(
    ("recipe", "dtype", "margin"),
    [
        (SPINQUANT, "float32", 1e-5),
        (SPINQUANT, "bfloat16", 5e-2),
        (BLOCKS, "float32", 1e-5),
        (QUIP, "float32", 1e-5),
        (W8A8, "bfloat16", 5e-2),
    ],
)
def test_a_checkpoint_rotates_with_hadagen(tmp_path: Path, recipe: str, dtype: str, margin: float) -> None:
    """llm-compressor 0.14.0.1 with compressed-tensors 0.19.0.

    The margin is a part of the largest logit: roundings of two layers.
    """
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), recipe, dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ENGINE}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    off, on, largest, *products = map(float, done.stdout.splitlines()[-1].split())
    assert max(off, on) <= margin * largest
    assert products[0] > 0
    assert products[1:] == [0, 0, 0]
