"""The driver module against a stand-in for the functions of the driver that notes every call."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any

import pytest

from hadagen import driver, libcuda
from hadagen.driver import DoesNotFit, DriverError
from hadagen.errors import DeviceError
from hadagen.launch import PARAMS, ROW_PARAMS, LaunchSpec, Param, RowShape


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


def test_only_a_kernel_that_waits_itself_starts_early(fake: FakeDriver) -> None:
    for early in (False, True):
        kernel = driver.load(b"image", "entry", replace(TILES, starts_early=early))
        kernel.launch(7, 16, 32, 1 << 20, 1.0)
        attributes = [(a.id, a.value.programmaticStreamSerializationAllowed) for a in fake.attributes]
        assert attributes == [(libcuda.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1)] * early


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
    assert len(fake.launched) == 2
    assert fake.launched[0] == fake.launched[1]


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


def test_check_returns_what_the_call_did(fake: FakeDriver) -> None:
    ok = CUresult.CUDA_SUCCESS
    assert driver.check((ok,)) is None
    assert driver.check((ok, 1)) == 1


def test_no_gpu_is_one_sentence() -> None:
    program = """
from hadagen import driver
try:
    driver.bindings()
except driver.DeviceError as error:
    print(error)
"""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.count("\n") == 1
    assert "NVIDIA" in done.stdout
