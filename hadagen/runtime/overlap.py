"""Whether two elements of a tensor share memory, from its sizes and strides alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

_MOST_SUMS = 1 << 16  # to look at, which takes some 50 ms


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices of a tensor name the same element. Sizes are at least 1, strides at least 0.

    They do if there are integers d, one for each dimension, with |d| less than its size and not all 0, whose sum of
    d · stride is 0. The answer is never true by mistake. It is false by mistake only if three or more dimensions are
    involved, and more than `_MOST_SUMS` sums over all but two of them would have to be checked.
    """
    dimensions = sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1)
    if dimensions and dimensions[0][0] == 0:
        return True
    spans = [0]  # the reach of no dimension, of the one with the smallest stride, of the first two, …
    for stride, size in dimensions:
        spans.append(spans[-1] + (size - 1) * stride)
    if all(stride > span for (stride, _), span in zip(dimensions, spans, strict=False)):
        return False  # each stride is beyond the reach of all smaller ones, as in every slice of a contiguous tensor
    if math.prod(size for _, size in dimensions) > spans[-1] + 1:
        return True  # more elements than addresses
    for (b, b_size), (a, a_size) in combinations(dimensions, 2):
        common = math.lcm(a, b)  # the first address that steps along both reach
        if common // a < a_size and common // b < b_size:
            return True

    # The sums of d · stride over the largest strides that the other strides can bring back to 0. Before any d, the sum
    # is 0. Of d and -d one is enough, so the first d that is not 0 is positive.
    sums, seen = {0}, 0
    while len(dimensions) > 2:
        stride, size = dimensions.pop()
        spans.pop()
        reach, divisor = spans[-1], math.gcd(*(smaller for smaller, _ in dimensions))
        found: set[int] = set()
        for total in sums:
            low = max(1 - size, -((reach + total) // stride)) if total else 1
            high = min(size - 1, (reach - total) // stride)
            seen += max(0, high - low + 1)
            if seen > _MOST_SUMS:
                return False
            found.update(total + d * stride for d in range(low, high + 1))
        if 0 in found:
            return True
        sums = {0, *(total for total in found if total % divisor == 0)}

    # All solutions of x · a + y · b = total are (x + b · t, y - a · t) for whole t, where a and b share no divisor.
    (b, b_size), (a, a_size) = dimensions
    divisor = math.gcd(a, b)
    a, b = a // divisor, b // divisor
    inverse = pow(a, -1, b)
    for total in (total // divisor for total in sums if total):
        x = total * inverse % b
        y = (total - x * a) // b
        low = max(-((a_size - 1 + x) // b), -((b_size - 1 - y) // a))
        if low <= min((a_size - 1 - x) // b, (b_size - 1 + y) // a):
            return True
    return False
