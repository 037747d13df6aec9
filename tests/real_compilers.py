"""What tests with a real compiler carry: skipped only where there is none; a broken one fails them."""

from __future__ import annotations

import pytest

from hadagen.compilers import COMPILERS
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
