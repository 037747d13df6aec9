"""The machine under the emulator: its arithmetic, value by value."""

import math

import numpy as np
import pytest
from machine_case import Case, random_bits, run, together

from hadagen.problem.bits import Bits, decode, encode
from hadagen.problem.problem import DType
from hadagen.truth.reference import hadamard

PACKED_TYPES = (DType.FLOAT16, DType.BFLOAT16)
ARITHMETIC = [
    Case(f"{name}_{dtype.value}", body, dtype=dtype)
    for dtype in PACKED_TYPES
    for name, body in {
        "packs": """const Vec16 v = load16(in + 16 * t);
            const u32 p = pack<T>(as_float(v.word[0]), as_float(v.word[1]));
            const u32 q = pack<T>(low<T>(v.word[2]), high<T>(v.word[2]));
            store16(out + 16 * t, Vec16{{p, q, as_word(low<T>(v.word[3])), as_word(high<T>(v.word[3]))}});""",
        "adds": """const Vec16 v = load16(in + 16 * t);
            const u32 a = v.word[0], b = v.word[1], c = v.word[2];
            store16(out + 16 * t, Vec16{{add<T>(a, b), sub<T>(a, b), fma<T>(a, b, c), 0u}});""",
        "meets": """const Vec16 v = load16(in + 16 * t);
            const u32 a = v.word[0], b = v.word[1];
            const float f = butterfly_lane(as_float(v.word[2]), as_float(v.word[3]), t % 2);
            store16(out + 16 * t, Vec16{{butterfly_lane<T>(a, b, t % 2), as_word(f), 0u, 0u}});""",
        "multiplies": """const Vec16 v = load16(in + 16 * t);
            float d[4] = {0.0f, 1.0f, 2.0f, 3.0f};
            mma<T>(d, Operand{{v.word[0], v.word[1], v.word[2], v.word[3]}}, v.word[1], v.word[2]);
            store16(out + 16 * t, Vec16{{as_word(d[0]), as_word(d[1]), as_word(d[2]), as_word(d[3])}});""",
        "operands": """const Operand h = hadamard16(low_half(T::one));
            store16(out + 16 * t, Vec16{{h.word[0], h.word[1], h.word[2], h.word[3]}});""",
        "negative_operands": """const Operand h = hadamard16(0x8000u | high_half(T::one));
            store16(out + 16 * t, Vec16{{h.word[0], h.word[1], h.word[2], h.word[3]}});""",
        "halves": """const u32 a = load16(in + 16 * t).word[0];
            store16(out + 16 * t, Vec16{{low_half(a), high_half(a), low_half(T::one), high_half(T::one)}});""",
    }.items()
]
COUNTS_ODD = Case(
    "counts_odd",
    """const Vec16 v = load16(in + 16 * t);
    store16(out + 16 * t, Vec16{{parity(v.word[0]), parity(v.word[1]), parity(v.word[2] & 7u), parity(v.word[3])}});""",
)
CUTS_OFF = Case(
    "cuts_off",
    """const Vec16 v = load16(in + 16 * t);
    const u32 a = high_halves(as_float(v.word[0]), as_float(v.word[1]));
    store16(out + 16 * t, Vec16{{a, high_halves(as_float(v.word[2]), as_float(v.word[3])), 0u, 0u}});""",
)
ROUNDS = Case(
    "rounds",
    """const Vec16 v = load16(in + 16 * t);
    store16(out + 16 * t, Vec16{{round_to_bfloat16(v.word[0]), round_to_bfloat16(v.word[1]),
        round_to_bfloat16(v.word[2]), round_to_bfloat16(v.word[3])}});""",
    dtype=DType.FLOAT32,
)
CUTS_TO_TF32 = Case(
    "cuts_to_tf32",
    """const float f = as_float(load16(in + 16 * t).word[0]);
    store16(out + 16 * t, Vec16{{as_word(cut_to_tf32(f)), as_word(below_tf32(f)), 0u, 0u}});""",
    dtype=DType.FLOAT32,
)
# Lane t has vectors t, 32 + t and 64 + t of what a block moves: the first two are its A, the third its B.
MULTIPLIES_TF32 = Case(
    "multiplies_tf32",
    """if (t >= 32) return;
    const Vec16 p = load16(in + 16 * t), q = load16(in + 512 + 16 * t), b = load16(in + 1024 + 16 * t);
    const WideOperand a = {{p.word[0], p.word[1], p.word[2], p.word[3], q.word[0], q.word[1], q.word[2], q.word[3]}};
    float d[4] = {0.0f, 1.0f, 2.0f, 3.0f};
    mma(d, a, as_float(b.word[0]), as_float(b.word[1]), as_float(b.word[2]), as_float(b.word[3]));
    store16(out + 16 * t, Vec16{{as_word(d[0]), as_word(d[1]), as_word(d[2]), as_word(d[3])}});""",
    threads=96,
    dtype=DType.FLOAT32,
)
TF32_OPERANDS = Case(
    "tf32_operands",
    """if (t >= 32) return;
    const WideOperand h = hadamard16_tf32(block_index() == 0 ? 0x3F80u : 0xBE80u);
    store16(out + 16 * t, Vec16{{h.word[0], h.word[1], h.word[2], h.word[3]}});
    store16(out + 512 + 16 * t, Vec16{{h.word[4], h.word[5], h.word[6], h.word[7]}});""",
    threads=64,
    dtype=DType.FLOAT32,
)
TAKES_POWERS = Case(
    "takes_powers",
    """float scale = as_float(load16(in + 16 * t).word[0]);
    const u32 a = take_power(scale, 4u);
    const float once = scale;
    const u32 b = take_power(scale, 7u);
    store16(out + 16 * t, Vec16{{a, as_word(once), b, as_word(scale)}});""",
)

together([*ARITHMETIC, COUNTS_ODD, CUTS_OFF, ROUNDS, CUTS_TO_TF32, MULTIPLIES_TF32, TF32_OPERANDS, TAKES_POWERS])


def arithmetic(name: str, dtype: DType, x: Bits) -> Bits:
    (case,) = (case for case in ARITHMETIC if case.name == f"{name}_{dtype.value}")
    return run(case, x)[0].reshape(-1, 8)


def same(dtype: DType, result: Bits, expected: np.ndarray) -> bool:
    """Whether `result` is `expected` rounded once, any NaN being as good as another."""
    rounded = encode(dtype, expected)
    return bool(((result == rounded) | (np.isnan(decode(dtype, result)) & np.isnan(expected))).all())


dtypes = pytest.mark.parametrize("dtype", PACKED_TYPES)


@dtypes
def test_packed_values_are_converted(dtype: DType) -> None:
    x = random_bits(1 << 18)
    x.reshape(-1, 8)[: 1 << 14, 4:] = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 4)  # every element there is
    parts, result = x.reshape(-1, 8), arithmetic("packs", dtype, x)
    with np.errstate(invalid="ignore"):
        reals = np.ascontiguousarray(parts[:, :4]).view(np.float32).astype(np.float64)
    assert same(dtype, result[:, :2], reals)
    assert same(dtype, result[:, 2:4], decode(dtype, parts[:, 4:6]))
    widened = np.ascontiguousarray(result[:, 4:]).view(np.float32)
    assert np.array_equal(widened, decode(dtype, parts[:, 6:]), equal_nan=True)


def test_integers_round_to_bfloat16_as_an_instruction_does() -> None:
    """Above and below each bfloat16 and in the middle between two, with all infinities and NaNs."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    words = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    with np.errstate(invalid="ignore"):
        reals = words.view(np.float32).astype(np.float64)
    result = run(ROUNDS, words)[0]
    assert (result < 1 << 16).all()
    assert same(DType.BFLOAT16, result.astype(np.uint16), reals)
    assert (result[np.isnan(reals)] == 0x7FFF).all()


def test_parity_is_that_of_the_bits_of_a_word() -> None:
    x = random_bits(4096)
    words = x.view(np.uint32).reshape(-1, 4) & np.array([~0, ~0, 7, ~0]).astype(np.uint32)
    odd = [[bin(word).count("1") % 2 for word in some] for some in words.tolist()]
    assert np.array_equal(run(COUNTS_ODD, x)[0].view(np.uint32).reshape(-1, 4), odd)


def test_high_halves_are_what_is_left_when_the_low_ones_are_cut_off() -> None:
    x = random_bits(4096)
    result, _ = run(CUTS_OFF, x)
    assert np.array_equal(result.reshape(-1, 8)[:, :4], x.reshape(-1, 8)[:, 1::2])


def cut_to_tf32(values: np.ndarray) -> np.ndarray:
    """float32 without what lies below the 11th bit, or below 2^-136."""
    _, exponent = np.frexp(values.astype(np.float64))
    step = np.maximum(exponent - 11, -136)
    return np.ldexp(np.trunc(np.ldexp(values.astype(np.float64), -step)), step).astype(np.float32)


def split_to_tf32(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What an mma takes of values, and of what is below that, as `below_tf32` has it. Any number of values."""
    words = np.zeros((-(-len(values) // 32) * 32, 4), np.float32)
    words[: len(values), 0] = values
    result = run(CUTS_TO_TF32, words.view(np.uint32).reshape(-1))[0].reshape(-1, 4)[: len(values), :2]
    high, low = np.ascontiguousarray(result.T).view(np.float32)
    return high, cut_to_tf32(low) if np.isfinite(low).all() else low


def test_two_tf32_are_a_value_rounded_to_22_bits() -> None:
    """From 2^-114 to the largest: neither is too large, nor what the largest is rounded to. Ties go up and down equally
    often. Of what has 22 bits, and of multiples of 2^-136, nothing is lost."""
    random = np.random.default_rng(0)
    values = np.ldexp(random.uniform(1.0, 2.0, 1 << 16), random.integers(-114, 128, 1 << 16)).astype(np.float32)
    largest = np.finfo(np.float32).max
    values[:4] = largest, largest * (1 - 2.0**-23), 2.0**-114, -largest
    values[4::2] *= -1
    high, low = split_to_tf32(values)
    assert np.array_equal(high, cut_to_tf32(values))
    exact = values.astype(np.float64)
    error = (high.astype(np.float64) + low - exact) / exact
    assert np.abs(error[4:]).max() <= 2.0**-22
    assert (np.abs(high.astype(np.float64) + low) <= largest).all()
    assert np.abs(error[:4]).max() < 2.0**-21
    # Cut off, it would be 40 times as large in the mean.
    assert np.abs(np.mean(error)) < 2.0**-29
    assert math.sqrt(np.mean(error**2)) < 2.0**-23.5

    short = np.ldexp(random.integers(1 << 21, 1 << 22, 1 << 14), random.integers(-136, 106, 1 << 14))
    tiny = random.integers(-(1 << 20), 1 << 20, 1 << 14) * 2.0**-136
    for kept in (short, -short, tiny, np.array([0.0])):
        high, low = split_to_tf32(kept)
        assert np.array_equal(high.astype(np.float64) + low, kept)


def test_of_nan_and_infinity_what_is_below_a_tf32_is_nan() -> None:
    """Even of NaNs with all bits, which a carry would make a number of, and of those with low bits only, which an mma
    takes for infinities."""
    words = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF801FFF, 0x7F800000, 0xFF800000], np.uint32)
    assert np.isnan(split_to_tf32(words.view(np.float32))[1]).all()


def test_powers_are_taken_of_a_scale_until_none_is_left_or_least() -> None:
    """Each a power of two, at most 1 and at least 2^-4 or 2^-7, as near to the scale as that, so that sums of 16 or 128
    do not grow; and what is left times those taken is the scale, to the last bit and of its sign."""
    random, steps = np.random.default_rng(0), range(-140, 101)
    sizes = [np.ldexp(factor, power) for power in steps for factor in (1.0, random.uniform(1.0, 2.0), 2.0 - 2.0**-23)]
    sizes += [2.0**-149, np.finfo(np.float32).max, 0.0]
    scales = np.array([sign * size for size in sizes for sign in (1.0, -1.0)], np.float32)
    scales = np.append(scales, np.zeros(-len(scales) % 32, np.float32))
    words = np.zeros((len(scales), 4), np.uint32)
    words[:, 0] = scales.view(np.uint32)
    result = run(TAKES_POWERS, words.view(np.uint16).reshape(-1))[0].reshape(-1, 8).view(np.uint32)
    powers, left = result[:, [0, 2]], np.ascontiguousarray(result[:, [1, 3]]).view(np.float32)
    assert (powers >> 16 == 0).all()
    taken = decode(DType.BFLOAT16, powers.astype(np.uint16))
    before = scales
    for at, least in enumerate((-4, -7)):
        nearest = 2.0 ** np.clip(np.frexp(np.abs(before).astype(np.float64))[1] - 1.0, least, 0)
        assert np.array_equal(taken[:, at], np.where(before == 0, 2.0**least, nearest))
        assert np.array_equal(taken[:, at] * left[:, at], before.astype(np.float64))
        before = left[:, at]
    assert np.array_equal(np.signbit(left), np.signbit(np.stack((scales, scales), axis=1)))


@dtypes
def test_packed_arithmetic_rounds_once(dtype: DType) -> None:
    x = np.concatenate([random_bits(1 << 16), encode(dtype, np.random.default_rng(1).standard_normal(1 << 16))])
    parts, result = decode(dtype, x).reshape(-1, 8), arithmetic("adds", dtype, x)
    a, b, c = parts[:, :2], parts[:, 2:4], parts[:, 4:6]
    with np.errstate(all="ignore"):
        for at, expected in enumerate((a + b, a - b, a * b + c)):
            assert same(dtype, result[:, 2 * at : 2 * at + 2], expected)


@dtypes
def test_butterfly_across_lanes(dtype: DType) -> None:
    x = encode(dtype, np.random.default_rng(2).standard_normal(4096))
    parts, result = x.reshape(-1, 8), arithmetic("meets", dtype, x)
    sign = np.where(np.arange(len(parts)) % 2, -1.0, 1.0)
    values = decode(dtype, parts)
    assert same(dtype, result[:, :2], values[:, 2:4] + sign[:, None] * values[:, :2])
    floats = np.ascontiguousarray(parts[:, 4:]).view(np.float32)
    widened = np.ascontiguousarray(result[:, 2:4]).view(np.float32)[:, 0]
    assert np.array_equal(widened, floats[:, 1] + sign.astype(np.float32) * floats[:, 0])


# PTX ISA, "Matrix fragments for mma.m16n8k16": row and column of element i of each lane, in A, B and D.
LANE = np.arange(32)[:, None]
A_AT = (LANE // 4 + 8 * (np.arange(8) // 2 % 2), 2 * (LANE % 4) + np.arange(8) % 2 + 8 * (np.arange(8) // 4))
B_AT = (2 * (LANE % 4) + np.arange(4) % 2 + 8 * (np.arange(4) // 2), LANE // 4 + 0 * np.arange(4))
D_AT = (LANE // 4 + 8 * (np.arange(4) // 2), 2 * (LANE % 4) + np.arange(4) % 2)


@dtypes
def test_mma_multiplies_a_by_b_and_adds(dtype: DType) -> None:
    integers = np.random.default_rng(3).integers(-8, 9, 256).astype(np.float64)  # every sum is exact
    lanes = integers.reshape(32, 8)
    a, b, d = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    a[A_AT], b[B_AT], d[D_AT] = lanes, lanes[:, 2:6], np.arange(4)
    result = arithmetic("multiplies", dtype, encode(dtype, integers))
    assert np.array_equal(result.view(np.float32), (a @ b + d)[D_AT])


@dtypes
@pytest.mark.parametrize(("name", "factor"), [("operands", 1.0), ("negative_operands", -1.0)])
def test_operand_is_the_hadamard_matrix_times_a_factor(dtype: DType, name: str, factor: float) -> None:
    result = decode(dtype, arithmetic(name, dtype, random_bits(256)))
    assert np.array_equal(result, hadamard(np.eye(16), factor)[A_AT])


# PTX ISA, "Matrix fragments for mma.m16n8k8", of .tf32: as above, a0 to a3 and b0 and b1.
A8_AT = (LANE // 4 + 8 * (np.arange(4) % 2), LANE % 4 + 4 * (np.arange(4) // 2))
B8_AT = (LANE % 4 + 4 * np.arange(2), LANE // 4 + 0 * np.arange(2))


def tf32_operands(rows: np.ndarray) -> np.ndarray:
    """Of A, 16×16: what each lane holds for the one mma and for the other, [32, 8]."""
    return np.concatenate([half[A8_AT] for half in np.split(rows, 2, axis=1)], axis=1)


def multiply_tf32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """D of two m16n8k8 that are given A, 16×16, B, 16×8, and 0, 1, 2, 3 for each lane's part of D."""
    x = np.zeros((96, 4), np.float32)
    x[:64] = tf32_operands(a).reshape(32, 2, 4).swapaxes(0, 1).reshape(64, 4)
    x[64:] = np.concatenate([half[B8_AT] for half in np.split(b, 2)], axis=1)
    result = run(MULTIPLIES_TF32, x.view(np.uint32).reshape(-1))[0].reshape(96, 4)[:32].view(np.float32)
    d = np.zeros((16, 8))
    d[D_AT] = result
    return d


def test_wide_mma_multiplies_a_by_b_and_adds() -> None:
    random = np.random.default_rng(4)
    a, b, d = random.integers(-8, 9, (16, 16)), random.integers(-1024, 1025, (16, 8)), np.zeros((16, 8))
    d[D_AT] = np.arange(4)
    assert np.array_equal(multiply_tf32(a, b), a @ b + d)  # every sum is exact


def test_wide_mma_takes_no_more_than_a_tf32() -> None:
    a, b = np.random.default_rng(5).standard_normal((2, 16, 16)).astype(np.float32)
    b = np.where(np.arange(16)[:, None] == np.arange(16) % 8, b, 0)[:, :8]  # one value in each column
    d = np.zeros((16, 8))
    d[D_AT] = np.arange(4)
    wanted = cut_to_tf32(a).astype(np.float64) @ cut_to_tf32(b) + d
    assert np.array_equal(multiply_tf32(a, b), wanted.astype(np.float32))


def test_wide_operand_is_the_hadamard_matrix_times_a_factor_in_the_order_of_the_rows_of_b() -> None:
    """Rows 2t and 2t + 1 of b are what lane t has for rows t and t + 4 of an mma."""
    result = run(TF32_OPERANDS, np.zeros(512, np.uint32))[0].view(np.float32).reshape(2, 2, 32, 4)
    order = np.arange(16).reshape(2, 4, 2).swapaxes(1, 2).reshape(-1)
    for words, factor in zip(result, (1.0, -0.25), strict=True):
        columns = hadamard(np.eye(16), factor)[:, order]
        assert np.array_equal(words.swapaxes(0, 1).reshape(32, 8), tf32_operands(columns))


@dtypes
def test_halves_of_a_word(dtype: DType) -> None:
    x = random_bits(256)
    result = arithmetic("halves", dtype, x)
    assert np.array_equal(result[:, [0, 2]], x.reshape(-1, 8)[:, :2])
    assert np.array_equal(decode(dtype, result[:, [4, 6]]), np.ones((32, 2)))
    assert not result[:, 1::2].any()
