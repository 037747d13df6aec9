#include "hadagen.cuh"

// The yardstick: a plain copy, ${vectors} 16-byte vectors a thread. `elements` is a multiple of 8; nothing is scaled.
namespace hadagen {

extern "C" __global__ void __launch_bounds__(${threads}) ${entry}(const void* x, void* y, i64 elements, u32) {
    const i64 bytes = 2 * elements;
    const i64 first = 16 * (block_index() * ${tile_vectors} + thread_index());
    Vec16 v[${vectors}];
#pragma unroll
    for (int i = 0; i < ${vectors}; ++i) {
        const i64 at = first + i * 16 * ${threads};
        if (at < bytes) v[i] = load16(static_cast<const byte*>(x) + at);
    }
#pragma unroll
    for (int i = 0; i < ${vectors}; ++i) {
        const i64 at = first + i * 16 * ${threads};
        if (at < bytes) store16(static_cast<byte*>(y) + at, v[i]);
    }
}

}  // namespace hadagen
