// The product by the second of two matrices.
#pragma once

#include "hadagen.cuh"

namespace hadagen {

// f = F · Cᵀ · scale, for a warp with 16 rows of F, by mma. f has sums as `multiply_boxes` leaves them: of each eight columns
// a thread has two neighbors, in two rows. In the result, a thread has eight neighbors of each 32 columns instead. If F has
// more than `length` columns, C multiplies each `length` of them.
// entries: `hadagen.problem.operands.pack_right` of C. products: 3, or 2 of the first piece of C alone. kept: where the warp
// `keeps` operands of F in shared memory, 64 · `length` bytes; else null.
template <u32 length, u32 products, bool keeps, int count>
HADAGEN_INLINE void multiply_right(float (&f)[count], const byte* entries, byte* kept, float scale) {
    constexpr u32 parts = length / 16, table = 2 * length * length, rows = 2 * count / length;
    constexpr u32 together = keeps ? 4 : 2;  // of 16 columns of the result, so that few mma wait for the one before
    const u32 lane = thread_index() & 31u;
    const byte* const mine = static_cast<const byte*>(__builtin_assume_aligned(entries, 16)) + 16 * lane;
    byte* const own = kept + 16 * lane;
#pragma unroll
    for (u32 row = 0; row < rows; ++row) {
        float* const upper = f + length / 4 * row, * const lower = upper + count / 2;
        Operand high[keeps ? 1 : parts], low[keeps ? 1 : parts];
#pragma unroll
        for (u32 k = 0; k < parts; ++k) {
            Operand& first = high[keeps ? 0 : k], & second = low[keeps ? 0 : k];
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                const float* const two = (w % 2 ? lower : upper) + 4 * k + w / 2 * 2;
                first.word[w] = pack<bfloat16>(two[0], two[1]);
                second.word[w] = pack<bfloat16>(two[0] - hadagen::low<bfloat16>(first.word[w]), two[1] - hadagen::high<bfloat16>(first.word[w]));
            }
            if (keeps) {
                shared_store16(own + 1024 * k, {{first.word[0], first.word[1], first.word[2], first.word[3]}});
                shared_store16(own + 1024 * k + 512, {{second.word[0], second.word[1], second.word[2], second.word[3]}});
            }
        }
#pragma unroll
        for (u32 part = 0; part < parts; part += together) {
            float sums[2 * together][4];
#pragma unroll
            for (u32 i = 0; i < 8 * together; ++i) sums[i / 4][i % 4] = 0.0f;
#pragma unroll(keeps ? 2 : parts)
            for (u32 k = 0; k < parts; ++k) {
                if (keeps) {
                    const Vec16 first = shared_load16(own + 1024 * k), second = shared_load16(own + 1024 * k + 512);
#pragma unroll
                    for (u32 w = 0; w < 4; ++w) high[0].word[w] = first.word[w], low[0].word[w] = second.word[w];
                }
                const Operand& first = high[keeps ? 0 : k], & second = low[keeps ? 0 : k];
                Operand c[2][together];
#pragma unroll
                for (u32 i = 0; i < together; ++i)
#pragma unroll
                    for (u32 piece = 0; piece < products - 1; ++piece) c[piece][i] = load_numbers(mine + table * piece + 512 * (parts * (part + i) + k));
#pragma unroll
                for (u32 product = 0; product < products; ++product)
#pragma unroll
                    for (u32 i = 0; i < 2 * together; ++i) {
                        const Operand& right = c[product / 2][i / 2];
                        mma<bfloat16>(sums[i], product == 1 ? second : first, right.word[i % 2], right.word[i % 2 + 2]);
                    }
            }
#pragma unroll
            for (u32 i = 0; i < 2 * together; ++i)
#pragma unroll
                for (u32 j = 0; j < 2; ++j) upper[4 * part + 2 * i + j] = scale * sums[i][j], lower[4 * part + 2 * i + j] = scale * sums[i][2 + j];
        }
    }
}

}  // namespace hadagen
