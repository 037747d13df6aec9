"""The class of a GPU: GPUs of one class have the same winners.

The name of a class is the name of the GPU as the driver gives it. Settings that differ from the defaults of such a GPU
follow:

    NVIDIA H200                         as it comes
    NVIDIA H200, 450 W                  its power limit is lower than the default
    NVIDIA H200, 1200 MHz               its application clock is lower (nvidia-smi -ac)
    NVIDIA H200, 1593 MHz memory        its application clock of the memory is lower
    NVIDIA GeForce RTX 3060, 8 GiB      the same name was sold with other memory too

So a GPU as it comes has the name that it always had. The name follows from the device alone. It is the same in every
process and on every machine. NVML does not tell a locked clock (nvidia-smi -lgc), so no name has one.
"""

from __future__ import annotations

import functools
from ctypes import create_string_buffer
from uuid import UUID

from hadagen.errors import DeviceError
from hadagen.gpu import nvml
from hadagen.gpu.driver import bindings, check

# The usual memory, in GiB, of GPUs that were sold with other memory and the same name. From NVIDIA's specifications.
_USUAL_GIB = {
    "NVIDIA GeForce RTX 2060": 6,
    "NVIDIA GeForce RTX 3050": 8,
    "NVIDIA GeForce RTX 3060": 12,
    "NVIDIA GeForce RTX 3080": 10,
    "NVIDIA GeForce RTX 4060 Ti": 8,
    "NVIDIA GeForce RTX 5060 Ti": 16,
    "NVIDIA H20": 96,
}


def class_name(model: str, memory_bytes: int, gpu: nvml.Gpu | None) -> str:
    """The name of the class of a GPU.

    model: its name as the driver gives it. memory_bytes: all of its memory, 0 if that is not known. gpu: None if NVML
    does not know it.
    """
    return ", ".join([model, *_memory(model, memory_bytes), *(_settings(gpu) if gpu else ())])


def _memory(model: str, memory_bytes: int) -> list[str]:
    gib = -(-memory_bytes >> 30)
    return [f"{gib} GiB"] if memory_bytes and gib != _USUAL_GIB.get(model, gib) else []


def _settings(gpu: nvml.Gpu) -> list[str]:
    limit, usual = gpu.power_limit_watts(), gpu.default_power_limit_watts()
    differs = [f"{limit} W"] if limit and usual and limit < usual else []
    for kind, unit in ((nvml.NVML_CLOCK_GRAPHICS, "MHz"), (nvml.NVML_CLOCK_MEM, "MHz memory")):
        clock, default = gpu.application_clock_mhz(kind), gpu.default_application_clock_mhz(kind)
        # At the default some GPUs go faster, up to the maximum.
        if clock and default and clock != default and clock < (gpu.max_clock_mhz(kind) or default):
            differs.append(f"{clock} {unit}")
    return differs


@functools.cache
def class_of(device_index: int, model: str) -> str:
    """The name of the class of a CUDA device, as it was when this process first asked; `model` without NVML."""
    try:
        return class_name(model, memory_of(device_index), nvml_gpu(device_index))
    except DeviceError:
        return model


def memory_of(device_index: int) -> int:
    """The bytes of memory of a CUDA device, up to whole GiB, because each driver reserves another part. Raises
    `DeviceError`."""
    driver, doing = bindings(), f"asking CUDA device {device_index}"
    size = int(check(driver.cuDeviceTotalMem(check(driver.cuDeviceGet(device_index), doing)), doing))
    return -(-size >> 30) << 30


def nvml_gpu(device_index: int) -> nvml.Gpu | None:
    """A CUDA device as NVML knows it; None if it does not. CUDA may number devices in another order, so it is found by
    its PCI bus. Raises `DeviceError` if there is no such device."""
    driver, doing = bindings(), f"asking CUDA device {device_index}"
    device, bus = check(driver.cuDeviceGet(device_index), doing), create_string_buffer(32)
    check(driver.cuDeviceGetPCIBusId(bus, len(bus), device), doing)
    return nvml.find_gpu(bus.value.decode(errors="replace"), f"MIG-{uuid_of(device_index)}")


def uuid_of(device_index: int) -> str:
    """The UUID of a CUDA device, or of the part of a GPU (MIG) that it is, without the "GPU-" or "MIG-" in front.
    Raises `DeviceError`."""
    driver, doing = bindings(), f"asking CUDA device {device_index}"
    uuid = create_string_buffer(16)
    check(driver.cuDeviceGetUuid(uuid, check(driver.cuDeviceGet(device_index), doing)), doing)
    return str(UUID(bytes=uuid.raw))
