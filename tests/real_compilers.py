"""What tests with a real compiler carry: skipped only where there is none; a broken one fails them."""

import os
from contextlib import suppress
from functools import cache

import pytest

from hadagen.compiler import nvrtc
from hadagen.compiler.compilers import COMPILERS
from hadagen.compiler.nvrtc import Nvrtc
from hadagen.errors import NoCompilerError, ToolchainError


def is_there(kind: str) -> bool:
    try:
        COMPILERS[kind].find()
    except NoCompilerError:
        return False
    except ToolchainError:
        pass
    return True


needs_nvcc = pytest.mark.skipif(not is_there("nvcc"), reason="no nvcc on PATH, in $CUDA_HOME or among the packages")
needs_nvrtc = pytest.mark.skipif(not is_there("nvrtc"), reason="no NVRTC among the packages or on this system")
needs_compiler = pytest.mark.skipif(not any(map(is_there, COMPILERS)), reason="neither NVRTC nor nvcc is here")


@cache
def nvrtc_libraries() -> dict[str, Nvrtc]:
    """Release → library, for every NVRTC here, and for the paths in $HADAGEN_TEST_NVRTC, with `:` between them."""
    found: dict[str, Nvrtc] = {}
    for path in nvrtc._candidates():
        with suppress(ToolchainError):
            library = Nvrtc.at(path)
            found.setdefault(library.release, library)
    named = [Nvrtc.at(path) for path in os.environ.get("HADAGEN_TEST_NVRTC", "").split(":") if path]
    return found | {library.release: library for library in named}
