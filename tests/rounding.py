"""How far off a kernel is that does nothing wrong but round."""

from math import sqrt

from hadagen.problem.problem import ACCURATE_BOUND, Numerics, Problem


def rounding_bound(problem: Problem) -> float:
    """Largest ‖out − ref‖ / ‖ref‖ that roundings explain.

    `accurate` rounds once. `fast` may round at each of its log2 n steps, where it scales, and where it stores, and
    independent errors add up by their squares. A fast kernel within this may still miss its problem's own bound, and
    then it is sound and no winner.
    """
    roundings = 1 if problem.io.numerics is Numerics.ACCURATE else problem.bits + 3
    return ACCURATE_BOUND[problem.io.input] * sqrt(roundings)
