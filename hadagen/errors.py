"""The errors hadagen raises on purpose. Each message is one sentence: the value, the limit and the fix."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line: what would steer a terminal, such as an escape or a line end, as Python writes it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class HadagenError(Exception):
    """Something failed that the caller could not have known. The command line exits with 1.

    The message may quote what a file or a driver says; it is shown `printable`.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(HadagenError, ValueError):
    """The caller asked for something that cannot be. The command line exits with 2."""

    exit_code = 2


class TensorError(UsageError, RuntimeError):
    """A tensor cannot be transformed, or not written to. PyTorch raises RuntimeError there, and so is this one."""


class ToolchainError(HadagenError):
    """nvcc or the host compiler is missing or does not work at all."""


class StorageError(HadagenError):
    """A database or bundle cannot be read or written: foreign, newer, damaged, read-only or full."""


class DeviceError(HadagenError):
    """A GPU is missing, was lost, or refused a call."""


def told_apart(error: float, bound: float) -> tuple[str, str]:
    """Two numbers that differ as texts that differ: with three digits each, or with as many more as that takes."""
    for digits in range(2, 17):
        said = f"{error:.{digits}e}", f"{bound:.{digits}e}"
        if said[0] != said[1]:
            break
    return said
