"""A GPU as NVML would tell of it, with a clock of its own: what it says changes at times that a test names."""

import os
from dataclasses import dataclass, field
from typing import Any

from hadagen.gpu.nvml import NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM, NVML_CLOCK_SM

US = os.getpid()


@dataclass
class FakeGpu:
    """An idle H200 as it comes. `later`: [(second, {name: value})], in order. `asked`: questions so far."""

    limit: int | None = 700
    default_limit: int | None = 700
    application_clocks: dict[int, int] = field(default_factory=dict)
    default_clocks: dict[int, int] = field(default_factory=lambda: {NVML_CLOCK_GRAPHICS: 1980, NVML_CLOCK_MEM: 3201})
    mhz: int | None = 1980
    reasons: int | None = 0
    percent: int | None = 0
    used: int | None = 1 << 30
    listed: dict[int, int] | None = field(default_factory=dict)
    ran: dict[int, int] | None = None
    names: dict[int, str] = field(default_factory=dict)
    later: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    now: float = 0.0
    asked: int = 0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.later and self.later[0][0] <= self.now:
            for name, value in self.later.pop(0)[1].items():
                assert hasattr(self, name)
                setattr(self, name, value)

    def power_limit_watts(self) -> int | None:
        return self._say(self.limit)

    def default_power_limit_watts(self) -> int | None:
        return self._say(self.default_limit)

    def application_clock_mhz(self, kind: int) -> int | None:
        return self._say(self.application_clocks.get(kind, self.default_clocks.get(kind)))

    def default_application_clock_mhz(self, kind: int) -> int | None:
        return self._say(self.default_clocks.get(kind))

    def max_clock_mhz(self, kind: int) -> int | None:
        return self._say({NVML_CLOCK_MEM: 3201}.get(kind, 1980))

    def clock_mhz(self, kind: int) -> int | None:
        assert kind == NVML_CLOCK_SM
        return self._say(self.mhz)

    def event_reasons(self) -> int | None:
        return self._say(self.reasons)

    def utilization(self) -> int | None:
        return self._say(self.percent)

    def memory_used(self) -> int | None:
        return self._say(self.used)

    def processes(self) -> dict[int, int] | None:
        return self._say(self.listed)

    def process_utilization(self) -> dict[int, int] | None:
        return self._say(self.ran)

    def process_name(self, pid: int) -> str:
        return self.names.get(pid, "")

    def _say(self, answer: Any) -> Any:
        self.asked += 1
        return answer


class SilentGpu(FakeGpu):
    """NVML is there and answers nothing, as for some GPUs in some containers."""

    def _say(self, answer: Any) -> Any:
        return None
