"""Triton kernels that multiply codes and apply their scales in the same kernel.

All compute y[m, n] = (Σ a[m, k] · w[n, k]) · row_scale[m] · weight_scale[n], rounded to the type of y, and then add the
bias, rounded again, as PyTorch adds one. a is [M, K], w [N, K], y [M, N], each contiguous. INT8 codes are summed in
int32, which is exact, so all kernels give the same bits. FP8 codes are summed in float32. `multiply_pairs` takes codes
of 4 bits as w, as `hadagen.models.int4` packs them.
"""

# Types of Triton's language are none of Python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

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
def _store(total, y, row_scale, weight_scale, bias, m, n, M, N, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """SCALES: how many a has, "rows", "one" or "none"."""
    is_row, is_column = m < M, n < N
    out = total.to(tl.float32)
    if SCALES != "none":
        of_rows = tl.load(row_scale + m, mask=is_row, other=0.0) if SCALES == "rows" else tl.load(row_scale + m * 0)
        out = out * of_rows[:, None]
    of_columns = tl.load(weight_scale + n, mask=is_column, other=0.0)
    out = (out * of_columns[None, :]).to(y.dtype.element_ty)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) + added[None, :]).to(y.dtype.element_ty)
    tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], out, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["M"])
def multiply(
    a, w, y, row_scale, weight_scale, bias, M, N, K,
    SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr,
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
    _store(total, y, row_scale, weight_scale, bias, m, n, M, N, SCALES, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def multiply_boxes(
    a, w, y, row_scale, weight_scale, bias, M, N, K, BLOCKS,
    SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same of INT8 codes, which tensor descriptors a and w load, with several tiles for each of BLOCKS blocks."""
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), BLOCKS, flatten=True):
        row, column = _tile(M, N, BM, BN, GROUP, tile)
        total = tl.zeros((BM, BN), dtype=tl.int32)
        for at in range(0, K, BK):
            total = tl.dot(a.load([row * BM, at]), w.load([column * BN, at]).T, total, out_dtype=tl.int32)
        m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        _store(total, y, row_scale, weight_scale, bias, m, n, M, N, SCALES, HAS_BIAS)


# ---- codes of 4 bits -------------------------------------------------------------------------------------------------
# A byte of u is a code + 8, so u · factor + 128 - 8 · factor is the code times its factor, + 128: from 0 to 240 for
# factors up to 16. So one multiplication and addition of 32 bits makes four products, and none carries into the next.
_SCALED: Any = tl.constexpr(
    "{{ .reg .b32 u, c; shr.u32 u, $1, {shift}; lop3.b32 u, u, 0x0F0F0F0F, 0x08080808, 0x6A;"
    " mad.lo.s32 c, $2, 0xF7F7F7F8, 0x80808080; mad.lo.u32 u, u, $2, c; xor.b32 $0, u, 0x80808080; }}"
)
_LOW: Any = tl.constexpr(_SCALED.value.format(shift=0))
_HIGH: Any = tl.constexpr(_SCALED.value.format(shift=4))


@triton.jit
def _scaled(pairs, factors, HIGH: tl.constexpr):
    """The codes in low or high nibbles, times their factors, int8. Four codes of a word have one factor: threads hold
    four or more neighbors of a row, if the address of the codes is a multiple of 16 bytes."""
    text: tl.constexpr = _HIGH if HIGH else _LOW
    return tl.inline_asm_elementwise(text, "=r,r,r,r,r,r", [pairs, factors], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _operand(pairs, factor, HIGH: tl.constexpr, TYPE: tl.constexpr):
    """The codes of rows times their factors, in a type."""
    if tl.int8 == TYPE:
        return _scaled(pairs, tl.broadcast_to(factor[:, None], pairs.shape), HIGH)
    # Registers of 16-bit operands have fewer elements of a row.
    return _scaled(pairs, tl.full(pairs.shape, 1, tl.int32), HIGH).to(TYPE) * factor.to(TYPE)[:, None]


@triton.jit(do_not_specialize=["M"])
def multiply_pairs(
    a, w, y, row_scale, weight_scale, factors, bias, sums, M, N, BYTES,
    SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    HALF: tl.constexpr, SPANS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of y for each block, of rows of BYTES of w. Codes of w go from memory shared by a block to registers, and
    from there to the tensor cores, because w is the left operand.

    factors: one for each span of 2 · HALF codes, SPANS of them in a word, or HAS_FACTORS is false. A step takes SPANS
    spans. WIDE: whether FP8 codes of a become float16 first. Values of a are multiplied by codes in their own type.
    SPLITS: the blocks that share the steps of a tile of INT8 codes. They add their sums in `sums`: zeros of int32
    [M, N], and behind them one for each tile, which counts blocks. The last one makes the tile of y.
    """
    row, column = _tile(M, N, BM, BN, GROUP, tl.program_id(0) // SPLITS)
    m, n, k = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, HALF)
    left = w + (n % N)[:, None].to(tl.int64) * BYTES + k[None, :]
    right = a + (m % M)[None, :].to(tl.int64) * (2 * BYTES) + k[:, None]
    steps = BYTES // (HALF * SPANS)
    part = tl.program_id(0) % SPLITS
    first, end = steps * part // SPLITS, steps * (part + 1) // SPLITS
    words = factors + (n % N).to(tl.int64) * steps
    word = tl.load(words + first).to(tl.int32) if HAS_FACTORS else tl.full((BN,), 1, tl.int32)
    total = tl.zeros((BN, BM), dtype=tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32)
    other = total  # of high nibbles in small tiles, whose products would wait for each other
    for step in range(first, end):
        if HAS_FACTORS:  # of the next step, while this one computes
            ahead = tl.load(words + min(step + 1, steps - 1)).to(tl.int32)
        for at in tl.static_range(SPANS):
            span = step * SPANS + at
            pairs = tl.load(left + span * HALF)
            low, high = tl.load(right + span * (2 * HALF)), tl.load(right + span * (2 * HALF) + HALF)
            factor = word >> (8 * at) & 255 if HAS_FACTORS else word
            if WIDE:
                low, high = low.to(tl.float16), high.to(tl.float16)
            total = tl.dot(_operand(pairs, factor, False, low.dtype), low, total, out_dtype=total.dtype)
            if BM <= 32:
                other = tl.dot(_operand(pairs, factor, True, low.dtype), high, other, out_dtype=total.dtype)
            else:
                total = tl.dot(_operand(pairs, factor, True, low.dtype), high, total, out_dtype=total.dtype)
        if HAS_FACTORS:
            word = ahead
    total += other
    if SPLITS > 1:
        inside = (n < N)[:, None] & (m < M)[None, :]
        place = sums + m[None, :].to(tl.int64) * N + n[:, None]
        tl.atomic_add(place, total, mask=inside, sem="relaxed")
        tl.debug_barrier()  # before the count, which releases the sums of all threads
        count = tl.atomic_add(sums + M.to(tl.int64) * N + tl.program_id(0) // SPLITS, 1)
        if count < SPLITS - 1:
            return
        total = tl.load(place, mask=inside, other=0, cache_modifier=".cg")
    _store(total.T, y, row_scale, weight_scale, bias, m, n, M, N, SCALES, HAS_BIAS)


@triton.jit
def unpack(w, factors, y, SPANS, HAS_FACTORS: tl.constexpr, HALF: tl.constexpr, COUNT: tl.constexpr):
    """The codes of COUNT of SPANS spans of 2 · HALF codes, times their factors, int8."""
    span = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside, k = (span < SPANS)[:, None], tl.arange(0, HALF)
    pairs = tl.load(w + span[:, None] * HALF + k[None, :], mask=inside, other=0)
    factor = (
        tl.load(factors + span, mask=span < SPANS, other=1).to(tl.int32)
        if HAS_FACTORS
        else tl.full((COUNT,), 1, tl.int32)
    )
    factor = tl.broadcast_to(factor[:, None], (COUNT, HALF))
    place = y + span[:, None] * (2 * HALF) + k[None, :]
    tl.store(place, _scaled(pairs, factor, False), mask=inside)
    tl.store(place + HALF, _scaled(pairs, factor, True), mask=inside)
