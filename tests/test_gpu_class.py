"""Classes of GPUs: their names, the questions to NVML behind them, and the kernels that calls of each class run."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, SilentGpu
from sample_bundle import write_trials
from sample_trials import H200, PROBLEM, make_trial
from test_libcuda import compiled

import hadagen
from hadagen import gpu_class, libnvml
from hadagen.errors import DeviceError
from hadagen.gpu_class import class_name, class_of
from hadagen.libnvml import NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM
from hadagen.measure import environment
from hadagen.runtime import bundles, device
from hadagen.runtime.choose import Match
from hadagen.runtime.device import Device
from hadagen.target import model_of
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


# ---- NVML, against the package of NVIDIA over the same library -------------------------------------------------------
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
int nvmlInit_v2() { return 0; }
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
def library(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    found = libnvml.open_library(str(stand_in))
    assert found is not None
    monkeypatch.setattr(libnvml, "open_library", lambda: found)
    ctypes.c_int.in_dll(found, "code").value = 0
    return found


def test_questions_are_those_of_the_package_of_nvidia(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = libnvml.find_gpu("0000:18:00.0", "MIG-2")
    assert gpu is not None
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    theirs = pynvml.nvmlDeviceGetHandleByPciBusId(b"0000:18:00.0")
    assert gpu.power_limit_watts() == round(pynvml.nvmlDeviceGetEnforcedPowerLimit(theirs) / 1000) == 450
    assert gpu.default_power_limit_watts() == pynvml.nvmlDeviceGetPowerManagementDefaultLimit(theirs) / 1000 == 700
    for kind in (pynvml.NVML_CLOCK_GRAPHICS, pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM):
        assert gpu.application_clock_mhz(kind) == pynvml.nvmlDeviceGetApplicationsClock(theirs, kind)
        assert gpu.default_application_clock_mhz(kind) == pynvml.nvmlDeviceGetDefaultApplicationsClock(theirs, kind)
        assert gpu.max_clock_mhz(kind) == pynvml.nvmlDeviceGetMaxClockInfo(theirs, kind)
        assert gpu.clock_mhz(kind) == pynvml.nvmlDeviceGetClockInfo(theirs, kind)
    assert gpu.event_reasons() == pynvml.nvmlDeviceGetCurrentClocksEventReasons(theirs)
    assert gpu.utilization() == pynvml.nvmlDeviceGetUtilizationRates(theirs).gpu
    assert gpu.memory_used() == pynvml.nvmlDeviceGetMemoryInfo(theirs).used
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(theirs) + pynvml.nvmlDeviceGetGraphicsRunningProcesses(theirs)
    assert gpu.processes() == {process.pid: process.usedGpuMemory or 0 for process in listed}
    assert len(listed) == 101
    ran = pynvml.nvmlDeviceGetProcessUtilization(theirs, 0)
    assert [(sample.pid, sample.smUtil) for sample in ran] == [(1, 20), (1, 30), (2, 4000000), (3, 5)]
    assert gpu.process_utilization() == {1: 30, 3: 5}
    assert gpu.process_utilization() == {}  # since then none
    assert (gpu.process_name(12), gpu.process_name(13)) == ("python3", "")
    assert libnvml.driver_version() == pynvml.nvmlSystemGetDriverVersion()


def test_structures_and_values_are_those_of_the_package_of_nvidia() -> None:
    theirs = (pynvml.c_nvmlProcessInfo_t, pynvml.c_nvmlProcessUtilizationSample_t, pynvml.c_nvmlUtilization_t)
    for ours, their in zip((libnvml.ProcessInfo, libnvml.ProcessUtilization, libnvml.Utilization), theirs, strict=True):
        assert ours._fields_ == their._fields_
    assert libnvml.Memory._fields_ == pynvml.c_nvmlMemory_t._fields_
    values = {name: value for name, value in vars(libnvml).items() if name.startswith("NVML_")}
    assert values == {name: getattr(pynvml, name) for name in values}
    bits = {
        "GpuIdle": libnvml.GPU_IDLE,
        "SwPowerCap": libnvml.SW_POWER_CAP,
        "HwSlowdown": libnvml.HW_SLOWDOWN,
        "SwThermalSlowdown": libnvml.SW_THERMAL_SLOWDOWN,
        "HwThermalSlowdown": libnvml.HW_THERMAL_SLOWDOWN,
        "HwPowerBrakeSlowdown": libnvml.HW_POWER_BRAKE_SLOWDOWN,
    }
    assert bits == {name: getattr(pynvml, f"nvmlClocksEventReason{name}") for name in bits}


def test_a_part_of_a_gpu_has_its_own_processes_and_the_settings_of_the_whole(library: ctypes.CDLL) -> None:
    gpu = libnvml.find_gpu("0000:18:00.0", "MIG-1")
    assert gpu is not None
    assert gpu.processes() == {1: 1 << 32, 2: 0}
    assert (gpu.power_limit_watts(), gpu.event_reasons(), gpu.utilization()) == (450, 0x44, None)


def test_a_machine_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert libnvml.open_library(str(tmp_path / "libnone.so")) is None
    monkeypatch.setattr(libnvml, "open_library", lambda: None)
    assert (libnvml.find_gpu("0000:18:00.0"), libnvml.driver_version()) == (None, "")


def test_what_nvml_refuses_or_lacks_is_not_known(library: ctypes.CDLL, tmp_path: Path) -> None:
    gpu = libnvml.find_gpu("0000:18:00.0")
    assert gpu is not None
    ctypes.c_int.in_dll(library, "code").value = 3  # not supported
    answers = gpu.power_limit_watts(), gpu.clock_mhz(1), gpu.event_reasons(), gpu.utilization(), gpu.memory_used()
    assert {*answers, gpu.processes(), gpu.process_utilization()} == {None}
    assert (gpu.process_name(12), libnvml.driver_version()) == ("", "")
    assert libnvml.find_gpu("0000:19:00.0") is None
    older = re.sub(r"int nvmlDeviceGetEnforced.*\n", "", STAND_IN)
    lacking = ctypes.CDLL(str(compiled(tmp_path, "libolder.so", older, "-shared", "-fPIC")))
    handle = ctypes.c_void_p(1)
    assert libnvml.NvmlGpu(lacking, handle, handle).power_limit_watts() is None


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


def test_a_call_runs_what_its_class_won_then_another_class_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {1: "NVIDIA A first", 2: MODEL, 3: "NVIDIA H200, 450 W", 4: "NVIDIA H200, 600 W"}
    trials = [make_trial(chunks, environment=replace(H200, gpu=gpu)) for chunks, gpu in names.items()]

    def chosen(gpu: str, having: list[int]) -> tuple[Match, int]:
        path = write_trials(tmp_path / "sm90.db", [trials[chunks - 1] for chunks in having])
        monkeypatch.setenv(bundles.VARIABLE, str(path))
        best = hadagen.best_config(PROBLEM, 32, gpu, arch="sm90", inplace=True)
        assert best.knobs is not None
        assert (best.us is None) is (best.match is not Match.SAME_GPU)
        return best.match, best.knobs["chunks"]

    assert chosen("NVIDIA H200, 450 W", [1, 2, 3, 4]) == (Match.SAME_GPU, 3)
    assert chosen("h200, 450 w", [1, 2, 3, 4]) == (Match.SAME_GPU, 3)
    assert chosen(MODEL, [1, 2, 3, 4]) == (Match.SAME_GPU, 2)
    assert chosen("NVIDIA H200, 450 W", [1, 2]) == (Match.SAME_MODEL, 2)
    assert chosen(MODEL, [1, 3]) == (Match.SAME_MODEL, 3)
    assert chosen("NVIDIA H200, 450 W", [1]) == (Match.SAME_ARCH, 1)


def test_classes_have_trials_and_winners_of_their_own(tmp_path: Path) -> None:
    tuned = replace(H200, memory_bytes=141 * GIB, power_limit_watts=700)
    limited = replace(tuned, gpu="NVIDIA H200, 450 W", power_limit_watts=450)
    trials = [make_trial(1, environment=tuned), make_trial(2, environment=limited)]
    with Store.open(tmp_path / "trials.db") as store:
        for trial in trials:
            store.record(trial)
        assert store.trials(gpu=tuned.gpu) == trials[:1]
        assert store.checked()[1].environment == limited
    bundle = Bundle.open(write_trials(tmp_path / "sm90.db", trials))
    assert bundle.gpus() == [tuned.gpu, limited.gpu]
    assert {entry.gpu: entry.knobs["chunks"] for entry in bundle.all_entries()} == {tuned.gpu: 1, limited.gpu: 2}
