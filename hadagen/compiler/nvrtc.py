"""NVRTC, NVIDIA's compiler as a library: one CUDA C++ source → PTX and a cubin, without a toolkit or a host compiler.

PyTorch's CUDA wheels bring the library along. Threads may share it; it compiles one source at a time.

NVRTC documentation: https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_int
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hadagen.compiler import nvrtc_calls
from hadagen.errors import NoCompilerError, ToolchainError

# For every kernel. The second flag makes NVRTC report the kernel's resource usage.
FLAGS = ("-std=c++17", "--ptxas-options=-v")
OLDEST = (12, 1)  # in which shared sources of sm_90 compile
# `.so.13` before `.so.12`: the newer knows more GPUs.
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
# Where the wheels of CUDA 13 and of CUDA 12 keep libraries, below a folder of packages.
_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_MAPS = Path("/proc/self/maps")  # the files that this process has mapped
_NOTES, _BUILD_ID = 4, 3  # PT_NOTE and NT_GNU_BUILD_ID
_SAMPLE, _SAMPLES = 1 << 12, 64  # bytes of one sample of a file, and how many there are
HINT = "install PyTorch with CUDA, or: pip install nvidia-cuda-nvrtc"


class Compiled(NamedTuple):
    """The output of NVRTC for a source. `log`: NVRTC's warnings, and the kernel's resource usage if the flags ask for
    it (`--ptxas-options=-v`)."""

    ptx: bytes
    cubin: bytes
    log: str


class CompileError(ToolchainError):
    """NVRTC refused a source. `log`: all that it said, and at the end its name for the failure."""

    def __init__(self, message: str, log: str = "") -> None:  # the default is for pickle
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class Nvrtc:
    """A loaded library. `version`: such as (13, 0)."""

    path: str
    version: tuple[int, int]

    @classmethod
    def find(cls) -> Nvrtc:
        """The library in $HADAGEN_NVRTC; else one that this process has loaded; else the newest of the installed
        wheels, in $CUDA_HOME, or where the system looks.

        Raises `NoCompilerError` if there is none, and `ToolchainError` if none works.
        """
        if named := os.environ.get("HADAGEN_NVRTC"):
            try:
                return _load(named)
            except ToolchainError as error:
                said = str(error).removesuffix(f"; {HINT}")
                raise ToolchainError(f"{said}; correct HADAGEN_NVRTC, which names it, or unset it") from None
        failure: ToolchainError = NoCompilerError(
            f"NVRTC was not found among the Python packages, in $CUDA_HOME or on this system; {HINT}"
        )
        for path in dict.fromkeys(_candidates()):
            try:
                return _load(path)
            except ToolchainError as error:
                if isinstance(failure, NoCompilerError) and os.path.exists(path):
                    failure = error
        raise failure

    @classmethod
    def at(cls, path: str) -> Nvrtc:
        """The library at a path. Raises `ToolchainError` if it cannot be loaded."""
        return _load(path)

    @functools.cached_property
    def banner(self) -> str:
        """The comments that its PTX begins with. They name its exact version. The first use compiles an empty source.

        Raises `ToolchainError` if that fails, for example because the library of built-in functions is missing.
        """
        try:
            ptx = self.compile("", "empty.cu", f"compute_{self.archs[0]}", (), {}).ptx.decode()
        except CompileError as error:
            raise ToolchainError(f"NVRTC at {self.path} compiles nothing ({error}); {HINT}") from None
        return "\n".join(line[3:] for line in ptx.splitlines() if line.startswith("// "))

    @property
    def release(self) -> str:
        """Its exact version, such as "13.0.88"."""
        match = re.search(r"\bV(\d+(?:\.\d+)+)", self.banner)
        return match[1] if match else _dotted(self.version)

    @property
    def archs(self) -> tuple[int, ...]:
        """The compute capabilities that it compiles for, such as 75 and 90, ascending."""
        library, count = _library(self.path), c_int()
        _call(library, "GetNumSupportedArchs", byref(count))
        numbers = (c_int * count.value)()
        _call(library, "GetSupportedArchs", numbers)
        return tuple(sorted(numbers))

    def compile(self, text: str, name: str, arch: str, flags: Sequence[str], headers: Mapping[str, str]) -> Compiled:
        """Compile a source. `arch`: such as "sm_90", or "compute_90" for PTX alone. `headers`: name in `#include` →
        text. `name` stands for the source in messages.

        Raises `CompileError` if the source is refused.
        """
        try:
            wrong, ptx, cubin, log = nvrtc_calls.compile_source(
                _library(self.path), text, name, [f"-arch={arch}", *flags], dict(headers)
            )
        except RuntimeError as error:
            raise ToolchainError(f"{self.path}: {error}; {HINT}") from None
        if wrong:
            first = next((line for line in log.splitlines() if "error" in line), log.strip() or wrong)
            raise CompileError(
                f"NVRTC {_dotted(self.version)} cannot compile {name} for {arch}: {first.strip()}", log + wrong
            )
        return Compiled(ptx, cubin, log)


@functools.cache
def stamp() -> str:
    """A text that identifies the NVRTC library that `Nvrtc.find` would load, whatever its path; "" if there is none.
    The library is loaded only if the system's loader alone finds it."""
    named = os.environ.get("HADAGEN_NVRTC")
    for look in (lambda: None, Nvrtc.find):  # what is loaded has a path
        with suppress(ToolchainError):
            look()
        loaded = (path for path in _mapped() if named and os.path.basename(path).startswith(named))
        for path in [named, *loaded] if named else _candidates():
            if os.path.exists(path):
                with suppress(OSError):
                    return _identity(path)
    return ""


def _identity(path: str) -> str:
    """The size of a file, and the build ID that the linker put into it; without one, a digest of samples of it. The
    library has 100 MB, so it is not read as a whole."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return f"{size} {_build_id(file) or _sampled(file, size)}"


def _build_id(file: BinaryIO) -> str:
    """The build ID of a 64-bit library (System V gABI, "Program Header" and "Note Section"); "" if it has none."""
    header = file.read(64)
    if len(header) < 64 or header[:6] != b"\x7fELF\2\1":
        return ""
    at, (entry_size, count) = struct.unpack_from("<Q", header, 32)[0], struct.unpack_from("<HH", header, 54)
    for number in range(count):
        file.seek(at + number * entry_size)
        entry = file.read(56)
        if len(entry) < 56 or struct.unpack_from("<I", entry)[0] != _NOTES:
            continue
        file.seek(struct.unpack_from("<Q", entry, 8)[0])
        notes, place = file.read(min(struct.unpack_from("<Q", entry, 32)[0], _SAMPLE)), 0
        while place + 12 <= len(notes):
            name_size, size, kind = struct.unpack_from("<III", notes, place)
            content = place + 12 + -(-name_size // 4) * 4
            if kind == _BUILD_ID and notes[place + 12 : content] == b"GNU\0":
                return notes[content : content + size].hex()
            place = content + -(-size // 4) * 4
    return ""


def _sampled(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    for number in range(_SAMPLES):
        file.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
        digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _candidates() -> Iterator[str]:
    """Paths where the library may be, best first."""
    yield from _mapped()  # PyTorch loads it with its own first compilation
    for soname, folder in zip(_SONAMES, _FOLDERS, strict=True):
        yield from (path for entry in sys.path if os.path.exists(path := f"{entry or '.'}/{folder}/{soname}"))
    for soname in _SONAMES:
        if home := os.environ.get("CUDA_HOME"):
            yield f"{home}/lib64/{soname}"
        yield soname


def _mapped() -> list[str]:
    """The paths of the NVRTC libraries that this process has loaded."""
    with suppress(OSError):
        return re.findall(r" (/.*/libnvrtc\.so\.\d\S*)$", _MAPS.read_text(errors="replace"), re.M)
    return []


@functools.cache
def _load(path: str) -> Nvrtc:
    if os.path.dirname(path):
        path = os.path.abspath(path)  # for programs that run elsewhere
    major, minor = c_int(), c_int()
    _call(_library(path), "Version", byref(major), byref(minor))
    version = major.value, minor.value
    if version < OLDEST:
        raise ToolchainError(f"NVRTC {_dotted(version)} at {path} is too old; install {_dotted(OLDEST)} or newer")
    return Nvrtc(path, version)


@functools.cache
def _library(path: str) -> Any:
    try:
        return nvrtc_calls.load(path)
    except OSError as error:
        raise ToolchainError(f"NVRTC cannot be loaded from {path} ({error}); {HINT}") from None


def _call(library: Any, function: str, *arguments: Any) -> None:
    try:
        nvrtc_calls.call(library, function, *arguments)
    except RuntimeError as error:
        raise ToolchainError(f"{error}; {HINT}") from None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
