"""The properties of a device, from the driver, without a context on it."""

from __future__ import annotations

from ctypes import create_string_buffer

from hadagen.errors import DeviceError, printable
from hadagen.gpu import libcuda
from hadagen.gpu.driver import bindings, check, driver_version
from hadagen.gpu.gpu_class import class_name, memory_of, nvml_gpu
from hadagen.problem.trial import Environment


def device_environment(device_index: int = 0) -> Environment:
    """The environment of a CUDA device. `nvcc` is "", because only a kernel has one.

    Raises `DeviceError` if there is no driver or no such device.
    """
    driver = bindings()
    count = check(driver.cuDeviceGetCount(), "counting CUDA devices")
    if not 0 <= device_index < count:
        raise DeviceError(f"CUDA device {device_index} does not exist; this machine shows {count}, numbered from 0")
    device = check(driver.cuDeviceGet(device_index), f"opening CUDA device {device_index}")

    def attribute(which: int) -> int:
        return int(check(driver.cuDeviceGetAttribute(which, device), f"asking CUDA device {device_index}"))

    name = create_string_buffer(256)
    check(driver.cuDeviceGetName(name, len(name), device), f"asking CUDA device {device_index}")
    cuda = int(check(driver.cuDriverGetVersion(), "asking the driver's version"))
    major = attribute(libcuda.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = attribute(libcuda.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    memory_bytes, gpu = memory_of(device_index), nvml_gpu(device_index)
    return Environment(
        gpu=printable(class_name(name.value.decode(errors="replace"), memory_bytes, gpu)),
        compute_capability=f"{major}.{minor}",
        sms=attribute(libcuda.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        l2_bytes=attribute(libcuda.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        driver=driver_version(),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        sm_clock_mhz=attribute(libcuda.CU_DEVICE_ATTRIBUTE_CLOCK_RATE) // 1000,
        memory_clock_mhz=attribute(libcuda.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) // 1000,
        memory_bytes=memory_bytes,
        power_limit_watts=(gpu and gpu.power_limit_watts()) or 0,
    )
