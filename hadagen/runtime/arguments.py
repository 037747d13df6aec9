"""Checks arguments that several functions take, of any kind of number. This module does not need PyTorch."""

from __future__ import annotations

import operator
from typing import Any

_BOOLS = "bool", "torch.bool"  # of numpy and of PyTorch, of which both make an index


def as_int(value: Any) -> Any:
    """An integer of any kind, such as numpy's, as a Python int; None, a bool of any kind, or another value unchanged.

    None is not given to `operator.index`, of which Dynamo of PyTorch before 2.13 catches no error."""
    try:
        if value is None or isinstance(value, bool):
            return value
        # Dynamo cannot look for an attribute of a size.
        if not isinstance(value, int) and str(getattr(value, "dtype", "")) in _BOOLS:
            return value
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor without one value, too
        return value


def is_count(value: Any) -> bool:
    """Whether it is a Python int of at least 1, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_flag(value: Any) -> bool:
    """Whether it equals True or False."""
    try:
        return value in (True, False)
    except (RuntimeError, TypeError, ValueError):  # an array has no single answer
        return False
