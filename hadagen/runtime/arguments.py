"""Checks arguments that several functions take; numbers may be of any kind. This module does not need PyTorch."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from hadagen.errors import UsageError, names_like, shortened, shown

Function = TypeVar("Function", bound=Callable[..., Any])

_BOOLS = "bool", "torch.bool"  # the bools of numpy and of PyTorch, which both take for an index


def as_int(value: Any) -> Any:
    """An integer of any kind, such as numpy's, as a Python int; None, a bool of any kind, or another value unchanged.

    None is not passed to `operator.index`, because Dynamo of PyTorch before 2.13 does not catch its error."""
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
    """Whether the value is a Python int of at least 1, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_flag(value: Any) -> bool:
    """Whether the value equals True or False."""
    try:
        return value in (True, False)
    except (RuntimeError, TypeError, ValueError):  # an array has no single answer
        return False


def check_flags(**flags: Any) -> None:
    """Raises `UsageError`, with the name, for what is no flag."""
    for name, flag in flags.items():
        if not is_flag(flag):
            raise UsageError(f"{name} = {shown(flag)} is not supported; give True or False")


def as_whole(value: Any, name: str, wanted: str) -> int:
    """The count. Raises `UsageError`, with the name and what is wanted, for anything else."""
    number = as_int(value)
    if not is_count(number):
        raise UsageError(f"{name} = {shown(value)} is not supported; give {wanted}")
    return cast(int, number)


def name_of(dtype: Any) -> str:
    """The name of a type that a program gives by itself or by its name: "float16" for torch.float16."""
    return dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")


def is_one_of(value: Any, names: Collection[Any]) -> bool:
    """Whether the value is text and one of the names. Comparing other values, such as arrays, may raise anything."""
    return isinstance(value, str) and value in names


def explained(
    kind: type[Exception], advice: str = "", renamed: Mapping[str, str] | None = None
) -> Callable[[Function], Function]:
    """Name the argument that may be meant where a caller names one that does not exist, as Python does from 3.13 on.
    Only for functions that are not called often, because every call gets a little slower.

    kind: the class of the error for arguments that are missing, unknown or too many. renamed: other names of arguments.
    """

    def decorated(function: Function) -> Function:
        wanted = inspect.signature(function)

        @functools.wraps(function)
        def checked(*arguments: Any, **options: Any) -> Any:
            for old, new in (renamed or {}).items():
                if old in options and new not in options:
                    options[new] = options.pop(old)
            try:
                wanted.bind(*arguments, **options)
            except TypeError as error:
                said = [f"{function.__qualname__.removesuffix('.__init__')}: {shortened(str(error))}"]
                unknown = next((name for name in options if name not in wanted.parameters), "")
                if similar := names_like(unknown, wanted.parameters):
                    said[0] += f" (did you mean {similar[0]}?)"
                raise kind("; ".join([*said, *filter(None, [advice])])) from None
            return function(*arguments, **options)

        return cast(Function, checked)

    return decorated
