"""What runs trials: a worker process and its runner, and the replay of what was recorded."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from measure_sample import CELL, H100_L2, PROBLEM, SPEC
from running import is_running, wait_until

from hadagen.errors import DeviceError, UsageError
from hadagen.measure import DeviceRunner, Variant
from hadagen.measure.messages import Answer, Measure, Race
from hadagen.measure.watch import Watch
from hadagen.problem.problem import DType, Problem
from hadagen.problem.trial import (
    Environment,
    Kernel,
    Outcome,
    Provenance,
    Timing,
)

GPU = Environment(gpu="Stand-in", l2_bytes=H100_L2, sms=132)


def kernel(entry: str = "ok", problem: Problem = PROBLEM) -> Kernel:
    return Kernel(entry, entry, "sm90", "source", b"cubin", b"ptx", SPEC, 32, 0, "13.0")


def variants(*entries: str) -> list[Variant]:
    return [Variant(PROBLEM, {"number": i}, kernel(entry)) for i, entry in enumerate(entries)]


class FakeService:
    """Does what the kernel's name says."""

    greeting = GPU

    def __init__(self, watch: Watch, device_index: int, *_: object) -> None:
        self._watch = watch
        self._marker = Path(os.environ.get("HADAGEN_TEST_MARKER", ""))
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
        elif entry == "hang on the device":
            with self._watch.on():
                time.sleep(1e6)
        elif entry == "slow":
            with self._watch.on():
                for _ in range(26):
                    time.sleep(0.05)
                    self._watch.beat()
            time.sleep(1.1)  # the host may be silent
        elif entry == "is killed once":
            if not self._marker.exists():
                self._marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif entry == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
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
    asked = variants("ok", "crash", "ok", "raise", "lose the device", "wrong", "hang", "ok")
    answers = list(runner.run(asked))
    assert [variant for variant, _ in answers] == asked
    failed = Outcome.LAUNCH_FAILED
    expected = [Outcome.OK, failed, Outcome.OK, failed, failed, Outcome.WRONG_ANSWER, Outcome.TIMEOUT, Outcome.OK]
    trials = [trial for _, trial in answers]
    assert [trial.outcome for trial in trials] == expected
    assert trials[1].detail == f"the measuring process ended with signal {int(signal.SIGSEGV)}"
    assert trials[3].detail == trials[4].detail == "an illegal address"
    assert all(trial.provenance is Provenance.MEASURED for trial in trials)
    assert all(trial.kernel == variant.kernel for variant, trial in answers)
    assert all(trial.environment == replace(GPU, nvcc="13.0") for trial in trials)


def test_a_hang_costs_as_long_as_a_device_may_be_silent_and_slow_kernels_are_not_taken_for_one() -> None:
    with DeviceRunner(0, [kernel("copy")], silence_s=1.0, make_service=FakeService) as runner:
        runner._start()
        started = time.monotonic()
        ((_, slow), (_, hung), (_, after)) = runner.run(variants("slow", "hang on the device", "ok"))
    assert [slow.outcome, hung.outcome, after.outcome] == [Outcome.OK, Outcome.TIMEOUT, Outcome.OK]
    assert hung.detail == "the device finished nothing within 1 s"
    assert time.monotonic() - started < runner._timeout_s  # which a hang costs that nobody watches


def test_what_another_program_kills_is_measured_again(
    runner: DeviceRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADAGEN_TEST_MARKER", str(tmp_path / "was killed"))
    ((_, once), (_, again), (_, after)) = runner.run(variants("is killed once", "is killed", "ok"))
    assert [once.outcome, again.outcome, after.outcome] == [Outcome.OK, Outcome.LAUNCH_FAILED, Outcome.OK]
    assert again.detail == "the measuring process ended with signal 9"
    (tmp_path / "was killed").unlink()
    a, b = variants("ok", "ok")
    runner._worker._process.kill()
    assert runner.race(a, b, [CELL]) == [(1.0, 2.0)]


def test_limits_come_from_the_best_so_far(runner: DeviceRunner) -> None:
    times = [trial.timings[0].us for _, trial in runner.run(variants("ok", "ok", "ok"))]
    assert times == [1.0, 2.0, 2.0]  # the fake answers with one more than the number of limits it was given


def test_trials_are_yielded_one_ahead(runner: DeviceRunner) -> None:
    drawn: list[int] = []

    def lazily() -> Iterator[Variant]:
        for i, variant in enumerate(variants("ok", "ok", "ok")):
            drawn.append(i)
            yield variant

    assert [list(drawn) for _ in runner.run(lazily())] == [[0, 1], [0, 1, 2], [0, 1, 2]]


def test_leaving_a_run_early_does_not_mix_up_answers(runner: DeviceRunner) -> None:
    for _, trial in runner.run(variants("ok", "wrong", "ok")):
        assert trial.outcome is Outcome.OK
        break
    assert [trial.outcome for _, trial in runner.run(variants("ok"))] == [Outcome.OK]


@pytest.mark.parametrize("at", ["_worker.receive", "_worker._connection.poll"])
def test_an_interrupted_race_does_not_mix_up_answers(
    runner: DeviceRunner, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    assert runner.environment == GPU
    holder, _, name = at.rpartition(".")
    with monkeypatch.context() as patch:
        patch.setattr(attrgetter(holder)(runner), name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.race(*variants("ok", "ok"), [CELL])
    assert [trial.outcome for _, trial in runner.run(variants("ok"))] == [Outcome.OK]


def test_a_worker_that_died_idle_is_replaced(runner: DeviceRunner) -> None:
    assert runner.environment == GPU
    runner._worker._process.kill()
    runner._worker._process.wait()
    assert [trial.outcome for _, trial in runner.run(variants("ok"))] == [Outcome.OK]


def test_a_runner_races_two_of_one_problem(runner: DeviceRunner) -> None:
    a, b = variants("ok", "ok")
    assert runner.race(a, b, [CELL, CELL]) == [(1.0, 2.0), (1.0, 2.0)]
    with pytest.raises(UsageError, match="give two of one problem"):
        runner.race(a, replace(b, problem=Problem.of(512, DType.FLOAT16)), [CELL])


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
        "from test_runners import PROBLEM, FakeService, Measure, kernel, replace\n"
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
    wait_until(lambda: not is_running(pid))


def test_a_worker_runs_nothing_of_the_directory_that_it_starts_in(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, runner: DeviceRunner
) -> None:
    (tmp_path / "socket.py").write_text("raise SystemExit('this is no socket')")
    monkeypatch.chdir(tmp_path)
    assert [trial.outcome for _, trial in runner.run(variants("ok"))] == [Outcome.OK]


def test_a_worker_does_not_run_the_script_of_its_parent_again(tmp_path: Any) -> None:
    """Many a training script does its work wherever it is imported."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_runners import DeviceRunner, FakeService, kernel\n"
        "with DeviceRunner(0, [kernel('copy')], make_service=FakeService) as runner:\n"
        "    print(runner.environment.gpu)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (f"{GPU.gpu}\n", 0), done.stderr


def test_a_deadline_ends_a_run_and_what_goes_on(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.environment == GPU
    drawn: list[Variant] = []

    def draw() -> Iterator[Variant]:
        for variant in variants("ok", "hang", "ok"):
            drawn.append(variant)
            if len(drawn) == 2:
                runner._deadline = time.monotonic()  # it comes while the second hangs
            yield variant

    assert [trial.outcome for _, trial in runner.run(draw())] == [Outcome.OK]
    assert not runner._worker.is_running


def test_a_deadline_ends_a_start() -> None:
    with (
        DeviceRunner(0, [kernel("copy")], deadline=time.monotonic(), make_service=FakeService) as late,
        pytest.raises(DeviceError, match="did not start \\(no answer within 0 s"),
    ):
        _ = late.environment
    assert not late._worker.is_running


def test_importing_measure_imports_no_pytorch() -> None:
    code = "import sys, hadagen.measure; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
