#include "hadagen.cuh"

// The yardstick of kernels that read or write more than one buffer of `elements` 16-bit elements, a multiple of 8. It
// reads x and `inputs` buffers at more_x, $vectors 16-byte vectors of each a thread. It writes codes and scales as
// copy_codes.cu does, or with codes_of_vector = 16 a buffer, and `outputs` buffers at more_y.
namespace hadagen {

extern "C" __global__ void __launch_bounds__($threads) $entry(const void* x, void* y, i64 elements, u32, void* scales, const void* more_x, void* more_y, u32 codes_of_vector, u32 vectors_of_scales, u32 inputs, u32 outputs) {
    const i64 count = elements / 8;
    const i64 first = block_index() * $tile_vectors + thread_index();
    Vec16 v[$vectors];
#pragma unroll
    for (int i = 0; i < $vectors; ++i) {
        const i64 at = first + i * $threads;
        v[i] = load16_if(static_cast<const byte*>(x) + 16 * at, at < count);
        for (u32 buffer = 0; buffer < inputs; ++buffer) {
            const Vec16 w = load16_if(static_cast<const byte*>(more_x) + 16 * (buffer * count + at), at < count);
#pragma unroll
            for (int word = 0; word < 4; ++word) v[i].word[word] ^= w.word[word];
        }
    }
#pragma unroll
    for (int i = 0; i < $vectors; ++i) {
        const i64 at = first + i * $threads;
        if (at >= count) continue;
        byte* const to = static_cast<byte*>(y) + codes_of_vector * at;
        if (codes_of_vector == 16) store16(to, v[i]);
        else if (codes_of_vector == 8) store8(to, v[i].word[0], v[i].word[1]);
        else if (codes_of_vector == 4) store4(to, v[i].word[0]);
        else store2(to, v[i].word[0]);
        if (vectors_of_scales && u32(at) % vectors_of_scales == 0) store4(static_cast<byte*>(scales) + 4 * (u32(at) / vectors_of_scales), v[i].word[2]);
        for (u32 buffer = 0; buffer < outputs; ++buffer) store16(static_cast<byte*>(more_y) + 16 * (buffer * count + at), v[i]);
    }
}

}  // namespace hadagen
