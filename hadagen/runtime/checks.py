"""Checks the arguments of a call. Each error is one sentence. No check reads memory, so that tensors without memory
(fake ones, those of torch.compile) are checked too."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.overrides import has_torch_function_unary

from hadagen.errors import TensorError, UsageError, choice, shown
from hadagen.problem.problem import Numerics
from hadagen.problem.prologues import Prologue
from hadagen.runtime.arguments import is_flag, is_one_of
from hadagen.runtime.overlap import overlaps_itself

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTIZED = (torch.float16, torch.bfloat16, torch.float32)  # which `rotate_quantize` takes
REAL = (float, int, Real)  # the first two are faster to check
is_functional: Any = torch._is_functional_tensor  # of torch.func.functionalize
_ASKED = {"x": "inplace=True", "out": "out="}
_NUMERICS = tuple(member.value for member in Numerics)


def check_is_number(scale: Any, name: str = "scale") -> None:
    """Raises TypeError."""
    # A tensor is no number; a user would expect a gradient for it.
    if not (isinstance(scale, REAL) or is_symbolic(scale)):
        raise TypeError(f"{name} is a {type(scale).__name__}; pass a real number")


def is_symbolic(scale: Any) -> bool:
    """Whether the scale stands for a number in a trace that leaves the number open."""
    return isinstance(scale, (torch.SymFloat, torch.SymInt))


def check_call(x: torch.Tensor, scale: float, numerics: str) -> None:
    """Raises what `check_options` and `check_tensor` raise."""
    check_options(scale, numerics, x.dtype)
    check_tensor(x)


def check_options(scale: float, numerics: str, dtype: torch.dtype) -> None:
    """Raises TypeError if the scale is no real number, and `UsageError` for a bad scale or numerics.

    dtype: the type of the tensor to transform.
    """
    check_is_number(scale)
    if not is_symbolic(scale):
        wide = torch.float64 if dtype == torch.float64 else torch.float32  # the type to compute in
        number, largest = as_float(scale), torch.finfo(wide).max
        if not abs(number) <= largest:
            raise UsageError(f"scale = {number} is not finite in {plain(wide)}; pass a number up to {largest:.3g}")
    check_numerics(numerics)


def check_numerics(numerics: Any) -> None:
    """Raises `UsageError`."""
    if not is_one_of(numerics, _NUMERICS):
        raise UsageError(f"numerics {shown(numerics)} is not supported; {choice(numerics, _NUMERICS)}")


def check_dtype(dtype: Any) -> None:
    """Raises `UsageError` unless the dtype is one of the types that are computed in."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        said = plain(dtype) if isinstance(dtype, torch.dtype) else dtype
        raise UsageError(f"dtype {shown(said)} is not possible; pass one of {', '.join(map(str, DTYPES))}")


def as_float(number: float) -> float:
    """The number as a float, infinite for an integer beyond every float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def stands_for_a_tensor(x: Any) -> bool:
    """Whether x is no tensor but takes calls in place of one, such as while torch.fx traces."""
    return not isinstance(x, torch.Tensor) and has_torch_function_unary(x)


def check_is_tensor(x: Any, name: str) -> None:
    """Raises TypeError for anything else, and `TensorError` for one without a shape or without its memory. So it comes
    before all that reads more of x."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; pass a torch.Tensor")
    if torch.compiler.is_dynamo_compiling():
        return
    try:
        if type(x) is torch.Tensor and x.data_ptr():
            return  # at once, as nearly always
    except RuntimeError:  # it has no memory, or wraps another tensor
        pass
    if is_lazy(x):
        raise TensorError(f"{name} is an uninitialized parameter; give it a shape and values first")
    if _is_freed(x):
        raise TensorError(f"the memory of {name} was freed; bring its values back first, or pass another tensor")


def _is_freed(x: torch.Tensor) -> bool:
    """Whether x has elements but no memory, as parameters that are sharded or offloaded at the moment. PyTorch's own
    functions read address 0 then."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and not is_functional(x)
        and not torch._C._are_functorch_transforms_active()
        and not x.is_nested
        and x.layout is torch.strided
        and x.device.type in ("cpu", "cuda")
        and not x._is_zerotensor()
        and x.data_ptr() == 0
        and x.numel() > 0
    )


def has_values(x: torch.Tensor) -> bool:
    """True if x is not a meta or fake tensor."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def check_alike(x: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Raises `TensorError` where one is a FakeTensor and the other has values, which PyTorch does not mix."""
    if torch.compiler.is_dynamo_compiling():
        return
    fakes = [each for each in (x, other) if isinstance(each, FakeTensor)]
    if len(fakes) == 1 and not fakes[0].fake_mode.allow_non_fake_inputs:
        what, mine = ("has values", "is a FakeTensor") if fakes[0] is x else ("is a FakeTensor", "has values")
        raise TensorError(f"{name} {what} but x {mine}; pass both with values, or both fake")


def check_same_device(name: str, one: torch.device, of: str, other: torch.device, move: str) -> None:
    """Raises `TensorError` if one tensor is on another device than a second, `of`, with the advice to `move`; for the
    meta device with another, as its tensors have no values to move."""
    if "meta" in (one.type, other.type):
        move = "a tensor on meta has no values; put both there, or give it values with .to_empty and load_state_dict"
    if one != other:
        raise TensorError(f"{name} is on {one} but {of} on {other}; {move}")


def shape_of(x: torch.Tensor) -> str:
    """The shape of x for a message; nested tensors have none."""
    return "of several shapes" if x.is_nested else str(tuple(x.shape))


def kind_of(x: torch.Tensor) -> str:
    """Layout and type of a tensor, for a message, such as "strided int8"."""
    return "nested" if x.is_nested else f"{plain(x.layout)} {plain(x.dtype)}"


def check_tensor(x: torch.Tensor) -> None:
    """Raises `TensorError` for an input that cannot be transformed."""
    if x.dtype not in DTYPES:
        raise TensorError(f"x has the type {plain(x.dtype)}; convert it to {', '.join(map(plain, DTYPES))}")
    if x.is_nested:
        raise TensorError("x is a nested tensor; pass x.to_padded_tensor(0.0), or each of its parts")
    if x.layout is not torch.strided:
        raise TensorError(f"x has the layout {plain(x.layout)}; convert it with x.to_dense()")
    if x.dim() == 0:
        raise TensorError("x has no dimension to transform; pass a tensor of shape [..., n]")
    if x.shape[-1] < 1:
        raise TensorError("the last dimension of x is 0; it must be at least 1")


def check_is_flag(value: Any, name: str) -> None:
    """Raises TypeError."""
    if not is_flag(value):
        raise TypeError(f"{name} is {shown(value)}; pass True or False")


def check_rows(x: Any, takes: int | None, before: Prologue | None, inplace: bool, out: Any) -> None:
    """Raises TypeError, `UsageError` and `TensorError` for an x that cannot be rotated, after a prologue, into this
    destination. takes: the elements of a rotated row; None for any."""
    check_is_tensor(x, "x")
    check_destination(x, inplace, out)
    if not torch.compiler.is_dynamo_compiling():  # where the operator's own checks do more for the message
        check_tensor(x)
    width = 1 if before is None else before.width
    if takes is not None and x.dim():
        check_length(x.shape[-1], takes, width)
    if out is not None and out is not x and not torch.compiler.is_dynamo_compiling():
        if before is None:
            check_like(x, out)
        else:
            check_rows_like(x, out, width)
    if inplace and width > 1:
        raise UsageError(
            f"inplace=True is not possible with before = {shown(before)}, because x has {width} elements for each "
            "element of the result; leave it out, or pass out="
        )


def check_length(columns: float, takes: int, width: int) -> None:
    """Raises `TensorError` unless rows of x, width elements of which become one, are as a rotation takes them."""
    if columns != width * takes:
        said = f"{width} · {takes} with before= of two parts" if width > 1 else f"{takes}"
        raise TensorError(f"the last dimension of x is {int(columns)}; this rotation takes {said}")


def check_destination(x: torch.Tensor, inplace: bool, out: torch.Tensor | None) -> None:
    """Raises TypeError and `UsageError` for arguments that do not say where the result goes."""
    check_is_flag(inplace, "inplace")
    if out is not None:
        check_is_tensor(out, "out")
        if inplace and out is not x:
            raise UsageError("inplace=True and out= name two places for the result; give one of them")


def check_rows_like(x: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """Raises `TensorError` if out cannot take the rows that a prologue of this width makes of x, and that are rotated
    then."""
    check_alike(x, out, "out")
    shape = (*x.shape[:-1], x.shape[-1] // width)
    is_like = not out.is_nested and out.layout is torch.strided and out.shape == shape and out.dtype == x.dtype
    if not is_like or out.device != x.device:
        raise TensorError(
            f"out is {plain(out.dtype)} {shape_of(out)} on {out.device}; with before= the result is strided "
            f"{plain(x.dtype)} {tuple(shape)} on {x.device}"
        )


def check_like(x: torch.Tensor, out: torch.Tensor) -> None:
    """Raises `TensorError` if out cannot take the result for x."""
    if out.is_nested:
        raise TensorError("out is a nested tensor; pass an out like x")
    check_alike(x, out, "out")
    for what in ("shape", "dtype", "device", "layout"):
        mine, theirs = getattr(out, what), getattr(x, what)
        if mine != theirs:
            raise TensorError(f"out has the {what} {plain(mine)} but x has {plain(theirs)}; pass an out like x")


def check_writable(y: torch.Tensor) -> None:
    """Raises `TensorError` if elements of y share memory (see `overlaps_itself`), or if PyTorch forbids writing y."""
    if y.is_inference() and not torch.is_inference_mode_enabled():
        raise TensorError(
            "the tensor to write was made in inference mode; write it in that mode too, or clone it first"
        )
    if not y.is_contiguous() and overlaps_itself(y.shape, y.stride()):
        raise TensorError(
            "several elements of the tensor to write share memory (expand and unfold do that); clone it first"
        )


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


def check_copied_to(y: torch.Tensor, name: str) -> None:
    """Raises `TensorError` where PyTorch would refuse to copy values to y, or to record that."""
    if torch.compiler.is_dynamo_compiling():
        return
    if torch.is_grad_enabled() and y.requires_grad:
        check_autograd_follows(y, name)
    if type(y) is torch.Tensor:
        check_writable(y)


def plain(value: Any) -> str:
    """A type, layout or shape for a message, without the name of PyTorch."""
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
