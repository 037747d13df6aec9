"""Handwritten kernels for the tests of the machine under the emulator, and what several of those need."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from hadagen.compiler.emulator import EmulationReport, HostModule, compile_host
from hadagen.problem.bits import Bits
from hadagen.problem.launch import PARAMS, ROW_PARAMS, LaunchSpec, RowShape, Source
from hadagen.problem.problem import DType

SHARED_BYTES = 8192
COPY = "store16(out + 16 * t, load16(in + 16 * t));"

TEMPLATE = """#include "hadagen.cuh"
using namespace hadagen;
extern "C" __global__ void __launch_bounds__({threads}) __cluster_dims__({cluster}, 1, 1)
{name}({signature}) {{
    using T = {dtype};
    HADAGEN_SHARED(shared);
    u64* const barrier = reinterpret_cast<u64*>(shared);
    byte* const data = shared + 128;
    const u32 t = thread_index(), lane = t % 32, rank = cluster_rank();
    constexpr i64 width = 16 / T::bytes;
    const i64 first = block_index() * {threads} * width;
    const byte* const in = static_cast<const byte*>(x) + T::bytes * first;
    byte* const out = static_cast<byte*>(y) + T::bytes * first;
    {body}
}}
"""


@dataclass(frozen=True)
class Case:
    """A kernel of which every block has `width` elements a thread, 16 bytes, at `in` and `out`."""

    name: str
    body: str
    threads: int = 32
    cluster: int = 1
    dtype: DType = DType.FLOAT16
    pitched: bool = False
    starts_early: bool = False

    @property
    def source(self) -> Source:
        fields = {"name": self.name, "body": self.body, "threads": self.threads, "cluster": self.cluster}
        return Source(
            self.name, TEMPLATE.format(dtype=self.dtype.value, signature=self.launch.signature, **fields), self.launch
        )

    @property
    def launch(self) -> LaunchSpec:
        tile = 16 // self.dtype.bytes * self.threads * self.cluster
        return LaunchSpec(
            self.threads,
            self.cluster,
            SHARED_BYTES,
            tile,
            persistent=False,
            params=(*PARAMS, *ROW_PARAMS) if self.pitched else PARAMS,
            starts_early=self.starts_early,
        )

    def run(
        self, x: Bits, out: Bits, *, order_seed: int = 0, rows: int = 0, shape: RowShape | None = None
    ) -> EmulationReport:
        """`rows`, `shape`: of a pitched kernel, whose rows have two vectors."""
        elements = 2 * rows * 16 // self.dtype.bytes if self.pitched else None
        return module_of(self).run(
            self.name,
            self.launch,
            x,
            out,
            scale=1.0,
            elements=elements,
            rows=rows,
            shape=shape,
            order_seed=order_seed,
        )


_GROUPS: dict[Case, tuple[Case, ...]] = {}


def together(cases: Iterable[Case]) -> None:
    """The first of these that runs has all of them compiled, at once."""
    group = tuple(cases)
    _GROUPS.update(dict.fromkeys(group, group))


def module_of(case: Case) -> HostModule:
    return _compiled(_GROUPS[case])


@cache
def _compiled(group: tuple[Case, ...]) -> HostModule:
    return compile_host([case.source for case in group])


def run(case: Case, x: Bits) -> tuple[Bits, EmulationReport]:
    out = np.full_like(x, np.iinfo(x.dtype).max)
    return out, case.run(x, out)


def named(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def random_bits(count: int, seed: int = 0) -> Bits:
    return np.random.default_rng(seed).integers(0, 1 << 16, count, dtype=np.uint16)


def bits_of(dtype: DType, count: int) -> Bits:
    """Random elements."""
    return random_bits(count * dtype.bytes // 2).view(f"u{dtype.bytes}")


def crossing(expected: int) -> str:
    """A body in which each of two blocks stores 512 bytes in the other, whose barrier expects so many; none where 0."""
    expect = f", barrier_expect(barrier, {expected})" if expected else ""
    return f"""if (t == 0) barrier_init(barrier){expect};
        cluster_arrive_relaxed();
        cluster_wait();
        remote_shared_store16(data + 16 * t, rank ^ 1, zero16(), barrier);"""


def multicast(bytes_: int, blocks: int) -> str:
    """A body in which each of two blocks copies `bytes_` to `blocks` blocks, whose barriers expect 512 of each."""
    return f"""if (t == 0) barrier_init(barrier), barrier_expect(barrier, 1024);
        cluster_arrive_relaxed();
        cluster_wait();
        if (t == 0) bulk_multicast(data + 512 * rank, in, {bytes_}, barrier, {blocks});"""


# Both blocks of a cluster load what lies at both, and store as much as one has.
WHOLE = """{before}
    const Vec16 a = load16(in + 16 * t), b = load16((rank ? in - 512 : in + 512) + 16 * t);
    {between}
    store16(out + 16 * t, Vec16{{{{a.word[0] ^ b.word[0], a.word[1] ^ b.word[1], a.word[2] ^ b.word[2],
        a.word[3] ^ b.word[3]}}}});"""
