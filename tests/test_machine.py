"""The machine under the emulator: handwritten kernels that use its primitives rightly or wrongly, and its report."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from machine_case import (
    COPY,
    SHARED_BYTES,
    WHOLE,
    Case,
    bits_of,
    crossing,
    module_of,
    multicast,
    named,
    random_bits,
    run,
    together,
)

from hadagen.compiler.emulator import EmulationError
from hadagen.errors import UsageError
from hadagen.problem.bits import Bits
from hadagen.problem.launch import LaunchSpec, RowShape
from hadagen.problem.problem import DType


def transposed(x: Bits) -> Bits:
    """Register w of lane l = 4·row + q holds elements 8·l + 2·w and the next: row `row`, columns 2·q and the next."""
    matrices = x.reshape(-1, 8, 4, 4, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 4, 8, 8).swapaxes(2, 3)
    return matrices.reshape(-1, 4, 8, 4, 2).transpose(0, 2, 3, 1, 4)


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
    assert module_of(case).run(case.name, case.launch, x, out, scale=1.0, elements=301).complaint == ""
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


# ---- elements one by one, and rows that lie anywhere -----------------------------------------------------------------
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

together([*COUNTED, ALIGNED, *ROWS.values(), *ROWS_STOPPED, UNEVEN_ROWS, LATE_ROWS])


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
        assert ROWS[dtype].run(x, out, rows=rows, shape=RowShape(columns, x_pitch, y_pitch)).complaint == ""
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


@pytest.mark.parametrize(
    ("x", "out", "said"),
    [
        (np.zeros(59, np.uint16), np.zeros(72, np.uint16), "x has 59 elements, fewer than the 60"),
        (np.zeros(60, np.uint16), np.zeros(71, np.uint16), "out has 71 elements, fewer than the 72"),
        (np.zeros(60, np.uint16), np.frombuffer(bytes(145), np.uint16, 72, offset=1), "out is not aligned to 2 bytes"),
    ],
)
def test_arrays_shorter_than_their_rows_or_askew_are_refused(x: Bits, out: Bits, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ROWS[DType.FLOAT16].run(x, out, rows=4, shape=SHAPE)


# ---- threads that do not wait for each other -------------------------------------------------------------------------
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
# x has twice as many elements as y, so a block stores its results over the input of another block.
WIDE = Case(
    "wide",
    """const byte* const both = in + T::bytes * first + 32 * t;
    const Vec16 v = load16(both + 16);
    load16(both);
    store16(out + 16 * t, v);""",
)

together([*RACES, *UNHEEDED, LATE, WIDE])


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


def test_input_of_another_block_is_not_overwritten_where_x_is_longer_than_y() -> None:
    x = random_bits(2048)
    wide = partial(module_of(WIDE).run, "wide", WIDE.launch, x, scale=1.0, elements=1024, x_elements=2048)
    out = np.zeros(1024, np.uint16)
    assert wide(out).complaint == ""
    assert (out.reshape(-1, 8) == x.reshape(-1, 2, 8)[:, 1]).all()
    report = wide(x)
    assert (report.races, report.unwritten, report.rewritten) == (768, 0, 0)
    assert "of y, in place, which other blocks have loaded" in report.complaint
    with pytest.raises(UsageError, match="x has 1024 elements, fewer than the 2048"):
        module_of(WIDE).run("wide", WIDE.launch, out, x, scale=1.0, elements=1024, x_elements=2048)


# ---- kernels that are stopped, and the sentence about each -----------------------------------------------------------
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
