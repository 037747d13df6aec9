"""What NVML tells of a real GPU: its class, that it is idle, and that another process runs on it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_gpu_measure import Bench, bench

from hadagen.gpu.gpu_class import class_name, memory_of, nvml_gpu
from hadagen.measure import DeviceRunner, device_environment
from hadagen.measure.monitor import state_text
from hadagen.problem.target import model_of
from hadagen.problem.trial import Disturbed, Outcome, Trial
from hadagen.runtime.choose.device import cuda_device

__all__ = ["bench"]  # fixture
pytestmark = pytest.mark.gpu

LOAD = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
b = a @ a
torch.cuda.synchronize()
print("running", flush=True)
while True:
    for _ in range(20):
        torch.mm(a, a, out=b)
    torch.cuda.synchronize()
"""
# In a process of its own, because this one may have had a context before there is a monitor.
LOOKING = """
import json, sys, time
import torch
from hadagen.gpu.gpu_class import nvml_gpu
from hadagen.measure import device_environment
from hadagen.measure.monitor import Monitor, state_text
gpu = nvml_gpu(0)
monitor = Monitor(gpu, device_environment(0), lambda: torch.cuda.memory_reserved(0))
a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
def work():
    for _ in range(100):
        a @ a
    torch.cuda.synchronize()
work()
monitor.begin()
for line in sys.stdin:
    work()
    started = time.monotonic()
    found = monitor.look(after=True)
    seconds = time.monotonic() - started
    print(json.dumps([found.reason if found else "", seconds, state_text(gpu)]), flush=True)
"""


@contextmanager
def load() -> Iterator[None]:
    """Another process that uses the GPU all the time."""
    with subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "running\n"
            yield
        finally:
            process.kill()


def test_tuner_and_calls_have_the_same_class() -> None:
    import torch

    environment, device = device_environment(0), cuda_device(0)
    assert environment.gpu == device.gpu
    assert model_of(environment.gpu) == torch.cuda.get_device_name(0)
    assert environment.memory_bytes == memory_of(0) > 1 << 30


def test_nvml_knows_the_gpu_by_its_bus() -> None:
    environment, gpu = device_environment(0), nvml_gpu(0)
    if gpu is None:
        pytest.skip("NVML does not answer here")
    print(state_text(gpu))
    assert gpu.power_limit_watts() == (environment.power_limit_watts or None)
    assert class_name(model_of(environment.gpu), environment.memory_bytes, gpu) == environment.gpu


def test_an_idle_gpu_says_nothing_and_another_process_is_noticed() -> None:
    if (gpu := nvml_gpu(0)) is None or gpu.utilization() is None:
        pytest.skip("NVML does not tell here what runs")
    command = [sys.executable, "-c", LOOKING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def look() -> str:
            process.stdin.write("look\n")
            process.stdin.flush()
            reason, seconds, state = json.loads(process.stdout.readline())
            print(f"{reason or 'nothing disturbs'} ({seconds * 1e3:.1f} ms); {state}")
            return str(reason)

        try:
            assert [look() for _ in range(3)] == [""] * 3
            with load():
                assert any("uses the GPU" in look() for _ in range(10))
            assert any(look() == "" for _ in range(10))
        finally:
            process.kill()


def test_no_trial_is_made_beside_another_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    if (gpu := nvml_gpu(0)) is None or gpu.utilization() is None:
        pytest.skip("NVML does not tell here what runs")
    monkeypatch.setattr("hadagen.measure.runner._PAUSES_S", (1.0, 1.0))
    with DeviceRunner(0, bench.copies) as runner:
        _ = runner.environment
        with load():
            ((_, found),) = runner.run([bench.right])
        assert isinstance(found, Disturbed)
        assert "uses the GPU" in found.reason
        ((_, trial),) = runner.run([bench.right])
        assert isinstance(trial, Trial)
        assert trial.outcome is Outcome.OK
    print(found.reason)
