"""Functions of other projects by their own names, so that a program that calls them changes only an import.

    from hadagen.compat.fast_hadamard_transform import hadamard_transform

fast_hadamard_transform: functions of the package of this name.
hadacore: `hadamard_transform` of HadaCore, and `hadacore_transform` of vLLM.
quarot: functions of QuaRot's `hadamard_utils`, and of SpinQuant and QuIP#.
sglang: functions of SGLang's `sgl_kernel.hadamard`.

A program that nobody may change imports them by the names of the originals after `provide()`, or if it is started by
`python -m hadagen.compat`. docs/compat.md compares each module with its original.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from hadagen.errors import UsageError

__all__ = ["provide"]

# Packages by the names of the originals. They stand outside of hadagen once the folder is on the path.
PROVIDED = Path(__file__).with_name("provided")
NAMES = ("fast_hadamard_transform", "faster_hadamard_transform")


def provide(*, replace: bool = False) -> tuple[str, ...]:
    """Make `fast_hadamard_transform`, and `faster_hadamard_transform` of HadaCore, importable in this process.

    The names stand for packages with hadagen's functions, with a version and a submodule as the originals have them.
    Call it before anything imports these names. Processes that this one starts must call it too, or be started by
    `python -m hadagen.compat`.

    replace: take the place of originals that are installed. By default they stay.

    Returns the names that hadagen now provides. Raises `UsageError` if an original would be replaced that is imported
    already.
    """
    if replace and (taken := [name for name in NAMES if name in sys.modules and not _is_provided(name)]):
        where = getattr(sys.modules[taken[0]], "__file__", None)
        raise UsageError(
            f"{taken[0]} is imported already, from {where}; call hadagen.compat.provide before anything imports it"
        )
    folder = str(PROVIDED)
    if replace or folder not in sys.path:
        sys.path[:] = [each for each in sys.path if each != folder]
        sys.path.insert(0 if replace else len(sys.path), folder)
    importlib.invalidate_caches()
    return tuple(filter(_is_provided, NAMES))


def installed() -> dict[str, str]:
    """The originals that a program finds: name → file."""
    origins = {name: _origin(name) for name in NAMES}
    return {name: origin for name, origin in origins.items() if origin and not _is_provided(name)}


def found_in(folder: Path) -> dict[str, str]:
    """The modules in a folder with the names of the originals: name → file."""
    specs = {name: PathFinder.find_spec(name, [str(folder)]) for name in NAMES}
    return {name: spec.origin for name, spec in specs.items() if spec and spec.origin}


def environment() -> dict[str, str]:
    """The environment of a process that finds what is provided before all that is installed."""
    given = dict(os.environ)
    others = [each for each in given.get("PYTHONPATH", "").split(os.pathsep) if each and each != str(PROVIDED)]
    return {**given, "PYTHONPATH": os.pathsep.join([str(PROVIDED), *others])}


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that something made by hand
        return "an unknown place"
    return (spec.origin or "an unknown place") if spec else None


def _is_provided(name: str) -> bool:
    origin = _origin(name)
    return origin is not None and Path(origin).is_relative_to(PROVIDED)
