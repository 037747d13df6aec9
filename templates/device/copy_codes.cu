#include "hadagen.cuh"

// The yardstick of kernels that quantize: it reads 16-byte vectors, $vectors a thread, and writes 8, 4 or 2 bytes of codes for
// each, and a word of scales for every so many. `elements` is a multiple of 8; nothing is computed. With $several, that of
// kernels with a prologue: it also reads `inputs` arrays like x, one behind the other at more_x, and writes `outputs` arrays at
// more_y; and codes_of_vector may be 16, for a result that is not quantized.
namespace hadagen {

extern "C" __global__ void __launch_bounds__($threads) $entry(const void* x, void* y, i64 elements, u32, void* scales, u32 codes_of_vector, u32 vectors_of_scales
#if $several
    , const void* more_x, void* more_y, u32 inputs, u32 outputs
#endif
) {
    const i64 count = elements / 8;
    const i64 first = block_index() * $tile_vectors + thread_index();
    Vec16 v[$vectors];
#pragma unroll
    for (int i = 0; i < $vectors; ++i) {
        const i64 at = first + i * $threads;
        v[i] = load16_if(static_cast<const byte*>(x) + 16 * at, at < count);
#if $several
        for (u32 array = 0; array < inputs; ++array) {
            const Vec16 w = load16_if(static_cast<const byte*>(more_x) + 16 * (array * count + at), at < count);
#pragma unroll
            for (int word = 0; word < 4; ++word) v[i].word[word] ^= w.word[word];
        }
#endif
    }
#pragma unroll
    for (int i = 0; i < $vectors; ++i) {
        const i64 at = first + i * $threads;
        if (at >= count) continue;
        byte* const to = static_cast<byte*>(y) + codes_of_vector * at;
#if $several
        for (u32 array = 0; array < outputs; ++array) store16(static_cast<byte*>(more_y) + 16 * (array * count + at), v[i]);
        if (codes_of_vector == 16) store16(to, v[i]);
        else
#endif
        if (codes_of_vector == 8) store8(to, v[i].word[0], v[i].word[1]);
        else if (codes_of_vector == 4) store4(to, v[i].word[0]);
        else store2(to, v[i].word[0]);
        if (vectors_of_scales && u32(at) % vectors_of_scales == 0) store4(static_cast<byte*>(scales) + 4 * (u32(at) / vectors_of_scales), v[i].word[2]);
    }
}

}  // namespace hadagen
