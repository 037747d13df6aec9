"""What tests of hooks in vLLM run in a process with vLLM: `python vllm_program.py FUNCTION ARGUMENTS…` prints
a line of JSON."""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

PROMPT = [1, 2, 3, 4]
TOKENS = 12
TRANSFORM = "vllm.model_executor.layers.quantization.compressed_tensors.transform"


class Calls:
    """What the host computes by itself. The CPU build of vLLM lacks both operators of `HadamardTransform`."""

    def __init__(self) -> None:
        from importlib import import_module

        self.dense = self.hadacore = 0
        self.library: Any = torch.library.Library("_C", "FRAGMENT")
        self.library.define("hadacore_transform(Tensor! x, bool inplace) -> Tensor")
        self.module = import_module(f"{TRANSFORM}.module")
        self.module.dispatch_unquantized_gemm = lambda: self.multiply  # type: ignore[attr-defined]

    def multiply(self, layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        self.dense += 1
        return torch.nn.functional.linear(x, weight, bias)

    def implement_hadacore(self) -> None:
        """As an operator of the host would do it."""
        self.library.impl("hadacore_transform", self.transform, "CPU")

    def transform(self, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        self.hadacore += 1
        return x @ sylvester(x.shape[-1])


def sylvester(n: int) -> torch.Tensor:
    from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

    return deterministic_hadamard_matrix(n, torch.float32) / n**0.5


def generate(model: str, adapter: str = "", **options: Any) -> dict[str, Any]:
    """The tokens, and the least difference of the two largest log-probabilities. adapter: the folder of a LoRA."""
    from vllm import LLM, SamplingParams

    settings = {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 2}
    settings |= {"kv_cache_memory_bytes": 1 << 24, "block_size": 32, "dtype": "float32"} | options
    llm = LLM(model=model, **settings)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, logprobs=2)
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    [found] = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False, lora_request=lora)
    best = [sorted(each.logprob for each in step.values())[-2:] for step in found.outputs[0].logprobs]
    return {"tokens": list(found.outputs[0].token_ids), "margin": min(first - second for second, first in best)}


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "hadagen" in str(each.message)]


def transforms(model: str, changed: str = "") -> dict[str, Any]:
    """What vLLM generates from a checkpoint of compressed-tensors.

    changed: "changed" if the host's method takes other arguments."""
    import vllm.entrypoints.llm
    import vllm.plugins

    calls = Calls()
    if changed:
        host = calls.module.HadamardTransform
        forward = host.forward
        host.forward = lambda self, x, part_id=0: forward(self, x, part_id)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vllm.plugins.load_general_plugins()
        try:
            torch.ops._C.hadacore_transform(torch.ones(1, 2), False)
        except NotImplementedError:  # the operator is not the one of hadagen
            calls.implement_hadacore()
        found = generate(model)
    return found | {"dense": calls.dense, "hadacore": calls.hadacore, "warned": warned(caught)}


def operator() -> dict[str, Any]:
    """The operator of hadagen."""
    import vllm.entrypoints.llm
    import vllm.plugins

    calls = Calls()
    vllm.plugins.load_general_plugins()
    x = torch.randn(3, 64, dtype=torch.float32)
    expected, copy = x @ sylvester(64), x.clone()
    found = torch.ops._C.hadacore_transform(copy, False)
    error = float((found - expected).abs().max())
    kept = torch.equal(copy, x)
    torch.ops._C.hadacore_transform(copy, True)
    return {"error": error, "kept": kept, "inplace": torch.equal(copy, found), "hadacore": calls.hadacore}


def claimed() -> list[str]:
    """The warnings if another plugin was first."""
    import vllm.entrypoints.llm
    import vllm.plugins
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    Calls().implement_hadacore()
    register_quantization_config("hadagen")(Fp8Config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vllm.plugins.load_general_plugins()
    return warned(caught)


def quantized(*models: str) -> list[dict[str, Any]]:
    """What vLLM generates from checkpoints of hadagen, and how often it rotates and quantizes, with an activation or
    without one."""
    import vllm.entrypoints.llm
    import vllm.plugins
    from vllm.model_executor.layers.activation import SiluAndMul

    vllm.plugins.load_general_plugins()
    from hadagen.integrations import vllm_quantization
    from hadagen.models import layers

    rotate_quantize, forward, counts = layers.rotate_quantize, SiluAndMul.forward_native, Counter()

    def counted(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        counts["fused" if options["before"] else "alone"] += 1
        return rotate_quantize(x, *arguments, **options)

    def activated(x: torch.Tensor) -> torch.Tensor:
        counts["activations"] += 1
        return forward(x)

    layers.rotate_quantize, SiluAndMul.forward_native = counted, staticmethod(activated)  # type: ignore[assignment]
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in models:
            counts.clear()
            results.append(generate(model) | counts)

    def multiplied(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, bias: Any
    ) -> torch.Tensor:
        counts["products"] += 1
        assert a.dtype == b.dtype
        assert (a.is_contiguous(), b.T.is_contiguous()) == (True, True)
        assert (scale_a.shape, scale_b.shape) == ((len(a), 1), (b.shape[1], 1))
        return (scale_a * (a.float() @ b.float()) * scale_b.T).to(dtype)

    def loaded(self: Any, layer: Any) -> None:
        load(self, layer)
        self.multiplies = True

    # Arguments as vLLM's kernel for GPUs takes them.
    load = vllm_quantization.QuantizedMethod.process_weights_after_loading
    vllm_quantization.QuantizedMethod.process_weights_after_loading = loaded  # type: ignore[method-assign]
    vllm_quantization._custom_ops.cutlass_scaled_mm = multiplied
    counts.clear()
    return [*results, generate(models[0]) | counts | {"warned": warned(caught)}]


def adapted(model: str, adapter: str) -> dict[str, Any]:
    """With an adapter."""
    return generate(model, adapter, enable_lora=True, max_lora_rank=8)


def compiled(*models: str) -> list[dict[str, Any]]:
    """With vLLM's compiler, which takes no break in a graph."""
    return [generate(model, enforce_eager=False, compilation_config={"backend": "eager"}) for model in models]


def refused(*models: str) -> dict[str, list[str]]:
    """The errors of models that vLLM does not load, of uses of the last model, and of layers."""
    uses: tuple[dict[str, Any], ...] = ({"runner": "pooling"}, {"enable_lora": True}, {"enable_prompt_embeds": True})
    found = {"models": [*map(failed, models[:-1])], "uses": [failed(models[-1], **use) for use in uses]}

    from hadagen.integrations.vllm_quantization import Quantization, QuantizedMethod
    from hadagen.models.scheme import Scheme

    method = QuantizedMethod("layer", Scheme(), None)
    found["layers"] = [
        said(Quantization),
        said(method.dequantize_weight, None),
        refused_in_parallel("mlp.down_proj", 192, None, 2),
        refused_in_parallel("mlp.down_proj", 192, 64, 4),
    ]
    found["experts"] = refused_experts()
    return found | {"dummy": [failed(models[-1], load_format="dummy")]}  # values to measure times with


def refused_experts() -> list[str]:
    """The errors of experts: of schemes and kinds that are refused, of ranks that cannot share, of codes that were not
    loaded, and none of experts without codes."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from hadagen.integrations.vllm_quantization import Quantization
    from hadagen.models.scheme import Online, Scheme

    parts = ("down_proj", "gate_up_proj")

    def method(scheme: Scheme, activation: MoEActivation = MoEActivation.SILU, ranks: int = 1) -> Any:
        layer = RoutedExperts.__new__(RoutedExperts)
        config = SimpleNamespace(activation=activation, hidden_dim=64, intermediate_size=96, has_bias=False)
        config.is_lora_enabled, config.moe_parallel_config = False, SimpleNamespace(tp_size=ranks)
        layer.__dict__.update(moe_config=config, swiglu_limit=None, apply_router_weight_on_input=False)
        return Quantization(scheme).get_quant_method(layer, "mlp.experts")

    def unloaded(ranks: int) -> None:
        online = {} if ranks == 1 else {"down_proj": Online(96, 96)}
        scheme = Scheme(rotation="quarot" if online else None, layers=parts)
        found = method(Scheme(rotation=None, layers=parts), ranks=ranks)
        found.scheme, found.last = scheme, online.get("down_proj")
        found.moe.tp_rank, layer = 0, torch.nn.Module()
        found.create_weights(layer, 2, 64, 96 // ranks, torch.float32, weight_loader=print)
        found.process_weights_after_loading(layer)

    wrong = {"gate_up_proj": Online(64, 64), "down_proj": Online(96, 16)}
    return [
        said(method, Scheme(rotation=None, layers=parts), MoEActivation.SWIGLUOAI),
        said(method, Scheme("fp8", "fp8-tensor", None, layers=parts)),
        said(method, Scheme(rotation=None, layers=parts, ignore=("down_proj",))),
        said(method, Scheme(rotation="blocks", layers=parts, online=wrong)),
        said(unloaded, 2),
        said(unloaded, 1),
        str(method(Scheme(rotation=None, layers=parts, ignore=parts)) or ""),
    ]


def said(function: Any, *arguments: Any) -> str:
    """The error of a call."""
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def served(prompts: str, *models: str) -> list[tuple[list[list[int]], list[list[float]]]]:
    """The tokens of models for each prompt in a file, and their log-probabilities."""
    from vllm import LLM, SamplingParams

    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in json.loads(Path(prompts).read_text())]
    settings: dict[str, Any] = {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
    settings |= {"kv_cache_memory_bytes": 1 << 27, "block_size": 32, "dtype": "float32", "max_num_seqs": len(given)}
    sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False, logprobs=1, ignore_eos=True)
    results = []
    for model in models:
        found = [each.outputs[0] for each in LLM(model=model, **settings).generate(given, sampling, use_tqdm=False)]
        tokens = [list(each.token_ids) for each in found]
        steps = [zip(each.token_ids, each.logprobs, strict=True) for each in found]
        results.append((tokens, [[step[token].logprob for token, step in each] for each in steps]))
    return results


def activations() -> dict[str, Any]:
    """Layers that are given codes: whether they and compiled ones return what they do for the same input, and what they
    refuse. And ignored layers, as vLLM names them."""
    import vllm.entrypoints.llm
    import vllm.plugins

    vllm.plugins.load_general_plugins()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation, get_input_quant_key
    from vllm.model_executor.layers.quantization.utils import quant_utils

    import hadagen
    from hadagen import prologues
    from hadagen.integrations import vllm_quantization
    from hadagen.models.scheme import Online, Scheme

    keys = {
        "int8-row": quant_utils.kInt8DynamicTokenSym,
        "fp8-row": quant_utils.kFp8DynamicTokenSym,
        "fp8-tensor": quant_utils.kFp8StaticTensorSym,
    }

    def made(to: str | None, online: Online | None = None, before: Any = None) -> Any:
        method = vllm_quantization.QuantizedMethod("layer", Scheme("int8" if to == "int8-row" else "fp8", to), online)
        layer, method.before = torch.nn.Module(), before
        layer.params_dtype = torch.float32
        load = {"weight_loader": None}
        method.create_weights(layer, 64, [32], 64, 32, torch.float32, **load)
        q = hadagen.rotate_quantize(torch.randn(32, 64), None, to=f"{method.scheme.weights}-row")
        layer.weight.data.copy_(q.codes[..., None])
        layer.weight_scale.data.copy_(q.scales.reshape(-1, 1))
        if to == "fp8-tensor":
            layer.input_scale.data.fill_(0.01)
        with set_current_vllm_config(VllmConfig()):
            method.process_weights_after_loading(layer)
        return layer, method

    def given(x: torch.Tensor, to: str, scale: Any = None) -> Any:
        q = hadagen.rotate_quantize(x, None, to=to, tensor_scale=scale)
        return QuantizedActivation(q.codes, q.scales, x.dtype, x.shape, keys[to])

    x, found = torch.randn(5, 64), {}
    for to, key in keys.items():
        layer, method = made(to)
        scale = getattr(layer, "input_scale", None)
        wanted = method.apply(layer, x)

        def ours(x: torch.Tensor, layer: Any = layer, method: Any = method, to: str = to, scale: Any = scale) -> Any:
            return method.apply(layer, given(x, to, scale))

        compiled = torch.compile(ours, backend="eager", fullgraph=True, dynamic=True)
        before = get_input_quant_key(layer)  # vLLM makes no codes on a CPU
        method.multiplies = True
        vllm_quantization.vllm_activation.expose(layer, method)
        exposed = before is None and get_input_quant_key(layer) == key
        method.multiplies = False
        found[to] = [torch.equal(ours(x), wanted), torch.allclose(compiled(x), wanted, atol=1e-4), exposed]

    q, refused = given(x, "fp8-row"), []
    fine = made("fp8-row")
    wrong = {
        "rotated": (made("fp8-row", Online(64)), q),
        "before": (made("fp8-row", None, prologues.SiluMul()), q),
        "weights alone": (made(None), q),
        "other codes": (fine, given(x, "int8-row")),
        "other key": (made("fp8-tensor"), q),
        "other type": (fine, QuantizedActivation(x, q.scale, x.dtype, x.shape, q.quant_key)),
        "padded": (fine, QuantizedActivation(q.data, q.scale, x.dtype, torch.Size([4, 64]), q.quant_key)),
        "longer": (made("fp8-row"), given(torch.randn(5, 128), "fp8-row")),
        "fewer": (fine, QuantizedActivation(q.data, q.scale[:3], x.dtype, x.shape, q.quant_key)),
    }
    for (layer, method), each in wrong.values():
        try:
            refused.append(str(method.apply(layer, each)))
        except ValueError as error:
            refused.append(f"{type(error).__name__}: {error}")

    from vllm.model_executor.models.utils import WeightsMapper

    quantization = vllm_quantization.Quantization(Scheme(ignore=("lm_head", "model.text.layers.0.mlp.down_proj")))
    quantization.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.text.": "text.model.", "lm_head": "text"}))
    normed = {}
    for to, limit in (("int8-row", 127.0), ("fp8-row", 448.0)):
        layer, method = made(to)
        y = torch.nn.functional.rms_norm(x, (64,), torch.rand(64))
        scale = y.abs().amax(-1, keepdim=True) / limit  # as rms_norm_dynamic_per_token_quant computes it
        codes = (y / scale).round().to(torch.int8) if to == "int8-row" else (y / scale).to(torch.float8_e4m3fn)
        wanted = method.apply(layer, y)
        error = method.apply(layer, QuantizedActivation(codes, scale, y.dtype, y.shape, keys[to])) - wanted
        normed[to] = float(error.norm() / wanted.norm())
    ignored = quantization.scheme.ignore
    return {"equal": found, "refused": refused, "ignored": ignored, "normed": normed} | {
        "keys": keys_on_gpus(),
        "experts": of_experts(),
    }


def of_experts() -> list[float]:
    """The relative errors of experts of a rank as a graph computes them, and of the sums of both ranks against
    hadagen's own loop, for formats of weights and activations."""
    from types import SimpleNamespace

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from hadagen.integrations.vllm_experts import QuantizedExperts
    from hadagen.models.experts import StackedLinear
    from hadagen.models.scheme import Online, Scheme

    config = SimpleNamespace(activation=MoEActivation.SILU, moe_parallel_config=SimpleNamespace(tp_size=1), tp_rank=0)
    x, ids, shares = torch.randn(9, 64), torch.randint(0, 4, (9, 2), dtype=torch.int32), torch.rand(9, 2)
    gate_up, down = torch.randn(4, 192, 64) / 8, torch.randn(4, 64, 96) / 10
    errors = []
    for weights, activations in (("int8", "int8-row"), ("fp8", "fp8-row"), ("int4", "int8-row"), ("int4-row", None)):
        online = {"down_proj": Online(96, 32)}
        scheme = Scheme(weights, activations, "blocks", layers=("gate_up_proj", "down_proj"), online=online)
        first, last = (
            StackedLinear.of(*each) for each in (("gate_up_proj", scheme, gate_up), ("down_proj", scheme, down))
        )
        wanted = torch.zeros_like(x)
        for token, rank in torch.cartesian_prod(torch.arange(9), torch.arange(2)).tolist():
            at, given = int(ids[token, rank]), x[token, None]
            gate, up = first(given, at).chunk(2, -1)
            wanted[token] += last(torch.nn.functional.silu(gate) * up, at)[0] * shares[token, rank]
        sums = [torch.zeros_like(x) for _ in range(2)]
        for mine in (slice(0, 2), slice(2, 4)):  # the experts of each of two ranks
            with set_current_vllm_config(VllmConfig()):
                method = QuantizedExperts(config, "experts", scheme, None, online["down_proj"])
            layer = torch.nn.Module()
            method.create_weights(layer, 2, 64, 96, torch.float32, weight_loader=print)
            for start, each in (("w13", first), ("w2", last)):
                for name, part in each.named_parameters(recurse=False):
                    held = getattr(layer, f"{start}_{name}")
                    held.data.copy_(part[mine].view(held.shape))
            layer.local_num_experts, layer.expert_map = 2, torch.full((4,), -1)
            layer.expert_map[mine] = torch.arange(2)
            sums[0] += method.sum_of(layer, x, shares, ids)
            method.add_all(layer, sums[1], x, shares, layer.expert_map[ids.long()])
        errors += [float((each - wanted).norm() / wanted.norm()) for each in sums]
    return errors


def keys_on_gpus() -> dict[str, list[str]]:
    """The keys that the layers of a decoder expose on GPUs of two capabilities, by rotations and formats."""
    from types import SimpleNamespace

    from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key
    from vllm.model_executor.layers.linear import LinearBase

    from hadagen.integrations import vllm_quantization
    from hadagen.models.folding import Sizes, planned
    from hadagen.models.scheme import Scheme

    sizes = Sizes(1, 64, 192, 2, 2, 32, tied=False)
    outputs = {"qkv_proj": (64, [64, 64, 64]), "o_proj": (64, [64]), "gate_up_proj": (64, [192, 192])}
    outputs["down_proj"] = 192, [64]
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    kinds = (("int8", "int8-row"), ("int4", "int8-row"), ("fp8", "fp8-row"), ("fp8", "fp8-tensor"), ("int8", None))
    vllm_quantization.cutlass_fp8_supported = lambda: False
    found, config = {}, VllmConfig(load_config=LoadConfig(load_format="dummy"))
    for capability in (80, 90):
        vllm_quantization.current_platform = SimpleNamespace(  # type: ignore[assignment]
            is_cuda=lambda: True, has_device_capability=lambda least, has=capability: has >= least
        )
        for rotation in ("quarot", "blocks", None):
            for weights, activations in kinds:
                scheme = planned(Scheme(weights, activations, rotation), sizes)
                quantization = vllm_quantization.Quantization(scheme)
                quantization.is_checked, quantization.sizes = True, sizes
                quantization.packed_modules_mapping = packed
                said = found[f"{capability} {rotation} {weights} {activations}"] = []
                for name, (inputs, parts) in outputs.items():
                    layer: Any = LinearBase.__new__(LinearBase)
                    torch.nn.Module.__init__(layer)
                    layer.input_size, layer.params_dtype = inputs, torch.bfloat16
                    prefix = f"model.layers.0.{'self_attn' if name in ('qkv_proj', 'o_proj') else 'mlp'}.{name}"
                    method = quantization.get_quant_method(layer, prefix)
                    assert isinstance(method, vllm_quantization.QuantizedMethod)
                    method.create_weights(layer, inputs, parts, inputs, 0, torch.bfloat16, weight_loader=print)
                    with set_current_vllm_config(config):
                        method.process_weights_after_loading(layer)
                    said.append(str(get_input_quant_key(layer)))
    return found


def failed(model: str, **options: Any) -> str:
    """The error of a model that cannot be loaded."""
    try:
        generate(model, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def parallel(*models: str) -> list[dict[str, Any]]:
    """What two processes generate."""
    return [generate(model, tensor_parallel_size=2) for model in models]


def refused_in_parallel(prefix: str, n: int, block: int | None, ranks: int) -> str:
    """The error of a layer whose block ranks would have to share."""
    from types import SimpleNamespace

    from hadagen.integrations import vllm_quantization
    from hadagen.models.scheme import Online, Scheme

    method = vllm_quantization.QuantizedMethod(
        prefix, Scheme(rotation="blocks" if block else "quarot"), Online(n, block)
    )
    layer = SimpleNamespace(tp_rank=0, tp_size=ranks)
    return said(method.create_weights, layer, n // ranks, [64], n, 64, torch.float32)


def _main() -> None:
    name, *arguments = sys.argv[1:]
    result = globals()[name](*arguments)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _main()
