// 16-bit floating point in plain C++. A format T has `exponent_bias` and `mantissa_bits`.
#pragma once

#include <cstdint>
#include <cstring>

namespace hadagen {

template <class To, class From> inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// The value of an element, exact.
template <class T> inline float decode(std::uint16_t element) {
    const std::uint32_t sign = std::uint32_t(element & 0x8000u) << 16;
    const std::uint32_t rest = std::uint32_t(element & 0x7FFFu) << (23 - T::mantissa_bits);
    constexpr std::uint32_t infinity = 0x7FFFu >> T::mantissa_bits << 23;
    if (rest >= infinity) return bit_cast<float>(sign | 0x7F800000u | rest);
    // Read as fp32 the exponent is too small by the difference of the biases; this also makes subnormals right.
    constexpr float rebias = T::exponent_bias == 127 ? 1.0f : 0x1p112f;
    static_assert(T::exponent_bias == 127 || T::exponent_bias == 127 - 112);
    return bit_cast<float>(sign | rest) * rebias;
}

// A value rounded once to the format: to nearest, ties to even; NaN becomes 0x7FFF as on the device.
template <class T> inline std::uint16_t encode(double value) {
    std::uint64_t bits = bit_cast<std::uint64_t>(value);
    const std::uint16_t sign = std::uint16_t(bits >> 63 << 15);
    bits &= ~(1ull << 63);
    if (value != value) return 0x7FFFu;

    constexpr std::uint64_t least_normal = std::uint64_t(1024 - T::exponent_bias) << 52;
    if (bits < least_normal) {
        // Adding a number whose last bit weighs as much as the smallest subnormal rounds there.
        constexpr std::uint64_t magic = std::uint64_t(1023 + 53 - T::exponent_bias - T::mantissa_bits) << 52;
        const double sum = bit_cast<double>(bits) + bit_cast<double>(magic);
        return std::uint16_t(sign | (bit_cast<std::uint64_t>(sum) - magic));
    }
    constexpr int dropped = 52 - T::mantissa_bits;
    bits -= std::uint64_t(1023 - T::exponent_bias) << 52;
    bits = (bits + (1ull << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
    constexpr std::uint64_t infinity = (0x7FFFull >> T::mantissa_bits) << T::mantissa_bits;
    return std::uint16_t(sign | (bits < infinity ? bits : infinity));
}

}  // namespace hadagen
