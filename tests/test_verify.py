"""Verification of kernels, on a stand-in for one that is right, or wrong in many ways."""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_device import read_operands
from hypothesis import given
from hypothesis import strategies as st
from measure_sample import ALL_PROBLEMS, PROBLEM, SPEC, array_at, memory_at

from hadagen.measure.verify import Verifier, _cases, arrangements, operand_sets, row_counts
from hadagen.problem.bits import decode, encode
from hadagen.problem.launch import LaunchSpec, RowShape
from hadagen.problem.operands import params_for
from hadagen.problem.problem import DType, Problem, Rows
from hadagen.problem.trial import Outcome
from hadagen.truth.reference import INPUT_CLASSES, hadamard, transform


@pytest.fixture(autouse=True)
def few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what kernels are verified with is enough to tell stand-ins apart."""
    monkeypatch.setattr("hadagen.measure.verify._LEAST_ELEMENTS", 1 << 15)


def rows_at(address: int, count: int, columns: int, pitch: int, dtype: DType) -> np.ndarray:
    """A view of rows that lie `pitch` elements apart."""
    flat = array_at(address, (count - 1) * pitch + columns, dtype)
    return np.lib.stride_tricks.as_strided(flat, (count, columns), (pitch * dtype.bytes, dtype.bytes))


@dataclass
class StandIn:
    """A correct kernel that runs on the CPU, and ways to break it."""

    problem: Problem
    fault: str = ""
    spec: LaunchSpec = SPEC
    resident_blocks: int = 4
    calls: int = 0

    def launch(
        self,
        stream: int,
        x: int,
        y: int,
        elements: int,
        scale: float,
        rows: RowShape,
        operands: Mapping[str, int],
    ) -> None:
        self.calls += 1
        self.spec.arguments(elements, scale, rows, operands)  # none is missing
        n, dtype, fault = self.problem.n, self.problem.io.input, self.fault
        count, (columns, x_pitch, y_pitch) = elements // n, rows
        given, out = rows_at(x, count, columns, x_pitch, dtype), rows_at(y, count, columns, y_pitch, dtype)
        padded = np.zeros((count, n))
        padded[:, :columns] = decode(dtype, given)
        if fault == "takes the gap for elements" and columns < x_pitch:
            behind = rows_at(x, count, min(n, x_pitch), x_pitch, dtype)
            padded[:, : min(n, x_pitch)] = decode(dtype, behind)
        bits = encode(dtype, transform(self.problem, padded, scale, self._read(operands)))[:, :columns].copy()
        tail = elements % self.spec.tile_elements // n
        done = self.resident_blocks * self.spec.tile_elements // n
        if fault == "swaps two elements":
            bits[0, [0, 1]] = bits[0, [1, 0]]
            bits[0, :2] ^= 0x4000
        elif fault == "leaves out the ragged tile" and tail:
            bits[-tail:] = out[-tail:]
        elif fault == "scales wrongly":
            bits = encode(dtype, hadamard(padded, scale * 1.001))[:, :columns].copy()
        elif fault == "overflows" and decode(dtype, bits).max() > 1000.0:
            bits[0, 1] = encode(dtype, np.array(np.inf))
        elif fault == "drops later tiles of a block":
            bits[done:] = out[done:]
        elif fault == "wrong for a single row" and elements == n:
            bits[0, 0] ^= 1
        elif fault == "differs every time":
            bits[self.calls % count, 0] ^= 1
        elif fault == "reads what it wrote" and x == y:
            padded[:, :columns] = decode(dtype, bits)
            bits = encode(dtype, hadamard(padded, scale))[:, :columns].copy()
        elif fault == "leaves out the last column":
            bits[:, -1] = out[:, -1]
        elif fault == "rounds the address down to a vector" and y % 16:
            bits = np.roll(bits, 1)
        elif fault == "takes one pitch for both":
            out = rows_at(y, count, columns, x_pitch, dtype)
        out[:] = bits
        if fault == "writes behind":
            array_at(y + ((count - 1) * y_pitch + columns) * dtype.bytes, 1, dtype)[0] = 0
        elif fault == "writes before":
            array_at(y - dtype.bytes, 1, dtype)[0] = 0
        elif fault == "writes zeros to the end of the row" and columns < n:
            rows_at(y, 1, min(n, y_pitch), y_pitch, dtype)[:, columns:] = 0
        elif fault == "changes its input" and x != y:
            given[0, 0] ^= 1

    def _read(self, operands: Mapping[str, int]) -> dict[str, Any]:
        """The operands at their addresses."""
        problem, fault, read = self.problem, self.fault, read_operands(self.problem, operands)
        if problem.order > 1:
            if fault == "writes to the matrix":
                memory_at(operands["matrix"], 1, ctypes.c_uint8)[0] = 99
            elif fault == "writes before the matrix":
                memory_at(operands["matrix"] - 1, 1, ctypes.c_uint8)[0] = 99
            elif fault == "transposes":
                read["matrix"] = read["matrix"].T
            elif fault == "takes zeros for minus one":
                read["matrix"][read["matrix"] == 0] = -1
        for name in ("signs_before", "signs_after") if problem.transform.signed else ():
            if name in read:
                if fault == "takes signs from the highest bit":
                    read[name] = np.packbits(np.unpackbits(read[name], bitorder="little"), bitorder="big")
            elif fault == "takes a null pointer for signs":
                read[name] = np.full(-(-problem.n // 8), 1, np.uint8)
        if fault == "leaves out the signs behind":
            read.pop("signs_after", None)
        return read


def verify(stand_in: StandIn) -> Any:

    return Verifier(torch.device("cpu"), stream=0).check(stand_in, stand_in.problem)


ONE_ROUNDING = {DType.FLOAT16: 2.08e-4, DType.BFLOAT16: 1.66e-3, DType.FLOAT32: 2.54e-8}


@pytest.mark.parametrize("rows", Rows)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("n", [2, 4, 8, 256, 512, 4096])
def test_a_correct_kernel_passes(n: int, dtype: DType, rows: Rows) -> None:
    spec = replace(SPEC, tile_elements=max(n, 4096), persistent=True)
    verdict = verify(StandIn(Problem.of(n, dtype, rows=rows), spec=spec))
    assert (verdict.outcome, verdict.detail) == (Outcome.OK, "")
    assert set(verdict.errors) == set(INPUT_CLASSES)
    if n > 2:  # else rows of one element are among them, which are only scaled
        assert verdict.errors["normal"] == pytest.approx(ONE_ROUNDING[dtype], rel=0.05)


@given(st.sampled_from([problem for problem in ALL_PROBLEMS if problem.io.rows is Rows.PITCHED]))
def test_pitched_rows_are_verified_in_every_arrangement(problem: Problem) -> None:

    n, vector = problem.n, 16 // problem.io.input.bytes
    arranged = arrangements(problem)
    for rows, _, _ in arranged:
        assert n // 2 + (n > 2) <= rows.columns <= n
        assert min(rows.x_pitch, rows.y_pitch) >= rows.columns
    columns = {rows.columns for rows, _, _ in arranged}
    assert n in columns
    assert any(each % vector for each in columns)
    assert n < 32 or any(each % vector == 0 for each in columns - {n})
    assert any(rows.x_pitch != rows.y_pitch for rows, _, _ in arranged)
    assert {offset % 2 for _, *offsets in arranged for offset in offsets} == {0, 1}
    least = [each for each in arranged if each.rows.columns == n // 2 + (n > 2)]
    assert any(each.rows.x_pitch % vector == each.x_offset == 0 != each.y_offset % vector for each in least)
    for each in arranged:
        assert each.in_place.rows.x_pitch == each.in_place.rows.y_pitch == each.rows.x_pitch
        assert each.in_place.x_offset == each.in_place.y_offset


@pytest.mark.parametrize(
    ("fault", "outcome", "says"),
    [
        ("swaps two elements", Outcome.WRONG_ANSWER, "relative error"),
        ("leaves out the ragged tile", Outcome.WRONG_ANSWER, "relative error inf"),
        ("scales wrongly", Outcome.WRONG_ANSWER, "relative error"),
        ("overflows", Outcome.WRONG_ANSWER, "relative error inf for large inputs"),
        ("drops later tiles of a block", Outcome.WRONG_ANSWER, "relative error inf"),
        ("reads what it wrote", Outcome.WRONG_ANSWER, "relative error"),
        ("wrong for a single row", Outcome.WRONG_ANSWER, "a few rows"),
        ("writes behind", Outcome.WRONG_ANSWER, "outside"),
        ("writes before", Outcome.WRONG_ANSWER, "outside"),
        ("changes its input", Outcome.WRONG_ANSWER, "outside"),
        ("differs every time", Outcome.UNSTABLE, "differently"),
    ],
)
@pytest.mark.parametrize("rows", Rows)
def test_a_wrong_kernel_is_found(fault: str, outcome: Outcome, says: str, rows: Rows) -> None:
    verdict = verify(StandIn(PROBLEM.with_io(rows=rows), fault, replace(SPEC, persistent=True)))
    assert verdict.outcome is outcome
    assert says in verdict.detail


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("takes the gap for elements", "relative error inf"),
        ("leaves out the last column", "relative error inf"),
        ("rounds the address down to a vector", "relative error"),
        ("takes one pitch for both", "outside"),
        ("writes zeros to the end of the row", "outside"),
    ],
)
@pytest.mark.parametrize("dtype", DType)
def test_a_kernel_that_is_wrong_about_pitched_rows_is_found(dtype: DType, fault: str, says: str) -> None:
    verdict = verify(StandIn(Problem.of(256, dtype, rows="pitched"), fault))
    assert verdict.outcome is Outcome.WRONG_ANSWER
    assert says in verdict.detail


WITH_OPERANDS = [
    Problem.of(56, DType.FLOAT16, order=28, signed=True),
    Problem.of(7 << 6, DType.BFLOAT16, order=7),
    Problem.of(24, DType.BFLOAT16, order=24),
    Problem.of(256, DType.FLOAT32, signed=True),
    Problem.of(28 << 6, DType.FLOAT16, order=28, real=True),
]


def stand_in_for(problem: Problem, fault: str = "") -> StandIn:
    spec = replace(SPEC, tile_elements=problem.n * 5, persistent=True, params=params_for(problem))
    return StandIn(problem, fault, spec)


@pytest.mark.parametrize("problem", WITH_OPERANDS, ids=lambda problem: problem.key)
def test_a_correct_kernel_with_a_matrix_or_signs_passes(problem: Problem) -> None:
    verdict = verify(stand_in_for(problem))
    assert (verdict.outcome, verdict.detail) == (Outcome.OK, "")
    assert set(verdict.errors) == set(INPUT_CLASSES) - {"constant", *["one-hot"] * problem.transform.real}
    assert verdict.errors["normal"] == pytest.approx(ONE_ROUNDING[problem.io.input], rel=0.05)


@pytest.mark.parametrize("problem", [Problem.of(1792, DType.BFLOAT16, order=28), WITH_OPERANDS[0]])
def test_neighboring_tiles_differ_with_a_matrix_too(problem: Problem) -> None:

    sets = operand_sets(problem)
    cases = _cases(problem, sets)
    assert all(len(case.bits) % 2 for case in cases.values())
    assert {key.operands for key in cases if key.input_class == "normal"} == set(range(len(sets)))


@pytest.mark.parametrize(
    ("fault", "says", "order", "signed"),
    [
        ("transposes", "relative error", 28, False),
        ("takes zeros for minus one", "relative error", 28, False),
        ("writes to the matrix", "outside", 28, True),
        ("writes before the matrix", "outside", 28, False),
        ("takes signs from the highest bit", "relative error", 28, True),
        ("leaves out the signs behind", "relative error", 1, True),
        ("takes a null pointer for signs", "relative error", 1, True),
    ],
)
def test_a_kernel_that_is_wrong_about_its_operands_is_found(fault: str, says: str, order: int, signed: bool) -> None:
    problem = Problem.of(order * 64, DType.FLOAT16, order=order, signed=signed)
    verdict = verify(stand_in_for(problem, fault))
    assert verdict.outcome is Outcome.WRONG_ANSWER
    assert says in verdict.detail
    assert verify(stand_in_for(problem)).outcome is Outcome.OK


def test_what_a_wrong_kernel_has_overwritten_is_not_compared_with() -> None:

    verifier = Verifier(torch.device("cpu"), stream=0)
    assert verifier.check(StandIn(PROBLEM), PROBLEM).outcome is Outcome.OK
    cases = verifier._cases_of(PROBLEM)

    class Wild(StandIn):
        def launch(self, *arguments: Any) -> None:
            for case in cases.values():
                case.bits.zero_()
                case.reference.zero_()

    assert verifier.check(Wild(PROBLEM), PROBLEM).outcome is Outcome.WRONG_ANSWER
    assert verifier.check(StandIn(PROBLEM), PROBLEM).outcome is Outcome.OK


@given(
    n=st.integers(1, 15).map(lambda k: 1 << k) | st.just(14336),
    tile_rows=st.integers(0, 8).map(lambda k: 1 << k) | st.just(3),
    cluster=st.sampled_from([1, 2, 4, 8]),
    resident=st.integers(1, 500),
    persistent=st.booleans(),
)
def test_row_counts(n: int, tile_rows: int, cluster: int, resident: int, persistent: bool) -> None:

    spec = LaunchSpec(128, cluster, 0, n * tile_rows, persistent)
    counts = row_counts(spec, n, resident * cluster)
    assert counts.few == (1, tile_rows + 1)
    assert counts.looped >= counts.base > 2 * tile_rows
    assert all(rows % tile_rows != 0 or tile_rows == 1 for rows in (counts.base, counts.looped))
    tiles = -(-counts.looped // tile_rows)
    blocks = spec.grid(counts.looped * n, resident * cluster)
    assert not persistent or tiles > 2 * (blocks // cluster)


def test_an_error_just_above_the_bound_reads_so(monkeypatch: pytest.MonkeyPatch) -> None:

    just_above = torch.tensor(PROBLEM.error_bound * (1 + 1e-6), dtype=torch.float64)
    monkeypatch.setattr("hadagen.measure.verify.error_of", lambda *_: just_above)
    found, bound = re.findall(r"[0-9.]+e-[0-9]+", verify(StandIn(PROBLEM)).detail)
    assert float(found) > float(bound)
    assert len(found) == len(bound)
