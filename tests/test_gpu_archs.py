"""Kernels for older archs: a newer GPU runs their PTX, with all that replaces what they lack."""

import pytest
import torch
from arch_spread import plans_on

from hadagen.compiler.codegen import render
from hadagen.compiler.nvrtc import Nvrtc
from hadagen.compiler.toolchain import device_headers
from hadagen.gpu import driver
from hadagen.measure.verify import Verifier
from hadagen.plan.arch import load_arch
from hadagen.problem.target import generation, known_archs
from hadagen.problem.trial import Outcome

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", known_archs())
def test_every_structure_of_a_kernel_is_right_on_a_gpu_of_that_arch_or_a_newer_one(name: str) -> None:
    major, minor = torch.cuda.get_device_capability()
    if generation(name) > 10 * major + minor:
        pytest.skip(f"this GPU, of sm{major}{minor}, is older")
    verifier = Verifier(torch.device("cuda"), torch.cuda.current_stream().cuda_stream)
    for plan in plans_on(load_arch(name)):
        source = render(plan)
        target = f"compute_{generation(name)}{'a' * source.specific}"  # sm90a and the like: no newer GPU runs its PTX
        if source.specific and generation(name) != 10 * major + minor:
            continue
        built = Nvrtc.find().compile(source.text, source.entry, target, ["-std=c++17"], device_headers())
        answer = verifier.check(driver.load(built.ptx, source.entry, plan.launch), plan.problem)
        assert answer.outcome is Outcome.OK, (plan.problem.key, plan.describe(), answer.detail)
