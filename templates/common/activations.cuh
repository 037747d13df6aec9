// What runs before the second product of an MLP: an activation, usually of one half of x, times the other half. The formulas
// are those of `hadagen/problem/prologues.py`. Everything is rounded operation by operation, so that the functions that a
// kernel uses decide every bit.
#pragma once

#include "hadagen.cuh"

namespace hadagen {

// The functions: e^x and a / b are `exact` if correctly rounded or nearly so, or else those of the special function units.
enum Division { divide, divide_quickly, divide_fully };
template <bool exact_exp, Division division, bool sigmoid, bool exact_tanh> struct Functions {
    static HADAGEN_INLINE float exp(float x) { return exact_exp ? exp_of(x) : quick_exp_of(x); }
    static HADAGEN_INLINE float over(float a, float b) {
        return division == divide ? quotient_of(a, b) : division == divide_quickly ? quick_quotient_of(a, b) : full_quotient_of(a, b);
    }
    static HADAGEN_INLINE float tanh(float x) { return exact_tanh ? tanh_of(x) : quick_tanh_of(x); }
    // x · sigmoid(by · x)
    static HADAGEN_INLINE float swish(float x, float by) {
        const float below = sum(1.0f, exp(-(by == 1.0f ? x : product(x, by))));
        return sigmoid ? product(x, over(1.0f, below)) : over(x, below);
    }
};

// ---- activations: of x, with a factor that only SiLU has -----------------------------------------------------------
template <class F> HADAGEN_INLINE float silu_of(float x, float alpha) { return F::swish(x, alpha); }
template <class F> HADAGEN_INLINE float gelu_quick_of(float x, float) { return F::swish(x, 1.702f); }
template <class F> HADAGEN_INLINE float gelu_of(float x, float) {
    return product(product(x, 0.5f), sum(1.0f, erf_of(product(x, 0.70710678118654752440f))));
}
template <class F> HADAGEN_INLINE float gelu_tanh_of(float x, float) {
    const float inner = product(0.79788456080286535588f, fma(0.044715f, product(product(x, x), x), x));
    return product(product(0.5f, x), sum(1.0f, F::tanh(inner)));
}
template <class F> HADAGEN_INLINE float relu2_of(float x, float) {
    const float positive = x < 0.0f ? 0.0f : x;
    return product(positive, positive);
}
template <class F> HADAGEN_INLINE float same_of(float x, float) { return x; }

// floor(a / b) for a < 2^31, as `hadagen.problem.prologues.reciprocal` has it of b.
HADAGEN_INLINE u32 divided(u32 a, u32 reciprocal, u32 shift) { return u32(u64(2 * a) * reciprocal >> 32) >> shift; }

}  // namespace hadagen
