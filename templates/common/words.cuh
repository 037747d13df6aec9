// What values are made of. Both headers of primitives and the host's machine speak of these.
#pragma once

#ifdef __CUDACC__
#define HADAGEN_INLINE __device__ __forceinline__
#else
#define HADAGEN_INLINE inline
#endif

namespace hadagen {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using byte = unsigned char;

// Element types, of `bytes` each. `exponent_bias`, `mantissa_bits`: of a 16-bit format; `one`: the packed pair (+1, +1).
// Enumerators, because NVRTC keeps a static member as a variable of the module, which nvcc drops.
struct float16 {
    enum : int { bytes = 2, exponent_bias = 15, mantissa_bits = 10 };
    enum : u32 { one = 0x3C003C00 };
};
struct bfloat16 {
    enum : int { bytes = 2, exponent_bias = 127, mantissa_bits = 7 };
    enum : u32 { one = 0x3F803F80 };
};
struct float32 {
    enum : int { bytes = 4 };
};

// Sixteen bytes: four registers, each a packed pair of 16-bit elements or one fp32.
struct alignas(16) Vec16 {
    u32 word[4];
};
HADAGEN_INLINE Vec16 zero16() { return Vec16{{0u, 0u, 0u, 0u}}; }

// The bits of an fp32 → those of the nearest bfloat16, of two equally near the even one; NaN → 0x7FFF, as GPUs give it
// that have an instruction for this.
HADAGEN_INLINE u32 round_to_bfloat16(u32 single) {
    const bool is_nan = (single & 0x7FFFFFFFu) > 0x7F800000u;
    return is_nan ? 0x7FFFu : single + 0x7FFFu + (single >> 16 & 1u) >> 16;
}

// A operands of `mma`: of m16n8k16, in pairs, and of two m16n8k8, in fp32.
struct Operand {
    u32 word[4];
};
struct WideOperand {
    u32 word[8];
};

}  // namespace hadagen
