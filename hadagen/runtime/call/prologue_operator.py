"""`torch.ops.hadagen.rotate_after`: a prologue, a rotation and, if there is a format, a quantizer, as one operator.

One kernel does all of it if there is one that takes the tensors as they lie: without gaps, at addresses that are
multiples of 16 bytes. Other tensors are copied. Where there is no kernel, PyTorch computes the formula of the prologue,
and the operators of rotations and quantizers the rest. Derivatives are always those of PyTorch, also of results that a
kernel computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hadagen.errors import TensorError, UsageError, shown
from hadagen.problem.formats import TENSOR
from hadagen.problem.prologues import Prologue, parsed
from hadagen.runtime.call import calls, decompositions, slow
from hadagen.runtime.call.calls import (
    ALIGNMENT,
    Run,
    has_only_memory,
    has_tangent,
    launch_of,
    needs_derivative,
    numbers_for,
    result_like,
    rotation_problem,
)
from hadagen.runtime.call.operators import LIBRARY, check_autograd_follows, register
from hadagen.runtime.call.quantize_operator import (
    AFTER,
    After,
    as_asked,
    asked_of,
    check_arguments,
    empty_results,
    make,
    misfit_after,
    no_scales,
    run_for,
)
from hadagen.runtime.call.rotate_operator import ROTATE, rotated
from hadagen.runtime.checks import (
    check_alike,
    check_is_tensor,
    check_tensor,
    check_writable,
    plain,
    shape_of,
)
from hadagen.runtime.choose.reasons import Asked
from hadagen.runtime.operands.rotate_arguments import RotateArguments


class Before(NamedTuple):
    """The prologue before a rotation, and its operands.

    prologue: a `Prologue.text`, or the name of a prologue without numbers.
    values: the operands that it reads, in their order: tensors of x's type, of x's shape or [n].
    """

    prologue: str
    values: tuple[torch.Tensor, ...] = ()

    @property
    def of(self) -> Prologue:
        """The prologue. Raises `UsageError` if it is not known."""
        return parsed(self.prologue)


def text_of(before: Any) -> str:
    """The text of a value of `before=`; "" for None. Raises TypeError, and `UsageError` for a prologue with tensors of
    its own, which these calls do not take."""
    if before is None:
        return ""
    if not isinstance(before, Prologue):
        raise TypeError(
            f"before is a {type(before).__name__}; pass a value of hadagen.prologues, such as "
            "hadagen.prologues.SiluMul(), or None"
        )
    if before.operands:
        names = ", ".join(each.name for each in before.operands)
        raise UsageError(f"before = {before.name} has tensors of its own, {names}, which this call does not take")
    return before.text or before.name


def rotate_after(
    x: torch.Tensor, before: Before, after: After, out: Sequence[torch.Tensor] = (), what: Any = None
) -> list[torch.Tensor]:
    """The rotated rows, of x's type, or codes and scales; and then what the prologue writes, like the rotated rows.

    out: tensors like the first results, to write and return in their place. They share no memory with other tensors.
    what: the options of a call that comes again, as `calls.known` takes them, if it may be remembered.

    Raises `UsageError` for an unknown prologue, and TypeError and `TensorError` for tensors that do not fit.
    """
    tensors, of = [x, *before.values], after.of
    operands = after.tensor_scale, of.matrices, of.signs, of.signs_after
    if not torch.compiler.is_dynamo_compiling() and all(
        each is None or (has_only_memory(each) and not needs_derivative(each)) for each in (*tensors, *out, *operands)
    ):
        return _results(x, before, after, out, what)
    for each in out:
        if needs_derivative(each) or any(needs_derivative(tensor) for tensor in tensors):
            raise TensorError("x or out has a derivative, and out= has none; leave it out, or detach them")
    results = OPERATOR(tensors, before.prologue, *after.at())
    for at, each in enumerate(out):  # no zip of lists, which Dynamo of PyTorch 2.6 refuses for other lengths
        each.copy_(results[at])
    return [*out, *results[len(out) :]]


def rotated_after(
    x: torch.Tensor,
    before: Prologue,
    of: RotateArguments,
    inplace: bool = False,
    out: torch.Tensor | None = None,
    what: Any = None,
    kept: Sequence[tuple[str, torch.Tensor]] = (),
) -> torch.Tensor:
    """The rotated rows in a new tensor, in x or in out. x is a tensor that can be rotated after the prologue. what: as
    for `rotate_after`. kept: as for `check_target`, whose errors it raises."""
    inplace = inplace or (out is x and before.width == 1)
    check_target(x, before, inplace, out, kept)
    (y,) = rotate_after(x, Before(text_of(before)), After(of), () if out is None or inplace else (out,), what)
    return x.copy_(y) if inplace else y


def traced_after(x: Any, before: Prologue, of: RotateArguments) -> Any:
    """The same for what stands for a tensor while torch.fx traces."""
    return OPERATOR([x], text_of(before), *After(of).at())[0]


def check_target(
    x: torch.Tensor,
    before: Prologue,
    inplace: bool,
    out: torch.Tensor | None,
    kept: Sequence[tuple[str, torch.Tensor]] = (),
) -> None:
    """Raises `UsageError` and `TensorError` for a destination that cannot be written with the result for x.

    kept: tensors that must not be written, with their names in messages."""
    if inplace and before.width > 1:
        raise UsageError(
            f"inplace=True is not possible with before = {shown(before)}, because x has {before.width} elements for "
            "each element of the result; leave it out, or pass out="
        )
    if out is not None and not inplace:
        check_alike(x, out, "out")
        shape = (*x.shape[:-1], x.shape[-1] // before.width)
        is_like = not out.is_nested and out.layout is torch.strided and out.shape == shape and out.dtype == x.dtype
        if not is_like or out.device != x.device:
            raise TensorError(
                f"out is {plain(out.dtype)} {shape_of(out)} on {out.device}; with before= the result is strided "
                f"{plain(x.dtype)} {tuple(shape)} on {x.device}"
            )
    target, name = (x, "x") if inplace else (out, "out")
    if target is None or torch.compiler.is_dynamo_compiling():
        return
    if inplace and torch.is_grad_enabled() and x.requires_grad:
        check_autograd_follows(x, "x")
    if not has_only_memory(target):
        return
    check_writable(target)
    others = [*kept, *([] if inplace or not has_only_memory(x) else [("x", x)])]
    calls.check_apart(target, name, others)


def _arguments(tensors: Sequence[torch.Tensor], prologue: str, *options: Any) -> tuple[torch.Tensor, Before, After]:
    x, *values = tensors
    return x, Before(prologue, tuple(values)), After.taken(*options)


def _check(x: torch.Tensor, before: Before, after: After) -> None:
    check_is_tensor(x, "x")
    check_tensor(x)
    prologue = before.of
    check_arguments(result_like(x, prologue.width), after.of, after.tensor_scale)
    wanted = [each for each in prologue.operands if not each.is_written]
    if len(wanted) != len(before.values):
        names = ", ".join(each.name for each in wanted) or "nothing"
        raise TensorError(f"{before.prologue} reads {names} besides x, but got {len(before.values)} tensors; pass all")
    for operand, value in zip(wanted, before.values, strict=True):
        check_alike(x, value, operand.name)
        shape = x.shape if operand.like_x else (after.of.n,)
        if value.shape != shape or value.dtype != x.dtype or value.device != x.device:
            raise TensorError(
                f"{operand.name} is {value.dtype} {shape_of(value)} on {value.device}; {before.prologue} needs "
                f"{plain(x.dtype)} {tuple(shape)} on {x.device}"
            )


# ---- on real tensors -------------------------------------------------------------------------------------------------
def _compute(*arguments: Any) -> list[torch.Tensor]:
    return _results(*_arguments(*arguments))


def _results(
    x: torch.Tensor, before: Before, after: After, out: Sequence[torch.Tensor] = (), what: Any = None
) -> list[torch.Tensor]:
    _check(x, before, after)
    run = None
    if calls.takes_kernels(x):
        ready, *values = map(calls.ready, (x, *before.values))
        run = _run(ready, Before(before.prologue, tuple(values)), after)
    if run is None:
        with slow.path(x, lambda: _asked(x, before, after)), torch.no_grad():
            results = _in_pytorch(x, before, after, differentiable=False)
        for each, made in zip(out, results, strict=False):
            each.copy_(made)
        return [*out, *results[len(out) :]]
    is_asked = after.form is None or after.form.by_kernels is after.form
    if what is not None and ready is x and is_asked:
        calls.remember(x, what, False, run)
    given = [] if after.tensor_scale is None else [after.tensor_scale.data_ptr()]
    others = *given, *[each.data_ptr() for each in values]
    places = [each.data_ptr() for each in out]
    lie = [(each.stride(), each.data_ptr() % ALIGNMENT) for each in out]
    if is_asked and lie == [(strides, 0) for _, strides, _ in run.outputs]:
        run.into(out, ready.data_ptr(), *places, *others)
        return [*out]
    made = run.new(ready.data_ptr(), *others)
    results = [*made] if isinstance(made, tuple) else [made]
    if after.form and after.form.group == TENSOR:
        results.insert(1, no_scales(x))
    elif after.form and not is_asked:
        results[:2] = as_asked(results[0], results[1], after.form)
    for each, value in zip(out, results, strict=False):
        each.copy_(value)
    return [*out, *results[len(out) :]]


def _run(x: torch.Tensor, before: Before, after: After) -> Run | None:
    of, form, round_first, _ = after
    heads = after.heads
    form = form and form.by_kernels
    what = before.prologue, form and form.key, round_first, heads, calls.number_of(of), of.numerics, of.batch_invariant
    run = calls.known(x, what)
    if run is None:
        run = run_for(x, of, form, round_first, heads, before.of) if form else _run_of_rotation(x, of, before.of)
        if run:
            calls.remember(x, what, False, run)
    return run


def _asked(x: torch.Tensor, before: Before, after: After) -> Asked:
    """What a call with tensors like x asks for."""
    of, form, round_first, _ = after
    prologue = before.of
    if form:
        return asked_of(x, of, form.by_kernels, round_first, after.heads, prologue)
    rows = result_like(x, prologue.width)
    asked = slow.asked_of(rows, of, prologue=prologue.name)
    problem = rotation_problem(rows, of, prologue=prologue.name)
    misfit = problem and misfit_after(prologue, problem, rows)
    return asked._replace(misfit=misfit) if misfit else asked


def _run_of_rotation(x: torch.Tensor, of: RotateArguments, prologue: Prologue) -> Run | None:
    rows = result_like(x, prologue.width)
    problem = rotation_problem(rows, of, prologue=prologue.name)
    numbers = None if problem is None else numbers_for(prologue, problem, rows)
    if problem is None or numbers is None:
        return None
    launch = launch_of(rows, of, problem, False, numbers, changing=[*prologue.written, *prologue.read])
    return Run(x, launch, [calls.like(rows)] * (1 + len(prologue.written))) if launch else None


def applied(x: torch.Tensor, prologue: Prologue, values: Sequence[torch.Tensor] = (), n: int = 1) -> dict[str, Any]:
    """The results of a prologue in PyTorch, float32, or float64 for float64, by name. values: the operands that it
    reads. n: the columns of those that are vectors."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = prologue.parts(x).to(wide)
    rows = rows.reshape(-1, n) if prologue.width == 1 else rows.reshape(prologue.width, -1, n)
    read = [each.to(wide).reshape(-1, n) if each.shape == x.shape else each.to(wide) for each in values]
    made = prologue.results(rows, dict(zip(prologue.read, read, strict=True)), x.dtype)
    shape = (*x.shape[:-1], x.shape[-1] // prologue.width)
    return {name: value.reshape(shape) for name, value in made.items()}


def _in_pytorch(x: torch.Tensor, before: Before, after: After, *, differentiable: bool) -> list[torch.Tensor]:
    """The result in PyTorch. Computes in float32, or in float64 for float64, except where the prologue rounds. Codes
    are never differentiable."""
    of, form, round_first, given = after
    prologue = before.of
    made = applied(x, prologue, before.values, of.n)
    values = made["x"]
    written = [made[name].to(x.dtype) for name in prologue.written]
    if prologue.is_rounded:  # so that kernels without a prologue may do the rest
        values = values.to(x.dtype)
    if form is None:
        y = ROTATE.functional(values, *of) if differentiable else rotated(values, of, False)
        return [y.to(x.dtype), *written]
    if decompositions.is_decomposing():
        rows = result_like(x, prologue.width)
        codes, scales = decompositions.quantized(rows, of, form, round_first, given, values.to(torch.float32))
    elif prologue.is_rounded:
        codes, scales = make(values, of, form, round_first, given)
    else:
        codes, scales = make(result_like(x, prologue.width), of, form, round_first, given, values=values)
    return [codes, no_scales(x) if form.group == TENSOR else scales, *written]


# ---- on tensors without memory, and derivatives ----------------------------------------------------------------------
def _shapes(*arguments: Any) -> list[torch.Tensor]:
    x, before, after = _arguments(*arguments)
    _check(x, before, after)
    rows = torch.empty_like(result_like(x, before.of.width), memory_format=torch.contiguous_format)
    first = [rows] if after.form is None else [*empty_results(rows, after.form)]
    return [*first, *[torch.empty_like(rows) for _ in before.of.written]]


def _with_derivatives(*arguments: Any) -> list[torch.Tensor]:
    x, before, after = _arguments(*arguments)
    if any(needs_derivative(each) for each in (x, *before.values)):
        _check(x, before, after)
        if after.form is not None:
            raise TensorError("x or what comes before has a derivative, which quantized codes do not have; detach it")
        if calls.takes_kernels(x) and not before.of.operands and has_only_memory(x) and not has_tangent(x):
            return [_ByKernel.apply(x, before, after)]  # type: ignore[no-untyped-call]
        if not has_only_memory(x):
            with slow.quiet():
                return _in_pytorch(x, before, after, differentiable=True)
        why = "no kernel has tangents, or derivatives of tensors besides x; detach them"
        with slow.path(x, lambda: _asked(x, before, after)._replace(misfit=why)):
            return _in_pytorch(x, before, after, differentiable=True)
    if decompositions.is_decomposing():
        _check(x, before, after)
        with torch.no_grad():
            return _in_pytorch(x, before, after, differentiable=True)
    with torch._C._AutoDispatchBelowAutograd():
        return OPERATOR(*arguments)


class _ByKernel(torch.autograd.Function):
    """The result by a kernel. It keeps x alone; PyTorch computes the formula again for derivatives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: Before, after: After) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.options = before, after
        return _results(x.detach(), before, after)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,), again = ctx.saved_tensors, torch.is_grad_enabled()  # whether the derivative has a derivative
        with slow.quiet(), torch.enable_grad():
            given = x if again else x.detach().requires_grad_()
            (y,) = _in_pytorch(given, *ctx.options, differentiable=True)
            (found,) = torch.autograd.grad(y, given, gradient, create_graph=again)
        return found, None, None


def _vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    """Rows of a batch are rows of the operator if it has one input and no scales; else one call for each."""
    (of_x, *of_values), *of_others = in_dims
    tensors, *options = arguments
    if not info.batch_size:  # nothing can be selected, but the shapes are those of any of the batch
        one = tree_map(
            lambda value, dim: value if dim is None else value.new_zeros(value.movedim(dim, 0).shape[1:]),
            arguments,
            in_dims,
        )
        made = [each.new_empty((0, *each.shape)) for each in OPERATOR(*one)]
        return made, [0] * len(made)
    if of_values or any(dim is not None for dim in tree_leaves(of_others)) or After.taken(*options[1:]).form:
        results = [
            OPERATOR(*tree_map(lambda value, dim, i=i: value if dim is None else value.select(dim, i), arguments, dims))
            for i, dims in enumerate([in_dims] * info.batch_size)
        ]
        made = [torch.stack(each) for each in zip(*results, strict=True)]
    else:
        x = tensors[0].movedim(of_x, 0)
        if x.dim() == 1:
            check_tensor(x[0])
        made = OPERATOR([x], *options)
    return made, [0] * len(made)


OPERATOR: Callable[..., list[torch.Tensor]] = register(
    "rotate_after",
    f"(Tensor[] tensors, str prologue, {AFTER}, Tensor? tensor_scale) -> Tensor[]",
    _compute,
    _shapes,
    _with_derivatives,
)
torch.library.register_vmap("hadagen::rotate_after", _vmap, lib=LIBRARY)
