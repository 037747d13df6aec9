"""Triton kernels that multiply codes and apply their scales in the same kernel.

All compute y[m, n] = (Σ a[m, k] · w[n, k]) · row_scale[m] · weight_scale[n], rounded to the type of y, and then add the
bias, rounded again, as PyTorch adds one. a is [M, K], w [N, K], y [M, N], each contiguous. INT8 codes are summed in
int32, which is exact, so all kernels give the same bits. FP8 codes are summed in float32.
"""

# Types of Triton's language are none of Python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@triton.jit
def _tile(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, tile):
    """The place of a tile. GROUP rows of tiles are computed column by column, so that they find w in L2."""
    rows = tl.cdiv(M, BM)
    group = GROUP * tl.cdiv(N, BN)
    first = (tile // group) * GROUP
    size = min(rows - first, GROUP)
    inside = tile % group
    return first + inside % size, inside // size


@triton.jit
def _store(total, y, row_scale, weight_scale, bias, m, n, M, N, BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr):
    is_row, is_column = m < M, n < N
    of_rows = tl.load(row_scale + m, mask=is_row, other=0.0) if BY_ROW else tl.load(row_scale + m * 0)
    of_columns = tl.load(weight_scale + n, mask=is_column, other=0.0)
    out = (total.to(tl.float32) * of_rows[:, None] * of_columns[None, :]).to(y.dtype.element_ty)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) + added[None, :]).to(y.dtype.element_ty)
    tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], out, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["M"])
def multiply(
    a, w, y, row_scale, weight_scale, bias, M, N, K,
    BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of y for each block. WIDE: whether FP8 codes become float16 first. If not, the sums of BK products, of
    which wgmma keeps about 14 bits, are added in float32."""
    row, column = _tile(M, N, BM, BN, GROUP, tl.program_id(0))
    m, n, k = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    left = a + m[:, None].to(tl.int64) * K + k[None, :]
    right = w + (n % N)[None, :].to(tl.int64) * K + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32)
    for at in range(0, K, BK):
        x = tl.load(left, mask=(m < M)[:, None] & (k < K - at)[None, :], other=0.0)
        b = tl.load(right, mask=(k < K - at)[:, None], other=0.0)
        if WIDE:
            x, b = x.to(tl.float16), b.to(tl.float16)
        if WIDE or total.dtype == tl.int32:
            total = tl.dot(x, b, total, out_dtype=total.dtype)
        else:
            total += tl.dot(x, b)
        left += BK
        right += BK
    _store(total, y, row_scale, weight_scale, bias, m, n, M, N, BY_ROW, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def multiply_boxes(
    a, w, y, row_scale, weight_scale, bias, M, N, K, BLOCKS,
    BY_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same of INT8 codes, which tensor descriptors a and w load, with several tiles for each of BLOCKS blocks."""
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), BLOCKS, flatten=True):
        row, column = _tile(M, N, BM, BN, GROUP, tile)
        total = tl.zeros((BM, BN), dtype=tl.int32)
        for at in range(0, K, BK):
            total = tl.dot(a.load([row * BM, at]), w.load([column * BN, at]).T, total, out_dtype=tl.int32)
        m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        _store(total, y, row_scale, weight_scale, bias, m, n, M, N, BY_ROW, HAS_BIAS)
