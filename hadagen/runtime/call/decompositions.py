"""The operators in PyTorch's own operators, for programs that run without hadagen: in ONNX Runtime or ExecuTorch.

The operators call these functions in place of their kernels while `torch.onnx.export`, `torch.export.draft_export` or
`decompose` traces them. The functions write nothing, take any number of rows, and read no values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from math import prod
from typing import Any

import torch
from torch._functorch import config

from hadagen.errors import UsageError
from hadagen.problem.formats import ROW, TENSOR, Element, Layout
from hadagen.problem.problem import kernel_order, padded_length
from hadagen.runtime.operands.packed import TRAILER, unpack_matrices
from hadagen.truth import quantizer

# H is a Kronecker product of matrices of at most this order, and one product multiplies by each.
_FACTOR = 64
# Operators that take no tensors, so that their implementations are not asked in a trace → their functions here.
TABLE: dict[Any, Callable[..., torch.Tensor]] = {}
_asked: ContextVar[bool] = ContextVar("_asked", default=False)


def is_decomposing() -> bool:
    """Whether operators are to be traced as PyTorch's own."""
    if _asked.get() or in_onnx_export():
        return True
    # PyTorch's draft_export takes no operators with an optional tensor that is None.
    return bool(getattr(config, "fake_tensor_propagate_real_tensors", False))


def check_exporter() -> None:
    """Raises `UsageError` in a trace of torch.jit that becomes a program of ONNX."""
    if in_onnx_export():
        raise UsageError("torch.onnx.export with dynamo=False does not know hadagen's operators; pass dynamo=True")


def in_onnx_export() -> bool:
    """Whether `torch.onnx.export` runs."""
    onnx = sys.modules.get("torch.onnx")  # which PyTorch imports when it is first used
    return onnx is not None and bool(onnx.is_in_onnx_export())


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replace hadagen's operators in an exported program by PyTorch's own, so that it runs without hadagen.

    program: what `torch.export.export` returned. Its other operators stay. Results differ from those of the program by
    roundings of float32, so a value that is nearly in the middle between two codes may get either.

    Raises TypeError for anything else.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise TypeError(f"program is a {type(program).__name__}; pass what torch.export.export returned")
    with _decomposing():
        return program.run_decompositions(TABLE)  # type: ignore[no-any-return]


@contextmanager
def _decomposing() -> Iterator[None]:
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


# ---- transforms and rotations ----------------------------------------------------------------------------------------
def transform(x: torch.Tensor, scale: float) -> torch.Tensor:
    """(x · H_n) · scale, as `hadamard_transform` has it."""
    columns = x.shape[-1]
    n = padded_length(columns)
    rows = torch.nn.functional.pad(x, (0, n - columns)) if n > columns else x
    y = _transformed(rows.reshape(-1, n).to(_wide(x)), n) * scale
    return y[:, :columns].reshape(x.shape).to(x.dtype).contiguous()


def rotation(of: Any, x: torch.Tensor | None = None) -> torch.Tensor:
    """The rotated rows of a linear `Call`. x: other rows to take in place of those of the call."""
    spec, x = of.spec, of.x if x is None else x
    if not spec.n:
        return transform(x, of.scale)
    first, last = (of.signs_after, of.signs) if spec.transposed else (of.signs, of.signs_after)
    y = x.to(_wide(x)).reshape(-1, spec.n)
    if first is not None:
        y = y * _signs(first, spec.n, y)
    y = _transformed(y, spec.n // prod(spec.orders))
    right = spec.n  # elements behind one index of the next matrix and all indices before it
    for matrix in unpack_matrices(of.matrices, spec.orders):
        right //= len(matrix)
        y = _multiplied(y, (matrix.T if spec.transposed else matrix).to(y.dtype), right)
    y = y.reshape(-1, spec.n) * of.scale
    if spec.swapped:
        digits = (spec.n.bit_length() - 1) // 2
        order = [axis for digit in range(digits) for axis in (2 * digit + 2, 2 * digit + 1)]
        y = y.reshape(-1, *(2,) * (2 * digits)).permute(0, *order).reshape(-1, spec.n)
    if last is not None:
        y = y * _signs(last, spec.n, y)
    return y.reshape(x.shape).to(x.dtype)  # type: ignore[no-any-return]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _transformed(y: torch.Tensor, n: int) -> torch.Tensor:
    """y · H_n over rows of n elements of y."""
    bits = n.bit_length() - 1
    count = -(-bits // (_FACTOR.bit_length() - 1))
    right = 1
    for at in range(count):
        order = 1 << (bits * (at + 1) // count - bits * at // count)
        y = _multiplied(y, _hadamard(order, y), right)
        right *= order
    return y


def _multiplied(y: torch.Tensor, matrix: torch.Tensor, right: int) -> torch.Tensor:
    """The product of a matrix [K, K] with the index of y that has `right` elements behind it."""
    order = len(matrix)
    return y.reshape(-1, order) @ matrix.T if right == 1 else matrix @ y.reshape(-1, order, right)


# ---- operands. No tensor is made of values, because a trace of an exported program cannot hold a new one -------------
def _hadamard(order: int, like: torch.Tensor) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while len(h) < order:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def _kron(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    order = len(a) * len(b)
    return (a[:, None, :, None] * b[None, :, None, :]).reshape(order, order)


def _signs(packed: torch.Tensor, n: int, like: torch.Tensor) -> torch.Tensor:
    """The n numbers of ±1 of `unpack_signs`, of another tensor's type."""
    masks = 2 ** torch.arange(8, dtype=torch.int32, device=packed.device)
    negative = torch.bitwise_and(packed[: -(-n // 8), None].int(), masks).bool().reshape(-1)[:n]
    return 1 - 2 * negative.to(like.dtype)


def named_matrix(named: Sequence[list[list[int]]], n: int, device: torch.device) -> torch.Tensor:
    """The entries of the matrices of a name as `rotation` takes them, float64, for rows of n."""
    return _combined([_literal(each, device) for each in named], n).flatten()


def regular_signs(n: int, device: torch.device) -> torch.Tensor:
    """`regular_diagonal` as operators take signs."""
    signs = torch.ones(1, 1, dtype=torch.float64, device=device)
    while signs.numel() < n:
        signs = (signs * _literal([[1, 1, 1, -1]], device)).reshape(-1, 1)
    bits = torch.nn.functional.pad((signs[:, 0] < 0).int(), (0, -n % 8)).reshape(-1, 8)
    return (bits * 2 ** torch.arange(8, device=device)).sum(1).to(torch.uint8)


def stored_matrix(
    matrices: torch.Tensor | None,
    signs: torch.Tensor | None,
    signs_after: torch.Tensor | None,
    named: Sequence[list[list[int]]],
    orders: Sequence[int],
    n: int,
    scale: str,
) -> torch.Tensor:
    """The same of the sealed buffers that `stored_on` takes.

    named: the matrices of the name, if none are given.
    """
    if matrices is None:
        device = next(each.device for each in (signs, signs_after) if each is not None)
        parts, whole = [_literal(each, device) for each in named], True
    else:
        count = sum(order**2 for order in orders)
        size = (matrices.numel() - TRAILER - len(orders)) // count
        entries, whole = _numbers(matrices[: count * size].reshape(count, size)), size == 1
        split = entries.split([order**2 for order in orders])  # type: ignore[no-untyped-call]
        parts = [part.reshape(order, order) for part, order in zip(split, orders, strict=True)]
        # Each with rows of norm 1 on average; the call multiplies by the scale.
        parts = [part / ((part * part).mean().sqrt() * len(part) ** 0.5) for part in parts]
        parts[0] = parts[0] * ((n // prod(orders)) ** -0.5 / float(scale))
    if not whole:
        return torch.cat([part.flatten() for part in parts])
    made = _combined(parts, n)
    made = made if signs is None else made * _signs(signs, n, made)
    made = made if signs_after is None else made * _signs(signs_after, n, made)[:, None]
    return made.flatten()


def _combined(parts: list[torch.Tensor], n: int) -> torch.Tensor:
    """The matrix that `combined` makes of several of −1, 0 and 1."""
    order = prod(map(len, parts))
    return _kron(reduce(_kron, parts), _hadamard(kernel_order(order, n // order) // order, parts[0]))


def _literal(matrix: list[list[int]], device: torch.device) -> torch.Tensor:
    """A matrix of ±1, float64, of integers with a bit for each entry."""
    entries = [entry for row in matrix for entry in row]
    words = [sum((entry < 0) << at for at, entry in enumerate(entries[i : i + 31])) for i in range(0, len(entries), 31)]
    made = torch.stack([torch.full((), word, dtype=torch.int64, device=device) for word in words])
    negative = made[:, None] // 2 ** torch.arange(31, device=device) % 2
    return (1 - 2 * negative.reshape(-1)[: len(entries)].double()).reshape(len(matrix), -1)


def _numbers(stored: torch.Tensor) -> torch.Tensor:
    """The float64 of numbers that are stored as bytes: uint8 [count, size] of int8, float32 or float64. By arithmetic,
    as ONNX does not look at bits."""
    *low, last = stored.double().unbind(1)
    negative = (last > 127).double()
    if not low:
        return last - 256 * negative
    bits, bias = (23, 127) if len(low) == 3 else (52, 1023)  # of the fraction, and of the exponent
    split = 1 << bits % 8  # the byte before the last has the end of the exponent, and then the start of the fraction
    high = (low.pop() / split).floor()
    exponent = (last - 128 * negative) * (256 // split) + high
    fraction = stored.double()[:, -2] - high * split
    for byte in reversed(low):
        fraction = fraction * 256 + byte
    is_normal = (exponent > 0).double()
    value = (fraction * 2.0**-bits + is_normal) * 2.0 ** (exponent + (1 - is_normal) - bias)
    return value * (1 - 2 * negative)


# ---- codes -----------------------------------------------------------------------------------------------------------
def quantized(of: Any, x: torch.Tensor, values: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a `Call` with a format, for a contiguous x in place of its own.

    values: float32 numbers of x's shape to take in place of x. Raises `UsageError` for a format that ONNX has no
    operators for, if `torch.onnx.export` runs.
    """
    form = of.spec.form
    has_floats = (
        form.element in (Element.INT8, Element.E4M3) and form.scale == "float32" and form.rule != "power_of_two"
    )
    if in_onnx_export() and not (has_floats and form.layout is Layout.ROW_MAJOR):
        raise UsageError(
            f"{form.text} cannot be exported to ONNX; choose int8-row, or an fp8 format with the rule exact or fa3 and "
            "the layout row-major"
        )
    rows = rotation(of, (x if values is None else values).float())
    if of.spec.round_first:
        rows = rows.to(x.dtype).float()
    taken, quotients, scales = quantizer.scaled_by(rows.reshape(-1, rows.shape[-1]), form, x.dtype, of.tensor_scale)
    # Codes are not reshaped, which ONNX Runtime cannot do with FP8.
    codes = quantizer.encode(form, quotients.reshape(rows.shape), taken.reshape(rows.shape))
    if form.group == TENSOR:
        return codes, x.new_zeros((), dtype=torch.float32)
    if form.layout is not Layout.ROW_MAJOR:
        matrices = x.shape[:-2] if form.layout is Layout.BATCHED_SWIZZLED else ()
        return codes, quantizer.laid_out(scales, form.layout, matrices)
    kept = scales.shape[1:] if form.group != ROW or form.keeps_dimension else ()
    return codes, scales.reshape(*x.shape[:-1], *kept)
