"""The word of a scale holds it closely enough, and its first factor lets nothing overflow or vanish on the way."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadagen.problem.scale import ScaleForm, scale_word

HALVES = [form for form in ScaleForm if form is not ScaleForm.FP32]


def halves(form: ScaleForm, word: int) -> tuple[float, float]:
    def value(half: int) -> float:
        if form.value.startswith("float16"):
            return float(struct.unpack("<e", struct.pack("<H", half))[0])
        return float(struct.unpack("<f", struct.pack("<I", half << 16))[0])

    return value(word & 0xFFFF), value(word >> 16)


def scale_of(form: ScaleForm, word: int) -> float:
    a, b = halves(form, word)
    return a * b if "factors" in form.value else a * (1 + b)


@pytest.mark.parametrize("form", HALVES)
@given(data=st.data())
def test_both_halves_together_are_the_scale(form: ScaleForm, data: st.DataObject) -> None:
    least, most = (int(math.log2(end)) for end in form.range)
    scale = math.ldexp(data.draw(st.floats(1, 2)), data.draw(st.integers(least, most - 1)))
    scale *= data.draw(st.sampled_from([1, -1]))
    error = abs(scale_of(form, scale_word(form, scale)) / scale - 1)
    assert error < {"float16-factors": 1e-5, "bfloat16-factors": 3e-4}.get(form.value, 1e-5)


@pytest.mark.parametrize("form", HALVES)
def test_powers_of_two_are_exact(form: ScaleForm) -> None:
    least, most = form.range
    scale = least
    while scale <= most:
        assert scale_of(form, scale_word(form, scale)) == scale
        assert scale_of(form, scale_word(form, -scale)) == -scale
        scale *= 2


@pytest.mark.parametrize("form", [ScaleForm.FLOAT16_FACTORS, ScaleForm.BFLOAT16_FACTORS])
@given(data=st.data())
def test_the_first_factor_overflows_nothing_and_is_as_large_as_that_allows(
    form: ScaleForm, data: st.DataObject
) -> None:
    scale = data.draw(st.floats(*form.range))
    a, b = halves(form, scale_word(form, scale))
    limit = max(scale, 2.0**-4)
    assert limit / 4 < a <= limit * 1.01
    assert b >= 2.0**-14 or form is ScaleForm.BFLOAT16_FACTORS  # the least normal float16


def test_fp32_is_the_bits_of_the_scale() -> None:
    assert scale_word(ScaleForm.FP32, -0.5) == 0xBF000000
