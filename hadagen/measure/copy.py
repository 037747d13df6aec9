"""Plain 16-byte copy kernels, which all times are compared with. They have the signature of every other kernel; an
element is two bytes. Kernels that quantize are compared with those that write as many bytes as codes and scales have.

The time of the copy in a cell is that of the best of a few shapes, because no shape is the best at 16 KB and at 512 MB.
"""

from __future__ import annotations

from string import Template

from hadagen.problem.launch import PARAMS, LaunchSpec, Param, Source
from hadagen.templates import read_texts

# (threads of a block, 16-byte vectors of a thread)
SHAPES = ((128, 1), (1024, 1), (512, 2), (256, 4))
CODES_SHAPES = ((128, 1), (256, 1), (1024, 1), (256, 2), (512, 2), (256, 4))
CODES_PARAMS = (Param("void*", "scales"), Param("u32", "codes_of_vector"), Param("u32", "vectors_of_scales"))
_VECTOR_ELEMENTS = 8


def copy_sources() -> tuple[Source, ...]:
    """The copy kernels to build and to hand to `DeviceRunner`."""
    texts = read_texts("device")
    plain, codes = (Template(texts[name]) for name in ("copy.cu", "copy_codes.cu"))
    return (
        *(_source(plain, "copy", threads, vectors) for threads, vectors in SHAPES),
        *(_source(codes, "copy_codes", threads, vectors, CODES_PARAMS) for threads, vectors in CODES_SHAPES),
    )


def _source(template: Template, name: str, threads: int, vectors: int, more: tuple[Param, ...] = ()) -> Source:
    entry = f"{name}_{threads}x{vectors}"
    tile = threads * vectors
    text = template.substitute(entry=entry, threads=threads, vectors=vectors, tile_vectors=tile)
    launch = LaunchSpec(
        threads, 1, shared_bytes=0, tile_elements=tile * _VECTOR_ELEMENTS, persistent=False, params=(*PARAMS, *more)
    )
    return Source(entry, text, launch)
