"""Registers operators, pytrees and safe globals with PyTorch as soon as both are imported, so that a program that loads
an exported or packaged model needs no name of hadagen but `import hadagen`; and formulas with PyTorch's FLOP counter,
once that is imported too, because its import brings Triton. This module does not import PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def register_with_torch() -> None:
    """Register now if PyTorch is imported, else when it will be."""
    _when_imported("torch", _register)


def _when_imported(name: str, run: Callable[[], None]) -> None:
    """Call `run` now if the module of this name is imported, else when it will be."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, run))
    elif not getattr(module.__spec__, "_initializing", False):
        run()


def _register() -> None:
    with suppress(Exception):  # which the first use of a name raises, and `import torch` must not
        # These import all others.
        for name in ("runtime.transform", "runtime.quantize", "runtime.call.shims", "models.products.operator"):
            import_module(f"hadagen.{name}")
    _when_imported("torch.utils.flop_counter", _register_flops)


def _register_flops() -> None:
    with suppress(Exception):  # a release with another counter, which then counts nothing for these operators
        import_module("hadagen.runtime.call.flops")


class _Finder(MetaPathFinder):
    """Finds a module as others do, and calls a function once the module has run. It is asked for each module that is
    imported first."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
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
            self._then()

        with suppress(AttributeError):  # of a loader that takes no attributes; then the first use of a name registers
            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
