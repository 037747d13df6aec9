"""The errors that hadagen raises. Each message is one sentence: the value, the limit and the fix."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line. Characters that would control a terminal, such as escapes or line ends, are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class HadagenError(Exception):
    """A failure that the caller could not foresee. The command line exits with 1.

    The message may quote a file or a driver; it is shown `printable`.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(HadagenError, ValueError):
    """The caller asked for something impossible. The command line exits with 2."""

    exit_code = 2


class TensorError(UsageError, RuntimeError):
    """A tensor cannot be transformed or written. Also a RuntimeError, because PyTorch raises that in such cases."""


class ToolchainError(HadagenError):
    """A compiler is missing, or does not work."""


class NoCompilerError(ToolchainError):
    """A compiler is nowhere to be found."""


class StorageError(HadagenError):
    """A database or bundle cannot be read or written: foreign, newer, damaged, read-only or full."""


class DeviceError(HadagenError):
    """A GPU is missing, was lost, or refused a call."""


class DisturbedError(DeviceError):
    """A GPU was busy or throttled each time that something was to be timed on it."""


def told_apart(error: float, bound: float) -> tuple[str, str]:
    """Two different numbers as two different texts, with three digits each, or with as many as that needs."""
    for digits in range(2, 17):
        said = f"{error:.{digits}e}", f"{bound:.{digits}e}"
        if said[0] != said[1]:
            break
    return said
