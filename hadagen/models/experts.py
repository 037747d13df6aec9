"""Experts of transformers whose packed weights have codes: a loop of linear layers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hadagen.errors import UsageError
from hadagen.models import gates
from hadagen.models.layers import QuantizedLinear
from hadagen.models.scheme import Scheme


def check_activations(name: str, scheme: Scheme) -> None:
    """Raise `UsageError` for a scale of activations that experts cannot have."""
    if scheme.activations == "fp8-tensor":
        raise UsageError(
            f"{name} has experts, some of which a text may not reach, so fp8-tensor has no scales for them; use fp8-row"
        )


class StackedLinear(QuantizedLinear):
    """Linear layers of one shape, such as those of experts, one behind the other.

    Parameters are those of `QuantizedLinear` with one more dimension in front: weight [count, out, in, 1],
    weight_scale [count, out, 1] and bias [count, out]. Raises `UsageError` for activations "fp8-tensor": a text that
    calibrates them may not reach every expert.
    """

    def __init__(self, name: str, scheme: Scheme, count: int, *sizes: int, **options: Any) -> None:
        check_activations(name, scheme)
        super().__init__(name, scheme, *sizes, **options)
        for part, each in list(self.named_parameters(recurse=False)):
            stacked = torch.empty((count, *each.shape), dtype=each.dtype, device=each.device)
            setattr(self, part, torch.nn.Parameter(stacked, requires_grad=False))

    @classmethod
    def of(cls, name: str, scheme: Scheme, weight: torch.Tensor, bias: torch.Tensor | None = None) -> StackedLinear:
        """The layers of weights [count, out, in] and biases [count, out], with the inverse of the rotation folded."""
        count, outputs, inputs = weight.shape
        made = cls(name, scheme, count, inputs, outputs, bias=bias is not None, device="meta")
        layers = [
            QuantizedLinear.of(name, scheme, each, None if bias is None else bias[at]) for at, each in enumerate(weight)
        ]
        for part, _ in list(made.named_parameters(recurse=False)):
            stacked = torch.stack([getattr(each, part).data for each in layers])
            setattr(made, part, torch.nn.Parameter(stacked, requires_grad=False))
        return made

    @property
    def codes(self) -> torch.Tensor:
        """The codes of the weights, [count, out, in]."""
        return self.weight.squeeze(-1)

    def layer(self, at: int) -> QuantizedLinear:
        """The layer `at`, whose parameters are views of these."""
        made: Any = copy.copy(self)
        made.__class__ = QuantizedLinear
        made._parameters = {part: None if each is None else each[at] for part, each in self._parameters.items()}
        return made  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, at: int = 0) -> torch.Tensor:
        """What the layer `at` computes of x [..., in]."""
        return self.layer(at)(x)  # type: ignore[no-any-return]


def are_experts(module: torch.nn.Module) -> bool:
    """Whether a module has weights that transformers' `use_experts_implementation` describes."""
    known = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
    return known and all(isinstance(getattr(module, name, None), torch.nn.Parameter) for name in packed_parts(module))


def packed_parts(module: Any) -> tuple[str, str]:
    """The names of the weights of experts: [experts, out, in], or [experts, in, out] if `is_transposed`."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


class QuantizedExperts(torch.nn.Module):
    """Experts whose weights are two `StackedLinear`, which take the names of the packed weights.

    experts: of transformers, whose weights `take` removes. Its activation function and settings are kept.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.parts = packed_parts(experts)
        if experts.has_post_expert_norm:
            self.post_expert_norm = experts._modules.pop("post_expert_norm")
        experts._is_hf_initialized = True  # transformers has nothing to fill in it
        self.settings, self.num_experts = experts, experts.num_experts
        self.is_fused = False  # whether the last layers compute what comes before them

    def take(self, part: str, layer: StackedLinear) -> None:
        """Put layers in place of a packed weight and its biases."""
        for name in (part, f"{part}_bias"):
            self.settings._parameters.pop(name, None)
        setattr(self, part, layer)

    def fuse(self) -> None:
        """Let the last layers compute what comes before them in the kernel that quantizes, if a prologue does that."""
        last = getattr(self, self.parts[1])
        if last.activations:
            last.before = gates.of_function(self._act, self.settings, 2 if self.settings.has_gate else 1)
            self.is_fused = last.before is not None

    @property
    def _act(self) -> Any:
        return self.settings._apply_gate if self.settings.has_gate else self.settings.act_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The sum of the outputs of the chosen experts.

        hidden_states: [tokens, width]. top_k_index: the experts of each token, [tokens, k]; num_experts stands for
        none. top_k_weights: of each of these, [tokens, k].
        """
        first, last = (getattr(self, part) for part in self.parts)
        act = (lambda y: y) if self.is_fused else self._act
        sums = torch.zeros_like(hidden_states)
        for at in torch.unique(top_k_index).tolist():
            if not 0 <= at < self.num_experts:
                continue
            token, rank = torch.where(top_k_index == at)
            y = last(act(first(hidden_states[token], at)), at)
            if self.settings.has_post_expert_norm:
                y = self.post_expert_norm(y)
            sums.index_add_(0, token, (y * top_k_weights[token, rank, None]).to(sums.dtype))
        return sums
