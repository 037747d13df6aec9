"""`torch.ops.hadagen.rotate_after`: a prologue, a rotation and, if there is a format, a quantizer, as one operator.

One kernel does all of it if there is one that takes the tensors as they lie: without gaps, at addresses that are
multiples of 16 bytes. Other tensors are copied. Where there is no kernel, PyTorch computes the formula of the prologue,
and the operators of rotations and quantizers the rest. Derivatives are always those of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hadagen.errors import TensorError
from hadagen.problem.formats import TENSOR
from hadagen.problem.prologues import PROLOGUES, Prologue, check_prologue
from hadagen.runtime import calls
from hadagen.runtime.calls import Run, has_only_memory, launch_of, needs_derivative, rotation_problem
from hadagen.runtime.checks import check_alike, check_is_tensor, check_tensor, plain, shape_of
from hadagen.runtime.operators import register
from hadagen.runtime.quantize_operator import AFTER, After, check_arguments, empty_results, make, no_scales, run_for
from hadagen.runtime.rotate_arguments import RotateArguments
from hadagen.runtime.rotate_operator import ROTATE, rotated


class Before(NamedTuple):
    """The prologue before a rotation, and its operands.

    prologue: a name in `PROLOGUES`.
    values: the operands that it reads, in their order: tensors of x's type, of x's shape or [n].
    """

    prologue: str
    values: tuple[torch.Tensor, ...] = ()

    @property
    def of(self) -> Prologue:
        """The prologue. Raises `UsageError` if it is not known."""
        check_prologue(self.prologue)
        return PROLOGUES[self.prologue]


def rotate_after(x: torch.Tensor, before: Before, after: After) -> list[torch.Tensor]:
    """The rotated rows, like x, or codes and scales; and then what the prologue writes, like x.

    Raises `UsageError` for an unknown prologue, and TypeError and `TensorError` for tensors that do not fit.
    """
    tensors = [x, *before.values]
    if not torch.compiler.is_dynamo_compiling() and all(
        has_only_memory(each) and not needs_derivative(each) for each in tensors
    ):
        return _compute(tensors, before.prologue, *after.at())
    return OPERATOR(tensors, before.prologue, *after.at())


def _arguments(tensors: Sequence[torch.Tensor], prologue: str, *options: Any) -> tuple[torch.Tensor, Before, After]:
    x, *values = tensors
    return x, Before(prologue, tuple(values)), After.taken(*options)


def _check(x: torch.Tensor, before: Before, after: After) -> None:
    check_is_tensor(x, "x")
    check_tensor(x)
    check_arguments(x, after.of, after.tensor_scale)
    wanted = [each for each in before.of.operands if not each.is_written]
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
    x, before, after = _arguments(*arguments)
    _check(x, before, after)
    x, *values = map(calls.ready, (x, *before.values))
    before = Before(before.prologue, tuple(values))
    run = _run(x, before, after) if calls.takes_kernels(x) else None
    if run is None:
        return _in_pytorch(x, before, after, differentiable=False)
    given = [] if after.tensor_scale is None else [after.tensor_scale.data_ptr()]
    made = run.new(x.data_ptr(), *given, *[each.data_ptr() for each in values])
    results = [*made] if isinstance(made, tuple) else [made]
    if after.form and after.form.group == TENSOR:
        results.insert(1, no_scales(x))
    return results


def _run(x: torch.Tensor, before: Before, after: After) -> Run | None:
    of, form, round_first, _ = after
    if form is not None and form.by_kernels is not form:
        return None
    heads = after.heads
    what = before.prologue, form and form.key, round_first, heads, calls.number_of(of), of.numerics, of.batch_invariant
    run = calls.known(x, what)
    if run is None:
        run = run_for(x, of, form, round_first, heads, before.of) if form else _run_of_rotation(x, of, before)
        if run:
            calls.remember(x, what, False, run)
    return run


def _run_of_rotation(x: torch.Tensor, of: RotateArguments, before: Before) -> Run | None:
    problem, prologue = rotation_problem(x, of, prologue=before.prologue), before.of
    launch = problem and launch_of(x, of, problem, False, changing=[*prologue.written, *prologue.read])
    return Run(x, launch, [calls.like(x)] * (1 + len(prologue.written))) if launch else None


def _in_pytorch(x: torch.Tensor, before: Before, after: After, *, differentiable: bool) -> list[torch.Tensor]:
    """The result in PyTorch. Computes in float32, or in float64 for float64, except where the prologue rounds. Codes
    are never differentiable."""
    of, form, round_first, given = after
    wide, prologue = torch.promote_types(x.dtype, torch.float32), before.of
    rows = [each.to(wide).reshape(-1, of.n) if each.shape == x.shape else each.to(wide) for each in (x, *before.values)]
    made = prologue.results(rows[0], dict(zip(prologue.read, rows[1:], strict=True)), x.dtype)
    values = made["x"].reshape(x.shape)
    written = [made[name].reshape(x.shape).to(x.dtype) for name in prologue.written]
    if form is None:
        y = ROTATE.functional(values, *of) if differentiable else rotated(values, of, False)
        return [y.to(x.dtype), *written]
    codes, scales = make(x, of, form, round_first, given, values=values)
    return [codes, no_scales(x) if form.group == TENSOR else scales, *written]


# ---- on tensors without memory, and derivatives ----------------------------------------------------------------------
def _shapes(*arguments: Any) -> list[torch.Tensor]:
    x, before, after = _arguments(*arguments)
    _check(x, before, after)
    like_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    first = [like_x] if after.form is None else [*empty_results(like_x, after.form)]
    return [*first, *[torch.empty_like(like_x) for _ in before.of.written]]


def _with_derivatives(*arguments: Any) -> list[torch.Tensor]:
    x, before, after = _arguments(*arguments)
    if any(needs_derivative(each) for each in (x, *before.values)):
        _check(x, before, after)
        if after.form is not None:
            raise TensorError("x or what comes before has a derivative, which quantized codes do not have; detach it")
        return _in_pytorch(x, before, after, differentiable=True)
    with torch._C._AutoDispatchBelowAutograd():
        return OPERATOR(*arguments)


OPERATOR: Callable[..., list[torch.Tensor]] = register(
    "rotate_after",
    f"(Tensor[] tensors, str prologue, {AFTER}, Tensor? tensor_scale) -> Tensor[]",
    _compute,
    _shapes,
    _with_derivatives,
)
