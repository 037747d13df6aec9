"""Operators of `torch.ops.hadagen` that are linear in x, as PyTorch's dispatcher knows them: for torch.compile,
autograd, vmap and modes.

    name(x, *options)           a new tensor, contiguous
    name_(x, *options)          x is overwritten
    name_out(x, *options, out)  out is overwritten; it stands before the options that have a default

The results have the type of x under autocast too. The last two return nothing: an operator that returned its argument
could not be made functional by torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_leaves

from hadagen.errors import TensorError
from hadagen.runtime.call.calls import Run, has_only_memory, has_tangent, needs_derivative
from hadagen.runtime.call.decompositions import is_decomposing
from hadagen.runtime.checks import check_like, check_tensor, is_functional, stands_for_a_tensor

LIBRARY: Any = torch.library.Library("hadagen", "DEF")  # type: ignore[no-untyped-call]

_ASKED = {"x": "inplace=True", "out": "out="}


def register(name: str, schema: str, real: Any, fake: Any, autograd: Any = None, *tags: torch.Tag) -> Any:
    """Define an operator. fake: the implementation for tensors without memory. autograd: None without derivatives."""
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    if autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"hadagen::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.hadagen, name).default


class LinearOperator:
    """The three operators of one name.

    options: the NamedTuple of their arguments after x.
    required, defaulted: the schema of its fields, in their order: those without and those with a default.
    compute: (x, options, in_place) → the result for a tensor with memory, x itself if `in_place`. No derivatives.
    compute_into: (x, out, options), the same into `out`.
    check: (x, options); raises for bad arguments, without reading memory.
    transpose: options → the options of the transposed map, which gradients take.
    decomposed: (x, options) → the result, by PyTorch's own operators.
    """

    functional: Callable[..., torch.Tensor]

    def __init__(
        self,
        name: str,
        options: Callable[..., Any],
        required: str,
        defaulted: str,
        *,
        compute: Callable[[torch.Tensor, Any, bool], torch.Tensor],
        compute_into: Callable[[torch.Tensor, torch.Tensor, Any], None],
        check: Callable[[torch.Tensor, Any], None],
        transpose: Callable[[Any], Any],
        decomposed: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> None:
        self._options, self._compute, self._compute_into = options, compute, compute_into
        self._check, self.transpose, self._decomposed = check, transpose, decomposed
        self._out_at = required.count(",") + 1  # the dispatcher leaves out last arguments that are the default
        self.functional, self.in_place, self.into = (
            register(name + suffix, signature, real, fake, autograd)
            for suffix, signature, real, fake, autograd in (
                ("", f"(Tensor x, {required}, {defaulted}) -> Tensor", self._new, self._new_fake, self._new_autograd),
                (
                    "_",
                    f"(Tensor(a!) x, {required}, {defaulted}) -> ()",
                    self._in_place,
                    self._in_place_fake,
                    self._in_place_autograd,
                ),
                (
                    "_out",
                    f"(Tensor x, {required}, Tensor(a!) out, {defaulted}) -> ()",
                    self._into,
                    self._into_fake,
                    self._into_autograd,
                ),
            )
        )
        torch.library.register_vmap(f"hadagen::{name}", self._new_vmap, lib=LIBRARY)
        torch.library.register_vmap(f"hadagen::{name}_", self._in_place_vmap, lib=LIBRARY)

    def apply(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        """The operator; it bypasses the dispatcher if the dispatcher has nothing to do."""
        if has_only_memory(x) and not needs_derivative(x):
            return self._compute(x, options, False)
        return self.functional(x, *options)

    def follow(self, x: torch.Tensor, run: Run) -> torch.Tensor:
        """The result of a call that comes again and bypasses the dispatcher, with its derivative. x has no tangent."""
        return _New.apply(x, self, run.options, run)  # type: ignore[attr-defined, no-any-return]

    def dispatch(self, x: torch.Tensor, options: Any, inplace: bool, out: torch.Tensor | None) -> Any:
        """The result in a new tensor, in x or in out. Arguments are checked already. It bypasses the dispatcher if the
        dispatcher has nothing to do."""
        target = x if inplace else out
        watched = torch.compiler.is_dynamo_compiling() or stands_for_a_tensor(x)
        tensors = (x,) if target is None else (x, target)
        if not watched and all(has_only_memory(each) and not needs_derivative(each) for each in tensors):
            if out is None or out is x:
                return self._compute(x, options, target is x)
            self._compute_into(x, out, options)
            return out
        if target is not None and not watched and any(each.is_neg() or is_functional(each) for each in tensors):
            # A view into a conjugate is negated as it is read, which PyTorch does only for operators with a result. The
            # same is so for tensors of torch.func.functionalize.
            if torch.is_grad_enabled() and target.requires_grad:
                check_autograd_follows(target, "x" if inplace else "out")
            return target.copy_(self.functional(x.resolve_neg(), *options))
        if inplace or out is x:
            self.in_place(x, *options)
            return x
        if out is not None:
            values = [*options]  # torch.compile of PyTorch 2.6 cannot slice a NamedTuple
            self.into(x, *values[: self._out_at], out, *values[self._out_at :])
            return out
        return self.functional(x, *options)

    def _without_out(self, arguments: tuple[Any, ...]) -> tuple[Any, torch.Tensor]:
        at = self._out_at
        return self._options(*arguments[:at], *arguments[at + 1 :]), arguments[at]

    # ---- on real tensors ---------------------------------------------------------------------------------------------
    def _new(self, x: torch.Tensor, *options: Any) -> torch.Tensor:
        return self._compute(x, self._options(*options), False)

    def _in_place(self, x: torch.Tensor, *options: Any) -> None:
        self._compute(x, self._options(*options), True)

    def _into(self, x: torch.Tensor, *arguments: Any) -> None:
        options, out = self._without_out(arguments)
        self._compute_into(x, out, options)

    # ---- on tensors without memory -----------------------------------------------------------------------------------
    def _new_fake(self, x: torch.Tensor, *options: Any) -> torch.Tensor:
        self._check(x, self._options(*options))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def _in_place_fake(self, x: torch.Tensor, *options: Any) -> None:
        self._check(x, self._options(*options))

    def _into_fake(self, x: torch.Tensor, *arguments: Any) -> None:
        options, out = self._without_out(arguments)
        self._check(x, options)
        check_like(x, out)

    # ---- derivatives -------------------------------------------------------------------------------------------------
    def below_autograd(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        if has_only_memory(x):
            return self._compute(x, options, False)
        with _next_level():
            return self.functional(x, *options)

    def _new_autograd(self, x: torch.Tensor, *options: Any) -> Any:
        if is_decomposing():
            self._check(x, self._options(*options))
            return self._decomposed(x, self._options(*options))
        if needs_derivative(x):
            return _apply_at_one_level(_New, x, self, self._options(*options), None)
        return self.below_autograd(x, self._options(*options))

    def _in_place_autograd(self, x: torch.Tensor, *options: Any) -> None:
        if is_decomposing():
            x.copy_(self._new_autograd(x, *options))
            return
        if not needs_derivative(x):
            with _next_level():
                self.in_place(x, *options)
            return
        if x.requires_grad and torch.is_grad_enabled():
            check_autograd_follows(x, "x")
        if not (has_only_memory(x) or torch._C._are_functorch_transforms_active()):
            # torch.compile assumes that autograd need not know of an operator that writes to its input.
            x.copy_(self.functional(x, *options))
            return
        _apply_at_one_level(_InPlace, x, self, self._options(*options), None)

    def _into_autograd(self, x: torch.Tensor, *arguments: Any) -> None:
        out = arguments[self._out_at]
        if is_decomposing():
            out.copy_(self._new_autograd(x, *self._without_out(arguments)[0]))
            return
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            raise TensorError("x or out requires grad, and out= has no derivative; leave it out or use no_grad")
        if has_tangent(x) or has_tangent(out):
            raise TensorError("x or out has a tangent, and out= has no derivative; leave it out")
        with torch._C._AutoDispatchBelowAutograd():
            self.into(x, *arguments)

    # ---- vmap --------------------------------------------------------------------------------------------------------
    # One more leading dimension changes nothing. So only a batch that is the last dimension has to move.
    def _new_vmap(self, info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *options: Any) -> tuple[Any, int]:
        x, batch = _with_last_in_place(x, in_dims)
        return self.functional(x, *options), batch

    def _in_place_vmap(self, info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *options: Any) -> tuple[None, None]:
        self.in_place(_with_last_in_place(x, in_dims)[0], *options)
        return None, None


# The dispatcher calls these when it has reached autograd, at one level of torch.func's transforms.
# `torch.autograd.Function` would begin with those levels again; its base class handles one level.
class _OneLevelFunction(_SingleLevelFunction):
    _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key  # compiled autograd needs it


class _New(_OneLevelFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: LinearOperator, options: Any, run: Run | None = None) -> torch.Tensor:
        ctx.of, ctx.options = of, options
        return of.below_autograd(x, options) if run is None else run.new(x.data_ptr())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.of.apply(gradient, ctx.of.transpose(ctx.options)), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> Any:
        return ctx.of.apply(tangent, ctx.options)


class _InPlace(_OneLevelFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: LinearOperator, options: Any, _: None) -> torch.Tensor:
        ctx.of, ctx.options = of, options
        ctx.mark_dirty(x)
        with _next_level():
            of.in_place(x, *options)
        return x

    backward = _New.backward

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        result = ctx.of.apply(tangent, ctx.options)
        with forward_ad._set_fwd_grad_enabled(True):  # the tangent may have a tangent of an outer level
            return tangent.copy_(result)


@contextmanager
def _next_level() -> Iterator[None]:
    """The context in which the dispatcher continues after autograd. Under transforms of torch.func, these are the outer
    transforms. They need derivatives too, which PyTorch turns off while its own function runs."""
    with ExitStack() as stack:
        if torch._C._are_functorch_transforms_active():
            stack.enter_context(torch.enable_grad())
            stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield


def _apply_at_one_level(function: Any, *arguments: Any) -> Any:
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def check_autograd_follows(x: torch.Tensor, name: str) -> None:
    """Raises `TensorError` if PyTorch would refuse to record a write to x, because it refuses only after the write."""
    origin = x if x._base is None else x._base
    if origin is not x and torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT:
        raise TensorError(
            f"{name} is a view that autograd cannot follow, made by chunk, split or unbind or under no_grad; "
            f"leave out {_ASKED[name]}, or clone {name} first"
        )
    if origin.is_leaf:
        raise TensorError(
            f"{name} is a leaf, or a view of one, that requires grad; leave out {_ASKED[name]} or use no_grad"
        )


def _with_last_in_place(x: torch.Tensor, in_dims: tuple[Any, ...]) -> tuple[torch.Tensor, int]:
    """A view of x whose last dimension is that of a single tensor, and the position of its batch dimension."""
    batch, *others = in_dims
    if any(dim is not None for dim in tree_leaves(others)):
        raise TensorError("a sign vector or a matrix has a batch dimension of vmap; only x may have one")
    assert batch is not None  # a rule is called for batches only
    if x.dim() == 1:
        check_tensor(x[0])
    return (x.movedim(batch, 0), 0) if batch == x.dim() - 1 else (x, batch)
