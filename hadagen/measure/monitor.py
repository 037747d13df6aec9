"""`Monitor`: finds disturbances of timings on a GPU, with NVML.

Times are wrong while another process runs on the GPU, or while the GPU is slowed down because it is hot or short of
power. `Monitor.look` asks before and after something is timed. In the good case it takes a few questions of
microseconds to milliseconds, and no pause.

*Other processes.* A process that holds memory and does nothing disturbs nothing, and a container may see neither the
processes outside nor its own number. So a process counts only if it runs, and there are two ways to know:

- NVML names the processes that ran lately, with ours among them: then the others in that list are those that run.
- Else there is only the time in which any kernel ran. It tells of others while we run nothing ourselves, and we wait
  until our own work has left the sample. That takes up to `_SAMPLE_S`. So it is done only on a suspicion: others are
  listed, or the memory of others has grown. While others are listed it is done again every `_AGAIN_S`.

*Slowed down.* The bits for heat, for the power brake and for a hardware slowdown count. The power cap does not: a GPU
at its default limit reaches it under load, and then its clocks are as they always are for that kernel. A lower limit is
another class (`hadagen.gpu.gpu_class`). A bit may also be set while the clocks change, so it must still be set a moment
later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

from hadagen.gpu import nvml
from hadagen.gpu.gpu_class import class_name
from hadagen.problem.target import model_of
from hadagen.problem.trial import Disturbed, Environment

BUSY_PERCENT = 10  # of the time of another; with less, the median of the replays is still that of a kernel alone
_SAMPLE_S = 1.5  # a sample period is at most a second
_POLL_S = 0.1
_AGAIN_S = 5.0
_SETTLE_S = 0.05  # in which clocks have changed
_GROWN_BYTES = 64 << 20  # less than any CUDA context takes
_SLOW_CLOCK = 0.7  # of the clock after warming up: less than any power state under load

_SLOWED = {
    nvml.HW_THERMAL_SLOWDOWN: "it is too hot (hardware thermal slowdown)",
    nvml.SW_THERMAL_SLOWDOWN: "it is too hot (software thermal slowdown)",
    nvml.HW_POWER_BRAKE_SLOWDOWN: "its power supply holds it back (hardware power brake)",
    nvml.HW_SLOWDOWN: "the hardware holds it back (hardware slowdown)",
}
_IN_NORMAL_USE = {
    nvml.GPU_IDLE: "it is idle",
    nvml.SW_POWER_CAP: "its power limit holds it back",
    nvml.CLOCKS_SETTING: "its clock setting holds it back",
    nvml.SYNC_BOOST: "other GPUs of its boost group hold it back",
}
_CHOOSE = "choose another GPU with --device or CUDA_VISIBLE_DEVICES"
_SET_BACK = "set it back, or run the same command again to measure it as it is now"
_STOP = f"stop it, or {_CHOOSE}"
_COOL = f"let it cool down or look for the cause with nvidia-smi -q -d PERFORMANCE, or {_CHOOSE}"


class Monitor:
    """Looks at the GPU on which this process times. Make it before there is a CUDA context, and call `begin` once the
    GPU is warm.

    gpu: None if NVML does not know it; then nothing disturbs. environment: that of the device. own_bytes: returns the
    memory that this process has asked for, in bytes.
    """

    def __init__(
        self,
        gpu: nvml.Gpu | None,
        environment: Environment,
        own_bytes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gpu, self._environment, self._own_bytes = gpu, environment, own_bytes
        self._clock, self._sleep = clock, sleep
        self._ours = {os.getpid()}
        self._is_named = False  # whether NVML names us among those that ran
        self._warm_mhz = 0
        self._known: Collection[int] = ()  # the other processes at the last look at what runs
        self._foreign_bytes = 0  # at that time
        self._looked = 0.0  # when that was
        self._suspects = False  # whether something ran then
        if gpu is not None:
            self._before = set(gpu.processes() or ())
            self._suspects = (gpu.utilization() or 0) >= BUSY_PERCENT  # with no work of ours

    def begin(self) -> None:
        """Find out which process is this one, and how fast the warm GPU is."""
        gpu = self._gpu
        if gpu is None:
            return
        new = set(gpu.processes() or ()) - self._before
        if os.getpid() not in new and len(new) == 1:  # a container, where we have another number
            self._ours |= new
        gpu.process_utilization()  # from here on
        self._warm_mhz = gpu.clock_mhz(nvml.NVML_CLOCK_SM) or 0
        self._foreign_bytes = self._foreign(gpu)

    def look(self, after: bool = False) -> Disturbed | None:
        """The disturbance now; None if there is none. `after`: whether something was timed until now."""
        gpu = self._gpu
        if gpu is None:
            return None
        return self._changed(gpu) or self._slowed(gpu, after) or self._busy(gpu)

    def crowded(self) -> Disturbed | None:
        """Who may be to blame if memory runs out; None if nobody else is known to have any."""
        if (gpu := self._gpu) is None:
            return None
        others, grown = self._others(gpu), self._foreign(gpu) - self._foreign_bytes
        if not any(others.values()) and grown <= _GROWN_BYTES:
            return None
        who = named(gpu, others) if others else "another process"
        gib = max(sum(others.values()), grown) / (1 << 30)
        return Disturbed(f"the memory of the GPU is full, of which {who} has {gib:.1f} GiB", _STOP)

    def _changed(self, gpu: nvml.Gpu) -> Disturbed | None:
        was = self._environment
        now = class_name(model_of(was.gpu), was.memory_bytes, gpu)
        if now == was.gpu:
            return None
        return Disturbed(f"its settings were changed, and {was.gpu} became {now}", _SET_BACK)

    def _slowed(self, gpu: nvml.Gpu, after: bool) -> Disturbed | None:
        reasons = self._slowing(gpu, after)
        if reasons:
            self._sleep(_SETTLE_S)
            reasons = self._slowing(gpu, after)
        return Disturbed(f"the GPU is slowed down: {reasons}", _COOL) if reasons else None

    def _slowing(self, gpu: nvml.Gpu, after: bool) -> str:
        bits = gpu.event_reasons() or 0
        for bit, reason in _SLOWED.items():
            if bits & bit:
                return reason
        mhz = gpu.clock_mhz(nvml.NVML_CLOCK_SM) if after else None
        if mhz and mhz < _SLOW_CLOCK * self._warm_mhz and not bits & (nvml.GPU_IDLE | nvml.SW_POWER_CAP):
            return f"its clock fell from {self._warm_mhz} to {mhz} MHz"
        return ""

    def _busy(self, gpu: nvml.Gpu) -> Disturbed | None:
        others, foreign = self._others(gpu), self._foreign(gpu)
        has_grown = foreign > self._foreign_bytes + _GROWN_BYTES
        if not (others or has_grown or self._suspects):
            return None
        ran = gpu.process_utilization() or {}
        self._is_named |= bool(self._ours & ran.keys())
        if self._is_named:
            busy = {pid: percent for pid, percent in ran.items() if pid not in self._ours and percent >= BUSY_PERCENT}
            self._foreign_bytes, self._suspects = foreign, False
            if not busy:
                return None
            use = "use" if len(busy) > 1 else "uses"
            return Disturbed(f"{named(gpu, busy)} {use} the GPU, {max(busy.values())} % of the time", _STOP)
        is_new = has_grown or not others.keys() <= set(self._known) or self._suspects
        if not is_new and self._clock() < self._looked + _AGAIN_S:
            return None
        percent = self._idle_utilization(gpu)
        self._known, self._foreign_bytes, self._looked = set(others), foreign, self._clock()
        self._suspects = percent >= BUSY_PERCENT
        if not self._suspects:
            return None
        who = f"{named(gpu, others)} or another process" if others else "another process"
        return Disturbed(f"{who} uses the GPU, {percent} % of the time", _STOP)

    def _idle_utilization(self, gpu: nvml.Gpu) -> int:
        """The percentage of the time that others use, once our own work has left the sample."""
        end = self._clock() + _SAMPLE_S
        while (percent := gpu.utilization() or 0) >= BUSY_PERCENT and self._clock() < end:
            self._sleep(_POLL_S)
        return percent

    def _others(self, gpu: nvml.Gpu) -> dict[int, int]:
        return {pid: size for pid, size in (gpu.processes() or {}).items() if pid not in self._ours}

    def _foreign(self, gpu: nvml.Gpu) -> int:
        """The memory that this process did not ask for, its context included."""
        return (gpu.memory_used() or 0) - self._own_bytes()


def state_text(gpu: nvml.Gpu) -> str:
    """Power limit and clock, with their usual values, what holds the clocks down now, and which processes have a
    context, as far as NVML says."""
    limit, usual = gpu.power_limit_watts(), gpu.default_power_limit_watts()
    mhz, most = gpu.clock_mhz(nvml.NVML_CLOCK_SM), gpu.max_clock_mhz(nvml.NVML_CLOCK_SM)
    bits, processes = gpu.event_reasons(), gpu.processes()
    reasons = [text for bit, text in (_SLOWED | _IN_NORMAL_USE).items() if bits and bits & bit]
    others = sorted(set(processes or ()) - {os.getpid()})
    said = [
        f"power limit {limit} W" + (f" of {usual} W by default" if usual else "") if limit else "power limit unknown",
        f"clock {mhz} MHz" + (f" of at most {most} MHz" if most else "") if mhz else "clock unknown",
        "what slows it is unknown" if bits is None else " and ".join(reasons) or "nothing slows it",
        "other processes unknown" if processes is None else named(gpu, others) if others else "no other process",
    ]
    return ", ".join(said)


def named(gpu: nvml.Gpu, processes: Collection[int]) -> str:
    """Processes by number and program, such as "process 12 (python3)", at most three."""
    names = [f"{pid} ({name})" if (name := gpu.process_name(pid)) else f"{pid}" for pid in sorted(processes)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"process{'es' * (len(names) > 1)} {', '.join(names[:3])}{more}"
