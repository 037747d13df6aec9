"""`hadamard_transform`: checks the arguments, makes the tensors fit for a kernel, and launches it."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from hadagen.errors import TensorError, UsageError
from hadagen.problem import Numerics
from hadagen.runtime import fallback, kernels

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NUMERICS = tuple(member.value for member in Numerics)
_LARGEST_SCALE = torch.finfo(torch.float32).max  # kernels take the scale in float32
_ALIGNMENT = 16  # bytes; kernels read and write vectors of this size


def hadamard_transform(
    x: torch.Tensor,
    scale: float = 1.0,
    *,
    inplace: bool = False,
    out: torch.Tensor | None = None,
    numerics: str = "accurate",
) -> torch.Tensor:
    """(x · H_n) · scale over the last dimension, where H_n is the Hadamard matrix of ±1 in Sylvester's order.

    x: [..., n] with n a power of two, of type float16, bfloat16, float32 or float64, with any strides, on any device.
        On a GPU for which there are kernels, float16 and bfloat16 with n from 2 to 32768 run one of them; everything
        else runs in plain PyTorch.
    scale: n ** -0.5 makes the transform orthonormal and its own inverse.
    inplace: overwrite x and return it.
    out: write here and return it: a tensor of x's shape, dtype and device, either x itself or not overlapping it.
    numerics: "accurate" rounds once, when the result is stored; "fast" may also round in between.

    Returns a tensor of x's shape, dtype and device; contiguous, unless it is x or out. Differentiable in x.
    Runs on the current stream of x's device. There may be no rows at all.

    Raises TypeError where x, out or scale is of a wrong type; `UsageError`, a ValueError, for a bad n, scale or
    numerics; `TensorError`, a RuntimeError too, for a tensor that cannot be transformed or written to;
    `DeviceError` where the GPU refuses the launch. Nothing is written before the arguments are known to be good.
    """
    _check_input(x, scale, numerics)
    if out is not None:
        _check_out(x, out)
        if inplace and out is not x:
            raise UsageError("inplace=True and out= name two places for the result; give one of them")
    scale = float(scale)
    destination = x if inplace else out
    if torch.compiler.is_compiling():
        result = torch.ops.hadagen.hadamard_transform(x, scale, numerics)
        return result if destination is None else destination.copy_(result)
    if destination is not None:
        _check_memory(x, destination)
    if torch.is_grad_enabled() and (x.requires_grad or (out is not None and out.requires_grad)):
        return _differentiable(x, destination, scale, numerics)
    return _transform(x, destination, scale, numerics)


def _transform(x: torch.Tensor, y: torch.Tensor | None, scale: float, numerics: str) -> torch.Tensor:
    """The transform of good arguments into y, which may be x, or into a new tensor where y is None."""
    source = x if _fits(x) else x.clone(memory_format=torch.contiguous_format)
    if y is not None and _fits(y):
        target = y
    elif source is x:
        target = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        target = source  # a copy made for the kernel is free to be overwritten
    if y is not None:
        torch.autograd.graph.increment_version(y)  # a kernel writes behind PyTorch's back
    _run(source, target, scale, numerics)
    if y is None or y is target:
        return target
    return y.copy_(target)


def _fits(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0


def _run(x: torch.Tensor, y: torch.Tensor, scale: float, numerics: str) -> None:
    elements = x.numel()
    if elements == 0:
        return
    if x.is_cuda:
        source, target = x.data_ptr(), y.data_ptr()
        kernel = kernels.find(x.get_device(), x.shape[-1], x.dtype, numerics, source == target, elements)
        if kernel is not None:
            kernels.launch(kernel, source, target, elements, scale)
            return
    fallback.transform(x, y, scale)


# ---- checks ----------------------------------------------------------------------------------------------------------
def _check_input(x: torch.Tensor, scale: float, numerics: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; pass a torch.Tensor")
    if x.dtype not in _DTYPES:
        raise TensorError(f"x has the type {_plain(x.dtype)}; convert it to {_names(_DTYPES)}")
    if x.layout is not torch.strided:
        raise TensorError(f"x has the layout {_plain(x.layout)}; convert it with x.to_dense()")
    if x.dim() == 0:
        raise TensorError("x has no dimension to transform; pass a tensor of shape [..., n]")
    n = x.shape[-1]
    if n < 1:
        raise UsageError(f"the last dimension of x is {n}; it must have an element at least")
    if not isinstance(scale, (float, int, Real)):  # a tensor is none, and would expect a gradient
        raise TypeError(f"scale is a {type(scale).__name__}; pass a real number")
    if not abs(scale) <= _LARGEST_SCALE:
        raise UsageError(f"scale = {scale} is not finite in float32; pass a number up to {_LARGEST_SCALE:.3g}")
    if numerics not in _NUMERICS:
        raise UsageError(f"numerics {numerics!r} is not supported; choose one of {_names(_NUMERICS)}")


def _check_out(x: torch.Tensor, out: torch.Tensor) -> None:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; pass a torch.Tensor")
    for what in ("shape", "dtype", "device", "layout"):
        mine, theirs = getattr(out, what), getattr(x, what)
        if mine != theirs:
            raise TensorError(f"out has the {what} {_plain(mine)} but x has {_plain(theirs)}; pass an out like x")


def _check_memory(x: torch.Tensor, y: torch.Tensor) -> None:
    """Refuses to write y where autograd forbids it, or its elements share memory with each other or others of x."""
    if y.is_inference() and not torch.is_inference_mode_enabled():
        raise TensorError(
            "the tensor to write was made in inference mode; write it in that mode too, or clone it first"
        )
    if y.is_contiguous():
        # Other overlaps are harmless, because one of the two is then copied before anything is written.
        if y is not x and x.is_contiguous() and 0 < abs(x.data_ptr() - y.data_ptr()) < x.nbytes:
            raise TensorError("out overlaps x without being x; pass x itself or memory of its own")
    elif torch._debug_has_internal_overlap(y) == 1:
        raise TensorError("several elements of the tensor to write share memory (expand does that); clone it first")


def _names(values: tuple[Any, ...]) -> str:
    return ", ".join(_plain(value) for value in values)


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


# ---- derivatives and torch.compile -----------------------------------------------------------------------------------
class _Transform(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inplace: bool, scale: float, numerics: str) -> torch.Tensor:
        ctx.scale, ctx.numerics = scale, numerics
        if inplace:
            ctx.mark_dirty(x)
        return _transform(x, x if inplace else None, scale, numerics)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # H is symmetric.
        return hadamard_transform(gradient, ctx.scale, numerics=ctx.numerics), None, None, None


def _differentiable(x: torch.Tensor, y: torch.Tensor | None, scale: float, numerics: str) -> torch.Tensor:
    if y is not None and y is not x:
        raise TensorError("x or out requires grad, and out= has no derivative; leave it out or use no_grad")
    if y is x and (x._base if x._base is not None else x).is_leaf:
        raise TensorError("x is a leaf, or a view of one, that requires grad; leave out inplace=True or use no_grad")
    result: torch.Tensor = _Transform.apply(x, y is x, scale, numerics)  # type: ignore[no-untyped-call]
    return result


@torch.library.custom_op("hadagen::hadamard_transform", mutates_args=())
def _operator(x: torch.Tensor, scale: float, numerics: str) -> torch.Tensor:
    """What torch.compile sees: one opaque step."""
    return _transform(x, None, scale, numerics)


@_operator.register_fake
def _(x: torch.Tensor, scale: float, numerics: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[torch.Tensor, float, str], output: torch.Tensor) -> None:
    _, ctx.scale, ctx.numerics = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.hadagen.hadamard_transform(gradient, ctx.scale, ctx.numerics), None, None


_operator.register_autograd(_backward, setup_context=_save)
