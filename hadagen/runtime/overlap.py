"""Whether a tensor holds one of its elements twice, from its sizes and strides alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

_MOST_SUMS = 1 << 16  # that are looked at, which takes some 50 ms


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices of a tensor with elements name the same one: whether there are whole numbers d, one for each
    dimension, each less than its size and not all 0, for which the sum of d · stride is 0. Strides are at least 0.

    Never true by mistake. False by mistake only where it takes three or more dimensions to see it, and more than
    `_MOST_SUMS` sums over all but two of these have to be looked at.
    """
    dimensions = sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1)
    if dimensions and dimensions[0][0] == 0:
        return True
    spans = [0]  # how far the dimensions with the smallest strides reach: none of them, the first, the first two, …
    for stride, size in dimensions:
        spans.append(spans[-1] + (size - 1) * stride)
    if all(stride > span for (stride, _), span in zip(dimensions, spans, strict=False)):
        return False  # each step leads beyond all that smaller ones reach, as in every slice of a contiguous tensor
    if math.prod(size for _, size in dimensions) > spans[-1] + 1:
        return True  # more elements than there are places
    for (b, b_size), (a, a_size) in combinations(dimensions, 2):
        common = math.lcm(a, b)  # the first place that steps along both lead to
        if common // a < a_size and common // b < b_size:
            return True

    # What d · stride of the largest strides adds up to, as far as the others can bring it back to 0. Before any d, that
    # is 0; of d and -d one is enough, so the first that is not 0 is positive.
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
