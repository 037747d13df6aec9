"""The machine under the emulator: elements one by one, and rows that lie anywhere."""

from __future__ import annotations

import re

import numpy as np
import pytest
from machine_case import Case, bits_of, named, random_bits, run, together

from hadagen.emulator import EmulationError
from hadagen.errors import UsageError
from hadagen.launch import RowShape
from hadagen.problem import DType

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
