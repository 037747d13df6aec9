"""Plain 16-byte copy kernels, which all times are compared with. They have the signature of every other kernel; an
element is two bytes. Kernels that quantize are compared with copies that write as many bytes as codes and scales have,
and kernels with a prologue with copies that read and write as many buffers.

The copy in a cell has the best of a few shapes, because no shape is the best at 16 KB and at 512 MB.
"""

from __future__ import annotations

from string import Template

from hadagen.measure.cells import Traffic
from hadagen.problem.launch import PARAMS, LaunchSpec, Param, Source
from hadagen.templates import read_texts

# (threads of a block, 16-byte vectors of a thread)
SHAPES = ((128, 1), (1024, 1), (512, 2), (256, 4))
CODES_SHAPES = ((128, 1), (256, 1), (1024, 1), (256, 2), (512, 2), (256, 4))
CODES_PARAMS = (Param("void*", "scales"), Param("u32", "codes_of_vector"), Param("u32", "vectors_of_scales"))
BUFFERS_PARAMS = (
    *CODES_PARAMS,
    Param("const void*", "more_x"),
    Param("void*", "more_y"),
    Param("u32", "inputs"),
    Param("u32", "outputs"),
)
_VECTOR_ELEMENTS = 8
_VECTOR_BYTES = 16


def copy_params(traffic: Traffic) -> tuple[Param, ...]:
    """The params of the copy kernels for this memory."""
    if traffic.inputs or traffic.outputs:
        return *PARAMS, *BUFFERS_PARAMS
    return (*PARAMS, *CODES_PARAMS) if traffic.codes_bytes else PARAMS


def copy_numbers(traffic: Traffic) -> dict[str, int]:
    """The values of those params of the copy kernels that are numbers. Scales are written as words."""
    vectors, words = traffic.buffer_bytes // _VECTOR_BYTES, traffic.scales_bytes // 4
    return {
        "codes_of_vector": (traffic.codes_bytes or traffic.buffer_bytes) // vectors,
        "vectors_of_scales": vectors // words if words else 0,
        "inputs": traffic.inputs,
        "outputs": traffic.outputs,
    }


def copy_sources(*, for_prologues: bool = True) -> tuple[Source, ...]:
    """The copy kernels to build and to hand to `DeviceRunner`. for_prologues: whether copies of several buffers are
    among them, which only kernels with a prologue are compared with."""
    texts = read_texts("device")
    plain, codes = (Template(texts[name]) for name in ("copy.cu", "copy_codes.cu"))
    kinds = [
        ("copy", plain, SHAPES, ()),
        ("copy_codes", codes, CODES_SHAPES, CODES_PARAMS),
        *[("copy_buffers", codes, CODES_SHAPES, BUFFERS_PARAMS)] * for_prologues,
    ]
    return tuple(_source(template, name, *shape, more) for name, template, shapes, more in kinds for shape in shapes)


def _source(template: Template, name: str, threads: int, vectors: int, more: tuple[Param, ...]) -> Source:
    entry = f"{name}_{threads}x{vectors}"
    tile = threads * vectors
    several = int(more == BUFFERS_PARAMS)
    text = template.substitute(entry=entry, threads=threads, vectors=vectors, tile_vectors=tile, several=several)
    launch = LaunchSpec(
        threads, 1, shared_bytes=0, tile_elements=tile * _VECTOR_ELEMENTS, persistent=False, params=(*PARAMS, *more)
    )
    return Source(entry, text, launch)
