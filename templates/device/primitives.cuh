// Device primitives: the only place where PTX appears.
// The header of the same name under host/ gives the same functions to a C++ compiler, so one kernel source runs on both.
//
// An instruction that an older GPU lacks is replaced there, under `#if __CUDA_ARCH__`. Results are the same, but for the
// order in which an mma sums. Instructions that nothing replaces are the features of `hadagen/plan/arch.py`: a kernel for a GPU
// without them does not use their primitives.
#pragma once

#include "words.cuh"

#define HADAGEN_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace hadagen {

// ---- who am I ------------------------------------------------------------------------------------------------------
HADAGEN_INLINE u32 thread_index() { return threadIdx.x; }
HADAGEN_INLINE i64 block_index() { return blockIdx.x; }
HADAGEN_INLINE i64 grid_blocks() { return gridDim.x; }
HADAGEN_INLINE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// ---- global memory -------------------------------------------------------------------------------------------------
HADAGEN_INLINE Vec16 load16(const void* global) {
    Vec16 v;
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(global));
    return v;
}
// The vector where `inside`, zeros where not. The address is computed either way, off the path of the condition.
HADAGEN_INLINE Vec16 load16_if(const void* global, bool inside) {
    Vec16 v = zero16();
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.v4.b32 {%0,%1,%2,%3}, [%4];}"
                 : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3])
                 : "l"(global), "r"(int(inside)));
    return v;
}

HADAGEN_INLINE void store16(void* global, Vec16 v) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(global), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

// Element i of a vector, which is zero before.
template <class T> HADAGEN_INLINE void load_element(Vec16& v, int i, const void* global) {
    if (T::bytes == 4) v.word[i] = *static_cast<const u32*>(global);
    else v.word[i / 2] |= u32(*static_cast<const u16*>(global)) << (16 * (i % 2));
}
template <class T> HADAGEN_INLINE void store_element(void* global, Vec16 v, int i) {
    if (T::bytes == 4) *static_cast<u32*>(global) = v.word[i];
    else *static_cast<u16*>(global) = u16(v.word[i / 2] >> (16 * (i % 2)));
}

// What is neither x nor y, and which the kernel does not write: 8 bytes, or one.
HADAGEN_INLINE u64 load_constant8(const void* global) { return *static_cast<const u64*>(global); }
HADAGEN_INLINE u32 load_byte_if(const void* global, bool inside) {
    u32 value;
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0;\n"
        "@p ld.global.u8 %0, [%1]; }"
        : "=r"(value) : "l"(global), "r"(u32(inside)));
    return value;
}

// What a kernel writes besides vectors, and one fp32 that it reads.
HADAGEN_INLINE void store8(void* global, u32 low, u32 high) {
    asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(global), "r"(low), "r"(high) : "memory");
}
HADAGEN_INLINE void store4(void* global, u32 word) { *static_cast<u32*>(global) = word; }
HADAGEN_INLINE void store2(void* global, u32 word) { *static_cast<u16*>(global) = u16(word); }
HADAGEN_INLINE void store1(void* global, u32 word) { *static_cast<byte*>(global) = byte(word); }
HADAGEN_INLINE float load_float(const void* global) { return *static_cast<const float*>(global); }

// ---- packed pairs --------------------------------------------------------------------------------------------------
template <class T> HADAGEN_INLINE u32 pack(float low, float high);
#if __CUDA_ARCH__ >= 800
template <> HADAGEN_INLINE u32 pack<float16>(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
template <> HADAGEN_INLINE u32 pack<bfloat16>(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
#else
template <> HADAGEN_INLINE u32 pack<float16>(float low, float high) {
    u32 d;
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(d)
        : "f"(low), "f"(high));
    return d;
}
template <> HADAGEN_INLINE u32 pack<bfloat16>(float low, float high) {
    return round_to_bfloat16(__float_as_uint(low)) | round_to_bfloat16(__float_as_uint(high)) << 16;
}
#endif

template <class T> HADAGEN_INLINE float low(u32 pair);
template <class T> HADAGEN_INLINE float high(u32 pair);
template <> HADAGEN_INLINE float low<float16>(u32 pair) {
    float f;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair));
    return f;
}
template <> HADAGEN_INLINE float high<float16>(u32 pair) {
    float f;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair));
    return f;
}
template <> HADAGEN_INLINE float low<bfloat16>(u32 pair) { return __uint_as_float(pair << 16); }
template <> HADAGEN_INLINE float high<bfloat16>(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

HADAGEN_INLINE u32 as_word(float f) { return __float_as_uint(f); }
HADAGEN_INLINE float as_float(u32 word) { return __uint_as_float(word); }

// Bytes `first` and the next, each as the upper byte of a half.
template <int first> HADAGEN_INLINE u32 spread_bytes(u32 bytes) { return __byte_perm(bytes, 0u, 0x0404 + 0x1010 * first + 0x1000); }

// Two fp32, cut off to bfloat16.
HADAGEN_INLINE u32 high_halves(float low, float high) { return __byte_perm(as_word(low), as_word(high), 0x7632); }

// An fp32 cut off to tf32, as an mma does by itself with those it is given.
HADAGEN_INLINE float cut_to_tf32(float f) { return as_float(as_word(f) & 0xFFFFE000u); }

// What is cut off of it, which is 13 bits at most, made ready to be cut off itself. Times 1 + 2^-10 / 3 and cut off it
// is rounded to the nearest 11 bits, half of the ties up; what has no more than 11 stays as it is. On the way it is
// 2^11 times as large and rounded toward zero, which ends at the largest finite value: so nothing becomes an infinity.
// NaN stays NaN.
HADAGEN_INLINE float below_tf32(float f) { return __fmul_rz(f - cut_to_tf32(f), 0x1p11f + 2.0f / 3.0f) * 0x1p-11f; }

template <class T> HADAGEN_INLINE u32 add(u32 a, u32 b);
template <class T> HADAGEN_INLINE u32 sub(u32 a, u32 b);
template <class T> HADAGEN_INLINE u32 fma(u32 a, u32 b, u32 c);
#define HADAGEN_FMA(T, suffix)                                                                                         \
    template <> HADAGEN_INLINE u32 fma<T>(u32 a, u32 b, u32 c) {                                                       \
        u32 d;                                                                                                         \
        asm("fma.rn." suffix " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));                                   \
        return d;                                                                                                      \
    }
HADAGEN_FMA(float16, "f16x2")
HADAGEN_FMA(bfloat16, "bf16x2")
#undef HADAGEN_FMA
#define HADAGEN_SUMS(T, suffix)                                                                                        \
    template <> HADAGEN_INLINE u32 add<T>(u32 a, u32 b) {                                                              \
        u32 d;                                                                                                         \
        asm("add.rn." suffix " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));                                               \
        return d;                                                                                                      \
    }                                                                                                                  \
    template <> HADAGEN_INLINE u32 sub<T>(u32 a, u32 b) {                                                              \
        u32 d;                                                                                                         \
        asm("sub.rn." suffix " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));                                               \
        return d;                                                                                                      \
    }
HADAGEN_SUMS(float16, "f16x2")
#if __CUDA_ARCH__ >= 900
HADAGEN_SUMS(bfloat16, "bf16x2")
#else  // a product with ±1 is exact, so the sum is rounded once too
template <> HADAGEN_INLINE u32 sub<bfloat16>(u32 a, u32 b) { return fma<bfloat16>(b, bfloat16::one | 0x80008000u, a); }
#if __CUDA_ARCH__ >= 800
template <> HADAGEN_INLINE u32 add<bfloat16>(u32 a, u32 b) { return fma<bfloat16>(a, bfloat16::one, b); }
#else  // an fp32 has so many more bits that rounding to it first changes nothing
template <> HADAGEN_INLINE u32 add<bfloat16>(u32 a, u32 b) {
    return pack<bfloat16>(low<bfloat16>(a) + low<bfloat16>(b), high<bfloat16>(a) + high<bfloat16>(b));
}
#endif
#endif
#undef HADAGEN_SUMS

// |a| + b of pairs of float16, from 0 to 1.
HADAGEN_INLINE u32 part_of_1(u32 a, u32 b) {
    u32 d;
    asm("{.reg .b32 size; abs.f16x2 size, %1; add.rn.sat.f16x2 %0, size, %2;}" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// The larger of two bfloat16 without their signs, in both halves; the sign of the result means nothing.
HADAGEN_INLINE u32 larger_of_bfloat16(u32 a, u32 b) {
    u32 d;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// ---- fp32, each operation rounded once ------------------------------------------------------------------------------
HADAGEN_INLINE float product(float a, float b) { return __fmul_rn(a, b); }
HADAGEN_INLINE float sum(float a, float b) { return __fadd_rn(a, b); }
HADAGEN_INLINE float reciprocal_of(float a) { return __frcp_rn(a); }
// The same for a number that is neither very large nor very small, and whose fraction bits are not all 1 (P. Markstein,
// "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
HADAGEN_INLINE float reciprocal_of_usual(float a) {
    float about;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(a));
    return __fmaf_rn(__fmaf_rn(-a, about, 1.0f), about, about);
}
HADAGEN_INLINE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HADAGEN_INLINE float quotient_of(float a, float b) { return __fdiv_rn(a, b); }
// Functions of CUDA's library, and those of the special function units, whose errors are a few units in the last place (CUDA
// C++ Programming Guide, "Mathematical Functions"; PTX ISA, "Floating Point Instructions").
HADAGEN_INLINE float exp_of(float a) { return expf(a); }
HADAGEN_INLINE float erf_of(float a) { return erff(a); }
HADAGEN_INLINE float tanh_of(float a) { return tanhf(a); }
// __expf and __fdividef, as -use_fast_math compiles them: subnormal numbers are zeros.
HADAGEN_INLINE float quick_exp_of(float a) {
    float d;
    asm("{.reg .f32 e; mul.rn.ftz.f32 e, %1, 0f3FB8AA3B; ex2.approx.ftz.f32 %0, e;}" : "=f"(d) : "f"(a));
    return d;
}
HADAGEN_INLINE float quick_quotient_of(float a, float b) {
    float d;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
HADAGEN_INLINE float full_quotient_of(float a, float b) {
    float d;
    asm("div.full.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
HADAGEN_INLINE float quick_tanh_of(float a) {
    float d;
    asm("tanh.approx.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}
// The other one where one is NaN.
HADAGEN_INLINE float smaller(float a, float b) { return fminf(a, b); }
HADAGEN_INLINE float bigger(float a, float b) { return fmaxf(a, b); }
HADAGEN_INLINE float size_up_to(float a, float most) { return fminf(fabsf(a), most); }
// The larger magnitude, NaN where one is NaN.
HADAGEN_INLINE float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(fabsf(a)), "f"(fabsf(b)));
    return d;
#else
    return as_float(max(as_word(a) & 0x7FFFFFFFu, as_word(b) & 0x7FFFFFFFu));
#endif
}

// The low, or the high bytes of four words, the first in the lowest.
HADAGEN_INLINE u32 low_bytes(const u32 (&words)[4]) {
    return __byte_perm(__byte_perm(words[0], words[1], 0x0040), __byte_perm(words[2], words[3], 0x0040), 0x5410);
}
HADAGEN_INLINE u32 high_bytes(const u32 (&words)[4]) {
    return __byte_perm(__byte_perm(words[0], words[1], 0x0073), __byte_perm(words[2], words[3], 0x0073), 0x5410);
}
// Bytes of both in turn, of the low halves or of the high ones.
HADAGEN_INLINE u32 zip_low_bytes(u32 even, u32 odd) { return __byte_perm(even, odd, 0x5140); }
HADAGEN_INLINE u32 zip_high_bytes(u32 even, u32 odd) { return __byte_perm(even, odd, 0x7362); }
// Of the four halves of two words the low bytes; and bytes of ones where a half is negative, else of zeros.
HADAGEN_INLINE u32 even_bytes(u32 a, u32 b) { return __byte_perm(a, b, 0x6420); }
HADAGEN_INLINE u32 signs_of_halves(u32 a, u32 b) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, 0xFDB9;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

#if __CUDA_ARCH__ >= 890
#define HADAGEN_CONVERTS_TO_E4M3
// Two values to E4M3, in 16 bits. What is beyond 448 becomes 448, and NaN 0x7F.
HADAGEN_INLINE u32 pack_e4m3(float low, float high) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
}
#endif

// ---- the warp ------------------------------------------------------------------------------------------------------
HADAGEN_INLINE u32 shuffle_xor(u32 value, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, value, lanes); }
HADAGEN_INLINE float shuffle_xor(float value, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, value, lanes); }
HADAGEN_INLINE float shuffle(float value, u32 lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }

// other + value where the lane bit is 0, other − value where it is 1: one output of a butterfly across lanes.
HADAGEN_INLINE float butterfly_lane(float value, float other, bool lane_bit) {
    return __fmaf_rn(value, lane_bit ? -1.0f : 1.0f, other);
}

// The largest in any lane.
HADAGEN_INLINE u32 largest_in_warp(u32 value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xFFFFFFFFu, value);
#else
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) value = max(value, shuffle_xor(value, lanes));
    return value;
#endif
}

// Transposes an 8×8 matrix of 16-bit elements (movmatrix): swaps pair with lane2, lane0 with lane3, lane1 with lane4.
HADAGEN_INLINE u32 transpose(u32 pair) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
    return d;
}

// Whether an odd number of bits is set.
HADAGEN_INLINE u32 parity(u32 bits) { return u32(__popc(bits) & 1); }

// Signs of the Hadamard matrix in row lane/4: of column 2 · (lane % 4) in bit 15, and of the one after it in bit 31.
HADAGEN_INLINE u32 hadamard_signs() {
    const u32 lane = thread_index() & 31u, common = lane & lane >> 3;
    return ((common ^ common >> 1) << 15 & 0x8000u) * 0x10001u ^ (lane << 29 & 0x80000000u);
}

// Zeros that the compiler cannot tell to be. An mma reads registers in a row: equal words that seem to differ have a
// register each from the start, and are not copied for every mma.
struct Zeros {
    u32 first, second;
};
HADAGEN_INLINE Zeros hidden_zeros() {
    const u32 lane = thread_index() & 31u;
    u32 same, below;
    asm("mov.u32 %0, %%laneid;" : "=r"(same));
    asm("{.reg .u32 below; mov.u32 below, %%lanemask_lt; popc.b32 %0, below;}" : "=r"(below));
    return {lane ^ same, lane ^ below};
}

// A operand of `mma`: the 16×16 Hadamard matrix times a factor, an element in the low half of a word. Its rows and
// columns from 8 on are the first ones again, but for the sign where both are.
HADAGEN_INLINE Operand hadamard16(u32 factor) {
    const u32 word = factor * 0x10001u ^ hadamard_signs();
    const Zeros zero = hidden_zeros();
    return {{word, word ^ zero.first, word ^ zero.second, word ^ 0x80008000u}};
}

// The same with the 2×2 identity as its factor for the bits of `idle` (of the lower three) in the numbers of rows and columns: 0 where
// row and column differ in one of them.
HADAGEN_INLINE Operand hadamard16(u32 factor, u32 idle) {
    const u32 lane = thread_index() & 31u, row = lane / 4u, column = lane % 4u * 2u;
    const u32 even = (row ^ column) & idle ? 0u : 0xFFFFu, odd = (row ^ (column | 1u)) & idle ? 0u : 0xFFFF0000u;
    const u32 sign = parity(row & idle) << 15;  // which the bits have in the Hadamard matrix where they are the same
    Operand a = hadamard16(factor ^ sign);
#pragma unroll
    for (int i = 0; i < 4; ++i) a.word[i] &= even | odd;
    return a;
}

// The same with the other sign, in registers of its own.
HADAGEN_INLINE Operand negative(const Operand& a) {
    const Zeros zero = hidden_zeros();
    const u32 signs = 0x80008000u ^ zero.first ^ zero.second;
    return {{a.word[0] ^ signs, a.word[1] ^ signs, a.word[2] ^ signs, a.word[3] ^ signs}};
}

// d += a · b, with b = {b0, b1} a 16×8 operand: mma.m16n8k16 with fp32 accumulators.
template <class T> HADAGEN_INLINE void mma(float (&d)[4], const Operand& a, u32 b0, u32 b1);
#define HADAGEN_MMA(T, type)                                                                                           \
    template <> HADAGEN_INLINE void mma<T>(float (&d)[4], const Operand& a, u32 b0, u32 b1) {                          \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                             \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                           \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));              \
    }
#if __CUDA_ARCH__ >= 800
HADAGEN_MMA(float16, "f16")
#else  // two mma.m16n8k8, each with half of the columns of a and of the rows of b
template <> HADAGEN_INLINE void mma<float16>(float (&d)[4], const Operand& a, u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a.word[2 * i]), "r"(a.word[2 * i + 1]), "r"(b[i]));
}
#endif
HADAGEN_MMA(bfloat16, "bf16")
#undef HADAGEN_MMA

// The same with fp32 values that are cut off to tf32, as two mma.m16n8k8: rows 2t and 2t + 1 of b, t = lane % 4, in the
// first, rows 2t + 8 and 2t + 9 in the second.
HADAGEN_INLINE WideOperand hadamard16_tf32(u32 factor) {
    const u32 signs = hadamard_signs();
    const u32 even = factor << 16 ^ (signs << 16 & 0x80000000u), odd = factor << 16 ^ (signs & 0x80000000u);
    const Zeros zero = hidden_zeros();
    return {{even, even ^ zero.first, odd, odd ^ zero.first,
             even ^ zero.second, even ^ 0x80000000u, odd ^ zero.second, odd ^ 0x80000000u}};
}
HADAGEN_INLINE void mma(float (&d)[4], const WideOperand& a, float b0, float b1, float b8, float b9) {
    const float b[4] = {b0, b1, b8, b9};
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a.word[4 * i]), "r"(a.word[4 * i + 1]), "r"(a.word[4 * i + 2]), "r"(a.word[4 * i + 3]),
                       "r"(as_word(b[2 * i])), "r"(as_word(b[2 * i + 1])));
}

// d += a · b of an `Operand` with packed accumulators, rounded to 16 bits: d = {row lane/4, row lane/4 + 8}.
template <class T> HADAGEN_INLINE void mma(u32 (&d)[2], const Operand& a, u32 b0, u32 b1);
template <> HADAGEN_INLINE void mma<float16>(u32 (&d)[2], const Operand& a, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
        : "+r"(d[0]), "+r"(d[1])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
#else  // summed in fp32, because sums in 16 bits would be rounded between the two
    float wide[4] = {low<float16>(d[0]), high<float16>(d[0]), low<float16>(d[1]), high<float16>(d[1])};
    mma<float16>(wide, a, b0, b1);
    d[0] = pack<float16>(wide[0], wide[1]), d[1] = pack<float16>(wide[2], wide[3]);
#endif
}

// Waits until the kernels before this one in the stream have ended and their stores can be read: where the launch lets this
// one start early. Global memory is touched after it only.
HADAGEN_INLINE void grid_dependency_sync() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel in the stream start once every block has come here or ended; it waits as above.
HADAGEN_INLINE void trigger_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- the block and the cluster -------------------------------------------------------------------------------------
HADAGEN_INLINE u32 shared_address(const void* shared) { return u32(__cvta_generic_to_shared(shared)); }

HADAGEN_INLINE void warp_sync() { __syncwarp(); }
HADAGEN_INLINE void block_sync() { __syncthreads(); }

HADAGEN_INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Orders no memory access but `barrier_init`, so it waits for none.
HADAGEN_INLINE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
HADAGEN_INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

HADAGEN_INLINE Vec16 shared_load16(const byte* shared) { return *reinterpret_cast<const Vec16*>(shared); }
HADAGEN_INLINE void shared_store16(byte* shared, Vec16 v) { *reinterpret_cast<Vec16*>(shared) = v; }
HADAGEN_INLINE void shared_store4(byte* shared, u32 word) { *reinterpret_cast<u32*>(shared) = word; }

// Four 8×8 matrices of 16-bit elements, whose rows the lanes point at, as the left operand of an mma (ldmatrix).
HADAGEN_INLINE void load_rows(u32 (&words)[4], const byte* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed, as the right operands of two mma.
HADAGEN_INLINE void load_columns(u32 (&words)[4], const byte* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------
HADAGEN_INLINE void cp_async16(byte* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// The same, with zeros instead of what lies at `global` where it is not inside the array; nothing is read there.
HADAGEN_INLINE void cp_async16_or_zero(byte* shared, const void* global, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(inside ? 16u : 0u)
                 : "memory");
}
HADAGEN_INLINE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's newest groups are under way.
template <int pending> HADAGEN_INLINE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// An mbarrier for one arrival a phase. One thread calls `barrier_init` for each; all threads meet before use.
HADAGEN_INLINE void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                     shared_address(barrier))
                 : "memory");
}
// An mbarrier for so many arrivals a phase.
HADAGEN_INLINE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Whoever waits for the end of the phase sees what this thread has done.
HADAGEN_INLINE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives at the barrier, whose phase ends when so many bytes, a multiple of 16, have landed. One thread calls it.
HADAGEN_INLINE void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Starts copying `bytes`, which the barrier expects. One thread calls it.
HADAGEN_INLINE void bulk_copy_expected(byte* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
// The same, and arrives at the barrier, which waits for these bytes alone.
HADAGEN_INLINE void bulk_copy(byte* shared, const void* global, u32 bytes, u64* barrier) {
    barrier_expect(barrier, bytes);
    bulk_copy_expected(shared, global, bytes, barrier);
}
// Starts copying `bytes` to the same place in the shared memory of each of the `blocks` of the cluster; lands at the same
// barrier of each, which must expect them by itself. One thread calls it.
HADAGEN_INLINE void bulk_multicast(byte* shared, const void* global, u32 bytes, u64* barrier, u32 blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"((unsigned short)((1u << blocks) - 1))
        : "memory");
}
// Bulk copies that start after a `block_sync` from here overwrite nothing that this thread has yet to read: the unit that
// carries them out does not wait for loads under way.
HADAGEN_INLINE void bulk_copy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Asks L2 to bring in `bytes`, a multiple of 16; nobody waits for it. One thread calls it.
HADAGEN_INLINE void bulk_prefetch(const void* global, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
#define HADAGEN_BARRIER_WAIT(name, instruction)                                                                        \
    HADAGEN_INLINE void name(u64* barrier, u32 parity) {                                                               \
        asm volatile("{\n\t.reg .pred done;\n"                                                                         \
                     "again:\n\t" instruction " done, [%0], %1;\n\t"                                                    \
                     "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),                                          \
                     "r"(parity)                                                                                       \
                     : "memory");                                                                                      \
    }
// Waits for the end of the barrier's phase of this parity (0, 1, 0, …).
#if __CUDA_ARCH__ >= 900
HADAGEN_BARRIER_WAIT(barrier_wait, "mbarrier.try_wait.parity.shared::cta.b64")
#else  // asks again at once, instead of being woken
HADAGEN_BARRIER_WAIT(barrier_wait, "mbarrier.test_wait.parity.shared::cta.b64")
#endif
// The same where other blocks have stored.
HADAGEN_BARRIER_WAIT(remote_barrier_wait, "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64")
#undef HADAGEN_BARRIER_WAIT

HADAGEN_INLINE u32 remote_address(const void* shared, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(rank));
    return remote;
}
// Starts storing to the same place in the shared memory of block `rank` of the cluster; lands at the same barrier there.
HADAGEN_INLINE void remote_shared_store16(byte* shared, u32 rank, Vec16 v, u64* barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                     remote_address(shared, rank)),
                 "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "r"(remote_address(barrier, rank))
                 : "memory");
}

// ---- products of four warps ----------------------------------------------------------------------------------------
// Where boxes begin in shared memory: at a multiple of 1024 bytes, from byte 128 to 1024 on.
HADAGEN_INLINE byte* boxes_in(byte* shared) { return shared + 1024 - (shared_address(shared) & 1023u); }

// What boxes are multiplied from, as the tensor cores are told (PTX ISA, "Matrix Descriptor Format"): swizzled rows of 128
// bytes, the columns of X side by side, the next eight rows 1024 bytes on, and the next box after all rows. The same in
// all lanes, in a register of the warp. Rows 16 k and later begin 128 k further on.
struct Boxes {
    u32 low, high;
};
HADAGEN_INLINE Boxes boxes_of(const byte* boxes, u32 rows) {
    const u32 low = (128u * rows >> 4) << 16 | (shared_address(boxes) >> 4 & 0x3FFFu);
    return {__shfl_sync(0xFFFFFFFFu, low, 0), 1024u >> 4 | 1u << 30};
}

// d += A · X for 16 columns of A and rows 16 k and later of X, or d = A · X where it is the first product: wgmma. d has the
// sums of the upper eight rows behind all others. `further`: 128 k.
template <class T> HADAGEN_INLINE void wgmma(float (&d)[32], const Operand& a, const Boxes& boxes, u32 further, bool first);
template <class T> HADAGEN_INLINE void wgmma(float (&d)[64], const Operand& a, const Boxes& boxes, u32 further, bool first);
template <class T> HADAGEN_INLINE void wgmma(float (&d)[128], const Operand& a, const Boxes& boxes, u32 further, bool first);
// The same with A in shared memory.
template <class T> HADAGEN_INLINE void wgmma(float (&d)[32], const Boxes& a, const Boxes& boxes, u32 further, bool first);
template <class T> HADAGEN_INLINE void wgmma(float (&d)[64], const Boxes& a, const Boxes& boxes, u32 further, bool first);
template <class T> HADAGEN_INLINE void wgmma(float (&d)[128], const Boxes& a, const Boxes& boxes, u32 further, bool first);
#define HADAGEN_SUMS_8(is, t) is(d[2 * (t)]), is(d[2 * (t) + 1]), is(d[half + 2 * (t)]), is(d[half + 2 * (t) + 1])
#define HADAGEN_SUMS_32(is, t) HADAGEN_SUMS_8(is, t), HADAGEN_SUMS_8(is, t + 1), HADAGEN_SUMS_8(is, t + 2), HADAGEN_SUMS_8(is, t + 3)
#define HADAGEN_SUMS_64(is) HADAGEN_SUMS_32(is, 0), HADAGEN_SUMS_32(is, 4)
#define HADAGEN_SUMS_128(is) HADAGEN_SUMS_64(is), HADAGEN_SUMS_32(is, 8), HADAGEN_SUMS_32(is, 12)
#define HADAGEN_SUMS_256(is) HADAGEN_SUMS_128(is), HADAGEN_SUMS_32(is, 16), HADAGEN_SUMS_32(is, 20), HADAGEN_SUMS_32(is, 24), HADAGEN_SUMS_32(is, 28)
#define HADAGEN_NUMBERS_10(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define HADAGEN_NUMBERS_30 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," HADAGEN_NUMBERS_10(1) HADAGEN_NUMBERS_10(2)
#define HADAGEN_NUMBERS_60 HADAGEN_NUMBERS_30 HADAGEN_NUMBERS_10(3) HADAGEN_NUMBERS_10(4) HADAGEN_NUMBERS_10(5)
#define HADAGEN_NUMBERS_90 HADAGEN_NUMBERS_60 HADAGEN_NUMBERS_10(6) HADAGEN_NUMBERS_10(7) HADAGEN_NUMBERS_10(8)
#define HADAGEN_NUMBERS_120 HADAGEN_NUMBERS_90 HADAGEN_NUMBERS_10(9) HADAGEN_NUMBERS_10(10) HADAGEN_NUMBERS_10(11)
#define HADAGEN_NUMBERS_64 HADAGEN_NUMBERS_30 "%30,%31"
#define HADAGEN_NUMBERS_128 HADAGEN_NUMBERS_60 "%60,%61,%62,%63"
#define HADAGEN_NUMBERS_256 HADAGEN_NUMBERS_120 "%120,%121,%122,%123,%124,%125,%126,%127"
#define HADAGEN_IS_NEW(sum) "=f"(sum)
#define HADAGEN_IS_ADDED(sum) "+f"(sum)
#define HADAGEN_WGMMA_AS(is, adds, type, columns, left, low_at, high_at, further_at)                                    \
    asm volatile("{.reg .pred p; .reg .b32 at; .reg .b64 box; setp.ne.b32 p, " adds ", 0; add.u32 at, " low_at ", " further_at "; " \
                 "mov.b64 box, {at, " high_at "}; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " " \
                 "{" HADAGEN_NUMBERS_##columns "}, {" left "}, box, p, 1, 1, 1;}"                                      \
                 : HADAGEN_SUMS_##columns(is)                                                                          \
                 : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(boxes.low), "r"(boxes.high), "r"(further))
#define HADAGEN_WGMMA(T, type, columns, count, left, low_at, high_at, further_at)                                       \
    template <> HADAGEN_INLINE void wgmma<T>(float (&d)[count], const Operand& a, const Boxes& boxes, u32 further, bool first) { \
        constexpr int half = count / 2;                                                                                \
        if (first) HADAGEN_WGMMA_AS(HADAGEN_IS_NEW, "0", type, columns, left, low_at, high_at, further_at);             \
        else HADAGEN_WGMMA_AS(HADAGEN_IS_ADDED, "1", type, columns, left, low_at, high_at, further_at);                 \
    }
#define HADAGEN_STREAMED_WGMMA_AS(is, adds, type, columns, left_low, left_high, low_at, high_at, further_at)            \
    asm volatile("{.reg .pred p; .reg .b32 at; .reg .b64 left, box; setp.ne.b32 p, " adds ", 0; "                        \
                 "mov.b64 left, {" left_low ", " left_high "}; add.u32 at, " low_at ", " further_at "; "                  \
                 "mov.b64 box, {at, " high_at "}; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " " \
                 "{" HADAGEN_NUMBERS_##columns "}, left, box, p, 1, 1, 0, 1;}"                                           \
                 : HADAGEN_SUMS_##columns(is)                                                                          \
                 : "r"(a.low), "r"(a.high), "r"(boxes.low), "r"(boxes.high), "r"(further))
#define HADAGEN_STREAMED_WGMMA(T, type, columns, count, left_low, left_high, low_at, high_at, further_at)               \
    template <> HADAGEN_INLINE void wgmma<T>(float (&d)[count], const Boxes& a, const Boxes& boxes, u32 further, bool first) { \
        constexpr int half = count / 2;                                                                                \
        if (first) HADAGEN_STREAMED_WGMMA_AS(HADAGEN_IS_NEW, "0", type, columns, left_low, left_high, low_at, high_at, further_at); \
        else HADAGEN_STREAMED_WGMMA_AS(HADAGEN_IS_ADDED, "1", type, columns, left_low, left_high, low_at, high_at, further_at); \
    }
#define HADAGEN_WGMMAS(T, type)                                                                                        \
    HADAGEN_WGMMA(T, type, 64, 32, "%32,%33,%34,%35", "%36", "%37", "%38")                                              \
    HADAGEN_WGMMA(T, type, 128, 64, "%64,%65,%66,%67", "%68", "%69", "%70")                                             \
    HADAGEN_WGMMA(T, type, 256, 128, "%128,%129,%130,%131", "%132", "%133", "%134")                                     \
    HADAGEN_STREAMED_WGMMA(T, type, 64, 32, "%32", "%33", "%34", "%35", "%36")                                          \
    HADAGEN_STREAMED_WGMMA(T, type, 128, 64, "%64", "%65", "%66", "%67", "%68")                                         \
    HADAGEN_STREAMED_WGMMA(T, type, 256, 128, "%128", "%129", "%130", "%131", "%132")
HADAGEN_WGMMAS(float16, "f16")
HADAGEN_WGMMAS(bfloat16, "bf16")
#undef HADAGEN_WGMMAS
#undef HADAGEN_WGMMA
#undef HADAGEN_WGMMA_AS
#undef HADAGEN_STREAMED_WGMMA
#undef HADAGEN_STREAMED_WGMMA_AS

// Starts d = A · X, for four warps that each have 16 rows of A. A thread gets rows lane / 4 and lane / 4 + 8 of its warp, those behind
// these; of each, columns 2 (lane % 4) and the next of every eight. X: boxes of 64 columns and `16 steps` rows of 128 bytes.
// A is the sum of `pieces` matrices, whose operands come one behind the other, and X the sum of `planes` matrices, whose boxes do.
template <class T, u32 pieces = 1, u32 planes = 1, int count, u32 operands>
HADAGEN_INLINE void multiply_boxes(float (&d)[count], const Operand (&a)[operands], const byte* boxes) {
    constexpr u32 steps = operands / pieces, plane = count / 32 * 128 * steps;  // in 16 bytes
    const Boxes all = boxes_of(boxes, 16 * steps);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (u32 k = 0; k < operands * planes; ++k)
        wgmma<T>(d, a[k % operands], all, 128 * (k % steps) + k / operands * plane, k == 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Operands of four warps in shared memory, for `multiply_boxes`, 2048 bytes apart: 8×8 parts of 16 rows and columns, two of each
// eight rows one behind the other (PTX ISA, "Matrix Descriptor Format", no swizzling).
template <u32 operands> struct SharedOperands {
    byte* at;  // of the four warps
    HADAGEN_INLINE void store(u32 i, const Operand& a) const {
        byte* const mine = at + 2048 * i + 512 * (thread_index() / 32 % 4) + 4 * (thread_index() % 32);
#pragma unroll
        for (u32 w = 0; w < 4; ++w) shared_store4(mine + 256 * (w % 2) + 128 * (w / 2), a.word[w]);
    }
};
template <class T, u32 pieces = 1, u32 planes = 1, int count, u32 operands>
HADAGEN_INLINE void multiply_boxes(float (&d)[count], const SharedOperands<operands>& a, const byte* boxes) {
    constexpr u32 steps = operands / pieces, plane = count / 32 * 128 * steps;  // in 16 bytes
    const Boxes all = boxes_of(boxes, 16 * steps);
    const u32 low = __shfl_sync(0xFFFFFFFFu, 128u >> 4 << 16 | (shared_address(a.at) >> 4 & 0x3FFFu), 0);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (u32 k = 0; k < operands * planes; ++k)
        wgmma<T>(d, Boxes{low + 128 * (k % operands), 256u >> 4}, all, 128 * (k % steps) + k / operands * plane, k == 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until d is there, and the boxes may be written again.
template <int count> HADAGEN_INLINE void wait_for_product(float (&d)[count]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// The same if it was begun. ptxas lets other instructions run beside a product only if every path waits for it.
template <int count> HADAGEN_INLINE void wait_for_product(float (&d)[count], bool) { wait_for_product(d); }

}  // namespace hadagen
