"""Whether sizes and strides hold an element twice, against a count of all places."""

from itertools import product
from operator import mul

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hadagen.runtime import overlap
from hadagen.runtime.overlap import overlaps_itself

Layout = list[tuple[int, int]]  # sizes and strides
layouts = st.integers(1, 3).flatmap(
    lambda common: st.lists(st.tuples(st.integers(1, 6), st.integers(0, 60).map(lambda s: s * common)), max_size=5)
)


@settings(max_examples=1000)
@given(layouts)
@example([(2, 2), (2, 3), (2, 5)])  # 2 + 3 = 5
@example([(2, 3), (2, 5), (2, 7), (2, 15)])  # 3 + 5 + 7 = 15
@example([(2, 3), (2, 5), (2, 7), (2, 9)])  # 3 + 9 = 5 + 7
@example([(3, 4), (3, 6), (3, 9)])
def test_as_a_count_of_all_places_says(layout: Layout) -> None:
    sizes, strides = [size for size, _ in layout], [stride for _, stride in layout]
    places = [sum(map(mul, index, strides)) for index in product(*map(range, sizes))]
    assert overlaps_itself(sizes, strides) == (len(set(places)) < len(places))


@pytest.mark.parametrize(
    ("sizes", "strides", "wanted"),
    [
        ((64, 2048, 8192), (2048 * 9000, 9000, 1), False),
        ((2048, 64, 8192), (9000, 2048 * 9000, 1), False),
        ((60000, 3, 2), (6, 2, 90003), False),  # 90003 is odd
        ((60000, 3, 3), (6, 2, 90003), True),  # 2 · 90003 = 6 · 30001
        ((60000, 60000, 2), (100003, 100001, 100000), True),
        ((1 << 20, 1 << 13), (1, 1), True),
        ((100, 100, 7, 7), (106, 1, 106, 1), True),  # windows of an image
        ((180,) * 4, (10**9 + 7, 10**9 + 9, 10**9 - 1, 10**9 + 21), True),
        # More sums than are looked at. What two dimensions show is seen all the same.
        ((10**9,) * 3, (10**30 + 7, 10**30 + 9, 10**30 + 1), False),
        ((10**9,) * 4, (10**60 + 7, 10**60 + 9, 10**60 + 1, 10**60 + 9), True),
    ],
)
def test_large_tensors(sizes: tuple[int, ...], strides: tuple[int, ...], wanted: bool) -> None:
    assert overlaps_itself(sizes, strides) == wanted


def test_what_is_not_known_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlaps_itself((2, 2, 2), (2, 3, 5))
    monkeypatch.setattr(overlap, "_MOST_SUMS", 0)
    assert not overlaps_itself((2, 2, 2), (2, 3, 5))
