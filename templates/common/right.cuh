// The product by the second of two matrices.
#pragma once

#include "hadagen.cuh"

namespace hadagen {

// The left operand of `mma` whose words are the pairs in two rows of fp32 values, eight columns apart, as two bfloat16.
HADAGEN_INLINE void split_operand(Operand& first, Operand& second, const float* upper, const float* lower) {
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
        const float* const two = (w % 2 ? lower : upper) + w / 2 * 2;
        first.word[w] = pack<bfloat16>(two[0], two[1]);
        second.word[w] = pack<bfloat16>(two[0] - low<bfloat16>(first.word[w]), two[1] - high<bfloat16>(first.word[w]));
    }
}
HADAGEN_INLINE Vec16 as_vector(const Operand& a) { return {{a.word[0], a.word[1], a.word[2], a.word[3]}}; }
HADAGEN_INLINE Operand as_operand(Vec16 v) { return {{v.word[0], v.word[1], v.word[2], v.word[3]}}; }

// f = F · Cᵀ · scale, for a warp with 16 rows of F, by mma. f has sums as `multiply_boxes` leaves them: of each eight columns
// a thread has two neighbors, in two rows. In the result, a thread has eight neighbors of each 32 columns instead. If F has
// more than `length` columns, C multiplies each `length` of them, `at_once` times as many at a time.
// entries: `hadagen.problem.operands.pack_right` of C. products: 3, or 2 of the first piece of C alone. kept: where the warp
// `keeps` operands of F in shared memory, `at_once` · 64 · `length` bytes; else null.
template <u32 length, u32 products, bool keeps, u32 at_once, int count>
HADAGEN_INLINE void multiply_right(float (&f)[count], const byte* entries, byte* kept, float scale) {
    constexpr u32 parts = length / 16, table = 2 * length * length, rows = 2 * count / length;
    constexpr u32 together = keeps && at_once == 1 ? 4 : 2;  // of 16 columns of the result: so few mma wait for the one before
    const byte* const mine = static_cast<const byte*>(__builtin_assume_aligned(entries, 16)) + 16 * (thread_index() & 31u);
    byte* const own = kept + 16 * (thread_index() & 31u);
#pragma unroll
    for (u32 row = 0; row < rows; row += at_once) {
        float* const upper = f + length / 4 * row, * const lower = upper + count / 2;
        Operand left[2][at_once][keeps ? 1 : parts];
#pragma unroll
        for (u32 k = 0; k < parts * at_once; ++k) {
            Operand& first = left[0][k / parts][keeps ? 0 : k % parts], & second = left[1][k / parts][keeps ? 0 : k % parts];
            split_operand(first, second, upper + 4 * k, lower + 4 * k);
            if (keeps) {
                shared_store16(own + 1024 * k, as_vector(first));
                shared_store16(own + 1024 * k + 512, as_vector(second));
            }
        }
#pragma unroll
        for (u32 part = 0; part < parts; part += together) {
            float sums[at_once][2 * together][4];
#pragma unroll
            for (u32 i = 0; i < 8 * together * at_once; ++i) sums[i / (8 * together)][i / 4 % (2 * together)][i % 4] = 0.0f;
#pragma unroll(keeps ? 2 : parts)
            for (u32 k = 0; k < parts; ++k) {
                Operand right[products - 1][together];
#pragma unroll
                for (u32 i = 0; i < (products - 1) * together; ++i)
                    right[i / together][i % together] = load_numbers(mine + table * (i / together) + 512 * (parts * (part + i % together) + k));
#pragma unroll
                for (u32 r = 0; r < at_once; ++r) {
                    if (keeps) {
#pragma unroll
                        for (u32 piece = 0; piece < 2; ++piece) left[piece][r][0] = as_operand(shared_load16(own + 1024 * (parts * r + k) + 512 * piece));
                    }
#pragma unroll
                    for (u32 product = 0; product < products; ++product)
#pragma unroll
                        for (u32 i = 0; i < 2 * together; ++i) {
                            const Operand& c = right[product / 2][i / 2];
                            mma<bfloat16>(sums[r][i], left[product == 1][r][keeps ? 0 : k], c.word[i % 2], c.word[i % 2 + 2]);
                        }
                }
            }
#pragma unroll
            for (u32 r = 0; r < at_once; ++r)
#pragma unroll
                for (u32 i = 0; i < 4 * together; ++i) {
                    upper[length / 4 * r + 4 * part + i] = scale * sums[r][i / 2][i % 2];
                    lower[length / 4 * r + 4 * part + i] = scale * sums[r][i / 2][2 + i % 2];
                }
        }
    }
}

}  // namespace hadagen
