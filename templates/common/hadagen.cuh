// What kernels include: the primitives of what they are compiled for, and what is said in terms of those.
#pragma once

#include "primitives.cuh"

namespace hadagen {

// ---- global memory -------------------------------------------------------------------------------------------------
// The first `count` elements of a vector, of any number; the others read as zero and are not written.
template <class T> HADAGEN_INLINE Vec16 load_elements(const void* global, i64 count) {
    Vec16 v = zero16();
#pragma unroll
    for (int i = 0; i < 16 / T::bytes; ++i)
        if (i < count) load_element<T>(v, i, static_cast<const byte*>(global) + i * T::bytes);
    return v;
}
template <class T> HADAGEN_INLINE void store_elements(void* global, Vec16 v, i64 count) {
#pragma unroll
    for (int i = 0; i < 16 / T::bytes; ++i)
        if (i < count) store_element<T>(static_cast<byte*>(global) + i * T::bytes, v, i);
}

// Whether rows `pitch` bytes apart can be moved in whole vectors.
HADAGEN_INLINE bool in_vectors(const void* rows, i64 pitch) { return (reinterpret_cast<u64>(rows) | pitch) % 16 == 0; }

// ---- scales --------------------------------------------------------------------------------------------------------
HADAGEN_INLINE u32 low_half(u32 pair) { return pair & 0xFFFFu; }
HADAGEN_INLINE u32 high_half(u32 pair) { return pair >> 16; }

// Takes a power of two out of the scale, at most 1 and at least 2^-bits, and gives it as a bfloat16.
HADAGEN_INLINE u32 take_power(float& scale, u32 bits) {
    const u32 exponent = as_word(scale) >> 23 & 0xFFu, least = 127u - bits;
    const u32 taken = exponent < least ? least : exponent > 127u ? 127u : exponent;
    scale *= as_float(254u - taken << 23);
    return taken << 7;
}

// ---- the matrix and the signs of a transform -----------------------------------------------------------------------
// A left operand of `mma` whose 16-bit entries have eight zeros each behind a byte, as the bytes of a lane lie in memory.
HADAGEN_INLINE Operand load_operand(const byte* entries) {
    const u64 bytes = load_constant8(entries);
    const u32 first = u32(bytes), second = u32(bytes >> 32);
    return {{spread_bytes<0>(first), spread_bytes<2>(first), spread_bytes<0>(second), spread_bytes<2>(second)}};
}
// The same with whole 16-bit numbers.
HADAGEN_INLINE Operand load_numbers(const byte* numbers) {
    const u64 first = load_constant8(numbers), second = load_constant8(numbers + 8);
    return {{u32(first), u32(first >> 32), u32(second), u32(second >> 32)}};
}
// The same with entries of −1, 0 and 1. Such bytes stand for them in float16, and for 2^-7 times them in bfloat16.
template <class T> HADAGEN_INLINE Operand load_entries(const byte* entries);
template <> HADAGEN_INLINE Operand load_entries<float16>(const byte* entries) {
    return load_operand(entries);
}
template <> HADAGEN_INLINE Operand load_entries<bfloat16>(const byte* entries) {
    Operand a = load_operand(entries);
#pragma unroll
    for (int i = 0; i < 4; ++i) a.word[i] = fma<bfloat16>(a.word[i], 0x43004300u, 0x80008000u);
    return a;
}

// The operand at row `row` and column `column` of A ⊗ H, H of order 2^fold, with the signs of −1 and entries as `load_operand`
// gives them, or as `load_numbers` does if they have two bytes; zeros in rows from `order` on. A has `operands` times 16 rows,
// as the bytes of its operands lie in memory.
template <u32 fold, u32 operands, u32 bytes = 1> HADAGEN_INLINE Operand load_folded(const void* matrix, u32 row, u32 column, u32 order) {
    const u32 lane = thread_index() & 31u, inner = (1u << fold) - 1;
    Operand a;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const u32 r = row + lane / 4u + 8u * (w % 2), c = column + lane % 4u * 2u + 8u * (w / 2);
        const u32 i = r >> fold, j = c >> fold;
        const u32 at = 256u * (i / 16u * operands + j / 16u) + 8u * (i % 8u * 4u + j % 8u / 2u) + i % 16u / 8u * 2u + j % 16u / 8u * 4u + j % 2u;
        const byte* const first = static_cast<const byte*>(matrix) + bytes * at;
        u32 entry = load_byte_if(first, r < order);
        if (bytes == 2) entry |= load_byte_if(first + 1, r < order) << 8;
        a.word[w] = entry * (bytes == 2 ? 0x00010001u : 0x01000100u) ^ parity(r & c & inner) << 15 ^ parity(r & (c + 1u) & inner) << 31;
    }
    return a;
}

// The signs of a vector whose first element is number at + more of a row, or of several rows of n elements: bit i is 1
// where element i is negated. None are if `signs` is null, or not `inside`. more: a constant multiple of 8, for an address
// that several vectors share.
template <class T, u32 n> HADAGEN_INLINE u32 sign_bits(const void* signs, u32 at, u32 more = 0, bool inside = true) {
    const u32 bits = load_byte_if(static_cast<const byte*>(signs) + at / 8 + more / 8, signs && inside);
    if (n < 8) return (bits & (1u << n) - 1) * (0xFFu / ((1u << n) - 1));
    return T::bytes == 4 ? bits >> at % 8 : bits;
}
template <class T> HADAGEN_INLINE Vec16 flip_signs(Vec16 v, u32 bits) {
    const u32 pairs = bits | bits << 15;
#pragma unroll
    for (int w = 0; w < 4; ++w) v.word[w] ^= T::bytes == 4 ? bits << (31 - w) & 0x80000000u : pairs << (15 - 2 * w) & 0x80008000u;
    return v;
}
// Those of one pair of a vector of 16-bit elements, of a row of at least eight elements: what its word is combined with.
HADAGEN_INLINE u32 pair_signs(const void* signs, u32 vector, u32 pair, bool inside = true) {
    const u32 bits = load_byte_if(static_cast<const byte*>(signs) + vector, signs && inside);
    return (bits | bits << 15) << (15 - 2 * pair) & 0x80008000u;
}

// d = A · X, for a warp that has 16 rows of A, by mma: d, X, pieces and planes as in `multiply_boxes`, which takes four warps
// and ends later.
template <class T, u32 pieces = 1, u32 planes = 1, int count, u32 operands>
HADAGEN_INLINE void multiply_boxes_alone(float (&d)[count], const Operand (&a)[operands], const byte* boxes) {
    constexpr u32 half = count / 2, steps = operands / pieces, box = 2048 * steps, plane = count / 32 * box;
    const u32 lane = thread_index() & 31u;
#pragma unroll
    for (int i = 0; i < count; ++i) d[i] = 0.0f;
#pragma unroll
    for (u32 k = 0; k < steps * planes; ++k)
#pragma unroll
        for (u32 vector = 0; vector < count / 4; vector += 2) {  // two of a row at once
            const byte* const rows = boxes + plane * (k / steps) + box * (vector / 8) + 2048 * (k % steps);
            u32 x[4];
            load_columns(x, rows + 128 * (lane % 16) + 16 * ((vector % 8 + lane / 16) ^ lane % 8));
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                float* const upper = d + 2 * (vector + i), * const lower = upper + half;
                float sums[4] = {upper[0], upper[1], lower[0], lower[1]};
#pragma unroll
                for (u32 piece = 0; piece < pieces; ++piece) mma<T>(sums, a[steps * piece + k % steps], x[2 * i], x[2 * i + 1]);
                upper[0] = sums[0], upper[1] = sums[1], lower[0] = sums[2], lower[1] = sums[3];
            }
        }
}

// ---- fp32 values ---------------------------------------------------------------------------------------------------
// x, but no less than `least`, or no more than `most`; NaN stays NaN.
HADAGEN_INLINE float at_least(float x, float least) { return x < least ? least : x; }
HADAGEN_INLINE float at_most(float x, float most) { return x > most ? most : x; }
template <class T> HADAGEN_INLINE float rounded(float x) { return low<T>(pack<T>(x, 0.0f)); }
template <> HADAGEN_INLINE float rounded<float32>(float x) { return x; }

// ---- butterflies ---------------------------------------------------------------------------------------------------
// other + value where the lane bit is 0, other − value where it is 1: one output of a butterfly across lanes.
template <class T> HADAGEN_INLINE u32 butterfly_lane(u32 value, u32 other, bool lane_bit) {
    return fma<T>(value, lane_bit ? T::one | 0x80008000u : T::one, other);
}

// ---- bfloat16 in the range of float16 ------------------------------------------------------------------------------
// The bits of the larger half, without its sign.
HADAGEN_INLINE u32 peak_of_bfloat16(u32 pair) {
    const u32 low = pair & 0x7FFFu, high = pair >> 16 & 0x7FFFu;
    return low > high ? low : high;
}

// The level of values of which the largest is this bfloat16, without sign: its biased exponent, with the last three bits set.
HADAGEN_INLINE u32 level_of_bfloat16(u32 magnitude) { return magnitude >> 7 | 7u; }

// 2^(127 - level) as a bfloat16, which is subnormal for the highest level. Times it, all values are below 2.
HADAGEN_INLINE u32 normalizer_of(u32 level) { return level == 255u ? 0x20u : 254u - level << 7; }

// A pair of float16, brought from a level to one that is so much higher: by a power of two, or zero.
HADAGEN_INLINE u32 lower_float16(u32 pair, u32 by) {
    const u32 power = by < 15u ? 15u - by << 10 : by < 25u ? 1u << (24u - by) : 0u;
    return fma<float16>(pair, power * 0x10001u, 0x80008000u);
}

// scale · 2^(level - 127), as two factors of which the first is 1 unless the product were subnormal, or infinite while
// results are not.
struct Undo {
    float first, second;
};
HADAGEN_INLINE Undo undo_level(float scale, u32 level) {
    const u32 exponent = (as_word(scale) >> 23 & 0xFFu) + level;
    if (exponent < 150u) return {0x1p-96f, scale * 0x1p96f * as_float(level << 23)};
    if (exponent >= 340u || level == 255u) return {0x1p64f, scale * as_float(level - 64u << 23)};
    return {1.0f, scale * as_float(level << 23)};
}

}  // namespace hadagen
