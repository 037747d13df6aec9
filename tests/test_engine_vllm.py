"""hadagen's hooks in vLLM, with vLLM on a CPU. `make engine-test` downloads it; other runs skip this."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import model_of
from vllm_program import PROMPT, TOKENS

import hadagen
from hadagen import Rotation
from hadagen.models.folding import Sizes, planned
from hadagen.models.layers import OF_WEIGHT, codes_of, values_of
from hadagen.models.scheme import Scheme
from hadagen.models.stored import checksum_of_files

VLLM = os.environ.get("HADAGEN_TEST_VLLM", "")
# A newer release, of which there is no build for CPUs: its Python on the libraries of VLLM.
NEXT = os.environ.get("HADAGEN_TEST_VLLM_NEXT", "")
pytestmark = pytest.mark.skipif(not VLLM, reason="needs vLLM: run make engine-test")

PROGRAM = Path(__file__).parent / "vllm_program.py"
FAST = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # tests in other processes may have the same cores
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles its sampler even with enforce_eager
}


both = pytest.mark.parametrize("engine", ["", *([NEXT] if NEXT else [])], ids=lambda each: "next" if each else "")


def run(*arguments: str | Path, engine: str = "", **environment: str) -> Any:
    """What `vllm_program.py` prints. engine: NEXT, or "" for VLLM."""
    command = [sys.executable, PROGRAM, *arguments]
    path = (
        {"PYTHONPATH": f"{engine}{os.pathsep}{VLLM}", "VLLM_TARGET_DEVICE": "cpu"} if engine else {"PYTHONPATH": VLLM}
    )
    variables = os.environ | FAST | path | environment
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line[:1] in "[{" and line))


def small_llama(width: int = 64) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2}
    heads = {
        "head_dim": 32,
        "num_attention_heads": width // 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False, dtype="float32")
    with torch.device("cpu"):
        model = LlamaForCausalLM(config).float().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 2 * parameter.shape[1] ** -0.5)  # so that tokens differ clearly
    return model


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
    save_file(
        {name: each.detach().clone().contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    if quantization["quant_method"] == "hadagen" and quantization["checksum"] is None:
        quantization = quantization | {"checksum": checksum_of_files([folder / "model.safetensors"])}
    config = json.loads(model.config.to_json_string()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return folder


# ---- transforms of compressed-tensors --------------------------------------------------------------------------------
GATE_AND_UP = ["re:.*gate_proj", "re:.*up_proj"]


def transformed(folder: Path, *, block: int | None = None, randomize: bool = False, wrong: bool = False) -> list[int]:
    """Write a checkpoint of compressed-tensors, and return the tokens of the model before its transforms.

    block: of the random transform. wrong: the random matrix has one wrong entry.
    """
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    def scheme(type: str, online: Any, location: str, behind: Any, inverse: bool = False, **rest: Any) -> Any:
        first = {"targets": online, "location": location, "inverse": inverse}
        folded = {"targets": behind, "location": "weight_input", "inverse": not inverse}
        return {"type": type, "apply": [first, folded], **rest}

    model = small_llama()
    tokens = greedy(model)
    groups = {
        "R2": scheme("hadamard", "re:.*v_proj", "output", "re:.*o_proj", head_dim=32),
        "R4": scheme("random-hadamard", "re:.*down_proj", "input", "re:.*down_proj", True, head_dim=block),
        "R5": scheme("random-hadamard", GATE_AND_UP, "input", GATE_AND_UP),
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


def test_the_operator_of_hadacore_runs_on_hadagen() -> None:
    found = run("operator")
    assert found["error"] < 1e-5
    assert found["kept"]
    assert found["inplace"]
    assert found["hadacore"] == 0


def test_of_two_plugins_the_first_stays() -> None:
    operator, quantization = run("claimed")
    assert "another plugin has replaced the operator _C::hadacore_transform" in operator
    assert "another plugin has registered the quantization hadagen" in quantization


# ---- checkpoints of hadagen ------------------------------------------------------------------------------------------
class Quantized(torch.nn.Module):
    """A linear layer that computes in float32 with the values for which codes stand."""

    def __init__(self, layer: torch.nn.Linear, scheme: dict[str, Any], rotation: Rotation | None) -> None:
        super().__init__()
        weight = layer.weight if rotation is None else rotation.fold_into(layer.weight, "input")
        self.parts = codes_of("a layer", weight, scheme["weights"])
        self.activations, self.rotation = scheme["activations"], rotation
        self.input_scale = torch.tensor(0.05) if self.activations == "fp8-tensor" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activations is None:
            turned = x if self.rotation is None else self.rotation(x)
        else:
            tensor_scale = self.input_scale
            q = hadagen.rotate_quantize(x, self.rotation, to=self.activations, tensor_scale=tensor_scale)
            turned = q.dequantize(torch.float32)
        weight, scale, factor = (self.parts.get(name) for name in OF_WEIGHT)
        return torch.nn.functional.linear(turned, values_of(weight.squeeze(-1), scale, factor, torch.float32))


def quantized(
    folder: Path,
    weights: str,
    activations: str | None,
    rotation: str = "quarot",
    ignore: tuple[str, ...] = ("lm_head",),
    /,
    width: int = 64,
    **changes: Any,
) -> list[int]:
    """Write a checkpoint as hadagen does, and return its tokens. changes: of the quantization_config."""
    model = small_llama(width)
    made_scheme = planned(Scheme(weights, activations, rotation, 0, ignore), Sizes.of(model.config.to_dict()))
    scheme = made_scheme.to_dict()
    tensors = dict(model.state_dict())
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and made_scheme.is_quantized(name):
            online = made_scheme.online_of(name)
            made = Quantized(layer, scheme, online.rotation() if online else None)
            tensors |= {f"{name}.{part}": each for part, each in made.parts.items()}
            if made.input_scale is not None:
                tensors[f"{name}.input_scale"] = made.input_scale
            model.set_submodule(name, made)
    save(folder, model, scheme | changes, tensors)
    return greedy(model)


@both
def test_checkpoints_of_hadagen_run_with_one_kernel_before_each_product(tmp_path: Path, engine: str) -> None:
    """In an MLP the kernel computes SiLU·mul, the rotation and the quantizer."""
    formats = [("int8", "int8-row"), ("fp8", "fp8-row"), ("fp8", "fp8-tensor"), ("int8", "fp8-row"), ("int8", None)]
    formats += [("int4", "int8-row"), ("int4-row", None)]
    folders = [tmp_path / f"{weights}-{activations}" for weights, activations in formats]
    expected = [quantized(folder, *each, cache="int8") for folder, each in zip(folders, formats, strict=True)]
    *found, multiplied = run("quantized", *folders, engine=engine)
    assert multiplied["tokens"] == expected[0]
    (warning,) = multiplied["warned"]
    assert "keys and values in int8, which vLLM stores as --kv-cache-dtype says" in warning
    assert multiplied["products"] == multiplied["alone"] + multiplied["fused"] > 0
    for (_, activations), tokens, each in zip(formats, expected, found, strict=True):
        print(f"least margin of the log-probabilities: {each['margin']:.3g}")
        assert each["tokens"] == tokens
        if activations:
            assert each["alone"] == 3 * each["fused"] >= 3 * 2 * TOKENS
            assert "activations" not in each
        else:
            assert each["activations"] >= 2 * TOKENS


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}  # of Mixtral


def with_experts(folder: Path, scheme: Scheme) -> list[int]:
    """Write a Mixtral as `hadagen quantize` does, and return its tokens."""
    import transformers

    from hadagen.integrations.transformers_folder import convert_any

    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    model_of("mixtral", **sizes, **EXPERTS).save_pretrained(plain := folder.with_name("plain"))
    list(convert_any(plain, folder, scheme))
    return greedy(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_checkpoints_of_hadagen_are_compiled(tmp_path: Path) -> None:
    tokens = [  # experts come first, for which vLLM makes a group of processes once
        with_experts(tmp_path / "experts", Scheme("int8", None, "quarot")),
        quantized(tmp_path / "model", "fp8", "fp8-row"),
    ]
    caches = {"TORCH_COMPILE_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    found = run("compiled", tmp_path / "experts", tmp_path / "model", **caches)
    assert [each["tokens"] for each in found] == tokens


def test_adapters_of_checkpoints_that_do_not_rotate_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of down_proj, whose input another kernel activates then."""
    from safetensors.torch import save_file

    tensors = {}

    def adapted(model: Any) -> list[int]:
        for name, layer in model.named_modules():
            if name.endswith("down_proj"):
                down, up = (torch.randn(each, device="cpu") / 8 for each in ((8, 192), (64, 8)))
                layer.register_forward_hook(lambda _, x, y, down=down, up=up: y + x[0] @ down.T @ up.T)
                tensors[f"base_model.model.{name}.lora_A.weight"] = down
                tensors[f"base_model.model.{name}.lora_B.weight"] = up
        return original(model)

    original = greedy
    monkeypatch.setitem(globals(), "greedy", adapted)
    tokens = quantized(tmp_path / "model", "fp8", "fp8-row", "blocks")
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert run("adapted", tmp_path / "model", tmp_path / "adapter")["tokens"] == tokens


REFUSED = ("permuted", "newer", "unknown", "longer", "mixed", "ignored", "changed")


def test_what_hadagen_cannot_compute_is_refused(tmp_path: Path) -> None:
    transformed(tmp_path / "permuted", randomize=True)
    quantized(tmp_path / "newer", "fp8", "fp8-row", version=4)
    quantized(tmp_path / "unknown", "fp8", "fp8-row", activations="int3-row")
    quantized(tmp_path / "longer", "fp8", "fp8-row", online={"down_proj": {"n": 384, "block": None}})
    quantized(tmp_path / "mixed", "fp8", "fp8-row", "quarot", ("lm_head", "up_proj"))
    quantized(tmp_path / "ignored", "fp8", "fp8-row", ignore=["lm_head", "up_proj"])
    quantized(tmp_path / "changed", "fp8", "fp8-row", checksum=3)
    quantized(tmp_path / "rotated", "fp8", "fp8-row")
    folders = [tmp_path / name for name in (*REFUSED, "rotated")]
    found = run("refused", *folders)
    permuted, newer, unknown, longer, mixed, ignored, changed = found["models"]
    plain, again, split, blocks = found["layers"]
    assert found["dummy"] == [""]
    assert permuted.startswith("UsageError: the transform R4 has randomize=true")
    assert "version 4; this hadagen reads version 3, so update hadagen" in newer
    assert "activations = 'int3-row' is not known" in unknown
    assert "has online = {'down_proj': (384, None)}, but rotation 'quarot' of this model needs" in longer
    assert "up_proj.weight has the type F8_E4M3; quantize the model again, for F16" in ignored
    assert "has other tensors than its checksum in config.json says" in changed
    assert "up_proj, of which the checkpoint quantizes or rotates only some" in mixed
    for said, why in zip(found["uses"], ("pooling would", "LoRA adapters of", "prompt embeddings do"), strict=True):
        assert said.startswith(
            f'UsageError: the checkpoint has rotation="quarot", which rotates hidden states, so {why}'
        )
    assert "the model has no quantization_config of hadagen; leave out --quantization" in plain
    assert "has codes of hadagen already, which vLLM cannot quantize again" in again
    activation, scales, some, longer, ranks, unloaded, ignored = found["experts"]
    assert activation.startswith("mlp.experts has codes and the activation 'swigluoai', which hadagen does not compute")
    assert activation.endswith("--ignore for each of gate_up_proj, down_proj")
    assert "mlp.experts has experts, some of which a text may not reach, so fp8-tensor has no scales" in scales
    assert "the checkpoint has codes in only some of gate_up_proj, down_proj of mlp.experts" in some
    assert "a rotation of 96 in blocks of 16 for the 96 inputs of mlp.experts.down_proj, but rotation" in longer
    assert longer.endswith("'blocks' needs a rotation of 96 in blocks of 32; quantize the model again")
    assert ranks.startswith("mlp.experts rotates blocks of 96 inputs, which 2 ranks cannot share; quantize the model")
    assert unloaded.startswith("mlp.experts.w13_weight has -128, which hadagen does not write")
    assert ignored == ""
    assert split.startswith("mlp.down_proj rotates blocks of 192 inputs, which 2 ranks cannot share; quantize the")
    assert blocks.endswith("of 64 inputs, which 4 ranks cannot share; choose a smaller tensor_parallel_size")


@both
def test_a_layer_takes_codes_that_another_layer_made(engine: str) -> None:
    """vLLM calls them `QuantizedActivation`. A layer that changes its input before it quantizes it takes none."""
    found = run("activations", engine=engine, TORCH_COMPILE_DISABLE="0")
    for name, (equal, compiled, exposed) in found["equal"].items():
        assert (name, equal, compiled, exposed) == (name, True, True, True)
    early, kinds, sizes = found["refused"][:3], found["refused"][3:6], found["refused"][6:]
    assert all("layer needs its input before it is quantized, but is given codes" in each for each in early)
    assert "takes codes of QuantKey(f8e4m3fn,scale(f32,dynamic,per_token),symmetric), but is given" in kinds[0]
    assert "scale(f32,static,per_tensor)" in kinds[1]
    assert "takes codes and scales of float8_e4m3fn and float32, not float32 and float32" in kinds[2]
    assert "not [5, 64] for a shape of [4, 64]" in sizes[0]
    assert "takes codes [..., 64] of the shape of the input, not [5, 128]" in sizes[1]
    assert "takes one scale a row, not [3] for codes [5, 64]" in sizes[2]
    assert found["ignored"] == ["lm_head", "text.model.layers.0.mlp.down_proj"]
    assert max(found["normed"].values()) < 0.01  # a quotient in the middle between two codes gets either
    assert max(found["experts"]) < 0.01
    by_row = {kind: f"QuantKey({kind},scale(f32,dynamic,per_token),symmetric)" for kind in ("i8", "f8e4m3fn")}
    for case, keys in found["keys"].items():
        capability, rotation, _, activations = case.split()
        wanted = {"int8-row": by_row["i8"], "fp8-row": by_row["f8e4m3fn"], "None": "None"}.get(
            activations, "QuantKey(f8e4m3fn,scale(f32,static,per_tensor),symmetric)"
        )
        if rotation == "blocks" or (capability == "80" and activations != "int8-row"):
            wanted = "None"
        assert (case, keys) == (case, [*[wanted] * 3, "None" if rotation == "quarot" else wanted])


# ---- both ------------------------------------------------------------------------------------------------------------
def test_rotations_in_blocks_run_with_tensor_parallelism(tmp_path: Path) -> None:
    """Each of two ranks has 3 of 6 blocks of down_proj, and 1 of 2 of o_proj. Of the transforms, a rank
    has 1 of 2 heads of R2 too, and the whole input of R5. One scale of all activations is that of each rank; the scales
    of groups are divided as their inputs. Of each expert, a rank has 1 of 2 blocks."""
    tokens = (
        transformed(tmp_path / "transformed", block=32),
        quantized(tmp_path / "quantized", "fp8", "fp8-tensor", "blocks", width=256),
        quantized(tmp_path / "groups", "int4", None, "blocks", width=256),
        with_experts(tmp_path / "experts", Scheme("int4", None, "blocks")),
    )
    found = run("parallel", *(tmp_path / name for name in ("transformed", "quantized", "groups", "experts")))
    assert tuple(each["tokens"] for each in found) == tokens
