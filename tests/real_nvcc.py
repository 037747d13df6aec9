"""What tests with a real nvcc carry: skipped only where `Toolchain.find` finds none; a broken one fails them."""

from __future__ import annotations

import pytest

from hadagen import toolchain

needs_nvcc = pytest.mark.skipif(
    toolchain._find("nvcc") is None, reason="no nvcc on PATH, in $CUDA_HOME or among the Python packages"
)
