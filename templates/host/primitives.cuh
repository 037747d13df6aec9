// The primitives of device/primitives.cuh for a C++ compiler: same names, same meaning, one kernel source for both.
#pragma once

#include <algorithm>
#include <cmath>

#include "machine.hpp"
#include "numbers.hpp"
#include "words.cuh"

#define __global__ __attribute__((visibility("default")))
#define __launch_bounds__(...)
#define __cluster_dims__(...)

#define HADAGEN_SHARED(name) ::hadagen::byte* const name = ::hadagen::machine::self->shared

namespace hadagen {

// ---- who am I ------------------------------------------------------------------------------------------------------
HADAGEN_INLINE u32 thread_index() { return machine::self->thread; }
HADAGEN_INLINE i64 block_index() { return machine::self->block; }
HADAGEN_INLINE i64 grid_blocks() { return machine::self->blocks; }
HADAGEN_INLINE u32 cluster_rank() { return machine::self->rank; }

// ---- global memory -------------------------------------------------------------------------------------------------
HADAGEN_INLINE Vec16 load16(const void* global) {
    Vec16 v;
    machine::load(&v, global, sizeof v);
    return v;
}
HADAGEN_INLINE Vec16 load16_if(const void* global, bool inside) { return inside ? load16(global) : zero16(); }
HADAGEN_INLINE void store16(void* global, Vec16 v) { machine::store(global, &v, sizeof v); }

// Element i of a vector, which is zero before.
template <class T> HADAGEN_INLINE void load_element(Vec16& v, int i, const void* global) {
    machine::load(reinterpret_cast<byte*>(&v) + i * T::bytes, global, T::bytes);
}
template <class T> HADAGEN_INLINE void store_element(void* global, Vec16 v, int i) {
    machine::store(global, reinterpret_cast<const byte*>(&v) + i * T::bytes, T::bytes);
}

// What is neither x nor y, and which the kernel does not write: 8 bytes, or one.
HADAGEN_INLINE u64 load_constant8(const void* global) {
    u64 value;
    machine::load(&value, global, sizeof value);
    return value;
}
HADAGEN_INLINE u32 load_byte_if(const void* global, bool inside) {
    byte value = 0;
    if (inside) machine::load(&value, global, sizeof value);
    return value;
}

// What a kernel writes besides vectors, and one fp32 that it reads.
HADAGEN_INLINE void store8(void* global, u32 low, u32 high) {
    const u32 words[2] = {low, high};
    machine::store(global, words, sizeof words);
}
HADAGEN_INLINE void store4(void* global, u32 word) { machine::store(global, &word, 4); }
HADAGEN_INLINE void store2(void* global, u32 word) { machine::store(global, &word, 2); }
HADAGEN_INLINE void store1(void* global, u32 word) { machine::store(global, &word, 1); }
HADAGEN_INLINE float load_float(const void* global) {
    float value;
    machine::load(&value, global, sizeof value);
    return value;
}

// ---- packed pairs --------------------------------------------------------------------------------------------------
template <class T> HADAGEN_INLINE u32 encode_pair(double low, double high) {
    return encode<T>(low) | u32(encode<T>(high)) << 16;
}
template <class T> HADAGEN_INLINE u32 pack(float low, float high) { return encode_pair<T>(low, high); }
template <class T> HADAGEN_INLINE float low(u32 pair) { return decode<T>(u16(pair)); }
template <class T> HADAGEN_INLINE float high(u32 pair) { return decode<T>(u16(pair >> 16)); }

HADAGEN_INLINE u32 as_word(float f) { return bit_cast<u32>(f); }
HADAGEN_INLINE float as_float(u32 word) { return bit_cast<float>(word); }

// Bytes `first` and the next, each as the upper byte of a half.
template <int first> HADAGEN_INLINE u32 spread_bytes(u32 bytes) {
    return (bytes >> 8 * first & 0xFFu) << 8 | (bytes >> 8 * (first + 1) & 0xFFu) << 24;
}

// Two fp32, cut off to bfloat16.
HADAGEN_INLINE u32 high_halves(float low, float high) { return as_word(low) >> 16 | (as_word(high) & 0xFFFF0000u); }

// An fp32 cut off to tf32, as an mma does by itself with those it is given.
HADAGEN_INLINE float cut_to_tf32(float f) { return as_float(as_word(f) & 0xFFFFE000u); }

// What is cut off of it, which is 13 bits at most, made ready to be cut off itself. Times 1 + 2^-10 / 3 and cut off it
// is rounded to the nearest 11 bits, half of the ties up; what has no more than 11 stays as it is. On the way it is
// 2^11 times as large and rounded toward zero, which ends at the largest finite value: so nothing becomes an infinity.
// NaN stays NaN.
HADAGEN_INLINE float below_tf32(float f) {
    const double product = double(f - cut_to_tf32(f)) * (0x1p11f + 2.0f / 3.0f);  // exact
    float rounded = float(product);
    if (std::fabs(rounded) > std::fabs(product)) rounded = std::nextafter(rounded, 0.0f);
    return rounded * 0x1p-11f;
}

// One rounding each: the fp64 result is exact wherever one factor is ±1, or a · b + a with b the correction of a scale.
template <class T> HADAGEN_INLINE u32 fma(u32 a, u32 b, u32 c) {
    return encode_pair<T>(double(low<T>(a)) * low<T>(b) + low<T>(c), double(high<T>(a)) * high<T>(b) + high<T>(c));
}
template <class T> HADAGEN_INLINE u32 add(u32 a, u32 b) {
    return encode_pair<T>(double(low<T>(a)) + low<T>(b), double(high<T>(a)) + high<T>(b));
}
template <class T> HADAGEN_INLINE u32 sub(u32 a, u32 b) {
    return encode_pair<T>(double(low<T>(a)) - low<T>(b), double(high<T>(a)) - high<T>(b));
}

// |a| + b of pairs of float16, from 0 to 1.
HADAGEN_INLINE u32 part_of_1(u32 a, u32 b) {
    const auto part = [](float size, float more) { return std::fmin(std::fmax(std::fabs(size) + more, 0.0f), 1.0f); };
    return pack<float16>(part(low<float16>(a), low<float16>(b)), part(high<float16>(a), high<float16>(b)));
}

// The larger of two bfloat16 without their signs, in both halves; the sign of the result means nothing.
HADAGEN_INLINE u32 larger_of_bfloat16(u32 a, u32 b) {
    const auto larger = [](u16 first, u16 second) {
        const u16 sign = (first ^ second) & 0x8000u;
        const float values[2] = {std::fabs(decode<bfloat16>(first)), std::fabs(decode<bfloat16>(second))};
        return u32(encode<bfloat16>(std::fmax(values[0], values[1])) | sign);
    };
    return larger(u16(a), u16(b)) | larger(u16(a >> 16), u16(b >> 16)) << 16;
}
// ---- fp32, each operation rounded once ------------------------------------------------------------------------------
HADAGEN_INLINE float product(float a, float b) { return a * b; }
HADAGEN_INLINE float sum(float a, float b) { return a + b; }
HADAGEN_INLINE float reciprocal_of(float a) { return 1.0f / a; }
// The same for a number that is neither very large nor very small.
HADAGEN_INLINE float reciprocal_of_usual(float a) { return 1.0f / a; }
HADAGEN_INLINE float fma(float a, float b, float c) { return std::fma(a, b, c); }
HADAGEN_INLINE float quotient_of(float a, float b) { return a / b; }
HADAGEN_INLINE float exp_of(float a) { return std::exp(a); }
HADAGEN_INLINE float erf_of(float a) { return std::erf(a); }
HADAGEN_INLINE float tanh_of(float a) { return std::tanh(a); }
HADAGEN_INLINE float quick_exp_of(float a) { return std::exp2(1.4426950408889634f * a); }
HADAGEN_INLINE float quick_quotient_of(float a, float b) { return std::fabs(b) > 0x1p126f ? a * 0.0f : a * (1.0f / b); }
HADAGEN_INLINE float full_quotient_of(float a, float b) { return a / b; }
HADAGEN_INLINE float quick_tanh_of(float a) {
    const float about = std::tanh(a) * (1.0f + 0x1p-12f);
    return about > 1.0f ? 1.0f : about < -1.0f ? -1.0f : about;
}
// The other one where one is NaN.
HADAGEN_INLINE float smaller(float a, float b) { return std::fmin(a, b); }
HADAGEN_INLINE float bigger(float a, float b) { return std::fmax(a, b); }
HADAGEN_INLINE float size_up_to(float a, float most) { return std::fmin(std::fabs(a), most); }
// The larger magnitude, NaN where one is NaN.
HADAGEN_INLINE float larger(float a, float b) {
    return as_float(std::max(as_word(a) & 0x7FFFFFFFu, as_word(b) & 0x7FFFFFFFu));
}

// The low, or the high bytes of four words, the first in the lowest.
HADAGEN_INLINE u32 low_bytes(const u32 (&words)[4]) {
    return (words[0] & 0xFFu) | (words[1] & 0xFFu) << 8 | (words[2] & 0xFFu) << 16 | words[3] << 24;
}
HADAGEN_INLINE u32 high_bytes(const u32 (&words)[4]) {
    return words[0] >> 24 | words[1] >> 24 << 8 | words[2] >> 24 << 16 | words[3] >> 24 << 24;
}
// Bytes of both in turn, of the low halves or of the high ones.
HADAGEN_INLINE u32 zip_low_bytes(u32 even, u32 odd) {
    return (even & 0xFFu) | (odd & 0xFFu) << 8 | (even >> 8 & 0xFFu) << 16 | (odd >> 8 & 0xFFu) << 24;
}
HADAGEN_INLINE u32 zip_high_bytes(u32 even, u32 odd) { return zip_low_bytes(even >> 16, odd >> 16); }
// Of the four halves of two words the low bytes; and bytes of ones where a half is negative, else of zeros.
HADAGEN_INLINE u32 even_bytes(u32 a, u32 b) {
    return (a & 0xFFu) | (a >> 16 & 0xFFu) << 8 | (b & 0xFFu) << 16 | (b >> 16 & 0xFFu) << 24;
}
HADAGEN_INLINE u32 signs_of_halves(u32 a, u32 b) { return even_bytes(a >> 15 & 0x10001u, b >> 15 & 0x10001u) * 0xFFu; }

// ---- the warp ------------------------------------------------------------------------------------------------------
HADAGEN_INLINE u32 shuffle_xor(u32 value, int lanes) { return machine::shuffle(value, (thread_index() ^ lanes) & 31u); }
HADAGEN_INLINE float shuffle_xor(float value, int lanes) { return as_float(shuffle_xor(as_word(value), lanes)); }
HADAGEN_INLINE float shuffle(float value, u32 lane) { return as_float(machine::shuffle(as_word(value), lane)); }

// other + value where the lane bit is 0, other − value where it is 1: one output of a butterfly across lanes.
HADAGEN_INLINE float butterfly_lane(float value, float other, bool lane_bit) {
    return other + (lane_bit ? -value : value);
}

// The largest in any lane.
HADAGEN_INLINE u32 largest_in_warp(u32 value) {
    for (int lanes = 1; lanes < 32; lanes *= 2) value = std::max(value, shuffle_xor(value, lanes));
    return value;
}

// Transposes an 8×8 matrix of 16-bit elements (movmatrix): swaps pair with lane2, lane0 with lane3, lane1 with lane4.
HADAGEN_INLINE u32 transpose(u32 pair) {
    const u32 lane = thread_index() & 31u, row = lane / 4u, from = lane % 4u * 8u + row / 2u, half = row % 2u * 16u;
    const u32 low = machine::shuffle(pair, from) >> half & 0xFFFFu;
    const u32 high = machine::shuffle(pair, from + 4u) >> half & 0xFFFFu;
    return low | high << 16;
}

// Whether an odd number of bits is set.
HADAGEN_INLINE u32 parity(u32 bits) { return u32(__builtin_parity(bits)); }

// A operand of `mma`: the 16×16 Hadamard matrix times a factor, an element in the low half of a word, with the 2×2 identity
// as its factor for the bits of `idle` in the numbers of rows and columns.
HADAGEN_INLINE Operand hadamard16(u32 factor, u32 idle) {
    const u32 lane = thread_index() & 31u;
    Operand a;
    for (int i = 0; i < 4; ++i) {
        a.word[i] = 0u;
        for (int half = 0; half < 2; ++half) {
            const u32 row = lane / 4u + 8u * (i & 1);
            const u32 column = 2u * (lane % 4u) + half + 8u * (i >> 1);
            const u32 sign = parity(row & column & ~idle) << 15;
            if (!((row ^ column) & idle)) a.word[i] |= (factor ^ sign) << (16 * half);
        }
    }
    return a;
}
HADAGEN_INLINE Operand hadamard16(u32 factor) { return hadamard16(factor, 0u); }

// The same with the other sign.
HADAGEN_INLINE Operand negative(const Operand& a) {
    Operand other = a;
    for (u32& word : other.word) word ^= 0x80008000u;
    return other;
}

// d += a · b, with b = {b0, b1} a 16×8 operand: mma.m16n8k16 with fp32 accumulators.
template <class T> HADAGEN_INLINE void mma(float (&d)[4], const Operand& a, u32 b0, u32 b1) {
    float left[8];
    for (int i = 0; i < 4; ++i) {
        left[2 * i] = low<T>(a.word[i]);
        left[2 * i + 1] = high<T>(a.word[i]);
    }
    const float right[4] = {low<T>(b0), high<T>(b0), low<T>(b1), high<T>(b1)};
    machine::mma(d, left, right);
}

// The same with fp32 values that are cut off to tf32, as two mma.m16n8k8: rows 2t and 2t + 1 of b, t = lane % 4, in the
// first, rows 2t + 8 and 2t + 9 in the second.
HADAGEN_INLINE WideOperand hadamard16_tf32(u32 factor) {
    const u32 lane = thread_index() & 31u;
    WideOperand a;
    for (int i = 0; i < 8; ++i) {
        const u32 row = lane / 4u + 8u * (i & 1);
        const u32 column = 2u * (lane % 4u) + (i >> 1 & 1) + 8u * (i >> 2);
        a.word[i] = factor << 16 ^ parity(row & column) << 31;
    }
    return a;
}
HADAGEN_INLINE void mma(float (&d)[4], const WideOperand& a, float b0, float b1, float b8, float b9) {
    const float b[4] = {cut_to_tf32(b0), cut_to_tf32(b1), cut_to_tf32(b8), cut_to_tf32(b9)};
    for (int i = 0; i < 2; ++i) {
        float left[4];
        for (int j = 0; j < 4; ++j) left[j] = cut_to_tf32(as_float(a.word[4 * i + j]));
        machine::mma(d, left, {b[2 * i], b[2 * i + 1]});
    }
}

// d += a · b of an `Operand` with packed accumulators, rounded to 16 bits: d = {row lane/4, row lane/4 + 8}.
template <class T> HADAGEN_INLINE void mma(u32 (&d)[2], const Operand& a, u32 b0, u32 b1) {
    float wide[4] = {low<T>(d[0]), high<T>(d[0]), low<T>(d[1]), high<T>(d[1])};
    mma<T>(wide, a, b0, b1);
    d[0] = pack<T>(wide[0], wide[1]);
    d[1] = pack<T>(wide[2], wide[3]);
}

// ---- the block and the cluster -------------------------------------------------------------------------------------
HADAGEN_INLINE void grid_dependency_sync() { machine::grid_dependency_sync(); }
HADAGEN_INLINE void trigger_dependents() { machine::trigger_dependents(); }
HADAGEN_INLINE void warp_sync() { machine::warp_sync(); }
HADAGEN_INLINE void block_sync() { machine::block_sync(); }
HADAGEN_INLINE void cluster_arrive() { machine::cluster_arrive(); }
HADAGEN_INLINE void cluster_arrive_relaxed() { machine::cluster_arrive_relaxed(); }
HADAGEN_INLINE void cluster_wait() { machine::cluster_wait(); }

HADAGEN_INLINE Vec16 shared_load16(const byte* shared) { return machine::shared_load(shared); }
HADAGEN_INLINE void shared_store16(byte* shared, Vec16 v) { machine::shared_store(shared, &v, sizeof v); }
HADAGEN_INLINE void shared_store4(byte* shared, u32 word) { machine::shared_store(shared, &word, sizeof word); }

// Four 8×8 matrices of 16-bit elements, whose rows the lanes point at, as the left operand of an mma (ldmatrix).
HADAGEN_INLINE void load_rows(u32 (&words)[4], const byte* row) {
    machine::spread_rows(machine::shared_load(row), words, false);
}
// The same, each matrix transposed, as the right operands of two mma.
HADAGEN_INLINE void load_columns(u32 (&words)[4], const byte* row) {
    machine::spread_rows(machine::shared_load(row), words, true);
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------
HADAGEN_INLINE void cp_async16(byte* shared, const void* global) { machine::copy_async(shared, global); }
// The same, with zeros instead of what lies at `global` where it is not inside the array; nothing is read there.
HADAGEN_INLINE void cp_async16_or_zero(byte* shared, const void* global, bool inside) {
    machine::copy_async(shared, inside ? global : nullptr);
}
HADAGEN_INLINE void cp_async_commit() { machine::copy_async_commit(); }
// Waits until at most `pending` of this thread's newest groups are under way.
template <int pending> HADAGEN_INLINE void cp_async_wait() { machine::copy_async_wait(pending); }

// An mbarrier for one arrival a phase. One thread calls `barrier_init` for each; all threads meet before use.
HADAGEN_INLINE void barrier_init(u64* barrier) { machine::barrier_init(barrier); }
// An mbarrier for so many arrivals a phase.
HADAGEN_INLINE void barrier_init(u64* barrier, u32 arrivals) { machine::barrier_init(barrier, arrivals); }
// Whoever waits for the end of the phase sees what this thread has done.
HADAGEN_INLINE void barrier_arrive(u64* barrier) { machine::barrier_arrive(barrier); }
// Arrives at the barrier, whose phase ends when so many bytes, a multiple of 16, have landed. One thread calls it.
HADAGEN_INLINE void barrier_expect(u64* barrier, u32 bytes) { machine::barrier_expect(barrier, bytes); }
// Starts copying `bytes`, which the barrier expects. One thread calls it.
HADAGEN_INLINE void bulk_copy_expected(byte* shared, const void* global, u32 bytes, u64* barrier) {
    machine::bulk_copy(shared, global, bytes, barrier);
}
// The same, and arrives at the barrier, which waits for these bytes alone.
HADAGEN_INLINE void bulk_copy(byte* shared, const void* global, u32 bytes, u64* barrier) {
    barrier_expect(barrier, bytes);
    bulk_copy_expected(shared, global, bytes, barrier);
}
// Starts copying `bytes` to the same place in the shared memory of each of the `blocks` of the cluster; lands at the same
// barrier of each, which must expect them by itself. One thread calls it.
HADAGEN_INLINE void bulk_multicast(byte* shared, const void* global, u32 bytes, u64* barrier, u32 blocks) {
    machine::bulk_multicast(shared, global, bytes, barrier, blocks);
}
// Bulk copies that start after a `block_sync` from here overwrite nothing that this thread has yet to read.
HADAGEN_INLINE void bulk_copy_fence() { machine::bulk_copy_fence(); }
// Asks L2 to bring in `bytes`, a multiple of 16; nobody waits for it. One thread calls it.
HADAGEN_INLINE void bulk_prefetch(const void* global, u32 bytes) { machine::bulk_prefetch(global, bytes); }
// Waits for the end of the barrier's phase of this parity (0, 1, 0, …).
HADAGEN_INLINE void barrier_wait(u64* barrier, u32 parity) { machine::barrier_wait(barrier, parity, false); }
// The same where other blocks have stored.
HADAGEN_INLINE void remote_barrier_wait(u64* barrier, u32 parity) { machine::barrier_wait(barrier, parity, true); }

// Starts storing to the same place in the shared memory of block `rank` of the cluster; lands at the same barrier there.
HADAGEN_INLINE void remote_shared_store16(byte* shared, u32 rank, Vec16 v, u64* barrier) {
    machine::remote_shared_store(shared, rank, v, barrier);
}

// ---- products of four warps ----------------------------------------------------------------------------------------
// Where boxes begin in shared memory: at a multiple of 1024 bytes, from byte 128 to 1024 on.
HADAGEN_INLINE byte* boxes_in(byte* shared) { return shared + 1024 - (reinterpret_cast<u64>(shared) & 1023u); }

// Starts d = A · X, for four warps that each have 16 rows of A. A thread gets rows lane / 4 and lane / 4 + 8 of its warp, those
// behind these; of each, columns 2 (lane % 4) and the next of every eight. X: boxes of 64 columns and `16 steps` rows of 128
// bytes, whose vectors are swizzled. A is the sum of `pieces` matrices, whose operands come one behind the other.
template <class T, u32 pieces = 1, u32 planes = 1, int count, u32 operands>
HADAGEN_INLINE void multiply_boxes(float (&d)[count], const Operand (&a)[operands], const byte* boxes) {
    machine::begin_product({d, u32(count), a[0].word, operands / pieces, pieces, planes, boxes, [](u16 bits) { return decode<T>(bits); }});
}
// Operands of four warps in shared memory, for `multiply_boxes`, 2048 bytes apart: 8×8 parts of 16 rows and columns, two of each
// eight rows one behind the other.
template <u32 operands> struct SharedOperands {
    byte* at;  // of the four warps
    mutable Operand read[operands] = {};  // as long as a product is under way
    byte* mine(u32 i, u32 w) const {
        return at + 2048 * i + 512 * (thread_index() / 32 % 4) + 4 * (thread_index() % 32) + 256 * (w % 2) + 128 * (w / 2);
    }
    HADAGEN_INLINE void store(u32 i, const Operand& a) const {
        for (u32 w = 0; w < 4; ++w) shared_store4(mine(i, w), a.word[w]);
    }
};
template <class T, u32 pieces = 1, u32 planes = 1, int count, u32 operands>
HADAGEN_INLINE void multiply_boxes(float (&d)[count], const SharedOperands<operands>& a, const byte* boxes) {
    const u32 word = thread_index() % 4;
    for (u32 i = 0; i < operands; ++i)
        for (u32 w = 0; w < 4; ++w) a.read[i].word[w] = machine::shared_load(a.mine(i, w) - 4 * word).word[word];
    multiply_boxes<T, pieces, planes>(d, a.read, boxes);
}
// Waits until d is there, and the boxes may be written again.
template <int count> HADAGEN_INLINE void wait_for_product(float (&d)[count]) { machine::end_product(d); }
// The same if it was begun.
template <int count> HADAGEN_INLINE void wait_for_product(float (&d)[count], bool begun) {
    if (begun) machine::end_product(d);
}

}  // namespace hadagen
