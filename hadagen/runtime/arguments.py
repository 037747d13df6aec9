"""Arguments that several functions take, whatever kind of number they come as. PyTorch is not needed here."""

from __future__ import annotations

import operator
from typing import Any


def as_int(value: Any) -> Any:
    """A whole number of any kind, such as numpy's, as Python's; a bool and what is no whole number as they are."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def is_count(value: Any) -> bool:
    """Whether it is a whole number of Python's, at least 1; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_flag(value: Any) -> bool:
    """Whether it equals True or False."""
    try:
        return value in (True, False)
    except (RuntimeError, TypeError, ValueError):  # an array, of which some elements may and others not
        return False
