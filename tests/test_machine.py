"""The machine under the emulator: handwritten kernels that use each primitive rightly, and what it reports of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from machine_case import COPY, SHARED_BYTES, WHOLE, Case, module_of, multicast, named, random_bits, run, together

from hadagen.bits import Bits
from hadagen.errors import UsageError
from hadagen.launch import LaunchSpec


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

# By the stride between lanes in bytes: wavefronts of a warp's load from shared memory, and those that are conflicts.
STRIDES = {0: (4, 0), 16: (4, 0), 32: (8, 4), 48: (4, 0), 64: (16, 12), 128: (32, 28), 144: (4, 0)}
CONFLICTS = {stride: Case(f"stride_{stride}", f"shared_load16(shared + {stride} * t); {COPY}") for stride in STRIDES}

# Kernels that end, but leave something to report.
WASTEFUL = Case("wasteful", "const u32 at = 32 * (t % 16) + t / 16 * 16; load16(in + at / 32 * 32); " + COPY)
SPREAD = Case("spread", "if (rank == 0) load16(in + 32 * t); " + COPY, cluster=2)
FORGETFUL = Case("forgetful", "if (t % 2) " + COPY)
REPETITIVE = Case("repetitive", COPY + COPY)

together([*GOOD, *CONFLICTS.values(), WASTEFUL, SPREAD, FORGETFUL, REPETITIVE])


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
    report = module_of(case).run(case.name, case.launch, x, out, scale=1.0, elements=301)
    assert report.complaint == ""
    assert np.array_equal(out[:301], x[:301])
    assert (out[301:] == 0xFFFF).all()


@pytest.mark.parametrize("stride", STRIDES)
def test_bank_conflicts_are_wavefronts_beyond_the_ideal(stride: int) -> None:
    _, report = run(CONFLICTS[stride], random_bits(256))
    assert (report.wavefronts, report.bank_conflicts) == STRIDES[stride]
    assert report.uninitialized_reads == 32
    assert report.complaint.endswith("of shared memory, which was never written in its block")


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
        module_of(Case("copies", COPY)).run("copies", launch, x, np.zeros(256, np.uint16), scale=1.0, elements=256)
