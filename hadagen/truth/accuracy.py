"""How far the results of a kernel are from the exact transform. All that verify a kernel judge it by this."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from hadagen.problem.formats import Format, Layout
from hadagen.problem.operands import sample_scales
from hadagen.problem.problem import DType, Problem
from hadagen.truth import quantizer

TORCH_DTYPE = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16, DType.FLOAT32: torch.float32}


def sample_scale(form: Format, heads: int, device: torch.device) -> torch.Tensor | None:
    """The tensor_scale with which kernels are verified on that many heads; None if the format needs none."""
    return torch.from_numpy(sample_scales(form, heads)).to(device) if form.needs_scale else None


def scales_in_rows(problem: Problem, scales: torch.Tensor, units: int) -> torch.Tensor:
    """The scales that a kernel wrote in its layout, as [units, scales of a unit], for so many `Problem.unit`s."""
    form = problem.io.form
    assert form is not None
    return quantizer.rows_of_scales(scales, form.layout, units, form.scales_in_row(problem.unit))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """‖found − exact‖ / ‖exact‖, with exact in float64; infinity if a value is not finite."""
    return quantizer.distance(found, exact).nan_to_num(nan=math.inf, posinf=math.inf)


def error_of(
    problem: Problem, results: Sequence[torch.Tensor], exact: torch.Tensor, given: torch.Tensor | None = None
) -> torch.Tensor:
    """The relative error of results, which `Problem.error_bound` limits; infinity if a result is not finite.

    results: the transform, of exact's shape; or codes [units, …] and, for formats with scales of groups, their scales
        as `scales_in_rows` returns them. exact: the exact transform, float64. given: the tensor_scale of the call.

    The error of a transform is its `relative_error`, and the error of codes is `quantizer.excess_error`.
    """
    form = problem.io.form
    if form is None:
        return relative_error(results[0], exact)
    codes, *scales = results
    values, plain = exact.view(-1, problem.unit), replace(form, layout=Layout.ROW_MAJOR)
    dtype = TORCH_DTYPE[problem.io.input]
    error = quantizer.excess_error(codes, scales[0] if scales else codes, values, plain, dtype, given)
    return error.nan_to_num(nan=math.inf, posinf=math.inf)
