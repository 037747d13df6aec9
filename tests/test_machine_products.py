"""The machine under the emulator: products of boxes in shared memory, and mbarriers that count arrivals."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from machine_case import COPY, Case, named, random_bits, run, together

from hadagen.compiler.emulator import EmulationError
from hadagen.problem.bits import Bits

# A block copies 16 rows of 64 columns to a box, twice, and multiplies it by a matrix that brings its rows in reverse.
# Warp w stores rows 4w to 4w + 3 of the sum of both products.
BEGIN = """u64* const read = barrier + 1;
    byte* const boxes = boxes_in(shared);
    const u32 warp = t / 32;
    Operand a[1];
    for (u32 i = 0; i < 8; ++i) {
        const u32 row = lane / 4 + 8 * (i / 2 % 2), column = lane % 4 * 2 + 8 * (i / 4) + i % 2;
        a[0].word[i / 2] = (i % 2 ? a[0].word[i / 2] : 0u) | (row + column == 15 ? 0x3C00u << 16 * (i % 2) : 0u);
    }
    float d[32];
    const auto store = [&] {
        for (u32 i = 0; i < 32; ++i) {
            const u32 row = lane / 4 + 8 * (i / 16), column = i % 16 / 2 * 8 + lane % 4 * 2 + i % 2;
            if (row / 4 == warp) store2(out + 2 * (64 * row + column), pack<T>(d[i], 0.0f));
        }
    };
    const u32 place = 128 * (t / 8) + 16 * (t % 8 ^ t / 8 % 8);
    const auto copy = [&] { cp_async16(boxes + place, in + 16 * t), cp_async_commit(); };
    if (t == 0) barrier_init(barrier, 4), barrier_init(read, 4);
    block_sync();
    copy();
"""
ROUND = """cp_async_wait<0>();
        bulk_copy_fence();
        warp_sync();
        if (lane == 0) barrier_arrive(barrier);
        barrier_wait(barrier, turn);
        multiply_boxes<T>(d, a, boxes);
        wait_for_product(d);
        warp_sync();
        if (lane == 0) barrier_arrive(read);
        if (turn == 1) break;
        barrier_wait(read, turn);
        copy();"""
WHOLE = BEGIN + "for (u32 turn = 0; turn < 2; ++turn) {" + ROUND + "} store();"


def case(name: str, *changes: str, threads: int = 128) -> Case:
    """The kernel with texts replaced, each by the one after it."""
    body = WHOLE
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert body.count(old) == 1, (name, old)
        body = body.replace(old, new)
    return Case(name, body, threads)


def finite(count: int) -> Bits:
    """Random float16 from 0 to 2."""
    return random_bits(count) & 0x3FFF


def upside_down(x: Bits) -> Bits:
    return x.reshape(-1, 16, 64)[:, ::-1]


def with_swizzled_rows(x: Bits) -> Bits:
    """What a box holds, into which rows were copied as they are."""
    rows = np.arange(16)[:, None]
    return upside_down(x.reshape(-1, 16, 8, 8)[:, rows, np.arange(8) ^ rows % 8].copy())


ARRIVE = "if (lane == 0) barrier_arrive(barrier);"
ARRIVE_READ = "if (lane == 0) barrier_arrive(read);"
END = "wait_for_product(d);\n"
# Warps 0 to 2 of four, each of which waits for the one before it; the last one reads what the first has stored.
CHAIN = (
    """if (t == 0) barrier_init(&barrier[0], 1), barrier_init(&barrier[1], 1);
    block_sync();
    if (t < 32) {
        shared_store16(data + 16 * lane, load16(in + 16 * lane));
        warp_sync();
        if (lane == 3) barrier_arrive(&barrier[0]);
    } else if (t < 64) {
        if (lane == 5) barrier_wait(&barrier[0], 0);
        warp_sync();
        if (lane == 7) barrier_arrive(&barrier[1]);
    } else if (t < 96) {
        barrier_wait(&barrier[1], 0);
        shared_load16(data + 16 * (lane ^ 9));
    }
    """
    + COPY
)
# Thread 0 waits for a bulk copy, and others for thread 0.
AFTER_A_COPY = """if (t == 0) barrier_init(&barrier[0]), barrier_init(&barrier[1], 1);
    block_sync();
    if (t == 0) bulk_copy(data, in, 1024, &barrier[0]), barrier_wait(&barrier[0], 0);
    if (t < 32) warp_sync();
    if (t == 7) barrier_arrive(&barrier[1]);
    if (t >= 32) barrier_wait(&barrier[1], 0);
    store16(out + 16 * t, shared_load16(data + 16 * t));"""

GOOD: dict[Case, Callable[[Bits], Bits]] = {
    case("multiplies_boxes"): upside_down,
    case(
        "lane_0_waits", "barrier_wait(barrier, turn);", "if (lane == 0) barrier_wait(barrier, turn); warp_sync();"
    ): upside_down,
    case("all_warps_know_it", "barrier_wait(read, turn);", "block_sync();"): upside_down,
    # What a product has read is no matter of fences, and neither is what landed.
    case(
        "bulk_copies_over_boxes",
        "barrier_init(read, 4);",
        "barrier_init(read, 4), barrier_init(&barrier[2]);",
        "copy();}",
        """if (t == 0) bulk_copy(boxes, in, 2048, &barrier[2]);
        barrier_wait(&barrier[2], 0);
        multiply_boxes<T>(d, a, boxes);
        wait_for_product(d);
        break;}""",
    ): with_swizzled_rows,
    Case("arrivals_in_a_chain", CHAIN, 128): lambda x: x,
    Case("arrives_after_a_copy", AFTER_A_COPY, 64): lambda x: x,
}

RACES = [
    case("box_not_waited_for", "barrier_wait(barrier, turn);", "warp_sync();"),
    case("box_waited_for_by_one_lane", "barrier_wait(barrier, turn);", "if (lane == 31) barrier_wait(barrier, turn);"),
    case("arrives_before_other_lanes", "warp_sync();\n        " + ARRIVE, ARRIVE),
    case("overwritten_while_it_is_multiplied", END, "if (turn == 0) copy();" + END, "copy();}", "}"),
    case(
        "overwritten_and_synced_while_it_is_multiplied",
        END,
        "if (turn == 0) block_sync(), copy(), cp_async_wait<0>(), bulk_copy_fence(), block_sync();" + END,
        "copy();}",
        "}",
    ),
    case("overwritten_while_others_multiply_it", "barrier_wait(read, turn);", ""),
    case("arrives_before_its_product_ends", END + "        warp_sync();\n        " + ARRIVE_READ, ARRIVE_READ + END),
    case(
        "arrives_earlier_than_its_product",
        "multiply_boxes<T>(d, a, boxes);",
        f"warp_sync(); {ARRIVE_READ} warp_sync(); multiply_boxes<T>(d, a, boxes);",
        "warp_sync();\n        " + ARRIVE_READ,
        "",
    ),
    Case("a_chain_that_is_broken", CHAIN.replace("if (lane == 5) barrier_wait(&barrier[0], 0);", ""), 128),
    Case("a_chain_that_begins_too_early", CHAIN.replace("warp_sync();\n        if (lane == 3)", "if (lane == 3)"), 128),
    Case("arrives_before_the_copy", AFTER_A_COPY.replace("if (t < 32) warp_sync();", ""), 64),
]

STOPPED = {
    case("no_fence", "bulk_copy_fence();\n", ""): "has written with no bulk_copy_fence since",
    case(
        "fence_after_arrival", "bulk_copy_fence();\n", "", ARRIVE, ARRIVE + "bulk_copy_fence();"
    ): "has written with no bulk_copy_fence since",
    case("fence_by_half_a_warp", "bulk_copy_fence();", "if (lane < 16) bulk_copy_fence();"): "no bulk_copy_fence since",
    case("askew", "boxes_in(shared)", "boxes_in(shared) + 128"): "whose address is not a multiple of 1024",
    case("where_shared_memory_begins", "boxes_in(shared)", "shared + 1024"): "is not a multiple of 1024",
    case("beyond", "boxes_in(shared)", "boxes_in(shared) + 7168"): "of shared memory, of which there are 8192",
    case("two_boxes", "multiply_boxes<T>(d, a, boxes)", "multiply_boxes<T>(d, a, boxes + 1024 * (warp / 2))"): (
        "multiplies other boxes than the warps beside it"
    ),
    case("two_boxes_of_a_warp", "multiply_boxes<T>(d, a, boxes)", "multiply_boxes<T>(d, a, boxes + lane / 16)"): (
        "multiplies other boxes than its warp"
    ),
    case(
        "three_warps",
        "multiply_boxes<T>(d, a, boxes);",
        "if (warp < 3) { multiply_boxes<T>(d, a, boxes);",
        END,
        END + "}",
    ): ("has not carried out as many products as the warp before it"),
    case(
        "half_a_block", "barrier_init(barrier, 4)", "barrier_init(barrier, 2)", threads=64
    ): "a product takes 4 warps; a block has 64 threads",
    case("not_waited_for", "wait_for_product(d);", "if (turn == 1) return;"): "ends before its product",
    case("not_begun", "multiply_boxes<T>(d, a, boxes);", ""): "waits for another product than its last",
    case("another_phase", "barrier_wait(barrier, turn);", "barrier_wait(barrier, 1);"): "the kernel hangs",
    case("not_all_arrive", ARRIVE_READ, "if (t == 0) barrier_arrive(read);"): (
        "hangs: threads 0-127 of block 0 wait at barrier_wait"
    ),
    Case("no_arrivals", "if (t == 0) barrier_init(barrier, 0);"): "initializes an mbarrier for no arrivals",
    Case("arrival_for_bytes", "if (t == 0) barrier_init(barrier), barrier_arrive(barrier);"): (
        "arrives at an mbarrier that waits for bytes"
    ),
    Case("bytes_for_arrivals", "if (t == 0) barrier_init(barrier, 1), barrier_expect(barrier, 16);"): (
        "expects bytes at an mbarrier that counts arrivals"
    ),
    Case(
        "fence_after_a_sync",
        """if (t == 0) barrier_init(barrier);
        shared_store16(data + 16 * t, zero16());
        block_sync();
        bulk_copy_fence();
        for (int i = 0; i < 2; ++i) shuffle_xor(0u, 1);
        if (t == 0) bulk_copy(data, in, 512, barrier);""",
        64,
    ): "has touched with no bulk_copy_fence since",
}

# The sums of a product are NaN until it has been waited for.
TOO_EARLY = case("stores_too_early", END, "store();" + END, "} store();", "}")
# The box lacks a row.
LACKING = case("lacks_a_row", "const auto copy = [&] {", "const auto copy = [&] { if (t < 120)")

together([*GOOD, *RACES, *STOPPED, TOO_EARLY, LACKING])


@named(GOOD)
@pytest.mark.parametrize("order_seed", [0, 1, 2, 3])
def test_a_good_product_has_its_result_in_any_order(case: Case, order_seed: int) -> None:
    x = finite(3072)
    out = np.full_like(x, 0xFFFF)
    report = case.run(x, out, order_seed=order_seed)
    assert (report.complaint, report.uninitialized_reads) == ("", 0)
    assert np.array_equal(out, GOOD[case](x).reshape(-1))


@named(RACES)
@pytest.mark.parametrize("order_seed", [0, 1, 2, 3])
def test_a_race_of_a_product_is_seen_in_any_order(case: Case, order_seed: int) -> None:
    x = finite(1024)
    report = case.run(x, np.zeros_like(x), order_seed=order_seed)
    assert report.races > 0
    assert re.fullmatch(r"thread \d+ of block \d+ (reads|writes|multiplies) byte \d+ of .*", report.first_race)


@named(STOPPED)
@pytest.mark.parametrize("order_seed", [0, 1, 2, 3])
def test_a_wrong_product_is_stopped_with_a_sentence(case: Case, order_seed: int) -> None:
    x = finite(1024)
    with pytest.raises(EmulationError, match=re.escape(STOPPED[case])):
        case.run(x, np.zeros_like(x), order_seed=order_seed)


def test_sums_are_nan_until_they_are_waited_for() -> None:
    out, report = run(TOO_EARLY, finite(1024))
    assert report.races == 0
    assert np.isnan(out.view(np.float16)).all()


def test_a_box_that_lacks_a_row_is_read_uninitialized() -> None:
    _, report = run(LACKING, finite(1024))
    assert report.complaint.endswith("of shared memory, which was never written in its block")
