"""Cubins, which are ELF files for NVIDIA GPUs: whether bytes are a complete one, and which drivers load it.

Offsets are those of 64-bit little-endian ELF (System V gABI, "ELF Header", "Section Header").
"""

from __future__ import annotations

import re
import struct

_MAGIC = b"\x7fELF\x02\x01"
_EM_CUDA = 190
_HEADER_BYTES = 64
_SHT_NOBITS = 8  # a section without bytes in the file

# The two formats, by EI_OSABI (LLVM, BinaryFormat/ELF.h: ELFOSABI_CUDA and ELFOSABI_CUDA_V2). CUDA 12 writes the second
# for sm_100 and newer alone, CUDA 13 for all GPUs.
_FIRST, _SECOND = 51, 65

# The first branch of the driver that loads cubins of each CUDA release, of its minor releases too, on every GPU that
# the branch knows: CUDA Toolkit Release Notes, "Minimum Required Driver Version for CUDA Minor Version Compatibility".
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}


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


def cuda_release(cubin: bytes) -> int | None:
    """The major release of CUDA that a cubin was assembled by, such as 13; None if it does not say."""
    if len(cubin) < _HEADER_BYTES or not cubin.startswith(_MAGIC):
        return None
    if cubin[7] == _FIRST:
        return _read("<I", cubin, 20) // 10  # e_version: 129 is CUDA 12.9
    # The note of the tools, .note.nv.tkinfo, has it in words.
    said = re.search(rb"Cuda compilation tools, release (\d{1,3})\.", cubin) if cubin[7] == _SECOND else None
    return int(said[1]) if said else None


def _read(form: str, data: bytes, at: int) -> int:
    (value,) = struct.unpack_from(form, data, at)
    return int(value)
