"""libcuda.so.1, the library of the NVIDIA driver, through ctypes: the functions that hadagen calls, and no others.

Names, types and values are those of cuda.h of CUDA 12.0, so every driver from 525 on has them all. A launch costs the
CPU less than through cuda-bindings, and there is no large module to import.

CUDA driver API: https://docs.nvidia.com/cuda/archive/12.0.0/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

from hadagen.errors import DeviceError

SONAME = "libcuda.so.1"

CUDA_ERROR_INVALID_CONTEXT = 201

CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13
CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36
CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
CU_STREAM_CAPTURE_MODE_RELAXED = 2


class LaunchAttributeValue(ctypes.Union):
    """CUlaunchAttributeValue, with the one member that hadagen sets."""

    _fields_ = [("programmaticStreamSerializationAllowed", c_int), ("pad", c_uint64 * 8)]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", c_int), ("value", LaunchAttributeValue)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", POINTER(LaunchAttribute)),
        ("numAttrs", c_uint),
    ]


_IN, _OUT = 1, 2  # the directions of a parameter in ctypes
_Parameter = tuple[int, Any]
_int, _handle, _text = (_IN, c_int), (_IN, c_void_p), (_IN, c_char_p)
_to_int, _to_handle, _to_text = (_OUT, POINTER(c_int)), (_OUT, POINTER(c_void_p)), (_OUT, POINTER(c_char_p))
_to_size = (_OUT, POINTER(c_size_t))

# Every function but cuLaunchKernelEx. Where cuda.h names one by a macro, this is the symbol that the macro means.
FUNCTIONS: dict[str, tuple[_Parameter, ...]] = {
    "cuInit": (_int,),
    "cuGetErrorName": (_int, _to_text),
    "cuGetErrorString": (_int, _to_text),
    "cuDriverGetVersion": (_to_int,),
    "cuDeviceGetCount": (_to_int,),
    "cuDeviceGet": (_to_int, _int),
    "cuDeviceGetName": (_text, _int, _int),
    "cuDeviceGetAttribute": (_to_int, _int, _int),
    "cuDeviceGetPCIBusId": (_text, _int, _int),
    "cuDeviceGetUuid_v2": (_text, _int),
    "cuDeviceTotalMem_v2": (_to_size, _int),
    "cuDevicePrimaryCtxRetain": (_to_handle, _int),
    "cuCtxPushCurrent_v2": (_handle,),
    "cuCtxPopCurrent_v2": (_to_handle,),
    "cuCtxSetCurrent": (_handle,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (_to_handle, _text),
    "cuModuleGetFunction": (_to_handle, _handle, _text),
    "cuModuleUnload": (_handle,),
    "cuFuncSetAttribute": (_handle, _int, _int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (_to_int, _handle, _int, (_IN, c_size_t)),
    "cuOccupancyMaxActiveClusters": (_to_int, _handle, (_IN, POINTER(LaunchConfig))),
    "cuThreadExchangeStreamCaptureMode": ((_IN, POINTER(c_int)),),
    "cuStreamBeginCapture_v2": (_handle, _int),
    "cuStreamEndCapture": (_handle, _to_handle),
    "cuGraphInstantiateWithFlags": (_to_handle, _handle, (_IN, c_uint64)),
    "cuGraphLaunch": (_handle, _handle),
    "cuGraphExecDestroy": (_handle,),
    "cuGraphDestroy": (_handle,),
}


def open_library(path: str = SONAME) -> SimpleNamespace:
    """The functions of a driver library, by name without `_v2`. Handles are integers.

    Each takes its input parameters, and returns a tuple: the code, 0 for success, and the output parameters. All let
    other Python threads run meanwhile. `cuLaunchKernelEx` alone checks no argument and returns just the code: each of
    its arguments has to be a ctypes pointer, or None. Raises `DeviceError` if there is no such library, or one so old
    that it lacks a function.
    """
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver was found on this machine ({error}); install one to use a GPU") from None
    try:
        functions = {name.removesuffix("_v2"): _bound(library, name, FUNCTIONS[name]) for name in FUNCTIONS}
        return SimpleNamespace(**functions, cuLaunchKernelEx=library.cuLaunchKernelEx)
    except AttributeError as error:
        raise DeviceError(f"the NVIDIA driver is too old ({error}); install version 525 or newer") from None


def _bound(library: ctypes.CDLL, name: str, parameters: tuple[_Parameter, ...]) -> Callable[..., tuple[Any, ...]]:
    prototype = ctypes.CFUNCTYPE(c_int, *(kind for _, kind in parameters))
    function: Any = prototype((name, library), tuple((direction,) for direction, _ in parameters))
    outputs = [index for index, (direction, _) in enumerate(parameters) if direction == _OUT]

    def with_outputs(code: int, _: object, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (code, *(arguments[index].value for index in outputs))

    function.errcheck = with_outputs
    return function  # type: ignore[no-any-return]
