"""The driver: the module against a stand-in that notes every call, and its functions through ctypes against cuda.h."""

import ctypes
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_compilers import needs_nvcc

from hadagen.compiler.compilers import find_tool
from hadagen.errors import DeviceError
from hadagen.gpu import driver, libcuda
from hadagen.gpu.driver import DoesNotFit, DriverError
from hadagen.measure.cells import Traffic
from hadagen.measure.environment import device_environment
from hadagen.measure.timing import LaunchGraph, Work
from hadagen.problem.launch import PARAMS, ROW_PARAMS, LaunchSpec, Param, RowShape
from hadagen.problem.regimes import Cache, Destination


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_INVALID_CLUSTER_SIZE = 912


CONTEXT, MODULE, FUNCTION = 0x7F00_0000_1000, 0x7F00_0000_2000, 0x7F00_0000_3000
SHARED = libcuda.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
LARGER_CLUSTERS = libcuda.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


class FakeDriver:
    """Answers every call with success, or with what `answers` holds for it; `calls` notes them."""

    def __init__(self) -> None:
        self.capture_mode = 0  # of the thread
        self.more_params = 0  # that a kernel takes besides what all do
        self.during_a_launch: Callable[[], object] = lambda: None
        self.calls: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.codes: dict[str, list[CUresult]] = {}
        self.values: dict[str, Any] = {
            "cuDeviceGet": 0,
            "cuDevicePrimaryCtxRetain": CONTEXT,
            "cuCtxPopCurrent": CONTEXT,
            "cuModuleLoadData": MODULE,
            "cuModuleGetFunction": FUNCTION,
            "cuDeviceGetAttribute": 132,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": 2,
            "cuOccupancyMaxActiveClusters": 30,
        }

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            code = self.codes[name].pop(0) if self.codes.get(name) else CUresult.CUDA_SUCCESS
            return (code, self.values[name]) if name in self.values else (code,)

        return call

    def cuThreadExchangeStreamCaptureMode(self, mode: ctypes.c_int) -> tuple[CUresult]:
        self.calls.append(("cuThreadExchangeStreamCaptureMode", mode.value))
        self.capture_mode, mode.value = mode.value, self.capture_mode
        return (CUresult.CUDA_SUCCESS,)

    def cuGetErrorName(self, code: CUresult) -> tuple[CUresult, bytes]:
        return CUresult.CUDA_SUCCESS, CUresult(code).name.encode()

    def cuGetErrorString(self, code: CUresult) -> tuple[CUresult, bytes]:
        return CUresult.CUDA_SUCCESS, b"what it means"

    def cuLaunchKernelEx(self, to_config: Any, function: ctypes.c_void_p, parameters: Any, extra: None) -> int:
        """Reads the arguments as a kernel would: through an array of pointers."""
        assert extra is None
        config = to_config._obj
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_float)
        arguments = [ctypes.cast(pointers[i], ctypes.POINTER(kind)).contents.value for i, kind in enumerate(kinds)]
        more = range(len(kinds), len(kinds) + self.more_params)
        self.more = [ctypes.cast(pointers[i], ctypes.POINTER(ctypes.c_int64)).contents.value for i in more]
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        self.launched.append((function.value, (*grid, *block, config.sharedMemBytes, config.hStream or 0), arguments))
        self.attributes = config.attrs[: config.numAttrs]
        self.during_a_launch()
        codes = self.codes.get("cuLaunchKernelEx")
        return codes.pop(0) if codes else CUresult.CUDA_SUCCESS


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(driver, "primary_context", driver.primary_context.__wrapped__)
    return fake


TILES = LaunchSpec(threads=256, cluster=1, shared_bytes=0, tile_elements=4096, persistent=False)
CLUSTERS = LaunchSpec(threads=512, cluster=4, shared_bytes=100_000, tile_elements=1 << 15, persistent=True)


def test_loading_and_launching(fake: FakeDriver) -> None:
    kernel = driver.load(b"image", "entry", TILES, device=3)
    assert kernel.resident_blocks == 2 * 132
    assert ("cuModuleLoadData", b"image\0") in fake.calls
    assert ("cuModuleGetFunction", MODULE, b"entry") in fake.calls
    assert not [call for call in fake.calls if call[0] == "cuFuncSetAttribute"]
    kernel.launch(7, 0x1000, 2**63, 3 * 2**40 + 1, -0.5)
    blocks = (3 * 2**40 + 4096) // 4096
    assert fake.launched == [(FUNCTION, (blocks, 1, 1, 256, 1, 1, 0, 7), [0x1000, 2**63, 3 * 2**40 + 1, -0.5])]


def test_a_prepared_launch_takes_streams_and_addresses(fake: FakeDriver) -> None:
    kernel = driver.load(b"image", "entry", replace(TILES, params=(*PARAMS, *ROW_PARAMS, Param("const void*", "bias"))))
    fake.more_params = 4
    launch = kernel.prepared(1 << 20, 0.25, RowShape(100, 2**33, 128), {"bias": 1 << 40})
    for stream in (7, 9, 7):
        launch(stream, 16 * stream, 32)
    geometry = (256, 1, 1, 256, 1, 1, 0)
    assert fake.launched == [(FUNCTION, (*geometry, s), [16 * s, 32, 1 << 20, 0.25]) for s in (7, 9, 7)]
    assert fake.more == [100, 2**33, 128, 1 << 40]


def test_clusters_and_much_shared_memory(fake: FakeDriver) -> None:
    kernel = driver.load(b"image", "entry", CLUSTERS)
    assert ("cuFuncSetAttribute", FUNCTION, SHARED, 100_000) in fake.calls
    assert kernel.resident_blocks == 30 * 4
    kernel.launch(0, 16, 32, 1 << 30, 1.0)
    assert fake.launched[0][1][0] == 30 * 4


def test_loading_may_happen_while_capturing_and_leaves_the_thread_as_it_was(fake: FakeDriver) -> None:
    fake.codes["cuModuleLoadData"] = [CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU]
    with pytest.raises(DriverError, match="CUDA device 1 failed with CUDA_ERROR_NO_BINARY_FOR_GPU") as caught:
        driver.load(b"image", "entry", TILES, device=1)
    assert caught.value.code == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    assert "tune for this GPU's architecture" in str(caught.value)
    names = [call[0] for call in fake.calls]
    assert names[names.index("cuModuleLoadData") + 1 :] == ["cuThreadExchangeStreamCaptureMode", "cuCtxPopCurrent"]
    exchanged = [call[1] for call in fake.calls if call[0] == "cuThreadExchangeStreamCaptureMode"]
    assert exchanged == [libcuda.CU_STREAM_CAPTURE_MODE_RELAXED, 0]
    assert fake.capture_mode == 0


@pytest.mark.parametrize("cluster", [8, 16])
def test_more_than_eight_blocks_of_a_cluster_are_asked_for(cluster: int, fake: FakeDriver) -> None:
    driver.load(b"image", "entry", replace(CLUSTERS, cluster=cluster))
    names = [call[:3] for call in fake.calls if call[0] in ("cuFuncSetAttribute", "cuOccupancyMaxActiveClusters")]
    asked = ("cuFuncSetAttribute", FUNCTION, LARGER_CLUSTERS)
    assert names[:-1] == [("cuFuncSetAttribute", FUNCTION, SHARED), *[asked] * (cluster == 16)]


def test_a_kernel_too_large_for_the_device_is_refused(fake: FakeDriver) -> None:
    fake.values["cuOccupancyMaxActiveBlocksPerMultiprocessor"] = 0
    with pytest.raises(DoesNotFit, match="256 threads with 0 bytes of shared memory does not fit"):
        driver.load(b"image", "entry", TILES)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuFuncSetAttribute", CUresult.CUDA_ERROR_INVALID_VALUE),
        ("cuOccupancyMaxActiveClusters", CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE),
    ],
)
@pytest.mark.parametrize(
    ("cluster", "says"),
    [(4, "in clusters of 4"), (16, "in clusters of 16, where no GPU need hold more than 8,")],
)
def test_so_is_one_of_which_the_driver_says_so(
    call: str, code: CUresult, cluster: int, says: str, fake: FakeDriver
) -> None:
    fake.codes[call] = [code]
    with pytest.raises(DoesNotFit, match=f"100000 bytes of shared memory {says} does not fit on this GPU"):
        driver.load(b"image", "entry", replace(CLUSTERS, cluster=cluster))
    assert ("cuModuleUnload", MODULE) in fake.calls


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuFuncSetAttribute", CUresult.CUDA_ERROR_INVALID_CONTEXT),
        ("cuOccupancyMaxActiveClusters", CUresult.CUDA_ERROR_INVALID_VALUE),
    ],
)
def test_another_failure_is_no_question_of_size(call: str, code: CUresult, fake: FakeDriver) -> None:
    fake.codes[call] = [code]
    with pytest.raises(DriverError, match=code.name) as caught:
        driver.load(b"image", "entry", CLUSTERS)
    assert not isinstance(caught.value, DoesNotFit)


def test_a_thread_without_a_context_gets_one(fake: FakeDriver) -> None:
    kernel = driver.load(b"image", "entry", TILES)
    fake.codes["cuLaunchKernelEx"] = [CUresult.CUDA_ERROR_INVALID_CONTEXT]
    kernel.launch(0, 16, 16, 1, 1.0)
    assert ("cuCtxSetCurrent", CONTEXT) in fake.calls
    assert (len(fake.launched), fake.launched[0]) == (2, fake.launched[1])


def test_a_refused_launch_is_one_sentence(fake: FakeDriver) -> None:
    kernel = driver.load(b"image", "entry", TILES)
    fake.codes["cuLaunchKernelEx"] = [CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(DeviceError) as caught:
        kernel.launch(0, 16, 16, 4096, 1.0)
    assert str(caught.value) == (
        "launching entry on 4096 elements failed with CUDA_ERROR_OUT_OF_MEMORY (what it means); free some device memory"
    )


def test_threads_do_not_share_arguments(fake: FakeDriver) -> None:
    """While one thread launches, another launches the same kernel."""
    kernel = driver.load(b"image", "entry", TILES)
    launch = kernel.prepared(4096, 0.5)

    def launch_elsewhere() -> None:
        fake.during_a_launch = lambda: None
        thread = threading.Thread(target=launch, args=(0, 32, 48))
        thread.start()
        thread.join()
        assert made[0].values.tolist()[:2] == [16, 16]

    made: list[driver.LaunchBlock] = []
    real = driver.LoadedKernel.block

    def block(self: driver.LoadedKernel, *arguments: Any) -> driver.LaunchBlock:
        made.append(real(self, *arguments))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.LoadedKernel, "block", block)
        fake.during_a_launch = launch_elsewhere
        launch(0, 16, 16)
    assert [call[2][:2] for call in fake.launched] == [[16, 16], [32, 48]]


def test_blocks_are_used_again(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = driver.load(b"image", "entry", TILES).prepared(4096, 0.5)
    launch(7, 16, 16)
    fake.codes["cuLaunchKernelEx"] = [CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(DeviceError):
        launch(7, 16, 16)
    launch(7, 32, 48)
    monkeypatch.setattr(driver.LoadedKernel, "block", None)
    launch(7, 64, 80)
    assert [call[2][:2] for call in fake.launched][2:] == [[32, 48], [64, 80]]


# ---- the driver's functions through ctypes ---------------------------------------------------------------------------
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
    """The stand-in's functions, which `hadagen.gpu.driver` calls."""
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
