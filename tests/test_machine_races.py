"""The machine under the emulator: handwritten kernels whose threads do not wait for each other as they must."""

from __future__ import annotations

import re

import numpy as np
import pytest
from machine_case import COPY, WHOLE, Case, multicast, named, random_bits, together

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

together([*RACES, *UNHEEDED, LATE])


@named(RACES)
@pytest.mark.parametrize("order_seed", [0, 1, 2, 3])
def test_a_race_is_seen_in_any_order(case: Case, order_seed: int) -> None:
    x = random_bits(1024)
    report = case.run(x, np.zeros_like(x), order_seed=order_seed)
    assert report.races > 0
    assert re.fullmatch(r"thread \d+ of block \d+ (reads|writes) byte \d+ of .*", report.first_race)
    assert report.first_race in report.complaint


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
