"""The results of a variant: the compiled `Kernel`, and the `Trial` that says how it did on a device."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from hadagen.problem.launch import LaunchSpec
from hadagen.problem.problem import Problem
from hadagen.problem.regimes import Cache, Destination


def utc_now() -> str:
    """The date of a trial that ends now, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def knobs_key(knobs: Mapping[str, Any]) -> str:
    """Canonical text of knobs: equal knobs give equal text, whatever their order."""
    return json.dumps(dict(knobs), sort_keys=True, separators=(",", ":"))


def check_knobs(knobs: object) -> None:
    """Raises `ValueError` where these are not names with a number or a text each."""
    if not isinstance(knobs, dict) or not all(
        type(name) is str and type(value) in (int, str) for name, value in knobs.items()
    ):
        raise ValueError(f"{knobs!r:.40} are no knobs")


class Outcome(str, Enum):
    """How a trial ended."""

    ILLEGAL = "illegal"
    COMPILE_FAILED = "compile_failed"
    WRONG_ANSWER = "wrong_answer"
    LAUNCH_FAILED = "launch_failed"
    TIMEOUT = "timeout"
    UNSTABLE = "unstable"
    OK = "ok"


class Provenance(str, Enum):
    MEASURED = "measured"
    ESTIMATED = "estimated"


@dataclass(frozen=True)
class Environment:
    """The device and software a trial ran on.

    `gpu`: the name of its class (`hadagen.gpu.gpu_class`); "" for an estimate, which ran on no device. Clocks are the
    maximum clocks. `memory_bytes` is rounded up to whole GiB. `memory_bytes` and `power_limit_watts` are 0 if they are
    not known, as in older trials.
    """

    gpu: str = ""
    compute_capability: str = ""
    sms: int = 0
    l2_bytes: int = 0
    driver: str = ""
    cuda: str = ""
    nvcc: str = ""
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0
    memory_bytes: int = 0
    power_limit_watts: int = 0


@dataclass(frozen=True)
class Timing:
    """Times of one launch in microseconds: of the kernel, and of a copy of the same bytes in the same process.

    `elements` is rows · n; the rows are `timed_rows` of the problem.
    """

    elements: int
    destination: Destination
    cache: Cache
    us: float  # median
    us_low: float  # first quartile
    us_high: float  # third quartile
    copy_us: float

    @property
    def fraction_of_copy(self) -> float:
        return self.copy_us / self.us


def kernel_digest(cubin: bytes, launch: LaunchSpec) -> str:
    """The name of a kernel: SHA-256 of its code and launch. Kernels with equal names do the same in the same time."""
    return hashlib.sha256(cubin + json.dumps(launch.digested(), sort_keys=True).encode()).hexdigest()


def recipe_digest(problem: Problem, knobs: Mapping[str, Any], launch: LaunchSpec) -> str:
    """The name of a kernel that is only compiled where it is called: SHA-256 of its problem, knobs and launch."""
    said = {"problem": problem.key, "knobs": dict(knobs), "launch": launch.digested()}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Kernel:
    """A compiled variant; without `cubin` and `ptx` one that is to be compiled where it is called."""

    digest: str  # `kernel_digest`, or `recipe_digest`
    entry: str
    arch: str
    source: str
    cubin: bytes
    ptx: bytes
    launch: LaunchSpec
    registers: int
    spill_bytes: int
    nvcc: str  # the compiler: "13.0.88" is an nvcc, "nvrtc 13.0.88" an NVRTC, "ptxas 12.9.86" the assembler of its PTX
    static_shared_bytes: int = 0  # of one block, besides launch.shared_bytes

    def check(self) -> None:
        """Check a kernel that was read, with its cubin. Raises `ValueError` if its digest is not that of its code and
        launch, or its entry is no name."""
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.entry):
            raise ValueError(f"the entry {self.entry!r:.40} of a kernel is no identifier")
        if self.digest != kernel_digest(self.cubin, self.launch):
            raise ValueError(f"kernel {self.digest:.12} does not match its digest")


@dataclass(frozen=True)
class NotTried:
    """Takes the place of a result: the compiler of the variant died for a `reason` that may pass, such as "nvcc was
    killed by signal 9"."""

    reason: str


@dataclass(frozen=True)
class Disturbed(NotTried):
    """The device was busy or throttled while the variant was timed, for a `reason` such as "process 12 (python3) uses
    the GPU". `advice`: what to do about it."""

    advice: str = ""


@dataclass(frozen=True)
class Trial:
    """One variant of a problem on one device.

    `errors`: relative error ‖out − ref‖ / ‖ref‖ against float64, by class of input.
    """

    problem: Problem
    arch: str
    knobs: dict[str, Any]
    outcome: Outcome
    provenance: Provenance
    kernel: Kernel | None = None
    detail: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    environment: Environment = Environment()
    date: str = ""  # UTC, ISO 8601
    seconds: float = 0.0  # wall time the trial took

    def __post_init__(self) -> None:
        # A compiler may quote a name that is no UTF-8, and Python makes lone surrogates of such a name: no file and no
        # database takes these, so escapes take their place.
        if isinstance(self.detail, str) and not self.detail.isascii():
            object.__setattr__(self, "detail", self.detail.encode("utf-8", "backslashreplace").decode())
