"""Sealed buffers: values stored as bytes with a checksum, so that a module recognizes its values after anyone moved,
loaded or stored the buffer. Integers are not cast, so no change of type rounds the values.

A sealed buffer is uint8 [length + TRAILER]. The values come first, so that a kernel can take the address of the buffer.
Then come 96 bytes of text that describe the values, 20 bytes of a digest of the full text, the CRC-32 of all bytes
before it, and a mark.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import struct
import zlib
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as _StorageWeakRef

from hadagen.errors import TensorError
from hadagen.runtime.operands.packed import TRAILER

_PLAIN = torch.Tensor, torch.nn.Parameter
_TEXT, _DIGEST, _MARK = 96, 20, b"hadagen\x01"


class State(enum.Enum):
    """The state of a buffer."""

    WHOLE = enum.auto()
    EMPTY = enum.auto()  # anything but sealed values, such as memory that nobody wrote
    DAMAGED = enum.auto()  # sealed values that were changed
    OTHER = enum.auto()  # whole ones, but of something else


def seal(values: torch.Tensor, what: str) -> torch.Tensor:
    """A sealed buffer on the CPU. values: uint8 on the CPU."""
    text = what.encode()
    head = bytes_of(values) + text[:_TEXT].ljust(_TEXT) + _digest(text)
    return torch.frombuffer(bytearray(head + struct.pack("<I", zlib.crc32(head)) + _MARK), dtype=torch.uint8)


def state_of(sealed: torch.Tensor, what: str | None = None) -> State:
    """sealed: on the CPU. what: the text that it should have; None for any."""
    whole = bytes_of(sealed)
    if whole[-len(_MARK) :] != _MARK or len(whole) < TRAILER:
        return State.EMPTY
    head, checksum = whole[: -len(_MARK) - 4], whole[-len(_MARK) - 4 : -len(_MARK)]
    if struct.pack("<I", zlib.crc32(head)) != checksum:
        return State.DAMAGED
    return State.WHOLE if what is None or head[-_DIGEST:] == _digest(what.encode()) else State.OTHER


def text_of(sealed: torch.Tensor) -> str:
    """The text of a whole buffer, cut off at 96 bytes."""
    return bytes_of(sealed)[-TRAILER : _TEXT - TRAILER].rstrip().decode(errors="ignore")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read now: not of fake tensors, in traces, or while a CUDA graph is
    captured."""
    if (
        torch.compiler.is_dynamo_compiling()
        or type(tensor) not in _PLAIN
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    try:
        return tensor.data_ptr() != 0 and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    except RuntimeError:
        return False


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, contiguous."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def version_of(tensor: torch.Tensor) -> int:
    """A number that writes to the tensor change, unless they go through `.data`; inference tensors do not count."""
    return -1 if tensor.is_inference() else tensor._version


StorageWeakRef: Any = _StorageWeakRef  # which has no types

# The address of a buffer that was checked → the memory, its version then, and its size.
_checked: dict[int, tuple[StorageWeakRef, int, int]] = {}


def check(*operands: torch.Tensor | None, least: int) -> None:
    """Raises `TensorError` unless sealed operands are whole. Each is read once for each address and version, and not
    while a CUDA graph is captured.

    least: the size of unsealed operands in bytes; larger operands are sealed.
    """
    for sealed in operands:
        if sealed is None or sealed.numel() <= least or not is_readable(sealed):
            continue
        address, now = sealed.data_ptr(), (version_of(sealed), sealed.numel())
        known = _checked.get(address)
        if known is not None and known[1:] == now and not known[0].expired():
            continue
        state = state_of(on_cpu(sealed))
        if state is not State.WHOLE:
            raise TensorError(
                f"a buffer of a Rotation {FAULTS[state]}; load a state dict that has it whole, or call its "
                "reset_parameters()"
            )
        if len(_checked) > 4096:
            _checked.clear()
        _checked[address] = (StorageWeakRef(sealed.untyped_storage()), *now)


FAULTS = {
    State.EMPTY: "holds no values of a Rotation, as memory that nobody wrote",
    State.DAMAGED: "was changed since it was made: its checksum is wrong",
}


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()[:_DIGEST]
