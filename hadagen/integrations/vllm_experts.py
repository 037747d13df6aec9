"""Routed experts of vLLM whose weights have codes: a loop of linear layers.

vLLM has the weights of all experts in two: w13, the gates and behind them what they multiply, and w2, the last layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from hadagen import prologues
from hadagen.errors import UsageError, shown
from hadagen.integrations.vllm_loading import Part, add_codes, check_loaded
from hadagen.models.experts import check_activations
from hadagen.models.layers import OF_WEIGHT, OfWeight, codes_of_input, product_of
from hadagen.models.scheme import Online, Scheme
from hadagen.problem.prologues import Prologue
from hadagen.runtime.call.operators import register
from hadagen.runtime.quantized import Quantized
from hadagen.runtime.rotation import Rotation

# vLLM's activations of experts → its functions of these names.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_PACKED = ("gate_up_proj", "down_proj")  # the names of weights of experts that transformers packs
_AGAIN = "quantize the model again with --ignore for each of {}"


def method_of(
    layer: Any, prefix: str, scheme: Scheme, check_rotation: Callable[[str, int], None]
) -> QuantizedExperts | None:
    """How vLLM holds and computes experts with codes; None for experts without.

    check_rotation: raises `UsageError` for another rotation of a layer, by its name, and the length of its input.

    Raises `UsageError` for codes that this method does not compute.
    """
    first, last = names_of(layer, prefix, scheme)
    with_codes = [name for name in (*first, last) if scheme.is_quantized(name)]
    if not with_codes:
        return None
    listed = ", ".join(name.rpartition(".")[2] for name in (*first, last))
    if len(with_codes) <= len(first):
        raise UsageError(
            f"the checkpoint has codes in only some of {listed} of {prefix}; {_AGAIN.format('them, or of none')}"
        )
    _check_kind(layer, prefix, listed)
    check_activations(prefix, scheme)
    for name in first:
        check_rotation(name, layer.moe_config.hidden_dim)
    check_rotation(last, layer.moe_config.intermediate_size)
    rotations = {scheme.online_of(name) for name in first}
    if len(rotations) > 1:
        raise UsageError(f"vLLM merges {', '.join(first)}, which have different rotations; quantize the model again")
    return QuantizedExperts(layer.moe_config, prefix, scheme, rotations.pop(), scheme.online_of(last))


def names_of(layer: Any, prefix: str, scheme: Scheme) -> tuple[list[str], str]:
    """The names of the first and the last weights of experts in a scheme, which has those of transformers."""
    prefix = prefix.replace(".block_sparse_moe.", ".mlp.")  # as Mixtral's files have it
    packed = [f"{prefix}.{each}" for each in _PACKED]
    if "gate_up_proj" in scheme.layers or any(each in scheme.ignore for each in (*packed, "gate_up_proj")):
        return packed[:1], packed[1]
    first = [each for each in (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name) if each]
    return [f"{prefix}.0.{each}" for each in first], f"{prefix}.0.{layer.ckpt_down_proj_name}"


def _check_kind(layer: Any, prefix: str, listed: str) -> None:
    """Raise `UsageError` for experts that compute anything else than last(act(gate(x)) · up(x))."""
    config = layer.moe_config
    for is_other, what in (
        (config.activation.value not in _ACTIVATIONS, f"the activation {shown(config.activation.value)}"),
        (layer.swiglu_limit is not None, "a limit of its activation"),
        (config.has_bias, "biases"),
        (layer.apply_router_weight_on_input, "weights of the router on its inputs"),
        (config.is_lora_enabled, "LoRA adapters (enable_lora)"),
    ):
        if is_other:
            raise UsageError(
                f"{prefix} has codes and {what}, which hadagen does not compute in vLLM; {_AGAIN.format(listed)}"
            )


class QuantizedExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """How vLLM holds and computes experts with codes.

    moe: vLLM's configuration of the layer. prefix: its name. first, last: the rotations of the inputs of w13 and w2.
    """

    def __init__(self, moe: Any, prefix: str, scheme: Scheme, first: Online | None, last: Online | None) -> None:
        super().__init__(moe)
        self.prefix, self.scheme, self.first, self.last = prefix, scheme, first, last
        self.before: Prologue | None = None
        self.prepared: set[int] = set()  # the numbers of tokens with which an expert has run
        self.activate: Callable[[torch.Tensor], torch.Tensor] = torch.nn.Identity()
        if scheme.activations and moe.activation.value == "silu":
            self.before = prologues.SiluMul()
        else:
            self.activate = get_act_and_mul_fn(_ACTIVATIONS[moe.activation.value])

    def maybe_roundup_sizes(self, hidden_size: int, inner: int, *_: Any, **__: Any) -> tuple[int, int]:
        """As they are: a rotation takes no padding."""
        return hidden_size, inner

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Add `w13_weight`, `w2_weight`, their scales and their rotations to the layer. Raises `UsageError` if tensor
        parallelism divides a block of a rotation, or a group of scales."""
        inner = intermediate_size_per_partition
        ranks = self.moe.moe_parallel_config.tp_size
        first = Part(self.prefix, self.scheme, self.first, hidden_size)
        last = Part(self.prefix, self.scheme, self.last, inner * ranks, ranks)
        layer.w13_rotation, layer.w2_rotation = first.rotation(0), last.rotation(self.moe.tp_rank)
        attributes = attributes | {"weight_loader": _of_matrices(attributes["weight_loader"])}
        of_scales = attributes | {"quant_method": "channel"}  # by which vLLM knows that ranks have those of w2 whole
        for start, part, out in (("w13_", first, 2 * inner), ("w2_", last, hidden_size)):
            add_codes(layer, start, part, (num_experts, out), attributes, of_scales)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM reads the codes."""
        return

    def process_weights_after_loading(self, layer: Any) -> None:
        """Move the rotations to the device of the weights. Raises `UsageError` for impossible codes and scales, such as
        those that were not loaded."""
        for name in ("w13", "w2"):
            check_loaded(f"{self.prefix}.{name}_", layer)
            if rotation := getattr(layer, f"{name}_rotation"):
                rotation.to(layer.w2_weight.device)

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """The sum of the outputs of the chosen experts that this rank has, [tokens, width] of the type of x.

        x: [tokens, width]. topk_ids: the experts of each token, [tokens, k]. topk_weights: of each of these.
        """
        if torch.compiler.is_compiling():  # as on CPUs; elsewhere vLLM has an operator around this
            return _operator(x, topk_weights, topk_ids, layer.layer_name)  # type: ignore[no-any-return]
        return self.sum_of(layer, x, topk_weights, topk_ids)

    def sum_of(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """What `apply` returns."""
        experts = topk_ids
        if layer.expert_map is not None:
            experts = torch.where(topk_ids < 0, -1, layer.expert_map[topk_ids.long().clamp(min=0)])
        is_in_graph = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        add = self.add_all if is_in_graph else self.add_chosen
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        add(layer, sums, x, topk_weights, experts)
        return sums.to(x.dtype)

    def add_chosen(
        self, layer: Any, sums: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor
    ) -> None:
        """Add the outputs of experts for the tokens that have chosen them.

        experts: their indices in this rank, [tokens, k]; -1 for those of other ranks. shares: of each of these.
        """
        given = self._of_input(x, layer.w13_rotation)
        if x.device.type == "cuda" and len(x) not in self.prepared:  # for `add_all`, which may not compile kernels
            self.prepared.add(len(x))
            self._of_expert(layer, 0, given, x.dtype)
        for at in torch.unique(experts).tolist():
            if 0 <= at < layer.local_num_experts:
                token, rank = torch.where(experts == at)
                y = self._of_expert(layer, at, _rows(given, token), x.dtype)
                sums.index_add_(0, token, y * shares[token, rank, None].float())

    def add_all(
        self, layer: Any, sums: torch.Tensor, x: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor
    ) -> None:
        """The same in a graph, whose sizes may not depend on values: every expert computes all tokens."""
        given = self._of_input(x, layer.w13_rotation)
        for at in range(layer.local_num_experts):
            is_chosen = experts == at
            y = self._of_expert(layer, at, given, x.dtype)
            share = torch.where(is_chosen, shares, 0).sum(-1, keepdim=True).float()
            sums += torch.where(is_chosen.any(-1, keepdim=True), y * share, 0)  # others may have infinities

    def _of_input(self, x: torch.Tensor, rotation: Rotation | None, before: Prologue | None = None) -> Any:
        """x as a product takes it: rotated, and in codes if the scheme has codes of activations."""
        if self.scheme.activations is None:
            return x if rotation is None else rotation(x)
        return codes_of_input(x, rotation, self.scheme.activations, before, None)

    def _of_expert(self, layer: Any, at: int, given: Any, dtype: torch.dtype) -> torch.Tensor:
        """The outputs of an expert. given: what `_of_input` returned for its inputs."""
        hidden = self.activate(product_of(given, _weight_of(layer, "w13_", at), None, dtype))
        given = self._of_input(hidden, layer.w2_rotation, self.before)
        return product_of(given, _weight_of(layer, "w2_", at), None, dtype)


# ---- an operator around the experts of a layer -----------------------------------------------------------------------
def _real(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, name: str) -> torch.Tensor:
    layer = get_forward_context().no_compile_layers[name].routed_experts
    return layer.quant_method.sum_of(layer, x, topk_weights, topk_ids)  # type: ignore[no-any-return]


def _fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


_SCHEMA = "(Tensor x, Tensor topk_weights, Tensor topk_ids, str name) -> Tensor"
# importlib.reload keeps it
_operator: Any = globals().get("_operator") or register("vllm_experts", _SCHEMA, _real, _fake)


# ---- weights and rows ------------------------------------------------------------------------------------------------
def _weight_of(layer: Any, start: str, at: int) -> OfWeight:
    """A weight of an expert. start: of the names of its parameters."""
    parts = (getattr(layer, f"{start}{name}", None) for name in OF_WEIGHT)
    return OfWeight(*(None if each is None else each[at] for each in parts))  # type: ignore[arg-type]


def _rows(given: Any, at: torch.Tensor) -> Any:
    """Some rows of a tensor, or of codes with a scale for each row."""
    if not isinstance(given, Quantized):
        return given[at]
    codes = given.codes.view(torch.uint8)[at].view(given.codes.dtype)  # PyTorch does not index FP8 everywhere
    return Quantized(codes, given.scales[at], given.format)


def _of_matrices(load: Callable[..., Any]) -> Callable[..., Any]:
    """A loader of vLLM that takes codes [out, columns, 1], which vLLM would take for those of several experts."""

    @wraps(load)
    def loaded(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        codes = loaded_weight.squeeze(-1) if loaded_weight.dim() == 3 else loaded_weight
        return load(param, codes, *arguments, **options)

    return loaded
