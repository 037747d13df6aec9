"""`hadagen quantize` and `hadagen eval`, on checkpoints of two layers in several files."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run, sentence, succeed

pytest.importorskip("transformers", "5.0")
pytest.importorskip("tokenizers")
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, SIZES, config_of, error, logits, model_of, write_tokenizer

import hadagen
from hadagen.errors import StorageError, UsageError
from hadagen.files.lock_file import sole
from hadagen.integrations.transformers import HadagenConfig
from hadagen.models import output
from hadagen.models.checkpoint import CONFIG, INDEX, convert
from hadagen.models.evaluate import input_scales, read_windows
from hadagen.models.folding import EMBEDDING, HEAD, Sizes, vocabulary_of
from hadagen.models.layers import QuantizedLinear
from hadagen.models.output import LOCK, UNFINISHED
from hadagen.models.scheme import Scheme

pytestmark = pytest.mark.usefixtures("machine")
ROOT = Path(__file__).resolve().parent.parent


def saved(folder: Path, kind: str = "qwen2", max_shard_size: str = "30KB", **options: Any) -> Path:
    """A checkpoint in several files, with a tokenizer."""
    model_of(kind, **options).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    (folder / "LICENSE").write_text("free")
    (folder / "original.pth").write_text("not safetensors")
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return saved(tmp_path / "plain", tie_word_embeddings=True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    numbers = torch.randint(1, SIZES["vocab_size"], (300,), generator=torch.Generator().manual_seed(0))
    (tmp_path / "text.txt").write_text(" ".join(map(str, numbers.tolist())))
    return tmp_path / "text.txt"


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


# ---- what is written -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {}),
        (
            ("--weights", "fp8", "--rotation", "blocks", "--cache", "int8"),
            {"weights": "fp8", "rotation": "blocks", "cache": "int8"},
        ),
        (
            ("--activations", "none", "--rotation", "none", "--ignore", "o_proj"),
            {"activations": None, "rotation": None, "ignore": ["lm_head", "o_proj"]},
        ),
        (("--activations", "fp8-row", "--seed", "7"), {"activations": "fp8-row", "seed": 7}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_files_hold_what_transformers_quantizes(
    arguments: tuple[str, ...], options: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    plain = saved(tmp_path / "plain", tie_word_embeddings=tied)
    out = tmp_path / "out"
    assert "MB of weights, in place of" in succeed("quantize", plain, out, *arguments)
    load(plain, quantization_config=HadagenConfig(**options)).save_pretrained(tmp_path / "expected")
    found, expected = tensors(out), tensors(tmp_path / "expected")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=1e-6, atol=1e-6)
    model, other = load(out), load(tmp_path / "expected")
    assert model.config.quantization_config.to_dict() == other.config.quantization_config.to_dict()
    assert torch.equal(logits(model), logits(other))
    assert error(logits(model), logits(load(plain))) < 0.3
    shards = {path.name for path in plain.glob("*.safetensors")}
    assert len(shards) > 3
    assert {path.name for path in out.iterdir()} - shards == {
        *(CONFIG, INDEX, "generation_config.json", "tokenizer.json", "LICENSE")
    }
    index = json.loads((out / INDEX).read_text())["weight_map"]
    assert all(name in load_file(out / file) for name, file in index.items())
    assert index.keys() == found.keys()


def test_a_tokenizer_and_its_code_are_copied_and_nothing_of_other_weights(plain: Path, tmp_path: Path) -> None:
    wanted = {
        *("tok.py", "vocab.json", "merges.txt", "tokenizer.model", "qwen.tiktoken", "preprocessor_config.json"),
        *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tekken.json", "NOTICE", "license.md"),
    }
    others = {
        *("adapter_config.json", "adapter_model.bin", "pytorch_model.bin.index.json", "params.json", "README.md"),
        *("consolidated.safetensors", "hf_quant_config.json", ".gitattributes", "original/params.json", "x.gguf"),
        *("onnx/model.onnx", "additional_chat_templates/x.bin", "model.safetensors.index.fp32.json", "x.pth"),
    }
    for name in wanted | others:
        (plain / name).parent.mkdir(exist_ok=True)
        (plain / name).write_text(name)
    succeed("quantize", plain, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert wanted <= found
    assert not others & found
    assert (tmp_path / "out" / "tok.py").read_text() == "tok.py"


def test_a_model_in_one_file(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "plain")
    succeed("quantize", tmp_path / "plain", tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()
    assert error(logits(load(tmp_path / "out")), logits(load(tmp_path / "plain"))) < 0.1


def test_a_last_layer_that_is_stored_beside_the_embedding(tmp_path: Path) -> None:
    """Some checkpoints have both, though the configuration says tied: the same, or another."""
    model_of("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "plain")
    path = tmp_path / "plain" / "model.safetensors"
    stored = load_file(path)
    for scale in (1, 2):
        save_file(stored | {"lm_head.weight": scale * stored["model.embed_tokens.weight"]}, path, {"format": "pt"})
        for rotation in ("quarot", "none"):
            out = tmp_path / f"{scale}{rotation}"
            succeed("quantize", tmp_path / "plain", out, "--activations", "none", "--rotation", rotation)
            assert error(logits(load(out)), logits(load(tmp_path / "plain"))) < 0.06


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_one_scale_for_the_activations_of_a_layer(kind: str, text: Path, tmp_path: Path) -> None:
    """In one file, and in several."""
    plain, out = tmp_path / "plain", tmp_path / "out"
    saved(plain, kind, max_shard_size="5GB" if kind == "llama" else "30KB")
    wanted = "--weights", "fp8", "--activations", "fp8-tensor", "--rotation", "quarot"
    succeed("quantize", plain, out, *wanted, "--calibrate", text)
    model = load(out)
    assert error(logits(model), logits(load(plain))) < 0.3
    tokens = torch.tensor([list(map(int, text.read_text().split()))])
    rotated = load(plain, quantization_config=HadagenConfig("fp8", None, "quarot"))
    seen: dict[str, torch.Tensor] = {}
    for name, layer in rotated.named_modules():
        if isinstance(layer, QuantizedLinear):
            layer.register_forward_pre_hook(lambda layer, given, name=name: seen.update({name: given[0]}))
    rotated(tokens)
    scales = {name.removesuffix(".input_scale"): each for name, each in tensors(out).items() if "input_scale" in name}
    assert scales.keys() == seen.keys()
    for name, x in seen.items():
        turned = x if "down" not in name else hadagen.Rotation(96)(x)
        torch.testing.assert_close(scales[name], turned.abs().amax() / 448, rtol=1e-3, atol=0)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))
    for options, fix in (
        (wanted, "give both --activations fp8-tensor and --calibrate"),
        (("--calibrate", str(text)), "leave --calibrate out, or give --weights int4 or --activations fp8-tensor too"),
    ):
        assert sentence(run("quantize", plain, tmp_path / "other", *options), 2).endswith(fix)
    with pytest.raises(UsageError, match="takes its scales from a text; use hadagen quantize with --calibrate"):
        load(plain, quantization_config=HadagenConfig("fp8", "fp8-tensor"))


def test_a_configuration_without_a_type_gets_that_of_the_embedding(tmp_path: Path) -> None:
    plain, out = saved(tmp_path / "plain"), tmp_path / "out"
    config = json.loads((plain / CONFIG).read_text())
    del config["dtype"]
    (plain / CONFIG).write_text(json.dumps(config))
    succeed("quantize", plain, out, "--weights", "fp8")
    assert load(out).dtype == torch.float32


# ---- runs that end early ---------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys
from pathlib import Path
from hadagen.models import checkpoint, output
from hadagen.models.scheme import Scheme
save, left = output.save_file, [2]
def killing(tensors, path, metadata):
    save(tensors, path, metadata)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
output.save_file = killing
list(checkpoint.convert(Path(sys.argv[1]), Path(sys.argv[2]), Scheme()))
"""


def test_a_killed_run_is_continued(plain: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, plain, out], env=environment)
    assert done.returncode == -signal.SIGKILL
    (kept,) = out.glob("*.safetensors")
    before = kept.stat()
    assert "is not complete; run the hadagen quantize that began" in sentence(run("eval", out, "--text", text), 2)
    assert "with other options" in sentence(run("quantize", plain, out, "--seed", "1"), 2)

    result = run("quantize", plain, out)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0] == f"{kept.name}: kept"
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not list(out.glob(".*"))
    succeed("quantize", plain, tmp_path / "at once")
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "at once" / path.name).read_bytes()
    assert sentence(run("quantize", plain, out), 2) == f"{out} is not empty; name a new folder"


def test_another_model_is_not_mixed_in(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = convert(plain, out, Scheme())
    next(steps)
    steps.close()
    with pytest.raises(UsageError, match="is not complete; run the hadagen quantize that began it again"):
        next(convert(out, tmp_path / "twice", Scheme()))
    other = saved(tmp_path / "other", seed=1, tie_word_embeddings=True)
    with pytest.raises(UsageError, match="files of another model or with other options"):
        next(convert(other, out, Scheme()))
    assert (out / UNFINISHED).exists()


def begun(plain: Path, out: Path, files: int = 2) -> list[Path]:
    """A folder as a run leaves it that was killed after some files, which are returned."""
    steps = convert(plain, out, Scheme())
    found = [out / next(steps)[0] for _ in range(files)]
    steps.close()
    return found


def test_one_run_at_a_time_writes_to_a_folder(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = convert(plain, out, Scheme())
    next(steps)
    for options in ((), ("--weights", "fp8")):
        said = sentence(run("quantize", plain, out, *options), 1 if not options else 2)
        assert said.startswith("another hadagen quantize writes to" if not options else f"{out} has files of another")
    assert len([*steps]) > 2
    assert not (out / LOCK).exists()
    load(out)


def test_a_folder_is_new_again_after_a_race_for_its_lock(tmp_path: Path) -> None:
    """The lock file that a process opened may be removed by the one that held it."""
    place = tmp_path / "lock"
    with sole(place) as first, sole(place) as second:
        assert (first, second) == (True, False)
        place.unlink()
        with sole(place) as third:
            assert third
    assert not place.exists()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def take_another(path: Path) -> None:
    path.write_bytes(path.with_name(path.name.replace("00001", "00002")).read_bytes())


def link_to_it(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


def forget(path: Path) -> None:
    plan = json.loads((path.parent / UNFINISHED).read_text())
    plan["made"] = {
        "../text.txt": {},
        path.name: 5,
        **{name: each for name, each in plan["made"].items() if "2" in name},
    }
    (path.parent / UNFINISHED).write_text(json.dumps(plan))


@pytest.mark.parametrize("change", [damage, take_another, link_to_it, forget, Path.unlink])
def test_a_file_is_kept_if_it_is_as_it_was_written(change: Callable[[Path], None], plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, _ = begun(plain, out)
    change(first)
    assert [is_kept for _, is_kept in convert(plain, out, Scheme())][:3] == [False, True, False]
    assert not first.is_symlink()
    succeed("quantize", plain, tmp_path / "at once")
    assert first.read_bytes() == (tmp_path / "at once" / first.name).read_bytes()


def test_a_file_of_which_nothing_is_left_is_kept_too(plain: Path, tmp_path: Path) -> None:
    """That of a last layer, which is the embedding."""
    held = load_file(plain / json.loads((plain / INDEX).read_text())["weight_map"][EMBEDDING])
    save_file({HEAD: held[EMBEDDING]}, plain / "zlast.safetensors", {"format": "pt"})
    index("zlast.safetensors", HEAD)(plain / INDEX)
    out, files = tmp_path / "out", len([*plain.glob("*.safetensors")])
    begun(plain, out, files)
    assert [is_kept for _, is_kept in convert(plain, out, Scheme())] == [True] * files
    assert error(logits(load(out)), logits(load(plain))) < 0.3


def test_no_link_is_followed(plain: Path, text: Path, tmp_path: Path) -> None:
    templates = "additional_chat_templates"
    (plain / templates).mkdir()
    (plain / templates / "tool_use.jinja").write_text("T")
    out, folder, before = tmp_path / "out", tmp_path / "folder", text.read_bytes()
    folder.mkdir()
    begun(plain, out)
    for name in (CONFIG, INDEX, "tokenizer.json", "model-00004-of-00010.safetensors"):
        (out / name).symlink_to(text)
    (out / templates).symlink_to(folder)
    succeed("quantize", plain, out)
    assert text.read_bytes() == before
    assert not [*folder.iterdir()]
    assert not [path for path in out.iterdir() if path.is_symlink()]
    (tmp_path / "link").symlink_to(folder)
    succeed("quantize", plain, tmp_path / "link")
    assert (folder / CONFIG).exists()
    assert (tmp_path / "link").is_symlink()
    for name in (UNFINISHED, LOCK):
        begun(plain, tmp_path / name)
        (tmp_path / name / name).unlink(missing_ok=True)
        (tmp_path / name / name).symlink_to(text)
        assert sentence(run("quantize", plain, tmp_path / name), 2 if name == UNFINISHED else 1)
        assert text.read_bytes() == before


def test_what_others_put_into_a_folder_is_no_part_of_its_model(plain: Path, tmp_path: Path) -> None:
    """transformers would take a model.safetensors before the files of an index."""
    begun(plain, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").touch()
    said = sentence(run("quantize", plain, tmp_path / "out"), 2)
    assert said.endswith("has 'model.safetensors', which is no part of the model; remove it, or name a new folder")


@pytest.mark.parametrize("is_there", [False, True])
def test_after_a_refusal_a_folder_is_as_before(is_there: bool, plain: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", "model.layers.1.mlp.up_proj.weight"
    file = plain / json.loads((plain / INDEX).read_text())["weight_map"][name]
    held = load_file(file)
    save_file(held | {name: torch.full_like(held[name], torch.nan)}, file, {"format": "pt"})
    if is_there:
        out.mkdir()
    result = run("quantize", plain, out)
    assert f"{name} has infinities or NaN" in result.stderr
    assert "written" in result.stderr
    assert ([*out.iterdir()] == []) if is_there else not out.exists()
    save_file(held, file, {"format": "pt"})
    succeed("quantize", plain, out, "--weights", "fp8")


def test_nobody_loads_a_folder_whose_run_was_killed_while_calibrating(plain: Path, text: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "out", []
    wanted = Scheme("fp8", "fp8-tensor")

    def kill(folder: Path, fold: Any) -> dict[str, torch.Tensor]:
        seen.append(load(folder).config.quantization_config.activations)
        seen.append([path.name for path in out.iterdir() if path.name in (CONFIG, INDEX)])
        raise KeyboardInterrupt

    def refuse(folder: Path, fold: Any) -> Any:
        raise UsageError("a text without a scale")

    with pytest.raises(UsageError):
        list(convert(plain, out, wanted, calibrate=refuse))
    assert [path.name for path in out.glob("*.safetensors")]  # another text goes on from here
    with pytest.raises(KeyboardInterrupt):
        list(convert(plain, out, wanted, calibrate=kill))
    assert seen == [None, []]
    assert not (out / CONFIG).exists()
    with pytest.raises(ValueError, match=r"config\.json"):
        load(out)
    options = ("--weights", "fp8", "--activations", "fp8-tensor", "--calibrate")
    succeed("quantize", plain, out, *options, text)
    assert load(out).config.quantization_config.activations == "fp8-tensor"
    (text.parent / "foreign.txt").write_text("7 " * 20)
    config = json.loads((plain / CONFIG).read_text())
    (plain / CONFIG).write_text(json.dumps(config | {"vocab_size": 5}))
    said = sentence(run("quantize", plain, tmp_path / "o", *options, text.parent / "foreign.txt"), 2)
    assert said.startswith("the text has token 7, but the model has 5 tokens")


def test_activations_without_a_scale_are_one_sentence(plain: Path) -> None:
    model = load(plain, quantization_config=HadagenConfig("fp8", None))
    for value, shown in ((torch.nan, "nan"), (0.0, "0")):
        model.model.embed_tokens.weight.fill_(value)
        with pytest.raises(
            UsageError, match=f"inputs of .*q_proj reach {shown}, for which there is no scale; calibrate"
        ):
            input_scales(model, torch.ones(1, 8, dtype=torch.int64))


def test_a_disk_that_a_model_fills_is_a_sentence(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise output.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(output, "save_file", full)
    said = sentence(run("quantize", plain, tmp_path / "out"), 1)
    assert "cannot be written (I/O error: No space left on device (os error 28)); make room" in said


def test_the_memory_of_one_file_is_enough(tmp_path: Path) -> None:
    """Eight files of 24 MB each; as they are mapped to memory, the pages of one that is read count too."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 8192, "head_dim": 64}
    model_of("llama", tie_word_embeddings=False, num_attention_heads=8, **sizes).save_pretrained(
        tmp_path / "plain", max_shard_size="24MB"
    )
    total = sum(path.stat().st_size for path in (tmp_path / "plain").glob("*.safetensors"))
    program = """
import re, sys
from pathlib import Path
import torch
from hadagen.models.checkpoint import convert
from hadagen.models.scheme import Scheme
import hadagen
hadagen.rotate_quantize(hadagen.Rotation(2048)(torch.ones(512, 2048)), to="int8-row")
def most():  # of this program alone; the numbers of `resource` begin with those of the process that started it
    return 1024 * int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = most()
list(convert(Path(sys.argv[1]), Path(sys.argv[2]), Scheme()))
print(most() - before)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, tmp_path / "plain", tmp_path / "out"]
    grown = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert total > 190e6
    assert grown < total / 2, (grown, total)


def test_programs_see_lines_on_how_far_it_is(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.cli.output.LINE_SECONDS", 0)
    said = run("quantize", plain, tmp_path / "out").stderr.splitlines()
    first = "model-00001-of-00010.safetensors"
    assert said[:4] == [*(f"{first}: {done} of 3" for done in (1, 2, 3)), f"{first}: written"]


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_what_cannot_be_quantized_is_one_sentence(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def said(exit_code: int, folder: Path = plain, *options: str) -> str:
        found = sentence(run("quantize", folder, out, *options), exit_code)
        assert not out.exists()
        return found

    assert "nowhere is no folder; download the model" in said(2, tmp_path / "nowhere")
    assert "config.json is not there; name a folder with a whole model" in said(2, tmp_path)
    assert "device 'cuda:77' is not here" in said(2, plain, "--device", "cuda:77")
    assert "device 'gpu' is not here" in said(2, plain, "--device", "gpu")
    assert "device 'meta' is not here" in said(2, plain, "--device", "meta")
    assert "seed = -1 is not possible" in said(2, plain, "--seed", "-1")

    config = json.loads((plain / CONFIG).read_text())
    for change, message, code in (
        ({"model_type": "gpt2"}, "has no tensor lm_head.weight; download the whole", 2),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantized already by 'awq'; name one", 2),
        ({"intermediate_size": 64}, "has the shape [96, 48], but config.json says [64, 48]; take both", 2),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2.input_layernorm.weight; download the whole", 1),
    ):
        (plain / CONFIG).write_text(json.dumps(config | change))
        assert message in said(code)
    (plain / CONFIG).write_text("[]")
    assert "config.json holds no JSON object" in said(1)
    (plain / CONFIG).write_text("{")
    assert "config.json holds no JSON (" in said(1)
    (plain / CONFIG).write_text(json.dumps(config))

    file = sorted(plain.glob("*.safetensors"))[-1]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert f"{file} cannot be read (Error while deserializing header" in said(1)
    file.unlink()
    assert f"names {file.name!r}, which is not there; download it again" in said(1)
    (plain / INDEX).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    assert "names '../a.safetensors', which is not there" in said(1)
    long = "a" * 90
    (plain / f"{long}.safetensors").write_bytes(whole)
    names = f"{long}/../../a.safetensors", f"{long}.safetensors"
    (plain / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    assert f"names '{long[:79]}…, which is not there" in said(1)
    (plain / INDEX).unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in said(2)


# Name → tensors that take the place of others, or are new, options, and words of the sentence.
REFUSED: dict[str, tuple[dict[str, torch.Tensor], list[str], str]] = {
    "an infinity": ({"model.layers.0.mlp.up_proj.weight": torch.full((96, 48), torch.inf)}, [], "infinities or NaN"),
    "NaN": ({"model.norm.weight": torch.full((48,), torch.nan)}, [], "lm_head.weight has infinities or NaN"),
    "another last layer": ({"score.weight": torch.ones(2, 48)}, [], "score.weight is no part of a llama that predicts"),
    "a router": ({"model.layers.0.mlp.gate.weight": torch.ones(4, 48)}, [], "mlp.gate.weight is no part of a llama"),
    "another layer": (
        {"model.layers.2.input_layernorm.weight": torch.ones(48)},
        [],
        "layers.2.input_layernorm.weight is",
    ),
    "a short bias": ({"model.layers.0.self_attn.v_proj.bias": torch.ones(31)}, [], "config.json says [32]; take both"),
    "an embedding without rows": (
        {EMBEDDING: torch.ones(0, 48)},
        [],
        "has the shape [0, 48], but config.json says [89",
    ),
    "a number as embedding": ({EMBEDDING: torch.tensor(1.0)}, [], "has the shape [], but config.json says [89, 48]"),
    "a number as last layer": ({HEAD: torch.tensor(1.0)}, [], "lm_head.weight has the shape [], but config.json says"),
    "FP8 norms": (
        {"model.layers.0.self_attn.q_norm.weight": torch.ones(16).to(torch.float8_e4m3fn)},
        [],
        "q_norm.weight has the type ",
    ),
    "complex numbers": ({"a.rotary_emb.inv_freq": torch.ones(4) * 1j}, [], "inv_freq has the type complex64; name"),
    "no such layer": ({}, ["--ignore", "downproj"], "ignore names 'downproj', which is no linear layer; did you mean"),
    "no such number": ({}, ["--ignore", "model.layers.2.mlp.down_proj"], "which is no linear layer; choose one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_folded_wrongly_is_one_sentence(name: str, tmp_path: Path) -> None:
    changed, options, message = REFUSED[name]
    model_of("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "plain")
    path = tmp_path / "plain" / "model.safetensors"
    save_file(load_file(path) | changed, path, {"format": "pt"})
    assert message in sentence(run("quantize", tmp_path / "plain", tmp_path / "out", *options), 2)
    assert not (tmp_path / "out").exists()


DEEP = '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"


def header(path: Path) -> None:
    path.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())


def index(value: Any, name: str = EMBEDDING) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content["weight_map"] |= {name: value}
        path.write_text(json.dumps(content))

    return change


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FIRST = "model-00001-of-00011.safetensors"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        *((CONFIG, change, "cannot be read (") for change in (device, pipe, folder)),
        *((INDEX, change, "cannot be read (") for change in (device, pipe, folder)),
        *((FIRST, change, f"names '{FIRST}', which is not there") for change in (device, pipe, folder)),
        *((name, lambda path: path.write_text(DEEP), "holds JSON of more than 100 levels") for name in (CONFIG, INDEX)),
        *((INDEX, index(value), "which is not there") for value in (5, None, [], "", ".", "a\0b", "x" * 300, CONFIG)),
        (FIRST, header, "recursion limit exceed"),
        (
            CONFIG,
            lambda path: path.write_text('{"num_hidden_layers": 100000000}'),
            "num_hidden_layers = 100000000, but",
        ),
        (CONFIG, lambda path: path.write_bytes(b"\xff"), "holds no JSON ("),
    ],
)
def test_files_that_are_none_are_one_sentence(
    file: str, change: Callable[[Path], None], message: str, text: Path, tmp_path: Path
) -> None:
    plain = saved(tmp_path / "plain", "llama", tie_word_embeddings=False)
    change(plain / file)
    for result in (run("quantize", plain, tmp_path / "out"), run("eval", plain, "--text", text)):
        assert message in sentence(result, result.exit_code)
        assert result.exit_code in (1, 2)
        assert not isinstance(result.exception, Exception)
    assert not (tmp_path / "out").exists()


def test_a_folder_behind_a_loop_of_links_is_one_sentence(plain: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert sentence(run("quantize", plain, loop), 2) == f"{loop} is no folder; name a new one"
    assert "Too many levels of symbolic links" in sentence(run("quantize", plain, loop / "out"), 1)
    assert "is no folder; download the model" in sentence(run("quantize", loop, tmp_path / "out"), 2)


@pytest.mark.parametrize(
    "change", [{"hidden_size": 46, "num_attention_heads": 2}, {"intermediate_size": 23}, {"head_dim": 46}]
)
def test_a_width_without_a_rotation_names_what_has_it_and_a_way_out(change: dict[str, int], tmp_path: Path) -> None:
    model_of("llama", **change).save_pretrained(tmp_path / "plain")
    name, size = next(iter(change.items()))
    said = sentence(run("quantize", tmp_path / "plain", tmp_path / "out"), 2)
    assert said.startswith(f"{name} = {size}: ")
    *_, option, value = said.split()
    assert "(" not in said
    succeed("quantize", tmp_path / "plain", tmp_path / "out", option, value)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "llama4", "Llama", 5, None, ["llama"]])
def test_of_another_architecture_no_sizes_are_known(kind: Any) -> None:
    assert Sizes.of({"model_type": kind}) is None


FIELDS = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size"


@pytest.mark.parametrize("name", [*FIELDS.split(), "tie_word_embeddings", "hidden_act"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_configuration_leaves_out_is_as_transformers_has_it(kind: str, name: str) -> None:
    given = config_of(kind, hidden_size=64).to_dict() | {"tie_word_embeddings": kind != "smollm3"}
    left = {key: each for key, each in given.items() if key not in (name, "layer_types", "no_rope_layers")}
    known = transformers.AutoConfig.for_model(**left)
    head = getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads
    wanted = (known.num_hidden_layers, known.hidden_size, known.intermediate_size, known.num_attention_heads)
    wanted += (known.num_key_value_heads, head, known.tie_word_embeddings)
    found = Sizes.of(left)
    assert (found.layers, found.width, found.inner, found.heads, found.kv_heads, found.head, found.tied) == wanted
    assert vocabulary_of(left) == known.vocab_size


@pytest.mark.parametrize("name", [*FIELDS.split(), "tie_word_embeddings"])
def test_a_size_that_is_none_is_one_sentence(name: str) -> None:
    read = vocabulary_of if name == "vocab_size" else Sizes.of
    for value in (0, -1, 1.5, "48", [], {}, 1 << 40, 10**5000, math.nan):
        with pytest.raises(UsageError, match=f"^{name} = .*; take it from the checkpoint$"):
            read(config_of("llama").to_dict() | {name: value})


def test_tensors_that_rotations_leave_are_kept(tmp_path: Path) -> None:
    """Earlier releases of transformers stored the frequencies of positions."""
    model_of("qwen3").save_pretrained(tmp_path / "plain")
    path, name = tmp_path / "plain" / "model.safetensors", "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(path) | {name: torch.ones(8)}, path, {"format": "pt"})
    succeed("quantize", tmp_path / "plain", tmp_path / "out", "--ignore", "model.layers.1.mlp.down_proj")
    found = tensors(tmp_path / "out")
    assert torch.equal(found[name], torch.ones(8))
    assert found["model.layers.1.mlp.down_proj.weight"].dtype == torch.float32


def test_an_index_that_names_another_file_is_one_sentence(plain: Path, tmp_path: Path) -> None:
    index = json.loads((plain / INDEX).read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {name: first if file == last else file for name, file in index["weight_map"].items()}
    (plain / INDEX).write_text(json.dumps(index))
    assert "has no tensor model." in sentence(run("quantize", plain, tmp_path / "out"), 1)


def test_another_configuration_does_not_continue_a_run(plain: Path, tmp_path: Path) -> None:
    next(convert(plain, tmp_path / "out", Scheme()))
    config = json.loads((plain / CONFIG).read_text())
    (plain / CONFIG).write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    said = sentence(run("quantize", plain, tmp_path / "out"), 2)
    assert "has files of another model or with other options" in said


def test_smollm3_is_tied_unless_its_configuration_says_otherwise(tmp_path: Path) -> None:
    model_of("smollm3", tie_word_embeddings=True).save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / CONFIG).read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "plain" / CONFIG).write_text(json.dumps(config))
    succeed("quantize", tmp_path / "plain", tmp_path / "out", "--activations", "none")
    assert error(logits(load(tmp_path / "out")), logits(load(tmp_path / "plain"))) < 0.06


def test_codes_are_not_quantized_again(plain: Path, tmp_path: Path) -> None:
    succeed("quantize", plain, tmp_path / "out")
    assert "the model is quantized already; name one" in sentence(run("quantize", tmp_path / "out", tmp_path / "o"), 2)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    config.pop("quantization_config")
    (tmp_path / "out" / CONFIG).write_text(json.dumps(config))
    said = sentence(run("quantize", tmp_path / "out", tmp_path / "o"), 2)
    assert "q_proj.weight has the type I8; name a model that is not quantized" in said


def test_a_folder_with_other_files_is_left_alone(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert "out is not empty; name a new folder" in sentence(run("quantize", plain, tmp_path / "out"), 2)
    said = sentence(run("quantize", plain, tmp_path / "plain" / "new" / "folder"), 2)
    assert said == f"{plain}/new/folder lies in {plain}, the model to quantize; name a folder outside of it"
    assert not (plain / "new").exists()
    assert "is no folder; name a new one" in sentence(run("quantize", plain, tmp_path / "out" / "thesis.txt"), 2)
    with pytest.raises(StorageError, match="cannot be written"):
        next(convert(plain, Path("/proc/hadagen"), Scheme()))


# ---- eval ------------------------------------------------------------------------------------------------------------
def test_perplexity_and_agreement(plain: Path, text: Path, tmp_path: Path) -> None:
    """Of a model whose cache has codes, which count."""
    out = tmp_path / "out"
    succeed("quantize", plain, out, "--cache", "int4")
    found = json.loads(succeed("eval", out, "--text", text, "--against", plain, "--windows", "2", "--json"))
    assert (found["windows"], found["tokens"]) == (1, 300)
    tokens = torch.tensor([list(map(int, text.read_text().split()))])
    tops = {}
    for row, folder in zip(found["rows"], (plain, out), strict=True):
        with torch.no_grad():
            result = load(folder)(tokens, labels=tokens)
        assert row["model"] == str(folder)
        assert row["perplexity"] == pytest.approx(float(result.loss.exp()), rel=1e-4)
        tops[folder] = result.logits.argmax(-1)
    assert found["rows"][0]["same_top"] is None
    assert found["rows"][1]["same_top"] == pytest.approx(float((tops[out] == tops[plain]).float().mean()), abs=0.01)
    lines = succeed("eval", out, "--text", text, "--against", plain).split()
    assert lines[:5] == ["model", "perplexity", "same", "first", "choice"]
    assert lines[-1].endswith("%")
    assert "choice" not in succeed("eval", out, "--text", text)


def test_a_text_is_read_as_a_whole_without_a_byte_order_mark(plain: Path, text: Path, tmp_path: Path) -> None:
    """Whatever truncation and padding the tokenizer stores, also some that the library panics about."""
    wanted = read_windows(plain, text)
    (tmp_path / "marked.txt").write_text(text.read_text(), encoding="utf-8-sig")
    stored = json.loads((plain / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 4096}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0}
    for changes in (
        {},
        {"truncation": cut},
        {"truncation": cut | {"stride": 7}},
        {"padding": fill | {"pad_token": "1"}},
    ):
        (plain / "tokenizer.json").write_text(json.dumps(stored | changes))
        assert torch.equal(read_windows(plain, tmp_path / "marked.txt"), wanted)


def test_a_text_may_come_through_a_pipe(plain: Path, text: Path, tmp_path: Path) -> None:
    """As from `<(zcat text.gz)` in a shell. A pipe that nobody writes is empty."""
    for content, message in ((text.read_bytes(), ""), (b"", "has 0 tokens")):
        end, start = os.pipe()
        os.write(start, content)
        os.close(start)
        try:
            with pytest.raises(UsageError, match=message) if message else nullcontext():
                assert torch.equal(read_windows(plain, Path(f"/dev/fd/{end}")), read_windows(plain, text))
        finally:
            os.close(end)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="has 0 tokens"):
        read_windows(plain, tmp_path / "pipe")
    for other in (Path("/dev/zero"), tmp_path):
        with pytest.raises((UsageError, OSError), match=r"is no file|Is a directory"):
            read_windows(plain, other)


@pytest.mark.parametrize(("factor", "shown"), [(1e4, "e^"), (math.nan, "nan"), (0.0, "89.000")])
def test_a_bad_model_has_figures_too(factor: float, shown: str, text: Path, tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain", "llama", tie_word_embeddings=False, max_shard_size="5GB")
    held = load_file(plain / "model.safetensors")
    held["lm_head.weight"] = (held["lm_head.weight"].double() * factor).float()
    save_file(held, plain / "model.safetensors", {"format": "pt"})
    assert succeed("eval", plain, "--text", text).split()[-1].startswith(shown)
    (row,) = json.loads(succeed("eval", plain, "--text", text, "--json"), parse_constant=pytest.fail)["rows"]
    assert (row["perplexity"] is None) == (factor != 0)
    assert (row["loss"] is None) == (shown == "nan")


def test_what_cannot_be_measured_is_one_sentence(
    plain: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nowhere is no folder" in sentence(run("eval", tmp_path / "nowhere", "--text", text), 2)
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("7")
    binary.write_bytes(b"\xff\xfe\xff")
    assert "short.txt has 1 tokens; name a longer text" in sentence(run("eval", plain, "--text", short), 2)
    assert "binary.txt is no text in UTF-8" in sentence(run("eval", plain, "--text", binary), 2)
    assert "No such file or directory" in sentence(run("eval", plain, "--text", tmp_path / "nowhere"), 1)
    succeed("quantize", plain, tmp_path / "out")
    monkeypatch.setattr("hadagen.integrations.transformers._missing", "HADAGEN_INTEGRATIONS=none switches it off")
    said = sentence(run("eval", tmp_path / "out", "--text", text), 2)
    assert said.startswith("transformers has no quantizer of hadagen: HADAGEN_INTEGRATIONS=none switches it off")
    whole = json.loads((plain / "tokenizer.json").read_text())
    whole["model"]["vocab"] = {}
    for content in ("{}", DEEP, json.dumps(whole)):
        (plain / "tokenizer.json").write_text(content)
        assert "tokenizer.json is no tokenizer (" in sentence(run("eval", plain, "--text", text), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "unknown"}, "transformers cannot load "),
        ({"vocab_size": 7}, "transformers cannot load "),
        ({"hidden_size": "wide"}, "transformers cannot load "),
        (
            {"num_hidden_layers": 3, "layer_types": None},
            " has no tensor model.layers.2.input_layernorm.weight; download the whole model",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}, "model_type": "own"}, "transformers cannot load "),
    ],
)
def test_a_model_that_transformers_does_not_load_is_one_sentence(
    change: dict[str, Any], message: str, plain: Path, text: Path
) -> None:
    config = json.loads((plain / CONFIG).read_text())
    (plain / CONFIG).write_text(json.dumps(config | change))
    result = run("eval", plain, "--text", text)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
    assert "bug" not in result.stderr
