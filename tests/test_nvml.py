"""What NVML tells of a GPU: its class, and what disturbs timings."""

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from fake_nvml import US, FakeGpu, SilentGpu
from sample_bundle import write_trials
from sample_trials import H200, PROBLEM, make_trial
from test_driver import compiled

import hadagen
from hadagen.errors import DeviceError
from hadagen.gpu import gpu_class, nvml
from hadagen.gpu.driver import DriverError
from hadagen.gpu.gpu_class import class_name, class_of
from hadagen.gpu.nvml import NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM
from hadagen.measure import environment, service
from hadagen.measure.messages import Answer, Compare, Comparison, Look, Measure, Race
from hadagen.measure.monitor import Monitor
from hadagen.problem.target import model_of
from hadagen.problem.trial import Disturbed, Outcome
from hadagen.runtime.choose import bundles, device
from hadagen.runtime.choose.device import Device
from hadagen.runtime.choose.entries import Match
from hadagen.tuning_db.bundle import Bundle
from hadagen.tuning_db.store import Store

GIB = 1 << 30
MODEL = "NVIDIA H200"
SLOW = {NVML_CLOCK_GRAPHICS: 1275}


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (None, MODEL),
        (FakeGpu(), MODEL),
        (SilentGpu(limit=450), MODEL),
        (FakeGpu(limit=450), "NVIDIA H200, 450 W"),
        (FakeGpu(limit=750), MODEL),
        (FakeGpu(limit=450, default_limit=None), MODEL),
        (FakeGpu(application_clocks={NVML_CLOCK_GRAPHICS: 1200}), "NVIDIA H200, 1200 MHz"),
        (FakeGpu(application_clocks={NVML_CLOCK_MEM: 1593}), "NVIDIA H200, 1593 MHz memory"),
        (FakeGpu(default_clocks=SLOW), MODEL),  # from which some GPUs go faster by themselves
        (FakeGpu(default_clocks=SLOW, application_clocks={NVML_CLOCK_GRAPHICS: 1980}), MODEL),  # the maximum
        (FakeGpu(default_clocks=SLOW, application_clocks={NVML_CLOCK_GRAPHICS: 1410}), "NVIDIA H200, 1410 MHz"),
        (FakeGpu(limit=450, application_clocks={NVML_CLOCK_GRAPHICS: 1200}), "NVIDIA H200, 450 W, 1200 MHz"),
    ],
)
def test_a_class_is_named_by_what_differs_from_the_defaults(gpu: FakeGpu | None, name: str) -> None:
    assert class_name(MODEL, 141 * GIB, gpu) == name
    assert model_of(name) == MODEL


@pytest.mark.parametrize(
    ("model", "size", "name"),
    [
        ("NVIDIA GeForce RTX 3060", int(11.76 * GIB), "NVIDIA GeForce RTX 3060"),
        ("NVIDIA GeForce RTX 3060", int(7.7 * GIB), "NVIDIA GeForce RTX 3060, 8 GiB"),
        ("NVIDIA GeForce RTX 3060", 0, "NVIDIA GeForce RTX 3060"),
        ("NVIDIA GeForce RTX 3060 Ti", int(7.7 * GIB), "NVIDIA GeForce RTX 3060 Ti"),
    ],
)
def test_memory_is_named_where_the_name_alone_is_ambiguous(model: str, size: int, name: str) -> None:
    assert class_name(model, size, None) == name


# ---- NVML, through the package of NVIDIA over a library that stands in -----------------------------------------------
STAND_IN = """
#include <cstring>
using Handle = void*;
struct Process { unsigned pid; unsigned long long memory; unsigned part, slice; };
struct Sample { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; };
const Handle OWNER = (Handle)0xfedcba9876543210, PART = (Handle)0x7edcba9876543210;
extern "C" {
int code;
static int fill(void* array, const void* all, unsigned size, unsigned* count, unsigned many) {
    unsigned room = *count;
    *count = many;
    if (room < many) return 7;
    memcpy(array, all, size * many);
    return code; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlSystemGetDriverVersion(char* text, unsigned room) { strncpy(text, "580.82.07", room); return code; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, Handle* found) {
    *found = OWNER; return strcmp(id, "0000:18:00.0") ? 6 : 0; }
int nvmlDeviceGetHandleByUUID(const char* id, Handle* found) { *found = PART; return strcmp(id, "MIG-1") ? 6 : 0; }
int nvmlDeviceGetEnforcedPowerLimit(Handle gpu, unsigned* limit) { *limit = 449900; return gpu == OWNER ? code : 2; }
int nvmlDeviceGetPowerManagementDefaultLimit(Handle gpu, unsigned* limit) {
    *limit = 700000; return gpu == OWNER ? code : 2; }
int nvmlDeviceGetApplicationsClock(Handle gpu, int kind, unsigned* clock) {
    *clock = 1200 + kind; return gpu == OWNER ? code : 2; }
int nvmlDeviceGetDefaultApplicationsClock(Handle gpu, int kind, unsigned* clock) {
    *clock = 1900 + kind; return gpu == OWNER ? code : 2; }
int nvmlDeviceGetMaxClockInfo(Handle gpu, int kind, unsigned* clock) {
    *clock = 1980 + kind; return gpu == OWNER ? code : 2; }
int nvmlDeviceGetClockInfo(Handle gpu, int kind, unsigned* clock) {
    *clock = 345 + kind; return gpu == OWNER ? code : 2; }
int nvmlDeviceGetCurrentClocksEventReasons(Handle gpu, unsigned long long* reasons) {
    *reasons = 0x44; return gpu == OWNER ? code : 2; }
int nvmlDeviceGetUtilizationRates(Handle gpu, unsigned* rates) {
    rates[0] = 97; rates[1] = 12; return gpu == OWNER ? code : 3; }
int nvmlDeviceGetMemoryInfo(Handle gpu, unsigned long long* memory) {
    memory[0] = 100ull << 32; memory[1] = 60ull << 32; memory[2] = 40ull << 32; return code; }
int nvmlDeviceGetComputeRunningProcesses_v3(Handle gpu, unsigned* count, Process* found) {
    static Process all[100];
    for (unsigned i = 0; i < 100; ++i) all[i] = {i + 1, (i + 1ull) << 32, 7, 7};
    all[1].memory = ~0ull;
    return fill(found, all, sizeof(Process), count, gpu == OWNER ? 100 : 2); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle gpu, unsigned* count, Process* found) {
    const Process all[] = {{500, 5, 0, 0}};
    return fill(found, all, sizeof(Process), count, gpu == OWNER ? 1 : 0); }
int nvmlDeviceGetProcessUtilization(Handle gpu, Sample* found, unsigned* count, unsigned long long since) {
    const Sample all[] = {{1, 1000, 20, 0, 0, 0}, {1, 2000, 30, 0, 0, 0}, {2, 3000, 4000000, 0, 0, 0}, {3, 1500, 5, 0, 0, 0}};
    if (since >= 3000) return 6;
    return fill(found, all, sizeof(Sample), count, 4); }
int nvmlSystemGetProcessName(unsigned pid, char* name, unsigned room) {
    strncpy(name, "/usr/bin/python3 train.py", room); return pid == 12 ? code : 6; }
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"), "libnvml.so", STAND_IN, "-shared", "-fPIC")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], ctypes.CDLL]]:
    """Makes a library the one that the package of NVIDIA asks."""

    def opens(path: Path) -> ctypes.CDLL:
        library = ctypes.CDLL(str(path))
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        nvml.is_there.cache_clear()
        return library

    yield opens
    nvml.is_there.cache_clear()


@pytest.fixture
def library(stand_in: Path, opened: Callable[[Path], ctypes.CDLL]) -> ctypes.CDLL:
    found = opened(stand_in)
    ctypes.c_int.in_dll(found, "code").value = 0
    return found


def test_answers_are_those_of_nvml(library: ctypes.CDLL) -> None:
    gpu = nvml.find_gpu("0000:18:00.0", "MIG-2")
    assert (gpu.power_limit_watts(), gpu.default_power_limit_watts()) == (450, 700)
    for kind in (NVML_CLOCK_GRAPHICS, nvml.NVML_CLOCK_SM, NVML_CLOCK_MEM):
        assert gpu.application_clock_mhz(kind) == 1200 + kind
        assert gpu.default_application_clock_mhz(kind) == 1900 + kind
        assert gpu.max_clock_mhz(kind) == 1980 + kind
        assert gpu.clock_mhz(kind) == 345 + kind
    assert gpu.event_reasons() == nvml.HW_THERMAL_SLOWDOWN | nvml.SW_POWER_CAP
    assert (gpu.utilization(), gpu.memory_used()) == (97, 40 << 32)
    assert gpu.processes() == {pid: pid << 32 for pid in range(1, 101)} | {2: 0, 500: 5}
    assert gpu.process_utilization() == {1: 30, 3: 5}  # 2 had no percentage
    assert gpu.process_utilization() == {}  # since then none
    assert (gpu.process_name(12), gpu.process_name(13)) == ("python3", "")
    assert nvml.driver_version() == "580.82.07"


def test_a_part_of_a_gpu_has_its_own_processes_and_the_settings_of_the_whole(library: ctypes.CDLL) -> None:
    gpu = nvml.find_gpu("0000:18:00.0", "MIG-1")
    assert gpu.processes() == {1: 1 << 32, 2: 0}
    assert (gpu.power_limit_watts(), gpu.event_reasons(), gpu.utilization()) == (450, 0x44, None)


def test_a_machine_without_nvml(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(f"{name}.none"))
    assert (nvml.find_gpu("0000:18:00.0"), nvml.driver_version(), nvml.is_there()) == (None, "", False)


def test_what_nvml_refuses_or_lacks_is_not_known(
    library: ctypes.CDLL, opened: Callable[[Path], ctypes.CDLL], tmp_path: Path
) -> None:
    gpu = nvml.find_gpu("0000:18:00.0")
    ctypes.c_int.in_dll(library, "code").value = 3  # not supported
    answers = gpu.power_limit_watts(), gpu.clock_mhz(1), gpu.event_reasons(), gpu.utilization(), gpu.memory_used()
    assert {*answers, gpu.processes(), gpu.process_utilization()} == {None}
    assert (gpu.process_name(12), nvml.driver_version()) == ("", "")
    assert nvml.find_gpu("0000:19:00.0") is None
    older = re.sub(r"int nvmlDeviceGetEnforced.*\n", "", STAND_IN).replace("ClocksEvent", "ClocksThrottle")
    opened(compiled(tmp_path, "libolder.so", older.replace("train.py", "\\xff"), "-shared", "-fPIC"))
    gpu = nvml.find_gpu("0000:18:00.0")
    assert (gpu.power_limit_watts(), gpu.event_reasons(), gpu.process_name(12)) == (None, 0x44, "")


# ---- the class of a device, when tuning and when calling -------------------------------------------------------------
@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """CUDA device 0, an H200 with a lower power limit."""
    gpu = FakeGpu(limit=450)

    def name_of(text: Any, room: int, device: int) -> tuple[int]:
        text.value = MODEL.encode()
        return (0,)

    driver = SimpleNamespace(
        cuDeviceGetCount=lambda: (0, 1),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetAttribute=lambda which, device: (0, 9000),
        cuDeviceGetName=name_of,
        cuDeviceTotalMem=lambda device: (0, 141 * GIB),
        cuDriverGetVersion=lambda: (0, 13000),
    )
    for module in (environment, gpu_class):
        monkeypatch.setattr(module, "bindings", lambda: driver)
        monkeypatch.setattr(module, "nvml_gpu", lambda index: gpu)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: MODEL)
    class_of.cache_clear()
    return gpu


def test_tuner_and_calls_name_the_same_class(limited: FakeGpu) -> None:
    tuned = environment.device_environment(0)
    assert (tuned.gpu, tuned.power_limit_watts, tuned.memory_bytes) == ("NVIDIA H200, 450 W", 450, 141 * GIB)
    assert device.cuda_device(0) == Device("sm90", tuned.gpu)
    asked = limited.asked
    assert device.cuda_device(0) == Device("sm90", tuned.gpu)
    assert limited.asked == asked  # once in a process


def test_without_nvml_or_a_newer_driver_a_call_has_the_name_alone(
    limited: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise DeviceError("the NVIDIA driver is too old")

    monkeypatch.setattr(gpu_class, "nvml_gpu", lambda index: None)
    assert device.cuda_device(0) == Device("sm90", MODEL)
    class_of.cache_clear()
    monkeypatch.setattr(gpu_class, "bindings", refuses)
    assert device.cuda_device(0) == Device("sm90", MODEL)


@pytest.mark.parametrize(
    ("gpu", "having", "match", "chunks"),
    [
        ("NVIDIA H200, 450 W", [1, 2, 3, 4], Match.SAME_GPU, 3),
        ("h200, 450 w", [1, 2, 3, 4], Match.SAME_GPU, 3),
        (MODEL, [1, 2, 3, 4], Match.SAME_GPU, 2),
        ("NVIDIA H200, 450 W", [1, 2], Match.SAME_MODEL, 2),
        (MODEL, [1, 3], Match.SAME_MODEL, 3),
        ("NVIDIA H200, 450 W", [1], Match.SAME_ARCH, 1),
    ],
)
def test_a_call_runs_what_its_class_won_then_another_class_of_the_model(
    gpu: str, having: list[int], match: Match, chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {1: "NVIDIA A first", 2: MODEL, 3: "NVIDIA H200, 450 W", 4: "NVIDIA H200, 600 W"}
    trials = [make_trial(number, environment=replace(H200, gpu=names[number])) for number in having]
    monkeypatch.setenv(bundles.VARIABLE, str(write_trials(tmp_path / "sm90.db", trials)))
    best = hadagen.best_config(PROBLEM, 32, gpu, arch="sm90", inplace=True)
    assert (best.match, best.knobs["chunks"]) == (match, chunks)
    assert (best.us is None) is (match is not Match.SAME_GPU)


def test_classes_have_trials_and_winners_of_their_own(store: Store, tmp_path: Path) -> None:
    tuned = replace(H200, memory_bytes=141 * GIB, power_limit_watts=700)
    limited = replace(tuned, gpu="NVIDIA H200, 450 W", power_limit_watts=450)
    trials = [make_trial(1, environment=tuned), make_trial(2, environment=limited)]
    store.record(*trials)
    assert (store.trials(gpu=tuned.gpu), store.checked()[1].environment) == (trials[:1], limited)
    bundle = Bundle.open(write_trials(tmp_path / "sm90.db", trials))
    assert bundle.gpus() == [tuned.gpu, limited.gpu]
    assert {entry.gpu: entry.knobs["chunks"] for entry in bundle.all_entries()} == {tuned.gpu: 1, limited.gpu: 2}


# ---- what disturbs timings -------------------------------------------------------------------------------------------
GPU = replace(H200, power_limit_watts=700)
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


def watched(gpu: FakeGpu, listed: dict[int, int] | None = None, **since: Any) -> tuple[FakeGpu, Monitor]:
    """A GPU, and the monitor that watches it."""
    return gpu, watching(gpu, listed, **since)


def reason(found: Disturbed | None) -> str:
    return found.reason if found else ""


def test_an_idle_gpu_costs_a_few_questions_and_no_pause() -> None:
    gpu, monitor = watched(FakeGpu())
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
    gpu, monitor = watched(FakeGpu(names={THEM: "python3"}), listed={US: GIB, THEM: GIB}, ran={US: 60, THEM: 97})
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
    gpu, monitor = watched(
        FakeGpu(later=[(0.5, {"percent": 0})]), listed={US: GIB, THEM: GIB}, ran={4711: 80}, percent=90
    )  # which was our own work
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
    gpu, monitor = watched(FakeGpu(), used=2 * GIB, percent=97)
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
    assert reason(watching(FakeGpu(percent=97)).look()) == "another process uses the GPU, 97 % of the time"
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
    gpu, monitor = watched(FakeGpu(listed={THEM: GIB}, percent=0), listed={THEM: GIB, 4711: GIB}, ran={4711: 90})
    assert monitor.look() is None
    assert gpu.now == 0.0
    gpu.ran = {4711: 90, THEM: 30}
    assert reason(monitor.look()) == "process 12 uses the GPU, 30 % of the time"


def test_who_has_the_memory_is_named_where_it_runs_out() -> None:
    gpu, monitor = watched(FakeGpu())
    assert monitor.crowded() is None
    gpu.listed = {US: GIB, THEM: 70 * GIB}
    assert reason(monitor.crowded()) == "the memory of the GPU is full, of which process 12 has 70.0 GiB"
    gpu.listed, gpu.used = {}, 71 * GIB
    assert reason(monitor.crowded()) == "the memory of the GPU is full, of which another process has 70.0 GiB"


# ---- heat, power and clocks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("bits", "why"),
    [
        (nvml.HW_THERMAL_SLOWDOWN | nvml.HW_SLOWDOWN, "it is too hot (hardware thermal slowdown)"),
        (nvml.SW_THERMAL_SLOWDOWN | nvml.SW_POWER_CAP, "it is too hot (software thermal slowdown)"),
        (nvml.HW_POWER_BRAKE_SLOWDOWN, "its power supply holds it back (hardware power brake)"),
        (nvml.HW_SLOWDOWN, "the hardware holds it back (hardware slowdown)"),
    ],
)
def test_a_gpu_that_is_slowed_down_is_noticed_until_it_recovers(bits: int, why: str) -> None:
    gpu, monitor = watched(FakeGpu(later=[(10.0, {"reasons": 0})]), reasons=bits)
    for after in (False, True):
        found = monitor.look(after)
        assert found.reason == f"the GPU is slowed down: {why}"
        assert found.advice.startswith("let it cool down")
    gpu.sleep(10.0)
    assert monitor.look() is None


def test_a_bit_that_is_set_for_a_moment_disturbs_nothing() -> None:
    assert watching(FakeGpu(later=[(0.05, {"reasons": 0})]), reasons=nvml.HW_SLOWDOWN).look() is None


@pytest.mark.parametrize("bits", [nvml.SW_POWER_CAP, nvml.CLOCKS_SETTING, nvml.SYNC_BOOST, nvml.GPU_IDLE])
def test_reasons_that_a_gpu_has_in_normal_use_disturb_nothing(bits: int) -> None:
    monitor = watching(FakeGpu(), reasons=bits)
    assert (monitor.look(), monitor.look(after=True)) == (None, None)


def test_clocks_that_fall_for_no_known_reason_are_noticed() -> None:
    gpu, monitor = watched(FakeGpu(), mhz=1200)
    assert monitor.look() is None  # it may have been idle
    assert reason(monitor.look(after=True)) == "the GPU is slowed down: its clock fell from 1980 to 1200 MHz"
    for reasons in (nvml.GPU_IDLE, nvml.SW_POWER_CAP):
        gpu.reasons = reasons
        assert monitor.look(after=True) is None
    assert watching(FakeGpu(mhz=1200)).look(after=True) is None  # locked before, for all that is timed


def test_a_gpu_that_becomes_another_class_is_noticed() -> None:
    found = watching(FakeGpu(), limit=450).look()
    assert reason(found) == "its settings were changed, and NVIDIA H200 became NVIDIA H200, 450 W"


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


HOT = {"reasons": nvml.HW_THERMAL_SLOWDOWN}
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
