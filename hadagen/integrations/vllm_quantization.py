"""The quantization `hadagen` of vLLM: checkpoints with rotated, quantized weights, as `hadagen.models` writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn.functional import linear
from vllm import _custom_ops
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_fp8_supported
from vllm.platforms import current_platform

from hadagen import prologues
from hadagen.errors import UsageError, shown
from hadagen.integrations import vllm_activation, vllm_experts
from hadagen.integrations.host import Changed, Host
from hadagen.integrations.vllm_loading import Part, add, add_codes, check_loaded
from hadagen.models.checkpoint import Checkpoint
from hadagen.models.folding import Sizes, head_of
from hadagen.models.layers import OfWeight, codes_of_input, product_of, values_of
from hadagen.models.linears import check_is_untied, known_sizes, rotation_of_input
from hadagen.models.scheme import METHOD, Online, Scheme
from hadagen.models.stored import check_files, check_scheme
from hadagen.problem.prologues import Prologue
from hadagen.runtime.checks import QUANTIZED
from hadagen.runtime.quantized import Quantized

# Their instances have gate_up_proj, act_fn and down_proj. Other MLPs compute the activation by themselves.
_MLPS = ("vllm.model_executor.models.llama:LlamaMLP", "vllm.model_executor.models.qwen2:Qwen2MLP")
_hooked: set[str] = globals().get("_hooked", set())  # importlib.reload keeps it
_NO_INT8 = 100  # the capability from which vLLM has no product of INT8 codes
_FP8 = 89  # that from which GPUs have FP8


class Quantization(QuantizationConfig):  # type: ignore[misc]
    """What vLLM asks about a checkpoint. host: of the hooks that checkpoints need."""

    host: ClassVar[Host]

    def __init__(self, scheme: Scheme | None = None) -> None:
        if scheme is None:  # as vLLM makes it for a model without a quantization_config
            raise UsageError(
                "the model has no quantization_config of hadagen; leave out --quantization, or name a folder that "
                "hadagen quantize wrote"
            )
        super().__init__()
        self.stored = self.scheme = scheme  # with the checkpoint's names of layers, and with those of vLLM's model
        self.sizes: Sizes | None = None  # of a model whose architecture is known
        self.is_checked = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Quantization:
        """The `quantization_config` of a checkpoint. Raises `UsageError` for one that this hadagen does not read."""
        scheme = Scheme.from_dict(config)
        if scheme.cache:
            cls.host.warn(
                f"the checkpoint asks for keys and values in {scheme.cache}, which vLLM stores as --kv-cache-dtype says"
            )
        return cls(scheme)

    def get_name(self) -> str:
        """As in checkpoints."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those that `rotate_quantize` takes."""
        return list(QUANTIZED)

    @classmethod
    def get_min_capability(cls) -> int:
        """That of the oldest GPU with kernels."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the scheme is in `config.json`."""
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename layers as vLLM does. Names without a dot are those of all layers of a kind, and stay."""

        def renamed(name: str) -> str:
            found = hf_to_vllm_mapper.apply_list([name]) if "." in name else []
            return found[0] if found else name

        online = {renamed(name): each for name, each in self.scheme.online.items()}
        self.scheme = replace(self.scheme, ignore=tuple(map(renamed, self.scheme.ignore)), online=online)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear layer, of which vLLM merges some from several of the checkpoint, or of experts.

        Raises `UsageError` if the checkpoint is another than hadagen writes, or if it has rotated hidden states, and
        vLLM is to use them outside of the model.
        """
        if not self.is_checked:
            self.is_checked = True
            self.sizes = _check_folder(self.stored)
        if self.scheme.rotation == "quarot":
            _check_hidden_states()
        _hook_mlps(self.host)  # in the process that makes the model, which makes attention before the first MLP
        if isinstance(layer, RoutedExperts):
            return vllm_experts.method_of(layer, prefix, self.scheme, self._check_rotation)
        if not isinstance(layer, LinearBase):
            return None
        stem, dot, last = prefix.rpartition(".")
        names = [f"{stem}{dot}{each}" for each in self.packed_modules_mapping.get(last, [last])]
        found = {(self.scheme.is_quantized(name), self.scheme.online_of(name)) for name in names}
        if len(found) > 1:
            raise UsageError(
                f"vLLM merges {', '.join(names)}, of which the checkpoint quantizes or rotates only some; "
                "quantize the model again with the same treatment of all"
            )
        [(is_quantized, online)] = found
        if not is_quantized:
            return UnquantizedLinearMethod()
        self._check_rotation(names[0], layer.input_size)
        return QuantizedMethod(prefix, self.scheme, online)

    def _check_rotation(self, name: str, n: int) -> None:
        """Raise `UsageError` for another rotation of the input of a layer than hadagen writes."""
        found, wanted = self.scheme.online_of(name), rotation_of_input(self.scheme.rotation, name, n, self.sizes)
        if found != wanted:
            raise UsageError(
                f"quantization_config has {_said(found)} for the {n} inputs of {name}, but rotation "
                f"{shown(self.scheme.rotation)} needs {_said(wanted)}; quantize the model again"
            )


def _said(online: Online | None) -> str:
    return "no rotation" if online is None else f"a rotation of {online.n} in blocks of {online.block or online.n}"


class QuantizedMethod(LinearMethodBase):  # type: ignore[misc]
    """How vLLM holds and computes a quantized linear layer.

    prefix: the name of the layer. online: the rotation of its input. before: what runs before the rotation; the input
    then has twice the elements.
    """

    def __init__(self, prefix: str, scheme: Scheme, online: Online | None) -> None:
        self.prefix, self.scheme, self.online = prefix, scheme, online
        self.before: Prologue | None = None
        self.inputs = 0  # how many elements of its input a rank has
        self.multiplies = False  # whether a kernel of vLLM multiplies codes; else their values are multiplied

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Add `weight`, `weight_scale`, `input_scale` and `rotation` to the layer. Raises `UsageError` if the input
        is not as long as the rotation, or tensor parallelism divides a block of it."""
        part = Part(self.prefix, self.scheme, self.online, input_size, input_size // input_size_per_partition)
        layer.rotation, self.inputs = part.rotation(getattr(layer, "tp_rank", 0)), input_size_per_partition
        by_row = {"output_dim": 0, **attributes}
        add_codes(layer, "", part, (sum(output_partition_sizes),), {"input_dim": 1, **by_row}, by_row)
        if self.scheme.activations == "fp8-tensor":
            scales = torch.full((len(output_partition_sizes),), torch.nan, dtype=torch.float32)
            add(layer, "input_scale", scales, {"needs_scalar_to_array": True, **attributes})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Move the rotation to the weight's device, and look which products vLLM has there.

        Raises `UsageError` for impossible codes and scales, such as those that were not loaded. With
        `--load-format dummy` vLLM loads none, so they get values that are possible.
        """
        check_loaded(f"{self.prefix}.", layer)
        if layer.rotation is not None:
            layer.rotation.to(layer.weight.device)
        if self.scheme.activations == "fp8-tensor":  # merged layers have the same input
            layer.input_scale = torch.nn.Parameter(layer.input_scale.max(), requires_grad=False)
        alike = (self.scheme.activations or "").startswith(self.scheme.weights)
        if alike and current_platform.is_cuda() and layer.params_dtype != torch.float32:
            has_int8 = not current_platform.has_device_capability(_NO_INT8)
            self.multiplies = cutlass_fp8_supported() if self.scheme.weights == "fp8" else has_int8
        # Norms, activations and attention of vLLM make codes on GPUs, also for weights of other codes.
        is_fp8 = (self.scheme.activations or "").startswith("fp8")
        if current_platform.is_cuda() and (not is_fp8 or current_platform.has_device_capability(_FP8)):
            vllm_activation.expose(layer, self)

    def input_codes(self) -> str | None:
        """The format of codes that the layer takes as its input. None if it changes its input before it quantizes it,
        or does not quantize it."""
        return self.scheme.activations if self.online is None and self.before is None else None

    def input_quant_key(self) -> Any:
        """vLLM's name of `input_codes`, or None."""
        codes = self.input_codes()
        return None if codes is None else vllm_activation.key_of(codes)

    def apply(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x · weightᵀ + bias for the values that codes stand for.

        x: a tensor, or a `QuantizedActivation` of `input_quant_key`; `UsageError` for any other one.
        """
        if vllm_activation.is_quantized(x):
            q = vllm_activation.codes_given(self.prefix, x, self.input_codes(), self.inputs)
            return self._product(layer, q, x.orig_dtype, bias)
        if self.scheme.activations is None:
            turned = x if layer.rotation is None else layer.rotation(x)
            return self._product(layer, turned, x.dtype, bias)
        scale = getattr(layer, "input_scale", None)
        q = codes_of_input(x, layer.rotation, self.scheme.activations, self.before, scale)
        return self._product(layer, q, x.dtype, bias)

    def _product(
        self, layer: Any, x: Quantized | torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight = OfWeight(layer.weight.squeeze(-1), layer.weight_scale, getattr(layer, "weight_factor", None))
        if not isinstance(x, Quantized):
            return product_of(x, weight, bias, dtype)
        if self.multiplies:
            scales = x.scales.reshape(-1, 1)
            found = _custom_ops.cutlass_scaled_mm(x.codes, weight.codes.T, scales, weight.scales, dtype, bias)
            return found  # type: ignore[no-any-return]
        if x.codes.device.type == "cpu" and torch.compiler.is_compiling():
            # With torch._int_mm, graphs of vLLM 0.32 return NaN.
            return linear(x.dequantize(dtype), values_of(*weight, dtype), bias)
        return product_of(x, weight, bias, dtype)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """Raises `UsageError`: by this, vLLM would quantize the layer again, without the rotation of its input."""
        raise UsageError(
            f"{self.prefix} has codes of hadagen already, which vLLM cannot quantize again; leave out "
            "quantization_config, or give vLLM the model that is not quantized"
        )


def _check_folder(scheme: Scheme) -> Sizes | None:
    """Raise what hadagen's own loading raises for the checkpoint of the model that vLLM makes now, and return its
    sizes, if its architecture is known.

    Its files are read if vLLM was given a folder, by the first process. The rotations of models with other names than
    Llama's are compared layer by layer, when these are made.
    """
    config: Any = get_current_vllm_config_or_none()
    if config is None:
        return None
    hf_config = config.model_config.hf_config
    given = {name: each for name, each in hf_config.to_dict().items() if name != "quantization_config"}
    sizes = llama = Sizes.of(given)
    check_scheme(scheme, llama)
    if llama is None:
        sizes = known_sizes(SimpleNamespace(config=hf_config), scheme)
        wanted = head_of(scheme, sizes) if sizes else None
        if scheme.head != wanted:
            raise UsageError(
                f"quantization_config has head {shown(scheme.head)}, but rotation {shown(scheme.rotation)} of this "
                f"model needs {shown(wanted)}; quantize it again"
            )
        check_is_untied(scheme, sizes)
    folder = Path(config.model_config.model)
    if folder.is_dir() and config.parallel_config.rank == 0:
        check_files(Checkpoint(folder).paths(), llama, given["model_type"], scheme)
    return sizes


def _check_hidden_states() -> None:
    """Raise `UsageError` if vLLM uses hidden states outside of the model that it makes now."""
    config: Any = get_current_vllm_config_or_none()
    if config is None:
        return
    for is_used, use in (
        (config.model_config.runner_type == "pooling", "pooling would return rotated embeddings"),
        (config.lora_config is not None, "LoRA adapters of the original model do not fit (enable_lora)"),
        (config.model_config.enable_prompt_embeds, "prompt embeddings do not fit (enable_prompt_embeds)"),
    ):
        if is_used:
            raise UsageError(
                f'the checkpoint has rotation="quarot", which rotates hidden states, so {use}; quantize the model '
                'again with rotation="blocks"'
            )


def _hook_mlps(host: Host) -> None:
    """Let the last layers of MLPs compute SiLU·mul too, in the kernel that rotates and quantizes."""
    for path in set(_MLPS) - _hooked:
        _hooked.add(path)
        try:
            mlp = host.get(path)
            make = host.get(f"{path}.__init__")
        except Changed as reason:
            host.warn(str(reason))
        else:
            mlp.__init__ = _fused(make)


def _fused(make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def made(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        method, config = self.down_proj.quant_method, get_current_vllm_config_or_none()
        if config is not None and config.lora_config is not None:  # adapters of down_proj take its input
            return
        if isinstance(method, QuantizedMethod) and method.scheme.activations and type(self.act_fn) is SiluAndMul:
            method.before = prologues.SiluMul()
            self.act_fn = torch.nn.Identity()

    return made
