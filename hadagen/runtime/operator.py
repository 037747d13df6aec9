"""`torch.ops.hadagen`: the transform as PyTorch's dispatcher knows it, for torch.compile, autograd, vmap and modes.

    hadamard_transform(x, scale, numerics, batch_invariant=False)           a new tensor, contiguous
    hadamard_transform_(x, scale, numerics, batch_invariant=False)          x is overwritten
    hadamard_transform_out(x, scale, numerics, out, batch_invariant=False)  out is overwritten

The results have the type of x under autocast too. The last two return nothing: an operator that returned its argument
could not be made functional by torch.compile. The scale is a Scalar: for each float torch.compile would compile anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import has_torch_function_unary

from hadagen.errors import TensorError
from hadagen.runtime.checks import check_call, check_like, check_tensor
from hadagen.runtime.compute import Call, Options, compute, compute_into

_LIBRARY: Any = torch.library.Library("hadagen", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    "hadamard_transform(Tensor x, Scalar scale, str numerics, bool batch_invariant=False) -> Tensor",
    "hadamard_transform_(Tensor(a!) x, Scalar scale, str numerics, bool batch_invariant=False) -> ()",
    "hadamard_transform_out(Tensor x, Scalar scale, str numerics, Tensor(a!) out, bool batch_invariant=False) -> ()",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

_unpack_dual: Any = torch._C._VariableFunctions._unpack_dual  # looked up once, because that takes longer than the call

functional: Any = torch.ops.hadagen.hadamard_transform.default
in_place: Any = torch.ops.hadagen.hadamard_transform_.default
into: Any = torch.ops.hadagen.hadamard_transform_out.default


# ---- on real tensors -------------------------------------------------------------------------------------------------
# Each takes the fields of `Options` behind x; the dispatcher leaves out a last one that is the default.
def _functional(x: torch.Tensor, *options: Any) -> torch.Tensor:
    return compute(x, Options(*options), False)


def _in_place(x: torch.Tensor, *options: Any) -> None:
    compute(x, Options(*options), True)


def _into(x: torch.Tensor, scale: float, numerics: str, out: torch.Tensor, batch_invariant: bool = False) -> None:
    compute_into(x, out, Options(scale, numerics, batch_invariant))


# ---- on tensors without memory ---------------------------------------------------------------------------------------
def _functional_fake(x: torch.Tensor, scale: float, numerics: str, batch_invariant: bool = False) -> torch.Tensor:
    check_call(x, scale, numerics)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _in_place_fake(x: torch.Tensor, scale: float, numerics: str, batch_invariant: bool = False) -> None:
    check_call(x, scale, numerics)


def _into_fake(x: torch.Tensor, scale: float, numerics: str, out: torch.Tensor, batch_invariant: bool = False) -> None:
    check_call(x, scale, numerics)
    check_like(x, out)


# ---- derivatives -----------------------------------------------------------------------------------------------------
# The matrix is symmetric. If rows are padded and the result is cut, its first rows and columns are left, which are
# symmetric too. So gradients and tangents are transformed exactly like x.
#
# The dispatcher calls these when it has reached autograd, at one level of torch.func's transforms.
# `torch.autograd.Function` would begin with those levels again; its base class handles one level.
class _Function(_SingleLevelFunction):
    _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key  # compiled autograd needs it


class _Functional(_Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, options: Options) -> torch.Tensor:
        ctx.options = options
        return _below_autograd(x, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return transform(gradient, ctx.options), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return transform(tangent, ctx.options)


class Remembered(_Function):
    """`_Functional` for a repeated call that bypasses the dispatcher: x is a plain tensor without a tangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call, address: int) -> torch.Tensor:
        ctx.call = call
        return call.run(x, address)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return transform(gradient, ctx.call.options), None, None


class _InPlace(_Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, options: Options) -> torch.Tensor:
        ctx.options = options
        ctx.mark_dirty(x)
        with _next_level():
            in_place(x, *options)
        return x

    backward = _Functional.backward

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        result = transform(tangent, ctx.options)
        with forward_ad._set_fwd_grad_enabled(True):  # the tangent may have a tangent of an outer level
            return tangent.copy_(result)


def _below_autograd(x: torch.Tensor, options: Options) -> torch.Tensor:
    if has_only_memory(x):
        return compute(x, options, False)
    with _next_level():
        result: torch.Tensor = functional(x, *options)
        return result


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


def transform(x: torch.Tensor, options: Options) -> torch.Tensor:
    """The operator; it bypasses the dispatcher if the dispatcher has nothing to do."""
    if has_only_memory(x) and not needs_derivative(x):
        return compute(x, options, False)
    result: torch.Tensor = functional(x, *options)
    return result


def has_only_memory(x: torch.Tensor) -> bool:
    """Whether x is a plain tensor with memory, and no mode, transform or trace watches the dispatcher."""
    if (
        torch.compiler.is_dynamo_compiling()
        or type(x) is not torch.Tensor
        or has_torch_function_unary(x)
        or x.is_neg()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
    ):
        return False
    try:
        return x.data_ptr() != 0
    except RuntimeError:
        return False


def needs_derivative(x: torch.Tensor) -> bool:
    return (x.requires_grad and torch.is_grad_enabled()) or _has_tangent(x)


def _has_tangent(x: torch.Tensor) -> bool:
    """Whether x has a tangent, as `forward_ad.unpack_dual` says. This works in compiled code too, where Python's count
    of levels does not change."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    if type(x) is torch.Tensor and not torch._C._len_torch_dispatch_stack():
        return _unpack_dual(x, level=0)[1] is not None
    with torch._C._DisableTorchDispatch():  # otherwise a trace would record this, and a subclass would see it
        return _unpack_dual(x, level=0)[1] is not None


def _apply_at_one_level(function: Any, *arguments: Any) -> Any:
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def _functional_autograd(x: torch.Tensor, *options: Any) -> torch.Tensor:
    if needs_derivative(x):
        return cast(torch.Tensor, _apply_at_one_level(_Functional, x, Options(*options)))
    return _below_autograd(x, Options(*options))


def _in_place_autograd(x: torch.Tensor, *options: Any) -> None:
    if not needs_derivative(x):
        with _next_level():
            in_place(x, *options)
        return
    if x.requires_grad and torch.is_grad_enabled():
        _check_autograd_follows(x)
    if not (has_only_memory(x) or torch._C._are_functorch_transforms_active()):
        # torch.compile assumes that autograd need not know of an operator that writes to its input.
        x.copy_(functional(x, *options))
        return
    _apply_at_one_level(_InPlace, x, Options(*options))


def _check_autograd_follows(x: torch.Tensor) -> None:
    """Raises `TensorError` if PyTorch would refuse to record a write to x, because it refuses only after the write."""
    origin = x if x._base is None else x._base
    if origin is not x and torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT:
        raise TensorError(
            "x is a view that autograd cannot follow, made by chunk, split or unbind or under no_grad; "
            "leave out inplace=True, or clone x first"
        )
    if origin.is_leaf:
        raise TensorError("x is a leaf, or a view of one, that requires grad; leave out inplace=True or use no_grad")


def _into_autograd(
    x: torch.Tensor, scale: float, numerics: str, out: torch.Tensor, batch_invariant: bool = False
) -> None:
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise TensorError("x or out requires grad, and out= has no derivative; leave it out or use no_grad")
    if _has_tangent(x) or _has_tangent(out):
        raise TensorError("x or out has a tangent, and out= has no derivative; leave it out")
    with torch._C._AutoDispatchBelowAutograd():
        into(x, scale, numerics, out, batch_invariant)


# ---- vmap ------------------------------------------------------------------------------------------------------------
# One more leading dimension changes nothing. So only a batch that is the last dimension has to move.
def _functional_vmap(
    info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, int]:
    x, batch = _with_last_in_place(x, in_dims[0])
    return functional(x, *options), batch


def _in_place_vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, *options: Any) -> tuple[None, None]:
    in_place(_with_last_in_place(x, in_dims[0])[0], *options)
    return None, None


def _with_last_in_place(x: torch.Tensor, batch: int | None) -> tuple[torch.Tensor, int]:
    """A view of x whose last dimension is that of a single tensor, and the position of its batch dimension."""
    assert batch is not None  # a rule is called for batches only
    if x.dim() == 1:
        check_tensor(x[0])
    return (x.movedim(batch, 0), 0) if batch == x.dim() - 1 else (x, batch)


for _name, _real, _fake, _autograd in (
    ("hadamard_transform", _functional, _functional_fake, _functional_autograd),
    ("hadamard_transform_", _in_place, _in_place_fake, _in_place_autograd),
    ("hadamard_transform_out", _into, _into_fake, _into_autograd),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _fake, "Meta")
    _LIBRARY.impl(_name, _autograd, "Autograd")
torch.library.register_vmap("hadagen::hadamard_transform", _functional_vmap, lib=_LIBRARY)
torch.library.register_vmap("hadagen::hadamard_transform_", _in_place_vmap, lib=_LIBRARY)
