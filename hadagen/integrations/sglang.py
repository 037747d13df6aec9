"""SGLang: Hadamard transforms, and rotated FP8 queries of the indexers of sparse attention, by hadagen.

`register` is an entry point of the group `sglang.srt.plugins`, which SGLang calls in every process. It hooks these
functions of the modules `_HADAMARD`, `_INDEXER` and `_ACT_QUANT`:

    hadamard_transform, hadamard_transform_12n, _20n, _28n and _40n
    rotate_activation   queries are rotated when they are used, because most of them are only quantized
    act_quant           rotates and quantizes such queries in one kernel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from hadagen.compat import sglang as functions
from hadagen.integrations.host import Changed, Host
from hadagen.runtime.checks import QUANTIZED
from hadagen.runtime.quantize import rotate_quantize

HOST = Host("sglang", "sglang", "0.5.23")
_HADAMARD = "sglang.kernels.ops.quantization.hadamard"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_ACT_QUANT = "sglang.kernels.ops.quantization.act_quant_triton"
_REGISTRY = "sglang.srt.plugins.hook_registry"
_GROUPS = 16, 32, 64, 128


def register() -> None:
    """Register the hooks, unless HADAGEN_INTEGRATIONS excludes `sglang`, or PyTorch is not built for CUDA."""
    if not HOST.is_enabled() or torch.version.cuda is None:
        return
    hooks: list[_Hook] = [
        (_HADAMARD, name, _replacing(getattr(functions, name)), ("x", "scale"))
        for name in (f"hadamard_transform_{order}n" for order in (12, 20, 28, 40))
    ]
    hooks += [
        (_HADAMARD, "hadamard_transform", _replacing(functions.hadamard_transform), ()),  # an operator
        (_INDEXER, "rotate_activation", _rotate_activation, ("x",)),
        (_ACT_QUANT, "act_quant", _act_quant, ("x", "block_size", "scale_fmt")),
    ]
    try:
        add = HOST.get(f"{_REGISTRY}:HookRegistry.register", "target", "hook", "hook_type")
        around = HOST.get(f"{_REGISTRY}:HookType.AROUND")
        for module, name, _, parameters in hooks:
            HOST.get(f"{module}:{name}", *parameters)
    except Changed as changed:
        HOST.warn(str(changed))
        return
    for module, name, hook, _ in hooks:
        add(f"{module}.{name}", hook, around)


# Module and name of a function, the hook, and the parameters of the function.
_Hook = tuple[str, str, Callable[..., Any], tuple[str, ...]]


# ---- hooks, whose first argument is the function of the host ---------------------------------------------------------
def _replacing(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def hook(theirs: Callable[..., torch.Tensor], x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return function(x, scale)

    return hook


def _rotate_activation(theirs: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """x · H · n^-½ over the last dimension. Queries, which are [tokens, heads, n], are rotated later."""
    n = x.shape[-1]
    later = x.dim() == 3 and n & (n - 1) == 0 and type(x) is torch.Tensor and _has_kernels(x)
    return _Rotated(x, theirs) if later else theirs(x)


def _act_quant(
    theirs: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    block_size: int = 128,
    scale_fmt: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes of x, and float32 scales [..., groups], which are powers of two if there is a scale_fmt."""
    n = None
    if isinstance(x, _Rotated):
        x, n = (x.source, x.shape[-1]) if x.result is None else (x.result, None)
    if block_size not in _GROUPS or x.shape[-1] % block_size or not _has_kernels(x):
        return theirs(x if n is None else functions.hadamard_transform(x, n**-0.5), block_size, scale_fmt)
    rule = "exact" if scale_fmt is None else "power_of_two"
    q = rotate_quantize(x, n, to="fp8-group", group=block_size, rule=rule, round_first=True)
    return q.codes, q.scales


def _has_kernels(x: torch.Tensor) -> bool:
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return x.dtype in QUANTIZED and not needs_gradient and not torch.compiler.is_compiling()


class _Rotated(torch.Tensor):
    """A rotated tensor, which is computed when an operator takes it.

    source: the values to rotate. result: the rotated values, None before they are computed. rotate: computes them.
    """

    source: torch.Tensor
    result: torch.Tensor | None
    rotate: Callable[..., torch.Tensor]

    @staticmethod
    def __new__(cls, source: torch.Tensor, rotate: Callable[..., torch.Tensor]) -> _Rotated:
        made: _Rotated = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype, device=source.device
        )
        made.source, made.result, made.rotate = source, None, rotate
        return made

    def compute(self) -> torch.Tensor:
        """The rotated values."""
        if self.result is None:
            with forward_ad._set_fwd_grad_enabled(False):  # a dispatched operator cannot ask for tangents
                self.result = self.rotate(self.source)
        return self.result

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(_Rotated, _Rotated.compute, (args, kwargs or {}))
        return func(*args, **kwargs)
