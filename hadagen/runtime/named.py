"""`torch.ops.hadagen.named_matrix`: a named Hadamard matrix on a device. As an operator, so that torch.compile does not
look inside."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hadagen.matrices import find_matrix
from hadagen.problem import kernel_order
from hadagen.runtime.linear import LIBRARY
from hadagen.runtime.operands import combined, pack_matrix, packed_size


def matrix_of(name: str, order: int) -> torch.Tensor:
    """[order, order], int8 of ±1, on the CPU.

    Raises `UsageError` if there is no such matrix, and `StorageError` if it is damaged.
    """
    entries = torch.frombuffer(bytearray(find_matrix(name, order).entries()), dtype=torch.int8)
    return entries.view(order, order) * 2 - 1


@lru_cache(maxsize=64)
def _on(name: str, order: int, n: int, device: str) -> torch.Tensor:
    with _disable_current_modes(), torch.inference_mode(False):  # whose tensors would outlive them here
        (matrix,) = combined([matrix_of(name, order)], n)
        return pack_matrix(matrix).to(device)


def _copy(name: str, order: int, n: int, device: str) -> torch.Tensor:
    return _on(name, order, n, device).clone()  # compiled code may reuse the memory of a result


def _fake(name: str, order: int, n: int, device: str) -> torch.Tensor:
    return torch.empty(packed_size(kernel_order(order, n // order)), dtype=torch.uint8, device=device)


LIBRARY.define("named_matrix(str name, int order, int n, str device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("named_matrix", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("hadagen::named_matrix", _fake, lib=LIBRARY)

# (name, order, n, device) → the matrix as `rotate` takes it for rows of n, `combined` and packed, in a new tensor. Its
# order is `kernel_order(order, n // order)`.
# The device is text, because traces of torch.jit have no devices in operators.
named_matrix: Any = torch.ops.hadagen.named_matrix.default
