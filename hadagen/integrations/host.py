"""What the module of every host asks: whether the host gets its hooks, and whether it still has what they need."""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from hadagen.errors import choice, shown

SWITCH = "HADAGEN_INTEGRATIONS"
NAMES = ("none", "vllm", "transformers", "compressed_tensors", "sglang", "torchao")  # which SWITCH may have
_warned: set[tuple[str, str]] = set()


class Changed(Exception):
    """A host lacks what a hook needs. The message says what."""


class Host(NamedTuple):
    """A project with hooks.

    name: of its package, as it is imported. distribution: as it is installed. tested: the versions that the tests of
    hadagen run its hooks with.
    """

    name: str
    distribution: str
    tested: str

    def is_enabled(self) -> bool:
        """Whether HADAGEN_INTEGRATIONS is unset or names the host. Warns once of each name in it that is not known."""
        given = os.environ.get(SWITCH)
        if given is None:
            return True
        names = [each.strip() for each in given.split(",")]
        for name in filter(None, names):
            if name not in NAMES and (SWITCH, name) not in _warned:
                _warned.add((SWITCH, name))
                warnings.warn(f"{SWITCH} has {shown(name)}, which is not known; {choice(name, NAMES)}", stacklevel=3)
        return self.name in names

    def version(self) -> str | None:
        """The version that is installed, or None."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def get(self, path: str, *parameters: str) -> Any:
        """What `path` names, such as `vllm.config:VllmConfig`, which takes these parameters.

        Raises `Changed` if the host has no such name, or it is a function that takes other parameters.
        """
        module, _, names = path.partition(":")
        try:
            found: Any = import_module(module)
            for name in filter(None, names.split(".")):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise Changed(f"it has no {path.replace(':', '.')}") from error
        if parameters:
            from inspect import signature

            takes = tuple(signature(found).parameters)
            if takes[: len(parameters)] != parameters:
                raise Changed(f"{path.replace(':', '.')} takes {', '.join(takes)}, not {', '.join(parameters)}")
        return found

    def warn(self, reason: str) -> None:
        """Warn once of each reason that the host computes by itself."""
        if (self.name, reason) not in _warned:
            _warned.add((self.name, reason))
            found = self.version() or "of an unknown version"
            warnings.warn(
                f"{self.name} {found} does not use hadagen here: {reason}; hadagen was tested with {self.name} "
                f"{self.tested}, and {SWITCH}=none switches its hooks off",
                stacklevel=2,
            )
