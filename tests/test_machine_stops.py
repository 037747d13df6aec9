"""The machine under the emulator: handwritten kernels that it stops, and its sentence about each."""

from __future__ import annotations

import re

import numpy as np
import pytest
from machine_case import COPY, Case, crossing, multicast, named, random_bits, run, together

from hadagen.emulator import EmulationError

RIGHT = Case("right", COPY)
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

together([RIGHT, *STOPPED])


@named(STOPPED)
def test_a_wrong_kernel_is_stopped_with_a_sentence(case: Case) -> None:
    with pytest.raises(EmulationError, match=re.escape(STOPPED[case])):
        run(case, random_bits(512))
    # The machine is as good as new afterwards.
    x = random_bits(512)
    assert np.array_equal(run(RIGHT, x)[0], x)
