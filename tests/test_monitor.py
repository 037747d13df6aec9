"""What disturbs timings, in states that NVML would tell of: a made-up GPU on a clock of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_nvml import US, FakeGpu, SilentGpu
from sample_trials import H200

from hadagen import libnvml
from hadagen.driver import DriverError
from hadagen.measure import service
from hadagen.measure.messages import Answer, Compare, Comparison, Look, Measure, Race
from hadagen.measure.monitor import Monitor
from hadagen.trial import Disturbed, Outcome

GPU = replace(H200, power_limit_watts=700)
GIB = 1 << 30
THEM = 12


def watching(gpu: FakeGpu | None, listed: dict[int, int] | None = None, **since: Any) -> Monitor:
    """A monitor of a GPU whose process list is `listed` once we have a context, and of which this is so since."""
    clocks = {"clock": gpu.clock, "sleep": gpu.sleep} if gpu else {}
    monitor = Monitor(gpu, GPU, **clocks)
    if gpu:
        gpu.listed = {US: GIB} if listed is None else listed
        monitor.begin()
        for name, value in since.items():
            setattr(gpu, name, value)
    return monitor


def reason(found: Disturbed | None) -> str:
    return found.reason if found else ""


def test_an_idle_gpu_costs_a_few_questions_and_no_pause() -> None:
    gpu = FakeGpu()
    monitor = watching(gpu)
    gpu.asked, gpu.percent = 0, 100  # which is our own work
    assert monitor.look() is None
    assert monitor.look(after=True) is None
    assert gpu.now == 0.0
    assert gpu.asked <= 24


@pytest.mark.parametrize("gpu", [None, SilentGpu()])
def test_without_answers_nothing_disturbs(gpu: FakeGpu | None) -> None:
    monitor = watching(gpu)
    assert (monitor.look(), monitor.look(after=True), monitor.crowded()) == (None, None, None)


# ---- other processes -------------------------------------------------------------------------------------------------
def test_a_process_that_runs_is_named() -> None:
    gpu = FakeGpu(names={THEM: "python3"})
    monitor = watching(gpu, listed={US: GIB, THEM: GIB}, ran={US: 60, THEM: 97})
    assert monitor.look() == Disturbed(
        "process 12 (python3) uses the GPU, 97 % of the time",
        "stop it, or choose another GPU with --device or CUDA_VISIBLE_DEVICES",
    )
    gpu.ran = {US: 99, THEM: 4}  # as a desktop does
    assert monitor.look() is None
    gpu.ran = {}
    assert monitor.look() is None
    assert gpu.now == 0.0


def test_many_processes_are_named_in_short() -> None:
    others = dict.fromkeys(range(20, 25), 50)
    monitor = watching(FakeGpu(), listed={US: GIB, **others}, ran={US: 60, **others})
    assert reason(monitor.look()) == "processes 20, 21, 22 and 2 more use the GPU, 50 % of the time"


def test_a_process_that_only_holds_memory_is_asked_about_now_and_then() -> None:
    """In a container, where NVML does not name us among those that ran."""
    gpu = FakeGpu(later=[(0.5, {"percent": 0})])
    monitor = watching(gpu, listed={US: GIB, THEM: GIB}, ran={4711: 80}, percent=90)  # which was our own work
    assert monitor.look() is None
    assert gpu.now == pytest.approx(0.5)
    gpu.percent = 100  # ours again
    assert monitor.look() is None
    assert gpu.now == pytest.approx(0.5)
    gpu.now, gpu.later = 10.0, [(11.0, {"percent": 0})]
    assert monitor.look() is None
    assert 11.0 < gpu.now < 11.2
    gpu.now, gpu.percent = 20.0, 96  # and now theirs
    assert reason(monitor.look()) == "process 12 or another process uses the GPU, 96 % of the time"
    assert monitor.look()  # each time while it runs


def test_a_process_that_no_list_has_shows_by_its_memory_and_its_work() -> None:
    gpu = FakeGpu()
    monitor = watching(gpu, used=2 * GIB, percent=97)
    assert reason(monitor.look()) == "another process uses the GPU, 97 % of the time"
    assert 1.0 < gpu.now < 2.0
    assert monitor.look()  # at once, and each time while it runs
    gpu.percent = 0
    assert monitor.look() is None
    now = gpu.now
    gpu.percent = 100  # ours
    assert monitor.look() is None
    assert gpu.now == now


def test_what_runs_before_we_begin_is_no_work_of_ours() -> None:
    gpu = FakeGpu(percent=97)
    monitor = watching(gpu)
    assert reason(monitor.look()) == "another process uses the GPU, 97 % of the time"
    ended = FakeGpu(percent=97, later=[(0.2, {"percent": 0})])  # such as the process before this one
    assert watching(ended).look() is None


def test_memory_that_we_asked_for_is_nobody_elses() -> None:
    gpu, ours = FakeGpu(percent=97), [0]
    gpu.percent = 0
    monitor = Monitor(gpu, GPU, lambda: ours[0], gpu.clock, gpu.sleep)
    monitor.begin()
    ours[0] = 50 * GIB
    gpu.used, gpu.percent = 51 * GIB, 100
    assert monitor.look() is None
    assert gpu.now == 0.0


def test_in_a_container_we_are_the_process_that_came() -> None:
    gpu = FakeGpu(listed={THEM: GIB}, percent=0)
    monitor = watching(gpu, listed={THEM: GIB, 4711: GIB}, ran={4711: 90})
    assert monitor.look() is None
    assert gpu.now == 0.0
    gpu.ran = {4711: 90, THEM: 30}
    assert reason(monitor.look()) == "process 12 uses the GPU, 30 % of the time"


def test_who_has_the_memory_is_named_where_it_runs_out() -> None:
    gpu = FakeGpu()
    monitor = watching(gpu)
    assert monitor.crowded() is None
    gpu.listed = {US: GIB, THEM: 70 * GIB}
    assert reason(monitor.crowded()) == "the memory of the GPU is full, of which process 12 has 70.0 GiB"
    gpu.listed, gpu.used = {}, 71 * GIB
    assert reason(monitor.crowded()) == "the memory of the GPU is full, of which another process has 70.0 GiB"


# ---- heat, power and clocks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("bits", "why"),
    [
        (libnvml.HW_THERMAL_SLOWDOWN | libnvml.HW_SLOWDOWN, "it is too hot (hardware thermal slowdown)"),
        (libnvml.SW_THERMAL_SLOWDOWN | libnvml.SW_POWER_CAP, "it is too hot (software thermal slowdown)"),
        (libnvml.HW_POWER_BRAKE_SLOWDOWN, "its power supply holds it back (hardware power brake)"),
        (libnvml.HW_SLOWDOWN, "the hardware holds it back (hardware slowdown)"),
    ],
)
def test_a_gpu_that_is_slowed_down_is_noticed_until_it_recovers(bits: int, why: str) -> None:
    gpu = FakeGpu(later=[(10.0, {"reasons": 0})])
    monitor = watching(gpu, reasons=bits)
    for after in (False, True):
        found = monitor.look(after)
        assert found
        assert found.reason == f"the GPU is slowed down: {why}"
        assert found.advice.startswith("let it cool down")
    gpu.sleep(10.0)
    assert monitor.look() is None


def test_a_bit_that_is_set_for_a_moment_disturbs_nothing() -> None:
    gpu = FakeGpu(later=[(0.05, {"reasons": 0})])
    assert watching(gpu, reasons=libnvml.HW_SLOWDOWN).look() is None


@pytest.mark.parametrize("bits", [libnvml.SW_POWER_CAP, libnvml.CLOCKS_SETTING, libnvml.SYNC_BOOST, libnvml.GPU_IDLE])
def test_reasons_that_a_gpu_has_in_normal_use_disturb_nothing(bits: int) -> None:
    monitor = watching(FakeGpu(), reasons=bits)
    assert (monitor.look(), monitor.look(after=True)) == (None, None)


def test_clocks_that_fall_for_no_known_reason_are_noticed() -> None:
    gpu = FakeGpu()
    monitor = watching(gpu, mhz=1200)
    assert monitor.look() is None  # it may have been idle
    assert reason(monitor.look(after=True)) == "the GPU is slowed down: its clock fell from 1980 to 1200 MHz"
    for reasons in (libnvml.GPU_IDLE, libnvml.SW_POWER_CAP):
        gpu.reasons = reasons
        assert monitor.look(after=True) is None
    assert watching(FakeGpu(mhz=1200)).look(after=True) is None  # locked before, for all that is timed


def test_a_gpu_that_becomes_another_class_is_noticed() -> None:
    gpu = FakeGpu()
    monitor = watching(gpu, limit=450)
    found = monitor.look()
    assert found
    assert found.reason == "its settings were changed, and NVIDIA H200 became NVIDIA H200, 450 W"


# ---- what the measuring process answers ------------------------------------------------------------------------------
class Yard:
    forgotten = 0

    def forget(self) -> None:
        self.forgotten += 1


def serving(gpu: FakeGpu, **work: Any) -> Any:
    """A service that does this work, on a GPU that is told of."""
    made = service.DeviceService.__new__(service.DeviceService)
    made._monitor, made._yardstick = watching(gpu), Yard()
    for name, does in work.items():
        setattr(made, name, does)
    return made


HOT = {"reasons": libnvml.HW_THERMAL_SLOWDOWN}
MEASURE, RACE = Measure.__new__(Measure), Race.__new__(Race)


def test_times_of_a_disturbed_gpu_are_no_answer() -> None:
    gpu = FakeGpu()
    outcomes = iter([Outcome.OK, Outcome.OK, Outcome.WRONG_ANSWER])

    def measure(request: Measure) -> Answer:
        gpu.sleep(1.0)
        return Answer(next(outcomes), "")

    made = serving(gpu, _measure=measure, _race=lambda request: [(1.0, 2.0)])
    assert made.handle(MEASURE).outcome is Outcome.OK
    assert (made.handle(RACE), made.handle(Look()), made._yardstick.forgotten) == ([(1.0, 2.0)], None, 0)
    gpu.later = [(gpu.now + 0.5, HOT)]
    assert "too hot" in made.handle(MEASURE).reason
    assert made._yardstick.forgotten == 1  # for the copies were timed then, too
    assert [type(made.handle(each)) for each in (MEASURE, RACE, Look())] == [Disturbed] * 3  # and nothing is timed
    gpu.reasons, gpu.later = 0, [(gpu.now + 0.5, HOT)]
    assert made.handle(MEASURE).outcome is Outcome.WRONG_ANSWER  # which heat does not change


def test_a_comparison_says_what_disturbed_it() -> None:
    gpu = FakeGpu()

    class Comparing:
        def compare(self, request: Compare) -> Comparison:
            gpu.sleep(1.0)
            return Comparison((), {}, ())

    made = serving(gpu, _comparer=Comparing())
    request = Compare((), ())
    assert made.handle(request).disturbed is None
    gpu.later = [(gpu.now + 0.5, HOT)]
    assert "too hot" in reason(made.handle(request).disturbed)


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("no room"), DriverError("CUDA_ERROR_OUT_OF_MEMORY", "no room")]
)
def test_memory_that_others_took_is_no_fault_of_a_kernel(error: Exception) -> None:
    gpu = FakeGpu()

    def measure(request: Measure) -> Answer:
        raise error

    made = serving(gpu, _measure=measure)
    with pytest.raises(type(error), match="no room"):
        made.handle(MEASURE)
    gpu.listed, gpu.ran = {US: GIB, THEM: 70 * GIB}, {US: 1}
    assert reason(made.handle(MEASURE)) == "the memory of the GPU is full, of which process 12 has 70.0 GiB"
