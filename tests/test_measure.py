"""Measuring without a GPU: the cells, the copy kernels, verification on a stand-in kernel, the worker, replay."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadagen.bits import decode, encode
from hadagen.errors import DeviceError, UsageError
from hadagen.launch import LaunchSpec
from hadagen.measure import Candidate, Cell, DeviceRunner, ReplayRunner, all_cells, copy_sources
from hadagen.measure.cells import EVICTION, probe_cells
from hadagen.measure.messages import Answer, Measure, Race
from hadagen.problem import DType, Numerics, Problem
from hadagen.reference import hadamard
from hadagen.trial import ELEMENT_BUCKETS, Cache, Destination, Environment, Kernel, Outcome, Provenance, Timing, Trial

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
def test_cells_of_an_h100() -> None:
    cells = all_cells(H100_L2)
    assert len(set(cells)) == len(cells) == 51
    cold = {cell.elements for cell in cells if cell.cache is Cache.COLD}
    assert cold == {e for e in ELEMENT_BUCKETS if e >= 1 << 16}
    hot = [cell for cell in cells if cell.cache is Cache.HOT]
    assert max(cell.elements for cell in hot if cell.destination is Destination.IN_PLACE) == 1 << 25
    assert max(cell.elements for cell in hot if cell.destination is Destination.OUT_OF_PLACE) == 1 << 24


@given(st.sampled_from(all_cells(H100_L2)), st.integers(20, 28).map(lambda k: 1 << k))
def test_launches_of_a_cell(cell: Cell, l2_bytes: int) -> None:
    assert 1 <= cell.launches(l2_bytes) <= 96
    rotation = cell.slots(l2_bytes) * cell.footprint
    if cell.cache is Cache.HOT:
        assert rotation == cell.footprint
        assert not cell.needs_flush(l2_bytes)
    else:  # by the other slots or by a flush, a slot is always evicted before it is touched again
        assert cell.slots(l2_bytes) == cell.launches(l2_bytes)
        assert cell.needs_flush(l2_bytes) == (rotation < EVICTION * l2_bytes)


def test_probe_cells() -> None:
    assert probe_cells(all_cells(H100_L2), H100_L2) == (
        Cell(1 << 13, Destination.IN_PLACE, Cache.HOT),
        Cell(1 << 23, Destination.IN_PLACE, Cache.HOT),
        Cell(1 << 28, Destination.IN_PLACE, Cache.COLD),
    )
    assert probe_cells([CELL], H100_L2) == (CELL,)
    assert probe_cells([], H100_L2) == ()


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


# ---- verification --------------------------------------------------------------------------------------------------
def array_at(address: int, elements: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16)), (elements,))


@dataclass
class StandIn:
    """A correct kernel that runs on the CPU, and ways to break it."""

    problem: Problem
    fault: str = ""
    spec: LaunchSpec = SPEC
    resident_blocks: int = 4
    calls: int = 0

    def launch(self, stream: int, x: int, y: int, elements: int, scale: float) -> None:
        self.calls += 1
        n, dtype, fault = self.problem.n, self.problem.dtype, self.fault
        rows = decode(dtype, array_at(x, elements)).reshape(-1, n)
        bits = encode(dtype, hadamard(rows, scale)).reshape(-1)
        out = array_at(y, elements)
        tail = elements % self.spec.tile_elements
        if fault == "swaps two elements":
            bits[[0, 1]] = bits[[1, 0]]
            bits[:2] ^= 0x4000
        elif fault == "leaves out the ragged tile" and tail:
            bits[-tail:] = out[-tail:]
        elif fault == "scales wrongly":
            bits = encode(dtype, hadamard(rows, scale * 1.001)).reshape(-1)
        elif fault == "overflows" and decode(dtype, bits).max() > 1000.0:
            bits[5] = encode(dtype, np.array(np.inf))
        elif fault == "drops later tiles of a block":
            done = self.resident_blocks * self.spec.tile_elements
            bits[done:] = out[done:]
        elif fault == "wrong for a single row" and elements == n:
            bits[0] ^= 1
        elif fault == "differs every time":
            bits[self.calls % elements] ^= 1
        elif fault == "reads what it wrote" and x == y:
            bits = encode(dtype, hadamard(decode(dtype, bits).reshape(-1, n), scale)).reshape(-1)
        out[:] = bits
        if fault == "writes behind":
            array_at(y, elements + 1)[elements] = 0
        elif fault == "writes before":
            array_at(y - 2, 1)[0] = 0
        elif fault == "changes its input" and x != y:
            array_at(x, 1)[0] ^= 1


def verify(stand_in: StandIn) -> Any:
    import torch

    from hadagen.measure.verify import Verifier

    return Verifier(torch.device("cpu"), stream=0).check(stand_in, stand_in.problem)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("n", [2, 256, 32768])
def test_a_correct_kernel_passes(n: int, dtype: DType) -> None:
    spec = replace(SPEC, tile_elements=max(n, 4096), persistent=True)
    verdict = verify(StandIn(Problem(n, dtype), spec=spec))
    assert (verdict.outcome, verdict.detail) == (Outcome.OK, "")
    assert set(verdict.errors) == {"normal", "constant", "one-hot", "large"}
    one_rounding = 2.08e-4 if dtype is DType.FLOAT16 else 1.66e-3
    assert verdict.errors["normal"] == pytest.approx(one_rounding, rel=0.03)


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
def test_a_wrong_kernel_is_found(fault: str, outcome: Outcome, says: str) -> None:
    verdict = verify(StandIn(PROBLEM, fault, replace(SPEC, persistent=True)))
    assert verdict.outcome is outcome
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
