"""Codes and scales of vLLM's layers: which of them a rank of tensor parallelism has, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.utils import set_weight_attrs

from hadagen.errors import UsageError
from hadagen.models.int4 import span_of
from hadagen.models.layers import HELD, check_values, shapes_of, type_of
from hadagen.models.scheme import GROUPS, Online, Scheme
from hadagen.runtime.checks import plain
from hadagen.runtime.rotation import Rotation

# Bytes of values that are refused.
_IMPOSSIBLE = {torch.float8_e4m3fn: 0x7F, torch.int8: 0x80, torch.uint8: 0x80, torch.float32: 0xFF}


@dataclass(frozen=True)
class Part:
    """What a rank has of weights [..., n] whose inputs are divided among `ranks`.

    prefix: the name of the layer. online: the rotation of its input.

    Raises `UsageError` if the input is not as long as the rotation, or ranks cannot share it.
    """

    prefix: str
    scheme: Scheme
    online: Online | None
    n: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.online and self.online.n != self.n:
            raise UsageError(f"{self.prefix} has {self.n} inputs, but the checkpoint rotates {self.online.n} of them")
        block = (self.online.block or self.n) if self.online else 1
        if self.n // self.ranks % block:
            other = "" if self.scheme.rotation == "blocks" else 'quantize the model with rotation="blocks", or '
            raise UsageError(
                f"{self.prefix} rotates blocks of {block} inputs, which {self.ranks} ranks cannot share; {other}choose "
                "a smaller tensor_parallel_size"
            )
        span = span_of(self.n) if self.scheme.weights in GROUPS else 1
        if self.n // self.ranks % span:
            raise UsageError(
                f"{self.prefix} has {self.n} inputs with spans of {span} codes of {self.scheme.weights}, which "
                f"{self.ranks} ranks cannot share; choose a smaller tensor_parallel_size"
            )

    def rotation(self, rank: int) -> Rotation | None:
        """That of the part of the input of a rank."""
        rotation = None if self.online is None else self.online.rotation()
        return rotation if rotation is None or self.ranks == 1 else rotation.shard(rank, self.ranks)


def add_codes(
    layer: Any, start: str, part: Part, rows: tuple[int, ...], of_cut: dict[str, Any], of_whole: dict[str, Any]
) -> None:
    """Add the parameters of a weight of a rank, which have impossible values until they are loaded.

    start: of their names. rows: the leading dimensions; codes of several layers have no last dimension of 1. of_cut,
    of_whole: vLLM's attributes of parameters whose columns are divided among ranks, and of others.
    """
    weights = part.scheme.weights
    for name, (_, columns, *last) in shapes_of(part.prefix, 1, part.n, weights).items():
        is_cut, kind = name != "weight_scale", type_of(name, weights)
        shape = *rows, columns // part.ranks if is_cut else columns, *(last if len(rows) == 1 else ())
        made = torch.empty(shape, dtype=kind)
        made.view(torch.uint8).fill_(_IMPOSSIBLE[kind])
        add(layer, f"{start}{name}", made, of_cut if is_cut else of_whole)


def add(layer: Any, name: str, tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Add a parameter whose loader takes no other type than its own."""
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attributes | {"weight_loader": _checked(name, attributes["weight_loader"])})


def _checked(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
    """A loader of vLLM that raises `UsageError` for another type, which vLLM would cast."""

    @wraps(load)
    def loaded(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if loaded_weight.dtype != param.dtype:
            raise UsageError(
                f"a {name} has the type {plain(loaded_weight.dtype)}, not {plain(param.dtype)}; quantize the model "
                "again"
            )
        return load(param, loaded_weight, *arguments, **options)

    return loaded


def check_loaded(prefix: str, layer: Any) -> None:
    """Raise `UsageError` for impossible codes and scales of a layer, such as those that were not loaded.

    prefix: of the names of its parameters, in messages and without the name of the layer. With `--load-format dummy`
    vLLM loads none, so they get values that are possible.
    """
    start = prefix.rpartition(".")[2]
    held = {name: getattr(layer, f"{start}{name}", None) for name in HELD}
    if _is_dummy():
        for each in held.values():
            if each is not None:
                each.data.view(torch.uint8).fill_(1) if each.itemsize == 1 else each.data.fill_(1e-4)
    check_values(prefix, held)


def _is_dummy() -> bool:
    config: Any = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"
