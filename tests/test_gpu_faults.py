"""A tune on a GPU that meets broken kernels: each ends as what it is, no hang costs more than 10 s, and the winners are
those of a tune without them.

    python -m pytest tests/test_gpu_faults.py --figures docs/data
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faulty_tune import FAULTS, FaultyTune, broken_kernel, broken_source
from real_compilers import needs_compiler

from hadagen.compiler.toolchain import Toolchain
from hadagen.measure import DeviceRunner, copy_sources
from hadagen.plan.arch import load_arch
from hadagen.problem.launch import Source
from hadagen.problem.problem import Problem
from hadagen.problem.trial import Kernel, Outcome
from hadagen.runtime.choose.device import cuda_device

pytestmark = [pytest.mark.gpu, needs_compiler]

PROBLEMS = [Problem.of(256, "float16"), Problem.of(4096, "float16", "fast")]
TRIALS = 40
MOST_LOST = 10.0  # seconds, to a kernel that hangs


def test_a_tune_survives_every_broken_kernel(tmp_path: Path, figure: Callable[[str, Any], None]) -> None:
    arch = load_arch(cuda_device(0).arch)
    toolchain = Toolchain.find()

    def broken(name: str, source: Source) -> Kernel:
        fault = FAULTS[name]
        (kernel,) = toolchain.build_all([broken_source(source, fault)], arch)
        return kernel if fault.body else broken_kernel(kernel, name)

    faults = {name: partial(broken, name) for name in FAULTS}
    faulty = FaultyTune(tmp_path, arch, PROBLEMS, TRIALS, partial(toolchain.build, arch=arch), faults, each=2)
    with DeviceRunner(0, toolchain.build_all(copy_sources(), arch)) as runner:
        compared = faulty.compare(runner)
        environment = runner.environment
    sound, with_faults = compared.winners
    figure(
        "faults",
        {
            "gpu": environment.gpu,
            "driver": environment.driver,
            "trials": TRIALS * len(PROBLEMS),
            "cells": len(sound),
            "same_winners": sum(with_faults.get(cell) == winner for cell, winner in sound.items()),
            "changed": [f"{trial.problem.key} {trial.outcome.value}: {trial.detail}" for trial in compared.changed],
            "faults": [
                {
                    "fault": found.fault,
                    "outcome": found.trial.outcome.value,
                    "detail": found.trial.detail,
                    "lost_s": round(found.lost, 2),
                }
                for found in compared.found
            ],
        },
    )
    assert {found.fault for found in compared.found} == set(FAULTS)
    for found in compared.found:
        fault = FAULTS[found.fault]
        assert found.trial.outcome is fault.outcome, (found.fault, found.trial.detail)
        # Other knobs may have made the same broken kernel before.
        says = fault.says in found.trial.detail or found.trial.detail.startswith("same kernel as")
        assert says, (found.fault, found.trial.detail)
        assert found.trial.timings == ()
    assert compared.changed == []
    assert sound == with_faults != {}
    assert max(found.lost for found in compared.found if found.trial.outcome is Outcome.TIMEOUT) <= MOST_LOST
