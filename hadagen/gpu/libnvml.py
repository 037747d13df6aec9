"""libnvidia-ml.so.1 (NVML), the part of the NVIDIA driver that tells the state of GPUs, through ctypes.

Nothing here fails. Where NVML is missing, too old, or refuses a question, as in some containers and for some GPUs, the
answer is None. Names, types and values are those of nvml.h.

NVML: https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p, create_string_buffer
from typing import Any

SONAME = "libnvidia-ml.so.1"

NVML_SUCCESS = 0
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_INSUFFICIENT_SIZE = 7
NVML_CLOCK_GRAPHICS = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2

# Bits of `Gpu.event_reasons`. Names of driver 535; earlier ones say throttle reasons.
GPU_IDLE = 0x1
CLOCKS_SETTING = 0x2
SW_POWER_CAP = 0x4
HW_SLOWDOWN = 0x8
SYNC_BOOST = 0x10
SW_THERMAL_SLOWDOWN = 0x20
HW_THERMAL_SLOWDOWN = 0x40
HW_POWER_BRAKE_SLOWDOWN = 0x80

_NOT_AVAILABLE = (1 << 64) - 1
_MOST_PROCESSES = 4096


class ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = [
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    ]


class ProcessUtilization(ctypes.Structure):
    """nvmlProcessUtilizationSample_t."""

    _fields_ = [
        ("pid", c_uint),
        ("timeStamp", c_ulonglong),
        ("smUtil", c_uint),
        ("memUtil", c_uint),
        ("encUtil", c_uint),
        ("decUtil", c_uint),
    ]


class Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class Gpu:
    """One GPU as NVML knows it. Every method returns None if NVML does not say.

    `owner`: the handle of the whole GPU where `handle` is a part of it (MIG).
    """

    def __init__(self, library: ctypes.CDLL, handle: c_void_p, owner: c_void_p) -> None:
        self._library, self._handle, self._owner = library, handle, owner
        self._seen = 0  # the newest sample, in microseconds

    def power_limit_watts(self) -> int | None:
        """The power limit that the driver enforces now, whoever set it."""
        return _watts(self._number("nvmlDeviceGetEnforcedPowerLimit"))

    def default_power_limit_watts(self) -> int | None:
        return _watts(self._number("nvmlDeviceGetPowerManagementDefaultLimit"))

    def application_clock_mhz(self, kind: int) -> int | None:
        """The clock that applications get by the setting of `nvidia-smi -ac`. `kind`: a NVML_CLOCK."""
        return self._number("nvmlDeviceGetApplicationsClock", c_uint(kind))

    def default_application_clock_mhz(self, kind: int) -> int | None:
        return self._number("nvmlDeviceGetDefaultApplicationsClock", c_uint(kind))

    def max_clock_mhz(self, kind: int) -> int | None:
        return self._number("nvmlDeviceGetMaxClockInfo", c_uint(kind))

    def clock_mhz(self, kind: int) -> int | None:
        """The clock now."""
        return self._number("nvmlDeviceGetClockInfo", c_uint(kind))

    def event_reasons(self) -> int | None:
        """The reasons why the clocks are not higher now, as bits."""
        reasons = c_ulonglong()
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if self._call(name, self._owner, byref(reasons)) == NVML_SUCCESS:
                return reasons.value
        return None

    def utilization(self) -> int | None:
        """The percentage of the last sample period (1/6 to 1 s) in which a kernel of any process ran."""
        rates = Utilization()
        done = self._call("nvmlDeviceGetUtilizationRates", self._handle, byref(rates))
        return int(rates.gpu) if done == NVML_SUCCESS else None

    def memory_used(self) -> int | None:
        """The bytes of GPU memory that all processes have together."""
        memory = Memory()
        done = self._call("nvmlDeviceGetMemoryInfo", self._handle, byref(memory))
        return int(memory.used) if done == NVML_SUCCESS else None

    def processes(self) -> dict[int, int] | None:
        """Process ID → its GPU memory in bytes (0 if unknown), for each process with a context. A container may not see
        the processes outside, or may see IDs other than its own."""
        found: dict[int, int] = {}
        answered = False
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"):
            listed = self._listed(ProcessInfo, lambda array, count, name=name: (name, self._handle, count, array))
            answered |= listed is not None
            for process in listed or ():
                known = process.usedGpuMemory != _NOT_AVAILABLE
                found[process.pid] = max(found.get(process.pid, 0), process.usedGpuMemory if known else 0)
        return found if answered else None

    def process_utilization(self) -> dict[int, int] | None:
        """Process ID → the highest percentage of a sample period in which it ran, for each process that ran since the
        last call."""
        since = c_ulonglong(self._seen)
        name = "nvmlDeviceGetProcessUtilization"
        samples = self._listed(ProcessUtilization, lambda array, count: (name, self._handle, array, count, since))
        if samples is None:
            return None
        found: dict[int, int] = {}
        for sample in samples:
            self._seen = max(self._seen, sample.timeStamp)
            if sample.smUtil <= 100:  # some drivers leave old memory in samples
                found[sample.pid] = max(found.get(sample.pid, 0), sample.smUtil)
        return found

    def process_name(self, pid: int) -> str:
        """The name of the program of a process; "" if it is not known."""
        name = create_string_buffer(256)
        if self._call("nvmlSystemGetProcessName", c_uint(pid), name, c_uint(len(name))) != NVML_SUCCESS:
            return ""
        return name.value.decode(errors="replace").rpartition("/")[2].partition(" ")[0]

    def _number(self, name: str, *arguments: Any) -> int | None:
        """The number that a function of NVML returns for the whole GPU."""
        value = c_uint()
        return value.value if self._call(name, self._owner, *arguments, byref(value)) == NVML_SUCCESS else None

    def _listed(self, kind: Any, call: Any) -> list[Any] | None:
        """The structures that a function writes into an array; [] if it finds none, None if it fails."""
        room = 64
        while room <= _MOST_PROCESSES:
            array, count = (kind * room)(), c_uint(room)
            code = self._call(*call(array, byref(count)))
            if code != NVML_ERROR_INSUFFICIENT_SIZE:
                break
            room = max(2 * room, count.value)
        if code == NVML_ERROR_NOT_FOUND:
            return []
        return list(array[: count.value]) if code == NVML_SUCCESS else None

    def _call(self, name: str, *arguments: Any) -> int:
        return _call(self._library, name, *arguments)


def find_gpu(pci_bus_id: str, uuid: str = "") -> Gpu | None:
    """The GPU at a PCI bus, such as "0000:18:00.0"; None if NVML does not know it. With the UUID of a part of it, which
    begins with MIG, processes and their memory are those of that part."""
    library = open_library()
    if library is None:
        return None
    owner, part = c_void_p(), c_void_p()
    if _call(library, "nvmlDeviceGetHandleByPciBusId_v2", c_char_p(pci_bus_id.encode()), byref(owner)) != NVML_SUCCESS:
        return None
    is_part = uuid.startswith("MIG") and (
        _call(library, "nvmlDeviceGetHandleByUUID", c_char_p(uuid.encode()), byref(part)) == NVML_SUCCESS
    )
    return Gpu(library, part if is_part else owner, owner)


def driver_version() -> str:
    """The version of the driver, such as "580.82.07"; "" if NVML does not say."""
    library, text = open_library(), create_string_buffer(96)
    if library is None or _call(library, "nvmlSystemGetDriverVersion", text, c_uint(len(text))) != NVML_SUCCESS:
        return ""
    return text.value.decode(errors="replace")


@functools.cache
def open_library(path: str = SONAME) -> ctypes.CDLL | None:
    """The library, initialized until the process ends; None if there is none, or it does not start."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    return library if _call(library, "nvmlInit_v2") == NVML_SUCCESS else None


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> int:
    """The code that a function returns; -1 if an older library has no such function."""
    function = getattr(library, name, None)
    return -1 if function is None else int(function(*arguments))


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)
