"""Registers operators, pytrees and safe globals with PyTorch as soon as both are imported, so that a program that loads
an exported or packaged model needs no name of hadagen but `import hadagen`. This module does not import PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def register_with_torch() -> None:
    """Register now if PyTorch is imported, else when it will be."""
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _Finder())
    elif not getattr(torch.__spec__, "_initializing", False):
        _register()


def _register() -> None:
    with suppress(Exception):  # which the first use of a name raises, and `import torch` must not
        for name in ("transform", "quantize", "prologue_operator"):  # which import all others
            import_module(f"hadagen.runtime.{name}")


class _Finder(MetaPathFinder):
    """Finds PyTorch as others do, and registers once it has run. It is asked for each module that is imported first."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            _register()

        with suppress(AttributeError):  # of a loader that takes no attributes; then the first use of a name registers
            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
