"""The page of all public names, from their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any

MODULES = (
    "hadagen",
    "hadagen.presets",
    "hadagen.prologues",
    "hadagen.compat",
    "hadagen.compat.fast_hadamard_transform",
    "hadagen.compat.hadacore",
    "hadagen.compat.quarot",
    "hadagen.compat.sglang",
)


def api() -> str:
    """A chapter for each module, with a section for each name."""
    return "\n\n".join(_chapter(import_module(name)) for name in MODULES)


def _chapter(module: ModuleType) -> str:
    names = getattr(module, "__all__", None) or list(_own(module))
    sections = [section for name in names for section in _sections(name, getattr(module, name))]
    return "\n\n".join([f"## {module.__name__}", *sections])


def _own(module: ModuleType) -> Iterator[str]:
    """The public names that a module defines."""
    for name, each in vars(module).items():
        if name[0] != "_" and getattr(each, "__module__", "") == module.__name__:
            yield name


def _sections(name: str, found: Any) -> Iterator[str]:
    yield f"### `{name}`\n\n```text\n{_signature(name, found)}{inspect.getdoc(found) or ''}\n```"
    if inspect.isclass(found) and not issubclass(found, (Enum, Exception)):
        for method, each in vars(found).items():
            function = each.__func__ if isinstance(each, (classmethod, staticmethod)) else each
            if method[0] != "_" and (inspect.isfunction(function) or isinstance(each, property)) and each.__doc__:
                full = f"{name}.{method}"
                yield f"#### `{full}`\n\n```text\n{_signature(full, function)}{inspect.getdoc(each)}\n```"


def _signature(name: str, found: Any) -> str:
    if isinstance(found, property) or (inspect.isclass(found) and issubclass(found, (Enum, Exception))):
        return ""
    arguments = [str(each) for each in inspect.signature(found).parameters.values() if each.name != "self"]
    # `hadagen.problem.choices` has the names for editors; the text names them.
    arguments = [re.sub(r"\b(Format|Rule|Layout|Numerics)Name\b", "str", each) for each in arguments]
    line = f"{name}({', '.join(arguments)})"
    if len(line) > 100:
        line = f"{name}(\n    " + ",\n    ".join(arguments) + ",\n)"
    return re.sub(r"'([^']*)'(?=[,) ]|$)", r"\1", line) + "\n\n"
