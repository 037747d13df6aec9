"""The machine under the emulator: handwritten kernels that use each primitive rightly, and wrongly in many ways."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hadagen.bits import Bits, decode, encode
from hadagen.codegen import Source
from hadagen.emulator import EmulationError, EmulationReport, HostCompileError, HostModule, compile_host, host_texts
from hadagen.errors import StorageError, ToolchainError, UsageError
from hadagen.launch import LaunchSpec, RowShape
from hadagen.problem import DType
from hadagen.reference import hadamard

DEVICE_HEADER = Path(__file__).parent.parent / "templates" / "device" / "hadagen.cuh"

TEMPLATE = """#include "hadagen.cuh"
extern "C" __global__ void __launch_bounds__({threads}) __cluster_dims__({cluster}, 1, 1)
{name}(const void* x, void* y, hadagen::i64 elements, hadagen::u32 scale_word{rows}) {{
    using namespace hadagen;
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
        rows = ", hadagen::i64 columns, hadagen::i64 x_pitch, hadagen::i64 y_pitch" if self.pitched else ""
        fields = {"name": self.name, "body": self.body, "threads": self.threads, "cluster": self.cluster}
        return Source(self.name, TEMPLATE.format(dtype=self.dtype.value, rows=rows, **fields))

    @property
    def launch(self) -> LaunchSpec:
        tile = 16 // self.dtype.bytes * self.threads * self.cluster
        return LaunchSpec(
            self.threads,
            self.cluster,
            SHARED_BYTES,
            tile,
            persistent=False,
            pitched=self.pitched,
            starts_early=self.starts_early,
        )

    def run(
        self, x: Bits, out: Bits, *, order_seed: int = 0, rows: int = 0, shape: RowShape | None = None
    ) -> EmulationReport:
        """`rows`, `shape`: of a pitched kernel, whose rows have two vectors."""
        elements = 2 * rows * 16 // self.dtype.bytes if self.pitched else None
        return module().run(
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


SHARED_BYTES = 8192
COPY = "store16(out + 16 * t, load16(in + 16 * t));"
# Both blocks of a cluster load what lies at both, and store as much as one has.
WHOLE = """{before}
    const Vec16 a = load16(in + 16 * t), b = load16((rank ? in - 512 : in + 512) + 16 * t);
    {between}
    store16(out + 16 * t, Vec16{{{{a.word[0] ^ b.word[0], a.word[1] ^ b.word[1], a.word[2] ^ b.word[2],
        a.word[3] ^ b.word[3]}}}});"""


def transposed(x: Bits) -> Bits:
    """Register w of lane l = 4·row + q holds elements 8·l + 2·w and the next: row `row`, columns 2·q and the next."""
    matrices = x.reshape(-1, 8, 4, 4, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 4, 8, 8).swapaxes(2, 3)
    result: Bits = matrices.reshape(-1, 4, 8, 4, 2).transpose(0, 2, 3, 1, 4)
    return result


def lower_lanes(x: Bits) -> Bits:
    """Zeros from lane 16 on."""
    return x.reshape(-1, 2, 128) * np.array([[1], [0]], np.uint16)


# Kernels that do what they should, and their results as a function of x.
GOOD: dict[Case, Callable[[Bits], Bits]] = {
    Case("copies", COPY): lambda x: x,
    Case("copies_early", f"grid_dependency_sync(); {COPY}", starts_early=True): lambda x: x,
    Case("copies_with_hints", "store16_streaming(out + 16 * t, load16_no_allocate(in + 16 * t));"): lambda x: x,
    Case(
        "copies_elements",
        """const i64 left = elements - first - width * t;
        store_elements<T>(out + 16 * t, load_elements<T>(in + 16 * t, left), left);""",
    ): lambda x: x,
    Case("copies_if", "store16(out + 16 * t, load16_if(in + 16 * (t < 16 ? t : 9999), t < 16));"): lower_lanes,
    Case(
        "shuffles",
        """Vec16 v = load16(in + 16 * t);
        for (int w = 0; w < 3; ++w) v.word[w] = shuffle_xor(v.word[w], 5);
        v.word[3] = as_word(shuffle_xor(as_float(v.word[3]), 5));
        store16(out + 16 * t, v);""",
    ): lambda x: x.reshape(-1, 32, 8)[:, np.arange(32) ^ 5],
    Case(
        "transposes",
        """Vec16 v = load16(in + 16 * t);
        for (int w = 0; w < 4; ++w) v.word[w] = transpose(v.word[w]);
        store16(out + 16 * t, v);""",
    ): transposed,
    Case(
        "exchanges_in_a_block",
        """shared_store16(shared + 16 * t, load16(in + 16 * t));
        block_sync();
        store16(out + 16 * t, shared_load16(shared + 16 * ((t + 1) % 64)));""",
        threads=64,
    ): lambda x: np.roll(x.reshape(-1, 64, 8), -1, axis=1),
    Case(
        "exchanges_in_a_cluster",
        """if (t == 0) barrier_init(barrier), barrier_expect(barrier, 512);
        cluster_arrive_relaxed();
        const Vec16 v = load16(in + 16 * t);
        cluster_wait();
        remote_shared_store16(data + 16 * t, (rank + 1) % 4, v, barrier);
        remote_barrier_wait(barrier, 0);
        store16(out + 16 * t, shared_load16(data + 16 * t));""",
        cluster=4,
    ): lambda x: np.roll(x.reshape(-1, 4, 256), 1, axis=1),
    Case(
        "exchanges_in_a_cluster_twice",
        """if (t == 0) barrier_init(barrier), barrier_expect(barrier, 512);
        cluster_arrive_relaxed();
        Vec16 v = load16(in + 16 * t);
        for (u32 turn = 0; turn < 2; ++turn) {
            cluster_wait();
            remote_shared_store16(data + 16 * t, (rank + 1) % 4, v, barrier);
            remote_barrier_wait(barrier, turn);
            if (t == 0) barrier_expect(barrier, 512);
            v = shared_load16(data + 16 * t);
            cluster_arrive();
        }
        cluster_wait();
        store16(out + 16 * t, v);""",
        cluster=4,
    ): lambda x: np.roll(x.reshape(-1, 4, 256), 2, axis=1),
    # What came from the other block, stored where that one had it, in place too.
    Case(
        "multicasts",
        multicast(512, 2)
        + """
        barrier_wait(barrier, 0);
        store16(out + 16 * t, shared_load16(data + 512 * (rank ^ 1) + 16 * t));""",
        cluster=2,
    ): lambda x: x.reshape(-1, 2, 256)[:, ::-1],
    Case(
        "waits_for_groups",
        """for (u32 group = 0; group < 8; ++group) {
            if (lane / 4 == group) cp_async16(shared + 16 * t, in + 16 * t);
            cp_async_commit();
        }
        cp_async_wait<4>();
        if (lane < 16) store16(out + 16 * t, shared_load16(shared + 16 * t));
        cp_async_wait<0>();
        if (lane >= 16) store16(out + 16 * t, shared_load16(shared + 16 * t));""",
    ): lambda x: x,
    Case(
        "pipelines_bulk_copies",
        """if (t == 0) barrier_init(&barrier[0]), barrier_init(&barrier[1]);
        block_sync();
        const auto start = [&](u32 part) {
            if (t == 0) bulk_copy(data + part % 2 * 256, in + 256 * part, 256, &barrier[part % 2]);
        };
        start(0), start(1);
        for (u32 part = 0; part < 4; ++part) {
            barrier_wait(&barrier[part % 2], part / 2 % 2);
            if (t / 16 == part) store16(out + 16 * t, shared_load16(data + part % 2 * 256 + 16 * (t % 16)));
            bulk_copy_fence();
            block_sync();
            if (part < 2) start(part + 2);
        }""",
        threads=64,
    ): lambda x: x,
    Case(
        "sums_over_blocks", WHOLE.format(before="", between="cluster_arrive(); cluster_wait();"), cluster=2
    ): lambda x: x.reshape(-1, 2, 256) ^ x.reshape(-1, 2, 256)[:, ::-1],
}

# Kernels with a race and no other fault.
RACES = (
    Case(
        "no_sync",
        """shared_store16(shared + 16 * t, load16(in + 16 * t));
        store16(out + 16 * t, shared_load16(shared + 16 * (t ^ 32)));""",
        threads=64,
    ),
    Case(
        "no_sync_before_reuse",
        """Vec16 v = load16(in + 16 * t);
        for (int i = 0; i < 2; ++i) {
            shared_store16(shared + 16 * t, v);
            block_sync();
            v = shared_load16(shared + 16 * (t ^ 32));
        }
        store16(out + 16 * t, v);""",
        threads=64,
    ),
    Case(
        "several_readers_then_a_writer",
        """if (t == 0) shared_store16(shared, zero16());
        block_sync();
        shared_load16(shared);
        if (t == 5) shared_store16(shared, zero16());
        """
        + COPY,
    ),
    Case("two_writers", "shared_store16(shared, zero16()); " + COPY),
    Case(
        "cp_async_not_waited_for",
        """cp_async16(shared + 16 * t, in + 16 * t);
        cp_async_commit();
        store16(out + 16 * t, shared_load16(shared + 16 * t));""",
    ),
    Case(
        "cp_async_not_committed",
        """cp_async16(shared + 16 * t, in + 16 * t);
        cp_async_wait<0>();
        store16(out + 16 * t, shared_load16(shared + 16 * t));""",
    ),
    Case(
        "cp_async_of_another_thread",
        """cp_async16(shared + 16 * t, in + 16 * t);
        cp_async_commit();
        cp_async_wait<0>();
        store16(out + 16 * t, shared_load16(shared + 16 * (t ^ 1)));""",
    ),
    Case(
        "mbarrier_not_published",
        """if (t == 0) barrier_init(barrier), bulk_copy(data, in, 512, barrier);
        for (int i = 0; i < 2; ++i) shuffle_xor(0u, 1);
        barrier_wait(barrier, 0);
        store16(out + 16 * t, shared_load16(data + 16 * t));""",
    ),
    Case(
        "bulk_copy_that_others_wait_for",
        """if (t == 0) barrier_init(barrier);
        block_sync();
        if (t == 0) bulk_copy(data, in, 512, barrier), barrier_wait(barrier, 0);
        store16(out + 16 * t, shared_load16(data + 16 * t));""",
    ),
    Case(
        "bulk_copy_over_what_is_read",
        """if (t == 0) barrier_init(barrier);
        shared_store16(data + 16 * t, load16(in + 16 * t));
        bulk_copy_fence();
        block_sync();
        store16(out + 16 * t, shared_load16(data + 16 * (t ^ 1)));
        bulk_copy_fence();
        if (t == 0) bulk_copy(data, in, 512, barrier), barrier_wait(barrier, 0);""",
    ),
    Case(
        "multicast_not_landed",
        multicast(512, 2) + "shared_load16(data + 512 * rank + 16 * t); barrier_wait(barrier, 0);",
        cluster=2,
    ),
    Case(
        "multicasts_to_one_place",
        multicast(512, 2).replace("512 * rank", "256 * rank") + "barrier_wait(barrier, 0);",
        cluster=2,
    ),
    Case(
        "multicast_over_what_is_read",
        """shared_store16(data + 16 * t, zero16());
        if (t == 0) barrier_init(barrier), barrier_expect(barrier, 512);
        bulk_copy_fence();
        cluster_arrive();
        cluster_wait();
        if (t == 0 && rank == 0) bulk_multicast(data, in, 512, barrier, 2);
        shared_load16(data + 16 * t);
        barrier_wait(barrier, 0);""",
        cluster=2,
    ),
    Case(
        "no_cluster_wait_before_reuse",
        """for (int turn = 0; turn < 2 && t == 0; ++turn)
            barrier_init(&barrier[turn]), barrier_expect(&barrier[turn], 512);
        Vec16 v = load16(in + 16 * t);
        cluster_arrive_relaxed();
        cluster_wait();
        for (int turn = 0; turn < 2; ++turn) {
            remote_shared_store16(data + 16 * t, rank ^ 1, v, &barrier[turn]);
            remote_barrier_wait(&barrier[turn], 0);
            v = shared_load16(data + 16 * t);
        }
        store16(out + 16 * t, v);""",
        cluster=2,
    ),
    Case(
        "what_another_thread_waited_for",
        """if (t == 0) barrier_init(barrier), barrier_expect(barrier, 512);
        cluster_arrive_relaxed();
        cluster_wait();
        remote_shared_store16(data + 16 * t, rank ^ 1, load16(in + 16 * t), barrier);
        if (t == 0) remote_barrier_wait(barrier, 0);
        store16(out + 16 * t, shared_load16(data + 16 * t));""",
        cluster=2,
    ),
)

# Kernels that the machine stops, and what it says.
STOPPED = {
    Case("beyond_x", "load16(in + 16 * (t + 64));"): "loads 8 elements at element 512 of x, which has 512",
    Case("before_x", "load16(in - 16);"): "thread 0 of block 0 loads 8 elements at element -8 of x",
    Case(
        "beyond_y", "store_elements<T>(out + 1024 - 8, zero16(), 5);"
    ): "stores 1 elements at element 512 of y, which has 512",
    Case("askew", "load16(in + 2);"): "at byte 2 of x, whose address is not a multiple of 16",
    Case(
        "beyond_shared", "shared_load16(shared + 8192);"
    ): "16 bytes at byte 8192 of shared memory, of which there are",
    Case(
        "askew_in_shared", "shared_store16(shared + 8, zero16());"
    ): "8 of shared memory, which is not a multiple of 16",
    Case("reads_too_early", COPY, starts_early=True): (
        "thread 0 of block 0 loads x while the kernel before this one may still be running"
    ),
    Case("writes_too_early", "if (t < 31) grid_dependency_sync(); else store16(out, zero16());", starts_early=True): (
        "thread 31 of block 0 stores y while the kernel before this one may still be running"
    ),
    Case("copies_too_early", "cp_async16(shared + 16 * t, in);", starts_early=True): "no grid_dependency_sync so far",
    Case("half_a_warp", "if (t < 16) shuffle_xor(1u, 1);"): (
        "hangs: threads 0-15 of block 0 wait at shuffle; threads 16-31 of block 0 have ended"
    ),
    Case(
        "two_collectives",
        "float d[4] = {}; if (t == 0) mma<T>(d, Operand{}, 0u, 0u); else shuffle_xor(1u, 1);",
    ): "a warp diverges: threads 0-0 of block 0 wait at mma; threads 1-1 of block 0 wait at shuffle",
    Case(
        "one_warp_syncs", "if (t < 32) block_sync();", threads=64
    ): "hangs: threads 0-31 of block 0 wait at block_sync",
    Case("one_block_waits", "if (rank == 0) cluster_arrive(), cluster_wait();", cluster=2): "wait at cluster_wait",
    Case("no_arrival", "cluster_wait();"): "waits at the cluster barrier without having arrived",
    Case("two_arrivals", "cluster_arrive(); cluster_arrive();"): "arrives at the cluster barrier twice without waiting",
    Case(
        "no_such_block",
        "cluster_arrive(); cluster_wait(); remote_shared_store16(data, 2, zero16(), barrier);",
        cluster=2,
    ): "stores to block 2 of a cluster of 2",
    Case(
        "other_block_may_not_have_begun",
        "if (t == 0) barrier_init(barrier); remote_shared_store16(data + 16 * t, rank ^ 1, zero16(), barrier);",
        cluster=2,
    ): "which may not have begun",
    Case(
        "other_block_may_have_ended",
        crossing(512),
        cluster=2,
    ): "block 0 ends while 512 bytes are on their way to it",
    Case(
        "more_than_expected",
        crossing(256) + "remote_barrier_wait(barrier, 0);",
        cluster=2,
    ): "block 0 ends while 256 bytes are on their way to it",
    Case(
        "never_expected",
        crossing(0) + "remote_barrier_wait(barrier, 0);",
        cluster=2,
    ): "threads 0-31 of block 0 wait at barrier_wait",
    Case(
        "relaxed_arrival_for_data",
        "shared_store16(data + 16 * t, zero16()); cluster_arrive_relaxed();",
    ): "arrives at the cluster barrier, relaxed, after it has touched shared memory",
    Case("multicast_to_no_such_block", multicast(512, 3), cluster=2): "copies to block 2 of a cluster of 2",
    Case("odd_multicast", multicast(24, 2), cluster=2): "copies 24 bytes, which is not a multiple of 16",
    Case(
        "multicast_to_one", multicast(512, 1) + "barrier_wait(barrier, 0);", cluster=2
    ): "threads 0-31 of block 1 wait at barrier_wait",
    Case("multicast_not_waited_for", multicast(512, 2), cluster=2): "block 0 ends while 1024 bytes are on their way",
    Case(
        "multicast_to_who_may_not_have_begun",
        "if (t == 0) barrier_init(barrier), bulk_multicast(data, in, 512, barrier, 2);",
        cluster=2,
    ): "copies to another block, which may not have begun",
    Case("multicast_too_early", multicast(512, 2), cluster=2, starts_early=True): "no grid_dependency_sync so far",
    Case("no_mbarrier", "barrier_wait(barrier, 0);"): "uses an mbarrier that was not initialized",
    Case("mbarrier_again", "barrier_init(barrier);"): "thread 1 of block 0 initializes an mbarrier again",
    Case("no_copy", "if (t == 0) barrier_init(barrier), barrier_wait(barrier, 0);"): "block 0 wait at barrier_wait",
    Case(
        "copy_under_way_at_the_end",
        "if (t == 0) barrier_init(barrier), bulk_copy(data, in, 512, barrier);",
    ): "block 0 ends while 512 bytes are on their way to it",
    Case("odd_copy", "if (t == 0) barrier_init(barrier), bulk_copy(data, in, 8, barrier);"): "expects 8 bytes",
    Case("odd_prefetch", "if (t == 0) bulk_prefetch(in, 24);"): "prefetches 24 bytes, which is not a multiple of 16",
    Case("prefetch_beyond", "if (t == 0) bulk_prefetch(in + 16, 512);"): "prefetches 256 elements at element 264 of x",
    Case(
        "two_copies_in_a_phase",
        """if (t == 0) {
            barrier_init(barrier);
            for (u32 part = 0; part < 2; ++part) bulk_copy(data + 16 * part, in, 16, barrier);
        }""",
    ): "before it knows that the last ones have landed",
    Case(
        "no_bulk_copy_fence",
        """if (t == 0) barrier_init(barrier);
        shared_store16(data + 16 * t, zero16());
        if (t != 5) bulk_copy_fence();
        block_sync();
        if (t == 0) bulk_copy(data, in, 512, barrier);""",
    ): "thread 0 of block 0 copies over byte 208 of shared memory, which thread 5 of block 0 has touched",
    Case(
        "no_bulk_copy_fence_before_a_multicast",
        multicast(512, 2)
        + """
        barrier_wait(barrier, 0);
        shared_load16(data + 16 * t);
        if (rank == 0) bulk_copy_fence();
        cluster_arrive();
        cluster_wait();
        if (t == 0) bulk_multicast(data, in, 512, barrier, 2);""",
        cluster=2,
    ): "copies over byte 128 of shared memory, which thread 0 of block 1 has touched with no bulk_copy_fence since",
    Case(
        "no_bulk_copy_fence_by_one_of_many_in_another_block",
        multicast(512, 2)
        + """
        barrier_wait(barrier, 0);
        shared_load16(data);
        if (rank == 0 || t != 7) bulk_copy_fence();
        cluster_arrive();
        cluster_wait();
        if (t == 0 && rank == 0) bulk_multicast(data, in, 512, barrier, 2);""",
        cluster=2,
    ): "copies over byte 128 of shared memory, which thread 7 of block 1 has touched with no bulk_copy_fence since",
    Case(
        "no_bulk_copy_fence_by_one_of_many",
        """if (t == 0) barrier_init(barrier);
        shared_store16(data + 16 * t, zero16());
        bulk_copy_fence();
        block_sync();
        if (t == 7) bulk_copy_fence();
        shared_load16(data);
        for (int i = 0; i < 2 && t != 7; ++i) bulk_copy_fence();
        block_sync();
        if (t == 0) bulk_copy(data, in, 512, barrier);""",
    ): "copies over byte 128 of shared memory, which thread 7 of block 0 has touched",
    Case("endless", "for (;;) load16(in);"): "does not end",
}

# By the stride between lanes in bytes: wavefronts of a warp's load from shared memory, and those that are conflicts.
STRIDES = {0: (4, 0), 16: (4, 0), 32: (8, 4), 48: (4, 0), 64: (16, 12), 128: (32, 28), 144: (4, 0)}
CONFLICTS = {stride: Case(f"stride_{stride}", f"shared_load16(shared + {stride} * t); {COPY}") for stride in STRIDES}

# Kernels that end, but leave something to report.
WASTEFUL = Case("wasteful", "const u32 at = 32 * (t % 16) + t / 16 * 16; load16(in + at / 32 * 32); " + COPY)
SPREAD = Case("spread", "if (rank == 0) load16(in + 32 * t); " + COPY, cluster=2)
FORGETFUL = Case("forgetful", "if (t % 2) " + COPY)
REPETITIVE = Case("repetitive", COPY + COPY)
UNHEEDED = [
    Case("no_cluster_barrier", WHOLE.format(before="", between=""), cluster=2),
    Case("arrives_too_early", WHOLE.format(before="cluster_arrive();", between="cluster_wait();"), cluster=2),
    Case("waits_too_early", WHOLE.format(before="cluster_arrive(); cluster_wait();", between=""), cluster=2),
    Case(
        "multicast_not_landed_anywhere",
        multicast(512, 2) + "store16(out + 16 * t, zero16()); barrier_wait(barrier, 0);",
        cluster=2,
    ),
]
LATE = Case("late", COPY + " shuffle_xor(0u, 1); load16(in + 16 * (t ^ 1));")

PACKED_TYPES = (DType.FLOAT16, DType.BFLOAT16)
ARITHMETIC = [
    Case(f"{name}_{dtype.value}", body, dtype=dtype)
    for dtype in PACKED_TYPES
    for name, body in {
        "packs": """const Vec16 v = load16(in + 16 * t);
            const u32 p = pack<T>(as_float(v.word[0]), as_float(v.word[1]));
            const u32 q = pack<T>(low<T>(v.word[2]), high<T>(v.word[2]));
            store16(out + 16 * t, Vec16{{p, q, as_word(low<T>(v.word[3])), as_word(high<T>(v.word[3]))}});""",
        "adds": """const Vec16 v = load16(in + 16 * t);
            const u32 a = v.word[0], b = v.word[1], c = v.word[2];
            store16(out + 16 * t, Vec16{{add<T>(a, b), sub<T>(a, b), fma<T>(a, b, c), 0u}});""",
        "meets": """const Vec16 v = load16(in + 16 * t);
            const u32 a = v.word[0], b = v.word[1];
            const float f = butterfly_lane(as_float(v.word[2]), as_float(v.word[3]), t % 2);
            store16(out + 16 * t, Vec16{{butterfly_lane<T>(a, b, t % 2), as_word(f), 0u, 0u}});""",
        "multiplies": """const Vec16 v = load16(in + 16 * t);
            float d[4] = {0.0f, 1.0f, 2.0f, 3.0f};
            mma<T>(d, Operand{{v.word[0], v.word[1], v.word[2], v.word[3]}}, v.word[1], v.word[2]);
            store16(out + 16 * t, Vec16{{as_word(d[0]), as_word(d[1]), as_word(d[2]), as_word(d[3])}});""",
        "operands": """const Operand h = hadamard16(low_half(T::one));
            store16(out + 16 * t, Vec16{{h.word[0], h.word[1], h.word[2], h.word[3]}});""",
        "negative_operands": """const Operand h = hadamard16(0x8000u | high_half(T::one));
            store16(out + 16 * t, Vec16{{h.word[0], h.word[1], h.word[2], h.word[3]}});""",
        "halves": """const u32 a = load16(in + 16 * t).word[0];
            store16(out + 16 * t, Vec16{{low_half(a), high_half(a), low_half(T::one), high_half(T::one)}});""",
    }.items()
]
COUNTS_ODD = Case(
    "counts_odd",
    """const Vec16 v = load16(in + 16 * t);
    store16(out + 16 * t, Vec16{{parity(v.word[0]), parity(v.word[1]), parity(v.word[2] & 7u), parity(v.word[3])}});""",
)
CUTS_OFF = Case(
    "cuts_off",
    """const Vec16 v = load16(in + 16 * t);
    const u32 a = high_halves(as_float(v.word[0]), as_float(v.word[1]));
    store16(out + 16 * t, Vec16{{a, high_halves(as_float(v.word[2]), as_float(v.word[3])), 0u, 0u}});""",
)

CUTS_TO_TF32 = Case(
    "cuts_to_tf32",
    """const float f = as_float(load16(in + 16 * t).word[0]);
    store16(out + 16 * t, Vec16{{as_word(cut_to_tf32(f)), as_word(below_tf32(f)), 0u, 0u}});""",
    dtype=DType.FLOAT32,
)
# Lane t has vectors t, 32 + t and 64 + t of what a block moves: the first two are its A, the third its B.
MULTIPLIES_TF32 = Case(
    "multiplies_tf32",
    """if (t >= 32) return;
    const Vec16 p = load16(in + 16 * t), q = load16(in + 512 + 16 * t), b = load16(in + 1024 + 16 * t);
    const WideOperand a = {{p.word[0], p.word[1], p.word[2], p.word[3], q.word[0], q.word[1], q.word[2], q.word[3]}};
    float d[4] = {0.0f, 1.0f, 2.0f, 3.0f};
    mma(d, a, as_float(b.word[0]), as_float(b.word[1]), as_float(b.word[2]), as_float(b.word[3]));
    store16(out + 16 * t, Vec16{{as_word(d[0]), as_word(d[1]), as_word(d[2]), as_word(d[3])}});""",
    threads=96,
    dtype=DType.FLOAT32,
)
TF32_OPERANDS = Case(
    "tf32_operands",
    """if (t >= 32) return;
    const WideOperand h = hadamard16_tf32(block_index() == 0 ? 0x3F80u : 0xBE80u);
    store16(out + 16 * t, Vec16{{h.word[0], h.word[1], h.word[2], h.word[3]}});
    store16(out + 512 + 16 * t, Vec16{{h.word[4], h.word[5], h.word[6], h.word[7]}});""",
    threads=64,
    dtype=DType.FLOAT32,
)


TAKES_POWERS = Case(
    "takes_powers",
    """float scale = as_float(load16(in + 16 * t).word[0]);
    const u32 a = take_power(scale, 4u);
    const float once = scale;
    const u32 b = take_power(scale, 7u);
    store16(out + 16 * t, Vec16{{a, as_word(once), b, as_word(scale)}});""",
)


# Kernels of elements one by one: thread t moves t - 4 elements of its vector, or all, the last first.
COUNTED = [
    Case(f"{name}_{dtype.value}", body, dtype=dtype)
    for dtype in DType
    for name, body in {
        "loads_some": "store16(out + 16 * t, load_elements<T>(in + 16 * t, i64(t) - 4));",
        "stores_some": "store_elements<T>(out + 16 * t, load16(in + 16 * t), i64(t) - 4);",
        "turns_round": """Vec16 v = zero16();
            for (int i = 0; i < width; ++i) load_element<T>(v, i, in + 16 * t + T::bytes * (width - 1 - i));
            for (int i = 0; i < width; ++i) store_element<T>(out + 16 * t + T::bytes * i, v, i);""",
    }.items()
]
ALIGNED = Case(
    "aligned",
    """const bool address = in_vectors(in + 2 * t, 32), pitch = in_vectors(in, 2 * t), both = in_vectors(in + 16, 48);
    store16(out + 16 * t, Vec16{{address, pitch, both, 0u}});""",
)

# Kernels of pitched rows, of two vectors each.
ROW = """const i64 row = block_index() * 16 + t / 2, column = t % 2 * width;
    const byte* const from = static_cast<const byte*>(x) + T::bytes * (row * x_pitch + column);
    byte* const to = static_cast<byte*>(y) + T::bytes * (row * y_pitch + column);
    const i64 left = row * 2 * width < elements ? columns - column : 0;
    """
COPY_ROW = ROW + "store_elements<T>(to, load_elements<T>(from, left), left);"
ROWS = {dtype: Case(f"rows_{dtype.value}", COPY_ROW, dtype=dtype, pitched=True) for dtype in DType}
UNEVEN_ROWS = Case(
    "uneven_rows",
    ROW + "for (int i = 0; i < (row == 1 ? 0 : row == 2 ? 2 : 1); ++i) store_elements<T>(to, zero16(), left);",
    pitched=True,
)
LATE_ROWS = Case("late_rows", COPY_ROW + " shuffle_xor(0u, 1); load_elements<T>(from, left);", pitched=True)

# Those that the machine stops: four rows of 12 elements, in x 16 apart and in y 20.
SHAPE = RowShape(12, 16, 20)
ROWS_STOPPED = {
    Case(name, "Vec16 v = zero16(); " + body, dtype=dtype, pitched=True): says
    for dtype, name, body, says in (
        (
            DType.FLOAT16,
            "gap_of_x",
            "load_elements<T>(in + 16, 5);",
            "loads 1 elements at element 12 of a row of x, which",
        ),
        (
            DType.FLOAT16,
            "vector_in_a_gap",
            "load16(in + 16);",
            "loads 8 elements at element 8 of a row of x, which has 12",
        ),
        (DType.FLOAT16, "copy_of_a_gap", "cp_async16(shared, in + 16);", "loads 8 elements at element 8 of a row of x"),
        (
            DType.FLOAT16,
            "bulk_copy_of_gaps",
            "if (t == 0) barrier_init(barrier), bulk_copy(data, in, 64, barrier);",
            "loads 32 elements at element 0 of a row of x, which has 12",
        ),
        (
            DType.FLOAT16,
            "gap_of_y",
            "store_element<T>(out + 78, v, 0);",
            "stores 1 elements at element 19 of a row of y",
        ),
        (
            DType.FLOAT16,
            "after_x",
            "load_element<T>(v, 0, in + 120);",
            "loads 1 elements at element 60 of x, which has 60",
        ),
        (DType.FLOAT16, "row_after_y", "store_element<T>(out + 160, v, 0);", "at element 80 of y, which has 72"),
        (DType.FLOAT16, "askew_row", "store16(out + 40, v);", "at byte 40 of y, whose address is not a multiple of 16"),
        (DType.FLOAT16, "askew_element", "load_element<T>(v, 0, in + 1);", "at byte 1 of x, whose address is not"),
        (
            DType.FLOAT16,
            "wide_element",
            "load_element<float32>(v, 0, in);",
            "thread 0 of block 0 loads an element of 4 bytes, but those of x have 2",
        ),
        (
            DType.FLOAT32,
            "gap_of_float32",
            "load16(in + 48);",
            "loads 4 elements at element 12 of a row of x, which has 12",
        ),
        (
            DType.FLOAT32,
            "after_float32",
            "store16(out + 288, v);",
            "stores 4 elements at element 72 of y, which has 72",
        ),
        (DType.FLOAT32, "askew_float32", "load_element<T>(v, 0, in + 2);", "at byte 2 of x, whose address is not a"),
        (
            DType.FLOAT32,
            "narrow_element",
            "store_element<float16>(out, v, 0);",
            "stores an element of 2 bytes, but those of y have 4",
        ),
    )
}


@cache
def module() -> HostModule:
    cases = [*GOOD, *RACES, *STOPPED, *CONFLICTS.values(), WASTEFUL, SPREAD, FORGETFUL, REPETITIVE, *ARITHMETIC]
    cases += [LATE, *UNHEEDED]
    cases += [
        CUTS_OFF,
        COUNTS_ODD,
        CUTS_TO_TF32,
        MULTIPLIES_TF32,
        TF32_OPERANDS,
        TAKES_POWERS,
        *COUNTED,
        ALIGNED,
        *ROWS.values(),
        *ROWS_STOPPED,
        UNEVEN_ROWS,
        LATE_ROWS,
    ]
    return compile_host([case.source for case in cases])


def random_bits(count: int, seed: int = 0) -> Bits:
    return np.random.default_rng(seed).integers(0, 1 << 16, count, dtype=np.uint16)


def bits_of(dtype: DType, count: int) -> Bits:
    """Random elements."""
    return random_bits(count * dtype.bytes // 2).view(f"u{dtype.bytes}")


def run(case: Case, x: Bits) -> tuple[Bits, EmulationReport]:
    out = np.full_like(x, np.iinfo(x.dtype).max)
    return out, case.run(x, out)


def named(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@named(GOOD)
@pytest.mark.parametrize("order_seed", [0, 1, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_good_kernel_has_its_result_in_any_order(case: Case, order_seed: int, in_place: bool) -> None:
    x = random_bits(3072)
    expected = GOOD[case](x).reshape(-1).copy()
    out = x if in_place else np.full_like(x, 0xFFFF)
    report = case.run(x, out, order_seed=order_seed)
    assert report.complaint == ""
    assert (report.uninitialized_reads, report.excess_sectors, report.bank_conflicts) == (0, 0, 0)
    assert np.array_equal(out, expected)


def test_elements_beyond_the_end_are_not_touched() -> None:
    (case,) = (case for case in GOOD if case.name == "copies_elements")
    x, out = random_bits(512), np.full(512, 0xFFFF, np.uint16)
    report = module().run(case.name, case.launch, x, out, scale=1.0, elements=301)
    assert report.complaint == ""
    assert np.array_equal(out[:301], x[:301])
    assert (out[301:] == 0xFFFF).all()


@pytest.mark.parametrize("dtype", DType)
def test_counts_of_elements_below_zero_and_beyond_a_vector(dtype: DType) -> None:
    loads, stores, turns = (case for case in COUNTED if case.dtype is dtype)
    width = 16 // dtype.bytes
    x = bits_of(dtype, 32 * width)
    vectors, moved = x.reshape(32, width), np.arange(width) < np.arange(32)[:, None] - 4
    out, report = run(loads, x)
    assert np.array_equal(out.reshape(32, width), np.where(moved, vectors, 0))
    out, report = run(stores, x)
    assert np.array_equal(out.reshape(32, width), np.where(moved, vectors, np.iinfo(x.dtype).max))
    assert (report.unwritten, report.rewritten) == ((~moved).sum(), 0)
    out, report = run(turns, x)
    assert np.array_equal(out.reshape(32, width), vectors[:, ::-1])
    assert report.complaint == ""


def test_rows_move_in_vectors_where_address_and_pitch_allow() -> None:
    words = run(ALIGNED, random_bits(256))[0].view(np.uint32).reshape(32, 4)
    every_eighth = np.arange(32) % 8 == 0
    assert np.array_equal(words.T, [every_eighth, every_eighth, np.ones(32), np.zeros(32)])


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_lie_anywhere_and_their_gaps_are_not_touched(dtype: DType, shift: int) -> None:
    """Arrays that begin at any element, rows of any length, gaps of any length, the last row without one."""
    width = 16 // dtype.bytes
    for rows, columns, x_pitch, y_pitch in ((21, 2 * width - 3, 2 * width + 1, 2 * width - 2), (16, width, width, 9)):
        x = bits_of(dtype, (rows - 1) * x_pitch + columns + shift)[shift:]
        out = np.full((rows - 1) * y_pitch + columns + shift, np.iinfo(x.dtype).max, x.dtype)[shift:]
        report = ROWS[dtype].run(x, out, rows=rows, shape=RowShape(columns, x_pitch, y_pitch))
        assert report.complaint == ""
        expected = np.full_like(out, np.iinfo(x.dtype).max)
        for row in range(rows):
            expected[row * y_pitch :][:columns] = x[row * x_pitch :][:columns]
        assert np.array_equal(out, expected)


@named(ROWS_STOPPED)
def test_a_kernel_that_leaves_its_rows_is_stopped(case: Case) -> None:
    x = bits_of(case.dtype, 3 * 16 + 12)
    with pytest.raises(EmulationError, match=re.escape(ROWS_STOPPED[case])):
        case.run(x, np.zeros(3 * 20 + 12, x.dtype), rows=4, shape=SHAPE)


def test_rows_are_written_exactly_once() -> None:
    report = UNEVEN_ROWS.run(np.zeros(72, np.uint16), np.zeros(72, np.uint16), rows=4, shape=RowShape(12, 12, 20))
    assert (report.unwritten, report.rewritten) == (12, 12)


def test_rows_in_place_are_not_read_after_they_are_overwritten() -> None:
    x, shape = random_bits(72), RowShape(12, 20, 20)
    assert LATE_ROWS.run(x, np.zeros_like(x), rows=4, shape=shape).races == 0
    assert LATE_ROWS.run(x, x, rows=4, shape=shape).races == 4 * 12
    with pytest.raises(UsageError, match="rows cannot lie both 16 and 20 elements apart"):
        LATE_ROWS.run(x, x, rows=4, shape=SHAPE)


def test_arrays_shorter_than_their_rows_or_askew_are_refused() -> None:
    x, out, case = np.zeros(60, np.uint16), np.zeros(72, np.uint16), ROWS[DType.FLOAT16]
    assert case.run(x, out, rows=4, shape=SHAPE).complaint == ""
    with pytest.raises(UsageError, match="x has 59 elements, fewer than the 60"):
        case.run(x[1:], out, rows=4, shape=SHAPE)
    with pytest.raises(UsageError, match="out has 71 elements, fewer than the 72"):
        case.run(x, out[:-1], rows=4, shape=SHAPE)
    askew = np.frombuffer(bytes(145), np.uint16, 72, offset=1)
    with pytest.raises(UsageError, match="out is not aligned to 2 bytes"):
        case.run(x, askew, rows=4, shape=SHAPE)


@named(RACES)
@pytest.mark.parametrize("order_seed", [0, 1, 2, 3])
def test_a_race_is_seen_in_any_order(case: Case, order_seed: int) -> None:
    x = random_bits(1024)
    report = case.run(x, np.zeros_like(x), order_seed=order_seed)
    assert report.races > 0
    assert re.fullmatch(r"thread \d+ of block \d+ (reads|writes) byte \d+ of .*", report.first_race)
    assert report.first_race in report.complaint


@named(STOPPED)
def test_a_wrong_kernel_is_stopped_with_a_sentence(case: Case) -> None:
    with pytest.raises(EmulationError, match=re.escape(STOPPED[case])):
        run(case, random_bits(512))
    # The machine is as good as new afterwards.
    x = random_bits(512)
    assert np.array_equal(run(next(iter(GOOD)), x)[0], x)


@pytest.mark.parametrize("stride", STRIDES)
def test_bank_conflicts_are_wavefronts_beyond_the_ideal(stride: int) -> None:
    _, report = run(CONFLICTS[stride], random_bits(256))
    assert (report.wavefronts, report.bank_conflicts) == STRIDES[stride]
    assert report.uninitialized_reads == 32


def test_excess_sectors_are_those_of_half_used_sectors() -> None:
    # The store and the second load are coalesced. Pairs of lanes load the same half of 16 sectors, half of them enough.
    _, report = run(WASTEFUL, random_bits(256))
    assert (report.sectors, report.excess_sectors) == (48, 8)
    # 32 lanes load the first half of a sector each, one block in two.
    _, report = run(SPREAD, random_bits(512))
    assert (report.sectors, report.excess_sectors) == (2 * 32 + 32, 16)


def test_output_is_written_exactly_once() -> None:
    _, report = run(FORGETFUL, random_bits(256))
    assert (report.unwritten, report.rewritten) == (128, 0)
    _, report = run(REPETITIVE, random_bits(256))
    assert (report.unwritten, report.rewritten) == (0, 256)
    assert "256 more than once" in report.complaint


def test_in_place_input_is_not_read_after_it_is_overwritten() -> None:
    x = random_bits(256)
    assert LATE.run(x, np.zeros_like(x)).races == 0
    assert LATE.run(x, x).races == 256


@named(UNHEEDED)
@pytest.mark.parametrize("order_seed", [0, 1, 2, 3])
def test_in_place_input_is_not_overwritten_before_every_block_has_read_it(case: Case, order_seed: int) -> None:
    x = random_bits(1024)
    assert case.run(x, np.zeros_like(x), order_seed=order_seed).races == 0
    assert case.run(x, x, order_seed=order_seed).races > 0


def arithmetic(name: str, dtype: DType, x: Bits) -> Bits:
    (case,) = (case for case in ARITHMETIC if case.name == f"{name}_{dtype.value}")
    return run(case, x)[0].reshape(-1, 8)


def same(dtype: DType, result: Bits, expected: np.ndarray) -> bool:
    """Whether `result` is `expected` rounded once, any NaN being as good as another."""
    rounded = encode(dtype, expected)
    return bool(((result == rounded) | (np.isnan(decode(dtype, result)) & np.isnan(expected))).all())


dtypes = pytest.mark.parametrize("dtype", PACKED_TYPES)


@dtypes
def test_conversions(dtype: DType) -> None:
    x = random_bits(1 << 18)
    x.reshape(-1, 8)[: 1 << 14, 4:] = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 4)  # every element there is
    parts, result = x.reshape(-1, 8), arithmetic("packs", dtype, x)
    with np.errstate(invalid="ignore"):
        reals = np.ascontiguousarray(parts[:, :4]).view(np.float32).astype(np.float64)
    assert same(dtype, result[:, :2], reals)
    assert same(dtype, result[:, 2:4], decode(dtype, parts[:, 4:6]))
    widened = np.ascontiguousarray(result[:, 4:]).view(np.float32)
    assert np.array_equal(widened, decode(dtype, parts[:, 6:]), equal_nan=True)


def test_parity_is_that_of_the_bits_of_a_word() -> None:
    x = random_bits(4096)
    words = x.view(np.uint32).reshape(-1, 4) & np.array([~0, ~0, 7, ~0]).astype(np.uint32)
    odd = [[bin(word).count("1") % 2 for word in some] for some in words.tolist()]
    assert np.array_equal(run(COUNTS_ODD, x)[0].view(np.uint32).reshape(-1, 4), odd)


def test_high_halves_are_what_is_left_when_the_low_ones_are_cut_off() -> None:
    x = random_bits(4096)
    result, _ = run(CUTS_OFF, x)
    assert np.array_equal(result.reshape(-1, 8)[:, :4], x.reshape(-1, 8)[:, 1::2])


def cut_to_tf32(values: np.ndarray) -> np.ndarray:
    """float32 without what lies below the 11th bit, or below 2^-136."""
    _, exponent = np.frexp(values.astype(np.float64))
    step = np.maximum(exponent - 11, -136)
    return np.ldexp(np.trunc(np.ldexp(values.astype(np.float64), -step)), step).astype(np.float32)


def split_to_tf32(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What an mma takes of values, and of what is below that, as `below_tf32` has it. Any number of values."""
    words = np.zeros((-(-len(values) // 32) * 32, 4), np.float32)
    words[: len(values), 0] = values
    result = run(CUTS_TO_TF32, words.view(np.uint32).reshape(-1))[0].reshape(-1, 4)[: len(values), :2]
    high, low = np.ascontiguousarray(result.T).view(np.float32)
    return high, cut_to_tf32(low) if np.isfinite(low).all() else low


def test_two_tf32_are_a_value_rounded_to_22_bits() -> None:
    """From 2^-114 to the largest: neither is too large, nor what the largest is rounded to. Ties go up and down equally
    often. Of what has 22 bits, and of multiples of 2^-136, nothing is lost."""
    random = np.random.default_rng(0)
    values = np.ldexp(random.uniform(1.0, 2.0, 1 << 16), random.integers(-114, 128, 1 << 16)).astype(np.float32)
    largest = np.finfo(np.float32).max
    values[:4] = largest, largest * (1 - 2.0**-23), 2.0**-114, -largest
    values[4::2] *= -1
    high, low = split_to_tf32(values)
    assert np.array_equal(high, cut_to_tf32(values))
    exact = values.astype(np.float64)
    error = (high.astype(np.float64) + low - exact) / exact
    assert np.abs(error[4:]).max() <= 2.0**-22
    assert (np.abs(high.astype(np.float64) + low) <= largest).all()
    assert np.abs(error[:4]).max() < 2.0**-21
    # Cut off, it would be 40 times as large in the mean.
    assert np.abs(np.mean(error)) < 2.0**-29
    assert math.sqrt(np.mean(error**2)) < 2.0**-23.5

    short = np.ldexp(random.integers(1 << 21, 1 << 22, 1 << 14), random.integers(-136, 106, 1 << 14))
    tiny = random.integers(-(1 << 20), 1 << 20, 1 << 14) * 2.0**-136
    for kept in (short, -short, tiny, np.array([0.0])):
        high, low = split_to_tf32(kept)
        assert np.array_equal(high.astype(np.float64) + low, kept)


def test_of_nan_and_infinity_what_is_below_a_tf32_is_nan() -> None:
    """Even of NaNs with all bits, which a carry would make a number of, and of those with low bits only, which an mma
    takes for infinities."""
    words = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF801FFF, 0x7F800000, 0xFF800000], np.uint32)
    assert np.isnan(split_to_tf32(words.view(np.float32))[1]).all()


def test_powers_are_taken_of_a_scale_until_none_is_left_or_least() -> None:
    """Each a power of two, at most 1 and at least 2^-4 or 2^-7, as near to the scale as that, so that sums of 16 or 128
    do not grow; and what is left times those taken is the scale, to the last bit and of its sign."""
    random, steps = np.random.default_rng(0), range(-140, 101)
    sizes = [np.ldexp(factor, power) for power in steps for factor in (1.0, random.uniform(1.0, 2.0), 2.0 - 2.0**-23)]
    sizes += [2.0**-149, np.finfo(np.float32).max, 0.0]
    scales = np.array([sign * size for size in sizes for sign in (1.0, -1.0)], np.float32)
    scales = np.append(scales, np.zeros(-len(scales) % 32, np.float32))
    words = np.zeros((len(scales), 4), np.uint32)
    words[:, 0] = scales.view(np.uint32)
    result = run(TAKES_POWERS, words.view(np.uint16).reshape(-1))[0].reshape(-1, 8).view(np.uint32)
    powers, left = result[:, [0, 2]], np.ascontiguousarray(result[:, [1, 3]]).view(np.float32)
    assert (powers >> 16 == 0).all()
    taken = decode(DType.BFLOAT16, powers.astype(np.uint16))
    before = scales
    for at, least in enumerate((-4, -7)):
        nearest = 2.0 ** np.clip(np.frexp(np.abs(before).astype(np.float64))[1] - 1.0, least, 0)
        assert np.array_equal(taken[:, at], np.where(before == 0, 2.0**least, nearest))
        assert np.array_equal(taken[:, at] * left[:, at], before.astype(np.float64))
        before = left[:, at]
    assert np.array_equal(np.signbit(left), np.signbit(np.stack((scales, scales), axis=1)))


@dtypes
def test_packed_arithmetic_rounds_once(dtype: DType) -> None:
    x = np.concatenate([random_bits(1 << 16), encode(dtype, np.random.default_rng(1).standard_normal(1 << 16))])
    parts, result = decode(dtype, x).reshape(-1, 8), arithmetic("adds", dtype, x)
    a, b, c = parts[:, :2], parts[:, 2:4], parts[:, 4:6]
    with np.errstate(all="ignore"):
        for at, expected in enumerate((a + b, a - b, a * b + c)):
            assert same(dtype, result[:, 2 * at : 2 * at + 2], expected)


@dtypes
def test_butterfly_across_lanes(dtype: DType) -> None:
    x = encode(dtype, np.random.default_rng(2).standard_normal(4096))
    parts, result = x.reshape(-1, 8), arithmetic("meets", dtype, x)
    sign = np.where(np.arange(len(parts)) % 2, -1.0, 1.0)
    values = decode(dtype, parts)
    assert same(dtype, result[:, :2], values[:, 2:4] + sign[:, None] * values[:, :2])
    floats = np.ascontiguousarray(parts[:, 4:]).view(np.float32)
    widened = np.ascontiguousarray(result[:, 2:4]).view(np.float32)[:, 0]
    assert np.array_equal(widened, floats[:, 1] + sign.astype(np.float32) * floats[:, 0])


# PTX ISA, "Matrix fragments for mma.m16n8k16": row and column of element i of each lane, in A, B and D.
LANE = np.arange(32)[:, None]
A_AT = (LANE // 4 + 8 * (np.arange(8) // 2 % 2), 2 * (LANE % 4) + np.arange(8) % 2 + 8 * (np.arange(8) // 4))
B_AT = (2 * (LANE % 4) + np.arange(4) % 2 + 8 * (np.arange(4) // 2), LANE // 4 + 0 * np.arange(4))
D_AT = (LANE // 4 + 8 * (np.arange(4) // 2), 2 * (LANE % 4) + np.arange(4) % 2)


@dtypes
def test_mma_multiplies_a_by_b_and_adds(dtype: DType) -> None:
    integers = np.random.default_rng(3).integers(-8, 9, 256).astype(np.float64)  # every sum is exact
    lanes = integers.reshape(32, 8)
    a, b, d = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    a[A_AT], b[B_AT], d[D_AT] = lanes, lanes[:, 2:6], np.arange(4)
    result = arithmetic("multiplies", dtype, encode(dtype, integers))
    assert np.array_equal(result.view(np.float32), (a @ b + d)[D_AT])


@dtypes
@pytest.mark.parametrize(("name", "factor"), [("operands", 1.0), ("negative_operands", -1.0)])
def test_operand_is_the_hadamard_matrix_times_a_factor(dtype: DType, name: str, factor: float) -> None:
    result = decode(dtype, arithmetic(name, dtype, random_bits(256)))
    assert np.array_equal(result, hadamard(np.eye(16), factor)[A_AT])


# PTX ISA, "Matrix fragments for mma.m16n8k8", of .tf32: as above, a0 to a3 and b0 and b1.
A8_AT = (LANE // 4 + 8 * (np.arange(4) % 2), LANE % 4 + 4 * (np.arange(4) // 2))
B8_AT = (LANE % 4 + 4 * np.arange(2), LANE // 4 + 0 * np.arange(2))


def tf32_operands(rows: np.ndarray) -> np.ndarray:
    """Of A, 16×16: what each lane holds for the one mma and for the other, [32, 8]."""
    return np.concatenate([half[A8_AT] for half in np.split(rows, 2, axis=1)], axis=1)


def multiply_tf32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """D of two m16n8k8 that are given A, 16×16, B, 16×8, and 0, 1, 2, 3 for each lane's part of D."""
    x = np.zeros((96, 4), np.float32)
    x[:64] = tf32_operands(a).reshape(32, 2, 4).swapaxes(0, 1).reshape(64, 4)
    x[64:] = np.concatenate([half[B8_AT] for half in np.split(b, 2)], axis=1)
    result = run(MULTIPLIES_TF32, x.view(np.uint32).reshape(-1))[0].reshape(96, 4)[:32].view(np.float32)
    d = np.zeros((16, 8))
    d[D_AT] = result
    return d


def test_wide_mma_multiplies_a_by_b_and_adds() -> None:
    random = np.random.default_rng(4)
    a, b, d = random.integers(-8, 9, (16, 16)), random.integers(-1024, 1025, (16, 8)), np.zeros((16, 8))
    d[D_AT] = np.arange(4)
    assert np.array_equal(multiply_tf32(a, b), a @ b + d)  # every sum is exact


def test_wide_mma_takes_no_more_than_a_tf32() -> None:
    random = np.random.default_rng(5)
    a, b = random.standard_normal((2, 16, 16)).astype(np.float32)
    b = np.where(np.arange(16)[:, None] == np.arange(16) % 8, b, 0)[:, :8]  # one value in each column
    d = np.zeros((16, 8))
    d[D_AT] = np.arange(4)
    wanted = cut_to_tf32(a).astype(np.float64) @ cut_to_tf32(b) + d
    assert np.array_equal(multiply_tf32(a, b), wanted.astype(np.float32))


def test_wide_operand_is_the_hadamard_matrix_times_a_factor_in_the_order_of_the_rows_of_b() -> None:
    """Rows 2t and 2t + 1 of b are what lane t has for rows t and t + 4 of an mma."""
    result = run(TF32_OPERANDS, np.zeros(512, np.uint32))[0].view(np.float32).reshape(2, 2, 32, 4)
    order = np.arange(16).reshape(2, 4, 2).swapaxes(1, 2).reshape(-1)
    for words, factor in zip(result, (1.0, -0.25), strict=True):
        columns = hadamard(np.eye(16), factor)[:, order]
        assert np.array_equal(words.swapaxes(0, 1).reshape(32, 8), tf32_operands(columns))


@dtypes
def test_halves_of_a_word(dtype: DType) -> None:
    x = random_bits(256)
    result = arithmetic("halves", dtype, x)
    assert np.array_equal(result[:, [0, 2]], x.reshape(-1, 8)[:, :2])
    assert np.array_equal(decode(dtype, result[:, [4, 6]]), np.ones((32, 2)))
    assert not result[:, 1::2].any()


def signatures(text: str, inline: str) -> set[str]:
    """The primitives a header offers: return type, name and parameters, templates and specializations alike."""
    found = re.findall(inline + r" (?:constexpr )?(\w+) (\w+)(?:<\w+>)?(\([^)]*\)) ?[{;]", text)
    return {re.sub(r"\s+", " ", " ".join(parts)) for parts in found}


def test_both_headers_offer_the_same_primitives() -> None:
    # Some of the device's are made by macros, so a preprocessor reads it first.
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-E", "-P", "-x", "c++", str(DEVICE_HEADER)]
    expanded = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    device = signatures(expanded, "__device__ __forceinline__")
    host = signatures(host_texts()["hadagen.cuh"], "HADAGEN_INLINE")
    assert len(device) > 30
    assert host - device == {"u32 encode_pair (double low, double high)"}
    assert device - host == {
        "u32 shared_address (const void* shared)",
        "u32 remote_address (const void* shared, u32 rank)",
        "u32 hadamard_signs ()",
        "Zeros hidden_zeros ()",
    }


def test_a_refused_source_raises_with_the_compilers_log() -> None:
    with pytest.raises(HostCompileError, match=r"refuses a kernel.*\berror\b") as caught:
        compile_host([Case("broken", "no_such_primitive();").source])
    assert "no_such_primitive" in caught.value.log


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no-such-compiler; install one or set CXX"):
        compile_host([Case("any", COPY).source])


def fake_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("[ $1 = --version ] || { echo broken >&2; exit 1; }", "cannot build an empty library: broken; set CXX"),
        ("[ $1 = --version ] || kill -9 $$", "cannot build an empty library: exit status -9; set CXX"),
    ],
)
def test_a_compiler_that_compiles_nothing_is_not_the_sources_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path / "c++", script))
    with pytest.raises(ToolchainError, match=says) as caught:
        compile_host([Case("any", COPY).source], cache_directory=tmp_path)
    assert not isinstance(caught.value, HostCompileError)


def test_a_compiler_that_is_no_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c++"
    path.write_text("no program")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(ToolchainError, match=r"cannot be run .*; set CXX to a C"):
        compile_host([Case("any", COPY).source])


def test_what_was_built_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Case("once", COPY).source
    compile_host([source], cache_directory=tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    compile_host([source], cache_directory=tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written to .*file.*; free some space or set HADAGEN_CACHE"):
        compile_host([Case("any", COPY).source], cache_directory=tmp_path / "file")


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (np.zeros(512, np.uint16)[::2], "x is not a contiguous uint16 or uint32 array"),
        (np.zeros(264, np.uint16)[1:257], "x is not aligned to 16 bytes"),
        (np.zeros(256, np.int16), "x is not a contiguous uint16 or uint32 array"),
        (np.zeros(248, np.uint16), "x has 248 elements, fewer than the 256"),
        (np.zeros(256, np.uint32), "out is not a contiguous uint16 or uint32 array, of the type of x"),
    ],
)
def test_unusable_arrays_are_refused(x: Bits, fault: str) -> None:
    launch = LaunchSpec(32, 1, SHARED_BYTES, 256, persistent=False)
    with pytest.raises(UsageError, match=fault):
        module().run("copies", launch, x, np.zeros(256, np.uint16), scale=1.0, elements=256)
