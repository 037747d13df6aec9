"""The CUDA driver, as far as hadagen needs it: load a compiled kernel, launch it, and read every return code.

The driver's library is loaded by the first call that needs a GPU, so importing this module costs nothing on a machine
without one. Nothing here imports PyTorch: contexts are the devices' primary ones, which PyTorch uses too.
"""

from __future__ import annotations

import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint64, c_void_p, pointer
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from hadagen.errors import DeviceError
from hadagen.gpu import libcuda, nvml
from hadagen.problem.launch import PORTABLE_CLUSTER, LaunchSpec, RowShape, X, Y

# Dynamic shared memory, in bytes, that a kernel may use without asking for more.
DEFAULT_SHARED_BYTES = 48 * 1024

# What to do about an error, by the name of its code.
_FIXES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free some device memory",
    "CUDA_ERROR_NO_DEVICE": "run on a machine with an NVIDIA GPU, or make one visible in CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "tune for this GPU's architecture",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "update the NVIDIA driver",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "call hadagen.warmup before the graph capture begins",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "call hadagen.warmup before the graph capture begins",
    **dict.fromkeys(
        (
            "CUDA_ERROR_ILLEGAL_ADDRESS",
            "CUDA_ERROR_MISALIGNED_ADDRESS",
            "CUDA_ERROR_ILLEGAL_INSTRUCTION",
            "CUDA_ERROR_LAUNCH_FAILED",
            "CUDA_ERROR_LAUNCH_TIMEOUT",
            "CUDA_ERROR_ECC_UNCORRECTABLE",
            "CUDA_ERROR_HARDWARE_STACK_ERROR",
            "CUDA_ERROR_DEVICE_UNAVAILABLE",
        ),
        "restart the process, and look for the cause with compute-sanitizer or in the kernel log",
    ),
}


class DriverError(DeviceError):
    """A driver call failed. `code` is the name of its return code, such as `CUDA_ERROR_OUT_OF_MEMORY`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, str(self))


# Codes for an image that is for other GPUs, or for a newer driver.
NOT_LOADABLE = {
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_INVALID_PTX",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}


class DoesNotFit(DriverError):
    """A kernel needs more threads, registers, shared memory or blocks of a cluster than the device has."""


@functools.cache
def bindings() -> SimpleNamespace:
    """The functions of `libcuda.open_library`, initialized. Raises `DeviceError` if there is no driver or no GPU."""
    driver = libcuda.open_library()
    (code,) = driver.cuInit(0)
    if code:
        raise _error(driver, code, "starting CUDA")
    return driver


def check(result: tuple[Any, ...], doing: str = "a CUDA call") -> Any:
    """The value that a driver call returned besides its code, or None.

    Raises `DriverError` if the code is not 0; `doing` names the failed work in its message.
    """
    if result[0]:
        raise _error(bindings(), result[0], doing)
    return result[1] if len(result) > 1 else None


def _error(driver: SimpleNamespace, code: int, doing: str) -> DriverError:
    (_, known), (_, text) = driver.cuGetErrorName(code), driver.cuGetErrorString(code)
    name = known.decode() if known else f"error {code}"
    description = f" ({text.decode()})" if text else ""
    return DriverError(name, f"{doing} failed with {name}{description}; {_FIXES.get(name, 'run `hadagen doctor`')}")


@functools.cache
def driver_version() -> str:
    """The version, such as "580.82.07", from NVML, which is a part of the driver; "" if a container lacks NVML."""
    return nvml.driver_version()


@functools.cache
def primary_context(device: int) -> Any:
    """The primary context of a device, held until the process ends. Raises `DriverError`."""
    driver = bindings()
    handle = check(driver.cuDeviceGet(device), f"opening CUDA device {device}")
    return check(driver.cuDevicePrimaryCtxRetain(handle), f"opening CUDA device {device}")


@contextmanager
def active(device: int) -> Iterator[None]:
    """Makes the device's primary context current on this thread, and the previous one again at the end."""
    driver = bindings()
    check(driver.cuCtxPushCurrent(primary_context(device)), f"switching to CUDA device {device}")
    try:
        yield
    finally:
        check(driver.cuCtxPopCurrent(), f"leaving CUDA device {device}")


@contextmanager
def _capture_allowed() -> Iterator[None]:
    """Lets this thread load modules while one of its streams is being captured into a graph."""
    driver, mode = bindings(), c_int(libcuda.CU_STREAM_CAPTURE_MODE_RELAXED)
    check(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(mode))  # which is the thread's own by now


class LaunchBlock(NamedTuple):
    """The arguments of a launch in memory, complete but for x and y. A block serves one launch at a time."""

    config: Any  # pointer to a `LaunchConfig`, which names the stream too
    values: memoryview  # the value of each argument, in eight bytes
    places: Any  # pointer to an array with the address of each argument


Launch = Callable[..., None]  # (stream, x, y, …): ints; the rest are the params in `changing` of `prepared`


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in the primary context of one device.

    `resident_blocks`: how many of its blocks the device holds at once.
    """

    entry: str
    spec: LaunchSpec
    device: int
    resident_blocks: int
    module: int  # a handle of the driver, as is `function`
    function: int

    def launch(
        self,
        stream: int,
        x: int,
        y: int,
        elements: int,
        scale: float,
        rows: RowShape | None = None,
        operands: Mapping[str, int] | None = None,
    ) -> None:
        """Queues the transform of x into y on a stream of the device, whose context must be current or none at all.

        x, y: device addresses, multiples of 16 bytes (of an element where the kernel is told how rows lie), equal or
        not overlapping. The other arguments (elements at least 1) as `LaunchSpec.arguments` takes them. stream: its
        handle as an integer. Raises `DriverError`; an error while the kernel runs shows up later.
        """
        self.prepared(elements, scale, rows, operands)(stream, x, y)

    def prepared(
        self,
        elements: int,
        scale: float,
        rows: RowShape | None = None,
        operands: Mapping[str, int] | None = None,
        changing: Sequence[str] = (),
    ) -> Launch:
        """A function that launches the kernel, for calls that come again: it takes the stream and the addresses of x
        and y, and all else is done here. The arguments and errors are those of `LaunchSpec.arguments`.

        changing: params whose values the function takes after the addresses, in this order."""
        arguments = self.spec.arguments(elements, scale, rows, {**(operands or {}), **dict.fromkeys(changing, 0)})
        first, *positions = [[param.name for param in self.spec.params].index(name) for name in changing] or [0]
        launch_kernel, function = bindings().cuLaunchKernelEx, c_void_p(self.function)
        # Stream → blocks that no launch uses now. If several threads launch at once, each needs a block of its own.
        idle: dict[int, list[LaunchBlock]] = defaultdict(list)

        def launch(stream: int, x: int, y: int, *others: int) -> None:
            blocks = idle[stream]
            try:
                block = blocks.pop()
            except IndexError:
                block = self.block(stream, elements, arguments)
            config, values, places = block
            values[X], values[Y] = x, y
            if others:
                values[first] = others[0]  # most launches have one, and a loop takes longer
                for position, value in zip(positions, others[1:], strict=True) if positions else ():
                    values[position] = value
            code = launch_kernel(config, function, places, None)
            if code:
                code = self._launch_in_context(code, block)
                check((code,), f"launching {self.entry} on {elements} elements")
            blocks.append(block)

        return launch

    def block(self, stream: int, elements: int, arguments: Sequence[int]) -> LaunchBlock:
        """A new block for a launch with these arguments (`LaunchSpec.arguments`)."""
        config = _configuration(self.spec, self.spec.grid(elements, self.resident_blocks))
        config.hStream = stream
        if self.spec.starts_early:
            config.attrs, config.numAttrs = pointer(_early_start()), 1
        values = array("Q", arguments)  # of a u32 the lower four bytes are read
        start, count = values.buffer_info()
        places = (c_uint64 * count)(*range(start, start + 8 * count, 8))
        # A pointer that `byref` makes keeps alive what it points to, and costs a call less than a c_void_p.
        return LaunchBlock(byref(config), memoryview(values), byref(places))

    def _launch_in_context(self, code: int, block: LaunchBlock) -> int:
        """Launch again if the launch failed because it is the first CUDA call of this thread. Returns the code."""
        driver = bindings()
        if code != libcuda.CUDA_ERROR_INVALID_CONTEXT:
            return code
        check(driver.cuCtxSetCurrent(primary_context(self.device)), f"switching to CUDA device {self.device}")
        return int(driver.cuLaunchKernelEx(block.config, c_void_p(self.function), block.places, None))


def unload(kernel: LoadedKernel) -> None:
    """Give back the memory of a kernel that is not used any more."""
    with active(kernel.device):
        bindings().cuModuleUnload(kernel.module)


def load(image: bytes, entry: str, spec: LaunchSpec, device: int = 0) -> LoadedKernel:
    """Loads a cubin, or PTX that the driver then compiles, into the primary context of a device.

    Raises `DriverError` where the image is not for this device or lacks `entry`, `DoesNotFit` where it needs more than
    the device has.
    """
    driver = bindings()
    doing = f"loading {entry} on CUDA device {device}"
    with active(device), _capture_allowed():
        module = check(driver.cuModuleLoadData(image + b"\0"), doing)  # PTX must end with a zero byte
        try:
            function = check(driver.cuModuleGetFunction(module, entry.encode()), doing)
            with _refused("CUDA_ERROR_INVALID_VALUE", spec, doing):
                _ask_for_more(driver, function, spec, doing)
            with _refused("CUDA_ERROR_INVALID_CLUSTER_SIZE", spec, doing):
                resident_blocks = _resident_blocks(driver, function, spec, device)
            if resident_blocks < 1:
                raise _too_large(spec, doing)
        except DeviceError:
            driver.cuModuleUnload(module)  # whose own failure would hide the first
            raise
    return LoadedKernel(entry, spec, device, resident_blocks, module, function)


@contextmanager
def _refused(code: str, spec: LaunchSpec, doing: str) -> Iterator[None]:
    """A context in which a `DriverError` with this code becomes `DoesNotFit`."""
    try:
        yield
    except DriverError as error:
        if error.code != code:
            raise
        raise _too_large(spec, doing) from error


def _too_large(spec: LaunchSpec, doing: str) -> DoesNotFit:
    blocks = f" in clusters of {spec.cluster}" if spec.cluster > 1 else ""
    if spec.cluster > PORTABLE_CLUSTER:
        blocks += f", where no GPU need hold more than {PORTABLE_CLUSTER},"
    return DoesNotFit(
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        f"{doing} failed: a block of {spec.threads} threads with {spec.shared_bytes} bytes of shared memory{blocks} "
        "does not fit on this GPU; tune for it",
    )


def _ask_for_more(driver: SimpleNamespace, function: int, spec: LaunchSpec, doing: str) -> None:
    """Allow a kernel as much shared memory and as large clusters as it needs, if these exceed the defaults."""
    if spec.shared_bytes > DEFAULT_SHARED_BYTES:
        shared = libcuda.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, shared, spec.shared_bytes), doing)
    if spec.cluster > PORTABLE_CLUSTER:
        larger = libcuda.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        check(driver.cuFuncSetAttribute(function, larger, 1), doing)


def _early_start() -> libcuda.LaunchAttribute:
    """The launch attribute by which a kernel need not wait for the end of the one before it."""
    attribute = libcuda.LaunchAttribute(libcuda.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _configuration(spec: LaunchSpec, blocks: int) -> libcuda.LaunchConfig:
    """A launch of this many blocks on the default stream. A cluster's size is compiled into the kernel."""
    return libcuda.LaunchConfig(blocks, 1, 1, spec.threads, 1, 1, spec.shared_bytes)


def _resident_blocks(driver: SimpleNamespace, function: int, spec: LaunchSpec, device: int) -> int:
    doing = f"computing the occupancy on CUDA device {device}"
    if spec.cluster > 1:
        config = _configuration(spec, spec.cluster)
        return int(check(driver.cuOccupancyMaxActiveClusters(function, config), doing)) * spec.cluster
    blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, spec.threads, spec.shared_bytes)
    handle = check(driver.cuDeviceGet(device), doing)
    sms = driver.cuDeviceGetAttribute(libcuda.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle)
    return int(check(blocks, doing)) * int(check(sms, doing))
