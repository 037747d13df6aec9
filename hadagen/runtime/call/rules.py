"""The operators of `torch.ops.hadagen` that calls are, as PyTorch's dispatcher knows them: for torch.compile, autograd,
vmap and modes.

    linear(x, matrices, signs, signs_after, scale, spec)    the rotated rows, contiguous; with all derivatives
    call(tensors, scale, spec)                              the results of any call
    call_into(written, read, scale, spec)                   the same into tensors of a caller, or x is overwritten

`spec` is the text of a `Spec`; tensors are those that it has, in the order of the fields of `Call`. A tensor is in one
list only, and no list is empty, as AOTInductor passes no empty list: `read` has any tensor where nothing is read.
Results have the type of x under autocast too. `call_into` returns nothing: an operator that returned its argument could
not be made functional by torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from hadagen.errors import TensorError
from hadagen.problem.formats import TENSOR
from hadagen.problem.prologues import Prologue
from hadagen.runtime.call import decompositions, runs, slow
from hadagen.runtime.call.compute import applied, compute, compute_into, rotation_of
from hadagen.runtime.call.find import asked_of
from hadagen.runtime.call.operators import (
    Operator,
    apply_at_one_level,
    next_level,
    one_level,
)
from hadagen.runtime.call.outputs import (
    EXACT_STRIDES,
    check_written,
    empty_results,
    no_scales,
    order_of,
)
from hadagen.runtime.call.runs import Run, has_only_memory, has_tangent, is_dynamo_compiling, needs_derivative
from hadagen.runtime.checks import (
    check_autograd_follows,
    check_copied_to,
    check_like,
    check_tensor,
    is_functional,
    stands_for_a_tensor,
)
from hadagen.runtime.operands.call import Call, check
from hadagen.runtime.operands.packed import present
from hadagen.runtime.operands.spec import Spec, transposed


class Linear(NamedTuple):
    """The arguments of `linear` after x."""

    matrices: torch.Tensor | None
    signs: torch.Tensor | None
    signs_after: torch.Tensor | None
    scale: float
    text: str

    def call(self, x: torch.Tensor) -> Call:
        """Raises `TensorError` for operands that the spec does not have, or a spec that is not of this operator."""
        spec, operands = Spec.parse(self.text), (self.matrices, self.signs, self.signs_after)
        if not spec.is_linear or spec.inplace or spec.roles[:3] != tuple(each is not None for each in operands):
            raise TensorError(
                f"spec {self.text!r} does not fit: linear takes a rotation that is not in place, with its operands; "
                "call a function of hadagen"
            )
        return Call(spec, self.scale, x, *operands)


# ---- linear ----------------------------------------------------------------------------------------------------------
def _linear(x: torch.Tensor, *options: Any) -> torch.Tensor:
    return compute(Linear(*options).call(x))[0]


def _linear_fake(x: torch.Tensor, *options: Any) -> torch.Tensor:
    check(Linear(*options).call(x))
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _linear_autograd(x: torch.Tensor, *options: Any) -> Any:
    of = Linear(*options)
    if decompositions.is_decomposing():
        check(of.call(x))
        return decompositions.rotation(of.call(x))
    if needs_derivative(x):
        return apply_at_one_level(_New, x, of, None)
    return _below_autograd(x, of)


def _below_autograd(x: torch.Tensor, of: Linear) -> torch.Tensor:
    if has_only_memory(x):
        return compute(of.call(x))[0]
    with next_level():
        return LINEAR.default(x, *of)  # type: ignore[no-any-return]


def follow(x: torch.Tensor, run: Run) -> torch.Tensor:
    """The result of a call of H alone that comes again, with its derivative. x has no tangent."""
    return _New.apply(x, Linear(None, None, None, run.scale, run.text), run)  # type: ignore[attr-defined, no-any-return]


class _New(one_level):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: Linear, run: Run | None = None) -> torch.Tensor:
        ctx.of = of
        return _below_autograd(x, of) if run is None else run.new(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        of = ctx.of  # torch.compile of PyTorch 2.6 does not know `_replace`
        back = Linear(of.matrices, of.signs, of.signs_after, of.scale, transposed(of.text))
        return LINEAR(gradient, *back), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> Any:
        return LINEAR(tangent, *ctx.of)


class _InPlace(one_level):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: Linear) -> torch.Tensor:
        ctx.of = of
        ctx.mark_dirty(x)
        with next_level():
            _write_in_place(x, of)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _New.backward(ctx, gradient)[:2]

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        result = LINEAR(tangent, *ctx.of)
        with forward_ad._set_fwd_grad_enabled(True):  # the tangent may have a tangent of an outer level
            return tangent.copy_(result)


def write(x: torch.Tensor, of: Linear, target: torch.Tensor, before: Prologue | None) -> torch.Tensor:
    """The rotated rows in the target, which is x or a tensor like them."""
    # A view into a conjugate is negated as it is read, which PyTorch does only for operators with a result. The same is
    # so for tensors of torch.func.functionalize.
    is_known = is_dynamo_compiling() or stands_for_a_tensor(x)
    is_plain = is_known or not (_is_traced() or any(each.is_neg() or is_functional(each) for each in (x, target)))
    tensors = [x, *present(of.matrices, of.signs, of.signs_after)]
    if before is None and is_plain:
        if target is x:
            _write_in_place(x, of)
        else:
            INTO([target], tensors, of.scale, of.text)
        return target
    if before is not None and is_plain and (target is not x or before.width > 1):
        write_results(tensors, of.scale, of.text, [target])
        return target
    values = LINEAR(x.resolve_neg(), *of) if before is None else CALL(tensors, of.scale, of.text)[0]
    check_copied_to(target, "x" if target is x else "out")
    return target.copy_(values)


def write_results(tensors: list[torch.Tensor], scale: float, text: str, out: Sequence[torch.Tensor]) -> None:
    """The first results of a call with a prologue or a quantizer, into tensors of a caller."""
    if not (is_dynamo_compiling() or stands_for_a_tensor(tensors[0])):
        tensors = [tensors[0].resolve_neg(), *tensors[1:]]  # which PyTorch does only for operators with a result
        if _is_traced():
            for each, made in zip(out, CALL(tensors, scale, text), strict=False):
                each.copy_(made)
            return
    INTO([*out], tensors, scale, text)


def _is_traced() -> bool:
    """Whether torch.jit traces, which forgets what is written through a list."""
    return bool(torch._C._is_tracing())


def _write_in_place(x: torch.Tensor, of: Linear) -> None:
    INTO([x], present(of.matrices, of.signs, of.signs_after), of.scale, f"{of.text} inplace")


def _linear_vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *options: Any) -> tuple[Any, int]:
    """One more leading dimension changes nothing. So only a batch that is the last dimension has to move."""
    x, batch = with_last_in_place(x, in_dims)
    return LINEAR.default(x, *options), batch


def with_last_in_place(x: torch.Tensor, in_dims: tuple[Any, ...]) -> tuple[torch.Tensor, int]:
    """A view of x whose last dimension is that of a single tensor, and the position of its batch dimension."""
    batch, *others = in_dims
    if any(dim is not None for dim in tree_leaves(others)):
        raise TensorError("a sign vector or a matrix has a batch dimension of vmap; only x may have one")
    assert batch is not None  # a rule is called for batches only
    if x.dim() == 1:
        check_tensor(x[0])
    return (x.movedim(batch, 0), 0) if batch == x.dim() - 1 else (x, batch)


# ---- any call --------------------------------------------------------------------------------------------------------
def _call(tensors: list[torch.Tensor], scale: float, text: str) -> list[torch.Tensor]:
    return compute(Call.taken(tensors, scale, text))


def _call_fake(tensors: list[torch.Tensor], scale: float, text: str) -> list[torch.Tensor]:
    call = Call.taken(tensors, scale, text)
    check(call)
    rows, form, prologue = call.rows, call.spec.form, call.spec.prologue
    like = torch.empty_like(rows, memory_format=torch.contiguous_format)
    first = [like] if form is None else empty_results(rows, form)
    return [*first, *[torch.empty_like(like) for _ in (prologue.written if prologue else ())]]


def _call_autograd(tensors: list[torch.Tensor], scale: float, text: str) -> list[torch.Tensor]:
    call = Call.taken(tensors, scale, text)
    if any(needs_derivative(each) for each in (call.x, *call.values)):
        check(call)
        return _with_derivative(call)
    if decompositions.is_decomposing():
        check(call)
        with torch.no_grad():
            return decomposed(call)
    with torch._C._AutoDispatchBelowAutograd():
        return CALL.default(tensors, scale, text)  # type: ignore[no-any-return]


def _with_derivative(call: Call) -> list[torch.Tensor]:
    spec, prologue, x = call.spec, call.spec.prologue, call.x
    if spec.form is not None or prologue is None:
        whose, fix = ("x or a tensor of its prologue", "detach it") if call.values else ("x", "pass x.detach()")
        raise TensorError(f"{whose} has a derivative, which quantized codes do not have; {fix}")
    if runs.takes_kernels(x) and not prologue.operands and has_only_memory(x) and not has_tangent(x):
        return [_ByKernel.apply(x, call)]  # type: ignore[no-untyped-call]
    if not has_only_memory(x):
        with slow.quiet():
            return _differentiable(call)
    why = "no kernel has tangents, or derivatives of tensors besides x; detach them"
    with slow.path(x, lambda: asked_of(call)._replace(misfit=why)):
        return _differentiable(call)


def _differentiable(call: Call) -> list[torch.Tensor]:
    """The results for x, in PyTorch's operators and `linear`."""
    prologue, x = call.spec.prologue, call.x
    assert prologue is not None
    made = applied(x, prologue, call.values, call.n)
    values = made["x"].to(x.dtype) if prologue.is_rounded else made["x"]
    rotation = rotation_of(call, values)
    of = Linear(call.matrices, call.signs, call.signs_after, call.scale, rotation.spec.text)
    return [LINEAR.default(values, *of).to(x.dtype), *[made[name].to(x.dtype) for name in prologue.written]]


class _ByKernel(torch.autograd.Function):
    """The result by a kernel. It keeps x alone; PyTorch computes the formula again for derivatives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.call = call._replace(x=None)  # type: ignore[arg-type]
        return compute(call._replace(x=x.detach()))[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,), again = ctx.saved_tensors, torch.is_grad_enabled()  # whether the derivative has a derivative
        with slow.quiet(), torch.enable_grad():
            given = x if again else x.detach().requires_grad_()
            y, *_ = _differentiable(ctx.call._replace(x=given))
            (found,) = torch.autograd.grad(y, given, gradient, create_graph=again)
        return found, None


def decomposed(call: Call) -> list[torch.Tensor]:
    """The results by PyTorch's own operators, with the strides of `outputs_of`."""
    spec, x, prologue = call.spec, call.x, call.spec.prologue
    if spec.is_linear:
        return [decompositions.rotation(call)]
    made = {} if prologue is None else applied(x, prologue, call.values, call.n)
    written = [made[name].to(x.dtype) for name in (prologue.written if prologue else ())]
    values = made.get("x")
    if values is not None and prologue is not None and prologue.is_rounded:
        values = values.to(x.dtype)
    if spec.form is None:
        return [decompositions.rotation(call, values).to(x.dtype), *written]
    if values is not None:
        codes, scales = decompositions.quantized(call, call.rows, values.float())
        return [codes, no_scales(x) if spec.form.group == TENSOR else scales, *written]
    order = list(range(x.dim())) if decompositions.in_onnx_export() else order_of(x, spec.form.by_kernels)
    results = [*decompositions.quantized(call, x.permute(order))]
    if order != sorted(order):
        results = [
            each if spec.form.group == TENSOR and at else each.permute(*[order.index(i) for i in range(each.dim())])
            for at, each in enumerate(results)
        ]
    return results


def _call_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    """Rows of a batch are rows of the operator if it has one input and no scales; else one call for each."""
    (of_x, *of_others), *_ = in_dims
    tensors, *options = arguments
    if not info.batch_size:  # nothing can be selected, but the shapes are those of any of the batch
        one = tree_map(
            lambda value, dim: value if dim is None else value.new_zeros(value.movedim(dim, 0).shape[1:]),
            arguments,
            in_dims,
        )
        made = [each.new_empty((0, *each.shape)) for each in CALL.default(*one)]
        return made, [0] * len(made)
    if any(dim is not None for dim in of_others) or Spec.parse(options[1]).form:
        results = []
        for i in range(info.batch_size):
            one = tree_map(lambda value, dim, i=i: value if dim is None else value.select(dim, i), arguments, in_dims)
            results.append(CALL.default(*one))
        made = [torch.stack(each) for each in zip(*results, strict=True)]
    else:
        x, *others = tensors
        x = x.movedim(of_x, 0)
        if x.dim() == 1:
            check_tensor(x[0])
        made = CALL.default([x, *others], *options)
    return made, [0] * len(made)


# ---- into tensors of a caller ----------------------------------------------------------------------------------------
def _taken(written: list[torch.Tensor], read: list[torch.Tensor], scale: float, text: str) -> Call:
    """The call, whose x is the tensor that is written if it is in place."""
    spec = Spec.parse(text)
    if spec.inplace and not spec.is_linear:
        raise TensorError(f"spec {text!r} is in place, which only a rotation alone is; call a function of hadagen")
    tensors = [written[0], *(read if sum(spec.roles) else ())] if spec.inplace else read
    return Call.taken(tensors, scale, text)


def _into(written: list[torch.Tensor], read: list[torch.Tensor], scale: float, text: str) -> None:
    call = _taken(written, read, scale, text)
    if call.spec.inplace:
        compute(call)
    else:
        compute_into(call, written)


def _into_fake(written: list[torch.Tensor], read: list[torch.Tensor], scale: float, text: str) -> None:
    call = _taken(written, read, scale, text)
    check(call)
    if call.spec.is_linear and not call.spec.inplace:
        check_like(call.x, written[0])
    elif not call.spec.is_linear:
        check_written(call, written)


def _into_autograd(written: list[torch.Tensor], read: list[torch.Tensor], scale: float, text: str) -> None:
    call = _taken(written, read, scale, text)
    spec, x = call.spec, call.x
    if spec.inplace:
        _in_place_autograd(call, written, read, scale, text)
        return
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *written)):
        raise TensorError("x or out requires grad, and out= has no derivative; leave it out or use no_grad")
    if any(has_tangent(each) for each in (x, *written)):
        raise TensorError("x or out has a tangent, and out= has no derivative; leave it out")
    if decompositions.is_decomposing():
        for each, value in zip(written, decomposed(call), strict=False):
            each.copy_(value)
        return
    with torch._C._AutoDispatchBelowAutograd():
        INTO.default(written, read, scale, text)


def _in_place_autograd(call: Call, *arguments: Any) -> None:
    x, text = call.x, replace(call.spec, inplace=False).text
    of = Linear(call.matrices, call.signs, call.signs_after, call.scale, text)
    if decompositions.is_decomposing():
        x.copy_(_linear_autograd(x, *of))
        return
    if not needs_derivative(x):
        with next_level():
            INTO.default(*arguments)
        return
    if x.requires_grad and torch.is_grad_enabled():
        check_autograd_follows(x, "x")
    if not (has_only_memory(x) or torch._C._are_functorch_transforms_active()):
        # torch.compile assumes that autograd need not know of an operator that writes to its input.
        x.copy_(LINEAR.default(x, *of))
        return
    apply_at_one_level(_InPlace, x, of)


def _into_vmap(info: Any, in_dims: Any, written: Any, read: Any, scale: float, text: str) -> tuple[None, None]:
    if not Spec.parse(text).inplace:
        raise TensorError("out= is not possible under torch.vmap; leave it out")
    (of_x,), of_read, *_ = in_dims
    if not sum(Spec.parse(text).roles):
        read, of_read = [written[0].new_empty(1)], None
    INTO.default([with_last_in_place(written[0], (of_x, of_read))[0]], read, scale, text)
    return None, None


# The scale is a Scalar: for each float torch.compile would compile anew.
LINEAR = Operator(
    "linear",
    "(Tensor x, Tensor? matrices, Tensor? signs, Tensor? signs_after, Scalar scale, str spec) -> Tensor",
    _linear,
    _linear_fake,
    _linear_autograd,
    _linear_vmap,
)
CALL = Operator(
    "call",
    "(Tensor[] tensors, Scalar scale, str spec) -> Tensor[]",
    _call,
    _call_fake,
    _call_autograd,
    _call_vmap,
    EXACT_STRIDES,
)
INTO = Operator(
    "call_into",
    "(Tensor(a!)[] written, Tensor[] read, Scalar scale, str spec) -> ()",
    _into,
    _into_fake,
    _into_autograd,
    _into_vmap,
    EXACT_STRIDES,
)
