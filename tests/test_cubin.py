"""Which CUDA release a cubin is of, and so which drivers load it."""

from __future__ import annotations

import pytest

from hadagen.cubin import cuda_release
from hadagen.tuning_db.bundle import Bundle, shipped


def cubin(abi: int, version: int, said: bytes = b"") -> bytes:
    head = b"\x7fELF\x02\x01\x01" + bytes([abi]) + bytes(12) + version.to_bytes(4, "little")
    return head.ljust(64, b"\0") + said


@pytest.mark.parametrize(
    ("image", "release"),
    [  # the heads of cubins by NVRTC 12.4, NVRTC 12.9 for sm_90 and sm_100, and nvcc 13.0
        (cubin(0x33, 0x7C), 12),
        (cubin(0x33, 0x81), 12),
        (cubin(0x41, 1, b"Cuda compilation tools, release 12.9, V12.9.86"), 12),
        (cubin(0x41, 1, b"Cuda compilation tools, release 13.0, V13.0.88"), 13),
        (cubin(0x41, 1), None),
        (cubin(0x33, 0x81)[:40], None),
        (b"cubin", None),
    ],
)
def test_a_cubin_says_its_release(image: bytes, release: int | None) -> None:
    assert cuda_release(image) == release


def test_those_that_are_shipped_load_in_every_driver_of_cuda_12() -> None:
    for path in shipped().values():
        bundle = Bundle.open(path)
        images = (bundle.kernel(digest).cubin for digest in {entry.kernel for entry in bundle.all_entries()})
        assert {cuda_release(image) for image in images if image} <= {12}
