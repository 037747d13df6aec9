"""The driver's functions through ctypes, against a small library of the same names, and against cuda.h."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_compilers import needs_nvcc

from hadagen import driver, libcuda
from hadagen.compilers import find_tool
from hadagen.driver import DriverError
from hadagen.errors import DeviceError
from hadagen.launch import LaunchSpec, RowShape
from hadagen.measure.cells import Traffic
from hadagen.measure.environment import device_environment
from hadagen.measure.timing import LaunchGraph, Work
from hadagen.regimes import Cache, Destination

HANDLE = 0xFEDC_BA98_7654_3210  # of which every bit counts

# What each function is told: {place in `told`, value}. What it gives back is made of that.
STAND_IN = """
#include <cstdint>
#include <cstring>
using Handle = void*;
struct Attribute { int id; char pad[4]; union { char bytes[64]; int early; } value; };
struct Config { unsigned grid[3], block[3], shared; Handle stream; Attribute* attributes; unsigned count; };
extern "C" {
uint64_t told[16];
int code;
static Handle above(Handle handle, int by) { return static_cast<char*>(handle) + by; }
static int number(Handle handle) { return static_cast<int>(reinterpret_cast<uintptr_t>(handle) & 0xff); }
int cuInit(unsigned flags) { return flags == 0 ? code : 1; }
int cuGetErrorName(int c, const char** name) { *name = c == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : 0; return !*name; }
int cuGetErrorString(int c, const char** text) { *text = c == 201 ? "invalid device context" : nullptr; return !*text; }
int cuDriverGetVersion(int* version) { *version = 12040; return code; }
int cuDeviceGetCount(int* count) { *count = 2; return code; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 100; return code; }
int cuDeviceGetName(char* name, int room, int device) { return !strncpy(name, device == 101 ? "GPU" : "?", room); }
int cuDeviceGetAttribute(int* value, int which, int device) { *value = 1000 * which + device; return code; }
int cuDeviceGetPCIBusId(char* id, int room, int device) { return !strncpy(id, device == 101 ? "0:18:0.0" : "", room); }
int cuDeviceGetUuid_v2(char* uuid, int device) { memset(uuid, device, 16); return code; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (7ull << 32) + device; return code; }
int cuDevicePrimaryCtxRetain(Handle* context, int device) { *context = above(nullptr, device); return code; }
int cuCtxPushCurrent_v2(Handle context) { return number(context); }
int cuCtxPopCurrent_v2(Handle* context) { *context = nullptr; return code; }
int cuCtxSetCurrent(Handle context) { return number(context); }
int cuCtxSynchronize() { return code; }
int cuModuleLoadData(Handle* module, const void* image) { *module = above(nullptr, strlen((char*)image)); return code; }
int cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    *function = above(module, strlen(name)); return code; }
int cuModuleUnload(Handle module) { return number(module); }
int cuFuncSetAttribute(Handle function, int which, int value) { return number(function) + which + value; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle function, int threads, size_t shared) {
    *blocks = number(function) + threads + static_cast<int>(shared >> 32); return code; }
int cuOccupancyMaxActiveClusters(int* clusters, Handle function, const Config* config) {
    *clusters = number(function) + config->grid[0] + config->block[0] + config->shared; return code; }
int cuThreadExchangeStreamCaptureMode(int* mode) { *mode += 10; return code; }
int cuStreamBeginCapture_v2(Handle stream, int mode) { return (number(stream) + mode) & 0xff; }
int cuStreamEndCapture(Handle stream, Handle* graph) { *graph = above(stream, 1); return code; }
int cuGraphInstantiateWithFlags(Handle* executable, Handle graph, unsigned long long flags) {
    *executable = above(graph, static_cast<int>(flags >> 32)); return code; }
int cuGraphLaunch(Handle executable, Handle stream) { return number(executable) + (stream != above(executable, -1)); }
int cuGraphExecDestroy(Handle executable) { return number(executable); }
int cuGraphDestroy(Handle graph) { return number(graph); }
int cuLaunchKernelEx(const Config* config, Handle function, void** parameters, void** extra) {
    const Attribute* first = config->count ? config->attributes : nullptr;
    const uint64_t values[] = {config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1],
        config->block[2], config->shared, (uint64_t)config->stream, config->count, (uint64_t)(first ? first->id : -1),
        (uint64_t)(first ? first->value.early : -1), (uint64_t)function, *(uint64_t*)parameters[0],
        *(uint64_t*)parameters[1], *(uint64_t*)parameters[2], *(uint32_t*)parameters[3]};
    memcpy(told, values, sizeof told);
    return extra ? 1 : code; }
}
"""

# Function, arguments → what it returns beside the code.
ANSWERS: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("cuInit", (0,), ()),
    ("cuGetErrorName", (201,), (b"CUDA_ERROR_INVALID_CONTEXT",)),
    ("cuGetErrorString", (201,), (b"invalid device context",)),
    ("cuDriverGetVersion", (), (12040,)),
    ("cuDeviceGetCount", (), (2,)),
    ("cuDeviceGet", (3,), (103,)),
    ("cuDeviceGetName", (ctypes.create_string_buffer(8), 8, 101), ()),
    ("cuDeviceGetAttribute", (16, 103), (16103,)),
    ("cuDeviceGetPCIBusId", (ctypes.create_string_buffer(13), 13, 101), ()),
    ("cuDeviceGetUuid", (ctypes.create_string_buffer(16), 101), ()),
    ("cuDeviceTotalMem", (103,), ((7 << 32) + 103,)),
    ("cuDevicePrimaryCtxRetain", (103,), (103,)),
    ("cuCtxPushCurrent", (HANDLE & ~0xFF,), ()),
    ("cuCtxPopCurrent", (), (None,)),
    ("cuCtxSetCurrent", (None,), ()),
    ("cuCtxSynchronize", (), ()),
    ("cuModuleLoadData", (b"image\0",), (5,)),
    ("cuModuleGetFunction", (HANDLE, b"entry"), (HANDLE + 5,)),
    ("cuModuleUnload", (HANDLE & ~0xFF,), ()),
    ("cuFuncSetAttribute", (HANDLE, 14, -0x10 - 14), ()),
    ("cuOccupancyMaxActiveBlocksPerMultiprocessor", (HANDLE, 256, 7 << 32), (0x10 + 256 + 7,)),
    ("cuOccupancyMaxActiveClusters", (HANDLE, libcuda.LaunchConfig(4, 1, 1, 256, 1, 1, 48)), (0x10 + 4 + 256 + 48,)),
    ("cuThreadExchangeStreamCaptureMode", (ctypes.c_int(2),), ()),
    ("cuStreamBeginCapture", (HANDLE, -0x10), ()),
    ("cuStreamEndCapture", (HANDLE,), (HANDLE + 1,)),
    ("cuGraphInstantiateWithFlags", (HANDLE, 3 << 32), (HANDLE + 3,)),
    ("cuGraphLaunch", (HANDLE & ~0xFF, (HANDLE & ~0xFF) - 1), ()),
    ("cuGraphExecDestroy", (HANDLE & ~0xFF,), ()),
    ("cuGraphDestroy", (HANDLE & ~0xFF,), ()),
]
SPEC = LaunchSpec(threads=256, cluster=1, shared_bytes=1024, tile_elements=4096, persistent=False)


def compiled(folder: Path, name: str, text: str, *options: str) -> Path:
    """What the C++ compiler makes of a text."""
    source = folder / f"{name}.cpp"
    source.write_text(text)
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++17", *options, str(source), "-o"]
    subprocess.run([*command, str(folder / name)], check=True)
    return folder / name


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("driver"), "libstandin.so", STAND_IN, "-shared", "-fPIC")


@pytest.fixture
def memory(stand_in: Path) -> ctypes.CDLL:
    """The stand-in, for what it was told, and for the code that it answers with."""
    library = ctypes.CDLL(str(stand_in))
    ctypes.c_int.in_dll(library, "code").value = 0
    return library


@pytest.fixture
def bound(stand_in: Path, memory: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The stand-in's functions, which `hadagen.driver` calls."""
    functions = libcuda.open_library(str(stand_in))
    monkeypatch.setattr(libcuda, "open_library", lambda: functions)
    monkeypatch.setattr(driver, "bindings", driver.bindings.__wrapped__)
    monkeypatch.setattr(driver, "primary_context", driver.primary_context.__wrapped__)
    return functions


def test_every_function_has_an_answer_here() -> None:
    assert [name.removesuffix("_v2") for name in libcuda.FUNCTIONS] == [name for name, _, _ in ANSWERS]


@pytest.mark.parametrize(("name", "arguments", "answer"), ANSWERS)
def test_arguments_and_results_pass(
    name: str, arguments: tuple[Any, ...], answer: tuple[Any, ...], bound: SimpleNamespace
) -> None:
    assert getattr(bound, name)(*arguments) == (0, *answer)


def test_some_results_come_in_the_memory_of_an_argument(bound: SimpleNamespace) -> None:
    mode, name = ctypes.c_int(2), ctypes.create_string_buffer(8)
    bound.cuThreadExchangeStreamCaptureMode(mode)
    bound.cuDeviceGetName(name, len(name), 101)
    assert (mode.value, name.value) == (12, b"GPU")


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_is_told_all(early: bool, bound: SimpleNamespace, memory: ctypes.CDLL) -> None:
    kernel = driver.LoadedKernel("entry", replace(SPEC, starts_early=early), 0, 264, 1, HANDLE)
    kernel.launch(HANDLE + 1, HANDLE + 2, HANDLE + 3, 3 * 2**40, -0.5)
    attribute = [1, 6, 1] if early else [0, 2**64 - 1, 2**64 - 1]
    half = 0xBF000000  # -0.5
    geometry = [3 * 2**28, 1, 1, 256, 1, 1, 1024]
    expected = [*geometry, HANDLE + 1, *attribute, HANDLE, HANDLE + 2, HANDLE + 3, 3 * 2**40, half]
    assert list((ctypes.c_uint64 * 16).in_dll(memory, "told")) == expected


def test_codes_become_sentences(bound: SimpleNamespace, memory: ctypes.CDLL) -> None:
    code = ctypes.c_int.in_dll(memory, "code")
    code.value = 201
    with pytest.raises(DriverError, match=r"starting CUDA failed with CUDA_ERROR_INVALID_CONTEXT \(invalid device c"):
        driver.bindings()
    code.value = 9999  # one that the library has no name for
    with pytest.raises(DriverError, match="starting CUDA failed with error 9999; run `hadagen doctor`") as caught:
        driver.bindings()
    assert caught.value.code == "error 9999"


def test_the_environment_of_a_device(bound: SimpleNamespace) -> None:
    found = device_environment(1)
    assert (found.gpu, found.compute_capability, found.cuda) == ("GPU", "75101.76101", "12.4")
    assert (found.sms, found.l2_bytes) == (16101, 38101)
    assert (found.sm_clock_mhz, found.memory_clock_mhz) == (13, 36)
    assert (found.memory_bytes, found.power_limit_watts) == (29 << 30, 0)  # up from 28 GiB; NVML does not know it
    with pytest.raises(DeviceError, match="this machine shows 2"):
        device_environment(2)


def test_a_graph_of_launches(bound: SimpleNamespace, memory: ctypes.CDLL) -> None:
    stream = HANDLE | 0xFF  # which the stand-in makes a graph of whose last bits are 0, as those of success are
    kernel = driver.LoadedKernel("entry", SPEC, 0, 264, 1, HANDLE)
    graph = LaunchGraph(
        stream,
        kernel,
        [(16, 32), (48, 64)],
        Work(Traffic(8192, Destination.IN_PLACE, Cache.HOT), 4096, 1.0, RowShape(0, 0, 0), {}),
    )
    told = (ctypes.c_uint64 * 16).in_dll(memory, "told")
    assert (told[7], *told[12:15]) == (stream, 48, 64, 4096)
    graph.replay()
    graph.close()


def test_a_machine_without_a_driver_or_with_an_old_one(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no NVIDIA driver was found on this machine .*; install one"):
        libcuda.open_library(str(tmp_path / "libnone.so"))
    older = re.sub(r"int cuOccupancyMaxActiveClusters.*?\n.*?\n", "", STAND_IN)
    with pytest.raises(DeviceError, match=r"too old \(.*cuOccupancyMaxActiveClusters.*install version 525 or newer"):
        libcuda.open_library(str(compiled(tmp_path, "libolder.so", older, "-shared", "-fPIC")))


@needs_nvcc
def test_names_types_and_values_are_those_of_the_header(tmp_path: Path) -> None:
    """Sizes and kinds of all parameters, the places of all fields, and all constants."""
    structures = {"CUlaunchConfig": libcuda.LaunchConfig, "CUlaunchAttribute": libcuda.LaunchAttribute}
    fields = [(name, kind, field) for name, kind in structures.items() for field, _ in kind._fields_]
    constants = [name for name in vars(libcuda) if name.startswith(("CU_", "CUDA_"))]
    lines = [
        *(f'show("{name}", (decltype(&{name}))nullptr);' for name in libcuda.FUNCTIONS),
        *(f'std::printf("{name} %zu\\n", sizeof({name}));' for name in structures),
        *(f'std::printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for name, _, field in fields),
        *(f'std::printf("{name} %d\\n", (int){name});' for name in constants),
    ]
    program = """
#include <cstddef>
#include <cstdio>
#include <type_traits>
#include <cuda.h>
template <class R, class... A> void show(const char* name, R (*)(A...)) {
    std::printf("%s", name);
    (std::printf(" %c%zu", std::is_pointer_v<A> ? 'p' : 'i', sizeof(A)), ...);
    std::printf("\\n");
}
int main() {
"""
    (tmp_path / "raw.cpp").write_text(program + "\n".join(lines) + "}")
    command = [find_tool("nvcc"), "-E", "-x", "c++", "-std=c++17", str(tmp_path / "raw.cpp")]
    expanded = subprocess.run(command, check=False, capture_output=True, text=True)  # nvcc knows where its headers lie
    if "cuda.h: No such file" in expanded.stderr:
        pytest.skip("this nvcc came without cuda.h")
    shown = compiled(tmp_path, "show", expanded.stdout)
    said = subprocess.run([str(shown)], check=True, capture_output=True, text=True).stdout.splitlines()

    def kind_of(kind: Any) -> str:
        is_pointer = kind in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(kind, ctypes._Pointer)
        return f"{'p' if is_pointer else 'i'}{ctypes.sizeof(kind)}"

    parameters = {name: [kind_of(kind) for _, kind in some] for name, some in libcuda.FUNCTIONS.items()}
    assert said == [
        *(" ".join([name, *kinds]) for name, kinds in parameters.items()),
        *(f"{name} {ctypes.sizeof(kind)}" for name, kind in structures.items()),
        *(f"{name}.{field} {getattr(kind, field).offset}" for name, kind, field in fields),
        *(f"{name} {getattr(libcuda, name)}" for name in constants),
    ]
