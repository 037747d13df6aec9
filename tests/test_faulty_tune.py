"""A tune that meets kernels which crash, hang, give garbage or lose the device: each ends as what it is, and the
winners are those of a tune without them. `test_gpu_faults.py` does the same on a GPU, with real kernels."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_search import arch, build, make_kernel, problems
from faulty_tune import FaultyTune
from gpu_faults import FAULTS, broken_kernel, broken_source
from measure_sample import SPEC
from real_compilers import needs_compiler
from timed_by_digest import TimesByDigest

from hadagen.arch import load_arch
from hadagen.codegen import render
from hadagen.launch import Source
from hadagen.measure import DeviceRunner
from hadagen.measure.messages import Answer, Measure, Race
from hadagen.problem import Problem
from hadagen.space import Space, build_plan
from hadagen.toolchain import Toolchain
from hadagen.trial import Kernel, Outcome

# What a process with a GPU meets, and how its trial ends.
ENDS = {
    "crashes": Outcome.LAUNCH_FAILED,
    "hangs": Outcome.TIMEOUT,
    "loses_the_device": Outcome.LAUNCH_FAILED,
    "is_refused": Outcome.LAUNCH_FAILED,
    "garbage": Outcome.WRONG_ANSWER,
    "unstable": Outcome.UNSTABLE,
}
SILENCE_S = 0.5


class FaultyService(TimesByDigest):
    """Kernels do what their entry says."""

    usable = True

    def handle(self, request: Measure | Race) -> Any:
        assert isinstance(request, Measure)
        entry = request.kernel.entry
        if entry == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif entry == "hangs":
            with self._watch.on():
                time.sleep(1e6)
        elif entry in ("loses_the_device", "is_refused"):
            self.usable = entry == "is_refused"
            raise RuntimeError("an illegal memory access was encountered")
        elif entry in ENDS:
            return Answer(ENDS[entry], entry)
        return super().handle(request)

    def is_usable(self) -> bool:
        return self.usable


def named(entry: str) -> Callable[[Source], Kernel]:
    return lambda source: replace(make_kernel(source), entry=entry)


def test_broken_kernels_end_as_what_they_are_and_spoil_nothing_else(tmp_path: Path) -> None:
    searched = arch(chunks=(1, 2), warps=(1, 2), butterfly_carrier=("fp32",), min_blocks=(1,))
    faults = {entry: named(entry) for entry in ENDS}
    faulty = FaultyTune(tmp_path, searched, problems(256), 24, build, faults)
    with DeviceRunner(
        0, [make_kernel(Source("copy", "", SPEC))], silence_s=SILENCE_S, make_service=FaultyService
    ) as runner:
        compared = faulty.compare(runner)
    assert {found.fault: found.trial.outcome for found in compared.found} == ENDS
    assert compared.changed == []
    sound, with_faults = compared.winners
    assert sound == with_faults != {}
    assert all(found.lost < runner._timeout_s for found in compared.found)  # a hang is noticed by its silence


@needs_compiler
def test_the_faults_for_a_gpu_compile() -> None:
    problem, sm90 = Problem.of(1024, "float16"), load_arch("sm90")
    source = render(build_plan(problem, Space(problem, sm90).seeds()[0], sm90))
    sources = [broken_source(source, fault) for fault in FAULTS.values()]
    built = dict(zip(FAULTS, Toolchain.find().build_all(sources, sm90), strict=True))
    kernels = [
        *Toolchain.find().build_all([source], sm90),
        *(kernel if FAULTS[name].body else broken_kernel(kernel, name) for name, kernel in built.items()),
    ]
    assert len({kernel.digest for kernel in kernels}) == len(FAULTS) + 1
    for kernel in kernels:
        kernel.check()
