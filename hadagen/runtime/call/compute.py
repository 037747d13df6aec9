"""Computes a call whose tensors have memory, without derivatives: by a kernel if there is one, else in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hadagen.errors import TensorError
from hadagen.problem.formats import TENSOR
from hadagen.problem.prologues import Prologue
from hadagen.runtime.call import runs, slow
from hadagen.runtime.call.find import asked_of, blocks_of, find, launch_of_h
from hadagen.runtime.call.outputs import as_asked, check_written, no_scales, order_of, shaped
from hadagen.runtime.call.runs import ALIGNMENT, check_apart, increment_version, is_ready, may_overlap, row_pitch
from hadagen.runtime.checks import check_like, check_writable
from hadagen.runtime.launch import streams
from hadagen.runtime.operands.call import Call, check, kernel_form
from hadagen.runtime.operands.spec import Spec, text_of
from hadagen.runtime.plain import rotation as plain_rotation
from hadagen.runtime.plain import transform as plain_transform
from hadagen.truth import quantizer


def compute(call: Call) -> list[torch.Tensor]:
    """The rotated rows, of x's type, or codes and scales; and then what the prologue writes, like the rotated rows. In
    new tensors, or in x if the spec says so. A call with one scale gives scales that mean nothing."""
    is_checked = not (call.operands or call.values or call.tensor_scale is not None or call.x.is_inference())
    run = runs.known(call.x, call.key) if is_checked else None
    if run is None:
        check(call)
        if call.spec.inplace:
            _check_written(call.x, "x", call)
        run = find(call)
    if run is None:
        results = _in_pytorch_with_warning(call)
    elif call.spec.inplace:
        results = [run.over(call.x)]
    else:
        values = [runs.ready(each) for each in call.values]  # alive until the launch
        made = run.new(call.x, *_others(call, values))
        results = [*made] if isinstance(made, tuple) else [made]
        if call.spec.form is not None and call.spec.form.group == TENSOR:
            results.insert(1, no_scales(call.x))
    return results


def compute_into(call: Call, out: Sequence[torch.Tensor]) -> None:
    """The first results of a call, into tensors of a caller: x itself for a linear call, or memory of their own."""
    if call.spec.is_linear:
        _linear_into(call, out[0])
        return
    check(call)
    check_written(call, out)
    run = find(call)
    if run is not None and run.lies_like(out):
        values = [runs.ready(each) for each in call.values]
        run.into(out, call.x, *_others(call, values))
        return
    results = compute(call)
    for each, made in zip(out, results, strict=False):
        each.copy_(made)


def _others(call: Call, values: Sequence[torch.Tensor]) -> list[int]:
    """The addresses of the tensors that differ from call to call, but for x and results."""
    given = [] if call.tensor_scale is None else [call.tensor_scale.data_ptr()]
    return [*given, *[each.data_ptr() for each in values]]


def _check_written(y: torch.Tensor, name: str, call: Call) -> None:
    check_writable(y)
    check_apart(y, name, call.operands)


def _linear_into(call: Call, y: torch.Tensor) -> None:
    """If it is hard to know whether x and y share memory, the result is right anyway."""
    x = call.x
    check(call)
    check_like(x, y)
    _check_written(y, "out", call)
    dense = x.is_contiguous() and y.is_contiguous()
    if x.data_ptr() == y.data_ptr() and (dense or y.stride() == x.stride()):
        compute(in_place(call._replace(x=y)))
        return
    if not call.spec.n and dense and abs(x.data_ptr() - y.data_ptr()) < x.nbytes:
        raise TensorError("out overlaps x without being x; pass x itself or memory of its own")
    has_kernels = runs.takes_kernels(x)
    if may_overlap(x, y) or (has_kernels and call.spec.is_h_alone and row_pitch(x) is None):
        call = call._replace(x=x.clone(memory_format=torch.contiguous_format))
    run = find(call)
    if run is not None and run.is_direct and is_ready(y):
        run.into((y,), call.x)
    elif has_kernels and (launch := _strided(call, y)):
        increment_version((y,))
        streams.queue(launch, x.get_device(), call.x.data_ptr(), y.data_ptr())
    elif run is None and y.is_contiguous():
        increment_version((y,))
        with slow.path(x, lambda: asked_of(call)):
            _rotate(call, y)
    else:
        y.copy_(compute(call)[0])


def _strided(call: Call, y: torch.Tensor) -> Any:
    """The launch of a kernel for H alone that takes x and y as they lie; None if there is none."""
    if not call.spec.is_h_alone or call.spec.n:
        return None
    aligned = (call.x.data_ptr() | y.data_ptr()) % ALIGNMENT == 0
    return launch_of_h(call, row_pitch(call.x), row_pitch(y), aligned, False)


def in_place(call: Call) -> Call:
    return call._replace(spec=Spec.parse(f"{call.spec.text} inplace"))


# ---- in PyTorch ------------------------------------------------------------------------------------------------------
def _in_pytorch_with_warning(call: Call) -> list[torch.Tensor]:
    if call.spec.is_linear and call.spec.is_h_alone and call.spec.n == 1:
        return in_pytorch(call)
    with slow.path(call.x, lambda: asked_of(call)), torch.no_grad():
        return in_pytorch(call)


def in_pytorch(call: Call) -> list[torch.Tensor]:
    """The results in PyTorch. Computes in float32, or in float64 for float64, except where the prologue rounds."""
    spec, x, prologue = call.spec, call.x, call.spec.prologue
    if spec.is_linear:
        y = x if spec.inplace and x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        _rotate(call, y)
        if y is x:
            increment_version((x,))
        return [x.copy_(y) if spec.inplace and y is not x else y]
    values, written = x, list[torch.Tensor]()
    if prologue is not None:
        made = applied(x, prologue, call.values, call.n)
        values, written = made["x"], [made[name].to(x.dtype) for name in prologue.written]
    if prologue is not None and prologue.is_rounded:  # so that kernels without a prologue may do the rest
        rest = call._replace(spec=replace(spec, before=""), x=values.to(x.dtype), values=())
        return [*compute(rest), *written]
    if spec.form is None:
        return [compute(rotation_of(call, values))[0].to(x.dtype), *written]
    return [*_quantized(call, values), *written]


def rotation_of(call: Call, values: torch.Tensor, inplace: bool = False) -> Call:
    """The rotation alone of values in place of x."""
    spec = replace(call.spec, inplace=inplace, before="", to="", group=0, rule="", layout="", round_first=False)
    return Call(spec, call.scale, values, call.matrices, call.signs, call.signs_after)


def _quantized(call: Call, values: torch.Tensor) -> list[torch.Tensor]:
    """Codes and scales of values, which are x, or what the prologue made of it."""
    form, asked, x = kernel_form(call), call.spec.form, call.x
    assert form is not None
    assert asked is not None
    rows = call.rows if values is not x else x
    values = values.permute(order_of(rows, form))
    wide = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    rotated = compute(rotation_of(call, wide, inplace=True))[0]
    if call.spec.round_first:
        rotated = rotated.to(x.dtype).float()
    made = quantizer.quantize(rotated.view(-1, values.shape[-1]), form, x.dtype, call.tensor_scale)
    codes, scales = shaped(rows, form, *made)
    if form is not asked:
        codes, scales = as_asked(codes, scales, asked)
    return [codes, no_scales(x) if form.group == TENSOR else scales]


def _rotate(call: Call, y: torch.Tensor) -> None:
    """y = x · M · scale, in PyTorch but for H, into y, which is contiguous, and the same memory as x or none of it."""
    spec = call.spec
    if spec.is_h_alone:
        x, target = blocks_of(call, call.x), blocks_of(call, y)
        plain_transform.transform(x, target, call.scale, batch_invariant=spec.batch_invariant)
        return

    def transform(x: torch.Tensor, target: torch.Tensor, scale: float) -> None:
        alone = Call(Spec.parse(text_of(numerics=spec.numerics, batch_invariant=spec.batch_invariant)), scale, x)
        if x.data_ptr() == target.data_ptr():
            compute(in_place(alone))
        else:
            compute_into(alone, [target])

    plain_rotation.rotate_into(call.x, y, call, transform)


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
