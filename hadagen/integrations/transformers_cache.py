"""Attention of transformers whose cache holds keys and values in hadagen's codes.

Any cache of transformers holds them, in bytes: attention packs the keys and values of new tokens before the cache gets
them, and unpacks those of all tokens that it returns. Queries are rotated like keys, where attention functions get
them, so rotated keys need no inverse. Both are rotated behind the rotary embedding. A call without a cache rotates and
quantizes nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from hadagen.errors import UsageError, shown
from hadagen.integrations.host import TRANSFORMERS as HOST
from hadagen.integrations.transformers_attention import takes_codes, updates
from hadagen.models.cache import HeadCodes
from hadagen.models.folding import Sizes, check_rotation
from hadagen.models.scheme import Scheme
from hadagen.runtime.checks import plain
from hadagen.runtime.rotation import Rotation

_FILLED = "_hadagen_codes"  # an attribute of layers of a cache: the format of the codes, and whether keys are rotated
_LENGTHS = ("head_dim", "head_size", "qk_head_dim", "v_head_dim")  # attributes of attention
_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"  # where the forward of attention finds the function that it calls


def quantize_cache(model: torch.nn.Module, scheme: Scheme, sizes: Sizes | None) -> None:
    """Let the attention of each layer keep keys and values in codes, if the scheme says so.

    sizes: of a Llama-like model; None for any other. Raises `UsageError` if an attention is another than hadagen knows,
    or has heads that no cache of the scheme holds.
    """
    if scheme.cache is None:
        return
    found: list[Any] = [each for each in model.modules() if _keeps_keys(each, sizes)]
    if not found:
        raise UsageError(f"{type(model).__name__} has no attention that keeps keys and values; leave cache out")
    for layer in found:
        if sizes is None and not takes_codes(inspect.unwrap(type(layer).forward), _FUNCTIONS):
            raise UsageError(
                f"{type(layer).__name__} takes no cache in codes, because hadagen does not know all that it does with "
                "keys and values; leave cache out"
            )
        head = sizes.head if sizes else _head_of(layer)
        codes = HeadCodes(scheme.cache, head)
        if scheme.rotates_keys:
            check_rotation("head_dim", head, "a head of keys", "none")
        layer.__class__ = _with_codes(layer.__class__)
        layer.cache_codes = codes
        layer.head_rotation = Rotation(head) if scheme.rotates_keys else None


def _keeps_keys(layer: Any, sizes: Sizes | None) -> bool:
    if sizes:
        return hasattr(layer, "q_proj") and hasattr(layer, "k_proj")
    return updates(inspect.unwrap(type(layer).forward))


def _head_of(layer: Any) -> int:
    """The length of the heads of keys and values."""
    lengths = {getattr(layer, name) for name in _LENGTHS if isinstance(getattr(layer, name, None), int)}
    if len(lengths) != 1:
        raise UsageError(
            f"{type(layer).__name__} has heads of {shown(sorted(lengths))} elements, and a cache in codes takes keys "
            "and values of one length; leave cache out"
        )
    return int(*lengths)


def _with_codes(kind: Any) -> Any:
    """The class of attention with a cache in codes, with the functions that transformers' module has now."""
    function = inspect.unwrap(kind.forward)
    called = getattr(getattr(function, "__code__", None), "co_names", ())
    return _made(kind, function, tuple(id(getattr(function, "__globals__", {}).get(name)) for name in called))


@functools.cache
def _made(kind: Any, function: Any, _called: tuple[int, ...]) -> Any:
    known = getattr(function, "__code__", None) and {*function.__code__.co_names, *function.__code__.co_varnames}
    if not known or not known >= {_FUNCTIONS, "update", "cache"}:
        raise UsageError(
            f"{kind.__name__} of this transformers keeps no keys that hadagen can quantize; install transformers "
            f"{HOST.tested}, or leave cache out"
        )
    # The same code, with other attention functions. Without its name, torch.compile would look into the module.
    scope = {name: each for name, each in function.__globals__.items() if name != "__name__"}
    scope[_FUNCTIONS] = _Rotating(scope[_FUNCTIONS])
    forward = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    forward.__kwdefaults__ = function.__kwdefaults__
    names = [*inspect.signature(function).parameters][1:]  # of arguments behind self

    class WithCodes(kind):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            given = {**dict(zip(names, arguments, strict=False)), **options}
            cache = given.pop("cache", None)
            if cache is None:
                cache = given.pop("past_key_values", None)  # its former name
            if cache is None:
                return super().forward(*arguments, **options)
            return forward(self, cache=_InCodes(cache, self.cache_codes, self.head_rotation), **given)

        def __reduce_ex__(self, protocol: Any) -> Any:  # pickle finds no class that was made in a function
            return _empty, (kind,), self.__getstate__()

    WithCodes.__name__ = WithCodes.__qualname__ = kind.__name__
    return WithCodes


def _empty(kind: Any) -> Any:
    made = _with_codes(kind)
    return made.__new__(made)


class _Rotating:
    """The attention functions of transformers, with rotated queries."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = self.functions.get_interface(name, default)

        def attention(module: Any, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            rotation = module.head_rotation
            return function(module, query if rotation is None else rotation(query), *arguments, **options)

        return attention


class _InCodes:
    """A cache of transformers, as attention sees it: it takes and returns values, and holds bytes."""

    def __init__(self, cache: Any, codes: HeadCodes, rotation: Rotation | None) -> None:
        self.cache, self.codes, self.rotation = cache, codes, rotation

    def get_seq_length(self, *arguments: Any, **options: Any) -> Any:
        """The tokens that a layer holds."""
        return self.cache.get_seq_length(*arguments, **options)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, at: int, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, heads, tokens, head] of all tokens of the layer `at`, with those of new tokens."""
        _check(self.cache, at, self.codes, self.rotation is not None)
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise UsageError(
                "keys or values require a gradient, which codes do not have; pass use_cache=False, or call the model "
                "under torch.no_grad()"
            )
        packed = self.codes.pack(keys, self.rotation), self.codes.pack(values, None)
        all_keys, all_values = self.cache.update(*packed, at, *arguments, **options)
        if not torch.compiler.is_compiling():
            setattr(self.cache.layers[at], _FILLED, (self.codes.cache, self.rotation is not None))
        return self.codes.unpack(all_keys, keys.dtype), self.codes.unpack(all_values, values.dtype)


def _check(cache: Any, at: int, codes: HeadCodes, rotated: bool) -> None:
    """Raises `UsageError` for a cache whose layer `at` cannot hold the bytes, or has those of another scheme."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UsageError(
            f"{type(cache).__name__} cannot hold keys and values in codes of {codes.cache}; call generate, or quantize "
            "the model with cache=None"
        )
    layer = layers[at] if at < len(layers) else None  # some caches make layers as they need them
    if hasattr(layer, "_quantize"):
        raise UsageError(
            f"{type(layer).__name__} quantizes keys and values, which the model does by itself, to {codes.cache}; "
            "leave cache_implementation out, or pass a DynamicCache"
        )
    held = getattr(layer, "keys", None)
    if held is not None and (held.dtype != torch.uint8 or (held.numel() and held.shape[-1] != codes.row)):
        raise UsageError(
            f"the cache has keys of {plain(held.dtype)} [..., {held.shape[-1]}], and the model quantizes them to "
            f"{codes.cache}; pass a new cache, without early_initialization"
        )
    if torch.compiler.is_compiling():
        return
    filled = getattr(layer, _FILLED, None)
    if filled not in (None, (codes.cache, rotated)):
        kinds = [f"{'rotated ' * turned}codes of {name}" for name, turned in (filled, (codes.cache, rotated))]
        raise UsageError(f"the cache holds {kinds[0]}, and the model makes {kinds[1]}; pass a new cache")
