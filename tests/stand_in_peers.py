"""Modules with the names and functions of other libraries, in plain PyTorch: one returns a new tensor, one also works
in place. They hide those that are installed, in processes that are spawned later too."""

from pathlib import Path

import pytest

PLAIN = """
import torch

def hadamard_transform(x, scale=1.0):
    n = x.shape[-1]
    y = x.float().reshape(-1, n)
    width = 1
    while width < n:
        even, odd = y.reshape(-1, n // (2 * width), 2, width).unbind(2)
        y = torch.stack((even + odd, even - odd), dim=2)
        width *= 2
    return (y.reshape(x.shape) * scale).to(x.dtype)
"""
IN_PLACE = """
import fast_hadamard_transform

def hadamard_transform(x, inplace=False):
    y = fast_hadamard_transform.hadamard_transform(x, x.shape[-1] ** -0.5)
    return x.copy_(y) if inplace else y
"""


def install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "fast_hadamard_transform.py").write_text(PLAIN)
    (directory / "faster_hadamard_transform.py").write_text(IN_PLACE)
    monkeypatch.syspath_prepend(directory)
