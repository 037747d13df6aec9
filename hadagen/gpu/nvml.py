"""The state of GPUs from NVML, a part of the NVIDIA driver, through NVIDIA's package nvidia-ml-py.

Nothing here fails. If NVML is missing, is too old, or refuses a question, as in some containers and for some GPUs, the
answer is None.

NVML: https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pynvml

NVML_CLOCK_GRAPHICS: int = pynvml.NVML_CLOCK_GRAPHICS
NVML_CLOCK_SM: int = pynvml.NVML_CLOCK_SM
NVML_CLOCK_MEM: int = pynvml.NVML_CLOCK_MEM

# Bits of `Gpu.event_reasons`.
GPU_IDLE: int = pynvml.nvmlClocksEventReasonGpuIdle
CLOCKS_SETTING: int = pynvml.nvmlClocksEventReasonApplicationsClocksSetting
SW_POWER_CAP: int = pynvml.nvmlClocksEventReasonSwPowerCap
HW_SLOWDOWN: int = pynvml.nvmlClocksEventReasonHwSlowdown
SYNC_BOOST: int = pynvml.nvmlClocksEventReasonSyncBoost
SW_THERMAL_SLOWDOWN: int = pynvml.nvmlClocksEventReasonSwThermalSlowdown
HW_THERMAL_SLOWDOWN: int = pynvml.nvmlClocksEventReasonHwThermalSlowdown
HW_POWER_BRAKE_SLOWDOWN: int = pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown


class Gpu:
    """One GPU as NVML knows it. Every method returns None if NVML does not say.

    `owner`: the handle of the whole GPU where `handle` is a part of it (MIG).
    """

    def __init__(self, handle: Any, owner: Any) -> None:
        self._handle, self._owner = handle, owner
        self._seen = 0  # the newest sample, in microseconds

    def power_limit_watts(self) -> int | None:
        """The power limit that the driver enforces now, whoever set it."""
        return _watts(_number(pynvml.nvmlDeviceGetEnforcedPowerLimit, self._owner))

    def default_power_limit_watts(self) -> int | None:
        return _watts(_number(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, self._owner))

    def application_clock_mhz(self, kind: int) -> int | None:
        """The clock that applications get by the setting of `nvidia-smi -ac`. `kind`: a NVML_CLOCK."""
        return _number(pynvml.nvmlDeviceGetApplicationsClock, self._owner, kind)

    def default_application_clock_mhz(self, kind: int) -> int | None:
        return _number(pynvml.nvmlDeviceGetDefaultApplicationsClock, self._owner, kind)

    def max_clock_mhz(self, kind: int) -> int | None:
        return _number(pynvml.nvmlDeviceGetMaxClockInfo, self._owner, kind)

    def clock_mhz(self, kind: int) -> int | None:
        """The clock now."""
        return _number(pynvml.nvmlDeviceGetClockInfo, self._owner, kind)

    def event_reasons(self) -> int | None:
        """The reasons why the clocks are not higher now, as bits."""
        reasons = _number(pynvml.nvmlDeviceGetCurrentClocksEventReasons, self._owner)
        if reasons is None:  # drivers before 535 call them throttle reasons
            reasons = _number(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._owner)
        return reasons

    def utilization(self) -> int | None:
        """The percentage of the last sample period (1/6 to 1 s) in which a kernel of any process ran."""
        rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        return None if rates is None else int(rates.gpu)

    def memory_used(self) -> int | None:
        """The bytes of GPU memory that all processes have together."""
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, self._handle)
        return None if memory is None else int(memory.used)

    def processes(self) -> dict[int, int] | None:
        """Process ID → its GPU memory in bytes (0 if unknown), for each process with a context. A container may not see
        the processes outside, or may see IDs other than its own."""
        asked = pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3
        answers = [_ask(question, self._handle) for question in asked]
        if all(listed is None for listed in answers):
            return None
        found: dict[int, int] = {}
        for process in (process for listed in answers for process in listed or ()):
            found[process.pid] = max(found.get(process.pid, 0), process.usedGpuMemory or 0)
        return found

    def process_utilization(self) -> dict[int, int] | None:
        """Process ID → the highest percentage of a sample period in which it ran, for each process that ran since the
        last call."""
        samples = _ask(_process_samples, self._handle, self._seen)
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
        return (_ask(pynvml.nvmlSystemGetProcessName, pid) or "").rpartition("/")[2].partition(" ")[0]


def find_gpu(pci_bus_id: str, uuid: str = "") -> Gpu | None:
    """The GPU at a PCI bus, such as "0000:18:00.0"; None if NVML does not know it. With the UUID of a part of it, which
    begins with MIG, processes and their memory are those of that part."""
    if not is_there():
        return None
    owner = _ask(pynvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
    part = _ask(pynvml.nvmlDeviceGetHandleByUUID, uuid) if uuid.startswith("MIG") else None
    return None if owner is None else Gpu(owner if part is None else part, owner)


def driver_version() -> str:
    """The version of the driver, such as "580.82.07"; "" if NVML does not say."""
    return (is_there() and _ask(pynvml.nvmlSystemGetDriverVersion)) or ""


@functools.cache
def is_there() -> bool:
    """Whether there is an NVML that starts. It stays initialized until the process ends."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of NVML; None if it refuses, if an older driver lacks the question, or if the answer is no UTF-8."""
    try:
        return question(*arguments)
    except (pynvml.NVMLError, UnicodeDecodeError):
        return None


def _number(question: Callable[..., Any], *arguments: Any) -> int | None:
    answer = _ask(question, *arguments)
    return None if answer is None else int(answer)


def _process_samples(handle: Any, since: int) -> Any:
    """The samples of processes since a time in microseconds; () if there are none."""
    try:
        return pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND):
            return ()
        raise


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)
