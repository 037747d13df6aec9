"""SGLang: Hadamard transforms, and rotated FP8 queries of the indexers of sparse attention, by hadagen.

`register` is an entry point of the group `sglang.srt.plugins`, which SGLang calls in every process. It hooks these
functions of the modules `_HADAMARD`, `_INDEXER` and `_ACT_QUANT`:

    hadamard_transform, hadamard_transform_12n, _20n, _28n and _40n
    Indexer._maybe_rotate   rotates and quantizes queries in one kernel, because the indexer only quantizes them then
    act_quant               quantizes, or returns the codes of such queries
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from hadagen.compat import sglang as functions
from hadagen.errors import UsageError, shown
from hadagen.integrations.host import SGLANG as HOST
from hadagen.integrations.host import SWITCH, Changed
from hadagen.runtime.checks import QUANTIZED
from hadagen.runtime.quantize import rotate_quantize

_HADAMARD = "sglang.kernels.ops.quantization.hadamard"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_ACT_QUANT = "sglang.kernels.ops.quantization.act_quant_triton"
_REGISTRY = "sglang.srt.plugins.hook_registry"
_GROUPS = 16, 32, 64, 128
_hooked: WeakSet[Any] = globals().get("_hooked", WeakSet())  # registries with the hooks; importlib.reload keeps them


def register() -> None:
    """Register the hooks, unless HADAGEN_INTEGRATIONS excludes `sglang`, or PyTorch is not built for CUDA."""
    if not HOST.is_enabled() or torch.version.cuda is None:
        return
    hooks: list[_Hook] = [
        (_HADAMARD, name, _replacing(getattr(functions, name)))
        for name in (f"hadamard_transform_{order}n" for order in (12, 20, 28, 40))
    ]
    hooks += [
        (_HADAMARD, "hadamard_transform", _replacing(functions.hadamard_transform)),
        (_ACT_QUANT, "act_quant", _act_quant),
    ]
    if HOST.version() == HOST.tested:  # the tests have read where queries of this version go
        hooks.append((_INDEXER, "Indexer._maybe_rotate", _maybe_rotate))
    try:
        registry = HOST.get(f"{_REGISTRY}:HookRegistry.register").__self__
        around = HOST.get(f"{_REGISTRY}:HookType.AROUND")
        for module, name, _ in hooks:
            HOST.get(f"{module}:{name}")
    except Changed as changed:
        HOST.warn(str(changed))
        return
    for module, name, hook in () if registry in _hooked else hooks:
        registry.register(f"{module}.{name}", hook, around)
    _hooked.add(registry)


_Hook = tuple[str, str, Callable[..., Any]]  # module and name of a function, and the hook
_Codes = tuple[torch.Tensor, torch.Tensor]  # and their scales


# ---- hooks, whose first argument is the function of the host ---------------------------------------------------------
def _replacing(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def hook(theirs: Callable[..., torch.Tensor], x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return function(x, scale)

    return hook


def _maybe_rotate(theirs: Callable[..., torch.Tensor], self: Any, x: torch.Tensor) -> torch.Tensor | _Query:
    """x · H · n^-½ over the last dimension. Queries, which are [tokens, heads, n], are quantized too."""
    n = x.shape[-1]
    is_rotated = not self.use_dsa_indexer_fusion and not self.use_aiter_fused_fp8_writer
    is_query = x.dim() == 3 and n & (n - 1) == 0 and type(x) is torch.Tensor
    if not (is_rotated and is_query and _quantizes(x, self.block_size)):
        return theirs(self, x)
    return _Query(self.block_size, self.scale_fmt, _quantized(x, n, self.block_size, self.scale_fmt))


def _act_quant(
    theirs: Callable[..., _Codes], x: torch.Tensor | _Query, block_size: int = 128, scale_fmt: str | None = None
) -> _Codes:
    """FP8 codes of x, and float32 scales [..., groups], which are powers of two if there is a scale_fmt."""
    if isinstance(x, _Query):
        return x.codes_for(block_size, scale_fmt)
    return _quantized(x, None, block_size, scale_fmt) if _quantizes(x, block_size) else theirs(x, block_size, scale_fmt)


def _quantized(x: torch.Tensor, n: int | None, block_size: int, scale_fmt: str | None) -> _Codes:
    rule = "exact" if scale_fmt is None else "power_of_two"
    q = rotate_quantize(x, n, to="fp8-group", group=block_size, rule=rule, round_first=True)
    return q.codes, q.scales


def _quantizes(x: torch.Tensor, block_size: int) -> bool:
    """Whether `_quantized` takes x."""
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    has_groups = block_size in _GROUPS and x.shape[-1] % block_size == 0
    return has_groups and x.dtype in QUANTIZED and not needs_gradient and not torch.compiler.is_compiling()


class _Query:
    """The codes of a rotated query, for a block size and a format of scales.

    It is no tensor, because nothing has the rotated values. Whatever uses it, but for `act_quant`, raises `UsageError`.
    """

    def __init__(self, block_size: int, scale_fmt: str | None, codes: _Codes) -> None:
        self._made_for, self._codes = (block_size, scale_fmt is None), codes

    def codes_for(self, block_size: int, scale_fmt: str | None) -> _Codes:
        """What `act_quant` returns."""
        if (block_size, scale_fmt is None) != self._made_for:
            raise _refusal(f"act_quant with block_size={block_size} and scale_fmt={shown(scale_fmt)}")
        return self._codes

    def __getattr__(self, name: str) -> Any:
        raise _refusal(name)

    def __getitem__(self, index: Any) -> Any:
        raise _refusal("indexing")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _refusal(getattr(func, "__name__", "PyTorch"))


def _refusal(use: str) -> UsageError:
    return UsageError(
        f"{use} needs the values of a rotated query, but hadagen makes only its FP8 codes, with the block_size and "
        f"scale_fmt of the indexer; set {SWITCH}=none, and SGLang computes the values"
    )
