"""The calls of NVRTC, and a program that compiles one source with them.

    python -I -S nvrtc_calls.py LIBRARY STEM OPTION...

compiles STEM.cu in the working folder, with the headers *.cuh there, to STEM.ptx and STEM.cubin. The log goes to
stdout. The exit status is 1 if the source is refused, or the library cannot be loaded.

A tune starts this program once for each kernel, so it imports little: that halves its start.

NVRTC documentation: https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

TYPE_CHECKING = False  # as type checkers read it; importing `typing` takes as long as `ctypes`
if TYPE_CHECKING:
    from typing import Any


def load(path: str) -> Any:
    """The library at a path, or of a name that the system looks for. Raises `OSError` if it cannot be loaded."""
    if folder := os.path.dirname(path):
        _check_length(path)
        # The library opens this one by its name alone, which a wheel's folder is not searched for.
        for name in os.listdir(folder):
            if name.startswith("libnvrtc-builtins.so"):
                ctypes.CDLL(f"{folder}/{name}")
    library = ctypes.CDLL(path)
    try:
        library.nvrtcGetErrorString.restype = c_char_p
    except AttributeError:
        raise OSError("it is another library") from None
    return library


def compile_source(
    library: Any, text: str, name: str, options: list[str], headers: dict[str, str]
) -> tuple[str, bytes, bytes, str]:
    """Compile a source. Returns NVRTC's name for the error ("" for success), the PTX, the cubin and the log. PTX and
    cubin are empty after an error; the cubin also if the option `-arch` names no real architecture.

    Raises `RuntimeError` if another call fails.
    """
    program = c_void_p()
    many = c_char_p * len(headers)
    texts, names = many(*(t.encode() for t in headers.values())), many(*(n.encode() for n in headers))
    call(library, "CreateProgram", byref(program), text.encode(), name.encode(), len(headers), texts, names)
    try:
        options = [*options, *_uncached(library)]
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), given)
        log = _bytes(library, "ProgramLog", program).replace(b"\0", b"").decode(errors="replace")
        if status:
            return _name(library, status), b"", b"", log
        real = any(option.startswith("-arch=sm_") for option in options)
        cubin = _bytes(library, "CUBIN", program) if real else b""
        return "", _bytes(library, "PTX", program).rstrip(b"\0"), cubin, log
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _uncached(library: Any) -> list[str]:
    """The option with which NVRTC compiles a source again. From CUDA 12.9 on, where a driver is installed, NVRTC keeps
    what it has compiled, and the log of a source that it knows lacks the report on the kernel's resources."""
    major, minor = c_int(), c_int()
    call(library, "Version", byref(major), byref(minor))
    return ["--no-cache"] if (major.value, minor.value) >= (12, 9) else []


def call(library: Any, function: str, *arguments: Any) -> None:
    """Call `nvrtc…`. Raises `RuntimeError` if that fails."""
    if status := getattr(library, f"nvrtc{function}")(*arguments):
        raise RuntimeError(f"nvrtc{function} fails with {_name(library, status)}")


def _check_length(path: str) -> None:
    """Raises `OSError` if a library was cut off; a process that loads it would be killed (System V gABI)."""
    with open(path, "rb") as file:
        header = file.read(64)
    if len(header) == 64:
        sections = struct.unpack_from("<Q", header, 40)[0]
        size, count = struct.unpack_from("<HH", header, 58)
        if sections + size * count <= os.path.getsize(path):
            return
    raise OSError("it is no whole library")


def _bytes(library: Any, what: str, program: Any) -> bytes:
    size = c_size_t()
    call(library, f"Get{what}Size", program, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    call(library, f"Get{what}", program, buffer)
    return buffer.raw


def _name(library: Any, status: int) -> str:
    return str(library.nvrtcGetErrorString(c_int(status)).decode())


def _read(name: str) -> str:
    with open(name, encoding="utf-8") as file:
        return file.read()


def main() -> None:
    path, stem, *options = sys.argv[1:]
    try:
        library = load(path)
    except OSError as error:
        sys.exit(f"NVRTC cannot be loaded from {path}: {error}")
    source, headers = f"{stem}.cu", [name for name in os.listdir() if name.endswith(".cuh")]
    wrong, ptx, cubin, log = compile_source(
        library, _read(source), source, options, {name: _read(name) for name in headers}
    )
    print(log + wrong)
    if wrong:
        sys.exit(1)
    for suffix, content in (("ptx", ptx), ("cubin", cubin)):
        with open(f"{stem}.{suffix}", "wb") as output:
            output.write(content)


if __name__ == "__main__":
    main()
