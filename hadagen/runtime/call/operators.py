"""How PyTorch's dispatcher knows operators of `torch.ops.hadagen`: for torch.compile, autograd, vmap and modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from hadagen.runtime.call.runs import has_only_memory, is_dynamo_compiling, needs_derivative

LIBRARY: Any = torch.library.Library("hadagen", "DEF")  # type: ignore[no-untyped-call]


def register(
    name: str, schema: str, real: Any, fake: Any, autograd: Any = None, vmap: Any = None, *tags: torch.Tag
) -> Any:
    """Define an operator. fake: the implementation for tensors without memory. autograd, vmap: None for no rule."""
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    if autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"hadagen::{name}", fake, lib=LIBRARY)
    if vmap is not None:
        torch.library.register_vmap(f"hadagen::{name}", vmap, lib=LIBRARY)
    return getattr(torch.ops.hadagen, name).default


class Operator:
    """An operator of `torch.ops.hadagen` whose calls need not go through PyTorch's dispatcher.

    default: the operator as graphs have it. The other attributes are the arguments of `register`.
    """

    def __init__(
        self, name: str, schema: str, real: Any, fake: Any, autograd: Any, vmap: Any, *tags: torch.Tag
    ) -> None:
        self.default = register(name, schema, real, fake, autograd, vmap, *tags)
        self._real = real

    def __call__(self, *arguments: Any) -> Any:
        """The result. It bypasses the dispatcher if the dispatcher has nothing to do: for tensors with memory, without
        a derivative, which nothing watches. Else a list behind another is not empty: AOTInductor passes no such list.
        """
        if not is_dynamo_compiling() and _is_all_plain(arguments):
            return self._real(*arguments)
        return self.default(
            *[[arguments[0][0].new_empty(1)] if isinstance(each, list) and not each else each for each in arguments]
        )


def _is_all_plain(arguments: Sequence[Any]) -> bool:
    """Whether the dispatcher has nothing to do."""
    values = [each for some in arguments for each in (some if isinstance(some, list) else (some,))]
    return all(_is_constant(each) or (has_only_memory(each) and not needs_derivative(each)) for each in values)


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


# The dispatcher calls these when it has reached autograd, at one level of torch.func's transforms.
# `torch.autograd.Function` would begin with those levels again; its base class handles one level.
class one_level(_SingleLevelFunction):
    _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key  # compiled autograd needs it


@contextmanager
def next_level() -> Iterator[None]:
    """The context in which the dispatcher continues after autograd. Under transforms of torch.func, these are the outer
    transforms. They need derivatives too, which PyTorch turns off while its own function runs."""
    with ExitStack() as stack:
        if torch._C._are_functorch_transforms_active():
            stack.enter_context(torch.enable_grad())
            stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield


def apply_at_one_level(function: Any, *arguments: Any) -> Any:
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return function.apply(*arguments)
