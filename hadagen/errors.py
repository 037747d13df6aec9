"""The errors that hadagen raises. Each message is one sentence: the value, the limit and the fix."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

_MOST = 80  # characters of a value in a message
_LONGEST_SECRET = 1000  # characters
# The password of a URL, of which a path keeps one slash, and that of a setting, as in a query of a URL or a connection
# string.
_OF_URL = re.compile(rf"(:/{{1,2}}[^\s:/@]{{0,{_LONGEST_SECRET}}}:)\S{{1,{_LONGEST_SECRET}}}@")
_OF_SETTING = re.compile(r"((?i:passwd|password)\s{0,9}=\s{0,9})('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s&;,'\")]+)")


def without_passwords(text: str) -> str:
    """The text with "***" in place of passwords of URLs and connection strings."""
    return _OF_SETTING.sub(r"\1***", _OF_URL.sub(r"\1***@", text))


def value_without_passwords(text: str) -> str:
    """The same for one value, whose password may have any characters, and which may be a URL without its scheme."""
    head, at, host = text.rpartition("@")
    is_path = "/" in head and "//" not in head
    if at and not is_path and (user := re.match(r"[^:@]*:(//[^:@]*:)?(?!//)", head)):
        text = f"{user[0]}***@{host}"
    return without_passwords(text)


def printable(text: str) -> str:
    """The text on one line, without passwords. Characters that would control a terminal, such as escapes or line ends,
    are escaped."""
    text = without_passwords(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int = _MOST) -> str:
    """The text on one line, cut off after `most` characters."""
    text = printable(" ".join(text[: 2 * most + _LONGEST_SECRET].split()))
    return text if len(text) <= most else f"{text[:most]}…"


def shown(value: Any, most: int = _MOST) -> str:
    """A value for a message: its `repr` on one line, without passwords, cut off after `most` characters."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # Python refuses to write very long ones
        return f"an integer of {value.bit_length()} bits"
    if type(value) is bytes:
        value = value[: most + _LONGEST_SECRET]
    if type(value) is str:
        value = value_without_passwords(value[: most + _LONGEST_SECRET])[: most + 1]
    try:
        return shortened(repr(value), most)
    except Exception:  # a `repr` of the caller's may raise anything, and one of a list has its elements
        return f"a {type(value).__name__}"


def install(extra: str) -> str:
    """How to install an extra of hadagen, which no index of packages has yet: of the wheel that was installed, or else
    in a checkout."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("hadagen").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if "archive_info" in origin:
        return f"pip install 'hadagen[{extra}] @ {printable(origin['url'])}'"
    return f"pip install '.[{extra}]' in a checkout of hadagen"


def choice(given: Any, known: Iterable[str]) -> str:
    """The advice for an unknown name: "did you mean …", or else all known names."""
    names = list(known)
    near = names_like(given, names)
    if near:
        return f"did you mean {_either(near)}?"
    return f"choose {names[0]}" if len(names) == 1 else f"choose one of {', '.join(names)}"


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def names_like(given: Any, known: Iterable[str]) -> list[str]:
    """The known names that may be meant: the name that differs only in case and hyphens, names that contain or begin
    the given name, or the name with the fewest typing errors."""
    if not isinstance(given, str) or not given:
        return []
    known, wanted = list(known), _plain(given[:_MOST])
    plain = {name: _plain(name) for name in known}
    for is_meant in (
        lambda name: name == wanted,
        lambda name: len(wanted) > 1 and name.startswith(wanted),
        lambda name: len(wanted) > 2 and wanted in name,
        lambda name: len(name) > 1 and wanted.startswith(name),
    ):
        if found := [name for name in known if is_meant(plain[name])]:
            return found
    errors = {name: _typing_errors(wanted, plain[name]) for name in known}
    least = min(errors.values(), default=len(wanted))
    is_near = len(wanted) > 2 and least <= max(1, len(wanted) // 4)
    return [name for name in known if errors[name] == least][:1] if is_near else []


def _plain(name: str) -> str:
    return "".join(name.lower().replace("_", "-").split()).strip("-")


def _typing_errors(one: str, other: str) -> int:
    """How many letters must be added, left out or replaced to turn one text into the other (Levenshtein)."""
    before = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        now = [row]
        for column, beside in enumerate(other, 1):
            now.append(min(before[column] + 1, now[-1] + 1, before[column - 1] + (letter != beside)))
        before = now
    return before[-1]


class HadagenError(Exception):
    """A failure that the caller could not foresee. The command line exits with 1.

    The message may quote a file or a driver, so it is made `printable` where it is shown.
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
    """No compiler was found."""


class StorageError(HadagenError):
    """A database or bundle cannot be read or written: foreign, newer, damaged, read-only or full."""


class DeviceError(HadagenError):
    """A GPU is missing, was lost, or refused a call."""


class DisturbedError(DeviceError):
    """A GPU was busy or throttled in every attempt to time a kernel."""


class SlowPathWarning(RuntimeWarning):
    """PyTorch computes a call on a GPU, because no kernel does. The message says why, and what would have a kernel. It
    is given once in a process for each problem and device, and Python's filters silence it or make it an error."""


def told_apart(error: float, bound: float) -> tuple[str, str]:
    """Two different numbers as different texts, with three digits each, or more digits if three do not tell them
    apart."""
    for digits in range(2, 17):
        said = f"{error:.{digits}e}", f"{bound:.{digits}e}"
        if said[0] != said[1]:
            break
    return said
