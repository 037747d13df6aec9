"""Plain 16-byte copy kernels, which all times are compared with. They have the signature of every other kernel; an
element is two bytes.

The time of the copy in a cell is that of the best of a few shapes, because no shape is the best at 16 KB and at 512 MB.
"""

from __future__ import annotations

from string import Template

from hadagen.launch import LaunchSpec, Source
from hadagen.templates import read_texts

# (threads of a block, 16-byte vectors of a thread)
SHAPES = ((128, 1), (1024, 1), (512, 2), (256, 4))
_VECTOR_ELEMENTS = 8


def copy_sources() -> tuple[Source, ...]:
    """The copy kernels to build and to hand to `DeviceRunner`."""
    template = Template(read_texts("device")["copy.cu"])
    return tuple(_source(template, threads, vectors) for threads, vectors in SHAPES)


def _source(template: Template, threads: int, vectors: int) -> Source:
    entry = f"copy_{threads}x{vectors}"
    tile = threads * vectors
    text = template.substitute(entry=entry, threads=threads, vectors=vectors, tile_vectors=tile)
    launch = LaunchSpec(threads, cluster=1, shared_bytes=0, tile_elements=tile * _VECTOR_ELEMENTS, persistent=False)
    return Source(entry, text, launch)
