"""Whether bytes are a complete cubin: an ELF file for NVIDIA GPUs.

Offsets are those of 64-bit little-endian ELF (System V gABI, "ELF Header", "Section Header").
"""

from __future__ import annotations

import struct

_MAGIC = b"\x7fELF\x02\x01"
_EM_CUDA = 190
_HEADER_BYTES = 64
_SHT_NOBITS = 8  # a section without bytes in the file


def is_cubin(data: bytes) -> bool:
    """Whether `data` begins like a cubin, and holds every section and program header that it lists."""
    if len(data) < _HEADER_BYTES or not data.startswith(_MAGIC) or _read("<H", data, 18) != _EM_CUDA:
        return False
    programs_end = _read("<Q", data, 32) + _read("<H", data, 54) * _read("<H", data, 56)
    start, size, count = _read("<Q", data, 40), _read("<H", data, 58), _read("<H", data, 60)
    if not count or size < _HEADER_BYTES or max(start + size * count, programs_end) > len(data):
        return False
    headers = range(start, start + size * count, size)
    return all(
        _read("<I", data, at + 4) == _SHT_NOBITS or _read("<Q", data, at + 24) + _read("<Q", data, at + 32) <= len(data)
        for at in headers
    )


def _read(form: str, data: bytes, at: int) -> int:
    (value,) = struct.unpack_from(form, data, at)
    return int(value)
