"""NVRTC, NVIDIA's compiler as a library: one CUDA C++ source → PTX and a cubin, without a toolkit or a host compiler.

PyTorch's CUDA wheels bring the library along. Threads may share it; it compiles one source at a time.

NVRTC documentation: https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hadagen.errors import ToolchainError

OLDEST = (12, 1)  # in which shared sources of sm_90 compile
# `.so.13` before `.so.12`: the newer knows more GPUs.
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
# Where the wheels of CUDA 13 and of CUDA 12 keep libraries, below a folder of packages.
_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_HINT = "install PyTorch with CUDA, or: pip install nvidia-cuda-nvrtc"


class Compiled(NamedTuple):
    """What NVRTC made of a source. `log`: its warnings, and what the kernel uses if the flags ask for that."""

    ptx: bytes
    cubin: bytes
    log: str


class CompileError(ToolchainError):
    """NVRTC refused a source. `log`: all that it said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.log)


@dataclass(frozen=True)
class Nvrtc:
    """A loaded library. `version`: such as (13, 0)."""

    path: str
    version: tuple[int, int]

    @classmethod
    def find(cls) -> Nvrtc:
        """The library in $HADAGEN_NVRTC; else one that this process has loaded; else the newest of the installed
        wheels, in $CUDA_HOME, or where the system looks.

        Raises `ToolchainError` if there is none, or none that works.
        """
        if named := os.environ.get("HADAGEN_NVRTC"):
            return _load(named)
        for path in dict.fromkeys(_candidates()):
            try:
                return _load(path)
            except ToolchainError:
                continue
        raise ToolchainError(f"NVRTC was not found among the Python packages, in $CUDA_HOME or on this system; {_HINT}")

    @classmethod
    def at(cls, path: str) -> Nvrtc:
        """The library at a path. Raises `ToolchainError` if it cannot be loaded."""
        return _load(path)

    @property
    def release(self) -> str:
        """Such as "13.0"."""
        return ".".join(map(str, self.version))

    @property
    def archs(self) -> tuple[int, ...]:
        """The compute capabilities that it compiles for, such as 75 and 90, ascending."""
        library, count = _library(self.path), c_int()
        _check(library, library.nvrtcGetNumSupportedArchs(byref(count)))
        numbers = (c_int * count.value)()
        _check(library, library.nvrtcGetSupportedArchs(numbers))
        return tuple(sorted(numbers))

    def compile(self, text: str, name: str, arch: str, flags: Sequence[str], headers: Mapping[str, str]) -> Compiled:
        """Compile a source. `arch`: such as "sm_90", or "compute_90" for PTX alone. `headers`: name in `#include` →
        text. `name` stands for the source in messages.

        Raises `CompileError` if the source is refused.
        """
        library = _library(self.path)
        with _program(library, text, name, headers) as program:
            options = [option.encode() for option in (f"-arch={arch}", *flags)]
            status = library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
            log = _bytes(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status:
                first = next(
                    (line for line in log.splitlines() if "error" in line), log.strip() or _name(library, status)
                )
                raise CompileError(f"NVRTC {self.release} cannot compile {name} for {arch}: {first.strip()}", log)
            cubin = b"" if arch.startswith("compute") else _bytes(library, "CUBIN", program)
            return Compiled(_bytes(library, "PTX", program).rstrip(b"\0"), cubin, log)


def _candidates() -> Iterator[str]:
    """Paths where the library may be, best first."""
    maps = Path("/proc/self/maps")
    if maps.exists():  # PyTorch loads it with its own first compilation
        yield from re.findall(r"(/\S*/libnvrtc\.so\.\d\S*)$", maps.read_text(errors="replace"), re.M)
    for soname, folder in zip(_SONAMES, _FOLDERS, strict=True):
        yield from (path for entry in sys.path if os.path.exists(path := f"{entry or '.'}/{folder}/{soname}"))
    for soname in _SONAMES:
        if home := os.environ.get("CUDA_HOME"):
            yield f"{home}/lib64/{soname}"
        yield soname


@functools.cache
def _load(path: str) -> Nvrtc:
    library = _library(path)
    major, minor = c_int(), c_int()
    _check(library, library.nvrtcVersion(byref(major), byref(minor)))
    version = major.value, minor.value
    if version < OLDEST:
        said, least = (".".join(map(str, each)) for each in (version, OLDEST))
        raise ToolchainError(f"NVRTC {said} at {path} is too old; install {least} or newer")
    return Nvrtc(path, version)


@functools.cache
def _library(path: str) -> Any:
    try:
        # It opens this one by its name alone, which a wheel's folder is not searched for.
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(path)
        library.nvrtcGetErrorString.restype = c_char_p
    except (OSError, AttributeError) as error:
        raise ToolchainError(f"NVRTC cannot be loaded from {path} ({error}); {_HINT}") from None
    return library


@contextmanager
def _program(library: Any, text: str, name: str, headers: Mapping[str, str]) -> Iterator[Any]:
    program = c_void_p()
    many = c_char_p * len(headers)
    texts, names = many(*(t.encode() for t in headers.values())), many(*(n.encode() for n in headers))
    made = library.nvrtcCreateProgram(byref(program), text.encode(), name.encode(), len(headers), texts, names)
    _check(library, made)
    try:
        yield program
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _bytes(library: Any, what: str, program: Any) -> bytes:
    size = c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _name(library: Any, status: int) -> str:
    return str(library.nvrtcGetErrorString(status).decode())


def _check(library: Any, status: int) -> None:
    if status:
        raise ToolchainError(f"NVRTC fails with {_name(library, status)}; {_HINT}")
