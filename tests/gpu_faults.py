"""Ways to break a kernel, and how its trial ends on a GPU."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace

from hadagen.launch import ENTRY, Source
from hadagen.trial import Kernel, Outcome, kernel_digest

_FAILED, _WRONG, _HUNG = Outcome.LAUNCH_FAILED, Outcome.WRONG_ANSWER, Outcome.TIMEOUT


@dataclass(frozen=True)
class Fault:
    """`body`: what the kernel begins with, for the float16 kernels of a search; "" if its code or launch is changed.
    `says`: a part of the detail of its trial. `few_threads`: whether it is compiled for fewer than it is launched with.
    """

    outcome: Outcome
    says: str = ""
    body: str = ""
    few_threads: bool = False


FAULTS = {
    "writes far outside": Fault(_FAILED, "", "*reinterpret_cast<volatile u32*>(16) = 1;"),
    "writes behind the output": Fault(
        _WRONG, "outside", "if (block_index() == 0 && thread_index() == 0) static_cast<u16*>(y)[elements] = 0;"
    ),
    "writes in front of the output": Fault(
        _WRONG, "outside", "if (block_index() == 0 && thread_index() == 0) static_cast<u16*>(y)[-1] = 0;"
    ),
    "writes at an odd address": Fault(_FAILED, "", "*reinterpret_cast<volatile u32*>(static_cast<byte*>(y) + 1) = 0;"),
    "loops for ever": Fault(_HUNG, "nothing", 'while (true) asm volatile("nanosleep.u32 1000;");'),
    # Each half of the threads waits for all of them.
    "deadlock": Fault(
        _HUNG,
        "nothing",
        'if (thread_index() < {threads} / 2) asm volatile("bar.sync 1, {threads};");'
        'else asm volatile("bar.sync 2, {threads};");',
    ),
    "writes nothing": Fault(_WRONG, "", "if (elements) return;"),
    "writes garbage": Fault(
        _WRONG,
        "",
        "for (i64 i = block_index() * {threads}ll + thread_index(); i < elements; i += gridDim.x * {threads}ll)"
        " static_cast<u16*>(y)[i] = static_cast<u16>((i * 2654435761u) >> 7 & 0x3fff); if (elements) return;",
    ),
    "trap": Fault(_FAILED, "", 'asm volatile("trap;");'),
    "no instruction": Fault(_FAILED),
    "half of its code": Fault(_FAILED),
    "more threads than it was compiled for": Fault(_FAILED, few_threads=True),
}


def broken_source(source: Source, fault: Fault) -> Source:
    """The source with a body in front of that of the kernel, or compiled for fewer threads than it is launched with."""
    if fault.few_threads:
        text, count = re.subn(r"__launch_bounds__\(\d+", "__launch_bounds__(32", source.text)
        assert count == 1
        return replace(source, text=text)
    if not fault.body:
        return source
    body = fault.body.format(threads=source.launch.threads)
    text, count = re.subn(r"(?m)^(    using namespace hadagen;)$", lambda found: f"{found[1]}\n    {body}", source.text)
    assert count == 1
    return replace(source, text=text)


def broken_kernel(kernel: Kernel, name: str) -> Kernel:
    """A kernel whose code or launch is changed."""
    cubin, launch = kernel.cubin, kernel.launch
    if name == "no instruction":
        start, size = section(cubin, f".text.{ENTRY}")
        cubin = cubin[:start] + b"\xff" * size + cubin[start + size :]
    elif name == "half of its code":
        cubin = cubin[: len(cubin) // 2]
    else:
        launch = replace(launch, threads=max(launch.threads, 64))
    return replace(kernel, cubin=cubin, launch=launch, digest=kernel_digest(cubin, launch))


def section(elf: bytes, name: str) -> tuple[int, int]:
    """Where a section of a cubin begins, and its bytes."""
    start, size, count, names = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HHH", elf, 58)
    headers = [start + i * size for i in range(count)]

    def place(at: int) -> tuple[int, int]:
        offset, length = struct.unpack_from("<QQ", elf, at + 24)
        return offset, length

    table, _ = place(headers[names])
    for at in headers:
        (word,) = struct.unpack_from("<I", elf, at)
        begin = table + word
        if elf[begin : elf.index(b"\0", begin)].decode() == name:
            return place(at)
    raise ValueError(f"the cubin has no section {name}")
