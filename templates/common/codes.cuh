// What quantizes: scales of groups of values, and codes. Everything is rounded operation by operation, as PyTorch does it,
// so every GPU gives the same bits. The rules are those of `hadagen/truth/quantizer.py`.
#pragma once

#include "hadagen.cuh"

namespace hadagen {

// ---- magnitudes ----------------------------------------------------------------------------------------------------
HADAGEN_INLINE bool is_nan(float x) { return (as_word(x) & 0x7FFFFFFFu) > 0x7F800000u; }
HADAGEN_INLINE bool is_finite(float x) { return (as_word(x) & 0x7F800000u) != 0x7F800000u; }
HADAGEN_INLINE bool is_infinite(float x) { return (as_word(x) & 0x7FFFFFFFu) == 0x7F800000u; }
template <class T> HADAGEN_INLINE float least_normal() { return 0x1p-126f; }
template <> HADAGEN_INLINE float least_normal<float16>() { return 0x1p-14f; }
// The bits of an element of this value, in the low bytes.
template <class T> HADAGEN_INLINE u32 element_bits(float x) { return pack<T>(x, 0.0f); }
template <> HADAGEN_INLINE u32 element_bits<float32>(float x) { return as_word(x); }

// ---- small floats --------------------------------------------------------------------------------------------------
// The code of a float with so many fraction bits and 2^least as its least normal number, half to even; plus `code_of_zero`.
// It is in the low byte. size: a number that is not negative, and no larger than the largest.
template <int fraction, int least> HADAGEN_INLINE u32 code_of_zero() { return u32(127 + 23 - fraction + least) << fraction; }
template <int fraction, int least> HADAGEN_INLINE u32 encode_size(float size) {
    const u32 exponent = as_word(size) & 0x7F800000u, lowest = u32(127 + least) << 23;
    // In this sum the last bit is worth the last bit of the code. Its exponent tells how far up the code is.
    const u32 sum = as_word(fma(as_float(exponent < lowest ? lowest : exponent), float(1 << (23 - fraction)), size));
    return sum + (sum >> (23 - fraction));
}
// E4M3. What is beyond 448 becomes 448, and NaN 0x7F.
#ifdef HADAGEN_CONVERTS_TO_E4M3
HADAGEN_INLINE u32 e4m3_of(float x) { return pack_e4m3(x, 0.0f) & 0xFFu; }
#else
HADAGEN_INLINE u32 e4m3_of(float x) {
    if (is_nan(x)) return 0x7Fu;
    return (encode_size<3, -6>(size_up_to(x, 448.0f)) - code_of_zero<3, -6>() & 0x7Fu) | (as_word(x) >> 24 & 0x80u);
}
HADAGEN_INLINE u32 pack_e4m3(float low, float high) { return e4m3_of(low) | e4m3_of(high) << 8; }
#endif
HADAGEN_INLINE float of_e4m3_number(u32 code) { return product(as_float(code << 20), 0x1p120f); }
HADAGEN_INLINE float of_e4m3(u32 code) {
    return (code & 0x7Fu) == 0x7Fu ? as_float(0x7FFFFFFFu) : of_e4m3_number(code & 0x7Fu);
}

// ---- what values are divided by, or multiplied with ----------------------------------------------------------------
// Each has `bits`, the scale as it is stored; `exact`, a value over the scale; and `plain`, the same where nothing is very
// large or small (`is_quick`). What `quick_of` gives has `plain` alone; given the scale of the transform, it multiplies by
// that too, with the same product.
struct Times {
    float factor;
    HADAGEN_INLINE float plain(float x) const { return product(x, factor); }
    HADAGEN_INLINE float plus(float x, float more) const { return fma(x, factor, more); }
};
HADAGEN_INLINE Times from_lane(Times one, u32 lane) { return {shuffle(one.factor, lane)}; }
// So that neither it nor a product that counts is subnormal or infinite.
HADAGEN_INLINE bool is_quick(Times one) {
    const u32 size = as_word(one.factor) & 0x7FFFFFFFu;
    return size >= as_word(0x1p-100f) && size < 0x7F800000u;
}

struct Factor {
    u32 bits;
    float factor, times;  // a power of two or any other number, and what codes are multiples of
    HADAGEN_INLINE float exact(float x) const { return product(product(x, factor), times); }
};
HADAGEN_INLINE Factor times_factor(u32 bits, float factor, float times = 1.0f) { return {bits, factor, times}; }
HADAGEN_INLINE Times quick_of(const Factor& one) { return {product(one.factor, one.times)}; }
HADAGEN_INLINE Times quick_of(const Factor& one, float scale) { return {product(product(one.factor, one.times), scale)}; }
HADAGEN_INLINE Factor from_lane(const Factor& one, u32 lane) { return {one.bits, shuffle(one.factor, lane), one.times}; }

// Quotients are rounded once. With a correctly rounded reciprocal two fma give that, where nothing underflows.
// (P. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.)
struct Divisor {
    u32 bits;
    float value, reciprocal;
    HADAGEN_INLINE float plain(float x) const {
        const float about = product(x, reciprocal);
        return fma(-fma(about, value, -x), reciprocal, about);  // in this order a zero keeps its sign
    }
    // Both times a power of two, so that what counts is not subnormal.
    HADAGEN_INLINE float exact(float x) const {
        const float power = value < 0x1p-60f ? 0x1p90f : value > 0x1p60f ? 0x1p-60f : 1.0f;
        const float by = product(value, power), inverse = reciprocal_of(by);
        const float size = product(x, power), about = product(size, inverse);
        const bool is_exact = by == 0.0f || !is_finite(by) || !is_finite(about);
        return is_exact ? about : fma(-fma(about, by, -size), inverse, about);
    }
};
HADAGEN_INLINE Divisor divide_by(float value, u32 bits) { return {bits, value, reciprocal_of_usual(value)}; }
HADAGEN_INLINE Divisor divide_by(float value) { return divide_by(value, as_word(value)); }
template <class D> HADAGEN_INLINE D quick_of(const D& one) { return one; }
HADAGEN_INLINE Times quick_of(const Divisor& one, float scale) { return {product(scale, one.reciprocal)}; }
HADAGEN_INLINE bool is_usual(float x) { return x >= 0x1p-90f && x <= 0x1p100f && (as_word(x) & 0x7FFFFFu) != 0x7FFFFFu; }
HADAGEN_INLINE bool is_quick(const Divisor& one) { return is_usual(one.value); }
HADAGEN_INLINE bool is_quick(const Factor& one) { return is_quick(quick_of(one)); }
HADAGEN_INLINE bool is_quick(const Factor& one, float scale) { return is_quick(quick_of(one, scale)); }
// Its product with the scale need not be exact. The least scale of a group of zeros is quick, too.
HADAGEN_INLINE bool is_quick(const Divisor& one, float scale) {
    return one.value >= 0x1p-110f && one.value <= 0x1p100f && is_quick(quick_of(one, scale));
}
HADAGEN_INLINE Divisor from_lane(const Divisor& one, u32 lane) {
    return {one.bits, shuffle(one.value, lane), shuffle(one.reciprocal, lane)};
}

// A magnitude over a small whole number.
HADAGEN_INLINE float over(float size, const Divisor& by) {
    return size >= 0x1p-60f && size <= 0x1p100f ? by.plain(size) : by.exact(size);
}
HADAGEN_INLINE float over(float size, float by) { return over(size, Divisor{0u, by, 1.0f / by}); }

// A divisor, and the quotient is rounded to the type of x.
template <class T> struct RoundedDivisor : Divisor {
    HADAGEN_INLINE float quotient(float x) const { return Divisor::plain(x); }
    HADAGEN_INLINE float plain(float x) const { return rounded<T>(quotient(x)); }
    HADAGEN_INLINE float exact(float x) const { return rounded<T>(Divisor::exact(x)); }
};
// So that the scale has the error of one rounding.
template <class T> HADAGEN_INLINE bool is_quick(const RoundedDivisor<T>& one) {
    return one.value >= least_normal<T>() && is_quick(static_cast<const Divisor&>(one));
}
template <class T> HADAGEN_INLINE RoundedDivisor<T> divide_and_round(float value, u32 bits) { return {divide_by(value, bits)}; }
template <class T> HADAGEN_INLINE RoundedDivisor<T> from_lane(const RoundedDivisor<T>& one, u32 lane) {
    return {from_lane(static_cast<const Divisor&>(one), lane)};
}

// What the call gives for all values, or those of a head. Some of these may be infinite. Over a scale of 0, which is not
// quick, a value of 0 is 0, and any other is infinite with its own sign.
struct GivenDivisor : Divisor {
    HADAGEN_INLINE float plain(float x) const {
        const float about = product(x, reciprocal);
        return is_finite(about) ? Divisor::plain(x) : about;
    }
    HADAGEN_INLINE float exact(float x) const {
        if (value == 0.0f) return x == 0.0f ? x : product(x, as_float(0x7F800000u));
        return Divisor::exact(x);
    }
};
HADAGEN_INLINE GivenDivisor from_lane(const GivenDivisor& one, u32 lane) {
    return {from_lane(static_cast<const Divisor&>(one), lane)};
}
// Or for all scales of groups.
struct Given : GivenDivisor {
    float inverse, encoding;
};

template <class Scale, int count> struct Scales {
    Scale each[count];
    HADAGEN_INLINE const Scale& operator[](int g) const { return each[g]; }
};
template <int count, class Make> HADAGEN_INLINE auto all_scales(Make make) {
    Scales<decltype(make(0)), count> scales;
#pragma unroll
    for (int g = 0; g < count; ++g) scales.each[g] = make(g);
    return scales;
}

// ---- codes --------------------------------------------------------------------------------------------------
// `four`: codes of four values, a byte each; bytes may have other bits in their upper halves where codes have four. `quick`:
// the same of what `plain` gives, which is near the range of the codes. `instead`: the value to encode where x, scaled,
// may be none. Values are `unit` times what codes stand for. `as_quick`: a value of which `four` makes the code that
// `quick` makes of x times a factor.
struct E4m3 {
    enum : int { bits = 8 };
    static HADAGEN_INLINE float unit() { return 1.0f; }
    static HADAGEN_INLINE u32 four(const float* v) { return pack_e4m3(v[0], v[1]) | pack_e4m3(v[2], v[3]) << 16; }
    static HADAGEN_INLINE u32 quick(const float* v) { return four(v); }
    static HADAGEN_INLINE float instead(float, float scaled) { return scaled; }
    static HADAGEN_INLINE float as_quick(Times by, float x) { return by.plain(x); }
};
// These have no code for NaN and infinity: NaN becomes 0, and an infinity the largest.
struct NoNan {
    static HADAGEN_INLINE float unit() { return 1.0f; }
    static HADAGEN_INLINE float instead(float x, float scaled) {
        const float value = is_infinite(x) ? x : scaled;
        return is_nan(value) ? 0.0f : value;
    }
    static HADAGEN_INLINE float as_quick(Times by, float x) { return by.plain(x); }
};
struct E2m1 : NoNan {
    enum : int { bits = 4 };
    static HADAGEN_INLINE u32 four(const float* v) {
        u32 sizes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sizes[i] = encode_size<1, 0>(size_up_to(v[i], 6.0f));
        // No byte is less than that of zero, so none borrows from the next.
        return with_signs(low_bytes(sizes) - (code_of_zero<1, 0>() & 0xFFu) * 0x01010101u, v);
    }
    static HADAGEN_INLINE u32 quick(const float* v) { return four(v); }
    static HADAGEN_INLINE u32 with_signs(u32 codes, const float* v) {
        const u32 words[4] = {as_word(v[0]), as_word(v[1]), as_word(v[2]), as_word(v[3])};
        return codes | (high_bytes(words) >> 4 & 0x08080808u);
    }
};
// E2M1 of values that an mma just summed, which are rounded to float16 first: those within 2^-11 of the middle between two
// codes may count as in the middle. All of it is sums and products of two values at once.
struct E2m1Near : E2m1 {
    static HADAGEN_INLINE float unit() { return 0.5f; }
    static HADAGEN_INLINE float as_quick(Times by, float x) { return product(by.plain(x), 2.0f); }
    static HADAGEN_INLINE u32 four(const float* v) {
        float near[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) near[i] = rounded<float16>(v[i]);
        return E2m1::four(near);
    }
    static HADAGEN_INLINE u32 quick(const float* v) {
        const u32 pairs[2] = {pack<float16>(v[0], v[1]), pack<float16>(v[2], v[3])};
        u32 sums[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Up to 2 a code is 1/2, then to 4 it is 1, and to 6 it is 2. In a sum from 1024 on the last bit is worth 1.
            const u32 below_2 = part_of_1(pairs[i], 0u), below_4 = part_of_1(pairs[i], 0xBC00BC00u);
            const u32 below_6 = add<float16>(part_of_1(pairs[i], 0xC000C000u), 0x64006400u);
            sums[i] = fma<float16>(below_2, 0x44004400u, fma<float16>(below_4, 0x40004000u, below_6));
        }
        return even_bytes(sums[0], sums[1]) | (signs_of_halves(pairs[0], pairs[1]) & 0x08080808u);
    }
};
// A number from −2^22 to 2^22, rounded, is in the low bits of its sum with 1.5 · 2^23.
template <int least, int most> struct Integer : NoNan {
    static HADAGEN_INLINE u32 four(const float* v) {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = smaller(bigger(v[i], float(least)), float(most));
        return in_range(w);
    }
    static HADAGEN_INLINE u32 in_range(const float* v) {
        u32 sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = as_word(sum(v[i], 0x1.8p23f));
        return low_bytes(sums);
    }
};
// A quotient by a scale that is rounded to 8 bits may be half a code beyond the largest.
template <bool lowest> struct Int8 : Integer<lowest ? -128 : -127, 127> {
    enum : int { bits = 8 };
    static HADAGEN_INLINE u32 quick(const float* v) { return lowest ? Int8::four(v) : Int8::in_range(v); }
};
// Of numbers to which 1.5 · 2^23 is added already.
struct Int8Near : Int8<false> {
    static HADAGEN_INLINE u32 quick(const float* v) {
        const u32 sums[4] = {as_word(v[0]), as_word(v[1]), as_word(v[2]), as_word(v[3])};
        return low_bytes(sums);
    }
    static HADAGEN_INLINE float as_quick(Times by, float x) { return sum(by.plus(x, 0x1.8p23f), -0x1.8p23f); }
};
template <bool lowest> struct Int4 : Integer<lowest ? -8 : -7, 7> {
    enum : int { bits = 4 };
    static HADAGEN_INLINE u32 quick(const float* v) { return Int4::in_range(v); }
};
// Of quotients that are rounded to a type of 16 bits first, two at once. Its least sums with a last bit worth 1 are from
// 2^mantissa_bits on.
template <class T, bool lowest> struct Int4Rounded : Int4<lowest> {
    static HADAGEN_INLINE u32 quick(const float* v) {
        const u32 middle = (2 * T::exponent_bias + 2 * T::mantissa_bits + 1 << T::mantissa_bits - 1) * 0x10001u;  // 1.5 times that
        return even_bytes(add<T>(pack<T>(v[0], v[1]), middle), add<T>(pack<T>(v[2], v[3]), middle));
    }
};

// ---- the longer way of a warp that has quick groups too -------------------------------------------------------------
// A value of a quick group becomes one of which `four` makes the code of the quick way, so that no code depends on another
// group. First every value is `begun`, then `exact` of `rest_of` ends it: a thread needs fewer registers in two steps.
struct DivisorBegun {
    Times quick;  // 0 if the group is not quick
    template <class Code> HADAGEN_INLINE float begun(float x, float scaled, float) const {
        return quick.factor != 0.0f ? Code::as_quick(quick, x) : scaled;
    }
};
HADAGEN_INLINE DivisorBegun begin_of(const Divisor& one, float scale) {
    return {{is_quick(one, scale) ? quick_of(one, scale).factor : 0.0f}};
}
HADAGEN_INLINE DivisorBegun from_lane(const DivisorBegun& one, u32 lane) { return {from_lane(one.quick, lane)}; }
template <class D> HADAGEN_INLINE D rest_of(D one, float scale) {
    if (is_quick(one, scale)) one.value = 1.0f;
    return one;
}
// With factors, the first step does it all.
struct FactorBegun : Factor {
    template <class Code> HADAGEN_INLINE float begun(float x, float scaled, float scale) const {
        const Factor& one = *this;
        return is_quick(one, scale) ? Code::as_quick(quick_of(one, scale), x) : Code::instead(scaled, exact(scaled));
    }
};
HADAGEN_INLINE FactorBegun begin_of(const Factor& one, float) { return {one}; }
HADAGEN_INLINE FactorBegun from_lane(const FactorBegun& one, u32 lane) { return {from_lane(static_cast<const Factor&>(one), lane)}; }
struct NoRest {
    HADAGEN_INLINE float exact(float x) const { return x; }
};
HADAGEN_INLINE NoRest rest_of(const Factor&, float) { return {}; }
HADAGEN_INLINE NoRest from_lane(NoRest, u32) { return {}; }

// Lane pairs exchange codes: of two times two words, the one gets the first and the other the second of both.
HADAGEN_INLINE void swap_fours(u32 (&fours)[2], u32 mask) {
    const bool up = thread_index() & mask;
    const u32 got = shuffle_xor(up ? fours[0] : fours[1], mask);
    fours[0] = up ? got : fours[0], fours[1] = up ? fours[1] : got;
}
// The same with the two halves of a word.
HADAGEN_INLINE u32 swap_halves(u32 word, u32 mask) {
    const u32 got = shuffle_xor(word, mask);
    return thread_index() & mask ? got >> 16 | (word & 0xFFFF0000u) : (word & 0xFFFFu) | got << 16;
}
// Of codes of the even and of the odd elements of 8 those of the first four and of the others.
HADAGEN_INLINE void zip_fours(u32 (&fours)[2]) {
    const u32 even = fours[0], odd = fours[1];
    fours[0] = zip_low_bytes(even, odd), fours[1] = zip_high_bytes(even, odd);
}
// 4-bit codes of even and of odd elements, in turn. They are in the lower halves of bytes.
HADAGEN_INLINE u32 join_nibbles(u32 even, u32 odd) { return (even & 0x0F0F0F0Fu) | (odd << 4 & 0xF0F0F0F0u); }
// Codes of 4 or 8 neighbors. Those of 4 bits are in one word.
template <class Code, int count> HADAGEN_INLINE void store_codes(byte* to, const u32 (&fours)[count / 4]) {
    if (count * Code::bits == 64) store8(to, fours[0], fours[count / 4 - 1]);
    else if (count * Code::bits == 32) store4(to, fours[0]);
    else store2(to, fours[0]);
}
template <int bytes> HADAGEN_INLINE void store_scale(void* scales, i64 at, u32 bits) {
    byte* const to = static_cast<byte*>(scales) + bytes * at;
    if (bytes == 4) store4(to, bits);
    else if (bytes == 2) store2(to, bits);
    else store1(to, bits);
}

// ---- where scales lie ----------------------------------------------------------------------------------------------
HADAGEN_INLINE i64 column_major(u32 group, u32 in_row, i64 pitch) { return i64(group % in_row) * pitch + group / in_row; }
HADAGEN_INLINE i64 swizzled(u32 group, u32 in_row) {
    const u32 row = group / in_row, column = group % in_row, tiles = (in_row + 3) / 4;
    return i64(row / 128 * tiles + column / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + column % 4;
}

// ---- rules: the largest magnitude of a group → its scale -------------------------------------------------------------
// The biased exponent of the next power of two, 0 for 2^-127 and less.
HADAGEN_INLINE u32 ceil_exponent(u32 bits) {
    const u32 field = bits >> 23, fraction = bits & 0x7FFFFFu;
    return field + (field == 0 ? fraction > 0x400000u : fraction != 0);
}
// 2^(exponent − 127) of a biased exponent.
HADAGEN_INLINE float power_of(u32 exponent) { return as_float(exponent ? exponent << 23 : 1u << 22); }
// An E8M0 scale of a biased exponent.
HADAGEN_INLINE Factor by_power(int exponent, bool finite, float times = 1.0f) {
    const u32 field = exponent < 0 ? 0u : exponent > 254 ? 254u : u32(exponent);
    return finite ? times_factor(field, power_of(254u - field), times) : times_factor(0xFFu, as_float(0x7FFFFFFFu), times);
}

template <class T> HADAGEN_INLINE Divisor fp8_group_exact(float peak) {
    return divide_by(product(at_least(peak, 1e-4f), 1.0f / 448.0f));
}
template <class T> HADAGEN_INLINE Factor fp8_group_power_of_two(float peak) {
    const float exact = product(at_least(peak, 1e-4f), 1.0f / 448.0f);
    const u32 field = ceil_exponent(as_word(exact));
    if (is_finite(exact)) return times_factor(field << 23, as_float((254u - field) << 23));
    return times_factor(as_word(exact), is_nan(exact) ? exact : 0.0f);
}
template <class T> HADAGEN_INLINE Divisor fp8_row_exact(float peak) {
    return divide_by(at_least(over(peak, 448.0f), 1.0f / (448.0f * 512.0f)));
}
// The largest magnitude alone.
struct Peak {
    u32 bits;
};
template <class T> HADAGEN_INLINE Peak largest_exact(float peak) { return {as_word(peak)}; }

HADAGEN_INLINE GivenDivisor fp8_tensor_exact_given(float given) { return {divide_by(given)}; }
HADAGEN_INLINE GivenDivisor fp8_head_exact_given(float given) { return {divide_by(given)}; }
// What is given is the largest magnitude of a head.
HADAGEN_INLINE Factor fp8_head_fa3_given(float most) {
    return times_factor(0u, most > 1e-12f ? divide_by(most).exact(448.0f) : 1.0f);
}

template <class T> HADAGEN_INLINE Divisor int8_row_exact(float peak) { return divide_by(at_least(over(peak, 127.0f), 1e-30f)); }
// The scale is rounded to the type of x before it divides.
template <class T> HADAGEN_INLINE RoundedDivisor<T> int8_row_convrot(float peak) {
    const float scale = at_least(over(peak, 127.0f), 1e-30f), divisor = rounded<T>(scale);
    return divide_and_round<T>(divisor == 0.0f ? least_normal<T>() : divisor, as_word(scale));
}
template <class T> HADAGEN_INLINE RoundedDivisor<T> int4_row_quarot(float peak) {
    const float scale = rounded<T>(over(peak, 7.0f));
    return divide_and_round<T>(scale, element_bits<T>(scale));
}
template <class T> HADAGEN_INLINE RoundedDivisor<T> int4_row_exact(float peak) {
    return int4_row_quarot<T>(at_least(peak, rounded<T>(1e-10f)));
}

// Of the elements: `power`, the exponent of the largest power of two; `most`, the largest; `fraction`, their fraction bits.
template <int power> HADAGEN_INLINE Factor mx_floor(float peak) { return by_power(int(as_word(peak) >> 23) - power, is_finite(peak)); }
template <int power> HADAGEN_INLINE Factor mx_ceil(float peak) {
    return by_power(int(ceil_exponent(as_word(peak))) - power, is_finite(peak));
}
template <int most> HADAGEN_INLINE Factor mx_rceil(float peak) {
    return by_power(int(ceil_exponent(as_word(product(peak, 1.0f / most)))), is_finite(peak));
}
template <int power, int fraction> HADAGEN_INLINE Factor mx_even(float peak) {
    const u32 bits = as_word(peak) + (1u << (22 - fraction));
    return by_power(int(bits >> 23) - power, is_finite(peak));
}
template <class T> HADAGEN_INLINE Factor mxfp8_floor(float peak) { return mx_floor<8>(peak); }
template <class T> HADAGEN_INLINE Factor mxfp8_ceil(float peak) { return mx_ceil<8>(peak); }
template <class T> HADAGEN_INLINE Factor mxfp8_rceil(float peak) { return mx_rceil<448>(peak); }
template <class T> HADAGEN_INLINE Factor mxfp8_even(float peak) { return mx_even<8, 3>(peak); }
template <class T> HADAGEN_INLINE Factor mxfp4_floor(float peak) { return mx_floor<2>(peak); }
template <class T> HADAGEN_INLINE Factor mxfp4_ceil(float peak) { return mx_ceil<2>(peak); }
template <class T> HADAGEN_INLINE Factor mxfp4_rceil(float peak) { return mx_rceil<6>(peak); }
template <class T> HADAGEN_INLINE Factor mxfp4_even(float peak) { return mx_even<2, 1>(peak); }
template <class T> HADAGEN_INLINE Factor mxfp4_deepseek_v4(float peak) {
    const float up = product(at_least(peak, 0x1.8p-124f), 1.0f / 6.0f);
    return by_power(int(ceil_exponent(as_word(up))), is_finite(up));
}
template <class T> HADAGEN_INLINE Factor mxfp4_qutlass(float peak) {
    const float down = sum(peak, 1e-8f);
    return by_power(int(as_word(down) >> 23), is_finite(down), 3.0f);
}

HADAGEN_INLINE Given nvfp4_exact_given(float given) {
    const Divisor divisor = divide_by(given);
    return {{divisor}, is_usual(given) ? divisor.reciprocal : reciprocal_of(given), 0.0f};
}
template <class T> HADAGEN_INLINE Factor nvfp4_exact(float peak, const Given& given) {
    const Divisor six{0u, 6.0f, 1.0f / 6.0f};
    if (peak >= 0x1p-60f && peak <= 0x1p60f && is_usual(given.value) && given.value >= 0x1p-60f && given.value <= 0x1p60f) {
        const u32 code = e4m3_of(smaller(bigger(given.Divisor::plain(six.plain(peak)), 0x1p-6f), 448.0f));
        return times_factor(code, divide_by(of_e4m3_number(code)).plain(given.inverse));
    }
    const u32 code = e4m3_of(at_most(at_least(given.exact(six.exact(peak)), 0x1p-6f), 448.0f));
    return times_factor(code, divide_by(of_e4m3(code)).exact(given.inverse));
}
// What is given is the largest magnitude of all values.
HADAGEN_INLINE Given nvfp4_transformer_engine_given(float most) {
    const float exact = at_most(divide_by(most).exact(448.0f * 6.0f), 0x1.fffffep127f);
    const float encoding = most == 0.0f || exact == 0.0f ? 1.0f : exact;
    return {{{0u, most, 0.0f}}, reciprocal_of(encoding), encoding};
}
template <class T> HADAGEN_INLINE Factor nvfp4_transformer_engine(float peak, const Given& given) {
    const u32 code = e4m3_of(product(peak, product(given.encoding, 1.0f / 6.0f)));
    return times_factor(code, at_most(reciprocal_of(product(of_e4m3(code), given.inverse)), 0x1.fffffep127f));
}

}  // namespace hadagen
