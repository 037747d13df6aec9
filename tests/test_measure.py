"""Measuring without a GPU: the cells, the copy kernels, verification on a stand-in kernel, the worker, replay."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadagen.bits import decode, encode
from hadagen.errors import DeviceError, UsageError
from hadagen.launch import LaunchSpec, RowShape
from hadagen.measure import Candidate, Cell, DeviceRunner, ReplayRunner, all_cells, copy_sources
from hadagen.measure.cells import EVICTION, probe_cells
from hadagen.measure.messages import Answer, Measure, Race
from hadagen.problem import DType, Numerics, Problem
from hadagen.reference import hadamard
from hadagen.trial import (
    BUCKETS_BETWEEN,
    BUCKETS_OF_LONG_ROWS,
    ELEMENT_BUCKETS,
    PITCHED_ELEMENT_BUCKETS,
    Cache,
    Destination,
    Environment,
    Kernel,
    Outcome,
    Provenance,
    Timing,
    Trial,
    deciding_cache,
    element_buckets,
    may_be_hot,
    timed_rows,
)

H100_L2 = 52428800
PROBLEM = Problem(256, DType.FLOAT16)
SPEC = LaunchSpec(threads=128, cluster=1, shared_bytes=0, tile_elements=4096, persistent=False)
GPU = Environment(gpu="Stand-in", l2_bytes=H100_L2, sms=132)
CELL = Cell(1 << 16, Destination.IN_PLACE, Cache.HOT)


def kernel(entry: str = "ok", problem: Problem = PROBLEM) -> Kernel:
    return Kernel(entry, entry, "sm90", "source", b"cubin", b"ptx", SPEC, 32, 0, "13.0")


def candidates(*entries: str) -> list[Candidate]:
    return [Candidate(PROBLEM, {"number": i}, kernel(entry)) for i, entry in enumerate(entries)]


# ---- cells ---------------------------------------------------------------------------------------------------------
ALL_PROBLEMS = [
    Problem(1 << k, dtype, pitched=pitched) for k in range(1, 16) for dtype in DType for pitched in (False, True)
]


def test_cells_of_an_h100() -> None:
    cells = all_cells(PROBLEM, H100_L2)
    assert len(set(cells)) == len(cells) == 64
    assert {cell.elements for cell in cells} == {*ELEMENT_BUCKETS, *BUCKETS_BETWEEN}
    cold = {cell.elements for cell in cells if cell.cache is Cache.COLD}
    assert cold == {12 << 20, *(e for e in ELEMENT_BUCKETS if e >= 1 << 16)}
    hot = [cell for cell in cells if cell.cache is Cache.HOT]
    assert max(cell.elements for cell in hot if cell.destination is Destination.IN_PLACE) == 1 << 25
    assert max(cell.elements for cell in hot if cell.destination is Destination.OUT_OF_PLACE) == 1 << 24
    wide = all_cells(Problem(256, DType.FLOAT32), H100_L2)
    assert max(cell.elements for cell in wide if cell.cache is Cache.HOT) == 1 << 24
    pitched = all_cells(replace(PROBLEM, pitched=True), H100_L2)
    assert {cell.elements for cell in pitched} == set(PITCHED_ELEMENT_BUCKETS)
    for n in (1 << 13, 1 << 15):
        long = {cell.elements for cell in all_cells(Problem(n, DType.FLOAT16), H100_L2)}
        assert long == {*filter(n.__le__, ELEMENT_BUCKETS), *BUCKETS_BETWEEN, *BUCKETS_OF_LONG_ROWS}
    shorter = {cell.elements for cell in all_cells(Problem(1 << 12, DType.FLOAT16), H100_L2)}
    assert not shorter & set(BUCKETS_OF_LONG_ROWS)


@given(st.sampled_from(ALL_PROBLEMS), st.integers(10, 28).map(lambda k: 1 << k) | st.just(H100_L2))
def test_every_element_count_is_timed_where_it_decides(problem: Problem, l2_bytes: int) -> None:
    """Powers of two also in the other regime, where kernels are timed in it; what lies between only if both count."""
    cells = all_cells(problem, l2_bytes)
    buckets = element_buckets(problem)
    assert list(buckets) == sorted(set(buckets))
    assert not any(elements % problem.n for elements in buckets)
    for elements, destination in product(buckets, Destination):
        decides = deciding_cache(problem, elements, destination, l2_bytes)
        caches = {cell.cache for cell in cells if cell[:2] == (elements, destination)}
        assert decides in caches or elements < 1 << 16
        if elements not in ELEMENT_BUCKETS:
            assert caches == (set(Cache) if may_be_hot(problem, elements, destination, l2_bytes) else {decides})


@pytest.mark.parametrize("problem", ALL_PROBLEMS, ids=lambda problem: problem.name)
def test_the_rows_that_are_timed(problem: Problem) -> None:
    columns, x_pitch, y_pitch = timed_rows(problem)
    assert columns == x_pitch == y_pitch <= problem.n
    assert columns == problem.n or problem.pitched
    assert columns > problem.n // 2 or problem.n == 2
    assert not problem.pitched or columns == problem.n * 3 // 4 or problem.n < 32
    for cell in all_cells(problem, H100_L2):  # the copy kernel moves vectors of 16 bytes
        assert cell.traffic(problem).buffer_bytes % 16 == 0


@given(st.sampled_from(ALL_PROBLEMS), st.data(), st.integers(20, 28).map(lambda k: 1 << k))
def test_launches_of_a_cell(problem: Problem, data: st.DataObject, l2_bytes: int) -> None:
    cell = data.draw(st.sampled_from(all_cells(problem, H100_L2)))
    traffic = cell.traffic(problem)
    assert traffic.buffer_bytes == cell.elements // problem.n * timed_rows(problem).columns * problem.dtype.bytes
    assert traffic.footprint == traffic.buffer_bytes * (1 if cell.destination is Destination.IN_PLACE else 2)
    assert 1 <= traffic.launches(l2_bytes) <= 96
    rotation = traffic.slots(l2_bytes) * traffic.footprint
    if cell.cache is Cache.HOT:
        assert rotation == traffic.footprint
        assert not traffic.needs_flush(l2_bytes)
    else:  # by the other slots or by a flush, a slot is always evicted before it is touched again
        assert traffic.slots(l2_bytes) == traffic.launches(l2_bytes)
        assert traffic.needs_flush(l2_bytes) == (rotation < EVICTION * l2_bytes)


def test_probe_cells() -> None:
    def probes(problem: Problem) -> tuple[Cell, ...]:
        return probe_cells(problem, all_cells(problem, H100_L2), H100_L2)

    assert probes(PROBLEM) == (
        Cell(1 << 13, Destination.IN_PLACE, Cache.HOT),
        Cell(12 << 20, Destination.IN_PLACE, Cache.HOT),
        Cell(1 << 28, Destination.IN_PLACE, Cache.COLD),
    )
    assert probes(Problem(256, DType.FLOAT32))[1].elements == 6 << 20
    assert [cell.elements for cell in probes(replace(PROBLEM, pitched=True))] == [1 << 16, 1 << 24, 1 << 27]
    assert probe_cells(PROBLEM, [CELL], H100_L2) == (CELL,)
    assert probe_cells(PROBLEM, [], H100_L2) == ()


# ---- the copy kernels ----------------------------------------------------------------------------------------------
def test_copy_sources_are_complete() -> None:
    sources = copy_sources()
    assert len({source.entry for source in sources}) == len(sources) >= 3
    for source in sources:
        assert "$" not in source.text
        assert source.launch.tile_elements % (8 * source.launch.threads) == 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_copy_sources_compile(tmp_path: Any) -> None:
    from importlib.resources import files

    header = files("hadagen.templates").joinpath("device/hadagen.cuh").read_text(encoding="utf-8")
    (tmp_path / "hadagen.cuh").write_text(header, encoding="utf-8")
    (tmp_path / "copies.cu").write_text("".join(source.text for source in copy_sources()), encoding="utf-8")
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-Xptxas=-v", "-cubin", "-o", "copies.cubin", "copies.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for source in copy_sources():
        assert f"'{source.entry}'" in done.stderr
    assert "0 bytes spill stores" in done.stderr


def test_copy_sources_copy() -> None:
    emulator = pytest.importorskip("hadagen.emulator")
    from hadagen.codegen import Source

    sources = copy_sources()
    module = emulator.compile_host([Source(source.entry, source.text) for source in sources])
    for source in sources:
        elements = 2 * source.launch.tile_elements + 8
        x = np.arange(elements).astype(np.uint16)
        out = np.full_like(x, 0x7FFF)
        module.run(source.entry, source.launch, x, out, scale=1.0, elements=elements)
        assert (out == x).all(), source.entry


def test_the_yardstick_is_the_fastest_copy_of_each_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    from hadagen.measure import timing, yardstick
    from hadagen.measure.cells import Traffic

    now = [100.0]
    monkeypatch.setattr(yardstick.time, "monotonic", lambda: now[0])
    asked: list[tuple[str, list[int]]] = []

    class FakeStopwatch:
        def time(self, copy: str, works: list[timing.Work], replays: int) -> list[timing.Sample]:
            if works:
                asked.append((copy, [work.traffic.buffer_bytes for work in works]))
            for work in works:
                assert 2 * work.elements == work.traffic.buffer_bytes
            least = {"small": 1.0, "large": 5.0}[copy]  # the large copy starts slowly and is twice as fast
            least += len(asked) % 2  # and the first graph of two is slow
            return [
                timing.Sample(least + work.elements / {"small": 1, "large": 2}[copy] + now[0], 0, 0) for work in works
            ]

    small, large = (Traffic(size, Destination.IN_PLACE, Cache.HOT) for size in (2, 64))
    copies = yardstick.Yardstick(FakeStopwatch(), ["small", "large"], 3)  # type: ignore[arg-type, list-item]
    copies.refresh([small])
    copies.refresh([small, large, large])
    assert asked == [(copy, [size]) for size in (2, 64) for copy in ("small", "small", "large", "large")]
    assert copies.us == {small: 1 + 1 + 100, large: 5 + 16 + 100}
    now[0] = 130.0
    copies.refresh([small, large])
    assert asked[8:] == [("small", [2])] * 2 + [("large", [64])] * 2
    assert copies.us == {small: 1 + 1 + 130, large: 5 + 16 + 130}
    copies.refresh([small, large])
    assert len(asked) == 12


def test_cells_are_of_every_problem_or_by_problem() -> None:
    from hadagen.measure.service import DeviceService

    small, large = (Cell(elements, Destination.IN_PLACE, Cache.HOT) for elements in (1 << 13, 1 << 20))
    long = Problem(1 << 14, DType.FLOAT16)
    service = DeviceService.__new__(DeviceService)  # without the device
    service._l2_bytes = 50 << 20
    for cells, of_problem, of_long in (
        (None, list(all_cells(PROBLEM, 50 << 20)), list(all_cells(long, 50 << 20))),
        ([small, large], [small, large], [large]),
        ({PROBLEM: [small], long: [small, large]}, [small], [large]),
    ):
        service._cells = cells
        assert (service._cells_of(PROBLEM), service._cells_of(long)) == (of_problem, of_long)


def test_the_arena_fits_whatever_is_timed() -> None:
    import torch

    from hadagen.measure.timing import Stopwatch, transform_work

    l2_bytes = 1 << 16
    stopwatch = Stopwatch(SimpleNamespace(device=torch.device("cpu")), l2_bytes)  # type: ignore[arg-type]
    for problem in (PROBLEM, Problem(256, DType.FLOAT32), Problem(256, DType.BFLOAT16, pitched=True)):
        cells = [cell for cell in all_cells(problem, l2_bytes) if cell.elements <= 1 << 16]
        works = [transform_work(problem, cell) for cell in cells]
        assert [(work.elements, work.rows) for work in works] == [(c.elements, timed_rows(problem)) for c in cells]
        stopwatch.fill(problem.dtype, [work.traffic for work in works])
        assert all(work.traffic.slots(l2_bytes) * work.traffic.footprint <= stopwatch._arena.nbytes for work in works)
        assert stopwatch.is_finite(problem.dtype)
        stopwatch._arena[-1] = 0x7F807F80  # infinities in bfloat16 and float32, NaN in float16
        assert not stopwatch.is_finite(problem.dtype)


def test_a_result_that_differs_once_is_seen() -> None:
    import torch

    from hadagen.measure.timing import Stopwatch, transform_work

    stopwatch = Stopwatch(SimpleNamespace(device=torch.device("cpu"), cuda_stream=0), 1 << 16)  # type: ignore[arg-type]
    work = transform_work(PROBLEM, Cell(1 << 10, Destination.OUT_OF_PLACE, Cache.COLD))
    stopwatch.fill(PROBLEM.dtype, [], least_bytes=3 * work.traffic.buffer_bytes)

    class Negates:
        def __init__(self, wrong: int) -> None:
            self.launches, self.wrong = 0, wrong

        def prepared(self, elements: int, *_: object) -> Callable[[int, int, int], None]:
            def launch(stream: int, x: int, y: int) -> None:
                array_at(y, elements, PROBLEM.dtype)[:] = array_at(x, elements, PROBLEM.dtype) ^ 0x8000
                if self.launches == self.wrong:
                    array_at(y, elements, PROBLEM.dtype)[-1] ^= 1
                self.launches += 1

            return launch

    assert [stopwatch.repeats(Negates(wrong), work, 5) for wrong in (0, 1, 5, 6)] == [False, False, False, True]  # type: ignore[arg-type]


def test_peers_are_called_by_their_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from hadagen.measure import peer

    for name in ("fast_hadamard_transform", "faster_hadamard_transform"):
        module: Any = ModuleType(name)
        module.__spec__, module.hadamard_transform = ModuleSpec(name, None), lambda *arguments: arguments
        monkeypatch.setitem(sys.modules, name, module)
    fast, hadacore = peer.find_peers()
    x: Any = object()
    assert (fast.name, fast.transform(x, 0.5, True)) == ("fast_hadamard_transform", (x, 0.5))
    assert (hadacore.name, hadacore.transform(x, 0.5, True)) == ("HadaCore", (x, True))
    problems = PROBLEM, replace(PROBLEM, dtype=DType.FLOAT32), replace(PROBLEM, pitched=True)
    assert [(fast.serves(problem), hadacore.serves(problem)) for problem in problems] == [
        (True, True),
        (True, False),
        (True, False),
    ]


# ---- verification --------------------------------------------------------------------------------------------------
def array_at(address: int, elements: int, dtype: DType) -> np.ndarray:
    kind = ctypes.c_uint16 if dtype.bytes == 2 else ctypes.c_uint32
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), (elements,))


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

    def launch(self, stream: int, x: int, y: int, elements: int, scale: float, rows: RowShape) -> None:
        self.calls += 1
        n, dtype, fault = self.problem.n, self.problem.dtype, self.fault
        count, (columns, x_pitch, y_pitch) = elements // n, rows
        given, out = rows_at(x, count, columns, x_pitch, dtype), rows_at(y, count, columns, y_pitch, dtype)
        padded = np.zeros((count, n))
        padded[:, :columns] = decode(dtype, given)
        if fault == "takes the gap for elements" and columns < x_pitch:
            behind = rows_at(x, count, min(n, x_pitch), x_pitch, dtype)
            padded[:, : min(n, x_pitch)] = decode(dtype, behind)
        bits = encode(dtype, hadamard(padded, scale))[:, :columns].copy()
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


def verify(stand_in: StandIn) -> Any:
    import torch

    from hadagen.measure.verify import Verifier

    return Verifier(torch.device("cpu"), stream=0).check(stand_in, stand_in.problem)


ONE_ROUNDING = {DType.FLOAT16: 2.08e-4, DType.BFLOAT16: 1.66e-3, DType.FLOAT32: 2.54e-8}


@pytest.mark.parametrize("pitched", [False, True], ids=["contiguous", "pitched"])
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("n", [2, 4, 8, 256, 512, 32768])
def test_a_correct_kernel_passes(n: int, dtype: DType, pitched: bool) -> None:
    spec = replace(SPEC, tile_elements=max(n, 4096), persistent=True)
    verdict = verify(StandIn(Problem(n, dtype, pitched=pitched), spec=spec))
    assert (verdict.outcome, verdict.detail) == (Outcome.OK, "")
    assert set(verdict.errors) == {"normal", "constant", "one-hot", "large"}
    if n > 2:  # else rows of one element are among them, which are only scaled
        assert verdict.errors["normal"] == pytest.approx(ONE_ROUNDING[dtype], rel=0.05)


@given(st.sampled_from([problem for problem in ALL_PROBLEMS if problem.pitched]))
def test_pitched_rows_are_verified_in_every_arrangement(problem: Problem) -> None:
    from hadagen.measure.verify import arrangements

    n, vector = problem.n, 16 // problem.dtype.bytes
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
@pytest.mark.parametrize("pitched", [False, True], ids=["contiguous", "pitched"])
def test_a_wrong_kernel_is_found(fault: str, outcome: Outcome, says: str, pitched: bool) -> None:
    verdict = verify(StandIn(replace(PROBLEM, pitched=pitched), fault, replace(SPEC, persistent=True)))
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
    verdict = verify(StandIn(Problem(256, dtype, pitched=True), fault))
    assert verdict.outcome is Outcome.WRONG_ANSWER
    assert says in verdict.detail


def test_verification_goes_on_after_a_wrong_kernel() -> None:
    import torch

    from hadagen.measure.verify import Verifier

    verifier = Verifier(torch.device("cpu"), stream=0)
    outcomes = [verifier.check(StandIn(PROBLEM, fault), PROBLEM).outcome for fault in ("", "scales wrongly", "")]
    assert outcomes == [Outcome.OK, Outcome.WRONG_ANSWER, Outcome.OK]


@given(
    n=st.integers(1, 15).map(lambda k: 1 << k),
    tile_rows=st.integers(0, 8).map(lambda k: 1 << k),
    cluster=st.sampled_from([1, 2, 4, 8]),
    resident=st.integers(1, 500),
    persistent=st.booleans(),
)
def test_row_counts(n: int, tile_rows: int, cluster: int, resident: int, persistent: bool) -> None:
    from hadagen.measure.verify import row_counts

    spec = LaunchSpec(128, cluster, 0, n * tile_rows, persistent)
    counts = row_counts(spec, n, resident * cluster)
    assert counts.few == (1, tile_rows + 1)
    assert counts.looped >= counts.base > 2 * tile_rows
    assert all(rows % tile_rows != 0 or tile_rows == 1 for rows in (counts.base, counts.looped))
    tiles = -(-counts.looped // tile_rows)
    blocks = spec.grid(counts.looped * n, resident * cluster)
    assert not persistent or tiles > 2 * (blocks // cluster)


# ---- the worker and its runner -------------------------------------------------------------------------------------
class FakeService:
    """Does what the kernel's name says."""

    greeting = GPU

    def __init__(self, device_index: int, *_: object) -> None:
        if device_index == 7:
            raise DeviceError("CUDA device 7 does not exist")
        if device_index == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        self._usable = True

    def handle(self, request: Measure | Race) -> Any:
        if isinstance(request, Race):
            return [(1.0, 2.0) for _ in request.cells]
        entry = request.kernel.entry
        assert (request.kernel.source, request.kernel.ptx) == ("", b"")
        if entry == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif entry == "hang":
            time.sleep(1e6)
        elif entry in ("raise", "lose the device"):
            self._usable = entry == "raise"
            raise RuntimeError("an illegal address\nand a second line")
        elif entry == "wrong":
            return Answer(Outcome.WRONG_ANSWER, "relative error", {"normal": 1.0})
        timing = Timing(*CELL, us=float(len(request.limits_us) + 1), us_low=1.0, us_high=9.0, copy_us=1.0)
        return Answer(Outcome.OK, "", {"normal": 2e-4}, (timing,), seconds=0.1)

    def is_usable(self) -> bool:
        return self._usable


@pytest.fixture
def runner() -> Iterator[DeviceRunner]:
    with DeviceRunner(0, [kernel("copy")], timeout_s=10.0, make_service=FakeService) as device_runner:
        yield device_runner


def test_a_run_survives_every_failure(runner: DeviceRunner) -> None:
    runner._timeout_s = 3.0
    asked = candidates("ok", "crash", "ok", "raise", "lose the device", "wrong", "hang", "ok")
    answers = list(runner.run(asked))
    assert [candidate for candidate, _ in answers] == asked
    failed = Outcome.LAUNCH_FAILED
    expected = [Outcome.OK, failed, Outcome.OK, failed, failed, Outcome.WRONG_ANSWER, Outcome.TIMEOUT, Outcome.OK]
    trials = [trial for _, trial in answers]
    assert [trial.outcome for trial in trials] == expected
    assert trials[1].detail == f"the measuring process ended with signal {int(signal.SIGSEGV)}"
    assert trials[3].detail == trials[4].detail == "an illegal address"
    assert all(trial.provenance is Provenance.MEASURED for trial in trials)
    assert all(trial.kernel == candidate.kernel for candidate, trial in answers)
    assert all(trial.environment == replace(GPU, nvcc="13.0") for trial in trials)


def test_limits_come_from_the_best_so_far(runner: DeviceRunner) -> None:
    times = [trial.timings[0].us for _, trial in runner.run(candidates("ok", "ok", "ok"))]
    assert times == [1.0, 2.0, 2.0]  # the fake answers with one more than the number of limits it was given


def test_trials_are_yielded_one_ahead(runner: DeviceRunner) -> None:
    drawn: list[int] = []

    def lazily() -> Iterator[Candidate]:
        for i, candidate in enumerate(candidates("ok", "ok", "ok")):
            drawn.append(i)
            yield candidate

    seen = [list(drawn) for _ in runner.run(lazily())]
    assert seen == [[0, 1], [0, 1, 2], [0, 1, 2]]


def test_leaving_a_run_early_does_not_mix_up_answers(runner: DeviceRunner) -> None:
    for _, trial in runner.run(candidates("ok", "wrong", "ok")):
        assert trial.outcome is Outcome.OK
        break
    assert [trial.outcome for _, trial in runner.run(candidates("ok"))] == [Outcome.OK]


def test_a_worker_that_died_idle_is_replaced(runner: DeviceRunner) -> None:
    assert runner.environment == GPU
    runner._worker._process.kill()
    runner._worker._process.join()
    assert [trial.outcome for _, trial in runner.run(candidates("ok"))] == [Outcome.OK]


def test_race(runner: DeviceRunner) -> None:
    a, b = candidates("ok", "ok")
    assert runner.race(a, b, [CELL, CELL]) == [(1.0, 2.0), (1.0, 2.0)]
    with pytest.raises(UsageError, match="give two of one problem"):
        runner.race(a, replace(b, problem=Problem(512, DType.FLOAT16)), [CELL])


@pytest.mark.parametrize(("device", "reason"), [(7, "CUDA device 7 does not exist"), (8, "signal 9")])
def test_a_worker_that_cannot_start_is_one_sentence(device: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadagen.measure.worker._START_PAUSE_S", 0.0)
    with (
        DeviceRunner(device, [kernel("copy")], make_service=FakeService) as device_runner,
        pytest.raises(DeviceError, match=reason) as caught,
    ):
        _ = device_runner.environment
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_wrong_use_of_a_runner() -> None:
    with pytest.raises(UsageError, match="copy_sources"):
        DeviceRunner(0, [])


def test_a_worker_ends_with_its_parent(tmp_path: Any) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_measure import PROBLEM, FakeService, Measure, kernel, replace\n"
        "from hadagen.measure.worker import Worker\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(FakeService, (0,))\n"
        "    worker.start()\n"
        "    worker.send(Measure(PROBLEM, replace(kernel('hang'), source='', ptx=b''), {}))\n"
        "    print(worker._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(200):
        if not is_running(pid):
            break
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- replay --------------------------------------------------------------------------------------------------------
def trial(number: int, us: float, gpu: str = "Stand-in") -> Trial:
    timing = Timing(*CELL, us, us, us, 1.0)
    environment = Environment(gpu=gpu)
    return Trial(
        PROBLEM, "sm90", {"a": 1, "number": number}, Outcome.OK, Provenance.MEASURED, kernel(), timings=(timing,),
        environment=environment,
    )  # fmt: skip


def test_replay_gives_back_what_was_recorded() -> None:
    recorded = [trial(0, 1.0), trial(1, 2.0), trial(0, 3.0)]
    replayed = ReplayRunner(recorded)
    asked = [Candidate(PROBLEM, {"number": number, "a": 1}) for number in (1, 0, 1)]
    assert list(replayed.run(asked)) == [(asked[0], recorded[1]), (asked[1], recorded[2]), (asked[2], recorded[1])]
    assert replayed.environment.gpu == "Stand-in"


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(PROBLEM, {"a": 1, "number": 5}),
        Candidate(PROBLEM, {}),
        Candidate(replace(PROBLEM, numerics=Numerics.FAST), {"a": 1, "number": 0}),
    ],
)
def test_replay_calls_the_unknown_illegal(candidate: Candidate) -> None:
    ((_, answer),) = ReplayRunner([trial(0, 1.0)]).run([candidate])
    assert (answer.outcome, answer.kernel, answer.timings) == (Outcome.ILLEGAL, None, ())
    assert (answer.problem, answer.knobs) == (candidate.problem, candidate.knobs)


def test_replay_refuses_nothing_and_mixtures() -> None:
    with pytest.raises(UsageError, match="no recorded trials"):
        ReplayRunner([])
    with pytest.raises(UsageError, match="several devices"):
        ReplayRunner([trial(0, 1.0), trial(1, 1.0, gpu="Other")])


def test_importing_measure_imports_no_pytorch() -> None:
    code = "import sys, hadagen.measure; print([m for m in ('torch', 'cuda.bindings.driver') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
